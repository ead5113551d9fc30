"""TPUs that are not there: reading their programs, and, where libtpu is installed, what XLA says for each chip."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
import remat.compiler.tpu as tpu_module
import remat.lower.confirm as confirm_module
from remat.compiler.alive import alive_at_peak
from remat.compiler.compile import compile_report
from remat.compiler.hlo import on_chip_space, parse_module
from remat.compiler.kernels import Kernel, find_kernels
from remat.compiler.targets import Target, compile_for
from remat.core.devices import TPU_NAMES, get_device
from remat.core.errors import CompileError, DeviceMemoryError
from remat.policies import Ilp
from remat.tools.terminal import attached

ROOT = Path(__file__).parent.parent
BF16 = jnp.bfloat16


def kernels_of(text: str, device: str) -> dict[str, Kernel]:
    kernels, _ = find_kernels(parse_module(text, on_chip_space(device)))
    return {kernel.name: kernel for kernel in kernels}


def entry(lines: str) -> str:
    return f"HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"


# --- what it refuses; no libtpu ---------------------------------------------------------------------


class Refused:
    """A lowered program that XLA:TPU makes nothing of, in the words of libtpu 0.0.42."""

    def compile(self, compiler_options: object) -> Any:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (41.26G) "
            "exceeds available HBM (15.75G)."
        )


def test_what_is_larger_than_the_chip() -> None:
    target = Target("v5e", "tpu", False, get_device("v5e"), None)
    lowered: Any = Refused()
    with pytest.raises(
        DeviceMemoryError, match=r"needs 41\.26 GiB .* v5e has 15\.75 GiB"
    ) as caught:
        compile_for(lowered, target, {})
    assert caught.value.temp_bytes == round(41.26 * 2**30)


# --- the text of its programs; no libtpu ------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "space"),
    [("v5e", 1), ("v6e", 1), ("TPU v4", 1), ("TPU v7x", 1), ("h200", None), ("cpu", None)],
)
def test_memory_on_the_chip(device: str, space: int | None) -> None:
    assert on_chip_space(device) == space


ON_CHIP = entry("""
  %x = f32[64]{0} parameter(0)
  %near = f32[64]{0:T(128)S(1)} negate(%x)
  %twice = f32[64]{0:T(128)S(1)} add(%near, %near)
  ROOT %out = f32[64]{0} exponential(%twice)
""")


@pytest.mark.parametrize(
    ("device", "moved", "alive_bytes"),
    [
        ("v5e", {"near": (256, 0), "twice": (0, 0), "out": (0, 256)}, 0),
        ("h200", {"near": (256, 256), "twice": (256, 256), "out": (256, 256)}, 512),
    ],
)
def test_what_lies_on_a_tpu_is_no_device_memory(
    device: str, moved: dict[str, tuple[int, int]], alive_bytes: int
) -> None:
    """On GPUs the same number means device memory of collectives."""
    kernels = kernels_of(ON_CHIP, device)
    assert {name: (k.operand_bytes, k.result_bytes) for name, k in kernels.items()} == moved
    assert alive_at_peak(parse_module(ON_CHIP, on_chip_space(device))).nbytes == alive_bytes


def test_slices_fetched_in_advance() -> None:
    lines = """
  %x = f32[12,64]{1,0} parameter(0)
  %start = ((f32[12,64]{1,0}), f32[1,64]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%x), slice={[3:4], [0:64]}
  %row = f32[1,64]{1,0:S(1)} slice-done(%start)
  %same = f32[1,64]{1,0:S(1)} custom-call(%row), custom_call_target="ConcatBitcast"
  ROOT %out = f32[1,64]{1,0} negate(%same)
"""
    kernels = kernels_of(entry(lines), "v6e")
    assert {name: k.traffic_bytes for name, k in kernels.items()} == {"start": 256, "out": 256}


@pytest.mark.parametrize(
    ("attributes", "is_matmul"),
    [
        ('dim_labels=bf_io->bf, metadata={op_name="jit(f)/custom"}', True),
        ('window={size=1}, dim_labels=0bf_0io->0bf, metadata={op_name="jit(f)/dot_general"}', True),
        ('window={size=1}, dim_labels=b0f_0io->b0f, metadata={op_name="jit(f)/conv"}', False),
    ],
)
def test_matmuls_are_convolutions_on_tpu(attributes: str, is_matmul: bool) -> None:
    shape = "8,128" if "bf_io" in attributes else "8,1,128"
    kernel = "128,32" if "bf_io" in attributes else "1,128,32"
    lines = f"""
  %x = bf16[{shape}] parameter(0)
  %w = bf16[{kernel}] parameter(1)
  ROOT %y = bf16[{shape.replace("128", "32")}] convolution(%x, %w), {attributes}
