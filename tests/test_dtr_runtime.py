"""The runtime of DTR: plain JAX's results, a cap held at every operator, nothing compiled twice, nothing left."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import io_callback

import remat
from benchmarks import tree_lstm
from models import tree_lstm as tree_lstm_model
from remat import dtr
from remat.dtr.runtime.operators import OPERATORS
from tests.programs import run_on_devices

ROOT = Path(__file__).resolve().parents[1]
KEY = jax.random.key(0)


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(KEY, seed), shape)


def _bytes_alive() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def _assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def _assert_same(found: Any, expected: Any) -> None:
    """Up to rounding: jax runs some operators of a backward pass in pieces."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        if one.dtype == jax.dtypes.float0 or np.issubdtype(one.dtype, np.integer):
            assert one.shape == other.shape
        else:
            wide = np.promote_types(one.dtype, np.float32)
            one, other = one.astype(wide), other.astype(wide)
            largest = float(np.max(np.abs(other), initial=0.0))
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)


# --- programs: (function, arguments, options of value_and_grad)


def deep(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w) + 0.5 * x
    return jnp.mean(x**2)


def until_small(w: Any, x: Any) -> Any:
    """As deep as the values say."""
    steps = 0
    while float(jax.lax.stop_gradient(jnp.linalg.norm(x))) > 1.0 and steps < 50:
        x = jnp.tanh(x @ w) * 0.9
        steps += 1
    return jnp.sum(x * x) * steps


def branches(w: Any, x: Any) -> Any:
    if x.sum() > 0:
        x = -x
    return jnp.sum(jnp.where(x > 0, x @ w, jnp.sin(x)))


@jax.jit
def cell(w: Any, left: Any, right: Any) -> Any:
    return jnp.tanh(jnp.concatenate([left, right]) @ w)


def tree(w: Any, node: Any) -> Any:
    def walk(node: Any) -> Any:
        return node if not isinstance(node, tuple) else cell(w, walk(node[0]), walk(node[1]))

    return jnp.sum(walk(node) ** 2)


def dropout(w: Any, key: Any, x: Any) -> Any:
    for i in range(2):
        x = jnp.tanh(x @ w)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, x.shape), x / 0.7, 0.0)
    return jnp.sum(x)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * 3.0, -1, 1) * x,))


@jax.custom_vjp
def reads_in_rule(x: Any) -> Any:
    return x * 2.0


def _reads(x: Any, g: Any) -> Any:
    return (g * 5.0 if np.asarray(x).sum() > 0 else g * 7.0,)


reads_in_rule.defvjp(lambda x: (x * 2.0, x), _reads)


@jax.custom_jvp
def odd(x: Any) -> Any:
    return jnp.cos(x)


odd.defjvp(lambda p, t: (odd(p[0]), t[0] * 0.5 * p[0]))


def rules(x: Any) -> Any:
    return jnp.sum(clipped(odd(x)) * reads_in_rule(x) + jax.nn.silu(x))


def control(w: Any, x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        carry = jnp.tanh(carry @ w + row)
        return carry, carry.sum()

    carry, sums = jax.lax.scan(step, x[0], x)
    turned = jax.lax.cond(sums[0] > 0, jnp.sin, jnp.cos, carry)
    count = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    return jnp.sum(turned) + jnp.max(x) + jnp.sort(x[1]) @ x[0] + count


def ties(x: Any) -> Any:
    """Masks born in differentiation: a maximum of what is made again."""
    y = jnp.tanh(x @ x.T) * 3
    for _ in range(3):
        y = jnp.sin(y) * y
    shifted = y - jnp.max(y, axis=1, keepdims=True)
    return jnp.sum(jnp.max(y, axis=0)) + jnp.sum(jnp.log(jnp.sum(jnp.exp(shifted), axis=1)))


def nested(w: Any, x: Any) -> Any:
    inner = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))
    block = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w)))
    return jnp.sum(inner(x) ** 2) + jnp.sum(jax.vmap(block)(x[None])) + jnp.sum(block(x))


