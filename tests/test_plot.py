"""Pictures are valid, say what tables say, begin at zero, and leave matplotlib as it was."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from models import cases, mlp
from remat.memory.predict import predict
from remat.pictures.by_layer import Layer, by_layer, fewer
from remat.pictures.contents import KINDS, contents
from remat.pictures.curves import curves
from remat.pictures.style import DARK, LIGHT
from remat.plans.plan import Plan
from remat.plans.summary import share_of_time, step_seconds
from remat.plans.words import human_bytes, human_seconds
from remat.tools import plot
from remat.tools.compare import Row
from remat.tools.pareto import Pareto
from remat.tools.plot import PlotError, check_path, pareto, timeline, tradeoff
from tests.pictures import texts_of_svg, ticks_of

pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install remat[plot])")

MIB, GIB = 2**20, 2**30
ROWS = (
    Row("none", temp_bytes=4599 * MIB, hbm_traffic_bytes=41 * GIB, roofline_seconds=0.009),
    Row("dots_saveable", temp_bytes=1548 * MIB, hbm_traffic_bytes=28 * GIB, roofline_seconds=0.007),
    Row("full", temp_bytes=291 * MIB, hbm_traffic_bytes=26 * GIB, roofline_seconds=0.0065),
    Row("nothing_saveable", temp_bytes=291 * MIB, hbm_traffic_bytes=26 * GIB, roofline_seconds=0.0065),
    Row("min_cut(heavy='batched')", temp_bytes=955 * MIB, hbm_traffic_bytes=27 * GIB, roofline_seconds=0.006),
    Row("broken", error="PolicyError: no"),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    function, args = cases.gpt_tiny()
    return remat.plan(function, *args)


@pytest.fixture(scope="module")
def looped() -> Plan:
    function, args = cases.gpt_blocks_scan_small()
    return remat.plan(function, *args, remat_policy="full")


@pytest.fixture(scope="module")
def within() -> Plan:
    """A plan whose policy counts more than the kernels show."""
    function, args = cases.gpt_tiny()
    plan = remat.plan(function, *args, remat_policy="ilp", budget=0.6, confirm=False)
    return replace(plan, peak_bytes=plan.peak_bytes + 4096)


PLANS = ("plan", "looped", "within")


def assert_png(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in content[-12:]
    assert len(content) > 5000


@pytest.mark.parametrize("name", PLANS)
def test_parts_over_time_add_up_to_the_prediction(name: str, request: Any) -> None:
    plan = request.getfixturevalue(name)
    for graph, schedule in (
        (plan.graph.plain or plan.graph, None),
        (plan.graph, plan.schedule),
    ):
        parts = contents(graph, schedule, loops=plan.loops)
        alive = predict(graph, schedule, loops=plan.loops).alive
        assert [part.total_bytes for part in parts] == [entry.nbytes for entry in alive]
        assert [part.is_backward for part in parts] == [entry.is_backward for entry in alive]
        assert all(nbytes >= 0 for part in parts for nbytes in part.nbytes)


def test_kinds_are_what_they_say(plan: Plan) -> None:
    plain = contents(plan.graph.plain or plan.graph)
    sums = [dict(zip(KINDS, map(sum, zip(*(p.nbytes for p in part), strict=True)), strict=True))
            for part in (plain, contents(plan.graph, plan.schedule))]  # fmt: skip
    assert not sums[0]["recomputed"] and not sums[0]["encoded"] and not sums[0]["loop"]
    assert sums[1]["recomputed"] and sums[1]["encoded"] and sums[1]["gradients"]
    assert sums[1]["kept"] < sums[0]["kept"]
    turn = next(i for i, part in enumerate(plain) if part.is_backward)
    assert not any(part.nbytes[KINDS.index("gradients")] for part in plain[:turn])


@pytest.mark.parametrize("name", PLANS)
def test_timeline_and_table_have_the_same_numbers(name: str, request: Any, tmp_path: Path) -> None:
    plan = request.getfixturevalue(name)
    for curve, peak in zip(curves(plan), (plan.baseline_peak_bytes, plan.peak_bytes), strict=True):
        assert curve.peak_bytes == peak == sum(curve.at_peak().values())
        assert max(curve.live_bytes) <= peak
        assert 0 < curve.turn < len(curve.nbytes)
    timeline(plan, tmp_path / "memory.svg")
    texts, table = texts_of_svg(tmp_path / "memory.svg"), str(plan)
    for nbytes in (plan.baseline_peak_bytes, plan.peak_bytes):
        assert f"peak {human_bytes(nbytes)}" in texts
        assert human_bytes(nbytes) in texts and human_bytes(nbytes) in table
    for nbytes in (plan.baseline_saved_bytes, plan.saved_bytes):
        assert human_bytes(nbytes) in texts and human_bytes(nbytes) in table
    assert human_seconds(plan.recompute_seconds) in texts
    assert human_seconds(plan.recompute_seconds) in table
    assert share_of_time(plan) in texts and share_of_time(plan) in table
    assert any(text.startswith("live temporaries [") and "iB]" in text for text in texts)
    assert min(ticks_of(texts)) == 0
    assert "no remat" in texts and plan.policy_name in texts


def test_what_only_the_policy_counts_is_said(within: Plan, tmp_path: Path) -> None:
    _, after = curves(within)
    more = within.peak_bytes - max(after.live_bytes)
    assert more > 0
    timeline(within, tmp_path / "memory.svg")
    texts = texts_of_svg(tmp_path / "memory.svg")
    assert texts[texts.index("counted by the policy") + 2] == human_bytes(more)
    assert f"budget {human_bytes(within.budget_bytes)}" in texts


def test_timeline_of_a_plan_with_loops(looped: Plan, tmp_path: Path) -> None:
    timeline(looped, tmp_path / "loop.svg")
    texts = texts_of_svg(tmp_path / "loop.svg")
    assert "kernels run, a loop as one" in texts and "inside a loop" in texts


def test_timeline_of_the_baseline_itself(tmp_path: Path) -> None:
    function, args = cases.residual_mlp_small()
    timeline(remat.plan(function, *args, remat_policy="save_all"), tmp_path / "all.png")
    assert_png(tmp_path / "all.png")


@pytest.mark.parametrize("name", PLANS)
def test_layers_add_up_to_the_plan(name: str, request: Any, tmp_path: Path) -> None:
    plan = request.getfixturevalue(name)
    rows = by_layer(plan)
    for shown in (rows, fewer(rows, 3)):
        total = sum(shown, Layer(""))
        assert total.before_bytes == plan.baseline_saved_bytes
        assert total.raw_bytes + total.encoded_bytes == plan.saved_bytes
        assert total.repeated_flops == plan.recompute_flops
        assert total.repeated_seconds == pytest.approx(plan.recompute_seconds)
    assert len(fewer(rows, 3)) == min(3, len(rows))
    assert len({row.name for row in rows}) == len(rows)
    plot.layers(plan, tmp_path / "layers.svg")
    texts = texts_of_svg(tmp_path / "layers.svg")
    assert f"no remat, {human_bytes(plan.baseline_saved_bytes)} in all" in texts
    assert f"kept, {human_bytes(plan.saved_bytes)} in all" in texts
    assert {row.name for row in rows if len(row.name) < 30} <= {*texts} or len(rows) > 24
    assert any(text.startswith("kept for the backward pass [") for text in texts)
    assert min(ticks_of(texts)) == 0


def test_layers_are_blocks(plan: Plan) -> None:
    names = [row.name for row in by_layer(plan)]
    assert names.index("block_0") + 1 == names.index("block_1")


def test_layers_without_scopes_are_lines() -> None:
    function, args = cases.residual_mlp_small()
    rows = by_layer(remat.plan(function, *args))
    assert rows and all("mlp.py:" in row.name for row in rows)


def test_nothing_kept_and_nothing_repeated_has_no_bars(tmp_path: Path) -> None:
    plan = remat.plan(lambda x: 2 * jnp.sum(x), jnp.ones(4))
    with pytest.raises(PlotError, match="no bars to draw"):
        plot.layers(plan, tmp_path / "layers.svg")


def test_step_seconds_counts_the_bodies_of_loops() -> None:
    def body(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w), None

    def scanned(ws: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(body, x, ws)[0])

    def unrolled(ws: Any, x: Any) -> Any:
        for i in range(4):
            x, _ = body(x, ws[i])
        return jnp.sum(x)

    args = (jnp.ones((4, 64, 64)), jnp.ones((64, 64)))
    loop, flat = remat.plan(scanned, *args), remat.plan(unrolled, *args)
    assert loop.loops
    assert step_seconds(loop) == pytest.approx(step_seconds(flat), rel=0.5)


def small(policy: str = "min_cut") -> Plan:
    function, args = mlp.residual_mlp(layers=1, width=16, hidden=64, batch=64)
    return remat.plan(function, *args, remat_policy=policy)


def test_graph_marks_what_is_kept_and_what_runs_again(tmp_path: Path) -> None:
    plan = small()
    plot.graph(plan, tmp_path / "graph.svg")
    texts = texts_of_svg(tmp_path / "graph.svg")
    kept = [entry for entry in plan.saved if not entry.is_input]
    for entry in kept:
        assert human_bytes(entry.nbytes) in texts
    assert f"kept, {human_bytes(plan.saved_bytes)}" in texts
    again = [text for text in texts if text.startswith("again ×")]
    assert sum(int(text[7:]) for text in again) == sum(entry.times for entry in plan.recomputed)
    assert {"forward pass ↓", "backward pass ↑"} <= {*texts}


def test_graph_says_in_which_form(tmp_path: Path) -> None:
    cut = remat.policies.MinCut.paper()
    plan = remat.plan(
        lambda x: jnp.sum(jnp.maximum(x, 0.0) * 3), jnp.ones((8, 128)), remat_policy=cut
    )
    encoded = [entry for entry in plan.saved if entry.form != "raw"]
    assert encoded
    plot.graph(plan, tmp_path / "graph.svg")
    texts = texts_of_svg(tmp_path / "graph.svg")
    assert f"{human_bytes(encoded[0].nbytes)} as {encoded[0].form}" in texts


def test_large_graphs_are_refused_with_advice(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"more than 60 .* one block .*to_networkx"):
        plot.graph(plan, tmp_path / "graph.svg")


def test_tradeoff_png(tmp_path: Path) -> None:
    tradeoff(ROWS, tmp_path / "tradeoff.png")
    assert_png(tmp_path / "tradeoff.png")


def test_tradeoff_labels_every_policy_once(tmp_path: Path) -> None:
    tradeoff(ROWS, tmp_path / "tradeoff.svg", title="a model")
    texts = texts_of_svg(tmp_path / "tradeoff.svg")
    for label in ("none", "dots_saveable", "full, nothing_saveable", "min_cut(heavy='batched')"):
        assert texts.count(label) == 1
    assert "a model (1 failed or not compiled)" in texts
    assert {"remat", "jax.checkpoint", "no remat"} <= {*texts}
    assert "temporary memory, compiled [GiB]" in texts
    assert "one step, roofline estimate [ms]" in texts
    assert "share of no remat" in texts and "100%" in texts
    assert min(ticks_of(texts)) == 0


def test_tradeoff_without_times_shows_the_traffic(tmp_path: Path) -> None:
    tradeoff([replace(row, roofline_seconds=None) for row in ROWS], tmp_path / "traffic.svg")
    assert "device memory traffic per step [GiB]" in texts_of_svg(tmp_path / "traffic.svg")


@pytest.fixture(scope="module")
def curve() -> Pareto:
    function, args = cases.residual_mlp_small()
    least = remat.plan(function, *args)
    return remat.pareto(
        function,
        *args,
        remat_policy="min_cut",
        budgets=[1, least.peak_bytes, 1.0],
        references=["dots_saveable", "nothing_saveable"],
    )


def test_pareto_png(curve: Pareto, tmp_path: Path) -> None:
    pareto(curve, tmp_path / "curve.png")
    assert_png(tmp_path / "curve.png")


def test_pareto_svg_says_what_it_shows(curve: Pareto, tmp_path: Path) -> None:
    pareto(curve, str(tmp_path / "curve.svg"), title="a model")
    texts = texts_of_svg(tmp_path / "curve.svg")
    assert f"a model: min_cut down to {human_bytes(curve.smallest_peak_bytes)}" in texts
    assert f"no remat: {human_bytes(curve.baseline_peak_bytes)}" in texts
    assert "predicted peak of temporaries [KiB]" in texts
    assert any(text.startswith("repeated work per step, roofline estimate [") for text in texts)
    assert "share of a step without remat" in texts
    assert "what jax's policies keep, in remat's order" in texts
    assert min(ticks_of(texts)) == 0


def test_references_are_in_the_table_and_the_picture(curve: Pareto, tmp_path: Path) -> None:
    pareto(curve, tmp_path / "curve.svg")
    drawn = ", ".join(texts_of_svg(tmp_path / "curve.svg"))
    assert [entry.name for entry in curve.references] == ["dots_saveable", "nothing_saveable"]
    for entry in curve.references:
        assert entry.name in drawn and f"  {entry.name}  " in str(curve)
        assert human_bytes(entry.plan.peak_bytes) in str(curve)


def test_references_keep_what_jax_keeps() -> None:
    """The values that jax's policy saves, as jax itself says."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(jnp.einsum("bij,bjk->bik", jnp.cos(x @ w), x))
        return jnp.sum(x)

    args = (jnp.ones((8, 8)), jnp.ones((2, 8, 8)))
    names = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
    curve = remat.pareto(loss, *args, remat_policy="min_cut", budgets=[1.0], references=names)
    for entry in curve.references:
        policy = getattr(jax.checkpoint_policies, entry.name)
        wrapped = jax.checkpoint(loss, policy=policy)

        def residuals(*args: Any, f: Any = wrapped) -> Any:
            return jax.tree.leaves(jax.vjp(f, *args)[1])

        jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
        kept = [v.aval for v in dict.fromkeys(jaxpr.outvars) if v not in jaxpr.invars]
        assert entry.plan.saved_bytes == sum(a.size * a.dtype.itemsize for a in kept)


