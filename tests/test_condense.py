"""From operators to buffers: which nodes there are, what they read, weigh and cost, and what a sequence keeps."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import GraphBuilder, graphs, laws, rngs

import remat
from remat.core.forms import stored_bytes
from remat.core.graph import Graph
from remat.planning.make import make_plan
from remat.policies import Ilp
from remat.policies.buffers.condense import Condensed, condense
from remat.policies.solvers.on_demand import kept_at_turn
from remat.policies.solvers.problem import peak_of_order, replay
from tests.programs import random_sequence

ROWS, WIDTH = 256, 64
WIDE = ROWS * WIDTH * 4  # bytes of an activation
SQUARE = WIDTH * WIDTH * 4  # of a weight


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def of_function(function: Callable[..., Any], *args: Any, **options: Any) -> Condensed:
    return condense(remat.plan(function, *args, remat_policy="save_all").graph, **options)


def names(condensed: Condensed, first: int = 0, last: int | None = None) -> list[str]:
    """Nodes as text: what is fused into them that does not fuse by itself, their root, what they read."""
    ops, found = condensed.graph.ops, []
    for node in range(len(condensed.roots))[first:last]:
        inside = [ops[op].name for op in condensed.fused[node] if not ops[op].fusible]
        reads = ",".join(map(str, condensed.problem.inputs[node]))
        found.append(f"{'+'.join([*inside, ops[condensed.roots[node]].name])}({reads})")
    return found


# --- traced functions ------------------------------------------------------------------------------


def gelu_chain(layers: int) -> Condensed:
    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return jnp.sum(x * x, axis=1)  # not of all: one block of threads would not make gelus

    return of_function(loss, (f32(WIDTH, WIDTH),) * layers, f32(ROWS, WIDTH))


def test_a_gelu_chain_has_two_buffers_per_layer() -> None:
    condensed = gelu_chain(3)
    problem = condensed.problem
    assert problem.turn == 6
    assert names(condensed, last=6) == [
        "dot_general()",
        "mul(0)",
        "dot_general(1)",
        "mul(2)",
        "dot_general(3)",
        "reduce_sum(4)",
    ]
    assert problem.sizes[:6].tolist() == [WIDE] * 5 + [0]  # the loss is a result
    assert problem.repeatable.tolist() == [True] * 6 + [False] * (len(problem) - 6)
    # The gelu and its derivative are made in the kernel that multiplies by the cotangent.
    assert names(condensed, 6, 8) == ["add_any(4)", "dot_general+transpose(3,6)"]
    assert problem.sizes[6:9].tolist() == [
        WIDE,
        0,
        WIDE,
    ]  # a gradient is a result, turned in its place


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_without_repetition_a_gelu_chain_peaks_where_the_backward_pass_begins(layers: int) -> None:
    # All matmul results, all gelus but the last, and the first cotangent.
    assert peak_of_order(gelu_chain(layers).problem) == (2 * layers - 1 + 1) * WIDE


def residual(layers: int) -> Condensed:
    def loss(weights: tuple[Any, ...], x: jax.Array) -> jax.Array:
        for a, b in weights:
            x = x + jnp.tanh(x @ a) @ b
        return jnp.sum(x * x, axis=1)

    return of_function(loss, ((f32(WIDTH, WIDTH),) * 2,) * layers, f32(ROWS, WIDTH))


def test_a_residual_sum_is_one_node_with_its_matmul() -> None:
    condensed = residual(3)
    # The last sum is read by the loss and by its derivative alone: both make it again from what it is made of.
    assert names(condensed, last=7) == [
        "dot_general+tanh()",
        "dot_general+add(0)",
        "dot_general+tanh(1)",
        "dot_general+add(1,2)",
        "dot_general+tanh(3)",
        "dot_general(4)",
        "reduce_sum(3,5)",
    ]
    assert condensed.problem.sizes[:7].tolist() == [WIDE] * 6 + [0]
    # After the loss: the five buffers that are read again, the cotangent of the sum, its product with a weight,
    # and what the derivative of tanh makes of that.
    assert condensed.problem.turn == 7
    assert peak_of_order(condensed.problem) == 8 * WIDE


def test_the_two_parts_of_a_residual_sum_are_not_read_instead_of_it() -> None:
    condensed = residual(3)
    users = condensed.problem.users
    # The sum of layer 1 is read in layer 2 (matmul and sum) and by the gradient of that matmul's weight.
    roots = [condensed.graph.ops[condensed.roots[user]].name for user in users[1]]
    assert roots == ["tanh", "add", "transpose"]  # turned into the gradient in its place


def test_a_dropout_mask_is_a_buffer_of_one_bit_per_element() -> None:
    def loss(weights: tuple[jax.Array, ...], x: jax.Array, key: jax.Array) -> jax.Array:
        for index, w in enumerate(weights):
            keep = jax.random.bernoulli(jax.random.fold_in(key, index), 0.5, x.shape)
            x = jnp.where(keep, jnp.tanh(x @ w) * 2, 0.0)
        return jnp.sum(x * x, axis=1)

    args = ((f32(WIDTH, WIDTH),) * 2, f32(ROWS, WIDTH), jax.random.key(0))
    condensed = of_function(loss, *args)
    assert names(condensed, last=6) == [
        "lt()",
        "dot_general()",
        "select_n(0,1)",
        "lt()",
        "dot_general(2)",
        "reduce_sum(3,4)",
    ]
    mask = ROWS * WIDTH // 8
    assert condensed.problem.sizes[:6].tolist() == [mask, WIDE, WIDE, mask, WIDE, 0]
    # The bits themselves are never a buffer; drawing them again is a matter of the mask's node.
    drawn = {op.id for op in condensed.graph.ops if op.random}
    assert drawn and drawn.isdisjoint(condensed.roots)
    assert condensed.problem.repeatable[0] and drawn & set(condensed.fused[0])


def test_a_relu_mask_is_kept_as_bits_and_the_matmul_before_it_is_not() -> None:
    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.sum(x * x)

    condensed = of_function(loss, (f32(WIDTH, WIDTH),) * 3, f32(ROWS, WIDTH))
    problem = condensed.problem
    forward = ["dot_general()", "max(0)", "gt(0)", "dot_general(1)", "max(3)", "gt(3)"]
    assert names(condensed, last=6) == forward
    assert problem.sizes[:6].tolist() == [WIDE, WIDE, ROWS * WIDTH // 8] * 2
    assert all(user < problem.turn for node in (0, 3) for user in problem.users[node])
    # At the turn: two relus, two masks, the last matmul's result and the cotangent.
    assert peak_of_order(problem) == 4 * WIDE + 2 * ROWS * WIDTH // 8


# --- hand-made graphs ------------------------------------------------------------------------------

SHAPE, BYTES = (64, 64), 64 * 64 * 4


def joined(**changes: Any) -> Condensed:
    """conv, relu, conv; the relu reads the first conv, and its mask is read off its result."""
    builder = GraphBuilder()
    x, w = builder.input(SHAPE), builder.input(SHAPE)
    first = builder.op("dot", [x, w], SHAPE)
    between = changes.get("between", ())
    other = [builder.op("dot", [x, w], shape) for shape in between]
    relu = builder.op(
        changes.get("reader", "add"), [first], changes.get("shape", SHAPE), **changes.get("op", {})
    )
    second = builder.op("dot", [relu, w, *other], SHAPE)
    ct = builder.cotangent(SHAPE)
    back = builder.op("dot", [ct, w], SHAPE)
    masked = builder.op("add", [back, relu, *changes.get("also", lambda v: ())([first])], SHAPE)
    return condense(builder.build([second], [builder.op("dot", [masked, x], SHAPE)]))


def test_an_element_wise_kernel_overwrites_the_buffer_that_it_alone_reads() -> None:
    condensed = joined()
    # In the backward pass the second kernel reads another large buffer, which may be made in between.
    assert names(condensed) == ["dot+add()", "dot(0)", "dot()", "add(0,2)", "dot(3)"]
    assert condensed.problem.sizes.tolist() == [BYTES, 0, BYTES, BYTES, 0]
    assert condensed.fused == ((0,), (), (), (), ())
    assert condensed.problem.turn == 2
    # Only the second of the joined values is a buffer, and running the node again runs both operators.
    assert [condensed.graph.values[v].producer for v in condensed.values_of[0]] == [1]
    assert condensed.backward_order([0, 1, 0, 2, 3, 4]) == (0, 1, 3, 4, 5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reader": "argmax"}, ["dot()", "argmax(0)"]),
        ({"reader": "sum"}, ["dot()", "sum(0)"]),
        ({"shape": (64, 32)}, ["dot()", "add(0)"]),
        ({"reader": "bits", "op": {"recomputable": False, "reason": "x"}}, ["dot()", "bits(0)"]),
        ({"also": tuple}, ["dot()", "add(0)"]),
        ({"between": (SHAPE,)}, ["dot()", "dot()", "add(0)"]),
        ({"between": ((64, 4),)}, ["dot()", "dot()", "add(0)"]),
    ],
    ids=["no-fusion", "reduction", "size", "once", "two-readers", "large-between", "a-sixteenth"],
)
def test_other_kernels_do_not_join_what_they_read(
    changes: dict[str, Any], expected: list[str]
) -> None:
    assert names(joined(**changes), last=len(expected)) == expected


def test_a_barrier_is_the_buffer_that_it_reads() -> None:
    def loss(w: jax.Array, x: jax.Array, *, barrier: bool) -> jax.Array:
        h = x @ w
        h = jax.lax.optimization_barrier(h) if barrier else h
        return jnp.sum(jnp.tanh(h) @ w)

    args = f32(WIDTH, WIDTH), f32(ROWS, WIDTH)
    plain, held = (of_function(partial(loss, barrier=b), *args) for b in (False, True))
    assert names(held)[0] == "dot_general+optimization_barrier+tanh()"
    np.testing.assert_array_equal(held.problem.costs, plain.problem.costs)
    np.testing.assert_array_equal(held.problem.sizes, plain.problem.sizes)


def test_a_decision_fuses_and_its_kernel_does_not_run_again() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        first = jnp.where(h[:, :1] >= h, 1, 0)  # integers: the backward pass reads no mask
        return jnp.sum(jnp.take(w, first[:, 0], axis=0) * h)

    condensed = of_function(loss, f32(WIDTH, WIDTH), f32(ROWS, WIDTH))
    ops = condensed.graph.ops
    (decision,) = [op.id for op in ops if op.decision]
    nodes = [
        node for node, fused in enumerate(condensed.fused)
        if decision in (condensed.roots[node], *fused)
    ]  # fmt: skip
    assert nodes and decision not in condensed.roots
    assert not any(condensed.problem.repeatable[node] for node in nodes)


def test_something_small_in_between_does_not_prevent_joining() -> None:
    condensed = joined(between=((64, 3),))  # less than a twentieth
    assert names(condensed, last=3) == ["dot()", "dot+add()", "dot(0,1)"]
    assert condensed.problem.sizes.tolist()[:3] == [BYTES * 3 // 64, BYTES, 0]


def test_kernels_join_in_a_row() -> None:
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    value = builder.op("dot", [x, x], SHAPE)
    for _ in range(2):  # neither may fuse into its reader: each is kept by its own right
        value = builder.op("add", [value], SHAPE, recomputable=False, reason="x")
    ct = builder.cotangent(SHAPE)
    y = builder.op("dot", [value], SHAPE)
    graph = builder.build([y], [builder.op("dot", [ct, value], SHAPE)])
    condensed = condense(graph)
    # The matmul may run again and the first add may not: they stay apart; the two adds do not.
    assert names(condensed) == ["dot()", "add(0)", "dot(1)", "dot(1)"]
    assert condensed.fused == ((), (1,), (), ())
    assert condensed.problem.repeatable.tolist() == [True, False, True, False]


def shared(readers: int, reads: int) -> Condensed:
    """A sum of `reads` buffers that `readers` other kernels of the forward pass read."""
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    parts = [builder.op("dot", [x, x], SHAPE) for _ in range(reads)]
    total = builder.op("add", parts, SHAPE)
    ends = [builder.op("add", [total, x], SHAPE) for _ in range(readers)]
    products = [builder.op("dot", [end], SHAPE) for end in ends]
    products += [builder.op("dot", parts, SHAPE)]  # so that the sum does not overwrite one of them
    ct = builder.cotangent(SHAPE)
    return condense(builder.build(products, [builder.op("dot", [ct], SHAPE)]))


@pytest.mark.parametrize(
    ("readers", "reads", "written"),
    [(1, 2, False), (2, 2, True), (3, 2, True), (2, 1, False), (3, 1, False)],
)
def test_a_sum_is_written_once_where_several_kernels_would_make_it(
    readers: int, reads: int, written: bool
) -> None:
    condensed = shared(readers, reads)
    assert (reads in condensed.roots) == written
    # What each reader is made of: the sum, or its parts.
    expected = (reads,) if written else tuple(range(reads))
    end = names(condensed)[reads + written]
    assert end == f"add({','.join(map(str, expected))})"


def test_small_reads_do_not_make_a_value_worth_writing() -> None:
    builder = GraphBuilder()
    x, bias = builder.input(SHAPE), builder.input((64,))
    part = builder.op("dot", [x, x], SHAPE)
    total = builder.op("add", [part, bias], SHAPE)  # reads 65 / 64 of its bytes
    ends = [builder.op("dot", [builder.op("add", [total, x], SHAPE)], SHAPE) for _ in range(2)]
    ct = builder.cotangent(SHAPE)
    condensed = condense(builder.build(ends, [builder.op("dot", [ct], SHAPE)]))
    assert 1 not in condensed.roots
    assert names(condensed)[1:3] == ["add(0)", "dot(1)"]


def test_what_the_caller_owns_costs_nothing() -> None:
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    hidden = builder.op("dot", [x], SHAPE)
    result = builder.op("dot", [hidden], SHAPE)
    ct = builder.cotangent(SHAPE)
    back = builder.op("dot", [ct, hidden, result], SHAPE)
    gradient = builder.op("dot", [back], SHAPE)
    graph = builder.build([result], [gradient])
    assert condense(graph).problem.sizes.tolist() == [BYTES, 0, BYTES, 0]
    # A loop hands its carry on: there it lives for one iteration only.
    carried = builder.build([result], [gradient], carried=(x, result), multiplicity=3)
    assert condense(carried).problem.sizes.tolist() == [BYTES, BYTES, BYTES, 0]


def test_a_gradient_that_is_a_forward_value_is_kept_whatever_the_sequence() -> None:
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    slope = builder.op("dot", [x], SHAPE)
    y = builder.op("dot", [x], SHAPE)
    ct = builder.cotangent(SHAPE)
    condensed = condense(builder.build([y], [slope, builder.op("dot", [ct, x], SHAPE)]))
    assert condensed.problem.turn == 2
    assert condensed.saved([0, 1, 2]) == {slope}
    assert condensed.saved([0, 1, 0, 2]) == {slope}
    assert condensed.problem.sizes.tolist() == [0, 0, 0]


def test_a_gradient_stays_one_if_its_operator_has_another_result_that_is_overwritten() -> None:
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    slope, hidden = builder.ops_with("dot", [x], [(SHAPE, "float32", ())] * 2)
    relu = builder.op("add", [hidden], SHAPE)
    y = builder.op("dot", [relu], SHAPE)
    ct = builder.cotangent(SHAPE)
    graph = builder.build([y], [slope, builder.op("dot", [ct, relu], SHAPE)])
    condensed = condense(graph)
    assert slope in condensed.saved(condensed.problem.first_runs.tolist())
    assert make_plan(graph, Ilp(method="starts")).recompute_flops == 0


def test_operators_that_nothing_needs_are_left_out_and_side_effects_are_not() -> None:
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    hidden = builder.op("dot", [x], SHAPE)
    builder.op("dot", [hidden], SHAPE)  # 1: nobody reads it
    builder.ops_with("callback", [hidden], [])  # 2
    y = builder.op("dot", [hidden], SHAPE)
    ct = builder.cotangent(SHAPE)
    unused = builder.op("dot", [ct], SHAPE)  # 4
    builder.op("add", [unused], SHAPE)  # 5
    condensed = condense(builder.build([y], [builder.op("dot", [ct, hidden], SHAPE)]))
    assert condensed.roots == (0, 2, 3, 6)
    assert condensed.problem.inputs == ((), (0,), (0,), (0,))
    assert condensed.problem.repeatable.tolist() == [True, False, True, False]


def test_what_a_callback_reads_is_a_buffer() -> None:
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    hidden = builder.op("dot", [x], SHAPE)
    warm = builder.op(
        "tanh", [hidden], SHAPE
    )  # what an operator that does not fuse reads is a buffer
    builder.ops_with("callback", [warm], [])
    y = builder.op("dot", [hidden], SHAPE)
    ct = builder.cotangent(SHAPE)
    condensed = condense(builder.build([y], [builder.op("dot", [ct, hidden], SHAPE)]))
    assert names(condensed) == ["dot()", "tanh(0)", "callback(1)", "dot(0)", "dot(0)"]


# --- costs -----------------------------------------------------------------------------------------


def costs_graph() -> Graph:
    builder = GraphBuilder()
    x = builder.input(SHAPE)
    hidden = builder.op("dot", [x], SHAPE, flops=10**12)
    warm = builder.op("tanh", [hidden], SHAPE, flops=7)
    y = builder.op("sum", [warm], (8,), flops=5)
    ct = builder.cotangent(SHAPE)
    return builder.build([y], [builder.op("dot", [ct, hidden], SHAPE, flops=11)])


def test_flops_as_the_objective_are_those_of_all_operators_of_a_kernel() -> None:
    condensed = condense(costs_graph(), objective="flops")
    assert names(condensed) == ["dot()", "sum(0)", "dot(0)"]
    assert condensed.problem.costs.tolist() == [1e12, 12.0, 11.0]
    assert condensed.objective == "flops"


def test_seconds_are_arithmetic_or_traffic_and_matmuls_fall_short_of_the_data_sheet() -> None:
    from remat.core.devices import get_device

    chip = get_device("h200")
    costs = condense(costs_graph()).problem.costs
    short = costs[0] / (1e12 / chip.matmul_flops_per_second("f32"))
    assert 1.5 < short < 4
    assert costs[1] == pytest.approx((BYTES + 32) / chip.memory_bytes_per_second)
    assert costs[2] == pytest.approx(short * 3 * BYTES / chip.memory_bytes_per_second)
    slower = condense(costs_graph(), device="a100").problem.costs
    assert all(slower > costs)


@pytest.mark.parametrize(("rows", "streams"), [(8, True), (1024, False)])
def test_a_matmul_that_only_reads_its_weights_takes_as_long_as_that(
    rows: int, streams: bool
) -> None:
    from remat.core.devices import get_device

    chip = get_device("h200")
    problem = of_function(lambda x, w: jnp.sum((x @ w) ** 2), f32(rows, 512), f32(512, 512)).problem
    moved = 4 * (rows * 512 + 512 * 512 + rows * 512)
    reading = moved / chip.memory_bytes_per_second
    computing = 2 * rows * 512 * 512 / chip.matmul_flops_per_second("f32") / 0.4
    exact = problem.costs[0] == pytest.approx(reading + 0.001 * computing)
    assert exact == streams
    assert problem.costs[0] >= 0.999 * reading


def test_of_two_products_that_take_as_long_the_one_with_fewer_bytes_is_cheaper() -> None:
    def seconds(rows: int, depth: int) -> float:
        left, right = f32(rows, depth), f32(depth, rows)
        return of_function(lambda x, w: jnp.sum((x @ w) ** 2), left, right).problem.costs[0]

    # 2^37 operations both, 1.9 times the bytes.
    square, flat = seconds(4096, 4096), seconds(8192, 1024)
    assert square < flat < 1.001 * square


def test_measured_seconds_replace_the_roofline_of_the_operator_measured() -> None:
    plain = condense(costs_graph()).problem.costs
    costs = condense(costs_graph(), op_seconds={0: 3.5}).problem.costs
    assert costs[0] == 3.5
    assert costs[1:].tolist() == plain[1:].tolist()


# --- remembered --------------------------------------------------------------------------------------


def test_a_graph_is_condensed_once_per_device_and_objective() -> None:
    graph = costs_graph()
    first = condense(graph)
    assert condense(graph) is first
    assert condense(graph, device="h200", objective="seconds", op_seconds={}) is first
    others = [
        condense(graph, device="a100"),
        condense(graph, objective="flops"),
        condense(graph, op_seconds={0: 3.5}),
        condense(replace(graph)),
    ]
    assert len({id(found) for found in (first, *others)}) == 5
    assert condense(graph, device="a100") is others[0]
    assert condense(graph, objective="flops") is others[1]
    assert condense(graph, op_seconds={0: 3.5}) is not others[2]
    assert condense(graph) is first and first.problem.workspace is None


def test_what_is_remembered_changes_no_graph_and_dies_with_it() -> None:
    graph, other = costs_graph(), costs_graph()
    text, fingerprint = graph.to_json(), graph.fingerprint()
    gone = [weakref.ref(graph), weakref.ref(condense(graph))]
    assert graph == other and hash(graph) == hash(other)
    assert (graph.to_json(), graph.fingerprint()) == (text, fingerprint)
    del graph
    gc.collect()
    assert [found() for found in gone] == [None, None]


# --- laws ------------------------------------------------------------------------------------------


def live_ops(graph: Graph) -> set[int]:
    """By the definition, from the end: an operator lives if it has an effect or makes what a live one reads."""
    wanted = {*graph.outputs, *graph.gradients}
    live = set()
    for op in reversed(graph.ops):
        if op.effectful or wanted.intersection(op.outputs):
            live.add(op.id)
            wanted.update(op.inputs)
    return live


@given(graph=graphs())
@laws(150)
def test_every_node_can_run_from_what_it_reads_and_nothing_else(graph: Graph) -> None:
    condensed = condense(graph)
    made = {v: node for node, values in enumerate(condensed.values_of) for v in values}
    given_values = {*graph.inputs, *graph.constants, *graph.cotangents}
    for node, root in enumerate(condensed.roots):
        reads = condensed.problem.inputs[node]
        assert all(read < node for read in reads)
        there = set(given_values)
        there.update(v for read in reads for v in condensed.values_of[read])
        touched = set()
        assert sorted(condensed.fused[node]) == list(condensed.fused[node])
        for op in (*condensed.fused[node], root):
            assert there.issuperset(graph.ops[op].inputs)
            touched.update(graph.ops[op].inputs)
            there.update(graph.ops[op].outputs)
        # It reads every buffer that it declares.
        assert {made[v] for v in touched if v in made}.issuperset(reads)


@given(graph=graphs())
@laws(150)
def test_nodes_are_the_live_operators_forward_first(graph: Graph) -> None:
    condensed = condense(graph)
    phases = [graph.ops[root].phase for root in condensed.roots]
    turn = condensed.problem.turn
    assert phases == ["forward"] * turn + ["backward"] * (len(phases) - turn)
    run = {op for fused in condensed.fused for op in fused} | set(condensed.roots)
    assert run == live_ops(graph)
    assert len(set(condensed.roots)) == len(condensed.roots)
    for node, fused in enumerate(condensed.fused):
        if node < turn:
            assert all(graph.ops[op].phase == "forward" for op in fused)


@given(graph=graphs())
@laws(150)
def test_what_must_not_run_again_is_in_one_node_that_does_not(graph: Graph) -> None:
    condensed = condense(graph)
    runs = Counter(op for fused in condensed.fused for op in fused) + Counter(condensed.roots)
    for op in graph.ops:
        if not op.recomputable or op.effectful:
            assert runs[op.id] <= 1
    for node, repeatable in enumerate(condensed.problem.repeatable):
        if repeatable:
            inside = (*condensed.fused[node], condensed.roots[node])
            assert all(graph.ops[op].recomputable for op in inside)
            assert graph.ops[condensed.roots[node]].phase == "forward"


@given(graph=graphs())
@laws(150)
def test_a_node_weighs_its_buffers_and_those_of_the_caller_weigh_nothing(graph: Graph) -> None:
    condensed = condense(graph)
    free = {*graph.inputs, *graph.outputs, *graph.gradients}
    for node, size in enumerate(condensed.problem.sizes):
        values = [v for v in condensed.values_of[node] if v not in free]
        assert size == sum(stored_bytes(graph.values[v]) for v in values)
        assert all(graph.values[v].producer == condensed.roots[node] for v in values)
    # A value that does not fuse, or that something that does not fuse reads, is in the list unless overwritten.
    overwritten = {
        v for fused in condensed.fused for op in fused for v in graph.ops[op].outputs
    }  # fmt: skip
    for op in live_ops(graph):
        for value in graph.ops[op].outputs:
            users = [u for u in graph.users[value] if u in live_ops(graph)]
            must = not graph.ops[op].fusible or any(not graph.ops[u].fusible for u in users)
            if users and must and value not in condensed.node_of:
                assert value in overwritten


@given(graph=graphs(), rng=rngs(), share=st.sampled_from([0.0, 0.3, 0.7]))
@laws(150)
def test_a_sequence_keeps_what_is_alive_at_the_turn_and_its_order_runs_what_it_repeats(
    graph: Graph, rng: random.Random, share: float
) -> None:
    condensed = condense(graph)
    problem = condensed.problem
    sequence = random_sequence(problem, rng, share)
    replay(problem, sequence)
    kept = {v for node in kept_at_turn(problem, sequence) for v in condensed.values_of[node]}
    forward_gradients = {v for v in graph.gradients if graph.forward_values[v]} - graph.sources
    saved = condensed.saved(sequence)
    # Of a node with several results only those that are read.
    assert forward_gradients <= saved <= kept | forward_gradients
    assert {condensed.node_of[v] for v in saved - forward_gradients} == {
        condensed.node_of[v] for v in kept - forward_gradients
    }
    order = condensed.backward_order(sequence)
    phases = [graph.ops[op].phase for op in order]
    backward = [op for op, phase in zip(order, phases, strict=True) if phase == "backward"]
    live = live_ops(graph)
    assert sorted(backward) == [op.id for op in graph.backward_ops() if op.id in live]
    again = Counter(condensed.roots[n] for n in sequence[problem.turn :] if n < problem.turn)
    ran = Counter(op for op in order if graph.ops[op].phase == "forward")
    for root, times in again.items():
        assert ran[root] >= times  # a root may also be overwritten in another node, never here
    joined_ops = {
        op for fused in condensed.fused for op in fused if not graph.ops[op].fusible
    }  # fmt: skip
    assert set(ran) <= set(again) | joined_ops
    assert all(ran[root] == times for root, times in again.items() if root not in joined_ops)


@given(graph=graphs(), rng=rngs())
@laws(60)
def test_the_order_runs_an_operator_after_what_it_reads(graph: Graph, rng: random.Random) -> None:
    condensed = condense(graph)
    order = condensed.backward_order(random_sequence(condensed.problem, rng))
    there = {*graph.cotangents} | {v for v, flag in enumerate(graph.forward_values) if flag}
    for op in order:
        assert there.issuperset(graph.ops[op].inputs)
        there.update(graph.ops[op].outputs)


def test_equal_graphs_give_equal_problems() -> None:
    one, other = gelu_chain(2), gelu_chain(2)
    assert one.roots == other.roots and one.problem.inputs == other.problem.inputs
    np.testing.assert_array_equal(one.problem.costs, other.problem.costs)
    assert condense(Graph.from_json(one.graph.to_json())).fused == one.fused
