"""The drop-in for `flax.linen.remat`.

Variables and random streams are lifted exactly as Flax does it; only the function transform differs. Mutable
collections (batch statistics), dropout streams, `static_argnums` and `nn.scan` over a rematted block work as
they do there. So do names: Flax calls the submodules of a transformed class after the transform, and seeds their
initial values with that name. Every policy, `None` included, gives those of `flax.linen.remat`, so that
parameters trained with one load with another.
"""

from __future__ import annotations

import functools
import inspect
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
from remat.wrapping import both_spellings, check_options, static_numbers

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
    given = sorted(static_numbers(static_argnums))
    chosen = chosen_policy(policy, remat_policy, options.get("budget"))

    def inner(
        scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any, *args: Any, **kw: Any
    ) -> Any:
        nums = [n + len(args) if n < 0 else n for n in given]
        _check_hashable(nums, args)

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
        TraceError: `concrete=True`, or `static_argnums` that are no positions of arguments; in a call: a static
            argument has no hash.
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
    nums = _static_numbers(target, methods, static_argnums)
    return transforms.lift_transform(
        _lifted,
        target,
        variables=variables,
        rngs=rngs,
        # The lifted function has no `self`, which is never traced.
        static_argnums=tuple(n - 1 if n > 0 else n for n in sorted(nums) if n),
        prevent_cse=prevent_cse,
        methods=_of_methods(methods, ours),
        **ours,
    )


def _check_concrete(concrete: bool) -> None:
    if concrete:
        raise TraceError("concrete=True is no longer supported by jax; use static_argnums instead")


def _static_numbers(
    target: Any, methods: Any, static_argnums: int | Sequence[int]
) -> frozenset[int]:
    """The numbers of static arguments, from 0 (`self`) on.

    Raises:
        TraceError: they are no integers, or there is no such position.
    """
    nums = static_numbers(static_argnums)
    if isinstance(methods, Mapping):  # whose own settings do not count `self`
        for name, own in methods.items():
            if callable(method := getattr(target, name, None)):
                bound = functools.partial(method, None)
                both_spellings(bound, static_numbers(own.get("static_argnums", ())), frozenset())
        return nums
    names = (methods,) if isinstance(methods, str) else methods or ("__call__",)
    found = [getattr(target, name, None) for name in names] if inspect.isclass(target) else [target]
    functions = [function for function in found if callable(function)]
    errors: list[TraceError] = []
    counted: set[frozenset[int]] = set()
    for function in functions:
        try:
            counted.add(both_spellings(function, nums, frozenset())[0])
        except TraceError as error:
            errors.append(error)
    if errors and not counted:  # one method may have an argument that another has not
        raise errors[0]
    return counted.pop() if len(counted) == 1 else nums


def _check_hashable(nums: Sequence[int], args: Sequence[Any]) -> None:
    """As `remat.checkpoint` does it, by the numbers that arguments have for who wrote the module."""
    for number in nums:
        if number >= len(args):
            continue
        try:
            hash(args[number])
        except TypeError as error:
            raise TraceError(
                f"static argument {number + 1} (`self` is number 0) of type {type(args[number]).__name__} is not "
                "hashable; static arguments must be hashable values such as bool, int, str or a frozen dataclass"
            ) from error


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
