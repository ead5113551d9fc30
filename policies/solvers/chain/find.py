"""Finds the chain of stages in a problem: where forward and backward pass can be cut together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from remat.policies.solvers.on_demand import needed_again
from remat.policies.solvers.problem import Problem

__all__ = ["Chain", "Segment", "chain_of"]

# Values of at most this fraction of the largest one may cross a cut besides the one that is cut, and are held: 64
# of them take as much as one more. Chosen by look.
_SMALL = 64


@dataclass(frozen=True)
class Segment:
    """A stage of the chain in a problem.

    Attributes:
        forward: its forward nodes; may be empty for the last one.
        backward: its backward nodes.
        reads: the forward values it gets from the stage before, except pinned ones.
        gradients: backward values alive when its backward part begins.
    """

    forward: range
    backward: range
    reads: frozenset[int]
    gradients: frozenset[int]


@dataclass(frozen=True, eq=False)
class Chain:
    """The chain in a problem.

    Attributes:
        problem: the problem.
        segments: first stage first.
        pinned: forward values held until their last reader whatever the plan: small ones that cross from one
            stage to another, and what must not be computed again.
        floating: forward nodes that read nothing and that only backward nodes read, wherever they stand in the
            order; they are computed again where they are read.
    """

    problem: Problem
    segments: tuple[Segment, ...]
    pinned: frozenset[int]
    floating: frozenset[int] = frozenset()

    @cached_property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned values, all at once."""
        return sum(int(self.problem.sizes[node]) for node in self.pinned)

    @cached_property
    def unread(self) -> frozenset[int]:
        """Forward values that only forward nodes read; schedules are made for chains without any."""
        turn, users = self.problem.turn, self.problem.users
        return frozenset(
            node
            for node in range(turn)
            if users[node] and users[node][-1] < turn and node not in self.pinned
        )

    def reads_of(self, stage: int) -> frozenset[int]:
        """Returns what `stage` gets from the one before; nothing for the stage after the last."""
        return self.segments[stage].reads if stage < len(self.segments) else frozenset()


def chain_of(
    problem: Problem,
    *,
    small_bytes: int | None = None,
    pinned: Collection[int] = (),
    let_float: bool = True,
) -> Chain | None:
    """Finds the chain of stages in a problem, `None` if it cannot be cut anywhere.

    The forward pass can be cut before node c, together with the backward pass before node p, if at most one
    value made before c is read by forward nodes from c on or by backward nodes before p, and no backward node
    from p on reads a forward value made from c on. The latest p that suits the crossing value is taken, so
    that its readers all lie on one side where possible.

    Args:
        problem: forward nodes before `problem.turn`, backward nodes after it.
        small_bytes: values of at most that size may cross as well and are pinned (held until their last
            reader), default 1/64 of the largest forward value.
        pinned: further values that are pinned, for instance a mask that every block reads.
        let_float: nodes that read nothing may be computed where they are read, if that gives more stages.

    Complexity: O(forward nodes ^ 2) in compiled code.
    """
    turn = problem.turn
    if turn == 0:
        return None
    sizes = problem.sizes[:turn]
    small = int(sizes.max()) // _SMALL if small_bytes is None else small_bytes
    light = (sizes <= small) | ~problem.repeatable[:turn]
    found = _Cuts(problem, light, frozenset(pinned), frozenset()).chosen()
    # Where such a node belongs to is not said by its place in the order (a transposed weight, zeros): if it
    # stands in the way of cuts it is computed where it is read.
    floating = frozenset(
        node
        for node in range(turn)
        if let_float
        and problem.repeatable[node]
        and not problem.inputs[node]
        and all(user >= turn for user in problem.users[node])
    ) - set(pinned)
    finer = _Cuts(problem, light, frozenset(pinned), floating).chosen() if floating else found
    if len(finer) > len(found):
        found = finer
    else:
        floating = frozenset()
    if not found:
        return None
    # To make a stage's values again is to run through those before it, whoever reads what crosses.
    crossing = [node for cut in found for node in cut.crossing]
    held = {n for n in needed_again(problem, (), crossing)[0] if not problem.repeatable[n]}
    for cut in found:
        held |= cut.pinned
    return Chain(problem, _segments_between(problem, found, held), frozenset(held), floating)


@dataclass(frozen=True)
class _Cut:
    """Forward position, backward position, the values that cross, and those to be pinned."""

    forward: int
    backward: int
    crossing: frozenset[int]
    pinned: frozenset[int] = field(default=frozenset())


