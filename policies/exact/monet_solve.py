"""Solves MONeT's joint integer program (`_monet_model`) on HiGHS.

The `tight` program is not handed to the solver whole at once: `solve_monet` refines relaxations that impose
the budget at few positions, like `remat.policies.exact.milp`: chains of 20 forward nodes under pressure are not
proven in a minute as a whole, and take seconds so.

Complexity: that of the program, NP-hard; the time limit ends it with the best plan and the bound so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from remat.core.interrupt import Keyboard
from remat.policies.exact.highs import MipOutcome, Stop, run_mip
from remat.policies.exact.milp import SolveStatus, cut_bound, solve_restricted
from remat.policies.exact.monet_model import (
    LocalMemory,
    MonetModel,
    Plan,
    build_monet,
    monet_stages,
)
from remat.policies.exact.stages import Stage, relax_stages
from remat.policies.solvers.choice import ChoiceProblem, replay_choices
from remat.policies.solvers.problem import Replayed

__all__ = ["SolvedChoice", "solve_monet"]

Progress = Callable[[float, float, float], None]

_START_SHARE = 0.1  # of the time left, at most, for a good schedule of one selection ...
_START_SECONDS = 1.0  # ... and so many seconds
_SHARE = 0.5  # of the time left that one relaxation may take
_MERGED = 0.8  # a relaxation of more than this share of the whole program is not worth it
_WHOLE_BELOW = 30  # values kept and repeated in all stages: so small a program is solved whole


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
    local_memory: LocalMemory = "tight",
    in_place: bool = False,
    stop: Stop | None = None,
    progress: Progress | None = None,
    threads: int = 1,
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
        local_memory: `tight` counts live bytes exactly; `paper` bounds those of recomputation as appendix B does,
            and misses plans that need the difference.
        in_place: whether nodes write over their inputs where the problem allows it, in the program and the
            referee.
        stop: asked several times a second; True ends the search with the best so far. Ctrl-C does the same.
        progress: called with (best cost, bound, seconds) when one improves or the solver reports.
        threads: of the solver.

    With `tight`, relaxations that impose the budget at few positions come first, as in
    `remat.policies.exact.milp.solve_restricted`: their optimum is a bound, their selection is scheduled on its
    own, and where their plan exceeds the budget positions are added. The whole program comes last. With
    `paper` it is solved as it is.

    A `start` outside of the structure may be cheaper than any plan of it; it is then returned with the bound of
    `ChoiceProblem.relaxed`, which holds for all plans.

    Raises:
        ValueError: `start` is not a plan of the problem, or an argument is out of range.
    """
    if not seconds >= 0 or not gap >= 0 or local_memory not in get_args(LocalMemory):
        raise ValueError(
            f"solve_monet(seconds={seconds!r}, gap={gap!r}, local_memory={local_memory!r}): expected "
            f"numbers that are not negative and one of {', '.join(get_args(LocalMemory))}"
        )
    search = _Search(
        problem, budget_bytes, seconds, gap, local_memory, in_place, stop, progress, threads
    )
    if start is not None:
        search.offer((tuple(map(int, start[0])), tuple(map(int, start[1]))), "the start")
    return search.run()


