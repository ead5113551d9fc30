"""Policies that people pick by hand beside the ready-made ones of this library, on mixed-precision transformers.

    python -m benchmarks.hand_policies [NAME ...] [--device h200] [--budgets] [--json FILE] [--check]

A row is one program as the compiler sees it: the Llama of `models/development` with every block under one of
`jax.checkpoint_policies` (the scanned one with `prevent_cse=False`, as jax's documentation asks for), or the
whole loss under a policy of this library. `--budgets` adds this library's plan within the memory that each of
jax's takes, confirmed by the compiler. `--check` exits with 1 unless the default is at or below `dots_saveable`,
and `low_memory` at or below `dots_with_no_batch_dims_saveable`, in memory, traffic, matmuls and roofline time,
and every plan within a budget at or below the policy whose memory it is, in traffic and roofline time.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import remat
from models.development import llama
from remat import BudgetError, Confirm

__all__ = ["Row", "below", "main", "rows_of"]

MIB, GIB = 2**20, 2**30
BY_HAND: dict[str, Any] = {
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,
}
NETWORKS = {"llama_scan": llama.llama_scan, "llama_unrolled": llama.llama_unrolled}
AGAINST = {"min_cut": "dots_saveable", "low_memory": "dots_with_no_batch_dims_saveable"}
SLACK = 0.01  # of any number: the compiler's own choices move that much between two programs that mean the same


@dataclass(frozen=True)
class Row:
    """One program as compiled.

    Attributes:
        network: its name.
        policy: `none`, `jax: NAME`, `remat: NAME`, or `remat within jax: NAME`.
        temp_bytes, traffic_bytes, matmuls, roofline_seconds: of the compiled gradient; 0 if `refused`.
        refused: no program within the budget was found.
    """

    network: str
    policy: str
    temp_bytes: int
    traffic_bytes: int
    matmuls: int
    roofline_seconds: float
    refused: bool = False


def rows_of(network: str, device: str, budgets: bool, done: Callable[[Row], None]) -> list[Row]:
    """Compiles the rows of a network, and hands each to `done`."""
    build = NETWORKS[network]
    loss, args = build()
    rows: list[Row] = []

    def add(label: str, function: Callable[..., Any]) -> Row:
        report = remat.compile_report(jax.grad(function), *args, device=device)
        row = Row(
            network,
            label,
            report.temp_bytes,
            report.hbm_traffic_bytes,
            report.matmuls_executed,
            report.roofline_seconds or 0.0,
        )
        rows.append(row)
        done(row)
        return row

    add("none", loss)
    scanned = network == "llama_scan"
    hands: list[Row] = []
    for name, policy in BY_HAND.items():
        wrap = functools.partial(jax.checkpoint, policy=policy, prevent_cse=not scanned)
        hands.append(add(f"jax: {name}", build(wrap=wrap)[0]))
    for name in (*AGAINST, "full"):
        add(f"remat: {name}", remat.checkpoint(loss, remat_policy=name))
    for hand in hands if budgets else ():
        label = f"remat within {hand.policy}"
        try:
            plan = remat.plan(loss, *args, budget=hand.temp_bytes, confirm=Confirm(device=device))
        except BudgetError:
            rows.append(Row(network, label, 0, 0, 0, 0.0, refused=True))
            done(rows[-1])
        else:
            add(label, remat.checkpoint(loss, remat_policy=plan))
    return rows


def below(ours: Row, theirs: Row, names: Sequence[str]) -> list[str]:
    """Returns where `ours` is above `theirs`, a line each."""
    return [
        f"{ours.network}: {name} of {ours.policy} is {getattr(ours, name):.6g}, "
        f"of {theirs.policy} {getattr(theirs, name):.6g}"
        for name in names
        if getattr(ours, name) > (1 + SLACK) * getattr(theirs, name)
    ]


def _missed(rows: Sequence[Row]) -> list[str]:
    named = {(row.network, row.policy): row for row in rows}
    lines: list[str] = []
    for (network, policy), row in named.items():
        ours, _, theirs = policy.removeprefix("remat").partition("jax: ")
        if row.refused:
            lines.append(f"{network}: nothing found within jax: {theirs}")
        elif theirs and ours:
            hand = named[network, f"jax: {theirs}"]
            lines += below(row, hand, ["temp_bytes", "traffic_bytes", "roofline_seconds"])
        elif policy.startswith("remat: ") and policy[7:] in AGAINST:
            hand = named[network, f"jax: {AGAINST[policy[7:]]}"]
            names = ["temp_bytes", "traffic_bytes", "matmuls", "roofline_seconds"]
            lines += below(row, hand, names)
    return lines


def _print(row: Row) -> None:
    numbers = (
        "  refused"
        if row.refused
        else f"{row.temp_bytes / MIB:9.1f} {row.traffic_bytes / GIB:7.2f} {row.matmuls:5d} "
        f"{1e3 * row.roofline_seconds:8.3f}"
    )
    print(f"{row.network:15} {row.policy:50} {numbers}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("names", nargs="*", help=f"networks, of {sorted(NETWORKS)} (default: all)")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--budgets", action="store_true", help="also within what jax's take")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(NETWORKS))
    if unknown:
        parser.error(f"no such network: {unknown}; expected some of {sorted(NETWORKS)}")
    print("network, policy, temp MiB, GiB moved, matmuls, roofline ms")
    rows: list[Row] = []
    for name in options.names or NETWORKS:
        rows += rows_of(name, options.device, options.budgets, _print)
    if options.json is not None:
        data = {"device": options.device, "jax": jax.__version__, "rows": [asdict(r) for r in rows]}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    missed = _missed(rows)
    print("\n".join(missed) if missed else "at or below jax's everywhere")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
