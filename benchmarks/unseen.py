"""Networks that nothing was tuned on: predictions, budgets and their price, as the compiler sees them.

    python -m benchmarks.unseen [NAME ...] [--group validation] [--device h200] [--json FILE] [--check]

Every network of `models/validation` (or of another package of `models` with `NETWORKS`) without rematerialization,
under the default policy and `full`, and by `ilp` within 0.7, 0.5 and 0.3 of what the compiled program takes
without. Compiled is the gradient; within a budget the loss with its gradient, too, as it is trained, and the
larger counts. Budgets are confirmed by the compiler, so each is met or refused; what is printed says which, how
far predictions were off, how much of a budget is used, and whether less memory was ever faster by roofline. A row
is written to `--json` when it is there, and rows that the file has are not made again. A network whose plain
program the compiler itself fails for has one row, which says so. `--check` exits with 1 unless nine of ten
predictions are within 10 %, none is off by more than 25 %, and no program exceeds its budget.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import remat
from remat import BudgetError, CompileError, Confirm
from remat.policies import Ilp, Unchanged

__all__ = ["Row", "main", "rows_of", "summarise"]

MIB = 2**20
WITHIN, WITHIN_SHARE, WORST = 0.10, 0.9, 0.25
SHARES = (0.7, 0.5, 0.3)
SLOWER = 0.01  # of the roofline time: less than this is no difference


@dataclass(frozen=True)
class Row:
    """One network under one policy.

    Attributes:
        network: its name.
        policy: `none`, `min_cut`, `full`, or `ilp 0.5`: within that share of what `none` takes.
        status: `made`, `refused` if no program within the budget was found, or `failed` if the compiler did.
        budget_bytes: None without a budget.
        predicted_bytes: of the plan, by the memory model, 0 if refused.
        confirmed_bytes: what the plan says it takes, by the compiler that was asked; 0 where it was not.
        temp_bytes: of the compiled gradient, within a budget at least of the loss with its gradient; of a refused
            one the smallest that was compiled.
        traffic_bytes, matmuls, roofline_seconds: of the compiled gradient.
        compiles: programs compiled to confirm a budget.
        seconds: that planning and confirming took.
    """

    network: str
    policy: str
    status: str
    budget_bytes: int | None
    predicted_bytes: int
    temp_bytes: int
    traffic_bytes: int
    matmuls: int
    roofline_seconds: float
    compiles: int
    seconds: float
    confirmed_bytes: int = 0

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was compiled."""
        return self.predicted_bytes / max(self.temp_bytes, 1) - 1


def rows_of(
    name: str,
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    device: str,
    known: Mapping[tuple[str, str], Row],
    done: Callable[[Row], None],
    within: Ilp,
) -> None:
    """Makes the rows of a network that are not known, and hands each to `done`; `within` plans the budgets."""
    loss, args = build()
    plain = known.get((name, "none"))
    if plain is None:
        plain = _row(name, "none", loss, args, Unchanged(), None, device)
        done(plain)
    if plain.status == "failed":
        return
    jobs: list[tuple[str, Any, int | None]] = [("min_cut", "min_cut", None), ("full", "full", None)]
    jobs += [(f"ilp {s}", within, int(s * plain.temp_bytes)) for s in SHARES]
    for label, policy, budget in jobs:
        if (name, label) not in known:
            done(_row(name, label, loss, args, policy, budget, device))


def _row(
    name: str,
    label: str,
    loss: Callable[..., Any],
    args: tuple[Any, ...],
    policy: Any,
    budget: int | None,
    device: str,
) -> Row:
    start, predicted_bytes, smallest_bytes = time.perf_counter(), 0, 0
    try:
        confirm = Confirm(device=device) if budget is not None else False
        plan = remat.plan(loss, *args, remat_policy=policy, budget=budget, confirm=confirm)
        seconds, predicted_bytes = time.perf_counter() - start, plan.peak_bytes
        wrapped = remat.checkpoint(loss, remat_policy=plan)
        report = remat.compile_report(jax.grad(wrapped), *args, device=device)
        temp_bytes = report.temp_bytes
        if budget is not None:
            trained = remat.compile_report(jax.value_and_grad(wrapped), *args, device=device)
            temp_bytes = max(temp_bytes, trained.temp_bytes)
    except (BudgetError, CompileError) as error:
        seconds, status = time.perf_counter() - start, "failed"
        if isinstance(error, BudgetError):
            status, smallest_bytes = "refused", error.smallest_peak_bytes or 0
        return Row(
            name, label, status, budget, predicted_bytes, smallest_bytes, 0, 0, 0.0, 0, seconds
        )
    return Row(
        network=name,
        policy=label,
        status="made",
        budget_bytes=budget,
        predicted_bytes=plan.peak_bytes,
        temp_bytes=temp_bytes,
        traffic_bytes=report.hbm_traffic_bytes,
        matmuls=report.matmuls_executed,
        roofline_seconds=report.roofline_seconds or 0.0,
        compiles=plan.confirmed.compiles if plan.confirmed is not None else 0,
        seconds=seconds,
        confirmed_bytes=plan.confirmed.temp_bytes if plan.confirmed is not None else 0,
    )


