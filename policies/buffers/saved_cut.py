"""The cheapest saved set of a joint graph, as a minimum cut: Algorithms 1 and 2 of Yu & He with their bans.

`remat.policies.MinCut` is this cut as a policy, and has the paper's reference, the guarantee and the departures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from remat.core.buffers import is_written_forward
from remat.core.cost import hlo_type
from remat.core.devices import get_device
from remat.core.forms import stored_bytes
from remat.core.graph import Graph, Op
from remat.memory.tables import CONVOLUTION
from remat.plans.record import Certificate
from remat.policies.base import Decision
from remat.policies.solvers.flow import INFINITE, Cut, minimum_cut

__all__ = ["MOST_WEIGHT", "CutRules", "saved_cut", "saved_cuts"]

# memory_weight is rounded to 1/64 so that capacities stay integers: the weight is off by less than a per cent.
_SCALE = 64
# Weights between which one is looked for where none is given. The least is by look: keeping a byte counts a
# little more than writing it, so that of ways to cut that move as much the one that keeps less is taken. The most
# stands for "memory alone": a thousand passes over memory for one byte.
_LEAST_WEIGHT = 1.25
MOST_WEIGHT = 1024
# Bytes up to which random results are drawn again: keys and counters are smaller, masks larger. By look; what is
# drawn again is at most this much work, what is kept at most these bytes.
_FEW_RANDOM_BYTES = 1024


@dataclass(frozen=True)
class CutRules:
    """What a cut may cross and at which price; the attributes are those of `remat.policies.MinCut`.

    `reduction_ratio` is the paper's (section 3.4: "we choose 4 times smaller"), a setting of the policy. The paper
    has no weight of memory; see `_least_weight` for what None stands for.
    """

    memory_weight: float | None = None
    heavy: Literal["ban", "batched", "roofline"] = "ban"
    random: Literal["ban", "cheap"] = "ban"
    reduction_ratio: int = 4
    device: str = "h200"


def saved_cut(graph: Graph, rules: CutRules) -> Decision:
    """Returns the minimum cut's values with the flow that certifies it."""
    network = _build(graph, rules)
    if rules.memory_weight is None:
        solved = _least_weight(network)
    else:
        solved = network.solve(_scaled(rules.memory_weight))
    cut = solved.cut
    certificate = Certificate("cut capacity = flow value", cut.capacity, cut.flow)
    status = "optimal" if cut.capacity == cut.flow else "heuristic"
    return Decision(solved.saved, status, certificate)


def saved_cuts(graph: Graph, rules: CutRules, weights: Iterable[float]) -> Iterator[frozenset[int]]:
    """Yields the values that `saved_cut` keeps at each weight of memory, all above 0."""
    network = _build(graph, replace(rules, memory_weight=None))
    return (network.solve(_scaled(weight)).saved for weight in weights)


def _scaled(weight: float) -> int:
    return round(weight * _SCALE)


def _least_weight(network: _CutNetwork) -> _Solved:
    """Returns the cut at the least weight of memory at which it keeps no more than jax's `dots_saveable` would.

    `dots_saveable` keeps the results of matmuls; what else may not run again (random bits, reductions, what XLA
    does not fuse) has to be kept by any cut with these bans. Without a matmul that is a bar for nobody, and where
    convolutions outweigh matmuls nobody takes that policy (with the bar ResNet-50 would take and move 1 % more);
    there the least weight stands. The results of what may not run again are a cut, so the most weight is within the
    bar, unless what runs again then costs a thousand times what it saves.

    Traffic over kept bytes is convex along the weights, so two cuts with the bar between them give the only weight
    at which a third can lie below the chord through them; where none does the right one of the two is the answer.
    At most one flow per corner of the curve, in practice about five.
    """
    enough = network.banned_bytes
    more = network.solve(_scaled(_LEAST_WEIGHT))
    if enough is None or more.kept_bytes <= enough:
        return more
    less = network.solve(_scaled(MOST_WEIGHT))
    while less.kept_bytes <= enough < more.kept_bytes:
        # Rounded up: at the weight of the chord itself both ends are minimum cuts.
        weight = 1 - (more.traffic - less.traffic) // (more.kept_bytes - less.kept_bytes)
        found = network.solve(weight)
        if found.kept_bytes in (more.kept_bytes, less.kept_bytes) or weight >= less.weight:
            return less
        if found.kept_bytes <= enough:
            less = found
        else:
            more = found
    return less


