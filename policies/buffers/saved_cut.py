"""The cheapest saved set of a joint graph, as a minimum cut: Algorithms 1 and 2 of Yu & He with their bans.

`remat.policies.MinCut` is this cut as a policy, and has the paper's reference, the guarantee and the departures.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from remat.core.buffers import is_written_forward
from remat.core.cost import hlo_type
from remat.core.devices import get_device
from remat.core.forms import stored_bytes
from remat.core.graph import Graph, Op
from remat.plans.record import Certificate
from remat.policies.base import Decision
from remat.policies.solvers.flow import INFINITE, Cut, minimum_cut

__all__ = ["CutRules", "saved_cut"]

# memory_weight is rounded to 1/64 so that capacities stay integers: the weight is off by less than a per cent.
_SCALE = 64
# Bytes up to which random results are drawn again: keys and counters are smaller, masks larger. By look; what is
# drawn again is at most this much work, what is kept at most these bytes.
_FEW_RANDOM_BYTES = 1024


@dataclass(frozen=True)
class CutRules:
    """What a cut may cross and at which price; the attributes are those of `remat.policies.MinCut`.

    `reduction_ratio` is the paper's (section 3.4: "we choose 4 times smaller"). The paper has no weight of memory;
    1.25 is ours, by look: keeping a byte counts a little more than writing it, so that of ways to cut that move as
    much the one that keeps less is taken. Settings of the policy, both.
    """

    memory_weight: float = 1.25
    heavy: Literal["ban", "batched", "roofline"] = "ban"
    random: Literal["ban", "cheap"] = "ban"
    reduction_ratio: int = 4
    device: str = "h200"


def saved_cut(graph: Graph, rules: CutRules) -> Decision:
    """Returns the minimum cut's values with the flow that certifies it."""
    network = _build(graph, rules)
    cut = network.solve()
    certificate = Certificate("cut capacity = flow value", cut.capacity, cut.flow)
    status = "optimal" if cut.capacity == cut.flow else "heuristic"
    return Decision(network.saved(cut), status, certificate)


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
        self.capacities: list[int] = []
        self.saves: list[tuple[int, int, int]] = []  # tail, head, value

    def vertex(self, kind: str, index: int) -> int:
        return self.vertices.setdefault((kind, index), len(self.vertices) + 2)

    def edge(self, tail: int, head: int, capacity: int) -> None:
        self.tails.append(tail)
        self.heads.append(head)
        self.capacities.append(capacity)

    def save(self, tail: int, value: int, capacity: int) -> None:
        head = self.vertex("value", value)
        self.saves.append((tail, head, value))
        self.edge(tail, head, capacity)

    def solve(self) -> Cut:
        size = len(self.vertices) + 2
        return minimum_cut(size, self.tails, self.heads, self.capacities, self.source, self.sink)

    def saved(self, cut: Cut) -> frozenset[int]:
        side = cut.sink_side
        return frozenset(v for tail, head, v in self.saves if side[head] and not side[tail])


def _build(graph: Graph, rules: CutRules) -> _CutNetwork:
    network = _CutNetwork(graph)
    constants = set(graph.constants)
    capacity = _Capacity(graph, rules)
    for value in graph.inputs:
        network.save(network.source, value, capacity.save(value))
    for op in graph.forward_ops():
        vertex = network.vertex("op", op.id)
        price = capacity.recompute(op)
        if price:
            network.edge(network.source, vertex, price)
        for value in dict.fromkeys(op.inputs):
            if value not in constants:
                network.edge(network.vertex("value", value), vertex, INFINITE)
        for value in op.outputs:
            network.save(vertex, value, capacity.save(value))
    for value in graph.backward_reads:
        network.edge(network.vertex("value", value), network.sink, INFINITE)
    return network


class _Capacity:
    """Algorithm 2 and the bans, in units of 1/64 byte of traffic."""

    def __init__(self, graph: Graph, rules: CutRules) -> None:
        self.graph = graph
        self.rules = rules
        self.memory_weight = round(rules.memory_weight * _SCALE)
        self.device = get_device(rules.device)

    def save(self, value: int) -> int:
        """Price of keeping a value: one read, one write unless it is written anyway, and its memory."""
        if not self.graph.values[value].savable:
            return INFINITE
        size = stored_bytes(self.graph.values[value])
        passes = 1 if is_written_forward(self.graph, value) else 2
        memory = 0 if value in self.graph.alive_anyway else self.memory_weight
        # An empty or zero-byte value still has to be on one side; one unit breaks no tie between others.
        return size * (passes * _SCALE + memory) + 1

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
        if self.memory_weight == 0:
            return INFINITE
        return 2 * _SCALE * sum(graph.values[value].nbytes for value in forced)
