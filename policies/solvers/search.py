"""`search`: the cheapest sequence within a byte budget, by local search on the executed sequence.

The method of FastSA (Imanishi et al. 2024): simulated annealing over sequences whose edits are to add, remove
and move one computation, the memory of the whole sequence kept in a segment tree. It works from tens to tens
of thousands of nodes, where exact methods stop, and proves nothing: a bound is another planner's job.

Every sequence with the first runs in order is valid, so any edit is allowed, and only cost and peak judge it.
One proposal is one of:

* while the peak is too high: a value alive but unused across the peak is recomputed just before its next
  reader; of its inputs, those that the budget does not let live until then are recomputed with it (a chain is
  one proposal);
* a repetition is taken out, with those that served it alone;
* an exchange: a repetition is taken out, and up to three values are dropped where the peak then is;
* a repetition moves, to its first reader or some runs to either side;
* any value is recomputed before any of its readers;
* with `reorder`, a first run moves between its inputs and its readers.

Departures from FastSA:

1. The objective is `cost + price * burden`, not `max(budget, peak) * cost`. The burden is the excess of the peak,
   less the fewer runs reach it: unit chains have plateaus on which the peak alone does not say which way is
   down. The price starts at FastSA's (total cost / budget), and is lowered while sequences meet the budget
   and raised while they do not, so that the search stays at the edge of the budget, where the optima are.
2. Proposals are directed at the peak and carry whole chains. Nodes are not grouped.
3. Three rounds of annealing, each from the best sequence so far and cooler than the one before.

Complexity: O((d + 1) * (log n + u)) per edited run of a node with d inputs, each with u users; no limit on the
repetitions of a node. Memory O(n + edges).

The inner loop is compiled by numba. Where there is no numba for a new Python yet, the same code runs in Python,
50 to 100 times slower, with equal results for equal `seed` and `proposals`.
"""

from __future__ import annotations

import importlib.util
import math
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from remat.core.deadline import seconds_left
from remat.core.errors import RematWarning
from remat.core.interrupt import Keyboard
from remat.policies.solvers import search_kernel as plain
from remat.policies.solvers.problem import Ints, Problem, replay

__all__ = ["Ended", "Found", "SearchState", "is_compilable", "is_ready", "renumbered", "search"]

#: Why a search ended: nothing is cheaper than no repetition, a limit, `stop`, or Ctrl-C.
Ended = Literal["optimal", "seconds", "proposals", "stopped", "interrupted"]

_NOT_COMPILED = (
    "numba is not installed, so planning within a budget runs in Python: 50 to 100 times slower, and stopped "
    "by the clock, so that plans differ between runs. pip install numba, or use a Python that numba is made for."
)
# Share of the effort, and the temperature to begin with, of every round.
_ROUNDS = ((0.4, 1.0), (0.3, 0.3), (0.3, 0.1))
# Temperatures in mean costs of a repeatable node.
_HOT, _COLD = 0.3, 0.003
_LARGE = 2000  # nodes
_PRICE_STEP, _PRICE_LOW, _PRICE_HIGH = 1.006, 1e-3, 1e4
_PRICE_URGE = 0.06  # logarithm of the step until the budget is first met, up to 100 nodes
_SLICE_SECONDS = 0.05
_COMPILE_SECONDS = 15.0  # what compiling the inner loop takes, once per machine
_SLICE = 2048  # proposals of a slice if proposals are limited: part of what makes it deterministic
_COST_STEPS = 1 << 46  # costs that are not whole are rounded to this share of the total


@dataclass(frozen=True)
class SearchState:
    """Where a running search stands.

    Attributes:
        seconds: since it began, without compilation.
        proposals: made so far.
        over_bytes: by which the best sequence exceeds the budget at most, 0 if it meets it.
        extra_cost: of the best sequence, in the unit of the problem's costs.
        round: of annealing, from 0.
    """

    seconds: float
    proposals: int
    over_bytes: int
    extra_cost: float
    round: int


@dataclass(frozen=True, eq=False)
class Found:
    """The outcome of a search; peak and costs are those of `replay`.

    Attributes:
        sequence: the best found: if none meets the budget, one of the smallest peak found.
        feasible: its peak is at most the budget.
        peak_bytes, cost, extra_cost: of the sequence.
        problem: what the sequence is for; the problem given, renumbered if orders were searched.
        order: for every node of `problem` its number in the problem given.
        proposals: made; `seconds` they took, without `compile_seconds`.
        compiled: the inner loop ran compiled.
        ended: why the search ended; `optimal` if nothing is repeated and the peak is within the budget, or
            at `problem.floor_bytes` above it.
    """

    sequence: Ints
    feasible: bool
    peak_bytes: int
    cost: float
    extra_cost: float
    problem: Problem
    order: Ints
    proposals: int
    seconds: float
    compile_seconds: float
    compiled: bool
    ended: Ended


