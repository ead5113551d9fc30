"""Planners under a budget, on joint graphs traced from JAX: extra cost, proven bound, seconds.

    python -m benchmarks.planners [MODEL ...] [--policies ilp sublinear revolve checkmate] [--json FILE] [--check]

Budgets are shares of the peak without rematerialization of the coarsened problem
(`remat.policies.buffers.condense`). Every plan is taken apart to its sequence of kernels and judged again by
`remat.policies.solvers.problem.replay`. The columns: nodes, budget, extra cost in % of the total, the bound proven
by `ilp` in % (no sequence is cheaper), the gap of the total cost to that bound, wall and CPU seconds to solve
(coarsening included, tracing not).

`--check` exits with 1 if `ilp` finds no plan though the budget is not proven infeasible, is more than 5 % above its
bound, or takes longer than 60 s (`gpt_48`: 30 s). The smaller of wall and CPU seconds counts: waiting for a
busy machine does not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import remat
from models.cases import CASES
from remat.core.graph import Graph
from remat.policies import POLICIES, Policy, get_policy
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.buffers.condense import Condensed, condense
from remat.policies.exact.cut import cut_bound
from remat.policies.solvers.on_demand import sequence_of_saved
from remat.policies.solvers.problem import Problem, peak_of_order, replay

__all__ = [
    "MODELS",
    "Solved",
    "main",
    "parse_models",
    "problems_of",
    "run_model",
    "sequence_of",
    "solve",
    "warm_up",
    "window_floor_bytes",
    "write_rows",
]

SHARES = (0.33, 0.4, 0.5, 0.6, 0.7)
MODELS: dict[str, tuple[float, ...]] = {
    "vgg16": SHARES,
    "unet": SHARES,
    "googlenet": SHARES,
    "mobilenet_v2": SHARES,
    "resnet50": SHARES,
    "gpt_48": (0.5,),
}
"""Names in `models.cases` and the budgets of each, as shares of the peak."""

DEFAULT_POLICIES = ("ilp", "sublinear", "revolve", "checkmate")
MAX_GAP = 0.05
MAX_SECONDS = {"gpt_48": 30.0}
_MAX_SECONDS = 60.0

Outcome = Literal["planned", "none found", "below the floor", "proven infeasible", "not applicable"]


@dataclass(frozen=True)
class Solved:
    """A planner's answer.

    Attributes:
        model, policy, share: of the row; `budget_bytes` is the share of the peak.
        nodes: of the coarsened problem; `equations`: of the joint graph.
        outcome: `planned`, or why there is no plan.
        extra: cost of what runs again, as a share of `total_cost`.
        bound: proven lower bound on `extra`; None if there is none.
        peak_bytes: of the sequence, by `replay`.
        wall_seconds, cpu_seconds: of `decide_within`.
        notes: of the decision, or the message of the error.
    """

    model: str
    policy: str
    share: float
    nodes: int
    equations: int
    total_cost: float
    budget_bytes: int
    outcome: Outcome
    extra: float = 0.0
    bound: float | None = None
    peak_bytes: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def gap(self, bound: float | None) -> float | None:
        """Returns by which share the total cost is above a bound on `extra`."""
        if self.outcome != "planned" or bound is None:
            return None
        return (1 + self.extra) / (1 + bound) - 1


def graph_of(model: str) -> Graph:
    """Traces a case to its joint graph."""
    function, args = CASES[model]()
    return remat.plan(function, *args, remat_policy="save_all").graph


def sequence_of(condensed: Condensed, decision: Decision) -> list[int]:
    """Returns the sequence of nodes that a decision stands for."""
    problem = condensed.problem
    if decision.order is None:
        nodes = {condensed.node_of[v] for v in decision.saved if v in condensed.node_of}
        kept = sequence_of_saved(problem, {n for n in nodes if n < problem.turn})
        return [int(node) for node in kept]
    node_of_root = {root: node for node, root in enumerate(condensed.roots)}
    again = [node_of_root[op] for op in decision.order if op in node_of_root]
    return [*range(problem.turn), *again]


def window_floor_bytes(problem: Problem) -> int:
    """Returns a lower bound on the peak of every sequence, at least `problem.floor_bytes`.

    Nodes that run once and still have a reader are alive in every sequence. A backward node that reads a
    repeatable one finds it kept from some earlier slot, in which it was made from its inputs: the
    cheapest such slot bounds the peak. Complexity: O(edges * nodes).
    """
    count, turn = len(problem), problem.turn
    fixed = ~problem.repeatable
    waiting = np.zeros(count + 1, np.int64)  # bytes of fixed nodes alive between p - 1 and p
    for node in np.flatnonzero(fixed):
        last = max(problem.users[node], default=node)
        waiting[node + 1 : last + 1] += problem.sizes[node]
    loose = np.where(fixed, 0, problem.sizes)  # bytes that a sequence may drop and make again
    workspace = problem.extra_while_running
    making = np.array(
        [loose[n] + sum(loose[r] for r in problem.inputs[n]) + workspace[n] for n in range(count)],
        np.int64,
    )
    running = waiting[:count] + making + (problem.sizes - loose)
    best = int(max(running.max(initial=0), problem.floor_bytes))
    for reader in range(turn, count):
        for value in problem.inputs[reader]:
            if fixed[value] or value >= turn:
                continue
            held = running + problem.sizes[value]  # while it is kept and not read
            held[[*problem.users[value], value]] -= problem.sizes[value]
            # Made in the slot before node `q` and kept until `reader`, or kept since its first run.
            kept = np.maximum.accumulate(held[value : reader + 1][::-1])[::-1]
            slots = range(turn, reader + 1)
            made = [max(int(kept[q - value]), int(waiting[q] + making[value])) for q in slots]
            best = max(best, min([int(kept[0]), *made]))
    return best


def solve(model: str, condensed: Condensed, policy: Policy, share: float) -> Solved:
    """Plans within a share of the peak and judges the plan.

    Raises:
        ValueError: the plan's sequence is not valid, or is above the budget: an error of the planner.
    """
    problem = condensed.problem
    budget = int(share * peak_of_order(problem))

    def solved(outcome: Outcome, **more: Any) -> Solved:
        return Solved(
            model=model,
            policy=policy.name,
            share=share,
            nodes=len(problem),
            equations=len(condensed.graph.ops),
            total_cost=problem.total_cost,
            budget_bytes=budget,
            outcome=outcome,
            **more,
        )

    if budget < problem.floor_bytes:
        return solved("below the floor", notes=(f"floor: {problem.floor_bytes:,} bytes",))
    assert isinstance(policy, BudgetPolicy)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        decision = policy.decide_within(condensed.graph, budget)
    except (remat.BudgetError, remat.PolicyError) as error:
        seconds: dict[str, Any] = {
            "wall_seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "notes": (_portable(error),),
        }
        if isinstance(error, remat.PolicyError):
            return solved("not applicable", **seconds)
        smallest = max(cut_bound(problem, budget).smallest_bytes, window_floor_bytes(problem))
        proven = smallest > budget
        seconds["notes"] = (f"no peak below {smallest:,} bytes", _portable(error))
        return solved("proven infeasible" if proven else "none found", **seconds)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    replayed = replay(problem, sequence_of(condensed, decision))
    if replayed.peak_bytes > budget:
        raise ValueError(
            f"{policy.name} on {model}: the sequence peaks at {replayed.peak_bytes:,} bytes, above "
            f"the budget of {budget:,}"
        )
    bound = None
    if policy.name == "ilp" and decision.certificate is not None:
        scale = 1e-12  # the certificate counts picoseconds
        bound = max(0.0, decision.certificate.bound * scale / problem.total_cost - 1)
    return solved(
        "planned",
        extra=replayed.extra_cost / problem.total_cost,
        bound=bound,
        peak_bytes=replayed.peak_bytes,
        wall_seconds=wall,
        cpu_seconds=cpu,
        notes=decision.notes,
    )


def problems_of(rows: Sequence[Solved]) -> list[str]:
    """Returns a line for everything that `ilp` misses; see the module docstring."""
    lines: list[str] = []
    for row in rows:
        if row.policy != "ilp":
            continue
        what = f"{row.model} at {row.share:g}"
        if row.outcome in ("none found", "not applicable"):
            lines.append(f"{what}: no plan, though none is proven to be impossible")
            continue
        gap = row.gap(row.bound)
        if row.outcome == "planned" and (gap is None or gap > MAX_GAP):
            found = "no bound" if gap is None else f"{gap:.2%} above the bound"
            lines.append(f"{what}: {found}, {MAX_GAP:.0%} is allowed")
        limit = MAX_SECONDS.get(row.model, _MAX_SECONDS)
        seconds = min(row.wall_seconds, row.cpu_seconds)
        if seconds > limit:
            lines.append(f"{what}: {seconds:.1f} s, {limit:g} s are allowed")
    return lines


@functools.cache
def warm_up() -> None:
    """Compiles the local search, once, so that it is not timed."""
    function, args = CASES["residual_mlp_small"]()
    graph = remat.plan(function, *args, remat_policy="save_all").graph
    peak = peak_of_order(condense(graph).problem)
    with contextlib.suppress(remat.BudgetError):  # it ran, which is all that is wanted
        remat.policies.Ilp(method="search", effort=10).decide_within(graph, int(0.8 * peak))


def run_model(
    model: str, graph: Graph, policies: Sequence[str], shares: Sequence[float]
) -> list[Solved]:
    """Runs and prints the planners on one graph."""
    condensed = condense(graph)
    problem = condensed.problem
    print(
        f"{model}: {len(problem)} nodes of {len(graph.ops)} equations, peak {_mib(peak_of_order(problem))} "
        f"MiB, floor {_mib(problem.floor_bytes)} MiB ({problem.floor_bytes / peak_of_order(problem):.2f})\n"
        f"  {'':10s} {'share':>5s} {'budget':>9s} {'extra %':>8s} {'bound %':>8s} {'gap %':>7s} {'wall s':>7s} "
        f"{'CPU s':>7s}"
    )
    rows: list[Solved] = []
    for share in shares:
        bound: float | None = None
        for name in policies:
            row = solve(model, condensed, get_policy(name), share)
            rows.append(row)
            bound = row.bound if name == "ilp" else bound
            print(_line(row, bound), flush=True)
            if row.outcome in ("below the floor", "proven infeasible"):
                break  # for every planner
    return rows


def _line(row: Solved, bound: float | None) -> str:
    head = f"  {row.policy:10s} {row.share:5.2f} {_mib(row.budget_bytes):>9s}"
    if row.outcome != "planned":
        return f"{head} {row.outcome} ({row.wall_seconds:.1f} s)"
    gap = row.gap(bound)
    numbers = [
        " " * 8 if value is None else f"{100 * value:8.3f}" for value in (row.extra, bound, gap)
    ]
    times = f"{row.wall_seconds:7.1f} {row.cpu_seconds:7.1f}"
    return f"{head} {' '.join(numbers)} {times}  {row.notes[0] if row.notes else ''}".rstrip()


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _portable(error: Exception) -> str:
    """An error's message without the folder of this checkout."""
    return str(error).replace(f"{Path(__file__).resolve().parents[1]}/", "")


