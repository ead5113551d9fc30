"""A policy's time limit, held over all requests of one planning. Plain data, no jax.

A planning within a budget asks its policy several times (`remat.budget`). A policy with a field `seconds` says how
long its solvers may take in all: every request gets half of what is left of that, so that those that correct the
first have time too, and what a request does not use is there for the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from remat.graph import Graph
from remat.policies.base import BudgetPolicy, Decision, Policy

__all__ = ["TimeLimit"]

_SHARE = 0.5  # of what is left, for the next request
_LEAST = 0.01  # of the whole limit: so much every request gets, because no policy takes none


class TimeLimit:
    """Asks a policy with what is left of its time.

    The limit is that of the policy's field `seconds`, and of the policies among its fields (`Auto.ilp`); without
    one it is asked as it is. What a request takes is what its decision says (`Decision.solver_seconds`): work
    that the limit does not bound, such as a search with a fixed number of proposals, takes nothing from later
    requests. Where the policy does not say, or refuses, the time until its answer counts, up to what it was given.

    Args:
        policy: as the user set it.
        clock: seconds since some moment.
    """

    def __init__(
        self, policy: BudgetPolicy, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.seconds = _longest(policy)
        self.left = self.seconds
        self._whole: TimeLimit | None = None

    def part(self, count: int) -> TimeLimit:
        """Returns a limit with one of `count` equal parts of what is left, for one of several plannings.

        What it takes is taken from here too, so that what it leaves is there for the others.
        """
        part = TimeLimit(self.policy, self.clock)
        part.left = None if self.left is None else self.left / count
        part._whole = self
        return part

    def _take(self, seconds: float) -> None:
        if self.left is not None:
            self.left = max(self.left - seconds, 0.0)
        if self._whole is not None:
            self._whole._take(seconds)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns what the policy decides in its share of the time.

        Raises:
            BudgetError: as the policy's method.
        """
        if self.seconds is None or self.left is None:
            return self.policy.decide_within(graph, budget_bytes)
        given = max(_SHARE * self.left, _LEAST * self.seconds)
        start, taken = self.clock(), None
        try:
            decision = _limited(self.policy, given / self.seconds).decide_within(
                graph, budget_bytes
            )
            taken = decision.solver_seconds
        finally:
            if taken is None:
                taken = min(self.clock() - start, given)
            self._take(taken)
        return decision


def _settings(policy: object) -> dict[str, Any]:
    if not is_dataclass(policy):
        return {}
    return {f.name: getattr(policy, f.name) for f in fields(policy) if f.init}


def _longest(policy: object) -> float | None:
    """The longest limit of a policy and of those it may ask; None without a finite one."""
    found: list[float] = []
    for name, value in _settings(policy).items():
        seconds = value if name == "seconds" else None
        if isinstance(value, Policy):
            seconds = _longest(value)
        if seconds is not None and math.isfinite(seconds):
            found.append(seconds)
    return max(found, default=None)


def _limited(policy: Any, share: float) -> Any:
    """The policy with every limit cut to a share of it."""
    changes: dict[str, Any] = {}
    for name, value in _settings(policy).items():
        if name == "seconds" and value is not None:
            changes[name] = share * value
        elif isinstance(value, Policy):
            changes[name] = _limited(value, share)
    return replace(policy, **changes) if changes else policy
