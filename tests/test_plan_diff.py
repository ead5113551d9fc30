"""Differences between plans are complete, exact and readable; a changed function is pinned down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_table import POLICY_TABLE
from random_graphs import GraphBuilder, chain, graphs, laws, seeded_graph
from versions import TANH_KEEPS_ONE_ARRAY

import remat
from remat.core.graph import Graph
from remat.planning.make import make_plan
from remat.plans.diff import diff
from remat.plans.differences import Change, PlanDiff
from remat.plans.graph_diff import first_difference
from remat.plans.plan import LoopPlan, Plan
from remat.plans.record import Certificate
from remat.plans.steps import Schedule, Step
from remat.policies import Full, MinCut, SaveAll


def network(
    layers: int = 3,
    width: int = 64,
    *,
    activation: str = "tanh",
    first_line: int = 10,
    extra: int | None = None,
    inputs: int = 0,
    arguments: int = 1,
) -> Graph:
    """`layers` of `y = activation(x @ w)`, all differentiated for `x`; every layer has its scope.

    Args:
        extra: a further operator comes before the activation of this layer.
        inputs: inputs that nothing reads.
        arguments: 2 gives the gradient of the last weight too.
    """
    builder = GraphBuilder()
    x = builder.input((8, width))
    weights = [builder.input((width, width)) for _ in range(layers)]
    for _ in range(inputs):
        builder.input((3,))
    shape, value = (8, width), x
    products = []
    for i, weight in enumerate(weights):

        def op(name: str, reads: list[int], line: int, i: int = i) -> int:
            source = f"/home/me/net.py:{first_line + line}"
            return builder.op(name, reads, shape, scope=f"layer_{i}", source=source)

        value = op("dot", [value, weight], 0)
        if extra == i:
            value = op("mul", [value, value], 7)
        value = op(activation, [value], 1)
        products.append(value)
    gradient = builder.cotangent(shape)
    extras = []
    for i in reversed(range(layers)):
        gradient = builder.op("mul", [products[i], gradient], shape, scope=f"back_{i}")
        if i == layers - 1 and arguments == 2:
            extras.append(builder.op("dot", [products[i], gradient], (width, width)))
        gradient = builder.op("dot", [gradient, weights[i]], shape, scope=f"back_{i}")
    return builder.build([value], [gradient, *extras])


# --- the first difference ------------------------------------------------------------------------------


@given(a=graphs(), b=graphs())
@laws(60)
def test_there_is_a_difference_exactly_if_the_fingerprints_differ(a: Graph, b: Graph) -> None:
    same = a.fingerprint() == b.fingerprint()
    assert (first_difference(a, b) == "") == same
    assert first_difference(a, a) == first_difference(b, Graph.from_json(b.to_json())) == ""


@given(seed=st.integers(0, 10_000))
@laws(40)
def test_a_single_change_is_found_where_it_is(seed: int) -> None:
    graph = seeded_graph(seed)
    index = seed % len(graph.ops)
    op = replace(graph.ops[index], name="renamed")
    changed = replace(graph, ops=(*graph.ops[:index], op, *graph.ops[index + 1 :]))
    found = first_difference(graph, changed)
    assert found.startswith(f"operator {index} was {graph.ops[index].name}")
    assert "and is renamed" in found


CASES: list[tuple[str, Callable[[], tuple[Graph, Graph]], str]] = [
    (
        "shape of arguments",
        lambda: (network(2, 64), network(2, 32)),
        "input 0 was f32[8,64] and is f32[8,32] now (2 other inputs changed too); it is first read by dot "
        "(/home/me/net.py:10, layer_0). Plan again with remat.plan(...) and arguments of these shapes and "
        "dtypes.",
    ),
    (
        "more arguments",
        lambda: (network(2), network(2, inputs=1)),
        "it had 3 inputs and has 4 now; the first that differs, input 3, was not there and is f32[3] now. "
        "Pass the same arguments (parameters and closed-over arrays included), or plan again with "
        "remat.plan(...).",
    ),
    (
        "fewer arguments",
        lambda: (network(3), network(2)),
        "it had 4 inputs and has 3 now; the first that differs, input 3, was f32[64,64] and is not there "
        "now. Pass the same arguments (parameters and closed-over arrays included), or plan again with "
        "remat.plan(...).",
    ),
    (
        "another operator",
        lambda: (network(), network(activation="sin")),
        "operator 1 was tanh (/home/me/net.py:11, layer_0) -> f32[8,64] in the forward pass and is sin "
        "(/home/me/net.py:11, layer_0) -> f32[8,64] in the forward pass now. Plan again with "
        "remat.plan(...).",
    ),
    (
        "an inserted operator",
        lambda: (network(), network(extra=1)),
        "operator 3, mul (/home/me/net.py:17, layer_1) -> f32[8,64] in the forward pass, is new. Plan "
        "again with remat.plan(...).",
    ),
    (
        "an operator left out",
        lambda: (network(extra=1), network()),
        "operator 3, mul (/home/me/net.py:17, layer_1) -> f32[8,64] in the forward pass, is gone. Plan "
        "again with remat.plan(...).",
    ),
    (
        "other arguments differentiated",
        lambda: (network(), network(arguments=2)),
        "it had 1 gradient and has 2 now; operator 7, dot -> f32[64,64] in the backward pass, is new. "
        "Differentiate the same arguments (argnums), or plan again with remat.plan(...).",
    ),
    (
        "a longer loop",
        lambda: (replace(chain(2), multiplicity=12), replace(chain(2), multiplicity=16)),
        "it ran 12 times per call and runs 16 times now. Plan again with remat.plan(...) for loops of this "
        "length.",
    ),
    (
        "other operands",
        lambda: (_two_inputs([0, 1]), _two_inputs([0, 0])),
        "operator 0, add, read input 1, f32[64] as operand 1 and reads input 0, f32[64] now. Plan again "
        "with remat.plan(...).",
    ),
    (
        "fewer operands",
        lambda: (_two_inputs([0, 1]), _two_inputs([0])),
        "operator 0, add, read 2 operands and reads 1 now. Plan again with remat.plan(...).",
    ),
    (
        "another result",
        lambda: (_two_results(0), _two_results(1)),
        "result 0 was value 1 (f32[64] of operator 0, tanh) and is value 2 (f32[64] of operator 1, sin) "
        "now. Plan again with remat.plan(...).",
    ),
    (
        "another constant",
        lambda: (_with_constant((4,)), _with_constant((5,))),
        "constant 0 was f32[4] and is f32[5] now; it is first read by add. Plan again with "
        "remat.plan(...).",
    ),
    (
        "operators at the end",
        lambda: (chain(2), _longer(chain(2))),
        "operator 4, sin -> f32[64] in the forward pass, is new. Plan again with remat.plan(...).",
    ),
    (
        "a result of another shape",
        lambda: (chain(1), _reshaped(chain(1), 1)),
        "operator 0, tanh, computed f32[64] and computes f32[7] now. Plan again with remat.plan(...).",
    ),
    (
        "a value that nothing computes",
        lambda: (chain(1), _dangling(chain(1))),
        "value 4 was not there and is value 4, f32[64] now. Plan again with remat.plan(...).",
    ),
]


def _two_inputs(reads: list[int]) -> Graph:
    builder = GraphBuilder()
    for _ in range(2):
        builder.input()
    value = builder.op("add", reads)
    return builder.build([value], [builder.op("mul", [value, builder.cotangent()])])


def _two_results(chosen: int) -> Graph:
    builder = GraphBuilder()
    x = builder.input()
    results = [builder.op("tanh", [x]), builder.op("sin", [x])]
    gradient = builder.op("mul", [results[0], builder.cotangent()])
    return builder.build([results[chosen]], [gradient])


def _with_constant(shape: tuple[int, ...]) -> Graph:
    builder = GraphBuilder()
    value = builder.op("add", [builder.input(), builder.constant(shape)])
    return builder.build([value], [builder.op("mul", [value, builder.cotangent()])])


def _longer(graph: Graph) -> Graph:
    builder = GraphBuilder()
    builder.values, builder.ops = list(graph.values), list(graph.ops)
    builder.inputs, builder.cotangents = list(graph.inputs), list(graph.cotangents)
    builder.op("sin", [0])
    return builder.build(graph.outputs, graph.gradients)


def _reshaped(graph: Graph, value: int) -> Graph:
    values = list(graph.values)
    values[value] = replace(values[value], shape=(7,))
    return replace(graph, values=tuple(values))


def _dangling(graph: Graph) -> Graph:
    return replace(graph, values=(*graph.values, replace(graph.values[0], id=len(graph.values))))


@pytest.mark.parametrize("make, expected", [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_the_first_difference_says_what_was_and_what_is(
    make: Callable[[], tuple[Graph, Graph]], expected: str
) -> None:
    planned, traced = make()
    assert first_difference(planned, traced) == expected
    assert first_difference(traced, planned) != ""


def test_inputs_are_called_by_the_names_given() -> None:
    names = ("argument 0 leaf 3", "argument 1")
    found = first_difference(network(2, 64), network(2, 32), inputs=names)
    assert found.startswith("argument 0 leaf 3 was f32[8,64] and is f32[8,32] now (2 other")
    found = first_difference(network(1), network(2), inputs=names)
    assert "the first that differs, input 2, was not there and is f32[64,64]" in found


def test_a_loop_body_is_named_and_so_is_the_carry() -> None:
    planned = replace(chain(2), carried=(0, 2))
    traced = replace(chain(2, (32,)), carried=(0, 2))
    found = first_difference(planned, traced, loop="scan0/scan1")
    expected = (
        "in the body of loop scan0/scan1, input 0 (the loop's carry) was f32[64] and is f32[32]"
    )
    assert found.startswith(expected)
    planned, traced = (replace(g, carried=(), invariant=(0,)) for g in (planned, traced))
    assert "input 0 (the same in every iteration) was" in first_difference(planned, traced)


def test_traced_functions_are_told_apart() -> None:
    def loss(w: jax.Array, x: jax.Array, activation: Callable = jnp.tanh) -> jax.Array:
        return jnp.sum(activation(x @ w))

    w = jax.ShapeDtypeStruct((8, 8), "float32")
    x, wide = (jax.ShapeDtypeStruct((n, 8), "float32") for n in (4, 16))

    def graph(*args: object, **options: object) -> Graph:
        return remat.plan(*args, **options).graph  # type: ignore[arg-type]

    planned = graph(loss, w, x)
    assert first_difference(planned, graph(loss, w, x)) == ""
    wider = first_difference(planned, graph(loss, w, wide))
    assert wider.startswith(
        "input 1 was f32[4,8] and is f32[16,8] now; it is first read by dot_general"
    )
    assert f"{__name__.rpartition('.')[2]}.py:" in wider
    other = first_difference(planned, graph(lambda w, x: loss(w, x, jnp.sin), w, x))
    assert "operator 1 was tanh" in other and "and is sin" in other
    both = first_difference(planned, graph(loss, w, x, argnums=(0, 1)))
    assert both.startswith("it had 1 gradient and has 2 now") and "argnums" in both


# --- plans ---------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 200), other=st.integers(0, 200), data=st.data())
@laws(60)
def test_a_diff_is_false_exactly_for_equal_plans(
    seed: int, other: int, data: st.DataObject
) -> None:
    row = st.sampled_from(POLICY_TABLE)
    first = make_plan(seeded_graph(seed), data.draw(row).factory(), barriers=False)
    same = data.draw(st.booleans())
    graph = seeded_graph(seed if same else other)
    second = make_plan(graph, data.draw(row).factory(), barriers=False)
    found, back = diff(first, second), diff(second, first)
    assert bool(found) == bool(back) == (first != second)
    assert not diff(first, replace(first, solve_seconds=first.solve_seconds + 1))
    assert (found.only_old, found.only_new) == (back.only_new, back.only_old)
    assert {(b, a) for a, b in found.changed} == set(back.changed)
    assert (str(found) == "The plans are equal.") == (first == second)
    flipped = {(c.name, c.new, c.old) for c in back.totals}
    assert {(c.name, c.old, c.new) for c in found.totals} == flipped
    if same:
        kept = {e.value for e in first.saved}, {e.value for e in second.saved}
        assert {e.value for e in found.only_old} == kept[0] - kept[1]
        assert {e.value for e in found.only_new} == kept[1] - kept[0]
        times = [{e.op: e.times for e in plan.recomputed} for plan in (first, second)]
        for entries, sign in ((found.more, 1), (found.less, -1)):
            for item in entries:
                assert (item.new_times - item.old_times) * sign > 0
                assert item.old_times == times[0].get(item.entry.op, 0)
                assert item.new_times == times[1].get(item.entry.op, 0)
        ops = {op for op in {**times[0], **times[1]} if times[0].get(op) != times[1].get(op)}
        assert {item.entry.op for item in (*found.more, *found.less)} == ops


def _samples(plan: Plan) -> dict[str, object]:
    """Every compared field of a plan with another value."""
    body = LoopPlan("scan0", 2, plan)
    entry = plan.saved[0]
    graph = replace(plan.graph, ops=(replace(plan.graph.ops[0], source="x"), *plan.graph.ops[1:]))
    samples: dict[str, object] = {
        "status": "optimal",
        "graph": graph,
        "schedule": Schedule((*plan.schedule.steps, Step("barrier"))),
        "saved": (replace(entry, why="because"), *plan.saved[1:]),
        "recomputed": (*plan.recomputed, *make_plan(plan.graph, Full()).recomputed[:1]),
        "certificate": Certificate("flow", 3, 3),
        "loops": (body,),
    }
    for field in dataclasses.fields(Plan):
        if field.compare and field.name not in samples:
            samples[field.name] = _another(getattr(plan, field.name))
    return samples


def _another(value: object) -> object:
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value, "x")
    return value + 1 if isinstance(value, (int, float)) else 5


def test_every_field_that_differs_is_told() -> None:
    plan = make_plan(chain(3), SaveAll())
    for name, value in _samples(plan).items():
        other = replace(plan, **{name: value})  # type: ignore[arg-type]
        assert other != plan, name
        assert diff(plan, other) and diff(other, plan), name
        assert str(diff(plan, other)) not in ("", "The plans are equal."), name
    changed = replace(plan, notes=("x",), opaque=("y",))
    assert diff(plan, changed) == PlanDiff(others=("opaque", "notes"))
    lines = replace(plan, graph=_samples(plan)["graph"])  # type: ignore[arg-type]
    assert diff(plan, lines) == PlanDiff(others=("graph",))


def test_a_diff_of_policies_is_exact() -> None:
    """`full` keeps nothing of the chain and runs its two first operators again."""
    keep, again = (make_plan(chain(3), policy, barriers=False) for policy in (SaveAll(), Full()))
    found = diff(keep, again)
    assert found.function == "" and not found.changed and not found.less and not found.others
    assert [e.value for e in found.only_old] == [e.value for e in keep.saved if not e.is_input]
    assert [(r.entry.op, r.old_times, r.new_times) for r in found.more] == [
        (entry.op, 0, entry.times) for entry in again.recomputed
    ]
    assert Change("policy_name", "save_all", "full") in found.settings
    assert Change("saved_bytes", keep.saved_bytes, again.saved_bytes) in found.totals
    assert not found.order_changed


def test_another_order_alone_is_told() -> None:
    plan = make_plan(chain(3), SaveAll())
    steps = plan.schedule.steps
    other = replace(plan, schedule=Schedule((*steps[:-2], steps[-1], steps[-2])))
    assert diff(plan, other) == PlanDiff(order_changed=True)
    assert str(diff(plan, other)) == "The same is kept and repeated, in another order."


def test_another_form_is_told() -> None:
    plan = make_plan(chain(3), SaveAll())
    entry = plan.saved[0]
    packed = replace(entry, form="bits", nbytes=8)
    other = replace(plan, saved=(packed, *plan.saved[1:]))
    found = diff(plan, other)
    assert found == PlanDiff(changed=((entry, packed),))
    assert str(found).splitlines() == [
        "Kept in another form or shape: 1 value",
        "  256 B -> 8 B  f32[64] raw -> f32[64] bits  tanh",
    ]


# --- plans of another function ---------------------------------------------------------------------------


def test_moved_lines_change_nothing_that_is_kept() -> None:
    old, new = (make_plan(network(first_line=n), SaveAll()) for n in (10, 50))
    found = diff(old, new)
    assert not found.only_old and not found.only_new and not found.changed and not found.function
    old, new = (
        make_plan(network(), SaveAll()),
        make_plan(network(inputs=1, first_line=50), SaveAll()),
    )
    found = diff(old, new)
    assert found.function.startswith("it had 4 inputs and has 5 now")
    assert not found.only_old and not found.only_new and not found.changed
    assert not found.totals and not found.others


def test_a_new_layer_is_all_that_is_new() -> None:
    for policy in (SaveAll(), Full(), MinCut()):
        old, new = (make_plan(network(layers), policy, barriers=False) for layers in (3, 4))
        found = diff(old, new)
        computed = [entry for entry in found.only_new if not entry.is_input]
        assert not [entry for entry in found.only_old if not entry.is_input]
        assert {entry.scope for entry in computed} <= {"layer_3"}
        kept = sum(not e.is_input for e in new.saved) - sum(not e.is_input for e in old.saved)
        assert len(computed) == kept
        assert not found.changed


def test_an_operator_in_between_shifts_nothing() -> None:
    old, new = (make_plan(network(extra=extra), SaveAll()) for extra in (None, 0))
    found = diff(old, new)
    assert "operator 1, mul" in found.function and "is new" in found.function
    assert not found.only_old and not found.only_new and not found.changed


def test_another_shape_is_the_same_value() -> None:
    old, new = (make_plan(network(width=width), SaveAll()) for width in (64, 32))
    found = diff(old, new)
    assert not found.only_old and not found.only_new
    assert [(a.label, b.label) for a, b in found.changed if a.op == "tanh"] == [
        ("f32[8,64]", "f32[8,32]")
    ] * 3


def test_without_scope_or_line_another_shape_is_another_value() -> None:
    old, new = (make_plan(chain(3, (width,)), SaveAll()) for width in (64, 32))
    found = diff(old, new)
    assert [e.label for e in found.only_old] == ["f32[64]"] * len(old.saved)
    assert [e.label for e in found.only_new] == ["f32[32]"] * len(new.saved)


# --- loops -----------------------------------------------------------------------------------------------


def test_loops_are_compared_by_path() -> None:
    keep, again = (make_plan(chain(3), policy, barriers=False) for policy in (SaveAll(), Full()))
    old = replace(keep, loops=(LoopPlan("scan0", 4, keep), LoopPlan("scan1", 2, keep)))
    new = replace(keep, loops=(LoopPlan("scan0", 8, again), LoopPlan("scan2", 2, keep)))
    found = diff(old, new)
    assert found.loops == (("scan0", diff(keep, again)),)
    assert found.loop_lengths == (Change("scan0", 4, 8),)
    assert [entry.path for entry in found.loops_only_old] == ["scan1"]
    assert [entry.path for entry in found.loops_only_new] == ["scan2"]
    assert not found.only_old and not found.more and not found.others
    text = str(found).splitlines()
    assert text[:3] == [
        "Gone: loop scan1, 2 iterations",
        "New: loop scan2, 2 iterations",
        "Loop scan0: 4 -> 8 iterations",
    ]
    assert text[3] == "Loop scan0, one iteration:" and "  policy_name: save_all -> full" in text
    deep = [replace(keep, loops=(LoopPlan("scan0", 2, plan),)) for plan in (old, new)]
    assert diff(*deep).loops[0][1].loops == found.loops


def test_a_traced_loop_planned_otherwise() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        body = lambda c, _: (jnp.tanh(c @ w), None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=5)[0].sum()

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    full, keep = (remat.plan(loss, *shapes, remat_policy=p) for p in ("full", "save_all"))
    found = diff(full, keep)
    (path, inner), *others = found.loops
    assert path == "scan0" and not others and not inner.function
    kept = (
        ["one_minus_square"] if TANH_KEEPS_ONE_ARRAY else ["sub", "tanh"]
    )  # 1 - y**2, or y and 1 - y
    assert sorted(entry.op for entry in inner.only_new) == kept
    assert {item.entry.name for item in inner.less} == {"dot_general", "tanh"}
    assert {(item.old_times, item.new_times) for item in inner.less} == {(1, 0)}
    assert "what a loop keeps is among its results" in str(found)


# --- text ------------------------------------------------------------------------------------------------


def test_the_text_of_a_diff() -> None:
    keep, again = (make_plan(network(), policy, barriers=False) for policy in (SaveAll(), Full()))
    lines = str(diff(keep, again)).splitlines()
    assert lines[0] == "policy_name: save_all -> full"
    saved = next(line for line in lines if line.split()[:1] == ["saved"])
    assert saved.split() == ["saved", "4.0", "KiB", "->", "0", "B", "-100.0%"]
    assert "No longer kept: 3 values, 6.0 KiB" in lines
    assert "  6.0 KiB  x3  f32[8,64]  tanh  /home/me/net.py:11  layer_*" in lines


def test_rows_beyond_the_limit_are_counted() -> None:
    plan = make_plan(chain(3), SaveAll())
    entries = [replace(plan.saved[0], label=f"f32[{n}]", value=n) for n in range(3)]
    found = PlanDiff(only_new=tuple(entries))
    assert found.format(top=2).splitlines() == [
        "Kept now: 3 values, 768 B",
        "  256 B  f32[0]  tanh",
        "  256 B  f32[1]  tanh",
        "  and 1 more",
    ]
    assert len(found.format(top=3).splitlines()) == 4 and "more" not in found.format(top=3)
