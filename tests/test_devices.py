"""The device table. No jax here."""

from __future__ import annotations

import pytest

from remat.core.devices import DEVICES, GPU_NAMES, TPU_NAMES, device_of_kind, get_device
from remat.core.errors import CompileError


def test_device_table() -> None:
    assert GPU_NAMES == ("a100", "h100", "h200", "b200")
    for name in GPU_NAMES:
        text = get_device(name.upper()).target_config
        assert text.count("{") == text.count("}")
        assert f"memory_bandwidth: {int(DEVICES[name].memory_bytes_per_second)}" in text
    versions = {n: d.gpu.compute_capability for n, d in DEVICES.items() if d.gpu is not None}
    assert versions == {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}


def test_platforms() -> None:
    assert TPU_NAMES == ("v5e", "v5p", "v6e")
    platforms = {name: device.platform for name, device in DEVICES.items()}
    expected = {"cpu": "cpu"} | dict.fromkeys(GPU_NAMES, "cuda") | dict.fromkeys(TPU_NAMES, "tpu")
    assert platforms == expected
    for name in TPU_NAMES:
        tpu = DEVICES[name].tpu
        assert tpu is not None and tpu.topology.startswith(f"{name}:1x1")


def test_device_lookup_errors() -> None:
    with pytest.raises(CompileError, match=r"'h20'; expected one of cpu, .*did you mean 'h200'"):
        get_device("h20")
    with pytest.raises(CompileError, match=r"'v4e'; .*v6e"):
        get_device("v4e")
    for besides in ("", "None for what is attached"):  # offered where it is taken
        with pytest.raises(CompileError) as caught:
            get_device("h20", besides)
        assert ("v6e, or None for what is attached; did" in str(caught.value)) == bool(besides)
        assert ("None" in str(caught.value)) == bool(besides)
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
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v4", None),
        ("TPU v7x", None),
    ],
)
def test_device_of_kind(kind: str, expected: str | None) -> None:
    device = device_of_kind(kind)
    assert (device.name if device else None) == expected


def test_peak_rate_by_type() -> None:
    h100 = get_device("h100")
    rates = [h100.matmul_flops_per_second(t) for t in ("bf16", "f16", "f8e4m3fn", "f32", "f64")]
    assert rates == [989.4e12, 989.4e12, 989.4e12, 494.7e12, 67e12]
