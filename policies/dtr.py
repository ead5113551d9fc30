"""`Dtr`: what dynamic tensor rematerialization does within a budget, recorded and planned.

Kirisame et al., "Dynamic tensor rematerialization" (2020). The joint graph is coarsened to its buffers
(`remat.policies.buffers.condense`) and replayed by the simulator of DTR (`remat.dtr`), which evicts by a heuristic
when memory is short and runs operators again when what they made is needed. What ran is the plan. No solver is
asked: this is what a runtime would do that knows nothing of what comes.

Guarantee: none; a heuristic. The plan's peak is that of the replay (`remat.policies.solvers.problem.replay`), as
for every planner. Complexity: up to `log(peak / largest operator) / -log(STEP)` simulations of a graph, of which a
budget needs those within limits from the largest down to its own (34 for half of the peak); one takes as long
as its heuristic (`remat.dtr.heuristics`), at most `thrash` programs' worth of operators.

Departures from the paper, beside those of `remat.policies.solvers.dynamic`: what a run peaks at is not what its
sequence peaks at, and more memory does not always make a cheaper run. So runs within larger limits than the budget
are tried, too, and the cheapest whose sequence fits is taken.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from remat.core.deadline import limited
from remat.core.devices import get_device
from remat.core.errors import PolicyError, nearest, number_or_nan
from remat.core.graph import Graph
from remat.core.interrupt import ended, say
from remat.dtr.heuristics import HEURISTICS, Scoring
from remat.plans.report import human_bytes
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.buffers.condense import Condensed, condense
from remat.policies.buffers.within import Pool, decision_of, infeasible
from remat.policies.solvers.dynamic import Rules, Simulations

__all__ = ["Dtr"]

# Limits down to this share of the budget are tried, though a larger one fits: less memory can come out cheaper. By
# look; each per cent less is half a simulation more.
_BELOW = 0.9


@dataclass(frozen=True)
class Dtr(BudgetPolicy):
    """Dynamic rematerialization; see the module docstring.

    Attributes:
        heuristic: what is evicted: a name of `remat.dtr.HEURISTICS`, or which factors a score has.
        eviction: what happens to what nobody refers to any more: `eager` evicts it, `banish` frees it for good and
            pins what was made of it.
        seed: of the heuristic `random`.
        thrash: a run that computes so many times what the program does is given up; the paper's 3.
        seconds: limit on the time of one planning; of the runs by then the best is taken.
        device: whose roofline prices the nodes.
    """

    heuristic: str | Scoring = "dtr_eqclass"
    eviction: Literal["eager", "banish"] = "eager"
    seed: int = 0
    thrash: float = 3.0
    seconds: float = 60.0
    device: str = "h200"
    name: ClassVar[str] = "dtr"

    def __post_init__(self) -> None:
        named = isinstance(self.heuristic, str) and self.heuristic in HEURISTICS
        if not (named or isinstance(self.heuristic, Scoring)):
            raise PolicyError(
                f"Dtr(heuristic={self.heuristic!r}): expected one of {sorted(HEURISTICS)}, or a remat.dtr.Scoring"
                f"{nearest(str(self.heuristic), HEURISTICS)}"
            )
        if self.eviction not in ("eager", "banish"):
            raise PolicyError(f"Dtr(eviction={self.eviction!r}): expected 'eager' or 'banish'")
        if type(self.seed) is not int:
            raise PolicyError(f"Dtr(seed={self.seed!r}): expected an integer")
        if not (number_or_nan(self.thrash) >= 1 and number_or_nan(self.seconds) > 0):
            raise PolicyError(
                f"Dtr(thrash={self.thrash!r}, seconds={self.seconds!r}): expected at least 1 (once what the "
                "program computes), and positive seconds"
            )
        get_device(self.device)

    def decide(self, graph: Graph) -> Decision:
        """Returns the plan without a budget: nothing is evicted that is needed."""
        return self._decision(condense(graph, device=self.device), 1 << 62)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the cheapest run whose buffers peak at no more than `budget_bytes`.

        Raises:
            BudgetError: none was found.
        """
        with limited(self.seconds):
            return self._decision(condense(graph, device=self.device), budget_bytes)

    def _decision(self, condensed: Condensed, budget_bytes: int) -> Decision:
        pool = Pool(condensed.problem, budget_bytes)
        everything = pool.offer("keep all", condensed.problem.first_runs.tolist())
        if everything.replayed.peak_bytes > budget_bytes:
            self._simulate(condensed, pool)
        if pool.best is None:
            raise infeasible(condensed, budget_bytes, pool.smallest, 0)
        decision = decision_of(condensed, pool.best, 0.0, ())
        return replace(decision, status="heuristic", certificate=None)

    def _simulate(self, condensed: Condensed, pool: Pool) -> None:
        """Offers runs, from the largest limit down to somewhat below the budget, or to the first that fits."""
        simulations = self._simulations(condensed)
        say(
            f"{self.name}: {len(condensed.problem):,} buffers within {human_bytes(pool.budget_bytes)}, "
            f"{len(simulations.limits_bytes)} limits"
        )
        for limit_bytes in simulations.limits_bytes:
            if ended() or (pool.best is not None and limit_bytes < _BELOW * pool.budget_bytes):
                return
            sequence = simulations.within(limit_bytes)
            if sequence is not None:
                pool.offer(f"{self.heuristic} within {limit_bytes:,} bytes", sequence)

    def _simulations(self, condensed: Condensed) -> Simulations:
        """Those of this graph: a planning asks for several budgets."""
        rules = Rules(self.heuristic, self.eviction, self.seed, self.thrash)
        known: dict[Hashable, Simulations] = condensed.graph.memo
        key = ("dtr", self.device, rules)
        if key not in known:
            known[key] = Simulations(condensed.problem, rules)
        return known[key]
