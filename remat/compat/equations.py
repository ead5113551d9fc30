"""Equations of jaxprs as they are read: names, operands, bodies, tags, where they came from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import source_info_util as _source_info
from jax.extend import core as _extend_core
from jax.interpreters import ad as _ad

from remat.compat.deferred import DEFERRED
from remat.compat.types import shape_of

__all__ = [
    "CHECKPOINT_NAMES",
    "INLINE_ALWAYS",
    "JIT_NAMES",
    "avals_of",
    "call_body",
    "called_function_name",
    "calls_derivative_rules",
    "checkpoint_name_of",
    "checkpoint_names",
    "has_jvp_rule",
    "has_ordered_effects",
    "has_rule",
    "holds_backward_pass",
    "holds_references",
    "is_literal",
    "name_of",
    "open_jaxpr",
    "plain_params",
    "scope_of",
    "source_of",
    "sub_jaxprs",
    "traced_value_of",
    "uses_references",
]

JaxprEqn = Any

# Names under which jax has shipped the same call-like primitives.
INLINE_ALWAYS = frozenset({"closed_call", "core_call", "core_closed_call", "call", "eval_jaxpr"})
JIT_NAMES = frozenset({"jit", "pjit"})
CHECKPOINT_NAMES = frozenset({"checkpoint", "remat", "remat2", "remat3"})
_CUSTOM_NAMES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
# What has a rule for derivatives that says that there are none, or one that does not hold for every kernel.
_WITHOUT_DERIVATIVE = frozenset({"ffi_call", "io_callback", "pallas_call", "pure_callback"})
# What `jax.lax.platform_dependent` names that no program is lowered for, but a kernel in it.
_KERNEL_PLATFORMS = frozenset({"mosaic"})
# One primitive that stands for many operators, each an object in its parameters; jax's name for a few of these,
# and what the same operators are called where they are primitives.
_HI_NAME = "call_hi_primitive"
_HI_OPERATORS = {
    "RematTraced": "checkpoint",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
}


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr atom is an inlined constant."""
    return isinstance(atom, _extend_core.Literal)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns `(jaxpr, consts)` of a closed jaxpr; jax 0.11 merges `ClosedJaxpr` into `Jaxpr`."""
    if hasattr(jaxpr, "consts"):
        return getattr(jaxpr, "jaxpr", jaxpr), list(jaxpr.consts)
    return jaxpr, []


def _operator_of(eqn: JaxprEqn) -> Any | None:
    """Returns the operator that a `call_hi_primitive` stands for, None for every other equation."""
    return eqn.params.get("_prim") if eqn.primitive.name == _HI_NAME else None


def name_of(eqn: JaxprEqn) -> str:
    """Returns the name of an equation's primitive, or of the operator that the primitive stands for."""
    operator = _operator_of(eqn)
    if operator is None:
        return eqn.primitive.name
    name = type(operator).__name__
    return _HI_OPERATORS.get(name, name)


def avals_of(eqn: JaxprEqn) -> tuple[list[Any], list[Any]]:
    """Returns the abstract values of an equation's operands and results."""
    return [getattr(v, "aval", None) for v in eqn.invars], [v.aval for v in eqn.outvars]


def _params_of(eqn: JaxprEqn) -> Mapping[str, Any]:
    """Returns an equation's parameters, or those of the operator that its primitive stands for."""
    operator = _operator_of(eqn)
    return eqn.params if operator is None else operator.params


def _expanded(eqn: JaxprEqn) -> Any | None:
    """Returns the jaxpr of a `call_hi_primitive` in terms of primitives, None if it has none for these operands."""
    params = eqn.params

    def expand(*operands: Any) -> Sequence[Any]:
        return eqn.primitive.to_lojax(*operands, **params)

    try:
        with eqn.ctx.manager:
            return jax.make_jaxpr(expand)(*(shape_of(v.aval) for v in eqn.invars))
    except (
        AttributeError,
        NotImplementedError,
        TypeError,
    ):  # not made of arrays, or has no expansion
        return None


