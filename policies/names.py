"""`Names`: the user's own `jax.ad_checkpoint.checkpoint_name` tags are the saved set.

The counterpart of `jax.checkpoint_policies.save_only_these_names`, lowered staged: recomputation of a
segment waits for the cotangent that needs it, also when the whole function is wrapped once.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from remat.core.errors import PolicyError, nearest
from remat.core.graph import Graph
from remat.policies.base import Decision, Policy, required_saves

__all__ = ["Names"]


@dataclass(frozen=True)
class Names(Policy):
    """Keeps the values tagged with one of `names`, and what may not be recomputed.

    Attributes:
        names: tags to keep, a string for one; None keeps every tagged value.

    Raises:
        PolicyError: a name is no string.
    """

    names: tuple[str, ...] | None = None
    name: ClassVar[str] = "names"

    def __post_init__(self) -> None:
        if self.names is None:
            return
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        if not names or not all(isinstance(name, str) for name in names):
            raise PolicyError(
                f"Names(names={self.names!r}): expected names as they are given to checkpoint_name, at least one; "
                "or None for all"
            )
        object.__setattr__(self, "names", names)

    def decide(self, graph: Graph) -> Decision:
        """Returns the tagged values; a graph need not have any: they may lie in a loop, or around it."""
        present = {tag for value in graph.values for tag in value.tags}
        chosen = present if self.names is None else set(self.names)
        wanted = {value.id for value in graph.values if chosen.intersection(value.tags)}
        return Decision(required_saves(graph, frozenset(wanted)))

    def check_tags(self, found: Set[str]) -> None:
        """Checks the names against those of a whole function, its loops included.

        Args:
            found: every `checkpoint_name` in it.

        Raises:
            PolicyError: a name tags nothing, or there is no tag at all.
        """
        missing = [name for name in self.names or () if name not in found]
        if found and not missing:
            return
        if not found:
            what = "Names()" if self.names is None else f"Names({self.names!r})"
            raise PolicyError(
                f"{what} keeps what is tagged, and the function has no checkpoint_name tags: tag values with "
                "jax.ad_checkpoint.checkpoint_name(x, 'name'), or use remat_policy='full' to keep nothing"
            )
        raise PolicyError(
            f"the names {missing} tag no value of the function; its checkpoint_name tags are "
            f"{sorted(found)}{nearest(missing[0], sorted(found))}"
        )
