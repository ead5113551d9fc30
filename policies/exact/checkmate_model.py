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
of nodes. `solve_restricted` proves the same optimum orders of magnitude faster: this is the reference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.policies.exact.highs import Stop, run_lp, run_mip
from remat.policies.exact.milp import Solved, SolveStatus
from remat.policies.exact.rows import Rows, Term, cost_unit, size_scale
from remat.policies.exact.stages import without_idle_repeats
from remat.policies.solvers.problem import Problem, Replayed, replay

__all__ = ["round_lp", "solve_checkmate"]

Floats = npt.NDArray[np.float64]
_THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9, 0.01, 0.99)
_SHRINK = (0.0, 0.05, 0.1, 0.2, 0.3)  # the paper uses 0.1


@dataclass(eq=False)
class _Checkmate:
    problem: Problem
    rows: Rows
    run: dict[tuple[int, int], int]
    keep: dict[tuple[int, int], int]
    unit: float
    whole: bool
    frees: list[tuple[int, tuple[int, int, int]]]
    totals: list[tuple[int, list[Term]]]

    def sequence(self, values: Floats) -> list[int]:
        order: list[int] = []
        for t in range(len(self.problem)):
            order += [i for i in range(t) if (t, i) in self.run and values[self.run[t, i]] > 0.5]
            order.append(t)
        return without_idle_repeats(self.problem, order)

    def assignment(self, runs: Sequence[Collection[int]]) -> Floats:
        """Returns all columns for given repetitions per stage, with the fewest values kept."""
        problem = self.problem
        values = np.zeros(self.rows.num_columns)
        kept: set[int] = set()
        for t in range(len(problem) - 1, -1, -1):
            for i in kept:
                if (t + 1, i) in self.keep:
                    values[self.keep[t + 1, i]] = 1.0
            here = {*runs[t], t}
            for i in here:
                values[self.run[t, i]] = 1.0
            needed = {r for k in here for r in problem.inputs[k]} | kept
            kept = needed - here
        for column, (t, i, k) in self.frees:
            later = (u for u in problem.users[i] if u > k and (t, u) in self.run)
            factors = [values[self.run[t, k]], *(1 - values[self.run[t, u]] for u in later)]
            if (t + 1, i) in self.keep:
                factors.append(1 - values[self.keep[t + 1, i]])
            values[column] = math.prod(factors)
        for column, terms in self.totals:
            values[column] = sum(values[c] * a for c, a in terms)
        return values


def _build(problem: Problem, budget_bytes: int) -> _Checkmate:
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
    frees: list[tuple[int, tuple[int, int, int]]] = []
    totals: list[tuple[int, list[Term]]] = []
    for t in range(count):
        terms: list[Term] = [(keep[t, i], sizes[i]) for i in range(t)]
        for k in range(t + 1):
            if (t, k) not in run:
                continue
            terms.append((run[t, k], sizes[k]))
            column = rows.column(0.0, limit)
            rows.row([(column, 1.0), *((c, -a) for c, a in terms)], 0.0, 0.0)
            totals.append((column, terms))
            if work[k]:
                rows.row([(column, 1.0), (run[t, k], work[k])], upper=limit)
            terms = [(column, 1.0)]
            for i in (*problem.inputs[k], k):
                free = rows.column()
                frees.append((free, (t, i, k)))
                rows.row([(run[t, k], 1.0), (free, -1.0)], lower=0.0)
                hazards = [run[t, u] for u in problem.users[i] if u > k and (t, u) in run]
                if (t + 1, i) in keep:
                    hazards.append(keep[t + 1, i])
                for hazard in hazards:
                    rows.row([(free, 1.0), (hazard, 1.0)], upper=1.0)
                terms.append((free, -sizes[i]))
    return _Checkmate(problem, rows, run, keep, unit, whole, frees, totals)


