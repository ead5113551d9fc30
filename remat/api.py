"""The drop-in for `jax.checkpoint`, and `plan`, the look before the leap."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from remat import _compat, operator_substitution
from remat.calls import Call, Filter, Results, flatten_call, number_notes, split_results
from remat.deferred import call_deferred
from remat.errors import BudgetError, PolicyError, RematWarning, TraceError, nearest
from remat.interrupt import Progress, planning
from remat.jitted import has_nnx_modules
from remat.lower import Planner, StagedFunction
from remat.override import active_attempt
from remat.plan import Plan
from remat.program import Program, evaluate, lift_tracers, tags_of
from remat.resolve import JaxPolicy, Off, PlanPlanner, PolicyPlanner, budget_hint, resolve
from remat.segments import annotate_program, differentiable_flags
from remat.trace import check_differentiable, trace_primal

__all__ = [
    "UNSET",
    "Chooser",
    "check_options",
    "checkpoint",
    "checkpoint_filtered",
    "chosen_policy",
    "plan",
    "plan_call",
]

Chooser = Callable[[Call], Sequence[bool]]
"""Says of every array of a call whether it is differentiated."""

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()
_CACHE_SIZE = 512


@dataclass(frozen=True)
class _Traced:
    """A function traced for one kind of call."""

    function: StagedFunction
    results: Results
    lifted: tuple[Any, ...]
    by_policy: bool

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
                lambda *values: self._planned(values)(values),
                inputs,
            )

        return run

    def _planned(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
        program = self.function.primal
        try:
            plan = self.function.staged(inputs, differentiable_flags(program)).plan
        except ValueError as error:
            if not _compat.is_forward_only(error):
                raise
            return functools.partial(evaluate, program)  # nothing is kept for a backward pass
        return functools.partial(self._annotated, plan)

    def _annotated(self, plan: Plan, inputs: Sequence[Any]) -> Sequence[Any]:
        function = self.function
        return annotate_program(function.primal, plan, inputs, prevent_cse=function.barriers)


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


class _Wrapped:
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
        self.static_argnums, self.static_argnames = _both_spellings(
            fun, _numbers(static_argnums), _names(static_argnames)
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
        barriers = self.barriers and not _compat.in_loop_body()
        planner, cache = self.planner, self.cache
        attempt = active_attempt(planner)
        if attempt is not None:  # `remat.fit` plans all wrappers anew
            planner, cache = attempt.planner, _cache_of(self.fun, attempt.caches)
        key = (
            planner,
            barriers,
            self.inline_checkpoints,
            self.by_policy,
            self.is_traced,
            call.key,
            tuple(map(jax.typeof, call.leaves)),  # of a shape as of an array or a tracer of it
            _compat.trace_context(),
        )
        found = None if call.key is None else cache.get(key)
        if found is None:
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
            return split_results(fun(*args, **kwargs), is_traced)

        with _noting(call):
            program, results = trace_primal(
                flat,
                call.leaves,
                inline_checkpoints=self.inline_checkpoints,
                keep=operator_substitution.called_by_name(),
            )
        if isinstance(planner, PolicyPlanner):
            planner = replace(planner, tags=tags_of(program))
        program, lifted = lift_tracers(program)
        function = StagedFunction(
            program,
            planner,
            barriers=barriers,
            inline_checkpoints=self.inline_checkpoints,
            name_values=self.by_policy,
        )
        return _Traced(function, results, lifted, self.by_policy)


@contextmanager
def _noting(call: Call) -> Iterator[None]:
    """Adds to an error of tracing which arguments are Python numbers."""
    try:
        yield
    except TypeError as error:
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


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    remat_policy: Any = UNSET,
    policy: Callable[..., Any] | None = None,
    budget: int | float | str | None = None,
    prevent_cse: bool | Sequence[bool] = True,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    lowering: str = "staged",
    nested_checkpoints: str = "take_over",
) -> Any:
    """Returns `fun` with the same results and gradients, keeping less for its backward pass.

    A drop-in for `jax.checkpoint`: usable as a decorator with or without arguments, and composing with
    `jax.jit`, `jax.grad`, `jax.vmap` and `jax.lax.scan`.

    Args:
        fun: any differentiable JAX function of pytrees.
        remat_policy: one of our policy names (`"min_cut"`, the default, `"full"`, `"names"`, `"save_all"`); a
            policy object such as `remat.policies.MinCut(heavy="batched")`; a `remat.Plan` or the path of a saved
            one; the name of one of `jax.checkpoint_policies` or any jax policy (handed to `jax.checkpoint`);
            None or `"none"` for no rematerialization; `"minimal"`.
        policy: as in `jax.checkpoint`; exclusive with `remat_policy`.
        budget: bound on the peak of everything that is neither argument nor result: bytes, `"6GiB"`, or a
            fraction of the peak without rematerialization.
        prevent_cse: False leaves out the barriers that keep XLA from undoing recomputation. They are left out
            by themselves where `fun` is called inside a loop body.
        static_argnums, static_argnames: arguments that are Python values, as in `jax.checkpoint`.
        lowering: `"staged"`, a `jax.custom_vjp` that carries any plan; or `"policy"`, nested `jax.checkpoint`s
            with a names policy, which compose with forward mode too.
        nested_checkpoints: `"take_over"` dissolves `jax.checkpoint` regions inside `fun` into the plan;
            `"respect"` leaves them as they are.

    Raises:
        PolicyError: unknown policy, or both `policy` and `remat_policy` given.
        BudgetError: the budget cannot be read or met.
        TraceError: no result or no argument of `fun` is differentiable (when differentiated).
        DifferentiationError: forward-mode differentiation of the staged lowering.
    """
    options = dict(
        remat_policy=remat_policy,
        policy=policy,
        budget=budget,
        prevent_cse=prevent_cse,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        lowering=lowering,
        nested_checkpoints=nested_checkpoints,
    )
    if fun is None:
        return functools.partial(checkpoint, **options)
    if not callable(fun):
        raise TraceError(f"remat.checkpoint expects a function, got {type(fun).__name__}")
    check_options(lowering, nested_checkpoints)
    resolved = resolve(chosen_policy(policy, remat_policy), budget)
    if isinstance(resolved, Off):
        return fun
    if isinstance(resolved, JaxPolicy):
        wrapped_by_jax = _compat.jax_checkpoint(
            fun,
            policy=resolved.policy,
            prevent_cse=prevent_cse,
            static_argnums=tuple(_numbers(static_argnums)),
            static_argnames=tuple(_names(static_argnames)),
        )
        names = _compat.names_of_policy(resolved.policy)
        if not names:
            return wrapped_by_jax
        return _checking_names(fun, wrapped_by_jax, names, static_argnums, static_argnames)
    wrapped = _Wrapped(
        fun, resolved, static_argnums, static_argnames, prevent_cse, lowering, nested_checkpoints
    )
    return _rematted(wrapped)


def _rematted(wrapped: _Wrapped) -> Callable[..., Any]:
    @_named_like(wrapped.fun)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        call = wrapped.flatten(args, kwargs)
        return wrapped.traced(call)(call.leaves)

    return rematted


def checkpoint_filtered(
    fun: Callable[..., Any],
    is_traced: Filter,
    *,
    remat_policy: Any,
    budget: int | float | str | None,
    prevent_cse: bool,
    lowering: str,
    nested_checkpoints: str,
) -> Callable[..., Any]:
    """Returns `checkpoint(fun)` by a policy that plans, with a say in which leaves are traced."""
    resolved = resolve(remat_policy, budget)
    assert isinstance(resolved, (PolicyPlanner, PlanPlanner))
    return _rematted(
        _Wrapped(fun, resolved, (), (), prevent_cse, lowering, nested_checkpoints, is_traced)
    )


def _checking_names(
    fun: Callable[..., Any],
    wrapped_by_jax: Callable[..., Any],
    names: frozenset[str],
    static_argnums: int | Iterable[int],
    static_argnames: str | Iterable[str],
) -> Callable[..., Any]:
    """Calls a function wrapped with one of jax's policies of names, once it is known that it has such names."""
    nums, words = _both_spellings(fun, _numbers(static_argnums), _names(static_argnames))
    checked: set[Any] = set()

    @_named_like(fun)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        call = flatten_call(args, kwargs, nums, words)
        key = (call.key, tuple(map(jax.typeof, call.leaves)))
        if call.key is None or key not in checked:

            def flat(*leaves: Any) -> Any:
                given, named = call.rebuild(leaves)
                return wrapped_by_jax(*given, **named)

            _check_names(names, _compat.open_jaxpr(jax.make_jaxpr(flat)(*call.leaves))[0].eqns)
            checked.add(key)
        return wrapped_by_jax(*args, **kwargs)

    return rematted


