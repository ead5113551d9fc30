"""Predicts XLA's temp memory from a plan: which values become buffers, and how many are alive at once.

`simulate` counts every value of a schedule; a compiler does not. This model plays, on the joint graph, the parts
of XLA:GPU that decide about memory, without compiling:

1. *Instances.* Every run of an operator makes new instances of its results. The same operator on the same instances
   is one instance: XLA merges repetitions that no barrier separates. A barrier makes new instances that share their
   buffers; so do reshapes and whatever else moves no data.
2. *Fusion.* A result of a matmul, convolution, loop, scatter or unknown operator is a buffer; so is a reduction's
   (it is merged with what it reads, never with what reads it), what these operators read, what a barrier ties, and
   every result and gradient. Any other value is a buffer only if several kernels read it and writing it once takes
   less time than making it in each of them. Kernels of one size that do not depend on one another count as one:
   XLA merges them into a kernel with several results.
3. *Zeros.* A scatter, the gradient of a max pool and a loop that stacks write over zeros. XLA has one array of
   zeros of a shape, and where it must be in memory, all read it that would otherwise have a zero in their code (a
   ReLU, its gradient, a dropout): it is there from the first to the last of them, and what writes over zeros writes
   over a copy that is made as early. A scatter into zeros that is only added to an array scatters into that array.
   The gradient of a max pool first finds where every window has its largest: an array of indices per dimension.
4. *Early kernels.* What is made from next to nothing (random bits, masks unpacked from bits) is made for all equal
   shapes in one kernel, as early as the first of them: XLA merges these across the whole program.
5. *Order.* That of the schedule, but for what XLA's list scheduler puts off until everything else takes more
   memory: gradients that are larger than what they are made from, and the indices of a pool's largest, which could
   be made in the forward pass. In the backward loop of a `scan` all gradients that are stacked come last. Element-
   wise kernels that read one array of their size and do not need each other are one kernel, which runs when the
   last of them could.
6. *Places.* Element-wise kernels and scatters write into an operand that dies there and has the same size, if that
   is the only result of another kernel and no barrier is between them; transpositions do not, nor does what a
   scatter then writes over. Temporaries are put into results that are not there yet, largest first, into the
   smallest that fits.
7. *Loops.* A loop holds its operands, its results and what one iteration needs; what it stacks and nobody reads is
   dropped. The zeros that loops stack into are made in one kernel for all of a type, as early as the first of them.
   In the body, what was stacked is read as slices; a slice is a buffer if an operator that does not fuse reads it.
   What a loop in the body stacks or sums is a buffer that is then copied into the stack, or added to the sum, of
   the loop around it; what it carries is not.

8. *Convolutions.* The operand of a transposed convolution is dilated in memory, unless its kernel is reversed. The
   gradient of its kernel reads copies of both operands; of the first it is all that is kept of it, unless a
   barrier stands between, behind which it is made at once. So are those of other convolutions' kernels.

What is not modelled: XLA's freedom to interleave independent work (where many small arrays compete it finds better
and worse orders than ours), fragmentation, the scratch space of libraries and of matmuls whose long sum is split,
most copies for layouts. `benchmarks/memory_model.py` holds the model against the compiler.

Rules 2 to 6 follow XLA's `priority_fusion`, `multi_output_fusion`, `hlo_memory_scheduler` and `buffer_assignment`;
the only numbers are the cost of an operator in additions and that of an addition in bytes.

Complexity: linear in the steps, but for the reachability bits (quadratic in bits) and the search for places (the
number of large temporaries times that of the results).
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from remat.core.forms import stored_bytes
from remat.core.graph import Graph, Op, Value
from remat.plans.steps import Schedule

__all__ = ["Alive", "Buffer", "Prediction", "buffers", "peak_bytes", "predict", "predict_body"]

# What moves no data: the result is the operand's buffer.
_SAME_BUFFER = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "stop_gradient",
        "copy_p",
        "name",
        "pvary",
        "device_put",
        "sharding_constraint",
        "mesh_cast",
    }
)
# Operators of one operand that their result type describes: two on one operand are one.
_DETERMINED = frozenset(
    {
        "abs",
        "ceil",
        "convert_element_type",
        "cos",
        "erf",
        "exp",
        "exp2",
        "floor",
        "is_finite",
        "log",
        "log1p",
        "log2",
        "logistic",
        "neg",
        "not",
        "one_minus_square",
        "rsqrt",
        "sign",
        "sin",
        "sqrt",
        "square",
        "tanh",
    }
)
# Operators that take a part of an array which their result type does not tell.
_PICKS = frozenset({"slice", "split", "pad", "concatenate"})
_COMPARED = frozenset({"POINTWISE", "VIEW", "REDUCTION", "HEAVY"})
# Operators that write into their operand's buffer although they do not fuse.
_IN_PLACE = frozenset(
    {
        "scan",
        "scatter",
        "scatter-add",
        "scatter-max",
        "scatter-min",
        "scatter-mul",
        "scatter-sub",
        "scatter_add",
        "select_and_scatter_add",
        "while",
    }
)
_SCATTERS = frozenset(name for name in _IN_PLACE if name.startswith("scatter"))
# Clock cycles per element relative to an addition's, from what XLA measured on an H100 (`hlo_op_profiles_data.h`,
# sm_90, float32); operators that are not here count as an addition.
_ADDITIONS: Mapping[str, int] = {
    "atan2": 64,
    "cbrt": 25,
    "cos": 140,
    "div": 6,
    "erf": 67,
    "erf_inv": 67,
    "exp": 11,
    "exp2": 11,
    "expm1": 27,
    "log": 24,
    "log1p": 33,
    "log2": 24,
    "logistic": 18,
    "pow": 75,
    "rsqrt": 11,
    "sin": 140,
    "sqrt": 11,
    "tan": 140,
    "tanh": 67,
}
_CONVOLUTION = "conv_general_dilated"
# What returns several arrays to XLA, however many it has in the graph.
_TUPLES = frozenset({_CONVOLUTION, "scan", "sort", "while"})
_INDEX_BYTES = 4
_COMPUTED_BYTES = 4  # element-wise kernels compute in float32
_POOL_GRADIENT = "select_and_scatter_add"
_RANDOM_ADDITIONS = (
    120  # threefry: 20 rounds of an addition, a rotation and an exclusive or, and the keys
)
# How many bytes of memory traffic take as long as one addition: H100 and H200 issue about 33e12 single-precision
# instructions per second and move 3.4e12 to 4.8e12 bytes.
_BYTES_PER_ADDITION = 0.145
# A value made from less than this share of its own bytes is made from next to nothing.
_NOTHING = 1 / 8
# Temporaries below this share of the largest are not worth a place.
_TINY = 1 / 4096
# Kernels that are further apart than this are not merged: a search for what depends on them would take too long.
_FAR = 64
# More kernels than this are not compared pair by pair.
_MOST_KERNELS = 12

Kind = Literal["op", "barrier", "pack", "unpack", "zeros", "indices"]


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
    """

    peak_bytes: int
    at_peak: tuple[Buffer, ...]
    step: int
    held_in_results_bytes: int
    loop_peak_bytes: int
    outside_peak_bytes: int
    traffic_bytes: int
    alive: tuple[Alive, ...] = field(default=(), repr=False)


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


