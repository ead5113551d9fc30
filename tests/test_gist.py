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
