"""The stages of a backward pass: where barriers stand, and which parts lie behind one. Plain data, no jax.

The backward pass is cut at points where little of it is alive, between the blocks of a network. Neighbouring stages
that recompute only what XLA fuses are joined, as long as that is not much (docs/design.md, "Barriers").
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from remat.core.buffers import makes_operands
from remat.core.devices import xla_release
from remat.core.graph import Graph, Op

__all__ = [
    "DRAWN_DEPTH",
    "FUSED_REDO_LIMIT",
    "HOIST_LIMIT_BYTES",
    "HOIST_RATIO",
    "MASK_LIMIT_BYTES",
    "MATMULS_SHIFT_OPERANDS",
    "REDO_LIMIT",
    "Either",
    "Stage",
    "StagePoint",
    "Stages",
    "accumulations",
    "closure",
    "long_sums",
    "maker",
    "shifted_operands",
    "stage_points",
]

# The kernel of a matmul adds arrays to what it reads, too (`shifted_operands`). Compiled were jax 0.10.2 and 0.12.
# With 0.10.2 ties moved up to 1.6 % more in two of eight networks, and up to 0.8 % less in three.
MATMULS_SHIFT_OPERANDS = xla_release() >= (0, 12)

# --- the numbers that decide a schedule -------------------------------------------------------------------
# Chosen by look when they were introduced, none derived; no record of why was found. A bad one gives a schedule of
# more repetitions or a higher peak, never a wrong gradient, and the plan's prediction shows it. What each does was
# tried on 164 schedules: the first 8 of `models.cases.SMALL_CASES`, `full`, `min_cut` and `ilp` (starts) at 0.6,
# all else as it is. Said is how many of these 24 plans change, and by how much a predicted peak.

REDO_LIMIT = 24
"""A value that up to so many fusible operators make again is forgotten between stages.

12: peaks up to 108 % higher. 48: four plans of `full` change, peaks up to 32 % lower; 1000: to 60 % lower, for more
operators that run again. So it bounds the repetition, and is not the best for the peak."""
FUSED_REDO_LIMIT = 1000
"""The same in a plan that repeats fusible operators only: its stages are few.

24 changes one plan and no peak, 100 and more change nothing: it ends a search that would be long."""
MERGE_SHARE = 0.06
"""How far above the bytes saved the memory of a joined stage may rise, as a share of these.

0: nine plans have more barriers, at the same peak. 0.12: peaks up to 7 % higher; 0.25: up to 157 %."""
LARGE_SHARE = 1 / 16
"""What is at least this share of the largest value is large: the rest does not decide where stages begin.

For what an order repeats 1/64 to 1/4 change nothing, and 0 changes two plans, by 0.5 %; as the bound on what is
alive at a stage point it was not varied."""
HOIST_LIMIT_BYTES = 1 << 20
"""A loop-invariant value at least this large is not worth hoisting if it is cheap to make.

64 KiB to 1 GiB change nothing there; at 1 KiB peaks move by -26 % to +34 %. It is for causal masks broadcast to
attention scores, which are far larger in networks of full size."""
HOIST_RATIO = 4
"""Cheap to make is what has at least so many times the bytes of what it is made of.

A cast of weights, which has at most twice, is hoisted. Not varied."""
MASK_LIMIT_BYTES = 1 << 16
"""Smaller masks are not worth a detour through bits.

128 KiB to 4 MiB change nothing there; with 32 KiB peaks are up to 3 % lower, with 0 up to 27 %, and at most 0.2 %
higher. It bounds the loss: what is not packed is at most 64 KiB a mask."""
SPREAD_DEPTH = 12
"""So many operators back it is looked for what spreads a gradient. It bounds the search. Not varied."""
DRAWN_DEPTH = 12
"""So many operators back it is asked whether a mask is a function of random bits.

