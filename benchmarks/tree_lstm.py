"""A TreeLSTM trained on documents of different shapes, within half of the memory, beside `jax.jit` per shape.

    python -m benchmarks.tree_lstm [--documents 8] [--lines 24] [--json FILE] [--check]

The text is Python's own help (`pydoc_data.topics`): a document is a page, a tree by the indentation of its lines,
and what is to be predicted is whether the page has a grammar (`::=`). Every document is another tree and one step
of gradient descent. Five ways, each from the same parameters: plain JAX, operator by operator; `jax.jit` of the
gradient, which compiles once per tree; `remat.dtr.value_and_grad` without a budget, and with half of the peak of
the largest tree; the same without a budget where leaf and cell are not under `jax.jit` each.

The columns: the sum of losses; the highest peak of a step, counted as `remat.dtr` counts it; the budget; operators,
and what ran again; what XLA compiled; processor seconds, of the first pass over the documents and of a second.
Before that, `remat.dtr` and plain JAX have seen the two smallest trees.

`--check` exits with 1 if a loss is not that of plain JAX, up to rounding; a peak is above the budget; nothing ran
again; something was compiled for a tree after these two; or `jax.jit` did not compile for every tree.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp

from models import tree_lstm
from remat import dtr

__all__ = ["Trained", "documents", "main", "measure", "problems_of"]

RATE = 0.05
FEWEST_LINES = 6


@dataclass(frozen=True)
class Trained:
    """One way to train.

    Attributes:
        way: its name.
        losses: of every step of the first pass.
        peak_bytes, budget_bytes, operators, rematerializations: of `remat.dtr`, None elsewhere; the peak is the
            highest of all steps.
        compilations: by XLA in the first pass.
        seconds, seconds_again: of processor time, of the first pass and of the second.
    """

    way: str
    losses: tuple[float, ...]
    compilations: int
    seconds: float
    seconds_again: float
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    operators: int | None = None
    rematerializations: int | None = None


class Compilations:
    """What XLA compiles, by jax's own count."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def documents(count: int, lines: int, config: tree_lstm.Config) -> list[tree_lstm.Document]:
    """Returns pages as trees, no two alike in shape: the two smallest, then the largest."""
    found: dict[str, tree_lstm.Document] = {}
    for name in sorted(topics):
        if sum(1 for line in topics[name].splitlines() if line.strip()) < FEWEST_LINES:
            continue
        label = float("::=" in topics[name])
        document = tree_lstm.parse(topics[name], config, most_lines=lines, label=label)
        found.setdefault(str(document.tree), document)
    chosen = list(found.values())
    if count > len(chosen):
        raise ValueError(f"{count} documents: there are {len(chosen)} trees")
    chosen.sort(key=lambda document: len(document.lines))
    return [*chosen[:2], *chosen[len(chosen) - count + 2 :]]


def measure(
    count: int = 8, lines: int = 24, config: tree_lstm.Config | None = None
) -> list[Trained]:
    """Trains in every way."""
    config = config or tree_lstm.Config()
    found = documents(count, lines, config)
    params = tree_lstm.init(jax.random.key(0), config)
    compilations = Compilations()
    update = jax.jit(lambda p, g: jax.tree.map(lambda x, y: x - RATE * y, p, g))
    runs: list[dtr.RunStatistics] = []

    def train(step: Callable[..., Any], among: Sequence[tree_lstm.Document]) -> tuple[float, ...]:
        current, losses = params, []
        for document in among:
            lines = [jnp.asarray(line) for line in document.lines]
            value, gradient = step(current, lines, document.tree, jnp.float32(document.label))
            current = update(current, gradient)
            losses.append(float(value))
        return tuple(losses)

    def trained(
        way: str, step: Callable[..., Any], *, warm: bool, budget: int | None = None
    ) -> Trained:
        if warm:
            train(step, found[:2])
        runs.clear()
        before, began = compilations.count, time.process_time()
        losses = train(step, found)
        middle, compiled = time.process_time(), compilations.count - before
        first = list(runs)
        train(step, found)
        return Trained(
            way,
            losses,
            compiled,
            seconds=middle - began,
            seconds_again=time.process_time() - middle,
            peak_bytes=max(run.peak_bytes for run in first) if first else None,
            budget_bytes=budget,
            operators=sum(run.operators for run in first) if first else None,
            rematerializations=sum(run.rematerializations for run in first) if first else None,
        )

    rows = [trained("plain JAX", jax.value_and_grad(tree_lstm.loss), warm=True)]
    jitted = jax.jit(jax.value_and_grad(tree_lstm.loss), static_argnums=2)
    rows.append(trained("jax.jit per tree", jitted, warm=False))
    free = dtr.value_and_grad(tree_lstm.loss, on_run=runs.append)
    rows.append(trained("remat.dtr", free, warm=True))
    budget = (rows[-1].peak_bytes or 0) // 2
    capped = dtr.value_and_grad(tree_lstm.loss, budget=budget, on_run=runs.append)
    rows.append(trained("remat.dtr, half", capped, warm=True, budget=budget))
    apart = dtr.value_and_grad(tree_lstm.loss_apart, on_run=runs.append)
    rows.append(trained("remat.dtr, no jit", apart, warm=True))
    return rows


def problems_of(rows: Sequence[Trained]) -> list[str]:
    """Returns a line for everything that is not as promised; see the module docstring."""
    lines: list[str] = []
    plain = rows[0]
    for row in rows[1:]:
        for number, (loss, other) in enumerate(zip(row.losses, plain.losses, strict=True)):
            if not math.isclose(loss, other, rel_tol=1e-4, abs_tol=1e-6):
                lines.append(f"{row.way}: loss {loss} of step {number}, plain JAX has {other}")
        if row.peak_bytes is None:
            if row.compilations < len(plain.losses):
                lines.append(
                    f"{row.way}: {row.compilations} compilations for {len(plain.losses)} trees"
                )
        elif row.compilations:
            lines.append(f"{row.way}: {row.compilations} compilations after two trees")
        if row.budget_bytes is not None:
            if row.peak_bytes is None or row.peak_bytes > row.budget_bytes:
                lines.append(
                    f"{row.way}: peak {row.peak_bytes} above the budget {row.budget_bytes}"
                )
            if not row.rematerializations:
                lines.append(f"{row.way}: nothing ran again: the budget shows nothing")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tree_lstm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--lines", type=int, default=24, help="of a document, at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    rows = measure(args.documents, args.lines)
    for row in rows:
        print(
            f"{row.way:18} losses {sum(row.losses):.6f}  peak {row.peak_bytes or '-':>9}  budget "
            f"{row.budget_bytes or '-':>9}  operators {row.operators or '-':>6}  again "
            f"{'-' if row.rematerializations is None else row.rematerializations:>6}  compiled "
            f"{row.compilations:>4}  {row.seconds:7.2f} s, again {row.seconds_again:7.2f} s"
        )
    if args.json:
        whole = {
            "jax": jax.__version__,
            "python": sys.version.split()[0],
            "device": jax.devices()[0].device_kind,
            "documents": args.documents,
            "lines": args.lines,
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(whole, indent=1) + "\n")
    problems = problems_of(rows)
    print("\n".join(problems) or "as promised")
    return int(bool(problems) and args.check)


if __name__ == "__main__":
    sys.exit(main())
