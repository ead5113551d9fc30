"""Planning under a budget: bytes that the peak of everything but arguments and results may take.

A policy that can plan within a budget has a method `decide_within`; any other is planned as it is and
checked. What a policy believes of memory is a model on buffers; what a plan promises is the prediction for its
finished schedule. `plan_within` closes that gap: it asks for less until the prediction fits.

A loop's body keeps its values once per iteration. Its plan is one of several *options*, from the least memory
to the least work; a session first takes the least for every loop, plans what is outside, and spends what is
left of the budget on the loops that gain the most per byte (a multiple-choice knapsack).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from remat.devices import get_device
from remat.errors import BudgetError
from remat.graph import Graph
from remat.plan import LoopPlan, Plan
from remat.planning import make_plan, plan_from_saved
from remat.policies import Full, MinCut, Policy
from remat.policies.base import BudgetPolicy, describe_options

__all__ = [
    "BodyOption",
    "BudgetSession",
    "Limit",
    "body_options",
    "choose_options",
    "hold",
    "limit_bytes",
    "plan_within",
    "too_small",
]

Limit = int | float

_ATTEMPTS = 6
_LOOP_ROUNDS = 4


def limit_bytes(limit: Limit, baseline_peak_bytes: int) -> int:
    """Returns a limit in bytes; a float is a fraction of the peak without rematerialization."""
    return int(limit * baseline_peak_bytes) if isinstance(limit, float) else limit


def plan_within(graph: Graph, policy: Policy, budget_bytes: int, *, barriers: bool = True) -> Plan:
    """Plans a graph so that its predicted peak is at most `budget_bytes`.

    Args:
        graph: a joint graph.
        policy: any policy; one without `decide_within` is planned as it is.
        budget_bytes: bound on `Plan.peak_bytes`.
        barriers: as in `remat.planning.make_plan`.

    Raises:
        BudgetError: no plan that fits was found; the message has the smallest peak found.
    """
    if not isinstance(policy, BudgetPolicy):
        plan = make_plan(graph, policy, barriers=barriers)
        hold(plan, budget_bytes)
        return replace(plan, budget_bytes=budget_bytes)
    target = budget_bytes
    smallest: Plan | None = None
    for _ in range(_ATTEMPTS):
        decision = policy.decide_within(graph, target)
        plan = plan_from_saved(
            graph,
            decision,
            policy_name=policy.name,
            options=describe_options(policy),
            barriers=barriers,
            device=getattr(policy, "device", "h200"),
        )
        if plan.peak_bytes <= budget_bytes:
            return replace(plan, budget_bytes=budget_bytes)
        if smallest is None or plan.peak_bytes < smallest.peak_bytes:
            smallest = plan
        target = min(
            target - (plan.peak_bytes - budget_bytes), int(target * budget_bytes / plan.peak_bytes)
        )
        if target <= 0:
            break
    assert smallest is not None
    raise too_small(smallest, budget_bytes)


def hold(plan: Plan, budget_bytes: int) -> None:
    """Raises BudgetError if a plan's predicted peak is above a budget."""
    if plan.peak_bytes > budget_bytes:
        raise too_small(plan, budget_bytes)


def too_small(plan: Plan, budget_bytes: int) -> BudgetError:
    """Returns the error that says how far a plan is above a budget."""
    return BudgetError(
        f"policy {plan.policy_name!r} does not meet the budget of {budget_bytes:,} bytes: its plan peaks at "
        f"{plan.peak_bytes:,} bytes (predicted; {plan.baseline_peak_bytes:,} without "
        f"rematerialization). Smallest peak found: {plan.peak_bytes:,} bytes. Raise the budget, or "
        "try remat_policy='ilp', which looks for the smallest."
    )


@dataclass(frozen=True)
class BodyOption:
    """One way to plan a loop's body.

    Attributes:
        plan: the body's plan.
        seconds: roofline estimate of what it costs per iteration: recomputation, and writing and reading what
            is kept.
    """

    plan: Plan
    seconds: float

    @property
    def saved_bytes(self) -> int:
        """Bytes kept per iteration."""
        return self.plan.saved_bytes


def body_options(graph: Graph, device: str = "h200") -> list[BodyOption]:
    """Returns plans of a loop's body, the least memory first; each costs less time than the one before.

    They are minimum cuts at several prices of memory, with and without recomputing matmuls and random bits.
    """
    policies: list[Policy] = [Full()]
    for random in ("ban", "cheap"):
        policies += [
            MinCut(device=device, random=random),
            MinCut(device=device, heavy="batched", random=random),
        ]
        policies += [
            MinCut(memory_weight=weight, heavy="roofline", random=random, device=device)
            for weight in (0.25, 1, 3, 8, 20, 60, 1000)
        ]
    bandwidth = get_device(device).memory_bytes_per_second
    found: dict[tuple[int, ...], BodyOption] = {}
    for policy in policies:
        plan = make_plan(graph, policy, barriers=False)
        moved = 2 * plan.saved_bytes / bandwidth
        option = BodyOption(plan, plan.recompute_seconds + moved)
        found.setdefault(plan.saved_values, option)
    best: list[BodyOption] = []
    for option in sorted(found.values(), key=lambda o: (o.saved_bytes, o.seconds)):
        if not best or option.seconds < best[-1].seconds:
            best.append(option)
    return best


