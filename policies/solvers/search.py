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
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from remat.core.deadline import seconds_left
from remat.core.errors import RematWarning
from remat.core.interrupt import Keyboard
from remat.policies.solvers.problem import Ints, Problem, replay
from remat.policies.solvers.search_walk import Walk, compile_kernel, is_kernel_there

__all__ = ["Ended", "Found", "SearchState", "is_compilable", "is_ready", "renumbered", "search"]

#: Why a search ended: nothing is cheaper than no repetition, a limit, `stop`, or Ctrl-C.
Ended = Literal["optimal", "seconds", "proposals", "stopped", "interrupted"]

_NOT_COMPILED = (
    "numba is not installed, so planning within a budget runs in Python: 50 to 100 times slower, and stopped "
    "by the clock, so that plans differ between runs. pip install numba, or use a Python that numba is made for."
)
# Share of the effort, and the temperature to begin with, of every round. Chosen by look: each is three times cooler
# than the one before, and none makes a plan worse, as all begin with the best.
_ROUNDS = ((0.4, 1.0), (0.3, 0.3), (0.3, 0.1))
_SLICE = 2048  # proposals of a slice if proposals are limited: part of what makes it deterministic
_SLICE_SECONDS = 0.05  # of a slice if time is limited: how soon `stop` is asked
_COMPILE_SECONDS = 15.0  # what compiling the inner loop takes, once per machine


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
        compile_seconds = compile_kernel()
    walk = Walk(problem, budget_bytes, seed, compiled, reorder)
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
    return seconds_left() >= _COMPILE_SECONDS or is_kernel_there()


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
    walk: Walk,
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
    walk: Walk,
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
                progress(_state(walk, clock, index))
            if stop():
                return "stopped"
    return "seconds" if clock.proposals is None else "proposals"


def _state(walk: Walk, clock: _Clock, index: int) -> SearchState:
    over, cost = walk.kept_rank
    return SearchState(
        seconds=clock.elapsed(),
        proposals=clock.done,
        over_bytes=over + walk.lifted_bytes,
        extra_cost=(cost - walk.base_cost) * walk.unit,
        round=index,
    )
