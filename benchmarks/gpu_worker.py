"""The processes that `benchmarks.gpu` starts; each prints what it finds as JSON, a line at a time.

python -m benchmarks.gpu_worker device
python -m benchmarks.gpu_worker labels --group G                             its rows
python -m benchmarks.gpu_worker compile --group G --label L                  plans and compiles a row
python -m benchmarks.gpu_worker group --group G --label L ... --deadline T   compares rows, times them in turn
python -m benchmarks.gpu_worker peak --group G --label L                     memory of one row alone
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import remat
from benchmarks.gpu_cases import BASELINE, GpuGroup, Program, groups
from remat import BudgetError

__all__ = ["main"]

MIN_ROUNDS = 10
MAX_SECONDS = 3.0
PRINT_SECONDS = 5.0
SAMPLE_SECONDS = 0.02
MAX_CALLS = 50
WARM_UP_CALLS = 3
COMPARED_LEAVES = 3
PEAK_STEPS = 2
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "numpy")


@dataclass
class Running:
    """A program with its arrays, being timed.

    Attributes:
        program, args: what is called; a program that carries changes its arguments.
        calls: per timed sample, so that a sample is long against the clock and the launch.
        seconds: per call, one number for each sample.
    """

    program: Program
    args: tuple[Any, ...]
    calls: int
    seconds: list[float]

    def step(self) -> Any:
        """Calls the program once, without waiting for it."""
        out = self.program.call(*self.args)
        if self.program.carries:
            self.args = (out[0], *self.args[1:])
        return out

    def sample(self) -> float:
        """Seconds per call, over `calls` calls."""
        start = time.perf_counter()
        out = None
        for _ in range(self.calls):
            out = self.step()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / self.calls


@dataclass(frozen=True)
class Signature:
    """What is compared of a result: the global norm and the largest leaves."""

    norm: float
    leaves: list[jax.Array]

    def differences(self, other: Signature) -> dict[str, float]:
        """How far this is from `other`, relative to `other`."""
        leaf = (
            float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30))
            for a, b in zip(self.leaves, other.leaves, strict=True)
        )
        return {
            "norm_relative": abs(self.norm - other.norm) / max(other.norm, 1e-30),
            "leaf_max_relative": max(leaf, default=0.0),
        }


def signature(tree: Any) -> Signature:
    """The signature of a pytree; what it holds are copies."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    largest = sorted(leaves, key=lambda x: -x.size)[:COMPARED_LEAVES]
    copies = [jnp.array(x, dtype=jnp.float32, copy=True) for x in largest]
    return Signature(float(_norm(leaves)), copies)


