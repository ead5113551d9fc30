"""DTR's simulator against its paper: chains, public logs, our own models.

    python -m benchmarks.dtr [--figure 2 3 4 5 6 ablation densenet scale] [--most 8192] [--device h200]
                             [--json FILE] [--check]

Kirisame et al., "Dynamic tensor rematerialization" (2020). The figures are those of the paper:

* 2, 3: operators repeated on a chain of n unit layers within ceil(2 sqrt n) and ceil(log2 n), n up to `--most`,
  beside the fewest possible.
* 4: what is repeated, in % of the base, at shares of the peak; on the public logs beside it what the published
  simulator repeats. A run ends where it comes to 3 times the base (thrashing), on the public logs to twice the base
  as the published ones do, or where an operator does not fit.
* 5: eager eviction and banishing, `dtr_full`, up to 5 times the base.
* 6: storage accesses, with the scan that the paper counts, and with the index.
* ablation: figures 11 to 14, every cost with and without size and staleness.
* densenet: DenseNet-BC-100 at small shares of its peak; the paper has 22.7 % at 0.2 under `dtr_eqclass`.
* scale: chains of 1,000 to 100,000 operators within half of their peak under `dtr_eqclass`, index and scan in turn,
  in processor seconds; the scan up to 8,000.

Public logs are read from the folder `REMAT_DTR_LOGS` and left out where it is absent. Our models are joint
graphs of JAX, kernel by kernel as planners see them (`densenet operators`: nothing fused), with roofline times of
`--device`. In a file that is there, the rows of other figures stay.

`--check` exits with 1 if `dtr_full` repeats more than 1.1 n on a chain within ceil(2 sqrt n), or more than n log2 n
within ceil(log2 n); if a published number is missed; if `dtr_full` does not look at most per eviction, and
`dtr_local` at least; if index and scan differ in their moves; or if the index's accesses per eviction grow by more
than half from the shortest chain to the longest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.dtr_programs import MODELS, PUBLISHED, chain, least_repeated, model_log, public_log
from remat.dtr import HEURISTICS, Log, Scoring, simulate

__all__ = ["FIGURES", "Row", "main", "violations"]

SHARES = (0.3, 0.5, 0.7, 0.9)
_CLOSE = 1.1  # of n: what "approximately n" (section 5.1) is taken to allow
_SCANNED = 8_000  # operators of the longest chain that is scanned


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        figure: what it is part of.
        log: what was replayed; `chain(n)`.
        heuristic, eviction, search: how.
        budget: bytes, or share of the peak.
        status: how it ended.
        overhead: what was repeated, as a share of the base.
        repeated: operators; `evictions`, `accesses`: storages.
        cpu_seconds: of the simulation.
        expected: what the published simulator has (nanoseconds or how it ended), the fewest operators that any
            schedule repeats on a chain, or None.
        repeated_ns: what the repeated operators cost.
    """

    figure: str
    log: str
    heuristic: str
    eviction: str
    search: str
    budget: float
    status: str
    overhead: float
    repeated: int
    repeated_ns: int
    evictions: int
    accesses: int
    cpu_seconds: float
    expected: int | str | None = None


@cache
def _log(name: str, device: str) -> Log | None:
    if name.startswith("chain("):
        return chain(int(name[6:-1]))
    if name.startswith("public "):
        return public_log(name.removeprefix("public "))
    return model_log(name, device)


def _row(
    figure: str,
    name: str,
    budget: float,
    heuristic: str,
    *,
    device: str,
    scoring: Scoring | None = None,
    eviction: Any = "eager",
    search: Any = "index",
    thrash: float | None = None,
    expected: int | str | None = None,
) -> Row | None:
    log = _log(name, device)
    if log is None:
        return None
    start = time.process_time()
    run = simulate(
        log,
        budget,
        scoring or heuristic,
        eviction,
        thrash=thrash,
        trace=False,
        search=search,
    )
    seconds = time.process_time() - start
    return Row(
        figure=figure,
        log=name,
        heuristic=heuristic,
        eviction=eviction,
        search=search,
        budget=budget,
        status=run.status,
        overhead=round(run.overhead, 5),
        repeated=run.rematerializations,
        repeated_ns=run.repeated_cost,
        evictions=run.evictions,
        accesses=run.storage_accesses,
        cpu_seconds=round(seconds, 2),
        expected=expected,
    )


