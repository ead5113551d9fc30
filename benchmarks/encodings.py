"""Forms and implementations as decisions of the plan, against plans that only keep or recompute.

    python -m benchmarks.encodings [MODEL ...] [--policies NAME ...] [--device h200] [--json FILE] [--resume FILE]

Every policy plans the whole loss, and XLA compiles its gradient for a device that need not be there. Without a
budget: none, min_cut, echo, gist. Within budgets: checkmate, monet, ilp, at the compiled temp memory of min_cut
and of echo and at shares of that of none. The columns: budget, kept bytes and peak as planned, and compiled temp,
in MiB; traffic in GiB; matmuls and convolutions executed and their Gflop; kernels; the roofline time of the
compiled program in ms; seconds to plan (tracing included) and to compile. Policies that are not registered are
left out, with a line that says so.

`--check` exits with 1 for what `benchmarks.budgets` calls missed (a compiled temp above its budget, or a row
without a budget that fits and is better), for a policy without a budget that fails, and where `monet` is slower
than `checkmate` by the roofline of what was compiled, or finds no plan though `checkmate` does. `--resume` takes
rows over that were made with the same code; without `--json` it goes on writing there. `--small` takes tiny sizes,
one budget and, unless told otherwise, the CPU's compiler without optimisation: it shows that everything works and
measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

import remat
from benchmarks import budgets
from benchmarks.budgets import NONE, Kind, Measured, Results, read_rows, settings_code, with_report
from benchmarks.programs import Row
from models import cases, gpt, nmt, resnet, unet, vgg
from remat.policies import POLICIES

__all__ = [
    "BUDGETED",
    "DEEPER",
    "MODELS",
    "UNBUDGETED",
    "Encoded",
    "Settings",
    "main",
    "measure",
    "run_model",
    "violations",
]

UNBUDGETED: tuple[str, ...] = (NONE, "min_cut", "echo", "gist")
BUDGETED: tuple[str, ...] = ("checkmate", "monet", "ilp")
"""Planned within budgets."""
REFERENCES: tuple[str, ...] = ("min_cut", "echo")
"""Whose compiled temp memory is a budget; with `--small` only the first's."""
SHARES: tuple[float, ...] = (0.7, 0.5)
"""Of the compiled temp memory of `none`, which are budgets."""
DEEPER: Mapping[str, tuple[float, ...]] = {"transformer": (0.25, 0.16, 0.15)}
"""Further shares, of models whose smallest peak is far below the others'."""
SMALL_SECONDS = 0.5
_UNOPTIMISED: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

MODELS: dict[str, tuple[cases.Factory, cases.Factory]] = {
    "vgg16": (
        cases.vgg16,
        lambda: vgg.vgg_loss(vgg.VGGConfig((1, 1), filters=4, hidden=8, classes=4), 4, 8),
    ),
    "resnet50": (
        cases.resnet50,
        lambda: resnet.resnet_scalar_loss(
            resnet.ResNetConfig((1,), "bottleneck", filters=4, classes=4), 4, 16
        ),
    ),
    "unet": (cases.unet, lambda: unet.unet_loss(unet.UNetConfig(filters=4, depth=1), 2, 16)),
    "transformer": (
        cases.transformer_blocks,
        lambda: gpt.blocks_unrolled(1, 4, 32, 32, 2, 0.1, activation="relu"),
    ),
    "nmt": (
        cases.nmt,
        lambda: nmt.nmt_loss(nmt.NMTConfig(16, 16, hidden=16, dropout=0.1), 4, 2, 1),
    ),
    "nmt_scan": (
        cases.nmt_scan,
        lambda: nmt.nmt_loss(nmt.NMTConfig(16, 16, hidden=16, dropout=0.1, scan=True), 4, 2, 2),
    ),
}
"""Factories of losses by name: full size, tiny."""


@dataclass(frozen=True)
class Encoded(Measured):
    """A compiled row; the fields of `benchmarks.budgets.Measured`, and:

    Attributes:
        policy: name of the policy; `none` for plain JAX.
        saved_bytes: kept for the backward pass beyond arguments, as planned; for `none`, what JAX keeps.
        heavy_flops: of the executed matmuls and convolutions.
    """

    policy: str = ""
    saved_bytes: int | None = None
    heavy_flops: int = 0