@jax.jit
def _norm(leaves: list[jax.Array]) -> jax.Array:
    squares = (jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def emit(event: str, **fields: Any) -> None:
    """Prints a line for the driver."""
    print(json.dumps({"event": event, **fields}), flush=True)


def emit_row(group: GpuGroup, label: str, **fields: Any) -> None:
    """Prints something that was found about a row."""
    emit("row", group=group.name, label=label, **fields)


def report_device() -> None:
    """Prints what is attached and the versions."""
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    emit(
        "device",
        device={"name": device.device_kind, "platform": device.platform, "bytes_limit": memory},
        versions={
            "python": platform.python_version(),
            "remat": remat.__version__,
            **{name: version for name in PACKAGES if (version := _version(name))},
        },
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def name_rows(group: GpuGroup) -> None:
    """Prints the rows of a group."""
    emit("group", group=group.name, labels=[program.label for program in group.programs()])


def run_compile(group: GpuGroup, label: str) -> None:
    """Traces, plans and compiles a row; plan and executable then lie where this run's other processes find them."""
    (program,) = _chosen(group, [label])
    try:
        emit_row(group, label, compiled=_compiled(program), **_promise(program))
    except BudgetError as error:
        emit_row(group, label, status="refused", reason=_short(error))


def _promise(program: Program) -> dict[str, Any]:
    """The budget of a row's plan, and what the compiler that was asked said the plan takes."""
    if program.plan is None or not program.plan.exists():
        return {}
    plan = remat.Plan.from_json(program.plan)
    return {
        "within": {
            "budget_bytes": plan.budget_bytes,
            "confirmed_bytes": plan.confirmed and plan.confirmed.temp_bytes,
            "compiles": plan.confirmed and plan.confirmed.compiles,
        }
    }


def _chosen(group: GpuGroup, labels: Sequence[str]) -> list[Program]:
    """The programs of these rows, in the group's order."""
    return [program for program in group.programs() if program.label in labels]


def run_group(group: GpuGroup, labels: Sequence[str], deadline: float) -> None:
    """Compares the results of rows with the baseline's, then times the rows in turn."""
    running: list[Running] = []
    reference: Signature | None = None
    shared: tuple[Any, ...] | None = None
    for program in _chosen(group, labels):
        if time.time() + group.min_seconds * (len(running) + 1) > deadline:
            emit_row(group, program.label, status="skipped", reason="no time was left to run it")
            continue
        try:
            if shared is None or program.carries:
                shared = program.make_args()
            reference = _start(group, program, shared, reference, running)
        except Exception as error:
            emit_row(group, program.label, status="failed", reason=_short(error))
    _time(group, running, deadline)


def _start(
    group: GpuGroup,
    program: Program,
    args: tuple[Any, ...],
    reference: Signature | None,
    running: list[Running],
) -> Signature | None:
    """Warms up and compares one row, and adds it to those to be timed."""
    run = Running(program, args, 1, [])
    start = time.perf_counter()
    out = jax.block_until_ready(run.step())
    first = time.perf_counter() - start
    found = signature(program.gradients(out))
    del out
    if program.label == BASELINE:
        reference = found
    elif reference is not None:
        emit_row(group, program.label, agreement=found.differences(reference))
    warm = min(run.sample() for _ in range(WARM_UP_CALLS))
    run.calls = min(max(1, math.ceil(SAMPLE_SECONDS / max(warm, 1e-9))), MAX_CALLS)
    emit_row(group, program.label, first_call_seconds=first, warm_up_step_ms=1e3 * warm)
    running.append(run)
    return reference


def _compiled(program: Program) -> dict[str, Any]:
    """What the compiler says.

    Raises:
        BudgetError: no plan fits the row's budget.
    """
    try:
        report = remat.compile_report(program.call, *program.shapes, device=None)
    except BudgetError:
        raise
    except Exception as error:  # the program may run all the same
        return {"error": _short(error)}
    return {
        "temp_bytes": report.temp_bytes,
        "argument_bytes": report.argument_bytes,
        "output_bytes": report.output_bytes,
        "total_bytes": report.total_bytes,
        "traffic_bytes": report.hbm_traffic_bytes,
        "matmuls": report.matmuls_executed,
        "convolutions": report.convolutions_executed,
        "kernels": report.kernels_executed,
        "roofline_ms": None if report.roofline_seconds is None else 1e3 * report.roofline_seconds,
        "compile_seconds": report.compile_seconds,
    }


def _time(group: GpuGroup, running: list[Running], deadline: float) -> None:
    """Times the rows in turn until each has its samples or time is up; prints now and then."""
    printed = time.time()
    while time.time() < deadline and not all(_has_enough(r, group.min_seconds) for r in running):
        for run in running:
            run.seconds.append(run.sample())
        if time.time() - printed > PRINT_SECONDS:
            _print_times(group, running)
            printed = time.time()
    _print_times(group, running)


def _print_times(group: GpuGroup, running: list[Running]) -> None:
    for run in running:
        if run.seconds:
            emit_row(group, run.program.label, status="ok", **_statistics(run))
        else:
            reason = "no time was left to time it"
            emit_row(group, run.program.label, status="skipped", reason=reason)


def _has_enough(run: Running, min_seconds: float) -> bool:
    spent = sum(run.seconds) * run.calls
    return spent >= MAX_SECONDS or (len(run.seconds) >= MIN_ROUNDS and spent >= min_seconds)


def _statistics(run: Running) -> dict[str, Any]:
    median = statistics.median(run.seconds)
    step = {
        "median": 1e3 * median,
        "min": 1e3 * min(run.seconds),
        "max": 1e3 * max(run.seconds),
        "samples": len(run.seconds),
        "calls_per_sample": run.calls,
    }
    tokens = run.program.tokens
    return {"step_ms": step, **({"tokens_per_second": tokens / median} if tokens else {})}


def run_peak(group: GpuGroup, label: str) -> None:
    """Prints the device's peak of a process that runs nothing but this row."""
    (program,) = _chosen(group, [label])
    run = Running(program, jax.block_until_ready(program.make_args()), 1, [])
    before = _peak_bytes()
    start = time.perf_counter()
    for _ in range(PEAK_STEPS):
        jax.block_until_ready(run.step())
    seconds = time.perf_counter() - start
    memory = {"peak_bytes": _peak_bytes(), "peak_bytes_before": before, "seconds": seconds}
    emit_row(group, label, memory=memory)


def _peak_bytes() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=["device", "labels", "compile", "group", "peak"])
    parser.add_argument("--group")
    parser.add_argument("--label", nargs="+", default=[], metavar="L")
    parser.add_argument("--deadline", type=float, default=math.inf, help="as of time.time()")
    parser.add_argument("--plans", type=Path, help="folder for plans that several processes need")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(argv)
    if options.task == "device":
        report_device()
        return 0
    group = groups(options.small, options.plans)[options.group]
    if options.task == "labels":
        name_rows(group)
    elif options.task == "group":
        run_group(group, options.label, options.deadline)
    else:
        (run_peak if options.task == "peak" else run_compile)(group, *options.label)
    return 0


if __name__ == "__main__":
    sys.exit(main())
