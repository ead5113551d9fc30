"""The rounds of a session: ways to run the loops and budgets for what is outside, tried one after the other."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

from remat.core.interrupt import ended, say
from remat.memory.predict import peak_bytes, predict
from remat.planning.bodies import as_meant
from remat.planning.loops import (
    LoopOption,
    all_kept_bytes,
    choose_options,
    needed_bytes,
)
from remat.planning.numbers import HOPE, ROUNDS
from remat.plans.plan import Plan

__all__ = ["Rounds", "Setting", "Tried"]


@dataclass(frozen=True)
class Setting:
    """What one round plans with.

    Attributes:
        choice: of every loop the index of its option, None for whole loops with the least their bodies can keep.
        within: bytes for what is outside of loops, None for no limit.
        keeps_least: whether without a limit nothing outside of loops is kept, instead of what a minimum cut keeps.
        unchanged: whether everything is kept, in loops, too.
    """

    choice: tuple[int, ...] | None = None
    within: int | None = None
    keeps_least: bool = False
    unchanged: bool = False


Tried = Generator[Setting, Plan | None, None]
"""Settings to plan with; it is sent the finished plan of each, None if it was refused."""


class Rounds:
    """The rounds of a session: what was tried, and what came of it.

    Attributes:
        best: the cheapest setting that fits, None if there is none yet.
        last: the setting planned last.
        smallest: the plan with the smallest peak among those that are planned for every budget.
        smallest_setting: the setting with the smallest peak of all that plan what is outside as it comes.
    """

    def __init__(
        self,
        least: Plan,
        base: list[LoopOption],
        menus: list[list[LoopOption]],
        paths: list[str],
    ) -> None:
        self.base = base
        self.menus = menus
        self.paths = paths
        self.best: Setting | None = None
        self.best_seconds = math.inf
        self.last = Setting()
        self.smallest = least
        self.smallest_setting = Setting()
        self._least_peak_bytes = least.peak_bytes
        self.tried: dict[Setting, Plan | None] = {}
        # Of the last plan without a limit for what is outside: its peaks beyond what the loops keep, and need.
        self.beside_kept = self.beside_needed = 0
        self._note(Setting(), least)

    def _note(self, setting: Setting, plan: Plan | None) -> None:
        self.last = setting
        options = self._options(setting)
        if plan is not None and setting.choice is not None:
            planned = zip(options, self.paths, strict=True)
            if not all(as_meant(option, path, plan.loops) for option, path in planned):
                plan = None
        self.tried[setting] = plan
        if plan is None or setting.within is not None:
            return
        # What is planned for every budget can be planned for the one that an error names.
        always = setting.choice in (None, self._least_choice())
        if always and plan.peak_bytes < self.smallest.peak_bytes:
            self.smallest = plan
        smaller = plan.peak_bytes < self._least_peak_bytes
        self._least_peak_bytes = min(plan.peak_bytes, self._least_peak_bytes)
        if setting.keeps_least or setting.unchanged:  # say nothing of what loops have beside a cut
            return
        if smaller:
            self.smallest_setting = setting
        found = predict(plan.graph, plan.schedule, loops=plan.loops)
        self.beside_kept = found.outside_peak_bytes - all_kept_bytes(options)
        self.beside_needed = found.loop_peak_bytes - needed_bytes(options)

    def _options(self, setting: Setting) -> list[LoopOption]:
        if setting.choice is None:
            return self.base
        return [menu[index] for menu, index in zip(self.menus, setting.choice, strict=True)]

    def _try(self, setting: Setting, limit: int) -> Generator[Setting, Plan | None, Plan | None]:
        """Plans with a setting, unless that was done; takes it if it fits and is the cheapest."""
        if setting not in self.tried:
            if ended():
                return None
            say(f"loops and what is outside of them, round {len(self.tried) + 1}")
            self._note(setting, (yield setting))
        plan = self.tried[setting]
        if plan is not None and plan.peak_bytes <= limit:
            seconds = self._seconds(setting, plan)
            if seconds < self.best_seconds:
                self.best, self.best_seconds = setting, seconds
        return plan

    def _seconds(self, setting: Setting, plan: Plan) -> float:
        """What a plan repeats outside of loops, and what the loops cost."""
        inside = sum(entry.length * entry.plan.recompute_seconds for entry in plan.loops)
        return plan.recompute_seconds - inside + sum(o.seconds for o in self._options(setting))

    def loops(self, limit: int) -> Generator[Setting, Plan | None, None]:
        """Tries the fastest ways to run the loops that should fit, with a minimum cut outside."""
        yield from self._try(Setting(), limit)
        excluded: set[tuple[int, ...]] = set()
        fitted = self.best is not None
        for _ in range(ROUNDS - 1):
            # With a setting in hand the estimate may be a little off: what does not fit is excluded.
            hoped = int(HOPE * limit) if fitted else limit
            choice = choose_options(
                self.menus,
                hoped - self.beside_needed,
                excluded,
                kept_bytes=hoped - self.beside_kept,
            )
            if choice is None:
                break
            setting = Setting(choice)
            least_outside = self.tried[Setting()]
            assert least_outside is not None
            seconds = self._seconds(Setting(), least_outside)
            seconds += sum(o.seconds for o in self._options(setting))
            seconds -= sum(o.seconds for o in self.base)
            if seconds >= self.best_seconds:
                break
            excluded.add(choice)
            plan = yield from self._try(setting, limit)
            fitted = plan is not None and plan.peak_bytes <= limit
        if self.best is None:
            yield from self._try(Setting(self._least_choice()), limit)

    def _least_choice(self) -> tuple[int, ...]:
        return tuple(0 for _ in self.menus)

    def nothing_outside(self, limit: int) -> Generator[Setting, Plan | None, None]:
        """Tries to keep nothing outside of loops, and the least in them."""
        yield from self._try(Setting(keeps_least=True), limit)

    def outside(self, limit: int, setting: Setting) -> Generator[Setting, Plan | None, None]:
        """Plans what is outside within what the loops of a setting leave."""
        made = self.tried[setting]
        if made is None:
            return
        within = limit - (made.peak_bytes - _outside_peak(made))
        for _ in range(ROUNDS):
            if within <= 0:
                return
            plan = yield from self._try(replace(setting, within=within), limit)
            if plan is None or plan.peak_bytes <= limit:
                return
            within -= plan.peak_bytes - limit

    def unchanged(self) -> Generator[Setting, Plan | None, Plan]:
        """Plans the program as it is, also when the time is up."""
        setting = Setting(unchanged=True)
        plan = yield setting
        assert plan is not None  # nothing refuses it
        self._note(setting, plan)
        return plan

    def margin(self, limit: int) -> Generator[Setting, Plan | None, None]:
        """Takes what was tried and fits, if only without a margin."""
        for setting in list(self.tried):
            yield from self._try(setting, limit)


def _outside_peak(plan: Plan) -> int:
    """The predicted peak of what is outside of loops alone."""
    return peak_bytes(plan.graph, plan.schedule)
