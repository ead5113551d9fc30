"""Gist: what it keeps, in which form, and what the lossy forms do to gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.policies import Gist

ROWS, WIDTH = 64, 128
LAYER = ROWS * WIDTH * 4


def _loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.sum(x**2)


def _args() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    ws = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[:3]]
    return ws, jax.random.normal(keys[3], (ROWS, WIDTH))


def test_masks_are_read_off_the_results() -> None:
    plan = remat.plan(_loss, *_args(), remat_policy="gist")
    # The results of two layers, which the next matmul needs; the last is multiplied by two for the gradient.
    assert plan.saved_bytes == 3 * LAYER + LAYER // 32
    assert plan.recompute_flops < ROWS * WIDTH * 8
    assert not any("lossy" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("precision", "share"),
    [("float16", 2), ("bfloat16", 2), ("float8_e4m3", 4), ("float8_e5m2", 4)],
)
def test_delayed_precision_reduction_is_lossy_and_measured(precision: str, share: int) -> None:
    policy = Gist(precision=precision)
    plan = remat.plan(_loss, *_args(), remat_policy=policy)
    floats = [entry for entry in plan.saved if entry.form == precision]
    assert [entry.nbytes for entry in floats] == [LAYER // share] * 3
    assert any("lossy" in note and precision in note for note in plan.notes)
    error = remat.encoding_error(_loss, *_args(), remat_policy=policy)
    assert error.forms == ((precision, 3 * LAYER, 3 * LAYER // share),)
    assert 1e-5 < error.max_relative_l2 < 0.2
    assert precision in str(error)


def test_sparse_storage_is_exact_where_there_is_room() -> None:
    enough = remat.encoding_error(_loss, *_args(), remat_policy=Gist(sparse=0.75))
    assert enough.forms[0][0] == "sparse:0.75" and enough.max_relative_l2 < 1e-6
    little = remat.encoding_error(_loss, *_args(), remat_policy=Gist(sparse=0.25))
    assert little.max_relative_l2 > 0.05


def test_a_saved_plan_keeps_its_forms() -> None:
    plan = remat.plan(_loss, *_args(), remat_policy=Gist(precision="float16"))
    again = remat.Plan.from_json(plan.to_json())
    assert again == plan
    ours, theirs = (
        jax.jit(jax.grad(remat.checkpoint(_loss, remat_policy=p)))(*_args()) for p in (plan, again)
    )
    assert all(map(jnp.array_equal, ours, theirs))


@pytest.mark.parametrize(
    "options", [{"precision": "bits"}, {"precision": "float12"}, {"sparse": 0.0}, {"sparse": 2.0}]
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(remat.PolicyError):
        Gist(**options)


def test_errors_of_complex_gradients_have_both_parts() -> None:
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(jnp.imag(w["c"]) * jnp.sin(x) + w["r"]) ** 2)

    x = jax.random.normal(jax.random.key(0), (64, 64))
    w = {"c": jnp.full(64, 0.5 + 0.7j, jnp.complex64), "r": jnp.ones(64)}
    policy = Gist(precision="float16")
    error = remat.encoding_error(loss, x, w, remat_policy=policy, argnums=1)
    of = {leaf.name: leaf for leaf in error.leaves}
    assert sorted(of) == ["[1]['c']", "[1]['r']"]
    plain = jax.jit(jax.grad(loss, 1))(x, w)["c"]
    ours = jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=policy), 1))(x, w)["c"]
    share = float(jnp.linalg.norm(ours - plain) / jnp.linalg.norm(plain))
    assert not of["[1]['c']"].exact and 1e-6 < share < 1e-2
    # The loss has its own random cotangent: the same share, another size.
    assert of["[1]['c']"].relative_l2 == pytest.approx(share, rel=0.3)


def test_complex_results_get_complex_cotangents() -> None:
    def turned(x: Any) -> Any:
        # Only what is imaginary in the cotangent comes through to x.
        return 1j * jnp.tanh(jnp.sin(x) * 2) * jnp.cos(x)

    x = jax.random.normal(jax.random.key(0), (64, 64))
    error = remat.encoding_error(turned, x, remat_policy=Gist(precision="float8_e4m3"))
    assert error.forms and 1e-4 < error.max_relative_l2 < 1


def test_errors_leave_out_what_has_no_gradient() -> None:
    def loss(model: Any, x: Any) -> Any:
        scale = model["scale"] if model["scaled"] else 1.0
        h = jnp.tanh(model["w"])[model["rows"]] * scale
        noise = jax.random.normal(model["key"], h.shape)
        return jnp.sum(jnp.tanh(h * x + noise) ** 2), model["rows"] + 1, h > 0, model["key"]

    model = {
        "key": jax.random.key(1),
        "rows": jnp.array([0, 2, 2]),
        "mask": jnp.array([True, False]),
        "scale": 2.0,
        "scaled": True,
        "w": jnp.linspace(0.1, 1, 3),
    }
    x = jnp.linspace(-1, 1, 3)
    error = remat.encoding_error(loss, model, x, remat_policy="gist", argnums=(-1, 0))
    assert sorted(leaf.name for leaf in error.leaves) == ["[0]['scale']", "[0]['w']", "[1]"]
    assert error.max_relative_l2 < 1e-5


def test_errors_leave_out_leaves_of_models_that_are_no_arrays() -> None:
    @jax.tree_util.register_pytree_node_class
    class Layer:
        def __init__(self, w: Any, rate: Any, act: Any) -> None:
            self.w, self.rate, self.act = w, rate, act

        def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
            return (self.w, self.rate, self.act), None

        @classmethod
        def tree_unflatten(cls, _: None, leaves: Any) -> Layer:
            return cls(*leaves)

    def loss(layer: Any, x: Any) -> Any:
        h = layer.act(x @ layer.w)
        return jnp.sum((h if layer.rate == 0 else h * layer.rate) ** 2)

    layer = Layer(jnp.full((8, 8), 0.1), 0.5, jnp.tanh)
    error = remat.encoding_error(loss, layer, jnp.ones((4, 8)), remat_policy=Gist("float16"))
    assert len(error.leaves) == 1
