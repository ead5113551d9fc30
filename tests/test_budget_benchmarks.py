"""The benchmarks of budgets: their checks find what is missed, their small versions hold what they promise."""

from __future__ import annotations

import dataclasses
import heapq
import importlib.util
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from benchmarks import budgets, coarsening, depth, planners, search
from benchmarks.budgets import Measured
from benchmarks.depth import Depth
from benchmarks.planners import Solved
from benchmarks.programs import Row
from models import gpt, lstm, mlp, resnet
from models.cases import materialize
from remat.policies import Ilp, Sublinear, get_policy
from remat.policies.buffers.condense import buffers_of, condense
from remat.policies.solvers.problem import Problem, peak_of_order, replay

DEVICE = "h200"
_HAS_PLUGIN = any(
    importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.{name}")
    for name in ("xla_cuda13", "xla_cuda12")
)
needs_gpu_compiler = pytest.mark.skipif(
    not _HAS_PLUGIN, reason="XLA:GPU is not installed: pip install 'remat[deviceless]' (Linux)"
)
MIB = 2**20
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


# --- budgets: the check

FULL = Measured("m", "baseline", budgets.FULL, "c", None, None, 100 * MIB, 50, 30, 5, 9, 3.0)
DOTS = dataclasses.replace(
    FULL, label="dots", temp_bytes=200 * MIB, traffic_bytes=40, matmuls=20, roofline_seconds=2.0
)
NONE = dataclasses.replace(
    FULL,
    label=budgets.NONE,
    temp_bytes=400 * MIB,
    traffic_bytes=45,
    matmuls=20,
    roofline_seconds=2.5,
)
OURS = Measured(
    "m", "at a baseline", "ours", "c", 200 * MIB, 190 * MIB, 200 * MIB, 40, 20, 5, 9, 2.0
)
BASELINES = [NONE, FULL, DOTS]


def test_a_row_that_equals_the_best_baseline_misses_nothing() -> None:
    assert budgets.violations([*BASELINES, OURS]) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"temp_bytes": 200 * MIB + 1},
            "compiled temp is 200.0 MiB (+1 bytes; predicted 190.0 MiB)",
        ),
        (
            {"traffic_bytes": 2**30},
            "traffic is 1.000 GiB, that of 'dots' 0.000 GiB",
        ),
        ({"matmuls": 21}, "26 matmuls and convolutions, 'dots' runs 25"),
        ({"convolutions": 6}, "26 matmuls and convolutions, 'dots' runs 25"),
        (
            {"error": "...", "smallest_bytes": 210 * MIB},
            "no plan found (smallest 210.0 MiB), though 'dots' takes 200.0 MiB",
        ),
    ],
)
def test_what_is_missed_is_a_line(changes: dict[str, Any], line: str) -> None:
    row = dataclasses.replace(OURS, **changes)
    assert budgets.violations([*BASELINES, row]) == [f"m, ours, budget 200.0 MiB: {line}"]


def test_the_baseline_to_beat_is_the_fastest_that_fits() -> None:
    at_none = dataclasses.replace(OURS, budget_bytes=400 * MIB, matmuls=21)
    (line,) = budgets.violations([*BASELINES, at_none])
    assert "'dots'" in line  # not 'none', which fits too
    at_full = dataclasses.replace(OURS, budget_bytes=150 * MIB, temp_bytes=MIB, traffic_bytes=50)
    assert budgets.violations([*BASELINES, at_full]) == []  # only 'full' fits


def test_between_baselines_only_the_budget_is_checked() -> None:
    row = dataclasses.replace(OURS, kind="between", matmuls=99, traffic_bytes=2**40)
    assert budgets.violations([*BASELINES, row]) == []
    above = dataclasses.replace(row, temp_bytes=201 * MIB)
    assert len(budgets.violations([*BASELINES, above])) == 1
    impossible = dataclasses.replace(row, budget_bytes=MIB, error="...", smallest_bytes=2 * MIB)
    assert budgets.violations([*BASELINES, impossible]) == []  # no baseline fits either


def test_every_missed_limit_is_a_line() -> None:
    row = dataclasses.replace(OURS, temp_bytes=2**40, traffic_bytes=2**40, matmuls=99)
    assert len(budgets.violations([*BASELINES, row])) == 3


def test_budgets_lie_evenly_between_two() -> None:
    assert budgets.between(100, 700, 5) == [200, 300, 400, 500, 600]
    assert budgets.between(100, 700, 0) == []