def _lengths(most: int, longest: int) -> Iterator[int]:
    return (2**k for k in range(4, 14) if 2**k <= min(most, longest))


def _chains(figure: str, most: int, device: str) -> Iterator[Row | None]:
    # LRU repeats n^2 operators within 2 sqrt(n), and more within log2(n).
    longest = {"dtr_eqclass": 8192, "dtr_full": 8192, "lru": 1024 if figure == "2" else 128}
    for heuristic, limit in longest.items():
        for n in _lengths(most, limit):
            budget = math.ceil(2 * math.sqrt(n)) if figure == "2" else math.ceil(math.log2(n))
            fewest = least_repeated(n, budget)
            yield _row(figure, f"chain({n})", budget, heuristic, device=device, expected=fewest)


def _figure_4(most: int, device: str) -> Iterator[Row | None]:
    for (name, heuristic), numbers in PUBLISHED.items():
        for share, expected in zip(SHARES, numbers, strict=True):
            how: dict[str, Any] = {"device": device, "thrash": 2.0, "expected": expected}
            yield _row("4", f"public {name}", share, heuristic, **how)
    for name in MODELS:
        for heuristic, share in itertools.product(HEURISTICS, SHARES):
            yield _row("4", name, share, heuristic, device=device, thrash=3.0)


def _figure_5(most: int, device: str) -> Iterator[Row | None]:
    for name in ("public unet", "public resnet32", "unet", "lstm"):
        for eviction, share in itertools.product(("eager", "banish"), SHARES):
            how: dict[str, Any] = {"device": device, "eviction": eviction, "thrash": 5.0}
            yield _row("5", name, share, "dtr_full", **how)


def _figure_6(most: int, device: str) -> Iterator[Row | None]:
    for name in ("public unet", "public resnet32", "unet", "lstm"):
        for heuristic in ("dtr_full", "dtr_eqclass", "dtr_local"):
            for search, share in itertools.product(("scan", "index"), (0.5, 0.7, 0.9)):
                how: dict[str, Any] = {"device": device, "search": search, "thrash": 3.0}
                yield _row("6", name, share, heuristic, **how)


def _ablation(most: int, device: str) -> Iterator[Row | None]:
    costs = ("full", "eqclass", "local", "none")
    for name in ("public unet", "public resnet32", "unet", "lstm"):
        for cost, size, staleness in itertools.product(costs, (True, False), (True, False)):
            label = f"cost={cost} size={'yes' if size else 'no'} staleness={'yes' if staleness else 'no'}"
            how: dict[str, Any] = {"device": device, "scoring": Scoring(cost, size, staleness)}
            for share in (0.5, 0.7):
                yield _row("ablation", name, share, label, thrash=3.0, **how)


def _densenet(most: int, device: str) -> Iterator[Row | None]:
    for heuristic, share in itertools.product(("dtr_eqclass", "dtr_full"), (0.2, 0.3, 0.4, 0.5)):
        yield _row("densenet", "densenet", share, heuristic, device=device, thrash=3.0)
    for share in (0.2, 0.3, 0.4, 0.5):
        yield _row(
            "densenet", "densenet operators", share, "dtr_eqclass", device=device, thrash=3.0
        )


def _scale(most: int, device: str) -> Iterator[Row | None]:
    for calls in (1_000, 4_000, 8_000, 32_000, 100_000):
        for search in ("index", "scan"):
            if search == "index" or calls <= _SCANNED:
                name = f"chain({calls // 2})"
                yield _row("scale", name, 0.5, "dtr_eqclass", device=device, search=search)


