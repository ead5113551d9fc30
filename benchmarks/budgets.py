"""Byte budgets against the compiler: what a plan promises, and what the hand-picked policies reach.

    python -m benchmarks.budgets [MODEL ...] [--device h200] [--points 5] [--json FILE] [--resume FILE] [--check]

Baselines: no remat, and per block full remat, `dots_saveable`, `dots_with_no_batch_dims_saveable`, and sqrt(n)
segments of blocks. Ours is `remat_policy="ilp"` around the whole loss: at budgets evenly between the temp memory
of full remat and of no remat as predicted, without the compiler's word; and at every baseline's own temp memory
confirmed by the compiler, as by default where it is there, and by `remat.fit` (last column: how many compiles each
took). All of them are compiled by XLA for a device that need not be there, with `jax.value_and_grad`, as in a
training step: without the loss itself XLA leaves out the end of its computation, and takes up to 7 % less memory.
The columns: budget, predicted peak and compiled temp in MiB; traffic in GiB; matmuls and convolutions executed; the
roofline time of the compiled program in ms; seconds to plan (with tracing, and the compiles that confirm) and to
compile.

`--check` exits with 1 if a compiled temp is above its budget, or if a baseline that fits a budget beats ours: the
one with the shortest roofline time among those that fit is the bound on traffic and on matmuls + convolutions.
`--resume` takes rows over that were made with the same code; without `--json` it goes on writing there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import flax.linen as nn
import jax

import remat
from benchmarks.programs import POLICIES, Function, Row
from models import gpt, lstm, resnet
from models.cases import BLOCKS_LARGE
from remat.compile import CompileReport

__all__ = [
    "MODELS",
    "Measured",
    "Results",
    "between",
    "code_of",
    "gpt_scanned",
    "gpt_unrolled",
    "lstm_lm",
    "main",
    "measure_baseline",
    "measure_fitted",
    "measure_ours",
    "near_sqrt",
    "read_rows",
    "resnet50",
    "run_model",
    "settings_code",
    "violations",
    "with_report",
]

_ROOT = Path(__file__).resolve().parents[1]
NONE = "none"
FULL = "full per block"
Kind = Literal["baseline", "between", "at a baseline", "fitted"]
M = TypeVar("M", bound="Measured")
K = TypeVar("K", bound="Keyed")


class Keyed(Protocol):
    """A row of a results file: what it is called, and the hash of what it depends on."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def label(self) -> str:
        """Says which row of the model it is."""
        ...

    @property
    def code(self) -> str:
        """Hash of what the row depends on."""
        ...

    @property
    def budget_bytes(self) -> int | None:
        """None without a budget."""
        ...


@dataclass(frozen=True)
class Measured:
    """A compiled row; a budget that was not met has an `error` and no numbers.

    Attributes:
        model: name of the model; `kind` and `label` say which row of it.
        code: hash of what the row depends on: versions, sources, device.
        budget_bytes: None for a baseline.
        predicted_bytes: peak that the plan promises; for the baseline `none` the peak predicted for it.
        temp_bytes, traffic_bytes, matmuls, convolutions, kernels, roofline_seconds: of the compiled program.
        plan_seconds: wall time of planning, with tracing and the compiles that confirm; `compile_seconds`: of
            compiling, of a fitted row all of its compiles.
        gap: of the plan's certificate; `notes`: of the plan.
        fixed_bytes: arguments and results of the program, which no plan changes.
        compiles: how many a fitted or confirmed row took.
        error: message of the BudgetError.
        smallest_bytes: smallest peak that the error speaks of.
    """

    model: str
    kind: Kind
    label: str
    code: str
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    temp_bytes: int = 0
    traffic_bytes: int = 0
    matmuls: int = 0
    convolutions: int = 0
    kernels: int = 0
    roofline_seconds: float = 0.0
    plan_seconds: float = 0.0
    compile_seconds: float = 0.0
    gap: float | None = None
    notes: tuple[str, ...] = ()
    fixed_bytes: int = 0
    compiles: int = 1
    error: str | None = None
    smallest_bytes: int | None = None

    @property
    def heavy(self) -> int:
        """Matmuls and convolutions executed."""
        return self.matmuls + self.convolutions


