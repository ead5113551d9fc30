"""`Echo`: recompute between compute-bound operators what then takes less memory.

Zheng, Vijaykumar and Pekhimenko, "Echo: compiler-based GPU memory footprint reduction for LSTM RNN training"
(ISCA 2020), Algorithm 1 and section V. A *feature map* is a forward value that the backward pass reads.

1. Backward (lines 5 to 11): from every feature map back to the nearest compute-bound operators. What lies in
   between is the recomputation path; the values at its border are kept instead of the feature maps.
2. Forward (lines 12 to 30): along the path, in topological order, an operator is taken off it if that releases
   at least the bytes it allocates. Its result is then kept, and is the border of what comes after it. Operators
   that read one kept value can only together release it, so they are judged together (Fig. 13).
3. Compute-bound operators never run again. One whose gradient reads only its operands is "dead" (lines 13 to
   18, Fig. 14): the joint graph shows what its gradient reads, so its result is simply not wanted, and its
   operands are feature maps like any other.
4. Masks (line 20) are kept, as bits; the path ends at them.

Guarantee: never more than plain differentiation keeps (`remat.plans.schedule.no_remat_saved`, masks as bits),
neither in bytes kept nor in the peak that the referee (`remat.plans.simulate`, which leaves out what XLA fuses
away) finds in the schedule. No compute-bound and no random operator runs again. The bytes Algorithm 1 keeps depend
on the graph's structure alone; the peak depends also on the order of its operators, and so does what departure 5
gives up. Complexity: linear in operators and operands; where the peak needs more than a glance (departure 5), a few
schedules and their replays, at most logarithmically many.

Departures from the paper:

1. The paper grows a subgraph from every compute-bound operator and takes the subgraphs to be disjoint. They
   overlap where a value feeds two of them. Here what shares a path or a kept value is one partition, so that two
   partitions share nothing, as the paper's estimate requires.
2. Allocated and released bytes are exact: a value is allocated only if something left reads it, released only if
   nothing left does, and one that is no memory of its own (an argument, a result) counts nothing. The paper
   counts all results and operands of the operators that share an operand. What was judged is not judged again.
3. Algorithm 1 judges an operator by its neighbours and can end above the baseline (a wide value kept to compute a
   narrow one). So what is left of every partition is compared as a whole with keeping its feature maps, and
   dropped unless it is smaller. Within one the algorithm stays greedy: a narrow value in the middle of a path is
   not found where a wider one before it does not pay.
4. Random bits end a path too, as drawing them is work; dropout's masks are then kept as bits. Masks made of
   nothing but arguments and constants (a causal mask) are computed again.
5. Algorithm 1 bounds the bytes kept, not the peak: what is recomputed is alive beside what it is computed from.
   Echo's peak, or what it cannot exceed if that suffices, is therefore held against the bytes that plain
   differentiation keeps, which no peak of it is below, and if it is higher, against its replay. If it is higher
   still, the partitions with most bytes alive at the peak are given up, twice as many every time, until it is not;
   in the end everything is kept. `bound_peak=False` leaves this out. What the compiler then allocates
   (`remat.memory`) is not bounded.
6. Values that cannot be kept (`Value.savable` is False: plans for `jax.checkpoint`) are always computed again,
   also by compute-bound operators, and also in the baseline that Echo is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

from remat.core.buffers import fused_values
from remat.core.forms import form_of, stored_bytes
from remat.core.garbage import without_collection
from remat.core.graph import Graph, Op
from remat.plans.schedule import build_schedule
from remat.plans.simulate import Timeline, simulate
from remat.plans.steps import Schedule
from remat.policies.base import Decision, Policy

__all__ = ["Echo"]


@dataclass(frozen=True)
class Echo(Policy):
    """Recomputation between compute-bound operators; see the module docstring.

    Attributes:
        bound_peak: give up recomputation that makes the simulated peak higher than keeping everything does.
            False is Algorithm 1 with the bytes kept as the only bound.
    """

    bound_peak: bool = True
    name: ClassVar[str] = "echo"

    def decide(self, graph: Graph) -> Decision:
        """Returns the border of what is worth recomputing, and the feature maps of the rest."""
        with without_collection():
            path = _Path(graph)
            path.trim()
            path.compare()
            given_up = _bound_peak(path) if self.bound_peak else 0
        return Decision(path.kept(), notes=tuple(_notes(path, given_up)))


def _notes(path: _Path, given_up: int) -> Iterator[str]:
    ops = path.graph.ops
    made = {v for index in path.again for v in ops[index].outputs}
    dead = sum(op.heavy and not made.isdisjoint(op.inputs) for op in path.graph.forward_ops())
    yield (
        f"{len(path.again)} operators in {len(path.parts)} partitions are computed for the backward pass; "
        f"{dead} compute-bound operators that read them are not"
    )
    if path.masks:
        yield f"{len(path.masks)} masks are kept as bits"
    if given_up:
        yield f"{given_up} partitions are kept: recomputing them would raise the peak"


class _Path:
    """The recomputation path: the forward operators that run again, and what is kept for it.

    Attributes:
        cost: bytes of keeping every value, 0 where its memory is there anyway.
        again: operators on the path.
        must: those of them that plain differentiation repeats too, because their results cannot be kept.
        masks: values that are kept as line 20 says.
        reads: feature maps, constants left out.
        wanted: by value, how many operators of the path and, as one, the backward pass read it.
        settled: operators that were judged and stay; `pins`: by value, how many of these read it.
        parts: the partitions, once they have been compared.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reads = graph.backward_reads
        self.constants = frozenset(graph.constants)
        self.operands = [tuple(dict.fromkeys(op.inputs)) for op in graph.ops]
        free = graph.alive_anyway | graph.fixed | self.constants
        self.cost = [0 if v.id in free else stored_bytes(v) for v in graph.values]
        self.masks = self._masks()
        self.must = self._expand(lambda op: False)
        self.again = self._expand(lambda op: _is_light(op) and self.masks.isdisjoint(op.outputs))
        self.wanted = [0] * len(graph.values)
        self.readers: list[list[int]] = [[] for _ in graph.values]
        for value in self.reads:
            self.wanted[value] = 1
        for index in sorted(self.again):
            for value in self.operands[index]:
                self.wanted[value] += 1
                self.readers[value].append(index)
        self.pins = [0] * len(graph.values)
        self.settled: set[int] = set()
        self.parts: list[set[int]] = []
        for index in self.again:
            made = graph.ops[index].outputs
            if any(self.wanted[v] and not graph.values[v].savable for v in made):
                self._settle(index)

    # --- backward: lines 1 to 11 ---

    def _masks(self) -> frozenset[int]:
        """Feature maps that are booleans, but for those that cost nothing to make again."""
        graph = self.graph
        from_nothing = {value for value in graph.sources if not self.cost[value]}
        found: list[int] = []
        for op in graph.forward_ops():
            if _is_light(op) and from_nothing.issuperset(op.inputs):
                from_nothing.update(op.outputs)
            elif all(graph.values[v].dtype == "bool" for v in op.outputs):
                found += [v for v in op.outputs if v in self.reads]
        return frozenset(found)

    def _expand(self, allowed: Callable[[Op], bool]) -> set[int]:
        """Operators from the feature maps back to the first that is not `allowed`.

        What makes a value that cannot be kept is always allowed, if it may run again at all.
        """
        values, ops = self.graph.values, self.graph.ops
        found: set[int] = set()
        todo = list(self.reads)
        while todo:
            value = values[todo.pop()]
            if value.producer is None or value.producer in found:
                continue
            op = ops[value.producer]
            if allowed(op) if value.savable else op.recomputable:
                found.add(op.id)
                todo += op.inputs
        return found

    # --- forward: lines 12 to 30 ---

    def trim(self) -> None:
        """Takes off the path whatever releases at least what it allocates.

        Operators are judged by their distance from the border, all of one distance at once: the outcome
        does not depend on their numbers.
        """
        for level in self._levels():
            groups = []
            seen: set[int] = set()
            for index in level:
                if index in self.again and index not in self.settled and index not in seen:
                    groups.append(self._sharing(index))
                    seen |= groups[-1]
            removed = [group for group in groups if self._pays(group)]
            for group in groups:
                for index in group:
                    self._settle(index)
            for group in removed:
                self.remove(group)

    def _levels(self) -> list[list[int]]:
        """The path by distance from its border: the longest way of operators to there."""
        values = self.graph.values
        level: dict[int | None, int] = {}
        found: list[list[int]] = []
        for index in sorted(self.again):
            before = (level.get(values[v].producer, -1) for v in self.operands[index])
            level[index] = 1 + max(before, default=-1)
            if level[index] == len(found):
                found.append([])
            found[level[index]].append(index)
        return found

    def _is_kept(self, value: int) -> bool:
        return self.graph.values[value].producer not in self.again

    def _sharing(self, start: int) -> set[int]:
        """The operators that can only together release what they read (Fig. 13)."""
        group = {start}
        done: set[int] = set()
        todo = [start]
        while todo:
            for value in self.operands[todo.pop()]:
                if value in done or not self.cost[value] or self.pins[value]:
                    continue
                done.add(value)
                if value in self.reads or not self._is_kept(value):
                    continue
                more = [i for i in self.readers[value] if i in self.again and i not in group]
                group.update(more)
                todo += more
        return group

    def _pays(self, group: set[int]) -> bool:
        """Whether taking these operators off the path releases at least what it allocates (line 30)."""
        inside: dict[int, int] = {}
        for index in group:
            for value in self.operands[index]:
                inside[value] = inside.get(value, 0) + 1
        released = sum(
            self.cost[value]
            for value, count in inside.items()
            if count == self.wanted[value] and self._is_kept(value)
        )
        made = (value for index in group for value in self.graph.ops[index].outputs)
        return released >= sum(self.cost[v] for v in made if self.wanted[v] > inside.get(v, 0))

    def _settle(self, index: int) -> None:
        if index not in self.settled:
            self.settled.add(index)
            for value in self.operands[index]:
                self.pins[value] += 1

    def remove(self, group: Iterable[int]) -> None:
        """Takes operators off the path, and those that nothing then needs."""
        todo = [index for index in group if index in self.again]
        self.again.difference_update(todo)
        while todo:
            index = todo.pop()
            settled = index in self.settled
            self.settled.discard(index)
            for value in self.operands[index]:
                self.wanted[value] -= 1
                self.pins[value] -= settled
                producer = self.graph.values[value].producer
                if producer in self.again and not self._is_wanted(producer):
                    self.again.discard(producer)
                    todo.append(producer)

    def _is_wanted(self, index: int) -> bool:
        return any(self.wanted[value] for value in self.graph.ops[index].outputs)

    # --- what is left ---

    def _partitions(self) -> list[set[int]]:
        """The path in parts that share neither a value they compute nor one that is kept for them."""
        found: list[set[int]] = []
        unseen = set(self.again)
        done: set[int] = set()
        for start in sorted(self.again):
            if start not in unseen:
                continue
            unseen.discard(start)
            part, todo = {start}, [start]
            while todo:
                index = todo.pop()
                for value in (*self.operands[index], *self.graph.ops[index].outputs):
                    producer = self.graph.values[value].producer
                    if value in done or not (self.cost[value] or producer in self.again):
                        continue
                    done.add(value)
                    more = unseen.intersection((*self.readers[value], producer))
                    unseen -= more
                    part |= more
                    todo += more
            found.append(part)
        return found

    def compare(self) -> None:
        """Drops the partitions that take no less memory than their feature maps."""
        kept, plain = self.kept(), self.plain()
        self.parts = self._partitions()
        self.drop(x for x in self.parts if self.bytes_of(x, kept) >= self.bytes_of(x, plain))

    def drop(self, parts: Iterable[set[int]]) -> None:
        """Takes whole partitions off the path, but for what must stay; the others are not touched."""
        for part in list(parts):
            self.remove(part - self.must)
        self.parts = [part & self.again for part in self.parts if not part.isdisjoint(self.again)]

    def bytes_of(self, part: set[int], among: Container[int]) -> int:
        """Bytes of what a partition reads and makes, of the values `among`."""
        linked = {v for i in part for v in (*self.operands[i], *self.graph.ops[i].outputs)}
        return sum(self.cost[v] for v in linked if v in among)

    def kept(self) -> frozenset[int]:
        """The feature maps that are not recomputed, and what the path reads from outside of it."""
        return self._border(self.again)

    def plain(self) -> frozenset[int]:
        """What plain differentiation keeps, as far as it can be kept."""
        return self._border(self.must)

    def _border(self, again: Collection[int]) -> frozenset[int]:
        read = set(self.reads)
        for index in again:
            read.update(self.operands[index])
        made = {v for index in again for v in self.graph.ops[index].outputs}
        return frozenset(read - made - self.constants)


