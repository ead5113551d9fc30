"""The memory model: what is a buffer, when it is alive, and what follows from it, exact to the byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from random_graphs import GraphBuilder, chain, graphs, laws, rngs

import remat
from models import mlp
from remat.core.graph import Graph
from remat.memory.fusion import Fusion
from remat.memory.instances import execution_of
from remat.memory.kernels import find_kernels
from remat.memory.merging import merge_kernels
from remat.memory.places import _Place
from remat.memory.predict import buffers, peak_bytes, predict, predict_body
from remat.memory.splits import parts_of
from remat.memory.tables import MATMULS_ADD_ARRAYS, TUPLES_ARE_READ_DIRECTLY
from remat.planning.make import make_plan, with_loops
from remat.plans.plan import LoopPlan
from remat.plans.schedule import build_schedule, no_remat_saved
from remat.plans.simulate import simulate
from remat.plans.steps import Schedule, Step
from remat.policies import Full, SaveAll, Unchanged
from remat.policies.base import required_saves

BIG = (1024, 1024)
BIG_BYTES = 4 * 1024 * 1024


def two_readers(name: str, shape: tuple[int, ...] = BIG) -> Graph:
    """`x -> name -> v`; `v` is read by two kernels of different phases: a product's operand and a gradient."""
    builder = GraphBuilder()
    x = builder.input(shape)
    start = builder.op("dot", [x], shape)
    value = builder.op(name, [start], shape)
    scaled = builder.op("add", [value, x], shape)
    y = builder.op("dot", [scaled], shape)
    ct = builder.cotangent(shape)
    back = builder.op("dot", [ct, y], shape)
    return builder.build([y], [builder.op("add", [value, back], shape)])


# --- what becomes a buffer ---------------------------------------------------------------------------


def test_a_chain_of_fusible_operators_is_one_kernel() -> None:
    builder = GraphBuilder()
    x = builder.input(BIG)
    inner = builder.op("add", [builder.op("add", [x], BIG)], BIG)
    y = builder.op("dot", [inner], BIG)
    ct = builder.cotangent(BIG)
    graph = builder.build([y], [builder.op("dot", [ct, inner], BIG)])
    #  x, the first sum, the second (a dot reads it), y, the cotangent, the gradient
    assert buffers(graph) == (BIG_BYTES, 0, BIG_BYTES, BIG_BYTES, BIG_BYTES, BIG_BYTES)
    assert predict(graph).peak_bytes == BIG_BYTES


@pytest.mark.parametrize("name, written", [("add", False), ("exp", False), ("tanh", True)])
def test_what_two_kernels_read_is_written_once_if_it_is_dear_to_make(
    name: str, written: bool
) -> None:
    graph = two_readers(name)
    value = graph.ops[1].outputs[0]
    assert buffers(graph)[value] == (BIG_BYTES if written else 0)


def test_random_bits_are_not_drawn_twice() -> None:
    """Where the arrays are large; of smaller ones it is worth no kernel of its own."""
    graph = two_readers("bits", (4096, 4096))
    assert buffers(graph)[graph.ops[1].outputs[0]] == 16 * BIG_BYTES


def test_a_value_of_many_operands_is_written_once() -> None:
    """A sum of eight arrays, read by two kernels: reading it costs an eighth of reading them.

    Of two or three it is not, for a kernel more takes as long as moving 4.8 MB.
    """
    builder = GraphBuilder()
    parts = [builder.input(BIG) for _ in range(8)]
    total = builder.op("add", parts, BIG)
    y = builder.op("dot", [builder.op("add", [total, parts[0]], BIG)], BIG)
    ct = builder.cotangent(BIG)
    back = builder.op("dot", [ct, y], BIG)
    graph = builder.build([y], [builder.op("add", [total, back], BIG)])
    assert buffers(graph)[total] == BIG_BYTES
    plain = two_readers("add")
    assert buffers(plain)[plain.ops[1].outputs[0]] == 0


def test_a_reduction_is_a_buffer_and_what_it_reads_is_not() -> None:
    builder = GraphBuilder()
    x = builder.input(BIG)
    square = builder.op("add", [x], BIG)
    total = builder.op("sum", [square], (1024,))
    y = builder.op("add", [total], (1024,))
    ct = builder.cotangent((1024,))
    graph = builder.build([y], [builder.op("add", [total, ct], (1024,))])
    assert buffers(graph)[square] == 0
    assert buffers(graph)[total] == 4 * 1024


def test_a_dear_value_is_written_whether_or_not_one_of_its_readers_waits_for_the_other() -> None:
    """XLA makes one kernel of it and its first reader, with two results."""
    builder = GraphBuilder()
    x = builder.input(BIG)
    ct = builder.cotangent(BIG)
    dear = builder.op("tanh", [x], BIG)
    first = builder.op("dot", [builder.op("add", [dear, ct], BIG)], BIG)
    second = builder.op("dot", [builder.op("mul", [dear, ct], BIG)], BIG)
    graph = builder.build([], [first, second])
    assert buffers(graph)[dear] == BIG_BYTES
    dependent = two_readers("tanh")  # here the second kernel waits for the first
    assert buffers(dependent)[dependent.ops[1].outputs[0]] == BIG_BYTES


