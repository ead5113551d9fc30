"""What planners claim of small problems, against exhaustive search: nothing is claimed that is not so.

A bound, `optimal`, `infeasible` and `exact` each hold for a class of sequences; `covers` names it. Both classes are
solved here by looking at everything: all sequences, and those that repeat in order, once per stage.
"""

from __future__ import annotations

import math
import random

import jax
import jax.numpy as jnp
import pytest
from brute_force import least_extra_cost, least_peak
from test_milp import cheapest_staged

import remat
from remat.policies.buffers.within import IN_STAGES
from remat.policies.exact.cut import cut_bound
from remat.policies.exact.milp import solve_restricted
from remat.policies.ilp import Ilp
from remat.policies.revolve import Revolve
from remat.policies.solvers.chain.find import chain_of
from remat.policies.solvers.chain.solve import solve_chain
from remat.policies.solvers.problem import Problem, peak_of_order, replay

# In the last stage node 2 runs before node 0: no sequence that repeats in order has this peak.
OUT_OF_ORDER = Problem.of(
    [1] * 5,
    [1, 3, 3, 1, 1],
    [[], [0], [1], [0, 1], [0, 2, 3]],
    repeatable=[True, True, True, False, False],
    turn=3,
)
# The backward pass does not read node 1; the cheapest sequence drops node 0 while 2 is made, and makes it again.
UNREAD = Problem.of(
    [1] * 4, [1, 2, 3, 1], [[], [0], [1], [0, 2]], repeatable=[True, True, True, False], turn=3
)
BATCHES = 7


def random_problem(seed: int) -> Problem:
    """4 to 6 nodes of small costs and sizes, every node but the first reads one or two before it."""
    rng = random.Random(seed)
    count = rng.randint(4, 6)
    turn = rng.randint(1, count - 1)
    inputs = [
        sorted(rng.sample(range(node), min(node, rng.randint(1, 2)))) for node in range(count)
    ]
    return Problem.of(
        [rng.randint(1, 4) for _ in range(count)],
        [rng.randint(1, 4) for _ in range(count)],
        inputs,
        repeatable=[node < turn and rng.random() < 0.9 for node in range(count)],
        turn=turn,
        workspace=[rng.choice((0, 0, 1)) for _ in range(count)],
    )


