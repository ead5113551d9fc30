"""What every registered policy promises, on random graphs and on random JAX programs."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from policy_table import POLICY_TABLE, PolicyRow, cuts, rows
from random_graphs import (
    GraphBuilder,
    blocks,
    chain,
    graphs,
    laws,
    relabelled,
    rngs,
    seeded_graph,
)

import remat
import remat.policies
from remat.core.errors import BudgetError, PolicyError
from remat.core.forms import stored_bytes
from remat.core.graph import Graph
from remat.memory.predict import peak_bytes, predict
from remat.planning.make import make_plan
from remat.planning.time_limit import TimeLimit
from remat.planning.within import plan_within
from remat.plans.plan import Plan
from remat.plans.simulate import simulate
from remat.policies import (
    POLICIES,
    BudgetPolicy,
    Decision,
    Full,
    MinCut,
    Names,
    Policy,
    SaveAll,
    get_policy,
    register_policy,
)
from remat.policies.base import as_policy, describe_options, required_saves
from remat.policies.registry import BuiltIn
from remat.policies.solvers.search import is_compilable
from remat.policies.solvers.search_walk import compile_kernel

ROOT = Path(__file__).parent.parent

# --- the table -----------------------------------------------------------------------------------


def test_the_table_covers_the_registry() -> None:
    assert {row.registered for row in POLICY_TABLE} == set(POLICIES)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_registered_name_makes_a_policy_of_that_name(name: str) -> None:
    assert get_policy(name).name == name
    assert isinstance(get_policy(name), Policy)


def test_an_unknown_name_is_an_error_with_the_nearest_match() -> None:
    with pytest.raises(PolicyError, match=r"did you mean 'min_cut'\?"):
        get_policy("mincut")


def test_type_checkers_see_the_classes_of_the_registry() -> None:
    """`remat.policies` imports them when they are used; what it lists for type checkers is a copy."""
    built_in = (built for built in POLICIES.values() if isinstance(built, BuiltIn))
    expected = {(f"remat.policies.{built.module}", built.class_name) for built in built_in}
    tree = ast.parse((ROOT / "policies" / "__init__.py").read_text())
    [listed] = [
        n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    found = {
        (str(line.module), line.names[0].name)
        for line in listed.body
        if isinstance(line, ast.ImportFrom)
    }
    assert found == expected | {("remat.policies.none", "Unchanged")}
    for _, name in found:
        assert getattr(remat.policies, name).__name__ == name
        assert name in dir(remat.policies)
    with pytest.raises(AttributeError, match="no attribute 'MinCat'"):
        _ = remat.policies.MinCat


def test_documents_list_the_registry() -> None:
    within = {name for name in POLICIES if isinstance(get_policy(name), BudgetPolicy)}
    text = (ROOT / "docs" / "policies.md").read_text()
    [line] = [x for x in text.splitlines() if '"min_cut"` (default)' in x]
    assert sorted(re.findall(r'`"(\w+)"`', line)) == sorted(POLICIES)
    table = re.findall(r"^\| \[`(\w+)`\]\(policies/\1\.md\) \|.*\| (.+) \|$", text, re.MULTILINE)
    assert [name for name, _ in table] == list(POLICIES)
    assert {name for name, answer in table if answer != "no"} == within
    assert {page.stem for page in (ROOT / "docs" / "policies").glob("*.md")} == set(POLICIES)
    api = (ROOT / "docs" / "api.md").read_text()
    [without] = [x for x in api.splitlines() if x.startswith("| `remat.policies.Unchanged`")]
    [budgets] = [x for x in api.splitlines() if x.startswith("| `remat.policies.Ilp`")]
    for listed, names in ((without, POLICIES.keys() - within), (budgets, within)):
        classes = {type(get_policy(name)).__name__ for name in names}
        assert set(re.findall(r"`remat\.policies\.(\w+)`", listed)) - {"Unchanged"} == classes
    budgets = (ROOT / "docs" / "budgets.md").read_text()
    [line] = [
        x for x in budgets.splitlines() if x.startswith("Policies that plan within a budget are")
    ]
    assert set(re.findall(r"`(\w+)`", line)) == within


# --- what is a policy ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """A policy that inherits from nothing."""

    keep: tuple[int, ...] = ()
    seconds: float = 8.0
    device: str = "h100"
    name: ClassVar[str] = "plain"

    def decide(self, graph: Graph) -> Decision:
        return Decision(required_saves(graph, frozenset(self.keep)))


@dataclass(frozen=True)
class PlainWithin(Plain):
    """The same, within a budget."""

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        return replace(self.decide(graph), notes=(f"{budget_bytes} bytes in {self.seconds} s",))


def test_a_plain_object_is_a_policy() -> None:
    policy = as_policy(Plain((1,)))
    assert policy is not None and not isinstance(policy, BudgetPolicy)
    assert policy == as_policy(Plain((1,))) and hash(policy) == hash(as_policy(Plain((1,))))
    assert (policy.name, policy.device, policy.implementations) == ("plain", "h100", "none")
    assert describe_options(policy) == "keep=(1,)"
    plan = make_plan(chain(3), policy)
    assert plan.saved_values == (1,) and plan.device == "h100"
    same = remat.plan(lambda x: jax.numpy.sin(x).sum(), jnp.ones(4), remat_policy=Plain())
    assert same.policy_name == "plain"
    within = as_policy(PlainWithin())
    assert isinstance(within, BudgetPolicy) and not within.falls_back
    assert TimeLimit(within).seconds == 8.0
    [note] = TimeLimit(within).decide_within(chain(3), 100).notes
    assert note.startswith("100 bytes in ") and float(note.split()[-2]) <= 4.0


def test_what_is_no_policy_is_none() -> None:
    for given_ in ("min_cut", None, 3, object(), jax.checkpoint_policies.everything_saveable, int):
        assert as_policy(given_) is None
    for cls in (Plain, MinCut):
        with pytest.raises(PolicyError, match=rf"{cls.__name__} is a class; pass an instance"):
            as_policy(cls)
    made = MinCut()
    assert as_policy(made) is made


def test_a_registered_factory_makes_policies() -> None:
    register_policy("plain", Plain)
    register_policy("nonsense", lambda: 3)
    try:
        assert get_policy("plain") == as_policy(Plain())
        with pytest.raises(PolicyError, match="'nonsense' made 3, which is no policy"):
            get_policy("nonsense")
        with pytest.raises(PolicyError, match="exists already"):
            register_policy("plain", Plain)
    finally:
        del POLICIES["plain"], POLICIES["nonsense"]


@rows()
def test_policies_are_frozen_hashable_and_equal_by_content(row: PolicyRow) -> None:
    one, other = row.factory(), row.factory()
    assert one == other and hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.name = "other"  # type: ignore[misc]
    assert describe_options(one) == describe_options(other)


# --- laws on random graphs -----------------------------------------------------------------------


@pytest.mark.parametrize("barriers", [True, False], ids=["barriers", "no-barriers"])
@rows()
@given(graph=graphs())
@laws()
def test_the_schedule_replays_and_ends_with_every_gradient(
    row: PolicyRow, barriers: bool, graph: Graph
) -> None:
    plan = make_plan(graph, row.factory(), barriers=barriers)
    for fused in (True, False):
        timeline = simulate(graph, plan.schedule, fused=fused).timeline
        assert min(timeline.live_bytes) >= 0
        assert len(timeline.live_bytes) == len(plan.schedule.steps)


@rows()
@given(graph=graphs())
@laws()
def test_nothing_runs_again_that_must_not(row: PolicyRow, graph: Graph) -> None:
    plan = make_plan(graph, row.factory())
    runs = Counter(plan.schedule.computed())
    for op in graph.ops:
        if not op.recomputable:
            assert runs[op.id] <= 1
        if op.effectful or op.phase == "backward":
            assert runs[op.id] == 1
        if row.recomputes_nothing:
            assert runs[op.id] <= 1


@rows()
@given(graph=graphs())
@laws()
def test_the_backward_pass_follows_from_what_is_saved(row: PolicyRow, graph: Graph) -> None:
    saved = row.factory().decide(graph).saved
    there = {*saved, *graph.inputs, *graph.constants, *graph.cotangents}
    assert all(graph.forward_values[value] for value in saved)
    allowed = {op.id for op in graph.ops if op.recomputable or op.phase == "backward"}
    for op in graph.ops:
        if op.id in allowed and there.issuperset(op.inputs):
            there.update(op.outputs)
        elif op.phase == "backward":
            assert not op.recomputable and there.issuperset(op.inputs)
    assert there.issuperset(graph.gradients)


@rows()
@given(graph=graphs())
@laws()
def test_plans_are_values(row: PolicyRow, graph: Graph) -> None:
    plan = make_plan(graph, row.factory())
    same = make_plan(Graph.from_json(graph.to_json()), row.factory())
    assert plan == same and hash(plan) == hash(same) and plan.digest() == same.digest()
    again = Plan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan) and again.digest() == plan.digest()
    assert len({plan, same, again}) == 1


@rows(lambda row: row.label_free)
@given(graph=graphs(), rng=rngs())
@laws()
def test_relabelling_a_graph_changes_no_decision(
    row: PolicyRow, graph: Graph, rng: random.Random
) -> None:
    moved = relabelled(graph, rng)
    decision = row.factory().decide(graph)
    other = row.factory().decide(moved.graph)
    assert {moved.values[value] for value in decision.saved} == other.saved
    assert decision.certificate == other.certificate


@rows()
@given(graph=graphs())
@laws()
def test_what_is_counted_as_recomputed_is_what_the_schedule_repeats(
    row: PolicyRow, graph: Graph
) -> None:
    plan = make_plan(graph, row.factory())
    runs = Counter(plan.schedule.computed())
    again = {op: times - 1 for op, times in runs.items() if times > 1}
    assert {entry.op: entry.times for entry in plan.recomputed} == again
    assert plan.recompute_flops == sum(graph.ops[op].flops * n for op, n in again.items())


@rows()
@given(graph=graphs())
@laws()
def test_recompute_seconds_count_every_repetition(row: PolicyRow, graph: Graph) -> None:
    from remat.core.cost import op_seconds
    from remat.core.devices import get_device

    plan = make_plan(graph, row.factory())
    device = get_device(plan.device)
    expected = sum(e.times * op_seconds(graph, graph.ops[e.op], device) for e in plan.recomputed)
    assert plan.recompute_seconds == pytest.approx(expected)


@rows()
@given(graph=graphs())
@laws()
def test_saved_entries_add_up_to_saved_bytes(row: PolicyRow, graph: Graph) -> None:
    plan = make_plan(graph, row.factory())
    counted = [e for e in plan.saved if e.value not in {*graph.inputs, *graph.outputs}]
    assert plan.saved_bytes == sum(entry.nbytes for entry in counted)
    for entry in plan.saved:
        value = graph.values[entry.value]
        elements = int(np.prod(value.shape))
        kept_bits = value.dtype == "bool" and not entry.is_input
        if plan.graph.values[entry.value].form is None:
            assert entry.nbytes == ((elements + 7) // 8 if kept_bits else value.nbytes)
        else:  # a form that the policy chose
            assert entry.nbytes == stored_bytes(value, entry.form) < value.nbytes
        assert entry.raw_bytes == value.nbytes
        assert entry.is_input == (entry.value in graph.inputs)


# --- within a budget -----------------------------------------------------------------------------

BUDGET_GRAPHS = {
    "chain": chain(5, heavy=True, fusible=False),
    "blocks": blocks(3),
    "random": seeded_graph(8),
}


@pytest.fixture(scope="module")
def _compiled_search() -> None:
    """Without it the first searches are in Python and end by the clock."""
    if is_compilable():
        compile_kernel()


def _within(row: PolicyRow, graph: Graph, budget: int) -> Plan | BudgetError:
    policy = row.factory()
    if any(field.name == "effort" for field, _ in policy.settings()):
        policy = policy.with_settings(effort=50)
    try:
        return plan_within(graph, policy, budget)
    except BudgetError as error:
        return error


@pytest.mark.usefixtures("_compiled_search")
@pytest.mark.parametrize("share", [0.8, 0.5])
@pytest.mark.parametrize("graph", BUDGET_GRAPHS.values(), ids=BUDGET_GRAPHS)
@rows()
def test_a_plan_is_within_its_budget_or_the_error_names_one_that_can_be_met(
    row: PolicyRow, graph: Graph, share: float
) -> None:
    budget = int(share * peak_bytes(graph))
    plan, same = (_within(row, Graph.from_json(graph.to_json()), budget) for _ in range(2))
    if isinstance(plan, BudgetError):
        named = plan.smallest_peak_bytes
        assert str(same) == str(plan)
        assert named is not None and named > budget and f"{named:,} bytes" in str(plan)
        budget, plan = named, _within(row, graph, named)
        assert isinstance(plan, Plan)
    else:
        assert plan == same
    assert plan.peak_bytes <= budget == plan.budget_bytes
    assert predict(plan.graph, plan.schedule).peak_bytes <= budget
    simulate(plan.graph, plan.schedule)  # which raises where something is read that is not there
    runs = Counter(plan.schedule.computed())
    for op in graph.ops:
        assert runs[op.id] <= 1 or (op.recomputable and op.phase == "forward")
        assert runs[op.id] <= 1 or not row.recomputes_nothing
    if row.exact and plan.certificate is not None:
        assert plan.certificate.value >= plan.certificate.bound


@cuts()
@given(graph=graphs())
@laws()
def test_an_optimal_plan_carries_a_certificate_without_gap(row: PolicyRow, graph: Graph) -> None:
    plan = make_plan(graph, row.factory())
    assert plan.status == "optimal"
    assert plan.certificate is not None
    assert plan.certificate.value == plan.certificate.bound
    assert plan.gap == 0.0


@given(graph=graphs())
@laws()
def test_save_all_keeps_at_most_the_baseline(graph: Graph) -> None:
    plan = make_plan(graph, SaveAll())
    assert plan.saved_bytes <= plan.baseline_saved_bytes
    assert plan.recompute_flops == 0


@given(graph=graphs(fusible_only=True))
@laws()
def test_full_keeps_only_arguments_of_a_pointwise_function(graph: Graph) -> None:
    plan = make_plan(graph, Full())
    assert all(entry.is_input for entry in plan.saved)
    assert plan.saved_bytes == 0


# --- names ---------------------------------------------------------------------------------------


def tagged_chain() -> Graph:
    builder = GraphBuilder()
    value = builder.input()
    values = []
    for i in range(3):
        value = builder.op("tanh", [value], tags=(f"layer_{i}",))
        values.append(value)
    gradient = builder.cotangent()
    for value in reversed(values):
        gradient = builder.op("mul", [value, gradient])
    return builder.build([values[-1]], [gradient])


def test_names_keeps_the_named_values_and_no_other() -> None:
    graph = tagged_chain()
    assert Names(("layer_1",)).decide(graph).saved == {2}
    assert Names().decide(graph).saved == {1, 2, 3}


def test_a_name_that_tags_nothing_is_an_error_that_lists_the_tags() -> None:
    tags = {tag for value in tagged_chain().values for tag in value.tags}
    with pytest.raises(PolicyError, match=r"'layr_1'.*layer_0.*did you mean 'layer_"):
        Names(("layer_0", "layr_1")).check_tags(tags)
    for policy in (Names(), Names("layer_0")):
        with pytest.raises(PolicyError, match="no checkpoint_name tags"):
            policy.check_tags(frozenset())
        policy.check_tags(tags)


def test_a_string_is_one_name() -> None:
    assert Names("layer_1") == Names(("layer_1",))
    for names in ((), (3,), ("layer_1", None)):
        with pytest.raises(PolicyError, match="expected names"):
            Names(names)  # type: ignore[arg-type]


def test_names_given_as_a_list_make_a_hashable_policy() -> None:
    assert hash(Names(["a", "b"])) == hash(Names(("a", "b")))  # type: ignore[arg-type]


def test_required_saves_stops_at_what_may_not_run_again() -> None:
    builder = GraphBuilder()
    x = builder.input()
    once = builder.op("mystery", [x])
    late = builder.op("tanh", [once])
    ct = builder.cotangent()
    graph = builder.build([late], [builder.op("mul", [late, ct])])
    assert required_saves(graph, frozenset()) == {once}
    assert required_saves(graph, frozenset({late})) == {late}


@pytest.mark.parametrize(
    "options",
    [
        {"memory_weight": -1},
        {"memory_weight": float("nan")},
        {"memory_weight": 1e9},
        {"heavy": "never"},
        {"random": "bann"},
        {"reduction_ratio": 0},
    ],
    ids=str,
)
def test_min_cut_refuses_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=next(iter(options))):
        MinCut(**options)


def test_only_changed_options_are_described() -> None:
    assert describe_options(MinCut()) == ""
    assert describe_options(MinCut(heavy="batched")) == "heavy='batched'"


# --- numerical -----------------------------------------------------------------------------------

Arrays = tuple[jax.Array, ...]
Term = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Of two earlier values, a weight matrix and a key."""


