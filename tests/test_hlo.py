"""Reading HLO text, trip counts, and one loop counted by hand. No jax here."""

from __future__ import annotations

import pytest

from remat.compiler.hlo import element_width_bits, parse_instruction, parse_module, parse_shape
from remat.compiler.kernels import Kernel, find_kernels
from remat.compiler.trip_count import derived_trip_count, known_trip_count
from remat.core.errors import CompileError, RematError

SCAN = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[64,1024]{1,0})->f32[1024]{0}}

FileNames
1 "somewhere.py"

%fused_dynamic_update_slice (param_0: f32[64,1024], param_1.1: s32[], param_2.3: f32[1024]) -> f32[64,1024] {
  %param_0 = f32[64,1024]{1,0} parameter(0), metadata={scheduling_name="param_0"}
  %param_2.3 = f32[1024]{0} parameter(2)
  %constant_1_1 = f32[] constant(2), metadata={op_name="jit(sx)/while/body/closed_call"}
  %mul.0.1 = f32[1024]{0} broadcast(%constant_1_1), dimensions={}
  %mul.1.1 = f32[1024]{0} multiply(%param_2.3, %mul.0.1)
  %bitcast.1.1 = f32[1,1024]{1,0} bitcast(%mul.1.1)
  %param_1.1 = s32[] parameter(1)
  %constant_0_2 = s32[] constant(0)
  ROOT %dus = f32[64,1024]{1,0} dynamic-update-slice(%param_0, %bitcast.1.1, %param_1.1, %constant_0_2)
}

%fused_add (param_0.1: f32[1024], param_1.4: f32[64,1024], param_2.2: s32[]) -> f32[1024] {
  %param_0.1 = f32[1024]{0} parameter(0)
  %param_1.4 = f32[64,1024]{1,0} parameter(1)
  %param_2.2 = s32[] parameter(2)
  %constant_0_1 = s32[] constant(0)
  %ds = f32[1,1024]{1,0} dynamic-slice(%param_1.4, %param_2.2, %constant_0_1), dynamic_slice_sizes={1,1024}
  %bitcast.4 = f32[1024]{0} bitcast(%ds)
  ROOT %add.0.1 = f32[1024]{0} add(%param_0.1, %bitcast.4)
}

%fused_add.1 (param_0.2: s32[]) -> s32[] {
  %param_0.2 = s32[] parameter(0)
  %constant_9_1 = s32[] constant(1)
  ROOT %add.3.1 = s32[] add(%param_0.2, %constant_9_1)
}

