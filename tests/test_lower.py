"""Gradients of the lowered function equal plain JAX's, under every transform the lowering supports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import remat
from remat.policies import Full, MinCut, Names, SaveAll
from tests import programs

KEY = jax.random.key(0)
POLICIES = [
    pytest.param(MinCut(), id="min_cut"),
    pytest.param(MinCut.paper(), id="min_cut_paper"),
    pytest.param(MinCut(heavy="roofline", random="cheap"), id="min_cut_roofline"),
    pytest.param(Full(), id="full"),
    pytest.param(SaveAll(), id="save_all"),
    pytest.param(Names(), id="names"),
]
LOWERINGS = ["staged", "policy"]


def dropout_net(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    """Two layers with relu, dropout, a norm and a residual: `x` is `[8, 16]`, `w` is `[16, 16]`."""
    h = checkpoint_name(jax.nn.relu(x @ w), "relu")
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0.0)
    h = (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1e-3)
    return jnp.sum(jnp.tanh(h @ w + x) ** 2)


def arrays() -> tuple[jax.Array, jax.Array]:
    """Deterministic arguments of `dropout_net`."""
    a, b = jax.random.split(jax.random.key(1))
    return jax.random.normal(a, (8, 16)), jax.random.normal(b, (16, 16)) / 4


def assert_equal(got: Any, want: Any, *, exact: bool = True) -> None:
    """Compares pytrees leaf by leaf, bit for bit or to float32 rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if exact:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            atol = 2e-6
            if jax.default_backend() != "cpu":
                # A GPU adds in another order: large terms that cancel leave their own rounding.
                largest = float(np.max(np.abs(b), initial=0.0))
                atol = max(atol, float(np.finfo(np.float32).eps) * largest)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=atol)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_bit_equal_operator_by_operator(policy: Any, lowering: str) -> None:
    """Run one by one, the operators are the same: so are the bits, dropout included."""
    args = (*arrays(), KEY)
    with jax.disable_jit():
        want = jax.value_and_grad(dropout_net, (0, 1))(*args)
        ours = remat.checkpoint(dropout_net, remat_policy=policy, lowering=lowering)
        assert_equal(jax.value_and_grad(ours, (0, 1))(*args), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_agree_compiled(policy: Any, lowering: str) -> None:
    """Compiled, XLA may fuse differently: equal to float32 rounding."""
    args = (*arrays(), KEY)
    want = jax.jit(jax.value_and_grad(dropout_net, (0, 1)))(*args)
    ours = remat.checkpoint(dropout_net, remat_policy=policy, lowering=lowering)
    assert_equal(jax.jit(jax.value_and_grad(ours, (0, 1)))(*args), want, exact=False)
    assert_equal(jax.value_and_grad(ours, (0, 1))(*args), want, exact=False)


def _linearize(f: Callable[..., Any]) -> Callable[..., Any]:
    def both(x: jax.Array, w: jax.Array, key: jax.Array) -> Any:
        value, pullback = jax.vjp(lambda x, w: f(x, w, key), x, w)
        return value, pullback(2.0 * value)

    return both


def _jit_inside(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda x, w, key: jax.jit(f)(jnp.sin(x), w, key) * 3, (0, 1))


TRANSFORMS = {
    **programs.TRANSFORMS,
    "vjp": _linearize,
    "jit inside": _jit_inside,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str, lowering: str) -> None:
    make, args = TRANSFORMS[transform], (*arrays(), KEY)
    want = jax.jit(make(dropout_net))(*args)
    ours = remat.checkpoint(dropout_net, lowering=lowering)
    got = jax.jit(make(ours))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-4)


def test_policy_lowering_supports_forward_mode() -> None:
    x, w = arrays()
    ours = remat.checkpoint(dropout_net, lowering="policy")
    want = jax.jvp(lambda x: dropout_net(x, w, KEY), (x,), (x,))
    assert_equal(jax.jvp(lambda x: ours(x, w, KEY), (x,), (x,)), want, exact=False)