# --- budgets: rows


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
        assert labels[:2] == [budgets.NONE, budgets.FULL]
        assert labels[2].startswith("dots_saveable")
        assert labels[3].startswith("dots_with_no_batch_dims_saveable")
        assert labels[4].startswith("sqrt(n) segments, of 2")
        assert _checkpoints(rows[0]) == 0
        assert all(_checkpoints(row) > 0 for row in rows[1:]), name


def _mlp_rows() -> list[Row]:
    """Residual layers whose activations take the memory, and their hand-made checkpoints."""
    plain, args = mlp.residual_mlp(layers=6, width=32, hidden=32, batch=4096)

    def full(params: tuple[Any, ...], x: jax.Array) -> jax.Array:
        for weights in params:
            x = jax.checkpoint(mlp.layer)(weights, x)
        return jnp.mean(jnp.square(x), dtype=jnp.float32)

    return [Row(budgets.NONE, plain, args), Row(budgets.FULL, full, args)]


def test_rows_are_written_at_once_and_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "budgets.json"
    rows = _mlp_rows()
    results = budgets.Results(path, [], "cpu")
    done = budgets.run_model("mlp", rows, "cpu", 1, results)
    assert budgets.read_rows(path) == done
    assert [row.kind for row in done] == ["baseline"] * 2 + ["between"] + [
        "at a baseline",
        "fitted",
    ] * 2
    none, full = (row.temp_bytes for row in done[:2])
    assert [row.budget_bytes for row in done[2:]] == [(none + full) // 2, none, none, full, full]
    assert all(row.temp_bytes > 0 for row in done if row.error is None)
    fitted = [row for row in done if row.kind == "fitted" and row.error is None]
    assert fitted and all(row.temp_bytes <= (row.budget_bytes or 0) for row in fitted)
    assert all(1 <= row.compiles <= 6 for row in fitted)
    assert capsys.readouterr().out.count("\n") == 2 + len(done)

    def never(*arguments: Any) -> Any:
        raise AssertionError(f"made again: {arguments}")

    again = budgets.Results(path, budgets.read_rows(path), "cpu")
    for name in ("measure_baseline", "measure_ours", "measure_fitted"):
        monkeypatch.setattr(budgets, name, never)
    assert budgets.run_model("mlp", rows, "cpu", 1, again) == done
    assert json.loads(path.read_text())["device"] == "cpu"


def test_rows_of_other_code_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    old = dataclasses.replace(OURS, code="old")
    other = dataclasses.replace(OURS, model="other")
    results = budgets.Results(path, [old, other], "cpu")
    fresh = dataclasses.replace(OURS, matmuls=1)
    assert results.row(OURS, lambda: fresh) == fresh
    assert budgets.read_rows(path) == [fresh, other]


def test_the_hash_of_a_baseline_does_not_depend_on_the_planner() -> None:
    hashes = {
        budgets.code_of(device, planned=planned)
        for device in ("cpu", "h200")
        for planned in (False, True)
    }
    assert len(hashes) == 4


def test_an_impossible_budget_is_a_row_with_the_smallest_peak() -> None:
    plain = _mlp_rows()[0]
    row = budgets.measure_ours("mlp", plain, "between", "ours", 1000, "cpu")
    assert row.error is not None
    assert row.smallest_bytes is not None and row.smallest_bytes > 1000
    assert "infeasible" in budgets._line(row)


@pytest.mark.gpu_compile
@needs_gpu_compiler
def test_budgets_are_kept_on_the_gpu_compiler() -> None:
    rows = _mlp_rows()
    none, full = (budgets.measure_baseline("mlp", row, DEVICE) for row in rows)
    assert full.temp_bytes < none.temp_bytes
    half = (none.temp_bytes + full.temp_bytes) // 2
    ours = budgets.measure_ours("mlp", rows[0], "between", "ours", half, DEVICE)
    assert budgets.violations([none, full, ours]) == []
    assert ours.error is None and none.matmuls <= ours.matmuls < full.matmuls


def test_unknown_models_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for program in (budgets, coarsening, planners):
        with pytest.raises(SystemExit):
            program.main(["nonsense"])
        assert "unknown models ['nonsense']" in capsys.readouterr().err


# --- planners


PLANNED = Solved("m", "ilp", 0.5, 9, 99, 1.0, 100, "planned", 0.10, 0.05, 90, 10.0, 9.0)


def test_a_gap_of_five_per_cent_in_sixty_seconds_is_allowed() -> None:
    exact = dataclasses.replace(PLANNED, extra=0.5, bound=0.5, wall_seconds=90.0, cpu_seconds=60.0)
    edge = dataclasses.replace(PLANNED, extra=0.0499, bound=0.0)
    assert planners.problems_of([PLANNED, exact, edge]) == []
    assert PLANNED.gap(0.05) == pytest.approx(1.10 / 1.05 - 1)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"extra": 0.2}, "m at 0.5: 14.29% above the bound, 5% is allowed"),
        ({"bound": None}, "m at 0.5: no bound, 5% is allowed"),
        (
            {"wall_seconds": 61.0, "cpu_seconds": 60.1},
            "m at 0.5: 60.1 s, 60 s are allowed",
        ),
        (
            {"wall_seconds": 30.1, "cpu_seconds": 99.0, "model": "gpt_48"},
            "gpt_48 at 0.5: 30.1 s, 30 s are allowed",
        ),
        ({"outcome": "none found"}, "m at 0.5: no plan, though none is proven to be impossible"),
        (
            {"outcome": "not applicable"},
            "m at 0.5: no plan, though none is proven to be impossible",
        ),
    ],
)
def test_what_a_planner_misses_is_a_line(changes: dict[str, Any], line: str) -> None:
    row = dataclasses.replace(PLANNED, **changes)
    assert planners.problems_of([row]) == [line]
    assert planners.problems_of([dataclasses.replace(row, policy="sublinear")]) == []


