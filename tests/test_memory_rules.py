"""What XLA does around matmuls and scatters: the model, and the compiler, on programs that show one thing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from random_graphs import GraphBuilder

import remat
from remat.core.graph import Graph
from remat.memory.instances import execution_of
from remat.memory.matmuls import merged_matmuls
from remat.memory.predict import predict
from remat.memory.splits import padded_count, parts_of
from remat.policies import MinCut, Unchanged

BIG = (1024, 1024)
BIG_BYTES = 4 * 1024 * 1024


def layer(activation: str, operands: int = 1) -> Graph:
    """`f(h)` for a matmul forward and for its weight's gradient, and `h` for the gradient of `f`."""
    builder = GraphBuilder()
    kind = {"fusible": False, "heavy": True, "contracts": ((0,), (0,), (), ())}
    h = builder.op("dot", [builder.input(BIG)], BIG)
    others = [builder.input(BIG) for _ in range(operands - 1)]
    made = builder.op(activation, [h, *others], BIG)
    loss = builder.op("dot_general", [made], (), **kind)
    ct = builder.cotangent((1024, 1))
    weight = builder.op("dot_general", [made, ct], (1024, 1), **kind)
    grad = builder.op("dot", [builder.op("mul", [h, ct], BIG)], (4,))
    return builder.build([loss], [weight, grad])


def test_a_matmul_makes_what_is_one_arrays_elements_one_by_one() -> None:
    assert predict(layer("max")).peak_bytes < 1.1 * BIG_BYTES
    # What is made of two arrays is in memory for it.
    assert predict(layer("mul", operands=2)).peak_bytes >= 2 * BIG_BYTES


def gradient(rows: int) -> Graph:
    """A weight's gradient, a sum over rows: of a matrix that was computed, and its cotangent."""
    builder = GraphBuilder()
    made = builder.op("dot", [builder.input((4,))], (rows, 256))
    ct = builder.op("dot", [builder.cotangent((4,))], (rows, 64))
    kind = {"fusible": False, "heavy": True, "contracts": ((0,), (0,), (), ())}
    weight = builder.op("dot_general", [made, ct], (256, 64), **kind)
    return builder.build([], [weight])


def test_what_cannot_be_divided_is_copied_with_zeros_behind() -> None:
    """Both operands of a sum that is split into 32 parts, each a multiple of 16 bytes."""
    dimensions = (1, 256, 64, 16384)
    parts = parts_of(dimensions, (4, 4), 4)
    assert parts > 1 and padded_count(16384, (4, 4), parts) == 16384
    assert padded_count(16385, (4, 2), parts) == 16384 + parts * 8
    even, odd = (predict(gradient(rows)).peak_bytes for rows in (16384, 16385))
    # Nothing else is there while the larger is copied.
    larger = 16384 * 256 * 4
    assert larger < even < 2 * larger <= odd < 2.1 * larger


def tables(count: int, read_once_more: bool = False) -> Graph:
    """Gradients of tables are scattered into zeros while there is much else; then there is not."""
    builder = GraphBuilder()
    ct = builder.cotangent(())
    where = builder.input((4,))
    wide = builder.op("dot", [ct], (512, 1024))
    zeros = builder.op("broadcast_in_dim", [], BIG)
    grads = [
        builder.op("scatter-add", [zeros, where, builder.input((4,))], BIG, fusible=False)
        for _ in range(count)
    ]
    last = [builder.op("dot", [wide], (4,))]
    if read_once_more:
        last.append(builder.op("dot", [zeros], (4,)))
    return builder.build([], [*grads, *last])


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_scattered_into_zeros_take_no_memory_but_their_own(count: int) -> None:
    """The zeros are made last, in the results' place; what else there is lies in them before."""
    assert predict(tables(count)).peak_bytes < 0.1 * BIG_BYTES


def test_zeros_that_another_reads_are_an_array_of_their_own() -> None:
    assert predict(tables(2, read_once_more=True)).peak_bytes >= BIG_BYTES


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def perceptron(
    activation: Callable[[jax.Array], jax.Array],
    rows: int = 8192,
    sizes: Sequence[int] = (256, 1024, 768, 512, 1),
) -> tuple[Any, tuple[Any, ...]]:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for number, (weight, bias) in enumerate(params):
            x = x @ weight + bias
            x = activation(x) if number < len(params) - 1 else x
        return jnp.mean((x[:, 0] - y) ** 2)

    params = [(shape(a, b), shape(b)) for a, b in itertools.pairwise(sizes)]
    return loss, (params, shape(rows, sizes[0]), shape(rows))


