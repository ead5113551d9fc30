"""What a kernel reads and writes, on hand-counted instructions. No jax here."""

from __future__ import annotations

from remat.compiler.hlo import parse_module
from remat.compiler.kernels import Kernel, find_kernels


def kernels_of(text: str) -> dict[str, Kernel]:
    kernels, _ = find_kernels(parse_module(text))
    return {kernel.name: kernel for kernel in kernels}


def entry(lines: str, others: str = "") -> str:
    """A scheduled module of these instructions."""
    return f"HloModule m, is_scheduled=true\n\n{others}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"


def fusion_kernel(body: str, params: str, operands: str, result: str) -> Kernel:
    """The one fusion of a module, named ``f``; `body` is its computation."""
    others = f"%fused ({params}) -> f32[] {{\n{body}\n}}\n"
    names = operands.split("; ")
    lines = [f"  %o{i} = {shape} parameter({i})" for i, shape in enumerate(names)]
    arguments = ", ".join(f"%o{i}" for i in range(len(names)))
    lines.append(f"  ROOT %f = {result} fusion({arguments}), kind=kLoop, calls=%fused")
    return kernels_of(entry("\n".join(lines), others))["f"]


def test_slice_behind_elementwise_operations_counts_as_the_slice() -> None:
    body = """
  %p = bf16[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %c = f32[10,64]{1,0} convert(%p)
  ROOT %s = f32[1,64]{1,0} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={1,64}"""
    kernel = fusion_kernel(body, "", "bf16[10,64]{1,0}; s32[]", "f32[1,64]{1,0}")
    assert (kernel.operand_bytes, kernel.result_bytes) == (64 * 2 + 4, 64 * 4)


def test_operand_that_is_also_read_in_full_counts_in_full() -> None:
    body = """
  %p = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,64]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,64}
  %n = f32[10,64]{1,0} negate(%p)
  ROOT %t = (f32[1,64]{1,0}, f32[10,64]{1,0}) tuple(%s, %n)"""
    result = "(f32[1,64]{1,0}, f32[10,64]{1,0})"
    kernel = fusion_kernel(body, "", "f32[10,64]{1,0}; s32[]", result)
    assert (kernel.operand_bytes, kernel.result_bytes) == (2560 + 4, 256 + 2560)


def test_two_slices_of_one_operand_add_up() -> None:
    body = """
  %p = f32[10,64]{1,0} parameter(0)
  %a = f32[1,64]{1,0} slice(%p), slice={[0:1], [0:64]}
  %b = f32[1,64]{1,0} slice(%p), slice={[1:2], [0:64]}
  ROOT %s = f32[1,64]{1,0} add(%a, %b)"""
    kernel = fusion_kernel(body, "", "f32[10,64]{1,0}", "f32[1,64]{1,0}")
    assert (kernel.operand_bytes, kernel.result_bytes) == (512, 256)


def test_updates_in_place_as_members_of_a_tuple() -> None:
    body = """
  %p = f32[10,64]{1,0} parameter(0)
  %q = f32[10,64]{1,0} parameter(1)
  %u = f32[1,64]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %a = f32[10,64]{1,0} dynamic-update-slice(%p, %u, %i, %i)
  %b = f32[10,64]{1,0} dynamic-update-slice(%q, %u, %i, %i)
  %c = f32[640]{0} bitcast(%b)
  ROOT %t = (f32[10,64]{1,0}, f32[640]{0}) tuple(%a, %c)"""
    operands = "f32[10,64]{1,0}; f32[10,64]{1,0}; f32[1,64]{1,0}; s32[]"
    kernel = fusion_kernel(body, "", operands, "(f32[10,64]{1,0}, f32[640]{0})")
    assert (kernel.operand_bytes, kernel.result_bytes) == (256 + 4, 512)


