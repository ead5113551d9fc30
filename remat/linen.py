"""The drop-in for `flax.linen.remat`.

Variables and random streams are lifted exactly as Flax does it; only the function transform differs. Mutable
collections (batch statistics), dropout streams, `static_argnums` and `nn.scan` over a rematted block work as
they do there. So do names: Flax calls the submodules of a transformed class after the transform, and seeds their
initial values with that name. Every policy, `None` included, gives those of `flax.linen.remat`, so that
parameters trained with one load with another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    from flax.core import lift
    from flax.linen import transforms
except ImportError as error:  # pragma: no cover - exercised by the packaging test
    raise ImportError("remat.linen needs Flax; install it with `pip install flax`") from error

from remat.checkpointing import UNSET, chosen_policy
from remat.checkpointing import checkpoint as _checkpoint
from remat.core.errors import TraceError
from remat.planning.planners import Confirm
from remat.resolve import resolve
from remat.wrapping import check_options

__all__ = ["checkpoint", "remat"]


def _lifted(
    fn: Callable[..., Any],
    variables: Any = True,
    rngs: Any = True,
    concrete: bool = False,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., Any] | None = None,
    remat_policy: Any = UNSET,
    **options: Any,
) -> Callable[..., Any]:
    """`flax.core.lift.checkpoint` with another transform inside."""
    _check_concrete(concrete)
    nums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    chosen = chosen_policy(policy, remat_policy, options.get("budget"))

    def inner(
        scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any, *args: Any, **kw: Any
    ) -> Any:
        # Two leading arguments were added, the variables and the random streams.
        @functools.partial(
            _checkpoint,
            remat_policy=chosen,
            static_argnums=tuple(n + 2 for n in nums),
            **options,
        )
        @functools.wraps(fn)
        def rematted(variable_groups: Any, rng_groups: Any, *args: Any, **kw: Any) -> Any:
            scope = scope_fn(variable_groups, rng_groups)
            y = fn(scope, *args, **kw)
            return y, repack_fn(scope)

        return rematted(variable_groups, rng_groups, *args, **kw)

    return lift.pack(inner, (variables,), (variables,), (rngs,), name="remat", enable_kwargs=True)


# Flax names the submodules of a transformed class after the transform: `CheckpointBlock_0`.
_lifted.__name__ = lift.checkpoint.__name__


def remat(
    target: Any,
    variables: Any = True,
    rngs: Any = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    methods: Any = None,
    *,
    remat_policy: Any = UNSET,
    budget: int | float | str | None = None,
    confirm: bool | int | str | Confirm | None = None,
    lowering: str = "staged",
    nested_checkpoints: str = "take_over",
) -> Any:
    """Returns a module class (or a function of a module) that keeps less for its backward pass.

    A drop-in for `flax.linen.remat`: the first eight arguments are Flax's, with their meaning.

    Args:
        target: a `flax.linen.Module` class, or a function that takes a module first.
        variables, rngs: collections and random streams to lift; all of them by default.
        concrete: deprecated in Flax; True is an error.
        prevent_cse, static_argnums, policy: as in `flax.linen.remat` (`self` counts as argument 0).
        methods: names of the methods to wrap, `__call__` by default; or, as Flax has it, a dictionary from
            names to arguments of their own (whose `static_argnums` do not count `self`).
        remat_policy, budget, confirm, lowering, nested_checkpoints: as in `remat.checkpoint`.

    Raises:
        PolicyError, BudgetError: as `remat.checkpoint`.
        TraceError: `concrete=True`.
    """
    _check_concrete(concrete)
    chosen = chosen_policy(policy, remat_policy, budget)
    resolve(chosen, budget, confirm)
    check_options(lowering, nested_checkpoints)
    ours = {
        "remat_policy": chosen,
        "budget": budget,
        "confirm": confirm,
        "lowering": lowering,
        "nested_checkpoints": nested_checkpoints,
    }
    nums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    return transforms.lift_transform(
        _lifted,
        target,
        variables=variables,
        rngs=rngs,
        static_argnums=tuple(n - 1 for n in nums),  # the lifted function has no `self`
        prevent_cse=prevent_cse,
        methods=_of_methods(methods, ours),
        **ours,
    )


def _check_concrete(concrete: bool) -> None:
    if concrete:
        raise TraceError("concrete=True is no longer supported by jax; use static_argnums instead")


def _of_methods(methods: Any, ours: Mapping[str, Any]) -> Any:
    """Methods with settings of their own, which Flax takes alone: ours hold where a method says nothing else."""
    if not isinstance(methods, Mapping):
        return methods
    return {
        name: {**(_without(ours, "remat_policy") if "policy" in own else ours), **own}
        for name, own in methods.items()
    }


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


checkpoint = remat
