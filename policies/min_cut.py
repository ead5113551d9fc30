"""`MinCut`: fusion-aware min-cut checkpointing.

Yu & He, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware": the network of
Algorithm 1, the capacities of Algorithm 2, the bans of sections 3.1 and 3.4, and the tie-break towards the
backward side.

Guarantee: the plan minimises, over all valid saved sets, the sum of the capacities below; the cut's capacity
equals the flow's value (the plan's certificate). Complexity: one maximum flow on about two vertices per
forward value (Dinic, compiled), exact in integers.

Departures from the paper:

1. Values and operators are separate vertices, so that an operator with several results is banned or
   recomputed as a whole.
2. The tie-break is not a re-weighting: of all minimum cuts the one closest to the backward pass is taken. It
   is unique, so the plan does not depend on the order in which the program was traced.
3. Booleans weigh one bit per element, the form in which every plan keeps them.
4. The paper minimises traffic alone. `memory_weight` adds the bytes kept to the objective, for values that
   are not alive anyway (arguments, results). With `memory_weight=0` it is the paper's objective.
5. The paper bans an operator that is not fusible with a backward user (Lemma 3.1: recomputing it cannot avoid
   writing and reading its result). That is right for traffic, not for memory. With `memory_weight > 0` it is
   therefore priced at the write and the read it costs, as a capacity from the source to the operator; with
   `memory_weight=0` it is banned.
6. `heavy="roofline"` prices a compute-bound operator at its flops times the device's bytes per flop instead of
   banning it. Attention scores are then recomputed, large matmuls are kept.

`MinCut.paper()` is the paper's algorithm without 4 and 5. Section 3.7 (cuts between two fusion groups) is
`between_groups`; XLA forms its own groups, so no lowering uses it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from remat.cost import hlo_type
from remat.devices import get_device
from remat.errors import PolicyError
from remat.graph import Graph, Implementations, Op, Phase
from remat.plan import Certificate, stored_bytes
from remat.policies._flow import INFINITE, Cut, minimum_cut
from remat.policies.base import Decision, check_implementations

__all__ = ["MinCut", "between_groups"]

_SCALE = 64  # memory_weight is rounded to 1/64 so that capacities stay integers


@dataclass(frozen=True)
class MinCut:
    """Fusion-aware min-cut checkpointing; see the module docstring.

    Attributes:
        memory_weight: bytes of traffic that keeping one byte is worth, 0 for the paper's objective.
        heavy: `ban` never recomputes compute-bound operators; `batched` allows matmuls with batch
            dimensions (attention scores) at their roofline price; `roofline` allows all of them so.
        random: `ban` keeps random bits or what is made of them; `cheap` lets them be drawn again.
        reduction_ratio: a reduction whose result is at least this much smaller is kept (section 3.4).
        device: whose flops per byte the roofline price uses.
        implementations: which rewrites of the backward pass to plan with: `exact` for those whose gradients are
            bit-equal, `none`, `all`, or names of rules or kinds; see `remat.rules`.
    """

    memory_weight: float = 1.25
    heavy: Literal["ban", "batched", "roofline"] = "ban"
    random: Literal["ban", "cheap"] = "ban"
    reduction_ratio: int = 4
    device: str = "h200"
    implementations: Implementations = "exact"
    name: ClassVar[str] = "min_cut"

    def __post_init__(self) -> None:
        if not 0 <= self.memory_weight <= 1024:
            raise PolicyError(
                f"MinCut(memory_weight={self.memory_weight!r}): expected a number from 0 (the paper's "
                "objective, traffic only) to 1024"
            )
        _one_of("heavy", self.heavy, ("ban", "batched", "roofline"))
        _one_of("random", self.random, ("ban", "cheap"))
        if not self.reduction_ratio >= 1:  # nan is not
            raise PolicyError(
                f"MinCut(reduction_ratio={self.reduction_ratio!r}): expected an integer of at least 1"
            )
        get_device(self.device)
        check_implementations("MinCut", self.implementations)

    @classmethod
    def paper(cls) -> MinCut:
        """Returns the algorithm as published: traffic is the only objective."""
        return cls(memory_weight=0, implementations="none")

    def decide(self, graph: Graph) -> Decision:
        """Returns the minimum cut's values with the flow that certifies it."""
        network = _build(graph, self)
        cut = network.solve()
        certificate = Certificate("cut capacity = flow value", cut.capacity, cut.flow)
        status = "optimal" if cut.capacity == cut.flow else "heuristic"
        return Decision(network.saved(cut), status, certificate)


