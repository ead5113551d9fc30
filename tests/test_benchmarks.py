"""The benchmarks as programs: every `--check` can fail, and a small run of every script works."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from benchmarks import (
    ablation,
    budgets,
    coarsening,
    compiled,
    depth,
    dtr_policy,
    encodings,
    gpu,
    gpu_absent,
    gpu_cases,
    gpu_worker,
    planners,
    planning,
    search,
)
from benchmarks.programs import GROUPS, Bound, Row
from models import mlp
from models.cases import CASES

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
MIB = 2**20


# --- checks: rows that miss nothing, and each change of the last that misses something ----------------

COMPILED = compiled.Measured("g", "base", 100.0, 10.0, 20, 3, 50, 1.0)
FULL = budgets.Measured(
    "m", "baseline", budgets.FULL, "c", None, None, 100 * MIB, 50, 30, 5, 9, 3.0
)
DOTS = dataclasses.replace(
    FULL, label="dots", temp_bytes=200 * MIB, traffic_bytes=40, matmuls=20, roofline_seconds=2.0
)
OURS = dataclasses.replace(DOTS, kind="at a baseline", label="ours", budget_bytes=200 * MIB)
BETWEEN = dataclasses.replace(OURS, kind="between", matmuls=99, traffic_bytes=2**40)
PLANNED = planners.Solved("m", "ilp", 0.5, 9, 99, 1.0, 100, "planned", 0.10, 0.05, 90, 10.0, 9.0)
NONE_ROW = encodings.Encoded(
    "m", "baseline", "none", "c", None, 90, 100, 50, 8, roofline_seconds=2.0, policy="none"
)
CHECKMATE = dataclasses.replace(
    NONE_ROW, kind="between", label="checkmate", policy="checkmate", budget_bytes=100
)
MONET = dataclasses.replace(CHECKMATE, label="monet", policy="monet")
GRID = [depth.Depth(n, "grid", 1, 2**40, t * MIB, 1, 0.0, 0.0) for n, t in ((16, 40), (64, 120))]
SEARCHED = {"graph": "resnet50", "budget": 0.8, "feasible": True, "extra_percent": 0.30}
SEARCHED |= {"reorder": True, "seconds_asked": 40.0}
LAYERED = {**SEARCHED, "graph": "layered_1000", "budget": 0.9, "extra_percent": 0.6}
COARSENED = coarsening.Coarsened("m", 0.5, 10, 20, 100, 1.0, 5, 6, 0, 0.995, "all of mul")
LAYERS_52 = {"layers": 52, "joint_equations": 16_298, "echo_seconds": 0.3}
NO_CHOICE = ablation.Ablated("m", "none", 0.5, "c", 50, 100, 1_000_000, 1_100_000)
EXACT = dataclasses.replace(NO_CHOICE, implementations="exact", picoseconds=1_102_000)


def _bounds(rows: list[compiled.Measured]) -> list[str]:
    bound = Bound(
        "ours", "base", 0.5, 1.05, temp_mib=50, traffic_gib=10.5, matmuls=22, convolutions=3
    )
    return compiled.missed(bound, {row.label: row for row in rows})


CHECKS: dict[str, tuple[Callable[[list[Any]], list[str]], list[Any], list[dict[str, Any]]]] = {
    "compiled": (
        _bounds,
        [
            COMPILED,
            dataclasses.replace(
                COMPILED, label="ours", temp_mib=50.0, traffic_gib=10.5, matmuls=22
            ),
        ],
        [{"temp_mib": 51}, {"traffic_gib": 10.6}, {"matmuls": 23}, {"convolutions": 4}],
    ),
    "budgets": (
        budgets.violations,
        [FULL, DOTS, OURS],
        [
            {"temp_bytes": 200 * MIB + 1},
            {"traffic_bytes": 2**30},
            {"matmuls": 21},
            {"convolutions": 6},
            {"error": "...", "smallest_bytes": 210 * MIB},
        ],
    ),
    "budgets between": (budgets.violations, [FULL, DOTS, BETWEEN], [{"temp_bytes": 201 * MIB}]),
    "planners": (
        planners.problems_of,
        [PLANNED],
        [
            {"extra": 0.2},
            {"bound": None},
            {"wall_seconds": 61.0, "cpu_seconds": 60.1},
            {"wall_seconds": 30.1, "cpu_seconds": 99.0, "model": "gpt_48"},
            {"outcome": "none found"},
            {"outcome": "not applicable"},
        ],
    ),
    "encodings": (
        encodings.violations,
        [NONE_ROW, CHECKMATE, MONET],
        [{"temp_bytes": 101}, {"roofline_seconds": 2.5}, {"error": "no"}],
    ),
    "depth": (depth.problems_of, GRID, [{"temp_bytes": 121 * MIB}, {"predicted_bytes": MIB}]),
    "search": (search.problems_of, [SEARCHED], [{"feasible": False}, {"extra_percent": 0.31}]),
    "search, layered": (
        search.problems_of,
        [LAYERED],
        [
            {"extra_percent": 0.61},
            {"budget": 0.7, "graph": "random_layered_1000", "extra_percent": 12},
        ],
    ),
    "coarsening": (coarsening.problems_of, [COARSENED], [{"best_seconds": 0.98}]),
    "planning": (planning.problems_of, [LAYERS_52], [{"echo_seconds": 0.41}]),
    "dtr_policy": (
        dtr_policy.violations,
        [dtr_policy.Planned("m", "dtr", 0.5, "c", 9, budget_bytes=100, predicted_bytes=100)],
        [{"predicted_bytes": 101}, {"invalid": "reads what is not there"}],
    ),
    "ablation": (
        ablation.violations,
        [NO_CHOICE, EXACT],  # 0.2 % are allowed
        [{"picoseconds": 1_200_000}, {"error": "no", "picoseconds": 0}],
    ),
}


def _changed(row: Any, changes: dict[str, Any]) -> Any:
    return {**row, **changes} if isinstance(row, dict) else dataclasses.replace(row, **changes)


def _misses() -> Iterator[Any]:
    for name, (_, _, changes) in CHECKS.items():
        for change in changes:
            yield pytest.param(name, change, id=f"{name}-{'-'.join(change)}")


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_reached_exactly_misses_nothing(name: str) -> None:
    check, rows, _ = CHECKS[name]
    assert check(rows) == []


@pytest.mark.parametrize(("name", "change"), list(_misses()))
def test_what_is_missed_is_said(name: str, change: dict[str, Any]) -> None:
    check, rows, _ = CHECKS[name]
    assert check([*rows[:-1], _changed(rows[-1], change)])


def test_the_baseline_to_beat_is_the_fastest_that_fits() -> None:
    none = dataclasses.replace(DOTS, label=budgets.NONE, temp_bytes=400 * MIB, roofline_seconds=2.5)
    at_none = dataclasses.replace(OURS, budget_bytes=400 * MIB, matmuls=21)
    (line,) = budgets.violations([none, FULL, DOTS, at_none])
    assert "'dots'" in line
    at_full = dataclasses.replace(OURS, budget_bytes=150 * MIB, temp_bytes=MIB, traffic_bytes=50)
    assert budgets.violations([none, FULL, DOTS, at_full]) == []  # only 'full' fits


def test_impossible_budgets_are_no_problem() -> None:
    for outcome in ("below the floor", "proven infeasible"):
        assert planners.problems_of([_changed(PLANNED, {"outcome": outcome, "bound": None})]) == []
    impossible = {"budget_bytes": MIB, "error": "...", "smallest_bytes": 2 * MIB}
    assert budgets.violations([FULL, DOTS, _changed(BETWEEN, impossible)]) == []


def test_check_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "run", lambda layers: {**LAYERS_52, "echo_seconds": 0.41})
    assert planning.main(["--layers", "52"]) == 0
    assert planning.main(["--layers", "52", "--check"]) == 1

    def dearer(wanted: ablation.Ablated, settings: ablation.Settings) -> ablation.Ablated:
        return dataclasses.replace(wanted, picoseconds=2 + (wanted.implementations == "exact"))

    monkeypatch.setitem(CASES, "tiny", tiny)
    monkeypatch.setattr(ablation, "measure", dearer)
    assert ablation.main(["tiny", "--ratios", "0.5"]) == 0
    assert ablation.main(["tiny", "--ratios", "0.5", "--check"]) == 1
    assert capsys.readouterr().out.count("MISSED") >= 2


def test_the_recorded_plan_of_16000_operators_misses_nothing() -> None:
    rows = json.loads((ROOT / "benchmarks/results/planning_2cores.json").read_text())["rows"]
    assert 16_000 < rows[-1]["joint_equations"] <= planning.ECHO_OPERATORS
    assert planning.problems_of(rows) == []


def test_every_bound_of_a_group_limits_something() -> None:
    for name, group in GROUPS.items():
        assert group.name == name
        for bound in group.bounds:
            limits = dataclasses.asdict(bound)
            factors = {limits.pop("temp_factor"), limits.pop("traffic_factor")}
            has_baseline = limits.pop("baseline") is not None
            assert has_baseline == (factors != {None})
            limits.pop("row")
            assert has_baseline or any(limit is not None for limit in limits.values())


@pytest.mark.parametrize("name", ["residual_mlp", "gelu"])
def test_bounds_speak_of_rows_that_exist(name: str) -> None:
    labels = [row.label for row in GROUPS[name].rows()]
    assert labels[0] == "none" and len(set(labels)) == len(labels)
    for bound in GROUPS[name].bounds:
        assert {bound.row, bound.baseline} - {None} <= set(labels)


# --- small runs -----------------------------------------------------------------------------------------


def tiny() -> tuple[Any, tuple[Any, ...]]:
    """Four dense layers with relu, then a max-pool whose windows do not overlap."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        x = nn.max_pool(x.reshape(-1, 8, 8, 64), (2, 2), (2, 2))
        return jnp.sum(x**2)

    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    return loss, ([w] * 4, x)


