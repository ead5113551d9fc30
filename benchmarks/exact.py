"""The exact planners on chains with known optimum and on public benchmark graphs.

    python -m benchmarks.exact [--seconds 60] [--json FILE] [--only chain_a chain_b graphs rounding]

Chains are built here; graphs are read from the folder that `REMAT_GRAPHS` names (networkx node-link JSON with
`cost_cpu`, `cost_ram` and `backward`, or with `duration`, `out_cost` and an order) and skipped without it. Every
row shows the extra cost of the best sequence, as the referee sees it, the proven bound, the gap between them, and
seconds. A budget is a number of values (chains) or a fraction of the peak without repetitions (graphs).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remat.policies.exact.checkmate_model import round_lp
from remat.policies.exact.cut import cut_bound
from remat.policies.exact.milp import Solved, solve_restricted
from remat.policies.solvers.problem import Problem, peak_of_order

__all__ = ["load_graph", "main"]

_CHAIN_A = {8: range(3, 11), 32: (3, 4, 5, 6, 8, 10, 12, 16, 20), 100: (3, 16, 22, 32, 52)}
_CHAIN_B = {8: range(3, 9), 16: (8,), 64: (16,), 128: (23,)}
_RATIOS = {
    "vgg16": (0.9, 0.8),
    "vgg19": (0.9, 0.8, 0.7),
    "unet": (0.9, 0.8, 0.7, 0.6, 0.5),
    "resnet50": (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3),
    "random_layered_100": (0.9, 0.8),
}
_GROUPS = ("chain_a", "chain_b", "graphs", "rounding")


def _unit(inputs: list[list[int]], turn: int) -> Problem:
    count = len(inputs)
    again = [node < turn for node in range(count)]
    return Problem.of([1] * count, [1] * count, inputs, repeatable=again, turn=turn)


def _chain_a(length: int) -> Problem:
    """`length` forward nodes, a turning one, `length` backward nodes that read their forward node."""
    inputs = [[i - 1] if i else [] for i in range(length + 1)]
    inputs += [[2 * length - j, j - 1] for j in range(length + 1, 2 * length + 1)]
    return _unit(inputs, length)


def _chain_b(length: int) -> Problem:
    """The DTR paper's: `length` forward nodes, backward node `i` reads forward node `i - 1`."""
    inputs = [[i - 1] if i else [] for i in range(length)]
    for i in range(length, 0, -1):
        reads = [i - 2] if i >= 2 else []
        inputs.append([*reads, *([len(inputs) - 1] if i < length else [])])
    return _unit(inputs, length)


def load_graph(path: Path) -> Problem:
    """Reads a benchmark graph; nodes are in the order of their ids, or in the graph's own order."""
    data = json.loads(path.read_text())
    nodes = data["nodes"]
    reads: list[list[int]] = [[] for _ in nodes]
    if "backward" in nodes[0]:
        for link in data["links"]:
            reads[link["target"]].append(link["source"])
        backward = [bool(node["backward"]) for node in nodes]
        return Problem.of(
            [node["cost_cpu"] for node in nodes],
            [node["cost_ram"] for node in nodes],
            map(sorted, reads),
            repeatable=[not b for b in backward],
            turn=backward.index(True),
        )
    place = {node: index for index, node in enumerate(data["graph"]["order"])}
    ordered = sorted(nodes, key=lambda node: place[node["name"]])
    for link in data["links"]:
        reads[place[link["1"]]].append(place[link["0"]])
    return Problem.of(
        [node["duration"] for node in ordered],
        [node["out_cost"] for node in ordered],
        map(sorted, reads),
    )


def _row(case: str, budget: str, method: str, solved: Solved) -> dict[str, Any]:
    finite = math.isfinite(solved.extra_cost)
    return {
        "case": case,
        "budget": budget,
        "method": method,
        "status": solved.status,
        "extra": solved.extra_cost if finite else None,
        "bound": round(solved.bound, 4) if math.isfinite(solved.bound) else None,
        "gap": round(solved.gap, 5) if finite else None,
        "seconds": round(solved.solve_seconds, 2),
    }


def _chains(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    build, table = {"chain_a": (_chain_a, _CHAIN_A), "chain_b": (_chain_b, _CHAIN_B)}[name]
    for length, budgets in table.items():
        for budget in budgets:
            solved = solve_restricted(build(length), budget, seconds=seconds)
            yield _row(f"{name} n={length}", str(budget), "restricted", solved)


def _graphs(folder: Path, group: str, seconds: float) -> Iterator[dict[str, Any]]:
    for name, ratios in _RATIOS.items():
        path = folder / f"{name}.json"
        if not path.exists():
            print(f"{path} is not there: skipped", file=sys.stderr)
            continue
        problem = load_graph(path)
        peak = peak_of_order(problem)
        if group == "graphs":
            yield from _restricted(name, problem, peak, ratios, seconds)
        elif len(problem) <= 80:  # the published program grows with nodes * edges
            for ratio in ratios:
                solved = round_lp(problem, math.ceil(ratio * peak), seconds=seconds)
                yield _row(name, str(ratio), group, solved)


def _restricted(
    name: str, problem: Problem, peak: int, ratios: tuple[float, ...], seconds: float
) -> Iterator[dict[str, Any]]:
    for ratio in ratios:
        budget = math.ceil(ratio * peak)
        cut = cut_bound(problem, budget)
        solved = solve_restricted(problem, budget, seconds=seconds)
        row = _row(name, str(ratio), "restricted", solved)
        row["cut_bound"] = round(cut.bound, 2) if math.isfinite(cut.bound) else None
        row["cut_seconds"] = round(cut.solve_seconds, 2)
        yield row


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one row")
    parser.add_argument("--only", nargs="+", choices=_GROUPS, default=list(_GROUPS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    folder = os.environ.get("REMAT_GRAPHS")
    rows: list[dict[str, Any]] = []
    for group in options.only:
        if group.startswith("chain"):
            found = _chains(group, options.seconds)
        elif folder is None:
            print(f"{group}: REMAT_GRAPHS names no folder: skipped", file=sys.stderr)
            continue
        else:
            found = _graphs(Path(folder), group, options.seconds)
        for row in found:
            rows.append(row)
            print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    if options.json:
        record = {"date": time.strftime("%Y-%m-%d"), "seconds": options.seconds, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
