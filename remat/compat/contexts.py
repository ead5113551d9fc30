"""What jax does around a trace: transforms, checkpoints and their policies, what it refuses, what XLA undoes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import config as _config
from jax._src import core as _core
from jax._src import lib as _lib
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe

__all__ = [
    "CPU_UNDOES_REMATERIALIZATION",
    "cuda_data_dir",
    "differentiated_now",
    "in_loop_body",
    "is_eager_in_shard_map",
    "is_forward_only",
    "is_gradient",
    "is_traced_here",
    "is_tracer",
    "jax_checkpoint",
    "names_of_policy",
    "top_level_trace",
    "trace_context",
]

_grad_code = inspect.unwrap(jax.grad).__code__

CPU_UNDOES_REMATERIALIZATION: bool = _lib.version < (0, 11, 1)
"""Whether XLA:CPU deletes optimization barriers before it looks for common subexpressions.

Since jaxlib 0.11.1 its pass `cse_barrier_expander` runs when the program is scheduled.
"""


def is_tracer(value: Any) -> bool:
    """Whether `value` is being traced (so must not be stored beyond the trace)."""
    return isinstance(value, _core.Tracer)


def is_traced_here(value: Any) -> bool:
    """Whether `value` is being traced by the innermost trace, whose end it does not outlive."""
    return is_tracer(value) and getattr(value, "_trace", None) is _core.trace_ctx.trace


def trace_context() -> Any:
    """Returns a hashable value of everything ambient that a trace depends on (precision, mesh, ...)."""
    return _config.trace_context()


def _current_traces() -> list[Any]:
    found, trace = [], _core.trace_ctx.trace
    while trace is not None and len(found) < 100:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def differentiated_now(inputs: Sequence[Any]) -> tuple[bool, ...] | None:
    """For every input whether an operation on them is differentiated with respect to it at once.

    None if the operation is put into a jaxpr or batched before it is differentiated, if it ever is.
    """
    for trace in _current_traces():
        if isinstance(trace, _pe.DynamicJaxprTrace):
            return None
        flags = tuple(getattr(x, "_trace", None) is trace for x in inputs)
        if any(flags) and isinstance(trace, _batching.BatchTrace):
            return None
        if any(flags) and isinstance(trace, _ad.JVPTrace | _ad.LinearizeTrace):
            return flags
    return (False,) * len(inputs)


def in_loop_body(*, of_halves: bool = False) -> bool:
    """Whether the current trace is that of a `scan` or `while_loop` body, also through `vmap`/`grad`.

    A `jit` between the loop and the caller hides the loop: then the answer is False.

    Args:
        of_halves: only where differentiation makes two loops of it, one for each half. What is differentiated
            within the body, as a loop over microbatches does it, has both halves side by side.
    """
    for trace in _current_traces():
        if of_halves and isinstance(trace, _ad.JVPTrace | _ad.LinearizeTrace):
            return False
        frame = getattr(trace, "frame", None)
        info = getattr(frame, "debug_info", None)
        if getattr(info, "traced_for", None) in ("scan", "fori_loop", "while_body"):
            return True
    return False


def top_level_trace() -> bool:
    """Whether nothing is being traced: operations run at once on concrete arrays."""
    return type(_core.trace_ctx.trace).__name__ == "EvalTrace"


def cuda_data_dir() -> str | None:
    """Where jax tells XLA to look for CUDA's tools first; None if it leaves that to ``XLA_FLAGS``."""
    return getattr(_lib, "cuda_path", None)


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


def is_forward_only(error: ValueError) -> bool:
    """Whether jax says of a function that it has no reverse mode (an unbounded loop), only a forward one."""
    return "Reverse-mode differentiation does not work" in str(error)


def is_eager_in_shard_map(error: NotImplementedError) -> bool:
    """Whether jax refuses a `custom_vjp` because it is run in a `shard_map` under no other transform.

    Nothing is differentiated then: a `shard_map` that is, is traced first.
    """
    return "custom_vjp symbolic_zeros support with shard_map" in str(error)
