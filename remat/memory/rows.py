"""Softmaxes and norms of rows, which XLA:GPU makes in kernels that read a row before they write it.

XLA's `softmax_rewriter_triton` makes one kernel of an array, a number for every row (its largest, say) and what is
made of both, element by element, if nothing else reads the number: `x - max(x)`, `x / sum(x)`. `priority_fusion`
then goes on from there: what such a kernel makes may be made again by all that read it, other reductions of rows
among them, and these be part of their readers, as long as all of it can be done row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.core.graph import Op
from remat.memory.execution import Execution, Node, live_nodes, users_of
from remat.memory.tables import LONGEST_ROW, SAME_BUFFER

__all__ = ["Rows", "leave_out_the_value"]

_SPREADS = frozenset({"broadcast_in_dim", "iota"})
_UNKNOWN = frozenset({"shift_left", "shift_right_arithmetic", "shift_right_logical"})  # to Triton
_OTHER_TYPES = frozenset({"complex64", "complex128", "float64"})
_OF_WHOLE_ROWS = SAME_BUFFER | {"slice"}


def leave_out_the_value(execution: Execution) -> None:
    """Leaves out what is differentiated, a number, where it would have kernels of rows write what they make.

    The loss of a classifier looks up the likelihood of every label, so that all likelihoods are an array where it
    is asked for, too (`jax.value_and_grad`). Predicted is the gradient alone, as compiled for `jax.grad`.
    """
    if execution.in_loop:
        return
    gradients = execution.results[: len(execution.graph.gradients)]
    others = [index for index in execution.results if execution.instances[index].elements > 1]
    kept = list(dict.fromkeys((*gradients, *others)))
    if not gradients or len(kept) == len(set(execution.results)):
        return
    if Rows(execution, users_of(execution, live_nodes(execution))).diamonds:
        execution.results = kept


class Rows:
    """What kernels of rows begin with, and what they may have.

    Attributes:
        diamonds: by node that makes an array of an array and of its rows' numbers, the nodes that make these.
        sums: the reductions of rows.
        tiled: the nodes that can be done row by row.

    Args:
        execution: what runs.
        users: for every instance the live nodes that read it.
    """

    def __init__(self, execution: Execution, users: Sequence[Sequence[int]]) -> None:
        self._execution = execution
        self._users = users
        self._results = set(execution.results)
        nodes = execution.nodes
        self.sums = {number for number, node in enumerate(nodes) if self._reduces_rows(node)}
        self.tiled = set(self.sums)
        if self.sums:
            self.tiled.update(n for n, node in enumerate(nodes) if self._is_by_rows(node))
        self.diamonds = dict(filter(None, map(self._closed, sorted(self.sums))))

    def count(self, number: int) -> int:
        """The rows of what a kernel begins with, of the node that makes its array."""
        reduction = self._execution.nodes[self.diamonds[number][0]]
        return self._elements(reduction.outs[0])

    def _reduces_rows(self, node: Node) -> bool:
        """Whether the last dimension is reduced, and no other, and is short enough."""
        if not node.reduces or node.op is None or not node.op.axes or len(node.outs) != 1:
            return False
        elements = self._elements(node.ins[0])
        if any(self._elements(i) > elements for i in node.ins) or not self._is_known(node.op):
            return False  # a sum of products, whose axes are those of the second
        shape = self._execution.graph.values[node.op.inputs[0]].shape
        return node.op.axes == (len(shape) - 1,) and shape[-1] <= LONGEST_ROW

    def _closed(self, number: int) -> tuple[int, tuple[int, ...]] | None:
        """What makes an array of a reduction's operand and its result, and what makes that; None if nothing does.

        It follows `MatchesTritonCompatibleClosedReductionDiamond`.
        """
        reduction = self._execution.nodes[number]
        elements = self._elements(reduction.ins[0])
        inner, (made,) = [number], reduction.outs
        if self._elements(made) <= 1:
            return None
        while len(users := self._users[made]) == 1 and made not in self._results:
            node = self._execution.nodes[users[0]]
            if users[0] not in self.tiled or not (
                node.name == "broadcast_in_dim" or self._is_pointwise(node)
            ):
                return None
            if len(self._arrays(node)) > 1:
                joins = len(node.ins) == 2 and node.ins[1] == made
                ends = joins and self._elements(node.outs[0]) == elements
                found = ends and self._is_made_of_one(node, reduction)
                return (users[0], tuple(inner)) if found else None
            inner.append(users[0])
            (made,) = node.outs
        return None

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

    def _is_by_rows(self, node: Node) -> bool:
        """Whether an operator that fuses makes rows of rows, or of numbers."""
        op = node.op
        if op is None or node.kind != "op" or not node.fusible or op.random:
            return False
        if node.name in _UNKNOWN or len(node.outs) != 1 or not self._is_known(op):
            return False
        if op.kind == "POINTWISE" or node.name in _SPREADS:
            return True
        if node.name not in _OF_WHOLE_ROWS or len(op.inputs) != 1:
            return False
        values = self._execution.graph.values
        read, made = (values[v].shape[-1:] for v in (*op.inputs, *op.outputs))
        return read == made or (node.name in SAME_BUFFER and (1,) in (read, made))

    def _is_known(self, op: Op) -> bool:
        """Whether Triton has the types, and XLA's estimates are known: of float64 they are not."""
        values = self._execution.graph.values
        return not any([values[v].dtype in _OTHER_TYPES for v in (*op.inputs, *op.outputs)])

    def _arrays(self, node: Node) -> set[int]:
        """The operands that are no numbers."""
        return {index for index in node.ins if self._elements(index) > 1}

    def _is_pointwise(self, node: Node) -> bool:
        return node.op is not None and node.op.kind == "POINTWISE" and node.fusible

    def _elements(self, index: int) -> int:
        return self._execution.instances[index].elements
