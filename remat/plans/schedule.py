"""From a saved set to an explicit schedule: recompute as late and free as early as possible.

Plain data, no jax. A stage of the backward pass (`remat.plans.stages`) begins with one barrier over the kept values
it reads and the cotangents alive there, so that XLA can neither start its recomputation earlier nor merge it with
the forward pass (docs/design.md, "Barriers"). Inside a stage nothing is tied, so XLA fuses freely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from remat.core.forms import form_of
from remat.core.graph import Graph, Op
from remat.plans.liveness import Needed, read_before_made, reads_and_writes
from remat.plans.stages import (
    DRAWN_DEPTH,
    FUSED_REDO_LIMIT,
    HOIST_LIMIT_BYTES,
    HOIST_RATIO,
    MASK_LIMIT_BYTES,
    MATMULS_SHIFT_OPERANDS,
    REDO_LIMIT,
    Either,
    StagePoint,
    Stages,
    accumulations,
    closure,
    maker,
    shifted_operands,
)
from remat.plans.steps import Schedule, Step

__all__ = ["build_schedule", "no_remat_saved"]


def no_remat_saved(graph: Graph) -> tuple[int, ...]:
    """Returns what plain differentiation keeps: every forward value that the backward pass reads."""
    return tuple(sorted(graph.backward_reads))


def build_schedule(
    graph: Graph,
    saved: Collection[int],
    *,
    barriers: bool = True,
    order: Sequence[int] | None = None,
    tie_sums: bool = False,
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
        tie_sums: add up the gradients of what is used often as they come (`remat.plans.stages.accumulations`); they
            do not decide where stages begin.
    """
    backward = _Backward(graph, set(saved), barriers, order, tie_sums).run()
    if tie_sums:
        backward = _with_ties(backward, _sum_ties(graph, backward))
    needed = read_before_made(graph, backward)
    # What is never read back need not be kept; a gradient that is a forward value stays, also if it is made again.
    kept = set(saved) & {*needed.raw, *needed.encoded, *graph.gradients}
    pins = {} if barriers else _pins(graph)
    steps = [*_forward_steps(graph, kept, set(needed.encoded), pins), Step("turn"), *backward]
    # What ties nothing else is the program as it is.
    if MATMULS_SHIFT_OPERANDS and barriers and any(step.action == "barrier" for step in backward):
        steps = _with_ties(steps, shifted_operands(graph))
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
        if op.inputs and made >= HOIST_LIMIT_BYTES and made >= HOIST_RATIO * read:
            pins[op.id] = Step("barrier", values=(*dict.fromkeys(op.inputs), anchor))
        else:
            fixed.update(op.outputs)
    return pins


