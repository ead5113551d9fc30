"""Shapes with dimensions that are not known yet (`jax.export` with a symbolic batch): planned for stand-in sizes.

Which values to keep is decided on a copy of the joint program in which every unknown dimension has `STAND_IN`
elements; the program that runs keeps its symbols. What holds for one size only is not used: values are kept as they
are, not in codes, no rule rewrites the program, and there is no budget to hold.
"""

from __future__ import annotations

from dataclasses import replace

from remat import compat
from remat.trace.program import Program

__all__ = ["STAND_IN", "has_symbols", "with_stand_ins"]

STAND_IN = 128
"""Elements that an unknown dimension counts as. It hardly matters of a batch: nearly all values grow with it."""


def has_symbols(program: Program) -> bool:
    """Whether the shape of a value of a program has a dimension that is not known."""
    return any(map(compat.is_symbolic, program.avals))


def with_stand_ins(program: Program) -> Program:
    """Returns a program, to be looked at and not to be run, with numbers in the place of unknown dimensions."""
    return replace(
        program,
        avals=tuple(compat.with_sizes(aval, STAND_IN) for aval in program.avals),
        equations=tuple(
            replace(equation, source=compat.equation_with_sizes(equation.source, STAND_IN))
            for equation in program.equations
        ),
    )
