"""Scripts that complete command lines in a shell, made of argparse's own description of them.

They are static: nothing is run while one types. Files are completed where a flag takes one; modules are not.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from remat.core.devices import DEVICES
from remat.policies import POLICIES

__all__ = ["SHELLS", "script"]

SHELLS = ("bash", "zsh", "fish")

# What follows a flag, where it is a word of a list.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "--policy": tuple(sorted(POLICIES)),
    "--policies": tuple(sorted(POLICIES)),
    "--device": tuple(DEVICES),
    "--confirm": (*DEVICES, "attached", "auto", "on", "off"),
}


@dataclass(frozen=True)
class _Flag:
    """A flag: its spellings, what it is for, whether a value follows, and if it is a file's name."""

    names: tuple[str, ...]
    text: str
    takes_value: bool
    takes_file: bool

    @property
    def words(self) -> tuple[str, ...]:
        return next((_WORDS[name] for name in self.names if name in _WORDS), ())


@dataclass(frozen=True)
class _Command:
    """A command: what it is for, its flags, the words that it takes besides, whether it takes files."""

    name: str
    text: str
    flags: tuple[_Flag, ...]
    words: tuple[str, ...]
    takes_file: bool


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the script for one of `SHELLS`."""
    commands = _commands(parser)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _commands(parser: argparse.ArgumentParser) -> list[_Command]:
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    texts = {action.dest: action.help or "" for action in found._choices_actions}
    commands = []
    for name, command in found.choices.items():
        named = [action for action in command._actions if not action.option_strings]
        words = [str(word) for action in named for word in action.choices or ()]
        commands.append(
            _Command(
                name=name,
                text=texts[name],
                flags=tuple(_flag(a) for a in command._actions if a.option_strings),
                words=tuple(words),
                takes_file=any(".json" in str(action.metavar) for action in named),
            )
        )
    return commands


def _flag(action: argparse.Action) -> _Flag:
    takes_value = action.nargs != 0
    return _Flag(
        names=tuple(action.option_strings),
        text=action.help or "",
        takes_value=takes_value,
        takes_file=takes_value and (action.type is Path or "FILE" in str(action.metavar)),
    )


def _bash(commands: list[_Command]) -> str:
    names = " ".join(command.name for command in commands)
    lines = [
        '# remat, for bash: eval "$(remat completion bash)"',
        "_remat() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{names} --version --help" -- "$word"))',
        "        return",
        "    fi",
        '    case "${COMP_WORDS[1]} $before" in',
    ]
    for command in commands:
        for flag in command.flags:
            patterns = "|".join(f'"{command.name} {name}"' for name in flag.names)
            if flag.words:
                lines.append(
                    f'        {patterns}) COMPREPLY=($(compgen -W "{" ".join(flag.words)}" -- "$word"));;'
                )
            elif flag.takes_file:
                lines.append(f'        {patterns}) COMPREPLY=($(compgen -f -- "$word"));;')
    lines += [
        "    esac",
        '    [ "${#COMPREPLY[@]}" -gt 0 ] && return',
        '    case "${COMP_WORDS[1]}" in',
    ]
    for command in commands:
        words = " ".join([*command.words, *(name for flag in command.flags for name in flag.names)])
        files = ' $(compgen -f -- "$word")' if command.takes_file else ""
        lines.append(
            f'        {command.name}) COMPREPLY=($(compgen -W "{words}" -- "$word"){files});;'
        )
    return "\n".join([*lines, "    esac", "}", "complete -o default -F _remat remat"])


def _zsh(commands: list[_Command]) -> str:
    lines = [
        "#compdef remat",
        '# remat, for zsh: eval "$(remat completion zsh)", after compinit',
        "_remat() {",
        "    local -a commands",
        "    commands=(",
        *(f"        {shlex.quote(f'{c.name}:{c.text}')}" for c in commands),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        "        return",
        "    fi",
        "    local command=${words[2]}",
        "    shift words; (( CURRENT-- ))",
        "    case $command in",
    ]
    for command in commands:
        lines.append(f"        {command.name}) _arguments \\")
        for flag in command.flags:
            text = flag.text.replace("[", "(").replace("]", ")").replace(":", " -")
            value = ""
            if flag.words:
                value = f":value:({' '.join(flag.words)})"
            elif flag.takes_value:
                value = ":file:_files" if flag.takes_file else ":value:"
            lines += [
                f"            {shlex.quote(f'{name}[{text}]{value}')} \\" for name in flag.names
            ]
        rest = "_files" if command.takes_file else f"({' '.join(command.words)})"
        lines.append(f"            {shlex.quote(f'*:value:{rest}')};;")
    return "\n".join([*lines, "    esac", "}", "compdef _remat remat"])


def _fish(commands: list[_Command]) -> str:
    lines = [
        "# remat, for fish: remat completion fish | source",
        "complete -c remat -f",
        "complete -c remat -n __fish_use_subcommand -l version",
    ]
    for command in commands:
        lines.append(
            f"complete -c remat -n __fish_use_subcommand -a {command.name} -d {shlex.quote(command.text)}"
        )
        seen = f"-n {shlex.quote(f'__fish_seen_subcommand_from {command.name}')}"
        for flag in command.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            )
            value = " -r" if flag.takes_value else ""
            if flag.words:
                value = f" -x -a {shlex.quote(' '.join(flag.words))}"
            elif flag.takes_file:
                value = " -r -F"
            lines.append(f"complete -c remat {seen} {names}{value} -d {shlex.quote(flag.text)}")
        if command.words:
            lines.append(f"complete -c remat {seen} -a {shlex.quote(' '.join(command.words))}")
        if command.takes_file:
            lines.append(f"complete -c remat {seen} -F")
    return "\n".join(lines)
