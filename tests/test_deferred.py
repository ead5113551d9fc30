"""Policy lowering under every transform: planned when it is differentiated, and not before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat.compat.deferred import call_deferred

_Function = Callable[..., Any]

BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4)), "float32")


def _clipped(x: jax.Array) -> jax.Array:
    rule = jax.custom_vjp(lambda a: a * 1.5)
    rule.defvjp(lambda a: (a * 1.5, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
    return jnp.sum(jnp.sin(rule(x)))


def _branches(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = jax.lax.cond(c.sum() > 0, jnp.sin, lambda c: jax.lax.stop_gradient(c) * c, c)
        return c, None

    return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])


def _collective(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jax.lax.psum(jnp.cos(x), "batch") * x))


def _random(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.random.normal(jax.random.key(0), x.shape) * jnp.sin(x) ** 2)


def _nested(x: jax.Array) -> jax.Array:
    inner = remat.checkpoint(_clipped, lowering="policy")
    return jnp.sum(jax.vmap(inner)(jnp.cos(x)) * x[0])


def _mapped(f: _Function) -> _Function:
    return jax.vmap(f, axis_name="batch")


def _total(f: _Function) -> _Function:
    return lambda x: jnp.sum(_mapped(f)(x))


def _in_loop(f: _Function) -> _Function:
    def total(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return c + _mapped(f)(x * c[:, None, None]), None

        return jnp.sum(jax.lax.scan(body, jnp.ones(3), None, length=2)[0])

    return total


TRANSFORMS: dict[str, Callable[[_Function], _Function]] = {
    "grad-vmap": lambda f: jax.grad(_total(f)),
    "vmap-grad": lambda f: _mapped(jax.grad(f)),
    "grad-vmap-jit": lambda f: jax.grad(_total(jax.jit(f))),
    "jit-grad-vmap": lambda f: jax.jit(jax.grad(_total(f))),
    "grad-scan-vmap": lambda f: jax.grad(_in_loop(f)),
    "grad-checkpoint-vmap": lambda f: jax.grad(jax.checkpoint(_total(f))),
    "vmap": _mapped,
    "vmap-vmap": lambda f: lambda x: jax.vmap(_mapped(f), in_axes=1)(jnp.stack([x, -x], 1)),
    "grad-vmap-vmap": lambda f: jax.grad(
        lambda x: jnp.sum(jax.vmap(_mapped(f))(jnp.stack([x, -x])))
    ),
    "jit-vmap": lambda f: jax.jit(_mapped(f)),
    "jvp-vmap": lambda f: lambda x: jax.jvp(_mapped(f), (x,), (jnp.cos(x),)),
    "grad-grad-vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(_total(f))(x) ** 2)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", [_clipped, _branches, _collective, _random, _nested])
def test_composes_with_every_transform(function: _Function, transform: str) -> None:
    if transform == "jvp-vmap" and function in (_clipped, _nested):
        pytest.skip("a custom_vjp has no forward mode")
    apply = TRANSFORMS[transform]
    ours = remat.checkpoint(function, lowering="policy")
    found, expected = apply(ours)(BATCH), apply(function)(BATCH)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)


def test_planned_when_differentiated_and_not_before() -> None:
    calls: list[tuple[int, ...]] = []

    def planned(x: jax.Array) -> list[jax.Array]:
        calls.append(x.shape)
        return [jnp.sin(x)]

    def function(x: jax.Array) -> jax.Array:
        return call_deferred(lambda x: [jnp.sin(x)], planned, [x])[0].sum()

    def loop(x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, row: (c + function(row), None), 0.0, x)[0]

    for run in (function, jax.jit(function), jax.vmap(function), jax.jit(jax.vmap(function)), loop):
        np.testing.assert_allclose(jnp.sum(run(BATCH)), jnp.sin(BATCH).sum(), rtol=1e-5)
    jax.eval_shape(function, BATCH)
    assert not calls
    np.testing.assert_allclose(jax.grad(jax.jit(loop))(BATCH), jnp.cos(BATCH), rtol=1e-6)
    assert set(calls) == {BATCH.shape[1:]}


def test_results_without_a_tangent_and_arguments_without_one() -> None:
    def function(x: jax.Array, i: jax.Array, key: jax.Array) -> Any:
        y = jnp.sin(x) * jax.random.normal(key, x.shape)
        return jnp.sum(y[i]), (jnp.argsort(y, axis=None), key)

    def batched(f: _Function) -> Any:
        def total(x: jax.Array, *rest: Any) -> Any:
            losses, aux = jax.vmap(f, (0, None, 0))(x, *rest)
            return losses.sum(), aux

        keys = jax.random.split(jax.random.key(1), 3)
        return jax.value_and_grad(total, has_aux=True)(BATCH, jnp.array([2, 0, 2]), keys)

    found, expected = batched(remat.checkpoint(function, lowering="policy")), batched(function)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(plain.dtype, jax.dtypes.prng_key):
            ours, plain = jax.random.key_data(ours), jax.random.key_data(plain)
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_prints_once(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x: jax.Array) -> jax.Array:
        y = jnp.sin(x)
        jax.debug.print("seen {}", y.shape[0])
        return jnp.sum(y**2)

    ours = remat.checkpoint(function, lowering="policy")
    for run in (ours, jax.jit(ours), jax.grad(ours), jax.jit(jax.grad(ours))):
        run(BATCH)
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen 3") == 1


def test_what_is_linear_is_transposed() -> None:
    matrix = jnp.arange(12.0).reshape(4, 3)

    def linear(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ w, 2 * x

    ours = remat.checkpoint(linear, lowering="policy")
    x, given = jnp.ones((2, 4)), (jnp.ones((2, 3)), jnp.ones((2, 4)))
    (expected,) = jax.linear_transpose(lambda x: linear(x, matrix), x)(given)
    (found,) = jax.linear_transpose(jax.jit(lambda x: ours(x, matrix)), x)(given)
    assert jnp.array_equal(found, expected)
