"""The indexed search finds what the scan finds, move by move, and looks at far less."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.dtr import HEURISTICS, Log, Run, Scoring, pool, simulate
from remat.dtr.heuristics import heuristic_named
from tests.test_dtr import Writer, chain, logs

SCORINGS = [
    Scoring(cost, size, staleness)
    for cost, size, staleness in itertools.product(
        ("full", "ancestors", "eqclass", "local", "none"), (True, False), (True, False)
    )
]


def moves(log: Log, search: Any, **options: Any) -> Run:
    """A run without its count of accesses, in which the searches differ."""
    return replace(simulate(log, search=search, thrash=8, **options), storage_accesses=0)


@given(
    log=logs(),
    scoring=st.sampled_from([*SCORINGS, HEURISTICS["random"]]),
    eviction=st.sampled_from(["eager", "banish", "ignore"]),
    share=st.sampled_from([0.3, 0.5, 0.7, 0.9]),
    block=st.sampled_from([2, 3, 16]),
)
def test_both_searches_make_the_same_moves(
    log: Log, scoring: Scoring, eviction: Any, share: float, block: int
) -> None:
    peak = simulate(log, eviction="ignore", trace=False).peak_bytes
    options: dict[str, Any] = {"heuristic": scoring, "eviction": eviction}
    options["budget"] = max(int(share * peak), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_BLOCK", block)
        assert moves(log, "index", **options) == moves(log, "scan", **options)


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_both_searches_make_the_same_moves_on_a_chain(scoring: Scoring) -> None:
    log = chain(60)
    for budget in (12, 30):
        options: dict[str, Any] = {"heuristic": scoring, "budget": budget}
        assert moves(log, "index", **options) == moves(log, "scan", **options)


def test_a_component_may_cost_less_than_nothing() -> None:
    """A view of an evicted storage is counted when that is made again, but was not when it was evicted."""
    out = Writer()
    out.call(["a"], [], cost=1)
    out.call(["b"], ["a"], cost=1)
    out.call(["c"], ["b"], cost=1)
    out.call(["d"], [], cost=1)
    out.call(["v"], ["a"], cost=9, v="0")
    out.call(["e"], ["b", "c", "d"], cost=1)
    out.call(["f"], ["v", "e"], cost=1)
    log = out.log()
    for budget in range(3, 7):
        assert moves(log, "index", budget=budget) == moves(log, "scan", budget=budget)
    heuristic = heuristic_named("dtr_eqclass", 0)
    heuristic.begin(2)
    heuristic.made(0, 1, 1, ())
    heuristic.evicted(0)
    heuristic.made(0, 0, 9, ())
    heuristic.materialized(0)
    assert not heuristic.is_bounded


@pytest.mark.parametrize("heuristic", ["dtr_eqclass", "dtr_local", "lru", "largest"])
def test_the_index_looks_at_few(heuristic: str) -> None:
    """A scan looks at the whole pool for every eviction; the index at a number that hardly grows with it."""
    per_eviction = []
    for layers in (100, 400):
        run = simulate(chain(layers), 0.5, heuristic, trace=False, thrash=4)
        per_eviction.append(run.storage_accesses / run.evictions)
    assert per_eviction[1] < 1.5 * per_eviction[0]
    scanned = simulate(chain(100), 0.5, heuristic, trace=False, search="scan", thrash=4)
    assert scanned.storage_accesses > 3 * per_eviction[0] * scanned.evictions


def test_what_is_evicted_last_decides_between_equals() -> None:
    out = Writer()
    for name in "abc":
        out.call([name], [])
    out.call(["d"], [])
    for search in ("index", "scan"):
        run = moves(out.log(), search, budget=3, heuristic="largest")
        assert next(move.target for move in run.trace if move.action == "evict") == 2
