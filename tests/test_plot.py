"""Pictures are written, are valid, say what they should, and leave matplotlib as it was."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import remat
from models import cases
from remat.plans.plan import Plan
from remat.plans.report import human_bytes
from remat.tools.compare import Row
from remat.tools.pareto import Pareto
from remat.tools.plot import PlotError, check_path, pareto, timeline, timeline_curves, tradeoff

pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install remat[plot])")

MIB, GIB = 2**20, 2**30
ROWS = (
    Row("none", temp_bytes=4599 * MIB, hbm_traffic_bytes=41 * GIB),
    Row("dots_saveable", temp_bytes=1548 * MIB, hbm_traffic_bytes=28 * GIB),
    Row("full", temp_bytes=291 * MIB, hbm_traffic_bytes=26 * GIB),
    Row("nothing_saveable", temp_bytes=291 * MIB, hbm_traffic_bytes=26 * GIB),
    Row("min_cut(heavy='batched')", temp_bytes=955 * MIB, hbm_traffic_bytes=27 * GIB),
    Row("broken", error="PolicyError: no"),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    function, args = cases.gpt_tiny()
    return remat.plan(function, *args)


def text_of_svg(path: Path) -> str:
    """What is written in a picture; matplotlib puts every text into a comment beside its glyphs."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.parse(path, parser).getroot()
    assert root.tag.endswith("svg")
    return "\n".join(node.text or "" for node in root.iter() if node.tag is ElementTree.Comment)


def assert_png(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in content[-12:]
    assert len(content) > 5000


def test_timeline_png(plan: Plan, tmp_path: Path) -> None:
    timeline(plan, tmp_path / "memory.png")
    assert_png(tmp_path / "memory.png")


def test_timeline_svg_says_what_it_shows(plan: Plan, tmp_path: Path) -> None:
    timeline(plan, str(tmp_path / "memory.svg"))
    text = text_of_svg(tmp_path / "memory.svg")
    for word in ("forward", "backward", "no remat: peak", "min_cut: peak", "MiB", "kernels"):
        assert word in text


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (cases.gpt_tiny, {}),
        (cases.gpt_tiny, {"remat_policy": "ilp", "budget": 0.6}),
        (cases.gpt_blocks_scan_small, {"remat_policy": "full"}),
    ],
)
def test_timeline_and_table_have_the_same_numbers(
    case: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    function, args = case()
    plan = remat.plan(function, *args, **options)
    before, after = timeline_curves(plan)
    assert max(before.live_bytes) == before.peak_bytes == plan.baseline_peak_bytes
    assert max(after.live_bytes) == after.peak_bytes == plan.peak_bytes
    assert min(after.places) < 0 < max(after.places)
    timeline(plan, tmp_path / "memory.svg")
    text, table = text_of_svg(tmp_path / "memory.svg"), str(plan)
    for nbytes in (plan.baseline_peak_bytes, plan.peak_bytes, plan.saved_bytes):
        assert human_bytes(nbytes) in text and human_bytes(nbytes) in table


def test_timeline_of_a_plan_with_loops(tmp_path: Path) -> None:
    function, args = cases.gpt_blocks_scan_small()
    timeline(remat.plan(function, *args), tmp_path / "loop.svg")
    assert "a loop is one kernel" in text_of_svg(tmp_path / "loop.svg")


def test_timeline_of_the_baseline_itself(tmp_path: Path) -> None:
    function, args = cases.residual_mlp_small()
    timeline(remat.plan(function, *args, remat_policy="save_all"), tmp_path / "all.png")
    assert_png(tmp_path / "all.png")


def test_tradeoff_png(tmp_path: Path) -> None:
    tradeoff(ROWS, tmp_path / "tradeoff.png")
    assert_png(tmp_path / "tradeoff.png")


def test_tradeoff_labels_every_policy_once(tmp_path: Path) -> None:
    tradeoff(ROWS, tmp_path / "tradeoff.svg", title="a model")
    lines = [line.strip() for line in text_of_svg(tmp_path / "tradeoff.svg").splitlines()]
    for label in ("none", "dots_saveable", "full, nothing_saveable", "min_cut(heavy='batched')"):
        assert lines.count(label) == 1
    assert "a model (1 failed or not compiled)" in lines
    assert {"remat", "jax.checkpoint", "no rematerialization"} <= set(lines)


@pytest.fixture(scope="module")
def curve() -> Pareto:
    function, args = cases.residual_mlp_small()
    least = remat.plan(function, *args)
    return remat.pareto(function, *args, remat_policy="min_cut", budgets=[1, least.peak_bytes, 1.0])


def test_pareto_png(curve: Pareto, tmp_path: Path) -> None:
    pareto(curve, tmp_path / "curve.png")
    assert_png(tmp_path / "curve.png")


def test_pareto_svg_says_what_it_shows(curve: Pareto, tmp_path: Path) -> None:
    pareto(curve, str(tmp_path / "curve.svg"), title="a model")
    text = text_of_svg(tmp_path / "curve.svg")
    for word in ("a model: min_cut down to", "no remat: ", "peak of temporaries", "repeated work"):
        assert word in text


def test_pareto_without_points(curve: Pareto, tmp_path: Path) -> None:
    with pytest.raises(PlotError, match="nothing to draw"):
        pareto(replace(curve, points=()), tmp_path / "empty.png")


def test_tradeoff_without_numbers(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match="nothing to draw"):
        tradeoff([Row("none", error="CompileError: no")], tmp_path / "empty.png")


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.png.gz"])
def test_other_suffixes_are_errors(name: str, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"expected one of \.png, \.svg"):
        timeline(plan, tmp_path / name)


def test_missing_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"pip install remat\[plot\]"):
        check_path("picture.png")


def test_equal_plans_give_equal_pictures_and_pyplot_is_not_touched(
    plan: Plan, tmp_path: Path
) -> None:
    before = "matplotlib.pyplot" in sys.modules
    timeline(plan, tmp_path / "one.png")
    timeline(plan, tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert ("matplotlib.pyplot" in sys.modules) == before
