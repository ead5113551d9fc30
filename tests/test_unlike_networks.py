"""Programs with what networks rarely have: written arrays, effects alone, results that no derivative reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import remat
from tests.test_lower import assert_equal

Array = jax.Array
LOWERINGS = ["staged", "policy"]
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": jax.grad,
    "jit_grad": lambda f: jax.jit(jax.grad(f)),
    "grad_jit": lambda f: jax.grad(jax.jit(f)),
    "vmap_grad": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])),
    "grad_of_grad": lambda f: jax.grad(lambda w: jnp.sum(jnp.sin(jax.grad(f)(w)))),
}
W = jnp.linspace(0.3, 0.8, 3)


def accumulates(c: Array, x: Array) -> tuple[Array, Array]:
    """A loop's body that computes in an array of its own."""
    ref = jax.new_ref(c)
    ref[...] = ref[...] * jnp.sin(x)
    ref[...] += x
    return ref[...], jnp.cos(ref[...])


def written_in_scan(w: Array) -> Array:
    """A reference in the body of a loop."""
    c, ys = lax.scan(accumulates, w[0], w)
    return jnp.sum(ys) * c


def written_in_inner_scan(w: Array) -> Array:
    """A reference in a loop within a planned loop."""

    def outer(c: Array, x: Array) -> tuple[Array, Array]:
        inner, ys = lax.scan(accumulates, jnp.sin(c), w * x)
        return jnp.tanh(inner + c), jnp.sum(jnp.exp(ys))

    c, ys = lax.scan(outer, w[0], w)
    return jnp.sum(ys) * c


def written_in_branch(w: Array) -> Array:
    """A reference in a branch."""
    c = lax.cond(w[0] > 0, lambda c: accumulates(c, w[1])[1], jnp.sin, w[2])
    return jnp.sum(jnp.sin(c * w))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("policy", ["min_cut", "full", "save_all"])
@pytest.mark.parametrize("loss", [written_in_scan, written_in_inner_scan, written_in_branch])
def test_arrays_written_inside_loops(loss: Any, policy: str, lowering: str) -> None:
    ours = remat.checkpoint(loss, remat_policy=policy, lowering=lowering)
    for transform in (jax.value_and_grad, lambda f: jax.jit(jax.value_and_grad(f))):
        assert_equal(transform(ours)(W), transform(loss)(W), exact=False)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("where", ["function", "map", "nested"])
def test_effects_of_what_has_no_results(where: str, lowering: str) -> None:
    seen: list[float] = []

    def note(x: Array) -> None:
        jax.debug.callback(lambda v: seen.append(float(v)), x)

    wrap = partial(remat.checkpoint, lowering=lowering)

    def loss(w: Array) -> Array:
        if where == "function":
            wrap(lambda w: note(w[0]))(w)
        if where == "map":
            lax.map(note, jnp.sin(w))
        if where == "nested":
            lax.map(lambda x: lax.map(note, x * w), w)
        return jnp.sum(jnp.sin(w) * w)

    def count(run: Callable[[Array], Any]) -> int:
        seen.clear()
        jax.block_until_ready(run(W))
        jax.effects_barrier()
        return len(seen)

    ours = loss if where == "function" else wrap(loss)
    times = {"function": 1, "map": 3, "nested": 9}[where]
    assert count(ours) == count(jax.jit(ours)) == times
    assert count(jax.grad(ours)) == count(jax.jit(jax.grad(ours))) == times


SCALE = np.array(2.0, np.float32)
ROW = np.array([2.0, 1.0, 1.0], np.float32)


@jax.custom_vjp
def ruled(x: Array) -> Array:
    """A sine, whose rule reads arrays that the function itself does not."""
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * ROW * SCALE,))

CLOSED: dict[str, Callable[[Array], Array]] = {
    "scalar": lambda w: jnp.sum(jnp.sin(w) * SCALE),
    "rule": lambda w: jnp.sum(ruled(w) * w),
    "checkpoint": lambda w: jnp.sum(jax.checkpoint(lambda v: jnp.sin(v) * SCALE)(w)),
    "vmap": lambda w: jnp.sum(jax.vmap(lambda v: jnp.sin(v) * SCALE)(w)),
}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", CLOSED)
def test_numpy_arrays_are_read_anew_in_every_call(name: str, lowering: str) -> None:
    loss = CLOSED[name]
    ours = remat.checkpoint(loss, lowering=lowering)

    def all_of(f: Any) -> Any:
        return f(W), jax.grad(f)(W), jax.vmap(jax.grad(f))(W[None])

    try:
        found = []
        for scale in (2.0, 4.0):
            SCALE[...], ROW[0] = scale, scale
            found.append(all_of(ours))
            assert_equal(found[-1], all_of(loss), exact=False)
    finally:
        SCALE[...], ROW[0] = 2.0, 2.0
    assert not np.allclose(found[0][1], found[1][1])


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("policy", ["min_cut", "low_memory", "ilp", "monet", "sublinear", "full"])
def test_loops_without_iterations(policy: str, lowering: str) -> None:
    def loss(x: Array, w: Array) -> Array:
        def body(c: Array, _: None) -> tuple[Array, Array]:
            fixed = jnp.exp(w)
            return jnp.sin(c * fixed) + jnp.cos(fixed @ w), jnp.tanh(c * fixed)

        c, ys = lax.scan(body, x, None, length=0)
        return jnp.sum(c**2) + jnp.sum(ys)

    ours = remat.checkpoint(loss, remat_policy=policy, lowering=lowering)
    assert_equal(jax.grad(ours, (0, 1))(W, W), jax.grad(loss, (0, 1))(W, W))


