"""A plan is a value: equal by content, stable in its digest, the same after a round trip."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from random_graphs import chain, graphs, laws, seeded_graph

import remat
from remat.core.errors import PlanError
from remat.core.forms import form_of, stored_bytes
from remat.core.graph import Graph, Value
from remat.planning.make import make_plan, with_loops
from remat.plans.plan import LoopPlan, Plan
from remat.plans.record import Certificate
from remat.plans.steps import Schedule, Step
from remat.policies import Full, MinCut, SaveAll


@pytest.fixture
def plan() -> Plan:
    return make_plan(chain(3), Full())


# --- forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, nbytes",
    [((), 1), ((0,), 0), ((1,), 1), ((8,), 1), ((9,), 2), ((3, 5), 2), ((64, 8), 64)],
)
def test_booleans_are_kept_as_one_bit_per_element(shape: tuple[int, ...], nbytes: int) -> None:
    value = Value(0, shape, "bool", 1, None)
    assert form_of(value) == "bits"
    assert stored_bytes(value) == nbytes


def test_other_dtypes_are_kept_as_they_are() -> None:
    value = Value(0, (64,), "int8", 64, None)
    assert form_of(value) == "raw"
    assert stored_bytes(value) == 64


# --- values ------------------------------------------------------------------------------------------


@given(graph=graphs())
@laws(30)
def test_json_round_trip_is_the_identity(graph: Graph) -> None:
    for policy in (SaveAll(), MinCut()):
        plan = make_plan(graph, policy, barriers=False)
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert hash(again) == hash(plan)
        assert again.digest() == plan.digest()
        assert again.to_json() == plan.to_json()


def test_time_spent_planning_is_not_part_of_a_plan(plan: Plan) -> None:
    slower = replace(plan, solve_seconds=plan.solve_seconds + 1)
    assert slower == plan and hash(slower) == hash(plan) and slower.digest() == plan.digest()


def test_the_digest_sees_every_decision(plan: Plan) -> None:
    others = [
        make_plan(chain(3), SaveAll()),
        make_plan(chain(4), Full()),
        replace(plan, schedule=Schedule((*plan.schedule.steps, Step("free", 1)))),
        with_loops(plan, (LoopPlan("scan0", 2, plan),)),
    ]
    assert len({plan.digest(), *(other.digest() for other in others)}) == 5


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "from random_graphs import seeded_graph; from remat.planning.make import make_plan;"
        "from remat.policies import MinCut; print(make_plan(seeded_graph(5), MinCut(), "
        "barriers=False).digest())"
    )
    here = Path(__file__).resolve().parent
    path = {"PYTHONPATH": f"{here.parent}:{here}", "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True
    )
    expected = make_plan(seeded_graph(5), MinCut(), barriers=False).digest()
    assert found.stdout.strip() == expected


def test_a_plan_file_reads_back(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = plan.to_json(file)
    assert file.read_text() == text
    assert Plan.from_json(file) == Plan.from_json(str(file)) == Plan.from_json(text) == plan


def test_loops_survive_the_round_trip(plan: Plan) -> None:
    inner = with_loops(plan, (LoopPlan("scan0", 3, plan),))
    outer = with_loops(plan, (LoopPlan("scan0", 5, inner), LoopPlan("scan1", 2, plan)))
    assert Plan.from_json(outer.to_json()) == outer


# --- broken documents --------------------------------------------------------------------------------


def test_a_document_of_another_version_is_refused(plan: Plan) -> None:
    data = {**plan.to_dict(), "version": 99}
    with pytest.raises(PlanError, match=r"version 99.*expected 'remat.plan', version"):
        Plan.from_json(json.dumps(data))


def test_a_document_that_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="format None"):
        Plan.from_json("{}")


def test_a_document_with_a_missing_field_is_refused(plan: Plan) -> None:
    data = plan.to_dict()
    del data["saved"]
    with pytest.raises(PlanError, match="saved"):
        Plan.from_json(json.dumps(data))


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json("{not json")


@pytest.mark.parametrize(
    "content", [b"", b"not json", b"[1, 2]", b"3", b"\xff\xfe\x00binary"], ids=str
)
def test_a_file_that_holds_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError):
        Plan.from_json(file)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        Plan.from_json(tmp_path / "nowhere.json")


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        Plan.from_json(tmp_path)


# --- loops -------------------------------------------------------------------------------------------


def test_a_loop_adds_its_length_times_its_own_repetitions(plan: Plan) -> None:
    body = make_plan(chain(4), SaveAll())
    other = make_plan(chain(2), Full())
    outer = with_loops(plan, (LoopPlan("scan0", 10, body), LoopPlan("scan1", 3, other)))
    for field in ("recompute_flops", "recompute_seconds"):
        expected = getattr(plan, field) + 10 * getattr(body, field) + 3 * getattr(other, field)
        assert getattr(outer, field) == pytest.approx(expected, rel=1e-12)
    assert outer.loop("scan0") == body
    assert outer.saved == plan.saved


def test_what_a_body_keeps_is_a_result_of_the_loop_and_counts_once(plan: Plan) -> None:
    """Without rematerialization the body would keep more: only the baseline grows."""
    body = replace(plan, saved_bytes=5, baseline_saved_bytes=12, peak_bytes=7)
    outer = with_loops(plan, (LoopPlan("scan0", 10, body),))
    assert outer.saved_bytes == plan.saved_bytes
    assert outer.baseline_saved_bytes == plan.baseline_saved_bytes + 10 * (12 - 5)
    # This graph has no loop operator, so no working memory of the body comes on top.
    assert outer.peak_bytes == plan.peak_bytes


def test_saved_bytes_of_a_traced_loop_are_those_stacked() -> None:
    """Five iterations of `tanh(c @ w)`, `c` being `f32[4, 8]`: carry and matmul, or the carry alone."""

    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        body = lambda c, _: (jnp.tanh(c @ w), None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=5)[0].sum()

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    full = remat.plan(loop, *shapes, remat_policy="full")
    assert full.saved_bytes == 5 * 4 * 8 * 4
    assert full.loops[0].plan.saved_bytes == 4 * 8 * 4
    none = remat.plan(loop, *shapes, remat_policy="save_all")
    assert none.saved_bytes == none.baseline_saved_bytes == full.baseline_saved_bytes


def test_opaque_operators_of_a_loop_say_which_loop(plan: Plan) -> None:
    outer = with_loops(plan, (LoopPlan("scan0", 2, replace(plan, opaque=("a callback",))),))
    assert outer.opaque == ("scan0: a callback",)


def test_an_unknown_loop_is_an_error_that_lists_the_loops(plan: Plan) -> None:
    outer = with_loops(plan, (LoopPlan("scan0", 2, plan),))
    with pytest.raises(PlanError, match=r"scan1.*\['scan0'\]"):
        outer.loop("scan1")


# --- what can be read off it ---------------------------------------------------------------------------


@given(graph=graphs())
@laws(20)
def test_networkx_graph_carries_the_decisions(graph: Graph) -> None:
    plan = make_plan(graph, MinCut(), barriers=False)
    network = plan.to_networkx()
    kept = {e.value: e.form for e in plan.saved}
    times = {e.op: e.times for e in plan.recomputed}
    for value in graph.values:
        assert network.nodes[("value", value.id)]["saved"] == kept.get(value.id)
    for op in graph.ops:
        assert network.nodes[("op", op.id)]["recomputed"] == times.get(op.id, 0)


def test_the_timeline_has_one_entry_per_step(plan: Plan) -> None:
    timeline = plan.timeline()
    assert len(timeline.live_bytes) == len(plan.schedule.steps)
    unfused = plan.timeline(fused=False).peak_bytes
    assert unfused >= timeline.peak_bytes and unfused > 0


@pytest.mark.parametrize("value, bound, gap", [(4, 4, 0.0), (4, 3, 0.25), (0, 0, 0.0)])
def test_the_gap_is_relative_and_zero_when_tight(value: int, bound: int, gap: float) -> None:
    assert Certificate("test", value, bound).gap == gap


def test_a_plan_without_certificate_has_no_gap(plan: Plan) -> None:
    assert plan.gap is None


def test_a_plan_that_keeps_everything_is_its_own_baseline() -> None:
    plan = make_plan(chain(5), SaveAll(), barriers=False)
    assert plan.saved_bytes == plan.baseline_saved_bytes == 4 * 256
    assert plan.peak_bytes == plan.baseline_peak_bytes
    assert plan.recomputed == () and plan.recompute_seconds == 0.0
