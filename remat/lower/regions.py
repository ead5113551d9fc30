"""Policy lowering: a plan as `jax.checkpoint` regions with a names policy.

`annotate_program` runs the undifferentiated program with a `checkpoint_name` on every value the plan keeps, cut
into `jax.checkpoint` regions where nothing but kept values is alive: XLA can then only recompute a region when
its cotangent is there. Loops and operators that must not run twice stay between the regions, and so do calls with
a side effect in them; a loop's body is one region of its own. The result is ordinary JAX: it composes with `jvp`
and every other transform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from remat import compat
from remat.core.avals import aval_bytes
from remat.core.classify import OpCost
from remat.core.errors import PlanError
from remat.core.graph import Op
from remat.core.primitives import OpClass
from remat.lower.split import body_inputs_reached, values_reached
from remat.plans.plan import Plan
from remat.plans.record import primal_name
from remat.trace.classify import classify_equation
from remat.trace.instances import instances_of, with_single_instances
from remat.trace.program import Atom, Equation, Program, evaluate, program_of
from remat.trace.symbolic import STAND_IN

__all__ = ["annotate_program", "differentiable_flags"]

# A region may end where other values than the kept ones are alive, if they are this small.
_SMALL_SHARE = 64


@dataclass(frozen=True)
class _Region:
    """Equations `start:stop`; `whole` ones go into a `jax.checkpoint`, the others run as they are."""

    start: int
    stop: int
    whole: bool


def differentiable_flags(program: Program) -> tuple[bool, ...]:
    """Which inputs could be differentiated: the inexact ones. jax decides later which really are."""
    dtypes = (getattr(program.avals[v], "dtype", None) for v in program.inputs)
    return tuple(d is not None and bool(jnp.issubdtype(d, jnp.inexact)) for d in dtypes)


def annotate_program(
    program: Program,
    plan: Plan,
    inputs: Sequence[Any],
    *,
    perturbed: Sequence[bool] | None = None,
    prevent_cse: bool = True,
) -> list[Any]:
    """Runs `program` as the plan says; see the module docstring.

    Args:
        program: the undifferentiated program the plan was made for.
        plan: a plan made with `lowering="policy"`.
        inputs: one array per program input.
        perturbed: which inputs are differentiated; by default all that could be.
        prevent_cse: of the `jax.checkpoint` regions; False inside loop bodies.

    Raises:
        PlanError: the plan belongs to another program, or keeps values the program does not have.
    """
    if plan.is_plain:
        return evaluate(program, inputs)
    names = _names(program, plan)
    program = with_single_instances(program, instances_of(plan.graph))
    policy = jax.checkpoint_policies.save_only_these_names(*sorted(names.values()))
    env: dict[int, Any] = {**program.constants, **dict(zip(program.inputs, inputs, strict=True))}
    loops = _loop_paths(program)
    reached = values_reached(
        program, differentiable_flags(program) if perturbed is None else perturbed
    )
    rules_act = any(map(_op_acts, plan.graph.ops))
    for region in _regions(program, set(names), reached if rules_act else None):
        part = _part(program, region, names)
        operands = [env[v] for v in part.inputs]
        if region.whole:
            run = jax.checkpoint(
                lambda *xs, part=part: evaluate(part, xs, tags=True),
                policy=policy,
                prevent_cse=prevent_cse,
            )
            results = run(*operands)
        else:
            path = loops.get(region.start)
            body = next((x.plan for x in plan.loops if x.path == path), None)
            results = _run_outside(part, operands, body, reached)
        env.update(zip((v for v in part.outputs if isinstance(v, int)), results, strict=True))
    return [env[a] if isinstance(a, int) else a.value for a in program.outputs]


def _names(program: Program, plan: Plan) -> dict[int, str]:
    """Names of the kept values by their id in the undifferentiated program."""
    plan.policy_names()  # raises if a kept value has no counterpart
    names: dict[int, str] = {}
    for entry in plan.saved:
        value = plan.graph.values[entry.value]
        if value.producer is None or not plan.graph.ops[value.producer].recomputable:
            continue
        primal = value.primal
        aval = program.avals[primal] if primal is not None and primal < len(program.avals) else None
        shape = None if aval is None else tuple(compat.with_sizes(aval, STAND_IN).shape)
        if primal is None or shape != value.shape:
            raise PlanError(
                f"this plan was made for another function: it keeps {value.label} as value {primal}, "
                f"which here is {aval}. Plan again with remat.plan(..., lowering='policy')."
            )
        names[primal] = primal_name(primal)
    return names


def _loop_paths(program: Program) -> dict[int, str]:
    scans = [i for i, e in enumerate(program.equations) if compat.scan_parts(e.source) is not None]
    return {index: f"scan{n}" for n, index in enumerate(scans)}


def _outside(equation: Equation, reached: Set[Atom] | None) -> bool:
    """Whether an equation must not be inside a region: loops and what may not run twice.

    jax makes no region of what has a side effect, in what it calls or in a derivative rule. `reached` is None
    unless some rule might; only then are they looked at, for they have to be traced, as jax does: with tangents
    of what derivatives reach, and of nothing else, which a rule may refuse.
    """
    eqn = equation.source
    if compat.scan_parts(eqn) is not None:
        return True
    cost = _cost(eqn)
    if cost.op_class is OpClass.CALL:
        if _acts(eqn) or reached is None:
            return _acts(eqn)
        flags = [a in reached for a in equation.inputs]
        return any(flags) and any(map(_acts, _differentiated(eqn, flags)))
    return not cost.recomputable


def _cost(eqn: Any) -> OpCost:
    return classify_equation(compat.equation_with_sizes(eqn, STAND_IN))


def _op_acts(op: Op) -> bool:
    return op.effectful or op.kind == OpClass.EFFECT.name


def _acts(eqn: Any) -> bool:
    """Whether an equation has a side effect or calls the host, at any depth."""
    cost = _cost(eqn)
    if cost.effectful or cost.op_class is OpClass.EFFECT:
        return True
    bodies = (compat.open_jaxpr(body)[0] for body in compat.sub_jaxprs(eqn))
    return any(_acts(inner) for body in bodies for inner in body.eqns)


def _differentiated(eqn: Any, perturbed: Sequence[bool]) -> Sequence[Any]:
    """The equations that a call becomes when it is differentiated: its rules are functions until then."""
    avals, _ = compat.avals_of(eqn)
    chosen = [i for i, flag in enumerate(perturbed) if flag]

    def derivative(operands: Sequence[Any]) -> Any:
        def called(*values: Any) -> Any:
            full = list(operands)
            for index, value in zip(chosen, values, strict=True):
                full[index] = value
            return list(compat.evaluate_equation(eqn, full))

        primals = [operands[i] for i in chosen]
        return jax.jvp(called, primals, primals)  # any tangents of the same type

    closed = jax.make_jaxpr(derivative)([compat.shape_of(aval) for aval in avals])
    return compat.open_jaxpr(closed)[0].eqns


def _regions(program: Program, kept: set[int], reached: Set[Atom] | None) -> list[_Region]:
    equations = program.equations
    free = {*kept, *program.inputs, *program.constants}
    last: dict[int, int] = {}
    for index, equation in enumerate(equations):
        last.update((v, index) for v in equation.reads)
    last.update((v, len(equations)) for v in program.outputs if isinstance(v, int))
    sizes = [_nbytes(aval) for aval in program.avals]
    threshold = max((sizes[v] for v in kept), default=0) // _SMALL_SHARE
    regions: list[_Region] = []
    start = 0
    alive: set[int] = set()
    for index, equation in enumerate(equations):
        if _outside(equation, reached):
            regions += [_Region(start, index, True), _Region(index, index + 1, False)]
            start = index + 1
        alive.update(v for v in equation.outputs if last.get(v, -1) > index and v not in free)
        alive = {v for v in alive if last[v] > index}
        done = kept.intersection(equation.outputs)
        if done and sum(sizes[v] for v in alive) <= threshold:
            regions.append(_Region(start, index + 1, True))
            start = index + 1
    regions.append(_Region(start, len(equations), True))
    return [region for region in regions if region.stop > region.start]


def _nbytes(aval: Any) -> int:
    return aval_bytes(compat.with_sizes(aval, STAND_IN))


def _part(program: Program, region: _Region, names: Mapping[int, str]) -> Program:
    """The equations of a region as a program: reads what came before, returns what is read after."""
    equations = program.equations[region.start : region.stop]
    made = {v for e in equations for v in e.outputs}
    reads = dict.fromkeys(
        v for e in equations for v in e.reads if v not in made and v not in program.constants
    )
    later = {v for e in program.equations[region.stop :] for v in e.reads}
    later.update(v for v in program.outputs if isinstance(v, int))
    return replace(
        program,
        inputs=tuple(reads),
        equations=equations,
        outputs=tuple(sorted(made & later)),
        tags={v: (*program.tags.get(v, ()), names[v]) for v in made if v in names},
    )


def _run_outside(
    part: Program, operands: Sequence[Any], body_plan: Plan | None, reached: Set[Atom]
) -> Sequence[Any]:
    parts = compat.scan_parts(part.equations[0].source)
    if parts is None or body_plan is None:
        return evaluate(part, operands)
    perturbed = body_inputs_reached(parts, (a in reached for a in part.equations[0].inputs))

    def loop(path: str, _: Any, parts: compat.ScanParts, xs: Sequence[Any]) -> Sequence[Any]:
        del path
        return compat.run_scan(parts, _body(parts, body_plan, perturbed), xs)

    return evaluate(part, operands, loop=loop)


def _body(
    parts: compat.ScanParts, plan: Plan, perturbed: Sequence[bool]
) -> Callable[..., list[Any]]:
    program = program_of(parts.body)

    def body(*inputs: Any) -> list[Any]:
        return annotate_program(program, plan, inputs, perturbed=perturbed, prevent_cse=False)

    return body