@pytest.mark.skipif(
    jax.version.__version_info__ >= (0, 12), reason="jax has none of complex numbers"
)
@pytest.mark.parametrize("extremum", [lax.max, lax.min])
def test_the_largest_of_complex_numbers(extremum: Any) -> None:
    def loss(w: Array) -> Array:
        z = lax.complex(jnp.sin(w), jnp.cos(w))
        return jnp.sum(jnp.abs(extremum(z, z * z)))

    assert_equal(jax.grad(remat.checkpoint(loss))(W), jax.grad(loss)(W), exact=False)


def _measured(wrap: Callable[..., Any], use: str) -> Callable[..., Array]:
    """A loss with metrics, which something without a derivative is done to."""

    @wrap
    def block(w: Array, data: Array) -> tuple[Array, dict[str, Array]]:
        h = jnp.sin(w * data)
        stopped = lax.stop_gradient(jnp.max(h))
        return jnp.sum(h * w), {"largest": stopped, "tokens": jnp.sum(data), "both": jnp.mean(data)}

    def loss(w: Array, data: Array = W + 1) -> Array:
        value, metrics = block(w, data)
        if use == "io_callback":
            io_callback(lambda *_: None, None, metrics["largest"], metrics["tokens"])
        if use == "pure_callback":
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            value *= jax.pure_callback(
                lambda v: 2 * v, shape, metrics["largest"], vmap_method="sequential"
            )
        if use == "while":
            value *= lax.while_loop(lambda c: c < 10.0, lambda c: c * 2, metrics["tokens"])
        return value * metrics["tokens"] + metrics["both"]

    return loss


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("use", ["io_callback", "pure_callback", "while", "nothing"])
def test_results_that_no_derivative_reaches_have_none(
    use: str, transform: str, lowering: str
) -> None:
    make = TRANSFORMS[transform]
    ours = _measured(partial(remat.checkpoint, lowering=lowering), use)
    assert_equal(make(ours)(W), make(_measured(lambda f: f, use))(W), exact=False)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_what_is_differentiated_decides_which_results_have_derivatives(argnums: Any) -> None:
    plain, ours = (_measured(wrap, "nothing") for wrap in (lambda f: f, remat.checkpoint))
    for compiled in (lambda f: f, jax.jit):
        got, want = (compiled(jax.grad(f, argnums))(W, W + 1) for f in (ours, plain))
        assert_equal(got, want, exact=False)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nothing_is_made_that_is_no_number(lowering: str) -> None:
    def loss(w: Array) -> Array:
        h = jnp.sin(w * W) * W + w
        return jnp.sum(jnp.exp(h - jnp.max(h)) * h) * jnp.max(h)

    ours = remat.checkpoint(loss, lowering=lowering)
    with jax.debug_nans(True):
        for name in ("grad", "jit_grad", "vmap_grad", "grad_of_grad"):
            make = TRANSFORMS[name]
            assert_equal(make(ours)(W), make(loss)(W), exact=False)


def test_static_arguments_are_counted_from_the_end_of_the_call() -> None:
    def loss(x: Array, *flags: bool) -> Array:
        return jnp.sum(jnp.sin(x) * (2.0 if flags[-1] else 1.0))

    ours = remat.checkpoint(loss, static_argnums=-1)
    assert_equal(jax.grad(ours)(W, True), jax.grad(loss)(W, True))
    both = remat.checkpoint(loss, static_argnums=(-2, -1))
    assert_equal(jax.grad(both)(W, True, False), jax.grad(loss)(W, True, False))


def _with_pairs(w: Array, x: Array, tokens: Array) -> tuple[Array, Array]:
    """A loss, and a number that no derivative reaches, for which most of the memory is needed."""
    for _ in range(3):
        x = jnp.tanh(x @ w)
    pairs = (tokens[:, None] == tokens[None, :]).astype(jnp.float32)
    return jnp.mean(x**2), jnp.sort(pairs @ pairs, axis=0)[0].sum()


