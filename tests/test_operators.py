"""Operator implementations: found, put in place, equal in gradient, and keeping what they promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remat.core.errors import ImplementationError
from remat.rewrite import operators
from remat.rewrite.matching import find_sites
from remat.rewrite.operators import (
    Implementation,
    check_implementation,
    implementations,
    register_implementation,
    unregister_implementation,
)
from remat.rewrite.substitution import with_implementations
from remat.trace.joint import trace_joint
from remat.trace.program import evaluate, program_of

SOFTMAX, LOG_SOFTMAX, RELU, BATCH_NORM = (
    implementations(name)[0] for name in ("softmax", "log_softmax", "relu", "batch_norm")
)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def evaluated(closed: Any, *args: jax.Array) -> list[Any]:
    return evaluate(program_of(closed), args)


def substituted(function: Callable[..., Any], choose: Any, *args: Any) -> Callable[..., Any]:
    """A function of flat arrays with a single result, with implementations put in."""
    closed = with_implementations(jax.make_jaxpr(function)(*args), choose)
    return lambda *args: evaluated(closed, *args)[0]


def joint_reads(closed: Any, *args: Any) -> list[tuple[str, int]]:
    """What the backward pass reads beyond inputs and outputs: labels and bytes."""
    program = program_of(closed)
    graph = trace_joint(program, args, [True] * len(args)).graph
    values = graph.backward_reads - set(graph.inputs) - set(graph.outputs)
    return [(graph.values[v].label, graph.values[v].nbytes) for v in sorted(values)]


def ids(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    sites = find_sites(jax.make_jaxpr(function)(*args), **options)
    return [name for site in sites for name in site.ids]


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(operators._REGISTRY)
    yield
    operators._REGISTRY.clear()
    operators._REGISTRY.update(before)


# The harness.


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "axis"), [("float32", 0), ("float32", 1), ("bfloat16", 1), ("float16", 0)]
)
def test_softmaxes_keep_only_their_results(dtype: str, axis: int) -> None:
    x = normal(0, 8, 16, dtype=dtype)
    size = x.dtype.itemsize
    for implementation in (SOFTMAX, LOG_SOFTMAX):
        report = check_implementation(implementation, x, axis=axis)
        assert report.residual_bytes == 0
        # The exponentials, their sum and a power of the sum (or a row of the same size).
        assert report.reference_residual_bytes >= x.nbytes + size * x.size // x.shape[axis]
        assert report.checks == ("jit", "vmap")
        assert 0 < report.largest_error < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_relu_is_exact_and_needs_no_mask(dtype: str) -> None:
    x = jnp.asarray([[-1.0, -0.0, 0.0, 1.0, np.nan, np.inf, -np.inf, 1e-30]], dtype)
    report = check_implementation(RELU, x)
    assert report.exact
    assert (report.residual_bytes, report.reference_residual_bytes) == (0, x.size)
    assert "bit-equal" in str(report) and "keeps 0 bytes" in str(report)


def test_batch_norm_keeps_one_number_per_channel() -> None:
    x, gamma, beta = normal(0, 8, 5, 5, 16) * 2 + 1, abs(normal(1, 16)) + 0.5, normal(2, 16)
    report = check_implementation(BATCH_NORM, x, gamma, beta, 1e-3)
    assert report.largest_error < 1e-5
    assert report.residual_bytes == 4 * 16
    assert report.reference_residual_bytes >= 2 * x.nbytes


def test_softmax_of_doubles() -> None:
    with jax.enable_x64(True):
        report = check_implementation(SOFTMAX, normal(0, 4, 8, dtype=jnp.float64), axis=1)
    assert report.largest_error < 1e-14


def test_primitive_without_reference_is_checked_against_its_own_rule() -> None:
    # tanh from its input.
    ours = Implementation(
        operator="tanh",
        name="input",
        kind="input",
        exact=False,
        forward=lambda x, **params: (jnp.tanh(x), (x,)),
        backward=lambda residuals, ct, **params: (ct * (1 - jnp.tanh(residuals[0]) ** 2),),
    )
    report = check_implementation(ours, normal(0, 4, 4), accuracy=None)
    assert report.residual_bytes == 0
    wrong = dataclasses.replace(ours, backward=lambda r, ct, **params: (ct * (1 - r[0] ** 2),))
    with pytest.raises(
        ImplementationError, match=r"'tanh/input' does not hold \(jit\): gradient 0"
    ):
        check_implementation(wrong, normal(0, 4, 4), accuracy=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact": True}, "promises equal bits"),
        ({"forward": lambda x, *, axis: (x, (x,))}, "result 0 is not bit-equal"),
        (
            {"forward": lambda x, *, axis: (x[0], (x,))},
            r"result 0 is float32\[16\] instead of float32\[8,16\]",
        ),
        ({"backward": lambda r, ct, *, axis: (ct[0],)}, "raises"),
        ({"backward": lambda r, ct, *, axis: ()}, "raises"),
        ({"supports": lambda x, *, axis: "never"}, "does not support these example inputs: never"),
    ],
)
def test_what_does_not_hold_is_said(changes: dict[str, Any], message: str) -> None:
    broken = dataclasses.replace(SOFTMAX, **changes)
    with pytest.raises(ImplementationError, match=message):
        check_implementation(broken, normal(0, 8, 16), axis=1)


def test_harness_wants_floating_point_inputs_and_a_reference() -> None:
    with pytest.raises(ImplementationError, match="int32"):
        check_implementation(SOFTMAX, jnp.arange(4), axis=0)
    unknown = dataclasses.replace(SOFTMAX, operator="mystery", reference=None, candidates=None)
    with pytest.raises(ImplementationError, match=r"no primitive jax.lax.mystery_p"):
        check_implementation(unknown, normal(0, 4))


def test_tolerance_is_the_callers_to_set() -> None:
    x = normal(0, 8, 16)
    check_implementation(SOFTMAX, x, axis=1, rtol=1e-5)
    with pytest.raises(ImplementationError, match=r"rtol 1e-12"):
        check_implementation(SOFTMAX, x, axis=1, rtol=1e-12)


# The registry.


@pytest.mark.usefixtures("registry")
def test_registry_plainly_and_as_a_decorator() -> None:
    @register_implementation(
        operator="cube",
        name="input",
        kind="input",
        exact=False,
        backward=lambda residuals, ct: (3 * residuals[0] ** 2 * ct,),
        reference=lambda x: x * x * x,
    )
    def cube(x: jax.Array) -> Any:
        return x * x * x, (x,)

    assert isinstance(cube, Implementation)
    assert cube.id == "cube/input" and implementations("cube") == (cube,)
    assert cube in implementations()
    check_implementation(cube, normal(0, 8))
    with pytest.raises(ImplementationError, match="registered already"):
        register_implementation(cube)
    unregister_implementation(cube)
    assert implementations("cube") == ()
    with pytest.raises(ImplementationError, match="did you mean 'softmax/output'"):
        unregister_implementation("softmax/outputs")
    assert register_implementation(cube) is cube


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "outputs"}, "did you mean 'output'"),
        ({"name": "a@b"}, "without '/' and '@'"),
        ({"reference": None}, "candidates but no reference"),
    ],
)
def test_malformed_implementations_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        dataclasses.replace(SOFTMAX, **changes)


# Finding.


def test_softmax_is_found_inlined_and_called() -> None:
    def f(x: jax.Array) -> jax.Array:
        x = jax.nn.softmax(x)
        x = jax.jit(jax.nn.softmax)(x)
        x = jax.jit(lambda x: jax.nn.softmax(x, axis=0))(x)
        return jax.nn.log_softmax(x)

    sites = find_sites(jax.make_jaxpr(jax.jit(f))(normal(0, 4, 6)))
    assert [site.ids for site in sites] == [
        ("softmax/output@0",),
        ("softmax/output@1",),
        ("softmax/output@2",),
        ("log_softmax/output@0",),
    ]
    assert [site.options[0].params["axis"] for site in sites] == [1, 1, 0, 1]
    assert all("test_operators.py" in site.source for site in sites)


def test_only_what_computes_the_same_is_an_operator() -> None:
    @jax.jit
    def softmax(x: jax.Array) -> jax.Array:  # with a temperature
        return jax.nn.softmax(x / 2) + 1

    @jax.jit
    def relu(x: jax.Array) -> jax.Array:  # another gradient at zero than jax.nn.relu
        return jnp.maximum(x, 0)

    x = normal(0, 4, 6)
    # The softmax inside is one; the function around it that has its name is not.
    (site,) = find_sites(jax.make_jaxpr(softmax)(x))
    assert len(site.path) == 2
    assert ids(relu, x) == []
    assert ids(jax.nn.relu, x) == ids(jax.jit(jax.nn.relu), x) == ["relu/output@0"]
    assert ids(lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True), x) == []
    assert ids(lambda x: jax.nn.softmax(x, where=x > 0), x) == []


def test_flax_batch_norm_is_found_and_its_statistics_stay() -> None:
    norm = nn.BatchNorm(use_running_average=False)
    x = normal(0, 4, 5, 5, 8)
    variables = norm.init(jax.random.key(0), x)
    params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}

    def f(x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
        values = {"params": {"scale": scale, "bias": bias}} | rest
        return norm.apply(values, x, mutable=["batch_stats"])

    assert params.keys() == {"scale", "bias"}
    args = (x, normal(1, 8) + 3, normal(2, 8))
    closed = jax.make_jaxpr(f)(*args)
    ours = with_implementations(closed, ["batch_norm/output@0"])
    before = evaluated(closed, *args)
    after = evaluated(ours, *args)
    for mine, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_sites_are_numbered_independently_of_what_is_chosen() -> None:
    def f(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jax.nn.softmax(jax.nn.relu(x) * 3)
        return x

    x = normal(0, 4, 6)
    closed = jax.make_jaxpr(f)(x)
    names = [name for site in find_sites(closed) for name in site.ids]
    assert names == [f"{op}/output@{n}" for n in range(4) for op in ("relu", "softmax")]
    seen: list[str] = []

    def choose(site: Any) -> Implementation | None:
        seen.extend(site.ids)
        return SOFTMAX if site.ids == ("softmax/output@2",) else None

    replaced = with_implementations(closed, choose)
    assert seen == names
    left = [name for site in find_sites(replaced) for name in site.ids]
    # Inside of a function with a rule of its own nothing is searched.
    assert left == [
        "relu/output@0",
        "softmax/output@0",
        "relu/output@1",
        "softmax/output@1",
        "relu/output@2",
        "relu/output@3",
        "softmax/output@2",
    ]


def test_unknown_choices_are_errors() -> None:
    closed = jax.make_jaxpr(jax.nn.softmax)(normal(0, 4, 6))
    with pytest.raises(ImplementationError, match=r"'softmax/output@1'.*mean 'softmax/output@0'"):
        with_implementations(closed, ["softmax/output@1"])
    with pytest.raises(ImplementationError, match=r"'relu/output' for occurrence 0 of 'softmax'"):
        with_implementations(closed, lambda site: RELU)
    assert with_implementations(closed, lambda site: None) is closed
    assert with_implementations(closed, []) is closed


def test_attention_needs_the_gpu_and_says_so() -> None:
    q = normal(0, 2, 16, 2, 64, dtype=jnp.bfloat16)

    def f(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    closed = jax.make_jaxpr(f)(q, q, q)
    sites = [s for s in find_sites(closed) if s.operator == "dot_product_attention"]
    assert [site.options[0].params for site in sites] == [{"is_causal": True}]
    assert sites[0].ids == ()
    with pytest.raises(ImplementationError, match="runs on cuda"):
        with_implementations(closed, ["dot_product_attention/cudnn"], platform="cpu")


def test_attention_by_cudnn_keeps_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    # Only the version is asked of the library when tracing; nothing is run.
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    q = normal(0, 2, 128, 4, 64, dtype=jnp.bfloat16)

    def f(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=False)

    closed = jax.make_jaxpr(f)(q, q, q)
    ours = with_implementations(closed, ["dot_product_attention/cudnn@0"], platform="cuda")
    log_sums = ("f32[2,4,128]", 4 * 2 * 4 * 128)
    reads = joint_reads(ours, q, q, q)
    assert [read for read in reads if read[1] > 16] == [log_sums]
    plain = sum(size for _, size in joint_reads(closed, q, q, q))
    assert plain >= 2 * 2 * 4 * 128 * 128


# Putting in place.


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two layers whose activations are read by the next matmul anyway."""
    h = jax.nn.relu(x @ w)
    p = jax.nn.softmax(h @ w)
    return p @ w


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("chosen", "is_exact"),
    [
        (["relu/output"], True),
        (["softmax/output@0"], False),
        (["relu/output", "softmax/output"], False),
    ],
)
def test_gradients_of_a_small_net(chosen: list[str], is_exact: bool) -> None:
    w, x = normal(0, 16, 16), normal(1, 8, 16)
    ct = normal(2, 8, 16)
    ours = substituted(layers, chosen, w, x)

    def gradients(function: Callable[..., Any]) -> Any:
        out, pullback = jax.vjp(function, w, x)
        return out, *pullback(ct)

    for transform in (lambda f: f, jax.jit):
        theirs = transform(lambda: gradients(layers))()
        found = transform(lambda: gradients(ours))()
        np.testing.assert_array_equal(found[0], theirs[0])
        for mine, other in zip(found[1:], theirs[1:], strict=True):
            if is_exact:
                np.testing.assert_array_equal(mine, other)
            else:
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_softmax_drops_the_exponentials_from_the_joint_program() -> None:
    w, x = normal(0, 16, 16), normal(1, 8, 16)
    closed = jax.make_jaxpr(layers)(w, x)
    before = joint_reads(closed, w, x)
    after = joint_reads(with_implementations(closed, ["softmax/output"]), w, x)
    whole, column = ("f32[8,16]", 4 * 8 * 16), ("f32[8,1]", 4 * 8)
    # Read in any case: relu's mask and the zeros of its rule, its result, and softmax's result.
    rest = [("bool[8,16]", 8 * 16), whole, whole, whole]
    assert sorted(after) == sorted(rest)
    assert sorted(before) == sorted([*rest, whole, column, column])
    saved = sum(size for _, size in before) - sum(size for _, size in after)
    assert saved == 4 * 8 * 16 + 2 * 4 * 8


