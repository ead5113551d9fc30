"""Sequences that dynamic tensor rematerialization (DTR) comes to on a scheduling problem.

Kirisame et al., "Dynamic tensor rematerialization" (2020). A problem is written as a log, the log is replayed by
the simulator (`remat.dtr.simulator`) within a limit, and what ran, in the order in which it ran, is the sequence.
DTR decides as the program goes on and knows nothing of what comes; the limit is all that it is told.

Departures, since a sequence of ours runs the forward pass once and each backward node once:

1. What may not run again is pinned from its first run (section 4.2 has pinned constants only). With eager eviction
   a pinned storage stays until the end, so backward results, which die soon, are not pinned there: DTR may evict
   one, and what it would run for it again is left out.
2. Repetitions before the turn are left out: the value stays from its first run to its last reader before the turn.
3. Repetitions that nobody reads are left out.

So a sequence may peak above the limit, which `replay` says, or below it: DTR keeps dead values until it needs room.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.dtr.heuristics import Scoring
from remat.dtr.log import Call, Event, Log, Release
from remat.dtr.simulator import Eviction, Run, simulate
from remat.policies.solvers.problem import Problem

__all__ = ["STEP", "Rules", "Simulations", "log_of", "sequence_of_run"]

STEP = 0.98
"""From one limit to the next: so much of a budget may be given away, as `remat.planning.numbers.SLACK` allows."""

# Costs in a log are integers: picoseconds, if costs are seconds.
_UNITS_PER_COST = 10**12


@dataclass(frozen=True)
class Rules:
    """How DTR decides; the arguments of `remat.dtr.simulate`.

    Attributes:
        heuristic: what is evicted.
        eviction: what happens to what the program no longer refers to.
        seed: of a random heuristic.
        thrash: a run is ended once it has computed so many times what the program does.
    """

    heuristic: str | Scoring
    eviction: Eviction
    seed: int
    thrash: float


def log_of(problem: Problem, eviction: Eviction) -> Log:
    """Returns a problem as a log: call `i` runs node `i`.

    A result is referred to until its last reader has run. What takes no memory, such as what lies in the caller's,
    is pinned: evicting it would gain nothing. A node's workspace is a result of its own, released at once.
    """
    pins_all = eviction == "banish"  # which frees pinned storages, too
    tensors: list[int] = []
    events: list[Event] = []
    last_reader = [max(users, default=node) for node, users in enumerate(problem.users)]
    count = 0
    for node, reads in enumerate(problem.inputs):
        size, extra = int(problem.sizes[node]), int(problem.extra_while_running[node])
        sizes = (size, extra) if extra else (size,)
        outputs = tuple(range(count, count + len(sizes)))
        count += len(sizes)
        tensors.append(outputs[0])
        once = not problem.repeatable[node] and (pins_all or node < problem.turn)
        is_pinned = not extra and (once or not size)
        cost = round(float(problem.costs[node]) * _UNITS_PER_COST)
        inputs = tuple(tensors[read] for read in reads)
        aliases = (-1,) * len(sizes)
        events.append(Call(f"node {node}", inputs, outputs, sizes, aliases, cost, is_pinned))
        events += [Release(tensor) for tensor in outputs[1:]]
        dead = (read for read in (*reads, node) if last_reader[read] == node)
        events += [Release(tensors[read]) for read in dead if problem.sizes[read]]
    return Log(tuple(events), count)


def sequence_of_run(problem: Problem, run: Run) -> tuple[int, ...]:
    """Returns what a run of a problem's log computed, as a sequence that is valid; see the module docstring.

    Args:
        problem: the problem.
        run: with status `ok` and a trace.
    """
    first_runs = 0
    ran: list[tuple[int, bool]] = []
    for move in run.trace:
        if move.action == "run":
            first_runs += 1
            ran.append((move.target, True))
        elif (
            move.action == "again"
            and first_runs >= problem.turn
            and problem.repeatable[move.target]
        ):
            ran.append((move.target, False))
    read_later: set[int] = set()
    kept: list[int] = []
    for node, is_first in reversed(ran):
        if is_first or node in read_later:
            kept.append(node)
            read_later.discard(node)
            read_later.update(problem.inputs[node])
    return tuple(reversed(kept))


class Simulations:
    """One problem simulated within several limits, each once.

    Attributes:
        limits_bytes: descending, each `STEP` times the one before: from what is enough for DTR without an eviction
            for want of room, to what the largest node needs.
    """

    def __init__(self, problem: Problem, rules: Rules) -> None:
        self.problem = problem
        self.rules = rules
        self.log = log_of(problem, rules.eviction)
        free = simulate(self.log, heuristic="lru", eviction=rules.eviction)
        self.limits_bytes = [max(free.peak_bytes, 1)]
        while self.limits_bytes[-1] > max(problem.floor_bytes, 1):
            below = min(int(STEP * self.limits_bytes[-1]), self.limits_bytes[-1] - 1)
            self.limits_bytes.append(max(below, problem.floor_bytes, 1))
        self._made: dict[int, tuple[int, ...] | None] = {}

    def within(self, limit_bytes: int) -> tuple[int, ...] | None:
        """Returns the sequence that comes of a limit; None if the run did not come to its end.

        Complexity: that of the heuristic, see `remat.dtr.heuristics`.
        """
        if limit_bytes not in self._made:
            rules = self.rules
            run = simulate(
                self.log,
                budget=limit_bytes,
                heuristic=rules.heuristic,
                eviction=rules.eviction,
                seed=rules.seed,
                thrash=rules.thrash,
                trace=True,
            )
            sequence = sequence_of_run(self.problem, run) if run.status == "ok" else None
            self._made[limit_bytes] = sequence
        return self._made[limit_bytes]
