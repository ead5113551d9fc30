"""Encodings: exact inverses, exact bytes, every transform, and no kernel more than without them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.compiler.compile import compile_report
from remat.core.errors import PolicyError
from remat.core.forms import applicable, get_encoding, stored_bytes
from remat.core.graph import Value
from remat.lower.encode import decode, encode, measure_error, pack_bits, unpack_bits
from tests.programs import run_on_devices
from tests.random_graphs import laws

SHAPES = ((), (0,), (1,), (7,), (8,), (3, 5), (16, 3), (4, 0), (5, 8, 3), (2, 3, 64), (300,))
LOSSY = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2", "sparse:0.5", "sparse:0.1")


def value_of(array: Any, bounds: tuple[int, int] | None = None) -> Value:
    return Value(0, array.shape, str(array.dtype), array.nbytes, None, range=bounds)


def total_bytes(stored: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(stored))


@functools.partial(jax.jit, static_argnums=(0, 2))
def round_trip(form: str, array: Any, offset: int = 0) -> Any:
    return decode(form, encode(form, array, offset=offset), array.shape, array.dtype, offset=offset)


@functools.partial(jax.jit, static_argnums=(0, 2))
def stored_form(form: str, array: Any, offset: int = 0) -> Any:
    return encode(form, array, offset=offset)


def integers(shape: tuple[int, ...], low: int, high: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Random integers, the first of them the ends of the range."""
    drawn = random.Random(seed)
    elements = [drawn.randint(low, high) for _ in range(math.prod(shape))]
    elements[:2] = [low, high][: len(elements)]
    return np.array(elements, dtype=dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(3), shape, dtype)


def with_zeros(shape: tuple[int, ...], share: float) -> jax.Array:
    """Normal numbers, of which every 256 in a row have at most `share` that are not zero."""
    places = jnp.arange(math.prod(shape)).reshape(shape) * 131 % 256
    return jnp.where(places < share * 256, normal(shape), 0)


# --- lossless ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_exact(shape: tuple[int, ...]) -> None:
    mask = jnp.asarray(integers(shape, 0, 1, "bool"))
    stored = stored_form("bits", mask)
    assert stored.dtype == jnp.uint8
    assert total_bytes(stored) == stored_bytes(value_of(mask), "bits")
    np.testing.assert_array_equal(round_trip("bits", mask), mask, strict=True)
    np.testing.assert_array_equal(unpack_bits(pack_bits(mask), shape), mask, strict=True)


def test_bits_lie_in_the_order_of_packbits() -> None:
    mask = integers((4, 24), 0, 1, "bool")
    expected = np.packbits(mask, axis=1, bitorder="little")
    np.testing.assert_array_equal(pack_bits(jnp.asarray(mask)), expected)


def test_packing_shortens_the_last_axis_that_divides() -> None:
    def packed(form: str, *shape: int) -> tuple[int, ...]:
        dtype = bool if form == "bits" else "int32"
        return jax.eval_shape(lambda x: encode(form, x), jnp.zeros(shape, dtype)).shape

    assert packed("bits", 16, 24, 3) == (16, 3, 3)
    assert packed("uint2", 16, 6, 3) == (4, 6, 3)
    assert packed("uint4", 5, 6, 3) == (5, 3, 3)
    assert packed("uint4", 5, 3, 3) == (23,)


@pytest.mark.sample(20)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (16, 3), (5, 8, 3)])
@pytest.mark.parametrize(
    "dtype, bits",
    [
        (t, b)
        for t in ("int8", "uint16", "int32")
        for b in (1, 2, 4, 8, 16)
        if b <= np.iinfo(t).bits
    ],
)
def test_codes_are_exact(dtype: str, bits: int, shape: tuple[int, ...]) -> None:
    info = np.iinfo(dtype)
    span = 2**bits - 1
    for low in {int(info.min), int(info.max) - span}:
        array = jnp.asarray(integers(shape, low, low + span, dtype))
        value, form = value_of(array, (low, low + span)), f"uint{bits}"
        assert total_bytes(stored_form(form, array, low)) == get_encoding(form).stored_bytes(value)
        np.testing.assert_array_equal(round_trip(form, array, low), array, strict=True)


