"""The benchmarks themselves: bounds, groups, and a dry run of the GPU benchmark."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu, gpu_cases, gpu_worker, planning
from benchmarks.compiled import Measured, missed
from benchmarks.programs import GROUPS, Bound

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
BASE = Measured("g", "base", 100.0, 10.0, 20, 3, 50, 1.0)
OURS = dataclasses.replace(BASE, label="ours", temp_mib=50.0, traffic_gib=10.5, matmuls=22)
ROWS = {"base": BASE, "ours": OURS}


@pytest.mark.parametrize(
    "bound",
    [
        Bound("ours"),
        Bound("ours", "base"),
        Bound("ours", "base", temp_factor=0.5, traffic_factor=1.05),
        Bound("ours", temp_mib=50, traffic_gib=10.5, matmuls=22, convolutions=3),
    ],
)
def test_a_bound_that_is_reached_exactly_is_met(bound: Bound) -> None:
    assert missed(bound, ROWS) == []


@pytest.mark.parametrize(
    ("bound", "line"),
    [
        (Bound("ours", temp_mib=49), "ours: temp MiB is 50.00, the bound is 49.00"),
        (Bound("ours", traffic_gib=10.4), "ours: traffic GiB is 10.50, the bound is 10.40"),
        (Bound("ours", matmuls=21), "ours: matmuls is 22.00, the bound is 21.00"),
        (Bound("ours", convolutions=2), "ours: convolutions is 3.00, the bound is 2.00"),
        (
            Bound("ours", "base", temp_factor=0.4),
            "ours: temp against baseline is 50.00, the bound is 40.00",
        ),
        (
            Bound("ours", "base", traffic_factor=1.0),
            "ours: traffic against baseline is 10.50, the bound is 10.00",
        ),
    ],
)
def test_a_missed_bound_is_a_sentence(bound: Bound, line: str) -> None:
    assert missed(bound, ROWS) == [line]


def test_every_missed_limit_is_listed() -> None:
    bound = Bound("ours", "base", 0.4, 1.0, temp_mib=1, traffic_gib=1, matmuls=1, convolutions=1)
    assert len(missed(bound, ROWS)) == 6


def test_groups_are_named_and_their_bounds_limit_something() -> None:
    for name, group in GROUPS.items():
        assert group.name == name
        assert group.rows.__doc__
        for bound in group.bounds:
            limits = dataclasses.asdict(bound)
            factors = {limits.pop("temp_factor"), limits.pop("traffic_factor")}
            has_baseline = limits.pop("baseline") is not None
            assert has_baseline == (factors != {None})
            limits.pop("row")
            assert has_baseline or any(limit is not None for limit in limits.values())


@pytest.mark.parametrize("name", ["residual_mlp", "gelu"])
def test_bounds_speak_of_rows_that_exist(name: str) -> None:
    group = GROUPS[name]
    labels = [row.label for row in group.rows()]
    assert len(set(labels)) == len(labels)
    assert labels[0] == "none"
    for bound in group.bounds:
        assert {bound.row, bound.baseline} - {None} <= set(labels)


def test_gpu_benchmark_runs_the_groups_that_exist() -> None:
    assert set(gpu.GROUP_WEIGHTS) == set(gpu_cases.groups()) == {*GROUPS, gpu_cases.TRAINING}
    assert set(gpu.SMALL_WEIGHTS) == set(gpu_cases.groups(small=True))


def test_device_arrays_have_the_shapes_asked_for() -> None:
    shapes: dict[str, Any] = {
        "w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        "scale": jax.ShapeDtypeStruct((4,), jnp.float32),
        "tokens": jax.ShapeDtypeStruct((1000,), jnp.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3)),
    }
    arrays = gpu_cases.device_arrays(shapes, integers=5)
    again = gpu_cases.device_arrays(shapes, integers=5)
    for name, shape in shapes.items():
        assert (arrays[name].shape, arrays[name].dtype) == (shape.shape, shape.dtype)
    assert set(np.unique(arrays["tokens"])) == set(range(5))
    assert float(jnp.std(arrays["w"].astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
    np.testing.assert_allclose(arrays["scale"], 1.0, atol=0.2)
    np.testing.assert_array_equal(arrays["w"], again["w"])
    assert jax.random.uniform(arrays["keys"][0]) != jax.random.uniform(arrays["keys"][1])


def test_signature_differences_are_relative_to_the_baseline() -> None:
    base = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0]), "n": jnp.array([7])}
    ours = {"a": jnp.array([3.0, 0.3]), "b": jnp.array([4.0]), "n": jnp.array([9])}
    same = gpu_worker.signature(base).differences(gpu_worker.signature(base))
    assert same == {"norm_relative": 0.0, "leaf_max_relative": 0.0}
    assert gpu_worker.signature(base).norm == 5.0
    found = gpu_worker.signature(ours).differences(gpu_worker.signature(base))
    assert found["leaf_max_relative"] == pytest.approx(0.1)
    assert found["norm_relative"] == pytest.approx(25.09**0.5 / 5 - 1, rel=1e-4)


def test_results_are_written_at_once_and_never_over_each_other(tmp_path: Path) -> None:
    path = gpu._free_path(tmp_path, "NVIDIA H200", "2026-01-02")
    assert path.name == "gpu_h200_2026-01-02.json"
    results = gpu.Results(path, {"started": time.time()})
    results.add({"event": "group", "group": "g", "labels": ["a", "b"]})
    results.add({"event": "row", "group": "g", "label": "a", "status": "ok", "step_ms": {}})
    record = json.loads(path.read_text())
    assert [row["status"] for row in record["rows"]] == ["ok", "started"]
    assert record["complete"] is False
    assert results.labels("g") == ["a"]
    results.skip("h", "no time")
    results.finish()
    record = json.loads(path.read_text())
    assert record["complete"] is True
    assert record["skipped"] == [{"group": "h", "reason": "no time"}]
    assert gpu._free_path(tmp_path, "NVIDIA H200", "2026-01-02").stem.endswith("_2")


def test_rows_that_do_not_fit_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_worker.run_group(gpu_cases.groups(small=True)["gelu"], deadline=0.0)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["labels"] == ["none", "min_cut"]
    assert [event["status"] for event in events[1:]] == ["skipped", "skipped"]


def test_a_worker_is_killed_at_its_deadline(tmp_path: Path) -> None:
    worker = gpu.Worker(tmp_path, small=True, end=time.time())
    with pytest.raises(subprocess.CalledProcessError) as error:
        list(worker.events("device", until=time.time() + 600))
    assert error.value.returncode < 0


def _check_results(record: dict[str, Any], labels: dict[str, list[str]]) -> None:
    assert {"kind", "device", "driver", "versions", "date", "rows", "skipped"} <= set(record)
    assert record["kind"] == "dry run"
    assert record["complete"] is True
    assert {"jax", "jaxlib", "python", "remat"} <= set(record["versions"])
    assert record["device"]["name"] == "cpu"
    found: dict[str, list[str]] = {}
    for row in record["rows"]:
        found.setdefault(row["group"], []).append(row["label"])
        assert row["status"] == "ok", row
        assert row["step_ms"]["min"] <= row["step_ms"]["median"] <= row["step_ms"]["max"]
        assert row["compiled"]["temp_bytes"] >= 0
        assert row["compiled"]["traffic_bytes"] > 0
        assert "peak_bytes" in row["memory"] and "reason" not in row["memory"]
        if row["label"] != "none":
            assert row["agreement"]["norm_relative"] < 1e-4
    assert found == labels


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
    assert path.name.startswith("gpu_cpu_")
    record = json.loads(path.read_text())
    training = ["none", "min_cut", "dots_saveable"]
    _check_results(record, {"gelu": ["none", "min_cut"], "gpt2_training": training})
    rates = [row.get("tokens_per_second") for row in record["rows"]]
    assert rates[:2] == [None, None]
    assert all(rate > 0 for rate in rates[2:])


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
    assert "no GPU is attached; try --dry-run" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_script_is_valid_and_has_a_deadline() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text()
    assert "MINUTES=9" in text
    assert "timeout --kill-after=5" in text
    assert 'within "$FOUND" -u -m benchmarks.gpu --minutes "$REMAINING"' in text
    short = subprocess.run(
        ["bash", str(SCRIPT), "--minutes", "0.1"], capture_output=True, text=True
    )
    assert short.returncode == 2
    assert "too short" in short.stderr


def test_planning_benchmark_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "planning.json"
    assert planning.main(["--layers", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["layers"] == 1
    assert row["joint_equations"] > 100
    assert {"trace_seconds", "cut_seconds", "echo_seconds", "plan_seconds_min_cut"} <= set(row)


def test_what_the_planning_benchmark_misses_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"layers": 52, "joint_equations": 16_298, "echo_seconds": 0.3}
    slow = {**row, "echo_seconds": 0.41}
    line = "16298 operators: echo takes 0.41 s, expected at most 0.3"
    assert planning.problems_of([row, {**slow, "joint_equations": 40_000}]) == []
    assert planning.problems_of([row, slow]) == [line]
    monkeypatch.setattr(planning, "run", lambda layers: slow)
    assert planning.main(["--layers", "52"]) == 0
    assert planning.main(["--layers", "52", "--check"]) == 1
    assert f"  MISSED  {line}\n" in capsys.readouterr().out


def test_the_recorded_plan_of_16000_operators_misses_nothing() -> None:
    rows = json.loads((ROOT / "benchmarks/results/planning_2cores.json").read_text())["rows"]
    assert 16_000 < rows[-1]["joint_equations"] <= planning.ECHO_OPERATORS
    assert planning.problems_of(rows) == []
