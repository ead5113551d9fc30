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
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.graph import Graph, Op, Value
from remat.core.primitives import TABLE
from remat.trace.classify import classify_equation
from remat.trace.program import PRIMAL_TAG, Atom, Equation, Literal, Program, is_inexact

__all__ = ["Instances", "compare_operands", "decide", "instances_of", "with_single_instances"]

_REASON = "it decides by the last bit of what it reads, and is made once"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Results jump between integers, orders, pivots, signs of eigenvectors, draws of a rejection sampler.
_JUMPS = _names(
    """
    approx_top_k argmax argmin bitcast_convert_type ceil eig eigh floor geqp3 geqrf hessenberg lu
    qr random_gamma rem round schur sort svd top_k tridiagonal
    """
)
# Comparisons that hold always, or never, if this operand is not negative and the other one zero or less.
_SETTLED = {"ge": 0, "lt": 0, "gt": 1, "le": 1}
_NEVER_NEGATIVE = _names("abs exp exp2 logistic sqrt square")
_KEEP_SIGN = _names(
    """
    add add_any broadcast_in_dim concatenate convert_element_type copy cumsum div gather max min mul
    optimization_barrier pow reduce_max reduce_min reduce_prod reduce_sum reshape rev select_n slice
    squeeze stop_gradient transpose
    """
)
_COMPARISONS = _names("eq eq_to ge gt le le_to lt lt_to ne")
# Results jump where elements of one operand cross each other.
_TIES = _names("select_and_gather_add select_and_scatter select_and_scatter_add")
_THRESHOLDS = _COMPARISONS | _TIES | {"is_finite", "sign"}
_DECISIVE = _THRESHOLDS | _JUMPS
# What `x == op(x, y)` says of x and y.
_EXTREMA = {"max": "ge", "min": "le"}
# The same bits from the same operands in whatever kernel.
_EXACT = _COMPARISONS | _names(
    """
    abs argmax argmin bitcast_convert_type broadcast broadcast_in_dim ceil clamp concatenate copy
    copy_p copysign cummax cummin dynamic_slice dynamic_update_slice expand_dims floor gather imag
    iota is_finite max min neg optimization_barrier pad pcast pvary real reduce_max reduce_min
    reduce_window_max reduce_window_min rem reshape rev round scatter-max scatter-min select_n
    sharding_constraint sign slice sort split squeeze stack stop_gradient tile top_k transpose
    unstack
    """
)
# Their results are zero or one where their operands are equal, or opposite.
_DIFFERENCES = _names("add add_any atan2 complex div dot_general sub")
# Their results have elements of several operands side by side.
_PATCHES = _names("clamp concatenate dynamic_update_slice max min pad scatter select_n stack")
_SUMS = frozenset({"reduce_prod", "reduce_sum"})
_ADDING = _names("add add_any cumsum dot_general reduce_sum reduce_window_sum sub")
_LINEAR = _names("cumsum reduce_sum reduce_window_sum")
# Positions of the operands that say which elements are taken, from one to before another.
_SELECTORS = {
    "select_n": (0, 1),
    "gather": (1, 2),
    "dynamic_slice": (1, None),
    "dynamic_update_slice": (2, None),
    "scatter": (1, 2),
}
# Where one operand is zero but in one place, the result is the element of the other, or the sum that it is in.
_PICKING = _names("convert_element_type mul")
_PICKED_BY = _names("dot_general reduce_sum")
_WIDER = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
    "complex64": ("complex64", "complex128"),
    "complex128": ("complex128",),
}


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a value was computed from. Sets of values are bit masks.

    Attributes:
        roots: the values it depends on, itself included, without a product of two of them summed up in between.
        bases: those without a sum over several elements in between.
        equal: those that two operands of a sum, difference or quotient on the way had in common.
        patched: those that several parts of an array that was put together have in common.
        exact: whether every run gives the same bits.
        picks: whether it is zero but where integers are equal, so that a sum over it may be one of its elements.
        negative: whether it can be below zero.
    """

    roots: int = 0
    bases: int = 0
    equal: int = 0
    patched: int = 0
    exact: bool = True
    picks: bool = False
    negative: bool = True


_ONE_INSTANCE = _Origin()
_BARRIER, _ROUNDING = "optimization_barrier", "reduce_precision"


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


def compare_operands(program: Program) -> Program:
    """Returns the program with `x == max(x, y)` as `x >= y` and `x == min(x, y)` as `x <= y`, for floats."""
    extrema: dict[int, Equation] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        name = equation.source.primitive.name
        if name in _EXTREMA and _is_float(equation.source.outvars[0].aval.dtype):
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

    return Instances(before(_BARRIER), before(_ROUNDING))


class _Search:
    """One walk over a joint program in its order."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program = program
        self.graph = graph
        self.origins: dict[int, _Origin] = {}
        self.own: dict[int, int] = {}
        self._bits = itertools.count()
        self._first: dict[
            object, int
        ] = {}  # of the values made of integers alone in one way, by this way
        self._alike: dict[int, int] = {}  # the first of those made in the way of a value
        self.once: set[int] = set()
        self.decided: list[tuple[tuple[int, ...], int]] = []  # operands, what they have in common

    def run(self, *, keeps: bool) -> None:
        """Finds what decides; with `keeps` a decision's result counts as one instance from there on."""
        needed = _needed_backward(self.graph)
        for value in (*self.graph.inputs, *self.graph.constants):
            if _is_float(getattr(self.program.avals[value], "dtype", None)):
                self.origins[value] = self._with_itself(value, _ONE_INSTANCE)
            else:
                self.origins[value] = _ONE_INSTANCE
        for op, equation in zip(self.graph.ops, self.program.equations, strict=True):
            if op.phase == "backward":
                self._read_backward(op, equation)
                continue
            decides = op.recomputable and needed[op.id] and self._decides(op, equation)
            if decides and keeps:
                self.once.add(op.id)
            self._derive(op, equation, once=not op.recomputable or op.id in self.once)

    def without_between(self, value: Value) -> Value:
        """Returns a value as not savable if it lies between a comparison and what its operands share."""
        origin = self.origins.get(value.id)
        if value.producer is None or origin is None:
            return value
        if not self.graph.ops[value.producer].recomputable:
            return value  # kept in any case
        between = origin.roots & self._boundary_bits & ~self.own.get(value.id, 0)
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
                if self.own.get(value, 0) & joined:
                    boundary.add(value)
                elif producer is not None:
                    between.add(producer)
                    inputs = _without_selectors(self.program.equations[producer]) - seen
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
            if self._is_exact(source, self.program.equations[producer]):
                inputs = set(source.inputs) - seen
                seen |= inputs
                todo += inputs
            else:
                found.add(value)
        return found

    @functools.cached_property
    def _boundary_bits(self) -> int:
        return functools.reduce(operator.or_, map(self.own.__getitem__, self._boundary), 0)

    def _may_differ(self, value: int) -> bool:
        """Whether two kernels may come to different bits."""
        graph = self.graph
        producer = graph.values[value].producer
        if producer is None or graph.ops[producer].name in (_BARRIER, _ROUNDING):
            return False
        if all(graph.ops[user].name == _BARRIER for user in graph.users[value]):
            return False
        is_exact = self.origins[value].exact and producer not in self.once
        return not is_exact and bool(jnp.issubdtype(self.program.avals[value].dtype, jnp.floating))

    # --- decisions ---------------------------------------------------------------------------------

    def _decides(self, op: Op, equation: Equation) -> bool:
        reads, makes = self._dtypes(equation)
        operands = self._operands(op.inputs)
        if not any(map(_is_float, reads)) or all(origin.exact for origin in operands):
            return False
        if _jumps(op.name, reads, makes) or _decides_inside(equation):
            return True
        if op.name not in TABLE:
            makes_integers = not all(map(_is_float, makes))
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

    def _is_settled(self, op: Op, equation: Equation, operands: Sequence[_Origin]) -> bool:
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

    def _joined(self, op: Op, operands: Iterable[_Origin]) -> int:
        """What makes a comparison one on its own boundary; 0 if it is none."""
        # A mean of equal elements, or of one, equals an element: what is compared may be related by any way.
        related = _common(o.roots for o in operands) if op.name in _COMPARISONS else 0
        return related | _meetings(op, operands)

    def _read_backward(self, op: Op, equation: Equation) -> None:
        """What reads a cotangent runs once, but it may decide by values that the backward pass makes again."""
        if not (op.name in _DECISIVE or _decides_inside(equation)):
            return
        read = [v for v in dict.fromkeys(op.inputs) if v in self.origins]
        operands = self._operands(read)
        if op.name in _THRESHOLDS:
            known = [o.roots | o.equal | o.patched for o in operands]
            joined = self._joined(op, operands)
            if joined:
                self.decided.append((tuple(read), joined))
        else:  # a sort, or a loop in which something is compared
            known = [o.bases for o in operands]
            joined = _common(known) | _meetings(op, operands)
        for value, origin, members in zip(read, operands, known, strict=True):
            producer = self.graph.values[value].producer
            if members & joined and not origin.exact and producer is not None:
                self.once.add(producer)

    # --- origins -----------------------------------------------------------------------------------

    def _operands(self, values: Iterable[int]) -> list[_Origin]:
        return [self.origins.get(v, _ONE_INSTANCE) for v in dict.fromkeys(values)]

    def _derive(self, op: Op, equation: Equation, *, once: bool) -> None:
        """Notes where results come from. Those of what is made `once` are one instance for all their readers, but
        they may have elements in common with operands that are made again: `x >= top_k(x)[k]`.
        """
        everything = self._operands(op.inputs)
        exact_operands = all(origin.exact for origin in everything)
        picks = any(origin.picks for origin in everything)
        operands = self._operands(sorted(_without_selectors(equation)))
        is_sum = op.name in _LINEAR or sum(part.roots > 0 for part in operands) < 2
        roots = functools.reduce(operator.or_, (part.roots for part in operands), 0)
        equal = functools.reduce(operator.or_, (part.equal for part in operands), 0)
        if self._ends(op, equation) and not (picks and op.name in _PICKED_BY):
            # A sum of zeros is zero, and so is a product of them, but not one with something else.
            patched = functools.reduce(operator.or_, (part.patched for part in operands), 0)
            stays = is_sum or all(part.equal for part in operands)
            origin = _Origin(
                roots=roots if is_sum else 0,
                equal=equal | patched if stays else 0,
                exact=exact_operands,
            )
        else:
            origin = _Origin(
                roots=roots,
                bases=functools.reduce(operator.or_, (part.bases for part in operands), 0),
                equal=equal,
                patched=functools.reduce(operator.or_, (part.patched for part in operands), 0),
                exact=exact_operands,
            )
            shared = 0 if exact_operands else _common(part.bases for part in operands)
            if op.name in _DIFFERENCES:
                origin = replace(origin, equal=origin.equal | shared)
            elif op.name in _PATCHES:
                origin = replace(origin, patched=origin.patched | shared)
        is_exact = self._is_exact(op, equation)
        picks = (picks and (is_exact or op.name in _PICKING)) or self._compares_integers(
            op, equation
        )
        negative = not self._is_not_negative(op, equation, operands)
        origin = replace(origin, picks=picks, negative=negative)
        if not origin.roots:
            self._note_alike(op, equation)
        for value in op.outputs:
            if not is_exact or once:
                self.origins[value] = self._with_itself(value, replace(origin, exact=once))
            elif value in self.own:  # floats made of integers
                self.origins[value] = replace(origin, roots=self.own[value], bases=self.own[value])
            else:
                self.origins[value] = origin

    def _note_alike(self, op: Op, equation: Equation) -> None:
        """Notes what is made of integers alone: arrays drawn alike are relatives, others of one key are not."""
        if not equation.reads or any(map(_is_float, self._dtypes(equation)[0])):
            return
        read = tuple(
            self._alike.get(a, a) if isinstance(a, int) else repr(a.value) for a in equation.inputs
        )
        for place, value in enumerate(op.outputs):
            key = (op.name, str(equation.source.params), read, place)
            first = self._alike[value] = self._first.setdefault(key, value)
            if _is_float(self.program.avals[value].dtype):
                self.own[value] = self.own[first] if first in self.own else self._bit()

    def _is_not_negative(self, op: Op, equation: Equation, operands: Sequence[_Origin]) -> bool:
        if op.name in _NEVER_NEGATIVE:
            return True
        if (
            op.name == "mul"
            and len(equation.inputs) == 2
            and equation.inputs[0] == equation.inputs[1]
        ):
            return True  # a square
        if op.name == "integer_pow":
            is_even = equation.source.params["y"] % 2 == 0
            return is_even or not any(operand.negative for operand in operands)
        if op.name not in _KEEP_SIGN:
            return False
        literals = [a.value for a in equation.inputs if isinstance(a, Literal)]
        return all(map(self._keeps_positive, equation.reads)) and all(
            np.all(np.asarray(value) >= 0) for value in literals
        )

    def _keeps_positive(self, value: int) -> bool:
        if not _is_float(self.program.avals[value].dtype):
            return self.program.avals[value].dtype == jnp.bool_
        return not self.origins[value].negative

    def _compares_integers(self, op: Op, equation: Equation) -> bool:
        return op.name == "eq" and not any(map(_is_float, self._dtypes(equation)[0]))

    def _with_itself(self, value: int, origin: _Origin) -> _Origin:
        bit = self.own[value] = self._bit()
        return replace(origin, roots=origin.roots | bit, bases=origin.bases | bit)

    def _bit(self) -> int:
        return 1 << next(self._bits)

    def _ends(self, op: Op, equation: Equation) -> bool:
        """Whether the result's elements are sums or products of several elements."""
        if op.name in _EXACT or op.name.startswith("scatter") or op.name not in TABLE:
            return False
        if op.name == "dot_general":
            (contracted, _), _ = equation.source.params["dimension_numbers"]
            return any(equation.source.invars[0].aval.shape[axis] > 1 for axis in contracted)
        if op.name in _SUMS:
            shape = equation.source.invars[0].aval.shape
            return any(shape[axis] > 1 for axis in equation.source.params["axes"])
        return op.kind in ("HEAVY", "REDUCTION") or op.name.startswith("reduce_window")

    def _is_exact(self, op: Op, equation: Equation) -> bool:
        reads, makes = self._dtypes(equation)
        if not any(map(_is_float, (*reads, *makes))):
            return True
        if op.name == "convert_element_type":
            # From an integer: rounded to nearest, whoever does it. To fewer bits: XLA may leave it out.
            narrows = any(map(_is_float, reads)) and _is_float(makes[0])
            return not narrows or str(makes[0]) in _WIDER.get(str(reads[0]), ())
        if op.name == "scatter":
            # Of several updates of one element any may win.
            return bool(equation.source.params.get("unique_indices"))
        return op.name in _EXACT

    def _dtypes(self, equation: Equation) -> tuple[list[Any], list[Any]]:
        """Dtypes of the operands that are values, and of the results."""
        avals = self.program.avals
        return (
            [getattr(avals[v], "dtype", None) for v in equation.reads],
            [getattr(avals[v], "dtype", None) for v in equation.outputs],
        )


def _without_selectors(equation: Equation) -> set[int]:
    """The operands that results are computed from, without those that only say which elements are taken."""
    name = equation.source.primitive.name
    first, end = _SELECTORS.get(name.split("-")[0], (0, 0))  # scatter-add
    positions = range(len(equation.inputs))[first:end]
    return {
        atom
        for position, atom in enumerate(equation.inputs)
        if isinstance(atom, int) and position not in positions
    }


def _meetings(op: Op, operands: Iterable[_Origin]) -> int:
    """What relatives that met on the way to an operator had in common; those side by side matter to ties alone."""
    found = 0
    for origin in operands:
        found |= origin.equal | (origin.patched if op.name in _TIES else 0)
    return found


def _common(sets: Iterable[int]) -> int:
    """What any two of some sets have in common."""
    seen = common = 0
    for members in sets:
        common |= seen & members
        seen |= members
    return common


def _is_float(dtype: Any) -> bool:
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def _jumps(name: str, reads: list[Any], makes: list[Any]) -> bool:
    """Whether an operator that reads floats gives results between which there is nothing."""
    if name == "sort":
        return len(reads) > 1
    if name == "convert_element_type":
        return not _is_float(makes[0]) and makes[0] != jnp.bool_
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
