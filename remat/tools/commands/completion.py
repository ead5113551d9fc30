"""`remat completion SHELL`: prints a script that completes command lines."""

from __future__ import annotations

import argparse
from typing import Any

from remat.tools.terminal import flags

__all__ = ["register"]

_SHELLS = ("bash", "zsh", "fish")


def register(commands: Any) -> None:
    """Adds the command."""
    completion = flags.add_command(
        commands,
        "completion",
        _run,
        'print a script that completes commands and flags: eval "$(remat completion bash)"',
        needs_jax=False,
    )
    completion.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def _run(options: argparse.Namespace) -> int:
    from remat.tools.terminal.completion import script

    print(script(options.root, options.shell))
    return 0
