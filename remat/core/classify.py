"""What one operator costs: the row of its primitive, corrected where parameters or operands decide.

Works from the primitive's name, its parameters and anything with `.shape` and `.dtype`; imports no jax. A name that
is not in `TABLE` is `OpClass.OPAQUE`, is never recomputed, and says so in `OpCost.reason`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from remat.core.avals import aval_size, is_complex
from remat.core.flop_counts import Avals, Params, free, is_threefry, per_output
from remat.core.primitives import EFFECT_REASON, TABLE, OpClass, OpSpec

__all__ = ["OpCost", "classify", "dot_form"]

_UNKNOWN = "`{}` is not a primitive this library knows: taken as opaque, never recomputed"
_UNKNOWN_SPEC = OpSpec(OpClass.OPAQUE, free, recomputable=False)
# `IsMatrixMultiplicationTooSmallForRewriting`: of rows and columns together, times what is summed over.
_TOO_SMALL = 10_000_000
# Effects that only say that an operator mentions a mesh axis.
_HARMLESS_EFFECTS = frozenset({"NamedAxisEffect"})


@dataclass(frozen=True, slots=True)
class OpCost:
    """What a planner needs to know about one operator.

    Attributes:
        op_class: its kind.
        flops: operations in one run; counted or estimated, see `remat.core.flop_counts`.
        fusible: XLA:GPU merges it with its neighbours, so its result need not become a buffer.
        heavy: compute bound, recomputing it costs time even when fused.
        random: draws random bits (not: derives keys, which is cheap).
        effectful: must run exactly once.
        known: the primitive is in `TABLE` and its flops could be counted, or its lowering is understood.
        recomputable: may run a second time in the backward pass.
        reason: why it may not, or what is not known about it; empty otherwise.
        steps: the primitives that one without a row consists of, by its lowering.
    """

    op_class: OpClass
    flops: int
    fusible: bool
    heavy: bool
    random: bool
    effectful: bool
    known: bool
    recomputable: bool
    reason: str
    steps: frozenset[str] = frozenset()


def classify(
    name: str,
    params: Params,
    in_avals: Avals,
    out_avals: Avals,
    effects: Iterable[Any] = (),
) -> OpCost:
    """Returns what a planner needs to know about one operator; never raises on an unknown one.

    Args:
        name: the primitive's name.
        params: its parameters.
        in_avals: its inputs, anything with `.shape` and `.dtype`.
        out_avals: its outputs, likewise.
        effects: the effects jax attached to it; any that counts makes it run exactly once.

    Returns:
        Its cost. If the flops cannot be counted, because this jax spells the parameters otherwise,
        they are taken as one per output element, `known` is False and `reason` says so.
    """
    spec = _specialise(name, params, in_avals, out_avals)
    count, complaint = _count(spec, name, params, in_avals, out_avals)
    effectful = spec.effectful or _has_side_effect(params, effects)
    reason = spec.reason or (EFFECT_REASON if effectful else complaint)
    return OpCost(
        op_class=spec.op_class,
        flops=count,
        fusible=spec.fusible and not effectful,
        heavy=spec.op_class is OpClass.HEAVY,
        random=spec.random,
        effectful=effectful,
        known=name in TABLE and not complaint,
        recomputable=spec.recomputable and not effectful,
        reason=reason,
    )


def _specialise(name: str, params: Params, in_avals: Avals, out_avals: Avals) -> OpSpec:
    """Returns the table's row, corrected where a parameter or an operand decides."""
    spec = TABLE.get(name)
    if spec is None:
        return replace(_UNKNOWN_SPEC, reason=_UNKNOWN.format(name))
    if name == "device_put":
        return _device_put(spec, params)
    if name == "dot_general":
        return _dot(spec, params, in_avals)
    if name.startswith("reduce_window"):
        return replace(spec, fusible=not _windows_overlap(params))
    if (name == "reduce" and len(out_avals) > 1) or (
        name == "random_bits" and in_avals and not is_threefry(in_avals[0])
    ):
        return replace(spec, fusible=False)
    return spec


def _dot(spec: OpSpec, params: Params, in_avals: Avals) -> OpSpec:
    try:
        form, _ = dot_form(params["dimension_numbers"], in_avals)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return spec  # counting its flops says what is wrong
    if form == "product":
        return replace(TABLE["mul"], count=per_output(1))
    return spec if form == "matmul" else replace(TABLE["reduce_sum"], count=spec.count)


def dot_form(
    dimension_numbers: Any, avals: Sequence[Any]
) -> tuple[Literal["matmul", "product", "sum"], int]:
    """Returns what XLA:GPU makes of a `dot_general`, and which operand, 0 or 1, has all that is summed over.

    It follows XLA's algebraic simplifier (`HandleDot`, `ShouldStrengthReduceDotToReduce`), which leaves to the
    fusion what no matmul gains from: a product of elements if nothing is summed over, and a sum of products if one
    operand is a vector, or a batch of them, unless the other is large. Dimensions of size one do not count.

    Args:
        dimension_numbers: the equation's parameter.
        avals: the operands, anything with `.shape` and `.dtype`.
    """
    contracted, batch = dimension_numbers
    free = [
        math.prod(n for axis, n in enumerate(aval.shape) if axis not in summed and axis not in own)
        for aval, summed, own in zip(avals, contracted, batch, strict=True)
    ]
    count = math.prod(avals[0].shape[axis] for axis in contracted[0])
    larger = int(free[0] < free[1])
    if count == 1:
        return "product", larger
    if 1 not in free:
        return "matmul", larger
    is_small = free == [1, 1] or sum(free) * count < _TOO_SMALL
    is_wide = is_complex(avals[0]) or str(avals[0].dtype) == "float64"  # not for tensor cores
    return ("sum" if is_small or is_wide else "matmul"), larger


def _windows_overlap(params: Params) -> bool:
    sizes = params.get("window_dimensions", ())
    strides = params.get("window_strides", ())
    dilated = any(step != 1 for step in params.get("window_dilation", ()))
    return (
        dilated
        or len(sizes) != len(strides)
        or any(size > stride for size, stride in zip(sizes, strides, strict=True))
    )


def _device_put(spec: OpSpec, params: Params) -> OpSpec:
    """Tells an identity (no target) from a transfer, which is not repeated."""
    if any(device is not None for device in params.get("devices", ())):
        return replace(
            spec,
            recomputable=False,
            reason="a transfer between devices or memories is not repeated",
        )
    return replace(spec, fusible=True)


def _count(
    spec: OpSpec, name: str, params: Params, in_avals: Avals, out_avals: Avals
) -> tuple[int, str]:
    """Returns the flops, and what went wrong if this jax spells the parameters differently."""
    try:
        return int(spec.count(params, in_avals, out_avals)), ""
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        guess = sum(map(aval_size, out_avals))
        return (
            guess,
            f"cannot count the flops of `{name}` ({error!r}): taken as one per output element",
        )


def _has_side_effect(params: Params, effects: Iterable[Any]) -> bool:
    marked = params.get("has_side_effect") or params.get("has_side_effects")
    return bool(marked) or any(type(effect).__name__ not in _HARMLESS_EFFECTS for effect in effects)
