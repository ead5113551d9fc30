"""Flat programs: a jaxpr whose calls are inlined and whose values are numbered, and how one is run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from remat import compat
from remat.trace.custom_rules import Rule

__all__ = [
    "PRIMAL_TAG",
    "LOOP_SCOPE",
    "Atom",
    "Equation",
    "Held",
    "Literal",
    "LoopHandler",
    "Program",
    "evaluate",
    "held_arrays",
    "holds_the_same",
    "is_inexact",
    "lift_tracers",
    "live_equations",
    "program_of",
    "with_own_arrays",
    "without_dead_code",
]

PRIMAL_TAG = "remat:primal:"
LOOP_SCOPE = "remat_"  # named scope of a planned loop, by which its two halves are found again


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """An operand that is a constant written into the program."""

    value: Any


Atom = int | Literal


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive application.

    Attributes:
        source: jax's equation.
        inputs: operands, value ids or literals.
        outputs: value ids.
        site: jax's equation of the call this one was inlined from, None at the top level.
        rules: positions of outputs that are results of a dissolved call with a derivative rule of its own.
    """

    source: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    site: Any = None
    rules: tuple[tuple[int, Rule], ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """The operands that are values."""
        return tuple(atom for atom in self.inputs if isinstance(atom, int))

    def renamed(self, name: Callable[[Atom], Atom]) -> Equation:
        """Returns the equation with other operands, those of its rules included."""
        rules = tuple(
            (position, replace(rule, inputs=tuple(map(name, rule.inputs))))
            for position, rule in self.rules
        )
        return replace(self, inputs=tuple(map(name, self.inputs)), rules=rules)


@dataclass(frozen=True, eq=False)
class Program:
    """A flat program: a jaxpr with its calls inlined and its values numbered.

    Attributes:
        avals: abstract value of every value id.
        inputs: value ids of the arguments.
        constants: arrays known while tracing, by value id.
        equations: in execution order.
        outputs: value ids or literals.
        tags: `checkpoint_name`s by value id; the naming equations themselves are dropped.
    """

    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    tags: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def output_avals(self) -> tuple[Any, ...]:
        """Abstract values of the results."""
        return tuple(
            jax.typeof(atom.value) if isinstance(atom, Literal) else self.avals[atom]
            for atom in self.outputs
        )


class _Flattener:
    """Builds a `Program` from a jaxpr by walking it once, inlining calls."""

    def __init__(
        self, inline_checkpoints: bool, inline_custom: bool, keep: Collection[str]
    ) -> None:
        self.keep = keep
        self.inline_checkpoints = inline_checkpoints
        self.inline_custom = inline_custom
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.constant_ids: dict[int, int] = {}
        self.equations: list[Equation] = []
        self.tags: dict[int, tuple[str, ...]] = {}
        self.site: Any = None
        self.maker: dict[int, int] = {}  # equation by value
        self.dissolving = False

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, var: Any, array: Any) -> int:
        # The same array reached through two calls stays one value.
        key = id(array)
        if key not in self.constant_ids:
            self.constant_ids[key] = self.new(var.aval)
            self.constants[self.constant_ids[key]] = array
        return self.constant_ids[key]

    def run(self, closed: Any, args: Sequence[Atom]) -> list[Atom]:
        jaxpr, consts = compat.open_jaxpr(closed)
        env: dict[Any, Atom] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(var, const)
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Atom:
            return Literal(atom.val) if compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            env.update(zip(eqn.outvars, self.emit(eqn, inputs), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def emit(self, eqn: Any, inputs: tuple[Atom, ...]) -> Sequence[Atom]:
        body = compat.call_body(
            eqn, inline_checkpoints=self.inline_checkpoints, inline_custom=self.inline_custom
        )
        if body is not None and not (self.keep and compat.called_function_name(eqn) in self.keep):
            outer = self.site
            self.site = outer if outer is not None else eqn
            if self.dissolving or not compat.has_rule(eqn):
                results = self.run(body, inputs)
            else:
                results = self.dissolve(eqn, body, inputs)
            self.site = outer
            return results
        tag = compat.checkpoint_name_of(eqn)
        if tag is not None and isinstance(inputs[0], int):
            self.tags[inputs[0]] = tuple(dict.fromkeys((*self.tags.get(inputs[0], ()), tag)))
            return inputs
        return self.append(eqn, inputs)

    def append(self, eqn: Any, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
        outputs = tuple(self.new(var.aval) for var in eqn.outvars)
        self.maker.update(dict.fromkeys(outputs, len(self.equations)))
        self.equations.append(Equation(eqn, inputs, outputs, self.site))
        return outputs

    def dissolve(self, eqn: Any, body: Any, inputs: tuple[Atom, ...]) -> list[Atom]:
        """Inlines a call with a derivative rule, and notes the rule where its results are made."""
        first = len(self.equations)
        self.dissolving = True
        results = self.run(body, inputs)
        self.dissolving = False
        seen: set[int] = set()
        for place, var in enumerate(eqn.outvars):
            if not is_inexact(var.aval):
                continue
            atom = results[place]
            if not isinstance(atom, int) or self.maker.get(atom, -1) < first or atom in seen:
                (atom,) = self.append(compat.identity_of(eqn, place), (atom,))
                results[place] = atom
            seen.add(atom)
            index = self.maker[atom]
            made = self.equations[index]
            rule = made.outputs.index(atom), Rule(eqn, inputs, place, self.site)
            self.equations[index] = replace(made, rules=(*made.rules, rule))
        return results


def program_of(
    closed: Any,
    *,
    inline_checkpoints: bool = True,
    inline_custom: bool = False,
    keep: Collection[str] = (),
) -> Program:
    """Flattens a closed jaxpr.

    Args:
        closed: what `jax.make_jaxpr` returns.
        inline_checkpoints: dissolve `jax.checkpoint` regions, so that the plan takes them over.
        inline_custom: dissolve `custom_jvp` and `custom_vjp` calls: right once differentiation is done.
        keep: names of functions whose calls stay calls.
    """
    flat = _Flattener(inline_checkpoints, inline_custom, keep)
    jaxpr, _ = compat.open_jaxpr(closed)
    inputs = tuple(flat.new(var.aval) for var in jaxpr.invars)
    outputs = flat.run(closed, inputs)
    live = live_equations(flat.equations, outputs)
    return Program(
        avals=tuple(flat.avals),
        inputs=inputs,
        constants=flat.constants,
        equations=live,
        outputs=tuple(outputs),
        tags=flat.tags,
    )


def without_dead_code(program: Program) -> Program:
    """Returns the program without equations that no result and no side effect needs."""
    return replace(program, equations=live_equations(program.equations, program.outputs))


def live_equations(equations: Sequence[Equation], outputs: Iterable[Atom]) -> tuple[Equation, ...]:
    """Returns the equations that some of the results, or a side effect, need."""
    needed = {atom for atom in outputs if isinstance(atom, int)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.source.effects or needed.intersection(equation.outputs):
            kept.append(equation)
            needed.update(equation.reads)
    return tuple(reversed(kept))


LoopHandler = Callable[[str, Equation, compat.ScanParts, Sequence[Any]], Sequence[Any]]


def evaluate(
    program: Program,
    inputs: Sequence[Any],
    *,
    loop: LoopHandler | None = None,
    tags: bool = False,
    name_values: bool = False,
) -> list[Any]:
    """Runs a program in the current trace.

    Args:
        program: what to run.
        inputs: one array per program input.
        loop: called as `loop(path, equation, parts, operands)` in place of every `scan`.
        tags: put the program's `checkpoint_name`s back on its values.
        name_values: tag every computed inexact value so that it can be found again in the joint program.
    """
    env: dict[int, Any] = dict(program.constants)
    env.update(zip(program.inputs, inputs, strict=True))
    named = _Namer(program, tags, name_values)
    for value in program.inputs:
        env[value] = named(value, env[value])
    last = _last_reads(program)
    loops = 0
    for index, equation in enumerate(program.equations):
        operands = [
            atom.value if isinstance(atom, Literal) else env[atom] for atom in equation.inputs
        ]
        parts = compat.scan_parts(equation.source) if loop is not None else None
        if loop is not None and parts is not None:
            path = f"scan{loops}"
            with (
                compat.at_site(equation.source, equation.site),
                jax.named_scope(LOOP_SCOPE + path),
            ):
                results = loop(path, equation, parts, operands)
            loops += 1
        else:
            results = compat.evaluate_equation(equation.source, operands, equation.site)
        for value, result in zip(equation.outputs, results, strict=True):
            env[value] = named(value, result)
        for value in last.get(index, ()):
            env.pop(value, None)
    return [atom.value if isinstance(atom, Literal) else env[atom] for atom in program.outputs]


class _Namer:
    """Puts a program's tags back on its values, so that they are found again in the joint program."""

    def __init__(self, program: Program, tags: bool, name_values: bool) -> None:
        self.program = program
        self.tags = program.tags if tags else {}
        self.name_values = name_values

    def __call__(self, value: int, array: Any) -> Any:
        for tag in self.tags.get(value, ()):
            array = checkpoint_name(array, tag)
        if self.name_values and is_inexact(self.program.avals[value]):
            array = checkpoint_name(array, f"{PRIMAL_TAG}{value}")
        return array


def _last_reads(program: Program) -> dict[int, list[int]]:
    final = {atom for atom in program.outputs if isinstance(atom, int)}
    last: dict[int, list[int]] = {}
    seen = set(final)
    for index in range(len(program.equations) - 1, -1, -1):
        equation = program.equations[index]
        for value in {*equation.reads, *equation.outputs}:
            if value not in seen:
                seen.add(value)
                last.setdefault(index, []).append(value)
    return last


def tags_of(program: Program) -> frozenset[str]:
    """Returns every `checkpoint_name` of a program, those in loops, branches and custom rules included."""
    inside = compat.checkpoint_names([equation.source for equation in program.equations])
    return inside.union(*program.tags.values())


def lift_tracers(program: Program) -> tuple[Program, tuple[Any, ...]]:
    """Turns closed-over tracers into leading inputs, so that gradients flow to them.

    Returns:
        The program with the tracers as its first inputs, and the tracers.
    """
    traced = {v: c for v, c in program.constants.items() if compat.is_tracer(c)}
    if not traced:
        return program, ()
    rest = {v: c for v, c in program.constants.items() if v not in traced}
    lifted = replace(program, inputs=(*traced, *program.inputs), constants=rest)
    return lifted, tuple(traced.values())


Held = tuple[tuple[np.ndarray, np.ndarray], ...]
"""NumPy arrays that a program closes over, each with a copy of what it held."""


def with_own_arrays(program: Program) -> tuple[Program, Held]:
    """Returns a program with copies of the NumPy arrays it closes over, and the arrays that it holds.

    Who made such an array may write into it. What is proven of the constants, and what was compiled with them, is
    of what they held.
    """
    held = held_arrays(program)
    copies = {id(array): copy for array, copy in held}
    own = {v: copies.get(id(c), c) for v, c in program.constants.items()}
    return replace(program, constants=own), held


def held_arrays(program: Program, known: Collection[int] = ()) -> Held:
    """Returns the arrays that others may write into: constants, and the 0-d arrays that jax takes for literals.

    Args:
        program: the program.
        known: `id`s of constants to leave out.
    """
    atoms = itertools.chain(program.outputs, *(e.inputs for e in program.equations))
    literals = (atom.value for atom in atoms if isinstance(atom, Literal))
    inside = (_arrays_inside(equation.source) for equation in program.equations)
    found: dict[Any, np.ndarray] = {}
    for array in itertools.chain(program.constants.values(), literals, *inside):
        if isinstance(array, np.ndarray) and id(array) not in known:
            # jax has each literal as an object of its own, which shares the memory of what was written.
            place = array.__array_interface__["data"] if array.ndim == 0 else id(array)
            found.setdefault(place, array)
    return tuple((array, np.array(array)) for array in found.values())


def _arrays_inside(eqn: Any) -> Iterator[Any]:
    for body in compat.sub_jaxprs(eqn):
        jaxpr, consts = compat.open_jaxpr(body)
        yield from consts
        for inner in jaxpr.eqns:
            yield from (atom.val for atom in inner.invars if compat.is_literal(atom))
            yield from _arrays_inside(inner)


def holds_the_same(held: Held) -> bool:
    """Whether all arrays hold what they held."""
    return all(
        now.tobytes() == then.tobytes()
        if now.ndim == 0
        else np.array_equal(_bytes(now), _bytes(then))
        for now, then in held
    )


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
