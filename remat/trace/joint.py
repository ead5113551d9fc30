"""JAX function -> flat program -> joint forward/backward program and its plain-data graph.

A `Program` is a jaxpr whose calls are inlined and whose values are numbered; `trace_joint` differentiates
one (by `jax.vjp` under `jax.make_jaxpr`, public API alone) and returns the joint program together with its
`remat.core.graph.Graph`. Value `i` of the program is value `i` of the graph.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat import compat
from remat.core.avals import aval_bytes
from remat.core.classify import OpCost
from remat.core.errors import TraceError
from remat.core.graph import Graph, Op, Value
from remat.core.primitives import OpClass
from remat.trace.classify import classify_equation
from remat.trace.decisions import compare_operands, decide
from remat.trace.emission import CONVOLUTION, sums_one, traits_of, workspace_bytes
from remat.trace.instances import Instances, with_single_instances
from remat.trace.program import (
    LOOP_SCOPE,
    PRIMAL_TAG,
    Atom,
    Equation,
    LoopHandler,
    Program,
    evaluate,
    is_inexact,
    program_of,
    without_dead_code,
)
from remat.trace.ranges import integer_ranges
from remat.trace.symbolic import has_symbols, with_stand_ins

__all__ = [
    "Joint",
    "check_differentiable",
    "trace_joint",
    "trace_primal",
    "with_program",
]

_LOOP = re.compile(LOOP_SCOPE + r"(scan\d+)")


def trace_primal(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    inline_checkpoints: bool = True,
    keep: Collection[str] = (),
) -> tuple[Program, Any]:
    """Traces a function of flat arrays to `(program, whatever the function returned second)`.

    `function(*args)` returns `(flat results, extra)`; `extra` (a tree structure, say) is handed back. `keep`: see
    `remat.trace.program.program_of`.

    Raises:
        TraceError: the function uses mutable arrays or ordered side effects.
    """
    extra: list[Any] = []

    @functools.wraps(function, assigned=(), updated=())  # errors speak of the function
    def flat(*inputs: Any) -> Any:
        results, more = function(*inputs)
        extra.append(more)
        return results

    closed = jax.make_jaxpr(flat)(*args)
    program = program_of(closed, inline_checkpoints=inline_checkpoints, keep=keep)
    for equation in program.equations:
        _check_supported(equation.source)
    return program, extra[-1]


def _check_supported(eqn: Any) -> None:
    where = compat.source_of(eqn)
    where = f" at {where}" if where else ""
    if compat.uses_references(eqn):
        raise TraceError(
            f"the function uses a mutable array ({eqn.primitive.name}{where}); a program that is split into "
            "a forward and a backward part cannot. Compute with values inside the function, or wrap only "
            "the parts around the reference."
        )
    if compat.has_ordered_effects(eqn):
        raise TraceError(
            f"the function has an ordered side effect ({eqn.primitive.name}{where}); jax does not allow one "
            "under differentiation with its own rule. Use ordered=False, or move the effect out of the "
            "rematted function."
        )


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
        name_values: as in `trace_joint`.
    """

    program: Program
    graph: Graph
    num_inputs: int
    num_outputs: int
    perturbed: tuple[bool, ...]
    cotangent_outputs: tuple[int, ...]
    name_values: bool = False

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
    with_cotangent = tuple(i for i, a in enumerate(primal.output_avals) if is_inexact(a))
    if not any(perturbed):
        raise TraceError(
            "the gradient is zero: no result depends on the differentiated inputs, but for what stops gradients. "
            "It needs no rematerialization; pass argnums= of inputs that have a gradient."
        )

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

    cotangents = [compat.cotangent_of(primal.output_avals[i]) for i in with_cotangent]
    closed = jax.make_jaxpr(joint)(list(args), cotangents)
    program = program_of(closed, inline_checkpoints=False, inline_custom=True)
    if not name_values:  # jax differentiates again what a policy of jax keeps
        program = without_dead_code(compare_operands(program))
    num_outputs = len(primal.outputs)
    program, graph = _decided(program, len(args), num_outputs, multiplicity, name_values)
    return Joint(
        program=program,
        graph=replace(
            graph,
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
        name_values=name_values,
    )


def with_program(joint: Joint, program: Program) -> Joint:
    """Returns a joint program with other equations for the same inputs, results and gradients."""
    old = joint.graph
    program, graph = _decided(
        program, joint.num_inputs, joint.num_outputs, old.multiplicity, joint.name_values
    )
    carried_in = tuple(v for v in old.carried if v in old.inputs)
    carried = (*carried_in, *_values(program.outputs[: len(carried_in)]))
    graph = replace(graph, invariant=old.invariant, carried=carried)
    return replace(joint, program=program, graph=graph)


def check_differentiable(primal: Program, perturbed: Sequence[bool]) -> None:
    """Raises TraceError unless some input is differentiated and some result is inexact."""
    if not any(perturbed):
        dtypes = [str(primal.avals[i].dtype) for i in primal.inputs]
        raise TraceError(
            f"none of the function's inputs is differentiated: they have dtypes {dtypes}; expected "
            "at least one floating point or complex input. Pass parameters as arrays (not as static "
            "arguments)."
        )
    if not primal.outputs:
        raise TraceError(
            "none of the function's results has a gradient: they depend on no differentiable input, or come "
            "through something that stops gradients, or through a while_loop (or a fori_loop whose bounds are not "
            "constants), which jax differentiates in forward mode only. For a gradient through a loop use "
            "lax.scan or constant bounds; what has none needs no rematerialization."
        )
    if not any(map(is_inexact, primal.output_avals)):
        dtypes = [str(getattr(aval, "dtype", aval)) for aval in primal.output_avals]
        raise TraceError(
            f"none of the function's results is differentiable: they have dtypes {dtypes}; "
            "expected at least one floating point or complex result. Return the loss as a float, "
            "or do not wrap this function: it needs no rematerialization."
        )


def _decided(program: Program, *how: Any) -> tuple[Program, Graph]:
    """Returns a joint program and its graph with what decides made once, from single instances."""
    graph, instances = _graph_of(program, *how)
    if instances:
        program = with_single_instances(program, instances)
        graph, _ = _graph_of(program, *how)
    return program, graph


def _graph_of(
    program: Program, num_inputs: int, num_outputs: int, multiplicity: int, primal_only: bool
) -> tuple[Graph, Instances]:
    inputs, cotangents = program.inputs[:num_inputs], program.inputs[num_inputs:]
    runs = program
    if has_symbols(runs):
        program = with_stand_ins(runs)
    ranges = {} if program is not runs else integer_ranges(program)
    backward = set(cotangents)
    producer: dict[int, int] = {}
    ops: list[Op] = []
    for index, equation in enumerate(program.equations):
        depends = any(value in backward for value in equation.reads)
        if depends:
            backward.update(equation.outputs)
        producer.update(dict.fromkeys(equation.outputs, index))
        op = _op_of(program, index, equation, "backward" if depends else "forward")
        if op.name == CONVOLUTION:
            source = producer.get(op.inputs[-1])
            while source is not None and ops[source].name == "transpose":
                source = producer.get(ops[source].inputs[0])
            is_reversed = source is not None and ops[source].name == "rev"
            room = workspace_bytes(equation.source, op.swapped, is_reversed)
            op = replace(op, workspace_bytes=room)
        if op.name == "reduce_window_sum" and not op.fusible:
            padding = producer.get(op.inputs[0])
            if padding is not None and ops[padding].name == "pad":
                apart = sums_one(program.equations[padding].source, equation.source)
                op = replace(op, fusible=apart)
        ops.append(op)
    values = [
        _value_of(
            program,
            i,
            producer.get(i),
            ranges.get(i),
            primal_only and _chosen(ops, producer.get(i)),
        )
        for i in range(len(program.avals))
    ]
    for index, aval in enumerate(runs.avals):
        if compat.is_symbolic(aval):  # codes are laid out for one size
            values[index] = replace(values[index], form="raw")
    graph = Graph(
        values=tuple(values),
        ops=tuple(ops),
        inputs=inputs,
        cotangents=cotangents,
        outputs=_values(program.outputs[:num_outputs]),
        gradients=_values(program.outputs[num_outputs:]),
        constants=tuple(program.constants),
        multiplicity=multiplicity,
    )
    return decide(program, graph, named_only=primal_only)


def _chosen(ops: Sequence[Op], producer: int | None) -> bool:
    """Whether keeping an operator's results is a choice: what may not run again is kept in any case."""
    return producer is not None and ops[producer].recomputable


def _values(atoms: Iterable[Atom]) -> tuple[int, ...]:
    return tuple(atom for atom in atoms if isinstance(atom, int))


def _value_of(
    program: Program,
    index: int,
    producer: int | None,
    bounds: tuple[int, int] | None,
    primal_only: bool,
) -> Value:
    aval = program.avals[index]
    tags = program.tags.get(index, ())
    primal = [int(tag.removeprefix(PRIMAL_TAG)) for tag in tags if tag.startswith(PRIMAL_TAG)]
    is_complex = str(getattr(aval, "dtype", "")).startswith("complex")
    return Value(
        id=index,
        shape=tuple(getattr(aval, "shape", ())),
        dtype=str(getattr(aval, "dtype", aval)),
        nbytes=aval_bytes(aval),
        producer=producer,
        tags=tuple(tag for tag in tags if not tag.startswith(PRIMAL_TAG)),
        differentiable=is_inexact(aval),
        primal=primal[0] if primal else None,
        # jax.checkpoint cannot keep complex values: it rounds what it keeps by `reduce_precision`, for reals only.
        savable=not primal_only or producer is None or (bool(primal) and not is_complex),
        range=None if str(getattr(aval, "dtype", "")) == "bool" else bounds,  # one bit anyway
    )


def _op_of(program: Program, index: int, equation: Equation, phase: Any) -> Op:
    eqn = equation.source
    cost = classify_equation(eqn)
    scope = compat.scope_of(eqn)
    loop = _LOOP.findall(scope) if eqn.primitive.name == "scan" else []
    site = equation.site
    flops, moved = _room_cost(eqn, cost)
    return Op(
        id=index,
        name=compat.name_of(eqn),
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
        source=compat.source_of(eqn) or (compat.source_of(site) if site is not None else ""),
        **traits_of(eqn),
        loop=loop[-1] if loop else None,
        setting=_setting(equation),
    )


def _setting(equation: Equation) -> str:
    """A digest of what an operator computes besides its operands; empty for loops and calls."""
    eqn = equation.source
    if compat.sub_jaxprs(eqn):
        return ""
    literals = {
        place: (type(atom.value).__name__, repr(atom.value))
        for place, atom in enumerate(equation.inputs)
        if not isinstance(atom, int)
    }
    text = repr((sorted(eqn.params.items()), literals))
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


def _room_cost(eqn: Any, cost: OpCost) -> tuple[int, int]:
    """Flops and bytes of an equation; those of a loop or a call are the sum over its body."""
    in_avals, out_avals = compat.avals_of(eqn)
    moved = sum(map(aval_bytes, in_avals)) + sum(map(aval_bytes, out_avals))
    bodies = [compat.open_jaxpr(body)[0] for body in compat.sub_jaxprs(eqn)]
    if cost.op_class not in (OpClass.CONTROL, OpClass.CALL) or not bodies:
        return cost.flops, moved
    parts = compat.scan_parts(eqn)
    times = parts.length if parts else 1
    costs = [_jaxpr_cost(body) for body in bodies]
    combine = max if eqn.primitive.name == "cond" else sum
    return times * combine(c[0] for c in costs), max(moved, times * combine(c[1] for c in costs))


def _jaxpr_cost(jaxpr: Any) -> tuple[int, int]:
    flops = moved = 0
    for eqn in jaxpr.eqns:
        part = _room_cost(eqn, classify_equation(eqn))
        flops, moved = flops + part[0], moved + part[1]
    return flops, moved
