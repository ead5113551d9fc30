"""A budget that the compiler confirms: what is planned is compiled, and planned again until that fits.

What a plan predicts is the memory of a simulated program. The compiler is asked for that of the real one: first of
the function as it is, if the budget is a fraction of that; then of the plan that repeats nothing, which says if
others are needed; then of these, each aimed by what came of those before (`remat.planning.search`). Of all that
fit the fastest is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from remat.core.errors import BudgetError, CompileError, DeviceMemoryError
from remat.core.interrupt import interrupted, raise_interrupt, say, say_best
from remat.planning import search
from remat.planning.bodies import Menus
from remat.planning.planners import PolicyPlanner
from remat.planning.protocol import Planner
from remat.planning.resort import Limit, limit_bytes
from remat.planning.smallest import smallest_plan
from remat.planning.time_limit import SharedTime
from remat.plans.plan import Plan
from remat.plans.record import Confirmed
from remat.plans.report import human_bytes
from remat.policies import Full, MinCut, Policy, Unchanged
from remat.policies.base import BudgetPolicy, describe_options
from remat.policies.min_cut import LowMemory

__all__ = ["UNCHANGED", "Bench", "BudgetKnob", "Made", "Setting", "confirmed"]

_ANCHORS = 2  # plans of quick policies that are compiled before the search; the others only where nothing fits
_TOLERANCE = 0.1
"""Share of a budget that may be left unused before another compile is spent. Bound: so much memory."""


@dataclass(frozen=True)
class Setting:
    """Where a knob stands: a planner, and what it does in words."""

    label: str
    planner: Planner


# The program is that of the plain step.
UNCHANGED = Setting("as without rematerialization", PolicyPlanner(Unchanged()))

T = TypeVar("T", bound=search.Trial)
T_co = TypeVar("T_co", bound=search.Trial, covariant=True)


class Bench(Protocol[T_co]):
    """Plans and compiles at settings; nothing is planned or compiled twice."""

    def plan(self, setting: Setting) -> Plan:
        """Plans; compiles nothing."""
        ...

    def trial(self, setting: Setting) -> T_co:
        """Compiles; plans that were compiled before are that trial again."""
        ...


class BudgetKnob(Generic[T]):
    """The budget of one function's plan; a `remat.planning.search.Knob`.

    The policy's time limit holds for all its plannings together: each has half of what is left.
    """

    def __init__(self, bench: Bench[T], policy: BudgetPolicy) -> None:
        self.bench, self.policy = bench, policy
        self.time = SharedTime(policy)
        self._least: T | None = None
        self._menus: Menus = {}
        self._others = iter(self._quick)

    def cheapest(self) -> T:
        """Compiles the cheapest plan."""
        return self.bench.trial(Setting("no budget", PolicyPlanner(self.policy)))

    def plain(self, limit_bytes: int) -> T | None:
        """Compiles the program without rematerialization, if it is predicted to need at most `limit_bytes`."""
        found = self.bench.plan(UNCHANGED).peak_bytes <= limit_bytes
        return self.bench.trial(UNCHANGED) if found else None

    def least(self) -> T:
        """Compiles the plan with the smallest predicted peak."""
        if self._least is None:
            plain = self.bench.plan(UNCHANGED)
            setting = None if plain.loops else self._nearest_to_nothing()
            if setting is None:
                baseline = plain.baseline_peak_bytes
                with self.time.next():
                    plan = smallest_plan(lambda b: self.bench.plan(self._within(b)), baseline)
                    setting = self._within(plan.budget_bytes or plan.peak_bytes)
                    self.bench.plan(setting)
            self._least = self.bench.trial(setting)
        return self._least

    def _nearest_to_nothing(self) -> Setting | None:
        """The smallest plan that the policy makes, asked for next to nothing, or of quick ones; None if none.

        It is not asked for that plan again: all the time may have been taken to find it.
        """
        nearest = replace(self._within(1, nearest=True), label="the smallest that was found")
        try:
            self._planned(nearest)
        except BudgetError:
            return None
        return min((nearest, *self._quick), key=lambda s: self.bench.plan(s).peak_bytes)

    def another(self) -> T | None:
        """Compiles another policy's plan: predicted to take more, the compiler may make less of it."""
        setting = next(self._others, None)
        return None if setting is None else self.bench.trial(setting)

    def anchors(self, plain: T, limit_bytes: int) -> Iterator[T]:
        """Compiles the plans of quick policies that may fit: the same for every budget.

        Of all that fits the fastest is taken, so that what these take is never undercut by a larger budget's plan.
        They say besides how far predictions are off. Left out is what neither fits as predicted nor as predicted
        and corrected by what `plain`, the program without rematerialization, was off, and that by a margin.
        """
        correction = plain.temp_bytes / max(plain.predicted_bytes, 1)
        for setting in self._quick[:_ANCHORS]:
            with self.time.without_search():
                predicted_bytes = self.bench.plan(setting).peak_bytes
            if (1 - search.ERROR) * min(1.0, correction) * predicted_bytes <= limit_bytes:
                yield self.bench.trial(setting)

    def at(self, target_bytes: int, low: T | None, high: T | None) -> T | None:
        """Compiles a plan that is asked for at the very place, or for the smallest peak that the refusal names."""
        del low, high
        for _ in range(2):
            setting = self._within(target_bytes, nearest=True)
            try:
                self._planned(setting)
            except BudgetError as error:
                target_bytes = error.smallest_peak_bytes or 0
            else:
                return self.bench.trial(setting)
        return self.least()

    def _planned(self, setting: Setting) -> Plan:
        """Plans in a share of the time."""
        with self.time.next():
            return self.bench.plan(setting)

    def _within(self, budget_bytes: int, nearest: bool = False) -> Setting:
        budget = max(budget_bytes, 1)
        return Setting(
            f"a budget of {human_bytes(budget)}",
            PolicyPlanner(self.policy, budget, margin=0, nearest=nearest, menus=self._menus),
        )

    @property
    def _quick(self) -> tuple[Setting, ...]:
        """Of quick policies; a published algorithm (`falls_back` is False) is not replaced by another."""
        device = self.policy.device
        others: tuple[tuple[str, Policy], ...] = (
            ("a minimum cut", MinCut(device=device)),
            ("little memory", LowMemory(device=device)),
            ("nothing kept", Full()),
        )
        return tuple(
            Setting(label, PolicyPlanner(other))
            for label, other in others
            if self.policy.falls_back
        )


