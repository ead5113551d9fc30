"""What stays opaque and holds memory is a warning that says what, where and how much."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from new_primitives import new_primitive

import remat
from remat.planning.opaque import opaque_values

X = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
W = jax.ShapeDtypeStruct((128, 128), jnp.float32)


def _through_host(x: Any) -> Any:
    return jax.lax.map(lambda row: row, x) * 1.0


foreign = new_primitive("foreign", _through_host)  # a loop inside: not understood
understood = new_primitive("understood", lambda x: jnp.sin(x) * jnp.cos(x))


def _loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(foreign(jnp.sin(x @ w))))


def _line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def _warned(run: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [entry for entry in caught if entry.category is remat.RematWarning]


def test_a_warning_names_primitive_line_and_bytes() -> None:
    (entry,) = _warned(lambda: remat.plan(lambda w, x: _loss(w, x), W, X))
    text = str(entry.message)
    line = _line_of(_loss, "foreign(")
    assert "foreign" in text and "2.0 MiB" in text and "stablehlo.while" in text
    assert f"test_opaque.py:{line}" in text
    assert (entry.filename, entry.lineno) == (__file__, line)
    assert issubclass(remat.RematWarning, UserWarning)


@pytest.mark.parametrize("lowering", ["staged", "policy"])
def test_one_warning_per_planning(lowering: str) -> None:
    def run() -> None:
        rematted = remat.checkpoint(lambda w, x: _loss(w, x), lowering=lowering)
        w, x = jnp.ones(W.shape), jnp.ones(X.shape)
        step = jax.jit(jax.grad(rematted))
        for _ in range(3):
            step(w, x)

    assert len(_warned(run)) == 1


def test_loops_are_counted_with_all_their_iterations_and_warned_of_once() -> None:
    def loss(w: Any, x: Any) -> Any:
        def inner(x: Any, _: Any) -> Any:
            return jnp.sin(foreign(jnp.sin(x @ w))), None

        def outer(x: Any, _: Any) -> Any:
            return jax.lax.scan(inner, x, None, length=3)[0], None

        return jnp.sum(jax.lax.scan(outer, x, None, length=5)[0])

    found = []
    caught = _warned(lambda: found.append(remat.plan(loss, W, X)))
    assert len(caught) == 1
    (entry,), total = opaque_values(found[0])
    assert entry.nbytes == 15 * 4096 * 128 * 4
    assert total > 4 * entry.nbytes
    assert "30.0 MiB" in str(caught[0].message)


def test_one_line_used_often_is_one_entry() -> None:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.sin(foreign(jnp.sin(x @ w)))
        return jnp.sum(x)

    (entry,) = _warned(lambda: remat.plan(loss, W, X))
    assert str(entry.message).count("foreign at") == 1 and "8.0 MiB" in str(entry.message)


def _pure(x: Any) -> Any:
    return jax.pure_callback(np.sin, x, x, vmap_method="broadcast_all")


def _impure(x: Any) -> Any:
    return io_callback(np.sin, x, x)


def _sine(host: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The sine, on the host in the forward pass."""
    sine = jax.custom_vjp(host)
    sine.defvjp(lambda x: (host(x), x), lambda x, g: (jnp.cos(x) * g,))
    return sine


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize(("host", "reason"), [(_pure, "host"), (_impure, "side effects")])
def test_callbacks_are_warned_of(host: Callable[[Any], Any], reason: str, lowering: str) -> None:
    sine = _sine(host)

    def loss(w: Any, x: Any) -> Any:
        def body(x: Any, _: Any) -> tuple[Any, None]:
            return jnp.tanh(sine(jnp.tanh(x @ w))), None

        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])

    (entry,) = _warned(lambda: remat.plan(loss, W, X, lowering=lowering))
    text = str(entry.message)
    assert f"test_opaque.py:{_line_of(loss, 'sine(')} keeps 6.0 MiB" in text and "_callback" in text
    assert reason in text and "operators of jax" in text


def test_no_warning_of_callbacks_that_hold_nothing() -> None:
    def printing(w: Any, x: Any) -> Any:
        h = jnp.sin(x @ w)
        jax.debug.print("{}", h)
        return jnp.sum(jnp.sin(h))

    def small(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w)) * jnp.sin(_sine(_pure)(jnp.sin(x[:1, :8] @ w[:8, :8]))).sum()

    def unread(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w) + _sine(_impure)(x))

    for function in (printing, small, unread):
        assert not _warned(lambda f=function: remat.plan(f, W, X)), function


def test_no_warning_of_what_is_small_unread_or_understood() -> None:
    def small(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w)) * jnp.sin(foreign(jnp.sin(x[:1, :8] @ w[:8, :8])).sum())

    def unread(w: Any, x: Any) -> Any:
        return jnp.sum(
            jnp.sin(x @ w) + foreign(x)
        )  # linear in it: the backward pass does not read it

    def result(w: Any, x: Any) -> Any:
        h = foreign(jnp.sin(x @ w))
        return jnp.sum(jnp.sin(h)), h

    def fine(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(understood(jnp.sin(x @ w))))

    for function in (small, unread, result, fine):
        assert not _warned(lambda f=function: remat.plan(f, W, X)), function
    # A large share of little.
    few = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    assert not _warned(lambda: remat.plan(lambda w, x: _loss(w, x), W, few))


def test_it_can_be_silenced_and_made_an_error() -> None:
    def loss(w: Any, x: Any) -> Any:
        return _loss(w, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=remat.RematWarning)
        remat.plan(loss, W, X)
        warnings.filterwarnings("error", category=remat.RematWarning)
        with pytest.raises(remat.RematWarning):
            remat.plan(lambda w, x: _loss(w, x), W, X)
