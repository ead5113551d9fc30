"""The joint graph: what `check` refuses, what is derived, what survives a round trip."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from random_graphs import GraphBuilder, chain, graphs, laws, relabelled, rngs, seeded_graph

from remat.core.graph import Graph, Value


def change_op(graph: Graph, index: int, **fields: object) -> Graph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **fields)
    return replace(graph, ops=tuple(ops))


def change_value(graph: Graph, index: int, **fields: object) -> Graph:
    values = list(graph.values)
    values[index] = replace(values[index], **fields)
    return replace(graph, values=tuple(values))


@given(graph=graphs(), rng=rngs())
@laws()
def test_generated_and_relabelled_graphs_are_well_formed(graph: Graph, rng: random.Random) -> None:
    graph.check()
    relabelled(graph, rng).graph.check()


@given(graph=graphs())
@laws()
def test_json_round_trip_is_the_identity(graph: Graph) -> None:
    again = Graph.from_json(graph.to_json())
    assert again == graph
    assert hash(again) == hash(graph)
    assert again.fingerprint() == graph.fingerprint()


@given(graph=graphs())
@laws()
def test_users_are_the_operators_that_read_a_value(graph: Graph) -> None:
    for value in graph.values:
        expected = tuple(op.id for op in graph.ops if value.id in op.inputs)
        assert graph.users[value.id] == expected


@given(graph=graphs())
@laws()
def test_forward_values_are_those_no_cotangent_reaches(graph: Graph) -> None:
    import networkx as nx

    network = graph.to_networkx()
    reached: set[int] = set()
    for cotangent in graph.cotangents:
        found = nx.descendants(network, ("value", cotangent)) | {("value", cotangent)}
        reached.update(number for kind, number in found if kind == "value")
    assert {v.id for v in graph.values if graph.forward_values[v.id]} == {
        v.id for v in graph.values
    } - reached


@given(graph=graphs())
@laws()
def test_backward_reads_are_forward_values_read_by_the_backward_pass(graph: Graph) -> None:
    reads = {v for op in graph.backward_ops() for v in op.inputs} | set(graph.gradients)
    expected = {v for v in reads if graph.forward_values[v]} - set(graph.constants)
    assert graph.backward_reads == expected


@given(graph=graphs())
@laws()
def test_networkx_graph_holds_every_edge_and_role(graph: Graph) -> None:
    network = graph.to_networkx()
    assert network.number_of_nodes() == len(graph.values) + len(graph.ops)
    for op in graph.ops:
        assert set(network.predecessors(("op", op.id))) == {("value", v) for v in op.inputs}
        assert set(network.successors(("op", op.id))) == {("value", v) for v in op.outputs}
        assert network.nodes[("op", op.id)]["heavy"] == op.heavy
    for value in graph.inputs:
        assert "input" in network.nodes[("value", value)]["roles"]


def test_fingerprint_ignores_names_and_lines_and_sees_wiring() -> None:
    graph = chain()
    assert change_op(graph, 0, source="a.py:1", scope="block").fingerprint() == graph.fingerprint()
    assert change_op(graph, 1, inputs=(0,)).fingerprint() != graph.fingerprint()
    assert change_value(graph, 1, dtype="bfloat16").fingerprint() != graph.fingerprint()
    assert replace(graph, multiplicity=2).fingerprint() != graph.fingerprint()


def test_fingerprint_does_not_depend_on_the_process() -> None:
    assert chain().fingerprint() == chain().fingerprint()
    assert seeded_graph(3).fingerprint() == seeded_graph(3).fingerprint()
    assert seeded_graph(3).fingerprint() != seeded_graph(4).fingerprint()


BROKEN: dict[str, Callable[[Graph], Graph]] = {
    "operator id": lambda g: change_op(g, 1, id=5),
    "operator order": lambda g: replace(
        g,
        ops=(replace(g.ops[1], id=0), replace(g.ops[0], id=1), *g.ops[2:]),
        values=tuple(
            replace(v, producer={0: 1, 1: 0}.get(v.producer, v.producer))  # type: ignore[arg-type]
            for v in g.values
        ),
    ),
    "reads an undefined value": lambda g: change_op(g, 0, inputs=(4,)),
    "reads a value that does not exist": lambda g: change_op(g, 0, inputs=(99,)),
    "forward marked backward": lambda g: change_op(g, 0, phase="backward"),
    "backward marked forward": lambda g: change_op(g, 3, phase="forward"),
    "wrong producer": lambda g: change_value(g, 2, producer=0),
    "defined twice": lambda g: change_op(g, 1, outputs=(1,)),
    "writes an input": lambda g: change_op(g, 0, outputs=(0,)),
    "writes a value that does not exist": lambda g: change_op(g, 0, outputs=(99,)),
    "result never computed": lambda g: replace(g, outputs=(99,)),
    "gradient never computed": lambda g: replace(g, gradients=(99,)),
    "result depends on a cotangent": lambda g: replace(g, outputs=(g.gradients[0],)),
    "value id": lambda g: change_value(g, 2, id=7),
    "input that is computed": lambda g: change_value(g, 0, producer=1),
}


@pytest.mark.parametrize("sabotage", BROKEN.values(), ids=BROKEN.keys())
def test_check_refuses_a_graph_that_is_not_well_formed(sabotage: Callable[[Graph], Graph]) -> None:
    with pytest.raises(ValueError):
        sabotage(chain()).check()


@pytest.mark.parametrize(
    "dtype, label",
    [
        ("float32", "f32[8,512]"),
        ("bfloat16", "bf16[8,512]"),
        ("float16", "f16[8,512]"),
        ("bool", "bool[8,512]"),
        ("int32", "i32[8,512]"),
        ("uint8", "u8[8,512]"),
        ("complex64", "c64[8,512]"),
        ("key<fry>", "key<fry>[8,512]"),
        ("float8_e4m3fn", "float8_e4m3fn[8,512]"),
    ],
)
def test_labels_are_spelt_as_jax_spells_them(dtype: str, label: str) -> None:
    assert Value(0, (8, 512), dtype, 0, None).label == label


def test_labels_of_scalars_have_empty_brackets() -> None:
    assert Value(0, (), "float32", 4, None).label == "f32[]"


def test_a_value_read_twice_by_one_operator_has_one_user() -> None:
    builder = GraphBuilder()
    x = builder.input()
    y = builder.op("mul", [x, x])
    ct = builder.cotangent()
    graph = builder.build([y], [builder.op("mul", [ct, x])])
    assert graph.users[x] == (0, 1)


def test_constants_are_no_backward_reads() -> None:
    builder = GraphBuilder()
    x, c = builder.input(), builder.constant()
    y = builder.op("mul", [x, c])
    ct = builder.cotangent()
    graph = builder.build([y], [builder.op("mul", [ct, c])])
    assert graph.backward_reads == frozenset()
    assert graph.forward_values[c]