def _check_names(names: frozenset[str], eqns: Sequence[Any]) -> None:
    """Raises PolicyError if a policy of jax looks for names of which the function has none; warns of a part."""
    found = _compat.checkpoint_names(eqns)
    missing = sorted(names - found)
    # A derivative rule may name what it keeps; it is traced when it is differentiated.
    if not missing or _compat.calls_derivative_rules(eqns):
        return
    text = (
        f"the policy keeps values by name, and the names {missing} tag no value of the function; its "
        f"checkpoint_name tags are {sorted(found)}{nearest(missing[0], sorted(found))}"
    )
    if len(missing) == len(names):
        raise PolicyError(text)
    warnings.warn(text, RematWarning, stacklevel=4)


def _numbers(static_argnums: int | Iterable[int]) -> frozenset[int]:
    return frozenset((static_argnums,) if isinstance(static_argnums, int) else static_argnums)


def _names(static_argnames: str | Iterable[str]) -> frozenset[str]:
    return frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)


def chosen_policy(policy: Any, remat_policy: Any) -> Any:
    """Returns which of the two spellings was given; neither means `"min_cut"`.

    Raises:
        PolicyError: both were given.
    """
    if policy is None:
        return "min_cut" if remat_policy is UNSET else remat_policy
    if remat_policy is not UNSET and remat_policy is not None:
        raise PolicyError(
            f"both policy={policy!r} and remat_policy={remat_policy!r} were given; they mean the same: "
            "pass one of them"
        )
    return policy


