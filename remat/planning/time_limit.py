"""A policy's time limit, held over all of one planning. Plain data, no jax.

A policy with a field `seconds` says how long one planning may take. A planning within a budget asks its policy
several times (`remat.planning.session`): every request gets half of what is left, so that those that correct the
first have time too. What is given is a deadline (`remat.core.deadline`) that everything inside keeps, and a copy of
the policy with that many `seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from remat.core.deadline import limited, now, until
from remat.core.graph import Graph
from remat.policies.base import BudgetPolicy, Decision, Policy

__all__ = ["SharedTime", "TimeLimit"]

_P = TypeVar("_P", bound=Policy)

# Of what is left, for the next request: the first gets most, and any number of them ends within the limit.
_SHARE = 0.5
# Of the whole limit: so much every request gets, because no policy takes none. A planning with its 5 requests of
# one graph (`remat.planning.within`) is late by at most a few per cent for it.
_LEAST = 0.01


class TimeLimit:
    """The time of one planning, from the moment this is made.

    The limit is that of the policy's field `seconds`, and of the policies among its fields (`Auto.ilp`); without
    one there is none.

    Args:
        policy: as the user set it.
    """

    def __init__(self, policy: BudgetPolicy) -> None:
        self.policy = policy
        self.seconds = _longest(policy)
        self.deadline = math.inf if self.seconds is None else now() + self.seconds

    @property
    def left(self) -> float:
        """Seconds left, infinity without a limit."""
        return max(self.deadline - now(), 0.0)

    def part(self, count: int) -> TimeLimit:
        """Returns a limit with one of `count` equal parts of what is left, for one of several plannings."""
        part = TimeLimit(self.policy)
        part.deadline = now() + self.left / count
        return part

    def running(self) -> AbstractContextManager[None]:
        """What happens in this context ends with the limit."""
        return until(self.deadline)

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns what the policy decides in its share of the time.

        Raises:
            BudgetError: as the policy's method.
        """
        if self.seconds is None:
            return self.policy.decide_within(graph, budget_bytes)
        given = max(_SHARE * self.left, _LEAST * self.seconds)
        policy = _limited(self.policy, given / self.seconds)
        with limited(given):
            return policy.decide_within(graph, budget_bytes)


class SharedTime:
    """A policy's time limit over several plannings with other work between them, which does not count.

    Nor does what every planning takes without a search: in a large program that is a sixth of a minute, and of the
    few halves of one minute nothing would be left to search in.

    Args:
        policy: as the user set it.
    """

    def __init__(self, policy: Policy) -> None:
        self.seconds = _longest(policy)
        self.used = 0.0
        self.besides = 0.0

    @property
    def is_short(self) -> bool:
        """Whether more was used than one planning is given, so that with more time others may be found."""
        return self.seconds is not None and self.used > _SHARE * self.seconds

    @contextmanager
    def without_search(self) -> Iterator[None]:
        """What happens in this context is a planning of a policy that does not search."""
        begin = now()
        yield
        self.besides = max(self.besides, now() - begin)

    @contextmanager
    def next(self) -> Iterator[None]:
        """What happens in this context is a planning: it ends with half of what is left."""
        if self.seconds is None:
            yield
            return
        begin = now()
        try:
            given = max(_SHARE * (self.seconds - self.used), _LEAST * self.seconds)
            with limited(given + self.besides):
                yield
        finally:
            self.used += max(now() - begin - self.besides, 0.0)


def _longest(policy: Policy) -> float | None:
    """The longest limit of a policy and of those it may ask; None without a finite one."""
    found: list[float] = []
    for field, value in policy.settings():
        seconds = value if field.name == "seconds" else None
        if isinstance(value, Policy):
            seconds = _longest(value)
        if seconds is not None and math.isfinite(seconds):
            found.append(seconds)
    return max(found, default=None)


def _limited(policy: _P, share: float) -> _P:
    """The policy with every limit cut to a share of it."""
    changes: dict[str, object] = {}
    for field, value in policy.settings():
        if field.name == "seconds" and value is not None:
            changes[field.name] = share * value
        elif isinstance(value, Policy):
            changes[field.name] = _limited(value, share)
    return policy.with_settings(**changes)
