"""Arrays whose sharding is part of their type: those of meshes with explicit axes, the default of `jax.make_mesh`.

There jax does not guess how an operation's result is sharded where an axis is split or several become one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["explicit_axes", "num_shards", "reshape", "reshard_like"]


def explicit_axes(aval: Any) -> tuple[Any, ...]:
    """Returns for every axis of an array the mesh axes that its type says it is sharded over, None if none."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in getattr(sharding.mesh, "axis_types", ()):
        return (None,) * len(aval.shape)
    return tuple(sharding.spec)


def num_shards(aval: Any, axis: int) -> int:
    """Returns how many parts an axis of an array is sharded into, by its type."""
    names = explicit_axes(aval)[axis]
    if names is None:
        return 1
    sizes = aval.sharding.mesh.shape
    return math.prod(sizes[name] for name in (names if isinstance(names, tuple) else (names,)))


def reshape(array: jax.Array, shape: Sequence[int], origins: Sequence[int | None]) -> jax.Array:
    """Reshapes an array, and says how the result is sharded.

    Args:
        array: any array.
        shape: of the result.
        origins: for every axis of the result, the axis of `array` whose sharding it has, if it can be divided so;
            None for an axis that is not sharded.
    """
    aval = jax.typeof(array)
    names = explicit_axes(aval)
    if not any(names):
        return array.reshape(shape)
    spec = [
        names[axis] if axis is not None and size % num_shards(aval, axis) == 0 else None
        for size, axis in zip(shape, origins, strict=True)
    ]
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*spec))
    return jax.lax.reshape(array, shape, out_sharding=sharding)


def reshard_like(array: jax.Array, aval: Any) -> jax.Array:
    """Shards an array as the type of another says."""
    if explicit_axes(aval) == explicit_axes(jax.typeof(array)):
        return array
    return jax.sharding.reshard(array, aval.sharding)
