"""Puts a policy to work: graph and policy in, `Plan` out. Plain data, no jax."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import pairwise

from remat.core.cost import op_seconds
from remat.core.devices import get_device
from remat.core.forms import form_of, stored_bytes
from remat.core.graph import Graph, Op
from remat.memory.predict import peak_bytes, predict
from remat.plans.liveness import read_before_made
from remat.plans.plan import LoopPlan, Plan
from remat.plans.record import Recomputed, Saved
from remat.plans.schedule import build_schedule, no_remat_saved
from remat.plans.simulate import Replay, simulate
from remat.plans.stages import LARGE_SHARE, long_sums
from remat.plans.steps import Schedule, Step
from remat.policies.base import Decision, Policy, describe_options

__all__ = ["make_plan", "plan_from_saved", "with_loops"]


def make_plan(graph: Graph, policy: Policy, *, barriers: bool = True) -> Plan:
    """Plans a graph with a policy.

    Args:
        graph: a joint graph.
        policy: any `remat.policies.Policy`.
        barriers: see `remat.plans.schedule.build_schedule`; False inside loop bodies.
    """
    start = time.perf_counter()
    decision = policy.decide(graph)
    return plan_from_saved(
        graph,
        decision,
        policy_name=policy.name,
        options=describe_options(policy),
        barriers=barriers,
        device=policy.device,
        start=start,
    )


def plan_from_saved(
    graph: Graph,
    decision: Decision,
    *,
    policy_name: str,
    options: str = "",
    barriers: bool = True,
    device: str = "h200",
    start: float | None = None,
) -> Plan:
    """Turns a saved set into a plan: schedule, replay, statistics."""
    start = time.perf_counter() if start is None else start
    graph = _with_forms(graph, decision)
    plain = graph if graph.plain is None else graph.plain
    kept = decision.saved | (graph.backward_reads & set(graph.inputs))
    schedule = build_schedule(graph, kept, barriers=barriers, order=decision.order)
    peak = _peak_bytes(graph, schedule, decision)
    if barriers and (
        len(set(schedule.computed())) < len(list(schedule.computed())) or decision.forms
    ):
        # The program as it is has no barriers: XLA orders it.
        schedule, peak = _with_sums_tied(graph, kept, decision, schedule, peak)
        schedule, peak = _with_products_apart(graph, decision, schedule, peak)
    replay = simulate(graph, schedule)
    read_back = _read_back(graph, kept, schedule)
    chip = get_device(device)
    recomputed = _recomputed(graph, replay)
    return Plan(
        policy_name=policy_name,
        options=options,
        status=decision.status,
        graph=graph,
        schedule=schedule,
        saved=_saved(graph, read_back),
        recomputed=recomputed,
        saved_bytes=_kept_bytes(graph, read_back),
        peak_bytes=peak,
        recompute_flops=replay.recompute_flops,
        recompute_seconds=sum(
            entry.times * op_seconds(graph, graph.ops[entry.op], chip) for entry in recomputed
        ),
        baseline_saved_bytes=sum(
            plain.values[v].nbytes
            for v in no_remat_saved(plain)
            if v not in plain.alive_anyway and v not in plain.fixed
        ),
        baseline_peak_bytes=peak_bytes(plain),
        certificate=decision.certificate,
        opaque=_opaque(graph),
        notes=decision.notes,
        device=device,
        solve_seconds=time.perf_counter() - start,
    )


def _with_sums_tied(
    graph: Graph, kept: frozenset[int], decision: Decision, schedule: Schedule, peak: int
) -> tuple[Schedule, int]:
    """Returns the schedule that adds up gradients of shared weights as they come, if its peak is much lower."""
    if not long_sums(graph, graph.backward_ops()):
        return schedule, peak
    tied = build_schedule(graph, kept, order=decision.order, tie_sums=True)
    tied_peak = _peak_bytes(graph, tied, decision)
    return (tied, tied_peak) if tied_peak <= (1 - LARGE_SHARE) * peak else (schedule, peak)


def _with_products_apart(
    graph: Graph, decision: Decision, schedule: Schedule, peak: int
) -> tuple[Schedule, int]:
    """Returns the schedule with a barrier between matmuls that share an operand, if its peak is much lower.

    Multiplied as one they have one buffer, so that a product which is added at once, as of a residual connection,
    waits for another that is read at the end. A program for `jax.checkpoint` has no steps of ours to put it in.
    """
    ties: dict[int, Step] = {}
    for members in predict(graph, schedule).waiting:
        for (before, was_read), (step, is_read) in pairwise(members):
            shared = _operands(graph, schedule, before) & _operands(graph, schedule, step)
            if is_read != was_read and shared:
                ties[step] = Step("barrier", values=tuple(sorted(shared)))
    if not ties or not all(value.savable for value in graph.values):
        return schedule, peak
    steps: list[Step] = []
    for at, step in enumerate(schedule.steps):
        steps += [ties[at], step] if at in ties else [step]
    apart = Schedule(tuple(steps))
    apart_peak = _peak_bytes(graph, apart, decision)
    return (apart, apart_peak) if apart_peak <= (1 - LARGE_SHARE) * peak else (schedule, peak)


def _operands(graph: Graph, schedule: Schedule, step: int) -> set[int]:
    return set(graph.ops[schedule.steps[step].target].inputs)


def _with_forms(graph: Graph, decision: Decision) -> Graph:
    """Returns the graph with the forms that a decision chose."""
    if not decision.forms:
        return graph
    forms = dict(decision.forms)
    for index, form in forms.items():
        stored_bytes(graph.values[index], form)  # raises if the value cannot be kept so
    return replace(
        graph,
        values=tuple(
            replace(value, form=forms[value.id]) if value.id in forms else value
            for value in graph.values
        ),
    )


def _peak_bytes(graph: Graph, schedule: Schedule, decision: Decision) -> int:
    """The predicted peak, or the policy's own count of its buffers where that is higher.

    The count knows nothing of temporaries that XLA places in results not written yet.
    """
    prediction = predict(graph, schedule)
    counted = decision.buffer_peak_bytes or 0
    return max(prediction.peak_bytes, counted - prediction.held_in_results_bytes)


def _read_back(graph: Graph, kept: frozenset[int], schedule: Schedule) -> list[int]:
    """The kept values that the backward pass really reads."""
    needed = read_before_made(graph, schedule.backward)
    return sorted(kept & {*needed.raw, *needed.encoded, *graph.gradients})


def _kept_bytes(graph: Graph, kept: list[int]) -> int:
    counted = (v for v in kept if v not in graph.alive_anyway and v not in graph.fixed)
    return sum(stored_bytes(graph.values[v]) for v in counted)


def _saved(graph: Graph, kept: list[int]) -> tuple[Saved, ...]:
    entries = []
    products = _products(graph, set(kept))
    for index in kept:
        value = graph.values[index]
        op = graph.ops[value.producer] if value.producer is not None else None
        is_input = value.producer is None
        entries.append(
            Saved(
                value=index,
                label=value.label,
                nbytes=value.nbytes if is_input else stored_bytes(value),
                raw_bytes=value.nbytes,
                form="raw" if is_input else form_of(value),
                is_input=is_input,
                op=op.name if op else "",
                tags=value.tags,
                scope=op.scope if op else "",
                source=op.source if op else "",
                why=_why(graph, index, products),
            )
        )
    return tuple(sorted(entries, key=lambda e: (e.is_input, -e.nbytes, e.value)))


def _why(graph: Graph, value: int, products: Mapping[int, Op]) -> str:
    producer = graph.values[value].producer
    if producer is None:
        carried = value in graph.carried
        return "the loop's carry: one iteration's input" if carried else "an argument: alive anyway"
    op = graph.ops[producer]
    if op.loop is not None:
        return f"kept by the plan of {op.loop}, once per iteration"
    if op.decision:
        return op.reason
    if not op.recomputable:
        return f"{op.name} may not run again: {op.reason}" if op.reason else "may not run again"
    if (product := products.get(op.id)) is not None:
        return f"avoids {product.flops:,} flops of {product.name}"
    if op.random:
        return "avoids drawing random bits again"
    if op.kind == "REDUCTION":
        return "a small result of a large reduction"
    if not op.fusible:
        return f"{op.name} does not fuse: it would be written again"
    return "the cheapest place to cut: what lies before it is larger or costs more"


def _products(graph: Graph, kept: Container[int]) -> dict[int, Op]:
    """By operator the compute-bound one whose result is kept in its own: itself, or with a bias added, say.

    Through what fuses, element by element, and not through what is kept besides. Complexity: linear.
    """
    found: dict[int, Op] = {}
    for op in graph.ops:
        if op.heavy:
            found[op.id] = op
        elif op.fusible and op.kind != "REDUCTION":
            for value in op.inputs:
                producer = graph.values[value].producer
                product = None if producer is None else found.get(producer)
                if product is None or value in kept:
                    continue
                shapes = graph.values[value].shape, graph.values[op.outputs[0]].shape
                if math.prod(shapes[0]) == math.prod(shapes[1]):
                    found[op.id] = product
    return found


def _recomputed(graph: Graph, replay: Replay) -> tuple[Recomputed, ...]:
    counts = Counter({op: times - 1 for op, times in replay.executions.items() if times > 1})
    entries = []
    for index, times in counts.items():
        op = graph.ops[index]
        first = graph.values[op.outputs[0]] if op.outputs else None
        entries.append(
            Recomputed(
                op=index,
                name=op.name,
                label=first.label if first else "",
                nbytes=sum(graph.values[v].nbytes for v in op.outputs),
                flops=op.flops,
                times=times,
                scope=op.scope,
                source=op.source,
            )
        )
    return tuple(sorted(entries, key=lambda e: (-e.flops * e.times, -e.nbytes, e.op)))


def _opaque(graph: Graph) -> tuple[str, ...]:
    """What the planner could not look into, each line with what it did about it."""
    lines = Counter(
        f"{op.name} ({op.phase}): {op.reason or 'not looked into'}"
        + (f", from {op.source}" if op.source else "")
        for op in graph.ops
        if not op.recomputable and not op.decision and op.loop is None
    )
    return tuple(line if n == 1 else f"{line} (x{n})" for line, n in lines.items())


def with_loops(plan: Plan, loops: tuple[LoopPlan, ...]) -> Plan:
    """Returns a plan with those of its loops, and their part in the totals.

    What a loop's body keeps is a result of the loop, once per iteration, so `saved_bytes` and the predicted
    peak count it already. The baseline does not: without rematerialization the body would keep more.
    """
    extra = sum(x.length * (x.plan.baseline_saved_bytes - x.plan.saved_bytes) for x in loops)
    return replace(
        plan,
        loops=loops,
        peak_bytes=peak_bytes(plan.graph, plan.schedule, loops=loops),
        recompute_flops=plan.recompute_flops
        + sum(x.length * x.plan.recompute_flops for x in loops),
        recompute_seconds=plan.recompute_seconds
        + sum(x.length * x.plan.recompute_seconds for x in loops),
        baseline_saved_bytes=plan.baseline_saved_bytes + extra,
        baseline_peak_bytes=peak_bytes(plan.graph.plain or plan.graph, loops=loops) + extra,
        solve_seconds=plan.solve_seconds + sum(x.plan.solve_seconds for x in loops),
        opaque=plan.opaque + tuple(f"{x.path}: {line}" for x in loops for line in x.plan.opaque),
    )
