"""Which matmuls XLA multiplies as one: those that share an operand, where one of them is small.

`x @ a` and `x @ b` become `x @ concatenate(a, b)`, one buffer of which both results are slices; so do matmuls of
other arrays with one weight, as an unrolled recurrent network has for every step. It follows XLA's `dot_merger`,
which runs before anything is fused: the order of the pairs, what counts as small, and that neither may need the
other; since jax 0.11.2 also that they are alike in size. What it merges besides, an operand of one that is the
transposed operand of the other, is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from remat.core.kernel_work import cycles_named
from remat.memory.execution import Execution, Node, live_nodes, users_of
from remat.memory.fusion import Fusion
from remat.memory.kernels import Kernel, dependent
from remat.memory.splits import (
    PART_BYTES,
    Dimensions,
    padded_count,
    parts_of,
    shape_of,
    widths_of,
)
from remat.memory.tables import (
    MERGED_BYTES,
    MERGED_RATIO,
    MOST_PIECES,
    ONLY_ALIKE_MATMULS_ARE_MERGED,
    PIECE,
)

__all__ = ["Group", "join_matmuls", "merged_matmuls", "waiting_products"]

Group = tuple[int, list[int]]
"""Matmuls that are one: the side of the operand that they share, and their nodes."""


def merged_matmuls(execution: Execution) -> list[Group]:
    """Returns the matmuls that are multiplied as one, and splits each such product as XLA does.

    Complexity: quadratic in the matmuls that share an operand with a small one, linear in the nodes for these.
    """
    found = _Merger(execution).groups()
    for side, members in found:
        _split_as_one(execution, side, members)
    return found


class _Merger:
    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.live = live_nodes(execution)
        self.size: dict[int, int] = {}  # by matmul: bytes of its operands and results
        self.members: dict[int, list[int]] = {}  # by matmul that stands for several, in order
        self.own: dict[int, int] = {}  # by matmul: its bit, or those of all that it stands for
        self.after: dict[int, int] = {}  # by matmul: those that need it, as bits, itself included

    def groups(self) -> list[Group]:
        """Returns the groups of more than one."""
        classes = list(self._classes())
        self._find_dependent({n for _, matmuls in classes for n in matmuls})
        taken: set[int] = set()
        side_of: dict[int, int] = {}
        for side, found in classes:
            matmuls = [number for number in found if number not in taken]
            if ONLY_ALIKE_MATMULS_ARE_MERGED:
                matmuls.sort(key=lambda number: self._own_bytes(number, side))
            for place, first in enumerate(matmuls):
                most_bytes = self._most_bytes(first, side)
                for second in matmuls[place + 1 :] if first not in taken else ():
                    if self._own_bytes(second, side) > most_bytes:
                        break
                    if second not in taken and self._merge(first, second, side):
                        taken.add(second)
                        side_of[first] = side
            taken.update(number for number in matmuls if number in side_of)
        return [(side, self.members[first]) for first, side in side_of.items()]

    def _classes(self) -> Iterator[tuple[int, list[int]]]:
        """Matmuls that share an operand, with the side that it is on; not where none of them is small.

        The operand that was made first comes first, as in XLA; behind them those that XLA transposes before, each
        for itself, and only later sees to be one.
        """
        execution = self.execution
        found: dict[tuple[bool, int, int, Hashable], list[int]] = defaultdict(list)
        for number, node in enumerate(execution.nodes):
            is_matmul = node.op is not None and bool(node.op.contracts)
            if self.live[number] and is_matmul and len(node.ins) == 2:
                self.size[number] = sum(self._whole_bytes(i) for i in (*node.ins, *node.outs))
                for side in (0, 1):
                    turned, rest = self._shared(node, side)
                    shared = unpadded(execution, node.ins[side])
                    found[turned, shared, side, rest].append(number)
        for key in sorted(found, key=lambda key: key[:3]):
            matmuls = found[key]
            if len(matmuls) > 1 and any(self._is_small(number, key[2]) for number in matmuls):
                yield key[2], matmuls

    def _whole_bytes(self, index: int) -> int:
        """Bytes of a value, also where the instance holds parts of it."""
        return self.execution.graph.values[self.execution.instances[index].value].nbytes

    def _shared(self, node: Node, side: int) -> tuple[bool, Hashable]:
        """Whether XLA transposes an operand, and what else matmuls have in common that are merged."""
        assert node.op is not None
        graph, instances = self.execution.graph, self.execution.instances
        shared, other, result = (
            graph.values[instances[i].value]
            for i in (node.ins[side], node.ins[1 - side], node.outs[0])
        )
        summed, batch = node.op.contracts[side], node.op.contracts[side + 2]
        count = len(batch)
        start = len(shared.shape) - len(summed) if side == 0 else count
        in_place = (*range(count),), (*range(start, start + len(summed)),)
        return (batch, summed) != in_place, (summed, batch, other.dtype, result.dtype)

    def _own_bytes(self, number: int, side: int) -> int:
        """Bytes of what a matmul does not share with others."""
        shared = unpadded(self.execution, self.execution.nodes[number].ins[side])
        return self.size[number] - self._whole_bytes(shared)

    def _is_small(self, number: int, side: int) -> bool:
        alike = ONLY_ALIKE_MATMULS_ARE_MERGED
        return (self._own_bytes(number, side) if alike else self.size[number]) <= MERGED_BYTES

    def _most_bytes(self, first: int, side: int) -> float:
        """Bytes of the largest matmul that is merged with this one, those that are shared left out."""
        return (
            MERGED_RATIO * self._own_bytes(first, side)
            if ONLY_ALIKE_MATMULS_ARE_MERGED
            else math.inf
        )

    def _find_dependent(self, matmuls: set[int]) -> None:
        if not matmuls:
            return
        execution = self.execution
        users = users_of(execution, self.live)
        self.own = {number: 1 << place for place, number in enumerate(sorted(matmuls))}
        after = [0] * len(execution.nodes)
        for number in range(len(after) - 1, -1, -1):
            bits = self.own.get(number, 0)
            for out in execution.nodes[number].outs:
                for user in users[out]:
                    bits |= after[user]
            after[number] = bits
        self.after = {number: after[number] for number in matmuls}

    def _merge(self, first: int, second: int, side: int) -> bool:
        """Makes one of two matmuls, known by the first; not if neither is small, or one needs the other."""
        is_small = self._is_small(first, side)
        if not is_small and (ONLY_ALIKE_MATMULS_ARE_MERGED or not self._is_small(second, side)):
            return False
        if self.after[first] & self.own[second] or self.after[second] & self.own[first]:
            return False
        self.size[first] += self._own_bytes(second, side)
        # What needs one of them needs both now, and so does what needs that.
        own = self.own[first] = self.own[first] | self.own[second]
        both = self.after[first] | self.after[second] | own
        for number, bits in self.after.items():
            if bits & own:
                self.after[number] = bits | both
        members = self.members.setdefault(first, [first])
        members += self.members.pop(second, [second])
        return True


def _split_as_one(execution: Execution, side: int, members: Sequence[int]) -> None:
    """Gives the parts of matmuls the sizes that they have where they are multiplied as one.

    Where none of them is split alone, their product is taken not to be, either.
    """
    nodes, instances = execution.nodes, execution.instances
    split = [number for number in members if number in execution.sums]
    if not split:
        return
    ops = [op for number in members if (op := nodes[number].op) is not None]
    shapes = [shape for op in ops if (shape := shape_of(execution.graph, op)) is not None]
    batch, rows, columns, count = shapes[0]
    if side == 0:
        columns = sum(shape[2] for shape in shapes)
    else:
        rows = sum(shape[1] for shape in shapes)
    widths = widths_of(execution.graph, ops[0])
    parts = parts_of((batch, rows, columns, count), *widths)
    _pad_as_one(execution, side, members, count, padded_count(count, widths[0], parts))
    whole: dict[int, int] = {}  # products that are not split: their sums are their buffers
    for number in split:
        product, total = nodes[number].outs[0], nodes[execution.sums[number]]
        total.cycles = cycles_named("add") * (parts - 1)
        if parts > 1:
            instances[product].nbytes = parts * PART_BYTES * instances[product].elements
        else:
            instances[product].nbytes = instances[total.outs[0]].nbytes
            whole[total.outs[0]] = product
    for instance in instances if whole else ():
        instance.root = whole.get(instance.root, instance.root)


def _pad_as_one(
    execution: Execution, side: int, members: Sequence[int], count: int, padded: int
) -> None:
    """Gives the padded operands of matmuls the size that they have where they are multiplied as one.

    What is not padded for a matmul alone is taken not to be, either.
    """
    nodes, instances = execution.nodes, execution.instances
    shared: int | None = None
    for number in members:
        node = nodes[number]
        operands = list(node.ins)
        for place, index in enumerate(operands):
            source = unpadded(execution, index)
            if source == index or padded == count:
                operands[place] = source
            elif len(operands) == 2 and place == side and shared is not None:
                operands[place] = shared
            else:
                instances[index].nbytes = instances[source].nbytes // count * padded
                shared = index if place == side else shared
        node.ins = tuple(operands)


def unpadded(execution: Execution, index: int) -> int:
    """Returns what an instance is with zeros behind, or itself."""
    producer = execution.instances[index].producer
    if producer >= 0 and execution.nodes[producer].kind == "pad":
        return execution.nodes[producer].ins[0]
    return index


def join_matmuls(
    execution: Execution, fusion: Fusion, kernels: Sequence[Kernel], groups: Sequence[Group]
) -> list[Kernel]:
    """Returns the kernels with those of every group as one, as soon as all its operands are there.

    Complexity: linear in the kernels for every matmul that is merged.
    """
    order = list(kernels)
    by_node = {kernel.node: kernel for kernel in order}
    for side, members in groups:
        found = [by_node[number] for number in members if number in by_node]
        for second in found[1:]:
            joined = _joined(order, found[0], second)
            if joined is not None:
                found[0] = joined
        if found and found[0].is_joined:
            found[0].workspace = _concatenated(execution, fusion, found[0], side)
    return order


def waiting_products(
    execution: Execution, order: Sequence[Kernel], at: int
) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Returns the matmuls that are one, and of whose products some are read at a moment or later, others no more.

    The latter stay all the same: they are slices of one buffer.

    Args:
        execution: that the kernels are of.
        order: the kernels as they run.
        at: the moment, the position of a kernel.

    Returns:
        For every such group the schedule's step of each matmul, and whether its product is read from then on.
    """
    nodes, instances = execution.nodes, execution.instances
    later = {root for kernel in order[at:] for root in kernel.reads}
    groups: list[tuple[tuple[int, bool], ...]] = []
    for kernel in order[: max(at, 0)]:
        if not kernel.is_joined:
            continue
        members: list[tuple[int, bool]] = []
        for number in (kernel.node, *kernel.merged):
            product = nodes[execution.sums.get(number, number)].outs[0]
            members.append((nodes[number].step, instances[product].root in later))
        if len({is_read for _, is_read in members}) > 1:
            groups.append(tuple(sorted(members)))
    return tuple(groups)