@dataclass
class _Body:
    """Plans one loop's body in a session: one of its options."""

    device: str
    menus: dict[str, list[BodyOption]] = field(default_factory=dict)
    options: list[BodyOption] = field(default_factory=list)
    chosen: int = 0

    def begin(self) -> _Body:
        return self

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        del barriers  # a loop separates forward from backward by itself
        # jax traces a body several times (see `Planner.confirm`): the last graph is the one that counts.
        fingerprint = graph.fingerprint()
        if fingerprint not in self.menus:
            self.menus[fingerprint] = body_options(graph, self.device)
        self.options = self.menus[fingerprint]
        return self.options[min(self.chosen, len(self.options) - 1)].plan

    def again(self, plan: Plan) -> bool:
        del plan
        return False

    def check(self, plan: Plan) -> None:
        """The session holds the whole function to the budget."""

    def confirm(self, loops: tuple[LoopPlan, ...]) -> None:
        """Whatever the loops were planned to is right."""
        del loops

    def child(self, path: str) -> _Body:
        """A loop inside the body keeps the least: it runs once per iteration of this one."""
        del path
        return _Body(self.device)


class BudgetSession:
    """Plans one function, its loops included, within a limit.

    Args:
        policy: plans what is outside of loops.
        limit: bytes, or a fraction of the peak without rematerialization.
    """

    def __init__(self, policy: Policy, limit: Limit) -> None:
        self.policy = policy
        self.limit = limit
        self.device = str(getattr(policy, "device", "h200"))
        self.bodies: dict[str, _Body] = {}
        self.rounds = 0
        self.spent_bytes = 0  # on the loops' options
        self.shrink_bytes = 0
        self.floor: Plan | None = None
        self.within: int | None = None

    def begin(self) -> BudgetSession:
        """Returns itself: a session is used once."""
        return self

    def child(self, path: str) -> _Body:
        """Returns the planner of a loop's body."""
        return self.bodies.setdefault(path, _Body(self.device))

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans what is outside of the loops."""
        if not self.bodies and isinstance(self.limit, int):
            return plan_within(graph, self.policy, self.limit, barriers=barriers)
        if self.within is None:
            loose = _without_limit(graph, self.policy, barriers)
            if self.bodies:
                return loose  # `again` knows the whole
            return plan_within(
                graph,
                self.policy,
                limit_bytes(self.limit, loose.baseline_peak_bytes),
                barriers=barriers,
            )
        return plan_within(graph, self.policy, self.within, barriers=barriers)

    def again(self, plan: Plan) -> bool:
        """Looks at a finished plan, its loops included; True asks to plan once more."""
        if not self.bodies:
            return False
        limit = limit_bytes(self.limit, plan.baseline_peak_bytes)
        self.rounds += 1
        if self.rounds == 1:
            if plan.peak_bytes > limit:  # the loops keep the least: the rest has to give
                working = max((x.plan.peak_bytes for x in plan.loops), default=0)
                self.within = limit - working
                if self.within <= 0:
                    raise too_small(plan, limit)
                return True
            return self._spend(plan, limit - plan.peak_bytes)
        if plan.peak_bytes <= limit or self.rounds > _LOOP_ROUNDS:
            if plan.peak_bytes > limit and any(body.chosen for body in self.bodies.values()):
                return self._spend(plan, 0)
            return False
        self.shrink_bytes += plan.peak_bytes - limit
        return self._spend(plan, self.spent_bytes - self.shrink_bytes)

    def _spend(self, plan: Plan, slack_bytes: int) -> bool:
        lengths = {x.path: x.length for x in plan.loops}
        before = {path: body.chosen for path, body in self.bodies.items()}
        menu = {path: self.bodies[path].options for path in lengths if path in self.bodies}
        chosen = choose_options(menu, lengths, max(slack_bytes, 0))
        for path, index in chosen.items():
            self.bodies[path].chosen = index
        if self.rounds == 1:
            self.spent_bytes = slack_bytes
        return before != {path: body.chosen for path, body in self.bodies.items()}

    def confirm(self, loops: tuple[LoopPlan, ...]) -> None:
        """Whatever the loops were planned to is right."""
        del loops

    def check(self, plan: Plan) -> None:
        """Holds the finished plan to the limit.

        Raises:
            BudgetError: the predicted peak is above it.
        """
        hold(plan, limit_bytes(self.limit, plan.baseline_peak_bytes))


def _without_limit(graph: Graph, policy: Policy, barriers: bool) -> Plan:
    plan = make_plan(graph, MinCut(), barriers=barriers)
    return replace(plan, policy_name=policy.name, options=describe_options(policy))


def choose_options(
    menu: Mapping[str, Sequence[BodyOption]], lengths: Mapping[str, int], slack_bytes: int
) -> dict[str, int]:
    """Returns for every loop the option to take: the least time within `slack_bytes` above the first options.

    Exact, by enumerating the Pareto front loop by loop.
    """
    front: list[tuple[int, float, dict[str, int]]] = [(0, 0.0, {})]
    for path, options in menu.items():
        length = lengths[path]
        grown = [
            (
                used + length * (option.saved_bytes - options[0].saved_bytes),
                seconds + length * option.seconds,
                {**chosen, path: index},
            )
            for used, seconds, chosen in front
            for index, option in enumerate(options)
        ]
        grown.sort(key=lambda entry: (entry[0], entry[1]))
        front = []
        for entry in grown:
            if entry[0] <= slack_bytes and (not front or entry[1] < front[-1][1]):
                front.append(entry)
        front = front or [min(grown, key=lambda entry: entry[0])]
    return front[-1][2]