def with_aux(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.sum(hidden**2), {"hidden": hidden, "n": 3, "mean": hidden.mean()}


def indexed(table: Any, ids: Any, mask: Any) -> Any:
    rows = table[ids].at[0].set(1.0)
    return jnp.sum(jnp.where(mask[:, None], rows, 0.0) ** 2) * ids.shape[0]


def constants(x: Any) -> Any:
    table = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    y = x * jnp.asarray(table) + jnp.arange(3.0)
    return jnp.sum(y * np.asarray(jnp.arange(3.0))[1]) + int(jnp.array(2)) * y[0, 0]


W, X = _normal(8, 8) * 0.5, _normal(8, 8, seed=1)
LEAF = [_normal(8, seed=i) for i in range(5)]
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "deep": (deep, ([_normal(16, 16, seed=i) for i in range(6)], _normal(64, 16, seed=9)), {}),
    "until_small": (until_small, (W * 0.8, X), {"argnums": (0, 1)}),
    "branches": (branches, (W, X), {"argnums": 1}),
    "tree": (tree, (_normal(16, 8), (LEAF[0], ((LEAF[1], LEAF[2]), (LEAF[3], LEAF[4])))), {}),
    "dropout": (dropout, (W, KEY, X), {"argnums": (0, 2)}),
    "rules": (rules, (_normal(12),), {}),
    "control": (control, (W, X), {"argnums": (0, 1)}),
    "ties": (ties, (X,), {}),
    "nested": (nested, (W, X), {"argnums": (1, 0)}),
    "aux": (with_aux, ({"w": W, "b": X[0]}, X), {"has_aux": True}),
    "indexed": (
        indexed,
        (X, jnp.array([1, 3, 3]), jnp.array([True, False, True])),
        {"argnums": (0, 1), "allow_int": True},
    ),
    "constants": (constants, (_normal(2, 3),), {}),
    "bfloat16": (deep, ([W.astype(jnp.bfloat16)] * 4, X.astype(jnp.bfloat16)), {}),
    "complex": (lambda x: jnp.sum(jnp.abs(jnp.fft.fft(x * (1 + 2j)))), (X,), {}),
    "holomorphic": (
        lambda z: jnp.sum(jnp.sin(z) * z),
        (X + 1j * W,),
        {"holomorphic": True},
    ),
    "numpy": (deep, ([np.asarray(W)] * 3, np.asarray(X)), {"argnums": (0, 1)}),
    "scalar": (lambda x, y: x * jnp.sin(y) + 2.0, (1.5, 2), {"argnums": 0}),
    "unused": (lambda x, y: jnp.sum(x), (X, W), {"argnums": (0, 1)}),
    "constant": (lambda x: 3.0, (X,), {}),
}


# Which show little that the others do not.
SLOW = {"bfloat16", "complex", "holomorphic", "control", "nested", "branches", "numpy", "unused"}


def _expected(fun: Callable[..., Any], options: dict[str, Any], args: Any) -> Any:
    """What plain JAX has: compiled, where nothing depends on values."""
    plain = jax.value_and_grad(fun, **options)
    if "has_aux" in options:  # which may be more than arrays
        return plain(*args)
    try:
        return jax.jit(plain)(*args)
    except TypeError:  # what jax raises where a value is read
        return plain(*args)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PROGRAMS]
)
def test_results_are_those_of_plain_jax_and_no_budget_changes_a_bit(name: str) -> None:
    fun, args, options = PROGRAMS[name]
    runs: list[dtr.RunStatistics] = []
    expected = dtr.value_and_grad(fun, on_run=runs.append, **options)(*args)
    _assert_same(expected, _expected(fun, options, args))
    peak, results = runs[0].peak_bytes, runs[0].result_bytes
    assert runs[0].rematerializations == 0
    for share in (0.0, 0.5, 0.8):
        budget = int(max(results, share * peak, 1))
        run = dtr.value_and_grad(fun, budget=budget, on_run=runs.append, **options)
        try:
            found = run(*args)
        except remat.BudgetError as error:
            assert error.smallest_peak_bytes is not None
            assert error.smallest_peak_bytes > budget
            continue
        _assert_same_bits(found, expected)
        assert runs[-1].peak_bytes <= budget
        assert runs[-1].operators == runs[0].operators


