"""The drop-in for `flax.nnx.remat`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

try:
    from flax import nnx
    from flax.nnx.transforms import general
except ImportError as error:  # pragma: no cover - exercised by the packaging test
    raise ImportError("remat.nnx needs Flax; install it with `pip install flax`") from error

import jax

from remat.checkpointing import UNSET, chosen_policy
from remat.checkpointing import checkpoint as _checkpoint
from remat.core.errors import TraceError
from remat.planning.planners import Confirm
from remat.plans.plan import Plan
from remat.resolve import JaxPolicy, Off, resolve
from remat.trace.calls import as_tuple, is_array
from remat.wrapping import plan_call as _plan_call

__all__ = ["checkpoint", "plan_call", "remat"]


def remat(
    f: Any = None,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    remat_policy: Any = UNSET,
    budget: int | float | str | None = None,
    confirm: bool | int | str | Confirm | None = None,
    lowering: str = "staged",
    nested_checkpoints: str = "take_over",
) -> Any:
    """Returns `f`, a function of NNX modules and arrays, keeping less for its backward pass.

    A drop-in for `flax.nnx.remat`: updates of variables (batch statistics, random counters) inside `f`
    reach the caller's modules.

    Args:
        f: the function; None returns a decorator.
        prevent_cse, static_argnums, policy: as in `flax.nnx.remat`.
        graph, graph_updates: as in `flax.nnx.remat`; our own policies need graph mode, Flax's default.
        remat_policy, budget, confirm, lowering, nested_checkpoints: as in `remat.checkpoint`.

    Raises:
        PolicyError, BudgetError: as `remat.checkpoint`.
        TraceError: a class, a module, a bound method, or tree mode together with a policy of ours.
    """
    if f is None:
        return functools.partial(
            remat,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            policy=policy,
            graph=graph,
            graph_updates=graph_updates,
            remat_policy=remat_policy,
            budget=budget,
            confirm=confirm,
            lowering=lowering,
            nested_checkpoints=nested_checkpoints,
        )
    chosen = chosen_policy(policy, remat_policy, budget)
    resolved = resolve(chosen, budget, confirm)
    if isinstance(resolved, Off):
        return f
    if isinstance(resolved, JaxPolicy):
        return nnx.remat(
            f,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,  # pyright: ignore[reportArgumentType]
            policy=resolved.policy,
            graph=graph,
            graph_updates=graph_updates,
        )
    _check(f, graph, graph_updates)
    inner = _checkpoint(
        general.merge_inputs(f, ctxtag="remat"),
        remat_policy=chosen,
        budget=budget,
        confirm=confirm,
        prevent_cse=prevent_cse,
        static_argnums=static_argnums,
        lowering=lowering,
        nested_checkpoints=nested_checkpoints,
    )
    lifted = nnx.update_context("remat")(general.split_inputs(inner, ctxtag="remat"))

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return lifted(*_positional(f, args, kwargs))

    return wrapper


class _Planned(Exception):
    """Ends a call that was made to be planned."""


def plan_call(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int],
    options: dict[str, Any],
) -> Plan:
    """`remat.plan` of a function of NNX modules: the plan that `remat.nnx.remat` makes of it under `nnx.grad`.

    Of modules the `nnx.Param`s are differentiated, of other arguments all arrays, as by `nnx.grad`.
    """
    _check(f, None, None)
    given = _positional(f, args, kwargs)
    count = len(given)
    wanted = as_tuple(argnums)
    wanted = {i + count if i < 0 else i for i in wanted}
    if any(not 0 <= i < count for i in wanted):
        raise TraceError(
            f"argnums={argnums!r} is out of range: the function was given {count} positional arguments"
        )
    made: list[Plan] = []

    def planned(*pure: Any) -> Any:
        flags = [
            index in wanted and kept
            for index, arg in enumerate(pure)
            for leaf, kept in _parameters(arg)
            if is_array(leaf)
        ]
        inner = general.merge_inputs(f, ctxtag="remat")
        made.append(_plan_call(inner, pure, {}, lambda call: flags, **options))
        raise _Planned

    lifted = nnx.update_context("remat")(general.split_inputs(planned, ctxtag="remat"))
    with contextlib.suppress(_Planned):
        lifted(*given)
    return made[0]


def _parameters(arg: Any) -> list[tuple[Any, bool]]:
    """The leaves of an argument, each with whether it is a parameter, or no part of a module."""

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    found: list[tuple[Any, bool]] = []
    for node in jax.tree.leaves(arg, is_leaf=is_variable):
        kept = not is_variable(node) or isinstance(node, nnx.Param)
        found += [(leaf, kept) for leaf in jax.tree.leaves(node)]
    return found


def _check(f: Any, graph: bool | None, graph_updates: bool | None) -> None:
    if inspect.isclass(f):
        raise TraceError(
            f"remat.nnx.remat was given the class {f.__qualname__!r}; expected a function or a method: decorate "
            f"`__call__` with @remat.nnx.remat, or call remat.nnx.remat({f.__name__}.__call__)(module, ...)"
        )
    if inspect.ismethod(f):
        raise TraceError(
            f"remat.nnx.remat was given the bound method {f.__qualname__!r}; pass the function and the "
            f"module: remat.nnx.remat({type(f.__self__).__name__}.{f.__name__})(module, ...)"
        )
    if isinstance(f, nnx.Module):
        name = type(f).__name__
        raise TraceError(
            f"remat.nnx.remat was given a module of class {name!r}; pass the function and the module: "
            f"remat.nnx.remat({name}.__call__)(module, ...)"
        )
    if graph is False or graph_updates is False:
        raise TraceError(
            "remat's own policies need NNX's graph mode (graph=True, graph_updates=True, Flax's default); "
            "in tree mode modules are pytrees: use remat.checkpoint(f) instead"
        )


def _positional(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """NNX splits positional arguments; keyword ones are put where the signature has them."""
    if not kwargs:
        return args
    bound = inspect.signature(f).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TraceError(
            f"keyword-only arguments {sorted(bound.kwargs)} cannot be passed through remat.nnx.remat; "
            "make them positional"
        )
    return bound.args


checkpoint = remat
