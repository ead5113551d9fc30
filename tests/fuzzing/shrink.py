"""Makes a program that fails smaller, as long as it fails."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax

from tests.fuzzing.programs import Program, Statement, precision, pruned

__all__ = ["shrunk"]

_STAND_IN = "stand-in"
_SMALL = ((4, 4), (4, 6), (6, 8))


def shrunk(program: Program, fails: Callable[[Program], bool], *, seconds: float = 90) -> Program:
    """Returns a smaller program for which `fails` still holds.

    Greedy: every step that leaves it failing is kept, and the steps are tried anew until none does, or until
    `seconds` are over.
    """
    stop = time.monotonic() + seconds
    tried: set[Program] = {program}
    progress = True
    while progress:
        progress = False
        for smaller in _steps(program):
            if time.monotonic() > stop:
                return program
            if smaller in tried:
                continue
            tried.add(smaller)
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def _steps(program: Program) -> Iterator[Program]:
    """Smaller programs, those that take most away first. They may not even run."""
    terms, results = program.terms, program.results
    for term in terms if len(terms) > 1 else ():
        yield pruned(replace(program, terms=(term,)))
    for index in range(len(terms) if len(terms) > 2 else 0):
        yield pruned(replace(program, terms=terms[:index] + terms[index + 1 :]))
    if len(results) > 1:
        yield pruned(replace(program, results=()))
    for index in range(len(results)):
        yield pruned(replace(program, results=results[:index] + results[index + 1 :]))
    for index in reversed(range(len(program.statements))):
        yield from _without(program, index)
    if program.mode != "grad":
        yield replace(program, mode="grad")
    if program.dtype != "float32":
        yield replace(program, dtype="float32")
    if program.inputs != "normal":
        yield replace(program, inputs="normal")
    for index, term in enumerate(terms):
        name = re.findall(r"\bv\d+|\b[xwb]\b", term)[0]
        simple = f"jnp.sum({name})"
        if term not in (simple, f"jnp.sum(jnp.sin({name}))"):
            for new in (simple, f"jnp.sum(jnp.sin({name}))"):
                yield replace(program, terms=(*terms[:index], new, *terms[index + 1 :]))
    for shape in _SMALL:
        if shape[0] * shape[1] < program.shape[0] * program.shape[1]:
            yield replace(program, shape=shape)


def _without(program: Program, index: int) -> Iterator[Program]:
    """The program without one statement: what it writes is read from somewhere else."""
    statement = program.statements[index]
    if statement.operator == _STAND_IN:
        return
    shapes = _shapes(program)
    earlier = ["x", "b", "i"] + [n for s in program.statements[:index] for n in s.writes]
    before, after = program.statements[:index], program.statements[index + 1 :]
    names = {name: _alike(name, earlier[::-1], shapes) for name in statement.writes}
    if all(names.values()):
        new = replace(program, statements=before + after)
        for name, other in names.items():
            new = _renamed(new, name, other)
        yield pruned(new)
    lines = [_stand_in(name, shapes.get(name)) for name in statement.writes]
    if all(lines):
        stand_in = Statement(_STAND_IN, "\n".join(map(str, lines)), statement.writes)
        yield pruned(replace(program, statements=(*before, stand_in, *after)))


def _alike(name: str, others: list[str], shapes: dict[str, tuple[tuple[int, ...], str]]) -> str:
    found = [other for other in others if other in shapes and shapes[other] == shapes.get(name)]
    return found[0] if found else ""


def _stand_in(name: str, kind: tuple[tuple[int, ...], str] | None) -> str:
    if kind is None:
        return ""
    shape, dtype = kind
    if dtype == "bool":
        return f"{name} = jnp.resize(x > 0, {shape})"
    if "int" in dtype:
        return f"{name} = jnp.resize(i, {shape}).astype(jnp.{dtype})"
    return f"{name} = jnp.resize(x, {shape})"


def _renamed(program: Program, name: str, other: str) -> Program:
    def new(text: str) -> str:
        return re.sub(rf"\b{name}\b", other, text)

    return replace(
        program,
        statements=tuple(replace(s, source=new(s.source)) for s in program.statements),
        terms=tuple(map(new, program.terms)),
        results=tuple(dict.fromkeys(map(new, program.results))),
    )


def _shapes(program: Program) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the arrays of a program by name."""
    names = ["x", "b", "i", *(n for s in program.statements for n in s.writes)]
    probe = replace(program, results=tuple(names))
    with precision(program):
        function, _ = probe.load()
        try:
            _, values = jax.eval_shape(function, *program.arguments())
        except (TypeError, ValueError):
            return {}
    return {
        name: (tuple(value.shape), str(value.dtype))
        for name, value in zip(names, values, strict=True)
        if hasattr(value, "dtype")
    }
