"""What the benchmarks compute themselves: equal models, bounds below the optimum, costs, and promised growth."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
import re
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_benchmarks import tiny

import remat
from benchmarks import ablation, budgets, coarsening, depth, encodings, gpu_worker, planners, search
from benchmarks.ablation import Ablated
from benchmarks.programs import Row
from models import gpt, lstm, mlp, resnet
from models.cases import CASES, materialize
from remat.core.devices import get_device
from remat.memory.predict import peak_bytes
from remat.policies import Ilp, Sublinear, get_policy
from remat.policies.base import Decision
from remat.policies.buffers.condense import buffers_of, condense
from remat.policies.solvers.problem import Problem, peak_of_order, replay

DEVICE = "h200"
MIB = 2**20
PICOSECONDS = 10**12
SETTINGS = ablation.Settings(seconds=5.0, ratios=(0.7,))
BLOCKS: dict[str, Any] = {"layers": 4, "batch": 2, "length": 8, "width": 16, "heads": 2}
LSTM_MICRO = lstm.LSTMConfig(vocab_size=64, width=8, dropout=0.1)
RESNET_MICRO = resnet.ResNetConfig(stages=(1, 2), block="basic", filters=2, classes=4)


# --- segments of the models


def _close(plain: Row, other: Row) -> None:
    """Asserts that two functions of equal arguments have equal values and gradients."""
    assert jax.tree.structure(plain.args) == jax.tree.structure(other.args)
    args = materialize(plain.args)
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    results = [
        jax.jit(jax.value_and_grad(row.function), compiler_options=options)(*args)
        for row in (plain, other)
    ]
    for left, right in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def _checkpoints(row: Row) -> int:
    """Checkpointed regions in the program."""
    text = str(jax.make_jaxpr(row.function)(*row.args))
    return len(re.findall(r" = (?:checkpoint|remat\d?)\[", text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "segment", "regions"),
    [
        (lambda **more: gpt.blocks_scanned(**BLOCKS, **more), 2, 1),
        (lambda **more: gpt.blocks_unrolled(**{**BLOCKS, "layers": 3}, **more), 2, 2),
        (lambda **more: lstm.lstm_loss(LSTM_MICRO, 2, 8, **more), 4, 2),
        (lambda **more: resnet.resnet_scalar_loss(RESNET_MICRO, 2, 8, **more), 2, 2),
    ],
    ids=["gpt_scanned", "gpt_unrolled", "lstm", "resnet"],
)
def test_segments_change_no_result(
    make: Callable[..., tuple[Any, Any]], segment: int, regions: int
) -> None:
    plain, segmented = Row("plain", *make()), Row("segments", *make(segment=segment))
    assert _checkpoints(plain) == 0
    assert _checkpoints(segmented) == regions
    _close(plain, segmented)


def test_segments_must_divide_what_is_scanned() -> None:
    with pytest.raises(ValueError, match="`segment` must divide `layers`: 3 and 4"):
        gpt.blocks_scanned(**BLOCKS, segment=3)
    loss, args = lstm.lstm_loss(LSTM_MICRO, 2, 8, segment=3)
    with pytest.raises(ValueError, match="`segment` must divide the length: 3 and 8"):
        jax.eval_shape(loss, *args)


def test_near_sqrt() -> None:
    assert [budgets.near_sqrt(n) for n in (1, 2, 8, 12, 16, 20)] == [1, 1, 3, 3, 4, 4]
    assert [budgets.near_sqrt(n, divisor=True) for n in (7, 8, 12, 128)] == [1, 2, 3, 8]


@pytest.mark.slow
def test_every_model_has_the_baselines() -> None:
    small = {
        "gpt_scanned": budgets.gpt_scanned(**BLOCKS),
        "gpt_unrolled": budgets.gpt_unrolled(**BLOCKS),
        "lstm": budgets.lstm_lm(LSTM_MICRO, 2, 8),
        "resnet50": budgets.resnet50(RESNET_MICRO, 2, 16),
    }
    assert set(small) == set(budgets.MODELS)
    for name, rows in small.items():
        labels = [row.label for row in rows]
        assert labels[:2] == [budgets.NONE, budgets.FULL] and len(labels) >= 5
        assert _checkpoints(rows[0]) == 0
        assert all(_checkpoints(row) > 0 for row in rows[1:]), name


def test_the_models_of_encodings_are_cases_and_their_tiny_versions_are_losses() -> None:
    for name, (full, small) in encodings.MODELS.items():
        assert full in CASES.values(), name
        loss, shapes = small()
        assert jax.eval_shape(loss, *shapes) == jax.ShapeDtypeStruct((), jnp.float32), name


# --- the compiler confirms what was promised


@pytest.mark.slow
@pytest.mark.gpu_compile
def test_budgets_are_kept_on_the_gpu_compiler() -> None:
    plain, args = mlp.residual_mlp(layers=6, width=32, hidden=32, batch=4096)

    def full(params: tuple[Any, ...], x: jax.Array) -> jax.Array:
        for weights in params:
            x = jax.checkpoint(mlp.layer)(weights, x)
        return jnp.mean(jnp.square(x), dtype=jnp.float32)

    rows = [Row(budgets.NONE, plain, args), Row(budgets.FULL, full, args)]
    none, less = (budgets.measure_baseline("mlp", row, DEVICE) for row in rows)
    assert less.temp_bytes < none.temp_bytes
    half = (none.temp_bytes + less.temp_bytes) // 2
    ours = budgets.measure_ours("mlp", rows[0], "between", "ours", half, DEVICE)
    assert budgets.violations([none, less, ours]) == []
    assert ours.error is None and none.matmuls <= ours.matmuls < less.matmuls


@pytest.mark.slow
@pytest.mark.gpu_compile
def test_the_gpu_compiler_sees_what_encodings_plan() -> None:
    settings = encodings.Settings(DEVICE, seconds=1.0, small=True, shares=(), references=())
    plain = Row("none", *encodings.MODELS["transformer"][1]())
    none, cut = (
        encodings.measure(_encoded(policy, settings), plain, settings)
        for policy in ("none", "min_cut")
    )
    assert cut.saved_bytes and none.saved_bytes and cut.saved_bytes < none.saved_bytes
    assert cut.temp_bytes < none.temp_bytes
    assert (cut.matmuls, cut.heavy_flops) == (none.matmuls, none.heavy_flops)


def _encoded(
    policy: str, settings: encodings.Settings, budget: int | None = None
) -> encodings.Encoded:
    kind = "baseline" if budget is None else "between"
    return encodings.Encoded("m", kind, policy, settings.code, budget, policy=policy)


def test_flops_are_those_of_the_products_that_run() -> None:
    """Forward `[8, 16] x [16, 4]`, backward its transposed product for the weights: each 2 * 8 * 16 * 4."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x @ w))

    shapes = (
        jax.ShapeDtypeStruct((16, 4), jnp.float32),
        jax.ShapeDtypeStruct((8, 16), jnp.float32),
    )
    settings = encodings.Settings("cpu", seconds=1.0, small=True)
    row = encodings.measure(_encoded("none", settings), Row("none", loss, shapes), settings)
    assert (row.matmuls, row.heavy_flops) == (2, 2 * 2 * 8 * 16 * 4)
    assert row.saved_bytes == 8 * 4 * 4  # the product; the arguments are alive anyway


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["budgets", "encodings", "ablation"])
def test_an_impossible_budget_is_a_row_with_the_smallest_peak(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "tiny", tiny)
    plain = Row("none", *tiny())
    settings = encodings.Settings("cpu", seconds=1.0, small=True)
    row = {
        "budgets": lambda: budgets.measure_ours("tiny", plain, "between", "ours", 100, "cpu"),
        "encodings": lambda: encodings.measure(_encoded("ilp", settings, 100), plain, settings),
        "ablation": lambda: ablation.measure(
            Ablated("tiny", "output", 0.01, "c", 100, 10_000, 1), SETTINGS
        ),
    }[program]()
    assert row.error is not None
    assert row.smallest_bytes is not None and row.smallest_bytes > 100


