"""What runs in a loop's body: one iteration of the forward loop, and one of the backward loop.

In a body the results are parts of arrays in use. What was stacked is read as slices; a slice is a buffer if an
operator that does not fuse reads it. What a loop in the body stacks or sums is a buffer that is then copied into
the stack, or added to the sum, of the loop around it; what it carries is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from remat.core.graph import Graph
from remat.memory.execution import Execution, Working
from remat.memory.instances import Builder, steps_of
from remat.plans.liveness import read_before_made
from remat.plans.steps import Schedule

__all__ = ["body_executions"]


def body_executions(
    graph: Graph, schedule: Schedule | None, working: Working
) -> tuple[Execution, Execution]:
    """Returns what one iteration of the forward loop runs, and of the backward loop.

    Args:
        graph, schedule: as in `remat.memory.predict.predict`, of the loop's body.
        working: what the planned loops in the body need.
    """
    steps = steps_of(graph, schedule)
    turn = next((i for i, step in enumerate(steps) if step.action == "turn"), len(steps))
    ahead = Builder(graph, working, in_loop=True)
    ahead.given((*graph.inputs, *graph.constants))
    ahead.sliced(graph.inputs)
    ahead.run(steps[:turn])
    back = Builder(graph, working, in_loop=True)
    back.given((*graph.inputs, *graph.constants, *graph.cotangents))
    back.sliced(graph.inputs)
    carried = [v for v in graph.outputs if v in graph.carried]
    back.sliced(set(graph.cotangents) - _of_type(graph, graph.cotangents, carried))
    needed = read_before_made(graph, steps[turn:], graph.gradients)
    given = {*graph.inputs, *graph.constants, *graph.cotangents}
    raw = [v for v in needed.raw if v in ahead.raw and v not in given]
    bits = [v for v in needed.encoded if v in ahead.bits]
    back.crossing(raw, packed=False)
    back.crossing(bits, packed=True)
    back.run(steps[turn:], offset=turn)
    ahead.execution.results = [
        *(ahead.raw[v] for v in graph.outputs),
        *(ahead.raw[v] for v in raw),
        *(ahead.bits[v] for v in bits),
    ]
    back.execution.stacks = True
    back.execution.results = [back.raw[v] for v in graph.gradients]
    ahead.execution.copied = _made_by_loops(ahead.execution, set(carried))
    back.execution.copied = _made_by_loops(
        back.execution, _of_type(graph, graph.gradients, carried)
    )
    return ahead.execution, back.execution


def _made_by_loops(execution: Execution, carried: set[int]) -> set[int]:
    """The results of a body that a loop in it makes, but for those that it hands on in place."""
    instances = execution.instances
    roots = {instances[index].root for index in execution.results}
    made = (root for root in roots if instances[root].producer >= 0)
    return {
        root
        for root in made
        if execution.nodes[instances[root].producer].name == "scan"
        and instances[root].value not in carried
    }


def _of_type(graph: Graph, values: Iterable[int], types: Iterable[int]) -> set[int]:
    """For each of `types` one of `values` of the same type: cotangents and gradients of what is carried."""
    left = list(values)
    found: set[int] = set()
    for other in types:
        kind = graph.values[other].shape, graph.values[other].dtype
        alike = [v for v in left if (graph.values[v].shape, graph.values[v].dtype) == kind]
        if alike:
            left.remove(alike[0])
            found.add(alike[0])
    return found
