"""The Flax doors: `remat.linen.remat` and `remat.nnx.remat` are drop-ins, state and randomness included."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import remat
import remat.linen
import remat.nnx
from models import cases, gpt, lstm, resnet

# Half the compile time, and nothing here depends on how well XLA optimises.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
POLICIES = ["min_cut", "full", "save_all", "names", "dots_saveable"]


def assert_close(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Compares pytrees to float32 rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def assert_bits(got: Any, want: Any) -> None:
    """Compares pytrees bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_signatures_begin_with_flaxs() -> None:
    ours = list(inspect.signature(remat.linen.remat).parameters)
    theirs = list(inspect.signature(nn.remat).parameters)
    assert ours[: len(theirs)] == theirs
    assert set(inspect.signature(nnx.remat).parameters) <= set(
        inspect.signature(remat.nnx.remat).parameters
    )


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_gpt_blocks_are_bit_equal_operator_by_operator(scan: bool) -> None:
    config = dataclasses.replace(gpt.GPT_TINY, scan_layers=scan, layers=2, width=32, context=16)
    plain, shapes = gpt.gpt_loss(config, batch=2)
    args = cases.materialize(shapes, 0)
    with jax.disable_jit():
        want = jax.value_and_grad(plain)(*args)
        for policy in ("min_cut", "full"):
            ours, _ = gpt.gpt_loss(dataclasses.replace(config, remat_policy=policy), batch=2)
            assert_bits(jax.value_and_grad(ours)(*args), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["min_cut", "dots_saveable"])
@pytest.mark.parametrize("scan", [False, True])
def test_gpt_blocks_compiled(policy: str, scan: bool) -> None:
    config = dataclasses.replace(gpt.GPT_TINY, scan_layers=scan, width=32, context=16)
    plain, shapes = gpt.gpt_loss(config, batch=2)
    args = cases.materialize(shapes, 0)
    ours, _ = gpt.gpt_loss(dataclasses.replace(config, remat_policy=policy), batch=2)
    assert_close(jit(jax.value_and_grad(ours))(*args), jit(jax.value_and_grad(plain))(*args))


@pytest.mark.slow
def test_bfloat16_gpt_blocks() -> None:
    config = dataclasses.replace(gpt.GPT_TINY, width=32, context=16, dtype=jnp.bfloat16)
    plain, shapes = gpt.gpt_loss(config, batch=2)
    args = cases.materialize(shapes, 0)
    with jax.disable_jit():
        want = jax.value_and_grad(plain)(*args)
        ours, _ = gpt.gpt_loss(dataclasses.replace(config, remat_policy="min_cut"), batch=2)
        assert_bits(jax.value_and_grad(ours)(*args), want)


@pytest.mark.slow
def test_batch_statistics_and_gradients_of_resnet() -> None:
    policy, config = "min_cut", resnet.RESNET18_SMALL
    plain, shapes = resnet.resnet_loss(config, 2, 16)
    args = cases.materialize(shapes, 0)
    ours, _ = resnet.resnet_loss(dataclasses.replace(config, remat_policy=policy), 2, 16)
    want = jit(jax.value_and_grad(plain, has_aux=True))(*args)
    got = jit(jax.value_and_grad(ours, has_aux=True))(*args)
    assert_close(got, want, rtol=1e-3, atol=1e-5)
    whole = remat.checkpoint(plain, remat_policy=policy)
    got = jit(jax.value_and_grad(whole, has_aux=True))(*args)
    assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_lstm_language_model() -> None:
    plain, shapes = lstm.lstm_loss(lstm.LSTM_SMALL, batch=2, length=8)
    args = cases.materialize(shapes, 0)
    want = jit(jax.value_and_grad(plain))(*args)
    ours, _ = lstm.lstm_loss(
        dataclasses.replace(lstm.LSTM_SMALL, remat_policy="min_cut"), batch=2, length=8
    )
    assert_close(jit(jax.value_and_grad(ours))(*args), want)
    whole = remat.checkpoint(plain)
    assert_close(jit(jax.value_and_grad(whole))(*args), want)


class Named(nn.Module):
    """A module with a static argument, another method and a mutable counter."""

    @nn.compact
    def __call__(self, x: jax.Array, double: bool) -> jax.Array:
        """Maps `[n, 4]` to `[n, 4]` and counts its calls."""
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        x = jnp.tanh(nn.Dense(4, name="dense")(x))
        return 2 * x if double else x