@dataclass(frozen=True)
class _Solved:
    """A minimum cut at one weight: what it keeps, and the two sums that the weight is between.

    `traffic` is in 1/64 byte, `weight` in 1/64 byte of traffic per byte kept.
    """

    cut: Cut
    weight: int
    saved: frozenset[int]
    traffic: int
    kept_bytes: int


class _CutNetwork:
    """Algorithm 1's network: source, sink, a vertex per forward value and per forward operator.

    On the sink's side a value is *needed in the backward pass* and an operator *runs again*. An edge from an
    operator to its result is cut when the result is kept.
    """

    source, sink = 0, 1

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.vertices: dict[tuple[str, int], int] = {}
        self.tails: list[int] = []
        self.heads: list[int] = []
        self.traffic: list[int] = []
        self.kept_bytes: list[int] = []  # of memory, 0 where an edge keeps nothing
        self.banned_bytes: int | None = None  # of what may not run again; None: no bar
        self.saves: list[tuple[int, int, int]] = []  # tail, head, value

    def vertex(self, kind: str, index: int) -> int:
        return self.vertices.setdefault((kind, index), len(self.vertices) + 2)

    def edge(self, tail: int, head: int, traffic: int, kept_bytes: int = 0) -> None:
        self.tails.append(tail)
        self.heads.append(head)
        self.traffic.append(traffic)
        self.kept_bytes.append(kept_bytes)

    def save(self, tail: int, value: int, capacity: _Capacity) -> None:
        head = self.vertex("value", value)
        self.saves.append((tail, head, value))
        self.edge(tail, head, capacity.save(value), capacity.memory(value))

    def solve(self, weight: int) -> _Solved:
        """Returns the minimum cut at `weight`, which is in 1/64 byte of traffic per byte kept."""
        size = len(self.vertices) + 2
        both = zip(self.traffic, self.kept_bytes, strict=True)
        # What is not savable has no bytes, so INFINITE stays what it is.
        capacities = [traffic + weight * kept for traffic, kept in both]
        cut = minimum_cut(size, self.tails, self.heads, capacities, self.source, self.sink)
        side = cut.sink_side
        saved = frozenset(v for tail, head, v in self.saves if side[head] and not side[tail])
        edges = zip(self.tails, self.heads, self.kept_bytes, strict=True)
        kept = sum(kept for tail, head, kept in edges if side[head] and not side[tail])
        return _Solved(cut, weight, saved, cut.capacity - weight * kept, kept)


def _build(graph: Graph, rules: CutRules) -> _CutNetwork:
    network = _CutNetwork(graph)
    constants = set(graph.constants)
    capacity = _Capacity(graph, rules)
    banned: list[Op] = []
    for value in graph.inputs:
        network.save(network.source, value, capacity)
    for op in graph.forward_ops():
        vertex = network.vertex("op", op.id)
        price = capacity.recompute(op)
        if price:
            network.edge(network.source, vertex, price)
        if price == INFINITE:
            banned.append(op)
        for value in dict.fromkeys(op.inputs):
            if value not in constants:
                network.edge(network.vertex("value", value), vertex, INFINITE)
        for value in op.outputs:
            network.save(vertex, value, capacity)
    for value in graph.backward_reads:
        network.edge(network.vertex("value", value), network.sink, INFINITE)
    heavy = [(op, graph.values[v].nbytes) for op in banned if op.heavy for v in op.outputs]
    if sum(-nbytes if op.name == CONVOLUTION else nbytes for op, nbytes in heavy) > 0:
        network.banned_bytes = sum(capacity.memory(v) for op in banned for v in op.outputs)
    return network


