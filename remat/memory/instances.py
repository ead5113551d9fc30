"""From steps to instances: what runs, what runs again, and of which value there is which instance when.

The same operator on the same instances is one run: XLA merges repetitions that no barrier separates. A barrier
makes new instances that share their buffers; so do reshapes and whatever else moves no data (`identities`). Zeros
that the graph does not name are added to what reads or overwrites them (`zeros`). The gradient of a max pool first
finds where every window has its largest: an array of indices per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from remat.core.forms import stored_bytes
from remat.core.graph import Graph, Op
from remat.core.kernel_work import cycles_named, cycles_of
from remat.core.primitives import SCATTERS
from remat.memory.execution import Execution, Instance, Node, Working
from remat.memory.identities import (
    array_kind,
    fills_zeros,
    is_added_up,
    moves_nothing,
    shared_zeros,
    signature,
)
from remat.memory.splits import (
    ELEMENTAL_PARTS,
    PART_BYTES,
    padded_count,
    parts_of,
    shape_of,
    widths_of,
)
from remat.memory.tables import (
    CODE_CYCLES,
    COMMUTATIVE,
    INDEX_BYTES,
    MOST_PIECES,
    PARTED,
    PIECE,
    POOL_GRADIENT,
)
from remat.plans.steps import Schedule, Step

__all__ = ["Builder", "execution_of", "steps_of"]


def steps_of(graph: Graph, schedule: Schedule | None) -> tuple[Step, ...]:
    """Returns a schedule's steps; without one every operator once, in the graph's order."""
    if schedule is not None:
        return schedule.steps
    steps = [Step("compute", op.id) for op in graph.ops]
    first = next((op.id for op in graph.backward_ops()), len(steps))
    return (*steps[:first], Step("turn"), *steps[first:])


def execution_of(graph: Graph, schedule: Schedule | None, working: Working) -> Execution:
    """Returns what runs of a graph that is no loop's body.

    Args:
        graph, schedule: as in `remat.memory.predict.predict`.
        working: what its planned loops need.
    """
    builder = Builder(graph, working)
    builder.given((*graph.inputs, *graph.constants, *graph.cotangents))
    builder.run(steps_of(graph, schedule))
    execution = builder.execution
    execution.results = [builder.raw[v] for v in (*graph.gradients, *graph.outputs)]
    return execution


class Builder:
    """Turns steps into nodes and instances.

    Attributes:
        execution: what was made so far.
        raw: the present instance of every value; `bits`: of its stored form.
    """

    def __init__(self, graph: Graph, working: Working, *, in_loop: bool = False) -> None:
        self.graph = graph
        self.working = working
        self.execution = Execution(graph, in_loop=in_loop)
        self.raw: dict[int, int] = {}
        self.bits: dict[int, int] = {}
        self._seen: dict[Hashable, list[int]] = {}
        self._ran: set[int] = set()
        self._added = frozenset(op.id for op in graph.ops if is_added_up(graph, op))
        self._shared = self.execution.shared = shared_zeros(graph, self._added)
        # Scatters into zeros, by result, with their other operands: run where the result is added to an array.
        self._postponed: dict[int, tuple[Op, tuple[int, ...]]] = {}

    def given(self, values: Iterable[int]) -> None:
        """Values that are there before the first step."""
        for value in values:
            self.raw[value] = self._new(value, -1)
            self.execution.sources.add(self.raw[value])

    def sliced(self, given: Iterable[int]) -> None:
        """Of what a loop's body is given, marks what is a slice of a stacked array."""
        whole = {*self.graph.invariant, *self.graph.carried}
        self.execution.slices.update(self.raw[v] for v in given if v not in whole)

    def crossing(self, values: Iterable[int], *, packed: bool) -> None:
        """Values that the forward loop stacked, sliced for this iteration."""
        for value in values:
            index = self._new(value, -1, packed=packed)
            (self.bits if packed else self.raw)[value] = index
            self.execution.sources.add(index)
            self.execution.slices.add(index)

    def run(self, steps: Sequence[Step], offset: int = 0) -> None:
        """Executes steps."""
        for index, step in enumerate(steps, start=offset):
            action, target, values = step.action, step.target, step.values
            if action == "compute":
                self._compute(index, self.graph.ops[target])
            elif action == "encode":
                made = self._code(index, "pack", target, self._instance(index, target))
                self.bits[target] = made
            elif action == "decode":
                self.raw[target] = self._code(index, "unpack", target, self.bits[target])
            elif action == "barrier":
                places = [(self.bits if v in self.bits else self.raw, v) for v in values]
                ins = tuple(
                    self.bits[v] if v in self.bits else self._instance(index, v) for v in values
                )
                for (place, v), tied in zip(places, self._tie(index, None, ins), strict=True):
                    place[v] = tied

    def _new(
        self,
        value: int,
        producer: int,
        *,
        root: int = -1,
        packed: bool = False,
        nbytes: int | None = None,
    ) -> int:
        found = self.graph.values[value]
        if nbytes is None:
            nbytes = stored_bytes(found) if packed else found.nbytes
        elements = math.prod(found.shape)
        index = len(self.execution.instances)
        root = index if root < 0 else self.execution.instances[root].root
        instance = Instance(value, nbytes, elements, producer, root, packed)
        self.execution.instances.append(instance)
        return index

    def _tie(self, step: int, op: Op | None, ins: tuple[int, ...]) -> list[int]:
        number = len(self.execution.nodes)
        node = Node("barrier", op, "barrier", ins, [], step, fusible=False)
        self.execution.nodes.append(node)
        for index in ins:
            old = self.execution.instances[index]
            node.outs.append(self._new(old.value, number, root=index, packed=old.packed))
        return node.outs

    def _code(self, step: int, kind: Literal["pack", "unpack"], value: int, source: int) -> int:
        key = (kind, source)
        if key not in self._seen:
            number = len(self.execution.nodes)
            packs = kind == "pack"
            node = Node(kind, None, kind, (source,), [], step, True, packs, cycles=CODE_CYCLES)
            self.execution.nodes.append(node)
            node.outs.append(self._new(value, number, packed=packs))
            self._seen[key] = node.outs
        return self._seen[key][0]

    def _compute(self, step: int, op: Op) -> None:
        if op.id in self._added:
            ins = tuple(self._instance(step, v) for v in op.inputs[op.name != POOL_GRADIENT :])
            if op.name == POOL_GRADIENT:
                ins = self._indices(step, op, ins)
            self.raw.pop(op.outputs[0], None)
            self._postponed[op.outputs[0]] = op, ins
            return
        postponed = self._postponed and op.name == "add_any"
        later = [v for v in op.inputs if v in self._postponed] if postponed else []
        if later:
            added, ins = self._postponed.pop(later[0])
            other = op.inputs[op.inputs[0] == later[0]]
            ins = _onto(added, ins, self._instance(step, other))
            self.raw[op.outputs[0]] = self._node(step, added, ins, op.outputs)[0]
            return
        if self._postponed:
            ins = tuple(self._instance(step, v) for v in op.inputs)
        else:
            ins = tuple([self.raw[v] for v in op.inputs])
        if op.name == "optimization_barrier" and len(ins) == len(op.outputs):
            for value, tied in zip(op.outputs, self._tie(step, op, ins), strict=True):
                self.raw[value] = tied
            return
        if op.name == "broadcast_in_dim" and not ins and self._is_shared(op.outputs[0]):
            self.raw[op.outputs[0]] = self._zeros(step, op.outputs[0])
            return
        ins = self._with_zeros(step, op, ins)
        if op.name == POOL_GRADIENT:
            ins = self._indices(step, op, ins)
        if (
            len(ins) == 1
            and len(op.outputs) == 1
            and moves_nothing(self.graph, op, in_loop=self.execution.in_loop)
        ):
            self.raw[op.outputs[0]] = ins[0]
            return
        if op.name == "reduce_sum" and (negated := self._negated(ins[0])) is not None:
            self._negative_sum(step, op, negated)
            return
        self._run(step, op, ins)

    def _run(self, step: int, op: Op, ins: tuple[int, ...]) -> None:
        """Runs an operator, unless the same ran before."""
        key = (signature(self.graph, op), tuple(sorted(ins)) if op.name in COMMUTATIVE else ins)
        made = self._seen.get(key)
        if made is None and op.name in PARTED:
            # To XLA every part is a slice of its own, made where it is read.
            parts = [self._node(step, op, ins, (value,)) for value in op.outputs]
            made = self._seen[key] = [index for part in parts for index in part]
        elif made is None:
            made = self._seen[key] = self._node(step, op, ins)
        self.raw.update(zip(op.outputs, made, strict=True))

    def _negated(self, index: int) -> Node | None:
        """The negation that makes an instance; None if something else does."""
        producer = self.execution.instances[index].producer
        node = self.execution.nodes[producer] if producer >= 0 else None
        return node if node is not None and node.name == "neg" else None

    def _negative_sum(self, step: int, op: Op, negation: Node) -> None:
        """Runs a sum of what is negated: to XLA, the negation of a sum."""
        self._run(step, op, negation.ins)
        (total,) = ins = (self.raw[op.outputs[0]],)
        key = ("neg", total)
        if key not in self._seen:
            assert negation.op is not None
            self._seen[key] = self._node(step, negation.op, ins, op.outputs)
        self.raw[op.outputs[0]] = self._seen[key][0]

    def _instance(self, step: int, value: int) -> int:
        """The instance of a value; runs a scatter that was postponed."""
        if value in self._postponed:
            op, ins = self._postponed.pop(value)
            ins = _onto(op, ins, self._fresh_zeros(step, value))
            self.raw[value] = self._node(step, op, ins)[0]
        return self.raw[value]

    def _is_shared(self, value: int) -> bool:
        return array_kind(self.graph.values[value]) in self._shared

    def _zeros(self, step: int, value: int) -> int:
        """The zeros in the form of a value, one array for the whole program."""
        key = ("zeros", array_kind(self.graph.values[value]))
        if key not in self._seen:
            self._seen[key] = self._filled(step, value, ())
        return self._seen[key][0]

    def _fresh_zeros(self, step: int, value: int) -> int:
        """Zeros that are written over: where others read the same zeros, a copy of them."""
        ins = (self._zeros(step, value),) if self._is_shared(value) else ()
        return self._filled(step, value, ins)[0]

    def _filled(self, step: int, value: int, ins: tuple[int, ...]) -> list[int]:
        number = len(self.execution.nodes)
        node = Node("zeros", None, "zeros", ins, [], step, fusible=not ins, cycles=0)
        self.execution.nodes.append(node)
        node.outs.append(self._new(value, number))
        return node.outs

    def _with_zeros(self, step: int, op: Op, ins: tuple[int, ...]) -> tuple[int, ...]:
        """The operands with zeros that the graph does not name."""
        if op.name == POOL_GRADIENT and not op.padded:
            return (*ins, self._fresh_zeros(step, op.outputs[0]))
        if op.name in SCATTERS and fills_zeros(self.graph, op) and self._is_shared(op.outputs[0]):
            return (self._fresh_zeros(step, op.outputs[0]), *ins[1:])
        if op.name == "max" and len(ins) == 1 and self._is_shared(op.outputs[0]):
            return (*ins, self._zeros(step, op.outputs[0]))
        if op.name == "scan":
            found = [self._zeros(step, value) for value in op.outputs if self._is_shared(value)]
            return (*ins, *dict.fromkeys(found))
        return ins

    def _indices(self, step: int, op: Op, ins: tuple[int, ...]) -> tuple[int, ...]:
        """The operands of a pool's gradient: instead of the pool's operand, where every window has its largest.

        That is an array of indices per dimension, made by a kernel that fuses with what it reads if the pool does.
        """
        source, operand = op.inputs[:2]
        pools = (self.graph.ops[user] for user in self.graph.users[operand])
        fusible = any(pool.name == "reduce_window_max" and pool.fusible for pool in pools)
        key = ("indices", ins[1], self.graph.values[source].shape)
        if key not in self._seen:
            number = len(self.execution.nodes)
            node = Node("indices", None, "indices", (ins[1],), [], step, fusible, True)
            self.execution.nodes.append(node)
            windows = math.prod(self.graph.values[source].shape)
            for _ in self.graph.values[source].shape:
                node.outs.append(self._new(source, number, nbytes=INDEX_BYTES * windows))
            self._seen[key] = node.outs
        return (ins[0], *self._seen[key], *ins[2:])

    def _node(
        self, step: int, op: Op, ins: tuple[int, ...], outputs: tuple[int, ...] | None = None
    ) -> list[int]:
        parts = 1
        if op.contracts:
            parts, ins = self._operands(step, op, ins)
        number = len(self.execution.nodes)
        working, trips = self.working.get(op.id, (None, 0))
        node = Node(
            "op",
            op,
            op.name,
            ins,
            [],
            step,
            fusible=op.fusible,
            reduces=op.kind == "REDUCTION" and not op.elemental,
            cycles=cycles_of(op),
            working=working,
            again=op.id in self._ran,
            trips=trips,
        )
        self._ran.add(op.id)
        self.execution.nodes.append(node)
        if parts > 1:
            return self._split(step, number, op.outputs[0], parts)
        node.outs.extend(self._new(value, number) for value in outputs or op.outputs)
        return node.outs

    def _operands(self, step: int, op: Op, ins: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """In how many parts a matmul is summed up, and its operands, with zeros behind if it needs them."""
        shape = shape_of(self.graph, op)
        if shape is None:
            return 1, self._pieces(op, ins)
        widths = widths_of(self.graph, op)
        parts, count = parts_of(shape, *widths), shape[-1]
        padded = padded_count(count, widths[0], parts)
        if padded == count:
            return parts, self._pieces(op, ins)
        return parts, tuple([self._padded(step, index, padded, count) for index in ins])

    def _padded(self, step: int, source: int, padded: int, count: int) -> int:
        """A copy with zeros behind, the same for all that read it."""
        old = self.execution.instances[source]
        key = ("pad", source, padded, count)
        if key not in self._seen:
            number = len(self.execution.nodes)
            node = Node("pad", None, "pad", (source,), [], step, True, cycles=cycles_named("pad"))
            self.execution.nodes.append(node)
            nbytes = old.nbytes // count * padded
            node.outs.append(self._new(old.value, number, nbytes=nbytes))
            self._seen[key] = node.outs
        return self._seen[key][0]

    def _pieces(self, op: Op, ins: tuple[int, ...]) -> tuple[int, ...]:
        """The operands of a matmul, of a concatenation its pieces where the matmul's kernel reads those."""
        graph, instances, found = self.graph, self.execution.instances, list[int]()
        for side, (index, value) in enumerate(zip(ins, op.inputs, strict=True)):
            producer, number = graph.values[value].producer, instances[index].producer
            node = self.execution.nodes[number] if number >= 0 else None
            made = graph.ops[producer] if producer is not None else None
            # Else it is of the same shape, but reshaped.
            if (
                node is not None
                and made is not None
                and node.op is made
                and made.name == "concatenate"
            ):
                pieces = [graph.values[v].shape for v in made.inputs]
                if _reads_pieces(op, side, graph.values[value].shape, pieces):
                    found += node.ins
                    continue
            found.append(index)
        return tuple(found)

    def _split(self, step: int, matmul: int, value: int, parts: int) -> list[int]:
        """The sum of a matmul's parts, which are a buffer of their own."""
        nbytes = parts * PART_BYTES * math.prod(self.graph.values[value].shape)
        product = self._new(value, matmul, nbytes=nbytes)
        self.execution.nodes[matmul].outs.append(product)
        number = len(self.execution.nodes)
        is_small = parts < ELEMENTAL_PARTS
        node = Node(
            "sum",
            None,
            "sum",
            (product,),
            [],
            step,
            True,
            not is_small,
            cycles=cycles_named("add") * (parts - 1),
        )
        self.execution.nodes.append(node)
        self.execution.sums[matmul] = number
        node.outs.append(self._new(value, number))
        return node.outs


def _reads_pieces(
    op: Op, side: int, whole: tuple[int, ...], pieces: Sequence[tuple[int, ...]]
) -> bool:
    """Whether a matmul reads the pieces of an operand where they are; else XLA writes the whole.

    To a kernel its operands have one dimension that is summed over and one that is not, besides those of a batch.
    XLA reshapes what has more (two that are summed over: a weight's gradient), and does not see the pieces then.
    """
    summed, batch = op.contracts[side], op.contracts[side + 2]
    axes = [axis for axis, size in enumerate(whole) if any(p[axis] != size for p in pieces)]
    free = [d for d, size in enumerate(whole) if size > 1 and d not in summed and d not in batch]
    if len(axes) != 1 or free != axes or sum(whole[d] > 1 for d in summed) > 1:
        return False
    return len(pieces) <= MOST_PIECES and not any(piece[axes[0]] % PIECE for piece in pieces)


def _onto(op: Op, ins: tuple[int, ...], target: int) -> tuple[int, ...]:
    """The operands of what adds to an array: a scatter has that first, a pool's gradient last."""
    return (target, *ins) if op.name in SCATTERS else (*ins, target)
