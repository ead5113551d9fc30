"""MONeT's joint program against brute force over selections and sequences, and against other programs."""

from __future__ import annotations

import heapq
import math
import random
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_checkmate import solve_checkmate
from random_graphs import laws
from test_choice import choice_problems
from test_milp import small_problems, training

from remat.policies.exact import monet_solve as _monet_solve
from remat.policies.exact.highs import run_mip
from remat.policies.exact.milp import solve_restricted
from remat.policies.exact.monet_model import build_monet
from remat.policies.exact.monet_solve import SolvedChoice, solve_monet
from remat.policies.solvers.choice import Choice, ChoiceProblem, replay_choices
from remat.policies.solvers.problem import Problem, peak_of_order

State = tuple[int, int, frozenset[int]]  # stage, first position left in it, live values
Found = tuple[float, tuple[int, ...], list[int]]

# -- an independent solver ----------------------------------------------------------------------


def cheapest_of(
    problem: ChoiceProblem, selection: tuple[int, ...], budget_bytes: int, in_place: bool
) -> Found | None:
    """Dijkstra over stage, position and live set; a stage per node, also of nodes that do not run."""
    count = len(problem)
    chosen = problem.chosen(selection)
    active = set(problem.active(selection))
    sizes = problem.sizes.tolist()
    origin: State = (0, 0, frozenset())
    cheapest: dict[State, float] = {origin: 0.0}
    came: dict[State, tuple[State, int | None]] = {}
    heap: list[tuple[float, int, State]] = [(0.0, 0, origin)]
    pushed = 0

    def reach(state: State, node: int | None, reached: State, cost: float) -> None:
        nonlocal pushed
        if cost < cheapest.get(reached, math.inf):
            cheapest[reached] = cost
            came[reached] = (state, node)
            pushed += 1
            heapq.heappush(heap, (cost, pushed, reached))

    while heap:
        cost, _, state = heapq.heappop(heap)
        stage, position, alive = state
        if cost > cheapest[state]:
            continue
        if stage == count:
            order: list[int] = []
            while state in came:
                state, node = came[state]
                order += [] if node is None else [node]
            return cost, selection, order[::-1]
        if stage not in active:
            reach(state, None, (stage + 1, 0, alive), cost)
        for node in sorted(active):
            if not position <= node <= stage:
                continue
            again = node < stage
            if again and (not problem.repeatable[node] or stage < problem.turn or node in alive):
                continue
            if not alive.issuperset(chosen[node].inputs):
                continue
            held = sum(sizes[v] for v in alive) + sizes[node] + chosen[node].workspace_bytes
            place, after = (stage, node + 1) if again else (stage + 1, 0)
            target = problem.in_place[node] if in_place else None
            full = sorted(alive | {node})
            for many in range(len(full) + 1):
                for kept in combinations(full, many):
                    over = target in chosen[node].inputs and target not in kept
                    if held - (sizes[node] if over else 0) <= budget_bytes:
                        reached = (place, after, frozenset(kept))
                        reach(state, node, reached, cost + chosen[node].cost)
    return None


def brute_force(problem: ChoiceProblem, budget_bytes: int, in_place: bool = False) -> float:
    """The cheapest cost over all selections and staged sequences, each plan judged by the referee."""
    best = math.inf
    for selection in product(*(range(len(choices)) for choices in problem.choices)):
        found = cheapest_of(problem, selection, budget_bytes, in_place)
        if found is not None:
            cost, _, order = found
            replayed = replay_choices(problem, selection, order, in_place=in_place)
            assert replayed.peak_bytes <= budget_bytes and replayed.cost == cost
            best = min(best, cost)
    return best


def peak(problem: ChoiceProblem) -> int:
    """Of the first choices without repetition."""
    first = [0] * len(problem)
    return replay_choices(problem, first, problem.active(first)).peak_bytes


