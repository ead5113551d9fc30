"""Budgets that the compiler confirms: what `confirm=` accepts, what it promises, what it remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import chain, laws

import remat
from remat import Confirm
from remat.compiler.compile import TracedStep
from remat.core.errors import BudgetError, CompileError, DeviceMemoryError
from remat.core.graph import Graph
from remat.planning.confirm import BudgetKnob, Setting, confirmed
from remat.planning.loops import BodyOption, body_options
from remat.planning.make import make_plan
from remat.planning.planners import PolicyPlanner
from remat.planning.protocol import Planner
from remat.planning.resort import unchanged_plan
from remat.planning.search import below, more_may_be_less_time, search
from remat.planning.within import plan_within
from remat.plans.plan import Plan
from remat.plans.record import Confirmed
from remat.policies import Full, Ilp, MinCut, Policy, SaveAll
from remat.policies.base import BudgetPolicy
from remat.resolve import parse_confirm

QUICK = Ilp(method="starts")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight) + jnp.sin(x)
    return jnp.sum(x**2)


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight) + jnp.sin(x), None

    return jnp.sum(jax.lax.scan(step, x, weights)[0] ** 2)


def args(stacked: bool = False) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 8)
    weights = [jax.random.normal(key, (64, 64)) / 8 for key in keys]
    x = jax.random.normal(jax.random.key(1), (512, 64))
    return (jnp.stack(weights) if stacked else weights), x


# --- what is accepted ------------------------------------------------------------------------------


def test_what_confirm_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMAT_CONFIRM", raising=False)
    assert parse_confirm(None) == parse_confirm(True) == Confirm()
    assert parse_confirm(False) is parse_confirm(0) is parse_confirm("off") is None
    assert parse_confirm(3) == Confirm(compiles=3)
    assert parse_confirm("h100") == Confirm(device="h100")
    assert parse_confirm(Confirm(4, "cpu")) == Confirm(4, "cpu")
    monkeypatch.setenv("REMAT_CONFIRM", "off")
    assert parse_confirm(None) is None and parse_confirm(True) == Confirm()
    monkeypatch.setenv("REMAT_CONFIRM", "cpu")
    assert parse_confirm(None) == Confirm(device="cpu")


def test_what_confirm_does_not_accept() -> None:
    with pytest.raises(CompileError, match="expected True, False, a number of compiles"):
        parse_confirm([1])
    with pytest.raises(BudgetError, match="expected 2 or more"):
        parse_confirm(1)
    with pytest.raises(Exception, match="h20"):
        parse_confirm("h20")


@pytest.mark.parametrize("spelt", [str.lower, str.upper, str.title])
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("on", "true", "yes", "1"), Confirm()),
        (("off", "false", "no", "none", "0"), None),
        (("auto",), Confirm()),
        (("attached",), Confirm(device="attached")),
        (("h200",), Confirm(device="h200")),
        (("12",), Confirm(compiles=12)),
    ],
)
def test_words_mean_the_same_wherever_they_stand(
    words: tuple[str, ...],
    wanted: Confirm | None,
    spelt: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for word in words:
        assert parse_confirm(spelt(word)) == wanted
        monkeypatch.setenv("REMAT_CONFIRM", f" {spelt(word)} ")
        assert parse_confirm(None) == wanted


def test_what_stands_in_the_environment_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CONFIRM", "Nope")
    with pytest.raises(CompileError, match="REMAT_CONFIRM='Nope' in the environment") as caught:
        parse_confirm(None)
    said = str(caught.value)
    assert "None" not in said and "confirm=" not in said and "'on', 'off'" in said
    for wrong in ("nope", "", Confirm(device="nope")):
        with pytest.raises(CompileError, match="'attached'") as caught:
            parse_confirm(wrong)
        assert "None" not in str(caught.value) and "h200" in str(caught.value)


@pytest.mark.parametrize("compiles", [2.5, 3.0, np.float32(4), True, "3", None, 1, np.int64(1)])
def test_compiles_are_whole_numbers(compiles: Any) -> None:
    with pytest.raises(BudgetError, match="expected 2 or more, a whole number"):
        Confirm(compiles=compiles)
    assert Confirm(compiles=int(np.int64(3))) == Confirm(compiles=np.int64(3))  # type: ignore[arg-type]


# --- what is promised --------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("is_scanned", [False, True], ids=["unrolled", "scanned"])
def test_the_compiled_program_is_within_the_budget(is_scanned: bool, lowering: str) -> None:
    function = scanned if is_scanned else loss
    arguments = args(is_scanned)
    plan = remat.plan(
        function,
        *arguments,
        remat_policy=QUICK,
        budget=0.7,
        confirm=Confirm(compiles=8, device="cpu"),
        lowering=lowering,
    )
    found = plan.confirmed
    assert found is not None and plan.budget_bytes is not None
    assert found.temp_bytes <= plan.budget_bytes
    assert (found.device, found.jax_version) == ("cpu", jax.__version__)
    assert 2 <= found.compiles <= 8
    wrapped = remat.checkpoint(function, remat_policy=plan, lowering=lowering)
    reports = [
        remat.compile_report(transform(wrapped), *arguments, device="cpu")
        for transform in (jax.grad, jax.value_and_grad)
    ]
    assert max(report.temp_bytes for report in reports) == found.temp_bytes
    assert {report.matmuls_executed for report in reports} == {found.matmuls}
    ours, theirs = jax.jit(jax.grad(wrapped))(*arguments), jax.jit(jax.grad(function))(*arguments)
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-5)


def test_what_a_loops_body_can_keep_is_worked_out_once_for_all_plannings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def counting(graph: Graph, device: str) -> list[BodyOption]:
        made.append(graph.fingerprint())
        return body_options(graph, device)

    monkeypatch.setattr("remat.planning.bodies.body_options", counting)
    lines: list[str] = []
    remat.plan(
        scanned,
        *args(True),
        remat_policy=QUICK,
        budget=0.5,
        confirm=Confirm(compiles=6, device="cpu"),
        progress=lines.append,
    )
    assert sum("a budget of" in line and "compiling" in line for line in lines) >= 2
    assert made and len(made) == len(set(made))


def test_where_everything_fits_nothing_has_to_be_repeated() -> None:
    plan = remat.plan(loss, *args(), remat_policy=QUICK, budget=1.0, confirm="cpu")
    assert plan.confirmed is not None and plan.budget_bytes is not None
    assert plan.confirmed.temp_bytes <= plan.budget_bytes
    assert plan.recompute_flops == 0


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_fraction_is_of_the_function_as_it_is(is_scanned: bool, lowering: str) -> None:
    """Not of the plan that repeats nothing, which keeps less of a loop than jax does."""

    def attention(q: jax.Array, x: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(jnp.where(x > 0, q @ x.T, -1e9).astype(jnp.float32)).astype(q.dtype)
        return jnp.sin(scores @ x)

    def function(q: jax.Array, x: jax.Array) -> jax.Array:
        if not is_scanned:
            return jnp.sum(attention(attention(q, x), x))
        return jnp.sum(jax.lax.scan(lambda c, _: (attention(c, x), c[0]), q, length=5)[0])

    q = x = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
    steps = jax.grad(function), jax.value_and_grad(function)
    whole = max(remat.compile_report(step, q, x, device="cpu").temp_bytes for step in steps)
    options: dict[str, Any] = {"remat_policy": QUICK, "confirm": "cpu", "lowering": lowering}
    plan = remat.plan(function, q, x, budget=0.9, **options)
    assert plan.budget_bytes == int(0.9 * whole)
    assert plan.expected_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("policy", [QUICK, "min_cut", "full"])
@pytest.mark.parametrize("name", ["matmuls", "softmax", "maximum", "tiny"])
def test_where_only_the_plain_program_fits_names_choose_it_too(name: str, policy: Any) -> None:
    function: Callable[[jax.Array], jax.Array] = {
        "matmuls": lambda x: jnp.sum(jnp.tanh(x @ x.T) @ x),
        "softmax": lambda x: jnp.sum(jax.nn.log_softmax(x @ x.T)),
        "maximum": lambda x: jnp.max(jnp.sin(x) * jnp.cos(x)),
        "tiny": lambda x: jnp.sum(jnp.sin(jnp.sin(x[0, :4]))),
    }[name]

    def temp_bytes(function: Callable[[jax.Array], jax.Array]) -> int:
        both = jax.grad(function), jax.value_and_grad(function)
        return max(remat.compile_report(step, x, device="cpu").temp_bytes for step in both)

    x = jax.random.normal(jax.random.key(0), (64, 64))
    options: dict[str, Any] = {"remat_policy": policy, "confirm": "cpu", "lowering": "policy"}
    plan = remat.plan(function, x, budget=1.0, **options)
    wrapped = remat.checkpoint(function, remat_policy=plan, lowering="policy")
    assert temp_bytes(wrapped) == plan.expected_peak_bytes <= temp_bytes(function)
    np.testing.assert_allclose(jax.grad(wrapped)(x), jax.grad(function)(x), rtol=1e-5, atol=1e-6)
    if plan.is_plain:
        assert plan.policy is jax.checkpoint_policies.everything_saveable
        np.testing.assert_array_equal(jax.grad(plan.annotate(function))(x), jax.grad(function)(x))


def test_a_refusal_names_what_was_compiled_and_that_can_be_met() -> None:
    options: dict[str, Any] = {"remat_policy": QUICK, "confirm": "cpu"}
    with pytest.raises(BudgetError, match="plans compiled for cpu the smallest takes") as caught:
        remat.plan(loss, *args(), budget=10_000, **options)
    named = caught.value.smallest_peak_bytes
    assert named is not None and named > 10_000
    plan = remat.plan(loss, *args(), budget=named, **options)
    assert plan.confirmed is not None and plan.confirmed.temp_bytes <= named == plan.budget_bytes


@pytest.mark.parametrize(
    ("compiles", "seconds", "advice"),
    [
        (2, 60.0, "allow for more compiles"),
        (12, 60.0, "Raise the budget."),
        (12, 1e-3, "more time"),
    ],
)
def test_a_refusal_says_what_may_help(compiles: int, seconds: float, advice: str) -> None:
    policy = Ilp(method="starts", seconds=seconds)
    confirm = Confirm(device="cpu", compiles=compiles)
    with pytest.raises(BudgetError, match=advice):
        remat.plan(loss, *args(), remat_policy=policy, budget=10_000, confirm=confirm)


def test_a_policy_without_budgets_is_compiled_as_it_is() -> None:
    plan = remat.plan(loss, *args(), remat_policy="full", budget=0.9, confirm="cpu")
    assert plan.confirmed is not None and plan.policy_name == "full"
    with pytest.raises(BudgetError, match="policy 'full' does not meet"):
        remat.plan(loss, *args(), remat_policy="full", budget=1000, confirm="cpu")


@pytest.mark.parametrize("policy", ["min_cut", "save_all"])
def test_without_a_budget_the_compiler_says_what_a_plan_takes(policy: str) -> None:
    plan = remat.plan(loss, *args(), remat_policy=policy, confirm="cpu")
    assert plan.confirmed is not None and plan.budget_bytes is None
    wrapped = remat.checkpoint(loss, remat_policy=plan)
    reports = [
        remat.compile_report(transform(wrapped), *args(), device="cpu")
        for transform in (jax.grad, jax.value_and_grad)
    ]
    assert plan.expected_peak_bytes == max(report.temp_bytes for report in reports)
    assert "compiled for cpu" in str(plan) and plan.confirmed.compiles == 1
    asked = remat.plan(loss, *args(), remat_policy=policy)
    assert asked.confirmed is None and asked.expected_peak_bytes == asked.peak_bytes


class _Forgetful:
    """A bench whose policy finds its smallest plan on the way to an impossible budget, and never again."""

    def __init__(self, plan: Plan) -> None:
        self.smallest = plan
        self.asked: list[int | float | None] = []

    def plan(self, setting: Setting) -> Plan:
        planner = setting.planner
        assert isinstance(planner, PolicyPlanner)
        if planner.budget is None:
            return self.smallest  # as without rematerialization: no loops
        self.asked.append(planner.budget)
        if planner.budget == 1 and planner.nearest:
            return self.smallest
        raise BudgetError("nothing fits", smallest_peak_bytes=self.smallest.peak_bytes)

    def trial(self, setting: Setting) -> Any:
        return self.plan(setting)


def test_the_smallest_plan_that_was_found_is_compiled() -> None:
    """It is not asked for again: a search may take all of the time that there was to find it."""
    bench = _Forgetful(make_plan(chain(4), Full()))
    knob: BudgetKnob[Any] = BudgetKnob(bench, Ilp())
    assert knob.least() is bench.smallest
    assert {1} == {*bench.asked}


def test_a_larger_budget_is_no_slower_than_quick_plans_that_fit() -> None:
    quick = remat.plan(loss, *args(), remat_policy="min_cut", confirm="cpu")
    budget = quick.expected_peak_bytes
    plan = remat.plan(loss, *args(), remat_policy=QUICK, budget=budget, confirm="cpu")
    assert plan.confirmed is not None and plan.confirmed.temp_bytes <= budget
    # Of an unknown device the time is not known; then the least repetition counts.
    assert plan.recompute_seconds <= quick.recompute_seconds


def test_wrapped_functions_confirm_when_they_are_differentiated() -> None:
    lines: list[str] = []

    def heard(line: str) -> None:
        lines.append(line)

    plan = remat.plan(loss, *args(), remat_policy=QUICK, budget=0.7, confirm="cpu", progress=heard)
    assert any("compiling, number 1" in line for line in lines)
    wrapped = remat.checkpoint(loss, remat_policy=QUICK, budget=0.7, confirm="cpu")
    report = remat.compile_report(jax.grad(wrapped), *args(), device="cpu")
    assert plan.budget_bytes is not None and report.temp_bytes <= plan.budget_bytes + 64


@pytest.mark.parametrize(
    "transform",
    ["scan", *(pytest.param(t, marks=pytest.mark.slow) for t in ("vmap", "grad of grad"))],
)
def test_inside_of_transformations_the_function_is_compiled_alone(transform: str) -> None:
    weights, x = args()
    wrapped = remat.checkpoint(
        lambda w, x: loss(w, x), remat_policy=QUICK, budget=0.8, confirm="cpu"
    )

    def of(function: Callable[..., Any]) -> Any:
        if transform == "vmap":
            return jax.vmap(jax.grad(function), (None, 0))(weights, jnp.stack([x, 2 * x]))
        if transform == "grad of grad":
            inner = jax.grad(function, 1)
            return jax.grad(lambda x: jnp.sum(inner(weights, x) ** 2))(x)

        def summed(weights: Any, xs: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda c, x: (c + function(weights, x), None), 0.0, xs)[0]

        return jax.grad(summed)(weights, jnp.stack([x, 2 * x]))

    for our, their in zip(jax.tree.leaves(of(wrapped)), jax.tree.leaves(of(loss)), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu_compile
def test_an_absent_gpu_confirms_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMAT_CONFIRM", raising=False)
    plan = remat.plan(loss, *args(), remat_policy=QUICK, budget=0.6)
    assert plan.confirmed is not None and plan.confirmed.device == "h200"
    report = remat.compile_report(
        jax.grad(remat.checkpoint(loss, remat_policy=plan)), *args(), device="h200"
    )
    assert plan.budget_bytes is not None and report.temp_bytes <= plan.budget_bytes


# --- when the compiler is not asked -----------------------------------------------------------------


def test_off_is_as_predicted() -> None:
    plan = remat.plan(loss, *args(), remat_policy=QUICK, budget=0.7, confirm=False)
    assert plan.confirmed is None and plan.budget_bytes is not None
    assert plan.peak_bytes <= plan.budget_bytes


def test_without_a_compiler_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.lower.confirm.find_plugin", lambda: None)
    plan = remat.plan(
        lambda w, x: loss(w, x), *args(), remat_policy=QUICK, budget=0.7, confirm=True
    )
    assert plan.confirmed is None
    assert "the compiler was not asked: XLA's compiler for h200 is not installed" in plan.notes[-1]


def test_a_compiler_that_fails_is_said_or_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Any) -> Confirmed:
        raise CompileError("no tools")

    monkeypatch.setattr("remat.lower.confirm.compiled_numbers", fails)
    monkeypatch.setattr("remat.lower.confirm._device", lambda planner: ("cpu", ""))
    with pytest.warns(remat.RematWarning, match="no tools"):
        plan = remat.plan(
            lambda w, x: loss(w, x), *args(), remat_policy=QUICK, budget=0.7, confirm=True
        )
    assert plan.confirmed is None and "the compiler failed" in plan.notes[-1]
    with pytest.raises(CompileError, match="no tools"):
        remat.plan(lambda w, x: loss(w, x), *args(), remat_policy=QUICK, budget=0.7, confirm="cpu")


# --- what is remembered -------------------------------------------------------------------------------


def test_a_second_time_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options: dict[str, Any] = {"remat_policy": QUICK, "budget": 0.7, "confirm": "cpu"}
    first = remat.plan(lambda w, x: loss(w, x), *args(), **options)
    files = list((tmp_path / "remat" / "compiled").glob("*.json"))
    assert first.confirmed is not None and len(files) >= 2

    def never(self: TracedStep) -> Any:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(TracedStep, "compile", never)
        again = remat.plan(lambda w, x: loss(w, x), *args(), **options)
    assert again.digest() == first.digest() and again.confirmed == first.confirmed
    for file in files:  # damaged files are as if they were not there
        file.write_text("{")
    damaged = remat.plan(lambda w, x: loss(w, x), *args(), **options)
    assert damaged.confirmed == first.confirmed


def test_plan_files_hold_what_was_confirmed() -> None:
    plan = remat.plan(loss, *args(), remat_policy=QUICK, budget=0.7, confirm="cpu")
    assert plan.confirmed is not None
    assert Plan.from_json(plan.to_json()).confirmed == plan.confirmed
    assert f"compiled for cpu by jax {jax.__version__}" in str(plan)


# --- the search, without a compiler -------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    plan: Plan


def _bench(
    times: float,
    more: int,
    fastest_share: float | None = None,
    *,
    fast_below: float = 0.0,
    whole_times: float = 1.0,
) -> tuple[Callable[[Planner], _Made], Callable[..., Confirmed]]:
    """Plans of a chain, and a compiler that makes of a prediction a multiple and a constant.

    The loss with its gradient takes `whole_times` what the gradient takes. With `fastest_share` the program with
    about that share of the peak is the fastest, whatever is repeated; programs with less than the share
    `fast_below` take half of the time that they should.
    """
    small = fastest_share is None and not fast_below
    graph = chain(8 if small else 16, heavy=True, fusible=False)

    def make(planner: Planner) -> _Made:
        assert isinstance(planner, PolicyPlanner)
        policy: Policy = planner.policy
        if planner.budget is not None and isinstance(policy, BudgetPolicy):
            return _Made(plan_within(graph, policy, int(planner.budget), margin=planner.margin))
        if policy.name in ("none", "unchanged"):
            return _Made(unchanged_plan(graph, policy))
        return _Made(make_plan(graph, policy))

    def compiled(made: _Made, before: Confirmed | None = None) -> Confirmed:
        plan = made.plan
        temp = round(times * plan.peak_bytes) + more
        if before is not None:
            assert before.temp_bytes == temp
            temp = round(whole_times * temp)
        seconds = 1.0 + plan.recompute_seconds
        if fastest_share is not None:
            seconds = 1.0 + abs(plan.peak_bytes / plan.baseline_peak_bytes - fastest_share)
        if plan.peak_bytes < fast_below * plan.baseline_peak_bytes:
            seconds /= 2
        return Confirmed("toy", "0", temp, 0, 0, seconds)

    return make, compiled


def _confirmed(
    planner: PolicyPlanner,
    make: Callable[[Planner], _Made],
    compiled: Callable[..., Confirmed],
    toy: Callable[..., Confirmed] | None = None,
) -> tuple[_Made, Plan]:
    """As it is a function takes here what the plan that repeats nothing does, by `toy` if given."""
    asked = compiled if toy is None else toy
    assert planner.confirm is not None
    return confirmed(
        planner,
        planner.confirm.compiles,
        make,
        compiled,
        lambda made: asked(made, asked(made)).temp_bytes,
    )


@given(
    times=st.floats(0.5, 2.0),
    more=st.integers(0, 2000),
    whole_times=st.sampled_from([1.0, 1.02, 1.3]),
    share=st.floats(0.2, 1.2),
    policy=st.sampled_from([QUICK, MinCut(), Full()]),
)
@laws()
def test_whatever_the_compiler_makes_of_it_the_budget_holds(
    times: float, more: int, whole_times: float, share: float, policy: Policy
) -> None:
    make, compiled = _bench(times, more, whole_times=whole_times)

    def whole_bytes(made: _Made) -> int:
        return compiled(made, compiled(made)).temp_bytes

    plain = whole_bytes(make(PolicyPlanner(remat.policies.Unchanged())))
    budget = max(int(share * plain), 1)
    planner = PolicyPlanner(policy, budget, confirm=Confirm(8))
    try:
        made, plan = _confirmed(planner, make, compiled)
    except BudgetError as error:
        assert error.smallest_peak_bytes is not None and error.smallest_peak_bytes > budget
        return
    assert plan.confirmed is not None and plan.budget_bytes == budget
    assert plan.confirmed.temp_bytes == whole_bytes(made) <= budget
    assert plan == replace(plan, confirmed=None)
    if plain <= budget:
        assert plan.confirmed.roofline_seconds == pytest.approx(1.0, rel=1e-3)


@given(
    salt=st.integers(0, 99),
    whole_times=st.sampled_from([1.0, 1.02, 1.3]),
    share=st.sampled_from([0.5, 0.7, 0.9, 1.0, 3.0]),
    policy=st.sampled_from([QUICK, MinCut(), Full(), SaveAll()]),
)
@laws(40)
def test_what_is_said_of_other_plans_is_so(
    salt: int, whole_times: float, share: float, policy: Policy
) -> None:
    """Of a compiler whose bytes follow no order, and on a device whose rates are not known."""
    make, toy = _bench(1.0, 0)
    asked: dict[str, tuple[Plan, int]] = {}

    def compiled(made: _Made, before: Confirmed | None = None) -> Confirmed:
        digest = made.plan.digest()
        scale = 700 + (int(digest[:8], 16) ^ salt) % 600
        temp = round(scale / 1000 * made.plan.peak_bytes * (whole_times if before else 1.0))
        asked[digest] = made.plan, temp
        return replace(toy(made), temp_bytes=temp, roofline_seconds=None)

    plain = make(PolicyPlanner(remat.policies.Unchanged()))
    budget = int(share * compiled(plain, compiled(plain)).temp_bytes)
    try:
        made, plan = _confirmed(PolicyPlanner(policy, budget, confirm=Confirm(8)), make, compiled)
    except BudgetError as error:
        count = len(asked)
        assert (f"of {count} plans compiled" if count > 1 else "compiled for toy it") in str(error)
        assert all(temp > budget for _, temp in asked.values())
        return
    assert plan.confirmed is not None and plan.confirmed.compiles == len(asked)
    assert not any(
        note != other and other.startswith(note) for note in plan.notes for other in plan.notes
    )
    seconds, used = made.plan.recompute_seconds, plan.confirmed.temp_bytes
    faster = [temp for p, temp in asked.values() if p.recompute_seconds < seconds]
    if isinstance(policy, BudgetPolicy):
        assert not any(temp <= budget for temp in faster)
    said = next((note for note in plan.notes if "of the budget is used: " in note), "")
    assert bool(said) == (used < 0.9 * budget)
    if "is faster takes" in said:
        assert f"takes {min(t for t in faster if t > budget):,} bytes" in said
    elif "does not plan within budgets" in said:
        assert not isinstance(policy, BudgetPolicy) and any(used < t <= budget for t in faster)
    elif said:
        has_larger = any(temp > used for _, temp in asked.values())
        words = "takes more is not faster" if has_larger else "nothing that was compiled takes more"
        assert words in said and not any(temp > used for temp in faster)


def test_a_policys_own_plan_that_is_the_plain_one_is_one_plan() -> None:
    weight = jnp.ones((8, 8))
    options: dict[str, Any] = {"remat_policy": "save_all", "confirm": "cpu"}
    plan = remat.plan(lambda w: jnp.sum(w @ w), weight, budget=1.0, **options)
    assert plan.confirmed is not None and plan.confirmed.compiles == 1
    assert plan.notes == (
        "as without rematerialization: of what was compiled and fits the fastest",
    )
    assert "the choice of" not in str(plan)
    with pytest.raises(BudgetError, match="bytes: compiled for cpu it takes"):
        remat.plan(lambda w: jnp.sum(jnp.sin(w @ w) @ w), weight, budget=1, **options)


@pytest.mark.parametrize("whole_times", [1.0, 1.05])
def test_the_whole_is_compiled_of_what_is_returned_alone(whole_times: float) -> None:
    """A loss with its gradient takes more than the gradient: what does not fit then is not taken, nor given up."""
    make, toy = _bench(1.1, 100, whole_times=whole_times)
    wholes: list[_Made] = []

    def compiled(made: _Made, before: Confirmed | None = None) -> Confirmed:
        wholes.extend([made] if before is not None else [])
        return toy(made, before)

    made, plan = _confirmed(PolicyPlanner(QUICK, 0.7, confirm=Confirm(8)), make, compiled, toy)
    assert plan.confirmed is not None and plan.budget_bytes is not None
    assert plan.confirmed.temp_bytes == toy(made, toy(made)).temp_bytes <= plan.budget_bytes
    assert wholes[-1] is made and plan.confirmed.compiles > len(wholes)
    if whole_times == 1.0:
        assert len(wholes) == 2  # without rematerialization, and what was taken


@pytest.mark.parametrize("whole_times", [1.0, 1.05])
@pytest.mark.parametrize("policy", [QUICK, MinCut()])
def test_what_a_refusal_names_can_be_met(policy: Policy, whole_times: float) -> None:
    make, toy = _bench(1.1, 100, whole_times=whole_times)
    with pytest.raises(BudgetError) as caught:
        _confirmed(PolicyPlanner(policy, 1, confirm=Confirm(8)), make, toy)
    named = caught.value.smallest_peak_bytes
    assert named is not None
    _, plan = _confirmed(PolicyPlanner(policy, named, confirm=Confirm(8)), make, toy)
    assert plan.confirmed is not None and plan.confirmed.temp_bytes == named


@given(share=st.floats(0.4, 0.9), fastest_share=st.floats(0.2, 0.4), times=st.floats(0.7, 1.4))
@laws(8)
def test_where_less_memory_is_faster_a_larger_budget_misses_none_of_it(
    share: float, fastest_share: float, times: float
) -> None:
    make, compiled = _bench(times, 0, fastest_share)
    seconds = []
    for budget in (share, 0.95):
        plan = _confirmed(PolicyPlanner(QUICK, budget, confirm=Confirm(20)), make, compiled)[1]
        assert plan.confirmed is not None and plan.confirmed.roofline_seconds is not None
        seconds.append(plan.confirmed.roofline_seconds)
        if plan.confirmed.temp_bytes < 0.9 * (plan.budget_bytes or 0):
            assert any("of the budget is used" in note for note in plan.notes)
    assert seconds[1] <= 1.05 * seconds[0]


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_what_is_faster_below_is_found_although_more_memory_is_less_time_above(
    share: float,
) -> None:
    """Nothing between the budget and the program as it is says so; one place below is looked at."""
    make, compiled = _bench(1.0, 0, fast_below=0.4)
    planner = PolicyPlanner(QUICK, share, confirm=Confirm(6))
    plan = _confirmed(planner, make, compiled)[1]
    assert plan.confirmed is not None and plan.confirmed.compiles <= 6
    assert plan.confirmed.roofline_seconds is not None
    assert plan.confirmed.roofline_seconds < 0.75


def test_the_compilers_bytes_say_which_plan_has_more_memory() -> None:
    """Predictions of two plans may be the wrong way round: there is room for a larger one all the same."""
    cut, less = _Numbers(134, 188, 0.976), _Numbers(142, 170, 1.042)
    assert more_may_be_less_time([_Numbers(505, 416, 0.914, fits=False), cut, less])
    assert not more_may_be_less_time([cut, _Numbers(100, 200, 1.1)])
    assert more_may_be_less_time([_Numbers(505, 416, 0.914, fits=False)])


def test_with_the_memory_of_another_policys_plan_the_knobs_may_be_faster() -> None:
    """The place on the ladder may be more than can be reached; there the other policy's plan is."""
    plain = _Numbers(1176, 1200, 2.025, fits=False)
    cut, less = _Numbers(618, 681, 2.295), _Numbers(554, 583, 2.347)
    knob = _AskedAt(_Numbers(540, 567, 2.227))
    found = below(knob, plain, [plain, cut, less], left=lambda: 1, others=[cut, less])
    assert knob.asked == [554] and found[-1] is knob.trial
    knob.asked.clear()
    assert below(knob, plain, [plain, cut, less], left=lambda: 1) == [plain, cut, less]
    assert knob.asked == []  # the knob has been there itself
    below(knob, plain, [plain, cut], left=lambda: 1, others=[cut])
    assert knob.asked == [416]  # two steps of the ladder below 1176 are too near