def search(
    problem: Problem,
    budget_bytes: int,
    *,
    start: Sequence[int] | Ints | None = None,
    seconds: float = 10.0,
    proposals: int | None = None,
    seed: int = 0,
    heat: float = 1.0,
    reorder: bool = False,
    compiled: bool | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Callable[[SearchState], None] | None = None,
) -> Found:
    """Searches for the cheapest sequence whose peak is at most `budget_bytes`.

    Args:
        problem: what to run.
        budget_bytes: the largest peak allowed. Below `problem.floor_bytes` the smallest peak is sought.
        start: a valid sequence to begin with; by default the one without repetitions. The result is
            never worse: not farther above the budget, nor as far and dearer.
        seconds: limit of time, unless `proposals` is given. Compilation is not counted: about 20 s on the
            first call on a machine, a fraction of a second afterwards (numba's cache).
        proposals: limit of proposals instead. The result then depends on nothing but the arguments.
        seed: of the random numbers.
        heat: factor of the temperature that every round begins with. Where few large results fill the budget,
            10 and several seeds find what 1 does not: many sequences there are better than all near them.
        reorder: search the order of the first runs, too. Only with `problem.turn == 0`; the last node stays last.
        compiled: run compiled (True, needs numba) or in Python (False); None compiles if numba is there.
        stop: asked about every 0.05 s; the search ends once it returns True.
        progress: told about every 0.05 s how things stand.

    Returns:
        The best sequence found; Ctrl-C returns it, too (`Found.ended` is then `interrupted`).

    Raises:
        ValueError: a negative limit, an invalid `start`, or `reorder` with a turn.
        ModuleNotFoundError: `compiled=True` without numba.

    Warns:
        RematWarning: `compiled=None` without numba.
    """
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes={budget_bytes}: expected a number of bytes of at least 0")
    if proposals is None and not seconds >= 0:
        raise ValueError(f"seconds={seconds}: expected a number of at least 0")
    if proposals is not None and proposals < 0:
        raise ValueError(f"proposals={proposals}: expected a number of at least 0, or None")
    if not 0 <= heat < math.inf:
        raise ValueError(f"heat={heat}: expected a number of at least 0")
    if reorder and problem.turn:
        raise ValueError(
            f"reorder=True with turn={problem.turn}: orders can be searched only if repetitions are "
            "allowed anywhere (turn=0)"
        )
    if compiled is None:
        compiled = is_compilable()
        if not compiled:
            warnings.warn(_NOT_COMPILED, RematWarning, stacklevel=2)
    compile_seconds = 0.0
    first = problem.first_runs if start is None else np.asarray(start, np.int64)
    begun = time.perf_counter()
    given = replace(_judge(problem, problem, first, budget_bytes), compiled=compiled)
    if given.ended == "optimal" or len(problem) < 3:
        return replace(given, seconds=time.perf_counter() - begun)
    if compiled:
        compile_seconds = _compile()
    walk = _Walk(problem, budget_bytes, seed, compiled, reorder)
    walk.load(_without_tail(first, len(problem)))
    clock = _Clock(begun + compile_seconds, seconds, proposals)
    ended = _anneal(walk, clock, heat, stop, progress)
    home, sequence = problem, walk.kept
    if reorder:
        home, sequence, order = renumbered(problem, sequence)
        found = replace(_judge(problem, home, sequence, budget_bytes), order=order)
    else:
        found = _judge(problem, home, sequence, budget_bytes)
    if _rank(found, budget_bytes) > _rank(given, budget_bytes):
        found = given
    return replace(
        found,
        proposals=clock.done,
        seconds=clock.elapsed(),
        compile_seconds=compile_seconds,
        compiled=compiled,
        ended="optimal" if found.ended == "optimal" else ended,
    )


def is_ready() -> bool:
    """Whether to search with the compiled inner loop: numba is there, and so is the time to compile it."""
    if not is_compilable():
        return False
    return seconds_left() >= _COMPILE_SECONDS or _is_loaded() or _is_on_disk()


def _is_loaded() -> bool:
    return _compiled_once.cache_info().currsize > 0


def _is_on_disk() -> bool:
    """Whether numba's cache has the inner loop."""
    folder = Path(_kernel(compiled=True).run.stats.cache_path or "")
    return any(folder.glob("_search_kernel.run-*.nbi"))


def is_compilable() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def renumbered(problem: Problem, sequence: Sequence[int] | Ints) -> tuple[Problem, Ints, Ints]:
    """Numbers nodes in the order of their first runs in a sequence.

    Returns:
        The problem in that order, the sequence in its numbers, and for each of its nodes the number before.

    Raises:
        ValueError: a node of the problem is not in the sequence, or runs before one that it reads.
    """
    order = np.fromiter(dict.fromkeys(int(node) for node in sequence), np.int64)
    if len(order) != len(problem):
        raise ValueError(f"the sequence has {len(order)} of the {len(problem)} nodes")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    workspace = problem.workspace
    moved = Problem(
        costs=problem.costs[order],
        sizes=problem.sizes[order],
        inputs=tuple(tuple(sorted(int(place[r]) for r in problem.inputs[v])) for v in order),
        repeatable=problem.repeatable[order],
        turn=problem.turn,
        workspace=None if workspace is None else workspace[order],
    )
    return moved, place[np.asarray(sequence, np.int64)], order


