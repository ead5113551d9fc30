"""What every value of a joint program was computed from, as far as decisions turn on it (`remat.trace.decisions`).

Followed through element-wise operators, selection and movement, and through what runs once; not through masks and
indices that only select, nor through a key to all that is drawn from it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from remat.core.graph import Graph, Op
from remat.core.primitives import TABLE, Trait, primitives_with
from remat.trace.program import Equation, Literal, Program

__all__ = ["Origin", "Origins", "common", "is_float", "without_selectors"]

_EXACT = primitives_with(Trait.EXACT)
_NEVER_NEGATIVE = primitives_with(Trait.NEVER_NEGATIVE)
_KEEP_SIGN = primitives_with(Trait.KEEPS_SIGN)
_DIFFERENCES = primitives_with(Trait.DIFFERENCE)
_PATCHES = primitives_with(Trait.PATCHES)
_TOTALS = primitives_with(Trait.TOTAL)
_SUMS_OF_AXES = frozenset({"reduce_prod", "reduce_sum"})
# Positions of the operands that say which elements are taken, from one to before another.
_SELECTORS = {
    "select_n": (0, 1),
    "gather": (1, 2),
    "dynamic_slice": (1, None),
    "dynamic_update_slice": (2, None),
    "scatter": (1, 2),
}
# Where one operand is zero but in one place, the result is the element of the other, or the sum that it is in.
_PICKING = frozenset({"convert_element_type", "mul"})
_PICKED_BY = frozenset({"dot_general", "reduce_sum"})
# Types that hold every number of a type: a conversion to them is the same bits whoever does it.
_WIDER = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
    "complex64": ("complex64", "complex128"),
    "complex128": ("complex128",),
}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a value was computed from. Sets of values are bit masks.

    Attributes:
        roots: the values it depends on, itself included, without a product of two of them summed up in between.
        bases: those without a sum over several elements in between.
        equal: those that two operands of a sum, difference or quotient on the way had in common.
        patched: those that several parts of an array that was put together have in common.
        exact: whether every run gives the same bits.
        picks: whether it is zero but where integers are equal, so that a sum over it may be one of its elements.
        negative: whether it can be below zero.
    """

    roots: int = 0
    bases: int = 0
    equal: int = 0
    patched: int = 0
    exact: bool = True
    picks: bool = False
    negative: bool = True


_ONE_INSTANCE = Origin()


