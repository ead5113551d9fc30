"""Flags that mean the same in every command, and how their values are read."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat.core.errors import PolicyError, nearest

__all__ = [
    "add_debug",
    "add_device",
    "add_document",
    "add_option",
    "add_plot",
    "add_policy",
    "add_save",
    "add_target",
    "add_top",
    "configured",
    "names",
    "numbers",
    "positive",
]

_TARGET_HELP = "module:factory; the factory takes no arguments and returns (function, args)"


def add_target(command: argparse.ArgumentParser) -> None:
    """Adds TARGET, and `--argnums`."""
    command.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    command.add_argument(
        "--argnums", type=_argnums, default=0, help="differentiated arguments: 0 or 0,2"
    )


def add_policy(command: argparse.ArgumentParser, default: str | None, text: str) -> None:
    """Adds `--policy` and `--option`."""
    command.add_argument("--policy", default=default, help=f"default: {text}")
    add_option(command)


def add_option(command: argparse.ArgumentParser) -> None:
    """Adds `--option`."""
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy, e.g. memory_weight=0; may be repeated",
    )


def add_device(command: argparse.ArgumentParser) -> None:
    """Adds `--device`, for which programs are compiled."""
    command.add_argument("--device", help="cpu, a100, h100, h200, b200; default: what is attached")


def add_document(command: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    command.add_argument(
        "--json",
        type=_json_place,
        nargs="?",
        const=Path("-"),
        metavar="FILE.json",
        help="print one JSON document instead of text; with a file, write it there besides",
    )


def add_plot(command: argparse.ArgumentParser) -> None:
    """Adds `--plot`."""
    command.add_argument("--plot", type=Path, metavar="FILE.png|svg", help="draw a picture")


def add_save(command: argparse.ArgumentParser, text: str = "write the plan") -> None:
    """Adds `--save`."""
    command.add_argument("--save", type=Path, metavar="FILE.json", help=text)


def add_top(command: argparse.ArgumentParser) -> None:
    """Adds `--top`."""
    command.add_argument("--top", type=positive, default=12, help="rows per list (default: 12)")


def add_debug(command: argparse.ArgumentParser) -> None:
    """Adds `--debug`."""
    command.add_argument("--debug", action="store_true", help="errors with their traceback")


def _json_place(text: str) -> Path:
    if text != "-" and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a file *.json; to print the document, put --json behind TARGET"
        )
    return Path(text)


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def names(text: str) -> tuple[str, ...]:
    """Reads words separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(text: str) -> tuple[int, ...]:
    """Reads numbers separated by commas."""
    return tuple(map(int, text.split(",")))


def _argnums(text: str) -> int | tuple[int, ...]:
    return numbers(text) if "," in text else int(text)


def configured(name: str, settings: Sequence[str]) -> Any:
    """Returns the policy as `remat_policy=` takes it: its name, or an object if there are settings.

    Raises:
        PolicyError: no such policy, or no such setting of it.
    """
    from remat.policies import POLICIES, get_policy
    from remat.resolve import resolve

    if not settings:
        resolve(name)
        return name
    if name not in POLICIES:
        raise PolicyError(
            f"--option needs one of remat's own policies, {sorted(POLICIES)}; got --policy {name}"
        )
    base = get_policy(name)
    known = [field.name for field, _ in base.settings()]
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in known:
            raise PolicyError(
                f"--option {setting}: expected NAME=VALUE with a setting of {name!r}, one of "
                f"{known}{nearest(key, known)}"
            )
        values[key] = _value(text)
    try:
        return base.with_settings(**values)
    except (TypeError, AttributeError) as error:
        raise PolicyError(f"--option {' '.join(settings)}: {error}") from error


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
