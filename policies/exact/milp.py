"""Exact planning of a `Problem`: the staged integer program, solved by refining relaxations, on HiGHS.

`solve_restricted` finds the cheapest sequence within a byte budget among the *staged* ones (Checkmate's
structure, Jain et al., MLSys 2020): the forward pass runs once; after the turn, between two first runs, repeatable
nodes run again in ascending order, each at most once. A sequence that repeats a node twice between two first runs,
or in another order, is not staged; it can be cheaper, or smaller, and what is proven of staged sequences is not
claimed of it (`Solved.covers`). The whole program does not go to the solver at once:

1. `cut_bound` (`remat.policies.exact.cut`) gives a lower bound, often that of the linear relaxation, by minimum
   cuts, and sequences to start from;
2. the program is relaxed by merging all stages between a few *checked* positions and imposing the budget only there
   (`relax_stages`): a few hundred variables where the whole has ten thousand. Its optimum is a lower bound; its
   solution is unrolled, each repetition where it is first needed, and judged by the referee. Within the budget,
   it is the optimum. Otherwise the positions where the budget is exceeded are added, and it is solved again;
3. if that does not converge, the whole program is solved from the best sequence known.

Every relaxation has all sequences of the whole program among its solutions at the same cost or less, so bounds only
grow, and the last step is exact. Departures from Checkmate: the formulation of `remat.policies.exact.stages` and
this refinement; `remat.policies.exact.checkmate_model` has the published one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from remat.core.interrupt import Keyboard
from remat.policies.exact.cut import CutBound, SavedSet, cut_bound, once_each
from remat.policies.exact.highs import LpMethod, MipOutcome, Stop, run_lp, run_mip
from remat.policies.exact.stages import (
    Stage,
    StagedModel,
    build_staged,
    plan_stages,
    relax_stages,
    without_idle_repeats,
)
from remat.policies.solvers.problem import Problem, Replayed, replay

__all__ = [
    "CutBound",
    "LpBound",
    "SavedSet",
    "SmallestBudget",
    "SolveStatus",
    "Solved",
    "cut_bound",
    "lp_bound",
    "once_each",
    "smallest_budget",
    "solve_restricted",
]

SolveStatus = Literal["optimal", "feasible", "infeasible", "unknown"]
Covers = Literal["all", "staged"]
Progress = Callable[[float, float, float], None]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SHARE = 0.5  # of the time left that one relaxation may take
_TIGHTER_SHARE = 0.05  # of the time left that one attempt to find a sequence may take
_ROUGH_GAP = 0.05  # above it, more time is spent on finding sequences
_WHOLE_BELOW = 400  # columns: so small a program is solved whole


@dataclass(frozen=True, eq=False)
class Solved:
    """The outcome of a solver.

    Attributes:
        status: `optimal` (the gap asked for is proven), `feasible` (within the budget, gap open), `infeasible`
            (proven: no sequence of this structure), `unknown` (neither a sequence nor a proof in the time
            given).
        sequence: nodes as executed; None unless `optimal` or `feasible`.
        peak_bytes, cost, extra_cost: of the sequence as the referee sees it; 0 and inf without one.
        bound: proven lower bound on the extra cost, never above `extra_cost`; inf if infeasible.
        gap: (extra_cost - bound) / extra_cost, 0 for equal numbers, inf without a sequence.
        interrupted: ended by `stop` or Ctrl-C.
        solve_seconds: time taken.
        method: what produced the sequence and the bound, for the reader.
        covers: which sequences `bound`, `optimal` and `infeasible` speak of: `all`, or the `staged` ones (see the
            module docstring).
    """

    status: SolveStatus
    sequence: tuple[int, ...] | None
    peak_bytes: int
    cost: float
    extra_cost: float
    bound: float
    gap: float
    interrupted: bool
    solve_seconds: float
    method: str
    covers: Covers = "staged"


@dataclass(frozen=True)
class LpBound:
    """The bound of the linear relaxation; `solved` is False if the time was up (the bound holds still)."""

    bound: float
    solved: bool
    solve_seconds: float


@dataclass(frozen=True, eq=False)
class SmallestBudget:
    """The smallest peak of staged sequences: `lower_bytes <= smallest <= upper_bytes`; see the module docstring.

    `sequence` has the peak `upper_bytes`; `exact` says that both are equal. Of all sequences, whatever they repeat
    and in which order, none has a smaller peak than `proven_bytes`.
    """

    lower_bytes: int
    upper_bytes: int
    sequence: tuple[int, ...]
    solve_seconds: float
    proven_bytes: int = 0

    @property
    def exact(self) -> bool:
        """Whether the smallest budget of staged sequences is known."""
        return self.lower_bytes == self.upper_bytes


def solve_restricted(
    problem: Problem,
    budget_bytes: int,
    *,
    start: Sequence[int] | None = None,
    seconds: float = math.inf,
    gap: float = 0.0,
    stop: Stop | None = None,
    progress: Progress | None = None,
    threads: int = 1,
) -> Solved:
    """Returns the cheapest sequence within the budget, with a proven bound.

    Args:
        problem: what to schedule.
        budget_bytes: the limit on live bytes.
        start: a sequence to begin with; it need not be within the budget, nor of the staged structure.
        seconds: limit on the time taken.
        gap: relative gap of the extra cost at which to stop.
        stop: asked several times a second; True ends the search with the best so far. Ctrl-C does the same.
        progress: called with (best extra cost, bound, seconds) when one improves or the solver reports.
        threads: of the solver.

    A `start` that repeats a node twice in a stage may be cheaper than any sequence of the structure. It is then
    returned with the bound of `cut_bound`, which holds for all sequences, and is `optimal` only if that proves it.

    Raises:
        ValueError: `start` is not a sequence of the problem, or an argument is out of range.
    """
    if not seconds >= 0 or not gap >= 0:
        raise ValueError(
            f"solve_restricted(seconds={seconds!r}, gap={gap!r}): expected numbers that are not negative"
        )
    search = _Search(problem, budget_bytes, seconds, gap, stop, progress, threads)
    return search.run(start)


class _Search:
    """The state of `solve_restricted`: the best sequence, the bound, the time."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        seconds: float,
        gap: float,
        stop: Stop | None,
        progress: Progress | None,
        threads: int,
    ) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.began = time.perf_counter()
        self.deadline = self.began + seconds
        self.keyboard = Keyboard()
        self.gap, self.stop = gap, self.keyboard.stops(stop)
        self.progress, self.threads = progress, threads
        self.best: list[int] | None = None
        self.best_replayed: Replayed | None = None
        self.bound = 0.0  # of sequences of the structure
        self.general_bound = 0.0  # of all sequences
        self.infeasible = False
        self.interrupted = False
        self.methods: list[str] = []

    # -- state --------------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """Seconds left."""
        return max(self.deadline - time.perf_counter(), 0.0)

    @property
    def best_cost(self) -> float:
        return math.inf if self.best_replayed is None else self.best_replayed.extra_cost

    def offer(self, sequence: Sequence[int] | Ints, origin: str) -> Replayed:
        """Judges a sequence and keeps it if it is within the budget and the cheapest so far."""
        replayed = replay(self.problem, sequence)
        if replayed.peak_bytes <= self.budget_bytes and replayed.extra_cost < self.best_cost:
            self.best, self.best_replayed = [int(node) for node in sequence], replayed
            self.methods = [m for m in self.methods if not m.startswith("sequence")]
            self.methods.append(f"sequence: {origin}")
            self._report(self.bound)
        return replayed

    def _report(self, bound: float) -> None:
        if self.progress is not None:
            proven = min(bound, self.best_cost)
            self.progress(self.best_cost, proven, time.perf_counter() - self.began)

    def raise_bound(self, bound: float, origin: str) -> None:
        """Notes a proven bound."""
        if bound > self.bound:
            self.bound = bound
            self.methods = [m for m in self.methods if not m.startswith("bound")]
            self.methods.append(f"bound: {origin}")
            self._report(self.bound)

    @property
    def done(self) -> bool:
        if self.infeasible or self.interrupted or self.left <= 0:
            return True
        if self.stop():
            self.interrupted = True
            return True
        return self.proven

    @property
    def proven(self) -> bool:
        """Whether the gap asked for is reached."""
        cost = self.best_cost
        tolerance = 1e-9 * max(abs(cost), self.problem.total_cost) if math.isfinite(cost) else 0.0
        return cost - self.bound <= self.gap * cost + tolerance

    def result(self) -> Solved:
        replayed = self.best_replayed
        seconds = time.perf_counter() - self.began
        if self.best is None or replayed is None:
            status: SolveStatus = "infeasible" if self.infeasible else "unknown"
            bound = math.inf if self.infeasible else self.bound
            proven = self.infeasible and math.isinf(self.general_bound)
            covers: Covers = "all" if proven or bound <= self.general_bound else "staged"
            return Solved(
                status, None, 0, math.inf, math.inf, bound, math.inf, self.interrupted, seconds,
                "; ".join(self.methods), covers,
            )  # fmt: skip
        cost = replayed.extra_cost
        tolerance = 1e-9 * max(cost, self.problem.total_cost)
        # A start outside of the structure can beat it; then only the bound on all sequences says something.
        outside = self.infeasible or cost < self.bound - tolerance
        bound = self.general_bound if outside else self.bound
        bound = cost if abs(cost - bound) <= tolerance else min(bound, cost)
        proven = cost - bound <= self.gap * cost
        return Solved(
            status="optimal" if proven else "feasible",
            sequence=tuple(self.best),
            peak_bytes=replayed.peak_bytes,
            cost=replayed.cost,
            extra_cost=cost,
            bound=bound,
            gap=(cost - bound) / cost if cost > bound else 0.0,
            interrupted=self.interrupted,
            solve_seconds=seconds,
            method="; ".join(self.methods),
            covers="all" if bound <= max(self.general_bound, 0.0) + tolerance else "staged",
        )

    # -- steps --------------------------------------------------------------------------------

    def run(self, start: Sequence[int] | None) -> Solved:
        with self.keyboard.caught():
            if start is not None:
                self.offer(start, "the start")
            self.offer(self.problem.first_runs, "no repetition")
            if self.best_cost <= 0:
                return self.result()
            cut = self._cuts()
            if not self.done:
                self._refine(cut)
        self.interrupted |= self.keyboard.pressed
        return self.result()

    def _cuts(self) -> CutBound:
        cut = cut_bound(self.problem, self.budget_bytes, seconds=self.left / 2, stop=self.stop)
        if math.isinf(cut.bound):
            self.infeasible = True
            self.general_bound = math.inf
            self.methods.append("infeasible: cut")
            return cut
        self.general_bound = self._round_up(cut.bound)
        self.raise_bound(self.general_bound, "cut")
        for chosen in sorted(cut.found, key=lambda s: (s.recompute_cost, s.live_bytes)):
            if self.left <= 0 or chosen.recompute_cost >= self.best_cost:
                break
            self.offer(once_each(self.problem, chosen), "cut")
        return cut

    def _round_up(self, bound: float) -> float:
        """Costs that are multiples of a unit: so is the optimum."""
        costs = self.problem.costs
        if not np.array_equal(np.rint(costs), costs) or costs.max(initial=0) >= 2**52:
            return bound
        unit = float(np.gcd.reduce(costs.astype(np.int64))) or 1.0
        return math.ceil(bound / unit - 1e-6) * unit

    def _refine(self, cut: CutBound) -> None:
        base = plan_stages(self.problem, self.budget_bytes)
        whole = sum(len(stage.kept) + len(stage.repeats) for stage in base)
        checked, exact = set(cut.positions), set[int]()
        rounds = 0
        while not self.done and whole > _WHOLE_BELOW:
            rounds += 1
            stages = relax_stages(base, checked, exact)
            size = sum(len(stage.kept) + len(stage.repeats) for stage in stages)
            if 2 * size > whole:
                break
            origin = f"relaxation {rounds}, {len(checked)} positions, {len(exact)} stages"
            model = build_staged(self.problem, self.budget_bytes, stages=stages)
            # The best sequence is feasible in every relaxation: what costs more need not be looked at.
            start = model.assignment(self.best) if self.best is not None else None
            outcome = self._solve(model, self.left * _SHARE, start)
            self._note_bound(model, outcome, origin)
            if outcome.values is None:
                break  # no time to solve it (or infeasible, which ends the loop too)
            sequence = model.sequence(outcome.values)
            replayed = self.offer(sequence, origin)
            complete = outcome.objective * model.unit <= self.bound * (1 + 1e-9) or self.gap > 0
            if self.done or not complete:
                break
            if self.best_cost - self.bound > _ROUGH_GAP * self.best_cost or self.best is None:
                self._tighter(checked, exact, replayed)
                if self.done:
                    break
            grown = _violations(self.problem, base, sequence, replayed, self.budget_bytes)
            if not _extend(grown, checked, exact, limit=max(3, len(checked) // 3)):
                break
        if not self.done:
            self._whole()

    def _tighter(self, checked: set[int], exact: set[int], over: Replayed) -> None:
        """Looks for a sequence within the budget: the same relaxation, for a budget less by the excess."""
        limit, peak = self.budget_bytes, over.peak_bytes
        for attempt in range(3):
            limit -= peak - self.budget_bytes
            if limit < self.problem.floor_bytes or self.done:
                return
            base = plan_stages(self.problem, limit)
            stages = relax_stages(base, checked, exact)
            model = build_staged(self.problem, limit, stages=stages)
            outcome = self._solve(model, self.left * _TIGHTER_SHARE, gap=max(self.gap, 0.02))
            if outcome.values is None or self.interrupted:
                return
            origin = f"relaxation at {limit} bytes, attempt {attempt + 1}"
            peak = self.offer(model.sequence(outcome.values), origin).peak_bytes
            if peak <= self.budget_bytes:
                return

    def _whole(self) -> None:
        """The whole program; its solutions are within the budget but for rounding."""
        limit = self.budget_bytes
        for attempt in range(4):
            model = build_staged(self.problem, limit)
            origin = "whole program"
            start = model.assignment(self.best) if self.best is not None else None
            outcome = self._solve(model, self.left, start)
            if attempt == 0:
                self._note_bound(model, outcome, origin)
            if outcome.values is None:
                return
            replayed = self.offer(model.sequence(outcome.values), origin)
            if replayed.peak_bytes <= self.budget_bytes or self.done:
                return
            # The solver's tolerance let a few bytes too many through: ask for that much less.
            limit = min(limit, self.budget_bytes) - 2 * (replayed.peak_bytes - self.budget_bytes)

    def _solve(
        self,
        model: StagedModel,
        seconds: float,
        start: Floats | None = None,
        gap: float | None = None,
    ) -> MipOutcome:
        if model.impossible is not None:
            return MipOutcome(None, math.inf, math.inf, True, False, 0)

        def report(_objective: float, bound: float, _seconds: float) -> None:
            self._report(max(self.bound, bound * model.unit))

        outcome = run_mip(
            model.rows,
            seconds=min(seconds, 1e9),
            gap=self.gap if gap is None else gap,
            absolute_gap=1 - 1e-6 if model.whole else 1e-6,
            start=start,
            stop=self.stop,
            progress=report,
            threads=self.threads,
            target=self.bound / model.unit + 1e-7,
        )
        self.interrupted |= outcome.interrupted
        return outcome

    def _note_bound(self, model: StagedModel, outcome: MipOutcome, origin: str) -> None:
        if outcome.infeasible:
            self.infeasible = True
            self.methods.append(f"infeasible: {origin}")
        elif math.isfinite(outcome.bound):
            # The solver's own tolerance, 1e-6 of its objective.
            slack = 1e-6 * max(1.0, abs(outcome.bound)) if not model.whole else 0.0
            self.raise_bound(self._round_up((outcome.bound - slack) * model.unit), origin)


@dataclass(frozen=True)
class _Excess:
    """A stage in which a sequence exceeds the budget, worst position of a run of such positions."""

    stage: int
    first_run: bool
    excess_bytes: int


def _violations(
    problem: Problem,
    base: Sequence[Stage],
    sequence: Sequence[int],
    replayed: Replayed,
    budget_bytes: int,
) -> list[_Excess]:
    """Where a sequence exceeds the budget, worst first, one entry per run of such positions."""
    can_grow = {stage.first for stage in base if stage.bounded}
    found: list[_Excess] = []
    expected = 0
    previous = False
    for node, live in zip(sequence, replayed.live_bytes.tolist(), strict=True):
        if live > budget_bytes and expected in can_grow:
            here = _Excess(expected, node == expected, live - budget_bytes)
            if previous and found[-1].excess_bytes >= here.excess_bytes:
                pass
            elif previous:
                found[-1] = here
            else:
                found.append(here)
            previous = True
        else:
            previous = False
        expected += node == expected
    found.sort(key=lambda e: (-e.excess_bytes, e.stage))
    return found


def _extend(found: Sequence[_Excess], checked: set[int], exact: set[int], limit: int) -> int:
    """Adds up to `limit` of the places; returns how many were new."""
    added = 0
    for excess in found:
        if excess.stage in exact:
            continue
        if excess.first_run and excess.stage not in checked:
            checked.add(excess.stage)
        else:
            exact.add(excess.stage)
        added += 1
        if added >= limit:
            break
    return added


def lp_bound(
    problem: Problem,
    budget_bytes: int,
    seconds: float = math.inf,
    *,
    method: LpMethod = "ipm",
    stop: Stop | None = None,
) -> LpBound:
    """Returns the bound of the linear relaxation of the whole program.

    The bound is recomputed from the solver's row duals, so that it holds even if the solver was stopped
    (`Rows.dual_bound`). `cut_bound` usually gives the same number in a fraction of the time.

    Args:
        method: `ipm` (interior point, the fastest measured), `simplex` or `pdlp`.
    """
    began = time.perf_counter()
    model = build_staged(problem, budget_bytes)
    if model.impossible is not None:
        return LpBound(math.inf, True, time.perf_counter() - began)
    left = max(seconds - (time.perf_counter() - began), 0.0)
    outcome = run_lp(model.rows, seconds=left, method=method, stop=stop)
    return LpBound(
        max(outcome.bound * model.unit, 0.0), outcome.solved, time.perf_counter() - began
    )


def smallest_budget(
    problem: Problem,
    *,
    start: Sequence[int] | None = None,
    seconds: float = 60.0,
    stop: Stop | None = None,
    threads: int = 1,
) -> SmallestBudget:
    """Returns the smallest peak that staged sequences reach, as an interval.

    The peak is the objective of the staged program, relaxed and refined as in `solve_restricted`.

    Args:
        start: a sequence whose peak is the first upper bound; the better of it and no repetition is taken.
    """
    search = _PeakSearch(problem, seconds, stop, threads)
    if start is not None:
        search.offer(start)
    return search.run()


class _PeakSearch:
    """The state of `smallest_budget`."""

    def __init__(self, problem: Problem, seconds: float, stop: Stop | None, threads: int) -> None:
        self.problem, self.stop, self.threads = problem, stop, threads
        self.began = time.perf_counter()
        self.deadline = self.began + seconds
        self.best: list[int] = []
        self.upper: float = math.inf
        self.offer(problem.first_runs)
        self.lower = self.proven = problem.floor_bytes

    @property
    def left(self) -> float:
        return max(self.deadline - time.perf_counter(), 0.0)

    @property
    def done(self) -> bool:
        stopped = self.stop is not None and self.stop()
        return self.lower >= self.upper or self.left <= 0 or stopped

    def offer(self, sequence: Sequence[int] | Ints) -> Replayed:
        replayed = replay(self.problem, sequence)
        if replayed.peak_bytes < self.upper:
            self.best, self.upper = [int(node) for node in sequence], replayed.peak_bytes
        return replayed

    def run(self) -> SmallestBudget:
        if not self.done:
            cut = cut_bound(self.problem, self.lower, seconds=self.left / 4, stop=self.stop)
            self.lower = self.proven = max(self.lower, cut.smallest_bytes)
            for chosen in cut.found:
                if self.left <= 0:
                    break
                self.offer(once_each(self.problem, chosen))
            self._refine(set(cut.positions))
        return SmallestBudget(
            min(self.lower, int(self.upper)),
            int(self.upper),
            tuple(without_idle_repeats(self.problem, self.best)),
            time.perf_counter() - self.began,
            min(self.proven, int(self.upper)),
        )

    def _refine(self, checked: set[int]) -> None:
        exact: set[int] = set()
        relaxed = True
        while not self.done:
            # Nothing above the best peak is of interest, so it is the budget that prunes.
            budget = int(self.upper)
            base = plan_stages(self.problem, budget, self.lower)
            whole = sum(len(stage.kept) + len(stage.repeats) for stage in base)
            stages = relax_stages(base, checked, exact) if relaxed else base
            size = sum(len(stage.kept) + len(stage.repeats) for stage in stages)
            if relaxed and (2 * size > whole or whole <= _WHOLE_BELOW):
                relaxed = False
                stages = base
            model = build_staged(self.problem, budget, stages=stages, peak_from=self.lower)
            if model.impossible is not None:
                self.lower = int(self.upper)
                return
            share = _SHARE if relaxed else 1.0
            start = None if relaxed else model.assignment(self.best)
            outcome = run_mip(
                model.rows,
                seconds=min(self.left * share, 1e9),
                stop=self.stop,
                start=start,
                threads=self.threads,
            )
            if outcome.infeasible:
                self.lower = int(self.upper)
                return
            if math.isfinite(outcome.bound):
                self._raise_lower(outcome.bound / model.scale)
            if outcome.values is None or outcome.interrupted:
                return
            sequence = model.sequence(outcome.values)
            replayed = self.offer(sequence)
            if not relaxed:
                return
            found = _violations(self.problem, base, sequence, replayed, self.lower)
            unsolved = outcome.objective - outcome.bound > 1e-4 * abs(outcome.objective)
            if unsolved or not _extend(found, checked, exact, limit=max(3, len(checked) // 3)):
                relaxed = False

    def _raise_lower(self, peak_bytes: float) -> None:
        """Peaks are sums of sizes, so multiples of their common divisor."""
        sizes = np.concatenate([self.problem.sizes, self.problem.extra_while_running])
        unit = int(np.gcd.reduce(sizes)) or 1
        proven = math.ceil(peak_bytes * (1 - 1e-7) / unit - 1e-3) * unit
        self.lower = max(self.lower, min(proven, int(self.upper)))
