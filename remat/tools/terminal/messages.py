"""Errors in one style: `error: what happened`, and below it `hint: what to try`."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from typing import Any, NoReturn

from remat.core.errors import PolicyError, RematError, nearest
from remat.tools.terminal.screen import Screen

__all__ = ["FAILURE", "INTERRUPTED", "USAGE", "Parser", "UsageError", "complain", "interrupted"]

FAILURE, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes: something failed; the command line itself is wrong; Ctrl-C."""

# Where the part of a message begins that says what to do about it.
_TURN = re.compile(r"(?<=[\w\])'\"])(?:; |[.] (?=[A-Z]))")
# What Python calls an argument, and how it is given here. What is a call in Python has no flag.
_ARGUMENT = re.compile(
    r"\b(remat_policy|budget|budgets|confirm|memory|device|argnums|points|max_compiles)="
    r"(?:'([^']*)'|([^\s,;:()]+)(?=[\s,;:)]|$))"
)
_CALL = re.compile(r"([\w.]+\([^()]*(?:\([^()]*\)[^()]*)*\))")
_LIST = re.compile(r"\['([\w', -]*)'\]")
_FLAGS = {"remat_policy": "policy", "max_compiles": "max-compiles"}


class UsageError(RematError, ValueError):
    """A command line that cannot be what was meant."""


class Parser(argparse.ArgumentParser):
    """A parser that complains in the style of everything else, with what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong and ends with exit code 2."""
        what, hint = message, ""
        choice = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if choice:
            names = re.findall(r"[\w-]+", choice[2])
            what = message.partition(" (choose")[0].replace(
                "argument COMMAND: invalid choice", "no such command"
            )
            hint = f"{nearest(choice[1], names)[2:]} There are {', '.join(names)}. ".lstrip()
        elif unknown:
            hint = nearest(unknown[1].partition("=")[0], self._flags())[2:] + " "
        self._complain(what, f"{hint.lstrip()}`{self.prog} --help` explains the command")
        raise SystemExit(USAGE)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but what is left over is the command's error, which knows its flags."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            getattr(found, "parser", self).error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def _complain(self, what: str, hint: str) -> None:
        _print(what, hint)


def complain(error: Exception, *, verbose: bool) -> int:
    """Prints an error on stderr, with its traceback if asked for, and returns the exit code."""
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    text = " ".join(str(error).split())
    is_ours = isinstance(error, (RematError, OSError))
    what, hint = _split(_as_flags(text)) if is_ours else (f"{type(error).__name__}: {text}", "")
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("remat: ")]
    hints = [hint, *(note.removeprefix("remat: ") for note in notes)]
    if isinstance(error, ImportError):
        hints.append("`remat doctor` says what is missing")
    elif not is_ours and not verbose:
        hints.append("-v shows the traceback")
    _print(what, " ".join(filter(None, hints)))
    return USAGE if isinstance(error, (UsageError, PolicyError)) else FAILURE


def interrupted(what: str = "") -> int:
    """Says that Ctrl-C ended it, and returns the exit code."""
    Screen(is_error=True).line(("interrupted", "bold yellow"), f": {what}" if what else "")
    return INTERRUPTED


def _split(text: str) -> tuple[str, str]:
    """What happened, and what the message says besides."""
    turns = _TURN.finditer(text)
    # Not inside of brackets, which would be torn apart.
    turn = next(
        (t for t in turns if text.count("(", 0, t.start()) == text.count(")", 0, t.start())), None
    )
    return (text[: turn.start()], text[turn.end() :]) if turn else (text, "")


def _as_flags(text: str) -> str:
    """Spells arguments as flags, but for those of a call, which is Python."""

    def flag(found: re.Match[str]) -> str:
        name = _FLAGS.get(found[1], found[1])
        value = found[2] if found[2] is not None else found[3]
        if value.startswith(("remat.", "<")) or value == "None":
            return found[0]
        return f"--{name} {value!r}" if " " in value else f"--{name} {value}"

    parts = _CALL.split(text)
    parts[::2] = (_ARGUMENT.sub(flag, part) for part in parts[::2])
    return _LIST.sub(lambda found: found[1].replace("', '", ", "), "".join(parts))


def _print(what: str, hint: str) -> None:
    screen = Screen(is_error=True)
    screen.paragraph(what, first=("error: ", "bold red"))
    if hint:
        screen.paragraph(hint, first=("hint: ", "bold cyan"))
