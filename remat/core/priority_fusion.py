"""Which operators XLA:GPU merges into one kernel: its pass `priority_fusion`, followed step by step.

At first every operator is a kernel. An operator whose readers can all take it in has a *priority*: the time that is
saved if each of them makes its result itself. The operator that saves most is merged first; then the priorities of
what its readers read are computed anew. What saves nothing is written to memory.

Times are XLA's own estimates (`GpuPerformanceModel`), in bytes: what the device moves meanwhile, in whole ticks of
a clock. Operators often save equally much, as all additions of a long sum do; of those what was made last goes
first. A kernel computes and moves at once, but for a twentieth of the lesser. An operator inside a kernel is
computed once for every *place* at which its readers want it: element-wise readers want it where they are
themselves, what moves elements (a slice, a broadcast) somewhere else
(`GpuHloCostAnalysis::FusionCalculateUtilizations`).

`tests/test_priority_fusion.py` holds the steps against those that XLA writes down.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

__all__ = ["Fused", "Program", "fuse", "in_ticks", "read_bytes"]

# XLA's own numbers: `GpuPerformanceModelBase` (a launch takes a microsecond, in which an H200 moves so many bytes;
# how much faster what was read before is read again, from a cache that it fits into), `GpuPerformanceModelOptions`,
# `gpu_hlo_cost_analysis.h`, `gpu_fusible.h`; the caches and multiprocessors are an H200's.
LAUNCH_BYTES = 4.8e6
_HIDDEN = 0.95
# XLA counts in quarters of a nanosecond (`absl::Duration`), as many of each array and of the arithmetic.
_TICK_BYTES = 0.25e-9 * 4.8e12
_CACHES = ((2048 * 132, 20.0), (50 * 2**20, 2.5))
_PROCESSORS = 132
# What a block of threads moves while the device moves a byte: 32 bytes in a clock cycle (`AdjustBandwidth`).
_BLOCK_RATE = 32 * 1.98e9 / 4.8e12
MOST_INSTRUCTIONS, MOST_ARRAYS = 10_000, 96


@dataclass(frozen=True)
class Program:
    """What XLA has to merge: operators by number, in an order in which they may run, and values by number.

    Attributes:
        outs: by operator, the values it makes.
        ins: by operator, the values it reads.
        readers: by value, the operators that may make it themselves; all of those that run.
        nbytes: by value, its size.
        work: by operator, its arithmetic, in bytes that could be moved meanwhile.
        moves: by operator, whether it reads other elements than it makes.
        blocks: by operator, the blocks of threads of a kernel that ends with it; 0 for enough.
        part: how often a reader takes a value's elements: less than once if it takes a part of them.
        stays: operators that stay kernels of their own when their readers make their results: others see these in
            another shape (`CanFuseWithAllNonBitcastUsers` leaves them out).
        tick_bytes: the unit of times, 0 for none.
        diamonds: by operator, those that are one kernel of rows with it from the first; they run no more.
        rows: by the same, how many rows there are: each is a block of threads.
        sums: reductions of rows, which kernels of rows alone take in or make part of another.
        tiled: operators that a kernel of rows may have.
    """

    outs: Sequence[Sequence[int]]
    ins: Sequence[Sequence[int]]
    readers: Sequence[Sequence[int]]
    nbytes: Sequence[int]
    work: Sequence[float]
    moves: Sequence[bool]
    blocks: Sequence[int]
    part: Callable[[int, int], float]
    stays: Collection[int] = frozenset()
    tick_bytes: float = _TICK_BYTES
    diamonds: Mapping[int, Collection[int]] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)
    sums: Collection[int] = frozenset()
    tiled: Collection[int] = frozenset()

    def written_bytes(self, number: int) -> float:
        """What writing an operator's results takes."""
        return sum([in_ticks(self.nbytes[out], self.tick_bytes) for out in self.outs[number]])


