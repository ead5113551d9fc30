"""What is alive where a compiled program needs most memory, by hand and beside XLA's own number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.compiler.alive import AtPeak, alive_at_peak
from remat.compiler.hlo import parse_module

CHAIN = """\
HloModule chain, is_scheduled=true

%update (p0: f32[8,256], p1: f32[256], p2: s32[]) -> f32[8,256] {
  %p0 = f32[8,256]{1,0} parameter(0)
  %p1 = f32[256]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,256]{1,0} bitcast(%p1)
  ROOT %dus = f32[8,256]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}

%two (p0: f32[256]) -> (f32[256], f32[1024]) {
  %p0 = f32[256]{0} parameter(0)
  %twice = f32[256]{0} add(%p0, %p0), metadata={op_name="jit(f)/add"}
  %wide = f32[1024]{0} pad(%p0, %p0), metadata={op_name="jit(f)/pad"}
  ROOT %both = (f32[256]{0}, f32[1024]{0}) tuple(%twice, %wide)
}

ENTRY %main (x: f32[256], i: s32[]) -> f32[8,256] {
  %x = f32[256]{0} parameter(0)
  %i = s32[] parameter(1)
  %made = (f32[256]{0}, f32[1024]{0}) fusion(%x), kind=kLoop, calls=%two
  %twice = f32[256]{0} get-tuple-element(%made), index=0
  %wide = f32[1024]{0} get-tuple-element(%made), index=1
  %seen = f32[4,256]{1,0} bitcast(%wide)
  %rows = f32[256]{0} reduce(%seen), metadata={op_name="jit(f)/reduce"}
  %sum = f32[256]{0} add(%rows, %twice)
  %stack = f32[8,256]{1,0} broadcast(%i)
  ROOT %out = f32[8,256]{1,0} fusion(%stack, %sum, %i), kind=kLoop, calls=%update
}
"""


def labels(found: AtPeak) -> list[tuple[str, str, str | None]]:
    return [(a.label, a.opcode, a.op_name) for a in found.arrays]


def test_arrays_live_until_they_are_read_under_any_name() -> None:
    found = alive_at_peak(parse_module(CHAIN))
    # The result of the fusion, of which one part is seen through a bitcast, and its sum. What is written over is
    # the result itself: it is the caller's.
    assert found.at == ("rows",) and found.nbytes == 4096 + 1024 + 1024
    assert labels(found) == [
        ("f32[1024]", "pad", "jit(f)/pad"),
        ("f32[256]", "add", "jit(f)/add"),
        ("f32[256]", "reduce", "jit(f)/reduce"),
    ]


def test_nothing_is_alive_in_a_program_of_arguments() -> None:
    text = "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[4]) -> f32[4] {\n"
    found = alive_at_peak(parse_module(text + "  ROOT %x = f32[4]{0} parameter(0)\n}\n"))
    assert found.nbytes == 0 and not found.arrays


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight), None

    return jnp.sum(jax.lax.scan(step, x, weights)[0] ** 2)


def unrolled(weights: jax.Array, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("loss", [scanned, unrolled])
@pytest.mark.parametrize("policy", [None, "min_cut"])
def test_the_sum_is_near_what_xla_says(loss: Any, policy: str | None) -> None:
    weights = jax.ShapeDtypeStruct((12, 256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    wrapped = remat.checkpoint(loss, remat_policy=policy)
    report = remat.compile_report(jax.grad(wrapped), weights, x, device="h200")
    found = report.at_peak()
    # What lies between two arrays of XLA's, and what shares one.
    assert 0.8 <= found.nbytes / report.temp_bytes <= (1.1 if loss is scanned else 1.3)
    largest = found.arrays[0].nbytes
    stack_bytes = 12 * 1024 * 256 * 4
    assert largest == stack_bytes if loss is scanned else largest < stack_bytes
    assert sum(a.nbytes for a in found.arrays) == found.nbytes
    assert "alive at" in report.peak_table(3) and "more" in report.peak_table(1)
