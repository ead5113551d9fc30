"""`MinCut` is minimal for its objective (brute force), respects its bans, and finds the paper's cuts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from policy_table import PolicyRow, cuts
from random_graphs import GraphBuilder, graphs, laws

import remat
from remat.core.devices import get_device
from remat.core.graph import Graph, Op
from remat.plans.plan import Plan
from remat.plans.record import Saved
from remat.policies import MinCut, SaveAll

INFINITY = float("inf")
CONVOLUTION = "conv_general_dilated"


# --- an evaluation of the objective, written from the module's docstring and the paper ------------


def size_of(graph: Graph, value: int) -> int:
    """Bytes of a kept value: booleans one bit per element (departure 3)."""
    entry = graph.values[value]
    return (entry.nbytes + 7) // 8 if entry.dtype == "bool" else entry.nbytes


def price_of_keeping(graph: Graph, policy: MinCut, value: int) -> int:
    """Algorithm 2 in units of 1/64 byte, plus memory (departure 4), plus one unit per value."""
    entry = graph.values[value]
    alive = value in graph.inputs or value in graph.outputs
    written = alive or not graph.ops[entry.producer or 0].fusible
    for op in graph.ops:
        if op.phase == "forward" and value in op.inputs and not op.fusible:
            written = True
    assert policy.memory_weight is not None
    memory = 0 if alive else round(64 * policy.memory_weight)
    return size_of(graph, value) * ((64 if written else 128) + memory) + 1


def price_of_running(graph: Graph, policy: MinCut, op: Op) -> float:
    """Bans of sections 3.1 and 3.4 as infinity; departures 5 and 6 as prices in 1/64 byte."""
    made = sum(graph.values[v].nbytes for v in op.outputs)
    read = sum(graph.values[v].nbytes for v in op.inputs)
    if not op.recomputable:
        return INFINITY
    if op.heavy:
        if policy.heavy == "ban" or (policy.heavy == "batched" and not op.batched):
            return INFINITY
        device = get_device(policy.device)
        dtype = graph.values[op.outputs[0]].dtype if op.outputs else "float32"
        spelt = {"float32": "f32", "bfloat16": "bf16", "bool": "pred"}[dtype]
        rate = int(device.matmul_flops_per_second(spelt))
        compute = 64 * op.flops * int(device.memory_bytes_per_second) // rate
        return max(compute, 64 * (2 * made + read))
    if op.random and made > 1024 and policy.random == "ban":
        return INFINITY
    if op.kind == "REDUCTION" and read >= policy.reduction_ratio * made:
        return INFINITY
    if not op.fusible:
        return INFINITY
    forced = 0
    for value in op.outputs:
        readers = [graph.ops[user] for user in graph.users[value]]
        if any(reader.phase == "backward" and not reader.fusible for reader in readers):
            forced += graph.values[value].nbytes
            if policy.memory_weight == 0:
                return INFINITY
    return 2 * 64 * forced


def price(graph: Graph, policy: MinCut, kept: frozenset[int]) -> float:
    """What keeping `kept` costs: what the backward pass reaches of it, and what it runs to get there."""
    reached, runs = reached_from_backward(graph, kept)
    total: float = sum(price_of_keeping(graph, policy, value) for value in reached)
    return total + sum(price_of_running(graph, policy, graph.ops[op]) for op in runs)


def reached_from_backward(graph: Graph, kept: frozenset[int]) -> tuple[set[int], set[int]]:
    """The kept values and inputs the backward pass reads, and the operators it runs again."""
    todo, seen = list(graph.backward_reads), set()
    reached: set[int] = set()
    runs: set[int] = set()
    while todo:
        value = todo.pop()
        if value in seen or value in graph.constants:
            continue
        seen.add(value)
        producer = graph.values[value].producer
        if value in kept or producer is None:
            reached.add(value)
        else:
            runs.add(producer)
            todo += graph.ops[producer].inputs
    return reached, runs


def computed_values(graph: Graph) -> list[int]:
    return [v for op in graph.forward_ops() for v in op.outputs]


# --- departure 4: the weight of memory where none is given -----------------------------------------


def kept_bytes(graph: Graph, kept: Iterable[int]) -> int:
    """Bytes of what is alive only because it is kept."""
    alive = {*graph.inputs, *graph.outputs}
    return sum(size_of(graph, v) for v in kept if v not in alive and graph.values[v].savable)


def bar_of(graph: Graph, policy: MinCut) -> int | None:
    """Bytes of what may not run again, None where convolutions outweigh matmuls."""
    at_all = replace(policy, memory_weight=1)
    banned = [op for op in graph.forward_ops() if price_of_running(graph, at_all, op) == INFINITY]
    heavy = [(op.name, graph.values[v].nbytes) for op in banned if op.heavy for v in op.outputs]
    matmuls = sum(nbytes for name, nbytes in heavy if name != CONVOLUTION)
    if matmuls <= sum(nbytes for name, nbytes in heavy if name == CONVOLUTION):
        return None
    return kept_bytes(graph, (v for op in banned for v in op.outputs))


def explicit(row: PolicyRow, graph: Graph) -> MinCut:
    """The row's policy with the weight of memory that its description asks for, found by halving."""
    policy = row.factory()
    assert isinstance(policy, MinCut)
    if policy.memory_weight is not None:
        return policy
    bar = bar_of(graph, policy)

    def at(weight: int) -> MinCut:
        return replace(policy, memory_weight=weight / 64)

    def fits(weight: int) -> bool:
        return bar is None or kept_bytes(graph, at(weight).decide(graph).saved) <= bar

    low, high = 80, 1024 * 64
    if fits(low):
        return at(low)
    if not fits(high):  # what may run again at a price, at one beyond all reason
        return at(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return at(high)


@cuts()
@given(graph=graphs(max_forward=9, max_backward=6), convolutions=st.sets(st.integers(0, 15)))
@laws(200)
def test_the_weight_is_the_least_that_keeps_no_more_than_what_is_banned(
    row: PolicyRow, graph: Graph, convolutions: set[int]
) -> None:
    policy = row.factory()
    graph = replace(
        graph,
        ops=tuple(
            replace(op, name=CONVOLUTION) if op.heavy and op.id in convolutions else op
            for op in graph.ops
        ),
    )
    assert isinstance(policy, MinCut)
    expected = explicit(row, graph)
    assert policy.decide(graph).saved == expected.decide(graph).saved


@cuts()
@given(graph=graphs(max_forward=5, max_backward=4))
@laws(60)
def test_no_set_of_values_is_cheaper(row: PolicyRow, graph: Graph) -> None:
    policy = explicit(row, graph)
    values = computed_values(graph)
    assume(len(values) <= 10)
    decision = policy.decide(graph)
    assert decision.certificate is not None
    computed = frozenset(v for v in decision.saved if v not in graph.inputs)
    assert price(graph, policy, computed) == decision.certificate.value
    _, fewest = reached_from_backward(graph, computed)
    for count in range(len(values) + 1):
        for chosen in itertools.combinations(values, count):
            found = price(graph, policy, frozenset(chosen))
            assert found >= decision.certificate.value
            if found == decision.certificate.value:  # of all minima the one nearest to the backward
                assert fewest <= reached_from_backward(graph, frozenset(chosen))[1]


@cuts()
@given(graph=graphs())
@laws(60)
def test_the_certificate_is_the_price_of_the_decision(row: PolicyRow, graph: Graph) -> None:
    policy = explicit(row, graph)
    decision = policy.decide(graph)
    assert decision.certificate is not None
    assert decision.certificate.value == decision.certificate.bound
    assert price(graph, policy, decision.saved) == decision.certificate.value
    everything = SaveAll().decide(graph).saved
    assert decision.certificate.value <= price(graph, policy, everything)


@cuts()
@given(graph=graphs())
@laws(60)
def test_what_is_saved_is_needed(row: PolicyRow, graph: Graph) -> None:
    saved = row.factory().decide(graph).saved
    reached, _ = reached_from_backward(graph, saved)
    assert saved == reached


# --- bans ----------------------------------------------------------------------------------------


def small_behind_large(
    name: str, large: tuple[int, ...] = (4096,), **fields: Any
) -> tuple[Graph, int, int]:
    """A small argument, an operator that makes a large value of it, which the backward pass reads.

    Unless the operator is banned the argument is what is kept. Returns graph, argument, large value.
    """
    builder = GraphBuilder()
    x = builder.input((1024,))
    made = builder.op(name, [x], large, **fields)
    y = builder.op("tanh", [made], large)
    ct = builder.cotangent(large)
    return builder.build([y], [builder.op("mul", [ct, made], large)]), x, made


BANNED: dict[str, dict[str, Any]] = {
    "may not run again": {"name": "tanh", "recomputable": False, "reason": "test"},
    "heavy": {"name": "dot"},
    "random": {"name": "bits"},
    "does not fuse": {"name": "gather"},
    "effectful": {"name": "callback"},
}


@pytest.mark.parametrize("policy", [MinCut(), MinCut.paper()], ids=["default", "paper"])
@pytest.mark.parametrize("fields", BANNED.values(), ids=BANNED.keys())
def test_a_banned_operator_does_not_run_again(policy: MinCut, fields: dict[str, Any]) -> None:
    graph, _, made = small_behind_large(**fields)
    assert policy.decide(graph).saved == {made}


@pytest.mark.parametrize("policy", [MinCut(), MinCut.paper()], ids=["default", "paper"])
def test_a_fusible_operator_runs_again(policy: MinCut) -> None:
    graph, x, _ = small_behind_large("broadcast")
    assert policy.decide(graph).saved == {x}


@pytest.mark.parametrize(
    "elements, ratio, kept",
    [(1, 4, True), (256, 4, True), (257, 4, False), (256, 5, False), (1024, 1, True)],
)
def test_a_reduction_whose_result_is_four_times_smaller_is_kept(
    elements: int, ratio: int, kept: bool
) -> None:
    # The argument is read by the backward pass anyway, so that nothing but the ban keeps the sum.
    builder = GraphBuilder()
    x = builder.input((1024,))
    total = builder.op("sum", [x], (elements,))
    y = builder.op("mul", [x, total], (1024,))
    ct = builder.cotangent((1024,))
    gradients = [builder.op("mul", [ct, v], (1024,)) for v in (x, total)]
    graph = builder.build([y], gradients)
    saved = MinCut(reduction_ratio=ratio).decide(graph).saved
    assert saved == ({x, total} if kept else {x})


def test_cheap_randomness_is_drawn_again_on_request() -> None:
    graph, x, made = small_behind_large("bits")
    assert MinCut(random="cheap").decide(graph).saved == {x}
    assert MinCut(random="ban").decide(graph).saved == {made}


def test_only_the_paper_bans_what_a_backward_operator_cannot_fuse() -> None:
    builder = GraphBuilder()
    x = builder.input((1024,))
    a = builder.op("tanh", [x], (1024,))
    y = builder.op("tanh", [a], (1024,))
    ct = builder.cotangent((1024,))
    graph = builder.build([y], [builder.op("dot", [ct, a], (1024,))])
    assert MinCut.paper().decide(graph).saved == {a}
    # Keeping costs 2 + 1.25 per byte, running again 2 and reading the argument 1.
    assert MinCut().decide(graph).saved == {x}
    assert MinCut(memory_weight=0.75).decide(graph).saved == {a}


def test_batched_matmuls_run_again_only_where_allowed() -> None:
    graph, x, made = small_behind_large("batched_dot", flops=1)
    assert MinCut().decide(graph).saved == {made}
    assert MinCut(heavy="batched", memory_weight=100).decide(graph).saved == {x}
    plain, x, made = small_behind_large("dot", flops=1)
    assert MinCut(heavy="batched", memory_weight=100).decide(plain).saved == {made}
    assert MinCut(heavy="roofline", memory_weight=100).decide(plain).saved == {x}


def test_a_dear_matmul_is_kept_at_its_roofline_price() -> None:
    graph, _, made = small_behind_large("dot", flops=10**15)
    assert MinCut(heavy="roofline", memory_weight=100).decide(graph).saved == {made}


def test_one_result_of_several_is_not_kept_if_the_operator_runs_again() -> None:
    builder = GraphBuilder()
    x = builder.input((8,))
    first, second = builder.ops_with("split", [x], [((512,), "float32", ())] * 2)
    y = builder.op("add", [first, second], (512,))
    ct = builder.cotangent((512,))
    graph = builder.build([y], [builder.op("mul", [ct, first, second], (512,))])
    assert MinCut().decide(graph).saved == {x}


def test_values_of_one_tebibyte_are_priced_exactly() -> None:
    graph, x, made = small_behind_large("broadcast")
    values = list(graph.values)
    values[x] = replace(values[x], nbytes=1 << 40)
    values[made] = replace(values[made], nbytes=(1 << 40) - 1)
    large = replace(graph, values=tuple(values))
    decision = MinCut.paper().decide(large)  # one read of x against a write and a read of made
    assert decision.saved == {x}
    assert decision.certificate is not None
    assert decision.certificate.value == 64 * (1 << 40) + 1


def test_a_banned_result_that_may_not_be_kept_leaves_a_plan() -> None:
    builder = GraphBuilder()
    x = builder.input((1024,))
    made = builder.op("gather", [x], (1024,))
    y = builder.op("tanh", [made], (1024,))
    ct = builder.cotangent((1024,))
    graph = builder.build([y], [builder.op("mul", [ct, made], (1024,))])
    values = list(graph.values)
    values[made] = replace(values[made], savable=False)
    saved = MinCut().decide(replace(graph, values=tuple(values))).saved
    assert saved == {x}


# --- the paper's cases, on JAX functions ----------------------------------------------------------


def arrays(plan: Plan) -> list[Saved]:
    """What is kept and costs memory: neither arguments nor scalars."""
    return [entry for entry in plan.saved if not entry.is_input and entry.nbytes > 8]


POLICIES = pytest.mark.parametrize("policy", [MinCut(), MinCut.paper()], ids=["default", "paper"])


@POLICIES
def test_cosine_of_cosine_of_a_sum_keeps_the_sum(policy: MinCut) -> None:
    def loss(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        return jnp.cos(jnp.cos(a + b + c + d))

    x = jnp.ones((256,))
    plan = remat.plan(loss, x, x, x, x, argnums=(0, 1, 2, 3), remat_policy=policy)
    assert [(entry.op, entry.label) for entry in plan.saved] == [("add", "f32[256]")]
    assert plan.saved_bytes == 1024


@POLICIES
def test_a_random_mask_is_kept_at_one_bit_per_element(policy: MinCut) -> None:
    def loss(x: jax.Array, key: jax.Array) -> jax.Array:
        return x * (jax.random.uniform(key, x.shape) < 0.5)

    plan = remat.plan(loss, jnp.ones((256, 64)), jax.random.key(0), remat_policy=policy)
    assert plan.saved_bytes <= 256 * 64 // 8
    assert all(entry.form == "bits" for entry in arrays(plan))


@POLICIES
def test_gelu_written_out_keeps_its_argument_only(policy: MinCut) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))

    plan = remat.plan(loss, jnp.ones((256,)), remat_policy=policy)
    assert [entry.is_input for entry in plan.saved] == [True]
    assert plan.saved_bytes == 0


