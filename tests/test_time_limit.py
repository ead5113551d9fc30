"""A policy's time limit holds for a whole planning: what every request is given, on a clock of our own."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import remat
from models import mlp
from remat.core import deadline
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.planning import session as budget
from remat.planning.make import make_plan
from remat.planning.time_limit import SharedTime, TimeLimit
from remat.planning.within import plan_within
from remat.plans.plan import Plan
from remat.plans.record import Certificate
from remat.policies import Auto, Checkmate, Full, Ilp, MinCut, Monet, Sublinear, Unchanged
from remat.policies.base import BudgetPolicy, Decision
from remat.policies.solvers import search as _search

LOSS, ARGS = mlp.residual_mlp(layers=4, width=16, hidden=64, batch=64)
GRAPH = remat.plan(LOSS, *ARGS).graph


@dataclass
class Clock:
    """The clock of all deadlines.

    Attributes:
        now: seconds.
        step: seconds that pass when somebody looks.
        looks: how often somebody did.
    """

    now: float = 0.0
    step: float = 0.0
    looks: int = 0

    def __call__(self) -> float:
        self.now += self.step
        self.looks += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(deadline, "_clock", made)
    return made


@dataclass(frozen=True)
class Slow(BudgetPolicy):
    """Takes a share of the seconds it is given; what it keeps is far below what it was asked for."""

    clock: Clock = field(repr=False)
    given: list[float] = field(default_factory=list, repr=False, compare=False)
    seconds: float = 8.0
    takes: float = 1.0
    refuses: bool = False
    name: ClassVar[str] = "slow"

    def decide(self, graph: Graph) -> Decision:
        return Full().decide(graph)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        del budget_bytes
        self.given.append(self.seconds)
        self.clock.now += self.takes * self.seconds
        if self.refuses:
            raise BudgetError("Smallest peak found: 1 bytes.", smallest_peak_bytes=1)
        dear = Certificate("whole program in picoseconds", 2, 1)
        return Decision(Full().decide(graph).saved, certificate=dear)


LEAST = min(make_plan(GRAPH, Unchanged()).peak_bytes - 1, 2 * make_plan(GRAPH, Full()).peak_bytes)


def requests(policy: Slow) -> list[float]:
    """What each request of one planning was given."""
    if policy.refuses:
        with pytest.raises(BudgetError):
            plan_within(GRAPH, policy, LEAST // 64, margin=0.0)
    else:
        # So far from what is used that it is asked again.
        plan = plan_within(GRAPH, policy, LEAST, margin=0.0)
        assert "seconds" not in plan.options  # the user's are the default
    return policy.given


def test_every_request_gets_half_of_what_is_left(clock: Clock) -> None:
    assert requests(Slow(clock)) == [4.0, 2.0, 1.0, 0.5, 0.25]


def test_what_a_request_does_not_use_is_there_for_the_next(clock: Clock) -> None:
    assert requests(Slow(clock, takes=0.5)) == [4.0, 3.0, 2.25, 1.6875, 1.265625]
    assert requests(Slow(clock, takes=0.0)) == [4.0] * 5


def test_nothing_is_asked_once_the_time_is_up(clock: Clock) -> None:
    assert requests(Slow(clock, takes=3.0)) == [4.0]


def test_refusals_take_time_too(clock: Clock) -> None:
    assert requests(Slow(clock, refuses=True)) == [4.0, 2.0, 1.0, 0.5, 0.25]


def test_what_leaves_a_margin_takes_half_of_the_time(clock: Clock) -> None:
    policy = Slow(clock, refuses=True)
    with pytest.raises(BudgetError):
        plan_within(GRAPH, policy, LEAST // 64, margin=0.03)
    assert policy.given[:5] == [2.0, 1.0, 0.5, 0.25, 0.125]
    assert policy.given[5] == pytest.approx((8.0 - sum(policy.given[:5])) / 2)


def test_plannings_that_are_compared_get_equal_parts(clock: Clock) -> None:
    """Three of them, the first of which leaves some of its part to the others."""
    policy = Slow(clock, takes=0.5)
    limit = TimeLimit(policy)
    for count in (3, 2, 1):
        limit.part(count).decide_within(GRAPH, 1)
    first = 8.0 / 3 / 2
    second = (8.0 - first / 2) / 2 / 2
    third = (8.0 - first / 2 - second / 2) / 2
    assert policy.given == pytest.approx([first, second, third])
    assert limit.left == pytest.approx(8.0 - (first + second + third) / 2)


def test_the_plan_names_the_options_of_the_user(clock: Clock) -> None:
    policy = Slow(clock, seconds=16.0)
    plan = plan_within(GRAPH, policy, LEAST, margin=0.0)
    assert "seconds=16.0" in plan.options
    assert policy.given[0] == 8.0


def test_policies_without_a_limit_are_asked_as_they_are() -> None:
    asked: list[object] = []

    @dataclass(frozen=True)
    class Plain(BudgetPolicy):
        name: ClassVar[str] = "plain"

        def decide(self, graph: Graph) -> Decision:
            return Full().decide(graph)

        def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
            asked.append(self)
            return Full().decide(graph)

    plain = Plain()
    TimeLimit(plain).decide_within(GRAPH, 1)
    assert asked == [plain] and asked[0] is plain
    endless = Slow(Clock(), seconds=math.inf, takes=0.0)
    TimeLimit(endless).decide_within(GRAPH, 1)
    assert endless.given == [math.inf]
    assert TimeLimit(Sublinear()).seconds is None


def test_limits_of_the_library() -> None:
    assert TimeLimit(Ilp(seconds=3.0)).seconds == 3.0
    assert TimeLimit(Checkmate(seconds=5.0)).seconds == 5.0
    assert TimeLimit(Monet(seconds=7.0)).seconds == 7.0
    assert TimeLimit(Auto(ilp=Ilp(seconds=2.0))).seconds == 2.0


def test_a_policy_that_asks_another_passes_the_limit_on(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    given: list[float] = []

    def decide_within(self: Ilp, graph: Graph, budget_bytes: int) -> Decision:
        given.append(self.seconds)
        return Full().decide(graph)

    monkeypatch.setattr(Ilp, "decide_within", decide_within)
    del clock  # stands still
    limit = TimeLimit(Auto(ilp=Ilp(seconds=2.0)))
    limit.decide_within(GRAPH, 1)  # too little for min_cut
    assert given == [1.0]


# --- whatever runs inside --------------------------------------------------------------------------


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    """Six layers of two matmuls, and a loop of two iterations."""
    for _ in range(6):
        x = jnp.tanh(jnp.tanh(x @ w) @ w)
    y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x[:8], None, length=2)
    return jnp.sum(x**2) + jnp.sum(y)


def pooled(w: jax.Array, x: jax.Array) -> jax.Array:
    """Layers with relu, pools and softmax: operators with several implementations."""
    for _ in range(4):
        x = jax.nn.relu(x @ w)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME")
        x = jax.nn.softmax(x @ w)
    return jnp.sum(x**2)


SHAPES = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32))
LIMITED: dict[str, Any] = {
    "ilp": Ilp(seconds=0.5),
    "ilp-exact": Ilp(seconds=0.5, method="exact"),
    "monet": Monet(seconds=0.5),
    "checkmate": Checkmate(seconds=0.5),
    "approximate": Checkmate(method="approximate", seconds=0.5),
    "auto": Auto(ilp=Ilp(seconds=0.5)),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("function", [looped, pooled])
@pytest.mark.parametrize("policy", LIMITED)
@pytest.mark.parametrize("step", [0.02, 0.1])
def test_everything_ends_with_the_time(
    function: Any, policy: str, step: float, clock: Clock
) -> None:
    """Whoever works looks at the clock, and once it says so, ends: counted in looks, not in seconds."""
    clock.step = step
    try:
        plan = remat.plan(function, *SHAPES, remat_policy=LIMITED[policy], budget=0.6)
    except BudgetError as error:
        assert "limit of 0.5 seconds ended the planning" in str(error)
    else:
        assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    # A look and a step for every level that ends: not one per proposal, cut, form, start or round.
    assert clock.now <= 0.5 + 60 * step


@pytest.mark.parametrize("policy", [Ilp(seconds=1e-9), Monet(seconds=1e-9)], ids=str)
def test_without_any_time_there_is_the_quickest_plan_or_an_error_that_says_so(policy: Any) -> None:
    least = make_plan(GRAPH, MinCut()).peak_bytes
    assert plan_within(GRAPH, policy, least).peak_bytes <= least
    with pytest.raises(BudgetError, match="limit of 1e-09 seconds ended the planning"):
        plan_within(GRAPH, policy, 1)


def test_a_search_is_not_compiled_where_there_is_no_time_for_it(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Compiling takes ten seconds, once per machine, and nothing ends it."""
    del clock  # stands still
    monkeypatch.setattr(_search, "is_compilable", lambda: True)
    monkeypatch.setattr(_search, "is_kernel_there", lambda: False)
    assert _search.is_ready()
    with deadline.limited(60.0):
        assert _search.is_ready()
    with deadline.limited(2.0):
        assert not _search.is_ready()
        monkeypatch.setattr(_search, "is_kernel_there", lambda: True)
        assert _search.is_ready()


