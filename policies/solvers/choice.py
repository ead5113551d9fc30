"""The scheduling problem with implementations: every node can be run in one of several ways.

A `ChoiceProblem` is a `Problem` (`remat.policies.solvers.problem`) in which a node has a list of *choices*: what
one run costs, which nodes it reads, how much workspace it takes. This is the setting of MONeT (Shah et al.,
"Memory optimization for deep networks", ICLR 2021, section 4): the backward of a ReLU may read its input,
its output or a mask; a convolution has algorithms that trade time for workspace. A *selection* names one
choice per node and turns it into an ordinary `Problem` (`ChoiceProblem.select`); a plan is a selection and
a sequence, judged by `replay_choices`.

Two things an ordinary problem does not have:

* nodes that are not `required` run only if the selection has somebody read them, as the mask of a ReLU
  whose backward reads its output;
* a node may write its result over an input that nobody needs afterwards (`in_place`), if that is counted.

Departures from the paper: a node has one implementation for all its runs, because a plan rewrites the
program once (the paper picks one per recomputation); forward nodes' implementations may read different
nodes (the paper: the same).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat.policies.solvers.problem import Bools, Ints, Problem, Replayed

__all__ = ["Choice", "ChoiceProblem", "replay_choices"]


@dataclass(frozen=True)
class Choice:
    """One implementation of a node.

    Attributes:
        cost: of one run, in the problem's unit, finite and not negative.
        inputs: nodes read, ascending, all smaller than the node.
        workspace_bytes: extra bytes while it runs.
        sites: which rewrites it stands for; opaque here.

    Raises:
        ValueError: a number is negative or not finite, or the inputs are not ascending.
    """

    cost: float
    inputs: tuple[int, ...]
    workspace_bytes: int = 0
    sites: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cost) and self.cost >= 0) or self.workspace_bytes < 0:
            raise ValueError(
                f"Choice(cost={self.cost!r}, workspace_bytes={self.workspace_bytes!r}): "
                "expected finite numbers that are not negative"
            )
        if list(self.inputs) != sorted(set(self.inputs)):
            raise ValueError(f"Choice(inputs={self.inputs!r}): expected ascending nodes, each once")


@dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """Nodes in a topological order of all their choices, in which they run for the first time.

    Attributes:
        sizes: bytes of every node's result, whatever the choice.
        repeatable: nodes that may run more than once.
        turn: repetitions come after the first runs of all nodes below `turn`.
        choices: for every node at least one.
        in_place: for every node the input over which it may write its result if nobody needs it later, or None.
        required: nodes that run in any case; the others only if a node that runs reads them.

    Raises:
        ValueError: lengths differ, a node has no choice, reads one that does not come before it, or may
            overwrite what none of its choices reads or what is smaller than its result.
    """

    sizes: Ints
    repeatable: Bools
    turn: int
    choices: tuple[tuple[Choice, ...], ...]
    in_place: tuple[int | None, ...]
    required: Bools

    def __post_init__(self) -> None:
        count = len(self.choices)
        for name in ("sizes", "repeatable", "in_place", "required"):
            if len(getattr(self, name)) != count:
                found = len(getattr(self, name))
                raise ValueError(f"{name} has {found} entries for {count} nodes")
        if np.any(self.sizes < 0):
            raise ValueError("sizes has negative entries")
        for node, (choices, target) in enumerate(zip(self.choices, self.in_place, strict=True)):
            if not choices:
                raise ValueError(f"node {node} has no choice: expected at least one")
            for number, choice in enumerate(choices):
                if choice.inputs and not 0 <= choice.inputs[0] <= choice.inputs[-1] < node:
                    raise ValueError(
                        f"choice {number} of node {node} reads {choice.inputs}: expected smaller nodes"
                    )
            if target is None:
                continue
            if not any(target in choice.inputs for choice in choices):
                raise ValueError(f"node {node} may overwrite {target}, which no choice of it reads")
            if self.sizes[node] > self.sizes[target]:
                raise ValueError(
                    f"node {node} of {self.sizes[node]} bytes may overwrite {target} of "
                    f"{self.sizes[target]}: expected at least as many"
                )
        if not 0 <= self.turn <= count:
            raise ValueError(f"turn={self.turn} is not a position among {count} nodes")

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        choices: Iterable[Iterable[Choice]],
        *,
        repeatable: Sequence[bool] | None = None,
        turn: int = 0,
        in_place: Sequence[int | None] | None = None,
        required: Sequence[bool] | None = None,
    ) -> ChoiceProblem:
        """Makes a problem of plain lists; by default all nodes repeat, all are required, none is in place."""
        count = len(sizes)
        return cls(
            sizes=np.asarray(sizes, np.int64),
            repeatable=np.asarray([True] * count if repeatable is None else repeatable, np.bool_),
            turn=turn,
            choices=tuple(map(tuple, choices)),
            in_place=(None,) * count if in_place is None else tuple(in_place),
            required=np.asarray([True] * count if required is None else required, np.bool_),
        )

    @classmethod
    def only(cls, problem: Problem) -> ChoiceProblem:
        """Makes a problem with a single choice per node."""
        work = problem.extra_while_running.tolist()
        costs = problem.costs.tolist()
        choices = [
            [Choice(cost, tuple(sorted(reads)), extra)]
            for cost, reads, extra in zip(costs, problem.inputs, work, strict=True)
        ]
        return cls.of(
            problem.sizes.tolist(),
            choices,
            repeatable=problem.repeatable.tolist(),
            turn=problem.turn,
        )

    def __len__(self) -> int:
        return len(self.choices)

    @cached_property
    def every_input(self) -> tuple[tuple[int, ...], ...]:
        """For every node what some choice reads, ascending."""
        return tuple(
            tuple(sorted({read for choice in choices for read in choice.inputs}))
            for choices in self.choices
        )

    @cached_property
    def common_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For every node what all choices read, ascending."""
        return tuple(
            tuple(r for r in choices[0].inputs if all(r in c.inputs for c in choices[1:]))
            for choices in self.choices
        )

    @cached_property
    def every_user(self) -> tuple[tuple[int, ...], ...]:
        """For every node those that read it with some choice, ascending."""
        found: list[list[int]] = [[] for _ in self.choices]
        for node, reads in enumerate(self.every_input):
            for read in reads:
                found[read].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def certain(self) -> tuple[int, ...]:
        """Nodes that run whatever the selection, ascending: those of `relaxed`."""
        return self._running(self.common_inputs)

    def active(self, selection: Sequence[int]) -> tuple[int, ...]:
        """Returns the nodes that run with a selection, ascending.

        Raises:
            ValueError: `selection` does not name a choice of every node.
        """
        return self._running([choice.inputs for choice in self.chosen(selection)])

    def chosen(self, selection: Sequence[int]) -> tuple[Choice, ...]:
        """Returns the choice of every node.

        Raises:
            ValueError: `selection` does not name a choice of every node.
        """
        if len(selection) != len(self):
            raise ValueError(f"selection has {len(selection)} entries for {len(self)} nodes")
        for node, number in enumerate(selection):
            if not 0 <= number < len(self.choices[node]):
                raise ValueError(
                    f"selection[{node}]={number}: node {node} has the choices 0 to "
                    f"{len(self.choices[node]) - 1}"
                )
        return tuple(
            choices[number] for choices, number in zip(self.choices, selection, strict=True)
        )

    def select(self, selection: Sequence[int]) -> tuple[Problem, tuple[int, ...]]:
        """Returns the problem with those implementations, and for each of its nodes the node here.

        Nodes that are not required and that nobody reads are left out. In-place writing is not part of
        `Problem`.

        Raises:
            ValueError: `selection` does not name a choice of every node.
        """
        chosen = self.chosen(selection)
        nodes = self.active(selection)
        number = {node: index for index, node in enumerate(nodes)}
        problem = Problem(
            costs=np.asarray([chosen[node].cost for node in nodes], np.float64),
            sizes=self.sizes[list(nodes)],
            inputs=tuple(tuple(number[r] for r in chosen[node].inputs) for node in nodes),
            repeatable=self.repeatable[list(nodes)],
            turn=sum(node < self.turn for node in nodes),
            workspace=np.asarray([chosen[node].workspace_bytes for node in nodes], np.int64),
        )
        return problem, nodes

    def relaxed(self, *, in_place: bool = False) -> Problem:
        """Returns a problem whose bounds hold for every selection.

        Its nodes are those of `certain`, each with the cheapest cost, the smallest workspace and the inputs
        that all choices share. Leaving the other nodes out of a sequence of any selection gives a sequence
        of this problem that has no more live bytes anywhere and costs no more, so a bound on its cost (of
        all runs: `total_cost` plus a bound on the extra cost) is one on the cost of every plan.

        Args:
            in_place: the plans may write in place: a node then does not read what it may overwrite, which
                leaves as many live bytes as overwriting it.
        """
        nodes = self.certain
        number = {node: index for index, node in enumerate(nodes)}

        def reads(node: int) -> tuple[int, ...]:
            over = self.in_place[node] if in_place else None
            return tuple(number[r] for r in self.common_inputs[node] if r != over)

        work = [min(c.workspace_bytes for c in self.choices[node]) for node in nodes]
        return Problem(
            costs=np.asarray([min(c.cost for c in self.choices[n]) for n in nodes], np.float64),
            sizes=self.sizes[list(nodes)],
            inputs=tuple(reads(node) for node in nodes),
            repeatable=self.repeatable[list(nodes)],
            turn=sum(node < self.turn for node in nodes),
            workspace=np.asarray(work, np.int64),
        )

    def _running(self, inputs: Sequence[Sequence[int]]) -> tuple[int, ...]:
        runs = self.required.tolist()
        for node in range(len(runs) - 1, -1, -1):
            if runs[node]:
                for read in inputs[node]:
                    runs[read] = True
        return tuple(node for node, run in enumerate(runs) if run)


