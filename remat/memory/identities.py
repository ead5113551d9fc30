"""What is not new: runs that XLA merges as common subexpressions, and results that are their operand's buffer."""

from __future__ import annotations

from collections.abc import Hashable

from remat.core.graph import Graph, Op, Value
from remat.memory.tables import CONVOLUTION, DETERMINED, SAME_BUFFER

__all__ = ["moves_nothing", "signature"]


def signature(graph: Graph, op: Op) -> Hashable:
    """Equal for operators that compute the same of the same operands, as far as the graph tells.

    Where it does not tell an operator's parameters and literals, those that the result's type has are enough.
    """
    if len(op.outputs) != 1 or op.effectful or not (op.recomputable or op.decision):
        return op.id
    result = graph.values[op.outputs[0]]
    if op.name in DETERMINED and len(op.inputs) == 1:
        return op.name, result.dtype
    if op.name == "concatenate":  # along the dimension in which the result is longer
        return op.name, result.shape
    return (op.name, result.dtype, result.shape, op.setting) if op.setting else op.id


def moves_nothing(graph: Graph, op: Op, *, in_loop: bool) -> bool:
    """Whether an operator's result, of its one operand, is that operand's buffer.

    Args:
        graph, op: the operator in its graph.
        in_loop: whether the graph is a loop's body.
    """
    source, result = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
    if op.name in SAME_BUFFER or (op.name == "rev" and _mirrors_kernel(graph, op)):
        return True
    if op.name == "transpose" and not in_loop and _turns_product(graph, op):
        return True
    if source.nbytes != result.nbytes:
        return False
    if op.name == "transpose":
        return _keeps_order(source, result)
    # A reduction that leaves as many elements is over dimensions of size one.
    return op.name == "broadcast_in_dim" or op.elemental


def _turns_product(graph: Graph, op: Op) -> bool:
    """Whether the transposed product of two matrices alone is read: XLA multiplies them the other way round.

    In a loop's body the transposition is part of writing into a stack, and the product is a buffer.
    """
    value = graph.values[op.inputs[0]]
    producer = graph.ops[value.producer] if value.producer is not None else None
    product = producer is not None and bool(producer.contracts) and not producer.batched
    return product and len(value.shape) == 2 and len(graph.users[value.id]) == 1


def _mirrors_kernel(graph: Graph, op: Op) -> bool:
    """Whether only convolutions read the result: their library reads a kernel mirrored."""
    users = graph.users[op.outputs[0]]
    return all(graph.ops[user].name == CONVOLUTION for user in users)


def _keeps_order(source: Value, result: Value) -> bool:
    """Whether a transposition moves dimensions of size one only."""
    before = [dim for dim in source.shape if dim != 1]
    return before == [dim for dim in result.shape if dim != 1] and len(set(before)) == len(before)
