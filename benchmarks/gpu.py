"""Step time and device memory, measured on the attached GPU; `benchmarks/gpu.sh` runs this unattended.

    python -m benchmarks.gpu [--minutes 9] [--groups gpt_scan validation ...] [--jobs N] [--out DIR] [--dry-run]

Every row is planned and compiled in a process of its own, `--jobs` of them beside each other. When all are
compiled, or half of the time is over, the groups are timed one after the other, the rows of a group in turn. At
last the peak of each row is taken in a process of its own. It ends before `--minutes` are over: what does not fit
is listed as skipped. Results are written after every row to `gpu_<device>_<date>.json`. `--dry-run` does the same
with tiny programs on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_cases import WITHIN
from models import validation

__all__ = ["GROUP_WEIGHTS", "VALIDATION_WEIGHTS", "Results", "Worker", "main"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

GROUP_WEIGHTS: dict[str, float] = {
    "llama_scan": 5.0,
    "gpt_scan": 4.0,
    "resnet50": 4.0,
    "vgg16": 2.0,
    "gpt2_training": 3.0,
    "stencil": 1.5,
    "gelu": 0.5,
    "residual_mlp": 1.0,
    "gpt_unrolled": 4.0,
    "lstm": 1.0,
    "lstm_unrolled": 2.0,
}
"""The groups in the order in which they are run, and their shares of the time."""

VALIDATION = "validation"
VALIDATION_WEIGHTS: dict[str, float] = dict.fromkeys(validation.NETWORKS, 1.0)
"""The groups that `--groups validation` stands for."""

SMALL_WEIGHTS: dict[str, float] = {
    "gelu": 1.0,
    "residual_mlp": 1.0,
    "llama_scan": 2.0,
    "gpt2_training": 2.0,
}
"""The groups of a dry run."""

_Key = tuple[str, str]
"""A row: its group and its label."""

_RESERVE_SECONDS = 10.0
# Shares of the time, by look: what is not ready when its part is over is listed as skipped.
_COMPILE_SHARE = 0.55
_PEAK_SHARE = 0.15
_GRACE_SECONDS = 10.0
_ERROR_LINES = 12


@dataclass(frozen=True)
class Worker:
    """Starts `benchmarks.gpu_worker` and reads what it prints.

    Attributes:
        cache: folder of jax's persistent compilation cache and of plans, shared by the processes of this run:
            the second process of a row neither searches, nor compiles, nor tunes.
        small: tiny programs, on the CPU.
        end: when everything must be over, as of `time.time()`.
    """

    cache: Path
    small: bool
    end: float

    def events(self, *arguments: str, until: float) -> Iterator[dict[str, Any]]:
        """Yields what the process prints, as it does; at `until` it is killed.

        Raises:
            subprocess.CalledProcessError: it failed or was killed; `stderr` has the end of its log.
        """
        command = [sys.executable, "-m", "benchmarks.gpu_worker", *arguments]
        command += ["--plans", str(self.cache / "plans"), *(["--small"] if self.small else [])]
        with tempfile.TemporaryFile("w+", dir=self.cache) as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            limit = max(min(until, self.end) - time.time(), 0.0)
            timer = threading.Timer(limit, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith('{"event"'):
                        yield json.loads(line)
                status = process.wait()
            finally:
                timer.cancel()
                process.kill()
                process.wait()
            if status:
                log.seek(0)
                tail = "\n".join(log.read().splitlines()[-_ERROR_LINES:])
                raise subprocess.CalledProcessError(status, command, stderr=tail)

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **({"JAX_PLATFORMS": "cpu"} if self.small else {}),
        }


@dataclass
class Results:
    """The results, written to a file whenever something is added.

    Attributes:
        path: the file.
        header: device, versions, date.
        rows: by group and label.
        skipped: groups that were not run or not finished, and why.
    """

    path: Path
    header: dict[str, Any]
    rows: dict[_Key, dict[str, Any]] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes over what a worker printed, and writes the file."""
        group = str(event["group"])
        with self._lock:
            if event["event"] == "group":
                for label in event["labels"]:
                    self.rows[group, label] = {"group": group, "label": label, "status": "started"}
            else:
                row = self.rows.setdefault((group, event["label"]), {"status": "started"})
                row.update({name: value for name, value in event.items() if name != "event"})
            self._write(complete=False)

    def skip(self, group: str, reason: str) -> None:
        """Notes that a group was not run to its end."""
        print(f"{group}: {reason}", flush=True)
        with self._lock:
            self.skipped.append({"group": group, "reason": reason})
            self._write(complete=False)

    def finish(self) -> None:
        """Writes the file for the last time."""
        with self._lock:
            self._write(complete=True)

    def _write(self, complete: bool) -> None:
        record = {
            **self.header,
            "seconds": round(time.time() - self.header["started"], 1),
            "complete": complete,
            "rows": list(self.rows.values()),
            "skipped": self.skipped,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(self.path)


def name_rows(worker: Worker, results: Results, until: float, group: str) -> None:
    """Notes the rows of a group, before anything is known of them."""
    try:
        for event in worker.events("labels", "--group", group, until=until):
            results.add(event)
    except subprocess.CalledProcessError as error:
        results.skip(group, _reason(error))


def compile_rows(worker: Worker, results: Results, until: float, rows: Sequence[_Key]) -> None:
    """Plans and compiles rows, one after the other."""
    for row in rows:
        compile_row(worker, results, until, row)


def compile_row(worker: Worker, results: Results, until: float, row: _Key) -> None:
    """Plans and compiles a row in a process of its own: plan and executable are there for those that run it."""
    group, label = row
    reason = "no time was left to compile"
    if time.time() < until:
        try:
            for event in worker.events("compile", "--group", group, "--label", label, until=until):
                results.add(event)
            print(
                f"  {group}, {label}: {'compiled' if 'compiled' in results.rows[row] else 'refused'}",
                flush=True,
            )
            return
        except subprocess.CalledProcessError as error:
            reason = _reason(error)
    results.add(
        {"event": "row", "group": group, "label": label, "status": "skipped", "reason": reason}
    )


def time_group(worker: Worker, results: Results, name: str, until: float) -> None:
    """Times the rows of a group that are compiled, in turn; nothing else runs meanwhile."""
    labels = [
        label for (group, label), row in results.rows.items() if group == name and "compiled" in row
    ]
    if not labels:
        return
    if time.time() > until:
        results.skip(name, "no time was left to time it")
        return
    print(f"{name}: {until - time.time():.0f} s to time {len(labels)} rows", flush=True)
    try:
        task = ("group", "--group", name, "--deadline", str(until), "--label", *labels)
        for event in worker.events(*task, until=until + _GRACE_SECONDS):
            results.add(event)
    except subprocess.CalledProcessError as error:
        results.skip(name, _reason(error))


def _reason(error: subprocess.CalledProcessError) -> str:
    killed = error.returncode == -signal.SIGKILL
    return "no time was left" if killed else f"exit status {error.returncode}: {error.stderr}"


def run_peaks(worker: Worker, results: Results, jobs: int) -> None:
    """Takes the peaks of the rows that ran: processes beside each other, as nothing is timed any more."""
    ran = [key for key, row in results.rows.items() if "step_ms" in row]
    if not ran:
        return
    take = functools.partial(_take_peak, worker, results, worker.end)
    with ThreadPoolExecutor(_parallel_peaks(results, jobs)) as pool:
        list(pool.map(take, *zip(*ran, strict=True)))


def _parallel_peaks(results: Results, jobs: int) -> int:
    """How many processes may use the device's memory at once, each of them as much as the largest program twice:
    what the compiler does not count is less than that."""
    limit = results.header["device"]["bytes_limit"]
    largest = max((r.get("compiled", {}).get("total_bytes") or 0) for r in results.rows.values())
    return max(1, min(jobs, limit // max(2 * largest, 1) if limit and largest else jobs))


def _take_peak(worker: Worker, results: Results, until: float, group: str, label: str) -> None:
    try:
        for event in worker.events("peak", "--group", group, "--label", label, until=until):
            results.add(event)
    except subprocess.CalledProcessError as error:
        memory = {"peak_bytes": None, "reason": _reason(error)}
        results.add({"event": "row", "group": group, "label": label, "memory": memory})


def _print_group(results: Results, group: str) -> None:
    print(f"{group:40s} {'step ms':>9s} {'temp MiB':>9s} {'peak MiB':>9s} {'compile s':>9s}")
    for (name, label), row in results.rows.items():
        if name != group:
            continue
        compiled, memory = row.get("compiled", {}), row.get("memory", {})
        cells = (
            _number(row.get("step_ms", {}).get("median"), 1, 3),
            _number(compiled.get("temp_bytes"), 2**20, 1),
            _number(memory.get("peak_bytes"), 2**20, 1),
            _number(compiled.get("compile_seconds"), 1, 1),
        )
        note = "" if row["status"] == "ok" else f"  {row['status']}: {row.get('reason', '')}"
        print(f"  {label:38s} " + " ".join(f"{cell:>9s}" for cell in cells) + note, flush=True)


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _header(device: Mapping[str, Any], options: argparse.Namespace, start: float) -> dict[str, Any]:
    return {
        "kind": "dry run" if options.dry_run else "measured",
        "device": device["device"],
        "driver": _driver(),
        "versions": device["versions"],
        "date": time.strftime("%Y-%m-%d", time.localtime(start)),
        "started": round(start, 1),
        "minutes": options.minutes,
    }


def _driver() -> str | None:
    """The version of NVIDIA's driver, or None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _free_path(folder: Path, device: str, date: str) -> Path:
    """`gpu_<device>_<date>.json`, numbered where an earlier run of that day is there already."""
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_").removeprefix("nvidia_")
    path = folder / f"gpu_{slug}_{date}.json"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"gpu_{slug}_{date}_{number}.json"
    return path


def _device(worker: Worker) -> dict[str, Any]:
    for event in worker.events("device", until=worker.end):
        return event
    raise RuntimeError("the first process printed nothing about the device")


def run(options: argparse.Namespace, cache: Path, start: float) -> int:
    """Runs the groups within the time; returns the exit status."""
    worker = Worker(cache, options.dry_run, start + 60 * options.minutes - _RESERVE_SECONDS)
    try:
        device = _device(worker)
    except subprocess.CalledProcessError as error:
        print(f"jax does not start here:\n{error.stderr}", file=sys.stderr)
        return 2
    if device["device"]["platform"] == "cpu" and not options.dry_run:
        print("no GPU is attached; try --dry-run", file=sys.stderr)
        return 2
    header = _header(device, options, start)
    path = _free_path(options.out, device["device"]["name"], header["date"])
    results = Results(path, header)
    weights = _chosen(options)
    left = worker.end - time.time()
    compiled_by, timed_by = (
        worker.end - (1 - _COMPILE_SHARE) * left,
        worker.end - _PEAK_SHARE * left,
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(functools.partial(name_rows, worker, results, compiled_by), weights))
        chains = _chains(_in_turn(results, weights))
        print(f"{len(results.rows)} rows: {compiled_by - time.time():.0f} s to compile", flush=True)
        list(pool.map(functools.partial(compile_rows, worker, results, compiled_by), chains))
    for place, name in enumerate(weights):
        share = weights[name] / sum(list(weights.values())[place:])
        time_group(worker, results, name, time.time() + share * (timed_by - time.time()))
    run_peaks(worker, results, options.jobs)
    results.finish()
    for name in weights:
        _print_group(results, name)
    print(path)
    return 0 if any(row["status"] == "ok" for row in results.rows.values()) else 1


def _in_turn(results: Results, weights: Mapping[str, float]) -> list[_Key]:
    """The rows in the order in which they are compiled: the first of every group, and so on; more of those that
    have a larger share of the time."""
    places: dict[str, int] = dict.fromkeys(weights, 0)
    order: dict[_Key, float] = {}
    for row in results.rows:
        order[row] = places[row[0]] / weights[row[0]]
        places[row[0]] += 1
    return sorted(results.rows, key=order.__getitem__)


def _chains(rows: Iterable[_Key]) -> list[list[_Key]]:
    """The rows within budgets of a group in one list, which is compiled in turn: what the compiler said for one of
    them is remembered for the next. Every other row is a list of its own."""
    chains: dict[_Key, list[_Key]] = {}
    for group, label in rows:
        key = (group, WITHIN) if label.startswith(WITHIN) else (group, label)
        chains.setdefault(key, []).append((group, label))
    return list(chains.values())


def _chosen(options: argparse.Namespace) -> dict[str, float]:
    """The groups to run, in their order, and their shares of the time."""
    if options.dry_run:
        known, default = SMALL_WEIGHTS, SMALL_WEIGHTS
    else:
        known, default = GROUP_WEIGHTS | VALIDATION_WEIGHTS, GROUP_WEIGHTS
    if not options.groups:
        return default
    names = {*options.groups, *(VALIDATION_WEIGHTS if VALIDATION in options.groups else ())}
    return {name: weight for name, weight in known.items() if name in names}


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    start = time.time()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="everything is over by then")
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=[*GROUP_WEIGHTS, *VALIDATION_WEIGHTS, VALIDATION],
        help=f"default: all of the first line; {VALIDATION}: those of models/validation",
    )
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help=f"compile at once (default: {jobs})")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny programs on the CPU")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory(prefix="remat-gpu-", ignore_cleanup_errors=True) as folder:
        try:
            return run(options, Path(folder), start)
        except KeyboardInterrupt:
            print("interrupted; the results have what was found until then", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
