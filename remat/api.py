"""The drop-in for `jax.checkpoint`, and `plan`, the look before the leap."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from remat import _compat, operator_substitution
from remat.errors import PolicyError, TraceError
from remat.interrupt import Progress, planning
from remat.lower import Planner, StagedFunction
from remat.override import active_attempt
from remat.plan import Plan
from remat.program import evaluate, lift_tracers
from remat.resolve import JaxPolicy, Off, PlanPlanner, PolicyPlanner, resolve
from remat.segments import annotate_program, differentiable_flags
from remat.trace import check_differentiable, trace_primal

__all__ = ["UNSET", "check_options", "checkpoint", "chosen_policy", "plan"]

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()
_CACHE_SIZE = 512


@dataclass(frozen=True)
class _Call:
    """A call with its arrays flattened out.

    Attributes:
        leaves: the arrays.
        key: hashable rest of the call: tree structure and static arguments.
        rebuild: leaves back to `(args, kwargs)`.
    """

    leaves: list[Any]
    key: Any
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def _flatten_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_argnums: frozenset[int],
    static_argnames: frozenset[str],
) -> _Call:
    nums = {i + len(args) if i < 0 else i for i in static_argnums}
    static = {i: args[i] for i in sorted(nums) if i < len(args)}
    static_kw = {name: kwargs[name] for name in sorted(static_argnames) if name in kwargs}
    for name, value in (*static.items(), *static_kw.items()):
        try:
            hash(value)
        except TypeError as error:
            raise TraceError(
                f"static argument {name!r} of type {type(value).__name__} is not hashable; static "
                "arguments must be hashable values such as bool, int, str or a frozen dataclass"
            ) from error
    dynamic = tuple(a for i, a in enumerate(args) if i not in static)
    dynamic_kw = {name: value for name, value in kwargs.items() if name not in static_kw}
    everything, tree = jax.tree.flatten((dynamic, dynamic_kw))
    # Leaves that are no numbers (an activation function or a flag in an equinox module) are part of the
    # structure.
    fixed = {i: leaf for i, leaf in enumerate(everything) if not _is_array(leaf)}
    leaves = [leaf for leaf in everything if _is_array(leaf)]
    count = len(args)

    def rebuild(new: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arrays = iter(new)
        full_leaves = [fixed[i] if i in fixed else next(arrays) for i in range(len(everything))]
        rest, rest_kw = jax.tree.unflatten(tree, full_leaves)
        values = iter(rest)
        full = tuple(static[i] if i in static else next(values) for i in range(count))
        return full, {**rest_kw, **static_kw}

    key = (tree, tuple(static.items()), tuple(static_kw.items()), tuple(fixed.items()))
    return _Call(leaves, key, rebuild)


def _is_array(leaf: Any) -> bool:
    # A Python bool is a switch: tracing it, as `jax.checkpoint` does, only forbids `if`.
    kinds = (jax.Array, np.ndarray, np.generic, int, float, complex, jax.ShapeDtypeStruct)
    number = isinstance(leaf, kinds) and not isinstance(leaf, bool)
    return number or hasattr(leaf, "__jax_array__")


@dataclass(frozen=True)
class _Traced:
    """A function traced for one kind of call."""

    function: StagedFunction
    tree: Any
    lifted: tuple[Any, ...]
    by_policy: bool

    def __call__(self, leaves: Sequence[Any]) -> Any:
        inputs = (*self.lifted, *leaves)
        function = self.function
        outs = function.combined(inputs, self._by_policy) if self.by_policy else function(*inputs)
        return jax.tree.unflatten(self.tree, outs)

    @functools.cached_property
    def _by_policy(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The program under a policy of jax."""
        program, planner = self.function.primal, self.function.planner
        if isinstance(planner, PlanPlanner):
            # Which arguments are differentiated does not matter: the names are there in any case.
            return functools.partial(self._annotated, planner.made)

        # Planned only when it is differentiated, in whichever mode.
        @jax.custom_jvp
        def call(*inputs: Any) -> list[Any]:
            return evaluate(program, inputs)

        @functools.partial(call.defjvp, symbolic_zeros=True)
        def derivative(inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            active = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
            run = self._planned(inputs)

            def of_active(*values: Any) -> list[Any]:
                full = list(inputs)
                for index, value in zip(active, values, strict=True):
                    full[index] = value
                return list(run(full))

            return jax.jvp(of_active, [inputs[i] for i in active], [tangents[i] for i in active])

        return lambda inputs: call(*inputs)

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
    ) -> None:
        self.fun = fun
        self.planner = planner
        self.static_argnums, self.static_argnames = _both_spellings(
            fun, _numbers(static_argnums), _names(static_argnames)
        )
        # `prevent_cse` may be one flag or one per argument; a stage's barrier is all or nothing.
        self.barriers = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
        self.inline_checkpoints = nested_checkpoints == "take_over"
        self.by_policy = lowering == "policy"
        self.cache = _cache_of(fun)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        return _flatten_call(args, kwargs, self.static_argnums, self.static_argnames)

    def traced(self, call: _Call) -> _Traced:
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
            call.key,
            tuple(map(_aval_of, call.leaves)),
            _compat.trace_context(),
        )
        found = cache.get(key)
        if found is None:
            found = self._trace(call, barriers, planner)
            if not found.lifted:
                if len(cache) >= _CACHE_SIZE:
                    cache.pop(next(iter(cache)))
                cache[key] = found
        if attempt is not None:
            attempt.called(found.function, self.fun, (*found.lifted, *call.leaves))
        return found

    def _trace(self, call: _Call, barriers: bool, planner: Planner) -> _Traced:
        fun, rebuild = self.fun, call.rebuild

        def flat(*leaves: Any) -> tuple[list[Any], Any]:
            args, kwargs = rebuild(leaves)
            return jax.tree.flatten(fun(*args, **kwargs))

        program, tree = trace_primal(
            flat,
            call.leaves,
            inline_checkpoints=self.inline_checkpoints,
            keep=operator_substitution.called_by_name(),
        )
        program, lifted = lift_tracers(program)
        function = StagedFunction(
            program,
            planner,
            barriers=barriers,
            inline_checkpoints=self.inline_checkpoints,
            name_values=self.by_policy,
        )
        return _Traced(function, tree, lifted, self.by_policy)


