"""Planning under a budget: bytes that the peak of everything but arguments and results may take.

A policy that can plan within a budget has a method `decide_within`; any other is planned as it is and
checked. What a policy believes of memory is a model on buffers; what a plan promises is the prediction for its
finished schedule. `plan_within` closes that gap: it asks for less until the prediction fits. The policy's time
limit holds for all its requests together (`remat.planning.time_limit`).

A loop's body keeps its values once per iteration, so a session plans a function with loops several times, with
other ways to run the loops (`remat.planning.loops`) and another budget for what is outside, and takes the cheapest
that fits.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from remat.core.deadline import now, out_of_time
from remat.core.errors import BudgetError
from remat.core.graph import Alternatives, Graph
from remat.core.interrupt import ended, interrupted, raise_interrupt, say
from remat.memory.predict import peak_bytes, predict
from remat.planning.loops import (
    BodyOption,
    LoopOption,
    LoopPrices,
    all_kept_bytes,
    body_options,
    choose_options,
    chunk_plan,
    loop_options,
    needed_bytes,
)
from remat.planning.make import make_plan, plan_from_saved
from remat.planning.protocol import NO_CHUNKS, SteadyPlanner
from remat.planning.resort import (
    Limit,
    UnchangedPlanner,
    held,
    limit_bytes,
    resorts,
    too_small,
    unchanged_plan,
)
from remat.planning.time_limit import TimeLimit
from remat.plans.paths import is_rest, whole_of
from remat.plans.plan import LoopPlan, Plan
from remat.policies import Full, MinCut, Policy
from remat.policies.base import BudgetPolicy, Decision, choose_sites, describe_options

__all__ = ["MARGIN", "BudgetSession", "plan_within"]

_ATTEMPTS = 5
MARGIN = 0.03
"""The prediction's usual error: plans leave so much of a budget, if there is one that does."""
# A plan whose prediction uses less than this share of the budget is asked for again with more.
_SLACK = 0.02
# A request that the policy cannot meet is raised by this factor: buffers may count for more than they take.
_STEP = 1.1
_ROUNDS = 6
_HOPE = 1.05
# Costs that differ by less than this share are those of equally good plans.
_ALIKE = 0.001
_NO_LIMIT = 1 << 62  # bytes
_INTERRUPTED = "interrupted: the best plan so far"


