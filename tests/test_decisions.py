"""What turns on a last bit is decided once: by no plan does a gradient change beyond rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from new_primitives import new_primitive

import remat
from models.cases import CASES
from remat.compiler.compile import CPU_COMPILER_OPTIONS
from remat.core.errors import BudgetError, ScheduleError
from remat.core.graph import Graph
from remat.plans.simulate import simulate
from remat.plans.steps import Schedule, Step
from remat.policies import Ilp, MinCut

X = jax.random.normal(jax.random.key(0), (16, 32))
W = jax.random.normal(jax.random.key(1), (32, 32)) / 6


def _rms(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(1 + jnp.mean(x * x))


def _returned_clip(x: jax.Array) -> Any:
    h = jnp.clip(_rms(x), -0.7, 0.9)
    return jnp.mean(jnp.sin(h)), h


def _clipped_layers(x: jax.Array) -> Any:
    for _ in range(3):
        x = jnp.clip(_rms(x @ W), -0.7, 0.9)
    return jnp.sum(x), x


def _column_maxima(x: jax.Array) -> Any:
    return jnp.sum(jnp.sin(jax.nn.gelu(x @ W).max(0) @ W)), 0


def _returned_maximum(x: jax.Array) -> Any:
    h = jnp.maximum(_rms(x), 0.1)
    return jnp.sum(jnp.sin(h)), h


def _maximum_of_relatives(x: jax.Array) -> Any:
    h = _rms(x @ W)
    y = jnp.maximum(jnp.sin(h), jnp.sin(h * 1.0))
    return jnp.sum(y * h), y


def _segment_maxima(x: jax.Array) -> Any:
    h = jnp.tanh(x @ W)
    top = jax.ops.segment_max(h, jnp.arange(16) % 5, 5)
    return jnp.sum(jnp.sin(top)), top


def _ranked(x: jax.Array) -> Any:
    h = _rms(x @ W)
    order = jnp.argsort(h, axis=0)
    picked = jnp.take_along_axis(h, order, 0)[:4]
    return jnp.sum(jnp.cos(picked) * h[:4]), (picked, jnp.sort(h, axis=1))


def _above_the_kth(x: jax.Array) -> Any:
    h = jax.nn.silu(x @ W)
    kth = jax.lax.top_k(h, 5)[0][:, -1:]
    sparse = jnp.where(h >= kth, jnp.sin(h), 0.0)
    return jnp.sum(sparse**2), kth


def _rectified_difference(x: jax.Array) -> Any:
    h = jax.nn.silu(x @ W)
    y = jax.nn.relu(h - jnp.sort(h, axis=1)[:, 20:21] + 0.0)
    return jnp.sum(jnp.exp(y)), y


def _is_the_largest(x: jax.Array) -> Any:
    p = jax.nn.softmax(_rms(x @ W))
    return jnp.sum(jnp.where(p >= p.max(1, keepdims=True), jnp.log(p), p)), p.max(1)


def _pairs(x: jax.Array) -> Any:
    h = _rms(x @ W).sum(1)
    hinge = jnp.maximum(h[:, None] - h[None, :], 0.0)
    return jnp.sum(hinge * jnp.sin(h)), hinge


def _rounded(x: jax.Array) -> Any:
    h = _rms(x @ W)
    q = jnp.round(h * 8) / 8
    index = jnp.floor(h * 4).astype(jnp.int32) % 7
    return jnp.sum(jnp.sin(q * h) * jnp.cos(jnp.arange(7.0))[index]), (q, index)


def _chosen(x: jax.Array) -> Any:
    h = jax.nn.gelu(x @ W)
    best = jnp.argmax(h, axis=1)
    hot = jax.nn.one_hot(best, 32)
    return jnp.sum(jnp.sin(h @ W) * hot) + jnp.sum(jnp.cos(h)[jnp.arange(16), best]), best


def _running_maximum(x: jax.Array) -> Any:
    top = jax.lax.cummax(_rms(x @ W), axis=0)
    return jnp.sum(jnp.sin(top)), top


def _carried_maximum(x: jax.Array) -> Any:
    def step(top: jax.Array, row: jax.Array) -> Any:
        row = _rms(row @ W)
        top = jnp.maximum(top, row)
        return top, jnp.sin(top)

    top, rows = jax.lax.scan(step, jnp.full((32,), -1.0), x)
    return jnp.sum(rows), top


def _mask_in_a_loop(x: jax.Array) -> Any:
    h = _rms(x @ W)
    top = h.max(0)

    def step(total: jax.Array, shift: jax.Array) -> Any:
        return total + jnp.where(h == top, jnp.sin(h + shift), 0.0).sum(), None

    return jax.lax.scan(step, 0.0, jnp.arange(3.0))[0], top


def _updated(x: jax.Array) -> Any:
    h = _rms(x @ W)
    steps = jnp.floor(4 * h[0]).astype(jnp.int32).at[2:5].apply(lambda v: 3 * v)
    y = h.at[jnp.array([1, 1, 3])].max(h[:3])
    return jnp.sum(jnp.sin(y) * steps), (y, steps)


# What runs once gives elements of what may be made again.


def _above_the_kth_of_norms(x: jax.Array) -> Any:
    h = _rms(x @ W)
    kth = jax.lax.top_k(h, 4)[0][:, -1:]
    return jnp.sum(jnp.where(h >= kth, jnp.sin(h), 0.0)), 0


def _equals_what_a_loop_found(x: jax.Array) -> Any:
    h = _rms(x @ W)

    def step(top: jax.Array, row: jax.Array) -> Any:
        top = jnp.maximum(top, row)
        return top, top

    tops = jax.lax.scan(step, h[0], h)[1]
    return jnp.sum(jnp.where(h == tops, jnp.sin(h), h * h)), 0


def _equals_what_a_branch_chose(x: jax.Array) -> Any:
    h = _rms(x @ W)
    top = jax.lax.cond(x[0, 0] > 0, lambda h: h.max(1), lambda h: h.min(1), h)
    return jnp.sum(jnp.where(h == top[:, None], jnp.sin(h), h * h)), 0


def _equals_what_a_one_hot_picked(x: jax.Array) -> Any:
    h = _rms(x @ W)
    hot = jax.nn.one_hot(h.argmax(1), 32)
    top = jnp.sum(jnp.where(hot > 0, h, 0.0), 1, keepdims=True)
    same = jnp.einsum("nd,nd->n", hot, h)[:, None]
    return jnp.sum(jnp.where(h >= top, jnp.sin(h), h * h) * jnp.where(h >= same, 2.0, h)), (
        top,
        same,
    )


PROGRAMS: tuple[Callable[[jax.Array], Any], ...] = (
    _above_the_kth,
    _above_the_kth_of_norms,
    _equals_what_a_branch_chose,
    _equals_what_a_loop_found,
    _equals_what_a_one_hot_picked,
    _carried_maximum,
    _chosen,
    _clipped_layers,
    _column_maxima,
    _is_the_largest,
    _mask_in_a_loop,
    _maximum_of_relatives,
    _pairs,
    _ranked,
    _rectified_difference,
    _returned_clip,
    _returned_maximum,
    _rounded,
    _running_maximum,
    _segment_maxima,
    _updated,
)
POLICIES: dict[str, dict[str, Any]] = {
    "echo": {"remat_policy": "echo"},
    "full": {"remat_policy": "full"},
    "min_cut": {"remat_policy": "min_cut"},
    "roofline": {"remat_policy": MinCut(heavy="roofline", memory_weight=8)},
    "revolve": {"remat_policy": "revolve"},
    "sublinear": {"remat_policy": "sublinear"},
    "starts": {"remat_policy": Ilp(method="starts"), "budget": 0.8},
    "half": {"remat_policy": "ilp", "budget": 0.5},
    "policy": {"remat_policy": "min_cut", "lowering": "policy"},
    "policy_full": {"remat_policy": "full", "lowering": "policy"},
}


# Every program meets a third of the policies, every policy a third of the programs.
PAIRS = [
    pytest.param(program, policy, id=f"{program.__name__.strip('_')}-{policy}")
    for (i, program), (j, policy) in itertools.product(enumerate(PROGRAMS), enumerate(POLICIES))
    if (i + j) % 3 == 0
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("program", "policy"), PAIRS)
def test_gradients_are_those_of_plain_jax(program: Callable[..., Any], policy: str) -> None:
    expected = jax.jit(jax.grad(program, has_aux=True))(X)
    try:
        ours = jax.grad(remat.checkpoint(program, **POLICIES[policy]), has_aux=True)
        found = jax.jit(ours, compiler_options=CPU_COMPILER_OPTIONS)(X)
    except BudgetError:
        return  # refused aloud
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), expected, found
    )


def _once(function: Callable[..., Any], *args: Any) -> list[str]:
    graph = remat.plan(function, *args).graph
    return [op.name for op in graph.ops if op.decision]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: jnp.sum(jnp.sin(x @ W).max(0)), ["eq"]),
        (lambda x: jnp.sum(jnp.sort(jnp.sin(x), axis=0)[:3] ** 2), ["sort"]),
        (lambda x: jnp.sum(jnp.sin(x)[jnp.argmax(jnp.sin(x), 0), 0] ** 2), ["argmax"]),
        (lambda x: jnp.sum(jnp.round(jnp.sin(x)) * x), ["round"]),
        # What runs once has elements of what may be made again.
        (
            lambda x: jnp.sum(jnp.sin(x) * (jnp.sin(x) >= jax.lax.top_k(jnp.sin(x), 3)[0][:, -1:])),
            ["top_k", "ge"],
        ),
        (lambda x: jnp.sum(_equals_what_a_loop_found(x)[0]), ["eq"]),
        (lambda x: jnp.sum(_equals_what_a_one_hot_picked(x)[0]), ["argmax", "ge", "ge"]),
        # Thresholds: one instance, nothing to mix.
        (lambda x: jnp.sum(jax.nn.relu(jnp.sin(x @ W)) ** 2), []),
        (lambda x: jnp.sum(jnp.clip(jnp.sin(x), -0.5, 0.5) ** 2), []),
        (lambda x: jnp.sum(jnp.abs(jnp.sin(x) - jnp.sin(x).mean()) ** 3), []),
        # Settled whatever the rounding: a sum of exponentials is not negative, nothing here is infinite.
        (lambda x: jnp.sum(jax.nn.logsumexp(jnp.tanh(x @ W), -1)), []),
        (lambda x: jnp.sum(jax.nn.mish(jnp.tanh(x @ W)) ** 2), []),
        (lambda x: jnp.sum(jax.nn.log_sigmoid(jnp.tanh(x @ W))), []),
        (lambda x: jnp.sum(jnp.abs(jnp.exp(h := jnp.sin(x)) - jnp.exp(h.max(0)))), ["eq", "ge"]),
        # The same bits whenever they are made: arguments, and what exact operators make of them.
        (lambda x: jnp.sum(jnp.sin(jnp.sort(x, axis=0)) * jnp.sin(x.max(0))), []),
        (lambda x: jnp.sum(jnp.sin(x) * (x == x.max(0))), []),
    ],
)
def test_what_is_made_once(function: Callable[..., Any], names: list[str]) -> None:
    assert _once(function, X) == names


def _longest(x: jax.Array) -> jax.Array:
    """Of every row the sine of what has the largest absolute value, by a comparison in a reduction's body."""

    def larger(a: Any, b: Any) -> Any:
        is_first = a[0] >= b[0]
        return tuple(jnp.where(is_first, x, y) for x, y in zip(a, b, strict=True))

    start = (jnp.float32(-1), jnp.float32(0))
    found = jax.lax.reduce((jnp.abs(x), jnp.sin(x)), start, larger, (1,))
    return jnp.broadcast_to(found[1][:, None], x.shape)