def test_a_reshape_has_no_buffer_of_its_own_and_keeps_that_of_its_operand_alive() -> None:
    builder = GraphBuilder()
    x = builder.input(BIG)
    made = builder.op("dot", [x], BIG)
    flat = builder.op("reshape", [made], (1024 * 1024,), kind="VIEW")
    y = builder.op("dot", [flat], BIG)
    ct = builder.cotangent(BIG)
    graph = builder.build([y], [builder.op("dot", [ct, flat], BIG)])
    assert buffers(graph)[made] == BIG_BYTES
    assert buffers(graph)[flat] == 0
    assert predict(graph).peak_bytes == BIG_BYTES


def test_the_two_gradients_of_an_array_times_itself_are_two_buffers() -> None:
    """They read the same, have one type and come from one line: a Gram matrix, pairs of embeddings."""

    def loss(x: jax.Array, target: jax.Array) -> jax.Array:
        pairs = jnp.einsum("bid,bjd->bij", x, x)
        return jnp.sum((pairs - target) ** 2)

    x = jax.ShapeDtypeStruct((512, 4, 128), jnp.float32)
    graph = remat.plan(loss, x, jax.ShapeDtypeStruct((512, 4, 4), jnp.float32)).graph
    products = [op for op in graph.ops if op.heavy and op.phase == "backward"]
    assert len(products) == 2 and products[0].inputs == products[1].inputs
    found = buffers(graph)
    nbytes = 512 * 4 * 128 * 4
    # Since jax 0.12 the kernel of one adds the other to its product.
    first = 0 if MATMULS_ADD_ARRAYS else nbytes
    assert [found[op.outputs[0]] for op in products] == [first, nbytes]


# --- when it is alive --------------------------------------------------------------------------------


def test_a_temporary_lies_in_a_result_that_is_not_there_yet() -> None:
    builder = GraphBuilder()
    x = builder.input(BIG)
    first = builder.op("dot", [x], BIG)
    second = builder.op("dot", [first], BIG)
    ct = builder.cotangent(BIG)
    graph = builder.build([], [builder.op("dot", [second, ct], BIG)])
    # `first` dies before the gradient is written and lies where it will be; `second` is read by it.
    found = predict(graph)
    assert found.peak_bytes == BIG_BYTES
    assert [buffer.value for buffer in found.at_peak] == [second]
    assert found.held_in_results_bytes == BIG_BYTES


@given(rng=rngs())
@laws(200)
def test_what_lies_in_a_result_is_never_there_at_once(rng: random.Random) -> None:
    """And nothing is turned away that would have been alone."""
    place, taken = _Place(100), set[int]()
    for _ in range(rng.randint(1, 12)):
        first = rng.randint(0, 30)
        wanted = set(range(first, first + rng.randint(1, 8)))
        assert place.take(min(wanted), max(wanted)) == taken.isdisjoint(wanted)
        taken |= wanted if taken.isdisjoint(wanted) else set()


def test_what_is_written_over_a_temporary_in_a_result_lies_there_too() -> None:
    builder = GraphBuilder()
    x = builder.input(BIG)
    first = builder.op("dot", [x], BIG)
    second = builder.op("tanh", [first], BIG)
    third = builder.op("dot", [second], BIG)
    ct = builder.cotangent(BIG)
    graph = builder.build([], [builder.op("dot", [third, ct], BIG)])
    found = predict(graph)
    assert [buffer.value for buffer in found.at_peak] == [third]
    assert found.peak_bytes == BIG_BYTES


def test_an_element_wise_kernel_writes_into_an_operand_that_dies() -> None:
    def graph(last: str) -> Graph:
        builder = GraphBuilder()
        x = builder.input(BIG)
        a = builder.op("dot", [x], BIG)
        b = builder.op(last, [a], BIG)
        total = builder.op("argmax", [b], ())
        ct = builder.cotangent(())
        return builder.build([total], [builder.op("add", [total, ct], ())])

    assert predict(graph("add")).peak_bytes == BIG_BYTES
    assert predict(graph("dot")).peak_bytes == 2 * BIG_BYTES


def test_a_repetition_behind_a_barrier_is_a_new_buffer_and_without_one_the_old() -> None:
    graph = chain(2, BIG, fusible=False)
    #  x=0 -> 1 -> 2; cotangent 3; 4 = 2 * ct; 5 = 1 * 4
    again = (Step("compute", 0), Step("compute", 1), Step("turn"), Step("compute", 2))
    tail = (Step("compute", 0), Step("compute", 3))
    merged = predict(graph, Schedule((*again, *tail)))
    tied = predict(graph, Schedule((*again, Step("barrier", values=(0, 4)), *tail)))
    # Merged, the first value lives through; tied, it lives twice, but not while the cotangent is made.
    assert merged.peak_bytes == 2 * BIG_BYTES
    assert sum(buffer.again for buffer in tied.at_peak) == 1
    assert sum(buffer.again for buffer in merged.at_peak) == 0


def test_gradients_larger_than_what_they_are_made_from_come_last() -> None:
    """A weight's gradient of 4 MiB from two arrays of 4 KiB: computed first, it would leave no place for `wide`."""
    builder = GraphBuilder()
    x = builder.input((1024,))
    ct = builder.cotangent((1024,))
    thin = builder.op("dot", [ct], (1024,))
    weight = builder.op("dot", [thin, x], BIG)
    wide = builder.op("dot", [thin], BIG)
    other = builder.op("dot", [wide], (1024,))
    graph = builder.build([], [weight, other])
    assert predict(graph).peak_bytes < BIG_BYTES
    assert simulate(graph, build_schedule(graph, ()), fused=False).peak_bytes > BIG_BYTES