def sub_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """Returns the jaxprs in an equation's parameters, closed ones kept closed."""
    found = []
    for param in _params_of(eqn).values():
        items = param if isinstance(param, (tuple, list)) else (param,)
        found += [p for p in items if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
    return found


def _unspecified(shardings: Any) -> bool:
    return all(type(s).__name__ == "UnspecifiedValue" or s is None for s in shardings)


def call_body(eqn: JaxprEqn, *, inline_checkpoints: bool, inline_custom: bool) -> Any | None:
    """Returns the jaxpr that an equation merely calls, or None when it must be kept whole.

    A `jit` with explicit shardings is kept: inlining would lose them. So is a call with a derivative rule around
    something without: whoever differentiates once more needs the rule.
    """
    name, params = name_of(eqn), _params_of(eqn)
    if name in JIT_NAMES:
        plain = _unspecified(params.get("in_shardings", ())) and _unspecified(
            params.get("out_shardings", ())
        )
        return params["jaxpr"] if plain else None
    if name in INLINE_ALWAYS:
        return params.get("call_jaxpr", params.get("jaxpr"))
    if name in CHECKPOINT_NAMES and inline_checkpoints:
        return params["jaxpr"]
    if name == DEFERRED and inline_custom:
        return params["jaxpr"]
    if name in _CUSTOM_NAMES and inline_custom:
        body = params.get("call_jaxpr", params.get("fun_jaxpr"))
        return None if _needs_rule(body) else body
    if "branches_platforms" in params:
        return _common_branch(eqn)
    if _operator_of(eqn) is not None and inline_custom and name not in _HI_OPERATORS.values():
        return _expanded(eqn)  # it has derivative rules of its own, like a custom call
    return None


def _common_branch(eqn: JaxprEqn) -> Any | None:
    """What a `jax.lax.platform_dependent` runs, if that is the same wherever a program is lowered.

    `jnp.diagonal` has a branch of its own inside Pallas' kernels for TPU.
    """
    platforms, branches = eqn.params["branches_platforms"], eqn.params["branches"]
    named = {name for names in platforms if names is not None for name in names}
    if platforms[-1] is not None or not named <= _KERNEL_PLATFORMS:
        return None
    run = _extend_core.jaxpr_as_fun(branches[-1])
    with eqn.ctx.manager:
        return jax.make_jaxpr(lambda _, *args: run(*args))(*(shape_of(v.aval) for v in eqn.invars))


def _needs_rule(body: Any) -> bool:
    """Whether a jaxpr, or one in it, has an operator that jax cannot differentiate."""
    jaxpr, _ = open_jaxpr(body)
    for eqn in jaxpr.eqns:
        bodies = sub_jaxprs(eqn)
        if eqn.primitive.name in _WITHOUT_DERIVATIVE or any(map(_needs_rule, bodies)):
            return True
        dtypes = [getattr(var.aval, "dtype", bool) for var in eqn.outvars]
        has_none = not bodies and eqn.primitive not in _ad.primitive_jvps
        if has_none and any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
            return True
    return False


def called_function_name(eqn: JaxprEqn) -> str | None:
    """Returns the name of the function that a call equation calls, None for every other equation.

    Calls are those of jitted functions and of functions with their own derivative rule.
    """
    if eqn.primitive.name in JIT_NAMES:
        return eqn.params.get("name")
    if eqn.primitive.name not in _CUSTOM_NAMES:
        return None
    body, _ = open_jaxpr(eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))
    return getattr(getattr(body, "debug_info", None), "func_name", None)


def plain_params(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameters that two traces of the same code have in common: all but derivative rules."""
    rules = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "jvp", "fwd", "bwd", "out_trees")
    return {key: value for key, value in eqn.params.items() if key not in rules}


def traced_value_of(atom: Any) -> Any:
    """Returns the value of a literal; one of a weak type as the Python number that it was."""
    is_array = hasattr(atom.val, "item")
    return atom.val.item() if is_array and getattr(atom.aval, "weak_type", False) else atom.val


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether a call that can be dissolved has a derivative rule of its own."""
    return name_of(eqn) in _CUSTOM_NAMES or _operator_of(eqn) is not None


def has_jvp_rule(eqn: JaxprEqn) -> bool:
    """Whether such a call has one for forward mode."""
    return not name_of(eqn).startswith("custom_vjp")


def uses_references(eqn: JaxprEqn) -> bool:
    """Whether an equation makes, reads or writes a mutable array (`jax.new_ref`)."""
    variables = [*eqn.invars, *eqn.outvars]
    return any(type(getattr(v, "aval", None)).__name__ == "AbstractRef" for v in variables)


def holds_references(eqn: JaxprEqn) -> bool:
    """Whether an equation, or anything that it calls, uses a mutable array."""
    bodies = (open_jaxpr(body)[0].eqns for body in sub_jaxprs(eqn))
    return uses_references(eqn) or any(map(holds_references, itertools.chain(*bodies)))


def has_ordered_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation's side effects have to happen in program order."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)


def checkpoint_name_of(eqn: JaxprEqn) -> str | None:
    """Returns the tag of a `checkpoint_name` equation, None for every other equation."""
    return _params_of(eqn)["name"] if name_of(eqn) == "name" else None


def checkpoint_names(eqns: Sequence[JaxprEqn]) -> frozenset[str]:
    """Returns every tag in equations and in whatever they call: branches, loops, custom rules."""
    found: set[str] = set()
    for eqn in eqns:
        tag = checkpoint_name_of(eqn)
        found.update(() if tag is None else (tag,))
        for body in sub_jaxprs(eqn):
            found |= checkpoint_names(open_jaxpr(body)[0].eqns)
    return frozenset(found)


def calls_derivative_rules(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether a function with a rule of its own for reverse mode is called, at any depth."""
    return any(
        name_of(eqn).startswith("custom_vjp")
        or any(calls_derivative_rules(open_jaxpr(body)[0].eqns) for body in sub_jaxprs(eqn))
        for eqn in eqns
    )


def holds_backward_pass(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether some equation was made by transposition: part of a gradient's backward pass, at any depth."""
    return any(
        "transpose(" in scope_of(eqn)
        or any(holds_backward_pass(open_jaxpr(body)[0].eqns) for body in sub_jaxprs(eqn))
        for eqn in eqns
    )


def scope_of(eqn: JaxprEqn) -> str:
    """Returns the named scope an equation was traced under, for instance `Block_0/attention`."""
    return str(eqn.source_info.name_stack)


def source_of(eqn: JaxprEqn) -> str:
    """Returns `file:line` of the user's code an equation came from, or an empty string."""
    try:
        frame = _source_info.user_frame(eqn.source_info.traceback)
    except (AttributeError, TypeError):
        frame = _source_info.user_frame(eqn.source_info)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""
