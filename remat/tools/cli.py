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
import ast
import dataclasses
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from remat.core.errors import PolicyError, RematError, nearest
from remat.tools.target import load_target

__all__ = ["main"]

_TARGET_HELP = "module:factory; the factory takes no arguments and returns (function, args)"
_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")  # dxg: WSL
# When progress is shown, and how often a line is repeated that stays the same. Chosen by look.
_SHOW_AFTER_SECONDS = 1.0
_REPEAT_SECONDS = 15.0


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
    plan = commands.add_parser("plan", help="plan a function and explain the plan")
    plan.set_defaults(run=_plan)
    plan.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    plan.add_argument("--policy", help="default: min_cut, and with --budget auto")
    plan.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy, e.g. memory_weight=0; may be repeated",
    )
    plan.add_argument("--budget", help="bound on the peak: 6GiB, bytes, or a fraction (0.5)")
    plan.add_argument(
        "--confirm",
        metavar="DEVICE",
        help="compile the plan for this device to confirm the budget: h200, cpu, attached, auto, off",
    )
    plan.add_argument("--top", type=_positive, default=12, help="rows per list (default: 12)")
    plan.add_argument("--save", type=Path, metavar="FILE.json", help="write the plan")
    compare = commands.add_parser("compare", help="compile a function under several policies")
    compare.set_defaults(run=_compare)
    compare.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    compare.add_argument("--policies", type=_names, help="comma separated (default: six)")
    compare.add_argument("--device", help="cpu, a100, h100, h200, b200; default: what is attached")
    pareto, fit = _add_pareto(commands), _add_fit(commands)
    for command in (plan, compare, pareto, fit):
        command.add_argument(
            "--json",
            type=_json_place,
            nargs="?",
            const=Path("-"),
            metavar="FILE.json",
            help="print one JSON document instead of text; with a file, write it there besides",
        )
        command.add_argument(
            "--argnums", type=_argnums, default=0, help="differentiated arguments: 0 or 0,2"
        )
    for command in (plan, compare, pareto):
        command.add_argument("--plot", type=Path, metavar="FILE.png|svg", help="draw a picture")
    for command in (plan, compare, pareto, fit, _add_diff(commands)):
        command.add_argument("--debug", action="store_true", help="errors with their traceback")
    return parser


def _add_pareto(commands: Any) -> argparse.ArgumentParser:
    pareto = commands.add_parser("pareto", help="plan a function at several budgets")
    pareto.set_defaults(run=_pareto)
    pareto.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    _add_policy(pareto)
    pareto.add_argument(
        "--budgets", type=_names, help="comma separated: 6GiB, bytes, or fractions (0.5)"
    )
    pareto.add_argument(
        "--points", type=_positive, default=8, help="how many, without --budgets (default: 8)"
    )
    return pareto


def _add_fit(commands: Any) -> argparse.ArgumentParser:
    fit = commands.add_parser("fit", help="find a plan that the compiler confirms to fit a memory")
    fit.set_defaults(run=_fit)
    fit.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    fit.add_argument("--memory", required=True, help="of the device: 80GiB, or bytes")
    fit.add_argument("--device", help="cpu, a100, h100, h200, b200; default: what is attached")
    _add_policy(fit)
    fit.add_argument(
        "--step",
        action="store_true",
        help="TARGET is a whole step with wrappers inside, not a loss to wrap and differentiate",
    )
    fit.add_argument("--donate", type=_numbers, default=(), help="donated arguments: 0 or 0,1")
    fit.add_argument(
        "--max-compiles", type=_positive, default=6, help="at most so many (default: 6)"
    )
    fit.add_argument("--save", type=Path, metavar="FILE.json", help="write the plan, if it is one")
    return fit


