"""Planning one graph within a budget: bytes that the peak of everything but arguments and results may take.

A policy that can plan within a budget has a method `decide_within`; any other is planned as it is and
checked. What a policy believes of memory is a model on buffers; what a plan promises is the prediction for its
finished schedule. `plan_within` closes that gap: it asks for less until the prediction fits. The policy's time
limit holds for all its requests together (`remat.planning.time_limit`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from remat.core.deadline import now, out_of_time
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.interrupt import ended, interrupted, raise_interrupt, say
from remat.memory.predict import predict
from remat.planning.make import make_plan, plan_from_saved
from remat.planning.numbers import ATTEMPTS, MARGIN, SLACK, STEP
from remat.planning.resort import (
    held,
    resorts,
    too_small,
    unchanged_plan,
)
from remat.planning.time_limit import TimeLimit
from remat.plans.plan import Plan
from remat.policies import Policy
from remat.policies.base import BudgetPolicy, Decision, describe_options

__all__ = ["Within", "plan_within", "program_cost"]

_NO_LIMIT = 1 << 62  # bytes


def plan_within(
    graph: Graph,
    policy: Policy,
    budget_bytes: int,
    *,
    barriers: bool = True,
    limit: TimeLimit | None = None,
    margin: float = MARGIN,
    nearest: bool = False,
) -> Plan:
    """Plans a graph so that its predicted peak is at most `budget_bytes`.

    Where keeping everything fits, nothing is repeated for the budget's sake, and no margin is left.

    Args:
        graph: a joint graph.
        policy: any policy; one without `decide_within` is planned as it is, and where that does not fit, the
            program stays as it is if that does.
        budget_bytes: bound on `Plan.peak_bytes`.
        barriers: as in `remat.planning.make.make_plan`.
        limit: of the policy's time, where this is part of a larger planning; its own by default.
        margin: share of the budget that plans leave for the prediction's error, if there is one that can.
        nearest: where nothing fits, take what is nearest; its `budget_bytes` is its own peak.

    Raises:
        BudgetError: no plan that fits was found; the message has the smallest peak found, which can be planned
            for.
    """
    if not isinstance(policy, BudgetPolicy):
        plan = make_plan(graph, policy, barriers=barriers)
        if plan.peak_bytes > budget_bytes:
            plan = min(plan, unchanged_plan(graph, policy), key=lambda p: p.peak_bytes)
        return held(plan, budget_bytes)
    limit = limit or TimeLimit(policy)
    with limit.running():
        return Within(graph, limit, budget_bytes, barriers, margin).plan(nearest=nearest)


class Within:
    """Plans one graph within a budget; the arguments are those of `plan_within`."""

    def __init__(
        self, graph: Graph, limit: TimeLimit, budget_bytes: int, barriers: bool, margin: float
    ) -> None:
        self.graph = graph
        self.limit = limit
        self.policy = limit.policy
        self.budget_bytes = budget_bytes
        self.barriers = barriers
        self.margin = margin
        self.began = now()
        self.offered = _Offers(graph, limit.policy, barriers)
        self._resorts: list[Plan] = []

    def plan(self, *, nearest: bool = False) -> Plan:
        """Returns the plan; `nearest` as in `plan_within`.

        Raises:
            BudgetError: nothing fits.
        """
        plan = self.asked() or (self.nearest() if nearest else None) or self.resorted()
        if plan is None:
            raise self.refusal()
        return plan

    def asked(self) -> Plan | None:
        """Returns what the policy makes that fits, or the program as it is if that fits."""
        if predict(self.graph).peak_bytes <= self.budget_bytes:
            plain = unchanged_plan(self.graph, self.policy)
            if plain.peak_bytes <= self.budget_bytes:
                return self._finished(self._freely(plain))
        if self.margin:  # half of the time, so that what fits without it is found, too
            self.offered.run(int((1 - self.margin) * self.budget_bytes), self.limit.part(2))
        if self.offered.best is None:
            self.offered.run(self.budget_bytes, self.limit)
        best = self.offered.best
        return None if best is None else self._finished(best)

    def nearest(self) -> Plan | None:
        """Returns the plan that is least above the budget, of those that the policy made; after `asked`."""
        plan = self.offered.smallest
        if plan is None:
            return None
        return replace(plan, budget_bytes=plan.peak_bytes, solve_seconds=now() - self.began)

    def resorted(self) -> Plan | None:
        """Returns the cheapest of `remat.planning.resort.resorts` that fits."""
        self._resorts = list(resorts(self.graph, self.policy, barriers=self.barriers))
        fitting = [plan for plan in self._resorts if plan.peak_bytes <= self.budget_bytes]
        if not fitting:
            return None
        return self._finished(min(fitting, key=lambda plan: plan.recompute_seconds))

    def refusal(self) -> BudgetError:
        """Returns the error, after `resorted`: with a smallest peak that can be planned for.

        What falls back on resorts can do so again. What the policy found on the way to this budget it need not
        find on the way to another: it is asked.

        Raises:
            KeyboardInterrupt: the planning was interrupted.
        """
        raise_interrupt()
        smallest = min(self._resorts, key=lambda plan: plan.peak_bytes)
        found = self.offered.smallest
        if found is not None and found.peak_bytes < smallest.peak_bytes and not ended():
            say(f"{self.policy.name}: nothing fits; is {found.peak_bytes:,} bytes enough?")
            again = _Offers(self.graph, self.policy, self.barriers)
            again.run(found.peak_bytes, self.limit)
            if again.best is not None:
                smallest = found
        late = out_of_time()
        raise_interrupt()
        return too_small(smallest, self.budget_bytes, seconds=self.limit.seconds if late else None)

    def _freely(self, plain: Plan) -> Plan:
        """What the policy makes without a limit if that fits, else the program as it is, which does."""
        if out_of_time():
            return plain
        free = self.offered.ask(_NO_LIMIT, self.budget_bytes, self.limit)
        if free.peak_bytes <= self.budget_bytes:
            return free
        if free.recomputed:
            return plain
        # It runs what the program as it is runs, and what is proven of its cost holds for that, too.
        return replace(plain, status=free.status, certificate=free.certificate)

    def _finished(self, plan: Plan) -> Plan:
        return replace(plan, budget_bytes=self.budget_bytes, solve_seconds=now() - self.began)


class _Offers:
    """Asks a policy for plans until the prediction is within the budget and close to it.

    A policy counts buffers; the prediction also knows what XLA overwrites in place and that temporaries may
    lie in the memory of results that are not written yet. The difference changes little from plan to plan, so the
    difference of the last plan corrects the next request.
    """

    def __init__(self, graph: Graph, policy: BudgetPolicy, barriers: bool) -> None:
        self.graph = graph
        self.policy = policy
        self.barriers = barriers
        self.best: Plan | None = None
        self.smallest: Plan | None = None
        self._made: dict[Decision, Plan] = {}

    def run(self, aim_bytes: int, limit: TimeLimit) -> None:
        """Fills `best` and `smallest`; `aim_bytes` is what the prediction should come close to."""
        with limit.running():
            self._run(aim_bytes, limit)

    def _run(self, aim_bytes: int, limit: TimeLimit) -> None:
        target, low, high = aim_bytes, 0, math.inf
        last, times = None, 1  # the schedule that came last, and how far to go from it
        for attempt in range(2 * ATTEMPTS):
            if attempt >= ATTEMPTS and (self.best is not None or times == 1):
                return
            if out_of_time() or (self.best is not None and interrupted()):
                return
            try:
                plan = self.ask(target, aim_bytes, limit)
            except BudgetError as error:
                low = max(low, target + 1)
                target = max(round(target * STEP), error.smallest_peak_bytes or 0)
            else:
                over = plan.peak_bytes - aim_bytes
                # A plan that comes again is what there is for targets around: where nothing else was found in small
                # steps, the next is twice as far away.
                is_again, last = plan.schedule is last, plan.schedule
                times = 2 * times if is_again and attempt >= ATTEMPTS - 1 else 1
                if over > 0:
                    high = min(high, target)
                    target = min(target - times * over, int(target * aim_bytes / plan.peak_bytes))
                elif -over > SLACK * aim_bytes and plan.recompute_flops > 0:
                    low = max(low, target)
                    target -= over
                else:
                    return
            if not low < target < high:
                if not low + 1 < high < math.inf:
                    return
                target = (low + int(high)) // 2  # too small before and too large after it

    def ask(self, target: int, aim_bytes: int, limit: TimeLimit) -> Plan:
        """Returns the policy's plan for a target of buffers, noted as best if its prediction is within the aim.

        Raises:
            BudgetError: the policy's own.
        """
        plan = self._plan_of(limit.decide_within(self.graph, target))
        if plan.peak_bytes <= aim_bytes:
            if self.best is None or program_cost(plan) < program_cost(self.best):
                self.best = plan
        elif self.smallest is None or plan.peak_bytes < self.smallest.peak_bytes:
            self.smallest = plan
        return plan

    def _plan_of(self, decision: Decision) -> Plan:
        policy = self.policy
        decided = replace(decision, status="heuristic", certificate=None, notes=())
        if decided not in self._made:
            self._made[decided] = plan_from_saved(
                self.graph,
                decided,
                policy_name=policy.name,
                options=describe_options(policy),
                barriers=self.barriers,
                device=policy.device,
            )
        return replace(
            self._made[decided],
            status=decision.status,
            certificate=decision.certificate,
            notes=decision.notes,
        )


def program_cost(plan: Plan) -> float:
    """What the policy says the plan costs; recomputation if it has no certificate."""
    return plan.recompute_seconds if plan.certificate is None else float(plan.certificate.value)
