"""`Names`: the user's own `jax.ad_checkpoint.checkpoint_name` tags are the saved set.

The counterpart of `jax.checkpoint_policies.save_only_these_names`, lowered staged: recomputation of a
segment waits for the cotangent that needs it, also when the whole function is wrapped once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.errors import PolicyError, nearest
from remat.graph import Graph
from remat.policies.base import Decision, required_saves

__all__ = ["Names"]


@dataclass(frozen=True)
class Names:
    """Keeps the values tagged with one of `names`, and what may not be recomputed.

    Attributes:
        names: tags to keep; None keeps every tagged value.
    """

    names: tuple[str, ...] | None = None
    name: ClassVar[str] = "names"

    def __post_init__(self) -> None:
        if self.names is not None:
            object.__setattr__(self, "names", tuple(self.names))

    def decide(self, graph: Graph) -> Decision:
        """Returns the tagged values.

        Raises:
            PolicyError: a name in `names` tags no value of the graph.
        """
        present = {tag for value in graph.values for tag in value.tags}
        self._check(present)
        chosen = present if self.names is None else set(self.names)
        wanted = {value.id for value in graph.values if chosen.intersection(value.tags)}
        notes = () if present else ("the function has no checkpoint_name tags: nothing to keep",)
        return Decision(required_saves(graph, frozenset(wanted)), notes=notes)

    def _check(self, present: set[str]) -> None:
        # A loop body may hold the tag while the graph around it does not, so a graph without any tag
        # is not an error.
        if self.names is None or not present:
            return
        if not present.intersection(self.names):
            hint = nearest(self.names[0], sorted(present)) if self.names else ""
            raise PolicyError(
                f"none of the names {list(self.names)} tags a value of the function; its "
                f"checkpoint_name tags are {sorted(present)}{hint}"
            )
