"""Encodings: the jax side of `remat.plan.Form`. Exact inverses, element-wise enough for XLA to fuse."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

__all__ = ["pack_bits", "unpack_bits"]


def _packed_axis(shape: tuple[int, ...]) -> int | None:
    """The last axis that eight divides, so that packing keeps the array's layout and sharding."""
    axes = [axis for axis, dim in enumerate(shape) if dim and dim % 8 == 0]
    return axes[-1] if axes else None


def pack_bits(mask: jax.Array) -> jax.Array:
    """Packs booleans eight to a byte.

    Args:
        mask: `bool[...]` of any shape.

    Returns:
        `uint8`, one axis shortened eightfold; or `uint8[ceil(n / 8)]` if eight divides no axis.
    """
    axis = _packed_axis(mask.shape)
    if axis is None:
        size = math.prod(mask.shape)
        mask = jnp.pad(mask.reshape(-1), (0, -size % 8))
        axis = 0
    shape = mask.shape
    grouped = mask.reshape(*shape[:axis], shape[axis] // 8, 8, *shape[axis + 1 :])
    weights = _bit_weights(grouped.ndim, axis + 1)
    # A product broadcasts the eight weights in place; `where` would make them an array as large as the
    # mask, which `scan` hoists out of the loop and keeps.
    return jnp.sum(grouped.astype(jnp.uint8) * weights, axis=axis + 1, dtype=jnp.uint8)


def unpack_bits(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `pack_bits`.

    Args:
        packed: what `pack_bits` returned.
        shape: shape of the mask that was packed.

    Returns:
        `bool[shape]`.
    """
    axis = _packed_axis(shape)
    if axis is None:
        bits = unpack_bits(packed, (8 * packed.shape[0],))
        return bits[: math.prod(shape)].reshape(shape)
    spread = jnp.expand_dims(packed, axis + 1)
    bits = (spread & _bit_weights(spread.ndim, axis + 1)) != 0
    return bits.reshape(shape)


def _bit_weights(ndim: int, axis: int) -> jax.Array:
    exponents = jax.lax.broadcasted_iota(
        jnp.uint8, tuple(8 if i == axis else 1 for i in range(ndim)), axis
    )
    return jnp.left_shift(jnp.uint8(1), exponents)
