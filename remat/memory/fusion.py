"""What XLA fuses: which instances are buffers, and which kernels read them.

A result of a matmul, convolution, loop, scatter or unknown operator is a buffer; so is a reduction's (it is merged
with what it reads, never with what reads it), what these operators read, what a barrier ties, and every result and
gradient: the rule of `remat.core.buffers`, for every run. Any other value is a buffer only if several kernels read
it and writing it once takes less time than making it, or the part that is needed, in each of them; or if kernels
would be larger than XLA makes them (`remat.core.kernel_limits`). Kernels of one size that do not depend on one
another count as one: XLA merges them into a kernel with several results. It follows XLA's `priority_fusion` and
`multi_output_fusion`.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.core.buffers import PARTS, is_written
from remat.core.kernel_limits import KernelSizes, Merging, splits_code, too_large
from remat.memory.execution import Execution, Node, live_nodes, users_of
from remat.memory.tables import (
    BYTES_PER_ADDITION,
    LAUNCH_BYTES,
    MOST_KERNELS,
    SCATTERS,
    SMALL_SHARE,
)

__all__ = ["Fusion"]


class Fusion:
    """Which instances become buffers, and which kernels read them.

    Attributes:
        live: for every node whether a result depends on it.
        users: for every instance the live nodes that read it.
        is_buffer: for every instance whether it is written to memory.
        kernels: for every node the kernels it is part of, each by its last node.
    """

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.live = live_nodes(execution)
        self.users = users_of(execution, self.live)
        # To make a value: bytes to read, and instructions as bytes.
        self.reads: list[float] = [float(i.nbytes) for i in execution.instances]
        self.work: list[float] = [0.0] * len(execution.instances)
        # The buffers among what it takes; small ones left out.
        self.leaves = [frozenset((i.root,)) for i in execution.instances]
        self.read_by: dict[int, set[int]] = {}
        # By node and kernel, the share of its elements that the kernel needs, where that is not all of them.
        self.shares: dict[tuple[int, int], float] = {}
        # Nodes that take parts, and those of which there is a share: of most there is none.
        self._partial = {n for n, node in enumerate(execution.nodes) if node.name in PARTS}
        self._estimate()
        self._reach: list[int] | None = None
        self.is_buffer = [i.producer < 0 for i in execution.instances]
        self.kernels: list[frozenset[int]] = [frozenset()] * len(execution.nodes)
        self._choose()

    def _estimate(self) -> None:
        """What it takes to make every value if what several operators read is written where that pays."""
        instances = self.execution.instances
        for number, node in enumerate(self.execution.nodes):
            if node.kind == "zeros":  # whether they are in memory is not known when XLA estimates
                self.reads[node.outs[0]], self.leaves[node.outs[0]] = 0.0, frozenset()
                continue
            if not self.live[number] or not node.fusible or node.reduces:
                continue
            for out in node.outs:
                reads, work = self._cost(node, out)
                nbytes, readers = instances[out].nbytes, len(self.users[out])
                parts = [self.part(out, user) for user in self.users[out]]
                if readers > 1 and _pays(nbytes, work, reads, [(reads, part) for part in parts]):
                    continue
                self.reads[out] = min(nbytes, reads) if readers > 1 else reads
                self.work[out] = work
                found = self._union(self.leaves, node.ins)
                least = SMALL_SHARE * nbytes
                if any([instances[leaf].nbytes < least for leaf in found]):
                    found = frozenset([leaf for leaf in found if instances[leaf].nbytes >= least])
                self.leaves[out] = found

    def _cost(self, node: Node, out: int) -> tuple[float, float]:
        instances = self.execution.instances
        elements = instances[out].elements
        reads = 0.0
        work = node.additions * elements * BYTES_PER_ADDITION
        for index in node.ins:
            size = instances[index].elements
            # A slice makes only its part of what it reads.
            share = elements / size if size > elements else 1
            reads += self.reads[index] * (share if node.name in PARTS else 1)
            sums = node.kind == "sum" or (node.op is not None and node.op.elemental)
            work += self.work[index] * (1 if sums else share)
        return reads, work

    def part(self, index: int, reader: int) -> float:
        """The share of an instance's elements that a reader takes."""
        node, instances = self.execution.nodes[reader], self.execution.instances
        if node.name not in PARTS or node.ins[0] != index:
            return 1.0
        taken = sum(instances[out].elements for out in node.outs)
        return min(1.0, taken / max(instances[index].elements, 1))

    def _share(self, outs: Sequence[int], kernel: int) -> float:
        """The share of a node's elements that a kernel needs: of those that read them at one place, the largest."""
        if self._partial.isdisjoint(self._readers(outs)):
            return 1.0
        together, apart = 0.0, 0.0
        for out in outs:
            for user in self.users[out]:
                if kernel in self.kernels[user]:
                    share = self.shares.get((user, kernel), 1.0) * self.part(out, user)
                    if self.execution.nodes[user].name in PARTS:
                        apart += share
                    else:
                        together = max(together, share)
        return min(1.0, together + apart)

    def _choose(self) -> None:
        nodes = self.execution.nodes
        written = [False] * len(nodes)
        if not self._decide(written, KernelSizes()):
            # Which values are written then is a question of all kernels; and of more kernels, more is.
            for number in too_large(self._merging(), self.live, written):
                written[number] = True
            self.read_by.clear()
            self.shares.clear()
            self._decide(written, None)
        for number, node in enumerate(nodes):
            if written[number]:
                for out in node.outs:
                    self.is_buffer[out] = True

    def _decide(self, written: list[bool], sizes: KernelSizes | None) -> bool:
        """From the results back: a value's kernels are known once those of its readers are.

        Args:
            written: by node, whether its results are written; what is found to be is added.
            sizes: None if kernels are known to be within XLA's limits.

        Returns:
            Whether they are.
        """
        nodes, results, fits = self.execution.nodes, set(self.execution.results), True
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            if not self.live[number]:
                continue
            outs = node.outs
            readers = self.users[outs[0]] if len(outs) == 1 else self._readers(outs)
            kernels = self._union(self.kernels, readers)
            written[number] = (
                written[number]
                or is_written(not node.fusible or node.reduces, self._apart_from(outs, readers))
                or not results.isdisjoint(outs)
                or (len(kernels) > 1 and self._written_once(node, kernels))
                or not kernels
            )
            if written[number]:
                kernels = frozenset((number,))
            if sizes is not None:
                if written[number]:
                    sizes.begin(number, _splits(node))
                elif not sizes.merge(number, _splits(node), kernels, readers, self.moves):
                    sizes = None
                    fits = False
            self._put(number, kernels)
        return fits

    def _merging(self) -> Merging:
        nodes, instances = self.execution.nodes, self.execution.instances
        return Merging(
            outs=[node.outs for node in nodes],
            ins=[node.ins for node in nodes],
            readers=self.users,
            nbytes=[instance.nbytes for instance in instances],
            splits=[_splits(node) for node in nodes],
            part=self.part,
            moves=self.moves,
        )

    def _put(self, number: int, kernels: frozenset[int]) -> None:
        """Makes a node part of kernels."""
        node = self.execution.nodes[number]
        self.kernels[number] = kernels
        if number not in kernels and not self._partial.isdisjoint(self._readers(node.outs)):
            for kernel in kernels:
                share = self._share(node.outs, kernel)
                if share < 1.0:
                    self.shares[number, kernel] = share
                    self._partial.add(number)
        for kernel in kernels:
            read = self.read_by.setdefault(kernel, set())
            for index in node.ins:
                read |= self.leaves[index]

    def moves(self, number: int) -> bool:
        """Whether a node reads other elements than it makes."""
        node = self.execution.nodes[number]
        return node.op is not None and node.op.kind == "VIEW"

    def _apart_from(self, outs: Sequence[int], readers: Sequence[int]) -> list[Node]:
        """The readers that do not make a node's results in their own kernel.

        A scatter makes its updates and indices itself (`IsInputFusibleScatter`); what it writes over is in memory.
        """
        nodes = self.execution.nodes
        return [
            node
            for node in map(nodes.__getitem__, readers)
            if node.op is None or node.op.name not in SCATTERS or node.ins[0] in outs
        ]

    def _readers(self, outs: Sequence[int]) -> list[int]:
        return [user for out in outs for user in self.users[out]]

    @staticmethod
    def _union(sets: Sequence[frozenset[int]], of: Sequence[int]) -> frozenset[int]:
        """The union; without a new set where there is one that holds the others."""
        if not of:
            return frozenset()
        found = sets[of[0]]
        for index in of[1:]:
            other = sets[index]
            if not other <= found:
                found = other if found <= other else found | other
        return found

    def _written_once(self, node: Node, kernels: frozenset[int]) -> bool:
        """Whether one write and a read per kernel cost less than making it in every kernel.

        A kernel does not pay for reading what it reads in any case.
        """
        instances = self.execution.instances
        out = node.outs[0]
        nbytes = instances[out].nbytes
        reads, work = self._cost(node, out)
        leaves = self._union(self.leaves, node.ins)
        whole = sum(instances[leaf].nbytes for leaf in leaves)
        scale = min(1.0, reads / whole) if whole else 0.0

        def pays(kernels: Sequence[int]) -> bool:
            again = [
                (
                    scale * sum(instances[leaf].nbytes for leaf in leaves - self.read_by[kernel]),
                    self._share(node.outs, kernel),
                )
                for kernel in kernels
            ]
            # Where making it again is a matter of arithmetic, kernels that have some of their own take longer with
            # it than alone, which outweighs the launch: so was seen of `tanh` in MLPs and GPTs.
            return _pays(nbytes, work, reads, again, LAUNCH_BYTES if work <= reads else 0.0)

        if not pays(list(kernels)):
            return False
        apart = self._apart(kernels)
        return len(apart) > 1 and pays(apart)

    def _apart(self, kernels: frozenset[int]) -> list[int]:
        """The kernels that are left when those of one size that are independent are merged."""
        if len(kernels) > MOST_KERNELS:
            return list(kernels)
        reach = self._reachable()
        groups: list[tuple[int, list[int]]] = []
        for kernel in sorted(kernels):
            size = self.size(kernel)
            for other, members in groups:
                if other == size and not any(reach[m] >> kernel & 1 for m in members):
                    members.append(kernel)
                    break
            else:
                groups.append((size, [kernel]))
        return [members[0] for _, members in groups]

    def size(self, number: int) -> int:
        """The number of elements a kernel walks over."""
        node, instances = self.execution.nodes[number], self.execution.instances
        around = node.ins if node.reduces else node.outs
        return max((instances[index].elements for index in around), default=0)

    def _reachable(self) -> list[int]:
        """For every node the set, as bits, of the nodes that depend on it, itself included."""
        if self._reach is None:
            reach = [0] * len(self.execution.nodes)
            for number in range(len(reach) - 1, -1, -1):
                if self.live[number]:
                    bits = 1 << number
                    for out in self.execution.nodes[number].outs:
                        for user in self.users[out]:
                            bits |= reach[user]
                    reach[number] = bits
            self._reach = reach
        return self._reach


def _splits(node: Node) -> bool:
    """Whether a node begins a branch or a loop in a kernel, see `remat.core.kernel_limits.splits_code`."""
    return node.op is not None and splits_code(node.op.name, node.op.kind)


def _pays(
    nbytes: int,
    work: float,
    reads: float,
    again: Sequence[tuple[float, float]],
    launch: float = 0.0,
) -> bool:
    """Whether to write a value once rather than to make it in every kernel that reads it.

    Memory traffic and arithmetic overlap, so a kernel takes as long as the longer of the two. All in bytes.

    Args:
        nbytes: of the value, written once and read by every kernel.
        work: arithmetic to make it.
        reads: what a kernel that makes it reads.
        again: for every kernel that needs it what that would read to make it, beyond what it reads anyway, and the
            share of the value that it needs.
        launch: what it costs to start a kernel more.
    """
    once = launch + max(work, reads + nbytes) + sum(share * nbytes for _, share in again)
    return once < sum(share * max(work, more) for more, share in again)
