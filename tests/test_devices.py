"""The device table. No jax here."""

from __future__ import annotations

import pytest

from remat.core.devices import DEVICES, GPU_NAMES, device_of_kind, get_device
from remat.core.errors import CompileError


def test_device_table() -> None:
    assert GPU_NAMES == ("a100", "h100", "h200", "b200")
    for name in GPU_NAMES:
        text = get_device(name.upper()).target_config
        assert text.count("{") == text.count("}")
        assert f"memory_bandwidth: {int(DEVICES[name].memory_bytes_per_second)}" in text
    versions = {n: d.gpu.compute_capability for n, d in DEVICES.items() if d.gpu is not None}
    assert versions == {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}


def test_device_lookup_errors() -> None:
    with pytest.raises(CompileError, match=r"'h20'; expected one of cpu, .*did you mean 'h200'"):
        get_device("h20")
    with pytest.raises(CompileError, match="a100, h100"):
        _ = get_device("cpu").target_config


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", "cpu"),
    ],
)
def test_device_of_kind(kind: str, expected: str | None) -> None:
    device = device_of_kind(kind)
    assert (device.name if device else None) == expected


def test_peak_rate_by_type() -> None:
    h100 = get_device("h100")
    rates = [h100.matmul_flops_per_second(t) for t in ("bf16", "f16", "f8e4m3fn", "f32", "f64")]
    assert rates == [989.4e12, 989.4e12, 989.4e12, 494.7e12, 67e12]
