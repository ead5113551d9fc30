"""Section 3.7 of Yu & He: what one of XLA's kernels writes for the next, on programs counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.between_kernels import Pair, main, pairs_of
from remat.compiler.hlo import parse_module

ROW = 4 * 1024


def pairs_in(first: str, second: str, entry: str) -> list[Pair]:
    """The pairs of a program of two fusions, `%one` and `%two`."""
    text = f"""\
HloModule m, is_scheduled=true

%one () -> f32[] {{
{first}
}}

%two () -> f32[] {{
{second}
}}

ENTRY %main () -> f32[] {{
  %x = f32[1024]{{0}} parameter(0)
{entry}
}}
"""
    return list(pairs_of(parse_module(text)))


def chain(second_opcode: str) -> str:
    """Three values of a chain, all of them results."""
    return f"""
  %p = f32[1024]{{0}} parameter(0)
  %a = f32[1024]{{0}} sine(%p)
  %b = f32[1024]{{0}} {second_opcode}(%a)
  %c = f32[1024]{{0}} tanh(%b)
  ROOT %t = (f32[1024]{{0}}, f32[1024]{{0}}, f32[1024]{{0}}) tuple(%a, %b, %c)
"""


READ_ALL = """
  %q = f32[1024]{0} parameter(0)
  %r = f32[1024]{0} parameter(1)
  %s = f32[1024]{0} parameter(2)
  %d = f32[1024]{0} add(%q, %r)
  ROOT %e = f32[1024]{0} add(%d, %s)
"""
MEMBERS = """
  %made = (f32[1024]{0}, f32[1024]{0}, f32[1024]{0}) fusion(%x), kind=kLoop, calls=%one
  %a0 = f32[1024]{0} get-tuple-element(%made), index=0
  %b0 = f32[1024]{0} get-tuple-element(%made), index=1
  %c0 = f32[1024]{0} get-tuple-element(%made), index=2
"""


def test_a_cheap_kernel_is_computed_again_whole() -> None:
    """Figure 4 of the paper: three writes and three reads become one read of the input that is there anyway."""
    entry = MEMBERS + "  ROOT %y = f32[1024]{0} fusion(%a0, %b0, %c0), kind=kLoop, calls=%two"
    assert pairs_in(chain("cosine"), READ_ALL, entry) == [Pair("made", "y", 6 * ROW, ROW)]


def test_what_is_not_element_wise_is_written() -> None:
    """`a` is made again from `x`, `b` is written and read, and `c` made from it."""
    entry = MEMBERS + "  ROOT %y = f32[1024]{0} fusion(%a0, %b0, %c0), kind=kLoop, calls=%two"
    assert pairs_in(chain("sort"), READ_ALL, entry) == [Pair("made", "y", 6 * ROW, 3 * ROW)]


def test_what_others_read_is_written_anyway() -> None:
    entry = (
        MEMBERS
        + """
  %y = f32[1024]{0} fusion(%a0, %b0, %c0), kind=kLoop, calls=%two
  ROOT %z = (f32[1024]{0}, f32[1024]{0}) tuple(%y, %b0)
"""
    )
    assert pairs_in(chain("sort"), READ_ALL, entry) == [Pair("made", "y", 5 * ROW, 2 * ROW)]


def test_what_the_reader_reads_anyway_costs_nothing() -> None:
    second = """
  %q = f32[1024]{0} parameter(0)
  %r = f32[1024]{0} parameter(1)
  ROOT %e = f32[1024]{0} add(%q, %r)
"""
    first = "  %p = f32[1024]{0} parameter(0)\n  ROOT %a = f32[1024]{0} sine(%p)"
    entry = """
  %made = f32[1024]{0} fusion(%x), kind=kLoop, calls=%one
  %seen = f32[1024]{0} bitcast(%made)
  ROOT %y = f32[1024]{0} fusion(%seen, %x), kind=kLoop, calls=%two
"""
    assert pairs_in(first, second, entry) == [Pair("made", "y", 2 * ROW, 0)]


def test_what_is_updated_in_place_is_no_choice() -> None:
    second = """
  %q = f32[1024]{0} parameter(0)
  %one_more = f32[1]{0} constant({1})
  %at = s32[] constant(3)
  ROOT %u = f32[1024]{0} dynamic-update-slice(%q, %one_more, %at)
"""
    first = "  %p = f32[1024]{0} parameter(0)\n  ROOT %a = f32[1024]{0} sine(%p)"
    entry = """
  %made = f32[1024]{0} fusion(%x), kind=kLoop, calls=%one
  ROOT %y = f32[1024]{0} fusion(%made), kind=kLoop, calls=%two
"""
    assert pairs_in(first, second, entry) == []


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["stencil", "--policies", "none", "full", "--device", "cpu", "--small"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["stencil", "none"], ["stencil", "full"]]
