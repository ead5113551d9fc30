"""`checkpoint`, the drop-in for `jax.checkpoint`, and `plan`, the look before the leap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remat.checkpointing import UNSET, checkpoint, chosen_policy
from remat.core.interrupt import Progress
from remat.planning.planners import Confirm
from remat.plans.plan import Plan
from remat.trace.jitted import has_nnx_modules
from remat.wrapping import (
    both_spellings,
    check_keywords,
    differentiated,
    plan_call,
    static_names,
    static_numbers,
)

__all__ = ["checkpoint", "plan"]


def plan(
    fun: Callable[..., Any],
    *args: Any,
    remat_policy: Any = UNSET,
    budget: int | float | str | None = None,
    confirm: bool | int | str | Confirm | None = None,
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
        remat_policy, budget, confirm: as in `remat.checkpoint`; only policies of ours can be planned.
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
    if callable(fun):
        check_keywords(fun, kwargs, plan)
    options: dict[str, Any] = dict(
        remat_policy=chosen_policy(None, remat_policy, budget),
        budget=budget,
        confirm=confirm,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        prevent_cse=prevent_cse,
        lowering=lowering,
        nested_checkpoints=nested_checkpoints,
        progress=progress,
    )
    if has_nnx_modules((args, kwargs)):
        from remat import nnx  # Flax need not be there

        return nnx.plan_call(fun, args, kwargs, argnums, options)
    nums, _ = both_spellings(fun, static_numbers(static_argnums), static_names(static_argnames))
    chosen = functools.partial(differentiated, len(args), argnums, nums)
    return plan_call(fun, args, kwargs, chosen, **options)