It bounds a search that tries every operand; beyond it a mask is kept as any other value. Not varied."""


@dataclass(frozen=True, slots=True)
class StagePoint:
    """A place in the backward pass where a stage may begin.

    Attributes:
        op: the stage begins before this operator.
        frontier: large backward values alive there.
    """

    op: int
    frontier: tuple[int, ...]


@dataclass
class Stage:
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


def stage_points(graph: Graph, *, tie_sums: bool = False) -> list[StagePoint]:
    """Returns the places in the backward pass where exactly one large backward value is alive.

    Args:
        graph: a joint graph.
        tie_sums: whether long sums have ties of their own. Then what waits in one, of the gradient of what all
            layers read, does not count: it is alive at all of these places.
    """
    ops = list(graph.backward_ops())
    sums = long_sums(graph, ops) if tie_sums else []
    additions = (graph.ops[op] for chain in sums for op in chain)
    waiting = {v for op in additions for v in op.inputs if len(graph.users[v]) == 1}
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
            counted = alive - waiting or alive
            largest = max(graph.values[value].nbytes for value in counted)
            frontier = [v for v in counted if graph.values[v].nbytes >= LARGE_SHARE * largest]
            if position == 0 or (len(frontier) == 1 and _worth_tying(graph, op, frontier[0])):
                points.append(_before_spread(graph, ops, position, tuple(sorted(frontier))))
        alive.difference_update([v for v in op.inputs if last.get(v) == position])
        alive.update(value for value in op.outputs if value in last)
    return points


def _worth_tying(graph: Graph, op: Op, value: int) -> bool:
    """Whether a cotangent becomes a buffer anyway, so that a barrier on it costs no fusion."""
    users = [graph.ops[user] for user in graph.users[value]]
    return op.id == users[0].id and (
        len(users) > 1 or not (users[0].fusible or _is_spread(graph, users[0], value))
    )


def _is_spread(graph: Graph, reader: Op, value: int) -> bool:
    """Whether a scatter makes what it adds up itself, of something smaller: as a barrier's it would be written."""
    if not makes_operands(reader, first=reader.inputs[0] == value):
        return False
    nbytes = graph.values[value].nbytes
    return any(read_bytes < nbytes for _, _, read_bytes in _origins(graph, value))


def _before_spread(
    graph: Graph, ops: Sequence[Op], position: int, frontier: tuple[int, ...]
) -> StagePoint:
    """A point before an operator; before what spreads the cotangent that it begins with, if just that is before it.

    A mean's gradient is spread over what it is the mean of, that of a last layer of one column is an outer product:
    kernels make these in registers, of something smaller, and as a barrier's they would be written.
    """
    place = position
    if len(frontier) == 1 and all([graph.ops[u].fusible for u in graph.users[frontier[0]]]):
        least_bytes = graph.values[frontier[0]].nbytes
        for op, origins, read_bytes in _origins(graph, frontier[0]):
            position -= 1
            if position < 0 or ops[position] is not op:
                break
            if read_bytes < least_bytes:
                place, frontier, least_bytes = position, origins, read_bytes
    return StagePoint(ops[place].id, frontier)


def _origins(graph: Graph, value: int) -> Iterator[tuple[Op, tuple[int, ...], int]]:
    """Steps back from a backward value through what fuses, one operator at a time, the last first.

    Yields each operator, the backward values that a kernel would begin with there, and the bytes that it would
    read, forward values with them. It ends where these would be no fewer than those of the value.
    """
    values, forward = graph.values, graph.forward_values
    backward, besides = {value}, set[int]()
    for _ in range(SPREAD_DEPTH):
        latest = max(backward, key=lambda v: -1 if (p := values[v].producer) is None else p)
        producer = values[latest].producer
        op = None if producer is None else graph.ops[producer]
        if op is None or not op.fusible or op.kind == "REDUCTION":
            return
        backward -= {*op.outputs}
        backward |= {v for v in op.inputs if not forward[v]}
        besides |= {v for v in op.inputs if forward[v]}
        besides_bytes = sum(values[v].nbytes for v in besides)
        if besides_bytes >= values[value].nbytes:
            return
        yield op, tuple(sorted(backward)), besides_bytes + sum(values[v].nbytes for v in backward)


