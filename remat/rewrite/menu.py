"""Rewrites of a joint program: the same values, computed from other values.

A *site* is a place where a backward operator can do with less than jax's rule keeps for it. Each rule finds its
sites and replaces a value by an equal one, computed by new equations. The result is an ordinary joint program, so
planning, schedules, lowering and the memory model need not know of it: whether less is then kept is the planner's
decision, as for every other value.

The rules are in `remat.rewrite.rules`; they run in an order, each on what the ones before made of the program. A
site's name is its rule and the value it replaces, `pool_codes@417`; equal functions have equal names.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.graph import Graph, Implementations, Site
from remat.trace.joint import Joint, with_program
from remat.trace.program import Atom, Equation, Literal, Program, program_of

__all__ = ["Edit", "Menu", "Operators", "Rule", "View"]


@dataclass(frozen=True)
class Edit:
    """Replaces values by what a function computes.

    Attributes:
        targets: value ids that are replaced.
        compute: `compute(*reads)` returns one array per target, of equal shape and dtype.
        reads: what it is called with, value ids or literals.
        like: the equation whose scope and source line the new equations take.
        backward_only: only backward operators read the replacement; results and forward pass keep the value.
    """

    targets: tuple[int, ...]
    compute: Callable[..., Sequence[Any]]
    reads: tuple[Atom, ...]
    like: Equation
    backward_only: bool = False


@dataclass(frozen=True)
class Rule:
    """A rewrite.

    Attributes:
        name: how its sites are called.
        kind: `output` if the backward pass then reads an operator's result instead of its operand,
            `intermediate` if it reads something smaller made for it.
        find: returns the edits a program offers, each with the value id that names its site. It is called again
            after every round of edits until it finds nothing new.
        exact: whether the gradients stay bit-equal.
    """

    name: str
    kind: str
    find: Callable[[View], Iterable[tuple[int, Edit]]]
    exact: bool = True


class View:
    """A joint program as rules read it."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.program: Program = joint.program
        self.graph = joint.graph

    @cached_property
    def makers(self) -> Mapping[int, Equation]:
        """The equation of every computed value."""
        return {v: e for e in self.program.equations for v in e.outputs}

    @cached_property
    def users(self) -> Mapping[int, Sequence[Equation]]:
        """The equations that read a value."""
        found: dict[int, list[Equation]] = {}
        for equation in self.program.equations:
            for value in dict.fromkeys(equation.reads):
                found.setdefault(value, []).append(equation)
        return found

    @cached_property
    def roots(self) -> frozenset[int]:
        """The program's results and gradients."""
        return frozenset(a for a in self.program.outputs if isinstance(a, int))

    def forward(self, value: int) -> bool:
        """Whether a value does not depend on a cotangent."""
        return self.graph.forward_values[value]

    def by(self, atom: Atom, *names: str) -> Equation | None:
        """The equation that computes an atom, if it is one of these primitives."""
        equation = self.makers.get(atom) if isinstance(atom, int) else None
        return equation if equation is not None and name_of(equation) in names else None

    def aval(self, atom: Atom) -> Any:
        """The abstract value of an atom."""
        return jax.typeof(atom.value) if isinstance(atom, Literal) else self.program.avals[atom]

    def scalar(self, atom: Atom) -> Any:
        """The number that all elements of an atom equal, if that is known; else None."""
        if isinstance(atom, Literal):
            return _single(atom.value)
        constant = self.program.constants.get(atom)
        if constant is not None:
            return None if compat.is_tracer(constant) else _single(constant)
        equation = self.by(atom, "broadcast_in_dim", "convert_element_type", "reshape", "copy")
        if equation is None:
            return None
        number = self.scalar(equation.inputs[0])
        if number is None or name_of(equation) != "convert_element_type":
            return number
        return np.asarray(number).astype(self.program.avals[atom].dtype)[()]

    def is_zero(self, atom: Atom) -> bool:
        """Whether an atom is positive zero everywhere."""
        number = self.scalar(atom)
        return number is not None and bool(number == 0) and not bool(np.signbit(number))


def name_of(equation: Equation) -> str:
    """Name of an equation's primitive."""
    return equation.source.primitive.name