def test_accumulating_update_reads_and_writes_one_slice() -> None:
    body = """
  %p = f32[10,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %s = f32[1,64]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,64}
  %a = f32[1,64]{1,0} add(%s, %u)
  ROOT %d = f32[10,64]{1,0} dynamic-update-slice(%p, %a, %i, %i)"""
    kernel = fusion_kernel(body, "", "f32[10,64]{1,0}; f32[1,64]{1,0}; s32[]", "f32[10,64]{1,0}")
    assert (kernel.operand_bytes, kernel.result_bytes) == (512 + 4, 256)


def test_update_that_is_not_in_place_is_read_and_written_in_full() -> None:
    body = """
  %p = f32[10,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %d = f32[10,64]{1,0} dynamic-update-slice(%p, %u, %i, %i)
  ROOT %n = f32[10,64]{1,0} negate(%d)"""
    kernel = fusion_kernel(body, "", "f32[10,64]{1,0}; f32[1,64]{1,0}; s32[]", "f32[10,64]{1,0}")
    assert (kernel.operand_bytes, kernel.result_bytes) == (2560 + 256 + 4, 2560)


def test_update_of_fresh_zeros_writes_the_whole_array() -> None:
    body = """
  %z = f32[] constant(0)
  %b = f32[10,64]{1,0} broadcast(%z), dimensions={}
  %u = f32[1,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %d = f32[10,64]{1,0} dynamic-update-slice(%b, %u, %i, %i)"""
    kernel = fusion_kernel(body, "", "f32[1,64]{1,0}; s32[]", "f32[10,64]{1,0}")
    assert (kernel.operand_bytes, kernel.result_bytes) == (256 + 4, 2560)


def test_fusion_in_a_fusion_counts_at_the_outer_level() -> None:
    others = """
%leaf (p: f32[10,64], i: s32[]) -> f32[1,64] {
  %p = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,64]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,64}
}
%fused (p: f32[10,64], i: s32[]) -> f32[1,64] {
  %p = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,64]{1,0} fusion(%p, %i), kind=kLoop, calls=%leaf
  ROOT %n = f32[1,64]{1,0} negate(%s)
}
"""
    lines = """
  %x = f32[10,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %f = f32[1,64]{1,0} fusion(%x, %k), kind=kLoop, calls=%fused
"""
    (kernel,) = kernels_of(entry(lines, others)).values()
    assert (kernel.operand_bytes, kernel.result_bytes) == (256 + 4, 256)


def test_bare_slices_updates_gathers_and_scatters() -> None:
    lines = """
  %x = f32[10,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %ix = s32[3]{0} parameter(3)
  %v = f32[3,64]{1,0} parameter(4)
  %ds = f32[1,64]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,64}
  %dus = f32[10,64]{1,0} dynamic-update-slice(%x, %u, %i, %i)
  %g = f32[3,64]{1,0} gather(%x, %ix), offset_dims={1}
  %sc = f32[10,64]{1,0} scatter(%dus, %ix, %v), to_apply=%add
  ROOT %twice = f32[10,64]{1,0} multiply(%sc, %sc)
"""
    kernels = kernels_of(entry(lines))
    moved = {name: (k.operand_bytes, k.result_bytes) for name, k in kernels.items()}
    assert moved == {
        "ds": (256 + 4, 256),
        "dus": (256 + 4, 256),
        "g": (3 * 256 + 12, 3 * 256),
        "sc": (2 * 3 * 256 + 12, 3 * 256),
        "twice": (2560, 2560),
    }


