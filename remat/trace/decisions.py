"""Which operators must run only once because their result turns on the last bit of what they read.

A compiler rounds differently in another kernel: a value that the backward pass makes again equals the forward
pass's up to rounding, not bit for bit. Nearly everything a gradient reads is continuous in such a value, so the
gradient moves by rounding too. *Decisions* are not: comparisons of floats, orders and indices (`sort`, `argmax`,
`top_k`), roundings to integers, factorisations with pivots or signs. jax's gradient of a maximum is the mask
`x == max(x)`; if `max(x)` was kept and `x` is made again, the mask is false and the gradient is lost.

What every plan keeps to:

* **Orders, indices, integer roundings and factorisations are made once.** The backward pass reads what the forward
  pass decided. They may run again only where that gives the same bits: on arguments, and on what exact
  operators (data movement, selection, comparison, integer arithmetic) make of them.
* **A comparison on its own boundary is made once**: of two values that were computed from a common one
  (`x == max(x)`, `x >= top_k(x)[k]`, `x[:, None] > x[None, :]`), or of a number with a difference or quotient of
  such values (`x - max(x) >= 0`). Its operands can be equal by construction, and then a mixture of a kept and a
  repeated instance is wrong for every input, not only next to a boundary.
* Any other comparison, a threshold such as `x > 0`, is a function of one instance of `x`. It may run again with
  that instance, as it does under `jax.checkpoint`.

What is made once has `Op.recomputable` False and `Op.decision` True: cut, planners, schedules and lowering treat it
like any operator that may not run again, and the simulator rejects a schedule that repeats it.

jax's masks for the larger or smaller of two values, `x == max(x, y)`, are replaced by what they say, `x >= y`: the
same bits, NaNs included, and with a number for `y` an ordinary threshold (clip, relu6, a variance held at zero).

"Computed from a common one" is followed through element-wise operators, selection and movement, and through what
runs once: a loop's running maximum is an element of what the loop read. It is not followed through masks and
indices that only select, nor through a key to all that is drawn from it: arrays drawn alike are relatives, the
masks of two dropouts are not. Two values that are compared may also be related by sums (the mean of equal elements
is an element), but not by products of computed matrices. A difference is between values with no sum over several
elements in between, else every normalisation were one; where an integer comparison picks an element, the sum is
that element (`sum(one_hot(argmax(x)) * x)`).

A compiler, too, makes values twice: XLA copies what is cheap into every kernel that reads it, and a product that
meets a sum in one of them it does not even round. So the last of what the operands of such a comparison have in
common goes through an `optimization_barrier` (`with_single_instances`): an array in memory, read by all that
follows. What is added up between there and the comparison is rounded, whatever kernel it is in.

A policy of jax (`lowering="policy"`) can only name values of the undifferentiated program, not a mask that is born
in differentiation. There decisions are repeated, as under `jax.checkpoint`, and it is the values between a
comparison and what its operands have in common that may not be kept: all of them are made again, from one instance.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.graph import Graph, Op, Value
from remat.core.primitives import TABLE, Trait, primitives_with
from remat.trace.classify import classify_equation
from remat.trace.instances import BARRIER, ROUNDING, Instances
from remat.trace.origins import Origin, Origins, common, is_float, without_selectors
from remat.trace.program import Equation, Literal, Program, is_inexact

__all__ = ["compare_operands", "decide"]

_REASON = "it decides by the last bit of what it reads, and is made once"


# Comparisons that hold always, or never, if this operand is not negative and the other one zero or less.
_SETTLED = {"ge": 0, "lt": 0, "gt": 1, "le": 1}
_COMPARISONS = primitives_with(Trait.COMPARISON)
_TIES = primitives_with(Trait.TIES)
_JUMPS = primitives_with(Trait.JUMPS)
_ADDING = primitives_with(Trait.ADDS)
_THRESHOLDS = _COMPARISONS | _TIES | {"is_finite", "sign"}
_DECISIVE = _THRESHOLDS | _JUMPS
# What `x == op(x, y)` says of x and y.
_EXTREMA = {"max": "ge", "min": "le"}


def compare_operands(program: Program) -> Program:
    """Returns the program with `x == max(x, y)` as `x >= y` and `x == min(x, y)` as `x <= y`, for floats."""
    extrema: dict[int, Equation] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        name = equation.source.primitive.name
        # Complex numbers have a largest, in jax before 0.12, and no order.
        if name in _EXTREMA and jnp.issubdtype(equation.source.outvars[0].aval.dtype, jnp.floating):
            extrema[equation.outputs[0]] = equation
        elif name == "eq":
            equation = (
                _direct(equation, extrema) or _direct(_swapped(equation), extrema) or equation
            )
        equations.append(equation)
    return replace(program, equations=tuple(equations))


def _swapped(equation: Equation) -> Equation:
    first, second = equation.inputs
    return replace(equation, inputs=(second, first))


def _direct(equation: Equation, extrema: Mapping[int, Equation]) -> Equation | None:
    """What `x == op(x, y)` says, or None if the second operand is no such result."""
    own, result = equation.inputs
    extreme = extrema.get(result) if isinstance(result, int) else None
    if extreme is None or not isinstance(own, int):
        return None  # a result that equals a number is a threshold as it is
    for (x, y), places in ((extreme.inputs, (0, 1)), (extreme.inputs[::-1], (1, 0))):
        if own == x:
            source = compat.comparison_like(
                equation.source,
                _EXTREMA[extreme.source.primitive.name],
                [extreme.source.invars[place] for place in places],
            )
            return replace(equation, source=source, inputs=(x, y))
    return None


def decide(program: Program, graph: Graph, *, named_only: bool = False) -> tuple[Graph, Instances]:
    """Finds what decides, so that no plan repeats it; see the module docstring.

    Args:
        program: a joint program.
        graph: its graph; operator `i` is equation `i`.
        named_only: the plan is for a policy of jax, which can only keep values of the undifferentiated program:
            instead of operators, values that may not be kept are marked.

    Returns:
        The graph with the marks, and what the operands of comparisons are to be made from.
    """
    search = _Search(program, graph)
    search.run(keeps=not named_only)
    instances = search.instances()
    if named_only:
        values = tuple(map(search.without_between, graph.values))
        return replace(graph, values=values), instances
    ops = list(graph.ops)
    for index in search.once:
        if ops[index].recomputable:  # else it has a reason of its own
            ops[index] = replace(ops[index], recomputable=False, decision=True, reason=_REASON)
    return replace(graph, ops=tuple(ops)), instances


class _Search:
    """One walk over a joint program in its order."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program = program
        self.graph = graph
        self.origins = Origins(program, graph)
        self.once: set[int] = set()
        self.decided: list[tuple[tuple[int, ...], int]] = []  # operands, what they have in common

    def run(self, *, keeps: bool) -> None:
        """Finds what decides; with `keeps` a decision's result counts as one instance from there on."""
        needed = _needed_backward(self.graph)
        for op, equation in zip(self.graph.ops, self.program.equations, strict=True):
            if op.phase == "backward":
                self._read_backward(op, equation)
                continue
            decides = op.recomputable and needed[op.id] and self._decides(op, equation)
            if decides and keeps:
                self.once.add(op.id)
            self.origins.derive(op, equation, once=not op.recomputable or op.id in self.once)

    def without_between(self, value: Value) -> Value:
        """Returns a value as not savable if it lies between a comparison and what its operands share."""
        if value.producer is None or value.id not in self.origins:
            return value
        if not self.graph.ops[value.producer].recomputable:
            return value  # kept in any case
        between = (
            self.origins[value.id].roots & self._boundary_bits & ~self.origins.own.get(value.id, 0)
        )
        return replace(value, savable=False) if between else value

    def instances(self) -> Instances:
        """Returns what is to be in memory or rounded and may not be yet."""
        added = (self._summands(op) for op in self._between if op.name in _ADDING)
        return Instances(
            in_memory=frozenset(filter(self._may_differ, self._boundary)),
            rounded=frozenset(filter(self._may_differ, set().union(*added))),
        )

    @functools.cached_property
    def _boundary(self) -> frozenset[int]:
        """The last of what the operands of a comparison have in common: every way to it leads through them."""
        return self._ways[0]

    @property
    def _between(self) -> Iterable[Op]:
        """The operators between the boundary and the comparisons."""
        return (self.graph.ops[index] for index in sorted(self._ways[1]))

    @functools.cached_property
    def _ways(self) -> tuple[frozenset[int], frozenset[int]]:
        boundary, between = set[int](), set[int]()
        for operands, joined in self.decided:
            todo, seen = list(operands), set(operands)
            while todo:
                value = todo.pop()
                producer = self.graph.values[value].producer
                if self.origins.own.get(value, 0) & joined:
                    boundary.add(value)
                elif producer is not None:
                    between.add(producer)
                    inputs = without_selectors(self.program.equations[producer]) - seen
                    seen |= inputs
                    todo += inputs
        return frozenset(boundary), frozenset(between)

    def _summands(self, op: Op) -> set[int]:
        """What an addition adds up, seen through what only moves it: a product among it may go unrounded."""
        found, todo, seen = set[int](), list(op.inputs), set(op.inputs)
        while todo:
            value = todo.pop()
            producer = self.graph.values[value].producer
            if value in self._boundary or producer is None:
                continue
            source = self.graph.ops[producer]
            if self.origins.is_exact(source, self.program.equations[producer]):
                inputs = set(source.inputs) - seen
                seen |= inputs
                todo += inputs
            else:
                found.add(value)
        return found

    @functools.cached_property
    def _boundary_bits(self) -> int:
        return functools.reduce(operator.or_, map(self.origins.own.__getitem__, self._boundary), 0)

    def _may_differ(self, value: int) -> bool:
        """Whether two kernels may come to different bits."""
        graph = self.graph
        producer = graph.values[value].producer
        if producer is None or graph.ops[producer].name in (BARRIER, ROUNDING):
            return False
        if all(graph.ops[user].name == BARRIER for user in graph.users[value]):
            return False
        is_exact = self.origins[value].exact and producer not in self.once
        return not is_exact and bool(jnp.issubdtype(self.program.avals[value].dtype, jnp.floating))

    # --- decisions ---------------------------------------------------------------------------------

    def _decides(self, op: Op, equation: Equation) -> bool:
        reads, makes = self.origins.dtypes(equation)
        operands = self.origins.of(op.inputs)
        if not any(map(is_float, reads)) or all(origin.exact for origin in operands):
            return False
        if _jumps(op.name, reads, makes) or _decides_inside(equation):
            return True
        if op.name not in TABLE:
            makes_integers = not all(map(is_float, makes))
            if makes_integers or classify_equation(equation.source).steps & _DECISIVE:
                return True
        to_bool = op.name == "convert_element_type" and makes[0] == jnp.bool_
        if not (to_bool or op.name in _THRESHOLDS):
            return False
        joined = self._joined(op, operands)
        if not joined or self._is_settled(op, equation, operands):
            return False
        self.decided.append((op.inputs, joined))
        return True

    def _is_settled(self, op: Op, equation: Equation, operands: Sequence[Origin]) -> bool:
        """Whether no rounding can change a comparison: is a sum of exponentials negative, is anything infinite?"""
        if op.name not in _COMPARISONS or len(operands) != 1:
            return False
        numbers = [np.asarray(a.value) for a in equation.inputs if isinstance(a, Literal)]
        if any(not np.isfinite(number).any() for number in numbers):
            return True
        if op.name not in _SETTLED or operands[0].negative:
            return False
        other = equation.inputs[1 - _SETTLED[op.name]]
        return isinstance(other, Literal) and bool(np.all(np.asarray(other.value) <= 0))

    def _joined(self, op: Op, operands: Iterable[Origin]) -> int:
        """What makes a comparison one on its own boundary; 0 if it is none."""
        # A mean of equal elements, or of one, equals an element: what is compared may be related by any way.
        related = common(o.roots for o in operands) if op.name in _COMPARISONS else 0
        return related | _meetings(op, operands)

    def _read_backward(self, op: Op, equation: Equation) -> None:
        """What reads a cotangent runs once, but it may decide by values that the backward pass makes again."""
        if not (op.name in _DECISIVE or _decides_inside(equation)):
            return
        read = [v for v in dict.fromkeys(op.inputs) if v in self.origins]
        operands = self.origins.of(read)
        if op.name in _THRESHOLDS:
            known = [o.roots | o.equal | o.patched for o in operands]
            joined = self._joined(op, operands)
            if joined:
                self.decided.append((tuple(read), joined))
        else:  # a sort, or a loop in which something is compared
            known = [o.bases for o in operands]
            joined = common(known) | _meetings(op, operands)
        for value, origin, members in zip(read, operands, known, strict=True):
            producer = self.graph.values[value].producer
            if members & joined and not origin.exact and producer is not None:
                self.once.add(producer)


