"""Rewrites of the joint program: the same gradients bit for bit, from exactly as many bytes as promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from versions import MAXIMUM_COMPARES_OPERANDS

import remat
from remat.core.forms import stored_bytes
from remat.core.graph import required_sites
from remat.policies import Gist, MinCut, Monet
from remat.rewrite.menu import Menu
from remat.rewrite.rules import RULES
from remat.trace.joint import Joint, trace_joint, trace_primal
from remat.trace.program import evaluate

ROWS, WIDTH = 64, 128
ELEMENTS = ROWS * WIDTH
KEY = jax.random.key(5)


def _x(shape: tuple[int, ...] = (ROWS, WIDTH), seed: int = 1, dtype: Any = jnp.float32) -> Any:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _joint(fun: Callable[..., Any], *args: Any) -> Joint:
    primal, _ = trace_primal(lambda *a: ([fun(*a)], None), args)
    flags = [bool(jnp.issubdtype(jax.typeof(a).dtype, jnp.inexact)) for a in args]
    return trace_joint(primal, args, flags)


def _rewritten(fun: Callable[..., Any], *args: Any) -> tuple[Joint, Joint, Menu]:
    """Checks that both programs compute the same, and returns them."""
    joint = _joint(fun, *args)
    menu = Menu(joint, RULES)
    changed = menu.joint({site.name for site in menu.sites})
    changed.graph.check()
    result = jax.eval_shape(fun, *args)
    cotangent = _x(result.shape, 7, result.dtype)
    plain, ours = (
        jax.jit(lambda *inputs, p=j.program: evaluate(p, inputs))(*args, cotangent)
        for j in (joint, changed)
    )
    for a, b in zip(plain, ours, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return joint, changed, menu


def _kept(joint: Joint) -> int:
    graph = joint.graph
    saved = MinCut(memory_weight=1.25).decide(graph).saved - graph.alive_anyway
    return sum(stored_bytes(graph.values[v]) for v in saved)


def _dropout(x: Any, rate: float = 0.1) -> Any:
    keep = jax.random.bernoulli(KEY, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def _flax_dropout(x: Any) -> Any:
    return nn.Dropout(0.1, deterministic=False).apply({}, x, rngs={"dropout": KEY})


def _pool(x: Any, window: int = 2, stride: int = 2, padding: Any = "VALID") -> Any:
    return nn.max_pool(x, (window, window), (stride, stride), padding=padding)


# What an elementwise operator keeps, in bits per element, where nothing else needs its operand or its result.
ALONE = {
    "relu": (jax.nn.relu, 1),
    "dropout": (_dropout, 1),
    "flax dropout": (_flax_dropout, 1),
    "relu, dropout": (lambda x: _dropout(jax.nn.relu(x)), 1),
    "leaky_relu": (jax.nn.leaky_relu, 1),
    "clamp": (jax.nn.relu6, 1),
    "lax.clamp": (lambda x: jax.lax.clamp(-1.0, x, 1.0), 1),
    "where": (lambda x: jnp.where(x > 0.5, x, 0.0), 1),
    "abs": (jnp.abs, 1),
    "bernoulli mask": (lambda x: x * jax.random.bernoulli(KEY, 0.9, x.shape), 1),
    "maximum": (lambda x: jnp.maximum(x, 0), 2),  # a tie has its own gradient: three cases
    "maximum, dropout": (lambda x: _dropout(jnp.maximum(x, 0)), 3),
    "clip": (lambda x: jnp.clip(x, -1.0, 1.0), 4),
}


@pytest.mark.parametrize("name", ALONE)
def test_an_operator_alone_keeps_exactly_its_bits(name: str) -> None:
    operator, bits = ALONE[name]
    # The gradient flows through x alone: nothing but the operator needs anything of the forward pass. `tile`
    # makes the operand something that is not an argument.
    _, changed, _ = _rewritten(lambda x: operator(jnp.tile(x, (1, 2))), _x((ROWS, WIDTH // 2)))
    operand = stored_bytes(changed.graph.values[changed.graph.inputs[0]])
    assert _kept(changed) == bits * ELEMENTS // 8 < operand


# Before a matmul, which needs the result in any case.
BEFORE_MATMUL = {
    "relu": jax.nn.relu,
    "where": lambda x: jnp.where(x > 0, x, 0),
    "relu, dropout": lambda x: _dropout(jax.nn.relu(x)),
    "relu, flax dropout": lambda x: _flax_dropout(jax.nn.relu(x)),
    "dropout, relu": lambda x: jax.nn.relu(_dropout(x)),
    "relu, dropout twice": lambda x: _dropout(_dropout(jax.nn.relu(x))),
    "dropout, relu, dropout, relu": lambda x: jax.nn.relu(_dropout(jax.nn.relu(_dropout(x)))),
    "squared mask": lambda x: jnp.where(x > 0, jax.nn.relu(x), 0),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", BEFORE_MATMUL)
def test_before_a_matmul_the_mask_is_read_off_the_result(name: str, dtype: Any) -> None:
    operator = BEFORE_MATMUL[name]
    w = _x((WIDTH, WIDTH), 2, dtype)
    joint, changed, menu = _rewritten(lambda x, w: operator(x @ w) @ w, _x(dtype=dtype), w)
    activation = ELEMENTS * jnp.dtype(dtype).itemsize
    assert _kept(changed) == activation  # not a byte beyond what the matmul needs
    assert _kept(joint) > activation
    assert {site.rule for site in menu.sites} <= {"joint_mask", "mask_from_output"}


def test_a_maximum_before_a_matmul_keeps_its_ties() -> None:
    w = _x((WIDTH, WIDTH), 2)
    _, changed, menu = _rewritten(lambda x, w: jnp.maximum(x @ w, 0) @ w, _x(), w)
    masks = 2 if MAXIMUM_COMPARES_OPERANDS else 1
    assert _kept(changed) == ELEMENTS * 4 + masks * ELEMENTS // 8
    assert menu.sites == ()


@pytest.mark.parametrize(
    ("operator", "primitive"), [(jax.nn.sigmoid, "logistic"), (jnp.tanh, "tanh")]
)
def test_sigmoid_and_tanh_keep_only_their_output(operator: Any, primitive: str) -> None:
    w = _x((WIDTH, WIDTH), 2)
    joint, _, menu = _rewritten(lambda x, w: operator(x @ w) @ w, _x(), w)
    graph = joint.graph
    (kept,) = MinCut().decide(graph).saved - graph.alive_anyway
    assert [op.name for op in graph.ops if kept in op.outputs] == [primitive]
    assert _kept(joint) == ELEMENTS * 4  # the matmul reads the same value
    assert menu.sites == ()  # there is nothing to rewrite: jax's own gradients read the output


@pytest.mark.parametrize("name", ["relu", "pool"])
def test_nan_and_infinities_and_signed_zeros_stay(name: str) -> None:
    x = jnp.asarray(
        np.resize(
            [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-40, 2.0, -2.0, 5.0], (4, 8, 8, 1)
        ),
        jnp.float32,
    )
    if name == "relu":
        _rewritten(lambda x, w: jax.nn.relu(x).reshape(4, 64) @ w, x, _x((64, 3), 2))
    else:
        _rewritten(lambda x: _pool(x), x)
        _, _, menu = _rewritten(lambda x: _pool(jax.nn.relu(x)), x)
        assert [site.rule for site in menu.sites] == ["relu_through_pool"]
        values = jnp.asarray([np.nan, -1.0, 0.0, 1.0, 2.0])
        windows = jnp.stack(jnp.meshgrid(*[values] * 4, indexing="ij"), -1).reshape(25, 25, 2, 2)
        every = windows.transpose(0, 2, 1, 3).reshape(1, 50, 50, 1)  # each window of these there is
        _rewritten(lambda x: _pool(jax.nn.relu(x)), every)
        _rewritten(lambda x: _pool(jax.nn.relu(x), 3, 2, "SAME"), every)


def _conv(x: Any, k: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pool_keeps_two_bits_per_window(dtype: Any) -> None:
    x, k = _x((2, 16, 16, 4), 3, dtype), _x((3, 3, 4, 4), 4, dtype)
    windows = 2 * 8 * 8 * 4
    joint, changed, menu = _rewritten(lambda x, k: _conv(_pool(jax.nn.relu(_conv(x, k))), k), x, k)
    pooled = windows * jnp.dtype(dtype).itemsize
    assert _kept(changed) == pooled + 2 * windows // 8
    assert _kept(joint) >= 4 * pooled
    assert [site.rule for site in menu.sites] == ["relu_through_pool"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pool_without_relu_keeps_two_bits_per_window(dtype: Any) -> None:
    x, k = _x((2, 16, 16, 4), 3, dtype), _x((3, 3, 4, 4), 4, dtype)
    windows = 2 * 8 * 8 * 4
    joint, changed, menu = _rewritten(lambda x, k: _conv(_pool(_conv(x, k)), k), x, k)
    pooled = windows * jnp.dtype(dtype).itemsize
    assert _kept(changed) == pooled + 2 * windows // 8
    assert _kept(joint) >= 4 * pooled  # jax's gradient reads the operand, four values per window
    assert [site.rule for site in menu.sites] == ["pool_codes"]


def test_an_overlapping_pool_keeps_four_bits_per_window() -> None:
    x, k = _x((2, 16, 16, 4), 3), _x((3, 3, 4, 4), 4)
    windows = 2 * 8 * 8 * 4
    _, changed, _ = _rewritten(
        lambda x, k: _conv(_pool(jax.nn.relu(_conv(x, k)), 3, 2, "SAME"), k), x, k
    )
    assert _kept(changed) == windows * 4 + 4 * windows // 8


def test_values_keep_their_scope_and_line() -> None:
    def fun(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            return jax.nn.relu(x @ w) @ w

    _, changed, _ = _rewritten(fun, _x(), _x((WIDTH, WIDTH), 2))
    (mask,) = (op for op in changed.graph.ops if op.name == "gt")
    assert "layer" in mask.scope and __file__ in mask.source


def test_what_may_underflow_is_left_alone() -> None:
    # x * 0.5 > 0 is not x > 0: the smallest number halves to zero.
    _, _, menu = _rewritten(
        lambda x, w: (jax.nn.relu(x @ w) * 0.5) @ w, _x(), _x((WIDTH, WIDTH), 2)
    )
    assert menu.sites == ()


def test_a_pool_of_minima_is_not_taken_for_one_of_maxima() -> None:
    def fun(x: Any) -> Any:
        y = jax.nn.relu(x)
        window = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        smallest = jax.lax.reduce_window(y, jnp.inf, jax.lax.min, *window)
        largest = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, *window)
        return jnp.sin(smallest) * jax.lax.stop_gradient(largest)

    _, _, menu = _rewritten(fun, _x((2, 8, 8, 3)))
    assert {site.rule for site in menu.sites} == {"mask_from_output"}


def test_integers_wrap_around() -> None:
    n = jnp.full((8, 8), 2**30, jnp.int32)

    def fun(z: Any, w: Any) -> Any:
        y = jnp.where(n > 0, jax.nn.relu(z), 0.0)
        return jnp.tanh(y @ w) + jnp.where((n * 4 > 0) & (z > 0), jnp.sin(z) * z, 0.0)

    _rewritten(fun, _x((8, 8)), _x((8, 8), 2))


@pytest.mark.parametrize("kind", ["float8", "complex", "key"])
def test_other_types_are_left_alone(kind: str) -> None:
    first, second = jax.random.key(1), jax.random.key(2)

    def fun(z: Any, w: Any) -> Any:
        if kind == "float8":
            return (z.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) * 2
        if kind == "complex":
            c = jnp.where(z > 0.3, jax.lax.complex(z, 2 * z) * (0.5 + 1j), 0)
            return jnp.abs(c @ w.astype(c.dtype))
        key = jnp.where(w[0, 0] > 0, first, second)
        return jnp.tanh(jax.nn.relu(z * jax.random.uniform(key, z.shape)) @ w)

    _rewritten(fun, _x((8, 8)), _x((8, 8), 2))
    with jax.numpy_dtype_promotion("strict"):
        _rewritten(lambda z, w: jax.nn.relu(z @ w).astype(jnp.bfloat16), _x((8, 8)), _x((8, 8), 2))


def test_sites_have_the_same_names_whatever_else_is_chosen() -> None:
    def fun(x: Any, w: Any) -> Any:
        x = _dropout(jax.nn.relu(x @ w)) @ w
        return _dropout(jax.nn.relu(x)) @ w

    joint = _joint(fun, _x(), _x((WIDTH, WIDTH), 2))
    menu = Menu(joint, RULES)
    names = [site.name for site in menu.sites]
    assert len(names) == 4
    for name in names:
        alone = required_sites(name)
        assert alone <= set(names)
        assert set(menu.graph(alone).sites) == alone
        again = Menu(joint, RULES).graph(alone)
        assert again.fingerprint() == menu.graph(alone).fingerprint()
    assert menu.graph(()) is joint.graph


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["min_cut", "ilp", "gist", "monet", "auto"])
def test_gradients_are_bit_equal_through_the_api(policy: str) -> None:
    def loss(k: Any, x: Any) -> Any:
        for _ in range(2):
            x = _pool(jax.nn.relu(_conv(jax.nn.relu(_conv(x, k)), k)))
        return jnp.sum(_flax_dropout(jax.nn.relu(x.reshape(2, -1))) ** 2)

    x, k = _x((2, 16, 16, 4), 3), _x((3, 3, 4, 4), 4)
    plan = remat.plan(loss, k, x, remat_policy=policy)
    assert plan.graph.sites
    assert (
        plan.baseline_saved_bytes
        == remat.plan(loss, k, x, remat_policy="full").baseline_saved_bytes
    )
    ours = jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=policy)))(k, x)
    assert np.array_equal(ours, jax.jit(jax.grad(loss))(k, x))
    # A saved plan is applied with the same rewrites.
    saved = remat.Plan.from_json(plan.to_json())
    assert saved == plan
    assert np.array_equal(jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=saved)))(k, x), ours)


def test_loop_bodies_are_rewritten() -> None:
    def loss(w: Any, x: Any) -> Any:
        step = lambda x, _: (_dropout(jax.nn.relu(x @ w)) @ w, None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, None, length=4)[0] ** 2)

    w, x = 0.1 * _x((WIDTH, WIDTH), 2), _x()
    plan = remat.plan(loss, w, x, remat_policy="min_cut")
    (loop,) = plan.loops
    assert len(loop.plan.graph.sites) == 2
    ours = jax.jit(jax.grad(remat.checkpoint(loss)))(w, x)
    plain = MinCut(implementations="none")
    assert np.array_equal(ours, jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=plain)))(w, x))
    np.testing.assert_allclose(ours, jax.jit(jax.grad(loss))(w, x), rtol=1e-5, atol=1e-3)


def test_policies_say_which_rewrites_they_want() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(_dropout(jax.nn.relu(x @ w)) @ w)

    w, x = _x((WIDTH, WIDTH), 2), _x()

    def sites(policy: Any) -> tuple[str, ...]:
        return remat.plan(loss, w, x, remat_policy=policy).graph.sites

    assert len(sites(MinCut())) == 2
    assert sites(MinCut(implementations="none")) == sites(MinCut.paper()) == ()
    assert len(sites(MinCut(implementations=("joint_mask",)))) == 1
    assert len(sites(Gist(implementations=("intermediate",)))) == 1
    # A rule that builds on another brings it along.
    assert len(sites(MinCut(implementations=("mask_from_output",)))) == 2
    with pytest.raises(remat.PolicyError, match=r"nothing called .joint_msk..*joint_mask"):
        sites(MinCut(implementations=("joint_msk",)))
    assert sites(remat.policies.Checkmate()) == sites("full") == ()
    for policy in (MinCut, Gist, Monet, remat.policies.Ilp):
        with pytest.raises(remat.PolicyError, match="implementations"):
            policy(implementations="some")  # pyright: ignore[reportArgumentType]
