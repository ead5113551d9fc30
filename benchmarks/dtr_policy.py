"""`dtr` beside `ilp`, `sublinear` and `checkmate`: overhead, planning time and memory at five budgets.

    python -m benchmarks.dtr_policy [MODEL ...] [--budgets 0.9 0.7 0.5 0.4 0.3] [--json FILE] [--resume FILE]
                                    [--compile 0.5 | --no-compile] [--check]

Budgets are shares of the peak predicted without rematerialization, and are held by prediction; nothing is
rewritten. The columns: budget and predicted peak in MiB; what XLA takes for temporaries at the budgets of
`--compile`, compiled for a device that need not be there; the overhead, what is repeated as % of the program's
roofline time, kernel by kernel (`remat.policies.buffers.condense`); the gap of the certificate in %; processor
seconds of planning, tracing not included; where nothing was found, the smallest peak.

`--check` exits with 1 if a plan's predicted peak is above its budget, or its schedule reads what is not there or
repeats what must not run twice (`remat.plans.simulate`). What the compiler takes is said, not checked: these
budgets are not confirmed by it. `--resume` takes rows over that were made with the same code; without `--json` it
goes on writing there.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

import remat
from benchmarks.budgets import Results, read_rows, settings_code
from benchmarks.planners import warm_up
from models import gpt, nmt, resnet, unet
from models.cases import BLOCKS_LARGE, Case
from remat.core.errors import ScheduleError
from remat.core.graph import Graph
from remat.memory.predict import predict
from remat.planning.within import plan_within
from remat.plans.plan import Plan
from remat.plans.simulate import simulate
from remat.policies import Checkmate, Dtr, Ilp, Policy, Sublinear
from remat.policies.buffers.condense import condense

__all__ = ["MODELS", "SHARES", "Planned", "Settings", "main", "measure", "run_model", "violations"]

SHARES = (0.9, 0.7, 0.5, 0.4, 0.3)
MODELS: dict[str, Callable[[], Case]] = {
    "unet": lambda: unet.unet_loss(unet.UNET, batch=8, size=256),
    "gpt": lambda: gpt.blocks_unrolled(layers=4, **BLOCKS_LARGE),
    "resnet18": lambda: resnet.resnet_scalar_loss(resnet.RESNET18, batch=32, size=224),
    "lstm": lambda: nmt.nmt_loss(nmt.NMT_FULL, batch=128, source_length=6),
}
"""U-Net; 4 unrolled GPT blocks; ResNet-18; LSTM translation with attention, 6 words to 6, unrolled."""

NONE = "none"


@dataclass(frozen=True)
class Planned:
    """A plan; a budget that was not met has an `error` and no numbers.

    Attributes:
        model: a key of `MODELS`.
        policy: how the row is called, `none` without rematerialization.
        share: the budget as a share of the peak without rematerialization.
        code: hash of what the row depends on.
        nodes: kernels of the coarsened graph.
        budget_bytes: None for `none`.
        predicted_bytes: peak that the plan promises.
        temp_bytes: of the compiled program; None if it was not compiled.
        overhead: repeated kernels' roofline seconds, as a share of the program's.
        plan_cpu_seconds: of planning, tracing not included; `compile_seconds` by the clock.
        gap: of the plan's certificate, None if it has none.
        invalid: what is wrong with the plan, None if nothing is.
        error: message of the BudgetError; `smallest_bytes`: the smallest peak that it speaks of.
        notes: of the plan.
    """

    model: str
    policy: str
    share: float
    code: str
    nodes: int
    budget_bytes: int | None = None
    predicted_bytes: int = 0
    temp_bytes: int | None = None
    overhead: float = 0.0
    plan_cpu_seconds: float = 0.0
    compile_seconds: float = 0.0
    gap: float | None = None
    invalid: str | None = None
    error: str | None = None
    smallest_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Says which row of the model it is."""
        return f"{self.policy} at {self.share:g}"


