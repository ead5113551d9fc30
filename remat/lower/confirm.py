"""Asks the compiler for the memory of a planned function: of the program of its results and gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from remat import compat
from remat.compiler.compile import trace_step
from remat.compiler.remembered import compiled_numbers
from remat.compiler.targets import devices_of
from remat.compiler.toolchain import find_plugin
from remat.compiler.tpu import is_tpu_compiler_there
from remat.core.devices import get_device
from remat.core.errors import CompileError, warn
from remat.core.interrupt import say
from remat.lower.mapped import mapped_part
from remat.lower.pipeline import MakesBody, Room, plan_room
from remat.lower.regions import annotate_program
from remat.lower.staged import Staged
from remat.planning.confirm import confirmed
from remat.planning.planners import PolicyPlanner
from remat.planning.protocol import Planner
from remat.plans.record import Confirmed
from remat.trace.program import Program, evaluate

__all__ = ["plan_and_confirm"]

_MUCH = 0.01  # of a budget: what is not counted, and said
_BESIDE = "compiled as a loss, the first result; the others are not differentiated (jax.grad with has_aux=True)"


def plan_and_confirm(
    room: Room,
    inputs: Sequence[Any],
    perturbed: tuple[bool, ...],
    planner: Planner,
    body: MakesBody,
    aside: Program,
) -> Staged:
    """Returns a room with its plan; one that the compiler confirms, if the planner says so.

    With a budget that is a plan whose compiled program is within it; without, the policy's, with what the compiler
    says it takes. `aside` is what runs beside what is planned, for the same inputs (`remat.lower.split`); the other
    arguments are those of `remat.lower.pipeline.plan_room`.

    Raises:
        BudgetError: the budget is not met, as predicted or, where the compiler is asked, as compiled.
        CompileError: the device that was named cannot be compiled for.
    """

    def make(other: Planner) -> Staged:
        return Staged(*plan_room(room, inputs, perturbed, other, body))

    asked = planner if isinstance(planner, PolicyPlanner) else None
    if asked is None or room.is_body:
        return make(planner)
    if asked.confirm is None:
        return _unconfirmed(make(planner), asked, "", aside)
    device, reason = _device(asked)
    if reason:
        return _unconfirmed(make(planner), asked, reason, aside)

    def compiled(made: Staged, before: Confirmed | None) -> Confirmed:
        return _compiled(made, room, aside, device, before)

    def as_it_is(made: Staged) -> int:
        gradient = _compiled(made, room, aside, device, None, as_it_is=True)
        return _compiled(made, room, aside, device, gradient, as_it_is=True).temp_bytes

    try:
        if asked.budget is None:
            staged = make(planner)
            say(f"{asked.policy.name}: compiling")
            plan = replace(staged.plan, confirmed=compiled(staged, compiled(staged, None)))
        else:
            staged, plan = confirmed(asked, asked.confirm.compiles, make, compiled, as_it_is)
    except CompileError as error:
        if asked.confirm.device != "auto":
            raise
        warn(f"{_as_predicted(asked)}, and not confirmed by the compiler: {error}")
        return _unconfirmed(make(planner), asked, "the compiler failed", aside)
    if _is_loss(room, staged) and len(staged.joint.cotangent_outputs) > 1:
        plan = replace(plan, notes=(*plan.notes, _BESIDE))
    return Staged(staged.joint, plan)


def _is_loss(room: Room, staged: Staged) -> bool:
    """Whether the first result with a gradient is a scalar: a loss, and what is beside it is not differentiated."""
    joint = staged.joint
    return room.barriers and joint.program.avals[joint.program.inputs[joint.num_inputs]].shape == ()


def _device(planner: PolicyPlanner) -> tuple[str | None, str]:
    """The device to compile for, None for the attached one; or why there is none."""
    assert planner.confirm is not None
    wanted = planner.confirm.device
    if wanted == "attached" or (wanted == "auto" and jax.default_backend() in ("gpu", "tpu")):
        return None, ""
    if wanted != "auto":
        return wanted, ""
    name = planner.policy.device
    platform = get_device(name).platform
    if platform == "cpu":
        return None, f"no compiler for {name} is known"
    if not (find_plugin() is not None if platform == "cuda" else is_tpu_compiler_there()):
        extra = "remat[deviceless]" if platform == "cuda" else "jax[tpu]"
        return None, f"XLA's compiler for {name} is not installed ({extra})"
    return name, ""


def _as_predicted(planner: PolicyPlanner) -> str:
    return "the peak is predicted" if planner.budget is None else "the budget is met as predicted"


def _unconfirmed(staged: Staged, planner: PolicyPlanner, reason: str, aside: Program) -> Staged:
    notes = [*staged.plan.notes]
    if reason:
        notes.append(f"{_as_predicted(planner)}; the compiler was not asked: {reason}")
    made = [aside.avals[v] for equation in aside.equations for v in equation.outputs]
    largest = max(map(_nbytes, made), default=0)
    if planner.budget is not None and largest > _MUCH * (staged.plan.budget_bytes or 0):
        notes.append(
            "what results take that no derivative reaches is not predicted: the largest value made for them has "
            f"{largest:,} bytes"
        )
    return Staged(staged.joint, replace(staged.plan, notes=tuple(notes))) if notes else staged


def _nbytes(aval: Any) -> int:
    """Bytes of an array; 0 of what has none, or a size that is not known."""
    sizes = getattr(aval, "shape", ())
    if not all(isinstance(size, int) for size in sizes):
        return 0
    return math.prod(sizes) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _compiled(
    staged: Staged,
    room: Room,
    aside: Program,
    device: str | None,
    before: Confirmed | None,
    as_it_is: bool = False,
) -> Confirmed:
    """Compiles the results and gradients of a planned room for inputs and cotangents of its shapes.

    What is evaluated beside them is part of every program.

    A loss is compiled as it is used: its cotangent is one, results beside it have none, and as `jax.grad` has it,
    without the loss itself. XLA orders that otherwise than with it, by several per cent of the memory: given what
    was found of it, the loss is compiled as `jax.value_and_grad` has it, and the larger counts.
    `as_it_is` leaves the plan out: jax differentiates the room.

    Raises:
        CompileError: it cannot be compiled alone, or not for this device.
    """
    program = staged.joint.program
    if any(map(compat.is_tracer, program.constants.values())):
        raise CompileError("the function closes over values of a transformation around it")
    count, differentiated = staged.joint.num_inputs, staged.joint.cotangent_outputs
    avals = [program.avals[v] for v in program.inputs]
    around = compat.manual_mesh()
    is_checked = any(map(compat.varying_axes, program.avals))
    is_loss = _is_loss(room, staged)

    def apart(values: Any) -> Any:
        """What crosses into the backward pass: in a loop's body the two halves are in loops of their own."""
        return values if room.barriers else jax.lax.optimization_barrier(values)

    def step(inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        results, kept = staged.forward(inputs)
        beside = evaluate(aside, inputs)
        kept, cotangents = apart((kept, list(cotangents)))
        return results, staged.backward(kept, cotangents), beside

    def by_jax(inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        wanted = [i for i, flag in enumerate(staged.joint.perturbed) if flag]
        given = [(i, x) for i, x in zip(differentiated, cotangents, strict=True) if x is not None]

        def of_wanted(*values: Any) -> tuple[list[Any], list[Any]]:
            full = list(inputs)
            for index, value in zip(wanted, values, strict=True):
                full[index] = value
            if as_it_is:
                results = evaluate(room.program, full)
            else:
                flags = staged.joint.perturbed
                results = annotate_program(room.program, staged.plan, full, perturbed=flags)
            return [results[i] for i, _ in given], results

        _, pull, results = jax.vjp(of_wanted, *(inputs[i] for i in wanted), has_aux=True)
        beside = evaluate(aside, inputs)
        pull, wanted_cotangents = apart((pull, [x for _, x in given]))
        return results, pull(wanted_cotangents), beside

    run = by_jax if as_it_is or room.name_values else step

    def of_all(*values: Any) -> Any:
        return run(values[:count], values[count:])

    def of_loss(*inputs: Any) -> Any:
        one = compat.ones_of(avals[count])
        return run(inputs, [one, *[None] * (len(differentiated) - 1)])

    def gradients(*inputs: Any) -> Any:
        results, *others = of_loss(*inputs)
        return [x for i, x in enumerate(results) if i != differentiated[0]], others

    def numbers(function: Callable[..., Any], avals: Sequence[Any]) -> Confirmed:
        is_placed = around is not None
        # Where arrays say how they are sharded, what is attached has to be asked within their mesh.
        is_absent = device is not None and get_device(device).platform != jax.default_backend()
        leave = compat.outside_of_meshes if is_placed or is_absent else contextlib.nullcontext
        with leave():
            if around is None:
                shapes = list(map(_shape, avals))
            else:
                mesh, axes = around
                devices = devices_of(device, mesh.size)
                function, shapes = mapped_part(function, avals, mesh, axes, devices, is_checked)
            return compiled_numbers(
                trace_step(function, tuple(shapes), {}, device=device, is_placed=is_placed)
            )

    try:
        if not is_loss:
            return before or numbers(of_all, avals)
        if before is None:
            return numbers(gradients, avals[:count])
        say("the loss with its gradient: compiling")
        return max(before, numbers(of_loss, avals[:count]), key=lambda n: n.temp_bytes)
    except (TypeError, ValueError, NotImplementedError, NameError) as error:
        raise CompileError(
            f"the function cannot be compiled alone, outside of the transformation it is called in: {error}. "
            "confirm=False meets the budget as predicted; remat.fit compiles whole steps"
        ) from error


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
