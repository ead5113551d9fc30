"""In which order XLA runs the kernels: that of the schedule, but for what it puts off and what it makes early.

It follows XLA's `hlo_memory_scheduler`. Put off, until everything else takes more memory, are gradients that are
larger than what they are made from; in the backward loop of a `scan` all gradients that are stacked. So are the
indices of a pool's largest, which could be made in the forward pass. Early is what is made from next to nothing
(random bits, masks unpacked from bits): for all equal shapes in one kernel, as early as the first of them, since
XLA merges these across the whole program. The zeros that loops stack into are made in one kernel for all of a type,
too.
"""

from __future__ import annotations

from collections import Counter

from remat.memory.execution import Execution
from remat.memory.fusion import Fusion
from remat.memory.kernels import Kernel, written_over
from remat.memory.tables import SMALL_SHARE
from remat.memory.zeros import ArrayKind, array_kind

__all__ = ["made_early", "put_off"]


def put_off(execution: Execution, kernels: list[Kernel]) -> list[list[Kernel]]:
    """Returns the orders of kernels in which what takes more memory than it frees waits, if it can.

    XLA's list scheduler runs what frees most beyond what it writes, and a result is never freed. The gradient of
    a weight that is larger than the activations it is made from is therefore computed late, when everything else
    takes more memory, and until then its memory serves for temporaries. In a loop's body it counts the whole stack
    that a gradient is written into, so there all gradients wait till the end. Where a pool's windows have their
    largest is known in the forward pass already, and there it is found once everything else takes as much.

    Of several orders XLA takes that of least memory (`DefaultMemoryScheduler`). Where it visits operators depth
    first, from the results back, all such gradients come last: that is the second order here, if it is another.
    """
    first = _ListScheduler(execution, kernels)
    orders = [first.order()]
    if first.went_on:
        orders.append(_ListScheduler(execution, kernels, till_the_end=True).order())
    return orders