def test_such_gradients_wait_for_what_takes_still_more_if_that_takes_less_memory() -> None:
    """Made before `wide`, which takes more than it, the gradient would be no place for what is made of `wide`."""
    builder = GraphBuilder()
    ct = builder.cotangent((8,))
    gradient = builder.op("dot", [builder.op("dot", [ct], (8,))], (*BIG, 16))
    wide = builder.op("dot", [ct], (*BIG, 32))
    narrow = builder.op("dot", [wide], (*BIG, 4))
    found = predict(builder.build([], [gradient, builder.op("dot", [narrow], (8,))]))
    assert 32 * BIG_BYTES <= found.peak_bytes < (32 + 4) * BIG_BYTES


def test_what_is_alive_at_the_peak_is_listed_largest_first_and_is_not_less_than_the_peak() -> None:
    graph = two_readers("tanh")
    found = predict(graph)
    sizes = [buffer.nbytes for buffer in found.at_peak]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) >= found.peak_bytes > 0
    assert {buffer.op for buffer in found.at_peak} <= {"dot", "tanh", "add"}


# --- what is written in place ------------------------------------------------------------------------


def overwriting(
    made_by: str = "dot", last: str = "add", *, tied: bool = False, scattered: bool = False
) -> Graph:
    """`x -> made_by -> a -> last -> b`, of which only a number is kept; `a` dies where `b` is made."""
    builder = GraphBuilder()
    x = builder.input(BIG)
    a = builder.op(made_by, [x], BIG, fusible=False)
    if tied:
        a = builder.op("optimization_barrier", [a], BIG, fusible=False)
    b = builder.op(last, [a], BIG)
    if scattered:
        b = builder.op("scatter-add", [b, builder.input((4,))], BIG, fusible=False)
    total = builder.op("argmax", [b], (), fusible=False)
    ct = builder.cotangent(())
    return builder.build([total], [builder.op("add", [total, ct], ())])


def test_a_kernel_writes_into_what_another_kernel_made_and_nothing_is_between() -> None:
    assert predict(overwriting()).peak_bytes == BIG_BYTES
    arrays = 1 if TUPLES_ARE_READ_DIRECTLY else 2
    assert predict(overwriting(tied=True)).peak_bytes == arrays * BIG_BYTES


def test_a_kernel_does_not_write_into_one_of_several_results_of_a_library() -> None:
    assert predict(overwriting("conv_general_dilated")).peak_bytes == 2 * BIG_BYTES


def test_a_transposition_does_not_write_into_its_operand() -> None:
    assert predict(overwriting(last="transpose")).peak_bytes == 2 * BIG_BYTES


def test_what_a_scatter_writes_over_does_not_lie_in_a_dying_operand_but_the_scatter_in_it() -> None:
    assert predict(overwriting(scattered=True)).peak_bytes == 2 * BIG_BYTES


@pytest.mark.parametrize(
    ("axis", "is_read_again", "arrays"), [(1, False, 2), (0, False, 1), (1, True, 1)]
)
def test_a_softmax_does_not_write_over_what_it_reads(
    axis: int, is_read_again: bool, arrays: int
) -> None:
    """`exp(x - max(x)) / sum(exp(x - max(x)))` along rows is one kernel, unless others read the numbers."""
    builder = GraphBuilder()
    x = builder.op("dot", [builder.cotangent(BIG)], BIG)
    fields: dict[str, Any] = {"kind": "REDUCTION", "axes": (axis,)}
    largest = builder.op("reduce_max", [x], BIG[:1], **fields)
    above = builder.op("exp", [builder.op("sub", [x, largest], BIG)], BIG)
    total = builder.op("reduce_sum", [above], BIG[:1], **fields)
    share = builder.op("div", [above, total], BIG)
    again = [builder.op("dot", [n], (4,)) for n in (largest, total)] if is_read_again else []
    graph = builder.build([], [builder.op("dot", [share], (4,)), *again])
    numbers_bytes = 0 if arrays == 2 else 2 * BIG[0] * 4  # a kernel of rows has them in registers
    assert predict(graph).peak_bytes == arrays * BIG_BYTES + numbers_bytes


# --- zeros, scatters and pools -----------------------------------------------------------------------


def test_a_scatter_makes_its_updates_and_not_what_it_writes_over() -> None:
    """Messages along edges, summed by receiver: they are never in memory, unless a matmul made them."""

    def graph(made_by: str, into_updates: bool) -> Graph:
        builder = GraphBuilder()
        ct = builder.cotangent(BIG)
        where = builder.input((4,))
        message = builder.op(made_by, [ct], BIG)
        operands = [builder.input((4,)), where, message]
        if not into_updates:
            operands = [message, where, builder.input((4,))]
        shape = (4,) if into_updates else BIG
        total = builder.op("scatter-add", operands, shape, fusible=False)
        return builder.build([], [builder.op("dot", [total], (4,))])

    assert predict(graph("mul", into_updates=True)).peak_bytes == 16
    assert predict(graph("dot", into_updates=True)).peak_bytes == BIG_BYTES + 16
    assert predict(graph("mul", into_updates=False)).peak_bytes == BIG_BYTES


