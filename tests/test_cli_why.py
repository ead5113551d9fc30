"""`remat why`: every value of a plan can be asked for, and what is said of it is what the plan does."""

from __future__ import annotations

import json
from functools import cache

import pytest

import remat
from models import cases
from remat.core.errors import PlanError
from remat.plans.explain import explain, find_values
from remat.plans.plan import Plan
from remat.plans.summary import again_rows, kept_rows
from remat.tools.cli import main

TINY = "models.cases:residual_mlp_small"


@cache
def plan_of(name: str) -> Plan:
    function, args = cases.CASES[name]()
    return remat.plan(function, *args)


NAMES = ["residual_mlp_small", "gpt_tiny_scan"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decided_is_what_the_plan_does(name: str) -> None:
    plan = plan_of(name)
    kept = {entry.value: entry for entry in plan.saved if not entry.is_input}
    again = {entry.op for entry in plan.recomputed}
    for value in plan.graph.values:
        (place,) = find_values(plan, str(value.id))
        found = explain(place)
        if value.id in kept:
            assert found.decided == ("kept" if kept[value.id].form == "raw" else "encoded")
            assert found.kept_bytes == kept[value.id].nbytes and found.why == kept[value.id].why
        elif value.producer in again:
            assert found.decided == "recomputed" and found.runs_again > 0
        else:
            assert found.decided not in ("kept", "encoded", "recomputed")
        readers = sum(reader.count for reader in found.forward_readers)
        ops = [plan.graph.ops[number] for number in plan.graph.users[value.id]]
        assert readers == sum(op.phase == "forward" for op in ops)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_plan_can_be_asked_for(name: str) -> None:
    plan = plan_of(name)
    kept, again = kept_rows(plan), again_rows(plan)
    assert sum(row.amount for row in kept) == plan.saved_bytes
    assert sum(row.amount for row in again) == plan.recompute_flops
    assert any("/" in row.value for row in kept) == bool(plan.loops)
    for row in kept:
        (place,) = find_values(plan, row.value)
        assert explain(place).decided in ("kept", "encoded", "argument")
    for row in again:
        (place,) = find_values(plan, row.value)
        assert explain(place).decided == "recomputed"


def test_values_are_found_by_all_their_names() -> None:
    plan = plan_of("gpt_tiny_scan")
    row = kept_rows(plan)[0]
    file = row.source.rpartition("/")[2]
    for query in (row.label, file, row.source, file.partition(":")[0], row.made_by):
        assert row.value in {place.name for place in find_values(plan, query)}, query
    attention = {place.name for place in find_values(plan, "attention")}
    assert any(name.startswith("scan0/") for name in attention)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("99999", "values are numbered 0 to"),
        ("scan7/3", "no loop 'scan7'"),
        ("scan0/99999", "in scan0"),
        ("attenton", "did you mean 'attention'"),
        ("gpt.py:1", "did you mean 'gpt.py:"),
        ("", "no value is called ''"),
        ("\n*[", "no value is called"),
    ],
)
def test_what_is_not_there(query: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        find_values(plan_of("gpt_tiny_scan"), query)
    assert words in str(caught.value) and len(str(caught.value)) < 500


def test_why_prints_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", TINY, "tanh", "--policy", "full"]) == 0
    out, err = capsys.readouterr()
    for word in ("made again", "to keep", "to make", "forward", "backward", "decided"):
        assert word in out
    assert err == "" and len(out.splitlines()) <= 24
    assert main(["why", TINY, "tanh", "--policy", "full", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "remat.why" and document["policy"] == "full"
    assert {entry["made_by"] for entry in document["values"]} == {"tanh"}
    assert main(["why", TINY, "tanhh"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no value is called 'tanhh'\nhint: did you mean 'tanh'?")