def never(*arguments: Any) -> Any:
    raise AssertionError(f"made again: {arguments}")


@pytest.mark.parametrize("program", [ablation, budgets, coarsening, encodings, planners])
def test_unknown_models_are_an_error(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.slow
def test_budgets_of_a_small_model_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, args = mlp.residual_mlp(layers=6, width=32, hidden=32, batch=4096)

    def full(params: tuple[Any, ...], x: jax.Array) -> jax.Array:
        for weights in params:
            x = jax.checkpoint(mlp.layer)(weights, x)
        return jnp.mean(jnp.square(x), dtype=jnp.float32)

    path, rows = (
        tmp_path / "budgets.json",
        [Row(budgets.NONE, plain, args), Row(budgets.FULL, full, args)],
    )
    done = budgets.run_model("mlp", rows, "cpu", 1, budgets.Results(path, [], "cpu"))
    assert budgets.read_rows(path) == done
    kinds = ["baseline"] * 2 + ["between"] + ["at a baseline", "fitted"] * 2
    assert [row.kind for row in done] == kinds
    none, less = (row.temp_bytes for row in done[:2])
    assert [row.budget_bytes for row in done[2:]] == [(none + less) // 2, none, none, less, less]
    fitted = [row for row in done if row.kind == "fitted" and row.error is None]
    assert fitted and all(row.temp_bytes <= (row.budget_bytes or 0) for row in fitted)

    for name in ("measure_baseline", "measure_ours", "measure_fitted"):
        monkeypatch.setattr(budgets, name, never)
    again = budgets.Results(path, budgets.read_rows(path), "cpu")
    assert budgets.run_model("mlp", rows, "cpu", 1, again) == done


def test_rows_of_other_code_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    old, other = (_changed(OURS, change) for change in ({"code": "old"}, {"model": "other"}))
    results = budgets.Results(path, [old, other], "cpu")
    fresh = dataclasses.replace(OURS, matmuls=1)
    assert results.row(OURS, lambda: fresh) == fresh
    assert budgets.read_rows(path) == [fresh, other]


def test_the_hash_of_a_row_is_that_of_what_made_it() -> None:
    hashes = {budgets.code_of(d, planned=p) for d in ("cpu", "h200") for p in (False, True)}
    assert len(hashes) == 4
    made_by = ablation.Settings(seconds=2.0)
    others = [dataclasses.replace(made_by, device="a100"), ablation.Settings()]
    assert len({settings.code for settings in (made_by, *others)}) == 3
    assert dataclasses.replace(made_by, ratios=(0.1,)).code == made_by.code
    encoded = encodings.Settings("cpu", seconds=1.0, small=True)
    changes: list[dict[str, Any]] = [{}, {"device": "h200"}, {"seconds": 2.0}, {"small": False}]
    assert len({dataclasses.replace(encoded, **change).code for change in changes}) == 4


@pytest.mark.slow
def test_planners_on_a_small_graph() -> None:
    graph = planners.graph_of("residual_mlp_small")
    rows = planners.run_model("residual_mlp_small", graph, ("ilp", "sublinear"), (0.01, 0.6, 1.0))
    assert [(row.policy, row.outcome) for row in rows] == [
        ("ilp", "below the floor"),
        *[(policy, "planned") for policy in ("ilp", "sublinear")] * 2,
    ]
    assert planners.problems_of(rows) == []
    _, ilp, sublinear, *whole = rows
    assert ilp.bound is not None and 0 < ilp.bound <= ilp.extra + 1e-4 <= sublinear.extra + 1e-4
    assert all(row.peak_bytes <= row.budget_bytes for row in rows[1:])
    assert [row.extra for row in whole] == [0.0, 0.0]


@pytest.mark.slow
def test_coarsening_of_a_small_graph() -> None:
    row = coarsening.run_model("residual_mlp_small", 0.6, values=1)
    assert row.tried > 0 and row.fused > 0
    assert 0 < row.best_seconds <= row.seconds and 0 <= row.gain < coarsening.MAX_GAIN
    assert coarsening.problems_of([row]) == []


def test_dtr_beside_the_planners_on_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtr_policy, "MODELS", {"tiny": tiny})
    path = tmp_path / "dtr.json"
    command = ["--no-compile", "--budgets", "0.8", "--seconds", "5", "--resume", str(path)]
    assert dtr_policy.main([*command, "--check"]) == 0
    rows = budgets.read_rows(path, dtr_policy.Planned)
    assert [row.policy for row in rows] == ["none", *dtr_policy.Settings().policies]
    found = {row.policy: row for row in rows if row.error is None}
    assert found["none"].overhead == 0 and found["none"].temp_bytes is None
    assert found["dtr"].predicted_bytes <= 0.8 * found["none"].predicted_bytes
    assert found["dtr"].overhead >= found["ilp"].overhead > 0
    monkeypatch.setattr(dtr_policy, "measure", never)
    assert dtr_policy.main(command) == 0
    assert budgets.read_rows(path, dtr_policy.Planned) == rows


def test_ablation_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "tiny", tiny)
    path = tmp_path / "ablation.json"
    command = ["tiny", "--ratios", "0.9", "--seconds", "5", "--resume", str(path)]
    assert ablation.main([*command, "--check"]) == 0
    rows = budgets.read_rows(path, ablation.Ablated)
    assert [row.implementations for row in rows] == ["none", "output", "intermediate", "exact"]
    monkeypatch.setattr(ablation, "measure", never)
    assert ablation.main(command) == 0
    assert budgets.read_rows(path, ablation.Ablated) == rows


