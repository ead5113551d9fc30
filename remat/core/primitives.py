"""Every jax primitive, classified on purpose: its cost, whether XLA fuses it, if it may run twice.

Works from the primitive's name, its parameters and anything with `.shape` and `.dtype`; imports no
jax, so that the table can be read and tested on its own. Decisions that are not obvious:

- *Fusible* is what XLA:GPU does (`IsUniversallyLoopFusible` in XLA's `gpu_fusible.cc`, and compiled
  for an H200): element-wise operators, data movement, threefry, `gather`, `dynamic_slice` and
  `dynamic_update_slice` are fused on both sides; a sum is fused with what it reads. A
  `reduce_window` is fused with what it reads only if its windows do not overlap; the results of a
  multi-output reduction (`argmax`) and of a scatter become buffers; a product without a contracted
  axis is a multiplication to XLA.
- *Flops* are the operations that a straightforward kernel executes. A convolution counts the taps
  that fall into the padding (implicit-GEMM kernels execute them) but not those that fall between
  the elements of a dilated input, so that a strided convolution and its gradients cost the same.
  XLA's `cost_analysis` leaves both out.
- JAX's random numbers are a function of their key, so they may be recomputed; `rng_uniform` is
  stateful and may not. Deriving keys is cheap and does not count as random.
- A collective is never repeated, except for those that communicate nothing: `axis_index`, and the
  identities (`pvary`, ...) that change what a type says about a mesh axis. A sharding constraint is
  taken as the identity it is on one device.

A name that is not in `TABLE` is `OpClass.OPAQUE`, is never recomputed, and says so in
`OpCost.reason`; `remat.trace.classify` then looks at what the primitive lowers to.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

__all__ = [
    "TABLE",
    "OpClass",
    "OpCost",
    "OpSpec",
    "aval_bytes",
    "aval_size",
    "classify",
    "flops",
]

Params = Mapping[str, Any]
Avals = Sequence[Any]
Counter = Callable[[Params, Avals, Avals], int]


class OpClass(enum.Enum):
    """What kind of operator a primitive is."""

    POINTWISE = "pointwise"  # an output element depends on the same element of each input
    VIEW = "view"  # moves, repeats or reinterprets, or makes from nothing (iota); no arithmetic
    REDUCTION = "reduction"  # combines the elements along some axes; running totals too
    HEAVY = "heavy"  # compute bound or a library call: matmuls, convolutions, factorisations
    INDEXED = "indexed"  # addresses depend on data or on a sliding window
    RANDOM = "random"  # random bits, and the plumbing of the keys
    CONTROL = "control"  # has bodies that run zero, one or many times, or on shards
    CALL = "call"  # has a body that runs once: to be inlined
    COLLECTIVE = "collective"  # belongs to all devices of a mesh axis
    EFFECT = "effect"  # talks to the host, to mutable references or to hidden state
    METADATA = "metadata"  # an identity that carries a name, a constraint or a dependence
    OPAQUE = "opaque"  # nothing is known about what it does


@dataclass(frozen=True, slots=True)
class OpCost:
    """What a planner needs to know about one operator.

    Attributes:
        op_class: its kind.
        flops: operations in one run; estimates are marked in `TABLE`.
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


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of `TABLE`: what holds for a primitive whatever its parameters.

    Attributes:
        op_class: its kind.
        count: flops from parameters, input avals and output avals.
        fusible: see `OpCost`.
        random: see `OpCost`.
        effectful: see `OpCost`.
        recomputable: see `OpCost`.
        reason: why it is not recomputable.
        exact: whether `count` is the number of operations or an estimate of it.
    """

    op_class: OpClass
    count: Counter
    fusible: bool = False
    random: bool = False
    effectful: bool = False
    recomputable: bool = True
    reason: str = ""
    exact: bool = True


# --- sizes --------------------------------------------------------------------------------------

# Types that numpy holds in a byte and XLA packs. Every other dtype is as large as its `itemsize`.
_PACKED_BITS: Mapping[str, int] = MappingProxyType(
    {
        "int2": 2,
        "uint2": 2,
        "int4": 4,
        "uint4": 4,
        "float4_e2m1fn": 4,
    }
)
_KEY_WORD_BITS = 32


def aval_size(aval: Any) -> int:
    """Returns the number of elements; 0 for something without a shape, such as a token."""
    shape = getattr(aval, "shape", None)
    return 0 if shape is None else math.prod(int(size) for size in shape)


def aval_bytes(aval: Any) -> int:
    """Returns the bytes an array takes in device memory.

    A bool takes one byte, int4 half of one (the array is rounded up to whole bytes), float0 none. A
    PRNG key takes what its implementation stores (`uint32[2]` for threefry); a key type that does
    not tell falls back to its `itemsize`, and something with neither (a token) takes none.
    """
    return (aval_size(aval) * _dtype_bits(getattr(aval, "dtype", None)) + 7) // 8


def _dtype_bits(dtype: Any) -> int:
    name = _dtype_name(dtype)
    if name in _PACKED_BITS:
        return _PACKED_BITS[name]
    key_shape = getattr(getattr(dtype, "_impl", None), "key_shape", None)
    if key_shape is not None:
        return _KEY_WORD_BITS * math.prod(key_shape)
    return 8 * int(getattr(dtype, "itemsize", 0))


def _dtype_name(dtype: Any) -> str:
    return getattr(dtype, "name", None) or str(dtype)


def _is_complex(aval: Any) -> bool:
    return _dtype_name(getattr(aval, "dtype", None)).startswith("complex")


# --- counting flops -----------------------------------------------------------------------------


def _free(params: Params, ins: Avals, outs: Avals) -> int:
    return 0


def _per_output(weight: int) -> Counter:
    """Counts `weight` operations per element of the first output."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return weight * aval_size(outs[0])

    return count


