"""What is written because a kernel would become too large, and XLA stops merging.

XLA merges first what saves most (`priority_fusion`), so what is left over is what saves little: of the levels of an
associative scan the small ones, not the padded arrays that are as large as the whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["KernelSizes", "Merging", "splits_code", "too_large"]

# XLA's own numbers and operators (`gpu_hlo_cost_analysis.h`, `ElementalIrEmitter::OpInvalidatesCache`).
MOST_SPLITS, MOST_INSTRUCTIONS = 10, 10_000
_SPLITS = frozenset({"concatenate", "pad", "dynamic_update_slice"})


def splits_code(name: str, kind: str) -> bool:
    """Whether XLA begins a branch or a loop for an operator, after which nothing made before is there."""
    return name in _SPLITS or kind == "REDUCTION"


class KernelSizes:
    """How large kernels become as operators are merged into them, from their last operator back.

    XLA emits an operator in a kernel once per place at which its readers want it: element-wise readers that want
    the same element share it, one that moves elements (a slice, a transposition) wants another. What `splits_code`
    doubles it. XLA's GPU compiler does not merge what would have more than 10 of these in one kernel, or more than
    10,000 instructions (`GpuHloCostAnalysis::ProducerConsumerMergedTooLarge`): two steps of a stencil are two
    kernels, since the first would be made for each of five neighbours.

    Operators are numbers; a kernel is known by its last.
    """

    def __init__(self) -> None:
        self._instructions: dict[int, int] = {}  # by kernel
        self._splits: dict[int, int] = {}
        # By operator and kernel: the readers at whose places it is emitted, and how often that is in all.
        self._emitted: dict[int, Mapping[int, tuple[frozenset[int], int]]] = {}

    def begin(self, kernel: int, splits: bool) -> None:
        """An operator becomes the last of a kernel; `splits`: see `splits_code`."""
        self._instructions[kernel], self._splits[kernel] = 1, int(splits)
        self._emitted[kernel] = {kernel: (frozenset((kernel,)), 1)}

    def merge(
        self,
        op: int,
        splits: bool,
        kernels: Collection[int],
        readers: Collection[int],
        moves: Callable[[int], bool],
    ) -> bool:
        """Merges an operator into all kernels that its readers are in, unless one becomes too large.

        Args:
            op: the operator.
            splits: see `splits_code`.
            kernels: the last operator of each.
            readers: of its results, all merged before.
            moves: whether a reader reads other elements than it makes.

        Returns:
            Whether it was merged.
        """
        emitted = self._emission(kernels, readers, moves)
        sizes: list[tuple[int, int, int]] = []
        for kernel, (_, times) in emitted.items():
            all_splits = self._splits[kernel] + times * splits
            instructions = self._instructions[kernel] + times
            if all_splits > MOST_SPLITS or instructions << all_splits > MOST_INSTRUCTIONS:
                return False
            sizes.append((kernel, all_splits, instructions))
        for kernel, all_splits, instructions in sizes:
            self._splits[kernel], self._instructions[kernel] = all_splits, instructions
        self._emitted[op] = emitted
        return True

    def _emission(
        self, kernels: Collection[int], readers: Collection[int], moves: Callable[[int], bool]
    ) -> Mapping[int, tuple[frozenset[int], int]]:
        if len(readers) == 1:
            (reader,) = readers
            own = self._emitted[reader]
            if not moves(reader):
                return own  # at the same places
            at = frozenset((reader,))
            return {kernel: (at, times) for kernel, (_, times) in own.items()}
        found: dict[int, tuple[frozenset[int], int]] = {}
        for kernel in kernels:
            places: frozenset[int] = frozenset()
            for reader in readers:
                own = self._emitted[reader].get(kernel)
                if own is not None:
                    places |= frozenset((reader,)) if moves(reader) else own[0]
            times = sum([self._emitted[place][kernel][1] for place in places])
            found[kernel] = places, times
        return found


@dataclass(frozen=True)
class Merging:
    """What XLA has to merge: operators by number, in an order in which they may run, and values by number.

    Attributes:
        outs: by operator, the values it makes.
        ins: by operator, the values it reads.
        readers: by value, the operators in whose kernels it may be made; all of those that run.
        nbytes: by value, its size.
        splits: by operator, see `splits_code`.
        part: the share of a value's elements that a reader takes.
        moves: whether an operator reads other elements than it makes.
    """

    outs: Sequence[Sequence[int]]
    ins: Sequence[Sequence[int]]
    readers: Sequence[Sequence[int]]
    nbytes: Sequence[int]
    splits: Sequence[bool]
    part: Callable[[int, int], float]
    moves: Callable[[int], bool]


def too_large(merging: Merging, live: Sequence[bool], written: Sequence[bool]) -> list[int]:
    """Returns the operators whose results are written besides, so that every kernel is within XLA's limits.

    Args:
        merging: the program.
        live: by operator, whether it runs.
        written: by operator, whether its results are written in any case.

    Complexity: for every operator that is merged, linear in the kernels that it is merged into.
    """
    return _Merger(merging, live, written).left()


class _Merger:
    """Operators that are merged into the kernels that read them, what saves most first."""

    def __init__(self, merging: Merging, live: Sequence[bool], written: Sequence[bool]) -> None:
        self.program = merging
        self.readers = [
            list(dict.fromkeys(user for out in outs for user in merging.readers[out]))
            for outs in merging.outs
        ]
        self.maker = {out: number for number, outs in enumerate(merging.outs) for out in outs}
        running = [number for number, runs in enumerate(live) if runs]
        self.todo = {number for number in running if not written[number]}
        self.members = {number: frozenset((number,)) for number in running}  # by kernel, its last
        self.within = {number: {number} for number in running}  # the kernels that an operator is in

    def left(self) -> list[int]:
        """Returns the operators that are not merged."""
        queue = [(-self._saved(number), -number) for number in self.todo]
        heapq.heapify(queue)
        found: list[int] = []
        while queue:
            negative, place = heapq.heappop(queue)
            number = -place
            if number not in self.todo or -negative != self._saved(number):
                continue
            self.todo.discard(number)
            kernels = set[int]().union(*(self.within[reader] for reader in self.readers[number]))
            merged = {kernel: self.members[kernel] | self.members[number] for kernel in kernels}
            if not all(map(self._fits, merged.values())):
                found.append(number)
                continue
            for member in self.members.pop(number):
                self.within[member].discard(number)
                self.within[member] |= kernels
            self.members |= merged
            for kernel in kernels & self.todo:
                heapq.heappush(queue, (-self._saved(kernel), -kernel))
        return found

    def _saved(self, number: int) -> float:
        """Bytes that are not moved if a kernel is merged into those that read it; each reads what it reads."""
        nbytes, times = 0.0, 0.0
        for out in self.program.outs[number]:
            parts = sum(self.program.part(out, user) for user in self.program.readers[out])
            nbytes += self.program.nbytes[out] * (1 + parts)
            times = max(times, parts)
        return nbytes - (times - 1) * self._reads(self.members[number])

    def _reads(self, kernel: frozenset[int]) -> float:
        """Bytes that a kernel reads."""
        found: dict[int, float] = {}
        for number in kernel:
            for index in self.program.ins[number]:
                if self.maker.get(index) not in kernel:
                    part = self.program.part(index, number) * self.program.nbytes[index]
                    found[index] = max(found.get(index, 0.0), part)
        return sum(found.values())

    def _fits(self, kernel: frozenset[int]) -> bool:
        order, splits = sorted(kernel, reverse=True), self.program.splits
        sizes = KernelSizes()
        sizes.begin(order[0], splits[order[0]])
        return all(
            sizes.merge(
                number,
                splits[number],
                order[:1],
                [reader for reader in self.readers[number] if reader in kernel],
                self.program.moves,
            )
            for number in order[1:]
        )
