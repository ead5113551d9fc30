"""The first figure of the README: memory against time, without rematerialization, by jax's policies, by ours.

    python -m benchmarks.figure            # draws docs/assets/memory_and_time-{light,dark}.svg
    python -m benchmarks.figure --check    # exits with 1 if these are not what the results give

The numbers are those of `python -m benchmarks.hand_policies`, as committed in `benchmarks/results`: programs as the
compiler for an absent H200 makes them, bytes of temporaries and a roofline estimate of one step. Nothing was run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from remat.pictures.style import save
from remat.pictures.tradeoff import Kind, Point, Tradeoff, tradeoff
from remat.plans.words import human_bytes

__all__ = ["data_of", "main"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "hand_policies_h200.json"
ASSETS = ROOT / "docs" / "assets"
NETWORK = "llama_scan"
DEFAULT = " (default)"
LEFT_OUT = "remat within jax: "
"""Plans within the memory of jax's policies: they say what a budget buys, not what a name gives."""


def data_of(results: Path = RESULTS, network: str = NETWORK) -> Tradeoff:
    """Returns what is drawn of a file of results.

    Raises:
        ValueError: the file has no row of the network.
    """
    found = json.loads(results.read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if row["network"] == network and not row["refused"]]
    rows = [row for row in rows if not row["policy"].startswith(LEFT_OUT)]
    if not rows:
        raise ValueError(f"{results} has no row of {network}")
    points = tuple(
        _point(row["policy"], row["temp_bytes"], row["roofline_seconds"]) for row in rows
    )
    return Tradeoff(
        title=f"One training step of a bf16 Llama, compiled for {found['device'].upper()}",
        points=points,
        memory="temporary memory, compiled",
        cost="one step, roofline estimate",
        whole=next(point.cost for point in points if point.kind == "none"),
        share="share of no remat",
        theirs="jax.checkpoint, per block",
    )


def _point(policy: str, nbytes: int, seconds: float) -> Point:
    owner, _, name = policy.partition(": ")
    kinds: dict[str, Kind] = {"none": "none", "jax": "jax", "remat": "remat"}
    label = f"{name or 'no remat'}{DEFAULT if policy == 'remat: min_cut' else ''}"
    return Point(f"{label}, {human_bytes(nbytes)}", kinds[owner], nbytes, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the figure, or checks it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare with what is there")
    parser.add_argument("--out", type=Path, default=ASSETS, help="the folder to draw into")
    options = parser.parse_args(argv)
    data, status = data_of(), 0
    options.out.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        path = options.out / f"memory_and_time-{theme}.svg"
        before = path.read_bytes() if path.exists() else b""
        save(tradeoff(data), path, title=data.title, theme=theme)
        if options.check and path.read_bytes() != before:
            print(f"{path} was not what the results give; it is now")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