def _per_input(weight: int) -> Counter:
    """Counts `weight` operations per element of the first input."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return weight * aval_size(ins[0])

    return count


def _arithmetic(weight: int, complex_weight: int) -> Counter:
    """Counts per output element, with a weight of its own for complex numbers."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return (complex_weight if _is_complex(outs[0]) else weight) * aval_size(outs[0])

    return count


def _integer_pow(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts repeated squaring, and a division for a negative power."""
    power = int(params["y"])
    steps = max(abs(power).bit_length() + abs(power).bit_count() - 2, 0)
    return (steps + (_DIVIDE if power < 0 else 0)) * aval_size(outs[0])


def _reduce(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts a variadic reduction, whose inputs are operands followed by as many initial values."""
    return sum(map(aval_size, ins[: len(ins) // 2]))


def _multiply_add(aval: Any) -> int:
    return 8 if _is_complex(aval) else 2


def _dot_general(params: Params, ins: Avals, outs: Avals) -> int:
    (lhs_contracting, _), _ = params["dimension_numbers"]
    depth = math.prod(ins[0].shape[axis] for axis in lhs_contracting)
    return _multiply_add(outs[0]) * aval_size(outs[0]) * depth


def _ragged_dot_general(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts the rows that some group owns as all rows: group sizes are data.

    A ragged contraction has an output per group but multiplies every row once, in whichever group.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    depth = math.prod(ins[0].shape[axis] for axis in contracting)
    work = _multiply_add(outs[0]) * aval_size(outs[0]) * depth
    ragged_contraction = set(numbers.lhs_ragged_dimensions) & set(contracting)
    return work // max(ins[2].shape[-1], 1) if ragged_contraction else work


def _matmul_last_axis(params: Params, ins: Avals, outs: Avals) -> int:
    return 2 * aval_size(outs[0]) * ins[0].shape[-1]


def _convolution(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts output channels x batch x input channels of one group x taps, in every layout.

    The kernel's input feature dimension is already that of one group (`feature_group_count`), and
    the output's batch dimension that of one batch group, so groups need no further division.
    """
    numbers = params["dimension_numbers"]
    kernel, out = ins[1].shape, outs[0].shape
    _, depth_axis, *kernel_axes = numbers.rhs_spec
    batch_axis, feature_axis, *out_axes = numbers.out_spec
    count = out[batch_axis] * out[feature_axis] * kernel[depth_axis]
    windows = zip(
        (out[axis] for axis in out_axes),
        (kernel[axis] for axis in kernel_axes),
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    for size, width, stride, (low, _), lhs_dilation, rhs_dilation in windows:
        count *= _taps(size, width, stride, low, lhs_dilation, rhs_dilation)
    return _multiply_add(outs[0]) * count


def _taps(
    size: int, width: int, stride: int, low: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Counts pairs of output position and tap that meet no zero inserted by `lhs_dilation`."""
    if lhs_dilation == 1:
        return size * width
    period = lhs_dilation
    positions = [len(range(residue, size, period)) for residue in range(period)]
    taps = [len(range(residue, width, period)) for residue in range(period)]
    return sum(
        positions[o] * taps[k]
        for o in range(period)
        for k in range(period)
        if (o * stride + k * rhs_dilation - low) % lhs_dilation == 0
    )


def _log2_ceil(number: int) -> int:
    return max(number - 1, 0).bit_length()


def _fft(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts 5 n log2 n per complex transform, half of that per real one."""
    length = math.prod(params["fft_lengths"])
    complex_to_complex = _is_complex(ins[0]) and _is_complex(outs[0])
    elements = max(aval_size(ins[0]), aval_size(outs[0]))
    work = 5 * elements * _log2_ceil(length)
    return work if complex_to_complex else work // 2


def _sort(params: Params, ins: Avals, outs: Avals) -> int:
    length = ins[0].shape[params["dimension"]]
    return aval_size(ins[0]) * _log2_ceil(length) * params.get("num_keys", 1)


def _top_k(params: Params, ins: Avals, outs: Avals) -> int:
    return aval_size(ins[0]) * max(_log2_ceil(params["k"]), 1)


def _matrix(aval: Any) -> tuple[int, int, int]:
    """Returns batch, rows and columns."""
    *batch, rows, columns = aval.shape
    return math.prod(batch), rows, columns


def _cubic(numerator: int, denominator: int = 1) -> Counter:
    """Counts `numerator / denominator * n**3` per square matrix."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        batch, _, size = _matrix(ins[0])
        return batch * (numerator * size**3 // denominator)

    return count


def _quadratic(weight: int) -> Counter:
    def count(params: Params, ins: Avals, outs: Avals) -> int:
        batch, rows, columns = _matrix(ins[0])
        return batch * weight * rows * columns

    return count


def _lu(params: Params, ins: Avals, outs: Avals) -> int:
    batch, rows, columns = _matrix(ins[0])
    rank = min(rows, columns)
    return batch * (2 * rows * columns * rank - (rows + columns) * rank**2 + 2 * rank**3 // 3)


def _qr(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts the factorisation and the product of its reflectors."""
    return 2 * _reflectors(params, ins, outs)


def _reflectors(params: Params, ins: Avals, outs: Avals) -> int:
    batch, rows, columns = _matrix(ins[0])
    rank = min(rows, columns)
    return batch * max(2 * rows * columns * rank - 2 * rank**3 // 3, 0)


def _apply_reflectors(params: Params, ins: Avals, outs: Avals) -> int:
    _, _, reflectors = _matrix(ins[0])
    batch, rows, columns = _matrix(ins[2])
    return 4 * batch * rows * columns * reflectors


def _svd(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts Golub & Van Loan's table: values alone, or values with both factors."""
    batch, rows, columns = _matrix(ins[0])
    tall, thin = max(rows, columns), min(rows, columns)
    if not params.get("compute_uv", True):
        return batch * (4 * tall * thin**2 - 4 * thin**3 // 3)
    return batch * (4 * tall**2 * thin + 8 * tall * thin**2 + 9 * thin**3)


def _triangular_solve(params: Params, ins: Avals, outs: Avals) -> int:
    return aval_size(outs[0]) * ins[0].shape[-1]


def _symmetric_product(params: Params, ins: Avals, outs: Avals) -> int:
    batch, rows, columns = _matrix(ins[0])
    return batch * (2 * rows * rows * columns + 2 * rows * rows)


def _window(params: Params) -> int:
    return math.prod(params["window_dimensions"])


def _windows_of_output(weight: int) -> Counter:
    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return weight * sum(map(aval_size, outs)) * _window(params)

    return count


def _select_and_scatter(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts a comparison per window element and an addition per window.

    There is a window per element of the source, which comes second in `select_and_scatter` and
    first in `select_and_scatter_add`; the operand, whose shape the output has, is the other one.
    """
    first, second = map(aval_size, ins[:2])
    source = second if first == aval_size(outs[0]) else first
    return source * (_window(params) + 1)


def _scatter_combine(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts one operation per updated element; inputs are operands, indices, updates."""
    return sum(map(aval_size, ins[len(ins) // 2 + 1 :]))


def _random_bits(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts, per element, one threefry block or a word of a philox block."""
    return aval_size(outs[0]) * (_THREEFRY if _is_threefry(ins[0]) else _PHILOX_WORD)


def _is_threefry(key: Any) -> bool:
    """Tells by the key's implementation; one that does not tell is jax's default, threefry."""
    implementation = getattr(getattr(key, "dtype", None), "_impl", None)
    return "fry" in str(getattr(implementation, "name", "threefry2x32"))


def _attention(weight: int) -> Counter:
    """Counts `weight` products of queries and keys: two forward, five backward."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        # cuDNN's layouts: 0 is batch, time, heads, features; 1 is batch, heads, time, features.
        length = ins[1].shape[2 if params.get("layout") == 1 else 1]
        return weight * 2 * aval_size(ins[0]) * length

    return count


def _rnn(weight: int) -> Counter:
    """Counts every weight once per step and sequence."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        batch, steps, *_ = ins[0].shape
        return weight * 2 * batch * steps * max(map(aval_size, ins[3:4]), default=0)

    return count


def _sparse_product(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts each stored element once per output column."""
    columns = outs[0].shape[-1] if len(outs[0].shape) > 1 else 1
    return 2 * aval_size(ins[0]) * columns


def _kernel_estimate(params: Params, ins: Avals, outs: Avals) -> int:
    """Reads the author's `cost_estimate`; without one, counts all elements read and written."""
    estimate = getattr(params.get("cost_estimate"), "flops", None)
    if estimate is not None:
        return int(estimate)
    return sum(map(aval_size, (*ins, *outs)))


# --- weights ------------------------------------------------------------------------------------

_DIVIDE = 4
# Threefry-2x32: 20 rounds of (add, two shifts, or, xor), 17 key additions, and the xor of both
# words, by which jax's partitionable form makes one element of up to 32 bits.
_THREEFRY = 118
# Philox-4x32: 10 rounds of 4 multiplications, 4 xors and 2 additions for 4 words, and the counter.
_PHILOX_WORD = 30

# Operations per element, in units of one multiplication, as a vectorised kernel without special
# hardware spends them: a polynomial of the needed degree and a range reduction. They rank operators
# and hardly ever decide alone: a pointwise operator is bound by memory traffic up to some fifty
# operations per element (Yu & He, section 3.1).
_POINTWISE_WEIGHTS: Mapping[int, str] = MappingProxyType(
    {
        0: "real imag",
        1: """
            abs and ceil clz complex conj convert_element_type copysign eq eq_to floor ge gt
            is_finite le le_to lt lt_to max min mulhi ne not or population_count reduce_precision
            round select select_n shift_left shift_right_arithmetic shift_right_logical sign xor
        """,
        2: "clamp stochastic_round",
        3: "one_minus_square",
        4: "nextafter reciprocal rsqrt sqrt",
        6: "rem",
        10: "cbrt exp exp2 expm1 log log1p log2 logistic tanh",
        15: "cos cosh erf erfc sin sinh",
        20: "acos acosh asin asinh atan atan2 atanh erf_inv pow tan",
        40: "bessel_i0e bessel_i1e digamma lgamma",
        200: "igamma igamma_grad_a igammac polygamma regularized_incomplete_beta zeta",
    }
)

# --- reasons ------------------------------------------------------------------------------------

_UNKNOWN = "`{}` is not a primitive this library knows: taken as opaque, never recomputed"
_CONTROL = "a loop or branch is planned as a whole, it is not repeated"
_CALL = "a call is inlined; its operators are decided one by one"
_COLLECTIVE = "a collective is never repeated: it costs traffic between devices"
_EFFECT = "it has side effects and must run exactly once"
_CUSTOM = "a custom call: what it does cannot be seen"
_KERNEL = "it belongs in the body of a kernel"

# --- the table ----------------------------------------------------------------------------------


def _rows(names: str, spec: OpSpec) -> dict[str, OpSpec]:
    return dict.fromkeys(names.split(), spec)


def _pointwise() -> dict[str, OpSpec]:
    def spec(count: Counter) -> OpSpec:
        return OpSpec(OpClass.POINTWISE, count, fusible=True)

    # A transcendental function of a complex number is about four of a real one.
    rows: dict[str, OpSpec] = {}
    for weight, names in _POINTWISE_WEIGHTS.items():
        complex_weight = weight if weight <= 1 else 4 * weight
        rows |= _rows(names, spec(_arithmetic(weight, complex_weight)))
    rows |= _rows("add add_any sub neg", spec(_arithmetic(1, 2)))
    rows |= _rows("mul square", spec(_arithmetic(1, 6)))
    rows["div"] = spec(_arithmetic(_DIVIDE, 4 * _DIVIDE))
    rows["integer_pow"] = spec(_integer_pow)
    return rows


def _views() -> dict[str, OpSpec]:
    view = OpSpec(OpClass.VIEW, _free, fusible=True)
    unspecified = replace(view, fusible=False)  # an allocation: any contents will do
    return _rows(
        """
        bitcast_convert_type broadcast broadcast_in_dim broadcast_to concatenate copy copy_p
        expand_dims from_edtype iota iota_2x32_shape pad reshape rev slice split squeeze stack tile
        to_edtype transpose unstack zeros_like
        """,
        view,
    ) | _rows("empty empty2", unspecified)


def _reductions() -> dict[str, OpSpec]:
    single = OpSpec(OpClass.REDUCTION, _per_input(1), fusible=True)
    # XLA makes a scan of log n passes of a running total, in kernels of their own.
    running = OpSpec(OpClass.REDUCTION, _per_input(2))
    return (
        _rows(
            "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor", single
        )
        | _rows("argmax argmin", replace(single, fusible=False))
        | _rows("reduce", replace(single, count=_reduce))
        | _rows("cummax cummin cumprod cumsum", running)
        | _rows("cumlogsumexp", replace(running, count=_per_input(50), exact=False))
    )


def _heavy() -> dict[str, OpSpec]:
    def exact(count: Counter) -> OpSpec:
        return OpSpec(OpClass.HEAVY, count)

    def about(count: Counter) -> OpSpec:
        return OpSpec(OpClass.HEAVY, count, exact=False)

    return {
        "dot_general": exact(_dot_general),
        "scaled_dot": exact(_dot_general),
        "conv_general_dilated": exact(_convolution),
        **_rows("ragged_dot ragged_dot_general", about(_ragged_dot_general)),
        **_rows("scaled_matmul scaled_matmul_wrapper", exact(_matmul_last_axis)),
        "fft": about(_fft),
        "sort": about(_sort),
        "top_k": about(_top_k),
        "approx_top_k": about(_per_input(1)),
        "cholesky": about(_cubic(1, 3)),
        "cholesky_update": about(_quadratic(4)),
        "eig": about(_cubic(25)),
        "eigh": about(_cubic(9)),
        "schur": about(_cubic(25)),
        "hessenberg": about(_cubic(10, 3)),
        "tridiagonal": about(_cubic(4, 3)),
        "svd": about(_svd),
        "lu": about(_lu),
        "qr": about(_qr),
        **_rows("geqrf geqp3 householder_product", about(_reflectors)),
        "ormqr": about(_apply_reflectors),
        "lu_pivots_to_permutation": about(_per_output(1)),
        "triangular_solve": exact(_triangular_solve),
        "tridiagonal_solve": about(_per_output(8)),
        "symmetric_product": exact(_symmetric_product),
        "spsolve": about(_per_input(50)),
        **_rows(
            """
            bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matmat
            coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv
            """,
            about(_sparse_product),
        ),
        **_rows(
            """
            dot_product_attention_fwd dot_product_attention_fwd_wrapper
            dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
            """,
            about(_attention(2)),
        ),
        **_rows(
            """
            dot_product_attention_bwd dot_product_attention_bwd_wrapper
            dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
            """,
            about(_attention(5)),
        ),
        "rnn_fwd": about(_rnn(1)),
        "rnn_bwd": about(_rnn(2)),
        "pallas_call": about(_kernel_estimate),
    }


def _indexed() -> dict[str, OpSpec]:
    fused = OpSpec(OpClass.INDEXED, _free, fusible=True)
    own_kernel = OpSpec(OpClass.INDEXED, _free)
    windowed = replace(own_kernel, count=_windows_of_output(1))
    return (
        _rows("gather dynamic_slice dynamic_update_slice", fused)
        | _rows("scatter bcoo_fromdense bcoo_todense bcsr_fromdense bcsr_todense", own_kernel)
        | _rows("coo_fromdense coo_todense csr_fromdense csr_todense todense", own_kernel)
        | _rows("bcoo_extract bcsr_extract bcoo_transpose", own_kernel)
        | _rows(
            "bcoo_sort_indices bcoo_sum_duplicates",
            replace(own_kernel, count=_per_input(10), exact=False),
        )
        | _rows(
            """
            scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max
            scatter_min scatter_mul
            """,
            replace(own_kernel, count=_scatter_combine),
        )
        | _rows("reduce_window reduce_window_max reduce_window_min reduce_window_sum", windowed)
        | _rows("select_and_gather_add", replace(own_kernel, count=_windows_of_output(2)))
        | _rows(
            "select_and_scatter select_and_scatter_add",
            replace(own_kernel, count=_select_and_scatter),
        )
    )


def _randoms() -> dict[str, OpSpec]:
    plumbing = OpSpec(OpClass.RANDOM, _free, fusible=True)
    draws = OpSpec(OpClass.RANDOM, _random_bits, fusible=True, random=True)
    return {
        **_rows("random_clone random_unwrap random_wrap", plumbing),
        **_rows(
            "random_fold_in random_seed random_split",
            replace(plumbing, count=_per_output(_THREEFRY)),
        ),
        "random_bits": draws,
        **_rows("threefry2x32 threefry4x32", replace(draws, count=_per_output(_THREEFRY))),
        **_rows(
            "philox2x32 philox4x32",
            replace(draws, count=_per_output(2 * _PHILOX_WORD), exact=False),
        ),
        "rng_bit_generator": OpSpec(
            OpClass.RANDOM,
            lambda params, ins, outs: _PHILOX_WORD * aval_size(outs[-1]),
            random=True,
            exact=False,
        ),
        "random_gamma": OpSpec(
            OpClass.RANDOM, _per_output(10 * _THREEFRY), random=True, exact=False
        ),
        "rng_uniform": OpSpec(
            OpClass.RANDOM,
            _per_output(_PHILOX_WORD),
            random=True,
            effectful=True,
            recomputable=False,
            reason="its generator is stateful: a second run gives other numbers",
            exact=False,
        ),
    }


def _bodies() -> dict[str, OpSpec]:
    control = OpSpec(OpClass.CONTROL, _free, recomputable=False, reason=_CONTROL, exact=False)
    call = OpSpec(OpClass.CALL, _free, recomputable=False, reason=_CALL, exact=False)
    return _rows(
        "cond custom_linear_solve program_order scan shard_map while xla_pmap", control
    ) | _rows(
        """
        call checkpoint closed_call composite core_call core_closed_call custom_jvp_call
        custom_jvp_call_jaxpr custom_lin custom_transpose custom_transpose_call custom_vjp_call
        custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr jit linear_call pjit remat remat2 remat_deferred
        remat_call remat_opt xla_call
        """,
        call,
    )


def _collectives() -> dict[str, OpSpec]:
    moves = OpSpec(OpClass.COLLECTIVE, _free, recomputable=False, reason=_COLLECTIVE)
    combines = replace(moves, count=_per_input(1))
    # These communicate nothing: an index, and identities that change what a type says of an axis.
    local = OpSpec(OpClass.COLLECTIVE, _free, fusible=True)
    return (
        _rows(
            """
            all_gather all_gather_done all_gather_invariant all_gather_reduced
            all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start
            global_array_to_host_local_array host_local_array_to_global_array pbroadcast
            pbroadcast_done pbroadcast_dynamic pbroadcast_start pgather ppermute ppermute_done ppermute_start precv
            psend ragged_all_to_all reshard
            """,
            moves,
        )
        | _rows(
            """
            pmax pmin psum psum2 psum_done psum_invariant psum_invariant_start psum_start
            reduce_scatter reduce_scatter_done reduce_scatter_start unreduced_pmax unreduced_pmin
            unreduced_psum unreduced_psum_start unreduced_reduce_scatter
            unreduced_reduce_scatter_start
            """,
            combines,
        )
        | _rows("axis_index preduced pvary reduced_vary_cast reduced_vary_cast_p", local)
        | _rows("vary_unreduced_cast vary_unreduced_cast_p", local)
    )


def _effects() -> dict[str, OpSpec]:
    effect = OpSpec(OpClass.EFFECT, _free, effectful=True, recomputable=False, reason=_EFFECT)
    pure = replace(
        effect, effectful=False, reason="a callback goes through the host, it is not repeated"
    )
    return _rows(
        """
        accum_grad_in_ref addupdate after_all box_get box_set buffer_callback check core_map
        create_linear create_token dce_sink debug_callback debug_print empty_ref free_ref freeze get
        infeed inspect_sharding io_callback log_extend log_read new_box new_log new_ref outfeed
        outside_call pin run_scoped run_state shape_assertion swap unpin unreachable
        """,
        effect,
    ) | _rows("pure_callback", pure)


def _metadata() -> dict[str, OpSpec]:
    identity = OpSpec(OpClass.METADATA, _free, fusible=True)
    return _rows(
        """
        add_dependency assert_consumed_value consume dim_as_value dimension_size mesh_cast name
        platform_index shard_alike sharding_constraint stage stop_gradient tie xla_metadata_value
        """,
        identity,
    ) | _rows(
        "device_put layout_constraint optimization_barrier relayout",
        replace(identity, fusible=False),
    )


def _opaques() -> dict[str, OpSpec]:
    custom = OpSpec(OpClass.OPAQUE, _free, recomputable=False, reason=_CUSTOM, exact=False)
    kernel = replace(custom, reason=_KERNEL)
    return _rows(
        """
        call_exported call_hi_primitive call_hi_primitive_linearized call_tf compute_on cudnn_fusion
        custom_call custom_partitioning ffi_call fused_call mosaic_gpu_p mpmd_map tpu_custom_call
        xla_metadata_call
        """,
        custom,
    ) | _rows(_KERNEL_NAMES, kernel)


_KERNEL_NAMES = """
    _copysign all_reduce_ffs all_reduce_population_count async_copy_scales_to_tmem
    async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem async_load async_prefetch
    async_store_smem async_store_tmem atomic_cas atomic_rmw barrier barrier_arrive
    barrier_arrive_and_wait barrier_test barrier_wait bitcast commit_group commit_smem commit_tmem
    conv copy_gmem_to_smem copy_smem_to_gmem custom_fusion debug_barrier debug_barrier_p delay
    dma_start dma_wait einshape_lo elementwise_inline_asm elementwise_inline_asm_p emit_pipeline
    fusible get_barrier_semaphore get_global griddepcontrol_launch_dependents griddepcontrol_wait
    has_memory_space inline_mgpu inline_mgpu_p jaxpr_call layout_cast load masked_cummax
    masked_cummin masked_cumsum masked_load masked_sort masked_swap matmul_acc_lhs matmul_lhs_fifo
    matmul_pop matmul_pop_fifo matmul_push_rhs max_contiguous mgpu_atomic_store mma
    mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
    multimem_load_reduce multimem_store multiple_of num_programs pack pack_dtype pack_elementwise
    parallel_loop pipeline_body print_layout prng_join prng_random_bits prng_seed prng_split
    program_id query_cluster_cancel remove_memory_space roll sc_fetch_and_add scan_count
    semaphore_read semaphore_signal semaphore_signal_multicast semaphore_signal_parallel
    semaphore_wait set_max_registers set_max_registers_p store tcgen05_commit_arrive tcgen05_mma
    thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start
    thunky.call_jax thunky.call_thunky_nested thunky.collective_group thunky.collective_permute
    thunky.cond thunky.copy thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero
    thunky.ptx_kernel thunky.reduce_scatter thunky.while trace_value try_cluster_cancel unique
    unpack unpack_dtype unpack_elementwise wait_gmem_to_smem wait_load_tmem wait_smem_to_gmem wgmma
    wgmma_accumulator_deref wgmma_accumulator_deref_p wgmma_accumulator_store
    wgmma_accumulator_store_p wgmma_ref wgmma_wait with_memory_space_constraint
"""


def _disjoint(*groups: dict[str, OpSpec]) -> Mapping[str, OpSpec]:
    """Merges the groups, and fails if a name is in two of them."""
    table: dict[str, OpSpec] = {}
    for group in groups:
        twice = table.keys() & group.keys()
        if twice:
            raise ValueError(f"primitives classified twice: {', '.join(sorted(twice))}")
        table |= group
    return MappingProxyType(table)


TABLE: Mapping[str, OpSpec] = _disjoint(
    _pointwise(),
    _views(),
    _reductions(),
    _heavy(),
    _indexed(),
    _randoms(),
    _bodies(),
    _collectives(),
    _effects(),
    _metadata(),
    _opaques(),
)
"""The primitives of jax 0.10, 0.11 and 0.12, by name, and older spellings of the same ones.

Left out on purpose is what `remat.trace.classify` knows more of: `polynomial` is element-wise or a loop, as its
degree says.
"""

# --- classification -----------------------------------------------------------------------------

_UNKNOWN_SPEC = OpSpec(OpClass.OPAQUE, _free, recomputable=False, exact=False)
# Effects that only say that an operator mentions a mesh axis.
_HARMLESS_EFFECTS = frozenset({"NamedAxisEffect"})


def flops(name: str, params: Params, in_avals: Avals, out_avals: Avals) -> int:
    """Returns the operations in one run of a primitive; 0 for an unknown one.

    Args:
        name: the primitive's name.
        params: its parameters.
        in_avals: its inputs, anything with `.shape` and `.dtype`.
        out_avals: its outputs, likewise.

    Raises:
        KeyError, IndexError, TypeError: the parameters are not those of this primitive in jax 0.10
            to 0.12; `classify` reports that instead.
    """
    spec = _specialise(name, params, in_avals, out_avals)
    return int(spec.count(params, in_avals, out_avals))


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
    reason = spec.reason or (_EFFECT if effectful else complaint)
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
    if name == "dot_general" and _is_outer_product(params):
        return replace(TABLE["mul"], count=_per_output(1))
    if name.startswith("reduce_window"):
        return replace(spec, fusible=not _windows_overlap(params))
    if (name == "reduce" and len(out_avals) > 1) or (
        name == "random_bits" and in_avals and not _is_threefry(in_avals[0])
    ):
        return replace(spec, fusible=False)
    return spec


def _is_outer_product(params: Params) -> bool:
    return params.get("dimension_numbers", (((0,), (0,)), None))[0] == ((), ())


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