def test_pressure_is_real() -> None:
    """The budgets above do make the runtime run operators again."""
    fun, args, _ = PROGRAMS["deep"]
    runs: list[dtr.RunStatistics] = []
    dtr.value_and_grad(fun, on_run=runs.append)(*args)
    budget = runs[0].result_bytes + (runs[0].peak_bytes - runs[0].result_bytes) // 2
    dtr.value_and_grad(fun, budget=budget, on_run=runs.append)(*args)
    assert runs[1].rematerializations > 0
    assert runs[1].overhead > 0 == runs[0].overhead


# --- the cap


def test_the_cap_holds_at_every_operator_by_the_arrays_that_are_alive() -> None:
    fun, args, _ = PROGRAMS["deep"]
    runs: list[dtr.RunStatistics] = []
    dtr.value_and_grad(fun, on_run=runs.append)(*args)
    budget = runs[0].result_bytes + (runs[0].peak_bytes - runs[0].result_bytes) // 2
    gc.collect()
    before = _bytes_alive()
    seen = []

    def look(move: Any) -> None:
        seen.append((move.memory_bytes, _bytes_alive() - before))

    dtr.value_and_grad(fun, budget=budget, on_move=look, on_run=runs.append)(*args)
    assert runs[1].trace == ()
    assert len(seen) >= runs[1].operators + runs[1].rematerializations + runs[1].evictions
    assert max(counted for counted, _ in seen) <= budget
    assert max(alive for _, alive in seen) <= budget
    assert all(alive <= counted for counted, alive in seen)


def test_what_nothing_reads_any_more_is_let_go() -> None:
    """The backward pass of a chain frees as it goes: its peak is that of the forward pass and a few arrays."""
    layers, width = 20, 64
    x = _normal(width, width)
    runs: list[dtr.RunStatistics] = []

    @jax.jit
    def layer(x: Any) -> Any:
        return jnp.sin(x)

    def chain(x: Any) -> Any:
        for _ in range(layers):
            x = layer(x)
        return x[0, 0]

    dtr.value_and_grad(chain, on_run=runs.append, trace=True)(x)
    assert runs[0].peak_bytes <= (layers + 4) * x.nbytes
    memory = [move.memory_bytes for move in runs[0].trace if move.action == "run"]
    assert memory[-1] < 4 * x.nbytes
    assert runs[0].names[0] == "jit:layer"


def test_a_forward_pass_keeps_only_what_is_read_later() -> None:
    def steps(x: Any, y: Any) -> Any:
        for _ in range(30):
            y = y * 1.5  # nobody differentiates it
        return jnp.sum(x * y)

    runs: list[dtr.RunStatistics] = []
    x = _normal(32, 32)
    dtr.value_and_grad(steps, on_run=runs.append)(x, x)
    assert runs[0].peak_bytes <= 5 * x.nbytes


def test_an_operator_that_does_not_fit_alone_says_what_would_do() -> None:
    x = _normal(64, 64)

    def f(x: Any) -> Any:
        return jnp.sum(jnp.concatenate([jnp.sin(x)] * 10))

    with pytest.raises(remat.BudgetError, match=r"concatenate.*budget=100000") as caught:
        dtr.value_and_grad(f, budget=100_000)(x)
    smallest = caught.value.smallest_peak_bytes
    assert smallest is not None
    assert smallest == 11 * x.nbytes
    with pytest.raises(remat.BudgetError, match="concatenate"):
        dtr.value_and_grad(f, budget=smallest - 1)(x)
    dtr.value_and_grad(f, budget=2 * smallest)(x)


