"""The integer program of staged recomputation, with as few variables as the graph and the budget allow.

Checkmate's stages (Jain et al., MLSys 2020, section 4): stage `t` ends with the first run of node `t`, and before
it nodes smaller than `t` run again, in their order, each at most once. Restricted to what JAX executes: the forward
pass (`t < turn`) repeats nothing, and only repeatable nodes are repeated.

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

* variables without a later need (walked back from the last stage), of nodes that do not fit beside the values that
  must be alive in that stage in any case, and above the diagonal;
* the forward pass: one variable per value, kept until the turn or not;
* stages in which everything that could be of use fits at once: neighbouring ones become one stage without `L`
  and `M`, as there a value is made at most once and kept;
* rows of positions after which nothing can be freed: the next position has at least as many bytes;
* `L` where at most one event follows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from remat.policies.exact.rows import INF, Rows, Term, cost_unit, size_scale
from remat.policies.solvers.problem import Problem

__all__ = [
    "Stage",
    "StagedModel",
    "build_staged",
    "plan_stages",
    "relax_stages",
    "without_idle_repeats",
]

Floats = npt.NDArray[np.float64]
# An amount: a constant plus variables, each with coefficient one.
Amount = tuple[int, tuple[int, ...]]
NOTHING: Amount = (0, ())
ALL: Amount = (1, ())


@dataclass(frozen=True)
class Stage:
    """First runs of nodes `first..last`, preceded by repetitions.

    Attributes:
        kept: values that may be worth keeping into this stage, ascending.
        repeats: nodes that may run again in it, ascending.
        rows: where the budget is imposed: `all` positions, the `last` first run only, or nowhere (`none`). `all`
            takes `first == last`.
    """

    first: int
    last: int
    kept: tuple[int, ...]
    repeats: tuple[int, ...]
    rows: Literal["all", "last", "none"]

    @property
    def bounded(self) -> bool:
        """Whether every position has its row."""
        return self.rows == "all"


def plan_stages(problem: Problem, budget_bytes: int, slack_bytes: int | None = None) -> list[Stage]:
    """Returns the stages from the turn on, those without pressure merged. O(nodes * (nodes + edges)).

    Args:
        budget_bytes: repetitions that cannot fit are left out.
        slack_bytes: stages in which all that could be of use fits into so many bytes are not bounded; the budget
            by default.
    """
    slack = budget_bytes if slack_bytes is None else slack_bytes
    count = len(problem)
    sizes = problem.sizes.tolist()
    work = problem.extra_while_running.tolist()
    repeatable = problem.repeatable.tolist()
    last_user = [row[-1] if row else -1 for row in problem.users]
    stages: list[Stage] = []
    useful: set[int] = set()
    for t in range(count - 1, problem.turn - 1, -1):
        useful.discard(t)
        useful.update(problem.inputs[t])
        fixed = {i for i in useful if not repeatable[i] and last_user[i] >= t}
        fixed_bytes = sum(sizes[i] for i in fixed)
        repeats: list[int] = []
        # Descending, so that the readers of a node are decided before the node.
        waiting = sorted(useful)
        for i in range(waiting[-1] if waiting else -1, -1, -1):
            if i not in useful or not repeatable[i]:
                continue
            beside = sum(sizes[r] for r in problem.inputs[i] if r not in fixed)
            if fixed_bytes + beside + sizes[i] + work[i] > budget_bytes:
                continue
            repeats.append(i)
            useful.update(problem.inputs[i])
        everything = sum(sizes[i] for i in useful) + sizes[t]
        largest_work = max([work[t], *(work[i] for i in repeats)])
        bounded = everything + largest_work > slack
        rows = "all" if bounded else "none"
        stages.append(Stage(t, t, tuple(sorted(useful)), tuple(reversed(repeats)), rows))
    stages.reverse()
    merged: list[Stage] = []
    for stage in stages:
        before = merged[-1] if merged else None
        if before is not None and before.rows == stage.rows == "none":
            merged[-1] = Stage(before.first, stage.last, before.kept, before.repeats, "none")
        else:
            merged.append(stage)
    return merged


def relax_stages(
    stages: Sequence[Stage], checked: Collection[int], exact: Collection[int]
) -> list[Stage]:
    """Merges the stages of `plan_stages` for a relaxation that imposes the budget at few positions.

    A merged stage imposes it at its last first run only. Sequences of the original stages stay feasible at the same
    cost or less: repetitions of one node within a merged stage count once, and fewer rows hold.

    Args:
        checked: nodes whose first runs end a merged stage.
        exact: stages (by their first run) that stay as they are.
    """
    merged: list[Stage] = []
    opened: Stage | None = None
    for stage in stages:
        if stage.bounded and stage.first in exact:
            if opened is not None:
                merged.append(opened)
                opened = None
            merged.append(stage)
            continue
        first, kept, repeats = stage.first, stage.kept, stage.repeats
        if opened is not None:
            # Later stages may repeat nodes that do not fit in the first one.
            first, kept = opened.first, opened.kept
            repeats = tuple(sorted({*opened.repeats, *(i for i in repeats if i < first)}))
        opened = Stage(first, stage.last, kept, repeats, "none")
        if stage.last in checked and stage.bounded:
            merged.append(replace(opened, rows="last"))
            opened = None
    if opened is not None:
        merged.append(opened)
    return merged


@dataclass(eq=False)
class StagedModel:
    """The program and what its columns mean.

    Attributes:
        rows: the linear program.
        stages: from the turn on.
        repeat: column of `R` for (stage index, node).
        keep: column of `S` for (stage index, value).
        unit: cost of one unit of the objective; `whole`: every cost is an integer number of units.
        impossible: why no sequence exists at all, found while building; None if none was found.
        peak: column of the peak in units of `1 / scale` bytes, if the peak is the objective.
    """

    problem: Problem
    rows: Rows
    stages: list[Stage]
    repeat: dict[tuple[int, int], int]
    keep: dict[tuple[int, int], int]
    unit: float
    whole: bool
    scale: float
    impossible: str | None
    peak: int | None
    _rules: list[tuple[int, tuple[Amount, ...], int | None]]
    _totals: list[tuple[int, float, list[Term]]]

    def sequence(self, values: Floats) -> list[int]:
        """Returns the sequence that the values of `R` stand for, useless repetitions left out."""
        order = list(range(self.problem.turn))
        for index, stage in enumerate(self.stages):
            chosen = [k for k in stage.repeats if values[self.repeat[index, k]] > 0.5]
            if stage.bounded:
                order += [*chosen, stage.first]
            else:
                order += _when_needed(self.problem, stage, chosen)
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
        for column, amounts, made in self._rules:
            most = max((_value(amount, values) for amount in amounts), default=0.0)
            values[column] = most - (values[made] if made is not None else 0.0)
        largest = 0.0
        for column, constant, terms in self._totals:
            values[column] = constant + sum(values[c] * a for c, a in terms)
            largest = max(largest, values[column])
        if self.peak is not None:
            values[self.peak] = largest
        np.clip(values, 0.0, None, out=values)
        return values


def _when_needed(problem: Problem, stage: Stage, chosen: Sequence[int]) -> list[int]:
    """Places repetitions in a merged stage where they are first needed, the others before its last run."""
    waiting = set(chosen)
    order: list[int] = []
    for node in range(stage.first, stage.last + 1):
        now: set[int] = set(waiting) if node == stage.last else set()
        stack = [node]
        while stack:
            for read in problem.inputs[stack.pop()]:
                if read in waiting and read not in now:
                    now.add(read)
                    stack.append(read)
        waiting -= now
        order += [*sorted(now), node]
    return order


def _value(amount: Amount, values: Floats) -> float:
    return amount[0] + sum(values[c] for c in amount[1])


def without_idle_repeats(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """Leaves out repetitions whose copy nobody reads, also those that only served such ones."""
    wanted: set[int] = set()
    kept: list[int] = []
    first = [-1] * len(problem)
    for position, node in enumerate(sequence):
        if first[node] < 0:
            first[node] = position
    for position in range(len(sequence) - 1, -1, -1):
        node = int(sequence[position])
        if first[node] != position and node not in wanted:
            continue
        wanted.discard(node)
        wanted.update(problem.inputs[node])
        kept.append(node)
    kept.reverse()
    return kept


class _Builder:
    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        stages: list[Stage] | None,
        peak_from: int | None,
    ) -> None:
        self.problem = problem
        self.stages = stages or plan_stages(problem, budget_bytes, peak_from)
        self.scale, self.limit = size_scale(
            np.concatenate([problem.sizes, problem.extra_while_running]), budget_bytes
        )
        self.unit, self.whole = cost_unit(problem.costs)
        self.rows = Rows()
        self.sizes = (problem.sizes * self.scale).tolist()
        self.work = (problem.extra_while_running * self.scale).tolist()
        self.repeat: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self.rules: list[tuple[int, tuple[Amount, ...], int | None]] = []
        self.totals: list[tuple[int, float, list[Term]]] = []
        # For every bounded stage: value -> its alive amounts after each of its readers there.
        self.after: list[dict[tuple[int, int], Amount]] = []
        self.impossible: str | None = None
        self.peak = None
        if peak_from is not None:
            self.peak = self.rows.column(peak_from * self.scale, self.limit, cost=1.0)

    # -- rows ---------------------------------------------------------------------------------

    def at_least(self, left: Amount, right: Amount, equal: bool = False) -> None:
        """Adds `left >= right`, or `left == right`."""
        terms = [*((c, 1.0) for c in left[1]), *((c, -1.0) for c in right[1])]
        bound = float(right[0] - left[0])
        if not terms:
            if bound > 0:
                self.impossible = "a value is needed that cannot be made"
            return
        self.rows.row(terms, bound, bound if equal else INF)

    def most(self, amounts: Sequence[Amount]) -> Amount:
        """Returns an amount that is at least each of `amounts`."""
        given = list(dict.fromkeys(a for a in amounts if a != NOTHING))
        if ALL in given:
            return ALL
        if len(given) <= 1:
            return given[0] if given else NOTHING
        column = self.rows.column()
        self.rules.append((column, tuple(given), None))
        for amount in given:
            self.at_least((0, (column,)), amount)
        return (0, (column,))

    # -- stages -------------------------------------------------------------------------------

    def build(self) -> None:
        self.after = [{} for _ in self.stages]
        for index in range(len(self.stages) - 1, -1, -1):
            self._variables(index)
        self._forward()
        previous_end: tuple[int, float, list[Term]] | None = None
        for index, stage in enumerate(self.stages):
            previous_end = self._memory(index, previous_end) if stage.bounded else None
            if stage.rows == "last":
                self._last_run(index)

    def _variables(self, index: int) -> None:
        stage = self.stages[index]
        repeats = set(stage.repeats)
        made: dict[int, int] = {}
        for k in stage.repeats:
            cost = 0.0 if self.peak is not None else float(self.problem.costs[k]) / self.unit
            made[k] = self.repeat[index, k] = self.rows.column(cost=cost, integral=True)
        for i in reversed(stage.kept):
            following = self.carried(index + 1, i)
            events: list[tuple[int, Amount]] = []
            for user in self.problem.users[i]:
                if stage.first <= user <= stage.last:
                    events.append((user, ALL))
                elif user in repeats:
                    events.append((user, (0, (made[user],))))
            needs = [amount for _, amount in events]
            if stage.bounded:
                alive = following
                for user, amount in reversed(events[1:]):
                    self.after[index][i, user] = alive
                    alive = self.most([amount, alive])
                needs = [alive]
                if events:
                    self.after[index][i, events[0][0]] = alive
                    needs.append(events[0][1])
            else:
                needs.append(following)
            self._supply(index, i, needs)

    def carried(self, index: int, value: int) -> Amount:
        """Returns the amount of `value` that is kept into a stage."""
        column = self.keep.get((index, value))
        return NOTHING if column is None else (0, (column,))

    def _supply(self, index: int, value: int, needs: Sequence[Amount]) -> None:
        """What is needed in a stage is kept into it or made in it."""
        given = list(dict.fromkeys(a for a in needs if a != NOTHING))
        if ALL in given:
            given = [ALL]
        made = self.repeat.get((index, value))
        column = self.keep[index, value] = self.rows.column()
        self.rules.append((column, tuple(given), made))
        total: Amount = (0, (column,) if made is None else (column, made))
        for amount in given:
            self.at_least(total, amount, equal=len(given) == 1)
        if not given:
            self.at_least((0, ()), total)
        elif made is not None and given != [ALL]:
            self.rows.row([(column, 1.0), (made, 1.0)], upper=1.0)

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
            running = self._total(constant, [*running, *fresh], extra=float(live[t]))

    def _total(self, constant: float, terms: list[Term], extra: float = 0.0) -> list[Term]:
        """Adds a column equal to `constant + terms`, at most the limit less `extra`; returns it as terms."""
        if self.peak is None:
            if self.limit - extra < 0:
                self.impossible = "the values that one node needs exceed the budget"
            column = self.rows.column(0.0, max(self.limit - extra, 0.0))
        else:
            column = self.rows.column(0.0, self.limit)
            self.rows.row([(self.peak, 1.0), (column, -1.0)], lower=extra)
        self.rows.row([(column, 1.0), *((c, -a) for c, a in terms)], constant, constant)
        self.totals.append((column, constant, terms))
        return [(column, 1.0)]

    def _memory(
        self, index: int, before: tuple[int, float, list[Term]] | None
    ) -> tuple[int, float, list[Term]]:
        """Adds `M` for one stage; returns (unused, constant, terms): the bytes that leave the stage."""
        stage = self.stages[index]
        node = stage.first
        inputs = self.problem.inputs
        terms: list[Term] = []
        constant = 0.0
        if before is None:
            for i in stage.kept:
                terms += [(c, self.sizes[i]) for c in self.carried(index, i)[1]]
        else:
            constant, terms = before[1], list(before[2])
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
                    terms = self._total(constant, terms, extra=self.work[k])
                else:
                    terms = self._total(constant, terms)
                    self._workspace(index, k, terms)
                constant = 0.0
            constant += change
            terms += changes
        following = self.carried(index + 1, node)
        constant -= self.sizes[node]
        terms += [(c, self.sizes[node]) for c in following[1]]
        return 0, constant, terms

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
        self._total(fixed, terms, extra=self.work[node])

    def _workspace(self, index: int, k: int, live: list[Term]) -> None:
        if not self.work[k]:
            return
        terms = [*live, (self.repeat[index, k], self.work[k])]
        if self.peak is None:
            self.rows.row(terms, upper=self.limit)
        else:
            self.rows.row([(self.peak, 1.0), *((c, -a) for c, a in terms)], lower=0.0)


def build_staged(
    problem: Problem,
    budget_bytes: int,
    *,
    stages: list[Stage] | None = None,
    peak_from: int | None = None,
) -> StagedModel:
    """Builds the program of the cheapest sequence within a budget, or of the smallest peak.

    Args:
        problem: what to schedule.
        budget_bytes: the limit on live bytes.
        stages: those of `plan_stages` for this budget by default; a relaxation with those of `relax_stages`.
        peak_from: the objective is the peak, which is known to be at least this, not the cost; the budget
            remains a limit.
    """
    builder = _Builder(problem, budget_bytes, stages, peak_from)
    builder.build()
    return StagedModel(
        problem=problem,
        rows=builder.rows,
        stages=builder.stages,
        repeat=builder.repeat,
        keep=builder.keep,
        unit=builder.unit,
        whole=builder.whole,
        scale=builder.scale,
        impossible=builder.impossible,
        peak=builder.peak,
        _rules=builder.rules,
        _totals=builder.totals,
    )
