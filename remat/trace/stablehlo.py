"""What a StableHLO module does, as one operator's cost: how a primitive without a row of its own is classified.

Every operation is looked up as the primitive of `remat.core.primitives.TABLE` that it is the lowering of, so that
weights and the knowledge of what XLA fuses stay in one place; the module's cost puts these together. What is not in
the list below is not understood, and neither is anything that contains it: custom calls, loops and branches (how
often they run is not in the module), a stateful generator, composites (a backend may replace them), sends and
receives.

Works on anything that has the attributes of MLIR's Python objects; imports no jax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from remat.core.avals import aval_size
from remat.core.classify import OpCost, classify
from remat.core.primitives import OpClass

__all__ = ["NotUnderstood", "module_cost"]


class NotUnderstood(Exception):
    """A module with something in it of which nothing is known; the message names it."""


@dataclass(frozen=True)
class _Part:
    """One operation of a module.

    Attributes:
        cost: of the primitive that it is the lowering of.
        steps: that primitive, and those of its body; a cast of floats to integers is a rounding, one to booleans a
            comparison.
        moves: elements do not stay where they are; False for a constant or a scalar that is repeated.
        is_view: it only moves elements, or makes them from nothing.
    """

    cost: OpCost
    steps: frozenset[str]
    moves: bool
    is_view: bool


# --- operations and the primitives they are the lowering of --------------------------------------

_SAME_NAME = """
    abs add and atan2 cbrt ceil clamp complex cosine=cos divide=div exponential=exp
    exponential_minus_one=expm1 floor imag is_finite log log_plus_one=log1p logistic maximum=max
    minimum=min multiply=mul negate=neg not or popcnt=population_count power=pow real
    reduce_precision remainder=rem round_nearest_afz=round round_nearest_even=round rsqrt
    select=select_n shift_left shift_right_arithmetic shift_right_logical sign sine=sin sqrt
    subtract=sub tan tanh xor compare=eq convert=convert_element_type count_leading_zeros=clz
    acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc is_inf=is_finite
    is_neg_inf=is_finite is_pos_inf=is_finite lgamma mulhi next_after=nextafter polygamma sinh square
    zeta
    bitcast_convert=bitcast_convert_type broadcast broadcast_in_dim concatenate constant=iota iota pad
    reshape reverse=rev slice transpose
    reduce gather dynamic_slice dynamic_update_slice scatter=scatter_add optimization_barrier
    cholesky triangular_solve rng_bit_generator
    all_gather all_reduce=psum all_to_all collective_broadcast=pbroadcast collective_permute=ppermute
    reduce_scatter sharding_constraint
"""


def _primitives(names: str) -> Mapping[str, str]:
    pairs = (name.partition("=") for name in names.split())
    return MappingProxyType({name: primitive or name for name, _, primitive in pairs})


# StableHLO's names and those of CHLO, the dialect above it, do not collide.
_PRIMITIVES = _primitives(_SAME_NAME)
_DIALECTS = frozenset({"stablehlo", "chlo"})
_VIEWS = frozenset({"constant", "iota", "broadcast", "broadcast_in_dim", "reshape"})
_REDUCTIONS = frozenset({"stablehlo.reduce", "stablehlo.reduce_window"})
_RETURNS = frozenset({"func.return", "stablehlo.return"})
# What only says where an array lies.
_CONSTRAINT = "sharding_constraint"
_ANNOTATIONS = frozenset({"Sharding"})


def _numbers(attribute: Any) -> list[int]:
    """Returns the integers of an array attribute, in whichever of MLIR's two ways it is written."""
    return [int(number) for number in attribute]


def _window(operation: Any) -> dict[str, Any]:
    sizes = _numbers(operation.attributes["window_dimensions"])
    found = {"window_dimensions": sizes, "window_strides": [1] * len(sizes), "window_dilation": []}
    names = {"window_strides": "window_strides", "window_dilations": "window_dilation"}
    for attribute, parameter in names.items():
        if attribute in operation.attributes:
            found[parameter] = _numbers(operation.attributes[attribute])
    return found


def _dimensions(text: str, name: str) -> tuple[int, ...]:
    listed = re.search(rf"{name} = \[([^]]*)\]", text)
    return tuple(int(number) for number in listed[1].split(",")) if listed else ()