def test_results_that_do_not_fit_say_so_before_the_backward_pass() -> None:
    with pytest.raises(remat.BudgetError, match="results alone"):
        dtr.grad(lambda x: x[0, 0] * 2.0, budget=5000)(_normal(64, 64))


def test_budgets_are_read_as_elsewhere_but_shares_have_no_peak() -> None:
    run = dtr.grad(lambda x: jnp.sum(jnp.sin(x)), budget="1MiB")
    assert run(X).shape == X.shape
    with pytest.raises(remat.BudgetError, match="share"):
        dtr.grad(jnp.sum, budget=0.5)  # type: ignore[arg-type]
    with pytest.raises(remat.BudgetError, match="not positive"):
        dtr.grad(jnp.sum, budget=0)
    with pytest.raises(remat.PolicyError, match="dtr_eqclass"):
        dtr.grad(jnp.sum, heuristic="dtr_eqclas")
    with pytest.raises(remat.PolicyError, match="measured"):
        dtr.grad(jnp.sum, costs="clock")  # type: ignore[arg-type]


@pytest.mark.parametrize("heuristic", sorted(dtr.HEURISTICS))
def test_every_heuristic_keeps_the_cap_and_the_bits(heuristic: str) -> None:
    fun, args, _ = PROGRAMS["deep"]
    runs: list[dtr.RunStatistics] = []
    expected = dtr.value_and_grad(fun, on_run=runs.append)(*args)
    budget = runs[0].result_bytes + 9 * (runs[0].peak_bytes - runs[0].result_bytes) // 10
    run = dtr.value_and_grad(fun, budget=budget, heuristic=heuristic, on_run=runs.append)
    _assert_same_bits(run(*args), expected)
    assert runs[1].peak_bytes <= budget < runs[0].peak_bytes


def test_measured_costs_give_the_same_results() -> None:
    fun, args, _ = PROGRAMS["deep"]
    runs: list[dtr.RunStatistics] = []
    expected = dtr.value_and_grad(fun, on_run=runs.append)(*args)
    budget = runs[0].result_bytes + 9 * (runs[0].peak_bytes - runs[0].result_bytes) // 10
    run = dtr.value_and_grad(fun, budget=budget, costs="measured", on_run=runs.append)
    _assert_same_bits(run(*args), expected)
    assert runs[1].peak_bytes <= budget


# --- compilations


COMPILATIONS = tree_lstm.Compilations()


def _random_tree(draw: Any, leaves: int) -> Any:
    if leaves == 1:
        return LEAF[draw(st.integers(0, 4))]
    left = draw(st.integers(1, leaves - 1))
    return (_random_tree(draw, left), _random_tree(draw, leaves - left))


@given(data=st.data(), leaves=st.integers(2, 12), share=st.sampled_from([0.5, 0.7, 1.0]))
@settings(max_examples=8, deadline=None)
def test_new_trees_compile_nothing(data: Any, leaves: int, share: float) -> None:
    w = PROGRAMS["tree"][1][0]
    run = dtr.value_and_grad(tree)
    for warm in ((LEAF[0], LEAF[1]), ((LEAF[0], LEAF[1]), LEAF[2])):
        run(w, warm)
        run(w, (warm, warm))
    node = _random_tree(data.draw, leaves)
    expected = jax.value_and_grad(tree)(w, node)
    runs: list[dtr.RunStatistics] = []
    before = COMPILATIONS.count
    found = run(w, node)
    peak = dtr.value_and_grad(tree, on_run=runs.append)(w, node) and runs[0].peak_bytes
    budget = max(int(share * peak), 4 * w.nbytes)
    dtr.value_and_grad(tree, budget=budget, on_run=runs.append)(w, node)
    assert COMPILATIONS.count == before
    assert runs[0].compilations == runs[1].compilations == 0
    _assert_same(found, expected)


