"""Layouts of what loops stack: what is asked for, where, and what the compiler makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from models.development.llama import llama_scan
from remat import compat

LAYERS, BATCH, GROUPS, HEADS, WIDTH = 4, 2, 4, 4, 64
INNER = GROUPS * HEADS * WIDTH
SHAPES = {"query": (INNER, INNER), "key": (INNER, GROUPS * WIDTH), "out": (INNER, INNER)}


def attention() -> Callable[[dict[str, jax.Array], jax.Array], jax.Array]:
    """Grouped queries: the scores have their heads last where they are made, and in front where they are read."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        batch, length, _ = x.shape
        query = (x @ w["query"]).reshape(batch, length, GROUPS, HEADS, WIDTH)
        key = (x @ w["key"]).reshape(batch, length, GROUPS, WIDTH)
        scores = jnp.einsum("bqkge,bske->bkgqs", query, key).astype(jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgqs,bske->bqkge", shares, key)
        return x + jnp.tanh(mixed.reshape(batch, length, -1) @ w["out"]), None

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    return loss


def arguments(length: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    def shape(*sizes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    weights = {name: shape(LAYERS, *sizes) for name, sizes in SHAPES.items()}
    return weights, shape(BATCH, length, INNER)


def gradient() -> Any:
    return jax.jit(jax.grad(remat.checkpoint(attention())))


def test_it_is_the_array_itself_in_every_transformation() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 4, 5))
    weights = jnp.arange(60.0).reshape(3, 4, 5)

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(weights * jnp.sin(compat.row_major(x)))

    expected = jax.grad(lambda x: jnp.sum(weights * jnp.sin(x)))(x)
    np.testing.assert_array_equal(compat.row_major(x), x)
    np.testing.assert_array_equal(jax.grad(f)(x), expected)
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(x), jax.jit(jax.grad(f))(x))
    np.testing.assert_allclose(jax.vmap(compat.row_major, 1, 1)(x), x)
    np.testing.assert_allclose(jax.jvp(f, (x,), (x,))[1], jnp.sum(expected * x), rtol=1e-5)
    assert jax.hessian(f)(x).shape == (3, 4, 5, 3, 4, 5)


def test_what_has_one_axis_or_none_and_keys_are_left_alone() -> None:
    for x in (jnp.ones(3), jnp.float32(1), jax.random.split(jax.random.key(0), (2, 2))):
        assert "row_major" not in str(jax.make_jaxpr(compat.row_major)(x))
    assert "row_major" in str(jax.make_jaxpr(compat.row_major)(jnp.ones((2, 3), int)))


@pytest.mark.parametrize("platform, is_said", [("cuda", True), ("cpu", False), ("tpu", False)])
def test_gpus_alone_are_told(platform: str, is_said: bool) -> None:
    lowered = gradient().trace(*arguments(8)).lower(lowering_platforms=(platform,))
    assert ("LayoutConstraint" in lowered.as_text()) == is_said


def test_exports_hold_none() -> None:
    sizes = jax.export.symbolic_shape("n", constraints=["n >= 4"])
    for length in (8, sizes[0]):
        exported = jax.export.export(gradient(), platforms=["cuda"])(*arguments(length))
        assert "LayoutConstraint" not in exported.mlir_module()


def test_over_several_devices_nothing_is_gathered() -> None:
    """On CPU devices, which are told as GPUs are: the partitioner is the same."""
    program = """
import re, jax, numpy as np
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from remat.compat import layouts
import test_layouts as t
mlir.register_lowering(layouts._row_major, layouts._lowering, platform="cpu")
weights, x = t.arguments(8)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
lowered = t.gradient().lower(weights, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
assert ("LayoutConstraint" in lowered.as_text()) == (jax.__version_info__ >= (0, 12))
assert "LayoutConstraint" in t.gradient().lower(weights, x).as_text()
print(len(re.findall("all-gather", lowered.compile().as_text())))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("policy", ["min_cut", "save_all", "low_memory", "full"])
def test_derivatives_are_those_of_the_function_where_integers_and_masks_are_stacked(
    policy: str,
) -> None:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            best = jax.lax.top_k(x, 3)[1]
            gate = jnp.take_along_axis(jnp.sin(x @ weight), best, 1)
            y = jnp.where(x > 0, jnp.tanh(x @ weight), 0.1) * jnp.sum(gate**2, 1, keepdims=True)
            return x + 0.1 * y, None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    args = (
        jax.random.normal(jax.random.key(0), (3, 6, 6)),
        jax.random.normal(jax.random.key(1), (8, 6)),
    )
    planned = remat.checkpoint(loss, remat_policy=policy)
    several = args[0], jnp.stack([args[1], -args[1]], 2)
    for transform, given in (
        (lambda f: jax.grad(f, (0, 1)), args),
        (lambda f: jax.jit(jax.hessian(f, 1)), args),
        (lambda f: lambda *args: jax.jvp(jax.grad(f), args, args), args),
        (lambda f: jax.vmap(jax.grad(f, 1), (None, 2), 2), several),
    ):
        found, expected = (jax.tree.leaves(transform(f)(*given)) for f in (planned, loss))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu_compile
def test_no_stack_is_copied_into_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for _ in _told_and_free(monkeypatch):
        loss, args = llama_scan()
        gradients = jax.grad(remat.checkpoint(loss))
        reports.append(remat.compile_report(gradients, *args, device="h200"))
    told, free = reports
    assert told.temp_bytes < 0.9 * free.temp_bytes  # the scores, as a stack and as its copy
    assert told.hbm_traffic_bytes < free.hbm_traffic_bytes


def _told_and_free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.setattr(compat, "row_major", lambda x: x)
    yield
