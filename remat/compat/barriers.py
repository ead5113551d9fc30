"""Optimization barriers that what is not differentiated passes as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

__all__ = ["tied"]


@jax.custom_jvp
def tied(arrays: Sequence[Any]) -> Sequence[Any]:
    """Returns the same arrays; XLA computes nothing from one of them before it has all of them.

    `jax.lax.optimization_barrier` makes tangents for all of its operands, for keys and integers too, and few
    operators on these have a derivative rule. Here they have none after the barrier if they had none before.
    """
    return jax.lax.optimization_barrier(arrays)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (arrays,), (given,) = primals, tangents
    known = iter(
        jax.lax.optimization_barrier([t for t in given if not isinstance(t, SymbolicZero)])
    )
    return tied(arrays), [t if isinstance(t, SymbolicZero) else next(known) for t in given]


tied.defjvp(_differentiated, symbolic_zeros=True)
