"""From a function to its plan: trace, rewrite, plan. What comes out is lowered by `remat.lower.staged`.

`plan_room` is the way of docs/design.md. A loop's body is a room of its own that goes the same way while the
function around it is traced; `Planner` answers for both how they are planned, and whether once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax

from remat import compat
from remat.core.errors import BudgetError
from remat.core.garbage import without_collection
from remat.core.graph import Graph, Implementations, Op, Site
from remat.planning.make import with_loops
from remat.planning.opaque import warn_of_opaque
from remat.planning.protocol import NO_CHUNKS, Planner
from remat.plans.paths import rest_of
from remat.plans.plan import LoopPlan, Plan
from remat.rewrite import substitution
from remat.rewrite.menu import Menu
from remat.rewrite.operators import implementations
from remat.rewrite.rules import RULES
from remat.trace.joint import Joint, trace_joint
from remat.trace.program import (
    LOOP_SCOPE,
    Program,
    program_of,
)
from remat.trace.symbolic import STAND_IN, has_symbols

__all__ = ["BodyFunction", "MakesBody", "Room", "plan_room"]


@dataclass(frozen=True, eq=False)
class Room:
    """What is planned as one: a function, or the body of a loop in it.

    Attributes:
        program: all of it that has a gradient.
        barriers: whether stages of its backward pass begin with a barrier; not in loop bodies.
        inline_checkpoints: whether a `jax.checkpoint` inside is taken over by the plan.
        multiplicity: iterations of the loop that it is the body of.
        num_invariant, num_carried: inputs that are the same in every iteration and come first, and those that
            are carried on and come second.
        name_values: whether values get the names that a policy of jax chooses by.
        is_chunk: whether it is a chunk of iterations, whose loop runs again in the backward pass.
        is_body: whether it is in a loop: its plan is part of the function's.
    """

    program: Program
    barriers: bool = True
    inline_checkpoints: bool = True
    multiplicity: int = 1
    num_invariant: int = 0
    num_carried: int = 0
    name_values: bool = False
    is_chunk: bool = False
    is_body: bool = False


class BodyFunction(Protocol):
    """The body of a loop as a function that is planned when it is differentiated."""

    last_plan: Plan | None

    def __call__(self, *inputs: Any) -> list[Any]:
        """Runs it."""
        ...


MakesBody = Callable[..., BodyFunction]
"""Makes a body of its program, its planner and the other fields of its room."""


@without_collection()
def plan_room(
    room: Room,
    inputs: Sequence[Any],
    perturbed: tuple[bool, ...],
    planner: Planner,
    body: MakesBody,
) -> tuple[Joint, Plan]:
    """Returns the joint program of a room, rewritten as its planner wants it, and the plan of it.

    Args:
        room: what to plan.
        inputs: arrays or tracers like those it is called with.
        perturbed: which of them are differentiated.
        planner: says how.
        body: makes the functions that its loops run, `remat.lower.function.StagedFunction`.

    Raises:
        BudgetError: the planner's, or a budget for shapes that are not known.
    """
    if planner.has_budget and has_symbols(room.program):
        raise BudgetError(
            "a budget cannot be held for shapes with symbolic dimensions: how many bytes the function takes is "
            "not known before they are. Leave budget= out, or export the function for concrete shapes."
        )
    session = planner.begin()
    while True:
        joint, loops = _rewritten(_Traces(room, inputs, perturbed, session, body))
        plan = session.plan(joint.graph, barriers=room.barriers)
        nested = loops.plans()
        session.check_loops(plan, nested)
        if nested and not plan.loops:
            plan = with_loops(plan, nested)
        if not session.again(plan):
            break
    plan = session.finish(plan)
    if not room.is_body:
        warn_of_opaque(plan)
    return joint, plan


def _rewritten(traces: _Traces) -> tuple[Joint, _Loops]:
    """The joint program at the sites that the planner chooses, and its loops."""
    room, planner = traces.room, traces.planner
    joint = traces.joint(frozenset())
    if not room.name_values:  # a policy of jax chooses among the values of the program as it is
        menu = Menu(joint, () if has_symbols(room.program) else RULES, traces)
        joint = menu.joint(planner.sites(menu))
    loops = traces.loops(joint)
    graph = _with_loop_paths(joint.graph, loops.renamed, repeatable=room.is_chunk)
    return replace(joint, graph=graph), loops


class _Traces:
    """Joint programs of a function: as it is, and with other implementations of its operators."""

    def __init__(
        self,
        room: Room,
        inputs: Sequence[Any],
        perturbed: tuple[bool, ...],
        planner: Planner,
        body: MakesBody,
    ) -> None:
        self.room = room
        self.inputs = inputs
        self.perturbed = perturbed
        self.planner = planner
        self.body = body
        self._made: dict[frozenset[str], tuple[Joint, _Loops]] = {}

    @property
    def names(self) -> frozenset[str]:
        """As `remat.rewrite.menu.Operators`."""
        registered = implementations()
        return frozenset(name for i in registered for name in (i.id, i.operator))

    def sites(self, wanted: Implementations) -> tuple[Site, ...]:
        """As `remat.rewrite.menu.Operators`."""
        return substitution.sites_in(self.room.program, wanted)

    def joint(self, names: frozenset[str]) -> Joint:
        """As `remat.rewrite.menu.Operators`."""
        if names not in self._made:
            room, loops = self.room, _Loops(self.room, self.planner, self.body)
            primal = substitution.substituted(room.program, names) if names else room.program
            joint = trace_joint(
                primal,
                self.inputs,
                self.perturbed,
                loop=loops.run,
                name_values=room.name_values,
                multiplicity=room.multiplicity,
                num_invariant=room.num_invariant,
                num_carried=room.num_carried,
            )
            self._made[names] = (joint, loops)
        return self._made[names][0]

    def loops(self, joint: Joint) -> _Loops:
        """Returns the loops of one of the joint programs, rewritten or not."""
        placed = frozenset(name for name in joint.graph.sites if "/" in name)
        return self._made[placed][1]


class _Loops:
    """Runs the loops of a function with bodies that are planned, and remembers their plans."""

    def __init__(self, room: Room, planner: Planner, body: MakesBody) -> None:
        self.room = room
        self.planner = planner
        self.body = body
        self.found: dict[str, tuple[int, int, BodyFunction]] = {}
        self.renamed: dict[str, str] = {}
        self._rests = itertools.count(
            sum(compat.scan_parts(e.source) is not None for e in room.program.equations)
        )

    def run(
        self, path: str, _: Any, parts: compat.ScanParts, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """A `remat.trace.joint.LoopHandler`."""
        inner = self.planner.child(path)
        # A policy of jax chooses values by name; it cannot say that a loop is cut.
        trips = NO_CHUNKS if self.room.name_values else inner.chunk_trips(parts.length)
        if not NO_CHUNKS < trips < parts.length:
            return self._whole(path, inner, parts, operands)
        program = program_of(
            compat.trace_chunk(parts, trips, operands), keep=substitution.called_by_name()
        )
        chunk = self._function(program, inner, parts, parts.length // trips, is_chunk=True)
        self.found[path] = (parts.length // trips, trips, chunk)
        return compat.run_chunks(parts, trips, chunk, partial(self._rest, path), operands)

    def _whole(
        self, path: str, planner: Planner, parts: compat.ScanParts, operands: Sequence[Any]
    ) -> Sequence[Any]:
        body = program_of(
            parts.body,
            inline_checkpoints=self.room.inline_checkpoints,
            keep=substitution.called_by_name(),
        )
        length = compat.with_sizes(parts.length, STAND_IN)
        function = self._function(body, planner, parts, length)
        self.found[path] = (length, 1, function)
        return compat.run_scan(parts, function, operands)

    def _rest(self, path: str, parts: compat.ScanParts, operands: Sequence[Any]) -> Sequence[Any]:
        # Named scopes tell loops apart by number; the rest's is one that no loop of the function has.
        scope, rest = f"scan{next(self._rests)}", rest_of(path)
        self.renamed[scope] = rest
        with jax.named_scope(LOOP_SCOPE + scope):
            return self._whole(rest, self.planner.child(rest), parts, operands)

    def _function(
        self,
        program: Program,
        planner: Planner,
        parts: compat.ScanParts,
        multiplicity: int,
        *,
        is_chunk: bool = False,
    ) -> BodyFunction:
        return self.body(
            program,
            planner,
            barriers=False,
            is_body=True,
            inline_checkpoints=self.room.inline_checkpoints,
            multiplicity=multiplicity,
            num_invariant=parts.num_consts,
            num_carried=parts.num_carry,
            name_values=self.room.name_values,
            is_chunk=is_chunk,
        )

    def plans(self) -> tuple[LoopPlan, ...]:
        """Returns the plans of the loops that were differentiated."""
        return tuple(
            LoopPlan(path, length, function.last_plan, chunk)
            for path, (length, chunk, function) in self.found.items()
            if function.last_plan is not None
        )


def _with_loop_paths(graph: Graph, renamed: Mapping[str, str], *, repeatable: bool) -> Graph:
    """Returns the graph with loops under their paths; `repeatable` loops may run again in the backward pass."""
    if not (renamed or repeatable):
        return graph

    def changed(op: Op) -> Op:
        if op.loop is None:
            return op
        path = renamed.get(op.loop, op.loop)
        again = repeatable and op.phase == "forward"
        return replace(
            op,
            loop=path,
            recomputable=op.recomputable or again,
            reason="" if again else op.reason,
        )

    plain = graph.plain
    return replace(
        graph,
        ops=tuple(map(changed, graph.ops)),
        plain=None if plain is None else _with_loop_paths(plain, renamed, repeatable=repeatable),
    )
