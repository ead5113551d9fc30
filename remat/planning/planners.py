"""Planners that a policy and a finished plan stand for. Plain data, no jax."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Integral

from remat.core.errors import BudgetError, PlanError, shown
from remat.core.forms import form_of, get_encoding
from remat.core.graph import Alternatives, Graph
from remat.planning.bodies import Menus
from remat.planning.make import make_plan
from remat.planning.numbers import MARGIN
from remat.planning.protocol import NO_CHUNKS, SteadyPlanner
from remat.planning.resort import CheckedSession, useful_plan
from remat.planning.session import BudgetSession
from remat.plans.graph_diff import first_difference
from remat.plans.paths import is_rest
from remat.plans.plan import LoopPlan, Plan
from remat.policies import Full, Policy
from remat.policies.base import BudgetPolicy

__all__ = ["Confirm", "PlanPlanner", "PolicyPlanner"]


@dataclass(frozen=True)
class Confirm:
    """How the compiler confirms a budget, or without one says what a plan takes.

    Attributes:
        compiles: at most so many plans are compiled, 2 or more; those in the cache on disk count, too.
        device: to compile for: `"attached"`, the name of a GPU that need not be there, `"cpu"`, or `"auto"`: the
            attached device if it is a GPU, else the policy's if XLA's compiler for it is installed, else none.

    Raises:
        BudgetError: fewer than two compiles, or no whole number of them.
    """

    compiles: int = 6
    device: str = "auto"

    def __post_init__(self) -> None:
        if not (isinstance(self.compiles, Integral) and self.compiles >= 2):
            raise BudgetError(
                f"Confirm(compiles={shown(self.compiles)}): expected 2 or more, a whole number, one for the plan "
                "without rematerialization; confirm='off' compiles nothing"
            )


@dataclass(frozen=True)
class PolicyPlanner(SteadyPlanner):
    """Plans every graph with the same policy and holds it to a budget.

    Attributes:
        policy: any `remat.policies.Policy`.
        budget: bytes, or a fraction of the peak without rematerialization, or None.
        margin: share of the budget that plans leave for the prediction's error, if there is one that can.
        nearest: where nothing is predicted to fit, take what is nearest instead of a `BudgetError`: for those who
            ask the compiler, for whom predictions are a guide. Not for functions with loops.
        confirm: how the compiler is asked, None if it is not.
        tags: `checkpoint_name`s of the function as written, wherever they are in it; None for the body of a loop,
            which need not hold what the policy names.
        menus: of the function's loops, for those who plan the same function several times.
    """

    policy: Policy
    budget: int | float | None = None
    margin: float = MARGIN
    nearest: bool = False
    confirm: Confirm | None = None
    tags: frozenset[str] | None = None
    menus: Menus | None = field(default=None, compare=False, repr=False)

    @property
    def takes_long(self) -> bool:
        """Whether there is a budget and the policy can plan within one: seconds to minutes."""
        return self.budget is not None and isinstance(self.policy, BudgetPolicy)

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget, whoever plans within it."""
        return self.budget is not None

    def begin(self) -> PolicyPlanner | BudgetSession | CheckedSession:
        """Returns a new session if there is a budget."""
        if self.budget is None:
            return self
        if isinstance(self.policy, BudgetPolicy):
            return BudgetSession(self.policy, self.budget, self.margin, self.nearest, self.menus)
        return CheckedSession(replace(self, budget=None), self.policy, self.budget)

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns the sites that the policy wants; one that plans within a budget has a session instead."""
        return self.policy.sites(menu, None)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans a graph."""
        plan = make_plan(graph, self.policy, barriers=barriers)
        return useful_plan(graph, self.policy, plan) if barriers else plan

    def finish(self, plan: Plan) -> Plan:
        """Returns the finished plan.

        Raises:
            PolicyError: the policy names tags that are nowhere in the function.
        """
        if self.tags is not None:
            self.policy.check_tags(self.tags | _tags_in(plan))
        return plan

    def child(self, path: str) -> PolicyPlanner:
        """A loop body is planned with the same policy; the budget is that of the whole function."""
        del path
        return PolicyPlanner(self.policy)


