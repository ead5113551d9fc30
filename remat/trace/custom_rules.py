"""Derivative rules of calls that were dissolved, for what is differentiated a second time.

A joint program is made after differentiation: what a `jax.custom_jvp` or `jax.custom_vjp` says has been used, and
the calls that are left are dissolved into their operators, which plans can keep and repeat one by one. But whoever
differentiates the gradient differentiates the joint program, and then these calls have a rule again. So the result
of such a call goes through an identity whose derivative is that of the call. Nothing of it is left in a compiled
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from remat import compat
from remat.core.errors import DifferentiationError

__all__ = ["Rule", "with_rule", "without_rule"]


@dataclass(frozen=True, eq=False)
class Rule:
    """A dissolved call, of which a value is a result.

    Attributes:
        source: jax's equation of the call.
        inputs: its operands, value ids or literals.
        result: which of its results the value is.
        site: as in `remat.trace.program.Equation`.
    """

    source: Any
    inputs: tuple[Any, ...]
    result: int
    site: Any


def with_rule(rule: Rule, array: Any, inputs: Sequence[Any]) -> Any:
    """Returns `array`, the call's result for `inputs`, as something that is differentiated like the call."""
    return (_by_jvp if compat.has_jvp_rule(rule.source) else _by_vjp)(rule, array, *inputs)


def _call(rule: Rule, *inputs: Any) -> Any:
    return compat.evaluate_equation(rule.source, inputs, rule.site)[rule.result]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_jvp(rule: Rule, array: Any, *inputs: Any) -> Any:
    return array


@_by_jvp.defjvp
def _jvp(rule: Rule, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    _, tangent = jax.jvp(partial(_call, rule), tuple(primals[1:]), tuple(tangents[1:]))
    return _by_jvp(rule, *primals), tangent


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_vjp(rule: Rule, array: Any, *inputs: Any) -> Any:
    return array


def _forward(rule: Rule, array: Any, *inputs: Any) -> tuple[Any, Any]:
    return _by_vjp(rule, array, *inputs), inputs


def _backward(rule: Rule, inputs: Sequence[Any], cotangent: Any) -> tuple[Any, ...]:
    _, pull = jax.vjp(partial(_call, rule), *inputs)
    return (jnp.zeros_like(cotangent), *pull(cotangent))


_by_vjp.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_rule(rule: Rule, array: Any) -> Any:
    """Returns `array` as something that cannot be differentiated, for want of the call's operands."""
    return array


@without_rule.defjvp
def _refusal(rule: Rule, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    where = compat.source_of(rule.source)
    raise DifferentiationError(
        f"the gradient is differentiated again, through a function with a derivative rule of its own"
        f"{where and f' at {where}'} whose result the plan makes again from what lies inside of it. Use "
        "lowering='policy', which composes with every transform, or remat_policy=None for this call."
    )