def _is_light(op: Op) -> bool:
    """Whether an operator may be on a path: not compute bound, not random, nothing forbids it."""
    return op.recomputable and not (op.heavy or op.random or op.effectful)


# --- the peak ---


def _peak_bound_bytes(graph: Graph, kept: Collection[int]) -> int:
    """Returns bytes that the peak of `build_schedule(graph, kept)` does not exceed, without a schedule.

    Whatever order it recomputes in, a value is there at most from the first to the last of the operators that need
    it; all of these are taken to be there together.
    """
    forward, backward = [*graph.forward_ops()], [*graph.backward_ops()]
    turn, end = len(forward), len(graph.ops)
    last_forward = {v: place for place, op in enumerate(forward) for v in op.inputs}
    last = {v: place for place, op in enumerate(backward, turn) for v in op.inputs}
    first = {v: end - place for place, op in enumerate(reversed(backward), 1) for v in op.inputs}
    for value in graph.gradients:
        first.setdefault(value, end)
        last[value] = end
    for op in reversed(forward):
        # If it runs again, it makes all of its results.
        if any(v in last and v not in kept for v in op.outputs):
            start = min(first.get(v, end) for v in op.outputs)
            stop = max(last.get(v, turn) for v in op.outputs)
            for value in op.inputs:
                first[value] = min(start, first.get(value, end))
                last[value] = max(stop, last.get(value, turn))
            first.update(dict.fromkeys(op.outputs, start))
            last.update(dict.fromkeys(op.outputs, stop))

    free = {*graph.sources, *graph.cotangents, *graph.outputs, *graph.gradients}
    fused = fused_values(graph)
    change = [0] * (end + 2)

    def hold(nbytes: int, start: int, stop: int) -> None:
        change[start] += nbytes
        change[stop + 1] -= nbytes

    for place, op in enumerate((*forward, *backward)):
        for index in op.outputs:
            value = graph.values[index]
            is_kept = index in kept
            is_fused = index in fused and not is_kept
            width = 0 if index in free or is_fused else value.nbytes
            if place >= turn:
                hold(width, place, last.get(index, place))
                continue
            # A mask that is drawn is packed and read back at once, kept or not: for a moment it is there twice.
            is_coded = value.dtype == "bool" or form_of(value) != "raw"
            coded = stored_bytes(value) if is_coded else 0
            read = last_forward.get(index, place)
            hold(width + coded, place, read)
            if index in last and is_kept:
                hold(coded if is_coded else width, read + 1, last[index])
            if index in last and (is_coded or not is_kept):
                hold(width if is_kept else width + coded, first[index], last[index])
    return max(accumulate(change))


