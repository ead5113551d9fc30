"""What is traced of a call and what is part of the program: numbers, flags, functions, models."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat.trace.calls import flatten_call, key_of

X = jnp.linspace(0.1, 1, 12).reshape(3, 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """A registered class with everything that is no array as leaves."""

    weight: Any
    rate: Any
    activation: Any
    depth: Any
    training: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[n, 4]` to `[n, 4]`; looks at its numbers."""
        if self.rate == 0 or not self.training:
            return x
        for _ in range(self.depth):
            x = self.activation(x @ self.weight) * (1 - self.rate)
        return x


def model(**changed: Any) -> Model:
    """A model with a function, a float, an int and a flag as leaves."""
    fields = dict(weight=jnp.eye(4) * 0.7, rate=0.25, activation=jnp.tanh, depth=2, training=True)
    return Model(**{**fields, **changed})


def loss(m: Model, x: jax.Array) -> jax.Array:
    """A loss of a whole model."""
    return jnp.sum(m(x) ** 2)


def gradient(f: Callable[..., Any], m: Model, x: jax.Array = X) -> jax.Array:
    """Of the weight alone, as libraries of models take it."""
    return jax.grad(lambda w: f(dataclasses.replace(m, weight=w), x))(m.weight)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["min_cut", "full", "ilp"])
def test_models_with_leaves_that_are_no_arrays(policy: str) -> None:
    rematted = remat.checkpoint(loss, remat_policy=policy)
    for m in (model(), model(rate=0.0), model(rate=0), model(depth=1), model(training=False)):
        np.testing.assert_allclose(gradient(rematted, m), gradient(loss, m), rtol=1e-5)
    plan = remat.plan(loss, model(), X, remat_policy=policy)
    again = remat.checkpoint(loss, remat_policy=plan)
    np.testing.assert_allclose(gradient(again, model()), gradient(loss, model()), rtol=1e-5)


def test_models_as_results() -> None:
    def step(m: Model, x: jax.Array) -> tuple[Model, float, Any]:
        return dataclasses.replace(m, weight=m.weight * x.sum()), 2.0, {"name": "step"}

    got, number, rest = remat.checkpoint(step)(model(), X)
    assert got.activation is jnp.tanh and rest == {"name": "step"}
    assert (type(got.rate), type(got.depth), type(got.training)) == (float, int, bool)
    assert isinstance(number, jax.Array)
    np.testing.assert_allclose(got.weight, model().weight * X.sum(), rtol=1e-6)


def test_numbers_outside_of_models_are_traced_as_jax_does() -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    kinds: list[Any] = []

    def f(x: Any, tree: Any) -> jax.Array:
        kinds.extend(map(type, jax.tree.leaves(tree)))
        return jnp.sum(x * tree["a"][0] * tree["b"].first)

    tree = {"a": [2.0, 3], "b": Pair(2, 1j)}
    got = jax.grad(remat.checkpoint(f))(X, tree)
    np.testing.assert_allclose(got, np.full(X.shape, 4.0), rtol=1e-6)
    assert not {int, float, complex} & set(kinds)
    assert remat.plan(lambda scale, x: jnp.sum(jnp.sin(x * scale)), 2.0, X).graph.gradients


@pytest.mark.parametrize("declared", [False, True])
def test_equal_values_of_different_types_do_not_share_a_trace(declared: bool) -> None:
    seen: list[Any] = []

    def f(x: jax.Array, m: Any) -> jax.Array:
        seen.append(m if declared else m.rate)
        return jnp.sum(x)

    g = remat.checkpoint(f, static_argnums=1 if declared else ())
    values = (1, True, 1.0, 0.0, -0.0, (1, 2.0), (True, 2), np.int32(1) if declared else 1 + 0j)
    for value in values:
        g(X, value if declared else model(rate=value))
        g(X, value if declared else model(rate=value))
    if declared:
        assert [repr(v) for v in seen] == [repr(v) for v in values]
    else:  # a tuple is no leaf
        assert {repr(v) for v in seen} >= {"1", "True", "1.0", "0.0", "-0.0"}


class Mode(enum.Enum):
    """A hashable switch."""

    ON = 1


class Mutable:
    """Hashed by identity: what it holds may change."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scales."""
        return x * self.factor