def _joined(order: list[Kernel], first: Kernel, second: Kernel) -> Kernel | None:
    """Makes one kernel of two; None if in between a kernel needs the first, and the second that kernel."""
    start, end = sorted((order.index(first), order.index(second)))
    early, late = order[start], order[end]
    made = (i for i in range(end - 1, start, -1) if _serves(order[i], late))
    place = next(made, start)
    later = dependent(order[start : place + 1])
    if any(_serves(kernel, late) for kernel in later):
        return None
    late.merge(early)
    late.is_joined = True
    moved = {member.node for member in later}
    rest = [kernel for kernel in order[start + 1 : place + 1] if kernel.node not in moved]
    order[start : end + 1] = [*rest, late, *later, *order[place + 1 : end]]
    return late


def _shape(execution: Execution, number: int) -> Dimensions | None:
    op = execution.nodes[number].op
    return None if op is None else shape_of(execution.graph, op)


def _serves(kernel: Kernel, reader: Kernel) -> bool:
    return not reader.after.isdisjoint((kernel.node, *kernel.merged))


def _concatenated(
    execution: Execution, fusion: Fusion, kernel: Kernel, side: int
) -> tuple[int, int]:
    """The operands that differ, put together for the kernel; not what is made in place for it alone.

    A few of them, of suitable lengths, the kernel reads as they are.
    """
    nodes, instances = execution.nodes, execution.instances
    members = (kernel.node, *kernel.merged)
    others = dict.fromkeys(nodes[n].ins[1 - side] for n in members)
    lengths = [shape[2 - side] for n in members if (shape := _shape(execution, n)) is not None]
    copied = 0
    if len(others) <= MOST_PIECES and not any(length % PIECE for length in lengths):
        return nodes[kernel.node].ins[side], 0
    for index in others:
        producer = instances[index].producer
        made = nodes[producer] if producer >= 0 and instances[index].root == index else None
        alone = (
            made is not None and made.kind in ("op", "pad") and made.fusible and not made.reduces
        )
        if not alone or len(fusion.users[index]) > 1:
            copied += instances[index].nbytes
        if len(fusion.users[index]) == 1:  # a slice of a stacked array is made in place
            kernel.copies.discard(instances[index].root)
    return nodes[kernel.node].ins[side], copied
