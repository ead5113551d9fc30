"""A function with its plan: traced once per kind of call, planned when it is differentiated."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from remat import compat
from remat.compat.deferred import Rule, call_deferred
from remat.core.errors import (
    BudgetError,
    PolicyError,
    TraceError,
    nearest,
    shown,
    warn,
)
from remat.core.interrupt import Progress, planning
from remat.lower.attempt import active_attempt
from remat.lower.function import StagedFunction
from remat.lower.regions import annotate_program, differentiable_flags
from remat.planning.planners import Confirm, PlanPlanner, PolicyPlanner
from remat.planning.protocol import Planner
from remat.plans.plan import Plan
from remat.resolve import budget_hint, resolve
from remat.rewrite import substitution
from remat.trace.calls import (
    Call,
    Filter,
    Results,
    as_tuple,
    flatten_call,
    named_arguments,
    number_notes,
    split_results,
)
from remat.trace.jitted import modules_unchanged
from remat.trace.joint import check_differentiable, trace_primal
from remat.trace.program import (
    Held,
    Program,
    evaluate,
    holds_the_same,
    lift_tracers,
    tags_of,
    with_own_arrays,
)

__all__ = [
    "Chooser",
    "Wrapped",
    "both_spellings",
    "check_keywords",
    "check_options",
    "differentiated",
    "named_like",
    "plan_call",
    "static_names",
    "static_numbers",
]

Chooser = Callable[[Call], Sequence[bool]]
"""Says of every array of a call whether it is differentiated."""

_CACHE_SIZE = 512


@dataclass(frozen=True)
class _Traced:
    """A function traced for one kind of call."""

    function: StagedFunction
    results: Results
    lifted: tuple[Any, ...]
    by_policy: bool
    held: Held = ()

    @property
    def is_current(self) -> bool:
        """Whether the function closes over what it closed over when it was traced, and differentiated."""
        return holds_the_same(self.held) and self.function.is_current

    def __call__(self, leaves: Sequence[Any]) -> Any:
        inputs = (*self.lifted, *leaves)
        function = self.function
        with _hinting(function.planner):
            if self.by_policy:
                outs = function.combined(inputs, self._by_policy)
            else:
                outs = function(*inputs)
        return self.results.rebuild(outs)

    @functools.cached_property
    def _by_policy(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The program under a policy of jax."""
        program, planner = self.function.primal, self.function.planner
        if isinstance(planner, PlanPlanner):
            # Which arguments are differentiated does not matter: the names are there in any case.
            return functools.partial(self._annotated, planner.made)

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            return call_deferred(
                lambda *values: evaluate(program, values),
                Rule(lambda perturbed: lambda *values: self._planned(values, perturbed)(values)),
                inputs,
            )

        return run

    def _planned(
        self, inputs: Sequence[Any], perturbed: Sequence[bool]
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        program = self.function.primal
        flags = zip(perturbed, differentiable_flags(program), strict=True)
        differentiated = tuple(p and flag for p, flag in flags)
        try:
            plan = self.function.staged(inputs, differentiated).plan
        except ValueError as error:
            if not compat.is_forward_only(error):
                raise
            return functools.partial(evaluate, program)  # nothing is kept for a backward pass
        return functools.partial(self._annotated, plan, perturbed=differentiated)

    def _annotated(
        self, plan: Plan, inputs: Sequence[Any], perturbed: Sequence[bool] | None = None
    ) -> Sequence[Any]:
        function, barriers = self.function, self.function.room.barriers
        return annotate_program(
            function.primal, plan, inputs, perturbed=perturbed, prevent_cse=barriers
        )


@contextmanager
def _hinting(planner: Planner) -> Iterator[None]:
    """Says of a budget of a few bytes what was probably meant, should it not be met."""
    try:
        yield
    except BudgetError as error:
        hint = budget_hint(planner.budget) if isinstance(planner, PolicyPlanner) else ""
        if not hint or str(error).endswith(hint):
            raise
        peak = error.smallest_peak_bytes
        raise BudgetError(f"{error}{hint}", smallest_peak_bytes=peak) from error


class Wrapped:
    """Traces a function per kind of call and remembers what it made."""

    def __init__(
        self,
        fun: Callable[..., Any],
        planner: PolicyPlanner | PlanPlanner,
        static_argnums: int | Iterable[int],
        static_argnames: str | Iterable[str],
        prevent_cse: bool | Sequence[bool],
        lowering: str,
        nested_checkpoints: str,
        is_traced: Filter | None = None,
    ) -> None:
        self.fun = fun
        self.planner = planner
        self.is_traced = is_traced
        self.static_argnums, self.static_argnames = both_spellings(
            fun, static_numbers(static_argnums), static_names(static_argnames)
        )
        # `prevent_cse` may be one flag or one per argument; a stage's barrier is all or nothing.
        self.barriers = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
        self.inline_checkpoints = nested_checkpoints == "take_over"
        self.by_policy = lowering == "policy"
        self.cache = _cache_of(fun)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        nums, names = self.static_argnums, self.static_argnames
        return flatten_call(args, kwargs, nums, names, self.is_traced)

    def traced(self, call: Call) -> _Traced:
        barriers = self.barriers and not compat.in_loop_body(of_halves=True)
        planner, cache = self.planner, self.cache
        attempt = active_attempt(planner)
        if attempt is not None:  # `remat.fit` plans all wrappers anew
            planner, cache = attempt.planner, _cache_of(self.fun, attempt.caches)
        key = (
            planner,
            type(getattr(planner, "budget", None)),  # one byte is not all of the memory
            barriers,
            self.inline_checkpoints,
            self.by_policy,
            self.is_traced,
            call.key,
            tuple(map(jax.typeof, call.leaves)),  # of a shape as of an array or a tracer of it
            compat.trace_context(),
        )
        found = None if call.key is None else cache.get(key)
        if found is None or not found.is_current:
            found = self._trace(call, barriers, planner)
            if not found.lifted and call.key is not None:
                if len(cache) >= _CACHE_SIZE:
                    cache.pop(next(iter(cache)))
                cache[key] = found
        if attempt is not None:
            attempt.called(found.function, self.fun, (*found.lifted, *call.leaves))
        return found

    def _trace(self, call: Call, barriers: bool, planner: Planner) -> _Traced:
        fun, rebuild, is_traced = self.fun, call.rebuild, self.is_traced

        def flat(*leaves: Any) -> tuple[list[Any], Any]:
            args, kwargs = rebuild(leaves)
            with modules_unchanged((args, kwargs)):
                results = fun(*args, **kwargs)
            return split_results(results, is_traced)

        with _noting(call):
            program, results = trace_primal(
                named_arguments(flat, fun, call),
                call.leaves,
                inline_checkpoints=self.inline_checkpoints,
                keep=substitution.called_by_name(),
            )
        if isinstance(planner, PolicyPlanner):
            planner = replace(planner, tags=tags_of(program))
        program, lifted = lift_tracers(program)
        program, held = with_own_arrays(program)
        function = StagedFunction(
            program,
            planner,
            barriers=barriers,
            inline_checkpoints=self.inline_checkpoints,
            name_values=self.by_policy,
        )
        return _Traced(function, results, lifted, self.by_policy, held)


# Words of errors that a number which is traced may be the cause of, whatever their type.
_OF_TRACERS = ("tracer", "traced", "concrete", "static")


@contextmanager
def _noting(call: Call) -> Iterator[None]:
    """Adds to an error of tracing which arguments are Python numbers."""
    try:
        yield
    except Exception as error:
        text = str(error).lower()
        if isinstance(error, TypeError) or any(word in text for word in _OF_TRACERS):
            note = number_notes(call)
            if note:
                error.add_note(note)
        raise


_Caches = weakref.WeakKeyDictionary[Any, dict[Any, _Traced]]
_CACHES: _Caches = weakref.WeakKeyDictionary()


def _cache_of(fun: Callable[..., Any], caches: _Caches = _CACHES) -> dict[Any, _Traced]:
    """The traces of a function, shared by all its wrappers, so that wrapping anew costs nothing."""
    try:
        return caches.setdefault(fun, {})
    except TypeError:  # not hashable or not weakly referable
        return {}


def static_numbers(static_argnums: int | Iterable[int]) -> frozenset[int]:
    return frozenset(as_tuple(static_argnums, "static_argnums"))


def static_names(static_argnames: str | Iterable[str]) -> frozenset[str]:
    return frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)


