"""TARGETs of the command line: `module:factory`, found, imported, called and checked, with good errors."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any

from remat.core.errors import RematError, nearest

__all__ = ["TargetError", "load_target"]


class TargetError(RematError, ValueError):
    """A TARGET of the command line that is not what it has to be.

    Attributes:
        is_there: it was found, and fails, or makes something else.
    """

    def __init__(self, message: str, *, is_there: bool = False) -> None:
        super().__init__(message)
        self.is_there = is_there


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function and the example arguments that `module:factory` makes.

    Raises:
        TargetError: it cannot be found or imported, or makes something else.
    """
    module_name, colon, name = target.partition(":")
    if colon and (module_name.endswith(".py") or "/" in module_name):
        path = PurePath(module_name.removesuffix(".py"))
        where, parts = ("its", [path.name]) if path.is_absolute() else ("this", path.parts)
        raise TargetError(
            f"TARGET {target!r} names a file, not a module. From {where} folder it is "
            f"{'.'.join(parts)}:{name}"
        )
    if not (module_name and colon and name.isidentifier()):
        raise TargetError(
            f"TARGET {target!r} is not module:factory, for instance models.cases:gpt_tiny; the "
            "factory takes no arguments and returns (function, args)"
        )
    module = _imported(module_name)
    factory = getattr(module, name, None)
    if factory is None:
        found = _factories(module)
        raise TargetError(
            f"module {module_name!r} has no {name!r}{nearest(name, found) or '.'} Its functions without "
            f"arguments are {found}"
        )
    if not callable(factory):
        raise TargetError(f"{target} is of type {type(factory).__name__}; expected a function")
    try:
        made = factory()
    except Exception as error:
        text = f"{target}() raised {type(error).__name__}: {error}"
        raise TargetError(text, is_there=True) from error
    return _checked(target, made)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            raise TargetError(
                f"there is no module {name!r}{nearest(name, _siblings(name)) or '.'} Looked in "
                f"{os.getcwd()} and where Python looks"
            ) from error
        raise TargetError(f"importing {name!r} failed: {error}", is_there=True) from error
    except Exception as error:
        text = f"importing {name!r} failed: {type(error).__name__}: {error}"
        raise TargetError(text, is_there=True) from error


def _siblings(name: str) -> list[str]:
    """Names of modules beside the one asked for: in its package, or in the current folder."""
    parent, _, _ = name.rpartition(".")
    paths: list[str] = [os.getcwd()]
    if parent:
        try:
            paths = list(importlib.import_module(parent).__path__)
        except (ImportError, AttributeError):
            paths = []
    prefix = parent + "." if parent else ""
    return [prefix + entry.name for entry in pkgutil.iter_modules(paths)]


def _factories(module: ModuleType) -> list[str]:
    """Public functions of a module's own that can be called without arguments."""
    found = []
    for name, item in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(item):
            continue
        parameters = inspect.signature(item).parameters.values()
        needed = [
            p
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if item.__module__ == module.__name__ and not needed:
            found.append(name)
    return found


def _checked(target: str, made: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    is_pair = isinstance(made, (tuple, list)) and len(made) == 2
    if is_pair and callable(made[0]) and isinstance(made[1], (tuple, list)):
        return made[0], tuple(made[1])
    if isinstance(made, (tuple, list)):
        got = f"a {type(made).__name__} of {[type(item).__name__ for item in made]}"
    else:
        got = f"something of type {type(made).__name__}"
    raise TargetError(
        f"{target}() returned {got}; expected (function, args): a function and the tuple of its "
        "example arguments (arrays or jax.ShapeDtypeStructs)",
        is_there=True,
    )
