"""Results beside a loss that have no gradient, or a forward mode only: as in plain jax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat import TraceError
from remat.lower.split import inputs_with_gradient, split_planned
from remat.trace.program import program_of

X = jnp.arange(1.0, 5.0) / 3


def _loop(x: jax.Array) -> jax.Array:
    """Something without a reverse mode."""
    return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 0.5), (0, x))[1]


def _stopped_in_a_scan(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(c) + jax.lax.stop_gradient(_loop(c)), None

    return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])


def _scan_stopped(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(c) + _loop(c), None

    return jnp.sum(jax.lax.stop_gradient(jax.lax.scan(body, x, None, length=3)[0]) * x)


def _indices_of_a_scan(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(c) + _loop(c), jnp.argmax(c)

    return jnp.sum(x[jax.lax.scan(body, x, None, length=3)[1]] ** 2)


def _two_carries(x: jax.Array) -> jax.Array:
    def body(s: Any, _: None) -> tuple[Any, jax.Array]:
        a, b = s
        return (jnp.sin(a) * jax.lax.stop_gradient(b), _loop(b)), b

    (a, b), bs = jax.lax.scan(body, (x, x), None, length=3)
    return jnp.sum(a + jax.lax.stop_gradient(b)) + jnp.sum(x[jnp.argmax(bs, 1)] * a[0])


def _in_a_branch(x: jax.Array) -> jax.Array:
    y = jax.lax.cond(x.sum() > 0, _loop, jnp.cos, x)
    return jnp.sum(x[jnp.argmax(y)] ** 2) + jnp.sum(jax.lax.stop_gradient(y) * x)


def _in_a_call_in_nested_loops(x: jax.Array) -> jax.Array:
    def inner(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        n = jax.jit(_loop)(c)
        return n, jnp.sin(n)

    def outer(c: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        ys = jax.lax.scan(inner, c, None, length=2)[1]
        return jnp.tanh(c), ys

    c, ys = jax.vmap(lambda x: jax.lax.scan(outer, x, None, length=2))(x[None])
    return jnp.sum(c) + jnp.sum(jax.lax.stop_gradient(ys))


def _in_a_call_of_our_own(x: jax.Array) -> jax.Array:
    inner = remat.checkpoint(lambda x: (jnp.sin(x), _loop(x)), lowering="policy")

    def body(c: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        return inner(c)

    c, ys = jax.lax.scan(body, x, None, length=2)
    return jnp.sum(c * jax.lax.stop_gradient(ys).sum(0))


def _in_a_sharded_call(x: jax.Array) -> jax.Array:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    call = jax.jit(lambda x: (jnp.sin(x), _loop(x)), in_shardings=here, out_shardings=here)
    c, ys = jax.lax.scan(lambda c, _: call(c), x, None, length=2)
    return jnp.sum(c * jax.lax.stop_gradient(ys).sum(0))


def _with_a_rule(x: jax.Array) -> jax.Array:
    """A root, found by a loop and differentiated by a rule: that has a reverse mode."""

    def solve(_: Any, y: jax.Array) -> jax.Array:
        return y + _loop(y) * 0

    return jnp.sum(
        jax.lax.custom_root(lambda y: y - jnp.cos(x), x, solve, lambda g, y: y / g(jnp.ones(4)))
    )


LOSSES = (
    _stopped_in_a_scan,
    _scan_stopped,
    _indices_of_a_scan,
    _two_carries,
    _in_a_branch,
    _in_a_call_in_nested_loops,
    _in_a_call_of_our_own,
    _in_a_sharded_call,
    _with_a_rule,
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_loops_that_nothing_is_asked_of(loss: Callable[..., Any], jit: bool, lowering: str) -> None:
    for policy in ("min_cut", "full"):
        ours = jax.grad(remat.checkpoint(loss, remat_policy=policy, lowering=lowering))
        found = (jax.jit(ours) if jit else ours)(X)
        np.testing.assert_allclose(found, jax.grad(loss)(X), rtol=1e-5)


def _with_aux(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.sin(x) ** 2), _loop(jnp.cos(x))


def _with_stacked_aux(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(c: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return c + jnp.sin(y), _loop(y * c)

    c, ys = jax.lax.scan(body, x, jnp.stack([x, x]))
    return jnp.sum(c), ys


def _wrapped_in_a_loop(f: Callable[..., Any], x: jax.Array) -> jax.Array:
    def body(c: Any, _: None) -> tuple[Any, jax.Array]:
        value, aux = f(c[0])
        return (c[0] * value, aux), aux

    (c, _), auxs = jax.lax.scan(body, (x, x), None, length=2)
    return jnp.sum(c) + jax.lax.stop_gradient(auxs).sum()


@pytest.mark.parametrize("lowering", ["staged", "policy"])
def test_results_beside_the_loss_may_have_no_reverse_mode(lowering: str) -> None:
    for loss in (_with_aux, _with_stacked_aux):
        ours = remat.checkpoint(loss, lowering=lowering)
        found, expected = (jax.grad(f, has_aux=True)(X) for f in (ours, loss))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(lambda x, f=ours: jnp.sum(f(x)[1]))(X)
    ours = remat.checkpoint(_with_aux, lowering=lowering)
    found, expected = (
        jax.grad(lambda x, f=f: _wrapped_in_a_loop(f, x))(X) for f in (ours, _with_aux)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("lowering", ["staged", "policy"])
def test_functions_without_a_gradient(lowering: str) -> None:
    def stops(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.stop_gradient(jnp.sin(x)))

    def constant(x: jax.Array) -> jax.Array:
        return jnp.ones(x.shape).sum()

    for function in (stops, constant, _loop):
        with pytest.raises(TraceError, match="has a gradient"):
            remat.plan(function, X, lowering=lowering)
        ours = remat.checkpoint(function, lowering=lowering)
        np.testing.assert_allclose(jax.jit(ours)(X), function(X), rtol=1e-6)
    for function in (stops, constant):
        ours = remat.checkpoint(function, lowering=lowering)
        np.testing.assert_array_equal(jax.grad(ours)(X), 0 * X)
    with pytest.raises(TraceError, match="argnums"):
        remat.plan(lambda x, y: jnp.sum(y) * stops(x), X, X, lowering=lowering)


def test_what_is_split_off() -> None:
    def function(x: jax.Array, y: jax.Array, z: jax.Array, i: jax.Array) -> Any:
        jax.debug.print("{}", z)
        unread = _loop(z) * x
        return jnp.sin(x)[i], unread, i + 1, jnp.argmax(unread), jax.lax.stop_gradient(y) * x

    program = program_of(jax.make_jaxpr(function)(X, X, X, jnp.array([0, 1])))
    planned, aside = split_planned(program)
    assert [program.outputs.index(v) for v in planned.outputs] == [0, 3, 4]
    assert [program.outputs.index(v) for v in aside.outputs] == [1, 2]
    assert inputs_with_gradient(planned) == (True, False, False, False)
    names = [[e.source.primitive.name for e in part.equations] for part in (planned, aside)]
    assert "debug_callback" in names[0] or "debug_print" in names[0]
    assert not any(name.startswith("debug") for name in names[1])
    assert "while" in names[0] and "while" in names[1]  # argmax reads it too


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize(
    "beside", [lambda n: n + 1, lambda n: jnp.arange(3)], ids=["count", "constant"]
)
def test_what_is_split_off_needs_nothing_of_what_has_effects(beside: Any, lowering: Any) -> None:
    """Batch normalization over devices: a mean of what another mean was taken from, beside a counter."""

    def block(x: jax.Array, n: int) -> Any:
        centred = x - jax.lax.pmean(x, "i")
        variance = jax.lax.pmean(centred**2, "i")
        return centred / jnp.sqrt(variance + 1), beside(n)

    def loss(x: jax.Array, wrap: Callable[..., Any]) -> Any:
        y, aside = jax.vmap(wrap(block), axis_name="i", in_axes=(0, None), out_axes=(0, None))(x, 0)
        return jnp.sum(y**3), aside

    x = jnp.arange(4.0) ** 2
    (found, count), (expected, same) = (
        jax.grad(lambda x, w=wrap: loss(x, w), has_aux=True)(x)
        for wrap in (partial(remat.checkpoint, lowering=lowering), lambda f: f)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(count, same)