def test_a_scatter_into_zeros_that_is_added_to_an_array_scatters_into_the_array() -> None:
    """Gradients of a cross entropy: `softmax + scatter(zeros)` needs one array, not two."""

    def graph(again: bool) -> Graph:
        builder = GraphBuilder()
        ct = builder.cotangent(BIG)
        where = builder.input((4,))
        softmax = builder.op("dot", [ct], BIG)
        zeros = builder.op("broadcast_in_dim", [], BIG)
        hot = builder.op("scatter-add", [zeros, where, where], BIG, fusible=False)
        total = builder.op("add_any", [softmax, hot], BIG)
        readers = [total, hot] if again else [total]
        return builder.build([], [builder.op("dot", readers, (4,))])

    assert predict(graph(again=False)).peak_bytes == BIG_BYTES
    # Read by another, it is an array of its own, in which the sum then cannot lie.
    assert predict(graph(again=True)).peak_bytes == 2 * BIG_BYTES


def test_a_postponed_scatter_runs_where_a_barrier_or_another_scatter_needs_it() -> None:
    builder = GraphBuilder()
    ct = builder.cotangent(BIG)
    where = builder.input((4,))
    parts = []
    for _ in range(2):
        zeros = builder.op("broadcast_in_dim", [], BIG)
        parts.append(builder.op("scatter-add", [zeros, where, ct], BIG, fusible=False))
    graph = builder.build([], [builder.op("add_any", parts, BIG)])
    # The one scatters into what the other made: the gradient alone is left, and the other lies in it.
    assert predict(graph).peak_bytes == BIG_BYTES
    steps = [Step("turn"), *(Step("compute", i) for i in range(4))]
    tied = (*steps, Step("barrier", values=(parts[0], parts[1])), Step("compute", 4))
    assert predict(graph, Schedule(tied)).peak_bytes == 2 * BIG_BYTES


POOLED = (512, 512)
POOLED_BYTES = BIG_BYTES // 4


def pool(
    *, padded: bool = False, overlapping: bool = True, made_by: str = "dot", relu: bool = True
) -> Graph:
    """`x -> made_by -> ReLU -> max pool -> matmul`, whose gradient is `select(mask, pool gradient, zeros)`."""
    builder = GraphBuilder()
    x = builder.input(BIG)
    before = builder.op(made_by, [x], BIG, fusible=False)
    active = builder.op("max", [before], BIG) if relu else before
    mask = builder.op("gt", [active], BIG, "bool") if relu else None
    small = builder.op(
        "reduce_window_max", [active], POOLED, fusible=not overlapping, kind="REDUCTION"
    )
    y = builder.op("dot", [small], ())
    ct = builder.cotangent(())
    back = builder.op("dot", [ct], POOLED)
    wide = builder.op(
        "select_and_scatter_add", [back, active], BIG, fusible=False, padded=padded, kind="INDEXED"
    )
    if mask is not None:
        zeros = builder.op("broadcast_in_dim", [], BIG)
        wide = builder.op("select_n", [mask, zeros, wide], BIG)
    return builder.build([y], [builder.op("dot", [wide], ())])


def test_a_pool_gradient_and_a_relu_share_zeros_and_the_gradient_writes_over_a_copy() -> None:
    found = predict(pool())
    sizes = sorted((buffer.nbytes for buffer in found.at_peak), reverse=True)
    # At the scatter: the active array, the zeros that the ReLU's gradient will read, a copy that is written over;
    # the gradient of the pool's result and two arrays of indices.
    assert found.peak_bytes == 3 * BIG_BYTES + 3 * POOLED_BYTES
    assert sizes.count(POOLED_BYTES) == 3
    assert [b.label for b in found.at_peak].count("i32[512,512]") == 2


def test_a_padded_pool_gradient_and_one_without_a_relu_have_zeros_of_their_own() -> None:
    # Zeros of another shape: only the result, the active array and what the scatter reads.
    assert predict(pool(padded=True)).peak_bytes == 2 * BIG_BYTES + 3 * POOLED_BYTES
    # Nothing but the indices reads the pool's operand: they are made at once, and it is gone before the scatter.
    assert predict(pool(relu=False)).peak_bytes == BIG_BYTES + 3 * POOLED_BYTES


def test_the_indices_of_a_pool_are_made_in_the_forward_pass_once_all_else_takes_as_much() -> None:
    builder = GraphBuilder()
    x = builder.input(BIG)
    active = builder.op("dot", [x], BIG, fusible=False)
    small = builder.op("reduce_window_max", [active], POOLED, fusible=False, kind="REDUCTION")
    wide = builder.op("dot", [small], (4096, 1024), fusible=False)
    y = builder.op("dot", [wide], ())
    ct = builder.cotangent(())
    back = builder.op("dot", [ct], POOLED)
    pooled = builder.op(
        "select_and_scatter_add", [back, active], BIG, fusible=False, padded=True, kind="INDEXED"
    )
    found = predict(builder.build([y], [builder.op("dot", [pooled, active], ())]))
    # `wide` takes 16 times the pool's result, the indices twice as much, and all of the backward pass no more: only
    # the pool's result waits for it.
    assert found.step == 2
    assert found.peak_bytes == (16 + 1) * POOLED_BYTES