class Fused:
    """What XLA has merged; operators are known by their number.

    Attributes:
        written: by operator, whether its results are in memory.
        made_again: operators that stay, and whose readers make their results all the same.
        rows: the last operators of kernels of rows.
    """

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self.made_again = frozenset(queue.program.stays) - queue.saved.keys()
        self.written = [number in queue.kernels for number in range(len(queue.program.outs))]
        self.rows = frozenset(number for number, k in queue.kernels.items() if k.is_rows)

    def pays(self, number: int, users: Sequence[int]) -> bool:
        """Whether one kernel that writes the results of two takes no longer than both.

        XLA asks before it merges a kernel with one of several that read it (`ProducerCandidateIsFusible`).

        Args:
            number: the last operator of a kernel.
            users: those of a kernel that reads its results, several if it is merged of several.
        """
        queue, program = self._queue, self._queue.program
        producer, consumer = queue.kernels[number], self._as_one(users)
        found = queue.merged(number, producer, consumer)
        if found is None:
            return False
        work, moved, _ = found
        moved += program.written_bytes(number)
        apart = LAUNCH_BYTES + producer.time_bytes + consumer.time_bytes
        return consumer.taking(work, moved) <= apart

    def _as_one(self, numbers: Sequence[int]) -> _Kernel:
        """Kernels that walk over the same elements, as one: what several read is read once."""
        program = self._queue.program
        parts = [self._queue.kernels[number] for number in numbers]
        if len(parts) == 1:
            return parts[0]
        again = {out for number in self.made_again for out in program.outs[number]}
        written = sum(program.written_bytes(number) for number in numbers)
        work = sum(part.work for part in parts)
        kernel = _Kernel(work, written, parts[0].blocks, program.tick_bytes)
        kernel.instructions = sum(part.instructions for part in parts)
        for number, part in zip(numbers, parts, strict=True):
            # A reduction walks over what it reads: that is the place of all that are merged, but for what it makes
            # again, for itself.
            own = set(program.ins[number]) - again if program.moves[number] else set[int]()
            for value, found in part.reads.items():
                places = frozenset(-1 if place in own else place for place in found)
                kernel.reads[value] = kernel.reads.get(value, places) | places
            for place, (times, emitted) in part.places.items():
                if place != -1 and place not in own:
                    often, code = kernel.places.get(place, (0.0, 0))
                    kernel.places[place] = often + times, code + emitted
        kernel.count_reads(program.nbytes)
        return kernel


def fuse(
    program: Program,
    live: Sequence[bool],
    ends: Sequence[bool],
    note: Callable[[int, Mapping[int, float], float], None] | None = None,
) -> Fused:
    """Returns what XLA merges.

    Args:
        program: what runs.
        live: by operator, whether it runs.
        ends: by operator, whether its results are written in any case.
        note: told of every priority: the operator, what each reader saves, and all of it.

    Complexity: for every operator that is merged and every kernel that it is merged into, linear in the arrays that
    the two read.
    """
    queue = _Queue(program, live, ends, note)
    queue.run()
    return Fused(queue)


class _Kernel:
    """Operators that are one kernel, known by the last of them.

    Attributes:
        work: arithmetic, `moved`: bytes read and written, `instructions`: size of its code.
        blocks: of threads, 0 for enough: few neither compute nor read as fast as the device.
        reads: by value, the places at which it is read; `cost`: what reading it takes.
        places: by place, how often elements are computed there, and how often code is emitted. The kernel's own
            elements are the place -1; what moves elements reads a value at a place of the value's number.
        written_bytes: what writing its results takes.
        ops: its operators; left empty where there are no kernels of rows.
        is_rows: whether it is one, in which each row is read and computed once; `is_tiled`: whether it may be.
        once: the arithmetic of its operators, each once; None until it is asked for.
    """

    __slots__ = (
        "blocks",
        "cost",
        "instructions",
        "is_rows",
        "is_tiled",
        "moved",
        "once",
        "ops",
        "places",
        "reads",
        "tick",
        "work",
        "written_bytes",
    )

    def __init__(self, work: float, moved: float, blocks: int, tick: float) -> None:
        self.blocks = blocks
        self.tick = tick
        self.work = work
        self.moved = self.written_bytes = moved
        self.instructions = 1
        self.ops: set[int] = set()
        self.once: float | None = None
        self.is_rows = self.is_tiled = False
        self.reads: dict[int, frozenset[int]] = {}
        self.cost: dict[int, float] = {}
        self.places: dict[int, tuple[float, int]] = {-1: (1.0, 1)}

    @property
    def time_bytes(self) -> float:
        """How long it takes, in bytes that could be moved meanwhile."""
        return self.taking(self.work, self.moved)

    def count_reads(self, nbytes: Sequence[int]) -> None:
        """Adds to the traffic what reading every operand takes, given the values' sizes."""
        for value, places in self.reads.items():
            times = sum([self.places[place][0] for place in places])
            self.cost[value] = read_bytes(nbytes[value], times, self.blocks, self.tick)
        self.moved += sum(self.cost.values())

    def taking(self, work: float, moved: float) -> float:
        """How long it would take with this arithmetic and traffic."""
        return _taking(work, moved, self.blocks, self.tick)


