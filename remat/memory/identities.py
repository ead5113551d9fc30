"""What is one array: merged common subexpressions, results that are their operand's buffer, and zeros.

A scatter, the gradient of a max pool and a loop that stacks write over zeros. XLA has one array of zeros of a
shape, and where it must be in memory, all read it that would otherwise have a zero in their code (a ReLU, its
gradient, a dropout): it is there from the first to the last of them, and what writes over zeros writes over a copy
that is made as early. A scatter into zeros that is only added to an array scatters into that array.
"""

from __future__ import annotations

from collections.abc import Hashable

from remat.core.graph import Graph, Op, Value
from remat.core.primitives import SCATTERS
from remat.memory.tables import CONVOLUTION, DETERMINED, POOL_GRADIENT, SAME_BUFFER

__all__ = [
    "ArrayKind",
    "array_kind",
    "fills_zeros",
    "is_added_up",
    "is_constant",
    "moves_nothing",
    "shared_zeros",
    "signature",
]

ArrayKind = tuple[str, tuple[int, ...]]
"""What zeros have in common that are one array: dtype and sorted dimensions."""


def array_kind(value: Value) -> ArrayKind:
    """Returns what zeros of a value have in common: XLA transposes zeros for nothing."""
    return value.dtype, tuple(sorted(value.shape))


def fills_zeros(graph: Graph, op: Op) -> bool:
    """Whether an operator writes over zeros."""
    if op.name == POOL_GRADIENT:
        return not op.padded
    producer = graph.values[op.inputs[0]].producer if op.name in SCATTERS else None
    return producer is not None and is_constant(graph.ops[producer])


def is_constant(op: Op) -> bool:
    """Whether an operator repeats a literal; literals are not in the graph."""
    return op.name == "broadcast_in_dim" and not op.inputs


def is_added_up(graph: Graph, op: Op) -> bool:
    """Whether an operator scatters sums into zeros and the result is only added to an array.

    XLA scatters into that array instead.
    """
    if op.name not in ("scatter-add", POOL_GRADIENT) or not fills_zeros(graph, op):
        return False
    value = op.outputs[0]
    users = graph.users[value]
    return (
        len(users) == 1
        and graph.ops[users[0]].name == "add_any"
        and value not in graph.outputs
        and value not in graph.gradients
    )


def shared_zeros(graph: Graph, added: frozenset[int]) -> frozenset[ArrayKind]:
    """Returns the zeros that both kernels that fuse and operators that write over them read.

    XLA has one array of zeros of a kind, written to memory for a scatter or a loop, which writes over a copy. All
    that would otherwise have a zero in its code (a ReLU, its gradient, a dropout) reads that array, so it is there
    from the first to the last of them. A loop writes over the zeros that it stacks its results into.
    """
    written: set[ArrayKind] = set()
    read: set[ArrayKind] = set()
    for op in graph.ops:
        if op.name == "scan":
            written.update(array_kind(graph.values[value]) for value in op.outputs)
        elif fills_zeros(graph, op) and op.id not in added:
            written.add(array_kind(graph.values[op.outputs[0]]))
        elif (op.name == "max" and len(op.inputs) == 1) or (
            is_constant(op) and any(graph.ops[user].fusible for user in graph.users[op.outputs[0]])
        ):
            read.add(array_kind(graph.values[op.outputs[0]]))
    return frozenset(kind for kind in written & read if kind[1])


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