def test_a_pool_whose_windows_do_not_overlap_makes_what_it_reads() -> None:
    """The kernel that finds the indices computes the ReLU again; else the ReLU's result is a buffer."""
    relu = 1 + 1  # value of the ReLU: after x and the product
    assert buffers(pool(overlapping=False))[relu] == 0
    assert buffers(pool(overlapping=True))[relu] == BIG_BYTES


def test_zeros_that_a_loop_stacks_into_are_there_from_the_first_that_reads_them() -> None:
    """A dropout reads zeros of the shape of what a loop stacks: XLA keeps them for the loop."""

    def graph(shape: tuple[int, int]) -> Graph:
        builder = GraphBuilder()
        x = builder.input(BIG)
        mask = builder.input(BIG, "bool")
        zeros = builder.op("broadcast_in_dim", [], BIG)
        kept = builder.op("select_n", [mask, zeros, x], BIG)
        y = builder.op("dot", [kept], ())
        ct = builder.cotangent(())
        (stack,) = builder.ops_with("scan", [ct], [(shape, "float32", ())], fusible=False)
        return builder.build([y], [builder.op("dot", [stack], ())])

    assert predict(graph((8, 8))).peak_bytes == BIG_BYTES
    assert predict(graph(BIG)).peak_bytes == 2 * BIG_BYTES


def test_a_trace_tells_which_pools_are_padded() -> None:
    def graph_of(padding: str | tuple[tuple[int, int], ...]) -> bool:
        def loss(x: jax.Array) -> jax.Array:
            pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 3), (2, 2), padding)
            return jnp.sum(pooled * pooled)

        plan = remat.plan(loss, jax.ShapeDtypeStruct((16, 16), jnp.float32), remat_policy="full")
        (op,) = (op for op in plan.graph.ops if op.name == "select_and_scatter_add")
        return op.padded

    assert graph_of(((1, 1), (1, 1)))
    assert not graph_of("SAME")  # 16 elements by twos: one row behind the last
    assert not graph_of("VALID")


# --- what runs ---------------------------------------------------------------------------------------


def names_run(builder: GraphBuilder, results: list[int]) -> list[str]:
    """What runs of a graph, by name."""
    return [node.name for node in execution_of(builder.build(results, []), None, {}).nodes]


@pytest.mark.parametrize(("name", "runs"), [("mul", 1), ("max", 1), ("sub", 2)])
def test_operands_in_another_order_make_another_operator_only_if_it_matters(
    name: str, runs: int
) -> None:
    builder = GraphBuilder()
    a, b = builder.input(), builder.input()
    pair = [builder.op(name, read, kind="POINTWISE", setting="-") for read in ((a, b), (b, a))]
    assert names_run(builder, pair) == [name] * runs


def test_a_sum_of_what_is_negated_is_negated_behind_the_sum() -> None:
    builder = GraphBuilder()
    x = builder.input((64, 8))
    negative = builder.op("neg", [x], (64, 8), kind="POINTWISE")
    sums = [
        builder.op("reduce_sum", [v], (64,), kind="REDUCTION", setting="-") for v in (x, negative)
    ]
    assert names_run(builder, sums) == ["neg", "reduce_sum", "neg"]  # of both the same sum
    assert buffers(builder.build(sums, []))[negative] == 0