@dataclass
class _AskedAt:
    """A knob that always finds the same trial, and notes what it was asked for."""

    trial: _Numbers
    asked: list[int] = field(default_factory=list)

    def at(self, target_bytes: int, low: object, high: object) -> _Numbers:
        del low, high
        self.asked.append(target_bytes)
        return self.trial

    def least(self) -> _Numbers:
        return self.trial

    def another(self) -> None:
        return None


@dataclass(frozen=True)
class _Numbers:
    """A trial that is nothing but its numbers."""

    predicted_bytes: int
    total_bytes: int
    roofline_seconds: float | None
    fits: bool = True
    recompute_seconds: float = 0.0

    @property
    def temp_bytes(self) -> int:
        return self.total_bytes


@pytest.mark.parametrize(("least_times", "limit", "fits"), [(2.0, 147, True), (1.2, 90, False)])
def test_where_the_least_plan_is_larger_than_predicted_others_are_tried(
    least_times: float, limit: int, fits: bool
) -> None:
    """As long as what is known of predictions leaves room; else no compile is spent."""
    made: list[_Numbers] = []

    def trial(predicted: int, times: float = 1.15) -> _Numbers:
        total = round(times * predicted)
        made.append(_Numbers(predicted, total, None, total <= limit))
        return made[-1]

    class Turned:
        def at(
            self, target_bytes: int, low: _Numbers | None, high: _Numbers | None
        ) -> _Numbers | None:
            del low, high
            return trial(target_bytes) if target_bytes > 127 else self.least()

        def least(self) -> _Numbers:
            known = [t for t in made if t.predicted_bytes == 118]
            return known[0] if known else trial(118, least_times)

        def another(self) -> _Numbers | None:
            return None

    first, cut = trial(233), trial(198)
    found = search(Turned(), first, limit, left=lambda: 8 - len(made), known=[cut], tolerance=0.1)
    assert any(t.fits for t in found) == fits
    assert fits or len(made) == 3


