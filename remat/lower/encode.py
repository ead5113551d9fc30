"""Encodings: the jax side of `remat.core.forms`, element-wise enough for XLA to fuse with what is around it.

`encode` and `decode` are functions of arrays with static shapes; they work under `jit`, `vmap`, `shard_map`
and `scan`. Compiled for an H200, packing bits or codes is part of the kernel that makes the values, and
unpacking part of the one that reads them, if the packed axis is the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.errors import PolicyError
from remat.core.forms import ROW, Encoding, get_encoding

__all__ = ["EncodingError", "decode", "encode", "measure_error", "pack_bits", "unpack_bits"]


def encode(form: str, array: jax.Array, *, offset: int = 0) -> Any:
    """Returns the arrays that keep `array` in a form.

    Args:
        form: name of a form, see `remat.core.forms.get_encoding`.
        array: any shape; `bool` for `bits`, an integer dtype of 8 bits or more for `uint1` to `uint32`, float
            for the rest.
        offset: for `uint1` to `uint32`, the lower end of the values' range; unused otherwise. A value outside
            of `offset` to `offset + 2**bits - 1` comes back wrong and may spoil those in its byte: the range has
            to be proven.

    Returns:
        One array, or for `sparse:<share>` the pair (values `dtype[rows, capacity]`, columns
        `uint8[rows, capacity]`); their bytes are `remat.core.forms.stored_bytes`.

    Raises:
        PolicyError: there is no such form, or it is not for arrays of this dtype.
    """
    encoding = get_encoding(form)
    _check_dtype(encoding, array.dtype)
    if encoding.kind == "bits":
        return pack_bits(array)
    if encoding.kind == "codes":
        return _encode_codes(array, encoding.element_bits, offset)
    if encoding.kind == "float":
        return _encode_float(array, jnp.dtype(encoding.dtype))
    if encoding.kind == "sparse":
        return _encode_sparse(array, encoding.row_capacity)
    return array


def decode(form: str, stored: Any, shape: tuple[int, ...], dtype: Any, *, offset: int = 0) -> Any:
    """Inverse of `encode` for a lossless form, the nearest thing to it for a lossy one.

    Args:
        form: name of the form.
        stored: what `encode` returned.
        shape: shape of the array that was encoded.
        dtype: its dtype.
        offset: the offset it was encoded with.

    Returns:
        `dtype[shape]`.

    Raises:
        PolicyError: there is no such form, or it is not for arrays of this dtype.
    """
    encoding = get_encoding(form)
    if encoding.kind == "raw":
        return stored
    _check_dtype(encoding, jnp.dtype(dtype))
    if encoding.kind == "bits":
        return unpack_bits(stored, shape)
    if encoding.kind == "codes":
        return _decode_codes(stored, encoding.element_bits, shape, jnp.dtype(dtype), offset)
    if encoding.kind == "float":
        return stored.astype(dtype)
    return _decode_sparse(stored, shape)


def _check_dtype(encoding: Encoding, dtype: Any) -> None:
    """Raises PolicyError for a dtype that the form would change silently."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    fits, expected = {
        "raw": (True, "any dtype"),
        "bits": (dtype == jnp.bool_, "bool"),
        "codes": (
            is_integer and jnp.iinfo(dtype).bits >= max(8, encoding.element_bits),
            f"an integer dtype of at least {max(8, encoding.element_bits)} bits",
        ),
        "float": (
            is_float and jnp.finfo(dtype).bits > encoding.element_bits,
            f"a float dtype of more than {encoding.element_bits} bits",
        ),
        "sparse": (is_float, "a float dtype"),
    }[encoding.kind]
    if not fits:
        raise PolicyError(
            f"the form {encoding.name!r} is for {expected}, not for {dtype}; remat.forms.applicable says "
            "which forms a value has, and 'raw' keeps any"
        )


# --- bits and codes ----------------------------------------------------------------------------------


def pack_bits(mask: jax.Array) -> jax.Array:
    """Packs booleans eight to a byte.

    Args:
        mask: `bool[...]` of any shape.

    Returns:
        `uint8`, one axis shortened eightfold; or `uint8[ceil(n / 8)]` if eight divides no axis.
    """
    return _pack(mask.astype(jnp.uint8), 1)