def _tags_in(plan: Plan) -> frozenset[str]:
    """The tags of a plan's values, those of loop bodies and of derivative rules included."""
    own = frozenset(tag for value in plan.graph.values for tag in value.tags)
    return own.union(*(_tags_in(entry.plan) for entry in plan.loops))


def _check_codes(made: Plan, graph: Graph) -> None:
    """Raises PlanError if a plan keeps codes that are too narrow for what a graph's integers may be.

    The literals of a program are no part of a graph's structure, and ranges follow from them.
    """
    for step in made.schedule.steps:
        if step.action not in ("encode", "decode"):
            continue
        old, new = made.graph.values[step.target], graph.values[step.target]
        if get_encoding(form_of(old)).kind != "codes" or old.range == new.range:
            continue
        low, high = old.range or (0, 0)
        if new.range is None or new.range[0] < low or new.range[1] > high:
            now = "unknown" if new.range is None else f"{new.range[0]} to {new.range[1]}"
            raise PlanError(
                f"this plan was made for another function: it keeps {old.label} as {form_of(old)}, which was "
                f"{low} to {high} then and is {now} now. Plan again with remat.plan(...)."
            )


@dataclass(frozen=True)
class PlanPlanner(SteadyPlanner):
    """Applies a plan that was made before, held to its budget when it was made.

    Attributes:
        made: the plan.
        path: of the loop that it is the body of, empty for the function itself.

    Raises:
        PlanError: the function is not the one the plan was made for.
    """

    made: Plan
    path: str = ""

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns the sites at which the plan's graph was rewritten."""
        del menu
        return frozenset(self.made.graph.sites)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Returns the given plan after checking that it belongs to `graph`."""
        if graph.fingerprint() != self.made.graph.fingerprint():
            raise PlanError(
                "this plan was made for another function: "
                + first_difference(self.made.graph, graph)
            )
        _check_codes(self.made, graph)
        return self.made

    def child(self, path: str) -> _LoopPlanner | _Unplanned:
        """Returns the planner of a loop body."""
        whole = f"{self.path}/{path}".removeprefix("/")
        for entry in self.made.loops:
            if entry.path == path:
                return _LoopPlanner(entry.plan, whole, entry.chunk)
        return _Unplanned(whole)

    def check_loops(self, plan: Plan, loops: tuple[LoopPlan, ...]) -> None:
        """Raises PlanError if a loop is not the one the plan was made for."""
        if plan is not self.made:
            return  # of a loop body that jax traced on the way: thrown away
        for entry in loops:
            made = self.made.loop(entry.path)
            if entry.plan.graph.fingerprint() != made.graph.fingerprint():
                path = f"{self.path}/{entry.path}".removeprefix("/")
                raise PlanError(
                    "this plan was made for another function: "
                    + first_difference(made.graph, entry.plan.graph, loop=path)
                )


@dataclass(frozen=True)
class _LoopPlanner(PlanPlanner):
    """Applies the plan of a loop body.

    While jax finds out which carried values are differentiated it traces bodies that the plan is not for. They
    get a plan that is thrown away; `PlanPlanner.check_loops` looks at the last one.
    """

    chunk: int = NO_CHUNKS

    def chunk_trips(self, length: int) -> int:
        """Chunks as the plan has them."""
        del length
        return self.chunk

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Returns the given plan if it belongs to `graph`, else a passing one."""
        if graph.fingerprint() == self.made.graph.fingerprint():
            _check_codes(self.made, graph)
            return self.made
        return make_plan(graph, Full(), barriers=barriers)


@dataclass(frozen=True)
class _Unplanned(SteadyPlanner):
    """A loop that a plan has no part for: right as long as the loop is not differentiated."""

    path: str

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Raises PlanError: the loop is differentiated after all."""
        del graph, barriers
        if is_rest(self.path):
            raise PlanError(
                f"this plan was made for another function: its loops had other lengths, so that {self.path!r}, "
                "the iterations that do not fill a chunk, has no plan. Plan again with remat.plan(...)."
            )
        raise PlanError(
            f"this plan was made for another function: loop {self.path!r} was not differentiated then and "
            "is now. Differentiate the same arguments, or plan again with remat.plan(...)."
        )

    def child(self, path: str) -> _Unplanned:
        """A loop inside has no plan either."""
        return _Unplanned(f"{self.path}/{path}")
