"""Softmaxes and norms of rows, which XLA:GPU makes in kernels that read a row before they write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from remat.memory.execution import Execution, Node
from remat.memory.fusion import Fusion
from remat.memory.kernels import Kernel
from remat.memory.tables import LONGEST_ROW

__all__ = ["mark_row_kernels"]


def mark_row_kernels(execution: Execution, fusion: Fusion, kernels: Sequence[Kernel]) -> None:
    """Notes which kernels reduce rows in themselves, and what they read for it: `Kernel.rows`.

    XLA's `softmax_rewriter_triton` makes one kernel of an array, a number for every row (its largest, say) and
    what is made of both, element by element, if nothing else reads the number: `x - max(x)`, `x / sum(x)`. Other
    reductions of rows that such a kernel alone reads are merged into it, and so is what is made of their numbers.
    """
    diamonds = _Diamonds(execution, fusion)
    if not diamonds.closed:
        return
    made = {out: kernel for kernel in kernels for out in kernel.writes}
    readers = Counter(root for kernel in kernels for root in kernel.reads)
    for kernel in kernels:
        closed = kernel.reads & diamonds.closed.keys()
        if closed:
            own = {diamonds.closed[n] for n in closed}
            pending = [n for n in kernel.reads if readers[n] == 1]
            while pending:
                number = pending.pop()
                if number in diamonds.rows:
                    own.add(number)
                elif number in made and diamonds.is_made_of_numbers(number):
                    pending += [n for n in made[number].reads if readers[n] == 1]
            kernel.rows |= kernel.reads & set[int]().union(
                *(made[n].reads for n in own if n in made)
            )


class _Diamonds:
    """Reductions of rows.

    Attributes:
        rows: those by the instances that they make.
        closed: what XLA makes of these in the kernel that reads it, with the instance it is made of.
    """

    def __init__(self, execution: Execution, fusion: Fusion) -> None:
        self._execution = execution
        self._users = fusion.users
        self.rows = {node.outs[0]: node for node in execution.nodes if self._reduces_rows(node)}
        self.closed = {
            number: out for out, node in self.rows.items() for number in self._closed(node)
        }

    def is_made_of_numbers(self, index: int) -> bool:
        """Whether an array is made, element by element, of arrays that are no larger."""
        node = self._execution.nodes[self._execution.instances[index].producer]
        elements = self._elements(index)
        return self._is_pointwise(node) and all(self._elements(i) <= elements for i in node.ins)

    def _reduces_rows(self, node: Node) -> bool:
        """Whether the last dimension is reduced, and no other, and is short enough."""
        if not node.reduces or node.op is None or not node.op.axes:
            return False
        values, instances = self._execution.graph.values, self._execution.instances
        first = instances[node.ins[0]]
        if any(instances[i].elements > first.elements for i in node.ins):
            return False  # a sum of products, whose axes are those of the second
        shape = values[first.value].shape
        return node.op.axes == (len(shape) - 1,) and shape[-1] <= LONGEST_ROW

    def _closed(self, reduction: Node) -> list[int]:
        """A reduction's result and what is made of it, if the kernel that reads it makes it.

        It follows `MatchesTritonCompatibleClosedReductionDiamond`.
        """
        elements = self._elements(reduction.ins[0])
        numbers = [*reduction.outs]
        while len(users := self._users[numbers[-1]]) == 1:
            node = self._execution.nodes[users[0]]
            if node.name != "broadcast_in_dim" and not self._is_pointwise(node):
                return []
            if len(self._arrays(node)) > 1:
                joins = len(node.ins) == 2 and node.ins[1] == numbers[-1]
                ends = joins and self._elements(node.outs[0]) == elements
                return numbers if ends and self._is_made_of_one(node, reduction) else []
            numbers.append(node.outs[0])
        return []

    def _is_made_of_one(self, root: Node, reduction: Node) -> bool:
        """Whether a reduction's operand and another's first are one array, or made of one."""
        source, found = reduction.ins[0], root.ins[0]
        while (below := self._below(source)) is not None:
            source = below
        while found != source and (below := self._below(found)) is not None:
            found = below
        return found == source

    def _below(self, index: int) -> int | None:
        """What an array is made of, if of one of its size, element by element, and read once itself."""
        producer = self._execution.instances[index].producer
        if producer < 0 or len(self._users[index]) != 1:
            return None
        node = self._execution.nodes[producer]
        arrays = self._arrays(node)
        if not self._is_pointwise(node) or len(arrays) != 1:
            return None
        (below,) = arrays
        return below if self._elements(below) == self._elements(index) else None

    def _arrays(self, node: Node) -> set[int]:
        """The operands that are no numbers."""
        return {index for index in node.ins if self._elements(index) > 1}

    def _is_pointwise(self, node: Node) -> bool:
        return node.op is not None and node.op.kind == "POINTWISE" and node.fusible

    def _elements(self, index: int) -> int:
        return self._execution.instances[index].elements
