"""`SaveAll` and `Unchanged`: recompute nothing.

`SaveAll` keeps every value the backward pass reads: the baseline of comparisons between plans. Booleans are kept
as every plan stores them, one bit per element. `Unchanged` is the plain program itself: it keeps what JAX keeps
without rematerialization, as JAX keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.core.forms import form_of
from remat.core.graph import Graph
from remat.plans.schedule import no_remat_saved
from remat.policies.base import Decision, Policy, required_saves

__all__ = ["SaveAll", "Unchanged"]


@dataclass(frozen=True)
class SaveAll(Policy):
    """Keeps everything the backward pass reads and recomputes nothing."""

    name: ClassVar[str] = "save_all"

    def decide(self, graph: Graph) -> Decision:
        """Returns every forward value that the backward pass reads."""
        everything = frozenset(value.id for value in graph.values)
        return Decision(required_saves(graph, everything))


@dataclass(frozen=True)
class Unchanged(Policy):
    """Keeps what JAX keeps without rematerialization, unencoded: it compiles to the plain program."""

    name: ClassVar[str] = "unchanged"

    def decide(self, graph: Graph) -> Decision:
        """Returns the residuals of plain differentiation."""
        kept = frozenset(no_remat_saved(graph))
        # Kept or not: masks of random bits would otherwise be packed as soon as they are drawn.
        raw = tuple(
            (v.id, "raw")
            for v in graph.values
            if v.producer is not None and (v.id in kept or form_of(v) != "raw")
        )
        return Decision(kept, forms=raw, notes=("as without rematerialization",))