def test_impossible_budgets_are_no_problem() -> None:
    for outcome in ("below the floor", "proven infeasible"):
        row = dataclasses.replace(PLANNED, outcome=outcome, bound=None)
        assert planners.problems_of([row]) == []


def test_planners_on_a_small_graph(capsys: pytest.CaptureFixture[str]) -> None:
    graph = planners.graph_of("residual_mlp_small")
    rows = planners.run_model("residual_mlp_small", graph, ("ilp", "sublinear"), (0.01, 0.6, 1.0))
    assert [(row.policy, row.outcome) for row in rows] == [
        ("ilp", "below the floor"),
        *[(policy, "planned") for policy in ("ilp", "sublinear")] * 2,
    ]
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)
    assert planners.problems_of(rows) == []
    _, ilp, sublinear, *whole = rows
    assert (
        ilp.bound is not None and 0 < ilp.bound <= ilp.extra + 1e-4 and ilp.extra <= sublinear.extra
    )
    assert all(row.peak_bytes <= row.budget_bytes for row in rows[1:])
    assert [row.extra for row in whole] == [0.0, 0.0]


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


def _depths(policy: str, temps: dict[int, float]) -> list[Depth]:
    return [Depth(n, policy, 1, 2**40, round(temp * MIB), 1, 0.0, 0.0) for n, temp in temps.items()]


@pytest.mark.parametrize(
    ("policy", "temps"),
    [
        ("none", {16: 160, 64: 640}),
        ("grid", {16: 40, 64: 80, 256: 160}),
        ("recursive", {16: 40, 64: 60, 256: 80}),
        ("grid", {16: 40, 64: 120}),  # a factor of 1.5 is allowed
        ("grid", {16: 40}),
    ],
)
def test_growth_as_promised_is_no_problem(policy: str, temps: dict[int, float]) -> None:
    assert depth.problems_of(_depths(policy, temps)) == []


def test_growth_above_the_promise_is_a_line() -> None:
    assert depth.problems_of(_depths("grid", {16: 40, 64: 121})) == [
        "grid: temp / sqrt(n) is 10.0 MiB at 16 layers and 15.1 MiB at 64, a factor of 1.51; 1.5 is "
        "allowed"
    ]
    (line,) = depth.problems_of(_depths("recursive", {16: 40, 256: 160}))
    assert "temp / log2(n) is 10.0 MiB at 16 layers and 20.0 MiB at 256" in line


def test_a_temp_above_the_prediction_is_a_line() -> None:
    row = Depth(16, "grid", 1, 100 * MIB, 101 * MIB, 1, 0.0, 0.0)
    assert depth.problems_of([row]) == []
    assert depth.problems_of([dataclasses.replace(row, temp_bytes=102 * MIB)]) == [
        "grid, 16 layers: compiled temp is 102.0 MiB, predicted were 100.0"
    ]


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


