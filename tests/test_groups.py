"""Section 3.7 of Yu & He: what one fusion group writes for the next."""

from __future__ import annotations

import pytest
from random_graphs import GraphBuilder

from remat.core.errors import PolicyError
from remat.core.graph import Graph
from remat.policies.min_cut import between_groups


def chain_of_three(first: str = "cos") -> tuple[Graph, list[int]]:
    """Group A: a(x), b(a), c(b); group B reads all three. `first` is the primitive of `b`."""
    builder = GraphBuilder()
    x = builder.input()
    a = builder.op("sin", [x])
    b = builder.op(first, [a])
    c = builder.op("tanh", [b])
    d = builder.op("add", [a, b])
    y = builder.op("add", [d, c])
    return builder.build(outputs=[y], gradients=[]), [x, a, b, c]


def test_a_cheap_group_is_recomputed_whole() -> None:
    """Figure 4: three writes and three reads become one read of the input that is there anyway."""
    graph, (x, *_) = chain_of_three()
    assert between_groups(graph, {0, 1, 2}, {3, 4}) == {x}


def test_what_does_not_fuse_is_written() -> None:
    graph, (_, _, b, _) = chain_of_three("dot")
    kept = between_groups(graph, {0, 1, 2}, {3, 4})
    assert b in kept and len(kept) == 2


def test_a_value_read_elsewhere_is_written_anyway_and_may_be_read() -> None:
    builder = GraphBuilder()
    inputs = [builder.input() for _ in range(3)]
    total = builder.op("add", [builder.op("add", inputs[:2]), inputs[2]])
    inside = builder.op("tanh", [total])
    outside = builder.op("dot", [total])
    graph = builder.build(outputs=[inside, outside], gradients=[])
    assert between_groups(graph, {0, 1}, {2}) == {total}


def test_groups_must_be_disjoint() -> None:
    graph, _ = chain_of_three()
    with pytest.raises(PolicyError, match="share operators"):
        between_groups(graph, {0, 1}, {1, 2})