def test_primitives_that_nobody_knows_decide_by_what_they_lower_to() -> None:
    steps = new_primitive("half_steps", lambda x: jnp.floor(2 * x) / 2)
    smooth = new_primitive("one_less_square", lambda x: (1 + x) * (1 - x))
    casts = new_primitive("to_codes", lambda x: (4 * x).astype(jnp.int8).astype(x.dtype))
    longest = new_primitive("longest", _longest)
    for primitive, names in (
        (steps, ["half_steps"]),
        (smooth, []),
        (casts, ["to_codes"]),
        (longest, ["longest"]),
    ):

        def total(x: jax.Array, primitive: Any = primitive) -> jax.Array:
            return jnp.sum(jnp.sin(x * jax.lax.stop_gradient(primitive(jnp.sin(x)))))

        assert _once(total, X) == names


@pytest.mark.slow
def test_sums_may_be_elements() -> None:
    def mean_of_equals(x: jax.Array) -> jax.Array:
        h = _rms(x)
        mean = jnp.mean(jnp.stack([h, h]), 0)
        return jnp.sum(jnp.where(h >= mean, jnp.sin(3 * h), h * h))

    def opposite(x: jax.Array) -> jax.Array:
        h = _rms(x)
        rest = jnp.sum(jnp.stack([h, -jnp.broadcast_to(h.max(0), h.shape)]), 0)
        return jnp.sum(jnp.where(rest >= 0, jnp.sin(3 * h), h * h))

    def added(x: jax.Array) -> jax.Array:
        h = _rms(x)
        return jnp.sum(jnp.where(h + (-h.max(0)) >= 0, jnp.sin(3 * h), h * h))

    def safe_norm(x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ W)
        squares = jnp.sum((h[:, None] - h[None, :]) ** 2, -1)
        return jnp.sum(jnp.sqrt(jnp.where(squares > 0, squares, 1.0)))

    for function, name in (
        (mean_of_equals, "ge"),
        (opposite, "ge"),
        (added, "ge"),
        (safe_norm, "gt"),
    ):
        assert name in _once(function, X)
    for function in (mean_of_equals, safe_norm):
        expected = jax.grad(function)(X)
        for policy in ("echo", "full", "min_cut"):
            found = jax.grad(remat.checkpoint(function, remat_policy=policy))(X)
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def _where(is_chosen: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def total(x: jax.Array) -> jax.Array:
        h = _rms(x)
        return jnp.sum(jnp.where(is_chosen(h), jnp.sin(3 * h), h * h))

    return total


@jax.custom_vjp
def _own_max(h: jax.Array) -> jax.Array:
    return h.max(0)


def _own_max_backward(h: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jnp.where((h - h.max(0)) ** 2 <= 0, cotangent, 0.0),)


_own_max.defvjp(lambda h: (h.max(0), h), _own_max_backward)


@pytest.mark.sample(1)
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(_where(lambda h: h + (-h.max(0)) >= 0), id="sum"),
        pytest.param(_where(lambda h: 3 * h - 3 * h.max(0) >= 0), id="products"),
        pytest.param(_where(lambda h: 2 * h + 1 - (2 * h + 1).max(0) >= 0), id="twice"),
        pytest.param(_where(lambda h: jnp.tanh(h) - jnp.tanh(h).max(0) >= 0), id="tanh"),
        pytest.param(_where(lambda h: h * 3 - jax.lax.top_k(h * 3, 3)[0][:, -1:] >= 0), id="top_k"),
        pytest.param(
            _where(
                lambda h: jnp.stack([3 * h, -jnp.broadcast_to(3 * h.max(0), h.shape)]).sum(0) >= 0
            ),
            id="stacked",
        ),
        pytest.param(_where(lambda h: h >= jnp.median(h, 0)), id="median"),
        pytest.param(lambda x: jnp.sum(_own_max(2 * _rms(x)) * jnp.sin(_rms(x))), id="own rule"),
    ],
)
def test_what_comparisons_share_is_rounded_once(
    function: Callable[[jax.Array], jax.Array], lowering: str
) -> None:
    """XLA copies cheap values into several kernels, and where a product meets a sum it does not round it."""
    with jax.enable_x64(True):
        expected = jax.grad(function)(jnp.asarray(np.asarray(X), jnp.float64))
    for policy in ("min_cut", "full"):
        step = jax.grad(remat.checkpoint(function, remat_policy=policy, lowering=lowering))
        kept = jax.jit(step).lower(X).compile(CPU_COMPILER_OPTIONS)
        for run in (step, jax.jit(step), kept):
            np.testing.assert_allclose(run(X), expected, rtol=1e-4, atol=1e-4)


