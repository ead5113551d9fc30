"""Budgets of functions with loops: options of a body, which of them to take, plans that are applied again."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import chain, laws

import remat
from models import cases
from remat.core.errors import BudgetError, PlanError
from remat.core.graph import Graph
from remat.planning.loops import BodyOption, LoopOption, body_options, choose_options, needed_bytes
from remat.planning.make import make_plan
from remat.planning.resort import limit_bytes
from remat.planning.session import BudgetSession
from remat.plans.plan import LoopPlan, Plan
from remat.plans.simulate import simulate
from remat.policies import Full, Ilp, SaveAll

QUICK = Ilp(method="starts")
LOSS, ARGS = cases.gpt_blocks_scan_small()


def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
    """Layers under `lax.scan`: `ws` is `[L, 2, 16, 16]`, `x` is `[64, 16]`."""

    def layer(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return c + jax.nn.gelu(jnp.tanh(c @ w[0]) @ w[1]), None

    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


SCANNED = (jnp.linspace(-1, 1, 6 * 2 * 256).reshape(6, 2, 16, 16), jnp.ones((64, 16)) / 3)


def nested(ws: jax.Array, x: jax.Array) -> jax.Array:
    """A scan in a scan, and matmuls around them."""

    def inner(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(jnp.tanh(c @ w) @ w), None

    def outer(c: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        c, _ = jax.lax.scan(inner, jnp.tanh(c @ w[0]), w)
        return c, jnp.mean(c)

    c, means = jax.lax.scan(outer, jax.nn.gelu(x @ ws[0, 0]), ws)
    return jnp.mean(jnp.tanh(c @ ws[1, 0]) ** 2) + jnp.sum(means)


def two_loops(ws: jax.Array, x: jax.Array) -> jax.Array:
    """Two scans one after the other."""
    return scanned(ws, x) * scanned(ws[:3], jnp.sin(x @ ws[0, 0]))


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


# --- options of a body -------------------------------------------------------------------------------


def body_of(function: Any, *args: Any) -> Graph:
    return remat.plan(function, *args, remat_policy="save_all").loops[0].plan.graph


@pytest.mark.parametrize("name", ["gpt", "layers", "nested"])
def test_options_take_more_memory_and_less_time_one_after_the_other(name: str) -> None:
    function, args = {
        "gpt": (LOSS, ARGS),
        "layers": (scanned, SCANNED),
        "nested": (nested, SCANNED),
    }[name]
    options = body_options(body_of(function, *args))
    assert len(options) >= 2
    for less, more in itertools.pairwise(options):
        assert less.total_bytes < more.total_bytes
        assert more.seconds < 0.97 * less.seconds
    for option in options:
        graph = option.plan.graph
        simulate(graph, option.plan.schedule)
        kept = graph.multiplicity * option.saved_bytes + option.fixed_bytes
        assert option.total_bytes == kept + option.plan.peak_bytes
        assert all(step.action != "barrier" for step in option.plan.schedule.backward)
    assert len({option.plan.saved_values for option in options}) == len(options)


def test_the_first_option_keeps_next_to_nothing_and_the_last_the_results_of_matmuls() -> None:
    options = body_options(body_of(scanned, *SCANNED))
    first, last = options[0].plan, options[-1].plan
    graph = first.graph
    assert options[0].saved_bytes == 64 * 16 * 4  # the carry, of which everything can be made
    again = [[graph.ops[e.op].heavy for e in plan.recomputed].count(True) for plan in (first, last)]
    assert again == [2, 0] or again == [1, 0]
    assert options[-1].saved_bytes >= 64 * 16 * 4


def test_options_of_a_body_without_anything_to_keep_are_one() -> None:
    def adding(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, w: (c + w, None), x, ws)[0])

    args = (jnp.ones((4, 8)), jnp.ones(8))
    assert len(body_options(body_of(adding, *args))) == 1


# --- choosing ----------------------------------------------------------------------------------------

BODY = BodyOption(make_plan(chain(2), SaveAll()), 0.0, 0)  # of any body


def menu_of(rng: random.Random, most: int, working: int = 60) -> list[LoopOption]:
    """Options that keep more and take fewer seconds one after the other."""
    count = rng.randint(1, most)
    kept = sorted(rng.sample(range(0, 4000, 8), count))
    seconds = sorted((float(s) for s in rng.sample(range(1, 200), count)), reverse=True)
    return [
        LoopOption(BODY, (), nbytes, rng.randint(1, 60) if working else 0, time)
        for nbytes, time in zip(kept, seconds, strict=True)
    ]


def taken(menus: list[list[LoopOption]], choice: tuple[int, ...]) -> list[LoopOption]:
    return [menu[index] for menu, index in zip(menus, choice, strict=True)]


def need(menus: list[list[LoopOption]], choice: tuple[int, ...]) -> int:
    """What is kept in all loops, and the largest loop at work."""
    options = taken(menus, choice)
    return sum(o.kept_bytes for o in options) + max(o.working_bytes for o in options)


def cost(menus: list[list[LoopOption]], choice: tuple[int, ...]) -> float:
    return sum(option.seconds for option in taken(menus, choice))


@given(
    seed=st.integers(0, 2**20),
    budget=st.integers(-50, 12_000),
    banned=st.integers(0, 4),
    bound=st.one_of(st.just(math.inf), st.integers(0, 8_000)),
)
@laws(300)
def test_the_choice_equals_that_of_brute_force(
    seed: int, budget: int, banned: int, bound: float
) -> None:
    rng = random.Random(seed)
    menus = [menu_of(rng, 5) for _ in range(rng.randint(1, 3))]
    every = list(itertools.product(*(range(len(menu)) for menu in menus)))
    excluded = set(rng.sample(every, min(banned, len(every))))
    assert all(needed_bytes(taken(menus, c)) == need(menus, c) for c in every)
    fitting = [
        c
        for c in every
        if c not in excluded
        and need(menus, c) <= budget
        and sum(option.kept_bytes for option in taken(menus, c)) <= bound
    ]
    chosen = choose_options(menus, budget, excluded, kept_bytes=bound)
    if not fitting:
        assert chosen is None
        return
    assert chosen in fitting
    assert cost(menus, chosen) == min(cost(menus, c) for c in fitting)


@given(seed=st.integers(0, 2**20), share=st.floats(0, 1.1), working=st.booleans())
@laws(40)
def test_with_many_loops_the_choice_fits_and_is_exact_where_all_bodies_work_alike(
    seed: int, share: float, working: bool
) -> None:
    rng = random.Random(seed)
    menus = [menu_of(rng, 5, working) for _ in range(7)]
    while math.prod(map(len, menus)) <= 4096:
        menus.append(menu_of(rng, 5, working))
    top = need(menus, tuple(len(menu) - 1 for menu in menus))
    budget = int(share * top)
    chosen = choose_options(menus, budget)
    if chosen is not None:
        assert need(menus, chosen) <= budget
    if working:
        return
    # The knapsack by bytes, one loop after the other.
    best = {0: 0.0}
    for menu in menus:
        grown: dict[int, float] = {}
        for used, seconds in best.items():
            for option in menu:
                key = used + option.kept_bytes
                if key <= budget:
                    grown[key] = min(grown.get(key, math.inf), seconds + option.seconds)
        best = grown
    assert (chosen is None) == (not best)
    if chosen is not None:
        assert cost(menus, chosen) == pytest.approx(min(best.values()))


# --- budgets of functions with loops -----------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gpt": (LOSS, ARGS),
    "layers": (scanned, SCANNED),
    "nested": (nested, SCANNED),
    "two": (two_loops, SCANNED),
}


def plans_within(name: str, shares: tuple[float, ...]) -> list[tuple[float, Plan]]:
    function, args = FUNCTIONS[name]
    found = []
    for share in shares:
        try:
            found.append((share, remat.plan(function, *args, remat_policy=QUICK, budget=share)))
        except BudgetError as error:
            assert error.smallest_peak_bytes is not None
            assert f"{error.smallest_peak_bytes:,} bytes" in str(error)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_several_budgets_are_met(name: str) -> None:
    found = plans_within(name, (1.0, 0.7, 0.5, 0.35))
    assert len(found) >= 2
    for share, plan in found:
        limit = limit_bytes(share, plan.baseline_peak_bytes)
        assert plan.peak_bytes <= limit
        assert plan.loops and plan.budget_bytes == limit
        for entry in plan.loops:
            assert entry.length == entry.plan.graph.multiplicity
            simulate(entry.plan.graph, entry.plan.schedule)
    peaks = [plan.peak_bytes for _, plan in found]
    assert peaks[-1] < peaks[0] or (name == "nested" and peaks[-1] == peaks[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["layers", "nested", "two"])
def test_gradients_of_a_function_with_loops_within_a_budget(name: str) -> None:
    function, args = FUNCTIONS[name]
    share, plan = plans_within(name, (0.35, 0.5))[0]
    assert plan.recompute_flops > 0
    ours = remat.checkpoint(function, remat_policy=QUICK, budget=share)
    close(jax.jit(jax.grad(ours))(*args), jax.jit(jax.grad(function))(*args))
    roomier = remat.checkpoint(function, remat_policy=QUICK, budget=0.6)
    with (
        jax.disable_jit()
    ):  # unrolled, so that what is sliced for every layer is padded and added up
        want, got = jax.grad(function)(*args), jax.grad(roomier)(*args)
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.slow
def test_a_small_budget_is_an_error_that_says_what_would_do() -> None:
    with pytest.raises(BudgetError, match="does not meet the budget of 1,000 bytes") as refused:
        remat.plan(LOSS, *ARGS, remat_policy=QUICK, budget=1000)
    named = refused.value.smallest_peak_bytes
    assert named is not None and "of scan0" in str(refused.value)
    plan = remat.plan(LOSS, *ARGS, remat_policy=QUICK, budget=named)
    assert plan.peak_bytes <= named


def test_a_policy_without_budgets_is_checked_with_its_loops() -> None:
    free = remat.plan(LOSS, *ARGS, remat_policy="min_cut")
    held = remat.plan(LOSS, *ARGS, remat_policy="min_cut", budget=free.peak_bytes)
    assert (held.schedule, held.loops) == (free.schedule, free.loops)
    with pytest.raises(BudgetError) as refused:
        remat.plan(LOSS, *ARGS, remat_policy="min_cut", budget=free.peak_bytes - 1)
    assert refused.value.smallest_peak_bytes == free.peak_bytes


@pytest.mark.slow
def test_the_peak_without_remat_hardly_depends_on_the_policy() -> None:
    """A fraction of it would otherwise mean other bytes for another policy.

    With loops it is put together from what the loops keep and what the rest needs: not the same to the byte.
    """
    policies = ("save_all", "full", "min_cut", QUICK)
    found = [remat.plan(LOSS, *ARGS, remat_policy=p).baseline_peak_bytes for p in policies]
    found += [plan.baseline_peak_bytes for _, plan in plans_within("gpt", (1.0, 0.4))]
    assert max(found) <= 1.15 * min(found)


class Counting(BudgetSession):
    """A session that counts how often it is asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked = 0

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        self.asked += 1
        return super().plan(graph, barriers=barriers)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_session_asks_at_most_a_handful_of_times(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Counting] = []

    def begin(*args: Any) -> Counting:
        made.append(Counting(*args))
        return made[-1]

    monkeypatch.setattr("remat.planning.planners.BudgetSession", begin)
    found = plans_within(name, (0.91, 0.52, 0.37, 0.21))  # not planned before
    assert found
    assert len(made) == 4
    assert max(session.asked for session in made) >= 2
    assert all(1 <= session.asked <= 7 for session in made)


