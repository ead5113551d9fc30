"""Equations as they are run: one alone, in its scope; and equations of our own put behind others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
from jax._src import core as _core
from jax._src import source_info_util as _source_info

from remat.compat.barriers import tied
from remat.compat.contexts import CPU_UNDOES_REMATERIALIZATION
from remat.compat.equations import has_rule, source_of
from remat.compat.types import array_like

__all__ = [
    "at_site",
    "barrier_after",
    "comparison_like",
    "evaluate_equation",
    "identity_of",
    "rounding_after",
]

JaxprEqn = Any
_OURS = "remat"  # the parameter that says how an equation of our own is run


def at_site(eqn: JaxprEqn, site: JaxprEqn | None = None) -> AbstractContextManager[Any]:
    """Returns a context in which operations count as coming from where `eqn` does.

    Args:
        eqn: the equation whose place to take.
        site: the call that `eqn` was inlined from; it gives the outer name scope, and the source line if
            `eqn` itself lies inside jax.
    """
    name_stack = _source_info.current_name_stack()
    if site is not None:
        name_stack = name_stack + site.source_info.name_stack
    traceback = eqn.source_info.traceback
    if site is not None and not source_of(eqn):
        traceback = site.source_info.traceback
    return _source_info.user_context(traceback, name_stack=name_stack + eqn.source_info.name_stack)


def evaluate_equation(
    eqn: JaxprEqn, inputs: Sequence[Any], site: JaxprEqn | None = None
) -> Sequence[Any]:
    """Executes one equation on `inputs` in the current trace, keeping its name scope and context."""
    if _OURS in eqn.params:
        with at_site(eqn, site):
            return [eqn.params[_OURS](x) for x in inputs]
    if has_rule(eqn):  # which is handed what it is called with, and expects arrays of jax
        inputs = [_as_array(x, v.aval) for x, v in zip(inputs, eqn.invars, strict=True)]
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    extra: Sequence[Any] = ()
    if isinstance(bind_params, tuple):  # before jax 0.10.1: (functions, params)
        extra, bind_params = bind_params
    with at_site(eqn, site), eqn.ctx.manager:
        out = eqn.primitive.bind(*extra, *inputs, **bind_params)
    return out if eqn.primitive.multiple_results else (out,)


def _as_array(value: Any, aval: Any) -> Any:
    """A constant of NumPy, or a number, as an array of jax."""
    return value if isinstance(value, jax.Array) else array_like(value, aval)


def comparison_like(eqn: JaxprEqn, name: str, invars: Sequence[Any]) -> JaxprEqn:
    """Returns the equation of another comparison, `ge` or `le`, in the place of one, with other operands."""
    primitive = {"ge": jax.lax.ge_p, "le": jax.lax.le_p}[name]
    return eqn.replace(primitive=primitive, invars=list(invars))


def barrier_after(eqn: JaxprEqn, position: int) -> JaxprEqn:
    """Returns the equation that makes a result of another one a single instance in memory."""
    return _after(eqn, position, jax.lax.optimization_barrier_p, {_OURS: _single_instance})


def rounding_after(eqn: JaxprEqn, position: int) -> JaxprEqn:
    """Returns the equation that has a result of another one rounded, fused with what reads it or not."""
    info = jax.numpy.finfo(eqn.outvars[position].aval.dtype)
    bits = {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
    return _after(eqn, position, jax.lax.reduce_precision_p, {**bits, _OURS: _rounded})


def identity_of(eqn: JaxprEqn, position: int) -> JaxprEqn:
    """Returns an equation that hands on what is a result of another one."""
    return _after(eqn, position, jax.lax.copy_p, {_OURS: lambda x: x})


def _after(eqn: JaxprEqn, position: int, primitive: Any, params: dict[str, Any]) -> JaxprEqn:
    var = eqn.outvars[position]
    return eqn.replace(
        primitive=primitive, invars=[var], outvars=[var], params=params, effects=_core.no_effects
    )


def _single_instance(x: Any) -> Any:
    """Returns an array that XLA makes once, in memory, for all that reads it."""
    if CPU_UNDOES_REMATERIALIZATION and jax.default_backend() == "cpu":
        return _rounded(x)  # there XLA:CPU deletes barriers, or cannot compile those in loops
    return tied([x])[0]


@partial(jax.jit, inline=True)  # where results are checked for NaNs, only what comes out is
def _rounded(x: Any) -> Any:
    """Returns an array whose elements XLA rounds: it does not contract a product that made them with a sum.

    It does not know that an array selected by `x == x` is `x`; `reduce_precision` to the same precision it removes.
    """
    if jax.numpy.iscomplexobj(x):
        return jax.lax.complex(_rounded(x.real), _rounded(x.imag))
    return jax.numpy.where(x == x, x, jax.numpy.full((), jax.numpy.nan, x.dtype))
