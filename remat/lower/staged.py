"""A joint program with its plan, lowered: the steps of its schedule executed as JAX operations.

The forward half runs the forward steps and returns what the backward half reads; the backward half runs the
backward steps. A barrier step is one `optimization_barrier` over kept values and cotangents.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from remat import compat
from remat.compat.barriers import tied
from remat.core.forms import form_of
from remat.core.graph import Graph, Value
from remat.lower.encode import decode, encode
from remat.lower.zeros import Zeros
from remat.plans.liveness import read_before_made
from remat.plans.plan import Plan
from remat.plans.steps import Step
from remat.trace.custom_rules import Rule, with_rule, without_rule
from remat.trace.emission import CONVOLUTION
from remat.trace.joint import Joint
from remat.trace.program import (
    Equation,
    Literal,
)

__all__ = ["Staged", "are_concrete"]


@dataclass(frozen=True)
class _Crossing:
    """What crosses from forward to backward: value ids, by where they live."""

    inputs: tuple[int, ...]
    raw: tuple[int, ...]
    bits: tuple[int, ...]


class Staged:
    """A joint program with its plan: the forward and backward halves as functions of arrays."""

    def __init__(self, joint: Joint, plan: Plan) -> None:
        self.joint = joint
        self.plan = plan
        self._forward_jit = jax.jit(self._run_forward)
        self._backward_jit = jax.jit(self._run_backward)
        self._zeros_without: dict[tuple[int, ...], Zeros] = {}

    @cached_property
    def crossing(self) -> _Crossing:
        """The residuals: everything the backward steps read before they make it themselves."""
        program, graph = self.joint.program, self.joint.graph
        needed = read_before_made(graph, self.plan.schedule.backward, graph.gradients)
        own = {*program.inputs[self.joint.num_inputs :]}
        known = {v for v, c in program.constants.items() if not compat.is_tracer(c)} | own
        wanted = [v for v in needed.raw if v not in known]
        inputs = set(program.inputs)
        return _Crossing(
            inputs=tuple(v for v in wanted if v in inputs),
            raw=tuple(v for v in wanted if v not in inputs),
            bits=needed.encoded,
        )

    def forward(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results and the residuals (inputs first, then raw values, then encoded ones)."""
        position = {v: i for i, v in enumerate(self.joint.program.inputs[: self.joint.num_inputs])}
        through = [inputs[position[v]] for v in self.crossing.inputs]
        run = self._forward_jit if are_concrete(inputs) else self._run_forward
        outputs, kept = run(list(inputs))
        return outputs, [*through, *kept]

    def _run_forward(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        machine = _Machine(self.joint, self.plan.graph, self._zeros(()))
        program = self.joint.program
        machine.env.update(zip(program.inputs[: self.joint.num_inputs], inputs, strict=True))
        machine.run(self.plan.schedule.forward)
        kept = [self._stacked(v, machine.env[v]) for v in self.crossing.raw]
        kept += [machine.bits[v] for v in self.crossing.bits]
        return [machine.read(atom) for atom in self.joint.output_atoms], kept

    def _stacked(self, value: int, kept: Any) -> Any:
        """What a loop stacks and its backward loop reads in slices, in one layout; see `_laid_out`."""
        return compat.row_major(kept) if value in self._laid_out else kept

    @cached_property
    def _laid_out(self) -> frozenset[int]:
        """Values that loops with matmuls stack: XLA would choose one layout forward and another one backward.

        cuDNN's convolutions want one layout for all, which XLA chooses for both loops alike. Left alone is besides

        - what is the same in every iteration: it is not stacked,
        - what is a result, too: it is stacked once only if it is the same array,
        - what is read beside a larger array, as a row's sum is: it has the layout that the larger one wants.
        """
        graph = self.plan.graph
        heavy = {op.name for op in graph.ops if op.heavy}
        if graph.multiplicity == 1 or "dot_general" not in heavy or CONVOLUTION in heavy:
            return frozenset()
        left = graph.fixed.union(graph.outputs)
        return frozenset(v for v in self.crossing.raw if v not in left and not _is_spread(graph, v))

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Returns one gradient per perturbed input.

        Args:
            residuals: as `forward` returns them.
            cotangents: of the inexact results, None for zeros. A gradient that is zero because they are is None.
        """
        args = (list(residuals), list(cotangents))
        given = [x for x in cotangents if x is not None]
        run = self._backward_jit if are_concrete([*residuals, *given]) else self._run_backward
        return run(*args)

    def _zeros(self, without: tuple[int, ...]) -> Zeros:
        """What is zero without some of the cotangents."""
        if without not in self._zeros_without:
            self._zeros_without[without] = Zeros(self.joint.program, without)
        return self._zeros_without[without]

    def _run_backward(self, residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        names = self.joint.program.inputs[self.joint.num_inputs :]
        pairs = list(zip(names, cotangents, strict=True))
        zeros = self._zeros(tuple(v for v, cotangent in pairs if cotangent is None))
        machine, crossing = _Machine(self.joint, self.plan.graph, zeros), self.crossing
        through, raw = len(crossing.inputs), (*crossing.inputs, *crossing.raw)
        machine.env.update(zip(raw, residuals[: len(raw)], strict=True))
        machine.env.update((v, self._stacked(v, machine.env[v])) for v in raw[through:])
        machine.bits.update(zip(crossing.bits, residuals[len(raw) :], strict=True))
        machine.env.update((v, cotangent) for v, cotangent in pairs if cotangent is not None)
        machine.run(self.plan.schedule.backward)
        program = self.joint.program
        wanted = [v for v, flag in zip(program.inputs, self.joint.perturbed, strict=False) if flag]
        return [
            None if atom in zeros else compat.array_like(machine.read(atom), program.avals[v])
            for v, atom in zip(wanted, self.joint.gradient_atoms, strict=True)
        ]


def _is_spread(graph: Graph, value: int) -> bool:
    """Whether an operator that fuses makes more elements of a value than it has."""
    users = (graph.ops[user] for user in graph.users[value])
    made = (v for op in users if op.fusible for v in op.outputs)
    size = math.prod(graph.values[value].shape)
    return any(math.prod(graph.values[v].shape) > size for v in made)


def are_concrete(values: Sequence[Any]) -> bool:
    """Whether values are arrays, and nothing is being traced."""
    return compat.top_level_trace() and not any(map(compat.is_tracer, values))


def _lowest(value: Value) -> int:
    """The smallest value an integer can have: codes count from it."""
    return value.range[0] if value.range is not None else 0


class _Machine:
    """Executes schedule steps in the current trace."""

    def __init__(self, joint: Joint, graph: Graph, zeros: Zeros) -> None:
        self.joint = joint
        self.zeros = zeros
        self.graph = graph  # the plan's, which says in which form a value is kept
        self.env: dict[int, Any] = dict(joint.program.constants)
        self.bits: dict[int, Any] = {}
        self.aside: dict[int, Any] = {}  # read by nothing but derivative rules
        self.missing: set[int] = set()  # and what cannot be made for them

    def read(self, atom: Any) -> Any:
        return self.zeros.read(atom, self.env)

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            getattr(self, f"_{step.action}")(step)

    def _compute(self, step: Step) -> None:
        equation = self.joint.program.equations[step.target]
        for _, rule in equation.rules:
            self._find(rule)
        self.env.update(self._results(equation, self.env))

    def _results(self, equation: Equation, env: Mapping[int, Any]) -> dict[int, Any]:
        results = self.zeros.results(equation, env)
        for position, rule in equation.rules:
            value = equation.outputs[position]
            if value not in results:
                continue
            known = ChainMap(self.env, self.aside)
            if all(isinstance(a, Literal) or a in known or a in self.zeros for a in rule.inputs):
                inputs = [self.zeros.read(atom, known) for atom in rule.inputs]
                results[value] = with_rule(rule, results[value], inputs)
            else:
                results[value] = without_rule(rule, results[value])
        return results

    def _find(self, rule: Rule) -> None:
        """Makes what a rule reads, as far as it can be made from what there is; nothing else reads it."""
        program, values = self.joint.program, self.graph.values
        known = ChainMap(self.env, self.aside)
        todo = [atom for atom in rule.inputs if isinstance(atom, int)]
        while todo:
            value = todo[-1]
            producer = values[value].producer
            if value in known or value in self.missing or value in self.zeros:
                todo.pop()
            elif producer is None or program.equations[producer].source.effects:
                self.missing.add(value)
            else:
                equation = program.equations[producer]
                rules = (a for _, rule in equation.rules for a in rule.inputs if isinstance(a, int))
                reads = (*equation.reads, *rules)
                wanted = [v for v in reads if v not in known and v not in self.zeros]
                rest = [v for v in wanted if v not in self.missing]
                if rest:
                    todo += rest
                elif self.missing.isdisjoint(equation.reads):
                    self.aside.update(self._results(equation, known))
                else:
                    self.missing.update(equation.outputs)

    def _free(self, step: Step) -> None:
        if step.target in self.env:
            self.aside[step.target] = self.env.pop(step.target)

    def _encode(self, step: Step) -> None:
        value = self.graph.values[step.target]
        self.bits[step.target] = encode(
            form_of(value), self.env[step.target], offset=_lowest(value)
        )

    def _decode(self, step: Step) -> None:
        value = self.graph.values[step.target]
        aval = self.joint.program.avals[step.target]
        decoded = decode(
            form_of(value), self.bits[step.target], aval.shape, aval.dtype, offset=_lowest(value)
        )
        self.env[step.target] = compat.reshard_like(decoded, aval)

    def _drop(self, step: Step) -> None:
        self.bits.pop(step.target, None)

    def _barrier(self, step: Step) -> None:
        # Inside `shard_map` a barrier gives all its results one type, so arrays that vary over different
        # mesh axes are tied separately.
        groups: dict[Any, list[tuple[dict[int, Any], int]]] = {}
        for value in step.values:
            if value in self.zeros:
                continue
            place = self.bits if value in self.bits else self.env
            array = jax.tree.leaves(place[value])[0]  # an encoded value may be several arrays
            groups.setdefault(compat.varying_axes(jax.typeof(array)), []).append((place, value))
        for places in groups.values():
            kept = [place[v] for place, v in places]
            leaves, structure = jax.tree.flatten(kept)
            after = jax.tree.unflatten(structure, tied(leaves))
            for (place, v), array in zip(places, after, strict=True):
                place[v] = array
