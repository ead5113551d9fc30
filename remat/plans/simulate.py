"""The referee: replays any schedule on a graph, rejects an invalid one at its first broken step.

It knows nothing of the planner that made the schedule. What it accounts:

* arguments, closed-over arrays, results and gradients are the caller's and cost nothing here, as in XLA's
  *temp*; everything else costs its bytes from the step that computes it to the step that frees it;
* with `fused=True` a value that XLA never writes to memory costs nothing: one made by a fusible operator
  and read only by fusible operators, in the phase that made it. This is a rough estimate of the compiler;
  `remat.memory` predicts what it will allocate, and that is what `Plan.peak_bytes` is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from remat.core.buffers import fused_values
from remat.core.errors import ScheduleError
from remat.core.forms import stored_bytes
from remat.core.graph import Graph
from remat.plans.steps import Schedule, Step

__all__ = ["Replay", "Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """Live bytes after every step.

    Attributes:
        live_bytes: one number per step.
        turn: index of the step that ends the forward pass.
    """

    live_bytes: tuple[int, ...]
    turn: int

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes."""
        return max(self.live_bytes, default=0)

    @property
    def peak_step(self) -> int:
        """Index of the first step at the peak."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
        timeline: live bytes after every step.
        held_at_turn_bytes: live bytes when the forward pass ends.
        flops: operations executed, repetitions included; `recompute_flops`: of the repetitions alone.
        executions: how often each operator ran.
    """

    timeline: Timeline
    held_at_turn_bytes: int
    flops: int
    recompute_flops: int
    executions: Counter[int]

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes."""
        return self.timeline.peak_bytes


_ACTIONS = frozenset({"compute", "free", "encode", "decode", "drop", "turn", "barrier"})


class _Machine:
    """The memory a schedule runs in."""

    def __init__(self, graph: Graph, fused: bool, crossing: frozenset[int] = frozenset()) -> None:
        self.graph = graph
        self.crossing = crossing
        self.there = {*graph.inputs, *graph.constants}
        self.bits: set[int] = set()
        self.free_of_charge = {*graph.inputs, *graph.constants, *graph.outputs, *graph.gradients}
        self.free_of_charge.update(graph.cotangents)
        if fused:
            self.free_of_charge.update(fused_values(graph))
        self.saved_charge: set[int] = set()
        self.live_bytes = 0
        self.turned = False
        self.executions: Counter[int] = Counter()

    def step(self, index: int, step: Step) -> None:
        handler = getattr(self, f"_{step.action}", None)
        if handler is None or step.action not in _ACTIONS:
            raise ScheduleError(f"step {index}: unknown action {step.action!r}")
        try:
            handler(step)
        except ScheduleError as error:
            raise ScheduleError(f"step {index} ({step.action} {step.target}): {error}") from None

    def _add(self, value: int) -> None:
        if value not in self.there:
            self.there.add(value)
            crosses = not self.turned and value in self.crossing
            if crosses:
                self.saved_charge.add(value)
            if crosses or value not in self.free_of_charge:
                self.live_bytes += self.graph.values[value].nbytes

    def _compute(self, step: Step) -> None:
        if not 0 <= step.target < len(self.graph.ops):
            raise ScheduleError(f"there is no operator {step.target}")
        op = self.graph.ops[step.target]
        missing = [value for value in op.inputs if value not in self.there]
        if missing:
            raise ScheduleError(f"operator {op.name} reads values {missing}, which are not there")
        if op.phase == "backward" and not self.turned:
            raise ScheduleError(f"operator {op.name} belongs to the backward pass")
        if op.decision and self.turned:
            raise ScheduleError(f"operator {op.name} may not run in the backward pass: {op.reason}")
        self.executions[op.id] += 1
        if self.executions[op.id] > 1 and (op.effectful or not op.recomputable):
            raise ScheduleError(f"operator {op.name} may not run again: {op.reason}")
        for value in op.outputs:
            self._add(value)

    def _free(self, step: Step) -> None:
        if step.target not in self.there:
            raise ScheduleError("the value is not there")
        self.there.discard(step.target)
        if step.target in self.saved_charge:
            self.saved_charge.discard(step.target)
            self.live_bytes -= self.graph.values[step.target].nbytes
        elif step.target not in self.free_of_charge:
            self.live_bytes -= self.graph.values[step.target].nbytes

    def _encode(self, step: Step) -> None:
        if step.target not in self.there:
            raise ScheduleError("the value is not there")
        if step.target not in self.bits:
            self.bits.add(step.target)
            self.live_bytes += stored_bytes(self.graph.values[step.target])

    def _decode(self, step: Step) -> None:
        if step.target not in self.bits:
            raise ScheduleError("the value was never encoded, or its encoded form was dropped")
        self._add(step.target)

    def _drop(self, step: Step) -> None:
        if step.target not in self.bits:
            raise ScheduleError("there is no encoded form to drop")
        self.bits.discard(step.target)
        self.live_bytes -= stored_bytes(self.graph.values[step.target])

    def _turn(self, step: Step) -> None:
        if self.turned:
            raise ScheduleError("the schedule turns twice")
        self.turned = True
        missing = [value for value in self.graph.outputs if value not in self.there]
        if missing:
            raise ScheduleError(f"results {missing} are not there when the forward pass ends")
        self.there.update(self.graph.cotangents)

    def _barrier(self, step: Step) -> None:
        lost = [v for v in step.values if v not in self.there and v not in self.bits]
        if lost:
            raise ScheduleError(f"the barrier ties values {lost}, which are not there")


def _crossing(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """What is there at the turn: it is a buffer from the start, whatever XLA fuses.

    Not what is read afterwards (`remat.plans.liveness`): a schedule that holds a value for nothing pays for it.
    """
    there: set[int] = set()
    for step in schedule.steps:
        if step.action == "turn":
            break
        if step.action == "compute" and 0 <= step.target < len(graph.ops):
            there.update(graph.ops[step.target].outputs)
        elif step.action == "decode":
            there.add(step.target)
        elif step.action == "free":
            there.discard(step.target)
    return frozenset(there.difference(graph.outputs, graph.gradients))


def simulate(graph: Graph, schedule: Schedule, *, fused: bool = True) -> Replay:
    """Replays a schedule.

    Args:
        graph: the joint graph the schedule belongs to.
        schedule: any schedule, from whatever source.
        fused: leave out values that XLA fuses away (see the module docstring).

    Raises:
        ScheduleError: at the first step that is not possible, or if a result or gradient is missing at
            the end; the message names the step.
    """
    machine = _Machine(graph, fused, _crossing(graph, schedule) if fused else frozenset())
    live: list[int] = []
    turn, at_turn = -1, 0
    for index, step in enumerate(schedule.steps):
        machine.step(index, step)
        live.append(machine.live_bytes)
        if step.action == "turn":
            turn, at_turn = index, machine.live_bytes
    if turn < 0:
        raise ScheduleError("the schedule never turns from the forward to the backward pass")
    missing = [value for value in graph.gradients if value not in machine.there]
    if missing:
        raise ScheduleError(f"gradients {missing} are not there when the schedule ends")
    silent = [op.name for op in graph.ops if op.effectful and not machine.executions[op.id]]
    if silent:
        raise ScheduleError(f"operators with side effects never ran: {silent}")
    ops = graph.ops
    return Replay(
        timeline=Timeline(tuple(live), turn),
        held_at_turn_bytes=at_turn,
        flops=sum(ops[op].flops * times for op, times in machine.executions.items()),
        recompute_flops=sum(ops[op].flops * (n - 1) for op, n in machine.executions.items()),
        executions=machine.executions,
    )
