"""In how many parts XLA:GPU sums up a matmul: side by side, each written for a kernel that adds them.

It follows XLA's `splitk_rewriter` for Hopper, whose estimate weighs that more tiles keep more of the device busy
against what the parts take to write and to read. The parts are what waits for readers, not their sum, unless a
reader is no kernel that XLA merges it into; so a matmul of few rows takes several times its result. Where what is
summed cannot be divided, both operands are copied with zeros behind (`GetPaddedK`).
"""

from __future__ import annotations

import functools
import math

from remat.core.graph import Graph, Op
from remat.memory.tables import DETERMINED, OF_SEVERAL

__all__ = [
    "ELEMENTAL_PARTS",
    "Dimensions",
    "PART_BYTES",
    "is_reshaped",
    "padded_count",
    "parts_of",
    "shape_of",
    "widths_of",
]

Dimensions = tuple[int, int, int, int]
"""Of a matmul: its batch, the rows of the first operand, the columns of the second, and how many are summed."""

PART_BYTES = 4
"""Of an element of a part: float32, also for operands of 16 bits."""

ELEMENTAL_PARTS = 32
"""The sum of fewer parts is merged with what reads it, see `remat.trace.emission`."""

_UNARY = DETERMINED - OF_SEVERAL
_MOST_PARTS = 2048
_TILE = 128  # rows and columns
_ALIGNED_BYTES = 16
_CORES = 132  # multiprocessors of an H200
_FLOP, _BYTE, _BYTE_OF_SUM, _LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7


def shape_of(graph: Graph, op: Op) -> Dimensions | None:
    """Returns the dimensions of a matmul that XLA may split, None of any other operator."""
    if not op.contracts or len(op.inputs) != 2:
        return None
    left, right = (graph.values[v] for v in op.inputs)
    if "int" in left.dtype or left.dtype.startswith(("complex", "bool")):
        return None
    count = math.prod(left.shape[d] for d in op.contracts[0])
    batch = math.prod(left.shape[d] for d in op.contracts[2])
    if not count or not batch:
        return None
    return (
        batch,
        math.prod(left.shape) // (count * batch),
        math.prod(right.shape) // (count * batch),
        count,
    )


def is_reshaped(op: Op, side: int, rank: int) -> bool:
    """Returns whether a matmul sees an operand of some rank in another shape, without a copy.

    To XLA an operand has one dimension that is summed over and one that is not, besides one of a batch
    (`DotDecomposer`). Of more, next to each other, it makes one; those that are not XLA has to transpose.
    """
    summed, batch = op.contracts[side], op.contracts[side + 2]
    free = tuple(d for d in range(rank) if d not in summed and d not in batch)
    groups = (summed, batch, free)
    in_place = all(group == tuple(range(group[0], group[-1] + 1)) for group in groups if group)
    return in_place and any(len(group) > 1 for group in groups)


def widths_of(graph: Graph, op: Op) -> tuple[tuple[int, int], int]:
    """Returns the bytes of an element of both operands of a matmul, and of its result.

    Of an operand they are those of what it is converted from: the matmul's kernel is taken to do that.
    """
    left, right = (_width(graph, _converted_from(graph, value)) for value in op.inputs)
    return (left, right), _width(graph, op.outputs[0])


def _width(graph: Graph, value: int) -> int:
    found = graph.values[value]
    return found.nbytes // max(math.prod(found.shape), 1)


def _converted_from(graph: Graph, value: int) -> int:
    while (producer := graph.values[value].producer) is not None:
        op = graph.ops[producer]
        if op.name not in _UNARY or len(op.inputs) != 1:
            break
        value = op.inputs[0]
    return value


@functools.lru_cache(maxsize=4096)
def parts_of(dimensions: Dimensions, operand_bytes: tuple[int, int], result_bytes: int) -> int:
    """Returns the number of parts, a power of two; 1 if the matmul is not split.

    Args:
        dimensions: of the matmul.
        operand_bytes: of an element of each operand; `result_bytes`: of the result.
    """
    choices = [1 << power for power in range(_MOST_PARTS.bit_length())]
    return min(choices, key=lambda parts: _cost(parts, dimensions, operand_bytes, result_bytes))


def padded_count(count: int, operand_bytes: tuple[int, int], parts: int) -> int:
    """Returns how many elements are summed with zeros added, so that every part begins at a multiple of 16 bytes.

    Args:
        count: of those without.
        operand_bytes: of an element of each operand; `parts`: of the matmul.
    """
    unit = parts * _ALIGNED_BYTES // min(_ALIGNED_BYTES, *operand_bytes) if parts > 1 else 1
    return math.ceil(count / unit) * unit


def _cost(
    parts: int, dimensions: Dimensions, operand_bytes: tuple[int, int], result_bytes: int
) -> float:
    batch, rows, columns, count = dimensions
    tile = min(rows, _TILE) * min(columns, _TILE)
    tiles = parts * batch * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    waves = max(1.0, tiles * tile / (_CORES * _TILE * _TILE))
    compute = _FLOP * 2 * tile * math.ceil(count / parts) * waves
    read = batch * count * (rows * operand_bytes[0] + columns * operand_bytes[1])
    elements = batch * rows * columns
    written = parts * elements * (PART_BYTES if parts > 1 else result_bytes)
    cost = max(compute, _BYTE * (read + written))
    if parts == 1:
        return cost
    return cost + _LAUNCH + _BYTE_OF_SUM * (written + elements * result_bytes)