@dataclass(frozen=True)
class Settings:
    """What the rows of a run have in common.

    Attributes:
        device: that is compiled for, and whose roofline prices plans.
        policies: names, in the order of the rows.
        references: of `REFERENCES`, and `shares`: of the temp memory of `none`; the budgets.
        seconds: limit on an integer program; None for each policy's own.
        small: whether models are tiny.
    """

    device: str = "h200"
    policies: tuple[str, ...] = (*UNBUDGETED, *BUDGETED)
    references: tuple[str, ...] = REFERENCES
    shares: tuple[float, ...] = SHARES
    seconds: float | None = None
    small: bool = False

    @property
    def code(self) -> str:
        """Hash of what a row depends on."""
        return settings_code(__file__, self.device, self.seconds, self.small)

    def policy(self, name: str) -> Any:
        """The policy of that name; `device` and `seconds` are set where it has such fields."""
        policy: Any = POLICIES[name]()
        if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
            return policy
        wanted = {"device": self.device, "seconds": self.seconds}
        has = {f.name for f in fields(policy)}
        return replace(policy, **{k: v for k, v in wanted.items() if k in has and v is not None})

    @property
    def compiler_options(self) -> dict[str, Any]:
        """For XLA: tiny programs on the CPU are compiled only to see that they can be."""
        return _UNOPTIMISED if self.small and self.device == "cpu" else {}


def measure(wanted: Encoded, plain: Row, settings: Settings) -> Encoded:
    """Plans and compiles one row.

    Args:
        wanted: says which policy and which budget; the numbers are filled in.
        plain: the model without remat.
        settings: of the run.

    Returns:
        The row; with `error` instead of numbers if remat refuses the budget or the program.
    """
    policy = "save_all" if wanted.policy == NONE else settings.policy(wanted.policy)
    budget = wanted.budget_bytes
    start = time.perf_counter()
    done = wanted
    try:
        plan = remat.plan(plain.function, *plain.args, remat_policy=policy, budget=budget)
        done = replace(done, plan_seconds=time.perf_counter() - start)
        if wanted.policy == NONE:
            done = replace(done, plan_seconds=0.0)  # it was planned for the prediction only
            function = plain.function
            saved, peak = plan.baseline_saved_bytes, plan.baseline_peak_bytes
        else:
            function = remat.checkpoint(plain.function, remat_policy=plan)
            saved, peak = plan.saved_bytes, plan.peak_bytes
        report = remat.compile_report(
            jax.grad(function),
            *plain.args,
            device=settings.device,
            compiler_options=settings.compiler_options,
        )
    except remat.RematError as error:
        smallest = error.smallest_peak_bytes if isinstance(error, remat.BudgetError) else None
        seconds = done.plan_seconds or time.perf_counter() - start
        return replace(done, plan_seconds=seconds, error=str(error), smallest_bytes=smallest)
    done = replace(
        done,
        predicted_bytes=peak,
        saved_bytes=saved,
        heavy_flops=sum(k.heavy_flops * k.trip_count for k in report.kernels),
        gap=plan.gap,
        notes=plan.notes,
    )
    return with_report(done, report)


def violations(rows: Sequence[Encoded]) -> list[str]:
    """Returns a line for everything that the rows of one model miss.

    That is what `benchmarks.budgets.violations` finds, every policy without a budget that failed, and every budget
    for which `monet` finds no plan though `checkmate` does, or a slower program though that of `checkmate` keeps
    to it.
    """
    failed = [row for row in rows if row.budget_bytes is None and row.error is not None]
    lines = budgets.violations([row for row in rows if row not in failed])
    theirs = {row.budget_bytes: row for row in rows if row.policy == "checkmate"}
    for row in rows:
        other = theirs.get(row.budget_bytes)
        budget = row.budget_bytes
        if row.policy != "monet" or budget is None or other is None or other.error is not None:
            continue
        slower = row.roofline_seconds > other.roofline_seconds and other.temp_bytes <= budget
        if row.error is not None or slower:
            ours = "no plan" if row.error is not None else _speed(row)
            lines.append(f"{row.model}, {row.label}: {ours}, {other.label!r} {_speed(other)}")
    return [f"{row.model}, {row.label}: {row.error}" for row in failed] + lines


def _speed(row: Encoded) -> str:
    return f"{row.roofline_seconds * 1e3:.3f} ms and {row.traffic_bytes / 2**30:.3f} GiB"