class Made(Protocol):
    """A function with its plan, traced: what is compiled."""

    @property
    def plan(self) -> Plan:
        """The plan."""
        ...


M = TypeVar("M", bound=Made)


@dataclass(eq=False)
class _Trial(Generic[M]):
    """What the compiler made of a plan; `found` is None if it could not compile it, so that it fits nothing.

    `refused_bytes` is what that would have taken, if the compiler refused it for its size; else 0. `is_whole` says
    whether all that will be run was compiled: what is looked at on the way is the gradient alone.
    """

    setting: Setting
    made: M
    found: Confirmed | None
    refused_bytes: int
    limit_bytes: int
    is_whole: bool = False

    @property
    def predicted_bytes(self) -> int:
        return self.made.plan.peak_bytes

    @property
    def total_bytes(self) -> int:
        return self.temp_bytes

    @property
    def temp_bytes(self) -> int:
        if self.found is None:  # as refused or predicted, but too large: the search goes on below
            return max(self.refused_bytes or self.predicted_bytes, self.limit_bytes + 1)
        return self.found.temp_bytes

    @property
    def is_failure(self) -> bool:
        """Whether nothing is known of the program."""
        return self.found is None and not self.refused_bytes

    @property
    def fits(self) -> bool:
        return self.found is not None and self.found.temp_bytes <= self.limit_bytes

    @property
    def recompute_seconds(self) -> float:
        return self.made.plan.recompute_seconds

    @property
    def roofline_seconds(self) -> float | None:
        return None if self.found is None else self.found.roofline_seconds


