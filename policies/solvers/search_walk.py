"""The state of one search: the arrays that the inner loop works on, and the inner loop, compiled or not.

The inner loop (`remat.policies.solvers.search_kernel`) is compiled by numba. Where there is no numba for a new
Python yet, the same code runs in Python, 50 to 100 times slower.
"""

from __future__ import annotations

import math
import time
import types
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from remat.policies.solvers import search_kernel as plain
from remat.policies.solvers.problem import Ints, Problem

__all__ = ["Walk", "compile_kernel", "is_kernel_there"]

# Temperatures, in mean costs of a repeatable node. Chosen by look; no plan is worse for them than the start.
_HOT, _COLD = 0.3, 0.003
_LARGE = 2000  # nodes; larger problems get fewer proposals per node and begin cooler in proportion
# The price of a byte over the budget begins at FastSA's (total cost / budget), and follows whether sequences meet
# the budget: by a factor every `PERIOD` proposals, within these multiples of it. Turned on `benchmarks/search.py`.
_PRICE_STEP, _PRICE_LOW, _PRICE_HIGH = 1.006, 1e-3, 1e4
# Logarithm of the factor until the budget is first met, up to `_SMALL` nodes, less in proportion beyond; likewise.
_PRICE_URGE, _SMALL = 0.06, 100
_COST_STEPS = 1 << 46  # costs that are not whole are rounded to this share: sums stay below 2^63


@cache
def _kernel(compiled: bool) -> Any:
    """The inner loop, as it stands or compiled.

    The compiled functions are copies in a namespace of their own, so that numba is imported only here and
    both forms can run side by side.
    """
    if not compiled:
        return plain
    import numba

    space: dict[str, Any] = dict(vars(plain))
    for function in plain.FUNCTIONS:
        copied = types.FunctionType(function.__code__, space, function.__name__)
        copied.__module__ = function.__module__
        copied.__qualname__ = function.__qualname__
        try:
            ready = numba.njit(cache=True, nogil=True)(copied)
        except RuntimeError:  # there is no folder that numba may write its cache to
            ready = numba.njit(nogil=True)(copied)
        space[function.__name__] = ready
    return types.SimpleNamespace(**space)


def compile_kernel() -> float:
    """Compiles the inner loop, or reads it from numba's cache; returns the seconds of this call."""
    before = time.perf_counter()
    _compiled_once()
    return time.perf_counter() - before


@cache
def _compiled_once() -> None:
    pair = Problem.of([1, 1], [1, 1], [[], [0]])
    walk = Walk(pair, 2, 0, compiled=True)
    walk.load(pair.first_runs)
    walk.run(0)


def is_kernel_there() -> bool:
    """Whether the inner loop is compiled, in this process or in numba's cache."""
    if _compiled_once.cache_info().currsize > 0:
        return True
    folder = Path(_kernel(compiled=True).run.stats.cache_path or "")
    return any(folder.glob(f"{Path(plain.__file__).stem}.run-*.nbi"))


