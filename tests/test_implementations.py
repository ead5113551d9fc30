"""Other implementations of operators, chosen by policies: fewer bytes, gradients as promised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat.policies import Ilp, MinCut, Monet


def _x(shape: tuple[int, ...], seed: int = 1) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def _attention(w: Any, x: Any) -> Any:
    q = x @ w
    p = jax.nn.softmax(q @ q.T)
    return jnp.sum((p @ q) ** 2)


def test_softmax_from_its_output_on_request() -> None:
    w, x = 0.1 * _x((16, 16)), _x((64, 16), 2)
    plan = remat.plan(_attention, w, x, remat_policy=MinCut(implementations="all"))
    assert plan.graph.sites == ("softmax/output@0",)
    exact = remat.plan(_attention, w, x, remat_policy="min_cut")
    assert exact.graph.sites == ()
    # The matmul needs the probabilities; jax's rule needs what they are made of as well.
    assert plan.saved_bytes < exact.saved_bytes
    ours = jax.jit(jax.grad(remat.checkpoint(_attention, remat_policy=plan)))(w, x)
    np.testing.assert_allclose(ours, jax.grad(_attention)(w, x), rtol=1e-4, atol=1e-5)
    error = remat.encoding_error(_attention, w, x, remat_policy=MinCut(implementations="all"))
    assert 0 < error.max_relative_l2 < 1e-5


@pytest.mark.parametrize(
    "setting", [("softmax",), ("softmax/output",), ("softmax/output@0",), ("output",)]
)
def test_operators_can_be_named(setting: tuple[str, ...]) -> None:
    w, x = 0.1 * _x((16, 16)), _x((64, 16), 2)
    plan = remat.plan(_attention, w, x, remat_policy=MinCut(implementations=setting))
    assert plan.graph.sites == ("softmax/output@0",)


def test_monet_chooses_operators_within_a_budget() -> None:
    w, x = 0.1 * _x((16, 16)), _x((64, 16), 2)
    budget = int(1.3 * remat.plan(_attention, w, x).baseline_peak_bytes)
    plain = remat.plan(_attention, w, x, remat_policy=Ilp(), budget=budget)
    both = remat.plan(_attention, w, x, remat_policy=Monet(implementations="all"), budget=budget)
    assert plain.certificate is not None and both.certificate is not None
    assert both.certificate.value <= plain.certificate.value


def _waves(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w) ** 2)


def test_the_whole_baseline_is_always_enough() -> None:
    """Also where every plan with barriers takes more than plain JAX."""
    w, x = 0.1 * _x((16, 16)), _x((64, 16), 2)
    free = remat.plan(_waves, w, x, remat_policy="ilp")
    assert free.peak_bytes > free.baseline_peak_bytes
    plan = remat.plan(_waves, w, x, remat_policy="ilp", budget=1.0)
    assert plan.peak_bytes <= plan.baseline_peak_bytes
    assert plan.recomputed == ()
    ours = jax.jit(jax.grad(remat.checkpoint(_waves, remat_policy="ilp", budget=1.0)))(w, x)
    assert np.array_equal(ours, jax.jit(jax.grad(_waves))(w, x))


@pytest.fixture
def cubed() -> Iterator[str]:
    """An operator of the user's: a jitted function with a cheaper residual, recognised by its name."""

    @remat.register_implementation(
        operator="my_square_root",
        name="output",
        kind="output",
        exact=False,
        backward=lambda residuals, ct: (0.5 * ct / residuals[0],),
    )
    def my_square_root(x: Any) -> Any:
        y = jnp.sqrt(x)
        return y, (y,)

    yield my_square_root.id
    remat.unregister_implementation(my_square_root)


@jax.jit
def my_square_root(x: Any) -> Any:
    return jnp.exp(0.5 * jnp.log(x))


def test_users_register_their_own(cubed: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        y = my_square_root(1.0 + (x @ w) ** 2)
        return jnp.sum((y @ w) ** 2)

    w, x = 0.1 * _x((16, 16)), _x((64, 16), 2)
    policy = MinCut(implementations=(cubed,))
    plan = remat.plan(loss, w, x, remat_policy=policy)
    assert plan.graph.sites == ("my_square_root/output@0",)
    ours = jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=policy)))(w, x)
    np.testing.assert_allclose(ours, jax.grad(loss)(w, x), rtol=1e-4, atol=1e-6)
    # It is a plan like any other: it can be saved, and applied again.
    again = remat.Plan.from_json(plan.to_json())
    assert np.array_equal(jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=again)))(w, x), ours)


def test_users_operators_inside_loops(cubed: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        step = lambda x, _: (my_square_root(1.0 + (x @ w) ** 2), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

    w, x = 0.1 * _x((16, 16)), _x((8, 16), 2)
    plan = remat.plan(loss, w, x, remat_policy=MinCut(implementations=(cubed,)))
    assert plan.loops[0].plan.graph.sites == ("my_square_root/output@0",)
    ours = jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=plan)))(w, x)
    np.testing.assert_allclose(ours, jax.grad(loss)(w, x), rtol=1e-4, atol=1e-6)
