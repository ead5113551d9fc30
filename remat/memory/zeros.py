"""Arrays of zeros: which operators write over them, and which zeros are one array.

A scatter, the gradient of a max pool and a loop that stacks write over zeros. XLA has one array of zeros of a
shape, and where it must be in memory, all read it that would otherwise have a zero in their code (a ReLU, its
gradient, a dropout): it is there from the first to the last of them, and what writes over zeros writes over a copy
that is made as early. A scatter into zeros that is only added to an array scatters into that array.
"""

from __future__ import annotations

from remat.core.graph import Graph, Op, Value
from remat.core.primitives import SCATTERS
from remat.memory.tables import POOL_GRADIENT

__all__ = ["ArrayKind", "array_kind", "fills_zeros", "is_added_up", "is_constant", "shared_zeros"]

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
