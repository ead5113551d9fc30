"""`remat.equinox` is a drop-in for `equinox.filter_checkpoint`; all doors take whole models of equinox."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
import remat.equinox
from remat.equinox import filter_checkpoint

X = jnp.linspace(-1, 1, 48).reshape(6, 8)
KEY = jax.random.key(3)


class Net(eqx.Module):
    """Two perceptrons with dropout: functions, floats, ints, flags and `None` as leaves."""

    layers: list[eqx.nn.MLP]
    dropout: eqx.nn.Dropout
    repeats: int
    scale: float
    name: str = "net"
    nothing: Any = None

    def __init__(self, rate: float = 0.5, scale: float = 0.7, inference: bool = False) -> None:
        keys = jax.random.split(jax.random.key(0), 2)
        self.layers = [eqx.nn.MLP(8, 8, 16, 2, activation=jax.nn.gelu, key=k) for k in keys]
        self.dropout = eqx.nn.Dropout(rate, inference=inference)
        self.repeats, self.scale = 2, scale

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Maps `[n, 8]` to `[n, 8]`; without a key only if nothing is dropped."""
        for _ in range(self.repeats):
            for layer in self.layers:
                x = self.dropout(jax.vmap(layer)(x), key=key) * self.scale
        return x


def loss(model: Any, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """A loss of a whole model."""
    return jnp.mean(model(x, key) ** 2)


def assert_same(got: Any, want: Any) -> None:
    """Compares the arrays of trees to rounding."""
    got, want = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (got, want))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


def gradient(f: Callable[..., Any], *args: Any) -> Any:
    """Of the model, compiled."""
    return eqx.filter_jit(eqx.filter_grad(f))(*args)


CASES = [(Net(), KEY), (Net(rate=0.0), None), (Net(rate=0), None), (Net(inference=True), None)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrap", [remat.checkpoint, filter_checkpoint])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_loss_of_a_whole_model(wrap: Callable[..., Any], case: int) -> None:
    model, key = CASES[case]
    want = gradient(eqx.filter_checkpoint(loss), model, X, key)
    assert_same(gradient(wrap(loss), model, X, key), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"remat_policy": "full"},
        {"remat_policy": "ilp", "budget": 0.9},
        {"policy": jax.checkpoint_policies.dots_saveable},
        {"remat_policy": "dots_saveable"},
        {"remat_policy": None},
        {"lowering": "policy"},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    model = Net()
    wrapped = filter_checkpoint(**options)(loss)
    assert_same(gradient(wrapped, model, X, KEY), gradient(loss, model, X, KEY))


def test_a_wrapped_module_is_a_module() -> None:
    """Wrappers inside of models are differentiated through, and structure and leaves are those of equinox."""
    model = Net()
    ours, theirs = (
        eqx.tree_at(lambda m: m.layers, model, [wrap(layer) for layer in model.layers])
        for wrap in (filter_checkpoint, eqx.filter_checkpoint)
    )
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(eqx.filter(ours, lambda _: True)))
    got, want = (gradient(loss, m, X, KEY) for m in (ours, theirs))
    assert_same([m.layers for m in (got,)], [m.layers for m in (want,)])
    again = eqx.tree_at(lambda m: m.layers, model, [filter_checkpoint(la) for la in model.layers])
    assert jax.tree.structure(again) == jax.tree.structure(ours)


def test_methods_and_modules_over_a_scan() -> None:
    class Block(eqx.Module):
        linear: eqx.nn.Linear

        @filter_checkpoint(remat_policy="full")
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(jax.vmap(self.linear)(x))

    make = eqx.filter_vmap(lambda key: Block(eqx.nn.Linear(8, 8, key=key)))
    stacked = make(jax.random.split(KEY, 3))

    def total(blocks: Any, x: jax.Array) -> jax.Array:
        arrays, rest = eqx.partition(blocks, eqx.is_array)
        step = lambda x, a: (eqx.combine(a, rest)(x), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, arrays)[0])

    def plain(blocks: Any, x: jax.Array) -> jax.Array:
        for i in range(3):
            linear = jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, blocks.linear)  # noqa: B023
            x = jnp.tanh(jax.vmap(linear)(x))
        return jnp.sum(x)

    assert_same(gradient(total, stacked, X), gradient(plain, stacked, X))


