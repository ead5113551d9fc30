"""Revolve: the binomial schedule of equal steps.

Griewank & Walther, "Algorithm 799: Revolve" (2000): `revolve_steps` is t(l, s), the fewest forward steps that
reverse l equal steps with s snapshots; `revolve_schedule` is the schedule that needs them.
"""

from __future__ import annotations

import math
from functools import lru_cache

from remat.core.errors import PolicyError
from remat.policies.solvers.chain.schedule import Move, StagePlan, Task, expand

__all__ = ["revolve_schedule", "revolve_steps"]


def revolve_steps(length: int, snapshots: int) -> int:
    """Returns t(l, s): the fewest forward steps that reverse `length` steps with `snapshots` snapshots.

    t(l, s) = r l - C(s + r, r - 1), r the least integer with C(s + r, s) >= l. The snapshot of the initial state
    is among the `snapshots`; the steps that are taped directly before they are reversed are not counted.

    Raises:
        PolicyError: a number is not positive.
    """
    if length < 1 or snapshots < 1:
        raise PolicyError(
            f"revolve_steps(length={length}, snapshots={snapshots}): expected at least 1 of each; the "
            "initial state needs a snapshot"
        )
    repeats = 0
    while math.comb(snapshots + repeats, snapshots) < length:
        repeats += 1
    lost = math.comb(snapshots + repeats, repeats - 1) if repeats else 0
    return repeats * length - lost


def revolve_schedule(length: int, snapshots: int) -> StagePlan:
    """Returns the binomial schedule for `length` equal steps: sweeps and leaves.

    Its sweeps run `revolve_steps(length, snapshots)` stages in all, those of the first pass included.

    Raises:
        PolicyError: a number is not positive.
    """
    total = revolve_steps(length, snapshots)

    def choose(state: Task) -> Move:
        split = _split(state.last - state.first + 1, state.free)
        return Move(state.first + split if split else 0, 0)

    steps = expand(length, snapshots, choose, lambda split, option, free: free - 1)
    return StagePlan(tuple(steps), float(total - (length - 1)), True)


@lru_cache(maxsize=1 << 16)
def _split(length: int, snapshots: int) -> int:
    """How many steps to go before the next snapshot is taken; 0 for a single step."""
    if length == 1:
        return 0
    if snapshots == 1:
        return length - 1  # sweep to the last step; its state is the live one, not a snapshot
    return min(
        range(1, length),
        key=lambda m: (
            m + revolve_steps(length - m, snapshots - 1) + revolve_steps(m, snapshots),
            m,
        ),
    )