def solve_checkmate(
    problem: Problem,
    budget_bytes: int,
    *,
    start: Sequence[int] | None = None,
    seconds: float = math.inf,
    gap: float = 0.0,
    stop: Stop | None = None,
    progress: Callable[[float, float, float], None] | None = None,
    threads: int = 1,
) -> Solved:
    """Returns the cheapest sequence with one computation of a node per stage, by Checkmate's program.

    Args:
        problem: `turn=0` and every node repeatable is the published problem.
        budget_bytes: the limit on live bytes.
        start: a sequence to begin with; used if it is within the budget and repeats a node at most once per stage.
        seconds, gap, stop, progress, threads: as for `solve_restricted`.

    Raises:
        ValueError: `start` is not a sequence of the problem.
    """
    began = time.perf_counter()
    model = _build(problem, budget_bytes)
    given: Replayed | None = None
    values: Floats | None = None
    if start is not None:
        given = replay(problem, start)
        runs = _by_stage(problem, start)
        if given.peak_bytes <= budget_bytes and runs is not None:
            values = model.assignment(runs)
    outcome = run_mip(
        model.rows,
        seconds=max(seconds - (time.perf_counter() - began), 0.0),
        gap=gap,
        absolute_gap=1 - 1e-6 if model.whole else 1e-6,
        start=values,
        stop=stop,
        progress=None
        if progress is None
        else lambda cost, bound, at: progress(cost * model.unit, bound * model.unit, at),
        threads=threads,
    )
    bound = outcome.bound * model.unit
    if model.whole and math.isfinite(bound):
        bound = math.ceil(outcome.bound - 1e-6) * model.unit
    found = None if outcome.values is None else model.sequence(outcome.values)
    return _solved(
        problem, budget_bytes, found, max(bound, 0.0), outcome.infeasible, outcome.interrupted,
        gap, began, "Checkmate's program",
    )  # fmt: skip


def round_lp(
    problem: Problem,
    budget_bytes: int,
    *,
    seconds: float = math.inf,
    thresholds: Sequence[float] = _THRESHOLDS,
    shrink: Sequence[float] = _SHRINK,
    draws: int = 10,
    seed: int = 0,
    stop: Stop | None = None,
) -> Solved:
    """Rounds Checkmate's relaxation in two phases and returns the cheapest result within the budget.

    First `S` is rounded, at every threshold and `draws` times at random with the relaxed value as its
    probability; then `R` is the smallest completion, by a walk from the last stage to the first. It is repeated
    for budgets reduced by the fractions `shrink` (the paper's epsilon). There is no guarantee: the result often
    exceeds the budget or costs far more than the optimum (the paper's figure 8). The status is then `unknown`
    or the gap large.

    Returns:
        `feasible` with the relaxation's bound, `optimal` if they meet, `unknown` if nothing was within the budget,
        `infeasible` if the relaxation is.
    """
    began = time.perf_counter()
    random = np.random.default_rng(seed)
    best: list[int] | None = None
    best_cost = math.inf
    bound = 0.0
    infeasible = interrupted = False
    tried = within = 0
    for epsilon in sorted(set(shrink)):
        left = seconds - (time.perf_counter() - began)
        if left <= 0 or interrupted:
            break
        model = _build(problem, int(budget_bytes * (1 - epsilon)))
        outcome = run_lp(model.rows, seconds=left, method="ipm", stop=stop)
        interrupted = outcome.interrupted
        if epsilon == 0:
            infeasible = outcome.infeasible
            bound = 0.0 if infeasible else max(outcome.bound * model.unit, 0.0)
        if outcome.infeasible or outcome.values is None:
            break  # a smaller budget does no better
        relaxed = {key: float(outcome.values[column]) for key, column in model.keep.items()}
        choices = [*(dict.fromkeys(relaxed, limit) for limit in thresholds)]
        choices += [{key: float(random.random()) for key in relaxed} for _ in range(draws)]
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
    return _solved(
        problem, budget_bytes, best, bound, infeasible, interrupted, 0.0, began, note
    )  # fmt: skip


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


def _by_stage(problem: Problem, sequence: Sequence[int]) -> list[set[int]] | None:
    """Repetitions by stage, None if a node repeats twice in a stage."""
    stages: list[set[int]] = [set() for _ in range(len(problem))]
    expected = 0
    for node in without_idle_repeats(problem, sequence):
        if node == expected:
            expected += 1
        elif node in stages[expected]:
            return None
        else:
            stages[expected].add(node)
    return stages


def _solved(
    problem: Problem,
    budget_bytes: int,
    sequence: list[int] | None,
    bound: float,
    infeasible: bool,
    interrupted: bool,
    gap: float,
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
        status="optimal" if open_gap <= gap else "feasible",
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
