"""The search of `remat.fit`: where to turn the knob next, from what the compiler made of the settings before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from remat.core.errors import BudgetError
from remat.core.interrupt import raise_interrupt
from remat.fitting.job import Options, Trial
from remat.fitting.knobs import Knob

__all__ = ["search", "too_large"]

# All chosen by look, on the models of `benchmarks/fit.py`. None decides what fits, which the compiler says: only
# how many compiles are spent, and how near to the limit the result comes. Shares:
_TOLERANCE = 0.02  # of the memory: what may be left unused before another compile is spent
_MARGIN = 0.01  # of the memory: how far below the limit the next compile aims; half of what may be left unused
_NEAR = 0.25  # of the temporaries: how far too large the least plans may be for others to be tried
_NEARLY = 0.02  # of the room for temporaries: how far too large the plain step may be predicted to be compiled
_STEEP_ENOUGH = 0.05  # bytes compiled per byte predicted, below which a prediction says nothing
_INSIDE = 0.02  # of the way between two trials: how near to either of them the next may be placed


def search(
    knob: Knob,
    options: Options,
    compiles: Callable[[], int],
    known: Sequence[Trial] = (),
) -> list[Trial]:
    """Turns a knob until the step fits and little is unused.

    Args:
        knob: to turn.
        options: the memory, and how many compiles there may be.
        compiles: how many there were so far.
        known: trials that were made before.

    Returns:
        All trials, those known included. If none fits, the one with the least memory is among them, unless
        arguments and results alone are too large.
    """
    limit_bytes = options.limit_bytes
    trials = [*known, knob.cheapest()]
    first = trials[-1]
    room = limit_bytes - (first.total_bytes - first.temp_bytes)
    timed = first.report.roofline_seconds is not None  # else nothing says which is faster
    if first.fits and timed and compiles() < options.max_compiles:
        plain = knob.plain(round((1 + _NEARLY) * room))
        return [*trials, plain] if plain is not None and not _is_among(plain, trials) else trials
    if first.fits or room <= 0:
        return trials  # nothing to gain, or not even without any temporaries
    least: Trial | None = None
    while compiles() < options.max_compiles:
        raise_interrupt()
        low = max((t for t in trials if t.fits), key=lambda t: t.predicted_bytes, default=None)
        fails = [t for t in trials if not t.fits]
        if low is None and least is not None:
            found = _between(knob, trials, least, limit_bytes) or knob.another()
            if found is None or _is_among(found, trials):
                break
            trials.append(found)
            continue
        if low is not None:
            fails = [t for t in fails if t.predicted_bytes > low.predicted_bytes]
            if not fails or limit_bytes - low.total_bytes <= _TOLERANCE * limit_bytes:
                break
        target = _next(fails, low, limit_bytes)
        high = min(fails, key=lambda t: t.predicted_bytes)
        found = None
        if target is not None and (low is not None or options.max_compiles - compiles() > 1):
            found = knob.at(target, low, high)
            if low is not None and found is not None and _is_among(found, trials):
                # Plans come in steps, of a loop say, and the next one may begin just above.
                found = knob.at((target + high.predicted_bytes) // 2, low, high)
        if low is None and (found is None or _is_among(found, trials)):
            found = least = knob.least()
        if found is None or _is_among(found, trials):
            break
        trials.append(found)
    if not any(trial.fits for trial in trials):
        raise_interrupt()
    return trials


def _between(knob: Knob, trials: Sequence[Trial], least: Trial, limit_bytes: int) -> Trial | None:
    """A trial in the widest gap of predictions, None if the least plans are far too large or none is new.

    The least plans are so by prediction; what the compiler makes of a plan that repeats less may be smaller.
    """
    excess = least.total_bytes - limit_bytes
    if excess > _NEAR * least.temp_bytes:
        return None
    above = [t for t in trials if t.predicted_bytes >= least.predicted_bytes]
    ordered = sorted(above, key=lambda t: t.predicted_bytes)
    pairs = sorted(pairwise(ordered), key=lambda p: p[0].predicted_bytes - p[1].predicted_bytes)
    for low, high in pairs[:1]:
        found = knob.at((low.predicted_bytes + high.predicted_bytes) // 2, low, high)
        if found is not None and not _is_among(found, trials):
            return found
    return None


def _is_among(trial: Trial, trials: Sequence[Trial]) -> bool:
    return any(trial is other for other in trials)


def _next(fails: Sequence[Trial], low: Trial | None, limit_bytes: int) -> int | None:
    """The prediction to aim at; None if predictions are no guide."""
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
    others = [t for t in fails if t.predicted_bytes > high.predicted_bytes]
    if others:
        near = min(others, key=lambda t: t.predicted_bytes)
        slope = (near.temp_bytes - high.temp_bytes) / (near.predicted_bytes - high.predicted_bytes)
        if slope < _STEEP_ENOUGH:
            return None
        target = high.predicted_bytes - round((high.temp_bytes - wanted) / slope)
    else:  # the more careful of: a constant above the prediction, and a multiple of it
        apart = high.predicted_bytes - (high.temp_bytes - wanted)
        times = high.predicted_bytes * wanted // max(high.temp_bytes, 1)
        target = min(apart, times)
    return target if target > 0 else None


def too_large(trials: Sequence[Trial], limit_bytes: int) -> BudgetError:
    best = min(trials, key=lambda t: t.total_bytes)
    report = best.report
    parts = {
        "arguments": report.argument_bytes,
        "results": report.output_bytes - report.alias_bytes,
        "temporaries": report.temp_bytes,
    }
    advice = {
        "arguments": "arguments dominate, which no plan changes: have fewer or smaller ones (a smaller "
        "optimizer state, bfloat16, sharding over devices)",
        "results": "results dominate, which no plan changes: donate the arguments they replace "
        "(donate_argnums)",
        "temporaries": "temporaries dominate: a smaller batch (remat.max_batch finds it), or wrap more of the "
        "step, best the whole loss: remat.checkpoint(loss, remat_policy='ilp')",
    }
    fixed = {name: size for name, size in parts.items() if name != "temporaries"}
    # Where these alone are too large, temporaries are not to blame, however large they are.
    blamed = fixed if sum(fixed.values()) >= limit_bytes else parts
    dominant = max(blamed, key=lambda name: blamed[name])
    return BudgetError(
        f"the step does not fit into {limit_bytes:,} bytes on {report.device}. The smallest that the "
        f"compiler confirmed is {best.total_bytes:,} bytes ({best.knob}; {len(trials)} compiled): "
        + ", ".join(f"{name} {size:,}" for name, size in parts.items())
        + f". Here {advice[dominant]}."
    )
