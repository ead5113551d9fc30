"""What is zero in a backward pass because some results have no cotangent: metrics, unused outputs of a block.

jax hands the derivative rule of a function a symbolic zero for each of them, and in a backward pass of its own
computes nothing from one. So must a planned backward pass: zeros times a derivative that is infinite are NaN, where
plain jax has a gradient, and what makes only zeros is not worth its time and memory. A backward pass is linear in
its cotangents, so zeros are followed through linear operators; whatever else reads one reads an array of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from remat import compat
from remat.trace.program import Atom, Equation, Literal, Program, program_of

__all__ = ["Zeros"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Result i is linear in operand i.
_EACH = _names(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all conj convert_element_type copy copy_p
    cumsum device_put expand_dims fft imag layout_constraint mesh_cast name neg optimization_barrier
    pbroadcast pcast ppermute preduced psum psum_invariant pvary real reduce_precision reduce_scatter
    reduced_vary_cast reduced_vary_cast_p reduce_sum reduce_window_sum reshape reshard rev row_major
    sharding_constraint squeeze transpose unreduced_psum unreduced_reduce_scatter vary_unreduced_cast
    vary_unreduced_cast_p with_memory_space_constraint
    """
)
# Linear in each of these operands.
_PRODUCTS = {"mul": 2, "dot_general": 2, "conv_general_dilated": 2, "ragged_dot_general": 2}
# Linear in these operands together; in all of them, if there are none.
_TOGETHER: dict[str, tuple[int, ...]] = {
    "add": (),
    "add_any": (),
    "broadcast_in_dim": (0,),
    "complex": (),
    "concatenate": (),
    "div": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "gather": (0,),
    "pad": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "scatter-mul": (0,),
    "scatter-sub": (0, 2),
    "select_and_gather_add": (0,),
    "select_and_scatter_add": (0,),
    "slice": (0,),
    "split": (0,),
    "stack": (),
    "sub": (),
    "tile": (0,),
    "triangular_solve": (1,),
    "tridiagonal_solve": (3,),
    "unstack": (0,),
}
_SUMS = frozenset({"add", "add_any"})
# Zeros written into a program stay what they are through these.
_MOVES = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "transpose"})


@dataclass(frozen=True)
class _Loop:
    """Which operands of a loop are not zero in every iteration, and which results."""

    given: tuple[bool, ...]
    wanted: tuple[bool, ...]


class Zeros:
    """The values of a program that are zero because some of its inputs are.

    Args:
        program: linear in these inputs, the others given.
        inputs: value ids.

    Attributes:
        values: ids of the values that are zero, the inputs among them.
    """

    def __init__(self, program: Program, inputs: Iterable[int]) -> None:
        self.program = program
        self.values: set[int] = set(inputs)
        self._written: set[int] = set()  # arrays of zeros that are there in any case
        self._loops: dict[int, _Loop] = {}  # by their first result
        if self.values:
            self._written.update(v for v, c in program.constants.items() if _is_zero(c))
            for equation in program.equations:
                self._follow(equation)

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, int) and atom in self.values

    def read(self, atom: Atom, env: Mapping[int, Any]) -> Any:
        """Returns the array that an atom stands for; one of zeros is made."""
        if isinstance(atom, Literal):
            return atom.value
        return _zeros_like(self.program.avals[atom]) if atom in self.values else env[atom]

    def results(self, equation: Equation, env: Mapping[int, Any]) -> dict[int, Any]:
        """Runs an equation for the results that are not zero; `env` has all other values that it reads."""
        made = [v for v in equation.outputs if v not in self.values]
        if equation.outputs and not made:
            return {}

        def read(atom: Atom) -> Any:
            return self.read(atom, env)

        eqn = equation.source
        given = tuple(atom not in self for atom in equation.inputs)
        if not all(given):
            if compat.name_of(eqn) in _SUMS:
                (summand,) = (atom for atom in equation.inputs if atom not in self)
                return {made[0]: read(summand)}
            bodies = compat.part_bodies(eqn)
            if bodies:
                wanted = tuple(v not in self.values for v in equation.outputs)
                if equation.outputs[0] in self._loops:
                    loop = self._loops[equation.outputs[0]]
                    given, wanted = loop.given, loop.wanted
                operands = [read(a) for a, flag in zip(equation.inputs, given, strict=True) if flag]
                inner = given[1:] if compat.name_of(eqn) == "cond" else given
                parts = [_part(program_of(body), inner, wanted) for body in bodies]
                results = compat.run_part(eqn, parts, operands, given, wanted, equation.site)
                kept = (v for v, flag in zip(equation.outputs, wanted, strict=True) if flag)
                return {v: x for v, x in zip(kept, results, strict=True) if v in made}
        results = compat.evaluate_equation(eqn, list(map(read, equation.inputs)), equation.site)
        pairs = zip(equation.outputs, results, strict=True)
        return {v: x for v, x in pairs if v not in self.values}

    def _follow(self, equation: Equation) -> None:
        eqn = equation.source
        known = [self._is_written(atom) for atom in equation.inputs]
        if compat.name_of(eqn) in _MOVES and known[0]:
            self._written.update(equation.outputs)
        flags = [atom in self for atom in equation.inputs]
        if not any(flags) or not equation.outputs:
            return
        if (parts := compat.scan_parts(eqn)) is not None:
            loop = self._loops[equation.outputs[0]] = _through_loop(parts, flags, known)
            zero = tuple(not flag for flag in loop.wanted)
        else:
            zero = _through(eqn, flags, known)
        self.values.update(v for v, flag in zip(equation.outputs, zero, strict=True) if flag)

    def _is_written(self, atom: Atom) -> bool:
        return atom in self._written if isinstance(atom, int) else _is_zero(atom.value)


