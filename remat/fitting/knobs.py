"""What `remat.fit` turns: the budget of one plan, or a price of memory that several share.

A step with one wrapped function has the budget of its plan, in bytes, which a planner such as `ilp` meets. Several
wrapped functions, or one that is called in the body of a differentiated loop, share a price of memory instead
(`remat.lower.attempt.PricePlanner`): where one wrapper stands among many, its own peak says little about that of
the step, and what it keeps says much.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from remat.core.errors import PolicyError
from remat.fitting.job import Job, Trial
from remat.lower.attempt import PricePlanner, Use, choose_option
from remat.planning import search
from remat.planning.confirm import UNCHANGED, BudgetKnob, Setting
from remat.planning.planners import PolicyPlanner
from remat.plans.plan import Plan
from remat.policies import MinCut
from remat.policies.base import BudgetPolicy

__all__ = ["Knob", "choose_knob"]

_INFINITE = float("inf")
_HOW_TO_WRAP = (
    "wrap the loss, or the blocks of the network, with a policy of remat's own: "
    "loss = remat.checkpoint(loss, remat_policy='ilp'), and call jax.grad(loss) in the step"
)


class Knob(search.Knob[Trial], Protocol):
    """What is turned: from the cheapest plans to those with the least memory."""

    def cheapest(self) -> Trial:
        """Compiles the cheapest plans."""
        ...

    def plain(self, limit_bytes: int) -> Trial | None:
        """Compiles the step without rematerialization, if it is predicted to need at most `limit_bytes`."""
        ...


def choose_knob(job: Job) -> Knob:
    """Finds out what is wrapped, by tracing, and how it can be planned."""
    policy = job.resolved.policy if isinstance(job.resolved, PolicyPlanner) else None
    if not isinstance(policy, (BudgetPolicy, MinCut)):
        raise PolicyError(
            f"remat_policy={job.options.remat_policy!r} cannot be tightened: expected a policy that plans "
            "within a budget, such as 'ilp', or 'min_cut'"
        )
    uses = job.uses(UNCHANGED)
    if not uses:
        raise PolicyError(
            "no function wrapped with one of remat's own policies is differentiated in this step, so there "
            f"is nothing to plan; {_HOW_TO_WRAP}. Policies of jax's own, saved plans and "
            "remat_policy=None are left as they are"
        )
    is_alone = sum(use.calls for use in uses) == 1 and not uses[0].kept_in_loop
    if is_alone and isinstance(policy, BudgetPolicy):
        return BudgetKnob(_OneWrapper(job), policy)
    return _PriceKnob(job)


class _OneWrapper:
    """A step with one wrapped function, as a `remat.planning.confirm.Bench`."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def plan(self, setting: Setting) -> Plan:
        return self.job.uses(setting)[0].plan

    def trial(self, setting: Setting) -> Trial:
        return self.job.trial(setting, lambda uses: uses[0].plan.peak_bytes)


class _PriceKnob:
    """The price of a kept byte, common to all wrapped functions."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._prices: dict[int, float] = {}  # by the identity of a trial

    def cheapest(self) -> Trial:
        return self._trial(0.0)

    def plain(self, limit_bytes: int) -> Trial | None:
        found = _kept_bytes(self.job.uses(UNCHANGED)) <= limit_bytes
        return self.job.trial(UNCHANGED, _kept_bytes) if found else None

    def least(self) -> Trial:
        return self._trial(_INFINITE)

    def another(self) -> Trial | None:
        return None

    def at(self, target_bytes: int, low: Trial | None, high: Trial | None) -> Trial | None:
        floor = self._kept(_INFINITE) if low is None else self._bound(low)
        ceiling = self._kept(0.0) if high is None else min(self._kept(0.0), self._bound(high))
        kept = {price: self._kept(price) for price in self._breaks()}
        between = {price: k for price, k in kept.items() if floor < k < ceiling}
        if not between:
            return None
        under = {price: k for price, k in between.items() if k <= target_bytes}
        if under:
            return self._trial(min(under, key=lambda price: (-under[price], price)))
        return self._trial(min(between, key=lambda price: (between[price], price)))

    def setting(self, price: float) -> Setting:
        if price == 0:
            label = "the least time"
        elif price == _INFINITE:
            label = "the least memory"
        else:
            label = f"{price * 2**30:.3g} s per GiB"
        return Setting(label, PricePlanner(price, self.job.menus))

    def _trial(self, price: float) -> Trial:
        trial = self.job.trial(self.setting(price), _kept_bytes)
        self._prices.setdefault(id(trial), price)
        return trial

    def _bound(self, trial: Trial) -> int:
        """What a trial keeps: as estimated for others, where a price made it; the plain step has none."""
        price = self._prices.get(id(trial))
        return trial.predicted_bytes if price is None else self._kept(price)

    def _breaks(self) -> list[float]:
        """Prices at which no two options of a menu cost the same, one from every interval."""
        slopes = {
            (less.seconds - more.seconds) / (more.saved_bytes - less.saved_bytes)
            for options in self.job.menus.options.values()
            for i, less in enumerate(options)
            for more in options[i + 1 :]
            if more.saved_bytes > less.saved_bytes
        }
        ordered = sorted(slopes)
        return [(a + b) / 2 for a, b in pairwise(ordered)]

    def _kept(self, price: float) -> int:
        """Estimate of what all wrappers keep, from the graphs of the cheapest plans."""
        uses = self.job.uses(self.setting(0.0))
        return _kept_bytes(uses) + sum(use.calls * self._change(use.plan, price) for use in uses)

    def _change(self, plan: Plan, price: float) -> int:
        options = self.job.menus.of(plan.graph)
        change = choose_option(options, price).saved_bytes - choose_option(options, 0.0).saved_bytes
        return change + sum(x.length * self._change(x.plan, price) for x in plan.loops)


def _kept_bytes(uses: Sequence[Use]) -> int:
    return sum(use.calls * use.plan.saved_bytes for use in uses)