def test_signature_differences_are_relative_to_the_baseline() -> None:
    base = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0]), "n": jnp.array([7])}
    ours = {"a": jnp.array([3.0, 0.3]), "b": jnp.array([4.0]), "n": jnp.array([9])}
    same = gpu_worker.signature(base).differences(gpu_worker.signature(base))
    assert same == {"norm_relative": 0.0, "leaf_max_relative": 0.0}
    assert gpu_worker.signature(base).norm == 5.0
    found = gpu_worker.signature(ours).differences(gpu_worker.signature(base))
    assert found["leaf_max_relative"] == pytest.approx(0.1)
    assert found["norm_relative"] == pytest.approx(25.09**0.5 / 5 - 1, rel=1e-4)


# --- planners: sequences, and a floor below every one of them


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_decision_is_taken_apart_to_the_sequence_it_was_made_of(share: float) -> None:
    condensed = condense(planners.graph_of("gpt_tiny"))
    problem = condensed.problem
    decision = Ilp(effort=50).decide_within(condensed.graph, int(share * peak_of_order(problem)))
    assert decision.certificate is not None
    replayed = replay(problem, planners.sequence_of(condensed, decision))
    assert round(replayed.cost * 1e12) == decision.certificate.value
    unordered = dataclasses.replace(decision, order=None)  # what lowering takes it for then
    assert planners.sequence_of(condensed, unordered)[: problem.turn] == [*range(problem.turn)]


