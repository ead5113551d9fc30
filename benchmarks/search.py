"""What the local search reaches, and how fast.

    python -m benchmarks.search [--seconds 10] [--only NAME ...] [--seed 0] [--reorder] [--json FILE] [--check]

Rows: unit chains against their optimum, random layered graphs and a training-shaped graph of 20,000 nodes
(`benchmarks.layered`), and, if the environment variable `REMAT_GRAPHS` names a folder of them, the published
graphs against their optimum. "Extra" is in per cent of the cost of running every node once, "best" the proven
optimum where one is known. With `--reorder` the order of the first runs is searched too, as in the published
results of FastSA.

`--check` exits with 1 if a row is above its budget, if the published ResNet-50 takes more than 0.30 % extra at 0.8,
or if, with `--reorder` and at least 40 seconds, a layered graph of 1,000 nodes takes more than 1.5 times what
FastSA publishes. The cost of other rows has no limit: it is printed beside the optimum.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.layered import (
    LAYERED_PUBLISHED,
    chain,
    graph_folder,
    layered,
    published,
    training,
)
from remat.policies.solvers.problem import Problem, peak_of_order
from remat.policies.solvers.search import search

__all__ = ["Row", "main", "measure", "problems_of", "rows"]

# Optimal extra cost of the published training graphs by budget, as a share of the peak.
_OPTIMA: dict[str, dict[float, float]] = {
    "vgg16": {0.9: 305},
    "vgg19": {0.9: 9895, 0.8: 261625},
    "unet": {0.9: 350, 0.8: 615, 0.7: 920, 0.6: 1380, 0.5: 2160},
    "resnet50": {0.8: 1130},
}
# Optimal extra runs of `chain(n)` by budget.
_CHAINS: dict[int, dict[int, float]] = {
    8: {3: 28, 4: 9, 5: 5},
    32: {3: 496, 4: 115, 5: 65, 8: 31, 16: 18},
    100: {5: 397, 8: 184, 12: 125, 22: 80, 32: 70},
}
# Most extra cost by graph and budget, in per cent; the optimum of this one is 0.2786.
_MAX_EXTRA: dict[tuple[str, float], float] = {("resnet50", 0.8): 0.30}
# What FastSA publishes for 1,000 nodes (Imanishi et al. 2024), in per cent, with orders searched for 36 seconds.
# Our graphs have the same parameters but are others: hence a factor, and no limit for shorter or narrower searches.
_FASTSA: dict[float, float] = {0.9: 0.4, 0.8: 2.5, 0.7: 7.4}
_FASTSA_FACTOR = 1.5
_FASTSA_SECONDS = 40.0


@dataclass(frozen=True)
class Row:
    """One measurement: how to make the problem, the budget, and the optimum if it is known.

    `budget` is in bytes if above 1, else a share of the peak.
    """

    name: str
    make: Callable[[], Problem]
    budget: float
    optimum: float | None = None


def rows() -> Iterator[Row]:
    """The rows of the table."""
    for steps, budgets in _CHAINS.items():
        for budget, optimum in budgets.items():
            yield Row(f"chain_{steps}", partial(chain, steps), budget, optimum)
    for nodes, width in LAYERED_PUBLISHED.items():
        for ratio in (0.9, 0.8, 0.7):
            yield Row(f"layered_{nodes}", partial(layered, nodes, width), ratio)
    yield Row("training_20000", partial(training, 500, 20), 0.5)
    folder = graph_folder()
    if folder is None:
        return
    for name, optima in _OPTIMA.items():
        if (folder / f"{name}.json").exists():
            for ratio, optimum in optima.items():
                yield Row(name, partial(published, name), ratio, optimum)
    for nodes in LAYERED_PUBLISHED:
        name = f"random_layered_{nodes}"
        if (folder / f"{name}.json").exists():
            for ratio in (0.9, 0.8, 0.7):
                yield Row(name, partial(published, name), ratio)


def measure(row: Row, seconds: float, seed: int, reorder: bool) -> dict[str, Any]:
    """Searches one row; orders only where repetitions are allowed anywhere."""
    problem = row.make()
    peak = peak_of_order(problem)
    budget = int(row.budget) if row.budget > 1 else math.ceil(row.budget * peak)
    reorder = reorder and problem.turn == 0
    found = search(problem, budget, seconds=seconds, seed=seed, reorder=reorder)
    percent = 100 * found.extra_cost / problem.total_cost
    return {
        "graph": row.name,
        "nodes": len(problem),
        "edges": sum(map(len, problem.inputs)),
        "budget": row.budget,
        "feasible": found.feasible,
        "peak_share": round(found.peak_bytes / peak, 4),
        "extra_cost": found.extra_cost,
        "extra_percent": round(percent, 4),
        "optimum": row.optimum,
        "proposals": found.proposals,
        "seconds": round(found.seconds, 2),
        "seconds_asked": seconds,
        "compile_seconds": round(found.compile_seconds, 2),
        "compiled": found.compiled,
        "reorder": reorder,
        "ended": found.ended,
    }


def problems_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for every row of `measure` that misses a limit; see the module docstring."""
    lines: list[str] = []
    for result in results:
        graph, budget = result["graph"], result["budget"]
        if not result["feasible"]:
            lines.append(f"{graph} at {budget:g}: above its budget")
            continue
        limit = _MAX_EXTRA.get((graph, budget))
        if (
            graph in ("layered_1000", "random_layered_1000")
            and result["reorder"]
            and result["seconds_asked"] >= _FASTSA_SECONDS
        ):
            limit = _FASTSA_FACTOR * _FASTSA[budget]
        if limit is not None and result["extra_percent"] > limit:
            extra = result["extra_percent"]
            lines.append(f"{graph} at {budget:g}: {extra:.4g} % extra, {limit:.4g} are allowed")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="per row")
    parser.add_argument(
        "--only", nargs="*", default=[], help="rows whose name contains one of these"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reorder", action="store_true", help="search orders, too, where possible")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    options = parser.parse_args(argv)
    chosen = [
        row for row in rows() if not options.only or any(word in row.name for word in options.only)
    ]
    if not chosen:
        names = sorted({row.name for row in rows()})
        parser.error(f"no row matches {options.only}; there are {names}")
    print(
        "graph                 nodes  edges budget  ok  peak   extra %       extra        best  M/s"
    )
    results = []
    for row in chosen:
        result = measure(row, options.seconds, options.seed, options.reorder)
        results.append(result)
        best = "-" if row.optimum is None else f"{row.optimum:g}"
        speed = result["proposals"] / max(result["seconds"], 0.01) / 1e6
        print(
            f"{row.name:20s} {result['nodes']:6d} {result['edges']:6d} {row.budget:6g}"
            f" {'yes' if result['feasible'] else 'NO':>3s} {result['peak_share']:.3f}"
            f" {result['extra_percent']:9.4f} {result['extra_cost']:11g} {best:>11s} {speed:.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    lines = problems_of(results)
    for line in lines:
        print(f"  MISSED  {line}")
    return 1 if options.check and lines else 0


if __name__ == "__main__":
    sys.exit(main())
