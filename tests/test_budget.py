"""Budgets: every plan that is made fits, every refusal says what would, and more memory never costs more."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import GraphBuilder, graphs, laws

import remat
from models import mlp
from remat.core.errors import BudgetError
from remat.core.graph import Alternatives, Graph
from remat.memory.predict import peak_bytes, predict
from remat.planning.make import make_plan
from remat.planning.planners import PolicyPlanner
from remat.planning.resort import held, limit_bytes
from remat.planning.within import plan_within
from remat.plans.plan import Plan
from remat.plans.record import Certificate
from remat.plans.simulate import simulate
from remat.policies import (
    Auto,
    Checkmate,
    Dtr,
    Full,
    Ilp,
    MinCut,
    Policy,
    Revolve,
    SaveAll,
    Sublinear,
)
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.buffers.condense import condense
from remat.policies.solvers.problem import peak_of_order
from remat.resolve import parse_budget, resolve
from remat.tools.pareto import pareto

SHAPE, BYTES = (64, 64), 64 * 64 * 4


def training_graph(seed: int) -> Graph:
    """6 to 12 layers of one size, matmuls of random cost, and their backward pass, mirrored.

    The gradients are small: a result of the size of an activation is a place for temporaries.
    """
    rng = random.Random(seed)
    builder = GraphBuilder()
    values, w = [builder.input(SHAPE)], builder.input((8, 8))
    layers = []
    for _ in range(rng.randint(6, 12)):
        name = rng.choice(("dot", "dot", "dot", "tanh", "add"))
        reads = [values[-1]]
        if name == "add" and len(values) > 2:
            reads.append(rng.choice(values[-4:-1]))
        operands = [*reads, w] if name == "dot" else reads
        values.append(builder.op(name, operands, SHAPE, flops=rng.randint(1, 100) * 10**6))
        layers.append((name, reads, values[-1]))
    result = builder.op("sum", [values[-1]], ())
    ct = builder.cotangent(())
    cotangent = {values[-1]: builder.op("broadcast", [ct], SHAPE)}
    gradients = []
    for name, reads, value in reversed(layers):
        if value not in cotangent:
            continue
        for read in reads:
            if name == "dot":
                gradients.append(builder.op("dot", [cotangent[value], read], (8, 8)))
                back = builder.op("dot", [cotangent[value], w], SHAPE, flops=10**6)
            else:
                other = value if name == "tanh" else read
                back = builder.op("mul", [cotangent[value], other], SHAPE)
            before = cotangent.get(read)
            cotangent[read] = back if before is None else builder.op("add", [before, back], SHAPE)
    gradients.append(builder.op("sum", [cotangent[values[0]]], ()))
    return builder.build([result], list(dict.fromkeys(gradients)))


seeds = st.integers(0, 2**20)
QUICK = Ilp(effort=50, seconds=2.0)
STEADY = Ilp(method="starts")  # no clock decides what it finds
PLANNERS: dict[str, Policy] = {
    "ilp": QUICK,
    "ilp-starts": STEADY,
    "checkmate": Checkmate(seconds=2.0),
    "sublinear": Sublinear(),
    "recursive": Sublinear("recursive"),
    "revolve": Revolve(),
    "dtr": Dtr(),
    "auto": Auto(ilp=QUICK),
    "min_cut": MinCut(),
    "full": Full(),
}
planners = pytest.mark.parametrize("planner", PLANNERS)

# --- every plan fits -------------------------------------------------------------------------------


def assert_within(graph: Graph, policy: Policy, budget: int) -> bool:
    """Plans; returns whether there is a plan, and holds plan or refusal to what they promise."""
    try:
        plan = plan_within(graph, policy, budget)
    except BudgetError as error:
        text = str(error)
        assert f"{budget:,} bytes" in text or "no plan within a budget of" in text
        assert error.smallest_peak_bytes is not None
        assert error.smallest_peak_bytes > 0.97 * budget - 1  # a plan leaves a margin if it can
        assert f"{error.smallest_peak_bytes:,} bytes" in text
        # A value that forces it, as `f32[64,64] of dot (16,384 bytes)`.
        if error.smallest_peak_bytes >= 4096:
            assert re.search(r"\w+\[[\d,]*\]( of [\w/-]+)? \([\d,]+ bytes\)", text)
        assert "Raise the budget" in text
        return False
    assert plan.budget_bytes == budget
    assert plan.policy_name == policy.name
    assert plan.peak_bytes <= budget
    assert plan.peak_bytes >= peak_bytes(graph, plan.schedule)
    simulate(graph, plan.schedule)
    return True


@pytest.mark.sample(1)
@planners
@given(seed=seeds, share=st.floats(0.2, 1.05))
@laws(8)
def test_a_plan_fits_or_the_error_says_what_would(planner: str, seed: int, share: float) -> None:
    graph = training_graph(seed)
    assert_within(graph, PLANNERS[planner], int(share * peak_bytes(graph)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("planner", ["ilp-starts", "sublinear", "revolve", "dtr", "min_cut"])
@given(graph=graphs(), share=st.floats(0.2, 1.05))
@laws(40)
def test_budgets_on_graphs_of_every_kind(planner: str, graph: Graph, share: float) -> None:
    assert_within(graph, PLANNERS[planner], max(1, int(share * peak_bytes(graph))))


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["ilp", "checkmate", "sublinear", "revolve", "dtr"])
def test_most_budgets_above_the_smallest_are_met_by_recomputing(planner: str) -> None:
    """Without this the laws above could hold because nothing is ever found."""
    met = recomputed = 0
    for seed in range(4):
        graph = training_graph(seed)
        least = max(condense(graph).problem.floor_bytes, 1)
        for budget in (int(0.75 * peak_bytes(graph)), int(0.9 * peak_bytes(graph))):
            if least < 0.9 * budget and assert_within(graph, PLANNERS[planner], budget):
                met += 1
                recomputed += plan_within(graph, PLANNERS[planner], budget).recompute_flops > 0
    assert met >= 4 and recomputed >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "planner", ["ilp-starts", "sublinear", "revolve", "dtr", "checkmate", "full"]
)
def test_what_the_error_names_is_a_budget_that_is_met(planner: str) -> None:
    for seed in range(5):
        graph = training_graph(seed)
        with pytest.raises(BudgetError) as refused:
            plan_within(graph, PLANNERS[planner], 1000)
        named = refused.value.smallest_peak_bytes
        assert named is not None and named > 1000
        assert assert_within(graph, PLANNERS[planner], named)


def test_a_budget_of_everything_recomputes_nothing() -> None:
    for seed in range(5):
        graph = training_graph(seed)
        enough = 2 * max(peak_bytes(graph), peak_of_order(condense(graph).problem))
        for policy in (QUICK, Checkmate(), Revolve(), Sublinear()):
            plan = plan_within(graph, policy, enough)
            again = {entry.op for entry in plan.recomputed}
            assert all(graph.ops[op].fusible for op in again)


# --- what a budget is ------------------------------------------------------------------------------

LOSS, ARGS = mlp.residual_mlp(layers=4, width=16, hidden=64, batch=64)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5KiB", 1536),
        ("2TB", 2 * 10**12),
        ("77", 77),
        ("77B", 77),
        (77, 77),
        (0.5, 0.5),
        (1.0, 1.0),
        (None, None),
    ],
)
def test_budgets_are_read(text: object, expected: object) -> None:
    assert parse_budget(text) == expected
    assert type(parse_budget(text)) is type(expected)


@pytest.mark.parametrize(
    "wrong",
    [
        "6 apples",
        "GiB",
        "-1GiB",
        "0",
        "nan",
        "inf GiB",
        0,
        -5,
        0.0,
        1.5,
        -0.5,
        float("nan"),
        True,
        [1],
    ],
    ids=str,
)
def test_anything_else_is_an_error_that_shows_what_is_expected(wrong: object) -> None:
    with pytest.raises(BudgetError, match="expected") as error:
        parse_budget(wrong)
    assert repr(wrong) in str(error.value) and "6GiB" in str(error.value)


def test_a_fraction_is_one_of_the_predicted_peak_without_remat() -> None:
    assert limit_bytes(0.5, 1001) == 500
    assert limit_bytes(7, 1001) == 7
    baseline = remat.plan(LOSS, *ARGS, remat_policy="save_all").peak_bytes
    half = remat.plan(LOSS, *ARGS, remat_policy=STEADY, budget=0.5)
    assert half.baseline_peak_bytes == baseline
    assert half.budget_bytes == baseline // 2
    assert half.peak_bytes <= baseline // 2
    same = remat.plan(LOSS, *ARGS, remat_policy=STEADY, budget=baseline // 2)
    text = remat.plan(LOSS, *ARGS, remat_policy=STEADY, budget=f"{baseline // 2}B")
    assert half == same == text


def test_a_margin_is_left_to_the_prediction_unless_it_is_not_wanted() -> None:
    made = [make_plan(training_graph(seed), Full()) for seed in range(4)]
    for plan in made:
        budget = plan.peak_bytes  # what there is is met exactly, if nothing needs less
        careful = plan_within(plan.graph, STEADY, budget)
        exact = plan_within(plan.graph, STEADY, budget, margin=0.0)
        wide = plan_within(plan.graph, STEADY, int(budget / 0.97) + 1)
        for found, limit in ((careful, budget), (exact, budget), (wide, int(budget / 0.97) + 1)):
            assert found.peak_bytes <= limit
        assert exact.recompute_seconds <= careful.recompute_seconds
        assert exact.recompute_seconds == wide.recompute_seconds


@dataclass(frozen=True)
class Undecided(BudgetPolicy):
    """Keeps everything, whatever the sites, and says that all plans cost the same but for `apart`."""

    offered: tuple[frozenset[str], ...]
    apart: int = 0
    name: ClassVar[str] = "undecided"

    def shortlist(self, menu: Alternatives, budget_bytes: int | None) -> tuple[frozenset[str], ...]:
        del menu, budget_bytes
        return self.offered

    def sites(self, menu: Alternatives, budget_bytes: int | None) -> frozenset[str]:
        return self.shortlist(menu, budget_bytes)[0]

    def decide(self, graph: Graph) -> Decision:
        cost = 10**6 + self.apart * len(graph.sites)
        certificate = Certificate("made up", cost, cost)
        return replace(SaveAll().decide(graph), certificate=certificate)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        del budget_bytes
        return self.decide(graph)


def test_of_plans_that_cost_the_same_the_one_that_moves_less_is_taken() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        window = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        pooled = jax.lax.reduce_window(jnp.sin(x) * w, -jnp.inf, jax.lax.max, *window)
        return jnp.sum(pooled * pooled)

    args = (jnp.ones((4, 64, 64, 16)), jnp.ones(16))
    exact = remat.plan(loss, *args, remat_policy=MinCut(implementations="exact")).graph.sites
    assert exact
    every, nothing = frozenset(exact), frozenset[str]()

    def planned(*sites: frozenset[str], apart: int = 0) -> Plan:
        return remat.plan(loss, *args, remat_policy=Undecided(sites, apart), budget="1GiB")

    def traffic(plan: Plan) -> int:
        return predict(plan.graph, plan.schedule).traffic_bytes

    both = planned(every), planned(nothing)
    assert [frozenset(plan.graph.sites) for plan in both] == [every, nothing]
    assert traffic(both[0]) != traffic(both[1])
    least = min(both, key=traffic)
    for order in ((every, nothing), (nothing, every)):
        assert planned(*order).graph.sites == least.graph.sites
        assert planned(*order, apart=1000).graph.sites == ()  # cheaper by a tenth of a percent


def test_a_policy_that_cannot_plan_within_a_budget_is_only_checked() -> None:
    free = remat.plan(LOSS, *ARGS, remat_policy="full")
    checked = remat.plan(LOSS, *ARGS, remat_policy="full", budget=free.peak_bytes)
    assert checked.schedule == free.schedule
    assert checked.budget_bytes == free.peak_bytes
    with pytest.raises(BudgetError, match="try remat_policy='ilp'") as refused:
        remat.plan(LOSS, *ARGS, remat_policy="full", budget=free.peak_bytes - 1)
    assert refused.value.smallest_peak_bytes == free.peak_bytes
    assert f"budget of {free.peak_bytes - 1:,} bytes" in str(refused.value)
    assert f"peaks at {free.peak_bytes:,} bytes" in str(refused.value)


def test_jaxs_policies_and_plans_cannot_hold_a_budget() -> None:
    plan = remat.plan(LOSS, *ARGS)
    for policy in ("dots_saveable", None):
        with pytest.raises(BudgetError, match="one of remat's own policies"):
            resolve(policy, 0.5)
    with pytest.raises(BudgetError, match="a saved plan has the budget that it was made for"):
        resolve(plan, 0.5)
    found = resolve("ilp", "1KiB")
    assert isinstance(found, PolicyPlanner) and found.budget == 1024


def test_a_plan_is_held_to_the_byte() -> None:
    plan = remat.plan(LOSS, *ARGS)
    assert held(plan, plan.peak_bytes).schedule == plan.schedule
    assert held(plan, plan.peak_bytes).budget_bytes == plan.peak_bytes
    assert held(plan, 1.0).budget_bytes == plan.baseline_peak_bytes
    with pytest.raises(BudgetError):
        held(plan, plan.peak_bytes - 1)


def test_the_error_names_the_largest_operator_and_what_it_needs() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w @ w.T) ** 2)

    w, x = jnp.ones((8, 4096)), jnp.ones((512, 8))
    with pytest.raises(BudgetError) as refused:
        remat.plan(loss, w, x, remat_policy=QUICK, budget="1MiB")
    assert re.search(r"f32\[512,4096\]( of \w+)? \(8,388,608 bytes\)", str(refused.value))
    assert refused.value.smallest_peak_bytes is not None
    assert refused.value.smallest_peak_bytes >= 512 * 4096 * 4


# --- asking a policy until the prediction fits -------------------------------------------------------


@dataclass(frozen=True)
class Stubborn(BudgetPolicy):
    """Plans for `factor` times what it is asked for; `asked` notes what that was."""

    asked: ClassVar[list[int]] = []
    factor: float = 1.0
    name: ClassVar[str] = "stubborn"

    def decide(self, graph: Graph) -> Decision:
        return SaveAll().decide(graph)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        self.asked.append(budget_bytes)
        plans = [make_plan(graph, MinCut(memory_weight=w, heavy="roofline")) for w in (0, 3, 60)]
        plans += [make_plan(graph, policy) for policy in (SaveAll(), Full())]
        fitting = [p for p in plans if p.peak_bytes <= self.factor * budget_bytes]
        if not fitting:
            least = min(p.peak_bytes for p in plans)
            raise BudgetError(f"Smallest peak found: {least:,} bytes.", smallest_peak_bytes=least)
        return Decision(frozenset(max(fitting, key=lambda p: p.peak_bytes).saved_values))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 3.0])
def test_a_policy_that_counts_otherwise_is_asked_again_a_few_times(factor: float) -> None:
    graph = remat.plan(LOSS, *ARGS).graph
    least = min(make_plan(graph, p).peak_bytes for p in (Full(), MinCut(memory_weight=60)))
    budget = int(1.2 * max(least, make_plan(graph, Full()).peak_bytes))
    Stubborn.asked.clear()
    plan = plan_within(graph, Stubborn(factor), budget)
    assert plan.peak_bytes <= budget
    assert 1 <= len(Stubborn.asked) <= 10
    assert len(set(Stubborn.asked)) == len(Stubborn.asked)
    assert Stubborn.asked[0] == int(0.97 * budget)


def test_a_policy_that_always_exceeds_is_an_error_with_the_smallest_it_made() -> None:
    graph = remat.plan(LOSS, *ARGS).graph

    @dataclass(frozen=True)
    class Deaf(BudgetPolicy):
        name: ClassVar[str] = "deaf"

        def decide(self, graph: Graph) -> Decision:
            return SaveAll().decide(graph)

        def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
            return SaveAll().decide(graph)

    keep = make_plan(graph, SaveAll()).peak_bytes
    with pytest.raises(BudgetError, match="'deaf' does not meet") as refused:
        plan_within(graph, Deaf(), keep // 2)
    assert refused.value.smallest_peak_bytes == keep


# --- more memory never costs more --------------------------------------------------------------------


@pytest.mark.slow
@given(seed=seeds)
@laws(6)
def test_the_optimum_never_rises_with_the_budget(seed: int) -> None:
    graph = training_graph(seed)
    problem = condense(graph).problem
    top, costs = peak_of_order(problem), []
    for share in (0.5, 0.65, 0.8, 0.9, 1.0):
        try:
            found = Checkmate(seconds=20.0).decide_within(graph, int(share * top))
        except BudgetError:
            assert not costs  # feasible with less, so with more
            continue
        assert found.certificate is not None and found.buffer_peak_bytes is not None
        assert found.certificate.gap <= 1e-6  # that of the solver
        assert found.buffer_peak_bytes <= int(share * top)
        costs.append(found.certificate.value)
    assert all(more <= less * (1 + 1e-6) for less, more in itertools.pairwise(costs))
    assert costs[-1] == round(problem.total_cost * 10**12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("planner", ["ilp", "sublinear"])
def test_the_trade_off_is_monotone(planner: str) -> None:
    curve = pareto(LOSS, *ARGS, remat_policy=PLANNERS[planner], points=5)
    assert not curve.infeasible and len(curve.points) >= 3
    for less, more in itertools.pairwise(curve.points):
        assert less.budget_bytes < more.budget_bytes
        assert less.recompute_seconds >= more.recompute_seconds
    assert all(point.peak_bytes <= point.budget_bytes for point in curve.points)
    assert curve.points[0].recompute_seconds > curve.points[-1].recompute_seconds