def run_model(name: str, settings: Settings, results: Results[Encoded]) -> list[Encoded]:
    """Measures and prints all rows of a model of `MODELS`; budgets come from the rows without one."""
    plain = Row(NONE, *MODELS[name][settings.small]())
    model = f"{name}, small" if settings.small else name
    print(
        f"{model} on {settings.device}\n  {'':26s} {'budget':>8s} {'saved':>8s} {'predict.':>8s} "
        f"{'temp MiB':>8s} {'GiB':>7s} {'matmuls':>7s} {'convs':>5s} {'Gflop':>8s} {'kernels':>7s} "
        f"{'ms':>8s} {'plan s':>6s} {'comp. s':>7s}"
    )
    done: list[Encoded] = []

    def row(kind: Kind, label: str, policy: str, budget: int | None) -> None:
        print(f"  {label:26.26s}", end=" ", flush=True)  # says what is being made
        wanted = Encoded(model, kind, label, settings.code, budget, policy=policy)
        make = functools.partial(measure, wanted, plain, settings)
        done.append(results.row(wanted, make))
        print(_columns(done[-1]), flush=True)

    for policy in UNBUDGETED:
        if policy == NONE or policy in settings.policies:
            row("baseline", policy, policy, None)
    for kind, what, budget in _budgets(done, settings, name):
        for policy in BUDGETED:
            if policy in settings.policies:
                row(kind, f"{policy}, {what}", policy, budget)
    return done


def _budgets(
    baselines: Sequence[Encoded], settings: Settings, model: str
) -> Iterator[tuple[Kind, str, int]]:
    temp = {row.policy: row.temp_bytes for row in baselines if row.error is None}
    for name in settings.references:
        if name in temp:
            yield "at a baseline", f"as {name}", temp[name]
    deeper = DEEPER.get(model, ()) if settings.shares == SHARES else ()
    for share in (*settings.shares, *deeper):
        yield "between", f"{share:.0%} of none", round(share * temp[NONE])


def _columns(row: Encoded) -> str:
    head = " ".join(
        f"{'' if count is None else f'{count / 2**20:.2f}':>8s}"
        for count in (row.budget_bytes, row.saved_bytes, row.predicted_bytes)
    )
    if row.error is not None:
        return f"{head} none found: {row.error.splitlines()[0]:.100s}"
    return (
        f"{head} {row.temp_bytes / 2**20:8.2f} {row.traffic_bytes / 2**30:7.3f} {row.matmuls:7d} "
        f"{row.convolutions:5d} {row.heavy_flops / 1e9:8.2f} {row.kernels:7d} "
        f"{row.roofline_seconds * 1e3:8.3f} {row.plan_seconds:6.1f} {row.compile_seconds:7.1f}"
    )


def _policies(asked: Sequence[str]) -> tuple[str, ...]:
    """The policies that exist; says which do not."""
    for name in asked:
        if name != NONE and name not in POLICIES:
            print(f"skipped: no policy is registered as {name!r}")
    return tuple(name for name in asked if name == NONE or name in POLICIES)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    known = (*UNBUDGETED, *BUDGETED)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {list(MODELS)}")
    parser.add_argument("--policies", nargs="+", default=known, choices=known, metavar="POLICY")
    parser.add_argument("--device", help="default: h200; cpu with --small")
    parser.add_argument("--small", action="store_true", help="tiny models, about a minute in all")
    parser.add_argument("--shares", type=float, nargs="*", help="of the temp of none; budgets")
    parser.add_argument("--seconds", type=float, help="limit on every integer program")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every row")
    parser.add_argument("--resume", type=Path, help="take rows over that are up to date")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"unknown models {unknown}; choose from {list(MODELS)}")
    if options.check and options.small:
        parser.error("--check with --small: tiny programs are mostly alignment and scratch space")
    shares = options.shares
    if shares is None:
        shares = () if options.small else SHARES
    if not all(0 < share <= 1 for share in shares):
        parser.error(f"--shares {shares}: expected numbers above 0 and up to 1")
    if options.seconds is not None and options.seconds <= 0:
        parser.error(f"--seconds {options.seconds}: expected a positive number")
    device = options.device or ("cpu" if options.small else "h200")
    settings = Settings(
        device,
        _policies(options.policies),
        REFERENCES[:1] if options.small else REFERENCES,
        tuple(shares),
        options.seconds or (SMALL_SECONDS if options.small else None),
        options.small,
    )
    _ = settings.code  # now: sources may be edited while this runs
    results = Results(
        options.json or options.resume,
        read_rows(options.resume, Encoded),
        device,
        kind="encodings, compiled, device absent",
    )
    missed = 0
    for name in options.models or MODELS:
        rows = run_model(name, settings, results)
        if options.small:
            continue
        lines = violations(rows)
        missed += len(lines)
        for line in lines or ["nothing is missed"]:
            print(f"  MISSED  {line}" if lines else f"  {line}", flush=True)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
