"""How much memory buffers take that lie side by side: what is alive at most, and the gaps between.

It follows XLA's `HeapSimulator` and `GlobalDecreasingSizeBestFitHeap`, which places the largest buffers first, or
those that are there for longest, each into the smallest gap that is free for as long, and takes the better of
the two. Time is counted in buffers that are made and given up.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["Block", "Lifetime", "blocks_of", "packed_bytes"]


class Lifetime(Protocol):
    """A buffer that is there from position `start` to position `end` of an order of kernels, both included."""

    @property
    def nbytes(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True)
class Block:
    """Memory that is taken from time `start` to time `end`, both included, in one place.

    Attributes:
        first_end: the end of the first buffer in it; the others were written over that one.
    """

    nbytes: int
    start: int
    end: int
    first_end: int


def blocks_of(
    lifetimes: Sequence[Lifetime], lies_in: Callable[[int, Sequence[int]], int | None]
) -> list[Block]:
    """Returns what buffers take, with the times at which XLA makes them and gives them up.

    Args:
        lifetimes: of the buffers.
        lies_in: given a buffer, and others of its size that its kernel gives up, the one that it is written over.
    """
    turn = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].start, lifetimes[i].end))
    made, given_up = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for index in turn:
        made[lifetimes[index].start].append(index)
        given_up[lifetimes[index].end].append(index)
    clock = itertools.count()
    began, ended = [0] * len(turn), [0] * len(turn)
    chains: list[list[int]] = []
    chain_of: dict[int, list[int]] = {}
    for position in sorted(made.keys() | given_up.keys()):
        left = given_up[position]
        for index in made[position]:
            same = [
                i for i in left if i in chain_of and lifetimes[i].nbytes == lifetimes[index].nbytes
            ]
            under = lies_in(index, same) if same else None
            if under is None:
                chains.append([])
                chain_of[index] = chains[-1]
            else:
                left.remove(under)
                ended[under] = next(clock)
                chain_of[index] = chain_of[under]
            chain_of[index].append(index)
            began[index] = next(clock)
        for index in left:
            ended[index] = next(clock)
    return [
        Block(lifetimes[chain[0]].nbytes, began[chain[0]], ended[chain[-1]], ended[chain[0]])
        for chain in chains
    ]


def packed_bytes(blocks: Sequence[Block], alive_bytes: int) -> int:
    """Returns how much memory the blocks take.

    Args:
        blocks: in the order in which they are made.
        alive_bytes: what is alive at most; if the blocks take no more, it is not tried again.

    Complexity: for every block, linear in the blocks, and of those that are there at the same time a sort.
    """
    by_size = _packed(blocks, lambda block: (-block.nbytes, block.start - block.first_end))
    if by_size <= alive_bytes:
        return by_size
    return min(by_size, _packed(blocks, lambda block: (block.start - block.end, -block.nbytes)))


def _packed(blocks: Sequence[Block], key: Callable[[Block], tuple[int, int]]) -> int:
    count = len(blocks)
    starts, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    lows, highs = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for placed, block in enumerate(sorted(blocks, key=key)):
        there = (starts[:placed] <= block.end) & (ends[:placed] >= block.start)
        low = _best_fit(lows[:placed][there], highs[:placed][there], block.nbytes)
        starts[placed], ends[placed] = block.start, block.end
        lows[placed], highs[placed] = low, low + block.nbytes
    return int(highs.max(initial=0))


def _best_fit(lows: np.ndarray, highs: np.ndarray, nbytes: int) -> int:
    """Where the smallest gap begins that is large enough; behind everything if none is."""
    if not len(lows):
        return 0
    order = np.argsort(lows, kind="stable")
    reached = np.maximum.accumulate(highs[order])
    before = np.concatenate(([0], reached[:-1]))
    gaps = lows[order] - before
    fits = gaps >= nbytes
    if not fits.any():
        return int(reached[-1])
    return int(before[np.argmin(np.where(fits, gaps, np.iinfo(np.int64).max))])
