"""What the compiler makes of every policy, for a GPU that need not be there.

    python -m benchmarks.compiled [GROUP ...] [--device h200] [--json FILE] [--check]

Prints temp memory, HBM traffic per step and matmuls / convolutions executed, baselines and ours in one run, from
the optimised program XLA produces. `--check` exits with 1 if a bound of `benchmarks.programs` is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import remat
from benchmarks.programs import GROUPS, Bound, Group, Row

__all__ = ["Measured", "main", "measure", "missed"]


@dataclass(frozen=True)
class Measured:
    """A compiled row."""

    group: str
    label: str
    temp_mib: float
    traffic_gib: float
    matmuls: int
    convolutions: int
    kernels: int
    compile_seconds: float


def measure(group: Group, row: Row, device: str) -> Measured:
    """Compiles the gradient of one row; a function that is no scalar loss is compiled as it is."""
    start = time.perf_counter()
    scalar = jax.eval_shape(row.function, *row.args)
    is_loss = getattr(scalar, "shape", None) == ()
    function = jax.grad(row.function) if is_loss else row.function
    report = remat.compile_report(function, *row.args, device=device)
    return Measured(
        group=group.name,
        label=row.label,
        temp_mib=report.temp_bytes / 2**20,
        traffic_gib=report.hbm_traffic_bytes / 2**30,
        matmuls=report.matmuls_executed,
        convolutions=report.convolutions_executed,
        kernels=report.kernels_executed,
        compile_seconds=time.perf_counter() - start,
    )


def missed(bound: Bound, rows: dict[str, Measured]) -> list[str]:
    """Returns what a row misses of its bound, as sentences."""
    got = rows[bound.row]
    base = rows[bound.baseline] if bound.baseline else None
    limits: list[tuple[str, float, float | None]] = [
        ("temp MiB", got.temp_mib, bound.temp_mib),
        ("traffic GiB", got.traffic_gib, bound.traffic_gib),
        ("matmuls", got.matmuls, bound.matmuls),
        ("convolutions", got.convolutions, bound.convolutions),
    ]
    if base is not None and bound.temp_factor is not None:
        limits.append(("temp against baseline", got.temp_mib, bound.temp_factor * base.temp_mib))
    if base is not None and bound.traffic_factor is not None:
        limit = bound.traffic_factor * base.traffic_gib
        limits.append(("traffic against baseline", got.traffic_gib, limit))
    return [
        f"{bound.row}: {what} is {value:.2f}, the bound is {limit:.2f}"
        for what, value, limit in limits
        if limit is not None and value > limit
    ]


def _print(row: Measured) -> None:
    print(
        f"  {row.label:38s} {row.temp_mib:9.1f} {row.traffic_gib:9.2f} {row.matmuls:8d} "
        f"{row.convolutions:6d} {row.kernels:8d}",
        flush=True,
    )


def run_group(group: Group, device: str) -> tuple[list[Measured], list[str]]:
    """Compiles and prints the rows of a group; returns them and what misses its bound."""
    print(f"{group.name} on {device}: {(group.rows.__doc__ or '').splitlines()[0]}")
    print(
        f"  {'':38s} {'temp MiB':>9s} {'HBM GiB':>9s} {'matmuls':>8s} {'convs':>6s} {'kernels':>8s}"
    )
    rows: list[Measured] = []
    for row in group.rows():
        rows.append(measure(group, row, device))
        _print(rows[-1])
    by_label = {row.label: row for row in rows}
    problems = [line for bound in group.bounds for line in missed(bound, by_label)]
    for line in problems:
        print(f"  MISSED  {line}")
    if group.bounds and not problems:
        print("  every bound is met")
    return rows, problems


def _record(rows: list[Measured], device: str) -> dict[str, Any]:
    return {
        "kind": "compiled, device absent",
        "device": device,
        "jax": jax.__version__,
        "remat": remat.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": [asdict(row) for row in rows],
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"of {list(GROUPS)}; default: all"
    )
    parser.add_argument("--device", default="h200")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    options = parser.parse_args(argv)
    unknown = [name for name in options.groups if name not in GROUPS]
    if unknown:
        parser.error(f"unknown groups {unknown}; choose from {list(GROUPS)}")
    rows: list[Measured] = []
    problems: list[str] = []
    for name in options.groups or GROUPS:
        more, lines = run_group(GROUPS[name], options.device)
        rows += more
        problems += lines
        if options.json:  # after every group, so that an interrupted run keeps what it has
            options.json.write_text(json.dumps(_record(rows, options.device), indent=1) + "\n")
    return 1 if options.check and problems else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
