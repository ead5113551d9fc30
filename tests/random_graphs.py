"""Joint graphs as plain data, without jax: a builder, a seeded generator and hypothesis strategies.

`GraphBuilder` numbers values and operators and finds the phases. `random_graph` takes any
`random.Random`; `graphs` is the hypothesis strategy of what it makes. `relabelled` renumbers a
graph without changing what it means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from remat.core.graph import Graph, Op, Value

__all__ = [
    "GraphBuilder",
    "Relabelling",
    "blocks",
    "chain",
    "graphs",
    "laws",
    "permuted",
    "random_graph",
    "relabelled",
    "rngs",
    "seeded_graph",
]

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "bool": 1}
_SHAPES = ((), (3,), (8, 8), (64,), (64, 8), (16, 32), (128, 64))
_MASK_SHAPE = (256, 256)  # large enough for a drawn mask to go through bits at once

# What an operator is, apart from its wiring.
_KINDS: dict[str, dict[str, Any]] = {
    "add": {"fusible": True},
    "tanh": {"fusible": True},
    "broadcast": {"fusible": True, "kind": "VIEW"},
    "dot": {"fusible": False, "heavy": True, "kind": "HEAVY"},
    "batched_dot": {"fusible": False, "heavy": True, "batched": True, "kind": "HEAVY"},
    "sum": {"fusible": True, "kind": "REDUCTION"},
    "argmax": {"fusible": False, "kind": "REDUCTION"},
    "bits": {"fusible": True, "random": True, "kind": "RANDOM"},
    "fold_in": {"fusible": True, "kind": "RANDOM"},
    "gather": {"fusible": False, "kind": "INDEXED"},
    "mystery": {
        "fusible": False,
        "recomputable": False,
        "reason": "nothing is known about it",
        "kind": "OPAQUE",
    },
    "callback": {
        "fusible": False,
        "effectful": True,
        "recomputable": False,
        "reason": "it has side effects",
        "kind": "EFFECT",
    },
}
_COMMON = ("add", "tanh", "broadcast", "dot", "sum", "bits")
_RARE = ("batched_dot", "argmax", "fold_in", "gather", "mystery", "callback")


class GraphBuilder:
    """Builds a `Graph` value by value; a value is the number that `input`, `op`, ... return."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.inputs: list[int] = []
        self.cotangents: list[int] = []
        self.constants: list[int] = []
        self._backward: set[int] = set()

    def _value(
        self, shape: tuple[int, ...], dtype: str, producer: int | None, tags: tuple[str, ...] = ()
    ) -> int:
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        value = Value(
            id=len(self.values),
            shape=shape,
            dtype=dtype,
            nbytes=nbytes,
            producer=producer,
            tags=tags,
            differentiable=dtype in ("float32", "bfloat16"),
        )
        self.values.append(value)
        return value.id

    def input(self, shape: tuple[int, ...] = (64,), dtype: str = "float32") -> int:
        self.inputs.append(self._value(shape, dtype, None))
        return self.inputs[-1]

    def constant(self, shape: tuple[int, ...] = (64,), dtype: str = "float32") -> int:
        self.constants.append(self._value(shape, dtype, None))
        return self.constants[-1]

    def cotangent(self, shape: tuple[int, ...] = (64,), dtype: str = "float32") -> int:
        self.cotangents.append(self._value(shape, dtype, None))
        self._backward.add(self.cotangents[-1])
        return self.cotangents[-1]

    def op(
        self,
        name: str,
        inputs: Iterable[int],
        shape: tuple[int, ...] = (64,),
        dtype: str = "float32",
        *,
        tags: tuple[str, ...] = (),
        **fields: Any,
    ) -> int:
        """Adds an operator with one result and returns the result."""
        return self.ops_with(name, inputs, [(shape, dtype, tags)], **fields)[0]

    def ops_with(
        self,
        name: str,
        inputs: Iterable[int],
        results: Sequence[tuple[tuple[int, ...], str, tuple[str, ...]]],
        **fields: Any,
    ) -> tuple[int, ...]:
        """Adds an operator with any number of results, each a shape, a dtype and tags."""
        inputs = tuple(inputs)
        backward = any(value in self._backward for value in inputs)
        index = len(self.ops)
        outputs = tuple(self._value(s, d, index, tags) for s, d, tags in results)
        if backward:
            self._backward.update(outputs)
        moved = sum(self.values[v].nbytes for v in (*inputs, *outputs))
        known = {"fusible": True, **_KINDS.get(name, {}), **fields}
        flops = known.pop("flops", moved // 4)
        self.ops.append(
            Op(
                id=index,
                name=name,
                inputs=inputs,
                outputs=outputs,
                flops=flops,
                bytes_moved=moved,
                phase="backward" if backward else "forward",
                **known,
            )
        )
        return outputs

    def build(self, outputs: Iterable[int], gradients: Iterable[int], **fields: Any) -> Graph:
        graph = Graph(
            values=tuple(self.values),
            ops=tuple(self.ops),
            inputs=tuple(self.inputs),
            cotangents=tuple(self.cotangents),
            outputs=tuple(outputs),
            gradients=tuple(gradients),
            constants=tuple(self.constants),
            **fields,
        )
        graph.check()
        return graph


def chain(length: int = 3, shape: tuple[int, ...] = (64,), **fields: Any) -> Graph:
    """A chain `x -> v1 -> ... -> v_length` whose backward operator `i` reads `v_i` and a cotangent.

    Values are `x = 0`, `v_i = i`, the cotangent `length + 1`, then the gradients from the last to the
    first; operators are `0 .. length - 1` forward, then `length .. 2 * length - 1` backward.
    """
    builder = GraphBuilder()
    values = [builder.input(shape)]
    for _ in range(length):
        values.append(builder.op("tanh", [values[-1]], shape, **fields))
    gradient = builder.cotangent(shape)
    for value in reversed(values[1:]):
        gradient = builder.op("mul", [value, gradient], shape, **fields)
    return builder.build([values[-1]], [gradient])


def blocks(count: int = 3) -> Graph:
    """Blocks `x -> a -> m -> x`, four times as wide inside, whose backward operators read `a`, `m` and `x`."""
    builder = GraphBuilder()
    value, weights = builder.input(), builder.input()
    made: list[tuple[int, int, int]] = []
    for _ in range(count):
        wide = builder.op("dot", [value, weights], (256,))
        active = builder.op("tanh", [wide], (256,))
        value = builder.op("dot", [active, weights])
        made.append((wide, active, value))
    gradient = builder.cotangent()
    for wide, active, result in reversed(made):
        inner = builder.op("dot", [gradient, active, result], (256,))
        gradient = builder.op("dot", [inner, wide])
    return builder.build([value], [gradient])


def random_graph(
    rng: random.Random,
    *,
    max_forward: int = 12,
    max_backward: int = 12,
    fusible_only: bool = False,
) -> Graph:
    """Returns a well-formed joint graph of random shape.

    It has what traced programs have: operators of every kind, with no, one or several results; masks;
    operands read twice; constants; forward operators between backward ones; results and gradients that
    are inputs, cotangents or each other.

    Args:
        rng: where the numbers come from.
        max_forward, max_backward: the number of operators is at most this, give or take those forward
            operators that lie between backward ones.
        fusible_only: pointwise and view operators alone.
    """
    builder = GraphBuilder()
    forward = [builder.input(*_shape_of_input(rng)) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        forward.append(builder.constant((64,)))
    for _ in range(rng.randint(1, max_forward)):
        forward += _random_op(builder, rng, forward, fusible_only)
    computed = [value for value in forward if builder.values[value].producer is not None]
    outputs = _some(rng, computed or forward, 1, 3)
    if rng.random() < 0.1:
        outputs.append(rng.choice(forward))
    backward = [builder.cotangent(builder.values[v].shape) for v in outputs]
    for _ in range(rng.randint(1, max_backward)):
        if rng.random() < 0.15:
            forward += _random_op(builder, rng, forward, fusible_only)
        backward += _random_op(builder, rng, forward, fusible_only, backward)
    return builder.build(outputs, _gradients(builder, rng, forward, backward))


def _shape_of_input(rng: random.Random) -> tuple[tuple[int, ...], str]:
    return rng.choice(_SHAPES), rng.choice(("float32", "float32", "bfloat16", "int32", "bool"))


def _random_op(
    builder: GraphBuilder,
    rng: random.Random,
    forward: Sequence[int],
    fusible_only: bool,
    backward: Sequence[int] = (),
) -> tuple[int, ...]:
    name = _random_name(rng, fusible_only)
    inputs = _some(rng, backward[-6:], 1, 2) if backward else []
    inputs += [rng.choice(forward) for _ in range(rng.randint(0 if inputs else 1, 2))]
    if not backward and name in ("broadcast", "callback") and rng.random() < 0.3:
        inputs = []
    results = [_random_result(rng, name) for _ in range(_random_arity(rng, name))]
    return builder.ops_with(name, inputs, results, flops=rng.randint(0, 1000))


def _random_name(rng: random.Random, fusible_only: bool) -> str:
    if fusible_only:
        return rng.choice(("add", "tanh", "broadcast"))
    return rng.choice(_COMMON) if rng.random() < 0.8 else rng.choice(_RARE)


def _random_arity(rng: random.Random, name: str) -> int:
    if name == "callback" and rng.random() < 0.5:
        return 0
    return 1 if rng.random() < 0.8 else rng.randint(2, 3)


def _random_result(rng: random.Random, name: str) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    shape = rng.choice(((), (8,))) if name in ("sum", "argmax") else rng.choice(_SHAPES)
    dtype = rng.choice(("float32", "float32", "bfloat16", "bool"))
    if dtype == "bool" and rng.random() < 0.4:
        shape = _MASK_SHAPE
    tags = (rng.choice(("first", "second")),) if rng.random() < 0.2 else ()
    return shape, dtype, tags


def _gradients(
    builder: GraphBuilder, rng: random.Random, forward: Sequence[int], backward: Sequence[int]
) -> list[int]:
    read = {value for op in builder.ops for value in op.inputs}
    gradients = [value for value in backward if value not in read]
    gradients += _some(rng, backward, 0 if gradients else 1, 2)
    if rng.random() < 0.2:
        gradients.append(rng.choice(forward))
    return gradients


def _some(rng: random.Random, choices: Sequence[int], least: int, most: int) -> list[int]:
    count = rng.randint(least, most)
    return list(dict.fromkeys(rng.choice(choices) for _ in range(count)))


def seeded_graph(seed: int, **limits: Any) -> Graph:
    """Returns the random graph of a seed."""
    return random_graph(random.Random(seed), **limits)


_IS_NIGHTLY = settings.get_current_profile_name() == "nightly"


def graphs(**limits: Any) -> st.SearchStrategy[Graph]:
    """Returns the strategy of well-formed joint graphs; the limits are those of `random_graph`."""
    return rngs().map(lambda rng: random_graph(rng, **limits))


def rngs() -> st.SearchStrategy[random.Random]:
    """Returns the strategy of random number generators.

    Those of the nightly profile are drawn number by number, so that what is made of them shrinks. A seed does not
    shrink, but takes a fraction of the time.
    """
    if _IS_NIGHTLY:
        return st.randoms(use_true_random=False)
    return st.integers(0, 2**32 - 1).map(random.Random)


def laws(max_examples: int = 40) -> settings:
    """Settings of a law in the profile that `conftest.py` loads: ten times as many examples every night."""
    health = list(HealthCheck) if _IS_NIGHTLY else ()  # graphs number by number are slow to draw
    many = 10 * max_examples if _IS_NIGHTLY else max_examples
    return settings(max_examples=many, suppress_health_check=health)


class Relabelling:
    """A graph under other numbers: `values[old]` and `ops[old]` are the new ids."""

    def __init__(self, graph: Graph, values: dict[int, int], ops: dict[int, int]) -> None:
        self.graph = graph
        self.values = values
        self.ops = ops


def relabelled(graph: Graph, rng: random.Random) -> Relabelling:
    """Renumbers values, reorders inputs and roots, and runs operators in another topological order."""
    numbers = list(range(len(graph.values)))
    rng.shuffle(numbers)
    order = _topological_order(graph, rng)
    return _renumbered(graph, dict(enumerate(numbers)), order, lambda ids: permuted(ids, rng))


def permuted(items: Iterable[int], rng: random.Random) -> tuple[int, ...]:
    """Returns the items in another order."""
    shuffled = list(items)
    rng.shuffle(shuffled)
    return tuple(shuffled)


def _topological_order(graph: Graph, rng: random.Random) -> list[int]:
    done = {*graph.inputs, *graph.cotangents, *graph.constants}
    waiting = [op.id for op in graph.ops]
    order: list[int] = []
    while waiting:
        possible = [index for index in waiting if done.issuperset(graph.ops[index].inputs)]
        order.append(rng.choice(possible))
        waiting.remove(order[-1])
        done.update(graph.ops[order[-1]].outputs)
    return order


def _renumbered(
    graph: Graph,
    number: dict[int, int],
    order: list[int],
    shuffle: Callable[[Iterable[int]], tuple[int, ...]],
) -> Relabelling:
    position = {old: new for new, old in enumerate(order)}
    values: list[Value] = [graph.values[0]] * len(graph.values)
    for value in graph.values:
        producer = None if value.producer is None else position[value.producer]
        values[number[value.id]] = replace(value, id=number[value.id], producer=producer)
    ops = [
        replace(
            graph.ops[old],
            id=new,
            inputs=tuple(number[v] for v in graph.ops[old].inputs),
            outputs=tuple(number[v] for v in graph.ops[old].outputs),
        )
        for new, old in enumerate(order)
    ]
    roots = {
        name: shuffle(number[v] for v in getattr(graph, name))
        for name in ("inputs", "cotangents", "outputs", "gradients", "constants")
    }
    renumbered = Graph(values=tuple(values), ops=tuple(ops), **roots)
    renumbered.check()
    return Relabelling(renumbered, number, position)