def check_options(lowering: str, nested: str) -> None:
    """Raises PolicyError unless both are known."""
    if lowering not in ("staged", "policy"):
        raise PolicyError(f"lowering={lowering!r}; expected 'staged' or 'policy'")
    if nested not in ("take_over", "respect"):
        raise PolicyError(f"nested_checkpoints={nested!r}; expected 'take_over' or 'respect'")


def _named_like(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # `functools.wraps` without copying `__dict__`: a module's attributes must not leak onto a function.
    names = [n for n in ("__module__", "__name__", "__qualname__", "__doc__") if hasattr(fun, n)]
    return functools.wraps(fun, assigned=names, updated=())


def _both_spellings(
    fun: Callable[..., Any], nums: frozenset[int], names: frozenset[str]
) -> tuple[frozenset[int], frozenset[str]]:
    """A static argument may be passed by position or by name whichever way it was declared, as in jit."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return nums, names
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    nums = frozenset(i + len(positional) if i < 0 else i for i in nums)
    by_num = {positional[i] for i in nums if -len(positional) <= i < len(positional)}
    by_name = {positional.index(n) for n in names if n in positional}
    return nums | by_name, names | by_num


def plan(
    fun: Callable[..., Any],
    *args: Any,
    remat_policy: Any = "min_cut",
    budget: int | float | str | None = None,
    argnums: int | Sequence[int] = 0,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    prevent_cse: bool | Sequence[bool] = True,
    lowering: str = "staged",
    nested_checkpoints: str = "take_over",
    progress: Progress | None = None,
    **kwargs: Any,
) -> Plan:
    """Plans a function without running it.

    Args:
        fun: any differentiable JAX function.
        *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
        remat_policy, budget: as in `remat.checkpoint`; only policies of ours can be planned.
        argnums: which positional arguments are differentiated, as in `jax.grad`.
        static_argnums, static_argnames, prevent_cse, lowering, nested_checkpoints: as in `remat.checkpoint`.
        progress: called with one line whenever something that takes time begins; by default the logger `remat`
            is told, at level INFO. Only planning within a budget takes long. Ctrl-C ends that with the best plan so
            far, whose notes say so; pressed twice, or if there is no plan yet, it is a KeyboardInterrupt.

    Returns:
        The plan; `print` it for the explanation, pass it as `remat_policy=` to use it.

    Raises:
        PolicyError, BudgetError, TraceError: as `remat.checkpoint`.
    """
    options: dict[str, Any] = dict(
        remat_policy=remat_policy,
        budget=budget,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        prevent_cse=prevent_cse,
        lowering=lowering,
        nested_checkpoints=nested_checkpoints,
        progress=progress,
    )
    if has_nnx_modules((args, kwargs)):
        from remat import nnx

        return nnx.plan_call(fun, args, kwargs, argnums, options)
    nums, _ = _both_spellings(fun, _numbers(static_argnums), _names(static_argnames))
    chosen = functools.partial(_differentiated, len(args), argnums, nums)
    return plan_call(fun, args, kwargs, chosen, **options)


def plan_call(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Chooser,
    *,
    remat_policy: Any,
    budget: int | float | str | None,
    static_argnums: int | Iterable[int],
    static_argnames: str | Iterable[str],
    prevent_cse: bool | Sequence[bool],
    lowering: str,
    nested_checkpoints: str,
    progress: Progress | None,
) -> Plan:
    """Plans a call; `chosen` says what is differentiated, everything else is as in `plan`."""
    check_options(lowering, nested_checkpoints)
    resolved = resolve(remat_policy, budget)
    if not isinstance(resolved, (PolicyPlanner, PlanPlanner)):
        raise PolicyError(
            f"remat_policy={remat_policy!r} makes no plan: it is jax's own or off. Use "
            "remat.compile_report to see what the compiler makes of it."
        )
    wrapped = _Wrapped(
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
    if _compat.is_gradient(fun):
        reason = "the function is a gradient already (jax.grad, jax.value_and_grad)"
    elif _compat.holds_backward_pass([equation.source for equation in program.equations]):
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
        warnings.warn(
            f"{reason}, so that this plans its derivative, the second one of the loss. Plan the loss itself: "
            "remat.plan(loss, ...). For a whole step see remat.fit and remat.compile_report",
            RematWarning,
            stacklevel=4,
        )


def _differentiated(
    count: int, argnums: int | Sequence[int], static: frozenset[int], call: Call
) -> list[bool]:
    """For every array of a call with `count` positional arguments whether it is part of one of `argnums`."""
    given = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    wanted = {i + count if i < 0 else i for i in given}
    if any(not 0 <= i < count for i in wanted):
        raise TraceError(
            f"argnums={argnums!r} is out of range: the function was given {count} positional arguments"
        )
    if wanted & static:
        raise TraceError(f"argnums={argnums!r} includes a static argument")
    return [owner in wanted for owner in call.owners]
