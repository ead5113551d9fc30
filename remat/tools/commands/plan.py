"""`remat plan TARGET`: plans a function and explains the plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat.plans.plan import Plan
from remat.plans.report import describe
from remat.plans.summary import Row, again_rows, headline, kept_rows, totals
from remat.plans.words import human_bytes, human_flops, short_scope, short_source
from remat.tools.terminal import flags
from remat.tools.terminal.messages import interrupted
from remat.tools.terminal.progress import Progress
from remat.tools.terminal.screen import Cell, Column, Screen, check_places, deliver, warnings_shown

__all__ = ["add_planning", "made", "register"]

# With these, what is printed at 80 columns has no more lines than a terminal has by default, 24.
_KEPT_ROWS, _AGAIN_ROWS = 5, 4


def register(commands: Any) -> None:
    """Adds the command."""
    plan = flags.add_command(commands, "plan", _run, "plan a function and explain the plan")
    flags.add_target(plan)
    add_planning(plan)
    plan.add_argument("--all", action="store_true", help="the whole report (so does -v)")
    flags.add_top(plan)
    flags.add_save(plan)
    flags.add_document(plan)
    flags.add_plot(plan)
    plan.add_argument("--html", type=Path, metavar="FILE.html", help="write a page that shows it")


def add_planning(command: argparse.ArgumentParser) -> None:
    """Adds the flags that `made` reads."""
    flags.add_policy(command, None, "min_cut, and with --budget auto")
    flags.add_device(command, "whose prices count")
    command.add_argument(
        "--budget", metavar="SIZE", help="bound on the peak: 6GiB, bytes, or a fraction (0.5)"
    )
    command.add_argument(
        "--confirm",
        metavar="DEVICE",
        help="compile to confirm the budget: for a device, or attached, auto, on, off",
    )


def made(options: argparse.Namespace, progress: Progress) -> Plan:
    """Returns the plan that the flags ask for.

    Raises:
        UsageError: a flag cannot be read.
        RematError: it cannot be made.
    """
    from remat import api
    from remat.checkpointing import UNSET, chosen_policy
    from remat.resolve import resolve

    name = chosen_policy(None, options.policy or UNSET, options.budget)
    policy = flags.configured(name, options.option, options.device)
    with flags.reading():
        resolve(policy, options.budget, options.confirm)
    function, args = flags.loaded(options)
    progress(f"{name}: tracing and planning")
    return api.plan(
        function,
        *args,
        remat_policy=policy,
        budget=options.budget,
        confirm=options.confirm,
        argnums=options.argnums,
        progress=progress,
    )


@warnings_shown()
def _run(options: argparse.Namespace) -> int:
    from remat.pictures import page
    from remat.tools import plot

    with flags.reading():
        if options.plot is not None:
            plot.check_path(options.plot)
        if options.html is not None:
            page.check_page(options.html)
        check_places(save=options.save, json=options.json, plot=options.plot, html=options.html)
    with Progress(verbose=options.verbose) as progress:
        plan = made(options, progress)
    writes: list[Callable[[], object]] = []
    if options.save is not None:
        writes.append(lambda: plan.to_json(options.save))
    if options.plot is not None:
        writes.append(lambda: plot.timeline(plan, options.plot))
    if options.html is not None:
        writes.append(lambda: plan.to_html(options.html))
    deliver(options.json, plan.to_json, lambda screen: _show(plan, options, screen), *writes)
    if any(note.startswith("interrupted") for note in plan.notes):
        return interrupted("this is the best plan found by then")
    return 0


def _show(plan: Plan, options: argparse.Namespace, screen: Screen) -> None:
    if options.all or options.verbose:
        for line in describe(plan, options.top or 12).splitlines():
            screen.line(line)
        return
    settings = f"({plan.options})" if plan.options else ""
    screen.title(options.target, f"planned by {plan.policy_name}{settings}")
    screen.line()
    first = headline(plan)
    is_less = plan.peak_bytes < plan.baseline_peak_bytes
    screen.paragraph(first.memory, first=("memory  ", "bold"), style="green" if is_less else "")
    screen.paragraph(first.time, first=("time    ", "bold"))
    screen.paragraph(first.proof, first=("proof   ", "bold"))
    screen.line()
    kept, again = totals(plan)
    screen.line((kept, "bold"))
    rest = _rows(kept_rows(plan), options.top or _KEPT_ROWS, human_bytes, screen)
    if rest:
        screen.line((f"  and {rest} smaller", "dim"))
    screen.line((again, "bold"))
    rest = _rows(again_rows(plan), options.top or _AGAIN_ROWS, human_flops, screen)
    if rest:
        screen.line((f"  and {rest} cheaper", "dim"))
    screen.line()
    notes = f", with {len(plan.notes)} notes" if len(plan.notes) > 1 else ", with a note"
    screen.line(
        ("everything", "dim"), (notes if plan.notes else "", "dim"), (": --all   one value: ", "dim"),
        ("remat why ", "cyan"), (f"{options.target} VALUE", "cyan"),
    )  # fmt: skip


def _rows(rows: list[Row], count: int, human: Any, screen: Screen) -> int:
    """Shows the first rows, and returns how many values or operators are in the others."""
    columns = (
        Column("", style="cyan", gives_way=1),
        Column("", ">"),
        Column(""),
        Column(""),
        Column("", gives_way=2),
        Column("", shortest=16),
        Column("", style="dim", gives_way=3),
    )
    cells: list[list[Cell]] = [
        [
            row.value,
            human(row.amount),
            f"x{row.times}" if row.times > 1 else "",
            row.label,
            row.made_by,
            short_source(row.source),
            short_scope(row.scope).rpartition("/")[2],
        ]
        for row in rows[:count]
    ]
    if cells:
        screen.table(columns, cells)
    return sum(row.times for row in rows[count:])
