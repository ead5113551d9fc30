"""Finds the operators of a program for which implementations are registered (`remat.rewrite.operators`).

By name, or by comparing equations with those of `Implementation.reference`, from the result backwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from remat import compat
from remat.rewrite.operators import Implementation, implementations, struct_of
from remat.trace.program import Equation, Program, is_inexact, program_of
from remat.trace.program import Literal as Constant

__all__ = ["Number", "Option", "Site", "find_sites"]


@dataclass(frozen=True, eq=False)
class Option:
    """An implementation at a site.

    Attributes:
        implementation: what to put there.
        inputs: atoms of the jaxpr that the site lies in, one per input of the implementation.
        params: the operator's parameters here.
        why_not: why it does not apply, None if it does.
    """

    implementation: Implementation
    inputs: tuple[Any, ...]
    params: Mapping[str, Any]
    why_not: str | None


@dataclass(frozen=True, eq=False)
class Site:
    """An occurrence of an operator in a program.

    Attributes:
        operator: its name.
        occurrence: its number among the occurrences of this operator, in program order. It depends on the
            program and on what the operator's registered implementations can find, not on what is chosen.
        path: index of the equation in the program, preceded by those of the calls around it.
        options: the registered implementations, also those that do not apply.
        avals: abstract values of the results.
        scope: the named scope.
        source: `file:line` in the user's code.
    """

    operator: str
    occurrence: int
    path: tuple[int, ...]
    options: tuple[Option, ...]
    avals: tuple[Any, ...]
    scope: str = ""
    source: str = ""

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """The implementations that apply here."""
        return tuple(o.implementation for o in self.options if o.why_not is None)

    def id(self, implementation: Implementation | str) -> str:
        """Returns the id of an implementation at this site, for instance `softmax/output@0`."""
        name = implementation if isinstance(implementation, str) else implementation.name
        return f"{self.operator}/{name}@{self.occurrence}"

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the implementations that apply here."""
        return tuple(map(self.id, self.implementations))


def find_sites(
    closed: Any, *, platform: str | None = None, inline_checkpoints: bool = True
) -> tuple[Site, ...]:
    """Returns the operators of a program for which implementations are registered.

    Bodies of loops, branches and functions with their own derivative rule are not searched.

    Args:
        closed: what `jax.make_jaxpr` returns.
        platform: where the program will run, None if that is open: then implementations for certain
            platforms do not apply.
        inline_checkpoints: search `jax.checkpoint` regions too (replacing something in one dissolves it).

    Complexity:
        Equations times candidates of the operators with a reference; a candidate is compared from its result
        backwards and given up at the first difference.
    """
    jaxpr, _ = compat.open_jaxpr(closed)
    counts: dict[str, int] = {}
    found: list[Site] = []
    walk = _walk(jaxpr, (), (), frozenset(), platform, inline_checkpoints)
    for path, calls, operator, options in walk:
        eqn = calls[-1]
        occurrence = counts.get(operator, 0)
        counts[operator] = occurrence + 1
        found.append(
            Site(
                operator=operator,
                occurrence=occurrence,
                path=path,
                options=options,
                avals=tuple(var.aval for var in eqn.outvars),
                scope="/".join(filter(None, map(compat.scope_of, calls))),
                source=next(filter(None, map(compat.source_of, calls[::-1])), ""),
            )
        )
    return tuple(found)


_Hit = tuple[tuple[int, ...], tuple[Any, ...], str, tuple[Option, ...]]


def _walk(
    jaxpr: Any,
    prefix: tuple[int, ...],
    calls: tuple[Any, ...],
    inside: frozenset[str],
    platform: str | None,
    inline_checkpoints: bool,
) -> Iterator[_Hit]:
    """Yields the operators of a jaxpr and of what it calls, each with its equation and the calls around it.

    Args:
        jaxpr: what to walk.
        prefix: indices of the calls that led here.
        calls: the equations of these calls.
        inside: operators whose own equations these are.
        platform: as for `find_sites`.
        inline_checkpoints: as for `find_sites`.
    """
    level: Program | None = None
    atoms: Mapping[int, Any] = {}
    operators = tuple(dict.fromkeys(i.operator for i in implementations()))
    for index, eqn in enumerate(jaxpr.eqns):
        path, name = (*prefix, index), compat.called_function_name(eqn)
        body = compat.call_body(eqn, inline_checkpoints=inline_checkpoints, inline_custom=False)
        entered = set(inside)
        for operator in operators:
            if operator in inside:
                continue
            options: list[Option] = []
            for implementation in implementations(operator):
                if operator in (eqn.primitive.name, name):
                    match = _match_call(implementation, eqn)
                elif implementation.candidates is not None and name is None:
                    if level is None:
                        level, atoms = _level_of(jaxpr)
                    match = _match_inlined(implementation, eqn, index, level, atoms)
                else:
                    match = None
                if match is not None:
                    inputs, params = match
                    why = _why_not(implementation, inputs, params, platform)
                    options.append(Option(implementation, inputs, params, why))
            if options:
                entered.add(operator)
                yield path, (*calls, eqn), operator, tuple(options)
        if body is not None:
            inner, _ = compat.open_jaxpr(body)
            around, names = (*calls, eqn), frozenset(entered)
            yield from _walk(inner, path, around, names, platform, inline_checkpoints)


