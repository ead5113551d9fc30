"""What memory costs, as data: plans of one function at several budgets, cheapest first where memory allows.

A planner under a budget is a heuristic for all but small graphs, so that more memory may get a dearer plan.
A plan that fits a smaller budget also fits a larger one: a point of the curve is the cheapest of all plans found
that fit its budget. So more budget never costs more time, by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from remat.api import plan as make_plan
from remat.core.errors import BudgetError, CompileError, shown
from remat.core.interrupt import Progress, or_log, planning, raise_interrupt
from remat.pictures import page
from remat.pictures.style import PlotError
from remat.pictures.tradeoff import Level, Point, Tradeoff
from remat.planning.resort import limit_bytes
from remat.planning.smallest import smallest_plan
from remat.plans.plan import Plan
from remat.plans.summary import step_seconds
from remat.plans.words import human_bytes, human_flops, human_seconds, table
from remat.resolve import parse_budget
from remat.tools.references import KeptByJax, check_reference

__all__ = [
    "InfeasibleBudget",
    "Pareto",
    "ParetoPoint",
    "Reference",
    "drawn",
    "iter_pareto",
    "pareto",
]

Budget = int | float | str


@dataclass(frozen=True)
class ParetoPoint:
    """The cheapest plan found for a budget.

    Attributes:
        budget_bytes: bound on the peak.
        plan: fits it.
    """

    budget_bytes: int
    plan: Plan

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of everything that is neither argument nor result."""
        return self.plan.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Kept from the forward pass for the backward pass, beyond arguments."""
        return self.plan.saved_bytes

    @property
    def recompute_flops(self) -> int:
        """Operations that run again."""
        return self.plan.recompute_flops

    @property
    def recompute_seconds(self) -> float:
        """Roofline estimate of what runs again."""
        return self.plan.recompute_seconds

    def to_dict(self) -> dict[str, Any]:
        """The numbers, without the plan."""
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "saved_bytes": self.saved_bytes,
            "recompute_flops": self.recompute_flops,
            "recompute_seconds": self.recompute_seconds,
            "status": self.plan.status,
            "gap": self.plan.gap,
            "plan_digest": self.plan.digest(),
        }


@dataclass(frozen=True)
class InfeasibleBudget:
    """A budget that no plan found meets.

    Attributes:
        budget_bytes: the bound on the peak.
        reason: of the planner.
    """

    budget_bytes: int
    reason: str


@dataclass(frozen=True)
class Reference:
    """What one of jax's policies would keep, estimated as the points are; see `remat.tools.references`.

    Attributes:
        name: of the policy.
        plan: that keeps it, in remat's order.
    """

    name: str
    plan: Plan


@dataclass(frozen=True)
class Pareto:
    """The trade-off between memory and recomputation of one function.

    Attributes:
        policy_name: that planned.
        points: by ascending budget; `recompute_seconds` never rises from one to the next.
        infeasible: budgets that no plan found meets, ascending.
        smallest_peak_bytes: the smallest predicted peak found, no remat and what refusals name included.
        baseline_peak_bytes, baseline_saved_bytes: without rematerialization.
        device: whose roofline the seconds are of.
        wanted: how many budgets were asked for.
        step_seconds: roofline estimate of one step without rematerialization, of the kind of `recompute_seconds`.
        references: what jax's policies would keep, as far as asked for.
    """

    policy_name: str
    points: tuple[ParetoPoint, ...]
    infeasible: tuple[InfeasibleBudget, ...]
    smallest_peak_bytes: int
    baseline_peak_bytes: int
    baseline_saved_bytes: int
    device: str
    wanted: int
    step_seconds: float = 0.0
    references: tuple[Reference, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether budgets are left that were not planned."""
        return len(self.points) + len(self.infeasible) < self.wanted

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per point, for a data frame: bytes, operations, seconds, and the peak's share."""
        return [
            {**point.to_dict(), "peak_share": point.peak_bytes / max(self.baseline_peak_bytes, 1)}
            for point in self.points
        ]

    def cheapest_within(self, budget_bytes: int) -> ParetoPoint | None:
        """Returns the cheapest point whose plan peaks at no more than `budget_bytes`, None if none does."""
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        return min(fitting, key=_price) if fitting else None

    def to_dict(self, *, include_plans: bool = False) -> dict[str, Any]:
        """Plain data for JSON: the curve, without the `references`, which are no part of it.

        Args:
            include_plans: also every plan, as `Plan.to_dict` gives it.
        """
        points = [
            {**point.to_dict(), "plan": point.plan.to_dict()} if include_plans else point.to_dict()
            for point in self.points
        ]
        return {
            "format": "remat.pareto",
            "policy": self.policy_name,
            "device": self.device,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "baseline_saved_bytes": self.baseline_saved_bytes,
            "smallest_peak_bytes": self.smallest_peak_bytes,
            "step_seconds": self.step_seconds,
            "wanted": self.wanted,
            "interrupted": self.interrupted,
            "points": points,
            "infeasible": [
                {"budget_bytes": entry.budget_bytes, "reason": entry.reason}
                for entry in self.infeasible
            ],
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            (
                "budget",
                "peak",
                "of no remat",
                "kept",
                "repeated",
                "seconds",
                "of the step",
                "status",
            )
        ]
        for point in self.points:
            share = point.peak_bytes / max(self.baseline_peak_bytes, 1)
            gap = point.plan.gap
            status = str(point.plan.status)
            rows.append(
                (
                    human_bytes(point.budget_bytes),
                    human_bytes(point.peak_bytes),
                    f"{share:.1%}",
                    human_bytes(point.saved_bytes),
                    human_flops(point.recompute_flops),
                    human_seconds(point.recompute_seconds),
                    self._of_step(point.plan),
                    f"{status}, gap {gap:.1%}" if gap else status,
                )
            )
        lines = [
            f"remat trade-off by policy {self.policy_name}; no remat peaks at "
            f"{human_bytes(self.baseline_peak_bytes)}; the smallest peak found is "
            f"{human_bytes(self.smallest_peak_bytes)}",
            f"Peaks are predicted, seconds are a roofline estimate for {self.device}.",
            *table(rows, ">>>>>>><"),
        ]
        if self.references:
            lines.append("What jax's policies keep, in remat's order:")
            lines += table([self._reference_row(entry) for entry in self.references], "<>>>>>>")
        lines += [
            f"  {human_bytes(entry.budget_bytes)}: no plan found fits" for entry in self.infeasible
        ]
        if self.interrupted:
            done = len(self.points) + len(self.infeasible)
            lines.append(f"interrupted: {done} of {self.wanted} budgets were planned")
        return "\n".join(lines)

    def _of_step(self, plan: Plan) -> str:
        return f"+{plan.recompute_seconds / self.step_seconds:.1%}" if self.step_seconds else "-"

    def _reference_row(self, entry: Reference) -> tuple[str, ...]:
        plan = entry.plan
        return (
            entry.name,
            human_bytes(plan.peak_bytes),
            f"{plan.peak_bytes / max(self.baseline_peak_bytes, 1):.1%}",
            human_bytes(plan.saved_bytes),
            human_flops(plan.recompute_flops),
            human_seconds(plan.recompute_seconds),
            self._of_step(plan),
        )

    def _repr_html_(self) -> str:
        """The table and the picture, for notebooks."""
        return page.result(str(self), drawn(self, "") if self.points else None)


