"""Chen et al. on general problems: exact numbers on chains, laws on random training graphs."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import chain, laws

from remat.core.errors import PolicyError
from remat.policies import Sublinear, sublinear
from remat.policies.buffers.condense import Condensed
from remat.policies.buffers.within import as_late_as_possible
from remat.policies.solvers.on_demand import kept_at_turn, needed_again, sequence_of_saved
from remat.policies.solvers.problem import Problem, peak_of_order, replay
from remat.policies.solvers.segments import (
    SegmentPlan,
    budgeted_segments,
    crossing_bytes,
    drop_cheap,
    grid_search,
    recursive_segments,
    sqrt_segments,
)
from tests.programs import public_graph, random_sequence


def unit_chain(n: int) -> Problem:
    """Chain A: n forward and n + 1 backward unit nodes; backward node 2n - i reads forward node i."""
    forward = [[i - 1] if i else [] for i in range(n)]
    backward = [[n - 1], *([node - 1, 2 * n - node] for node in range(n + 1, 2 * n + 1))]
    count = 2 * n + 1
    return Problem.of(
        [1] * count,
        [1] * count,
        forward + backward,
        repeatable=[node < n for node in range(count)],
        turn=n,
    )


@st.composite
def training_problems(draw: st.DrawFn, max_forward: int = 14) -> Problem:
    """A forward graph with skips, then a backward node per forward node in reverse.

    A backward node reads the one before it, what a derivative reads (inputs and output of its forward node, or
    some of them) and now and then something far away.
    """
    n = draw(st.integers(1, max_forward))
    inputs: list[list[int]] = []
    for node in range(n):
        near = range(max(0, node - 3), node)
        reads = {node - 1} if node and draw(st.booleans()) else set()
        reads |= set(draw(st.lists(st.sampled_from(near), max_size=2))) if near else set()
        if node and draw(st.integers(0, 5)) == 0:
            reads.add(draw(st.integers(0, node - 1)))
        inputs.append(sorted(reads))
    for step, node in enumerate(reversed(range(n))):
        reads = {n + step - 1} if step else {n - 1}
        if step > 1 and draw(st.integers(0, 4)) == 0:
            reads.add(draw(st.integers(n, n + step - 1)))
        reads |= {r for r in [*inputs[node], node] if draw(st.booleans())}
        if draw(st.integers(0, 5)) == 0:
            reads.add(draw(st.integers(0, n - 1)))
        inputs.append(sorted(reads))
    count = 2 * n
    return Problem.of(
        draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)),
        draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)),
        inputs,
        repeatable=[node < n and draw(st.integers(0, 7)) > 0 for node in range(count)],
        turn=n,
        workspace=draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)),
    )


def all_plans(problem: Problem) -> dict[str, SegmentPlan]:
    median = float(np.median(problem.costs[: problem.turn]))
    return {
        "sqrt": sqrt_segments(problem),
        "sqrt-1": sqrt_segments(problem, 1),
        "sqrt-3": sqrt_segments(problem, 3),
        "budget-0": budgeted_segments(problem, 0),
        "budget-30": budgeted_segments(problem, 30),
        "grid": grid_search(problem),
        "recursive": recursive_segments(problem),
        "recursive-2": recursive_segments(problem, 2),
        "cheap": drop_cheap(problem, problem.costs <= median),
    }


@laws(150)
@given(training_problems())
def test_every_plan_is_valid_deterministic_and_states_its_replay(problem: Problem) -> None:
    first, second = all_plans(problem), all_plans(problem)
    for name, plan in first.items():
        judged = replay(problem, plan.sequence)  # raises if invalid
        assert plan.peak_bytes == judged.peak_bytes, name
        assert plan.extra_cost == judged.extra_cost, name
        assert plan.saved == kept_at_turn(problem, plan.sequence), name
        assert plan.sequence == second[name].sequence, name
        assert plan.cuts == tuple(sorted(set(plan.cuts))), name


@laws(150)
@given(training_problems(), st.randoms(use_true_random=False))
def test_repetitions_can_be_as_late_as_possible(problem: Problem, rng: random.Random) -> None:
    sequence = random_sequence(problem, rng)
    late = as_late_as_possible(problem, sequence)
    replayed = replay(problem, late)  # raises if invalid
    assert replayed.extra_cost <= replay(problem, sequence).extra_cost + 1e-9
    assert not Counter(late) - Counter(sequence)
    assert as_late_as_possible(problem, late) == late
    made: set[int] = set()
    waits: set[int] = set()  # repeated and not read yet: what runs next is for the same reader
    for node in late:
        waits -= set(problem.inputs[node])
        if node in made:
            waits.add(node)
        else:
            assert not waits
            made.add(node)


def test_what_is_read_by_the_next_block_is_not_made_before_this_one() -> None:
    """Forward 0, 1, 2; backward 3 reads 2, 4 reads 3 and 1, 5 reads 4 and 0."""
    inputs = [(), (0,), (1,), (2,), (1, 3), (0, 4)]
    problem = Problem.of([1.0] * 6, [1] * 6, inputs, turn=3)
    assert as_late_as_possible(problem, [0, 1, 2, 0, 1, 0, 3, 4, 5]) == (0, 1, 2, 3, 0, 1, 4, 5)
    assert as_late_as_possible(problem, [0, 1, 2, 3, 1, 4, 0, 5]) == (0, 1, 2, 3, 1, 4, 0, 5)


@laws(150)
@given(training_problems())
def test_only_the_recursion_runs_a_node_more_than_twice(problem: Problem) -> None:
    for name, plan in all_plans(problem).items():
        runs = Counter(plan.sequence)
        if not name.startswith("recursive"):
            assert max(runs.values()) <= 2, name
            assert plan.extra_cost <= problem.costs[: problem.turn].sum(), name
        for node in range(len(problem)):
            assert runs[node] >= 1
            assert runs[node] == 1 or problem.repeatable[node]
            assert runs[node] == 1 or node < problem.turn


@laws(150)
@given(training_problems(), st.data())
def test_sequence_of_saved_keeps_exactly_what_was_asked_and_repeats_the_rest_late(
    problem: Problem, data: st.DataObject
) -> None:
    turn = problem.turn
    saved = data.draw(st.sets(st.integers(0, turn - 1)))
    kept, repeated = needed_again(problem, saved)
    sequence = sequence_of_saved(problem, saved)
    judged = replay(problem, sequence)
    assert kept_at_turn(problem, sequence) == kept
    assert kept <= saved | {n for n in range(turn) if not problem.repeatable[n]}
    assert Counter(sequence[turn:]) == Counter([*repeated, *range(turn, len(problem))])
    assert judged.extra_cost == sum(problem.costs[n] for n in repeated)
    _assert_late(problem, sequence)


def _assert_late(problem: Problem, sequence: tuple[int, ...]) -> None:
    """Every repetition serves the next backward node."""
    group: list[int] = []
    for node in sequence[problem.turn :]:
        if node < problem.turn:
            group.append(node)
            continue
        useful = set(problem.inputs[node])
        for again in reversed(group):
            assert again in useful
            useful.update(problem.inputs[again])
        group.clear()


@laws(100)
@given(training_problems())
def test_all_saved_costs_nothing(problem: Problem) -> None:
    everything = sequence_of_saved(problem, range(problem.turn))
    assert everything == tuple(range(len(problem)))


@laws(100)
@given(training_problems())
def test_crossing_bytes_against_the_definition(problem: Problem) -> None:
    expected = [
        sum(
            int(problem.sizes[v])
            for v in range(cut)
            if problem.repeatable[v] and any(cut <= u < problem.turn for u in problem.users[v])
        )
        for cut in range(problem.turn + 1)
    ]
    assert crossing_bytes(problem).tolist() == expected


@laws(100)
@given(training_problems(max_forward=9), st.integers(1, 4))
def test_cuts_are_the_narrowest_that_divide_the_bytes(problem: Problem, k: int) -> None:
    n = problem.turn
    read = {r for row in problem.inputs[n:] for r in row if r < n}
    weights = [int(problem.sizes[v]) if v in read else 0 for v in range(n)]
    if sum(weights) == 0:
        weights = [1] * n
    cap = max(-(-sum(weights) // k), *weights)
    crossing = crossing_bytes(problem)

    def price(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, n]
        if any(sum(weights[a:b]) > cap for a, b in itertools.pairwise(bounds)):
            return math.inf
        return float(sum(crossing[c] for c in cuts))

    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(1, n), size) for size in range(n)
    )
    plan = sqrt_segments(problem, k)
    if k == 1:
        assert plan.cuts == ()
    else:
        assert price(plan.cuts) == min(price(cuts) for cuts in subsets)


@pytest.mark.parametrize("root", [2, 4, 6, 8, 10, 16, 20])
def test_a_unit_chain_needs_two_roots_of_memory_for_one_forward_pass(root: int) -> None:
    n = root * root
    plan = sqrt_segments(unit_chain(n))
    assert plan.cuts == tuple(range(root, n, root))
    assert plan.peak_bytes == 2 * root + 1
    # The last segment is still there, and the last value of every other one is kept.
    assert plan.extra_cost == (root - 1) ** 2


@pytest.mark.parametrize(
    ("k", "peak", "extra"), [(5, 26, 76), (8, 22, 80), (10, 21, 81), (12, 22, 80), (20, 26, 76)]
)
def test_segments_of_a_hundred_nodes(k: int, peak: int, extra: int) -> None:
    plan = sqrt_segments(unit_chain(100), k)
    assert (plan.peak_bytes, plan.extra_cost) == (peak, extra)
    assert plan.peak_bytes <= -(-100 // k) + k + 2


RECURSION = {
    16: (7, 14, 9, 9),
    64: (9, 114, 12, 81),
    256: (11, 706, 15, 513),
    1000: (13, 3702, 18, 2731),
}


@pytest.mark.parametrize("n", RECURSION)
def test_the_recursion_needs_logarithmic_memory(n: int) -> None:
    problem = unit_chain(n)
    assert peak_of_order(problem) == n + 2
    one, three = recursive_segments(problem), recursive_segments(problem, 3)
    found = (one.peak_bytes, one.extra_cost, three.peak_bytes, three.extra_cost)
    assert found == RECURSION[n]
    levels = math.ceil(math.log2(n))
    assert one.peak_bytes == levels + 3
    assert max(Counter(one.sequence).values()) <= levels + 1
    assert one.extra_cost <= n * levels / 2


@pytest.mark.parametrize(
    ("n", "peak", "extra"), [(16, 8, 10), (64, 16, 50), (100, 20, 84), (400, 40, 368)]
)
def test_grid_search_on_unit_chains(n: int, peak: int, extra: int) -> None:
    plan = grid_search(unit_chain(n))
    assert (plan.peak_bytes, plan.extra_cost) == (peak, extra)


@laws(60)
@given(training_problems(), st.integers(1, 6))
def test_grid_search_is_no_worse_than_the_runs_it_starts_from(problem: Problem, size: int) -> None:
    found = grid_search(problem, size)
    first = budgeted_segments(problem, 0)
    middle = math.isqrt(first.between_bytes * first.within_bytes)
    for plan in (first, budgeted_segments(problem, middle)):
        assert (found.peak_bytes, found.extra_cost) <= (plan.peak_bytes, plan.extra_cost)


def test_algorithm_3_by_hand() -> None:
    problem = unit_chain(8)
    plan = budgeted_segments(problem, 2)
    # A segment is closed by the node that takes it over 2 bytes: three nodes each, two remain.
    assert plan.cuts == (3, 6)
    assert plan.saved == {2, 5, 6, 7}
    assert (plan.between_bytes, plan.within_bytes) == (2, 3)
    assert plan.mirror_counts == (1, 1, 0, 1, 1, 0, 1, 1)
    assert plan.extra_cost == 4
    none = budgeted_segments(problem, 100)
    assert (none.cuts, none.extra_cost, none.within_bytes) == ((), 0, 8)
    every = budgeted_segments(problem, 0)
    assert every.cuts == tuple(range(1, 8))
    only = budgeted_segments(problem, 0, candidates=[4])
    assert only.cuts == (4,)


def test_cuts_lie_at_the_waist_and_keep_what_skips_over_them() -> None:
    # Two blocks of three nodes; each block's first value skips to its end, and node 0 skips to node 6.
    inputs = [[], [0], [0, 1], [2], [3], [3, 4], [0, 5]]
    n = len(inputs)
    backward = [[n - 1 + b if b else n - 1, n - 1 - b] for b in range(n)]
    problem = Problem.of([1] * 2 * n, [1] * 2 * n, inputs + backward, turn=n)
    assert crossing_bytes(problem).tolist() == [0, 1, 2, 2, 2, 3, 2, 0]
    plan = sqrt_segments(problem, 2)
    assert plan.cuts in {(3,), (4,)}
    assert 0 in plan.saved  # it crosses the cut, so it is not computed again
    assert Counter(plan.sequence)[0] == 1


def test_a_value_read_far_away_does_not_pull_its_segment_forward() -> None:
    n = 16
    problem = unit_chain(n)
    inputs = list(problem.inputs)
    inputs[n + 1] = (*inputs[n + 1], 1)  # the second backward node reads forward node 1
    far = Problem.of([1] * len(inputs), [1] * len(inputs), inputs, turn=n)
    plan = sqrt_segments(far)
    assert 1 in plan.saved
    assert plan.peak_bytes <= sqrt_segments(problem).peak_bytes + 1


def test_drop_cheap_keeps_convolutions_only() -> None:
    # conv - norm - relu, four times; a relu's backward reads its output, a norm's its input, a conv's its input.
    blocks, inputs = 4, []
    n = 3 * blocks
    inputs = [[i - 1] if i else [] for i in range(n)]
    for step, node in enumerate(reversed(range(n))):
        own = node if node % 3 == 2 else node - 1
        inputs.append([*([n + step - 1] if step else []), *([own] if own >= 0 else [])])
    costs = [100 if node % 3 == 0 else 1 for node in range(n)] + [1] * n
    problem = Problem.of(costs, [8] * 2 * n, inputs, turn=n)
    plan = drop_cheap(problem, [node % 3 != 0 for node in range(n)])
    assert plan.saved == {0, 3, 6, 9}
    assert plan.extra_cost == 8.0
    assert Counter(plan.sequence[n:])[3] == 0
    assert peak_of_order(problem) == 72  # 4 convolutions, 4 relus, a gradient
    assert plan.peak_bytes == 48  # 4 convolutions, a norm and a relu or gradients
    nothing = drop_cheap(problem, np.zeros(2 * n, np.bool_))
    assert nothing.extra_cost == 0


def test_what_must_not_be_repeated_is_kept() -> None:
    chain = unit_chain(9)
    problem = Problem.of(
        chain.costs.tolist(),
        chain.sizes.tolist(),
        chain.inputs,
        repeatable=[node != 4 and node < 9 for node in range(len(chain))],
        turn=9,
    )
    sequence = sequence_of_saved(problem, ())
    assert kept_at_turn(problem, sequence) == {4}
    assert 4 in sqrt_segments(problem, 2).saved | recursive_segments(problem).saved


@pytest.mark.parametrize(("count", "turn"), [(0, 0), (1, 0), (1, 1), (3, 0), (3, 3)])
def test_problems_without_one_of_the_passes_run_in_order(count: int, turn: int) -> None:
    inputs = [[i - 1] if i else [] for i in range(count)]
    problem = Problem.of([1] * count, [1] * count, inputs, turn=turn)
    for plan in (sqrt_segments(problem), grid_search(problem), recursive_segments(problem)):
        assert plan.sequence == tuple(range(count))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: sqrt_segments(p, 0), "at least 1 segment"),
        (lambda p: recursive_segments(p, 0), "at least 1 kept border"),
        (lambda p: budgeted_segments(p, -1), "bytes, at least 0"),
        (lambda p: budgeted_segments(p, 1, candidates=[99]), "expected nodes from 0 to 3"),
        (lambda p: grid_search(p, 0), "at least 1"),
        (lambda p: drop_cheap(p, [True]), r"one per forward node \(4\) or per node \(9\)"),
        (lambda p: sequence_of_saved(p, [7]), "saved contains"),
    ],
)
def test_errors_say_what_was_expected(call, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        call(unit_chain(4))


@pytest.mark.parametrize(
    ("name", "ratio"), [("vgg16", 0.832), ("vgg19", 0.772), ("unet", 0.603), ("resnet50", 0.319)]
)
def test_sqrt_segments_on_public_graphs(name: str, ratio: float) -> None:
    problem = public_graph(name)
    plan = sqrt_segments(problem)
    assert plan.peak_bytes <= ratio * peak_of_order(problem)
    assert plan.extra_cost <= problem.costs[: problem.turn].sum()
    assert grid_search(problem).peak_bytes <= plan.peak_bytes


@pytest.mark.parametrize(
    "policy", [Sublinear(), Sublinear("sqrt"), Sublinear("recursive"), Sublinear("cheap")], ids=repr
)
def test_what_no_budget_changes_is_cut_once(
    policy: Sublinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts: list[tuple[str, int | None]] = []
    plain = sublinear._cut

    def counting(condensed: Condensed, method: Any, k: int | None) -> SegmentPlan:
        cuts.append((method, k))
        return plain(condensed, method, k)

    monkeypatch.setattr(sublinear, "_cut", counting)
    graph = chain(24, heavy=True, fusible=False)
    budgets = [1 << 40, 7000] if policy.method == "cheap" else [1 << 40, 5000, 3000]
    made = [policy.decide_within(graph, budget) for budget in budgets]
    assert policy.decide(graph).status == "heuristic"
    assert len(cuts) == len(set(cuts)) > 0
    first = len(cuts)
    fresh = [policy.decide_within(chain(24, heavy=True, fusible=False), b) for b in budgets]
    assert fresh == made and len(cuts) == (1 + len(budgets)) * first


def test_cuts_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time may be up after the first ones."""
    monkeypatch.setattr("remat.policies.buffers.within.out_of_time", lambda: True)
    monkeypatch.setattr(sublinear, "_cut", None)
    Sublinear().decide_within(chain(24, heavy=True, fusible=False), 1 << 40)
