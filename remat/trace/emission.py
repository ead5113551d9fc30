"""What XLA:GPU makes of an equation that its primitive does not tell: read off its parameters and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypedDict

from remat.core.avals import aval_bytes
from remat.core.classify import dot_form
from remat.core.kernel_work import IN_BFLOAT16, cycles_named

__all__ = ["CONVOLUTION", "Traits", "reduction_blocks", "sums_one", "traits_of", "workspace_bytes"]

CONVOLUTION = "conv_general_dilated"

_REDUCTIONS = frozenset(
    {
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_prod",
        "reduce_sum",
        "reduce_xor",
    }
)
_WARP = 32  # threads of a GPU's warp
# Of the kernels for reductions (`codegen/emitters/reduction.cc`): threads of a block, elements of a row for each,
# elements that a thread reads at once, and what is made in one step.
_MOST_THREADS, _THREADS, _PER_THREAD, _VECTOR = 1024, 256, 16, 2
_LONGEST_ROW, _LONGEST_COLUMN = _MOST_THREADS * _PER_THREAD, 128 * _WARP
# `GpuHloCostAnalysis::HandleConcatenate`: a comparison and a branch; where the border of two operands may lie in a
# warp, both branches run, and XLA takes that for so dear that it rather writes the result.
_BRANCH, _BOTH_BRANCHES = 6, 400


class Traits(TypedDict, total=False):
    """Fields of `remat.core.graph.Op`; those that are at their default are left out."""

    batched: bool
    contracts: tuple[tuple[int, ...], ...]
    padded: bool
    swapped: bool
    elemental: bool
    cycles: int
    axes: tuple[int, ...]
    blocks: int


def traits_of(eqn: Any) -> Traits:
    """Returns what the operator of an equation has beyond its class."""
    read = _READERS.get(eqn.primitive.name)
    return read(eqn) if read is not None else {}


def _of_matmul(eqn: Any) -> Traits:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    form, side = dot_form(eqn.params["dimension_numbers"], [v.aval for v in eqn.invars])
    if form == "product":
        return {}
    if form == "sum":
        aval, axes = eqn.invars[side].aval, tuple((left, right)[side])
        return _of_sum(aval, axes, "add", cycles_named("mul"))
    return {
        "batched": len(left_batch) > 0,
        "contracts": (tuple(left), tuple(right), tuple(left_batch), tuple(right_batch)),
    }


def _of_pool_gradient(eqn: Any) -> Traits:
    return {"padded": any(low > 0 for low, _ in eqn.params["padding"])}


def _of_convolution(eqn: Any) -> Traits:
    return {"swapped": _is_swapped(eqn)}


def sums_one(padding: Any, pool: Any) -> bool:
    """Whether every window of a pool has one element of what was padded, at most: the gradient of a mean pool.

    XLA makes one operator of both, which it merges as one whose windows do not overlap.

    Args:
        padding: the equation of a `pad`.
        pool: the equation that reads it.
    """
    sizes = pool.params["window_dimensions"]
    gaps = [between for _, _, between in padding.params["padding_config"]]
    dilated = any(step != 1 for step in pool.params["window_dilation"])
    return not dilated and all(size <= gap + 1 for size, gap in zip(sizes, gaps, strict=True))


def _of_arithmetic(eqn: Any) -> Traits:
    in_bfloat16 = str(eqn.outvars[0].aval.dtype) == "bfloat16"
    return {"cycles": IN_BFLOAT16[eqn.primitive.name]} if in_bfloat16 else {}


def _of_division(eqn: Any) -> Traits:
    # By a constant it is a product with its inverse (`AlgebraicSimplifier`).
    is_product = hasattr(eqn.invars[1], "val") and eqn.outvars[0].aval.dtype.kind in "fV"
    return {"cycles": cycles_named("mul")} if is_product else {}


def _of_concatenation(eqn: Any) -> Traits:
    along = eqn.params["dimension"]
    crosses = along > 0 and eqn.invars[0].aval.shape[along] % _WARP != 0
    return {"cycles": _BOTH_BRANCHES if crosses else _BRANCH}


def _of_stack(eqn: Any) -> Traits:
    # A concatenation of operands of one row each.
    return {"cycles": _BOTH_BRANCHES if eqn.params["axis"] > 0 else _BRANCH}


def _of_reduction(eqn: Any) -> Traits:
    return _of_sum(eqn.invars[0].aval, tuple(eqn.params["axes"]), eqn.primitive.name)


def _of_sum(aval: Any, axes: tuple[int, ...], name: str, more: int = 0) -> Traits:
    """Traits of a reduction over axes of an operand by an operator; `more` cycles make each element of it."""
    count = math.prod(aval.shape[axis] for axis in axes)
    if _is_elemental(aval.shape, axes):
        cycles = max(count - 1, 1) * cycles_named(name) + count * more
        return {"axes": axes, "elemental": True, "cycles": cycles}
    blocks = reduction_blocks(aval.shape, axes, aval.dtype.itemsize)
    found: Traits = {"axes": axes, "blocks": blocks}
    if more:
        found["cycles"] = cycles_named(name) + more
    return found


def _is_elemental(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether a reduction is made by one thread per result, like an element-wise operator.

    It follows XLA's `IsUnnestedReductionFasterThanElemental`: rows shorter than a warp that do not divide it, and
    columns that are short for how few there are. Where the axes are not next to one another in memory, XLA splits
    the reduction in two first. Over axes of size one it is a reshape.
    """
    sizes, reduced, kept = _without_ones(shape, axes)
    if not math.prod(sizes):
        return False
    if not any(reduced):
        return True
    if not any(kept) or not (_is_together(reduced) or _is_together(kept)):
        return False
    if reduced[-1]:
        row = _minor(sizes, reduced)
        return row < _WARP and _WARP % row != 0
    minor = _minor(sizes, kept)
    column = math.prod(dim for dim, flag in zip(sizes, reduced, strict=True) if flag)
    return any(
        column < times * _WARP and minor < few
        for times, few in ((1, math.inf), (2, _WARP), (4, 8), (8, 3))
    )