def test_where_memory_buys_time_none_is_spent_on_less() -> None:
    make, compiled = _bench(1.0, 0)
    plan = _confirmed(PolicyPlanner(QUICK, 1.0, confirm=Confirm(9)), make, compiled)[1]
    assert plan.confirmed is not None and plan.confirmed.compiles <= 2


@given(share=st.floats(0.2, 1.2), chip=st.floats(0.1, 1.2))
@laws()
def test_a_program_that_a_chip_has_no_memory_for_is_known_by_its_size(
    share: float, chip: float
) -> None:
    """XLA:TPU refuses it, and says how large it is: what a fraction is of is known all the same."""
    make, toy = _bench(1.1, 100)
    plain = toy(make(PolicyPlanner(remat.policies.Unchanged()))).temp_bytes
    most = int(chip * plain)

    def compiled(made: _Made, before: Confirmed | None = None) -> Confirmed:
        found = toy(made, before)
        if found.temp_bytes > most:
            raise DeviceMemoryError("too large for a TPU", found.temp_bytes)
        return found

    try:
        made, plan = _confirmed(PolicyPlanner(QUICK, share, confirm=Confirm(8)), make, compiled)
    except BudgetError as error:
        assert (error.smallest_peak_bytes or 0) > min(int(share * plain), most)
        return
    assert plan.confirmed is not None and plan.budget_bytes == int(share * plain)
    assert toy(made).temp_bytes <= min(int(share * plain), most)