def check(
    problem: ChoiceProblem, budget_bytes: int, solved: SolvedChoice, in_place: bool = False
) -> None:
    """What every result promises, judged by the referee."""
    if solved.selection is None or solved.sequence is None:
        assert solved.status in ("infeasible", "unknown")
        assert solved.cost == solved.gap == math.inf
        assert (solved.bound == math.inf) == (solved.status == "infeasible")
        return
    replayed = replay_choices(problem, solved.selection, solved.sequence, in_place=in_place)
    assert solved.status in ("optimal", "feasible")
    assert replayed.peak_bytes == solved.peak_bytes <= budget_bytes
    assert replayed.cost == solved.cost
    assert 0 <= solved.bound <= solved.cost
    assert (solved.status == "optimal") == (solved.bound == solved.cost)


@pytest.fixture(params=["whole", "refined"])
def size_limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are solved whole; `refined` puts them through the relaxations too."""
    if request.param == "refined":
        monkeypatch.setattr(_monet_solve, "_WHOLE_BELOW", 0)
        monkeypatch.setattr(_monet_solve, "_MERGED", 1.0)


# -- equal to brute force -----------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("size_limit")
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_the_optimum_equals_brute_force(in_place: bool, data: st.DataObject) -> None:
    problem = data.draw(choice_problems(most=5, several=2))
    budget = data.draw(st.integers(0, peak(problem)))
    expected = brute_force(problem, budget, in_place)
    solved = solve_monet(problem, budget, in_place=in_place)
    check(problem, budget, solved, in_place)
    assert solved.cost == expected
    assert solved.status == ("optimal" if math.isfinite(expected) else "infeasible")


@pytest.mark.parametrize("in_place", [False, True])
@laws(60)
@given(st.data())
def test_the_program_alone_equals_brute_force(in_place: bool, data: st.DataObject) -> None:
    """Without the starts that the solver tries first, and with its plan judged by the referee."""
    problem = data.draw(choice_problems(most=5, several=2))
    budget = data.draw(st.integers(0, peak(problem)))
    expected = brute_force(problem, budget, in_place)
    model = build_monet(problem, budget, in_place=in_place)
    if model.impossible is not None:
        assert expected == math.inf
        return
    outcome = run_mip(model.rows)
    assert outcome.infeasible == (expected == math.inf)
    if outcome.values is not None:
        assert outcome.objective * model.unit == pytest.approx(expected)
        replayed = replay_choices(problem, *model.selected(outcome.values), in_place=in_place)
        assert replayed.cost == pytest.approx(expected) and replayed.peak_bytes <= budget


@pytest.mark.parametrize("in_place", [False, True])
@laws(40)
@given(st.data())
def test_a_start_is_a_feasible_point_of_the_program(in_place: bool, data: st.DataObject) -> None:
    """Assignments are complete and exact: fixing every column to them is feasible at the same cost."""
    problem = data.draw(choice_problems(most=5, several=2))
    budget = data.draw(st.integers(0, peak(problem)))
    ways = [range(len(choices)) for choices in problem.choices]
    selection = data.draw(st.tuples(*map(st.sampled_from, ways)))
    found = cheapest_of(problem, selection, budget, in_place)
    if found is None:
        return
    model = build_monet(problem, budget, in_place=in_place)
    values = model.assignment(selection, found[2])
    rows = model.rows
    assert np.all(values >= np.asarray(rows.lower) - 1e-9)
    assert np.all(values <= np.asarray(rows.upper) + 1e-9)
    for row, (low, high) in enumerate(zip(rows.row_lower, rows.row_upper, strict=True)):
        span = slice(rows.starts[row], rows.starts[row + 1])
        level = float(np.dot(values[rows.indices[span]], rows.values[span]))
        assert low - 1e-6 <= level <= high + 1e-6
    assert float(np.dot(rows.costs, values)) * model.unit == pytest.approx(found[0])


# -- a single choice ----------------------------------------------------------------------------


@laws(60)
@given(st.data())
def test_one_choice_per_node_has_the_optimum_of_the_other_programs(data: st.DataObject) -> None:
    problem = data.draw(small_problems(most=6))
    budget = data.draw(st.integers(0, peak_of_order(problem)))
    ours = solve_monet(ChoiceProblem.only(problem), budget)
    check(ChoiceProblem.only(problem), budget, ours)
    for solved in (solve_restricted(problem, budget), solve_checkmate(problem, budget)):
        assert solved.status == ours.status
        assert solved.cost == ours.cost


def least_bytes(problem: Problem) -> int:
    """The smallest peak of staged sequences, by bisection."""
    low, high = problem.floor_bytes, peak_of_order(problem)
    while low < high:
        middle = (low + high) // 2
        if solve_restricted(problem, middle).status == "infeasible":
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.parametrize("seed", range(3))
def test_one_choice_per_node_on_networks(seed: int) -> None:
    problem = training(4, 2, seed)
    least = least_bytes(problem)
    choices = ChoiceProblem.only(problem)
    model = build_monet(choices, least)
    outcome = run_mip(
        model.rows
    )  # the program alone: `solve_monet` starts from the other's optimum
    assert outcome.objective * model.unit == solve_restricted(problem, least).cost
    assert solve_monet(choices, least).status == "optimal"
    assert solve_monet(choices, least - 1024).status == "infeasible"


# -- what the joint choice is for ---------------------------------------------------------------


def relu_chain(layers: int, *, faster: bool = False) -> ChoiceProblem:
    """Layers of a heavy node and a ReLU, whose backward reads its input or its output.

    By its input the ReLU's backward keeps both values alive, by its output only one, which the next layer's
    backward reads anyway. `faster`: heavy nodes have a second implementation that costs less but has workspace.
    """
    choices: list[list[Choice]] = []
    for layer in range(layers):
        before = (2 * layer - 1,) if layer else ()
        ways = [Choice(10, before)]
        choices.append([*ways, Choice(6, before, 4)] if faster else ways)
        choices.append([Choice(1, (2 * layer,))])
    turn = len(choices)
    choices.append([Choice(1, (turn - 1,))])  # the gradient of the last value
    for layer in range(layers - 1, -1, -1):
        heavy, relu, gradient = 2 * layer, 2 * layer + 1, len(choices) - 1
        choices.append([Choice(1, (heavy, gradient)), Choice(1, (relu, gradient))])
        choices.append([Choice(20, (relu - 2, gradient + 1) if layer else (gradient + 1,))])
    forward = [node < turn for node in range(len(choices))]
    return ChoiceProblem.of(
        [4] * len(choices),
        choices,
        turn=turn,
        repeatable=forward,
        in_place=[node - 1 if node < turn and node % 2 else None for node in range(len(choices))],
    )


def test_only_the_joint_choice_fits() -> None:
    """At 25 bytes: neither the input's schedule, nor the mask without a repetition, only the mask with one."""
    problem = ChoiceProblem.of(
        [8, 1, 8, 8, 8, 8, 1, 1, 1, 1],
        [
            [Choice(10, ())],
            [Choice(1, (0,))],  # the mask of 0, for the second choice of the last node
            [Choice(10, (0,))],
            [Choice(3, (2,))],
            [Choice(10, (3,))],
            [Choice(10, (4,))],
            [Choice(10, (5,))],
            [Choice(10, (3, 6))],
            [Choice(10, (2, 7))],
            [Choice(10, (0, 8)), Choice(10, (1, 8))],
        ],
        turn=6,
        repeatable=[False, False, False, True, True, True, *[False] * 4],
        required=[node != 1 for node in range(10)],
    )
    by_input, by_mask = [0] * 10, [*[0] * 9, 1]
    assert least_bytes(problem.select(by_input)[0]) == 32
    assert replay_choices(problem, by_mask, range(10)).peak_bytes == 33
    solved = solve_monet(problem, 25)
    check(problem, 25, solved)
    assert solved.selection == tuple(by_mask)
    assert solved.sequence == (0, 1, 2, 3, 4, 5, 6, 3, 7, 8, 9)
    assert (solved.status, solved.cost) == ("optimal", 87)
    assert solve_monet(problem, 24).status == "infeasible"
    free = solve_monet(problem, 40)
    assert (free.selection, free.cost, free.sequence) == (
        tuple(by_input),
        83,
        (0, 2, 3, 4, 5, 6, 7, 8, 9),
    )


