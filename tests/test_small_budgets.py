"""Small programs and graphs: nothing that needs no plan is refused, and what an error names can be planned for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import graphs, laws
from test_budget import training_graph

import remat
from remat.core import deadline
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.memory.predict import peak_bytes
from remat.planning.make import plan_from_saved
from remat.planning.within import plan_within
from remat.plans.plan import Plan
from remat.policies import (
    Auto,
    Checkmate,
    Dtr,
    Echo,
    Full,
    Ilp,
    MinCut,
    Monet,
    Policy,
    Revolve,
    SaveAll,
    Sublinear,
    Unchanged,
)
from remat.policies.base import Decision

STARTS = Ilp(method="starts")
POLICIES: dict[str, Policy] = {
    "ilp": STARTS,
    "ilp-search": Ilp(method="search", effort=10),
    "monet": Monet(exact_limit=0, effort=10),
    "checkmate": Checkmate(method="approximate", seconds=5.0),
    "auto": Auto(ilp=STARTS),
    "revolve": Revolve(),
    "dtr": Dtr(),
    "sublinear": Sublinear(),
    "recursive": Sublinear("recursive", 1),
    "min_cut": MinCut(),
    "full": Full(),
    "echo": Echo(),
    "save_all": SaveAll(),
}
LOOKS = ("ilp", "ilp-search", "auto")  # look for any plan that fits
QUICK = ("min_cut", "full", "echo", "revolve", "sublinear")
policies = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit ends a planning here, on however busy a machine."""
    monkeypatch.setattr(deadline, "_clock", lambda: 0.0)


def random_program(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Up to six operators on arrays of a few KiB, in 32 or 64 bits, some with loops; both arguments matter."""
    rng = random.Random(seed)
    width, rows = rng.choice((4, 8, 16)), rng.choice((4, 8, 32))
    names = ("dot", "relu", "sin", "max", "norm", "softmax", "add", "pool", "scan", "where", "gelu")
    chosen = [rng.choice(names) for _ in range(rng.randint(1, 6))]

    def step(name: str, x: jax.Array, kept: jax.Array, w: jax.Array) -> jax.Array:
        if name == "scan":
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]
        if name == "pool":
            pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID")
            return jnp.repeat(pooled, 2, axis=0)
        return {
            "dot": lambda: x @ w,
            "relu": lambda: jax.nn.relu(x),
            "sin": lambda: 2 * jnp.sin(x),
            "max": lambda: jnp.maximum(x, kept),
            "norm": lambda: x / jnp.sqrt(1 + jnp.mean(x * x, -1, keepdims=True)),
            "softmax": lambda: jax.nn.softmax(x),
            "add": lambda: x + kept,
            "where": lambda: jnp.where(x > kept, x, jnp.exp(-x * x)),
            "gelu": lambda: jax.nn.gelu(x),
        }[name]()

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        kept = y = x
        for name in chosen:
            y = step(name, y, kept, w)
        return jnp.sum(y * y)

    dtype = rng.choice((jnp.float32, jnp.float64))
    return loss, (
        jax.ShapeDtypeStruct((rows, width), dtype),
        jax.ShapeDtypeStruct((width, width), dtype),
    )


# Softmax behind a pool and others whose schedules of keeping everything were predicted above the plain program.
SEEDS = (3, 21, 28, 31, 44, 98, 123, 136)


@pytest.mark.sample(3)
@policies
def test_a_program_that_needs_no_plan_is_not_refused(policy: str) -> None:
    with jax.enable_x64(True):
        for seed in SEEDS:
            loss, args = random_program(seed)
            plan = remat.plan(
                loss, *args, argnums=(0, 1), remat_policy=POLICIES[policy], budget=1.0
            )
            assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes, seed


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["ilp", "auto", "sublinear", "min_cut"])
def test_what_an_error_names_can_be_planned_for(policy: str) -> None:
    refused = 0
    with jax.enable_x64(True):
        for seed in SEEDS:
            loss, args = random_program(seed)

            def plan(budget: float, loss: Any = loss, args: Any = args) -> Plan:
                return remat.plan(
                    loss, *args, argnums=(0, 1), remat_policy=POLICIES[policy], budget=budget
                )

            try:
                plan(0.3)
            except BudgetError as error:
                refused += 1
                assert error.smallest_peak_bytes is not None
                assert plan(error.smallest_peak_bytes).peak_bytes <= error.smallest_peak_bytes
    assert refused


@policies
@given(graph=graphs())
@laws(12)
def test_the_peak_of_any_graph_is_a_budget(policy: str, graph: Graph) -> None:
    budget = peak_bytes(graph)
    assert plan_within(graph, POLICIES[policy], budget).peak_bytes <= budget


@given(graph=graphs())
@laws(60)
def test_the_program_as_it_is_is_predicted_as_the_plain_program(graph: Graph) -> None:
    plan = plan_from_saved(
        graph, Unchanged().decide(graph), policy_name="unchanged", barriers=False
    )
    assert plan.peak_bytes == plan.baseline_peak_bytes == peak_bytes(graph)
    assert not plan.recomputed


@pytest.mark.slow
@pytest.mark.parametrize("policy", LOOKS)
@given(seed=st.integers(0, 2**20), share=st.floats(0.1, 0.6))
@laws(4)
def test_no_other_policy_is_below_what_an_error_names(policy: str, seed: int, share: float) -> None:
    graph = training_graph(seed)
    try:
        plan_within(graph, POLICIES[policy], int(share * peak_bytes(graph)))
    except BudgetError as error:
        named = error.smallest_peak_bytes
        assert named is not None
        assert plan_within(graph, POLICIES[policy], named).peak_bytes <= named
        for other in QUICK:
            made = POLICIES[other].decide(graph)
            plan = plan_from_saved(graph, made, policy_name=other)
            assert plan.peak_bytes >= named, other


def test_keeping_everything_repeats_nothing() -> None:
    """With the memory for it no policy that plans within a budget repeats a matmul."""
    graph = training_graph(7)
    for name in ("ilp", "ilp-search", "monet", "revolve", "sublinear"):
        plan = plan_within(graph, POLICIES[name], peak_bytes(graph))
        assert not any(plan.graph.ops[entry.op].heavy for entry in plan.recomputed), name


def test_a_policy_without_budgets_makes_way_for_the_program_as_it_is() -> None:
    """The budget is what counts where a policy takes more than nothing at all would."""

    @dataclass(frozen=True)
    class Wasteful:
        """Repeats all it can, all at once."""

        name: ClassVar[str] = "wasteful"

        def decide(self, graph: Graph) -> Decision:
            free = plan_from_saved(graph, Full().decide(graph), policy_name=self.name)
            return replace(
                Full().decide(graph), buffer_peak_bytes=2 * free.baseline_peak_bytes + 10**6
            )

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 32), (256, 32))]
    free = remat.plan(loss, *shapes, remat_policy=Wasteful())
    assert free.peak_bytes > free.baseline_peak_bytes
    plan = remat.plan(loss, *shapes, remat_policy=Wasteful(), budget=1.0)
    assert plan.peak_bytes == free.baseline_peak_bytes and not plan.recomputed
    with pytest.raises(BudgetError) as refused:
        remat.plan(loss, *shapes, remat_policy=Wasteful(), budget=0.5)
    assert refused.value.smallest_peak_bytes == free.baseline_peak_bytes
