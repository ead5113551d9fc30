"""The local search: its tree against plain arrays, its results against an exact search over memory states."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

from benchmarks.layered import chain, graph_folder, layered, published, training
from remat.policies.solvers import search_kernel as kernel
from remat.policies.solvers.problem import Problem, peak_of_order, replay
from remat.policies.solvers.search import Found, SearchState, is_compilable, renumbered, search
from remat.policies.solvers.search_walk import Walk

# --- problems and oracles --------------------------------------------------------------------------


def random_problem(rng: random.Random, most: int, *, turn: bool | None = None) -> Problem:
    """A small random problem: zero costs and sizes, unrepeatable nodes, workspaces, isolated nodes."""
    count = rng.randint(1, most)
    inputs = [rng.sample(range(i), min(i, rng.randint(0, 3))) for i in range(count)]
    half = rng.random() < 0.5 if turn is None else turn
    return Problem.of(
        [rng.randint(0, 9) for _ in range(count)],
        [rng.randint(0, 9) for _ in range(count)],
        inputs,
        repeatable=[rng.random() < 0.8 for _ in range(count)],
        turn=count // 2 if half else 0,
        workspace=[rng.randint(0, 3) for _ in range(count)] if rng.random() < 0.5 else None,
    )


def cheapest(problem: Problem, budget_bytes: int) -> float:
    """The least cost of any sequence within the budget, infinity if there is none.

    Dijkstra's algorithm over (first runs done, values in memory): a step drops any values, then runs a node whose
    inputs are in memory.
    """
    count = len(problem)
    sizes = [int(size) for size in problem.sizes]
    extra = [int(size) for size in problem.extra_while_running]
    needed = [sum(1 << read for read in reads) for reads in problem.inputs]

    def weight(values: int) -> int:
        return sum(size for node, size in enumerate(sizes) if values >> node & 1)

    def steps(done: int, alive: int) -> Iterator[tuple[int, int]]:
        for node in range(min(done + 1, count)):
            again = node < done
            if again and (not problem.repeatable[node] or done < problem.turn):
                continue
            if needed[node] & ~alive:
                continue
            optional = alive & ~needed[node] & ~(1 << node)
            kept = optional
            while True:
                held = kept | needed[node]
                if weight(held) + sizes[node] + extra[node] <= budget_bytes:
                    yield node, held | 1 << node
                if not kept:
                    break
                kept = (kept - 1) & optional

    best = {(0, 0): 0.0}
    queue = [(0.0, 0, 0)]
    while queue:
        cost, done, alive = heapq.heappop(queue)
        if done == count:
            return cost
        if cost > best[done, alive]:
            continue
        for node, held in steps(done, alive):
            state = (max(done, node + 1), held)
            price = cost + float(problem.costs[node])
            if price < best.get(state, math.inf):
                best[state] = price
                heapq.heappush(queue, (price, *state))
    return math.inf


def budget_between(problem: Problem, share: float) -> int:
    """A budget between the floor and the peak without repetitions."""
    floor, peak = problem.floor_bytes, peak_of_order(problem)
    return floor + int(share * (peak - floor))


def check_result(problem: Problem, budget_bytes: int, found: Found) -> None:
    """A result is what it says, by the referee."""
    judged = replay(found.problem, found.sequence)
    assert judged.peak_bytes == found.peak_bytes
    assert judged.cost == found.cost
    assert judged.extra_cost == found.extra_cost
    assert found.feasible == (found.peak_bytes <= budget_bytes)
    assert sorted(found.order) == list(range(len(problem)))
    assert found.problem.costs.tolist() == problem.costs[found.order].tolist()
    assert found.problem.sizes.tolist() == problem.sizes[found.order].tolist()
    for node, reads in enumerate(found.problem.inputs):
        assert sorted(found.order[r] for r in reads) == sorted(problem.inputs[found.order[node]])


# --- the state -------------------------------------------------------------------------------------


def walk_of(problem: Problem, budget_bytes: int, seed: int, reorder: bool) -> Walk:
    walk = Walk(problem, budget_bytes, seed, compiled=False, reorder=reorder)
    walk.load(problem.first_runs)
    walk.cool(3.0, 0.0)
    return walk


def check_state(walk: Walk) -> None:
    """Everything the walk keeps incrementally equals what the sequence says."""
    home, sequence, _ = renumbered(walk.problem, walk.current())
    judged = replay(home, sequence)
    live = judged.live_bytes.tolist()
    p, slots = walk.p, walk.slots
    assert walk.t[5] == judged.peak_bytes
    assert walk.t[6] == live.count(judged.peak_bytes)
    assert p[kernel.COST] == judged.cost
    assert p[kernel.LENGTH] == len(sequence) == len(walk.problem) + p[kernel.REPS]
    at = [slot for slot in range(slots) if walk.s[slot] >= 0]
    assert kernel.peak_slot(p, walk.t) == at[live.index(judged.peak_bytes)]
    profile, alive = [], 0
    for slot in range(slots):
        profile.append(alive + walk.t[4 * (slots + slot) + 1])
        alive += walk.t[4 * (slots + slot)]
    assert alive == 0
    assert [profile[slot] for slot in at] == live
    rng = random.Random(len(sequence))
    for _ in range(5):
        low = rng.randrange(slots)
        high = rng.randint(low + 1, slots)
        assert kernel.range_max(p, walk.t, low, high) == max(profile[low:high])
    reps = [walk.reps[i] for i in range(p[kernel.REPS])]
    assert [walk.r[8 * run + kernel.INDEX] for run in reps] == list(range(len(reps)))
    assert sorted(reps) == sorted(walk.s[slot] for slot in at if walk.s[slot] >= len(home))


@pytest.mark.parametrize("seed", range(24))
def test_the_state_equals_the_sequence_after_every_few_proposals(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, 30)
    while len(problem) < 3:
        problem = random_problem(rng, 30)
    walk = walk_of(problem, budget_between(problem, rng.random()), seed, problem.turn == 0)
    check_state(walk)
    for _ in range(12):
        if walk.run(20) < 20:
            walk.grow()
        check_state(walk)
        home, best, _ = renumbered(problem, walk.kept)
        judged = replay(home, best)
        over = max(0, judged.peak_bytes - walk.p[kernel.BUDGET])
        assert (over, judged.cost) == walk.kept_rank
    assert walk.p[kernel.DONE] > 0


def test_the_walk_of_these_tests_does_edit() -> None:
    problem = chain(8)
    walk = walk_of(problem, 5, 0, False)
    walk.run(2000)
    assert walk.p[kernel.ACCEPTED] > 20
    assert walk.p[kernel.REPS] > 0


def test_a_full_walk_grows_and_goes_on() -> None:
    problem = chain(24)
    walk = walk_of(problem, 3, 0, False)
    walk._allocate(1024)  # too small for the 325 runs that the budget needs
    walk.slots = 1 << 20
    walk.load(problem.first_runs)
    walk.slots = small = 1024
    walk.cool(1.0, 1.0)
    walk.f[kernel.PRICE] = 1e4
    grown = 0
    for _ in range(12):
        if walk.run(500) < 500:
            before = walk.current().tolist()
            walk.grow()
            grown += 1
            assert walk.current().tolist() == before
            check_state(walk)
    assert grown > 0
    assert walk.slots > small


def test_random_numbers_are_even_and_do_not_repeat() -> None:
    p = [0] * kernel.SCALARS
    p[kernel.RNG] = 1
    drawn = [kernel.below(p, 10) for _ in range(20000)]
    counts = np.bincount(drawn, minlength=10)
    assert counts.min() > 1800 and counts.max() < 2200
    p[kernel.RNG] = 12345
    assert len({kernel.draw(p) for _ in range(20000)}) > 19990
    assert p[kernel.RNG] < 1 << 63


# --- results ---------------------------------------------------------------------------------------


def griewank(steps: int, snapshots: int) -> int:
    """Fewest forward steps to reverse a chain (Griewank & Walther 2000)."""
    rounds = 1
    while math.comb(snapshots + rounds, snapshots) < steps:
        rounds += 1
    return rounds * steps - math.comb(snapshots + rounds, rounds - 1)


def test_the_oracle_knows_the_unit_chain() -> None:
    extra = [cheapest(chain(5), budget) - 11 for budget in range(2, 8)]
    assert extra == [math.inf] + [griewank(6, snapshots) - 5 for snapshots in range(1, 6)]
    assert extra[1:] == [10, 3, 2, 1, 0]
    # The DTR paper's chain of 6 is the chain of 4 in other clothes.
    other = chain(6, releases_outputs=True)
    assert [cheapest(other, budget) - 12 for budget in range(3, 7)] == [
        griewank(5, snapshots) - 4 for snapshots in range(1, 5)
    ]


def test_against_the_exact_optimum_of_small_problems() -> None:
    reached = wrong = 0
    for seed in range(40):
        rng = random.Random(seed)
        problem = random_problem(rng, 9)
        budget = budget_between(problem, rng.random())
        optimum = cheapest(problem, budget)
        found = search(problem, budget, proposals=1500, seed=seed, compiled=False)
        check_result(problem, budget, found)
        if found.feasible:
            assert found.cost >= optimum
            reached += found.cost == optimum
        else:
            wrong += optimum < math.inf
            reached += optimum == math.inf
    assert wrong <= 1
    assert reached >= 38


@pytest.mark.sample(3)
@pytest.mark.parametrize("budget", range(3, 10))
def test_the_optimum_of_unit_chains(budget: int) -> None:
    found = search(chain(8), budget, proposals=12000, compiled=False)
    assert found.feasible
    assert found.extra_cost == griewank(9, budget - 2) - 8


def test_nothing_is_repeated_where_nothing_need_be() -> None:
    problem = chain(8)
    found = search(problem, peak_of_order(problem), seconds=0, compiled=False)
    assert (found.extra_cost, found.ended, found.proposals) == (0, "optimal", 0)
    # From a start with repetitions it finds back, and stops there.
    start = [*range(9), 0, *range(9, 17)]
    found = search(problem, 10, start=start, proposals=10**6, compiled=False)
    assert found.sequence.tolist() == list(range(17))
    assert found.ended == "optimal"
    assert found.proposals < 10**6


def test_an_impossible_budget_gives_the_smallest_peak() -> None:
    told: list[SearchState] = []
    found = search(chain(6), 2, proposals=8000, compiled=False, progress=told.append)
    assert not found.feasible
    assert found.peak_bytes == 3
    assert found.extra_cost == griewank(7, 1) - 6 == 15
    assert told[-1].over_bytes == 1


@given(st.randoms(use_true_random=False), st.floats(0, 1), st.integers(0, 2**40))
@laws(25)
def test_results_are_valid_and_never_worse_than_the_start(
    rng: random.Random, share: float, seed: int
) -> None:
    problem = random_problem(rng, 25)
    budget = int(share * peak_of_order(problem))
    start = _with_repetitions(rng, problem)
    before = replay(problem, start)
    found = search(problem, budget, start=start, proposals=300, seed=seed, compiled=False)
    check_result(problem, budget, found)
    rank = (max(0, before.peak_bytes - budget), before.cost)
    assert (max(0, found.peak_bytes - budget), found.cost) <= rank
    again = search(problem, budget, start=start, proposals=300, seed=seed, compiled=False)
    assert again.sequence.tolist() == found.sequence.tolist()
    assert again.proposals == found.proposals


@given(st.randoms(use_true_random=False), st.floats(0, 1))
@laws(30)
def test_searching_orders_gives_the_same_graph_renumbered(rng: random.Random, share: float) -> None:
    problem = random_problem(rng, 20, turn=False)
    budget = budget_between(problem, share)
    found = search(problem, budget, proposals=400, reorder=True, compiled=False)
    check_result(problem, budget, found)
    judged = replay(problem, problem.first_runs)
    rank = (max(0, judged.peak_bytes - budget), judged.cost)
    assert (max(0, found.peak_bytes - budget), found.cost) <= rank


def test_an_order_can_save_what_repetition_costs() -> None:
    # Two large values, each reduced to a small one: reduced at once, never both are alive.
    problem = Problem.of([1] * 5, [10, 10, 1, 1, 1], [[], [], [0], [1], [2, 3]])
    assert search(problem, 12, proposals=3000, compiled=False).extra_cost > 0
    found = search(problem, 12, proposals=3000, compiled=False, reorder=True)
    assert found.feasible
    assert (found.extra_cost, found.ended) == (0, "optimal")
    check_result(problem, 12, found)


def test_fractional_costs_are_judged_exactly() -> None:
    base = chain(8)
    problem = Problem.of(
        [0.1 + i * 1e-9 for i in range(17)],
        base.sizes.tolist(),
        base.inputs,
        repeatable=base.repeatable.tolist(),
        turn=9,
    )
    found = search(problem, 5, proposals=12000, compiled=False)
    check_result(problem, 5, found)
    assert found.extra_cost == pytest.approx(0.5, abs=1e-6)


def _with_repetitions(rng: random.Random, problem: Problem) -> list[int]:
    """A valid sequence with random repetitions, also after the last first run."""
    start: list[int] = []
    for node in range(len(problem) + 1):
        if node >= problem.turn:
            start += [
                again for again in range(node) if problem.repeatable[again] and rng.random() < 0.1
            ]
        if node < len(problem):
            start.append(node)
    return start


# --- limits, interruption, errors ------------------------------------------------------------------


def test_a_limit_of_proposals_is_kept_exactly() -> None:
    found = search(chain(8), 5, proposals=5000, compiled=False)
    assert (found.proposals, found.ended) == (5000, "proposals")
    assert search(chain(8), 5, proposals=0, compiled=False).proposals == 0


def test_a_limit_of_seconds_ends_it() -> None:
    found = search(chain(8), 5, seconds=0.2, compiled=False)
    assert found.ended == "seconds"
    assert found.proposals > 0
    assert 0.2 <= found.seconds < 10


def test_stop_and_progress() -> None:
    told: list[SearchState] = []
    found = search(
        chain(8),
        5,
        proposals=10**7,
        compiled=False,
        progress=told.append,
        stop=lambda: len(told) == 3,
    )
    assert found.ended == "stopped"
    assert len(told) == 3
    assert [state.proposals for state in told] == [2048, 4096, 6144]
    assert found.proposals == 6144
    assert told[-1].over_bytes == max(0, found.peak_bytes - 5)
    assert told[-1].extra_cost == found.extra_cost


def test_an_interrupt_gives_the_best_so_far() -> None:
    told: list[SearchState] = []

    def interrupt(state: SearchState) -> None:
        told.append(state)
        if len(told) == 4:
            raise KeyboardInterrupt

    found = search(chain(8), 5, proposals=10**7, compiled=False, progress=interrupt)
    assert found.ended == "interrupted"
    assert found.feasible
    assert found.extra_cost == told[-1].extra_cost
    check_result(chain(8), 5, found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"budget_bytes": -1}, "budget_bytes=-1"),
        ({"budget_bytes": 5, "seconds": -1.0}, "seconds=-1.0"),
        ({"budget_bytes": 5, "seconds": math.nan}, "seconds=nan"),
        ({"budget_bytes": 5, "proposals": -3}, "proposals=-3"),
        ({"budget_bytes": 5, "reorder": True}, "turn=9"),
        ({"budget_bytes": 5, "start": [0, 2, 1]}, "node 2"),
    ],
)
def test_errors_name_what_was_passed(arguments: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        search(chain(8), **arguments, compiled=False)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_trivial_problems(count: int) -> None:
    problem = Problem.of([1] * count, [2] * count, [list(range(i)) for i in range(count)])
    found = search(problem, 1, proposals=100, compiled=False)
    assert found.sequence.tolist() == list(range(count))
    assert found.feasible == (count == 0)


# --- compiled --------------------------------------------------------------------------------------


@pytest.mark.slow  # compiles, about 20 s, unless numba has it in its cache
@pytest.mark.skipif(not is_compilable(), reason="numba is not installed")
def test_compiled_equals_plain() -> None:
    cases = [(chain(12), 5, False), (training(10, 3), 0, False), (layered(40, 0.3), 0, True)]
    for problem, asked, reorder in cases:
        budget = asked or budget_between(problem, 0.3)
        pair = [
            search(problem, budget, proposals=6000, seed=3, compiled=compiled, reorder=reorder)
            for compiled in (True, False)
        ]
        assert pair[0].compiled and not pair[1].compiled
        assert pair[0].sequence.tolist() == pair[1].sequence.tolist()
        assert pair[0].order.tolist() == pair[1].order.tolist()
        assert pair[0].proposals == pair[1].proposals
        assert pair[0].cost == pair[1].cost
        check_result(problem, budget, pair[0])


@pytest.mark.skipif(is_compilable(), reason="numba is installed")
def test_compiled_needs_numba() -> None:
    with pytest.raises(ModuleNotFoundError):
        search(chain(8), 5, compiled=True)


# --- graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "edges"), [(100, 236), (250, 944), (500, 2461), (1000, 5875)])
def test_layered_graphs_are_like_the_published_ones(nodes: int, edges: int) -> None:
    width = {100: 0.27, 250: 0.43, 500: 0.36, 1000: 0.31}[nodes]
    graphs = [layered(nodes, width, seed=seed) for seed in range(4)]
    counts = [sum(map(len, graph.inputs)) for graph in graphs]
    assert len(set(counts)) > 1
    assert all(abs(count - edges) < 0.2 * edges for count in counts)
    for graph in graphs:
        assert len(graph) == nodes
        assert graph.inputs[0] == () and graph.users[nodes - 1] == ()
        assert sum(not reads for reads in graph.inputs) == 1
        assert sum(not users for users in graph.users) == 1
    twin = layered(nodes, width, seed=0)
    assert twin.inputs == graphs[0].inputs
    assert twin.sizes.tolist() == graphs[0].sizes.tolist()


def test_training_graphs_turn_in_the_middle() -> None:
    problem = training(6, 4, seed=1)
    assert len(problem) == 48
    assert problem.turn == 24
    assert problem.repeatable.tolist() == [True] * 24 + [False] * 24
    live = replay(problem, problem.first_runs).live_bytes
    assert 20 <= int(live.argmax()) <= 28
    assert problem.inputs == training(6, 4, seed=1).inputs


@pytest.mark.slow
@pytest.mark.skipif(graph_folder() is None, reason="REMAT_GRAPHS is unset")
@pytest.mark.skipif(not is_compilable(), reason="numba is not installed")
@pytest.mark.parametrize(
    ("name", "ratio", "extra"),
    [
        ("vgg16", 0.9, 305), ("vgg19", 0.9, 9895), ("vgg19", 0.8, 261625), ("unet", 0.9, 350),
        ("unet", 0.7, 920), ("unet", 0.5, 2160), ("random_layered_100", 0.8, 1097),
    ],
)  # fmt: skip
def test_the_optimum_of_published_graphs(name: str, ratio: float, extra: float) -> None:
    problem = published(name)
    budget = math.ceil(ratio * peak_of_order(problem))
    found = search(problem, budget, proposals=1_000_000)
    check_result(problem, budget, found)
    assert found.feasible
    assert found.extra_cost == extra