def _zeros_like(aval: Any) -> Any:
    """Returns an array of zeros of an abstract value, placed as that."""
    return compat.reshard_like(compat.zeros_of(aval), aval)


def _is_zero(constant: Any) -> bool:
    """Whether a constant is zero; arrays of jax, which may be on another device, are not looked at."""
    return not isinstance(constant, jax.Array) and not np.any(np.asarray(constant))


def _through(eqn: Any, flags: Sequence[bool], known: Sequence[bool]) -> tuple[bool, ...]:
    """Which results of an equation are zero, if these operands are; `known` are zeros besides."""
    name, count = compat.name_of(eqn), len(eqn.outvars)
    if name in _EACH and len(flags) == count:
        return tuple(flags)
    if name in _PRODUCTS:
        return (any(flags[: _PRODUCTS[name]]),) * count
    if name in _TOGETHER:
        where = _TOGETHER[name] or range(len(flags))
        return _all_of(where, flags, known) * count
    if name == "select_n":
        return _all_of(range(1, len(flags)), flags, known)
    if name == "custom_linear_solve":
        return _all_of(range(sum(eqn.params["const_lengths"]), len(flags)), flags, known) * count
    if bodies := compat.part_bodies(eqn):
        inner = flags[1:] if name == "cond" else flags
        found = [_zero_results(program_of(body), inner) for body in bodies]
        return tuple(map(all, zip(*found, strict=True)))
    return (False,) * count


def _all_of(where: Iterable[int], flags: Sequence[bool], known: Sequence[bool]) -> tuple[bool, ...]:
    places = list(where)
    return (any(flags[i] for i in places) and all(flags[i] or known[i] for i in places),)


def _zero_results(program: Program, flags: Sequence[bool]) -> tuple[bool, ...]:
    zeros = Zeros(program, (v for v, flag in zip(program.inputs, flags, strict=True) if flag))
    return tuple(atom in zeros for atom in program.outputs)


def _through_loop(parts: compat.ScanParts, flags: Sequence[bool], known: Sequence[bool]) -> _Loop:
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    body = program_of(parts.body)
    carry = [a or b for a, b in zip(flags[first:last], known[first:last], strict=True)]
    while True:
        operands = (*flags[:first], *carry, *flags[last:])
        found = _zero_results(body, operands)
        stays = [a and b for a, b in zip(carry, found, strict=False)]
        if stays == carry:
            zero = (*carry, *found[parts.num_carry :])
            return _Loop(tuple(not z for z in operands), tuple(not z for z in zero))
        carry = stays


def _part(
    program: Program, given: Sequence[bool], wanted: Sequence[bool]
) -> Callable[..., list[Any]]:
    """The function of the inputs that are given, zeros for the others, that makes the results that are wanted."""
    missing = [v for v, flag in zip(program.inputs, given, strict=True) if not flag]
    rest = [v for v, flag in zip(program.inputs, given, strict=True) if flag]
    outputs = [atom for atom, flag in zip(program.outputs, wanted, strict=True) if flag]
    zeros = Zeros(program, missing)

    def run(*values: Any) -> list[Any]:
        env = {**program.constants, **dict(zip(rest, values, strict=True))}
        for equation in program.equations:
            env.update(zeros.results(equation, env))
        return [zeros.read(atom, env) for atom in outputs]

    return run
