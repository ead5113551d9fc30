"""What coarsening costs: plans of a joint graph with more buffers than `condense` takes, beside those without.

    python -m benchmarks.coarsening [MODEL ...] [--values 60] [--json FILE] [--check]

`remat.policies.buffers.condense` makes one node of a kernel and what XLA fuses into it; plans that keep another
fused value are lost. Here they are allowed again: all fused values of one primitive become buffers, or a single one
does, and the graph is planned within the same bytes by what `ilp` and `checkmate` begin with (minimum cuts, local
search, the dynamic program across blocks). The column `gain %` says how much cheaper the whole program is with the
best of these buffers; it cannot be below 0, since the coarser plan is among the choices. Not every set of buffers
is tried, so it is what was found, no bound. What is overwritten in place is not joined, in either.

`--check` exits with 1 if a plan with more buffers is more than 1 % cheaper.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import jax

from benchmarks.planners import graph_of, parse_models, warm_up, write_rows
from remat.core.deadline import limited
from remat.core.graph import Graph
from remat.policies.buffers.condense import Condensed, buffers_of, condense_apart
from remat.policies.buffers.within import Pool, first_bound
from remat.policies.solvers.problem import peak_of_order

__all__ = ["MODELS", "Coarsened", "candidates", "main", "problems_of", "run_model", "total_cost"]

MODELS: dict[str, float] = {
    "vgg16": 0.7,
    "unet": 0.6,
    "googlenet": 0.5,
    "mobilenet_v2": 0.5,
    "resnet50": 0.5,
    "gpt_blocks_unrolled": 0.5,
}
"""Names in `models.cases` and the budget of each, as a share of the peak without rematerialization."""

MAX_GAIN = 0.01
_LEAST_SHARE = 1e-3  # of the largest value: smaller ones decide nothing


@dataclass(frozen=True)
class Coarsened:
    """What more buffers gained.

    Attributes:
        model, share: of the row; `budget_bytes` is the share of the coarsened graph's peak.
        nodes, equations: of the coarsened and of the joint graph.
        seconds: roofline of the whole program by the plan of the coarsened graph.
        fused: values that might have been buffers; `tried`: sets of them that were, `failed` without a plan.
        best_seconds: of the cheapest plan, with or without more buffers; `best`: the set, empty if none is better.
    """

    model: str
    share: float
    nodes: int
    equations: int
    budget_bytes: int
    seconds: float
    fused: int
    tried: int
    failed: int
    best_seconds: float
    best: str

    @property
    def gain(self) -> float:
        """By which share of the coarser plan's cost the best is cheaper."""
        return 1 - self.best_seconds / self.seconds


def candidates(graph: Graph) -> dict[str, list[int]]:
    """Returns the repeatable forward values that are no buffers, by the primitive that makes them."""
    buffers = buffers_of(graph)
    least_bytes = _LEAST_SHARE * max(value.nbytes for value in graph.values)
    found: dict[str, list[int]] = {}
    for op in graph.forward_ops():
        for value in op.outputs:
            large = graph.values[value].nbytes >= least_bytes
            if op.recomputable and large and value not in buffers and graph.users[value]:
                found.setdefault(op.name, []).append(value)
    return found


def total_cost(condensed: Condensed, budget_bytes: int) -> float | None:
    """Returns the cost of the whole program by the best plan found; None without one."""
    problem = condensed.problem
    pool = Pool(problem, budget_bytes)
    bound = first_bound("coarsening", problem, budget_bytes)
    pool.begin(condensed, bound)
    if pool.best is None and bound.smallest_bytes > budget_bytes:
        return None
    with limited(10.0):
        pool.improve("coarsening", bound.bound)
    return None if pool.best is None else problem.total_cost + pool.best.replayed.extra_cost


def _sets(
    fused: dict[str, list[int]], values: int, graph: Graph
) -> Iterator[tuple[str, list[int]]]:
    yield from ((f"all of {name}", found) for name, found in fused.items())
    flat = sorted(v for found in fused.values() for v in found)
    step = max(1, -(-len(flat) // max(1, values)))
    for value in flat[::step]:
        yield graph.values[value].label, [value]


def run_model(model: str, share: float, values: int) -> Coarsened:
    """Plans a case with and without more buffers.

    Args:
        model: name in `models.cases`.
        share: of the peak without rematerialization: the budget.
        values: how many single values are tried, at most.

    Raises:
        ValueError: there is no plan of the coarsened graph within the budget.
    """
    graph = graph_of(model)
    coarse = condense_apart(graph, ())
    budget_bytes = int(share * peak_of_order(coarse.problem))
    cost = total_cost(coarse, budget_bytes)
    if cost is None:
        raise ValueError(
            f"{model} has no plan within {budget_bytes:,} bytes, {share:g} of its peak: try a larger --share"
        )
    fused = candidates(graph)
    tried = failed = 0
    best, best_cost = "", cost
    for name, added in _sets(fused, values, graph):
        tried += 1
        found = total_cost(condense_apart(graph, added), budget_bytes)
        failed += found is None
        if found is not None and found < best_cost:
            best, best_cost = name, found
        if sys.stderr.isatty():
            print(f"\r  {model}: {tried} sets", end="", file=sys.stderr, flush=True)
    return Coarsened(
        model=model,
        share=share,
        nodes=len(coarse.problem),
        equations=len(graph.ops),
        budget_bytes=budget_bytes,
        seconds=cost,
        fused=sum(len(found) for found in fused.values()),
        tried=tried,
        failed=failed,
        best_seconds=best_cost,
        best=best,
    )


def problems_of(rows: Sequence[Coarsened]) -> list[str]:
    """Returns a line for every row in which more buffers gain more than `MAX_GAIN`."""
    return [
        f"{row.model} at {row.share:g}: {row.gain:.2%} cheaper with {row.best} as buffers, "
        f"{MAX_GAIN:.0%} is allowed"
        for row in rows
        if row.gain > MAX_GAIN
    ]


def _line(row: Coarsened) -> str:
    return (
        f"  {row.model:14s} {row.share:5.2f} {row.equations:6d} {row.nodes:6d} {row.fused:6d} {row.tried:6d} "
        f"{row.failed:6d} {1e3 * row.seconds:9.3f} {100 * row.gain:8.4f}  {row.best}".rstrip()
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {list(MODELS)}")
    parser.add_argument("--share", type=float, help="of the peak; default: the model's, else 0.5")
    parser.add_argument("--values", type=int, default=60, help="single values tried, at most")
    options = parse_models(parser, argv, MODELS)
    warm_up()
    print(
        f"  {'':14s} {'share':>5s} {'equat.':>6s} {'nodes':>6s} {'fused':>6s} {'tried':>6s} {'failed':>6s} "
        f"{'ms':>9s} {'gain %':>8s}"
    )
    rows: list[Coarsened] = []
    for name in options.models:
        rows.append(run_model(name, options.share or MODELS.get(name, 0.5), options.values))
        print(_line(rows[-1]), flush=True)
        if options.json:
            write_rows(options.json, [{**asdict(row), "gain": row.gain} for row in rows])
    missed = problems_of(rows)
    for line in missed:
        print(f"  MISSED  {line}", flush=True)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
