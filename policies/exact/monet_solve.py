"""Solves MONeT's joint integer program (`remat.policies.exact.monet_model`) on HiGHS.

The program is not handed to the solver whole at once, but refined (`remat.policies.exact.refine`): chains of 20
forward nodes under pressure are not proven in a minute as a whole, and take seconds so. The selection of every
relaxation is scheduled on its own, too.

Complexity: that of the program, NP-hard; the time limit ends it with the best plan and the bound so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat.policies.exact.cut import cut_bound
from remat.policies.exact.highs import Stop
from remat.policies.exact.milp import solve_restricted
from remat.policies.exact.monet_model import Selected, build_monet
from remat.policies.exact.refine import Program, Progress, Refiner, SolveStatus
from remat.policies.exact.stages import Stage, choice_stages
from remat.policies.solvers.choice import ChoiceProblem, replay_choices
from remat.policies.solvers.problem import Replayed

__all__ = ["SolvedChoice", "solve_monet"]

# None of these changes an optimum, only how the time is spent; all were chosen by look.
_START_SHARE = 0.1  # of the time left, at most, for a good schedule of one selection ...
_START_SECONDS = 1.0  # ... and so many seconds
_MERGED = 0.8  # a relaxation of more than this share of the whole program is not worth it
_WHOLE_BELOW = 30  # variables: so small a program is solved whole


@dataclass(frozen=True, eq=False)
class SolvedChoice:
    """The outcome of `solve_monet`.

    Attributes:
        status: `optimal` (the gap asked for is proven), `feasible` (within the budget, gap open), `infeasible`
            (proven: the program has no plan), `unknown` (neither a plan nor a proof in the time given).
        selection: a choice per node; None unless `optimal` or `feasible`.
        sequence: nodes as executed, in the numbers of the problem.
        peak_bytes, cost: of the plan as the referee sees it, the cost of all runs; 0 and inf without one.
        bound: proven lower bound on the cost of all runs, never above `cost`; inf if infeasible.
        gap: (cost - bound) / cost, 0 for equal numbers, inf without a plan.
        interrupted: ended by `stop` or Ctrl-C.
        solve_seconds: time taken.
        columns, rows: size of the program, 0 if none was needed.
        method: what produced the plan and the bound, for the reader.
    """

    status: SolveStatus
    selection: tuple[int, ...] | None
    sequence: tuple[int, ...] | None
    peak_bytes: int
    cost: float
    bound: float
    gap: float
    interrupted: bool
    solve_seconds: float
    columns: int
    rows: int
    method: str


def solve_monet(
    problem: ChoiceProblem,
    budget_bytes: int,
    *,
    start: tuple[Sequence[int], Sequence[int]] | None = None,
    seconds: float = math.inf,
    gap: float = 0.0,
    in_place: bool = False,
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> SolvedChoice:
    """Returns the cheapest selection and sequence within the budget, with a proven bound.

    Among all plans that run a node at most once per stage. The cost is that of all runs, so a plan can be
    cheaper than running every node once with its first choice.

    Args:
        problem: what to schedule.
        budget_bytes: the limit on live bytes.
        start: a selection and a sequence to begin with; they need not be within the budget, nor of the structure.
        seconds: limit on the time taken.
        gap: relative gap of the cost at which to stop.
        in_place: whether nodes write over their inputs where the problem allows it, in the program and the
            referee.
        stop: asked several times a second; True ends the search with the best so far. Ctrl-C does the same.
        progress: called with (best cost, bound, seconds) when one improves or the solver reports.

    A `start` outside of the structure may be cheaper than any plan of it; it is then returned with the bound of
    `ChoiceProblem.relaxed`, which holds for all plans.

    Raises:
        ValueError: `start` is not a plan of the problem, or an argument is out of range.
    """
    if not seconds >= 0 or not gap >= 0:
        raise ValueError(
            f"solve_monet(seconds={seconds!r}, gap={gap!r}): expected numbers that are not negative"
        )
    refiner = _ChoiceRefiner(problem, budget_bytes, seconds, gap, in_place, stop, progress)
    if start is not None:
        refiner.offer((tuple(map(int, start[0])), tuple(map(int, start[1]))), "the start")
    return refiner.run()


class _ChoiceRefiner(Refiner[Selected]):
    """The refinement behind `solve_monet`: selections and sequences by the cost of all runs."""

    answer_name = "plan"

    def __init__(
        self,
        problem: ChoiceProblem,
        budget_bytes: int,
        seconds: float,
        gap: float,
        in_place: bool,
        stop: Stop | None,
        progress: Progress | None,
    ) -> None:
        super().__init__(budget_bytes, seconds, gap, stop, progress)
        self.problem, self.in_place = problem, in_place
        self.whole_below, self.most_merged = _WHOLE_BELOW, _MERGED
        self.relaxed = problem.relaxed(in_place=in_place)
        self.bound = self.general_bound = self.relaxed.total_cost
        self.methods["bound"] = "cheapest costs"
        self.size = (0, 0)  # of the last program
        self.scheduled: set[tuple[int, ...]] = set()

    def run(self) -> SolvedChoice:
        """Refines from what was offered."""
        with self.keyboard.caught():
            for selection in _selections(self.problem):
                self.offer((selection, self.problem.active(selection)), "no repetition")
            if not self.done:
                for selection in _selections(self.problem):
                    self._schedule(selection)
                self._cut()
                self.refine()
            self.solve_whole("MONeT's program")
        self.interrupted |= self.keyboard.pressed
        return self._result()

    def _result(self) -> SolvedChoice:
        status, bound, gap = self.verdict()
        selection, sequence = (None, None) if self.best is None else self.best
        return SolvedChoice(
            status=status,
            selection=selection,
            sequence=sequence,
            peak_bytes=0 if self.replayed is None else self.replayed.peak_bytes,
            cost=self.cost,
            bound=bound,
            gap=gap,
            interrupted=self.interrupted,
            solve_seconds=self.elapsed,
            columns=self.size[0],
            rows=self.size[1],
            method=self.method,
        )

    # -- what is refined ----------------------------------------------------------------------

    def judge(self, answer: Selected) -> Replayed:
        return replay_choices(self.problem, *answer, in_place=self.in_place)

    def cost_of(self, replayed: Replayed) -> float:
        return replayed.cost

    def running(self, answer: Selected) -> tuple[Sequence[int], Sequence[int]]:
        return answer[1], self.problem.active(answer[0])

    def stages(self, budget_bytes: int) -> list[Stage]:
        return choice_stages(self.problem, budget_bytes, in_place=self.in_place)

    def attempt(
        self, stages: list[Stage], budget_bytes: int, seconds: float, origin: str, proves: bool
    ) -> tuple[Selected, float] | None:
        model = build_monet(self.problem, budget_bytes, in_place=self.in_place, stages=stages)
        self.size = (model.rows.num_columns, model.rows.num_rows)
        self.slack = 0.0 if model.whole else 2e-6 * model.unit
        start = None if self.best is None else model.assignment(*self.best)
        found = self.solve(model, seconds, origin, start=start, proves=proves)
        return None if found is None else (model.selected(found.values), found.cost)

    def lower_bound(self, program: Program, objective: float) -> float:
        tolerance = max(1e-6, 1e-9 * abs(objective))
        return (math.ceil(objective - tolerance) if program.whole else objective) * program.unit

    def improve(self, answer: Selected, replayed: Replayed, solved: bool) -> None:
        self._schedule(answer[0])

    def _schedule(self, selection: tuple[int, ...]) -> None:
        """Offers a good schedule of one selection."""
        if self.done or selection in self.scheduled:
            return
        self.scheduled.add(selection)
        selected, nodes = self.problem.select(selection)
        solved = solve_restricted(
            selected,
            self.budget_bytes,
            seconds=min(self.left * _START_SHARE, _START_SECONDS),
            stop=self.stop,
        )
        self.interrupted |= solved.interrupted
        if solved.sequence is not None:
            sequence = tuple(nodes[index] for index in solved.sequence)
            self.offer((selection, sequence), "schedule of one selection")

    def _cut(self) -> None:
        """The bound of the cheapest costs, and of a cut of what every selection reads."""
        if self.done:
            return
        seconds = min(self.left * _START_SHARE, _START_SECONDS)
        cut = cut_bound(self.relaxed, self.budget_bytes, seconds=seconds, stop=self.stop)
        if math.isinf(cut.bound):
            self.refute("cut of the relaxation")
            return
        self.raise_bound(self.general_bound + cut.bound, "cut of the relaxation")
        self.general_bound += cut.bound
        self.checked = {self.problem.certain[position] for position in cut.positions}


def _selections(problem: ChoiceProblem) -> list[tuple[int, ...]]:
    """Selections worth a try: the first choices, and the cheapest."""
    first = (0,) * len(problem)
    cheapest = tuple(
        min(range(len(choices)), key=lambda way: choices[way].cost) for choices in problem.choices
    )
    return list(dict.fromkeys([first, cheapest]))