class Stages:
    """Cuts a backward pass into stages.

    Attributes:
        ops: operators in the order in which they run: the backward ones, and forward ones that the order repeats.
        saved, sources: forward values that are kept, and arguments and constants.
        explicit: values that the order makes again.
        ordered: whether the backward pass has an order of its own.
    """

    def __init__(
        self,
        graph: Graph,
        saved: set[int],
        barriers: bool,
        order: Sequence[int] | None,
        tie_sums: bool,
    ) -> None:
        self.graph = graph
        self.saved = saved
        self.sources = graph.sources
        self.fixed = self.saved | self.sources
        self.barriers = barriers
        self.ordered = order is not None
        ids = (op.id for op in graph.backward_ops()) if order is None else order
        self.ops = [graph.ops[index] for index in ids]
        self.explicit = {v for op in self.ops if op.phase == "forward" for v in op.outputs}
        points = stage_points(graph, tie_sums=tie_sums) if barriers else []
        self.points = {point.op: point for point in points}
        self.large_bytes = LARGE_SHARE * max((value.nbytes for value in graph.values), default=0)

    def cut(self) -> list[Stage]:
        """Returns the stages in order, joined where few barriers are better."""
        return self._merged(self._stages())

    def is_large(self, op: Op) -> bool:
        """Returns whether it pays to forget what an operator makes between two uses."""
        return sum(self.graph.values[v].nbytes for v in op.outputs) >= self.large_bytes

    def _stages(self) -> list[Stage]:
        stages = [Stage(None, [])]
        alive = _Alive(self.graph, [op for op in self.ops if op.phase == "backward"])
        again: list[Op] = []  # repeated operators that belong to the backward operator after them
        made: set[int] = set()  # repeated since the last barrier that stays
        for op in self.ops:
            if op.phase == "forward":
                again.append(op)
                continue
            point = self.points.get(op.id)
            twice = any(x.id in made and self.is_large(x) for x in again)
            separate = twice or any(x.heavy for x in again)
            if point is None and self.barriers and separate:
                anchor = alive.anchor()
                point = None if anchor is None else StagePoint(op.id, (anchor,))
            if point is not None:
                stages.append(Stage(point, [], apart=twice))
                if separate:
                    made.clear()
            made.update(x.id for x in again)
            stages[-1].ops += [*again, op]
            again = []
            alive.run(op)
        stages[-1].ops += again  # for gradients that are forward values
        return [stage for stage in stages if stage.ops] or stages

    def _merged(self, stages: list[Stage]) -> list[Stage]:
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
        merged: list[Stage] = []
        room = 0.0
        for index, stage in enumerate(stages):
            before = merged[-1] if merged else None
            if before is not None and self._joins(before, stage, room):
                before.ops += stage.ops
                before.nbytes += stage.nbytes
                continue
            merged.append(stage)
            alive = sum(values[v].nbytes for v, last in last_use.items() if last >= index)
            room = (1 + MERGE_SHARE) * total - alive
        return merged

    def _joins(self, before: Stage, stage: Stage, room: float) -> bool:
        fits = before.nbytes + stage.nbytes <= room
        return before.point is not None and not stage.heavy and not stage.apart and fits

    def _measure(self, stage: Stage, done: set[int]) -> None:
        """Finds what a stage reads of the kept values, and what it recomputes.

        `done` are the compute-bound operators that earlier stages repeat: their results stay there.
        """
        forward, graph = self.graph.forward_values, self.graph
        kept = self.saved - self.sources
        reads = {v for op in stage.ops for v in op.inputs if forward[v]}
        explicit = {op.id for op in stage.ops if op.phase == "forward"}
        stop = Either(self.fixed, self.explicit) if self.ordered else self.fixed
        again = explicit | closure(graph, reads, stop)
        written = {v for op in stage.ops if not op.fusible for v in op.inputs if forward[v]}
        written.update(v for op in explicit for v in graph.ops[op].outputs)
        stage.nbytes = sum(graph.values[v].nbytes for v in written - self.saved - self.sources)
        heavy = {op for op in again if graph.ops[op].heavy}
        stage.heavy = not heavy <= done or not heavy.isdisjoint(explicit)
        done |= heavy
        stage.kept_reads = (reads | {v for op in again for v in graph.ops[op].inputs}) & kept


