"""The ways through the library that a program is sent: policies, budgets, lowerings, jitted and not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import remat

__all__ = ["BUDGETED", "UNBUDGETED", "Variant", "all_variants", "variants_of"]

# Time limits are short: programs are small, and plans found in time are tested as well as better ones.
UNBUDGETED: tuple[str, ...] = (
    '"save_all"',
    '"full"',
    '"names"',
    'remat.policies.Names(("first",))',
    '"min_cut"',
    "remat.policies.MinCut.paper()",
    'remat.policies.MinCut(heavy="roofline", memory_weight=8)',
    'remat.policies.MinCut(heavy="roofline", random="cheap")',
    'remat.policies.MinCut(heavy="batched")',
    'remat.policies.MinCut(implementations="none")',
    '"sublinear"',
    'remat.policies.Sublinear("sqrt")',
    'remat.policies.Sublinear("recursive", 1)',
    'remat.policies.Sublinear("cheap")',
    '"revolve"',
    "remat.policies.Revolve(snapshots=1)",
    '"echo"',
    "remat.policies.Echo(bound_peak=False)",
    '"dtr"',
    '"checkmate"',
    '"ilp"',
    '"monet"',
    '"gist"',
    '"auto"',
)
BUDGETED: tuple[str, ...] = (
    '"min_cut"',
    '"sublinear"',
    '"revolve"',
    '"dtr"',
    'remat.policies.Dtr("lru", "banish")',
    "remat.policies.Checkmate(seconds=3)",
    'remat.policies.Checkmate("approximate", seconds=3)',
    "remat.policies.Ilp(seconds=3)",
    'remat.policies.Ilp(method="starts")',
    'remat.policies.Ilp(method="search", seconds=3)',
    'remat.policies.Ilp(method="exact", seconds=3)',
    "remat.policies.Monet(seconds=3)",
    '"auto"',
)
_BY_OPERATOR = ('"full"', '"min_cut"', '"sublinear"', '"echo"')
BUDGETS = (0.9, 0.6)


@dataclass(frozen=True)
class Variant:
    """One way through the library.

    Attributes:
        policy: `remat_policy=`, as source text.
        budget: share of the peak without rematerialization.
        lowering: `staged` or `policy`.
        jitted: whether the gradient is jitted.
    """

    policy: str
    budget: float | None
    lowering: str
    jitted: bool

    @cached_property
    def arguments(self) -> str:
        """The keyword arguments of `remat.checkpoint`, as source text."""
        budget = "" if self.budget is None else f", budget={self.budget}"
        return f'remat_policy={self.policy}{budget}, lowering="{self.lowering}"'

    def __str__(self) -> str:
        return f"checkpoint({self.arguments}){', jitted' if self.jitted else ''}"

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as the library makes it."""
        policy = eval(self.policy, {"remat": remat})
        return remat.checkpoint(
            function, remat_policy=policy, budget=self.budget, lowering=self.lowering
        )


def all_variants(only: str = "") -> tuple[Variant, ...]:
    """Returns every variant whose policy's text contains `only`.

    Without jit, a plan in `jax.checkpoint`s is run operator by operator, which takes long and leaves the compiler
    nothing to do differently: few policies are sent that way.
    """
    asked = [(policy, None) for policy in UNBUDGETED]
    asked += [(policy, budget) for policy in BUDGETED for budget in BUDGETS]
    return tuple(
        Variant(policy, budget, lowering, jitted)
        for (policy, budget), lowering, jitted in itertools.product(
            asked, ("staged", "policy"), (True, False)
        )
        if only in policy and (jitted or lowering == "staged" or policy in _BY_OPERATOR)
    )


def variants_of(index: int, count: int, only: str = "") -> tuple[Variant, ...]:
    """Returns `count` variants for the program of this index.

    All variants take turns, in an order that is another one in every round: all are met, and by and by all meet
    each other. The jitted ones, which leave most to the compiler, come three times as often.
    """
    everything = [v for v in all_variants(only) for _ in range(3 if v.jitted else 1)]
    chosen = []
    for place in range(index * count, (index + 1) * count):
        turn, at = divmod(place, len(everything))
        order = list(everything)
        random.Random(turn).shuffle(order)
        chosen.append(order[at])
    return tuple(dict.fromkeys(chosen))