def test_functions_made_anew_are_the_same_operators() -> None:
    """Loops and branches over new closures, which jax traces again, and would compile again."""

    def f(x: Any) -> Any:
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)
        return jnp.sum(jax.lax.cond(y[0, 0] > 0, lambda y: y * 2, lambda y: -y, y))

    run = dtr.value_and_grad(f)
    run(X)
    before = COMPILATIONS.count
    run(X)
    assert COMPILATIONS.count == before


# --- what runs twice, and what may not


def test_a_repeated_operator_draws_the_same_bits() -> None:
    """A mask that is drawn again is the mask that was drawn: value and gradient would disagree otherwise."""

    def f(x: Any, key: Any) -> Any:
        for i in range(6):
            x = x * jax.random.normal(jax.random.fold_in(key, i), x.shape)
        return jnp.sum(x)

    x = _normal(32, 32)
    runs: list[dtr.RunStatistics] = []
    value, gradient = dtr.value_and_grad(f, on_run=runs.append)(x, KEY)
    budget = runs[0].result_bytes + (runs[0].peak_bytes - runs[0].result_bytes) // 2
    capped = dtr.value_and_grad(f, budget=budget, on_run=runs.append)(x, KEY)
    assert runs[1].rematerializations > 0
    _assert_same_bits(capped, (value, gradient))
    np.testing.assert_allclose(jnp.sum(gradient * x), value, rtol=1e-3)


def test_effects_happen_once() -> None:
    printed: list[float] = []
    drawn: list[int] = []

    def draw() -> np.ndarray:
        drawn.append(len(drawn))
        return np.full((32, 32), float(len(drawn)), np.float32)

    def f(x: Any) -> Any:
        for _ in range(6):
            x = jnp.sin(x)
            jax.debug.callback(lambda v: printed.append(float(v)), x[0, 0])
            shape = jax.ShapeDtypeStruct((32, 32), jnp.float32)
            x = x * io_callback(draw, shape, ordered=True)
        return jnp.sum(x)

    x = _normal(32, 32)
    runs: list[dtr.RunStatistics] = []
    expected = dtr.value_and_grad(f, on_run=runs.append)(x)
    jax.effects_barrier()
    assert (len(printed), len(drawn)) == (6, 6)
    drawn.clear()
    budget = int(0.8 * runs[0].peak_bytes)
    found = dtr.value_and_grad(f, budget=budget, on_run=runs.append)(x)
    jax.effects_barrier()
    assert runs[1].rematerializations > 0
    assert (len(printed), len(drawn)) == (12, 6)
    _assert_same_bits(found, expected)


def test_numpy_arrays_may_change_after_they_were_read() -> None:
    def f(x: Any) -> Any:
        table = np.ones((32, 32), np.float32)
        y = x
        for i in range(6):
            table[:] = i
            y = jnp.sin(y * jnp.asarray(table) + y)
        return jnp.sum(y)

    x = _normal(32, 32)
    runs: list[dtr.RunStatistics] = []
    expected = dtr.value_and_grad(f, on_run=runs.append)(x)
    budget = runs[0].result_bytes + (runs[0].peak_bytes - runs[0].result_bytes) // 2
    _assert_same_bits(dtr.value_and_grad(f, budget=budget, on_run=runs.append)(x), expected)
    assert runs[1].rematerializations > 0


# --- vjp, threads, errors, interrupts


