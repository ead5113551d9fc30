"""Schedules recompute as late and free as early as they can, with a barrier where a stage begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from random_graphs import GraphBuilder, chain, graphs, laws

import remat
from models.mlp import boundary_names, residual_mlp
from remat.core.graph import Graph
from remat.plans.plan import Plan
from remat.plans.schedule import build_schedule, no_remat_saved
from remat.plans.simulate import simulate
from remat.plans.stages import stage_points
from remat.plans.steps import Step
from remat.policies import Names
from remat.policies.base import required_saves
from tests.programs import described, needed_for


def least(graph: Graph) -> frozenset[int]:
    return required_saves(graph, frozenset())


# --- exact -----------------------------------------------------------------------------------------


def test_a_chain_with_nothing_kept() -> None:
    # x=0 -> 1 -> 2 -> 3; cotangent 4; 5 = 3 * 4, 6 = 2 * 5, gradient 7 = 1 * 6.
    assert described(build_schedule(chain(3), (), barriers=False)) == [
        "compute 0",
        "compute 1",
        "free 1",
        "compute 2",
        "free 2",
        "turn",
        "compute 0",
        "compute 1",
        "compute 2",
        "compute 3",
        "compute 4",
        "free 2",
        "free 5",
        "compute 5",
        "free 1",
        "free 6",
    ]


def test_a_chain_with_everything_kept() -> None:
    assert described(build_schedule(chain(3), (1, 2, 3), barriers=False)) == [
        "compute 0",
        "compute 1",
        "compute 2",
        "turn",
        "compute 3",
        "compute 4",
        "free 2",
        "free 5",
        "compute 5",
        "free 1",
        "free 6",
    ]


def test_a_kept_mask_is_encoded_where_it_is_made_and_dropped_where_it_is_read() -> None:
    builder = GraphBuilder()
    x = builder.input()
    mask = builder.op("gt", [x], dtype="bool")
    y = builder.op("select", [mask, x])
    ct = builder.cotangent()
    graph = builder.build([y], [builder.op("select", [mask, ct])])
    assert described(build_schedule(graph, [mask], barriers=False)) == [
        "compute 0",
        "encode 1",
        "compute 1",
        "free 1",
        "turn",
        "decode 1",
        "drop 1",
        "compute 2",
        "free 1",
    ]


def test_what_only_the_backward_pass_reads_is_not_computed_in_the_forward_pass() -> None:
    builder = GraphBuilder()
    x = builder.input()
    y = builder.op("sin", [x])
    slope = builder.op("cos", [x])
    ct = builder.cotangent()
    graph = builder.build([y], [builder.op("mul", [slope, ct])])
    assert described(build_schedule(graph, (), barriers=False)) == [
        "compute 0",
        "turn",
        "compute 1",
        "compute 2",
        "free 2",
    ]


# --- laws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("barriers", [True, False], ids=["barriers", "no-barriers"])
@given(graph=graphs())
@laws(80)
def test_a_repeated_operator_serves_the_very_next_backward_operator(
    barriers: bool, graph: Graph
) -> None:
    group: list[int] = []
    for step in build_schedule(graph, least(graph), barriers=barriers).backward:
        if step.action != "compute":
            continue
        op = graph.ops[step.target]
        if op.phase == "forward":
            group.append(op.id)
            continue
        assert needed_for(graph, op.inputs).issuperset(group)
        group = []
    assert needed_for(graph, graph.gradients).issuperset(group)


@pytest.mark.parametrize("keep", [least, no_remat_saved], ids=["least", "all"])
@given(graph=graphs())
@laws(80)
def test_a_value_is_freed_right_after_its_last_use(keep: object, graph: Graph) -> None:
    saved = keep(graph)  # type: ignore[operator]
    schedule = build_schedule(graph, saved, barriers=False)
    touched: set[int] = set()
    for step in schedule.steps:
        if step.action == "compute":
            op = graph.ops[step.target]
            touched = {*op.inputs, *op.outputs}
        elif step.action in ("encode", "decode"):
            touched = {step.target}
        elif step.action == "free":
            assert step.target in touched


@pytest.mark.parametrize("barriers", [True, False], ids=["barriers", "no-barriers"])
@pytest.mark.parametrize("keep", [least, no_remat_saved], ids=["least", "all"])
@given(graph=graphs())
@laws(80)
def test_nothing_is_left_when_the_schedule_ends(keep: object, barriers: bool, graph: Graph) -> None:
    saved = keep(graph)  # type: ignore[operator]
    schedule = build_schedule(graph, saved, barriers=barriers)
    assert simulate(graph, schedule, fused=False).timeline.live_bytes[-1] == 0
    assert simulate(graph, schedule, fused=True).timeline.live_bytes[-1] == 0


@given(graph=graphs())
@laws(80)
def test_without_barriers_the_backward_pass_has_none(graph: Graph) -> None:
    schedule = build_schedule(graph, least(graph), barriers=False)
    assert all(step.action != "barrier" for step in schedule.backward)


@given(graph=graphs())
@laws(80)
def test_barriers_change_nothing_but_where_recomputation_starts(graph: Graph) -> None:
    tied = build_schedule(graph, least(graph))
    loose = build_schedule(graph, least(graph), barriers=False)
    backward = [
        [s.target for s in x.backward if s.action == "compute" and is_backward(graph, s)]
        for x in (tied, loose)
    ]
    assert backward[0] == backward[1] == [op.id for op in graph.backward_ops()]
    assert tied.forward == loose.forward


def is_backward(graph: Graph, step: Step) -> bool:
    return graph.ops[step.target].phase == "backward"


@given(graph=graphs())
@laws(80)
def test_a_schedule_turns_once_and_runs_each_backward_operator_once(graph: Graph) -> None:
    schedule = build_schedule(graph, least(graph))
    assert [step.action for step in schedule.steps].count("turn") == 1
    assert schedule.steps == (*schedule.forward, Step("turn"), *schedule.backward)
    runs = Counter(schedule.computed())
    assert all(runs[op.id] == 1 for op in graph.backward_ops())
    assert not any(is_backward(graph, s) for s in schedule.forward if s.action == "compute")


@given(graph=graphs())
@laws(80)
def test_keeping_everything_repeats_nothing(graph: Graph) -> None:
    runs = Counter(build_schedule(graph, no_remat_saved(graph)).computed())
    assert max(runs.values()) == 1


@given(graph=graphs())
@laws(80)
def test_a_stage_point_lists_backward_values_alive_there(graph: Graph) -> None:
    for point in stage_points(graph):
        for value in point.frontier:
            producer = graph.values[value].producer
            assert not graph.forward_values[value]
            assert producer is None or producer < point.op
            assert max(graph.users[value]) >= point.op


def test_a_barrier_does_not_tie_a_value_that_the_recomputation_makes_again() -> None:
    # One result of `split` is kept by its name; the operator runs again for the other.
    builder = GraphBuilder()
    x = builder.input((64, 8))
    kept, other = builder.ops_with("split", [x], [((64, 8), "float32", ())] * 2)
    hidden = builder.op("dot", [kept, other], (64, 8))
    y = builder.op("dot", [hidden], (64, 8))
    ct = builder.cotangent((64, 8))
    first = builder.op("dot", [ct, kept], (64, 8))
    second = builder.op("dot", [first, hidden], (64, 8))
    graph = builder.build([y], [second])
    simulate(graph, build_schedule(graph, [kept]))


def test_a_large_drawn_mask_that_is_drawn_again_is_not_tied_before_it_is_there() -> None:
    builder = GraphBuilder()
    shape = (256, 256)
    x = builder.input(shape)
    bits = builder.op("bits", [x], shape)
    mask = builder.op("lt", [bits], shape, "bool")
    y = builder.op("select", [mask, x], shape)
    ct = builder.cotangent(shape)
    graph = builder.build([y], [builder.op("select", [mask, ct], shape)])
    simulate(graph, build_schedule(graph, ()))


# --- a residual network ------------------------------------------------------------------------------


LAYERS = 4


@pytest.fixture(scope="module")
def network() -> Plan:
    loss, args = residual_mlp(layers=LAYERS, width=64, hidden=256, batch=128)
    return remat.plan(loss, *args, remat_policy=Names(boundary_names(LAYERS)))


def stages(plan: Plan) -> list[list[int]]:
    """Forward operators that run again, one list per barrier; the first list precedes all barriers."""
    found: list[list[int]] = [[]]
    for step in plan.schedule.backward:
        if step.action == "barrier":
            found.append([])
        elif step.action == "compute" and plan.graph.ops[step.target].phase == "forward":
            found[-1].append(step.target)
    return found


def heavy_stages(plan: Plan) -> list[set[int]]:
    """The matmuls that run again in each stage that repeats any."""
    ops = plan.graph.ops
    found = [{op for op in stage if ops[op].heavy} for stage in stages(plan)]
    return [stage for stage in found if stage]


def test_heavy_recomputation_has_one_barrier_per_layer_boundary(network: Plan) -> None:
    assert len(heavy_stages(network)) == LAYERS
    # Nothing runs again before the first barrier: XLA would merge it with the forward pass.
    assert stages(network)[0] == []


def test_each_stage_repeats_the_matmuls_of_its_own_layer_only(network: Plan) -> None:
    heavy = heavy_stages(network)
    for earlier, later in pairwise(heavy):
        assert not earlier & later
        assert max(later) < min(earlier)
    # The last layer's result is not kept, and the loss reads it, so its third matmul runs again too.
    assert [len(ops) for ops in heavy] == [3, 2, 2, 2]


def test_every_barrier_has_something_to_recompute_behind_it(network: Plan) -> None:
    _, *behind = stages(network)
    assert all(behind)


def test_every_barrier_ties_a_cotangent(network: Plan) -> None:
    forward = network.graph.forward_values
    for step in network.schedule.backward:
        if step.action == "barrier":
            assert any(not forward[value] for value in step.values)
            assert len(set(step.values)) == len(step.values)


def test_names_between_layers_hold_one_layer_at_a_time(network: Plan) -> None:
    assert network.saved_bytes == (LAYERS - 1) * 128 * 64 * 4
    assert network.peak_bytes < network.baseline_peak_bytes / 2


def _column(w: Any, x: jax.Array) -> jax.Array:
    """A last layer of one column: the gradient of what it reads is an outer product."""
    return jnp.mean((_residual(w, x) @ w[2]) ** 2)


def _pooled(w: Any, x: jax.Array) -> jax.Array:
    """A mean over positions: the gradient of what it reads is spread over all of them."""
    return jnp.mean((_residual(w, x).mean(1) @ w[2]) ** 2)


def _pooled_twice(w: Any, x: jax.Array) -> jax.Array:
    """Means along two axes: the gradient of what they read is a sum of two that are spread."""
    y = _residual(w, x)
    return jnp.sum(jnp.sin(y.mean(1))) + jnp.sum(jnp.sin(y.mean(2)))


def _residual(w: Any, x: jax.Array) -> jax.Array:
    """Between its layers just the gradient of the sum so far is alive, which three fusible operators read."""
    y = jnp.tanh(x @ w[0])
    for _ in range(3):
        y = y + jax.nn.gelu(y @ w[1])
    return y


def _cast(w: Any, x: jax.Array) -> jax.Array:
    """A loss in float32 of activations in bfloat16: the gradient of the last is cast from an outer product."""
    half = [a.astype("bfloat16") for a in w]
    y = jax.nn.gelu(jnp.tanh(x.astype("bfloat16") @ half[0]) @ half[1]).astype("float32")
    return jnp.mean(((y * jnp.cos(y)) @ w[2]) ** 2)


def _least_read_bytes(graph: Graph, value: int) -> int:
    """The least that a kernel reads instead of a value that it can make itself."""
    found = graph.values[value]
    op = None if found.producer is None else graph.ops[found.producer]
    if op is None or graph.forward_values[value] or not op.fusible or op.kind == "REDUCTION":
        return found.nbytes
    return min(found.nbytes, sum(_least_read_bytes(graph, v) for v in {*op.inputs}))


@pytest.mark.parametrize("function", [_column, _pooled, _pooled_twice, _cast])
def test_barriers_do_not_write_what_kernels_spread(function: Callable[..., jax.Array]) -> None:
    weights = [jnp.ones((16, 128)) / 16, jnp.ones((128, 128)) / 128, jnp.ones((128, 1))]
    args = weights, jnp.ones((4, 64, 16))
    plan = remat.plan(function, *args, remat_policy="full")
    graph = plan.graph
    barriers = [step for step in plan.schedule.steps if step.action == "barrier"]
    assert barriers
    tied = {v for step in barriers for v in step.values if not graph.forward_values[v]}
    for value in tied:
        is_written = any(not graph.ops[user].fusible for user in graph.users[value])
        assert is_written or _least_read_bytes(graph, value) == graph.values[value].nbytes
    ours = jax.grad(remat.checkpoint(function, remat_policy=plan))(*args)
    for our, their in zip(ours, jax.jit(jax.grad(function))(*args), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-2, atol=1e-5)
