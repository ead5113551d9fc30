"""`remat compare TARGET`: puts policies side by side, each compiled."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from remat.core.interrupt import BestSoFar
from remat.plans.words import human_bytes, human_flops, human_seconds
from remat.tools.terminal import flags
from remat.tools.terminal.messages import FAILURE, interrupted
from remat.tools.terminal.progress import Progress
from remat.tools.terminal.screen import Cell, Column, Screen, check_places, deliver, warnings_shown

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    compare = flags.add_command(
        commands, "compare", _run, "compile a function under several policies"
    )
    flags.add_target(compare)
    compare.add_argument(
        "--policies",
        "--policy",
        type=flags.names,
        metavar="NAMES",
        help="comma separated (default: six)",
    )
    flags.add_device(compare, "to compile for, by default what is attached")
    flags.add_document(compare)
    flags.add_plot(compare)


@warnings_shown()
def _run(options: argparse.Namespace) -> int:
    from remat.core.devices import get_device
    from remat.resolve import resolve
    from remat.tools import plot
    from remat.tools.compare import DEFAULT_POLICIES, Row, iter_compare

    policies = DEFAULT_POLICIES if options.policies is None else options.policies
    with flags.reading():
        for name in policies:  # a typo is found now, not after minutes of compiling
            resolve(name)
        if options.device is not None:
            get_device(options.device)
        if options.plot is not None:
            plot.check_path(options.plot)
        check_places(json=options.json, plot=options.plot)
    function, args = flags.loaded(options)
    rows: list[Row] = []
    is_whole = True
    with Progress(verbose=options.verbose) as progress:
        wanted = {"policies": policies, "device": options.device, "argnums": options.argnums}
        try:
            for row in iter_compare(function, args, progress=progress, **wanted):
                rows.append(row)
                progress(BestSoFar(_best(rows)))
        except KeyboardInterrupt:
            is_whole = False
    writes: list[Callable[[], object]] = []
    if options.plot is not None and any(row.temp_bytes is not None for row in rows):
        writes.append(lambda: plot.tradeoff(rows, options.plot, title=options.target))
    _deliver(options, rows, is_whole, *writes)
    if not is_whole:
        return interrupted(f"{len(rows)} of {len(policies)} policies were compared")
    return FAILURE if rows and all(row.error for row in rows) else 0


def _best(rows: Sequence[Any]) -> str:
    """What has the least memory so far."""
    compiled = [row for row in rows if row.temp_bytes is not None]
    if not compiled:
        return "nothing could be compiled"
    best = min(compiled, key=lambda row: row.temp_bytes)
    return f"{best.policy}, {human_bytes(best.temp_bytes)}"


def _deliver(
    options: argparse.Namespace,
    rows: Sequence[Any],
    is_whole: bool,
    *writes: Callable[[], object],
) -> None:
    import jax

    device = options.device or jax.default_backend()
    document = {
        "format": "remat.compare",
        "target": options.target,
        "device": device,
        "jax_version": jax.__version__,
        "interrupted": not is_whole,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    deliver(
        options.json,
        lambda: json.dumps(document, indent=2),
        lambda screen: _show(options, rows, device, screen),
        *writes,
    )


def _show(options: argparse.Namespace, rows: Sequence[Any], device: str, screen: Screen) -> None:
    import jax

    from remat.compiler.compile import CPU_COMPILER_OPTIONS

    screen.title(
        options.target, f"one training step compiled for {device} by jax {jax.__version__}"
    )
    screen.line()
    shown = screen.table(_COLUMNS, _cells(rows))
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.error:
            failed.setdefault(" ".join(row.error.split()), []).append(row.policy)
    for text, policies in failed.items():
        screen.paragraph(text, first=(f"  {', '.join(policies)} failed: ", "bold red"))
    screen.line()
    planned = [title for title in ("kept", "repeated") if title in shown]
    note = f" {', '.join(planned)}: as planned." if planned else ""
    screen.paragraph(
        f"temp, traffic, matmuls: of the compiled program, per step.{note} Each policy is applied to the whole "
        "function; jax's own are often applied per block.",
        style="dim",
    )
    if device == "cpu":
        how = "compiled with remat.compile.CPU_COMPILER_OPTIONS; " if CPU_COMPILER_OPTIONS else ""
        screen.paragraph(f"cpu: {how}GPU numbers need --device h200.", style="dim")


_COLUMNS = (
    Column("policy", shortest=32),
    Column("temp", ">"),
    Column("of none", ">", gives_way=3),
    Column("traffic", ">"),
    Column("matmuls", ">"),
    Column("convs", ">"),
    Column("roofline", ">", gives_way=1),
    Column("kept", ">", gives_way=4),
    Column("repeated", ">", gives_way=5),
    Column("planned", ">", gives_way=6),
    Column("compiled", ">", gives_way=7),
)


def _cells(rows: Sequence[Any]) -> list[list[Cell]]:
    none = next((row.temp_bytes for row in rows if row.policy == "none"), None)
    compiled = [row.temp_bytes for row in rows if row.temp_bytes is not None]
    has_convolutions = any(row.convolutions for row in rows)
    cells: list[list[Cell]] = []
    for row in rows:
        is_best = row.temp_bytes is not None and row.temp_bytes == min(compiled)
        temp: Cell = (human_bytes(row.temp_bytes), "bold green" if is_best else "")
        of_none = f"{row.temp_bytes / none:.0%}" if none and row.temp_bytes is not None else "-"
        convolutions = _count(row.convolutions) if has_convolutions else ""
        cells.append(
            [
                row.policy,
                ("failed", "bold red") if row.error else temp,
                of_none if none else "",
                human_bytes(row.hbm_traffic_bytes),
                _count(row.matmuls),
                convolutions,
                _any(row.roofline_seconds, rows, "roofline_seconds"),
                human_bytes(row.saved_bytes),
                human_flops(row.recomputed_flops),
                human_seconds(row.plan_seconds),
                human_seconds(row.compile_seconds),
            ]
        )
    return cells


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _any(seconds: float | None, rows: Sequence[Any], name: str) -> str:
    """A duration, or nothing where no row has one."""
    return human_seconds(seconds) if any(getattr(row, name) is not None for row in rows) else ""
