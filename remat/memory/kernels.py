"""The kernels: what each reads and writes, and what is copied for it alone.

What XLA:GPU makes of a convolution's operands: that of a transposed convolution is dilated in memory, unless its
kernel is reversed. The gradient of its kernel reads copies of both operands; of the first it is all that is kept of
it, unless a barrier stands between, behind which it is made at once. So are those of other convolutions' kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from remat.core.primitives import SCATTERS
from remat.memory.execution import Execution, Node
from remat.memory.fusion import Fusion
from remat.memory.tables import CONVOLUTION

__all__ = ["Kernel", "dependent", "find_kernels", "tie_of", "written_over"]


@dataclass(slots=True, eq=False)
class Kernel:
    """What runs as one: a node that writes memory, with the nodes merged into it; or a barrier.

    Attributes:
        node: the last of its nodes; kernels are known by it.
        reads: buffers it reads, by their root instances.
        writes: buffers it makes.
        after: the nodes of the kernels and barriers whose results it reads.
        merged: the last nodes of the kernels merged into it.
        copies: sources of which it, or a kernel before it, makes a copy: slices of stacked arrays that an operator
            reads that does not fuse, and kernels of convolutions in another layout. Behind a barrier it is another.
        workspace: an operand, and the bytes of what is made of it for this kernel alone.
        is_joined: whether all that it makes is one buffer.
        rows: buffers of which it reads a row before it writes it; empty if it neither reduces rows in itself nor is
            a matmul's that adds an array to its product.
        sums: how many of its reductions are of a buffer, or of what it makes of it.
    """

    node: int
    reads: set[int] = field(default_factory=set)
    writes: list[int] = field(default_factory=list)
    after: set[int] = field(default_factory=set)
    merged: list[int] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    workspace: tuple[int, int] | None = None
    is_joined: bool = False
    rows: set[int] = field(default_factory=set)
    sums: Counter[int] = field(default_factory=Counter)

    def may_write_over(self, buffer: int) -> bool:
        """Whether it may write over a buffer that it reads: it reduces no rows of it, and sums it once at most.

        The first sum is made before anything is written, a second is not (`FusionCanShareBufferHint`).
        """
        return buffer not in self.rows and self.sums[buffer] < 2

    def merge(self, other: Kernel) -> None:
        """Takes over what another kernel does."""
        self.reads |= other.reads
        self.writes = other.writes + self.writes
        self.after |= other.after
        self.merged += [other.node, *other.merged]
        self.copies |= other.copies
        self.sums += other.sums


def find_kernels(execution: Execution, fusion: Fusion) -> list[Kernel]:
    """Returns the kernels, in the order of their last nodes."""
    instances = execution.instances
    found: dict[int, Kernel] = {}
    turned: set[int] = set()
    unread = _unread_stacks(execution, fusion)
    for number, node in enumerate(execution.nodes):
        if not fusion.live[number]:
            continue
        if number in fusion.kernels[number]:
            made = found.setdefault(number, Kernel(number))
            made.writes = [i for i in node.outs if instances[i].root == i and i not in unread]
        is_within = number in fusion.within and node.op is not None and bool(node.op.contracts)
        for member in fusion.kernels[number]:
            kernel = found.setdefault(member, Kernel(member))
            for index in node.ins:
                root = instances[index].root
                if is_within:
                    kernel.rows.add(root)
                if fusion.is_read(index, member) or root != index:
                    kernel.reads.add(root)
                    if instances[index].producer >= 0:
                        kernel.after.add(instances[index].producer)
                if root in execution.slices and not node.fusible and node.kind != "barrier":
                    kernel.copies.add(root)
        if number in found:
            _note_library(execution, node, found[number], turned)
    for number, kernel in found.items():
        if execution.nodes[number].reduces:
            kernel.sums.update(kernel.reads)
    _note_rows(execution, fusion, found)
    return [found[number] for number in sorted(found)]


def _note_rows(execution: Execution, fusion: Fusion, kernels: Mapping[int, Kernel]) -> None:
    """Notes what kernels that reduce rows in themselves read for it."""
    instances, nodes = execution.instances, execution.nodes
    reduced: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        if node.reduces:
            for kernel in fusion.kernels[number] & fusion.rows:
                reduced.setdefault(kernel, []).extend(node.ins)
    for kernel, pending in reduced.items():
        seen = {*pending}
        while pending:
            index = pending.pop()
            if fusion.is_read(index, kernel):
                kernels[kernel].rows.add(instances[index].root)
                continue
            new = [i for i in nodes[instances[index].producer].ins if i not in seen]
            seen.update(new)
            pending += new


def _note_library(execution: Execution, node: Node, kernel: Kernel, turned: set[int]) -> None:
    """Notes what is made of a node's operands for its kernel alone: workspace, and copies in another layout.

    Args:
        execution, node, kernel: the node and its kernel.
        turned: kernels of convolutions that were copied before; new ones are added.
    """
    op, instances = node.op, execution.instances
    if op is None:
        return
    if op.workspace_bytes:
        kernel.workspace = node.ins[0], op.workspace_bytes
    if op.swapped:
        # Elsewhere the copy of the first is all that is kept of it.
        is_tied = tie_of(execution, node.ins[0]) is not None
        kernel.copies.update(node.ins[:1] if is_tied else ())
    elif node.name == CONVOLUTION and len(node.ins) > 1:
        index = node.ins[1]
        if instances[index].root in execution.sources and _is_turned(execution, node):
            kernel.copies.add(index)
            turned.add(index)
        elif index in turned:
            kernel.copies.add(index)


def tie_of(execution: Execution, index: int) -> int | None:
    """Returns the barrier that an instance comes out of, None if it is another node's result."""
    producer = execution.instances[index].producer
    return producer if producer >= 0 and execution.nodes[producer].kind == "barrier" else None