class Unhashable(Mutable):
    """Equal by content, so without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable) and self.factor == other.factor

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Mutable, Unhashable])
@pytest.mark.parametrize("bound", [False, True])
def test_leaves_that_may_change_are_read_again(kind: Any, bound: bool) -> None:
    scale = kind(2.0)
    m = model(activation=scale.__call__ if bound else scale)
    rematted = remat.checkpoint(loss)
    np.testing.assert_allclose(gradient(rematted, m), gradient(loss, m), rtol=1e-5)
    scale.factor = 3.0
    np.testing.assert_allclose(gradient(rematted, m), gradient(loss, m), rtol=1e-5)
    remat.plan(loss, m, X)


def test_leaves_that_stay_share_a_trace() -> None:
    traces: list[int] = []

    def f(m: Model, x: jax.Array) -> jax.Array:
        traces.append(1)
        return loss(m, x)

    g = remat.checkpoint(f)
    for make in (
        lambda: jnp.tanh,
        lambda: jax.nn.relu,
        lambda: functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
        lambda: jax.nn.gelu,
        lambda: np.tanh if False else jnp.sin,
    ):
        traces.clear()
        gradient(g, model(activation=make())), gradient(g, model(activation=make()))
        assert len(traces) == 1


def test_keys() -> None:
    assert key_of(functools.partial(max, 1, key=abs)) == key_of(functools.partial(max, 1, key=abs))
    assert key_of(functools.partial(max, 1)) != key_of(functools.partial(max, True))
    assert key_of((1, (2.0,))) == key_of((1, (2.0,))) != key_of((1, (2,)))
    assert key_of(frozenset({1})) != key_of(frozenset({1.0}))
    assert key_of(float("nan")) == key_of(float("nan"))
    assert key_of(Mode.ON) == key_of(Mode.ON)

    @dataclasses.dataclass(frozen=True)
    class Config:
        size: Any

    assert key_of(Config(1)) == key_of(Config(1)) != key_of(Config(1.0))
    for value in (
        Mutable(1.0),
        Unhashable(1.0),
        [1],
        functools.partial(Mutable(1.0)),
        (Mutable(1.0),),
    ):
        with pytest.raises(TypeError):
            key_of(value)


def test_an_unhashable_part_of_the_structure_is_no_error() -> None:
    @jax.tree_util.register_pytree_node_class
    class Odd:
        def __init__(self, weight: Any, sizes: list[int]) -> None:
            self.weight, self.sizes = weight, sizes

        def tree_flatten(self) -> Any:
            return (self.weight,), self.sizes

        @classmethod
        def tree_unflatten(cls, sizes: list[int], children: Any) -> Any:
            return cls(children[0], sizes)

    rematted = remat.checkpoint(lambda odd: jnp.sum(jnp.sin(odd.weight)) * odd.sizes[0])
    sizes = [2]
    for _ in range(2):
        got = jax.grad(lambda w: rematted(Odd(w, sizes)))(X)  # noqa: B023
        np.testing.assert_allclose(got, jnp.cos(X) * sizes[0], rtol=1e-5)
        sizes = [3]


@pytest.mark.parametrize(
    "f", [lambda x, n: jnp.sum(x * jnp.ones((n,))), lambda x, n: x.sum() if n > 2 else x.max()]
)
def test_a_number_used_as_a_size_gets_a_hint(f: Callable[..., Any]) -> None:
    with pytest.raises(TypeError) as caught:
        jax.grad(remat.checkpoint(f))(X, 4)
    assert any("static_argnums=(1,)" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError) as caught:
        remat.plan(f, X, n=4)
    assert any("static_argnames" in note for note in caught.value.__notes__)
    jax.grad(remat.checkpoint(f, static_argnums=1))(X, 4)


def test_arrays_of_objects_are_part_of_the_program() -> None:
    words = np.array(["a", "b"], dtype=object)
    call = flatten_call((words, np.ones(2), np.float32(1), np.array([True])), {})
    assert len(call.leaves) == 3 and call.owners == [1, 2, 3] and call.key is None
    assert call.rebuild(call.leaves)[0][0] is words


def test_random_generators_are_looked_at_again() -> None:
    """They are hashed by identity, and every draw changes them."""
    for generator in (np.random.default_rng(0), np.random.RandomState(0), np.random.PCG64(0)):
        with pytest.raises(TypeError, match="may change"):
            key_of(generator)
    assert key_of(np.add) == key_of(np.add)


class _Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def _in_a_closure(x: Any) -> Any:
    y = jnp.sin(x)
    return lambda: y


@pytest.mark.parametrize("f", [_Box, _in_a_closure, lambda x: {"a": _Box([x])}])
def test_arrays_inside_of_what_is_no_pytree_are_an_error(f: Callable[[Any], Any]) -> None:
    with pytest.raises(remat.TraceError, match=r"returned a .* with traced arrays in it"):
        remat.checkpoint(f)(jnp.ones(3))


def test_objects_without_arrays_are_handed_on() -> None:
    box = _Box("text")
    x, found = remat.checkpoint(lambda x: (jnp.sin(x), box))(jnp.ones(3))
    assert found is box and x.shape == (3,)
    outer = jax.jit(lambda y: remat.checkpoint(lambda x, b: (jnp.sin(x), b))(y, _Box(y))[1].value)
    assert outer(jnp.ones(3)).shape == (3,)  # a tracer of a trace outside, which lives on


def test_static_names_that_are_no_arguments_are_an_error() -> None:
    def f(x: Any, number: int) -> Any:
        return x * number

    with pytest.raises(remat.TraceError, match=r"'numbers'.* did you mean 'number'"):
        remat.checkpoint(f, static_argnames="numbers")
    assert remat.checkpoint(lambda x, **more: x, static_argnames="numbers")(1.0, numbers=2) == 1


def test_errors_of_tracing_name_the_function_and_its_arguments() -> None:
    def decides(weights: Any, x: Any) -> Any:
        return x if weights["layer"][0, 0] > 0 else 2 * x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        remat.checkpoint(decides)({"layer": jnp.eye(2)}, jnp.ones(2))
    text = str(caught.value)
    assert "decides at" in text and "test_calls.py" in text and "weights_layer" in text