def test_what_every_planning_takes_is_none_of_the_time_to_search_in(clock: Clock) -> None:
    shared = SharedTime(Ilp(seconds=8.0))
    with shared.without_search():
        clock.now += 5.0
    with shared.next():
        assert deadline.seconds_left() == 4.0 + 5.0  # half of the limit, and that
        clock.now += 5.0 + 4.0
    assert shared.used == 4.0
    clock.now += 100.0  # compiling
    with shared.next():
        assert deadline.seconds_left() == 2.0 + 5.0
        clock.now += 3.0  # less than every planning takes: nothing was searched
    assert shared.used == 4.0


def test_deadlines_inside_of_one_are_not_later(clock: Clock) -> None:
    assert deadline.seconds_left() == math.inf and not deadline.out_of_time()
    with deadline.limited(5.0):
        with deadline.limited(9.0):
            assert deadline.seconds_left() == 5.0
        with deadline.limited(2.0):
            clock.now = 2.0
            assert deadline.out_of_time() and deadline.seconds_left() == 0.0
        assert not deadline.out_of_time()
    assert deadline.seconds_left() == math.inf


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", [Ilp(), Monet(), Checkmate(), Auto()], ids=str)
def test_plans_do_not_say_how_long_they_took(policy: Any, tmp_path: Path) -> None:
    """Equal plans have equal checksums."""
    checksums: list[str] = []
    for _ in range(2):
        plan = plan_within(GRAPH, policy, int(0.7 * make_plan(GRAPH, Unchanged()).peak_bytes))
        assert not [n for n in plan.notes if re.search(r"\d\s*(s|ms|seconds)\b", n)]
        plan.to_json(tmp_path / "plan.json")
        data = json.loads((tmp_path / "plan.json").read_text())
        checksums.append(data["made"]["checksum"])
    assert checksums[0] == checksums[1]


def test_one_limit_for_all_rounds_of_a_function_with_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it refuses a budget, a session plans what is outside of its loops several times."""

    args = (jnp.ones((64, 64)), jnp.ones((512, 64)))
    limits: list[TimeLimit | None] = []

    def watched(*inputs: Any, limit: TimeLimit | None = None, **options: Any) -> Plan:
        limits.append(limit)
        return plan_within(*inputs, limit=limit, **options)

    monkeypatch.setattr(budget, "plan_within", watched)
    least = remat.plan(looped, *args, remat_policy=Ilp(method="starts")).peak_bytes
    with pytest.raises(BudgetError):
        remat.plan(looped, *args, remat_policy=Ilp(method="starts"), budget=int(0.15 * least))
    assert len(limits) > 1 and None not in limits and len(set(map(id, limits))) == 1


def test_time_that_others_take_does_not_count() -> None:
    begin = deadline.now()
    with deadline.limited(0.05):
        time.sleep(0.1)
        assert not deadline.out_of_time()
    assert deadline.now() - begin < 0.05