def _why_not(
    implementation: Implementation, inputs: Sequence[Any], params: Mapping[str, Any], platform: Any
) -> str | None:
    allowed = implementation.platforms
    if allowed and platform not in allowed:
        return f"it runs on {', '.join(allowed)}, not on {platform or 'an unnamed platform'}"
    return implementation.supports(*(atom.aval for atom in inputs), **params)


_Match = tuple[tuple[Any, ...], Mapping[str, Any]]


def _match_call(implementation: Implementation, eqn: Any) -> _Match | None:
    if eqn.primitive.name == implementation.operator:
        return tuple(eqn.invars), eqn.params
    if implementation.reference is None:
        return tuple(eqn.invars), {}
    body = compat.call_body(eqn, inline_checkpoints=True, inline_custom=False)
    # A function with its own rule is compared as one equation: its body alone does not tell its gradient.
    target = program_of(body) if body is not None else _program_of_equation(eqn)
    if len(target.outputs) != 1 or not isinstance(target.outputs[0], int):
        return None
    if implementation.candidates is None:
        given: Any = [([struct_of(atom.aval) for atom in eqn.invars], {})]
    else:
        given = implementation.candidates(eqn.outvars[0].aval)
    position = {value: number for number, value in enumerate(target.inputs)}
    for structs, params in given:
        pattern = _reference(implementation.reference, structs, params)
        bound = pattern and _unify(pattern[0], target, target.outputs[0])
        if bound and all(isinstance(a, Constant) or a in position for a in bound):
            inputs = (a if isinstance(a, Constant) else eqn.invars[position[a]] for a in bound)
            return tuple(map(_as_atom, inputs)), params
    return None


def _match_inlined(
    implementation: Implementation, eqn: Any, index: int, level: Program, atoms: Mapping[int, Any]
) -> _Match | None:
    assert implementation.candidates is not None and implementation.reference is not None
    if len(eqn.outvars) != 1 or not is_inexact(eqn.outvars[0].aval):
        return None
    if implementation.ends_with and eqn.primitive.name not in implementation.ends_with:
        return None
    (result,) = level.equations[index].outputs
    for structs, params in implementation.candidates(eqn.outvars[0].aval):
        pattern = _reference(implementation.reference, structs, params)
        if pattern is None or _last(pattern[1]) != eqn.primitive.name:
            continue
        bound = _unify(pattern[1], level, result)
        if bound:
            inputs = (a if isinstance(a, Constant) else atoms[a] for a in bound)
            return tuple(map(_as_atom, inputs)), params
    return None


def _as_atom(atom: Any) -> Any:
    """An atom with an `aval`: a jaxpr's variable, or a constant of a program with its abstract value."""
    return Number(atom.value, jax.typeof(atom.value)) if isinstance(atom, Constant) else atom


@dataclass(frozen=True, eq=False)
class Number:
    """A constant of a program that is an operand of a site; `aval` as of a jaxpr's atoms."""

    value: Any
    aval: Any


def _reference(
    function: Callable[..., Any], structs: Sequence[Any], params: Mapping[str, Any]
) -> tuple[Program, Program] | None:
    key = tuple((tuple(s.shape), s.dtype, bool(getattr(s, "weak_type", False))) for s in structs)
    return _trace_reference(function, key, tuple(sorted(params.items())), compat.trace_context())


@functools.lru_cache(maxsize=512)
def _trace_reference(
    function: Callable[..., Any], key: Any, params: Any, _: Any
) -> tuple[Program, Program] | None:
    """The reference with its calls inlined and with its calls kept; None if it rejects these inputs."""
    structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in key]
    try:
        closed = jax.make_jaxpr(lambda *inputs: function(*inputs, **dict(params)))(*structs)
    except (TypeError, ValueError):
        return None
    return program_of(closed), _level_of(compat.open_jaxpr(closed)[0])[0]


