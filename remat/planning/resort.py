"""What a planning within a budget falls back on: the program as it is, and what other policies make. No jax.

Keeping everything is a candidate of every policy: a program that needs no plan is never refused. The budget's
fraction and the candidate are judged by the same prediction, so a fraction of 1.0 is always met. Policies that look
for any plan that fits (`BudgetPolicy.falls_back`: `ilp`, `monet`, `auto`) also fall back on what the quick
policies make; the published algorithms stay what they are. None of these candidates depends on the budget, so that
what an error names as the smallest peak can be planned for.

Without a budget a policy says what takes the place of a plan that is of no use (`Policy.instead`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from remat.core.deadline import out_of_time
from remat.core.errors import BudgetError
from remat.core.graph import Alternatives, Graph
from remat.memory.predict import predict
from remat.planning.make import plan_from_saved
from remat.planning.numbers import ALIKE_PEAK
from remat.planning.protocol import Planner, SteadyPlanner
from remat.plans.plan import Plan
from remat.policies import Echo, Full, MinCut, Policy, Revolve, Sublinear, Unchanged
from remat.policies.base import BudgetPolicy, Decision, describe_options, largest_named
from remat.policies.buffers.condense import condense
from remat.policies.buffers.within import smallest_known

__all__ = [
    "CheckedSession",
    "Limit",
    "UnchangedPlanner",
    "held",
    "limit_bytes",
    "resorts",
    "too_small",
    "unchanged_plan",
    "useful_plan",
]

Limit = int | float


def limit_bytes(limit: Limit, baseline_peak_bytes: int) -> int:
    """Returns a limit in bytes; a float is a fraction of the peak without rematerialization."""
    return int(limit * baseline_peak_bytes) if isinstance(limit, float) else limit


def unchanged_plan(graph: Graph, policy: Policy) -> Plan:
    """Returns the plan that keeps everything as JAX keeps it, under the policy's name."""
    return _under_name(graph, policy, Unchanged(), barriers=False)


def useful_plan(graph: Graph, policy: Policy, plan: Plan) -> Plan:
    """Returns a policy's plan, or one that takes the place of a plan that takes no less memory than none.

    That is no plan, or what `Policy.instead` makes: what takes the least, of what moves no more than the policy's
    plan or than none and repeats no more of what is compute-bound. Where nothing is compute-bound, what saves
    something is held against these, too. Asked is only of a loss without planned loops: its backward pass follows
    at once, so that its own peak is all that a plan can save. What a block keeps waits for the blocks behind it.
    """
    others = policy.instead()
    saves = plan.peak_bytes < (1 - ALIKE_PEAK) * plan.baseline_peak_bytes
    has_heavy = any(op.heavy for op in graph.forward_ops())
    if not others or not _is_loss(graph) or (saves and has_heavy):
        return plan
    plans = [plan, unchanged_plan(graph, policy)]
    note = f"{policy.name} itself takes {'more' if saves else 'no less than none'}"
    plans += [_under_name(graph, policy, other, note, barriers=True) for other in others]
    moved = [predict(made.graph, made.schedule).traffic_bytes for made in plans]
    found = [
        (moved_bytes, made)
        for moved_bytes, made in zip(moved, plans, strict=True)
        if moved_bytes <= max(moved[:2])
        and _heavy_flops(made) <= _heavy_flops(plan)
        # A jax.checkpoint policy cannot choose what only the derivative of an operator makes.
        and all(graph.values[entry.value].savable for entry in made.saved)
    ]
    least = min(made.peak_bytes for _, made in found)
    alike = [entry for entry in found if entry[1].peak_bytes <= (1 + ALIKE_PEAK) * least]
    return min(alike, key=lambda entry: entry[0])[1]


def _heavy_flops(plan: Plan) -> int:
    ops = plan.graph.ops
    return sum(
        entry.times * ops[entry.op].flops for entry in plan.recomputed if ops[entry.op].heavy
    )


def _is_loss(graph: Graph) -> bool:
    scalar = all(graph.values[value].shape == () for value in graph.cotangents)
    return scalar and not any(op.loop is not None for op in graph.ops)


def resorts(graph: Graph, policy: BudgetPolicy, *, barriers: bool) -> Iterator[Plan]:
    """Plans that a policy may fall back on, whatever the budget; see the module docstring.

    When the time is up, only the first few are made.
    """
    yield unchanged_plan(graph, policy)
    if not policy.falls_back:
        return
    device, note = policy.device, "nothing else was found that fits"
    for other in (MinCut(device=device), Full()):
        yield _under_name(graph, policy, other, note, barriers=barriers)
    others: tuple[Policy, ...] = (
        MinCut(device=device, heavy="batched"),
        MinCut(device=device, heavy="roofline", memory_weight=8),
        Echo(),
        Sublinear(device=device),
        Revolve(device=device),
        _Smallest(device),
    )
    for other in others:
        if out_of_time():
            return
        yield _under_name(graph, policy, other, note, barriers=barriers)


