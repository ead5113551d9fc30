"""A call that is planned only when it is differentiated, whatever is done to it before.

`jax.custom_jvp` would say the same, but its rule may not call `jax.jvp` of something with a `jax.custom_vjp` in it
once the call was batched. So this is a primitive of its own: batching a call gives a call of the batched program,
and differentiating one leaves jax with what the plan made of it, each time for the operands that are differentiated
then. A `jax.custom_vjp` can do neither:

- In a jaxpr, jax unpacks what each of its forward rules kept as if it were of the one traced last, so that rules
  which keep other arrays for other operands give wrong gradients.
- Batched, it hands the cotangent of a result that all examples share to each of them, and adds up what they make
  of it: jax 0.10 gives gradients that are wrong by the number of examples, jax 0.12 an error. And the gradient of
  an operand that all share is made for every example before it is added up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify as _checkify
from jax._src.interpreters import batching as _batching
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from remat.core.errors import DifferentiationError

__all__ = ["DEFERRED", "Rule", "call_deferred"]

DEFERRED = "remat_deferred"
"""Name of the primitive."""

_Function = Callable[..., Sequence[Any]]
_deferred_p = Primitive(DEFERRED)
_deferred_p.multiple_results = True


@dataclass(frozen=True)
class Rule:
    """What a call is when it is differentiated.

    Attributes:
        planned: returns the function to be differentiated with respect to some of its arguments; called with every
            differentiation, and not before. It may not close over tracers.
        batched: makes the rule of the batched program, a jaxpr; called with what tells it apart from other batched
            programs of the same call. None if what is planned is to be batched as it is.
        shares: whether that may be done to results that are the same for all examples.
        reached: for every result whether it depends on the arguments that are differentiated. The others are as in
            a program that is not: what has no derivative may be done to them. None if all do.
    """

    planned: Callable[[tuple[bool, ...]], _Function]
    batched: Callable[[Hashable, Any], Rule] | None = None
    shares: bool = True
    reached: Callable[[tuple[bool, ...]], tuple[bool, ...]] | None = None


def call_deferred(plain: _Function, rule: Rule, inputs: Sequence[Any]) -> list[Any]:
    """Returns the arrays `plain(*inputs)`; where they are differentiated, what `rule.planned` returns makes them.

    Args:
        plain: a function of arrays that returns arrays. It may not close over tracers.
        rule: what is done when it is differentiated.
        inputs: arrays or tracers.
    """
    return _deferred_p.bind(*inputs, jaxpr=jax.make_jaxpr(plain)(*inputs), rule=rule)


@_deferred_p.def_impl
def _run(*inputs: Any, jaxpr: Any, rule: Rule) -> list[Any]:
    del rule
    return jaxpr_as_fun(jaxpr)(*inputs)


@_deferred_p.def_effectful_abstract_eval
def _results(*avals: Any, jaxpr: Any, rule: Rule) -> tuple[list[Any], Any]:
    del avals, rule
    return jaxpr.out_avals, jaxpr.effects


def _of_some(function: _Function, inputs: Sequence[Any], places: Sequence[int]) -> _Function:
    """The function of the operands at some places, the others given."""

    def of_some(*values: Any) -> list[Any]:
        full = list(inputs)
        for index, value in zip(places, values, strict=True):
            full[index] = value
        return list(function(*full))

    return of_some


def _differentiate(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, rule: Rule
) -> tuple[list[Any], list[Any]]:
    del jaxpr
    active = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    perturbed = tuple(i in active for i in range(len(primals)))
    of_active = _of_some(rule.planned(perturbed), primals, active)
    outs, made = jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
    reached = rule.reached(perturbed) if rule.reached else (True,) * len(outs)
    return outs, [
        t
        if flag and jnp.issubdtype(jnp.result_type(out), jnp.inexact)
        else ad.Zero(jax.typeof(out).to_tangent_aval())
        for out, t, flag in zip(outs, made, reached, strict=True)
    ]


def _batch(
    axis: Any, inputs: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, rule: Rule
) -> tuple[list[Any], Sequence[Any]]:
    batched, out_dims = _batching.batch_jaxpr2(jaxpr, axis, tuple(dims))
    if rule.batched is not None:
        key = axis, tuple(dims), tuple(map(jax.typeof, inputs))
        made = rule.batched(key, batched)
    else:
        planned = rule.planned
        made = replace(rule, planned=lambda perturbed: over_axis(planned(perturbed)))

    def over_axis(function: _Function) -> _Function:
        if not rule.shares and any(
            dim is None and jnp.issubdtype(aval.dtype, jnp.inexact)
            for dim, aval in zip(out_dims, jaxpr.out_avals, strict=True)
        ):
            raise DifferentiationError(
                "a function with a plan of its own (remat_policy=plan) was differentiated through jax.vmap, and a "
                "result of it is the same for all examples: it depends on no mapped argument. The plan is of one "
                "example. Give remat_policy a policy, which plans all examples together, wrap the function under "
                "jax.vmap, or return that result of another function."
            )
        return jax.vmap(
            lambda *values: tuple(function(*values)),
            in_axes=tuple(dims),
            out_axes=tuple(out_dims),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )

    return _deferred_p.bind(*inputs, jaxpr=batched, rule=made), out_dims


def _transpose(cotangents: Sequence[Any], *inputs: Any, jaxpr: Any, rule: Rule) -> list[Any]:
    """Nothing was differentiated: what is linear is transposed as it stands."""
    del rule
    linear = [i for i, value in enumerate(inputs) if ad.is_undefined_primal(value)]
    of_linear = _of_some(jaxpr_as_fun(jaxpr), inputs, linear)
    shapes = [jax.ShapeDtypeStruct(inputs[i].aval.shape, inputs[i].aval.dtype) for i in linear]
    made = jax.linear_transpose(of_linear, *shapes)(list(map(ad.instantiate_zeros, cotangents)))
    found: list[Any] = [None] * len(inputs)
    for index, value in zip(linear, made, strict=True):
        found[index] = value
    return found


def _check(*operands: Any, jaxpr: Any, rule: Rule) -> Any:
    """What `checkify` makes of a call: its checks are those of the function as it is."""
    del rule
    # Before the operands stand the error so far and what is looked for, since jax 0.12 behind a context.
    context, (error, enabled, *values) = operands[:_NUM_CONTEXTS], operands[_NUM_CONTEXTS:]
    return _checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *values)


_NUM_CONTEXTS = int("ctx" in inspect.signature(_checkify.checkify_jaxpr).parameters)

ad.primitive_transposes[_deferred_p] = _transpose
ad.primitive_jvps[_deferred_p] = _differentiate
batching.fancy_primitive_batchers[_deferred_p] = _batch
_checkify.error_checks[_deferred_p] = _check
# Where jax takes its own high-level operators apart, which 0.12 has in `interp` and `custom_root`, nobody
# differentiates any more.
_deferred_p.to_lojax = _run
mlir.register_lowering(_deferred_p, mlir.lower_fun(_run, multiple_results=True))