def test_codes_of_64_bit_integers_are_exact() -> None:
    with jax.enable_x64(True):
        for bits in (4, 32):
            for low in (-(2**63), 2**63 - 2**bits):
                array = jnp.asarray(integers((5, 7), low, low + 2**bits - 1, "int64"))
                value, form = value_of(array, (low, low + 2**bits - 1)), f"uint{bits}"
                assert total_bytes(stored_form(form, array, low)) == stored_bytes(value, form)
                np.testing.assert_array_equal(round_trip(form, array, low), array, strict=True)


@given(shape=st.lists(st.integers(0, 20), max_size=3).map(tuple), bits=st.sampled_from([1, 2, 4]))
@laws(12)
def test_codes_of_any_shape_are_exact(shape: tuple[int, ...], bits: int) -> None:
    array = jnp.asarray(integers(shape, -1, 2**bits - 2, "int8"))
    value = value_of(array, (-1, 2**bits - 2))
    stored = stored_form(f"uint{bits}", array, -1)
    assert total_bytes(stored) == get_encoding(f"uint{bits}").stored_bytes(value)
    np.testing.assert_array_equal(round_trip(f"uint{bits}", array, -1), array, strict=True)


def test_raw_keeps_anything() -> None:
    for array in (normal((3,)), jnp.ones((2,), jnp.complex64), jax.random.key(0)):
        assert encode("raw", array) is array
        assert decode("raw", array, array.shape, array.dtype) is array
    with pytest.raises(PolicyError, match="'bits' is for bool, not for key<fry>"):
        encode("bits", jax.random.key(0))


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(PolicyError, match="'bits' is for bool, not for float32"):
        encode("bits", normal((8,)))
    with pytest.raises(PolicyError, match="'uint16' is for an integer dtype of at least 16 bits"):
        encode("uint16", jnp.zeros(8, jnp.int8))
    with pytest.raises(PolicyError, match="'float16' is for a float dtype of more than 16 bits"):
        encode("float16", normal((8,), jnp.bfloat16))
    with pytest.raises(PolicyError, match=r"'sparse:0\.5' is for a float dtype, not for int32"):
        decode("sparse:0.5", None, (8,), jnp.int32)
    with pytest.raises(PolicyError, match="no form 'bit'"):
        encode("bit", jnp.zeros(8, bool))


# --- lossy -------------------------------------------------------------------------------------------


