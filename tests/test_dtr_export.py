"""Joint graphs as logs, and logs as files that read back equal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given

import remat
from remat.core.graph import Graph
from remat.dtr import Log, LogError, export_log, load_log, read_log, simulate, write_log
from remat.dtr.export import log_lines
from remat.dtr.log import Call, Release, Share
from tests.random_graphs import GraphBuilder, chain, graphs, laws
from tests.test_dtr import logs, still_referred_to


@given(log=logs())
def test_a_log_reads_back_equal(log: Log) -> None:
    assert read_log(log_lines(log)) == log


@given(graph=graphs())
@laws()
def test_an_exported_graph_reads_back_equal(graph: Graph) -> None:
    log = export_log(graph)
    assert read_log(log_lines(log)) == log


@given(graph=graphs())
@laws()
def test_a_graph_s_log_holds_what_the_graph_does(graph: Graph) -> None:
    log = export_log(graph)
    calls = [call for call in log.calls if not call.is_constant]
    assert [call.name for call in calls] == [op.name for op in graph.ops]
    again = [len(call.outputs) for call in calls]
    assert again == [len(op.outputs) if op.recomputable else 0 for op in graph.ops]
    sizes = Counter(size for call in log.calls for size in call.sizes_bytes)
    made = {*graph.constants, *graph.inputs, *graph.cotangents}
    made.update(value for op in graph.ops for value in op.outputs)
    assert sizes == Counter(graph.values[value].nbytes for value in made)
    kept = {*graph.inputs, *graph.constants, *graph.outputs, *graph.gradients}
    unread = {v for v in graph.cotangents if not graph.users[v]}
    assert len(still_referred_to(log)) == len(kept | unread)
    assert all(call.cost >= 1 for call in calls if any(call.sizes_bytes))
    assert simulate(log).status == "ok"


def live_in_log(log: Log) -> list[int]:
    """Bytes that somebody refers to before every operator."""
    live: dict[int, int] = {}
    found: list[int] = []
    for event in log.events:
        if isinstance(event, Release):
            del live[event.tensor]
        elif isinstance(event, Call):
            if not event.is_constant:
                found.append(sum(live.values()))
            live.update(zip(event.outputs, event.sizes_bytes, strict=True))
    return found


def live_in_graph(graph: Graph) -> list[int]:
    """Bytes alive before every operator: of what is given, kept, or still to be read."""
    kept = {*graph.sources, *graph.outputs, *graph.gradients}
    found: list[int] = []
    begun = False
    for op in graph.ops:
        begun = begun or op.phase == "backward"
        there = set(graph.sources)
        for value in graph.values:
            is_made = begun if value.producer is None else value.producer < op.id
            readers = graph.users[value.id]
            is_cotangent = value.id in graph.cotangents
            if is_made and (value.id in kept or (readers and readers[-1] >= op.id)):
                there.add(value.id)
            if is_made and is_cotangent and not readers:
                there.add(value.id)
        found.append(sum(graph.values[v].nbytes for v in there))
    return found


@given(graph=graphs())
@laws()
def test_values_are_released_behind_their_last_reader(graph: Graph) -> None:
    assert live_in_log(export_log(graph)) == live_in_graph(graph)


def test_what_must_not_run_again_is_a_constant() -> None:
    build = GraphBuilder()
    x = build.input()
    y = build.op("callback", [x])
    z = build.op("tanh", [y])
    log = export_log(build.build([z], []))
    callback, made = list(log.calls)[1:3]
    assert (callback.name, callback.inputs, callback.outputs) == ("callback", (0,), ())
    assert made.is_constant and made.outputs == (1,)
    assert Release(1) in log.events and log.backward is None
    run = simulate(log, budget=1.0, heuristic="largest", trace=True)
    assert (run.status, run.evictions) == ("ok", 0)


def test_costs() -> None:
    graph = chain(3, (1 << 20,))
    log = export_log(graph, costs=range(len(graph.ops)))
    assert [c.cost for c in log.calls if not c.is_constant] == list(range(len(graph.ops)))
    slow, fast = (export_log(graph, device=name).cost for name in ("a100", "b200"))
    assert slow > fast > 0
    with pytest.raises(remat.PolicyError, match="expected one of at least 0 for each of"):
        export_log(graph, costs=[1])
    with pytest.raises(remat.PolicyError, match="expected one of at least 0 for each of"):
        export_log(graph, costs=[-1] * len(graph.ops))
    with pytest.raises(remat.CompileError, match="Unknown device"):
        export_log(graph, device="h2000")


@pytest.mark.parametrize("name", ["a.log", "a.log.gz"])
def test_files(tmp_path: Path, name: str) -> None:
    log = export_log(chain(3))
    write_log(log, tmp_path / name)
    assert load_log(tmp_path / name) == log


def test_a_log_that_no_file_can_say() -> None:
    one = Call("f", (), (0,), (1,), (-1,), 1)
    with pytest.raises(LogError, match="event 0 makes tensors"):
        list(log_lines(Log((Call("f", (), (1,), (1,), (-1,), 1),), 2)))
    with pytest.raises(LogError, match="event 2 uses tensor 0, which nobody refers to"):
        list(log_lines(Log((one, Release(0), Share(0)), 1)))
    view = Call("f", (), (1,), (0,), (0,), 1)
    with pytest.raises(LogError, match="event 1 makes a view of tensor 0, which it does not read"):
        list(log_lines(Log((one, view), 2)))
    with pytest.raises(LogError, match="makes 1 tensors; it says 5"):
        list(log_lines(Log((one,), 5)))


def test_an_operator_may_be_named_constant() -> None:
    lines = [
        '{"INSTRUCTION": "CALL", "NAME": "constant", "ARGS": [], "RESULT": ["x"], "TIME": "3"}',
        '{"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "8"}',
        '{"INSTRUCTION": "ALIAS", "NAME": "x", "ALIAS": "-1"}',
    ]
    (call,) = read_log(lines).calls
    assert (call.is_constant, call.cost) == (False, 3)
    with pytest.raises(LogError, match="MEMORY and ALIAS of it is missing"):
        read_log(lines[:2])
