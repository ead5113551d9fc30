"""Planning under a budget: bytes that the peak of everything but arguments and results may take.

A policy that can plan within a budget has a method `decide_within`; any other is planned as it is and
checked. What a policy believes of memory is a model on buffers; what a plan promises is the prediction for its
finished schedule. `plan_within` closes that gap: it asks for less until the prediction fits.

A loop's body keeps its values once per iteration. Its plan is one of several *options*, from the least memory
to the least work; a session first takes the least for every loop, plans what is outside, and spends what is
left of the budget on the loops that gain the most per byte (a multiple-choice knapsack).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from remat.devices import get_device
from remat.errors import BudgetError
from remat.graph import Graph
from remat.memory import peak_bytes, predict
from remat.plan import LoopPlan, Plan, stored_bytes
from remat.planning import make_plan, plan_from_saved
from remat.policies import Full, MinCut, Policy
from remat.policies._segments import sequence_of_saved
from remat.policies.base import BudgetPolicy, Decision, describe_options, required_saves
from remat.policies.condense import Condensed, condense
from remat.policies.problem import replay

__all__ = [
    "BodyOption",
    "BudgetSession",
    "Limit",
    "body_options",
    "choose_options",
    "held",
    "limit_bytes",
    "plan_within",
    "too_small",
]

Limit = int | float

_ATTEMPTS = 5
# The prediction's median error: plans leave so much of the budget, if there is one that does.
_MARGIN = 0.03
# A plan whose prediction uses less than this share of the budget is asked for again with more.
_SLACK = 0.05
# A request that the policy cannot meet is raised by this factor: buffers may count for more than they take.
_STEP = 1.1
_ROUNDS = 6
_HOPE = 1.05
_FEW_COMBINATIONS = 4096
# An option that takes more memory has to be at least this much faster.
_WORTHWHILE = 0.97


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
        return held(plan, budget_bytes)
    start = time.perf_counter()
    offered = _Offers(graph, policy, budget_bytes, barriers)
    offered.run(int((1 - _MARGIN) * budget_bytes))
    if offered.best is None:  # nothing leaves the margin
        offered.run(budget_bytes)
    if offered.best is None:
        if offered.smallest is None:
            assert offered.error is not None
            raise offered.error
        raise too_small(offered.smallest, budget_bytes)
    return replace(
        offered.best, budget_bytes=budget_bytes, solve_seconds=time.perf_counter() - start
    )


class _Offers:
    """Asks a policy for plans until the prediction is within the budget and close to it.

    A policy counts buffers; the prediction also knows what XLA overwrites in place and that temporaries may
    lie in the memory of results that are not written yet. The difference changes little from plan to plan, so the
    difference of the last plan corrects the next request.
    """

    def __init__(
        self, graph: Graph, policy: BudgetPolicy, budget_bytes: int, barriers: bool
    ) -> None:
        self.graph = graph
        self.policy = policy
        self.budget_bytes = budget_bytes
        self.barriers = barriers
        self.best: Plan | None = None
        self.smallest: Plan | None = None
        self.error: BudgetError | None = None

    def run(self, aim_bytes: int) -> None:
        """Fills `best`, `smallest` and `error`; `aim_bytes` is what the prediction should come close to."""
        target, low, high = aim_bytes, 0, math.inf
        self.error = None
        for _ in range(_ATTEMPTS):
            try:
                plan = self._ask(target, aim_bytes)
            except BudgetError as error:
                self.error = self.error or error
                low = max(low, target + 1)
                target = max(round(target * _STEP), error.smallest_peak_bytes or 0)
            else:
                over = plan.peak_bytes - aim_bytes
                if over > 0:
                    high = min(high, target)
                    target = min(target - over, int(target * aim_bytes / plan.peak_bytes))
                elif -over > _SLACK * aim_bytes and plan.recompute_flops > 0:
                    low = max(low, target)
                    target -= over
                else:
                    return
            if not low < target < high:
                return

    def _ask(self, target: int, aim_bytes: int) -> Plan:
        plan = plan_from_saved(
            self.graph,
            self.policy.decide_within(self.graph, target),
            policy_name=self.policy.name,
            options=describe_options(self.policy),
            barriers=self.barriers,
            device=getattr(self.policy, "device", "h200"),
        )
        if plan.peak_bytes <= aim_bytes:
            if self.best is None or _program_cost(plan) < _program_cost(self.best):
                self.best = plan
        elif self.smallest is None or plan.peak_bytes < self.smallest.peak_bytes:
            self.smallest = plan
        return plan


def _program_cost(plan: Plan) -> float:
    """What the policy says the plan costs; recomputation if it has no certificate."""
    return plan.recompute_seconds if plan.certificate is None else float(plan.certificate.value)


def held(plan: Plan, limit: Limit) -> Plan:
    """Returns the plan with its budget written on it.

    Raises:
        BudgetError: its predicted peak is above the limit.
    """
    budget_bytes = limit_bytes(limit, plan.baseline_peak_bytes)
    if plan.peak_bytes > budget_bytes:
        raise too_small(plan, budget_bytes)
    return replace(plan, budget_bytes=budget_bytes)


def too_small(plan: Plan, budget_bytes: int) -> BudgetError:
    """Returns the error that says how far a plan is above a budget."""
    advice = (
        ""
        if plan.policy_name == "ilp"
        else ", or try remat_policy='ilp', which looks for the smallest"
    )
    return BudgetError(
        f"policy {plan.policy_name!r} does not meet the budget of {budget_bytes:,} bytes: its plan peaks at "
        f"{plan.peak_bytes:,} bytes (predicted; {plan.baseline_peak_bytes:,} without "
        f"rematerialization). Smallest peak found: {plan.peak_bytes:,} bytes. {_what_forces(plan)}"
        f"Raise the budget{advice}.",
        smallest_peak_bytes=plan.peak_bytes,
    )


def _what_forces(plan: Plan) -> str:
    """The largest values that are alive at the predicted peak."""
    held = predict(plan.graph, plan.schedule, loops=plan.loops).at_peak[:4]
    named = [
        f"{x.label} of {x.op} ({x.nbytes:,} bytes)" if x.op else f"{x.label} ({x.nbytes:,} bytes)"
        for x in held
    ]
    return f"The largest values alive at the peak: {', '.join(named)}. " if named else ""


@dataclass(frozen=True)
class BodyOption:
    """One way to plan a loop's body.

    Attributes:
        plan: the body's plan.
        seconds: roofline estimate of what it costs per iteration: recomputation, and writing and reading what
            is kept.
        saved_bytes: kept per iteration.
        fixed_bytes: kept once, because it is the same in every iteration.
    """

    plan: Plan
    seconds: float
    saved_bytes: int
    fixed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What all iterations keep, and what one of them needs beside it."""
        trips = self.plan.graph.multiplicity
        working = self.plan.peak_bytes if trips > 1 else 0  # without a loop the peak has all of it
        return trips * self.saved_bytes + self.fixed_bytes + working


