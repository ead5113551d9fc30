"""In which order kernels run, and which are one: the model's steps, laws for all graphs, and XLA's own log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from random_graphs import GraphBuilder, graphs, laws
from test_memory_rules import compare, perceptron, recommender_of_one_table, shape

import remat
from remat.core.graph import Graph
from remat.memory.execution import Execution
from remat.memory.instances import execution_of
from remat.memory.kernels import Kernel
from remat.memory.order import orders
from remat.memory.predict import executed, laid_out
from remat.policies import Unchanged

MIB = 2**20
BIG, HALF = (1024, 1024), (512, 1024)
HEAVY: dict[str, Any] = {"fusible": False, "heavy": True}


def laid(graph: Graph) -> tuple[Execution, list[Kernel], list[list[Kernel]]]:
    """A graph's execution, its kernels, and their orders: list schedule, most users first, as they stand."""
    execution = execution_of(graph, None, {})
    kernels, _ = laid_out(execution)
    return execution, kernels, orders(execution, kernels)


def ran(graph: Graph, number: int = 0) -> list[str]:
    """The names of the kernels of one of the orders, barriers left out."""
    execution, _, found = laid(graph)
    names = [execution.nodes[kernel.node].name for kernel in found[number]]
    return [name for name in names if name != "barrier"]


def merged(graph: Graph) -> set[frozenset[str]]:
    """The names of those that are one kernel, by their last operators."""
    execution, kernels, _ = laid(graph)
    return {
        frozenset(execution.nodes[node].name for node in (kernel.node, *kernel.merged))
        for kernel in kernels
        if kernel.merged
    }


# --- orders ------------------------------------------------------------------------------------------


@given(graph=graphs())
@laws(100)
def test_every_order_has_every_kernel_once_behind_what_it_needs(graph: Graph) -> None:
    _, kernels, found = laid(graph)
    made = {node for kernel in kernels for node in (kernel.node, *kernel.merged)}
    assert len(found) == 3
    for order in found:
        assert sorted(kernel.node for kernel in order) == sorted(kernel.node for kernel in kernels)
        done: set[int] = set()
        for kernel in order:
            assert kernel.after & made <= done | {kernel.node, *kernel.merged}
            done.update((kernel.node, *kernel.merged))


def test_what_frees_most_runs_first_and_a_result_waits() -> None:
    """`wide` takes 4 MiB for good, `half` 2 MiB that `narrow` frees."""
    builder = GraphBuilder()
    ct = builder.cotangent((4,))
    wide = builder.op("wide", [ct], BIG, **HEAVY)
    half = builder.op("half", [ct], HALF, **HEAVY)
    narrow = builder.op("narrow", [half], (4,), **HEAVY)
    assert ran(builder.build([], [wide, narrow])) == ["half", "narrow", "wide"]


def test_zeros_that_are_written_over_wait_until_all_else_takes_more() -> None:
    """They need nothing, so they run before what takes more, long before the scatter into them."""

    def graph(between: tuple[int, int]) -> Graph:
        builder = GraphBuilder()
        ct = builder.cotangent((4,))
        where = builder.input((4,))
        first = builder.op("first", [ct], between, **HEAVY)
        second = builder.op("second", [first], (4,), **HEAVY)
        zeros = builder.op("broadcast_in_dim", [], HALF)
        filled = builder.op("scatter-add", [zeros, where, second], HALF, fusible=False)
        return builder.build([], [builder.op("last", [filled], (4,), **HEAVY)])

    assert ran(graph(BIG))[:2] == ["broadcast_in_dim", "first"]
    assert ran(graph((256, 1024)))[:3] == ["first", "second", "broadcast_in_dim"]


def test_numbers_are_made_at_once() -> None:
    builder = GraphBuilder()
    ct = builder.cotangent(())
    other = builder.op("other", [ct], (8,), **HEAVY)
    number = builder.op("number", [ct], (), **HEAVY)
    end = builder.op("end", [other, number], (8,), **HEAVY)
    assert ran(builder.build([], [end])) == ["number", "other", "end"]


