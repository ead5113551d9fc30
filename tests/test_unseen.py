"""The benchmark of networks that nothing was tuned on, on one small network and on made-up rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import unseen
from benchmarks.unseen import Row, main, rows_of, summarise
from remat.policies import Ilp

QUICK = Ilp(method="starts")


def build() -> tuple[Any, tuple[Any, ...]]:
    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight) + jnp.sin(x)
        return jnp.sum(x**2)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return loss, ([shape] * 6, jax.ShapeDtypeStruct((512, 64), jnp.float32))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
def test_every_row_is_made_once_and_budgets_are_met_or_refused() -> None:
    rows: list[Row] = []
    rows_of("chain", build, "cpu", {}, rows.append, QUICK)
    assert [row.policy for row in rows] == [
        "none",
        "min_cut",
        "full",
        *(f"ilp {s}" for s in unseen.SHARES),
    ]
    for row in rows[3:]:
        assert row.budget_bytes is not None
        # The cotangent of a loss is a constant there, and an argument where a plan is confirmed.
        assert row.status == "refused" or row.temp_bytes <= row.budget_bytes + 64
    again: list[Row] = []
    rows_of(
        "chain", build, "cpu", {(r.network, r.policy): r for r in rows[:-1]}, again.append, QUICK
    )
    assert [row.policy for row in again] == [rows[-1].policy]


def _row(policy: str, **fields: Any) -> Row:
    made: dict[str, Any] = {
        "network": "net",
        "policy": policy,
        "status": "made",
        "budget_bytes": None,
        "predicted_bytes": 100,
        "temp_bytes": 100,
        "traffic_bytes": 1,
        "matmuls": 1,
        "roofline_seconds": 1.0,
        "compiles": 1,
        "seconds": 1.0,
    }
    return Row(**{**made, **fields})


def test_check_fails_for_what_is_off_and_for_what_is_exceeded() -> None:
    good = [_row("none"), _row("ilp 0.7", budget_bytes=105), _row("ilp 0.5", budget_bytes=101)]
    assert summarise(good)[1]
    assert not summarise([*good, _row("full", predicted_bytes=130)])[1]
    lines, met = summarise([*good, _row("ilp 0.3", budget_bytes=99)])
    assert not met and "1 exceeded" in lines[1]
    refused = _row("ilp 0.3", budget_bytes=50, status="refused")
    lines, met = summarise([*good, refused])
    assert met and "1 refused" in lines[1]


def test_less_memory_that_is_faster_is_counted() -> None:
    more = _row("ilp 0.7", budget_bytes=105)
    less = _row("ilp 0.5", budget_bytes=100, roofline_seconds=0.5)
    assert "faster 1 times" in summarise([more, less])[0][2]
    assert "faster 0 times" in summarise([more, _row("ilp 0.5", budget_bytes=100)])[0][2]


def test_rows_of_a_file_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import models.validation as group

    monkeypatch.setattr(group, "NETWORKS", {"net": build})
    known = [_row(p) for p in ("none", "min_cut", "full")]
    known += [_row(f"ilp {s}", budget_bytes=105) for s in unseen.SHARES]
    place = tmp_path / "rows.json"
    unseen._write(place, "cpu", known)
    assert main(["--json", str(place), "--device", "cpu", "--check"]) == 0
    assert "6 of 6 predictions" in capsys.readouterr().out
    assert len(json.loads(place.read_text())["rows"]) == 6
    with pytest.raises(SystemExit):
        main(["nothing"])
    with pytest.raises(SystemExit):
        main(["--json", str(place), "--device", "h100"])
