"""`cut_bound`: what every sequence must recompute, by minimum cuts; scales to tens of thousands of nodes.

**The bound.** Take a sequence whose peak is within the budget, and the moment at which node `p` runs for the first
time. Let `A` be the values whose copies are alive then and are read now or later, without `p`, and `T` the nodes
before `p` that run again later. Every value below `p` that a first run after `p` reads, or that a node of `T`
reads, was made before that moment (it is in `A`) or after it (it is in `T`). So `(A, T)` is *closed*: what
first runs after `p` read is in `A`, `T` or is `p`, and so are the inputs of `T`. By the referee's rules
`bytes(A) + size(p) + workspace(p) <= budget`, and the sequence's extra cost is at least `cost(T)`. Hence

    bound(p) = min { cost(T) : (A, T) closed, A contains the inputs of p, bytes(A) <= capacity }
    capacity = budget - size(p) - workspace(p)

is a lower bound, for every `p`. With the byte limit priced at `lambda >= 0` instead (Lagrange), the minimum only
falls, and `min cost(T) + lambda * bytes(A)` over closed pairs is a minimum cut: an operator is on the sink's
side if it runs again, a value if it is needed, an edge from operator to value of capacity `lambda * size` is
cut if the value is kept, an edge from the source to the operator of capacity `cost` if it runs again. So

    bound(p) >= max over lambda of mincut(lambda) - lambda * capacity.

The maximum of that concave function is searched with Kelley's cutting planes on one variable; every cut found is a
closed pair, so it is a candidate for a plan too. Capacities are integers, costs rounded down, so every `lambda`
gives a valid bound and the cut is exact (`remat.policies.solvers.flow`).

**Windows.** If only first runs in `(p, q]` count as needs, `T` may be limited to the repetitions before `q`. For
positions `p1 < p2 < ...` the windows `(p1, p2], (p2, p3], ...` speak of different repetitions, and their bounds add
up; the best choice of positions is a longest path. This matters when values are recomputed more than once.

Complexity: about ten maximum flows per window, each on at most two vertices per node before `p`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from remat.policies.solvers.flow import INFINITE, minimum_cut
from remat.policies.solvers.problem import Problem, replay

__all__ = ["CutBound", "SavedSet", "cut_bound", "once_each"]

# Any price gives a valid bound, whatever it is rounded to; fewer positions give a weaker one.
_COST_BITS = 52  # of all costs together in integer capacities; the flow allows 2^61 in total
_FLOW_LIMIT = 1 << 60
_MANY_NODES = 3000  # beyond, fewer positions and no choice of windows. Chosen by look
_POSITIONS, _POSITIONS_OF_MANY = 10, 2  # besides the peak; windows are their pairs. Chosen by look


@dataclass(frozen=True)
class SavedSet:
    """A closed pair: what to keep while a node runs for the first time, and what then runs again.

    Attributes:
        position: the node.
        saved: values alive then that are read then or later, without the node itself, ascending.
        live_bytes: of them, the node's result and its workspace.
        repeats: nodes that run again afterwards, each once, ascending.
        recompute_cost: of the repeats.
    """

    position: int
    saved: tuple[int, ...]
    live_bytes: int
    repeats: tuple[int, ...]
    recompute_cost: float


@dataclass(frozen=True, eq=False)
class CutBound:
    """A lower bound on the extra cost of every sequence within the budget.

    Attributes:
        bound: in units of cost; `inf` if no sequence has so small a peak.
        positions: where the windows that add up to the bound begin.
        smallest_bytes: proven lower bound on the peak of every sequence.
        found: closed pairs met on the way, of windows that reach to the end.
        solve_seconds: time taken.
    """

    bound: float
    positions: tuple[int, ...]
    smallest_bytes: int
    found: tuple[SavedSet, ...]
    solve_seconds: float


def cut_bound(
    problem: Problem,
    budget_bytes: int,
    *,
    positions: Sequence[int] | None = None,
    seconds: float | None = None,
    stop: Callable[[], bool] | None = None,
) -> CutBound:
    """Returns the bound, and saved sets that may become plans.

    Args:
        problem: what to schedule.
        budget_bytes: the limit on live bytes.
        positions: where windows may begin; by default some of the positions that exceed the budget without
            repetitions.
        seconds: stop early, with the bound so far.
        stop: asked before every cut; True ends the search with the bound so far.

    Raises:
        ValueError: a position is not a node.
    """
    began = time.perf_counter()
    deadline = None if seconds is None else began + seconds
    count = len(problem)
    for p in positions or ():
        if not 0 <= p < count:
            raise ValueError(f"positions={list(positions or ())}: {p} is not one of {count} nodes")
    chosen = sorted(set(_positions(problem, budget_bytes) if positions is None else positions))
    windows = _Windows(problem, budget_bytes, deadline, stop)
    # best[p]: of windows that begin at p or later and reach to the end.
    best: dict[int, tuple[float, tuple[int, ...]]] = {}
    # Whole tails first, the most promising of them first: they are bounds by themselves if time runs out.
    live = replay(problem, problem.first_runs).live_bytes
    for p in sorted(chosen, key=lambda p: (-int(live[p]), p)):
        best[p] = (windows.window(p, count - 1), (p,))
    if positions is not None or count <= _MANY_NODES:
        for index in range(len(chosen) - 2, -1, -1):
            p = chosen[index]
            for q in chosen[index + 1 :]:
                if best[q][0] > 0 or windows.infeasible:
                    value = best[q][0] + windows.window(p, q)
                    if value > best[p][0]:
                        best[p] = (value, (p, *best[q][1]))
    bound, where = max(best.values(), default=(0.0, ()), key=lambda found: found[0])
    smallest = max(windows.smallest_bytes, problem.floor_bytes)
    if smallest > budget_bytes:
        bound = float("inf")
    found = tuple(dict.fromkeys(windows.found))
    return CutBound(bound, where, smallest, found, time.perf_counter() - began)


def _positions(problem: Problem, budget_bytes: int) -> list[int]:
    """Some of the positions whose live bytes exceed the budget, spread over their range, with the peak."""
    live = replay(problem, problem.first_runs).live_bytes
    over = np.flatnonzero(live > budget_bytes)
    if len(over) == 0:
        return []
    most = int(over[np.argmax(live[over])])
    wanted = _POSITIONS if len(problem) <= _MANY_NODES else _POSITIONS_OF_MANY
    later = over[over >= min(problem.turn, most)]
    picks = np.linspace(0, len(later) - 1, min(wanted, len(later))).round().astype(int)
    return sorted({most, *(int(p) for p in later[picks])})


@dataclass
class _Windows:
    """The bounds of windows, and the closed pairs met on the way."""

    problem: Problem
    budget_bytes: int
    deadline: float | None
    stop: Callable[[], bool] | None = None
    smallest_bytes: int = 0
    infeasible: bool = False
    found: list[SavedSet] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether to stop."""
        late = self.deadline is not None and time.perf_counter() > self.deadline
        return late or (self.stop is not None and self.stop())

    def window(self, p: int, q: int) -> float:
        """Returns the bound of what first runs in `(p, q]` need while `p` runs."""
        if self.over:
            return 0.0
        network = _Network(self.problem, p, q)
        room = self.budget_bytes - network.fixed_bytes
        low = network.line(None)  # fewest bytes
        self._note(network, low, q)
        self.smallest_bytes = max(
            self.smallest_bytes, network.fixed_bytes + low.size_units * network.unit
        )
        if low.size_units * network.unit > room:
            self.infeasible = True
            return float("inf")
        high = network.line(0)  # fewest repetitions
        self._note(network, high, q)
        if high.size_units * network.unit <= room:
            return 0.0
        return self._maximise(network, low, high, room, q)

    def _maximise(self, network: _Network, low: _Line, high: _Line, room: int, q: int) -> float:
        """Kelley's method: the next price is where the lines of the two current cuts meet."""
        room_units = room // network.unit
        best = 0.0
        tried: set[int] = set()
        while not self.over:
            price = network.price((low.cost - high.cost) / max(high.size_units - low.size_units, 1))
            if price in tried:
                break
            tried.add(price)
            line = network.line(price)
            best = max(best, (line.cut - price * room_units) / network.cost_scale)
            self._note(network, line, q)
            known = {(low.cost, low.size_units), (high.cost, high.size_units)}
            if (line.cost, line.size_units) in known:
                break
            if line.size_units <= room_units:
                low = line
            else:
                high = line
        return best

    def _note(self, network: _Network, line: _Line, q: int) -> None:
        if q == len(self.problem) - 1:
            self.found.append(network.saved_set(line))