def test_unknown_references_are_errors() -> None:
    with pytest.raises(remat.PolicyError, match=r"'dots_savable'.*did you mean 'dots_saveable'"):
        remat.pareto(jnp.sum, jnp.ones(4), budgets=[1.0], references=["dots_savable"])


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


def test_other_themes_are_errors(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"'drak': expected one of light, dark, auto.*'dark'"):
        timeline(plan, tmp_path / "memory.svg", theme="drak")


def test_themes_change_colours_and_nothing_else(tmp_path: Path) -> None:
    found = {}
    for theme in ("light", "dark", "auto"):
        tradeoff(ROWS, tmp_path / f"{theme}.svg", theme=theme)
        found[theme] = (tmp_path / f"{theme}.svg").read_text()
    assert LIGHT.kept in found["light"] and DARK.paper not in found["light"]
    assert DARK.kept in found["dark"] and LIGHT.kept not in found["dark"]
    assert "prefers-color-scheme:dark" in found["auto"] and "prefers" not in found["light"]
    assert {*texts_of_svg(found["light"])} == {*texts_of_svg(found["dark"])}
    assert found["auto"].partition("</style>")[2] == found["light"].partition("</style>")[2]
    for mark in re.findall(r'<path id="m[^>]*>', found["auto"]):
        assert "#" not in mark  # what is only defined would keep the colours of the day


def test_missing_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"pip install matplotlib"):
        check_path("picture.png")


def test_equal_plans_give_equal_pictures_and_nothing_global_changes(
    plan: Plan, tmp_path: Path
) -> None:
    import matplotlib

    def settings() -> dict[str, Any]:  # to read the backend would choose one
        names = set(matplotlib.rcParams) - {"backend"}
        return {name: matplotlib.rcParams[name] for name in names}

    before, old = "matplotlib.pyplot" in sys.modules, settings()
    for suffix in ("png", "svg"):
        timeline(plan, tmp_path / f"one.{suffix}")
        timeline(plan, tmp_path / f"two.{suffix}")
        one, two = tmp_path / f"one.{suffix}", tmp_path / f"two.{suffix}"
        assert one.read_bytes() == two.read_bytes()
    assert ("matplotlib.pyplot" in sys.modules) == before
    assert settings() == old