@POLICIES
def test_an_outer_product_under_a_sum_keeps_nothing_large(policy: MinCut) -> None:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cos(a * b), 1)

    n = 128
    plan = remat.plan(loss, jnp.ones((n, 1)), jnp.ones((1, n)), argnums=(0, 1), remat_policy=policy)
    assert all(entry.raw_bytes < 4 * n * n for entry in plan.saved)
    assert plan.saved_bytes == 0


@POLICIES
def test_tanh_of_tanh_keeps_its_argument_only(policy: MinCut) -> None:
    plan = remat.plan(lambda x: jnp.tanh(jnp.tanh(x)), jnp.ones((256,)), remat_policy=policy)
    assert plan.saved_bytes == 0
    assert all(entry.is_input or entry.value in plan.graph.outputs for entry in plan.saved)


def decisions(plan: Plan) -> list[tuple[str, str, str, int]]:
    return sorted((e.op, e.label, e.form, e.nbytes) for e in plan.saved)


def mixed(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ w)
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0.0)
    return jnp.sum(jax.nn.softmax(h @ w.T) ** 2)


def test_a_function_planned_twice_gives_equal_plans() -> None:
    args = (jnp.ones((16, 32)), jnp.ones((32, 64)), jax.random.key(0))
    first = remat.plan(mixed, *args, argnums=(0, 1))
    second = remat.plan(lambda *a: mixed(*a), *args, argnums=(0, 1))
    assert decisions(first) == decisions(second)
    assert first.digest() == second.digest()


