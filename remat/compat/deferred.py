"""A call that is planned only when it is differentiated, whatever is done to it before.

`jax.custom_jvp` would say the same, but its rule may not call `jax.jvp` of something with a `jax.custom_vjp` in it
once the call was batched. So this is a primitive of its own: batching a call gives a call of the batched functions,
and differentiating one leaves jax with what the plan made of it, each time for the operands that are differentiated
then. A `jax.custom_vjp` in a jaxpr cannot do that: jax unpacks what each of its forward rules kept as if it were of
the one traced last, so that rules which keep other arrays for other operands give wrong gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify as _checkify
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

__all__ = ["DEFERRED", "call_deferred"]

DEFERRED = "remat_deferred"
"""Name of the primitive."""

_Function = Callable[..., Sequence[Any]]
_Planned = Callable[[tuple[bool, ...]], _Function]
_deferred_p = Primitive(DEFERRED)
_deferred_p.multiple_results = True


def call_deferred(plain: _Function, planned: _Planned, inputs: Sequence[Any]) -> list[Any]:
    """Returns the arrays `plain(*inputs)`; where they are differentiated they are `planned(perturbed)(*inputs)`.

    Args:
        plain: a function of arrays that returns arrays.
        planned: returns the same function to be differentiated with respect to some of its arguments; called with
            every differentiation, and not before.
        inputs: arrays or tracers. Neither function may close over tracers.
    """
    return _deferred_p.bind(*inputs, jaxpr=jax.make_jaxpr(plain)(*inputs), planned=planned)


@_deferred_p.def_impl
def _run(*inputs: Any, jaxpr: Any, planned: _Planned) -> list[Any]:
    del planned
    return jaxpr_as_fun(jaxpr)(*inputs)


@_deferred_p.def_effectful_abstract_eval
def _results(*avals: Any, jaxpr: Any, planned: _Planned) -> tuple[list[Any], Any]:
    del avals, planned
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
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, planned: _Planned
) -> tuple[list[Any], list[Any]]:
    del jaxpr
    active = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    perturbed = tuple(i in active for i in range(len(primals)))
    of_active = _of_some(planned(perturbed), primals, active)
    outs, made = jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
    return outs, [
        t
        if jnp.issubdtype(jnp.result_type(out), jnp.inexact)
        else ad.Zero(jax.typeof(out).to_tangent_aval())
        for out, t in zip(outs, made, strict=True)
    ]


def _batch(
    axis: Any, inputs: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, planned: _Planned
) -> tuple[list[Any], list[int]]:
    def over_axis(function: _Function) -> _Function:
        return jax.vmap(
            function,
            in_axes=tuple(dims),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )

    outs = call_deferred(
        over_axis(jaxpr_as_fun(jaxpr)), lambda perturbed: over_axis(planned(perturbed)), inputs
    )
    return outs, [0] * len(outs)


def _transpose(cotangents: Sequence[Any], *inputs: Any, jaxpr: Any, planned: _Planned) -> list[Any]:
    """Nothing was differentiated: what is linear is transposed as it stands."""
    del planned
    linear = [i for i, value in enumerate(inputs) if ad.is_undefined_primal(value)]
    of_linear = _of_some(jaxpr_as_fun(jaxpr), inputs, linear)
    shapes = [jax.ShapeDtypeStruct(inputs[i].aval.shape, inputs[i].aval.dtype) for i in linear]
    made = jax.linear_transpose(of_linear, *shapes)(list(map(ad.instantiate_zeros, cotangents)))
    found: list[Any] = [None] * len(inputs)
    for index, value in zip(linear, made, strict=True):
        found[index] = value
    return found


def _check(*operands: Any, jaxpr: Any, planned: _Planned) -> Any:
    """What `checkify` makes of a call: its checks are those of the function as it is."""
    del planned
    # Before the operands stand the error so far and what is looked for, since jax 0.12 behind a context.
    context, (error, enabled, *values) = operands[:_NUM_CONTEXTS], operands[_NUM_CONTEXTS:]
    return _checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *values)


_NUM_CONTEXTS = int("ctx" in inspect.signature(_checkify.checkify_jaxpr).parameters)

ad.primitive_transposes[_deferred_p] = _transpose
ad.primitive_jvps[_deferred_p] = _differentiate
batching.fancy_primitive_batchers[_deferred_p] = _batch
_checkify.error_checks[_deferred_p] = _check
mlir.register_lowering(_deferred_p, mlir.lower_fun(_run, multiple_results=True))