def test_staged_lowering_refuses_forward_mode_with_advice() -> None:
    x, w = arrays()
    ours = remat.checkpoint(dropout_net)
    with pytest.raises(remat.DifferentiationError, match="lowering='policy'"):
        jax.jvp(lambda x: ours(x, w, KEY), (x,), (x,))


def _steps(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda t, j: jax.lax.scan(lambda c, _: (c + f(t, j), None), 0.0, None, length=2)[0]


@pytest.mark.parametrize("policy", ["save_all", "min_cut"])
@pytest.mark.parametrize("around", [lambda f: f, _steps])
def test_a_numpy_array_that_is_filled_anew(policy: str, around: Callable[..., Any]) -> None:
    """Its elements say in how few bits an index can be kept, and are in what was compiled."""
    t, j = jnp.linspace(0.5, 2, 16), jnp.arange(64)
    scale, offset, rates = np.ones(64, np.int32), np.array(0.5), np.full(3, 2.0, np.float32)

    def function(t: jax.Array, j: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(t)[(j & 3) * scale] * t[0]) + jnp.sum(t[:3] ** rates) * offset

    function = around(function)
    ours = remat.checkpoint(function, remat_policy=policy)
    for filled in (1, 5, float("nan"), 2):
        if filled == filled:
            scale[:] = filled
        offset[...] = filled
        rates[:] = filled
        expected = jax.value_and_grad(function)(t, j)
        for run in (jax.value_and_grad(ours), jax.jit(lambda *a: jax.value_and_grad(ours)(*a))):
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-5), run(t, j), expected
            )


def test_closed_over_tracers_get_gradients() -> None:
    x, w = arrays()

    def loss(w: jax.Array, wrap: Callable[..., Any]) -> jax.Array:
        inner = wrap(lambda x: dropout_net(x, jnp.sin(w), KEY))
        return inner(x)

    want = jax.jit(jax.grad(lambda w: loss(w, lambda f: f)))(w)
    assert_equal(jax.jit(jax.grad(lambda w: loss(w, remat.checkpoint)))(w), want, exact=False)
    assert_equal(jax.grad(lambda w: loss(w, remat.checkpoint))(w), want, exact=False)


def test_old_style_keys_integers_and_aux_outputs() -> None:
    def f(params: dict[str, jax.Array], labels: jax.Array, key: jax.Array) -> Any:
        h = params["w"][labels]
        keep = jax.random.bernoulli(key, 0.7, h.shape)
        h = jnp.where(keep, h, 0)
        return (h**3).sum(), {"count": keep.sum(), "mean": h.mean(), "labels": labels}

    args = ({"w": jnp.arange(12.0).reshape(4, 3)}, jnp.array([0, 2, 2]), jax.random.PRNGKey(3))
    want = jax.jit(jax.value_and_grad(f, has_aux=True))(*args)
    got = jax.jit(jax.value_and_grad(remat.checkpoint(f), has_aux=True))(*args)
    assert_equal(got, want)


def test_custom_rules_are_kept() -> None:
    @jax.custom_vjp
    def clip_gradient(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    clip_gradient.defvjp(
        lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),)
    )

    @jax.custom_jvp
    def fake_gradient(x: jax.Array) -> jax.Array:
        return x * x

    fake_gradient.defjvp(lambda p, t: (fake_gradient(p[0]), 7.0 * t[0]))

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(clip_gradient(fake_gradient(jnp.tanh(x)) * x))

    x = jnp.linspace(-2, 2, 16)
    want = jax.jit(jax.grad(f))(x)
    for policy in (MinCut(), Full()):
        for lowering in LOWERINGS:
            g = remat.checkpoint(f, remat_policy=policy, lowering=lowering)
            assert_equal(jax.jit(jax.grad(g))(x), want, exact=False)


