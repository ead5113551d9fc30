"""Fitting training steps to memory sizes, confirmed by the compiler of a GPU that need not be there.

    python -m benchmarks.fit [MODEL ...] [--device h200] [--small] [--policy ilp] [--json FILE] [--check]

For every model, the plain gradient is compiled first; memory sizes leave shares of its temporaries beside arguments
and results. Printed are the compiler's total of the fitted step, how many compiles it took, traffic, matmuls and
convolutions per step. `--check` exits with 1 if a size is refused, if a step that is called fitting is not within
its memory, if it took more than 6 compiles, or if the plan, compiled once more on its own, takes another amount.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import remat
from models import cases

__all__ = ["LARGER_SHARES", "MODELS", "SHARES", "Row", "main", "problems", "run_model"]

MAX_COMPILES = 6
SHARES = (0.9, 0.7, 0.5, 0.35, 0.25)
"""Of the plain step's temporaries, what every memory size leaves."""
LARGER_SHARES: Mapping[str, tuple[float, ...]] = {"lstm": (0.9, 0.8, 0.7, 0.6, 0.55)}
"""Instead of these: the logits of all steps, which are there at once, are half of the LSTM's temporaries."""

MODELS: dict[str, tuple[cases.Factory, cases.Factory]] = {
    "gpt_unrolled": (cases.gpt_blocks_unrolled, cases.gpt_blocks_unrolled_small),
    "gpt_scanned": (cases.gpt_blocks_scan, cases.gpt_blocks_scan_small),
    "resnet50": (cases.resnet50, cases.resnet50_small),
    "lstm": (cases.lstm, cases.lstm_small),
    "residual_mlp": (cases.residual_mlp, cases.residual_mlp_small),
}
"""Factories of losses by name: full size, small."""


@dataclass(frozen=True)
class Row:
    """One model at one memory size; numbers are None where it does not fit.

    Attributes:
        share: of the plain step's temporaries that the memory leaves; None for the plain step itself.
        total_bytes, temp_bytes: the compiler's memory of the step.
        confirmed_bytes: the total of the plan compiled once more on its own (`--check` only).
        compiles: how many it took.
        seconds: wall time of planning and compiling.
        error: why it does not fit.
    """

    model: str
    share: float | None
    memory_bytes: int | None
    total_bytes: int | None = None
    temp_bytes: int | None = None
    confirmed_bytes: int | None = None
    compiles: int | None = None
    traffic_bytes: int | None = None
    matmuls: int | None = None
    convolutions: int | None = None
    roofline_seconds: float | None = None
    recompute_seconds: float | None = None
    seconds: float | None = None
    error: str | None = None


def _measured(report: remat.CompileReport) -> dict[str, Any]:
    return {
        "total_bytes": report.total_bytes,
        "temp_bytes": report.temp_bytes,
        "traffic_bytes": report.hbm_traffic_bytes,
        "matmuls": report.matmuls_executed,
        "convolutions": report.convolutions_executed,
        "roofline_seconds": report.roofline_seconds,
    }