def test_semantics_are_those_of_equinox() -> None:
    """Numbers stay numbers in arguments and results; arrays of NumPy are traced."""

    def f(x: Any, n: int, rate: float, flag: bool, words: dict[str, Any]) -> Any:
        assert (type(n), type(rate), type(flag)) == (int, float, bool)
        assert isinstance(words["array"], jax.core.Tracer)
        return jnp.sum(x * jnp.ones((n,)) * words["array"]), n + 1, {"rate": rate, "f": jnp.tanh}

    args = (X, 8, 0.5, True, {"array": np.ones(8, np.float32), "name": "x"})
    got, want = filter_checkpoint(f)(*args), eqx.filter_checkpoint(f)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [type(x) for x in jax.tree.leaves(got)] == [type(x) for x in jax.tree.leaves(want)]
    assert got[1] == 9 and got[2]["f"] is jnp.tanh


def test_modules_of_one_structure_share_a_trace() -> None:
    traces: list[int] = []

    class Counting(eqx.Module):
        weight: jax.Array
        power: int

        def __call__(self, x: jax.Array) -> jax.Array:
            traces.append(1)
            return jnp.sum(jnp.sin(x @ self.weight) ** self.power)

    for scale in (1.0, 2.0):
        filter_checkpoint(Counting(scale * jnp.eye(8), 2))(X)
    assert len(traces) == 1
    filter_checkpoint(Counting(jnp.eye(8), 3))(X)
    assert len(traces) == 2


def test_plans_of_a_whole_model() -> None:
    model = Net()
    plan = remat.plan(loss, model, X, KEY, remat_policy="full")
    for wrap in (remat.checkpoint, filter_checkpoint):
        rematted = wrap(loss, remat_policy=plan)
        assert_same(gradient(rematted, model, X, KEY), gradient(loss, model, X, KEY))
    called = remat.plan(Net(rate=0.0), X)
    assert called.graph.gradients


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrap", [remat.checkpoint, filter_checkpoint])
def test_reports_and_fit_of_a_whole_step(wrap: Callable[..., Any]) -> None:
    model, x = Net(rate=0.0), jnp.ones((2048, 8))

    def step(policy: Any, model: Net, x: jax.Array) -> tuple[jax.Array, Any]:
        value, grads = eqx.filter_value_and_grad(wrap(loss, remat_policy=policy))(model, x, None)
        return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    temp = {
        policy: remat.compile_report(partial(step, policy), model, x).temp_bytes
        for policy in (None, "min_cut", "full")
    }
    assert temp["full"] < temp["min_cut"] < temp[None]
    fitted = remat.fit(
        partial(step, "min_cut"), model, x, memory="1GiB", remat_policy="min_cut", max_compiles=2
    )
    got_loss, got = fitted(model, x)
    want_loss, want = eqx.filter_jit(partial(step, None))(model, x)
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert_same(got, want)
    assert got.layers[0].activation is model.layers[0].activation
    fitted(got, x)
    with pytest.raises(remat.CompileError, match="compiled for other values"):
        fitted(Net(rate=0.0, scale=0.3), x)


def test_names_and_errors() -> None:
    assert filter_checkpoint(loss).__name__ == "loss"
    with pytest.raises(remat.PolicyError, match="did you mean 'min_cut'"):
        filter_checkpoint(loss, remat_policy="min_cat")
    with pytest.raises(remat.PolicyError, match="lowering"):
        filter_checkpoint(loss, lowering="stagd")
    assert remat.equinox.remat is filter_checkpoint
