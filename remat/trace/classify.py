"""What an equation costs: by the table of primitives, or else by what its primitive lowers to.

`remat.core.primitives.TABLE` knows the primitives of the jax releases that it was written for. A later release, or
a package, has others. One without a row is lowered alone, for the default backend and on the shapes at hand, and
its StableHLO is read (`remat.trace.stablehlo`): with nothing but element-wise operations in it, it is as fusible
and may run as often as an addition; a reduction, a product, a gather are taken as such. What has side effects, what
does not lower alone (a collective needs its mesh), and what lowers to something that is not understood stays
opaque.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from remat import compat
from remat.core.classify import OpCost, classify
from remat.core.primitives import TABLE
from remat.trace.calls import key_of
from remat.trace.stablehlo import NotUnderstood, module_cost

__all__ = ["classify_equation"]

_CACHE_SIZE = 4096
_cache: dict[Any, OpCost | str] = {}


def classify_equation(eqn: Any) -> OpCost:
    """Returns what a planner needs to know about a jaxpr equation; never raises on an unknown primitive.

    A primitive with a row whose flops this jax spells otherwise keeps its row; its lowering gives the flops.
    """
    name = compat.name_of(eqn)
    in_avals, out_avals = compat.avals_of(eqn)
    cost = classify(name, eqn.params, in_avals, out_avals, effects=eqn.effects)
    if cost.known or cost.effectful:
        return cost
    found = _by_lowering(eqn, in_avals)
    if name in TABLE:
        understood = isinstance(found, OpCost)
        return replace(cost, flops=found.flops, known=True, reason="") if understood else cost
    if isinstance(found, OpCost):
        return found
    return replace(cost, reason=f"{cost.reason} ({found})")


def _by_lowering(eqn: Any, in_avals: Sequence[Any]) -> OpCost | str:
    """Returns the cost of what an equation lowers to, or why that is not understood."""
    try:
        key = _key(eqn, in_avals)
        hash(key)
    except TypeError:  # a parameter that cannot be hashed
        return _lowered(eqn, in_avals)
    if key not in _cache:
        if len(_cache) >= _CACHE_SIZE:
            _cache.pop(next(iter(_cache)))
        _cache[key] = _lowered(eqn, in_avals)
    return _cache[key]


def _key(eqn: Any, in_avals: Sequence[Any]) -> Any:
    """What a lowering depends on: primitive, parameters, operand types, platform, jax's settings."""
    types = tuple((getattr(a, "shape", None), getattr(a, "dtype", None)) for a in in_avals)
    platform = (jax.default_backend(), jax.config.jax_default_device)  # pyright: ignore[reportAttributeAccessIssue]
    params = tuple((name, key_of(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive, params, types, platform, compat.trace_context()


def _lowered(eqn: Any, in_avals: Sequence[Any]) -> OpCost | str:
    def alone(*operands: Any) -> Sequence[Any]:
        return compat.evaluate_equation(eqn, operands)

    try:
        operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in in_avals]
        module = jax.jit(alone).lower(*operands).compiler_ir("stablehlo")
    except (
        Exception
    ) as error:  # whatever a foreign primitive's rules raise where they cannot be used
        return f"it does not lower alone: {type(error).__name__}"
    try:
        return module_cost(module)
    except NotUnderstood as error:
        return f"it lowers to {error}"
