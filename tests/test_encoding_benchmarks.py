"""The benchmark of forms and implementations: its rows, its budgets, and a run of its smallest model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import encodings
from benchmarks.budgets import Results, read_rows
from benchmarks.encodings import Encoded, Settings
from benchmarks.programs import Row
from models import cases
from remat.policies import POLICIES, Checkmate, Full, Ilp, MinCut

_HAS_PLUGIN = any(
    importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.{name}")
    for name in ("xla_cuda13", "xla_cuda12")
)
needs_gpu_compiler = pytest.mark.skipif(
    not _HAS_PLUGIN, reason="XLA:GPU is not installed: pip install 'remat[deviceless]' (Linux)"
)
TINY = Settings("cpu", seconds=1.0, small=True, shares=(), references=("min_cut",))
NONE_ROW = Encoded("m", "baseline", "none", "c", None, 90, 100, 50, 8, roofline_seconds=2.0)
NONE_ROW = dataclasses.replace(NONE_ROW, policy="none")
MIN_CUT_ROW = dataclasses.replace(NONE_ROW, label="min_cut", policy="min_cut", temp_bytes=60)


def _wanted(policy: str, budget: int | None = None, settings: Settings = TINY) -> Encoded:
    kind = "baseline" if budget is None else "between"
    return Encoded("m", kind, policy, settings.code, budget, policy=policy)


# --- models and settings


def test_models_are_cases_and_their_tiny_versions_are_losses() -> None:
    assert {"vgg16", "resnet50", "unet", "transformer", "nmt"} <= set(encodings.MODELS)
    for name, (full, tiny) in encodings.MODELS.items():
        assert full in cases.CASES.values(), name
        loss, shapes = tiny()
        assert jax.eval_shape(loss, *shapes) == jax.ShapeDtypeStruct((), jnp.float32), name


def test_policies_are_made_for_the_device_and_the_time() -> None:
    settings = Settings("a100", seconds=3.0)
    assert settings.policy("checkmate") == Checkmate(device="a100", seconds=3.0)
    assert settings.policy("min_cut") == MinCut(device="a100")  # has no time limit
    assert settings.policy("full") == Full()
    assert Settings("a100").policy("ilp") == Ilp(device="a100")


def test_rows_of_other_settings_are_other_code() -> None:
    variants = [
        TINY,
        dataclasses.replace(TINY, device="h200"),
        dataclasses.replace(TINY, seconds=2.0),
        dataclasses.replace(TINY, small=False),
    ]
    assert len({settings.code for settings in variants}) == len(variants)


def test_policies_that_are_not_registered_are_left_out_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(POLICIES, "gist", raising=False)
    monkeypatch.setitem(POLICIES, "monet", Ilp)
    assert encodings._policies(("none", "gist", "monet")) == ("none", "monet")
    assert capsys.readouterr().out == "skipped: no policy is registered as 'gist'\n"


# --- budgets and what is missed


def test_budgets_are_the_temps_of_references_and_shares_of_none() -> None:
    echo = dataclasses.replace(MIN_CUT_ROW, label="echo", policy="echo", temp_bytes=40)
    settings = Settings(shares=(0.75, 0.5))
    assert [*encodings._budgets([NONE_ROW, MIN_CUT_ROW, echo], settings, "m")] == [
        ("at a baseline", "as min_cut", 60),
        ("at a baseline", "as echo", 40),
        ("between", "75% of none", 75),
        ("between", "50% of none", 50),
    ]
    failed = dataclasses.replace(echo, temp_bytes=0, error="no")
    assert [b for _, _, b in encodings._budgets([NONE_ROW, failed], settings, "m")] == [75, 50]


def test_a_policy_that_fails_is_a_line_and_no_baseline() -> None:
    failed = dataclasses.replace(NONE_ROW, label="gist", policy="gist", temp_bytes=0, error="why")
    failed = dataclasses.replace(failed, roofline_seconds=0.0)  # as if it were the fastest of all
    ours = dataclasses.replace(
        MIN_CUT_ROW, kind="at a baseline", label="ilp", policy="ilp", budget_bytes=60
    )
    assert encodings.violations([NONE_ROW, MIN_CUT_ROW, ours]) == []
    assert encodings.violations([NONE_ROW, MIN_CUT_ROW, failed, ours]) == ["m, gist: why"]
    above = dataclasses.replace(ours, temp_bytes=61)
    (line,) = encodings.violations([NONE_ROW, MIN_CUT_ROW, above])
    assert "compiled temp is" in line and "(+1 bytes" in line


def test_monet_is_held_to_what_checkmate_reaches() -> None:
    budget = dataclasses.replace(MIN_CUT_ROW, kind="between", budget_bytes=70)
    theirs = dataclasses.replace(budget, label="checkmate, here", policy="checkmate")
    ours = dataclasses.replace(budget, label="monet, here", policy="monet")
    assert encodings.violations([NONE_ROW, theirs, ours]) == []
    slower = dataclasses.replace(ours, roofline_seconds=2.5)
    line = "m, monet, here: 2500.000 ms and 0.000 GiB, 'checkmate, here' 2000.000 ms and 0.000 GiB"
    assert encodings.violations([NONE_ROW, theirs, slower]) == [line]
    refused = dataclasses.replace(ours, error="no")
    (line,) = encodings.violations([NONE_ROW, theirs, refused])
    assert line.startswith("m, monet, here: no plan, 'checkmate, here'")
    elsewhere = dataclasses.replace(theirs, budget_bytes=80)
    # A plan above its budget is a miss of its own, and no reason to be as fast.
    above = dataclasses.replace(theirs, temp_bytes=71)
    failed = dataclasses.replace(theirs, error="no")
    assert encodings.violations([NONE_ROW, elsewhere, failed, slower]) == []
    (line,) = encodings.violations([NONE_ROW, above, slower])
    assert "compiled temp is" in line


def test_a_model_whose_smallest_peak_is_far_below_has_a_deeper_budget() -> None:
    kinds = encodings._budgets([NONE_ROW], Settings(), "transformer")
    assert [budget for _, _, budget in kinds] == [70, 50, 25, 16, 15]
    assert [b for _, _, b in encodings._budgets([NONE_ROW], Settings(), "vgg16")] == [70, 50]
    asked = Settings(shares=(0.5,))
    assert [b for _, _, b in encodings._budgets([NONE_ROW], asked, "transformer")] == [50]


# --- rows


def test_flops_are_those_of_the_products_that_run() -> None:
    """Forward `[8, 16] x [16, 4]`, backward its transposed product for the weights: each 2 * 8 * 16 * 4."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x @ w))

    shapes = (
        jax.ShapeDtypeStruct((16, 4), jnp.float32),
        jax.ShapeDtypeStruct((8, 16), jnp.float32),
    )
    row = encodings.measure(_wanted("none"), Row("none", loss, shapes), TINY)
    assert (row.matmuls, row.heavy_flops) == (2, 2 * 2 * 8 * 16 * 4)
    assert (row.error, row.plan_seconds, row.label) == (None, 0.0, "none")
    assert row.saved_bytes == 8 * 4 * 4  # the product; the arguments are alive anyway


