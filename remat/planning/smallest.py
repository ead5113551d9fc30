"""The smallest budget that can be met. Plain data, no jax."""

from __future__ import annotations

from collections.abc import Callable

from remat.core.errors import BudgetError
from remat.core.interrupt import Progress, or_log
from remat.planning.numbers import CLOSE, HALVINGS, RAISES
from remat.plans.plan import Plan
from remat.plans.report import human_bytes

__all__ = ["smallest_plan"]


def smallest_plan(
    plan_at: Callable[[int], Plan], baseline_peak_bytes: int, progress: Progress | None = None
) -> Plan:
    """Looks for the plan with the smallest predicted peak.

    A planner that is asked for one byte says which peak is the smallest it found; that is the answer for a
    function without loops. With loops the rest of the function may have been planned without need: then
    the budget is halved between what was and was not feasible, at most five times.

    Args:
        plan_at: budget in bytes to plan; raises BudgetError if it cannot be met.
        baseline_peak_bytes: peak without rematerialization, where the search begins if no peak is named.

    Raises:
        BudgetError: nothing was feasible, not even twice the peak without rematerialization.
    """
    say = or_log(progress)
    budget = 1
    for _ in range(RAISES):
        try:
            say(f"looking for the smallest peak: {human_bytes(budget)}")
            best = plan_at(budget)
            break
        except BudgetError as error:
            named = error.smallest_peak_bytes
            # A name that was tried already, or none: grow, from an eighth of the peak without remat.
            grown = max(budget + budget // 8, baseline_peak_bytes // 8)
            budget = named if named is not None and named > budget else grown
    else:
        best = plan_at(2 * max(budget, baseline_peak_bytes))
    if not best.loops:
        return best
    low = 0
    for _ in range(HALVINGS):
        if best.peak_bytes <= CLOSE * low:
            break
        middle = (low + best.peak_bytes) // 2
        try:
            say(f"looking for the smallest peak: {human_bytes(middle)}")
            best = plan_at(middle)
        except BudgetError:
            low = middle
    return best
