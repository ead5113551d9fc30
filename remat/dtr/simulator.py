"""The simulator simrd: replays a log within a budget, evicting and rematerializing by a heuristic.

Kirisame et al., "Dynamic tensor rematerialization" (2020), section 4. A *storage* is memory, a *tensor* a view of
one; what is evicted is a storage, and with it all its tensors become undefined. To use a tensor its operator runs
again, and before that those of its inputs that are undefined, in the order of their numbers. What an operator that
waits needs is locked.

Departures: none in what is computed. Rematerialization keeps its own stack instead of calling itself, so that a
chain may be as long as the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remat.core.errors import BudgetError, PolicyError
from remat.dtr.heuristics import Heuristic, Scoring, heuristic_named
from remat.dtr.log import Call, Log, Release, Share

__all__ = ["Eviction", "Move", "Run", "simulate"]

Eviction = Literal["eager", "banish", "ignore"]
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
            it was ended since it had computed more than `thrash` times what the log does.
        base_cost: of all operators once.
        compute_cost: of all that ran, until it ended.
        peak_bytes: the most memory, constants included.
        budget_bytes: what was given, None for no limit.
        evictions: storages evicted to make room or since nobody refers to them; `banished` for good.
        rematerializations: operators that ran again.
        storage_accesses: storages looked at, to score them and to keep what scores need.
        trace: every change of memory, if it was asked for.
    """

    status: Status
    base_cost: int
    compute_cost: int
    peak_bytes: int
    budget_bytes: int | None
    evictions: int
    banished: int
    rematerializations: int
    storage_accesses: int
    trace: tuple[Move, ...] = field(default=(), repr=False)

    @property
    def overhead(self) -> float:
        """What was computed again, as a share of the base."""
        return (self.compute_cost - self.base_cost) / self.base_cost if self.base_cost else 0.0


