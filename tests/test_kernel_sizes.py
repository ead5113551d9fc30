"""XLA does not merge without end: what moves elements about is made once per place at which it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from models.cases import materialize
from models.development import NETWORKS
from remat.policies import Unchanged

SIDE = 64
NBYTES = 4 * SIDE * SIDE


def stencil(steps: int) -> Callable[[jax.Array], jax.Array]:
    def loss(u: jax.Array) -> jax.Array:
        for _ in range(steps):
            around = sum(jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1))
            u = u + 0.001 * u * around
        return jnp.sum(u)

    return loss


@pytest.mark.parametrize("steps", [8, 20])
def test_every_step_of_a_stencil_is_a_buffer(steps: int) -> None:
    u = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    more, fewer = (remat.plan(stencil(n), u).baseline_peak_bytes for n in (2 * steps, steps))
    assert more - fewer >= steps * NBYTES


def wave(u: jax.Array) -> jax.Array:
    """Leapfrog: every step reads the two before it."""
    before, now = u, u
    for _ in range(24):
        around = sum(jnp.roll(now, shift, axis) for shift in (1, -1) for axis in (0, 1)) - 4 * now
        before, now = now, 2 * now - before + 0.1 * around - 0.01 * now**3
    return jnp.sum(now**2)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("build", "share"),
    [
        (NETWORKS["stencil"], 0.6),
        (lambda: (stencil(20), (jax.ShapeDtypeStruct((1024, 1024), jnp.float32),)), 0.4),
        (lambda: (wave, (jax.ShapeDtypeStruct((1024, 1024), jnp.float32),)), 0.6),
    ],
    ids=["gray_scott", "five_points", "wave"],
)
def test_stencils_have_plans_of_less_memory(build: Callable[[], Any], share: float) -> None:
    """As the compiler sees it, too."""
    loss, args = build()
    plan = remat.plan(loss, *args, remat_policy="ilp", budget=share, confirm=False)
    assert plan.peak_bytes <= share * plan.baseline_peak_bytes
    planned = remat.checkpoint(loss, remat_policy=plan)
    plain, report = (
        remat.compile_report(jax.grad(f), *args, device="h200") for f in (loss, planned)
    )
    assert report.temp_bytes <= share * plain.temp_bytes
    assert report.temp_bytes <= 1.1 * plan.peak_bytes
    values = materialize(args)
    for ours, theirs in zip(
        jax.tree.leaves(jax.grad(planned)(*values)),
        jax.tree.leaves(jax.grad(loss)(*values)),
        strict=True,
    ):
        assert jnp.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(theirs))))


def heat(u: jax.Array) -> jax.Array:
    """Thirty steps, whose rate is dear to compute and is read in both passes."""
    for _ in range(30):
        u = u + 0.1 * jnp.sin(u) * (jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u)
    return jnp.sum(u**2)


def decayed_sums(rates: jax.Array, x: jax.Array) -> jax.Array:
    """`y[t] = rate[t] * y[t - 1] + x[t]` by a parallel scan: of its levels the largest are never written."""

    def after(
        first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, y = jax.lax.associative_scan(after, (jax.nn.sigmoid(rates), jnp.tanh(x)))
    return jnp.sum(y**2)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("policy", ["none", "min_cut", "full"])
@pytest.mark.parametrize(
    ("loss", "shapes"), [(heat, [(2**20,)]), (decayed_sums, [(1024, 16384), (1024, 16384)])]
)
def test_what_is_written_for_the_limit_is_what_saves_least(
    loss: Callable[..., jax.Array], shapes: list[tuple[int, ...]], policy: str
) -> None:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    plan = remat.plan(loss, *args, remat_policy=Unchanged() if policy == "none" else policy)
    wrapped = remat.checkpoint(loss, remat_policy=plan)
    report = remat.compile_report(jax.grad(wrapped), *args, device="h200")
    assert plan.peak_bytes == pytest.approx(report.temp_bytes, rel=0.25)
