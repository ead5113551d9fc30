"""Dimensions that are not known (`jax.export.symbolic_shape`), with a number in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.export
from jax._src import core as _core

from remat.compat.equations import is_literal
from remat.compat.types import is_symbolic

__all__ = ["equation_with_sizes", "with_sizes"]

JaxprEqn = Any


def with_sizes(param: Any, size: int) -> Any:
    """Returns a dimension, an abstract value or a parameter with `size` for every unknown dimension in it."""
    if jax.export.is_symbolic_dim(param):
        sizes: Any = {name: size for name in param._get_vars()}
        return int(param._evaluate(sizes))
    if isinstance(param, _core.ShapedArray):
        return param.update(shape=with_sizes(param.shape, size)) if is_symbolic(param) else param
    inner = getattr(param, "jaxpr", param)
    if inner is not param and hasattr(param, "replace"):
        return param.replace(jaxpr=with_sizes(inner, size))
    if inner is param and hasattr(param, "eqns"):
        return param.replace(eqns=[equation_with_sizes(eqn, size) for eqn in param.eqns])
    if type(param) in (tuple, list):
        return type(param)(with_sizes(item, size) for item in param)
    return param


def equation_with_sizes(eqn: JaxprEqn, size: int) -> JaxprEqn:
    """Returns an equation, to be looked at and not to be run, with `size` for every unknown dimension."""

    def sized(atom: Any) -> Any:
        known = is_literal(atom) or not is_symbolic(atom.aval)
        return atom if known else SimpleNamespace(aval=with_sizes(atom.aval, size))

    if not any(is_symbolic(getattr(var, "aval", None)) for var in (*eqn.invars, *eqn.outvars)):
        return eqn
    return eqn.replace(
        invars=list(map(sized, eqn.invars)),
        outvars=list(map(sized, eqn.outvars)),
        params={name: with_sizes(param, size) for name, param in eqn.params.items()},
    )
