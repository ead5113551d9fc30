"""Is a value a buffer? The rule, and the variants of those who ask.

XLA merges operators into kernels. What one kernel hands to another is written to memory, what it needs inside of
itself is not. So a value is *written*

* if its operator ends a kernel: XLA merges it with nothing that reads the result, or
* if an operator reads it that XLA does not merge with what it reads.

That is `is_written`. A scatter makes its updates and indices itself (XLA's `IsInputFusibleScatter`), and is no
reader of these; what it writes over is in memory (`makes_operands`).

Those who ask differ in which operators end a kernel, in which readers count, and in what is written besides,
because that takes less time or because a plan keeps it:

* The referee and Echo, `fused_values`: what does not fuse ends a kernel; all readers count; besides, what crosses
  into the backward pass or is kept. A count that knows no prices.
* The minimum cut, `is_written_forward`: what does not fuse ends a kernel; readers in the forward pass count, since
  what the backward pass reads is what is being decided; besides, results and what a loop carries.
* Planners within a budget, `kernel_results`: reductions and what may not run again end a kernel, too; readers count
  that anything needs; besides, results, what a cut keeps, what is dear to make in several kernels, and what XLA
  leaves (`remat.core.priority_fusion`), each phase for itself. One answer for all plans of a graph.
* The memory model, `remat.memory.fusion`: reductions end a kernel, too; each run of an operator is a reader of its
  own, if anything needs it; besides, results, and what XLA leaves. The answer for one plan.

The differences are on purpose: to give all of them one variant would change plans.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable
from typing import Protocol

from remat.core.graph import Graph, Op
from remat.core.kernel_work import CYCLE_BYTES, blocks_of, cycles_of, times_read
from remat.core.primitives import SCATTERS
from remat.core.priority_fusion import Program, fuse

__all__ = [
    "ends_kernel",
    "fused_values",
    "is_written",
    "is_written_forward",
    "kernel_results",
    "live_ops",
    "makes_operands",
]

# A value that two kernels make is made of what each of them reads; once written, it is moved three times: by the
# kernel that writes it and by two that read it. That the one that writes it reads, too, is left out: it mostly is a
# kernel that reads that anyway. `benchmarks.coarsening` holds the choice against others.
_MOVES_MADE_TWICE, _MOVES_WRITTEN = 2, 3


class _Fusing(Protocol):
    """An operator, or one run of it."""

    @property
    def fusible(self) -> bool:
        """Whether it is merged with what it reads."""
        ...


def is_written(ends_kernel: bool, readers: Iterable[_Fusing]) -> bool:
    """Whether a value has to be in memory, whatever that costs: the rule that all variants share.

    Args:
        ends_kernel: whether what makes the value is merged with nothing that reads it.
        readers: those that count.
    """
    return ends_kernel or any([not reader.fusible for reader in readers])


def makes_operands(op: Op, *, first: bool) -> bool:
    """Whether an operator makes what it reads in its own kernel although it does not fuse.

    Args:
        op: the operator.
        first: whether its first operand is meant.
    """
    return not first and op.name in SCATTERS


def ends_kernel(op: Op) -> bool:
    """Whether XLA merges an operator with nothing that reads its results; with what it reads it may."""
    return not op.fusible or (op.kind == "REDUCTION" and not op.elemental)


def fused_values(graph: Graph) -> frozenset[int]:
    """Returns the values that are never in memory if nothing but operators makes them so: the referee's variant.

    Reductions are taken to fuse with what reads them.
    """
    ops, users = graph.ops, graph.users
    return frozenset(
        value.id
        for value in graph.values
        if value.producer is not None
        and not is_written(not ops[value.producer].fusible, [ops[u] for u in users[value.id]])
    )


def is_written_forward(graph: Graph, value: int) -> bool:
    """Whether the forward pass writes a value, whatever the backward pass reads: the minimum cut's variant.

    It is Algorithm 2 of Yu & He. Reductions are taken to fuse with what reads them.
    """
    if value in graph.alive_anyway or value in graph.carried:
        return True
    producer = graph.values[value].producer
    if producer is None:
        return True
    users = (graph.ops[user] for user in graph.users[value])
    return is_written(not graph.ops[producer].fusible, [u for u in users if u.phase == "forward"])


def live_ops(graph: Graph) -> set[int]:
    """Returns the operators that a result, a gradient or a side effect needs; XLA deletes the others."""
    live = {op.id for op in graph.ops if op.effectful}
    todo = [v for op in live for v in graph.ops[op].inputs]
    todo += [*graph.outputs, *graph.gradients]
    while todo:
        producer = graph.values[todo.pop()].producer
        if producer is not None and producer not in live:
            live.add(producer)
            todo += graph.ops[producer].inputs
    return live


def kernel_results(graph: Graph, live: Collection[int], kept: Container[int]) -> set[int]:
    """Returns the values that kernels write in any plan: the variant of planners within a budget.

    An operator that may not run again ends a kernel, so that the kernel may run again; but not a decision, which
    fuses as if it might.

    Args:
        graph: a joint graph.
        live: operators that anything needs, see `live_ops`.
        kept: values that are written because it is worth keeping them.
    """
    roots = {*graph.outputs, *graph.gradients}
    found: set[int] = set()
    for op in graph.ops:
        if op.id not in live:
            continue
        ends = ends_kernel(op) or not (op.recomputable or op.decision)
        for value in op.outputs:
            users = [graph.ops[u] for u in graph.users[value] if u in live]
            apart = (u for u in users if not makes_operands(u, first=u.inputs[0] == value))
            if value in roots or value in kept or (users and is_written(ends, apart)):
                found.add(value)
    found |= _dear(graph, live, found)
    return found | _left(graph, live, found)


def _left(graph: Graph, live: Collection[int], buffers: set[int]) -> set[int]:
    """Values not written yet that XLA leaves in memory, where only readers of their own phase are asked.

    What the other phase reads is kept, or made again there: that is the plan's choice.
    """
    ops, values = graph.ops, graph.values
    sizes = [math.prod(value.shape) for value in values]
    readers: list[list[int]] = [[] for _ in values]
    # Of those that run, what makes nothing for its phase: derivatives that the forward pass only begins.
    idle: set[int] = set()
    for op in reversed(ops):
        for value in op.outputs:
            readers[value] = [
                user
                for user in graph.users[value]
                if user in live and user not in idle and ops[user].phase == op.phase
            ]
        if buffers.isdisjoint(op.outputs) and not any(readers[value] for value in op.outputs):
            idle.add(op.id)

    def part(value: int, reader: int) -> float:
        op = ops[reader]
        made = sum(sizes[out] for out in op.outputs)
        return times_read(op, sizes[value], made, first=op.inputs[0] == value)

    def walked(op: Op) -> int:
        around = op.inputs if ends_kernel(op) else op.outputs
        return max([sizes[value] for value in around], default=0)

    program = Program(
        outs=[op.outputs for op in ops],
        ins=[op.inputs for op in ops],
        readers=readers,
        nbytes=[value.nbytes for value in values],
        work=[cycles_of(op) * walked(op) * CYCLE_BYTES for op in ops],
        moves=[op.kind != "POINTWISE" for op in ops],
        blocks=[blocks_of(op, walked(op)) for op in ops],
        part=part,
        # Ties depend on the order of one program; this is one answer for all plans of a graph. With ticks
        # Chen's grid on 36 residual layers takes 26 activations, without 23 (`benchmarks.depth`).
        tick_bytes=0.0,
    )
    ends = [not buffers.isdisjoint(op.outputs) for op in ops]
    found = fuse(program, [op.id in live and op.id not in idle for op in ops], ends).written
    left = [op for op in ops if found[op.id] and not ends[op.id]]
    return {value for op in left for value in op.outputs}


def _dear(graph: Graph, live: Collection[int], buffers: set[int]) -> set[int]:
    """Values that are not written yet, that several kernels read, and that take more reads than they have bytes."""
    readers: dict[int, frozenset[int]] = {}  # of every fused value, at most two kernels
    for op in reversed(graph.ops):
        for value in op.outputs:
            if op.id not in live or value in buffers:
                continue
            kernels: set[int] = set()
            for user in graph.users[value]:
                # The other phase reads what is kept, or makes the value again: that is the plan's choice.
                same = graph.ops[user].phase == op.phase
                if user in live and same and len(kernels) < 2:
                    ends = [v for v in graph.ops[user].outputs if v in buffers]
                    kernels.update(ends[:1])
                    for v in graph.ops[user].outputs:
                        kernels |= readers.get(v, frozenset())
            readers[value] = frozenset(sorted(kernels)[:2])
    found: set[int] = set()
    reads: dict[int, frozenset[int]] = {}  # buffers that a fused value is made of
    for op in graph.ops:
        if op.id not in live:
            continue
        sources: set[int] = set()
        for value in op.inputs:
            producer = graph.values[value].producer
            whole = value in buffers or value in found or producer is None
            sources |= {value} if whole else reads.get(value, frozenset())
        for value in op.outputs:
            if value in buffers:
                continue
            size = graph.values[value].nbytes
            read_bytes = sum(min(graph.values[v].nbytes, size) for v in sources)
            dear = _MOVES_MADE_TWICE * read_bytes > _MOVES_WRITTEN * size > 0
            if dear and len(readers.get(value, ())) > 1:
                found.add(value)
            else:
                reads[value] = frozenset(sources)
    return found
