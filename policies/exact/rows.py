"""Linear programs row by row, in the form that HiGHS takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
import numpy.typing as npt

__all__ = ["INF", "Rows", "Term", "cost_unit", "size_scale"]

INF = math.inf
Floats = npt.NDArray[np.float64]
Term = tuple[int, float]


@dataclass
class Rows:
    """A linear program under construction: minimise `costs` over boxes and two-sided rows.

    Columns and rows are numbered as they are added.
    """

    costs: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def column(
        self, lower: float = 0.0, upper: float = 1.0, cost: float = 0.0, integral: bool = False
    ) -> int:
        """Adds a variable and returns its number."""
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.costs) - 1

    def row(self, terms: Iterable[Term], lower: float = -INF, upper: float = INF) -> int:
        """Adds `lower <= sum of coefficient * variable <= upper`; a variable may occur twice."""
        merged: dict[int, float] = {}
        for column, coefficient in terms:
            merged[column] = merged.get(column, 0.0) + coefficient
        for column, coefficient in merged.items():
            if coefficient:
                self.indices.append(column)
                self.values.append(coefficient)
        self.starts.append(len(self.indices))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return len(self.row_lower) - 1

    @property
    def num_columns(self) -> int:
        """How many variables there are."""
        return len(self.costs)

    @property
    def num_rows(self) -> int:
        """How many constraints there are."""
        return len(self.row_lower)

    def model(self, *, relaxed: bool = False) -> highspy.HighsLp:
        """Returns the program for HiGHS; `relaxed` leaves integrality out."""
        lp = highspy.HighsLp()
        lp.num_col_ = self.num_columns
        lp.num_row_ = self.num_rows
        lp.col_cost_ = np.asarray(self.costs, np.float64)
        lp.col_lower_ = np.asarray(self.lower, np.float64)
        lp.col_upper_ = np.asarray(self.upper, np.float64)
        lp.row_lower_ = np.asarray(self.row_lower, np.float64)
        lp.row_upper_ = np.asarray(self.row_upper, np.float64)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.num_col_ = self.num_columns
        lp.a_matrix_.num_row_ = self.num_rows
        lp.a_matrix_.start_ = np.asarray(self.starts, np.int32)
        lp.a_matrix_.index_ = np.asarray(self.indices, np.int32)
        lp.a_matrix_.value_ = np.asarray(self.values, np.float64)
        if not relaxed and any(self.integral):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[integral] for integral in self.integral]
        return lp

    def dual_bound(self, row_dual: Sequence[float] | Floats) -> float:
        """Returns the lower bound on the optimum of the relaxation that any row duals prove.

        For duals y the Lagrangian sum(y * row) + min over the boxes of (c - A'y) x is a bound whatever y is
        (Neumaier & Shcherbina, "Safe bounds in linear and mixed-integer linear programming", 2004), so a solver
        that was stopped, or is inexact, still yields one. Every variable must be bounded, or the bound may be -inf.
        """
        y = np.asarray(row_dual, np.float64).copy()
        low, high = np.asarray(self.row_lower), np.asarray(self.row_upper)
        y[(y > 0) & np.isneginf(low)] = 0.0  # a positive dual speaks of the lower side
        y[(y < 0) & np.isposinf(high)] = 0.0
        sides = np.where(y > 0, low, np.where(y < 0, high, 0.0))
        lengths = np.diff(np.asarray(self.starts))
        shares = np.asarray(self.values) * np.repeat(y, lengths)
        reduced = np.asarray(self.costs, np.float64)
        at_columns = np.bincount(
            np.asarray(self.indices, np.int64), weights=shares, minlength=self.num_columns
        )
        reduced = reduced - at_columns
        boxes = np.where(reduced > 0, np.asarray(self.lower), np.asarray(self.upper))
        terms = np.concatenate([y * sides, np.where(reduced == 0, 0.0, reduced * boxes)])
        # Rounding: every term and the sum are exact to a few units in the last place.
        slack = 1e-14 * float(np.abs(terms).sum() + np.abs(shares).sum())
        return float(terms.sum()) - slack


def cost_unit(costs: npt.NDArray[np.float64]) -> tuple[float, bool]:
    """Returns the unit of the objective, and whether every cost is an integer multiple of it."""
    positive = costs[costs > 0]
    if len(positive) == 0:
        return 1.0, True
    whole = np.rint(positive)
    if np.array_equal(whole, positive) and positive.max() < 2**52:
        return float(np.gcd.reduce(whole.astype(np.int64))), True
    return float(positive.mean()), False


def size_scale(sizes: npt.NDArray[np.int64], budget_bytes: int) -> tuple[float, float]:
    """Returns (scale, limit): `sum(sizes) * scale <= limit` says the same as `sum(sizes) <= budget`.

    The limit is about 100. Sums of sizes are multiples of their greatest common divisor, so the limit lies half a
    divisor above the largest multiple that fits: feasibility tolerances then cannot turn one into the other,
    unless the budget is more than some 10^7 divisors.
    """
    unit = int(np.gcd.reduce(sizes)) or 1
    multiple = max(budget_bytes // unit, 0) + 0.5
    scale = 100.0 / multiple
    return scale / unit, 100.0
