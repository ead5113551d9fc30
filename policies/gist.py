"""`Gist`: encodes what is kept and repeats nothing that costs anything.

Jain et al., "Gist: efficient data encoding for deep neural network training" (ISCA 2018), as MONeT describes its
own implementation of it (Shah et al., ICLR 2021, appendix E), in its four parts:

* *Binarize*: masks as one bit per element, the operand of a max-pool as its argmax codes (the rewrites
  `pool_codes`, `relu_through_pool`, `joint_mask`). Lossless, on by default.
* *In place*: relu reads its gradient's mask off its result (`mask_from_output`), so that its operand need not be
  kept. XLA overwrites buffers by itself.
* *Sparse storage, dense compute* (`sparse=`): results of relu as the nonzero values of every 256 and a byte of
  column number each. XLA's shapes are static, so the share that there is room for has to be given; what is beyond
  it is lost.
* *Delayed precision reduction* (`precision=`): every other float that is kept in a narrower type.

The last two change gradients: they are off unless asked for, the plan's notes say how much they cover, and
`remat.encoding_error` measures what they do.

Guarantee: nothing compute bound runs again. Complexity: linear.

Departures: what is a view, a comparison or a cast to fewer bits of values that are kept anyway is made from them
instead of being kept beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

from remat.core.errors import PolicyError, number_or_nan
from remat.core.forms import applicable, get_encoding, is_lossless, stored_bytes
from remat.core.graph import Graph, Implementations, Op
from remat.core.primitives import Trait, primitives_with
from remat.policies.base import Decision, Policy, check_implementations, required_saves

__all__ = ["Gist"]

# How many comparisons, and logic between them, may lie between a mask and what it is made of in passing. By look (a
# clipped range takes two comparisons and an `and`); beyond it the mask is kept, as a bit per element.
_MASK_DEPTH = 4

# What makes a mask of values, or of masks.
_MASK_MAKERS = primitives_with(Trait.COMPARISON) | {"and", "is_finite", "not", "or", "select_n"}


@dataclass(frozen=True)
class Gist(Policy):
    """Encodes what is kept; see the module docstring.

    Attributes:
        precision: the form of delayed precision reduction (`float16`, `bfloat16`, `float8_e4m3`, `float8_e5m2`),
            None for none. Lossy.
        sparse: share of the values that sparse storage has room for, None for none. Lossy where more are not zero.
        implementations: which rewrites of the backward pass to encode with; see `remat.rewrite.rules`.
    """

    precision: str | None = None
    sparse: float | None = None
    implementations: Implementations = "exact"
    name: ClassVar[str] = "gist"

    def __post_init__(self) -> None:
        check_implementations("Gist", self.implementations)
        if self.precision is not None and get_encoding(self.precision).kind != "float":
            raise PolicyError(
                f"Gist(precision={self.precision!r}): expected 'float16', 'bfloat16', 'float8_e4m3', "
                "'float8_e5m2' or None"
            )
        if self.sparse is not None and not 1e-6 <= number_or_nan(self.sparse) <= 1:
            raise PolicyError(
                f"Gist(sparse={self.sparse!r}): expected the share of values there is room for, above 0 and "
                "at most 1, or None"
            )

    def decide(self, graph: Graph) -> Decision:
        """Keeps what the backward pass reads, encoded."""
        saved = _kept(graph)
        forms = tuple(self._forms(graph, saved))
        return Decision(saved, forms=forms, notes=tuple(_notes(graph, forms)))

    def _forms(self, graph: Graph, saved: frozenset[int]) -> Iterator[tuple[int, str]]:
        for index in sorted(saved - graph.alive_anyway):
            value = graph.values[index]
            if value.producer is None or not value.differentiable:
                continue
            op = graph.ops[value.producer]
            if self.sparse is not None and op.name == "max":
                form = "sparse:" + f"{self.sparse:.6f}".rstrip("0")
                if applicable(form, value):
                    yield index, form
                    continue
            if self.precision is not None and applicable(self.precision, value):
                yield index, self.precision


def _kept(graph: Graph) -> frozenset[int]:
    """What the backward pass reads, but for what is made of the rest of it in passing."""
    constant = _made_of_nothing(graph)
    groups: dict[int, set[int]] = {}
    for value in graph.backward_reads - constant:
        groups.setdefault(_origin(graph, value, constant), set()).add(value)
    saved: set[int] = set()
    for origin, made in groups.items():
        parts = sum(stored_bytes(graph.values[v]) for v in made)
        whole = 0 if origin in graph.sources else stored_bytes(graph.values[origin])
        saved |= {origin} if whole <= parts else made
    saved -= graph.sources
    there = saved | graph.sources | constant
    compared = {v for v in saved if _is_compared(graph, v, there - {v})}
    return required_saves(graph, frozenset(saved - compared))


def _is_compared(
    graph: Graph, value: int, there: Collection[int], depth: int = _MASK_DEPTH
) -> bool:
    """Whether a mask is made, by a few comparisons, of values that are there."""
    op = _maker(graph, value)
    if op is None or depth == 0 or graph.values[value].dtype != "bool":
        return False
    known = op.name in _MASK_MAKERS
    return known and all(v in there or _is_compared(graph, v, there, depth - 1) for v in op.inputs)


def _made_of_nothing(graph: Graph) -> frozenset[int]:
    """Forward values that depend on no argument: broadcast numbers, ranges."""
    found = set(graph.constants)
    for op in graph.forward_ops():
        if op.fusible and op.recomputable and not op.random and found.issuperset(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def _origin(graph: Graph, value: int, constant: frozenset[int]) -> int:
    """The value that another is a view of, a cast to fewer bits of, or, if it is no float, computed from alone."""
    while (op := _maker(graph, value)) is not None:
        varying = [v for v in op.inputs if v not in constant]
        entry = graph.values[value]
        narrower = op.name == "convert_element_type" and varying and _is_narrower(graph, op)
        passing = op.kind == "VIEW" or narrower or not entry.differentiable
        if len(varying) != 1 or not passing:
            break
        source = graph.values[varying[0]]
        if source.differentiable and not entry.differentiable:
            break  # a mask of a float is not kept as the float
        value = varying[0]
    return value


def _is_narrower(graph: Graph, op: Op) -> bool:
    return graph.values[op.outputs[0]].nbytes < graph.values[op.inputs[0]].nbytes


def _maker(graph: Graph, value: int) -> Op | None:
    """The operator that makes a value, if it is one that XLA fuses and that may run again."""
    producer = graph.values[value].producer
    if producer is None:
        return None
    op = graph.ops[producer]
    return op if op.recomputable and op.fusible and not op.random else None


def _notes(graph: Graph, forms: tuple[tuple[int, str], ...]) -> Iterator[str]:
    by_form: dict[str, int] = {}
    for value, form in forms:
        by_form[form] = by_form.get(form, 0) + graph.values[value].nbytes
    for form, nbytes in sorted(by_form.items()):
        if not is_lossless(form):
            yield (
                f"lossy: values of {nbytes:,} bytes are kept as {form}; gradients differ from plain JAX's. "
                "Measure it with remat.encoding_error(fun, *args, remat_policy=...)"
            )
