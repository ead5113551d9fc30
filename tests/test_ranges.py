"""Ranges: what is proven holds for every element, and the masks and codes that matter are bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from remat.trace.intervals import Interval
from remat.trace.program import Program, evaluate, program_of
from remat.trace.ranges import integer_ranges
from tests.random_graphs import laws

I8 = jnp.zeros((3, 4), jnp.int8)
I32 = jnp.zeros((3, 4), jnp.int32)
U8 = jnp.zeros((3, 4), jnp.uint8)
U32 = jnp.zeros((3, 4), jnp.uint32)
F32 = jnp.zeros((3, 4), jnp.float32)
FLAG = jnp.zeros((3, 4), jnp.bool_)


def traced(f: Callable[..., Any], *args: Any) -> Program:
    return program_of(jax.make_jaxpr(f)(*args), inline_custom=True)


def proven(f: Callable[..., Any], *args: Any) -> Interval | None:
    """The range of a function's first result."""
    program = traced(f, *args)
    result = program.outputs[0]
    assert isinstance(result, int)
    return integer_ranges(program).get(result)


def window_codes(x: jax.Array) -> jax.Array:
    """Where in its 2 by 2 window the maximum is: the codes of a max-pool's gradient."""
    windows = x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2).transpose(0, 2, 1, 3)
    return jnp.argmax(windows.reshape(*windows.shape[:2], 4), axis=-1)


