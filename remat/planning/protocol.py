"""Who answers, while a function is traced, how it and the bodies of its loops are planned. Plain data, no jax."""

from __future__ import annotations

from typing import Protocol, Self

from remat.core.graph import Alternatives, Graph
from remat.plans.plan import LoopPlan, Plan

__all__ = ["NO_CHUNKS", "Planner", "SteadyPlanner"]

NO_CHUNKS = 1
"""Answer of `Planner.chunk_trips` for a loop that stays as it is."""


class Planner(Protocol):
    """Makes the plan of one room: a function, or the body of a loop in it.

    A loop of `n` iterations may be cut into chunks of `k`: a loop over `n // k` chunks, whose body is a loop of `k`
    iterations, then a loop over the `n % k` that are left. The planner of the loop is then that of a chunk, its
    `child("scan0")` that of the loop in a chunk, and `child(rest_of(path))` of the room plans the rest.
    """

    @property
    def takes_long(self) -> bool:
        """Whether planning may take long: Ctrl-C then ends it early, with the best plan so far."""
        ...

    @property
    def has_budget(self) -> bool:
        """Whether plans are held to a budget."""
        ...

    def begin(self) -> Planner:
        """Returns the planner of one function and its loops; it may remember what it has seen."""
        ...

    def again(self, plan: Plan) -> bool:
        """Whether to trace and plan once more, having seen a plan with its loops."""
        ...

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns the sites at which the room's joint program is rewritten before it is planned, by name."""
        ...

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans a joint graph."""
        ...

    def finish(self, plan: Plan) -> Plan:
        """Returns the finished plan, its loops included; raises if it is not acceptable."""
        ...

    def child(self, path: str) -> Planner:
        """Returns the planner of the loop body called `path` (`scan0`)."""
        ...

    def chunk_trips(self, length: int) -> int:
        """Returns the iterations of a chunk of this planner's loop, which has `length`; 1 for no chunks.

        Asked before the body is planned, of loops that may be cut into chunks.
        """
        ...

    def check_loops(self, plan: Plan, loops: tuple[LoopPlan, ...]) -> None:
        """Raises if the plans that the loops ended up with are not those that were meant.

        jax traces a loop's body several times until it knows which carried values are differentiated, and
        every time the body is planned; only the last plan counts.

        Args:
            plan: of the room, as `plan` returned it.
            loops: plans of its loops.
        """
        ...


class SteadyPlanner:
    """What most planners answer: one look is enough, loops stay whole, whatever comes out is right."""

    @property
    def takes_long(self) -> bool:
        """One look is quick."""
        return False

    @property
    def has_budget(self) -> bool:
        """Plans may take what they take."""
        return False

    def begin(self) -> Self:
        """Returns itself: nothing is remembered."""
        return self

    def again(self, plan: Plan) -> bool:
        """One plan is enough."""
        del plan
        return False

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """The program stays as it is."""
        del menu
        return frozenset()

    def finish(self, plan: Plan) -> Plan:
        """Returns the plan as it is."""
        return plan

    def chunk_trips(self, length: int) -> int:
        """Loops stay whole."""
        del length
        return NO_CHUNKS

    def check_loops(self, plan: Plan, loops: tuple[LoopPlan, ...]) -> None:
        """Whatever the loops were planned to is right."""
        del plan, loops
