"""What a part of a schedule reads before it makes it: the one answer that all rooms use. Plain data, no jax.

Two questions look alike and are others:

* what is *there* at the turn (`remat.plans.simulate`): the referee charges for whatever a schedule holds, also for
  what nothing reads again, so it follows the frees and not the reads;
* what *depends* on what (`closure` of `remat.plans.stages`): which operators have to run for a value, before there
  are steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat.core.graph import Graph
from remat.plans.steps import Step

__all__ = ["Needed", "read_before_made", "reads_and_writes"]


@dataclass(frozen=True, slots=True)
class Needed:
    """What has to be there before steps run, in the order in which they first read it.

    Attributes:
        raw: values read as they are; arguments, constants and cotangents included.
        encoded: values decoded: their encoded form has to be there.
    """

    raw: tuple[int, ...]
    encoded: tuple[int, ...]


def read_before_made(graph: Graph, steps: Iterable[Step], results: Iterable[int] = ()) -> Needed:
    """Returns the values that steps read before they make them.

    For the steps of the backward pass that is what crosses from the forward pass: the residuals. A value is made by
    the operator that computes it and by the step that decodes it; one that steps encode and then decode needs
    nothing from before. A barrier reads nothing of its own: it ties what the steps around it read or have made.

    Args:
        graph: the joint graph that the steps are of.
        steps: any part of a schedule, in order.
        results: values wanted when the steps are done, as if read by a last step: the gradients.
    """
    raw: dict[int, None] = {}
    encoded: dict[int, None] = {}
    packed: set[int] = set()
    made: set[int] = set()
    for step in steps:
        if step.action == "decode" and step.target not in packed:
            encoded[step.target] = None
        elif step.action == "encode":
            packed.add(step.target)
        reads, writes = reads_and_writes(graph, step)
        raw.update((value, None) for value in reads if value not in made)
        made.update(writes)
    raw.update((value, None) for value in results if value not in made)
    return Needed(tuple(raw), tuple(encoded))


def reads_and_writes(graph: Graph, step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the values that a step reads as they are, and those that it makes."""
    if step.action == "compute":
        op = graph.ops[step.target]
        return op.inputs, op.outputs
    if step.action == "encode":
        return (step.target,), ()
    if step.action == "decode":
        return (), (step.target,)
    return (), ()
