"""The forms in which a value can be kept, with their exact bytes. No jax.

A form is a name: `raw`; `bits` (booleans, one bit each); `uint1` to `uint32` (integers whose range is
proven, stored as codes above the lower end of the range); and, lossy and therefore never chosen unasked,
`float16`, `bfloat16`, `float8_e4m3`, `float8_e5m2` and `sparse:<share>`. `remat.lower.encode` carries them out.

The lossy forms are those of Gist (Jain et al., ISCA 2018, as described in MONeT, Shah et al., ICLR 2021,
appendix E): *delayed precision reduction* keeps in a narrower float what is computed in the wider one;
*sparse storage, dense compute* keeps the nonzero values of rows of 256 with column numbers of one byte.
Departures: XLA's shapes are static, so a row has room for a share of its 256 values that is fixed beforehand
(what is beyond it is lost, as is the sign of zeros), and there are no row pointers; floats of 8 bits are those
of today's hardware.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from remat.core.errors import PolicyError, nearest
from remat.core.graph import Value

__all__ = [
    "ENCODINGS",
    "ROW",
    "Encoding",
    "Kind",
    "applicable",
    "code_bits",
    "form_of",
    "get_encoding",
    "is_lossless",
    "stored_bytes",
    "why_not",
]

Kind = Literal["raw", "bits", "codes", "float", "sparse"]

ROW = 256
"""Elements per row of the sparse form, so that a column number fits in a byte (Gist)."""

_CODE_BITS = (1, 2, 4, 8, 16, 32)
_INTEGER_BITS: Mapping[str, int] = MappingProxyType(
    {f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_FLOAT_BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
)
_SPARSE = "sparse:<share>"


@dataclass(frozen=True, slots=True)
class Encoding:
    """A way to keep an array.

    Attributes:
        name: the form's name, as in plans and options.
        kind: which of the five ways it is: `raw`, `bits`, `codes`, `float`, `sparse`.
        description: one line for reports and errors.
        lossless: decoding gives back every element, bit by bit.
        element_bits: bits per element (`bits`, `codes`, `float`); 0 where it depends on the value.
        dtype: what `float` stores, a name of `jax.numpy`; empty for the other kinds.
        row_capacity: values that `sparse` keeps of a row of `ROW`; 0 for the other kinds.
    """

    name: str
    kind: Kind
    description: str
    lossless: bool
    element_bits: int = 0
    dtype: str = ""
    row_capacity: int = 0

    def stored_bytes(self, value: Value) -> int:
        """Returns the exact bytes of the arrays that `remat.lower.encode.encode` makes of `value`."""
        elements = math.prod(value.shape)
        if self.kind == "raw":
            return value.nbytes
        if self.kind == "sparse":
            per_row = self.row_capacity * (_FLOAT_BYTES[value.dtype] + 1)
            return -(-elements // ROW) * per_row
        return -(-elements * self.element_bits // 8)

    def why_not(self, value: Value) -> str:
        """Returns why `value` cannot be kept in this form, an empty string if it can."""
        if self.kind == "raw":
            return ""
        if self.kind == "bits":
            return "" if value.dtype == "bool" else f"it has dtype {value.dtype}, not bool"
        reason = self._why_not_codes(value) if self.kind == "codes" else self._why_not_float(value)
        if not reason and self.stored_bytes(value) >= value.nbytes:
            return (
                f"it would take {self.stored_bytes(value)} bytes, no fewer than its {value.nbytes}"
            )
        return reason

    def _why_not_codes(self, value: Value) -> str:
        if value.dtype not in _INTEGER_BITS:
            return f"it has dtype {value.dtype}, not one of {', '.join(_INTEGER_BITS)}"
        bounds = value.range
        if bounds is None:
            return "no range is proven for it"
        needed = code_bits(bounds)
        if needed is None or needed > self.element_bits:
            return f"its range {list(bounds)} does not fit in {self.element_bits} bits"
        return ""

    def _why_not_float(self, value: Value) -> str:
        if value.dtype not in _FLOAT_BYTES:
            return f"it has dtype {value.dtype}, not one of {', '.join(_FLOAT_BYTES)}"
        if self.kind == "float" and self.element_bits >= 8 * _FLOAT_BYTES[value.dtype]:
            return f"{value.dtype} is no wider than {self.name}"
        return ""


def _codes(bits: int) -> Encoding:
    packed = f", {8 // bits} to a byte" if bits < 8 else ""
    return Encoding(
        name=f"uint{bits}",
        kind="codes",
        description=f"integers of a proven range, as codes of {bits} bit{'s' * (bits > 1)}{packed}",
        lossless=True,
        element_bits=bits,
    )


def _float(name: str, bits: int, dtype: str, accuracy: str) -> Encoding:
    return Encoding(
        name=name,
        kind="float",
        description=f"lossy: stored as {name} ({accuracy}); finite values beyond its range become the "
        "largest finite one",
        lossless=False,
        element_bits=bits,
        dtype=dtype,
    )


def _sparse(name: str, share: Fraction) -> Encoding:
    capacity = math.ceil(share * ROW)
    return Encoding(
        name=name,
        kind="sparse",
        description=f"lossy: the first {capacity} nonzero values of every {ROW}, with column numbers of one "
        f"byte; exact where no row has more than {capacity}, the others lose what is beyond",
        lossless=False,
        row_capacity=capacity,
    )


ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {
        encoding.name: encoding
        for encoding in (
            Encoding("raw", "raw", "as it was computed", True),
            Encoding("bits", "bits", "booleans, eight to a byte", True, element_bits=1),
            *map(_codes, _CODE_BITS),
            _float("float16", 16, "float16", "11 significant bits, at most 65504"),
            _float("bfloat16", 16, "bfloat16", "8 significant bits, float32's range"),
            _float(
                "float8_e4m3", 8, "float8_e4m3fn", "4 significant bits, at most 448, no infinity"
            ),
            _float("float8_e5m2", 8, "float8_e5m2", "3 significant bits, at most 57344"),
        )
    }
)
"""Every form but `sparse:<share>`, which `get_encoding` makes for any share."""


def get_encoding(name: str) -> Encoding:
    """Returns the encoding called `name`.

    Args:
        name: a key of `ENCODINGS`, or `sparse:<share>` with a share above 0 and at most 1, as in `sparse:0.25`.

    Raises:
        PolicyError: there is no such form.
    """
    if name in ENCODINGS:
        return ENCODINGS[name]
    kind, _, text = name.partition(":")
    if kind == "sparse":
        share = Fraction(text) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII) else None
        if share is not None and 0 < share <= 1:
            return _sparse(name, share)
        raise PolicyError(
            f"the form {name!r} has no valid share: expected sparse:<share> with 0 < share <= 1, the share "
            f"of every {ROW} values that there is room for, for instance 'sparse:0.25'"
        )
    choices = (*ENCODINGS, _SPARSE)
    raise PolicyError(
        f"there is no form {name!r} to keep a value in{nearest(name, choices)}; expected one of "
        f"{', '.join(choices)}"
    )


def code_bits(bounds: tuple[int, int]) -> int | None:
    """Returns the fewest bits (1, 2, 4, 8, 16, 32) of codes for integers within `bounds`, both inclusive.

    None if 32 do not suffice.
    """
    low, high = bounds
    return next((bits for bits in _CODE_BITS if high - low < 2**bits), None)


def form_of(value: Value) -> str:
    """Returns the form a value is kept in: its own, or the smallest lossless one.

    That is `bits` for booleans, and codes for integers of a proven range where they save bytes.
    """
    if value.form is not None:
        return value.form
    if value.dtype == "bool":
        return "bits"
    bounds = value.range
    bits = code_bits(bounds) if bounds is not None and value.dtype in _INTEGER_BITS else None
    name = f"uint{bits}"
    return name if bits is not None and applicable(name, value) else "raw"


def stored_bytes(value: Value, form: str | None = None) -> int:
    """Returns the exact bytes a value takes when it is kept.

    Args:
        value: the value, inside a loop body of one iteration.
        form: name of the form; None for `form_of(value)`.

    Raises:
        PolicyError: there is no such form, or the value cannot be kept in it.
    """
    encoding = get_encoding(form_of(value) if form is None else form)
    return _checked(encoding, value).stored_bytes(value)


def is_lossless(form: str) -> bool:
    """Whether decoding gives back every element bit by bit; see `get_encoding` for what it raises."""
    return get_encoding(form).lossless


def why_not(form: str, value: Value) -> str:
    """Returns why `value` cannot be kept in `form`, an empty string if it can."""
    return get_encoding(form).why_not(value)


def applicable(form: str, value: Value) -> bool:
    """Whether `value` can be kept in `form`: it has the right dtype and, but for `bits`, gets smaller."""
    return not why_not(form, value)


def _checked(encoding: Encoding, value: Value) -> Encoding:
    reason = encoding.why_not(value)
    if reason:
        raise PolicyError(
            f"value {value.id} ({value.label}) cannot be kept as {encoding.name!r}: {reason}. Keep it as "
            f"{form_of(replace(value, form=None))!r}, its smallest lossless form, or choose another value."
        )
    return encoding