def check_keywords(
    fun: Callable[..., Any], kwargs: Mapping[str, Any], door: Callable[..., Any]
) -> None:
    """Checks that keyword arguments, all those that a door did not take for its own, are arguments of a function.

    Args:
        fun: the function.
        kwargs: what it is called with.
        door: the function of ours that was called with them.

    Raises:
        TraceError: one is an argument of neither; names what was probably meant.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    strange = [name for name in kwargs if name not in parameters]
    if not strange:
        return
    ours = [p.name for p in inspect.signature(door).parameters.values() if p.kind is p.KEYWORD_ONLY]
    name = strange[0]
    meant = next((own for own in ("budget", "memory", *ours) if own in ours and own in name), None)
    meant = meant or next((own for own in ours if own.endswith(f"_{name}")), None)
    if meant is None and "budget" in name and "memory" in ours:
        meant = "memory"
    hint = f"; did you mean {meant}=?" if meant else nearest(name, [*ours, *parameters])
    called = getattr(fun, "__name__", type(fun).__name__)
    raise TraceError(
        f"{name}= is an argument neither of {called} nor of remat.{door.__name__}{hint or '.'} Those of "
        f"remat.{door.__name__} are {', '.join(ours)}"
    )


def check_options(lowering: str, nested: str) -> None:
    """Raises PolicyError unless both are known."""
    if lowering not in ("staged", "policy"):
        raise PolicyError(f"lowering={lowering!r}; expected 'staged' or 'policy'")
    if nested not in ("take_over", "respect"):
        raise PolicyError(f"nested_checkpoints={nested!r}; expected 'take_over' or 'respect'")


def named_like(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # `functools.wraps` without copying `__dict__`: a module's attributes must not leak onto a function.
    names = [n for n in ("__module__", "__name__", "__qualname__", "__doc__") if hasattr(fun, n)]
    return functools.wraps(fun, assigned=names, updated=())


def both_spellings(
    fun: Callable[..., Any], nums: frozenset[int], names: frozenset[str]
) -> tuple[frozenset[int], frozenset[str]]:
    """A static argument may be passed by position or by name whichever way it was declared, as in jit.

    Raises:
        TraceError: there is no such position or name.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return nums, names
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = [p.name for p in parameters]
    unknown = sorted(name for name in names if name not in known)
    if unknown and not any_name:
        called = getattr(fun, "__name__", type(fun).__name__)
        hint = nearest(unknown[0], known) or "."
        raise TraceError(
            f"static_argnames has {unknown[0]!r}, which is no argument of {called}{hint} Its arguments are "
            f"{', '.join(known) or 'none'}"
        )
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    far = sorted(i for i in nums if not -len(positional) <= i < len(positional))
    if far and not any_number:
        raise TraceError(
            f"static_argnums has {far[0]}, and the function has {len(positional)} positional arguments: "
            f"{', '.join(positional)}"
        )
    if not any_number:  # else the end is that of the call
        nums = frozenset(i + len(positional) if i < 0 else i for i in nums)
    by_num = {positional[i] for i in nums if 0 <= i < len(positional)}
    by_name = {positional.index(n) for n in names if n in positional}
    return nums | by_name, names | by_num