def _with_iterations(w: Array, x: Array, tokens: Array) -> tuple[Array, Array]:
    """A loss, and what comes through a loop that has no reverse mode."""
    for _ in range(3):
        x = jnp.tanh(x @ w)
    start = jnp.outer(x.sum(1), tokens.astype(x.dtype))
    found = lax.while_loop(lambda c: c.sum() > 0, lambda c: jnp.sort(c, axis=0) - 1, start)
    return jnp.mean(x**2), found.sum()


@pytest.mark.parametrize("budget", ["4KiB", 0.8, 1.0])
@pytest.mark.parametrize("loss", [_with_pairs, _with_iterations])
def test_a_confirmed_budget_holds_for_all_results(loss: Any, budget: Any) -> None:
    args = jnp.full((8, 8), 0.1), jnp.ones((16, 8)), jnp.arange(128) % 7
    try:
        plan = remat.plan(loss, *args, budget=budget, confirm="cpu")
    except remat.BudgetError as error:
        assert budget != 1.0
        assert error.smallest_peak_bytes is not None
        assert error.smallest_peak_bytes >= _temp_bytes(loss, args, "full") // 2
        return
    assert plan.confirmed is not None and plan.budget_bytes is not None
    assert _temp_bytes(loss, args, plan) <= plan.confirmed.temp_bytes <= plan.budget_bytes


def _temp_bytes(loss: Any, args: Any, policy: Any) -> int:
    step = jax.value_and_grad(remat.checkpoint(loss, remat_policy=policy), has_aux=True)
    return remat.compile_report(step, *args, device="cpu").temp_bytes


def test_a_predicted_budget_says_what_it_does_not_count() -> None:
    args = jnp.full((8, 8), 0.1), jnp.ones((16, 8)), jnp.arange(128) % 7
    plan = remat.plan(_with_pairs, *args, budget=1.0, confirm=False)
    assert any(f"{128 * 128 * 4:,} bytes" in note for note in plan.notes)
    plan = remat.plan(lambda *a: _with_pairs(*a)[0], *args, budget=1.0, confirm=False)
    assert not any("is not predicted" in note for note in plan.notes)


@pytest.mark.parametrize("first", [1, 1.0])
def test_one_byte_is_not_all_of_the_memory(first: float) -> None:
    def loss(w: Array) -> Array:
        return jnp.sum(jnp.tanh(jnp.tanh(w @ w) @ w) ** 2)

    def plan(budget: float) -> remat.Plan | None:
        try:
            return remat.plan(loss, jnp.ones((8, 8)), budget=budget, confirm=False)
        except remat.BudgetError:
            return None

    second = 1 if isinstance(first, float) else 1.0
    both = {type(budget): plan(budget) for budget in (first, second)}
    assert both[int] is None
    assert both[float] is not None


def _layers(ws: Array, x: Array) -> Array:
    for w in ws:
        x = x + jax.nn.gelu(x @ w) @ w.T
    return jnp.mean(x**2)


def _by_scan(loss: Any) -> Any:
    def step(ws: Array, xs: Array) -> Array:
        def add(total: Array, x: Array) -> tuple[Array, Array]:
            value, grad = jax.value_and_grad(loss)(ws, x)
            return total + grad, value

        return lax.scan(add, jnp.zeros_like(ws), xs)[0]

    return step


def _by_fori_loop(loss: Any) -> Any:
    return lambda ws, xs: lax.fori_loop(
        0, 4, lambda i, ws: ws - 0.1 * jax.grad(loss)(ws, xs[i]), ws
    )


def _by_examples(loss: Any) -> Any:
    return _by_scan(lambda ws, x: jnp.mean(jax.vmap(partial(loss, ws))(x[:, None])))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("accumulate", [_by_scan, _by_fori_loop, _by_examples])
def test_what_is_differentiated_in_a_loop_takes_less_memory(accumulate: Any, lowering: str) -> None:
    """Both halves are in the loop's body: without barriers XLA undoes what is computed again."""
    ws, xs = jnp.full((6, 16, 64), 0.01), jnp.linspace(-1, 1, 4 * 256 * 16).reshape(4, 256, 16)
    ours = accumulate(remat.checkpoint(_layers, remat_policy="sublinear", lowering=lowering))
    plain = accumulate(_layers)
    assert_equal(jax.jit(ours)(ws, xs), jax.jit(plain)(ws, xs), exact=False)
    took, without = (
        remat.compile_report(f, ws, xs, device="cpu").temp_bytes for f in (ours, plain)
    )
    assert took < 0.8 * without
