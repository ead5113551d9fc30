"""Checkmate's published program solved as it is: the reference for what is proven in other ways."""

from __future__ import annotations

import math
import time

from remat.policies.exact import checkmate_model
from remat.policies.exact.checkmate_model import build_checkmate
from remat.policies.exact.highs import Stop, run_mip
from remat.policies.exact.milp import Solved
from remat.policies.exact.stages import without_idle_repeats
from remat.policies.solvers.problem import Problem

__all__ = ["solve_checkmate"]


def solve_checkmate(
    problem: Problem, budget_bytes: int, *, seconds: float = math.inf, stop: Stop | None = None
) -> Solved:
    """Returns the cheapest sequence with one computation of a node per stage.

    `turn=0` and every node repeatable is the published problem. For some tens of nodes: `solve_restricted` proves
    the same optimum orders of magnitude faster.
    """
    began = time.perf_counter()
    model = build_checkmate(problem, budget_bytes)
    absolute_gap = 1 - 1e-6 if model.whole else 1e-6
    outcome = run_mip(model.rows, seconds=seconds, absolute_gap=absolute_gap, stop=stop)
    bound = outcome.bound * model.unit
    if model.whole and math.isfinite(bound):
        bound = math.ceil(outcome.bound - 1e-6) * model.unit
    found: list[int] | None = None
    if outcome.values is not None:
        order: list[int] = []
        for t in range(len(problem)):
            again = (i for i in range(t) if (t, i) in model.run)
            order += [i for i in again if outcome.values[model.run[t, i]] > 0.5]
            order.append(t)
        found = without_idle_repeats(problem, order)
    return checkmate_model._solved(
        problem, budget_bytes, found, max(bound, 0.0), outcome.infeasible, outcome.interrupted, began,
        "Checkmate's program",
    )  # fmt: skip