def _random_problem(rng: random.Random) -> Problem:
    count = rng.randint(3, 7)
    turn = rng.randint(1, count - 1)
    inputs = [rng.sample(range(n), min(n, rng.randint(0, 3))) for n in range(count)]
    return Problem.of(
        costs=[1.0] * count,
        sizes=[rng.randint(1, 5) for _ in range(count)],
        inputs=inputs,
        repeatable=[n < turn and rng.random() < 0.8 for n in range(count)],
        turn=turn,
    )


def _smallest_peak(problem: Problem) -> int:
    """The smallest peak of any sequence: the cheapest path, by its peak, over what has run and what is alive."""
    count = len(problem)
    best = {(0, frozenset[int]()): 0}
    queue = [(0, 0, ())]
    while queue:
        peak, done, alive = heapq.heappop(queue)
        if done == count:
            return peak
        if peak > best[done, frozenset(alive)]:
            continue
        again = [n for n in range(done) if problem.repeatable[n] and done >= problem.turn]
        for node in (*again, done):
            if not set(problem.inputs[node]) <= set(alive):
                continue
            others = [n for n in alive if n not in problem.inputs[node] and n != node]
            for kept in itertools.product((False, True), repeat=len(others)):
                held = {*itertools.compress(others, kept), *problem.inputs[node], node}
                now = max(peak, int(sum(problem.sizes[n] for n in held)))
                state = (max(done, node + 1), frozenset(held))
                if now < best.get(state, math.inf):
                    best[state] = now
                    heapq.heappush(queue, (now, state[0], tuple(sorted(held))))
    raise AssertionError("a sequence without repetitions always ends")


def test_no_sequence_is_below_the_window_floor() -> None:
    rng = random.Random(7)
    sharper = exact = 0
    for _ in range(80):
        problem = _random_problem(rng)
        bound, smallest = planners.window_floor_bytes(problem), _smallest_peak(problem)
        assert problem.floor_bytes <= bound <= smallest
        sharper += bound > problem.floor_bytes
        exact += bound == smallest
    assert sharper >= 5 and exact >= 20


def test_the_window_floor_of_a_value_that_is_remade_beside_a_gradient() -> None:
    # 0 -> 1 -> 2 forward, 3 = gradient of 2, 4 = weight gradient from 1 and 3: keeping 1 while 3 runs, or making
    # it again from 0 beside 3, takes three buffers; every node alone takes two.
    problem = Problem.of(
        costs=[1.0] * 6,
        sizes=[10, 10, 10, 10, 0, 0],
        inputs=[(), (0,), (1,), (2,), (1, 3), (0, 4)],
        repeatable=[True, True, True, False, False, False],
        turn=3,
    )
    assert problem.floor_bytes == 20
    assert planners.window_floor_bytes(problem) == 30 == _smallest_peak(problem)


# --- depth


def test_policies_of_the_depth_benchmark() -> None:
    assert set(depth.POLICIES) == set(depth.GROWTH)
    assert depth.POLICIES["recursive"] == Sublinear("recursive", 1)
    assert get_policy("sublinear") == depth.POLICIES["grid"]


def _promised(policy: str, layers: int) -> float:
    """Activations that a plan of residual layers may take; each layer keeps 4 without rematerialization."""
    return 4 * layers**0.5 if policy == "grid" else 2 * math.ceil(math.log2(layers))


def test_buffers_grow_with_the_square_root_or_the_logarithm_of_the_depth() -> None:
    """Peaks of the coarsened problem, in activations of 1 MiB; none of the compiler."""
    sizes = {"width": 32, "hidden": 32, "batch": 8192}
    for layers in (16, 36, 64):
        function, args = mlp.residual_mlp(layers=layers, **sizes)
        graph = remat.plan(function, *args, remat_policy="save_all").graph
        for name, policy in depth.POLICIES.items():
            found = depth.node_peak_bytes(graph, policy) / MIB
            if policy is None:
                assert found >= 4 * layers
            else:
                assert found <= _promised(name, layers) + 0.5, (
                    name
                )  # the masks, if any, and the loss


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.parametrize("policy", ["grid", "recursive"])
def test_the_compiler_takes_what_was_promised(policy: str) -> None:
    layers = 36
    row = depth.measure(layers, policy, DEVICE)
    activation = 16 * MIB
    assert row.temp_bytes <= _promised(policy, layers) * activation + 2**14  # and small tables


# --- search and coarsening