@pytest.mark.parametrize(
    "f, args, expected",
    [
        # Sources.
        (lambda: lax.iota(jnp.int32, 9), (), (0, 8)),
        (lambda: lax.iota(jnp.int8, 300), (), None),
        (lambda x: x + jnp.int32(3), (I32,), None),
        (lambda x: jnp.full_like(x, 3) + 1, (I32,), (4, 4)),
        (lambda x: x > 0, (F32,), (0, 1)),
        (lambda x: jnp.array([[3, -5, 1, 0]]) * jnp.ones_like(x), (I32,), (-5, 3)),
        (lambda x: x, (I32,), None),
        # Conversions.
        (lambda x: (x > 0).astype(jnp.int32), (F32,), (0, 1)),
        (lambda x: x.astype(jnp.int32), (I8,), (-128, 127)),
        (lambda x: x.astype(jnp.int32), (U8,), (0, 255)),
        (lambda x: lax.convert_element_type(lax.iota(jnp.int32, 200), jnp.int8), (F32,), None),
        (lambda x: lax.convert_element_type(lax.iota(jnp.int32, 100), jnp.int8), (F32,), (0, 99)),
        (lambda x: x.astype(jnp.int32), (F32,), None),
        (lambda x: (lax.iota(jnp.int32, 3) + 1).astype(bool), (F32,), (1, 1)),
        # Arithmetic.
        (lambda x: jnp.clip(x, -2, 5), (I32,), (-2, 5)),
        (lambda x: jnp.maximum(x, 3), (I32,), (3, 2**31 - 1)),
        (lambda x: jnp.minimum(x.astype(jnp.int32), 3) * -2, (I8,), (-6, 256)),
        (lambda x: x.astype(jnp.int32) + x.astype(jnp.int32), (U8,), (0, 510)),
        (lambda x: x + x, (U8,), None),
        (lambda x: x - 1, (U8,), None),
        (lambda x: -x, (I8,), None),
        (lambda x: -jnp.maximum(x, -5), (I8,), (-127, 5)),
        (lambda x: jnp.abs(x), (I8,), None),
        (lambda x: jnp.abs(jnp.clip(x, -3, 2)), (I8,), (0, 3)),
        (lambda x: jnp.sign(x), (I32,), (-1, 1)),
        (lambda x: lax.rem(x, jnp.full_like(x, 5)), (I32,), (-4, 4)),
        (lambda x: x % 4, (U32,), (0, 3)),
        (lambda x: jnp.maximum(x, 0) % 4, (I32,), (0, 3)),
        (lambda x: x % 4, (I32,), (-3, 7)),
        (lambda x: lax.div(x, jnp.full_like(x, -50)), (I8,), (-2, 2)),
        (lambda x: lax.div(x, x), (I8,), None),
        (lambda x: lax.div(x, jnp.full_like(x, -1)), (I8,), None),
        (lambda x: lax.integer_pow(jnp.clip(x, -3, 2), 2), (I32,), (0, 9)),
        (lambda x: lax.integer_pow(jnp.clip(x, -3, 2), 3), (I32,), (-27, 8)),
        # Bits.
        (lambda x: x & 3, (I32,), (0, 3)),
        (lambda x: (x & 4) | 1, (I32,), (1, 7)),
        (lambda x: (x & 4) ^ 3, (I32,), (0, 7)),
        (lambda x: ~(x & 3), (I32,), (-4, -1)),
        (lambda x: x >> 30, (U32,), (0, 3)),
        (lambda x: x >> 30, (I32,), (-2, 1)),
        (lambda x: lax.shift_right_logical(x, jnp.int32(30)), (I32,), (0, 3)),
        (lambda x: lax.shift_right_arithmetic(x, jnp.uint32(30)), (U32,), None),
        (lambda x: (x & 3) << 2, (I32,), (0, 12)),
        (lambda x: (x & 3) << 33, (I32,), None),
        (lambda x: (x & 3) << 30, (I32,), None),
        (lambda x: lax.population_count(x), (I32,), (0, 32)),
        (lambda x: lax.population_count(x & 7), (I32,), (0, 3)),
        (lambda x: lax.clz(x & 7), (I32,), (29, 32)),
        # Choices and comparisons.
        (lambda m, x: jnp.where(m, x & 1, 5), (FLAG, I32), (0, 5)),
        (lambda m, x: jnp.where(m, x, 5), (FLAG, I32), None),
        (lambda x: (x & 3) < 4, (I32,), (1, 1)),
        (lambda x: (x & 3) == 4, (I32,), (0, 0)),
        (lambda x: jnp.where((x & 3) >= 0, x & 7, x), (I32,), (0, 7)),
        # Shapes.
        (lambda x: jnp.argmax(x, 1), (F32,), (0, 3)),
        (lambda x: jnp.argmin(x), (F32,), (0, 11)),
        (lambda x: lax.argmax(jnp.zeros((300,)) + x[0, 0], 0, jnp.int8), (F32,), None),
        (lambda x: jnp.argsort(x, axis=1), (F32,), (0, 3)),
        (lambda x: lax.top_k(x, 2)[1], (F32,), (0, 3)),
        (lambda x: jnp.sum(x > 0, axis=1), (F32,), (0, 4)),
        (lambda x: jnp.cumsum((x > 0).astype(jnp.int32), axis=1) - 1, (F32,), (-1, 3)),
        (lambda x: lax.cumsum(jnp.full_like(x, 1), axis=1), (I32,), (1, 4)),
        (lambda x: jnp.max(x & 3), (I32,), (0, 3)),
        (lambda x: lax.reduce_max(x[:, :0] & 3, (1,)), (I32,), None),
        (lambda x: jnp.concatenate([x & 3, x & 8]), (I32,), (0, 8)),
        (lambda x: jnp.pad(x & 3, 1, constant_values=-1), (I32,), (-1, 3)),
        (lambda x: (x & 3)[::-1, 1:3].T.reshape(-1)[None], (I32,), (0, 3)),
        (lambda x, i: (x & 3)[i], (I32, 0), (0, 3)),
        (lambda x: jnp.take(x & 3, x[0], axis=0), (I32,), (-(2**31), 3)),
        (lambda x: jnp.take(x & 3, x[0], axis=0, mode="clip"), (I32,), (0, 3)),
        (lambda x: (x & 3).at[x[0]].set(9), (I32,), (0, 9)),
        (lambda x: (x & 3).at[x[0]].add(9), (I32,), None),
        (lambda x: lax.optimization_barrier((x & 1, x & 3))[0], (I32,), (0, 1)),
        (lambda x: window_codes(x), (jnp.zeros((8, 6)),), (0, 3)),
        # Loops are not looked into.
        (lambda x: lax.fori_loop(0, 3, lambda _, c: c & 1, x), (I32,), None),
    ],
)
def test_rules(f: Callable[..., Any], args: tuple[Any, ...], expected: Interval | None) -> None:
    assert proven(f, *args) == expected


def test_constants_are_read_unless_large() -> None:
    small, large = np.arange(5), np.zeros(2**16 + 1, np.int32)
    assert proven(lambda x: jnp.asarray(small) + (x & 1), jnp.int32(0)) == (0, 5)
    assert proven(lambda x: jnp.asarray(large) + (x & 1), jnp.int32(0)) is None


