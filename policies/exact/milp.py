"""Exact planning of a `Problem`: the staged integer program, solved by refining relaxations, on HiGHS.

`solve_restricted` finds the cheapest sequence within a byte budget among the *staged* ones (Checkmate's
structure, Jain et al., MLSys 2020): the forward pass runs once; after the turn, between two first runs, repeatable
nodes run again in ascending order, each at most once. A sequence that repeats a node twice between two first runs,
or in another order, is not staged; it can be cheaper, or smaller, and what is proven of staged sequences is not
claimed of it (`Solved.covers`). The whole program does not go to the solver at once:

1. `cut_bound` (`remat.policies.exact.cut`) gives a lower bound, often that of the linear relaxation, by minimum
   cuts, and sequences to start from;
2. relaxations are solved and refined, and at last the whole program (`remat.policies.exact.refine`). A relaxation's
   solution is unrolled, each repetition where it is first needed.

Departures from Checkmate: the formulation of `remat.policies.exact.staged_model` and this refinement;
`remat.policies.exact.checkmate_model` has the published one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from remat.policies.exact.cut import cut_bound, once_each
from remat.policies.exact.highs import Stop
from remat.policies.exact.refine import Program, Progress, Refiner, SolveStatus
from remat.policies.exact.staged_model import build_staged
from remat.policies.exact.stages import Stage, plan_stages, relax_stages
from remat.policies.solvers.problem import Problem, Replayed, replay

__all__ = ["Covers", "Solved", "solve_restricted"]

Covers = Literal["all", "staged"]
Ints = npt.NDArray[np.int64]

# None of these changes an optimum, only how the time is spent; all were chosen by look.
_CUT_SHARE = 0.5  # of the time, for the first bound: milliseconds in all but the largest problems
_TIGHTER_SHARE = 0.05  # of the time left that one attempt to find a sequence may take
_TIGHTER_ATTEMPTS = 3
_TIGHTER_GAP = 0.02  # at which such an attempt ends
_ROUGH_GAP = 0.05  # above it, more time is spent on finding sequences
_WHOLE_BELOW = 400  # variables: so small a program takes less than a second
_MOST_MERGED = 0.5  # of the whole program; a larger relaxation takes about as long
_TARGET = 1e-7  # units of the objective; a solution so near to the bound ends the solver


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


def solve_restricted(
    problem: Problem,
    budget_bytes: int,
    *,
    start: Sequence[int] | None = None,
    seconds: float = math.inf,
    gap: float = 0.0,
    stop: Stop | None = None,
    progress: Progress | None = None,
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

    A `start` that repeats a node twice in a stage may be cheaper than any sequence of the structure. It is then
    returned with the bound of `cut_bound`, which holds for all sequences, and is `optimal` only if that proves it.

    Raises:
        ValueError: `start` is not a sequence of the problem, or an argument is out of range.
    """
    if not seconds >= 0 or not gap >= 0:
        raise ValueError(
            f"solve_restricted(seconds={seconds!r}, gap={gap!r}): expected numbers that are not negative"
        )
    return _SequenceRefiner(problem, budget_bytes, seconds, gap, stop, progress).run(start)