%region_0.4 (arg: (s32[], f32[1024], f32[64,1024], f32[64,1024])) -> (s32[], f32[1024], f32[64,1024], /*index=3*/f32[64,1024]) {
  %arg = (s32[], f32[1024]{0}, f32[64,1024]{1,0}, f32[64,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %carry = f32[1024]{0} get-tuple-element(%arg), index=1
  %xs = f32[64,1024]{1,0} get-tuple-element(%arg), index=3
  %ys = f32[64,1024]{1,0} get-tuple-element(%arg), index=2
  %stack = f32[64,1024]{1,0} fusion(%ys, %i, %carry), kind=kLoop, calls=%fused_dynamic_update_slice
  %sum = f32[1024]{0} fusion(%carry, %xs, %i), kind=kLoop, calls=%fused_add, control-predecessors={%stack}, metadata={op_name="jit(sx)/while/body/closed_call/add"}
  %next = s32[] fusion(%i), kind=kLoop, calls=%fused_add.1
  ROOT %tuple.6 = (s32[], f32[1024]{0}, f32[64,1024]{1,0}, f32[64,1024]{1,0}) tuple(%next, %sum, %stack, /*index=3*/%xs)
}

%fused_compare (param_0.3: s32[]) -> pred[] {
  %param_0.3 = s32[] parameter(0)
  %constant_11_1 = s32[] constant(64)
  ROOT %lt.1.1 = pred[] compare(%param_0.3, %constant_11_1), direction=LT
}

%region_1.5 (arg_tuple.3: (s32[], f32[1024], f32[64,1024], f32[64,1024])) -> pred[] {
  %arg_tuple.3 = (s32[], f32[1024]{0}, f32[64,1024]{1,0}, f32[64,1024]{1,0}) parameter(0)
  %gte = s32[] get-tuple-element(%arg_tuple.3), index=0
  ROOT %loop_compare_fusion = pred[] fusion(%gte), kind=kLoop, calls=%fused_compare
}

%fused_broadcast () -> f32[64,1024] {
  %constant_12_1 = f32[] constant(0)
  ROOT %broadcast_in_dim.3.1 = f32[64,1024]{1,0} broadcast(%constant_12_1), dimensions={}
}

%first (param_0.5: f32[64,1024]) -> f32[1,1024] {
  %param_0.5 = f32[64,1024]{1,0} parameter(0)
  ROOT %slice.1.1 = f32[1,1024]{1,0} slice(%param_0.5), slice={[0:1], [0:1024]}
}

ENTRY %main.6 (x.1: f32[64,1024]) -> (f32[1024], f32[64,1024]) {
  %constant_13_0 = s32[] constant(0)
  %copy.11 = s32[] copy(%constant_13_0)
  %x.1 = f32[64,1024]{1,0} parameter(0), sharding={replicated}, frontend_attributes={xla.sdy.sharding="#sdy.sharding<@empty_mesh, [{}, {}]>"}
  %wrapped_slice = f32[1,1024]{1,0} fusion(%x.1), kind=kLoop, calls=%first
  %bitcast.2.0 = f32[1024]{0} bitcast(%wrapped_slice)
  %zeros = f32[64,1024]{1,0} fusion(), kind=kLoop, calls=%fused_broadcast
  %tuple.2 = (s32[], f32[1024]{0}, f32[64,1024]{1,0}, f32[64,1024]{1,0}) tuple(%copy.11, %bitcast.2.0, %zeros, %x.1)
  %while.6 = (s32[], f32[1024]{0}, f32[64,1024]{1,0}, f32[64,1024]{1,0}) while(%tuple.2), condition=%region_1.5, body=%region_0.4, metadata={op_name="jit(sx)/while"}, backend_config={"known_trip_count":{"n":"64"},"known_init_step":{"init":"0","step":"1"},"dynamic_variables":[]}
  %while.8.0 = f32[1024]{0} get-tuple-element(%while.6), index=1
  %while.9.0 = f32[64,1024]{1,0} get-tuple-element(%while.6), index=2
  ROOT %tuple.5.0 = (f32[1024]{0}, f32[64,1024]{1,0}) tuple(%while.8.0, %while.9.0)
}
"""  # noqa: E501
"""What XLA:GPU made of ``scan(lambda c, v: (c + v, c * 2), x[0], x)`` on 64 rows of 1024 floats."""

ROW = 4 * 1024


def kernels_of(text: str) -> dict[str, Kernel]:
    kernels, _ = find_kernels(parse_module(text))
    return {kernel.name: kernel for kernel in kernels}


def entry(lines: str, others: str = "") -> str:
    """A scheduled module of these instructions."""
    return f"HloModule m, is_scheduled=true\n\n{others}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        ("f32[1024,1024]{1,0}", 2**22),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(5)}", 2048),
        ("pred[10]{0}", 10),
        ("s4[7]{0:E(4)}", 4),
        ("u4[8]", 4),
        ("f8e4m3fn[16,2]{1,0}", 32),
        ("f4e2m1fn[3]", 2),
        ("c64[2]", 16),
        ("c128[]", 16),
        ("f64[]", 8),
        ("f32[<=5,2]{1,0}", 40),
        ("f32[0]{0}", 0),
        ("token[]", 0),
        ("()", 0),
        (
            "(s32[], (bf16[4]{0}, pred[3]{0:T(128)}), /*index=2*/f32[2])".replace(
                "/*index=2*/", ""
            ),
            23,
        ),
    ],
)
def test_bytes_of_a_shape(text: str, expected_bytes: int) -> None:
    assert parse_shape(text).bytes == expected_bytes


def test_memory_space_is_read_per_array() -> None:
    shape = parse_shape("(f32[2]{0:S(5)}, f32[3]{0:T(8)S(1)}, f32[4])")
    assert [leaf.memory_space for leaf in shape.leaves()] == [5, 1, 0]


def test_unknown_element_type_says_what_is_expected() -> None:
    with pytest.raises(CompileError, match=r"'qq3'.*bf16"):
        element_width_bits("qq3")


@pytest.mark.parametrize(
    "line",
    [
        "  ROOT %r = f32[2]{0} add(%x, %y)",
        "  ROOT %r = f32[2]{0} add(f32[2]{0} %x, f32[2]{0} %y)",
        "  ROOT r = f32[2]{0} add(x, y)",
        "  ROOT %r = f32[2]{0} add(f32[2] x, /*index=1*/ y)",
    ],
)
def test_operands_with_and_without_types(line: str) -> None:
    instruction = parse_instruction(line + ', metadata={op_name="jit(f)/a, b (c)"}')
    assert instruction.operands == ("x", "y")
    assert instruction.opcode == "add"
    assert instruction.is_root
    assert instruction.op_name == "jit(f)/a, b (c)"


def test_attributes_with_braces_brackets_and_quotes() -> None:
    instruction = parse_instruction(
        '%c = (bf16[8]{0}, u8[0]{0}) custom-call(%a, %b), window={size=3x3 pad=1_1x1_1}, '
        'custom_call_target="__cudnn$convForward", frontend_attributes={s="<@m, [{}, {\\"q\\"}]>"}'
        ', '
        'backend_config={"cfg":{"list":[{"a":1},{"b":"}])"}]},"n":"2"}'
    )  # fmt: skip
    assert instruction.custom_call_target == "__cudnn$convForward"
    assert instruction.attributes["window"] == "{size=3x3 pad=1_1x1_1}"
    assert instruction.backend_config["cfg"]["list"][1]["b"] == "}])"
    assert instruction.backend_config["n"] == "2"


def test_called_computations() -> None:
    instruction = parse_instruction(
        "%c = f32[] conditional(%p, %a, %b), branch_computations={%left, %right.1}"
    )
    assert instruction.called("branch_computations") == ("left", "right.1")
    assert instruction.called("calls") == ()


def test_broken_backend_config_is_no_error() -> None:
    instruction = parse_instruction('%c = f32[] copy(%p), backend_config="abc"')
    assert instruction.backend_config == {}


@pytest.mark.parametrize("line", ["nonsense", "%x = f32[2]{0} ", "%x = f32[2]{0} add(%y"])
def test_unreadable_instruction(line: str) -> None:
    with pytest.raises(RematError):
        parse_instruction(line + " ")


def test_module_structure() -> None:
    module = parse_module(SCAN)
    assert module.name == "jit_f"
    assert module.is_scheduled
    assert module.entry == "main.6"
    assert len(module.computations) == 9
    assert module.entry_computation.root.name == "tuple.5.0"
    body = module.computations["region_0.4"]
    assert [i.name for i in body.users["i"]] == ["stack", "sum", "next"]
    assert body.root.operands == ("next", "sum", "stack", "xs")


def test_constant_over_several_lines() -> None:
    text = entry(
        "  %c = f32[2,2]{1,0} constant({\n { 1, 2 },\n { 3, 4 } })\n  ROOT %r = f32[] copy(%c)"
    )
    computation = parse_module(text).entry_computation
    assert [i.name for i in computation.instructions] == ["c", "r"]


def test_text_without_entry() -> None:
    with pytest.raises(CompileError, match="ENTRY"):
        parse_module("HloModule m\n")


def test_scan_moves_each_slice_once() -> None:
    kernels = kernels_of(SCAN)
    moved = {k.name: (k.operand_bytes, k.result_bytes, k.trip_count) for k in kernels.values()}
    assert moved == {
        "copy.11": (4, 4, 1),
        "wrapped_slice": (ROW, ROW, 1),
        "zeros": (0, 64 * ROW, 1),
        "stack": (ROW + 4, ROW, 64),
        "sum": (2 * ROW + 4, ROW, 64),
        "next": (4, 4, 64),
    }
    total = sum(kernel.traffic_bytes for kernel in kernels.values())
    assert total == 8 + 2 * ROW + 64 * ROW + 64 * (5 * ROW + 16)
    assert kernels["sum"].op_name == "jit(sx)/while/body/closed_call/add"


def test_trip_count_derived_where_it_is_not_written_down() -> None:
    module = parse_module(SCAN.replace("known_trip_count", "other"))
    loop = module.entry_computation.by_name["while.6"]
    assert known_trip_count(loop) is None
    assert derived_trip_count(module, module.entry_computation, loop) == 64
    kernels, notes = find_kernels(module)
    runs = {k.name: k.trip_count for k in kernels}
    assert (runs["sum"], runs["loop_compare_fusion"]) == (64, 65)
    assert notes == ()


@pytest.mark.parametrize(
    ("start", "step", "limit", "direction", "swapped", "expected"),
    [
        (0, 1, 12, "LT", False, 12),
        (0, 5, 12, "LT", False, 3),
        (2, 1, 12, "LE", False, 11),
        (12, -1, 0, "GT", False, 12),
        (12, -3, 0, "GE", False, 5),
        (0, 3, 12, "NE", False, 4),
        (0, 5, 12, "NE", False, None),
        (0, 1, 12, "GT", True, 12),
        (20, 1, 12, "LT", False, 0),
        (0, -1, 12, "LT", False, None),
        (0, 0, 12, "LT", False, None),
    ],
)
def test_derived_trip_counts(
    start: int, step: int, limit: int, direction: str, swapped: bool, expected: int | None
) -> None:
    sides = "%l, %i" if swapped else "%i, %l"
    others = f"""
%body (p: (s32[], f32[])) -> (s32[], f32[]) {{
  %p = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[] get-tuple-element(%p), index=1
  %c = s32[] constant({step})
  %n = s32[] add(%i, %c)
  ROOT %t = (s32[], f32[]) tuple(%n, %x)
}}
%cond (p: (s32[], f32[])) -> pred[] {{
  %p = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %l = s32[] constant({limit})
  ROOT %r = pred[] compare({sides}), direction={direction}
}}
"""
    lines = f"""
  %s = s32[] constant({start})
  %z = f32[] constant(0)
  %t = (s32[], f32[]) tuple(%s, %z)
  ROOT %w = (s32[], f32[]) while(%t), condition=%cond, body=%body
"""
    module = parse_module(entry(lines, others))
    loop = module.entry_computation.by_name["w"]
    assert derived_trip_count(module, module.entry_computation, loop) == expected
    _, notes = find_kernels(module)
    assert bool(notes) == (expected is None)
    assert all("trip count" in note for note in notes)


NESTED_LOOPS = """
%square (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%never (t: (f32[8,8])) -> pred[] {
  %t = (f32[8,8]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}
%inner (t: (f32[8,8])) -> (f32[8,8]) {
  %t = (f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=0
  %y = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%square
  ROOT %r = (f32[8,8]{1,0}) tuple(%y)
}
%outer (t: (f32[8,8])) -> (f32[8,8]) {
  %t = (f32[8,8]{1,0}) parameter(0)
  ROOT %w2 = (f32[8,8]{1,0}) while(%t), condition=%never, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_trip_counts_of_nested_loops_multiply() -> None:
    lines = (
        "  %x = f32[8,8]{1,0} parameter(0)\n  %t = (f32[8,8]{1,0}) tuple(%x)\n"
        "  ROOT %w = (f32[8,8]{1,0}) while(%t), condition=%never, body=%outer, "
        'backend_config={"known_trip_count":{"n":"3"}}'
    )
    (kernel,) = kernels_of(entry(lines, NESTED_LOOPS)).values()
    assert kernel.trip_count == 15
    assert (kernel.kind, kernel.matmuls, kernel.heavy_flops) == ("matmul", 1, 2 * 8 * 8 * 8)
    assert (kernel.operand_bytes, kernel.result_bytes) == (256, 256)
    assert kernel.traffic_bytes == 15 * 512


def test_unscheduled_module_is_noted() -> None:
    _, notes = find_kernels(parse_module(SCAN.replace("is_scheduled=true", "x=1")))
    assert any("not scheduled" in note for note in notes)
