"""The benchmark of MONeT's ablation: its costs, its check, and a run of its smallest model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import remat
from benchmarks import ablation
from benchmarks.ablation import Ablated, Settings
from benchmarks.budgets import Results, read_rows
from benchmarks.planners import graph_of
from models.cases import CASES
from remat.core.devices import get_device
from remat.memory.predict import peak_bytes
from remat.policies import Monet
from remat.policies.base import Decision
from remat.policies.buffers.condense import condense
from remat.policies.solvers.problem import replay

PICOSECONDS = 10**12
BYTES_PER_SECOND = get_device("h200").memory_bytes_per_second
TINY = Settings(seconds=2.0, ratios=(0.7,))


def tiny() -> tuple[Any, tuple[Any, ...]]:
    """Four dense layers with relu, then a max-pool whose windows do not overlap."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        x = nn.max_pool(x.reshape(-1, 8, 8, 64), (2, 2), (2, 2))
        return jnp.sum(x**2)

    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    return loss, ([w] * 4, x)


@pytest.fixture(autouse=True)
def tiny_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "tiny", tiny)


def total(graph: Any) -> int:
    """Picoseconds of a program that repeats nothing."""
    return round(condense(graph).problem.total_cost * PICOSECONDS)


# --- costs


def test_with_all_the_memory_rewrites_only_save() -> None:
    """Three masks of 512 x 64 bits are neither written nor read; what the kinds save adds up."""
    graph = graph_of("tiny")
    settings = dataclasses.replace(TINY, ratios=(1.0,), rounding=True)
    done = ablation.run_model("tiny", settings, Results(None, [], settings.device))
    rows = {row.implementations: row for row in done}
    assert list(rows) == ["none", "output", "intermediate", "exact", "all"]
    for row in done:
        assert row.error is None and row.baseline_picoseconds == total(graph)
        assert row.baseline_peak_bytes == row.budget_bytes == peak_bytes(graph)
        assert row.predicted_bytes <= row.budget_bytes
    none, output, intermediate, exact = done[:4]
    assert none.picoseconds == total(graph) and none.overhead == 0.0
    masks = 3 * 512 * 64 // 8
    assert none.picoseconds - output.picoseconds == round(
        2 * masks / BYTES_PER_SECOND * PICOSECONDS
    )
    assert intermediate.picoseconds < output.picoseconds
    both = output.picoseconds + intermediate.picoseconds - none.picoseconds
    assert abs(exact.picoseconds - both) <= 1  # of rounding
    assert [row.sites for row in done[:4]] == [
        {},
        {"mask_from_output": 3},
        {"pool_codes": 1},
        {"pool_codes": 1, "mask_from_output": 3},
    ]
    assert ablation.violations(done) == []


def test_with_less_memory_one_layer_runs_again_where_nothing_is_rewritten() -> None:
    graph = graph_of("tiny")
    peak = peak_bytes(graph)
    budget = int(0.55 * peak)
    none, exact = (
        ablation.measure(Ablated("tiny", name, 0.55, "c", budget, peak, total(graph)), TINY)
        for name in ("none", "exact")
    )
    condensed = condense(graph)
    costs = condensed.problem.costs
    product, relu = costs[0], costs[1]  # every layer costs the same
    assert none.picoseconds == round((condensed.problem.total_cost + product + relu) * PICOSECONDS)
    assert exact.picoseconds < total(graph) and exact.overhead < 0 < none.overhead
    for row in (none, exact):
        assert row.predicted_bytes <= budget
        assert row.overhead == row.picoseconds / total(graph) - 1


def tiny_call() -> tuple[Any, ...]:
    function, args = tiny()
    return (function, *args)


def test_a_plan_without_a_certificate_is_replayed() -> None:
    plan = remat.plan(*tiny_call(), remat_policy="full")
    assert plan.certificate is None
    condensed = condense(plan.graph)
    sequence = ablation.sequence_of(condensed, Decision(frozenset(plan.saved_values)))
    extra = replay(condensed.problem, sequence).extra_cost
    cost = ablation._picoseconds(plan, "h200")
    assert cost == round((condensed.problem.total_cost + extra) * PICOSECONDS) > total(plan.graph)


