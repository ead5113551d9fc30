"""Which storage to evict: a search that looks at few, and the scan that looks at all.

Both find the same storage: the least score, of equals the last in the pool; a score of 0 at once, of several the
first. A pool's order is that in which its storages became evictable.

`Scan` scores every storage: O(pool) for an eviction. `Index` keeps, of every storage, a lower bound on its score's
numerator over its size that only a notice makes smaller, and the time of its last access; the score at time `t` is
at least `bound / (t - accessed)`, now and later. Blocks of storages that are neighbours in the pool have the
least bound and the earliest access, blocks of blocks likewise. The search goes best first: it opens a block only if
its bound is not above the best score found. Neighbours in the pool were accessed at about the same time, so that a
block's bound is close to its best storage's score. Adding, removing and a notice take O(log pool); a search
O(opened * log pool), where `opened` are the storages whose bound is not above the least score, and those beside
them. In the worst case, all with equal scores that fall with time, that is the whole pool.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Protocol

__all__ = ["Index", "Pool", "Scan"]

_INFINITY = float("inf")
_BLOCK = (
    16  # storages of a block, and blocks of a block of blocks; any number gives the same results
)


class Scored(Protocol):
    """What a pool asks of a heuristic."""

    @property
    def has_staleness(self) -> bool:
        """Whether scores fall with time."""
        ...

    @property
    def is_bounded(self) -> bool:
        """Whether bounds hold; once they do not, all has to be looked at."""
        ...

    def cheapest(self, pool: Iterable[int], clock: int) -> int | None:
        """The storage to evict, found by looking at all."""
        ...

    def evaluate(self, storage: int, clock: int) -> tuple[float, float]:
        """The score, and a lower bound on the score times the staleness that is valid until a notice."""
        ...

    def bound(self, storage: int) -> float:
        """A lower bound on the score times the staleness that is valid for ever, and known at once."""
        ...

    def last_access(self, storage: int) -> int:
        """When something asked for it."""
        ...


class Pool(Protocol):
    """The storages that may be evicted."""

    def __contains__(self, storage: int) -> bool: ...

    def add(self, storage: int) -> None:
        """A storage may be evicted now; of no effect if it might already."""
        ...

    def discard(self, storage: int) -> None:
        """A storage may not be evicted any more, if it might."""
        ...

    def lower(self, storage: int) -> None:
        """A notice: the score of a storage may be less than what its bound said, if it is here."""
        ...

    def cheapest(self, clock: int) -> int | None:
        """Returns the storage to evict, None if there is none."""
        ...


class Scan:
    """A pool that scores all of its storages."""

    def __init__(self, heuristic: Scored) -> None:
        self._heuristic = heuristic
        self._storages: dict[int, None] = {}

    def __contains__(self, storage: int) -> bool:
        return storage in self._storages

    def add(self, storage: int) -> None:
        self._storages.setdefault(storage)

    def discard(self, storage: int) -> None:
        self._storages.pop(storage, None)

    def lower(self, storage: int) -> None:
        pass

    def cheapest(self, clock: int) -> int | None:
        return self._heuristic.cheapest(self._storages, clock)


class Index:
    """A pool that is searched best first; see the module docstring."""

    def __init__(self, heuristic: Scored) -> None:
        self._heuristic = heuristic
        self._has_staleness = heuristic.has_staleness
        self._place: dict[int, int] = {}
        self._storages: list[int] = []  # by place, -1 where one was removed
        # By level and place: least bound and earliest access; level 0 has the storages, the last at most a block.
        self._bounds: list[list[float]] = [[]]
        self._accessed: list[list[float]] = [[]]

    def __contains__(self, storage: int) -> bool:
        return storage in self._place

    def add(self, storage: int) -> None:
        if storage in self._place:
            return
        if len(self._storages) > 2 * len(self._place) + _BLOCK:
            self._compact()
        self._append(storage, self._heuristic.bound(storage))

    def discard(self, storage: int) -> None:
        place = self._place.pop(storage, None)
        if place is not None:
            self._storages[place] = -1
            # What is above stays a lower bound.
            self._bounds[0][place] = self._accessed[0][place] = _INFINITY

    def lower(self, storage: int) -> None:
        place = self._place.get(storage)
        if place is not None:
            self._set(place, self._heuristic.bound(storage))

    def cheapest(self, clock: int) -> int | None:
        if not self._place:
            return None
        if not self._heuristic.is_bounded:
            return self._heuristic.cheapest((s for s in self._storages if s >= 0), clock)
        if min(self._bounds[-1]) == 0:
            free = next(self._free(clock), None)
            if free is not None:
                return free
        found = self._least(clock)
        if found is None:  # all scores are infinite
            found = next(s for s in reversed(self._storages) if s >= 0)
        return found

    def _append(self, storage: int, bound: float) -> None:
        place = len(self._storages)
        self._storages.append(storage)
        self._place[storage] = place
        accessed = self._heuristic.last_access(storage)
        for bounds, times in zip(self._bounds, self._accessed, strict=True):
            if place == len(bounds):
                bounds.append(bound)
                times.append(accessed)
            else:
                bounds[place] = min(bounds[place], bound)
                times[place] = min(times[place], accessed)
            place //= _BLOCK
        if len(self._bounds[-1]) > _BLOCK:
            starts = range(0, len(self._bounds[-1]), _BLOCK)
            self._bounds.append([min(self._bounds[-1][i : i + _BLOCK]) for i in starts])
            self._accessed.append([min(self._accessed[-1][i : i + _BLOCK]) for i in starts])

    def _set(self, place: int, bound: float) -> None:
        """Sets a storage's bound, and those above it that are higher."""
        self._bounds[0][place] = bound
        for bounds in self._bounds[1:]:
            place //= _BLOCK
            if bounds[place] <= bound:
                break
            bounds[place] = bound

    def _compact(self) -> None:
        kept = [(s, self._bounds[0][i]) for i, s in enumerate(self._storages) if s >= 0]
        self._place, self._storages = {}, []
        self._bounds, self._accessed = [[]], [[]]
        for storage, bound in kept:
            self._append(storage, bound)

    def _score(self, storage: int, place: int, clock: int) -> float:
        score, self._bounds[0][place] = self._heuristic.evaluate(storage, clock)
        self._accessed[0][place] = self._heuristic.last_access(storage)
        return score

    def _free(self, clock: int) -> Iterator[int]:
        """Yields the storages whose score is 0, in the pool's order."""
        level = len(self._bounds) - 1
        stack = [(level, place) for place in reversed(range(len(self._bounds[level])))]
        while stack:
            level, place = stack.pop()
            if self._bounds[level][place] != 0:
                continue
            if level:
                stack += [(level - 1, child) for child in reversed(self._opened(level, place))]
            elif self._score(self._storages[place], place, clock) == 0:
                yield self._storages[place]

    def _least(self, clock: int) -> int | None:
        """Returns the storage of the least score, of equals the last; None if all are infinite."""
        best, least, last = None, _INFINITY, -1
        top = len(self._bounds) - 1
        heap: list[
            tuple[float, int, int, int]
        ] = []  # bound, last place negative, level, place in it
        self._push(heap, top, range(len(self._bounds[top])), clock, least)
        while heap:
            bound, end, level, place = heapq.heappop(heap)
            if bound > least or (bound == least and -end <= last):
                break  # of equals the last is wanted, and what has this bound is popped last first
            if level:
                self._push(heap, level - 1, self._opened(level, place), clock, least)
                continue
            storage = self._storages[place]
            score = self._score(storage, place, clock)
            if score < least or (score == least < _INFINITY and place > last):
                best, least, last = storage, score, place
        return best

    def _opened(self, level: int, place: int) -> range:
        """The children of a block, which takes over what they have become."""
        start = place * _BLOCK
        bounds, times = self._bounds[level - 1], self._accessed[level - 1]
        end = min(start + _BLOCK, len(bounds))
        self._bounds[level][place] = min(bounds[start:end])
        self._accessed[level][place] = min(times[start:end])
        return range(start, end)

    def _push(
        self,
        heap: list[tuple[float, int, int, int]],
        level: int,
        places: range,
        clock: int,
        least: float,
    ) -> None:
        bounds, times, width = self._bounds[level], self._accessed[level], _BLOCK**level
        for place in places:
            bound = bounds[place]
            if self._has_staleness:
                stale = clock - times[place]
                bound = bound / stale if stale > 0 else _INFINITY
            if bound < _INFINITY and bound <= least:
                heapq.heappush(heap, (bound, 1 - (place + 1) * width, level, place))