@pytest.mark.gpu_compile
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("layers", "policy"), [(16, "grid"), (16, "recursive"), (36, "grid"), (36, "recursive")]
)
def test_the_compiler_takes_what_was_promised(layers: int, policy: str) -> None:
    row = depth.measure(layers, policy, DEVICE)
    activation = 16 * MIB
    assert row.temp_bytes <= _promised(policy, layers) * activation + 2**14  # and small tables


# --- search


SEARCHED: dict[str, Any] = {
    "graph": "chain_8", "budget": 5, "feasible": True, "extra_percent": 29.4, "reorder": False,
    "seconds_asked": 10.0,
}  # fmt: skip
RESNET: dict[str, Any] = {"graph": "resnet50", "budget": 0.8, "extra_percent": 0.30}
LAYERED: dict[str, Any] = {
    "graph": "layered_1000", "budget": 0.9, "extra_percent": 0.6, "reorder": True, "seconds_asked": 40.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"extra_percent": 1000.0},  # a chain: printed beside its optimum
        RESNET,
        LAYERED,
        {**LAYERED, "budget": 0.8, "extra_percent": 3.75},
        {**LAYERED, "extra_percent": 5.0, "seconds_asked": 39.0},
        {**LAYERED, "extra_percent": 5.0, "reorder": False},
        {**LAYERED, "extra_percent": 5.0, "graph": "layered_500"},
    ],
)
def test_what_a_search_may_take_is_no_problem(changes: dict[str, Any]) -> None:
    assert search.problems_of([{**SEARCHED, **changes}]) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"graph": "training_20000", "budget": 0.5, "feasible": False}, "training_20000 at 0.5: above its budget"),
        ({**RESNET, "extra_percent": 0.31}, "resnet50 at 0.8: 0.31 % extra, 0.3 are allowed"),
        ({**LAYERED, "extra_percent": 0.61}, "layered_1000 at 0.9: 0.61 % extra, 0.6 are allowed"),
        (
            {**LAYERED, "graph": "random_layered_1000", "budget": 0.7, "extra_percent": 11.2},
            "random_layered_1000 at 0.7: 11.2 % extra, 11.1 are allowed",
        ),
    ],
)  # fmt: skip
def test_what_a_search_misses_is_a_line(changes: dict[str, Any], line: str) -> None:
    assert search.problems_of([{**SEARCHED, **changes}]) == [line]


def test_optima_of_chains_are_those_of_the_closed_form() -> None:
    for steps, budgets_and_optima in search._CHAINS.items():
        for budget, optimum in budgets_and_optima.items():
            snapshots, rounds = budget - 2, 1
            while math.comb(snapshots + rounds, snapshots) < steps + 1:
                rounds += 1
            forward = rounds * (steps + 1) - math.comb(snapshots + rounds, rounds - 1)
            assert optimum == forward - steps


# --- coarsening

COARSENED = coarsening.Coarsened(
    model="m",
    share=0.5,
    nodes=10,
    equations=20,
    budget_bytes=100,
    seconds=1.0,
    fused=5,
    tried=6,
    failed=0,
    best_seconds=0.995,
    best="all of mul",
)


def test_a_gain_above_one_percent_is_a_line() -> None:
    assert coarsening.problems_of([COARSENED]) == []
    row = dataclasses.replace(COARSENED, best_seconds=0.98)
    assert coarsening.problems_of([row]) == [
        "m at 0.5: 2.00% cheaper with all of mul as buffers, 1% is allowed"
    ]


def test_candidates_are_fused_forward_values() -> None:
    graph = planners.graph_of("gpt_tiny")
    fused = coarsening.candidates(graph)
    buffers = buffers_of(graph)
    forward = {v for op in graph.forward_ops() for v in op.outputs}
    found = {v for values in fused.values() for v in values}
    assert found and found <= forward - buffers
    for name, values in fused.items():
        assert {graph.ops[cast(int, graph.values[v].producer)].name for v in values} == {name}


def test_coarsening_of_a_small_graph() -> None:
    row = coarsening.run_model("residual_mlp_small", 0.6, values=1)
    assert row.tried > 0 and row.fused > 0
    assert 0 < row.best_seconds <= row.seconds and 0 <= row.gain < coarsening.MAX_GAIN
    assert coarsening.problems_of([row]) == []
