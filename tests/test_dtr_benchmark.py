"""The benchmark of DTR: its chains and bounds, its figures, and that its check fails where it has to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import dtr
from benchmarks.dtr_programs import chain, least_repeated, model_log
from remat.dtr import simulate
from tests import test_dtr

# Griewank & Walther 2000, and the chain of the paper.
FEWEST = {
    (8, 3): 15,
    (8, 4): 5,
    (8, 5): 3,
    (8, 6): 2,
    (8, 7): 1,
    (8, 8): 0,
    (64, 16): 48,
    (128, 23): 105,
    (64, 6): 134,
}


def test_the_fewest_repeated_operators_of_chains() -> None:
    assert {key: least_repeated(*key) for key in FEWEST} == FEWEST


@pytest.mark.parametrize("layers", [2, 3, 64])
def test_the_chain_is_that_of_the_log(layers: int) -> None:
    assert chain(layers).events == test_dtr.chain(layers - 1).events


def test_no_heuristic_repeats_fewer_than_the_fewest() -> None:
    for layers, budget in ((16, 4), (16, 8), (40, 9)):
        for heuristic in ("dtr_full", "dtr_eqclass", "lru", "msps"):
            run = simulate(chain(layers), budget, heuristic)
            assert run.status == "ok" and run.rematerializations >= least_repeated(layers, budget)


def test_figures_are_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dtr.json"
    assert dtr.main(["--figure", "2", "--most", "64", "--json", str(path), "--check"]) == 0
    assert dtr.main(["--figure", "3", "--most", "32", "--json", str(path), "--check"]) == 0
    rows = [dtr.Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert {row.figure for row in rows} == {"2", "3"}
    row = next(r for r in rows if r.log == "chain(64)" and r.heuristic == "dtr_full")
    assert (row.repeated, row.expected, row.status) == (49, 48, "ok")
    assert "chain(64)" in capsys.readouterr().out
    assert dtr.violations(rows) == []
    assert len(dtr.violations([replace(row, repeated=71)])) == 1


def test_the_check_fails_where_it_has_to() -> None:
    row = dtr.Row("4", "public unet", "lru", "eager", "index", 0.5, "ok", 0.5, 3, 7, 9, 9, 0.1, 7)
    assert dtr.violations([row]) == []
    assert dtr.violations([replace(row, repeated_ns=8)]) == [
        "figure 4, public unet, lru at 0.5: 8; published is 7"
    ]
    assert dtr.violations([replace(row, status="thrashing", expected="thrashing")]) == []
    six = [
        replace(row, figure="6", search="scan", heuristic=name, accesses=count)
        for name, count in (("dtr_full", 300), ("dtr_eqclass", 20), ("dtr_local", 30))
    ]
    assert len(dtr.violations(six)) == 1
    two = [replace(row, figure="scale", search=name, log="chain(9)") for name in ("index", "scan")]
    assert dtr.violations(two) == []
    assert dtr.violations([two[0], replace(two[1], evictions=8)]) == [
        "figure scale, chain(9), lru at 0.5: index and scan differ"
    ]
    scale = [replace(row, figure="scale", log=f"{k}", accesses=9 * k) for k in (1, 2)]
    assert len(dtr.violations(scale)) == 1


@pytest.mark.parametrize("name", ["lstm", "lstm operators"])
def test_logs_of_our_models_replay(name: str) -> None:
    log = model_log(name, "h200")
    run = simulate(log, 0.9, "dtr_full", trace=False)
    assert run.status == "ok" and log.cost > 0
