"""Staged lowering: a plan becomes a JAX function that keeps, encodes and recomputes as the plan says.

The function is a `jax.custom_vjp` (DESIGN: docs/design.md). Its forward rule runs the forward steps of the
plan's schedule and returns the kept values as residuals; its backward rule runs the backward steps. A barrier
step is one `optimization_barrier` over kept values and cotangents. The plan is made when the function is
differentiated, for the inputs that are really perturbed.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from remat import compat
from remat.compat.barriers import tied
from remat.core.errors import BudgetError, DifferentiationError
from remat.core.forms import form_of
from remat.core.graph import Graph, Implementations, Op, Site, Value
from remat.core.interrupt import interrupted, planning
from remat.lower.encode import decode, encode
from remat.lower.split import inputs_with_gradient, split_planned
from remat.planning.make import with_loops
from remat.planning.opaque import warn_of_opaque
from remat.planning.protocol import NO_CHUNKS, Planner
from remat.plans.paths import rest_of
from remat.plans.plan import LoopPlan, Plan, Step
from remat.rewrite import substitution
from remat.rewrite.menu import Menu
from remat.rewrite.operators import implementations
from remat.rewrite.rules import RULES
from remat.trace.custom_rules import Rule, with_rule, without_rule
from remat.trace.joint import Joint, check_differentiable, trace_joint
from remat.trace.program import (
    LOOP_SCOPE,
    Equation,
    Literal,
    Program,
    evaluate,
    program_of,
)
from remat.trace.symbolic import STAND_IN, has_symbols

__all__ = ["Planner", "Staged", "StagedFunction"]


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

    @cached_property
    def crossing(self) -> _Crossing:
        """The residuals: everything the backward steps read before they make it themselves."""
        program, made = self.joint.program, set[int]()
        reads: dict[int, None] = {}
        bits: dict[int, None] = {}
        packed: set[int] = set()
        own = {*program.inputs[self.joint.num_inputs :]}
        for step in self.plan.schedule.backward:
            if step.action == "compute":
                equation = program.equations[step.target]
                reads.update((v, None) for v in equation.reads if v not in made)
                made.update(equation.outputs)
            elif step.action == "encode":
                packed.add(step.target)
            elif step.action == "decode":
                if step.target not in packed:
                    bits[step.target] = None
                made.add(step.target)
        reads.update(
            (a, None) for a in self.joint.gradient_atoms if isinstance(a, int) and a not in made
        )
        known = {v for v, c in program.constants.items() if not compat.is_tracer(c)} | own
        wanted = [v for v in reads if v not in known]
        inputs = set(program.inputs)
        return _Crossing(
            inputs=tuple(v for v in wanted if v in inputs),
            raw=tuple(v for v in wanted if v not in inputs),
            bits=tuple(bits),
        )

    def forward(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results and the residuals (inputs first, then raw values, then encoded ones)."""
        position = {v: i for i, v in enumerate(self.joint.program.inputs[: self.joint.num_inputs])}
        through = [inputs[position[v]] for v in self.crossing.inputs]
        run = self._forward_jit if _concrete(inputs) else self._run_forward
        outputs, kept = run(list(inputs))
        return outputs, [*through, *kept]

    def _run_forward(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        machine = _Machine(self.joint, self.plan.graph)
        program = self.joint.program
        machine.env.update(zip(program.inputs[: self.joint.num_inputs], inputs, strict=True))
        machine.run(self.plan.schedule.forward)
        kept = [machine.env[v] for v in self.crossing.raw]
        kept += [machine.bits[v] for v in self.crossing.bits]
        return [machine.read(atom) for atom in self.joint.output_atoms], kept

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Returns one gradient per perturbed input; `cotangents` are those of the inexact results."""
        args = (list(residuals), list(cotangents))
        run = self._backward_jit if _concrete([*residuals, *cotangents]) else self._run_backward
        return run(*args)

    def _run_backward(self, residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        machine, crossing = _Machine(self.joint, self.plan.graph), self.crossing
        raw = (*crossing.inputs, *crossing.raw)
        machine.env.update(zip(raw, residuals[: len(raw)], strict=True))
        machine.bits.update(zip(crossing.bits, residuals[len(raw) :], strict=True))
        names = self.joint.program.inputs[self.joint.num_inputs :]
        machine.env.update(zip(names, cotangents, strict=True))
        machine.run(self.plan.schedule.backward)
        program = self.joint.program
        wanted = [v for v, flag in zip(program.inputs, self.joint.perturbed, strict=False) if flag]
        return [
            jnp.asarray(machine.read(atom), program.avals[v].dtype)
            for v, atom in zip(wanted, self.joint.gradient_atoms, strict=True)
        ]


def _concrete(values: Sequence[Any]) -> bool:
    return compat.top_level_trace() and not any(map(compat.is_tracer, values))


def _lowest(value: Value) -> int:
    """The smallest value an integer can have: codes count from it."""
    return value.range[0] if value.range is not None else 0


class _Machine:
    """Executes schedule steps in the current trace."""

    def __init__(self, joint: Joint, graph: Graph) -> None:
        self.joint = joint
        self.graph = graph  # the plan's, which says in which form a value is kept
        self.env: dict[int, Any] = dict(joint.program.constants)
        self.bits: dict[int, Any] = {}
        self.aside: dict[int, Any] = {}  # read by nothing but derivative rules
        self.missing: set[int] = set()  # and what cannot be made for them

    def read(self, atom: Any) -> Any:
        return atom.value if isinstance(atom, Literal) else self.env[atom]

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            getattr(self, f"_{step.action}")(step)

    def _compute(self, step: Step) -> None:
        equation = self.joint.program.equations[step.target]
        for _, rule in equation.rules:
            self._find(rule)
        self.env.update(self._results(equation, self.env))

    def _results(self, equation: Equation, env: Mapping[int, Any]) -> dict[int, Any]:
        operands = [a.value if isinstance(a, Literal) else env[a] for a in equation.inputs]
        results = list(compat.evaluate_equation(equation.source, operands, equation.site))
        for position, rule in equation.rules:
            known = ChainMap(self.env, self.aside)
            if all(isinstance(atom, Literal) or atom in known for atom in rule.inputs):
                inputs = [a.value if isinstance(a, Literal) else known[a] for a in rule.inputs]
                results[position] = with_rule(rule, results[position], inputs)
            else:
                results[position] = without_rule(rule, results[position])
        return dict(zip(equation.outputs, results, strict=True))

    def _find(self, rule: Rule) -> None:
        """Makes what a rule reads, as far as it can be made from what there is; nothing else reads it."""
        program, values = self.joint.program, self.graph.values
        known = ChainMap(self.env, self.aside)
        todo = [atom for atom in rule.inputs if isinstance(atom, int)]
        while todo:
            value = todo[-1]
            producer = values[value].producer
            if value in known or value in self.missing:
                todo.pop()
            elif producer is None or program.equations[producer].source.effects:
                self.missing.add(value)
            else:
                equation = program.equations[producer]
                rules = (a for _, rule in equation.rules for a in rule.inputs if isinstance(a, int))
                wanted = [v for v in (*equation.reads, *rules) if v not in known]
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
        self.env[step.target] = decode(
            form_of(value), self.bits[step.target], aval.shape, aval.dtype, offset=_lowest(value)
        )

    def _drop(self, step: Step) -> None:
        self.bits.pop(step.target, None)

    def _barrier(self, step: Step) -> None:
        # Inside `shard_map` a barrier gives all its results one type, so arrays that vary over different
        # mesh axes are tied separately.
        groups: dict[Any, list[tuple[dict[int, Any], int]]] = {}
        for value in step.values:
            place = self.bits if value in self.bits else self.env
            array = jax.tree.leaves(place[value])[0]  # an encoded value may be several arrays
            groups.setdefault(compat.varying_axes(array), []).append((place, value))
        for places in groups.values():
            kept = [place[v] for place, v in places]
            leaves, structure = jax.tree.flatten(kept)
            after = jax.tree.unflatten(structure, tied(leaves))
            for (place, v), array in zip(places, after, strict=True):
                place[v] = array


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """Residual arrays, with the staged program they belong to as static data."""

    def __init__(self, staged: Staged, arrays: Sequence[Any]) -> None:
        self.staged = staged
        self.arrays = arrays

    def tree_flatten(self) -> tuple[Sequence[Any], Staged]:
        return self.arrays, self.staged

    @classmethod
    def tree_unflatten(cls, staged: Staged, arrays: Sequence[Any]) -> _Residuals:
        return cls(staged, arrays)


class StagedFunction:
    """A function of flat arrays, planned when it is differentiated.

    Calling it without differentiation runs the program as it is. A plan is made once per perturbation pattern
    and abstract values of the inputs; `last_plan` is the one used last.
    """

    def __init__(
        self,
        primal: Program,
        planner: Planner,
        *,
        barriers: bool = True,
        inline_checkpoints: bool = True,
        multiplicity: int = 1,
        num_invariant: int = 0,
        num_carried: int = 0,
        name_values: bool = False,
        is_chunk: bool = False,
        is_body: bool = False,
    ) -> None:
        self.whole = primal
        self.primal, self.aside = split_planned(primal)
        self.with_gradient = inputs_with_gradient(self.primal)
        self.planner = planner
        self.barriers = barriers
        self.inline_checkpoints = inline_checkpoints
        self.multiplicity = multiplicity
        self.num_invariant = num_invariant
        self.num_carried = num_carried
        self.name_values = name_values
        self.is_chunk = is_chunk
        self.is_body = is_body
        self.last_plan: Plan | None = None
        self._staged: dict[Any, Staged] = {}
        self._plain_jit = jax.jit(partial(evaluate, self.primal))
        self._call = self._make()

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.combined(inputs, self._differentiated)

    def combined(
        self, inputs: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> list[Any]:
        """Returns all results: those of `run`, which executes `primal`, and those that were split off."""
        main = iter(run(inputs) if self.primal.outputs else ())
        side = iter(evaluate(self.aside, inputs) if self.aside.outputs else ())
        aside = set(self.aside.outputs)
        return [next(side if atom in aside else main) for atom in self.whole.outputs]

    def _differentiated(self, inputs: Sequence[Any]) -> list[Any]:
        # What hands no gradient on must not be asked for one: `jax.custom_vjp` makes it of zeros.
        inputs = [
            x if flag else jax.lax.stop_gradient(x)
            for x, flag in zip(inputs, self.with_gradient, strict=True)
        ]
        try:
            return self._call(*inputs)
        except TypeError as error:
            if "custom_vjp" in str(error) and "jvp" in str(error):
                raise DifferentiationError(
                    "forward-mode differentiation of the function itself (jax.jvp, jax.jacfwd) does "
                    "not go through remat's staged lowering, which is a jax.custom_vjp. Use reverse "
                    "mode (jax.grad, jax.vjp, jax.jacrev), or lowering='policy', which composes with "
                    "every transform, or remat_policy=None for this call."
                ) from error
            raise
        except NotImplementedError as error:
            if not compat.is_eager_in_shard_map(error):
                raise
            return evaluate(self.primal, inputs)

    def staged(self, inputs: Sequence[Any], perturbed: tuple[bool, ...]) -> Staged:
        """Returns the planned program for inputs like these, making it if there is none yet."""
        check_differentiable(self.primal, perturbed)
        perturbed = tuple(p and flag for p, flag in zip(perturbed, self.with_gradient, strict=True))
        key = (perturbed, tuple(map(jax.typeof, inputs)), compat.trace_context())
        found = self._staged.get(key)
        if found is None:
            with planning() if self.planner.takes_long else nullcontext():
                found = self._plan(inputs, perturbed)
                ended_early = interrupted()
            passing = any(map(compat.is_tracer, found.joint.program.constants.values()))
            if not passing and not ended_early:
                self._staged[key] = found
        self.last_plan = found.plan
        return found

    def _plan(self, inputs: Sequence[Any], perturbed: tuple[bool, ...]) -> Staged:
        if self.planner.has_budget and has_symbols(self.primal):
            raise BudgetError(
                "a budget cannot be held for shapes with symbolic dimensions: how many bytes the function takes is "
                "not known before they are. Leave budget= out, or export the function for concrete shapes."
            )
        planner = self.planner.begin()
        while True:
            staged = self._plan_once(inputs, perturbed, planner)
            if not planner.again(staged.plan):
                break
        plan = planner.finish(staged.plan)
        if not self.is_body:  # a body's plan is part of the whole one
            warn_of_opaque(plan)
        return Staged(staged.joint, plan)

    def _plan_once(
        self, inputs: Sequence[Any], perturbed: tuple[bool, ...], planner: Planner
    ) -> Staged:
        traces = _Traces(self, inputs, perturbed, planner)
        joint = traces.joint(frozenset())
        if not self.name_values:  # a policy of jax chooses among the values of the program as it is
            menu = Menu(joint, () if has_symbols(self.primal) else RULES, traces)
            joint = menu.joint(planner.sites(menu))
        loops = traces.loops(joint)
        joint = replace(
            joint, graph=_with_loops(joint.graph, loops.renamed, repeatable=self.is_chunk)
        )
        plan = planner.plan(joint.graph, barriers=self.barriers)
        nested = loops.plans()
        planner.confirm(plan, nested)
        if nested and not plan.loops:
            plan = with_loops(plan, nested)
        return Staged(joint, plan)

    @property
    def _input_avals(self) -> list[Any]:
        return [self.primal.avals[v] for v in self.primal.inputs]

    def _make(self) -> Callable[..., list[Any]]:
        primal = self.primal

        @jax.custom_vjp
        def call(*inputs: Any) -> list[Any]:
            return self._plain_jit(inputs) if _concrete(inputs) else evaluate(primal, inputs)

        def forward(*inputs: Any) -> tuple[list[Any], _Residuals]:
            values = [x.value for x in inputs]
            perturbed = tuple(
                bool(x.perturbed) and jnp.issubdtype(aval.dtype, jnp.inexact)
                for x, aval in zip(inputs, self._input_avals, strict=True)
            )
            staged = self.staged(values, perturbed)
            outputs, residuals = staged.forward(values)
            return outputs, _Residuals(staged, residuals)

        def backward(residuals: _Residuals, cotangents: Sequence[Any]) -> tuple[Any, ...]:
            staged = residuals.staged
            given = [cotangents[i] for i in staged.joint.cotangent_outputs]
            gradients = iter(staged.backward(residuals.arrays, list(map(_instantiate, given))))
            return tuple(next(gradients) if flag else None for flag in staged.joint.perturbed)

        call.defvjp(forward, backward, symbolic_zeros=True)
        return call


class _Traces:
    """Joint programs of a function: as it is, and with other implementations of its operators."""

    def __init__(
        self,
        room: StagedFunction,
        inputs: Sequence[Any],
        perturbed: tuple[bool, ...],
        planner: Planner,
    ) -> None:
        self.room = room
        self.inputs = inputs
        self.perturbed = perturbed
        self.planner = planner
        self._made: dict[frozenset[str], tuple[Joint, _Loops]] = {}

    @property
    def names(self) -> frozenset[str]:
        """As `remat.rewrite.menu.Operators`."""
        registered = implementations()
        return frozenset(name for i in registered for name in (i.id, i.operator))

    def sites(self, wanted: Implementations) -> tuple[Site, ...]:
        """As `remat.rewrite.menu.Operators`."""
        return substitution.sites_in(self.room.primal, wanted)

    def joint(self, names: frozenset[str]) -> Joint:
        """As `remat.rewrite.menu.Operators`."""
        if names not in self._made:
            room, loops = self.room, _Loops(self.room, self.planner)
            primal = substitution.substituted(room.primal, names) if names else room.primal
            joint = trace_joint(
                primal,
                self.inputs,
                self.perturbed,
                loop=loops.run,
                name_values=room.name_values,
                multiplicity=room.multiplicity,
                num_invariant=room.num_invariant,
                num_carried=room.num_carried,
            )
            self._made[names] = (joint, loops)
        return self._made[names][0]

    def loops(self, joint: Joint) -> _Loops:
        """Returns the loops of one of the joint programs, rewritten or not."""
        placed = frozenset(name for name in joint.graph.sites if "/" in name)
        return self._made[placed][1]


class _Loops:
    """Runs the loops of a function with bodies that are planned, and remembers their plans."""

    def __init__(self, room: StagedFunction, planner: Planner) -> None:
        self.room = room
        self.planner = planner
        self.found: dict[str, tuple[int, int, StagedFunction]] = {}
        self.renamed: dict[str, str] = {}
        self._rests = itertools.count(
            sum(compat.scan_parts(e.source) is not None for e in room.primal.equations)
        )

    def run(
        self, path: str, _: Any, parts: compat.ScanParts, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """A `remat.trace.joint.LoopHandler`."""
        inner = self.planner.child(path)
        # A policy of jax chooses values by name; it cannot say that a loop is cut.
        trips = NO_CHUNKS if self.room.name_values else inner.chunk_trips(parts.length)
        if not NO_CHUNKS < trips < parts.length:
            return self._whole(path, inner, parts, operands)
        program = program_of(
            compat.trace_chunk(parts, trips, operands), keep=substitution.called_by_name()
        )
        chunk = self._function(program, inner, parts, parts.length // trips, is_chunk=True)
        self.found[path] = (parts.length // trips, trips, chunk)
        return compat.run_chunks(parts, trips, chunk, partial(self._rest, path), operands)

    def _whole(
        self, path: str, planner: Planner, parts: compat.ScanParts, operands: Sequence[Any]
    ) -> Sequence[Any]:
        body = program_of(
            parts.body,
            inline_checkpoints=self.room.inline_checkpoints,
            keep=substitution.called_by_name(),
        )
        length = compat.with_sizes(parts.length, STAND_IN)
        function = self._function(body, planner, parts, length)
        self.found[path] = (length, 1, function)
        return compat.run_scan(parts, function, operands)

    def _rest(self, path: str, parts: compat.ScanParts, operands: Sequence[Any]) -> Sequence[Any]:
        # Named scopes tell loops apart by number; the rest's is one that no loop of the function has.
        scope, rest = f"scan{next(self._rests)}", rest_of(path)
        self.renamed[scope] = rest
        with jax.named_scope(LOOP_SCOPE + scope):
            return self._whole(rest, self.planner.child(rest), parts, operands)

    def _function(
        self,
        program: Program,
        planner: Planner,
        parts: compat.ScanParts,
        multiplicity: int,
        *,
        is_chunk: bool = False,
    ) -> StagedFunction:
        return StagedFunction(
            program,
            planner,
            barriers=False,
            is_body=True,
            inline_checkpoints=self.room.inline_checkpoints,
            multiplicity=multiplicity,
            num_invariant=parts.num_consts,
            num_carried=parts.num_carry,
            name_values=self.room.name_values,
            is_chunk=is_chunk,
        )

    def plans(self) -> tuple[LoopPlan, ...]:
        """Returns the plans of the loops that were differentiated."""
        return tuple(
            LoopPlan(path, length, function.last_plan, chunk)
            for path, (length, chunk, function) in self.found.items()
            if function.last_plan is not None
        )


def _with_loops(graph: Graph, renamed: Mapping[str, str], *, repeatable: bool) -> Graph:
    """Returns the graph with loops under their paths; `repeatable` loops may run again in the backward pass."""
    if not (renamed or repeatable):
        return graph

    def changed(op: Op) -> Op:
        if op.loop is None:
            return op
        path = renamed.get(op.loop, op.loop)
        again = repeatable and op.phase == "forward"
        return replace(
            op,
            loop=path,
            recomputable=op.recomputable or again,
            reason="" if again else op.reason,
        )

    plain = graph.plain
    return replace(
        graph,
        ops=tuple(map(changed, graph.ops)),
        plain=None if plain is None else _with_loops(plain, renamed, repeatable=repeatable),
    )


def _instantiate(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return compat.zeros_of(cotangent.aval)
    return cotangent
