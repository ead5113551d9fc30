"""Max-pool by codes: gradients bit-equal to XLA's select-and-scatter, and what it costs on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from random_graphs import laws

from remat.compiler.compile import CompileReport, compile_report
from remat.core.errors import TraceError
from remat.rewrite import pooling

Pads = tuple[tuple[int, int], ...]

# Shape, window, strides, padding.
POOLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any]] = {
    "vgg": ((2, 8, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "vgg_remainder": ((2, 9, 7, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "resnet": ((2, 9, 8, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "inception": ((2, 7, 7, 3), (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    "gaps": ((2, 9, 9, 2), (1, 2, 2, 1), (1, 3, 3, 1), ((0, 0), (1, 1), (0, 1), (0, 0))),
    "one_dimension": ((20,), (5,), (2,), ((4, 3),)),
    "channels_first": ((2, 3, 7, 8), (1, 1, 3, 2), (1, 1, 2, 2), "SAME"),
    "three_dimensions": ((6, 7, 8), (2, 3, 4), (2, 1, 3), "VALID"),
    "stride_only": ((2, 5, 5, 1), (1, 1, 1, 1), (1, 2, 2, 1), "VALID"),
    "over_batch": ((2, 3, 5, 5), (2, 2, 3, 3), (1, 2, 2, 2), "SAME"),
    "empty": ((3, 1, 1, 2), (1, 3, 3, 1), (1, 2, 2, 1), "VALID"),
    "windows_of_padding": ((4, 4), (2, 2), (2, 2), ((3, 3), (0, 0))),
    "widest_code": ((8, 33), (8, 32), (3, 1), "VALID"),
}
DTYPES = ("float32", "bfloat16", "float16")


def jax_gradient(x: jax.Array, ct: jax.Array, window: Any, strides: Any, padding: Any) -> jax.Array:
    """The gradient by jax's own rule."""
    _, pullback = jax.vjp(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding), x
    )
    return pullback(ct)[0]


def code_gradient(
    x: jax.Array, ct: jax.Array, window: Any, strides: Any, padding: Any
) -> jax.Array:
    """The gradient by codes."""
    codes = pooling.window_codes(x, window, strides, padding)
    assert codes.dtype == jnp.uint8
    return pooling.scatter_by_codes(ct, codes, x.shape, window, strides, padding)


def assert_same_bits(ours: jax.Array, theirs: jax.Array) -> None:
    """Equal bit by bit, signed zeros included; a NaN may be any NaN."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    found, expected = np.asarray(ours), np.asarray(theirs)
    nans = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), nans)
    as_int = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.where(nans, 0, found.view(as_int)), np.where(nans, 0, expected.view(as_int))
    )


def draw(shape: tuple[int, ...], seed: int, kind: str) -> np.ndarray:
    """Operands: distinct values, many ties, all equal, or ties with NaN and infinities."""
    rng = np.random.default_rng(seed)
    if kind == "distinct":
        return rng.normal(size=shape)
    if kind == "equal":
        return np.full(shape, 1.5)
    values = [-1.0, -0.0, 0.0, 1.0, 2.0]
    if kind == "special":
        values += [np.nan, -np.inf, -np.inf, np.inf]
    return rng.choice(values, size=shape)


def draw_cotangent(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Cotangents of sizes far apart, so that the order of a sum shows; some are -0."""
    rng = np.random.default_rng(seed + 1)
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)
    return np.where(rng.random(shape) < 0.1, -0.0, values)


@functools.lru_cache(maxsize=64)
def compiled(which: str, window: Any, strides: Any, padding: Any) -> Callable[..., jax.Array]:
    function = {"jax": jax_gradient, "codes": code_gradient}[which]
    return jax.jit(lambda x, ct: function(x, ct, window, strides, padding))


def check(pool: Any, dtype: Any, kind: str, seed: int) -> None:
    shape, window, strides, padding = pool
    x = jnp.asarray(draw(shape, seed, kind), dtype)
    out = pooling.pooled_shape(shape, window, strides, padding)
    ct = jnp.asarray(draw_cotangent(out, seed), dtype)
    theirs = compiled("jax", window, strides, padding)(x, ct)
    assert_same_bits(compiled("codes", window, strides, padding)(x, ct), theirs)


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_gradients_are_bit_equal_to_jax(name: str, dtype: str) -> None:
    for seed, kind in enumerate(("distinct", "ties", "equal", "special")):
        check(POOLS[name], dtype, kind, seed)


@pytest.mark.parametrize("name", ["vgg", "resnet", "inception"])
def test_gradients_of_doubles_are_bit_equal_to_jax(name: str) -> None:
    with jax.enable_x64(True):
        for seed, kind in enumerate(("distinct", "special")):
            check(POOLS[name], "float64", kind, seed)


