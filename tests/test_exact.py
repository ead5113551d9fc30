"""Every model, every policy: gradients bit-equal to plain JAX's, dropout on.

Operators run one by one here (`jax.disable_jit`), so equal operators give equal bits: a plan may change where and
how often an operator runs, never what it computes. Compiled programs agree to rounding only, because XLA fuses
another program differently; `test_lower.py` and `test_flax.py` hold that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from models import cases
from remat.policies import POLICIES, MinCut

EXACT_CASES = (
    "gpt_blocks_scan_small",
    "resnet18_small",
    "lstm_small",
    "residual_mlp_small",
)
VARIANTS: dict[str, Any] = {
    **{name: factory() for name, factory in POLICIES.items()},
    "min_cut_paper": MinCut.paper(),
    "min_cut_scores": MinCut(heavy="batched", random="cheap"),
}


def same_bits(a: Any, b: Any) -> bool:
    """Whether two pytrees are equal bit for bit, NaNs included."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype for x, y in leaves
    )


def assert_close(got: Any, want: Any) -> None:
    """Compares to float32 rounding of the largest gradient."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert float(np.max(np.abs(a - b))) <= 1e-6 * (1 + float(np.max(np.abs(b))))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_CASES)
def test_gradients_are_bit_equal(name: str) -> None:
    loss, shapes = cases.CASES[name]()
    args = cases.materialize(shapes, 0)

    def tagged(*args: Any) -> jax.Array:  # `names` wants a tag
        return checkpoint_name(loss(*args), "loss")

    with jax.disable_jit():
        want = jax.value_and_grad(loss)(*args)
        assert bool(jnp.isfinite(want[0]))
        for label, policy in VARIANTS.items():
            ours = remat.checkpoint(tagged, remat_policy=policy)
            assert same_bits(jax.value_and_grad(ours)(*args), want), label
        # Regions of the policy lowering may change the order in which a value's cotangents are added up.
        for policy in ("min_cut", "full"):
            ours = remat.checkpoint(loss, remat_policy=policy, lowering="policy")
            assert_close(jax.value_and_grad(ours)(*args), want)