def _unread_stacks(execution: Execution, fusion: Fusion) -> set[int]:
    """What planned loops stack and nobody reads: what a chunk keeps when it runs for the first time."""
    results = set(execution.results)
    return {
        out
        for node in execution.nodes
        if node.op is not None and node.op.loop is not None and len(node.outs) > 1
        for out in node.outs
        if not fusion.users[out] and out not in results
    }


def _is_turned(execution: Execution, node: Node) -> bool:
    """Whether a convolution's kernel is copied to another layout that its data gradient reads too.

    Of a kernel of one tap without strides it reads a copy of its own.
    """
    values, instances = execution.graph.values, execution.instances
    source, kernel, result = (values[instances[i].value] for i in (*node.ins[:2], *node.outs))
    strided = sorted(source.shape)[:-1] != sorted(result.shape)[:-1]
    return strided or kernel.shape.count(1) < len(kernel.shape) - 2


def dependent(kernels: list[Kernel]) -> list[Kernel]:
    """Those of some kernels, in their order, that need the first."""
    made = {kernels[0].node, *kernels[0].merged}
    found: list[Kernel] = []
    for kernel in kernels[1:]:
        if not made.isdisjoint(kernel.after):
            made.update((kernel.node, *kernel.merged))
            found.append(kernel)
    return found


def written_over(
    execution: Execution, kernels: Sequence[Kernel], results: Collection[int]
) -> dict[int, int]:
    """By scatter that makes one of some results: what it is written over, which has the result's buffer.

    That is made for the scatter alone, or is zeros for several of them: XLA makes as many as there are scatters.
    """
    nodes, instances = execution.nodes, execution.instances
    made = {out: kernel for kernel in kernels for out in kernel.writes}
    readers: dict[int, list[int]] = {}
    targets: dict[int, int] = {}
    for kernel in kernels:
        for root in kernel.reads:
            readers.setdefault(root, []).append(kernel.node)
        node = nodes[kernel.node]
        if node.name in SCATTERS and all(out in results for out in kernel.writes):
            targets[kernel.node] = instances[node.ins[0]].root
    shared = Counter(targets.values())
    return {
        node: target
        for node, target in targets.items()
        if target in made
        and target not in execution.sources
        and nodes[node].outs[0] not in execution.copied
        and instances[target].nbytes == instances[nodes[node].outs[0]].nbytes
        and shared[target] == len(readers[target])
        and (shared[target] == 1 or not made[target].reads)
    }
