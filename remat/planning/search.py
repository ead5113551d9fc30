"""Where to plan next, from what the compiler made of the plans before: the search of `remat.fit` and `confirm=`.

What is turned is a `Knob`, from the cheapest plans to those with the least memory; what comes of a setting is a
`Trial`. Memory is taken to grow linearly with its prediction between two trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from remat.core.interrupt import raise_interrupt

__all__ = [
    "ERROR",
    "Knob",
    "Trial",
    "below",
    "faster",
    "fastest",
    "further",
    "is_among",
    "more_may_be_less_time",
    "search",
]

# All chosen by look, on the models of `benchmarks/fit.py`. None decides what fits, which the compiler says: only
# how many compiles are spent, and how near to the limit the result comes. Shares:
_MARGIN = 0.01  # of the memory: how far below the limit the next compile aims
ERROR = 0.1  # of a prediction: what is predicted not to fit by less is compiled
_STEEP_ENOUGH = 0.05  # bytes compiled per byte predicted, below which a prediction says nothing
_INSIDE = 0.02  # of the way between two trials: how near to either of them the next may be placed
_GAP = 0.1  # of the fastest's prediction: nothing is looked for in smaller gaps around it
_AS_FAST = 0.01  # of the roofline time: less than this is no difference


class Trial(Protocol):
    """What the compiler made of plans."""

    @property
    def predicted_bytes(self) -> int:
        """What the plans say: of their peak, or of what they keep."""
        ...

    @property
    def total_bytes(self) -> int:
        """What is held to the limit."""
        ...

    @property
    def temp_bytes(self) -> int:
        """The part of it that depends on the plans."""
        ...

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        ...

    @property
    def recompute_seconds(self) -> float:
        """What the plans repeat, by their own estimate."""
        ...

    @property
    def roofline_seconds(self) -> float | None:
        """What the compiled program takes at least, None if the device's rates are not known."""
        ...


T = TypeVar("T", bound=Trial)


class Knob(Protocol[T]):
    """What is turned; the same plans are the same trial."""

    def at(self, target_bytes: int, low: T | None, high: T | None) -> T | None:
        """Compiles plans predicted at about `target_bytes`, between two trials; None if there are none."""
        ...

    def least(self) -> T:
        """Compiles the plans with the least memory."""
        ...

    def another(self) -> T | None:
        """Compiles plans of another kind that take little memory, for when the least do not fit; None after all."""
        ...


