"""The mesh of the `jax.shard_map` around what is traced, and a way out of all meshes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax._src import core as _core
from jax.sharding import AbstractMesh, AxisType, Mesh

__all__ = ["manual_mesh", "outside_of_meshes"]

_NO_MESH = Mesh(np.empty((), dtype=object), ())


def manual_mesh() -> tuple[AbstractMesh, frozenset[str]] | None:
    """Returns the mesh of the `shard_map` around what is traced, and the axes it is mapped over; None outside."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = frozenset(mesh.manual_axes)
    if not axes:
        return None
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = tuple(AxisType.Auto if name in axes else kind for name, kind in types)
    device = {"abstract_device": mesh.abstract_device}
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=free, **device), axes


@contextlib.contextmanager
def outside_of_meshes() -> Iterator[None]:
    """Traces what is in it as if no mesh were set and nothing mapped around it, so that it can have its own."""
    axes = _core.get_axis_env()
    _core.trace_ctx.set_axis_env(_core.top_axis_env)
    try:
        with _core.eval_context(), jax.set_mesh(_NO_MESH):
            yield
    finally:
        _core.trace_ctx.set_axis_env(axes)
