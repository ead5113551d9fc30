"""The integer program of staged recomputation, with as few variables as the graph and the budget allow.

The stages are those of `remat.policies.exact.stages`, which also leaves out what no stage can need or hold.
Variables, for a value `i` and a stage `t > i`:

* `R[t,i]`, binary: node `i` runs again in stage `t`;
* `S[t,i]`: its copy is kept from stage `t - 1` into stage `t`;
* `L[t,i,r]`: the copy is alive in stage `t` until its `r`-th reader there, or beyond;
* `M[t,k]`: live bytes while `k` runs in stage `t`.

`L[t,i,r] >= L[t,i,r+1]`, `L[t,i,r] >= R[t,reader r]`, and after the last reader it is `S[t+1,i]`. What is
needed must be there: `S[t,i] + R[t,i] >= L[t,i,1]`. `M` changes from one position to the next by the copy made
and by `size * (L[r] - L[r+1])` for every input read. This is Checkmate's recurrence with `FREE = L[r] -
L[r+1]`: a copy is freed only where it was alive and was read, so "freed implies computed here" holds by
construction. Where `k` does not run, `M[t,k]` bounds the bytes alive between its neighbours, hence never more
than one of them has: no big-M is needed. Only `R` is integral; given `R`, the smallest `S`, `L`, `M` follow,
and they are integral.

What is left out, none of it at the price of the optimum:

* what `plan_stages` leaves out: variables without a later need, of nodes that cannot fit, above the diagonal;
* the forward pass: one variable per value, kept until the turn or not;
* stages in which everything that could be of use fits at once: neighbouring ones become one stage without `L`
  and `M`, as there a value is made at most once and kept;
* rows of positions after which nothing can be freed: the next position has at least as many bytes;
* `L` where at most one event follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.policies.exact.amounts import ALL, NOTHING, Amount, AmountRows, Rule, filled
from remat.policies.exact.rows import Rows, Term, cost_unit, size_scale
from remat.policies.exact.stages import Stage, plan_stages, when_needed, without_idle_repeats
from remat.policies.solvers.problem import Problem

__all__ = ["StagedModel", "build_staged"]

Floats = npt.NDArray[np.float64]
Alive = tuple[float, list[Term]]  # bytes, scaled: a constant and terms


@dataclass(frozen=True, eq=False)
class StagedModel:
    """The program and what its columns mean.

    Attributes:
        rows: the linear program.
        stages: from the turn on.
        repeat: column of `R` for (stage index, node).
        unit: cost of one unit of the objective; `whole`: every cost is an integer number of units.
        impossible: why no sequence exists at all, found while building; None if none was found.
    """

    problem: Problem
    rows: Rows
    stages: list[Stage]
    repeat: dict[tuple[int, int], int]
    unit: float
    whole: bool
    impossible: str | None
    _rules: Sequence[Rule]

    def sequence(self, values: Floats) -> list[int]:
        """Returns the sequence that the values of `R` stand for, useless repetitions left out."""
        inputs = self.problem.inputs
        order = list(range(self.problem.turn))
        for index, stage in enumerate(self.stages):
            chosen = [k for k in stage.repeats if values[self.repeat[index, k]] > 0.5]
            if stage.bounded:
                order += [*chosen, stage.first]
            else:
                order += when_needed(inputs, stage.first, stage.last, chosen)
        return without_idle_repeats(self.problem, order)

    def assignment(self, sequence: Sequence[int]) -> Floats:
        """Returns the columns' values for a sequence.

        Repetitions that the model cannot express (twice in one stage) are taken as one, so the values may
        break a row; HiGHS checks a start.
        """
        values = np.zeros(self.rows.num_columns)
        stage_of = np.zeros(len(self.problem) + 1, np.int64) - 1
        for index, stage in enumerate(self.stages):
            stage_of[stage.first : stage.last + 1] = index
        expected = 0
        for node in sequence:
            if node == expected:
                expected += 1
                continue
            column = self.repeat.get((int(stage_of[expected]), int(node)))
            if column is not None:
                values[column] = 1.0
        return np.clip(filled(values, self._rules), 0.0, None)


class _StagedBuilder(AmountRows):
    def __init__(self, problem: Problem, budget_bytes: int, stages: list[Stage]) -> None:
        super().__init__()
        self.problem, self.stages = problem, stages
        self.scale, self.limit = size_scale(
            np.concatenate([problem.sizes, problem.extra_while_running]), budget_bytes
        )
        self.unit, self.whole = cost_unit(problem.costs)
        self.sizes = (problem.sizes * self.scale).tolist()
        self.work = (problem.extra_while_running * self.scale).tolist()
        # For every bounded stage: value -> its alive amounts after each of its readers there.
        self.after: list[dict[tuple[int, int], Amount]] = [{} for _ in stages]

    def build(self) -> None:
        for index in range(len(self.stages) - 1, -1, -1):
            self._variables(index)
        self._forward()
        leaving: Alive | None = None
        for index, stage in enumerate(self.stages):
            leaving = self._memory(index, leaving) if stage.bounded else None
            if stage.rows == "last":
                self._last_run(index)

    def _variables(self, index: int) -> None:
        stage = self.stages[index]
        repeats = set(stage.repeats)
        made: dict[int, int] = {}
        for k in stage.repeats:
            cost = float(self.problem.costs[k]) / self.unit
            made[k] = self.repeat[index, k] = self.rows.column(cost=cost, integral=True)
        for i in reversed(stage.kept):
            following = self.carried(index + 1, i)
            events: list[tuple[int, Amount]] = []
            for user in self.problem.users[i]:
                if stage.first <= user <= stage.last:
                    events.append((user, ALL))
                elif user in repeats:
                    events.append((user, (0, (made[user],))))
            if stage.bounded:
                needs = self.lives(i, events, following, self.after[index])
            else:
                needs = [*(amount for _, amount in events), following]
            self.supply(index, i, needs)

    def _forward(self) -> None:
        """Live bytes before the turn: what is still to be read there, and what is kept until the turn."""
        problem, turn = self.problem, self.problem.turn
        if turn == 0:
            return
        last_read = [-1] * turn
        for node in range(turn):
            for read in problem.inputs[node]:
                last_read[read] = node
        must = np.zeros(turn + 1)
        for i in range(turn):
            end = max(last_read[i], i)
            must[i] += self.sizes[i]
            must[end + 1] -= self.sizes[i]
        live = np.cumsum(must)[:turn] + np.asarray(self.work[:turn])
        kept = {i: self.carried(0, i) for i in range(turn)}
        # Kept values only add up, so a position with a later one of at least its bytes is implied.
        later = -1.0
        positions: list[int] = []
        for t in range(turn - 1, -1, -1):
            if live[t] > later:
                positions.append(t)
                later = float(live[t])
        done = sorted((max(last_read[i], i), i) for i in range(turn) if kept[i] != NOTHING)
        running: list[Term] = []
        constant = 0.0
        index = 0
        for t in reversed(positions):
            fresh: list[Term] = []
            while index < len(done) and done[index][0] < t:
                value = done[index][1]
                fresh += [(c, self.sizes[value]) for c in kept[value][1]]
                index += 1
            running = self._live(constant, [*running, *fresh], extra=float(live[t]))

    def _live(self, constant: float, terms: list[Term], extra: float = 0.0) -> list[Term]:
        """Adds a column equal to `constant + terms`, at most the limit less `extra`; returns it as terms."""
        if self.limit - extra < 0:
            self.impossible = "the values that one node needs exceed the budget"
        return self.total(constant, terms, max(self.limit - extra, 0.0))

    def _memory(self, index: int, before: Alive | None) -> Alive:
        """Adds `M` for one stage; returns the bytes that leave it."""
        stage = self.stages[index]
        node = stage.first
        inputs = self.problem.inputs
        terms: list[Term] = []
        constant = 0.0
        if before is None:
            for i in stage.kept:
                terms += [(c, self.sizes[i]) for c in self.carried(index, i)[1]]
        else:
            constant, terms = before[0], list(before[1])
        current = {i: self.carried(index, i) for i in stage.kept}
        for k in (*stage.repeats, node):
            if k == node:
                constant += self.sizes[k]
            else:
                column = self.repeat[index, k]
                current[k] = (0, (*current[k][1], column))
                terms.append((column, self.sizes[k]))
            change = 0.0
            changes: list[Term] = []
            for i in inputs[k]:
                after = self.after[index].get((i, k), NOTHING)
                if after != current[i]:
                    size = self.sizes[i]
                    change += size * (after[0] - current[i][0])
                    changes += [(c, size) for c in after[1]]
                    changes += [(c, -size) for c in current[i][1]]
                    current[i] = after
            if changes or change or self.work[k] or k == node:
                if k == node:
                    terms = self._live(constant, terms, extra=self.work[k])
                else:
                    terms = self._live(constant, terms)
                    self._workspace(index, k, terms)
                constant = 0.0
            constant += change
            terms += changes
        following = self.carried(index + 1, node)
        constant -= self.sizes[node]
        terms += [(c, self.sizes[node]) for c in following[1]]
        return constant, terms

    def _last_run(self, index: int) -> None:
        """Adds the row of a stage's last first run: what it reads, and what is kept into the next stage."""
        node = self.stages[index].last
        reads = set(self.problem.inputs[node])
        fixed = self.sizes[node] + sum(self.sizes[i] for i in reads)
        following = self.stages[index + 1].kept if index + 1 < len(self.stages) else ()
        terms = [
            (c, self.sizes[i])
            for i in following
            if i not in reads and i != node
            for c in self.carried(index + 1, i)[1]
        ]
        self._live(fixed, terms, extra=self.work[node])

    def _workspace(self, index: int, k: int, live: list[Term]) -> None:
        if not self.work[k]:
            return
        self.rows.row([*live, (self.repeat[index, k], self.work[k])], upper=self.limit)


def build_staged(
    problem: Problem, budget_bytes: int, *, stages: list[Stage] | None = None
) -> StagedModel:
    """Builds the program of the cheapest sequence within a budget.

    Args:
        problem: what to schedule.
        budget_bytes: the limit on live bytes.
        stages: those of `plan_stages` for this budget by default; a relaxation with those of `relax_stages`.
    """
    planned = plan_stages(problem, budget_bytes) if stages is None else stages
    builder = _StagedBuilder(problem, budget_bytes, planned)
    builder.build()
    return StagedModel(
        problem=problem,
        rows=builder.rows,
        stages=builder.stages,
        repeat=builder.repeat,
        unit=builder.unit,
        whole=builder.whole,
        impossible=builder.impossible,
        _rules=builder.rules,
    )
