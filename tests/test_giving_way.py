"""The default policies plan a loss only where a plan is predicted to be of use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from models import cases
from remat.memory.predict import predict
from remat.plans.plan import Plan
from remat.policies import LowMemory, MinCut, Unchanged
from tests.test_memory_rules import recommender, recommender_of_one_table, shape


def codebook() -> tuple[Any, tuple[Any, ...]]:
    """Vector quantization (van den Oord et al. 2017): the code that is nearest, straight through."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        z = jax.nn.relu(x @ params["into"]) @ params["down"]
        codes = params["codes"]
        distances = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ codes.T + jnp.sum(codes**2, -1)
        near = codes[jnp.argmin(distances, -1)]
        out = jax.nn.relu((z + jax.lax.stop_gradient(near - z)) @ params["up"]) @ params["out"]
        return jnp.mean((out - x) ** 2) + jnp.mean((jax.lax.stop_gradient(z) - near) ** 2)

    sizes = {"into": (784, 512), "down": (512, 64), "up": (64, 512), "out": (512, 784)}
    params = {name: shape(*size) for name, size in sizes.items()} | {"codes": shape(1024, 64)}
    return loss, (params, shape(4096, 784))


def coupling() -> tuple[Any, tuple[Any, ...]]:
    """Affine couplings (Dinh et al. 2017): halves that are scaled and shifted by what is made of the other."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for number, (first, second) in enumerate(params):
            a, b = jnp.split(x, 2, -1)
            a, b = (b, a) if number % 2 else (a, b)
            scale, move = jnp.split(jax.nn.relu(a @ first) @ second, 2, -1)
            scale = jnp.tanh(scale)
            total = total + jnp.mean(jnp.sum(scale, -1))
            x = jnp.concatenate([a, b * jnp.exp(scale) + move], -1)
        return jnp.mean(jnp.sum(x**2, -1)) - total

    return loss, ([(shape(32, 256), shape(256, 64))] * 4, shape(8192, 64))


def is_plain(plan: Plan) -> bool:
    computed = list(plan.schedule.computed())
    barriers = [step for step in plan.schedule.steps if step.action == "barrier"]
    return len(computed) == len(set(computed)) and not barriers


PROGRAMS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "codebook": codebook,
    "coupling": coupling,
    "recommender": lambda: recommender(6, 2),
    "recommender_of_one_table": lambda: recommender_of_one_table(4),
    **{name: getattr(cases, name) for name in cases.SMALL_CASES[:8]},
}


@pytest.mark.parametrize("policy", ["min_cut", "low_memory"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loss_is_planned_only_if_less_is_taken_or_moved(name: str, policy: str) -> None:
    loss, args = PROGRAMS[name]()
    plan = remat.plan(loss, *args, remat_policy=policy)
    moved = predict(plan.graph, plan.schedule, loops=plan.loops).traffic_bytes
    plain = remat.plan(loss, *args, remat_policy=Unchanged())
    assert (
        plan.loops
        or plan.peak_bytes < plan.baseline_peak_bytes
        or moved < predict(plain.graph, plain.schedule).traffic_bytes
        or is_plain(plan)
    )
    if is_plain(plan) and not plan.loops:
        assert plan.peak_bytes == plain.peak_bytes
        assert plan.policy_name == policy
        assert any("no less memory" in note for note in plan.notes)


def test_some_programs_stay_as_they_are_and_some_do_not() -> None:
    found = {
        is_plain(remat.plan(loss, *args, remat_policy="min_cut"))
        for loss, args in (
            coupling(),
            PROGRAMS["recommender_of_one_table"](),
            cases.residual_mlp(),
        )
    }
    assert found == {True, False}


def test_who_says_what_memory_is_worth_gets_that_plan() -> None:
    loss, args = coupling()
    assert is_plain(remat.plan(loss, *args, remat_policy=MinCut()))
    for policy in (
        MinCut(memory_weight=1.25),
        LowMemory(memory_weight=1.25),
        MinCut.paper(),
        "full",
    ):
        assert not is_plain(remat.plan(loss, *args, remat_policy=policy))


def test_a_part_of_a_loss_keeps_less_whatever_its_own_peak_is() -> None:
    """Alone it takes no less; of many, each keeps its inputs till the backward pass."""

    def part(params: Any, x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        scale, move = jnp.split(jax.nn.relu(a @ params[0]) @ params[1], 2, -1)
        return jnp.concatenate([a, b * jnp.exp(jnp.tanh(scale)) + move], -1)

    args = ((shape(32, 256), shape(256, 64)), shape(8192, 64))
    plan = remat.plan(part, *args, remat_policy="min_cut", argnums=(0, 1))
    assert plan.saved_bytes < plan.baseline_saved_bytes
    assert not is_plain(plan)


def test_a_policy_of_jax_is_what_was_asked_for() -> None:
    loss, args = coupling()
    plan = remat.plan(loss, *args, remat_policy="min_cut", lowering="policy")
    assert not is_plain(plan)


@pytest.mark.parametrize("name", ["codebook", "coupling"])
def test_gradients_are_those_of_plain_jax(name: str) -> None:
    loss, shapes = PROGRAMS[name]()
    keys = iter(jax.random.split(jax.random.key(0), 20))
    args = jax.tree.map(lambda s: 0.1 * jax.random.normal(next(keys), s.shape, s.dtype), shapes)
    expected = jax.jit(jax.value_and_grad(loss))(*args)
    found = jax.jit(jax.value_and_grad(remat.checkpoint(loss)))(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.array_equal(one, other)