class _LoopPlan(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def plan(self) -> _Planned: ...


class _Planned(Protocol):
    @property
    def graph(self) -> Graph: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def loops(self) -> Sequence[_LoopPlan]: ...


@dataclass(slots=True)
class _Node:
    """One execution of an operator, a barrier, or the packing or unpacking of a mask."""

    kind: Kind
    op: Op | None
    name: str
    ins: tuple[int, ...]
    outs: list[int]
    step: int
    fusible: bool
    reduces: bool = False
    additions: int = 0
    working: Prediction | None = None
    again: bool = False
    trips: int = 0


@dataclass(slots=True)
class _Instance:
    """One array in memory or in registers. `root` is the instance whose buffer it shares."""

    value: int
    nbytes: int
    elements: int
    producer: int
    root: int
    packed: bool = False


@dataclass
class _Program:
    """The instances and nodes of a schedule, in its order.

    Attributes:
        sources: instances that are there before the first node.
        slices: those of them that are parts of stacked arrays.
        results: instances that are results or gradients.
        in_loop: whether this is a loop's body: its results are parts of arrays in use.
        stacks: whether its results are stacked.
        copied: results that are buffers of their own before they are part of an array in use.
        shared: the zeros that more than one operator reads, see `_shared_zeros`.
    """

    graph: Graph
    nodes: list[_Node] = field(default_factory=list)
    instances: list[_Instance] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    slices: set[int] = field(default_factory=set)
    in_loop: bool = False
    stacks: bool = False
    results: list[int] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    shared: frozenset[_ArrayKind] = frozenset()


_Action = tuple[str, int, tuple[int, ...]]


def predict(
    graph: Graph, schedule: Schedule | None = None, *, loops: Sequence[_LoopPlan] = ()
) -> Prediction:
    """Predicts the temp memory of a compiled step that computes a graph's results and gradients.

    Args:
        graph: a joint graph.
        schedule: how it is executed; None for the plain program: every operator once, in the graph's order,
            nothing packed and nothing tied, as without rematerialization.
        loops: plans of the loop bodies of the graph (`LoopPlan`), for their working memory; without a schedule,
            their plain programs count.

    A schedule that runs no operator twice, packs nothing and ties nothing, in its loops neither, is the plain
    program in whatever order it stands: XLA orders it.
    """
    if schedule is not None and _is_plain(schedule, loops):
        schedule = None
    working = _working(graph, loops, plain=schedule is None)
    with _uncollected():
        builder = _Builder(graph, working)
        builder.given((*graph.inputs, *graph.constants, *graph.cotangents))
        builder.run(_steps(graph, schedule))
        program = builder.program
        program.results = [builder.raw[v] for v in (*graph.gradients, *graph.outputs)]
        return _predict(program)


def _is_plain(schedule: Schedule, loops: Sequence[_LoopPlan]) -> bool:
    """Whether a schedule, and those of the loops, is the plain program: no operator twice, and nothing else."""
    computed: list[int] = []
    for step in schedule.steps:
        if step.action == "compute":
            computed.append(step.target)
        elif step.action not in ("free", "turn"):
            return False
    if len(set(computed)) != len(computed):
        return False
    return all(_is_plain(loop.plan.schedule, loop.plan.loops) for loop in loops)


def predict_body(
    graph: Graph, schedule: Schedule | None = None, *, loops: Sequence[_LoopPlan] = ()
) -> tuple[Prediction, Prediction]:
    """Predicts what one iteration of a loop needs besides the loop's operands and results.

    Args:
        graph, schedule, loops: as in `predict`, of the loop's body.

    Returns:
        The predictions of the forward and of the backward loop.
    """
    working = _working(graph, loops, plain=schedule is None)
    steps = _steps(graph, schedule)
    turn = next((i for i, step in enumerate(steps) if step[0] == "turn"), len(steps))
    ahead = _Builder(graph, working, in_loop=True)
    ahead.given((*graph.inputs, *graph.constants))
    ahead.sliced(graph.inputs)
    ahead.run(steps[:turn])
    back = _Builder(graph, working, in_loop=True)
    back.given((*graph.inputs, *graph.constants, *graph.cotangents))
    back.sliced(graph.inputs)
    carried = [v for v in graph.outputs if v in graph.carried]
    back.sliced(set(graph.cotangents) - _of_type(graph, graph.cotangents, carried))
    raw, bits = _read_before_made(graph, steps[turn:])
    back.crossing([v for v in raw if v in ahead.raw], packed=False)
    back.crossing([v for v in bits if v in ahead.bits], packed=True)
    back.run(steps[turn:], offset=turn)
    ahead.program.results = [
        *(ahead.raw[v] for v in graph.outputs),
        *(ahead.raw[v] for v in raw if v in ahead.raw),
        *(ahead.bits[v] for v in bits if v in ahead.bits),
    ]
    back.program.stacks = True
    back.program.results = [back.raw[v] for v in graph.gradients]
    ahead.program.copied = _made_by_loops(ahead.program, set(carried))
    back.program.copied = _made_by_loops(back.program, _of_type(graph, graph.gradients, carried))
    return _predict(ahead.program), _predict(back.program)


def _made_by_loops(program: _Program, carried: set[int]) -> set[int]:
    """The results of a body that a loop in it makes, but for those that it hands on in place."""
    instances = program.instances
    roots = {instances[index].root for index in program.results}
    made = (root for root in roots if instances[root].producer >= 0)
    return {
        root
        for root in made
        if program.nodes[instances[root].producer].name == "scan"
        and instances[root].value not in carried
    }


def _of_type(graph: Graph, values: Iterable[int], types: Iterable[int]) -> set[int]:
    """For each of `types` one of `values` of the same type: cotangents and gradients of what is carried."""
    left = list(values)
    found: set[int] = set()
    for other in types:
        kind = graph.values[other].shape, graph.values[other].dtype
        alike = [v for v in left if (graph.values[v].shape, graph.values[v].dtype) == kind]
        if alike:
            left.remove(alike[0])
            found.add(alike[0])
    return found


def peak_bytes(
    graph: Graph, schedule: Schedule | None = None, *, loops: Sequence[_LoopPlan] = ()
) -> int:
    """Returns the predicted peak of a graph; of a loop's body the larger of what its two loops need.

    Args:
        graph, schedule, loops: as in `predict`.
    """
    if graph.multiplicity > 1 or graph.carried or graph.invariant:
        return max(part.peak_bytes for part in predict_body(graph, schedule, loops=loops))
    return predict(graph, schedule, loops=loops).peak_bytes


def buffers(graph: Graph) -> tuple[int, ...]:
    """Returns for every value the bytes of its buffer in the plain program, 0 if it never becomes one.

    Inputs, constants and cotangents have their bytes. A value that shares its operand's buffer (a reshape) has 0.
    """
    builder = _Builder(graph, {})
    builder.given((*graph.inputs, *graph.constants, *graph.cotangents))
    builder.run(_steps(graph, None))
    program = builder.program
    program.results = [builder.raw[v] for v in (*graph.gradients, *graph.outputs)]
    fusion = _Fusion(program)
    found = [0] * len(graph.values)
    for index, instance in enumerate(program.instances):
        if instance.root == index and fusion.is_buffer[index] and _is_named(program, instance):
            found[instance.value] = instance.nbytes
    return tuple(found)


def _is_named(program: _Program, instance: _Instance) -> bool:
    """Whether an instance is one of its value, not zeros in the form of the value."""
    kind = program.nodes[instance.producer].kind if instance.producer >= 0 else "op"
    if kind == "indices":
        return False
    if kind != "zeros":
        return True
    producer = program.graph.values[instance.value].producer
    return producer is not None and _is_constant(program.graph.ops[producer])


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: nothing here is cyclic, and looking for cycles takes 40 % of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _steps(graph: Graph, schedule: Schedule | None) -> list[_Action]:
    if schedule is not None:
        return [(step.action, step.target, step.values) for step in schedule.steps]
    steps: list[_Action] = [("compute", op.id, ()) for op in graph.ops]
    first = next((op.id for op in graph.backward_ops()), len(steps))
    return [*steps[:first], ("turn", -1, ()), *steps[first:]]


_Working = Mapping[int, tuple[Prediction, int]]


def _working(graph: Graph, loops: Sequence[_LoopPlan], plain: bool) -> _Working:
    """What one iteration of every planned loop needs, and the number of iterations, by the loop's operator."""
    by_path = {
        loop.path: (
            predict_body(
                loop.plan.graph, None if plain else loop.plan.schedule, loops=loop.plan.loops
            ),
            loop.plan.graph.multiplicity,
        )
        for loop in loops
    }
    found: dict[int, tuple[Prediction, int]] = {}
    for op in graph.ops:
        if op.loop in by_path:
            halves, trips = by_path[op.loop or ""]
            found[op.id] = halves[op.phase == "backward"], trips
    return found


def _read_before_made(graph: Graph, steps: Iterable[_Action]) -> tuple[list[int], list[int]]:
    """The raw and packed values that steps read before they make them, and gradients they never make."""
    raw: dict[int, None] = {}
    bits: dict[int, None] = {}
    made: set[int] = set()
    packed: set[int] = set()
    for action, target, values in steps:
        if action == "compute":
            op = graph.ops[target]
            raw.update((v, None) for v in op.inputs if v not in made)
            made.update(op.outputs)
        elif action == "encode":
            packed.add(target)
        elif action == "decode":
            if target not in packed:
                bits[target] = None
            made.add(target)
        elif action == "barrier":
            raw.update((v, None) for v in values if v not in made)
    raw.update((v, None) for v in graph.gradients if v not in made)
    given = {*graph.inputs, *graph.constants, *graph.cotangents}
    return [v for v in raw if v not in given and v not in bits], list(bits)


_ArrayKind = tuple[str, tuple[int, ...]]


def _array_kind(value: Value) -> _ArrayKind:
    """What zeros of a value have in common: XLA transposes zeros for nothing."""
    return value.dtype, tuple(sorted(value.shape))


def _fills(graph: Graph, op: Op) -> bool:
    """Whether an operator writes over zeros."""
    if op.name == _POOL_GRADIENT:
        return not op.padded
    producer = graph.values[op.inputs[0]].producer if op.name in _SCATTERS else None
    return producer is not None and _is_constant(graph.ops[producer])


def _is_constant(op: Op) -> bool:
    """Whether an operator repeats a literal; literals are not in the graph."""
    return op.name == "broadcast_in_dim" and not op.inputs


def _is_added_up(graph: Graph, op: Op) -> bool:
    """Whether an operator scatters sums into zeros and the result is only added to an array.

    XLA scatters into that array instead.
    """
    if op.name not in ("scatter-add", _POOL_GRADIENT) or not _fills(graph, op):
        return False
    value = op.outputs[0]
    users = graph.users[value]
    return (
        len(users) == 1
        and graph.ops[users[0]].name == "add_any"
        and value not in graph.outputs
        and value not in graph.gradients
    )


def _shared_zeros(graph: Graph, added: frozenset[int]) -> frozenset[_ArrayKind]:
    """The zeros that both kernels that fuse and operators that write over them read.

    XLA has one array of zeros of a kind, written to memory for a scatter or a loop, which writes over a copy. All
    that would otherwise have a zero in its code (a ReLU, its gradient, a dropout) reads that array, so it is there
    from the first to the last of them. A loop writes over the zeros that it stacks its results into.
    """
    written: set[_ArrayKind] = set()
    read: set[_ArrayKind] = set()
    for op in graph.ops:
        if op.name == "scan":
            written.update(_array_kind(graph.values[value]) for value in op.outputs)
        elif _fills(graph, op) and op.id not in added:
            written.add(_array_kind(graph.values[op.outputs[0]]))
        elif (op.name == "max" and len(op.inputs) == 1) or (
            _is_constant(op) and any(graph.ops[user].fusible for user in graph.users[op.outputs[0]])
        ):
            read.add(_array_kind(graph.values[op.outputs[0]]))
    return frozenset(kind for kind in written & read if kind[1])


class _Builder:
    """Turns steps into nodes and instances."""

    def __init__(self, graph: Graph, working: _Working, *, in_loop: bool = False) -> None:
        self.graph = graph
        self.working = working
        self.program = _Program(graph, in_loop=in_loop)
        self.raw: dict[int, int] = {}
        self.bits: dict[int, int] = {}
        self._seen: dict[Hashable, list[int]] = {}
        self._ran: set[int] = set()
        self._added = frozenset(op.id for op in graph.ops if _is_added_up(graph, op))
        self._shared = self.program.shared = _shared_zeros(graph, self._added)
        # Scatters into zeros, by result, with their other operands: run where the result is added to an array.
        self._postponed: dict[int, tuple[Op, tuple[int, ...]]] = {}

    def given(self, values: Iterable[int]) -> None:
        """Values that are there before the first step."""
        for value in values:
            self.raw[value] = self._new(value, -1)
            self.program.sources.add(self.raw[value])

    def sliced(self, given: Iterable[int]) -> None:
        """Of what a loop's body is given, marks what is a slice of a stacked array."""
        whole = {*self.graph.invariant, *self.graph.carried}
        self.program.slices.update(self.raw[v] for v in given if v not in whole)

    def crossing(self, values: Iterable[int], *, packed: bool) -> None:
        """Values that the forward loop stacked, sliced for this iteration."""
        for value in values:
            index = self._new(value, -1, packed=packed)
            (self.bits if packed else self.raw)[value] = index
            self.program.sources.add(index)
            self.program.slices.add(index)

    def run(self, steps: Sequence[_Action], offset: int = 0) -> None:
        """Executes steps."""
        for index, (action, target, values) in enumerate(steps, start=offset):
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
        index = len(self.program.instances)
        root = index if root < 0 else self.program.instances[root].root
        instance = _Instance(value, nbytes, elements, producer, root, packed)
        self.program.instances.append(instance)
        return index

    def _tie(self, step: int, op: Op | None, ins: tuple[int, ...]) -> list[int]:
        number = len(self.program.nodes)
        node = _Node("barrier", op, "barrier", ins, [], step, fusible=False)
        self.program.nodes.append(node)
        for index in ins:
            old = self.program.instances[index]
            node.outs.append(self._new(old.value, number, root=index, packed=old.packed))
        return node.outs

    def _code(self, step: int, kind: Literal["pack", "unpack"], value: int, source: int) -> int:
        key = (kind, source)
        if key not in self._seen:
            number = len(self.program.nodes)
            packs = kind == "pack"
            node = _Node(kind, None, kind, (source,), [], step, True, packs, additions=3)
            self.program.nodes.append(node)
            node.outs.append(self._new(value, number, packed=packs))
            self._seen[key] = node.outs
        return self._seen[key][0]

    def _compute(self, step: int, op: Op) -> None:
        if op.id in self._added:
            ins = tuple(self._instance(step, v) for v in op.inputs[op.name != _POOL_GRADIENT :])
            if op.name == _POOL_GRADIENT:
                ins = self._indices(step, op, ins)
            self.raw.pop(op.outputs[0], None)
            self._postponed[op.outputs[0]] = op, ins
            return
        postponed = self._postponed and op.name == "add_any"
        later = [v for v in op.inputs if v in self._postponed] if postponed else []
        if later:
            added, ins = self._postponed.pop(later[0])
            other = op.inputs[op.inputs[0] == later[0]]
            ins = (*ins, self._instance(step, other))
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
        if op.name == _POOL_GRADIENT:
            ins = self._indices(step, op, ins)
        if len(ins) == 1 and len(op.outputs) == 1 and self._moves_nothing(op):
            self.raw[op.outputs[0]] = ins[0]
            return
        key = (self._signature(op), ins)
        made = self._seen.get(key)
        if made is None:
            made = self._seen[key] = self._node(step, op, ins)
        self.raw.update(zip(op.outputs, made, strict=True))

    def _instance(self, step: int, value: int) -> int:
        """The instance of a value; runs a scatter that was postponed."""
        if value in self._postponed:
            op, ins = self._postponed.pop(value)
            ins = (*ins, self._fresh_zeros(step, value))
            self.raw[value] = self._node(step, op, ins)[0]
        return self.raw[value]

    def _is_shared(self, value: int) -> bool:
        return _array_kind(self.graph.values[value]) in self._shared

    def _zeros(self, step: int, value: int) -> int:
        """The zeros in the form of a value, one array for the whole program."""
        key = ("zeros", _array_kind(self.graph.values[value]))
        if key not in self._seen:
            self._seen[key] = self._filled(step, value, ())
        return self._seen[key][0]

    def _fresh_zeros(self, step: int, value: int) -> int:
        """Zeros that are written over: where others read the same zeros, a copy of them."""
        ins = (self._zeros(step, value),) if self._is_shared(value) else ()
        return self._filled(step, value, ins)[0]

    def _filled(self, step: int, value: int, ins: tuple[int, ...]) -> list[int]:
        number = len(self.program.nodes)
        node = _Node("zeros", None, "zeros", ins, [], step, fusible=not ins, additions=1)
        self.program.nodes.append(node)
        node.outs.append(self._new(value, number))
        return node.outs

    def _with_zeros(self, step: int, op: Op, ins: tuple[int, ...]) -> tuple[int, ...]:
        """The operands with zeros that the graph does not name."""
        if op.name == _POOL_GRADIENT and not op.padded:
            return (*ins, self._fresh_zeros(step, op.outputs[0]))
        if op.name in _SCATTERS and _fills(self.graph, op) and self._is_shared(op.outputs[0]):
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
            number = len(self.program.nodes)
            node = _Node("indices", None, "indices", (ins[1],), [], step, fusible, True)
            self.program.nodes.append(node)
            windows = math.prod(self.graph.values[source].shape)
            for _ in self.graph.values[source].shape:
                node.outs.append(self._new(source, number, nbytes=_INDEX_BYTES * windows))
            self._seen[key] = node.outs
        return (ins[0], *self._seen[key], *ins[2:])

    def _signature(self, op: Op) -> Hashable:
        """Equal for operators that compute the same of the same operands, as far as the graph tells.

        It does not tell parameters and literals. Operators from one line of the user's code with results of one
        type are taken to have the same, unless they pick parts of an array, several of which one line may.
        """
        if len(op.outputs) != 1 or op.effectful or not (op.recomputable or op.decision):
            return op.id
        result = self.graph.values[op.outputs[0]]
        if op.name in _DETERMINED and len(op.inputs) == 1:
            return op.name, result.dtype
        picks = op.name in _PICKS or op.kind not in _COMPARED
        return op.id if picks or not op.source else (op.name, result.dtype, result.shape, op.source)

    def _node(
        self, step: int, op: Op, ins: tuple[int, ...], outputs: tuple[int, ...] | None = None
    ) -> list[int]:
        number = len(self.program.nodes)
        random = op.random and op.kind == "RANDOM"
        working, trips = self.working.get(op.id, (None, 0))
        node = _Node(
            "op",
            op,
            op.name,
            ins,
            [],
            step,
            fusible=op.fusible,
            reduces=op.kind == "REDUCTION",
            additions=_RANDOM_ADDITIONS if random else _ADDITIONS.get(op.name, 1),
            working=working,
            again=op.id in self._ran,
            trips=trips,
        )
        self._ran.add(op.id)
        self.program.nodes.append(node)
        node.outs.extend(self._new(value, number) for value in outputs or op.outputs)
        return node.outs

    def _moves_nothing(self, op: Op) -> bool:
        source, result = self.graph.values[op.inputs[0]], self.graph.values[op.outputs[0]]
        if op.name in _SAME_BUFFER or (op.name == "rev" and self._mirrors_kernel(op)):
            return True
        if op.name == "transpose" and not self.program.in_loop and self._turns_product(op):
            return True
        if source.nbytes != result.nbytes:
            return False
        return op.name == "broadcast_in_dim" or (
            op.name == "transpose" and _keeps_order(source, result)
        )

    def _turns_product(self, op: Op) -> bool:
        """Whether the transposed product of two matrices alone is read: XLA multiplies them the other way round.

        In a loop's body the transposition is part of writing into a stack, and the product is a buffer.
        """
        value = self.graph.values[op.inputs[0]]
        producer = self.graph.ops[value.producer] if value.producer is not None else None
        product = producer is not None and producer.name == "dot_general" and not producer.batched
        return product and len(value.shape) == 2 and len(self.graph.users[value.id]) == 1

    def _mirrors_kernel(self, op: Op) -> bool:
        """Whether only convolutions read the result: their library reads a kernel mirrored."""
        users = self.graph.users[op.outputs[0]]
        return all(self.graph.ops[user].name == _CONVOLUTION for user in users)


def _keeps_order(source: Value, result: Value) -> bool:
    """Whether a transposition moves dimensions of size one only."""
    before = [dim for dim in source.shape if dim != 1]
    return before == [dim for dim in result.shape if dim != 1] and len(set(before)) == len(before)


def _pays(nbytes: int, work: float, reads: float, again: Sequence[float]) -> bool:
    """Whether to write a value once rather than to make it in every kernel that reads it.

    Memory traffic and arithmetic overlap, so a kernel takes as long as the longer of the two. All in bytes.

    Args:
        nbytes: of the value, written once and read by every kernel.
        work: arithmetic to make it.
        reads: what a kernel that makes it reads.
        again: for every kernel that needs it what that would read to make it, beyond what it reads anyway.
    """
    once = max(work, reads + nbytes) + len(again) * nbytes
    return once < sum(max(work, more) for more in again)


class _Fusion:
    """Which instances become buffers, and which kernels read them.

    Attributes:
        live: for every node whether a result depends on it.
        users: for every instance the live nodes that read it.
        is_buffer: for every instance whether it is written to memory.
        kernels: for every node the kernels it is part of, each by its last node.
    """

    def __init__(self, program: _Program) -> None:
        self.program = program
        self.live = self._find_live()
        self.users = self._find_users()
        # To make a value: bytes to read, and instructions as bytes.
        self.reads: list[float] = [float(i.nbytes) for i in program.instances]
        self.work: list[float] = [0.0] * len(program.instances)
        # The buffers among what it takes; small ones left out.
        self.leaves = [frozenset((i.root,)) for i in program.instances]
        self.read_by: dict[int, set[int]] = {}
        self._estimate()
        self._reach: list[int] | None = None
        self.is_buffer = [i.producer < 0 for i in program.instances]
        self.kernels: list[frozenset[int]] = [frozenset()] * len(program.nodes)
        self._choose()

    def _find_live(self) -> list[bool]:
        nodes = self.program.nodes
        live = [False] * len(nodes)
        needed = [False] * len(self.program.instances)
        for index in self.program.results:
            needed[index] = True
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            if not node.outs or any(needed[out] for out in node.outs):
                live[number] = True
                for index in node.ins:
                    needed[index] = True
        return live

    def _find_users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in self.program.instances]
        for number, node in enumerate(self.program.nodes):
            if self.live[number]:
                for index in dict.fromkeys(node.ins):
                    users[index].append(number)
        return users

    def _estimate(self) -> None:
        """What it takes to make every value if what several operators read is written where that pays."""
        instances = self.program.instances
        for number, node in enumerate(self.program.nodes):
            if node.kind == "zeros":  # whether they are in memory is not known when XLA estimates
                self.reads[node.outs[0]], self.leaves[node.outs[0]] = 0.0, frozenset()
                continue
            if not self.live[number] or not node.fusible or node.reduces:
                continue
            for out in node.outs:
                reads, work = self._cost(node, out)
                nbytes, readers = instances[out].nbytes, len(self.users[out])
                if readers > 1 and _pays(nbytes, work, reads, [reads] * readers):
                    continue
                self.reads[out] = min(nbytes, reads) if readers > 1 else reads
                self.work[out] = work
                found = self._union(self.leaves, node.ins)
                least = _NOTHING * nbytes
                if any([instances[leaf].nbytes < least for leaf in found]):
                    found = frozenset([leaf for leaf in found if instances[leaf].nbytes >= least])
                self.leaves[out] = found

    def _cost(self, node: _Node, out: int) -> tuple[float, float]:
        instances = self.program.instances
        elements = instances[out].elements
        reads = 0.0
        work = node.additions * elements * _BYTES_PER_ADDITION
        for index in node.ins:
            reads += self.reads[index]
            size = instances[index].elements
            # A slice makes only its part of what it reads.
            work += self.work[index] * (elements / size if size > elements else 1)
        return reads, work

    def _choose(self) -> None:
        """From the results back: a value's kernels are known once those of its readers are."""
        nodes, results = self.program.nodes, set(self.program.results)
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            if not self.live[number]:
                continue
            outs = node.outs
            readers = self.users[outs[0]] if len(outs) == 1 else self._readers(outs)
            kernels = self._union(self.kernels, readers)
            written = (
                not node.fusible
                or node.reduces
                or any([not nodes[user].fusible for user in readers])
                or not results.isdisjoint(outs)
                or (len(kernels) > 1 and self._written_once(node, kernels))
            )
            if written or not kernels:
                kernels = frozenset((number,))
                for out in outs:
                    self.is_buffer[out] = True
            self.kernels[number] = kernels
            for kernel in kernels:
                read = self.read_by.setdefault(kernel, set())
                for index in node.ins:
                    read |= self.leaves[index]

    def _readers(self, outs: Sequence[int]) -> list[int]:
        return [user for out in outs for user in self.users[out]]

    @staticmethod
    def _union(sets: Sequence[frozenset[int]], of: Sequence[int]) -> frozenset[int]:
        """The union; without a new set where there is one that holds the others."""
        if not of:
            return frozenset()
        found = sets[of[0]]
        for index in of[1:]:
            other = sets[index]
            if not other <= found:
                found = other if found <= other else found | other
        return found

    def _written_once(self, node: _Node, kernels: frozenset[int]) -> bool:
        """Whether one write and a read per kernel cost less than making it in every kernel.

        A kernel does not pay for reading what it reads in any case.
        """
        instances = self.program.instances
        out = node.outs[0]
        nbytes = instances[out].nbytes
        reads, work = self._cost(node, out)
        leaves = self._union(self.leaves, node.ins)
        whole = sum(instances[leaf].nbytes for leaf in leaves)
        scale = min(1.0, reads / whole) if whole else 0.0

        def pays(kernels: Sequence[int]) -> bool:
            again = [
                scale * sum(instances[leaf].nbytes for leaf in leaves - self.read_by[kernel])
                for kernel in kernels
            ]
            return _pays(nbytes, work, reads, again)

        if not pays(list(kernels)):
            return False
        apart = self._apart(kernels)
        return len(apart) > 1 and pays(apart)

    def _apart(self, kernels: frozenset[int]) -> list[int]:
        """The kernels that are left when those of one size that are independent are merged."""
        if len(kernels) > _MOST_KERNELS:
            return list(kernels)
        reach = self._reachable()
        groups: list[tuple[int, list[int]]] = []
        for kernel in sorted(kernels):
            size = self.size(kernel)
            for other, members in groups:
                if other == size and not any(reach[m] >> kernel & 1 for m in members):
                    members.append(kernel)
                    break
            else:
                groups.append((size, [kernel]))
        return [members[0] for _, members in groups]

    def size(self, number: int) -> int:
        """The number of elements a kernel walks over."""
        node, instances = self.program.nodes[number], self.program.instances
        around = node.ins if node.reduces else node.outs
        return max((instances[index].elements for index in around), default=0)

    def _reachable(self) -> list[int]:
        """For every node the set, as bits, of the nodes that depend on it, itself included."""
        if self._reach is None:
            reach = [0] * len(self.program.nodes)
            for number in range(len(reach) - 1, -1, -1):
                if self.live[number]:
                    bits = 1 << number
                    for out in self.program.nodes[number].outs:
                        for user in self.users[out]:
                            bits |= reach[user]
                    reach[number] = bits
            self._reach = reach
        return self._reach


