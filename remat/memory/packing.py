"""How much memory buffers take that lie side by side: what is alive at most, and the gaps between.

It follows XLA's `GlobalDecreasingSizeBestFitHeap`, which places the largest buffers first, or those that are there
for longest, each into the smallest gap that is free for as long; XLA takes the better of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Block", "packed_bytes"]


@dataclass(frozen=True)
class Block:
    """Memory that is taken from position `start` to position `end`, both included, in one place all the time.

    Attributes:
        first_end: the end of the first buffer in it; the others were written over that one.
    """

    nbytes: int
    start: int
    end: int
    first_end: int


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
