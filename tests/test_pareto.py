"""The trade-off curve: monotone, exact at its ends, honest about what is not feasible."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

import remat
from models import cases, mlp
from remat.core.errors import BudgetError, CompileError
from remat.core.graph import Graph
from remat.planning.make import make_plan
from remat.planning.smallest import smallest_plan
from remat.plans.plan import Plan
from remat.policies import Full, MinCut, SaveAll
from remat.policies.base import BudgetPolicy, Decision
from remat.tools.pareto import Pareto, iter_pareto, pareto

LOSS, ARGS = mlp.residual_mlp(layers=4, width=16, hidden=64, batch=64)


@dataclass(frozen=True)
class Cuts(BudgetPolicy):
    """A planner within a budget that is quick and exact to foresee: the cheapest of a fixed list of plans."""

    name: ClassVar[str] = "cuts"

    def decide(self, graph: Graph) -> Decision:
        return SaveAll().decide(graph)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        plans = cut_plans(graph)
        fitting = [plan for plan in plans if plan.peak_bytes <= budget_bytes]
        if not fitting:
            least = min(plan.peak_bytes for plan in plans)
            raise BudgetError(f"no cut fits: {least:,} bytes", smallest_peak_bytes=least)
        return Decision(
            frozenset(min(fitting, key=lambda plan: plan.recompute_seconds).saved_values)
        )


@dataclass(frozen=True)
class Moody(Cuts):
    """A planner that wastes what it is given: with much memory, or no budget, it makes the smallest plan."""

    name: ClassVar[str] = "moody"

    def decide(self, graph: Graph) -> Decision:
        least = min(cut_plans(graph), key=lambda plan: plan.peak_bytes)
        return Decision(frozenset(least.saved_values))

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        plans = cut_plans(graph)
        if budget_bytes > 0.9 * plans[0].baseline_peak_bytes:
            return self.decide(graph)
        return super().decide_within(graph, budget_bytes)


def cut_plans(graph: Graph) -> list[Plan]:
    """Everything `Cuts` chooses from."""
    policies = [SaveAll(), Full(), MinCut(), MinCut(memory_weight=0)]
    policies += [MinCut(memory_weight=w, heavy="roofline") for w in (0.25, 1, 3, 8, 20, 60)]
    return [make_plan(graph, policy) for policy in policies]


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return cut_plans(remat.plan(LOSS, *ARGS, remat_policy="save_all").graph)


@pytest.fixture(scope="module")
def curve() -> Pareto:
    return pareto(LOSS, *ARGS, remat_policy=Cuts(), points=6)


def assert_monotone(curve: Pareto) -> None:
    for less, more in itertools.pairwise(curve.points):
        assert less.budget_bytes < more.budget_bytes
        assert less.recompute_seconds >= more.recompute_seconds
    assert all(point.peak_bytes <= point.budget_bytes for point in curve.points)


@pytest.mark.slow
def test_default_budgets_reach_from_the_smallest_peak_to_no_remat(
    curve: Pareto, plans: list[Plan]
) -> None:
    least = min(plan.peak_bytes for plan in plans)
    assert [point.budget_bytes for point in curve.points][:: len(curve.points) - 1] == [
        least,
        curve.baseline_peak_bytes,
    ]
    assert len(curve.points) == 6 and not curve.infeasible and not curve.interrupted
    ratios = [b.budget_bytes / a.budget_bytes for a, b in itertools.pairwise(curve.points)]
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-3)
    assert curve.smallest_peak_bytes == curve.points[0].peak_bytes == least
    assert curve.baseline_saved_bytes == plans[0].baseline_saved_bytes


def test_every_point_is_the_cheapest_that_fits(curve: Pareto, plans: list[Plan]) -> None:
    assert_monotone(curve)
    for point in curve.points:
        fitting = [plan for plan in plans if plan.peak_bytes <= point.budget_bytes]
        # Planning within a budget leaves a margin below it, where it can.
        easily = [p.recompute_seconds for p in plans if p.peak_bytes <= 0.9 * point.budget_bytes]
        least = min(plan.recompute_seconds for plan in fitting)
        assert least <= point.recompute_seconds <= min(easily, default=float("inf"))
    assert curve.points[-1].recompute_flops == 0
    assert curve.points[0].recompute_flops > 0


def test_a_point_is_what_its_plan_says(curve: Pareto) -> None:
    for point in curve.points:
        plan = point.plan
        assert point.peak_bytes == plan.peak_bytes
        assert (point.saved_bytes, point.recompute_flops) == (
            plan.saved_bytes,
            plan.recompute_flops,
        )
    args = tuple(cases.materialize(ARGS))
    small = remat.checkpoint(LOSS, remat_policy=curve.points[0].plan)
    for want, got in zip(
        jax.tree.leaves(jax.grad(LOSS)(*args)), jax.tree.leaves(jax.grad(small)(*args)), strict=True
    ):
        assert jnp.allclose(want, got, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_more_budget_never_costs_more_even_if_the_planner_wastes_it(plans: list[Plan]) -> None:
    least = min(plan.peak_bytes for plan in plans)
    top = plans[0].baseline_peak_bytes
    wasted = remat.plan(LOSS, *ARGS, remat_policy=Moody(), budget=top)
    careful = remat.plan(LOSS, *ARGS, remat_policy=Moody(), budget=0.8)
    assert wasted.peak_bytes == least
    assert wasted.recompute_seconds > careful.recompute_seconds
    found = pareto(LOSS, *ARGS, remat_policy=Moody(), budgets=[least, 0.8, 0.95, 1.0])
    assert_monotone(found)
    assert [p.recompute_seconds for p in found.points[1:]] == [careful.recompute_seconds] * 3


def test_budgets_are_read_as_elsewhere(curve: Pareto) -> None:
    top = curve.baseline_peak_bytes
    found = pareto(LOSS, *ARGS, remat_policy=Cuts(), budgets=[0.5, top, "1GiB", 0.5])
    assert [point.budget_bytes for point in found.points] == [top // 2, top, 2**30]
    assert found.wanted == 3


@pytest.mark.parametrize("budget", ["0.5", 0.5, np.float32(0.5), np.array(0.5), jnp.array(0.5)])
def test_one_budget_is_a_curve_of_one(curve: Pareto, budget: Any) -> None:
    found = pareto(LOSS, *ARGS, remat_policy=Cuts(), budgets=budget)
    assert [p.budget_bytes for p in found.points] == [curve.baseline_peak_bytes // 2]


def test_infeasible_budgets_are_listed_with_the_smallest_peak(plans: list[Plan]) -> None:
    least = min(plan.peak_bytes for plan in plans)
    found = pareto(LOSS, *ARGS, remat_policy=Cuts(), budgets=[least // 2, least - 1, least])
    assert [entry.budget_bytes for entry in found.infeasible] == [least // 2, least - 1]
    assert all(f"{least:,}" in entry.reason for entry in found.infeasible)
    assert [point.peak_bytes for point in found.points] == [least]
    assert str(found).count("no plan found fits") == 2
    assert not found.interrupted


def test_the_smallest_peak_is_also_that_which_a_refusal_names(plans: list[Plan]) -> None:
    least = min(plan.peak_bytes for plan in plans)
    found = pareto(LOSS, *ARGS, remat_policy=Cuts(), budgets=[least // 2, 1])
    assert not found.points and found.smallest_peak_bytes == least
    assert found.to_dict()["smallest_peak_bytes"] == least < found.baseline_peak_bytes


def test_growing_curves_and_an_interrupted_one(curve: Pareto) -> None:
    grown = list(iter_pareto(LOSS, *ARGS, remat_policy=Cuts(), points=6))
    assert [len(c.points) for c in grown] == [1, 2, 3, 4, 5, 6]
    assert grown[-1] == curve
    assert all(c.interrupted for c in grown[:-1])
    assert "interrupted: 2 of 6" in str(grown[1])
    for part in grown:
        assert_monotone(part)


@pytest.mark.slow
def test_interrupts_pass_through_but_what_was_yielded_stays() -> None:
    def interrupt(line: str) -> None:
        if line.startswith("budget 3"):
            raise KeyboardInterrupt

    options: dict[str, Any] = {
        "remat_policy": Cuts(),
        "budgets": [50_000, 60_000, 70_000],
        "progress": interrupt,
    }
    kept: list[Pareto] = []
    with pytest.raises(KeyboardInterrupt):
        for part in iter_pareto(LOSS, *ARGS, **options):
            kept.append(part)
    assert len(kept) == 2 and kept[-1].interrupted
    with pytest.raises(KeyboardInterrupt):
        pareto(LOSS, *ARGS, **options)


def test_as_data(curve: Pareto) -> None:
    document = json.loads(json.dumps(curve.to_dict()))
    assert document["format"] == "remat.pareto" and document["policy"] == "cuts"
    assert [p["peak_bytes"] for p in document["points"]] == [p.peak_bytes for p in curve.points]
    assert "plan" not in document["points"][0]
    whole = json.loads(json.dumps(curve.to_dict(include_plans=True)))
    assert Plan.from_dict(whole["points"][0]["plan"]) == curve.points[0].plan
    rows = curve.rows()
    assert len(rows) == 6 and rows[-1]["peak_share"] == 1.0
    lines = str(curve).splitlines()
    assert "no remat peaks at" in lines[0] and len(lines) == 3 + 6


def test_cheapest_within(curve: Pareto) -> None:
    for point in curve.points:
        found = curve.cheapest_within(point.budget_bytes)
        assert found is not None and found.recompute_seconds <= point.recompute_seconds
    assert curve.cheapest_within(curve.smallest_peak_bytes - 1) is None


def test_argnums_and_progress_are_passed_on() -> None:
    said: list[str] = []
    found = pareto(
        LOSS, *ARGS, remat_policy="min_cut", budgets=[1.0], argnums=(0, 1), progress=said.append
    )
    assert found.points[0].plan == remat.plan(LOSS, *ARGS, argnums=(0, 1))
    assert said[-1].startswith("budget 1 of 1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgets": []}, "at least one budget"),
        ({"budgets": [None]}, "none of them None"),
        ({"budgets": [1.5]}, "not a fraction"),
        ({"points": 1}, "at least 2 points"),
        ({"budget": 0.5}, "budgets="),
    ],
)
def test_bad_budgets(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        pareto(LOSS, *ARGS, **options)


def test_a_curve_is_not_confirmed() -> None:
    with pytest.raises(CompileError, match=r"confirm='cpu'.*remat\.plan"):
        pareto(LOSS, *ARGS, confirm="cpu")


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=8, unique=True),
    st.booleans(),
    st.booleans(),
)
@laws(60)
def test_smallest_plan(peaks: list[int], names: bool, loops: bool) -> None:
    """Whatever a planner has: if its errors name the smallest peak, that is what is found."""

    @dataclass(frozen=True)
    class Fake:
        peak_bytes: int
        loops: bool

    asked: list[int] = []

    def plan_at(budget: int) -> Any:
        asked.append(budget)
        fitting = [peak for peak in peaks if peak <= budget]
        if not fitting:
            raise BudgetError("no", smallest_peak_bytes=min(peaks) if names else None)
        return Fake(max(fitting), loops)

    found = smallest_plan(plan_at, max(peaks))
    assert found.peak_bytes in peaks
    assert len(asked) <= 8 + 1 + 5
    if names:
        assert found.peak_bytes == min(peaks)


def test_names_of_smallest_peaks() -> None:
    graph = remat.plan(LOSS, *ARGS).graph
    full = make_plan(graph, Full())
    with pytest.raises(BudgetError) as caught:
        remat.plan(LOSS, *ARGS, remat_policy="full", budget=1)
    assert caught.value.smallest_peak_bytes == full.peak_bytes


@pytest.mark.slow
def test_loops() -> None:
    loss, args = cases.gpt_blocks_scan_small()
    found = pareto(loss, *args, remat_policy=Cuts(), points=2)
    assert_monotone(found)
    assert found.points[0].peak_bytes < found.baseline_peak_bytes // 2
    assert all(point.plan.loops for point in found.points)
