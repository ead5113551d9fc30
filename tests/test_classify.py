"""A primitive without a row is classified by what it lowers to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from new_primitives import new_primitive

import remat
from remat.compat import name_of, open_jaxpr, sub_jaxprs
from remat.core.classify import OpCost
from remat.core.classify import classify as by_table
from remat.core.primitives import OpClass
from remat.trace import classify as module
from remat.trace.classify import classify_equation

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of what it calls."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from equations(inner)


def cost_of(function: Callable[..., Any], *args: Any) -> OpCost:
    """Returns the cost of a function of arrays as one primitive that nobody knows."""
    bind = new_primitive("nobody_knows_it", function)
    (eqn,) = jax.make_jaxpr(bind)(*args).eqns
    assert by_table("nobody_knows_it", {}, [], []).op_class is OpClass.OPAQUE
    return classify_equation(eqn)


def test_element_wise_operations_are_fusible_and_counted() -> None:
    cost = cost_of(lambda x: (1 + x) * (1 - x), X)
    assert (cost.op_class, cost.flops) == (OpClass.POINTWISE, 3 * 32)
    assert cost.fusible and cost.recomputable and cost.known and not cost.reason
    assert not (cost.heavy or cost.random or cost.effectful)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (jnp.tanh, "tanh"),
        (jnp.exp, "exp"),
        (lax.erf, "erf"),
        (lax.erf_inv, "erf_inv"),
        (lax.rsqrt, "rsqrt"),
        (lambda x: x > 0, "gt"),
        (lambda x: x.astype(jnp.bfloat16), "convert_element_type"),
        (lambda x: x.sum(1), "reduce_sum"),
        (lambda x: lax.reduce_max(x, (0,)), "reduce_max"),
        (lambda x: x.T, "transpose"),
        (lambda x: lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,)))), "dot_general"),
        (lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ()))), "dot_general"),
        (lambda x: lax.dynamic_slice(x, (1, 2), (2, 2)), "dynamic_slice"),
        (lambda x: lax.sort(x), "sort"),
        (lambda x: jnp.fft.fft(x.astype(jnp.complex64)), "fft"),
        (
            lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "VALID"),
            "reduce_window_sum",
        ),
        (
            lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 1), "VALID"),
            "reduce_window_sum",
        ),
        (lambda x: lax.optimization_barrier(x), "optimization_barrier"),
    ],
)
def test_a_lowering_costs_what_the_row_of_its_primitive_says(
    function: Callable[..., Any], primitive: str
) -> None:
    """The table is one, however an operator is reached."""
    (row,) = [
        classify_equation(eqn)
        for eqn in equations(jax.make_jaxpr(function)(X))
        if eqn.primitive.name == primitive
    ]
    cost = cost_of(function, X)
    assert (cost.fusible, cost.heavy, cost.recomputable) == (
        row.fusible,
        row.heavy,
        row.recomputable,
    )
    extra = X.size if primitive == "fft" else 0  # the conversion to complex numbers
    assert cost.flops == row.flops + extra
    assert cost.op_class is row.op_class


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
def test_convolutions_are_counted_as_the_primitive(
    groups: int, layout: tuple[str, str, str], stride: int, dilation: int
) -> None:
    sizes, kernel = {"N": 2, "H": 9, "W": 8, "C": 4}, {"H": 3, "W": 2, "I": 4 // groups, "O": 6}
    x = jnp.ones([sizes[d] for d in layout[0]])
    w = jnp.ones([kernel[d] for d in layout[1]])

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            (stride, 1),
            ((1, 1), (0, 1)),
            lhs_dilation=(dilation, 1),
            dimension_numbers=layout,
            feature_group_count=groups,
        )

    (eqn,) = jax.make_jaxpr(convolve)(x, w).eqns
    cost = cost_of(convolve, x, w)
    assert (cost.flops, cost.op_class) == (classify_equation(eqn).flops, OpClass.HEAVY)


def test_several_operations_are_put_together() -> None:
    softmax = cost_of(jax.nn.softmax, X)
    assert softmax.op_class is OpClass.REDUCTION
    assert softmax.recomputable and not softmax.fusible  # its sums become buffers
    product = cost_of(lambda x: jnp.tanh(x @ x.T), X)
    assert product.heavy and not product.fusible
    turned = cost_of(lambda x: x.T * 2, X)
    assert turned.fusible and turned.op_class is OpClass.INDEXED
    squares = cost_of(lambda x: (x * x).sum(1), X)
    assert squares.op_class is OpClass.REDUCTION and squares.fusible
    logs = cost_of(lambda x: jnp.log(x.sum(1)), X)
    assert logs.op_class is OpClass.REDUCTION and not logs.fusible


def test_random_bits_are_random() -> None:
    key = jax.random.key(0, impl="rbg")
    cost = cost_of(lambda k: jax.random.bits(k, (100,)), key)
    assert cost.random and cost.recomputable and cost.op_class is OpClass.RANDOM


@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (lambda x: jax.pure_callback(lambda y: y, x, x), "stablehlo.custom_call @"),
        (lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, y: y * 2, x), "stablehlo.while"),
        (lambda x: lax.cond(x[0, 0] > 0, lambda: x, lambda: -x), "stablehlo.case"),
        (lambda x: lax.rng_uniform(x[0, 0], x[1, 1], (3,)), "stablehlo.rng"),
        (
            lambda x: jnp.tanh(x) + jax.pure_callback(lambda y: y, x, x),
            "stablehlo.custom_call @",
        ),
    ],
)
def test_what_is_not_understood_stays_opaque_and_is_named(
    function: Callable[..., Any], culprit: str
) -> None:
    cost = cost_of(function, X)
    assert cost.op_class is OpClass.OPAQUE
    assert not (cost.known or cost.recomputable or cost.fusible)
    assert "nobody_knows_it" in cost.reason and culprit in cost.reason


def test_a_collective_is_not_lowered_alone() -> None:
    bind = new_primitive("nobody_knows_it", lambda x: lax.psum(x, "i"))
    (outer,) = jax.make_jaxpr(
        jax.shard_map(
            lambda x: bind(x),
            mesh=jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=jax.P("i"),
            out_specs=jax.P("i"),
            check_vma=False,
        )
    )(X).eqns
    (eqn,) = outer.params["jaxpr"].eqns
    cost = classify_equation(eqn)
    assert cost.op_class is OpClass.OPAQUE and not cost.recomputable
    assert "does not lower alone" in cost.reason


def test_one_primitive_on_equal_shapes_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = new_primitive("nobody_knows_it", jnp.cosh)
    calls = []
    lowered = module._lowered
    monkeypatch.setattr(module, "_lowered", lambda *args: calls.append(1) or lowered(*args))
    for args in ((X,), (X,), (X[:2],), (X.astype(jnp.bfloat16),), (X,)):
        (eqn,) = jax.make_jaxpr(bind)(*args).eqns
        assert classify_equation(eqn).fusible
    assert len(calls) == 3


@pytest.mark.parametrize("inside", ["jit", "vmap", "scan"])
def test_classifying_inside_of_a_trace(inside: str) -> None:
    bind = new_primitive("nobody_knows_it", jnp.sinh)
    (eqn,) = jax.make_jaxpr(bind)(X[0]).eqns
    module._cache.clear()
    found = []

    def look(x: Any) -> Any:
        found.append(classify_equation(eqn))
        return x

    transforms = {
        "jit": jax.jit(look),
        "vmap": jax.vmap(look, axis_name="i"),
        "scan": lambda x: lax.map(look, x),
    }
    transforms[inside](X)
    assert found[0].op_class is OpClass.POINTWISE


# --- plans ----------------------------------------------------------------------------------------


def _mlp(activation: Callable[..., Any]) -> Callable[..., Any]:
    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = activation(x @ w)
        return jnp.mean(x**2)

    return loss


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", [remat.policies.MinCut.paper(), "full", "echo"])
def test_a_network_of_unknown_primitives_is_planned_as_one_of_known_ones(
    policy: remat.policies.Policy | str,
) -> None:
    weights = [jnp.full((64, 64), 0.02)] * 4
    x = jnp.linspace(-1, 1, 128 * 64).reshape(128, 64)
    known = _mlp(lambda x: jnp.sin(x) * jnp.cos(x))
    unknown = _mlp(new_primitive("nobody_knows_it", lambda x: jnp.sin(x) * jnp.cos(x)))
    plans = [remat.plan(f, weights, x, remat_policy=policy) for f in (known, unknown)]
    assert plans[0].saved_bytes == plans[1].saved_bytes
    assert not plans[1].opaque
    wanted = jax.grad(unknown)(weights, x)
    for got, want in zip(
        jax.grad(remat.checkpoint(unknown, remat_policy=policy))(weights, x), wanted, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_min_cut_and_full_keep_the_same_bytes_on_every_jax() -> None:
    """in jax 0.11.2 the derivative of tanh became a primitive of its own; a plan must not notice."""

    def loss(weights: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ w) @ w.T) + x, None

        return jnp.sum(lax.scan(body, x, weights)[0] ** 2)

    weights = jax.ShapeDtypeStruct((10, 128, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    row = 512 * 4  # bytes of a float32 column of the batch
    plans = {p: remat.plan(loss, weights, x, remat_policy=p) for p in ("min_cut", "full")}
    # Per iteration: the carry; with min_cut also the inner activations and the second product.
    assert plans["full"].saved_bytes == 10 * 128 * row + 128 * row == 2_883_584
    assert plans["min_cut"].saved_bytes == 10 * (128 + 256 + 128) * row + 128 * row == 10_747_904
    assert plans["min_cut"].status == "optimal"
    assert not (plans["min_cut"].opaque or plans["full"].opaque)


# --- operators that are objects -------------------------------------------------------------------


@pytest.fixture
def remat3() -> Any:
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has one implementation of jax.checkpoint")
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


def _nested(w: Any, x: Any) -> Any:
    block = jax.checkpoint(lambda y: jnp.tanh(jnp.sin(y @ w) * 2))
    return jnp.sum(block(block(x)) ** 2)


def _nested_in_scan(w: Any, x: Any) -> Any:
    def body(x: Any, _: None) -> Any:
        return jax.checkpoint(lambda y: jnp.tanh(jnp.sin(y @ w)))(x), None

    return jnp.sum(lax.scan(body, x, None, length=4)[0] ** 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("policy", ["min_cut", "full"])
@pytest.mark.parametrize("function", [_nested, _nested_in_scan])
def test_a_checkpoint_of_the_newer_kind_is_taken_over(
    function: Callable[..., Any], policy: str, lowering: str, remat3: None
) -> None:
    w = jax.random.normal(jax.random.key(1), (32, 32)) / 6
    x = jax.random.normal(jax.random.key(0), (16, 32))
    options: dict[str, Any] = {"remat_policy": policy, "lowering": lowering}
    newer = remat.plan(function, w, x, **options)
    got = jax.grad(remat.checkpoint(function, **options))(w, x)
    jax.config.update("jax_remat3", False)
    older = remat.plan(function, w, x, **options)
    assert newer.saved_bytes == older.saved_bytes
    assert [op.name for op in newer.graph.ops] == [op.name for op in older.graph.ops]
    assert not newer.opaque
    np.testing.assert_allclose(got, jax.grad(function)(w, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lowering", ["staged", "policy"])
def test_a_checkpoint_of_the_newer_kind_is_respected(lowering: str, remat3: None) -> None:
    w = jax.random.normal(jax.random.key(1), (32, 32)) / 6
    x = jax.random.normal(jax.random.key(0), (16, 32))
    options: dict[str, Any] = {"nested_checkpoints": "respect", "lowering": lowering}
    got = jax.grad(remat.checkpoint(_nested, **options))(w, x)
    np.testing.assert_allclose(got, jax.grad(_nested)(w, x), rtol=2e-5, atol=2e-5)
    equations = jax.make_jaxpr(_nested)(w, x).eqns
    blocks = [classify_equation(e) for e in equations if name_of(e) == "checkpoint"]
    assert len(blocks) == 2 and all(block.op_class is OpClass.CALL for block in blocks)


def test_operators_that_are_objects_are_planned_by_what_they_expand_to() -> None:
    """`jnp.searchsorted` and, since jax 0.12, `jnp.ldexp` are objects with derivative rules of their own."""

    def loss(x: Any) -> Any:
        where = jnp.searchsorted(
            jnp.arange(4.0), lax.stop_gradient(x.ravel()), method="compare_all"
        )
        return jnp.sum(jnp.sin(jnp.ldexp(jnp.cos(x), 2)).ravel() * where)

    plan = remat.plan(loss, X, remat_policy="full")
    assert not plan.opaque
    assert not {op.name for op in plan.graph.ops} & {"SearchSorted", "Ldexp", "call_hi_primitive"}
    np.testing.assert_allclose(
        jax.grad(remat.checkpoint(loss))(X), jax.grad(loss)(X), rtol=1e-5, atol=1e-6
    )


def test_equal_numbers_of_different_types_are_different_parameters() -> None:
    primitive = Primitive("as_its_parameter_says")
    primitive.def_abstract_eval(lambda aval, *, how: aval)
    mlir.register_lowering(
        primitive,
        mlir.lower_fun(
            lambda x, *, how: jnp.sin(x) if how is True else x + how, multiple_results=False
        ),
    )

    def flops(how: Any) -> int:
        jaxpr = jax.make_jaxpr(lambda x: primitive.bind(x, how=how))(jnp.ones(8))
        return classify_equation(jaxpr.eqns[0]).flops

    assert flops(True) > flops(1) == flops(2)