def test_dropout_masks_and_keys_do_no_harm() -> None:
    def f(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)

    program = traced(f, jax.random.key(0), F32)
    masks = [v for v, aval in enumerate(program.avals) if getattr(aval, "dtype", None) == jnp.bool_]
    assert masks
    assert {integer_ranges(program)[mask] for mask in masks} == {(0, 1)}


def test_only_integers_and_booleans_have_ranges() -> None:
    program = traced(lambda x: (jnp.sin(x) * jnp.argmax(x), jnp.sign(x)), F32)
    for value in integer_ranges(program):
        assert program.avals[value].dtype in (jnp.int32, jnp.bool_)


# --- soundness on random programs --------------------------------------------------------------------

SHAPE = (3, 4)
EXAMPLES = 60
DTYPES = ("int8", "uint8", "int32", "uint32", "bool")
Binary = Callable[[Any, Any], Any]
BINARY: tuple[Binary, ...] = (
    lax.add,
    lax.sub,
    lax.mul,
    lax.div,
    lax.rem,
    lax.max,
    lax.min,
    lax.shift_left,
    lax.shift_right_logical,
    lax.shift_right_arithmetic,
)
BITWISE: tuple[Binary, ...] = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)
COMPARE: tuple[Binary, ...] = (lax.lt, lax.le, lax.gt, lax.ge, lax.eq, lax.ne)
ANY_UNARY: tuple[Callable[[Any], Any], ...] = (
    lax.bitwise_not,
    lambda x: x.T.reshape(SHAPE),
    lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:3],
    lambda x: jnp.sort(x, axis=1),
    lambda x: jnp.broadcast_to(jnp.max(x, axis=1, keepdims=True), SHAPE),
    lambda x: jnp.broadcast_to(jnp.min(x), SHAPE),
    lambda x: x[jnp.array([2, 0, 1])],
    lambda x: jnp.take(x, jnp.array([2, 5, 1]), axis=0),
    lambda x: x.at[jnp.array([1])].set(x[2]),
    lambda x: jnp.concatenate([x[1:], x[:1]]),
)
UNARY: tuple[Callable[[Any], Any], ...] = (
    lax.neg,
    jnp.abs,
    lax.sign,
    lax.population_count,
    lax.clz,
    lambda x: lax.integer_pow(x, 2),
    lambda x: lax.integer_pow(x, 3),
    lambda x: lax.cumsum(x, axis=1),
    lambda x: lax.cummax(x, axis=1),
    lambda x: jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True, dtype=x.dtype), SHAPE),
    lambda x: jnp.broadcast_to(jnp.argmax(x, axis=0), SHAPE).astype(x.dtype),
    lambda x: lax.reduce_or(x, (1,))[:, None] + jnp.zeros_like(x),
    lambda x: lax.reduce_and(x, (1,))[:, None] + jnp.zeros_like(x),
)
TIGHT: tuple[Binary, ...] = (
    *(lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, *COMPARE),
    *(lax.shift_left, lax.shift_right_arithmetic),
)
ENDS = (
    (-128, 127),
    (-128, -127),
    (-9, 5),
    (-3, -1),
    (0, 0),
    (0, 3),
    (1, 1),
    (2, 6),
    (5, 40),
    (126, 127),
)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("op", [*BINARY, *BITWISE, *COMPARE], ids=lambda op: op.__name__)
def test_two_operands_on_every_pair_of_bytes(op: Binary, dtype: str) -> None:
    """Sound for all elements, and the very ends for the rules that can know them."""
    info = np.iinfo(dtype)
    bytes_ = np.arange(info.min, info.max + 1).astype(dtype)
    ends = [(low, high) for low, high in ENDS if low >= info.min]
    run = jax.jit(op)
    for first in ends:
        for second in ends:
            a = jnp.asarray(np.clip(bytes_, *first)[:, None] + np.zeros((1, 256), dtype))
            b = jnp.asarray(np.clip(bytes_, *second)[None, :] + np.zeros((256, 1), dtype))
            elements = np.asarray(run(a, b))
            hull = (int(elements.min()), int(elements.max()))
            found = proven(lambda a, b, x=first, y=second: op(_within(a, x), _within(b, y)), a, b)
            low, high = found or (info.min, info.max)
            assert low <= hull[0] <= hull[1] <= high, (first, second, found, hull)
            if op in TIGHT and found is not None:
                assert found == hull, (first, second)