class Origins:
    """Origins of a joint program's values, noted in its order."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program = program
        self.own: dict[int, int] = {}  # a value's own bit
        self._found: dict[int, Origin] = {}
        self._bits = itertools.count()
        # Of the values made of integers alone in one way, the first: by this way, and by each of these values.
        self._first: dict[object, int] = {}
        self._alike: dict[int, int] = {}
        for value in (*graph.inputs, *graph.constants):
            if is_float(getattr(program.avals[value], "dtype", None)):
                self._found[value] = self._with_itself(value, _ONE_INSTANCE)
            else:
                self._found[value] = _ONE_INSTANCE

    def __contains__(self, value: int) -> bool:
        return value in self._found

    def __getitem__(self, value: int) -> Origin:
        return self._found[value]

    def of(self, values: Iterable[int]) -> list[Origin]:
        """Origins of operands, each once; one that nothing was noted of is an instance of its own."""
        return [self._found.get(v, _ONE_INSTANCE) for v in dict.fromkeys(values)]

    def derive(self, op: Op, equation: Equation, *, once: bool) -> None:
        """Notes where results come from. Those of what is made `once` are one instance for all their readers, but
        they may have elements in common with operands that are made again: `x >= top_k(x)[k]`.
        """
        everything = self.of(op.inputs)
        exact_operands = all(origin.exact for origin in everything)
        picks = any(origin.picks for origin in everything)
        operands = self.of(sorted(without_selectors(equation)))
        is_sum = op.name in _TOTALS or sum(part.roots > 0 for part in operands) < 2
        roots = functools.reduce(operator.or_, (part.roots for part in operands), 0)
        equal = functools.reduce(operator.or_, (part.equal for part in operands), 0)
        if self._ends(op, equation) and not (picks and op.name in _PICKED_BY):
            # A sum of zeros is zero, and so is a product of them, but not one with something else.
            patched = functools.reduce(operator.or_, (part.patched for part in operands), 0)
            stays = is_sum or all(part.equal for part in operands)
            origin = Origin(
                roots=roots if is_sum else 0,
                equal=equal | patched if stays else 0,
                exact=exact_operands,
            )
        else:
            origin = Origin(
                roots=roots,
                bases=functools.reduce(operator.or_, (part.bases for part in operands), 0),
                equal=equal,
                patched=functools.reduce(operator.or_, (part.patched for part in operands), 0),
                exact=exact_operands,
            )
            shared = 0 if exact_operands else common(part.bases for part in operands)
            if op.name in _DIFFERENCES:
                origin = replace(origin, equal=origin.equal | shared)
            elif op.name in _PATCHES:
                origin = replace(origin, patched=origin.patched | shared)
        is_exact = self.is_exact(op, equation)
        picks = (picks and (is_exact or op.name in _PICKING)) or self._compares_integers(
            op, equation
        )
        negative = not self._is_not_negative(op, equation, operands)
        origin = replace(origin, picks=picks, negative=negative)
        if not origin.roots:
            self._note_alike(op, equation)
        for value in op.outputs:
            if not is_exact or once:
                self._found[value] = self._with_itself(value, replace(origin, exact=once))
            elif value in self.own:  # floats made of integers
                self._found[value] = replace(origin, roots=self.own[value], bases=self.own[value])
            else:
                self._found[value] = origin

    def _note_alike(self, op: Op, equation: Equation) -> None:
        """Notes what is made of integers alone: arrays drawn alike are relatives, others of one key are not."""
        if not equation.reads or any(map(is_float, self.dtypes(equation)[0])):
            return
        read = tuple(
            self._alike.get(a, a) if isinstance(a, int) else repr(a.value) for a in equation.inputs
        )
        for place, value in enumerate(op.outputs):
            key = (op.name, str(equation.source.params), read, place)
            first = self._alike[value] = self._first.setdefault(key, value)
            if is_float(self.program.avals[value].dtype):
                self.own[value] = self.own[first] if first in self.own else self._bit()

    def _is_not_negative(self, op: Op, equation: Equation, operands: Sequence[Origin]) -> bool:
        if op.name in _NEVER_NEGATIVE:
            return True
        if (
            op.name == "mul"
            and len(equation.inputs) == 2
            and equation.inputs[0] == equation.inputs[1]
        ):
            return True  # a square
        if op.name == "integer_pow":
            is_even = equation.source.params["y"] % 2 == 0
            return is_even or not any(operand.negative for operand in operands)
        if op.name not in _KEEP_SIGN:
            return False
        literals = [a.value for a in equation.inputs if isinstance(a, Literal)]
        return all(map(self._keeps_positive, equation.reads)) and all(
            np.all(np.asarray(value) >= 0) for value in literals
        )

    def _keeps_positive(self, value: int) -> bool:
        if not is_float(self.program.avals[value].dtype):
            return self.program.avals[value].dtype == jnp.bool_
        return not self._found[value].negative

    def _compares_integers(self, op: Op, equation: Equation) -> bool:
        return op.name == "eq" and not any(map(is_float, self.dtypes(equation)[0]))

    def _with_itself(self, value: int, origin: Origin) -> Origin:
        bit = self.own[value] = self._bit()
        return replace(origin, roots=origin.roots | bit, bases=origin.bases | bit)

    def _bit(self) -> int:
        return 1 << next(self._bits)

    def _ends(self, op: Op, equation: Equation) -> bool:
        """Whether the result's elements are sums or products of several elements."""
        if op.name in _EXACT or op.name.startswith("scatter") or op.name not in TABLE:
            return False
        if op.name == "dot_general":
            (contracted, _), _ = equation.source.params["dimension_numbers"]
            return any(equation.source.invars[0].aval.shape[axis] > 1 for axis in contracted)
        if op.name in _SUMS_OF_AXES:
            shape = equation.source.invars[0].aval.shape
            return any(shape[axis] > 1 for axis in equation.source.params["axes"])
        return op.kind in ("HEAVY", "REDUCTION") or op.name.startswith("reduce_window")

    def is_exact(self, op: Op, equation: Equation) -> bool:
        """Whether an operator gives the same bits from the same operands in whatever kernel."""
        reads, makes = self.dtypes(equation)
        if not any(map(is_float, (*reads, *makes))):
            return True
        if op.name == "convert_element_type":
            # From an integer: rounded to nearest, whoever does it. To fewer bits: XLA may leave it out.
            narrows = any(map(is_float, reads)) and is_float(makes[0])
            return not narrows or str(makes[0]) in _WIDER.get(str(reads[0]), ())
        if op.name == "scatter":
            # Of several updates of one element any may win.
            return bool(equation.source.params.get("unique_indices"))
        return op.name in _EXACT

    def dtypes(self, equation: Equation) -> tuple[list[Any], list[Any]]:
        """Dtypes of the operands that are values, and of the results."""
        avals = self.program.avals
        return (
            [getattr(avals[v], "dtype", None) for v in equation.reads],
            [getattr(avals[v], "dtype", None) for v in equation.outputs],
        )


def is_float(dtype: Any) -> bool:
    """Whether values of a dtype are rounded: real or complex floats."""
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def common(sets: Iterable[int]) -> int:
    """What any two of some sets have in common."""
    seen = common = 0
    for members in sets:
        common |= seen & members
        seen |= members
    return common


def without_selectors(equation: Equation) -> set[int]:
    """The operands that results are computed from, without those that only say which elements are taken."""
    name = equation.source.primitive.name
    first, end = _SELECTORS.get(name.split("-")[0], (0, 0))  # scatter-add
    positions = range(len(equation.inputs))[first:end]
    return {
        atom
        for position, atom in enumerate(equation.inputs)
        if isinstance(atom, int) and position not in positions
    }