def control_flow(x: jax.Array, w: jax.Array) -> jax.Array:
    """`cond`, `while_loop` (not differentiated), nested `scan` and a user's checkpoint in one function."""
    x = jax.lax.cond(x.sum() > 0, lambda v: jnp.tanh(v @ w), lambda v: v * 2, x)
    n = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, jnp.int32(0))

    def inner(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        c = checkpoint_name(jnp.sin(c @ w), "inner")
        return c, c.mean()

    def outer(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        c, ys = jax.lax.scan(inner, c, None, length=2)
        return jax.checkpoint(lambda v: jax.nn.relu(v @ w) + v)(c), ys.sum()

    x, ys = jax.lax.scan(outer, x, None, length=3, reverse=True)
    x = jax.lax.fori_loop(0, 2, lambda i, v: v * jnp.cos(v), x)
    return jnp.sum(x) * n + ys.sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize("nested", ["take_over", "respect"])
@pytest.mark.parametrize("policy", POLICIES)
def test_control_flow(policy: Any, nested: str) -> None:
    args = arrays()
    want = jax.jit(jax.value_and_grad(control_flow, (0, 1)))(*args)
    ours = remat.checkpoint(control_flow, remat_policy=policy, nested_checkpoints=nested)
    assert_equal(jax.jit(jax.value_and_grad(ours, (0, 1)))(*args), want, exact=False)


def test_shard_map_inside_and_outside() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def shard(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.shard_map(
            lambda x, w: jax.lax.pmean(f(x, w, KEY), "data"),
            mesh=mesh,
            in_specs=(spec("data"), spec()),
            out_specs=spec(),
        )

    args = arrays()
    want = jax.jit(jax.grad(shard(dropout_net), (0, 1)))(*args)
    got = jax.jit(jax.grad(shard(remat.checkpoint(dropout_net)), (0, 1)))(*args)
    assert_equal(got, want, exact=False)
    outside = remat.checkpoint(shard(dropout_net))
    assert_equal(jax.jit(jax.grad(outside, (0, 1)))(*args), want, exact=False)


def test_side_effects_run_once() -> None:
    seen: list[float] = []

    def f(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return jnp.sum(jnp.sin(y) * y)

    x = jnp.arange(4.0)
    jax.block_until_ready(jax.jit(jax.grad(remat.checkpoint(f, remat_policy="full")))(x))
    jax.effects_barrier()
    assert len(seen) == 1


def _with_effect(kind: str, place: str, seen: list[int]) -> Callable[[jax.Array], jax.Array]:
    """A sine with a rule of its own and one side effect, `kind`, in the function or in its rule: `place`."""

    def host(x: Any) -> Any:
        seen.append(1)
        return np.sin(x)

    def acting(x: jax.Array) -> jax.Array:
        if kind == "pure":
            return jax.pure_callback(host, x, x, vmap_method="broadcast_all")
        if kind == "io":
            return io_callback(host, x, x)
        jax.debug.callback(lambda v: seen.append(1), x)
        return jnp.sin(x)

    def cosine(x: jax.Array) -> jax.Array:
        return acting(x + np.pi / 2) if place.endswith("tangent") else jnp.cos(x)

    first = acting if place.endswith("function") else jnp.sin
    if place.startswith("jvp"):
        sine = jax.custom_jvp(first)
        rule = {"jvp function": sine, "jvp rule": acting, "jvp tangent": jnp.sin}[place]
        sine.defjvp(lambda p, t: (rule(p[0]), cosine(p[0]) * t[0]))
        return sine
    sine = jax.custom_vjp(first)
    forward = acting if place in ("vjp function", "vjp rule") else jnp.sin
    sine.defvjp(lambda x: (forward(x), x), lambda x, g: (cosine(x) * g,))
    return sine


@pytest.mark.sample(8)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("kind", ["io", "debug", "pure"])
@pytest.mark.parametrize(
    "place", ["jvp function", "vjp function", "jvp rule", "vjp rule", "jvp tangent", "vjp tangent"]
)
def test_side_effects_of_functions_with_rules_run_once(
    place: str, kind: str, length: int | None, lowering: str
) -> None:
    seen: list[int] = []

    def loss(sine: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(sine(jnp.tanh(jax.nn.relu(c) * 2))), None

        def total(x: jax.Array) -> jax.Array:
            h = step(x, None)[0] if length is None else jax.lax.scan(step, x, length=length)[0]
            return jnp.sum(h**2)

        return total

    x = jnp.linspace(-1, 1, 8)
    ours = remat.checkpoint(loss(_with_effect(kind, place, seen)), lowering=lowering)
    for run in (jax.grad(ours), jax.jit(jax.grad(ours)), jax.grad(jax.jit(ours))):
        seen.clear()
        assert_equal(run(x), jax.grad(loss(jnp.sin))(x), exact=False)
        jax.effects_barrier()
        assert len(seen) == (length or 1)


@jax.custom_vjp
def _at_time(x: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.sin(x) * t


def _at_time_forward(x: Any, t: Any) -> tuple[jax.Array, Any]:
    if t.perturbed:
        raise RuntimeError("the time is differentiated")
    return _at_time(x.value, t.value), (x.value, t.value)


def _at_time_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    x, t = kept
    return g * jnp.cos(x) * t, None


_at_time.defvjp(_at_time_forward, _at_time_backward, symbolic_zeros=True)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("place", ["argument", "carried", "over the steps"])
def test_rules_are_asked_with_tangents_of_what_is_differentiated(place: str, lowering: str) -> None:
    """Some refuse others; they are asked whether they act where something acts beside them."""
    seen: list[int] = []

    def host(late: Any) -> Any:
        seen.append(1)
        return late

    def loss(x: jax.Array, t: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], now: Any) -> tuple[Any, None]:
            c, late = carry
            heard = io_callback(host, late, jax.lax.stop_gradient(late))
            c = jnp.tanh(_at_time(jnp.tanh(c * heard), late if now is None else now) + c)
            return (c, late + 0.5), None

        if place == "argument":
            return jnp.sum(step((x, t * 2), None)[0][0] ** 2)
        times = t + jnp.arange(3.0) if place == "over the steps" else None
        return jnp.sum(jax.lax.scan(step, (x, t), times, length=3)[0][0] ** 2)

    x, t = jnp.linspace(-1, 1, 8), jnp.asarray(0.7)
    want = jax.grad(loss)(x, t)
    ours = remat.checkpoint(loss, lowering=lowering)
    for run in (jax.grad(ours), jax.jit(jax.grad(ours)), jax.grad(jax.jit(ours))):
        seen.clear()
        assert_equal(run(x, t), want, exact=False)
        jax.effects_barrier()
        assert len(seen) == (1 if place == "argument" else 3)
    with pytest.raises(RuntimeError, match="time is differentiated"):
        jax.grad(ours, argnums=1)(x, t)


def _executions(function: Callable[..., Any], *args: Any) -> int:
    """Counts the matmuls of the joint program, loops included once per iteration."""

    def count(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            inner = [
                getattr(p, "jaxpr", p)
                for p in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns"))
                if hasattr(p, "eqns") or hasattr(getattr(p, "jaxpr", None), "eqns")
            ]
            times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            total += times * sum(map(count, inner))
            total += eqn.primitive.name == "dot_general"
        return total

    return count(jax.make_jaxpr(function)(*args).jaxpr)


def test_recomputation_happens_exactly_as_planned() -> None:
    """Four matmuls in a chain: 4 forward, 7 backward (the first input is not differentiated)."""

    def chain(ws: jax.Array, x: jax.Array) -> jax.Array:
        for i in range(4):
            x = jnp.tanh(x @ ws[i])
        return x.sum()

    ws, x = jnp.ones((4, 8, 8)), jnp.ones((8, 8))
    counts = {
        name: _executions(jax.grad(remat.checkpoint(chain, remat_policy=name)), ws, x)
        for name in ("save_all", "min_cut", "full")
    }
    assert counts == {"save_all": 11, "min_cut": 11, "full": 15}


def test_loop_bodies_recompute_as_planned() -> None:
    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        body = lambda c, _: (jnp.tanh(jnp.tanh(c @ w) @ w), None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=5)[0].sum()

    w, x = jnp.ones((8, 8)), jnp.ones((8, 8))
    counts = {
        name: _executions(jax.grad(remat.checkpoint(loop, remat_policy=name)), w, x)
        for name in ("save_all", "min_cut", "full")
    }
    # Per iteration: 2 forward, 4 backward; full repeats both.
    assert counts == {"save_all": 30, "min_cut": 30, "full": 40}


def test_barriers_only_outside_loops() -> None:
    def barriers(f: Callable[..., Any]) -> int:
        x, w = arrays()
        text = str(jax.make_jaxpr(jax.grad(f))(x, w, KEY))
        return text.count("optimization_barrier")

    block = remat.checkpoint(lambda x, w, key: x * dropout_net(x, w, key), remat_policy="full")
    assert barriers(lambda x, w, key: block(x, w, key).sum()) == 1
    off = remat.checkpoint(
        lambda x, w, key: x * dropout_net(x, w, key), remat_policy="full", prevent_cse=False
    )
    assert barriers(lambda x, w, key: off(x, w, key).sum()) == 0

    def looped(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        return jax.lax.scan(lambda c, k: (block(c, w, k), None), x, keys)[0].sum()

    assert barriers(looped) == 0


def test_a_scalar_result_does_not_lose_its_barrier() -> None:
    """Losses of chunks, added up: without the barrier XLA would keep every chunk's values."""

    @functools.partial(remat.checkpoint, remat_policy="full")
    def chunk(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(x @ w)

    def total(w: jax.Array, xs: jax.Array) -> jax.Array:
        return sum((chunk(w, x) for x in xs), jnp.float32(0))

    text = str(jax.make_jaxpr(jax.grad(total))(jnp.ones((8, 16)), jnp.ones((3, 4, 8))))
    assert text.count("optimization_barrier") == 3


def test_effects_that_cannot_be_planned_are_errors_with_advice() -> None:
    def ordered(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum(), ordered=True)
        return jnp.sum(jnp.sin(x))

    with pytest.raises(remat.TraceError, match="ordered=False"):
        jax.grad(remat.checkpoint(ordered))(jnp.ones(3))

    def mutable(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = jnp.sin(x)
        return jnp.sum(ref[...])

    with pytest.raises(remat.TraceError, match="mutable array"):
        jax.grad(remat.checkpoint(mutable))(jnp.ones(3))


@pytest.mark.sample(2)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_complex_values_inside(policy: Any, lowering: str) -> None:
    """`jax.checkpoint` cannot keep complex values: it rounds what it keeps, which is defined for reals only."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        z = jax.lax.complex(jnp.sin(x), jnp.cos(x))
        for _ in range(2):
            z = jnp.exp(z * 0.3) @ jax.lax.complex(w, w)
            z = checkpoint_name(z / (1 + jnp.abs(z).max()), "layer")
        return jnp.sum(jnp.abs(jnp.sin(jnp.fft.fft(z))) ** 2)

    x, w = arrays()
    want = jax.grad(loss, (0, 1))(x, w)
    ours = remat.checkpoint(loss, remat_policy=policy, lowering=lowering)
    assert_equal(jax.jit(jax.grad(ours, (0, 1)))(x, w), want, exact=False)


@pytest.mark.parametrize("policy", ["full", "min_cut"])
def test_keys_have_no_tangents_behind_a_barrier(policy: str) -> None:
    def loss(x: jax.Array, key: jax.Array) -> jax.Array:
        # jax has no derivative rule for `clone`, so a key with a tangent would not pass it.
        mask = jax.random.bernoulli(jax.random.clone(key), 0.7, x.shape)
        return jnp.sum(jnp.where(mask, jnp.sin(x), 0) ** 2)

    def slope(f: Any) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jax.grad(f)(x, jax.random.key(0)) ** 2))(jnp.arange(4.0))

    np.testing.assert_allclose(slope(remat.checkpoint(loss, remat_policy=policy)), slope(loss))
