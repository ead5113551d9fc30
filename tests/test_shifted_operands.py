"""What batched matmuls read of other matmuls' results and biases is made once, as an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import graphs, laws

import remat
from remat.core.graph import Graph
from remat.plans.schedule import build_schedule, no_remat_saved
from remat.plans.simulate import simulate
from remat.plans.stages import MATMULS_SHIFT_OPERANDS, shifted_operands
from remat.plans.steps import Schedule
from remat.policies import Unchanged

Array = jax.Array
Params = dict[str, Any]
Heads = Callable[[Params, Array, int], tuple[Array, Array, Array]]


def separate(params: Params, x: Array, heads: int) -> tuple[Array, Array, Array]:
    q, k, v = (x @ params[n] + params[f"{n}_bias"] for n in ("q", "k", "v"))
    return tuple(a.reshape(*x.shape[:2], heads, -1) for a in (q, k, v))


def by_heads(params: Params, x: Array, heads: int) -> tuple[Array, Array, Array]:
    def project(name: str) -> Array:
        kernel = params[name].reshape(x.shape[-1], heads, -1)
        return jnp.einsum("btd,dhe->bthe", x, kernel) + params[f"{name}_bias"].reshape(heads, -1)

    return project("q"), project("k"), project("v")


def in_one(params: Params, x: Array, heads: int) -> tuple[Array, Array, Array]:
    """One product for all; keys and values are the same slice."""
    sums = (x @ params["q"] + params["q_bias"]).reshape(*x.shape[:2], heads, 2, -1)
    return sums[..., 0, :], sums[..., 1, :], sums[..., 1, :]


def repeated(params: Params, x: Array, heads: int) -> tuple[Array, Array, Array]:
    """Grouped queries: all queries share the key and value of one head."""
    q, k, v = separate(params, x, heads)
    return q, jnp.repeat(k[:, :, :1], heads, 2), jnp.repeat(v[:, :, :1], heads, 2)


def with_features(params: Params, x: Array, heads: int) -> tuple[Array, Array, Array]:
    q, k, v = separate(params, x, heads)
    return (jax.nn.elu(q) + 1).astype(jnp.bfloat16), k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)


def without_bias(params: Params, x: Array, heads: int) -> tuple[Array, Array, Array]:
    return separate(params | {f"{n}_bias": 0.5 for n in ("q", "k", "v")}, x, heads)


SHIFTED: dict[Heads, int] = {
    separate: 3,
    by_heads: 3,
    repeated: 3,
    with_features: 2,  # `elu` selects between two arrays: queries are another kernel's
    in_one: 0,  # only slices are read
    without_bias: 0,
}


def network(make: Heads, heads: int) -> Callable[[list[Params], Array], Array]:
    def loss(stack: list[Params], x: Array) -> Array:
        for params in stack:
            q, k, v = make(params, x, heads)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            y = mixed.reshape(*x.shape[:2], -1).astype(x.dtype)
            y = y @ params["out"][: y.shape[-1]] + params["out_bias"]
            x = x + jnp.tanh(y)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def shapes(layers: int, batch: int, length: int, width: int, dtype: Any = jnp.float32) -> Any:
    params = {n: jax.ShapeDtypeStruct((width, width), dtype) for n in ("q", "k", "v", "out")}
    params |= {f"{n}_bias": jax.ShapeDtypeStruct((width,), dtype) for n in ("q", "k", "v", "out")}
    return [params] * layers, jax.ShapeDtypeStruct((batch, length, width), dtype)


@pytest.fixture(autouse=True, scope="module")
def _as_of_the_newest_release() -> Iterator[None]:
    """Only there are barriers placed; they are right in any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat.plans.schedule.MATMULS_SHIFT_OPERANDS", True)
        yield


def ties(schedule: Schedule) -> list[int]:
    """What has a barrier of its own, in the order of the steps."""
    alone = (step.values for step in schedule.steps if step.action == "barrier")
    return [values[0] for values in alone if len(values) == 1]


@given(
    data=st.data(),
    make=st.sampled_from(list(SHIFTED)),
    layers=st.integers(1, 3),
    heads=st.sampled_from([2, 4]),
)
@laws()
def test_sums_with_a_bias_are_tied_wherever_they_are_made(
    data: st.DataObject, make: Heads, layers: int, heads: int
) -> None:
    loss, args = network(make, heads), shapes(layers, 2, 8, 64)
    graph = remat.plan(loss, *args, remat_policy="full").graph
    operands = {value for values in shifted_operands(graph).values() for value in values}
    assert len(operands) == SHIFTED[make] * layers
    for value in operands:
        entry = graph.values[value]
        assert entry.shape[:2] == (2, 8) and entry.producer is not None
        assert graph.ops[entry.producer].phase == "forward"
    saved = data.draw(st.sets(st.sampled_from(no_remat_saved(graph))))
    schedule = build_schedule(graph, saved)
    made = [
        value
        for step in schedule.steps
        if step.action == "compute"
        for value in graph.ops[step.target].outputs
        if value in operands
    ]
    # What ties nothing else is the program as it is.
    is_plain = all(step.action != "barrier" for step in schedule.backward)
    assert ties(schedule) == ([] if is_plain else made) and operands <= {*made}
    simulate(graph, schedule)