@dataclass(slots=True, eq=False)
class _Kernel:
    """What runs as one: a node that writes memory, with the nodes merged into it; or a barrier.

    Attributes:
        node: the last of its nodes; kernels are known by it.
        reads: buffers it reads, by their root instances.
        writes: buffers it makes.
        after: the nodes of the kernels and barriers whose results it reads.
        merged: the last nodes of the kernels merged into it.
        copies: sources of which it, or a kernel before it, makes a copy: slices of stacked arrays that an operator
            reads that does not fuse, and kernels of convolutions in another layout. Behind a barrier it is another.
        workspace: an operand, and the bytes of what is made of it for this kernel alone.
    """

    node: int
    reads: set[int] = field(default_factory=set)
    writes: list[int] = field(default_factory=list)
    after: set[int] = field(default_factory=set)
    merged: list[int] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    workspace: tuple[int, int] | None = None

    def merge(self, other: _Kernel) -> None:
        """Takes over what another kernel does."""
        self.reads |= other.reads
        self.writes = other.writes + self.writes
        self.after |= other.after
        self.merged += [other.node, *other.merged]
        self.copies |= other.copies


def _kernels(program: _Program, fusion: _Fusion) -> list[_Kernel]:
    """The kernels, in the order of their last nodes."""
    instances = program.instances
    found: dict[int, _Kernel] = {}
    turned: set[int] = set()
    unread = _unread_stacks(program, fusion)
    for number, node in enumerate(program.nodes):
        if not fusion.live[number]:
            continue
        if fusion.kernels[number] == {number}:
            made = found.setdefault(number, _Kernel(number))
            made.writes = [i for i in node.outs if instances[i].root == i and i not in unread]
        for member in fusion.kernels[number]:
            kernel = found.setdefault(member, _Kernel(member))
            for index in node.ins:
                root = instances[index].root
                if fusion.is_buffer[index] or root != index:
                    kernel.reads.add(root)
                    if instances[index].producer >= 0:
                        kernel.after.add(instances[index].producer)
                if root in program.slices and not node.fusible and node.kind != "barrier":
                    kernel.copies.add(root)
        if node.op is not None and node.op.workspace_bytes and number in found:
            found[number].workspace = node.ins[0], node.op.workspace_bytes
        if node.op is not None and node.op.swapped:
            # Elsewhere the copy of the first is all that is kept of it.
            is_tied = _tie_of(program, node.ins[0]) is not None
            found[number].copies.update(node.ins[:1] if is_tied else ())
        elif node.name == _CONVOLUTION and len(node.ins) > 1:
            index = node.ins[1]
            if instances[index].root in program.sources and _is_turned(program, node):
                found[number].copies.add(index)
                turned.add(index)
            elif index in turned:
                found[number].copies.add(index)
    return [found[number] for number in sorted(found)]


