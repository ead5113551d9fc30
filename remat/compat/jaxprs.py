"""The only file that touches jax internals or depends on the jax version (jax >= 0.10).

Everything else in `remat` uses jax's public API. What lives here: reading and evaluating jaxpr
equations, where an equation came from, and what the current trace is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import config as _config
from jax._src import core as _core
from jax._src import lib as _lib
from jax._src import source_info_util as _source_info
from jax.extend import core as _extend_core

from remat.compat.barriers import tied
from remat.compat.deferred import DEFERRED

__all__ = [
    "CPU_UNDOES_REMATERIALIZATION",
    "ScanParts",
    "at_site",
    "avals_of",
    "barrier_after",
    "call_body",
    "called_function_name",
    "calls_derivative_rules",
    "checkpoint_name_of",
    "checkpoint_names",
    "comparison_like",
    "cotangent_of",
    "cuda_data_dir",
    "equation_with_sizes",
    "evaluate_equation",
    "has_jvp_rule",
    "has_ordered_effects",
    "has_rule",
    "holds_backward_pass",
    "identity_of",
    "in_loop_body",
    "is_eager_in_shard_map",
    "is_forward_only",
    "is_gradient",
    "is_literal",
    "is_symbolic",
    "is_tracer",
    "jax_checkpoint",
    "name_of",
    "names_of_policy",
    "open_jaxpr",
    "plain_params",
    "rounding_after",
    "run_chunks",
    "run_scan",
    "scan_parts",
    "scope_of",
    "shape_of",
    "source_of",
    "sub_jaxprs",
    "top_level_trace",
    "trace_chunk",
    "trace_context",
    "traced_value_of",
    "uses_references",
    "varying_axes",
    "with_sizes",
    "zeros_of",
]

JaxprEqn = Any
_grad_code = inspect.unwrap(jax.grad).__code__

CPU_UNDOES_REMATERIALIZATION: bool = _lib.version < (0, 11, 1)
"""Whether XLA:CPU deletes optimization barriers before it looks for common subexpressions.

Since jaxlib 0.11.1 its pass `cse_barrier_expander` runs when the program is scheduled.
"""

# Names under which jax has shipped the same call-like primitives.
_INLINE_ALWAYS = frozenset({"closed_call", "core_call", "core_closed_call", "call", "eval_jaxpr"})
_JIT_NAMES = frozenset({"jit", "pjit"})
_CHECKPOINT_NAMES = frozenset({"checkpoint", "remat", "remat2", "remat3"})
_CUSTOM_NAMES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_OURS = "remat"  # the parameter that says how an equation of our own is run
# One primitive that stands for many operators, each an object in its parameters; jax's name for a few of these,
# and what the same operators are called where they are primitives.
_HI_NAME = "call_hi_primitive"
_HI_OPERATORS = {
    "RematTraced": "checkpoint",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
}


def cuda_data_dir() -> str | None:
    """Where jax tells XLA to look for CUDA's tools first; None if it leaves that to ``XLA_FLAGS``."""
    return getattr(_lib, "cuda_path", None)


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr atom is an inlined constant."""
    return isinstance(atom, _extend_core.Literal)


def is_tracer(value: Any) -> bool:
    """Whether `value` is being traced (so must not be stored beyond the trace)."""
    return isinstance(value, _core.Tracer)


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

    A `jit` with explicit shardings is kept: inlining would lose them.
    """
    name, params = name_of(eqn), _params_of(eqn)
    if name in _JIT_NAMES:
        plain = _unspecified(params.get("in_shardings", ())) and _unspecified(
            params.get("out_shardings", ())
        )
        return params["jaxpr"] if plain else None
    if name in _INLINE_ALWAYS:
        return params.get("call_jaxpr", params.get("jaxpr"))
    if name in _CHECKPOINT_NAMES and inline_checkpoints:
        return params["jaxpr"]
    if name == DEFERRED and inline_custom:
        return params["jaxpr"]
    if name in _CUSTOM_NAMES and inline_custom:
        return params.get("call_jaxpr", params.get("fun_jaxpr"))
    if _operator_of(eqn) is not None and inline_custom and name not in _HI_OPERATORS.values():
        return _expanded(eqn)  # it has derivative rules of its own, like a custom call
    return None


def called_function_name(eqn: JaxprEqn) -> str | None:
    """Returns the name of the function that a call equation calls, None for every other equation.

    Calls are those of jitted functions and of functions with their own derivative rule.
    """
    if eqn.primitive.name in _JIT_NAMES:
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


