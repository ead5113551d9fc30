"""The printed plan says what is kept, what runs again, why, and what was not looked into."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from models import cases
from remat.plans.plan import Plan
from remat.plans.report import (
    describe,
    human_bytes,
    human_flops,
    human_seconds,
    short_scope,
    short_source,
    table,
)


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for index, weight in enumerate(weights):
        with jax.named_scope(f"layer_{index}"):
            x = jnp.tanh(checkpoint_name(x @ weight, "projection"))
    return jnp.sum(x**2)


def plan_of_layers(policy: Any = "min_cut", count: int = 4) -> Plan:
    return remat.plan(layers, [f32(32, 32)] * count, f32(64, 32), remat_policy=policy)


def plan_of_case(name: str) -> Plan:
    function, args = cases.CASES[name]()
    return remat.plan(function, *args)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (6 * 2**30, "6.0 GiB"),
    ],
)
def test_bytes_for_people(count: int | None, text: str) -> None:
    assert human_bytes(count) == text


def test_flops_and_seconds_for_people() -> None:
    assert [human_flops(n) for n in (None, 999, 5_146_051)] == ["-", "999 FLOP", "5.1 MFLOP"]
    seconds = (None, 0.0, 1e-12, 8.3e-8, 0.0125, 90.0)
    assert [human_seconds(s) for s in seconds] == [
        "-",
        "0 s",
        "under 1 ns",
        "83 ns",
        "12.5 ms",
        "90 s",
    ]


def test_sources_are_short() -> None:
    here = os.path.join(os.getcwd(), "models", "gpt.py")
    assert short_source(f"{here}:12") == "models/gpt.py:12"
    assert short_source("/a/lib/site-packages/flax/linear.py:7") == "flax/linear.py:7"
    assert short_source("/one/two/three/four/five.py:1") == ".../three/four/five.py:1"
    assert short_source("") == ""


def test_scopes_lose_the_marks_of_transformations() -> None:
    assert short_scope("jvp(GPT)/block_0/mlp") == "GPT/block_0/mlp"
    assert short_scope("transpose(jvp(GPT))/out") == "GPT/out"
    assert short_scope("jvp()") == ""


def test_table_aligns_and_drops_empty_columns() -> None:
    assert table([("a", "", "10"), ("bbb", "", "5")], "<<>") == ["  a    10", "  bbb   5"]


def test_printing_a_plan_is_its_description() -> None:
    plan = plan_of_layers()
    assert str(plan) == describe(plan)


def test_report_names_policy_status_and_totals() -> None:
    plan = plan_of_layers(remat.policies.MinCut(memory_weight=0))
    text = describe(plan)
    assert "min_cut(memory_weight=0)" in text
    assert plan.certificate is not None
    assert "certified: cut capacity = flow value = " + f"{plan.certificate.value:,}" in text
    assert f"{plan.baseline_saved_bytes:,} -> {plan.saved_bytes:,}" in text
    assert f"{plan.baseline_peak_bytes:,} -> {plan.peak_bytes:,}" in text
    assert "estimates: roofline of h200" in text


def test_heuristic_and_feasible_plans_say_so() -> None:
    assert "heuristic, no bound" in describe(plan_of_layers("full"))
    cut = remat.policies.MinCut.paper()
    proof = remat.plan(layers, [f32(8, 8)], f32(4, 8), remat_policy=cut).certificate
    assert proof is not None
    proof = dataclasses.replace(proof, value=100, bound=98)
    plan = dataclasses.replace(plan_of_layers(), status="feasible", certificate=proof)
    assert "feasible, within 2.00% of the bound" in describe(plan)


def test_equal_values_of_equal_blocks_share_a_row() -> None:
    text = describe(plan_of_layers("names", count=12))
    (row,) = [line for line in text.splitlines() if "dot_general 'projection'" in line]
    assert "x12" in row and "f32[64,32]" in row and "96.0 KiB" in row
    assert f"{os.path.join('tests', 'test_report.py')}:" in row
    assert "layer_*: avoids" in text and "flops of dot_general (each)" in text
    assert "alive anyway" in text


def test_repeated_operators_share_a_row() -> None:
    text = describe(plan_of_layers("full"))
    again = text[text.index("Runs again") :]
    assert "dot_general x4" in again or "dot_general x3" in again
    assert "tanh x" in again
    assert "layer_*" in again


def test_nothing_to_recompute() -> None:
    assert "Nothing runs again in the backward pass." in describe(plan_of_layers("save_all"))


def test_masks_are_shown_packed_with_their_raw_size() -> None:
    text = describe(plan_of_case("gpt_tiny"))
    assert "bool[4,64,64] as bits" in text
    assert "raw it would take 64.0 KiB" in " ".join(text.split())


def test_top_limits_the_rows_but_not_the_sums() -> None:
    plan = plan_of_case("gpt_tiny")
    short, long = describe(plan, top=2), describe(plan, top=100)
    assert len(short.splitlines()) < len(long.splitlines())
    assert "smaller," in short and "cheaper," in short
    assert "smaller," not in long and "cheaper," not in long


@pytest.mark.parametrize("name", ["gpt_tiny", "lstm_small", "resnet18_small"])
def test_lines_are_about_a_hundred_columns(name: str) -> None:
    longest = max(describe(plan_of_case(name)).splitlines(), key=len)
    assert len(longest) <= 104, longest


def test_loops_have_their_own_report() -> None:
    plan = plan_of_case("gpt_blocks_scan_small")
    text = describe(plan)
    assert "Loop scan0: 3 iterations" in text
    body = text[text.index("Loop scan0") :]
    assert "  Kept for the backward pass" in body
    assert "Block/mlp_in: avoids 262,144 flops of dot_general" in body
    assert "stacked over its iterations" in text


def test_loops_planned_alike_are_reported_once() -> None:
    text = describe(plan_of_case("lstm_small"))
    assert "Loops scan0, scan1 (alike), each: 32 iterations" in text


def with_a_branch(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x @ w)
    return jnp.sum(jnp.tanh(y) ** 2)


def test_opaque_operators_are_never_left_out() -> None:
    cut = remat.policies.MinCut.paper()
    plan = remat.plan(with_a_branch, f32(8, 8), f32(8, 8), remat_policy=cut)
    assert plan.opaque
    text = describe(plan, top=1)
    opaque = " ".join(text[text.index("Opaque operators") :].split())
    assert "cond (forward)" in opaque and "cond (backward)" in opaque
    assert opaque.count(" - ") == len(plan.opaque)
    assert f"from {os.path.join('tests', 'test_report.py')}:" in opaque


def test_notes_are_printed() -> None:
    plan = dataclasses.replace(plan_of_layers(), notes=("the budget is met by packing masks",))
    assert "- the budget is met by packing masks" in describe(plan)


def test_report_of_a_saved_plan_is_the_same() -> None:
    plan = plan_of_layers()
    assert describe(Plan.from_json(plan.to_json())) == describe(plan)


def test_report_of_an_empty_baseline() -> None:
    text = describe(remat.plan(lambda x: 2.0 * x, f32()))
    assert "Kept for the backward pass: 0 values, 0 B." in text


def test_report_of_a_budget_of_no_bytes() -> None:
    """A share of a program that has no temporaries."""
    plan = remat.plan(lambda x: jnp.sum(x), f32(4), budget=0.5, confirm=False)
    assert plan.budget_bytes == 0
    (line,) = [line for line in str(plan).splitlines() if line.startswith("budget")]
    assert line == "budget: 0 B (0 bytes)"
