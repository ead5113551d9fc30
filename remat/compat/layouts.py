"""Layouts: arrays whose elements lie in the order of their axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from remat.compat.types import is_symbolic

__all__ = ["row_major"]

_PLATFORMS = ("cuda", "rocm")
"""XLA:TPU pads the last axes of what lies in their order, and XLA:CPU knows no other order."""

_IS_PARTITIONED = jax.__version_info__ >= (0, 12)
"""Whether XLA's partitioner looks through a layout: before, it gathers the array on every device."""

_row_major = Primitive("row_major")


def row_major(x: Any) -> Any:
    """Returns `x`, which a GPU's compiler is told to hold with its last axis contiguous, and so on to the first.

    XLA chooses the layout of what a loop stacks by what writes it, and of what a loop reads by what reads it.
    Where the two differ it copies the whole stack between the loops. With one layout for both, a slice is
    transposed where it is written or read, in the kernel that does so.

    On other platforms, on several devices before jax 0.12, in an export (which may not hold layouts), for keys and
    for symbolic shapes it is `x` as it is.
    """
    aval = jax.typeof(x)
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended) or len(aval.shape) < 2:
        return x
    return _row_major.bind(x)


def _constrained(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


_lowered = mlir.lower_fun(_constrained, multiple_results=False)


def _lowering(context: Any, x: Any) -> Any:
    module = context.module_context
    is_alone = getattr(module.axis_context, "num_devices", None) == 1
    is_possible = (is_alone or _IS_PARTITIONED) and not is_symbolic(context.avals_in[0])
    if module.lowering_parameters.for_export or not is_possible:
        return [x]
    return _lowered(context, x)


def _batched(operands: Any, axes: Any) -> tuple[Any, int]:
    return _row_major.bind(operands[0]), axes[0]


_row_major.def_impl(lambda x: x)
_row_major.def_abstract_eval(lambda x: x)
ad.deflinear2(_row_major, lambda cotangent, _: (_row_major.bind(cotangent),))
batching.primitive_batchers[_row_major] = _batched
mlir.register_lowering(_row_major, lambda _, x: [x])
for _platform in _PLATFORMS:
    mlir.register_lowering(_row_major, _lowering, platform=_platform)
