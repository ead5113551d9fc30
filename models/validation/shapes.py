"""What the factories of this package share: the type of a case and short names for argument shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Shape = jax.ShapeDtypeStruct
Case = tuple[Callable[..., Any], tuple[Any, ...]]
"""`(loss, example_args)`, see `models.cases`."""


def floats(*shape: int) -> Shape:
    """An array of float32."""
    return Shape(shape, jnp.float32)


def integers(*shape: int) -> Shape:
    """An array of int32."""
    return Shape(shape, jnp.int32)


def random_key() -> Shape:
    """A PRNG key as `jax.random.key` makes it."""
    return jax.eval_shape(lambda: jax.random.key(0))