def _tie_of(program: _Program, index: int) -> int | None:
    """The barrier that an instance comes out of, None if it is another node's result."""
    producer = program.instances[index].producer
    return producer if producer >= 0 and program.nodes[producer].kind == "barrier" else None


def _unread_stacks(program: _Program, fusion: _Fusion) -> set[int]:
    """What planned loops stack and nobody reads: what a chunk keeps when it runs for the first time."""
    results = set(program.results)
    return {
        out
        for node in program.nodes
        if node.op is not None and node.op.loop is not None and len(node.outs) > 1
        for out in node.outs
        if not fusion.users[out] and out not in results
    }


def _siblings(program: _Program, fusion: _Fusion, kernels: list[_Kernel]) -> list[_Kernel]:
    """The kernels with those merged that read one array of the size they walk over and do not need each other.

    XLA makes one kernel with several results of them. It runs when the last of them could, so what the first makes
    and what is made from that comes later.
    """
    instances = program.instances
    last: dict[int, _Kernel] = {}  # by array, the last element-wise kernel that read it
    order: list[_Kernel] = []
    place: dict[int, int] = {}
    for kernel in kernels:
        node = program.nodes[kernel.node]
        place[kernel.node] = len(order)
        order.append(kernel)
        if node.kind != "op" or not node.fusible or node.reduces or not kernel.writes:
            continue
        size = fusion.size(kernel.node)
        for root in sorted(root for root in kernel.reads if instances[root].elements == size):
            other, last[root] = last.get(root), kernel
            if other is None or fusion.size(other.node) != size:
                continue
            start, end = place[other.node], place[kernel.node]
            if order[start] is not other or not 0 < end - start <= _FAR:
                continue
            later = _dependent(order[start : end + 1])
            if later[-1:] == [kernel]:
                continue
            kernel.merge(other)
            moved = {member.node for member in later}
            rest = [member for member in order[start + 1 : end] if member.node not in moved]
            order[start : end + 1] = [*rest, kernel, *later]
            for index in range(start, len(order)):
                place[order[index].node] = index
    return order