@pytest.mark.parametrize("name", ["vgg", "resnet", "inception"])
def test_tiny_cotangents_are_rounded_as_jax_rounds_them(name: str) -> None:
    shape, window, strides, padding = POOLS[name]
    for dtype, size in (("float16", 3e-5), ("bfloat16", 1e-38), ("float32", 1e-38)):
        x = jnp.asarray(draw(shape, 0, "ties"), dtype)
        out = pooling.pooled_shape(shape, window, strides, padding)
        ct = jnp.asarray(np.random.default_rng(0).normal(size=out) * size, dtype)
        theirs = compiled("jax", window, strides, padding)(x, ct)
        assert_same_bits(compiled("codes", window, strides, padding)(x, ct), theirs)


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Pads]:
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    window = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    strides = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    pads = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(rank))
    return shape, window, strides, pads


@pytest.mark.slow
@laws(30)
@given(pools(), st.sampled_from(DTYPES), st.sampled_from(["ties", "special"]), st.integers(0, 99))
def test_any_pool_is_bit_equal_to_jax(pool: Any, dtype: str, kind: str, seed: int) -> None:
    check(pool, dtype, kind, seed)


def select_by_hand(window: list[float]) -> int:
    """XLA's selection, element by element."""
    selected = 0
    for index in range(1, len(window)):
        if not window[selected] >= window[index]:
            selected = index
    return selected


@laws(200)
@given(
    st.lists(
        st.one_of(st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf]), st.floats(width=32)),
        min_size=6,
        max_size=6,
    )
)
def test_codes_are_the_places_of_the_selected_elements(window: list[float]) -> None:
    x = jnp.asarray(np.array(window, np.float32).reshape(2, 3))
    codes = jitted_codes(x)
    assert codes.shape == (1, 1)
    # Subnormal floats are zero to XLA:CPU.
    flushed = [float(v) if abs(v) >= np.finfo(np.float32).tiny else 0.0 for v in x.reshape(-1)]
    flushed = [float("nan") if np.isnan(v) else f for v, f in zip(window, flushed, strict=True)]
    assert int(codes[0, 0]) == select_by_hand(flushed)


jitted_codes = jax.jit(lambda x: pooling.window_codes(x, (2, 3), (2, 3), "VALID"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME"), ((3, 2), None, ((1, 0), (0, 1)))],
)
def test_flax_max_pool_of_a_relu(window: Any, strides: Any, padding: Any) -> None:
    x = jnp.asarray(draw((2, 10, 11, 4), 0, "distinct"), jnp.float32)

    def pool(x: jax.Array) -> jax.Array:
        return nn.max_pool(jax.nn.relu(x), window, strides=strides, padding=padding)

    out, pullback = jax.vjp(pool, x)
    ct = jnp.asarray(draw_cotangent(out.shape, 0), jnp.float32)
    whole = (1, *window, 1)
    steps = (1, *(strides or (1, 1)), 1)
    pads = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
    assert pooling.pooled_shape(x.shape, whole, steps, pads) == out.shape
    ours = jnp.where(x > 0, code_gradient(jax.nn.relu(x), ct, whole, steps, pads), 0)
    assert_same_bits(ours, pullback(ct)[0])


def test_parameters_of_jaxs_equations_are_read() -> None:
    x = jnp.ones((2, 6, 6, 1))

    def joint(x: jax.Array, ct: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"), x)
        return out, pullback(ct)

    jaxpr = jax.make_jaxpr(joint)(x, jnp.ones((2, 3, 3, 1)))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == [
        "reduce_window_max",
        "select_and_scatter_add",
    ]
    for eqn in jaxpr.eqns:
        assert pooling.supported(eqn.params, x.dtype) is None
        assert pooling.is_exact(x.dtype, eqn.params)
        assert not pooling.is_exact(x.dtype, eqn.params, platform="cuda")


def test_vmapped_and_unmapped_gradients_agree() -> None:
    shape, window, strides, padding = POOLS["resnet"]
    x = jnp.asarray(draw((4, *shape), 0, "ties"), jnp.float32)
    out = pooling.pooled_shape(shape, window, strides, padding)
    ct = jnp.asarray(draw_cotangent((4, *out), 0), jnp.float32)

    def one(x: jax.Array, ct: jax.Array) -> jax.Array:
        return code_gradient(x, ct, window, strides, padding)

    together = jax.jit(jax.vmap(one))(x, ct)
    alone = jax.jit(one)
    for index in range(4):
        assert_same_bits(together[index], alone(x[index], ct[index]))


def params(**changes: Any) -> dict[str, Any]:
    base = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
    return base | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"window_dilation": (1, 2)}, "window_dilation"),
        ({"base_dilation": (2, 1)}, "base_dilation"),
        ({"window_dimensions": (1, 257)}, "257 elements"),
        ({"select_prim": lax.le_p}, "'le'"),
        ({"window_strides": (2,)}, "1 strides"),
        ({"window_strides": (0, 1)}, "not positive"),
        ({"padding": ((0, 0), (-1, 0))}, "negative"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], why: str) -> None:
    reason = pooling.supported(params(**changes))
    assert reason is not None and why in reason
    assert not pooling.is_exact(jnp.float32, params(**changes))


