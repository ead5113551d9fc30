"""A policy's time limit, held over all requests of one planning. Plain data, no jax.

A planning within a budget asks its policy several times (`remat.budget`). A policy with a field `seconds` says how
long its solvers may take in all: every request gets half of what is left of that, so that those that correct the
first have time too, and what a request does not use is there for the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar, cast

from remat.policies.base import Policy

__all__ = ["TimeLimit"]

_SHARE = 0.5  # of what is left, for the next request
_LEAST = 0.01  # of the whole limit: so much every request gets, because no policy takes none

P = TypeVar("P", bound=Policy)


class TimeLimit(Generic[P]):
    """Lends a policy out with what is left of its time.

    The limit is that of its field `seconds`, or of the policies among its fields (`Auto.ilp`); without one it is lent
    as it is. A request counts for no more than it was given: work that the limit does not bound, such as a search
    with a fixed number of proposals, takes no time from later requests.

    Args:
        policy: as the user set it.
        clock: seconds since some moment.
    """

    def __init__(self, policy: P, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy = policy
        self.clock = clock
        self.seconds = _longest(policy)
        self.left = self.seconds

    @contextmanager
    def request(self) -> Iterator[P]:
        """Lends the policy for one request; its limit is then at most `seconds` in all, up to the least shares."""
        if math.isinf(self.seconds):
            yield self.policy
            return
        given = max(_SHARE * self.left, _LEAST * self.seconds)
        start = self.clock()
        try:
            yield cast(P, _limited(self.policy, given / self.seconds))
        finally:
            self.left -= min(self.clock() - start, given)


def _settings(policy: object) -> dict[str, Any]:
    if not is_dataclass(policy):
        return {}
    return {f.name: getattr(policy, f.name) for f in fields(policy) if f.init}


def _is_limit(name: str, value: object) -> bool:
    return name == "seconds" and isinstance(value, (int, float))


def _longest(policy: object) -> float:
    """The longest limit of a policy and of those it may ask; inf without one."""
    found = [
        value if _is_limit(name, value) else _longest(value)
        for name, value in _settings(policy).items()
        if _is_limit(name, value) or isinstance(value, Policy)
    ]
    return max((seconds for seconds in found if math.isfinite(seconds)), default=math.inf)


def _limited(policy: object, share: float) -> object:
    """The policy with every limit cut to a share of it."""
    changes: dict[str, Any] = {}
    for name, value in _settings(policy).items():
        if _is_limit(name, value):
            changes[name] = share * value
        elif isinstance(value, Policy):
            changes[name] = _limited(value, share)
    return replace(cast(Any, policy), **changes) if changes else policy
