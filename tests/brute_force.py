"""Small problems solved by looking at everything: the referees of what planners claim."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from remat.policies.solvers.problem import Problem

__all__ = ["least_extra_cost", "least_peak"]

State = tuple[int, frozenset[int]]  # first run to come, live values


def _moves(problem: Problem, state: State) -> Iterator[tuple[int, int, State]]:
    """Nodes that can run in a state, the bytes alive while they do, and what is alive after it."""
    coming, alive = state
    sizes, work = problem.sizes.tolist(), problem.extra_while_running.tolist()
    again = range(coming) if coming >= problem.turn else ()
    for node in (*again, coming):
        if node == len(problem) or (node < coming and not problem.repeatable[node]):
            continue
        if node in alive or not alive.issuperset(problem.inputs[node]):
            continue
        live = alive | {node}
        nbytes = sum(sizes[v] for v in live) + work[node]
        yield node, nbytes, (coming + (node == coming), live)


def _forgetting(state: State) -> Iterator[State]:
    coming, alive = state
    for value in alive:
        yield coming, alive - {value}


def least_extra_cost(problem: Problem, budget_bytes: int) -> float:
    """Returns the least cost of repetitions of any sequence within a budget, infinity if there is none.

    Dijkstra over what is to come and what is alive: every order of repetitions, any number of them.
    """
    origin: State = (0, frozenset())
    best: dict[State, float] = {origin: 0.0}
    heap: list[tuple[float, int, State]] = [(0.0, 0, origin)]
    pushed = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state[0] == len(problem):
            return cost
        if cost > best[state]:
            continue
        found = [(cost, after) for after in _forgetting(state)]
        for node, nbytes, after in _moves(problem, state):
            if nbytes <= budget_bytes:
                extra = float(problem.costs[node]) if node < state[0] else 0.0
                found.append((cost + extra, after))
        for price, after in found:
            if price < best.get(after, math.inf):
                best[after] = price
                pushed += 1
                heapq.heappush(heap, (price, pushed, after))
    return math.inf


def least_peak(problem: Problem) -> int:
    """Returns the smallest peak of any sequence."""
    origin: State = (0, frozenset())
    best: dict[State, int] = {origin: 0}
    heap: list[tuple[int, int, State]] = [(0, 0, origin)]
    pushed = 0
    while heap:
        peak, _, state = heapq.heappop(heap)
        if state[0] == len(problem):
            return peak
        if peak > best[state]:
            continue
        found = [(peak, after) for after in _forgetting(state)]
        found += [(max(peak, nbytes), after) for _, nbytes, after in _moves(problem, state)]
        for price, after in found:
            if price < best.get(after, 1 << 62):
                best[after] = price
                pushed += 1
                heapq.heappush(heap, (price, pushed, after))
    raise AssertionError("no sequence: a node was never computed")
