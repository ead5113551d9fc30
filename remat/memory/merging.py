"""Which kernels XLA makes one of, with several results: its pass `multi_output_fusion`, followed step by step.

Behind `priority_fusion`, from the results back, XLA looks at every array. Those kernels that read it, walk over as
many elements and do not need each other are merged (`FuseSiblings`): element-wise ones, and reductions that are
alike. Then the kernel that makes the array is merged with one of those that read it, if that needs no other of them
(`ProducerCandidateIsFusible`): the array is still written if others read it. A merged kernel runs when all that it
reads is there, so what is made early for another kernel than the one it is merged with comes late.

Apart stay Triton's kernels of rows and what is part of a matmul's own kernel (`gemm_fusion`); joins, which XLA
walks otherwise; and kernels that read parts of the array that do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator

from remat.core.priority_fusion import MOST_ARRAYS
from remat.memory.execution import Execution, post_order
from remat.memory.fusion import Fusion
from remat.memory.kernels import Kernel, dependent
from remat.memory.tables import FAR, PARTED

__all__ = ["merge_kernels"]

_PARTS = PARTED | {"slice"}
_MOST_REDUCTIONS = 8  # `kMaxUnnestedReductionOutputsPerFusion`


def merge_kernels(execution: Execution, fusion: Fusion, kernels: list[Kernel]) -> list[Kernel]:
    """Returns the kernels with those merged that XLA makes one, in an order in which they may run.

    Complexity: for every array, the square of the kernels that read it, times `FAR`.
    """
    merger = _Merger(execution, fusion, kernels)
    merger.run()
    return merger.kernels()


class _Merger:
    """Kernels in an order in which they may run, of which some become one.

    Attributes:
        place: by node of a kernel, where it stands.
        members: by node that is a kernel, the nodes that it computes.
        operands: by node of a kernel, the instances that it reads: what a barrier lets through is another than what
            it ties.
        users: by instance, the kernels that read it.
        cut: instances of which parts are read.
    """

    def __init__(self, execution: Execution, fusion: Fusion, kernels: list[Kernel]) -> None:
        self.execution, self.fusion = execution, fusion
        self.nodes, self.instances = execution.nodes, execution.instances
        self._slots: list[Kernel | None] = list(kernels)
        self.place = {kernel.node: place for place, kernel in enumerate(kernels)}
        self.results = set(execution.results)
        self.members: dict[int, list[int]] = {}
        for number, found in enumerate(fusion.kernels):
            for kernel in found if fusion.live[number] else ():
                self.members.setdefault(kernel, []).append(number)
        self.operands: dict[int, dict[int, None]] = {}
        self.users: dict[int, list[Kernel]] = {}
        for kernel in kernels:
            read = self.operands[kernel.node] = dict.fromkeys(
                index
                for number in self._numbers(kernel)
                for index in self.nodes[number].ins
                if fusion.is_read(index, kernel.node) or self.instances[index].root != index
            )
            for index in read:
                self.users.setdefault(index, []).append(kernel)
        self.cut = {index for node in self.nodes if node.name in _PARTS for index in node.ins}

    def run(self) -> None:
        """Merges what can be, array by array from the last on."""
        for index, maker in self._from_the_last():
            if self.instances[index].elements > 1:
                self._merge_siblings(index)
            if maker is not None and maker.node in self.place:
                self._merge_into_a_reader(maker)

    def kernels(self) -> list[Kernel]:
        """Returns what is left, in an order in which it may run."""
        return [kernel for kernel in self._slots if kernel is not None]

    def _from_the_last(self) -> list[tuple[int, Kernel | None]]:
        """The arrays with the kernel that makes each, from the last on of a search from the results back.

        Those that no kernel makes come where their first reader stands, before it.
        """
        place = post_order(self.execution)
        maker = {index: kernel for kernel in self.kernels() for index in kernel.writes}

        def turn(index: int) -> tuple[int, bool, int]:
            kernel = maker.get(index)
            if kernel is not None:
                return place.get(kernel.node, -1), True, index
            return min(place.get(user.node, -1) for user in self.users[index]), False, index

        turns = sorted(map(turn, maker.keys() | self.users.keys()), reverse=True)
        return [(index, maker.get(index)) for _, _, index in turns]

    def _merge_siblings(self, index: int) -> None:
        """Merges the kernels that read an array, a pair at a time."""
        siblings = [kernel for kernel in self.users.get(index, ()) if self._takes(kernel)]
        siblings.sort(key=lambda kernel: (-self._rank(kernel), self.place[kernel.node]))
        at = 0
        while at < len(siblings):
            other = at + 1
            while self._rank(siblings[at]) and other < len(siblings):
                merged = self._merge_pair(siblings[at], siblings[other], index)
                if merged is None:
                    other += 1
                else:
                    siblings[at] = merged
                    del siblings[other]
            at += 1

    def _merge_pair(self, one: Kernel, two: Kernel, index: int) -> Kernel | None:
        """Merges two kernels that read an array, if XLA does; returns what they become."""
        first, second = sorted((one, two), key=lambda kernel: self.place[kernel.node])
        if self._are_far(first, second) or not self._suit(first, second):
            return None
        if self._read_apart(first, second, index):
            return None
        later = self._between(first, second)
        if not self._is_free(second, [first, *later]):
            return None
        self._merge(first, second, later)
        return second

    def _merge_into_a_reader(self, kernel: Kernel) -> None:
        """Merges a kernel of one array with one that reads it: a merged one, one of several operators, or any."""
        if not self._is_producer(kernel):
            return
        (made,) = kernel.writes
        users = self.users.get(made, [])
        count = len(users) + (made in self.results)
        if not users or (count == 1 and not users[0].merged):
            return  # left apart before, for a reason
        best: tuple[Kernel, list[Kernel]] | None = None
        for user in users:
            if best is not None and self._rank(user) <= self._rank(best[0]):
                continue
            if not self._takes(user) or self._are_far(kernel, user) or not self._suit(kernel, user):
                continue
            later = self._between(kernel, user)
            if self._is_free(user, later) and self._pays(kernel, user):
                best = user, later
        if best is None:
            return
        user, later = best
        self._merge(kernel, user, later)
        user.after.discard(kernel.node)
        user.reads.discard(made)
        sums = user.sums.pop(made, 0)
        user.sums.update(dict.fromkeys(kernel.reads, sums))
        self.operands[user.node].pop(made, None)
        self.users[made].remove(user)
        if count == 1:
            user.writes.remove(made)

    def _merge(self, first: Kernel, second: Kernel, later: list[Kernel]) -> None:
        """Makes the first part of the second, which runs where that did; what needs the first comes behind it."""
        start, end = self.place[first.node], self.place[second.node]
        second.merge(first)
        read = self.operands.pop(first.node)
        self.operands[second.node].update(read)
        for index in read:
            users = self.users[index]
            users.remove(first)
            if second not in users:
                users.append(second)
        moved = {kernel.node for kernel in later}
        rest = [k for k in self._slots[start + 1 : end] if k is None or k.node not in moved]
        del self.place[first.node]
        self._slots[start : end + 1] = [None, *rest, second, *later]
        for place in range(start, end + 1):
            kernel = self._slots[place]
            if kernel is not None:
                self.place[kernel.node] = place

    def _are_far(self, first: Kernel, second: Kernel) -> bool:
        """Whether two kernels stand too far apart to look at what is between."""
        return self.place[second.node] - self.place[first.node] > FAR

    def _between(self, first: Kernel, second: Kernel) -> list[Kernel]:
        """The kernels before the second that need the first."""
        slots = self._slots[self.place[first.node] : self.place[second.node]]
        return dependent([kernel for kernel in slots if kernel is not None])

    def _is_free(self, kernel: Kernel, others: list[Kernel]) -> bool:
        """Whether a kernel needs none of some others."""
        return all(kernel.after.isdisjoint((other.node, *other.merged)) for other in others)

    def _pays(self, kernel: Kernel, user: Kernel) -> bool:
        """Whether a kernel and one that reads what it made take no less time apart."""
        return self.fusion.pays(kernel.node, [user.node, *user.merged])

    def _numbers(self, kernel: Kernel) -> Iterator[int]:
        """The nodes that a kernel computes."""
        for last in (kernel.node, *kernel.merged):
            yield from self.members.get(last, (last,))

    def _rank(self, kernel: Kernel) -> int:
        """Merged kernels come first, then those of several operators."""
        return 2 if kernel.merged else int(len(self.members.get(kernel.node, ())) > 1)

    def _takes(self, kernel: Kernel) -> bool:
        """Whether a kernel may be merged with another, as the last of both (`IsFusibleAsMultiOutputFusionRoot`)."""
        node = self.nodes[kernel.node]
        if not node.fusible or not kernel.writes or kernel.rows or kernel.is_joined:
            return False
        if node.kind not in ("op", "pack", "unpack", "sum") or node.name == "concatenate":
            return False
        if kernel.node in self.fusion.in_matmuls:
            return False
        is_pointwise = node.op is None or node.op.kind == "POINTWISE"
        return self._rank(kernel) > 0 or node.reduces or is_pointwise

    def _is_producer(self, kernel: Kernel) -> bool:
        """Whether a kernel may be merged with what reads its result (`IsProducerMultiOutputFusible`)."""
        node = self.nodes[kernel.node]
        if kernel.merged or kernel.rows or kernel.is_joined or len(kernel.writes) != 1:
            return False
        if node.kind not in ("op", "unpack") or not node.fusible or node.reduces:
            return False
        return node.name != "transpose" and kernel.node not in self.fusion.in_matmuls

    def _suit(self, one: Kernel, two: Kernel) -> bool:
        """Whether two kernels walk over one shape, and their code fits (`ShapesCompatibleForMultiOutputFusion`)."""
        if self.fusion.size(one.node) != self.fusion.size(two.node):
            return False
        reductions = [*self._reductions(one), *self._reductions(two)]
        if len(set(reductions)) > 1 or len(reductions) > _MOST_REDUCTIONS:
            return False
        if reductions and (self._transposes(one) or self._transposes(two)):
            return False
        arrays = self.operands[one.node].keys() | self.operands[two.node].keys()
        return len(arrays) + len(one.writes) + len(two.writes) <= MOST_ARRAYS

    def _reductions(self, kernel: Kernel) -> list[tuple[tuple[int, ...], int]]:
        """What a kernel's reductions have in common with those that they may be merged with."""
        return [
            (node.op.axes if node.op is not None else (), self.fusion.size(last))
            for last, node in ((last, self.nodes[last]) for last in (kernel.node, *kernel.merged))
            if node.reduces
        ]

    def _transposes(self, kernel: Kernel) -> bool:
        return any(self.nodes[n].name == "transpose" for n in (kernel.node, *kernel.merged))

    def _read_apart(self, one: Kernel, two: Kernel, index: int) -> bool:
        """Whether two kernels read parts of an array that need not overlap (`ParameterSlicesAreNonOverlapping`).

        The graph does not tell where a slice begins, so parts that could lie side by side are taken to.
        """
        if index not in self.cut:
            return False
        first, second, whole = self._part(one, index), self._part(two, index), self._shape(index)
        if first is None or second is None:
            return False
        if not len(first) == len(second) == len(whole):
            return True  # unstacked, one element each
        return any(a + b <= c for a, b, c in zip(first, second, whole, strict=True))

    def _part(self, kernel: Kernel, index: int) -> tuple[int, ...] | None:
        """The shape of the one part of an array that a kernel reads; None if it reads it otherwise."""
        read = {number for number in self._numbers(kernel) if index in self.nodes[number].ins}
        if len(read) != 1:
            return None
        node = self.nodes[read.pop()]
        return self._shape(node.outs[0]) if node.name in _PARTS else None

    def _shape(self, index: int) -> tuple[int, ...]:
        return self.execution.graph.values[self.instances[index].value].shape
