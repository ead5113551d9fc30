"""Functions of shapes that are not known yet: `jax.export` with a symbolic batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import remat
from remat.core.errors import BudgetError

W = jax.random.normal(jax.random.key(0), (8, 8)) / 3


def _network(w: jax.Array, x: jax.Array) -> jax.Array:
    h = x
    for _ in range(3):
        h = jax.nn.relu(h @ w)
        h = h + jnp.sin(h)
    h = jax.nn.softmax(h)
    h = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.8, h.shape), h, 0)
    h = jnp.concatenate([h, h.max(0, keepdims=True), jnp.sort(h, axis=0)])
    return jnp.mean(h**2)


def _loop(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(h: jax.Array, row: jax.Array) -> Any:
        h = jnp.tanh(h @ w + row)
        return jnp.where(h > 0.1, h, jnp.sin(h)), h.sum()

    h, sums = jax.lax.scan(step, x, x)
    return h.sum() + sums.sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("policy", ["min_cut", "full", "echo", "revolve"])
@pytest.mark.parametrize("function", [_network, _loop], ids=["network", "loop"])
def test_exported_gradients(function: Callable[..., Any], policy: str, lowering: str) -> None:
    (batch,) = export.symbolic_shape("batch")
    rematted = remat.checkpoint(function, remat_policy=policy, lowering=lowering)
    exported = export.export(jax.jit(jax.grad(rematted)))(
        jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((batch, 8), jnp.float32)
    )
    for size in (1, 5):
        x = jax.random.normal(jax.random.key(size), (size, 8))
        expected = jax.grad(function)(W, x)
        np.testing.assert_allclose(exported.call(W, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["ilp", "min_cut"])
def test_a_budget_of_unknown_bytes_is_refused(policy: str) -> None:
    (batch,) = export.symbolic_shape("batch")
    gradient = jax.jit(jax.grad(remat.checkpoint(_network, remat_policy=policy, budget=0.9)))
    with pytest.raises(BudgetError, match="symbolic dimensions"):
        export.export(gradient)(
            jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((batch, 8), jnp.float32)
        )
