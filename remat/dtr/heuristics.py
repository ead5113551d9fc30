"""What to evict: the heuristics of DTR, and the metadata that they read.

Kirisame et al., "Dynamic tensor rematerialization" (2020), sections 4.2 and 4.3. A score is `cost / (size *
staleness)`; the storage with the least is evicted, of equals the last in the pool. `cost` is a storage's own and
that of the evicted storages around it, which a variant counts exactly (`full`: those that are needed to make it,
and those that need it; `ancestors`: the former alone, as MSPS of Capuchin), by components of the undirected graph
(`eqclass`: union-find, with the splitting approximation), or not at all (`local`). Any of the three factors may be
left out (the ablations of Figures 11 to 14).

One eviction looks at every storage that may be evicted: O(pool) scores, each O(1) for `local` and the ablations
without cost, O(neighbours) for `eqclass`, O(neighbourhood) for `full`, which remembers it until something near it
changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from remat.core.errors import PolicyError, nearest

__all__ = ["HEURISTICS", "Heuristic", "Scoring", "heuristic_named"]

Cost: TypeAlias = Literal["full", "ancestors", "eqclass", "local", "none"]


@dataclass(frozen=True)
class Scoring:
    """Which factors a score has.

    Attributes:
        cost: how the cost of making a storage again is counted; `none` counts 1.
        size: whether large storages are evicted first.
        staleness: whether storages are that nothing read for long.
        is_random: the score is a random number instead.
    """

    cost: Cost = "eqclass"
    size: bool = True
    staleness: bool = True
    is_random: bool = False


HEURISTICS: dict[str, Scoring] = {
    "dtr_full": Scoring("full"),
    "dtr_eqclass": Scoring("eqclass"),
    "dtr_local": Scoring("local"),
    "lru": Scoring("none", size=False),
    "largest": Scoring("none", staleness=False),
    "msps": Scoring("ancestors", staleness=False),
    "random": Scoring("none", size=False, staleness=False, is_random=True),
}


def heuristic_named(name: str | Scoring, seed: int) -> Heuristic:
    """Returns a new heuristic, by its name or by its factors.

    Raises:
        PolicyError: no such heuristic.
    """
    if isinstance(name, Scoring):
        return Heuristic(name, seed)
    if name not in HEURISTICS:
        raise PolicyError(
            f"unknown heuristic {name!r}; valid names are {sorted(HEURISTICS)}{nearest(name, HEURISTICS)}"
        )
    return Heuristic(HEURISTICS[name], seed)


class Heuristic:
    """Metadata of storages, and scores by them.

    Attributes:
        accesses: storages looked at, to score them or to keep metadata (Figure 6).
        dependencies, dependents: of every storage those it is made from, and those made from it.
    """

    def __init__(self, scoring: Scoring, seed: int) -> None:
        self.scoring = scoring
        self.accesses = 0
        self._random = random.Random(seed)

    def begin(self, count: int) -> None:
        """Starts over, for storages numbered below `count`."""
        self.dependencies: list[set[int]] = [set() for _ in range(count)]
        self.dependents: list[set[int]] = [set() for _ in range(count)]
        self._size = [0] * count
        self._cost = [0] * count
        self._accessed = [0] * count
        self._is_evicted = [False] * count
        self._above: dict[int, frozenset[int]] = {}  # evicted storages needed to make a storage
        self._below: dict[int, frozenset[int]] = {}  # evicted storages that need it
        self._component: dict[int, _Component] = {}

    # --- what happens

    def made(self, storage: int, nbytes: int, cost: int, dependencies: Iterable[int]) -> None:
        """A tensor of a storage has an operator: its own, with bytes, or one that makes a view."""
        self._size[storage] += nbytes
        self._cost[storage] += cost
        for other in dependencies:
            self.dependencies[storage].add(other)
            self.dependents[other].add(storage)
            self._above.clear()
            self._below.clear()

    def accessed(self, storage: int, clock: int) -> None:
        """An operator that is asked for reads a storage, or has made it."""
        self._accessed[storage] = clock

    def evicted(self, storage: int) -> None:
        """A storage is gone, and may come back."""
        self._is_evicted[storage] = True
        self._changed(storage)
        if self.scoring.cost == "eqclass":
            component = _Component(self._cost[storage])
            self._component[storage] = component
            for other in self._evicted_around(storage):
                component.union(self._component[other])

    def materialized(self, storage: int) -> None:
        """A storage is there, for the first time or again."""
        if not self._is_evicted[storage]:
            return
        self._is_evicted[storage] = False
        self._changed(storage)
        if self.scoring.cost == "eqclass":
            self._component.pop(storage).find().cost -= self._cost[storage]

    def removed(self, storage: int) -> None:
        """A storage is gone for good."""
        self.materialized(storage)
        for other in self.dependencies[storage]:
            self.dependents[other].discard(storage)
        for other in self.dependents[storage]:
            self.dependencies[other].discard(storage)
        self.dependencies[storage], self.dependents[storage] = set(), set()

    # --- what it comes to

    def cheapest(self, pool: Iterable[int], clock: int) -> int | None:
        """Returns the storage to evict: of the least score the last; a score of 0 is taken at once."""
        best, least = None, float("inf")
        for storage in pool:
            self.accesses += 1
            score = self.score(storage, clock)
            if score <= least:
                best, least = storage, score
                if score == 0:
                    break
        return best

    def score(self, storage: int, clock: int) -> float:
        """Returns what evicting a storage costs."""
        scoring = self.scoring
        if scoring.is_random:
            return self._random.random()
        below = 1.0
        if scoring.size:
            below *= self._size[storage]
        if scoring.staleness:
            below *= clock - self._accessed[storage]
        above = self._whole_cost(storage)
        if below == 0:
            return float("inf")
        return above / below

    def _whole_cost(self, storage: int) -> int:
        kind = self.scoring.cost
        if kind == "none":
            return 1
        own = self._cost[storage]
        if kind == "local":
            return own
        if kind == "eqclass":
            near = {
                id(c): c for c in (self._component[o].find() for o in self._evicted_around(storage))
            }
            return own + sum(component.cost for component in near.values())
        found = self._closure(storage, self._above, self.dependencies)
        if kind == "full":
            found |= self._closure(storage, self._below, self.dependents)
        return own + sum(self._cost[other] for other in found)

    def _evicted_around(self, storage: int) -> list[int]:
        around = [*self.dependencies[storage], *self.dependents[storage]]
        self.accesses += len(around)
        return [other for other in around if self._is_evicted[other]]

    def _closure(
        self, storage: int, known: dict[int, frozenset[int]], edges: list[set[int]]
    ) -> frozenset[int]:
        """Evicted storages reached over evicted ones."""
        if storage in known:
            return known[storage]
        found: set[int] = set()
        todo = [storage]
        while todo:
            for other in edges[todo.pop()]:
                self.accesses += 1
                if self._is_evicted[other] and other not in found:
                    found.add(other)
                    todo.append(other)
        known[storage] = frozenset(found)
        return known[storage]

    def _changed(self, storage: int) -> None:
        """Forgets the neighbourhoods that a storage is in: of what reaches it over evicted storages."""
        if self.scoring.cost not in ("full", "ancestors"):
            return
        for known, edges in ((self._above, self.dependents), (self._below, self.dependencies)):
            seen = {storage}
            todo = [storage]
            while todo:
                current = todo.pop()
                known.pop(current, None)
                for other in edges[current]:
                    self.accesses += 1
                    if other not in seen:
                        seen.add(other)
                        known.pop(other, None)
                        if self._is_evicted[other]:
                            todo.append(other)


class _Component:
    """A set of union-find with the sum of its costs; path halving, union by number."""

    __slots__ = ("cost", "number", "parent")

    def __init__(self, cost: int) -> None:
        self.cost, self.number = cost, 1
        self.parent: _Component | None = None

    def find(self) -> _Component:
        """The set's representative."""
        found = self
        while found.parent is not None:
            if found.parent.parent is not None:
                found.parent = found.parent.parent
            found = found.parent
        return found

    def union(self, other: _Component) -> None:
        """Joins two sets."""
        one, two = self.find(), other.find()
        if one is two:
            return
        if one.number < two.number:
            one, two = two, one
        two.parent = one
        one.number += two.number
        one.cost += two.cost