@dataclass(frozen=True)
class Settings:
    """What the rows of a run have in common.

    Attributes:
        shares: the budgets, descending.
        compiled: those of them at which programs are compiled.
        device: whose roofline prices plans, and which is compiled for.
        seconds: limit of one planning of `ilp` and of `checkmate`, by the clock.
    """

    shares: tuple[float, ...] = SHARES
    compiled: tuple[float, ...] = (0.5,)
    device: str = "h200"
    seconds: float = 60.0

    @property
    def policies(self) -> dict[str, Policy]:
        """The planners by name; the graph is planned as it is by all."""
        device, seconds = self.device, self.seconds
        return {
            "dtr": Dtr(device=device),
            "dtr_full": Dtr("dtr_full", device=device),
            "ilp": Ilp(implementations="none", seconds=seconds, device=device),
            "sublinear": Sublinear(device=device),
            "checkmate": Checkmate(seconds=seconds, device=device),
        }

    def code(self, share: float) -> str:
        """Hash of what a row at this share depends on."""
        return settings_code(__file__, self.device, self.seconds, share in self.compiled)


@dataclass(frozen=True)
class Traced:
    """A model with its joint graph."""

    case: Case
    graph: Graph
    peak_bytes: int

    @classmethod
    def of(cls, model: str) -> Traced:
        """Traces a model."""
        function, args = MODELS[model]()
        plan = remat.plan(function, *args, remat_policy="save_all")
        return cls((function, args), plan.graph, plan.baseline_peak_bytes)


def measure(wanted: Planned, traced: Traced, settings: Settings) -> Planned:
    """Plans, checks and, if it is asked for, compiles one row.

    Args:
        wanted: says which model, policy and budget; the numbers are filled in.
        traced: the model.
        settings: of the run.
    """
    # As from JSON: what an earlier planning remembers of a graph must not count for this one.
    graph = Graph.from_json(traced.graph.to_json())
    function, args = traced.case
    gradient = jax.grad(function)
    if wanted.budget_bytes is None:
        row = replace(wanted, predicted_bytes=traced.peak_bytes)
    else:
        policy = settings.policies[wanted.policy]
        start = time.process_time()
        try:
            plan = plan_within(graph, policy, wanted.budget_bytes)
        except remat.BudgetError as error:
            return replace(
                wanted,
                plan_cpu_seconds=time.process_time() - start,
                error=str(error),
                smallest_bytes=error.smallest_peak_bytes,
            )
        row = replace(
            wanted,
            plan_cpu_seconds=time.process_time() - start,
            predicted_bytes=plan.peak_bytes,
            overhead=_overhead(plan, settings.device),
            gap=plan.gap,
            invalid=_invalid(plan),
            notes=plan.notes,
        )
        gradient = jax.grad(remat.checkpoint(function, remat_policy=plan))
    is_plain = wanted.budget_bytes is None
    if not (settings.compiled if is_plain else wanted.share in settings.compiled):
        return row
    report = remat.compile_report(gradient, *args, device=settings.device)
    return replace(row, temp_bytes=report.temp_bytes, compile_seconds=report.compile_seconds)


def _overhead(plan: Plan, device: str) -> float:
    """Roofline seconds of the kernels that a plan repeats, as a share of the program's."""
    condensed = condense(plan.graph, device=device)
    node_of_root = {root: node for node, root in enumerate(condensed.roots)}
    costs = condensed.problem.costs
    runs = Counter(plan.schedule.computed())
    again = sum(
        (count - 1) * float(costs[node_of_root[op]])
        for op, count in runs.items()
        if op in node_of_root
    )
    return again / condensed.problem.total_cost


def _invalid(plan: Plan) -> str | None:
    """What is wrong with a plan: its schedule, or the peak that it promises."""
    try:
        simulate(plan.graph, plan.schedule)
    except ScheduleError as error:
        return str(error)
    predicted = predict(plan.graph, plan.schedule).peak_bytes
    if predicted > plan.peak_bytes:
        return f"it promises {plan.peak_bytes:,} bytes, and its schedule takes {predicted:,}"
    return None