def test_calls_checkpoints_and_scopes_are_walked_through() -> None:
    @jax.jit
    def block(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x))

    def f(x: jax.Array) -> jax.Array:
        with jax.named_scope("encoder"):
            x = block(x) * 2
        x = jax.checkpoint(lambda x: block(x) + 1)(x)
        return block(block(x))

    x = normal(0, 4, 6)
    closed = jax.make_jaxpr(jax.jit(f))(x)
    sites = find_sites(closed)
    assert [len(site.path) for site in sites] == [3, 4, 3, 3]
    assert [site.id("output") for site in sites] == [f"softmax/output@{n}" for n in range(4)]
    assert len(find_sites(closed, inline_checkpoints=False)) == 3
    # The same jitted function four times: one of the calls is changed and no other.
    ours = with_implementations(closed, ["softmax/output@2"])
    program = program_of(ours)
    names = [equation.source.primitive.name for equation in program.equations]
    assert names.count("custom_vjp_call") == 1 and names.count("div") == 3
    assert names.index("custom_vjp_call") > names.index("div")
    scopes = {site.scope for site in find_sites(ours)}
    assert any("encoder" in scope for scope in scopes)
    np.testing.assert_array_equal(evaluated(ours, x)[0], f(x))


def test_loops_and_branches_are_left_alone() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jax.nn.softmax(c), None), x, None, length=3)[0]

    assert ids(f, normal(0, 4, 6)) == []


