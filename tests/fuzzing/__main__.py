"""`python -m tests.fuzzing --programs 2000 --seed 0 --workers 2 --out fuzzing.jsonl`.

Every program becomes a line of the file as soon as it is done; programs that are in the file already are left out,
so that a run can be interrupted and taken up again. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from remat.policies.solvers.search_walk import compile_kernel
from tests.fuzzing.campaign import forget_compilations, tally, try_program

_FORGET_EVERY = 40  # programs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--programs", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--policies", default="", help="only those whose text contains this")
    parser.add_argument("--variants", type=int, default=3, help="variants per program (default 3)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--limit", type=float, default=60, help="CPU-seconds for one variant")
    parser.add_argument("--shrink", type=float, default=90, help="seconds for one failure")
    parser.add_argument("--out", type=Path, default=Path("fuzzing.jsonl"), help="where records go")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off


def _seeds(args: argparse.Namespace) -> range:
    return range(args.seed, args.seed + args.programs)


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _work(args: argparse.Namespace) -> None:
    """What one worker does: every `workers`-th program."""
    compile_kernel()  # numba does not survive a limit that ends it
    started, number = time.monotonic(), 0
    done = {record["seed"] for record in _records(args.out)}
    for seed in _seeds(args):
        if seed % args.workers != args.worker or seed in done:
            continue
        if args.seconds is not None and time.monotonic() - started > args.seconds:
            return
        args.out.with_suffix(f".at{args.worker}").write_text(str(seed))
        record = try_program(
            seed,
            variants=args.variants,
            only=args.policies,
            limit=args.limit,
            shrink_seconds=args.shrink,
        )
        _append(args.out, record)
        number += 1
        for outcome in record["outcomes"]:
            if outcome["kind"] in ("wrong", "crashed"):
                print(
                    f"program {seed}, {outcome['variant']}: {outcome['kind']}: {outcome['words']}"
                )
        if "script" in record:
            print(record["script"])
        if number % _FORGET_EVERY == 0:
            forget_compilations()
            print(f"worker {args.worker}: {tally(_records(args.out)).splitlines()[0]}")
        sys.stdout.flush()


def _start(args: argparse.Namespace, worker: int) -> subprocess.Popen[bytes]:
    given = sys.argv[1:]
    command = [sys.executable, "-m", "tests.fuzzing", *given, "--worker", str(worker)]
    return subprocess.Popen(command)


def _supervise(args: argparse.Namespace) -> None:
    """Runs the workers; where XLA takes one down, that program is written down and the next one starts."""
    running = {worker: _start(args, worker) for worker in range(args.workers)}
    try:
        while running:
            time.sleep(0.5)
            for worker, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[worker]
                if process.returncode < 0:
                    seed = int(args.out.with_suffix(f".at{worker}").read_text())
                    _append(args.out, {"seed": seed, "aborted": process.returncode})
                    running[worker] = _start(args, worker)
                elif process.returncode:
                    raise SystemExit(f"worker {worker} ended with {process.returncode}")
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on")
    finally:
        for process in running.values():
            process.terminate()
        for worker in range(args.workers):
            args.out.with_suffix(f".at{worker}").unlink(missing_ok=True)


def main() -> int:
    """Runs the command line; returns its exit status."""
    args = _arguments()
    if args.worker is not None:
        _work(args)
        return 0
    _supervise(args)
    records = [record for record in _records(args.out) if record["seed"] in _seeds(args)]
    print(tally(records))
    return int(any("script" in record or "aborted" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