def test_library_calls() -> None:
    lines = """
  %a = bf16[128,64]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  %x = bf16[8,32,32,64]{3,2,1,0} parameter(2)
  %k = bf16[128,3,3,64]{3,2,1,0} parameter(3)
  %mm = (bf16[128,32]{1,0}, s8[33554432]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %cv = (bf16[8,32,32,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %y = bf16[8,32,32,128]{3,2,1,0} get-tuple-element(%cv), index=0
  %dx = (bf16[8,32,32,64]{3,2,1,0}, u8[4096]{0}) custom-call(%y, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %dk = (bf16[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %al = f32[64]{0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %my = f32[64]{0} custom-call(%al), custom_call_target="mine"
"""  # noqa: E501
    kernels, notes = find_kernels(parse_module(entry(lines)))
    by_name = {kernel.name: kernel for kernel in kernels}
    conv_flops = 2 * (8 * 32 * 32 * 128) * (3 * 3 * 64)
    assert by_name["mm"].heavy_flops == 2 * 128 * 64 * 32
    assert (by_name["mm"].operand_bytes, by_name["mm"].result_bytes) == (16384 + 4096, 8192)
    assert [by_name[n].heavy_flops for n in ("cv", "dx", "dk")] == [conv_flops] * 3
    assert [by_name[n].kind for n in ("mm", "cv", "my")] == ["matmul", "convolution", "host-copy"]
    assert "al" not in by_name
    assert (by_name["my"].host_bytes, by_name["my"].result_bytes) == (256, 256)
    assert notes == (
        "traffic and scratch space inside cuBLAS and cuDNN calls",
        "traffic, flops, matmuls and scratch space inside the library call mine",
    )


def test_convolution_flops_leave_out_the_zeros_of_a_dilated_input() -> None:
    lines = """
  %x = f32[1,8,8,4]{3,2,1,0} parameter(0)
  %k = f32[3,3,4,16]{3,2,1,0} parameter(1)
  ROOT %c = f32[1,16,16,16]{3,2,1,0} convolution(%x, %k), window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2}, dim_labels=b01f_01io->b01f
"""  # noqa: E501
    assert kernels_of(entry(lines))["c"].heavy_flops == 2 * (16 * 16 * 16) * (9 * 4) // 4


def test_offloaded_slices_are_host_bytes() -> None:
    others = """
%store (p: f32[12,64], u: f32[1,64], i: s32[]) -> f32[12,64] {
  %p = f32[12,64]{1,0:S(5)} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[12,64]{1,0:S(5)} dynamic-update-slice(%p, %u, %i, %i)
}
"""
    lines = """
  %x = f32[12,64]{1,0:S(5)} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %s = ((f32[12,64]{1,0:S(5)}, f32[1,64]{1,0}, s32[]), f32[12,64]{1,0:S(5)}, u32[]) fusion-start(%x, %u, %i), kind=kCustom, calls=%store
  %e = f32[12,64]{1,0:S(5)} fusion-done(%s)
  %cs = (f32[1,64]{1,0:S(5)}, f32[1,64]{1,0}, u32[]) copy-start(%u)
  ROOT %cd = f32[1,64]{1,0:S(5)} copy-done(%cs)
"""  # noqa: E501
    kernels = kernels_of(entry(lines, others))
    moved = {n: (k.kind, k.operand_bytes, k.result_bytes, k.host_bytes) for n, k in kernels.items()}
    assert moved == {"s": ("host-copy", 260, 0, 256), "cs": ("host-copy", 256, 0, 256)}


def test_calls_are_entered_and_the_dearest_branch_is_taken() -> None:
    others = """
%small (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %little = f32[64]{0} negate(%x)
}
%large (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %once = f32[64]{0} negate(%x)
  ROOT %again = f32[64]{0} negate(%once)
}
"""
    lines = """
  %x = f32[64]{0} parameter(0)
  %p = pred[] parameter(1)
  %called = f32[64]{0} call(%x), to_apply=%small
  ROOT %c = f32[64]{0} conditional(%p, %x, %called), true_computation=%large, false_computation=%small
"""
    kernels, notes = find_kernels(parse_module(entry(lines, others)))
    assert [kernel.name for kernel in kernels] == ["little", "once", "again"]
    assert len(notes) == 1 and "branch" in notes[0]


def test_collectives_and_asynchronous_ones() -> None:
    lines = """
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  %b = f32[64]{0} all-reduce-done(%a)
  %g = (f32[64]{0}, f32[128]{0}) all-gather-start(%b), dimensions={0}
  ROOT %h = f32[128]{0} all-gather-done(%g)
"""
    kernels = kernels_of(entry(lines))
    moved = {name: (k.kind, k.operand_bytes, k.result_bytes) for name, k in kernels.items()}
    assert moved == {"a": ("collective", 256, 256), "g": ("collective", 256, 512)}
