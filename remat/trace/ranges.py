"""Proven ranges of integers and booleans: interval analysis of a flat program, one pass, linear time.

What an operator does to ranges is in `remat.trace.intervals`. An operand that nothing is known about has the range
of its dtype, so `x & 3` is bounded whatever `x` is. There are no relations between values: `x % 4` as jax spells
it, a remainder to which 4 is added where it is negative, is bounded by [0, 3] if `x` is proven not to be negative,
by [-3, 7] otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.primitives import Trait, primitives_with
from remat.trace.intervals import Interval, Site, dtype_range, transfer
from remat.trace.program import Program

__all__ = ["integer_ranges"]

_CONSTANT_ELEMENTS = 2**16  # larger constants are not read
_NAMED_BODIES = primitives_with(Trait.NAMED_BODY)


def integer_ranges(program: Program) -> dict[int, Interval]:
    """Returns proven bounds of a program's integer and boolean values.

    Args:
        program: a flat program; its inputs may be anything that their dtypes allow.

    Returns:
        Inclusive bounds by value id. An integer without an entry may be anything that its dtype allows; booleans
        that an equation computes always have one. Bounds of an empty array say nothing.

    Complexity: linear in the program's operands, plus the elements of constants of at most 65536 elements.
    """
    found: dict[int, Interval] = {}
    for value, array in program.constants.items():
        interval = _of_constant(array)
        if interval is not None:
            found[value] = interval
    for equation in program.equations:
        avals = [program.avals[value] for value in equation.outputs]
        if not any(dtype_range(aval) for aval in avals):
            continue
        name = equation.source.primitive.name
        if name not in _NAMED_BODIES and compat.sub_jaxprs(equation.source):
            continue  # what a body does is not in the name
        site = Site(
            params=equation.source.params,
            operands=tuple(
                program.avals[atom] if isinstance(atom, int) else jax.typeof(atom.value)
                for atom in equation.inputs
            ),
            results=tuple(avals),
            ranges=tuple(
                found.get(atom) or dtype_range(program.avals[atom])
                if isinstance(atom, int)
                else _of_constant(atom.value)
                for atom in equation.inputs
            ),
        )
        intervals = transfer(name, site)
        for value, aval, interval in zip(equation.outputs, avals, intervals, strict=True):
            proven = _recorded(aval, interval)
            if proven is not None:
                found[value] = proven
    return found


def _recorded(aval: Any, interval: Interval | None) -> Interval | None:
    """What is worth writing down: within the dtype, and for integers narrower than it."""
    limits = dtype_range(aval)
    if limits is None:
        return None
    fits = interval is not None and limits[0] <= interval[0] <= interval[1] <= limits[1]
    if aval.dtype == jnp.bool_:
        return interval if fits else limits
    return interval if fits and interval != limits else None


def _of_constant(array: Any) -> Interval | None:
    if compat.is_tracer(array) or not getattr(array, "is_fully_addressable", True):
        return dtype_range(jax.typeof(array))
    limits = dtype_range(jax.typeof(array))
    if limits is None or not 0 < math.prod(jnp.shape(array)) <= _CONSTANT_ELEMENTS:
        return limits
    elements = np.asarray(array)
    return int(elements.min()), int(elements.max())
