"""Functions with derivative rules of their own, differentiated twice: the second time, too, by their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat.core.errors import DifferentiationError

X = jax.random.normal(jax.random.key(0), (6, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3


@jax.custom_jvp
def other(x: jax.Array) -> jax.Array:
    """Its derivative is not that of what it computes."""
    return jnp.exp(jnp.tanh(x))


other.defjvp(lambda p, t: (other(*p), t[0] * jnp.cos(p[0])))


@jax.custom_jvp
def through(x: jax.Array) -> jax.Array:
    """A straight-through estimator: nothing is computed that could be differentiated."""
    return jnp.round(x)


through.defjvp(lambda p, t: (through(*p), t[0]))


@jax.custom_jvp
def scaled(x: jax.Array) -> jax.Array:
    """The result is the operand itself."""
    return x


scaled.defjvp(lambda p, t: (scaled(*p), 3 * t[0]))


@jax.custom_vjp
def damped(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


damped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))


@jax.custom_jvp
def pair(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two results that are one value, and an operand that neither is made of."""
    made = jnp.sin(x)
    return made, made


@pair.defjvp
def _pair(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    return pair(x, y), (dx * y + dy, 2 * dx - dy)


def both(x: jax.Array) -> jax.Array:
    first, second = pair(x, jnp.cos(x))
    return first * second


def inner(x: jax.Array) -> jax.Array:
    """A rule inside of a rule: the outer one holds."""
    return nested(x) * x


@jax.custom_jvp
def nested(x: jax.Array) -> jax.Array:
    return 2 * other(x)


nested.defjvp(lambda p, t: (nested(*p), t[0] * p[0] ** 2))


@jax.custom_jvp
def hosted(x: jax.Array) -> jax.Array:
    """Its inside cannot be differentiated, so that the rule has to hold for second derivatives, too."""
    return jax.pure_callback(np.tanh, 2 * x, 2 * x, vmap_method="broadcast_all") + 1


hosted.defjvp(lambda p, t: (hosted(*p), 2 * t[0] * (1 - (hosted(*p) - 1) ** 2)))


@jax.custom_vjp
def hosted_backwards(x: jax.Array) -> jax.Array:
    return hosted(x) * 2


hosted_backwards.defvjp(
    lambda x: (hosted_backwards(x), x), lambda x, g: (4 * g * (1 - jnp.tanh(2 * x) ** 2),)
)

FUNCTIONS = {
    "other": other,
    "on the host": lambda x: hosted(jnp.sin(x)) * x,
    "custom_vjp on the host": lambda x: hosted_backwards(jnp.sin(x)) * x,
    "straight through": lambda x: through(3 * x) * x,
    "identity": lambda x: scaled(x) * jnp.sin(x),
    "custom_vjp": damped,
    "two results": both,
    "nested": inner,
    "relu at zero": lambda x: jax.nn.relu(x - x[:1]) + jax.nn.relu6(x),
    "softmax": lambda x: jax.nn.softmax(3 * x, axis=-1),
    "sinc": lambda x: jnp.sinc(x - x[:1]),
}


def _layers(function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = function(x @ w)
        return jnp.sum(jnp.sin(x))

    return loss


def _scanned(function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x, kept = jax.lax.scan(lambda c, _: (function(c @ w), jnp.sum(c)), x, None, length=2)
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.sin(kept))

    return loss


def _twice(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def slope(w: jax.Array, x: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1))(w, x))

    return jax.grad(slope, (0, 1))


def _of_the_other(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """What is not differentiated at first has a rule, too."""
    return jax.grad(lambda w, x: jnp.sum(jnp.sin(jax.grad(loss, 1)(w, x))))


# jax itself loses a `custom_jvp` rule where the gradient of a loop is differentiated: compared are those that say
# what differentiation would say.
IN_LOOPS = ("custom_vjp", "relu at zero", "softmax", "sinc")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.sample(4)
@pytest.mark.parametrize("derivative", [_twice, _of_the_other])
@pytest.mark.parametrize(
    ("make", "name"), [(_layers, n) for n in FUNCTIONS] + [(_scanned, n) for n in IN_LOOPS]
)
def test_second_derivatives_are_those_of_plain_jax(
    make: Callable[..., Any], name: str, derivative: Callable[..., Any]
) -> None:
    loss = make(FUNCTIONS[name])
    args = tuple(jnp.asarray(np.asarray(a), jnp.float64) for a in (W, X))
    expected = jax.jit(derivative(loss))(*args)
    for policy in ("full", "min_cut", "save_all", "sublinear"):
        step = derivative(remat.checkpoint(loss, remat_policy=policy))
        for run in (step, jax.jit(step)):
            for a, b in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_nothing_of_a_rule_is_left_in_a_compiled_gradient() -> None:
    """What rules read is made, traced and thrown away."""

    def kernels(function: Callable[[jax.Array], jax.Array]) -> int:
        step = jax.grad(remat.checkpoint(_layers(function), remat_policy="save_all"))
        text = jax.jit(step).lower(W, X).compile().as_text()
        return text.count(" dot(") + text.count(" cosine(") + text.count(" sine(")

    @jax.custom_jvp
    def ruled(x: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.sin(x)

    ruled.defjvp(lambda p, t: (ruled(*p), t[0] * jnp.cos(p[0])))
    assert kernels(lambda x: ruled(x, jnp.cos(x @ x.T) @ x)) == kernels(jnp.sin)


def test_a_rule_whose_operand_is_not_there_refuses() -> None:
    """The plan keeps what lies inside of a call, and makes the call's result again from it."""

    @jax.custom_jvp
    def inside(x: jax.Array) -> jax.Array:
        return jnp.tanh(checkpoint_name(x[:, :1] * 2, "small")) * jnp.ones((1, 8), x.dtype)

    inside.defjvp(lambda p, t: (inside(*p), t[0] * jnp.cos(p[0][:, :1])))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(inside(jnp.cos(x) @ w)) ** 2)

    wrapped = remat.checkpoint(loss, remat_policy=remat.policies.Names(("small",)))
    np.testing.assert_allclose(jax.grad(wrapped)(W, X), jax.grad(loss)(W, X), rtol=1e-5, atol=1e-6)
    for policy in ("full", "min_cut", remat.policies.Names(("small",))):
        step = _twice(remat.checkpoint(loss, remat_policy=policy))
        try:
            found = step(W, X)
        except DifferentiationError as error:
            assert "lowering='policy'" in str(error)
        else:
            for a, b in zip(found, _twice(loss)(W, X), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


_CONSTANTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "zeros": jnp.zeros_like,
    "halves": lambda x: jnp.full_like(x, 0.5),
    "range": lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape),
    "cast": lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype),
}


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("policy", ["min_cut", "full", "gist", "revolve"])
@pytest.mark.parametrize("constant", _CONSTANTS)
def test_a_rule_may_hand_on_what_depends_on_nothing(
    constant: str, policy: str, lowering: Any
) -> None:
    """The constant is added to gradients that are computed, first and last."""
    rule = jax.custom_vjp(lambda x, s: x * s)
    rule.defvjp(lambda x, s: (x * s, s), lambda s, g: (g * s, _CONSTANTS[constant](s)))

    def loss(x: jax.Array) -> jax.Array:
        shared = jnp.sin(x)
        return jnp.sum(rule(jnp.tanh(x), x) + rule(x * x, shared) + rule(shared, x) * shared)

    x = jnp.linspace(-2.0, 3.0, 12)
    ours = remat.checkpoint(loss, remat_policy=policy, lowering=lowering)
    for run in (lambda f: f, jax.jit):
        np.testing.assert_allclose(run(jax.grad(ours))(x), jax.grad(loss)(x), rtol=1e-5)
