"""How long planning takes, on joint graphs of growing size.

    python -m benchmarks.planning [--layers 4 16 36 52] [--json FILE] [--check]
    python -m benchmarks.planning --budgets [--layers 96] [--policy ilp] [--budget 0.5 0.3]

For unrolled GPT blocks: seconds to trace and differentiate (jax's work), to cut, for the decision of `echo`, and
for the whole plan (cut, schedule, replay, statistics). Numbers are processor seconds, as waiting for a busy machine
does not count, and but for tracing the minimum of three runs.

`--budgets` splits a planning within a budget, from the function on, into its phases: the two traces, the joint
graph, what the policy decides, schedules, predictions. Counts say how often each ran. What numba compiles, or loads
from its cache, is paid before, by a planning of two blocks; its seconds are printed, too.

`--check` exits with 1 if `echo` decides about no more than 16,500 operators (52 blocks) in more than 0.3 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import remat
from models import gpt
from remat.planning.make import make_plan
from remat.policies import Echo, Full, MinCut, SaveAll

__all__ = ["PHASES", "Phases", "main", "problems_of", "run", "run_budget"]

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


PHASES: dict[str, tuple[str, ...]] = {
    "trace": ("remat.wrapping:trace_primal", "remat.lower.pipeline:trace_joint"),
    "graph": ("remat.trace.joint:_decided", "remat.trace.joint:program_of"),
    "decide": (
        "remat.planning.time_limit:TimeLimit.decide_within",
        "remat.planning.make:make_plan",
    ),
    "search": ("remat.policies.buffers.within:search",),
    "schedule": ("remat.planning.make:build_schedule", "remat.planning.make:simulate"),
    "predict": ("remat.memory.predict:_predict", "remat.memory.predict:execution_of"),
    "rest": ("remat.planning.within:plan_from_saved", "remat.planning.resort:plan_from_saved"),
}
"""The functions of every phase of a planning, each without what it calls of others."""


class Phases:
    """Processor seconds and calls of every phase while planning runs inside `measured`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inside: list[float] = []  # of the calls that are running: what other phases took

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Times the functions of `PHASES`."""
        with ExitStack() as stack:
            for phase, names in PHASES.items():
                for name in names:
                    module, _, path = name.partition(":")
                    owner: Any = import_module(module)
                    *parts, last = path.split(".")
                    for part in parts:
                        owner = getattr(owner, part)
                    timed = self._timed(phase, getattr(owner, last))
                    stack.enter_context(mock.patch.object(owner, last, timed))
            yield

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            self.calls[phase] += 1
            self._inside.append(0.0)
            start = time.process_time()
            try:
                return function(*args, **options)
            finally:
                took = time.process_time() - start
                self.seconds[phase] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return run


def run_budget(layers: int, policy: str, budget: float) -> dict[str, Any]:
    """Times planning a stack of `layers` GPT blocks within a budget, by phase."""

    def planned(count: int, share: float) -> remat.Plan:
        function, args = gpt.blocks_unrolled(
            layers=count, batch=2, length=64, width=128, heads=4, dropout=0.1
        )
        return remat.plan(function, *args, remat_policy=policy, budget=share, confirm=False)

    warm_up = _seconds(lambda: planned(2, 0.7), repeat=1)
    phases = Phases()
    with phases.measured():
        start = time.process_time()
        plan = planned(layers, budget)
        whole = time.process_time() - start
    row: dict[str, Any] = {
        "layers": layers,
        "policy": policy,
        "budget": budget,
        "joint_equations": len(plan.graph.ops),
        "warm_up_seconds": round(warm_up, 2),
        "seconds": round(whole, 2),
        "peak_bytes": plan.peak_bytes,
    }
    for phase in PHASES:
        row[f"{phase}_seconds"] = round(phases.seconds[phase], 2)
        row[f"{phase}_calls"] = phases.calls[phase]
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
    parser.add_argument("--layers", type=int, nargs="+", help="default 4 16 36 52, or 96")
    parser.add_argument("--budgets", action="store_true", help="plan within budgets, by phase")
    parser.add_argument("--policy", default="ilp", help="of --budgets")
    parser.add_argument("--budget", type=float, nargs="+", default=[0.5, 0.3], help="shares")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    rows = []
    for layers, budget in itertools.product(
        options.layers or ([96] if options.budgets else [4, 16, 36, 52]),
        options.budget if options.budgets else [None],
    ):
        rows.append(run(layers) if budget is None else run_budget(layers, options.policy, budget))
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        record = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    lines = [] if options.budgets else problems_of(rows)
    for line in lines:
        print(f"  MISSED  {line}")
    return 1 if options.check and lines else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