def _forward_steps(
    graph: Graph, saved: set[int], packed: set[int], pins: dict[int, Step]
) -> list[Step]:
    sources = graph.sources
    needed = closure(graph, (*graph.outputs, *saved), sources)
    effects = [op.id for op in graph.forward_ops() if op.effectful]
    needed |= set(effects) | closure(
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
            elif value in packed:
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
    return entry.dtype == "bool" and entry.nbytes >= MASK_LIMIT_BYTES and _drawn(graph, value)


def _drawn(graph: Graph, value: int, depth: int = DRAWN_DEPTH) -> bool:
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
        self.stages = Stages(graph, saved, barriers, order, tie_sums)
        self.ordered = self.stages.ordered
        self.explicit = self.stages.explicit
        self.awaited: set[int] = set()  # forward operators that what has run needs done
        self.sharing: dict[int, list[int]] = {}  # by value, forward matmuls of it that are not
        self.ready: set[int] = set()  # forward values that are there
        self.lasting = set(self.fixed)  # what is never forgotten
        self.fresh: set[int] = set()  # made again in the last stage
        self.cheap: dict[int, bool] = {}  # whether to forget a value between stages
        self.steps: list[Step] = []
        self.since = 0  # where the stage before begins

    def run(self) -> list[Step]:
        """Returns the steps of the whole backward pass."""
        stages = self.stages.cut()
        heavy = any(stage.heavy for stage in stages)
        for stage in stages:
            if self.ordered:
                self.ready &= self.explicit | self.saved
            else:
                self._forget(REDO_LIMIT if heavy else FUSED_REDO_LIMIT)
            body = self._stage(stage.ops, last=stage is stages[-1])
            needed = read_before_made(self.graph, body)
            self._await(v for v in needed.encoded if v in self.saved)
            if stage.point is not None:
                self._barrier(stage.point, body, needed)
            self._await(v for v in needed.raw if v in self.saved)
            self.steps += body
        return self.steps

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
        self.fresh.update(op.outputs)
        if not op.fusible:
            self.lasting.update(op.outputs)
        for value in op.outputs:
            if _through_bits(self.graph, value):
                body += [Step("encode", value), Step("decode", value)]

    def _forget(self, limit: int) -> None:
        """Between stages drop what is cheap to compute again, so that it is not kept alive.

        What does not fuse is never dropped, and is there for every value that was made of it. So how many
        operators make a value again is the same after every stage, and is counted once.
        """
        for value in self.fresh - self.lasting:
            if value not in self.cheap:
                redo = closure(self.graph, (value,), self.lasting, limit)
                self.cheap[value] = len(redo) <= limit
            if self.cheap[value]:
                self.ready.discard(value)
        self.fresh.clear()

    def _require(self, values: Iterable[int], body: list[Step]) -> None:
        forward = self.graph.forward_values
        missing = [v for v in dict.fromkeys(values) if forward[v] and v not in self.ready]
        for value in missing:
            if value in self.saved and value not in self.sources and self._encoded(value):
                body.append(Step("decode", value))
                self.ready.add(value)
        order = sorted(closure(self.graph, missing, Either(self.ready, self.fixed)))
        for index in order:
            op = self.graph.ops[index]
            self._again(op, body)

    def _encoded(self, value: int) -> bool:
        return value not in self.sources and form_of(self.graph.values[value]) != "raw"

    def _barrier(self, point: StagePoint, body: list[Step], needed: Needed) -> None:
        """Puts a barrier before a stage that recomputes something.

        Tied are the kept values that recomputation reads, and any argument that alone feeds a
        recomputed operator: everything recomputed then depends on the cotangent. So are all operands of a matmul
        that may run before another of one of them: XLA makes one of two that share an operand and do not need each
        other, and both results would be there till the end.
        """
        graph, forward = self.graph, self.graph.forward_values
        again = [
            graph.ops[step.target]
            for step in body
            if step.action == "compute" and graph.ops[step.target].phase == "forward"
        ]
        there = frozenset(needed.raw)
        if not again and not needed.encoded:
            return
        tied = set(needed.encoded)
        held = Either(self.saved, self.explicit)
        for op in again:
            kept = (v for v in op.inputs if v in held and v not in self.sources)
            tied.update(v for v in kept if v in there)
        self._await(v for v in tied if v in self.saved)
        tainted = set(tied)
        for op in again:
            reads = [v for v in op.inputs if forward[v] and v not in graph.constants]
            if self._may_be_merged(op) or not any(v in tainted for v in reads):
                tied.update(v for v in reads if v in there)
            if reads:
                tainted.update(op.outputs)
        if tied:
            tied |= self._late()
            self.since = len(self.steps)
            self.steps.append(Step("barrier", values=(*sorted(tied), *point.frontier)))

    def _await(self, values: Iterable[int]) -> None:
        """Notes that what runs from now on needs kept values, and so what makes them."""
        todo = list(values)
        while todo:
            producer = self.graph.values[todo.pop()].producer
            if producer is not None and producer not in self.awaited:
                self.awaited.add(producer)
                todo += self.graph.ops[producer].inputs

    def _may_be_merged(self, op: Op) -> bool:
        """Whether a matmul shares an operand with one of the forward pass that it does not wait for."""
        if not op.contracts:
            return False
        for value in op.inputs:
            if value not in self.sharing:
                users = (self.graph.ops[user] for user in self.graph.users[value])
                found = [u.id for u in users if u.contracts and u.phase == "forward"]
                self.sharing[value] = found
            left = [user for user in self.sharing[value] if user not in self.awaited]
            self.sharing[value] = left
            if left:
                return True
        return False

    def _late(self) -> set[int]:
        """Gradients since the last barrier that XLA might leave for later; tied, they are not.

        XLA takes the best of several orders of the whole program, in some of which all gradients come last, and all
        that they read stays till then: a Llama of six blocks took 512 MiB so, and takes 313. Not tied are gradients
        that take more than they read, as of VGG's largest matrices: until they are written, their memory serves
        others.
        """
        since = self.steps[: self.since : -1] if self.since else self.steps[::-1]
        ran = [self.graph.ops[step.target] for step in since if step.action == "compute"]
        there = {value for op in ran if op.phase == "backward" for value in op.outputs}
        return {value for value in there & set(self.graph.gradients) if self._frees(value)}

    def _frees(self, gradient: int) -> bool:
        """Whether a compute-bound operator makes a gradient from at least as many bytes of temporaries as it takes.

        What is computed element by element, or summed up, XLA makes in kernels that others need.
        """
        values, op = self.graph.values, maker(self.graph, gradient)
        if op is None or not op.heavy:
            return False
        read = sum(values[v].nbytes for v in {*op.inputs} - self.graph.sources)
        return read >= values[gradient].nbytes


def _sum_ties(graph: Graph, backward: Sequence[Step]) -> dict[int, tuple[int, ...]]:
    """What is tied, by operator, so that gradients of what is used often are added up as they come."""
    ran = (graph.ops[step.target] for step in backward if step.action == "compute")
    return accumulations(graph, [op for op in ran if op.phase == "backward"])


def _with_ties(steps: Sequence[Step], ties: Mapping[int, tuple[int, ...]]) -> list[Step]:
    """Returns the steps with a barrier behind every run of an operator that `ties` names, over what it says."""
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if step.action == "compute" and step.target in ties:
            found.append(Step("barrier", values=ties[step.target]))
    return found


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