def test_a_budget_that_is_impossible_is_a_row_with_the_reason() -> None:
    plain = Row("none", *encodings.MODELS["vgg16"][1]())
    row = encodings.measure(_wanted("ilp", budget=100), plain, TINY)
    assert row.error is not None and "100 bytes" in row.error
    assert row.temp_bytes == 0 and row.predicted_bytes is None
    assert row.smallest_bytes is not None and row.smallest_bytes > 100
    assert "none found: " in encodings._columns(row)


def test_the_smallest_model_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "encodings.json"
    command = ["vgg16", "--small", "--policies", "none", "min_cut", "ilp", "--resume", str(path)]
    assert encodings.main(command) == 0
    rows = read_rows(path, Encoded)
    none, cut, ours = rows
    assert [row.policy for row in (none, cut, ours)] == ["none", "min_cut", "ilp"]
    assert [row.model for row in rows] == ["vgg16, small"] * 3
    assert ours.budget_bytes == cut.temp_bytes > 0
    assert none.saved_bytes and cut.saved_bytes and cut.saved_bytes < none.saved_bytes
    assert (cut.convolutions, cut.heavy_flops) == (none.convolutions, none.heavy_flops)
    assert none.heavy_flops > 0
    assert ours.error or (ours.predicted_bytes or 0) <= cut.temp_bytes
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(rows) and "  ilp, as min_cut" in printed

    def never(*arguments: Any) -> Any:
        raise AssertionError(f"made again: {arguments}")

    monkeypatch.setattr(encodings, "measure", never)
    assert encodings.main(command) == 0
    assert read_rows(path, Encoded) == rows
    assert capsys.readouterr().out == printed
    written = json.loads(path.read_text())
    assert (written["device"], written["kind"]) == ("cpu", "encodings, compiled, device absent")


def test_a_run_is_written_down_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "encodings.json"

    def interrupted(wanted: Encoded, plain: Row, settings: Settings) -> Encoded:
        if wanted.policy != "none":
            raise KeyboardInterrupt
        return dataclasses.replace(wanted, temp_bytes=7)

    monkeypatch.setattr(encodings, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encodings.run_model("unet", TINY, Results(path, [], "cpu"))
    (row,) = read_rows(path, Encoded)
    assert (row.label, row.temp_bytes) == ("none", 7)


@pytest.mark.gpu_compile
@needs_gpu_compiler
def test_the_gpu_compiler_sees_what_was_planned() -> None:
    settings = dataclasses.replace(TINY, device="h200")
    plain = Row("none", *encodings.MODELS["transformer"][1]())
    none, cut = (
        encodings.measure(_wanted(policy, None, settings), plain, settings)
        for policy in ("none", "min_cut")
    )
    assert cut.saved_bytes and none.saved_bytes and cut.saved_bytes < none.saved_bytes
    assert cut.temp_bytes < none.temp_bytes
    assert (cut.matmuls, cut.heavy_flops) == (none.matmuls, none.heavy_flops)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown models ['nonsense']"),
        (["--shares", "0"], "expected numbers above 0 and up to 1"),
        (["--seconds", "-1"], "expected a positive number"),
        (["--small", "--check"], "--check with --small"),
        (["--policies", "nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        encodings.main(arguments)
    assert message in capsys.readouterr().err
