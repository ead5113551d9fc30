"""`remat pareto TARGET`: plans a function at several budgets."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from remat.tools.target import load_target
from remat.tools.terminal import flags
from remat.tools.terminal.output import deliver
from remat.tools.terminal.progress import Progress

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    pareto = commands.add_parser("pareto", help="plan a function at several budgets")
    pareto.set_defaults(run=_run)
    flags.add_target(pareto)
    flags.add_policy(pareto, "ilp", "ilp")
    pareto.add_argument(
        "--budgets", type=flags.names, help="comma separated: 6GiB, bytes, or fractions (0.5)"
    )
    pareto.add_argument(
        "--points", type=flags.positive, default=8, help="how many, without --budgets (default: 8)"
    )
    flags.add_document(pareto)
    flags.add_plot(pareto)
    flags.add_debug(pareto)


def _run(options: argparse.Namespace) -> int:
    from remat.tools import plot
    from remat.tools.pareto import Pareto, iter_pareto

    if options.plot is not None:
        plot.check_path(options.plot)
    policy = flags.configured(options.policy, options.option)
    function, args = load_target(options.target)
    curve: Pareto | None = None
    interrupted = False
    with Progress() as progress:
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
        deliver(options.json, lambda: json.dumps(document, indent=2), str(curve))
        if options.plot is not None and curve.points:
            plot.pareto(curve, options.plot, title=options.target)
    if interrupted:
        print("remat: interrupted", file=sys.stderr)
        return 130
    return 0
