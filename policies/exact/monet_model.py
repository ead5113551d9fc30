"""MONeT's joint integer program: schedule and implementations at once; `_monet_solve` solves it.

Shah et al., "Memory optimization for deep networks" (ICLR 2021): section 4 and appendices A to C, equations
(1) to (16). Stage `t` (the paper's `k`) ends with the first run of node `t >= turn`; before it, smaller
nodes run again in their order, each at most once. Variables:

* `D[i,l]`, binary: node `i` uses implementation `l` (delta and delta-hat of the paper, sum 1; the sum of a
  node that is not required is its activity `A[i]`, at least the activity of every reader);
* `R[t,i]`, binary: node `i` runs again in stage `t` (the paper's `r`); `R[t,i,l] <= D[i,l]` splits it by
  implementation, for nodes with several (delta with superscript `k`);
* `S[t,i]`: its copy is kept into stage `t` (the paper's `s`), with (7) and (8): `S[t,i] + R[t,i]` is at
  least whatever reads `i` in the stage, by the implementation in use, and at least `S[t+1,i]`;
* memory, by `local_memory`:
  - `paper`: (10), (12), (13) with the tightened set of local tensors of appendix B: while `i` runs again in
    stage `t`, every `j < i` that some node between `i` and the end of the stage could read counts, read or
    not;
  - `tight`: `L[t,i,u]`, the copy of `i` is alive in stage `t` until its reader `u` or beyond, and the
    recurrence of live bytes of `remat.policies.exact.stages`: exact;
* `q`: a result takes the place of an input: (15), (16). The paper's `p` (the input's copy stays usable) is
  "alive after that reader", which is a variable here anyway: `q` is at most what dies there.

Given `D` and `R`, the smallest `S`, `L`, `A`, split `R` and the largest `q` follow and are integral: only
`D` and `R` are.

Departures, none of them at the price of the optimum:

* products (C.4): delta-hat times `s`, summed over implementations, is the maximum of "read by the one in
  use" and `s`: one continuous variable per value and stage where the paper has one per implementation too.
  At integers both agree;
* no `R` of nodes that must not repeat, before the turn, that nothing later can need, or that cannot fit;
  stages in which all that could be of use fits at once have no memory rows and are merged with their
  neighbours;
* forward and backward nodes are treated alike: both may have implementations that read different nodes,
  both may write in place, gradients are values that must not repeat. The forward pass (1) is counted
  exactly in either mode;
* the printed indices of `s` in (7) and (8) lag those of algorithm 2 by one, so that a value made in stage
  `k` for stage `k - 2` would not be counted in between; the memory equations are those of algorithm 2, and
  so are (7), (8) here;
* (15) as printed would forbid reading an input in order to overwrite it (`p` replaces `r` for every reader)
  and bans earlier readers too; here later readers only.

What costs optimality against the paper: one implementation per node for all its runs
(`remat.policies.solvers.choice`).

With `tight` the optimum is that of all plans of this structure. With `paper` every plan found fits too, but
some that fit are missed; bound and `infeasible` then speak of the paper's program only.

Complexity: O(turn * stages) binaries, a few continuous variables for each; NP-hard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from remat.policies.exact.rows import INF, Rows, Term, cost_unit, size_scale
from remat.policies.exact.stages import Stage, without_idle_repeats
from remat.policies.solvers.choice import ChoiceProblem

__all__ = [
    "LocalMemory",
    "MonetModel",
    "build_monet",
    "monet_stages",
]

Floats = npt.NDArray[np.float64]
LocalMemory = Literal["tight", "paper"]
Plan = tuple[tuple[int, ...], tuple[int, ...]]  # selection, sequence
# An amount: a constant plus variables, each with coefficient one.
Amount = tuple[int, tuple[int, ...]]
NOTHING: Amount = (0, ())
ALL: Amount = (1, ())


# -- stages ------------------------------------------------------------------------------------


def monet_stages(
    problem: ChoiceProblem, budget_bytes: int, *, in_place: bool = False
) -> list[Stage]:
    """Returns the stages from the turn on, those without pressure merged: `plan_stages` for every selection
    at once.

    What could be of use is what some choice reads; what must be alive is what all choices read.
    """
    count = len(problem)
    sizes = problem.sizes.tolist()
    repeatable = problem.repeatable.tolist()
    most_work = [max(c.workspace_bytes for c in choices) for choices in problem.choices]
    least_work = [min(c.workspace_bytes for c in choices) for choices in problem.choices]
    last_certain = [-1] * count
    certain = set(problem.certain)
    for node in problem.certain:
        for read in problem.common_inputs[node]:
            last_certain[read] = node
    stages: list[Stage] = []
    useful: set[int] = set()
    for t in range(count - 1, problem.turn - 1, -1):
        useful.discard(t)
        useful.update(problem.every_input[t])
        fixed = {i for i in useful if not repeatable[i] and i in certain and last_certain[i] >= t}
        fixed_bytes = sum(sizes[i] for i in fixed)
        repeats: list[int] = []
        for i in range(max(useful, default=-1), -1, -1):
            if i not in useful or not repeatable[i]:
                continue
            beside = sum(sizes[r] for r in problem.common_inputs[i] if r not in fixed)
            own = 0 if in_place and problem.in_place[i] is not None else sizes[i]
            if fixed_bytes + beside + own + least_work[i] > budget_bytes:
                continue
            repeats.append(i)
            useful.update(problem.every_input[i])
        everything = sum(sizes[i] for i in useful) + sizes[t]
        bounded = everything + max([most_work[t], *(most_work[i] for i in repeats)]) > budget_bytes
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


# -- the program -------------------------------------------------------------------------------


@dataclass(eq=False)
class MonetModel:
    """The program and what its columns mean.

    Attributes:
        rows: the program; its objective is the cost of all runs in units of `unit`.
        stages: from the turn on.
        pick: columns of `D` for nodes that have them: by (node, choice).
        repeat: column of `R` for (stage index, node); `split` for (stage index, node, choice).
        keep: column of `S` for (stage index, value).
        unit: cost of one unit of the objective; `whole`: every cost is an integer number of units.
        impossible: why no plan exists at all, found while building; None if none was found.
    """

    problem: ChoiceProblem
    rows: Rows
    stages: list[Stage]
    pick: dict[tuple[int, int], int]
    repeat: dict[tuple[int, int], int]
    split: dict[tuple[int, int, int], int]
    keep: dict[tuple[int, int], int]
    unit: float
    whole: bool
    impossible: str | None
    _rules: list[tuple[int, Callable[[Floats], float]]]

    def plan(self, values: Floats) -> Plan:
        """Returns the selection and the sequence that the values stand for, useless repetitions left out."""
        selection = [0] * len(self.problem)
        for node, choices in enumerate(self.problem.choices):
            if len(choices) > 1:
                selection[node] = max(
                    range(len(choices)), key=lambda way: values[self.pick[node, way]]
                )
        order = list(range(self.problem.turn))
        for index, stage in enumerate(self.stages):
            again = [k for k in stage.repeats if values[self.repeat[index, k]] > 0.5]
            if stage.bounded:
                order += [*again, stage.first]
            else:
                order += self._when_needed(stage, again, selection)
        return _stripped(self.problem, selection, order)

    def _when_needed(
        self, stage: Stage, again: Sequence[int], selection: Sequence[int]
    ) -> list[int]:
        """Places the repetitions of a merged stage where they are first needed, the others at its end."""
        chosen = self.problem.chosen(selection)
        active = set(self.problem.active(selection))
        waiting = set(again)
        order: list[int] = []
        for node in range(stage.first, stage.last + 1):
            now: set[int] = set(waiting) if node == stage.last else set()
            stack = [node] if node in active else []
            while stack:
                for read in chosen[stack.pop()].inputs:
                    if read in waiting and read not in now:
                        now.add(read)
                        stack.append(read)
            waiting -= now
            order += [*sorted(now), node]
        return order

    def assignment(self, selection: Sequence[int], sequence: Sequence[int]) -> Floats:
        """Returns the columns' values for a plan.

        Repetitions that the program cannot express (twice in one stage) are taken as one, so the values may
        break a row; HiGHS checks a start.
        """
        problem = self.problem
        values = np.zeros(self.rows.num_columns)
        active = problem.active(selection)
        for node in active:
            column = self.pick.get((node, selection[node]))
            if column is not None:
                values[column] = 1.0
        stage_of = np.zeros(len(problem) + 1, np.int64) - 1
        for index, stage in enumerate(self.stages):
            stage_of[stage.first : stage.last + 1] = index
        first = 0
        for node in sequence:
            if first < len(active) and node == active[first]:
                first += 1
                continue
            ahead = active[first] if first < len(active) else len(problem)
            index = int(stage_of[ahead])
            column = self.repeat.get((index, node))
            if column is not None:
                values[column] = 1.0
                if len(problem.choices[node]) > 1:
                    values[self.split[index, node, selection[node]]] = 1.0
        for column, rule in self._rules:
            values[column] = rule(values)
        return values


def _stripped(problem: ChoiceProblem, selection: Sequence[int], order: Sequence[int]) -> Plan:
    """Leaves out of a sequence what does not run with the selection, and repetitions nobody reads."""
    selected, nodes = problem.select(selection)
    number = {node: index for index, node in enumerate(nodes)}
    inside = [number[node] for node in order if node in number]
    kept = without_idle_repeats(selected, inside)
    return tuple(int(way) for way in selection), tuple(nodes[index] for index in kept)


def _value(amount: Amount, values: Floats) -> float:
    return amount[0] + float(sum(values[c] for c in amount[1]))


def _times(amount: Amount, factor: float) -> tuple[float, list[Term]]:
    return amount[0] * factor, [(c, factor) for c in amount[1]]


class _Builder:
    def __init__(
        self,
        problem: ChoiceProblem,
        budget_bytes: int,
        local_memory: LocalMemory,
        in_place: bool,
        stages: list[Stage],
    ) -> None:
        self.problem, self.local_memory, self.in_place = problem, local_memory, in_place
        self.stages = stages
        work = [c.workspace_bytes for choices in problem.choices for c in choices]
        all_bytes = np.concatenate([problem.sizes, np.asarray(work, np.int64)])
        self.scale, self.limit = size_scale(all_bytes, budget_bytes)
        self.unit, self.whole = cost_unit(
            np.asarray([c.cost for choices in problem.choices for c in choices], np.float64)
        )
        self.rows = Rows()
        self.sizes: list[float] = (problem.sizes * self.scale).tolist()
        self.pick: dict[tuple[int, int], int] = {}
        self.repeat: dict[tuple[int, int], int] = {}
        self.split: dict[tuple[int, int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self.rules: list[tuple[int, Callable[[Floats], float]]] = []
        # For every stage, and the forward pass at -1: (value, reader) -> alive after that reader.
        self.after: dict[int, dict[tuple[int, int], Amount]] = {-1: {}}
        self.beyond: dict[int, dict[int, Amount]] = {}  # paper: alive while the stage's node runs
        self.made: dict[int, Amount] = {}  # forward: alive after its own first run
        self.impossible: str | None = None

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
        self.rules.append((column, lambda v: max(_value(a, v) for a in given)))
        for amount in given:
            self.at_least((0, (column,)), amount)
        return (0, (column,))

    def fits(self, constant: float, terms: list[Term]) -> None:
        """Adds the budget's row."""
        if terms:
            self.rows.row(terms, upper=self.limit - constant)
        elif constant > self.limit:
            self.impossible = "the values that one node needs exceed the budget"

    def total(self, constant: float, terms: list[Term], upper: float) -> list[Term]:
        """Adds a column equal to `constant + terms`; returns it as terms."""
        column = self.rows.column(0.0, upper)
        self.rows.row([(column, 1.0), *((c, -a) for c, a in terms)], constant, constant)
        fixed = list(terms)
        self.rules.append((column, lambda v: constant + sum(v[c] * a for c, a in fixed)))
        return [(column, 1.0)]

    # -- implementations ----------------------------------------------------------------------

    def runs(self, node: int) -> Amount:
        """Whether a node runs at all."""
        if self.problem.required[node]:
            return ALL
        return (0, tuple(self.pick[node, way] for way in range(len(self.problem.choices[node]))))

    def reads(self, node: int, value: int, index: int | None = None) -> Amount:
        """Whether a node reads a value: in its first run, or when it runs again in a stage."""
        choices = self.problem.choices[node]
        readers = [way for way, choice in enumerate(choices) if value in choice.inputs]
        if len(readers) == len(choices):
            return self.runs(node) if index is None else (0, (self.repeat[index, node],))
        if index is None:
            return (0, tuple(self.pick[node, way] for way in readers))
        return (0, tuple(self.split[index, node, way] for way in readers))

    def workspace(self, node: int, index: int | None = None) -> tuple[float, list[Term]]:
        """Extra bytes while a node runs, as (constant, terms)."""
        choices = self.problem.choices[node]
        work = [choice.workspace_bytes * self.scale for choice in choices]
        if not any(work):
            return 0.0, []
        if index is None and (node, 0) not in self.pick:
            return work[0], []
        if index is None:
            return 0.0, [(self.pick[node, way], w) for way, w in enumerate(work)]
        if len(choices) == 1:
            return 0.0, [(self.repeat[index, node], work[0])]
        return 0.0, [(self.split[index, node, way], w) for way, w in enumerate(work)]

    def _picks(self) -> None:
        problem = self.problem
        fixed = 0.0
        for node, choices in enumerate(problem.choices):
            required, several = bool(problem.required[node]), len(choices) > 1
            if required and not several:
                fixed += choices[0].cost / self.unit
                continue
            for way, choice in enumerate(choices):
                self.pick[node, way] = self.rows.column(
                    cost=choice.cost / self.unit, integral=several
                )
            columns = [(self.pick[node, way], 1.0) for way in range(len(choices))]
            if several:
                self.rows.row(columns, 1.0 if required else 0.0, 1.0)
        self.rows.column(1.0, 1.0, cost=fixed)  # so that gaps are relative to the whole cost
        self.rules.append((self.rows.num_columns - 1, lambda _: 1.0))
        for node, users in enumerate(problem.every_user):
            if not problem.required[node]:
                for user in users:
                    self.at_least(self.runs(node), self.reads(user, node))

    def _repeats(self, index: int, node: int) -> None:
        choices = self.problem.choices[node]
        if len(choices) == 1:
            self.repeat[index, node] = self.rows.column(
                cost=choices[0].cost / self.unit, integral=True
            )
            return
        whole = self.repeat[index, node] = self.rows.column(integral=True)
        for way, choice in enumerate(choices):
            part = self.split[index, node, way] = self.rows.column(cost=choice.cost / self.unit)
            self.rows.row([(self.pick[node, way], 1.0), (part, -1.0)], lower=0.0)
        parts = [(self.split[index, node, way], 1.0) for way in range(len(choices))]
        self.rows.row([(whole, -1.0), *parts], 0.0, 0.0)

    # -- stages -------------------------------------------------------------------------------

    def build(self) -> None:
        self._picks()
        for index in range(len(self.stages) - 1, -1, -1):
            self._variables(index)
        self._forward_variables()
        self._forward_memory()
        before: tuple[float, list[Term]] | None = None
        for index, stage in enumerate(self.stages):
            if not stage.bounded:
                before = None
                if stage.rows == "last":
                    self._last_run(index)
            elif self.local_memory == "tight":
                before = self._memory(index, before)
            else:
                self._paper_memory(index)

    def carried(self, index: int, value: int) -> Amount:
        """Returns the amount of `value` that is kept into a stage."""
        column = self.keep.get((index, value))
        return NOTHING if column is None else (0, (column,))

    def _variables(self, index: int) -> None:
        stage = self.stages[index]
        again = set(stage.repeats)
        for node in stage.repeats:
            self._repeats(index, node)
        self.after[index], self.beyond[index] = {}, {}
        for i in reversed(stage.kept):
            following = self.carried(index + 1, i)
            events: list[tuple[int, Amount]] = []
            for user in self.problem.every_user[i]:
                if stage.first <= user <= stage.last:
                    events.append((user, self.reads(user, i)))
                elif user in again:
                    events.append((user, self.reads(user, i, index)))
            needs = [*(amount for _, amount in events), following]
            if stage.bounded and self.local_memory == "tight":
                alive = following
                for user, amount in reversed(events[1:]):
                    self.after[index][i, user] = alive
                    alive = self.most([amount, alive])
                needs = [alive]
                if events:
                    self.after[index][i, events[0][0]] = alive
                    needs.append(events[0][1])
            elif stage.bounded:
                at_end = [amount for user, amount in events if user == stage.first]
                beyond = self.beyond[index][i] = self.most([*at_end, following])
                needs = [*(amount for user, amount in events if user != stage.first), beyond]
            self._supply(index, i, needs)

    def _supply(self, index: int, value: int, needs: Sequence[Amount]) -> None:
        """(7), (8): what is needed in a stage is kept into it or made in it."""
        given = list(dict.fromkeys(a for a in needs if a != NOTHING))
        if ALL in given:
            given = [ALL]
        made = self.repeat.get((index, value))
        column = self.keep[index, value] = self.rows.column()

        def rule(values: Floats) -> float:
            most = max((_value(amount, values) for amount in given), default=0.0)
            return max(most - (0.0 if made is None else values[made]), 0.0)

        self.rules.append((column, rule))
        total: Amount = (0, (column,) if made is None else (column, made))
        for amount in given:
            self.at_least(total, amount, equal=len(given) == 1)
        if not given:
            self.at_least((0, ()), total)
        elif made is not None and given != [ALL]:
            self.rows.row([(column, 1.0), (made, 1.0)], upper=1.0)

    # -- memory -------------------------------------------------------------------------------

    def _overwriting(self, node: int, read: Amount, stays: Amount, was: Amount) -> int | None:
        """(15), (16): a column, 1 only if the node runs, reads its target, and the target's copy dies there."""
        if not self.in_place or read == NOTHING or stays == ALL:
            return None
        column = self.rows.column()
        self.rules.append(
            (column, lambda v: max(min(_value(read, v), _value(was, v) - _value(stays, v)), 0.0))
        )
        self.at_least(read, (0, (column,)))
        self.at_least(was, (stays[0], (column, *stays[1])))
        return column

    def _run(
        self,
        node: int,
        index: int | None,
        constant: float,
        terms: list[Term],
        overwriting: int | None,
    ) -> list[Term]:
        """Adds the rows of a run with `constant + terms` live bytes; returns those as one column."""
        work, extra = self.workspace(node, index)
        saved = 0.0 if overwriting is None else self.sizes[node]
        simple = not extra and not saved
        upper = self.limit - work if simple else self.limit + saved
        if upper < 0:
            self.impossible = "the values that one node needs exceed the budget"
            upper = 0.0
        column = self.total(constant, terms, upper)
        if not simple:
            rest = [] if overwriting is None else [(overwriting, -saved)]
            self.fits(work, [*column, *extra, *rest])
        return column

    def _forward_variables(self) -> None:
        """The forward pass: alive until its last reader there, or kept until the turn."""
        turn = self.problem.turn
        for i in range(turn - 1, -1, -1):
            alive = self.carried(0, i)
            for user in reversed(self.problem.every_user[i]):
                if user < turn:
                    self.after[-1][i, user] = alive
                    alive = self.most([self.reads(user, i), alive])
            self.made[i] = alive

    def _forward_memory(self) -> None:
        """(1), exactly."""
        constant, terms = 0.0, []
        turn = self.problem.turn
        current: dict[int, Amount] = {}
        for node in range(turn):
            added = _times(self.runs(node), self.sizes[node])
            constant, terms = constant + added[0], [*terms, *added[1]]
            change, changes = self._frees(-1, node, current)
            change -= added[0]
            changes += [(c, -a) for c, a in added[1]]
            left = _times(self.made[node], self.sizes[node])
            change, changes = change + left[0], changes + left[1]
            over = self._target(node, None, -1, current)
            self._forget(-1, node, current)
            current[node] = self.made[node]
            work, extra = self.workspace(node)
            net = _merged(changes)
            if net or change < 0 or work or extra or over is not None or node == turn - 1:
                terms = self._run(node, None, constant, terms, over)
                constant = 0.0
            constant, terms = constant + change, [*terms, *net]

    def _frees(self, index: int, node: int, current: dict[int, Amount]) -> tuple[float, list[Term]]:
        """The change of live bytes after a node has read its inputs."""
        change, changes = 0.0, []
        for i in self.problem.every_input[node]:
            after = self.after[index].get((i, node), NOTHING)
            if after != current[i]:
                for amount, sign in ((after, 1), (current[i], -1)):
                    moved = _times(amount, sign * self.sizes[i])
                    change += moved[0]
                    changes += moved[1]
        return change, changes

    def _forget(self, index: int, node: int, current: dict[int, Amount]) -> None:
        for i in self.problem.every_input[node]:
            current[i] = self.after[index].get((i, node), NOTHING)

    def _target(
        self, node: int, stage: int | None, index: int, current: dict[int, Amount]
    ) -> int | None:
        """The column of writing in place, None where that cannot be."""
        target = self.problem.in_place[node]
        if not self.in_place or target is None or not self.sizes[node]:
            return None
        read = self.reads(node, target, stage)
        after = self.after[index].get((target, node), NOTHING)
        return self._overwriting(node, read, after, current[target])

    def _memory(
        self, index: int, before: tuple[float, list[Term]] | None
    ) -> tuple[float, list[Term]]:
        """Adds the exact live bytes of one stage; returns those that leave it."""
        stage = self.stages[index]
        node = stage.first
        constant, terms = 0.0, []
        if before is None:
            for i in stage.kept:
                terms += _times(self.carried(index, i), self.sizes[i])[1]
        else:
            constant, terms = before[0], list(before[1])
        current = {i: self.carried(index, i) for i in stage.kept}
        for k in (*stage.repeats, node):
            first = k == node
            run: Amount = self.runs(k) if first else (0, (self.repeat[index, k],))
            if not first:
                current[k] = (0, (*current[k][1], *run[1]))
            added = _times(run, self.sizes[k])
            constant, terms = constant + added[0], [*terms, *added[1]]
            change, changes = self._frees(index, k, current)
            over = self._target(k, None if first else index, index, current)
            self._forget(index, k, current)
            work, extra = self.workspace(k, None if first else index)
            if changes or change or work or extra or first or over is not None:
                terms = self._run(k, None if first else index, constant, terms, over)
                constant = 0.0
            constant, terms = constant + change, [*terms, *changes]
        gone = _times(self.runs(node), -self.sizes[node])
        left = _times(self.carried(index + 1, node), self.sizes[node])
        return constant + gone[0], [*terms, *gone[1], *left[1]]

    def _paper_memory(self, index: int) -> None:
        """Adds (10), (12), (13) for one stage, with appendix B's bound on local tensors."""
        stage = self.stages[index]
        node = stage.first
        beyond = self.beyond[index]
        last_reader: dict[int, int] = {}  # among the nodes that may run again
        for k in stage.repeats:
            for read in self.problem.every_input[k]:
                last_reader[read] = k
        constant, terms = 0.0, []
        for i in stage.kept:
            terms += _times(self.carried(index, i), self.sizes[i])[1]
        again = set(stage.repeats)
        for i in stage.kept:
            kept = _times(self.carried(index, i), -self.sizes[i])
            if i in again:
                terms = self.total(constant, _merged(terms), self.limit)  # (13)
                constant = 0.0
                run: Amount = (0, (self.repeat[index, i],))
                fixed, here = 0.0, [*terms, *kept[1], *_times(run, self.sizes[i])[1]]
                for j, reader in last_reader.items():
                    if j < i <= reader:
                        stays = _times(beyond[j], -self.sizes[j])
                        fixed += stays[0]
                        here += [*stays[1], *_times(run, self.sizes[j])[1]]
                over = self._paper_target(index, i)
                if over is not None:
                    here.append((over, -self.sizes[i]))
                self.fits(fixed, [*here, *self.workspace(i, index)[1]])  # (12)
            left = _times(beyond[i], self.sizes[i])
            constant, terms = constant + left[0], [*terms, *kept[1], *left[1]]
        self._at_first_run(index, node, constant, terms)  # (10)

    def _last_run(self, index: int) -> None:
        """Adds the row of a merged stage's last first run: what it reads, what is kept into the next stage."""
        node = self.stages[index].last
        following = self.stages[index + 1].kept if index + 1 < len(self.stages) else ()
        constant, terms = 0.0, []
        for i in sorted({*self.problem.every_input[node], *following} - {node}):
            stays = self.most([self.reads(node, i), self.carried(index + 1, i)])
            alive = _times(stays, self.sizes[i])
            constant, terms = constant + alive[0], [*terms, *alive[1]]
        self._at_first_run(index, node, constant, terms)

    def _at_first_run(self, index: int, node: int, constant: float, terms: list[Term]) -> None:
        """Adds the row of a stage's last first run beside the bytes of other values."""
        added = _times(self.runs(node), self.sizes[node])
        work, extra = self.workspace(node)
        constant, terms = constant + added[0] + work, [*terms, *added[1], *extra]
        target = self.problem.in_place[node]
        if target is not None:
            following = self.carried(index + 1, target)
            over = self._overwriting(node, self.reads(node, target), following, ALL)
            if over is not None:
                terms.append((over, -self.sizes[node]))
        self.fits(constant, _merged(terms))

    def _paper_target(self, index: int, node: int) -> int | None:
        """(15), (16) for a repetition: no later reader of the target runs in the stage or after it."""
        target = self.problem.in_place[node]
        if target is None or not self.in_place:
            return None
        stage = self.stages[index]
        later = [
            self.reads(user, target, index)
            for user in self.problem.every_user[target]
            if user > node and user in stage.repeats
        ]
        stays = self.most([*later, self.beyond[index][target]])
        return self._overwriting(node, self.reads(node, target, index), stays, ALL)


def _merged(terms: Sequence[Term]) -> list[Term]:
    """Adds up the coefficients of each column, dropping those that cancel."""
    sums: dict[int, float] = {}
    for column, coefficient in terms:
        sums[column] = sums.get(column, 0.0) + coefficient
    return [(column, coefficient) for column, coefficient in sums.items() if coefficient]


def build_monet(
    problem: ChoiceProblem,
    budget_bytes: int,
    *,
    local_memory: LocalMemory = "tight",
    in_place: bool = False,
    stages: list[Stage] | None = None,
) -> MonetModel:
    """Builds the program; the arguments are those of `solve_monet`.

    Args:
        stages: a relaxation with those of `relax_stages`; those of `monet_stages` by default.
    """
    planned = monet_stages(problem, budget_bytes, in_place=in_place) if stages is None else stages
    builder = _Builder(problem, budget_bytes, local_memory, in_place, planned)
    builder.build()
    return MonetModel(
        problem=problem,
        rows=builder.rows,
        stages=builder.stages,
        pick=builder.pick,
        repeat=builder.repeat,
        split=builder.split,
        keep=builder.keep,
        unit=builder.unit,
        whole=builder.whole,
        impossible=builder.impossible,
        _rules=builder.rules,
    )
