"""From a joint graph to the scheduling problem XLA really has: one node per buffer that is written.

A value that XLA fuses away is never a buffer; keeping it or not is no question. So the graph is coarsened
before it is scheduled: a *node* is an operator whose result becomes a buffer together with the fusible
operators that feed it, and it reads the buffers those read. What becomes a buffer:

* the result of an operator that does not fuse, of a reduction, and of an operator that may not run again, unless
  it is a decision, which fuses as if it might (the kernel then may not run again either);
* what an operator that does not fuse reads;
* a result of the function or a gradient (the caller's memory: it costs nothing here);
* a fused value that several kernels read and that costs more reads to make than it has bytes (the sum of a
  residual connection): XLA writes it once instead of making it again in every reader;
* a fused value that XLA leaves in memory, as the kernel would be too large (a step of a stencil) or slower;
* a fused value that a minimum cut would keep for the backward pass (the mask of a dropout, for instance);
* of the gradient of what is used often the sum so far at every tie that adds it up as it comes
  (`remat.plans.stages.accumulations`): XLA's one kernel at the end would need all of its terms at once.

A buffer that a single element-wise kernel reads and overwrites is one node with that kernel, and so is one that
goes through an `optimization_barrier`.

Coarsening loses plans in which another fused value is kept; the cut of `min_cut` finds those worth it.
A node's cost is the roofline time of its kernel: the greater of its arithmetic and of the buffers it reads and
writes, and a thousandth of the lesser, which decides between plans that are equal otherwise; matmuls and
convolutions are taken to reach 40 % of what the data sheet promises.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from remat.core.buffers import ends_kernel, kernel_results, live_ops
from remat.core.cost import hlo_type
from remat.core.devices import Device, get_device
from remat.core.forms import stored_bytes
from remat.core.graph import Graph, Op
from remat.plans.stages import accumulations
from remat.policies.buffers.saved_cut import CutRules, saved_cut
from remat.policies.solvers.problem import Problem

__all__ = ["Condensed", "Objective", "buffers_of", "condense", "condense_apart"]

Objective = Literal["seconds", "flops"]

# The numbers of this module. None is measured by a benchmark of this repository; what a wrong one can do is
# bounded: a price is off by a factor, and with it what is recomputed first, but no plan is less right or above its
# budget.
#
# Share of the data sheet's arithmetic that compute-bound operators reach. Chosen by look, below the two thirds that
# large matmuls reach (they are off by a factor of 1.7) and above the much less of small ones and thin convolutions.
# Without it recomputing a thin convolution would look cheaper than recomputing the normalisation after it.
# `Ilp(costs=...)` puts measured seconds in its place.
_HEAVY_EFFICIENCY = 0.4
# Share of a matmul's traffic that is one operand, from which on that streams (a recurrent network's weights) and
# the kernel comes close to the memory's rate. By look; between no share and all of it a cost changes by 1 / 0.4.
_STREAMED = 0.8
# Share of the lesser of traffic and arithmetic that is paid beside the greater: they never overlap completely. It
# is there to decide between plans whose rooflines are equal, for the one with fewer bytes, or fewer operations; a
# thousandth adds at most that to any cost, and is far above the resolution of the costs.
_EXPOSED = 0.001
# A kernel of the backward pass is joined with what it overwrites if that is at least so many times what it reads
# beside, and in either pass if it is more than so many times any buffer between the two. Both by look: joined, two
# kernels run at once, which misplaces what is small beside the buffer that they share (the predicted peak, which a
# budget bounds, is of the schedule itself).
_BESIDE = 8
_BETWEEN = 20

# Its results are its operands: no kernel.
_BARRIER = "optimization_barrier"


@dataclass(frozen=True, eq=False)
class Condensed:
    """A joint graph as a scheduling problem.

    Attributes:
        graph: the joint graph.
        problem: one node per kernel; forward nodes first.
        roots: for every node the operator whose result is the buffer.
        node_of: node by value id, for the values that are buffers.
        objective: what a cost is: roofline seconds, or flops.
        fused: for every node the other operators it runs, in order of execution.
        overwrites: nodes that are not joined with the one they overwrite, with that one.
    """

    graph: Graph
    problem: Problem
    roots: tuple[int, ...]
    node_of: Mapping[int, int]
    fused: tuple[tuple[int, ...], ...]
    objective: Objective = "seconds"
    overwrites: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def values_of(self) -> tuple[tuple[int, ...], ...]:
        """For every node its buffers."""
        found: list[list[int]] = [[] for _ in self.roots]
        for value, node in self.node_of.items():
            found[node].append(value)
        return tuple(map(tuple, found))

    def forward_nodes(self, saved: Collection[int]) -> frozenset[int]:
        """Returns the forward nodes that make values of `saved`."""
        nodes = (self.node_of.get(value, self.problem.turn) for value in saved)
        return frozenset(node for node in nodes if node < self.problem.turn)

    def backward_order(self, sequence: Sequence[int]) -> tuple[int, ...]:
        """Returns the operators of a sequence's backward pass, as `remat.plans.schedule.build_schedule` takes them.

        Fused forward operators are left out: they run again wherever they are read; but not those that a node
        overwrites. Fused backward operators come before their first reader.
        """
        ops = self.graph.ops
        seen: set[int] = set()
        done: set[int] = set()
        order: list[int] = []
        for node in sequence:
            if node >= self.problem.turn:
                mine = (op for op in self.fused[node] if ops[op].phase == "backward")
                for op in (*mine, self.roots[node]):
                    if op not in done:
                        done.add(op)
                        order.append(op)
            elif node in seen:
                order += [op for op in self.fused[node] if not ops[op].fusible]
                order.append(self.roots[node])
            seen.add(node)
        return tuple(order)

    def saved(self, sequence: Sequence[int]) -> frozenset[int]:
        """Returns the forward values that are alive at the turn because the backward pass reads them."""
        ops, turn = self.graph.ops, self.problem.turn
        made_again: set[int] = set()
        kept: set[int] = set()
        seen: set[int] = set()
        for node in sequence:
            first = node not in seen
            seen.add(node)
            if first and node < turn:
                continue
            for op in (*self.fused[node], self.roots[node]):
                for value in ops[op].inputs:
                    maker = self.node_of.get(value, turn)
                    if maker < turn and maker not in made_again:
                        kept.add(value)
            if not first:
                made_again.add(node)
        forward_gradients = {
            v
            for v in self.graph.gradients
            if self.node_of.get(v, self.problem.turn) < self.problem.turn
        }
        return frozenset(kept | forward_gradients)


def condense(
    graph: Graph,
    *,
    device: str = "h200",
    objective: Objective = "seconds",
    op_seconds: Mapping[int, float] | None = None,
) -> Condensed:
    """Coarsens a joint graph; see the module docstring.

    Args:
        graph: a joint graph.
        device: whose roofline prices the nodes.
        objective: `seconds`, or `flops` for the operations alone.
        op_seconds: measured seconds of single operators, by operator id, instead of their roofline; what is
            fused into them adds its arithmetic. See `remat.cost.measure`.

    Without `op_seconds` a graph is coarsened once per device and objective: later calls return the same object. It
    lives as long as the graph.
    """
    if op_seconds:
        return _condense(graph, device, objective, op_seconds)
    # In the graph: a table by graph would hash all of it, and each entry, which refers to it, would keep it alive.
    made: dict[Hashable, Condensed] = graph.memo
    key = ("condensed", device, objective)
    if key not in made:
        made[key] = _condense(graph, device, objective, {})
    return made[key]


def condense_apart(
    graph: Graph,
    buffers: Collection[int],
    *,
    device: str = "h200",
    objective: Objective = "seconds",
) -> Condensed:
    """Coarsens a joint graph like `condense`, with given buffers and without joining what is overwritten.

    So the nodes of several rewrites of one graph correspond to each other.

    Args:
        graph: a joint graph.
        buffers: values that are buffers if anything reads them, beside those that have to be.
        device, objective: as in `condense`.
    """
    return _condense(graph, device, objective, {}, also=buffers, join=False)


def buffers_of(graph: Graph) -> frozenset[int]:
    """Returns the values that `condense` takes for buffers."""
    return frozenset(_buffers(graph, live_ops(graph)))


def _condense(
    graph: Graph,
    device: str,
    objective: Objective,
    op_seconds: Mapping[int, float],
    *,
    also: Collection[int] | None = None,
    join: bool = True,
) -> Condensed:
    live = live_ops(graph)
    buffers = _buffers(graph, live)
    if also is not None:
        written = {v for op in graph.ops if op.id in live for v in op.outputs}
        read = {v for v in written if any(user in live for user in graph.users[v])}
        buffers |= read.intersection(also)
    chip = get_device(device)
    forward = [op for op in graph.forward_ops() if op.id in live]
    backward = [op for op in graph.backward_ops() if op.id in live]
    rooted = [
        op for op in (*forward, *backward) if op.effectful or buffers.intersection(op.outputs)
    ]
    node_of = {v: i for i, op in enumerate(rooted) for v in op.outputs if v in buffers}
    turn = sum(op.phase == "forward" for op in rooted)
    inputs: list[list[int]] = []
    fused: list[tuple[int, ...]] = []
    for op in rooted:
        inside, reads = _kernel(graph, op, node_of)
        inputs.append(sorted({node_of[v] for v in reads if v in node_of}))
        fused.append(tuple(sorted(inside)))
    free = {*graph.alive_anyway, *graph.gradients}
    kept_bytes = [
        sum(stored_bytes(graph.values[v]) for v in op.outputs if v in buffers and v not in free)
        for op in rooted
    ]
    price = _Price(graph, chip, objective, op_seconds)
    nodes = _Nodes(
        roots=[op.id for op in rooted],
        costs=[price(op, fused[i]) for i, op in enumerate(rooted)],
        sizes=kept_bytes,
        inputs=inputs,
        repeatable=[
            op.phase == "forward" and all(graph.ops[o].recomputable for o in (op.id, *fused[i]))
            for i, op in enumerate(rooted)
        ],
        fused=fused,
        buffers=buffers,
    )
    joined = nodes.overwritten(graph, turn)
    if not join:
        apart = nodes.without(set(), turn).finish(graph, node_of, objective)
        return replace(apart, overwrites={reader: node for node, reader in joined.items()})
    return nodes.in_place(joined, turn).finish(graph, node_of, objective)


@dataclass
class _Nodes:
    """The nodes as columns, while they are made."""

    roots: list[int]
    costs: list[float]
    sizes: list[int]
    inputs: list[list[int]]
    repeatable: list[bool]
    fused: list[tuple[int, ...]]
    buffers: Collection[int]
    turn: int = 0
    number: dict[int, int] = field(default_factory=dict)

    def overwritten(self, graph: Graph, turn: int) -> dict[int, int]:
        """Returns the nodes whose buffer an element-wise kernel alone reads and overwrites, with that kernel."""
        readers: list[list[int]] = [[] for _ in self.roots]
        for node, reads in enumerate(self.inputs):
            for read in reads:
                readers[read].append(node)
        return {
            node: users[0]
            for node, users in enumerate(readers)
            if len(users) == 1 and self._overwrites(graph, node, users[0], turn)
        }

    def in_place(self, into: Mapping[int, int], turn: int) -> _Nodes:
        """Joins buffers with the kernels that overwrite them (conv, relu).

        Keeping the first instead of the second would gain nothing: they have one size.
        """
        for node, reader in into.items():
            self.costs[reader] += self.costs[node]
            self.fused[reader] = tuple(
                sorted({*self.fused[reader], *self.fused[node], self.roots[node]})
            )
            joined = {*self.inputs[node], *self.inputs[reader]} - {node}
            self.inputs[reader] = sorted(joined)
        return self.without(into.keys(), turn)

    def without(self, gone: Collection[int], turn: int) -> _Nodes:
        """Returns the other nodes, numbered anew."""
        kept = [node for node in range(len(self.roots)) if node not in gone]
        number = {node: index for index, node in enumerate(kept)}
        return _Nodes(
            roots=[self.roots[node] for node in kept],
            costs=[self.costs[node] for node in kept],
            sizes=[self.sizes[node] for node in kept],
            inputs=[[number[read] for read in self.inputs[node]] for node in kept],
            repeatable=[self.repeatable[node] for node in kept],
            fused=[self.fused[node] for node in kept],
            buffers=self.buffers,
            turn=sum(node < turn for node in kept),
            number=number,
        )

    def _overwrites(self, graph: Graph, node: int, reader: int, turn: int) -> bool:
        op = graph.ops[self.roots[reader]]
        if (ends_kernel(op) and op.name != _BARRIER) or (node < turn) != (reader < turn):
            return False
        size = self.sizes[node]
        # A gradient takes nothing of its own; what is only turned or cast into one is written in its place.
        given = [graph.values[v] for v in op.outputs if v in graph.gradients]
        written = sum(v.nbytes for v in given) if given and reader >= turn else self.sizes[reader]
        same = 0 < size == written and self.repeatable[node] == self.repeatable[reader]
        made = [v for v in graph.ops[self.roots[node]].outputs if v in self.buffers]
        if (
            not same
            or len(made) != 1
            or made[0] in graph.alive_anyway
            or made[0] in graph.gradients
        ):
            return False
        # Joined, both run when the second did and read everything at once: nothing large may come in between. In
        # the backward pass the second may read nothing large beside, which could be recomputed in between.
        beside = {*self.inputs[reader]} - {*self.inputs[node], node}
        small = node < turn or _BESIDE * sum(self.sizes[n] for n in beside) <= size
        return small and all(_BETWEEN * self.sizes[n] < size for n in range(node + 1, reader))

    def finish(self, graph: Graph, node_of: Mapping[int, int], objective: Objective) -> Condensed:
        """Returns the problem of these nodes."""
        problem = Problem.of(
            self.costs,
            self.sizes,
            self.inputs,
            repeatable=self.repeatable,
            turn=self.turn,
        )
        values = {v: self.number[node] for v, node in node_of.items() if node in self.number}
        return Condensed(graph, problem, tuple(self.roots), values, tuple(self.fused), objective)


def _buffers(graph: Graph, live: set[int]) -> set[int]:
    worth_keeping = _sums_so_far(graph)
    for rules in (CutRules(), CutRules(heavy="roofline", random="cheap")):
        worth_keeping |= saved_cut(graph, rules).saved
    return kernel_results(graph, live, worth_keeping)


def _sums_so_far(graph: Graph) -> set[int]:
    """Where the gradient of what is used often is added up as it comes: its sums at the ties of a schedule."""
    ties = accumulations(graph, list(graph.backward_ops()))
    added = {v for op in graph.ops if op.name == "add_any" for v in op.outputs}
    return {value for tied in ties.values() for value in tied if value in added}


def _kernel(graph: Graph, op: Op, node_of: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """The operators fused into a node's root, and the values the kernel reads."""
    inside: set[int] = set()
    reads: set[int] = set()
    todo = list(op.inputs)
    while todo:
        value = todo.pop()
        producer = graph.values[value].producer
        if value in node_of or producer is None:
            reads.add(value)
        elif producer not in inside:
            inside.add(producer)
            todo += graph.ops[producer].inputs
    return inside, reads


