"""`remat dtr LOG`: replays a log, or the log of a function, within a budget by dynamic rematerialization."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat.dtr import HEURISTICS, Log, Run, Statistics, export_log, load_log, simulate, statistics
from remat.dtr import write_log as write_log_file
from remat.plans.words import human_bytes, human_seconds
from remat.tools.terminal import flags
from remat.tools.terminal.messages import FAILURE
from remat.tools.terminal.progress import Progress
from remat.tools.terminal.screen import Screen, check_places, deliver, warnings_shown

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    dtr = flags.add_command(
        commands,
        "dtr",
        _run,
        "replay a log of a program within a budget; exit code 1 if it does not come to its end",
    )
    dtr.add_argument(
        "target",
        metavar="LOG|TARGET",
        help="a file of JSON lines (also .gz), or module:factory, which returns (function, args)",
    )
    dtr.add_argument(
        "--budget", metavar="SIZE", help="6GiB, bytes, or a share of the peak without one (0.5)"
    )
    dtr.add_argument(
        "--heuristic", default="dtr_eqclass", metavar="NAME", help=f"one of {', '.join(HEURISTICS)}"
    )
    dtr.add_argument("--eviction", choices=("eager", "banish", "ignore"), default="eager")
    dtr.add_argument("--seed", type=int, default=0, metavar="N", help="of the heuristic random")
    dtr.add_argument(
        "--thrash", type=float, default=100.0, metavar="X", help="ends at so many times the base"
    )
    dtr.add_argument(
        "--search", choices=("index", "scan"), default="index", help="scan: accesses as published"
    )
    dtr.add_argument(
        "--argnums", type=flags.argnums, default=0, metavar="N", help="of TARGET: 0 or 0,2"
    )
    flags.add_device(dtr, "whose roofline times TARGET takes (default: h200)")
    dtr.add_argument("--save-log", type=Path, metavar="FILE", help="write the log (.gz: packed)")
    flags.add_document(dtr)
    flags.add_plot(dtr)


@warnings_shown()
def _run(options: argparse.Namespace) -> int:
    from remat.resolve import parse_budget
    from remat.tools import dtr_plot, plot

    with flags.reading():
        budget = parse_budget(options.budget)
        if options.plot is not None:
            plot.check_path(options.plot)
        check_places(save_log=options.save_log, json=options.json, plot=options.plot)
        # What is wrong with the settings is said before anything is read or traced.
        simulate(Log((), 0), 1, options.heuristic, thrash=options.thrash)
    with Progress(verbose=options.verbose) as progress:
        log = _log(options, progress)
        if options.save_log is not None:
            write_log_file(log, options.save_log)
        progress(f"{options.heuristic}: replaying")
        run = simulate(
            log,
            budget,
            options.heuristic,
            options.eviction,
            options.seed,
            thrash=options.thrash,
            search=options.search,
        )
        found = statistics(log)
    fields = {f.name: getattr(run, f.name) for f in dataclasses.fields(run) if f.name != "trace"}
    document = {
        "format": "remat.dtr",
        "target": options.target,
        "heuristic": options.heuristic,
        "eviction": options.eviction,
        "search": options.search,
        "statistics": dataclasses.asdict(found),
        "run": {**fields, "overhead": run.overhead},
    }
    title = f"{Path(options.target).name}, {options.heuristic}"
    writes: list[Callable[[], object]] = []
    if options.plot is not None:
        writes.append(lambda: dtr_plot.draw_run(log, run, options.plot, title))
    deliver(
        options.json,
        lambda: json.dumps(document, indent=2),
        lambda screen: _show(options, found, run, screen),
        *writes,
    )
    return 0 if run.status == "ok" else FAILURE


def _log(options: argparse.Namespace, progress: Progress) -> Log:
    from remat import api

    if Path(options.target).exists() or ":" not in options.target:
        progress(f"reading {options.target}")
        return load_log(options.target)
    function, args = flags.loaded(options)
    progress(f"tracing {options.target}")
    plan = api.plan(function, *args, remat_policy="save_all", argnums=options.argnums)
    return export_log(plan.graph, device=options.device or "h200")


def _show(options: argparse.Namespace, found: Statistics, run: Run, screen: Screen) -> None:
    limit = "without a limit"
    if run.budget_bytes is not None:
        share = run.budget_bytes / found.peak_bytes if found.peak_bytes else 0.0
        limit = f"within {human_bytes(run.budget_bytes)}, {share:.0%} of the peak"
    endings = {
        "ok": (f"{run.overhead:.2%} repeated", "green"),
        "out_of_memory": ("all that may be evicted was, and an operator did not fit", "red"),
        "thrashing": (
            f"ended: more than {options.thrash - 1:g} times the base was repeated",
            "red",
        ),
    }
    ending, style = endings[run.status]
    rows = (
        ("operators", f"{found.ops:,}, {found.tensors:,} tensors, {_time(found.cost)}"),
        ("peak", f"{human_bytes(found.peak_bytes)} without a limit"),
        ("constants", human_bytes(found.constant_bytes)),
        ("largest operator", human_bytes(found.bottleneck_bytes)),
        ("peak of the run", human_bytes(run.peak_bytes)),
        ("evictions", f"{run.evictions:,}, {run.banished:,} banished"),
        ("made again", f"{run.rematerializations:,} operators, {_time(run.repeated_cost)}"),
        ("storage accesses", f"{run.storage_accesses:,}"),
    )
    screen.title(options.target, f"{options.heuristic}, {options.eviction} eviction, {limit}")
    screen.line()
    status = run.status.replace("_", " ")
    screen.paragraph(f"{status}: {ending}", first=(f"{'status':18}", "bold"), style=style)
    for name, value in rows:
        screen.paragraph(value, first=(f"{name:18}", "bold"))


def _time(nanoseconds: int) -> str:
    return human_seconds(nanoseconds * 1e-9)
