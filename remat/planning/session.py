"""Planning a function with its loops within a budget.

A loop's body keeps its values once per iteration, so a session plans a function with loops several times, with
other ways to run the loops (`remat.planning.loops`) and another budget for what is outside, and takes the cheapest
that fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from remat.core.deadline import out_of_time
from remat.core.errors import BudgetError
from remat.core.graph import Alternatives, Graph
from remat.core.interrupt import ended, interrupted, raise_interrupt, say
from remat.memory.predict import peak_bytes, predict
from remat.planning.bodies import Body, InChunk, Menus
from remat.planning.loops import (
    LoopOption,
    loop_options,
)
from remat.planning.make import make_plan
from remat.planning.numbers import ALIKE_COST, MARGIN
from remat.planning.protocol import SteadyPlanner
from remat.planning.resort import (
    Limit,
    UnchangedPlanner,
    held,
    limit_bytes,
    too_small,
    unchanged_plan,
)
from remat.planning.rounds import Rounds, Setting, Tried
from remat.planning.time_limit import TimeLimit
from remat.planning.within import Within, plan_within, program_cost
from remat.plans.paths import is_rest, whole_of
from remat.plans.plan import Plan
from remat.policies import Full, MinCut
from remat.policies.base import BudgetPolicy, describe_options

__all__ = ["BudgetSession"]

_INTERRUPTED = "interrupted: the best plan so far"


class BudgetSession(SteadyPlanner):
    """Plans one function, its loops included, within a limit.

    Round one leaves loops whole, keeps the least in every body and, outside of loops, what the minimum cut keeps.
    If that fits, what is left of the limit is spent on the loops. If it does not, either what is outside is planned
    within what the loops leave, or loops run in chunks, whichever is cheaper, and both if nothing else fits.
    Every round checks the prediction for the whole; the estimate of the next is corrected by it. Where nothing
    fits, the program is tried as it is. All of it is within the policy's time limit.

    Args:
        policy: plans what is outside of loops.
        limit: bytes, or a fraction of the peak without rematerialization.
        margin: share of it that plans leave for the prediction's error, if there is one that can.
        nearest: where nothing fits and there are no loops, take what is nearest.
        menus: of the function's loops, from its plannings before; what is found is added.
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        limit: Limit,
        margin: float = MARGIN,
        nearest: bool = False,
        menus: Menus | None = None,
    ) -> None:
        self.nearest = nearest
        self._known: Menus = {} if menus is None else menus
        self.policy = policy
        self.limit = limit
        self.margin = margin
        self.time = TimeLimit(policy)
        self.device = policy.device
        self.bodies: dict[str, Body] = {}
        self.least: Plan | None = None  # of the first round
        self.baseline_peak_bytes = 0  # with loops; 0 until it is known
        self._setting = Setting()
        self._refused = False
        self._search: Tried | None = None
        self._menus: dict[str, list[LoopOption]] = {}
        self._outside: dict[tuple[str, int], Plan] = {}
        self._planned: dict[str, Plan] = {}  # by fingerprint, before the sites were chosen

    def child(self, path: str) -> SteadyPlanner:
        """Returns the planner of a loop's body."""
        if self._setting.unchanged:
            return UnchangedPlanner(self.policy)
        if is_rest(path):
            chosen = self.bodies[whole_of(path)].chosen
            assert chosen is not None
            return InChunk(chosen.body, (), self.device, self.policy, self.time)
        body = Body(self.device, self.policy, self.time, path, self._known)
        return self.bodies.setdefault(path, body)

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns what the policy wants outside of the loops.

        Where it is undecided and there are no loops, each of its choices is planned and the cheapest plan kept;
        where plans cost the same but for rounding, the one whose kernels are predicted to move the least. Where
        none of them fits, nothing is rewritten if that fits.

        Raises:
            BudgetError: nothing fits.
        """
        if self._setting.unchanged:
            return frozenset()
        with self.time.running():
            limit = limit_bytes(self.limit, peak_bytes(menu.graph(())))
            if self.bodies:
                return self.policy.sites(menu, limit)
            found = self.policy.shortlist(menu, limit)
            if found == (frozenset(),):
                return found[0]
            return self._cheapest_sites(menu, found, limit)

    def _cheapest_sites(
        self, menu: Alternatives, found: Sequence[frozenset[str]], limit: int
    ) -> frozenset[str]:
        # Those that do not depend on the budget fall back on what does not, either.
        steady = {frozenset[str](), self.policy.steady_sites(menu)}
        planned: dict[frozenset[str], Plan] = {}
        asked: dict[frozenset[str], Within] = {}
        choices = list(dict.fromkeys((*found, *sorted(steady, key=len, reverse=True))))
        for index, chosen in enumerate(choices):
            if index >= len(found) and planned:
                break
            if ended() and (planned or (out_of_time() and chosen)):
                continue
            say(f"{self.policy.name}: choice {index + 1} of {len(choices)} of rewrites")
            part = self.time.part(max(len(found) - index, 1))
            within = Within(menu.graph(chosen), part, limit, True, self.margin)
            with part.running():
                plan = within.asked()
            if plan is not None:
                planned[chosen] = plan
            else:
                asked[chosen] = within
        if not planned:
            planned = self._resorted({c: w for c, w in asked.items() if c in steady})
        for chosen, plan in planned.items():
            self._planned[menu.graph(chosen).fingerprint()] = plan
        costs = {
            chosen: math.inf if plan.certificate is None else program_cost(plan)
            for chosen, plan in planned.items()
        }
        least = min(costs.values())
        alike = [chosen for chosen, cost in costs.items() if cost <= (1 + ALIKE_COST) * least]
        if len(alike) == 1:
            return alike[0]
        return min(
            alike, key=lambda c: predict(planned[c].graph, planned[c].schedule).traffic_bytes
        )

    def _resorted(self, asked: dict[frozenset[str], Within]) -> dict[frozenset[str], Plan]:
        """What choices of rewrites fall back on, of those that fit.

        Raises:
            BudgetError: nothing fits.
        """
        planned = {
            chosen: plan
            for chosen, within in asked.items()
            if (plan := within.resorted()) is not None
        }
        if planned:
            return planned
        if self.nearest:
            near = {chosen: within.nearest() for chosen, within in asked.items()}
            planned = {chosen: plan for chosen, plan in near.items() if plan is not None}
            if planned:
                return planned
        refusals: list[BudgetError] = []
        for within in asked.values():
            within.limit = self.time  # its part of the time is used
            refusals.append(within.refusal())
        raise min(refusals, key=lambda error: error.smallest_peak_bytes or 0)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans what is outside of the loops."""
        if self._setting.unchanged:
            return unchanged_plan(graph, self.policy)
        with self.time.running():
            return self._plan(graph, barriers)

    def _plan(self, graph: Graph, barriers: bool) -> Plan:
        if not self.bodies:
            planned = self._planned.get(graph.fingerprint())
            if planned is not None and barriers:
                return replace(planned, graph=graph)
            limit = limit_bytes(self.limit, peak_bytes(graph.plain or graph))
            return self._within(graph, limit, barriers, self.margin, self.nearest)
        if self._setting.within is not None:
            key = (graph.fingerprint(), self._setting.within)
            try:
                if key not in self._outside:
                    self._outside[key] = self._within(graph, self._setting.within, barriers, 0.0)
                return replace(self._outside[key], graph=graph)
            except BudgetError:
                self._refused = True  # the search goes on with another setting
        least = self._setting.keeps_least
        plan = make_plan(graph, Full() if least else MinCut(device=self.device), barriers=barriers)
        note = f"outside of loops: {'nothing is kept' if least else 'a minimum cut'}"
        return replace(
            plan,
            policy_name=self.policy.name,
            options=describe_options(self.policy),
            status="heuristic",  # the cut's proof says nothing of the loops
            certificate=None,
            notes=(note, *plan.notes),
        )

    def _within(
        self, graph: Graph, limit: int, barriers: bool, margin: float, nearest: bool = False
    ) -> Plan:
        return plan_within(
            graph,
            self.policy,
            limit,
            barriers=barriers,
            limit=self.time,
            margin=margin,
            nearest=nearest,
        )

    def again(self, plan: Plan) -> bool:
        """Looks at a finished plan, its loops included; True asks to plan once more.

        Raises:
            BudgetError: nothing fits.
        """
        if not self.bodies:
            return False
        try:
            with self.time.running():
                if self._search is None:
                    self._search = self._settings(plan)
                    self._setting = next(self._search)
                else:
                    self._setting = self._search.send(None if self._refused else plan)
        except StopIteration:
            return False
        self._refused = False
        for index, (path, menu) in enumerate(self._menus.items()):
            choice = self._setting.choice
            self.bodies[path].chosen = None if choice is None else menu[choice[index]]
        return True

    def finish(self, plan: Plan) -> Plan:
        """Holds the finished plan to the limit.

        Raises:
            BudgetError: the predicted peak is above it.
        """
        if self.least is not None:  # without rematerialization no loop is cut
            plan = replace(
                plan,
                baseline_peak_bytes=self.baseline_peak_bytes,
                baseline_saved_bytes=self.least.baseline_saved_bytes,
            )
        if interrupted():
            plan = replace(plan, notes=(*plan.notes, _INTERRUPTED))
        if self.nearest and not self.bodies:
            return plan
        return held(plan, self.limit)

    def _settings(self, least: Plan) -> Tried:
        """What to plan with, round after round; given the finished plan of each, None if it was refused.

        Ends when the plan it was given last is the one to take.
        """
        self.least = least
        self.baseline_peak_bytes = least.baseline_peak_bytes
        limit = limit_bytes(self.limit, least.baseline_peak_bytes)
        aim = int((1 - self.margin) * limit)
        self._menus = {
            path: body.options() for path, body in self.bodies.items() if body.graph is not None
        }
        rounds = Rounds(least, self._base(), list(self._menus.values()), list(self._menus))
        if least.peak_bytes <= aim:
            yield from rounds.loops(aim)
        else:
            yield from rounds.nothing_outside(aim)
            yield from rounds.outside(aim, Setting())
            yield from rounds.loops(aim)
            if rounds.best is None:
                yield from rounds.outside(aim, rounds.smallest_setting)
            if rounds.best is None:
                yield from rounds.margin(limit)
            if rounds.best is None:
                yield from rounds.outside(limit, rounds.smallest_setting)
        if rounds.best is None:
            plain = yield from rounds.unchanged()
            # What it peaks at is the peak without rematerialization, which the first round estimates.
            self.baseline_peak_bytes = max(self.baseline_peak_bytes, plain.peak_bytes)
            limit = limit_bytes(self.limit, self.baseline_peak_bytes)
            yield from rounds.margin(limit)
        if rounds.best is None:
            raise_interrupt()
            late = self.time.seconds if out_of_time() else None
            raise too_small(rounds.smallest, limit, seconds=late)
        if rounds.last != rounds.best:
            yield rounds.best

    def _base(self) -> list[LoopOption]:
        """What the first round ran the loops with."""
        found = []
        for path in self._menus:
            body = self.bodies[path]
            found += loop_options(body.bodies[:1], body.trips, may_repeat=False)
        return found
