"""From a JAX function to its joint graph: phases, costs, scopes, lines, loops, and what is opaque."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

import remat
from remat.core.graph import Graph, Op

F32 = jnp.float32


def shape(*dims: int, dtype: object = F32) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(dims, dtype)  # pyright: ignore[reportArgumentType]


def graph_of(function: object, *args: object, **options: object) -> Graph:
    """The joint graph of a function, checked for well-formedness."""
    graph = remat.plan(function, *args, **options).graph  # pyright: ignore[reportArgumentType]
    graph.check()
    return graph


def ops_named(graph: Graph, name: str) -> list[Op]:
    """The operators of a graph with a certain primitive."""
    return [op for op in graph.ops if op.name == name]


def test_phases_flops_and_bytes_of_a_matmul() -> None:
    graph = graph_of(lambda w, x: jnp.tanh(x @ w).sum(), shape(8, 16), shape(4, 8))
    forward, backward = ops_named(graph, "dot_general")
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert forward.flops == backward.flops == 2 * 4 * 8 * 16
    assert forward.bytes_moved == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert forward.heavy and not forward.fusible
    assert all(op.fusible for op in ops_named(graph, "tanh"))


def test_values_born_in_differentiation_are_forward_computable() -> None:
    graph = graph_of(lambda x: jax.nn.relu(jnp.sin(x)).sum(), shape(32))
    masks = [v for v in graph.values if v.dtype == "bool"]
    assert masks and all(graph.forward_values[v.id] for v in masks)
    cosines = ops_named(graph, "cos")
    assert [op.phase for op in cosines] == ["forward"]


def test_scopes_and_source_lines_are_the_users() -> None:
    def f(x: jax.Array) -> jax.Array:
        with jax.named_scope("encoder"):
            y = jnp.tanh(x)
        return (jax.nn.gelu(y) * jax.random.bernoulli(jax.random.key(0), 0.5, y.shape)).sum()

    graph = graph_of(f, shape(8))
    assert any("encoder" in op.scope for op in ops_named(graph, "tanh"))
    forward = [op for op in graph.forward_ops() if op.name not in ("iota",)]
    assert all("test_trace.py:" in op.source for op in forward)


def test_lines_inside_a_scan_are_the_users() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0].sum()

    plan = remat.plan(f, shape(8))
    scans = ops_named(plan.graph, "scan")
    assert [op.phase for op in scans] == ["forward", "backward"]
    assert all("test_trace.py:" in op.source and op.loop == "scan0" for op in scans)
    assert plan.opaque == ()


def test_loop_bodies_have_their_own_graphs() -> None:
    def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.sin(c)), None

    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.scan(inner, c, None, length=5)[0] * 2, None

    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(outer, x, None, length=3)[0].sum()

    plan = remat.plan(f, shape(16))
    body = plan.loop("scan0")
    assert (plan.loops[0].length, body.graph.multiplicity) == (3, 3)
    assert body.loops[0].plan.graph.multiplicity == 5
    # sin, cos, tanh and the derivative of tanh are cheap: each iteration keeps its carry only.
    assert body.loops[0].plan.saved_bytes == 16 * 4
    assert plan.saved_bytes == 3 * 5 * 16 * 4


def test_flops_of_loops_include_every_iteration() -> None:
    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=7)[0].sum()

    forward = next(op for op in graph_of(f, shape(8, 8), shape(4, 8)).ops if op.name == "scan")
    assert forward.flops == 7 * 2 * 4 * 8 * 8


def test_closed_over_arrays_are_constants_and_keys_are_inputs() -> None:
    table = jnp.arange(8.0)

    def f(x: jax.Array, key: jax.Array) -> jax.Array:
        return (x * table * jax.random.normal(key, x.shape)).sum()

    graph = graph_of(f, shape(8), jax.eval_shape(lambda: jax.random.key(0)))
    assert len(graph.constants) == 1 and len(graph.inputs) == 2
    key = graph.values[graph.inputs[1]]
    assert key.dtype == "key<fry>" and key.nbytes == 8 and not key.differentiable
    assert any(op.random for op in graph.ops)


def test_tags_survive_differentiation() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = checkpoint_name(jnp.sin(x), "inside")
        return (checkpoint_name(x, "argument") * y * y).sum()

    graph = graph_of(f, shape(4))
    assert {tag for v in graph.values for tag in v.tags} == {"inside", "argument"}
    assert ops_named(graph, "name") == []


def test_users_checkpoints_are_taken_over_or_respected() -> None:
    inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))

    def f(x: jax.Array) -> jax.Array:
        return inner(inner(x)).sum()

    taken = graph_of(f, shape(8))
    kept = graph_of(f, shape(8), nested_checkpoints="respect")
    assert not any("checkpoint" in op.name or "remat" in op.name for op in taken.ops)
    assert any("checkpoint" in op.name or "remat" in op.name for op in kept.ops)


def test_cond_and_while_are_opaque_and_reported() -> None:
    def f(x: jax.Array) -> jax.Array:
        x = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
        steps = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
        return (x * steps).sum()

    plan = remat.plan(f, shape(8), remat_policy="full")
    assert {line.split()[0] for line in plan.opaque} == {"cond", "while"}
    again = {entry.name for entry in plan.recomputed}
    assert not again & {"cond", "while"}
    assert "cond" in str(plan)


def test_what_is_the_same_on_every_platform_is_no_conditional() -> None:
    """`jnp.diagonal` has a branch of its own inside Pallas' kernels only; jax chooses when it lowers."""

    def contrastive(x: jax.Array) -> jax.Array:
        return -jnp.diagonal(jax.nn.log_softmax(x @ x.T)).mean()

    assert not ops_named(graph_of(contrastive, shape(8, 4)), "cond")
    x = jax.random.normal(jax.random.key(0), (8, 4))
    wrapped = remat.checkpoint(contrastive, remat_policy="full")
    expected = jax.grad(contrastive)(x)
    for gradient in (jax.grad(wrapped), jax.jit(jax.grad(wrapped))):
        assert jnp.allclose(gradient(x), expected, atol=1e-6)
    several = jax.vmap(jax.grad(wrapped))(jnp.stack([x, 2 * x]))
    assert jnp.allclose(several[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "others",
    [{"cpu": jnp.sin}, {"tpu": jnp.sin, "cuda": jnp.tanh}, {"METAL": jnp.sin}],
)
def test_what_differs_between_platforms_stays_a_choice(others: dict[str, object]) -> None:
    def function(x: jax.Array) -> jax.Array:
        branches = {**others, "default": jnp.cos}
        return jax.lax.platform_dependent(x**2, **branches).sum()  # pyright: ignore[reportArgumentType]

    assert ops_named(graph_of(function, shape(4)), "cond")
    x = jnp.arange(4.0)
    gradient = jax.grad(remat.checkpoint(function, remat_policy="full"))(x)
    assert jnp.allclose(gradient, jax.grad(function)(x))


def test_an_unknown_primitive_is_opaque_never_recomputed_and_said_so() -> None:
    mystery = Primitive("mystery_of_the_test")
    mystery.def_abstract_eval(lambda aval: aval)
    mystery.def_impl(lambda x: x)

    def f(x: jax.Array) -> jax.Array:
        return (jnp.sin(x) * jnp.cos(mystery.bind(jax.lax.stop_gradient(x)))).sum()

    with pytest.warns(remat.RematWarning, match="mystery_of_the_test at .*test_trace.py"):
        plan = remat.plan(f, shape(2**19), remat_policy="full")
    op = ops_named(plan.graph, "mystery_of_the_test")[0]
    assert op.kind == "OPAQUE" and not op.recomputable and not op.fusible
    assert "mystery_of_the_test" not in {entry.name for entry in plan.recomputed}
    assert any("mystery_of_the_test" in line for line in plan.opaque)


def test_side_effects_are_marked() -> None:
    def f(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0])
        return jnp.sin(x).sum()

    effects = [op for op in graph_of(f, shape(4)).ops if op.effectful]
    assert len(effects) == 1 and not effects[0].recomputable


