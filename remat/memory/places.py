"""Where buffers lie and when they are there: written in place, put into results, copied, or memory of their own.

It follows XLA's `buffer_assignment`. Element-wise kernels and scatters write into an operand that dies there and
has the same size, if that is the only result of another kernel and no barrier is between them; transpositions do
not, nor do normalizations of rows, nor does what a scatter then writes over. Temporaries are put into results that
are not there yet, largest first, into the smallest that fits.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from remat.core.primitives import SCATTERS
from remat.memory.execution import Execution, post_order
from remat.memory.kernels import Kernel, tie_of, written_over
from remat.memory.packing import blocks_of, packed_bytes
from remat.memory.tables import (
    COMPUTED_BYTES,
    CONVOLUTION,
    IN_PLACE,
    SEVERAL_RESULTS,
    TINY_SHARE,
    TUPLES_ARE_READ_DIRECTLY,
)

__all__ = ["Layout", "Occupancy", "Range", "held_bytes", "lay_out", "occupy", "occupy_by"]


@dataclass(slots=True)
class Range:
    """When a buffer is there: from position `start` to position `end` of an order of kernels, both included.

    Attributes:
        index: the instance that it holds, or that the kernel makes which needs it.
        is_scratch: whether it is a copy, or what a library works in.
    """

    index: int
    nbytes: int
    start: int
    end: int
    is_scratch: bool = False

    def covers(self, at: int) -> bool:
        """Whether the buffer is there at a position."""
        return self.start <= at <= self.end


@dataclass(frozen=True)
class Layout:
    """An order of kernels with the live ranges of temporaries, and of results from when they are written."""

    order: list[Kernel]
    ranges: list[Range]
    results: list[Range]


@dataclass(frozen=True)
class Occupancy:
    """What is alive while the kernels run.

    Attributes:
        totals: for every kernel the bytes alive while it runs, what a loop's body needs included.
        at: position of the kernel at the peak, -1 if nothing is ever alive.
        peak_bytes: bytes alive there; `loop_peak_bytes` is the most while a loop runs, `outside_peak_bytes` while
            none does.
        alive: what takes memory of its own at the peak.
        in_results: what lies in results at the peak.
    """

    totals: list[int]
    at: int
    peak_bytes: int
    loop_peak_bytes: int
    outside_peak_bytes: int
    alive: list[Range]
    in_results: list[Range]


def lay_out(execution: Execution, order: list[Kernel], moved: Mapping[int, int]) -> Layout:
    """Returns from when to when each buffer is there.

    Args:
        execution: whose buffers.
        order: in which the kernels run.
        moved: buffers that are made before their turn, with the node of the kernel that makes them.
    """
    instances = execution.instances
    position = {node: i for i, k in enumerate(order) for node in (k.node, *k.merged)}
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    copied: dict[int, tuple[int, int]] = {}
    for i, kernel in enumerate(order):
        for out in kernel.writes:
            start[out] = min(i, position[moved[out]]) if out in moved else i
            end.setdefault(out, i)
        for root in kernel.reads:
            end[root] = i
        for index in kernel.copies:
            tie = tie_of(execution, index)  # XLA copies what a barrier lets through at once
            first = i if tie is None else position[tie]
            copied[index] = copied.get(index, (first, i))[0], i
    written = {instances[index].root for index in execution.results}
    sliced: list[Range] = []
    cut_out = _cut_out(execution, order)
    for i, kernel in enumerate(order):
        # Its results are slices of one buffer; what the program returns, or is read whole, is copied out of it.
        if kernel.is_joined:
            till = max((end[out] for out in kernel.writes if out not in cut_out), default=i)
            sliced += [
                Range(out, instances[out].nbytes, i, end[out] if out in cut_out else till, True)
                for out in kernel.writes
                if out in written or out in cut_out
            ]
            end.update(dict.fromkeys(kernel.writes, till))
    last = len(order) - 1
    over = written_over(execution, order, written)
    own = {execution.nodes[node].outs[0]: target for node, target in over.items()}
    results = [
        Range(i, instances[i].nbytes, start[own.get(i, i)], last) for i in written if i in start
    ]
    ranges = [
        Range(i, instances[i].nbytes, at, end[i])
        for i, at in start.items()
        if i not in execution.sources
    ]
    ranges += [
        Range(
            i, instances[i].nbytes, at, max(till, end[i]) if i in execution.slices else till, True
        )
        for i, (at, till) in copied.items()
    ]
    ranges += [
        Range(*k.workspace, i, i, True) for i, k in enumerate(order) if k.workspace is not None
    ]
    kept = (written - execution.copied).union(own.values())
    ranges = [r for r in ranges if r.nbytes and r.index not in kept]
    return Layout(order, ranges + sliced, results)


def _cut_out(execution: Execution, order: Sequence[Kernel]) -> set[int]:
    """The parts of matmuls' common results that XLA copies at once: those that a kernel does not slice as it reads.

    A matmul takes no slice in that is smaller than what it is cut out of (`IsInputWorthFusing` of `gemm_fusion`).
    """
    nodes = execution.nodes
    parts = {out for kernel in order if kernel.is_joined for out in kernel.writes}
    return {
        root
        for kernel in order
        for root in kernel.reads & parts
        if not (nodes[kernel.node].fusible or nodes[kernel.node].name in SCATTERS)
    }


def held_bytes(execution: Execution, layout: Layout) -> int:
    """What temporaries and results take at most, none in another: by this XLA compares orders (`HeapSimulator`)."""
    ranges = [*layout.ranges, *layout.results]
    change = _changes(ranges, len(layout.order))
    _count_once(change, _overwritten(execution, layout.order, ranges))
    held = zip(itertools.accumulate(change), layout.order, strict=False)
    return max((total + _working_bytes(execution, kernel) for total, kernel in held), default=0)


def occupy(execution: Execution, layout: Layout) -> Occupancy:
    """Returns how much is alive when."""
    order, ranges = layout.order, layout.ranges
    places = set() if execution.in_loop else _in_results(execution, layout)
    outside = [r for i, r in enumerate(ranges) if i not in places]
    change = _changes(outside, len(order))
    overwriting = _overwritten(execution, order, outside)
    _count_once(change, overwriting)
    peak, at, alive = 0, -1, 0
    in_loops = elsewhere = 0
    totals: list[int] = []
    for position, kernel in enumerate(order):
        alive += change[position]
        total = alive + _working_bytes(execution, kernel)
        totals.append(total)
        if total > peak:
            peak, at = total, position
        if execution.nodes[kernel.node].working:
            in_loops = max(in_loops, total)
        else:
            elsewhere = max(elsewhere, total)
    if not in_loops and not execution.in_loop:
        peak += _gaps_bytes(execution, layout, outside, overwriting)
        elsewhere = peak
    return Occupancy(
        totals=totals,
        at=at,
        peak_bytes=peak,
        loop_peak_bytes=in_loops,
        outside_peak_bytes=elsewhere,
        alive=[r for r in outside if r.covers(at)],
        in_results=[ranges[i] for i in sorted(places) if ranges[i].covers(at)],
    )


def _gaps_bytes(
    execution: Execution, layout: Layout, ranges: Sequence[Range], overwriting: Sequence[Range]
) -> int:
    """What lies idle between the large ones of some temporaries, as they keep their places.

    What is written over another lies where the first of its operands does that it may lie in.
    """
    least = max((found.nbytes for found in ranges), default=0) * TINY_SHARE
    large = [found for found in ranges if found.nbytes >= least]
    change = _changes(large, len(layout.order))
    _count_once(change, [found for found in overwriting if found.nbytes >= least])
    alive_bytes = max(itertools.accumulate(change), default=0)
    over = set(map(id, overwriting))
    serving = _serving(execution, layout.order, ranges)
    written = {root for kernel in layout.order for root in kernel.writes}

    def lies_in(place: int, dying: Sequence[int]) -> int | None:
        found = ranges[place]
        there = {ranges[i].index: i for i in dying if ranges[i].index in serving}
        if id(found) not in over or not there:
            return None
        operands = _operands_of(execution, found.index, written)
        return next((there[root] for root in operands if root in there), min(there.values()))

    blocks = [block for block in blocks_of(ranges, lies_in) if block.nbytes >= least]
    return packed_bytes(blocks, alive_bytes) - alive_bytes


def _operands_of(execution: Execution, index: int, written: AbstractSet[int]) -> list[int]:
    """The buffers that an array is made of, as the operands of its kernel stand.

    XLA takes one producer after the other into a kernel: the last goes, and its operands come behind the others.
    """
    instances = execution.instances
    operands: dict[int, None] = {}
    taken_in: list[tuple[int, int]] = []  # the last first

    def add(reader: int) -> None:
        for root in _operands(execution, reader, written):
            if root not in operands:
                operands[root] = None
                if root not in written and instances[root].producer >= 0:
                    heapq.heappush(taken_in, (-instances[root].producer, root))

    add(index)
    while taken_in:
        _, root = heapq.heappop(taken_in)
        del operands[root]
        add(root)
    return list(operands)


def _operands(execution: Execution, index: int, written: AbstractSet[int]) -> list[int]:
    """What a step reads, each once; of what is written only before a function of it was computed, the written."""
    nodes, instances = execution.nodes, execution.instances
    found: dict[int, None] = {}
    for operand in nodes[instances[index].producer].ins:
        root = instances[operand].root
        before = nodes[instances[root].producer].ins if instances[root].producer >= 0 else ()
        if root not in written and len(before) == 1 and instances[before[0]].root in written:
            root = instances[before[0]].root
        found[root] = None
    return list(found)


def occupy_by(
    execution: Execution, layout: Layout, group: Callable[[Range], int], groups: int
) -> list[list[int]]:
    """Returns the totals of `occupy` in parts, without what the bodies of loops need.

    What is written in place counts for the group of the operand until the kernel is done.

    Args:
        execution, layout: as for `occupy`.
        group: of a buffer, the number of its group.
        groups: how many there are.
    """
    order, ranges = layout.order, layout.ranges
    places = set() if execution.in_loop else _in_results(execution, layout)
    outside = [r for i, r in enumerate(ranges) if i not in places]
    overwritten = _overwritten(execution, order, outside)
    parts: list[list[int]] = []
    for number in range(groups):
        change = _changes((r for r in outside if group(r) == number), len(order))
        _count_once(change, (r for r in overwritten if group(r) == number))
        parts.append(list(itertools.accumulate(change[: len(order)])))
    return parts


def _changes(ranges: Iterable[Range], length: int) -> list[int]:
    """By how many bytes what is alive grows at every position of an order, and behind it."""
    change = [0] * (length + 2)
    for found in ranges:
        change[found.start] += found.nbytes
        change[found.end + 1] -= found.nbytes
    return change


def _count_once(change: list[int], overwriting: Iterable[Range]) -> None:
    """Takes what kernels write into an operand off where they begin, as it lies where that does."""
    for found in overwriting:
        change[found.start] -= found.nbytes
        change[found.start + 1] += found.nbytes


def _working_bytes(execution: Execution, kernel: Kernel) -> int:
    """What one iteration of a loop needs, 0 for other kernels."""
    working = execution.nodes[kernel.node].working
    return working.peak_bytes if working else 0


def _in_results(execution: Execution, layout: Layout) -> set[int]:
    """Indices of the temporaries that fit into results not written yet: largest first, smallest that fits.

    Of equal ones the one whose operator comes first when each is listed behind its operands, from the first result
    on (`BufferAssigner::AssignBuffersForComputations`). What is written over another lies where that does.
    """
    ranges = layout.ranges
    least = max((found.nbytes for found in ranges), default=0) * TINY_SHARE
    places: dict[int, list[_Place]] = {}
    for result in sorted(layout.results, key=lambda r: r.start):
        places.setdefault(result.nbytes, []).append(_Place(result.start))
    sizes = sorted(places)
    turn, over = post_order(execution), _lies_with(execution, layout)

    def by_size(index: int) -> tuple[int, int]:
        found = ranges[index]
        return -found.nbytes, turn.get(execution.instances[found.index].producer, -1)

    lies: dict[int, _Place] = {}
    for index in sorted(range(len(ranges)), key=by_size):
        found = ranges[index]
        if found.nbytes < least:
            break
        first = found.start + 1  # until then it is the other that lies there
        own = lies.get(over.get(index, -1))
        if own is not None and first <= found.end < own.start and own.take(first, found.end):
            lies[index] = own
            continue
        for size in itertools.islice(sizes, bisect.bisect_left(sizes, found.nbytes), None):
            later = bisect.bisect_right(places[size], found.end, key=lambda place: place.start)
            free = (p for p in places[size][later:] if p.take(found.start, found.end))
            if (place := next(free, None)) is not None:
                lies[index] = place
                break
    return set(lies)


@dataclass(slots=True)
class _Place:
    """A result that is written at `start`, with the borders of what lies in it until then: from when to when."""

    start: int
    borders: list[int] = field(default_factory=list)

    def take(self, first: int, last: int) -> bool:
        """Whether a temporary, dead before the result is written, lies here from `first` to `last` from now on."""
        at = bisect.bisect_left(self.borders, first)
        if at % 2 or (at < len(self.borders) and self.borders[at] <= last):
            return False
        self.borders[at:at] = (first, last)
        return True


def _lies_with(execution: Execution, layout: Layout) -> dict[int, int]:
    """Of temporaries that an element-wise kernel may write over another, that other; both by index.

    A convolution's library adds a bias and takes the maximum with zero itself.
    """
    ranges, order = layout.ranges, layout.order
    may_serve = _may_serve(execution, order, (CONVOLUTION,))
    dying: dict[tuple[int, int], int] = {}
    for index, found in enumerate(ranges):
        if (
            may_serve(found)
            and not found.is_scratch
            and order[found.end].may_write_over(found.index)
        ):
            dying[found.end, found.nbytes] = index
    over: dict[int, int] = {}
    for index, found in enumerate(ranges):
        node = execution.nodes[order[found.start].node]
        before = dying.get((found.start, found.nbytes), index)
        if before != index and node.fusible and not node.reduces and node.name != "transpose":
            over[index] = before
    return over


def _may_serve(
    execution: Execution, order: Sequence[Kernel], also: Sequence[str] = ()
) -> Callable[[Range], bool]:
    """Returns whether a kernel may write over a temporary that it reads last: see `_overwritten`.

    Args:
        execution, order: whose.
        also: what makes several arrays, and is written over all the same.
    """
    nodes, instances = execution.nodes, execution.instances
    tied = {instances[i].root for node in nodes if node.kind == "barrier" for i in node.ins}
    if TUPLES_ARE_READ_DIRECTLY:
        tied = {index for index in tied if _is_seen_otherwise(execution, index)}
    joined = {node for k in order if k.is_joined for node in (k.node, *k.merged)}

    def may_serve(found: Range) -> bool:
        producer = instances[found.index].producer
        if producer in joined or found.index in tied:
            return False
        if producer < 0:
            return True
        node = nodes[producer]
        return node.name in also or (len(node.outs) == 1 and node.name not in SEVERAL_RESULTS)

    return may_serve


def _is_seen_otherwise(execution: Execution, index: int) -> bool:
    """Whether a barrier holds an instance as other than the kernel that made it does, biased and rectified or not.

    A convolution's library makes several arrays, a scatter's result is in the buffer of what it is scattered into,
    and a matmul is one of two matrices, or of one batch of them.
    """
    nodes, instances = execution.nodes, execution.instances
    elements = instances[index].elements
    while (producer := instances[index].producer) >= 0:
        node = nodes[producer]
        if node.name == CONVOLUTION or node.name in SCATTERS:
            return True
        if node.op is not None and node.op.contracts:
            batch = len(node.op.contracts[2])
            shape = execution.graph.values[instances[node.outs[0]].value].shape
            return batch > 1 or len(shape) != batch + 2
        whole = [i for i in node.ins if instances[i].elements == elements]
        if node.name not in ("add", "max") or not whole:
            return False
        index = whole[0]
    return False


def _serving(execution: Execution, order: Sequence[Kernel], ranges: Sequence[Range]) -> set[int]:
    """The temporaries that the kernel in which they die may write over."""
    may_serve = _may_serve(execution, order)
    return {r.index for r in ranges if may_serve(r) and order[r.end].may_write_over(r.index)}


def _overwritten(
    execution: Execution, order: Sequence[Kernel], ranges: Sequence[Range]
) -> list[Range]:
    """What kernels write into an operand that dies there: for the first kernel its bytes are counted twice.

    XLA lets a kernel do so only if what it reads is itself what made the operand: not through a barrier, nor if it
    made several arrays, as do a loop and a call of a library (a convolution: its result and its scratch space).
    Of the results of merged kernels XLA was seen to write one in place if they are in a type narrower than the one
    they are computed in (bfloat16), all if in float32.
    """
    nodes, instances = execution.nodes, execution.instances
    # XLA has one buffer for what is scattered into and the scatter's result, and only buffers of one array share.
    kept = {instances[i].root for node in nodes if node.name in IN_PLACE for i in node.ins}

    serving = _serving(execution, order, ranges)
    dying = Counter((found.end, found.nbytes) for found in ranges if found.index in serving)
    twice: list[Range] = []
    overwriting: set[tuple[int, int]] = set()
    for found in ranges:
        producer = instances[found.index].producer
        node = nodes[producer] if producer >= 0 else None
        if node is None or node.name == "transpose" or found.index in execution.copied:
            continue  # a loop stacks into an array of its own
        if node.name in SCATTERS:
            # What it writes into is a buffer that it shares, made by a kernel of its own.
            if instances[node.ins[0]].root not in order[found.start].reads:
                continue
        elif node.name not in IN_PLACE and (
            not node.fusible or node.reduces or found.index in kept
        ):
            continue
        key = (found.start, found.nbytes)
        own = found.end == found.start and found.index in serving
        narrow = found.nbytes < COMPUTED_BYTES * instances[found.index].elements
        several = narrow and order[found.start].merged
        if dying[key] > own and not (several and key in overwriting):
            dying[key] -= 1
            overwriting.add(key)
            twice.append(found)
    return twice