def plan_within(
    graph: Graph,
    policy: Policy,
    budget_bytes: int,
    *,
    barriers: bool = True,
    limit: TimeLimit | None = None,
    margin: float = MARGIN,
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
        return _Within(graph, limit, budget_bytes, barriers, margin).plan()


class _Within:
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

    def plan(self) -> Plan:
        """Returns the plan.

        Raises:
            BudgetError: nothing fits.
        """
        plan = self.asked() or self.resorted()
        if plan is None:
            raise self.refusal()
        return plan

    def asked(self) -> Plan | None:
        """Returns what the policy makes that fits, or the program as it is if that fits."""
        plain = unchanged_plan(self.graph, self.policy)
        if plain.peak_bytes <= self.budget_bytes:
            return self._finished(self._freely(plain))
        if self.margin:  # half of the time, so that what fits without it is found, too
            self.offered.run(int((1 - self.margin) * self.budget_bytes), self.limit.part(2))
        if self.offered.best is None:
            self.offered.run(self.budget_bytes, self.limit)
        best = self.offered.best
        return None if best is None else self._finished(best)

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

    def run(self, aim_bytes: int, limit: TimeLimit) -> None:
        """Fills `best` and `smallest`; `aim_bytes` is what the prediction should come close to."""
        with limit.running():
            self._run(aim_bytes, limit)

    def _run(self, aim_bytes: int, limit: TimeLimit) -> None:
        target, low, high = aim_bytes, 0, math.inf
        for _ in range(_ATTEMPTS):
            if out_of_time() or (self.best is not None and interrupted()):
                return
            try:
                plan = self.ask(target, aim_bytes, limit)
            except BudgetError as error:
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
                if not low + 1 < high < math.inf:
                    return
                target = (low + int(high)) // 2  # too small before and too large after it

    def ask(self, target: int, aim_bytes: int, limit: TimeLimit) -> Plan:
        """Returns the policy's plan for a target of buffers, noted as best if its prediction is within the aim.

        Raises:
            BudgetError: the policy's own.
        """
        decision = limit.decide_within(self.graph, target)
        policy = self.policy
        plan = plan_from_saved(
            self.graph,
            decision,
            policy_name=policy.name,
            options=describe_options(policy),
            barriers=self.barriers,
            device=getattr(policy, "device", "h200"),
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


@dataclass
class _Body(SteadyPlanner):
    """Plans one loop in a session: in the way that was chosen, or whole with the least its body can keep."""

    device: str
    policy: BudgetPolicy
    time: TimeLimit
    menus: dict[str, list[BodyOption]] = field(default_factory=dict)
    inner: dict[str, _Body] = field(default_factory=dict)
    graph: Graph | None = None  # of one iteration, of the loop as a whole
    trips: int = 0
    may_cut: bool = False
    chosen: LoopOption | None = None

    def chunk_trips(self, length: int) -> int:
        """Chunks as chosen."""
        self.trips, self.may_cut = length, True
        return self.chosen.chunks[0] if self.chosen and self.chosen.chunks else NO_CHUNKS

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns what the session's policy wants of a loop's body."""
        return choose_sites(self.policy, menu, None)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans a body, or a chunk."""
        del barriers  # a loop separates forward from backward by itself
        if self.chosen is not None and self.chosen.chunks:
            prices = LoopPrices(self.chosen.body.plan.graph, self.device)
            return chunk_plan(graph, prices, self.chosen.chunks[0])
        self.graph, self.trips = graph, graph.multiplicity
        if self.chosen is not None:
            return _applied(self.chosen.body, graph, self.device)
        return self.bodies[0].plan

    @property
    def bodies(self) -> list[BodyOption]:
        """Options of the body, of the graph seen last: jax traces a body several times."""
        assert self.graph is not None
        fingerprint = self.graph.fingerprint()
        if fingerprint not in self.menus:
            with self.time.running():
                self.menus[fingerprint] = body_options(self.graph, self.device)
        return self.menus[fingerprint]

    def options(self) -> list[LoopOption]:
        """Ways to run the loop."""
        may_repeat = self.may_cut and self._may_repeat()
        return loop_options(self.bodies, self.trips, may_repeat=may_repeat, device=self.device)

    def _may_repeat(self) -> bool:
        """Whether an iteration may run again: nothing in it may not, nor in the loops inside."""
        if self.graph is None:
            return False
        alone = (op for op in self.graph.forward_ops() if op.loop is None)
        # Repeated as a whole, an iteration decides anew for all that it makes anew.
        return all(op.recomputable or op.decision for op in alone) and all(
            body._may_repeat() for body in self.inner.values() if body.graph is not None
        )

    def child(self, path: str) -> SteadyPlanner:
        """The loop of a chunk; a loop inside the body keeps the least: it runs once per iteration of this one."""
        if self.chosen is not None and self.chosen.chunks:
            chunks = () if is_rest(path) else self.chosen.chunks[1:]
            return _InChunk(self.chosen.body, chunks, self.device, self.policy, self.time)
        return self.inner.setdefault(path, _Body(self.device, self.policy, self.time))


@dataclass(frozen=True)
class _InChunk(SteadyPlanner):
    """Plans the loop of a chunk, or the iterations that are left over, with an option made for the whole loop."""

    body: BodyOption
    chunks: tuple[int, ...]
    device: str
    policy: BudgetPolicy
    time: TimeLimit

    def chunk_trips(self, length: int) -> int:
        """Chunks of the chunk."""
        del length
        return self.chunks[0] if self.chunks else NO_CHUNKS

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns what the session's policy wants of a loop's body."""
        return choose_sites(self.policy, menu, None)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans a body, or a chunk."""
        del barriers
        if self.chunks:
            prices = LoopPrices(self.body.plan.graph, self.device)
            return chunk_plan(graph, prices, self.chunks[0])
        return _applied(self.body, graph, self.device)

    def child(self, path: str) -> SteadyPlanner:
        """As `_Body.child`."""
        if not self.chunks:
            return _Body(self.device, self.policy, self.time)
        chunks = () if is_rest(path) else self.chunks[1:]
        return replace(self, chunks=chunks)


def _applied(option: BodyOption, graph: Graph, device: str) -> Plan:
    """The plan of a body as an option has it, for another number of iterations."""
    made = option.plan
    if graph.fingerprint() == made.graph.fingerprint():
        return made
    if not _is_body_of(option, graph):
        # jax traces bodies on the way to the one that counts; `_as_meant` looks at the last.
        return make_plan(graph, Full(), barriers=False)
    return plan_from_saved(
        graph,
        Decision(frozenset(made.saved_values), made.status, made.certificate, made.notes),
        policy_name=made.policy_name,
        options=made.options,
        barriers=False,
        device=device,
    )


def _is_body_of(option: BodyOption, graph: Graph) -> bool:
    """Whether a graph is that of an option, for any number of iterations."""
    made = option.plan.graph
    return replace(graph, multiplicity=made.multiplicity).fingerprint() == made.fingerprint()


def _as_meant(option: LoopOption, path: str, loops: tuple[LoopPlan, ...]) -> bool:
    """Whether the finished plan of a loop, and that of what is left over, is the one chosen."""

    def ends(found: tuple[LoopPlan, ...], path: str, chunks: tuple[int, ...]) -> list[Plan]:
        plans: list[Plan] = []
        for entry in found:
            if entry.path == path and chunks:
                plans += ends(entry.plan.loops, "scan0", chunks[1:])
            elif whole_of(entry.path) == path:
                plans.append(entry.plan)
        return plans

    return all(
        _is_body_of(option.body, plan.graph) and plan.saved_values == option.body.plan.saved_values
        for plan in ends(loops, path, option.chunks)
    )


@dataclass(frozen=True)
class _Setting:
    """What one round plans with.

    Attributes:
        choice: of every loop the index of its option, None for whole loops with the least their bodies can keep.
        within: bytes for what is outside of loops, None for no limit.
        keeps_least: whether without a limit nothing outside of loops is kept, instead of what a minimum cut keeps.
        unchanged: whether everything is kept, in loops, too.
    """

    choice: tuple[int, ...] | None = None
    within: int | None = None
    keeps_least: bool = False
    unchanged: bool = False


_Search = Generator[_Setting, Plan | None, None]


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
    """

    def __init__(self, policy: BudgetPolicy, limit: Limit, margin: float = MARGIN) -> None:
        self.policy = policy
        self.limit = limit
        self.margin = margin
        self.time = TimeLimit(policy)
        self.device = str(getattr(policy, "device", "h200"))
        self.bodies: dict[str, _Body] = {}
        self.least: Plan | None = None  # of the first round
        self.baseline_peak_bytes = 0  # with loops; 0 until it is known
        self._setting = _Setting()
        self._refused = False
        self._search: _Search | None = None
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
            return _InChunk(chosen.body, (), self.device, self.policy, self.time)
        return self.bodies.setdefault(path, _Body(self.device, self.policy, self.time))

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
            shortlist = getattr(self.policy, "shortlist", None)
            if shortlist is None or self.bodies:
                found = (choose_sites(self.policy, menu, limit),)
            else:
                found = shortlist(menu, limit)
            if self.bodies or (shortlist is None and not found[0]):
                return found[0]
            return self._cheapest_sites(menu, found, limit)

    def _cheapest_sites(
        self, menu: Alternatives, found: Sequence[frozenset[str]], limit: int
    ) -> frozenset[str]:
        # Those that do not depend on the budget fall back on what does not, either.
        steady = {frozenset[str]()}
        if not hasattr(self.policy, "sites_for"):
            steady.add(choose_sites(self.policy, menu, limit))
        planned: dict[frozenset[str], Plan] = {}
        asked: dict[frozenset[str], _Within] = {}
        choices = list(dict.fromkeys((*found, *sorted(steady, key=len, reverse=True))))
        for index, chosen in enumerate(choices):
            if index >= len(found) and planned:
                break
            if ended() and (planned or (out_of_time() and chosen)):
                continue
            say(f"{self.policy.name}: choice {index + 1} of {len(found)} of rewrites")
            part = self.time.part(max(len(found) - index, 1))
            within = _Within(menu.graph(chosen), part, limit, True, self.margin)
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
            chosen: math.inf if plan.certificate is None else _program_cost(plan)
            for chosen, plan in planned.items()
        }
        least = min(costs.values())
        alike = [chosen for chosen, cost in costs.items() if cost <= (1 + _ALIKE) * least]
        if len(alike) == 1:
            return alike[0]
        return min(
            alike, key=lambda c: predict(planned[c].graph, planned[c].schedule).traffic_bytes
        )

    def _resorted(self, asked: dict[frozenset[str], _Within]) -> dict[frozenset[str], Plan]:
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
            return self._within(graph, limit, barriers, self.margin)
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

    def _within(self, graph: Graph, limit: int, barriers: bool, margin: float) -> Plan:
        return plan_within(
            graph, self.policy, limit, barriers=barriers, limit=self.time, margin=margin
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
        return held(plan, self.limit)

    def _settings(self, least: Plan) -> _Search:
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
        rounds = _Rounds(least, self._base(), list(self._menus.values()), list(self._menus))
        if least.peak_bytes <= aim:
            yield from rounds.loops(aim)
        else:
            yield from rounds.nothing_outside(aim)
            yield from rounds.outside(aim, _Setting())
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


class _Rounds:
    """The rounds of a session: what was tried, and what came of it.

    Attributes:
        best: the cheapest setting that fits, None if there is none yet.
        last: the setting planned last.
        smallest: the plan with the smallest peak among those that are planned for every budget.
        smallest_setting: the setting with the smallest peak of all that plan what is outside as it comes.
    """

    def __init__(
        self,
        least: Plan,
        base: list[LoopOption],
        menus: list[list[LoopOption]],
        paths: list[str],
    ) -> None:
        self.base = base
        self.menus = menus
        self.paths = paths
        self.best: _Setting | None = None
        self.best_seconds = math.inf
        self.last = _Setting()
        self.smallest = least
        self.smallest_setting = _Setting()
        self._least_peak_bytes = least.peak_bytes
        self.tried: dict[_Setting, Plan | None] = {}
        # Of the last plan without a limit for what is outside: its peaks beyond what the loops keep, and need.
        self.beside_kept = self.beside_needed = 0
        self._note(_Setting(), least)

    def _note(self, setting: _Setting, plan: Plan | None) -> None:
        self.last = setting
        options = self._options(setting)
        if plan is not None and setting.choice is not None:
            planned = zip(options, self.paths, strict=True)
            if not all(_as_meant(option, path, plan.loops) for option, path in planned):
                plan = None
        self.tried[setting] = plan
        if plan is None or setting.within is not None:
            return
        # What is planned for every budget can be planned for the one that an error names.
        always = setting.choice in (None, self._least_choice())
        if always and plan.peak_bytes < self.smallest.peak_bytes:
            self.smallest = plan
        smaller = plan.peak_bytes < self._least_peak_bytes
        self._least_peak_bytes = min(plan.peak_bytes, self._least_peak_bytes)
        if setting.keeps_least or setting.unchanged:  # say nothing of what loops have beside a cut
            return
        if smaller:
            self.smallest_setting = setting
        found = predict(plan.graph, plan.schedule, loops=plan.loops)
        self.beside_kept = found.outside_peak_bytes - all_kept_bytes(options)
        self.beside_needed = found.loop_peak_bytes - needed_bytes(options)

    def _options(self, setting: _Setting) -> list[LoopOption]:
        if setting.choice is None:
            return self.base
        return [menu[index] for menu, index in zip(self.menus, setting.choice, strict=True)]

    def _try(self, setting: _Setting, limit: int) -> Generator[_Setting, Plan | None, Plan | None]:
        """Plans with a setting, unless that was done; takes it if it fits and is the cheapest."""
        if setting not in self.tried:
            if ended():
                return None
            say(f"loops and what is outside of them, round {len(self.tried) + 1}")
            self._note(setting, (yield setting))
        plan = self.tried[setting]
        if plan is not None and plan.peak_bytes <= limit:
            seconds = self._seconds(setting, plan)
            if seconds < self.best_seconds:
                self.best, self.best_seconds = setting, seconds
        return plan

    def _seconds(self, setting: _Setting, plan: Plan) -> float:
        """What a plan repeats outside of loops, and what the loops cost."""
        inside = sum(entry.length * entry.plan.recompute_seconds for entry in plan.loops)
        return plan.recompute_seconds - inside + sum(o.seconds for o in self._options(setting))

    def loops(self, limit: int) -> Generator[_Setting, Plan | None, None]:
        """Tries the fastest ways to run the loops that should fit, with a minimum cut outside."""
        yield from self._try(_Setting(), limit)
        excluded: set[tuple[int, ...]] = set()
        fitted = self.best is not None
        for _ in range(_ROUNDS - 1):
            # With a setting in hand the estimate may be a little off: what does not fit is excluded.
            hoped = int(_HOPE * limit) if fitted else limit
            choice = choose_options(
                self.menus,
                hoped - self.beside_needed,
                excluded,
                kept_bytes=hoped - self.beside_kept,
            )
            if choice is None:
                break
            setting = _Setting(choice)
            least_outside = self.tried[_Setting()]
            assert least_outside is not None
            seconds = self._seconds(_Setting(), least_outside)
            seconds += sum(o.seconds for o in self._options(setting))
            seconds -= sum(o.seconds for o in self.base)
            if seconds >= self.best_seconds:
                break
            excluded.add(choice)
            plan = yield from self._try(setting, limit)
            fitted = plan is not None and plan.peak_bytes <= limit
        if self.best is None:
            yield from self._try(_Setting(self._least_choice()), limit)

    def _least_choice(self) -> tuple[int, ...]:
        return tuple(0 for _ in self.menus)

    def nothing_outside(self, limit: int) -> Generator[_Setting, Plan | None, None]:
        """Tries to keep nothing outside of loops, and the least in them."""
        yield from self._try(_Setting(keeps_least=True), limit)

    def outside(self, limit: int, setting: _Setting) -> Generator[_Setting, Plan | None, None]:
        """Plans what is outside within what the loops of a setting leave."""
        made = self.tried[setting]
        if made is None:
            return
        within = limit - (made.peak_bytes - _outside_peak(made))
        for _ in range(_ROUNDS):
            if within <= 0:
                return
            plan = yield from self._try(replace(setting, within=within), limit)
            if plan is None or plan.peak_bytes <= limit:
                return
            within -= plan.peak_bytes - limit

    def unchanged(self) -> Generator[_Setting, Plan | None, Plan]:
        """Plans the program as it is, also when the time is up."""
        setting = _Setting(unchanged=True)
        plan = yield setting
        assert plan is not None  # nothing refuses it
        self._note(setting, plan)
        return plan

    def margin(self, limit: int) -> Generator[_Setting, Plan | None, None]:
        """Takes what was tried and fits, if only without a margin."""
        for setting in list(self.tried):
            yield from self._try(setting, limit)


def _outside_peak(plan: Plan) -> int:
    """The predicted peak of what is outside of loops alone."""
    return peak_bytes(plan.graph, plan.schedule)