def run_model(
    name: str,
    *,
    device: str,
    policy: Any = "ilp",
    small: bool = False,
    shares: tuple[float, ...] | None = None,
    confirm: bool = False,
    each: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Fits one model to every memory size.

    Args:
        name: of `MODELS`.
        device: to compile for.
        policy: as in `remat.fit`.
        small: the small size of the model.
        shares: of the plain step's temporaries; None for those of the model.
        confirm: compile every plan once more on its own.
        each: called with every row when it is there.
    """
    loss, args = MODELS[name][small]()
    plain = remat.compile_report(jax.value_and_grad(loss), *args, device=device)
    rows = [Row(name, None, None, compiles=1, **_measured(plain))]
    each(rows[0])
    for share in LARGER_SHARES.get(name, SHARES) if shares is None else shares:
        memory = plain.total_bytes - plain.temp_bytes + int(share * plain.temp_bytes)
        rows.append(_fitted(name, share, memory, loss, args, device, policy, confirm))
        each(rows[-1])
    return rows


def _fitted(
    name: str,
    share: float,
    memory: int,
    loss: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    policy: Any,
    confirm: bool,
) -> Row:
    start = time.perf_counter()
    step = jax.value_and_grad(remat.checkpoint(loss))
    try:
        found = remat.fit(
            step,
            *args,
            memory=memory,
            device=device,
            remat_policy=policy,
            max_compiles=MAX_COMPILES,
        )
    except remat.BudgetError as error:
        return Row(name, share, memory, seconds=time.perf_counter() - start, error=str(error))
    seconds = time.perf_counter() - start
    confirmed = None
    if confirm:
        alone = jax.value_and_grad(remat.checkpoint(loss, remat_policy=found.plans[0]))
        confirmed = remat.compile_report(alone, *args, device=device).total_bytes
    return Row(
        name,
        share,
        memory,
        confirmed_bytes=confirmed,
        compiles=len(found.history),
        recompute_seconds=found.chosen.recompute_seconds,
        seconds=seconds,
        **_measured(found.report),
    )


def problems(rows: list[Row]) -> list[str]:
    """Returns what must not be: refusals, fits that are none, too many compiles, other totals."""
    lines: list[str] = []
    for row in rows:
        if row.memory_bytes is None:
            continue
        where = f"{row.model} at {row.memory_bytes:,} bytes"
        if row.total_bytes is None:
            lines.append(f"{where}: {row.error}")
            continue
        if row.total_bytes > row.memory_bytes:
            lines.append(f"{where}: takes {row.total_bytes:,} bytes")
        if (row.compiles or 0) > MAX_COMPILES:
            lines.append(f"{where}: {row.compiles} compiles")
        if row.confirmed_bytes not in (None, row.total_bytes):
            lines.append(
                f"{where}: {row.total_bytes:,} bytes, and {row.confirmed_bytes:,} compiled on its own"
            )
    return lines


def _print(row: Row) -> None:
    share = "plain" if row.share is None else f"{row.share:.2f}"
    memory = "" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.1f}"
    head = f"  {row.model:14s} {share:>6s} {memory:>10s}"
    if row.total_bytes is None or row.traffic_bytes is None:
        print(f"{head} does not fit: {row.error}", flush=True)
        return
    roofline = "-" if row.roofline_seconds is None else f"{row.roofline_seconds * 1e3:.3f}"
    print(
        f"{head} {row.total_bytes / 2**20:10.1f} {row.compiles:8d} {row.traffic_bytes / 2**30:9.3f} "
        f"{row.matmuls:7d} {row.convolutions:6d} {roofline:>9s}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {list(MODELS)}; default: all"
    )
    parser.add_argument("--device", default="h200")
    parser.add_argument("--policy", default="ilp")
    parser.add_argument("--small", action="store_true", help="small sizes of the models")
    shares = "of the plain step's temporaries; default: the model's"
    parser.add_argument("--shares", type=float, nargs="+", help=shares)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is not so")
    options = parser.parse_args(argv)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"unknown models {unknown}; choose from {list(MODELS)}")
    print(f"fitted by {options.policy} on {options.device}, jax {jax.__version__}")
    print(
        f"  {'model':14s} {'share':>6s} {'memory MiB':>10s} {'total MiB':>10s} {'compiles':>8s} "
        f"{'HBM GiB':>9s} {'matmuls':>7s} {'convs':>6s} {'roof ms':>9s}"
    )
    rows: list[Row] = []

    def each(row: Row) -> None:
        _print(row)
        rows.append(row)
        if options.json:  # after every row, so that an interrupted run keeps what it has
            options.json.write_text(json.dumps(_record(rows, options), indent=1) + "\n")

    for name in options.models or MODELS:
        run_model(
            name,
            device=options.device,
            policy=options.policy,
            small=options.small,
            shares=None if options.shares is None else tuple(options.shares),
            confirm=options.check,
            each=each,
        )
    lines = problems(rows)
    for line in lines:
        print(f"  PROBLEM  {line}")
    return 1 if options.check and lines else 0


def _record(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "kind": "fitted, compiled for the device",
        "device": options.device,
        "policy": options.policy,
        "small": options.small,
        "jax": jax.__version__,
        "remat": remat.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