def test_vjp_may_be_pulled_twice_and_stays_within_the_budget() -> None:
    def f(w: Any, x: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x, {"mean": x.mean()}

    w, x = _normal(32, 32) * 0.3, _normal(32, 32, seed=2)
    runs: list[dtr.RunStatistics] = []
    out, pull, aux = dtr.vjp(f, w, x, has_aux=True, budget=12 * x.nbytes, on_run=runs.append)
    expected, plain, plain_aux = jax.vjp(f, w, x, has_aux=True)
    _assert_same((out, aux), (expected, plain_aux))
    for scale in (1.0, -2.0):
        _assert_same(pull(jnp.full_like(out, scale)), plain(jnp.full_like(out, scale)))
    assert len(runs) == 2
    assert max(run.peak_bytes for run in runs) <= 12 * x.nbytes


def test_gradients_and_their_options() -> None:
    fun, args, _ = PROGRAMS["aux"]
    _assert_same(dtr.grad(fun, has_aux=True)(*args), jax.grad(fun, has_aux=True)(*args))
    f = lambda x, *, scale: jnp.sum(jnp.sin(x) * scale)  # noqa: E731
    _assert_same(dtr.grad(f)(X, scale=3.0), jax.grad(f)(X, scale=3.0))
    _assert_same(dtr.grad(lambda x, y: jnp.sum(x * y), -1)(X, W), X)


def test_gradients_are_arrays_of_jax_even_if_they_are_cotangents() -> None:
    params = {"b": jnp.float32(2.0), "w": jnp.ones(3)}
    gradient = dtr.grad(lambda p: p["b"] + jnp.sum(p["w"] ** 2))(params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(gradient))
    _assert_same(gradient, {"b": np.float32(1.0), "w": 2 * np.ones(3, np.float32)})
    _, pull = dtr.vjp(lambda x: x + 1.0, X)
    given = np.full(X.shape, 3.0, X.dtype)
    (found,) = pull(given)
    given[:] = 4.0
    assert isinstance(found, jax.Array) and bool(jnp.all(found == 3.0))


def test_positions_may_be_of_numpy() -> None:
    f = lambda x, y: jnp.sum(x * y * y)  # noqa: E731
    _assert_same(dtr.grad(f, np.int64(1))(X, W), jax.grad(f, 1)(X, W))
    _assert_same(dtr.grad(f, [np.int32(0), 1])(X, W), jax.grad(f, (0, 1))(X, W))
    with pytest.raises(remat.TraceError, match=r"argnums=1\.0"):
        dtr.grad(f, 1.0)  # type: ignore[arg-type]


def test_without_jit_operators_are_still_compiled() -> None:
    fun, args, _ = PROGRAMS["deep"]
    OPERATORS.clear()
    with jax.disable_jit():
        found = dtr.grad(fun)(*args)
    _assert_same(found, dtr.grad(fun)(*args))


def test_threads_do_not_disturb_each_other() -> None:
    fun, args, options = PROGRAMS["dropout"]
    runs: list[dtr.RunStatistics] = []
    expected = dtr.value_and_grad(fun, on_run=runs.append, **options)(*args)
    budget = int(0.9 * runs[0].peak_bytes)
    run = dtr.value_and_grad(fun, budget=budget, on_run=runs.append, **options)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(*args), range(8)):
            _assert_same_bits(found, expected)
    assert len(runs) == 9
    assert all(r.peak_bytes <= budget for r in runs[1:])


@pytest.mark.parametrize("after", [3, 40])
def test_ctrl_c_leaves_nothing(after: int) -> None:
    fun, args, _ = PROGRAMS["deep"]
    dtr.value_and_grad(fun)(*args)
    gc.collect()
    before = len(jax.live_arrays())
    count = 0

    def interrupt(_: Any) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        dtr.value_and_grad(fun, budget=100_000, on_move=interrupt)(*args)
    gc.collect()
    assert len(jax.live_arrays()) == before  # also while the traceback is held
    del caught