def _dependent(kernels: list[_Kernel]) -> list[_Kernel]:
    """Those of some kernels, in their order, that need the first."""
    made = {kernels[0].node, *kernels[0].merged}
    found: list[_Kernel] = []
    for kernel in kernels[1:]:
        if not made.isdisjoint(kernel.after):
            made.update((kernel.node, *kernel.merged))
            found.append(kernel)
    return found


def _deferred(program: _Program, kernels: list[_Kernel]) -> list[_Kernel]:
    """The order in which what takes more memory than it frees waits, if it can.

    XLA's list scheduler runs what frees most beyond what it writes, and a result is never freed. The gradient of
    a weight that is larger than the activations it is made from is therefore computed late, when everything else
    takes more memory, and until then its memory serves for temporaries. In a loop's body it counts the whole stack
    that a gradient is written into, so there all gradients wait till the end. Where a pool's windows have their
    largest is known in the forward pass already, and there it is found once everything else takes as much.
    """
    size = [instance.nbytes for instance in program.instances]
    read: set[int] = set().union(*(kernel.reads for kernel in kernels))
    final = {program.instances[index].root for index in program.results} - read
    users: dict[int, int] = {}
    for kernel in kernels:
        for root in kernel.reads - program.sources:
            users[root] = users.get(root, 0) + 1

    def gain(kernel: _Kernel) -> int:
        freed = sum(size[root] for root in kernel.reads if users.get(root) == 1)
        return freed - sum(size[root] for root in kernel.writes)

    def most(kernel: _Kernel) -> int:
        freed = sum(size[root] for root in kernel.reads - program.sources)
        return freed - sum(size[root] for root in kernel.writes)

    order: list[_Kernel] = []
    waiting: dict[
        int, tuple[int, _Kernel]
    ] = {}  # by node, with what each can free at most beyond what it writes
    pools = {k.node: k for k in kernels if program.nodes[k.node].kind == "indices"}
    needs = {node: set(kernel.after) for node, kernel in pools.items()}

    def run(kernel: _Kernel) -> None:
        order.append(kernel)
        for root in kernel.reads - program.sources:
            users[root] -= 1
        for node in list(needs):
            needs[node].difference_update((kernel.node, *kernel.merged))
            if not needs[node]:
                del needs[node]
                waiting[node] = most(pools[node]), pools[node]

    for kernel in kernels:
        if kernel.node in pools:
            if waiting.pop(kernel.node, None) or needs.pop(kernel.node, None) is not None:
                run(kernel)  # it did not run before
            continue
        if kernel.writes and final.issuperset(kernel.writes):
            best = most(kernel)
            if best < 0 or program.stacks:
                waiting[kernel.node] = best, kernel
                continue
        if waiting and not program.stacks:
            own = gain(kernel)
            if own < 0:
                ready = [
                    k
                    for best, k in waiting.values()
                    if best >= own and gain(k) >= own + (k.node not in pools)
                ]
                for other in ready:
                    del waiting[other.node]
                for other in ready:
                    run(other)
        run(kernel)
    return [*order, *(kernel for _, kernel in waiting.values())]