class _Bench(Generic[M]):
    """Makes and compiles the plans of one function."""

    def __init__(
        self,
        make: Callable[[Planner], M],
        compiled: Callable[[M, Confirmed | None], Confirmed],
        limit_bytes: int,
    ) -> None:
        self.make, self.compiled, self.limit_bytes = make, compiled, limit_bytes
        self.trials: dict[str, _Trial[M]] = {}  # by digest of the plan
        self.failure: CompileError | None = None  # the last one

    def made(self, setting: Setting) -> M:
        return self.make(setting.planner)

    def plan(self, setting: Setting) -> Plan:
        return self.made(setting).plan

    def trial(self, setting: Setting) -> _Trial[M]:
        made = self.made(setting)
        key = made.plan.digest()
        if key not in self.trials:
            say(f"{setting.label}: compiling, number {len(self.trials) + 1}")
            found, refused_bytes = self._found(setting, made, None)
            self.trials[key] = _Trial(setting, made, found, refused_bytes, self.limit_bytes)
        return self.trials[key]

    def whole(self, trial: _Trial[M]) -> _Trial[M]:
        """Compiles what is left of a trial's program, and returns the trial, which may not fit any more."""
        if not trial.is_whole and trial.found is not None:
            trial.found, trial.refused_bytes = self._found(trial.setting, trial.made, trial.found)
            trial.is_whole = True
        return trial

    def _found(
        self, setting: Setting, made: M, before: Confirmed | None
    ) -> tuple[Confirmed | None, int]:
        """What the compiler says, and the bytes of what it refused for its size."""
        try:
            found = self.compiled(made, before)
        except DeviceMemoryError as error:
            self.failure = error
            say(f"{setting.label}: {human_bytes(error.temp_bytes)}, which the device does not have")
            return None, error.temp_bytes
        except CompileError as error:
            # One program may be too much for a compiler that takes others; two are not by chance.
            if self.trials and all(t.is_failure for t in self.trials.values()):
                raise
            self.failure = error
            say(f"{setting.label}: cannot be compiled ({_first_line(error)})")
            return None, 0
        if before is not None and found.temp_bytes == before.temp_bytes:
            return found, 0
        size = f"{setting.label}: {human_bytes(found.temp_bytes)} compiled for {found.device}"
        if found.temp_bytes <= self.limit_bytes:
            say_best(size)
        else:
            say(size)
        return found, 0


def confirmed(
    planner: PolicyPlanner,
    max_compiles: int,
    make: Callable[[Planner], M],
    compiled: Callable[[M, Confirmed | None], Confirmed],
    as_it_is: Callable[[M], int],
) -> tuple[M, Plan]:
    """Returns a function with a plan whose compiled program is within the planner's budget, and that plan.

    Args:
        planner: with a budget; a fraction is of what the function takes as it is.
        max_compiles: at most so many plans are compiled.
        make: plans with a planner.
        compiled: what the compiler says of what was made, with None of the gradient alone; given that, of whatever
            will be run and takes more. The latter is asked of what is to be returned, and of the plan that repeats
            nothing.
        as_it_is: the bytes of the compiled function without its plan: jax may keep other values than the plan that
            repeats nothing, mostly in loops.

    Raises:
        BudgetError: no compiled program fits; the message has the smallest.
        CompileError: the compiler fails for the first two plans, or for the function as it is if the budget is a
            fraction of that. Any other that it fails for is passed over, and a note says so.
    """
    assert planner.budget is not None
    make = functools.cache(make)
    policy = planner.policy
    limit = _limit_bytes(planner.budget, lambda: as_it_is(make(UNCHANGED.planner)))
    bench = _Bench(make, compiled, limit)
    plain = bench.whole(bench.trial(UNCHANGED))
    own = Setting("no budget", replace(planner, budget=None, confirm=None))

    def left() -> int:
        return 0 if interrupted() else max_compiles - len(bench.trials)

    knob = BudgetKnob(bench, policy) if isinstance(policy, BudgetPolicy) else None

    def searched(trials: list[_Trial[M]], spared: int = 0) -> list[_Trial[M]]:
        if knob is None:
            return trials
        return search.search(
            knob,
            plain,
            limit,
            left=lambda: left() - spared * any(trial.fits for trial in bench.trials.values()),
            known=[trial for trial in trials if trial is not plain],
            tolerance=_TOLERANCE,
            first_is_alike=False,
        )

    trials = [plain]
    if plain.fits or knob is None:
        asked = bench.trial(own)
        trials += [] if search.is_among(asked, trials) else [asked]
    if knob is not None:
        waiting, anchors = knob.anchors(plain, limit), list[_Trial[M]]()
        while left() > 1 and (anchor := next(waiting, None)) is not None:
            anchors += [] if search.is_among(anchor, [*trials, *anchors]) else [anchor]
        trials += anchors
        trials = search.further(knob, plain, trials, left=left)
        if search.more_may_be_less_time(trials):
            trials = search.further(knob, plain, searched(trials, spared=1), left=left)
        trials = search.below(knob, plain, trials, left=left, others=anchors)
    while True:
        fitting = [t for t in trials if t.fits]
        if not fitting:
            raise_interrupt()
            if all(trial.is_failure for trial in trials) and bench.failure is not None:
                raise bench.failure
            smallest = _smallest(bench, trials)
            count = sum(not trial.is_failure for trial in trials)
            raise _too_large(smallest, count, policy, limit, _advice(policy, knob, left()))
        best = search.fastest(fitting)
        if best.setting is not own and knob is None and trials[-1].fits:
            best = trials[-1]  # it was asked for
        if bench.whole(best).fits:
            break
        trials = searched(trials)
    assert best.found is not None
    plan = _finished(best, best.found, trials, planner, limit)
    if bench.failure is not None:
        failed = sum(trial.found is None for trial in bench.trials.values())
        note = f"{failed} of the plans could not be compiled ({_first_line(bench.failure)})"
        plan = replace(plan, notes=(*plan.notes, note))
    return best.made, plan