@pytest.mark.sample(12)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (4, 257)])
@pytest.mark.parametrize(
    "form, dtype",
    [
        *((form, "float32") for form in LOSSY),
        ("float8_e4m3", "bfloat16"),
        ("sparse:0.1", "bfloat16"),
    ],
)
def test_lossy_forms_take_exactly(form: str, shape: tuple[int, ...], dtype: str) -> None:
    array = normal(shape, jnp.dtype(dtype))
    encoding = get_encoding(form)
    stored = stored_form(form, array)
    assert total_bytes(stored) == encoding.stored_bytes(value_of(array))
    decoded = round_trip(form, array)
    assert (decoded.shape, decoded.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize(
    "form, significant, largest",
    [
        ("float16", 11, 65504.0),
        ("bfloat16", 8, 3.3895313892515355e38),
        ("float8_e4m3", 4, 448.0),
        ("float8_e5m2", 3, 57344.0),
    ],
)
def test_narrow_floats_round_to_nearest_and_saturate(
    form: str, significant: int, largest: float
) -> None:
    array = jnp.linspace(1, 250, 1001)
    error = measure_error(form, array)
    assert 2.0 ** -(significant + 1) < error.max_relative_error <= 2.0**-significant
    beyond = jnp.array([3.4e38, -3.4e38, largest, 0.0, -1.5])
    expected = [largest, -largest, largest, 0.0, -1.5]
    np.testing.assert_array_equal(round_trip(form, beyond), jnp.array(expected))
    strange = round_trip(form, jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
    assert not jnp.isfinite(strange).any()


def test_sparse_is_exact_where_there_is_room() -> None:
    error = measure_error("sparse:0.25", with_zeros((3, 5, 51), 0.25))
    assert str(error) == "sparse:0.25: exact (765 elements)"


def test_sparse_drops_what_is_beyond_the_capacity_of_a_row() -> None:
    full = jnp.arange(1.0, 513.0).at[256:].multiply(jnp.arange(256) % 2)
    expected = full.at[128:256].set(0)
    np.testing.assert_array_equal(round_trip("sparse:0.5", full), expected)
    error = measure_error("sparse:0.5", full)
    assert (error.elements, error.changed, error.max_abs_error) == (512, 128, 256.0)
    assert (error.changed_share, error.max_relative_error) == (0.25, 1.0)


def test_sparse_keeps_numbers_that_are_none() -> None:
    array = jnp.zeros(300).at[7].set(jnp.nan).at[299].set(-jnp.inf)
    np.testing.assert_array_equal(round_trip("sparse:0.01", array), array)


def test_errors_are_measured() -> None:
    error = measure_error("float16", jnp.array([1e6, 1.0, 0.0, -2.0]))
    assert (error.elements, error.changed, error.max_abs_error) == (4, 1, 1e6 - 65504)
    assert error.max_relative_error == (1e6 - 65504) / 1e6
    assert str(error) == (
        "float16: 1 of 4 elements changed (25.00%), by at most 9.34e+05, relatively 0.934"
    )
    assert str(measure_error("float16", jnp.array([jnp.nan, jnp.inf, 1.0]))) == (
        "float16: exact (3 elements)"
    )
    assert measure_error("float8_e4m3", jnp.array([jnp.inf])).max_abs_error == math.inf
    assert measure_error("bfloat16", jnp.zeros((0, 3))).changed_share == 0.0


def test_codes_out_of_range_show_as_errors() -> None:
    error = measure_error("uint2", jnp.array([-1, 0, 3, 6]), offset=-1)
    assert (error.changed, error.max_abs_error) == (2, 7.0)


# --- transforms --------------------------------------------------------------------------------------

CASES: tuple[tuple[str, Any], ...] = (
    ("bits", integers((8, 6, 16), 0, 1, "bool")),
    ("bits", integers((8, 6, 5), 0, 1, "bool")),
    ("uint2", integers((8, 6, 5), -2, 1, "int32")),
    ("uint8", integers((8, 6, 5), -2, 253, "int32")),
    ("bfloat16", np.asarray(normal((8, 6, 5)))),
    ("sparse:0.5", np.asarray(with_zeros((8, 256), 0.5))),
)


@pytest.mark.parametrize("form, array", CASES, ids=lambda case: case if type(case) is str else "")
def test_transforms_agree(form: str, array: np.ndarray) -> None:
    def f(x: jax.Array) -> jax.Array:
        return round_trip(form, x, -2)

    expected = round_trip(form, jnp.asarray(array), -2)
    scanned = jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.asarray(array))[1]
    for found in (scanned, jax.jit(jax.vmap(f))(array)):
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.slow
def test_shards_encode_their_own() -> None:
    program = """
import jax, jax.numpy as jnp, numpy as np
from remat.lower.encode import decode, encode
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
P = jax.sharding.PartitionSpec
numbers = jnp.arange(4096).reshape(64, 64)
cases = {
    "bits": numbers % 3 == 0, "uint2": numbers % 4 - 2, "uint16": numbers - 2,
    "bfloat16": jnp.sin(numbers), "sparse:0.5": jnp.where(numbers % 2 == 0, jnp.sin(numbers), 0),
}
for form, x in cases.items():
    f = lambda x: decode(form, encode(form, x, offset=-2), x.shape, x.dtype, offset=-2)
    sharded = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(sharded)(x), f(x))
    print(form)
"""
    assert run_on_devices(program, 4).split() == [
        "bits",
        "uint2",
        "uint16",
        "bfloat16",
        "sparse:0.5",
    ]


# --- kernels -----------------------------------------------------------------------------------------

ALIGNED = [(4096, 1024), (16, 28, 28, 64)]
h200 = "h200"


def kernels(f: Callable[..., Any], *args: Any) -> int:
    return compile_report(f, *args, device=h200).kernel_count


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def coded(x: jax.Array) -> jax.Array:
    """Two bits of information made from a float."""
    return (x > 0).astype(jnp.int32) + 2 * (x > 1).astype(jnp.int32)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("shape", ALIGNED)
@pytest.mark.parametrize("form, code", [("bits", lambda x: x > 0), ("uint2", coded)])
def test_packing_is_part_of_the_kernel_that_makes_the_value(
    form: str, code: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> None:
    relu = lambda x: jnp.maximum(x, 0)  # noqa: E731
    report = compile_report(lambda x: (relu(x), encode(form, code(x))), f32(*shape), device=h200)
    assert report.kernel_count == kernels(relu, f32(*shape)) == 1
    elements = math.prod(shape)
    bits = get_encoding(form).element_bits
    assert report.hbm_traffic_bytes == 8 * elements + elements * bits // 8
    assert report.temp_bytes == 0


@pytest.mark.gpu_compile
@pytest.mark.parametrize("shape", [*ALIGNED, (64, 8, 100), (33, 77, 5)])
@pytest.mark.parametrize("form, dtype", [("bits", jnp.bool_), ("uint2", jnp.int32)])
def test_unpacking_is_part_of_the_kernel_that_reads_the_value(
    form: str, dtype: Any, shape: tuple[int, ...]
) -> None:
    stored = jax.eval_shape(lambda x: encode(form, x), jax.ShapeDtypeStruct(shape, dtype))

    def reader(stored: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.where(decode(form, stored, shape, dtype) == 1, g, 0)

    report = compile_report(reader, stored, f32(*shape), device=h200)
    assert report.kernel_count == 1
    assert report.hbm_traffic_bytes == 8 * math.prod(shape) + math.prod(stored.shape)
    assert report.temp_bytes == 0


@pytest.mark.gpu_compile
@pytest.mark.parametrize("shape", [(64, 8, 100), (33, 77, 5)])
def test_packing_along_another_axis_is_a_kernel_of_its_own(shape: tuple[int, ...]) -> None:
    assert kernels(lambda x: pack_bits(x > 0), f32(*shape)) == 1
    assert kernels(lambda x: (jnp.maximum(x, 0), pack_bits(x > 0)), f32(*shape)) == 2


@pytest.mark.sample(1)
@pytest.mark.gpu_compile
@pytest.mark.parametrize("form", ["float16", "bfloat16", "float8_e4m3", "float8_e5m2"])
def test_narrow_floats_are_kept_narrow_in_one_program(form: str) -> None:
    """XLA would drop a pair of conversions, and keep the wide array."""
    shape = (1024, 1024)

    def both_passes(pair: Callable[[jax.Array], jax.Array]) -> Any:
        def f(x: jax.Array, w: jax.Array) -> jax.Array:
            h = jnp.sin(x)
            return (h @ w) @ w + jnp.cos(pair(h))

        return compile_report(f, f32(*shape), f32(*shape), device=h200)

    dtype = get_encoding(form).dtype
    ours = both_passes(lambda h: decode(form, encode(form, h), shape, jnp.float32))
    plain = both_passes(lambda h: h.astype(dtype).astype(jnp.float32))
    short = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3": "f8e4m3fn"}.get(form, "f8e5m2")
    assert f"{short}[1024,1024]" in ours.hlo_text
    assert f"{short}[1024,1024]" not in plain.hlo_text
    wide, narrow = f32(*shape), jax.eval_shape(lambda x: encode(form, x), f32(*shape))
    assert kernels(lambda x: (jnp.sin(x), encode(form, jnp.sin(x))), wide) == 1
    assert kernels(lambda stored: jnp.cos(decode(form, stored, shape, jnp.float32)), narrow) == 1


@pytest.mark.gpu_compile
def test_what_sparse_costs() -> None:
    """A sort and a gather going in; coming back, a scatter before the reader."""
    shape = (64, 4096)
    stored = jax.eval_shape(lambda x: encode("sparse:0.25", x), f32(*shape))
    packing = kernels(lambda x: encode("sparse:0.25", x), f32(*shape))
    reading = kernels(lambda s: jnp.sin(decode("sparse:0.25", s, shape, jnp.float32)), stored)
    assert (packing, reading) == (3, 3)
    assert applicable("sparse:0.25", Value(0, shape, "float32", 4 * math.prod(shape), None))
