"""`Revolve`: checkpointing for chains, by binomial schedules or an exact dynamic program.

Griewank & Walther, "Algorithm 799: Revolve" (2000), for a number of snapshots; Beaumont, Eyraud-Dubois, Herrmann,
Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019), for bytes. The chain is found in the
joint graph: places where a single value goes from one stretch of the forward pass to the next. A program
without such a place is one stage; use `ilp` there.

Guarantee: with `snapshots`, the fewest forward steps for equal stages, t(l, s) = r l - C(s + r, r - 1); under a
budget the cheapest persistent schedule of the chain (see `remat.policies.solvers.chain.program`, which lists the
departures): a checkpoint is held until everything after it is reversed, and a stage's input while the stage runs.
That is the optimum for equal stages whose backward parts read what the forward parts make, and a heuristic
otherwise; where the backward pass does not read some values of the chain, the plan's notes say so. Complexity:
O(stages^3 * 500) vectorised additions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.core.errors import PolicyError, number_or_nan
from remat.core.graph import Graph
from remat.core.interrupt import ended
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.buffers.condense import Condensed, condense
from remat.policies.buffers.within import Pool, decision_of, infeasible
from remat.policies.solvers.chain.find import chain_of
from remat.policies.solvers.chain.solve import revolve, solve_chain

__all__ = ["Revolve"]


@dataclass(frozen=True)
class Revolve(BudgetPolicy):
    """Checkpoints along a chain; see the module docstring.

    Attributes:
        snapshots: stage inputs held at a time when there is no budget; None for log2 of the number of stages,
            rounded up, which computes a stage about log2 times.
        device: whose roofline prices recomputation.
    """

    snapshots: int | None = None
    device: str = "h200"
    name: ClassVar[str] = "revolve"

    def __post_init__(self) -> None:
        if self.snapshots is not None and not number_or_nan(self.snapshots) >= 1:
            raise PolicyError(
                f"Revolve(snapshots={self.snapshots!r}): expected at least 1, or None"
            )

    def decide(self, graph: Graph) -> Decision:
        """Returns the binomial schedule of the graph's chain."""
        condensed = condense(graph, device=self.device)
        chain = chain_of(condensed.problem)
        if chain is None:
            return self._one_stage(condensed)
        count = len(chain.segments)
        snapshots = max(1, (count - 1).bit_length()) if self.snapshots is None else self.snapshots
        pool = Pool(condensed.problem, 1 << 62)
        pool.offer("binomial", revolve(chain, snapshots).sequence)
        return self._decision(condensed, pool)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the cheapest schedule of the graph's chain within a budget.

        Raises:
            BudgetError: no schedule of the chain fits, or there is no chain and keeping everything does not.
        """
        condensed = condense(graph, device=self.device)
        pool = Pool(condensed.problem, budget_bytes)
        everything = pool.offer("keep all", condensed.problem.first_runs.tolist())
        if everything.replayed.peak_bytes <= budget_bytes:
            return self._decision(condensed, pool)
        plan = solve_chain(condensed.problem, budget_bytes, stop=ended)
        if plan is None:
            raise infeasible(condensed, budget_bytes, pool.smallest, 0)
        pool.offer("dynamic program", plan.sequence)
        return self._decision(condensed, pool, _assumed(condensed))

    def _one_stage(self, condensed: Condensed) -> Decision:
        """A program without a place to cut is a chain of one stage, which is kept."""
        pool = Pool(condensed.problem, 1 << 62)
        pool.offer(
            "one stage: nowhere does a single value go forward",
            condensed.problem.first_runs.tolist(),
        )
        return self._decision(condensed, pool)

    def _decision(self, condensed: Condensed, pool: Pool, notes: tuple[str, ...] = ()) -> Decision:
        assert pool.best is not None
        decision = decision_of(condensed, pool.best, 0.0, notes)
        return replace(decision, status="heuristic", certificate=None)


def _assumed(condensed: Condensed) -> tuple[str, ...]:
    """What the schedule assumes that does not hold, if anything."""
    chain = chain_of(condensed.problem)
    if chain is None or not chain.unread:
        return ()
    return (
        f"a heuristic: the backward pass does not read {len(chain.unread)} of {chain.problem.turn} values of the "
        "chain, and schedules hold a stage's input while the stage runs",
    )
