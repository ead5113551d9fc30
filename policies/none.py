"""`SaveAll`: keep every value the backward pass reads, as plain differentiation does.

The baseline of every comparison. Booleans are kept as they are stored by every plan: one bit per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.graph import Graph
from remat.policies.base import Decision
from remat.schedule import no_remat_saved

__all__ = ["SaveAll"]


@dataclass(frozen=True)
class SaveAll:
    """Keeps everything the backward pass reads and recomputes nothing."""

    name: ClassVar[str] = "save_all"

    def decide(self, graph: Graph) -> Decision:
        """Returns every forward value that the backward pass reads."""
        return Decision(frozenset(no_remat_saved(graph)))
