"""Kept forms carried out with JAX. Lives in `remat.lower.encode`."""

from remat.lower.encode import EncodingError, decode, encode, measure_error

__all__ = ["EncodingError", "decode", "encode", "measure_error"]
