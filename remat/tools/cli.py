"""The command line: plans, comparisons, trade-off curves, and steps that fit a memory.

`remat plan TARGET` explains a plan, `remat compare TARGET` puts policies side by side, `remat pareto TARGET`
plans at several budgets, `remat fit TARGET --memory 80GiB` finds a plan that the compiler confirms, `remat diff
A.json B.json` compares two saved plans, and `remat dtr LOG` replays a log of a program within a budget.

TARGET is `module:factory`; the factory takes no arguments and returns `(function, args)`, a loss and its
example arguments (arrays or `jax.ShapeDtypeStruct`s). Nothing is ever run. Results go to stdout, progress and
errors to stderr. Exit codes: 0; 1 if something failed, every policy of a comparison did, or two plans differ; 2 if
the command line is not one; 130 if interrupted. jax is imported late, so that usage errors are quick.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence

from remat.tools.commands import compare, diff, dtr, fit, pareto, plan
from remat.tools.terminal import messages

__all__ = ["main"]

_COMMANDS = (plan, compare, pareto, fit, diff, dtr)
"""In the order of the help; each has `register`, which adds it to argparse's subparsers with `run` as default."""

_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")  # dxg: WSL


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
            _prepare_jax()
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


def _prepare_jax() -> None:
    """Keeps jax to the CPU where its CUDA plugin is installed but there is no NVIDIA GPU.

    jax would warn, on stderr and once per backend, that it found the plugin but no device. The plugin is
    there on purpose: it is what `--device h200` compiles with. Importing `remat` has imported jax, which
    reads JAX_PLATFORMS while it is imported, so the variable alone (for child processes) is not enough.
    A choice of the user's, a TPU, and any machine without the plugin are left alone.
    """
    names = ("xla_cuda13", "xla_cuda12")
    has_plugin = any(_is_installed(f"jax_plugins.{name}") for name in names)
    has_device = any(map(os.path.exists, _DEVICE_FILES)) or _is_installed("libtpu")
    if not has_plugin or has_device or "JAX_PLATFORMS" in os.environ:
        return
    import jax

    if jax.config.jax_platforms is None:  # type: ignore[attr-defined]
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax.config.update("jax_platforms", "cpu")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def _parser() -> argparse.ArgumentParser:
    parser = messages.Parser(prog="remat", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--version", action="version", version=_versions())
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
