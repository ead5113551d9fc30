"""How long planning takes, on joint graphs of growing size.

    python -m benchmarks.planning [--layers 4 16 36] [--json FILE]

For unrolled GPT blocks: seconds to trace and differentiate (jax's work), to cut, and for the whole plan (cut,
schedule, replay, statistics). Numbers are the minimum of three runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import remat
from models import gpt
from remat.planning import make_plan
from remat.policies import Full, MinCut, SaveAll

__all__ = ["main"]


def _seconds(function: Callable[[], Any], repeat: int = 3) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def run(layers: int) -> dict[str, Any]:
    """Times planning a stack of `layers` GPT blocks."""
    function, args = gpt.blocks_unrolled(
        layers=layers, batch=2, length=64, width=128, heads=4, dropout=0.1
    )
    start = time.perf_counter()
    graph = remat.plan(function, *args, remat_policy=SaveAll()).graph
    traced = time.perf_counter() - start
    row: dict[str, Any] = {
        "layers": layers,
        "joint_equations": len(graph.ops),
        "trace_seconds": round(traced, 3),
        "cut_seconds": round(_seconds(lambda: MinCut().decide(graph)), 4),
    }
    for policy in (MinCut(), Full(), SaveAll()):
        row[f"plan_seconds_{policy.name}"] = round(
            _seconds(lambda policy=policy: make_plan(graph, policy)), 3
        )
    return row


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 36])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    rows = []
    for layers in options.layers:
        rows.append(run(layers))
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        record = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
