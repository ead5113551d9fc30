"""Exact minimum s-t cuts with 64-bit capacities on top of scipy's compiled Dinic.

`scipy.sparse.csgraph.maximum_flow` wraps 64-bit capacities to 32 bits without a word, and byte counts
overflow 32 bits at 2 GiB. Capacity scaling (Gabow 1985; Ahuja, Magnanti, Orlin, "Network Flows", section
7.3) keeps it exact: solve with capacities shifted right by k bits, keep that flow, go on in the residual
network with a smaller shift, until the shift is zero. After a phase with shift k less than `edges * 2^k`
of flow remains, so two or three phases do for any capacities below 2^62.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

__all__ = ["INFINITE", "Cut", "minimum_cut"]

INFINITE = -1
_LIMIT = 1 << 29  # of the flow in one phase: scipy adds two 32-bit numbers of this size


@dataclass(frozen=True)
class Cut:
    """A minimum cut and the flow that proves it minimal.

    Attributes:
        capacity: total capacity of the cut's edges, counted on the original network.
        flow: value of the maximum flow; equal to `capacity` by duality.
        sink_side: for every vertex whether it lies on the sink's side. Of all minimum cuts this is the
            one with the smallest sink side, which is unique: it does not depend on the numbering.
    """

    capacity: int
    flow: int
    sink_side: NDArray[np.bool_]


def minimum_cut(
    num_vertices: int,
    tails: Sequence[int],
    heads: Sequence[int],
    capacities: Sequence[int],
    source: int,
    sink: int,
) -> Cut:
    """Returns the minimum cut between `source` and `sink` that is closest to the sink.

    Args:
        num_vertices: vertices are `0 .. num_vertices - 1`.
        tails, heads: edges, parallel ones allowed.
        capacities: non-negative integers, or `INFINITE`.
        source, sink: different vertices.

    Raises:
        OverflowError: the finite capacities add up to 2^61 or more, in units of their greatest common
            divisor.
        ValueError: every cut is infinite.
    """
    finite = [c for c in capacities if c != INFINITE]
    unit = math.gcd(*finite) or 1
    total = sum(finite) // unit
    if total >= 1 << 61:
        raise OverflowError(f"capacities add up to {sum(finite)}, more than 2^61 units of {unit}")
    network = _Network(
        num_vertices,
        tails,
        heads,
        [c if c == INFINITE else c // unit for c in capacities],
        total + 1,
    )
    flow = network.saturate(source, sink, total)
    side = network.sink_side(sink)
    if side[source]:
        raise ValueError("every cut between source and sink is infinite")
    crossing = [
        c for t, h, c in zip(tails, heads, capacities, strict=True) if not side[t] and side[h]
    ]
    if INFINITE in crossing or flow > total:
        raise ValueError("every cut between source and sink is infinite")
    return Cut(capacity=sum(crossing), flow=flow * unit, sink_side=side)


class _Network:
    """A residual network over a symmetric sparsity pattern."""

    def __init__(
        self,
        size: int,
        tails: Sequence[int],
        heads: Sequence[int],
        capacities: Sequence[int],
        infinite: int,
    ) -> None:
        self.size = size
        tail = np.asarray([*tails, *heads], dtype=np.int64)
        head = np.asarray([*heads, *tails], dtype=np.int64)
        room = np.asarray([*capacities, *([0] * len(capacities))], dtype=np.int64)
        # Merge parallel edges; summing is exact because the total was bounded before, and infinite edges,
        # which are not part of it, are set and not summed.
        pairs, inverse = np.unique(tail * size + head, return_inverse=True)
        unbounded = room == INFINITE
        self.room = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(self.room, inverse[~unbounded], room[~unbounded])
        self.room[inverse[unbounded]] = infinite
        rows, self.columns = np.divmod(pairs, size)
        self.columns = self.columns.astype(np.int32)
        self.starts = np.searchsorted(rows, np.arange(size + 1)).astype(np.int32)
        self.num_edges = len(pairs)

    def saturate(self, source: int, sink: int, bound: int) -> int:
        """Sends as much flow as possible, leaving the residual network in `room`; returns its value."""
        total = 0
        while True:
            shift = max(0, bound.bit_length() - _LIMIT.bit_length() + 1)
            total += self._phase(source, sink, shift) << shift
            if shift == 0:
                return total
            bound = min(bound, self.num_edges << shift)

    def _phase(self, source: int, sink: int, shift: int) -> int:
        scaled = np.minimum(self.room >> shift, _LIMIT).astype(np.int32)
        graph = csr_array(
            (scaled, self.columns, self.starts), shape=(self.size, self.size), copy=False
        )
        result = maximum_flow(csr_matrix(graph), source, sink, method="dinic")
        flow = result.flow
        if flow.nnz != self.num_edges or not np.array_equal(flow.indices, self.columns):
            flow = self._aligned(flow)
        else:
            flow = flow.data
        self.room -= flow.astype(np.int64) << shift
        return int(result.flow_value)

    def _aligned(self, flow: csr_matrix) -> NDArray[np.int64]:
        coo = flow.tocoo()
        keys = coo.row.astype(np.int64) * self.size + coo.col
        rows = np.repeat(np.arange(self.size, dtype=np.int64), np.diff(self.starts))
        mine = rows * self.size + self.columns
        out = np.zeros(self.num_edges, dtype=np.int64)
        out[np.searchsorted(mine, keys)] = coo.data
        return out

    def sink_side(self, sink: int) -> NDArray[np.bool_]:
        """Returns which vertices can still reach the sink."""
        open_edges = csr_array(
            ((self.room > 0).astype(np.int8), self.columns, self.starts),
            shape=(self.size, self.size),
        )
        open_edges.eliminate_zeros()
        backwards = csr_matrix(open_edges.T)
        reached = breadth_first_order(backwards, sink, return_predecessors=False)
        side = np.zeros(self.size, dtype=np.bool_)
        side[reached] = True
        return side
