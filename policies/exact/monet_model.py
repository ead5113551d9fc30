"""MONeT's joint integer program: schedule and implementations at once; `monet_solve` solves it.

Shah et al., "Memory optimization for deep networks" (ICLR 2021): section 4 and appendices A to C, equations
(1) to (16). Stage `t` (the paper's `k`) ends with the first run of node `t >= turn`; before it, smaller
nodes run again in their order, each at most once. Variables:

* `D[i,l]`, binary: node `i` uses implementation `l` (delta and delta-hat of the paper, sum 1; the sum of a
  node that is not required is its activity `A[i]`, at least the activity of every reader);
* `R[t,i]`, binary: node `i` runs again in stage `t` (the paper's `r`); `R[t,i,l] <= D[i,l]` splits it by
  implementation, for nodes with several (delta with superscript `k`);
* `S[t,i]`: its copy is kept into stage `t` (the paper's `s`), with (7) and (8): `S[t,i] + R[t,i]` is at
  least whatever reads `i` in the stage, by the implementation in use, and at least `S[t+1,i]`;
* `L[t,i,u]`: the copy of `i` is alive in stage `t` until its reader `u` or beyond, and the recurrence of live
  bytes of `remat.policies.exact.staged_model`, which counts exactly;
* `q`: a result takes the place of an input: (15), (16). The paper's `p` (the input's copy stays usable) is
  "alive after that reader", which is a variable here anyway: `q` is at most what dies there.

Given `D` and `R`, the smallest `S`, `L`, `A`, split `R` and the largest `q` follow and are integral: only
`D` and `R` are.

Departures, none of them at the price of the optimum:

* memory: appendix B bounds the bytes of local tensors, (10), (12), (13), read or not, and misses plans that need
  the difference; here they are counted;
* products (C.4): delta-hat times `s`, summed over implementations, is the maximum of "read by the one in
  use" and `s`: one continuous variable per value and stage where the paper has one per implementation too.
  At integers both agree;
* no `R` of nodes that must not repeat, before the turn, that nothing later can need, or that cannot fit;
  stages in which all that could be of use fits at once have no memory rows and are merged with their
  neighbours;
* forward and backward nodes are treated alike: both may have implementations that read different nodes,
  both may write in place, gradients are values that must not repeat. The forward pass (1) is counted
  exactly, too;
* the printed indices of `s` in (7) and (8) lag those of algorithm 2 by one, so that a value made in stage
  `k` for stage `k - 2` would not be counted in between; the memory equations are those of algorithm 2, and
  so are (7), (8) here;
* (15) as printed would forbid reading an input in order to overwrite it (`p` replaces `r` for every reader)
  and bans earlier readers too; here later readers only.

What costs optimality against the paper: one implementation per node for all its runs
(`remat.policies.solvers.choice`).

The optimum is that of all plans of this structure.

Complexity: O(turn * stages) binaries, a few continuous variables for each; NP-hard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.policies.exact.amounts import ALL, NOTHING, Amount, AmountRows, Rule, filled, value_of
from remat.policies.exact.rows import Rows, Term, cost_unit, size_scale
from remat.policies.exact.stages import Stage, choice_stages, when_needed, without_idle_repeats
from remat.policies.solvers.choice import ChoiceProblem

__all__ = ["MonetModel", "Selected", "build_monet"]

Floats = npt.NDArray[np.float64]
Selected = tuple[tuple[int, ...], tuple[int, ...]]
"""A selection of implementations, and a sequence for it."""


@dataclass(frozen=True, eq=False)
class MonetModel:
    """The program and what its columns mean.

    Attributes:
        rows: the program; its objective is the cost of all runs in units of `unit`.
        stages: from the turn on.
        pick: columns of `D` for nodes that have them: by (node, choice).
        repeat: column of `R` for (stage index, node); `split` for (stage index, node, choice).
        unit: cost of one unit of the objective; `whole`: every cost is an integer number of units.
        impossible: why no plan exists at all, found while building; None if none was found.
    """

    problem: ChoiceProblem
    rows: Rows
    stages: list[Stage]
    pick: dict[tuple[int, int], int]
    repeat: dict[tuple[int, int], int]
    split: dict[tuple[int, int, int], int]
    unit: float
    whole: bool
    impossible: str | None
    _rules: Sequence[Rule]

    def selected(self, values: Floats) -> Selected:
        """Returns the selection and the sequence that the values stand for, useless repetitions left out."""
        selection = [0] * len(self.problem)
        for node, choices in enumerate(self.problem.choices):
            if len(choices) > 1:
                selection[node] = max(
                    range(len(choices)), key=lambda way: values[self.pick[node, way]]
                )
        chosen = self.problem.chosen(selection)
        runs = set(self.problem.active(selection))
        inputs = [choice.inputs if node in runs else () for node, choice in enumerate(chosen)]
        order = list(range(self.problem.turn))
        for index, stage in enumerate(self.stages):
            again = [k for k in stage.repeats if values[self.repeat[index, k]] > 0.5]
            if stage.bounded:
                order += [*again, stage.first]
            else:
                order += when_needed(inputs, stage.first, stage.last, again)
        return _stripped(self.problem, selection, order)

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
        return filled(values, self._rules)


def _stripped(problem: ChoiceProblem, selection: Sequence[int], order: Sequence[int]) -> Selected:
    """Leaves out of a sequence what does not run with the selection, and repetitions nobody reads."""
    selected, nodes = problem.select(selection)
    number = {node: index for index, node in enumerate(nodes)}
    inside = [number[node] for node in order if node in number]
    kept = without_idle_repeats(selected, inside)
    return tuple(int(way) for way in selection), tuple(nodes[index] for index in kept)


def _times(amount: Amount, factor: float) -> tuple[float, list[Term]]:
    return amount[0] * factor, [(c, factor) for c in amount[1]]


class _MonetBuilder(AmountRows):
    def __init__(
        self, problem: ChoiceProblem, budget_bytes: int, in_place: bool, stages: list[Stage]
    ) -> None:
        super().__init__()
        self.problem, self.in_place, self.stages = problem, in_place, stages
        work = [c.workspace_bytes for choices in problem.choices for c in choices]
        all_bytes = np.concatenate([problem.sizes, np.asarray(work, np.int64)])
        self.scale, self.limit = size_scale(all_bytes, budget_bytes)
        self.unit, self.whole = cost_unit(
            np.asarray([c.cost for choices in problem.choices for c in choices], np.float64)
        )
        self.sizes: list[float] = (problem.sizes * self.scale).tolist()
        self.pick: dict[tuple[int, int], int] = {}
        self.split: dict[tuple[int, int, int], int] = {}
        # For every stage, and the forward pass at -1: (value, reader) -> alive after that reader.
        self.after: dict[int, dict[tuple[int, int], Amount]] = {-1: {}}
        self.made: dict[int, Amount] = {}  # forward: alive after its own first run

    # -- rows ---------------------------------------------------------------------------------

    def fits(self, constant: float, terms: list[Term]) -> None:
        """Adds the budget's row."""
        if terms:
            self.rows.row(terms, upper=self.limit - constant)
        elif constant > self.limit:
            self.impossible = "the values that one node needs exceed the budget"

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
            before = self._memory(index, before) if stage.bounded else None
            if stage.rows == "last":
                self._last_run(index)

    def _variables(self, index: int) -> None:
        stage = self.stages[index]
        again = set(stage.repeats)
        for node in stage.repeats:
            self._repeats(index, node)
        self.after[index] = {}
        for i in reversed(stage.kept):
            following = self.carried(index + 1, i)
            events: list[tuple[int, Amount]] = []
            for user in self.problem.every_user[i]:
                if stage.first <= user <= stage.last:
                    events.append((user, self.reads(user, i)))
                elif user in again:
                    events.append((user, self.reads(user, i, index)))
            if stage.bounded:
                needs = self.lives(i, events, following, self.after[index])
            else:
                needs = [*(amount for _, amount in events), following]
            self.supply(index, i, needs)  # (7), (8)

    # -- memory -------------------------------------------------------------------------------

    def _overwriting(self, node: int, read: Amount, stays: Amount, was: Amount) -> int | None:
        """(15), (16): a column, 1 only if the node runs, reads its target, and the target's copy dies there."""
        if not self.in_place or read == NOTHING or stays == ALL:
            return None
        column = self.rows.column()
        self.rules.append(
            (
                column,
                lambda v: max(min(value_of(read, v), value_of(was, v) - value_of(stays, v)), 0.0),
            )
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
    in_place: bool = False,
    stages: list[Stage] | None = None,
) -> MonetModel:
    """Builds the program; the arguments are those of `solve_monet`.

    Args:
        stages: a relaxation with those of `relax_stages`; those of `choice_stages` by default.
    """
    planned = choice_stages(problem, budget_bytes, in_place=in_place) if stages is None else stages
    builder = _MonetBuilder(problem, budget_bytes, in_place, planned)
    builder.build()
    return MonetModel(
        problem=problem,
        rows=builder.rows,
        stages=builder.stages,
        pick=builder.pick,
        repeat=builder.repeat,
        split=builder.split,
        unit=builder.unit,
        whole=builder.whole,
        impossible=builder.impossible,
        _rules=builder.rules,
    )
