"""`Full`: keep nothing but the inputs and recompute the whole forward pass, as `jax.checkpoint` does.

What may not run twice (loops, side effects, unknown operators, collectives) is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.core.graph import Graph
from remat.policies.base import Decision, Policy, required_saves

__all__ = ["Full"]


@dataclass(frozen=True)
class Full(Policy):
    """Keeps only what may not be recomputed."""

    name: ClassVar[str] = "full"

    def decide(self, graph: Graph) -> Decision:
        """Returns the values whose operators must not run again."""
        return Decision(required_saves(graph, frozenset()))