class _Cuts:
    def __init__(
        self,
        problem: Problem,
        light: npt.NDArray[np.bool_],
        pinned: frozenset[int],
        floating: frozenset[int],
    ) -> None:
        turn, count = problem.turn, len(problem)
        self.problem = problem
        self.light = light.copy()
        self.light[[*pinned, *floating]] = True
        self.last_forward = np.full(turn, -1, np.int64)
        self.first_backward = np.full(turn, count, np.int64)
        self.last_backward = np.full(turn, -1, np.int64)
        for node in sorted(set(range(turn)) - floating):
            for user in problem.users[node]:
                if user < turn:
                    self.last_forward[node] = user
                else:
                    self.first_backward[node] = min(self.first_backward[node], user)
                    self.last_backward[node] = user
        # The backward pass may be cut for c no earlier than behind the readers of nodes from c on.
        self.earliest = np.full(turn + 1, turn, np.int64)
        # Light values do not count, they are pinned where that is not enough.
        last = np.where(self.light, -1, self.last_backward)
        behind = np.maximum.accumulate(last[::-1])[::-1] + 1
        self.earliest[:turn] = np.maximum(behind, turn)
        # Heavy values that forward nodes read across every position.
        self.crossing = np.zeros(turn + 2, np.int64)
        heavy = np.flatnonzero(~self.light & (self.last_forward >= 0))
        np.add.at(self.crossing, heavy + 1, 1)
        np.add.at(self.crossing, self.last_forward[heavy] + 1, -1)
        self.crossing = np.cumsum(self.crossing)

    def chosen(self) -> list[_Cut]:
        """The cuts of the chain, first stage first; their backward positions descend."""
        found: list[_Cut] = []
        for position in range(self.problem.turn, 0, -1):
            cut = self.at(position)
            if cut is not None and position == cut.backward == self.problem.turn:
                continue  # nothing lies behind it
            if cut is None or (found and cut.backward < found[-1].backward):
                continue
            if found and cut.crossing and cut.crossing == found[-1].crossing:
                found.pop()  # the earlier cut leaves more to what follows from the value
            found.append(cut)
        return found[::-1]

    def at(self, position: int) -> _Cut | None:
        """The cut before a forward node, if there is one."""
        if self.crossing[position] > 1:
            return None
        backward = int(self.earliest[position])
        crosses = self.last_forward[:position] >= position
        crosses |= self.first_backward[:position] < backward
        value = np.flatnonzero(crosses & ~self.light[:position])
        if len(value) > 1:
            return None
        only = int(value[0]) if len(value) else -1
        # Backward nodes that read nothing else of what lies before may go to the later side.
        for node in range(backward, len(self.problem)):
            heavy = [r for r in self.problem.inputs[node] if r < position and not self.light[r]]
            if any(r != only for r in heavy):
                if only >= 0 or len(heavy) > 1 or position < self.problem.turn:
                    break
                only = heavy[0]  # at the turn: the value that the backward pass starts from
            if heavy:
                backward = node + 1
        light = self.last_forward[:position] >= position
        light |= self.first_backward[:position] < backward
        pinned = frozenset(map(int, np.flatnonzero(light & self.light[:position])))
        later = self.light[position:] & (self.last_backward[position:] >= backward)
        pinned |= frozenset(int(node) + position for node in np.flatnonzero(later))
        return _Cut(position, backward, frozenset({only} - {-1}), pinned)


def _segments_between(
    problem: Problem, cuts: Sequence[_Cut], pinned: Collection[int]
) -> tuple[Segment, ...]:
    bounds = [
        _Cut(0, len(problem), frozenset()),
        *cuts,
        _Cut(problem.turn, problem.turn, frozenset()),
    ]
    positions = [cut.backward for cut in bounds]
    gradients: list[set[int]] = [set() for _ in bounds]
    for node in range(problem.turn, len(problem)):
        last = max(problem.users[node], default=-1)
        for index, position in enumerate(positions):
            if node < position <= last:
                gradients[index].add(node)
    return tuple(
        Segment(
            range(bounds[i].forward, bounds[i + 1].forward),
            range(bounds[i + 1].backward, bounds[i].backward),
            bounds[i].crossing - frozenset(pinned),
            frozenset(gradients[i + 1]),
        )
        for i in range(len(bounds) - 1)
    )