def unpack_bits(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `pack_bits`.

    Args:
        packed: what `pack_bits` returned.
        shape: shape of the mask that was packed.

    Returns:
        `bool[shape]`.
    """
    return _unpack(packed, 1, shape) != 0


def _packed_axis(codes: jax.Array, per_byte: int) -> int | None:
    """The last axis that `per_byte` divides, so that packing keeps the array's layout and sharding.

    One of which `per_byte` divides every shard comes before others.
    """
    axes = [axis for axis, dim in enumerate(codes.shape) if dim and dim % per_byte == 0]
    aval = jax.typeof(codes)
    whole = [a for a in axes if aval.shape[a] // per_byte % compat.num_shards(aval, a) == 0]
    return (whole or axes or [None])[-1]


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs `uint8` codes below `2**bits` into bytes, the first one lowest."""
    per_byte = 8 // bits
    axis = _packed_axis(codes, per_byte)
    if axis is None:
        size = math.prod(codes.shape)
        codes = jnp.pad(compat.reshape(codes, (size,), (None,)), (0, -size % per_byte))
        axis = 0
    shape, places = codes.shape, range(codes.ndim)
    grouped = compat.reshape(
        codes,
        (*shape[:axis], shape[axis] // per_byte, per_byte, *shape[axis + 1 :]),
        (*places[: axis + 1], None, *places[axis + 1 :]),
    )
    # Not a product with 1, 2, 4, ...: XLA makes an array of these, which all masks of a program read, and merges
    # the kernels that read it into one, whose operands then all stay alive until the last of them is there.
    placed = jnp.left_shift(grouped, _shifts(grouped.ndim, axis + 1, bits))
    return jnp.sum(placed, axis=axis + 1, dtype=jnp.uint8)


def _unpack(packed: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `_pack`."""
    per_byte = 8 // bits
    for axis, dim in enumerate(shape):
        shorter = (*shape[:axis], dim // per_byte, *shape[axis + 1 :])
        if dim and dim % per_byte == 0 and packed.shape == shorter:
            return _spread(packed, bits, axis, shape)
    codes = _spread(packed, bits, 0, (per_byte * packed.shape[0],))
    return codes[: math.prod(shape)].reshape(shape)


def _spread(packed: jax.Array, bits: int, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Makes of every byte its codes, along an axis."""
    spread = jnp.expand_dims(packed, axis + 1)
    shifts = _shifts(spread.ndim, axis + 1, bits)
    codes = jnp.right_shift(spread, shifts) & jnp.uint8(2**bits - 1)
    return compat.reshape(codes, shape, [a + (a > axis) for a in range(len(shape))])


def _shifts(ndim: int, axis: int, bits: int) -> jax.Array:
    """How far each code of a byte is shifted: `uint8[1, .., 8 / bits, .., 1]`."""
    shape = tuple(8 // bits if i == axis else 1 for i in range(ndim))
    return jax.lax.broadcasted_iota(jnp.uint8, shape, axis) * jnp.uint8(bits)


def _encode_codes(array: jax.Array, bits: int, offset: int) -> jax.Array:
    # Modulo 2**n, n the dtype's bits, the difference is right even where it overflows the dtype.
    raw, start = _as_unsigned(array, offset)
    codes = raw - start
    return _pack(codes.astype(jnp.uint8), bits) if bits < 8 else codes.astype(f"uint{bits}")


def _decode_codes(
    stored: jax.Array, bits: int, shape: tuple[int, ...], dtype: np.dtype, offset: int
) -> jax.Array:
    codes = stored
    if bits < 8:
        codes = _unpack(stored, bits, shape)
        codes = (codes != 0) if bits == 1 else codes
    unsigned = _unsigned(dtype)
    values = codes.astype(unsigned) + _modulo(offset, unsigned)
    return jax.lax.bitcast_convert_type(values, dtype)


def _as_unsigned(array: jax.Array, offset: int) -> tuple[jax.Array, Any]:
    unsigned = _unsigned(jnp.dtype(array.dtype))
    return jax.lax.bitcast_convert_type(array, unsigned), _modulo(offset, unsigned)


def _unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"uint{jnp.iinfo(dtype).bits}")


def _modulo(offset: int, unsigned: np.dtype) -> Any:
    return unsigned.type(offset % 2 ** jnp.iinfo(unsigned).bits)


# --- lossy -------------------------------------------------------------------------------------------


def _encode_float(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to a narrower float; finite values saturate, infinities and NaN are left to the dtype."""
    largest = jnp.asarray(_largest(dtype, jnp.dtype(array.dtype)), array.dtype)
    clipped = jnp.where(jnp.isfinite(array), jnp.clip(array, -largest, largest), array)
    # XLA drops a conversion that is undone by the next one (xla_allow_excess_precision), and would then keep
    # the array as it was. The barrier makes it keep the narrow one; it stands where a kernel ends anyway.
    return jax.lax.optimization_barrier(clipped.astype(dtype))


def _largest(dtype: np.dtype, source: np.dtype) -> float:
    return float(min(jnp.finfo(dtype).max, jnp.finfo(source).max, key=float))


def _encode_sparse(array: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Keeps the first `capacity` nonzero values of every row of 256, and their columns.

    Sorting (is it zero, column) as one integer puts the nonzero columns first, in order. A row with fewer
    fills its places with columns of zeros, so all columns of a row differ and decoding needs no sum.
    """
    size = math.prod(array.shape)
    flat = compat.reshape(array, (size,), (None,))
    rows = jnp.pad(flat, (0, -size % ROW)).reshape(-1, ROW)
    columns = jax.lax.broadcasted_iota(jnp.uint16, rows.shape, 1)
    keys = columns + jnp.uint16(ROW) * (rows == 0).astype(jnp.uint16)
    first = jnp.sort(keys, axis=1)[:, :capacity] & jnp.uint16(ROW - 1)
    values = jnp.take_along_axis(rows, first.astype(jnp.int32), axis=1, mode="promise_in_bounds")
    return values, first.astype(jnp.uint8)


def _decode_sparse(stored: tuple[jax.Array, jax.Array], shape: tuple[int, ...]) -> jax.Array:
    values, columns = stored
    number = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    rows = jnp.zeros((columns.shape[0], ROW), values.dtype)
    rows = rows.at[number, columns.astype(jnp.int32)].set(
        values, unique_indices=True, mode="promise_in_bounds"
    )
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


# --- error -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodingError:
    """What keeping one array in a form changed.

    Attributes:
        form: name of the form.
        elements: how many elements the array has.
        changed: how many came back different (a NaN that comes back as a NaN is no difference).
        max_abs_error: largest |decoded - original|; infinite if a number became a NaN or an infinity, or the
            other way round.
        max_relative_error: largest |decoded - original| / |original|; infinite where a zero changed.
    """

    form: str
    elements: int
    changed: int
    max_abs_error: float
    max_relative_error: float

    @property
    def changed_share(self) -> float:
        """Changed elements per element; 0.0 for an empty array."""
        return self.changed / max(self.elements, 1)

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.form}: exact ({self.elements} elements)"
        return (
            f"{self.form}: {self.changed} of {self.elements} elements changed ({self.changed_share:.2%}), "
            f"by at most {self.max_abs_error:.3g}, relatively {self.max_relative_error:.3g}"
        )


def measure_error(form: str, array: Any, *, offset: int = 0) -> EncodingError:
    """Encodes and decodes a concrete array and compares, on the host in double precision.

    Args:
        form: name of the form.
        array: `dtype[...]`, not traced.
        offset: as for `encode`.

    Raises:
        PolicyError: there is no such form, or it is not for arrays of this dtype.
    """
    array = jnp.asarray(array)

    def round_trip(x: jax.Array) -> jax.Array:
        return decode(form, encode(form, x, offset=offset), x.shape, x.dtype, offset=offset)

    before, after = np.asarray(array), np.asarray(jax.jit(round_trip)(array))
    changed = (before != after) & ((before == before) | (after == after))
    wide = np.complex128 if np.iscomplexobj(before) else np.float64
    old, new = before[changed].astype(wide), after[changed].astype(wide)
    with np.errstate(all="ignore"):
        errors = np.nan_to_num(np.abs(new - old), nan=np.inf, posinf=np.inf)
        relative = np.where(np.isfinite(errors) & (old != 0), errors / np.abs(old), np.inf)
    return EncodingError(
        form=form,
        elements=before.size,
        changed=int(changed.sum()),
        max_abs_error=float(errors.max(initial=0.0)),
        max_relative_error=float(relative.max(initial=0.0)),
    )