@pytest.mark.slow
def test_time_falls_as_the_budget_grows() -> None:
    """A peak at the loss head and two loops: what each may keep is a matter of where the peak is."""
    function, args = cases.lstm()
    found = []
    for mebibytes in (795, 830, 865, 900, 950, 1010, 1070, 1200, 1250):
        plan = remat.plan(function, *args, remat_policy=QUICK, budget=mebibytes << 20)
        assert plan.peak_bytes <= mebibytes << 20
        found.append(plan.recompute_seconds)
    assert found == sorted(found, reverse=True)
    assert len(set(found)) >= 5


@pytest.mark.slow
def test_before_loops_run_in_chunks_more_is_made_again_outside_of_them() -> None:
    """What is made again outside of loops is made once, what a chunk makes again as often as it has iterations."""
    function, args = cases.lstm()
    plan = remat.plan(function, *args, remat_policy=QUICK, budget=815 << 20)
    assert all(entry.length == 128 for entry in plan.loops)
    wide = remat.plan(function, *args, remat_policy=QUICK, budget=900 << 20)
    assert wide.notes[0] == "outside of loops: a minimum cut"
    assert plan.peak_bytes < wide.peak_bytes
    assert plan.recompute_seconds > wide.recompute_seconds


def test_more_is_kept_where_there_is_more_memory() -> None:
    plans = dict(plans_within("layers", (0.9, 0.35)))
    kept = {share: plan.loops[0].plan.saved_bytes for share, plan in plans.items()}
    assert kept[0.9] > kept[0.35]
    assert plans[0.9].recompute_flops < plans[0.35].recompute_flops