def _limit_bytes(budget: Limit, as_it_is: Callable[[], int]) -> int:
    if not isinstance(budget, float):
        return budget
    say("as it is: compiling")
    try:
        whole_bytes = as_it_is()
    except DeviceMemoryError as error:  # too large for the device, but known
        whole_bytes = error.temp_bytes
    return limit_bytes(budget, whole_bytes)


def _first_line(error: CompileError) -> str:
    return str(error).splitlines()[0]


def _finished(
    best: _Trial[M], found: Confirmed, trials: list[_Trial[M]], planner: PolicyPlanner, limit: int
) -> Plan:
    plan, policy = best.made.plan, planner.policy
    notes = [*plan.notes]
    if plan.policy_name != policy.name:
        label = best.setting.label
        notes = [note for note in notes if note != label]  # what follows says it, too
        notes.append(f"{label}: of what was compiled and fits the fastest")
    if best.temp_bytes < (1 - _TOLERANCE) * limit:
        why = _why_not_more(best, trials, policy)
        notes.append(f"{best.temp_bytes / limit:.0%} of the budget is used: {why}")
    return replace(
        plan,
        policy_name=policy.name,
        options=describe_options(policy),
        budget_bytes=limit,
        notes=tuple(notes),
        confirmed=replace(found, compiles=len(trials)),
    )


def _why_not_more(best: _Trial[M], trials: list[_Trial[M]], policy: Policy) -> str:
    """Why nothing that takes more of the budget was taken."""
    larger = [t for t in trials if not t.is_failure and t.temp_bytes > best.temp_bytes]
    faster = search.faster(best, larger)
    nearest = min((t.temp_bytes for t in faster if not t.fits), default=None)
    if nearest is not None:
        return f"the next larger that is faster takes {nearest:,} bytes"
    if faster and not isinstance(policy, BudgetPolicy):  # as asked for, whatever else fits
        return f"policy {policy.name!r} does not plan within budgets"
    if larger:
        return "what was compiled and takes more is not faster"
    return "nothing that was compiled takes more"


def _advice(policy: Policy, knob: BudgetKnob[Any] | None, left: int) -> str:
    """What to try where nothing fits, with so many compiles left."""
    if knob is None:
        return ", or try remat_policy='ilp', which plans within one"
    if left <= 0:
        return ", or allow for more compiles: confirm=remat.Confirm(compiles=12)"
    if knob.time.is_short:
        return f", or give the search more time: {type(policy).__name__}(seconds=...)"
    return ""


def _smallest(bench: _Bench[M], trials: list[_Trial[M]]) -> _Trial[M]:
    """The smallest of what was compiled, with all that will be run: as a budget it can be met."""
    while True:
        best = min((t for t in trials if not t.is_failure), key=lambda t: t.temp_bytes)
        if best.is_whole or best.found is None or interrupted():
            return best
        bench.whole(best)


def _too_large(
    best: _Trial[Any], count: int, policy: Policy, limit: int, advice: str
) -> BudgetError:
    # Of none is the device known where the compiler refused all for their size.
    where = "" if best.found is None else f" for {best.found.device}"
    what = f"of {count} plans compiled{where} the smallest" if count > 1 else f"compiled{where} it"
    return BudgetError(
        f"policy {policy.name!r} does not meet the budget of {limit:,} bytes: {what} takes "
        f"{best.temp_bytes:,} bytes ({best.setting.label}). Raise the budget{advice}.",
        smallest_peak_bytes=best.temp_bytes,
    )
