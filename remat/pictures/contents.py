"""What the predicted memory holds over time, by kind: the parts of `Prediction.alive`. For pictures.

It plays the model of `remat.memory.predict` once more and sorts every buffer into one of `KINDS`:

- `kept`: what the forward pass made and the backward pass reads as it is; what loops stacked for it is among them.
- `encoded`: the stored form of values that are kept smaller (`remat.core.forms`).
- `recomputed`: what an operator made when it ran again, and what was decoded.
- `gradients`: what depends on a cotangent.
- `loop`: what one iteration of a loop needs while the loop runs.
- `other`: forward values that are soon forgotten, copies, scratch space of libraries, zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.core.garbage import without_collection
from remat.core.graph import Graph
from remat.memory.execution import Execution, Node
from remat.memory.places import Range, occupy_by
from remat.memory.predict import executed, laid_out
from remat.plans.record import LoopRecord
from remat.plans.steps import Schedule

__all__ = ["KINDS", "Contents", "contents"]

KINDS = ("kept", "encoded", "recomputed", "gradients", "loop", "other")


@dataclass(frozen=True, slots=True)
class Contents:
    """What is alive while one kernel runs.

    Attributes:
        nbytes: bytes of each of `KINDS`.
        is_backward, is_loop: as in `Alive`.
    """

    nbytes: tuple[int, ...]
    is_backward: bool
    is_loop: bool

    @property
    def total_bytes(self) -> int:
        """`Alive.nbytes`."""
        return sum(self.nbytes)


def contents(
    graph: Graph, schedule: Schedule | None = None, *, loops: Sequence[LoopRecord] = ()
) -> tuple[Contents, ...]:
    """Returns what is alive while each kernel runs, in the order in which they run.

    Args:
        graph, schedule, loops: as in `remat.memory.predict.predict`.
    """
    with without_collection():
        execution = executed(graph, schedule, loops)
        _, layout = laid_out(execution)
        nodes = [execution.nodes[kernel.node] for kernel in layout.order]

        def kind(found: Range) -> int:
            return KINDS.index(_kind(execution, found, nodes[found.end]))

        parts = occupy_by(execution, layout, kind, len(KINDS))
        in_loops = parts[KINDS.index("loop")]
        for position, node in enumerate(nodes):
            in_loops[position] += node.working.peak_bytes if node.working else 0
    return tuple(
        Contents(nbytes, node.is_backward, node.working is not None)
        for node, nbytes in zip(nodes, zip(*parts, strict=True), strict=True)
    )


def _kind(execution: Execution, found: Range, last: Node) -> str:
    """The kind of a buffer, given the last node that needs it."""
    instance = execution.instances[found.index]
    node = execution.nodes[instance.producer] if instance.producer >= 0 else None
    if found.is_scratch or node is None or node.kind in ("zeros", "indices"):
        return "other"
    if instance.packed:
        return "encoded"
    if node.again or node.kind == "unpack":
        return "recomputed"
    if node.is_backward:
        return "gradients"
    return "kept" if last.is_backward else "other"