def drawn(curve: Pareto, title: str) -> Tradeoff:
    """Returns a curve as it is drawn: a plan where it peaks, not at the budget it was made for, and once.

    Raises:
        PlotError: the curve has no point.
    """
    least = human_bytes(curve.smallest_peak_bytes)
    if not curve.points:
        raise PlotError(
            f"no budget of the curve is feasible (the smallest peak found is {least}): there is nothing to draw"
        )
    places = sorted({(point.peak_bytes, point.recompute_seconds) for point in curve.points})
    ours = [Point("", "remat", nbytes, seconds) for nbytes, seconds in places]
    theirs = [
        Point(entry.name, "jax", entry.plan.peak_bytes, entry.plan.recompute_seconds)
        for entry in curve.references
    ]
    return Tradeoff(
        title=f"{title or 'What memory costs'}: {curve.policy_name} down to {least}",
        points=(*ours, *theirs),
        memory="predicted peak of temporaries",
        cost="repeated work per step, roofline estimate",
        whole=curve.step_seconds,
        share="share of a step without remat",
        is_curve=True,
        baseline=Level(
            f"no remat: {human_bytes(curve.baseline_peak_bytes)}", curve.baseline_peak_bytes
        ),
        theirs="what jax's policies keep, in remat's order",
        infeasible_bytes=curve.smallest_peak_bytes,
    )


