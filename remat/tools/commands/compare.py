"""`remat compare TARGET`: puts policies side by side, each compiled."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from remat.tools.target import load_target
from remat.tools.terminal import flags
from remat.tools.terminal.output import deliver
from remat.tools.terminal.progress import Progress

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    compare = commands.add_parser("compare", help="compile a function under several policies")
    compare.set_defaults(run=_run)
    flags.add_target(compare)
    compare.add_argument("--policies", type=flags.names, help="comma separated (default: six)")
    flags.add_device(compare)
    flags.add_document(compare)
    flags.add_plot(compare)
    flags.add_debug(compare)


def _run(options: argparse.Namespace) -> int:
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
    with Progress() as progress:
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
    deliver(options.json, lambda: json.dumps(document, indent=2), "\n".join(lines))
