"""The devices we know: what they can do, and how XLA is told about one that is not there.

Pure data, no jax. Numbers are the vendor's public data sheets, dense (no sparsity), boost clock;
reaching 60 to 80 % of them is normal. `Device.target_config` is the text of XLA's
``GpuTargetConfigProto``, with which its GPU compiler runs on a machine without a GPU. XLA's TPU compiler knows
the chips by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from remat.core.errors import CompileError, nearest, shown

# bf16 matrix operations per float32 operation elsewhere, of the data sheets: A100 312 / 19.5 = 16.0, H100 and H200
# 989 / 67 = 14.8. (B200 about 28: its element-wise kernels are taken for faster than they are, which matters to
# those with more than some dozen operations per byte. The others are bound by memory.)
_MATRIX_TO_VECTOR = 16

_TARGET_TEMPLATE = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core_bytes}
  threads_per_core_limit: 2048
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {gpu.l2_cache_bytes}
  clock_rate_ghz: {gpu.clock_rate_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.description}"
"""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's GPU compiler wants to know about a chip, beyond `Device`."""

    description: str
    compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    shared_memory_per_core_bytes: int
    shared_memory_per_block_optin_bytes: int
    l2_cache_bytes: int


@dataclasses.dataclass(frozen=True)
class Tpu:
    """How XLA's TPU compiler is asked for one chip.

    Attributes:
        topology: what XLA calls a slice of one chip.
        kinds: jax's ``device.device_kind`` of it, lower case.
    """

    topology: str
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak rates and sizes of one device.

    Attributes:
        name: how users name it.
        bf16_flops_per_second: dense matrix multiplication in bf16 or f16.
        f32_flops_per_second: dense matrix multiplication of f32 inputs (tf32 on tensor cores).
        f64_flops_per_second: dense matrix multiplication in f64.
        memory_bytes_per_second: main memory bandwidth.
        memory_bytes: main memory size as XLA is told.
        is_nominal: the numbers stand for a class of machines, not for a data sheet.
        gpu: what the GPU compiler needs, None for what is no GPU.
        tpu: what the TPU compiler needs, None for what is no TPU.
    """

    name: str
    bf16_flops_per_second: float
    f32_flops_per_second: float
    f64_flops_per_second: float
    memory_bytes_per_second: float
    memory_bytes: int
    is_nominal: bool = False
    gpu: Gpu | None = None
    tpu: Tpu | None = None

    @property
    def platform(self) -> str:
        """What jax lowers for: ``cuda``, ``tpu`` or ``cpu``."""
        return "cuda" if self.gpu is not None else "tpu" if self.tpu is not None else "cpu"

    @property
    def target_config(self) -> str:
        """XLA's ``GpuTargetConfigProto`` as text.

        Raises:
            CompileError: the device is not a GPU.
        """
        if self.gpu is None:
            raise CompileError(
                f"Device {self.name!r} has no GPU target description; those that have one: "
                f"{', '.join(GPU_NAMES)}."
            )
        major, minor = self.gpu.compute_capability
        return _TARGET_TEMPLATE.format(
            gpu=self.gpu,
            bandwidth=int(self.memory_bytes_per_second),
            memory_bytes=self.memory_bytes,
            major=major,
            minor=minor,
        )

    @property
    def vector_flops_per_second(self) -> float:
        """Peak rate outside of the matrix units."""
        return self.bf16_flops_per_second / _MATRIX_TO_VECTOR

    def matmul_flops_per_second(self, dtype: str) -> float:
        """Peak rate for matrix operands of an HLO type; 8 bit and narrower count as bf16."""
        if dtype in ("f64", "c128"):
            return self.f64_flops_per_second
        if dtype in ("f32", "c64", "tf32"):
            return self.f32_flops_per_second
        return self.bf16_flops_per_second


CPU = Device("cpu", 2e11, 2e11, 1e11, 4e10, 16 * 2**30, is_nominal=True)
A100 = Device(
    "a100", 312e12, 156e12, 19.5e12, 2.039e12, 85_100_068_864,
    gpu=Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 167936, 166912, 41_943_040),
)  # fmt: skip
H100 = Device(
    "h100", 989.4e12, 494.7e12, 67e12, 3.35e12, 84_942_979_072,
    gpu=Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 233472, 232448, 52_428_800),
)  # fmt: skip
H200 = Device(
    "h200", 989.4e12, 494.7e12, 67e12, 4.8e12, 151_397_597_184,
    gpu=Gpu("NVIDIA H200 141GB HBM3e", (9, 0), 132, 128, 1.98, 233472, 232448, 52_428_800),
)  # fmt: skip
B200 = Device(
    "b200", 2250e12, 1125e12, 40e12, 8e12, 191_514_411_008,
    gpu=Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 233472, 232448, 132_644_864),
)  # fmt: skip

# Google's pages of each chip: peak bf16, HBM bandwidth, HBM. By default jax multiplies f32 in one pass of bf16, at
# the rate of bf16. There is no f64 in hardware; its rate is a nominal one.
V5E = Device(
    "v5e", 197e12, 197e12, 1e12, 0.819e12, 16 * 2**30,
    tpu=Tpu("v5e:1x1", ("tpu v5 lite", "tpu v5e")),
)  # fmt: skip
V5P = Device(
    "v5p", 459e12, 459e12, 2e12, 2.765e12, 95 * 2**30,
    tpu=Tpu("v5p:1x1x1", ("tpu v5", "tpu v5p")),
)  # fmt: skip
V6E = Device(
    "v6e", 918e12, 918e12, 4e12, 1.64e12, 32 * 2**30,
    tpu=Tpu("v6e:1x1", ("tpu v6 lite", "tpu v6e")),
)  # fmt: skip

DEVICES: Mapping[str, Device] = {
    device.name: device for device in (CPU, A100, H100, H200, B200, V5E, V5P, V6E)
}
"""Every device by the name users type."""

GPU_NAMES: tuple[str, ...] = tuple(d.name for d in DEVICES.values() if d.gpu is not None)
"""Names of the GPUs that programs can be compiled for without having one."""

TPU_NAMES: tuple[str, ...] = tuple(d.name for d in DEVICES.values() if d.tpu is not None)
"""Names of the TPUs that programs can be compiled for without having one."""


def get_device(name: str, besides: str = "") -> Device:
    """The device of that name (upper or lower case).

    Args:
        name: of a device.
        besides: what the caller takes besides a name, for the error.

    Raises:
        CompileError: no such device; lists the valid names and the nearest match.
    """
    word = name.lower() if isinstance(name, str) else ""
    found = DEVICES.get(word)
    if found is not None:
        return found
    more = f", or {besides}" if besides else ""
    raise CompileError(
        f"Unknown device {shown(name)}; expected one of {', '.join(DEVICES)}{more}{nearest(word, DEVICES)}"
    )


def is_tpu(name: str) -> bool:
    """Whether a name is that of a TPU: one of `DEVICES`, or jax's ``device_kind``."""
    known = DEVICES.get(name)
    return known.tpu is not None if known is not None else name.startswith("TPU ")


def device_of_kind(kind: str) -> Device | None:
    """The table row for jax's ``device.device_kind``, e.g. ``"NVIDIA H100 80GB HBM3"``, if any.

    Variants with other memory (PCIe and NVL cards, the 40 GB A100) are not in the table.
    """
    for device in DEVICES.values():
        if device.tpu is not None and kind.lower() in device.tpu.kinds:
            return device
    words = kind.lower().replace("-", " ").split()
    if {"pcie", "nvl", "40gb", "mig"} & set(words):
        return None
    return next((d for d in DEVICES.values() if d.name in words), None)


@cache
def xla_release() -> tuple[int, ...]:
    """Returns the release of jaxlib, which has the compiler; the newest that is known where there is none."""
    try:
        return tuple(map(int, re.findall(r"\d+", version("jaxlib"))[:3]))
    except PackageNotFoundError:
        return 0, 12, 0
