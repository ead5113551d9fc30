"""Planning every wrapper inside a function anew, under a common knob: what `remat.fit` turns.

While an `Attempt` is active, `remat.checkpoint`, `remat.linen.remat` and `remat.nnx.remat` plan with its planner
instead of their own, and the attempt remembers what was wrapped. It is a user context of jax, part of
the keys of jax's caches, so that a `jit`, or the body of a loop, that was traced before is traced again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from remat import compat
from remat.core.graph import Alternatives, Graph, is_wanted
from remat.lower.function import StagedFunction
from remat.planning.loops import BodyOption, body_options
from remat.planning.make import plan_from_saved
from remat.planning.planners import PolicyPlanner
from remat.planning.protocol import Planner, SteadyPlanner
from remat.plans.plan import Plan
from remat.policies.base import Decision

__all__ = ["Attempt", "Menus", "PricePlanner", "Use", "active_attempt", "choose_option"]

_active = jax.make_user_context(default_value=None)

# The tracers of `jax.grad` and `jax.vjp`, by name: the classes are internal to jax and move.
_DIFFERENTIATING = ("JVPTracer", "LinearizeTracer")


@dataclass(frozen=True)
class Use:
    """A wrapped function that was differentiated during an attempt.

    Attributes:
        name: of the wrapped function.
        plan: that was made for it.
        calls: how often it is called for arguments of these shapes; 1 inside a loop body.
        kept_in_loop: whether it is called in the body of a loop that is differentiated from outside, so
            that what it keeps is kept once per iteration.
    """

    name: str
    plan: Plan
    calls: int
    kept_in_loop: bool


@dataclass(frozen=True)
class _Call:
    function: StagedFunction
    name: str
    shapes: tuple[str, ...]
    in_loop: bool
    is_differentiated: bool


@dataclass(eq=False)
class Attempt:
    """One way to plan all wrappers. Hashed by identity: no two attempts share a trace.

    Attributes:
        planner: used by every wrapper whose policy is one of ours. Wrappers with a saved plan keep it.
        caches: the traces made during the attempt, by wrapped function.
    """

    planner: Planner
    caches: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _calls: list[_Call] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes wrappers plan with this attempt's planner; for tracing in this thread."""
        with _active(self):
            yield

    def called(self, function: StagedFunction, fun: Any, arrays: Sequence[Any]) -> None:
        """Notes a call of a wrapper; `arrays` are its arguments and what it closes over."""
        self._calls.append(
            _Call(
                function,
                getattr(fun, "__qualname__", type(fun).__name__),
                tuple(map(_shape_of, arrays)),
                compat.in_loop_body(),
                any(type(array).__name__ in _DIFFERENTIATING for array in arrays),
            )
        )

    def uses(self) -> tuple[Use, ...]:
        """Returns the wrapped functions that were differentiated so far.

        jax traces the body of a loop several times; of calls alike in a body only the last counts.
        """
        found: dict[Any, list[_Call]] = {}
        for call in self._calls:
            if call.function.last_plan is not None:
                key = (call.name, call.shapes) if call.in_loop else id(call.function)
                found.setdefault(key, []).append(call)
        return tuple(
            Use(
                calls[-1].name,
                _plan_of(calls[-1]),
                1 if calls[-1].in_loop else len(calls),
                calls[-1].in_loop and not calls[-1].is_differentiated,
            )
            for calls in found.values()
        )

    def forget(self) -> None:
        """Drops traces and calls: jax's caches keep the attempt itself alive."""
        self.caches.clear()
        self._calls.clear()


def _shape_of(array: Any) -> str:
    return str(array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array))


def _plan_of(call: _Call) -> Plan:
    assert call.function.last_plan is not None
    return call.function.last_plan


def active_attempt(planner: Any) -> Attempt | None:
    """Returns the attempt that replaces a wrapper's planner, None if the wrapper keeps its own."""
    return _active.value if isinstance(planner, PolicyPlanner) else None


@dataclass(eq=False)
class Menus:
    """The options of every graph seen (`remat.planning.session.body_options`), each made once.

    Attributes:
        device: whose roofline prices them.
        options: by fingerprint of the graph; the least memory first, each with less time than the one before.
    """

    device: str
    options: dict[str, list[BodyOption]] = field(default_factory=dict)

    def of(self, graph: Graph) -> list[BodyOption]:
        """Returns the options of a graph."""
        key = graph.fingerprint()
        if key not in self.options:
            self.options[key] = body_options(graph, self.device)
        return self.options[key]


def choose_option(options: Sequence[BodyOption], price: float) -> BodyOption:
    """Returns the option with the least `seconds + price * saved_bytes`; infinity takes the least memory."""
    if price == float("inf"):
        return options[0]
    return min(options, key=lambda o: (o.seconds + price * o.saved_bytes, o.saved_bytes))


@dataclass(frozen=True)
class PricePlanner(SteadyPlanner):
    """Plans every wrapper, and every loop body in one, at the same price of memory.

    With the price as Lagrange multiplier, several wrappers share one budget: where all pay alike, no wrapper
    can keep less and another more such that both bytes and time go down (among the options at hand).

    Attributes:
        price: seconds that keeping one byte may save at least; 0 takes the least time.
        menus: shared by all attempts.
    """

    price: float
    menus: Menus

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns every bit-exact site."""
        return frozenset(site.name for site in menu.sites if is_wanted(site, "exact"))

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Returns the option with the least time plus price."""
        made = choose_option(self.menus.of(graph), self.price).plan
        return plan_from_saved(
            graph,
            Decision(frozenset(made.saved_values), made.status, made.certificate, made.notes),
            policy_name=made.policy_name,
            options=made.options,
            barriers=barriers,
            device=made.device,
        )

    def child(self, path: str) -> PricePlanner:
        """A loop's body pays the same: what it keeps and what it repeats both count once per iteration."""
        del path
        return self
