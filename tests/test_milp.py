"""The exact planners against brute force, closed formulas and published graphs."""

from __future__ import annotations

import gc
import heapq
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_checkmate import solve_checkmate
from random_graphs import laws
from reference_chains import chain_a, chain_a_extra, chain_b, chain_b_extra, forward_steps

import remat.policies.exact.milp as milp
from remat.policies.exact.checkmate_model import build_checkmate, round_lp
from remat.policies.exact.cut import cut_bound, once_each
from remat.policies.exact.highs import run_lp, run_mip
from remat.policies.exact.milp import Solved, solve_restricted
from remat.policies.exact.rows import INF, Rows, size_scale
from remat.policies.exact.staged_model import build_staged
from remat.policies.exact.stages import plan_stages, relax_stages
from remat.policies.solvers.problem import Problem, peak_of_order, replay

State = tuple[int, int, frozenset[int]]  # stage, first position left in it, live values

# -- an independent solver -------------------------------------------------------------------


def cheapest_staged(problem: Problem, budget_bytes: int) -> list[int] | None:
    """Exhaustive search (Dijkstra over stage, position and live set) of the structure the programs search.

    Before node `t` first runs, repeatable nodes below `t` run again, ascending, each at most once, if `t >= turn`.
    After every computation any values may be forgotten.
    """
    sizes, work = problem.sizes.tolist(), problem.extra_while_running.tolist()
    count = len(problem)
    origin: State = (0, 0, frozenset())
    cheapest: dict[State, float] = {origin: 0.0}
    came: dict[State, tuple[State, int]] = {}
    heap: list[tuple[float, int, State]] = [(0.0, 0, origin)]
    pushed = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        stage, position, alive = state
        if cost > cheapest[state]:
            continue
        if stage == count:
            order: list[int] = []
            while state in came:
                state, node = came[state]
                order.append(node)
            return order[::-1]
        for node in range(position, stage + 1):
            again = node < stage
            if again and (not problem.repeatable[node] or stage < problem.turn or node in alive):
                continue
            if not alive.issuperset(problem.inputs[node]):
                continue
            if sum(sizes[v] for v in alive) + sizes[node] + work[node] > budget_bytes:
                continue
            place, after = (stage, node + 1) if again else (stage + 1, 0)
            price = cost + (float(problem.costs[node]) if again else 0.0)
            full = sorted(alive | {node})
            for many in range(len(full) + 1):
                for chosen in combinations(full, many):
                    reached: State = (place, after, frozenset(chosen))
                    if price < cheapest.get(reached, math.inf):
                        cheapest[reached] = price
                        came[reached] = (state, node)
                        pushed += 1
                        heapq.heappush(heap, (price, pushed, reached))
    return None


def staged_extra(problem: Problem, budget_bytes: int) -> float:
    sequence = cheapest_staged(problem, budget_bytes)
    if sequence is None:
        return math.inf
    replayed = replay(problem, sequence)
    assert replayed.peak_bytes <= budget_bytes
    return replayed.extra_cost


