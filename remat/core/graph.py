"""The joint forward/backward graph as plain data: no jax, no arrays, only integers and names.

The graph is that of Yu & He (section 3.2): one operator list in a topological order that computes a
function's results and, from them and the cotangents, its gradients. Operators that do not depend on a
cotangent are *forward-computable* (their set is the paper's V_f); the rest is backward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Alternatives", "Graph", "Implementations", "Op", "Phase", "Site", "Value"]

Phase = Literal["forward", "backward"]

Implementations = Literal["none", "exact", "all"] | tuple[str, ...]
"""Which rewrites a policy plans with: none, the bit-exact ones, all, or those of named rules, kinds, operators."""


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the joint graph.

    Attributes:
        id: index into `Graph.values`.
        shape: dimensions, as traced (inside a loop body: of one iteration).
        dtype: dtype name, for instance `bfloat16`, `bool` or `key<fry>`.
        nbytes: bytes in device memory in the form in which it was computed.
        producer: index of the operator that computes it, None for an input, cotangent or constant.
        tags: the user's `checkpoint_name`s.
        differentiable: whether it is an inexact array.
        primal: index of the value in the undifferentiated program, None if born in differentiation
            or if that was not recorded.
        savable: whether a policy may choose to keep it; False for values born in differentiation when
            the plan is to be lowered to `jax.checkpoint`, which can only name values of the program.
        range: smallest and largest value that an integer can have, where that is proven.
        form: the form in which a plan keeps it if not in the smallest lossless one; see `remat.core.forms`.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    producer: int | None
    tags: tuple[str, ...] = ()
    differentiable: bool = True
    primal: int | None = None
    savable: bool = True
    range: tuple[int, int] | None = None
    form: str | None = None

    @property
    def label(self) -> str:
        """Returns jax's short spelling, for instance `f32[8,512]`."""
        short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
        text = self.dtype
        for long, brief in sorted(short.items(), key=lambda item: -len(item[0])):
            if text.startswith(long) and text[len(long) :].isdigit():
                text = brief + text[len(long) :]
                break
        return f"{text}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of the joint graph.

    Attributes:
        id: index into `Graph.ops`; the order is topological and is the order of execution.
        name: primitive name.
        inputs: value ids, one per operand that is a value (literals are left out).
        outputs: value ids.
        flops: floating point (or integer) operations, exact where the primitive is known.
        bytes_moved: operand plus result bytes, what the operator moves when nothing is fused.
        phase: forward if it does not depend on a cotangent.
        fusible: XLA merges it with neighbours, so its result need not become a buffer.
        heavy: compute bound (matmul, convolution, ...).
        random: draws random bits.
        effectful: has side effects, must run exactly once.
        recomputable: may run again in the backward pass.
        decision: may not, for the one reason that its result turns on the last bit of what it reads; see
            `remat.trace.decisions`. It is an ordinary operator otherwise.
        reason: why it may not, empty if it may.
        kind: class of the primitive (`POINTWISE`, `VIEW`, ...), `OPAQUE` when unknown.
        scope: the named scope (`Block_0/attention`), as traced.
        source: `file:line` in the user's code.
        batched: a matmul with batch dimensions (attention scores), cheap for its size.
        contracts: of a matmul, the dimensions that it sums over and those of its batch: of both operands each.
        loop: path of the loop whose body has a plan of its own, None for an operator without one.
        padded: the gradient of a pool whose first windows begin before its operand does.
        swapped: the gradient of a transposed convolution's kernel, for which XLA copies the first operand.
        workspace_bytes: of what XLA:GPU makes of its operands before it, and frees behind it.
        elemental: a reduction so short that XLA merges it with what reads it, like an element-wise operator.
        cycles: clock cycles that XLA counts for an element of the result; 0 where the name tells.
        axes: of a reduction, the dimensions that it reduces.
        blocks: of a reduction, the blocks of threads that XLA makes it with; 0 for enough to occupy a device.
        setting: a digest of its parameters and literals: with the same operands and setting two operators of one
            name compute the same. Empty where that is not known. Not part of equality.
    """

    id: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    bytes_moved: int
    phase: Phase
    fusible: bool
    heavy: bool = False
    random: bool = False
    effectful: bool = False
    recomputable: bool = True
    decision: bool = False
    reason: str = ""
    kind: str = "POINTWISE"
    scope: str = ""
    source: str = ""
    batched: bool = False
    contracts: tuple[tuple[int, ...], ...] = ()
    loop: str | None = None
    padded: bool = False
    swapped: bool = False
    workspace_bytes: int = 0
    elemental: bool = False
    cycles: int = 0
    axes: tuple[int, ...] = ()
    blocks: int = 0
    setting: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Site:
    """A place where the backward pass can be computed from other values; see `remat.rewrite.menu`.

    Attributes:
        name: `rule@value`, the same for equal functions.
        rule: what replaces the value: a rule, or an implementation, `softmax/output`.
        kind: `output`, `intermediate`, `input` or `kernel`, as in `remat.rewrite.operators`.
        exact: whether the gradients stay bit-equal.
    """

    name: str
    rule: str
    kind: str
    exact: bool = True


@dataclass(frozen=True)
class Graph:
    """A joint forward/backward graph; see the module docstring.

    Attributes:
        values: all arrays, `values[i].id == i`.
        ops: all operators in execution order, `ops[i].id == i`.
        inputs: value ids of the function's inputs, closed-over arrays included.
        cotangents: value ids of the backward pass's inputs.
        outputs: value ids of the function's results (a result that is a literal is left out).
        gradients: value ids of the gradients (a gradient that is a literal is left out).
        constants: value ids of arrays known while tracing; free to use in both phases.
        invariant: the inputs that are the same in every iteration, if the graph is a loop body.
        carried: the inputs that one iteration gets from the one before, and the results it hands on; unlike
            other inputs and results they live for one iteration only, so keeping one costs memory.
        multiplicity: how often the graph runs in one call: a loop body runs once per iteration and
            its saved values are stored once per iteration.
        sites: names of the sites (`Site`) at which it was rewritten.
        plain: the graph before it was rewritten, what a plan is compared with; not part of equality.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    cotangents: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    invariant: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    multiplicity: int = 1
    sites: tuple[str, ...] = ()
    plain: Graph | None = field(default=None, compare=False, repr=False)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For every value the ids of the operators that read it, ascending, each once."""
        found: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for value in dict.fromkeys(op.inputs):
                found[value].append(op.id)
        return tuple(map(tuple, found))

    @cached_property
    def forward_values(self) -> tuple[bool, ...]:
        """For every value whether it can be computed without a cotangent (Yu & He's V_f)."""
        known = [False] * len(self.values)
        for value in (*self.inputs, *self.constants):
            known[value] = True
        for op in self.ops:
            if op.phase == "forward":
                for value in op.outputs:
                    known[value] = True
        return tuple(known)

    @cached_property
    def backward_reads(self) -> frozenset[int]:
        """Forward-computable values that the backward pass reads, gradients among them included."""
        reads = {
            value
            for op in self.ops
            if op.phase == "backward"
            for value in op.inputs
            if self.forward_values[value]
        }
        reads.update(value for value in self.gradients if self.forward_values[value])
        return frozenset(reads.difference(self.constants))

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """What was computed of this graph, by a key of whoever did: it lives as long, and is no part of it."""
        return {}

    @cached_property
    def sources(self) -> frozenset[int]:
        """Values that are there before anything is computed: inputs and constants."""
        return frozenset((*self.inputs, *self.constants))

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Forward values of a loop's body that are the same in every iteration; empty outside of loops.

        jax computes and keeps them once, so they are not stored once per iteration.
        """
        if self.multiplicity == 1:
            return frozenset()
        found = {*self.invariant, *self.constants}
        for op in self.forward_ops():
            if not (op.random or op.effectful) and all(value in found for value in op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def alive_anyway(self) -> frozenset[int]:
        """Values whose memory is the caller's: keeping one for the backward pass costs nothing more."""
        return frozenset((*self.inputs, *self.outputs)).difference(self.carried)

    def forward_ops(self) -> Iterator[Op]:
        """Iterates over the forward-computable operators in execution order."""
        return (op for op in self.ops if op.phase == "forward")

    def backward_ops(self) -> Iterator[Op]:
        """Iterates over the operators that depend on a cotangent, in execution order."""
        return (op for op in self.ops if op.phase == "backward")

    def fingerprint(self) -> str:
        """Returns a hash of the structure: shapes, dtypes, operators, wiring, what decides; no names or lines."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(repr((value.shape, value.dtype, value.producer)).encode())
        for op in self.ops:
            digest.update(repr((op.name, op.inputs, op.outputs, op.phase, op.decision)).encode())
        roots = (self.inputs, self.cotangents, self.outputs, self.gradients, self.multiplicity)
        digest.update(repr(roots).encode())
        return digest.hexdigest()[:32]

    def check(self) -> None:
        """Raises ValueError if the graph is not well formed (ids, order, phases, roots)."""
        for index, value in enumerate(self.values):
            if value.id != index:
                raise ValueError(f"value {index} has id {value.id}")
        given = (*self.inputs, *self.cotangents, *self.constants)
        strange = [
            v for v in given if not 0 <= v < len(self.values) or self.values[v].producer is not None
        ]
        if strange:
            raise ValueError(f"inputs {strange} do not exist or have a producer")
        defined = set(given)
        backward = set(self.cotangents)
        for index, op in enumerate(self.ops):
            if op.id != index:
                raise ValueError(f"operator {index} has id {op.id}")
            missing = [value for value in op.inputs if value not in defined]
            if missing:
                raise ValueError(f"operator {index} ({op.name}) reads undefined values {missing}")
            depends = any(value in backward for value in op.inputs)
            if depends != (op.phase == "backward"):
                raise ValueError(f"operator {index} ({op.name}) is marked {op.phase}")
            for value in op.outputs:
                exists = 0 <= value < len(self.values)
                if not exists or value in defined or self.values[value].producer != index:
                    raise ValueError(f"value {value} is defined twice or has a wrong producer")
                defined.add(value)
                if depends:
                    backward.add(value)
        roots = (*self.outputs, *self.gradients)
        undefined = [value for value in roots if value not in defined]
        if undefined:
            raise ValueError(f"results {undefined} are never computed")
        late = [value for value in self.outputs if value in backward]
        if late:
            raise ValueError(f"results {late} depend on a cotangent")

    def to_networkx(self) -> nx.DiGraph:
        """Returns the bipartite operator/value graph as a `networkx.DiGraph`.

        Nodes are `("value", id)` and `("op", id)` with the fields of `Value` and `Op` as attributes.
        """
        import networkx as nx

        graph = nx.DiGraph(multiplicity=self.multiplicity)
        roles = {
            "input": set(self.inputs),
            "cotangent": set(self.cotangents),
            "output": set(self.outputs),
            "gradient": set(self.gradients),
            "constant": set(self.constants),
        }
        for value in self.values:
            role = [name for name, ids in roles.items() if value.id in ids]
            graph.add_node(("value", value.id), roles=tuple(role), **_fields(value))
        for op in self.ops:
            graph.add_node(("op", op.id), **_fields(op))
            graph.add_edges_from((("value", v), ("op", op.id)) for v in op.inputs)
            graph.add_edges_from((("op", op.id), ("value", v)) for v in op.outputs)
        return graph

    def to_dict(self) -> dict[str, Any]:
        """Returns the graph as JSON-ready data."""
        return {
            "values": [asdict(value) for value in self.values],
            "ops": [asdict(op) for op in self.ops],
            **{name: list(getattr(self, name)) for name in _ROOTS},
            "multiplicity": self.multiplicity,
            "sites": list(self.sites),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Graph:
        """Inverse of `to_dict`."""
        values = tuple(
            Value(
                **{
                    **v,
                    "shape": tuple(v["shape"]),
                    "tags": tuple(v["tags"]),
                    "range": None if v.get("range") is None else tuple(v["range"]),
                }
            )
            for v in data["values"]
        )
        ops = tuple(
            Op(
                **{
                    **op,
                    "inputs": tuple(op["inputs"]),
                    "outputs": tuple(op["outputs"]),
                    "contracts": tuple(map(tuple, op.get("contracts", ()))),
                    "axes": tuple(op.get("axes", ())),
                }
            )
            for op in data["ops"]
        )
        roots: dict[str, Any] = {name: tuple(data[name]) for name in _ROOTS}
        return cls(
            values=values,
            ops=ops,
            multiplicity=data["multiplicity"],
            sites=tuple(data.get("sites", ())),
            **roots,
        )

    def to_json(self) -> str:
        """Returns the graph as a JSON document."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Inverse of `to_json`."""
        return cls.from_dict(json.loads(text))


class Alternatives(Protocol):
    """The rewrites that a function offers; see `remat.rewrite.menu.Menu`."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every place that a rule can rewrite."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """What an `implementations` setting may name: rules, kinds and registered operators."""
        ...

    def operators(self, wanted: Implementations) -> tuple[Site, ...]:
        """Returns the operators that have another implementation among those wanted."""
        ...

    def with_operators(self, names: Collection[str]) -> Alternatives:
        """Returns what is offered once these operators have their other implementations."""
        ...

    def graph(self, chosen: Collection[str]) -> Graph:
        """Returns the joint graph with the chosen sites rewritten, by name."""
        ...

    def origins(self, chosen: Collection[str]) -> Mapping[int, str]:
        """Returns names by which values are the same, whatever else is chosen; those not in it keep their ids."""
        ...


def wanted_sites(sites: Iterable[Site], wanted: Implementations) -> frozenset[str]:
    """Returns the names of the sites that a setting names, and of those that these build on."""
    named = (required_sites(site.name) for site in sites if is_wanted(site, wanted))
    return frozenset().union(*named)


def is_wanted(site: Site, wanted: Implementations) -> bool:
    """Whether a site is one of those an `implementations` setting names."""
    if isinstance(wanted, str):
        return wanted == "all" or (wanted == "exact" and site.exact)
    names = (site.name, site.rule, site.rule.partition("/")[0], site.kind)
    return any(name in wanted for name in names)


def required_sites(name: str) -> frozenset[str]:
    """Returns a site and those it builds on: `mask_from_output@joint_mask@32.1` needs `joint_mask@32`."""
    _, _, label = name.partition("@")
    if "@" not in label:
        return frozenset({name})
    return frozenset({name}) | required_sites(label.rpartition(".")[0])


_ROOTS = ("inputs", "cotangents", "outputs", "gradients", "constants", "invariant", "carried")


def _fields(record: Value | Op) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__ if name != "id"}