def near_sqrt(n: int, *, divisor: bool = False) -> int:
    """Returns the integer nearest to sqrt(n), of the divisors of n if asked; ties go to the smaller."""
    choices = [k for k in range(1, n + 1) if not divisor or n % k == 0]
    return min(choices, key=lambda k: (abs(k - n**0.5), k))


def gpt_unrolled(layers: int = 8, **sizes: Any) -> list[Row]:
    """8 unrolled GPT blocks."""
    make = functools.partial(gpt.blocks_unrolled, layers=layers, **(sizes or BLOCKS_LARGE))
    return _rows(make, jax.checkpoint, near_sqrt(layers), "wrap", {})


def gpt_scanned(layers: int = 12, **sizes: Any) -> list[Row]:
    """12 GPT blocks under `lax.scan`."""
    make = functools.partial(gpt.blocks_scanned, layers=layers, **(sizes or BLOCKS_LARGE))
    inside = {"prevent_cse": False}
    return _rows(make, jax.checkpoint, near_sqrt(layers, divisor=True), "wrap", inside)


def resnet50(
    config: resnet.ResNetConfig = resnet.RESNET50, batch: int = 32, size: int = 224
) -> list[Row]:
    """ResNet-50, batch 32 of 224 x 224 images, unrolled."""
    make = functools.partial(resnet.resnet_scalar_loss, config, batch, size)
    return _rows(make, nn.remat, near_sqrt(sum(config.stages)), "wrap_block", {})


def lstm_lm(
    config: lstm.LSTMConfig = lstm.LSTM_FULL, batch: int = 64, length: int = 128
) -> list[Row]:
    """An LSTM language model of 2 layers, width 1024, batch 64 x 128; a block is one step of a cell."""
    make = functools.partial(lstm.lstm_loss, config, batch, length)
    inside = {"prevent_cse": False}
    return _rows(make, nn.remat, near_sqrt(length, divisor=True), "wrap_cell", inside)


def _rows(
    make: Callable[..., tuple[Function, tuple[Any, ...]]],
    wrap: Callable[..., Any],
    segment: int,
    argument: str,
    options: dict[str, Any],
) -> list[Row]:
    """The baselines of a model: `make(<argument>=wrapper)` wraps its blocks."""
    rows = [Row(NONE, *make())]
    for label, policy in (
        (FULL, None),
        ("dots_saveable per block", POLICIES.dots_saveable),
        ("dots_with_no_batch_dims_saveable per block", POLICIES.dots_with_no_batch_dims_saveable),
    ):
        wrapper = functools.partial(wrap, policy=policy, **options)
        rows.append(Row(label, *make(**{argument: wrapper})))
    return [*rows, Row(f"sqrt(n) segments, of {segment} blocks", *make(segment=segment))]


MODELS: dict[str, Callable[..., list[Row]]] = {
    "gpt_scanned": gpt_scanned,
    "lstm": lstm_lm,
    "gpt_unrolled": gpt_unrolled,
    "resnet50": resnet50,
}


def between(low_bytes: int, high_bytes: int, points: int) -> list[int]:
    """Returns `points` budgets evenly between two, which are left out: they are budgets of their own."""
    step = (high_bytes - low_bytes) / (points + 1)
    return [round(low_bytes + step * (index + 1)) for index in range(points)]


def measure_baseline(model: str, row: Row, device: str) -> Measured:
    """Compiles the loss and the gradient of a baseline."""
    report = remat.compile_report(jax.value_and_grad(row.function), *row.args, device=device)
    done = Measured(model, "baseline", row.label, code_of(device, planned=False))
    return with_report(done, report)