def simulate(
    log: Log,
    *,
    budget: int | float | None = None,
    heuristic: str | Scoring = "dtr_eqclass",
    eviction: Eviction = "eager",
    seed: int = 0,
    thrash: float | None = None,
    trace: bool = False,
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
        thrash: ends the run once it has computed so many times the base; None never does.
        trace: keep every change of memory.

    Raises:
        PolicyError: an unknown heuristic or eviction.
        BudgetError: the budget is none.
    """
    if eviction not in ("eager", "banish", "ignore"):
        raise PolicyError(f"eviction={eviction!r}: expected 'eager', 'banish' or 'ignore'")
    limit = _budget_bytes(log, budget)
    chosen = heuristic_named(heuristic, seed)
    return _Simulator(log, limit, chosen, eviction, thrash, trace).run()


def _budget_bytes(log: Log, budget: int | float | None) -> int | None:
    if budget is None:
        return None
    if isinstance(budget, bool) or not budget > 0:
        raise BudgetError(f"budget={budget!r}: expected bytes, or a share of the peak above 0")
    if isinstance(budget, float):
        free = _Simulator(log, None, heuristic_named("lru", 0), "banish", None, False).run()
        return int(budget * free.peak_bytes)
    return budget


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
        self.pool: dict[int, None] = {}  # evictable storages, in the order in which they became so
        self.clock = 0
        self.memory = self.peak = 0
        self.evictions = self.banished = self.rematerializations = 0
        self.base_cost = log.cost
        self.most_cost = None if thrash is None else thrash * self.base_cost
        self.moves: list[Move] | None = [] if trace else None
        self.heuristic = heuristic
        heuristic.begin(count)

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
        for tensor, size, alias in zip(call.outputs, call.sizes_bytes, call.aliases, strict=True):
            storage = tensor if alias < 0 else self.storage_of[alias]
            self.storage_of[tensor], self.op_of[tensor] = storage, op
            self.tensors[storage].append(tensor)
            self.refs[storage] += 1
            self.size[storage] += size  # an alias has none
            self.heuristic.made(storage, size, call.cost, inputs - {storage})
        self._compute(op)
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
        live: dict[int, int] = {}
        for event in self.log.events:
            if isinstance(event, Call):
                live.update(dict.fromkeys(event.outputs, 1))
            else:
                live[event.tensor] += 1 if isinstance(event, Share) else -1
        for tensor in sorted(t for t, refs in live.items() if refs > 0):
            if not self.is_defined[tensor]:
                self._compute(self.op_of[tensor])
            self._pin(self.storage_of[tensor])

    # --- operators

    def _compute(self, op: int) -> None:
        """Runs an operator, and before it all that it needs and that is undefined."""
        stack: list[tuple[int, bool, tuple[int, ...]]] = [(op, False, ())]
        while stack:
            current, is_ready, wanted = stack.pop()
            call = self.ops[current]
            if is_ready:
                self._execute(current, call)
                continue
            if wanted and all(self.is_defined[t] for t in wanted):
                continue  # it was made meanwhile with something else
            for tensor in call.inputs:
                self._lock(self.storage_of[tensor])
                self.heuristic.accessed(self.storage_of[tensor], self.clock)
            stack.append((current, True, ()))
            missing: dict[int, list[int]] = {}
            for tensor in sorted({t for t in call.inputs if not self.is_defined[t]}):
                missing.setdefault(self.op_of[tensor], []).append(tensor)
            stack += [(other, False, tuple(ts)) for other, ts in reversed(missing.items())]

    def _execute(self, op: int, call: Call) -> None:
        nbytes = sum(call.sizes_bytes)
        self._make_room(nbytes)
        self._grow(nbytes)
        self.clock += call.cost
        if self.most_cost is not None and self.clock > self.most_cost:
            raise _Thrashing
        is_first = not self.has_run[op]
        self.has_run[op] = True
        self.rematerializations += not is_first
        self._note("run" if is_first else "again", op)
        for tensor, size, alias in zip(call.outputs, call.sizes_bytes, call.aliases, strict=True):
            storage = self.storage_of[tensor]
            if alias < 0 and self.is_resident[storage]:
                self.memory -= size  # made twice: the new one is freed at once
            elif alias < 0:
                self.is_resident[storage] = True
                self.heuristic.materialized(storage)
            self.is_defined[tensor] = True
            if is_first:  # what is made again was asked for when its reader was
                self.heuristic.accessed(storage, self.clock)
        for tensor in call.inputs:
            self._unlock(self.storage_of[tensor])
        for tensor in call.outputs:
            self._offer(self.storage_of[tensor])
        if self.to_banish:
            for storage in [s for s in self.to_banish if self._may_banish(s)]:
                self._banish(storage)

    # --- memory

    def _make_room(self, nbytes: int) -> None:
        if self.limit is None:
            return
        while self.memory + nbytes > self.limit:
            victim = self.heuristic.cheapest(self.pool, self.clock)
            if victim is None:
                raise _OutOfMemory
            self._evict(victim)

    def _grow(self, nbytes: int) -> None:
        self.memory += nbytes
        self.peak = max(self.peak, self.memory)

    def _lock(self, storage: int) -> None:
        self.locks[storage] += 1
        self.pool.pop(storage, None)

    def _unlock(self, storage: int) -> None:
        self.locks[storage] -= 1
        self._offer(storage)

    def _pin(self, storage: int) -> None:
        self.is_pinned[storage] = True
        self.pool.pop(storage, None)

    def _offer(self, storage: int) -> None:
        """Puts a storage into the pool if it may be evicted."""
        if self.is_resident[storage] and not self.locks[storage] and not self.is_pinned[storage]:
            self.pool.setdefault(storage)

    def _evict(self, storage: int) -> None:
        self._forget(storage)
        self.evictions += 1
        self.heuristic.evicted(storage)
        self._note("evict", storage)

    def _forget(self, storage: int) -> None:
        self.pool.pop(storage, None)
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
