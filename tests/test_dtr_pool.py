"""The indexed search finds what the scan finds, move by move, and looks at far less."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.dtr import HEURISTICS, Log, Run, Scoring, pool, simulate
from remat.dtr.heuristics import heuristic_named
from remat.dtr.log import Call
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


def scaled(log: Log, factor: int) -> Log:
    """The same program, its costs so many times as large: a component promises a sixteenth less than it has."""
    events = (
        replace(event, cost=event.cost * factor) if isinstance(event, Call) else event
        for event in log.events
    )
    return replace(log, events=tuple(events))


@given(
    log=logs(),
    factor=st.sampled_from([1, 1000]),
    scoring=st.sampled_from([*SCORINGS, HEURISTICS["random"]]),
    eviction=st.sampled_from(["eager", "banish", "ignore"]),
    share=st.sampled_from([0.3, 0.5, 0.7, 0.9]),
    block=st.sampled_from([2, 3, 16]),
)
def test_both_searches_make_the_same_moves(
    log: Log, factor: int, scoring: Scoring, eviction: Any, share: float, block: int
) -> None:
    log = scaled(log, factor)
    peak = simulate(log, eviction="ignore", trace=False).peak_bytes
    options: dict[str, Any] = {"heuristic": scoring, "eviction": eviction}
    options["budget"] = max(int(share * peak), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_BLOCK", block)
        assert moves(log, "index", **options) == moves(log, "scan", **options)


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_both_searches_make_the_same_moves_on_a_chain(scoring: Scoring) -> None:
    log = scaled(chain(60), 1000)
    for budget in (12, 30):
        options: dict[str, Any] = {"heuristic": scoring, "budget": budget}
        assert moves(log, "index", **options) == moves(log, "scan", **options)


@pytest.mark.parametrize(
    "scoring", [Scoring("eqclass"), Scoring("eqclass", staleness=False)], ids=str
)
@pytest.mark.parametrize("seed", range(6))
def test_both_searches_make_the_same_moves_on_a_network(scoring: Scoring, seed: int) -> None:
    """Longer, with skips: a storage may lose a component that costs little less than before."""
    rng = random.Random(seed)
    out = Writer()
    for i in range(80):
        args = [f"x{j}" for j in {i - 1, rng.randrange(max(i - 6, 0), max(i, 1))} if 0 <= j < i]
        out.call([f"x{i}"], args, rng.choice([20, 300, 5000]))
    for i in reversed(range(80)):
        out.call([f"g{i}"], [f"x{i}", *([f"g{i + 1}"] if i < 79 else [])], 1000)
        out.add("RELEASE", NAME=f"x{i}")
        if i < 79:
            out.add("RELEASE", NAME=f"g{i + 1}")
    log = out.log()
    for budget in (12, 20, 40):
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
