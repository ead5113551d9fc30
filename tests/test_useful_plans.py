"""The default takes no more than no plan at all: where its cut would, something else takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

import remat
from remat.memory.execution import Execution, Prediction
from remat.policies import LowMemory, MinCut, Policy, Unchanged

predict_module = import_module("remat.memory.predict")  # the package has a function of this name
WIDTH = 64
Layer = Callable[[jax.Array, jax.Array], jax.Array]


def _shifted(u: jax.Array) -> jax.Array:
    return sum(jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1)) - 4 * u


LAYERS: dict[str, Layer] = {
    "residual": lambda u, w: u + jnp.tanh(u @ w),
    "dense": lambda u, w: jax.nn.gelu(u @ w),
    "gated": lambda u, w: u + (jax.nn.silu(u @ w) * (u @ w.T)) @ w,
    "normed": lambda u, w: u + (u - u.mean(-1, keepdims=True)) * jax.lax.rsqrt(u.var(-1) + 1)[:, None] @ w,
    "attention": lambda u, w: u + jax.nn.softmax((u @ w) @ u.T) @ u,
    "heat": lambda u, w: u + 0.001 * u * _shifted(u),
    "reaction": lambda u, w: u + 0.1 * jnp.sin(u) * jnp.roll(u, 1, 0) - 0.01 * u**3,
    "scaled": lambda u, w: u * jnp.exp(-u) * w.mean(),
}  # fmt: skip


def program(names: Sequence[str], weighted: bool) -> Callable[..., jax.Array]:
    """A loss of layers, each with its weight; the first argument is differentiated: the weights or the input."""

    def of_input(u: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        for name, weight in zip(names, weights, strict=True):
            u = LAYERS[name](u, weight) + weight.mean()
        return jnp.mean(u**2)

    return (lambda weights, u: of_input(u, weights)) if weighted else of_input


def arguments(count: int, weighted: bool, rows: int = 256) -> tuple[object, object]:
    u = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * count
    return (weights, u) if weighted else (u, weights)


def planned(loss: Callable[..., jax.Array], policy: Policy, *args: object) -> remat.Plan:
    return remat.plan(loss, *args, remat_policy=policy)


@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=8), weighted=st.booleans()
)
@laws(30)
def test_the_default_takes_no_more_than_no_plan(names: list[str], weighted: bool) -> None:
    loss, args = program(names, weighted), arguments(len(names), weighted)
    for policy in (MinCut(), LowMemory()):
        plan = planned(loss, policy, *args)
        assert plan.peak_bytes <= 1.001 * plan.baseline_peak_bytes
        assert plan.policy_name == policy.name


@pytest.mark.parametrize("name", ["heat", "reaction"])
@pytest.mark.parametrize("policy", [MinCut(), LowMemory()])
def test_a_long_chain_is_repeated_in_segments(name: str, policy: MinCut) -> None:
    loss, args = program([name] * 40, weighted=False), arguments(40, weighted=False, rows=4096)
    plan = planned(loss, policy, *args)
    assert plan.peak_bytes < 0.5 * plan.baseline_peak_bytes
    assert any(note.startswith("as sublinear: ") for note in plan.notes)


def test_a_published_cut_is_what_was_published() -> None:
    loss, args = program(["heat"] * 40, weighted=False), arguments(40, weighted=False)
    plan = planned(loss, MinCut.paper(), *args)
    assert plan.saved_bytes <= 4 * 40  # a number of each step
    assert plan.peak_bytes >= 0.999 * plan.baseline_peak_bytes


def test_a_block_keeps_as_little_as_the_cut_does() -> None:
    """What comes behind it is not known: what it keeps waits for that."""

    def block(u: jax.Array) -> jax.Array:
        for _ in range(40):
            u = u + 0.1 * _shifted(u)
        return u

    plan = planned(block, MinCut(), jax.ShapeDtypeStruct((256, WIDTH), jnp.float32))
    assert plan.saved_bytes == 0


def test_a_gradient_of_the_input_alone_may_need_no_plan() -> None:
    """Of a gate all is kept but what the last layer makes, which the cut would make of all others again."""
    loss, args = program(["gated"] * 6, weighted=False), arguments(6, weighted=False, rows=4096)
    plan = planned(loss, MinCut(), *args)
    assert plan.peak_bytes <= 1.001 * plan.baseline_peak_bytes
    plain = planned(loss, Unchanged(), *args)
    assert plan.peak_bytes <= plain.peak_bytes


@pytest.mark.parametrize("name", ["heat", "gated", "residual"])
def test_gradients_are_those_of_the_plain_program(name: str) -> None:
    count = 24 if name == "heat" else 6
    loss = program([name] * count, weighted=False)
    keys = jax.random.split(jax.random.key(0), count + 1)
    u = jax.random.normal(keys[0], (32, WIDTH))
    weights = [0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[1:]]
    wrapped = remat.checkpoint(loss)
    for made, plain in zip(
        jax.tree.leaves(jax.value_and_grad(wrapped, argnums=(0, 1))(u, weights)),
        jax.tree.leaves(jax.value_and_grad(loss, argnums=(0, 1))(u, weights)),
        strict=True,
    ):
        assert jnp.allclose(made, plain, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(plain))))


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("name", "count", "share"), [("heat", 20, 0.5), ("reaction", 40, 0.5), ("gated", 6, 1.001)]
)
def test_the_compiled_program_takes_less_too(name: str, count: int, share: float) -> None:
    """With the loss computed besides, as it is trained; without it XLA need not run the first forward pass."""
    loss, args = (
        program([name] * count, weighted=False),
        arguments(count, weighted=False, rows=4096),
    )
    plain, ours = (
        remat.compile_report(jax.value_and_grad(f), *args, device="h200").temp_bytes
        for f in (loss, remat.checkpoint(loss))
    )
    assert ours <= share * plain


def test_nothing_is_predicted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held against other plans was predicted when it was made."""
    found: list[tuple[int, tuple[tuple[str, int], ...]]] = []
    graphs: list[object] = []  # alive, so that no two are the same object
    predicted = predict_module._predict

    def noting(execution: Execution) -> Prediction:
        graphs.append(execution.graph)
        steps = tuple((node.name, node.step) for node in execution.nodes)
        found.append((id(execution.graph), steps))
        return predicted(execution)

    monkeypatch.setattr(predict_module, "_predict", noting)
    loss = program(["heat"] * 4, weighted=False)
    planned(loss, MinCut(), *arguments(4, weighted=False))
    assert len(found) >= 3  # of the cut, of no plan, of segments
    assert len(set(found)) == len(found)