def _dropout(x: jax.Array, y: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0) + 0.1 * y


def _scan(x: jax.Array, y: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ w + row)
        return carry, jnp.sin(carry)

    return jax.lax.scan(body, x[0], y)[1]


TERMS: dict[str, Term] = {
    "tanh": lambda x, y, w, key: jnp.tanh(x + y),
    "matmul": lambda x, y, w, key: x @ w,
    "relu": lambda x, y, w, key: jax.nn.relu(x) - y,
    "where": lambda x, y, w, key: jnp.where(x > y, jnp.sin(x), y),
    "dropout": _dropout,
    "slice": lambda x, y, w, key: jnp.concatenate([x[2:], y[:2] * x[:2]]),
    "softmax": lambda x, y, w, key: jax.nn.softmax(x, axis=-1) * y,
    "normalize": lambda x, y, w, key: (x - x.mean(1, keepdims=True)) / (1.0 + x.std(1)[:, None]),
    "maximum": lambda x, y, w, key: x + jnp.max(y, axis=0),
    "scan": _scan,
    "split": lambda x, y, w, key: jnp.multiply(*jnp.split(jnp.concatenate([x, y]), 2)),
    "sort": lambda x, y, w, key: jnp.sort(x, axis=1) * y,
    "cumsum": lambda x, y, w, key: jnp.cumsum(0.1 * x, axis=0) + y,
    "cond": lambda x, y, w, key: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x) * y,
    "checkpointed": lambda x, y, w, key: jax.checkpoint(lambda a: jnp.cos(jnp.sin(a @ w)))(x) + y,
    "named": lambda x, y, w, key: checkpoint_name(jnp.sin(x * y), "first"),
}
Program = tuple[tuple[str, int, int], ...]


