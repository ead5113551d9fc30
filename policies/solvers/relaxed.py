"""`relaxed`: a smaller problem of which no sequence costs more than the given problem's.

Lower bounds are proven faster on fewer nodes. Every step turns a problem into one that any sequence of the given
problem, some runs left out, also solves: within the same budget, at the same extra cost or less.

1. *Removal.* A node goes, and its readers no longer read it. Done to small results before the turn (masks,
   sums), and to small results of nodes that run once and read nothing that may be repeated.
2. *Cheap sources.* A repeatable node without inputs goes, and is workspace of its readers: it is alive while
   they run.
3. *Pairs.* Before the turn, let `b` read `a` alone and be the only one that reads `a`, both repeatable, `b`'s
   result not the larger. They become one node in `a`'s place with the result of `b`: whenever `a` or `b` is
   alive, that is. Every repetition of `a` that serves anything is followed by one of `b`, so both costs are
   counted. While `a` runs its own result is alive, and what it exceeds `b`'s by is workspace. A *moment*
   remains in `b`'s place, a node without a result that runs once, and at which `a` and `b` are both alive.

Node numbers change, their order does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.policies.solvers.problem import Problem

__all__ = ["Relaxed", "relaxed"]


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A smaller problem, and for each of its nodes the node of the given problem in whose place it is."""

    problem: Problem
    nodes: tuple[int, ...]


def relaxed(problem: Problem, *, small_bytes: int, cheap_cost: float) -> Relaxed:
    """Returns the smaller problem.

    Args:
        problem: what to relax.
        small_bytes: results of so many bytes or fewer do not count.
        cheap_cost: sources that cost so much or less are workspace.

    Complexity: O(rounds * (nodes + edges)); a round removes or joins at least one node.
    """
    shrinking = _Shrinking(problem, small_bytes, cheap_cost)
    while shrinking.remove() or shrinking.join():
        pass
    return shrinking.result()


class _Shrinking:
    def __init__(self, problem: Problem, small_bytes: int, cheap_cost: float) -> None:
        self.turn = problem.turn
        self.small_bytes, self.cheap_cost = small_bytes, cheap_cost
        self.nodes = list(range(len(problem)))
        self.reads = [list(row) for row in problem.inputs]
        self.readers = [list(row) for row in problem.users]
        self.sizes: list[int] = problem.sizes.tolist()
        self.work: list[int] = problem.extra_while_running.tolist()
        self.costs: list[float] = problem.costs.tolist()
        self.repeatable: list[bool] = problem.repeatable.tolist()

    def remove(self) -> bool:
        """Steps 1 and 2 for every node once; returns whether there was one."""
        left: list[int] = []
        for node in self.nodes:
            repeatable, small = self.repeatable[node], self.sizes[node] <= self.small_bytes
            source = repeatable and not self.reads[node] and self.costs[node] <= self.cheap_cost
            idle = not any(self.repeatable[read] for read in self.reads[node])
            if small and repeatable and node < self.turn:
                self._cut(node, 0)
            elif source:
                self._cut(node, self.sizes[node])
            elif small and not repeatable and idle and node >= self.turn:
                self._cut(node, 0)
            else:
                left.append(node)
        changed = len(left) < len(self.nodes)
        self.nodes = left
        return changed

    def _cut(self, node: int, workspace: int) -> None:
        for reader in self.readers[node]:
            self.reads[reader].remove(node)
            self.work[reader] += workspace
        for read in self.reads[node]:
            self.readers[read].remove(node)

    def join(self) -> bool:
        """Step 3 for every node once; returns whether there was a pair."""
        changed = False
        for a in self.nodes:
            real = [b for b in self.readers[a] if b >= self.turn or self.repeatable[b]]
            if not self.repeatable[a] or len(real) != 1:
                continue
            b = real[0]
            fits = b < self.turn and self.reads[b] == [a] and self.sizes[b] <= self.sizes[a]
            # Moments of `a`, and what else runs once and reads it, come before `b` does.
            if fits and all(moment <= b for moment in self.readers[a]):
                self._join(a, b)
                changed = True
        return changed

    def _join(self, a: int, b: int) -> None:
        spare = self.sizes[a] - self.sizes[b]
        for moment in self.readers[a]:
            if moment != b:
                self.work[moment] += spare
        for reader in self.readers[b]:
            row = self.reads[reader]
            row[row.index(b)] = a
        self.readers[a] = sorted([*self.readers[a], *self.readers[b]])
        self.readers[b] = []
        self.work[a] += spare
        self.work[b] += self.sizes[a]
        self.costs[a] += self.costs[b]
        self.sizes[a], self.sizes[b] = self.sizes[b], 0
        self.costs[b] = 0.0
        self.repeatable[b] = False

    def result(self) -> Relaxed:
        nodes = self.nodes
        number = {node: i for i, node in enumerate(nodes)}
        sizes = [self.sizes[n] if self.sizes[n] > self.small_bytes else 0 for n in nodes]
        problem = Problem.of(
            [self.costs[n] for n in nodes],
            sizes,
            [[number[read] for read in self.reads[n]] for n in nodes],
            repeatable=[self.repeatable[n] for n in nodes],
            turn=int(np.searchsorted(nodes, self.turn)),
            workspace=[self.work[n] for n in nodes],
        )
        return Relaxed(problem, tuple(nodes))
