"""`remat dtr`, and the pictures of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.dtr import Log, load_log, simulate, write_log
from remat.tools.cli import main
from remat.tools.dtr_plot import Stay, draw_run, memory_curve, occupancy, stays
from remat.tools.plot import PlotError
from tests.test_dtr import chain, logs


@given(log=logs(), eviction=st.sampled_from(["eager", "banish", "ignore"]))
def test_stays_hold_the_memory(log: Log, eviction: Any) -> None:
    run = simulate(log, 0.7, "lru", eviction, thrash=5)
    calls = list(log.calls)
    sizes = [
        size
        for call in calls
        for size, alias in zip(call.sizes_bytes, call.aliases, strict=True)
        if alias < 0
    ]
    ran = [move.target for move in run.trace if move.action in ("run", "again")]
    found = stays(log, run)
    for step, (op, memory) in enumerate(zip(ran, memory_curve(run), strict=True), 1):
        there = [stay for stay in found if stay.start <= step <= stay.end]
        held = sum(sizes[stay.storage] for stay in there)
        assert held <= memory <= held + sum(calls[op].sizes_bytes)  # results that are there twice


def test_a_picture_of_stays() -> None:
    found = [Stay(0, 1, 4, False), Stay(1, 2, 3, False), Stay(1, 4, 5, True)]
    expected = [[1, 1, 1, 0, 0], [0, 1, 0, 2, 0]]
    assert occupancy(found, 2, 5).tolist() == expected
    assert np.all(occupancy(found, 1, 1) == 2)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_runs_are_drawn(tmp_path: Path, suffix: str) -> None:
    log = chain(20)
    run = simulate(log, 6, "dtr_full")
    for name in ("a", "b"):
        draw_run(log, run, tmp_path / f"{name}.{suffix}", "a chain")
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
    assert first == second and len(first) > 5000
    with pytest.raises(PlotError, match="has no trace"):
        draw_run(log, simulate(log, 6, trace=False), tmp_path / f"c.{suffix}")


def test_a_log_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "chain.log.gz", tmp_path / "chain.svg"
    write_log(chain(63), path)
    command = ["dtr", str(path), "--budget", "16", "--heuristic", "dtr_full"]
    assert main([*command, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "dtr_full, eager eviction, within 16 B" in text and "49 operators" in text
    assert "ok: 38.89% repeated" in text
    assert picture.stat().st_size > 5000
    assert main([*command, "--json", "--search", "scan"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "remat.dtr" and document["statistics"]["ops"] == 126
    assert document["run"]["rematerializations"] == 49
    assert document["run"]["overhead"] == pytest.approx(49 / 126)
    assert main(["dtr", str(path), "--budget", "1"]) == 1
    assert "out of memory" in capsys.readouterr().out
    assert main(["dtr", str(tmp_path / "nowhere.log")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["dtr", str(path), "--budget", "6", "--heuristic", "lru", "--thrash", "2"]) == 1
    assert "more than 1 times the base was repeated" in capsys.readouterr().out


def test_a_function_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mlp.log"
    command = ["dtr", "models.cases:residual_mlp_small", "--json", "--save-log", str(path)]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    log = load_log(path)
    assert document["statistics"]["cost"] == log.cost > 0
    assert log.backward is not None
    assert document["run"]["budget_bytes"] is None and document["run"]["rematerializations"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["models.cases:nothing"], "has no 'nothing'"),
        (["LOG", "--heuristic", "lfu"], "unknown heuristic 'lfu'"),
        (["LOG", "--budget", "many"], "budget"),
        (["LOG", "--thrash", "0"], "expected a multiple of the base"),
        (["LOG", "--plot", "a.pdf"], "suffix '.pdf'"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chain.log"
    write_log(chain(3), path)
    assert main(["dtr", *(str(path) if a == "LOG" else a for a in arguments)]) == 2
    assert text in capsys.readouterr().err