def function_of(program: Program) -> Callable[..., jax.Array]:
    """The loss that computes the terms in order, each of two earlier values, from the latest back."""

    def loss(weights: Arrays, x: jax.Array, key: jax.Array) -> jax.Array:
        values = [x, checkpoint_name(0.5 * x + weights[0][0], "second")]
        for index, (name, first, second) in enumerate(program):
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            w = weights[index % len(weights)]
            values.append(TERMS[name](a, b, w, jax.random.fold_in(key, index)))
        return jnp.mean(values[-1] ** 2) + jnp.mean(values[-2])

    return loss


def example_arguments() -> tuple[Arrays, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    weights = tuple(jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(2))
    return weights, jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), jax.random.key(1)


def programs(least: int = 1, most: int = 5) -> st.SearchStrategy[Program]:
    term = st.tuples(st.sampled_from(sorted(TERMS)), st.integers(0, 2), st.integers(0, 2))
    return st.lists(term, min_size=least, max_size=most).map(tuple)


def gradients(function: Callable[..., jax.Array]) -> Sequence[jax.Array]:
    compiled = jax.jit(jax.grad(function, argnums=(0, 1)))
    return jax.tree.leaves(compiled(*example_arguments()))


def assert_same_gradients(program: Program, row: PolicyRow) -> None:
    function = function_of(program)
    expected = gradients(function)
    actual = gradients(remat.checkpoint(function, remat_policy=row.factory()))
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        # Bit-equal as computed; XLA:CPU may contract a multiplication and an addition into one rounding
        # in one fusion and not in another, which is a last-bit difference per operation.
        if not np.array_equal(left, right):
            np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6)