@given(graph=graphs())
@laws()
def test_schedules_of_any_graph_replay(graph: Graph) -> None:
    """Also of one whose matmuls do not say what they sum over."""
    assert not shifted_operands(graph)
    simulate(graph, build_schedule(graph, no_remat_saved(graph)))


@pytest.mark.parametrize("make", list(SHIFTED))
def test_without_rematerialization_the_program_is_as_it_is(make: Heads) -> None:
    plan = remat.plan(network(make, 4), *shapes(2, 2, 8, 64), remat_policy=Unchanged())
    assert all(step.action != "barrier" for step in plan.schedule.steps)


def test_what_else_matmuls_read_is_not_tied() -> None:
    def perceptron(x: Array, w: Array, b: Array) -> Array:
        return jnp.sum(jax.nn.gelu(x @ w + b) @ w.T)

    def softmax(q: Array, k: Array, v: Array) -> Array:
        return jnp.sum(jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v)

    def one_batch(x: Array, w: Array, b: Array) -> Array:
        y = x @ w + b
        return jnp.sum(jnp.einsum("btd,bsd->bts", y, jnp.sin(y)))

    def normalised(x: Array, w: Array, b: Array) -> Array:
        y = (x - jnp.mean(x, -1, keepdims=True)) + b
        return jnp.sum(jnp.einsum("btd,bsd->bts", y, y @ w))

    matrix, rows = (
        jax.ShapeDtypeStruct((4, 8, 16), jnp.float32),
        jax.ShapeDtypeStruct((16,), jnp.float32),
    )
    weights = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    for loss, args in (
        (perceptron, (matrix, weights, rows)),
        (softmax, (matrix, matrix, matrix)),
        (one_batch, (matrix, weights, rows)),
        (normalised, (matrix, weights, rows)),
    ):
        graph = remat.plan(loss, *args, remat_policy="full").graph
        assert any(op.contracts for op in graph.ops)
        assert not shifted_operands(graph)


def test_in_a_loop_nothing_is_tied() -> None:
    block = network(separate, 2)

    def loss(stack: Params, x: Array) -> Array:
        def body(x: Array, params: Params) -> tuple[Array, None]:
            return x + block([params], x), None

        return jnp.sum(jax.lax.scan(body, x, stack)[0])

    (params,), x = shapes(1, 2, 8, 64)
    stack = {n: jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for n, a in params.items()}
    plan = remat.plan(loss, stack, x, remat_policy="min_cut")
    assert plan.loops and not ties(plan.schedule)
    assert not any(ties(body.plan.schedule) for body in plan.loops)


@pytest.mark.parametrize("make", [separate, repeated])
@pytest.mark.parametrize("policy", ["min_cut", "full"])
def test_gradients_are_those_of_jax(make: Heads, policy: str) -> None:
    stack, x = shapes(1, 2, 8, 64)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    stack, x = jax.tree.map(
        lambda a: jax.random.normal(next(keys), a.shape, a.dtype) / a.shape[-1] ** 0.5, (stack, x)
    )
    plain = network(make, 4)

    def vector(stack: list[Params], x: Array) -> Array:
        """No loss: where the gradient of one takes nothing less, its plan is none."""
        return plain(stack, x)[None]

    assert ties(remat.plan(vector, stack, x, remat_policy=policy).schedule)
    wrapped = remat.checkpoint(vector, remat_policy=policy)

    def planned(stack: list[Params], x: Array) -> Array:
        return wrapped(stack, x)[0]

    def gradients(loss: Any) -> Any:
        mapped = jax.vmap(loss, (None, 0))
        second = jax.grad(lambda x: jnp.sum(jax.grad(loss, 1)(stack, x) ** 2))
        return jax.jit(
            lambda: (
                jax.grad(loss, (0, 1))(stack, x),
                jax.grad(lambda s: jnp.sum(mapped(s, x[None] * 2)))(stack),
                second(x),
            )
        )()

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6),
        gradients(planned),
        gradients(plain),
    )


@pytest.mark.gpu_compile
@pytest.mark.skipif(not MATMULS_SHIFT_OPERANDS, reason="XLA adds biases where it writes the sum")
def test_no_bias_is_written_as_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for is_tied in (False, True):
        monkeypatch.setattr("remat.plans.schedule.MATMULS_SHIFT_OPERANDS", is_tied)
        loss = remat.checkpoint(network(separate, 12), remat_policy="min_cut")
        args = shapes(3, 4, 256, 768)
        reports.append(remat.compile_report(jax.grad(loss), *args, device="h200"))
    left, tied = (
        [k for k in report.kernels if "broadcast" in k.name and k.operand_bytes == 768 * 4]
        for report in reports
    )
    assert left and not tied
    assert reports[1].temp_bytes < reports[0].temp_bytes
    assert reports[1].hbm_traffic_bytes < reports[0].hbm_traffic_bytes