_OWN = frozenset((-1,))


class _Queue:
    """Kernels, and what is saved if one is merged into those that read it."""

    def __init__(
        self,
        program: Program,
        live: Sequence[bool],
        ends: Sequence[bool],
        note: Callable[[int, Mapping[int, float], float], None] | None,
    ) -> None:
        self.program = program
        self.note = note
        self.maker = {
            out: number for number, outs in enumerate(program.outs) for out in outs if live[number]
        }
        self.kernels = {number: self._alone(number) for number, runs in enumerate(live) if runs}
        if program.diamonds:
            self._make_kernels_of_rows()
        self.readers: dict[int, set[int]] = {
            number: {user for out in program.outs[number] for user in program.readers[out]}
            for number in self.kernels
            if not ends[number]
        }
        # Of those that may be merged: what every reader saves, None if it cannot take it in.
        self.saved: dict[int, dict[int, float | None]] = {}
        # Of these the readers that XLA leaves out of the sum: it goes on from the last one, and takes a reader that
        # stays for gone when another has made its results, until the sum is made anew.
        self.forgotten: dict[int, set[int]] = {}
        # Kernels made later go first. What copies an operand on the way is a kernel that took the copy in, as that
        # saves most: made later than the operators, the first of them last.
        copies = [n for n, k in self.kernels.items() if len(k.places) > 1 and not program.moves[n]]
        self.turn = {number: number for number in self.kernels}
        self.made = len(program.outs)
        for number in reversed(copies):
            self._is_new(number)
        self.best: dict[int, float] = {}
        self.heap: list[tuple[float, int, int]] = []

    def _alone(self, number: int) -> _Kernel:
        program = self.program
        kernel = _Kernel(
            program.work[number],
            program.written_bytes(number),
            program.blocks[number],
            program.tick_bytes,
        )
        for value in program.ins[number]:
            part = program.part(value, number)
            if part == 1.0 and not program.moves[number]:
                kernel.reads[value] = kernel.reads.get(value, _OWN) | _OWN
            else:
                kernel.reads[value] = kernel.reads.get(value, frozenset()) | {value}
                times, emitted = kernel.places.get(value, (0.0, 0))
                kernel.places[value] = times + part, emitted + 1
        kernel.count_reads(program.nbytes)
        return kernel

    def _make_kernels_of_rows(self) -> None:
        program = self.program
        for number, kernel in self.kernels.items():
            kernel.ops.add(number)
            kernel.is_tiled = number in program.tiled
        for number, inner in program.diamonds.items():
            kernel = self.kernels[number]
            kernel.ops |= {*inner}
            made = {out for n in kernel.ops for out in program.outs[n]}
            read = {value for n in kernel.ops for value in program.ins[n]} - made
            rows = program.rows[number]
            self._make_rows(kernel, read, rows if rows < _PROCESSORS else 0)

    def _make_rows(self, kernel: _Kernel, read: Iterable[int], blocks: int) -> None:
        """Makes a kernel one of rows: each operator computes a row once, whatever reads it."""
        kernel.is_rows = kernel.is_tiled = True
        kernel.blocks, kernel.places = blocks, {-1: (1.0, 1)}
        kernel.once = None
        kernel.work = self._once(kernel)
        kernel.reads = dict.fromkeys(sorted(read), _OWN)
        kernel.cost = {value: self._read_in_rows(value, kernel.blocks) for value in kernel.reads}
        kernel.moved = kernel.written_bytes + sum(kernel.cost.values())

    def _once(self, kernel: _Kernel) -> float:
        if kernel.once is None:
            kernel.once = sum([self.program.work[number] for number in kernel.ops])
        return kernel.once

    def _read_in_rows(self, value: int, blocks: int) -> float:
        """What it takes a kernel of rows to read an operand: once."""
        return read_bytes(self.program.nbytes[value], 1.0, blocks, self.program.tick_bytes)

    def _as_rows(self, number: int, producer: _Kernel, consumer: _Kernel) -> tuple[set[int], int]:
        """What one kernel of rows reads that is two now, and its blocks."""
        read = (producer.reads.keys() | consumer.reads.keys()) - {*self.program.outs[number]}
        return read, (producer if producer.is_rows else consumer).blocks

    def _saves_in_rows(self, number: int, producer: _Kernel, consumer: _Kernel) -> float | None:
        """What is saved by one kernel of rows instead of two.

        What both compute is estimated as if it was computed twice, and read but once
        (`EstimateRunTimeForTiledHloComputation`).
        """
        if not (producer.is_tiled and consumer.is_tiled):
            return None
        read, blocks = self._as_rows(number, producer, consumer)
        if len(read) >= MOST_ARRAYS:
            return None
        moved = consumer.written_bytes + sum([self._read_in_rows(v, blocks) for v in read])
        work = self._once(producer) + self._once(consumer)
        return consumer.time_bytes - _taking(work, moved, blocks, self.program.tick_bytes)

    def run(self) -> None:
        """Merges kernels until nothing is saved by it."""
        for number in self.readers:
            self.saved[number] = {user: self._saves(number, user) for user in self.readers[number]}
            self._put(number)
        while self.heap:
            priority, turn, number = heapq.heappop(self.heap)
            if number not in self.saved or -turn != self.turn[number]:
                continue
            if priority != -self.best[number]:
                continue
            readers = sorted(self.readers[number])
            producer = self.kernels[number]
            if number not in self.program.stays:
                del self.kernels[number]
            for user in readers:
                self._merge(number, producer, user)
                self._is_new(user)
            del self.saved[number], self.readers[number]
            self._changed(number, readers)

    def _is_new(self, number: int) -> None:
        self.turn[number] = self.made
        self.made += 1

    def _put(self, number: int) -> None:
        priority = self.best[number] = self._priority(number)
        if priority >= 0:
            heapq.heappush(self.heap, (-priority, -self.turn[number], number))

    def _priority(self, number: int) -> float:
        saved = self.saved[number]
        if not saved or None in saved.values():
            return -1.0
        left_out = self.forgotten.get(number, ())
        gains = [gain for user, gain in saved.items() if gain is not None and user not in left_out]
        total = LAUNCH_BYTES + self.kernels[number].time_bytes + sum(gains)
        if self.note is not None:
            self.note(number, {u: gain for u, gain in saved.items() if gain is not None}, total)
        return total

    def _changed(self, merged: int, readers: Sequence[int]) -> None:
        """Computes priorities anew: of the kernels that a kernel was merged into, and of what they read."""
        again: set[int] = set()
        for user in readers:
            if user in self.saved:
                self.saved[user] = {other: self._saves(user, other) for other in self.readers[user]}
                self.forgotten.pop(user, None)
                again.add(user)
            for value in self.kernels[user].reads:
                source = self.maker.get(value)
                if source in self.saved and source is not None:
                    saved = self.saved[source]
                    if merged in self.kernels and merged in saved:
                        self.forgotten.setdefault(source, set()).add(merged)
                    else:
                        saved.pop(merged, None)
                        self.readers[source].discard(merged)
                    self.readers[source].add(user)
                    saved[user] = self._saves(source, user)
                    again.add(source)
        for number in sorted(again):
            self._put(number)

    def _saves(self, number: int, user: int) -> float | None:
        """What a reader takes less time than now if it made a kernel's results itself; None if it cannot."""
        producer, consumer = self.kernels[number], self.kernels[user]
        if producer.is_rows or consumer.is_rows:
            return self._saves_in_rows(number, producer, consumer)
        if number in self.program.sums:
            return None
        found = self.merged(number, producer, consumer)
        if found is None:
            return None
        work, moved, _ = found
        return consumer.time_bytes - consumer.taking(work, moved)

    def merged(
        self, number: int, producer: _Kernel, consumer: _Kernel
    ) -> tuple[float, float, dict[int, float]] | None:
        """Arithmetic and traffic of a kernel that takes another in, and what reading each of its operands takes."""
        at, places = consumer.places, producer.places
        taken, times, emitted = self._wanted(number, consumer)
        instructions = consumer.instructions + emitted * producer.instructions
        if instructions > MOST_INSTRUCTIONS or self._reads_too_much(number, producer, consumer):
            return None
        moved = consumer.moved
        for out in self.program.outs[number]:
            moved -= consumer.cost.get(out, 0.0)
        cost: dict[int, float] = {}
        nbytes = self.program.nbytes
        for value, own in producer.reads.items():
            there = consumer.reads.get(value)
            here = taken if -1 in own else None
            if there is not None:
                here = there if here is None else here | there
            total = 0.0
            if here is not None:
                for place in here:
                    total += at[place][0]
            for place in own:
                if place != -1:
                    total += times * places[place][0]
            cost[value] = read_bytes(nbytes[value], total, consumer.blocks, consumer.tick)
            moved += cost[value] - (consumer.cost[value] if there is not None else 0.0)
        return consumer.work + times * producer.work, moved, cost

    def _reads_too_much(self, number: int, producer: _Kernel, consumer: _Kernel) -> bool:
        """Whether a kernel of both, with the results of both, has too many arrays (`FusionFitsInBudget`).

        One that reads no more than the consumer does now is not too large, whatever that is.
        """
        if len(consumer.reads) + len(producer.reads) + 1 <= MOST_ARRAYS:
            return False
        made = self.program.outs[number]
        reads = len((consumer.reads.keys() | producer.reads.keys()) - {*made})
        return reads > len(consumer.reads) and reads + 2 > MOST_ARRAYS

    def _wanted(self, number: int, consumer: _Kernel) -> tuple[frozenset[int], float, int]:
        """Where a kernel reads the results of another, how often each element, and how often code is emitted."""
        taken = self._taken(number, consumer)
        times, emitted = 0.0, 0
        for place in taken:
            often, code = consumer.places[place]
            times += often
            emitted += code
        return taken, times, emitted

    def _taken(self, number: int, consumer: _Kernel) -> frozenset[int]:
        """The places at which a kernel reads the results of another."""
        outs = self.program.outs[number]
        if len(outs) == 1:
            return consumer.reads[outs[0]]
        return frozenset[int]().union(*(consumer.reads.get(out, ()) for out in outs))

    def _merge(self, number: int, producer: _Kernel, user: int) -> None:
        consumer = self.kernels[user]
        if producer.is_rows or consumer.is_rows:
            read, blocks = self._as_rows(number, producer, consumer)
            consumer.ops |= producer.ops
            self._make_rows(consumer, read, blocks)
            return
        consumer.ops |= producer.ops
        consumer.once = None
        consumer.is_tiled &= producer.is_tiled
        found = self.merged(number, producer, consumer)
        assert found is not None
        consumer.work, consumer.moved, cost = found
        taken, times, emitted = self._wanted(number, consumer)
        consumer.instructions += emitted * producer.instructions
        for out in self.program.outs[number]:
            consumer.reads.pop(out, None)
            consumer.cost.pop(out, None)
        for place, (often, code) in producer.places.items():
            if place != -1:
                before = consumer.places.get(place, (0.0, 0))
                consumer.places[place] = before[0] + times * often, before[1] + emitted * code
        for value, own in producer.reads.items():
            places = own - _OWN | taken if -1 in own else own
            there = consumer.reads.get(value)
            consumer.reads[value] = places if there is None else places | there
        consumer.cost |= cost