class _Replayed:
    """A schedule and what the referee says of it, asked only when needed."""

    def __init__(self, graph: Graph, kept: Collection[int]) -> None:
        self.graph = graph
        self.kept = kept

    @cached_property
    def schedule(self) -> Schedule:
        """The steps as they are lowered: without barriers in a loop's body."""
        return build_schedule(self.graph, self.kept, barriers=self.graph.multiplicity == 1)

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes after every step."""
        return simulate(self.graph, self.schedule).timeline

    def held_bytes(self) -> int:
        """Bytes that are kept when the forward pass ends: the peak is no lower."""
        graph = self.graph
        free = {*graph.sources, *graph.outputs, *graph.gradients}
        return sum(stored_bytes(graph.values[v]) for v in self.kept if v not in free)

    def is_above(self, other: _Replayed) -> bool:
        """Whether the peak is higher than the other's."""
        held_bytes = other.held_bytes()
        # Each saves what comes after it: both replays, which is the usual case, and that of the other.
        if _peak_bound_bytes(self.graph, self.kept) <= held_bytes:
            return False
        peak_bytes = self.timeline.peak_bytes
        return peak_bytes > held_bytes and peak_bytes > other.timeline.peak_bytes

    def alive_at_peak(self) -> set[int]:
        """Returns the values that are there at the peak, as they are or as bits."""
        there: set[int] = set()
        bits: set[int] = set()
        for step in self.schedule.steps[: self.timeline.peak_step + 1]:
            if step.action == "compute":
                there.update(self.graph.ops[step.target].outputs)
            elif step.action in ("encode", "decode"):
                (bits if step.action == "encode" else there).add(step.target)
            elif step.action in ("free", "drop"):
                (bits if step.action == "drop" else there).discard(step.target)
        return there | bits


def _bound_peak(path: _Path) -> int:
    """Gives up partitions until the peak is none higher than that of keeping everything; returns how many."""
    graph = path.graph
    if path.again <= path.must:
        return 0
    limit = _Replayed(graph, path.plain())
    given_up, step = 0, 1
    while not path.again <= path.must:
        found = _Replayed(graph, path.kept())
        if not found.is_above(limit):
            break
        alive = found.alive_at_peak()
        parts = [part for part in path.parts if not part <= path.must]
        parts.sort(key=lambda part: -path.bytes_of(part, alive))
        path.drop(parts[:step])
        given_up += min(step, len(parts))
        step *= 2
    return given_up