class Walk:
    """The arrays of one search; see `search_kernel` for what is in them."""

    def __init__(
        self, problem: Problem, budget_bytes: int, seed: int, compiled: bool, reorder: bool = False
    ) -> None:
        k = plain
        self.problem = problem
        self.compiled = compiled
        self.kernel = _kernel(compiled)
        target = max(budget_bytes, problem.floor_bytes)  # nothing goes below the floor
        self.lifted_bytes = target - budget_bytes
        self.kept = problem.first_runs
        self.kept_rank = (k.HUGE, k.HUGE)
        count = len(problem)
        total = problem.total_cost
        whole = total < 2**52 and bool(np.all(problem.costs == np.floor(problem.costs)))
        self.unit = 1.0 if whole or total == 0 else total / _COST_STEPS
        costs = np.round(problem.costs / self.unit).astype(np.int64)
        self.base_cost = int(costs.sum())
        starts, indices = problem.input_csr
        user_starts, users = problem.user_csr
        rows = np.zeros((count + 1, 8), np.int64)
        rows[:count, k.SIZE] = problem.sizes
        rows[:count, k.OWN_COST] = costs
        rows[:, k.INPUTS] = starts
        rows[:, k.USERS] = user_starts
        rows[:count, k.EXTRA] = problem.extra_while_running
        rows[:count, k.REPEATABLE] = problem.repeatable
        self.v = self._array(rows.reshape(-1))
        self.ins = self._array(indices)
        self.use = self._array(users)
        self.widest = int(np.diff(starts).max(initial=0))
        scalars = np.zeros(k.SCALARS, np.int64)
        scalars[k.NODES] = count
        scalars[k.BUDGET] = target
        scalars[k.TURN] = problem.turn
        scalars[k.REORDER] = reorder
        # The generator must not start at 0.
        scalars[k.RNG] = (seed * 0x9E3779B97F4A7C15 + 0x243F6A8885A308D3) % (1 << 60) + 1
        scalars[k.BEST_OVER] = scalars[k.BEST_COST] = k.HUGE
        self.p = self._array(scalars)
        repeatable = costs[problem.repeatable & (costs > 0)]
        self.mean_cost = float(repeatable.mean()) if len(repeatable) else 1.0
        price = max(1.0, float(self.base_cost)) / max(1, target)
        urge = math.exp(_PRICE_URGE * min(1.0, _SMALL / count))
        prices = [0.0, price, _PRICE_STEP, urge, price * _PRICE_LOW, price * _PRICE_HIGH]
        self.f = self._array(np.array(prices))
        entries = 1 << k.TABLE_BITS
        self.table = self._array(np.array([-math.log((i + 0.5) / entries) for i in range(entries)]))
        self.slots = 0
        self.handles = 0

    def _array(self, values: Any) -> Any:
        return np.ascontiguousarray(values) if self.compiled else values.tolist()

    def _zeros(self, count: int) -> Any:
        return self._array(np.zeros(count, np.int64))

    def load(self, sequence: Ints) -> None:
        """Sets the state to a valid sequence that ends with the last node's first run."""
        k = plain
        need = 4 * (len(sequence) + 4 * k.EDITS)
        if need > self.slots:
            self._allocate(1 << need.bit_length())
        self.p[k.PENDING] = self.p[k.PATIENCE] = self.p[k.FEASIBLE] = 0
        self.kernel.load(
            self.p, self.r, self.v, self.ins, self.s, self.t, self.reps, self.free, self.handles,
            self._array(np.asarray(sequence, np.int64)), len(sequence),
        )  # fmt: skip

    def _allocate(self, slots: int) -> None:
        k = plain
        self.slots = slots
        self.handles = slots // 2
        self.p[k.SLOTS] = slots
        self.r = self._zeros(8 * self.handles)
        self.s = self._zeros(slots)
        self.t = self._zeros(8 * slots)
        self.reps = self._zeros(self.handles)
        self.free = self._zeros(self.handles)
        self.dirty = self._zeros(k.FLUSH_AT + 4 * self.widest + 64)
        self.undo = self._zeros(9 * k.EDITS)
        self.todo = self._zeros(slots + 4 * len(self.problem) + self.handles + 64)
        self.best = self._zeros(self.handles)

    def grow(self) -> None:
        """Doubles the arrays and goes on from the present sequence."""
        sequence = self.current()
        self._allocate(2 * self.slots)
        self.load(sequence)

    def run(self, proposals: int) -> int:
        """Makes proposals and keeps the best sequence; returns how many were made."""
        done = self.kernel.run(
            self.p, self.f, self.r, self.v, self.ins, self.use, self.s, self.t, self.reps,
            self.free, self.dirty, self.undo, self.todo, self.best, self.table, proposals,
        )  # fmt: skip
        k = plain
        rank = (int(self.p[k.BEST_OVER]), int(self.p[k.BEST_COST]))
        if rank < self.kept_rank:
            self.kept = np.array(self.best[: self.p[k.BEST_LENGTH]], np.int64)
            self.kept_rank = rank
        return int(done)

    def cool(self, heat: float, share: float) -> None:
        """Sets the temperature for a share of a round, from 0 to 1."""
        # Large problems get few proposals per node: they begin cooler.
        large = min(1.0, _LARGE / len(self.problem))
        hot = max(_HOT * heat * large, _COLD) * self.mean_cost
        cold = _COLD * self.mean_cost
        self.f[plain.TEMPERATURE] = hot * (cold / hot) ** share

    def current(self) -> Ints:
        """The present sequence."""
        return np.array([self.r[8 * run] for run in self.s if run >= 0], np.int64)

    def has_no_repetition(self) -> bool:
        """Whether the best meets the budget without any repetition."""
        return self.kept_rank[0] == 0 and len(self.kept) == len(self.problem)
