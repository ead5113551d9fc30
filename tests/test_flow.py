"""`minimum_cut` is an exact minimum cut, certified by its flow, with the smallest sink side."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

from remat.policies.solvers.flow import INFINITE, Cut, minimum_cut

exact = laws(80)
Edge = tuple[int, int, int]
Net = tuple[int, list[Edge]]

_SMALL = st.integers(0, 12)
_LARGE = st.integers(0, 1 << 40)
_ODD = st.sampled_from([(1 << 31) - 1, 1 << 31, (1 << 32) + 1, (1 << 40) - 1, 3 << 38])


@st.composite
def networks(
    draw: st.DrawFn, capacity: st.SearchStrategy[int], max_vertices: int = 8, max_edges: int = 20
) -> Net:
    """A number of vertices (source 0, sink 1) and edges; a fifth of them infinite, some parallel."""
    size = draw(st.integers(2, max_vertices))
    end = st.integers(0, size - 1)
    room = st.one_of(capacity, capacity, capacity, capacity, st.just(INFINITE))
    return size, draw(st.lists(st.tuples(end, end, room), max_size=max_edges))


def cut_of(net: Net) -> Cut:
    size, edges = net
    tails, heads, capacities = ([edge[i] for edge in edges] for i in range(3))
    return minimum_cut(size, tails, heads, capacities, 0, 1)


def networkx_of(net: Net) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(net[0]))
    for tail, head, capacity in net[1]:
        if tail == head:
            continue
        if not graph.has_edge(tail, head):
            graph.add_edge(tail, head, capacity=0)
        known = graph[tail][head].get("capacity")
        if capacity == INFINITE or known is None:
            graph[tail][head].pop("capacity", None)
        else:
            graph[tail][head]["capacity"] = known + capacity
    return graph


def is_unbounded(net: Net) -> bool:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(net[0]))
    graph.add_edges_from((t, h) for t, h, c in net[1] if c == INFINITE)
    return nx.has_path(graph, 0, 1)


def capacity_across(net: Net, sink_side: frozenset[int]) -> float:
    crossing = [c for t, h, c in net[1] if t not in sink_side and h in sink_side]
    return float("inf") if INFINITE in crossing else sum(crossing)


def side_of(cut: Cut) -> frozenset[int]:
    return frozenset(np.flatnonzero(cut.sink_side).tolist())


@pytest.mark.parametrize("capacity", [_SMALL, _LARGE, _ODD], ids=["small", "large", "odd"])
@given(data=st.data())
@exact
def test_flow_equals_that_of_networkx(
    capacity: st.SearchStrategy[int], data: st.DataObject
) -> None:
    net = data.draw(networks(capacity))
    if is_unbounded(net):
        with pytest.raises(ValueError, match="infinite"):
            cut_of(net)
        return
    cut = cut_of(net)
    assert cut.flow == nx.maximum_flow_value(networkx_of(net), 0, 1)
    assert cut.capacity == cut.flow
    assert cut.capacity == capacity_across(net, side_of(cut))


@given(net=networks(_SMALL, max_vertices=6, max_edges=14))
@exact
def test_no_minimum_cut_has_a_smaller_sink_side(net: Net) -> None:
    if is_unbounded(net):
        return
    cut = cut_of(net)
    others = range(2, net[0])
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            side = frozenset((1, *chosen))
            found = capacity_across(net, side)
            assert found >= cut.capacity
            if found == cut.capacity:
                assert side_of(cut) <= side


@given(net=networks(_ODD), rng=st.randoms(use_true_random=False))
@exact
def test_the_cut_does_not_depend_on_numbers_or_order(net: Net, rng: random.Random) -> None:
    if is_unbounded(net):
        return
    size, edges = net
    inner = list(range(2, size))
    rng.shuffle(inner)
    number = [0, 1, *inner]
    moved = [(number[t], number[h], c) for t, h, c in edges]
    rng.shuffle(moved)
    cut, other = cut_of(net), cut_of((size, moved))
    assert cut.capacity == other.capacity
    assert {number[v] for v in side_of(cut)} == side_of(other)


@pytest.mark.parametrize("unit", [1, 3, 1 << 20, (1 << 20) + 7])
@given(net=networks(_SMALL))
@exact
def test_a_common_factor_scales_the_cut_and_changes_nothing_else(unit: int, net: Net) -> None:
    if is_unbounded(net):
        return
    scaled = (net[0], [(t, h, c if c == INFINITE else c * unit) for t, h, c in net[1]])
    cut, other = cut_of(net), cut_of(scaled)
    assert other.capacity == other.flow == unit * cut.capacity
    assert np.array_equal(cut.sink_side, other.sink_side)


def test_a_chain_of_one_tebibyte_values_is_exact_to_the_byte() -> None:
    tebibyte = 1 << 40
    net = (4, [(0, 2, tebibyte + 1), (2, 3, tebibyte), (3, 1, tebibyte + 3)])
    cut = cut_of(net)
    assert cut.capacity == cut.flow == tebibyte
    assert side_of(cut) == {1, 3}


@pytest.mark.parametrize("count", [2, 3, 100])
def test_parallel_edges_above_32_bits_add_up(count: int) -> None:
    big = (1 << 31) - 1
    edges = [(0, 2, big)] * count + [(2, 1, INFINITE)]
    assert cut_of((3, edges)).flow == count * big


def test_many_disjoint_paths_add_up_beyond_32_bits() -> None:
    paths = 64
    edges = []
    for i in range(paths):
        edges += [(0, 2 + i, (1 << 40) + i), (2 + i, 1, (1 << 41) - i)]
    assert cut_of((2 + paths, edges)).flow == paths * (1 << 40) + sum(range(paths))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
def test_parallel_infinite_edges_stay_infinite(count: int) -> None:
    # Large and without a common factor, so that the infinite edges' sum needs more than 63 bits.
    huge = 1 << 60
    edges = [(0, 2, huge), (0, 2, 1)] + [(2, 1, INFINITE)] * count
    cut = cut_of((3, edges))
    assert cut.capacity == cut.flow == huge + 1
    assert side_of(cut) == {1, 2}


@pytest.mark.parametrize("paths", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize("finite", [0, 1, (1 << 29) - 1, 1 << 29, (1 << 40) - 1])
def test_a_network_without_a_finite_cut_is_refused(paths: int, finite: int) -> None:
    edges = [(0, 1, finite)]
    for i in range(paths):
        edges += [(0, 2 + i, INFINITE), (2 + i, 1, INFINITE)]
    with pytest.raises(ValueError, match="infinite"):
        cut_of((2 + paths, edges))


def test_capacities_beyond_the_limit_are_refused() -> None:
    edges = [(0, 2, 1 << 62), (2, 1, 1)]
    with pytest.raises(OverflowError, match="add up"):
        cut_of((3, edges))


def test_the_common_factor_is_taken_out_before_the_limit_is_checked() -> None:
    edges = [(0, 2, 1 << 61), (2, 1, 1 << 61)]
    assert cut_of((3, edges)).flow == 1 << 61


def test_a_network_without_edges_has_an_empty_cut() -> None:
    cut = cut_of((2, []))
    assert (cut.capacity, cut.flow, side_of(cut)) == (0, 0, {1})


def test_zero_capacities_are_allowed() -> None:
    cut = cut_of((3, [(0, 2, 0), (2, 1, 5)]))
    assert (cut.capacity, cut.flow) == (0, 0)


@pytest.mark.parametrize("size", [40, 120])
def test_layered_networks_equal_networkx(size: int) -> None:
    rng = random.Random(size)
    edges = [
        (rng.randrange(size), rng.randrange(size), rng.choice([rng.randrange(1 << 41), INFINITE]))
        for _ in range(3 * size)
    ]
    edges = [(t, h, c if h != 1 else abs(c)) for t, h, c in edges]
    net = (size, edges)
    cut = cut_of(net)
    assert cut.flow == cut.capacity == nx.maximum_flow_value(networkx_of(net), 0, 1)