def _judge(given: Problem, home: Problem, sequence: Ints, budget_bytes: int) -> Found:
    """A sequence of `home` as a result, judged by the referee."""
    judged = replay(home, sequence)
    feasible = judged.peak_bytes <= budget_bytes
    bare = feasible and len(sequence) == len(home)
    return Found(
        sequence=sequence,
        feasible=feasible,
        peak_bytes=judged.peak_bytes,
        cost=judged.cost,
        extra_cost=judged.extra_cost,
        problem=home,
        order=given.first_runs,
        proposals=0,
        seconds=0.0,
        compile_seconds=0.0,
        compiled=False,
        ended="optimal" if bare else "seconds",
    )


def _rank(found: Found, budget_bytes: int) -> tuple[int, float]:
    return max(0, found.peak_bytes - budget_bytes), found.cost


def _without_tail(sequence: Ints, count: int) -> Ints:
    """Without the repetitions after the last first run, which serve nothing."""
    last = int(np.flatnonzero(sequence == count - 1)[0])
    return sequence[: last + 1]


class _Clock:
    """How much of the effort is spent, in seconds or in proposals."""

    def __init__(self, begun: float, seconds: float, proposals: int | None) -> None:
        self.begun = begun
        self.seconds = seconds
        self.proposals = proposals
        self.done = 0
        self.size = 64
        if proposals is None:
            # Preparation is part of the time; the shares of the rounds are of what is left.
            self.prepared = min(1.0, self.elapsed() / seconds) if seconds > 0 else 1.0

    def elapsed(self) -> float:
        return time.perf_counter() - self.begun

    def spent(self) -> float:
        """From 0 to 1."""
        if self.proposals is not None:
            return self.done / self.proposals if self.proposals else 1.0
        if self.prepared >= 1:
            return 1.0
        return (self.elapsed() / self.seconds - self.prepared) / (1 - self.prepared)

    def next_slice(self) -> int:
        if self.proposals is not None:
            return min(_SLICE, self.proposals - self.done)
        return self.size

    def ran(self, done: int, seconds: float) -> None:
        self.done += done
        if seconds < _SLICE_SECONDS / 2:
            self.size = min(2 * self.size, 1 << 20)
        elif seconds > 2 * _SLICE_SECONDS:
            self.size = max(16, self.size // 2)


def _anneal(
    walk: _Walk,
    clock: _Clock,
    warmth: float,
    stop: Callable[[], bool] | None,
    progress: Callable[[SearchState], None] | None,
) -> Ended:
    """Runs the rounds until one of the limits, or Ctrl-C; returns why it ended."""
    keyboard = Keyboard()
    ended: Ended = "interrupted"
    with keyboard.caught():
        ended = _run_rounds(walk, clock, warmth, keyboard.stops(stop), progress)
    return "interrupted" if keyboard.pressed else ended


def _run_rounds(
    walk: _Walk,
    clock: _Clock,
    warmth: float,
    stop: Callable[[], bool],
    progress: Callable[[SearchState], None] | None,
) -> Ended:
    """Runs the rounds in slices; returns why it ended."""
    whole = sum(share for share, _ in _ROUNDS)
    reached = 0.0
    for index, (share, heat) in enumerate(_ROUNDS):
        begin, reached = reached, reached + share / whole
        if index:
            walk.load(walk.kept)
        while (spent := clock.spent()) < reached:
            walk.cool(warmth * heat, min(1.0, (spent - begin) / (reached - begin)))
            before = time.perf_counter()
            wanted = clock.next_slice()
            if wanted <= 0:
                break
            done = walk.run(wanted)
            clock.ran(done, time.perf_counter() - before)
            if done < wanted:
                walk.grow()
            if walk.has_no_repetition():
                return "optimal"
            if progress is not None:
                progress(walk.state(clock, index))
            if stop():
                return "stopped"
    return "seconds" if clock.proposals is None else "proposals"


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


def _compile() -> float:
    """Compiles the inner loop, or reads it from numba's cache; returns the seconds of this call."""
    before = time.perf_counter()
    _compiled_once()
    return time.perf_counter() - before


@cache
def _compiled_once() -> None:
    pair = Problem.of([1, 1], [1, 1], [[], [0]])
    walk = _Walk(pair, 2, 0, compiled=True)
    walk.load(pair.first_runs)
    walk.run(0)


class _Walk:
    """The arrays of one search; see `_search_kernel` for what is in them."""

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
        urge = math.exp(_PRICE_URGE * min(1.0, 100 / count))
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

    def state(self, clock: _Clock, index: int) -> SearchState:
        over, cost = self.kept_rank
        return SearchState(
            seconds=clock.elapsed(),
            proposals=clock.done,
            over_bytes=over + self.lifted_bytes,
            extra_cost=(cost - self.base_cost) * self.unit,
            round=index,
        )