def search(
    knob: Knob[T],
    first: T,
    limit_bytes: int,
    *,
    left: Callable[[], int],
    known: Sequence[T] = (),
    tolerance: float,
    first_is_alike: bool = True,
) -> list[T]:
    """Turns a knob until its plans fit and little is unused.

    Args:
        knob: to turn.
        first: trial of plans that repeat little or nothing.
        limit_bytes: what `total_bytes` is to be within.
        left: how many more compiles there may be.
        known: other trials that were made before. If one of them leaves little unused, plans of the knob's are
            compiled once all the same: with the same memory they may be faster.
        tolerance: share of the limit that may be left unused before another compile is spent.
        first_is_alike: whether predictions of `first` and of the others err alike. The program as it is has no
            schedule of ours: XLA orders it.

    Returns:
        All trials, those known included. If none fits, the one with the least memory is among them, unless what
        does not depend on plans is too large alone.
    """
    trials = [*known, first]
    if first.fits or limit_bytes <= first.total_bytes - first.temp_bytes:
        return trials  # nothing to gain, or not even without any temporaries
    has_least = asked = False
    while left() > 0:
        raise_interrupt()
        low = max((t for t in trials if t.fits), key=lambda t: t.predicted_bytes, default=None)
        fails = [t for t in trials if not t.fits]
        if low is None and has_least:
            found = _between(knob, trials, limit_bytes) or knob.another()
            if found is None:
                break
            if not is_among(found, trials):
                trials.append(found)
            continue
        if low is not None:
            fails = [t for t in fails if t.predicted_bytes > low.predicted_bytes]
            enough = limit_bytes - low.total_bytes <= tolerance * limit_bytes
            if not fails or (enough and (asked or not is_among(low, known))):
                break
            asked = enough
        target = _next(fails, low, limit_bytes, None if first_is_alike else first)
        high = min(fails, key=lambda t: t.predicted_bytes)
        found = None
        if target is not None and (low is not None or left() > 1):
            found = knob.at(target, low, high)
            if low is not None and found is not None and is_among(found, trials):
                # Plans come in steps, of a loop say, and the next one may begin just above.
                found = knob.at((target + high.predicted_bytes) // 2, low, high)
        if low is None and (found is None or is_among(found, trials)):
            found, has_least = knob.least(), True
        if found is None:
            break
        if not is_among(found, trials):
            trials.append(found)
        elif low is not None:
            break
    if not any(trial.fits for trial in trials):
        raise_interrupt()
    return trials


def further(knob: Knob[T], first: T, trials: Sequence[T], *, left: Callable[[], int]) -> list[T]:
    """Looks for less time in less memory, where something with more memory is slower than what fits.

    Where to keep a value takes longer than to compute it again, less memory is less time, and the fastest plan
    within a limit is far below it. Below the smallest, the next place is a half of what `first` is predicted to
    take, a quarter and so on, the same for every limit: with more memory allowed, what is found with less is not
    missed. Around the fastest it is the middle of the wider gap.

    Args:
        knob: to turn.
        first: the trial that places are shares of.
        trials: that were made before.
        left: how many more compiles there may be.

    Returns:
        All trials, with those that were added; none are where roofline times are not known.
    """
    found = list(trials)
    while left() > 0:
        raise_interrupt()
        timed = [trial for trial in found if trial.roofline_seconds is not None]
        fitting = sorted((t for t in timed if t.fits), key=lambda t: t.predicted_bytes)
        if not fitting:
            break
        best = fastest(fitting)
        seconds = best.roofline_seconds or 0.0
        enough = (1 + _AS_FAST) * min(trial.roofline_seconds or 0.0 for trial in timed)
        larger = [t for t in timed if t.total_bytes > best.total_bytes]
        if seconds > enough or not any((t.roofline_seconds or 0.0) > enough for t in larger):
            break  # more memory is less time, or the same
        best = next(t for t in fitting if (t.roofline_seconds or 0.0) <= enough)
        below, above = _neighbours(best, fitting)
        if below is None:
            place = first.predicted_bytes // 2
            while place >= best.predicted_bytes > 0:
                place //= 2
        else:
            low, high = below, best
            if above is not None and _gap(best, above) > _gap(below, best):
                low, high = best, above
            if _gap(low, high) <= _GAP * best.predicted_bytes:
                break
            place = (low.predicted_bytes + high.predicted_bytes) // 2
        trial = knob.at(place, below, above)
        if trial is None or is_among(trial, found):
            break
        found.append(trial)
    return found


def below(
    knob: Knob[T],
    first: T,
    trials: Sequence[T],
    *,
    left: Callable[[], int],
    others: Sequence[T] = (),
) -> list[T]:
    """Looks once where nobody looked, below the fastest that fits: XLA may make less memory less time there, too.

    The place is the next of a ladder of shares of what `first` is predicted to take, two steps to a half: the same
    places for every limit, so that a smaller one rarely finds what a larger one had missed. If that is the fastest,
    it is gone on with (`further`). Arguments and results are those of `further`; `others` are trials that are not
    of the knob's plans: if one of them lies there, the place is what it takes, where those may be faster.
    """
    found = list(trials)
    fitting = [t for t in found if t.fits and t.roofline_seconds is not None]
    if not fitting or left() <= 0:
        return found
    best = fastest(fitting)
    place, enough_less = first.predicted_bytes, int((1 - _GAP) * best.predicted_bytes)
    while place > enough_less:
        place = round(place / math.sqrt(2))
    there = [t for t in fitting if place <= t.predicted_bytes <= enough_less]
    if best is first or place <= 0 or not all(is_among(t, others) for t in there):
        return found
    place = max((t.predicted_bytes for t in there), default=place)
    trial = knob.at(place, None, best)
    if trial is None or is_among(trial, found):
        return found
    found.append(trial)
    return further(knob, first, found, left=left) if fastest([best, trial]) is trial else found


def _neighbours(trial: T, ordered: Sequence[T]) -> tuple[T | None, T | None]:
    """The next with less and with more memory by prediction."""
    place = next(i for i, other in enumerate(ordered) if other is trial)
    return (
        ordered[place - 1] if place > 0 else None,
        ordered[place + 1] if place + 1 < len(ordered) else None,
    )


def _gap(low: Trial, high: Trial) -> int:
    return high.predicted_bytes - low.predicted_bytes


def more_may_be_less_time(trials: Sequence[Trial]) -> bool:
    """Whether of all that fit the one with the most memory is the fastest, or nothing fits."""
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        return True
    best = fastest(fitting)
    return all(trial.total_bytes <= best.total_bytes for trial in fitting)


def fastest(fitting: Sequence[T]) -> T:
    """The least roofline time of the compiled programs, or of what plans repeat where that is not known."""
    if any(trial.roofline_seconds is None for trial in fitting):
        return min(fitting, key=lambda t: (t.recompute_seconds, t.total_bytes))
    return min(fitting, key=lambda t: (t.roofline_seconds or 0.0, t.total_bytes))


def faster(trial: T, others: Sequence[T]) -> list[T]:
    """Those of the others that `fastest` takes before a trial."""
    return [other for other in others if fastest([trial, other]) is other]


def _between(knob: Knob[T], trials: Sequence[T], limit_bytes: int) -> T | None:
    """A trial in the widest gap of predictions, None if the least plans are far too large or none is new.

    The least plans are so by prediction; what the compiler makes of a plan that repeats less may be smaller. They
    are far too large if they would not fit with the best error that a prediction had, by a margin.
    """
    ordered = sorted(trials, key=lambda t: t.predicted_bytes)
    least = ordered[0]
    wanted = limit_bytes - (least.total_bytes - least.temp_bytes)
    shares = [t.temp_bytes / t.predicted_bytes for t in trials if t.predicted_bytes > 0]
    if not shares or (1 - ERROR) * min(shares) * least.predicted_bytes > wanted:
        return None
    if len(ordered) < 2:
        return None
    low, high = max(pairwise(ordered), key=lambda pair: _gap(*pair))
    found = knob.at((low.predicted_bytes + high.predicted_bytes) // 2, low, high)
    return None if found is None or is_among(found, trials) else found


def is_among(trial: Trial, trials: Sequence[Trial]) -> bool:
    """Whether a trial is one of some, the very same."""
    return any(trial is other for other in trials)


def _next(
    fails: Sequence[Trial], low: Trial | None, limit_bytes: int, odd: Trial | None
) -> int | None:
    """The prediction to aim at; None if predictions are no guide. `odd` says nothing of a slope."""
    high = min(fails, key=lambda t: t.predicted_bytes)
    # What is neither temporary nor prediction is the same in all trials.
    wanted = limit_bytes - int(_MARGIN * limit_bytes) - (high.total_bytes - high.temp_bytes)
    if low is not None:
        rise = high.temp_bytes - low.temp_bytes
        share = (wanted - low.temp_bytes) / rise if rise > 0 else 0.5
        share = min(max(share, _INSIDE), 1 - _INSIDE)
        return low.predicted_bytes + round(share * (high.predicted_bytes - low.predicted_bytes))
    if wanted <= 0:
        return None
    others = [t for t in fails if t.predicted_bytes > high.predicted_bytes and t is not odd]
    if others:
        near = min(others, key=lambda t: t.predicted_bytes)
        slope = (near.temp_bytes - high.temp_bytes) / (near.predicted_bytes - high.predicted_bytes)
        if slope < _STEEP_ENOUGH:
            return None
        target = high.predicted_bytes - round((high.temp_bytes - wanted) / slope)
    else:
        target = high.predicted_bytes * wanted // max(high.temp_bytes, 1)
        if (
            high is not odd
        ):  # the more careful of: a multiple of the prediction, and a constant above it
            target = min(target, high.predicted_bytes - (high.temp_bytes - wanted))
    return target if target > 0 else None
