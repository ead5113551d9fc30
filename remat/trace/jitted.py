"""`jax.jit` for whatever a step is called with: arrays, models with leaves that are no arrays, modules of NNX.

A step is compiled as it would run. `jax.jit` takes arrays and numbers; a model with functions or flags as leaves
(equinox) is split as `remat.checkpoint` splits it. The modules and optimizers of NNX are changed by a step: their
new state is a result, as under `nnx.jit`. Without it, XLA would remove all that only the new state depends on, the
backward pass for one.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from remat.core.errors import CompileError, TraceError
from remat.trace.calls import Call, Results, flatten_call, in_models, is_array, split_results

__all__ = ["has_nnx_modules", "jitted", "modules_unchanged", "places_of"]


def jitted(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: tuple[int, ...] = (),
    donate_argnums: tuple[int, ...] = (),
) -> Any:
    """Returns a function that can be traced, lowered, compiled and called for arguments of a kind.

    Args:
        f: a function; one that is jitted already is returned as it is, unless something is static or donated.
        args, kwargs: of a call; what counts is what kinds of things they hold.
        static_argnums, donate_argnums: as for `jax.jit`.
    """
    is_jitted = hasattr(f, "trace") and hasattr(f, "lower")
    if is_jitted and not static_argnums and not donate_argnums:
        return f
    if has_nnx_modules((args, kwargs)):
        from flax import nnx

        return nnx.jit(f, static_argnums=static_argnums, donate_argnums=donate_argnums)
    static = places_of(static_argnums, len(args))
    dynamic = ([a for i, a in enumerate(args) if i not in static], kwargs)
    as_jax = jax.jit(f, static_argnums=static_argnums, donate_argnums=donate_argnums)
    if not _has_fields(dynamic):
        return as_jax
    return _Split(f, None if _needs_split(dynamic) else as_jax, static_argnums, donate_argnums)


def places_of(numbers: Iterable[int], count: int) -> frozenset[int]:
    """Places of arguments among `count` that are passed by position; one that is passed by name has none.

    As in jax, numbers below 0 count from the end of the call.
    """
    return frozenset(n % count for n in numbers if -count <= n < count)


def has_nnx_modules(tree: Any) -> bool:
    """Whether a tree holds what functions change: NNX's modules, optimizers, random streams, variables.

    Not so its states, which are data: a function that is given one returns the new one.
    """
    graphlib = sys.modules.get("flax.nnx.graphlib")
    if graphlib is None:  # then nobody has made one
        return False
    state = sys.modules["flax.nnx"].State

    def stops(leaf: Any) -> bool:
        return isinstance(leaf, state) or graphlib.is_graph_node(leaf)

    found = (leaf for leaf in jax.tree.leaves(tree, is_leaf=stops) if stops(leaf))
    return not all(isinstance(leaf, state) for leaf in found)


@contextmanager
def modules_unchanged(tree: Any) -> Iterator[None]:
    """Holds that what is done inside leaves the modules of NNX in a tree as they are.

    A traced function has copies of them, which nobody sees again.

    Raises:
        TraceError: one was changed.
    """
    if not has_nnx_modules(tree):
        yield
        return
    before, structure = jax.tree.flatten(tree)
    yield
    after, new_structure = jax.tree.flatten(tree)
    if structure != new_structure or any(map(operator.is_not, before, after)):
        raise TraceError(
            "the function changes modules of flax.nnx that it was given (batch statistics, or the counters of "
            "dropout's random streams), and remat.checkpoint, like jax.checkpoint, would lose the changes: wrap it "
            "with remat.nnx.remat instead"
        )


def _has_fields(tree: Any) -> bool:
    """Whether there are leaves that `jax.jit` refuses, or numbers and flags that are fields of a model."""
    leaves, structure = jax.tree.flatten(tree)
    if not all(isinstance(leaf, bool) or is_array(leaf) for leaf in leaves):
        return True
    numbers = [isinstance(leaf, (bool, int, float, complex)) for leaf in leaves]
    return any(numbers) and any(map(min, zip(numbers, in_models(structure), strict=True)))


def _needs_split(tree: Any) -> bool:
    """Whether there is no use in trying `jax.jit`: leaves that it refuses, or a model of equinox."""
    leaves, structure = jax.tree.flatten(tree)
    usual = all(isinstance(leaf, bool) or is_array(leaf) for leaf in leaves)
    return not usual or any(in_models(structure, "equinox"))


class _Split:
    """A function whose arrays alone are traced, wrapped for `jax.jit` and its stages."""

    def __init__(
        self,
        f: Callable[..., Any],
        as_jax: Any,
        static_argnums: tuple[int, ...],
        donate_argnums: tuple[int, ...],
    ) -> None:
        self.f, self.as_jax = f, as_jax
        self.static_argnums, self.donate_argnums = static_argnums, donate_argnums

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces: as `jax.jit` does, where it can; numbers in models are part of the program otherwise."""
        if self.as_jax is not None:
            try:
                return self.as_jax.trace(*args, **kwargs)
            except jax.errors.JAXTypeError:  # a number was needed while tracing
                pass
        return self._trace(args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Stage:
        count = len(args)
        static = {i: args[i] for i in places_of(self.static_argnums, count)}
        donated = places_of(self.donate_argnums, count)
        positions = [i for i in range(count) if i not in static]
        call = flatten_call(tuple(args[i] for i in positions), kwargs)
        results: list[Results] = []

        def of_arrays(*groups: list[Any]) -> list[Any]:
            given, named = call.rebuild(_ungrouped(call, groups))
            values = iter(given)
            full = [static[i] if i in static else next(values) for i in range(count)]
            arrays, rest = split_results(self.f(*full, **named))
            results.append(rest)
            return arrays

        functools.update_wrapper(of_arrays, self.f, updated=())
        # Arguments stay arguments, of which each may be donated; those by name come last.
        numbers = tuple(k for k, i in enumerate(positions) if i in donated)
        traced = jax.jit(of_arrays, donate_argnums=numbers).trace(*_grouped(call, len(positions)))
        return _Stage(traced, call, len(positions), results[-1])


def _grouped(call: Call, count: int) -> list[list[Any]]:
    """The arrays of a call by argument, those of keyword arguments in a last group."""
    groups: list[list[Any]] = [[] for _ in range(count + 1)]
    for leaf, owner in zip(call.leaves, call.owners, strict=True):
        groups[count if owner is None else owner].append(leaf)
    return groups


def _ungrouped(call: Call, groups: Sequence[list[Any]]) -> list[Any]:
    """`_grouped` undone: the arrays of a call in its order."""
    given = [iter(group) for group in groups]
    return [next(given[-1 if owner is None else owner]) for owner in call.owners]


class _Stage:
    """A stage of `jax.jit` on the way of a `_Split`: traced, lowered, or compiled."""

    def __init__(self, stage: Any, call: Call, count: int, results: Results) -> None:
        self.stage, self.call, self.count, self.results = stage, call, count, results

    def lower(self, **options: Any) -> _Stage:
        return _Stage(self.stage.lower(**options), self.call, self.count, self.results)

    def compile(self, **options: Any) -> _Stage:
        return _Stage(self.stage.compile(**options), self.call, self.count, self.results)

    def memory_analysis(self) -> Any:
        return self.stage.memory_analysis()

    def as_text(self) -> Any:
        return self.stage.as_text()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a compiled step.

        Raises:
            CompileError: what is no array differs from what the step was compiled with.
        """
        call = flatten_call(args, kwargs)
        if call.key != self.call.key:
            raise CompileError(
                "this step was compiled for other values of what is no array in its arguments (functions, flags, "
                "numbers in models), which are part of the program. Compile it again, or make what changes "
                "from call to call an array"
            )
        return self.results.rebuild(self.stage(*_grouped(call, self.count)))