class _ListScheduler:
    """Kernels in their order, of which some wait.

    Attributes:
        till_the_end: whether gradients that wait do so till everything else has run.
        went_on: whether some of them did not.
    """

    def __init__(
        self, execution: Execution, kernels: list[Kernel], *, till_the_end: bool = False
    ) -> None:
        self.till_the_end = till_the_end
        self.went_on = False
        self.kernels = kernels
        self.size = [instance.nbytes for instance in execution.instances]
        self.stacks = execution.stacks
        read: set[int] = set().union(*(kernel.reads for kernel in kernels))
        # Results that nothing reads: their kernels may wait.
        self.final = {execution.instances[index].root for index in execution.results} - read
        self.filled = self._filled(execution)
        self.scatters = Counter(zeros.node for zeros in self.filled.values())
        self.made: set[int] = set()  # zeros
        self.sources = execution.sources.union(*(z.writes for z in self.filled.values()))
        self.sums = self._sums(execution)
        self.readers: dict[int, int] = {}  # of every buffer how many have not run yet
        for kernel in kernels:
            for root in kernel.reads - self.sources:
                self.readers[root] = self.readers.get(root, 0) + 1
        # By node, with what each can free at most beyond what it writes.
        self.waiting: dict[int, tuple[int, Kernel]] = {}
        self.pools = {k.node: k for k in kernels if execution.nodes[k.node].kind == "indices"}
        self.needs = {node: set(kernel.after) for node, kernel in self.pools.items()}
        self.ran: list[Kernel] = []

    def order(self) -> list[Kernel]:
        """Returns the kernels in the order in which they run."""
        behind = {total.node for totals in self.sums.values() for total in totals}
        behind.update(zeros.node for zeros in self.filled.values())
        for kernel in self.kernels:
            if kernel.node in behind:
                continue
            if kernel.node in self.pools:
                waited = self.waiting.pop(kernel.node, None)
                if waited or self.needs.pop(kernel.node, None) is not None:
                    self._run(kernel)  # it did not run before
                continue
            writes = self._writes(kernel)
            if writes and self.final.issuperset(writes):
                best = self._gain_at_most(kernel)
                if best < 0 or self.stacks:
                    self.waiting[kernel.node] = best, kernel
                    continue
            if self.waiting and not self.stacks:
                self._run_what_takes_less(kernel)
            self._run(kernel)
        for _, kernel in self.waiting.values():
            self.ran += [*self._before(kernel), kernel, *self.sums.get(kernel.node, ())]
        return self.ran

    def _filled(self, execution: Execution) -> dict[int, Kernel]:
        """By scatter that makes gradients alone: the kernel of the zeros that such scatters are written over.

        Each is written over zeros of its own, all made by one kernel (XLA merges it across the program). That takes
        what all the gradients take, so that XLA runs it last, just before the scatters.
        """
        if execution.stacks:
            return {}
        made = {out: kernel for kernel in self.kernels for out in kernel.writes}
        over = written_over(execution, self.kernels, self.final)
        return {node: made[target] for node, target in over.items() if not made[target].reads}

    def _before(self, kernel: Kernel) -> list[Kernel]:
        """What runs just before a kernel: the zeros that it is the first to be written over."""
        zeros = self.filled.get(kernel.node)
        if zeros is None or zeros.node in self.made:
            return []
        self.made.add(zeros.node)
        return [zeros]

    def _sums(self, execution: Execution) -> dict[int, list[Kernel]]:
        """By matmul that is split and makes only gradients: the kernels that add its parts, run behind it."""
        by_node = {kernel.node: kernel for kernel in self.kernels}
        found: dict[int, list[Kernel]] = {}
        for kernel in self.kernels:
            parts = [n for n in (kernel.node, *kernel.merged) if n in execution.sums]
            totals = [by_node.get(execution.sums[number]) for number in parts]
            read = [total for total in totals if total and self.final.issuperset(total.writes)]
            if parts and len(read) == len(kernel.writes):
                found[kernel.node] = read
        return found

    def _writes(self, kernel: Kernel) -> list[int]:
        """What is left of what a kernel writes; of parts their sum."""
        totals = self.sums.get(kernel.node)
        return kernel.writes if totals is None else [w for total in totals for w in total.writes]

    def _run_what_takes_less(self, kernel: Kernel) -> None:
        """Runs what waits and takes less memory than a kernel; of pools also what takes as much."""
        own = self._gain(kernel)
        if own >= 0:
            return
        ready = [
            k
            for best, k in self.waiting.values()
            if best >= own and self._gain(k) >= own + (k.node not in self.pools)
            if k.node in self.pools or not self.till_the_end
        ]
        self.went_on = self.went_on or any(other.node not in self.pools for other in ready)
        for other in ready:
            del self.waiting[other.node]
        for other in ready:
            self._run(other)

    def _gain(self, kernel: Kernel) -> int:
        """Bytes that a kernel frees if it runs now, beyond what it writes."""
        freed = sum(self.size[root] for root in kernel.reads if self.readers.get(root) == 1)
        return freed - self._written(kernel)

    def _gain_at_most(self, kernel: Kernel) -> int:
        freed = sum(self.size[root] for root in kernel.reads - self.sources)
        return freed - self._written(kernel)

    def _written(self, kernel: Kernel) -> int:
        zeros = self.filled.get(kernel.node)
        if zeros is None:
            return sum(self.size[root] for root in self._writes(kernel))
        is_made = zeros.node in self.made
        return 0 if is_made else self.scatters[zeros.node] * self.size[zeros.writes[0]]

    def _run(self, kernel: Kernel) -> None:
        self.ran += [*self._before(kernel), kernel]
        for root in kernel.reads - self.sources:
            self.readers[root] -= 1
        for node in list(self.needs):
            self.needs[node].difference_update((kernel.node, *kernel.merged))
            if not self.needs[node]:
                del self.needs[node]
                self.waiting[node] = self._gain_at_most(self.pools[node]), self.pools[node]
        for total in self.sums.get(kernel.node, ()):
            self._run(total)


def made_early(execution: Execution, fusion: Fusion) -> dict[int, int]:
    """Returns the buffers that are made before their turn, each with the node of the kernel that makes it.

    The zeros that loops stack their results into are made in one kernel for all of a type.
    """
    ready = [-1] * len(execution.instances)
    first: dict[tuple[int, int], int] = {}
    moved: dict[int, int] = {}
    filled: dict[ArrayKind, int] = {}
    for number, node in enumerate(execution.nodes):
        if not fusion.live[number]:
            continue
        known = max((ready[index] for index in node.ins), default=-1)
        for out in node.outs:
            instance = execution.instances[out]
            if _is_stack(execution, out):
                value = execution.graph.values[instance.value]
                start = filled.setdefault((value.dtype, value.shape), number)
                if start < number:
                    moved[out] = start
            if node.kind == "zeros" and node.ins:
                moved[out] = execution.instances[node.ins[0]].producer
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


def _is_stack(execution: Execution, index: int) -> bool:
    """Whether a planned loop stacks its results into an array, over zeros that only loops write over."""
    instance = execution.instances[index]
    node = execution.nodes[instance.producer] if instance.producer >= 0 else None
    if node is None or node.trips < 2:
        return False
    value = execution.graph.values[instance.value]
    return value.shape[:1] == (node.trips,) and array_kind(value) not in execution.shared
