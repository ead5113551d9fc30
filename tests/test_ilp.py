"""`Ilp` and its neighbours: certificates, methods, measured costs, and what the compiler says of their plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws
from test_budget import training_graph

import remat
import remat.policies.buffers.within as within_module
import remat.policies.checkmate as checkmate_module
import remat.policies.ilp as ilp_module
from models import gpt, mlp
from remat.core.errors import BudgetError, PolicyError, RematWarning
from remat.core.graph import Graph
from remat.policies import Auto, Checkmate, Ilp, MinCut, Policy, Revolve, Sublinear
from remat.policies.base import Decision, describe_options
from remat.policies.buffers.condense import condense
from remat.policies.exact.milp import solve_restricted
from remat.policies.solvers.problem import peak_of_order, replay

seeds = st.integers(0, 2**20)
PICOSECONDS = 10**12
LOSS, ARGS = mlp.residual_mlp(layers=4, width=16, hidden=64, batch=64)


def graph_of_the_network() -> Graph:
    return remat.plan(LOSS, *ARGS).graph


def within(policy: Any, graph: Graph, share: float) -> Decision | None:
    try:
        return policy.decide_within(graph, int(share * peak_of_order(condense(graph).problem)))
    except BudgetError:
        return None


# --- certificates ------------------------------------------------------------------------------------

METHODS: dict[str, Ilp | Checkmate] = {
    "starts": Ilp(method="starts"),
    "search": Ilp(method="search", effort=50, seconds=2.0),
    "exact": Ilp(method="exact", effort=50, seconds=5.0),
    "auto": Ilp(effort=50, seconds=5.0),
    "checkmate": Checkmate(seconds=5.0),
    "rounding": Checkmate("approximate", seconds=5.0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
@given(seed=seeds, share=st.sampled_from([0.5, 0.65, 0.8, 0.95]))
@laws(6)
def test_the_bound_is_below_the_value_and_optimal_means_equal(
    method: str, seed: int, share: float
) -> None:
    graph = training_graph(seed)
    problem = condense(graph).problem
    found = within(METHODS[method], graph, share)
    if found is None:
        return
    certificate = found.certificate
    assert certificate is not None and "picoseconds" in certificate.kind
    assert round(problem.total_cost * PICOSECONDS) <= certificate.bound <= certificate.value
    assert (found.status == "optimal") == (certificate.bound == certificate.value)
    assert found.status in ("optimal", "feasible")
    assert found.buffer_peak_bytes is not None
    assert found.buffer_peak_bytes <= int(share * peak_of_order(problem))


@pytest.mark.slow
@given(seed=seeds)
@laws(4)
def test_no_bound_is_above_what_another_method_finds(seed: int) -> None:
    graph = training_graph(seed)
    found = [within(policy, graph, 0.7) for policy in METHODS.values()]
    certificates = [d.certificate for d in found if d is not None and d.certificate is not None]
    if certificates:
        assert max(c.bound for c in certificates) <= min(c.value for c in certificates)
    exact, starts = found[2], found[0]
    if exact is not None and starts is not None:
        assert exact.certificate is not None and starts.certificate is not None
        assert exact.certificate.value <= starts.certificate.value
        assert exact.certificate.gap <= 1e-6


@given(seed=seeds, share=st.sampled_from([0.6, 0.8]))
@laws(6)
def test_the_order_costs_what_the_certificate_says(seed: int, share: float) -> None:
    graph = training_graph(seed)
    condensed = condense(graph)
    problem = condensed.problem
    found = within(METHODS["search"], graph, share)
    if found is None:
        return
    assert found.order is not None and found.certificate is not None
    node = {root: index for index, root in enumerate(condensed.roots)}
    after = [node[op] for op in found.order if op in node]
    replayed = replay(problem, [*range(problem.turn), *after])
    assert round(replayed.cost * PICOSECONDS) == found.certificate.value
    assert replayed.peak_bytes == found.buffer_peak_bytes


def test_flops_as_the_objective_are_counted_exactly() -> None:
    graph = graph_of_the_network()
    policy = Ilp(objective="flops", effort=50, seconds=5.0)
    condensed = condense(graph, objective="flops")
    found = policy.decide_within(graph, int(0.7 * peak_of_order(condensed.problem)))
    assert found.certificate is not None and "flops" in found.certificate.kind
    ops = graph.ops
    again = [op for op in found.order or () if ops[op].phase == "forward"]
    nodes = {root: i for i, root in enumerate(condensed.roots)}
    repeated = sum(int(condensed.problem.costs[nodes[op]]) for op in again if op in nodes)
    assert repeated > 0
    assert found.certificate.value == int(condensed.problem.total_cost) + repeated


# --- methods -----------------------------------------------------------------------------------------


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes which planners run."""
    ran: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return function(*args, **options)

        return run

    for module, name in (
        (ilp_module, "search"),
        (ilp_module, "solve_restricted"),
        (within_module, "search"),
        (within_module, "_prepared_chain"),
        (within_module, "cut_bound"),
    ):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    return ran


