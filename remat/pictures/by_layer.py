"""What every layer keeps, before and after, and repeats. Plain data; the sums are the totals of the plan.

A layer is a named scope up to its first numbered part that has parts of its own (`GPT/block_3`), or else as many
parts as give few layers; where the function has no scopes, the line of the source. The layers of a loop's body
count once per iteration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from remat.core.cost import op_seconds
from remat.core.devices import get_device
from remat.core.graph import Graph, Op
from remat.pictures.style import printable
from remat.plans.record import LoopRecord, PlanRecord
from remat.plans.schedule import no_remat_saved
from remat.plans.words import short_scope, short_source

__all__ = ["Layer", "by_layer", "fewer"]

_NUMBERED = re.compile(r"\d")
_MOST_PARTS, _FEW = 6, 16  # so many layers can be read beside one another; chosen by look


@dataclass(frozen=True)
class Layer:
    """What one layer keeps and repeats.

    Attributes:
        name: of the layer.
        before_bytes: kept for the backward pass without rematerialization.
        raw_bytes, encoded_bytes: kept with the plan, as it is and encoded.
        repeated_seconds: roofline estimate of what runs again; `repeated_flops`: its operations.
    """

    name: str
    before_bytes: int = 0
    raw_bytes: int = 0
    encoded_bytes: int = 0
    repeated_seconds: float = 0.0
    repeated_flops: int = 0

    def __add__(self, other: Layer) -> Layer:
        return Layer(
            self.name,
            self.before_bytes + other.before_bytes,
            self.raw_bytes + other.raw_bytes,
            self.encoded_bytes + other.encoded_bytes,
            self.repeated_seconds + other.repeated_seconds,
            self.repeated_flops + other.repeated_flops,
        )

    def __mul__(self, times: int) -> Layer:
        return Layer(
            self.name,
            self.before_bytes * times,
            self.raw_bytes * times,
            self.encoded_bytes * times,
            self.repeated_seconds * times,
            self.repeated_flops * times,
        )


def by_layer(plan: PlanRecord) -> tuple[Layer, ...]:
    """Returns the layers of a plan in the order of the program, those left out that keep and repeat nothing.

    Their sums are `baseline_saved_bytes`, `saved_bytes`, `recompute_flops` and `recompute_seconds`.
    """
    loops = {entry.path: entry for entry in plan.loops}
    before, after = _stacked(plan, loops)
    own = sorted(_layers(plan, loops), key=lambda pair: pair[0])
    merged = _merged(own)
    short = _short([layer.name for _, layer in merged])
    found = [(at, replace(x, name=name)) for (at, x), name in zip(merged, short, strict=True)]
    for path, entry in loops.items():
        first = min((op.id for op in plan.graph.ops if op.loop == path), default=0)
        found += [(first, layer) for layer in _of_loop(entry, before[path], after[path])]
    ordered = [layer for _, layer in sorted(found, key=lambda pair: pair[0])]
    return tuple(layer for layer in ordered if layer != Layer(layer.name))


def fewer(layers: Sequence[Layer], most: int) -> tuple[Layer, ...]:
    """Returns the layers, and if there are more than `most` the smaller ones as one, the last."""
    if len(layers) <= most:
        return tuple(layers)
    total = sum(layers, Layer(""))

    def share(layer: Layer) -> float:
        nbytes = max(layer.before_bytes, layer.raw_bytes + layer.encoded_bytes)
        seconds = layer.repeated_seconds / (total.repeated_seconds or 1.0)
        return nbytes / (total.before_bytes or 1) + seconds

    order = sorted(layers, key=share, reverse=True)
    large = set(map(id, order[: most - 1]))
    rest = [layer for layer in layers if id(layer) not in large]
    together = sum(rest, Layer(f"{len(rest)} smaller"))
    return (*(layer for layer in layers if id(layer) in large), together)


def _layers(plan: PlanRecord, loops: Container[str | None]) -> list[tuple[int, Layer]]:
    """What is kept and repeated outside of planned loops, each with its place in the program."""
    graph, found = plan.graph, []
    plain = graph.plain or graph
    names = _Names(graph, plain)
    for entry in plan.saved:
        if _costs(graph, entry.value) and _loop_of(graph, entry.value) not in loops:
            name, nbytes = names.of_value(graph, entry.value), entry.nbytes
            is_raw = entry.form == "raw"
            layer = Layer(name, raw_bytes=nbytes) if is_raw else Layer(name, encoded_bytes=nbytes)
            found.append((_place(graph, entry.value), layer))
    for value in no_remat_saved(plain):
        if _costs(plain, value) and _loop_of(plain, value) not in loops:
            layer = Layer(names.of_value(plain, value), before_bytes=plain.values[value].nbytes)
            found.append((_place(plain, value), layer))
    device = get_device(plan.device)
    for again in plan.recomputed:
        op = graph.ops[again.op]
        seconds = again.times * op_seconds(graph, op, device)
        flops = again.flops * again.times
        found.append((op.id, Layer(names.of(op), repeated_seconds=seconds, repeated_flops=flops)))
    return found


def _stacked(
    plan: PlanRecord, loops: Mapping[str, LoopRecord]
) -> tuple[Counter[str], Counter[str]]:
    """By loop the bytes that it hands to the backward pass: were it not planned, and as it is."""
    before, after = Counter(dict.fromkeys(loops, 0)), Counter(dict.fromkeys(loops, 0))
    plain = plan.graph.plain or plan.graph
    for value in no_remat_saved(plain):
        loop = _loop_of(plain, value)
        if loop is not None and loop in loops and _costs(plain, value):
            before[loop] += plain.values[value].nbytes
    for entry in plan.saved:
        loop = _loop_of(plan.graph, entry.value)
        if loop is not None and loop in loops and _costs(plan.graph, entry.value):
            after[loop] += entry.nbytes
    for path, entry in loops.items():
        body = entry.plan
        before[path] += entry.length * (body.baseline_saved_bytes - body.saved_bytes)
    return before, after


def _of_loop(entry: LoopRecord, before_bytes: int, after_bytes: int) -> list[Layer]:
    """The layers of a loop's body, times its iterations, and what else the loop hands on."""
    where = f"{entry.path} ×{entry.length}"
    body = [layer * entry.length for layer in by_layer(entry.plan)]
    total = sum(body, Layer(where))
    rest = replace(
        Layer(where),
        before_bytes=before_bytes - total.before_bytes,
        raw_bytes=after_bytes - total.raw_bytes - total.encoded_bytes,
    )
    if min(rest.before_bytes, rest.raw_bytes) < 0:  # two layers share what is stacked once
        return [total + rest]
    return [*(replace(layer, name=f"{where}: {layer.name}") for layer in body), rest]


