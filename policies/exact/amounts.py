"""Amounts, and the rows between them that the programs of stages are built of.

An *amount* is a constant plus variables, each with coefficient one: how much of a value is alive, made or needed.
The smallest amounts that satisfy the rows follow from the integer variables, so every column added here comes with
a rule that computes it: by the rules, in order, a sequence becomes a feasible point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from remat.policies.exact.rows import INF, Rows, Term

__all__ = ["ALL", "NOTHING", "Amount", "AmountRows", "Rule", "filled", "value_of"]

Floats = npt.NDArray[np.float64]
Amount = tuple[int, tuple[int, ...]]  # constant, columns
NOTHING: Amount = (0, ())
ALL: Amount = (1, ())
Rule = tuple[int, Callable[[Floats], float]]
"""A column, and its value by those of the columns before it."""


def value_of(amount: Amount, values: Floats) -> float:
    """Returns an amount by the values of the columns."""
    return amount[0] + float(sum(values[c] for c in amount[1]))


class AmountRows:
    """A program under construction, in which values are kept from stage to stage or made again.

    Attributes:
        rows: the linear program.
        repeat: column of "runs again" for (stage index, node).
        keep: column of "kept into" for (stage index, value).
        rules: of the columns that follow from others, in an order in which they can be computed.
        impossible: why no sequence exists at all, None if that was not found while building.
    """

    def __init__(self) -> None:
        self.rows = Rows()
        self.repeat: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self.rules: list[Rule] = []
        self.impossible: str | None = None

    def carried(self, index: int, value: int) -> Amount:
        """Returns the amount of `value` that is kept into a stage."""
        column = self.keep.get((index, value))
        return NOTHING if column is None else (0, (column,))

    def at_least(self, left: Amount, right: Amount, equal: bool = False) -> None:
        """Adds `left >= right`, or `left == right`."""
        terms = [*((c, 1.0) for c in left[1]), *((c, -1.0) for c in right[1])]
        bound = float(right[0] - left[0])
        if not terms:
            if bound > 0:
                self.impossible = "a value is needed that cannot be made"
            return
        self.rows.row(terms, bound, bound if equal else INF)

    def most(self, amounts: Sequence[Amount]) -> Amount:
        """Returns an amount that is at least each of `amounts`."""
        given = list(dict.fromkeys(a for a in amounts if a != NOTHING))
        if ALL in given:
            return ALL
        if len(given) <= 1:
            return given[0] if given else NOTHING
        column = self.rows.column()
        self.rules.append((column, lambda v: max(value_of(a, v) for a in given)))
        for amount in given:
            self.at_least((0, (column,)), amount)
        return (0, (column,))

    def lives(
        self,
        value: int,
        events: Sequence[tuple[int, Amount]],
        following: Amount,
        after: dict[tuple[int, int], Amount],
    ) -> list[Amount]:
        """Adds how long a copy is alive within a stage; returns the amounts needed of it at the beginning.

        Args:
            value: whose copy.
            events: its readers in the stage in running order, each with whether it reads.
            following: what is kept of it into the next stage.
            after: filled with what is alive after each reader, by value and reader.
        """
        alive = following
        for user, amount in reversed(events[1:]):
            after[value, user] = alive
            alive = self.most([amount, alive])
        if not events:
            return [alive]
        after[value, events[0][0]] = alive
        return [alive, events[0][1]]

    def supply(self, index: int, value: int, needs: Sequence[Amount]) -> None:
        """Adds the rows: what is needed of a value in a stage is kept into it or made in it."""
        given = list(dict.fromkeys(a for a in needs if a != NOTHING))
        if ALL in given:
            given = [ALL]
        made = self.repeat.get((index, value))
        column = self.keep[index, value] = self.rows.column()

        def rule(values: Floats) -> float:
            most = max((value_of(amount, values) for amount in given), default=0.0)
            return max(most - (0.0 if made is None else values[made]), 0.0)

        self.rules.append((column, rule))
        total: Amount = (0, (column,) if made is None else (column, made))
        for amount in given:
            self.at_least(total, amount, equal=len(given) == 1)
        if not given:
            self.at_least((0, ()), total)
        elif made is not None and given != [ALL]:
            self.rows.row([(column, 1.0), (made, 1.0)], upper=1.0)

    def total(self, constant: float, terms: Sequence[Term], upper: float) -> list[Term]:
        """Adds a column from 0 to `upper` that equals `constant + terms`; returns it as terms."""
        column = self.rows.column(0.0, upper)
        self.rows.row([(column, 1.0), *((c, -a) for c, a in terms)], constant, constant)
        fixed = list(terms)
        self.rules.append((column, lambda v: constant + sum(v[c] * a for c, a in fixed)))
        return [(column, 1.0)]


def filled(values: Floats, rules: Sequence[Rule]) -> Floats:
    """Computes the columns that follow from others, in place; returns `values`."""
    for column, rule in rules:
        values[column] = rule(values)
    return values
