"""What the parts of the model hand to each other, runs and instances; and what it returns.

Every run of an operator is a *node* and makes new *instances* of its results, so a value that is made twice has
two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from remat.core.graph import Graph, Op
from remat.memory.identities import ArrayKind

__all__ = [
    "Alive",
    "Buffer",
    "Execution",
    "Instance",
    "Kind",
    "Node",
    "Prediction",
    "Working",
    "behind_operands",
    "convert_before_padding",
    "live_nodes",
    "post_order",
    "users_of",
]

Kind = Literal["op", "barrier", "pack", "unpack", "zeros", "indices", "pad", "sum"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory alive at the peak.

    Attributes:
        value: value id in the graph; -1 for the working memory of a loop.
        nbytes: bytes.
        label: dtype and shape, `bits of ...`, or `loop body`.
        op: the operator that writes it.
        scope: its named scope.
        phase: its phase.
        again: whether it holds a repetition.
    """

    value: int
    nbytes: int
    label: str
    op: str
    scope: str = ""
    phase: str = ""
    again: bool = False


@dataclass(frozen=True)
class Prediction:
    """The predicted temp memory of a program.

    Attributes:
        peak_bytes: bytes alive at the peak, arguments, results and gradients not counted.
        at_peak: what they are, largest first; the sum of their bytes is at least `peak_bytes`, because a
            kernel may write into one of its operands.
        step: index of the schedule step at the peak, -1 if nothing is ever alive.
        held_in_results_bytes: bytes alive at the peak that lie in results not yet written.
        loop_peak_bytes: the peak while a loop runs, its body included; 0 without loops.
        outside_peak_bytes: the peak while none runs. `peak_bytes` is the larger of the two.
        alive: for every kernel, in the order in which they run, what is alive.
        traffic_bytes: what all kernels outside of loops read and write. Compilers merge more of them than the
            model does, by a quarter in convolutional networks: compare plans of one function with it.
        waiting: products alive at the peak of which some are read no more, but are multiplied as one with others
            that are: for each of these matmuls its step, and whether its product is read later.
    """

    peak_bytes: int
    at_peak: tuple[Buffer, ...]
    step: int
    held_in_results_bytes: int
    loop_peak_bytes: int
    outside_peak_bytes: int
    traffic_bytes: int
    alive: tuple[Alive, ...] = field(default=(), repr=False)
    waiting: tuple[tuple[tuple[int, bool], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Alive:
    """What is alive while one kernel runs.

    Attributes:
        step: index of the kernel's step in the schedule; of the operator in the graph, where there is no schedule.
        nbytes: bytes alive, counted as `Prediction.peak_bytes`, which is the largest of them.
        is_backward: whether it is part of the backward pass.
        is_loop: whether it is a loop, which counts as one kernel.
    """

    step: int
    nbytes: int
    is_backward: bool
    is_loop: bool


@dataclass(slots=True)
class Node:
    """One run: of an operator, a barrier, the packing or unpacking of a mask, or of what XLA adds for an operator.

    Attributes:
        kind: which of these; `zeros`, `indices` (of a pool's largest), `pad` (zeros behind a matmul's operand) and
            `sum` (of its parts) are what XLA adds.
        op: the operator, None for what XLA adds and what a schedule's own steps do.
        name: of the operator, or the kind.
        ins, outs: instances.
        step: index of the schedule's step.
        fusible: whether it is merged with what it reads; `reduces`: but with nothing that reads it outside of
            kernels of rows.
        cycles: clock cycles per element, as XLA counts them.
        working: of a planned loop what one iteration needs, and its `trips`, the number of iterations.
        again: whether the operator ran before.
    """

    kind: Kind
    op: Op | None
    name: str
    ins: tuple[int, ...]
    outs: list[int]
    step: int
    fusible: bool
    reduces: bool = False
    cycles: int = 0
    working: Prediction | None = None
    again: bool = False
    trips: int = 0

    @property
    def is_backward(self) -> bool:
        """Whether it is part of the backward pass."""
        ours = self.again or self.kind in ("barrier", "unpack")
        return ours or (self.op is not None and self.op.phase == "backward")


@dataclass(slots=True)
class Instance:
    """One array in memory or in registers.

    Attributes:
        value: value id in the graph, of which it is an instance.
        nbytes: bytes; `elements`: their number.
        producer: the node that makes it, -1 if it is there before the first.
        root: the instance whose buffer it shares, itself if it has one of its own.
        packed: whether it is the value's stored form.
    """

    value: int
    nbytes: int
    elements: int
    producer: int
    root: int
    packed: bool = False


@dataclass
class Execution:
    """The instances and nodes of a schedule, in its order.

    Attributes:
        graph: whose values and operators these are.
        nodes: in the order of the steps; `instances`: in the order in which they are made.
        sources: instances that are there before the first node.
        slices: those of them that are parts of stacked arrays.
        results: instances that are results or gradients.
        in_loop: whether this is a loop's body: its results are parts of arrays in use.
        stacks: whether its results are stacked.
        copied: results that are buffers of their own before they are part of an array in use.
        shared: the zeros that more than one operator reads, see `shared_zeros`.
        sums: by matmul that is split, the node that adds its parts.
    """

    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    instances: list[Instance] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    slices: set[int] = field(default_factory=set)
    in_loop: bool = False
    stacks: bool = False
    results: list[int] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    shared: frozenset[ArrayKind] = frozenset()
    sums: dict[int, int] = field(default_factory=dict)


Working = Mapping[int, tuple[Prediction, int]]
"""By the operator of a planned loop: what one iteration needs, and the number of iterations."""


def convert_before_padding(execution: Execution) -> None:
    """Exchanges what pads an array and what makes fewer bytes of the result, as XLA does."""
    nodes, instances = execution.nodes, execution.instances
    readers = Counter(index for node in nodes for index in dict.fromkeys(node.ins))
    for node in nodes:
        if node.name != "convert_element_type" or len(node.ins) != 1 or readers[node.ins[0]] != 1:
            continue
        middle, made = instances[node.ins[0]], instances[node.outs[0]]
        before = nodes[middle.producer] if middle.producer >= 0 else node
        if before.name != "pad" or before.kind != "op" or len(before.ins) != 1:
            continue
        if made.nbytes >= middle.nbytes or node.ins[0] in execution.results:
            continue
        middle.elements = instances[before.ins[0]].elements
        middle.nbytes = middle.elements * made.nbytes // max(made.elements, 1)
        before.op, node.op = node.op, before.op
        before.name, node.name = node.name, before.name
        before.cycles, node.cycles = node.cycles, before.cycles


def live_nodes(execution: Execution) -> list[bool]:
    """Returns for every node whether a result depends on it; XLA deletes the others."""
    nodes = execution.nodes
    live = [False] * len(nodes)
    needed = [False] * len(execution.instances)
    for index in execution.results:
        needed[index] = True
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        if not node.outs or any(needed[out] for out in node.outs):
            live[number] = True
            for index in node.ins:
                needed[index] = True
    return live


def users_of(execution: Execution, live: Sequence[bool]) -> list[list[int]]:
    """Returns for every instance the live nodes that read it, each once, ascending."""
    users: list[list[int]] = [[] for _ in execution.instances]
    for number, node in enumerate(execution.nodes):
        if live[number]:
            for index in dict.fromkeys(node.ins):
                users[index].append(number)
    return users


def behind_operands(ends: Iterable[int], operands: Callable[[int], Iterable[int]]) -> list[int]:
    """Returns what some numbers depend on, and these, each behind its operands: a depth-first search.

    Args:
        ends: where it begins, the first of them first.
        operands: of a number, in the order in which they are visited.
    """
    order: list[int] = []
    entered: set[int] = set()
    done: set[int] = set()
    stack = [*ends][::-1]
    while stack:
        number = stack[-1]
        if number not in entered:
            entered.add(number)
            stack += [*operands(number)][::-1]
            continue
        stack.pop()
        if number not in done:
            done.add(number)
            order.append(number)
    return order


def post_order(execution: Execution) -> dict[int, int]:
    """Of every node that results need, its place in a depth-first search from them, behind its operands."""
    nodes, instances = execution.nodes, execution.instances

    def makers(indices: Iterable[int]) -> list[int]:
        return [p for p in (instances[index].producer for index in indices) if p >= 0]

    found = behind_operands(makers(execution.results), lambda node: makers(nodes[node].ins))
    return {node: turn for turn, node in enumerate(found)}