def accumulations(graph: Graph, backward: Sequence[Op]) -> dict[int, tuple[int, ...]]:
    """Returns where sums of many gradients of one value are tied: what is tied, by the addition that a tie follows.

    Args:
        graph: a joint graph.
        backward: its backward operators as they run, each once.

    XLA adds all gradients of a shared weight in one kernel, at the end: until then each has a buffer of its own,
    one per use of the weight. Tied to what the backward pass needs next, the sum so far is the only one. A tie
    costs a pass over the sum to write it and one to read it, so of n terms about sqrt(n) are left between two ties:
    as many terms are alive as there are ties. Fewer, where terms are parts of larger arrays, which stay as long as
    they do. One tie holds all sums that have grown. Only sums are tied whose
    terms would take, but for two, as much as a large value, and only terms that are buffers anyway.
    """
    every: dict[int, int] = {}  # so many terms between two ties of a sum, by addition
    sum_of: dict[int, int] = {}
    for chain in long_sums(graph, backward):
        every.update(dict.fromkeys(chain[:-1], _between_ties(graph, chain)))
        sum_of.update(dict.fromkeys(chain, chain[-1]))
    found: dict[int, tuple[int, ...]] = {}
    alive = _Alive(graph, backward)
    grown: dict[int, int] = {}  # additions since the last tie, by sum
    latest: dict[int, int] = {}
    for op in backward:
        alive.run(op)
        if op.id not in sum_of:
            continue
        total = sum_of[op.id]
        grown[total] = grown.get(total, 0) + 1
        latest[total] = op.outputs[0]
        if op.id == total:
            del grown[total], latest[total]
        elif grown[total] >= every[op.id]:
            anchor = alive.anchor(besides=frozenset(latest.values()))
            if anchor is not None:
                found[op.id] = (*latest.values(), anchor)
                grown.clear()
                latest.clear()
    return found


