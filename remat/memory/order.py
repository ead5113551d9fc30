"""In which order XLA runs the kernels: that of the schedule, but for what it puts off and what it makes early.

It follows XLA's `hlo_memory_scheduler`. Put off, until everything else takes more memory, are gradients that are
larger than what they are made from; in the backward loop of a `scan` all gradients that are stacked. So are the
indices of a pool's largest, which could be made in the forward pass. Early is what is made from next to nothing
(random bits, masks unpacked from bits): for all equal shapes in one kernel, as early as the first of them, since
XLA merges these across the whole program. The zeros that loops stack into are made in one kernel for all of a type,
too.
"""

from __future__ import annotations

from remat.memory.fusion import Fusion
from remat.memory.kernels import Kernel
from remat.memory.program import Program
from remat.memory.tables import SMALL_SHARE
from remat.memory.zeros import ArrayKind, array_kind

__all__ = ["made_early", "put_off"]


def put_off(program: Program, kernels: list[Kernel]) -> list[Kernel]:
    """Returns the order of kernels in which what takes more memory than it frees waits, if it can.

    XLA's list scheduler runs what frees most beyond what it writes, and a result is never freed. The gradient of
    a weight that is larger than the activations it is made from is therefore computed late, when everything else
    takes more memory, and until then its memory serves for temporaries. In a loop's body it counts the whole stack
    that a gradient is written into, so there all gradients wait till the end. Where a pool's windows have their
    largest is known in the forward pass already, and there it is found once everything else takes as much.
    """
    size = [instance.nbytes for instance in program.instances]
    read: set[int] = set().union(*(kernel.reads for kernel in kernels))
    final = {program.instances[index].root for index in program.results} - read
    users: dict[int, int] = {}
    for kernel in kernels:
        for root in kernel.reads - program.sources:
            users[root] = users.get(root, 0) + 1

    def gain(kernel: Kernel) -> int:
        freed = sum(size[root] for root in kernel.reads if users.get(root) == 1)
        return freed - sum(size[root] for root in kernel.writes)

    def most(kernel: Kernel) -> int:
        freed = sum(size[root] for root in kernel.reads - program.sources)
        return freed - sum(size[root] for root in kernel.writes)

    order: list[Kernel] = []
    # By node, with what each can free at most beyond what it writes.
    waiting: dict[int, tuple[int, Kernel]] = {}
    pools = {k.node: k for k in kernels if program.nodes[k.node].kind == "indices"}
    needs = {node: set(kernel.after) for node, kernel in pools.items()}

    def run(kernel: Kernel) -> None:
        order.append(kernel)
        for root in kernel.reads - program.sources:
            users[root] -= 1
        for node in list(needs):
            needs[node].difference_update((kernel.node, *kernel.merged))
            if not needs[node]:
                del needs[node]
                waiting[node] = most(pools[node]), pools[node]

    for kernel in kernels:
        if kernel.node in pools:
            if waiting.pop(kernel.node, None) or needs.pop(kernel.node, None) is not None:
                run(kernel)  # it did not run before
            continue
        if kernel.writes and final.issuperset(kernel.writes):
            best = most(kernel)
            if best < 0 or program.stacks:
                waiting[kernel.node] = best, kernel
                continue
        if waiting and not program.stacks:
            own = gain(kernel)
            if own < 0:
                ready = [
                    k
                    for best, k in waiting.values()
                    if best >= own and gain(k) >= own + (k.node not in pools)
                ]
                for other in ready:
                    del waiting[other.node]
                for other in ready:
                    run(other)
        run(kernel)
    return [*order, *(kernel for _, kernel in waiting.values())]


def made_early(program: Program, fusion: Fusion) -> dict[int, int]:
    """Returns the buffers that are made before their turn, each with the node of the kernel that makes it.

    The zeros that loops stack their results into are made in one kernel for all of a type.
    """
    ready = [-1] * len(program.instances)
    first: dict[tuple[int, int], int] = {}
    moved: dict[int, int] = {}
    filled: dict[ArrayKind, int] = {}
    for number, node in enumerate(program.nodes):
        if not fusion.live[number]:
            continue
        known = max((ready[index] for index in node.ins), default=-1)
        for out in node.outs:
            instance = program.instances[out]
            if _is_stack(program, out):
                value = program.graph.values[instance.value]
                start = filled.setdefault((value.dtype, value.shape), number)
                if start < number:
                    moved[out] = start
            if node.kind == "zeros" and node.ins:
                moved[out] = program.instances[node.ins[0]].producer
            if node.kind == "barrier" or not node.fusible:
                ready[out] = number
                continue
            shape = (instance.elements, instance.nbytes)
            ready[out] = number if fusion.is_buffer[out] else known
            if not fusion.is_buffer[out] or node.reduces:
                continue
            read = sum(fusion.reads[index] for index in node.ins)
            if instance.elements > 1 and read <= SMALL_SHARE * instance.nbytes:
                start = first.setdefault(shape, number)
                if known <= start < number:
                    moved[out] = ready[out] = start
    return moved


def _is_stack(program: Program, index: int) -> bool:
    """Whether a planned loop stacks its results into an array, over zeros that only loops write over."""
    instance = program.instances[index]
    node = program.nodes[instance.producer] if instance.producer >= 0 else None
    if node is None or node.trips < 2:
        return False
    value = program.graph.values[instance.value]
    return value.shape[:1] == (node.trips,) and array_kind(value) not in program.shared
