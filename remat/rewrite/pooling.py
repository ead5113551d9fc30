"""Max-pool by argmax codes: which element of its window a maximum is, instead of the whole operand.

jax differentiates `reduce_window_max` by `select_and_scatter_add`, which reads the pool's operand again in
the backward pass. All that it needs of it is one number per window: the place of the selected element. The
codes are small integers (0..3 for a 2x2 window), a fraction of the operand's bytes (Gist, section 4.1, keeps
the same map).

The selection is XLA's: a window's elements are scanned in row-major order, and the selected element is
replaced by the next one unless `selected >= element`. So the first of equal elements wins, and a NaN is
replaced by whatever follows it. Like jax on CPU and GPU, the operand is padded with -inf first, and such an
element takes part like any other: where it wins (a window of -inf, or a NaN before it), the gradient is
lost. jax on TPU never selects padding and differs in these two cases.

Both functions consist of slices, pads, selects and broadcasts, which XLA fuses; there is no gather or
scatter. The gradient is computed in blocks of one stride each: block `q` of a dimension is reached from the
windows `q, q - 1, ..., q - ceil(window / stride) + 1`, so a gradient has prod(ceil(window / stride)) terms,
and only one, without any addition, if windows do not overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from remat import compat
from remat.core.errors import TraceError

__all__ = [
    "MAX_WINDOW_ELEMENTS",
    "Padding",
    "is_exact",
    "overlaps",
    "pooled_shape",
    "scatter_by_codes",
    "supported",
    "window_codes",
]

Padding = str | Sequence[tuple[int, int]]

MAX_WINDOW_ELEMENTS = 256
"""The largest window: codes are 8 bits."""

_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Codes that are never selected: of a window that does not exist, of an element outside of a window.
_NO_WINDOW, _OUTSIDE = -1, -2
_POOLS = ("reduce_window_max", "select_and_scatter_add")


def supported(params: Mapping[str, Any], dtype: Any = None) -> str | None:
    """Says why a pool cannot be done by codes.

    Args:
        params: parameters of a `reduce_window_max` or `select_and_scatter_add` equation, or a mapping with
            at least `window_dimensions`, `window_strides` and `padding`.
        dtype: dtype of the operand; None to leave it out of consideration.

    Returns:
        The reason, None if it can.
    """
    window, strides = params["window_dimensions"], params["window_strides"]
    select = params.get("select_prim")
    if select is not None and getattr(select, "name", select) != "ge":
        return f"it selects by {getattr(select, 'name', select)!r}, not by 'ge': not a maximum"
    for key in ("window_dilation", "base_dilation"):
        if any(step != 1 for step in params.get(key) or ()):
            return f"{key}={tuple(params[key])}: windows have holes"
    if len(window) != len(strides):
        return f"{len(window)} window dimensions but {len(strides)} strides"
    if any(step < 1 for step in (*window, *strides)):
        return f"window {tuple(window)} or strides {tuple(strides)} not positive"
    if math.prod(window) > MAX_WINDOW_ELEMENTS:
        return (
            f"its window {tuple(window)} has {math.prod(window)} elements, "
            f"more than the {MAX_WINDOW_ELEMENTS} that an 8-bit code can tell apart"
        )
    padding = params["padding"]
    if not isinstance(padding, str) and any(min(pair) < 0 for pair in padding):
        return f"padding {tuple(padding)} is negative"
    if dtype is not None and jnp.dtype(dtype).name not in _DTYPES:
        return f"its dtype is {jnp.dtype(dtype).name}, not one of {', '.join(_DTYPES)}"
    return None


def is_exact(dtype: Any, params: Mapping[str, Any], *, platform: str = "cpu") -> bool:
    """Whether the gradient by codes is bit-equal to jax's.

    Args:
        dtype: dtype of the operand.
        params: as for `supported`.
        platform: where it runs. XLA:GPU adds the cotangents of overlapping windows in no fixed order, so
            there nothing is bit-equal to it; windows that do not overlap are exact everywhere.

    Returns:
        True if every gradient is bit-equal (NaNs in the same places, of whatever payload).
    """
    if supported(params, dtype) is not None:
        return False
    is_disjoint = not overlaps(params["window_dimensions"], params["window_strides"])
    return is_disjoint or platform == "cpu"


def overlaps(window_dimensions: Sequence[int], window_strides: Sequence[int]) -> bool:
    """Whether an element of the operand may lie in more than one window."""
    return any(w > s for w, s in zip(window_dimensions, window_strides, strict=True))


def pooled_shape(
    operand_shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Padding,
) -> tuple[int, ...]:
    """Returns the shape of the pool's result, that of the codes."""
    pads = _pads(operand_shape, window_dimensions, window_strides, padding)
    return tuple(
        max(0, (low + size + high - window) // stride + 1)
        for size, window, stride, (low, high) in zip(
            operand_shape, window_dimensions, window_strides, pads, strict=True
        )
    )


def window_codes(
    operand: jax.Array,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Padding,
    *,
    positive: bool = False,
) -> jax.Array:
    """Returns which element of its window `select_and_scatter_add` selects.

    Args:
        operand: what is pooled, of any rank and layout.
        window_dimensions: size of a window, one per dimension (1 for batch and channels).
        window_strides: distance between windows, one per dimension.
        padding: `"SAME"`, `"VALID"` or `(low, high)` per dimension.
        positive: also tell, of windows with a NaN, whether the selected element is larger than zero: if it is
            not, their code is 0. No NaN lets the first element be selected otherwise: a later one takes its place.

    Returns:
        `uint8` of the pool's shape: the row-major index within the window, less than
        `prod(window_dimensions)`.

    Raises:
        TraceError: `supported` says why not.
    """
    _check(operand.shape, operand.dtype, window_dimensions, window_strides, padding)
    out = pooled_shape(operand.shape, window_dimensions, window_strides, padding)
    if 0 in out or 0 in operand.shape:
        return jnp.zeros(out, jnp.uint8)
    pads = _pads(operand.shape, window_dimensions, window_strides, padding)
    if any(map(any, pads)):
        low_value = jnp.array(-jnp.inf, operand.dtype)
        operand = lax.pad(operand, low_value, [(low, high, 0) for low, high in pads])
    selected: jax.Array | None = None
    codes = jnp.zeros(out, jnp.uint8)
    has_nan = jnp.zeros(out, jnp.bool_)
    for code, offset in enumerate(itertools.product(*map(range, window_dimensions))):
        stop = [
            o + (n - 1) * stride + 1
            for o, n, stride in zip(offset, out, window_strides, strict=True)
        ]
        element = lax.slice(operand, offset, stop, window_strides)
        has_nan |= lax.ne(element, element)
        if selected is None:
            selected = element
            continue
        stays = lax.ge(selected, element)
        selected = lax.select(stays, selected, element)
        codes = lax.select(stays, codes, lax.full_like(codes, code))
    if positive and selected is not None:
        is_lost = has_nan & ~(selected > 0)
        codes = lax.select(is_lost, lax.full_like(codes, 0), codes)
    return codes


def scatter_by_codes(
    cotangent: jax.Array,
    codes: jax.Array,
    operand_shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Padding,
) -> jax.Array:
    """Returns the gradient of a max-pool from the codes of its forward pass.

    Where windows overlap, an element's cotangents are added from its first window to its last and the sum
    is rounded to the dtype after every one, as XLA:CPU's scatter does.

    Args:
        cotangent: of the pool's result.
        codes: what `window_codes` returned, of the same shape.
        operand_shape: shape of what was pooled.
        window_dimensions: as for `window_codes`.
        window_strides: as for `window_codes`.
        padding: as for `window_codes`.

    Returns:
        The operand's cotangent, of the dtype of `cotangent`.

    Raises:
        TraceError: `supported` says why not, or the shapes do not fit.
    """
    _check(operand_shape, cotangent.dtype, window_dimensions, window_strides, padding)
    out = pooled_shape(operand_shape, window_dimensions, window_strides, padding)
    if not tuple(cotangent.shape) == tuple(codes.shape) == out:
        raise TraceError(
            f"a pool of {tuple(operand_shape)} with window {tuple(window_dimensions)}, strides "
            f"{tuple(window_strides)} and padding {padding} has shape {out}, but the cotangent has shape "
            f"{tuple(cotangent.shape)} and the codes have {tuple(codes.shape)}; pass those of this pool."
        )
    if 0 in out or 0 in operand_shape:
        return jnp.zeros(operand_shape, cotangent.dtype)
    back = [-(-w // s) for w, s in zip(window_dimensions, window_strides, strict=True)]
    gradient: jax.Array | None = None
    # The further a window lies back, the earlier XLA's scatter visits it.
    for steps in itertools.product(*(range(n - 1, -1, -1) for n in back)):
        is_selected, term = _blocks(
            cotangent, codes, steps, back, window_dimensions, window_strides
        )
        if gradient is None:
            # XLA's scatter adds to +0, so that a first -0 becomes +0.
            gradient = lax.select(is_selected & (term != 0), term, lax.full_like(term, 0))
        else:
            # Not a sum with zeros where nothing is selected: it would turn an underflown -0 into +0.
            gradient = lax.select(is_selected, _add(gradient, term), gradient)
    assert gradient is not None
    blocks = [(n + b - 1) * s for n, b, s in zip(out, back, window_strides, strict=True)]
    gradient = compat.reshape(gradient, blocks, _block_axes(window_strides))
    pads = _pads(operand_shape, window_dimensions, window_strides, padding)
    edges = [
        (-low, low + size - block, 0)
        for size, block, (low, _) in zip(operand_shape, blocks, pads, strict=True)
    ]
    if any(map(any, edges)):
        gradient = lax.pad(gradient, jnp.zeros((), gradient.dtype), edges)
    return gradient


def _blocks(
    cotangent: jax.Array,
    codes: jax.Array,
    steps: Sequence[int],
    back: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
) -> tuple[jax.Array, jax.Array]:
    """Which elements the windows `steps` blocks back select, and their cotangents at every element.

    Returns:
        Two arrays `[blocks of dim 0, stride of dim 0, blocks of dim 1, ...]`, without the strides that are 1.
    """
    codes = codes.astype(jnp.int32)
    moved = [(step, n - 1 - step, 0) for step, n in zip(steps, back, strict=True)]
    if any(map(any, moved)):
        cotangent = lax.pad(cotangent, jnp.zeros((), cotangent.dtype), moved)
        codes = lax.pad(codes, jnp.full((), _NO_WINDOW, codes.dtype), moved)
    kept = _block_axes(window_strides)
    shape: list[int] = []
    for size, stride in zip(codes.shape, window_strides, strict=True):
        shape += [size, stride] if stride > 1 else [size]
    table = _code_table(steps, window_dimensions, window_strides)
    is_selected = lax.broadcast_in_dim(codes, shape, kept) == table
    return is_selected, lax.broadcast_in_dim(cotangent, shape, kept)


def _block_axes(window_strides: Sequence[int]) -> list[int]:
    """By dimension the axis that counts its blocks; the one after it has the elements inside a block."""
    return [
        dim + sum(stride > 1 for stride in window_strides[:dim])
        for dim in range(len(window_strides))
    ]


def _code_table(
    steps: Sequence[int], window_dimensions: Sequence[int], window_strides: Sequence[int]
) -> np.ndarray:
    """Codes of a block's elements in the windows `steps` blocks back, `_OUTSIDE` for those outside of them.

    A constant rather than a sum of iotas: XLA:GPU gives those kernels of their own.
    """
    table = np.zeros((), np.int64)
    is_inside = np.ones((), bool)
    for step, window, stride in zip(steps, window_dimensions, window_strides, strict=True):
        offset = step * stride + np.arange(stride)
        table = table[..., None] * window + offset
        is_inside = is_inside[..., None] & (offset < window)
    table = np.where(is_inside, table, _OUTSIDE).astype(np.int32)
    shape = [size for stride in window_strides for size in ((1, stride) if stride > 1 else (1,))]
    return table.reshape(shape)


def _add(total: jax.Array, term: jax.Array) -> jax.Array:
    """Adds and rounds; spelt out for bfloat16, whose sums XLA is free to keep in float32."""
    if total.dtype != jnp.bfloat16:
        return total + term
    wide = total.astype(jnp.float32) + term.astype(jnp.float32)
    finfo = jnp.finfo(jnp.bfloat16)
    return lax.reduce_precision(wide, finfo.nexp, finfo.nmant).astype(jnp.bfloat16)


def _pads(
    operand_shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Padding,
) -> list[tuple[int, int]]:
    if isinstance(padding, str):
        return lax.padtype_to_pads(operand_shape, window_dimensions, window_strides, padding)
    return [(int(low), int(high)) for low, high in padding]


def _check(
    operand_shape: Sequence[int],
    dtype: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Padding,
) -> None:
    params = {
        "window_dimensions": window_dimensions,
        "window_strides": window_strides,
        "padding": padding,
    }
    why = supported(params, dtype)
    ranks = {len(operand_shape), len(window_dimensions)}
    if not isinstance(padding, str):
        ranks.add(len(padding))
    if why is None and len(ranks) > 1:
        why = (
            f"operand {tuple(operand_shape)}, window {tuple(window_dimensions)} and padding {padding} "
            "differ in rank"
        )
    if why is not None:
        raise TraceError(
            f"this max-pool cannot be done by codes: {why}. Keep jax's own rule for it (equations of "
            f"{' and '.join(_POOLS)})."
        )
