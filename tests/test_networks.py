"""The networks that rematerialization is developed on: finite, in use throughout, and right under a policy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from models import cases, development

PACKAGES: dict[str, dict[str, Any]] = {
    "development": development.NETWORKS,
}
FACTORIES = [
    pytest.param(factory, id=f"{package}-{name}")
    for package, networks in PACKAGES.items()
    for name, factory in networks.items()
]


FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


def path_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def relative_error(actual: Any, expected: Any) -> float:
    """The largest difference, in units of the largest entry."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("factory", FACTORIES)
def test_small_network_has_same_gradients_with_and_without_remat(factory: Any) -> None:
    loss, shapes = factory(small=True)
    arguments = cases.materialize(shapes)
    value, gradients = jit(jax.value_and_grad(loss))(*arguments)
    assert value.shape == () and value.dtype == jnp.float32
    assert np.isfinite(value)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.all(np.isfinite(leaf)), path_name(path)
        assert np.any(leaf != 0), f"{path_name(path)} is idle"

    wrapped = remat.checkpoint(loss, remat_policy="min_cut")
    rematted = jit(jax.grad(wrapped))(*arguments)
    assert jax.tree.structure(rematted) == jax.tree.structure(gradients)
    is_bfloat16 = "bf16" in str(jax.make_jaxpr(loss)(*shapes))
    tolerance = 5e-2 if is_bfloat16 else 1e-4
    errors = jax.tree.map(relative_error, rematted, gradients)
    for path, error in jax.tree.leaves_with_path(errors):
        assert error <= tolerance, path_name(path)


@pytest.mark.sample(3)
@pytest.mark.parametrize("factory", FACTORIES)
def test_large_network_traces_to_a_scalar(factory: Any) -> None:
    loss, shapes = factory()
    assert jax.eval_shape(loss, *shapes) == jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize("package", PACKAGES)
def test_networks_are_named_after_their_functions(package: str) -> None:
    networks = PACKAGES[package]
    assert len(networks) == {"development": 17, "validation": 14}[package]
    assert {name: factory.__name__ for name, factory in networks.items()} == {
        n: n for n in networks
    }
