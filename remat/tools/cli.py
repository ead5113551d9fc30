"""The command line: plans, comparisons, trade-off curves, and steps that fit a memory.

`remat plan TARGET` explains a plan, `remat compare TARGET` puts policies side by side, `remat pareto TARGET`
plans at several budgets, `remat fit TARGET --memory 80GiB` finds a plan that the compiler confirms, `remat diff
A.json B.json` compares two saved plans, and `remat dtr LOG` replays a log of a program within a budget.

TARGET is `module:factory`; the factory takes no arguments and returns `(function, args)`, a loss and its
example arguments (arrays or `jax.ShapeDtypeStruct`s). Nothing is ever run. Results go to stdout, progress and
errors to stderr. Exit codes: 0; 1 if something failed, every policy of a comparison did, no budget of a curve is
met, or two plans differ; 2 if the command line is not one; 130 if interrupted. jax is imported late, so that usage
errors are quick.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

from remat.tools.commands import compare, completion, diff, doctor, dtr, fit, pareto, plan, why
from remat.tools.terminal import messages
from remat.tools.terminal.attached import keep_to_cpu

__all__ = ["main"]

_COMMANDS = (plan, why, compare, pareto, fit, diff, dtr, doctor, completion)
"""In the order of the help; each has `register`, which adds it to argparse's subparsers with `run` as default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments, without the program's name; those of the process if None.

    Returns:
        The exit code.
    """
    given = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return messages.USAGE
    options = parser.parse_args(given)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if options.needs_jax:
            keep_to_cpu()
        code = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return messages.interrupted()
    except BrokenPipeError:  # `remat plan ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return messages.complain(error, verbose=options.verbose)


def _parser() -> argparse.ArgumentParser:
    parser = messages.Parser(prog="remat", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--version", action="version", version=_versions())
    parser.set_defaults(root=parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    return parser


def _versions() -> str:
    ours = sys.modules["remat"].__version__
    return f"remat {ours} (jax {_version('jax')}, Python {platform.python_version()})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
