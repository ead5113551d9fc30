"""Primitives that no table has: what a release of jax or a package may come with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir


def new_primitive(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a primitive of its own that computes what a function of arrays computes.

    It can be traced, lowered and differentiated, and its derivative is in terms of ordinary primitives.
    """
    primitive = Primitive(name)
    primitive.def_impl(jax.jit(function))

    @primitive.def_abstract_eval
    def _(*avals: Any) -> Any:
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        out = jax.eval_shape(function, *structs)
        return jax.core.ShapedArray(out.shape, out.dtype)

    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return primitive.bind(*primals), jax.jvp(function, tuple(primals), tangents)[1]

    ad.primitive_jvps[primitive] = derivative
    return primitive.bind