def summarise(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Returns what to print below the table, and whether the aims are met."""
    made = [row for row in rows if row.status == "made"]
    errors = sorted(made, key=lambda row: abs(row.error))
    within = sum(abs(row.error) <= WITHIN for row in made)
    held = [row for row in rows if row.budget_bytes is not None]
    exceeded = [r for r in held if r.status == "made" and r.temp_bytes > (r.budget_bytes or 0)]
    refused = [row for row in held if row.status == "refused"]
    failed = [f"{row.network} {row.policy}" for row in rows if row.status == "failed"]
    met = sum(row.status == "made" for row in held) - len(exceeded)
    wasted = [r for r in held if r.status == "made" and r.temp_bytes < 0.9 * (r.budget_bytes or 0)]
    faster = [
        f"{less.network}: {less.policy} is faster than {more.policy}"
        for more in made
        for less in made
        if more.network == less.network
        and more.budget_bytes is not None
        and less.budget_bytes is not None
        and less.budget_bytes < more.budget_bytes
        and less.roofline_seconds < (1 - SLOWER) * more.roofline_seconds
    ]
    worst = errors[-1]
    lines = [
        f"{within} of {len(made)} predictions within {WITHIN:.0%} (aim {WITHIN_SHARE:.0%}), median "
        f"{abs(errors[len(errors) // 2].error):.1%}, worst {worst.error:+.1%}: {worst.network} {worst.policy}",
        f"of {len(held)} budgets {met} met, {len(exceeded)} exceeded, "
        f"{len(refused)} refused, {len(wasted)} used by less than 90 %",
        f"less memory was faster {len(faster)} times" + "".join(f"\n  {line}" for line in faster),
    ]
    asked = [row for row in made if row.confirmed_bytes]
    off = [abs(row.confirmed_bytes / max(row.temp_bytes, 1) - 1) for row in asked]
    if off:
        lines.append(
            f"what {len(asked)} confirmed plans say they take is off by at most {max(off):.1%}"
        )
    if failed:
        lines.append(f"not compiled at all: {', '.join(failed)}")
    good = within >= WITHIN_SHARE * len(made) and abs(worst.error) <= WORST and not exceeded
    return lines, good


def _line(row: Row) -> str:
    budget = "" if row.budget_bytes is None else f"{row.budget_bytes / MIB:9.1f}"
    return (
        f"{row.network:22} {row.policy:8} {row.status:7} {budget:>9} {row.predicted_bytes / MIB:9.1f} "
        f"{row.temp_bytes / MIB:9.1f} {row.error:+7.1%} {row.traffic_bytes / 2**30:7.2f} {row.matmuls:5d} "
        f"{1e3 * row.roofline_seconds:8.3f} {row.compiles:2d} {row.seconds:6.1f}"
    )


def _write(place: Path, device: str, rows: Sequence[Row]) -> None:
    data = {"device": device, "jax": jax.__version__, "rows": [asdict(row) for row in rows]}
    place.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("names", nargs="*", help="networks (default: all of the group)")
    parser.add_argument("--group", default="validation", help="package of models with NETWORKS")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--json", type=Path, help="rows; those that it has are kept")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    networks = importlib.import_module(f"models.{options.group}").NETWORKS
    unknown = sorted(set(options.names) - set(networks))
    if unknown:
        parser.error(f"no such network: {unknown}; expected some of {sorted(networks)}")
    rows: list[Row] = []
    if options.json is not None and options.json.exists():
        data = json.loads(options.json.read_text(encoding="utf-8"))
        if (data["device"], data["jax"]) != (options.device, jax.__version__):
            parser.error(f"{options.json} is of {data['device']} and jax {data['jax']}")
        rows = [Row(**row) for row in data["rows"]]

    def done(row: Row) -> None:
        rows.append(row)
        print(_line(row), flush=True)
        if options.json is not None:
            _write(options.json, options.device, rows)

    print(
        "network, policy, status, budget, predicted, compiled MiB, error, GiB moved, matmuls, ms, compiles, s"
    )
    for name in options.names or networks:
        known = {(row.network, row.policy): row for row in rows}
        rows_of(name, networks[name], options.device, known, done, Ilp(device=options.device))
    lines, good = summarise(rows)
    print("\n".join(lines))
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
