"""What XLA makes of matmuls: those that share an operand are one, long sums are split; as compiled, not as told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import remat
from remat.core.graph import Graph
from remat.memory.execution import Execution, live_nodes
from remat.memory.instances import execution_of
from remat.memory.matmuls import merged_matmuls
from remat.memory.predict import buffers
from remat.memory.splits import PART_BYTES, parts_of
from remat.policies import Unchanged

Array = jax.Array
Args = tuple[jax.ShapeDtypeStruct, ...]
LABELS = jax.ShapeDtypeStruct((8192,), jnp.int32)


def arrays(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Args:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def graph_of(loss: Callable[..., Array], args: Args) -> Graph:
    return remat.plan(loss, *args, remat_policy=Unchanged()).graph


def multiplications(graph: Graph) -> int:
    """How many matmuls run, as predicted."""
    execution = execution_of(graph, None, {})
    groups = merged_matmuls(execution)
    live = live_nodes(execution)
    matmuls = sum(live[n] and node.name == "dot_general" for n, node in enumerate(execution.nodes))
    return matmuls - sum(len(members) - 1 for _, members in groups)


# --- in how many parts -------------------------------------------------------------------------------------


def compiled_parts(rows: int, count: int, columns: int, dtype: Any, batch: int | None) -> int:
    front = () if batch is None else (batch,)
    args = arrays((*front, rows, count), (*front, count, columns), dtype=dtype)
    report = remat.compile_report(lambda a, b: jnp.sin(a @ b), *args, device="h200")
    entry = report.hlo_text.split("ENTRY", 1)[1]
    found = re.findall(r"%\S*dot\S* = \w+\[([\d,]+)\]", entry)
    elements = [int(jnp.prod(jnp.array([int(d) for d in dims.split(",")]))) for dims in found]
    return max(elements) // (rows * columns * (batch or 1))


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("rows", "count", "columns", "dtype", "batch"),
    [
        (64, 512, 128, jnp.float32, None),
        (128, 512, 1536, jnp.float32, None),
        (512, 4096, 2048, jnp.bfloat16, None),
        (48, 768, 3072, jnp.bfloat16, None),
        (256, 65536, 64, jnp.float32, None),
        (2048, 256, 8192, jnp.float32, None),
        (128, 1024, 128, jnp.float32, 3),
        (96, 320, 480, jnp.float16, None),
    ],
)
def test_the_compiler_splits_a_sum_into_as_many_parts_as_predicted(
    rows: int, count: int, columns: int, dtype: Any, batch: int | None
) -> None:
    width = jnp.dtype(dtype).itemsize
    predicted = parts_of((batch or 1, rows, columns, count), (width, width), width)
    assert predicted == compiled_parts(rows, count, columns, dtype, batch)


@given(
    rows=st.integers(1, 5000), columns=st.integers(1, 5000), count=st.integers(1, 100_000)
)  # fmt: skip
def test_a_matmul_is_split_into_a_power_of_two_that_depends_on_no_side(
    rows: int, columns: int, count: int
) -> None:
    parts = parts_of((1, rows, columns, count), (4, 4), 4)
    assert parts & (parts - 1) == 0
    assert parts == parts_of((1, columns, rows, count), (4, 4), 4)


def test_parts_wait_for_readers_in_both_passes_and_not_their_sum() -> None:
    def loss(w: Array, x: Array) -> Array:
        return jnp.sum(jnp.sin(x @ w) ** 2)

    graph = graph_of(loss, arrays((512, 512), (64, 512)))
    parts = parts_of((1, 64, 512, 512), (4, 4), 4)
    assert parts > 1
    product = next(op.outputs[0] for op in graph.ops if op.name == "dot_general")
    assert buffers(graph)[product] == parts * PART_BYTES * 64 * 512


# --- which are one -----------------------------------------------------------------------------------------


def shared_input(x: Array, a: Array, b: Array) -> Array:
    return jnp.sum(jnp.tanh(x @ a) * jnp.sin(x @ b))


def shared_weight(x: Array, y: Array, a: Array) -> Array:
    return jnp.sum(jnp.tanh(x @ a)) + jnp.sum(jnp.sin(y @ a) ** 2)


def one_needs_the_other(x: Array, a: Array) -> Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ a) @ a))


def crossed(x: Array, y: Array, a: Array, b: Array) -> Array:
    """`x @ a` is needed by `. @ b`, and `y @ b` by `. @ a`: one of the two pairs can be one matmul, not both."""
    left, right = jnp.tanh(x @ a), jnp.tanh(y @ b)
    return jnp.sum(jnp.sin(left @ b)) + jnp.sum(jnp.cos(right @ a))


def steps(weights: Array, inputs: Array) -> Array:
    """A recurrence whose inputs are multiplied step by step."""
    state = jnp.zeros_like(inputs[0])
    for step in range(inputs.shape[0]):
        state = jnp.tanh(state + inputs[step] @ weights)
    return jnp.sum(state**2)


CASES: dict[str, tuple[Callable[..., Array], Args]] = {
    "small inputs": (shared_input, arrays((512, 96), (96, 96), (96, 96))),
    "large inputs": (shared_input, arrays((200_000, 96), (96, 96), (96, 96))),
    "small weights": (shared_weight, arrays((512, 96), (256, 96), (96, 96))),
    "chain": (one_needs_the_other, arrays((512, 96), (96, 96))),
    "crossed": (crossed, arrays((512, 96), (512, 96), (96, 96), (96, 96))),
    "recurrence": (steps, arrays((96, 96), (7, 512, 96))),
}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", CASES)
def test_the_compiler_multiplies_as_often_as_predicted(name: str) -> None:
    loss, args = CASES[name]
    everything = tuple(range(len(args)))
    report = remat.compile_report(jax.grad(loss, everything), *args, device="h200")
    # Its results, which `jax.grad` has not, need no matmul more.
    plan = remat.plan(loss, *args, remat_policy=Unchanged(), argnums=everything)
    assert multiplications(plan.graph) == report.matmuls_executed


def test_what_is_multiplied_as_one_is_one_buffer() -> None:
    """Both halves are there as long as one of them is."""
    graph = graph_of(shared_input, arrays((4096, 96), (96, 96), (96, 96)))
    execution = execution_of(graph, None, {})
    forward = [
        members
        for _, members in merged_matmuls(execution)
        if all(_is_forward(execution, number) for number in members)
    ]
    assert [len(members) for members in forward] == [2]


def _is_forward(execution: Execution, number: int) -> bool:
    op = execution.nodes[number].op
    return op is not None and op.phase == "forward"


# --- and what a plan does about it --------------------------------------------------------------------------


def shared_layers(weights: Array, x: Array) -> Array:
    for _ in range(6):
        x = x + jnp.tanh(x @ weights)
    return jnp.mean(x**2)


def classified(weights: list[Array], x: Array, labels: Array) -> Array:
    """The gradient of the loss needs labels, and so forward operators, but no matmul of the forward pass."""
    for w in weights:
        x = x + jax.nn.gelu(x @ w.astype(x.dtype))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)
    return -jnp.mean(chosen)


WEIGHTS = [*arrays(*[(256, 256)] * 4)]
# With the matmuls of the forward pass, and how many of its layers may still be there.
REPEATED: dict[str, tuple[Callable[..., Array], tuple[Any, ...], int, int]] = {
    "shared": (shared_layers, arrays((256, 256), (8192, 256)), 6, 0),
    "labels": (classified, (WEIGHTS, *arrays((8192, 256)), LABELS), 4, 1),
    "casts": (classified, (WEIGHTS, *arrays((8192, 256), dtype=jnp.bfloat16), LABELS), 4, 0),
}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_forward_pass_is_not_multiplied_together_with_the_first(name: str) -> None:
    """The loss is wanted, too, so that both are there; XLA would make one matmul of two that share a weight."""
    loss, args, matmuls, layers = REPEATED[name]
    wrapped = remat.checkpoint(loss, remat_policy="full")
    alone = remat.compile_report(jax.grad(wrapped), *args, device="h200")
    both = remat.compile_report(jax.value_and_grad(wrapped), *args, device="h200")
    layer_bytes = args[1].size * args[1].dtype.itemsize
    assert both.temp_bytes <= 1.02 * alone.temp_bytes + layers * layer_bytes
    assert both.matmuls_executed == alone.matmuls_executed + matmuls


# --- products that wait for others -------------------------------------------------------------------------


def with_skips(layers: list[tuple[Array, ...]], x: Array) -> Array:
    """Gated layers: one product is added to the stream at once, the other is read behind the last layer."""
    skips = []
    for gate, residual, skip in layers:
        z = jnp.tanh(x @ gate)
        x = x + z @ residual
        skips.append(z @ skip)
    return jnp.sum(jnp.tanh(sum(skips, jnp.zeros_like(x))) * x)


def with_heads(layers: list[tuple[Array, ...]], x: Array) -> Array:
    """Both products are read at once."""
    for gate, left, right in layers:
        z = jnp.tanh(x @ gate)
        x = x + (z @ left) * jnp.tanh(z @ right)
    return jnp.sum(jnp.tanh(x))


def layers_and_stream(rows: int, columns: int = 64) -> tuple[Any, ...]:
    return [arrays(*[(columns, columns)] * 3) for _ in range(6)], arrays((rows, columns))[0]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("policy", ["min_cut", "low_memory"])
def test_products_that_wait_for_others_are_multiplied_apart(policy: str) -> None:
    args = layers_and_stream(16384)
    plan = remat.plan(with_skips, *args, remat_policy=policy)
    assert any(step.action == "barrier" for step in plan.schedule.forward)
    wrapped = remat.checkpoint(with_skips, remat_policy=plan)
    compiled = remat.compile_report(jax.grad(wrapped), *args, device="h200").temp_bytes
    plain = remat.compile_report(jax.grad(with_skips), *args, device="h200").temp_bytes
    assert plan.peak_bytes == pytest.approx(compiled, rel=0.05)
    assert compiled < 0.88 * plain


@pytest.mark.parametrize("policy", ["min_cut", "low_memory"])
def test_products_that_are_read_together_are_multiplied_together(policy: str) -> None:
    plan = remat.plan(with_heads, *layers_and_stream(16384), remat_policy=policy)
    assert not any(step.action == "barrier" for step in plan.schedule.forward)


@pytest.mark.parametrize("policy", ["min_cut", "low_memory"])
def test_gradients_of_what_is_multiplied_apart(policy: str) -> None:
    shapes = layers_and_stream(4096, 16)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    args = jax.tree.map(lambda s: 0.3 * jax.random.normal(next(keys), s.shape), shapes)
    wrapped = remat.checkpoint(with_skips, remat_policy=policy)
    plan = remat.plan(with_skips, *args, remat_policy=policy)
    assert any(step.action == "barrier" for step in plan.schedule.forward)
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(*args) for f in (wrapped, with_skips))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(jnp.abs(theirs).max()))
