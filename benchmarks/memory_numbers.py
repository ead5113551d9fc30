"""What the memory model's predictions do where one of its numbers is half or twice as large.

    python -m benchmarks.memory_numbers [CASE ...] [--results FILE]

Plans the cases of `benchmarks.memory_model` once, predicts each with every number of `remat.memory.tables` changed,
and compares with the temp memory that was compiled, which it reads from recorded results. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax

import remat
from benchmarks.memory_model import CASES, MIB, WITHIN, Case
from remat.memory import (
    Prediction,
    fusion,
    instances,
    kernels,
    order,
    places,
    predict,
    tables,
)

__all__ = ["NUMBERS", "changed", "main"]

RESULTS = Path(__file__).with_name("results") / "memory_model_h200.json"
NUMBERS: tuple[str, ...] = (
    "CODE_CYCLES",
    "SMALL_SHARE",
    "FAR",
    "TINY_SHARE",
)
_READERS = (fusion, instances, kernels, order, places)


@contextmanager
def changed(name: str, value: float) -> Iterator[None]:
    """Gives a number of `remat.memory.tables` another value meanwhile, wherever it is read."""
    old = getattr(tables, name)
    readers = [module for module in _READERS if hasattr(module, name)]
    try:
        for module in readers:
            setattr(module, name, value)
        yield
    finally:
        for module in readers:
            setattr(module, name, old)


def _planned(case: Case) -> partial[Prediction]:
    """Returns what predicts a case."""
    if case.plan is None:
        loss, args = case.build()
        plan = remat.plan(loss, *args, remat_policy="save_all", nested_checkpoints="respect")
        return partial(predict, plan.graph.plain or plan.graph, loops=plan.loops)
    loss, args, policy = case.plan()
    plan = remat.plan(loss, *args, remat_policy=policy)
    return partial(predict, plan.graph, plan.schedule, loops=plan.loops)


def _line(
    name: str, found: Mapping[str, int], usual: Mapping[str, int], compiled: Mapping[str, float]
) -> str:
    errors = [abs(found[case] / compiled[case] - 1) for case in found]
    moved = [found[case] / usual[case] - 1 for case in found if found[case] != usual[case]]
    within = sum(error <= WITHIN for error in errors)
    return (
        f"{name:32} {len(moved):3} of {len(found)} change, {max(moved, key=abs, default=0.0):+.1%} at most; "
        f"{within} within {WITHIN:.0%}, median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="model or model/policy; default: all"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="of benchmarks.memory_model")
    options = parser.parse_args(argv)
    rows = json.loads(options.results.read_text())["rows"]
    compiled = {row["case"]: row["compiled_mib"] * MIB for row in rows}
    wanted = [
        case
        for case in CASES
        if case.name in compiled
        and (not options.cases or {case.name, case.model}.intersection(options.cases))
    ]
    if not wanted:
        parser.error(f"no such case with a result; choose from {sorted(compiled)}")
    predictions = {case.name: _planned(case) for case in wanted}

    def all_peaks() -> dict[str, int]:
        return {name: made().peak_bytes for name, made in predictions.items()}

    usual = all_peaks()
    print(_line("as they are", usual, usual, compiled), flush=True)
    for name in NUMBERS:
        number = getattr(tables, name)
        for value in (number / 2, number * 2):
            with changed(name, value):
                line = _line(f"{name} = {value:.3g}", all_peaks(), usual, compiled)
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