def test_optima_of_chains_are_those_of_the_closed_form() -> None:
    for steps, budgets_and_optima in search._CHAINS.items():
        for budget, optimum in budgets_and_optima.items():
            snapshots, rounds = budget - 2, 1
            while math.comb(snapshots + rounds, snapshots) < steps + 1:
                rounds += 1
            forward = rounds * (steps + 1) - math.comb(snapshots + rounds, rounds - 1)
            assert optimum == forward - steps


def test_candidates_are_fused_forward_values() -> None:
    graph = planners.graph_of("gpt_tiny")
    fused = coarsening.candidates(graph)
    buffers = buffers_of(graph)
    forward = {v for op in graph.forward_ops() for v in op.outputs}
    found = {v for values in fused.values() for v in values}
    assert found and found <= forward - buffers
    for name, values in fused.items():
        assert {graph.ops[cast(int, graph.values[v].producer)].name for v in values} == {name}


# --- ablation: costs of a small model


@pytest.fixture
def tiny_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "tiny", tiny)


def total(graph: Any) -> int:
    """Picoseconds of a program that repeats nothing."""
    return round(condense(graph).problem.total_cost * PICOSECONDS)


def test_with_all_the_memory_rewrites_only_save(tiny_case: None) -> None:
    """Three masks of 512 x 64 bits are neither written nor read; what the kinds save adds up."""
    graph = planners.graph_of("tiny")
    settings = dataclasses.replace(SETTINGS, seconds=60.0, ratios=(1.0,), rounding=True)
    done = ablation.run_model("tiny", settings, budgets.Results(None, [], settings.device))
    rows = {row.implementations: row for row in done}
    assert list(rows) == ["none", "output", "intermediate", "exact", "all"]
    for row in done:
        assert row.error is None and row.baseline_picoseconds == total(graph)
        assert row.baseline_peak_bytes == row.budget_bytes == peak_bytes(graph)
        assert row.predicted_bytes <= row.budget_bytes
    none, output, intermediate, exact = done[:4]
    assert none.picoseconds == total(graph) and none.overhead == 0.0
    masks = 3 * 512 * 64 // 8
    assert none.picoseconds - output.picoseconds == round(
        2 * masks / get_device("h200").memory_bytes_per_second * PICOSECONDS
    )
    assert intermediate.picoseconds < output.picoseconds
    both = output.picoseconds + intermediate.picoseconds - none.picoseconds
    assert abs(exact.picoseconds - both) <= 1  # of rounding
    assert [row.sites for row in done[:4]] == [
        {},
        {"mask_from_output": 3},
        {"pool_codes": 1},
        {"pool_codes": 1, "mask_from_output": 3},
    ]
    assert ablation.violations(done) == []


@pytest.mark.slow
def test_with_less_memory_one_layer_runs_again_where_nothing_is_rewritten(tiny_case: None) -> None:
    graph = planners.graph_of("tiny")
    peak = peak_bytes(graph)
    budget = int(0.9 * peak)
    none, exact = (
        ablation.measure(Ablated("tiny", name, 0.9, "c", budget, peak, total(graph)), SETTINGS)
        for name in ("none", "exact")
    )
    condensed = condense(graph)
    costs = condensed.problem.costs
    product, relu = costs[0], costs[1]  # every layer costs the same
    assert none.picoseconds == round((condensed.problem.total_cost + product + relu) * PICOSECONDS)
    # Rewritten, a product is not repeated: what is, costs less than a layer.
    assert exact.picoseconds - total(graph) < product * PICOSECONDS
    assert exact.overhead < none.overhead and none.overhead > 0
    for row in (none, exact):
        assert row.predicted_bytes <= budget
        assert row.overhead == row.picoseconds / total(graph) - 1


def test_a_plan_without_a_certificate_is_replayed(tiny_case: None) -> None:
    function, args = tiny()
    plan = remat.plan(function, *args, remat_policy="full")
    assert plan.certificate is None
    condensed = condense(plan.graph)
    sequence = ablation.sequence_of(condensed, Decision(frozenset(plan.saved_values)))
    extra = replay(condensed.problem, sequence).extra_cost
    cost = ablation._picoseconds(plan, "h200")
    assert cost == round((condensed.problem.total_cost + extra) * PICOSECONDS) > total(plan.graph)


def test_loops_have_no_single_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0])

    shapes = (jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32"))
    monkeypatch.setitem(CASES, "looped", lambda: (loss, shapes))
    with pytest.raises(ValueError, match="a program with loops has no single cost: \\['scan0'\\]"):
        ablation.measure(Ablated("looped", "none", 1.0, "c", 10**6, 10**6, 1), SETTINGS)