FIGURES = {
    "2": lambda most, device: _chains("2", most, device),
    "3": lambda most, device: _chains("3", most, device),
    "4": _figure_4,
    "5": _figure_5,
    "6": _figure_6,
    "ablation": _ablation,
    "densenet": _densenet,
    "scale": _scale,
}


def violations(rows: Sequence[Row]) -> list[str]:
    """Returns what `--check` fails on."""
    found = []
    for row in rows:
        name = f"figure {row.figure}, {row.log}, {row.heuristic} at {row.budget:g}"
        if row.figure in ("2", "3") and row.heuristic == "dtr_full":
            n = int(row.log[6:-1])
            most = _CLOSE * n if row.figure == "2" else n * math.log2(n)
            if row.status != "ok" or row.repeated > most:
                found.append(
                    f"{name}: {row.repeated:,} repeated, {row.status}; at most {most:,.0f}"
                )
        if row.figure == "4" and row.expected is not None:
            got = row.repeated_ns if row.status == "ok" else row.status
            if got != row.expected:
                found.append(f"{name}: {got}; published is {row.expected}")
    found += _differences(rows)
    found += _disorder([row for row in rows if row.figure == "6" and row.search == "scan"])
    chains = [row for row in rows if row.figure == "scale" and row.search == "index"]
    if chains:
        first, last = (row.accesses / row.evictions for row in (chains[0], chains[-1]))
        if last > 1.5 * first:
            found.append(
                f"scale: {last:.1f} accesses per eviction, {first:.1f} on the shortest chain"
            )
    return found


def _differences(rows: Sequence[Row]) -> Iterator[str]:
    by: dict[tuple[str, str, str, float], tuple[str, int, int]] = {}
    for row in rows:
        if row.figure in ("6", "scale"):
            came_to = (row.status, row.repeated_ns, row.evictions)
            key = (row.figure, row.log, row.heuristic, row.budget)
            if by.setdefault(key, came_to) != came_to:
                yield f"figure {row.figure}, {row.log}, {row.heuristic} at {row.budget:g}: index and scan differ"


def _disorder(rows: Sequence[Row]) -> Iterator[str]:
    by = {(row.log, row.budget, row.heuristic): row for row in rows}
    for log, budget in dict.fromkeys((row.log, row.budget) for row in rows):
        three = [by[log, budget, name] for name in ("dtr_full", "dtr_eqclass", "dtr_local")]
        if all(row.status == "ok" for row in three):
            # Of each eviction: a heuristic that evicts more often looks more often.
            counts = [round(row.accesses / max(row.evictions, 1), 1) for row in three]
            if counts != sorted(counts, reverse=True):
                yield f"figure 6, {log} at {budget:g}: accesses per eviction of full, eqclass, local are {counts}"


def _other_rows(path: Path | None, figures: Sequence[str]) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row["figure"] not in figures]


def _print(row: Row) -> None:
    expected = "" if row.expected is None else f"  expected {row.expected}"
    how = f"{row.heuristic:36} {row.eviction:6} {row.search:5} {row.status:13}"
    counts = f"{row.overhead:9.2%} {row.repeated:9,} {row.accesses:12,} {row.cpu_seconds:7.2f}"
    print(f"{row.figure:8} {row.log:18} {row.budget:8g} {how} {counts}{expected}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dtr", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--figure", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--most", type=int, default=8192, help="layers of the longest chain")
    parser.add_argument("--device", default="h200", help="whose roofline times our models take")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every figure")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is missed")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    kept = _other_rows(options.json, options.figure)
    for figure in options.figure:
        for row in FIGURES[figure](options.most, options.device):
            if row is not None:
                rows.append(row)
                _print(row)
        if options.json is not None:
            lines = (json.dumps(row) for row in (*kept, *(asdict(row) for row in rows)))
            head = {
                "kind": "simulated",
                "device": options.device,
                "python": platform.python_version(),
            }
            text = json.dumps({**head, "rows": []}).removesuffix("]}")
            options.json.write_text(text + "\n" + ",\n".join(lines) + "\n]}\n")
    missed = violations(rows)
    for line in missed:
        print(f"MISSED: {line}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