@pytest.mark.usefixtures("registry")
def test_primitives_and_named_functions_of_users() -> None:
    register_implementation(
        Implementation(
            operator="sin",
            name="sqrt",
            kind="output",
            exact=False,
            forward=lambda x, **params: (jnp.sin(x), (jnp.sin(x),)),
            # Right where cos is positive.
            backward=lambda residuals, ct, **params: (ct * jnp.sqrt(1 - residuals[0] ** 2),),
        )
    )

    @register_implementation(
        operator="split",
        name="output",
        kind="output",
        exact=True,
        backward=lambda residuals, ct: (ct[0] * 7 + ct[1],),
    )
    def split(x: jax.Array) -> Any:
        return (x * 2, x + 1), ()

    assert isinstance(split, Implementation)

    def two(x: jax.Array) -> Any:
        return x * 2, x + 1

    two.__name__ = "split"

    def f(x: jax.Array) -> jax.Array:
        a, b = jax.jit(two)(x)
        return jnp.sum(jnp.sin(a) + b)

    x = jnp.asarray([0.1, 0.2])
    assert ids(f, x) == ["split/output@0", "sin/sqrt@0"]
    plain = jax.grad(f)(x)
    sine = jax.grad(substituted(f, ["sin/sqrt@0"], x))(x)
    np.testing.assert_allclose(sine, plain, rtol=1e-6)
    program = program_of(with_implementations(jax.make_jaxpr(f)(x), ["sin/sqrt@0"]))
    assert [e.source.primitive.name for e in program.equations][-3:-2] == ["custom_vjp_call"]
    both = jax.grad(substituted(f, ["sin/sqrt", "split/output"], x))(x)
    np.testing.assert_allclose(both, 7 * np.cos(2 * x) + 1, rtol=1e-6)


def test_effects_and_dead_equations() -> None:
    seen: list[float] = []

    def f(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
        return jax.nn.softmax(x)

    x = normal(0, 4, 6)
    ours = with_implementations(jax.make_jaxpr(f)(x), ["softmax/output"])
    names = [eqn.primitive.name for eqn in ours.jaxpr.eqns]
    # The exponentials outside of the new rule are gone, the side effect is not.
    assert "exp" not in names and "debug_callback" in names
    evaluated(ours, x)
    jax.effects_barrier()
    assert seen == [float(x[0, 0])]