def test_checkmate_begins_where_ilp_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the two differ by what they make of it, never by luck in the search before."""
    started: list[tuple[int, ...] | None] = []

    def noting(*args: Any, **options: Any) -> Any:
        started.append(options["start"])
        return solve_restricted(*args, **{**options, "seconds": 0.5})

    monkeypatch.setattr(ilp_module, "solve_restricted", noting)
    monkeypatch.setattr(checkmate_module, "solve_restricted", noting)
    graph = graph_of_the_network()
    for share in (0.6, 0.8):
        for policy in (Ilp(method="exact", seconds=600.0), Checkmate(seconds=600.0)):
            assert within(policy, graph, share) is not None
    assert started[0] is not None and started[0] == started[1]
    assert started[2] is not None and started[2] == started[3]


@pytest.mark.parametrize(
    ("method", "runs", "never"),
    [
        ("starts", set(), {"search", "solve_restricted", "_prepared_chain"}),
        ("search", {"search", "_prepared_chain"}, {"solve_restricted"}),
        ("exact", {"search", "solve_restricted"}, set()),
        ("auto", {"search", "solve_restricted"}, set()),
    ],
)
def test_methods_run_what_they_say(
    method: Any, runs: set[str], never: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = calls(monkeypatch)
    graph = graph_of_the_network()
    assert 40 < len(condense(graph).problem) <= 100
    found = within(Ilp(method=method, effort=40, seconds=5.0, exact_limit=100), graph, 0.7)
    assert found is not None
    assert runs <= set(ran) and never.isdisjoint(ran) and "cut_bound" in ran


def test_auto_leaves_the_integer_program_out_of_large_graphs_that_are_good_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = calls(monkeypatch)
    graph = graph_of_the_network()
    policy = Ilp(exact_limit=5, effort=400, seconds=5.0)
    found = within(policy, graph, 0.9)
    assert found is not None and found.certificate is not None
    assert ("solve_restricted" in ran) == (found.certificate.gap > 0.02)


def test_nothing_runs_where_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = calls(monkeypatch)
    graph = graph_of_the_network()
    for found in (Ilp().decide(graph), within(Ilp(), graph, 1.0)):
        assert found is not None and found.status == "optimal"
        assert found.notes == ("start: keep all",)
    assert ran == []


@pytest.mark.slow
def test_an_impossible_budget_is_refused_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = calls(monkeypatch)
    graph = graph_of_the_network()
    with pytest.raises(BudgetError, match="No plan can go below") as refused:
        Ilp().decide_within(graph, 1000)
    assert ran == ["cut_bound"]
    named = refused.value.smallest_peak_bytes
    assert named is not None and named >= condense(graph).problem.floor_bytes
    found = Ilp(effort=40).decide_within(graph, named)
    assert found.buffer_peak_bytes is not None and found.buffer_peak_bytes <= named


@pytest.mark.parametrize(
    "wrong",
    [
        {"objective": "joules"},
        {"method": "magic"},
        {"seconds": 0},
        {"effort": -1},
        {"tolerance": -1},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="expected"):
        Ilp(**wrong)
    assert describe_options(Ilp(method="search")) == "method='search'"


def test_rounding_has_a_limit_and_says_so() -> None:
    loss, args = mlp.residual_mlp(layers=24, width=16, hidden=16, batch=8)
    graph = remat.plan(loss, *args).graph
    count = len(condense(graph).problem)
    assert count > 120
    with pytest.raises(PolicyError, match=rf"{count} buffers, the limit is 120"):
        within(Checkmate("approximate"), graph, 0.6)


def test_the_same_decision_twice() -> None:
    """Where none is stopped by the clock."""
    for policy in (Ilp(method="search", effort=50), METHODS["starts"], Sublinear(), Revolve()):
        for seed in range(3):
            graph = training_graph(seed)
            same = Graph.from_json(graph.to_json())
            one, other = within(policy, graph, 0.8), within(policy, same, 0.8)
            assert one == other
            if one is not None:
                assert one.order == (other or one).order


# --- without numba -----------------------------------------------------------------------------------


def test_without_numba_the_clock_stops_the_search_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remat.policies.solvers.search.is_compilable", lambda: False)
    monkeypatch.setattr(within_module, "is_compilable", lambda: False)
    graph = graph_of_the_network()
    with pytest.warns(RematWarning, match=r"numba is not installed.* 50 to 100 times slower"):
        found = within(Ilp(method="search", seconds=6.0), graph, 0.75)
    assert found is not None
    assert any("pip install numba" in note for note in found.notes)
    assert found.certificate is not None and found.certificate.bound <= found.certificate.value


def test_with_numba_the_plan_does_not_mention_it() -> None:
    found = within(METHODS["search"], graph_of_the_network(), 0.75)
    assert found is not None
    assert any("proposals" in note for note in found.notes)
    assert not any("numba" in note for note in found.notes)


# --- measured costs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """Costs as `remat.cost.measure` returns them."""

    fingerprint: str
    measured_seconds: Mapping[int, float] = field(hash=False)


def test_measured_costs_decide_what_is_recomputed() -> None:
    graph = graph_of_the_network()
    condensed = condense(graph)
    problem = condensed.problem
    budget = int(0.75 * peak_of_order(problem))
    heavy = [op for op in condensed.roots[: problem.turn] if graph.ops[op].heavy]
    heavy += [op for f in condensed.fused[: problem.turn] for op in f if graph.ops[op].heavy]
    plain = Ilp(method="search", effort=60).decide_within(graph, budget)
    first = [op for op in plain.order or () if graph.ops[op].phase == "forward" and op in heavy]
    assert first
    # What was recomputed is measured to be dear, everything else cheap: other operators run again.
    costs = {op: 1.0 if op in first else 1e-7 for op in heavy}
    told = Told(graph.fingerprint(), costs)
    policy = Ilp(method="search", effort=60, costs=told)
    other = policy.decide_within(graph, budget)
    again = [op for op in other.order or () if op in heavy]
    assert sum(costs[op] for op in again) < sum(costs[op] for op in first)
    assert other.buffer_peak_bytes is not None and other.buffer_peak_bytes <= budget
    assert describe_options(policy).endswith("costs=given")


def test_costs_of_another_function_are_refused() -> None:
    graph = graph_of_the_network()
    told = Told(training_graph(0).fingerprint(), {})
    for decide in (lambda p: p.decide(graph), lambda p: p.decide_within(graph, 10**9)):
        with pytest.raises(PolicyError, match=r"another function.*remat\.cost\.measure"):
            decide(Ilp(costs=told))


def test_costs_that_were_measured_are_accepted(tmp_path: Any) -> None:
    from remat.cost import measure

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        for i in range(4):
            x = jnp.tanh(x @ ws[i])
        return jnp.mean(x**2)

    args = (jnp.ones((4, 16, 16)), jnp.ones((256, 16)))
    costs = measure(loss, *args, cache_dir=tmp_path, repeats=1, estimate_as="cpu")
    assert costs.measured_seconds
    plan = remat.plan(loss, *args, remat_policy=Ilp(costs=costs, method="starts"), budget=0.8)
    assert plan.peak_bytes <= int(0.8 * plan.baseline_peak_bytes)
    ours = remat.checkpoint(loss, remat_policy=Ilp(costs=costs, method="starts"), budget=0.8)
    got, want = jax.jit(jax.grad(ours))(*args), jax.jit(jax.grad(loss))(*args)
    assert jnp.allclose(got, want, rtol=1e-5)
    with pytest.raises(PolicyError, match="another function"):
        remat.plan(LOSS, *ARGS, remat_policy=Ilp(costs=costs), budget=0.8)


# --- bodies of loops ---------------------------------------------------------------------------------

BLOCKS = {"layers": 3, "batch": 2, "length": 16, "width": 32, "heads": 4, "dropout": 0.1}


def body_of(policy: Policy) -> remat.Plan:
    """The plan of the body of a scan over GPT blocks."""
    loss, args = gpt.blocks_scanned(**BLOCKS)
    (loop,) = remat.plan(loss, *args, remat_policy=policy).loops
    return loop.plan


def test_without_a_budget_a_loop_keeps_what_the_cut_keeps() -> None:
    """What a body keeps is written and read in every iteration: everything is not the fastest."""
    ours, cut = body_of(Ilp()), body_of(MinCut())
    assert ours.graph.multiplicity == 3
    assert (ours.saved, ours.schedule) == (cut.saved, cut.schedule)
    assert ours.saved_bytes == cut.saved_bytes == 50688
    assert (ours.status, ours.certificate) == (cut.status, cut.certificate)
    assert ours.certificate is not None and ours.certificate.kind == "cut capacity = flow value"
    assert any("loop body" in note for note in ours.notes)
    # It costs no matmul: gelu, softmax, the norms and dropout run again.
    heavy = {op.id for op in ours.graph.ops if op.heavy}
    assert ours.recompute_flops > 0 and not heavy & {entry.op for entry in ours.recomputed}


def test_for_the_fewest_flops_a_loop_keeps_everything() -> None:
    body = body_of(Ilp(objective="flops"))
    assert (body.saved_bytes, body.graph.multiplicity) == (79360, 3)
    assert not {op.id for op in body.graph.ops if op.heavy} & {e.op for e in body.recomputed}
    assert body.recompute_flops < body_of(Ilp()).recompute_flops


def test_a_body_that_runs_once_keeps_everything() -> None:
    graph = body_of(MinCut()).graph
    once = replace(graph, multiplicity=1)
    assert Ilp().decide(graph).saved == MinCut().decide(graph).saved
    found = Ilp().decide(once)
    assert found.order is not None and found.notes == ("start: keep all",)
    certificate = found.certificate
    assert certificate is not None and "picoseconds" in certificate.kind and certificate.gap == 0


def test_the_bodies_of_loops_are_cut_for_the_device_of_the_policy() -> None:
    graph = body_of(MinCut()).graph
    for device in ("h200", "a100", "cpu"):
        assert Ilp(device=device).decide(graph).saved == MinCut(device=device).decide(graph).saved


def test_measured_costs_of_a_function_with_a_loop_are_accepted() -> None:
    """The measured graph has the loop as `min_cut` plans it, and so has this one."""
    loss, args = gpt.blocks_scanned(**BLOCKS)
    told = Told(remat.plan(loss, *args).graph.fingerprint(), {})
    policy = Ilp(costs=told)
    plan = remat.plan(loss, *args, remat_policy=policy)
    assert plan.graph.fingerprint() == told.fingerprint
    assert [loop.plan.saved_bytes for loop in plan.loops] == [50688]


# --- neighbours --------------------------------------------------------------------------------------


def test_auto_takes_the_cut_where_it_fits_and_the_program_where_it_does_not() -> None:
    graph = graph_of_the_network()
    auto = Auto(ilp=METHODS["search"])  # type: ignore[arg-type]
    free = auto.decide(graph)
    assert free.saved == MinCut().decide(graph).saved
    assert free.notes[0] == "auto: min_cut, because there is no budget"
    policy, why = auto.choose(graph, 10**9)
    assert isinstance(policy, MinCut)
    peak = int(why.split("peak at ")[1].split(" bytes")[0].replace(",", ""))
    assert auto.choose(graph, peak)[0] == MinCut()
    policy, why = auto.choose(graph, peak - 1)
    assert policy == METHODS["search"] and f"{peak:,} bytes" in why
    tight = auto.decide_within(graph, peak - 1)
    assert tight.buffer_peak_bytes is not None and tight.buffer_peak_bytes <= peak - 1
    assert tight == replace(
        METHODS["search"].decide_within(graph, peak - 1), notes=tight.notes
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Sublinear("squares"), "expected one of"),  # type: ignore[arg-type]
        (lambda: Sublinear("grid", 3), "k is the number"),
        (lambda: Sublinear("recursive", 0), "at least 1"),
        (lambda: Revolve(0), "at least 1"),
        (lambda: Checkmate("fast"), "'optimal' or 'approximate'"),  # type: ignore[arg-type]
        (lambda: Checkmate(gap=1.0), "gap"),
    ],
)
def test_neighbours_refuse_options_that_mean_nothing(wrong: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        wrong()


def test_chens_plans_carry_no_bound() -> None:
    graph = graph_of_the_network()
    for policy in (Sublinear(), Revolve()):
        for found in (policy.decide(graph), within(policy, graph, 0.8)):
            assert found is not None
            assert (found.status, found.certificate) == ("heuristic", None)


# --- what the compiler says --------------------------------------------------------------------------

LAYERS, BATCH, WIDTH = 16, 4096, 64


def compiled_temp(policy: Policy, budget: int | None) -> tuple[remat.Plan, int]:
    loss, args = mlp.residual_mlp(layers=LAYERS, width=WIDTH, hidden=WIDTH, batch=BATCH)
    plan = remat.plan(loss, *args, remat_policy=policy, budget=budget)
    ours = remat.checkpoint(loss, remat_policy=plan)
    report = remat.compile_report(jax.grad(ours), *args, device="h200")
    return plan, report.temp_bytes


@pytest.mark.gpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("step", range(5))
def test_compiled_memory_is_within_the_budget(step: int) -> None:
    loss, args = mlp.residual_mlp(layers=LAYERS, width=WIDTH, hidden=WIDTH, batch=BATCH)
    least = remat.plan(loss, *args, remat_policy=Sublinear("recursive", 1)).peak_bytes
    most = remat.plan(loss, *args, remat_policy="save_all").peak_bytes
    budget = least + (step + 1) * (most - least) // 6
    plan, temp = compiled_temp(Ilp(effort=300, seconds=5.0), budget)
    assert plan.peak_bytes <= budget
    assert plan.recompute_flops > 0
    assert temp <= budget


@pytest.mark.slow
@pytest.mark.gpu_compile
def test_a_loop_compiles_to_less_traffic_than_when_its_body_keeps_everything() -> None:
    loss, args = gpt.blocks_scanned(layers=4, batch=4, length=64, width=128, heads=2)

    def compiled(policy: Policy) -> remat.CompileReport:
        ours = remat.checkpoint(loss, remat_policy=policy)
        return remat.compile_report(jax.grad(ours), *args, device="h200")

    ours, everything = compiled(Ilp()), compiled(Ilp(objective="flops"))
    assert ours.hbm_traffic_bytes < everything.hbm_traffic_bytes
    assert ours.temp_bytes < everything.temp_bytes
    assert ours.matmuls_executed == everything.matmuls_executed


@pytest.mark.slow
@pytest.mark.gpu_compile
def test_the_recursion_compiles_to_the_memory_that_its_nodes_count() -> None:
    loss, args = mlp.residual_mlp(layers=LAYERS, width=WIDTH, hidden=WIDTH, batch=BATCH)
    policy = Sublinear("recursive", 1)
    decision = policy.decide(remat.plan(loss, *args).graph)
    plan, temp = compiled_temp(policy, None)
    activation = BATCH * WIDTH * 4
    assert decision.buffer_peak_bytes is not None
    assert decision.buffer_peak_bytes % activation <= WIDTH * WIDTH * 4
    # Whole activations; the rest are gradients of weights and scalars.
    assert temp // activation == decision.buffer_peak_bytes // activation
    assert abs(temp - decision.buffer_peak_bytes) < activation // 8
    assert plan.baseline_peak_bytes > 3 * temp
