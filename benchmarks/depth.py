"""Memory against depth: how the planned and the compiled temp of residual layers grow with their number.

    python -m benchmarks.depth [--layers 16 64 144 256] [--device h200] [--json FILE] [--check]

The layers are unrolled, width and hidden width 256, batch 16384: an activation has 16 MiB, a layer's weights 0.75.
Policies: none; `Sublinear()`, about 2 sqrt(n) activations; `Sublinear("recursive", 1)`, about log2(n). The
columns: peak of the coarsened problem's sequence, peak that the plan predicts, compiled temp, in MiB;
matmuls executed; compiled temp over n, over sqrt(n) and over log2(n); seconds to plan and to compile.

`--check` exits with 1 if temp over the growth promised (n, sqrt(n), log2(n)) varies by more than a factor of 1.5
over the depths measured, or if the compiled temp is above the predicted peak by more than 1 %. What 1000
layers take is in `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

import remat
from benchmarks.planners import sequence_of
from models import mlp
from remat.core.graph import Graph
from remat.policies import Sublinear
from remat.policies.buffers.condense import condense
from remat.policies.solvers.problem import peak_of_order, replay

__all__ = ["GROWTH", "POLICIES", "Depth", "main", "measure", "problems_of"]

LAYERS = (16, 64, 144, 256)
SIZES = {"width": 256, "hidden": 256, "batch": 16384}
POLICIES: dict[str, Sublinear | None] = {
    "none": None,
    "grid": Sublinear(),
    "recursive": Sublinear("recursive", 1),
}
GROWTH: dict[str, tuple[str, Callable[[float], float]]] = {
    "none": ("n", float),
    "grid": ("sqrt(n)", math.sqrt),
    "recursive": ("log2(n)", math.log2),
}
"""For every policy the promised growth: its name and the function of the number of layers."""

MAX_SPREAD = 1.5
MAX_ABOVE = 1.01


@dataclass(frozen=True)
class Depth:
    """One number of layers under one policy.

    Attributes:
        node_peak_bytes: peak of the coarsened problem under the plan's sequence, without what XLA adds.
        predicted_bytes: `Plan.peak_bytes`; temp_bytes, matmuls: of the compiled program.
    """

    layers: int
    policy: str
    node_peak_bytes: int
    predicted_bytes: int
    temp_bytes: int
    matmuls: int
    plan_seconds: float
    compile_seconds: float


def measure(layers: int, policy: str, device: str, **sizes: int) -> Depth:
    """Plans and compiles residual layers.

    Args:
        layers: how many.
        policy: a key of `POLICIES`.
        device: to compile for.
        **sizes: of `models.mlp.residual_mlp`, instead of `SIZES`.
    """
    function, args = mlp.residual_mlp(layers=layers, **(sizes or SIZES))
    chosen = POLICIES[policy]
    start = time.perf_counter()
    plan = remat.plan(function, *args, remat_policy="save_all" if chosen is None else chosen)
    seconds = time.perf_counter() - start
    loss = function if chosen is None else remat.checkpoint(function, remat_policy=plan)
    report = remat.compile_report(jax.grad(loss), *args, device=device)
    return Depth(
        layers=layers,
        policy=policy,
        node_peak_bytes=node_peak_bytes(plan.graph, chosen),
        predicted_bytes=plan.peak_bytes,
        temp_bytes=report.temp_bytes,
        matmuls=report.matmuls_executed,
        plan_seconds=seconds,
        compile_seconds=report.compile_seconds,
    )


def node_peak_bytes(graph: Graph, policy: Sublinear | None) -> int:
    """Returns the peak of the sequence of kernels that a policy decides on."""
    condensed = condense(graph)
    if policy is None:
        return peak_of_order(condensed.problem)
    sequence = sequence_of(condensed, policy.decide(graph))
    return replay(condensed.problem, sequence).peak_bytes


def problems_of(rows: Sequence[Depth]) -> list[str]:
    """Returns a line for everything that does not grow as promised; see the module docstring."""
    lines: list[str] = []
    for policy, (name, growth) in GROWTH.items():
        ratios = {
            row.layers: row.temp_bytes / growth(row.layers) for row in rows if row.policy == policy
        }
        if len(ratios) < 2:
            continue
        low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        spread = ratios[high] / ratios[low]
        if spread > MAX_SPREAD:
            lines.append(
                f"{policy}: temp / {name} is {ratios[low] / 2**20:.1f} MiB at {low} layers and "
                f"{ratios[high] / 2**20:.1f} MiB at {high}, a factor of {spread:.2f}; {MAX_SPREAD} is allowed"
            )
    for row in rows:
        if row.temp_bytes > MAX_ABOVE * row.predicted_bytes:
            lines.append(
                f"{row.policy}, {row.layers} layers: compiled temp is {row.temp_bytes / 2**20:.1f} MiB, "
                f"predicted were {row.predicted_bytes / 2**20:.1f}"
            )
    return lines


def _line(row: Depth) -> str:
    mib = [n / 2**20 for n in (row.node_peak_bytes, row.predicted_bytes, row.temp_bytes)]
    n = row.layers
    ratios = [mib[2] / divisor for divisor in (n, math.sqrt(n), math.log2(n))]
    return (
        f"  {n:6d} {row.policy:10s}"
        + "".join(f" {m:9.1f}" for m in mib)
        + f" {row.matmuls:8d}"
        + "".join(f" {r:8.2f}" for r in ratios)
        + f" {row.plan_seconds:7.1f} {row.compile_seconds:7.1f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--device", default="h200")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every row")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    if min(options.layers) < 2:
        parser.error(f"--layers {options.layers}: expected at least 2")
    columns = ("n", "sqrt(n)", "log2(n)")
    print(
        f"residual layers on {options.device}\n  {'layers':>6s} {'':10s} {'nodes':>9s} {'predicted':>9s} "
        f"{'temp MiB':>9s} {'matmuls':>8s} "
        + " ".join(f"{'/' + name:>8s}" for name in columns)
        + f" {'plan s':>7s} {'comp. s':>7s}"
    )
    rows: list[Depth] = []
    for layers in options.layers:
        for policy in options.policies:
            rows.append(measure(layers, policy, options.device))
            print(_line(rows[-1]), flush=True)
            if options.json:
                record = {
                    "kind": "compiled, device absent",
                    "device": options.device,
                    "jax": jax.__version__,
                    "remat": remat.__version__,
                    "date": time.strftime("%Y-%m-%d"),
                    "rows": [asdict(row) for row in rows],
                }
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    lines = problems_of(rows)
    for line in lines:
        print(f"  MISSED  {line}")
    return 1 if options.check and lines else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