def uses_references(eqn: JaxprEqn) -> bool:
    """Whether an equation makes, reads or writes a mutable array (`jax.new_ref`)."""
    variables = [*eqn.invars, *eqn.outvars]
    return any(type(getattr(v, "aval", None)).__name__ == "AbstractRef" for v in variables)


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


def is_gradient(fun: Any) -> bool:
    """Whether a function is what `jax.grad` or `jax.value_and_grad` returns, jitted or not."""
    made = ("grad", "value_and_grad")
    for _ in range(100):
        code = getattr(fun, "__code__", None)
        if code is not None and code.co_filename == _grad_code.co_filename:  # noqa: SIM102
            if code.co_qualname.partition(".<locals>")[0] in made:
                return True
        inner = getattr(fun, "__wrapped__", None) or getattr(fun, "func", None)
        if inner is None:
            return False
        fun = inner
    return False


def holds_backward_pass(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether some equation was made by transposition: part of a gradient's backward pass, at any depth."""
    return any(
        "transpose(" in scope_of(eqn)
        or any(holds_backward_pass(open_jaxpr(body)[0].eqns) for body in sub_jaxprs(eqn))
        for eqn in eqns
    )


def names_of_policy(policy: Any) -> frozenset[str]:
    """Returns the tags that one of jax's policies keeps, empty for a policy that keeps none by name.

    They are in the policy's closure, or, in newer versions, in its fields.
    """
    if getattr(policy, "__module__", None) != _ad_checkpoint.__name__:
        return frozenset()
    made_by = getattr(policy, "__qualname__", type(policy).__qualname__)
    if made_by.replace("_", "").lower().startswith("saveanynamesbutthese"):
        return frozenset()  # what these leave out need not be there
    if inspect.isfunction(policy):
        held: Mapping[str, Any] = inspect.getclosurevars(policy).nonlocals
    else:
        held = getattr(policy, "__dict__", {})
    found: set[str] = set()
    for value in held.values():
        if isinstance(value, (set, frozenset)):
            found.update(name for name in value if isinstance(name, str))
        elif callable(value):
            found |= names_of_policy(value)
    return frozenset(found)


@dataclass(frozen=True)
class ScanParts:
    """A `scan` equation's parameters under names that do not change between jax versions."""

    body: Any
    length: int
    reverse: bool
    unroll: int | bool
    num_consts: int
    num_carry: int
    split_transpose: bool

    def shortened(self, length: int) -> ScanParts:
        """Returns the parts of the same scan over fewer iterations."""
        unroll = self.unroll
        return replace(
            self,
            length=length,
            unroll=unroll if isinstance(unroll, bool) else max(1, min(unroll, length)),
        )


def scan_parts(eqn: JaxprEqn) -> ScanParts | None:
    """Returns the parts of a `scan` equation, None for every other equation."""
    if eqn.primitive.name != "scan":
        return None
    params: Mapping[str, Any] = eqn.params
    if "ft_in" in params:  # jax 0.11
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    return ScanParts(
        body=params["jaxpr"],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params.get("unroll", 1),
        num_consts=num_consts,
        num_carry=num_carry,
        split_transpose=params.get("_split_transpose", False),
    )


def run_scan(parts: ScanParts, body: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs a scan with another body, a function of flat arrays like the one it replaces."""
    first = parts.num_consts + parts.num_carry
    consts = operands[: parts.num_consts]
    init, xs = list(operands[parts.num_consts : first]), list(operands[first:])

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*consts, *carry, *x)
        return list(out[: parts.num_carry]), list(out[parts.num_carry :])

    carry, ys = jax.lax.scan(
        step,
        init,
        xs,
        length=None if xs else parts.length,  # which may be symbolic
        reverse=parts.reverse,
        unroll=parts.unroll,
        _split_transpose=parts.split_transpose,
    )
    return [*carry, *ys]


def trace_chunk(parts: ScanParts, chunk: int, operands: Sequence[Any]) -> Any:
    """Returns the closed jaxpr of `chunk` iterations of a scan: consts, carry, `[chunk, ...]` xs -> carry, ys.

    Args:
        parts: of the whole scan.
        chunk: iterations.
        operands: of the whole scan; only their types count.
    """
    first = parts.num_consts + parts.num_carry
    body = _extend_core.jaxpr_as_fun(parts.body)
    part = [x[:chunk] for x in operands[first:]]  # as an operation: types know axes of meshes
    return jax.make_jaxpr(lambda *args: run_scan(parts.shortened(chunk), body, args))(
        *operands[:first], *part
    )


def run_chunks(
    parts: ScanParts,
    chunk: int,
    body: Any,
    rest: Any,
    operands: Sequence[Any],
) -> list[Any]:
    """Runs a scan as a scan over chunks of `chunk` iterations, and what is left over after it.

    Args:
        parts: of the whole scan.
        chunk: iterations of a chunk.
        body: runs a chunk: consts, carry, `[chunk, ...]` xs -> carry, `[chunk, ...]` ys.
        rest: runs what is left over, as a function of its `ScanParts` and operands.
        operands: of the whole scan.
    """
    first = parts.num_consts + parts.num_carry
    consts = operands[: parts.num_consts]
    init, xs = list(operands[parts.num_consts : first]), list(operands[first:])
    count, left = divmod(parts.length, chunk)
    full = count * chunk
    # The rest comes last in time: what it keeps is gone before the first chunk is run again.
    cut = left if parts.reverse else full
    early, late = [x[:cut] for x in xs], [x[cut:] for x in xs]
    if not left:
        early = late = xs
    main, others = (late, early) if parts.reverse else (early, late)
    over = replace(parts, length=count, unroll=1, split_transpose=False)
    rows = [x.reshape(count, chunk, *x.shape[1:]) for x in main]
    results = run_scan(over, body, [*consts, *init, *rows])
    carry = results[: parts.num_carry]
    ys = [y.reshape(full, *y.shape[2:]) for y in results[parts.num_carry :]]
    if not left:
        return [*carry, *ys]
    results = rest(parts.shortened(left), [*consts, *carry, *others])
    carry, last = results[: parts.num_carry], results[parts.num_carry :]
    pairs = zip(last, ys, strict=True) if parts.reverse else zip(ys, last, strict=True)
    return [*carry, *(jax.numpy.concatenate(pair) for pair in pairs)]


def _varying(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value inside `shard_map` differs; jax has spelt this in two ways."""
    axes = getattr(aval, "manual_axis_type", None)
    return (
        frozenset(axes.varying) if axes is not None else frozenset(getattr(aval, "vma", ()) or ())
    )


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array inside `shard_map` differs."""
    return _varying(jax.typeof(value))


def cotangent_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract cotangent of a result: its shape, dtype and placement."""
    return shape_of(aval.to_ct_aval() if hasattr(aval, "to_ct_aval") else aval)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and placement of an abstract value, as an argument to trace with."""
    extra: dict[str, Any] = {}
    if _varying(aval):
        key = "manual_axis_type" if hasattr(aval, "manual_axis_type") else "vma"
        extra[key] = getattr(aval, key)
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and not getattr(sharding.mesh, "empty", True):
        extra["sharding"] = sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **extra)


def zeros_of(aval: Any) -> Any:
    """Returns zeros of an abstract value, varying over mesh axes as it says."""
    zeros = jax.numpy.zeros(aval.shape, aval.dtype)
    axes = tuple(sorted(_varying(aval)))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def trace_context() -> Any:
    """Returns a hashable value of everything ambient that a trace depends on (precision, mesh, ...)."""
    return _config.trace_context()


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
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    extra: Sequence[Any] = ()
    if isinstance(bind_params, tuple):  # before jax 0.10.1: (functions, params)
        extra, bind_params = bind_params
    with at_site(eqn, site), eqn.ctx.manager:
        out = eqn.primitive.bind(*extra, *inputs, **bind_params)
    return out if eqn.primitive.multiple_results else (out,)


def _single_instance(x: Any) -> Any:
    """Returns an array that XLA makes once, in memory, for all that reads it."""
    if CPU_UNDOES_REMATERIALIZATION and jax.default_backend() == "cpu":
        return _rounded(x)  # there XLA:CPU deletes barriers, or cannot compile those in loops
    return tied([x])[0]


def _rounded(x: Any) -> Any:
    """Returns an array whose elements XLA rounds: it does not contract a product that made them with a sum.

    It does not know that an array selected by `x == x` is `x`; `reduce_precision` to the same precision it removes.
    """
    if jax.numpy.iscomplexobj(x):
        return jax.lax.complex(_rounded(x.real), _rounded(x.imag))
    return jax.numpy.where(x == x, x, jax.numpy.full((), jax.numpy.nan, x.dtype))


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


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether a call that can be dissolved has a derivative rule of its own."""
    return name_of(eqn) in _CUSTOM_NAMES or _operator_of(eqn) is not None


def has_jvp_rule(eqn: JaxprEqn) -> bool:
    """Whether such a call has one for forward mode."""
    return not name_of(eqn).startswith("custom_vjp")


def _after(eqn: JaxprEqn, position: int, primitive: Any, params: dict[str, Any]) -> JaxprEqn:
    var = eqn.outvars[position]
    return eqn.replace(
        primitive=primitive, invars=[var], outvars=[var], params=params, effects=_core.no_effects
    )


def is_symbolic(aval: Any) -> bool:
    """Whether an abstract value has a dimension that is not known (`jax.export.symbolic_shape`)."""
    return any(map(jax.export.is_symbolic_dim, getattr(aval, "shape", ())))


def with_sizes(param: Any, size: int) -> Any:
    """Returns a dimension, an abstract value or a parameter with `size` for every unknown dimension in it."""
    if jax.export.is_symbolic_dim(param):
        sizes: Any = {name: size for name in param._get_vars()}
        return int(param._evaluate(sizes))
    if isinstance(param, _core.ShapedArray):
        return param.update(shape=with_sizes(param.shape, size)) if is_symbolic(param) else param
    inner = getattr(param, "jaxpr", param)
    if inner is not param and hasattr(param, "replace"):
        return param.replace(jaxpr=with_sizes(inner, size))
    if inner is param and hasattr(param, "eqns"):
        return param.replace(eqns=[equation_with_sizes(eqn, size) for eqn in param.eqns])
    if type(param) in (tuple, list):
        return type(param)(with_sizes(item, size) for item in param)
    return param


def equation_with_sizes(eqn: JaxprEqn, size: int) -> JaxprEqn:
    """Returns an equation, to be looked at and not to be run, with `size` for every unknown dimension."""

    def sized(atom: Any) -> Any:
        known = is_literal(atom) or not is_symbolic(atom.aval)
        return atom if known else SimpleNamespace(aval=with_sizes(atom.aval, size))

    if not any(is_symbolic(getattr(var, "aval", None)) for var in (*eqn.invars, *eqn.outvars)):
        return eqn
    return eqn.replace(
        invars=list(map(sized, eqn.invars)),
        outvars=list(map(sized, eqn.outvars)),
        params={name: with_sizes(param, size) for name, param in eqn.params.items()},
    )


def is_forward_only(error: ValueError) -> bool:
    """Whether jax says of a function that it has no reverse mode (an unbounded loop), only a forward one."""
    return "Reverse-mode differentiation does not work" in str(error)


def is_eager_in_shard_map(error: NotImplementedError) -> bool:
    """Whether jax refuses a `custom_vjp` because it is run in a `shard_map` under no other transform.

    Nothing is differentiated then: a `shard_map` that is, is traced first.
    """
    return "custom_vjp symbolic_zeros support with shard_map" in str(error)


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


def _current_traces() -> list[Any]:
    found, trace = [], _core.trace_ctx.trace
    while trace is not None and len(found) < 100:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def jax_checkpoint(
    fun: Callable[..., Any],
    *,
    policy: Callable[..., Any] | None,
    prevent_cse: bool | Sequence[bool],
    static_argnums: tuple[int, ...],
    static_argnames: tuple[str, ...],
) -> Callable[..., Any]:
    """Calls `jax.checkpoint`, which takes `static_argnames` since jax 0.10.1."""
    options: dict[str, Any] = {"policy": policy, "prevent_cse": prevent_cse}
    if "static_argnames" in inspect.signature(jax.checkpoint).parameters:
        options["static_argnames"] = static_argnames
    return jax.checkpoint(fun, static_argnums=static_argnums, **options)


def in_loop_body() -> bool:
    """Whether the current trace is that of a `scan` or `while_loop` body, also through `vmap`/`grad`.

    A `jit` between the loop and the caller hides the loop: then the answer is False.
    """
    for trace in _current_traces():
        frame = getattr(trace, "frame", None)
        info = getattr(frame, "debug_info", None)
        if getattr(info, "traced_for", None) in ("scan", "fori_loop", "while_body"):
            return True
    return False


def top_level_trace() -> bool:
    """Whether nothing is being traced: operations run at once on concrete arrays."""
    return type(_core.trace_ctx.trace).__name__ == "EvalTrace"