def body_options(graph: Graph, device: str = "h200") -> list[BodyOption]:
    """Returns plans of a loop's body, the least memory first; each costs less time than the one before.

    They are minimum cuts at several prices of memory, with and without recomputing matmuls and random bits, and
    what is left of these as one value after the other is dropped.
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
    prices = _Prices(condense(graph, device=device), device)
    found = {}
    for policy in policies:
        decision = policy.decide(graph)
        found[decision.saved] = (prices(decision.saved), policy)
    for saved, (price, policy) in list(found.items()):
        for less in prices.dropping(saved, price):
            found.setdefault(less, (prices(less), policy))
    options = []
    for saved, ((saved_bytes, seconds), policy) in found.items():
        if any(x < 0.9 * saved_bytes and y <= seconds for (x, y), _ in found.values()):
            continue  # another one keeps much less and is faster
        plan = plan_from_saved(
            graph,
            Decision(saved),
            policy_name=policy.name,
            options=describe_options(policy),
            barriers=False,
            device=device,
        )
        options.append(BodyOption(plan, seconds, saved_bytes, prices.fixed_bytes(saved)))
    best: list[BodyOption] = []
    for option in sorted(options, key=lambda o: (o.total_bytes, o.seconds)):
        if not best or option.seconds < _WORTHWHILE * best[-1].seconds:
            best.append(option)
    return best


class _Prices:
    """Prices what a loop's body keeps: bytes per iteration, and seconds of recomputation and of traffic."""

    def __init__(self, condensed: Condensed, device: str) -> None:
        self.condensed = condensed
        graph = condensed.graph
        self.varying = frozenset(range(len(graph.values))) - graph.fixed - graph.alive_anyway
        self.carried = frozenset(condensed.graph.carried) & frozenset(condensed.graph.inputs)
        self.bandwidth = get_device(device).memory_bytes_per_second

    def __call__(self, saved: frozenset[int]) -> tuple[int, float]:
        """Kernels that run again, and the bytes kept, written once and read once."""
        graph, problem = self.condensed.graph, self.condensed.problem
        sequence = sequence_of_saved(problem, self.condensed.forward_nodes(saved))
        held = (saved & self.varying) | self._carried(saved)
        saved_bytes = sum(stored_bytes(graph.values[v]) for v in held)
        moved = 2 * saved_bytes / self.bandwidth
        return saved_bytes, replay(problem, sequence).extra_cost + moved

    def fixed_bytes(self, saved: frozenset[int]) -> int:
        """Bytes of what is kept and the same in every iteration."""
        graph = self.condensed.graph
        fixed = saved - self.varying - graph.alive_anyway - graph.sources
        return sum(stored_bytes(graph.values[v]) for v in fixed)

    def _carried(self, saved: frozenset[int]) -> frozenset[int]:
        """The carried inputs that the backward pass then reads: they are kept once per iteration, too."""
        graph = self.condensed.graph
        found: set[int] = set()
        seen: set[int] = set()
        todo = [v for v in graph.backward_reads if v not in saved]
        while todo:
            value = todo.pop()
            if value in seen or value in saved:
                continue
            seen.add(value)
            producer = graph.values[value].producer
            if producer is not None:
                todo += graph.ops[producer].inputs
            elif value in self.carried:
                found.add(value)
        return frozenset(found)

    def dropping(self, saved: frozenset[int], price: tuple[int, float]) -> Iterator[frozenset[int]]:
        """Drops one kept value after the other, each time the one with the most bytes per second."""
        graph = self.condensed.graph
        while True:
            best: tuple[float, int, frozenset[int]] | None = None
            for value in sorted(saved & self.varying):
                producer = graph.values[value].producer
                if producer is None or not graph.ops[producer].recomputable:
                    continue
                less = required_saves(graph, saved - {value})
                saved_bytes, seconds = self(less)
                if saved_bytes < price[0]:
                    rate = (seconds - price[1]) / (price[0] - saved_bytes)
                    best = min(best or (math.inf, 0, less), (rate, value, less))
            if best is None:
                return
            saved = best[2]
            price = self(saved)
            yield saved


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

    def finish(self, plan: Plan) -> Plan:
        """The session holds the whole function to the budget."""
        return plan

    def confirm(self, loops: tuple[LoopPlan, ...]) -> None:
        """Whatever the loops were planned to is right."""
        del loops

    def child(self, path: str) -> _Body:
        """A loop inside the body keeps the least: it runs once per iteration of this one."""
        del path
        return _Body(self.device)


