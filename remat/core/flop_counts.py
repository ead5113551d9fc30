"""Operations in one run of a primitive, from its parameters and the shapes of its operands and results.

*Flops* are the operations that a straightforward kernel executes. A convolution counts the taps that fall into the
padding (implicit-GEMM kernels execute them) but not those that fall between the elements of a dilated input, so
that a strided convolution and its gradients cost the same. XLA's `cost_analysis` leaves both out.

Products, convolutions, triangular solves and element-wise arithmetic are counted; factorisations, transforms,
sorts, sparse products and random bits are estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat.core.avals import aval_size, is_complex

Params = Mapping[str, Any]
Avals = Sequence[Any]
Counter = Callable[[Params, Avals, Avals], int]

DIVIDE = 4
# Threefry-2x32: 20 rounds of (add, two shifts, or, xor), 17 key additions, and the xor of both
# words, by which jax's partitionable form makes one element of up to 32 bits.
THREEFRY = 118
# Philox-4x32: 10 rounds of 4 multiplications, 4 xors and 2 additions for 4 words, and the counter.
PHILOX_WORD = 30


def free(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts nothing: no arithmetic, or none that is known."""
    return 0


def per_output(weight: int) -> Counter:
    """Counts `weight` operations per element of the first output."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return weight * aval_size(outs[0])

    return count


def per_input(weight: int) -> Counter:
    """Counts `weight` operations per element of the first input."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return weight * aval_size(ins[0])

    return count


def arithmetic(weight: int, complex_weight: int) -> Counter:
    """Counts per output element, with a weight of its own for complex numbers."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return (complex_weight if is_complex(outs[0]) else weight) * aval_size(outs[0])

    return count


def integer_pow(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts repeated squaring, and a division for a negative power."""
    power = int(params["y"])
    steps = max(abs(power).bit_length() + abs(power).bit_count() - 2, 0)
    return (steps + (DIVIDE if power < 0 else 0)) * aval_size(outs[0])