def replay_choices(
    problem: ChoiceProblem,
    selection: Sequence[int],
    sequence: Sequence[int] | Ints,
    *,
    in_place: bool = False,
) -> Replayed:
    """Judges a plan by the rules of `remat.policies.solvers.problem.replay`: validity, memory, cost.

    Args:
        selection: a choice per node, also of nodes that do not run.
        sequence: nodes as executed, in the numbers of `problem`.
        in_place: whether a result takes the place of the copy it may overwrite where no later step reads
            that copy. The bytes of the result then do not count beside the copy's while the node runs.

    Returns:
        Live bytes by position, the cost, and the cost of the repetitions.

    Raises:
        ValueError: the first step that breaks a rule (a node reads one that was not computed before, does
            not run with this selection, is repeated though it must not be or before the turn, first runs
            out of order, or never runs), or a selection that does not name a choice of every node.
    """
    chosen = problem.chosen(selection)
    active = problem.active(selection)
    runs = set(active)
    order = [int(node) for node in sequence]
    latest: dict[int, int] = {}  # position of the newest copy
    last_use = list(range(len(order)))  # by position of the copy
    overwritten: list[tuple[int, int]] = []  # position, position of the copy
    first = 0  # how many of `active` have run
    forward = sum(node < problem.turn for node in active)
    cost = once = 0.0
    for position, node in enumerate(order):
        if not 0 <= node < len(problem):
            raise ValueError(f"position {position}: there is no node {node}")
        if node not in runs:
            raise ValueError(f"position {position}: no one needs node {node} with this selection")
        for read in chosen[node].inputs:
            if read not in latest:
                raise ValueError(f"position {position}: node {node} reads {read}, never computed")
            last_use[latest[read]] = position
        if node not in latest:
            if node != active[first]:
                raise ValueError(
                    f"position {position}: node {node} first runs before {active[first]}"
                )
            first += 1
            once += chosen[node].cost
        elif not problem.repeatable[node]:
            raise ValueError(f"position {position}: node {node} may not run again")
        elif first < forward:
            raise ValueError(f"position {position}: node {node} runs again before the turn")
        over = problem.in_place[node]
        if over is not None and over in chosen[node].inputs:
            overwritten.append((position, latest[over]))
        latest[node] = position
        cost += chosen[node].cost
    if first != len(active):
        raise ValueError(f"node {active[first]} never runs")
    change = np.zeros(len(order) + 1, np.int64)
    sizes = problem.sizes[order] if order else np.zeros(0, np.int64)
    np.add.at(change, np.arange(len(order)), sizes)
    np.add.at(change, np.asarray(last_use, np.int64) + 1, -sizes)
    work = np.asarray([chosen[node].workspace_bytes for node in order], np.int64)
    live = np.cumsum(change)[:-1] + work
    if in_place:
        for position, copy in overwritten:
            if last_use[copy] == position:
                live[position] -= sizes[position]
    return Replayed(live, cost, cost - once)