class BudgetSession:
    """Plans one function, its loops included, within a limit.

    Round one keeps the least in every loop and, outside of loops, what the minimum cut keeps. If that fits, what
    is left of the limit is spent on the loops; if it does not, what is outside is planned within what the loops
    leave. Every later round checks the prediction for the whole and excludes what did not fit.

    Args:
        policy: plans what is outside of loops.
        limit: bytes, or a fraction of the peak without rematerialization.
    """

    def __init__(self, policy: BudgetPolicy, limit: Limit) -> None:
        self.policy = policy
        self.limit = limit
        self.device = str(getattr(policy, "device", "h200"))
        self.bodies: dict[str, _Body] = {}
        self.rounds = 0
        self.within: int | None = None  # bytes for what is outside of loops, None for no limit
        self.least: Plan | None = None  # of the first round
        self.excluded: set[tuple[int, ...]] = set()
        self.fitting: tuple[int, ...] | None = None  # the last choice whose prediction fits
        self.correction = 0

    def begin(self) -> BudgetSession:
        """Returns itself: a session is used once."""
        return self

    def child(self, path: str) -> _Body:
        """Returns the planner of a loop's body."""
        return self.bodies.setdefault(path, _Body(self.device))

    def confirm(self, loops: tuple[LoopPlan, ...]) -> None:
        """Whatever the loops were planned to is right."""
        del loops

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans what is outside of the loops."""
        if self.within is not None:
            assert self.least is not None
            try:
                return plan_within(graph, self.policy, self.within, barriers=barriers)
            except BudgetError as error:
                limit = limit_bytes(self.limit, self.least.baseline_peak_bytes)
                raise too_small(self.least, limit) from error
        if not self.bodies:
            limit = limit_bytes(self.limit, peak_bytes(graph))
            return plan_within(graph, self.policy, limit, barriers=barriers)
        plan = make_plan(graph, MinCut(device=self.device), barriers=barriers)
        return replace(
            plan,
            policy_name=self.policy.name,
            options=describe_options(self.policy),
            status="heuristic",  # the cut's proof says nothing of the loops
            certificate=None,
            notes=("outside of loops: a minimum cut", *plan.notes),
        )

    def again(self, plan: Plan) -> bool:
        """Looks at a finished plan, its loops included; True asks to plan once more."""
        if not self.bodies:
            return False
        limit = limit_bytes(self.limit, plan.baseline_peak_bytes)
        if self.least is None:
            self.least = plan
        if self.least.peak_bytes <= (1 - _MARGIN) * limit:
            limit = int((1 - _MARGIN) * limit)
        self.rounds += 1
        fits = plan.peak_bytes <= limit
        if self.within is not None:  # the loops keep the least, and the rest has to give
            missing = plan.peak_bytes - limit
            self.within -= missing
            return not fits and self.within > 0 and self.rounds <= _ROUNDS
        if self.rounds == 1:
            if fits:
                return self._choose(limit)
            self.within = limit - (plan.peak_bytes - _outside_peak(plan))
            if self.within <= 0:
                raise too_small(plan, limit)
            return True
        choice = self._choice()
        if fits:
            self.fitting = choice
        else:
            self.excluded.add(choice)
        # The estimate adds what the options keep to a peak that may lie elsewhere: learn by how much it is off.
        self.correction = plan.peak_bytes - self._estimate(choice)
        return self._choose(limit)

    def _choice(self) -> tuple[int, ...]:
        return tuple(body.chosen for body in self.bodies.values())

    def _menus(self) -> tuple[list[list[BodyOption]], list[int]]:
        assert self.least is not None
        lengths = {x.path: x.length for x in self.least.loops}
        return [b.options for b in self.bodies.values()], [lengths.get(p, 0) for p in self.bodies]

    def _estimate(self, choice: tuple[int, ...]) -> int:
        assert self.least is not None
        return self.least.peak_bytes + _above_least(*self._menus(), choice)

    def _choose(self, limit: int) -> bool:
        """Takes the fastest options that should fit; False if they are those already taken."""
        assert self.least is not None
        before = self._choice()
        menus, trips = self._menus()
        if self.rounds < _ROUNDS:
            # With a choice in hand the estimate may be a little off: what does not fit is excluded.
            hoped = limit if self.fitting is None else int(_HOPE * limit)
            slack = hoped - self.least.peak_bytes - self.correction
            chosen = choose_options(menus, trips, slack, self.excluded)
        else:
            chosen = tuple(0 for _ in menus)
        if self.fitting is not None and _seconds(menus, trips, self.fitting) <= _seconds(
            menus, trips, chosen
        ):
            chosen = self.fitting
        for body, index in zip(self.bodies.values(), chosen, strict=True):
            body.chosen = index
        return chosen != before

    def finish(self, plan: Plan) -> Plan:
        """Holds the finished plan to the limit.

        Raises:
            BudgetError: the predicted peak is above it.
        """
        return held(plan, self.limit)


def _outside_peak(plan: Plan) -> int:
    """The predicted peak of what is outside of loops alone."""
    return peak_bytes(plan.graph, plan.schedule)


def choose_options(
    menus: Sequence[Sequence[BodyOption]],
    trips: Sequence[int],
    slack_bytes: int,
    excluded: Collection[tuple[int, ...]] = (),
) -> tuple[int, ...]:
    """Returns for every loop the option to take: the least time for at most `slack_bytes` above the first options.

    What a loop keeps counts once per trip, its working memory once, and only the largest of all loops. Exact
    while there are few loops; with more the working memory of every loop counts.

    Args:
        menus: options of every loop, the first keeps the least.
        trips: of every loop.
        slack_bytes: what may be spent above the first options; if nothing fits these are returned.
        excluded: choices not to make.
    """

    if math.prod(len(menu) for menu in menus) <= _FEW_COMBINATIONS:
        best = (math.inf, tuple(0 for _ in menus))
        for choice in itertools.product(*(range(len(menu)) for menu in menus)):
            if choice not in excluded and _above_least(menus, trips, choice) <= slack_bytes:
                best = min(best, (_seconds(menus, trips, choice), choice))
        return best[1]
    front: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for loop, menu in enumerate(menus):
        grown = [
            (
                used
                + trips[loop] * (option.saved_bytes - menu[0].saved_bytes)
                + (option.fixed_bytes - menu[0].fixed_bytes)
                + max(0, option.plan.peak_bytes - menu[0].plan.peak_bytes),
                seconds + trips[loop] * option.seconds,
                (*choice, index),
            )
            for used, seconds, choice in front
            for index, option in enumerate(menu)
        ]
        front = []
        for entry in sorted(grown):
            if entry[0] <= slack_bytes and (not front or entry[1] < front[-1][1]):
                front.append(entry)
        if not front:
            return tuple(0 for _ in menus)
    allowed = [entry[2] for entry in front if entry[2] not in excluded]
    return allowed[-1] if allowed else tuple(0 for _ in menus)


def _above_least(
    menus: Sequence[Sequence[BodyOption]], trips: Sequence[int], choice: Sequence[int]
) -> int:
    """Bytes that a choice takes above the first options."""
    options = [menu[index] for menu, index in zip(menus, choice, strict=True)]
    least = [menu[0] for menu in menus]
    kept = sum(
        n * (option.saved_bytes - first.saved_bytes) + option.fixed_bytes - first.fixed_bytes
        for n, option, first in zip(trips, options, least, strict=True)
    )
    working = max((option.plan.peak_bytes for option in options), default=0)
    return kept + max(0, working - max((first.plan.peak_bytes for first in least), default=0))


def _seconds(
    menus: Sequence[Sequence[BodyOption]], trips: Sequence[int], choice: Sequence[int]
) -> float:
    return sum(n * menu[index].seconds for n, menu, index in zip(trips, menus, choice, strict=True))
