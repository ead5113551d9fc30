"""Measured seconds of operators: each distinct one is compiled and run alone on an attached device.

What `remat.core.cost.op_seconds` estimates from data sheets is measured here. Operators that XLA fuses with their
neighbours cost nothing like their own time when run alone, so they keep their estimate; the others (matrix
products, convolutions, scatters, loops of a fixed length, ...) are timed once per primitive, parameters,
operand types, device and jax version, and remembered in a file.

A measurement is the median of several batches of back-to-back runs on made-up operands: floats between -1 and
1, indices inside their array. It includes what one launch costs at the least, since batches are dispatched without
waiting; it does not include transfers. What cannot run alone is estimated, and `Costs.reasons` says why: side
effects, collectives, and loops or branches whose work depends on data.

The cache knows device and jax version, not XLA's flags or the driver: delete its file after changing those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from remat import compat, wrapping
from remat.compiler.remembered import default_cache_dir
from remat.core.cost import op_seconds
from remat.core.devices import DEVICES, Device, device_of_kind, get_device
from remat.core.errors import CompileError, PolicyError, warn
from remat.core.graph import Op
from remat.core.interrupt import Progress
from remat.core.primitives import OpClass
from remat.planning.planners import PlanPlanner, PolicyPlanner
from remat.resolve import resolve
from remat.tools.alone import JaxDevice, describe, is_kernel, key_of, one_line, seconds_alone
from remat.tools.costs_file import CostsFile, kind_of
from remat.trace.classify import classify_equation
from remat.trace.joint import Joint, check_differentiable
from remat.trace.program import Program

__all__ = ["Costs", "measure", "measure_joint"]

# Kinds that mean nothing outside their program, and why.
_NOT_ALONE: Mapping[OpClass, str] = MappingProxyType(
    {
        OpClass.EFFECT: "has side effects or calls the host",
        OpClass.COLLECTIVE: "communicates between devices",
        OpClass.METADATA: "is an identity that only constrains the compiler",
    }
)
_DATA_DEPENDENT: Mapping[str, str] = MappingProxyType(
    {
        "while": "a while loop runs as often as its data say",
        "cond": "which branch runs depends on data",
        "shard_map": "runs on several devices",
        "xla_pmap": "runs on several devices",
    }
)


@dataclass(frozen=True)
class Costs:
    """Seconds of every operator of a joint graph.

    Attributes:
        seconds: by operator id (`Graph.ops`); one run each.
        measured: the operators whose seconds were measured, now or in an earlier run.
        reasons: why the other heavy or unfusible operators were not, by operator id.
        executed: how many distinct operators were compiled and run this time; 0 if the cache had all of them.
        device: kind of the device that was measured on, as jax names it.
        estimated_as: name of the device (`remat.core.devices`) whose data sheet the estimates are from.
        fingerprint: of the graph, `Graph.fingerprint()`: operator ids mean nothing for another one.
    """

    seconds: Mapping[int, float]
    measured: frozenset[int]
    reasons: Mapping[int, str]
    executed: int
    device: str
    estimated_as: str
    fingerprint: str

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.device, self.estimated_as, self.measured))

    @property
    def measured_seconds(self) -> dict[int, float]:
        """The measured operators only, by operator id."""
        return {op: self.seconds[op] for op in sorted(self.measured)}

    @property
    def total_seconds(self) -> float:
        """Every operator once, measured or estimated."""
        return math.fsum(self.seconds.values())

    def __str__(self) -> str:
        """Returns one line: how many were measured, where, and what they take together."""
        measured = math.fsum(self.measured_seconds.values())
        text = (
            f"{len(self.measured)} of {len(self.seconds)} operators measured on {self.device}: "
            f"{measured:.3e} s of {self.total_seconds:.3e} s; the rest estimated as {self.estimated_as}"
        )
        unable = len(self.reasons)
        return f"{text}, {unable} of them because they cannot run alone" if unable else text


def measure(
    fun: Callable[..., Any],
    *args: Any,
    remat_policy: Any = "min_cut",
    argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    nested_checkpoints: str = "take_over",
    device: JaxDevice | None = None,
    estimate_as: str | None = None,
    cache_dir: Path | str | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Costs:
    """Measures the operators of a function's joint forward/backward graph.

    Args:
        fun: any differentiable JAX function.
        *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`s. Their contents are not used.
        remat_policy: as in `remat.plan`: the graph is `remat.plan(...).graph`. The policy matters only for loops,
            whose operators carry what the plan of their body keeps; a `remat.Plan` gives that plan's graph.
        argnums, static_argnums, static_argnames, nested_checkpoints: as in `remat.plan`.
        device, estimate_as, cache_dir, repeats, progress: as in `measure_joint`.

    Returns:
        The costs of the function's own graph; a loop is one operator in it, all its iterations together.

    Raises:
        PolicyError, TraceError: as `remat.plan`.
        CompileError, ValueError: as `measure_joint`.
    """
    resolved = resolve(remat_policy, None)
    if not isinstance(resolved, (PolicyPlanner, PlanPlanner)):
        raise PolicyError(
            f"remat_policy={remat_policy!r} makes no plan: it is jax's own or off; expected a policy of "
            "remat.policies or a remat.Plan, for instance 'min_cut'"
        )
    wrapping.check_options("staged", nested_checkpoints)
    wrapped = wrapping.Wrapped(
        fun, resolved, static_argnums, static_argnames, True, "staged", nested_checkpoints
    )
    call = wrapped.flatten(args, kwargs)
    traced = wrapped.traced(call)
    chosen = wrapping.differentiated(len(args), argnums, wrapped.static_argnums, call)
    function = traced.function
    flags = tuple(
        flag and jnp.issubdtype(function.primal.avals[value].dtype, jnp.inexact)
        for flag, value in zip(
            (*(False,) * len(traced.lifted), *chosen), function.primal.inputs, strict=True
        )
    )
    check_differentiable(function.whole, flags)
    joint = function.staged([*traced.lifted, *call.leaves], flags).joint
    return measure_joint(
        joint,
        device=device,
        estimate_as=estimate_as,
        cache_dir=cache_dir,
        repeats=repeats,
        progress=progress,
    )


def measure_joint(
    joint: Joint,
    *,
    device: JaxDevice | None = None,
    estimate_as: str | None = None,
    cache_dir: Path | str | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Costs:
    """Measures the heavy and the unfusible operators of a joint program, each distinct one once.

    Every finished measurement is written to the cache at once, so an interrupted run goes on where it stopped.
    May be called while jax is tracing something else.

    Args:
        joint: a traced program with its graph.
        device: where to run; None for jax's first device.
        estimate_as: name of the device (`remat.core.devices.DEVICES`) whose data sheet prices what is not measured;
            None for that of `device`.
        cache_dir: folder of the cache files; None for `default_cache_dir()`. There is one file for each kind of
            device and version of jax.
        repeats: batches of runs; the median counts.
        progress: called with one line before every operator that is compiled and run.

    Returns:
        Seconds of every operator, and which of them were measured.

    Raises:
        CompileError: `estimate_as` is unknown, or None and there is no data sheet for the device.
        ValueError: `repeats` is not positive.

    Warns:
        RuntimeWarning: an operator could not be compiled or run (it is estimated then, and tried again next
            time), or the cache could not be read or written.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: expected at least 1; 5 is the default")
    chip = jax.devices()[0] if device is None else device
    sheet = _data_sheet(chip, estimate_as)
    graph, program = joint.graph, joint.program
    seconds = {op.id: op_seconds(graph, op, sheet) for op in graph.ops}
    groups, reasons = _groups(joint)
    cache = CostsFile(Path(cache_dir) if cache_dir else default_cache_dir(), kind_of(chip))
    missing = [key for key in groups if key not in cache]
    failed: dict[str, str] = {}
    for number, key in enumerate(missing, start=1):
        first = groups[key][0]
        name = describe(program, first)
        if progress is not None:
            progress(f"measuring {number}/{len(missing)}: {name}")
        try:
            found = seconds_alone(program, first, chip, repeats)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            failed[key] = f"could not be run alone: {type(error).__name__}: {one_line(error)}"
            continue
        cache.add(key, found, name)
    for key, members in groups.items():
        if key in failed:
            reasons.update(dict.fromkeys(members, failed[key]))
        else:
            seconds.update(dict.fromkeys(members, cache[key]))
    if failed:
        some = "; ".join(f"{describe(program, groups[k][0])} {why}" for k, why in failed.items())
        warn(
            f"{len(failed)} of {len(groups)} distinct operators are estimated: {some}",
            RuntimeWarning,
        )
    return Costs(
        seconds=MappingProxyType(seconds),
        measured=frozenset(op for key in groups if key not in failed for op in groups[key]),
        reasons=MappingProxyType(reasons),
        executed=len(missing) - len(failed),
        device=chip.device_kind,
        estimated_as=sheet.name,
        fingerprint=graph.fingerprint(),
    )


# --- what is measured -----------------------------------------------------------------------------


def _groups(joint: Joint) -> tuple[dict[str, list[int]], dict[int, str]]:
    """Operators to be measured by the key they share, and why others are not."""
    groups: dict[str, list[int]] = {}
    reasons: dict[int, str] = {}
    for op in joint.graph.ops:
        if op.fusible and not op.heavy:
            continue
        why = _cannot_run_alone(joint.program, op)
        if why:
            reasons[op.id] = why
        else:
            groups.setdefault(key_of(joint.program, op.id), []).append(op.id)
    return groups, reasons


def _cannot_run_alone(program: Program, op: Op) -> str:
    """Returns why an operator has no time of its own; empty if it has one."""
    equation = program.equations[op.id]
    if op.effectful:
        return _NOT_ALONE[OpClass.EFFECT]
    for value in (*equation.reads, *equation.outputs):
        aval = program.avals[value]
        if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
            return f"takes or gives {aval}, which is not an array"
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        if not getattr(mesh, "empty", True):
            return "is placed on a mesh of devices"
    return _obstacle(equation.source)


def _obstacle(eqn: Any) -> str:
    """Returns what in an equation or its bodies keeps it from running alone; empty if nothing does."""
    name = compat.name_of(eqn)
    if name in _DATA_DEPENDENT:
        return _DATA_DEPENDENT[name]
    cost = classify_equation(eqn)
    if cost.effectful:
        return _NOT_ALONE[OpClass.EFFECT]
    if cost.op_class in _NOT_ALONE and not cost.fusible:
        return _NOT_ALONE[cost.op_class]
    if is_kernel(eqn):
        return ""  # it reads and writes its own references, which is nobody else's business
    for body in compat.sub_jaxprs(eqn):
        for inner in compat.open_jaxpr(body)[0].eqns:
            why = _obstacle(inner)
            if why:
                return why
    return ""


def _data_sheet(device: JaxDevice, name: str | None) -> Device:
    if name is not None:
        return get_device(name)
    known = get_device("cpu") if device.platform == "cpu" else device_of_kind(device.device_kind)
    if known is None:
        raise CompileError(
            f"there is no data sheet for the device {device.device_kind!r}, from which operators that are "
            f"not measured are priced; pass estimate_as= the most similar of {', '.join(DEVICES)}, "
            "for instance estimate_as='a100'"
        )
    return known
