"""Who asks whether a value is a buffer: the rule they share, and where they differ on purpose."""

from __future__ import annotations

from hypothesis import given
from random_graphs import GraphBuilder, graphs, laws

from remat.core.buffers import (
    ends_kernel,
    fused_values,
    is_written,
    is_written_forward,
    kernel_results,
    live_ops,
)
from remat.core.graph import Graph
from remat.memory.predict import buffers


def written(graph: Graph) -> set[int]:
    """What the rule alone says of values that a needed operator makes and a needed one reads."""
    live = live_ops(graph)
    found: set[int] = set()
    for op in graph.ops:
        for value in op.outputs if op.id in live else ():
            readers = [graph.ops[u] for u in graph.users[value] if u in live]
            if readers and is_written(not op.fusible, readers):
                found.add(value)
    return found


@given(graph=graphs())
@laws(60)
def test_all_variants_contain_the_rule(graph: Graph) -> None:
    rule = written(graph)
    assert rule.isdisjoint(fused_values(graph))
    assert rule <= kernel_results(graph, live_ops(graph), ())
    for value in range(len(graph.values)):
        if is_written_forward(graph, value) and value not in (*graph.alive_anyway, *graph.carried):
            assert value not in fused_values(graph)


@given(graph=graphs())
@laws(30)
def test_planners_write_what_they_are_told_to_keep_and_results(graph: Graph) -> None:
    live = live_ops(graph)
    made = {v for op in graph.ops if op.id in live for v in op.outputs}
    found = kernel_results(graph, live, range(len(graph.values)))
    assert found == made
    least = kernel_results(graph, live, ())
    assert made.intersection((*graph.outputs, *graph.gradients)) <= least <= found


def test_a_scatter_makes_its_updates_itself() -> None:
    """A message per edge, summed by receiver, is in memory neither for planners nor for the model."""
    builder = GraphBuilder()
    nodes, where, edges = builder.input((8, 64)), builder.input((4096,)), builder.input((4096, 64))
    onto = builder.op("dot", [nodes], (8, 64))
    message = builder.op("neg", [edges], (4096, 64))
    summed = builder.op("scatter-add", [onto, where, message], (8, 64), fusible=False)
    graph = builder.build([builder.op("dot", [summed], (4,))], [])
    in_memory = kernel_results(graph, live_ops(graph), ())
    for value, expected in ((message, False), (onto, True), (summed, True)):
        assert (value in in_memory) == expected == (buffers(graph)[value] > 0)


def test_where_the_variants_differ() -> None:
    builder = GraphBuilder()
    x = builder.input((64, 64))
    total = builder.op("sum", [x], (64,))  # a reduction that an element-wise operator reads
    inner = builder.op("add", [total], (64,))  # that only the backward pass's product reads
    y = builder.op("tanh", [inner], (64,))
    ct = builder.cotangent((64,))
    graph = builder.build([y], [builder.op("dot", [ct, inner], (64, 64))])
    answers = {
        value: (
            value not in fused_values(graph),
            is_written_forward(graph, value),
            value in kernel_results(graph, live_ops(graph), ()),
            buffers(graph)[value] > 0,
        )
        for value in (total, inner, y)
    }
    #                         referee, cut, planners, memory model
    assert answers[total] == (False, False, True, True)
    assert answers[inner] == (True, False, True, True)
    assert answers[y] == (False, True, True, True)  # a result: the caller's memory


def test_what_ends_a_kernel() -> None:
    builder = GraphBuilder()
    x = builder.input((8, 8))
    made = [builder.op(name, [x], (8,)) for name in ("add", "sum", "dot", "argmax")]
    ops = builder.build(made, []).ops
    assert [ends_kernel(op) for op in ops] == [False, True, True, True]


def test_a_value_of_many_operands_that_two_kernels_read_is_dear() -> None:
    """Making it reads two arrays of its size in either kernel; writing it once moves three."""

    def graph(operands: int) -> tuple[Graph, int]:
        builder = GraphBuilder()
        parts = [builder.input((64, 64)) for _ in range(operands)]
        total = builder.op("add", parts, (64, 64))
        ends = [builder.op("sum", [total], (64,)), builder.op("sum", [total], (64,))]
        ct = builder.cotangent((64,))
        return builder.build(ends, [builder.op("add", [ct], (64,))]), total

    for operands, dear in ((1, False), (2, True)):
        found, total = graph(operands)
        assert (total in kernel_results(found, live_ops(found), ())) == dear


def test_what_nothing_needs_makes_no_buffer() -> None:
    builder = GraphBuilder()
    x = builder.input((64,))
    y = builder.op("add", [x], (64,))
    unread = builder.op("dot", [builder.op("tanh", [x], (64,))], (64,))
    ct = builder.cotangent((64,))
    graph = builder.build([y], [builder.op("add", [ct], (64,))])
    assert unread not in kernel_results(graph, live_ops(graph), ())
    assert live_ops(graph) == {0, 3}
