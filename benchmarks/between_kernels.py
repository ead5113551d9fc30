"""What XLA's kernels write for each other beyond what they must (Yu & He, section 3.7).

    python -m benchmarks.between_kernels [NAME ...] [--policies none min_cut low_memory] [--device h200]

Where a kernel reads what another one wrote, it could read less and compute the rest again: the section takes a
minimum cut between the two. Here the kernels are those that XLA made of a compiled gradient. A value costs its
write and its read; what others read too is written in any case, and costs its read; what the reader reads anyway
costs nothing. Only element-wise work is computed again, not by matmuls (which would do so once per tile), and what
is updated in place is written. Every pair is taken by itself, as in the section, so the sum over all pairs is a
bound on what cuts between pairs could save.

Two columns: pairs of one pass, forward or backward, which is what the section adds; and pairs of which the first is
of the forward and the second of the backward pass. Between those the joint cut of all policies decides already.

The networks are those of `models/development`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import networkx as nx

import remat
from models.development import NETWORKS
from remat.compiler.hlo import Computation, Instruction, Module, parse_module
from remat.compiler.kernels import Kernel

__all__ = ["Pair", "Row", "main", "measure", "pairs_of"]

_NOT_AGAIN = frozenset({
    "reduce", "reduce-window", "dot", "convolution", "scatter", "gather", "sort", "custom-call", "fusion", "map",
    "dynamic-update-slice", "rng", "rng-bit-generator", "select-and-scatter", "transpose", "copy",
})  # fmt: skip
_SAME_VALUE = frozenset({"bitcast", "get-tuple-element"})

Source = tuple[str, int]
"""An instruction that makes arrays, and which of them."""


@dataclass(frozen=True)
class Pair:
    """Two kernels, one of which reads what the other wrote.

    Attributes:
        producer, consumer: names of the two fusions.
        moved_bytes: written and read for the consumer, one execution.
        least_bytes: what the minimum cut moves.
    """

    producer: str
    consumer: str
    moved_bytes: int
    least_bytes: int


@dataclass(frozen=True)
class Row:
    """One compiled gradient.

    Attributes:
        traffic_bytes: of the program, per call.
        pairs: of kernels that touch.
        better: of these, where the cut moves less.
        excess_bytes: what the cuts move less, all pairs of one pass and all trips.
        saved_excess_bytes: the same between the forward and the backward pass.
    """

    network: str
    policy: str
    traffic_bytes: int
    pairs: int
    better: int
    excess_bytes: int
    saved_excess_bytes: int

    @property
    def share(self) -> float:
        """Of the traffic."""
        return self.excess_bytes / max(self.traffic_bytes, 1)


def pairs_of(module: Module) -> Iterator[Pair]:
    """Every two fusions of one computation of which one reads the other's results."""
    for where in module.computations.values():
        if any(i.opcode == "fusion" for i in where.instructions):
            yield from _pairs(module, where)


def _pairs(module: Module, where: Computation) -> Iterator[Pair]:
    sources = _sources(where)
    readers: defaultdict[Source, set[str]] = defaultdict(set)
    reads: dict[str, dict[Source, None]] = {}
    for instruction in where.instructions:
        if instruction.opcode in _SAME_VALUE and not instruction.is_root:
            continue
        found = [sources[name] for name in instruction.operands if name in sources]
        reads[instruction.name] = dict.fromkeys(found)
        for source in found:
            readers[source].add(instruction.name)
    for consumer in where.instructions:
        if consumer.opcode != "fusion":
            continue
        crossing: defaultdict[str, list[int]] = defaultdict(list)
        in_place = {sources[name] for name in _updated(module, consumer)}
        for name, index in reads[consumer.name]:
            if (name, index) in in_place:
                continue
            if where.by_name[name].opcode == "fusion":
                crossing[name].append(index)
        for name, indices in crossing.items():
            producer = where.by_name[name]
            written = {i for i in indices if readers[name, i] != {consumer.name}}
            known = [sources.get(operand) in reads[consumer.name] for operand in producer.operands]
            yield _pair(module, producer, consumer.name, indices, written, known)


def _updated(module: Module, fusion: Instruction) -> Iterator[str]:
    """The operands that a fusion updates in place."""
    inside = module.computations[fusion.called("calls")[0]]
    root = inside.root
    for out in [inside.by_name[n] for n in root.operands] if root.opcode == "tuple" else [root]:
        item = out
        while item.opcode in ("bitcast", "scatter", "dynamic-update-slice"):
            item = inside.by_name[item.operands[0]]
        if item.opcode == "parameter" and item is not out:
            yield fusion.operands[int(item.payload)]


