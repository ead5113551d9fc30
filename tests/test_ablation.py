"""The benchmark of MONeT's ablation: its costs, its check, and a run of its smallest model."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from benchmarks import ablation
from benchmarks.ablation import Ablated, Settings
from benchmarks.budgets import Results, read_rows
from benchmarks.planners import graph_of
from models import vgg
from models.cases import CASES
from remat.memory import peak_bytes
from remat.policies import Ilp, Monet
from remat.policies.base import Decision
from remat.policies.condense import condense
from remat.policies.problem import replay

PICOSECONDS = 10**12
TINY = Settings(seconds=2.0, ratios=(0.7,))


def tiny() -> tuple[Any, tuple[Any, ...]]:
    """Two convolutions, each with a relu and a max-pool, and dense layers with relu and dropout."""
    return vgg.vgg_loss(vgg.VGGConfig((1, 1), filters=4, hidden=8, classes=4), 4, 16)


@pytest.fixture(autouse=True)
def tiny_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "tiny", tiny)


def total(graph: Any) -> int:
    """Picoseconds of a program that repeats nothing."""
    return round(condense(graph).problem.total_cost * PICOSECONDS)


def rows_at(ratio: float, settings: Settings = TINY) -> dict[str, Ablated]:
    settings = dataclasses.replace(settings, ratios=(ratio,))
    done = ablation.run_model("tiny", settings, Results(None, [], settings.device))
    return {row.implementations: row for row in done}


# --- costs


def test_with_all_the_memory_nothing_is_repeated_and_rewrites_only_save() -> None:
    graph = graph_of("tiny")
    rows = rows_at(1.0, dataclasses.replace(TINY, rounding=True))
    assert list(rows) == ["none", "output", "intermediate", "exact", "all"]
    for row in rows.values():
        assert row.error is None and row.baseline_picoseconds == total(graph)
        assert row.baseline_peak_bytes == row.budget_bytes == peak_bytes(graph)
        assert row.predicted_bytes <= row.budget_bytes
    assert rows["none"].picoseconds == total(graph) and rows["none"].overhead == 0.0
    assert rows["none"].sites == {}
    least = min(rows[name].picoseconds for name in ("none", "output", "intermediate"))
    assert rows["exact"].picoseconds <= least
    assert ablation.violations(list(rows.values())) == []


def test_a_row_is_the_cost_of_its_plan() -> None:
    """Certificate, sequence replayed, and overhead are one number; without implementations it is that of `ilp`."""
    rows = rows_at(0.7)
    for name, row in rows.items():
        policy = TINY.policy(name)
        plan = remat.plan(*tiny_call(), remat_policy=policy, budget=row.budget_bytes)
        assert plan.certificate is not None
        assert row.picoseconds == plan.certificate.value
        assert row.overhead == plan.certificate.value / total(graph_of("tiny")) - 1
        assert row.predicted_bytes == plan.peak_bytes <= row.budget_bytes
        assert row.sites == dict(Counter(site.partition("@")[0] for site in plan.graph.sites))
    ilp = Ilp(seconds=2.0, implementations="none")
    plan = remat.plan(*tiny_call(), remat_policy=ilp, budget=rows["none"].budget_bytes)
    assert plan.certificate is not None and plan.certificate.value == rows["none"].picoseconds
    assert rows["exact"].picoseconds <= min(row.picoseconds for row in rows.values())


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
    wanted = Ablated("tiny", "exact", 0.01, "c", 100, 10_000, 1)
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
    command = ["tiny", "--ratios", "0.8", "0.01", "--seconds", "2", "--resume", str(path)]
    assert ablation.main([*command, "--check"]) == 0
    rows = read_rows(path, Ablated)
    names = ["none", "output", "intermediate", "exact"]
    assert [row.implementations for row in rows] == 2 * names
    assert [row.error is None for row in rows] == [True] * 4 + [False] * 4
    written = json.loads(path.read_text())
    assert (written["device"], written["kind"]) == ("h200", "ablation, planned")
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(rows) + 1 and printed.endswith("nothing is missed\n")
    assert "  exact at 0.8" in printed and "  none at 0.01" in printed

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