def test_a_fraction_of_what_cannot_be_compiled_is_no_budget() -> None:
    make, toy = _bench(1.1, 100)

    def failing(made: _Made, before: Confirmed | None = None) -> Confirmed:
        raise CompileError("no tiles for it")

    with pytest.raises(CompileError, match="no tiles for it"):
        _confirmed(PolicyPlanner(QUICK, 0.9, confirm=Confirm(8)), make, toy, failing)
    budget = toy(make(PolicyPlanner(remat.policies.Unchanged()))).temp_bytes
    plan = _confirmed(PolicyPlanner(QUICK, budget, confirm=Confirm(8)), make, toy, failing)[1]
    assert plan.budget_bytes == budget


@given(share=st.floats(0.2, 1.2), failing=st.sets(st.integers(0, 9)), is_fraction=st.booleans())
@laws()
def test_a_program_that_cannot_be_compiled_is_passed_over(
    share: float, failing: set[int], is_fraction: bool
) -> None:
    make, toy = _bench(1.1, 100)
    plain = toy(make(PolicyPlanner(remat.policies.Unchanged()))).temp_bytes
    calls = [-1]
    failed: dict[str, bool] = {}  # the last word on each plan

    def compiled(made: _Made, before: Confirmed | None = None) -> Confirmed:
        calls[0] += 1
        failed[made.plan.digest()] = calls[0] in failing
        if calls[0] in failing:
            raise CompileError("no tiles for it\nat length")
        return toy(made, before)

    budget = share if is_fraction else max(int(share * plain), 1)
    try:
        made, plan = _confirmed(
            PolicyPlanner(QUICK, budget, confirm=Confirm(8)), make, compiled, toy
        )
    except CompileError:
        assert all(failed.values()) and len(failed) >= 2
        return
    except BudgetError as error:
        assert error.smallest_peak_bytes is not None
        assert error.smallest_peak_bytes > int(share * plain)
        return
    assert plan.confirmed is not None and plan.budget_bytes is not None
    assert plan.confirmed.temp_bytes == toy(made).temp_bytes <= plan.budget_bytes
    has_failed = any(number in failing for number in range(calls[0] + 1))
    assert (
        any("could not be compiled (no tiles for it)" in note for note in plan.notes) == has_failed
    )