def test_an_interrupted_pull_can_be_pulled_again() -> None:
    fun, args, _ = PROGRAMS["deep"]
    interrupts: list[int] = []

    def interrupt(_: Any) -> None:
        if interrupts and not interrupts.pop():
            raise KeyboardInterrupt

    out, pull = dtr.vjp(fun, *args, on_move=interrupt)
    expected = pull(jnp.ones_like(out))
    gc.collect()
    before = len(jax.live_arrays())
    interrupts[:] = [0, 1, 1, 1, 1]
    with pytest.raises(KeyboardInterrupt):
        pull(jnp.ones_like(out))
    gc.collect()
    assert len(jax.live_arrays()) < before
    _assert_same_bits(pull(jnp.ones_like(out)), expected)


def test_values_of_a_run_are_of_no_use_after_it() -> None:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        kept.append(jax.lax.stop_gradient(jnp.sin(x)))
        return jnp.sum(x)

    dtr.grad(f)(X)
    with pytest.raises(remat.TraceError, match="after that run"):
        np.asarray(kept[0])


def test_transforms_outside_are_refused() -> None:
    run = dtr.grad(lambda x: jnp.sum(jnp.sin(x)))
    for transformed in (jax.jit(run), jax.vmap(run)):
        with pytest.raises(remat.TraceError, match=r"remat\.checkpoint"):
            transformed(X)
    with pytest.raises(remat.TraceError, match=r"remat\.checkpoint"):
        jax.grad(lambda x: run(x).sum())(X)

    _, pull = dtr.vjp(jnp.sin, X)
    for transformed in (jax.jit(pull), jax.vmap(pull), jax.grad(lambda x: pull(x)[0].sum())):
        with pytest.raises(remat.TraceError, match=r"remat\.checkpoint"):
            transformed(X)
    _assert_same(pull(X), jax.vjp(jnp.sin, X)[1](X))


@pytest.mark.parametrize("fun", [lambda x: jnp.sum(jnp.log(x)), lambda x: jnp.sum(jnp.sqrt(x - 1))])
def test_debug_nans_names_the_operator(fun: Callable[[Any], Any]) -> None:
    x = jnp.linspace(-2, -1, 4)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError) as expected:
            jax.grad(fun)(x)
        with pytest.raises(FloatingPointError) as found:
            dtr.grad(fun)(x)
    name = str(expected.value).rsplit(" ", 1)[-1]
    assert str(found.value).startswith("invalid value (nan) encountered in")
    assert str(found.value).endswith(name)


@pytest.mark.parametrize("value", [3.0, np.float32(3), jnp.float32(3), 2 + 1j])
def test_gradients_are_of_the_weak_type_that_jax_makes(value: Any) -> None:
    def fun(x: Any) -> Any:
        return jnp.sin(x) * x

    holomorphic = isinstance(value, complex)
    expected = jax.grad(fun, holomorphic=holomorphic)(value)
    found = dtr.grad(fun, holomorphic=holomorphic)(value)
    assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)
    _assert_same(found, expected)


def test_arrays_are_moved_between_devices() -> None:
    program = """
import jax, jax.numpy as jnp
from remat import dtr

first, second = jax.devices()
sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), jax.sharding.PartitionSpec("x"))
w = jax.device_put(jnp.arange(256.0), second)
programs = {
    "moved": lambda x: jnp.sum(jax.device_put(jnp.sin(x), second)),
    "pipeline": lambda x: jnp.sum(jnp.cos(jax.device_put(jnp.sin(x), second) * w)),
    "there and back": lambda x: jnp.sum(jax.device_put(jax.device_put(x * x, second) * w, first) * x),
    "sharded": lambda x: jnp.sum(jnp.sin(jax.device_put(jnp.sin(x), sharding)) ** 2),
    "nowhere": lambda x: jnp.sum(jax.device_put(jnp.sin(x)) * x),
}
for name, fun in programs.items():
    for x in (jnp.arange(256.0), jax.device_put(jnp.arange(256.0), first)):
        value, gradient = jax.value_and_grad(fun)(x)
        runs = []
        dtr.value_and_grad(fun, on_run=runs.append)(x)
        for budget in (None, runs[-1].peak_bytes):
            mine, found = dtr.value_and_grad(fun, budget=budget)(x)
            assert mine.sharding.device_set == value.sharding.device_set, name
            assert found.sharding.device_set == gradient.sharding.device_set, name
            assert jnp.allclose(jnp.asarray(mine), value) and jnp.allclose(found, gradient), name
print("moved", len(programs))
"""
    assert run_on_devices(program, 2).split() == ["moved", "5"]