def measure_ours(
    model: str, plain: Row, kind: Kind, label: str, budget_bytes: int, device: str
) -> Measured:
    """Plans a loss within a budget and compiles it with its gradient.

    Args:
        model: name of the model.
        plain: its row without remat.
        kind, label: of the new row; what is between the baselines is not confirmed by the compiler.
        budget_bytes: the budget.
        device: whose roofline prices the plan, and which is compiled for.
    """
    done = Measured(model, kind, label, code_of(device, planned=True), budget_bytes)
    policy = remat.policies.Ilp(device=device)
    confirm = remat.Confirm(device=device) if kind == "at a baseline" else False
    start = time.perf_counter()
    try:
        plan = remat.plan(
            plain.function, *plain.args, remat_policy=policy, budget=budget_bytes, confirm=confirm
        )
    except remat.BudgetError as error:
        seconds = time.perf_counter() - start
        smallest = error.smallest_peak_bytes
        return replace(done, plan_seconds=seconds, error=str(error), smallest_bytes=smallest)
    seconds = time.perf_counter() - start
    wrapped = remat.checkpoint(plain.function, remat_policy=plan)
    report = remat.compile_report(jax.value_and_grad(wrapped), *plain.args, device=device)
    done = replace(
        done,
        predicted_bytes=plan.peak_bytes,
        plan_seconds=seconds,
        gap=plan.gap,
        notes=plan.notes,
        compiles=plan.confirmed.compiles if plan.confirmed else 1,
    )
    return with_report(done, report)


def measure_fitted(
    model: str, plain: Row, label: str, budget_bytes: int, fixed_bytes: int, device: str
) -> Measured:
    """Fits a loss and its gradient to a memory size that leaves `budget_bytes` to temporaries.

    Args:
        model, label: of the new row.
        plain: the model without remat.
        budget_bytes: for the compiled temp memory.
        fixed_bytes: what arguments and results take.
        device: whose roofline prices plans, and which is compiled for.
    """
    done = Measured(model, "fitted", label, code_of(device, planned=True), budget_bytes)
    policy = remat.policies.Ilp(device=device)
    step = jax.value_and_grad(remat.checkpoint(plain.function, remat_policy=policy))
    start = time.perf_counter()
    try:
        fitted = remat.fit(
            step,
            *plain.args,
            memory=fixed_bytes + budget_bytes,
            device=device,
            remat_policy=policy,
        )
    except remat.BudgetError as error:
        seconds = time.perf_counter() - start
        smallest = error.smallest_peak_bytes
        return replace(done, plan_seconds=seconds, error=str(error), smallest_bytes=smallest)
    seconds = time.perf_counter() - start
    compiling = sum(trial.report.compile_seconds for trial in fitted.history)
    (plan,) = fitted.plans
    done = replace(
        done,
        predicted_bytes=fitted.chosen.predicted_bytes,
        plan_seconds=seconds - compiling,
        gap=plan.gap,
        notes=plan.notes,
        compiles=len(fitted.history),
    )
    return replace(with_report(done, fitted.report), compile_seconds=compiling)


def with_report(row: M, report: CompileReport) -> M:
    """Returns a row with the numbers of its compiled program."""
    return replace(
        row,
        temp_bytes=report.temp_bytes,
        traffic_bytes=report.hbm_traffic_bytes,
        matmuls=report.matmuls_executed,
        convolutions=report.convolutions_executed,
        kernels=report.kernels_executed,
        roofline_seconds=report.roofline_seconds or 0.0,
        compile_seconds=report.compile_seconds,
        fixed_bytes=report.total_bytes - report.temp_bytes,
    )


