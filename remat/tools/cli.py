"""The command line: plans, comparisons, trade-off curves, and steps that fit a memory.

`remat plan TARGET` explains a plan, `remat compare TARGET` puts policies side by side, `remat pareto TARGET`
plans at several budgets, `remat fit TARGET --memory 80GiB` finds a plan that the compiler confirms, and
`remat diff A.json B.json` compares two saved plans.

TARGET is `module:factory`; the factory takes no arguments and returns `(function, args)`, a loss and its
example arguments (arrays or `jax.ShapeDtypeStruct`s). Nothing is ever run. Results go to stdout, progress and
errors to stderr. Exit codes: 0; 1 if every policy of a comparison failed or two plans differ; 2 for an error,
explained in one paragraph; 130 if interrupted. jax is imported late, so that usage errors are quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from remat.core.errors import RematError
from remat.tools.commands import compare, diff, fit, pareto, plan

__all__ = ["main"]

_COMMANDS = (plan, compare, pareto, fit, diff)
"""In the order of the help; each has `register`, which adds it to argparse's subparsers with `run` as default."""

_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")  # dxg: WSL


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments, without the program's name; those of the process if None.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(argv)
    _prepare_jax()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("remat: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `remat plan ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if options.debug:
            raise
        print(f"remat: error: {_paragraph(error)}", file=sys.stderr)
        return 2


def _paragraph(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, (RematError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (add --debug for the traceback)"


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
    parser = argparse.ArgumentParser(prog="remat", description=(__doc__ or "").partition("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    return parser