def test_loops_inside_loops_have_plans_of_their_own() -> None:
    ((_, plan),) = plans_within("nested", (0.5,))
    (outer,) = plan.loops
    (inner,) = outer.plan.loops
    assert (outer.length, inner.length) == (6, 2)
    # The inner loop keeps the least: it runs once per iteration of the outer one.
    least = body_options(inner.plan.graph)[0].plan
    assert inner.plan.saved_values == least.saved_values


# --- plans that are applied again ----------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_plan_with_loops_can_be_used_and_saved(name: str) -> None:
    function, args = FUNCTIONS[name]
    made = plans_within(name, (0.5, 0.9))[0][1]
    again = Plan.from_json(made.to_json())
    assert again == made
    applied = remat.plan(function, *args, remat_policy=again)
    assert applied == made


@pytest.mark.slow
def test_gradients_of_a_saved_plan_with_loops_are_those_of_plain_jax() -> None:
    args = cases.materialize(ARGS, 0)
    made = remat.plan(LOSS, *ARGS, remat_policy=QUICK, budget=0.4)
    ours = remat.checkpoint(LOSS, remat_policy=Plan.from_json(made.to_json()))
    close(jax.jit(jax.grad(ours))(*args), jax.jit(jax.grad(LOSS))(*args), 1e-5)