def _is_stack(program: _Program, index: int) -> bool:
    """Whether a planned loop stacks its results into an array, over zeros that only loops write over."""
    instance = program.instances[index]
    node = program.nodes[instance.producer] if instance.producer >= 0 else None
    if node is None or node.trips < 2:
        return False
    value = program.graph.values[instance.value]
    return value.shape[:1] == (node.trips,) and _array_kind(value) not in program.shared


def _early(program: _Program, fusion: _Fusion) -> dict[int, int]:
    """Buffers that are made before their turn, because they are made from next to nothing: instance to kernel.

    The zeros that loops stack their results into are made in one kernel for all of a type.
    """
    ready = [-1] * len(program.instances)
    first: dict[tuple[int, int], int] = {}
    moved: dict[int, int] = {}
    filled: dict[_ArrayKind, int] = {}
    for number, node in enumerate(program.nodes):
        if not fusion.live[number]:
            continue
        known = max((ready[index] for index in node.ins), default=-1)
        for out in node.outs:
            instance = program.instances[out]
            if _is_stack(program, out):
                value = program.graph.values[instance.value]
                start = filled.setdefault((value.dtype, value.shape), number)
                if start < number:
                    moved[out] = start
            if node.kind == "zeros" and node.ins:
                moved[out] = program.instances[node.ins[0]].producer
            if node.kind == "barrier" or not node.fusible:
                ready[out] = number
                continue
            shape = (instance.elements, instance.nbytes)
            ready[out] = number if fusion.is_buffer[out] else known
            if not fusion.is_buffer[out] or node.reduces:
                continue
            read = sum(fusion.reads[index] for index in node.ins)
            if instance.elements > 1 and read <= _NOTHING * instance.nbytes:
                start = first.setdefault(shape, number)
                if known <= start < number:
                    moved[out] = ready[out] = start
    return moved