def _dot(operation: Any) -> dict[str, Any]:
    text = str(operation.attributes["dot_dimension_numbers"])
    return {
        "dimension_numbers": (
            (
                _dimensions(text, "lhs_contracting_dimensions"),
                _dimensions(text, "rhs_contracting_dimensions"),
            ),
            (
                _dimensions(text, "lhs_batching_dimensions"),
                _dimensions(text, "rhs_batching_dimensions"),
            ),
        )
    }


def _positions(layout: str, first: str, second: str) -> tuple[int, ...]:
    """Returns where two named dimensions of a layout such as `[b, 0, 1, f]` are, then the spatial ones in order."""
    letters = [letter.strip() for letter in layout.strip(" []").split(",")]
    space = sorted((letter for letter in letters if letter.isdigit()), key=int)
    return tuple(letters.index(letter) for letter in (first, second, *space))


def _convolution(operation: Any) -> dict[str, Any]:
    text = str(operation.attributes["dimension_numbers"])
    layouts = re.search(r"(\[[^]]*\])x(\[[^]]*\])->(\[[^]]*\])", text)
    if layouts is None:
        raise NotUnderstood(f"a convolution of layout {text}")
    rhs, out = _positions(layouts[2], "o", "i"), _positions(layouts[3], "b", "f")
    rank = len(out) - 2
    attributes = operation.attributes

    def per_axis(name: str) -> list[int]:
        return _numbers(attributes[name]) if name in attributes else [1] * rank

    flat = _numbers(attributes["padding"]) if "padding" in attributes else [0] * (2 * rank)
    return {
        "dimension_numbers": SimpleNamespace(rhs_spec=rhs, out_spec=out),
        "window_strides": per_axis("window_strides"),
        "padding": list(zip(flat[::2], flat[1::2], strict=True)),
        "lhs_dilation": per_axis("lhs_dilation"),
        "rhs_dilation": per_axis("rhs_dilation"),
    }


# Operations whose flops or fusion depend on their attributes: the primitive, and its parameters.
_WITH_PARAMETERS: Mapping[str, tuple[str, Callable[[Any], dict[str, Any]]]] = MappingProxyType(
    {
        "convolution": ("conv_general_dilated", _convolution),
        "dot_general": ("dot_general", _dot),
        "fft": ("fft", lambda op: {"fft_lengths": _numbers(op.attributes["fft_length"])}),
        "reduce_window": ("reduce_window", _window),
        "select_and_scatter": ("select_and_scatter", _window),
        "sort": ("sort", lambda op: {"dimension": op.attributes["dimension"].value}),
        "top_k": ("top_k", lambda op: {"k": op.attributes["k"].value}),
    }
)

# --- reading a module ----------------------------------------------------------------------------


def module_cost(module: Any) -> OpCost:
    """Returns the cost of a module's entry function, as if it were one operator.

    Args:
        module: an MLIR module of StableHLO, as `jax.stages.Lowered.compiler_ir("stablehlo")` returns it.

    Raises:
        NotUnderstood: something in it is not in the list of this file; the message names it.
    """
    functions = {f.name.value: f for f in module.body.operations if hasattr(f, "function_type")}
    parts = list(_parts(functions["main"], functions))
    return _together(parts)


def _parts(function: Any, functions: Mapping[str, Any]) -> Iterator[_Part]:
    for operation in _body(function):
        name = operation.operation.name
        if name in _RETURNS:
            continue
        if name == "func.call":
            yield from _parts(functions[operation.attributes["callee"].value], functions)
        else:
            yield _part(operation, name, functions)


def _body(owner: Any) -> Iterator[Any]:
    for region in owner.operation.regions:
        for block in region.blocks:
            yield from block.operations


def _part(operation: Any, full_name: str, functions: Mapping[str, Any]) -> _Part:
    dialect, _, name = full_name.partition(".")
    ins = [_aval(value, full_name) for value in operation.operation.operands]
    outs = [_aval(value, full_name) for value in operation.operation.results]
    known = dialect in _DIALECTS or full_name == f"sdy.{_CONSTRAINT}"
    step, cost = _cost(operation, full_name, ins, outs) if known else ("", None)
    if cost is None:
        raise NotUnderstood(_described(operation, full_name))
    if step == "convert_element_type" and _is_float(ins[0]) and not _is_float(outs[0]):
        step = "ne" if outs[0].dtype.name == "i1" else "round"
    inside = list(_parts(operation, functions))
    times = _operations_per_element(operation, full_name, inside)
    cost = replace(cost, flops=cost.flops * times)
    is_view = cost.op_class in (OpClass.VIEW, OpClass.METADATA)
    from_scalars = name in _VIEWS and all(aval_size(aval) == 1 for aval in ins)
    steps = frozenset({step}).union(*(part.steps for part in inside))
    return _Part(cost, steps, moves=is_view and not from_scalars, is_view=is_view)