def recommender(fields: int, bags: int) -> tuple[Any, tuple[Any, ...]]:
    """Tables, the products of all pairs of what is looked up, and a perceptron (Naumov et al. 2019)."""
    width, rows, batch = 64, 60_000, 8192
    first, second = jnp.tril_indices(fields, -1)

    def loss(params: Any, where: jax.Array, y: jax.Array) -> jax.Array:
        found = [t[where[:, i]].sum(1) for i, t in enumerate(params["tables"])]
        stacked = jnp.stack(found, 1)
        x = jnp.einsum("bfd,bgd->bfg", stacked, stacked)[:, first, second]
        for weight in params["layers"]:
            x = jax.nn.relu(x @ weight)
        return jnp.mean((x.sum(1) - y) ** 2)

    sizes = (len(first), 768, 1024, 256)
    params = {
        "layers": [shape(a, b) for a, b in itertools.pairwise(sizes)],
        "tables": [shape(rows, width) for _ in range(fields)],
    }
    return loss, (params, shape(batch, fields, bags, dtype="int32"), shape(batch))


def recommender_of_one_table(bags: int, sliced: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """One array of tables, each with its own indices; dense features are looked up nowhere, and joined as a row.

    Args:
        bags: rows of each table that are averaged.
        sliced: whether tables are cut out one by one.
    """
    fields, width, rows, batch = 16, 64, 20_000, 8192
    first, second = jnp.tril_indices(fields + 1, -1)

    def loss(params: Any, dense: jax.Array, where: jax.Array, y: jax.Array) -> jax.Array:
        tables = params["tables"]
        if sliced:
            found = jnp.stack([tables[t][where[:, t]] for t in range(fields)], 1).mean(2)
        else:
            found = jax.vmap(lambda table, i: table[i], (0, 1), 1)(tables, where).mean(2)
        dense = jax.nn.relu(dense @ params["bottom"])
        joined = jnp.concatenate([dense[:, None], found], 1)
        pairs = jnp.einsum("bfd,bgd->bfg", joined, joined)[:, first, second]
        x = jnp.concatenate([dense, pairs], 1)
        for weight in params["layers"]:
            x = jax.nn.relu(x @ weight)
        return jnp.mean((x.sum(1) - y) ** 2)

    sizes = (len(first) + width, 768, 1024, 256)
    params = {
        "bottom": shape(16, width),
        "layers": [shape(a, b) for a, b in itertools.pairwise(sizes)],
        "tables": shape(fields, rows, width),
    }
    return loss, (params, shape(batch, 16), shape(batch, fields, bags, dtype="int32"), shape(batch))


@pytest.mark.parametrize("policy", [MinCut(memory_weight=1.25), "full"])
def test_barriers_do_not_write_what_tables_add_up(policy: MinCut | str) -> None:
    """What the tables' scatters add up they make themselves: a barrier does not write it, four rows for one."""
    loss, args = recommender_of_one_table(4)
    plain = remat.plan(loss, *args, remat_policy=Unchanged())
    plan = remat.plan(loss, *args, remat_policy=policy)
    assert plan.peak_bytes <= plain.peak_bytes
    spread = {v.id for v in plan.graph.values if v.shape[:2] == (16, 8192) and v.dtype == "float32"}
    barriers = [step for step in plan.schedule.steps if step.action == "barrier"]
    assert spread
    assert barriers
    assert not any(spread & set(step.values) for step in barriers)


def adapters() -> tuple[Any, tuple[Any, ...]]:
    """Weights that are not trained with low-rank ones that are (Hu et al. 2022): both multiply one array."""
    width, rank, count = 512, 16, 3

    def loss(trained: Any, fixed: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for (a, b, c, d), (up, down) in zip(trained, fixed, strict=True):
            hidden = jax.nn.gelu(x @ up + (x @ a) @ b)
            x = x + hidden @ down + (hidden @ c) @ d
        return jnp.mean((x - y) ** 2)

    inner = 4 * width
    trained = [(shape(width, rank), shape(rank, inner), shape(inner, rank), shape(rank, width))]
    fixed = [(shape(width, inner), shape(inner, width))]
    return loss, (trained * count, fixed * count, shape(4096, width), shape(4096, width))


def vocabulary(words: int) -> tuple[Any, tuple[Any, ...]]:
    """The likelihood of one word of many: a kernel of rows makes its gradient, if a row is short enough."""

    def loss(params: Any, x: jax.Array, word: jax.Array) -> jax.Array:
        table, hidden = params
        x = table[x]
        for weight in hidden:
            x = x + jnp.tanh(x @ weight)
        likely = jax.nn.log_softmax(x @ table.T)
        return -jnp.take_along_axis(likely, word[..., None], -1).mean()

    tokens = shape(4, 256, dtype="int32")
    return loss, ((shape(words, 256), [shape(256, 256)] * 3), tokens, tokens)


def stacked_tables(bags: int) -> tuple[Any, tuple[Any, ...]]:
    """An array of all tables, and products of all pairs: many temporaries of the size of what is looked up."""
    batch, width, fields = 8192, 64, 15

    def loss(params: Any, dense: jax.Array, where: jax.Array, y: jax.Array) -> jax.Array:
        tables, first, second = params
        found = jax.vmap(lambda table, rows: table[rows], (0, 1), 1)(tables, where).mean(2)
        both = jnp.concatenate([jax.nn.relu(dense @ first)[:, None], found], 1)
        pairs = jnp.einsum("bid,bjd->bij", both, both)
        pairs = pairs[:, *jnp.tril_indices(fields + 1, -1)]
        return jnp.mean((jax.nn.relu(pairs @ second).sum(-1) - y) ** 2)

    params = (shape(fields, 50_000, width), shape(13, width), shape(120, 512))
    where = shape(batch, fields, bags, dtype="int32")
    return loss, (params, shape(batch, 13), where, shape(batch))


def attention() -> tuple[Any, tuple[Any, ...]]:
    """Attention in bfloat16: the backward pass needs what its softmax sums, and writes over an operand."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query, key, value = jnp.tanh(query), jnp.tanh(key), jnp.tanh(value)
        scores = jnp.einsum("bqhe,bkhe->bhqk", query, key)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(query.dtype)
        mixed = jnp.einsum("bhqk,bkhe->bqhe", weights, value)
        return jnp.mean(jnp.mean(mixed.astype(jnp.float32) ** 2, (1, 2, 3)))

    return loss, (shape(2, 512, 16, 64, dtype="bfloat16"),) * 3


def products(terms: int) -> tuple[Any, tuple[Any, ...]]:
    """A sum of outer products, of more arrays than a kernel may have."""

    def loss(columns: list[jax.Array], rows: list[jax.Array], total: jax.Array) -> jax.Array:
        for column, row in zip(columns, rows, strict=True):
            total = total + column[:, None] * row
        return jnp.sum(jnp.tanh(total))

    return loss, ([shape(512)] * terms, [shape(2048)] * terms, shape(512, 2048))


@pytest.mark.gpu_compile
@pytest.mark.parametrize("terms", [48, 60, 100])
def test_of_a_long_sum_those_terms_are_written_that_xla_writes(terms: int) -> None:
    """All save equally much, so that what is left when the kernel is full depends on the order alone."""
    loss, args = products(terms)
    predicted = remat.plan(loss, *args, remat_policy=Unchanged()).peak_bytes
    compiled = remat.compile_report(jax.grad(loss, (0, 1, 2)), *args, device="h200").temp_bytes
    assert compiled > 8 * 2**20
    assert predicted == pytest.approx(compiled, rel=0.02)


# The rules are those of jax 0.10.2: with 0.12 other sizes are compiled (docs/memory-model.md).
NOT_SINCE_0_12 = pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="XLA differs")


def shared(columns: Sequence[int]) -> tuple[Any, tuple[Any, ...]]:
    """Matmuls of one array, of which XLA makes one or several."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.tanh(x @ weight) ** 3) for weight in weights)

    return loss, ([shape(512, count) for count in columns], shape(2048, 512))


def contrastive(diagonal: bool) -> tuple[Any, tuple[Any, ...]]:
    """Two towers, whose batch is its own negatives."""

    def tower(weights: Any, x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jax.nn.relu(x) @ weight
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(20 * tower(weights[0], x) @ tower(weights[1], y).T)
        number = jnp.arange(len(x))
        return -jnp.mean(jnp.diagonal(logits) if diagonal else logits[number, number])

    weights = [shape(384, 512), shape(512, 256)]
    return loss, ([weights, weights], shape(4096, 384), shape(4096, 384))


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    "columns",
    [(512,) * 40, (2048, 103), (2048, 102), (40, 1024, 512), (2048,) * 5],
    ids=["many", "alike", "unlike", "three", "large"],
)
def test_matmuls_of_one_array_are_merged_as_xla_merges_them(columns: Sequence[int]) -> None:
    """Since jax 0.11.2 only those that are alike in size, and not into one that is larger than a limit."""
    loss, args = shared(columns)
    graph = remat.plan(loss, *args, remat_policy=Unchanged()).graph
    groups = merged_matmuls(execution_of(graph, None, {}))
    one_less = sum(len(members) - 1 for _, members in groups)
    compiled = remat.compile_report(jax.grad(loss), *args, device="h200").matmuls_executed
    assert sum(bool(op.contracts) for op in graph.ops) - one_less == compiled


@pytest.mark.gpu_compile
@pytest.mark.parametrize("sizes", [(256, 512, 512, 256, 1), (128, 512, 512, 1)])
def test_a_head_of_one_column_is_part_of_the_loss(sizes: tuple[int, ...]) -> None:
    """What is made of its product alone is made in its kernel, not with the loss of the first forward pass."""
    compare(lambda: perceptron(jax.nn.relu, 65536, sizes), "full")


def point_cloud(points: int, width: int) -> tuple[Any, tuple[Any, ...]]:
    """Features of points beside those of their cloud (Qi et al. 2017): arrays of three dimensions to matmuls."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        ahead, behind = params
        for weight, scale in ahead:
            x = x @ weight
            x = jax.nn.relu((x - x.mean((0, 1))) * jax.lax.rsqrt(x.var((0, 1)) + 1e-5) * scale)
        cloud = jnp.broadcast_to(x.max(1, keepdims=True), (*x.shape[:2], width))
        x = jnp.concatenate([jnp.tanh(x[..., :64]), cloud], -1)
        for weight in behind:
            x = jax.nn.relu(x @ weight)
        return jnp.mean(x**2)

    ahead = [(shape(3, 64), shape(64)), (shape(64, width), shape(width))]
    return loss, ((ahead, [shape(64 + width, 256), shape(256, 32)]), shape(16, points, 3))


@pytest.mark.gpu_compile
@pytest.mark.parametrize("policy", ["min_cut", "full"])
@pytest.mark.parametrize("points, width", [(2048, 512), (1024, 1024)])
def test_matmuls_of_arrays_of_more_dimensions(points: int, width: int, policy: str) -> None:
    """What they read through a reshape its other readers make again; pieces behind one they do not see."""
    compare(lambda: point_cloud(points, width), policy)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("sizes", [(64, 128, 128, 512, 1), (64, 64, 1024, 1)])
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu])
def test_two_sums_of_one_array_are_one_kernel_that_does_not_write_over_it(
    activation: Callable[[jax.Array], jax.Array], sizes: tuple[int, ...]
) -> None:
    """The gradients of the head and of the bias before it, whose operands stand on different sides."""
    compare(lambda: perceptron(activation, 8200, sizes), "none")


@pytest.mark.gpu_compile
@pytest.mark.parametrize("policy", ["none", "min_cut"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: perceptron(jax.nn.relu),
        lambda: perceptron(jax.nn.relu6),
        lambda: perceptron(lambda x: jnp.maximum(0.1 * x, x)),
        lambda: perceptron(lambda x: jax.nn.gelu(x, approximate=False)),
        lambda: perceptron(lambda x: x * jax.scipy.special.i1e(x)),
        lambda: perceptron(jnp.tanh, 8200),  # no multiple of what weights' gradients are split into
        attention,
        pytest.param(lambda: recommender(6, 2), marks=NOT_SINCE_0_12),
        pytest.param(lambda: recommender(12, 1), marks=NOT_SINCE_0_12),
        adapters,
        lambda: recommender_of_one_table(4),
        lambda: stacked_tables(1),
        pytest.param(lambda: stacked_tables(3), marks=NOT_SINCE_0_12),
        lambda: vocabulary(16_000),
        lambda: vocabulary(40_000),
        lambda: contrastive(diagonal=True),
        lambda: contrastive(diagonal=False),
    ],
    ids=[
        "relu",
        "relu6",
        "leaky",
        "gelu",
        "bessel",
        "odd",
        "attention",
        "few_tables",
        "tables",
        "adapters",
        "bags",
        "stacked",
        "stacked_bags",
        "words",
        "many_words",
        "diagonal",
        "gathered",
    ],
)
def test_the_compiler_agrees(build: Callable[[], tuple[Any, Any]], policy: str) -> None:
    compare(build, policy)


def compare(build: Callable[[], tuple[Any, Any]], policy: str) -> None:
    """Holds a prediction against the compiler."""
    loss, args = build()
    plan = remat.plan(loss, *args, remat_policy=Unchanged() if policy == "none" else policy)
    wrapped = remat.checkpoint(loss, remat_policy=plan)
    report = remat.compile_report(jax.grad(wrapped), *args, device="h200")
    assert plan.peak_bytes == pytest.approx(report.temp_bytes, rel=0.1)