def _last(program: Program) -> str | None:
    """The primitive that computes a program's result."""
    (result,) = program.outputs
    producer = _producers(program).get(result) if isinstance(result, int) else None
    return producer.source.primitive.name if producer is not None else None


def _program_of_equation(eqn: Any) -> Program:
    """A program of one equation and of its operands, none of which is a literal."""
    sizes = len(eqn.invars), len(eqn.outvars)
    inputs, outputs = tuple(range(sizes[0])), tuple(range(sizes[0], sum(sizes)))
    avals = tuple(atom.aval for atom in (*eqn.invars, *eqn.outvars))
    return Program(avals, inputs, {}, (Equation(eqn, inputs, outputs),), outputs)


def _level_of(jaxpr: Any) -> tuple[Program, Mapping[int, Any]]:
    """A jaxpr as a program whose equations are its own, calls not inlined; and its variable per value."""
    numbers: dict[Any, int] = {}
    atoms: dict[int, Any] = {}

    def new(var: Any) -> int:
        numbers[var] = len(atoms)
        atoms[numbers[var]] = var
        return numbers[var]

    def read(atom: Any) -> Any:
        if compat.is_literal(atom):
            return Constant(compat.traced_value_of(atom))
        return numbers[atom]

    for var in jaxpr.constvars:
        new(var)
    inputs = tuple(map(new, jaxpr.invars))
    equations = tuple(
        Equation(eqn, tuple(map(read, eqn.invars)), tuple(map(new, eqn.outvars)))
        for eqn in jaxpr.eqns
    )
    avals = tuple(atoms[number].aval for number in range(len(atoms)))
    outputs = tuple(map(read, jaxpr.outvars))
    return Program(avals, inputs, {}, equations, outputs), atoms


def _producers(program: Program) -> Mapping[int, Equation]:
    return {value: equation for equation in program.equations for value in equation.outputs}


def _unify(pattern: Program, target: Program, result: int) -> list[Any] | None:
    """Compares a whole program with the part of another that computes `result`.

    Returns:
        What the pattern's inputs are in the target, None if the two differ.
    """
    ours, theirs = _producers(pattern), _producers(target)
    bound: dict[int, Any] = {}
    same: dict[int, int] = {}
    (root,) = pattern.outputs
    inputs = set(pattern.inputs)
    pending: list[tuple[Any, Any]] = [(root, result)]
    while pending:
        mine, other = pending.pop()
        if isinstance(mine, Constant):
            if not (isinstance(other, Constant) and _same_value(mine.value, other.value)):
                return None
        elif mine in inputs:
            known = bound.setdefault(mine, other)
            is_same = known is other or (isinstance(other, int) and known == other)
            if not is_same or not _same_aval(pattern.avals[mine], _aval_of(target, other)):
                return None
        elif not isinstance(other, int) or mine not in ours or other not in theirs:
            return None
        elif mine in same:
            if same[mine] != other:
                return None
        else:
            left, right = ours[mine], theirs[other]
            if not _same_equation(left, right) or (
                left.outputs.index(mine) != right.outputs.index(other)
            ):
                return None
            same[mine] = other
            pending += zip(left.inputs, right.inputs, strict=True)
    return [bound[value] for value in pattern.inputs] if len(bound) == len(inputs) else None


def _aval_of(program: Program, atom: Any) -> Any:
    return jax.typeof(atom.value) if isinstance(atom, Constant) else program.avals[atom]


def _same_aval(left: Any, right: Any) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def _same_value(left: Any, right: Any) -> bool:
    mine, other = np.asarray(left), np.asarray(right)
    return mine.dtype == other.dtype and np.array_equal(mine, other)


def _same_equation(left: Equation, right: Equation) -> bool:
    mine, other = left.source, right.source
    if mine.primitive is not other.primitive or len(left.inputs) != len(right.inputs):
        return False
    if compat.called_function_name(mine) != compat.called_function_name(other):
        return False
    left_params, right_params = compat.plain_params(mine), compat.plain_params(other)
    if mine.effects or other.effects or left_params.keys() != right_params.keys():
        return False
    return all(_same_param(value, right_params[key]) for key, value in left_params.items())


def _same_param(left: Any, right: Any) -> bool:
    if hasattr(left, "eqns") or hasattr(left, "jaxpr"):
        return str(left) == str(right)
    return left is right or bool(np.all(left == right))