def violations(rows: Sequence[Planned]) -> list[str]:
    """Returns a line for everything that is wrong with rows; see the module docstring."""
    lines: list[str] = []
    for row in rows:
        what = f"{row.model}, {row.label}"
        if row.invalid is not None:
            lines.append(f"{what}: invalid plan: {row.invalid}")
        if row.budget_bytes is None or row.error is not None:
            continue
        if row.predicted_bytes > row.budget_bytes:
            lines.append(
                f"{what}: predicted {row.predicted_bytes:,} bytes, above the budget of {row.budget_bytes:,}"
            )
    return lines


def run_model(model: str, settings: Settings, results: Results[Planned]) -> list[Planned]:
    """Measures and prints all rows of a model."""
    traced = Traced.of(model)
    nodes = len(condense(traced.graph, device=settings.device).problem)
    print(
        f"{model}: {len(traced.graph.ops)} operators, {nodes} kernels\n"
        f"  {'':20s} {'budget':>8s} {'predict.':>8s} {'temp MiB':>8s} {'extra %':>8s} {'gap %':>7s} {'CPU s':>7s}"
    )
    done: list[Planned] = []

    def add(wanted: Planned) -> None:
        done.append(results.row(wanted, functools.partial(measure, wanted, traced, settings)))
        print(_line(done[-1]), flush=True)

    add(Planned(model, NONE, 1.0, settings.code(next(iter(settings.compiled), 1.0)), nodes))
    for share in settings.shares:
        for policy in settings.policies:
            budget = int(share * traced.peak_bytes)
            add(Planned(model, policy, share, settings.code(share), nodes, budget))
    return done


def _line(row: Planned) -> str:
    head = f"  {row.label:20s} {_mib(row.budget_bytes):>8s}"
    if row.error is not None:
        return f"{head} none found, smallest {_mib(row.smallest_bytes)} MiB ({row.plan_cpu_seconds:.1f} s)"
    gap = "" if row.gap is None else f"{100 * row.gap:.3f}"
    return (
        f"{head} {_mib(row.predicted_bytes):>8s} {_mib(row.temp_bytes):>8s} {100 * row.overhead:8.2f} {gap:>7s} "
        f"{row.plan_cpu_seconds:7.1f}"
    )


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f}"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = Settings()
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {list(MODELS)}")
    parser.add_argument("--budgets", type=float, nargs="+", default=SHARES, help="of the peak")
    parser.add_argument("--compile", type=float, nargs="+", default=default.compiled)
    parser.add_argument("--no-compile", action="store_true", help="nothing is compiled")
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--seconds", type=float, default=default.seconds, help="of ilp, checkmate")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every row")
    parser.add_argument("--resume", type=Path, help="take rows over that are up to date")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is wrong")
    options = parser.parse_args(argv)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"unknown models {unknown}; choose from {list(MODELS)}")
    if not all(0 < share <= 1 for share in (*options.budgets, *options.compile)):
        parser.error("--budgets, --compile: expected numbers above 0 and up to 1")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds}: expected a positive number")
    compiled = () if options.no_compile else tuple(options.compile)
    settings = Settings(tuple(options.budgets), compiled, options.device, options.seconds)
    _ = settings.code(1.0)  # now: sources may be edited while this runs
    results = Results(
        options.json or options.resume,
        read_rows(options.resume, Planned),
        options.device,
        kind="planned within budgets; some compiled, device absent",
    )
    warm_up()
    missed = 0
    for name in options.models or MODELS:
        lines = violations(run_model(name, settings, results))
        missed += len(lines)
        for line in lines or ["nothing is wrong"]:
            print(f"  WRONG  {line}" if lines else f"  {line}", flush=True)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