def test_what_is_supported_depends_on_the_dtype() -> None:
    assert pooling.supported(params(window_dilation=(1, 1), base_dilation=(1, 1))) is None
    assert pooling.supported(params(), jnp.bfloat16) is None
    reason = pooling.supported(params(), jnp.int32)
    assert reason is not None and "int32" in reason
    assert pooling.is_exact(jnp.bfloat16, params(), platform="cuda")


def test_errors_name_the_cause() -> None:
    with pytest.raises(TraceError, match="its dtype is int32"):
        pooling.window_codes(jnp.zeros((4,), jnp.int32), (2,), (2,), "VALID")
    with pytest.raises(TraceError, match="differ in rank"):
        pooling.window_codes(jnp.zeros((4, 4)), (2,), (2,), "VALID")
    codes = jnp.zeros((2,), jnp.uint8)
    with pytest.raises(TraceError, match=r"has shape \(2,\), but the cotangent has shape \(3,\)"):
        pooling.scatter_by_codes(jnp.zeros((3,)), codes, (4,), (2,), (2,), "VALID")


def test_neither_part_gathers_or_scatters_and_disjoint_windows_add_nothing() -> None:
    for name, (shape, window, strides, padding) in POOLS.items():
        out = pooling.pooled_shape(shape, window, strides, padding)
        jaxpr = jax.make_jaxpr(
            lambda x, ct, p=(window, strides, padding): code_gradient(x, ct, *p)
        )(jnp.zeros(shape), jnp.zeros(out))
        names = {eqn.primitive.name for eqn in jaxpr.eqns}
        assert not {n for n in names if "gather" in n or "scatter" in n or "reduce_w" in n}
        is_summed = pooling.overlaps(window, strides) and 0 not in out
        assert ("add" in names or "add_any" in names) == is_summed, name


# On a GPU that is not there.

SHAPE = (32, 112, 112, 64)
ELEMENTS = 32 * 112 * 112 * 64


@functools.cache
def gpu_reports(window_size: int, dtype: str) -> dict[str, CompileReport]:
    """relu -> pool, stride 2: forward and backward of jax's rule and of codes, compiled for an H200."""
    window, strides = (1, window_size, window_size, 1), (1, 2, 2, 1)
    pads = lax.padtype_to_pads(SHAPE, window, strides, "SAME")
    out = pooling.pooled_shape(SHAPE, window, strides, pads)

    def pool(y: jax.Array) -> jax.Array:
        return lax.reduce_window(y, -jnp.inf, lax.max, window, strides, pads)

    def jax_forward(x: jax.Array) -> Any:
        y = jax.nn.relu(x)
        return pool(y), y

    def jax_backward(y: jax.Array, ct: jax.Array) -> jax.Array:
        return jnp.where(y > 0, jax.vjp(pool, y)[1](ct)[0], 0)

    def code_forward(x: jax.Array) -> Any:
        y = jax.nn.relu(x)
        return pool(y), pooling.window_codes(y, window, strides, pads), y > 0

    def code_backward(codes: jax.Array, mask: jax.Array, ct: jax.Array) -> jax.Array:
        grad = pooling.scatter_by_codes(ct, codes, SHAPE, window, strides, pads)
        return jnp.where(mask, grad, 0)

    x, ct = jax.ShapeDtypeStruct(SHAPE, dtype), jax.ShapeDtypeStruct(out, dtype)
    codes, mask = jax.ShapeDtypeStruct(out, jnp.uint8), jax.ShapeDtypeStruct(SHAPE, bool)
    h200 = functools.partial(compile_report, device="h200")
    return {
        "jax forward": h200(jax_forward, x),
        "jax backward": h200(jax_backward, x, ct),
        "code forward": h200(code_forward, x),
        "code backward": h200(code_backward, codes, mask, ct),
    }


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("window", "dtype"), list(itertools.product((2, 3), ("bfloat16", "float32")))
)
def test_traffic_and_kernels_on_a_gpu(window: int, dtype: str) -> None:
    reports = gpu_reports(window, dtype)
    size = jnp.dtype(dtype).itemsize
    full, pooled = ELEMENTS * size, ELEMENTS * size // 4
    backward = reports["code backward"]
    assert backward.kernel_count == 1
    # Reads codes, mask and cotangent and writes the gradient, each once, and a table of a few codes.
    once = ELEMENTS // 4 + ELEMENTS + pooled + full
    assert once <= backward.hbm_traffic_bytes <= once + 64
    assert backward.temp_bytes < 1024
    ours = backward.hbm_traffic_bytes + reports["code forward"].hbm_traffic_bytes
    theirs = sum(reports[f"jax {name}"].hbm_traffic_bytes for name in ("forward", "backward"))
    assert 3 * ours < theirs
    assert reports["jax backward"].temp_bytes > full