@functools.cache
def code_of(device: str, *, planned: bool) -> str:
    """Hash of what a row depends on: a baseline does not depend on the planner."""
    folders = ["models", "policies", "remat"] if planned else ["models"]
    paths = [p for folder in folders for p in (_ROOT / folder).rglob("*.py")]
    compiler = (_ROOT / "remat" / "compiler").glob("*.py")
    digest = hashlib.sha256(f"{jax.__version__} {remat.__version__} {device}".encode())
    for path in sorted({*paths, *compiler, Path(__file__)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def settings_code(benchmark: str, device: str, *settings: object) -> str:
    """Hash of what the planned rows of another benchmark depend on.

    Args:
        benchmark: its `__file__`.
        device: as for `code_of`.
        *settings: whatever else its rows depend on, with a `repr` that says all.
    """
    digest = hashlib.sha256(f"{code_of(device, planned=True)} {settings!r}".encode())
    digest.update(Path(benchmark).read_bytes())
    return digest.hexdigest()[:16]


def violations(rows: Sequence[Measured]) -> list[str]:
    """Returns a line for everything that the rows of one model miss; see the module docstring."""
    baselines = [row for row in rows if row.kind == "baseline"]
    lines: list[str] = []
    for row in rows:
        if row.budget_bytes is None:
            continue
        fitting = [b for b in baselines if b.temp_bytes <= row.budget_bytes]
        best = min(fitting, key=lambda b: (b.roofline_seconds, b.temp_bytes), default=None)
        what = f"{row.model}, {row.label}, budget {_mib(row.budget_bytes)} MiB"
        if row.error is not None:
            if best is not None:
                lines.append(
                    f"{what}: no plan found (smallest {_mib(row.smallest_bytes)} MiB), though "
                    f"{best.label!r} takes {_mib(best.temp_bytes)} MiB"
                )
            continue
        if row.temp_bytes > row.budget_bytes:
            lines.append(
                f"{what}: compiled temp is {_mib(row.temp_bytes)} MiB "
                f"(+{row.temp_bytes - row.budget_bytes:,} bytes; "
                f"predicted {_mib(row.predicted_bytes)} MiB)"
            )
        if best is None or row.kind not in ("at a baseline", "fitted"):
            continue
        if row.traffic_bytes > best.traffic_bytes:
            lines.append(
                f"{what}: traffic is {row.traffic_bytes / 2**30:.3f} GiB, that of {best.label!r} "
                f"{best.traffic_bytes / 2**30:.3f} GiB"
            )
        if row.heavy > best.heavy:
            lines.append(
                f"{what}: {row.heavy} matmuls and convolutions, {best.label!r} runs {best.heavy}"
            )
    return lines


class Results(Generic[K]):
    """The rows of a run, written to a file after every one.

    Args:
        path: where to write; None for nowhere.
        earlier: rows of an earlier run, taken over where they are up to date.
        device: whose rows these are.
        kind: what the file says it is.
    """

    def __init__(
        self,
        path: Path | None,
        earlier: Sequence[K],
        device: str,
        *,
        kind: str = "budgets, compiled, device absent",
    ) -> None:
        self.path = path
        self.device = device
        self.kind = kind
        self.earlier = list(earlier)
        self.rows: list[K] = []

    def row(self, wanted: K, make: Callable[[], K]) -> K:
        """Returns the earlier row that agrees with `wanted` in its key and code, or makes it.

        The order of rows is that of the calls; earlier rows of other models stay in the file.
        """
        found = [row for row in self.earlier if _key(row) == _key(wanted)]
        fresh = [row for row in found if row.code == wanted.code]
        made = fresh[0] if fresh else make()
        self.earlier = [row for row in self.earlier if _key(row) != _key(wanted)]
        self.rows.append(made)
        self._write()
        return made

    def _write(self) -> None:
        if self.path is None:
            return
        record = {
            "kind": self.kind,
            "device": self.device,
            "jax": jax.__version__,
            "remat": remat.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "rows": [asdict(cast(Any, row)) for row in (*self.rows, *self.earlier)],
        }
        draft = self.path.with_suffix(".part")  # an interrupted write must not cost the file
        draft.write_text(json.dumps(record, indent=1) + "\n")
        draft.replace(self.path)


def _key(row: Keyed) -> tuple[str, str, int | None]:
    return (row.model, row.label, row.budget_bytes)


def read_rows(path: Path | None, row: Callable[..., K] = Measured) -> list[K]:
    """Returns the rows of a results file; rows with other columns are left out.

    Args:
        path: nothing is read if it is None or not there.
        row: the rows' dataclass.
    """
    if path is None or not path.exists():
        return []
    names = {f.name for f in fields(cast(Any, row))}
    rows = json.loads(path.read_text())["rows"]
    return [row(**{**r, "notes": tuple(r["notes"])}) for r in rows if set(r) == names]


def run_model(
    model: str, rows: Sequence[Row], device: str, points: int, results: Results[Measured]
) -> list[Measured]:
    """Measures and prints all rows of a model; the first of `rows` is the model without remat."""
    print(
        f"{model} on {device}\n  {'':44s} {'budget':>8s} {'predict.':>8s} {'temp MiB':>8s} {'GiB':>7s} "
        f"{'matmuls':>7s} {'convs':>5s} {'ms':>7s} {'plan s':>6s} {'comp. s':>7s} compiles"
    )
    plain = rows[0]
    done: list[Measured] = []
    for row in rows:
        wanted = Measured(model, "baseline", row.label, code_of(device, planned=False))
        done.append(results.row(wanted, functools.partial(measure_baseline, model, row, device)))
        print(_line(done[-1]), flush=True)
    for kind, label, budget in _budgets(done, points):
        wanted = Measured(model, kind, label, code_of(device, planned=True), budget)
        if kind == "fitted":
            fixed = done[0].fixed_bytes
            make = functools.partial(measure_fitted, model, plain, label, budget, fixed, device)
        else:
            make = functools.partial(measure_ours, model, plain, kind, label, budget, device)
        done.append(results.row(wanted, make))
        print(_line(done[-1]), flush=True)
    return done


def _budgets(baselines: Sequence[Measured], points: int) -> Iterator[tuple[Kind, str, int]]:
    temp = {row.label: row.temp_bytes for row in baselines}
    for budget in between(temp[FULL], temp[NONE], points):
        share = (budget - temp[FULL]) / (temp[NONE] - temp[FULL])
        yield "between", f"ilp, {share:.0%} of the way", budget
    for label, budget in temp.items():
        yield "at a baseline", f"ilp, as {label}", budget
        yield "fitted", f"fit, as {label}", budget


def _line(row: Measured) -> str:
    head = f"  {row.label:44.44s} {_mib(row.budget_bytes):>8s} {_mib(row.predicted_bytes):>8s}"
    if row.error is not None:
        return f"{head} infeasible, smallest peak {_mib(row.smallest_bytes)} MiB"
    return (
        f"{head} {_mib(row.temp_bytes):>8s} {row.traffic_bytes / 2**30:7.2f} {row.matmuls:7d} "
        f"{row.convolutions:5d} {row.roofline_seconds * 1e3:7.2f} {row.plan_seconds:6.1f} "
        f"{row.compile_seconds:7.1f} {row.compiles if row.kind in ('at a baseline', 'fitted') else '':>8}"
    )


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f}"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {list(MODELS)}")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--points", type=int, default=5, help="budgets between full and none")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every row")
    parser.add_argument("--resume", type=Path, help="take rows over that are up to date")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"unknown models {unknown}; choose from {list(MODELS)}")
    if options.points < 0:
        parser.error(f"--points {options.points}: expected 0 or more")
    for planned in (False, True):
        code_of(options.device, planned=planned)  # now: sources may be edited while this runs
    results = Results(options.json or options.resume, read_rows(options.resume), options.device)
    missed = 0
    for name in options.models or MODELS:
        rows = run_model(name, MODELS[name](), options.device, options.points, results)
        lines = violations(rows)
        missed += len(lines)
        for line in lines or ["nothing is missed"]:
            print(f"  MISSED  {line}" if lines else f"  {line}", flush=True)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