def test_loops_have_no_single_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0])

    shapes = (jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32"))
    monkeypatch.setitem(CASES, "looped", lambda: (loss, shapes))
    with pytest.raises(ValueError, match="a program with loops has no single cost: \\['scan0'\\]"):
        ablation.measure(Ablated("looped", "none", 1.0, "c", 10**6, 10**6, 1), TINY)


def test_a_budget_that_is_impossible_is_a_row_with_the_reason() -> None:
    wanted = Ablated("tiny", "output", 0.01, "c", 100, 10_000, 1)
    row = ablation.measure(wanted, TINY)
    assert row.error is not None and "100 bytes" in row.error
    assert row.smallest_bytes is not None and row.smallest_bytes > 100
    assert (row.picoseconds, row.predicted_bytes, row.sites) == (0, 0, None)
    assert "none found, smallest" in ablation._columns(row)


# --- what is missed

EXACT = Ablated("m", "exact", 0.5, "c", 50, 100, 1_000_000, 1_100_000)


def variant(**changes: Any) -> Ablated:
    return dataclasses.replace(EXACT, **changes)


def test_more_choice_may_not_be_dearer() -> None:
    none = variant(implementations="none", picoseconds=1_200_000)
    assert ablation.violations([none, EXACT]) == []
    within = variant(implementations="output", picoseconds=1_098_000)  # the tolerance is 0.2 %
    assert ablation.violations([none, within, EXACT]) == []
    cheaper = variant(implementations="intermediate", picoseconds=1_000_000)
    (line,) = ablation.violations([none, cheaper, EXACT])
    assert line == "m at 0.5: exact is 10.000% dearer than intermediate"
    elsewhere = variant(implementations="none", ratio=0.6, budget_bytes=60, picoseconds=1)
    inexact = variant(implementations="all", picoseconds=1)
    assert ablation.violations([elsewhere, inexact, EXACT]) == []


def test_more_choice_finds_a_plan_if_less_does() -> None:
    failed = variant(error="no", picoseconds=0)
    none = variant(implementations="none")
    assert ablation.violations([none, failed]) == ["m at 0.5: exact finds no plan, none does"]
    none = dataclasses.replace(none, error="no", picoseconds=0)
    assert ablation.violations([none, failed]) == ablation.violations([none, EXACT]) == []


# --- settings and rows


def test_models_are_cases() -> None:
    assert set(ablation.MODELS) <= set(CASES)
    assert ablation.RATIOS[0] == 0.53


def test_each_row_has_its_planner() -> None:
    settings = Settings("a100", rounding=True, seconds=3.0)
    expected = {
        "none": "none",
        "output": ("output",),
        "intermediate": ("intermediate",),
        "exact": "exact",
        "all": "all",
    }
    assert settings.implementations == expected
    for name, wanted in expected.items():
        policy = Monet(implementations=wanted, device="a100", seconds=3.0)  # type: ignore[arg-type]
        assert settings.policy(name) == policy
    assert list(Settings().implementations) == ["none", "output", "intermediate", "exact"]
    assert Settings().policy("exact") == Monet()


def test_rows_of_other_settings_are_other_code() -> None:
    settings = [TINY, dataclasses.replace(TINY, device="a100"), Settings()]
    assert len({entry.code for entry in settings}) == len(settings)
    assert dataclasses.replace(TINY, ratios=(0.1,)).code == TINY.code  # other rows, the same code


def test_a_model_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ablation.json"
    command = ["tiny", "--ratios", "0.9", "0.8", "--seconds", "2", "--resume", str(path)]
    assert ablation.main([*command, "--check"]) == 0
    rows = read_rows(path, Ablated)
    names = ["none", "output", "intermediate", "exact"]
    assert [row.implementations for row in rows] == 2 * names
    assert [row.ratio for row in rows] == [0.9] * 4 + [0.8] * 4
    written = json.loads(path.read_text())
    assert (written["device"], written["kind"]) == ("h200", "ablation, planned")
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(rows) + 1 and printed.endswith("nothing is missed\n")
    assert "  exact at 0.8" in printed and "  none at 0.9" in printed

    def never(*arguments: Any) -> Any:
        raise AssertionError(f"made again: {arguments}")

    monkeypatch.setattr(ablation, "measure", never)
    assert ablation.main(command) == 0
    assert read_rows(path, Ablated) == rows
    assert capsys.readouterr().out == printed


def test_check_fails_if_something_is_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dearer(wanted: Ablated, settings: Settings) -> Ablated:
        return dataclasses.replace(wanted, picoseconds=2 + (wanted.implementations == "exact"))

    monkeypatch.setattr(ablation, "measure", dearer)
    assert ablation.main(["tiny", "--ratios", "0.5"]) == 0
    assert ablation.main(["tiny", "--ratios", "0.5", "--check"]) == 1
    assert "MISSED  tiny at 0.5: exact is 50.000% dearer than none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown models ['nonsense']"),
        (["--ratios", "0"], "expected numbers above 0 and up to 1"),
        (["--ratios", "1.5"], "expected numbers above 0 and up to 1"),
        (["--seconds", "-1"], "expected a positive number"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ablation.main(arguments)
    assert message in capsys.readouterr().err