def _meetings(op: Op, operands: Iterable[Origin]) -> int:
    """What relatives that met on the way to an operator had in common; those side by side matter to ties alone."""
    found = 0
    for origin in operands:
        found |= origin.equal | (origin.patched if op.name in _TIES else 0)
    return found


def _jumps(name: str, reads: list[Any], makes: list[Any]) -> bool:
    """Whether an operator that reads floats gives results between which there is nothing."""
    if name == "sort":
        return len(reads) > 1
    if name == "convert_element_type":
        return not is_float(makes[0]) and makes[0] != jnp.bool_
    return name in _JUMPS


def _decides_inside(equation: Equation) -> bool:
    """Whether the body of a loop, a branch, a call or an update compares or orders floats."""
    return any(_body_decides(body) for body in compat.sub_jaxprs(equation.source))


def _body_decides(body: Any) -> bool:
    for eqn in compat.open_jaxpr(body)[0].eqns:
        reads_float = any(is_inexact(getattr(var, "aval", None)) for var in eqn.invars)
        if reads_float and eqn.primitive.name in _DECISIVE:
            return True
        if any(map(_body_decides, compat.sub_jaxprs(eqn))):
            return True
    return False


def _needed_backward(graph: Graph) -> list[bool]:
    """For every operator whether the backward pass needs its results, were nothing else kept."""
    wanted = set(graph.backward_reads)
    needed = [False] * len(graph.ops)
    for op in reversed(graph.ops):
        if op.phase == "forward" and wanted.intersection(op.outputs):
            needed[op.id] = True
            wanted.update(op.inputs)
    return needed
