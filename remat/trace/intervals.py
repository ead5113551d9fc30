"""What each primitive does to intervals of integers and booleans.

Every rule is exact arithmetic on the ends of the operands' intervals, in Python's integers; what does not fit in
the result's dtype could have wrapped around and proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

__all__ = ["Interval", "Site", "dtype_range", "transfer"]

Interval = tuple[int, int]
"""Smallest and largest value, both inclusive."""

# Higher powers of known ranges are numbers of many digits, and fit in no dtype but for -1, 0 and 1.
_INTEGER_POWER = 64


@dataclass(frozen=True, slots=True)
class Site:
    """One equation: parameters, abstract values, and the operands' ranges (None for what is no integer)."""

    params: Mapping[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    ranges: tuple[Interval | None, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape of the first operand."""
        return tuple(self.operands[0].shape)

    @property
    def limits(self) -> Interval:
        """What the first result's dtype can hold."""
        limits = dtype_range(self.results[0])
        assert limits is not None, "rules for integers are asked for integers only"
        return limits


def dtype_range(aval: Any) -> Interval | None:
    """Returns what an integer or boolean dtype can hold, None for any other."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return None
    if dtype == jnp.bool_:
        return 0, 1
    if not jnp.issubdtype(dtype, jnp.integer):
        return None
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def transfer(name: str, site: Site) -> Sequence[Interval | None]:
    """Returns what is proven of each result of a primitive; None where that is nothing, as for an unknown one."""
    nothing = (None,) * len(site.results)
    if name in _MANY:
        return _MANY[name](site)
    if name in _SHAPED:
        return (_SHAPED[name](site), *nothing[1:])
    known = [interval for interval in site.ranges if interval is not None]
    if name in _ARITHMETIC and len(known) == len(site.ranges):
        return (_ARITHMETIC[name](site, *known), *nothing[1:])
    return nothing


# --- intervals ---------------------------------------------------------------------------------------


def _union(*intervals: Interval | None) -> Interval | None:
    if not intervals or any(interval is None for interval in intervals):
        return None
    lows, highs = zip(*(interval for interval in intervals if interval is not None), strict=True)
    return min(lows), max(highs)


def _corners(operation: Callable[[int, int], int], a: Interval, b: Interval) -> Interval:
    """The range of an operation that is monotone in each operand for every value of the other."""
    ends = [operation(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _ones(number: int) -> int:
    """The largest number with as many bits as `number`, which is not negative."""
    return 2 ** number.bit_length() - 1


# --- arithmetic: all operands are integers or booleans of one shape ----------------------------------


def _add(_: Site, a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _sub(_: Site, a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _mul(_: Site, a: Interval, b: Interval) -> Interval:
    return _corners(lambda x, y: x * y, a, b)


def _neg(_: Site, a: Interval) -> Interval:
    return -a[1], -a[0]


def _abs(_: Site, a: Interval) -> Interval:
    low = 0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return low, max(abs(a[0]), abs(a[1]))


def _sign(_: Site, a: Interval) -> Interval:
    return (a[0] > 0) - (a[0] < 0), (a[1] > 0) - (a[1] < 0)


def _max(_: Site, a: Interval, b: Interval) -> Interval:
    return max(a[0], b[0]), max(a[1], b[1])


def _min(_: Site, a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), min(a[1], b[1])


def _clamp(_: Site, low: Interval, a: Interval, high: Interval) -> Interval:
    # min(max(x, low), high), also where low > high.
    ends = [min(max(a[i], low[i]), high[i]) for i in (0, 1)]
    return ends[0], ends[1]


def _div(_: Site, a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0 <= b[1]:
        return None

    def truncated(x: int, y: int) -> int:
        quotient = abs(x) // abs(y)
        return quotient if (x < 0) == (y < 0) else -quotient

    return _corners(truncated, a, b)


def _rem(_: Site, a: Interval, b: Interval) -> Interval:
    # The sign is the dividend's, and so is the value if the divisor is 0.
    low, high = min(a[0], 0), max(a[1], 0)
    if b[0] <= 0 <= b[1]:
        return low, high
    largest = max(abs(b[0]), abs(b[1])) - 1
    return max(low, -largest), min(high, largest)


def _and(_: Site, a: Interval, b: Interval) -> Interval | None:
    highs = [interval[1] for interval in (a, b) if interval[0] >= 0]
    if not highs:
        return None
    # Of booleans that are both True; of integers 1 & 1.
    return int(a == b and a == (1, 1)), min(highs)


def _or(_: Site, a: Interval, b: Interval) -> Interval | None:
    if min(a[0], b[0]) < 0:
        return None
    return max(a[0], b[0]), _ones(max(a[1], b[1]))


def _xor(_: Site, a: Interval, b: Interval) -> Interval | None:
    return None if min(a[0], b[0]) < 0 else (0, _ones(max(a[1], b[1])))


def _not(site: Site, a: Interval) -> Interval:
    low, high = site.limits
    return low + high - a[1], low + high - a[0]


def _bits(site: Site) -> int:
    return int(jnp.iinfo(site.results[0].dtype).bits)


def _is_shift(site: Site, by: Interval) -> bool:
    return by[0] >= 0 and by[1] < _bits(site)


def _shift_left(site: Site, a: Interval, by: Interval) -> Interval | None:
    return _corners(lambda x, y: x << y, a, by) if _is_shift(site, by) else None


def _shift_right_arithmetic(site: Site, a: Interval, by: Interval) -> Interval | None:
    # The highest bit is the sign, of unsigned integers too.
    if not _is_shift(site, by) or a[1] >= 2 ** (_bits(site) - 1):
        return None
    return _corners(lambda x, y: x >> y, a, by)


def _shift_right_logical(site: Site, a: Interval, by: Interval) -> Interval | None:
    if not _is_shift(site, by):
        return None
    if a[0] >= 0:
        return _corners(lambda x, y: x >> y, a, by)
    return (0, (2 ** _bits(site) - 1) >> by[0]) if by[0] > 0 else None


def _integer_pow(site: Site, a: Interval) -> Interval | None:
    return _power(a, site.params["y"])


def _power(a: Interval, exponent: int) -> Interval | None:
    if not 0 <= exponent <= _INTEGER_POWER:
        return None
    ends = [a[0] ** exponent, a[1] ** exponent]
    if exponent and exponent % 2 == 0 and a[0] < 0 < a[1]:
        ends.append(0)
    return min(ends), max(ends)


def _population_count(site: Site, a: Interval) -> Interval:
    return 0, a[1].bit_length() if a[0] >= 0 else _bits(site)


def _leading_zeros(site: Site, a: Interval) -> Interval:
    bits = _bits(site)
    return (bits - a[1].bit_length(), bits - a[0].bit_length()) if a[0] >= 0 else (0, bits)


def _convert(site: Site, a: Interval) -> Interval:
    if site.results[0].dtype == jnp.bool_:
        return int(a[0] > 0 or a[1] < 0), int(a[0] != 0 or a[1] != 0)
    return a


def _lt(_: Site, a: Interval, b: Interval) -> Interval:
    return int(a[1] < b[0]), int(a[0] < b[1])


def _le(_: Site, a: Interval, b: Interval) -> Interval:
    return int(a[1] <= b[0]), int(a[0] <= b[1])


def _eq(_: Site, a: Interval, b: Interval) -> Interval:
    return int(a == b and a[0] == a[1]), int(a[0] <= b[1] and b[0] <= a[1])


def _ne(site: Site, a: Interval, b: Interval) -> Interval:
    low, high = _eq(site, a, b)
    return 1 - high, 1 - low


_ARITHMETIC: Mapping[str, Callable[..., Interval | None]] = MappingProxyType(
    {
        "add": _add,
        "add_any": _add,
        "sub": _sub,
        "mul": _mul,
        "neg": _neg,
        "abs": _abs,
        "sign": _sign,
        "max": _max,
        "min": _min,
        "clamp": _clamp,
        "div": _div,
        "rem": _rem,
        "and": _and,
        "or": _or,
        "xor": _xor,
        "not": _not,
        "shift_left": _shift_left,
        "shift_right_arithmetic": _shift_right_arithmetic,
        "shift_right_logical": _shift_right_logical,
        "integer_pow": _integer_pow,
        "square": lambda _, a: _power(a, 2),
        "population_count": _population_count,
        "clz": _leading_zeros,
        "convert_element_type": _convert,
        "lt": _lt,
        "le": _le,
        "gt": lambda site, a, b: _lt(site, b, a),
        "ge": lambda site, a, b: _le(site, b, a),
        "eq": _eq,
        "ne": _ne,
    }
)


# --- rules that look at shapes and parameters --------------------------------------------------------


def _first(site: Site) -> Interval | None:
    return site.ranges[0]


def _any_of_two(site: Site) -> Interval | None:
    return _union(site.ranges[0], site.ranges[1])


def _any_of_all(site: Site) -> Interval | None:
    return _union(*site.ranges)


def _any_case(site: Site) -> Interval | None:
    which, *cases = site.ranges
    last = len(cases) - 1
    low, high = (0, last) if which is None else (max(which[0], 0), min(which[1], last))
    # Outside of the cases the choice is not defined: then all of them.
    return _union(*(cases[low : high + 1] or cases))


def _iota(site: Site) -> Interval | None:
    size = int(site.params["shape"][site.params["dimension"]])
    return (0, size - 1) if size > 0 else None


def _reduced(site: Site) -> int:
    return math.prod(site.dims[axis] for axis in site.params["axes"])


def _argmax(site: Site) -> Interval | None:
    return (0, _reduced(site) - 1) if _reduced(site) > 0 else None


def _reduce_max(site: Site) -> Interval | None:
    # Without elements the result is the dtype's end.
    return site.ranges[0] if _reduced(site) > 0 else None


def _total(interval: Interval | None, count: int) -> Interval | None:
    return None if interval is None else (count * interval[0], count * interval[1])


def _reduce_sum(site: Site) -> Interval | None:
    return _total(site.ranges[0], _reduced(site))


def _cumsum(site: Site) -> Interval | None:
    return _union(site.ranges[0], _total(site.ranges[0], site.dims[site.params["axis"]]))


def _reduce_or(site: Site) -> Interval | None:
    interval = site.ranges[0]
    if interval is None or interval[0] < 0 or _reduced(site) == 0:
        return None
    return interval[0], _ones(interval[1])


def _reduce_and(site: Site) -> Interval | None:
    interval = site.ranges[0]
    if interval is None or interval[0] < 0 or _reduced(site) == 0:
        return None
    return int(interval == (1, 1)), interval[1]


def _pooled(site: Site) -> Interval | None:
    # A window that lies in the padding has the dtype's end as its maximum.
    is_padded = any(low > 0 or high > 0 for low, high in site.params["padding"])
    is_dilated = any(size != 1 for size in site.params["base_dilation"])
    has_empty_window = 0 in site.params["window_dimensions"]
    return None if is_padded or is_dilated or has_empty_window else site.ranges[0]


def _gather(site: Site) -> Interval | None:
    mode = _mode(site)
    if mode != "FILL_OR_DROP":
        return site.ranges[0] if mode in ("CLIP", "PROMISE_IN_BOUNDS") else None
    fill = site.params["fill_value"]
    if fill is None:
        # jax's default: the smallest of a signed dtype, the largest of an unsigned one, True.
        low, high = site.limits
        fill = low if low < 0 else high
    return _union(site.ranges[0], (int(fill), int(fill)))


def _scattered(site: Site) -> Interval | None:
    # What lies outside is clipped or dropped: either way every element is an operand's or an update's.
    known = _mode(site) in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")
    return _union(site.ranges[0], site.ranges[2]) if known else None


def _mode(site: Site) -> str:
    """How an indexed operator treats what lies outside, by name."""
    return str(getattr(site.params["mode"], "name", site.params["mode"]))


_SHAPED: Mapping[str, Callable[[Site], Interval | None]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "broadcast_in_dim",
                "copy",
                "cummax",
                "cummin",
                "device_put",
                "dynamic_slice",
                "expand_dims",
                "pvary",
                "reshape",
                "rev",
                "sharding_constraint",
                "slice",
                "squeeze",
                "stop_gradient",
                "tile",
                "transpose",
            ),
            _first,
        ),
        "concatenate": _any_of_all,
        "pad": _any_of_two,
        "dynamic_update_slice": _any_of_two,
        "select_n": _any_case,
        "iota": _iota,
        "argmax": _argmax,
        "argmin": _argmax,
        "reduce_max": _reduce_max,
        "reduce_min": _reduce_max,
        "reduce_sum": _reduce_sum,
        "reduce_or": _reduce_or,
        "reduce_and": _reduce_and,
        "cumsum": _cumsum,
        "reduce_window_max": _pooled,
        "reduce_window_min": _pooled,
        "gather": _gather,
        "scatter": _scattered,
        "scatter-min": _scattered,
        "scatter-max": _scattered,
    }
)


# --- rules with several results ----------------------------------------------------------------------


def _each(site: Site) -> Sequence[Interval | None]:
    return site.ranges


def _split(site: Site) -> Sequence[Interval | None]:
    return (site.ranges[0],) * len(site.results)


def _top_k(site: Site) -> Sequence[Interval | None]:
    axis = site.params.get("axis", -1)
    return site.ranges[0], (0, max(site.dims[axis] - 1, 0))


_MANY: Mapping[str, Callable[[Site], Sequence[Interval | None]]] = MappingProxyType(
    {"optimization_barrier": _each, "sort": _each, "split": _split, "top_k": _top_k}
)
