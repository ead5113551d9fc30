"""Warns of what a plan had to keep because nobody can look into what computes it. Plain data, no jax."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from remat.core.errors import RematWarning
from remat.core.graph import Graph, Op
from remat.core.primitives import OpClass
from remat.plans.plan import Plan
from remat.plans.report import human_bytes, short_source

__all__ = ["Opaque", "opaque_values", "warn_of_opaque"]

# Of the bytes of the forward values, below which nothing is said; bytes that are nothing on any device; and lines
# of a message. By look; they warn, no more.
_SHARE = 0.01
_NOTHING_BYTES = 2**20
_LISTED = 5
# Custom calls, and what runs on the host: for both there may be operators of jax that do the same.
_OPAQUE = frozenset({OpClass.OPAQUE.name, OpClass.EFFECT.name})
_shown: dict[Any, Any] = {}  # so that with Python's default filters the same text is printed once


@dataclass(frozen=True)
class Opaque:
    """What the opaque operators (custom calls, callbacks) of one name on one line of code make, and a plan keeps.

    Attributes:
        name: of the primitive.
        source: `file:line` of the user's code, empty if unknown.
        reason: why it is opaque, or may not run again.
        nbytes: bytes kept, all iterations of loops together.
    """

    name: str
    source: str
    reason: str
    nbytes: int


def opaque_values(plan: Plan) -> tuple[tuple[Opaque, ...], int]:
    """Returns what a plan keeps of opaque operators, largest first, and the bytes of all forward values.

    Args:
        plan: of a whole function, with the plans of its loops.
    """
    found: dict[tuple[str, str, str], int] = defaultdict(int)
    total = 0
    for room, times in _rooms(plan, 1):
        graph = room.graph
        kept = {entry.value for entry in room.saved} - graph.alive_anyway - graph.fixed
        seen: set[int] = set()
        for op in graph.forward_ops():
            if op.loop is not None:
                continue  # a room of its own
            total += times * sum(graph.values[v].nbytes for v in op.outputs)
            held = times * _held_bytes(graph, op, kept, seen) if _is_opaque(op) else 0
            if held:
                found[op.name, op.source, op.reason] += held
    entries = (Opaque(*key, nbytes) for key, nbytes in found.items())
    return tuple(sorted(entries, key=lambda entry: (-entry.nbytes, entry.name))), total


def _held_bytes(graph: Graph, op: Op, kept: Container[int], seen: set[int]) -> int:
    """Bytes kept of what an operator makes, or in its place of what operators that fuse make of that.

    What was `seen` before counts for another.
    """
    todo, nbytes = [*op.outputs], 0
    while todo:
        value = todo.pop()
        if value in kept:
            nbytes += graph.values[value].nbytes
            continue
        users = (graph.ops[user] for user in graph.users[value])
        made = {v for o in users if o.phase == "forward" and o.fusible for v in o.outputs} - seen
        seen |= made
        todo += made
    return nbytes


def _rooms(plan: Plan, times: int) -> Iterator[tuple[Plan, int]]:
    yield plan, times
    for loop in plan.loops:
        yield from _rooms(loop.plan, times * loop.length)


def _is_opaque(op: Op) -> bool:
    return op.kind in _OPAQUE and not op.recomputable


def warn_of_opaque(plan: Plan) -> None:
    """Warns if opaque operators on one line hold more than a MiB and a per cent of the bytes of the forward values.

    One `RematWarning` for a whole plan, placed at the line that holds most.
    """
    entries, total = opaque_values(plan)
    large = [entry for entry in entries if entry.nbytes > max(_SHARE * total, _NOTHING_BYTES)]
    if not large:
        return
    lines = [f"  {_described(entry)}" for entry in large[:_LISTED]]
    if len(large) > _LISTED:
        lines.append(f"  and {len(large) - _LISTED} more")
    share = sum(entry.nbytes for entry in large) / total
    text = (
        f"{share:.0%} of the {human_bytes(total)} that the forward pass makes is kept whatever the policy says, "
        "because remat cannot look into what makes it:\n" + "\n".join(lines) + "\n"
        "Write it with operators of jax, or leave it outside of what is wrapped. To silence this: "
        'warnings.filterwarnings("ignore", category=remat.RematWarning).'
    )
    file, _, line = large[0].source.rpartition(":")
    number = int(line) if line.isdigit() else 0
    # Most frames are jax's: where the value is made is the place that can be changed.
    warnings.warn_explicit(text, RematWarning, file or "remat", number, registry=_shown)


def _described(entry: Opaque) -> str:
    where = f" at {short_source(entry.source)}" if entry.source else ""
    return f"{entry.name}{where} keeps {human_bytes(entry.nbytes)}: {entry.reason}"