def test_only_what_comparisons_share_is_held_in_memory() -> None:
    def behind(function: Callable[..., Any], name: str = "optimization_barrier") -> list[str]:
        graph = remat.plan(function, X, remat_policy="full").graph
        return [
            graph.ops[graph.values[op.inputs[0]].producer or 0].name
            for op in graph.ops
            if op.name == name
        ]

    assert behind(_where(lambda h: h + (-h.max(0)) >= 0)) == ["div"]
    products = _where(lambda h: 3 * h - 3 * h.max(0) >= 0)
    assert behind(products) == ["div"]
    assert behind(products, "reduce_precision") == ["mul", "mul"]  # rounded, but fused
    for smooth in (
        _where(lambda h: h > 0.3),
        lambda x: jnp.sum(jax.nn.softmax(jnp.tanh(x)) ** 2),
        lambda x: _residual(x, lambda key, h: h * jax.random.bernoulli(key, 0.9, h.shape)),
        lambda x: _residual(
            x, lambda key, h: jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)
        ),
        lambda x: _residual(x, lambda key, h: h + jax.random.normal(key, h.shape)),
        lambda x: _residual(x, lambda key, h: h[jax.random.permutation(key, len(h))]),
    ):
        assert behind(smooth) == behind(smooth, "reduce_precision") == []