def reduction_blocks(shape: tuple[int, ...], axes: tuple[int, ...], width: int) -> int:
    """How many blocks of threads XLA launches for a reduction, 0 for what it splits or makes otherwise.

    It follows `RowReductionFusion`, `ColumnReductionFusion` and their small variants. Long ones it makes in two
    steps, of which the first is meant.

    Args:
        shape: of the operand, `axes` those that are reduced.
        width: bytes of an element.
    """
    sizes, reduced, others = _without_ones(shape, axes)
    if not math.prod(sizes):
        return 0
    if any(others) and not _is_together(reduced) and not _is_together(others):
        return 0
    length = math.prod(dim for dim, flag in zip(sizes, reduced, strict=True) if flag)
    kept = math.prod(sizes) // length
    if reduced[-1]:
        if length > _LONGEST_ROW:
            outer, length = _in_two_steps(length, _LONGEST_ROW, is_row=True)
            kept *= outer
        if length <= _WARP * _VECTOR and length & (length - 1) == 0:
            return 0  # several rows to a warp: as many blocks as an element-wise kernel has
        threads = min(_MOST_THREADS, _WARP * -(-length // (_PER_THREAD * _WARP)))
        return -(-kept // max(_THREADS // threads, 1))
    minor = _minor(sizes, others)
    major = kept // minor
    if length > _LONGEST_COLUMN:
        major *= _in_two_steps(length, _LONGEST_COLUMN, is_row=False)[0]
    if minor <= _WARP:
        return major
    vector = 1 if minor % 2 or minor < 2 * _WARP else 2
    if vector == 2 and width < 4 and minor % 4 == 0 and minor >= 4 * _WARP:
        vector = 4
    return major * -(-minor // (vector * _WARP))


def _without_ones(
    shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[list[int], list[bool], list[bool]]:
    """The dimensions larger than one, with which of them are reduced and which are left."""
    sizes = [dim for dim in shape if dim != 1]
    reduced = [axis in axes for axis, dim in enumerate(shape) if dim != 1]
    return sizes, reduced, [not flag for flag in reduced]


def _in_two_steps(length: int, longest: int, *, is_row: bool) -> tuple[int, int]:
    """Into how many parts XLA's `TreeReductionRewriter` divides a long reduction, and how long they are.

    Of the lengths between half the square root and the root that which needs the fewest zeros behind; of several
    a power of two.
    """
    inner = min(math.isqrt(length), longest)
    zeros = -length % inner
    for other in range(inner - 1, inner // 2, -1):
        more = -length % other
        if more < zeros or (more == zeros and other & (other - 1) == 0):
            inner, zeros = other, more
    outer = (length + zeros) // inner
    if outer > longest:
        return outer, inner
    if is_row and inner % 2 == 0 and length % 2 == 0:
        swaps = inner * 2 < outer or outer % 2 == 0
    else:
        swaps = not is_row or length % 2 == 0 or outer % 2 != 0
    return (inner, outer) if swaps else (outer, inner)


def _is_together(flags: list[bool]) -> bool:
    """Whether the flags that are set stand next to one another."""
    first, last = flags.index(True), len(flags) - 1 - flags[::-1].index(True)
    return all(flags[first : last + 1])


def _minor(sizes: list[int], flags: list[bool]) -> int:
    """The elements of the last dimensions, as many as have their flag set without a gap; some has it not."""
    return math.prod(sizes[len(sizes) - flags[::-1].index(False) :])


def _is_dilated(eqn: Any) -> bool:
    return eqn.primitive.name == CONVOLUTION and max(eqn.params["lhs_dilation"], default=1) > 1


def workspace_bytes(eqn: Any, is_swapped: bool, is_reversed: bool) -> int:
    """What XLA:GPU makes for a convolution whose first operand is dilated.

    With a reversed kernel it is the data gradient of a strided one, for which libraries have a kernel. Otherwise
    the dilated operand is written to memory, or, for the gradient of a kernel, the second operand is transposed.
    """
    if not _is_dilated(eqn) or (is_reversed and not is_swapped):
        return 0
    source, kernel = (var.aval for var in eqn.invars)
    if is_swapped:
        return aval_bytes(kernel)
    shape = list(source.shape)
    axes = eqn.params["dimension_numbers"].lhs_spec[2:]
    spaces = zip(axes, eqn.params["lhs_dilation"], eqn.params["padding"], strict=True)
    for axis, dilation, (low, high) in spaces:
        shape[axis] = max(dilation * (shape[axis] - 1) + 1 + low + high, 0)
    return math.prod(shape) * source.dtype.itemsize


def _is_swapped(eqn: Any) -> bool:
    """Whether the first operand is dilated and the second larger than the result: a gradient for a kernel."""
    if not _is_dilated(eqn):
        return False
    layout = eqn.params["dimension_numbers"]
    window = [eqn.invars[1].aval.shape[axis] for axis in layout.rhs_spec[2:]]
    made = [eqn.outvars[0].aval.shape[axis] for axis in layout.out_spec[2:]]
    return math.prod(window) > math.prod(made)


_READERS: dict[str, Callable[[Any], Traits]] = {
    **dict.fromkeys(IN_BFLOAT16, _of_arithmetic),
    "div": _of_division,
    "dot_general": _of_matmul,
    "select_and_scatter_add": _of_pool_gradient,
    CONVOLUTION: _of_convolution,
    "concatenate": _of_concatenation,
    "stack": _of_stack,
    **dict.fromkeys(_REDUCTIONS, _of_reduction),
}