def _single(value: Any) -> Any:
    """The number that all elements of a small, real array equal; else None."""
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    is_real = number and not jnp.issubdtype(dtype, np.complexfloating)
    if not is_real or not 0 < math.prod(np.shape(value)) <= 64:
        return None
    if not getattr(value, "is_fully_addressable", True):
        return None
    flat = np.asarray(value).reshape(-1)
    same = all(item.tobytes() == flat[0].tobytes() for item in flat)  # the sign of zero counts
    return flat[0] if same else None


@dataclass(frozen=True, eq=False)
class _Made:
    """A rewritten joint program; `origins` names its new values and those they replace."""

    joint: Joint
    sites: tuple[Site, ...]
    origins: Mapping[int, str]


class Operators(Protocol):
    """Other implementations of operators, put into a program before it is differentiated."""

    @property
    def names(self) -> frozenset[str]:
        """Names of what is registered: operators, and `operator/implementation`."""
        ...

    def sites(self, wanted: Implementations) -> tuple[Site, ...]:
        """Returns those of the registered implementations that are wanted and apply."""
        ...

    def joint(self, names: frozenset[str]) -> Joint:
        """Returns the joint program with these implementations in place."""
        ...


class Menu:
    """The alternatives that a joint program offers.

    Args:
        joint: as traced.
        rules: in the order in which they are tried.
        operators: what can be put in the place of operators, None for nothing.
        placed: names of the operators' implementations that `joint` was traced with.
        plain: the graph without any, None for that of `joint`.
    """

    def __init__(
        self,
        joint: Joint,
        rules: Sequence[Rule],
        operators: Operators | None = None,
        *,
        placed: frozenset[str] = frozenset(),
        plain: Graph | None = None,
    ) -> None:
        self.rules = rules
        self._operators = operators
        self._placed = placed
        self._plain = joint.graph if plain is None else plain
        if placed:
            joint = replace(
                joint,
                graph=replace(joint.graph, sites=tuple(sorted(placed)), plain=self._plain),
            )
        self._start = joint
        self._made: dict[frozenset[str], _Made] = {}
        self._menus: dict[frozenset[str], Menu] = {}

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every place that the rules find when all of them are applied."""
        return self._sites

    @cached_property
    def _sites(self) -> tuple[Site, ...]:
        made = self._apply(None)
        self._made[frozenset(site.name for site in made.sites)] = made
        return made.sites

    @property
    def names(self) -> frozenset[str]:
        """What an `implementations` setting may name."""
        rules = {rule.name for rule in self.rules} | {rule.kind for rule in self.rules}
        more = frozenset() if self._operators is None else self._operators.names
        return more | rules | {"output", "intermediate", "input", "kernel"}

    def operators(self, wanted: Implementations) -> tuple[Site, ...]:
        """Returns the operators that have another implementation among those wanted."""
        return () if self._operators is None else self._operators.sites(wanted)

    def with_operators(self, names: Collection[str]) -> Menu:
        """Returns what is offered once these operators have their other implementations."""
        key = frozenset(names)
        if key == self._placed:
            return self
        if key not in self._menus:
            assert self._operators is not None
            self._menus[key] = Menu(
                self._operators.joint(key), self.rules, placed=key, plain=self._plain
            )
        return self._menus[key]

    def joint(self, chosen: Collection[str]) -> Joint:
        """Returns the joint program with the chosen sites rewritten, by name."""
        return self._of(chosen).joint

    def graph(self, chosen: Collection[str]) -> Graph:
        """Returns the graph of `joint(chosen)`."""
        return self._of(chosen).joint.graph

    def origins(self, chosen: Collection[str]) -> Mapping[int, str]:
        """Returns names by which values are the same, whatever else is chosen; those not in it keep their ids."""
        return self._of(chosen).origins

    def _of(self, chosen: Collection[str]) -> _Made:
        operators = frozenset(name for name in chosen if "/" in name)
        if operators != self._placed:
            return self.with_operators(operators)._of(chosen)
        key = frozenset(chosen) - operators
        if key not in self._made:
            self._made[key] = self._apply(key) if key else _Made(self._start, (), {})
        return self._made[key]

    def _apply(self, chosen: Collection[str] | None) -> _Made:
        joint, sites = self._start, []
        labels: dict[int, str] = {}  # of new values: unique, and the same whatever else is chosen
        origins: dict[int, str] = {}
        for rule in self.rules:
            seen: set[int] = set()
            while True:
                wanted: list[tuple[Site, Edit]] = []
                found = [x for x in rule.find(View(joint)) if x[0] not in seen]
                for anchor, edit in found:
                    seen.add(anchor)
                    label = labels.get(anchor, str(anchor))
                    site = Site(f"{rule.name}@{label}", rule.name, rule.kind, rule.exact)
                    if chosen is None or site.name in chosen:
                        wanted.append((site, edit))
                if not wanted:
                    break
                known = len(joint.program.avals)
                joint, made = _edited(joint, [edit for _, edit in wanted])
                for (site, edit), (new, outputs) in zip(wanted, made, strict=True):
                    sites.append(site)
                    labels.update((v, f"{site.name}.{i}") for i, v in enumerate(new))
                    origins.update((v, labels[v]) for v in new)
                    if not edit.backward_only:
                        for target, atom in zip(edit.targets, outputs, strict=True):
                            if isinstance(atom, int) and atom in labels:
                                origins[atom] = origins.get(target, str(target))
                for equation in joint.program.equations:
                    _name_instances(equation, known, labels, origins)
        if not sites:
            return _Made(self._start, (), {})
        names = (*sorted(self._placed), *(site.name for site in sites))
        graph = replace(joint.graph, sites=names, plain=self._plain)
        return _Made(replace(joint, graph=graph), tuple(sites), origins)


def _name_instances(
    equation: Equation, known: int, labels: dict[int, str], origins: dict[int, str]
) -> None:
    """Names what an equation makes if it is a single instance of what it reads: new, and of no edit."""
    for value in equation.outputs:
        if value >= known and value not in labels:
            (source,) = equation.reads
            labels[value] = labels.get(source, str(source))
            origins[value] = origins.get(source, str(source))
            origins[source] = f"{origins[value]} before"


def _edited(
    joint: Joint, edits: Sequence[Edit]
) -> tuple[Joint, list[tuple[list[int], list[Atom]]]]:
    """Applies the edits of one round; where one reads what another replaces, it reads the replacement.

    Returns:
        The joint program, and for every edit its new value ids and what stands for its targets.
    """
    program = joint.program
    avals = list(program.avals)
    constants = dict(program.constants)
    forward = joint.graph.forward_values
    place = {v: float(i) for i, e in enumerate(program.equations) for v in e.outputs}
    known = dict(enumerate(forward))  # which values do not depend on a cotangent
    everywhere: dict[int, Atom] = {}
    backward: dict[int, Atom] = {}
    placed: list[tuple[float, int, Equation]] = [
        (float(index), 0, equation) for index, equation in enumerate(program.equations)
    ]
    made: list[tuple[list[int], list[Atom]]] = []
    for number, edit in enumerate(edits, start=1):
        equations, outputs = _traced(edit, avals, constants)
        made.append(([v for equation in equations for v in equation.outputs], outputs))
        # Forward equations come right after what they read: then nothing large waits for them.
        for equation in equations:
            at = max((place.get(v, -1.0) for v in equation.reads), default=-1.0)
            is_forward = all(known.get(v, True) for v in equation.reads)
            if not (is_forward or edit.backward_only):
                at = max(at, place[edit.targets[0]])
            known.update((v, is_forward) for v in equation.outputs)
            place.update((v, at) for v in equation.outputs)
            placed.append((at + 0.5, number, equation))
        table = backward if edit.backward_only else everywhere
        table.update(zip(edit.targets, outputs, strict=True))
    new = {v for _, number, e in placed if number for v in e.outputs}

    def resolve(atom: Atom, table: Mapping[int, Atom]) -> Atom:
        seen: set[int] = set()
        while isinstance(atom, int) and atom in table and atom not in seen:
            seen.add(atom)
            atom = table[atom]
        return atom

    both = {**everywhere, **backward}
    rewired: list[tuple[float, int, Equation]] = []
    for at, number, equation in placed:
        made_new = any(v in new for v in equation.outputs)
        depends = any(not forward[v] for v in equation.outputs if v < len(forward))
        table = both if depends and not made_new else everywhere
        rewired.append((at, number, equation.renamed(partial(resolve, table=table))))
    outputs = tuple(resolve(a, everywhere) for a in program.outputs)
    live = _live(rewired, outputs)
    ordered = _ordered(live, {*program.inputs, *constants})
    changed = replace(
        program,
        avals=tuple(avals),
        constants=constants,
        equations=tuple(ordered),
        outputs=outputs,
    )
    return with_program(joint, changed), made


def _traced(
    edit: Edit, avals: list[Any], constants: dict[int, Any]
) -> tuple[list[Equation], list[Atom]]:
    """Traces an edit's function to equations with new value ids."""
    given = [a for a in edit.reads if isinstance(a, int)]

    def compute(*arrays: Any) -> Sequence[Any]:
        left = iter(arrays)
        operands = [a.value if isinstance(a, Literal) else next(left) for a in edit.reads]
        with compat.at_site(edit.like.source, edit.like.site):
            return tuple(edit.compute(*operands))

    part = program_of(
        jax.make_jaxpr(compute)(*(compat.shape_of(avals[v]) for v in given)),
        inline_checkpoints=True,
        inline_custom=True,
    )
    number: dict[int, int] = dict(zip(part.inputs, given, strict=True))
    for value, array in part.constants.items():
        number[value] = len(avals)
        avals.append(part.avals[value])
        constants[number[value]] = array
    equations = []
    for equation in part.equations:
        for value in equation.outputs:
            number[value] = len(avals)
            avals.append(part.avals[value])
        equations.append(
            replace(
                equation,
                inputs=tuple(number[a] if isinstance(a, int) else a for a in equation.inputs),
                outputs=tuple(number[v] for v in equation.outputs),
                site=edit.like.source,
                rules=(),
            )
        )
    outputs: list[Atom] = [number[a] if isinstance(a, int) else a for a in part.outputs]
    for target, atom in zip(edit.targets, outputs, strict=True):
        was = avals[target]
        now = jax.typeof(atom.value) if isinstance(atom, Literal) else avals[atom]
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise AssertionError(f"a rewrite replaces {was} by {now}")
    return equations, outputs