def _is_float(aval: Any) -> bool:
    return not aval.dtype.name.startswith(("i", "u"))


def _cost(
    operation: Any, full_name: str, ins: Sequence[Any], outs: Sequence[Any]
) -> tuple[str, OpCost | None]:
    """Returns the primitive that an operation is the lowering of, and its cost; None if it is not understood."""
    name = full_name.partition(".")[2]
    parameters: dict[str, Any] = {}
    if name == "custom_call":
        if operation.attributes["call_target_name"].value not in _ANNOTATIONS:
            return name, None
        primitive = _CONSTRAINT
    elif name in _WITH_PARAMETERS:
        primitive, read = _WITH_PARAMETERS[name]
        parameters = read(operation.operation)
    elif name in _PRIMITIVES:
        primitive = _PRIMITIVES[name]
    else:
        return name, None
    cost = classify(primitive, parameters, ins, outs)
    return primitive, cost if cost.known else None


def _operations_per_element(operation: Any, name: str, inside: Sequence[_Part]) -> int:
    """Returns the operations of the function that a reduction combines elements with, 1 for everything else.

    The row of a reduction counts one operation for each element of each operand.
    """
    body = [part.cost for part in inside if not part.is_view]
    strange = [cost for cost in body if cost.op_class is not OpClass.POINTWISE]
    if strange:
        raise NotUnderstood(f"{name} with a {strange[0].op_class.value} operation inside")
    if name not in _REDUCTIONS:
        return 1
    return max(sum(cost.flops for cost in body) // len(operation.operation.results), 1)


def _described(operation: Any, name: str) -> str:
    if name == "stablehlo.custom_call":
        return f"{name} @{operation.attributes['call_target_name'].value}"
    return name


def _aval(value: Any, name: str) -> Any:
    """Returns the shape and dtype of an MLIR value, as much as costs depend on."""
    kind = value.type
    if not hasattr(kind, "shape") or not kind.has_static_shape:
        raise NotUnderstood(f"{name} on a {kind}")
    element = str(kind.element_type)
    dtype = "complex" if element.startswith("complex") else element
    return SimpleNamespace(shape=tuple(kind.shape), dtype=SimpleNamespace(name=dtype))


# --- putting it together -------------------------------------------------------------------------

# The kind of a module is the first of these that it contains.
_RANK = (
    OpClass.COLLECTIVE,
    OpClass.HEAVY,
    OpClass.INDEXED,
    OpClass.RANDOM,
    OpClass.REDUCTION,
    OpClass.POINTWISE,
    OpClass.VIEW,
    OpClass.METADATA,
)


def _together(parts: Sequence[_Part]) -> OpCost:
    """Returns the cost of several operations in one function.

    Arithmetic on elements that are also moved is `INDEXED`: an element of the result depends on others. With a
    reduction in it a function is fused as a reduction is, with what it reads alone, if nothing comes after the
    reduction; otherwise the reduction writes a buffer of its own.
    """
    costs = [part.cost for part in parts]
    kinds = {cost.op_class for cost in costs}
    strange = kinds.difference(_RANK)
    if strange:
        raise NotUnderstood(f"a {min(kind.value for kind in strange)} operation")
    kind = next((kind for kind in _RANK if kind in kinds), OpClass.METADATA)
    if kind is OpClass.POINTWISE and any(part.moves for part in parts):
        kind = OpClass.INDEXED
    reductions = [i for i, cost in enumerate(costs) if cost.op_class is OpClass.REDUCTION]
    last = max((i for i, part in enumerate(parts) if not part.is_view), default=-1)
    fusible = all(cost.fusible for cost in costs) and reductions in ([], [last])
    return OpCost(
        op_class=kind,
        flops=sum(cost.flops for cost in costs),
        fusible=fusible,
        heavy=kind is OpClass.HEAVY,
        random=any(cost.random for cost in costs),
        effectful=False,
        known=True,
        recomputable=all(cost.recomputable for cost in costs),
        reason=next((cost.reason for cost in costs if cost.reason), ""),
        steps=frozenset[str]().union(*(part.steps for part in parts)),
    )