def _add_diff(commands: Any) -> argparse.ArgumentParser:
    diff = commands.add_parser("diff", help="compare two saved plans")
    diff.set_defaults(run=_diff)
    diff.add_argument("old", metavar="OLD.json", help="a plan, as `remat plan --save` writes it")
    diff.add_argument("new", metavar="NEW.json", help="another")
    diff.add_argument("--top", type=_positive, default=12, help="rows per list (default: 12)")
    return diff


def _add_policy(command: argparse.ArgumentParser) -> None:
    command.add_argument("--policy", default="ilp", help="default: ilp")
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy; may be repeated",
    )


def _json_place(text: str) -> Path:
    if text != "-" and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a file *.json; to print the document, put --json behind TARGET"
        )
    return Path(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _argnums(text: str) -> int | tuple[int, ...]:
    return _numbers(text) if "," in text else int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _plan(options: argparse.Namespace) -> int:
    from remat import api
    from remat.checkpointing import UNSET, chosen_policy
    from remat.plans import report
    from remat.tools import plot

    if options.plot is not None:
        plot.check_path(options.plot)
    name = chosen_policy(None, options.policy or UNSET, options.budget)
    policy = _configured(name, options.option)
    function, args = load_target(options.target)
    with _Progress() as progress:
        progress(f"{name}: tracing and planning")
        made = api.plan(
            function,
            *args,
            remat_policy=policy,
            budget=options.budget,
            confirm=options.confirm,
            argnums=options.argnums,
            progress=progress,
        )
        if options.plot is not None:
            progress(f"drawing {options.plot}")
            plot.timeline(made, options.plot)
    if options.save is not None:
        made.to_json(options.save)
    _deliver(options.json, made.to_json, report.describe(made, options.top))
    return 0


def _configured(name: str, settings: Sequence[str]) -> Any:
    """The policy as `remat_policy=` takes it: its name, or an object if there are settings."""
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


def _compare(options: argparse.Namespace) -> int:
    from remat.core.devices import get_device
    from remat.resolve import resolve
    from remat.tools import plot
    from remat.tools.compare import DEFAULT_POLICIES, Row, iter_compare

    policies = DEFAULT_POLICIES if options.policies is None else options.policies
    for name in policies:  # a typo is found now, not after minutes of compiling
        resolve(name)
    if options.device is not None:
        get_device(options.device)
    if options.plot is not None:
        plot.check_path(options.plot)
    function, args = load_target(options.target)
    rows: list[Row] = []
    interrupted = False
    with _Progress() as progress:
        wanted = {"policies": policies, "device": options.device, "argnums": options.argnums}
        try:
            for row in iter_compare(function, args, progress=progress, **wanted):
                rows.append(row)
        except KeyboardInterrupt:
            interrupted = True
    _print_rows(options, rows, interrupted)
    if options.plot is not None and any(row.temp_bytes is not None for row in rows):
        plot.tradeoff(rows, options.plot, title=options.target)
    if interrupted:
        print(f"remat: interrupted after {len(rows)} of {len(policies)} policies", file=sys.stderr)
        return 130
    return 1 if rows and all(row.error for row in rows) else 0


def _print_rows(options: argparse.Namespace, rows: Sequence[Any], interrupted: bool) -> None:
    import jax

    from remat.compiler.compile import CPU_COMPILER_OPTIONS
    from remat.tools.compare import compare_table

    device = options.device or jax.default_backend()
    document = {
        "format": "remat.compare",
        "target": options.target,
        "device": device,
        "jax_version": jax.__version__,
        "interrupted": interrupted,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    lines = [
        f"{options.target}, one training step compiled for {device} by jax {jax.__version__}\n",
        compare_table(rows),
        "\nkept, repeated: as planned; temp, traffic, matmuls: of the compiled program, per step.",
        "Every policy is applied to the whole function; jax's own are often applied per block.",
    ]
    if device == "cpu":
        how = "compiled with remat.compile.CPU_COMPILER_OPTIONS; " if CPU_COMPILER_OPTIONS else ""
        lines.append(f"cpu: {how}GPU numbers need --device.")
    _deliver(options.json, lambda: json.dumps(document, indent=2), "\n".join(lines))


def _pareto(options: argparse.Namespace) -> int:
    from remat.tools import plot
    from remat.tools.pareto import Pareto, iter_pareto

    if options.plot is not None:
        plot.check_path(options.plot)
    policy = _configured(options.policy, options.option)
    function, args = load_target(options.target)
    curve: Pareto | None = None
    interrupted = False
    with _Progress() as progress:
        try:
            for curve in iter_pareto(  # noqa: B007 - the last one is printed
                function,
                *args,
                remat_policy=policy,
                budgets=options.budgets,
                points=options.points,
                argnums=options.argnums,
                progress=progress,
            ):
                pass
        except KeyboardInterrupt:
            interrupted = True
    if curve is not None:
        document = {"target": options.target, **curve.to_dict()}
        _deliver(options.json, lambda: json.dumps(document, indent=2), str(curve))
        if options.plot is not None and curve.points:
            plot.pareto(curve, options.plot, title=options.target)
    if interrupted:
        print("remat: interrupted", file=sys.stderr)
        return 130
    return 0


def _fit(options: argparse.Namespace) -> int:
    import jax

    from remat import api
    from remat.core.devices import get_device
    from remat.fitting.fit import fit

    policy = _configured(options.policy, options.option)
    if options.device is not None:
        get_device(options.device)
    function, args = load_target(options.target)
    step = function
    if not options.step:
        step = jax.value_and_grad(api.checkpoint(function), options.argnums)
    with _Progress() as progress:
        fitted = fit(
            step,
            *args,
            memory=options.memory,
            device=options.device,
            remat_policy=policy,
            max_compiles=options.max_compiles,
            donate_argnums=options.donate,
            progress=progress,
        )
    if options.save is not None:
        if len(fitted.plans) != 1:
            raise PolicyError(
                f"--save {options.save}: the step has {len(fitted.plans)} wrapped functions, each with a plan "
                "of its own; one file holds one plan"
            )
        fitted.plans[0].to_json(options.save)
    document = {"target": options.target, **fitted.to_dict()}
    _deliver(options.json, lambda: json.dumps(document, indent=2), str(fitted))
    return 130 if fitted.interrupted else 0


def _deliver(path: Path | None, document: Callable[[], str], text: str) -> None:
    """Prints the text, and writes the document to a file; `-` prints the document alone."""
    if str(path) == "-":
        print(document())
        return
    if path is not None:
        path.write_text(document() + "\n")
    print(text)


def _diff(options: argparse.Namespace) -> int:
    from remat.plans.diff import diff
    from remat.plans.plan import Plan

    found = diff(Plan.from_json(Path(options.old)), Plan.from_json(Path(options.new)))
    print(found.format(options.top))
    return 1 if found else 0


class _Progress:
    """Says on stderr what is going on, once it has taken a second, and again every 15 seconds."""

    def __init__(self) -> None:
        self.stage: str | None = ""
        self.started = 0.0
        self.shown = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Progress:
        self.thread.start()
        return self

    def __call__(self, stage: str) -> None:
        self._set(stage)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._set(None)
        self.thread.join(timeout=1.0)

    def _set(self, stage: str | None) -> None:
        with self.changed:
            if self.shown:
                print(f"remat: {self.stage}: {self._seconds():.1f} s", file=sys.stderr, flush=True)
            self.stage, self.started, self.shown = stage, time.monotonic(), False
            self.changed.notify()

    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _watch(self) -> None:
        with self.changed:
            while self.stage is not None:
                wait = _REPEAT_SECONDS if self.shown else _SHOW_AFTER_SECONDS
                if self.changed.wait(wait) or not self.stage:
                    continue
                text = f"still at it after {self._seconds():.0f} s" if self.shown else "..."
                print(f"remat: {self.stage} {text}", file=sys.stderr, flush=True)
                self.shown = True