def test_depth_first_the_result_that_is_listed_last_comes_first_where_all_have_many_users() -> None:
    """XLA's sums over all paths reach their bounds in deep programs; as they stand, results come in their order."""

    def twofold(builder: GraphBuilder, name: str, x: int) -> int:
        return builder.op(name, [x, builder.op("beside", [x], BIG, **HEAVY)], BIG, **HEAVY)

    def graph(turned: bool) -> Graph:
        builder = GraphBuilder()
        x = builder.cotangent(BIG)
        for name in ["deep"] * 12:  # whatever is made is read twice
            x = twofold(builder, name, x)
        results = [twofold(builder, name, x) for name in ("one", "two")]
        return builder.build([], results[::-1] if turned else results)

    ends = {"one", "two"}
    assert [name for name in ran(graph(False), 1) if name in ends] == ["two", "one"]
    assert [name for name in ran(graph(False), 2) if name in ends] == ["one", "two"]
    assert [name for name in ran(graph(True), 2) if name in ends] == ["two", "one"]


# --- merged kernels ----------------------------------------------------------------------------------


def test_a_reduction_and_an_elementwise_kernel_that_read_one_array_are_one() -> None:
    builder = GraphBuilder()
    x = builder.op("dot", [builder.input(BIG)], BIG, **HEAVY)
    made = builder.op("mul", [builder.op("tanh", [x], BIG)], BIG)
    total = builder.op("reduce_sum", [builder.op("exp", [x], BIG)], (1024,), kind="REDUCTION")
    ends = [builder.op("dot", [v], (4,), **HEAVY) for v in (made, total)]
    assert merged(builder.build(ends, [])) == {frozenset({"mul", "reduce_sum"})}


def test_kernels_that_need_each_other_are_not_one() -> None:
    builder = GraphBuilder()
    x = builder.op("dot", [builder.input(BIG)], BIG, **HEAVY)
    made = builder.op("mul", [builder.op("tanh", [x], BIG)], BIG)
    other = builder.op("dot", [made], BIG, **HEAVY)
    last = builder.op("add", [builder.op("exp", [x], BIG), other], BIG)
    assert merged(builder.build([builder.op("dot", [last], (4,), **HEAVY)], [])) == set()


@pytest.mark.parametrize(("rows", "are_one"), [(512, False), (640, True)])
def test_parts_of_an_array_that_lie_side_by_side_are_read_apart(rows: int, are_one: bool) -> None:
    builder = GraphBuilder()
    x = builder.op("dot", [builder.input(BIG)], BIG, **HEAVY)
    found = []
    for name in ("mul", "sub"):
        part = builder.op("slice", [x], (rows, 1024), kind="VIEW")
        found.append(builder.op(name, [builder.op("tanh", [part], (rows, 1024))], (rows, 1024)))
    ends = [builder.op("dot", [v], (4,), **HEAVY) for v in found]
    assert merged(builder.build(ends, [])) == ({frozenset({"mul", "sub"})} if are_one else set())


def test_what_a_matmuls_own_kernel_makes_is_merged_with_nothing() -> None:
    """The product plus a row, which reads the row as another kernel does."""

    def graph(own: bool) -> Graph:
        builder = GraphBuilder()
        kind: dict[str, Any] = {**HEAVY, "contracts": ((1,), (0,), (), ())}
        y = builder.input(BIG)
        product = builder.op("dot_general", [builder.input(BIG), builder.input(BIG)], BIG, **kind)
        shifted = builder.op("tanh", [builder.op("add", [product, y], BIG)], BIG)
        beside = builder.op("exp", [builder.op("mul", [y], BIG)], BIG)
        ends = [builder.op("dot", [v], (4,), **HEAVY) for v in (shifted, beside)]
        more = [] if own else [builder.op("dot", [product], (4,), **HEAVY)]
        return builder.build([*ends, *more], [])

    assert merged(graph(own=True)) == set()
    assert merged(graph(own=False)) == {frozenset({"tanh", "exp"})}


