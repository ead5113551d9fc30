"""The networks of `models.validation`: sound in themselves, and the same gradients under a policy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from models.cases import materialize
from models.validation import NETWORKS

NAMES = sorted(NETWORKS)
BFLOAT16 = ("conformer", "t5")


def spread(leaf: Any) -> Any:
    """Five times as far from 0 or 1: with weights of 0.02, gradients of deep layers are rounding."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    values = np.asarray(leaf)
    centre = np.round(np.mean(values))
    return jnp.asarray(centre + 5 * (values - centre), leaf.dtype)


@functools.cache
def small_case(name: str) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """The small loss, arguments for it, and its value and gradient by plain jax."""
    loss, shapes = NETWORKS[name](small=True)
    args = jax.tree.map(spread, materialize(shapes))
    value, gradient = jax.jit(jax.value_and_grad(loss))(*args)
    return loss, args, value, gradient


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_finite_and_no_parameter_idle(name: str) -> None:
    """Loss and gradient are finite numbers, and the loss depends on every parameter."""
    _, _, value, gradient = small_case(name)
    assert value.shape == ()
    assert np.isfinite(value)
    for path, leaf in jax.tree.leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)
        assert np.any(np.asarray(leaf) != 0), jax.tree_util.keystr(path)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_under_a_policy(name: str) -> None:
    """`min_cut` changes what is kept, not the gradient."""
    loss, args, _, expected = small_case(name)
    actual = jax.jit(jax.grad(remat.checkpoint(loss, remat_policy="min_cut")))(*args)
    tolerance = 5e-2 if name in BFLOAT16 else 1e-4
    for (path, want), got in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        largest = float(np.max(np.abs(want)))
        np.testing.assert_allclose(
            got, want, rtol=0, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("name", NAMES)
def test_full_size_traces(name: str) -> None:
    """The networks of full size have a scalar loss, and as many arguments as the small ones."""
    loss, shapes = NETWORKS[name]()
    value = jax.eval_shape(loss, *shapes)
    assert value.shape == () and value.dtype == jnp.float32
    _, small = NETWORKS[name](small=True)
    assert len(small) == len(shapes)
