"""`Sublinear`: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

The forward pass is cut into segments; what crosses their borders is kept, and each segment is computed again when
the backward pass reaches it. `method` chooses where the cuts lie:

* `grid`: Algorithm 3 (a segment ends once it has made `b` bytes) with appendix A's grid search over `b`;
* `sqrt`: `k` segments, sqrt(n) of them by default;
* `recursive`: segments are cut again and again into `k + 1` parts, g(n) = k + g(n / (k + 1)) (section 4.4);
* `cheap`: keep the results of compute-bound operators, compute the cheap ones again (section 4.3, conv-bn-relu).

Guarantee: with n equal layers about 2 sqrt(n) values (`grid`, `sqrt`) at no more than one extra forward pass, or
O(log n) values at O(n log n) extra work (`recursive` with k=1). Under a budget the cheapest of these that fits is
taken. Complexity: near linear; `sqrt` has a quadratic worst case. The departures from the paper are listed
in `remat.policies.solvers.segments`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from remat.core.errors import PolicyError, number_or_nan
from remat.core.graph import Graph
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.buffers.condense import Condensed, condense
from remat.policies.buffers.within import Pool, decision_of, infeasible
from remat.policies.solvers.segments import (
    SegmentPlan,
    drop_cheap,
    grid_search,
    recursive_segments,
    sqrt_segments,
)

__all__ = ["Sublinear"]

Method = Literal["grid", "sqrt", "recursive", "cheap"]
_METHODS = ("grid", "sqrt", "recursive", "cheap")

# What is tried within a budget besides the method's own cuts. The paper searches a grid of budgets (appendix A) and
# gives no numbers; these are by look. More of them would cost time, fewer a plan that is coarser than it need be.
_RECURSIONS = (2, 3, 5, 8, 13)  # cuts per level of the recursion: from fewest bytes to least work
_MORE_SEGMENTS = 1.5  # the next number of segments, times the last


@dataclass(frozen=True)
class Sublinear(BudgetPolicy):
    """Segments, kept at their borders; see the module docstring.

    Attributes:
        method: where the cuts lie.
        k: number of segments (`sqrt`) or of cuts per level (`recursive`); None for sqrt(n), or 1.
        device: whose roofline prices recomputation.
    """

    method: Method = "grid"
    k: int | None = None
    device: str = "h200"
    name: ClassVar[str] = "sublinear"

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise PolicyError(
                f"Sublinear(method={self.method!r}): expected one of {list(_METHODS)}"
            )
        if self.k is not None and (
            not number_or_nan(self.k) >= 1 or self.method not in ("sqrt", "recursive")
        ):
            raise PolicyError(
                f"Sublinear(method={self.method!r}, k={self.k!r}): k is the number of segments of 'sqrt' or of "
                "cuts per level of 'recursive', at least 1"
            )

    def decide(self, graph: Graph) -> Decision:
        """Returns the segments' borders to keep, and the order of recomputation."""
        condensed = condense(graph, device=self.device)
        pool = Pool(condensed.problem, 1 << 62)
        found = pool.offer(self.method, self._sequence(condensed))
        return _heuristic(decision_of(condensed, found, 0.0, ()))

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the cheapest plan of this kind that fits: coarser and finer cuts are tried.

        Raises:
            BudgetError: none fits.
        """
        condensed = condense(graph, device=self.device)
        pool = Pool(condensed.problem, budget_bytes)
        pool.offer_all(self._family(condensed))
        if pool.best is None:
            raise infeasible(condensed, budget_bytes, pool.smallest, 0)
        return _heuristic(decision_of(condensed, pool.best, 0.0, ()))

    def _sequence(self, condensed: Condensed) -> Sequence[int]:
        return _sequence(condensed, self.method, self.k)

    def _family(self, condensed: Condensed) -> Iterator[tuple[str, Sequence[int]]]:
        problem = condensed.problem
        yield "keep all", problem.first_runs.tolist()
        yield self.method, self._sequence(condensed)
        if self.k is not None or self.method == "cheap":
            return
        if self.method == "recursive":
            for k in _RECURSIONS:
                yield f"recursive k={k}", _sequence(condensed, "recursive", k)
            return
        k = 2
        while k < problem.turn:
            yield f"sqrt k={k}", _sequence(condensed, "sqrt", k)
            k = max(k + 1, round(k * _MORE_SEGMENTS))


def _sequence(condensed: Condensed, method: Method, k: int | None) -> Sequence[int]:
    """The sequence of one way to cut, which no budget changes: kept with the problem for the next one."""
    problem = condensed.problem
    key = ("sublinear", method, k)
    if key not in problem.memo:
        problem.memo[key] = _cut(condensed, method, k).sequence
    return problem.memo[key]


def _cut(condensed: Condensed, method: Method, k: int | None) -> SegmentPlan:
    problem = condensed.problem
    if method == "sqrt":
        return sqrt_segments(problem, k)
    if method == "recursive":
        return recursive_segments(problem, 1 if k is None else k)
    if method == "cheap":
        heavy = [condensed.graph.ops[root].heavy for root in condensed.roots]
        return drop_cheap(problem, [not flag for flag in heavy])
    return grid_search(problem)


def _heuristic(decision: Decision) -> Decision:
    """Chen's plans carry no bound."""
    return replace(decision, status="heuristic", certificate=None)