def _price(point: ParetoPoint) -> tuple[float, int, int]:
    return (point.recompute_seconds, point.peak_bytes, point.budget_bytes)


def pareto(
    fun: Callable[..., Any],
    *args: Any,
    remat_policy: Any = "ilp",
    budgets: Sequence[Budget] | Budget | None = None,
    points: int = 8,
    references: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Any,
) -> Pareto:
    """Returns the trade-off between peak memory and recomputation of a function.

    Plans once per budget, and a few times more to find the smallest peak; nothing is compiled or run. Where
    planning takes long, `iter_pareto` keeps what is done if interrupted; here KeyboardInterrupt goes through.

    Args:
        fun: any differentiable JAX function.
        *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
        remat_policy: a policy of ours that plans within a budget.
        budgets: one or several: bytes, `"6GiB"`, or fractions of the peak without rematerialization; None spreads
            `points` geometrically from the smallest peak found to that without rematerialization.
        points: how many budgets, if none are given; at least 2.
        references: policies of jax's whose choice is set beside the curve, of `remat.tools.references.REFERENCES`.
        progress: called with one line whenever something that takes time begins.
        **options: further arguments of `remat.plan` (`argnums`, `static_argnums`, ...), and keyword
            arguments of `fun`.

    Returns:
        The curve; budgets that no plan found meets are in `Pareto.infeasible`.

    Raises:
        BudgetError: a budget cannot be read, or fewer than 2 `points`.
        CompileError: `confirm` is given.
        PolicyError: also if a reference is none of those.
        PolicyError, TraceError: as `remat.plan`.
    """
    curve = None
    for curve in iter_pareto(  # noqa: B007 - the last one is the result
        fun,
        *args,
        remat_policy=remat_policy,
        budgets=budgets,
        points=points,
        references=references,
        progress=progress,
        **options,
    ):
        pass
    assert curve is not None
    return curve