def parse_models(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, default: Iterable[str]
) -> argparse.Namespace:
    """Adds `--json` and `--check` and parses; `models` are `default` if none are named.

    An unknown model ends the program, as other errors of a parser do.
    """
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every model")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    options.models = options.models or list(default)
    unknown = [name for name in options.models if name not in CASES]
    if unknown:
        parser.error(f"unknown models {unknown}; choose from {[*default, *CASES]}")
    return options


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows with the versions they were made with."""
    record = {
        "jax": jax.__version__,
        "remat": remat.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {list(MODELS)}")
    known = [name for name in DEFAULT_POLICIES if name in POLICIES]
    parser.add_argument("--policies", nargs="+", default=known)
    parser.add_argument("--shares", type=float, nargs="+", help="of the peak; default: the model's")
    options = parse_models(parser, argv, MODELS)
    for name in options.policies:
        if name not in POLICIES or not isinstance(get_policy(name), BudgetPolicy):
            valid = [p for p in POLICIES if isinstance(get_policy(p), BudgetPolicy)]
            parser.error(f"{name!r} does not plan within a budget; choose from {valid}")
    warm_up()
    rows: list[Solved] = []
    missed: list[str] = []
    for name in options.models:
        start = time.perf_counter()
        graph = graph_of(name)
        print(f"traced {name} in {time.perf_counter() - start:.1f} s", flush=True)
        done = run_model(name, graph, options.policies, options.shares or MODELS.get(name, SHARES))
        rows += done
        lines = problems_of(done)
        missed += lines
        for line in lines:
            print(f"  MISSED  {line}", flush=True)
        if options.json:
            write_rows(options.json, [asdict(row) for row in rows])
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