def test_the_implementation_saves_what_recomputation_would_cost() -> None:
    """Without choices the budget costs repetitions; by outputs every layer keeps one value and repeats none."""
    problem = relu_chain(4)
    outputs = tuple(min(1, len(choices) - 1) for choices in problem.choices)
    budget = replay_choices(problem, outputs, problem.active(outputs)).peak_bytes
    assert budget == 24 < peak(problem)
    first, _ = problem.select([0] * len(problem))
    alone = solve_restricted(first, budget)
    assert alone.extra_cost > 0
    solved = solve_monet(problem, budget)
    assert (solved.status, solved.cost) == ("optimal", first.total_cost)
    assert solved.sequence == tuple(range(len(problem)))


def test_a_plan_can_be_cheaper_than_no_remat() -> None:
    """Faster implementations need workspace; what recomputation frees pays for it: negative overhead."""
    problem = relu_chain(4, faster=True)
    first = [0] * len(problem)
    baseline = replay_choices(problem, first, problem.active(first))
    assert (baseline.peak_bytes, baseline.cost) == (36, 129)
    solved = solve_monet(problem, 32)
    check(problem, 32, solved)
    assert (solved.status, solved.cost) == ("optimal", 129 - 4 * 4)
    # With less memory it recomputes, and is still faster than the first choices without recomputation.
    tight = solve_monet(problem, 20)
    check(problem, 20, tight)
    assert tight.sequence is not None and len(tight.sequence) == len(problem) + 2
    assert (tight.status, tight.cost) == ("optimal", 129 - 4 * 4 + 6 + 1)