def shifted_operands(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Returns what matmuls of several batch dimensions read of another's result and a smaller argument.

    By the operator that makes it; these are queries, keys and values with a bias. Left alone, XLA may add in
    the kernel of the matmul that reads the sum, since jax 0.12. There it makes one batch dimension of several,
    along which the smaller array is not spread alike, and so writes that in full, before the program's first
    layer, for both passes to read, and keeps the result without it. Tied by itself, the sum is an array that is
    made where the result is written. What only slices are read of is left alone: XLA writes these anyway, and
    adds as it does.
    """
    key = "shifted operands"
    if key not in graph.memo:
        size = {value.id: math.prod(value.shape) for value in graph.values}
        found: dict[int, tuple[int, ...]] = {}
        for op in (op for op in graph.ops if op.contracts and len(op.contracts[2]) > 1):
            for value in op.inputs:
                made = maker(graph, value)
                if made is None or not _is_shifted(graph, made, size):
                    continue
                if size[made.outputs[0]] <= size[value]:
                    found[made.id] = made.outputs
        graph.memo[key] = found
    return graph.memo[key]


def _is_shifted(graph: Graph, op: Op, size: Mapping[int, int]) -> bool:
    """Whether an operator makes what it does of a matmul's result and smaller arrays, all of them arguments."""
    is_shifted = False
    made: Op | None = op
    while made is not None and not made.contracts:
        whole = [v for v in made.inputs if size[v] == size[made.outputs[0]]]
        rows = [v for v in made.inputs if v not in whole and size[v] > 1]
        fuses = made.fusible and len(made.outputs) == 1
        if not fuses or len(whole) != 1 or any(maker(graph, v) for v in rows):
            return False
        is_shifted |= bool(rows)
        made = maker(graph, whole[0])
    return made is not None and is_shifted


def _between_ties(graph: Graph, chain: list[int]) -> int:
    """How many terms are added between two ties: k of n, such that k terms take what n / k passes move."""
    additions = set(chain)
    held_bytes = 0
    for op in chain:
        for value in graph.ops[op].inputs:
            producer = graph.values[value].producer
            if producer not in additions:
                made = maker(graph, value)
                outputs = (value,) if made is None else (value, *made.outputs)
                held_bytes += max(graph.values[v].nbytes for v in outputs)
    count = len(chain)
    sum_bytes = graph.values[graph.ops[chain[-1]].outputs[0]].nbytes
    return math.isqrt(count * (count + 1) * sum_bytes // max(held_bytes, 1)) + 1


def long_sums(graph: Graph, backward: Iterable[Op]) -> list[list[int]]:
    """Returns the large sums of gradients with so many terms that one tie falls between, each as its additions.

    Args:
        graph: a joint graph.
        backward: its backward operators, each once, in an order in which they can run.
    """
    ops, values, users = graph.ops, graph.values, graph.users
    least = LARGE_SHARE * max((value.nbytes for value in values), default=0)
    chains: dict[int, list[int]] = {}  # by the last addition
    for op in backward:
        if op.name != "add_any":
            continue
        before = {v: values[v].producer for v in op.inputs}
        inner = [p for v, p in before.items() if p in chains and len(users[v]) == 1]
        if all(p in inner or _is_buffer(graph, v) for v, p in before.items()):
            chain = [x for p in inner if p is not None for x in chains.pop(p)]
            chains[op.id] = [*chain, op.id]
    return [
        chain
        for last, chain in chains.items()
        if len(chain) > _between_ties(graph, chain)
        and (len(chain) - 1) * values[ops[last].outputs[0]].nbytes >= least
    ]


def _is_buffer(graph: Graph, value: int) -> bool:
    """Whether a value is written to memory, or is a view or a cast of one that is."""
    op = maker(graph, value)
    return op is None or (op.phase == "backward" and not op.fusible)


def maker(graph: Graph, value: int) -> Op | None:
    """Returns the operator that makes what a value is a view or a cast of, None for an argument.

    What views a literal, or a range, is made by that operator.
    """
    producer = graph.values[value].producer
    while producer is not None:
        op = graph.ops[producer]
        if not op.inputs or (op.kind != "VIEW" and op.name != "convert_element_type"):
            return op
        producer = graph.values[op.inputs[0]].producer
    return None


class _Alive:
    """Backward values alive at a place in the backward pass, oldest first."""

    def __init__(self, graph: Graph, backward: Sequence[Op]) -> None:
        self.graph = graph
        self.last: dict[int, int] = {}
        for op in backward:
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

    def anchor(self, besides: frozenset[int] = frozenset()) -> int | None:
        """Returns the youngest alive value that becomes a buffer anyway: a barrier on it costs no fusion."""
        youngest = None
        for value in reversed(self.values):
            if value in besides:
                continue
            youngest = value if youngest is None else youngest
            users = self.graph.users[value]
            if len(users) > 1 or any(not self.graph.ops[u].fusible for u in users):
                return value
        return youngest


class Either:
    """The union of two sets, without building it."""

    def __init__(self, first: set[int], second: set[int]) -> None:
        self.first, self.second = first, second

    def __contains__(self, value: object) -> bool:
        return value in self.first or value in self.second


def closure(
    graph: Graph, values: Iterable[int], stop: Container[int], limit: int | None = None
) -> set[int]:
    """Returns the operators needed to compute `values` when those in `stop` are there already.

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