def test_networkx_export() -> None:
    plan = remat.plan(lambda x: jnp.sin(jnp.sin(x)).sum(), shape(8))
    graph = plan.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    assert graph.number_of_nodes() == len(plan.graph.values) + len(plan.graph.ops)
    roles = {role for _, data in graph.nodes(data=True) for role in data.get("roles", ())}
    assert roles == {"input", "output", "cotangent", "gradient"}


def test_json_round_trip_of_a_traced_graph() -> None:
    graph = graph_of(lambda x: jnp.tanh(x).sum(), shape(8))
    assert Graph.from_json(graph.to_json()) == graph
    assert Graph.from_json(graph.to_json()).fingerprint() == graph.fingerprint()


def test_argument_order_does_not_change_decisions() -> None:
    def f(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(a @ b) * c))

    def swapped(c: jax.Array, b: jax.Array, a: jax.Array) -> jax.Array:
        return f(a, b, c)

    shapes = shape(4, 8), shape(8, 16), shape(4, 16)
    first = remat.plan(f, *shapes, argnums=(0, 1, 2))
    second = remat.plan(swapped, *reversed(shapes), argnums=(0, 1, 2))
    assert first.digest() == remat.plan(f, *shapes, argnums=(0, 1, 2)).digest()

    def kept(plan: remat.Plan) -> list[tuple[str, str]]:
        return sorted((entry.label, entry.op) for entry in plan.saved)

    assert kept(first) == kept(second)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_dtypes(dtype: str) -> None:
    graph = graph_of(lambda x: jnp.abs(x * x).sum().real, shape(6, dtype=jnp.dtype(dtype)))
    value = graph.values[graph.inputs[0]]
    assert value.nbytes == 6 * jnp.dtype(dtype).itemsize and value.differentiable