def _live(
    placed: Sequence[tuple[float, int, Equation]], outputs: Sequence[Atom]
) -> list[tuple[float, int, Equation]]:
    """Leaves out the equations that nothing needs; unlike in a program, order means nothing yet."""
    maker = {v: index for index, (_, _, e) in enumerate(placed) for v in e.outputs}
    todo = [a for a in outputs if isinstance(a, int)]
    kept: set[int] = set()
    for index, (_, _, equation) in enumerate(placed):
        if equation.source.effects:
            kept.add(index)
            todo += equation.reads
    while todo:
        index = maker.get(todo.pop(), -1)
        if index >= 0 and index not in kept:
            kept.add(index)
            todo += placed[index][2].reads
    return [placed[index] for index in sorted(kept)]


def _ordered(placed: Sequence[tuple[float, int, Equation]], known: set[int]) -> list[Equation]:
    """Sorts equations topologically, as close to their places as possible."""
    entries = sorted(enumerate(placed), key=lambda x: (x[1][0], x[1][1], x[0]))
    rank = {index: position for position, (index, _) in enumerate(entries)}
    maker = {v: index for index, (_, _, e) in enumerate(placed) for v in e.outputs}
    waits: dict[int, set[int]] = {}
    readers: dict[int, list[int]] = {}
    ready: list[tuple[int, int]] = []
    for index, (_, _, equation) in enumerate(placed):
        needs = {maker[v] for v in equation.reads if v not in known}
        waits[index] = needs
        for need in needs:
            readers.setdefault(need, []).append(index)
        if not needs:
            heapq.heappush(ready, (rank[index], index))
    out: list[Equation] = []
    while ready:
        _, index = heapq.heappop(ready)
        out.append(placed[index][2])
        for reader in readers.get(index, ()):
            waits[reader].discard(index)
            if not waits[reader]:
                heapq.heappush(ready, (rank[reader], reader))
    if len(out) != len(placed):
        raise AssertionError("a rewrite made the program circular")
    return out
