"""What is written because a kernel would become too large, and XLA stops merging.

XLA merges first what saves most (`priority_fusion`), so what is left over is what saves little: of the levels of an
associative scan the small ones, not the padded arrays that are as large as the whole.
"""

from __future__ import annotations

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
    nodes, instances = fusion.execution.nodes, fusion.execution.instances
    readers = [
        list(dict.fromkeys(user for out in node.outs for user in fusion.users[out])) for node in nodes
    ]
    members = {number: frozenset((number,)) for number in range(len(nodes)) if fusion.live[number]}
    within = {number: {number} for number in members}  # by node the kernels that it is in

    def saved(number: int) -> tuple[int, int]:
        nbytes = sum(instances[out].nbytes for out in nodes[number].outs)
        return nbytes * (1 + len(readers[number])), number

    def fits(kernel: frozenset[int]) -> bool:
        order = sorted(kernel, reverse=True)
        sizes = KernelSizes()
        sizes.begin(order[0], splits(nodes[order[0]]))
        return all(
            sizes.merge(n, splits(nodes[n]), order[:1], [r for r in readers[n] if r in kernel], fusion.moves)
            for n in order[1:]
        )

    left: list[int] = []
    for number in sorted((n for n in members if not written[n]), key=saved, reverse=True):
        kernels = set().union(*(within[reader] for reader in readers[number]))
        merged = {kernel: members[kernel] | members[number] for kernel in kernels}
        if not all(map(fits, merged.values())):
            left.append(number)
            continue
        for node in members.pop(number):
            within[node].discard(number)
            within[node] |= kernels
        members |= merged
    return left
