"""The scheduling problem behind a budget: operators with a cost and a size, and sequences of them.

This is the form in which rematerialization is published (Checkmate, MONeT, Moccasin, DTR): one node per
operator, a cost to run it, the bytes of its result, and an order. A *sequence* lists the nodes as executed, a
node once per time it is computed. Sequences are judged by `replay`:

* every node a computation reads must have been computed before, and is alive at that time;
* a copy of a node's result lives from the computation that makes it through its last reader before the next
  computation of the same node; a copy nobody reads counts while it is computed;
* while a node runs, its `workspace` counts too.

`remat.policies.buffers.condense` makes a `Problem` of a joint graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Problem", "Replayed", "peak_of_order", "replay"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes in a topological order, which is the order in which they run for the first time.

    Attributes:
        costs: of one run of every node, in any unit (seconds, flops), not negative.
        sizes: bytes of every node's result.
        inputs: for every node the nodes it reads, each with a smaller index, each once.
        repeatable: nodes that may run more than once; the others run exactly once.
        turn: repetitions come after the first run of node `turn - 1`: the backward pass begins at `turn`.
            0 allows them anywhere.
        workspace: extra bytes while a node runs.

    Raises:
        ValueError: lengths differ, a node reads one that does not come before it, or a number is negative.
    """

    costs: Floats
    sizes: Ints
    inputs: tuple[tuple[int, ...], ...]
    repeatable: Bools
    turn: int = 0
    workspace: Ints | None = None

    def __post_init__(self) -> None:
        count = len(self.inputs)
        for name in ("costs", "sizes", "repeatable", "workspace"):
            array = getattr(self, name)
            if array is not None and len(array) != count:
                raise ValueError(f"{name} has {len(array)} entries for {count} nodes")
            if array is not None and np.any(array < 0 if array.dtype != bool else False):
                raise ValueError(f"{name} has negative entries")
        for node, reads in enumerate(self.inputs):
            if any(not 0 <= r < node for r in reads) or len(set(reads)) != len(reads):
                raise ValueError(f"node {node} reads {reads}: expected smaller indices, each once")
        if not 0 <= self.turn <= count:
            raise ValueError(f"turn={self.turn} is not a position among {count} nodes")

    @classmethod
    def of(
        cls,
        costs: Sequence[float],
        sizes: Sequence[int],
        inputs: Iterable[Iterable[int]],
        *,
        repeatable: Sequence[bool] | None = None,
        turn: int = 0,
        workspace: Sequence[int] | None = None,
    ) -> Problem:
        """Makes a problem of plain lists; by default every node may be repeated."""
        allowed = [True] * len(costs) if repeatable is None else list(repeatable)
        return cls(
            costs=np.asarray(costs, np.float64),
            sizes=np.asarray(sizes, np.int64),
            inputs=tuple(tuple(dict.fromkeys(reads)) for reads in inputs),
            repeatable=np.asarray(allowed, np.bool_),
            turn=turn,
            workspace=None if workspace is None else np.asarray(workspace, np.int64),
        )

    def __len__(self) -> int:
        return len(self.inputs)

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """What was computed of this problem, by a key of whoever did: it lives as long."""
        return {}

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For every node the nodes that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.inputs]
        for node, reads in enumerate(self.inputs):
            for read in reads:
                found[read].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def input_csr(self) -> tuple[Ints, Ints]:
        """`inputs` as compressed rows: `indices[starts[i]:starts[i + 1]]` are those of node `i`."""
        return _csr(self.inputs)

    @cached_property
    def user_csr(self) -> tuple[Ints, Ints]:
        """`users` as compressed rows."""
        return _csr(self.users)

    @cached_property
    def extra_while_running(self) -> Ints:
        """`workspace`, zeros if there is none."""
        return np.zeros(len(self), np.int64) if self.workspace is None else self.workspace

    @cached_property
    def first_runs(self) -> Ints:
        """The sequence without any repetition."""
        return np.arange(len(self), dtype=np.int64)

    @cached_property
    def needs(self) -> Ints:
        """Bytes that must be alive while a node runs, whatever the sequence: a bound on any budget."""
        reads = (int(sum(self.sizes[r] for r in row)) for row in self.inputs)
        own = np.fromiter(reads, np.int64, len(self))
        return own + self.sizes + self.extra_while_running

    @property
    def floor_bytes(self) -> int:
        """The largest of `needs`: no sequence has a smaller peak."""
        return int(self.needs.max(initial=0))

    @property
    def total_cost(self) -> float:
        """Cost of running every node once."""
        return float(self.costs.sum())


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a sequence does.

    Attributes:
        live_bytes: at every position, while that node runs.
        cost: of the whole sequence; `extra_cost`: of the repetitions.
    """

    live_bytes: Ints
    cost: float
    extra_cost: float

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes."""
        return int(self.live_bytes.max(initial=0))


def replay(problem: Problem, sequence: Sequence[int] | Ints) -> Replayed:
    """Judges a sequence: validity, memory at every position, cost.

    Raises:
        ValueError: a node reads one that was not computed before, a node is missing, is repeated though it must
            not be, or is repeated before the turn, or first runs are out of order.
    """
    order = [int(node) for node in sequence]
    count = len(problem)
    latest = [-1] * count
    last_use = list(range(len(order)))  # by position of the copy
    expected = 0
    for position, node in enumerate(order):
        if not 0 <= node < count:
            raise ValueError(f"position {position}: there is no node {node}")
        for read in problem.inputs[node]:
            if latest[read] < 0:
                raise ValueError(f"position {position}: node {node} reads {read}, never computed")
            last_use[latest[read]] = position
        if latest[node] < 0:
            if node != expected:
                raise ValueError(f"position {position}: node {node} first runs before {expected}")
            expected += 1
        elif not problem.repeatable[node]:
            raise ValueError(f"position {position}: node {node} may not run again")
        elif expected < problem.turn:
            raise ValueError(f"position {position}: node {node} runs again before the turn")
        latest[node] = position
    if expected != count:
        raise ValueError(f"node {expected} never runs")
    sequence_array = np.asarray(order, np.int64)
    change = np.zeros(len(order) + 1, np.int64)
    sizes = problem.sizes[sequence_array]
    np.add.at(change, np.arange(len(order)), sizes)
    np.add.at(change, np.asarray(last_use, np.int64) + 1, -sizes)
    live = np.cumsum(change)[:-1] + problem.extra_while_running[sequence_array]
    cost = float(problem.costs[sequence_array].sum())
    return Replayed(live, cost, cost - problem.total_cost)


def peak_of_order(problem: Problem) -> int:
    """Returns the peak without any repetition."""
    return replay(problem, problem.first_runs).peak_bytes


def _csr(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    indices = np.fromiter((i for row in rows for i in row), np.int64, int(starts[-1]))
    return starts, indices
