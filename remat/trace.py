"""JAX function -> flat program -> joint forward/backward program and its plain-data graph.

A `Program` is a jaxpr whose calls are inlined and whose values are numbered; `trace_joint` differentiates
one (by `jax.vjp` under `jax.make_jaxpr`, public API alone) and returns the joint program together with its
`remat.graph.Graph`. Value `i` of the program is value `i` of the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remat import _compat
from remat.errors import TraceError
from remat.graph import Graph, Op, Value
from remat.primitives import OpClass, OpCost, aval_bytes, classify

__all__ = [
    "Equation",
    "Joint",
    "Literal",
    "Program",
    "check_differentiable",
    "evaluate",
    "lift_tracers",
    "program_of",
    "split_undifferentiated",
    "trace_joint",
    "trace_primal",
]

_PRIMAL_TAG = "remat:primal:"
_SCOPE = "remat_"  # named scope of a planned loop, by which its two halves are found again
_LOOP = re.compile(_SCOPE + r"(scan\d+)")


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
    """

    source: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    site: Any = None

    @property
    def reads(self) -> tuple[int, ...]:
        """The operands that are values."""
        return tuple(atom for atom in self.inputs if isinstance(atom, int))


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

    def __init__(self, inline_checkpoints: bool, inline_custom: bool) -> None:
        self.inline_checkpoints = inline_checkpoints
        self.inline_custom = inline_custom
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.constant_ids: dict[int, int] = {}
        self.equations: list[Equation] = []
        self.tags: dict[int, tuple[str, ...]] = {}
        self.site: Any = None

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
        jaxpr, consts = _compat.open_jaxpr(closed)
        env: dict[Any, Atom] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(var, const)
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Atom:
            return Literal(atom.val) if _compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            env.update(zip(eqn.outvars, self.emit(eqn, inputs), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def emit(self, eqn: Any, inputs: tuple[Atom, ...]) -> Sequence[Atom]:
        body = _compat.call_body(
            eqn, inline_checkpoints=self.inline_checkpoints, inline_custom=self.inline_custom
        )
        if body is not None:
            outer = self.site
            self.site = outer if outer is not None else eqn
            results = self.run(body, inputs)
            self.site = outer
            return results
        tag = _compat.checkpoint_name_of(eqn)
        if tag is not None and isinstance(inputs[0], int):
            self.tags[inputs[0]] = tuple(dict.fromkeys((*self.tags.get(inputs[0], ()), tag)))
            return inputs
        outputs = tuple(self.new(var.aval) for var in eqn.outvars)
        self.equations.append(Equation(eqn, inputs, outputs, self.site))
        return outputs


def program_of(
    closed: Any, *, inline_checkpoints: bool = True, inline_custom: bool = False
) -> Program:
    """Flattens a closed jaxpr.

    Args:
        closed: what `jax.make_jaxpr` returns.
        inline_checkpoints: dissolve `jax.checkpoint` regions, so that the plan takes them over.
        inline_custom: dissolve `custom_jvp` and `custom_vjp` calls: right once differentiation is done.
    """
    flat = _Flattener(inline_checkpoints, inline_custom)
    jaxpr, _ = _compat.open_jaxpr(closed)
    inputs = tuple(flat.new(var.aval) for var in jaxpr.invars)
    outputs = flat.run(closed, inputs)
    live = _live_equations(flat.equations, outputs)
    return Program(
        avals=tuple(flat.avals),
        inputs=inputs,
        constants=flat.constants,
        equations=live,
        outputs=tuple(outputs),
        tags=flat.tags,
    )


def _live_equations(equations: Sequence[Equation], outputs: Iterable[Atom]) -> tuple[Equation, ...]:
    needed = {atom for atom in outputs if isinstance(atom, int)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.source.effects or needed.intersection(equation.outputs):
            kept.append(equation)
            needed.update(equation.reads)
    return tuple(reversed(kept))


LoopHandler = Callable[[str, Equation, _compat.ScanParts, Sequence[Any]], Sequence[Any]]


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
        parts = _compat.scan_parts(equation.source) if loop is not None else None
        if loop is not None and parts is not None:
            path = f"scan{loops}"
            with _compat.at_site(equation.source, equation.site), jax.named_scope(_SCOPE + path):
                results = loop(path, equation, parts, operands)
            loops += 1
        else:
            results = _compat.evaluate_equation(equation.source, operands, equation.site)
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
        if self.name_values and _is_inexact(self.program.avals[value]):
            array = checkpoint_name(array, f"{_PRIMAL_TAG}{value}")
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


def trace_primal(
    function: Callable[..., Any], args: Sequence[Any], *, inline_checkpoints: bool = True
) -> tuple[Program, Any]:
    """Traces a function of flat arrays to `(program, whatever the function returned second)`.

    `function(*args)` returns `(flat results, extra)`; `extra` (a tree structure, say) is handed back.

    Raises:
        TraceError: the function uses mutable arrays or ordered side effects.
    """
    extra: list[Any] = []

    def flat(*inputs: Any) -> Any:
        results, more = function(*inputs)
        extra.append(more)
        return results

    closed = jax.make_jaxpr(flat)(*args)
    program = program_of(closed, inline_checkpoints=inline_checkpoints)
    for equation in program.equations:
        _check_supported(equation.source)
    return program, extra[-1]


def _check_supported(eqn: Any) -> None:
    where = _compat.source_of(eqn)
    where = f" at {where}" if where else ""
    if _compat.uses_references(eqn):
        raise TraceError(
            f"the function uses a mutable array ({eqn.primitive.name}{where}); a program that is split into "
            "a forward and a backward part cannot. Compute with values inside the function, or wrap only "
            "the parts around the reference."
        )
    if _compat.has_ordered_effects(eqn):
        raise TraceError(
            f"the function has an ordered side effect ({eqn.primitive.name}{where}); jax does not allow one "
            "under differentiation with its own rule. Use ordered=False, or move the effect out of the "
            "rematted function."
        )


def lift_tracers(program: Program) -> tuple[Program, tuple[Any, ...]]:
    """Turns closed-over tracers into leading inputs, so that gradients flow to them.

    Returns:
        The program with the tracers as its first inputs, and the tracers.
    """
    traced = {v: c for v, c in program.constants.items() if _compat.is_tracer(c)}
    if not traced:
        return program, ()
    rest = {v: c for v, c in program.constants.items() if v not in traced}
    lifted = replace(program, inputs=(*traced, *program.inputs), constants=rest)
    return lifted, tuple(traced.values())


def split_undifferentiated(program: Program) -> tuple[Program, Program]:
    """Splits off the results that no differentiable input can influence.

    They need no plan, and a `jax.custom_vjp` would hide from other transforms what they depend on: Flax's
    `nn.scan`, for one, requires that freshly initialised parameters do not depend on the loop.

    Returns:
        The program with the other results only, and the program of the results split off. Both take all
        inputs.
    """
    independent = {v for v in program.inputs if not _is_inexact(program.avals[v])}
    independent.update(program.constants)
    for equation in program.equations:
        known = all(v in independent for v in equation.reads)
        if known and not equation.source.effects:
            independent.update(equation.outputs)
    through = independent | set(program.inputs)
    aside = tuple(a for a in program.outputs if isinstance(a, Literal) or a in through)
    rest = tuple(a for a in program.outputs if a not in set(aside))
    nothing = replace(program, equations=(), outputs=())
    if not aside:
        return program, nothing
    if not rest:
        return nothing, program
    return (
        replace(program, equations=_live_equations(program.equations, rest), outputs=rest),
        replace(
            program,
            equations=tuple(
                e for e in _live_equations(program.equations, aside) if not e.source.effects
            ),
            outputs=aside,
        ),
    )


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint program: inputs then cotangents in, results then gradients out.

    Attributes:
        program: the flat joint program.
        graph: its plain-data graph, with the same value ids; operator `i` is equation `i`.
        num_inputs: how many of the program's inputs are the function's.
        num_outputs: how many of the program's outputs are the function's results.
        perturbed: for every input whether it is differentiated.
        cotangent_outputs: indices of the results that have a cotangent (the inexact ones).
    """

    program: Program
    graph: Graph
    num_inputs: int
    num_outputs: int
    perturbed: tuple[bool, ...]
    cotangent_outputs: tuple[int, ...]

    @property
    def gradient_atoms(self) -> tuple[Atom, ...]:
        """Value ids or literals of the gradients, one per perturbed input."""
        return self.program.outputs[self.num_outputs :]

    @property
    def output_atoms(self) -> tuple[Atom, ...]:
        """Value ids or literals of the results."""
        return self.program.outputs[: self.num_outputs]


def trace_joint(
    primal: Program,
    args: Sequence[Any],
    perturbed: Sequence[bool],
    *,
    loop: LoopHandler | None = None,
    name_values: bool = False,
    multiplicity: int = 1,
    num_invariant: int = 0,
    num_carried: int = 0,
) -> Joint:
    """Differentiates a program and returns the joint forward/backward program with its graph.

    Args:
        primal: the undifferentiated program.
        args: arrays, tracers or `jax.ShapeDtypeStruct`s, one per input.
        perturbed: for every input whether it is differentiated; inputs that are not inexact must be False.
        loop: replaces every `scan`, see `evaluate`.
        name_values: record in `Value.primal` which joint values exist in the primal program.
        multiplicity: `Graph.multiplicity` of the result.
        num_invariant: how many leading inputs are the same in every iteration of a loop.
        num_carried: how many inputs after these are carried from one iteration to the next.

    Raises:
        TraceError: nothing is differentiated, or the program cannot be differentiated in reverse mode.
    """
    differentiated = tuple(i for i, flag in enumerate(perturbed) if flag)
    with_cotangent = tuple(i for i, a in enumerate(primal.output_avals) if _is_inexact(a))
    check_differentiable(primal, perturbed)

    def joint(inputs: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, Any]:
        inputs = list(inputs)

        def results(*values: Any) -> tuple[list[Any], list[Any]]:
            full = list(inputs)
            for index, value in zip(differentiated, values, strict=True):
                full[index] = value
            outs = evaluate(primal, full, loop=loop, tags=True, name_values=name_values)
            return [outs[i] for i in with_cotangent], outs

        _, pullback, outs = jax.vjp(results, *(inputs[i] for i in differentiated), has_aux=True)
        return outs, pullback(list(cotangents))

    cotangents = [_compat.cotangent_of(primal.output_avals[i]) for i in with_cotangent]
    closed = jax.make_jaxpr(joint)(list(args), cotangents)
    program = program_of(closed, inline_checkpoints=False, inline_custom=True)
    num_outputs = len(primal.outputs)
    return Joint(
        program=program,
        graph=replace(
            _graph_of(program, len(args), num_outputs, multiplicity, name_values),
            invariant=program.inputs[:num_invariant],
            carried=(
                *program.inputs[num_invariant : num_invariant + num_carried],
                *_values(program.outputs[:num_carried]),
            ),
        ),
        num_inputs=len(args),
        num_outputs=num_outputs,
        perturbed=tuple(bool(flag) for flag in perturbed),
        cotangent_outputs=with_cotangent,
    )


def check_differentiable(primal: Program, perturbed: Sequence[bool]) -> None:
    """Raises TraceError unless some input is differentiated and some result is inexact."""
    if not any(perturbed):
        dtypes = [str(primal.avals[i].dtype) for i in primal.inputs]
        raise TraceError(
            f"none of the function's inputs is differentiated: they have dtypes {dtypes}; expected "
            "at least one floating point or complex input. Pass parameters as arrays (not as static "
            "arguments)."
        )
    if not any(map(_is_inexact, primal.output_avals)):
        dtypes = [str(getattr(aval, "dtype", aval)) for aval in primal.output_avals]
        raise TraceError(
            f"none of the function's results is differentiable: they have dtypes {dtypes}; "
            "expected at least one floating point or complex result. Return the loss as a float, "
            "or do not wrap this function: it needs no rematerialization."
        )


def _graph_of(
    program: Program, num_inputs: int, num_outputs: int, multiplicity: int, primal_only: bool
) -> Graph:
    inputs, cotangents = program.inputs[:num_inputs], program.inputs[num_inputs:]
    backward = set(cotangents)
    producer: dict[int, int] = {}
    ops: list[Op] = []
    for index, equation in enumerate(program.equations):
        depends = any(value in backward for value in equation.reads)
        if depends:
            backward.update(equation.outputs)
        producer.update(dict.fromkeys(equation.outputs, index))
        ops.append(_op_of(program, index, equation, "backward" if depends else "forward"))
    return Graph(
        values=tuple(
            _value_of(program, i, producer.get(i), primal_only and _chosen(ops, producer.get(i)))
            for i in range(len(program.avals))
        ),
        ops=tuple(ops),
        inputs=inputs,
        cotangents=cotangents,
        outputs=_values(program.outputs[:num_outputs]),
        gradients=_values(program.outputs[num_outputs:]),
        constants=tuple(program.constants),
        multiplicity=multiplicity,
    )


def _chosen(ops: Sequence[Op], producer: int | None) -> bool:
    """Whether keeping an operator's results is a choice: what may not run again is kept in any case."""
    return producer is not None and ops[producer].recomputable


def _values(atoms: Iterable[Atom]) -> tuple[int, ...]:
    return tuple(atom for atom in atoms if isinstance(atom, int))


def _value_of(program: Program, index: int, producer: int | None, primal_only: bool) -> Value:
    aval = program.avals[index]
    tags = program.tags.get(index, ())
    primal = [int(tag.removeprefix(_PRIMAL_TAG)) for tag in tags if tag.startswith(_PRIMAL_TAG)]
    return Value(
        id=index,
        shape=tuple(getattr(aval, "shape", ())),
        dtype=str(getattr(aval, "dtype", aval)),
        nbytes=aval_bytes(aval),
        producer=producer,
        tags=tuple(tag for tag in tags if not tag.startswith(_PRIMAL_TAG)),
        differentiable=_is_inexact(aval),
        primal=primal[0] if primal else None,
        savable=not primal_only or producer is None or bool(primal),
    )


def _op_of(program: Program, index: int, equation: Equation, phase: Any) -> Op:
    eqn = equation.source
    in_avals = [getattr(var, "aval", None) for var in eqn.invars]
    out_avals = [var.aval for var in eqn.outvars]
    cost = _cost_of(eqn, in_avals, out_avals)
    scope = _compat.scope_of(eqn)
    loop = _LOOP.findall(scope) if eqn.primitive.name == "scan" else []
    site = equation.site
    flops, moved = _room_cost(eqn, in_avals, out_avals, cost)
    return Op(
        id=index,
        name=eqn.primitive.name,
        inputs=equation.reads,
        outputs=equation.outputs,
        flops=flops,
        bytes_moved=moved,
        phase=phase,
        fusible=cost.fusible,
        heavy=cost.heavy,
        random=cost.random,
        effectful=cost.effectful,
        recomputable=cost.recomputable,
        reason=cost.reason,
        kind=cost.op_class.name,
        scope=_LOOP.sub("", scope).replace("//", "/").strip("/"),
        source=_compat.source_of(eqn) or (_compat.source_of(site) if site is not None else ""),
        batched=_is_batched(eqn),
        loop=loop[-1] if loop else None,
        padded=_is_padded(eqn),
    )


def _cost_of(eqn: Any, in_avals: Sequence[Any], out_avals: Sequence[Any]) -> OpCost:
    return classify(eqn.primitive.name, eqn.params, in_avals, out_avals, effects=eqn.effects)


def _is_batched(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    (_, _), (batch, _) = eqn.params["dimension_numbers"]
    return len(batch) > 0


def _is_padded(eqn: Any) -> bool:
    if eqn.primitive.name != "select_and_scatter_add":
        return False
    return any(low > 0 for low, _ in eqn.params["padding"])


def _room_cost(
    eqn: Any, in_avals: Sequence[Any], out_avals: Sequence[Any], cost: OpCost
) -> tuple[int, int]:
    """Flops and bytes of an equation; those of a loop or a call are the sum over its body."""
    moved = sum(map(aval_bytes, in_avals)) + sum(map(aval_bytes, out_avals))
    bodies = [_compat.open_jaxpr(body)[0] for body in _compat.sub_jaxprs(eqn)]
    if cost.op_class not in (OpClass.CONTROL, OpClass.CALL) or not bodies:
        return cost.flops, moved
    parts = _compat.scan_parts(eqn)
    times = parts.length if parts else 1
    costs = [_jaxpr_cost(body) for body in bodies]
    combine = max if eqn.primitive.name == "cond" else sum
    return times * combine(c[0] for c in costs), max(moved, times * combine(c[1] for c in costs))


def _jaxpr_cost(jaxpr: Any) -> tuple[int, int]:
    flops = moved = 0
    for eqn in jaxpr.eqns:
        in_avals = [var.aval for var in eqn.invars]
        out_avals = [var.aval for var in eqn.outvars]
        part = _room_cost(eqn, in_avals, out_avals, _cost_of(eqn, in_avals, out_avals))
        flops, moved = flops + part[0], moved + part[1]
    return flops, moved
