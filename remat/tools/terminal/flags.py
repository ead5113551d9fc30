"""Flags that mean the same in every command, and how their values are read."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remat.core.devices import DEVICES
from remat.core.errors import PolicyError, RematError, nearest
from remat.tools.terminal.messages import UsageError
from remat.tools.terminal.target import TargetError, load_target

__all__ = [
    "add_command",
    "add_device",
    "add_document",
    "add_plot",
    "add_policy",
    "add_save",
    "add_target",
    "add_top",
    "argnums",
    "at_least",
    "configured",
    "loaded",
    "names",
    "numbers",
    "reading",
]

_TARGET_HELP = "module:factory; the factory takes no arguments and returns (function, args)"


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    needs_jax: bool = True,
) -> argparse.ArgumentParser:
    """Adds a command, with the flags that every command has.

    Args:
        commands: argparse's subparsers.
        name: of the command.
        run: is given the parsed options, and returns the exit code.
        text: what it does.
        needs_jax: False for a command that works where jax does not.
    """
    command = commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
    command.set_defaults(run=run, parser=command, needs_jax=needs_jax)
    command.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="all there is to say, steps, and errors with tracebacks",
    )
    return command


def add_target(command: argparse.ArgumentParser) -> None:
    """Adds TARGET, and `--argnums`."""
    command.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    command.add_argument(
        "--argnums",
        type=argnums,
        default=0,
        metavar="N",
        help="differentiated arguments: 0 or 0,2 (default: 0)",
    )


def add_policy(command: argparse.ArgumentParser, default: str | None, text: str) -> None:
    """Adds `--policy` and `--option`."""
    command.add_argument("--policy", default=default, metavar="NAME", help=f"default: {text}")
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy, e.g. memory_weight=0; may be repeated",
    )


def add_device(command: argparse.ArgumentParser, text: str) -> None:
    """Adds `--device`."""
    command.add_argument("--device", metavar="NAME", help=f"{text}: {', '.join(DEVICES)}")


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


def add_top(command: argparse.ArgumentParser, text: str = "what fits a screen; with -v 12") -> None:
    """Adds `--top`."""
    command.add_argument(
        "--top", type=at_least(1), metavar="N", help=f"rows per list (default: {text})"
    )


def _json_place(text: str) -> Path:
    if text != "-" and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a file *.json; to print the document, put --json behind TARGET"
        )
    return Path(text)


def at_least(least: int) -> Callable[[str], int]:
    """Returns what reads a whole number."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least {least}")
        return int(text)

    return read


def names(text: str) -> tuple[str, ...]:
    """Reads words separated by commas."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} names nothing; expected words with commas between"
        )
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Reads numbers separated by commas."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor several, 0,2") from None


def argnums(text: str) -> int | tuple[int, ...]:
    """Reads the numbers of differentiated arguments."""
    found = numbers(text)
    return found if "," in text else found[0]


@contextmanager
def reading() -> Iterator[None]:
    """Whatever is wrong inside is wrong with the command line, not with what it asks for."""
    try:
        yield
    except RematError as error:
        raise UsageError(str(error)) from error


def loaded(options: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function and the arguments of TARGET.

    Raises:
        UsageError: there is no such target, or it has no such arguments as `--argnums` says.
        TargetError: it fails, or makes something else.
    """
    try:
        function, args = load_target(options.target)
    except TargetError as error:
        raise error if error.is_there else UsageError(str(error)) from error
    wanted = (options.argnums,) if isinstance(options.argnums, int) else options.argnums
    if not args:
        raise UsageError(
            f"{options.target} makes no arguments, so there is nothing to differentiate. The factory returns "
            "(function, args) with at least one argument"
        )
    wrong = [number for number in wanted if not -len(args) <= number < len(args)]
    if wrong:
        raise UsageError(
            f"argnums={wrong[0]} is out of range: {options.target} makes {len(args)} arguments; expected "
            f"{'0' if len(args) == 1 else f'0 to {len(args) - 1}'}"
        )
    return function, args


def configured(name: str, settings: Sequence[str], device: str | None = None) -> Any:
    """Returns the policy as `remat_policy=` takes it: its name, or an object if there are settings.

    Args:
        name: of the policy.
        settings: `NAME=VALUE`s.
        device: that its prices are of, unless a setting says otherwise; None for its own.

    Raises:
        UsageError: no such policy, no such setting of it, no such device.
    """
    from remat.core.devices import get_device
    from remat.resolve import priced_for

    with reading():
        policy = _configured(name, settings)
        return policy if device is None else priced_for(policy, get_device(device))


def _configured(name: str, settings: Sequence[str]) -> Any:
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