def _one_of(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise PolicyError(f"MinCut({name}={given!r}): expected one of {list(choices)}")


def between_groups(
    graph: Graph, producer: Collection[int], consumer: Collection[int]
) -> frozenset[int]:
    """Returns what one fusion group should write for another (Yu & He, section 3.7).

    The consuming kernel reads the returned values, recomputes the other values it needs of the producing
    group, and least memory is moved between the two. A value of the producer that anything else reads is
    written in any case (the section's change to V_m).

    Args:
        graph: any graph; its phases are not used.
        producer: operator ids of group A, closed under dependence within the group.
        consumer: operator ids of group B, disjoint from A.

    Raises:
        PolicyError: the groups overlap.
    """
    if set(producer) & set(consumer):
        raise PolicyError(f"the groups share operators {sorted(set(producer) & set(consumer))}")
    order = {op: index for index, op in enumerate(sorted({*producer, *consumer}))}
    made = {v: order[op] for op in order for v in graph.ops[op].outputs}
    phases: dict[int, Phase] = {op: "forward" if op in producer else "backward" for op in order}
    ops = tuple(replace(graph.ops[op], id=i, phase=phases[op]) for op, i in order.items())
    read = {op: [v for v in graph.ops[op].inputs if v not in made] for op in order}
    inputs = dict.fromkeys(v for op in order if phases[op] == "forward" for v in read[op])
    others = dict.fromkeys(v for op in order for v in read[op] if v not in inputs)
    roots = {*graph.outputs, *graph.gradients}
    elsewhere = tuple(
        v
        for v, index in made.items()
        if ops[index].phase == "forward"
        and (v in roots or any(user not in order for user in graph.users[v]))
    )
    pair = Graph(
        values=tuple(replace(value, producer=made.get(value.id)) for value in graph.values),
        ops=ops,
        inputs=tuple(v for v in inputs if v not in graph.constants),
        cotangents=tuple(v for v in others if v not in graph.constants),
        outputs=elsewhere,
        constants=graph.constants,
    )
    return MinCut.paper().decide(pair).saved


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


def _build(graph: Graph, policy: MinCut) -> _CutNetwork:
    network = _CutNetwork(graph)
    constants = set(graph.constants)
    capacity = _Capacity(graph, policy)
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

    def __init__(self, graph: Graph, policy: MinCut) -> None:
        self.graph = graph
        self.policy = policy
        self.memory_weight = round(policy.memory_weight * _SCALE)
        self.device = get_device(policy.device)

    def save(self, value: int) -> int:
        """Price of keeping a value: one read, one write unless it is written anyway, and its memory."""
        if not self.graph.values[value].savable:
            return INFINITE
        size = stored_bytes(self.graph.values[value])
        passes = 1 if self._materialized(value) else 2
        memory = 0 if value in self.graph.alive_anyway else self.memory_weight
        # An empty or zero-byte value still has to be on one side; one unit breaks no tie between others.
        return size * (passes * _SCALE + memory) + 1

    def _materialized(self, value: int) -> bool:
        """Whether the forward pass writes the value to memory anyway (Algorithm 2)."""
        graph = self.graph
        if value in graph.alive_anyway or value in graph.carried:
            return True
        producer = graph.values[value].producer
        if producer is None or not graph.ops[producer].fusible:
            return True
        users = (graph.ops[user] for user in graph.users[value])
        return any(not op.fusible for op in users if op.phase == "forward")

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
        allowed = self.policy.heavy == "roofline" or (self.policy.heavy == "batched" and op.batched)
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
        small = sum(self.graph.values[v].nbytes for v in op.outputs) <= 1024
        return small or self.policy.random == "cheap"

    def _shrinks(self, op: Op) -> bool:
        read = sum(self.graph.values[v].nbytes for v in op.inputs)
        written = sum(self.graph.values[v].nbytes for v in op.outputs)
        return read >= self.policy.reduction_ratio * written

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