@st.composite
def small_problems(draw: st.DrawFn, most: int = 7) -> Problem:
    """Any structure: free order of repetitions or a turn, nodes that must not repeat, workspace."""
    count = draw(st.integers(2, most))
    numbers = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    inputs = [
        sorted(draw(st.sets(st.integers(0, node - 1), max_size=min(node, 3)))) if node else []
        for node in range(count)
    ]
    return Problem.of(
        draw(numbers),
        draw(numbers),
        inputs,
        repeatable=draw(st.lists(st.booleans(), min_size=count, max_size=count))
        if draw(st.booleans())
        else None,
        turn=draw(st.sampled_from([0, 0, count // 2, count])),
        workspace=draw(numbers) if draw(st.booleans()) else None,
    )


def training(layers: int, width: int, seed: int) -> Problem:
    """A random layered forward pass and the backward pass that reads it."""
    rng = random.Random(seed)
    forward = layers * width
    inputs: list[list[int]] = []
    users: list[list[int]] = [[] for _ in range(forward)]
    for node in range(forward):
        near = range(max(0, node - 2 * width), node)
        reads = sorted(rng.sample(near, min(len(near), rng.randint(1, 3))))
        inputs.append(reads)
        for read in reads:
            users[read].append(node)
    for node in range(forward - 1, -1, -1):
        gradients = {2 * forward - 1 - user for user in users[node]}
        inputs.append(sorted({*inputs[node], node, *gradients}))
    count = 2 * forward
    return Problem.of(
        [rng.randint(1, 100) for _ in range(count)],
        [rng.randint(1, 1000) * 1024 for _ in range(count)],
        inputs,
        repeatable=[node < forward for node in range(count)],
        turn=forward,
    )


def check(problem: Problem, budget_bytes: int, solved: Solved) -> None:
    """What every result promises, judged by the referee."""
    if solved.sequence is None:
        assert solved.status in ("infeasible", "unknown")
        assert solved.extra_cost == solved.gap == math.inf
        assert (solved.bound == math.inf) == (solved.status == "infeasible")
        return
    replayed = replay(problem, solved.sequence)
    assert solved.status in ("optimal", "feasible")
    assert replayed.peak_bytes == solved.peak_bytes <= budget_bytes
    assert (replayed.cost, replayed.extra_cost) == (solved.cost, solved.extra_cost)
    assert 0 <= solved.bound <= solved.extra_cost
    if solved.status == "optimal" and solved.gap == 0:
        assert solved.bound == pytest.approx(solved.extra_cost)


def budgets(problem: Problem) -> st.SearchStrategy[int]:
    peak = peak_of_order(problem)
    return st.integers(min(problem.floor_bytes, peak), peak)


# -- small graphs: equal to brute force --------------------------------------------------------


@laws(60)
@given(st.data())
def test_optimum_equals_brute_force(data: st.DataObject) -> None:
    problem = data.draw(small_problems())
    budget = data.draw(budgets(problem))
    expected = staged_extra(problem, budget)
    for solved in (solve_restricted(problem, budget), solve_checkmate(problem, budget)):
        check(problem, budget, solved)
        assert solved.extra_cost == expected
        assert solved.status == ("optimal" if math.isfinite(expected) else "infeasible")


@laws(60)
@given(st.data())
def test_refinement_equals_brute_force(data: st.DataObject) -> None:
    """The relaxations, which small graphs would skip."""
    problem = data.draw(small_problems())
    budget = data.draw(budgets(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(milp, "_WHOLE_BELOW", 0)
        solved = solve_restricted(problem, budget)
    check(problem, budget, solved)
    assert solved.extra_cost == staged_extra(problem, budget)


@laws(60)
@given(st.data())
def test_bounds_never_exceed_the_optimum(data: st.DataObject) -> None:
    problem = data.draw(small_problems())
    budget = data.draw(budgets(problem))
    optimum = staged_extra(problem, budget)
    everywhere = range(len(problem))
    for cut in (cut_bound(problem, budget), cut_bound(problem, budget, positions=everywhere)):
        assert cut.bound <= optimum + 1e-9
        if math.isfinite(optimum):
            assert cut.smallest_bytes <= budget
        for chosen in cut.found:
            replayed = replay(problem, once_each(problem, chosen))
            assert replayed.extra_cost <= chosen.recompute_cost + 1e-9
    rounded = round_lp(problem, budget)
    check(problem, budget, rounded)
    assert rounded.extra_cost >= optimum
    assert rounded.bound <= optimum + 1e-9


@laws(40)
@given(st.data())
def test_relaxations_stay_below_the_optimum(data: st.DataObject) -> None:
    problem = data.draw(small_problems())
    budget = data.draw(budgets(problem))
    nodes = st.sets(st.integers(0, len(problem) - 1))
    base = plan_stages(problem, budget)
    stages = relax_stages(base, data.draw(nodes), data.draw(nodes))
    model = build_staged(problem, budget, stages=stages)
    optimum = staged_extra(problem, budget)
    if model.impossible is not None:
        assert optimum == math.inf
        return
    outcome = run_mip(model.rows)
    assert outcome.bound * model.unit <= optimum + 1e-6


@laws(30)
@given(st.data())
def test_a_start_is_a_feasible_point_of_the_program(data: st.DataObject) -> None:
    """Assignments are complete and exact: fixing every column to them is feasible at the same cost."""
    problem = data.draw(small_problems())
    budget = data.draw(budgets(problem))
    sequence = cheapest_staged(problem, budget)
    if sequence is None:
        return
    model = build_staged(problem, budget)
    values = model.assignment(sequence)
    assert rows_broken(model.rows, values) == []
    cost = float(np.dot(model.rows.costs, values)) * model.unit
    assert cost <= replay(problem, sequence).extra_cost + 1e-9


def rows_broken(rows: Rows, values: np.ndarray) -> list[int]:
    found = [
        c
        for c, value in enumerate(values)
        if not rows.lower[c] - 1e-7 <= value <= rows.upper[c] + 1e-7
    ]
    for r in range(rows.num_rows):
        inside = range(rows.starts[r], rows.starts[r + 1])
        total = sum(rows.values[e] * values[rows.indices[e]] for e in inside)
        if not rows.row_lower[r] - 1e-7 <= total <= rows.row_upper[r] + 1e-7:
            found.append(r)
    return found


# -- chains: equal to closed formulas ------------------------------------------------------------


def test_the_formula_gives_the_published_numbers() -> None:
    published = {(10, 3): 15, (56, 5): 140, (100, 3): 490, (100, 5): 316, (100, 10): 222}
    published |= {(1000, 10): 3636}
    assert {key: forward_steps(*key) for key in published} == published
    assert [chain_a_extra(8, b) for b in range(3, 11)] == [28, 9, 5, 4, 3, 2, 1, 0]
    assert [chain_b_extra(8, b) for b in range(3, 9)] == [15, 5, 3, 2, 1, 0]


@pytest.mark.parametrize("budget", range(3, 11))
def test_chain_a(budget: int) -> None:
    problem = chain_a(8)
    assert peak_of_order(problem) == 10
    solved = solve_restricted(problem, budget)
    check(problem, budget, solved)
    assert (solved.status, solved.extra_cost) == ("optimal", chain_a_extra(8, budget))


@pytest.mark.parametrize("budget", range(3, 9))
def test_chain_b(budget: int) -> None:
    problem = chain_b(8)
    assert peak_of_order(problem) == 8
    solved = solve_restricted(problem, budget)
    check(problem, budget, solved)
    assert (solved.status, solved.extra_cost) == ("optimal", chain_b_extra(8, budget))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("length", "budget"), [(32, 3), (32, 16), (32, 20), (100, 32), (100, 52)])
def test_long_chains(length: int, budget: int) -> None:
    solved = solve_restricted(chain_a(length), budget, seconds=60)
    assert (solved.status, solved.extra_cost) == ("optimal", chain_a_extra(length, budget))


def test_three_values_are_the_least() -> None:
    assert solve_restricted(chain_a(6), 2).status == "infeasible"
    assert solve_checkmate(chain_a(6), 2).status == "infeasible"
    assert solve_restricted(chain_a(6), 3).status == "optimal"


def test_repetitions_before_the_turn_do_not_help_a_chain() -> None:
    """The published program, repetitions anywhere and of any node, has the same optimum."""
    limited = chain_a(5)
    free = Problem.of([1] * 11, [1] * 11, limited.inputs)
    for budget in (3, 4, 5):
        solved = solve_checkmate(free, budget, seconds=60)
        assert (solved.status, solved.extra_cost) == ("optimal", chain_a_extra(5, budget))


def test_freed_must_imply_computed_here() -> None:
    """A public re-implementation lets values be freed at nodes that do not run: 2 repetitions instead of 6."""
    problem = chain_a(4)
    assert solve_checkmate(problem, 3).extra_cost == 6
    assert solve_restricted(problem, 3).extra_cost == 6
    model = build_checkmate(problem, 3)
    runs, frees = set(model.run.values()), set(model.free.values())
    broken = 0
    rows = model.rows
    for row in range(rows.num_rows):
        columns = rows.indices[rows.starts[row] : rows.starts[row + 1]]
        if len(columns) == 2 and columns[0] in runs and columns[1] in frees:
            rows.row_lower[row] = -INF
            broken += 1
    assert broken == len(frees)
    assert run_mip(rows).objective == pytest.approx(2)


# -- results, limits, interruption ----------------------------------------------------------------


def test_nothing_to_do() -> None:
    problem = chain_a(4)
    solved = solve_restricted(problem, 6)
    assert solved.sequence == tuple(range(9))
    assert (solved.status, solved.extra_cost, solved.bound, solved.gap) == ("optimal", 0, 0, 0)
    empty = Problem.of([], [], [])
    assert solve_restricted(empty, 0).sequence == ()


def test_no_time_is_said() -> None:
    solved = solve_restricted(chain_a(32), 5, seconds=0)
    assert (solved.status, solved.sequence, solved.gap) == ("unknown", None, math.inf)
    solved = solve_checkmate(chain_a(12), 5, seconds=0)
    assert solved.status == "unknown"


def test_time_limit_keeps_the_best() -> None:
    began = time.perf_counter()
    solved = solve_restricted(chain_a(32), 5, seconds=3)
    assert time.perf_counter() - began < 30
    check(chain_a(32), 5, solved)
    assert solved.status in ("feasible", "unknown")
    assert 0 < solved.bound <= chain_a_extra(32, 5) == 65


def test_stop_keeps_the_best() -> None:
    problem = chain_a(32)
    best = solve_restricted(problem, 3).sequence
    assert best is not None
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > 3

    solved = solve_restricted(problem, 6, start=best, stop=stop)
    check(problem, 6, solved)
    assert solved.interrupted
    assert solved.status == "feasible"
    assert 46 <= solved.extra_cost <= chain_a_extra(32, 3)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("delay_seconds", [0.01, 1.5])
def test_keyboard_interrupt_keeps_the_best(delay_seconds: float) -> None:
    """Ctrl-C between runs of the solver, and while it runs."""
    problem = chain_a(32)
    before = signal.getsignal(signal.SIGINT)
    best = solve_restricted(problem, 3).sequence
    reports: list[tuple[float, float, float]] = []
    timer: list[threading.Timer] = []

    def progress(cost: float, bound: float, seconds: float) -> None:
        reports.append((cost, bound, seconds))
        if not timer:
            timer.append(threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGINT)))
            timer[0].start()

    solved = solve_restricted(problem, 5, start=best, seconds=60, progress=progress)
    timer[0].join()
    assert signal.getsignal(signal.SIGINT) is before
    check(problem, 5, solved)
    assert solved.interrupted
    assert reports
    assert all(bound <= cost for cost, bound, _ in reports)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_keyboard_interrupt_in_a_finaliser_is_not_lost() -> None:
    """Python ignores exceptions of garbage collection's callbacks, KeyboardInterrupt too, and jax has one."""
    problem = chain_a(32)
    best = solve_restricted(problem, 3).sequence
    pressed: list[str] = []

    def collected(phase: str, _info: object) -> None:
        if not pressed:
            pressed.append(phase)
            signal.raise_signal(signal.SIGINT)

    def progress(cost: float, bound: float, seconds: float) -> None:
        if collected not in gc.callbacks:
            gc.callbacks.append(collected)
            gc.collect()

    try:
        solved = solve_restricted(problem, 5, start=best, seconds=60, progress=progress)
    finally:
        gc.callbacks.remove(collected)
    assert pressed
    check(problem, 5, solved)
    assert solved.interrupted
    assert solved.solve_seconds < 30


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    """As in a shell's background; what is solved goes on."""
    problem = chain_a(8)
    best = solve_restricted(problem, 5).sequence
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def progress(cost: float, bound: float, seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)

    try:
        solved = solve_restricted(problem, 5, start=best, progress=progress)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert not solved.interrupted
    assert solved.status == "optimal"


def test_errors_of_callbacks_come_out() -> None:
    def stop() -> bool:
        raise RuntimeError("from the caller")

    with pytest.raises(RuntimeError, match="from the caller"):
        solve_checkmate(chain_a(10), 4, stop=stop)


def test_a_start_is_used_and_judged() -> None:
    problem = chain_a(8)
    best = solve_restricted(problem, 5).sequence
    assert best is not None
    solved = solve_restricted(problem, 5, start=best, seconds=0)
    assert (solved.status, solved.extra_cost) == ("feasible", 5)
    with pytest.raises(ValueError, match="never runs"):
        solve_restricted(problem, 5, start=[0])
    with pytest.raises(ValueError, match="seconds=-1"):
        solve_restricted(problem, 5, seconds=-1)


def test_a_gap_ends_the_search() -> None:
    problem = training(8, 3, seed=0)
    budget = int(0.7 * peak_of_order(problem))
    exact = solve_restricted(problem, budget, seconds=30)
    rough = solve_restricted(problem, budget, gap=0.5, seconds=30)
    check(problem, budget, exact)
    check(problem, budget, rough)
    assert exact.status == rough.status == "optimal"
    assert rough.gap <= 0.5
    assert rough.bound <= exact.extra_cost <= rough.extra_cost


def test_a_gap_does_not_end_the_search_before_anything_is_found() -> None:
    problem = training(
        6, 3, seed=1
    )  # neither no repetition nor a cut's sequence is within the budget
    budget = int(0.75 * peak_of_order(problem))
    solved = solve_restricted(problem, budget, gap=0.05)
    check(problem, budget, solved)
    assert solved.status == "optimal" and solved.gap <= 0.05


def test_costs_in_seconds() -> None:
    """Costs that are no integers: the same optimum up to the solver's tolerance."""
    whole = training(4, 2, seed=3)
    budget = int(0.7 * peak_of_order(whole))
    scaled = Problem(
        costs=whole.costs * 1.2345e-6,
        sizes=whole.sizes,
        inputs=whole.inputs,
        repeatable=whole.repeatable,
        turn=whole.turn,
    )
    solved = solve_restricted(scaled, budget, seconds=30)
    check(scaled, budget, solved)
    expected = solve_restricted(whole, budget, seconds=30).extra_cost * 1.2345e-6
    assert solved.extra_cost == pytest.approx(expected, rel=1e-5)


def test_cuts_and_relaxation_agree_on_training_graphs() -> None:
    for seed, ratio in ((0, 0.8), (2, 0.7)):
        problem = training(8, 3, seed)
        budget = int(ratio * peak_of_order(problem))
        cut = cut_bound(problem, budget)
        exact = solve_restricted(problem, budget, seconds=30)
        assert exact.status == "optimal"
        assert 0 < cut.bound <= exact.extra_cost
        model = build_staged(problem, budget)
        assert 0 < run_lp(model.rows).bound * model.unit <= exact.extra_cost


def test_windows_add_up() -> None:
    """A chain at three values recomputes everything again and again; one window sees each node once."""
    problem = chain_a(16)
    whole = cut_bound(problem, 3, positions=range(17, 33)).bound
    single = max(cut_bound(problem, 3, positions=[p]).bound for p in range(17, 33))
    assert single <= 16
    assert whole > 3 * single
    assert whole <= chain_a_extra(16, 3) + 1e-9


def test_cut_proves_a_budget_too_small() -> None:
    problem = training(8, 3, seed=0)
    cut = cut_bound(problem, problem.floor_bytes - 1)
    assert cut.bound == math.inf
    assert cut.smallest_bytes >= problem.floor_bytes
    with pytest.raises(ValueError, match="99"):
        cut_bound(chain_a(4), 3, positions=[99])


def test_twenty_thousand_nodes() -> None:
    problem = training(1000, 10, seed=0)
    assert len(problem) == 20000
    peak = peak_of_order(problem)
    began = time.perf_counter()
    cut = cut_bound(problem, peak // 2, positions=[problem.turn])
    assert time.perf_counter() - began < 60
    assert cut.bound > 0
    cheapest_within = min(s.recompute_cost for s in cut.found if s.live_bytes <= peak // 2)
    assert cut.bound <= cheapest_within < 1.01 * cut.bound


def test_stopped_relaxations_are_bounds() -> None:
    problem = training(12, 3, seed=2)
    budget = int(0.5 * peak_of_order(problem))
    rows = build_staged(problem, budget).rows
    full = run_lp(rows)
    for seconds in (0.0, 0.02, 0.1):
        assert run_lp(rows, seconds=seconds).bound <= full.bound * (1 + 1e-6)


@given(st.integers(0, 2**32 - 1))
@laws(30)
def test_any_duals_bound_the_relaxation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = Rows()
    columns = [rows.column(0, float(rng.integers(1, 4)), float(rng.normal())) for _ in range(6)]
    for _ in range(5):
        terms = [(c, float(rng.integers(-3, 4))) for c in columns]
        rows.row(terms, *((0.0, INF), (-INF, 2.0), (-1.0, 1.0))[int(rng.integers(3))])
    outcome = run_lp(rows)
    assert outcome.values is not None
    optimum = float(np.dot(rows.costs, outcome.values))
    assert outcome.bound == pytest.approx(optimum, abs=1e-6)
    assert rows.dual_bound(rng.normal(size=5)) <= optimum + 1e-9


@pytest.mark.parametrize("budget", [7, 10**6, 2**40 + 1])
def test_scaling_keeps_the_last_byte(budget: int) -> None:
    scale, limit = size_scale(np.asarray([1, 4, 10]), budget)
    assert limit == 100.0
    assert budget * scale < limit < (budget + 1) * scale


# -- published graphs --------------------------------------------------------------------------------

GRAPHS = os.environ.get("REMAT_GRAPHS")
published = pytest.mark.skipif(GRAPHS is None, reason="REMAT_GRAPHS names no folder of graphs")


def load(name: str) -> Problem:
    """Reads a public benchmark graph (networkx node-link JSON)."""
    data = json.loads((Path(GRAPHS or "") / f"{name}.json").read_text())
    nodes = data["nodes"]
    if "backward" not in nodes[0]:
        place = {node: index for index, node in enumerate(data["graph"]["order"])}
        by_name = {node["name"]: node for node in nodes}
        ordered = [by_name[node] for node in place]
        links = [(place[link["0"]], place[link["1"]]) for link in data["links"]]
        costs, sizes = ([n[key] for n in ordered] for key in ("duration", "out_cost"))
        return Problem.of(costs, sizes, _reads(len(nodes), links))
    links = [(link["source"], link["target"]) for link in data["links"]]
    backward = [node["backward"] for node in nodes]
    return Problem.of(
        [node["cost_cpu"] for node in nodes],
        [node["cost_ram"] for node in nodes],
        _reads(len(nodes), links),
        repeatable=[not b for b in backward],
        turn=backward.index(True),
    )


def _reads(count: int, links: list[tuple[int, int]]) -> list[list[int]]:
    reads: list[list[int]] = [[] for _ in range(count)]
    for source, target in sorted(links):
        reads[target].append(source)
    return reads


@published
@pytest.mark.parametrize(
    ("name", "ratio", "extra"),
    [
        ("vgg16", 0.9, 305),
        ("vgg16", 0.8, math.inf),
        ("vgg19", 0.9, 9895),
        ("vgg19", 0.8, 261625),
        ("vgg19", 0.7, math.inf),
        ("unet", 0.9, 350),
        ("unet", 0.8, 615),
        ("unet", 0.7, 920),
        ("unet", 0.6, 1380),
        ("unet", 0.5, 2160),
        ("resnet50", 0.8, 1130),
        ("random_layered_100", 0.8, 1097),
    ],
)
def test_published_optimum(name: str, ratio: float, extra: float) -> None:
    problem = load(name)
    budget = math.ceil(ratio * peak_of_order(problem))
    solved = solve_restricted(problem, budget, seconds=60)
    check(problem, budget, solved)
    assert solved.extra_cost == extra
    assert solved.status == ("optimal" if math.isfinite(extra) else "infeasible")


def test_the_solver_prints_nothing() -> None:
    """From C++, past `sys.stdout`: in front of a plan that is printed as JSON it would be no JSON."""
    code = """
from remat.policies.exact.highs import run_lp, run_mip
from remat.policies.exact.rows import Rows
rows = Rows()
rows.row([(rows.column(cost=-1.0, integral=True), 2.0)], upper=1.0)
assert run_mip(rows).objective == 0 and run_lp(rows).bound <= -0.4
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