@rows(lambda row: row.id != "names-first")
@given(program=programs())
@laws(2)
def test_gradients_equal_those_of_plain_jax(row: PolicyRow, program: Program) -> None:
    assert_same_gradients(program, row)


EVERY_TERM: Program = tuple((name, 0, 1) for name in TERMS)


@pytest.mark.sample(4)
@rows()
def test_gradients_of_a_program_with_every_term_equal_those_of_plain_jax(row: PolicyRow) -> None:
    assert_same_gradients(EVERY_TERM, row)


@pytest.mark.sample(2)
@rows()
def test_a_plan_read_from_json_gives_the_same_gradients(row: PolicyRow) -> None:
    function = function_of((("dropout", 0, 1), ("relu", 0, 0), ("scan", 0, 1), ("matmul", 0, 0)))
    plan = remat.plan(function, *example_arguments(), remat_policy=_with_names(row), argnums=(0, 1))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    expected = gradients(function)
    actual = gradients(remat.checkpoint(function, remat_policy=again))
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6)


def _with_names(row: PolicyRow) -> Policy:
    return Names() if row.registered == "names" else row.factory()


@pytest.mark.sample(4)
@rows()
def test_a_drawn_mask_large_enough_for_bits_is_drawn_again_alike(row: PolicyRow) -> None:
    key = jax.random.key(3)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        for i in range(2):
            mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
            x = jnp.where(mask, jnp.tanh(x @ w) * 2.0, 0.0)
            x = checkpoint_name(x, "dropped")
        return jnp.sum(x * x)

    x = jnp.ones((512, 128)) * 0.1
    w = jnp.eye(128)
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    function = remat.checkpoint(loss, remat_policy=_with_names(row))
    actual = jax.jit(jax.grad(function, argnums=(0, 1)))(x, w)
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(6)
@rows()
def test_eager_gradients_equal_jitted_ones(row: PolicyRow) -> None:
    function = remat.checkpoint(
        function_of((("relu", 0, 1), ("matmul", 0, 0), ("named", 0, 1))),
        remat_policy=row.factory(),
    )
    eager = jax.tree.leaves(jax.grad(function, argnums=(0, 1))(*example_arguments()))
    for left, right in zip(eager, gradients(function), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6)


def test_applying_a_plan_with_loops_reports_the_plan_that_was_applied() -> None:
    function = function_of((("scan", 0, 1),))
    made = remat.plan(function, *example_arguments(), remat_policy="min_cut", argnums=(0, 1))
    applied = remat.plan(function, *example_arguments(), remat_policy=made, argnums=(0, 1))
    assert made.loops
    assert applied == made


def test_a_plan_for_another_function_is_refused() -> None:
    made = remat.plan(function_of((("tanh", 0, 1),)), *example_arguments(), argnums=(0, 1))
    other = remat.checkpoint(function_of((("relu", 0, 1),)), remat_policy=made)
    with pytest.raises(remat.PlanError, match="another function"):
        gradients(other)


def test_chain_of_the_builder_is_what_its_docstring_says() -> None:
    graph = chain(2)
    assert [op.inputs for op in graph.ops] == [(0,), (1,), (2, 3), (1, 4)]
    assert (graph.outputs, graph.gradients) == ((2,), (5,))
