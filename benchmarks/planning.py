"""How long planning takes, on joint graphs of growing size.

    python -m benchmarks.planning [--layers 4 16 36 52] [--json FILE] [--check]

For unrolled GPT blocks: seconds to trace and differentiate (jax's work), to cut, for the decision of `echo`, and
for the whole plan (cut, schedule, replay, statistics). Numbers are processor seconds, as waiting for a busy machine
does not count, and but for tracing the minimum of three runs.

`--check` exits with 1 if `echo` decides about no more than 16,500 operators (52 blocks) in more than 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import remat
from models import gpt
from remat.planning.make import make_plan
from remat.policies import Echo, Full, MinCut, SaveAll

__all__ = ["main", "problems_of", "run"]

ECHO_OPERATORS = 16_500
ECHO_SECONDS = 0.3


def _seconds(function: Callable[[], Any], repeat: int = 3) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def run(layers: int) -> dict[str, Any]:
    """Times planning a stack of `layers` GPT blocks."""
    function, args = gpt.blocks_unrolled(
        layers=layers, batch=2, length=64, width=128, heads=4, dropout=0.1
    )
    start = time.process_time()
    graph = remat.plan(function, *args, remat_policy=SaveAll()).graph
    traced = time.process_time() - start
    row: dict[str, Any] = {
        "layers": layers,
        "joint_equations": len(graph.ops),
        "trace_seconds": round(traced, 3),
        "cut_seconds": round(_seconds(lambda: MinCut().decide(graph)), 4),
        # A copy has nothing cached: what Echo asks of the graph counts.
        "echo_seconds": round(_seconds(lambda: Echo().decide(replace(graph))), 4),
    }
    for policy in (MinCut(), Echo(), Full(), SaveAll()):
        row[f"plan_seconds_{policy.name}"] = round(
            _seconds(lambda policy=policy: make_plan(graph, policy)), 3
        )
    return row


def problems_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for every row in which `echo` takes too long."""
    return [
        f"{row['joint_equations']} operators: echo takes {row['echo_seconds']:.2f} s, "
        f"expected at most {ECHO_SECONDS}"
        for row in rows
        if row["joint_equations"] <= ECHO_OPERATORS and row["echo_seconds"] > ECHO_SECONDS
    ]


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 36, 52])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    rows = []
    for layers in options.layers:
        rows.append(run(layers))
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        record = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    lines = problems_of(rows)
    for line in lines:
        print(f"  MISSED  {line}")
    return 1 if options.check and lines else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
