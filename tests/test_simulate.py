"""The referee: it rejects every sabotaged schedule at its first broken step and counts bytes exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from random_graphs import GraphBuilder, chain, graphs, laws

from remat.core.errors import ScheduleError
from remat.core.graph import Graph
from remat.plans.schedule import build_schedule, no_remat_saved
from remat.plans.simulate import Timeline, simulate
from remat.plans.steps import Schedule, Step

TURN = Step("turn")


def compute(op: int) -> Step:
    return Step("compute", op)


def free(value: int) -> Step:
    return Step("free", value)


def replay(graph: Graph, steps: Sequence[Step], *, fused: bool = False) -> tuple[int, ...]:
    return simulate(graph, Schedule(tuple(steps)), fused=fused).timeline.live_bytes


# `x=0 -> 1 -> 2`, cotangent 3, `4 = 2 * ct`, gradient `5 = 1 * 4`; operators 0, 1, 2, 3; 256 bytes each.
CHAIN = chain(2)
GOOD: tuple[Step, ...] = (compute(0), compute(1), TURN, compute(2), compute(3), free(1), free(4))

MASKED_SHAPE = (64,)


def masked() -> Graph:
    """`x=0 -> mask=1`, `y=2 = select(mask, x)`; cotangent 3; gradient `4 = select(mask, ct)`."""
    builder = GraphBuilder()
    x = builder.input(MASKED_SHAPE)
    mask = builder.op("gt", [x], MASKED_SHAPE, "bool")
    y = builder.op("select", [mask, x], MASKED_SHAPE)
    ct = builder.cotangent(MASKED_SHAPE)
    return builder.build([y], [builder.op("select", [mask, ct], MASKED_SHAPE)])


def effectful() -> Graph:
    """`x=0 -> callback -> 1`, `y=2 = tanh(1)`; cotangent 3; gradient `4 = mul(1, ct)`."""
    builder = GraphBuilder()
    x = builder.input()
    seen = builder.op("callback", [x])
    y = builder.op("tanh", [seen])
    ct = builder.cotangent()
    return builder.build([y], [builder.op("mul", [seen, ct])])


MASKED = masked()
MASKED_GOOD: tuple[Step, ...] = (
    compute(0),
    Step("encode", 1),
    compute(1),
    free(1),
    TURN,
    Step("decode", 1),
    Step("drop", 1),
    compute(2),
    free(1),
)
EFFECTFUL = effectful()
EFFECTFUL_GOOD: tuple[Step, ...] = (compute(0), compute(1), TURN, compute(2), free(1))


def without(steps: Sequence[Step], index: int) -> tuple[Step, ...]:
    return (*steps[:index], *steps[index + 1 :])


def with_step(steps: Sequence[Step], index: int, step: Step) -> tuple[Step, ...]:
    return (*steps[:index], step, *steps[index:])


SABOTAGE: dict[str, tuple[Graph, tuple[Step, ...], str]] = {
    "a forward compute dropped": (CHAIN, without(GOOD, 0), r"step 0 \(compute 1\).*not there"),
    "a backward compute dropped": (CHAIN, without(GOOD, 3), r"step 3 \(compute 3\).*not there"),
    "the last compute dropped": (CHAIN, GOOD[:4], r"gradients \[5\] are not there"),
    "freed too early": (CHAIN, with_step(GOOD, 2, free(1)), r"step 5 \(compute 3\).*\[1\]"),
    "freed twice": (CHAIN, (*GOOD, free(4)), r"step 7 \(free 4\).*not there"),
    "freed before it is made": (CHAIN, with_step(GOOD, 0, free(1)), r"step 0 \(free 1\)"),
    "a value that does not exist freed": (CHAIN, (*GOOD, free(99)), r"step 7 \(free 99\)"),
    "an operator that does not exist": (CHAIN, (compute(99), *GOOD), r"step 0 \(compute 99\)"),
    "operator minus one": (CHAIN, (compute(-1), *GOOD), r"step 0 \(compute -1\)"),
    "backward before the turn": (
        CHAIN,
        (compute(0), compute(1), compute(2), TURN, compute(3)),
        r"step 2 \(compute 2\)",
    ),
    "no turn": (CHAIN, GOOD[:2], "never turns"),
    "no steps": (CHAIN, (), "never turns"),
    "two turns": (CHAIN, with_step(GOOD, 3, TURN), r"step 3 \(turn -1\).*twice"),
    "turn before the result": (
        CHAIN,
        (compute(0), TURN, compute(1), compute(2), compute(3)),
        r"step 1 \(turn -1\).*\[2\]",
    ),
    "barrier on a missing value": (
        CHAIN,
        with_step(GOOD, 3, Step("barrier", values=(1, 4))),
        r"step 3 \(barrier -1\).*\[4\]",
    ),
    "barrier on a freed value": (
        CHAIN,
        (*GOOD, Step("barrier", values=(4, 5))),
        r"step 7 \(barrier -1\).*\[4\]",
    ),
    "decoded, never encoded": (MASKED, without(MASKED_GOOD, 1), r"step 4 \(decode 1\).*encoded"),
    "decoded after the drop": (
        MASKED,
        (*MASKED_GOOD, Step("decode", 1)),
        r"step 9 \(decode 1\).*dropped",
    ),
    "dropped twice": (MASKED, (*MASKED_GOOD, Step("drop", 1)), r"step 9 \(drop 1\)"),
    "encoded after the free": (
        MASKED,
        (*MASKED_GOOD, Step("encode", 1)),
        r"step 9 \(encode 1\).*not there",
    ),
    "decode dropped": (MASKED, without(MASKED_GOOD, 5), r"step 6 \(compute 2\).*\[1\]"),
    "a side effect repeated": (
        EFFECTFUL,
        with_step(EFFECTFUL_GOOD, 3, compute(0)),
        r"step 3 \(compute 0\).*may not run again",
    ),
    "an unknown action": (CHAIN, (*GOOD, Step("fly", 0)), r"step 7.*unknown action"),  # type: ignore[arg-type]
    "an action named as a helper": (CHAIN, (*GOOD, Step("add", 0)), r"step 7.*unknown action"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("graph, steps, message", SABOTAGE.values(), ids=SABOTAGE.keys())
def test_a_sabotaged_schedule_is_rejected_at_its_first_broken_step(
    graph: Graph, steps: tuple[Step, ...], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        replay(graph, steps)


@pytest.mark.parametrize(
    "graph, steps",
    [(CHAIN, GOOD), (MASKED, MASKED_GOOD), (EFFECTFUL, EFFECTFUL_GOOD)],
    ids=["chain", "masked", "effectful"],
)
def test_the_schedules_that_are_sabotaged_are_valid(graph: Graph, steps: tuple[Step, ...]) -> None:
    assert len(replay(graph, steps)) == len(steps)


def test_a_side_effect_may_not_be_left_out() -> None:
    builder = GraphBuilder()
    x = builder.input()
    builder.ops_with("callback", [x], [])
    ct = builder.cotangent()
    graph = builder.build([x], [builder.op("mul", [x, ct])])
    with pytest.raises(ScheduleError, match="side effects never ran"):
        replay(graph, (TURN, compute(1)))


def test_a_side_effect_runs_once_even_if_it_claims_to_be_recomputable() -> None:
    ops = (replace(EFFECTFUL.ops[0], recomputable=True), *EFFECTFUL.ops[1:])
    with pytest.raises(ScheduleError, match="may not run again"):
        replay(replace(EFFECTFUL, ops=ops), with_step(EFFECTFUL_GOOD, 3, compute(0)))


@given(graph=graphs())
@laws()
def test_every_compute_of_a_built_schedule_is_needed(graph: Graph) -> None:
    schedule = build_schedule(graph, required(graph))
    wanted = {*graph.outputs, *graph.gradients}
    for index, step in enumerate(schedule.steps):
        if step.action != "compute":
            continue
        op = graph.ops[step.target]
        read = {
            v for s in schedule.steps if s.action == "compute" for v in graph.ops[s.target].inputs
        }
        if not op.outputs or not (read | wanted).intersection(op.outputs):
            continue
        if wanted.intersection(op.outputs) and op.phase == "forward":
            continue  # may be there from the forward pass
        with pytest.raises(ScheduleError):
            simulate(graph, Schedule(without(schedule.steps, index)))


def required(graph: Graph) -> frozenset[int]:
    from remat.policies.base import required_saves

    return required_saves(graph, frozenset())


@given(graph=graphs())
@laws()
def test_live_bytes_are_never_negative_and_one_per_step(graph: Graph) -> None:
    for saved in (required(graph), frozenset(no_remat_saved(graph))):
        for barriers in (True, False):
            schedule = build_schedule(graph, saved, barriers=barriers)
            for fused in (True, False):
                timeline = simulate(graph, schedule, fused=fused).timeline
                assert len(timeline.live_bytes) == len(schedule.steps)
                assert min(timeline.live_bytes) >= 0
                assert timeline.turn == schedule.turn


@given(graph=graphs())
@laws()
def test_unfused_live_bytes_equal_an_independent_count(graph: Graph) -> None:
    schedule = build_schedule(graph, required(graph))
    assert replay(graph, schedule.steps) == counted(graph, schedule.steps)


def counted(graph: Graph, steps: Sequence[Step]) -> tuple[int, ...]:
    """Bytes after every step: the sum over what is there, written from the module docstring."""
    callers = {*graph.inputs, *graph.constants, *graph.cotangents, *graph.outputs, *graph.gradients}
    raw: set[int] = set()
    bits: set[int] = set()
    out = []
    for step in steps:
        if step.action == "compute":
            raw.update(graph.ops[step.target].outputs)
        elif step.action == "decode":
            raw.add(step.target)
        elif step.action == "encode":
            bits.add(step.target)
        elif step.action == "free":
            raw.remove(step.target)
        elif step.action == "drop":
            bits.remove(step.target)
        total = sum(graph.values[v].nbytes for v in raw - callers)
        for value in bits:
            elements = graph.values[value].nbytes  # one byte each
            total += (elements + 7) // 8
        out.append(total)
    return tuple(out)


def test_live_bytes_of_a_chain_are_exact() -> None:
    #   compute 1, compute 2 (a result), turn, compute 4, gradient 5, free 1, free 4
    assert replay(CHAIN, GOOD) == (256, 256, 256, 512, 512, 256, 0)


def test_live_bytes_of_a_mask_are_exact() -> None:
    #   mask 64 bytes, its bits 8; y is a result; raw freed; turn; decoded; dropped; gradient; freed
    assert replay(MASKED, MASKED_GOOD) == (64, 72, 72, 8, 8, 72, 64, 64, 0)


def test_a_fused_value_costs_nothing_unless_it_crosses_to_the_backward_pass() -> None:
    assert replay(CHAIN, GOOD, fused=True) == (256, 256, 256, 256, 256, 0, 0)


def test_a_value_read_by_a_matmul_is_a_buffer_also_when_fused() -> None:
    builder = GraphBuilder()
    x = builder.input()
    a = builder.op("tanh", [x])
    y = builder.op("dot", [a])
    ct = builder.cotangent()
    graph = builder.build([y], [builder.op("mul", [a, ct])])
    steps = (compute(0), compute(1), TURN, compute(2), free(a))
    assert replay(graph, steps, fused=True) == (256, 256, 256, 256, 0)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
def test_peak_of_a_chain_without_remat_is_all_its_inner_values(length: int) -> None:
    graph = chain(length)
    schedule = build_schedule(graph, no_remat_saved(graph))
    # length - 1 inner values; then at most two gradients, the last of which is the caller's.
    gradients = {1: 0, 2: 1}.get(length, 2)
    assert simulate(graph, schedule, fused=False).peak_bytes == 256 * (length - 1 + gradients)


def test_flops_and_repetitions_are_counted() -> None:
    steps = (compute(0), compute(1), free(1), TURN, compute(2), compute(0), compute(3))
    found = simulate(CHAIN, Schedule(steps))
    ops = CHAIN.ops
    assert found.executions == {0: 2, 1: 1, 2: 1, 3: 1}
    assert found.recompute_flops == ops[0].flops
    assert found.flops == sum(op.flops for op in ops) + ops[0].flops


def test_held_at_turn_is_what_crosses() -> None:
    assert simulate(CHAIN, Schedule(GOOD), fused=False).held_at_turn_bytes == 256
    assert simulate(MASKED, Schedule(MASKED_GOOD), fused=False).held_at_turn_bytes == 8


def test_the_peak_step_is_the_first_at_the_peak() -> None:
    timeline = Timeline((0, 3, 1, 3), 1)
    assert (timeline.peak_bytes, timeline.peak_step) == (3, 1)
    assert (Timeline((), 0).peak_bytes, Timeline((), 0).peak_step) == (0, 0)