class _Capacity:
    """Algorithm 2 and the bans, in units of 1/64 byte of traffic."""

    def __init__(self, graph: Graph, rules: CutRules) -> None:
        self.graph = graph
        self.rules = rules
        self.device = get_device(rules.device)

    def save(self, value: int) -> int:
        """Traffic of keeping a value: one read, one write unless it is written anyway.

        A loop writes what it keeps of an iteration into a stack, whether or not it is written besides.
        """
        graph = self.graph
        if not graph.values[value].savable:
            return INFINITE
        size = stored_bytes(graph.values[value])
        if graph.multiplicity > 1:
            written = value in graph.fixed or value in graph.alive_anyway
        else:
            written = is_written_forward(graph, value)
        passes = 1 if written else 2
        # An empty or zero-byte value still has to be on one side; one unit breaks no tie between others.
        return size * passes * _SCALE + 1

    def memory(self, value: int) -> int:
        """Bytes that keeping a value adds to what is alive, in a loop per iteration.

        A loop keeps what is the same in every iteration once.
        """
        graph = self.graph
        if not graph.values[value].savable or value in graph.alive_anyway:
            return 0
        times = max(graph.multiplicity, 1) if value in graph.fixed else 1
        return stored_bytes(graph.values[value]) // times

    def recompute(self, op: Op) -> int:
        """Price of running a forward operator again; `INFINITE` bans it."""
        if not op.recomputable:
            return INFINITE
        if any(not self.graph.values[v].savable for v in op.outputs):
            # Nothing can be kept in its place: priced as if each result were written and read.
            return 2 * _SCALE * sum(self.graph.values[v].nbytes for v in op.outputs)
        if op.heavy:
            return self._heavy(op)
        if op.random and op.kind == "RANDOM" and not self._cheap_random(op):
            return INFINITE
        if op.kind == "REDUCTION" and self._shrinks(op):
            return INFINITE
        if not op.fusible:
            return INFINITE
        return self._unfused(op)

    def _heavy(self, op: Op) -> int:
        allowed = self.rules.heavy == "roofline" or (self.rules.heavy == "batched" and op.batched)
        if not allowed:
            return INFINITE
        written = 2 * sum(self.graph.values[v].nbytes for v in op.outputs)
        read = sum(self.graph.values[v].nbytes for v in op.inputs)
        dtype = self.graph.values[op.outputs[0]].dtype if op.outputs else "float32"
        compute = op.flops * Fraction(
            int(self.device.memory_bytes_per_second),
            int(self.device.matmul_flops_per_second(hlo_type(dtype))),
        )
        return int(max(compute, Fraction(written + read)) * _SCALE)

    def _cheap_random(self, op: Op) -> bool:
        small = sum(self.graph.values[v].nbytes for v in op.outputs) <= _FEW_RANDOM_BYTES
        return small or self.rules.random == "cheap"

    def _shrinks(self, op: Op) -> bool:
        read = sum(self.graph.values[v].nbytes for v in op.inputs)
        written = sum(self.graph.values[v].nbytes for v in op.outputs)
        return read >= self.rules.reduction_ratio * written

    def _unfused(self, op: Op) -> int:
        """Price of a fusible operator that a backward operator forces to be written (Lemma 3.1)."""
        graph = self.graph
        forced = [
            value
            for value in op.outputs
            if any(
                graph.ops[user].phase == "backward" and not graph.ops[user].fusible
                for user in graph.users[value]
            )
        ]
        if not forced:
            return 0
        if self.rules.memory_weight == 0:
            return INFINITE
        return 2 * _SCALE * sum(graph.values[value].nbytes for value in forced)
