"""MONeT's ablation: what each kind of implementation is worth to the plan, on joint graphs traced from JAX.

    python -m benchmarks.ablation [MODEL ...] [--ratios 0.53 0.4 0.7] [--rounding] [--json FILE] [--resume FILE]

Shah et al., "Memory optimization for deep networks" (ICLR 2021), section 5 and appendix G: the overhead at one
memory ratio if only some implementations may be chosen. `monet` plans every model with none of them, with one
kind at a time (`output`: the backward pass reads an operator's result; `intermediate`: something smaller made for
it), with all exact ones and, with `--rounding`, with those whose gradients differ by roundings too. Budgets are
shares of the peak predicted without rematerialization; 0.53 is the paper's. The columns: budget and predicted peak
in MiB; the overhead, by how much % the program's roofline time is above that of the joint graph as jax makes it
(below 0 if a rewrite saves more than is repeated); the gap of that time to its proven bound in %; seconds to plan
(tracing included); the sites that were rewritten, by rule.

The paper's fourth kind, the algorithm of a convolution, is not a choice here: XLA chooses it. Booleans are kept as
bits in every row, `none` included; in the paper that is part of a kind.

`--check` exits with 1 if the plan with all exact implementations is dearer than one with fewer, by more than the
planner's tolerance, or is not found though one with fewer is. `--resume` takes rows over that were made with the
same code; without `--json` it goes on writing there.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

import remat
from benchmarks.budgets import Results, read_rows, settings_code
from benchmarks.planners import graph_of, sequence_of, warm_up
from models.cases import CASES
from remat.core.graph import Graph
from remat.memory.predict import peak_bytes
from remat.plans.plan import Plan
from remat.policies import Monet
from remat.policies.base import Decision, Implementations
from remat.policies.buffers.condense import condense
from remat.policies.solvers.problem import replay

__all__ = [
    "IMPLEMENTATIONS",
    "MODELS",
    "RATIOS",
    "ROUNDING",
    "Ablated",
    "Settings",
    "main",
    "measure",
    "run_model",
    "violations",
]

MODELS: tuple[str, ...] = (
    "vgg16",
    "resnet50",
    "googlenet",
    "unet",
    "mobilenet_v2",
    "transformer_blocks",
)
"""Names in `models.cases`."""
RATIOS: tuple[float, ...] = (0.53, 0.4, 0.7)
IMPLEMENTATIONS: dict[str, Implementations] = {
    "none": "none",
    "output": ("output",),
    "intermediate": ("intermediate",),
    "exact": "exact",
}
"""What each row may choose from."""
ROUNDING: dict[str, Implementations] = {"all": "all"}
_PICOSECONDS = 10**12


@dataclass(frozen=True)
class Ablated:
    """A plan; a budget that was not met has an `error` and no numbers.

    Attributes:
        model: name of the case.
        implementations: a key of `IMPLEMENTATIONS` or `ROUNDING`.
        ratio: of the peak without rematerialization, `baseline_peak_bytes`.
        code: hash of what the row depends on: versions, sources, device, time limit.
        budget_bytes: the ratio in bytes.
        baseline_picoseconds: roofline time of the joint graph as jax makes it, nothing repeated.
        picoseconds: the same of the planned program.
        predicted_bytes: peak that the plan promises.
        sites: how many sites are rewritten, by rule.
        plan_seconds: wall time of planning, tracing included.
        gap: of the plan's certificate; `notes`: of the plan.
        error: message of the BudgetError; `smallest_bytes`: the smallest peak that it speaks of.
    """

    model: str
    implementations: str
    ratio: float
    code: str
    budget_bytes: int
    baseline_peak_bytes: int
    baseline_picoseconds: int
    picoseconds: int = 0
    predicted_bytes: int = 0
    sites: dict[str, int] | None = None
    plan_seconds: float = 0.0
    gap: float | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None
    smallest_bytes: int | None = None

    @property
    def label(self) -> str:
        """Says which row of the model it is."""
        return f"{self.implementations} at {self.ratio:g}"

    @property
    def overhead(self) -> float:
        """By which share the planned program takes longer than without rematerialization."""
        return self.picoseconds / self.baseline_picoseconds - 1


@dataclass(frozen=True)
class Settings:
    """What the rows of a run have in common.

    Attributes:
        device: whose roofline prices plans.
        ratios: the budgets.
        rounding: whether there are rows of `ROUNDING`.
        seconds: limit of `monet`; None for its own.
    """

    device: str = "h200"
    ratios: tuple[float, ...] = RATIOS
    rounding: bool = False
    seconds: float | None = None

    @property
    def code(self) -> str:
        """Hash of what a row depends on."""
        return settings_code(__file__, self.device, self.seconds)

    @property
    def implementations(self) -> dict[str, Implementations]:
        """What the rows may choose from."""
        return IMPLEMENTATIONS | ROUNDING if self.rounding else IMPLEMENTATIONS

    def policy(self, name: str) -> Monet:
        """The planner that may choose from these implementations."""
        policy = Monet(implementations=self.implementations[name], device=self.device)
        return policy if self.seconds is None else replace(policy, seconds=self.seconds)


def measure(wanted: Ablated, settings: Settings) -> Ablated:
    """Plans one row.

    Args:
        wanted: says which model, implementations and budget; the numbers are filled in.
        settings: of the run.

    Returns:
        The row; with `error` instead of numbers if no plan was found within the budget.
    """
    function, args = CASES[wanted.model]()
    policy = settings.policy(wanted.implementations)
    start = time.perf_counter()
    try:
        plan = remat.plan(function, *args, remat_policy=policy, budget=wanted.budget_bytes)
    except remat.BudgetError as error:
        return replace(
            wanted,
            plan_seconds=time.perf_counter() - start,
            error=str(error),
            smallest_bytes=error.smallest_peak_bytes,
        )
    return replace(
        wanted,
        picoseconds=_picoseconds(plan, settings.device),
        predicted_bytes=plan.peak_bytes,
        sites=dict(Counter(name.partition("@")[0] for name in plan.graph.sites)),
        plan_seconds=time.perf_counter() - start,
        gap=plan.gap,
        notes=plan.notes,
    )


def _picoseconds(plan: Plan, device: str) -> int:
    """Roofline time of the planned program, as the planner counts it.

    Raises:
        ValueError: a loop's body is planned by itself, so there is no such number.
    """
    if plan.loops:
        raise ValueError(f"a program with loops has no single cost: {[x.path for x in plan.loops]}")
    if plan.certificate is not None:
        return plan.certificate.value
    # What is planned without buffers (a minimum cut, or nothing to do) comes without a certificate.
    return _program_picoseconds(plan.graph, device, frozenset(plan.saved_values))


def _program_picoseconds(graph: Graph, device: str, saved: frozenset[int] | None = None) -> int:
    """Roofline time of a program that keeps these values; without them, of one that repeats nothing."""
    condensed = condense(graph, device=device)
    seconds = condensed.problem.total_cost
    if saved is not None:
        sequence = sequence_of(condensed, Decision(saved))
        seconds += replay(condensed.problem, sequence).extra_cost
    return round(seconds * _PICOSECONDS)


def violations(rows: Sequence[Ablated]) -> list[str]:
    """Returns a line for everything that the rows of one model miss; see the module docstring."""
    lines: list[str] = []
    for exact in rows:
        if exact.implementations != "exact":
            continue
        fewer = [
            row
            for row in rows
            if row.budget_bytes == exact.budget_bytes
            and row.implementations in IMPLEMENTATIONS
            and row.implementations != "exact"
            and row.error is None
        ]
        for row in fewer:
            what = f"{exact.model} at {exact.ratio:g}: exact"
            if exact.error is not None:
                lines.append(f"{what} finds no plan, {row.implementations} does")
            elif exact.picoseconds > (1 + Monet.tolerance) * row.picoseconds:
                more = exact.picoseconds / row.picoseconds - 1
                lines.append(f"{what} is {more:.3%} dearer than {row.implementations}")
    return lines


def run_model(model: str, settings: Settings, results: Results[Ablated]) -> list[Ablated]:
    """Plans and prints all rows of a model."""
    graph = graph_of(model)
    peak, picoseconds = peak_bytes(graph), _program_picoseconds(graph, settings.device)
    print(
        f"{model}: {len(graph.ops)} equations, peak {_mib(peak)} MiB, {picoseconds / 1e9:.3f} ms without remat\n"
        f"  {'':22s} {'budget':>9s} {'predict.':>9s} {'extra %':>8s} {'gap %':>7s} {'plan s':>7s}  sites"
    )
    done: list[Ablated] = []
    for ratio in settings.ratios:
        for name in settings.implementations:
            budget = int(ratio * peak)
            wanted = Ablated(model, name, ratio, settings.code, budget, peak, picoseconds)
            print(f"  {wanted.label:22s}", end=" ", flush=True)  # says what is being made
            make = functools.partial(measure, wanted, settings)
            done.append(results.row(wanted, make))
            print(_columns(done[-1]), flush=True)
    return done


def _columns(row: Ablated) -> str:
    if row.error is not None:
        smallest = (
            "" if row.smallest_bytes is None else f", smallest {_mib(row.smallest_bytes)} MiB"
        )
        return f"{_mib(row.budget_bytes):>9s} none found{smallest} ({row.plan_seconds:.1f} s)"
    gap = "" if row.gap is None else f"{100 * row.gap:.3f}"
    sites = ", ".join(f"{rule} {count}" for rule, count in (row.sites or {}).items())
    return (
        f"{_mib(row.budget_bytes):>9s} {_mib(row.predicted_bytes):>9s} {100 * row.overhead:8.3f} "
        f"{gap:>7s} {row.plan_seconds:7.1f}  {sites}"
    ).rstrip()


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {list(MODELS)}")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="of the peak")
    parser.add_argument("--rounding", action="store_true", help="rows of inexact ones too")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--seconds", type=float, help="limit on the integer programs of a plan")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every row")
    parser.add_argument("--resume", type=Path, help="take rows over that are up to date")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    unknown = [name for name in options.models if name not in CASES]
    if unknown:
        parser.error(f"unknown models {unknown}; choose from {[*MODELS, *CASES]}")
    if not all(0 < ratio <= 1 for ratio in options.ratios):
        parser.error(f"--ratios {options.ratios}: expected numbers above 0 and up to 1")
    if options.seconds is not None and options.seconds <= 0:
        parser.error(f"--seconds {options.seconds}: expected a positive number")
    ratios = tuple(options.ratios)
    settings = Settings(options.device, ratios, options.rounding, options.seconds)
    _ = settings.code  # now: sources may be edited while this runs
    results = Results(
        options.json or options.resume,
        read_rows(options.resume, Ablated),
        options.device,
        kind="ablation, planned",
    )
    warm_up()
    missed = 0
    for name in options.models or MODELS:
        lines = violations(run_model(name, settings, results))
        missed += len(lines)
        for line in lines or ["nothing is missed"]:
            print(f"  MISSED  {line}" if lines else f"  {line}", flush=True)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
