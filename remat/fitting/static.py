"""The static arguments of a fitted step: part of the program, so that it takes no others, and is called without."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from remat.core.errors import CompileError, shown
from remat.trace.calls import key_of
from remat.trace.jitted import places_of

__all__ = ["Static"]


class Static:
    """Which arguments of a step are static, and what they are.

    Args:
        step: as `fit` was given it.
        jitted: the step as it is traced: `remat.trace.jitted.jitted`, or what the user made of it by `jax.jit`.
        numbers: `static_argnums` for it.
        args, kwargs: that it is compiled for.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        jitted: Callable[..., Any],
        numbers: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._numbers, names = _declared(jitted, numbers)
        self._names = frozenset(names)
        self._positional, defaults = _signature(step)
        named = {self._positional[n] for n in self._numbers if n in range(len(self._positional))}
        self._defaults = {n: d for n, d in defaults.items() if n in named | self._names}
        self._values, _, _ = self._split(args, kwargs)

    def without(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call that the compiled program takes.

        Raises:
            CompileError: a static one differs from what the program was compiled for.
        """
        values, rest, rest_kw = self._split(args, kwargs)
        for name in [*self._values, *(name for name in values if name not in self._values)]:
            is_known, is_given = name in self._values, name in values
            if is_known and is_given and _alike(self._values[name], values[name]):
                continue
            known = shown(self._values[name]) if is_known else "nothing"
            given = shown(values[name]) if is_given else "nothing"
            raise CompileError(
                f"this step was compiled for {known} as static argument {name!r}, which is part of the program, "
                f"and was passed {given}. Fit it again with that, or make what changes from call to call an array"
            )
        return rest, rest_kw

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str | int, Any], tuple[Any, ...], dict[str, Any]]:
        """The static arguments, by name where they have one, and the others."""
        numbers = places_of(self._numbers, len(args))
        values: dict[str | int, Any] = {
            self._positional[i] if i < len(self._positional) else i: arg
            for i, arg in enumerate(args)
            if i in numbers
        }
        values |= {name: arg for name, arg in kwargs.items() if name in self._names}
        values = {**self._defaults, **values}
        rest = tuple(arg for i, arg in enumerate(args) if i not in numbers)
        return values, rest, {n: arg for n, arg in kwargs.items() if n not in self._names}


def _declared(jitted: Any, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers and names of static arguments.

    What a user's `jax.jit` was told is in no public attribute. Where that is not found, what `fit` was told counts,
    and what is static besides is refused by the compiled step, not ignored.
    """
    inner = getattr(jitted, "jitted_fn", jitted)  # of `nnx.jit`
    info = getattr(inner, "_jit_info", None)
    return (
        tuple(getattr(info, "static_argnums", None) or numbers),
        tuple(getattr(info, "static_argnames", None) or ()),
    )


def _signature(step: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """The names of what may be passed by position, and the defaults."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return [], {}
    return (
        [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)],
        {p.name: p.default for p in parameters if p.default is not p.empty},
    )


def _alike(known: Any, given: Any) -> bool:
    """Whether two values make the same program. What has no key is compared as `jax.jit` compares it."""
    try:
        return key_of(known) == key_of(given)
    except TypeError:
        pass
    try:
        return known is given or (type(known) is type(given) and bool(known == given))
    except Exception:  # an array, say, where there was none
        return False