def _within(x: jax.Array, ends: Interval) -> jax.Array:
    return lax.clamp(jnp.full_like(x, ends[0]), x, jnp.full_like(x, ends[1]))


SHORT = st.integers(-12, 12)
SMALL = st.sampled_from([-128, -9, -3, -1, 0, 1, 2, 3, 7, 8, 31, 100, 127, 255])


@st.composite
def programs(draw: st.DrawFn) -> tuple[Callable[..., list[jax.Array]], list[np.ndarray]]:
    """A random program that returns everything it computes, and arguments to run it with."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arguments = [_extreme(rng, dtype) for dtype in DTYPES]
    bounds = [sorted(draw(st.tuples(SHORT, SHORT))) for _ in DTYPES[:-1]]
    bounds = [
        (low, high) if i % 2 == 0 else (abs(low), abs(low) + abs(high))
        for i, (low, high) in enumerate(bounds)
    ]
    plan = [
        (draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(SMALL))
        for _ in range(draw(st.integers(3, 14)))
    ]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        known: dict[str, list[jax.Array]] = {str(x.dtype): [x] for x in arrays}
        order = list(arrays)
        for (low, high), array in zip(bounds, arrays[:-1], strict=True):
            # Without narrow ranges to begin with, hardly anything would be proven.
            order.append(jnp.clip(array, low, high))
            known[str(array.dtype)] += [order[-1]] * 3
        for kind, first, second, number in plan:
            a = order[-1 - first % min(len(order), 9)]
            peers = known[str(a.dtype)]
            b = peers[second % len(peers)]
            if second % 3 == 0:
                b = lax.full_like(a, np.int64(number).astype(a.dtype))
            order.append(_step(kind, first, a, b, known["bool"][-1], number))
            known[str(order[-1].dtype)].append(order[-1])
        return order

    return run, arguments


def _extreme(rng: np.random.Generator, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, SHAPE).astype(bool)
    info = np.iinfo(dtype)
    ends = np.array([info.min, info.max, 0, 1, info.max - 1, 3], dtype=dtype)
    drawn = rng.integers(info.min, info.max, SHAPE, dtype=dtype, endpoint=True)
    return np.where(rng.integers(0, 2, SHAPE) == 1, rng.choice(ends, SHAPE), drawn)


def _step(kind: int, which: int, a: Any, b: Any, mask: Any, number: int) -> jax.Array:
    def pick(options: Any) -> Any:
        return options[which % len(options)]

    if kind < 30 and a.dtype != jnp.bool_:
        return pick(BINARY)(a, b)
    if kind < 45:
        return pick(BITWISE)(a, b)
    if kind < 55:
        return pick(COMPARE)(a, b)
    if kind < 65:
        return lax.select(mask, a, b)
    if kind < 75:
        return a.astype(pick(DTYPES))
    if kind < 80:
        return lax.clamp(lax.full_like(a, bool(number % 2)), a, b)
    if kind < 90 and a.dtype != jnp.bool_:
        return pick(UNARY)(a)
    return pick(ANY_UNARY)(a)


@pytest.mark.slow
@given(case=programs())
@laws(EXAMPLES)
def test_every_element_lies_in_its_proven_range(case: Any) -> None:
    run, arguments = case
    program = traced(run, *arguments)
    ranges = integer_ranges(program)
    checked = sorted(ranges)
    arrays = evaluate(replace(program, outputs=tuple(checked)), [jnp.asarray(x) for x in arguments])
    for value, array in zip(checked, arrays, strict=True):
        elements, (low, high) = np.asarray(array), ranges[value]
        producer = [e.source for e in program.equations if value in e.outputs]
        assert low <= high
        assert elements.size == 0 or low <= int(elements.min()), (producer, ranges[value], elements)
        assert elements.size == 0 or int(elements.max()) <= high, (
            producer,
            ranges[value],
            elements,
        )


def test_the_analysis_is_linear() -> None:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(5000):
            x = (x + 1) & 7
        return x

    program = traced(chain, jnp.int32(0))
    assert len(program.equations) == 10000
    start = time.process_time()
    ranges = integer_ranges(program)
    assert time.process_time() - start < 5
    assert ranges[program.equations[-1].outputs[0]] == (0, 7)
    assert len(ranges) == 9999  # all but the first sum, which may wrap around
