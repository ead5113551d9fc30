"""What a trace tells of XLA's kernels beyond an operator's class: short reductions, concatenations, matmuls."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.core.classify import dot_form
from remat.core.graph import Graph, Op
from remat.core.kernel_work import cycles_of
from remat.memory.predict import buffers
from remat.policies import Unchanged
from remat.trace.classify import classify_equation
from remat.trace.emission import reduction_blocks


def op_named(graph: Graph, name: str) -> Op:
    return next(op for op in graph.ops if op.name == name)


def reduction(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Graph, Op]:
    """The graph of a function that reads a reduction in both passes, and the reduction."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.sum(x, axes)))

    graph = remat.plan(
        loss, jax.ShapeDtypeStruct(shape, jnp.float32), remat_policy=Unchanged()
    ).graph
    return graph, op_named(graph, "reduce_sum")


@pytest.mark.parametrize(
    ("shape", "axes", "is_short"),
    [
        ((4096, 3), (1,), True),  # rows shorter than a warp,
        ((4096, 4), (1,), False),  # unless several fill one
        ((4096, 31), (1,), True),
        ((4096, 33), (1,), False),
        ((31, 4096), (0,), True),  # columns shorter than a warp,
        ((33, 4096), (0,), False),
        ((60, 16), (0,), True),  # or than a few, if there are not many of them
        ((60, 64), (0,), False),
        ((200, 2), (0,), True),
        ((300, 2), (0,), False),
        ((5, 4096, 7), (0, 2), True),  # rows of parts that are not next to one another
        ((5, 4096, 64), (0, 2), False),
        ((9, 1, 4096, 1), (0, 1), True),  # dimensions of one do not count
        ((4096,), (0,), False),  # all of it
        ((8, 5, 4096, 7), (0, 2), False),  # neither what is summed nor what is left is in one piece
    ],
)
def test_a_trace_tells_which_reductions_are_made_where_they_are_read(
    shape: tuple[int, ...], axes: tuple[int, ...], is_short: bool
) -> None:
    _, op = reduction(shape, axes)
    assert op.elemental is is_short
    count = math.prod(shape[axis] for axis in axes)
    assert op.cycles == (7 * (count - 1) if is_short else 0)


@pytest.mark.parametrize(
    ("shape", "axes", "blocks"),
    [
        ((2048, 2048, 3), (0,), 6144 // 64),  # columns, 64 to a block
        ((2048, 2047), (0,), 64),  # of an odd number 32
        ((64, 40), (0,), 2),
        ((2048, 2048, 3), (1,), 2048),  # a few columns, a block for each matrix
        ((8, 8, 8, 256), (0, 1, 2), 4),
        ((8, 32, 32, 64), (0, 1, 2), 64),  # in two steps: 64 times 128
        ((8, 56, 56, 64), (0, 1, 2), 128),
        ((4096, 1024), (1,), 1024),  # rows, four to a block
        ((4096, 64), (1,), 0),  # several to a warp
        ((256, 64), (0, 1), 1),  # all of it, in one step
        ((1024, 64), (0, 1), 32),  # and in two
        ((8, 64, 32, 96), (0, 2), 0),  # neither what is summed nor what is left is in one piece
        ((64, 0), (0,), 0),
        ((0, 64), (0,), 0),
    ],
)
def test_how_many_blocks_of_threads_a_reduction_has(
    shape: tuple[int, ...], axes: tuple[int, ...], blocks: int
) -> None:
    assert reduction_blocks(shape, axes, 4) == blocks


def test_a_sum_over_dimensions_of_one_is_its_operand() -> None:
    _, op = reduction((64, 1, 64, 1), (1, 3))
    assert op.elemental

    def loss(x: jax.Array) -> jax.Array:
        inner = jnp.sum(jnp.sin(x), axis=1)  # read by the next kernel, which makes it
        return jnp.sum(jax.lax.optimization_barrier(jnp.tanh(inner)), axis=1)

    x = jax.ShapeDtypeStruct((1024, 1, 1024), jnp.float32)
    graph = remat.plan(loss, x, remat_policy=Unchanged()).graph
    assert buffers(graph)[op_named(graph, "reduce_sum").outputs[0]] == 0


@pytest.mark.parametrize(("columns", "is_written"), [(3, False), (64, True)])
def test_a_short_reduction_is_no_buffer(columns: int, is_written: bool) -> None:
    graph, op = reduction((2**20, columns), (1,))
    assert (buffers(graph)[op.outputs[0]] > 0) is is_written


@pytest.mark.parametrize(
    ("first", "along", "cycles"),
    [((64, 48), 1, 400), ((64, 96), 1, 6), ((48, 64), 0, 6), ((2, 33, 8), 1, 400)],
)
def test_a_concatenation_whose_border_is_in_a_warp_is_dear(
    first: tuple[int, ...], along: int, cycles: int
) -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.concatenate([x, y], along) ** 2)

    args = [jax.ShapeDtypeStruct(first, jnp.float32)] * 2
    graph = remat.plan(loss, *args, remat_policy=Unchanged()).graph
    assert op_named(graph, "concatenate").cycles == cycles


@pytest.mark.parametrize(("axis", "cycles"), [(0, 6), (1, 400), (2, 400)])
def test_a_stack_is_a_concatenation_of_rows_of_one(axis: int, cycles: int) -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack([x, y], axis) ** 2)

    graph = remat.plan(loss, *[jax.ShapeDtypeStruct((64, 32), jnp.float32)] * 2).graph
    assert op_named(graph, "stack").cycles == cycles