def iter_pareto(
    fun: Callable[..., Any],
    *args: Any,
    remat_policy: Any = "ilp",
    budgets: Sequence[Budget] | Budget | None = None,
    points: int = 8,
    references: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[Pareto]:
    """Yields the curve of `pareto` after every budget, smallest first, each with all points known by then.

    A later plan may improve an earlier point. The last curve is that of `pareto`.
    """
    if getattr(budgets, "shape", None) == ():  # an array of one number is a number
        budgets = budgets.item()  # type: ignore[union-attr]
    is_one = isinstance(budgets, (str, Real))  # not a sequence of its letters
    several: Any = [budgets] if is_one else budgets
    limits = None if several is None else [parse_budget(budget) for budget in several]
    if limits is not None and (not limits or None in limits):
        raise BudgetError(
            f"budgets={shown(budgets)}: expected at least one budget, none of them None"
        )
    if limits is None and not (isinstance(points, Integral) and points >= 2):
        raise BudgetError(
            f"points={shown(points)}: a curve needs at least 2 points, a whole number"
        )
    if "budget" in options:
        raise BudgetError(f"budget={shown(options['budget'])}: a curve takes budgets=[...]")
    if "confirm" in options:
        raise CompileError(
            f"confirm={shown(options['confirm'])}: a curve is of predictions, nothing of it is compiled. "
            "remat.plan(..., budget=, confirm=) asks the compiler of one budget"
        )
    for name in references:
        check_reference(name)
    say = or_log(progress)

    def plan_at(budget_bytes: int | None, policy: Any = remat_policy) -> Plan:
        with planning(say) if budget_bytes is not None else nullcontext():
            made = make_plan(
                fun, *args, remat_policy=policy, budget=budget_bytes, confirm=False, **options
            )
            raise_interrupt()  # a curve of plans that ended early says nothing
        return replace(made, budget_bytes=budget_bytes)

    say("planning without a budget")
    free = plan_at(None)
    work = _Curve(free)
    if limits is None:
        smallest_plan(lambda budget: work.plan(plan_at, budget), free.peak_bytes, say)
        low = min(plan.peak_bytes for plan in work.plans)
        wanted = _geometric(low, max(free.baseline_peak_bytes, low), points)
    else:
        given = (limit_bytes(limit, free.baseline_peak_bytes) for limit in limits if limit)
        wanted = sorted({max(budget, 1) for budget in given})
    for name in references:
        say(f"planning what {name} keeps")
        work.references.append(Reference(name, plan_at(None, KeptByJax(name))))
    for index, budget in enumerate(wanted):
        say(f"budget {index + 1} of {len(wanted)}: {human_bytes(budget)}")
        work.visit(plan_at, budget)
        yield work.curve(len(wanted))


def _geometric(low: int, high: int, count: int) -> list[int]:
    """Budgets from `low` to `high`, both exact, equal factors apart; fewer if they coincide."""
    ratio = high / max(low, 1)
    inner = [round(low * ratio ** (index / (count - 1))) for index in range(1, count - 1)]
    return sorted({low, *inner, high})


@dataclass
class _Curve:
    """Plans found so far, and the budgets asked for."""

    free: Plan
    plans: list[Plan] = field(default_factory=list)
    visited: dict[int, str] = field(default_factory=dict)
    made: dict[int, Plan] = field(default_factory=dict)
    references: list[Reference] = field(default_factory=list)
    named: list[int] = field(default_factory=list)  # peaks of plans that were refused

    def __post_init__(self) -> None:
        self.plans.append(self.free)

    def plan(self, plan_at: Callable[[int], Plan], budget: int) -> Plan:
        if budget not in self.made:
            try:
                self.made[budget] = plan_at(budget)
            except BudgetError as error:
                named = error.smallest_peak_bytes
                self.named += [] if named is None else [named]
                raise
            self.plans.append(self.made[budget])
        return self.made[budget]

    def visit(self, plan_at: Callable[[int], Plan], budget: int) -> None:
        reason = ""
        exact = any(plan.peak_bytes == budget for plan in self.plans)
        if not exact:  # else there is a plan for it already: it made this the smallest budget
            try:
                self.plan(plan_at, budget)
            except BudgetError as error:
                reason = str(error)
        self.visited[budget] = reason

    def curve(self, wanted: int) -> Pareto:
        points, infeasible = [], []
        for budget, reason in sorted(self.visited.items()):
            fitting = [plan for plan in self.plans if plan.peak_bytes <= budget]
            if fitting:
                best = min(fitting, key=lambda plan: (plan.recompute_seconds, plan.peak_bytes))
                points.append(ParetoPoint(budget, best))
            else:
                infeasible.append(InfeasibleBudget(budget, reason))
        return Pareto(
            policy_name=self.free.policy_name,
            points=tuple(points),
            infeasible=tuple(infeasible),
            smallest_peak_bytes=min(
                self.free.baseline_peak_bytes,
                *(plan.peak_bytes for plan in self.plans),
                *self.named,
            ),
            baseline_peak_bytes=self.free.baseline_peak_bytes,
            baseline_saved_bytes=self.free.baseline_saved_bytes,
            device=self.free.device,
            wanted=wanted,
            step_seconds=step_seconds(self.free),
            references=tuple(self.references),
        )
