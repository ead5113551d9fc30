"""`Monet`: the schedule and the implementations of operators, chosen together.

Shah et al., "Memory optimization for deep networks" (MONeT, ICLR 2021): checkpointing and the choice of each
operator's backward implementation as one integer program. Here an implementation is a rewrite of the joint graph
(`remat.rewrite.menu`): a max-pool's gradient by argmax codes or from its operand, a relu's mask from its operand,
its result or as bits.

How it plans:

1. Every kind of rewrite, all of them and none, each with and without the registered operators' implementations
   (`remat.rewrite.operators`), are planned by the starts of `ilp` within the budget.
2. Where the graph is small enough (`exact_limit` buffers) the paper's integer program (`_monet_model`: equations 1
   to 16, in-place choices included) chooses among all combinations of rewrites, with many sites of whole rules; the
   registered operators' implementations are not in it. Its status and gap are in the plan's notes.
3. The three cheapest of these choices by the starts, and no rewrite at all, make the shortlist. Without loops a
   session (`remat.planning.session`) plans each as `ilp` plans, and takes the cheapest; among those within 0.1 % of
   it, the one that is predicted to move the least. With loops it plans the first alone.

So a plan without loops is at most 0.1 % dearer than that of `ilp` without rewrites, unless the time limit is
reached, which everything shares.

Guarantee: as `ilp` for the implementations chosen; the certificate is theirs. Without a budget it takes the choice
whose program is the fastest with nothing repeated.

Complexity: the starts of `ilp` once per choice, then `ilp` up to four times; the integer program is exponential.
All of it ends after `seconds`.

Departures: XLA chooses the algorithms of convolutions itself and the joint graph has the gradients of weights and
of inputs as separate operators already, so that kind of the paper's implementations is not a choice here. A forward
operator has one implementation for all its runs. Bodies of loops are rewritten at every exact site.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from remat.core.deadline import limited, seconds_left
from remat.core.errors import BudgetError, PolicyError, number_or_nan
from remat.core.graph import Alternatives, Graph, Implementations, Site, is_wanted, wanted_sites
from remat.core.interrupt import ended, say, solver_says
from remat.policies.base import BudgetPolicy, Decision, check_implementations, check_names
from remat.policies.buffers.condense import condense
from remat.policies.buffers.implementations import merged_problem
from remat.policies.buffers.within import EFFORT, TOLERANCE
from remat.policies.exact.monet_solve import solve_monet
from remat.policies.ilp import Ilp

__all__ = ["Monet"]

_FOUND = "monet"  # the entry of `Graph.memo` with what is to be said of the choice of its sites
# So many choices, and no rewrite at all, are planned in full within a budget: a choice costs a planning of `ilp`.
# By look, raised from 2 on the networks of benchmarks/results/encodings_h200.json; the harm is a choice that is
# cheaper than the starts say and is not planned. No rewrite at all always is.
_SHORTLIST = 3
# Of the time, for the joint program: as much as `ilp` gives its integer program. What it leaves is for the
# plannings.
_JOINT_SHARE = 1 / 3


@dataclass(frozen=True)
class Monet(BudgetPolicy):
    """Plans schedule and implementations together; see the module docstring.

    Attributes:
        implementations: which rewrites to choose from: `exact` for those whose gradients are bit-equal, `none`,
            `all`, or names of rules or kinds (`output`, `intermediate`); see `remat.rewrite.rules`.
        exact_limit: buffers up to which the joint integer program runs; 0 for never.
        seconds: limit on the time of one planning, whatever runs inside.
        effort, tolerance: of `ilp`'s search.
        device: whose roofline prices the nodes.
    """

    implementations: Implementations = "exact"
    exact_limit: int = 100
    seconds: float = 60.0
    effort: int = EFFORT
    tolerance: float = TOLERANCE
    device: str = "h200"
    name: ClassVar[str] = "monet"
    falls_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_implementations("Monet", self.implementations)
        if not number_or_nan(self.exact_limit) >= 0:
            raise PolicyError(
                f"Monet(exact_limit={self.exact_limit!r}): expected a number of buffers, 0 for never"
            )
        _ = self._ilp  # checks the rest

    @cached_property
    def _ilp(self) -> Ilp:
        return Ilp(
            seconds=self.seconds,
            effort=self.effort,
            tolerance=self.tolerance,
            device=self.device,
            implementations="none",
        )

    def sites(self, menu: Alternatives, budget_bytes: int | None) -> frozenset[str]:
        """Returns the sites whose rewrites give the cheapest plan within the budget, as far as starts tell."""
        return self.shortlist(menu, budget_bytes)[0]

    def steady_sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns no sites: those chosen depend on the budget."""
        del menu
        return frozenset()

    def shortlist(self, menu: Alternatives, budget_bytes: int | None) -> tuple[frozenset[str], ...]:
        """Returns sets of sites to plan with, the most promising first; no rewrite at all is among them.

        Args:
            menu: what there is.
            budget_bytes: what plans have to fit in, None for no limit.
        """
        with limited(self.seconds):
            return self._shortlist(menu, budget_bytes)

    def _shortlist(self, menu: Alternatives, budget: int | None) -> tuple[frozenset[str], ...]:
        nothing = frozenset[str]()
        if self.implementations == "none":
            return (nothing,)
        check_names(self.implementations, menu)
        plain = menu.graph(())
        operators = frozenset(site.name for site in menu.operators(self.implementations))
        sites = self._sites(menu)
        inside = self._sites(menu.with_operators(operators))
        if plain.multiplicity > 1:
            return (operators | wanted_sites(inside, "all"), nothing)
        if not sites and not operators:
            return (nothing,)
        candidates = dict.fromkeys(_candidates(sites))
        if operators:
            candidates |= dict.fromkeys(operators | chosen for chosen in _candidates(inside))
        note = None
        if sites and budget is not None and self._is_small(plain):
            chosen, note = self._joint(menu, sites, budget)
            candidates |= dict.fromkeys(chosen)
        prices: dict[frozenset[str], tuple[bool, float, int]] = {}
        for index, chosen in enumerate(candidates):
            if ended() and prices:
                break
            say(f"{self.name}: starts for choice {index + 1} of {len(candidates)} of rewrites")
            prices[chosen] = self._price(menu.graph(chosen), budget)
        ranked = sorted(prices, key=prices.__getitem__)
        best = dict.fromkeys((*ranked[:_SHORTLIST], nothing))
        if note is not None:
            for chosen in best:
                menu.graph(chosen).memo[_FOUND] = note
        return tuple(best)

    def _sites(self, menu: Alternatives) -> list[Site]:
        return [site for site in menu.sites if is_wanted(site, self.implementations)]

    def _is_small(self, graph: Graph) -> bool:
        return len(condense(graph, device=self.device).problem) <= self.exact_limit

    def _joint(
        self, menu: Alternatives, sites: Sequence[Site], budget: int
    ) -> tuple[list[frozenset[str]], str]:
        """What the joint program chooses, if anything, and what to say of it."""
        merged = merged_problem(menu, sites, device=self.device)
        if merged is None:
            return [], "no joint program: the rewrites order the graph in ways that contradict"
        total_cost = condense(menu.graph(()), device=self.device).problem.total_cost
        told = solver_says(f"{self.name}: joint program", total_cost)
        seconds = min(_JOINT_SHARE * self.seconds, seconds_left())
        say(f"{self.name}: joint program over implementations, {seconds:.0f} s at most")
        solved = solve_monet(
            merged.problem,
            budget,
            seconds=seconds,
            in_place=True,
            stop=ended,
            # Costs of whole programs: choices differ in what they cost with nothing repeated.
            progress=lambda cost, bound, at: told(cost - total_cost, bound - total_cost, at),
        )
        gap = f", gap {100 * solved.gap:.2g}%" if solved.selection is not None else ""
        note = f"joint program over implementations at {budget:,} bytes: {solved.status}{gap}"
        return [] if solved.selection is None else [merged.sites(solved.selection)], note

    def _price(self, graph: Graph, budget: int | None) -> tuple[bool, float, int]:
        """Whether nothing fits; the cost, or the smallest peak; then few rewrites, or where nothing fits many."""
        if budget is None:
            cost = condense(graph, device=self.device).problem.total_cost
            return (False, cost, len(graph.sites))
        quick = replace(self._ilp, method="starts")
        try:
            decision = quick.decide_within(graph, budget)
        except BudgetError as error:
            smallest = error.smallest_peak_bytes
            return (True, math.inf if smallest is None else smallest, -len(graph.sites))
        assert decision.certificate is not None
        return (False, float(decision.certificate.value), len(graph.sites))

    def decide(self, graph: Graph) -> Decision:
        """Returns the plan without a budget: that of `ilp`."""
        return self._ilp.decide(graph)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the cheapest decision found whose buffers peak at no more than `budget_bytes`.

        Raises:
            BudgetError: none was found.
        """
        decision = self._ilp.decide_within(graph, budget_bytes)
        note: str | None = graph.memo.get(_FOUND)
        return decision if note is None else replace(decision, notes=(*decision.notes, note))


def _candidates(sites: Sequence[Site]) -> Iterator[frozenset[str]]:
    """No rewrite, all of them, those of every kind and of every rule."""
    yield frozenset()
    yield wanted_sites(sites, "all")
    for name in dict.fromkeys(name for site in sites for name in (site.kind, site.rule)):
        yield wanted_sites(sites, (name,))