def _sources(where: Computation) -> Mapping[str, Source]:
    """Of every name the instruction that made it, through bitcasts and members of tuples."""
    sources: dict[str, Source] = {}
    for instruction in where.instructions:
        if instruction.opcode == "get-tuple-element":
            place = int(instruction.attributes.get("index", "0"))
            sources[instruction.name] = sources[instruction.operands[0]][0], place
        elif instruction.opcode == "bitcast":
            sources[instruction.name] = sources[instruction.operands[0]]
        else:
            sources[instruction.name] = instruction.name, 0
    return sources


def _pair(
    module: Module,
    producer: Instruction,
    consumer: str,
    indices: Sequence[int],
    written: set[int],
    known: Sequence[bool],
) -> Pair:
    """The cut between two kernels.

    Args:
        indices: of the producer's results that the consumer reads.
        written: those of them that others read, too.
        known: for each operand of the producer, whether the consumer reads it anyway.
    """
    inside = module.computations[producer.called("calls")[0]]
    root = inside.root
    outs = [inside.by_name[n] for n in root.operands] if root.opcode == "tuple" else [root]
    anyway = {outs[index].name for index in written}
    network: Any = nx.DiGraph()
    network.add_node("source")
    for item in inside.instructions:
        if item.opcode == "tuple":
            continue
        nbytes = item.shape.bytes
        if item.opcode == "parameter":
            cost = 0 if known[int(item.payload)] else nbytes
            network.add_edge("source", ("in", item.name))
        else:
            cost = nbytes if item.name in anyway else 2 * nbytes
            if item.opcode in _NOT_AGAIN:
                network.add_edge("source", ("in", item.name))
        network.add_edge(("in", item.name), ("out", item.name), capacity=cost)
        for operand in item.operands:
            network.add_edge(("out", operand), ("in", item.name))
    wanted = {outs[index].name for index in indices}
    for name in wanted:
        network.add_edge(("out", name), "sink")
    moved = sum(
        inside.by_name[name].shape.bytes * (1 if name in anyway else 2) for name in sorted(wanted)
    )
    least = nx.minimum_cut_value(network, "source", "sink")
    return Pair(producer.name, consumer, moved, int(least))


def measure(name: str, policy: str, device: str, *, small: bool = False) -> Row:
    """Compiles the gradient of a network under a policy, and cuts between all its kernels."""
    loss, args = NETWORKS[name](small=small)
    function: Callable[..., Any] = loss
    if policy != "none":
        function = remat.checkpoint(loss, remat_policy=policy)
    report = remat.compile_report(jax.grad(function), *args, device=device)
    kernels = {kernel.name: kernel for kernel in report.kernels}
    pairs = [
        p for p in pairs_of(parse_module(report.hlo_text)) if _is_elementwise(kernels, p.consumer)
    ]
    excess_bytes = {True: 0, False: 0}
    for pair in pairs:
        first, second = kernels[pair.producer], kernels[pair.consumer]
        is_saved = _is_backward(second) and not _is_backward(first)
        excess_bytes[is_saved] += (pair.moved_bytes - pair.least_bytes) * second.trip_count
    better = sum(pair.least_bytes < pair.moved_bytes for pair in pairs)
    return Row(
        name,
        policy,
        report.hbm_traffic_bytes,
        len(pairs),
        better,
        excess_bytes[False],
        excess_bytes[True],
    )


def _is_elementwise(kernels: Mapping[str, Kernel], name: str) -> bool:
    """Whether it runs at all, and neither as a matmul nor as a convolution."""
    return name in kernels and not kernels[name].matmuls and not kernels[name].convolutions


def _is_backward(kernel: Kernel) -> bool:
    """By jax's name for what it transposed, which is also in the names of what is computed again there."""
    return "transpose(" in (kernel.op_name or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {list(NETWORKS)}")
    parser.add_argument("--policies", nargs="+", default=["none", "min_cut", "low_memory"])
    parser.add_argument("--device", default="h200")
    parser.add_argument("--small", action="store_true", help="sizes for a test")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after every row")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    print(
        f"{'network':20} {'policy':12} {'traffic':>10} {'pairs':>6} {'better':>7} {'one pass':>9} {'saved':>7}"
    )
    for name, policy in itertools.product(options.names or NETWORKS, options.policies):
        row = measure(name, policy, options.device, small=options.small)
        rows.append(row)
        saved = row.saved_excess_bytes / max(row.traffic_bytes, 1)
        traffic = f"{row.traffic_bytes / 2**30:.2f} GiB"
        print(
            f"{name:20} {policy:12} {traffic:>10} {row.pairs:6} {row.better:7} {row.share:9.1%} {saved:7.1%}",
            flush=True,
        )
        if options.json is not None:
            data = {
                "kind": "compiled, device absent",
                "device": options.device,
                "jax": jax.__version__,
                "remat": remat.__version__,
                "date": time.strftime("%Y-%m-%d"),
                "rows": [asdict(r) for r in rows],
            }
            options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
