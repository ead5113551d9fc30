"""The drop-in for `equinox.filter_checkpoint`.

Arrays are traced; everything else in a model, Python numbers included, is part of the program, in arguments and in
results. `remat.checkpoint`, `remat.plan`, `remat.compile_report` and `remat.fit` take models as they are; this
is for what only equinox has: wrappers that are modules, and Python numbers as arguments that stay numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

try:
    import equinox as eqx
except ImportError as error:  # pragma: no cover - exercised by the packaging test
    raise ImportError(
        "remat.equinox needs equinox; install it with `pip install equinox`"
    ) from error

import jax

from remat.checkpointing import UNSET, checkpoint_filtered, chosen_policy
from remat.planning.planners import Confirm
from remat.resolve import JaxPolicy, Off, resolve
from remat.wrapping import check_options

__all__ = ["checkpoint", "filter_checkpoint", "remat"]


class _Checkpointed(eqx.Module):
    """A wrapped function or module. The arrays of a module are differentiated through it, as equinox has it."""

    _fun: Callable[..., Any]
    _call: Callable[..., Any] = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what is wrapped."""
        return self._call(self._fun, args, kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else jax.tree_util.Partial(self, instance)


def _apply(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fun(*args, **kwargs)


def filter_checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., Any] | None = None,
    remat_policy: Any = UNSET,
    budget: int | float | str | None = None,
    confirm: bool | int | str | Confirm | None = None,
    lowering: str = "staged",
    nested_checkpoints: str = "take_over",
) -> Any:
    """Returns a function or module that keeps less for its backward pass.

    A drop-in for `equinox.filter_checkpoint`, also as a decorator of functions and of methods.

    Args:
        fun: a function of models and arrays, or a module that is called; None returns a decorator.
        prevent_cse, policy: as in `equinox.filter_checkpoint`.
        remat_policy, budget, confirm, lowering, nested_checkpoints: as in `remat.checkpoint`.

    Raises:
        PolicyError, BudgetError: as `remat.checkpoint`.
    """
    options: dict[str, Any] = dict(
        prevent_cse=prevent_cse,
        remat_policy=chosen_policy(policy, remat_policy, budget),
        budget=budget,
        confirm=confirm,
        lowering=lowering,
        nested_checkpoints=nested_checkpoints,
    )
    if fun is None:
        return functools.partial(filter_checkpoint, **options)
    check_options(lowering, nested_checkpoints)
    resolved = resolve(options["remat_policy"], budget, confirm)
    if isinstance(resolved, Off):
        return fun
    if isinstance(resolved, JaxPolicy):
        return eqx.filter_checkpoint(fun, prevent_cse=prevent_cse, policy=resolved.policy)
    wrapped = _Checkpointed(fun, _call_of(fun, options))
    return eqx.module_update_wrapper(wrapped)


def _call_of(fun: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """What a wrapper calls: `(fun, args, kwargs)` to results; equal for equal options, like any static field."""
    settings = tuple(options.items())
    # 1 and 1.0 are equal, but not as budgets.
    kind = type(options["budget"])
    return _module_call(settings, kind) if _is_tree(fun) else _FunctionCall(fun, settings, kind)


def _is_tree(fun: Any) -> bool:
    return not jax.tree_util.all_leaves([fun])


@functools.lru_cache(maxsize=256)
def _module_call(settings: tuple[tuple[str, Any], ...], kind: type) -> Callable[..., Any]:
    """A module is an argument of what is wrapped, so that modules of one structure share a trace."""
    del kind
    return checkpoint_filtered(_apply, eqx.is_array, **dict(settings))


class _FunctionCall:
    """Calls a plain function, whose traces live as long as the function does."""

    def __init__(
        self, fun: Callable[..., Any], settings: tuple[tuple[str, Any], ...], kind: type
    ) -> None:
        self.key = (fun, settings, kind)
        self.rematted = checkpoint_filtered(fun, eqx.is_array, **dict(settings))

    def __call__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        del fun
        return self.rematted(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FunctionCall) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


checkpoint = remat = filter_checkpoint
