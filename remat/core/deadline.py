"""One deadline for all that happens inside. Plain data, no jax.

A planning passes through many hands (`remat.core.interrupt`), and a limit on its time has to hold in all of them.
So the deadline is a context variable: who limits a piece of work enters `limited`, who works asks `out_of_time`
between two steps, and who hands the time on to a solver asks `seconds_left`. A deadline inside of another cannot be
later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["limited", "now", "out_of_time", "seconds_left", "until"]

# Of this thread: what else a machine does must not decide which plan is found within a budget.
_clock: Callable[[], float] = time.thread_time
_DEADLINE: ContextVar[float] = ContextVar("remat_deadline", default=math.inf)


def now() -> float:
    """Processor seconds of this thread since some moment: the clock of all deadlines."""
    return _clock()


@contextmanager
def until(moment: float) -> Iterator[None]:
    """Limits what happens inside to a moment of `now`, or an earlier one that holds already."""
    token = _DEADLINE.set(min(_DEADLINE.get(), moment))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limits what happens inside to so many seconds from now, or to the deadline that holds already."""
    with until(now() + seconds):
        yield


def seconds_left() -> float:
    """Seconds to the deadline, 0 once it has passed, infinity without one."""
    moment = _DEADLINE.get()
    return moment if math.isinf(moment) else max(moment - now(), 0.0)


def out_of_time() -> bool:
    """Whether the deadline has passed; False without one."""
    moment = _DEADLINE.get()
    return not math.isinf(moment) and now() >= moment