def _costs(graph: Graph, value: int) -> bool:
    return value not in graph.alive_anyway and value not in graph.fixed


def _loop_of(graph: Graph, value: int) -> str | None:
    producer = graph.values[value].producer
    return None if producer is None else graph.ops[producer].loop


def _place(graph: Graph, value: int) -> int:
    producer = graph.values[value].producer
    return -1 if producer is None else producer


class _Names:
    """What the layers of some graphs are called."""

    def __init__(self, *graphs: Graph) -> None:
        ops = [op for graph in graphs for op in graph.forward_ops()]
        paths = {tuple(short_scope(op.scope).split("/")) for op in ops}
        self.parents = {path[:n] for path in paths for n in range(1, len(path))}
        self.parts = 1
        for parts in range(2, _MOST_PARTS + 1):
            if len({self._cut(path, parts) for path in paths}) <= _FEW:
                self.parts = parts

    def of(self, op: Op) -> str:
        """The layer of an operator."""
        path = tuple(short_scope(op.scope).split("/"))
        name = "/".join(self._cut(path, self.parts)) or short_source(op.source) or op.name
        return printable(name)

    def of_value(self, graph: Graph, value: int) -> str:
        """The layer of a value; inputs have one only if they live for one iteration."""
        producer = graph.values[value].producer
        return "carried" if producer is None else self.of(graph.ops[producer])

    def _cut(self, path: tuple[str, ...], parts: int) -> tuple[str, ...]:
        for n, part in enumerate(path, start=1):
            if _NUMBERED.search(part) and path[:n] in self.parents:
                return path[:n]
        return path[:parts]


def _merged(layers: Iterable[tuple[int, Layer]]) -> list[tuple[int, Layer]]:
    """Layers of one name together, at the place of the first."""
    found: dict[str, tuple[int, Layer]] = {}
    for place, layer in layers:
        first, known = found.get(layer.name, (place, Layer(layer.name)))
        found[layer.name] = first, known + layer
    return list(found.values())


def _short(names: Sequence[str]) -> list[str]:
    """The last parts of every name, as many as tell it from the others."""
    parts = [name.split("/") for name in names]
    lengths = [1] * len(parts)
    while True:
        ends = ["/".join(p[-n:]) for p, n in zip(parts, lengths, strict=True)]
        alike = Counter(ends)
        longer = [
            n + (alike[end] > 1 and n < len(p))
            for p, n, end in zip(parts, lengths, ends, strict=True)
        ]
        if longer == lengths:
            return ends
        lengths = longer
