"""One value of a plan: what was decided about it, why, what it costs to keep and to make again, who reads it.

Values are named as people see them: by number (`57`, in a loop `scan0/57`), by dtype and shape, by their place in
the source (`gpt.py:124`), by a tag of `checkpoint_name`, a scope, or the primitive that makes them. Plain data, no
jax.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from remat.core.cost import op_seconds
from remat.core.devices import get_device
from remat.core.errors import PlanError
from remat.core.forms import stored_bytes
from remat.core.graph import Graph, Op, Value
from remat.plans.record import PlanRecord
from remat.plans.report import makers
from remat.plans.words import short_scope, short_source

__all__ = ["Decided", "Explanation", "Place", "Reader", "explain", "find_values"]

Decided = Literal[
    "kept", "encoded", "recomputed", "argument", "result", "constant", "not needed", "backward"
]
"""What becomes of a value between the forward and the backward pass."""

_NUMBER = re.compile(r"(?:[^/\s]+/)*\d+")
_NEAREST = 3


@dataclass(frozen=True)
class Place:
    """A value of a plan, or of the plan of a loop inside it.

    Attributes:
        path: of the loop, with a `/` behind it; empty outside of loops.
        plan: of the loop's body, or the whole.
        value: number in `plan.graph`.
        times: how often the loop runs in all.
    """

    path: str
    plan: PlanRecord
    value: int
    times: int

    @property
    def name(self) -> str:
        """What `find_values` finds it by."""
        return f"{self.path}{self.value}"


@dataclass(frozen=True)
class Reader:
    """An operator that reads a value: in the forward or the backward pass, or again in the backward pass."""

    name: str
    label: str
    source: str
    count: int


@dataclass(frozen=True)
class Explanation:
    """What a plan does with a value; bytes, operations and seconds are of one iteration, if in a loop.

    Attributes:
        value: its name, as `find_values` takes it.
        label: dtype and shape.
        made_by: the operator; empty for an argument.
        scope, source: where that is in the user's code.
        tags: names given by `checkpoint_name`.
        times: iterations, if in a loop.
        decided: what becomes of it; `why`, in words.
        form: in which it is kept, or would be.
        nbytes: as it is computed; `kept_bytes`: as it is kept, or would be.
        kept_seconds: to write and read these bytes once, by the device's bandwidth: an estimate.
        again: the operators that make it from what the plan keeps besides it, costliest first.
        again_flops, again_seconds: of these operators; estimates of seconds by roofline. None if it cannot be.
        runs_again: how often its operator does run again.
        forward_readers, backward_readers: who reads it; what runs again reads it in the backward pass.
    """

    value: str
    label: str
    made_by: str
    scope: str
    source: str
    tags: tuple[str, ...]
    times: int
    decided: Decided
    why: str
    form: str
    nbytes: int
    kept_bytes: int
    kept_seconds: float
    again: tuple[str, ...]
    again_flops: int | None
    again_seconds: float | None
    runs_again: int
    forward_readers: tuple[Reader, ...]
    backward_readers: tuple[Reader, ...]


def explain(place: Place) -> Explanation:
    """Returns what a plan does with a value, and why."""
    plan, graph = place.plan, place.plan.graph
    value = graph.values[place.value]
    op = None if value.producer is None else graph.ops[value.producer]
    entry = next((entry for entry in plan.saved if entry.value == value.id), None)
    runs_again = sum(e.times for e in plan.recomputed if op is not None and e.op == op.id)
    is_kept = entry is not None and not entry.is_input
    form = entry.form if entry is not None and is_kept else "raw"
    kept_bytes = entry.nbytes if entry is not None and is_kept else _would_take(value)
    device = get_device(plan.device)
    kept_seconds = 2 * kept_bytes / device.memory_bytes_per_second
    ops = _again(plan, value.id)
    flops = None if ops is None else sum(op.flops for op in ops)
    costs = {} if ops is None else {op.id: op_seconds(graph, op, device) for op in ops}
    seconds = None if ops is None else sum(costs.values())
    decided, why = _decided(graph, value, op, form if is_kept else None, runs_again)
    if entry is not None and is_kept:
        why = entry.why
    elif decided == "recomputed" and seconds is not None:
        why = (
            "that takes less time than to write it and read it back"
            if seconds <= kept_seconds
            else "the plan pays this time for the memory"
        )
    forward, backward = _readers(plan, value.id)
    return Explanation(
        value=place.name,
        label=value.label,
        made_by=op.name if op else "",
        scope=short_scope(op.scope) if op else "",
        source=op.source if op else "",
        tags=value.tags,
        times=place.times,
        decided=decided,
        why=why,
        form=form,
        nbytes=value.nbytes,
        kept_bytes=kept_bytes,
        kept_seconds=kept_seconds,
        again=tuple(op.name for op in sorted(ops or (), key=lambda op: -costs[op.id])),
        again_flops=flops,
        again_seconds=seconds,
        runs_again=runs_again,
        forward_readers=forward,
        backward_readers=backward,
    )


def _would_take(value: Value) -> int:
    return value.nbytes if value.producer is None else stored_bytes(value)


def _decided(
    graph: Graph, value: Value, op: Op | None, form: str | None, runs_again: int
) -> tuple[Decided, str]:
    if form is not None:
        return ("kept" if form == "raw" else "encoded"), ""
    if value.id in graph.constants:
        return "constant", "known while tracing: part of the program"
    if op is None:
        if value.id in graph.cotangents:
            return "backward", "a cotangent: the backward pass begins with it"
        return "argument", "alive anyway: keeping it costs nothing"
    if op.phase == "backward":
        return "backward", "made in the backward pass: there is nothing to keep"
    if runs_again:
        return "recomputed", "made again"
    if value.id in graph.outputs:
        return "result", "a result of the function: alive anyway"
    return "not needed", "the backward pass does not read it, and makes nothing again that does"


def _again(plan: PlanRecord, value: int) -> list[Op] | None:
    """The operators that make a forward value from what is kept besides it; None if one may not run again."""
    graph = plan.graph
    if graph.values[value].producer is None or not graph.forward_values[value]:
        return None
    kept = frozenset(entry.value for entry in plan.saved) - {value}
    ops = sorted(makers(graph, value, kept), key=lambda op: op.id)
    return ops if all(op.recomputable for op in ops) else None


def _readers(plan: PlanRecord, value: int) -> tuple[tuple[Reader, ...], tuple[Reader, ...]]:
    graph = plan.graph
    again = {entry.op for entry in plan.recomputed}
    ops = [graph.ops[number] for number in graph.users[value]]
    forward = [op for op in ops if op.phase == "forward"]
    backward = [op for op in ops if op.phase == "backward" or op.id in again]
    return _counted(graph, forward), _counted(graph, backward)


def _counted(graph: Graph, ops: list[Op]) -> tuple[Reader, ...]:
    found: dict[tuple[str, str, str], int] = {}
    for op in ops:
        label = graph.values[op.outputs[0]].label if op.outputs else ""
        key = (op.name, label, op.source)
        found[key] = found.get(key, 0) + 1
    return tuple(Reader(*key, count) for key, count in found.items())


def find_values(plan: PlanRecord, query: str) -> list[Place]:
    """Returns the values that a word means, those of the forward pass first, larger ones first.

    Args:
        plan: any plan.
        query: number, label, `file.py:12`, tag, scope or primitive; see the module.

    Raises:
        PlanError: there is none; names what is spelt alike.
    """
    places = list(_places(plan, "", 1))
    if _NUMBER.fullmatch(query):
        found = [place for place in places if place.name == query]
        if not found:
            raise PlanError(_no_number(plan, query))
        return found
    found = [place for place in places if query in _names(place) or _is_at(place, query)]
    if not found:
        raise PlanError(_no_such(places, query))

    def order(place: Place) -> tuple[bool, int, int]:
        graph = place.plan.graph
        is_late = not graph.forward_values[place.value]
        return is_late, -graph.values[place.value].nbytes * place.times, place.value

    return sorted(found, key=order)


def _places(plan: PlanRecord, path: str, times: int) -> Iterator[Place]:
    for value in plan.graph.values:
        yield Place(path, plan, value.id, times)
    for loop in plan.loops:
        yield from _places(loop.plan, f"{path}{loop.path}/", times * loop.length)


def _names(place: Place) -> set[str]:
    """Every word that means a value, but for its place in the source."""
    value = place.plan.graph.values[place.value]
    names = {value.label, *value.tags}
    if value.producer is not None:
        op = place.plan.graph.ops[value.producer]
        scope = short_scope(op.scope)
        parts = scope.split("/")
        names |= {op.name, *parts, *("/".join(parts[i:]) for i in range(len(parts)))}
    return names - {""}


def _is_at(place: Place, query: str) -> bool:
    source = _source(place)
    if not source:
        return False
    file = source.rpartition(":")[0]
    return any(f"/{where}".endswith(f"/{query.removeprefix('./')}") for where in (source, file))


def _source(place: Place) -> str:
    producer = place.plan.graph.values[place.value].producer
    return "" if producer is None else place.plan.graph.ops[producer].source


def _no_number(plan: PlanRecord, query: str) -> str:
    path, _, _ = query.rpartition("/")
    for part in filter(None, path.split("/")):
        inner = next((loop.plan for loop in plan.loops if loop.path == part), None)
        if inner is None:
            loops = [loop.path for loop in plan.loops]
            return (
                f"there is no value {query}: the plan has no loop {part!r}; its loops are {loops}"
            )
        plan = inner
    return (
        f"there is no value {query}; values are numbered 0 to {len(plan.graph.values) - 1}"
        f"{f' in {path}' if path else ''}"
    )


def _no_such(places: list[Place], query: str) -> str:
    words: set[str] = set()
    for place in places:
        words |= _names(place)
        if source := _source(place):
            words.add(short_source(source).rpartition("/")[2])
    file, _, line = query.rpartition(":")
    close = difflib.get_close_matches(query, sorted(words), n=_NEAREST)
    if line.isdecimal():  # of that file the nearest lines
        lines = [word for word in words if f"/{word.rpartition(':')[0]}".endswith(f"/{file}")]
        near = sorted(
            lines, key=lambda word: (abs(int(word.rpartition(":")[2]) - int(line)), len(word))
        )
        close = near[:_NEAREST] or close
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return (
        f"no value is called {query!r}{hint} A value is named by its number (57, scan0/57), its dtype and shape, "
        "its source line (file.py:12), its checkpoint_name, a part of its scope, or its primitive"
    )
