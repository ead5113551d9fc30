"""A policy's time limit holds for a whole planning: what every request is given, on a clock of our own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import remat
from models import mlp
from remat import budget
from remat.budget import plan_within
from remat.errors import BudgetError
from remat.graph import Graph
from remat.plan import Certificate, Plan
from remat.planning import make_plan
from remat.policies import Auto, Checkmate, Full, Ilp, Monet, SaveAll, Sublinear
from remat.policies.base import Decision
from remat.time_limit import TimeLimit

LOSS, ARGS = mlp.residual_mlp(layers=4, width=16, hidden=64, batch=64)
GRAPH = remat.plan(LOSS, *ARGS).graph


@dataclass
class Log:
    """What a policy was given, and the time that goes by."""

    given: list[float] = field(default_factory=list)
    now: float = 0.0


@dataclass(frozen=True)
class Slow:
    """Takes a share of the seconds it is given; what it keeps is far below what it was asked for."""

    log: Log = field(repr=False)
    seconds: float = 8.0
    takes: float = 1.0
    says: bool = False
    refuses: bool = False
    name: ClassVar[str] = "slow"

    def decide(self, graph: Graph) -> Decision:
        return Full().decide(graph)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        del budget_bytes
        self.log.given.append(self.seconds)
        spent = self.takes * self.seconds
        self.log.now += 100.0 if self.says else spent  # a search that no limit ends comes on top
        if self.refuses:
            raise BudgetError("Smallest peak found: 1 bytes.", smallest_peak_bytes=1)
        saved = Full().decide(graph).saved
        dear = Certificate("whole program in picoseconds", 2, 1)
        return Decision(saved, certificate=dear, solver_seconds=spent if self.says else None)


def requests(policy: Slow) -> list[float]:
    """What each request of one planning was given."""
    limit = TimeLimit(policy, clock=lambda: policy.log.now)
    budget = (
        2 * make_plan(GRAPH, SaveAll()).peak_bytes
    )  # so far from what is used that it is asked again
    if policy.refuses:
        with pytest.raises(BudgetError):
            plan_within(GRAPH, policy, budget // 64, limit=limit)
    else:
        plan = plan_within(GRAPH, policy, budget, limit=limit)
        assert "seconds" not in plan.options  # the user's are the default
    return policy.log.given


@pytest.mark.parametrize("says", [False, True])
def test_every_request_gets_half_of_what_is_left(says: bool) -> None:
    assert requests(Slow(Log(), says=says)) == [4.0, 2.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("says", [False, True])
def test_what_a_request_does_not_use_is_there_for_the_next(says: bool) -> None:
    assert requests(Slow(Log(), takes=0.5, says=says)) == [4.0, 3.0, 2.25, 1.6875, 1.265625]
    assert requests(Slow(Log(), takes=0.0, says=says)) == [4.0] * 5


def test_a_policy_that_overruns_leaves_the_least_that_every_request_gets() -> None:
    """Silent policies are charged what they were given, those that say so what they took."""
    silent = requests(Slow(Log(), takes=3.0))
    assert silent == [4.0, 2.0, 1.0, 0.5, 0.25]
    honest = requests(Slow(Log(), takes=3.0, says=True))
    assert honest == [4.0, *[pytest.approx(0.08)] * 4]


def test_refusals_take_time_too() -> None:
    given = requests(Slow(Log(), refuses=True))
    assert given[:3] == [4.0, 2.0, 1.0] and len(given) == 10  # with the margin, then without
    assert sum(given) <= 8.0 * 1.1
    assert min(given) == pytest.approx(0.08)


def test_plannings_that_are_compared_get_equal_parts() -> None:
    """Three of them, the first of which leaves some of its part to the others."""
    policy = Slow(Log(), takes=0.5)
    limit = TimeLimit(policy, clock=lambda: policy.log.now)
    for count in (3, 2, 1):
        limit.part(count).decide_within(GRAPH, 1)
    first = 8.0 / 3 / 2
    second = (8.0 - first / 2) / 2 / 2
    third = (8.0 - first / 2 - second / 2) / 2
    assert policy.log.given == pytest.approx([first, second, third])
    assert limit.left == pytest.approx(8.0 - (first + second + third) / 2)


def test_the_plan_names_the_options_of_the_user() -> None:
    log = Log()
    policy = Slow(log, seconds=16.0)
    plan = plan_within(GRAPH, policy, 2 * make_plan(GRAPH, SaveAll()).peak_bytes)
    assert "seconds=16.0" in plan.options
    assert log.given[0] == 8.0


def test_policies_without_a_limit_are_asked_as_they_are() -> None:
    asked: list[object] = []

    @dataclass(frozen=True)
    class Plain:
        name: ClassVar[str] = "plain"

        def decide(self, graph: Graph) -> Decision:
            return Full().decide(graph)

        def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
            asked.append(self)
            return Full().decide(graph)

    plain = Plain()
    TimeLimit(plain).decide_within(GRAPH, 1)
    assert asked == [plain] and asked[0] is plain
    endless = Slow(Log(), seconds=math.inf, takes=0.0)
    TimeLimit(endless, clock=lambda: 0.0).decide_within(GRAPH, 1)
    assert endless.log.given == [math.inf]
    assert TimeLimit(Sublinear()).seconds is None


def test_limits_of_the_library() -> None:
    assert TimeLimit(Ilp(seconds=3.0)).seconds == 3.0
    assert TimeLimit(Checkmate(seconds=5.0)).seconds == 5.0
    assert TimeLimit(Monet(seconds=7.0)).seconds == 7.0
    assert TimeLimit(Auto(ilp=Ilp(seconds=2.0))).seconds == 2.0


def test_a_policy_that_asks_another_passes_the_limit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def decide_within(self: Ilp, graph: Graph, budget_bytes: int) -> Decision:
        given.append(self.seconds)
        return Full().decide(graph)

    monkeypatch.setattr(Ilp, "decide_within", decide_within)
    limit = TimeLimit(Auto(ilp=Ilp(seconds=2.0)), clock=lambda: 0.0)
    limit.decide_within(GRAPH, 1)  # too little for min_cut
    assert given == [1.0]


@pytest.mark.parametrize("policy", [Ilp(seconds=2.0), Checkmate(seconds=2.0)], ids=str)
def test_solvers_say_how_long_they_took(policy: Ilp | Checkmate) -> None:
    """Nothing where everything fits; something where an integer program ran, and no part of equality."""
    baseline = make_plan(GRAPH, SaveAll()).peak_bytes
    assert policy.decide_within(GRAPH, 4 * baseline).solver_seconds == 0.0
    tight = policy.decide_within(GRAPH, int(0.7 * baseline))
    assert tight.solver_seconds is not None and tight.solver_seconds > 0.0
    assert replace(tight, solver_seconds=1e9) == tight


def test_one_limit_for_all_rounds_of_a_function_with_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it refuses a budget, a session plans what is outside of its loops several times."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.tanh(jnp.tanh(x @ w) @ w)
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x[:8], None, length=2)
        return jnp.sum(x**2) + jnp.sum(y)

    args = (jnp.ones((64, 64)), jnp.ones((512, 64)))
    limits: list[TimeLimit | None] = []

    def watched(*inputs: Any, limit: TimeLimit | None = None, **options: Any) -> Plan:
        limits.append(limit)
        return plan_within(*inputs, limit=limit, **options)

    monkeypatch.setattr(budget, "plan_within", watched)
    least = remat.plan(loss, *args, remat_policy=Ilp(method="starts")).peak_bytes
    with pytest.raises(BudgetError):
        remat.plan(loss, *args, remat_policy=Ilp(method="starts"), budget=int(0.4 * least))
    assert len(limits) > 1 and None not in limits and len(set(map(id, limits))) == 1