def plan_call(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Chooser,
    *,
    remat_policy: Any,
    budget: int | float | str | None,
    confirm: bool | int | str | Confirm | None,
    static_argnums: int | Iterable[int],
    static_argnames: str | Iterable[str],
    prevent_cse: bool | Sequence[bool],
    lowering: str,
    nested_checkpoints: str,
    progress: Progress | None,
) -> Plan:
    """Plans a call; `chosen` says what is differentiated, everything else is as in `plan`."""
    if not callable(fun):
        raise TraceError(
            f"remat.plan expects a function and its arguments, got {type(fun).__name__}: plan(loss, params, x), "
            "not plan(loss(params, x))"
        )
    check_options(lowering, nested_checkpoints)
    resolved = resolve(remat_policy, budget, confirm)
    if not isinstance(resolved, (PolicyPlanner, PlanPlanner)):
        raise PolicyError(
            f"remat_policy={shown(remat_policy)} makes no plan: it is jax's own or off. Use "
            "remat.compile_report to see what the compiler makes of it."
        )
    wrapped = Wrapped(
        fun, resolved, static_argnums, static_argnames, prevent_cse, lowering, nested_checkpoints
    )
    call = wrapped.flatten(args, kwargs)
    wanted = chosen(call)
    traced = wrapped.traced(call)
    lifted = (False,) * len(traced.lifted)
    program = traced.function.primal
    flags = tuple(
        flag and jnp.issubdtype(program.avals[v].dtype, jnp.inexact)
        for flag, v in zip((*lifted, *wanted), program.inputs, strict=True)
    )
    check_differentiable(traced.function.whole, flags)
    _warn_of_gradients(fun, traced.function.whole, flags)
    watched = planning(progress) if resolved.takes_long else nullcontext()
    with watched, _hinting(traced.function.planner):
        return traced.function.staged([*traced.lifted, *call.leaves], flags).plan


def _warn_of_gradients(fun: Callable[..., Any], program: Program, flags: Sequence[bool]) -> None:
    """Warns if a function is a gradient already, or makes of the differentiated arguments others of their kind."""
    reason = ""
    if compat.is_gradient(fun):
        reason = "the function is a gradient already (jax.grad, jax.value_and_grad)"
    elif compat.holds_backward_pass([equation.source for equation in program.equations]):
        kinds = Counter((a.shape, a.dtype) for a in program.output_avals)
        given = [program.avals[v] for v, flag in zip(program.inputs, flags, strict=True) if flag]
        wanted = Counter((aval.shape, aval.dtype) for aval in given)
        is_loss = len(program.outputs) == 1 and not program.output_avals[0].shape
        if wanted <= kinds and not is_loss:
            reason = (
                "the function differentiates, and returns as many arrays like those that are differentiated here: "
                "gradients, or new parameters"
            )
    if reason:
        warn(
            f"{reason}, so that this plans its derivative, the second one of the loss. Plan the loss itself: "
            "remat.plan(loss, ...). For a whole step see remat.fit and remat.compile_report"
        )


def differentiated(
    count: int, argnums: int | Sequence[int], static: frozenset[int], call: Call
) -> list[bool]:
    """For every array of a call with `count` positional arguments whether it is part of one of `argnums`."""
    given = as_tuple(argnums)
    wanted = {i + count if i < 0 else i for i in given}
    if any(not 0 <= i < count for i in wanted):
        raise TraceError(
            f"argnums={argnums!r} is out of range: the function was given {count} positional arguments"
        )
    if wanted & static:
        raise TraceError(f"argnums={argnums!r} includes a static argument")
    return [owner in wanted for owner in call.owners]
