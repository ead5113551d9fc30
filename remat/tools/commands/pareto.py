"""`remat pareto TARGET`: plans a function at several budgets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remat.core.interrupt import BestSoFar
from remat.plans.words import human_bytes, human_flops, human_seconds
from remat.tools.terminal import flags
from remat.tools.terminal.messages import FAILURE, interrupted
from remat.tools.terminal.progress import Progress
from remat.tools.terminal.screen import Cell, Column, Screen, check_places, deliver, warnings_shown

if TYPE_CHECKING:
    from remat.tools.pareto import Pareto

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    pareto = flags.add_command(commands, "pareto", _run, "plan a function at several budgets")
    flags.add_target(pareto)
    flags.add_policy(pareto, "ilp", "ilp")
    flags.add_device(pareto, "whose prices count")
    pareto.add_argument(
        "--budgets",
        "--budget",
        type=flags.names,
        metavar="SIZES",
        help="comma separated: 6GiB, bytes, or fractions (0.5)",
    )
    pareto.add_argument(
        "--points",
        type=flags.at_least(2),
        default=8,
        metavar="N",
        help="how many, without --budgets (default: 8)",
    )
    flags.add_document(pareto)
    flags.add_plot(pareto)


@warnings_shown()
def _run(options: argparse.Namespace) -> int:
    from remat.resolve import parse_budget
    from remat.tools import plot
    from remat.tools.pareto import iter_pareto
    from remat.tools.references import REFERENCES

    policy = flags.configured(options.policy, options.option, options.device)
    with flags.reading():
        for budget in options.budgets or ():
            parse_budget(budget)
        if options.plot is not None:
            plot.check_path(options.plot)
        check_places(json=options.json, plot=options.plot)
    function, args = flags.loaded(options)
    curve: Pareto | None = None
    is_whole = True
    with Progress(verbose=options.verbose) as progress:
        try:
            for curve in iter_pareto(
                function,
                *args,
                remat_policy=policy,
                budgets=options.budgets,
                points=options.points,
                references=() if options.plot is None else REFERENCES,
                argnums=options.argnums,
                progress=progress,
            ):
                progress(BestSoFar(_state(curve)))
        except KeyboardInterrupt:
            is_whole = False
    found = curve
    if found is not None:
        document = {"target": options.target, **found.to_dict()}
        writes: list[Callable[[], object]] = []
        if options.plot is not None and found.points:
            writes.append(lambda: plot.pareto(found, options.plot, title=options.target))
        deliver(
            options.json,
            lambda: json.dumps(document, indent=2),
            lambda screen: _show(options.target, found, screen),
            *writes,
        )
    if not is_whole:
        done = 0 if found is None else len(found.points) + len(found.infeasible)
        of = "" if found is None else f" of {found.wanted}"
        return interrupted(f"{done}{of} budgets were planned")
    return 0 if found is None or found.points else FAILURE


def _state(curve: Pareto) -> str:
    done = f"{len(curve.points) + len(curve.infeasible)} of {curve.wanted} budgets"
    if not curve.points:
        return f"{done}, none of them met"
    point = curve.points[-1]
    return f"{done}; {human_bytes(point.peak_bytes)} for +{human_seconds(point.recompute_seconds)}"


def _show(target: str, curve: Pareto, screen: Screen) -> None:
    screen.title(target, f"what memory costs under {curve.policy_name}")
    screen.line()
    without = human_bytes(curve.baseline_peak_bytes)
    smallest = human_bytes(curve.smallest_peak_bytes)
    screen.line(("memory  ", "bold"), f"{without} without; {smallest} is the smallest peak found")
    screen.line()
    columns = (
        Column("budget", ">"),
        Column("peak", ">"),
        Column("of none", ">"),
        Column("time", ">"),
        Column("repeated", ">", gives_way=2),
        Column("kept", ">", gives_way=1),
        Column("proof", style="dim"),
    )
    screen.table(columns, _cells(curve))
    screen.line()
    text = f"Predicted peaks; time added per step, a roofline estimate for {curve.device}."
    screen.paragraph(text, style="dim")
    if curve.references:
        text = "Names: what that policy of jax's keeps, in remat's order."
        screen.paragraph(text, style="dim")


def _cells(curve: Pareto) -> list[list[Cell]]:
    cells: list[list[Cell]] = [
        [human_bytes(entry.budget_bytes), ("none fits", "red"), "", "", "", "", ""]
        for entry in curve.infeasible
    ]
    for point in curve.points:
        gap = point.plan.gap
        share = point.peak_bytes / max(curve.baseline_peak_bytes, 1)
        cells.append(
            [
                human_bytes(point.budget_bytes),
                (human_bytes(point.peak_bytes), "bold"),
                f"{share:.0%}",
                f"+{human_seconds(point.recompute_seconds)}",
                human_flops(point.recompute_flops),
                human_bytes(point.saved_bytes),
                f"within {gap:.1%}" if gap else "no bound" if gap is None else "optimal",
            ]
        )
    for entry in curve.references:
        share = entry.plan.peak_bytes / max(curve.baseline_peak_bytes, 1)
        cells.append(
            [
                entry.name,
                human_bytes(entry.plan.peak_bytes),
                f"{share:.0%}",
                f"+{human_seconds(entry.plan.recompute_seconds)}",
                human_flops(entry.plan.recompute_flops),
                human_bytes(entry.plan.saved_bytes),
                "",
            ]
        )
    return cells
