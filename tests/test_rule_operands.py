"""What rules of derivatives are handed: arrays of jax, also for what a program has as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import remat

X = jax.random.normal(jax.random.key(0), (6, 8))


@jax.custom_vjp
def weighted(x: jax.Array, weights: jax.Array) -> jax.Array:
    return x * weights


def _weighted_back(weights: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    found = weights.at[0].set(5.0)  # of arrays of jax
    weights *= 2.0  # a new array: it would change one of NumPy
    return cotangent * (found + weights), None


weighted.defvjp(lambda x, weights: (weighted(x, weights), weights), _weighted_back)
WEIGHTS = np.arange(1.0, 9.0, dtype=np.float32)


def in_a_loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (weighted(jnp.sin(x), WEIGHTS / 8), None), x, None, length=3)[
        0
    ]


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: weighted(jnp.sin(x), jnp.array([1, 2, 3, 4, 5, 6, 7, 8], jnp.float32)),
        lambda x: weighted(jnp.sin(x), WEIGHTS),
        lambda x: weighted(jnp.sin(x), jnp.ones(8)) * WEIGHTS,
        in_a_loop,
        lambda x: odeint(lambda y, t, p: -y * p, x[0], jnp.array([0.0, 0.5, 1.0]), x[1]),
    ],
    ids=["literal", "NumPy", "made", "loop", "odeint"],
)
def test_rules_are_handed_arrays_of_jax(function: Callable[[Any], Any], lowering: str) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(function(x) ** 2)

    wrapped = remat.checkpoint(loss, lowering=lowering)
    value, gradient = jax.value_and_grad(jax.jit(loss))(X)  # else a rule is handed arrays of NumPy
    for transform in (lambda f: f, jax.jit):
        for _ in range(2):
            ours, found = transform(jax.value_and_grad(wrapped))(X)
            np.testing.assert_allclose(ours, value, rtol=1e-5)
            np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-5)