def staged_extra_cost(problem: Problem, budget_bytes: int) -> float:
    """The least extra cost of sequences that repeat in order, once per stage."""
    found = cheapest_staged(problem, budget_bytes)
    return math.inf if found is None else replay(problem, found).extra_cost


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_claim_is_false(batch: int) -> None:
    """280 problems at two budgets each, one below the peak without repetitions, one at the smallest."""
    for seed in range(batch, 40 * BATCHES, BATCHES):
        problem = random_problem(seed)
        least, most = least_peak(problem), peak_of_order(problem)
        for budget in {least, max(least, (least + most) // 2)}:
            general = least_extra_cost(problem, budget)
            staged = staged_extra_cost(problem, budget)
            assert general <= staged
            cut = cut_bound(problem, budget)
            assert cut.bound <= general + 1e-9 and cut.smallest_bytes <= least, seed
            solved = solve_restricted(problem, budget)
            truth = general if solved.covers == "all" else staged
            assert solved.bound <= truth + 1e-9, seed
            if solved.status == "infeasible":
                assert math.isinf(truth), seed
            elif solved.status == "optimal":
                assert solved.extra_cost == pytest.approx(truth), seed
            else:
                assert solved.status != "feasible" or solved.extra_cost >= truth, seed
        below = solve_restricted(problem, least - 1)
        assert below.status == "infeasible", seed


def test_claims_cover_sequences_that_repeat_in_order() -> None:
    sequence = [0, 1, 2, 3, 2, 0, 4]
    assert replay(OUT_OF_ORDER, sequence).peak_bytes == least_peak(OUT_OF_ORDER) == 7
    assert least_extra_cost(OUT_OF_ORDER, 7) == 2.0
    solved = solve_restricted(OUT_OF_ORDER, 7)
    assert (solved.status, solved.covers) == ("infeasible", "staged")
    assert solve_restricted(OUT_OF_ORDER, 8).status == "optimal"
    # Given that sequence it is returned, and nothing is claimed that is not so.
    better = solve_restricted(OUT_OF_ORDER, 7, start=sequence)
    assert better.extra_cost == 2.0 and better.covers == "all"
    assert better.bound <= 2.0 and better.status in ("optimal", "feasible")


def test_what_a_cut_proves_covers_all_sequences() -> None:
    assert solve_restricted(OUT_OF_ORDER, OUT_OF_ORDER.floor_bytes - 1).covers == "all"
    assert solve_restricted(OUT_OF_ORDER, peak_of_order(OUT_OF_ORDER)).covers == "all"


def test_a_certificate_says_what_its_bound_speaks_of() -> None:
    """The integer program's bound is of staged sequences; that of a cut of all."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2, axis=1)  # not of all: one block of threads would not make squares

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (512, 16))]
    said: set[bool] = set()
    for share in (0.8, 0.9):
        for policy in (Ilp(method="exact"), Ilp(method="starts")):
            plan = remat.plan(loss, *shapes, remat_policy=policy, budget=share)
            assert plan.certificate is not None
            says = IN_STAGES in plan.certificate.kind
            assert not (says and policy.method == "starts")
            assert (IN_STAGES in " ".join(str(plan).split())) == says
            said.add(says)
    assert said  # which of the two depends on how good the cut's bound is


# --- chains ----------------------------------------------------------------------------------------


def random_chain(seed: int, *, equal: bool = False, unread: float = 0.0) -> Problem:
    """3 to 5 stages of one node; a backward node reads its gradient, its stage's input and its output.

    Args:
        seed: of the random numbers.
        equal: all stages cost and take the same.
        unread: the share of values that no backward node reads.
    """
    rng = random.Random(seed)
    count = rng.randint(3, 5)
    skipped = {value for value in range(count) if rng.random() < unread}
    inputs: list[list[int]] = [[node - 1] if node else [] for node in range(count)]
    for index, stage in enumerate(reversed(range(count))):
        gradient = [count + index - 1] if index else []
        inputs.append(gradient + [v for v in (stage - 1, stage) if v >= 0 and v not in skipped])
    numbers = [1 if equal else rng.randint(1, 4) for _ in range(4 * count)]
    return Problem.of(
        numbers[: 2 * count],
        numbers[2 * count :],
        inputs,
        repeatable=[True] * count + [False] * count,
        turn=count,
    )


def budgets_of(problem: Problem) -> list[int]:
    """The smallest peak, one below that of no repetition, and one between."""
    least, most = least_peak(problem), peak_of_order(problem)
    return sorted({least, (least + most) // 2, max(least, most - 1)})


@pytest.mark.parametrize("unread", [0.0, 0.5])
def test_schedules_of_chains_are_what_they_say(unread: float) -> None:
    """Within the budget, never better than the best of all; the optimum nearly always where everything is read."""
    found = optimal = total = 0
    for seed in range(24):
        problem = random_chain(seed, unread=unread)
        chain = chain_of(problem)
        for budget in budgets_of(problem):
            total += 1
            best = least_extra_cost(problem, budget)
            plan = solve_chain(problem, budget)
            if plan is None:
                continue
            found += 1
            assert plan.peak_bytes <= budget and plan.extra_cost >= best - 1e-9, seed
            optimal += plan.extra_cost <= best + 1e-9
        if chain is not None and not unread:
            assert not chain.unread, seed
    if not unread:
        assert found == total and optimal >= 0.9 * total
    else:
        assert optimal < total  # so the plan has to say so


def test_schedules_of_equal_stages_are_optimal() -> None:
    for seed in range(12):
        problem = random_chain(seed, equal=True)
        for budget in budgets_of(problem):
            plan = solve_chain(problem, budget)
            assert plan is not None
            assert plan.extra_cost == least_extra_cost(problem, budget), (seed, budget)


def test_a_chain_with_values_that_nobody_reads() -> None:
    assert replay(UNREAD, [0, 1, 2, 0, 3]).peak_bytes == 5
    assert solve_chain(UNREAD, 5) is None
    chain = chain_of(UNREAD)
    assert chain is not None and chain.unread == {1}


@pytest.mark.parametrize("unread", [False, True])
def test_revolve_says_where_it_is_a_heuristic(unread: bool) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.tanh(x @ w)
            if unread:  # sums are read by nobody behind
                x = jnp.cumsum(jnp.cumsum(x, 0) @ jnp.ones((16, 16)), 0)
        return jnp.sum(x**2, axis=1)  # not of all: squares would be a buffer

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (512, 16))]
    # With jax 0.12 the compiler takes three quarters at least.
    plan = remat.plan(loss, *shapes, remat_policy=Revolve(), budget=0.8)
    assert plan.status == "heuristic" and plan.certificate is None
    assert any("does not read" in note for note in plan.notes) == unread