def test_encodings_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "encodings.json"
    command = ["vgg16", "--small", "--policies", "none", "min_cut", "ilp", "--resume", str(path)]
    assert encodings.main(command) == 0
    rows = budgets.read_rows(path, encodings.Encoded)
    none, cut, ours = rows
    assert [row.policy for row in (none, cut, ours)] == ["none", "min_cut", "ilp"]
    assert ours.budget_bytes == cut.temp_bytes > 0
    assert none.saved_bytes and cut.saved_bytes and cut.saved_bytes < none.saved_bytes
    assert (cut.convolutions, cut.heavy_flops) == (none.convolutions, none.heavy_flops)
    assert ours.error or (ours.predicted_bytes or 0) <= cut.temp_bytes
    monkeypatch.setattr(encodings, "measure", never)
    assert encodings.main(command) == 0
    assert budgets.read_rows(path, encodings.Encoded) == rows


def test_a_run_is_written_down_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "encodings.json"

    def interrupted(wanted: encodings.Encoded, *_: Any) -> encodings.Encoded:
        if wanted.policy != "none":
            raise KeyboardInterrupt
        return dataclasses.replace(wanted, temp_bytes=7)

    monkeypatch.setattr(encodings, "measure", interrupted)
    settings = encodings.Settings("cpu", small=True, shares=(), references=("min_cut",))
    with pytest.raises(KeyboardInterrupt):
        encodings.run_model("unet", settings, budgets.Results(path, [], "cpu"))
    (row,) = budgets.read_rows(path, encodings.Encoded)
    assert (row.label, row.temp_bytes) == ("none", 7)


