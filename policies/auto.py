"""`Auto`: picks a policy by an ordered table and says which one and why.

1. No budget: `min_cut`. It keeps what is dear and recomputes what XLA fuses; it solves in milliseconds and needs no
   number from the user.
2. A budget that the minimum cut's buffers already meet: `min_cut`, for the same reasons.
3. Any other budget: `ilp`, which finds the cheapest program that fits and proves how good it is.

Guarantee: that of the policy picked. `choose` tells the choice without planning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.core.graph import Graph, Implementations
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.buffers.condense import condense
from remat.policies.ilp import Ilp
from remat.policies.min_cut import MinCut
from remat.policies.solvers.on_demand import sequence_of_saved
from remat.policies.solvers.problem import replay

__all__ = ["Auto"]


_MIN_CUT = MinCut()
_ILP = Ilp()


@dataclass(frozen=True)
class Auto(BudgetPolicy):
    """Picks a policy; see the module docstring.

    Attributes:
        min_cut, ilp: the policies to pick from, as configured.
    """

    min_cut: MinCut = _MIN_CUT
    ilp: Ilp = _ILP
    name: ClassVar[str] = "auto"
    falls_back: ClassVar[bool] = True

    @property
    def device(self) -> str:  # type: ignore[override]
        """Device whose roofline the estimates use."""
        return self.ilp.device

    @property
    def implementations(self) -> Implementations:  # type: ignore[override]
        """Which rewrites both plan with: those of `ilp`."""
        return self.ilp.implementations

    def choose(self, graph: Graph, budget_bytes: int | None) -> tuple[MinCut | Ilp, str]:
        """Returns the policy for a graph and a budget, and the reason in words."""
        if budget_bytes is None:
            return self.min_cut, "auto: min_cut, because there is no budget"
        condensed = condense(graph, device=self.device)
        saved = self.min_cut.decide(graph).saved
        nodes = condensed.forward_nodes(saved)
        peak = replay(condensed.problem, sequence_of_saved(condensed.problem, nodes)).peak_bytes
        if peak <= budget_bytes:
            return self.min_cut, f"auto: min_cut, because its buffers peak at {peak:,} bytes"
        return self.ilp, f"auto: ilp, because min_cut's buffers peak at {peak:,} bytes"

    def decide(self, graph: Graph) -> Decision:
        """Returns the minimum cut's decision."""
        policy, why = self.choose(graph, None)
        decision = policy.decide(graph)
        return replace(decision, notes=(why, *decision.notes))

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the decision of the policy picked for this budget.

        Raises:
            BudgetError: nothing was found that fits.
        """
        policy, why = self.choose(graph, budget_bytes)
        if isinstance(policy, Ilp):
            decision = policy.decide_within(graph, budget_bytes)
        else:
            decision = policy.decide(graph)
        return replace(decision, notes=(why, *decision.notes))
