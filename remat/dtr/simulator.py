"""The simulator simrd: replays a log within a budget, evicting and rematerializing by a heuristic.

Kirisame et al., "Dynamic tensor rematerialization" (2020), section 4. A *storage* is memory, a *tensor* a view of
one; what is evicted is a storage, and with it all its tensors become undefined. To use a tensor its operator runs
again, and before that those of its inputs that are undefined, in the order of its arguments. What an operator that
waits needs is locked: what is there at once, the rest when it is made.

Departures: none in what is computed. Rematerialization keeps its own stack instead of calling itself, so that a
chain may be as long as the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remat.core.errors import BudgetError, PolicyError
from remat.dtr.heuristics import Heuristic, Scoring, heuristic_named
from remat.dtr.log import Call, Log, Release, Share
from remat.dtr.pool import Index, Pool, Scan

__all__ = ["Eviction", "Move", "Run", "simulate"]

Eviction = Literal["eager", "banish", "ignore"]
Search = Literal["index", "scan"]
Status = Literal["ok", "out_of_memory", "thrashing"]


@dataclass(frozen=True, slots=True)
class Move:
    """A change of memory.

    Attributes:
        clock: cost spent before it.
        action: `run` (an operator for the first time), `again`, `evict`, `banish`.
        target: operator for the first two, storage for the others.
        memory_bytes: after it.
    """

    clock: int
    action: Literal["run", "again", "evict", "banish"]
    target: int
    memory_bytes: int


@dataclass(frozen=True)
class Run:
    """What a simulation came to.

    Attributes:
        status: `ok`; `out_of_memory`: an operator did not fit although all that may be evicted was; `thrashing`:
            it was ended since what ran again cost more than `thrash - 1` times the base.
        base_cost: of all operators once.
        compute_cost: of all that ran, until it ended.
        repeated_cost: of what ran again.
        peak_bytes: the most memory, constants included.
        budget_bytes: what was given, None for no limit.
        evictions: storages evicted to make room or since nobody refers to them; `banished` for good.
        rematerializations: operators that ran again.
        storage_accesses: storages looked at, to score them and to keep what scores need.
        trace: every change of memory, unless it was not wanted.
    """

    status: Status
    base_cost: int
    compute_cost: int
    repeated_cost: int
    peak_bytes: int
    budget_bytes: int | None
    evictions: int
    banished: int
    rematerializations: int
    storage_accesses: int
    trace: tuple[Move, ...] = field(default=(), repr=False)

    @property
    def overhead(self) -> float:
        """What ran again, as a share of the base."""
        return self.repeated_cost / self.base_cost if self.base_cost else 0.0


def simulate(
    log: Log,
    budget: int | float | None = None,
    heuristic: str | Scoring = "dtr_eqclass",
    eviction: Eviction = "eager",
    seed: int = 0,
    *,
    thrash: float | None = 100.0,
    trace: bool = True,
    search: Search = "index",
) -> Run:
    """Replays a log.

    Args:
        log: of `load_log`.
        budget: bytes, or a float as a share of the peak without a limit, where what nobody refers to is banished;
            None for no limit.
        heuristic: a name of `remat.dtr.heuristics.HEURISTICS`, or which factors its score has.
        eviction: what happens to a storage that nobody refers to any more: `eager` evicts it, `banish` frees it for
            good once nothing evicted needs it, and pins what is made of it, `ignore` leaves it (section 4.5).
        seed: of the heuristic `random`.
        thrash: ends the run once it comes to so many times the base, or repeats operators that cost nothing so many
            times as the log has events. The paper takes 3 in its figure 4 and 5 in its figure 5; the default only
            sees to it that runs end, and with None they may take for ever.
        trace: keep every change of memory.
        search: how the storage to evict is found: `index` looks at few, `scan` at all, as the paper counts
            accesses. Both find the same; `random` is scanned. See `remat.dtr.pool`.

    Raises:
        PolicyError: an unknown heuristic, eviction or search, or `thrash` is below 1.
        BudgetError: the budget is none.
    """
    if eviction not in ("eager", "banish", "ignore"):
        raise PolicyError(f"eviction={eviction!r}: expected 'eager', 'banish' or 'ignore'")
    if search not in ("index", "scan"):
        raise PolicyError(f"search={search!r}: expected 'index' or 'scan'")
    if thrash is not None and not thrash >= 1:
        raise PolicyError(f"thrash={thrash!r}: expected a multiple of the base from 1 on, or None")
    chosen = heuristic_named(heuristic, seed)
    limit = _budget_bytes(log, budget)
    return _Simulator(log, limit, chosen, eviction, thrash, trace, search).run()


def _budget_bytes(log: Log, budget: int | float | None) -> int | None:
    if budget is None:
        return None
    if isinstance(budget, bool) or not 0 < budget < float("inf"):
        raise BudgetError(f"budget={budget!r}: expected bytes, or a share of the peak above 0")
    if isinstance(budget, float):
        return int(budget * unlimited_peak_bytes(log))
    return int(budget)


def unlimited_peak_bytes(log: Log) -> int:
    """Returns the peak that budgets are shares of: without a limit, what nobody refers to being banished."""
    lru = heuristic_named("lru", 0)
    return _Simulator(log, None, lru, "banish", None, False, "scan").run().peak_bytes


@dataclass(slots=True)
class _Frame:
    """An operator that waits: the result for which it runs, and arguments that are missing, the last first."""

    op: int
    wanted: int
    missing: list[int]


class _OutOfMemory(Exception):
    pass


class _Thrashing(Exception):
    pass


class _Simulator:
    """The state of section 4.4; storages are known by their root tensor's number."""

    def __init__(
        self,
        log: Log,
        limit: int | None,
        heuristic: Heuristic,
        eviction: Eviction,
        thrash: float | None,
        trace: bool,
        search: Search,
    ) -> None:
        self.log, self.limit, self.eviction = log, limit, eviction
        count = log.num_tensors
        self.storage_of = [-1] * count
        self.op_of = [-1] * count
        self.is_defined = [False] * count
        self.size = [0] * count  # by storage, as all below
        self.tensors: list[list[int]] = [[] for _ in range(count)]
        self.is_resident = [False] * count
        self.locks = [0] * count
        self.refs = [0] * count
        self.is_pinned = [False] * count
        self.to_banish: set[int] = set()
        self.ops: list[Call] = []
        self.has_run: list[bool] = []
        is_scanned = search == "scan" or heuristic.scoring.is_random
        self.pool: Pool = Scan(heuristic) if is_scanned else Index(heuristic)
        self.clock = 0
        self.memory = self.peak = 0
        self.evictions = self.banished = self.rematerializations = 0
        self.base_cost = log.cost
        self.again = 0  # cost of what ran again
        self.free_again = 0  # operators of no cost that ran again
        most = float("inf") if thrash is None else thrash
        self.most_again = (most - 1) * self.base_cost if self.base_cost else 0
        self.most_free_again = most * len(log.events)
        self.moves: list[Move] | None = [] if trace else None
        self.heuristic = heuristic
        heuristic.begin(count)
        heuristic.notify = self.pool.lower

    def run(self) -> Run:
        """Replays all events, then makes all that is still referred to."""
        status: Status = "ok"
        try:
            for event in self.log.events:
                if isinstance(event, Call):
                    self._call(event)
                elif isinstance(event, Share):
                    self.refs[self.storage_of[event.tensor]] += 1
                else:
                    self._release(event)
            self._keep_outputs()
        except _OutOfMemory:
            status = "out_of_memory"
        except _Thrashing:
            status = "thrashing"
        return Run(
            status=status,
            base_cost=self.base_cost,
            compute_cost=self.clock,
            repeated_cost=self.again,
            peak_bytes=self.peak,
            budget_bytes=self.limit,
            evictions=self.evictions,
            banished=self.banished,
            rematerializations=self.rematerializations,
            storage_accesses=self.heuristic.accesses,
            trace=tuple(self.moves or ()),
        )

    # --- events

    def _call(self, call: Call) -> None:
        op = len(self.ops)
        self.ops.append(call)
        self.has_run.append(False)
        inputs = {self.storage_of[t] for t in call.inputs}
        counted: set[int] = set()
        for tensor, size, alias in zip(call.outputs, call.sizes_bytes, call.aliases, strict=True):
            storage = tensor if alias < 0 else self.storage_of[alias]
            self.storage_of[tensor], self.op_of[tensor] = storage, op
            self.tensors[storage].append(tensor)
            self.refs[storage] += 1
            self.size[storage] += size  # an alias has none
            cost = 0 if storage in counted else call.cost  # of two views by one operator once
            counted.add(storage)
            self.heuristic.made(storage, size, cost, inputs - {storage})
        self._compute(op, call.outputs[0] if call.outputs else -1)
        if call.is_constant:
            for tensor in call.outputs:
                self._pin(self.storage_of[tensor])

    def _release(self, event: Release) -> None:
        storage = self.storage_of[event.tensor]
        self.refs[storage] -= 1
        if self.refs[storage] > 0 or self.eviction == "ignore":
            return
        if self.eviction == "banish":
            self._banish(storage)
        elif storage in self.pool:
            self._evict(storage)

    def _keep_outputs(self) -> None:
        """The output condition of section 4.6: what the user still has is made, and stays."""
        for tensor in self.log.outputs:
            if not self.is_defined[tensor]:
                self._compute(self.op_of[tensor], tensor)
            self._pin(self.storage_of[tensor])

    # --- operators

    def _compute(self, op: int, wanted: int) -> None:
        """Runs an operator for one of its results, and before it all that it needs and that is undefined.

        That is made in the order of the operator's arguments. What is there is locked at once, what is made, then.
        """
        stack = [self._begin(op, wanted)]
        while stack:
            frame = stack[-1]
            if not frame.missing:
                stack.pop()
                self._execute(frame.op, frame.wanted)
            elif self.is_defined[frame.missing[-1]]:
                self._lock(self.storage_of[frame.missing.pop()])
            else:
                tensor = frame.missing[-1]
                stack.append(self._begin(self.op_of[tensor], tensor))

    def _begin(self, op: int, wanted: int) -> _Frame:
        inputs = self.ops[op].inputs
        for tensor in inputs:
            self.heuristic.accessed(self.storage_of[tensor], self.clock)
            if self.is_defined[tensor]:
                self._lock(self.storage_of[tensor])
        missing = [tensor for tensor in reversed(inputs) if not self.is_defined[tensor]]
        return _Frame(op, wanted, missing)

    def _execute(self, op: int, wanted: int) -> None:
        call = self.ops[op]
        nbytes = sum(call.sizes_bytes)
        self._make_room(nbytes)
        self._grow(nbytes)
        self.clock += call.cost
        is_first = not self.has_run[op]
        self.has_run[op] = True
        self._note("run" if is_first else "again", op)
        if not is_first:
            self.rematerializations += 1
            self.again += call.cost
            self.free_again += not call.cost
            if self.again > self.most_again or self.free_again > self.most_free_again:
                raise _Thrashing
        made: list[int] = []
        for tensor, size, alias in zip(call.outputs, call.sizes_bytes, call.aliases, strict=True):
            storage = self.storage_of[tensor]
            if alias < 0 and self.is_resident[storage]:
                self.memory -= size  # made twice: the new one is freed at once
            elif alias < 0:
                self.is_resident[storage] = True
                self.heuristic.materialized(storage)
                made.append(storage)
            self.is_defined[tensor] = True
            if is_first:  # what is made again was asked for when its reader was
                self.heuristic.accessed(storage, self.clock)
        # The pool's order, which decides between equals: results, that which was wanted last, then arguments.
        for storage in sorted(made, key=wanted.__eq__):
            self._offer(storage)
        for tensor in call.inputs:
            self._unlock(self.storage_of[tensor])
        if self.to_banish:
            for storage in [s for s in self.to_banish if self._may_banish(s)]:
                self._banish(storage)

    # --- memory

    def _make_room(self, nbytes: int) -> None:
        if self.limit is None:
            return
        while self.memory + nbytes > self.limit:
            victim = self.pool.cheapest(self.clock)
            if victim is None:
                raise _OutOfMemory
            self._evict(victim)

    def _grow(self, nbytes: int) -> None:
        self.memory += nbytes
        self.peak = max(self.peak, self.memory)

    def _lock(self, storage: int) -> None:
        self.locks[storage] += 1
        self.pool.discard(storage)

    def _unlock(self, storage: int) -> None:
        self.locks[storage] -= 1
        self._offer(storage)

    def _pin(self, storage: int) -> None:
        self.is_pinned[storage] = True
        self.pool.discard(storage)

    def _offer(self, storage: int) -> None:
        """Puts a storage into the pool if it may be evicted."""
        if self.is_resident[storage] and not self.locks[storage] and not self.is_pinned[storage]:
            self.pool.add(storage)

    def _evict(self, storage: int) -> None:
        self._forget(storage)
        self.evictions += 1
        self.heuristic.evicted(storage)
        self._note("evict", storage)

    def _forget(self, storage: int) -> None:
        self.pool.discard(storage)
        self.is_resident[storage] = False
        self.memory -= self.size[storage]
        for tensor in self.tensors[storage]:
            self.is_defined[tensor] = False

    def _may_banish(self, storage: int) -> bool:
        dependents = self.heuristic.dependents[storage]
        return not self.locks[storage] and all(self.is_resident[d] for d in dependents)

    def _banish(self, storage: int) -> None:
        """Frees a storage for good, now or when nothing evicted needs it any more."""
        if not self._may_banish(storage):
            self.to_banish.add(storage)
            return
        self.to_banish.discard(storage)
        if self.is_resident[storage]:
            self._forget(storage)
        for dependent in self.heuristic.dependents[storage]:
            self._pin(dependent)
        self.heuristic.removed(storage)
        self.banished += 1
        self._note("banish", storage)

    def _note(self, action: Literal["run", "again", "evict", "banish"], target: int) -> None:
        if self.moves is not None:
            self.moves.append(Move(self.clock, action, target, self.memory))