@pytest.mark.parametrize(
    ("name", "one", "two", "runs"),
    [
        ("reduce_sum", lambda x: x.sum(0), lambda x: jnp.sum(x, 0), 1),
        ("reduce_sum", lambda x: x.sum(0), lambda x: x.sum(1), 2),
        ("sub", lambda x: x[0] - 3.0, lambda x: x[0] - 3.0, 1),
        ("sub", lambda x: x[0] - 3.0, lambda x: x[0] - 4.0, 2),
        ("slice", lambda x: x[0], lambda x: x[0], 1),
        ("slice", lambda x: x[0], lambda x: x[1], 2),
        ("dot_general", lambda x: x @ x[0], lambda x: x @ x[0], 1),
        ("dot_general", lambda x: x @ x[0], lambda x: x[0] @ x, 2),
    ],
)
def test_operators_with_equal_parameters_and_literals_are_one(
    name: str,
    one: Callable[[jax.Array], jax.Array],
    two: Callable[[jax.Array], jax.Array],
    runs: int,
) -> None:
    """On whatever lines they stand."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(one(x)) * jnp.cos(two(x)))

    graph = remat.plan(loss, jax.ShapeDtypeStruct((64, 64), jnp.float32)).graph
    theirs = {graph.outputs[0], *graph.gradients}  # the loss is a sum, too
    made = [
        node
        for node in execution_of(graph, None, {}).nodes
        if node.name == name and node.op is not None and node.op.phase == "forward"
        if theirs.isdisjoint(node.op.outputs)
    ]
    assert len(made) == runs


# --- kernels with several results --------------------------------------------------------------------


def two_of_one(*, needed: bool = False, kept: bool = False, dtype: str = "float32") -> Graph:
    """A layer's gradient: `gelu(h)`, for the weight's gradient, and `gelu'(h) * g` read the product `h`.

    Args:
        needed: whether the second reads what is made from the first.
        kept: whether the product is read once more at the end.
    """
    builder = GraphBuilder()
    ct = builder.cotangent(BIG, dtype)
    h = builder.op("dot", [ct], BIG, dtype)
    first = builder.op("mul", [builder.op("tanh", [h], BIG, dtype)], BIG, dtype)
    weight = builder.op("dot", [first, ct], (8,), dtype)
    g = builder.op("dot", [ct, weight] if needed else [ct], BIG, dtype)
    second = builder.op("mul", [builder.op("exp", [h], BIG, dtype), g], BIG, dtype)
    last = builder.op("dot", [second, h] if kept else [second], (8,), dtype)
    return builder.build([], [weight, last])


def test_independent_kernels_that_read_one_array_are_one_that_runs_when_the_last_could() -> None:
    # Run as written, `first` is dead before `g` is made: `h` and what `g` becomes. Merged, both results are there:
    # one lies in `g`, none in `h`.
    assert predict(two_of_one(kept=True)).peak_bytes == 3 * BIG_BYTES
    assert predict(two_of_one(kept=True, needed=True)).peak_bytes == 2 * BIG_BYTES
    # Where `h` dies too, both lie in what they are made from.
    assert predict(two_of_one()).peak_bytes == 2 * BIG_BYTES


def test_of_several_bfloat16_results_one_is_written_in_place() -> None:
    half = BIG_BYTES // 2
    assert predict(two_of_one(dtype="bfloat16")).peak_bytes == 3 * half
    assert predict(two_of_one(dtype="bfloat16", needed=True)).peak_bytes == 2 * half


def test_a_convolution_behind_a_barrier_reads_a_copy_of_its_own_of_its_weights() -> None:
    """A copy in another layout lives from the first to the last convolution that reads the same array."""
    taps = (3, 3, 256, 256)
    image = (1, 8, 8, 256)

    def graph(tied: bool) -> Graph:
        builder = GraphBuilder()
        x = builder.input(image)
        weights = builder.input(taps)
        y = builder.op("conv_general_dilated", [x, weights], image, fusible=False)
        total = builder.op("dot", [y], ())
        ct = builder.cotangent(())
        wide = builder.op("dot", [ct, total], BIG)
        back = builder.op("dot", [wide], image)
        if tied:
            weights = builder.op("optimization_barrier", [weights], taps, fusible=False)
        own = builder.op("conv_general_dilated", [back, weights], image, fusible=False)
        return builder.build([total], [builder.op("dot", [own], ())])

    copy = 4 * 3 * 3 * 256 * 256
    small = 4 * 8 * 8 * 256
    assert predict(graph(tied=False)).peak_bytes == copy + BIG_BYTES + small
    assert predict(graph(tied=True)).peak_bytes == BIG_BYTES + small


def test_a_kernel_merges_with_one_per_array_that_it_reads() -> None:
    builder = GraphBuilder()
    a, b, c = (builder.input() for _ in range(3))
    results = [builder.op("tanh", [b]), builder.op("mul", [a, c])]
    results.append(
        builder.op("add", [builder.op("exp", [a]), b, c])
    )  # a fusion, which XLA begins with
    execution = execution_of(builder.build(results, []), None, {})
    fusion = Fusion(execution)
    (kernel,) = merge_kernels(execution, fusion, find_kernels(execution, fusion))
    assert (kernel.node, sorted(kernel.merged)) == (3, [0, 1])


@given(rng=rngs())
@laws(300)
def test_merged_kernels_are_those_there_were_in_an_order_in_which_they_can_run(
    rng: random.Random,
) -> None:
    """Of programs with many results that read few arrays of one size, so that one kernel merges with several."""
    builder = GraphBuilder()
    values = [builder.input() for _ in range(rng.randint(3, 4))]
    made: list[int] = []
    for _ in range(rng.randint(3, 8)):
        read = rng.sample(values, rng.randint(1, 3))
        if rng.random() < 0.5:
            read[0] = builder.op("exp", [read[0]])
        made.append(builder.op(rng.choice(("add", "tanh", "tanh", "dot")), read))
        if rng.random() < 0.2:
            values.append(made[-1])
    results = rng.sample(made, rng.randint(len(made) // 2, len(made)))
    execution = execution_of(builder.build(results, []), None, {})
    fusion = Fusion(execution)
    before = [kernel.node for kernel in find_kernels(execution, fusion)]
    after = merge_kernels(execution, fusion, find_kernels(execution, fusion))
    assert sorted(node for k in after for node in (k.node, *k.merged)) == before
    ran: set[int] = set()
    for kernel in after:
        ran.update((kernel.node, *kernel.merged))
        assert kernel.after.intersection(before) <= ran


# --- laws --------------------------------------------------------------------------------------------


@given(graph=graphs())
@laws(30)
def test_no_prediction_exceeds_what_an_unfused_run_in_either_order_would_hold(graph: Graph) -> None:
    """All values at once are an upper bound; nothing is negative, and a prediction is repeatable."""
    everything = sum(value.nbytes for value in graph.values)
    for saved in (required_saves(graph, frozenset()), frozenset(no_remat_saved(graph))):
        schedule = build_schedule(graph, saved)
        found = predict(graph, schedule)
        steps = sum(step.action in ("compute", "decode") for step in schedule.steps)
        assert 0 <= found.peak_bytes <= everything * max(1, steps)
        assert sum(buffer.nbytes for buffer in found.at_peak) >= found.peak_bytes
        assert found == predict(graph, schedule)
    assert 0 <= predict(graph).peak_bytes <= everything


@given(graph=graphs())
@laws(30)
def test_a_buffer_has_the_bytes_of_its_value_or_none(graph: Graph) -> None:
    found = buffers(graph)
    for value, nbytes in zip(graph.values, found, strict=True):
        assert nbytes in (0, value.nbytes)
    for value in (*graph.inputs, *graph.cotangents, *graph.constants):
        assert found[value] == graph.values[value].nbytes
    for value in (*graph.gradients, *graph.outputs):
        assert found[value] == graph.values[value].nbytes
    read_by_others = {
        v for op in graph.ops if not op.fusible and needed(graph, op.id) for v in op.inputs
    }
    assert all(found[value] == graph.values[value].nbytes for value in read_by_others)


def needed(graph: Graph, op: int) -> bool:
    """Whether a result depends on an operator; one without results has an effect and is needed."""
    wanted = {*graph.outputs, *graph.gradients}
    found: set[int] = set()
    for other in reversed(graph.ops):
        if not other.outputs or wanted.intersection(other.outputs):
            found.add(other.id)
            wanted.update(other.inputs)
    return op in found


@given(graph=graphs())
@laws(30)
def test_keeping_everything_in_order_without_barriers_is_at_most_one_unfused_run(
    graph: Graph,
) -> None:
    """A compiler that merges and reuses never needs more than one that writes every value and frees it late."""
    schedule = build_schedule(graph, frozenset(no_remat_saved(graph)), barriers=False)
    unfused = sum(value.nbytes for value in graph.values if value.producer is not None)
    packed = sum(value.nbytes for value in graph.values if value.dtype == "bool")
    assert predict(graph, schedule).peak_bytes <= unfused + packed


# --- loops -------------------------------------------------------------------------------------------


def body() -> Graph:
    """One iteration: carry `c -> dot -> tanh -> c`, and a weight `w` of which every iteration has its own."""
    builder = GraphBuilder()
    carry = builder.input(BIG)
    weight = builder.input(BIG)
    product = builder.op("dot", [carry, weight], BIG)
    result = builder.op("tanh", [product], BIG)
    ct = builder.cotangent(BIG)
    inner = builder.op("mul", [result, ct], BIG)
    back = builder.op("dot", [inner, weight], BIG)
    own = builder.op("dot", [inner, carry], BIG)
    graph = builder.build([result], [back, own])
    return replace(graph, carried=(carry, result), multiplicity=10)


def test_a_body_needs_slices_of_what_was_stacked_for_operators_that_do_not_fuse() -> None:
    ahead, back = predict_body(body())
    # The weight is sliced for the dot, the dot's result is overwritten by the tanh, which is the carry.
    assert ahead.peak_bytes == 2 * BIG_BYTES
    assert {buffer.label for buffer in back.at_peak if buffer.label.startswith("slice")}
    assert peak_bytes(body()) == max(ahead.peak_bytes, back.peak_bytes)


def test_a_loop_needs_its_stacks_and_the_working_memory_of_one_iteration() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.dot(c, w)), None

        return jnp.sum(jax.lax.scan(step, x, None, length=8)[0])

    shapes = (jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2
    plan = remat.plan(loss, *shapes, remat_policy="full")
    stack = 8 * 256 * 256 * 4
    parts = parts_of((1, 256, 256, 256), (4, 4), 4)
    assert stack <= plan.peak_bytes <= stack + (3 + parts) * 256 * 256 * 4
    assert plan.peak_bytes == predict(plan.graph, plan.schedule, loops=plan.loops).peak_bytes
    assert plan.baseline_peak_bytes >= 2 * stack


def test_a_loop_without_an_operator_in_the_graph_adds_nothing() -> None:
    plan = make_plan(chain(3, BIG, fusible=False), SaveAll())
    inner = make_plan(chain(2, BIG, fusible=False), Full())
    assert with_loops(plan, (LoopPlan("scan0", 4, inner),)).peak_bytes == plan.peak_bytes


# --- scale and the compiler --------------------------------------------------------------------------


def test_ten_thousand_operators_take_seconds_at_most() -> None:
    graph = chain(5000, (8,), fusible=False)
    assert predict(graph).peak_bytes >= 5000 * 8 * 4 - 64


@pytest.mark.sample(1)
@pytest.mark.gpu_compile
@pytest.mark.parametrize("policy", ["save_all", "full", "min_cut"])
def test_residual_layers_are_predicted_within_a_quarter_of_what_the_gpu_compiler_says(
    policy: str,
) -> None:
    loss, args = mlp.residual_mlp(layers=6, width=512, hidden=1024, batch=2048)
    plan = remat.plan(loss, *args, remat_policy=policy)
    wrapped = remat.checkpoint(loss, remat_policy=plan)
    report = remat.compile_report(jax.grad(wrapped), *args, device="h200")
    assert plan.peak_bytes == pytest.approx(report.temp_bytes, rel=0.25)


# --- what XLA makes of a convolution's operands --------------------------------------------------------------


def upsampled(transpose_kernel: bool = False, strides: int = 2) -> Graph:
    """The joint graph of one transposed convolution, 8 channels of 16 x 16 to 4 of 32 x 32."""

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = jax.lax.conv_transpose(
            jnp.sin(x), kernel, (strides, strides), "SAME", transpose_kernel=transpose_kernel
        )
        return jnp.sum(y * y)

    x = jax.ShapeDtypeStruct((2, 16, 16, 8), jnp.float32)
    shape = (2, 2, 4, 8) if transpose_kernel else (2, 2, 8, 4)
    kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
    return remat.plan(loss, x, kernel, remat_policy="full", argnums=(0, 1)).graph


def head(w: jax.Array, h: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of a language model, of which the logits are the largest array."""
    logits = jax.nn.log_softmax(h @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], -1))


