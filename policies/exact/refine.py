"""Refinement: integer programs of stages solved by relaxations that impose the budget at few positions.

A whole program is too large for a solver. It is relaxed by merging all stages between a few *checked* positions and
imposing the budget only there (`relax_stages`): a few hundred variables where the whole has ten thousand. Its
optimum is a lower bound. Its answer is judged by the referee: within the budget, it is the optimum. Otherwise the
positions where the budget is exceeded are added, and the relaxation is solved again; if that does not converge, the
whole program is solved from the best answer known.

Every relaxation has all answers of the whole program among its solutions at the same cost or less, so bounds only
grow, and the last step is exact. `Refiner` keeps the best answer, the bound and the time; sequences are refined by
`remat.policies.exact.milp`, selections with their sequences by `remat.policies.exact.monet_solve`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from remat.core.interrupt import Keyboard
from remat.policies.exact.highs import Stop, run_mip
from remat.policies.exact.rows import Rows
from remat.policies.exact.stages import Stage, num_variables, relax_stages
from remat.policies.solvers.problem import Replayed

__all__ = ["Program", "Progress", "Refined", "Refiner", "SolveStatus"]

SolveStatus = Literal["optimal", "feasible", "infeasible", "unknown"]
Progress = Callable[[float, float, float], None]
Answer = TypeVar("Answer")
Floats = npt.NDArray[np.float64]

# None of these changes an optimum, only how the time is spent; all were chosen by look.
_SHARE = 0.5  # of the time left that one relaxation may take: two fail before a quarter is left
_MORE = 3  # positions added per round; or a third of those there, so that the rounds stay few
_WHOLE_ATTEMPTS = 4  # at the whole program: the second takes back what a tolerance let through
# Equal costs: sums of a million terms in double precision agree to this share.
_EQUAL = 1e-9


class Program(Protocol):
    """An integer program: its rows, the unit of its objective, and whether all costs are whole units."""

    @property
    def rows(self) -> Rows: ...
    @property
    def unit(self) -> float: ...
    @property
    def whole(self) -> bool: ...
    @property
    def impossible(self) -> str | None: ...


@dataclass(frozen=True, eq=False)
class Refined:
    """A solution: the values of the columns, and its cost by the program."""

    values: Floats
    cost: float


@dataclass(frozen=True)
class _Excess:
    """A stage in which an answer exceeds the budget, at the worst position of a run of such positions."""

    stage: int
    first_run: bool
    excess_bytes: int


class Refiner(ABC, Generic[Answer]):
    """The best answer, the bound and the time of one refinement.

    Attributes:
        best: the cheapest answer within the budget; `replayed`: what the referee says of it.
        bound: proven below all answers of the structure; `general_bound`: below all whatever.
        slack: absolute tolerance of the solver, in units of cost.
        methods: where the answer and the bound come from.
    """

    whole_below: int  # variables: so small a program is solved whole
    most_merged: float  # share of the whole program above which a relaxation is not worth it
    answer_name: str  # in `methods`
    total_cost: float = 0.0  # to which costs are compared besides their own size

    def __init__(
        self,
        budget_bytes: int,
        seconds: float,
        gap: float,
        stop: Stop | None,
        progress: Progress | None,
    ) -> None:
        self.budget_bytes, self.gap, self.progress = budget_bytes, gap, progress
        self.began = time.perf_counter()
        self.deadline = self.began + seconds
        self.keyboard = Keyboard()
        self.stop = self.keyboard.stops(stop)
        self.best: Answer | None = None
        self.replayed: Replayed | None = None
        self.bound = self.general_bound = self.slack = 0.0
        self.infeasible = self.interrupted = False
        self.methods: dict[str, str] = {}
        self.checked: set[int] = set()
        self.exact: set[int] = set()

    # -- what is refined ----------------------------------------------------------------------

    @abstractmethod
    def judge(self, answer: Answer) -> Replayed:
        """Replays an answer."""

    @abstractmethod
    def cost_of(self, replayed: Replayed) -> float:
        """Returns the cost that is minimised."""

    @abstractmethod
    def running(self, answer: Answer) -> tuple[Sequence[int], Sequence[int]]:
        """Returns an answer's sequence, and the nodes in the order of their first runs."""

    @abstractmethod
    def stages(self, budget_bytes: int) -> list[Stage]:
        """Returns the stages of the whole program."""

    @abstractmethod
    def attempt(
        self, stages: list[Stage], budget_bytes: int, seconds: float, origin: str, proves: bool
    ) -> tuple[Answer, float] | None:
        """Solves the program of these stages; returns an answer and its cost by the program."""

    @abstractmethod
    def lower_bound(self, program: Program, objective: float) -> float:
        """Returns the cost that the solver's bound on its objective proves."""

    def improve(self, answer: Answer, replayed: Replayed, solved: bool) -> None:
        """Looks for an answer within the budget near that of a relaxation (`solved`: its optimum)."""

    # -- state --------------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """Seconds left."""
        return max(self.deadline - time.perf_counter(), 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds taken."""
        return time.perf_counter() - self.began

    @property
    def cost(self) -> float:
        """Of the best answer, inf without one."""
        return math.inf if self.replayed is None else self.cost_of(self.replayed)

    @property
    def proven(self) -> bool:
        """Whether the gap asked for is reached."""
        cost = self.cost
        return math.isfinite(cost) and cost - self.bound <= self.gap * cost + self.tolerance(cost)

    @property
    def done(self) -> bool:
        """Whether to stop: proven, either way, out of time, or asked to."""
        if self.infeasible or self.interrupted or self.left <= 0:
            return True
        if self.stop():
            self.interrupted = True
            return True
        return self.proven

    def tolerance(self, cost: float) -> float:
        """Returns by how much equal costs may differ."""
        return max(_EQUAL * max(cost, self.total_cost), self.slack)

    def offer(self, answer: Answer, origin: str) -> Replayed:
        """Judges an answer and keeps it if it is within the budget and the cheapest so far."""
        replayed = self.judge(answer)
        if replayed.peak_bytes <= self.budget_bytes and self.cost_of(replayed) < self.cost:
            self.best, self.replayed = answer, replayed
            self._note(self.answer_name, origin)
            self._report(self.bound)
        return replayed

    def raise_bound(self, bound: float, origin: str) -> None:
        """Notes a proven bound."""
        if bound > self.bound:
            self.bound = bound
            self._note("bound", origin)
            self._report(bound)

    def refute(self, origin: str) -> None:
        """Notes that no answer of the structure is within the budget."""
        self.infeasible = True
        self._note("infeasible", origin)

    def _note(self, kind: str, origin: str) -> None:
        self.methods.pop(kind, None)
        self.methods[kind] = origin

    def _report(self, bound: float) -> None:
        if self.progress is not None:
            self.progress(self.cost, min(bound, self.cost), self.elapsed)

    @property
    def method(self) -> str:
        """Where the answer and the bound come from, for the reader."""
        return "; ".join(f"{kind}: {origin}" for kind, origin in self.methods.items())

    def verdict(self) -> tuple[SolveStatus, float, float]:
        """Returns status, bound and gap."""
        cost = self.cost
        if math.isinf(cost):
            if self.infeasible:
                return "infeasible", math.inf, math.inf
            return "unknown", self.bound, math.inf
        # A start outside of the structure can beat it; then only the bound on all answers says something.
        outside = self.infeasible or cost < self.bound - self.tolerance(cost)
        bound = self.general_bound if outside else self.bound
        bound = cost if abs(cost - bound) <= self.tolerance(cost) else min(bound, cost)
        gap = (cost - bound) / cost if cost > bound else 0.0
        return "optimal" if cost - bound <= self.gap * cost else "feasible", bound, gap

    # -- steps --------------------------------------------------------------------------------

    def refine(self) -> None:
        """Solves relaxations, each with the budget imposed where the answer of the one before exceeded it."""
        base = self.stages(self.budget_bytes)
        whole = num_variables(base)
        bounded = {stage.first for stage in base if stage.bounded}
        rounds = 0
        while not self.done and whole > self.whole_below:
            rounds += 1
            stages = relax_stages(base, self.checked, self.exact)
            if num_variables(stages) > self.most_merged * whole:
                return
            origin = f"relaxation {rounds}, {len(self.checked)} positions, {len(self.exact)} stages"
            found = self.attempt(stages, self.budget_bytes, self.left * _SHARE, origin, True)
            if found is None:
                return  # no time to solve it, or infeasible
            answer, cost = found
            replayed = self.offer(answer, origin)
            solved = cost <= self.bound * (1 + _EQUAL) + self.slack or self.gap > 0
            self.improve(answer, replayed, solved)
            if self.done or not solved:
                return
            places = _excesses(*self.running(answer), replayed, self.budget_bytes, bounded)
            if not _extend(places, self.checked, self.exact):
                return

    def solve_whole(self, origin: str) -> None:
        """Solves the whole program; its answers are within the budget but for rounding."""
        limit = self.budget_bytes
        for attempt in range(_WHOLE_ATTEMPTS):
            if self.done:
                return
            found = self.attempt(self.stages(limit), limit, self.left, origin, attempt == 0)
            if found is None:
                return
            replayed = self.offer(found[0], origin)
            if replayed.peak_bytes <= self.budget_bytes:
                return
            # The solver's tolerance let a few bytes too many through: ask for that much less.
            limit = min(limit, self.budget_bytes) - 2 * (replayed.peak_bytes - self.budget_bytes)

    def solve(
        self,
        program: Program,
        seconds: float,
        origin: str,
        *,
        start: Floats | None = None,
        gap: float | None = None,
        proves: bool = True,
        target: float = -math.inf,
    ) -> Refined | None:
        """Runs the solver; None without a solution.

        Args:
            gap: that of the refinement by default.
            proves: the program's bound, and its infeasibility, are those of the structure.
            target: an objective at which to stop.
        """
        if program.impossible is not None:
            if proves:
                self.refute(origin)
            return None

        def report(_objective: float, bound: float, _seconds: float) -> None:
            self._report(max(self.bound, bound * program.unit))

        outcome = run_mip(
            program.rows,
            seconds=min(seconds, 1e9),
            gap=self.gap if gap is None else gap,
            absolute_gap=1 - 1e-6 if program.whole else 1e-6,
            start=start,
            stop=self.stop,
            progress=report,
            target=target,
        )
        self.interrupted |= outcome.interrupted
        if proves and outcome.infeasible:
            self.refute(origin)
        elif proves and math.isfinite(outcome.bound):
            self.raise_bound(self.lower_bound(program, outcome.bound), origin)
        if outcome.values is None:
            return None
        return Refined(outcome.values, outcome.objective * program.unit)


def _excesses(
    sequence: Sequence[int],
    first_runs: Sequence[int],
    replayed: Replayed,
    budget_bytes: int,
    bounded: Collection[int],
) -> list[_Excess]:
    """Returns where a sequence exceeds the budget, worst first, one entry per run of such positions.

    Args:
        first_runs: the nodes that run, in the order of their first runs.
        bounded: stages in which the budget can be imposed, by their first run.
    """
    found: list[_Excess] = []
    done = 0
    previous = False
    for node, live in zip(sequence, replayed.live_bytes.tolist(), strict=True):
        stage = first_runs[done] if done < len(first_runs) else -1
        over = live > budget_bytes and stage in bounded
        if over:
            here = _Excess(stage, node == stage, live - budget_bytes)
            if not previous:
                found.append(here)
            elif here.excess_bytes > found[-1].excess_bytes:
                found[-1] = here
        previous = over
        done += node == stage
    return sorted(found, key=lambda e: (-e.excess_bytes, e.stage))


def _extend(found: Sequence[_Excess], checked: set[int], exact: set[int]) -> bool:
    """Adds some of the places, the first of the list; returns whether one was new."""
    limit = max(_MORE, len(checked) // _MORE)
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
    return added > 0
