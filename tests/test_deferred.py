"""Calls under every transform: planned when they are differentiated, for what is differentiated, and not before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import remat
from remat.compat.deferred import Rule, call_deferred
from remat.core.errors import DifferentiationError

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


def _interpolated(x: jax.Array) -> jax.Array:
    return jnp.sum(
        jnp.interp(jnp.sin(x), jnp.linspace(-1.0, 1.0, 9), jnp.linspace(0.0, 2.0, 9) ** 2)
    )


def _found(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.cos(x) * jnp.searchsorted(jnp.linspace(-1.0, 1.0, 5), x.ravel()).sum())


def _exponential(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.scipy.linalg.expm(x / 8) ** 2)


def _root(x: jax.Array) -> jax.Array:
    def solve(f: _Function, start: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 30, lambda _, z: z - f(z) / 2, start)

    return jnp.sum(
        jax.lax.custom_root(
            lambda z: z + jnp.sin(z) / 2 - x, x, solve, lambda g, y: y / g(jnp.ones_like(y))
        )
    )


UNDIFFERENTIATED: dict[str, Callable[[_Function], _Function]] = {
    "eager": lambda f: lambda x: f(x[0]),
    "jit": lambda f: lambda x: jax.jit(f)(x[0]),
    "vmap": jax.vmap,
    "jit-vmap": lambda f: jax.jit(jax.vmap(f)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, row: (c + f(row), None), 0.0, x)[0],
    "jit-grad": lambda f: lambda x: jax.jit(jax.grad(f))(x[0]),
    "grad-jit": lambda f: lambda x: jax.grad(jax.jit(f))(x[0]),
    "vmap-grad": lambda f: jax.vmap(jax.grad(f)),
}


@pytest.mark.parametrize("transform", UNDIFFERENTIATED)
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("function", [_interpolated, _found, _exponential, _root])
def test_operators_that_jax_takes_apart_at_the_end(
    function: _Function, lowering: str, transform: str
) -> None:
    """Of jax 0.12 these are operators of a higher level, whose lower one a call has to have, too."""
    apply = UNDIFFERENTIATED[transform]
    ours = remat.checkpoint(function, lowering=lowering)
    np.testing.assert_allclose(apply(ours)(BATCH), apply(function)(BATCH), rtol=1e-5, atol=1e-5)


def test_planned_when_differentiated_and_not_before() -> None:
    calls: list[tuple[int, ...]] = []

    def planned(x: jax.Array) -> list[jax.Array]:
        calls.append(x.shape)
        return [jnp.sin(x)]

    def function(x: jax.Array) -> jax.Array:
        return call_deferred(lambda x: [jnp.sin(x)], Rule(lambda _: planned), [x])[0].sum()

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


def _layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sin(x * w) * w)


def _target(f: _Function, w: jax.Array, x: jax.Array) -> jax.Array:
    """What learns to agree with a copy of itself that is held still."""
    return jnp.mean((f(w, x) - f(jax.lax.stop_gradient(w), f(w, x))) ** 2)


def _adversary(f: _Function, w: jax.Array, x: jax.Array) -> jax.Array:
    """One function whose weights are held still, then its argument, then neither."""
    still = jax.lax.stop_gradient(w)
    made = f(still, w * x)
    return jnp.sum(f(w, jax.lax.stop_gradient(made)) - f(still, made) * f(w, x))


def _scanned(f: _Function) -> _Function:
    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (f(w, c) + x, None), x, None, length=3)[0]

    return run


RECORDED: dict[str, Callable[[_Function], _Function]] = {
    "jit": jax.jit,
    "jit-jit": lambda f: jax.jit(jax.jit(f)),
    "jit-vmap": lambda f: jax.jit(jax.vmap(f)),
    "jit-scan": lambda f: jax.jit(_scanned(f)),
    "checkpoint-jit": lambda f: jax.checkpoint(jax.jit(f)),
    "jaxpr": lambda f: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(BATCH[0], BATCH[0])),
    "as it is": lambda f: f,
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("policy", ["min_cut", "full", "save_all", "gist"])
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("record", RECORDED)
@pytest.mark.parametrize("loss", [_target, _adversary])
def test_one_call_is_differentiated_in_several_ways(
    loss: Callable[..., jax.Array], record: str, lowering: Any, policy: str
) -> None:
    """jax records a call once, and differentiates what it recorded with respect to other arguments each time."""

    def gradients(function: _Function) -> Any:
        recorded = RECORDED[record](function)

        def total(w: jax.Array, x: jax.Array) -> jax.Array:
            one = recorded if record != "jaxpr" else lambda *args: recorded(*args)[0]
            return loss(one, w, x)

        both = jax.grad(total, (0, 1))
        return both(*BATCH[:2]), jax.jit(both)(*BATCH[:2]), jax.grad(total)(*BATCH[1:])

    ours = remat.checkpoint(_layer, remat_policy=policy, lowering=lowering)
    found, expected = gradients(ours), gradients(_layer)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def _undifferentiable(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((), x.dtype), x)


def _raising(x: jax.Array) -> jax.Array:
    def refuse(*_: Any) -> Any:
        raise AssertionError("differentiated")

    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(refuse, refuse)
    return rule(x)


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("blocked", [_undifferentiable, _raising, jnp.floor])
def test_what_is_not_differentiated_needs_no_derivative(blocked: _Function, lowering: Any) -> None:
    def function(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x) * blocked(scale))

    ours = remat.checkpoint(function, lowering=lowering)
    scale = jnp.float32(2.5)
    expected = jax.grad(function)(BATCH, scale)
    np.testing.assert_allclose(jax.grad(ours)(BATCH, scale), expected, rtol=1e-6)
    closed = jax.jit(
        lambda s: jax.grad(remat.checkpoint(lambda x: function(x, s), lowering=lowering))(BATCH)
    )
    np.testing.assert_allclose(closed(scale), expected, rtol=1e-6)


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad, lambda f: jax.grad(jax.jit(f))])
def test_checks_are_those_of_the_function(
    wrap: Callable[[_Function], _Function], lowering: Any
) -> None:
    def function(x: jax.Array) -> jax.Array:
        checkify.check(jnp.sum(x) > 0, "not positive")
        return jnp.sum(jnp.log(x))

    for errors in (checkify.user_checks, checkify.float_checks):
        found, expected = (
            checkify.checkify(wrap(f), errors=errors)(-BATCH)[0].get()
            for f in (remat.checkpoint(function, lowering=lowering), function)
        )
        assert expected is not None
        assert found is not None
        assert found.split(".")[0] == expected.split(".")[0]


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("policy", ["min_cut", "full"])
def test_gradients_of_numbers_are_as_weakly_typed_as_in_jax(policy: str, lowering: Any) -> None:
    ours = remat.checkpoint(jnp.sin, remat_policy=policy, lowering=lowering)
    for number in (3.0, jnp.float32(3.0)):
        found, expected = (jax.typeof(jax.grad(f)(number)) for f in (ours, jnp.sin))
        assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)


def _regularised(w: jax.Array, x: jax.Array) -> Any:
    """The second result is the same for all examples: no mapped argument has a part in it."""
    return jnp.sum(jnp.tanh(jnp.sin(x @ w) * x)), jnp.sum(w**3)


def _balanced(w: jax.Array, x: jax.Array) -> Any:
    """So it is here, by a mean over the examples."""
    y = jnp.tanh(x @ w)
    return jnp.sum(y**2), jax.lax.pmean(jnp.sum(jnp.sin(y), axis=0), "batch")


def _normalised(w: jax.Array, x: jax.Array) -> Any:
    """Statistics of all examples, which each of them is divided by, too."""
    y = jnp.sin(x @ w)
    variance = jax.lax.pmean(jnp.mean(y**2), "batch")
    return jnp.sum(jnp.cos(y / jnp.sqrt(variance + 1))), 0.9 * variance + 0.1 * jnp.sum(w)


def _over_examples(f: _Function, out: Any = (0, None)) -> _Function:
    return jax.vmap(f, (None, 0), out, axis_name="batch")


SHARED: dict[str, Callable[[_Function], _Function]] = {
    "vmap": _over_examples,
    "jit-vmap": lambda f: jax.jit(_over_examples(f)),
    "vmap-jit": lambda f: _over_examples(jax.jit(f)),
    "spread": lambda f: _over_examples(f, 0),
    "vmap-vmap": lambda f: lambda w, x: jax.vmap(_over_examples(f), (None, 1))(w, x),
    "scan-vmap": lambda f: (
        lambda w, x: jax.lax.scan(
            lambda c, _: (c + 1, _over_examples(f)(w * c, x)), 1.0, None, length=2
        )[1]
    ),
    "vmap-scan": lambda f: _over_examples(
        lambda w, x: jax.tree.map(
            jnp.sum, jax.lax.scan(lambda c, _: (c + 1, f(w * c, x)), 1.0, None, length=2)[1]
        )
    ),
    "vmap-cond": lambda f: _over_examples(
        lambda w, x: jax.lax.cond(w[0, 0] < 9, f, lambda w, x: f(2 * w, x), w, x)
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("policy", ["min_cut", "full", "save_all", "gist", "revolve"])
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("transform", SHARED)
@pytest.mark.parametrize("function", [_regularised, _balanced, _normalised])
def test_results_that_all_examples_share(
    function: _Function, transform: str, lowering: Any, policy: str
) -> None:
    """jax.custom_vjp counts their cotangents once per example (0.10), or gives an error (0.12)."""
    apply, w = SHARED[transform], BATCH[0] / 3

    def gradients(f: _Function) -> Any:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return sum(jnp.sum(jnp.sin(r)) for r in jax.tree.leaves(apply(f)(w, x)))

        return jax.value_and_grad(loss, (0, 1))(w, BATCH)

    ours = remat.checkpoint(function, remat_policy=policy, lowering=lowering)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
        gradients(ours),
        gradients(function),
    )
    assert jax.tree.map(jnp.shape, apply(ours)(w, BATCH)) == jax.tree.map(
        jnp.shape, apply(function)(w, BATCH)
    )


def test_random_keys_stay_shared() -> None:
    """What `rbg` draws depends on whether the key is the same for all examples."""
    key = jax.random.key(0, impl="rbg")

    def function(w: jax.Array, x: jax.Array) -> Any:
        return jnp.sum(x * w), jax.random.fold_in(key, jnp.sum(w).astype("int32"))

    def drawn(f: _Function) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            y, key = f(BATCH[0], x)
            return y * jax.random.normal(key)

        return jnp.stack([jax.vmap(one)(BATCH), jax.jit(jax.vmap(jax.jit(one)))(BATCH)])

    for lowering in ("staged", "policy"):
        ours = remat.checkpoint(function, lowering=lowering)
        np.testing.assert_allclose(drawn(ours), drawn(function), rtol=1e-5)


def test_a_batched_program_is_planned_as_a_whole() -> None:
    """Its budget is that of all examples, and no gradient of a shared weight is made for each of them."""
    ours = remat.checkpoint(_regularised, remat_policy="full")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(_over_examples(ours)(w, x)[0])

    w, x = jnp.ones((4, 4)), jnp.ones((7, 6, 4))
    assert "7,4,4" not in str(jax.make_jaxpr(jax.grad(loss))(w, x))
    each = remat.plan(_regularised, w, x[0], remat_policy="min_cut")
    ours = remat.checkpoint(_regularised, budget=7 * each.peak_bytes, confirm=False)
    jax.grad(loss)(w, x)
    ours = remat.checkpoint(_regularised, budget=each.peak_bytes, confirm=False)
    with pytest.raises(remat.BudgetError):
        jax.grad(loss)(w, x)


def test_a_plan_of_one_example_says_so() -> None:
    x = BATCH[0]
    plan = remat.plan(_regularised, x, x, remat_policy="full")
    ours = remat.checkpoint(_regularised, remat_policy=plan)

    def loss(f: _Function, place: int) -> _Function:
        return lambda w: jnp.sum(_over_examples(f)(w, BATCH)[place])

    with pytest.raises(DifferentiationError, match="the same for all examples"):
        jax.grad(loss(ours, 1))(x)
    own = remat.checkpoint(lambda w, x: jnp.sum(jnp.sin(x @ w)), remat_policy="full")
    plan = remat.plan(lambda w, x: jnp.sum(jnp.sin(x @ w)), x, x, remat_policy="full")
    planned = remat.checkpoint(lambda w, x: jnp.sum(jnp.sin(x @ w)), remat_policy=plan)
    totals = [
        jax.grad(lambda w, f=f: jnp.sum(jax.vmap(f, (None, 0))(w, BATCH)))(x)
        for f in (own, planned)
    ]
    np.testing.assert_allclose(*totals, rtol=1e-5)