@dataclass(frozen=True)
class _Smallest(Policy):
    """What takes the fewest bytes of buffers."""

    device: str = "h200"
    name: ClassVar[str] = "smallest"

    def decide(self, graph: Graph) -> Decision:
        """Returns the decision of `smallest_known`."""
        return smallest_known(condense(graph, device=self.device))


def _under_name(
    graph: Graph, policy: Policy, other: Policy, why: str = "", *, barriers: bool
) -> Plan:
    """Plans with another policy; why so is in the notes, but for no plan at all, which needs no reason."""
    decision = other.decide(graph)
    notes = decision.notes if isinstance(other, Unchanged) else (f"as {other.name}: {why}",)
    return plan_from_saved(
        graph,
        replace(decision, status="heuristic", certificate=None, notes=notes),
        policy_name=policy.name,
        options=describe_options(policy),
        barriers=barriers,
        device=policy.device,
    )


def held(plan: Plan, limit: Limit) -> Plan:
    """Returns the plan with its budget written on it.

    Raises:
        BudgetError: its predicted peak is above the limit.
    """
    budget_bytes = limit_bytes(limit, plan.baseline_peak_bytes)
    if plan.peak_bytes > budget_bytes:
        raise too_small(plan, budget_bytes)
    return replace(plan, budget_bytes=budget_bytes)


def too_small(plan: Plan, budget_bytes: int, *, seconds: float | None = None) -> BudgetError:
    """Returns the error that says how far a policy is above a budget.

    Args:
        plan: the policy's plan with the smallest peak.
        budget_bytes: what it should have fitted in.
        seconds: the limit that ended the planning, None if none did.
    """
    advice = (
        "Raise the budget"
        if plan.policy_name in ("ilp", "monet", "auto")
        else "Raise the budget, or try remat_policy='ilp', which looks for the smallest"
    )
    ended = (
        ""
        if seconds is None
        else f"The limit of {seconds:g} seconds ended the planning: more of them may find a plan. "
    )
    return BudgetError(
        f"policy {plan.policy_name!r} does not meet the budget of {budget_bytes:,} bytes: its plan peaks at "
        f"{plan.peak_bytes:,} bytes (predicted; {plan.baseline_peak_bytes:,} without rematerialization). "
        f"Smallest peak found by {plan.policy_name!r}: {plan.peak_bytes:,} bytes. "
        f"{ended}{_what_forces(plan)}{advice}.",
        smallest_peak_bytes=plan.peak_bytes,
    )


def _what_forces(plan: Plan) -> str:
    """The largest values that are alive at the predicted peak."""
    found = predict(plan.graph, plan.schedule, loops=plan.loops).at_peak
    named = largest_named((x.label, x.op, x.nbytes) for x in found)
    return f"The largest values alive at the peak: {named}. " if named else ""


@dataclass(frozen=True)
class UnchangedPlanner(SteadyPlanner):
    """Plans a function and its loops to what they are without rematerialization.

    Attributes:
        policy: under whose name.
    """

    policy: Policy

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Keeps everything."""
        del barriers
        return unchanged_plan(graph, self.policy)

    def child(self, path: str) -> UnchangedPlanner:
        """Loops are no different."""
        del path
        return self


class CheckedSession(SteadyPlanner):
    """Plans as a planner that knows of no budget, and checks what comes out.

    Where that is above the limit, the program as it is takes its place if it fits.

    Args:
        inner: plans without a limit.
        policy: what it plans with.
        limit: bytes, or a fraction of the peak without rematerialization.
    """

    def __init__(self, inner: Planner, policy: Policy, limit: Limit) -> None:
        self.inner = inner
        self.limit = limit
        self.plain = UnchangedPlanner(policy)
        self.made: Plan | None = None  # what the policy makes

    @property
    def _planner(self) -> Planner:
        return self.inner if self.made is None else self.plain

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """As the planner."""
        return self._planner.sites(menu)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """As the planner."""
        return self._planner.plan(graph, barriers=barriers)

    def child(self, path: str) -> Planner:
        """As the planner; the budget is that of the whole function."""
        return self._planner.child(path)

    def again(self, plan: Plan) -> bool:
        """Asks for the program as it is where the policy's plan does not fit."""
        if self.made is not None:
            return False
        plan = self.inner.finish(plan)
        if plan.peak_bytes <= limit_bytes(self.limit, plan.baseline_peak_bytes):
            return False
        self.made = plan
        return True

    def finish(self, plan: Plan) -> Plan:
        """Holds the finished plan, its loops included, to the budget.

        Raises:
            BudgetError: neither the policy's plan nor the program as it is fits.
        """
        budget_bytes = limit_bytes(self.limit, plan.baseline_peak_bytes)
        if plan.peak_bytes > budget_bytes and self.made is not None:
            raise too_small(min(self.made, plan, key=lambda p: p.peak_bytes), budget_bytes)
        return held(plan, self.limit)
