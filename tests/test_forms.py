"""Forms: exact bytes, the smallest lossless form, errors that name the choices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.core.errors import PolicyError
from remat.core.forms import (
    ENCODINGS,
    applicable,
    code_bits,
    form_of,
    get_encoding,
    is_lossless,
    stored_bytes,
)
from remat.core.graph import Value

WIDTHS = {"bool": 1, "int8": 1, "int16": 2, "int32": 4, "uint32": 4, "int64": 8, "float32": 4}
WIDTHS |= {"float64": 8, "float16": 2, "bfloat16": 2, "complex64": 8}


def value(
    dtype: str, shape: tuple[int, ...] = (64,), bounds: tuple[int, int] | None = None
) -> Value:
    return Value(7, shape, dtype, WIDTHS[dtype] * math.prod(shape), None, range=bounds)


@pytest.mark.parametrize(
    "shape, nbytes",
    [((), 1), ((0,), 0), ((1,), 1), ((8,), 1), ((9,), 2), ((3, 5), 2), ((64, 8), 64), ((4, 0), 0)],
)
def test_booleans_take_one_bit(shape: tuple[int, ...], nbytes: int) -> None:
    assert form_of(value("bool", shape)) == "bits"
    assert stored_bytes(value("bool", shape)) == nbytes
    assert stored_bytes(value("bool", shape), "raw") == math.prod(shape)


@pytest.mark.parametrize(
    "dtype, shape, bounds, form, nbytes",
    [
        ("int32", (64,), None, "raw", 256),
        ("int32", (64,), (0, 1), "uint1", 8),
        ("int32", (64,), (0, 0), "uint1", 8),
        ("int32", (65,), (-1, 0), "uint1", 9),
        ("int32", (5, 7), (0, 3), "uint2", 9),
        ("int32", (64,), (0, 4), "uint4", 32),
        ("int8", (64,), (-8, 7), "uint4", 32),
        ("int8", (64,), (-8, 8), "raw", 64),
        ("uint32", (64,), (2**32 - 256, 2**32 - 1), "uint8", 64),
        ("int32", (64,), (-128, 128), "uint16", 128),
        ("int32", (64,), (0, 65536), "raw", 256),
        ("int64", (64,), (-(2**40), -(2**40) + 2**32 - 1), "uint32", 256),
        ("int64", (64,), (0, 2**32), "raw", 512),
        ("int8", (), (0, 1), "raw", 1),
        ("int32", (), (0, 1), "uint1", 1),
        ("int32", (0, 4), (0, 1), "raw", 0),
        ("float32", (64,), None, "raw", 256),
        ("complex64", (), None, "raw", 8),
    ],
)
def test_the_smallest_lossless_form(
    dtype: str, shape: tuple[int, ...], bounds: tuple[int, int] | None, form: str, nbytes: int
) -> None:
    found = value(dtype, shape, bounds)
    assert (form_of(found), stored_bytes(found)) == (form, nbytes)


@given(
    dtype=st.sampled_from(["int8", "int16", "int32", "int64"]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ends=st.lists(st.integers(-128, 127), min_size=2, max_size=2),
)
def test_no_lossless_form_is_smaller(dtype: str, shape: tuple[int, ...], ends: list[int]) -> None:
    found = value(dtype, shape, (min(ends), max(ends)))
    lossless = [name for name in ENCODINGS if is_lossless(name) and applicable(name, found)]
    assert stored_bytes(found) == min(stored_bytes(found, name) for name in lossless)


def test_the_form_of_a_plan_comes_first() -> None:
    found = replace(value("float32"), form="bfloat16")
    assert (form_of(found), stored_bytes(found), stored_bytes(found, "raw")) == (
        "bfloat16",
        128,
        256,
    )
    with pytest.raises(PolicyError, match=r"no wider than bfloat16.* Keep it as 'raw'"):
        stored_bytes(replace(value("float16"), form="bfloat16"))


@pytest.mark.parametrize(
    "bounds, bits",
    [((0, 0), 1), ((3, 4), 1), ((0, 2), 2), ((-4, 11), 4), ((0, 255), 8), ((0, 256), 16)],
)
def test_bits_of_a_code(bounds: tuple[int, int], bits: int) -> None:
    assert code_bits(bounds) == bits


def test_codes_of_more_than_32_bits_are_none() -> None:
    assert code_bits((0, 2**32 - 1)) == 32
    assert code_bits((-1, 2**32 - 1)) is None


@pytest.mark.parametrize(
    "form, dtype, shape, nbytes",
    [
        ("float16", "float32", (3, 5), 30),
        ("bfloat16", "float64", (3, 5), 30),
        ("float8_e4m3", "bfloat16", (3, 5), 15),
        ("float8_e5m2", "float32", (), 1),
        ("sparse:0.5", "float32", (256,), 128 * 5),
        ("sparse:0.5", "float32", (4, 257), 5 * 128 * 5),
        ("sparse:0.1", "float32", (1024,), 4 * 26 * 5),
        ("sparse:.25", "bfloat16", (2, 256), 2 * 64 * 3),
        ("sparse:0.001", "float64", (256,), 9),
    ],
)
def test_lossy_forms_take_exactly(
    form: str, dtype: str, shape: tuple[int, ...], nbytes: int
) -> None:
    assert not is_lossless(form)
    assert stored_bytes(value(dtype, shape), form) == nbytes
    assert form_of(value(dtype, shape)) == "raw"


@pytest.mark.parametrize("share, capacity", [("0.1", 26), ("0.5", 128), ("1", 256), ("1.0", 256)])
def test_room_in_a_row_is_exact(share: str, capacity: int) -> None:
    assert get_encoding(f"sparse:{share}").row_capacity == capacity


@pytest.mark.parametrize(
    "form, found, reason",
    [
        ("bits", value("int8"), "it has dtype int8, not bool"),
        ("uint2", value("float32"), "it has dtype float32, not one of int8"),
        ("uint2", value("int32"), "no range is proven"),
        ("uint2", value("int32", bounds=(0, 4)), r"its range \[0, 4\] does not fit in 2 bits"),
        ("uint8", value("int8", bounds=(0, 4)), "it would take 64 bytes, no fewer than its 64"),
        ("float16", value("bfloat16"), "bfloat16 is no wider than float16"),
        ("float16", value("int32"), "it has dtype int32"),
        (
            "sparse:0.9",
            value("float32", (256,)),
            "it would take 1155 bytes, no fewer than its 1024",
        ),
        ("sparse:0.5", value("float32", (8,)), "it would take 640 bytes, no fewer than its 32"),
    ],
)
def test_what_does_not_fit_says_why(form: str, found: Value, reason: str) -> None:
    assert not applicable(form, found)
    with pytest.raises(PolicyError, match=rf"value 7 .*cannot be kept as '{form}': {reason}.*Keep"):
        stored_bytes(found, form)


@pytest.mark.parametrize("form", ["", "bit", "uint3", "float8", "int8", "sparsely"])
def test_unknown_forms_name_the_choices(form: str) -> None:
    with pytest.raises(PolicyError, match=rf"no form '{form}'.*raw, bits, uint1.*sparse:<share>"):
        get_encoding(form)


def test_a_near_miss_is_recognised() -> None:
    with pytest.raises(PolicyError, match="did you mean 'bfloat16'"):
        get_encoding("bfloat")


@pytest.mark.parametrize("share", ["", "0", "0.0", "1.01", "-0.5", "half", "nan", "1e-1", "1/2"])
def test_shares_without_sense_are_refused(share: str) -> None:
    with pytest.raises(PolicyError, match=r"no valid share: expected sparse:<share> with 0 <"):
        get_encoding(f"sparse:{share}")


def test_every_encoding_describes_itself() -> None:
    for name, encoding in ENCODINGS.items():
        assert encoding.name == name
        assert encoding.lossless == (not encoding.description.startswith("lossy"))
