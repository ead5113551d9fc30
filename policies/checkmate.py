"""`Checkmate`: the optimal schedule under a memory budget, as an integer program.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (MLSys 2020), the planner
that MONeT compares with. `method="optimal"` is the program restricted to what JAX executes (the forward pass runs
once, repetitions lie in the backward pass, between two first runs in the program's order, a node at most once);
`method="approximate"` is the paper's two-phase rounding of the linear relaxation.

Guarantee: `optimal` returns a sequence within the budget and a proven bound on the cost of all of this
structure (a sequence that repeats in another order can be cheaper, or smaller; the certificate says it); the plan's
status is `optimal` if they meet within `seconds`, else `feasible` with the gap. `approximate` has none: it is
published to exceed budgets and to cost up to four times the optimum, and then says so by a BudgetError or its gap.

Complexity: exponential in the worst case; about 350 buffers are practical, see `remat.policies.ilp` for more. The
relaxation has `nodes * edges` columns, so `approximate` takes up to `_ROUNDING_LIMIT` nodes.

Departures from the paper: the graph is coarsened to its buffers first (`remat.policies.buffers.condense`);
variables that no schedule of the structure uses are left out; the solver is given a feasible start: that of `ilp`
(minimum cuts, segments, local search, the dynamic program for chains of blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from remat.core.deadline import limited, seconds_left
from remat.core.devices import get_device
from remat.core.errors import PolicyError, number_or_nan
from remat.core.graph import Graph
from remat.core.interrupt import ended, say, solver_says
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.buffers.condense import Condensed, Objective, condense
from remat.policies.buffers.within import Pool, decision_of, first_bound, infeasible
from remat.policies.exact.checkmate_model import round_lp
from remat.policies.exact.milp import solve_restricted
from remat.policies.solvers.problem import peak_of_order
from remat.policies.solvers.search import is_ready

__all__ = ["Checkmate"]

# Nodes up to which the relaxation is rounded: it has nodes x edges columns. By
# look; above it `approximate` is refused with a message, so no plan depends on it.
_ROUNDING_LIMIT = 120


@dataclass(frozen=True)
class Checkmate(BudgetPolicy):
    """The integer program, or its rounding; see the module docstring.

    Attributes:
        method: `optimal` or `approximate`.
        objective: what recomputation costs: roofline `seconds`, or `flops`.
        seconds: limit on the time of one planning, whatever runs inside; the best plan so far is returned with its
            gap.
        gap: relative gap of the extra cost at which to stop.
        device: whose roofline prices the nodes.
    """

    method: Literal["optimal", "approximate"] = "optimal"
    objective: Objective = "seconds"
    seconds: float = 60.0
    gap: float = 0.0
    device: str = "h200"
    name: ClassVar[str] = "checkmate"

    def __post_init__(self) -> None:
        if self.method not in ("optimal", "approximate"):
            raise PolicyError(
                f"Checkmate(method={self.method!r}): expected 'optimal' or 'approximate'"
            )
        if self.objective not in ("seconds", "flops"):
            raise PolicyError(
                f"Checkmate(objective={self.objective!r}): expected 'seconds' or 'flops'"
            )
        if not (number_or_nan(self.seconds) > 0 and 0 <= number_or_nan(self.gap) < 1):
            raise PolicyError(
                f"Checkmate(seconds={self.seconds!r}, gap={self.gap!r}): expected positive seconds and a gap "
                "from 0 to 1"
            )
        get_device(self.device)

    def decide(self, graph: Graph) -> Decision:
        """Returns the plan without a budget: its limit is the peak of keeping everything."""
        condensed = condense(graph, device=self.device, objective=self.objective)
        return self._solve(condensed, peak_of_order(condensed.problem))

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the cheapest decision found whose buffers peak at no more than `budget_bytes`.

        Raises:
            BudgetError: none was found.
            PolicyError: the graph is too large for `approximate`.
        """
        condensed = condense(graph, device=self.device, objective=self.objective)
        return self._solve(condensed, budget_bytes)

    def _solve(self, condensed: Condensed, budget_bytes: int) -> Decision:
        with limited(self.seconds):
            return self._solved(condensed, budget_bytes)

    def _solved(self, condensed: Condensed, budget_bytes: int) -> Decision:
        problem = condensed.problem
        pool = Pool(problem, budget_bytes)
        everything = pool.offer("keep all", problem.first_runs.tolist())
        if everything.replayed.peak_bytes <= budget_bytes:
            return decision_of(condensed, everything, 0.0, ())
        bound = first_bound(self.name, problem, budget_bytes)
        if bound.smallest_bytes > budget_bytes:
            raise infeasible(condensed, budget_bytes, pool.smallest, bound.smallest_bytes)
        if self.method == "approximate":
            if len(problem) > _ROUNDING_LIMIT:
                raise PolicyError(
                    f"Checkmate(method='approximate') rounds a relaxation with nodes x edges columns; this graph "
                    f"has {len(problem)} buffers, the limit is {_ROUNDING_LIMIT}. Use method='optimal' or "
                    "remat_policy='ilp'."
                )
            notes: tuple[str, ...] = ()
            seconds = seconds_left()
            say(f"{self.name}: relaxation, {seconds:.0f} s at most")
            solved = round_lp(problem, budget_bytes, seconds=seconds, stop=ended)
        else:
            pool.begin(condensed, bound)
            # The start is that of `ilp`, so that the two differ by what they do with it. Without numba the
            # search would take seconds from the integer program.
            notes = pool.improve(self.name, bound.bound) if is_ready() else ()
            seconds = seconds_left()
            say(f"{self.name}: integer program, {seconds:.0f} s at most, from {pool.extra}")
            solved = solve_restricted(
                problem,
                budget_bytes,
                start=pool.start,
                seconds=seconds,
                gap=self.gap,
                stop=ended,
                progress=solver_says(f"{self.name}: integer program", problem.total_cost),
            )
        if solved.sequence is not None:
            pool.offer(solved.method, solved.sequence)
        if pool.best is None:
            raise infeasible(condensed, budget_bytes, pool.smallest, bound.smallest_bytes)
        note = f"{solved.method}: {solved.status}"
        proven = pool.proven_by(solved, bound.bound)
        return decision_of(condensed, pool.best, proven, (*notes, note), pool.covers)
