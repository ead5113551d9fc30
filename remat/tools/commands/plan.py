"""`remat plan TARGET`: plans a function and explains the plan."""

from __future__ import annotations

import argparse
from typing import Any

from remat.tools.target import load_target
from remat.tools.terminal import flags
from remat.tools.terminal.output import deliver
from remat.tools.terminal.progress import Progress

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    plan = commands.add_parser("plan", help="plan a function and explain the plan")
    plan.set_defaults(run=_run)
    flags.add_target(plan)
    flags.add_policy(plan, None, "min_cut, and with --budget auto")
    plan.add_argument("--budget", help="bound on the peak: 6GiB, bytes, or a fraction (0.5)")
    plan.add_argument(
        "--confirm",
        metavar="DEVICE",
        help="compile the plan for this device to confirm the budget: h200, cpu, attached, auto, off",
    )
    flags.add_top(plan)
    flags.add_save(plan)
    flags.add_document(plan)
    flags.add_plot(plan)
    flags.add_debug(plan)


def _run(options: argparse.Namespace) -> int:
    from remat import api
    from remat.checkpointing import UNSET, chosen_policy
    from remat.plans import report
    from remat.tools import plot

    if options.plot is not None:
        plot.check_path(options.plot)
    name = chosen_policy(None, options.policy or UNSET, options.budget)
    policy = flags.configured(name, options.option)
    function, args = load_target(options.target)
    with Progress() as progress:
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
    deliver(options.json, made.to_json, report.describe(made, options.top))
    return 0
