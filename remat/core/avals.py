"""Sizes of arrays: elements and bytes of anything that has `.shape` and `.dtype`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

__all__ = ["aval_bytes", "aval_size", "is_complex"]

# Types that numpy holds in a byte and XLA packs. Every other dtype is as large as its `itemsize`.
_PACKED_BITS: Mapping[str, int] = MappingProxyType(
    {
        "int2": 2,
        "uint2": 2,
        "int4": 4,
        "uint4": 4,
        "float4_e2m1fn": 4,
    }
)
_KEY_WORD_BITS = 32


def aval_size(aval: Any) -> int:
    """Returns the number of elements; 0 for something without a shape, such as a token."""
    shape = getattr(aval, "shape", None)
    return 0 if shape is None else math.prod(int(size) for size in shape)


def aval_bytes(aval: Any) -> int:
    """Returns the bytes an array takes in device memory.

    A bool takes one byte, int4 half of one (the array is rounded up to whole bytes), float0 none. A
    PRNG key takes what its implementation stores (`uint32[2]` for threefry); a key type that does
    not tell falls back to its `itemsize`, and something with neither (a token) takes none.
    """
    return (aval_size(aval) * _dtype_bits(getattr(aval, "dtype", None)) + 7) // 8


def _dtype_bits(dtype: Any) -> int:
    name = _dtype_name(dtype)
    if name in _PACKED_BITS:
        return _PACKED_BITS[name]
    key_shape = getattr(getattr(dtype, "_impl", None), "key_shape", None)
    if key_shape is not None:
        return _KEY_WORD_BITS * math.prod(key_shape)
    return 8 * int(getattr(dtype, "itemsize", 0))


# numpy spells a name anew whenever it is asked.
_numpy_name = lru_cache(maxsize=256)(lambda dtype: dtype.name)


def _dtype_name(dtype: Any) -> str:
    # Told by its module: what reads a stored graph does so without numpy.
    if type(dtype).__module__.partition(".")[0] == "numpy":
        return _numpy_name(dtype)
    return getattr(dtype, "name", None) or str(dtype)


def is_complex(aval: Any) -> bool:
    return _dtype_name(getattr(aval, "dtype", None)).startswith("complex")
