"""Gradients of what is used often are added up as they come."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

import remat
from remat.core.graph import Graph
from remat.plans.plan import Plan
from remat.plans.schedule import build_schedule, no_remat_saved
from remat.plans.simulate import simulate
from remat.plans.stages import accumulations, stage_points
from remat.policies.buffers.condense import buffers_of, condense

WIDTH = 64


def recurrent(steps: int, *, is_cast: bool = False, is_transposed: bool = False) -> Any:
    """A network that uses two weights once per step, and one of them in two ways."""

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        for _ in range(steps):
            first, second = weights
            if is_cast:
                first = first.astype(jnp.bfloat16).astype(jnp.float32)
            if is_transposed:
                second = second.T
            x = jnp.tanh(x @ first) + jnp.sin(x @ second)
        return jnp.sum(x**2)

    return loss


def arguments() -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    first, second = (jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in keys[:2])
    return (first, second), jax.random.normal(keys[2], (4, WIDTH))


def sum_ties(plan: Plan) -> list[tuple[int, ...]]:
    ops = [plan.graph.ops[s.target] for s in plan.schedule.backward if s.action == "compute"]
    ties = accumulations(plan.graph, [op for op in ops if op.phase == "backward"])
    return [
        step.values
        for step in plan.schedule.backward
        if step.action == "barrier" and step.values in ties.values()
    ]


@given(steps=st.integers(4, 40), is_cast=st.booleans(), is_transposed=st.booleans())
@laws()
def test_of_n_terms_about_the_root_is_left_between_two_ties(
    steps: int, is_cast: bool, is_transposed: bool
) -> None:
    loss = recurrent(steps, is_cast=is_cast, is_transposed=is_transposed)
    graph = remat.plan(loss, *arguments(), remat_policy="save_all").graph
    found = accumulations(graph, list(graph.backward_ops()))
    values = graph.values
    for op, tied in found.items():
        *sums, anchor = tied
        assert graph.ops[op].outputs[0] in sums and anchor not in sums
        assert {graph.ops[values[v].producer or 0].name for v in sums} == {"add_any"}
        # All of it is there, and is read later.
        assert all((values[v].producer or 0) <= op < max(graph.users[v]) for v in tied)
    # Two sums of `steps` terms, tied together.
    every = math.isqrt(steps - 1) + 1
    assert len(found) >= (steps - 2) // every - 1
    assert all(len(tied) <= 3 for tied in found.values())


@given(steps=st.integers(4, 12), draw=st.randoms())
@laws()
def test_ties_hold_in_any_order_of_the_backward_pass(steps: int, draw: Random) -> None:
    graph = remat.plan(recurrent(steps), *arguments(), remat_policy="save_all").graph
    order = list(graph.backward_ops())
    done: list[int] = []
    made = {value.id for value in graph.values if graph.forward_values[value.id]}
    made.update(graph.cotangents)
    while order:
        op = draw.choice([op for op in order if made.issuperset(op.inputs)])
        order.remove(op)
        done.append(op.id)
        made.update(op.outputs)
    saved = no_remat_saved(graph)
    schedule = build_schedule(graph, saved, order=done, tie_sums=True)
    assert [op for op in schedule.computed() if graph.ops[op].phase == "backward"] == done
    simulate(graph, schedule)  # raises if a barrier ties what is not there


def test_gradients_are_those_of_jax_and_the_peak_is_lower() -> None:
    loss, args = recurrent(48), arguments()
    plan = remat.plan(loss, *args, remat_policy="min_cut")
    assert sum_ties(plan)
    # All terms at once are 96 matrices.
    matrix_bytes = WIDTH * WIDTH * 4
    assert plan.peak_bytes < 40 * matrix_bytes
    wrapped = remat.checkpoint(loss, remat_policy="min_cut")
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        found, expected = transform(wrapped)(*args), transform(loss)(*args)
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)


def test_the_program_as_it_is_has_no_ties() -> None:
    plan = remat.plan(recurrent(48), *arguments(), remat_policy="save_all")
    assert all(step.action != "barrier" for step in plan.schedule.steps)


def test_two_terms_and_small_sums_are_not_tied() -> None:
    graph = remat.plan(recurrent(2), *arguments(), remat_policy="save_all").graph
    assert not accumulations(graph, list(graph.backward_ops()))
    weights, _ = arguments()
    wide = jnp.ones((64 * WIDTH, WIDTH))  # what passes through is far larger than the weights
    graph = remat.plan(recurrent(4), weights, wide, remat_policy="save_all").graph
    assert not accumulations(graph, list(graph.backward_ops()))


def parts(rounds: int) -> Any:
    """Every round reads what is computed once beside what the last made: one matmul has both gradients."""

    def loss(params: tuple[list[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        weights, links = params[0], jnp.tanh(params[1])
        for weight in weights:
            x = jnp.tanh(jnp.concatenate([x, links], axis=-1) @ weight)
        return jnp.sum(x**2)

    keys = jax.random.split(jax.random.key(0), rounds)
    weights = [jax.random.normal(key, (4 * WIDTH, 2 * WIDTH)) / WIDTH for key in keys]
    x = jax.random.normal(jax.random.key(1), (512, 2 * WIDTH))
    return loss, ((weights, x[::-1]), x)


def test_terms_that_are_parts_of_larger_arrays_are_added_closely() -> None:
    loss, args = parts(8)
    plan = remat.plan(loss, *args, remat_policy="save_all")
    ties = accumulations(plan.graph, list(plan.graph.backward_ops()))
    # Seven additions of parts of arrays twice as large: one more between two ties than the root of 7 * 8 / 16.
    assert len(ties) == 7 // 2
    plan = remat.plan(loss, *args, remat_policy="full")
    wrapped = remat.checkpoint(loss, remat_policy=plan)
    found, expected = jax.grad(wrapped)(*args), jax.grad(loss)(*args)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)


def test_what_waits_in_a_sum_does_not_hide_where_stages_begin() -> None:
    loss, args = parts(8)
    graph = remat.plan(loss, *args, remat_policy="save_all").graph
    # One per round at least, though the gradient of the links is alive at all of them.
    assert len(stage_points(graph)) <= 4 and len(stage_points(graph, tie_sums=True)) >= 8


@pytest.mark.gpu_compile
def test_the_compiler_adds_up_as_well() -> None:
    loss, args = recurrent(48), arguments()
    plain = remat.compile_report(jax.grad(loss), *args, device="h200")
    wrapped = remat.checkpoint(loss, remat_policy="min_cut")
    tied = remat.compile_report(jax.grad(wrapped), *args, device="h200")
    assert 2 * tied.temp_bytes < plain.temp_bytes


@given(steps=st.integers(4, 40), is_cast=st.booleans(), is_transposed=st.booleans())
@laws()
def test_no_buffer_of_the_planners_needs_all_terms_at_once(
    steps: int, is_cast: bool, is_transposed: bool
) -> None:
    """A sum is a buffer at each of its ties: what is added there waits, and the sum so far."""
    loss = recurrent(steps, is_cast=is_cast, is_transposed=is_transposed)
    graph = remat.plan(loss, *arguments(), remat_policy="save_all").graph
    condensed = condense(graph)
    every = math.isqrt(steps - 1) + 1
    additions = [
        len(reads)
        for root, reads in zip(condensed.roots, condensed.problem.inputs, strict=True)
        if graph.ops[root].name == "add_any" and root in _of_weights(graph)
    ]
    assert additions and max(additions) <= every + 2
    tied = {
        v for values in accumulations(graph, list(graph.backward_ops())).values() for v in values
    }
    assert {v for v in tied if _adds(graph, v)} <= buffers_of(graph)


def _adds(graph: Graph, value: int) -> bool:
    producer = graph.values[value].producer
    return producer is not None and graph.ops[producer].name == "add_any"


def _of_weights(graph: Graph) -> set[int]:
    return {op.id for op in graph.ops if graph.values[op.outputs[0]].shape == (WIDTH, WIDTH)}


@pytest.mark.parametrize("policy", ["dtr", "sublinear"])
def test_planners_within_a_budget_know_that_sums_are_added_as_they_come(policy: str) -> None:
    """With all terms at once no plan of theirs would take less than the program as it is."""
    loss, args = recurrent(48), arguments()
    plan = remat.plan(loss, *args, remat_policy=policy, budget=0.5)
    assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes < 0.5 * plan.baseline_peak_bytes
    assert sum_ties(plan)
    found = jax.grad(remat.checkpoint(loss, remat_policy=plan))(*args)
    for mine, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.grad(loss)(*args)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)