def attention_over_edges(w: jax.Array, nodes: jax.Array, ends: jax.Array) -> jax.Array:
    """Messages weighed by a softmax over the edges that arrive at a node."""
    count, (senders, receivers) = len(nodes), ends
    for _ in range(3):
        hidden = nodes @ w
        score = jnp.sum(hidden, -1)[senders] + jnp.mean(hidden, -1)[receivers]
        weight = jnp.exp(score - jax.ops.segment_max(score, receivers, count)[receivers])
        total = jax.ops.segment_sum(weight, receivers, count)
        message = (weight / total[receivers])[:, None] * hidden[senders]
        nodes = nodes + jax.nn.elu(jax.ops.segment_sum(message, receivers, count))
    return jnp.mean(nodes**2)


def pairs(table: jax.Array, ids: jax.Array, labels: jax.Array) -> jax.Array:
    """Products of all pairs of a row's embeddings, as in a recommender."""
    found = table[ids]
    products = jnp.einsum("bid,bjd->bij", found, found)
    return jnp.mean((jnp.sum(products, (1, 2)) - labels) ** 2)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("policy", ["none", "min_cut", "full"])
@pytest.mark.parametrize(
    ("loss", "args"),
    [
        (head, (_f32(256, 8192), _f32(2048, 256), _i32(2048))),
        (attention_over_edges, (_f32(128, 128), _f32(8192, 128), _i32(2, 131072))),
        (pairs, (_f32(1000, 64), _i32(16384, 7), _f32(16384))),
    ],
)
def test_heads_graphs_and_recommenders_are_predicted_within_a_quarter(
    policy: str, loss: Callable[..., jax.Array], args: tuple[jax.ShapeDtypeStruct, ...]
) -> None:
    plan = remat.plan(loss, *args, remat_policy=Unchanged() if policy == "none" else policy)
    wrapped = loss if policy == "none" else remat.checkpoint(loss, remat_policy=plan)
    report = remat.compile_report(jax.grad(wrapped), *args, device="h200")
    assert plan.peak_bytes == pytest.approx(report.temp_bytes, rel=0.25)