_Caches = weakref.WeakKeyDictionary[Any, dict[Any, _Traced]]
_CACHES: _Caches = weakref.WeakKeyDictionary()


def _cache_of(fun: Callable[..., Any], caches: _Caches = _CACHES) -> dict[Any, _Traced]:
    """The traces of a function, shared by all its wrappers, so that wrapping anew costs nothing."""
    try:
        return caches.setdefault(fun, {})
    except TypeError:  # not hashable or not weakly referable
        return {}


def _aval_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (leaf.shape, leaf.dtype)
    return jax.typeof(leaf)


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
        return _compat.jax_checkpoint(
            fun,
            policy=resolved.policy,
            prevent_cse=prevent_cse,
            static_argnums=tuple(_numbers(static_argnums)),
            static_argnames=tuple(_names(static_argnames)),
        )
    wrapped = _Wrapped(
        fun, resolved, static_argnums, static_argnames, prevent_cse, lowering, nested_checkpoints
    )

    @_named_like(fun)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        call = wrapped.flatten(args, kwargs)
        return wrapped.traced(call)(call.leaves)

    return rematted


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
    traced = wrapped.traced(call)
    chosen = _differentiated(call, args, argnums, wrapped.static_argnums)
    lifted = (False,) * len(traced.lifted)
    program = traced.function.primal
    flags = tuple(
        flag and jnp.issubdtype(program.avals[v].dtype, jnp.inexact)
        for flag, v in zip((*lifted, *chosen), program.inputs, strict=True)
    )
    check_differentiable(traced.function.whole, flags)
    with planning(progress) if resolved.takes_long else nullcontext():
        return traced.function.staged([*traced.lifted, *call.leaves], flags).plan


def _differentiated(
    call: _Call,
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    static: frozenset[int],
) -> list[bool]:
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    wanted = tuple(i + len(args) if i < 0 else i for i in wanted)
    if any(not 0 <= i < len(args) for i in wanted):
        raise TraceError(
            f"argnums={argnums!r} is out of range: the function was given {len(args)} positional "
            "arguments"
        )
    if any(i in static for i in wanted):
        raise TraceError(f"argnums={argnums!r} includes a static argument")
    flags: list[bool] = []
    for index, arg in enumerate(args):
        if index not in static:
            flags += [index in wanted] * sum(map(_is_array, jax.tree.leaves(arg)))
    return flags + [False] * (len(call.leaves) - len(flags))