def test_the_order_of_arguments_changes_no_decision() -> None:
    x, w, key = jnp.ones((16, 32)), jnp.ones((32, 64)), jax.random.key(0)
    first = remat.plan(mixed, x, w, key, argnums=(0, 1))
    turned = remat.plan(lambda key, w, x: mixed(x, w, key), key, w, x, argnums=(1, 2))
    assert decisions(first) == decisions(turned)
    assert first.certificate == turned.certificate


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: jnp.max(jnp.tanh(x), axis=0),
        lambda x: jnp.sort(jnp.tanh(x), axis=0),
        lambda x: jnp.cumsum(jnp.tanh(x), axis=0),
        lambda x: jnp.cumprod(jnp.tanh(x), axis=0),
        lambda x: jnp.tanh(x).std(0),
        lambda x: jnp.linalg.norm(jnp.tanh(x), axis=1),
        lambda x: jnp.prod(jnp.tanh(x), axis=0),
    ],
    ids=["max", "sort", "cumsum", "cumprod", "std", "norm", "prod"],
)
def test_a_plan_for_policy_lowering_exists(loss: Any) -> None:
    remat.plan(loss, jnp.ones((64, 16)), lowering="policy")


def test_a_loop_keeps_what_is_the_same_in_every_iteration_once() -> None:
    """Weights put together in a loop's body: made again in every iteration they would be written in each."""
    builder = GraphBuilder()
    weights = builder.input((1024,))
    made = builder.op("tanh", [weights], (4096,))
    y = builder.op("tanh", [made], (4096,))
    ct = builder.cotangent((4096,))
    graph = builder.build([y], [builder.op("dot", [ct, made], (1024,))])
    assert MinCut().decide(graph).saved == {weights}
    body = replace(graph, multiplicity=100, invariant=(weights,))
    assert MinCut().decide(body).saved == {made}
    assert MinCut().decide(replace(body, invariant=())).saved == {weights}
