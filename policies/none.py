"""`SaveAll`: keep every value the backward pass reads, as plain differentiation does.

The baseline of every comparison. Booleans are kept as they are stored by every plan: one bit per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.graph import Graph
from remat.policies.base import Decision, required_saves

__all__ = ["SaveAll"]


@dataclass(frozen=True)
class SaveAll:
    """Keeps everything the backward pass reads and recomputes nothing."""

    name: ClassVar[str] = "save_all"

    def decide(self, graph: Graph) -> Decision:
        """Returns every forward value that the backward pass reads."""
        savable = frozenset(value.id for value in graph.values if value.savable)
        return Decision(required_saves(graph, savable))