"""
    found = kernels_of(entry(lines), "v5e")["y"]
    assert (found.matmuls, found.convolutions) == (int(is_matmul), int(not is_matmul))


# --- without libtpu, and where it does not know the chip ----------------------------------------------


def test_without_libtpu_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_module, "is_tpu_compiler_there", lambda: False)
    tpu_module.described_tpu.cache_clear()
    with pytest.raises(CompileError, match=r"'v5e' needs .*libtpu.*jax\[tpu\]==") as caught:
        compile_report(lambda x: x * 2, jnp.ones(4), device="v5e")
    assert jax.__version__ in str(caught.value)


def test_a_compiler_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such chip")

    monkeypatch.setattr(tpu_module, "is_tpu_compiler_there", lambda: True)
    monkeypatch.setattr(tpu_module.topologies, "get_topology_desc", fails)
    tpu_module.described_tpu.cache_clear()
    before = dict(os.environ)
    with pytest.raises(CompileError, match="RuntimeError: no such chip"):
        compile_report(lambda x: x * 2, jnp.ones(4), device="v6e")
    assert dict(os.environ) == before


def test_a_budget_for_a_tpu_says_that_it_was_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm_module, "is_tpu_compiler_there", lambda: False)

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    args = (
        [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4,
        jax.ShapeDtypeStruct((256, 64), jnp.float32),
    )
    policy = Ilp(method="search", effort=200, device="v5e")
    plan = remat.plan(loss, *args, remat_policy=policy, budget=0.8, confirm="auto")
    assert plan.confirmed is None
    assert "XLA's compiler for v5e is not installed (jax[tpu])" in plan.notes[-1]


# --- XLA's TPU compiler -------------------------------------------------------------------------------


@pytest.mark.tpu_compile
@pytest.mark.parametrize("device", TPU_NAMES)
def test_every_tpu_compiles(device: str) -> None:
    n = 4096
    x = jax.ShapeDtypeStruct((n, n), BF16)
    report = compile_report(lambda x, y: x @ y, x, x, device=device)
    assert (report.device, report.is_attached, report.matmuls_executed) == (device, False, 1)
    assert report.hbm_traffic_bytes == 3 * n * n * 2
    known = get_device(device)
    matmul_seconds = 2 * n**3 / known.matmul_flops_per_second("bf16")
    in_advance_seconds = (
        n * n * 2 / known.memory_bytes_per_second
    )  # at most one operand, fetched into VMEM
    assert report.roofline_seconds is not None
    most_seconds = matmul_seconds + in_advance_seconds
    rounding = 1e-6
    assert matmul_seconds <= report.roofline_seconds <= most_seconds * (1 + rounding)
    assert any("VMEM" in note for note in report.unknown)


@pytest.mark.tpu_compile
def test_batched_matmuls_and_convolutions_are_told_apart() -> None:
    def batched(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bjk->bik", x, y)

    x = jax.ShapeDtypeStruct((8, 512, 512), BF16)
    report = compile_report(batched, x, x, device="v5e")
    assert (report.matmuls_executed, report.convolutions_executed) == (1, 0)
    assert sum(kernel.heavy_flops for kernel in report.kernels) == 2 * 8 * 512**3

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    image, kernel = (
        jax.ShapeDtypeStruct((8, 34, 34, 128), BF16),
        jax.ShapeDtypeStruct((3, 3, 128, 128), BF16),
    )
    report = compile_report(convolved, image, kernel, device="v5e")
    assert (report.matmuls_executed, report.convolutions_executed) == (0, 1)
    assert sum(kernel.heavy_flops for kernel in report.kernels) == 2 * 8 * 32 * 32 * 128 * 128 * 9


@pytest.mark.tpu_compile
def test_remat_shows_in_memory_and_matmuls_on_an_absent_tpu() -> None:
    def layer(x: jax.Array, w: Any) -> jax.Array:
        return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    def loss(layer: Callable[..., Any], weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    weights = [
        (jax.ShapeDtypeStruct((1024, 4096), BF16), jax.ShapeDtypeStruct((4096, 1024), BF16))
    ] * 6
    x = jax.ShapeDtypeStruct((16384, 1024), BF16)

    def report(layer: Callable[..., Any]) -> remat.CompileReport:
        gradient = jax.grad(loss, argnums=1)
        return compile_report(gradient, layer, weights, x, device="v5e", static_argnums=0)

    none, full = report(layer), report(remat.checkpoint(layer, remat_policy="full"))
    assert full.temp_bytes < 0.7 * none.temp_bytes
    assert full.matmuls_executed > none.matmuls_executed == 6 * 6 - 1


@pytest.mark.tpu_compile
def test_works_where_jax_was_started_without_naming_a_platform() -> None:
    program = """
import jax, jax.numpy as jnp
y = jnp.ones(4) + 1
from remat.compiler.compile import compile_report
assert compile_report(lambda x: x * 2, y, device="v5e").hbm_traffic_bytes > 0
assert float((y * 2).sum()) == 16.0
"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# --- a machine with libtpu and no TPU -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["accel0", "0x1ae0", "0x8086", "nothing"])
def test_a_tpu_is_found_by_its_files(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(attached, "_TPU_FILES", (str(tmp_path / "accel*"),))
    monkeypatch.setattr(attached, "_PCI_VENDORS", str(tmp_path / "*" / "vendor"))
    if what.startswith("0x"):
        (tmp_path / "device").mkdir()
        (tmp_path / "device" / "vendor").write_text(f"{what}\n")
    elif what != "nothing":
        (tmp_path / what).touch()
    assert attached.has_tpu_device() == (what in ("accel0", "0x1ae0"))