def test_a_plan_for_another_body_is_an_error_that_names_the_loop_and_the_difference() -> None:
    def variant(outside: Any, inside: Any) -> Any:
        def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
            layer = lambda c, w: (inside(c @ w[0]), None)  # noqa: E731
            return jnp.mean(jax.lax.scan(layer, outside(x), ws)[0] ** 2)

        return loss

    made = remat.plan(variant(jnp.sin, jnp.tanh), *SCANNED, remat_policy="full")
    same = remat.plan(variant(jnp.sin, jnp.tanh), *SCANNED, remat_policy=made)
    assert same == made
    with pytest.raises(PlanError, match=r"another function: .*scan0.*tanh"):
        remat.plan(variant(jnp.sin, lambda v: jnp.exp(v) * 2), *SCANNED, remat_policy=made)
    with pytest.raises(PlanError, match="another function"):
        remat.plan(variant(jnp.cos, jnp.tanh), *SCANNED, remat_policy=made)
    with pytest.raises(PlanError, match="another function"):
        jax.grad(remat.checkpoint(variant(jnp.sin, jnp.sin), remat_policy=made))(*SCANNED)


def test_a_loop_with_another_length_is_an_error() -> None:
    made = remat.plan(scanned, *SCANNED, remat_policy="full")
    with pytest.raises(PlanError, match="another function"):
        remat.plan(scanned, SCANNED[0][:5], SCANNED[1], remat_policy=made)


def test_carries_that_become_differentiated_late_do_not_confuse_a_plan() -> None:
    """jax traces such a body several times; a plan is compared with the last of them."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(c: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
            b, d = c[1:]
            return (jnp.sin(b), jnp.tanh(d @ w), jnp.cos(d)), None

        a, b, _ = jax.lax.scan(body, (x, x, x), None, length=4)[0]
        return jnp.sum(a * b)

    args = (jnp.eye(8) / 2, jnp.ones((4, 8)))
    for policy in ("min_cut", "full"):
        made = remat.plan(loss, *args, remat_policy=policy)
        ours = remat.checkpoint(loss, remat_policy=made)
        close(jax.jit(jax.grad(ours))(*args), jax.jit(jax.grad(loss))(*args))


def test_a_plan_knows_its_loops_by_path() -> None:
    made = remat.plan(nested, *SCANNED, remat_policy=Full())
    assert made.loop("scan0") is made.loops[0].plan
    with pytest.raises(PlanError, match=r"no loop 'scan7'; its loops are \['scan0'\]"):
        made.loop("scan7")
    assert isinstance(made.loops[0], LoopPlan)
