"""Element-wise operators of a backward pass run as one: plain JAX's results, no larger budget, few groups."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import tree_lstm
from remat import compat, dtr
from remat.core.avals import aval_bytes
from remat.dtr.runtime import groups
from remat.dtr.runtime.groups import Group, grouped

COMPILATIONS = tree_lstm.Compilations()
WIDTH = 8
X = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))


def steps_of(function: Callable[..., Any], *args: Any, free: int = 0) -> tuple[Any, list[Any]]:
    """A function's jaxpr, and how it would run; the first `free` arguments are the caller's."""
    jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(function)(*args))
    callers = set(jaxpr.invars[:free])
    return jaxpr, grouped(jaxpr.eqns, jaxpr.outvars, callers.__contains__)


def names(steps: list[Any]) -> list[str]:
    return [step.name if isinstance(step, Group) else step.primitive.name for step in steps]


def test_a_chain_is_one_operator() -> None:
    _, steps = steps_of(lambda x: jnp.sin(-jnp.exp(x)), X)
    assert names(steps) == ["exp+neg+sin"]
    np.testing.assert_allclose(steps[0].evaluate(X)[0], np.sin(-np.exp(X)), rtol=1e-6)


def test_what_several_read_and_what_is_returned_stays() -> None:
    def several(x: Any) -> Any:
        y = jnp.exp(x)
        return jnp.sin(y) * jnp.cos(y)

    assert names(steps_of(several, X)[1]) == ["exp", "sin+cos+mul"]

    def returned(x: Any) -> Any:
        y = jnp.exp(x)
        return y, jnp.sin(y)

    assert names(steps_of(returned, X)[1]) == ["exp", "sin"]


def test_other_operators_and_other_shapes_end_a_group() -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.sin((jnp.exp(x) @ w)[0] + 1.0)

    assert all(not isinstance(s, Group) or "exp" not in s.name for s in steps_of(f, X, X)[1])

    def across(x: Any, w: Any) -> Any:
        early = jnp.exp(x)
        return jnp.sin(x @ w) * jnp.cos(early)  # `early` waits for no matmul

    assert names(steps_of(across, X, X)[1])[0] == "exp"


def test_literals_are_operands() -> None:
    """Numbers that differ from example to example make no new groups."""
    one, two = (steps_of(lambda x, c=c: jnp.sin(x * c) + c, X)[1][0] for c in (2.0, 3.0))
    assert one.structure == two.structure and hash(one.structure) == hash(two.structure)
    assert [atom.val for atom in one.invars if compat.is_literal(atom)] == [2.0, 2.0]


def test_a_group_takes_no_more_than_the_largest_equation() -> None:
    def f(a: Any, b: Any, c: Any) -> Any:
        return a * b * c

    assert names(steps_of(f, X, X, X)[1]) == ["mul", "mul"]  # four arrays at once, instead of three
    assert names(steps_of(f, X, X, X, free=1)[1]) == ["mul+mul"]  # one is the caller's
    wide = jnp.ones((WIDTH, 4 * WIDTH))

    def beside(a: Any, b: Any, c: Any, w: Any) -> Any:
        return a * b * c @ w

    assert names(steps_of(beside, X, X, X, wide)[1]) == ["mul+mul", "dot_general"]


def test_long_chains_are_cut() -> None:
    def f(x: Any) -> Any:
        for _ in range(20):
            x = jnp.sin(x)
        return x

    _, steps = steps_of(f, X)
    assert [len(step.eqns) for step in steps] == [8, 8, 4]


# --- any program

UNARY = (jnp.sin, jnp.tanh, lambda x: -x, lambda x: x * 0.5, lambda x: x.astype(jnp.bfloat16) * 1)
BINARY = (lambda x, y: x * y, lambda x, y: x + y, lambda x, y: x @ y, jnp.minimum)


@st.composite
def programs(draw: Any) -> Callable[..., Any]:
    """A few values, each of one or two before it; results are some of them, added up."""
    number = st.integers(0, 10**6)
    lines = draw(
        st.lists(st.tuples(st.booleans(), number, number, number), min_size=2, max_size=14)
    )

    def program(*args: Any) -> Any:
        values = list(args)
        for is_binary, kind, first, second in lines:
            x, y = values[first % len(values)], values[second % len(values)]
            if is_binary:
                values.append(BINARY[kind % len(BINARY)](x, y.astype(x.dtype)))
            else:
                values.append(UNARY[kind % len(UNARY)](x))
        return sum(jnp.sum(jnp.tanh(v.astype(jnp.float32))) for v in values[-3:])

    return program


@given(program=programs(), free=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_groups_are_the_equations_in_a_valid_order(program: Any, free: int) -> None:
    jaxpr, steps = steps_of(jax.grad(program, (0, 1)), X, X.T, free=free)
    flat = [eqn for step in steps for eqn in (step.eqns if isinstance(step, Group) else [step])]
    assert Counter(map(id, flat)) == Counter(map(id, jaxpr.eqns))
    callers = set(jaxpr.invars[:free])
    reads = Counter(a for eqn in flat for a in eqn.invars if not compat.is_literal(a))

    def takes(step: Any) -> int:
        read = {a for a in step.invars if not compat.is_literal(a)} - callers
        return sum(aval_bytes(a.aval) for a in (*read, *step.outvars))

    largest = max(map(takes, jaxpr.eqns))
    there = {*jaxpr.invars, *jaxpr.constvars}
    for step in steps:
        assert there.issuperset(a for a in step.invars if not compat.is_literal(a))
        there.update(step.outvars)
        if isinstance(step, Group):
            assert takes(step) <= largest and 2 <= len(step.eqns) <= 8
            hidden = {eqn.outvars[0] for eqn in step.eqns[:-1]}
            assert hidden.isdisjoint(jaxpr.outvars) and all(reads[v] == 1 for v in hidden)
    assert there.issuperset(a for a in jaxpr.outvars if not compat.is_literal(a))


@given(program=programs(), share=st.sampled_from([0.6, 0.8]))
@settings(max_examples=15, deadline=None)
def test_results_are_those_of_plain_jax_within_any_budget(program: Any, share: float) -> None:
    runs: list[dtr.RunStatistics] = []
    both = functools.partial(dtr.value_and_grad, program, (0, 1), on_run=runs.append)
    found = both()(X, X.T)
    expected = jax.value_and_grad(program, (0, 1))(X, X.T)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2)  # some of it is bfloat16
    budget = max(int(share * runs[0].peak_bytes), runs[0].result_bytes + 8 * X.nbytes)
    within = both(budget=budget)(X, X.T)
    assert runs[1].peak_bytes <= budget and runs[1].operators == runs[0].operators
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(within), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# --- trees


def cell(w: Any, left: Any, right: Any) -> Any:
    """Not jitted: every operator on its own."""
    gates = jnp.concatenate([left, right], axis=-1) @ w
    keep, new = jnp.split(gates, 2, axis=-1)
    kept = jax.nn.sigmoid(keep)
    return kept * jnp.tanh(new) + (1.0 - kept) * (0.5 * left + 0.5 * right)


def tree(w: Any, node: Any) -> Any:
    def walk(node: Any) -> Any:
        return cell(w, walk(node[0]), walk(node[1])) if isinstance(node, tuple) else node

    return jnp.sum(walk(node) ** 2)


W = jax.random.normal(jax.random.key(1), (2 * WIDTH, 2 * WIDTH)) / WIDTH
LEAVES = [jax.random.normal(jax.random.key(i), (4 * WIDTH, WIDTH)) for i in range(3)]


def _random_tree(draw: Any, leaves: int) -> Any:
    if leaves == 1:
        return LEAVES[draw(st.integers(0, 2))]
    left = draw(st.integers(1, leaves - 1))
    return (_random_tree(draw, left), _random_tree(draw, leaves - left))


@given(data=st.data(), leaves=st.integers(2, 10))
@settings(max_examples=8, deadline=None)
def test_new_trees_make_no_new_groups(data: Any, leaves: int) -> None:
    runs: list[dtr.RunStatistics] = []
    run = dtr.value_and_grad(tree, on_run=runs.append)
    small = (LEAVES[0], LEAVES[1])
    for warm in (small, (small, LEAVES[2]), (small, small), (LEAVES[2], small)):
        run(W, warm)
    node = _random_tree(data.draw, leaves)
    expected = jax.value_and_grad(tree)(W, node)
    before = COMPILATIONS.count
    found = run(W, node)
    budget = max(runs[-1].peak_bytes // 2, runs[-1].result_bytes + 24 * LEAVES[0].nbytes)
    within = dtr.value_and_grad(tree, budget=budget, on_run=runs.append)(W, node)
    assert COMPILATIONS.count == before and runs[-1].compilations == 0
    assert runs[-1].peak_bytes <= budget
    for one, other, third in zip(*map(jax.tree.leaves, (found, expected, within)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        assert np.asarray(one).tobytes() == np.asarray(third).tobytes()


def test_fewer_operators_and_the_cap_holds_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ((LEAVES[0], LEAVES[1]), (LEAVES[2], (LEAVES[1], LEAVES[0])))
    runs: list[dtr.RunStatistics] = []
    step = dtr.value_and_grad(tree, on_run=runs.append, trace=True)
    together = step(W, node)
    assert any("+" in name for name in runs[0].names)
    budget = 2 * runs[0].peak_bytes // 3
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    seen: list[tuple[int, int]] = []

    def look(move: Any) -> None:
        alive = sum(array.nbytes for array in jax.live_arrays()) - before
        seen.append((move.memory_bytes, alive))

    dtr.value_and_grad(tree, budget=budget, on_move=look, on_run=runs.append)(W, node)
    assert runs[1].rematerializations > 0 and runs[1].peak_bytes <= budget
    assert all(alive <= counted <= budget for counted, alive in seen)

    monkeypatch.setattr(groups, "_MOST_EQUATIONS", 1)
    apart = step(W, node)
    assert all("+" not in name for name in runs[2].names)
    assert runs[0].operators < 0.9 * runs[2].operators
    assert runs[0].peak_bytes <= runs[2].peak_bytes
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
