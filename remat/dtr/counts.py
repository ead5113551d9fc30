"""What a log comes to: counts and bytes, as the tables of the published logs have them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from remat.dtr.log import Log, Share
from remat.dtr.simulator import unlimited_peak_bytes

__all__ = ["Statistics", "statistics"]


@dataclass(frozen=True)
class Statistics:
    """What a log comes to.

    Attributes:
        ops: operators, constants included.
        tensors: results of operators, constants included.
        op_edges: pairs of operators one of which reads what the other makes.
        events: steps of the published simulator: an operator, a reference more or less, a pin for every constant,
            and at the end one for every reference that was made to what is still referred to.
        peak_bytes: without a limit, what nobody refers to being banished; budgets are shares of it.
        constant_bytes: of weights and inputs.
        bottleneck_bytes: the most that an operator makes and reads at once, constants left out; no budget below
            that can do.
        cost: of all operators once, nanoseconds.
    """

    ops: int
    tensors: int
    op_edges: int
    events: int
    peak_bytes: int
    constant_bytes: int
    bottleneck_bytes: int
    cost: int


def statistics(log: Log) -> Statistics:
    """Counts what a log has; O(events), with one simulation without a limit."""
    op_of: list[int] = []
    root_of: list[int] = []  # of every tensor, the one that its storage was made for
    sizes: list[int] = []  # of storages by root; 0 for constants
    ops = edges = constants = constant_bytes = bottleneck = 0
    for op, call in enumerate(log.calls):
        ops += 1
        edges += len({op_of[tensor] for tensor in call.inputs})
        for tensor, nbytes, alias in zip(call.outputs, call.sizes_bytes, call.aliases, strict=True):
            op_of.append(op)
            root_of.append(tensor if alias < 0 else root_of[alias])
            sizes.append(0 if call.is_constant else nbytes)
        if call.is_constant:
            constants += 1
            constant_bytes += sum(call.sizes_bytes)
        read = sum(sizes[root] for root in {root_of[tensor] for tensor in call.inputs})
        made = 0 if call.is_constant else sum(call.sizes_bytes)
        bottleneck = max(bottleneck, read + made)
    shares = Counter(event.tensor for event in log.events if isinstance(event, Share))
    pins = constants + sum(1 + shares[tensor] for tensor in log.outputs)
    return Statistics(
        ops=ops,
        tensors=log.num_tensors,
        op_edges=edges,
        events=len(log.events) + pins,
        peak_bytes=unlimited_peak_bytes(log),
        constant_bytes=constant_bytes,
        bottleneck_bytes=bottleneck,
        cost=log.cost,
    )
