"""Checkmate's integer program as published, and its rounding of the linear relaxation.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (MLSys 2020): section
4.2 to 4.7 (the program), section 5 (two-phase rounding). Stage `t` ends with the first run of node `t`.

* `R[t,i]`: node `i` runs in stage `t`; `S[t,i]`: its result is kept into stage `t`; both for `i <= t` only.
* A node runs, or is kept, only if what it needs was kept or has run: (1b), (1c).
* `FREE[t,i,k]`: the result `i` is freed after node `k` of stage `t`, which reads it (or is it): `k` runs there,
  `i` is not kept into the next stage, and no later reader runs in this stage: (5) to (7).
* `U[t,k]`: live bytes after node `k` of stage `t` has run, before it frees: (2), (3); never above the budget.

Departures: `FREE` is continuous, bounded by each factor of its product, which needs no constant and makes the
relaxation tighter ((7) counts the factors); bytes are scaled to about 0..100; nodes that must not be repeated, and
repetitions before the turn, have no variable; `workspace` is added where a node runs.

Complexity: about `nodes^2 / 2` binaries and `nodes * edges` continuous variables, so for graphs of up to some tens
of nodes. `solve_restricted` proves the same optimum orders of magnitude faster; the program itself is solved in the
tests only, as the reference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from remat.policies.exact.highs import Stop, run_lp
from remat.policies.exact.milp import Solved
from remat.policies.exact.refine import SolveStatus
from remat.policies.exact.rows import Rows, Term, cost_unit, size_scale
from remat.policies.exact.stages import without_idle_repeats
from remat.policies.solvers.problem import Problem, replay

__all__ = ["CheckmateModel", "build_checkmate", "round_lp"]


# The paper rounds at 1/2, and at random (section 5); the others were chosen by look, and can only add results.
_THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9, 0.01, 0.99)
_DRAWS, _SEED = 10, 0
_SHRINK = (0.0, 0.05, 0.1, 0.2, 0.3)  # ascending; the paper uses 0.1


@dataclass(frozen=True, eq=False)
class CheckmateModel:
    """The program and what its columns mean.

    Attributes:
        rows: the linear program.
        run: column of `R` for (stage, node).
        keep: column of `S` for (stage, node).
        free: column of `FREE` for (stage, node, reader).
        unit: cost of one unit of the objective; `whole`: every cost is an integer number of units.
    """

    rows: Rows
    run: dict[tuple[int, int], int]
    keep: dict[tuple[int, int], int]
    free: dict[tuple[int, int, int], int]
    unit: float
    whole: bool


def build_checkmate(problem: Problem, budget_bytes: int) -> CheckmateModel:
    """Builds the program of the cheapest sequence within a budget."""
    count = len(problem)
    all_sizes = np.concatenate([problem.sizes, problem.extra_while_running])
    scale, limit = size_scale(all_sizes, budget_bytes)
    sizes = (problem.sizes * scale).tolist()
    work = (problem.extra_while_running * scale).tolist()
    unit, whole = cost_unit(problem.costs)
    rows = Rows()
    run: dict[tuple[int, int], int] = {}
    keep: dict[tuple[int, int], int] = {}
    for t in range(count):
        for i in range(t):
            keep[t, i] = rows.column(integral=True)
            if problem.repeatable[i] and t >= problem.turn:
                run[t, i] = rows.column(cost=float(problem.costs[i]) / unit, integral=True)
        run[t, t] = rows.column(lower=1.0, integral=True)

    def available(t: int, i: int) -> list[Term]:
        return [(c, 1.0) for c in (run.get((t, i)), keep.get((t, i))) if c is not None]

    for t in range(count):
        for j in range(t + 1):
            if (t, j) in run:
                for i in problem.inputs[j]:
                    rows.row([*available(t, i), (run[t, j], -1.0)], lower=0.0)
            if (t + 1, j) in keep:
                rows.row([*available(t, j), (keep[t + 1, j], -1.0)], lower=0.0)
    free: dict[tuple[int, int, int], int] = {}
    for t in range(count):
        terms: list[Term] = [(keep[t, i], sizes[i]) for i in range(t)]
        for k in range(t + 1):
            if (t, k) not in run:
                continue
            terms.append((run[t, k], sizes[k]))
            column = rows.column(0.0, limit)
            rows.row([(column, 1.0), *((c, -a) for c, a in terms)], 0.0, 0.0)
            if work[k]:
                rows.row([(column, 1.0), (run[t, k], work[k])], upper=limit)
            terms = [(column, 1.0)]
            for i in (*problem.inputs[k], k):
                freed = free[t, i, k] = rows.column()
                rows.row([(run[t, k], 1.0), (freed, -1.0)], lower=0.0)
                hazards = [run[t, u] for u in problem.users[i] if u > k and (t, u) in run]
                if (t + 1, i) in keep:
                    hazards.append(keep[t + 1, i])
                for hazard in hazards:
                    rows.row([(freed, 1.0), (hazard, 1.0)], upper=1.0)
                terms.append((freed, -sizes[i]))
    return CheckmateModel(rows, run, keep, free, unit, whole)


def round_lp(
    problem: Problem,
    budget_bytes: int,
    *,
    seconds: float = math.inf,
    stop: Stop | None = None,
) -> Solved:
    """Rounds Checkmate's relaxation in two phases and returns the cheapest result within the budget.

    First `S` is rounded, at several thresholds and ten times at random with the relaxed value as its
    probability; then `R` is the smallest completion, by a walk from the last stage to the first. It is repeated
    for budgets reduced by up to 30% (the paper's epsilon). There is no guarantee: the result often
    exceeds the budget or costs far more than the optimum (the paper's figure 8). The status is then `unknown`
    or the gap large.

    Returns:
        `feasible` with the relaxation's bound, `optimal` if they meet, `unknown` if nothing was within the budget,
        `infeasible` if the relaxation is.
    """
    began = time.perf_counter()
    random = np.random.default_rng(_SEED)
    best: list[int] | None = None
    best_cost = math.inf
    bound = 0.0
    infeasible = interrupted = False
    tried = within = 0
    for epsilon in _SHRINK:
        left = seconds - (time.perf_counter() - began)
        if left <= 0 or interrupted:
            break
        model = build_checkmate(problem, int(budget_bytes * (1 - epsilon)))
        outcome = run_lp(model.rows, seconds=left, stop=stop)
        interrupted = outcome.interrupted
        if epsilon == 0:
            infeasible = outcome.infeasible
            bound = 0.0 if infeasible else max(outcome.bound * model.unit, 0.0)
        if outcome.infeasible or outcome.values is None:
            break  # a smaller budget does no better
        relaxed = {key: float(outcome.values[column]) for key, column in model.keep.items()}
        choices = [*(dict.fromkeys(relaxed, limit) for limit in _THRESHOLDS)]
        choices += [{key: float(random.random()) for key in relaxed} for _ in range(_DRAWS)]
        for limits in choices:
            kept = {key for key, value in relaxed.items() if value > limits[key]}
            sequence = _complete(problem, kept)
            replayed = replay(problem, sequence)
            tried += 1
            if replayed.peak_bytes <= budget_bytes:
                within += 1
                if replayed.extra_cost < best_cost:
                    best, best_cost = sequence, replayed.extra_cost
    note = f"rounding: {within} of {tried} within the budget"
    return _solved(problem, budget_bytes, best, bound, infeasible, interrupted, began, note)


def _complete(problem: Problem, wanted: Collection[tuple[int, int]]) -> list[int]:
    """The second phase: the fewest computations for given `S`, where those are allowed.

    What is needed, was not kept and must not run again is kept after all.
    """
    stages: list[list[int]] = []
    following: set[int] = set()
    for t in range(len(problem) - 1, -1, -1):
        needed = (following | set(problem.inputs[t])) - {t}
        again: list[int] = []
        for i in range(t - 1, -1, -1):
            if i in needed and (t, i) not in wanted and problem.repeatable[i] and t >= problem.turn:
                again.append(i)
                needed.update(problem.inputs[i])
        stages.append([*reversed(again), t])
        following = needed - set(again)
    order = [node for stage in reversed(stages) for node in stage]
    return without_idle_repeats(problem, order)


def _solved(
    problem: Problem,
    budget_bytes: int,
    sequence: list[int] | None,
    bound: float,
    infeasible: bool,
    interrupted: bool,
    began: float,
    method: str,
) -> Solved:
    """Judges a sequence once more and makes the result."""
    seconds = time.perf_counter() - began
    replayed = None if sequence is None else replay(problem, sequence)
    if sequence is None or replayed is None or replayed.peak_bytes > budget_bytes:
        status: SolveStatus = "infeasible" if infeasible else "unknown"
        bound = math.inf if infeasible else bound
        return Solved(
            status, None, 0, math.inf, math.inf, bound, math.inf, interrupted, seconds, method
        )
    cost = replayed.extra_cost
    tolerance = 1e-9 * max(cost, problem.total_cost)
    bound = cost if abs(cost - bound) <= tolerance else min(bound, cost)
    open_gap = (cost - bound) / cost if cost > bound else 0.0
    return Solved(
        status="optimal" if open_gap == 0 else "feasible",
        sequence=tuple(sequence),
        peak_bytes=replayed.peak_bytes,
        cost=replayed.cost,
        extra_cost=cost,
        bound=bound,
        gap=open_gap,
        interrupted=interrupted,
        solve_seconds=seconds,
        method=method,
    )
