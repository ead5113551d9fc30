"""What is written because a kernel would become too large, and XLA stops merging.

XLA merges first what saves most (`priority_fusion`), so what is left over is what saves little: of the levels of an
associative scan the small ones, not the padded arrays that are as large as the whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from remat.core.buffers import KernelSizes, splits_code
from remat.memory.execution import Execution, Node

__all__ = ["splits", "too_large"]


class _Fusion(Protocol):
    @property
    def execution(self) -> Execution:
        """What runs."""
        ...

    @property
    def live(self) -> Sequence[bool]:
        """By node."""
        ...

    @property
    def users(self) -> Sequence[Sequence[int]]:
        """By instance."""
        ...

    def part(self, index: int, reader: int) -> float:
        """The share of an instance's elements that a reader takes."""
        ...

    def moves(self, number: int) -> bool:
        """Whether a node reads other elements than it makes."""
        ...


def splits(node: Node) -> bool:
    """Whether a node begins a branch or a loop in a kernel, see `remat.core.buffers.splits_code`."""
    return node.op is not None and splits_code(node.op.name, node.op.kind)


def too_large(fusion: _Fusion, written: Sequence[bool]) -> list[int]:
    """Returns the nodes that are written besides, so that every kernel is within XLA's limits.

    Args:
        fusion: of an execution.
        written: by node, whether its results are written in any case.

    Complexity: for every node that is merged, linear in the kernels that it is merged into.
    """
    return _Merging(fusion, written).left()


class _Merging:
    """Nodes that are merged into the kernels that read them, what saves most first."""

    def __init__(self, fusion: _Fusion, written: Sequence[bool]) -> None:
        self.fusion = fusion
        self.nodes, self.instances = fusion.execution.nodes, fusion.execution.instances
        self.readers = [
            list(dict.fromkeys(user for out in node.outs for user in fusion.users[out]))
            for node in self.nodes
        ]
        live = [number for number in range(len(self.nodes)) if fusion.live[number]]
        self.todo = {number for number in live if not written[number]}
        self.members = {number: frozenset((number,)) for number in live}  # by kernel, its last node
        self.within = {number: {number} for number in live}  # by node, the kernels that it is in

    def left(self) -> list[int]:
        """Returns the nodes that are not merged."""
        queue = [(-self._saved(number), -number) for number in self.todo]
        heapq.heapify(queue)
        found: list[int] = []
        while queue:
            negative, place = heapq.heappop(queue)
            number = -place
            if number not in self.todo or -negative != self._saved(number):
                continue
            self.todo.discard(number)
            kernels = set[int]().union(*(self.within[reader] for reader in self.readers[number]))
            merged = {kernel: self.members[kernel] | self.members[number] for kernel in kernels}
            if not all(map(self._fits, merged.values())):
                found.append(number)
                continue
            for node in self.members.pop(number):
                self.within[node].discard(number)
                self.within[node] |= kernels
            self.members |= merged
            for kernel in kernels & self.todo:
                heapq.heappush(queue, (-self._saved(kernel), -kernel))
        return found

    def _saved(self, number: int) -> float:
        """Bytes that are not moved if a kernel is merged into those that read it; each reads what it reads."""
        nbytes, times = 0.0, 0.0
        for out in self.nodes[number].outs:
            parts = sum(self.fusion.part(out, user) for user in self.fusion.users[out])
            nbytes += self.instances[out].nbytes * (1 + parts)
            times = max(times, parts)
        return nbytes - (times - 1) * self._reads(self.members[number])

    def _reads(self, kernel: frozenset[int]) -> float:
        """Bytes that a kernel reads."""
        found: dict[int, float] = {}
        for number in kernel:
            for index in self.nodes[number].ins:
                if self.instances[index].producer not in kernel:
                    part = self.fusion.part(index, number)
                    found[index] = max(found.get(index, 0.0), part * self.instances[index].nbytes)
        return sum(found.values())

    def _fits(self, kernel: frozenset[int]) -> bool:
        order = sorted(kernel, reverse=True)
        sizes = KernelSizes()
        sizes.begin(order[0], splits(self.nodes[order[0]]))
        return all(
            sizes.merge(
                number,
                splits(self.nodes[number]),
                order[:1],
                [reader for reader in self.readers[number] if reader in kernel],
                self.fusion.moves,
            )
            for number in order[1:]
        )
