"""What an operator costs inside of a kernel, as XLA:GPU's fusion estimates it: arithmetic, reads, code.

Not what it takes in truth (`remat.core.cost`): XLA's estimates decide what it merges.
"""

from __future__ import annotations

from collections.abc import Mapping

from remat.core.graph import Op

__all__ = [
    "CYCLES",
    "CYCLE_BYTES",
    "IN_BFLOAT16",
    "blocks_of",
    "cycles_named",
    "cycles_of",
    "times_read",
]

# Clock cycles per element, from what XLA measured on an H100 (`hlo_op_profiles_data.h`, sm_90, float32) and uses
# for all of its generation; the same was read off the times that it writes down (`priority_fusion_dump`). Operators
# that are not here, `tan` and `erf` among them, count `_CYCLES`. What XLA makes of several is their sum: `logistic`
# is a negation, an exponential, an addition and a division; `erf_inv`, roughly, a `log1p`, a root and a polynomial.
CYCLES: Mapping[str, int] = {
    "add": 7,
    "add_any": 7,
    "atan": 431,
    "atan2": 431,
    "bessel_i0e": 540,
    "bessel_i1e": 532,
    "cbrt": 178,
    "cos": 978,
    "digamma": 2816,
    "div": 19,
    "erf_inv": 455,
    "erfc": 383,
    "exp": 79,
    "exp2": 82,
    "expm1": 190,
    "lgamma": 1927,
    "log": 166,
    "log1p": 229,
    "log2": 169,
    "logistic": 108,
    "pow": 510,
    "reduce_sum": 7,
    "rsqrt": 75,
    "sin": 958,
    "sqrt": 75,
    "sub": 7,
    "tanh": 467,
}
_CYCLES = 3
# What XLA computes in bfloat16 itself it has measured none of, so that it counts `_CYCLES`. For all others it
# converts operands to float32 (`GpuFloatSupport`), and what is below counts.
IN_BFLOAT16: Mapping[str, int] = dict.fromkeys(
    ("add", "add_any", "exp", "log", "mul", "sub"), _CYCLES
)
# Threefry has 20 rounds of an addition, a rotation (two shifts, one or) and an exclusive or, and the keys.
_RANDOM_CYCLES = 120 * _CYCLES
# How many bytes of memory traffic take as long as one cycle of one of a device's lanes, by
# `GpuPerformanceModelBase::CalculateEffectiveFlopsPerNs`: an H200 moves 4.8e12 bytes per second and has 132
# multiprocessors of 128 lanes that do two operations at 1.98 GHz. An H100 has 0.7 and a B200 1.4 times that;
# programs are predicted as for an H200 whatever they are compiled for.
CYCLE_BYTES = 4.8e12 / (132 * 128 * 2 * 1.98e9)

_THREADS, _PROCESSORS = 128, 132
# Operators that read of their first operand no more than their result has, and those that read it repeatedly.
_PARTS = frozenset({"slice", "split", "dynamic_slice", "unstack"})
_COPIES = frozenset({"broadcast_in_dim", "gather"})
_MOVES = frozenset({"INDEXED", "VIEW"})


def cycles_named(name: str) -> int:
    """Returns the clock cycles per element of a primitive."""
    return CYCLES.get(name, _CYCLES)


def cycles_of(op: Op) -> int:
    """Returns the clock cycles per element of the result; of a reduction, per element that it reads.

    What moves elements takes none, but for those of its own (`Op.cycles`): a choice between what is joined, say.
    """
    if op.random and op.kind == "RANDOM":
        return _RANDOM_CYCLES
    return op.cycles or (0 if op.kind in _MOVES else cycles_named(op.name))


def blocks_of(op: Op | None, elements: int) -> int:
    """Returns the blocks of threads of a kernel that ends with an operator, 0 for enough to occupy a device.

    Args:
        op: the operator, None for what is none of the program's. A reduction's are known (`Op.blocks`).
        elements: that the kernel walks over. Of others each thread makes one while there are few, 128 in a block
            (XLA's `CalculateLaunchDimensions`, `ComputeLoopFusionConfig`).
    """
    if op is not None and op.blocks:
        return op.blocks
    blocks = -(-elements // _THREADS)
    return blocks if blocks < _PROCESSORS else 0


def times_read(op: Op, size: int, made: int, *, first: bool) -> float:
    """Returns how often an operator reads each element of an operand: less than once if it reads a part of them.

    Args:
        op: the operator.
        size: elements of the operand; `made`: of the results.
        first: whether it is the first operand.
    """
    if not size:
        return 1.0
    if op.kind == "POINTWISE":  # a row that is added to every row of a matrix is copied on the way
        return made / size
    if not first:
        return 1.0
    if op.name in _COPIES:
        return made / size
    return min(1.0, made / size) if op.name in _PARTS else 1.0
