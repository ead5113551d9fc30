"""The rewrites of joint programs that `remat` knows; see `remat.rewrite.menu`.

In the order in which they are tried:

`joint_mask`
    In `select(m1, 0, select(m2, 0, g) / k)`, the gradient of relu followed by dropout, both selects get the mask
    `m1 & m2`: one mask instead of two (Gist and Echo binarise them separately).
`relu_through_pool`
    The gradient of a max-pool of `relu(x)` is masked with `x > 0` after it was scattered. An element that a window
    selects equals the window's result, so the cotangent can be masked with the result before it is scattered, by
    codes as in `pool_codes`: the mask is then read off a value that the next layer keeps anyway.
`pool_codes`
    The gradient of a max-pool reads the pool's whole operand to find again which element was the largest. The
    forward pass makes the element's number within its window instead: 2 bits for 2 x 2 (Gist's relu-pool encoding;
    MONeT's intermediate-activated pooling).
`mask_from_output`
    A mask such as `x > 0` is computed from a value the backward pass reads anyway, `relu(x) > 0` (the
    output-activated relu of In-Place ABN and MONeT). What a mask and a value are conditions on is compared
    symbolically, so relu followed by dropout and a scaling is seen through.

All are exact: the same gradients, bit for bit, NaNs and infinities included, where sums have one order
(`remat.rewrite.pooling.is_exact`) and XLA rounds the other operators of both programs alike.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.rewrite import pooling
from remat.rewrite.menu import Edit, Rule, View, name_of
from remat.trace.program import Atom, Equation, is_inexact

__all__ = ["RULES"]

# What a condition is made of: ("bool", value id) or ("positive", value id).
Condition = frozenset[tuple[str, int]]
_DEPTH = 16
# Floats that have both zeros and every number of those they are wider than.
_WIDER = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}
_PLAIN_FLOATS = frozenset(_WIDER)


def _joint_masks(view: View) -> Iterator[tuple[int, Edit]]:
    for outer in view.program.equations:
        mask = _masking(view, outer)
        if mask is None or view.forward(outer.outputs[0]):
            continue
        chain: list[Equation] = []
        atom = outer.inputs[2]
        while (step := _zero_keeping(view, atom)) is not None:
            chain.append(step)
            atom = _scaled(view, step)
        inner = view.by(atom, "select_n")
        if inner is None or len(chain) > _DEPTH:
            continue
        second = _masking(view, inner)
        shared = any(
            v in view.roots or len(view.users.get(v, ())) > 1
            for v in (inner.outputs[0], *(e.outputs[0] for e in chain))
        )
        if second is None or shared or mask == second:
            continue
        if not (view.forward(mask) and view.forward(second)):
            continue
        masks = _strongest(view, mask, second)

        # Both selects stay, with one mask: without the inner one XLA would join scalings that it kept apart.
        def compute(
            zero: Any, inner_zero: Any, value: Any, *both: Any, chain: list[Equation] = chain
        ) -> list[Any]:
            joint = functools.reduce(operator.and_, both)
            value = jax.lax.select(joint, value, inner_zero)
            for equation in reversed(chain):
                value = _again(view, equation, value)
            return [jax.lax.select(joint, value, zero)]

        reads = (outer.inputs[1], inner.inputs[1], inner.inputs[2], *masks)
        yield outer.outputs[0], Edit((outer.outputs[0],), compute, reads, outer)


def _strongest(view: View, first: int, second: int) -> tuple[int, ...]:
    """The masks of which the conjunction is that of two; one of them alone if it implies the other."""
    one, other = _condition_of_mask(view, first), _condition_of_mask(view, second)
    if one >= other:
        return (first,)
    return (second,) if other >= one else (first, second)


def _masking(view: View, equation: Equation) -> int | None:
    """The mask of `select(mask, 0, x)`, a select that sets to positive zero where its mask is false."""
    if name_of(equation) != "select_n" or len(equation.inputs) != 3:
        return None
    mask = equation.inputs[0]
    if not isinstance(mask, int) or str(view.aval(mask).dtype) != "bool":
        return None
    same = view.aval(mask).shape == view.aval(equation.inputs[2]).shape
    return mask if same and view.is_zero(equation.inputs[1]) else None


def _zero_keeping(view: View, atom: Atom) -> Equation | None:
    """The equation of `x / k`, `x * k` or a cast of floats: what maps positive zero to positive zero."""
    equation = view.by(atom, "convert_element_type")
    if equation is not None:
        dtypes = [view.aval(a).dtype for a in (equation.inputs[0], atom)]
        return equation if all(str(dtype) in _PLAIN_FLOATS for dtype in dtypes) else None
    equation = view.by(atom, "div", "mul")
    scaling = _scaling(view, equation) if equation is not None else None
    return equation if scaling is not None and scaling[1] > 0 else None


def _scaling(view: View, equation: Equation) -> tuple[int, Any] | None:
    """What `x / k` or `x * k` scales, and the finite number it does it by; floats only: integers wrap around."""
    if str(view.aval(equation.outputs[0]).dtype) not in _PLAIN_FLOATS:
        return None
    value, factor = equation.inputs
    if name_of(equation) == "mul" and view.scalar(value) is not None:
        value, factor = factor, value
    number = view.scalar(factor)
    known = number is not None and bool(np.isfinite(number))
    return (value, number) if known and isinstance(value, int) else None


def _scaled(view: View, equation: Equation) -> Atom:
    """What a scaling or a cast is applied to."""
    scaling = None if name_of(equation) == "convert_element_type" else _scaling(view, equation)
    return equation.inputs[0] if scaling is None else scaling[0]


def _again(view: View, equation: Equation, value: Any) -> Any:
    """Applies a scaling or a cast to another value."""
    if name_of(equation) == "convert_element_type":
        return jax.lax.convert_element_type(value, view.program.avals[equation.outputs[0]].dtype)
    scaling = _scaling(view, equation)
    assert scaling is not None
    factor = jnp.asarray(scaling[1], value.dtype)
    return value / factor if name_of(equation) == "div" else value * factor


def _relus_through_pools(view: View) -> Iterator[tuple[int, Edit]]:
    for outer in view.program.equations:
        mask = _masking(view, outer)
        pool = view.by(outer.inputs[2], "select_and_scatter_add") if mask is not None else None
        if mask is None or pool is None or len(view.users.get(pool.outputs[0], ())) != 1:
            continue
        cotangent, operand = pool.inputs
        if pool.outputs[0] in view.roots or not isinstance(operand, int):
            continue
        result = _pooled(view, pool)
        if result is None or _condition_of_mask(view, mask) != _positive(view, operand):
            continue

        geometry = _geometry(pool)

        def compute(ct: Any, pooled: Any, values: Any, *, at: _Geometry = geometry) -> list[Any]:
            codes = pooling.window_codes(values, *at, positive=True)
            # The element that a window selects equals its result and is masked as that is, but for windows with
            # a NaN, whose codes tell.
            stays = jnp.where(jnp.isnan(pooled), codes != 0, pooled > 0)
            masked = jax.lax.select(stays, ct, jnp.zeros_like(ct))
            return [pooling.scatter_by_codes(masked, codes, values.shape, *at)]

        reads = (cotangent, result, operand)
        yield outer.outputs[0], Edit((outer.outputs[0],), compute, reads, outer)


_Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]


def _geometry(scatter: Equation) -> _Geometry:
    """Window, strides and padding."""
    params = scatter.source.params
    return (
        tuple(params["window_dimensions"]),
        tuple(params["window_strides"]),
        tuple(params["padding"]),
    )


def _pooled(view: View, scatter: Equation) -> int | None:
    """The result of the pool whose gradient an equation is."""
    keys = ("window_dimensions", "window_strides", "padding")
    operand = scatter.inputs[1]
    if not isinstance(operand, int) or not _is_max_pool(view, scatter):
        return None
    for user in view.users.get(operand, ()):
        params = user.source.params
        plain = all(d == 1 for k in ("base_dilation", "window_dilation") for d in params.get(k, ()))
        if name_of(user) != "reduce_window_max" or not plain:
            continue
        if all(tuple(params[k]) == tuple(scatter.source.params[k]) for k in keys):
            return user.outputs[0]
    return None


def _is_max_pool(view: View, scatter: Equation) -> bool:
    """Whether a scatter is the gradient of a maximum that `remat.rewrite.pooling` does exactly.

    Where windows overlap that means XLA:CPU's order of sums; XLA:GPU's own scatter has none. A dimension that is
    pooled may not be sharded by its type: windows reach over the ends of shards.
    """
    params, operand = scatter.source.params, view.aval(scatter.inputs[1])
    window, strides, padding = _geometry(scatter)
    alone = zip(window, strides, padding, strict=True)
    apart = (
        names is None or geometry == (1, 1, (0, 0))
        for names, geometry in zip(compat.explicit_axes(operand), alone, strict=True)
    )
    return (
        all(apart)
        and pooling.supported(params, operand.dtype) is None
        and pooling.is_exact(operand.dtype, params)
    )


def _pool_codes(view: View) -> Iterator[tuple[int, Edit]]:
    for scatter in view.program.equations:
        if name_of(scatter) != "select_and_scatter_add":
            continue
        cotangent, operand = scatter.inputs
        if not isinstance(operand, int) or not view.forward(operand):
            continue
        if not _is_max_pool(view, scatter):
            continue
        geometry = _geometry(scatter)

        def compute(ct: Any, values: Any, *, at: _Geometry = geometry) -> list[Any]:
            codes = pooling.window_codes(values, *at)
            return [pooling.scatter_by_codes(ct, codes, values.shape, *at)]

        yield (
            scatter.outputs[0],
            Edit((scatter.outputs[0],), compute, (cotangent, operand), scatter),
        )


def _masks_from_outputs(view: View) -> Iterator[tuple[int, Edit]]:
    outputs: dict[tuple[Condition, tuple[int, ...]], int] = {}
    masks: dict[int, Condition] = {}
    for equation in view.program.equations:
        for value in equation.outputs:
            if not view.forward(value):
                continue
            aval = view.program.avals[value]
            dtype = str(getattr(aval, "dtype", ""))
            if dtype == "bool" and _read_backward(view, value):
                condition = _condition_of_mask(view, value)
                if condition != frozenset({("bool", value)}):
                    masks[value] = condition
            elif is_inexact(aval) and _kept_anyway(view, value):
                condition = _positive(view, value)
                if condition != frozenset({("positive", value)}):
                    outputs.setdefault((condition, aval.shape), value)
    for mask, condition in masks.items():
        aval = view.program.avals[mask]
        value = outputs.get((condition, aval.shape))
        equation = view.makers[mask]
        if value is None or (name_of(equation) == "gt" and equation.inputs[0] == value):
            continue
        yield mask, Edit((mask,), lambda y: [y > 0], (value,), equation, backward_only=True)


def _read_backward(view: View, value: int) -> bool:
    return any(not view.forward(e.outputs[0]) for e in view.users.get(value, ()) if e.outputs)


def _kept_anyway(view: View, value: int) -> bool:
    """Whether a backward operator that does not fuse reads a value: it is then kept, or made again as a whole."""
    graph = view.graph
    return any(
        graph.ops[op].phase == "backward" and not graph.ops[op].fusible for op in graph.users[value]
    )


def _condition_of_mask(view: View, mask: int, depth: int = _DEPTH) -> Condition:
    """What has to hold for a mask to be true, as a conjunction."""
    equation = view.by(mask, "and", "gt", "lt")
    if equation is not None and depth > 0:
        name, inputs = name_of(equation), equation.inputs
        if name == "and" and all(isinstance(a, int) for a in inputs):
            parts = (_condition_of_mask(view, a, depth - 1) for a in inputs if isinstance(a, int))
            return frozenset().union(*parts)
        if name != "and":
            larger, smaller = inputs if name == "gt" else reversed(inputs)
            if isinstance(larger, int) and view.is_zero(smaller):
                return _positive(view, larger, depth - 1)
    return frozenset({("bool", mask)})


def _positive(view: View, value: int, depth: int = _DEPTH) -> Condition:
    """What has to hold for a value to be larger than zero, as a conjunction.

    Scaling up keeps the sign, scaling down may underflow; so may a cast to fewer bits.
    """
    whole = frozenset({("positive", value)})
    equation = view.makers.get(value)
    if equation is None or depth == 0:
        return whole
    name, inputs = name_of(equation), equation.inputs
    if name == "max":
        others = [a for a in inputs if not view.is_zero(a)]
        if len(others) == 1 and isinstance(others[0], int):
            same = view.program.avals[others[0]].shape == view.program.avals[value].shape
            return _positive(view, others[0], depth - 1) if same else whole
    if name == "select_n":
        mask = _masking(view, equation)
        inner = equation.inputs[2] if mask is not None else None
        if mask is not None and isinstance(inner, int):
            return _condition_of_mask(view, mask, depth - 1) | _positive(view, inner, depth - 1)
    if name in ("div", "mul"):
        scaling = _scaling(view, equation)
        if scaling is not None:
            source, factor = scaling
            grows = 0 < factor <= 1 if name == "div" else factor >= 1
            return _positive(view, source, depth - 1) if grows else whole
    if name == "convert_element_type" and isinstance(inputs[0], int):
        was, now = view.program.avals[inputs[0]].dtype, view.program.avals[value].dtype
        if str(now) in _WIDER.get(str(was), ()):
            return _positive(view, inputs[0], depth - 1)
    if name == "copy" and isinstance(inputs[0], int):
        return _positive(view, inputs[0], depth - 1)
    return whole


RULES: tuple[Rule, ...] = (
    Rule("joint_mask", "intermediate", _joint_masks),
    Rule("relu_through_pool", "output", _relus_through_pools),
    Rule("pool_codes", "intermediate", _pool_codes),
    Rule("mask_from_output", "output", _masks_from_outputs),
)