def _residual(x: jax.Array, noise: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Two layers whose noise comes from one key; each ends in a normalisation by a variance held at zero."""
    for key in jax.random.split(jax.random.key(0)):
        x = x + noise(key, jnp.tanh(x @ W))
        mean, square = x.mean(0), (x * x).mean(0)
        x = (x - mean) * jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-5)
    return jnp.sum(x**3)


def test_what_is_drawn_twice_alike_is_related() -> None:
    def once(first: jax.Array, second: jax.Array) -> list[str]:
        def function(x: jax.Array) -> jax.Array:
            h = jnp.tanh(x @ W)
            drawn = jax.random.normal(first, h.shape) * h
            return jnp.sum(jnp.where(drawn >= jax.random.normal(second, h.shape), h, 0.1 * h))

        return _once(function, X)

    key, other = jax.random.split(jax.random.key(0))
    assert once(key, key) == ["ge"]
    assert once(key, other) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    ["gpt_tiny", "transformer_blocks_small", "resnet18_small", "mobilenet_v2_small", "unet_small",
     "lstm_small", "nmt_scan_small"],
)  # fmt: skip
def test_models_decide_nothing_on_an_edge(name: str) -> None:
    """Dropout, residuals, softmax and norms: nothing is rounded, held in memory or may not run again."""
    function, args = CASES[name]()
    graph = remat.plan(function, *args, remat_policy="save_all").graph
    assert not [op.name for op in graph.ops if op.decision]
    ours = ("optimization_barrier", "reduce_precision")
    assert not [op.name for op in graph.ops if op.name in ours]


def test_normalised_values_are_compared_with_numbers_as_often_as_need_be() -> None:
    """The masks of relu after a norm are thresholds: a plan need not keep them."""

    def network(x: jax.Array) -> jax.Array:
        h = x @ W
        mean, square = h.mean(0), (h * h).mean(0)
        h = (h - mean) * jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-5) + 0.1
        return jnp.sum(jax.nn.relu(h) @ W)

    assert _once(network, X) == []


def test_relatives_are_compared_once() -> None:
    """Two values of one origin can be equal by construction, values of different origins cannot."""

    def related(x: jax.Array) -> jax.Array:
        h = x @ W
        return jnp.sum(jnp.where(jnp.sin(h) > jnp.tanh(h), h, 0.0) ** 2)

    def unrelated(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(jnp.sin(x @ W) > jnp.tanh(x @ W.T), x, 0.0) ** 2)

    def on_one(x: jax.Array) -> jax.Array:
        h = jnp.exp(x @ W)
        return jnp.sum(jnp.where(h / h.max() >= 1, jnp.sin(h), h))

    assert _once(on_one, X) == ["ge"]
    assert _once(related, X) == ["gt"]
    assert _once(unrelated, X) == []


def test_masks_of_extrema_say_what_they_compare() -> None:
    special = jnp.array([-1, 0.0, -0.0, 0.1, 2, jnp.nan, jnp.inf, -jnp.inf])
    x, y = (v.ravel() for v in jnp.meshgrid(special, special))
    weights = jnp.arange(1.0, x.size + 1)
    for function in (
        jnp.maximum,
        lambda x, y: jnp.minimum(2 * x, y),
        lambda x, y: jnp.clip(y, x, 0.3),
        lambda x, y: jnp.maximum(0.1, x) * y,
    ):

        def total(x: jax.Array, y: jax.Array, function: Any = function) -> jax.Array:
            return jnp.sum(function(x, y) * weights)

        expected = jax.grad(total, (0, 1))(x, y)
        found = jax.grad(remat.checkpoint(total), (0, 1))(x, y)
        jax.tree.map(np.testing.assert_array_equal, expected, found)
    graph = remat.plan(lambda x: jnp.sum(jnp.clip(jnp.sin(x), -0.5, 0.5) ** 2), X).graph
    comparisons = [op for op in graph.ops if op.name in ("eq", "ge", "gt", "le", "lt")]
    assert len(comparisons) == 4
    assert all(len(op.inputs) == 1 and not op.decision for op in comparisons)


def _making(graph: Graph, op: int) -> Iterator[Step]:
    """The steps that run an operator and all that it needs."""
    for value in graph.ops[op].inputs:
        producer = graph.values[value].producer
        if producer is not None:
            yield from _making(graph, producer)
    yield Step("compute", op)


def test_the_simulator_rejects_a_second_decision() -> None:
    plan = remat.plan(lambda x: jnp.sum(jnp.sin(x @ W).max(0) ** 2), X, remat_policy="full")
    decision = next(op for op in plan.graph.ops if op.decision)
    again = (*_making(plan.graph, decision.id), *plan.schedule.backward)
    with pytest.raises(
        ScheduleError, match="eq may not run in the backward pass: it decides by the last bit"
    ):
        simulate(plan.graph, Schedule((*plan.schedule.forward, Step("turn"), *again)))


def test_a_decision_is_not_reported_as_something_unknown() -> None:
    plan = remat.plan(lambda x: jnp.sum(jnp.sin(x @ W).max(0) ** 2), X, remat_policy=MinCut.paper())
    assert not plan.opaque
    kept = {entry.op: entry for entry in plan.saved}
    assert kept["eq"].form == "bits" and "made once" in kept["eq"].why


@pytest.mark.sample(2)
@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sum(jnp.interp(jnp.sin(x), jnp.linspace(-1, 1, 7), jnp.arange(7.0) ** 2)),
        lambda x: jnp.sum(x * jnp.searchsorted(jnp.linspace(-1, 1, 7), jnp.sin(x))),
        lambda x: jnp.sum(jax.scipy.linalg.expm(jnp.outer(x, x))),
        lambda x: jnp.sum(x * remat.checkpoint(lambda y: jnp.argsort(jnp.sin(y)))(x)),
    ],
    ids=["interp", "searchsorted", "expm", "indices"],
)
def test_rooms_of_integers_run_as_they_are(function: Callable[..., Any], lowering: str) -> None:
    x = jnp.array([0.3, -0.2, 0.7])
    found = jax.grad(remat.checkpoint(function, lowering=lowering))(x)
    np.testing.assert_allclose(found, jax.grad(function)(x), rtol=1e-5)


def _with_a_while_loop(x: jax.Array) -> jax.Array:
    def step(state: Any) -> Any:
        return state[0] + 1, jnp.cos(state[1]) * x

    return jnp.sum(jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_policy_lowering_plans_only_what_is_differentiated(wrap: Any) -> None:
    x = jnp.array([0.3, -0.2, 0.7])
    loop = wrap(remat.checkpoint(_with_a_while_loop, lowering="policy"))
    np.testing.assert_allclose(loop(x), _with_a_while_loop(x), rtol=1e-6)
    expected = jax.jvp(_with_a_while_loop, (x,), (x,))
    np.testing.assert_allclose(jax.jvp(loop, (x,), (x,)), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(loop)(x)

    def product(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.cos(x) @ jnp.cos(x).T))

    tight = wrap(remat.checkpoint(product, remat_policy="ilp", budget="10B", lowering="policy"))
    np.testing.assert_allclose(tight(X), product(X), rtol=1e-5)
    with pytest.raises(BudgetError, match="10 bytes"):
        jax.grad(tight)(X)
