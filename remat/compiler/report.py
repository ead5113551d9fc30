"""`CompileReport`: what the compiler says about one program, as plain data. No jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from remat.compiler.alive import AtPeak, alive_at_peak
from remat.compiler.hlo import on_chip_space, parse_module
from remat.compiler.kernels import Kernel

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What the compiler says about one program. Sizes in bytes; per device, per call.

    Attributes:
        device: ``"cpu"``, ``"h200"``, ..., or the kind of the attached device.
        is_attached: whether the device is there; if not, nothing was tuned on it.
        jax_version: that compiled it.
        temp_bytes: everything that is neither argument nor result, at its peak.
        argument_bytes: of all arguments (of the kept ones: XLA drops those that are not used).
        output_bytes: of all results.
        alias_bytes: results that live in donated arguments.
        host_temp_bytes: temporaries in host memory (offloaded values).
        kernel_count: kernels in the program, each counted once.
        kernels_executed: kernels run per call, loops included.
        hbm_traffic_bytes: device memory read and written per call, loops included.
        host_traffic_bytes: host memory read and written per call, loops included.
        matmuls_executed: matrix multiplications per call, loops included.
        convolutions_executed: convolutions per call, loops included.
        roofline_seconds: estimate per call, summed over kernels of the longer of matrix flops at
            peak rate and traffic at peak bandwidth; None if the device's rates are not known.
        compile_seconds: wall time of tracing, lowering and compiling.
        compiler_options: that it was compiled with.
        unknown: what could not be known, and how it was counted.
        kernels: in schedule order.
        hlo_text: the optimised program.
    """

    device: str
    is_attached: bool
    jax_version: str
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    host_temp_bytes: int
    kernel_count: int
    kernels_executed: int
    hbm_traffic_bytes: int
    host_traffic_bytes: int
    matmuls_executed: int
    convolutions_executed: int
    roofline_seconds: float | None
    compile_seconds: float
    compiler_options: dict[str, Any] = dataclasses.field(hash=False)
    unknown: tuple[str, ...]
    kernels: tuple[Kernel, ...] = dataclasses.field(repr=False)
    hlo_text: str = dataclasses.field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Device memory of the whole call: arguments + results - aliased + temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def top_kernels(self, n: int = 20) -> tuple[Kernel, ...]:
        """The `n` kernels that move most device memory per call, largest first."""
        return tuple(sorted(self.kernels, key=lambda k: -k.traffic_bytes)[:n])

    def kernel_table(self, n: int = 20) -> str:
        """A printable table of `top_kernels`."""
        rows = [("traffic", "runs", "reads", "writes", "kind", "kernel", "from")]
        for k in self.top_kernels(n):
            sizes = _mib(k.operand_bytes), _mib(k.result_bytes)
            name = (k.kind, k.name, k.op_name or "")
            rows.append((_mib(k.traffic_bytes), str(k.trip_count), *sizes, *name))
        return _aligned(rows)

    def at_peak(self) -> AtPeak:
        """What is alive where the program needs most memory, read off its text: what XLA keeps, and what it adds.

        The sum is near `temp_bytes` and not equal to it; see `remat.compiler.alive`.
        """
        return alive_at_peak(parse_module(self.hlo_text, on_chip_space(self.device)))

    def peak_table(self, n: int = 20) -> str:
        """A printable table of the `n` largest arrays of `at_peak`; those that XLA adds come from nowhere."""
        found = self.at_peak()
        rows = [("bytes", "array", "made by", "in", "from")]
        for a in found.arrays[:n]:
            rows.append((_mib(a.nbytes), a.label, a.opcode, "/".join(a.loops), a.op_name or ""))
        rest = sum(a.nbytes for a in found.arrays[n:])
        rows += [(_mib(rest), f"{len(found.arrays) - n} more", "", "", "")] if rest else []
        return f"{_mib(found.nbytes)} alive at {'/'.join(found.at)}\n{_aligned(rows)}"

    def to_dict(self, include_kernels: bool = True) -> dict[str, Any]:
        """Plain data for JSON, without the program text.

        Args:
            include_kernels: also the list of kernels.
        """
        left_out = {"hlo_text", "kernels", "compiler_options", "unknown"}
        names = [f.name for f in dataclasses.fields(self) if f.name not in left_out]
        record = {name: getattr(self, name) for name in names}
        record["total_bytes"] = self.total_bytes
        record["compiler_options"] = dict(self.compiler_options)
        record["unknown"] = list(self.unknown)
        if include_kernels:
            record["kernels"] = [
                {**dataclasses.asdict(kernel), "traffic_bytes": kernel.traffic_bytes}
                for kernel in self.kernels
            ]
        return record

    def to_json(self, include_kernels: bool = True) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(include_kernels), indent=2)

    def __str__(self) -> str:
        lines = [f"{name:<22} {value}" for name, value in _rows(self)]
        lines += [f"{'unknown':<22} {self.unknown[0]}"] if self.unknown else []
        lines += [f"{'':<22} {note}" for note in self.unknown[1:]]
        return "\n".join(lines)


def _rows(report: CompileReport) -> list[tuple[str, str]]:
    place = "attached" if report.is_attached else "not attached"
    seconds = report.roofline_seconds
    return [
        ("device", f"{report.device} ({place}), jax {report.jax_version}"),
        ("temp", _mib(report.temp_bytes)),
        ("arguments", _mib(report.argument_bytes)),
        ("results", f"{_mib(report.output_bytes)}, {_mib(report.alias_bytes)} of it aliased"),
        ("total", _mib(report.total_bytes)),
        ("temp on host", _mib(report.host_temp_bytes)),
        ("memory traffic", _mib(report.hbm_traffic_bytes) + " per call"),
        ("host traffic", _mib(report.host_traffic_bytes) + " per call"),
        ("kernels", f"{report.kernels_executed} run, {report.kernel_count} in the program"),
        ("matmuls", str(report.matmuls_executed)),
        ("convolutions", str(report.convolutions_executed)),
        ("roofline (estimate)", "unknown" if seconds is None else f"{seconds * 1e3:.3f} ms"),
        ("compile time", f"{report.compile_seconds:.2f} s"),
    ]


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in cells)


def _mib(count_bytes: int) -> str:
    if count_bytes < _MIB:
        return f"{count_bytes} B"
    return f"{count_bytes / _MIB:.1f} MiB"
