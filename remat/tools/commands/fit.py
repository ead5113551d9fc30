"""`remat fit TARGET --memory 80GiB`: finds a plan that the compiler confirms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from remat.plans.words import human_bytes, human_seconds
from remat.tools.terminal import flags
from remat.tools.terminal.messages import UsageError, interrupted
from remat.tools.terminal.progress import Progress
from remat.tools.terminal.screen import Cell, Column, Screen, check_places, deliver, warnings_shown

if TYPE_CHECKING:
    from remat.fitting.fit import Fitted

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    fit = flags.add_command(
        commands, "fit", _run, "find a plan that the compiler confirms to fit a memory"
    )
    flags.add_target(fit)
    fit.add_argument(
        "--memory", required=True, metavar="SIZE", help="of the device: 80GiB, or bytes"
    )
    flags.add_device(fit, "to compile for, by default what is attached")
    flags.add_policy(fit, "ilp", "ilp")
    fit.add_argument(
        "--step",
        action="store_true",
        help="TARGET is a whole step with wrappers inside, not a loss to wrap and differentiate",
    )
    fit.add_argument(
        "--donate",
        type=flags.numbers,
        default=(),
        metavar="N",
        help="donated arguments: 0 or 0,1",
    )
    fit.add_argument(
        "--max-compiles",
        type=flags.at_least(2),
        default=6,
        metavar="N",
        help="at most so many (default: 6)",
    )
    flags.add_save(fit, "write the plan, if it is one")
    flags.add_document(fit)


@warnings_shown()
def _run(options: argparse.Namespace) -> int:
    import jax

    from remat import api
    from remat.core.devices import get_device
    from remat.fitting.fit import finish, fit_options, parse_memory
    from remat.fitting.job import Job
    from remat.fitting.knobs import choose_knob
    from remat.planning.confirm import UNCHANGED

    policy = flags.configured(options.policy, options.option)
    with flags.reading():
        parse_memory(options.memory)
        if options.device is not None:
            get_device(options.device)
        check_places(save=options.save, json=options.json)
    function, args = flags.loaded(options)
    step = function
    if not options.step:
        step = jax.value_and_grad(api.checkpoint(function), options.argnums)
    with Progress(verbose=options.verbose) as progress, _explained(options):
        wanted = fit_options(
            memory=options.memory,
            device=options.device,
            remat_policy=policy,
            max_compiles=options.max_compiles,
            static_argnums=(),
            donate_argnums=options.donate,
            compiler_options=None,
            progress=progress,
        )
        job = Job(step, args, {}, wanted)
        try:
            knob = choose_knob(job)
            if options.save is not None:  # known now, not after minutes of compiling
                _check_one_plan(options, len(job.uses(UNCHANGED)))
            fitted = finish(job, knob)
        finally:
            job.forget()
    writes: list[Callable[[], object]] = []
    if options.save is not None:
        writes.append(lambda: fitted.plans[0].to_json(options.save))
    document = {"target": options.target, **fitted.to_dict()}
    deliver(
        options.json,
        lambda: json.dumps(document, indent=2),
        lambda screen: _show(options.target, fitted, screen),
        *writes,
    )
    if fitted.interrupted:
        return interrupted("of what was compiled by then, this is the fastest that fits")
    return 0


def _check_one_plan(options: argparse.Namespace, count: int) -> None:
    if count != 1:
        raise UsageError(
            f"--save {options.save}: the step has {count} wrapped functions, each with a plan of its own; one "
            "file holds one plan"
        )


@contextmanager
def _explained(options: argparse.Namespace) -> Iterator[None]:
    """Says what jax says at length of a step that is taken for a loss: a missing --step."""
    try:
        yield
    except TypeError as error:
        if options.step or "scalar-output" not in str(error):
            raise
        raise UsageError(
            f"the function of {options.target} does not return one scalar, as a loss does. A whole step, which "
            "differentiates by itself, needs --step"
        ) from error


def _show(target: str, fitted: Fitted, screen: Screen) -> None:
    report, chosen = fitted.report, fitted.chosen
    screen.title(target, f"fitted to {human_bytes(fitted.memory_bytes)} on {report.device}")
    screen.line()
    share = fitted.total_bytes / fitted.memory_bytes
    screen.paragraph(
        f"{human_bytes(fitted.total_bytes)} of {human_bytes(fitted.memory_bytes)} ({share:.0%}): arguments "
        f"{human_bytes(report.argument_bytes)}, results {human_bytes(report.output_bytes - report.alias_bytes)}, "
        f"temporaries {human_bytes(report.temp_bytes)}",
        first=("memory  ", "bold"),
        style="green",
    )
    screen.paragraph(
        f"+{human_seconds(chosen.recompute_seconds)} per step, estimate", first=("time    ", "bold")
    )
    compiles = len(fitted.history)
    screen.paragraph(
        f"confirmed by the compiler, the choice of {compiles} programs"
        if compiles > 1
        else "confirmed by the compiler",
        first=("proof   ", "bold"),
    )
    screen.line()
    screen.table(_columns(), _cells(fitted))


# Which of the columns give way on a narrow screen, the first of them last.
_GIVING_WAY = {"predicted": 1, "temp": 2, "traffic": 3, "compile": 4}
_STYLES = {"chosen": "bold green", "too large": "red"}


def _columns() -> tuple[Column, ...]:
    from remat.fitting.fit import HISTORY_ALIGNED, HISTORY_COLUMNS

    return tuple(
        Column(title, align, gives_way=_GIVING_WAY.get(title, 0))
        for title, align in zip(HISTORY_COLUMNS, HISTORY_ALIGNED, strict=True)
    )


def _cells(fitted: Fitted) -> list[list[Cell]]:
    from remat.fitting.fit import history_rows

    rows = history_rows(fitted.history, fitted.chosen)
    return [
        [*row[:-1], (row[-1], _STYLES[row[-1]]) if row[-1] in _STYLES else row[-1]] for row in rows
    ]