class _Price:
    """Cost of running a node."""

    def __init__(
        self, graph: Graph, device: Device, objective: Objective, seconds: Mapping[int, float]
    ) -> None:
        self.graph = graph
        self.device = device
        self.objective = objective
        self.seconds = seconds

    def __call__(self, op: Op, fused: Sequence[int]) -> float:
        graph, device = self.graph, self.device
        if op.name == _BARRIER and not fused:
            return 0.0
        flops = sum(graph.ops[index].flops for index in fused)
        if self.objective == "flops":
            return float(flops + op.flops)
        compute = flops / device.vector_flops_per_second
        if op.id in self.seconds:
            return self.seconds[op.id] + compute
        if op.heavy:
            dtype = hlo_type(graph.values[op.outputs[0]].dtype) if op.outputs else "f32"
            compute += op.flops / device.matmul_flops_per_second(dtype)
        else:
            compute += op.flops / device.vector_flops_per_second
        own = {op.id, *fused}
        read = {
            v for index in own for v in graph.ops[index].inputs
            if graph.values[v].producer not in own
        }  # fmt: skip
        moved = sum(stored_bytes(graph.values[v]) for v in (*read, *op.outputs))
        streaming = moved / device.memory_bytes_per_second
        if not op.heavy:
            return _overlapped(compute, streaming)
        largest = max((stored_bytes(graph.values[v]) for v in read), default=0)
        if op.name == "dot_general" and largest >= _STREAMED * moved:
            return _overlapped(compute / _HEAVY_EFFICIENCY, streaming)
        return _overlapped(compute, streaming) / _HEAVY_EFFICIENCY


def _overlapped(compute: float, streaming: float) -> float:
    """Seconds of a kernel that computes while it streams."""
    return max(compute, streaming) + _EXPOSED * min(compute, streaming)