def test_a_trace_tells_what_dilated_convolutions_need() -> None:
    ops = [op for op in upsampled().ops if op.name == "conv_general_dilated"]
    forward, *backward = ops
    # 16 elements with a zero between any two, and one on either side.
    assert forward.phase == "forward" and not forward.swapped
    assert forward.workspace_bytes == 4 * 2 * 33 * 33 * 8
    (kernel,) = (op for op in backward if op.swapped)
    (data,) = (op for op in backward if not op.swapped)
    assert kernel.workspace_bytes == 4 * 2 * 32 * 32 * 4  # a copy of what comes back
    assert data.workspace_bytes == 0


def test_a_dilated_convolution_with_a_reversed_kernel_is_one_of_the_library() -> None:
    forward, *_ = (
        op for op in upsampled(transpose_kernel=True).ops if op.name == "conv_general_dilated"
    )
    assert forward.workspace_bytes == 0 and not forward.swapped
    plain = [op for op in upsampled(strides=1).ops if op.name == "conv_general_dilated"]
    assert not any(op.workspace_bytes or op.swapped for op in plain)


def test_workspace_counts_while_its_operator_runs() -> None:
    builder = GraphBuilder()
    x = builder.input(BIG)
    before = builder.op("dot", [x], BIG, fusible=False)
    wide = builder.op("conv_general_dilated", [before], BIG, fusible=False)
    y = builder.op("dot", [wide], ())
    ct = builder.cotangent(())
    graph = builder.build([y], [builder.op("dot", [ct], ())])
    assert predict(graph).peak_bytes == 2 * BIG_BYTES
    ops = [
        replace(op, workspace_bytes=3 * BIG_BYTES) if op.name == "conv_general_dilated" else op
        for op in graph.ops
    ]
    assert predict(replace(graph, ops=tuple(ops))).peak_bytes == 5 * BIG_BYTES


def test_the_copy_of_what_a_barrier_lets_through_is_there_from_the_barrier_on() -> None:
    """Without a barrier the copy is what is kept."""
    builder = GraphBuilder()
    x = builder.input(BIG)
    kept = builder.op("dot", [x], BIG, fusible=False)
    y = builder.op("dot", [kept], ())
    ct = builder.cotangent(())
    first = builder.op("dot", [ct, kept], BIG, fusible=False)
    second = builder.op("conv_general_dilated", [kept, first], ())
    graph = builder.build([y], [second])
    ops = [
        replace(op, swapped=True) if op.name == "conv_general_dilated" else op for op in graph.ops
    ]
    swapped = replace(graph, ops=tuple(ops))
    assert predict(swapped).peak_bytes == predict(graph).peak_bytes == 2 * BIG_BYTES
    steps = [
        Step("compute", 0),
        Step("compute", 1),
        Step("turn"),
        Step("barrier", values=(kept, ct)),
    ]
    schedule = Schedule((*steps, Step("compute", 2), Step("compute", 3)))
    assert predict(graph, schedule).peak_bytes == 2 * BIG_BYTES
    assert predict(swapped, schedule).peak_bytes == 3 * BIG_BYTES
