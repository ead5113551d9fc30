"""Results that a plan has no part in: what nothing differentiable influences, or reverse mode cannot pass.

They are evaluated as written, beside the planned program, and every transform of jax sees them as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from remat import compat
from remat.compat.deferred import DEFERRED
from remat.trace.program import Atom, Equation, Literal, Program, is_inexact, live_equations

__all__ = [
    "body_inputs_reached",
    "inputs_with_gradient",
    "results_reached",
    "split_planned",
    "values_reached",
]


# Calls of a body that takes their operands and has no derivative rule, beside those that programs dissolve.
_CALLS = frozenset({"jit", "pjit", "shard_map", DEFERRED})


class _Reach(IntEnum):
    """How derivatives of the inputs reach a value; of what several operands say, the largest holds."""

    NONE = 0
    REVERSE = 1
    FORWARD_ONLY = 2


def split_planned(program: Program) -> tuple[Program, Program]:
    """Splits off the results that need no plan, or have no gradient.

    Some cannot be influenced by any differentiable input. A `jax.custom_vjp` would hide from other transforms
    what they depend on: Flax's `nn.scan`, for one, requires that freshly initialised parameters do not depend on
    the loop. Others come through a `while_loop`, which has a forward mode only; they may be returned, or searched
    for an index, beside a loss that has a gradient. Where none of the others has a gradient,
    the whole program is split off.

    Returns:
        The program with the other results only, and the program of the results split off. Both take all
        inputs.
    """
    independent = {v for v in program.inputs if not is_inexact(program.avals[v])}
    independent.update(program.constants)
    for equation in program.equations:
        known = all(v in independent for v in equation.reads)
        if known and not equation.source.effects:
            independent.update(equation.outputs)
    independent.update(program.inputs)
    forward_only = _forward_only(program)
    aside = tuple(
        a
        for a in program.outputs
        if isinstance(a, Literal) or a in independent or a in forward_only
    )
    rest = tuple(a for a in program.outputs if a not in set(aside))
    nothing = replace(program, equations=(), outputs=())
    planned = replace(program, equations=live_equations(program.equations, rest), outputs=rest)
    if not any(inputs_with_gradient(planned)):
        return nothing, program
    if not aside:
        return program, nothing
    return planned, replace(
        program, equations=_without_effects(program.equations, aside), outputs=aside
    )


def inputs_with_gradient(program: Program) -> tuple[bool, ...]:
    """For every input whether a gradient of the results can be anything but zero.

    An input that is not read, or only by what stops gradients, hands none on: it may come through something that
    has no reverse mode.
    """
    live = {a for a in program.outputs if isinstance(a, int) and is_inexact(program.avals[a])}
    for equation in reversed(program.equations):
        stops = compat.name_of(equation.source) == "stop_gradient"
        if not stops and live.intersection(equation.outputs):
            live.update(v for v in equation.reads if is_inexact(program.avals[v]))
    return tuple(v in live for v in program.inputs)


def _without_effects(equations: Sequence[Equation], aside: Sequence[Atom]) -> tuple[Equation, ...]:
    """The equations that results split off need; what has an effect is run with the others, and not twice.

    None of these results needs what has an effect, nor, therefore, what only that needs.
    """
    return live_equations([e for e in equations if not e.source.effects], aside)


def results_reached(program: Program, perturbed: Sequence[bool]) -> tuple[bool, ...]:
    """For every result whether derivatives of the inputs that are perturbed reach it."""
    reached = values_reached(program, perturbed)
    return tuple(a in reached for a in program.outputs)


def values_reached(program: Program, perturbed: Iterable[bool]) -> frozenset[Atom]:
    """The values that derivatives of the inputs that are perturbed reach."""
    reach = _reach(program, perturbed)
    return frozenset(a for a, state in reach.items() if state is not _Reach.NONE)


def body_inputs_reached(parts: compat.ScanParts, reached: Iterable[bool]) -> tuple[bool, ...]:
    """For every input of a loop's body whether derivatives reach it in some iteration.

    `reached` says so of the loop's operands.
    """
    given = [_Reach.REVERSE if flag else _Reach.NONE for flag in reached]
    return tuple(state is not _Reach.NONE for state in _in_any_iteration(parts, given))


def _reach(program: Program, perturbed: Iterable[bool]) -> dict[Atom, _Reach]:
    reach: dict[Atom, _Reach] = {
        v: _Reach.REVERSE if flag and is_inexact(program.avals[v]) else _Reach.NONE
        for v, flag in zip(program.inputs, perturbed, strict=True)
    }
    for equation in program.equations:
        states = [reach.get(a, _Reach.NONE) for a in equation.inputs]
        reach.update(zip(equation.outputs, _through(equation.source, states), strict=True))
    return reach


def _forward_only(program: Program) -> set[Atom]:
    """Values whose derivative has no reverse mode, unless they come through an operator with an effect."""
    reach = _reach(program, itertools.repeat(True, len(program.inputs)))
    effectful: set[int] = set()
    for equation in program.equations:
        if equation.source.effects or effectful.intersection(equation.reads):
            effectful.update(equation.outputs)
    return {v for v, state in reach.items() if state is _Reach.FORWARD_ONLY} - effectful


def _through(eqn: Any, states: Sequence[_Reach]) -> list[_Reach]:
    """How derivatives reach the results of an equation, by how they reach its operands."""
    operands, results = compat.avals_of(eqn)
    given = [s if is_inexact(a) else _Reach.NONE for s, a in zip(states, operands, strict=True)]
    most = max(given, default=_Reach.NONE)
    name = compat.name_of(eqn)
    found = [most] * len(results)
    if most is _Reach.NONE or name == "stop_gradient":
        found = [_Reach.NONE] * len(results)
    elif name == "while":
        found = [_Reach.FORWARD_ONLY] * len(results)
    elif name == "cond":
        branches = [_through_body(body, given[1:]) for body in compat.sub_jaxprs(eqn)]
        found = [max(each) for each in zip(*branches, strict=True)]
    elif (parts := compat.scan_parts(eqn)) is not None:
        found = _through_loop(parts, given)
    elif name in _CALLS or compat.call_body(eqn, inline_checkpoints=True, inline_custom=False):
        found = _through_body(compat.sub_jaxprs(eqn)[0], given)
    return [s if is_inexact(a) else _Reach.NONE for s, a in zip(found, results, strict=True)]


def _through_loop(parts: compat.ScanParts, given: Sequence[_Reach]) -> list[_Reach]:
    return _through_body(parts.body, _in_any_iteration(parts, given))


def _in_any_iteration(parts: compat.ScanParts, given: Sequence[_Reach]) -> list[_Reach]:
    """How derivatives reach the inputs of a loop's body: its carry also through the iteration before."""
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    carry = list(given[first:last])
    while True:
        inputs = [*given[:first], *carry, *given[last:]]
        after = list(map(max, carry, _through_body(parts.body, inputs)))
        if after == carry:
            return inputs
        carry = after


def _through_body(body: Any, given: Iterable[_Reach]) -> list[_Reach]:
    jaxpr, _ = compat.open_jaxpr(body)
    reach: dict[Any, _Reach] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> _Reach:
        return _Reach.NONE if compat.is_literal(atom) else reach.get(atom, _Reach.NONE)

    for eqn in jaxpr.eqns:
        reach.update(zip(eqn.outvars, _through(eqn, [of(a) for a in eqn.invars]), strict=True))
    return [of(atom) for atom in jaxpr.outvars]
