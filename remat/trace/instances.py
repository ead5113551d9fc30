"""Values that are made once for all that reads them: barriers and roundings behind the operands of comparisons."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat import compat
from remat.core.graph import Graph
from remat.trace.program import PRIMAL_TAG, Atom, Equation, Program

__all__ = ["BARRIER", "ROUNDING", "Instances", "instances_of", "with_single_instances"]

# The primitives that stand for them in a graph.
BARRIER, ROUNDING = "optimization_barrier", "reduce_precision"


@dataclass(frozen=True, slots=True)
class Instances:
    """What the operands of comparisons are to be made from.

    Attributes:
        in_memory: values that are to be arrays in memory before anything reads them.
        rounded: values whose elements are to be rounded before anything reads them.
    """

    in_memory: frozenset[int] = frozenset()
    rounded: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.in_memory or self.rounded)


def with_single_instances(program: Program, instances: Instances) -> Program:
    """Returns the program with barriers and roundings behind values, for all that reads them."""
    avals, tags = list(program.avals), dict(program.tags)
    after: dict[int, Atom] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        equations.append(equation.renamed(lambda a: after.get(a, a) if isinstance(a, int) else a))
        for position, value in enumerate(equation.outputs):
            if value in instances.in_memory:
                source = compat.barrier_after(equation.source, position)
            elif value in instances.rounded:
                source = compat.rounding_after(equation.source, position)
            else:
                continue
            new = len(avals)
            equations.append(Equation(source, (value,), (new,), equation.site))
            after[value] = new
            avals.append(avals[value])
            if not any(tag.startswith(PRIMAL_TAG) for tag in tags.get(value, (PRIMAL_TAG,))):
                tags[new] = tags.pop(value)  # what is named is what is read
    return replace(
        program,
        avals=tuple(avals),
        equations=tuple(equations),
        outputs=tuple(after.get(a, a) if isinstance(a, int) else a for a in program.outputs),
        tags=tags,
    )


def instances_of(graph: Graph) -> Instances:
    """Returns which values of the undifferentiated program are so in a graph that names these."""

    def before(name: str) -> frozenset[int]:
        read = (op.inputs[0] for op in graph.ops if op.name == name and len(op.inputs) == 1)
        primals = (graph.values[value].primal for value in read)
        return frozenset(value for value in primals if value is not None)

    return Instances(before(BARRIER), before(ROUNDING))