def reduce(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts a variadic reduction, whose inputs are operands followed by as many initial values."""
    return sum(map(aval_size, ins[: len(ins) // 2]))


def _multiply_add(aval: Any) -> int:
    return 8 if is_complex(aval) else 2


def dot_general(params: Params, ins: Avals, outs: Avals) -> int:
    (lhs_contracting, _), _ = params["dimension_numbers"]
    depth = math.prod(ins[0].shape[axis] for axis in lhs_contracting)
    return _multiply_add(outs[0]) * aval_size(outs[0]) * depth


def ragged_dot_general(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts the rows that some group owns as all rows: group sizes are data.

    A ragged contraction has an output per group but multiplies every row once, in whichever group.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    depth = math.prod(ins[0].shape[axis] for axis in contracting)
    work = _multiply_add(outs[0]) * aval_size(outs[0]) * depth
    ragged_contraction = set(numbers.lhs_ragged_dimensions) & set(contracting)
    return work // max(ins[2].shape[-1], 1) if ragged_contraction else work


def matmul_last_axis(params: Params, ins: Avals, outs: Avals) -> int:
    return 2 * aval_size(outs[0]) * ins[0].shape[-1]


def convolution(params: Params, ins: Avals, outs: Avals) -> int:
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


def fft(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts 5 n log2 n per complex transform, half of that per real one."""
    length = math.prod(params["fft_lengths"])
    complex_to_complex = is_complex(ins[0]) and is_complex(outs[0])
    elements = max(aval_size(ins[0]), aval_size(outs[0]))
    work = 5 * elements * _log2_ceil(length)
    return work if complex_to_complex else work // 2


def sort(params: Params, ins: Avals, outs: Avals) -> int:
    length = ins[0].shape[params["dimension"]]
    return aval_size(ins[0]) * _log2_ceil(length) * params.get("num_keys", 1)


def top_k(params: Params, ins: Avals, outs: Avals) -> int:
    return aval_size(ins[0]) * max(_log2_ceil(params["k"]), 1)


def _matrix(aval: Any) -> tuple[int, int, int]:
    """Returns batch, rows and columns."""
    *batch, rows, columns = aval.shape
    return math.prod(batch), rows, columns


def cubic(numerator: int, denominator: int = 1) -> Counter:
    """Counts `numerator / denominator * n**3` per square matrix."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        batch, _, size = _matrix(ins[0])
        return batch * (numerator * size**3 // denominator)

    return count


def quadratic(weight: int) -> Counter:
    def count(params: Params, ins: Avals, outs: Avals) -> int:
        batch, rows, columns = _matrix(ins[0])
        return batch * weight * rows * columns

    return count


def lu(params: Params, ins: Avals, outs: Avals) -> int:
    batch, rows, columns = _matrix(ins[0])
    rank = min(rows, columns)
    return batch * (2 * rows * columns * rank - (rows + columns) * rank**2 + 2 * rank**3 // 3)


def qr(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts the factorisation and the product of its reflectors."""
    return 2 * reflectors(params, ins, outs)


def reflectors(params: Params, ins: Avals, outs: Avals) -> int:
    batch, rows, columns = _matrix(ins[0])
    rank = min(rows, columns)
    return batch * max(2 * rows * columns * rank - 2 * rank**3 // 3, 0)


def apply_reflectors(params: Params, ins: Avals, outs: Avals) -> int:
    _, _, reflectors = _matrix(ins[0])
    batch, rows, columns = _matrix(ins[2])
    return 4 * batch * rows * columns * reflectors


def svd(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts Golub & Van Loan's table: values alone, or values with both factors."""
    batch, rows, columns = _matrix(ins[0])
    tall, thin = max(rows, columns), min(rows, columns)
    if not params.get("compute_uv", True):
        return batch * (4 * tall * thin**2 - 4 * thin**3 // 3)
    return batch * (4 * tall**2 * thin + 8 * tall * thin**2 + 9 * thin**3)


def triangular_solve(params: Params, ins: Avals, outs: Avals) -> int:
    return aval_size(outs[0]) * ins[0].shape[-1]


def symmetric_product(params: Params, ins: Avals, outs: Avals) -> int:
    batch, rows, columns = _matrix(ins[0])
    return batch * (2 * rows * rows * columns + 2 * rows * rows)


def _window(params: Params) -> int:
    return math.prod(params["window_dimensions"])


def windows_of_output(weight: int) -> Counter:
    def count(params: Params, ins: Avals, outs: Avals) -> int:
        return weight * sum(map(aval_size, outs)) * _window(params)

    return count


def select_and_scatter(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts a comparison per window element and an addition per window.

    There is a window per element of the source, which comes second in `select_and_scatter` and
    first in `select_and_scatter_add`; the operand, whose shape the output has, is the other one.
    """
    first, second = map(aval_size, ins[:2])
    source = second if first == aval_size(outs[0]) else first
    return source * (_window(params) + 1)


def scatter_combine(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts one operation per updated element; inputs are operands, indices, updates."""
    return sum(map(aval_size, ins[len(ins) // 2 + 1 :]))


def random_bits(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts, per element, one threefry block or a word of a philox block."""
    return aval_size(outs[0]) * (THREEFRY if is_threefry(ins[0]) else PHILOX_WORD)


def philox_words(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts the last output, the one that is not the generator's new state."""
    return PHILOX_WORD * aval_size(outs[-1])


def is_threefry(key: Any) -> bool:
    """Tells by the key's implementation; one that does not tell is jax's default, threefry."""
    implementation = getattr(getattr(key, "dtype", None), "_impl", None)
    return "fry" in str(getattr(implementation, "name", "threefry2x32"))


def attention(weight: int) -> Counter:
    """Counts `weight` products of queries and keys: two forward, five backward."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        # cuDNN's layouts: 0 is batch, time, heads, features; 1 is batch, heads, time, features.
        length = ins[1].shape[2 if params.get("layout") == 1 else 1]
        return weight * 2 * aval_size(ins[0]) * length

    return count


def rnn(weight: int) -> Counter:
    """Counts every weight once per step and sequence."""

    def count(params: Params, ins: Avals, outs: Avals) -> int:
        batch, steps, *_ = ins[0].shape
        return weight * 2 * batch * steps * max(map(aval_size, ins[3:4]), default=0)

    return count


def sparse_product(params: Params, ins: Avals, outs: Avals) -> int:
    """Counts each stored element once per output column."""
    columns = outs[0].shape[-1] if len(outs[0].shape) > 1 else 1
    return 2 * aval_size(ins[0]) * columns


def kernel_estimate(params: Params, ins: Avals, outs: Avals) -> int:
    """Reads the author's `cost_estimate`; without one, counts all elements read and written."""
    estimate = getattr(params.get("cost_estimate"), "flops", None)
    if estimate is not None:
        return int(estimate)
    return sum(map(aval_size, (*ins, *outs)))