@dataclass(slots=True)
class _Range:
    """When a buffer is there: from position `start` to position `end` of an order of kernels, both included."""

    index: int
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True)
class _Layout:
    """An order of kernels with the live ranges of temporaries, and of results from when they are written."""

    order: list[_Kernel]
    ranges: list[_Range]
    results: list[_Range]


@dataclass(frozen=True)
class _Timeline:
    """An order of kernels with what is alive."""

    order: list[_Kernel]
    peak_bytes: int
    loop_peak_bytes: int
    outside_peak_bytes: int
    at: int
    outside: list[_Range]
    inside: list[_Range]
    totals: list[int]


def _predict(program: _Program) -> Prediction:
    fusion = _Fusion(program)
    kernels = _siblings(program, fusion, _kernels(program, fusion))
    layout = _laid_out(program, _deferred(program, kernels), _early(program, fusion))
    found = _timeline(program, layout)
    at = found.at
    listed = [_describe(program, r.index, r.nbytes) for r in found.outside if _covers(r, at)]
    node = program.nodes[found.order[at].node] if at >= 0 else None
    if node is not None and node.working is not None:
        listed += [_of_body(node, buffer) for buffer in node.working.at_peak]
    return Prediction(
        peak_bytes=found.peak_bytes,
        at_peak=tuple(sorted(listed, key=lambda b: (-b.nbytes, b.value))),
        step=node.step if node is not None else -1,
        held_in_results_bytes=sum(r.nbytes for r in found.inside if _covers(r, at)),
        loop_peak_bytes=found.loop_peak_bytes,
        outside_peak_bytes=found.outside_peak_bytes,
        traffic_bytes=_traffic_bytes(program, kernels),
        alive=tuple(
            _alive(program, kernel, total)
            for kernel, total in zip(found.order, found.totals, strict=True)
        ),
    )


def _alive(program: _Program, kernel: _Kernel, nbytes: int) -> Alive:
    node = program.nodes[kernel.node]
    is_backward = node.again or node.kind in ("barrier", "unpack")
    is_backward = is_backward or (node.op is not None and node.op.phase == "backward")
    return Alive(node.step, nbytes, is_backward, node.working is not None)


def _traffic_bytes(program: _Program, kernels: Sequence[_Kernel]) -> int:
    """What kernels read and write; loops and barriers left out."""
    nodes, instances = program.nodes, program.instances
    moving = (k for k in kernels if nodes[k.node].kind != "barrier" and not nodes[k.node].working)
    return sum(instances[root].nbytes for k in moving for root in (*k.reads, *k.writes))


def _timeline(program: _Program, layout: _Layout) -> _Timeline:
    order, ranges = layout.order, layout.ranges
    places = set() if program.in_loop else _in_results(ranges, layout.results)
    outside = [r for i, r in enumerate(ranges) if i not in places]
    change = _changes(outside, len(order))
    for start, nbytes in _overwritten(program, order, outside):
        change[start] -= nbytes
        change[start + 1] += nbytes
    peak, at, alive = 0, -1, 0
    in_loops = elsewhere = 0
    totals: list[int] = []
    for position, kernel in enumerate(order):
        alive += change[position]
        working = program.nodes[kernel.node].working
        total = alive + (working.peak_bytes if working else 0)
        totals.append(total)
        if total > peak:
            peak, at = total, position
        if working:
            in_loops = max(in_loops, total)
        else:
            elsewhere = max(elsewhere, total)
    inside = [ranges[i] for i in sorted(places)]
    return _Timeline(order, peak, in_loops, elsewhere, at, outside, inside, totals)