def test_planning_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "planning.json"
    assert planning.main(["--layers", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["layers"] == 1 and row["joint_equations"] > 100
    assert {"trace_seconds", "cut_seconds", "echo_seconds", "plan_seconds_min_cut"} <= set(row)


# --- the benchmark that needs a GPU ----------------------------------------------------------------------


def test_gpu_benchmark_compiles_the_budgets_of_a_group_in_turn() -> None:
    """Each asks the compiler what the one before asked, too, and it is remembered."""
    less, least = (f"{gpu_cases.WITHIN} {share} of none" for share in (0.7, 0.5))
    rows = [("a", "none"), ("b", "none"), ("a", less), ("b", less), ("a", least), ("b", "full")]
    assert gpu._chains(rows) == [
        [("a", "none")],
        [("b", "none")],
        [("a", less), ("a", least)],
        [("b", less)],
        [("b", "full")],
    ]


def test_gpu_benchmark_runs_the_groups_that_exist() -> None:
    assert (
        set(gpu.GROUP_WEIGHTS | gpu.VALIDATION_WEIGHTS)
        == set(gpu_cases.groups())
        == {
            *GROUPS,
            *gpu_cases.BUDGETED,
            gpu_cases.TRAINING,
        }
    )
    assert set(gpu.SMALL_WEIGHTS) == set(gpu_cases.groups(small=True))


def test_results_are_written_at_once_and_never_over_each_other(tmp_path: Path) -> None:
    path = gpu._free_path(tmp_path, "NVIDIA H200", "2026-01-02")
    results = gpu.Results(path, {"started": time.time()})
    results.add({"event": "group", "group": "g", "labels": ["a", "b"]})
    results.add({"event": "row", "group": "g", "label": "a", "status": "ok", "step_ms": {}})
    record = json.loads(path.read_text())
    assert [row["status"] for row in record["rows"]] == ["ok", "started"]
    assert record["complete"] is False
    results.finish()
    assert json.loads(path.read_text())["complete"] is True
    assert gpu._free_path(tmp_path, "NVIDIA H200", "2026-01-02") != path


def test_rows_that_do_not_fit_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    gelu = gpu_cases.groups(small=True)["gelu"]
    gpu_worker.name_rows(gelu)
    (named,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert named["labels"] == ["none", "min_cut"]
    gpu_worker.run_group(gelu, named["labels"], deadline=0.0)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["status"] for event in events] == ["skipped", "skipped"]


def test_a_worker_is_killed_at_its_deadline(tmp_path: Path) -> None:
    worker = gpu.Worker(tmp_path, small=True, end=time.time())
    with pytest.raises(subprocess.CalledProcessError) as error:
        list(worker.events("device", until=time.time() + 600))
    assert error.value.returncode < 0


@pytest.mark.slow
def test_dry_run_writes_results(tmp_path: Path) -> None:
    options = ["--dry-run", "--out", str(tmp_path), "--groups", "gelu", "gpt2_training"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["complete"] is True and record["device"]["name"] == "cpu"
    found: dict[str, list[str]] = {}
    for row in record["rows"]:
        found.setdefault(row["group"], []).append(row["label"])
        assert row["status"] == "ok", row
        assert row["step_ms"]["min"] <= row["step_ms"]["median"] <= row["step_ms"]["max"]
        assert row["compiled"]["temp_bytes"] >= 0 and row["compiled"]["traffic_bytes"] > 0
        if row["label"] != "none":
            assert row["agreement"]["norm_relative"] < 1e-4
    training = ["none", "min_cut", "dots_saveable"]
    assert found == {"gelu": ["none", "min_cut"], "gpt2_training": training}


def test_what_was_measured_is_compared_with_the_jax_that_made_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"versions": {"jax": "0.0.1"}, "rows": []}))
    assert gpu_absent.main([str(path), "--device", "h100"]) == 2
    assert "0.0.1" in capsys.readouterr().err


@pytest.mark.gpu_compile
def test_a_measured_program_is_compiled_again() -> None:
    compiled = {"temp_bytes": 16, "traffic_bytes": 2**29, "matmuls": 0}
    rows = [
        {"group": "gelu", "label": "none", "compiled": compiled},
        {"group": "gelu", "label": "min_cut", "status": "skipped"},
    ]
    (pair,) = gpu_absent.pairs(rows, "h100")
    assert (pair.label, pair.absent_traffic_bytes, pair.absent_matmuls) == ("none", 2**29, 0)
    assert abs(pair.error) < 1e-4


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU is attached")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_the_script_is_valid_and_has_a_deadline() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert "timeout --kill-after=5" in SCRIPT.read_text()
    short = subprocess.run(["bash", str(SCRIPT), "--minutes", "0.1"], capture_output=True)
    assert short.returncode == 2
