"""Element-wise equations of a backward pass that run as one operator, as XLA would merge them.

The backward pass is known before it runs; the forward pass, which runs as it is written, is not. A *group* is an
element-wise equation and those before it that it alone reads, over any depth: what they hand to each other is never
in memory. What several equations read, and every result, is.

Groups depend on the backward pass alone, not on the budget, so that no budget changes a bit. What they may be:

* only element-wise equations stand between the first and the last, and shapes are equal: nothing large is made
  while operands wait, and a gradient that is added up as it comes is;
* operands and result take no more than those of the largest equation, so that a group needs no larger budget;
* at most eight equations, a number by look: with a bound, a chain as long as the example says does not make ever
  new groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remat import compat
from remat.core.avals import aval_bytes
from remat.core.classify import classify
from remat.core.primitives import OpClass

__all__ = ["Group", "grouped"]

_MOST_EQUATIONS = 8


@dataclass(frozen=True)
class Group:
    """Equations that run as one.

    Attributes:
        eqns: in order; the last makes the result.
        invars: what they read, variables each once, literals as often as they stand there.
        places: of every operand of every equation: in `invars`, or behind these a result of `eqns`.
    """

    eqns: tuple[Any, ...]
    invars: tuple[Any, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def outvars(self) -> Sequence[Any]:
        """The result of the last equation."""
        return self.eqns[-1].outvars

    @property
    def name(self) -> str:
        """The primitives."""
        return "+".join(eqn.primitive.name for eqn in self.eqns)

    @property
    def structure(self) -> Any:
        """What it does, hashable: equal for two traces of the same code, whatever the literals."""
        return (tuple(map(compat.equation_structure, self.eqns)), self.places)

    def evaluate(self, *operands: Any) -> Sequence[Any]:
        """Runs the equations in the current trace; returns the result of the last."""
        values = list(operands)
        for eqn, places in zip(self.eqns, self.places, strict=True):
            values += compat.evaluate_equation(eqn, [values[place] for place in places])
        return values[-1:]


def grouped(eqns: Sequence[Any], outvars: Iterable[Any], is_free: Callable[[Any], bool]) -> list:
    """Returns equations and groups in the order in which they run.

    Args:
        eqns: of a backward pass.
        outvars: its results.
        is_free: whether a variable takes none of the budget: it is the caller's.
    """
    reads = Counter(_variables(eqns))
    reads.update(2 * [atom for atom in outvars if not compat.is_literal(atom)])
    largest = max((_working_set(eqn.invars, eqn.outvars, is_free) for eqn in eqns), default=0)
    ends: dict[Any, list[int]] = {}  # the equations of every group of this run, by its result
    steps: dict[int, list[int]] = {}  # by the last of them
    for index, eqn in enumerate(eqns):
        if not _is_pointwise(eqn):
            ends.clear()
            steps[index] = [index]
            continue
        mine = [index]
        (result,) = eqn.outvars
        for atom in dict.fromkeys(_variables([eqn])):
            before = ends.get(atom)
            if before is None or reads[atom] > 1 or atom.aval.shape != result.aval.shape:
                continue
            joined = sorted([*before, *mine])
            operands = _operands([eqns[i] for i in joined])
            fits = _working_set(operands, [result], is_free) <= largest
            if fits and len(joined) <= _MOST_EQUATIONS:
                mine = joined
                del steps[before[-1]]
        steps[index] = ends[result] = mine
    return [
        eqns[last] if len(members) == 1 else _group([eqns[i] for i in members])
        for last, members in steps.items()
    ]


def _group(eqns: Sequence[Any]) -> Group:
    invars = _operands(eqns)
    place = {atom: i for i, atom in enumerate(invars) if not compat.is_literal(atom)}
    place |= {eqn.outvars[0]: len(invars) + i for i, eqn in enumerate(eqns)}
    literals = iter([i for i, atom in enumerate(invars) if compat.is_literal(atom)])
    places = tuple(
        tuple(next(literals) if compat.is_literal(a) else place[a] for a in eqn.invars)
        for eqn in eqns
    )
    return Group(tuple(eqns), tuple(invars), places)


def _operands(eqns: Sequence[Any]) -> list[Any]:
    """What equations read of others: variables each once, literals as often as they stand there."""
    made = {var for eqn in eqns for var in eqn.outvars}
    found: list[Any] = []
    seen: set[Any] = set()
    for atom in (atom for eqn in eqns for atom in eqn.invars):
        if compat.is_literal(atom):
            found.append(atom)
        elif atom not in made and atom not in seen:
            seen.add(atom)
            found.append(atom)
    return found


def _variables(eqns: Iterable[Any]) -> list[Any]:
    return [atom for eqn in eqns for atom in eqn.invars if not compat.is_literal(atom)]


def _working_set(
    operands: Sequence[Any], results: Sequence[Any], is_free: Callable[[Any], bool]
) -> int:
    """Bytes of the budget that are there at once."""
    read = {atom for atom in operands if not compat.is_literal(atom) and not is_free(atom)}
    return sum(aval_bytes(atom.aval) for atom in (*read, *results))


def _is_pointwise(eqn: Any) -> bool:
    cost = classify(
        eqn.primitive.name,
        eqn.params,
        [atom.aval for atom in eqn.invars],
        [var.aval for var in eqn.outvars],
        eqn.effects,
    )
    is_one = len(eqn.outvars) == 1 and eqn.outvars[0].aval.dtype.kind != "V"
    return is_one and cost.op_class is OpClass.POINTWISE and cost.known and cost.recomputable