def test_in_place_fits_where_nothing_else_does() -> None:
    """relu over its input, which is possible only if the backward reads the output."""
    problem = ChoiceProblem.of(
        [8, 8, 1, 1],
        [
            [Choice(1, ())],
            [Choice(1, (0,))],
            [Choice(1, (1,))],
            [Choice(1, (0, 2)), Choice(2, (1, 2))],
        ],
        turn=2,
        repeatable=[False] * 4,
        in_place=[None, 0, None, None],
    )
    assert solve_monet(problem, 15).status == "infeasible"
    assert solve_monet(problem, 9, in_place=True).status == "infeasible"
    over = solve_monet(problem, 10, in_place=True)
    check(problem, 10, over, in_place=True)
    assert (over.selection, over.cost) == ((0, 0, 0, 1), 5)


def test_a_plan_that_appendix_b_misses_is_found() -> None:
    """While 1 runs again before 5, its bound counts 0 as well, because 2 could run again and would read it."""
    problem = ChoiceProblem.of(
        [8, 4, 2, 8, 2, 2],
        [
            [Choice(1, ())],
            [Choice(1, ())],
            [Choice(1, (0,))],
            [Choice(1, (2,))],
            [Choice(1, (3,))],
            [Choice(1, (1, 2, 4))],
        ],
        turn=4,
        repeatable=[True, True, True, True, False, False],
    )
    exact = solve_monet(problem, 12)
    check(problem, 12, exact)
    assert (exact.status, exact.sequence) == ("optimal", (0, 1, 2, 3, 4, 1, 5))


# -- the solver's manners -----------------------------------------------------------------------


