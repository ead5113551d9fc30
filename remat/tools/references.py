"""What jax's own policies would keep, as plans: the points that a curve of ours is held against.

jax's policies look at one operator at a time, so what they keep can be read off a graph. The plans here keep that,
and run again in remat's order, so that memory and time are estimated as those of remat's own plans are. jax's own
order is worse where the policy is not applied block by block; `remat.compare` compiles that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.core.errors import PolicyError, nearest
from remat.core.graph import Graph, Op
from remat.policies.base import Decision, Policy, required_saves

__all__ = ["REFERENCES", "KeptByJax", "check_reference"]

REFERENCES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
"""Those of `jax.checkpoint_policies` that go by the operator alone."""


@dataclass(frozen=True)
class KeptByJax(Policy):
    """Keeps what one of `REFERENCES` would keep, and what may not be recomputed."""

    choice: str = "dots_saveable"
    name: ClassVar[str] = "kept_by_jax"

    def __post_init__(self) -> None:
        check_reference(self.choice)

    def decide(self, graph: Graph) -> Decision:
        """Returns the results of the operators that the policy names."""
        kept = {v for op in graph.forward_ops() if self._keeps(op) for v in op.outputs}
        return Decision(required_saves(graph, frozenset(kept)))

    def _keeps(self, op: Op) -> bool:
        if self.choice == "dots_saveable":
            return op.name in ("dot_general", "conv_general_dilated")
        return self.choice != "nothing_saveable" and op.name == "dot_general" and not op.batched


def check_reference(name: str) -> None:
    """Checks that a policy of jax's can be read off a graph.

    Raises:
        PolicyError: it is none of `REFERENCES`.
    """
    if name not in REFERENCES:
        raise PolicyError(
            f"reference {name!r}: expected some of {list(REFERENCES)}, jax's policies that go by the operator "
            f"alone{nearest(str(name), REFERENCES)}"
        )