def test_static_arguments_and_mutable_collections() -> None:
    x = jnp.linspace(-1, 1, 12).reshape(3, 4)
    plain, ours = Named(), remat.linen.remat(Named, static_argnums=(2,))()
    variables = plain.init(jax.random.key(0), x, True)
    assert jax.tree.structure(ours.init(jax.random.key(0), x, True)) == jax.tree.structure(
        variables
    )

    def loss(model: nn.Module) -> Callable[..., Any]:
        def run(params: Any) -> Any:
            out, state = model.apply({**variables, "params": params}, x, True, mutable=["counters"])
            return jnp.sum(jnp.asarray(out) ** 2), state

        return run

    want = jax.value_and_grad(loss(plain), has_aux=True)(variables["params"])
    got = jax.value_and_grad(loss(ours), has_aux=True)(variables["params"])
    assert_close(got, want)
    assert int(got[0][1]["counters"]["calls"]) == 2


def test_function_of_a_module_and_methods() -> None:
    class Twice(nn.Module):
        def setup(self) -> None:
            self.dense = nn.Dense(4)

        def encode(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(self.dense(x))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.encode(self.encode(x))

    x = jnp.ones((2, 4))
    plain, ours = Twice(), remat.linen.remat(Twice, methods=["encode"])()
    params = plain.init(jax.random.key(0), x)

    def loss(model: nn.Module) -> Callable[..., Any]:
        return lambda p: jnp.sum(jnp.asarray(model.apply(p, x)))

    assert_close(jax.grad(loss(ours))(params), jax.grad(loss(plain))(params))


def test_linen_errors() -> None:
    with pytest.raises(remat.PolicyError, match="did you mean 'min_cut'"):
        remat.linen.remat(Named, remat_policy="min_cat")
    with pytest.raises(remat.TraceError, match="concrete"):
        remat.linen.remat(Named, concrete=True)


class NnxBlock(nnx.Module):
    """Dense, batch norm, dropout: parameters, statistics and a random counter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # Batch norm cancels a bias before it: its gradient is zero, and what is computed for it is rounding alone.
        self.dense = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[n, 8]` to `[n, 8]`."""
        return self.drop(checkpoint_name(jnp.tanh(self.norm(self.dense(x))), "hidden"))


def _nnx_steps(wrap: Callable[..., Any]) -> Any:
    # Of rows on one line batch norm would leave nothing but rounding.
    block, x = NnxBlock(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 8))
    run = wrap(lambda block, x, scale: block(x) * scale)

    @nnx.jit
    def step(block: NnxBlock, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda b: run(b, x, 2.0).sum())(block)

    results = [step(block, x) for _ in range(3)]
    state = nnx.state(block)
    leaves = jax.tree.leaves((results, state))
    return [
        jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for v in leaves
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_nnx_modules_with_statistics_and_dropout(policy: str) -> None:
    want = _nnx_steps(lambda f: f)
    assert_close(_nnx_steps(remat.nnx.remat(remat_policy=policy)), want)


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_a_checkpointed_loss_would_lose_of_nnx_modules_is_an_error(
    deterministic: bool,
) -> None:
    block, x = NnxBlock(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 8))
    if deterministic:
        block.eval()

    def loss(block: NnxBlock, x: Any) -> Any:
        return jnp.sum(block(x) ** 2)

    step = nnx.value_and_grad(remat.checkpoint(loss))
    if deterministic:
        assert_close(step(block, x), nnx.value_and_grad(loss)(block, x))
    else:
        with pytest.raises(remat.TraceError, match=r"wrap it with remat\.nnx\.remat"):
            step(block, x)


def test_nnx_keyword_arguments_and_errors() -> None:
    block, x = NnxBlock(nnx.Rngs(0)), jnp.ones((2, 8))
    run = remat.nnx.remat(lambda block, x: block(x))
    np.testing.assert_array_equal(
        run(NnxBlock(nnx.Rngs(0)), x=x), (lambda b: b(x))(NnxBlock(nnx.Rngs(0)))
    )
    with pytest.raises(remat.TraceError, match=r"the class 'NnxBlock'.*NnxBlock.__call__"):
        remat.nnx.remat(NnxBlock)
    with pytest.raises(remat.TraceError, match="bound method"):
        remat.nnx.remat(block.__call__)
    with pytest.raises(remat.TraceError, match="graph mode"):
        remat.nnx.remat(lambda b: b, graph=False)
    with pytest.raises(remat.PolicyError, match="Valid names"):
        remat.nnx.remat(lambda b: b, remat_policy="nope")