def test_what_moves_elements_computes_nothing() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.pad(x[1:].T, 1) ** 2)

    graph = remat.plan(loss, jax.ShapeDtypeStruct((64, 32), jnp.float32)).graph
    assert [cycles_of(op_named(graph, name)) for name in ("slice", "transpose", "pad")] == [0, 0, 0]


def test_a_matmul_tells_what_it_sums_over() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.einsum("bij,bkj->bik", x, y) ** 2)

    args = [jax.ShapeDtypeStruct((2, 3, 5), jnp.float32)] * 2
    graph = remat.plan(loss, *args, remat_policy=Unchanged()).graph
    assert op_named(graph, "dot_general").contracts == ((2,), (2,), (0,), (0,))


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("shapes", "numbers", "form"),
    [
        (((16384, 512), (512, 1)), (((1,), (0,)), ((), ())), "sum"),
        (((20480, 512), (512,)), (((1,), (0,)), ((), ())), "matmul"),
        (((4096, 512), (512, 2)), (((1,), (0,)), ((), ())), "matmul"),
        (((4, 256, 64, 16), (4, 256, 16)), (((3,), (2,)), ((0, 1), (0, 1))), "sum"),
        (((8, 1, 64), (8, 512, 64)), (((2,), (2,)), ((0,), (0,))), "sum"),
        (((4, 65536, 256), (4, 256)), (((2,), (1,)), ((0,), (0,))), "matmul"),
        (((4096, 1), (1, 512)), (((1,), (0,)), ((), ())), "product"),
        (((4096, 2), (2, 512)), (((1,), (0,)), ((), ())), "matmul"),
        (((4, 64, 32), (4, 64, 8)), (((), ()), ((0, 1), (0, 1))), "product"),
    ],
)
def test_xla_makes_of_a_dot_what_is_said(
    shapes: tuple[tuple[int, ...], ...], numbers: Any, form: str
) -> None:
    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(jnp.tanh(x), y, numbers)

    x, y = args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    assert dot_form(numbers, args)[0] == form
    text = remat.compile_report(dot, x, y, device="h200").hlo_text
    assert ("gemm" in text or " dot(" in text) == (form == "matmul")
    if form != "matmul":
        assert (" reduce(" in text) == (form == "sum")
    (equation,) = [e for e in jax.make_jaxpr(dot)(x, y).eqns if e.primitive.name == "dot_general"]
    cost = classify_equation(equation)
    assert (cost.heavy, cost.fusible) == (form == "matmul", form != "matmul")
    assert cost.flops > 0


@pytest.mark.gpu_compile
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_of_what_tensor_cores_do_not_multiply_a_large_dot_is_a_sum_too(dtype: str) -> None:
    numbers = (((1,), (0,)), ((), ()))
    with jax.enable_x64(True):
        x, y = args = [jax.ShapeDtypeStruct(s, dtype) for s in ((20480, 512), (512,))]
        text = remat.compile_report(jnp.matmul, x, y, device="h200").hlo_text
    assert dot_form(numbers, args)[0] == "sum"
    assert " reduce(" in text and "gemm" not in text


def test_a_sum_of_products_has_the_axes_of_the_operand_that_is_summed() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.sin(x) @ jnp.cos(y)))

    args = jax.ShapeDtypeStruct((64, 500), jnp.float32), jax.ShapeDtypeStruct((500,), jnp.float32)
    first = op_named(remat.plan(loss, *args, remat_policy=Unchanged()).graph, "dot_general")
    assert (first.kind, first.axes, first.cycles, first.contracts) == ("REDUCTION", (1,), 10, ())
    plan = remat.plan(
        lambda y, x: jnp.sum(jnp.tanh(jnp.cos(y) @ jnp.sin(x).T)),
        *args[::-1],
        remat_policy=Unchanged(),
    )
    second = op_named(plan.graph, "dot_general")
    assert (second.kind, second.axes, second.cycles) == ("REDUCTION", (0,), 10)


@pytest.mark.parametrize(
    ("window", "stride", "is_apart"), [(2, 2, True), (2, 3, True), (3, 2, False), (3, 1, False)]
)
def test_the_gradient_of_a_mean_pool_fuses_unless_windows_overlap(
    window: int, stride: int, is_apart: bool
) -> None:
    def loss(x: jax.Array) -> jax.Array:
        sums = jax.lax.reduce_window(
            jnp.sin(x), 0.0, jax.lax.add, (1, window, 1), (1, stride, 1), "VALID"
        )
        return jnp.sum(jnp.cos(sums))

    x = jax.ShapeDtypeStruct((64, 36, 128), jnp.float32)
    graph = remat.plan(loss, x, remat_policy=Unchanged()).graph
    forward, backward = (op for op in graph.ops if op.name == "reduce_window_sum")
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert forward.fusible is backward.fusible is is_apart
    (padding,) = (graph.values[v] for v in backward.inputs)
    assert (buffers(graph)[padding.id] == 0) is is_apart


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((0, 64), (0,)),
        ((64, 0), (1,)),
        ((64, 0), (0,)),
        ((0,), (0,)),
        ((128, 0, 128), (1,)),
        ((128, 0, 128), (1, 2)),
    ],
)
def test_a_reduction_of_nothing_is_planned(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    _, op = reduction(shape, axes)
    assert (op.axes, op.blocks, op.elemental) == (axes, 0, False)