class _SequenceRefiner(Refiner[Sequence[int]]):
    """The refinement behind `solve_restricted`: sequences by their extra cost."""

    answer_name = "sequence"

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        seconds: float,
        gap: float,
        stop: Stop | None,
        progress: Progress | None,
    ) -> None:
        super().__init__(budget_bytes, seconds, gap, stop, progress)
        self.problem = problem
        self.total_cost = problem.total_cost
        self.whole_below, self.most_merged = _WHOLE_BELOW, _MOST_MERGED

    def run(self, start: Sequence[int] | None) -> Solved:
        """Refines from a start."""
        with self.keyboard.caught():
            if start is not None:
                self.offer(start, "the start")
            self.offer(self.problem.first_runs.tolist(), "no repetition")
            if self.cost <= 0:
                return self.result()
            self._cuts()
            if not self.done:
                self.refine()
            self.solve_whole("whole program")
        self.interrupted |= self.keyboard.pressed
        return self.result()

    def result(self) -> Solved:
        """Returns what is known."""
        status, bound, gap = self.verdict()
        proven = max(self.general_bound, 0.0)
        if self.best is not None:
            proven += self.tolerance(self.cost)
        return Solved(
            status=status,
            sequence=None if self.best is None else tuple(int(node) for node in self.best),
            peak_bytes=0 if self.replayed is None else self.replayed.peak_bytes,
            cost=math.inf if self.replayed is None else self.replayed.cost,
            extra_cost=self.cost,
            bound=bound,
            gap=gap,
            interrupted=self.interrupted,
            solve_seconds=self.elapsed,
            method=self.method,
            covers="all" if bound <= proven else "staged",
        )

    # -- what is refined ----------------------------------------------------------------------

    def judge(self, answer: Sequence[int]) -> Replayed:
        return replay(self.problem, answer)

    def cost_of(self, replayed: Replayed) -> float:
        return replayed.extra_cost

    def running(self, answer: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        return answer, range(len(self.problem))

    def stages(self, budget_bytes: int) -> list[Stage]:
        return plan_stages(self.problem, budget_bytes)

    def attempt(
        self, stages: list[Stage], budget_bytes: int, seconds: float, origin: str, proves: bool
    ) -> tuple[Sequence[int], float] | None:
        model = build_staged(self.problem, budget_bytes, stages=stages)
        # The best sequence is feasible in every relaxation: what costs more need not be looked at.
        start = None if self.best is None else model.assignment(self.best)
        target = self.bound / model.unit + _TARGET
        found = self.solve(model, seconds, origin, start=start, proves=proves, target=target)
        return None if found is None else (model.sequence(found.values), found.cost)

    def lower_bound(self, program: Program, objective: float) -> float:
        # The solver's own tolerance, 1e-6 of its objective.
        slack = 0.0 if program.whole else 1e-6 * max(1.0, abs(objective))
        return self._round_up((objective - slack) * program.unit)

    def improve(self, answer: Sequence[int], replayed: Replayed, solved: bool) -> None:
        """Solves the same relaxation for a budget less by the excess."""
        rough = self.best is None or self.cost - self.bound > _ROUGH_GAP * self.cost
        if self.done or not solved or not rough:
            return
        limit, peak = self.budget_bytes, replayed.peak_bytes
        for attempt in range(_TIGHTER_ATTEMPTS):
            limit -= peak - self.budget_bytes
            if limit < self.problem.floor_bytes or self.done:
                return
            stages = relax_stages(self.stages(limit), self.checked, self.exact)
            model = build_staged(self.problem, limit, stages=stages)
            origin = f"relaxation at {limit} bytes, attempt {attempt + 1}"
            gap = max(self.gap, _TIGHTER_GAP)
            target = self.bound / model.unit + _TARGET
            seconds = self.left * _TIGHTER_SHARE
            found = self.solve(model, seconds, origin, gap=gap, proves=False, target=target)
            if found is None or self.interrupted:
                return
            peak = self.offer(model.sequence(found.values), origin).peak_bytes
            if peak <= self.budget_bytes:
                return

    # -- bounds -------------------------------------------------------------------------------

    def _cuts(self) -> None:
        seconds = self.left * _CUT_SHARE
        cut = cut_bound(self.problem, self.budget_bytes, seconds=seconds, stop=self.stop)
        if math.isinf(cut.bound):
            self.general_bound = math.inf
            self.refute("cut")
            return
        self.checked = set(cut.positions)
        self.general_bound = self._round_up(cut.bound)
        self.raise_bound(self.general_bound, "cut")
        for chosen in sorted(cut.found, key=lambda s: (s.recompute_cost, s.live_bytes)):
            if self.left <= 0 or chosen.recompute_cost >= self.cost:
                break
            self.offer(once_each(self.problem, chosen), "cut")

    def _round_up(self, bound: float) -> float:
        """Costs that are multiples of a unit: so is the optimum."""
        costs = self.problem.costs
        if not np.array_equal(np.rint(costs), costs) or costs.max(initial=0) >= 2**52:
            return bound
        unit = float(np.gcd.reduce(costs.astype(np.int64))) or 1.0
        return math.ceil(bound / unit - 1e-6) * unit
