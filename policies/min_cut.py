"""`MinCut`: fusion-aware min-cut checkpointing.

Yu & He, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware": the network of
Algorithm 1, the capacities of Algorithm 2, the bans of sections 3.1 and 3.4, and the tie-break towards the
backward side.

Guarantee: the plan minimises, over all valid saved sets, the sum of the capacities below; the cut's capacity
equals the flow's value (the plan's certificate). Complexity: one maximum flow on about two vertices per
forward value (Dinic, compiled), exact in integers.

Departures from the paper:

1. Values and operators are separate vertices, so that an operator with several results is banned or
   recomputed as a whole.
2. The tie-break is not a re-weighting: of all minimum cuts the one closest to the backward pass is taken. It
   is unique, so the plan does not depend on the order in which the program was traced.
3. Booleans weigh one bit per element, the form in which every plan keeps them.
4. The paper minimises traffic alone. `memory_weight` adds the bytes kept to the objective, for values that
   are not alive anyway (arguments, results). With `memory_weight=0` it is the paper's objective. Where none is
   given it is 1.25, or, in a network of matmuls, the least at which no more bytes are kept than by jax's
   `dots_saveable`: the results of matmuls and of what else may not run again.
5. The paper bans an operator that is not fusible with a backward user (Lemma 3.1: recomputing it cannot avoid
   writing and reading its result). That is right for traffic, not for memory. With `memory_weight > 0` it is
   therefore priced at the write and the read it costs, as a capacity from the source to the operator; with
   `memory_weight=0` it is banned.
   Nor are values that are repeated alive one by one: in a long chain of what fuses (a simulation, step by step)
   nothing is kept, and everything is repeated before the first of it is needed. A loss whose plan is predicted to
   take no less than no plan at all is therefore planned by Chen et al.'s segments or not at all: what takes the
   least, of what moves no more than that plan or than none. Where nothing is compute-bound, segments are tried in
   any case.
6. `heavy="roofline"` prices a compute-bound operator at its flops times the device's bytes per flop instead of
   banning it. Attention scores are then recomputed, large matmuls are kept.

`MinCut.paper()` is the paper's algorithm without 4 and 5. Section 3.7 (cuts between two fusion groups) is left out:
XLA forms its own groups, and `benchmarks.between_kernels` measures what such cuts could save of its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from remat.core.devices import get_device
from remat.core.errors import PolicyError, number_or_nan
from remat.core.graph import Graph, Implementations
from remat.policies.base import Decision, Policy, check_implementations
from remat.policies.buffers.saved_cut import MOST_WEIGHT, CutRules, saved_cut
from remat.policies.sublinear import Sublinear

__all__ = ["LowMemory", "MinCut"]


@dataclass(frozen=True)
class MinCut(Policy):
    """Fusion-aware min-cut checkpointing; see the module docstring.

    Attributes:
        memory_weight: bytes of traffic that keeping one byte is worth, 0 for the paper's objective; None for the
            least from 1.25 that keeps no more than `dots_saveable` would (departure 4).
        heavy: `ban` never recomputes compute-bound operators; `batched` allows matmuls with batch
            dimensions (attention scores) at their roofline price; `roofline` allows all of them so.
        random: `ban` keeps random bits or what is made of them; `cheap` lets them be drawn again.
        reduction_ratio: a reduction whose result is at least this much smaller is kept (section 3.4).
        device: whose flops per byte the roofline price uses.
        implementations: which rewrites of the backward pass to plan with: `exact` for those whose gradients are
            bit-equal, `none`, `all`, or names of rules or kinds; see `remat.rewrite.rules`.
    """

    memory_weight: float | None = None
    heavy: Literal["ban", "batched", "roofline"] = "ban"
    random: Literal["ban", "cheap"] = "ban"
    reduction_ratio: int = 4
    device: str = "h200"
    implementations: Implementations = "exact"
    name: ClassVar[str] = "min_cut"

    def __post_init__(self) -> None:
        weight = 0 if self.memory_weight is None else number_or_nan(self.memory_weight)
        if not 0 <= weight <= MOST_WEIGHT:
            raise PolicyError(
                f"MinCut(memory_weight={self.memory_weight!r}): expected a number from 0 (the paper's "
                f"objective, traffic only) to {MOST_WEIGHT}, or None (as much as `dots_saveable` asks for)"
            )
        _one_of("heavy", self.heavy, ("ban", "batched", "roofline"))
        _one_of("random", self.random, ("ban", "cheap"))
        if not number_or_nan(self.reduction_ratio) >= 1:
            raise PolicyError(
                f"MinCut(reduction_ratio={self.reduction_ratio!r}): expected an integer of at least 1"
            )
        get_device(self.device)
        check_implementations("MinCut", self.implementations)

    @classmethod
    def paper(cls) -> MinCut:
        """Returns the algorithm as published: traffic is the only objective."""
        return cls(memory_weight=0, implementations="none")

    def instead(self) -> tuple[Policy, ...]:
        """Returns segments; nothing for the paper's objective (departure 5)."""
        return () if self.memory_weight == 0 else (Sublinear(device=self.device),)

    def decide(self, graph: Graph) -> Decision:
        """Returns the minimum cut's values with the flow that certifies it."""
        return saved_cut(
            graph,
            CutRules(
                self.memory_weight, self.heavy, self.random, self.reduction_ratio, self.device
            ),
        )


@dataclass(frozen=True)
class LowMemory(MinCut):
    """`MinCut` that repeats matmuls with batch dimensions (attention scores) and draws masks again.

    The bar of departure 4 is then jax's `dots_with_no_batch_dims_saveable`: no more is kept than it keeps.
    """

    heavy: Literal["ban", "batched", "roofline"] = "batched"
    random: Literal["ban", "cheap"] = "cheap"
    name: ClassVar[str] = "low_memory"


def _one_of(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise PolicyError(f"MinCut({name}={given!r}): expected one of {list(choices)}")
