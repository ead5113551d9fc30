"""Results that jax cannot look into, searched for traced arrays: these are nothing once the trace has ended."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from remat import compat
from remat.core.errors import TraceError

__all__ = ["check_holds_no_tracers"]

_MOST = 1000  # parts of an object that are looked at
_NO_PARTS = (types.ModuleType, type, str, bytes, int, float, complex, type(None))


def check_holds_no_tracers(result: Any) -> None:
    """Checks a result of a function that is being traced, one that is neither an array nor a pytree.

    Raises:
        TraceError: it has arrays in it that are being traced.
    """
    todo: list[Any] = [result]
    seen: dict[int, Any] = {}
    while todo and len(seen) < _MOST:
        part = todo.pop()
        if id(part) in seen or isinstance(part, _NO_PARTS):
            continue
        seen[id(part)] = part
        if compat.is_traced_here(part):
            kind = type(result)
            raise TraceError(
                f"the function returned a {kind.__module__}.{kind.__qualname__} with traced arrays in it, which "
                "jax cannot take out: it is neither an array nor a registered pytree. Return the arrays "
                "themselves, or register the class (jax.tree_util.register_dataclass); a module's class is not "
                "wrapped with remat.checkpoint but with remat.linen.remat, remat.nnx.remat or "
                "remat.equinox.filter_checkpoint"
            )
        todo += _parts(part)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
    if isinstance(value, types.GeneratorType):
        return [] if value.gi_frame is None else list(value.gi_frame.f_locals.values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # assigned later
        return False
