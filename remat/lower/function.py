"""Staged lowering: a function that is planned when it is differentiated, as a `jax.custom_vjp`.

Its forward rule runs the forward half of the planned program (`remat.lower.staged`) and returns the kept values as
residuals; its backward rule runs the backward half. The plan is made (`remat.lower.pipeline`) for the inputs that
are really perturbed, and of what is batched before for the batched program (`remat.compat.deferred`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from remat import compat
from remat.compat.deferred import Rule, call_deferred
from remat.core.errors import DifferentiationError
from remat.core.interrupt import interrupted, planning
from remat.lower.confirm import plan_and_confirm
from remat.lower.pipeline import Room
from remat.lower.split import inputs_with_gradient, results_reached, split_planned
from remat.lower.staged import Staged, are_concrete
from remat.planning.planners import PlanPlanner
from remat.planning.protocol import Planner
from remat.plans.plan import Plan
from remat.rewrite import substitution
from remat.trace.joint import check_differentiable
from remat.trace.program import (
    Held,
    Program,
    evaluate,
    held_arrays,
    holds_the_same,
    program_of,
)

__all__ = ["StagedFunction"]


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

    Args:
        program: the function, flat.
        planner: plans it.
        **settings: fields of `remat.lower.pipeline.Room` but the program.
    """

    def __init__(self, program: Program, planner: Planner, **settings: Any) -> None:
        self.whole = program
        self.settings = settings
        self.primal, self.aside = split_planned(program)
        self.room = Room(self.primal, **settings)
        self.with_gradient = inputs_with_gradient(self.primal)
        self.planner = planner
        self.last_plan: Plan | None = None
        self._staged: dict[Any, Staged] = {}
        self._held: dict[Any, Held] = {}  # by derivative rules: of what is in `_staged`
        self._reach: dict[tuple[bool, ...], tuple[bool, ...]] = {}
        self._batched: dict[Hashable, StagedFunction] = {}
        self._origin: StagedFunction | None = None  # what this was made of by batching
        self._plain_jit = jax.jit(partial(evaluate, self.primal))
        self._call = self._make()

    def __call__(self, *inputs: Any) -> list[Any]:
        now = compat.differentiated_now(inputs)
        # A `jax.custom_vjp` would hand a derivative on to results that have none.
        if now is None or (any(now) and not all(self._reached(now))):
            return self.combined(inputs, self._deferred)
        return self._differentiated(*inputs)

    def combined(
        self, inputs: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> list[Any]:
        """Returns all results: those of `run`, which executes `primal`, and those that were split off."""
        # What has no results may have side effects: a loop's body that only prints, say.
        main = iter(run(inputs) if self.primal.equations or self.primal.outputs else ())
        side = iter(evaluate(self.aside, inputs))
        aside = set(self.aside.outputs)
        return [next(side if atom in aside else main) for atom in self.whole.outputs]

    def _differentiated(self, *inputs: Any) -> list[Any]:
        return self.combined(inputs, lambda values: self._called(*self._with_gradient(values)))

    def _deferred(self, inputs: Sequence[Any]) -> list[Any]:
        # Tags are what the plan of a batched program finds again.
        return call_deferred(
            lambda *values: evaluate(self.primal, values, tags=True),
            self._rule,
            self._with_gradient(inputs),
        )

    @property
    def _rule(self) -> Rule:
        # What was planned for one example, or as part of a loop, is what it is.
        if isinstance(self.planner, PlanPlanner) or self.room.is_body:
            return Rule(lambda perturbed: self._called, shares=False, reached=self._reached)
        return Rule(lambda perturbed: self._called, self._rule_of_batched, reached=self._reached)

    def _reached(self, perturbed: tuple[bool, ...]) -> tuple[bool, ...]:
        """For every result of `primal` whether it depends on what is differentiated."""
        key = tuple(p and flag for p, flag in zip(perturbed, self.with_gradient, strict=True))
        if key not in self._reach:
            self._reach[key] = results_reached(self.primal, key)
        return self._reach[key]

    def _rule_of_batched(self, key: Hashable, jaxpr: Any) -> Rule:
        """The rule of a batched program: planned as a whole, as it runs."""
        key = key, compat.trace_context()
        made = self._batched.get(key)
        if made is None:
            program = program_of(
                jaxpr,
                inline_checkpoints=self.room.inline_checkpoints,
                keep=substitution.called_by_name(),
            )
            made = self._batched[key] = StagedFunction(program, self.planner, **self.settings)
            made._origin = self
        return Rule(
            lambda perturbed: made._differentiated,
            made._rule_of_batched,
            reached=partial(results_reached, made.whole),
        )

    def _with_gradient(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs; what hands no gradient on must not be asked for one: `jax.custom_vjp` makes it of zeros."""
        return [
            x if flag else jax.lax.stop_gradient(x)
            for x, flag in zip(inputs, self.with_gradient, strict=True)
        ]

    def _called(self, *inputs: Any) -> list[Any]:
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
                found = plan_and_confirm(
                    self.room, inputs, perturbed, self.planner, StagedFunction, self.aside
                )
                ended_early = interrupted()
            passing = any(map(compat.is_tracer, found.joint.program.constants.values()))
            if not passing and not ended_early:
                self._staged[key] = found
                known = {id(c) for c in self.primal.constants.values()}
                self._held[key] = held_arrays(found.joint.program, known)
        function: StagedFunction | None = self
        while function is not None:
            function.last_plan = found.plan
            function = function._origin
        return found

    @property
    def is_current(self) -> bool:
        """Whether the NumPy arrays that derivative rules close over hold what they held when they were traced."""
        made = (function.is_current for function in self._batched.values())
        return all(map(holds_the_same, self._held.values())) and all(made)

    @property
    def _input_avals(self) -> list[Any]:
        return [self.primal.avals[v] for v in self.primal.inputs]

    def _make(self) -> Callable[..., list[Any]]:
        primal = self.primal

        @jax.custom_vjp
        def call(*inputs: Any) -> list[Any]:
            return self._plain_jit(inputs) if are_concrete(inputs) else evaluate(primal, inputs)

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
            given = (cotangents[i] for i in staged.joint.cotangent_outputs)
            known = [None if isinstance(x, SymbolicZero) else x for x in given]
            gradients = iter(staged.backward(residuals.arrays, known))
            return tuple(next(gradients) if flag else None for flag in staged.joint.perturbed)

        call.defvjp(forward, backward, symbolic_zeros=True)
        return call
