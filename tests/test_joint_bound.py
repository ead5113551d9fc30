"""Bounds from several moments, and the smaller problems behind them: never above brute force."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

from remat.policies.exact.any_order import build_any
from remat.policies.exact.cut import cut_bound
from remat.policies.exact.highs import run_mip
from remat.policies.exact.joint_bound import joint_bound
from remat.policies.solvers.problem import Problem, peak_of_order, replay
from remat.policies.solvers.relaxed import relaxed
from tests.test_chains import chain_a, cheapest


def _random_problem(rng: random.Random) -> Problem:
    count = rng.randint(3, 7)
    turn = min(count, rng.choice([0, count // 2, count // 2 + 1, count // 2 + 2]))
    inputs: list[list[int]] = []
    for node in range(count):
        near = [node - 1] if node and rng.random() < 0.5 else []
        inputs.append([*near, *rng.sample(range(node), min(node, rng.choice([0, 1, 1, 2])))])
    early = [node < turn or turn == 0 for node in range(count)]
    return Problem.of(
        [rng.randint(0, 5) for _ in range(count)],
        [rng.randint(0, 5) for _ in range(count)],
        inputs,
        repeatable=[rng.random() < (0.9 if is_early else 0.1) for is_early in early],
        turn=turn,
        workspace=[rng.choice([0, 0, 2]) for _ in range(count)],
    )


def _least(problem: Problem, budget_bytes: int) -> float:
    found = cheapest(problem, budget_bytes) if len(problem) else 0.0
    return math.inf if found is None else found


def _budget(rng: random.Random, problem: Problem) -> int:
    return rng.randint(problem.floor_bytes, max(problem.floor_bytes, peak_of_order(problem) - 1))


@laws(120)
@given(st.integers(0, 2**32))
def test_the_smaller_problem_is_a_relaxation(seed: int) -> None:
    rng = random.Random(seed)
    problem = _random_problem(rng)
    budget = _budget(rng, problem)
    small = relaxed(problem, small_bytes=rng.choice([0, 1, 2]), cheap_cost=rng.choice([0, 1, 2]))
    assert list(small.nodes) == sorted(set(small.nodes))
    assert _least(small.problem, budget) <= _least(problem, budget) + 1e-9


@laws(80)
@given(st.integers(0, 2**32))
def test_the_program_is_below_every_sequence(seed: int) -> None:
    rng = random.Random(seed)
    problem = _random_problem(rng)
    budget = _budget(rng, problem)
    ends = [node for node in range(len(problem)) if rng.random() < 0.6]
    model = build_any(problem, budget, ends)
    if problem.turn == len(problem):
        return
    outcome = run_mip(model.rows)
    bound = math.inf if outcome.infeasible else outcome.bound * model.unit
    assert bound <= _least(problem, budget) + 1e-5


@laws(60)
@given(st.integers(0, 2**32))
def test_the_joint_bound_is_below_every_sequence(seed: int) -> None:
    rng = random.Random(seed)
    problem = _random_problem(rng)
    budget = _budget(rng, problem)
    share = rng.choice([0.0, 0.1, 0.3])
    found = joint_bound(problem, budget, seconds=5, small_share=share, cheap_share=share)
    assert found.bound <= _least(problem, budget) + 1e-5


def _pairs() -> Problem:
    """Two layers of a convolution and its activation, with equal sizes, and their gradients."""
    return Problem.of(
        [9, 1, 9, 1, 2, 2, 2, 2],
        [4, 4, 4, 4, 1, 4, 4, 4],
        [[], [0], [1], [2], [3], [3, 4], [1, 5], [6]],
        repeatable=[True] * 4 + [False] * 4,
        turn=4,
    )


def test_a_pair_becomes_one_node_and_a_moment() -> None:
    problem = _pairs()
    small = relaxed(problem, small_bytes=0, cheap_cost=0.0).problem
    assert small.inputs[:4] == ((), (0,), (0,), (2,))
    assert small.costs.tolist()[:4] == [10, 0, 10, 0]
    assert small.sizes.tolist()[:4] == [4, 0, 4, 0]
    assert small.repeatable.tolist()[:4] == [True, False, True, False]
    # At the moment of the activation both results are alive, as in the given problem.
    live = replay(problem, problem.first_runs).live_bytes
    assert replay(small, small.first_runs).live_bytes.tolist() == live.tolist()


def test_small_results_and_cheap_sources_are_left_out() -> None:
    problem = Problem.of(
        [1, 5, 9, 9, 1],
        [8, 1, 8, 8, 8],
        [[], [], [0, 1], [1, 2], [0, 3]],
        repeatable=[True, True, True, False, False],
        turn=3,
    )
    small = relaxed(problem, small_bytes=1, cheap_cost=1.0)
    assert small.nodes == (2, 3, 4)
    assert small.problem.inputs == ((), (0,), (1,))
    assert small.problem.extra_while_running.tolist() == [8, 0, 8]


@pytest.mark.parametrize("budget", [3, 4, 5])
def test_several_moments_prove_more_than_windows(budget: int) -> None:
    chain = chain_a(5)
    best = _least(chain, budget)
    found = joint_bound(chain, budget, seconds=30, small_share=0.0, cheap_share=0.0)
    assert cut_bound(chain, budget).bound <= found.bound <= best + 1e-5


def test_an_impossible_budget_is_proven() -> None:
    chain = chain_a(4)
    assert joint_bound(chain, 2, seconds=30).bound == math.inf


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds=-1"):
        joint_bound(chain_a(3), 3, seconds=-1)
