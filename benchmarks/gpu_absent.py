"""Whether XLA says the same of a GPU that is not there: measured rows, compiled again without the GPU.

    python -m benchmarks.gpu_absent benchmarks/results/gpu_h100_80gb_hbm3_2026-11-26.json --device h100

For every row that the device compiled: its temporary memory, HBM traffic and work, there and here. What may
differ is what is tuned by running kernels. Budgets are left out: their plans depend on what was compiled. Use
the jax that the file names; another one makes other programs. `--json FILE` writes the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import remat
from benchmarks.gpu_cases import WITHIN, Program, groups

__all__ = ["Pair", "main"]

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Pair:
    """A program as the attached device's compiler made it, and as it is made without the device.

    Attributes:
        group, label: of the program, in the measured file.
        attached_temp_bytes, absent_temp_bytes: temporary memory.
        attached_traffic_bytes, absent_traffic_bytes: HBM traffic.
        attached_matmuls, absent_matmuls: executed.
    """

    group: str
    label: str
    attached_temp_bytes: int
    absent_temp_bytes: int
    attached_traffic_bytes: int
    absent_traffic_bytes: int
    attached_matmuls: int
    absent_matmuls: int

    @property
    def error(self) -> float:
        """How far the temporary memory without the device is off, relative to at least a MiB."""
        off = self.absent_temp_bytes - self.attached_temp_bytes
        return off / max(self.attached_temp_bytes, MIB)


def pairs(rows: Sequence[dict[str, Any]], device: str) -> Iterator[Pair]:
    """Compiles what the rows name for a device that is not attached.

    Raises:
        remat.CompileError: the compiler for it is not installed, or fails.
    """
    known = groups()
    made: dict[str, dict[str, Program]] = {}
    for row in rows:
        compiled, group = row.get("compiled", {}), row["group"]
        if "temp_bytes" not in compiled or row["label"].startswith(WITHIN):
            continue
        if group not in made:
            made[group] = {program.label: program for program in known[group].programs()}
        program = made[group][row["label"]]
        report = remat.compile_report(program.call, *program.shapes, device=device)
        yield Pair(
            group,
            row["label"],
            compiled["temp_bytes"],
            report.temp_bytes,
            compiled["traffic_bytes"],
            report.hbm_traffic_bytes,
            compiled["matmuls"],
            report.matmuls_executed,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="measured results, the same jax")
    parser.add_argument("--device", required=True, help="the device that they are of: h100")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    options = parser.parse_args(argv)
    records = [json.loads(path.read_text()) for path in options.files]
    for path, record in zip(options.files, records, strict=True):
        if record["versions"]["jax"] != jax.__version__:
            print(
                f"{path} is of jax {record['versions']['jax']}, this is {jax.__version__}",
                file=sys.stderr,
            )
            return 2
    measured = {(row["group"], row["label"]): row for record in records for row in record["rows"]}
    rows: list[Pair] = []
    for pair in pairs(list(measured.values()), options.device):
        rows.append(pair)
        print(
            f"{pair.group:15} {pair.label:48} {pair.attached_temp_bytes / MIB:9.1f} "
            f"{pair.absent_temp_bytes / MIB:9.1f} MiB {pair.error:+7.1%}  "
            f"{pair.attached_traffic_bytes / GIB:7.2f} {pair.absent_traffic_bytes / GIB:7.2f} GiB",
            flush=True,
        )
        if options.json:
            header = {"jax": jax.__version__, "device": options.device}
            written = {**header, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(written, indent=1) + "\n")
    close = sum(abs(pair.error) <= 0.001 for pair in rows)
    worst = max((abs(pair.error) for pair in rows), default=0.0)
    print(f"{len(rows)} programs, {close} within 0.1 %, the worst off by {worst:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
