"""Planning repeats nothing that it knows, counted: traces, plans, predictions, stages measured, searches."""

from __future__ import annotations

import time
from collections import Counter
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from benchmarks import planning as planning_benchmark
from models import mlp
from remat.lower import pipeline as pipeline_module
from remat.planning import make as make_module
from remat.plans import schedule as schedule_module
from remat.plans.schedule import build_schedule
from remat.policies import SaveAll
from remat.policies.buffers import within as within_module
from remat.policies.solvers.chain import measure as measure_module
from remat.policies.solvers.chain.measure import stage_kinds
from remat.policies.solvers.chain.solve import prepare_chain
from remat.policies.solvers.problem import Problem, peak_of_order, replay

predict_module = import_module("remat.memory.predict")


def layers(count: int, width: int = 5) -> Problem:
    """A chain of equal layers of `width` nodes, and its backward pass."""
    inputs: list[list[int]] = []
    sizes, costs = [], []
    for layer in range(count):
        for node in range(width):
            index = layer * width + node
            inputs.append([index - 1] if index else [])
            sizes.append(64 * (1 + node))
            costs.append(1.0 + node)
    turn = len(inputs)
    for node in reversed(range(turn)):
        reads = [node] if len(inputs) == turn else [node, len(inputs) - 1]
        inputs.append(reads)
        sizes.append(64)
        costs.append(1.0)
    return Problem.of(costs, sizes, inputs, turn=turn)


def counted(patch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> Counter[str]:
    """Counts calls of functions by name."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        return run

    for owner, name in functions:
        patch.setattr(owner, name, counting(name, getattr(owner, name)))
    return calls


@pytest.mark.parametrize("policy", ["min_cut", "full"])
def test_the_first_call_traces_plans_and_predicts_once(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction is that of the plan and that of no rematerialization; a second call does nothing."""
    runs: list[int] = []

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        runs.append(1)
        for w in weights:  # so deep that the cut saves something, and nothing takes its place
            x = jax.nn.gelu(x @ w)
        return jnp.sum(x)

    calls = counted(
        monkeypatch,
        (pipeline_module, "trace_joint"),
        (make_module, "plan_from_saved"),
        (make_module, "build_schedule"),
        (predict_module, "_predict"),
    )
    gradient = jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=policy)))
    for _ in range(2):
        gradient([jnp.ones((8, 8))] * 4, jnp.ones((4, 8)))
    assert len(runs) == 1
    assert calls.pop("_predict") <= 2
    assert calls == {"trace_joint": 1, "plan_from_saved": 1, "build_schedule": 1}


def test_equal_stages_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are."""
    found: list[tuple[int, int]] = []
    for count in (40, 80):
        with monkeypatch.context() as patch:
            calls = counted(patch, (measure_module._Measure, "stage"))
            prepared = prepare_chain(layers(count), max_stages=20, max_nodes=400)
        assert prepared is not None
        assert all(stage_kinds(form).nodes <= 400 for form, _ in prepared.forms)
        assert calls["stage"] == sum(len(stage_kinds(form).first) for form, _ in prepared.forms)
        found.append((prepared.different_nodes, calls["stage"]))
    assert all(0 < nodes <= 400 for nodes, _ in found)
    assert found[1][1] <= 1.5 * found[0][1]


def test_a_large_graph_is_planned_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain is measured once for several budgets, and proposals are counted by nodes that differ."""
    problem = layers(40)
    monkeypatch.setattr(within_module, "_CHAIN_LIMIT", len(problem) - 1)
    calls = counted(monkeypatch, (within_module, "prepare_chain"))
    proposals: list[int] = []
    search = within_module.search

    def noting(*args: Any, **options: Any) -> Any:
        proposals.append(options["proposals"])
        return search(*args, **options)

    monkeypatch.setattr(within_module, "search", noting)
    everything = peak_of_order(problem)
    for share in (0.6, 0.4):
        pool = within_module.Pool(problem, int(share * everything))
        pool.improve("test", 0.0, effort=20)
        assert pool.best is not None
        assert replay(problem, pool.best.sequence).peak_bytes <= share * everything
    prepared = problem.memo["prepared chain"]
    assert calls == {"prepare_chain": 1}
    assert 0 < prepared.different_nodes < len(problem) / 4
    assert set(proposals) <= {prepared.different_nodes, None}  # None without numba


def test_schedules_look_at_a_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the layers take about twice the walks over what is made again, not four times."""
    walks: list[int] = []
    for count in (8, 16):
        loss, args = mlp.residual_mlp(layers=count, width=16, hidden=32, batch=8)
        graph = remat.plan(loss, *args, remat_policy=SaveAll()).graph
        with monkeypatch.context() as patch:
            calls = counted(patch, (schedule_module, "closure"))
            build_schedule(graph, graph.sources)
        walks.append(calls["closure"])
    assert walks[1] <= 2.2 * walks[0]


def test_the_benchmark_splits_a_planning_into_its_phases() -> None:
    """Two traces (the function, then its derivative), and no second counts twice."""
    loss, args = mlp.residual_mlp(layers=4, width=64, hidden=256, batch=4096)
    phases = planning_benchmark.Phases()
    start = time.process_time()
    with phases.measured():
        remat.plan(loss, *args, remat_policy="min_cut", budget=0.9, confirm=False)
    whole = time.process_time() - start
    assert phases.calls["trace"] == 2
    assert phases.calls["schedule"] >= 2  # a schedule, and its replay
    assert phases.calls["predict"] >= 2
    assert set(phases.calls) <= set(planning_benchmark.PHASES)
    assert 0 < sum(phases.seconds.values()) <= whole
    assert pipeline_module.trace_joint.__module__ == "remat.trace.joint"  # as it was
