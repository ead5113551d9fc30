"""`joint_bound`: a lower bound on the extra cost of every sequence, from several moments at once, in limited time.

`cut_bound` (`remat.policies.exact.cut`) takes milliseconds and looks at one moment per window, on the linear
relaxation. Where few large results fill the budget, it is far below the cheapest plan: half a value cannot be
kept. Here the problem is made smaller (`remat.policies.solvers.relaxed`), and the integer program of several
moments (`remat.policies.exact.any_order`) is solved on HiGHS, again and again: the solution of one round, unrolled,
exceeds the budget somewhere, and those moments are the ends of stages in the next. Rounds end when the bound is
enough, the sequence of the smaller problem is within the budget (the bound is then its optimum), time is up, or a
round that was cut short did not raise the bound; a program that was not solved to the end has a bound, too. The
best of all rounds is returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from remat.policies.exact.any_order import AnyModel, build_any
from remat.policies.exact.cut import cut_bound
from remat.policies.exact.highs import run_mip
from remat.policies.exact.stages import when_needed
from remat.policies.solvers.problem import Problem, Replayed, replay
from remat.policies.solvers.relaxed import relaxed

__all__ = ["JointBound", "joint_bound"]

# None of these can make the bound wrong, only weaker or later: the smaller problem is a relaxation. Chosen by look.
_SMALL_SHARE = 0.005  # of the budget: results that the smaller problem leaves out
_CHEAP_SHARE = 0.003  # of the total cost: sources that it makes workspace
_ROUGH = 0.03  # relative gap of all rounds but those that no moment can be added to
_ROUND_SHARE = 0.5  # of the time left, for one round
_MORE = 4  # moments added per round, and a third of those there


@dataclass(frozen=True)
class JointBound:
    """The bound, in units of cost; inf if no sequence is within the budget.

    Attributes:
        bound: on the extra cost.
        nodes: of the smaller problem.
        stages: of the last program.
        rounds: programs solved.
        solve_seconds: time taken.
    """

    bound: float
    nodes: int
    stages: int
    rounds: int
    solve_seconds: float


def joint_bound(
    problem: Problem,
    budget_bytes: int,
    *,
    seconds: float,
    enough: float = math.inf,
    small_share: float = _SMALL_SHARE,
    cheap_share: float = _CHEAP_SHARE,
    stop: Callable[[], bool] | None = None,
) -> JointBound:
    """Returns the bound.

    Args:
        problem: what to schedule.
        budget_bytes: the limit on live bytes.
        seconds: limit on the time taken; the bound depends on it.
        enough: a bound at which to stop.
        small_share: of the budget: results of so many bytes or fewer are left out.
        cheap_share: of the total cost: sources that cost so much or less are workspace.
        stop: asked several times a second; True ends with the bound so far.

    Raises:
        ValueError: `seconds` is negative.
    """
    if not seconds >= 0:
        raise ValueError(f"joint_bound(seconds={seconds!r}): expected a number of at least 0")
    began = time.perf_counter()
    small = relaxed(
        problem,
        small_bytes=int(small_share * budget_bytes),
        cheap_cost=cheap_share * problem.total_cost,
    ).problem
    rounds = _Rounds(small, budget_bytes, began + seconds, enough, stop)
    if len(small):
        rounds.run()
    return JointBound(
        max(rounds.bound, 0.0),
        len(small),
        rounds.stages,
        rounds.done,
        time.perf_counter() - began,
    )


class _Rounds:
    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        deadline: float,
        enough: float,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.deadline, self.enough, self.stop = deadline, enough, stop
        self.bound = 0.0
        self.stages = self.done = 0
        self.seen = -math.inf  # bound of the program that is being solved

    @property
    def left(self) -> float:
        return max(self.deadline - time.perf_counter(), 0.0)

    def _ends(self) -> bool:
        over = self.left <= 0 or max(self.bound, self.seen) >= self.enough
        return over or (self.stop is not None and self.stop())

    def run(self) -> None:
        cut = cut_bound(self.problem, self.budget_bytes, seconds=self.left / 4, stop=self.stop)
        self.bound = cut.bound
        ends = set(cut.positions)
        gap = _ROUGH
        while not self._ends():
            model = build_any(self.problem, self.budget_bytes, sorted(ends))
            repeats = self._solve(model, gap)
            if repeats is None:
                return
            sequence = _unrolled(self.problem, model, repeats)
            replayed = replay(self.problem, sequence)
            if replayed.peak_bytes <= self.budget_bytes:
                if gap == 0.0:
                    return
                gap = 0.0  # nothing to add: solve this one to the end
                continue
            more = _over(self.problem, sequence, replayed, self.budget_bytes)
            more = [e for e in more if e not in ends and self.problem.turn <= e]
            if not more:
                if gap == 0.0:
                    return
                gap = 0.0
                continue
            ends.update(more[: max(_MORE, len(ends) // 3)])

    def _solve(self, model: AnyModel, gap: float) -> list[tuple[int, int]] | None:
        """One round; returns what is repeated, None if it was not solved in its time."""
        self.done += 1
        self.stages = len(model.stages)
        self.seen = -math.inf

        def note(_objective: float, bound: float, _seconds: float) -> None:
            self.seen = bound * model.unit

        outcome = run_mip(
            model.rows,
            seconds=self.left * (_ROUND_SHARE if gap else 1.0),
            gap=gap,
            absolute_gap=1 - 1e-6 if model.whole and not gap else 1e-6,
            stop=self._ends,
            progress=note,
        )
        if outcome.infeasible:
            self.bound = math.inf
            return None
        before = self.bound
        if math.isfinite(outcome.bound):
            # The solver's own tolerance, 1e-6 of its objective.
            safe = (outcome.bound - 1e-6 * max(1.0, abs(outcome.bound))) * model.unit
            self.bound = max(self.bound, safe)
        unsolved = outcome.objective - outcome.bound > 2 * gap * abs(outcome.objective)
        if outcome.values is None or (unsolved and self.bound <= before):
            return None  # finer programs would take longer still
        return model.repeats(outcome.values.tolist())


def _unrolled(problem: Problem, model: AnyModel, repeats: Sequence[tuple[int, int]]) -> list[int]:
    """A sequence with these repetitions, each where its stage first needs it, else at the stage's end."""
    order = list(range(problem.turn))
    for j, (first, last) in enumerate(model.stages):
        chosen = [node for stage, node in repeats if stage == j]
        order += when_needed(problem.inputs, first, last, chosen)
    return order


def _over(
    problem: Problem, sequence: Sequence[int], replayed: Replayed, budget_bytes: int
) -> list[int]:
    """Ends of stages that speak of the moments above the budget, the worst first."""
    worst: dict[
        int, tuple[int, bool]
    ] = {}  # first run to come -> excess, and whether it is that run
    expected = 0
    for node, live in zip(sequence, replayed.live_bytes.tolist(), strict=True):
        if live > budget_bytes:
            found = (live - budget_bytes, node == expected)
            worst[expected] = max(worst.get(expected, (0, False)), found)
        expected += node == expected
    peaks = [
        at
        for at in worst
        if worst[at][0] >= max(worst.get(at - 1, (0,))[0], worst.get(at + 1, (0,))[0])
    ]
    ends: list[int] = []
    for at in sorted(peaks, key=lambda at: (-worst[at][0], at)):
        ends += [at] if worst[at][1] else [at - 1, at]  # a stage of its own for repetitions
    return list(dict.fromkeys(int(np.clip(e, 0, len(problem) - 1)) for e in ends))
