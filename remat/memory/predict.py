"""Predicts XLA's temp memory from a plan: which values become buffers, and how many are alive at once.

`simulate` counts every value of a schedule; a compiler does not. This model plays, on the joint graph, the parts
of XLA:GPU that decide about memory, without compiling. Each has a module, which says what is played:

1. `instances`: what runs and what runs again, as nodes and instances of values (`execution`); `identities`:
   what is not new; `zeros`. `bodies`: the same for one iteration of a loop.
2. `fusion`: which instances are buffers; `rows`: softmaxes and norms.
3. `kernels`: what runs as one, and what is copied for it; `matmuls`: those that are multiplied as one; `merging`:
   kernels that are one.
4. `order`: in which order.
5. `places`: what lies where, and for how long; so how many bytes are alive when. `packing`: and what lies idle
   between.

`tables` has what is known of primitives by name, and every number. A loop holds its operands, its results and what
one iteration needs, which is a prediction of its body; what it stacks and nobody reads is dropped.

What is not modelled: XLA's freedom to interleave independent work (where many small arrays compete it finds better
and worse orders than ours), the scratch space of libraries and of matmuls whose long sum is split,
most copies for layouts. `benchmarks/memory_model.py` holds the model against the compiler.

Complexity: linear in the steps, but for the reachability bits (quadratic in bits) and the search for places (the
number of large temporaries times that of the results).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

from remat.core.garbage import without_collection
from remat.core.graph import Graph
from remat.memory.bodies import body_executions
from remat.memory.execution import (
    Alive,
    Buffer,
    Execution,
    Instance,
    Node,
    Prediction,
    Working,
    convert_before_padding,
)
from remat.memory.fusion import Fusion
from remat.memory.identities import is_constant
from remat.memory.instances import execution_of
from remat.memory.kernels import Kernel, find_kernels
from remat.memory.matmuls import join_matmuls, merged_matmuls, waiting_products
from remat.memory.merging import merge_kernels
from remat.memory.order import made_early, orders
from remat.memory.places import Layout, held_bytes, lay_out, occupy
from remat.memory.rows import leave_out_the_value
from remat.plans.record import LoopRecord
from remat.plans.steps import Schedule

__all__ = [
    "Alive",
    "Buffer",
    "Prediction",
    "buffers",
    "executed",
    "laid_out",
    "peak_bytes",
    "predict",
    "predict_body",
]


def predict(
    graph: Graph, schedule: Schedule | None = None, *, loops: Sequence[LoopRecord] = ()
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
    if loops:
        with without_collection():
            return _predict(executed(graph, schedule, loops))
    if schedule is not None and _is_plain(schedule, loops):
        schedule = None
    key = id(graph), id(schedule)
    if key not in _KNOWN:
        with without_collection():
            _KNOWN[key] = _predict(execution_of(graph, schedule, {}))
        for part in (graph, schedule) if schedule is not None else (graph,):
            weakref.finalize(part, _KNOWN.pop, key, None).atexit = False
    return _KNOWN[key]


# Of graphs and schedules that are alive, by identity: to compare two of them takes as long as to predict.
_KNOWN: dict[tuple[int, int], Prediction] = {}


def predict_body(
    graph: Graph, schedule: Schedule | None = None, *, loops: Sequence[LoopRecord] = ()
) -> tuple[Prediction, Prediction]:
    """Predicts what one iteration of a loop needs besides the loop's operands and results.

    Args:
        graph, schedule, loops: as in `predict`, of the loop's body.

    Returns:
        The predictions of the forward and of the backward loop.
    """
    working = _working(graph, loops, plain=schedule is None)
    ahead, back = body_executions(graph, schedule, working)
    return _predict(ahead), _predict(back)


def peak_bytes(
    graph: Graph, schedule: Schedule | None = None, *, loops: Sequence[LoopRecord] = ()
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
    execution = _as_xla_has_it(execution_of(graph, None, {}))
    fusion = Fusion(execution)
    found = [0] * len(graph.values)
    for index, instance in enumerate(execution.instances):
        if instance.root == index and fusion.is_buffer[index] and _is_named(execution, instance):
            found[instance.value] = instance.nbytes
    return tuple(found)


def _as_xla_has_it(execution: Execution) -> Execution:
    """Changes an execution in ways that concern all of it; the second time it changes nothing."""
    convert_before_padding(execution)
    leave_out_the_value(execution)
    return execution


def laid_out(execution: Execution) -> tuple[list[Kernel], Layout]:
    """Returns what runs as one, and in which order with which buffers."""
    execution = _as_xla_has_it(execution)
    groups = merged_matmuls(execution)
    fusion = Fusion(execution, {number for _, members in groups for number in members})
    kernels = join_matmuls(execution, fusion, find_kernels(execution, fusion), groups)
    kernels = merge_kernels(execution, fusion, kernels)
    early = made_early(execution, fusion)
    layouts = [lay_out(execution, order, early) for order in orders(execution, kernels)]
    return kernels, min(layouts, key=partial(held_bytes, execution))


def executed(graph: Graph, schedule: Schedule | None, loops: Sequence[LoopRecord]) -> Execution:
    """Returns what runs of a graph; see `predict` for the arguments."""
    if schedule is not None and _is_plain(schedule, loops):
        schedule = None  # the plain program, in whatever order: XLA orders it
    return execution_of(graph, schedule, _working(graph, loops, plain=schedule is None))


def _predict(execution: Execution) -> Prediction:
    """The model, part by part: fused, merged, ordered, laid out, counted."""
    kernels, layout = laid_out(execution)
    order = layout.order
    found = occupy(execution, layout)
    node = execution.nodes[order[found.at].node] if found.at >= 0 else None
    listed = [_describe(execution, r.index, r.nbytes) for r in found.alive]
    if node is not None and node.working is not None:
        listed += [_of_body(node, buffer) for buffer in node.working.at_peak]
    return Prediction(
        peak_bytes=found.peak_bytes,
        at_peak=tuple(sorted(listed, key=lambda b: (-b.nbytes, b.value))),
        step=node.step if node is not None else -1,
        held_in_results_bytes=sum(r.nbytes for r in found.in_results),
        loop_peak_bytes=found.loop_peak_bytes,
        outside_peak_bytes=found.outside_peak_bytes,
        traffic_bytes=_traffic_bytes(execution, kernels),
        alive=tuple(map(partial(_alive, execution), order, found.totals)),
        waiting=waiting_products(execution, order, found.at),
    )


def _is_plain(schedule: Schedule, loops: Sequence[LoopRecord]) -> bool:
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


def _working(graph: Graph, loops: Sequence[LoopRecord], plain: bool) -> Working:
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


def _alive(execution: Execution, kernel: Kernel, nbytes: int) -> Alive:
    node = execution.nodes[kernel.node]
    return Alive(node.step, nbytes, node.is_backward, node.working is not None)


def _traffic_bytes(execution: Execution, kernels: Sequence[Kernel]) -> int:
    """What kernels read and write; loops and barriers left out."""
    nodes, instances = execution.nodes, execution.instances
    moving = (k for k in kernels if nodes[k.node].kind != "barrier" and not nodes[k.node].working)
    return sum(instances[root].nbytes for k in moving for root in (*k.reads, *k.writes))


def _describe(execution: Execution, index: int, nbytes: int) -> Buffer:
    instance = execution.instances[index]
    value = execution.graph.values[instance.value]
    node = execution.nodes[instance.producer] if instance.producer >= 0 else None
    op = execution.graph.ops[value.producer] if value.producer is not None else None
    label = f"bits of {value.label}" if instance.packed else value.label
    if node is not None and node.kind == "indices":
        label = f"i32[{','.join(map(str, value.shape))}]"
    if index in execution.slices:
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


def _of_body(node: Node, found: Buffer) -> Buffer:
    if node.op is None or node.op.loop is None:
        return found
    name = f"{node.op.loop}/{found.op}"
    return Buffer(-1, found.nbytes, found.label, name, found.scope, found.phase)


def _is_named(execution: Execution, instance: Instance) -> bool:
    """Whether an instance is one of its value, not zeros in the form of the value."""
    kind = execution.nodes[instance.producer].kind if instance.producer >= 0 else "op"
    if kind in ("indices", "pad"):
        return False
    if kind != "zeros":
        return True
    producer = execution.graph.values[instance.value].producer
    return producer is not None and is_constant(execution.graph.ops[producer])