def test_misuse_is_explained() -> None:
    with pytest.raises(TypeError, match="one number"):
        dtr.grad(jnp.sin)(X)
    with pytest.raises(TypeError, match="allow_int"):
        dtr.grad(lambda n: 1.0 * n)(3)
    with pytest.raises(TypeError, match="complex"):
        dtr.grad(lambda x: jnp.sum(x + 0j))(X)
    with pytest.raises(TypeError, match="holomorphic"):
        dtr.grad(jnp.sum, holomorphic=True)(X)
    with pytest.raises(ValueError, match="argnums=2"):
        dtr.grad(jnp.sum, 2)(X)

    def mutable(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = x * 2
        return jnp.sum(ref[...])

    with pytest.raises(remat.TraceError, match="mutable"):
        dtr.grad(mutable)(X)
    _assert_same(dtr.grad(jax.jit(mutable))(X), jax.grad(mutable)(X))


def test_long_chains_need_no_recursion() -> None:
    """Neither to make again nor to let go."""

    @jax.jit
    def step(x: Any) -> Any:
        return x + 1.0

    def f(x: Any) -> Any:
        y = x
        for _ in range(1500):
            y = step(y)
        return jnp.sum(x * y)

    runs: list[dtr.RunStatistics] = []
    dtr.value_and_grad(f, on_run=runs.append)(jnp.ones(()))
    assert runs[0].operators > 1500


# --- where jax is not, and the benchmark


def test_the_simulator_needs_no_jax_and_the_runtime_is_found() -> None:
    code = """
import sys
sys.modules["jax"] = None
import remat.dtr
assert "value_and_grad" in dir(remat.dtr)
try:
    remat.dtr.value_and_grad
except ImportError:
    print("needs jax")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "needs jax\n", run.stderr


def test_documents_are_trees_of_their_lines() -> None:
    text = "a\n  b\n  c\n    d\n\ne"
    config = tree_lstm_model.Config()
    document = tree_lstm_model.parse(text, config, most_lines=9, label=1)
    assert document.tree == ((0, (1, (2, 3))), 4)
    assert tree_lstm_model.parse(text, config, most_lines=2, label=1).tree == (0, 1)
    with pytest.raises(ValueError, match="words"):
        tree_lstm_model.parse("\n", config, most_lines=2, label=1)


def test_the_check_of_the_benchmark_can_fail() -> None:
    plain = tree_lstm.Trained("plain JAX", (1.0, 2.0), 0, 1.0, 1.0)
    jitted = dataclasses.replace(plain, way="jit", compilations=2)
    half = dataclasses.replace(
        plain, way="half", peak_bytes=9, budget_bytes=10, operators=5, rematerializations=1
    )
    assert tree_lstm.problems_of([plain, jitted, half]) == []
    for broken in (
        dataclasses.replace(half, losses=(1.0, 2.1)),
        dataclasses.replace(half, peak_bytes=11),
        dataclasses.replace(half, rematerializations=0),
        dataclasses.replace(half, compilations=1),
        dataclasses.replace(jitted, compilations=1),
    ):
        assert len(tree_lstm.problems_of([plain, broken])) == 1


@pytest.mark.slow
def test_a_tree_lstm_at_half_of_its_memory() -> None:
    config = tree_lstm_model.Config(words=64, length=16, width=16)
    rows = tree_lstm.measure(4, 8, config)
    assert tree_lstm.problems_of(rows) == []
