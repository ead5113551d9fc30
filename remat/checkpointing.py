"""The drop-in for `jax.checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from remat import compat
from remat.core.errors import PolicyError, TraceError, nearest, shown, warn
from remat.planning.planners import Confirm, PlanPlanner, PolicyPlanner
from remat.resolve import JaxPolicy, Off, resolve
from remat.trace.calls import Filter, flatten_call
from remat.wrapping import (
    Wrapped,
    both_spellings,
    check_options,
    named_like,
    static_names,
    static_numbers,
)

__all__ = ["UNSET", "checkpoint", "checkpoint_filtered", "chosen_policy"]

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    remat_policy: Any = UNSET,
    policy: Callable[..., Any] | None = None,
    budget: int | float | str | None = None,
    confirm: bool | int | str | Confirm | None = None,
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
        remat_policy: one of our policy names, such as `"low_memory"` or `"ilp"`; by default `"min_cut"`, and
            with a budget `"auto"`, which turns to `"ilp"` where `"min_cut"` does not meet it; a policy object
            such as `remat.policies.MinCut(heavy="batched")`; a `remat.Plan` or the path of a saved one; the name
            of one of `jax.checkpoint_policies` or any jax policy (handed to `jax.checkpoint`); None or `"none"`
            for no rematerialization; `"minimal"`.
        policy: as in `jax.checkpoint`; exclusive with `remat_policy`.
        budget: bound on the peak of everything that is neither argument nor result: bytes, `"6GiB"`, or a
            fraction of the peak without rematerialization.
        confirm: how the compiler is asked whether the budget is met, which takes compiles, remembered on disk: True
            or False; a number of compiles; the device to compile for (`"h200"`, which need not be there, `"cpu"`,
            `"attached"`); or a `remat.Confirm`. None does what the environment variable `REMAT_CONFIRM` says, and
            otherwise `"auto"`: the attached GPU or TPU, or else the policy's if XLA's compiler for it is installed.
            Without it the budget is met as predicted.
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
        CompileError: `confirm` names a device that cannot be compiled for.
        TraceError: no result or no argument of `fun` is differentiable (when differentiated); or `fun` changes
            modules of flax.nnx: `remat.nnx.remat` keeps what it changes.
        DifferentiationError: forward-mode differentiation of the staged lowering.
    """
    options = dict(
        remat_policy=remat_policy,
        policy=policy,
        budget=budget,
        confirm=confirm,
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
    resolved = resolve(chosen_policy(policy, remat_policy, budget), budget, confirm)
    if isinstance(resolved, Off):
        return fun
    if isinstance(resolved, JaxPolicy):
        nums, words = static_numbers(static_argnums), static_names(static_argnames)
        wrapped_by_jax = compat.jax_checkpoint(
            fun,
            policy=resolved.policy,
            prevent_cse=prevent_cse,
            static_argnums=tuple(nums),
            static_argnames=tuple(words),
        )
        names = compat.names_of_policy(resolved.policy)
        if not names:
            return wrapped_by_jax
        return _checking_names(fun, wrapped_by_jax, names, *both_spellings(fun, nums, words))
    wrapped = Wrapped(
        fun, resolved, static_argnums, static_argnames, prevent_cse, lowering, nested_checkpoints
    )
    return _rematted(wrapped)


def _rematted(wrapped: Wrapped) -> Callable[..., Any]:
    @named_like(wrapped.fun)
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
    confirm: bool | int | str | Confirm | None,
    prevent_cse: bool,
    lowering: str,
    nested_checkpoints: str,
) -> Callable[..., Any]:
    """Returns `checkpoint(fun)` by a policy that plans, with a say in which leaves are traced."""
    resolved = resolve(remat_policy, budget, confirm)
    assert isinstance(resolved, (PolicyPlanner, PlanPlanner))
    return _rematted(
        Wrapped(fun, resolved, (), (), prevent_cse, lowering, nested_checkpoints, is_traced)
    )


def _checking_names(
    fun: Callable[..., Any],
    wrapped_by_jax: Callable[..., Any],
    names: frozenset[str],
    static_argnums: frozenset[int],
    static_argnames: frozenset[str],
) -> Callable[..., Any]:
    """Calls a function wrapped with one of jax's policies of names, once it is known that it has such names."""
    checked: set[Any] = set()

    @named_like(fun)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        try:
            call = flatten_call(args, kwargs, static_argnums, static_argnames)
        except TraceError:  # a static argument without a hash, which jax takes
            return wrapped_by_jax(*args, **kwargs)
        key = (call.key, tuple(map(jax.typeof, call.leaves)))
        if call.key is None or key not in checked:

            def flat(*leaves: Any) -> Any:
                given, named = call.rebuild(leaves)
                return wrapped_by_jax(*given, **named)

            _check_names(names, compat.open_jaxpr(jax.make_jaxpr(flat)(*call.leaves))[0].eqns)
            checked.add(key)
        return wrapped_by_jax(*args, **kwargs)

    return rematted


def _check_names(names: frozenset[str], eqns: Sequence[Any]) -> None:
    """Raises PolicyError if a policy of jax looks for names of which the function has none; warns of a part."""
    found = compat.checkpoint_names(eqns)
    missing = sorted(names - found)
    # A derivative rule may name what it keeps; it is traced when it is differentiated.
    if not missing or compat.calls_derivative_rules(eqns):
        return
    text = (
        f"the policy keeps values by name, and the names {missing} tag no value of the function; its "
        f"checkpoint_name tags are {sorted(found)}{nearest(missing[0], sorted(found))}"
    )
    if len(missing) == len(names):
        raise PolicyError(text)
    warn(text)


def chosen_policy(policy: Any, remat_policy: Any, budget: int | float | str | None) -> Any:
    """Returns which of the two spellings was given; neither means `"min_cut"`, or `"auto"` within a budget.

    Raises:
        PolicyError: both were given.
    """
    if policy is None:
        if remat_policy is UNSET:
            return "min_cut" if budget is None else "auto"
        return remat_policy
    if remat_policy is not UNSET and remat_policy is not None:
        raise PolicyError(
            f"both policy={shown(policy)} and remat_policy={shown(remat_policy)} were given; they mean the same: "
            "pass one of them"
        )
    return policy
