"""The runtime of DTR: runs operators, evicts what is cheapest when memory is short, makes it again when it is read.

Kirisame et al., "Dynamic tensor rematerialization" (2020), algorithms 1 and 2 and section 4, on arrays of jax. A
storage is the array of one result of an operator. jax has no views: a result that is an operand is that operand's
storage. A storage is referred to by values of the program; when the last is gone it is evicted at once (eager
eviction, section 4.5), and forgotten when nothing that was made from it is left.

The notes of finalisers (`remat.dtr.runtime.storages`) are read before each operator.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import jax
import numpy as np

from remat import compat
from remat.core.avals import aval_bytes
from remat.core.errors import BudgetError, TraceError
from remat.dtr.heuristics import Scoring, heuristic_named
from remat.dtr.pool import Index, Pool, Scan
from remat.dtr.runtime.groups import Group
from remat.dtr.runtime.operators import (
    OPERATORS,
    Costs,
    array_bytes,
    host_bytes,
    spec_of,
)
from remat.dtr.runtime.statistics import RunStatistics
from remat.dtr.runtime.storages import Call, Reference, Storage
from remat.dtr.simulator import Move

__all__ = ["Machine"]

_FEWEST_SLOTS = 256  # of the heuristic's tables, at first


class Machine:
    """Runs operators within a budget.

    Args:
        limit_bytes: of the arrays it makes, and of what XLA needs while an operator runs; None for no limit.
        heuristic: a name of `remat.dtr.heuristics.HEURISTICS`, or which factors its score has.
        costs: of operators: by the compiler's counts, or the least time that each took so far.
        seed: of the heuristic `random`.
        keeps_trace: keep every change of memory.
        on_move: is told every change of memory as soon as it is done.

    Raises:
        PolicyError: an unknown heuristic.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        heuristic: str | Scoring,
        *,
        costs: Costs = "roofline",
        seed: int = 0,
        keeps_trace: bool = False,
        on_move: Callable[[Move], None] | None = None,
    ) -> None:
        self._limit = limit_bytes
        self._named = heuristic
        self._seed = seed
        self._costs = costs
        self._moves: list[Move] | None = [] if keeps_trace else None
        self._names: list[str] = []
        self._on_move = on_move
        self._memory = self._peak = self._result_bytes = 0
        self._clock = self._base_cost = 0
        self._calls = self._again = self._evictions = self._releases = self._compilations = 0
        self._released: deque[Storage] = deque()
        self._dead: deque[tuple[int, int]] = deque()
        self._storages: dict[int, weakref.ref[Storage]] = {}
        self._next = 0  # number of the next storage
        self._is_closed = False
        self._accesses_before = 0
        self._tables(_FEWEST_SLOTS)

    # --- what jax asks for

    def run(self, primitive: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
        """Runs a primitive on references and plain values."""
        key = (primitive, compat.structure_of(params))
        name = _name_of(primitive, params)
        return self._run(name, key, lambda: compat.bound(primitive, params), operands)

    def run_equation(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs an equation on references and plain values."""

        def function(*arrays: Any) -> Sequence[Any]:
            return compat.evaluate_equation(eqn, arrays)

        key = compat.equation_structure(eqn)
        return self._run(_name_of(eqn.primitive, eqn.params), key, lambda: function, operands)

    def run_group(self, group: Group, operands: Sequence[Any]) -> list[Any]:
        """Runs equations as one operator, on references and plain values."""
        return self._run(group.name, group.structure, lambda: group.evaluate, operands)

    def read(self, reference: Reference) -> jax.Array:
        """Returns the array of a reference, made again if it is away."""
        self._open()
        self._settle()
        storage = reference.storage
        if storage.array is None:
            assert storage.call is not None
            self._compute(storage.call)
        self._access(storage)
        assert storage.array is not None
        return storage.array

    def unsupported(self, what: str) -> TraceError:
        """Returns the error for what cannot be run operator by operator."""
        return TraceError(
            f"{what}: the runtime of `remat.dtr` runs a function operator by operator on arrays. What is under "
            "`jax.jit` inside of it is one operator and may be anything that jax compiles; a program that is "
            "traced as a whole takes `remat.checkpoint`."
        )

    # --- what the run ends with

    def mark_result(self, reference: Reference) -> None:
        """Notes that a reference will be returned: it is evicted when no other is left."""
        storage = reference.storage
        storage.is_result = True
        self._withdraw(self._slots[storage.number])
        self._offer(storage)

    def expect(self, results: Iterable[Any]) -> None:
        """Looks whether results of these types fit into the budget.

        Raises:
            BudgetError: they do not, whatever is evicted.
        """
        nbytes = sum(map(aval_bytes, results))
        if self._limit is not None and nbytes > self._limit:
            raise BudgetError(
                f"the results alone take {nbytes} bytes, and budget={self._limit}, which they count in: results "
                "stay until they are returned",
                smallest_peak_bytes=nbytes,
            )

    def results(self, references: Sequence[Reference], *, stay: bool) -> list[jax.Array]:
        """Makes references available at once: the output condition (section 4.6).

        Args:
            references: what is returned.
            stay: they are not evicted later either.
        """
        arrays = []
        storages = dict.fromkeys(reference.storage for reference in references)
        try:
            for reference in references:
                arrays.append(self.read(reference))
                self._lock(reference.storage)
        finally:
            for reference in references[: len(arrays)]:
                self._unlock(reference.storage)
        for storage in storages if stay else ():
            self._pin(storage)
        self._result_bytes = sum(storage.nbytes for storage in storages)
        return arrays

    def close(self) -> None:
        """Frees all arrays, whoever still refers to them."""
        self._is_closed = True
        for storage in self._alive():
            storage.array, storage.call = None, None

    def evict_all(self) -> None:
        """Evicts what may be evicted, after an operator that did not come to its end."""
        self._settle()
        for storage in self._alive():
            if self._may_evict(storage):
                self._evict(storage)
        self._memory = sum(s.nbytes for s in self._alive() if s.array is not None)

    def statistics(self) -> RunStatistics:
        """Returns what happened so far."""
        return RunStatistics(
            budget_bytes=self._limit,
            peak_bytes=self._peak,
            result_bytes=self._result_bytes,
            operators=self._calls,
            rematerializations=self._again,
            evictions=self._evictions,
            releases=self._releases,
            compilations=self._compilations,
            base_cost=self._base_cost,
            compute_cost=self._clock,
            storage_accesses=self._accesses_before + self._heuristic.accesses,
            trace=tuple(self._moves or ()),
            names=tuple(self._names),
        )

    # --- operators

    def _open(self) -> None:
        if self._is_closed:
            raise TraceError(
                "a value of a run of `remat.dtr` is used after that run: return it, as a result or with "
                "`has_aux=True`, instead of keeping it elsewhere"
            )

    def _run(
        self,
        name: str,
        key: Hashable,
        function: Callable[[], Callable[..., Sequence[Any]]],
        operands: Sequence[Any],
    ) -> list[Any]:
        self._open()
        self._settle()
        with compat.untraced():
            held = tuple(map(_held, operands))
            specs = tuple((isinstance(x, Storage) and x.spec) or spec_of(x) for x in held)
            operator, is_new = OPERATORS.get(name, key, function, specs)
            self._compilations += is_new
            call = Call(self._calls, operator, held)
            made = self._outputs(call)
            self._compute(call)
        if not operator.is_pure:
            for storage in made:
                self._pin(storage)
                storage.call = None
        references = [Reference(storage, self._released) for storage in made]
        results: list[Any] = []
        for place in operator.places:
            if isinstance(place, np.ndarray):
                results.append(place)
            else:
                results.append(references[place] if place >= 0 else operands[~place])
        return results

    def _outputs(self, call: Call) -> list[Storage]:
        """Makes the storages of a new call, still empty."""
        inputs = call.inputs()
        made = []
        kept = call.operator.avals
        for aval, nbytes in zip(kept, call.operator.out_bytes, strict=True):
            if len(self._numbers) == self._capacity:
                self._renumber()
            storage = Storage(self._next, aval, nbytes, call, self._dead)
            self._storages[self._next] = weakref.ref(storage)
            call.outputs.append(self._storages[self._next])
            self._next += 1
            made.append(storage)
            self._enter(storage, inputs)
        return made

    def _enter(self, storage: Storage, inputs: Iterable[Storage]) -> None:
        slot = self._slots[storage.number] = len(self._numbers)
        self._numbers.append(storage.number)
        cost = storage.call.cost if storage.call is not None else 0
        dependencies = [self._slots[x.number] for x in inputs]
        self._heuristic.made(slot, storage.nbytes, cost, dependencies)

    def _compute(self, call: Call) -> None:
        """Runs a call, and before it all that it needs and that is away (algorithm 1, without recursion)."""
        locked: list[Storage] = []
        stack: list[tuple[Call, bool, tuple[Storage, ...]]] = [(call, False, ())]
        try:
            while stack:
                current, is_ready, wanted = stack.pop()
                if is_ready:
                    action = "again" if current.has_run else "run"
                    self._execute(current)
                    self._note(action, current.number)
                    for storage in current.inputs():  # the last that were locked
                        locked.pop()
                        self._unlock(storage)
                    continue
                if wanted and all(storage.array is not None for storage in wanted):
                    continue  # it was made meanwhile with something else
                missing: dict[Call, list[Storage]] = {}
                for storage in current.inputs():
                    self._lock(storage)
                    locked.append(storage)
                    self._access(storage)
                    if storage.array is None:
                        assert storage.call is not None
                        missing.setdefault(storage.call, []).append(storage)
                stack.append((current, True, ()))
                order = sorted(missing.items(), key=lambda item: item[0].number, reverse=True)
                stack += [(other, False, tuple(storages)) for other, storages in order]
        except BaseException:
            for storage in locked:
                self._unlock(storage)
            raise

    def _execute(self, call: Call) -> None:
        operator = call.operator
        need = sum(operator.out_bytes) + operator.temp_bytes + host_bytes(call.operands)
        self._make_room(call, need)
        self._peak = max(self._peak, self._memory + need)
        arrays = [x.array if isinstance(x, Storage) else x for x in call.operands]
        # jax runs no compiled program under `jax.disable_jit`.
        is_disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        with jax.disable_jit(False) if is_disabled else nullcontext():
            try:
                if self._costs == "measured":
                    results, cost = operator.timed(arrays)
                    self._learn(call, cost)
                else:
                    results = operator.run(*arrays)
            except Exception as error:
                if (found := compat.found_by_debug_nans(error)) is None:
                    raise
                message = f"invalid value ({found}) encountered in {operator.name}"
                raise FloatingPointError(message) from error
        if self._costs != "measured" and self._limit is not None and operator.on_host:
            jax.block_until_ready(
                results
            )  # what is evicted there is free when its readers are done
        for weak, array in zip(call.outputs, results, strict=True):
            storage = weak()
            if storage is None or storage.array is not None:
                continue  # nobody needs it, or it is there: the new one is freed at once
            storage.array = array
            storage.nbytes = array_bytes(array)
            self._memory += storage.nbytes
            self._heuristic.materialized(self._slots[storage.number])
            if not call.has_run:
                storage.spec = spec_of(array)
            self._offer(storage)
        self._clock += call.cost
        if call.has_run:
            self._again += 1
        else:
            self._calls += 1
            self._base_cost += call.cost
            if self._moves is not None:
                self._names.append(operator.name)
            for weak in call.outputs:
                storage = weak()
                if storage is not None:
                    self._access(storage)
        call.has_run = True

    def _learn(self, call: Call, cost: int) -> None:
        """A call that ran costs what was measured; in the heuristic's tables, which add up, since it first ran."""
        if not call.has_run:
            for weak in call.outputs:
                storage = weak()
                if storage is not None:
                    self._heuristic.made(self._slots[storage.number], 0, cost - call.cost, ())
            call.cost = cost

    # --- memory

    def _make_room(self, call: Call, need: int) -> None:
        if self._limit is None:
            return
        while self._memory + need > self._limit:
            slot = self._pool.cheapest(self._clock)
            if slot is None:
                slot = self._results.cheapest(self._clock)
            if slot is None:
                raise self._too_small(call, need)
            self._evictions += 1
            self._evict(self._at(slot))

    def _too_small(self, call: Call, need: int) -> BudgetError:
        operator = call.operator
        inputs = sum(storage.nbytes for storage in call.inputs())
        smallest = self._memory + need
        others = smallest - need - inputs
        types = ", ".join(aval.str_short() for aval in operator.avals)
        parts = [f"{inputs} bytes of operands", f"{sum(operator.out_bytes)} of results"]
        if operator.temp_bytes:
            parts.append(f"{operator.temp_bytes} of XLA's temporaries")
        if others > 0:
            parts.append(f"{others} of what waits for it or may not be made twice")
        return BudgetError(
            f"operator `{operator.name}` -> {types} does not fit into budget={self._limit} bytes: it takes "
            f"{smallest} bytes, {', '.join(parts)}, with everything else evicted. The smallest budget with which "
            f"it runs is {smallest}; smaller operators (less under one `jax.jit`) take less.",
            smallest_peak_bytes=smallest,
        )

    def _at(self, slot: int) -> Storage:
        storage = self._storages[self._numbers[slot]]()
        assert storage is not None
        return storage

    def _access(self, storage: Storage) -> None:
        storage.accessed = self._clock
        self._heuristic.accessed(self._slots[storage.number], self._clock)

    def _lock(self, storage: Storage) -> None:
        storage.locks += 1
        self._withdraw(self._slots[storage.number])

    def _unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        self._offer(storage)

    def _pin(self, storage: Storage) -> None:
        storage.is_pinned = True
        self._withdraw(self._slots[storage.number])

    def _offer(self, storage: Storage) -> None:
        if storage.array is not None and not storage.locks and not storage.is_pinned:
            pool = self._results if storage.is_result else self._pool
            pool.add(self._slots[storage.number])

    def _may_evict(self, storage: Storage) -> bool:
        slot = self._slots.get(storage.number, -1)
        return slot in self._pool or slot in self._results

    def _withdraw(self, slot: int) -> None:
        """Takes a storage out of what may be evicted."""
        self._pool.discard(slot)
        self._results.discard(slot)

    def _evict(self, storage: Storage) -> None:
        slot = self._slots[storage.number]
        self._withdraw(slot)
        storage.array = None
        self._memory -= storage.nbytes
        if self._heuristic.dependents[slot] or storage.call is not None:
            self._heuristic.evicted(slot)
        self._note("evict", storage.number)

    def _settle(self) -> None:
        """Reads the notes of finalisers: what nobody refers to is evicted, what nothing needs is forgotten."""
        while self._released or self._dead:
            while self._released:
                storage = self._released.popleft()
                if self._may_evict(storage):
                    self._releases += 1
                    self._evict(storage)
                del storage
            while self._dead:
                number, nbytes = self._dead.popleft()
                self._storages.pop(number, None)
                slot = self._slots.pop(number, None)
                if slot is not None:
                    self._withdraw(slot)
                    self._heuristic.removed(slot)
                self._memory -= nbytes

    def _tables(self, count: int) -> None:
        """Begins with empty tables of the heuristic, for `count` storages."""
        self._capacity = count
        self._slots: dict[int, int] = {}  # of the heuristic, by storage
        self._numbers: list[int] = []  # of storages, by slot
        self._heuristic = heuristic_named(self._named, self._seed + self._next)
        self._heuristic.begin(count)
        kind = Scan if self._heuristic.scoring.is_random else Index
        # What may be evicted, by slot; results are evicted when no other is left.
        self._pool: Pool = kind(self._heuristic)
        self._results: Pool = kind(self._heuristic)
        self._heuristic.notify = self._lower

    def _lower(self, slot: int) -> None:
        self._pool.lower(slot)
        self._results.lower(slot)

    def _alive(self) -> list[Storage]:
        return [s for weak in list(self._storages.values()) if (s := weak()) is not None]

    def _renumber(self) -> None:
        """Gives the heuristic larger tables, without what is gone."""
        self._settle()
        alive = [storage for storage in self._alive() if storage.number in self._slots]
        self._accesses_before += self._heuristic.accesses
        self._tables(max(_FEWEST_SLOTS, 2 * len(alive)))
        for storage in alive:
            self._enter(storage, storage.call.inputs() if storage.call is not None else ())
            self._heuristic.accessed(self._slots[storage.number], storage.accessed)
        for storage in alive:
            if storage.array is None and (storage.call is None or storage.call.has_run):
                self._heuristic.evicted(self._slots[storage.number])
            self._offer(storage)

    def _note(self, action: Literal["run", "again", "evict"], target: int) -> None:
        if self._moves is None and self._on_move is None:
            return
        move = Move(self._clock, action, target, self._memory)
        if self._moves is not None:
            self._moves.append(move)
        if self._on_move is not None:
            self._on_move(move)


def _name_of(primitive: Any, params: Mapping[str, Any]) -> str:
    is_jitted = primitive.name in ("jit", "pjit") and params.get("name")
    return f"{primitive.name}:{params['name']}" if is_jitted else primitive.name


def _held(operand: Any) -> Any:
    """What a call keeps of an operand: NumPy's arrays may be changed behind its back."""
    if isinstance(operand, Reference):
        return operand.storage
    return operand.copy() if isinstance(operand, np.ndarray) else operand
