"""What to evict: the heuristics of DTR, and the metadata that they read.

Kirisame et al., "Dynamic tensor rematerialization" (2020), sections 4.2 and 4.3. A score is `cost / (size *
staleness)`; the storage with the least is evicted, of equals the last in the pool. `cost` is a storage's own and
that of the evicted storages around it, which a variant counts exactly (`full`: those that are needed to make it,
and those that need it; `ancestors`: the former alone, as MSPS of Capuchin), by components of the undirected graph
(`eqclass`: union-find, with the splitting approximation), or not at all (`local`). Any of the three factors may be
left out (the ablations of Figures 11 to 14).

A score takes O(1) for `local` and the ablations without cost, O(neighbours) for `eqclass`, O(neighbourhood) for
`full`, which remembers it until something near it changes. How many are computed is up to `remat.dtr.pool`, which
asks for lower bounds, too: what is evicted later only adds to a cost, so that a cost once computed holds from below
until something near is made again. Of that `full` gives notice to each storage that it walks to anyway. A component
of `eqclass` knows who counted on it, and for how much; it promises a sixteenth less than it has, and gives notice
when it has less than it promised; and what is made again, to its neighbours, which it joined to the component.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from remat.core.errors import PolicyError, nearest

__all__ = ["HEURISTICS", "Heuristic", "Scoring", "heuristic_named"]

_BELOW = (
    1 - 2.0**-40
)  # keeps a bound below the score that it bounds, whichever way both are rounded

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
        notify: called with a storage whose score may have become less than a bound said.
        is_bounded: whether bounds hold. The cost of a component falls below 0, and they do not, where a view was
            made of a storage while that was evicted: its cost is more then than what the component got.
    """

    def __init__(self, scoring: Scoring, seed: int) -> None:
        self.scoring = scoring
        self.accesses = 0
        self._random = random.Random(seed)
        self.notify: Callable[[int], None] = lambda storage: None
        self.is_bounded = True

    def begin(self, count: int) -> None:
        """Starts over, for storages numbered below `count`."""
        self.dependencies: list[set[int]] = [set() for _ in range(count)]
        self.dependents: list[set[int]] = [set() for _ in range(count)]
        self._size = [0] * count
        self._cost = [0] * count
        self._accessed = [0] * count
        self._is_made = [False] * count
        self._is_evicted = [False] * count
        self._above: dict[int, frozenset[int]] = {}  # evicted storages needed to make a storage
        self._below: dict[int, frozenset[int]] = {}  # evicted storages that need it
        self._component: dict[int, _Component] = {}

    # --- what happens

    def made(self, storage: int, nbytes: int, cost: int, dependencies: Iterable[int]) -> None:
        """A tensor of a storage has an operator: its own, with bytes, or one that makes a view."""
        self._size[storage] += nbytes
        self._cost[storage] += cost
        new = set(dependencies) - self.dependencies[storage]
        is_first, self._is_made[storage] = not self._is_made[storage], True
        for other in new:
            self.dependencies[storage].add(other)
            self.dependents[other].add(storage)
        if new and not is_first:  # nothing has seen a new storage
            self._changed(storage)

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
        for other in self._changed(storage):
            self.notify(other)
        if self.scoring.cost == "eqclass":
            component = self._component.pop(storage).find()
            component.cost -= self._cost[storage]
            self.is_bounded &= component.cost >= 0
            # Its neighbours may not be beside the component any more, whatever that costs.
            for other in (
                *component.disappointed(),
                *self.dependencies[storage],
                *self.dependents[storage],
            ):
                self.notify(other)

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
            score = self.score(storage, clock)
            if score <= least:
                best, least = storage, score
            if score == 0:
                break
        return best

    @property
    def has_staleness(self) -> bool:
        """Whether scores fall with time."""
        return self.scoring.staleness and not self.scoring.is_random

    def last_access(self, storage: int) -> int:
        """When an operator asked for a storage."""
        return self._accessed[storage]

    def score(self, storage: int, clock: int) -> float:
        """Returns what evicting a storage costs."""
        self.accesses += 1
        if self.scoring.is_random:
            return self._random.random()
        return self._score(storage, self._whole_cost(storage), clock)

    def evaluate(self, storage: int, clock: int) -> tuple[float, float]:
        """Returns the score, and a lower bound on the score times the staleness, which holds until a notice."""
        self.accesses += 1
        if self.scoring.cost == "eqclass":
            near = self._components_around(storage)
            own = self._cost[storage]
            cost = own + sum(component.cost for component in near)
            least = own + sum(component.promise(storage) for component in near)
        else:
            cost = least = self._whole_cost(storage)
        return self._score(storage, cost, clock), self._bound(storage, least)

    def bound(self, storage: int) -> float:
        """Returns a lower bound on the score times the staleness, which holds for ever."""
        return self._bound(storage, 1 if self.scoring.cost == "none" else self._cost[storage])

    def _bound(self, storage: int, cost: int) -> float:
        size = 1.0 * self._size[storage] if self.scoring.size else 1.0
        if not size:
            return float("inf")
        return cost / size * _BELOW if self.has_staleness else cost / size

    def _score(self, storage: int, cost: int, clock: int) -> float:
        below = 1.0
        if self.scoring.size:
            below *= self._size[storage]
        if self.scoring.staleness:
            below *= clock - self._accessed[storage]
        return cost / below if below else float("inf")

    def _whole_cost(self, storage: int) -> int:
        kind = self.scoring.cost
        if kind == "none":
            return 1
        own = self._cost[storage]
        if kind == "local":
            return own
        if kind == "eqclass":
            return own + sum(component.cost for component in self._components_around(storage))
        found = self._closure(storage, self._above, self.dependencies)
        if kind == "full":
            found |= self._closure(storage, self._below, self.dependents)
        return own + sum(self._cost[other] for other in found)

    def _components_around(self, storage: int) -> set[_Component]:
        return {self._component[other].find() for other in self._evicted_around(storage)}

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

    def _changed(self, storage: int) -> set[int]:
        """Forgets and returns the neighbourhoods with a storage in them: of all that reach it over evicted ones."""
        found: set[int] = set()
        if self.scoring.cost not in ("full", "ancestors"):
            return found
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
            found |= seen
        return found


class _Component:
    """A set of union-find with the sum of its costs; path halving, union by number.

    `promised` is what those who count on it, `watchers`, take it to cost at least.
    """

    __slots__ = ("cost", "number", "parent", "promised", "watchers")

    def __init__(self, cost: int) -> None:
        self.cost, self.number, self.promised = cost, 1, 0
        self.watchers: set[int] = set()
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
        one.promised += two.promised
        if len(one.watchers) < len(two.watchers):
            one.watchers, two.watchers = two.watchers, one.watchers
        one.watchers |= two.watchers
        two.watchers = set()

    def promise(self, watcher: int) -> int:
        """Of a representative: what it costs at least until it gives notice to a watcher."""
        self.promised = max(self.promised, self.cost - (self.cost >> 4))
        if self.promised:
            self.watchers.add(watcher)
        return self.promised

    def disappointed(self) -> set[int]:
        """Of a representative: the watchers that were promised more than it costs; it forgets them."""
        if self.cost >= self.promised:
            return set()
        watchers, self.watchers, self.promised = self.watchers, set(), 0
        return watchers