# Equal layers ask the same again and again.
_remembered = lru_cache(maxsize=1 << 16)


@_remembered
def _taking(work: float, moved: float, blocks: int, tick: float) -> float:
    if 0 < blocks < _PROCESSORS:
        work *= _PROCESSORS / blocks
    work = in_ticks(work, tick)
    return work + moved - in_ticks(_HIDDEN * min(work, moved), tick)


@_remembered
def read_bytes(nbytes: int, times: float, blocks: int = 0, tick: float = _TICK_BYTES) -> float:
    """What it takes to read an array so often: at first from memory, then from the cache that it fits into.

    Args:
        nbytes: of the array.
        times: how often each element.
        blocks: of threads, 0 for enough.
        tick: the unit of times, 0 for none.
    """
    fastest = _BLOCK_RATE * blocks if blocks else math.inf
    first = in_ticks(nbytes * min(times, 1.0) / min(fastest, 1.0), tick)
    if times <= 1:
        return first
    rate = next((faster for most, faster in _CACHES if nbytes < most), 1.0)
    return first + in_ticks(nbytes * (times - 1) / min(fastest, rate), tick)


def in_ticks(nbytes: float, tick: float = _TICK_BYTES) -> float:
    """Returns the nearest time in whole ticks; both are in bytes that are moved meanwhile."""
    return tick * math.floor(nbytes / tick + 0.5) if tick else nbytes
