"""`build_any`: an integer program below every valid sequence, with several moments at once.

`remat.policies.exact.stages` describes sequences in which a node runs at most once per stage, in order; its
optimum is not a bound for others. This one's is: whatever a sequence does between two first runs, some solution
describes it at the same cost or less. The time after the turn is cut into *stages*: stage `j` is what happens after
the first run of its first node's predecessor, through the first run of its last node. Variables, for a stage
and a value that is of use then:

* `R[j,i]`, binary: node `i` runs again in the stage, once or more often;
* `S[j,i]`: when the stage begins its value is alive, and is read before it is made again;
* `K[j,i]`: so it is, and through the whole stage, in which `i` does not run.

Rows, each true of every sequence:

* what a first run of the stage reads, and what a repetition of it reads, was kept into the stage, or is made in
  it: `S + R >= 1`, `S + R >= R[reader]`, unless its own first run is in the stage;
* what is kept out of a stage was kept through it or made in it: `S[j+1] <= K[j] + R[j]`, `K <= S`;
* when the last node of the stage runs for the first time, what is kept out of the stage is alive beside its
  inputs, its result and its workspace;
* while a node runs at any time within the stage, `K` is alive beside its inputs, its result and its workspace;
  for a repetition these count only if `R` is 1;
* before the turn nothing runs again, so that what is kept until the turn is alive all the time.

A window of `remat.policies.exact.cut` is this program with one stage. With several, a byte that is free at one
moment cannot be spent at two, and what a repetition needs while it runs counts, too; but it is no longer a
minimum cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat.policies.exact.rows import Rows, Term, cost_unit, size_scale
from remat.policies.solvers.problem import Problem

__all__ = ["AnyModel", "build_any"]


@dataclass(frozen=True, eq=False)
class AnyModel:
    """The program and what its columns mean.

    Attributes:
        rows: the program.
        stages: first and last node of each.
        repeat: column of `R` for (stage index, node).
        unit: cost of one unit of the objective.
        whole: every cost is an integer number of units.
    """

    rows: Rows
    stages: tuple[tuple[int, int], ...]
    repeat: dict[tuple[int, int], int]
    unit: float
    whole: bool

    def repeats(self, values: Sequence[float]) -> list[tuple[int, int]]:
        """Returns (stage index, node) of what runs again, in the order of the stages and nodes."""
        return sorted(key for key, column in self.repeat.items() if values[column] > 0.5)


def build_any(problem: Problem, budget_bytes: int, ends: Sequence[int]) -> AnyModel:
    """Builds the program.

    Args:
        problem: what to schedule.
        budget_bytes: the limit on live bytes.
        ends: nodes whose first runs end a stage; those before the turn are ignored, the last node always ends one.

    Complexity: at most stages * nodes columns three times over, stages * (nodes * live values + edges) entries.
    """
    count = len(problem)
    begin = problem.turn
    stages: list[tuple[int, int]] = []
    for end in sorted({*(e for e in ends if begin <= e < count - 1), count - 1}):
        stages.append((begin, end))
        begin = end + 1
    return _AnyOrderBuilder(problem, budget_bytes, stages).build()


class _AnyOrderBuilder:
    def __init__(
        self, problem: Problem, budget_bytes: int, stages: Sequence[tuple[int, int]]
    ) -> None:
        self.problem, self.budget_bytes, self.stages = problem, budget_bytes, stages
        self.scale, self.limit = size_scale(
            np.concatenate([problem.sizes, problem.extra_while_running]), budget_bytes
        )
        self.sizes = (problem.sizes * self.scale).tolist()
        self.needs = (problem.needs * self.scale).tolist()
        self.unit, self.whole = cost_unit(problem.costs)
        self.rows = Rows()
        self.repeat: dict[tuple[int, int], int] = {}
        self.into: dict[tuple[int, int], int] = {}
        self.through: dict[tuple[int, int], int] = {}

    def build(self) -> AnyModel:
        useful: set[int] = set()
        for j in range(len(self.stages) - 1, -1, -1):
            useful = self._variables(j, useful)
        for j in range(len(self.stages)):
            self._supply(j)
            self._memory(j)
        self._forward()
        return AnyModel(self.rows, tuple(self.stages), self.repeat, self.unit, self.whole)

    def _variables(self, j: int, later: set[int]) -> set[int]:
        """Adds the columns of a stage; returns what may be of use when it begins."""
        problem, (first, last) = self.problem, self.stages[j]
        useful = {i for i in later if i < first}
        for x in range(first, last + 1):
            useful.update(i for i in problem.inputs[x] if i < first)
        # What first runs in the stage costs nothing there, and that is enough of it.
        waiting = sorted(useful)
        for i in range(waiting[-1] if waiting else -1, -1, -1):
            if i not in useful or not problem.repeatable[i]:
                continue
            if problem.needs[i] > self.budget_bytes:
                continue
            cost = float(problem.costs[i]) / self.unit
            self.repeat[j, i] = self.rows.column(cost=cost, integral=True)
            useful.update(problem.inputs[i])
        for i in sorted(useful):
            self.into[j, i] = self.rows.column()
            self.through[j, i] = self.rows.column()
        return useful

    def _terms(self, j: int, i: int) -> list[Term]:
        """`S + R`."""
        made = self.repeat.get((j, i))
        return [(self.into[j, i], 1.0), *([] if made is None else [(made, 1.0)])]

    def _supply(self, j: int) -> None:
        problem, (first, last) = self.problem, self.stages[j]
        rows = self.rows
        demanded = {i for x in range(first, last + 1) for i in problem.inputs[x] if i < first}
        for i in sorted(demanded):
            rows.row(self._terms(j, i), lower=1.0)
            if first == last:  # alive from the beginning of the stage to its end, or made in it
                terms = self._terms(j, i)
                rows.row([(self.through[j, i], 1.0), *terms[1:]], lower=1.0)
        for (stage, k), made in self.repeat.items():
            if stage != j:
                continue
            for i in problem.inputs[k]:
                if i not in demanded:
                    rows.row([*self._terms(j, i), (made, -1.0)], lower=0.0)
        for (stage, i), into in self.into.items():
            if stage != j:
                continue
            rows.row([(into, 1.0), (self.through[j, i], -1.0)], lower=0.0)
            following = self.into.get((j + 1, i))
            if following is not None:
                made = self.repeat.get((j, i))
                supply = [(self.through[j, i], 1.0), *([] if made is None else [(made, 1.0)])]
                rows.row([*supply, (following, -1.0)], lower=0.0)

    def _memory(self, j: int) -> None:
        problem, (first, last) = self.problem, self.stages[j]
        kept = [(i, column) for (stage, i), column in self.through.items() if stage == j]
        out = [(i, column) for (stage, i), column in self.into.items() if stage == j + 1]
        for x in range(first, last + 1):
            beside = {x, *problem.inputs[x]}
            alive = out if x == last else kept
            terms = [(c, self.sizes[i]) for i, c in alive if i not in beside]
            if x < last:  # what runs once, has run in this stage, and is read after `x`
                fresh = sum(
                    self.sizes[i]
                    for i in range(first, x)
                    if i not in beside
                    and not problem.repeatable[i]
                    and max(problem.users[i], default=i) > x
                )
            else:
                fresh = 0.0
            self.rows.row(terms, upper=self.limit - self.needs[x] - fresh)
        for (stage, k), made in self.repeat.items():
            if stage != j:
                continue
            beside = {k, *problem.inputs[k]}
            terms = [(c, self.sizes[i]) for i, c in kept if i not in beside]
            self.rows.row([*terms, (made, self.needs[k])], upper=self.limit)

    def _forward(self) -> None:
        problem, turn = self.problem, self.problem.turn
        kept = [(i, column) for (stage, i), column in self.into.items() if stage == 0]
        last_read = [max((u for u in problem.users[i] if u < turn), default=i) for i in range(turn)]
        for x in range(turn):
            beside = {x, *problem.inputs[x]}
            waiting = {i for i in range(x) if last_read[i] > x and i not in beside}
            fixed = self.needs[x] + sum(self.sizes[i] for i in waiting)
            terms = [(c, self.sizes[i]) for i, c in kept if i < x and i not in beside | waiting]
            if terms or fixed > self.limit:
                self.rows.row(terms, upper=self.limit - fixed)
