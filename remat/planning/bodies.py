"""Planners of loop bodies in a session: in the way that was chosen for the loop, or with the least it can keep."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from remat.core.graph import Alternatives, Graph
from remat.core.interrupt import ended
from remat.planning.loops import (
    BodyOption,
    LoopOption,
    LoopPrices,
    body_options,
    chunk_plan,
    loop_options,
)
from remat.planning.make import make_plan, plan_from_saved
from remat.planning.protocol import NO_CHUNKS, SteadyPlanner
from remat.planning.time_limit import TimeLimit
from remat.plans.paths import is_rest, whole_of
from remat.plans.plan import LoopPlan, Plan
from remat.policies import Full
from remat.policies.base import BudgetPolicy, Decision

__all__ = ["Body", "InChunk", "Menus", "as_meant"]

Menus = dict[tuple[Hashable, ...], list[BodyOption]]
"""What bodies of loops can keep, for all plannings of a function: by the loop's path, the body's structure, what is
the same in every iteration, and what integers may be (that follows from literals, which no structure has).
"""


@dataclass
class Body(SteadyPlanner):
    """Plans one loop in a session: in the way that was chosen, or whole with the least its body can keep."""

    device: str
    policy: BudgetPolicy
    time: TimeLimit
    path: str = ""
    known: Menus = field(default_factory=dict)
    menus: dict[str, list[BodyOption]] = field(default_factory=dict)
    inner: dict[str, Body] = field(default_factory=dict)
    graph: Graph | None = None  # of one iteration, of the loop as a whole
    trips: int = 0
    may_cut: bool = False
    chosen: LoopOption | None = None

    def chunk_trips(self, length: int) -> int:
        """Chunks as chosen."""
        self.trips, self.may_cut = length, True
        return self.chosen.chunks[0] if self.chosen and self.chosen.chunks else NO_CHUNKS

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns what the session's policy wants of a loop's body."""
        return self.policy.sites(menu, None)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans a body, or a chunk."""
        del barriers  # a loop separates forward from backward by itself
        if self.chosen is not None and self.chosen.chunks:
            prices = LoopPrices(self.chosen.body.plan.graph, self.device)
            return chunk_plan(graph, prices, self.chosen.chunks[0])
        self.graph, self.trips = graph, graph.multiplicity
        if self.chosen is not None:
            return _applied(self.chosen.body, graph, self.device)
        return self.bodies[0].plan

    @property
    def bodies(self) -> list[BodyOption]:
        """Options of the body, of the graph seen last: jax traces a body several times."""
        assert self.graph is not None
        fingerprint = self.graph.fingerprint()
        if fingerprint not in self.menus:
            ranges = tuple(value.range for value in self.graph.values)
            key = (self.path, fingerprint, self.device, self.graph.fixed, ranges)
            found = self.known.get(key)
            if found is None:
                with self.time.running():
                    found = body_options(self.graph, self.device)
                    if not ended():
                        self.known[key] = found
            self.menus[fingerprint] = found
        return self.menus[fingerprint]

    def options(self) -> list[LoopOption]:
        """Ways to run the loop."""
        may_repeat = self.may_cut and self._may_repeat()
        return loop_options(self.bodies, self.trips, may_repeat=may_repeat, device=self.device)

    def _may_repeat(self) -> bool:
        """Whether an iteration may run again: nothing in it may not, nor in the loops inside."""
        if self.graph is None:
            return False
        alone = (op for op in self.graph.forward_ops() if op.loop is None)
        # Repeated as a whole, an iteration decides anew for all that it makes anew.
        return all(op.recomputable or op.decision for op in alone) and all(
            body._may_repeat() for body in self.inner.values() if body.graph is not None
        )

    def child(self, path: str) -> SteadyPlanner:
        """The loop of a chunk; a loop inside the body keeps the least: it runs once per iteration of this one."""
        if self.chosen is not None and self.chosen.chunks:
            chunks = () if is_rest(path) else self.chosen.chunks[1:]
            return InChunk(self.chosen.body, chunks, self.device, self.policy, self.time)
        inner = Body(self.device, self.policy, self.time, f"{self.path}/{path}", self.known)
        return self.inner.setdefault(path, inner)


@dataclass(frozen=True)
class InChunk(SteadyPlanner):
    """Plans the loop of a chunk, or the iterations that are left over, with an option made for the whole loop."""

    body: BodyOption
    chunks: tuple[int, ...]
    device: str
    policy: BudgetPolicy
    time: TimeLimit

    def chunk_trips(self, length: int) -> int:
        """Chunks of the chunk."""
        del length
        return self.chunks[0] if self.chunks else NO_CHUNKS

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns what the session's policy wants of a loop's body."""
        return self.policy.sites(menu, None)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans a body, or a chunk."""
        del barriers
        if self.chunks:
            prices = LoopPrices(self.body.plan.graph, self.device)
            return chunk_plan(graph, prices, self.chunks[0])
        return _applied(self.body, graph, self.device)

    def child(self, path: str) -> SteadyPlanner:
        """As `Body.child`."""
        if not self.chunks:
            return Body(self.device, self.policy, self.time)
        chunks = () if is_rest(path) else self.chunks[1:]
        return replace(self, chunks=chunks)


def _applied(option: BodyOption, graph: Graph, device: str) -> Plan:
    """The plan of a body as an option has it, for another number of iterations."""
    made = option.plan
    if graph.fingerprint() == made.graph.fingerprint():
        return made
    if not _is_body_of(option, graph):
        # jax traces bodies on the way to the one that counts; `as_meant` looks at the last.
        return make_plan(graph, Full(), barriers=False)
    return plan_from_saved(
        graph,
        Decision(frozenset(made.saved_values), made.status, made.certificate, made.notes),
        policy_name=made.policy_name,
        options=made.options,
        barriers=False,
        device=device,
    )


def _is_body_of(option: BodyOption, graph: Graph) -> bool:
    """Whether a graph is that of an option, for any number of iterations."""
    made = option.plan.graph
    return replace(graph, multiplicity=made.multiplicity).fingerprint() == made.fingerprint()


def as_meant(option: LoopOption, path: str, loops: tuple[LoopPlan, ...]) -> bool:
    """Whether the finished plan of a loop, and that of what is left over, is the one chosen."""

    def ends(found: tuple[LoopPlan, ...], path: str, chunks: tuple[int, ...]) -> list[Plan]:
        plans: list[Plan] = []
        for entry in found:
            if entry.path == path and chunks:
                plans += ends(entry.plan.loops, "scan0", chunks[1:])
            elif whole_of(entry.path) == path:
                plans.append(entry.plan)
        return plans

    return all(
        _is_body_of(option.body, plan.graph) and plan.saved_values == option.body.plan.saved_values
        for plan in ends(loops, path, option.chunks)
    )