def test_a_start_of_any_structure_is_used() -> None:
    problem = relu_chain(3)
    solved = solve_monet(problem, 16)
    assert solved.selection is not None and solved.sequence is not None
    start = (solved.selection, solved.sequence)
    again = solve_monet(problem, 16, start=start)
    assert again.status == "optimal" and again.cost == solved.cost
    at_once = solve_monet(problem, 16, start=start, seconds=0)
    check(problem, 16, at_once)
    assert at_once.cost == solved.cost and at_once.columns == 0
    with pytest.raises(ValueError, match="never runs"):
        solve_monet(problem, 16, start=(solved.selection, [0]))


def test_a_start_outside_of_the_structure_is_returned_with_a_bound_on_all_plans() -> None:
    """Node 0 runs twice in one stage, which no staged plan does: at 8 bytes nothing else fits."""
    problem = ChoiceProblem.of(
        [4, 4, 1, 7, 1, 1],
        [
            [Choice(1, ())],
            [Choice(1, (0,)), Choice(2, (0,))],
            [Choice(1, (1,))],
            [Choice(1, ())],
            [Choice(1, (3,))],
            [Choice(1, (0, 2))],
        ],
        turn=3,
        repeatable=[True, True, True, False, False, False],
    )
    sequence = (0, 1, 2, 3, 4, 0, 1, 2, 0, 5)
    assert replay_choices(problem, [0] * 6, sequence).peak_bytes == 8
    assert solve_monet(problem, 8).status == "infeasible"
    solved = solve_monet(problem, 8, start=([0] * 6, sequence))
    check(problem, 8, solved)
    assert (solved.status, solved.sequence, solved.cost) == ("feasible", sequence, 10)
    assert 6 < solved.bound < 10


def test_stop_and_progress() -> None:
    problem = relu_chain(4, faster=True)
    seen: list[tuple[float, float, float]] = []
    solved = solve_monet(problem, 20, progress=lambda *news: seen.append(news))
    assert solved.status == "optimal" and seen
    for cost, bound, _ in seen:
        assert cost >= solved.cost - 1e-6 and bound <= solved.cost + 1e-6
    stopped = solve_monet(problem, 20, stop=lambda: True)
    check(problem, 20, stopped)
    assert stopped.interrupted and stopped.status == "unknown" and stopped.columns == 0
    assert stopped.bound <= solved.cost


@pytest.mark.parametrize("wrong", [{"seconds": -1}, {"gap": -0.1}, {"seconds": math.nan}])
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        solve_monet(relu_chain(1), 100, **wrong)  # type: ignore[arg-type]


def test_the_program_is_smaller_than_the_published_one() -> None:
    """40 forward nodes with two ways each: VGG-16 has 11,234 variables, 21,918 constraints in the paper."""
    problem = relu_chain(20, faster=True)
    assert problem.turn == 40
    rows = build_monet(problem, 80).rows
    assert (rows.num_columns, sum(rows.integral), rows.num_rows) == (3001, 792, 4344)
    solved = solve_monet(problem, 100)
    check(problem, 100, solved)
    assert (solved.status, solved.cost) == ("optimal", 561)


def test_float_costs() -> None:
    """Costs in seconds: no common unit."""
    rng = random.Random(0)
    base = relu_chain(3, faster=True)
    choices = [
        [Choice(rng.random() * 1e-3, c.inputs, c.workspace_bytes) for c in ways]
        for ways in base.choices
    ]
    problem = ChoiceProblem.of(
        base.sizes.tolist(), choices, turn=base.turn, repeatable=base.repeatable.tolist()
    )
    expected = min(
        solve_restricted(problem.select(s)[0], 20).cost
        for s in product(*(range(len(ways)) for ways in problem.choices))
    )
    solved = solve_monet(problem, 20)
    check(problem, 20, solved)
    assert solved.cost == pytest.approx(expected, rel=1e-9)
    assert solved.status == "optimal"