def _changes(ranges: Iterable[_Range], length: int) -> list[int]:
    """By how many bytes what is alive grows at every position of an order, and behind it."""
    change = [0] * (length + 2)
    for found in ranges:
        change[found.start] += found.nbytes
        change[found.end + 1] -= found.nbytes
    return change


def _covers(found: _Range, at: int) -> bool:
    return found.start <= at <= found.end


def _laid_out(program: _Program, order: list[_Kernel], moved: Mapping[int, int]) -> _Layout:
    instances = program.instances
    position = {node: i for i, k in enumerate(order) for node in (k.node, *k.merged)}
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    copied: dict[int, tuple[int, int]] = {}
    for i, kernel in enumerate(order):
        for out in kernel.writes:
            start[out] = min(i, position[moved[out]]) if out in moved else i
            end.setdefault(out, i)
        for root in kernel.reads:
            end[root] = i
        for index in kernel.copies:
            tie = _tie_of(program, index)  # XLA copies what a barrier lets through at once
            first = i if tie is None else position[tie]
            copied[index] = copied.get(index, (first, i))[0], i
    written = {instances[index].root for index in program.results}
    last = len(order) - 1
    results = [_Range(i, instances[i].nbytes, start[i], last) for i in written if i in start]
    ranges = [
        _Range(i, instances[i].nbytes, at, end[i])
        for i, at in start.items()
        if i not in program.sources
    ]
    ranges += [
        _Range(i, instances[i].nbytes, at, max(till, end[i]) if i in program.slices else till)
        for i, (at, till) in copied.items()
    ]
    ranges += [_Range(*k.workspace, i, i) for i, k in enumerate(order) if k.workspace is not None]
    kept = written - program.copied
    return _Layout(order, [r for r in ranges if r.nbytes and r.index not in kept], results)


def _is_turned(program: _Program, node: _Node) -> bool:
    """Whether a convolution's kernel is copied to another layout that its data gradient reads too.

    Of a kernel of one tap without strides it reads a copy of its own.
    """
    values, instances = program.graph.values, program.instances
    source, kernel, result = (values[instances[i].value] for i in (*node.ins[:2], *node.outs))
    strided = sorted(source.shape)[:-1] != sorted(result.shape)[:-1]
    return strided or kernel.shape.count(1) < len(kernel.shape) - 2


def _in_results(ranges: list[_Range], results: list[_Range]) -> set[int]:
    """Indices of the temporaries that fit into results not written yet: largest first, smallest that fits."""
    least = max((found.nbytes for found in ranges), default=0) * _TINY
    starts: dict[int, list[int]] = {}
    for place in sorted(results, key=lambda r: r.start):
        starts.setdefault(place.nbytes, []).append(place.start)
    sizes = sorted(starts)
    # Of every place the borders of what lies in it: from when to when, in turn.
    taken = {size: [[] for _ in starts[size]] for size in sizes}
    inside: set[int] = set()
    for index in sorted(range(len(ranges)), key=lambda i: _by_size(ranges[i])):
        found = ranges[index]
        if found.nbytes < least:
            break
        if _place(found, starts, sizes, taken):
            inside.add(index)
    return inside


def _by_size(found: _Range) -> tuple[int, int]:
    """Large temporaries first, of equal ones the one that lives longest."""
    return (-found.nbytes, found.start - found.end)


def _place(
    found: _Range,
    starts: Mapping[int, list[int]],
    sizes: list[int],
    taken: Mapping[int, list[list[int]]],
) -> bool:
    """Whether a temporary fits into a result; if so, it is noted there."""
    first, last = found.start, found.end
    for size in itertools.islice(sizes, bisect.bisect_left(sizes, found.nbytes), None):
        places = taken[size]
        for number in range(bisect.bisect_right(starts[size], last), len(places)):
            borders = places[number]
            at = bisect.bisect_left(borders, first)
            if not at % 2 and (at == len(borders) or borders[at] > last):
                borders[at:at] = (first, last)
                return True
    return False


def _overwritten(
    program: _Program, order: list[_Kernel], ranges: list[_Range]
) -> list[tuple[int, int]]:
    """Where a kernel writes into an operand that dies there: position and bytes counted twice.

    XLA lets a kernel do so only if what it reads is itself what made the operand: not through a barrier, nor if it
    made several arrays, as do a loop and a call of a library (a convolution: its result and its scratch space).
    Of the results of merged kernels XLA was seen to write one in place if they are in a type narrower than the one
    they are computed in (bfloat16), all if in float32.
    """
    nodes, instances = program.nodes, program.instances
    tied = {instances[i].root for node in nodes if node.kind == "barrier" for i in node.ins}
    # XLA has one buffer for what is scattered into and the scatter's result, and only buffers of one array share.
    kept = {instances[i].root for node in nodes if node.name in _IN_PLACE for i in node.ins}

    def serves(found: _Range) -> bool:
        producer = instances[found.index].producer
        if found.index in tied or producer < 0:
            return producer < 0 and found.index not in tied
        node = nodes[producer]
        return len(node.outs) == 1 and node.name not in _TUPLES

    places = {found.index: found for found in ranges if serves(found)}
    dying: dict[tuple[int, int], int] = {}
    for found in places.values():
        dying[found.end, found.nbytes] = dying.get((found.end, found.nbytes), 0) + 1
    twice: list[tuple[int, int]] = []
    for found in ranges:
        producer = instances[found.index].producer
        node = nodes[producer] if producer >= 0 else None
        if node is None or node.name == "transpose" or found.index in program.copied:
            continue  # a loop stacks into an array of its own
        if node.name not in _IN_PLACE and (not node.fusible or node.reduces or found.index in kept):
            continue
        key = (found.start, found.nbytes)
        own = found.end == found.start and found.index in places
        narrow = found.nbytes < _COMPUTED_BYTES * instances[found.index].elements
        several = narrow and order[found.start].merged
        if dying.get(key, 0) > own and not (several and key in twice):
            dying[key] -= 1
            twice.append(key)
    return twice


def _describe(program: _Program, index: int, nbytes: int) -> Buffer:
    instance = program.instances[index]
    value = program.graph.values[instance.value]
    node = program.nodes[instance.producer] if instance.producer >= 0 else None
    op = program.graph.ops[value.producer] if value.producer is not None else None
    label = f"bits of {value.label}" if instance.packed else value.label
    if node is not None and node.kind == "indices":
        label = f"i32[{','.join(map(str, value.shape))}]"
    if index in program.slices:
        label = f"slice {label}"
    return Buffer(
        value=instance.value,
        nbytes=nbytes,
        label=label,
        op=op.name if op else "",
        scope=op.scope if op else "",
        phase=op.phase if op else "",
        again=node.again if node else False,
    )


def _of_body(node: _Node, found: Buffer) -> Buffer:
    if node.op is None or node.op.loop is None:
        return found
    name = f"{node.op.loop}/{found.op}"
    return Buffer(-1, found.nbytes, found.label, name, found.scope, found.phase)