def test_a_kernel_is_merged_with_one_of_those_that_read_it_and_writes_its_result_all_the_same() -> (
    None
):
    builder = GraphBuilder()
    x = builder.op("dot", [builder.input(BIG)], BIG, **HEAVY)
    bent = builder.op("max", [builder.op("add", [x], BIG)], BIG)
    total = builder.op("reduce_sum", [bent], (1024,), kind="REDUCTION")
    product = builder.op("dot", [bent], (4,), **HEAVY)
    graph = builder.build([product, builder.op("dot", [total], (4,), **HEAVY)], [])
    execution, kernels, _ = laid(graph)
    (kernel,) = [kernel for kernel in kernels if kernel.merged]
    made = [execution.instances[index].nbytes for index in kernel.writes]
    assert sorted(made) == [4 * 1024, 4 * MIB]
    assert merged(graph) == {frozenset({"max", "reduce_sum"})}


# --- XLA's own ---------------------------------------------------------------------------------------

# The rules are those of jax 0.10.2 (docs/memory-model.md).
pinned = pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="XLA differs")


def twice(steps: int) -> tuple[Any, tuple[Any, ...]]:
    """A force computed on two lines where particles are once: with equal literals it is one to XLA."""

    def loss(x: jax.Array, v: jax.Array) -> jax.Array:
        def force(x: jax.Array) -> jax.Array:
            apart = x[:, None] - x[None]
            return -(apart * (jnp.sum(apart**2, -1, keepdims=True) + 0.01) ** -1.5).sum(1)

        for _ in range(steps):
            v = v + 0.01 * force(x)
            x = x + 0.02 * v
            v = v + 0.01 * force(x)
        return jnp.sum(x**2)

    return loss, (shape(512, 3), shape(512, 3))


@pytest.mark.gpu_compile
@pinned
@pytest.mark.parametrize("policy", ["none", "min_cut"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: recommender_of_one_table(1),
        lambda: recommender_of_one_table(1, sliced=True),
        lambda: perceptron(lambda x: jnp.sin(30 * x), 32_768),
        lambda: twice(4),
    ],
    ids=["tables", "slices", "sines", "twice"],
)
def test_the_compiler_agrees(build: Callable[[], tuple[Any, Any]], policy: str) -> None:
    compare(build, policy)


@pytest.mark.gpu_compile
@pinned
@pytest.mark.parametrize(
    ("source", "chosen"),
    [
        (
            "from test_memory_rules import recommender_of_one_table as made; loss, args = made(1)",
            "list",
        ),
        ("from models.development import NETWORKS; loss, args = NETWORKS['gru_scan']()", "dfs"),
    ],
    ids=["list", "dfs"],
)
def test_xla_writes_down_that_it_chooses_the_same_order(source: str, chosen: str) -> None:
    space: dict[str, Any] = {}
    exec(source, space)
    plan = remat.plan(space["loss"], *space["args"], remat_policy=Unchanged())
    execution = executed(plan.graph, None, plan.loops)
    kernels, layout = laid_out(execution)
    ran = [kernel.node for kernel in layout.order]
    found = [[kernel.node for kernel in order] for order in orders(execution, kernels)]
    assert ("list", "dfs", "post_order")[found.index(ran)] == chosen
    code = (
        f"import jax, remat; {source}; remat.compile_report(jax.grad(loss), *args, device='h200')"
    )
    settings = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "hlo_memory_scheduler=2"}
    paths = os.pathsep.join((os.path.dirname(__file__), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert re.findall(r"Chose min-memory (\w+) sequence", done.stderr) == [chosen]