class _Search:
    """The state of `solve_monet`: the cheapest plan within the budget, the bound, the time."""

    def __init__(
        self,
        problem: ChoiceProblem,
        budget_bytes: int,
        seconds: float,
        gap: float,
        local_memory: LocalMemory,
        in_place: bool,
        stop: Stop | None,
        progress: Progress | None,
        threads: int,
    ) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.began = time.perf_counter()
        self.deadline = self.began + seconds
        self.gap, self.in_place = gap, in_place
        self.local_memory: LocalMemory = local_memory
        self.keyboard = Keyboard()
        self.stop, self.progress, self.threads = self.keyboard.stops(stop), progress, threads
        self.plan: Plan | None = None
        self.replayed: Replayed | None = None
        self.relaxed = problem.relaxed(in_place=in_place)
        self.general_bound = self.relaxed.total_cost  # of all plans
        self.bound = self.general_bound  # of plans of the program
        self.slack = 0.0  # the solver's absolute tolerance
        self.infeasible = False
        self.interrupted = False
        self.origin, self.proof = "", "cheapest costs"
        self.size = (0, 0)
        self.scheduled: set[tuple[int, ...]] = set()

    @property
    def left(self) -> float:
        """Seconds left."""
        return max(self.deadline - time.perf_counter(), 0.0)

    @property
    def cost(self) -> float:
        return math.inf if self.replayed is None else self.replayed.cost

    def offer(self, plan: Plan, origin: str) -> Replayed:
        """Judges a plan and keeps it if it is within the budget and the cheapest so far."""
        replayed = replay_choices(self.problem, *plan, in_place=self.in_place)
        if replayed.peak_bytes <= self.budget_bytes and replayed.cost < self.cost:
            self.plan, self.replayed, self.origin = plan, replayed, origin
            self._report(self.bound)
        return replayed

    def _report(self, bound: float) -> None:
        if self.progress is not None:
            at = time.perf_counter() - self.began
            self.progress(self.cost, min(bound, self.cost), at)

    @property
    def proven(self) -> bool:
        """Whether the gap asked for is reached."""
        cost = self.cost
        return math.isfinite(cost) and cost - self.bound <= self.gap * cost + max(
            1e-9 * cost, self.slack
        )

    @property
    def done(self) -> bool:
        if not self.interrupted and self.stop():
            self.interrupted = True
        return self.infeasible or self.interrupted or self.left <= 0 or self.proven

    def run(self) -> SolvedChoice:
        with self.keyboard.caught():
            for selection in _selections(self.problem):
                self.offer((selection, self.problem.active(selection)), "no repetition")
            if self.local_memory == "tight" and not self.done:
                for selection in _selections(self.problem):
                    self._schedule(selection)
                self._refine()
            self._whole()
        self.interrupted |= self.keyboard.pressed
        return self._result()

    def _schedule(self, selection: tuple[int, ...]) -> None:
        """Offers a good schedule of one selection."""
        if self.done or selection in self.scheduled:
            return
        self.scheduled.add(selection)
        selected, nodes = self.problem.select(selection)
        seconds = self.left * _START_SHARE
        solved = solve_restricted(
            selected, self.budget_bytes, seconds=min(seconds, _START_SECONDS), stop=self.stop
        )
        self.interrupted |= solved.interrupted
        if solved.sequence is not None:
            sequence = tuple(nodes[index] for index in solved.sequence)
            self.offer((selection, sequence), "schedule of one selection")

    def _refine(self) -> None:
        """Solves relaxations, each with the budget imposed where the plan of the one before exceeded it."""
        if self.done:
            return
        base = monet_stages(self.problem, self.budget_bytes, in_place=self.in_place)
        whole = _extent(base)
        checked, exact = set[int](), set[int]()
        seconds = min(self.left * _START_SHARE, _START_SECONDS)
        cut = cut_bound(self.relaxed, self.budget_bytes, seconds=seconds, stop=self.stop)
        if math.isinf(cut.bound):
            self.infeasible, self.proof = True, "cut of the relaxation"
            return
        self._raise(self.general_bound + cut.bound, "cut of the relaxation")
        self.general_bound += cut.bound
        checked |= {self.problem.certain[position] for position in cut.positions}
        rounds = 0
        while not self.done and whole > _WHOLE_BELOW:
            rounds += 1
            stages = relax_stages(base, checked, exact)
            if _extent(stages) > _MERGED * whole:
                return
            origin = f"relaxation {rounds}, {len(checked)} positions, {len(exact)} stages"
            model, outcome = self._solve(stages, self.left * _SHARE, origin)
            if outcome is None or outcome.values is None:
                return
            plan = model.plan(outcome.values)
            replayed = self.offer(plan, origin)
            if not self.done:
                self._schedule(plan[0])
            complete = outcome.objective * model.unit <= self.bound * (1 + 1e-9) + self.slack
            if self.done or not (complete or self.gap > 0):
                return
            if not self._grow(base, plan, replayed, checked, exact):
                return

    def _grow(
        self,
        base: Sequence[Stage],
        plan: Plan,
        replayed: Replayed,
        checked: set[int],
        exact: set[int],
    ) -> bool:
        """Adds the places where a plan exceeds the budget, worst first; returns whether there was a new one."""
        can_grow = {stage.first for stage in base if stage.bounded}
        active = self.problem.active(plan[0])
        found: list[
            tuple[int, int, bool]
        ] = []  # excess, stage, at its first run: worst of a run of places
        first = 0
        previous = False
        for node, live in zip(plan[1], replayed.live_bytes.tolist(), strict=True):
            stage = active[first] if first < len(active) else len(self.problem)
            is_first = node == stage
            over = live > self.budget_bytes and stage in can_grow
            if over:
                here = (live - self.budget_bytes, stage, is_first)
                if not previous:
                    found.append(here)
                elif here[0] > found[-1][0]:
                    found[-1] = here
            previous = over
            first += is_first
        added = 0
        for _, stage, is_first in sorted(found, key=lambda place: (-place[0], place[1])):
            if stage in exact:
                continue
            (checked if is_first and stage not in checked else exact).add(stage)
            added += 1
            if added >= max(3, len(checked) // 3):
                break
        return added > 0

    def _whole(self) -> None:
        """The whole program; its plans are within the budget but for rounding."""
        limit = self.budget_bytes
        for attempt in range(4):
            if self.done:
                return
            note = f"MONeT's program, {self.local_memory} local memory"
            stages = monet_stages(self.problem, limit, in_place=self.in_place)
            model, outcome = self._solve(stages, self.left, note, limit, proves=attempt == 0)
            if outcome is None or outcome.values is None:
                return
            replayed = self.offer(model.plan(outcome.values), note)
            if replayed.peak_bytes <= self.budget_bytes:
                return
            # The solver's tolerance let a few bytes too many through: ask for that much less.
            limit = min(limit, self.budget_bytes) - 2 * (replayed.peak_bytes - self.budget_bytes)

    def _solve(
        self,
        stages: list[Stage],
        seconds: float,
        origin: str,
        limit: int | None = None,
        proves: bool = True,
    ) -> tuple[MonetModel, MipOutcome | None]:
        """Solves one program and notes its bound; None if it was found impossible while building."""
        model = build_monet(
            self.problem,
            self.budget_bytes if limit is None else limit,
            local_memory=self.local_memory,
            in_place=self.in_place,
            stages=stages,
        )
        self.size = (model.rows.num_columns, model.rows.num_rows)
        self.slack = 0.0 if model.whole else 2e-6 * model.unit
        if model.impossible is not None:
            if proves:
                self.infeasible, self.proof = True, origin
            return model, None

        def report(_objective: float, bound: float, _seconds: float) -> None:
            self._report(max(self.bound, bound * model.unit))

        outcome = run_mip(
            model.rows,
            seconds=min(seconds, 1e9),
            gap=self.gap,
            absolute_gap=1 - 1e-6 if model.whole else 1e-6,
            start=None if self.plan is None else model.assignment(*self.plan),
            stop=self.stop,
            progress=report,
            threads=self.threads,
        )
        self.interrupted |= outcome.interrupted
        if not proves:
            return model, outcome
        if outcome.infeasible:
            self.infeasible, self.proof = True, origin
        elif math.isfinite(outcome.bound):
            tolerance = max(1e-6, 1e-9 * abs(outcome.bound))
            bound = math.ceil(outcome.bound - tolerance) if model.whole else outcome.bound
            self._raise(bound * model.unit, origin)
        return model, outcome

    def _raise(self, bound: float, origin: str) -> None:
        if bound > self.bound:
            self.bound, self.proof = bound, origin
            self._report(bound)

    def _result(self) -> SolvedChoice:
        seconds = time.perf_counter() - self.began
        if self.plan is None or self.replayed is None:
            status: SolveStatus = "infeasible" if self.infeasible else "unknown"
            bound = math.inf if self.infeasible else self.bound
            return SolvedChoice(
                status, None, None, 0, math.inf, bound, math.inf, self.interrupted, seconds,
                *self.size, f"bound: {self.proof}",
            )  # fmt: skip
        cost = self.cost
        # A start outside of the structure can beat it; then only the bound on all plans says something.
        outside = self.infeasible or cost < self.bound - max(1e-9 * cost, self.slack)
        bound = self.general_bound if outside else self.bound
        bound = cost if abs(cost - bound) <= max(1e-9 * cost, self.slack) else min(bound, cost)
        open_gap = (cost - bound) / cost if cost > bound else 0.0
        return SolvedChoice(
            status="optimal" if open_gap <= self.gap else "feasible",
            selection=self.plan[0],
            sequence=self.plan[1],
            peak_bytes=self.replayed.peak_bytes,
            cost=cost,
            bound=bound,
            gap=open_gap,
            interrupted=self.interrupted,
            solve_seconds=seconds,
            columns=self.size[0],
            rows=self.size[1],
            method=f"plan: {self.origin}; bound: {self.proof}",
        )


def _extent(stages: Sequence[Stage]) -> int:
    return sum(len(stage.kept) + len(stage.repeats) for stage in stages)


def _selections(problem: ChoiceProblem) -> list[tuple[int, ...]]:
    """Selections worth a try: the first choices, and the cheapest."""
    first = (0,) * len(problem)
    cheapest = tuple(
        min(range(len(choices)), key=lambda way: choices[way].cost) for choices in problem.choices
    )
    return list(dict.fromkeys([first, cheapest]))
