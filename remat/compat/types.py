"""Abstract values: shape, placement, cotangents."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
from jax._src.lax import lax as _lax

__all__ = [
    "array_like",
    "cotangent_of",
    "is_symbolic",
    "ones_of",
    "shape_of",
    "varying_axes",
    "zeros_of",
]


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which a value inside `shard_map` differs; jax has spelt this in two ways."""
    axes = getattr(aval, "manual_axis_type", None)
    return (
        frozenset(axes.varying) if axes is not None else frozenset(getattr(aval, "vma", ()) or ())
    )


def cotangent_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract cotangent of a result: its shape, dtype and placement."""
    return shape_of(aval.to_ct_aval() if hasattr(aval, "to_ct_aval") else aval)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and placement of an abstract value, as an argument to trace with."""
    extra: dict[str, Any] = {}
    if varying_axes(aval):
        key = "manual_axis_type" if hasattr(aval, "manual_axis_type") else "vma"
        extra[key] = getattr(aval, key)
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and not getattr(sharding.mesh, "empty", True):
        extra["sharding"] = sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **extra)


def array_like(value: Any, aval: Any) -> Any:
    """Returns a value with the dtype of an abstract value, weak where that is: as jax makes its gradient."""
    is_weak = bool(getattr(aval, "weak_type", False))
    return _lax._convert_element_type(value, aval.dtype, weak_type=is_weak)


def zeros_of(aval: Any) -> Any:
    """Returns zeros of an abstract value, varying over mesh axes as it says."""
    return _filled(aval, 0)


def ones_of(aval: Any) -> Any:
    """Returns ones of an abstract value, varying over mesh axes as it says."""
    return _filled(aval, 1)


def _filled(aval: Any, value: int) -> Any:
    array = jax.numpy.full(aval.shape, value, aval.dtype)
    axes = tuple(sorted(varying_axes(aval)))
    return jax.lax.pcast(array, axes, to="varying") if axes else array


def is_symbolic(aval: Any) -> bool:
    """Whether an abstract value has a dimension that is not known (`jax.export.symbolic_shape`)."""
    return any(map(jax.export.is_symbolic_dim, getattr(aval, "shape", ())))