@dataclass(frozen=True, eq=False)
class _Line:
    """A cut: `cost + price * size_units` bounds the minimum cut from above at every price."""

    cut: int
    cost: float
    size_units: int
    saved: tuple[int, ...]
    repeats: tuple[int, ...]


class _Network:
    """The cut network of a window; see the module docstring."""

    def __init__(self, problem: Problem, p: int, q: int) -> None:
        self.problem, self.position = problem, p
        inputs, users = problem.inputs, problem.users
        repeatable = problem.repeatable
        demanded = {v for x in range(p + 1, q + 1) for v in inputs[x] if v < p}
        # Alive in any case: what p reads, and what is needed and cannot be made again.
        self.free = set(inputs[p])
        self.free.update(v for v in demanded if not repeatable[v])
        if q < len(problem) - 1:
            self.free.update(
                v for v in range(p) if not repeatable[v] and users[v] and users[v][-1] > q
            )
        self.fixed_bytes = int(
            sum(int(problem.sizes[v]) for v in self.free)
            + problem.sizes[p]
            + problem.extra_while_running[p]
        )
        demanded -= self.free
        reached = set(demanded)
        todo = list(demanded)
        while todo:
            v = todo.pop()
            if not repeatable[v]:
                continue
            for u in inputs[v]:
                if u not in self.free and u not in reached:
                    reached.add(u)
                    todo.append(u)
        self.values = sorted(reached)
        index = {v: i for i, v in enumerate(self.values)}
        sizes = problem.sizes[self.values] if self.values else np.zeros(0, np.int64)
        self.unit = int(np.gcd.reduce(sizes)) or 1 if len(sizes) else 1
        self.size_units = sizes // self.unit
        costs = problem.costs[self.values] if self.values else np.zeros(0)
        self.can_repeat = repeatable[self.values] if self.values else np.zeros(0, np.bool_)
        total = float(costs.sum())
        self.cost_scale = float(1 << _COST_BITS) / total if total > 0 else 1.0
        # Rounding down by a unit more than the product's rounding error keeps the bound below the truth.
        scaled = np.floor(costs * self.cost_scale * (1 - 2**-50))
        self.scaled_costs = np.maximum(scaled, 0).astype(np.int64)
        count = len(self.values)
        self.op = np.arange(count) + 2
        self.value = np.arange(count) + 2 + count
        heads: list[int] = []
        tails: list[int] = []
        for v in self.values:
            if repeatable[v]:
                for u in inputs[v]:
                    if u in index:
                        tails.append(int(self.value[index[u]]))
                        heads.append(int(self.op[index[v]]))
        for v in demanded:
            tails.append(int(self.value[index[v]]))
            heads.append(1)
        self.infinite = len(tails)
        # A node that may not run again has its operator at the source: an infinite edge.
        self.tails = [*tails, *([0] * count), *self.op.tolist()]
        self.heads = [*heads, *self.op.tolist(), *self.value.tolist()]

    def price(self, cost_per_unit: float) -> int:
        """Returns the integer capacity of one unit of size nearest to a price, within the flow's range."""
        total = max(int(self.size_units.sum()), 1)
        return max(min(round(cost_per_unit * self.cost_scale), _FLOW_LIMIT // total), 0)

    def line(self, price: int | None) -> _Line:
        """Returns the cut at a price; None ignores costs: the fewest bytes."""
        if not self.values:
            return _Line(0, 0.0, 0, (), ())
        if price is None:
            operators, price = np.zeros(len(self.values), np.int64), 1
        else:
            operators = self.scaled_costs
        operators = np.where(self.can_repeat, operators, INFINITE)
        saves = self.size_units * price
        capacities = [*([INFINITE] * self.infinite), *operators.tolist(), *saves.tolist()]
        size = 2 + 2 * len(self.values)
        cut = minimum_cut(size, self.tails, self.heads, capacities, 0, 1)
        again = cut.sink_side[self.op]
        kept = cut.sink_side[self.value] & ~again
        nodes = np.asarray(self.values, np.int64)
        repeats = nodes[again]
        return _Line(
            cut=int(cut.flow),
            cost=float(self.problem.costs[repeats].sum()),
            size_units=int(self.size_units[kept].sum()),
            saved=tuple(nodes[kept].tolist()),
            repeats=tuple(repeats.tolist()),
        )

    def saved_set(self, line: _Line) -> SavedSet:
        return SavedSet(
            position=self.position,
            saved=tuple(sorted({*line.saved, *self.free})),
            live_bytes=self.fixed_bytes + line.size_units * self.unit,
            repeats=line.repeats,
            recompute_cost=line.cost,
        )


def once_each(problem: Problem, chosen: SavedSet) -> list[int]:
    """Returns the sequence in which each of the set's repeats runs once, when it is first needed.

    Its extra cost is the set's `recompute_cost` or less; its peak is for `replay` to say. Repeats that come
    before the turn are put off to the turn.
    """
    waiting = set(chosen.repeats)
    order: list[int] = []
    start = max(chosen.position + 1, problem.turn)
    for node in range(len(problem)):
        if node >= start:
            stack = [node]
            found: set[int] = set()
            while stack:
                for read in problem.inputs[stack.pop()]:
                    if read in waiting:
                        waiting.discard(read)
                        found.add(read)
                        stack.append(read)
            order += sorted(found)
        order.append(node)
    return order
