"""The part of one device of a `shard_map`, compiled as such: in a `shard_map` of its own, outside of that one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from remat import compat

__all__ = ["mapped_part"]


def mapped_part(
    function: Callable[..., Any],
    avals: Sequence[Any],
    mesh: AbstractMesh,
    mapped_axes: frozenset[str],
    devices: Sequence[Any],
    is_checked: bool,
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Returns a function that runs another one as the part of every device of a mesh, and the shapes it takes.

    Args:
        function: takes arrays, and returns a tree of them.
        avals: what it takes, as the device sees it.
        mesh, mapped_axes: of the `shard_map` that the function was traced in.
        devices: one for every place of the mesh; they need not be of the kind that it says.
        is_checked: whether that one has `check_vma=True`. Then the function differs over the axes that its types
            say; a new first axis of every array it takes and returns is sharded over them.
    """
    names = tuple(name for name in mesh.axis_names if name in mapped_axes)
    axes = [tuple(n for n in names if n in compat.varying_axes(aval)) for aval in avals]
    specs = [PartitionSpec(a) if a else PartitionSpec() for a in axes]
    places = Mesh(np.asarray(devices).reshape(mesh.axis_sizes), mesh.axis_names)
    everywhere = PartitionSpec(names) if is_checked else PartitionSpec()

    def part(*values: Any) -> list[Any]:
        own = [jax.lax.squeeze(x, (0,)) if a else x for x, a in zip(values, axes, strict=True)]
        results = jax.tree.leaves(function(*own))
        return [_over(x, names) for x in results] if is_checked else results

    mapped = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=everywhere,
        axis_names=mapped_axes,
        check_vma=is_checked,
    )
    shapes = [
        jax.ShapeDtypeStruct(
            (math.prod(mesh.shape[name] for name in a), *aval.shape) if a else aval.shape,
            aval.dtype,
            weak_type=bool(getattr(aval, "weak_type", False)),
            sharding=NamedSharding(places, spec),
        )
        for aval, a, spec in zip(avals, axes, specs, strict=True)
    ]
    return mapped, shapes


def _over(result: Any, names: tuple[str, ...]) -> Any:
    """A result with a new first axis of one, said to differ over all axes of the mesh."""
    already = compat.varying_axes(jax.typeof(result))
    others = tuple(name for name in names if name not in already)
    result = jax.lax.pcast(result, others, to="varying") if others else result
    return jax.lax.expand_dims(result, (0,))
