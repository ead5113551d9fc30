"""From a saved set to an explicit schedule: recompute as late and free as early as possible.

Plain data, no jax. The backward pass is cut into *stages* at points where little of it is alive (between
the blocks of a network). A stage begins with one barrier over the kept values it reads and the cotangents
alive there, so that XLA can neither start its recomputation earlier nor merge it with the forward pass
(docs/design.md, "Barriers"). Inside a stage nothing is tied, so XLA fuses freely.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from remat.core.forms import form_of
from remat.core.graph import Graph, Op
from remat.core.primitives import Trait, primitives_with
from remat.plans.liveness import read_before_made, reads_and_writes
from remat.plans.steps import Schedule, Step

__all__ = ["StagePoint", "build_schedule", "no_remat_saved", "stage_points"]

# A chain of cheap operators up to this long is repeated in every stage that reads it instead of being kept
# alive between the stages.
_REDO_LIMIT = 24
# The same in a plan that repeats fusible operators only: its stages are few.
_FUSED_REDO_LIMIT = 1000
# How far above the bytes saved the memory of a joined stage may rise.
_MERGE_SHARE = 0.06
# A loop-invariant value at least this large is not worth hoisting if it is cheap to make.
_HOIST_LIMIT_BYTES = 1 << 20
_JOINS = primitives_with(Trait.JOIN)
# What an order repeats twice is told apart by a barrier if it is at least this share of the largest value.
_LARGE_SHARE = 1 / 16
# Smaller masks are not worth a detour through bits.
_MASK_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StagePoint:
    """A place in the backward pass where a stage may begin.

    Attributes:
        op: the stage begins before this operator.
        frontier: backward values alive there, larger than a sixteenth of the largest.
    """

    op: int
    frontier: tuple[int, ...]


@dataclass
class _Stage:
    """A part of the backward pass under one barrier, while the schedule is being built.

    `ops` are its backward operators and those forward operators that it repeats because an order says so;
    what else it needs is found on demand.
    """

    point: StagePoint | None
    ops: list[Op]
    heavy: bool = False
    apart: bool = False  # repeats something large that was repeated before: only a barrier makes it two values
    nbytes: int = 0
    kept_reads: set[int] = field(default_factory=set)


def no_remat_saved(graph: Graph) -> tuple[int, ...]:
    """Returns what plain differentiation keeps: every forward value that the backward pass reads."""
    return tuple(sorted(graph.backward_reads))


class _Either:
    """The union of two sets, without building it."""

    def __init__(self, first: set[int], second: set[int]) -> None:
        self.first, self.second = first, second

    def __contains__(self, value: object) -> bool:
        return value in self.first or value in self.second


def _closure(
    graph: Graph, values: Iterable[int], stop: Container[int], limit: int | None = None
) -> set[int]:
    """Operators needed to compute `values` when those in `stop` are there already.

    With a `limit` the search ends once it has found more than that many.
    """
    ops: set[int] = set()
    todo = [value for value in values if value not in stop]
    while todo and (limit is None or len(ops) <= limit):
        producer = graph.values[todo.pop()].producer
        if producer is not None and producer not in ops:
            ops.add(producer)
            todo += [value for value in graph.ops[producer].inputs if value not in stop]
    return ops


def stage_points(graph: Graph) -> list[StagePoint]:
    """Returns the places in the backward pass where exactly one large backward value is alive."""
    ops = list(graph.backward_ops())
    forward = graph.forward_values
    last: dict[int, int] = {}
    for position, op in enumerate(ops):
        for value in op.inputs:
            if not forward[value]:
                last[value] = position
    alive = {value for value in graph.cotangents if value in last}
    points: list[StagePoint] = []
    for position, op in enumerate(ops):
        if alive:
            largest = max(graph.values[value].nbytes for value in alive)
            frontier = [v for v in alive if 16 * graph.values[v].nbytes >= largest]
            if position == 0 or (len(frontier) == 1 and _worth_tying(graph, op, frontier[0])):
                points.append(StagePoint(op.id, tuple(sorted(frontier))))
        alive.difference_update([v for v in op.inputs if last.get(v) == position])
        alive.update(value for value in op.outputs if value in last)
    return points


def _worth_tying(graph: Graph, op: Op, value: int) -> bool:
    """Whether a cotangent becomes a buffer anyway, so that a barrier on it costs no fusion."""
    users = [graph.ops[user] for user in graph.users[value]]
    return op.id == users[0].id and (len(users) > 1 or not users[0].fusible)


def build_schedule(
    graph: Graph,
    saved: Collection[int],
    *,
    barriers: bool = True,
    order: Sequence[int] | None = None,
) -> Schedule:
    """Returns the schedule that keeps exactly `saved` and recomputes the rest on demand.

    Args:
        graph: a joint graph.
        saved: forward values to keep; inputs among them are read where they are.
        order: the backward pass as operator ids: every backward operator once, and forward operators where
            they run again, as often as they do. Operators that XLA fuses may be left out: they run again
            in every stage that reads them. None repeats an operator when the backward pass first needs it.
        barriers: tie recomputation to the backward pass; not needed inside a loop body, where the
            loop already separates forward from backward. There, large values that are the same in
            every iteration are kept from being hoisted out of the loop instead.
    """
    backward = _Backward(graph, set(saved), barriers, order).run()
    needed = read_before_made(graph, backward)
    # What is never read back need not be kept; a gradient that is a forward value stays, also if it is made again.
    kept = set(saved) & {*needed.raw, *needed.encoded, *graph.gradients}
    pins = {} if barriers else _pins(graph)
    steps = [*_forward_steps(graph, kept, pins), Step("turn"), *backward]
    return Schedule(tuple(_with_frees(graph, steps, kept)))


def _pins(graph: Graph) -> dict[int, Step]:
    """Barriers that keep large loop-invariant values inside the loop, by the operator they precede.

    `scan` computes what does not depend on the iteration once, before the loop, and keeps it: right for
    a cast of weights, wrong for a causal mask broadcast to the size of the attention scores, which
    would then be read from memory in every iteration instead of being made in registers.
    """
    invariant = set(graph.invariant)
    varying = [v for v in graph.inputs if v not in invariant]
    anchors = [v for v in varying if graph.values[v].differentiable] or varying
    if not anchors:
        return {}
    anchor = min(anchors, key=lambda v: (graph.values[v].nbytes, v))
    fixed = {*graph.constants, *graph.invariant}
    pins: dict[int, Step] = {}
    for op in graph.forward_ops():
        if not all(v in fixed for v in op.inputs):
            continue
        made = sum(graph.values[v].nbytes for v in op.outputs)
        read = sum(graph.values[v].nbytes for v in op.inputs)
        if op.inputs and made >= _HOIST_LIMIT_BYTES and made >= 4 * read:
            pins[op.id] = Step("barrier", values=(*dict.fromkeys(op.inputs), anchor))
        else:
            fixed.update(op.outputs)
    return pins


def _forward_steps(graph: Graph, saved: set[int], pins: dict[int, Step]) -> list[Step]:
    sources = graph.sources
    needed = _closure(graph, (*graph.outputs, *saved), sources)
    effects = [op.id for op in graph.forward_ops() if op.effectful]
    needed |= set(effects) | _closure(
        graph, (value for op in effects for value in graph.ops[op].inputs), sources
    )
    steps: list[Step] = []
    for op in graph.forward_ops():
        if op.id not in needed:
            continue
        if op.id in pins:
            steps.append(pins[op.id])
        steps.append(Step("compute", op.id))
        for value in op.outputs:
            if _through_bits(graph, value):
                steps += [Step("encode", value), Step("decode", value)]
            elif value in saved and form_of(graph.values[value]) != "raw":
                steps.append(Step("encode", value))
    return steps


def _through_bits(graph: Graph, value: int) -> bool:
    """Whether a mask is packed and read back wherever it is drawn.

    XLA does not draw random bits again in every kernel that reads a mask: it writes the mask, one byte per
    element, and reads it. Packed at once, the draw feeds one kernel that writes an eighth of that.
    """
    entry = graph.values[value]
    if form_of(entry) == "raw":  # a plan that packs nothing
        return False
    return entry.dtype == "bool" and entry.nbytes >= _MASK_LIMIT_BYTES and _drawn(graph, value)


def _drawn(graph: Graph, value: int, depth: int = 12) -> bool:
    """Whether a value is an element-wise function of random bits."""
    producer = graph.values[value].producer
    if producer is None or depth == 0:
        return False
    op = graph.ops[producer]
    if op.random:
        return True
    cheap = op.fusible and not op.heavy
    return cheap and any(_drawn(graph, source, depth - 1) for source in op.inputs)


class _Backward:
    """Emits the backward steps, recomputing in a given order or on demand."""

    def __init__(
        self, graph: Graph, saved: set[int], barriers: bool, order: Sequence[int] | None
    ) -> None:
        self.graph = graph
        self.saved = saved
        self.sources = graph.sources
        self.barriers = barriers
        self.ordered = order is not None
        ids = (op.id for op in graph.backward_ops()) if order is None else order
        self.ops = [graph.ops[index] for index in ids]
        repeated = {v for op in self.ops if op.phase == "forward" for v in op.outputs}
        self.explicit = repeated  # values that the order makes again
        self.points = {point.op: point for point in stage_points(graph)} if barriers else {}
        self.ready: set[int] = set()  # forward values that are there
        self.fixed = self.saved | self.sources
        self.large_bytes = _LARGE_SHARE * max((value.nbytes for value in graph.values), default=0)
        self.steps: list[Step] = []

    def run(self) -> list[Step]:
        """Returns the steps of the whole backward pass."""
        stages = self._merged(self._stages())
        heavy = any(stage.heavy for stage in stages)
        for stage in stages:
            if self.ordered:
                self.ready &= self.explicit | self.saved
            else:
                self._forget(_REDO_LIMIT if heavy else _FUSED_REDO_LIMIT)
            body = self._stage(stage.ops, last=stage is stages[-1])
            if stage.point is not None:
                self._barrier(stage.point, body)
            self.steps += body
        return self.steps

    def _merged(self, stages: list[_Stage]) -> list[_Stage]:
        """Joins neighbouring stages that recompute only what XLA fuses, as long as it is not much.

        A barrier makes everything it ties a buffer, so few are better; without one XLA may compute the next
        stages' values too early. So what a joined stage recomputes for unfusible readers has to fit, with the
        values still kept when it begins, into the bytes saved plus a small share. The first stages are
        therefore short, and the later ones, for which much has been freed, long. A stage that repeats a
        compute-bound operator always begins with a barrier of its own.
        """
        values = self.graph.values
        done: set[int] = set()
        for stage in stages:
            self._measure(stage, done)
        last_use = {value: i for i, stage in enumerate(stages) for value in stage.kept_reads}
        total = sum(values[v].nbytes for v in last_use)
        merged: list[_Stage] = []
        room = 0.0
        for index, stage in enumerate(stages):
            before = merged[-1] if merged else None
            if before is not None and self._joins(before, stage, room):
                before.ops += stage.ops
                before.nbytes += stage.nbytes
                continue
            merged.append(stage)
            alive = sum(values[v].nbytes for v, last in last_use.items() if last >= index)
            room = (1 + _MERGE_SHARE) * total - alive
        return merged

    def _joins(self, before: _Stage, stage: _Stage, room: float) -> bool:
        fits = before.nbytes + stage.nbytes <= room
        return before.point is not None and not stage.heavy and not stage.apart and fits

    def _measure(self, stage: _Stage, done: set[int]) -> None:
        """Finds what a stage reads of the kept values, and what it recomputes.

        `done` are the compute-bound operators that earlier stages repeat: their results stay there.
        """
        forward, graph = self.graph.forward_values, self.graph
        kept = self.saved - self.sources
        reads = {v for op in stage.ops for v in op.inputs if forward[v]}
        explicit = {op.id for op in stage.ops if op.phase == "forward"}
        stop = _Either(self.fixed, self.explicit) if self.ordered else self.fixed
        again = explicit | _closure(graph, reads, stop)
        written = {v for op in stage.ops if not op.fusible for v in op.inputs if forward[v]}
        written.update(v for op in explicit for v in graph.ops[op].outputs)
        stage.nbytes = sum(graph.values[v].nbytes for v in written - self.saved - self.sources)
        heavy = {op for op in again if graph.ops[op].heavy}
        stage.heavy = not heavy <= done or not heavy.isdisjoint(explicit)
        done |= heavy
        stage.kept_reads = (reads | {v for op in again for v in graph.ops[op].inputs}) & kept

    def _stages(self) -> list[_Stage]:
        stages = [_Stage(None, [])]
        alive = _Alive(self.graph)
        again: list[Op] = []  # repeated operators that belong to the backward operator after them
        made: set[int] = set()  # repeated since the last barrier that stays
        for op in self.ops:
            if op.phase == "forward":
                again.append(op)
                continue
            point = self.points.get(op.id)
            twice = any(x.id in made and self._large(x) for x in again)
            separate = twice or any(x.heavy for x in again)
            if point is None and self.barriers and separate:
                anchor = alive.anchor()
                point = None if anchor is None else StagePoint(op.id, (anchor,))
            if point is not None:
                stages.append(_Stage(point, [], apart=twice))
                if separate:
                    made.clear()
            made.update(x.id for x in again)
            stages[-1].ops += [*again, op]
            again = []
            alive.run(op)
        stages[-1].ops += again  # for gradients that are forward values
        return [stage for stage in stages if stage.ops] or stages

    def _large(self, op: Op) -> bool:
        """Whether it pays to forget what an operator makes between two uses."""
        return sum(self.graph.values[v].nbytes for v in op.outputs) >= self.large_bytes

    def _stage(self, ops: list[Op], last: bool) -> list[Step]:
        body: list[Step] = []
        for op in ops:
            if op.phase == "forward":
                self._again(op, body)
            else:
                self._require(op.inputs, body)
                body.append(Step("compute", op.id))
        if last:
            self._require(self.graph.gradients, body)
        return body

    def _again(self, op: Op, body: list[Step]) -> None:
        """Runs a forward operator, also one whose result is there: the older copy is dropped."""
        self._require(op.inputs, body)
        body.append(Step("compute", op.id))
        self.ready.update(op.outputs)
        for value in op.outputs:
            if _through_bits(self.graph, value):
                body += [Step("encode", value), Step("decode", value)]

    def _forget(self, limit: int) -> None:
        """Between stages drop what is cheap to compute again, so that it is not kept alive."""
        fixed = {v for v in self.ready if not self._cheap(v)} | self.saved | self.sources
        for value in sorted(self.ready - fixed):
            redo = _closure(self.graph, (value,), fixed, limit)
            if len(redo) <= limit and all(self.graph.ops[op].fusible for op in redo):
                self.ready.discard(value)

    def _cheap(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        return producer is None or self.graph.ops[producer].fusible

    def _require(self, values: Iterable[int], body: list[Step]) -> None:
        forward = self.graph.forward_values
        missing = [v for v in dict.fromkeys(values) if forward[v] and v not in self.ready]
        for value in missing:
            if value in self.saved and value not in self.sources and self._encoded(value):
                body.append(Step("decode", value))
                self.ready.add(value)
        order = sorted(_closure(self.graph, missing, _Either(self.ready, self.fixed)))
        for index in order:
            op = self.graph.ops[index]
            self._again(op, body)

    def _encoded(self, value: int) -> bool:
        return value not in self.sources and form_of(self.graph.values[value]) != "raw"

    def _barrier(self, point: StagePoint, body: list[Step]) -> None:
        """Puts a barrier before a stage that recomputes something.

        Tied are the kept values that recomputation reads, and any argument that alone feeds a
        recomputed operator: everything recomputed then depends on the cotangent.
        """
        graph, forward = self.graph, self.graph.forward_values
        again = [
            graph.ops[step.target]
            for step in body
            if step.action == "compute" and graph.ops[step.target].phase == "forward"
        ]
        needed = read_before_made(graph, body)
        there = frozenset(needed.raw)
        if not again and not needed.encoded:
            return
        tied = set(needed.encoded)
        held = _Either(self.saved, self.explicit)
        for op in again:
            kept = (v for v in op.inputs if v in held and v not in self.sources)
            tied.update(v for v in kept if v in there)
        tainted = set(tied)
        for op in again:
            reads = [v for v in op.inputs if forward[v] and v not in graph.constants]
            if not any(v in tainted for v in reads):
                tied.update(v for v in reads if v in there)
            if reads:
                tainted.update(op.outputs)
        if tied:
            tied |= self._late()
            self.steps.append(Step("barrier", values=(*sorted(tied), *point.frontier)))

    def _late(self) -> set[int]:
        """Gradients since the last barrier that XLA would leave for later; tied, they are not.

        Where a compute-bound operator reads a large array that is put together for it alone, making that takes
        memory and frees nothing at first: a scheduler that looks one operator ahead puts it off, and with it
        what the operator would free. What is computed element by element is made by a kernel that others need.

        A plan with an order of its own has room only if what it repeated for a gradient is free before it repeats
        more, so all of these gradients are tied: a U-Net planned for 1,277 MiB took 1,445 without. Not those that
        take more than they read, as of VGG's largest matrices: until they are written, their memory serves others.
        """
        graph = self.graph
        since = list(takewhile(lambda step: step.action != "barrier", reversed(self.steps)))
        ran = [graph.ops[step.target] for step in since if step.action == "compute"]
        there = {value for op in ran for value in op.outputs}
        joined: set[int] = set()
        late: set[int] = set()
        for op in reversed(ran):
            if op.phase == "forward" and op.name in _JOINS and self._large(op):
                joined.update(op.outputs)
            elif (
                op.phase == "backward"
                and op.heavy
                and (self._frees(op) if self.ordered else not joined.isdisjoint(op.inputs))
            ):
                late |= self._views(op.outputs)
        return late & there & set(graph.gradients)  # a view may run later

    def _frees(self, op: Op) -> bool:
        """Whether an operator reads at least as many bytes of forward values as it makes."""
        values, forward = self.graph.values, self.graph.forward_values
        read = sum(values[v].nbytes for v in set(op.inputs) if forward[v])
        return read >= sum(values[v].nbytes for v in op.outputs)

    def _views(self, values: Iterable[int]) -> set[int]:
        """Values and what is made of them by views alone."""
        found = set(values)
        for op in (self.graph.ops[user] for value in values for user in self.graph.users[value]):
            if op.kind == "VIEW":
                found |= self._views(op.outputs)
        return found


class _Alive:
    """Backward values alive at a place in the backward pass, oldest first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last: dict[int, int] = {}
        for op in graph.backward_ops():
            for value in op.inputs:
                if not graph.forward_values[value]:
                    self.last[value] = op.id
        self.values = dict.fromkeys(v for v in graph.cotangents if v in self.last)

    def run(self, op: Op) -> None:
        """Moves past a backward operator."""
        for value in op.inputs:
            if self.last.get(value) == op.id:
                self.values.pop(value, None)
        self.values.update((v, None) for v in op.outputs if v in self.last)

    def anchor(self) -> int | None:
        """Returns the youngest alive value that becomes a buffer anyway: a barrier on it costs no fusion."""
        youngest = None
        for value in reversed(self.values):
            youngest = value if youngest is None else youngest
            users = self.graph.users[value]
            if len(users) > 1 or any(not self.graph.ops[u].fusible for u in users):
                return value
        return youngest


def _with_frees(graph: Graph, steps: list[Step], saved: set[int]) -> list[Step]:
    """Inserts a `free` after the last read of every computed value, and `drop` of encoded forms."""
    held = {*graph.sources, *graph.cotangents, *graph.outputs, *graph.gradients}
    turn = next(i for i, step in enumerate(steps) if step.action == "turn")
    encoded = {v for v in saved if v not in graph.sources and form_of(graph.values[v]) != "raw"}
    kept_raw = saved - encoded
    out: list[list[Step]] = [[step] for step in steps]
    wanted: set[int] = set()  # values read later
    wanted_bits: set[int] = set()
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if step.action == "turn":
            wanted |= kept_raw
            continue
        reads, writes = reads_and_writes(graph, step)
        for value in (*writes, *reads):
            if value not in wanted and value not in held:
                out[index].append(Step("free", value))
        wanted.difference_update(writes)
        wanted.update(reads)
        if step.action == "decode" and step.target not in wanted_bits:
            wanted_bits.add(step.target)
            if index > turn or step.target not in encoded:
                out[index].append(Step("drop", step.target))
        if step.action == "encode":
            wanted_bits.discard(step.target)
    return [step for group in out for step in dict.fromkeys(group)]
