"""The dynamic program over persistent schedules of a chain whose stages differ.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (2019; the tool
rotor); every stage may have several options for what it tapes, as in HiRemate (2025).

Guarantee: the cheapest persistent schedule (a checkpoint is held until everything to its right is reversed, and a
stage's input while the stage runs) whose modelled memory is within the budget, among the options given. It is the
cheapest of all sequences for equal stages whose backward parts read what their forward parts make. Where stages
differ, another sequence can be cheaper. Where the backward pass does not read some values (`Chain.unread`), a
stage's input may be dropped while the stage runs and made again, which no schedule here does, so that a budget may
be refused that another sequence meets. Bytes are counted in slots such that the budget is never exceeded; where all
bytes are multiples of a common unit that is coarse enough nothing is rounded. Complexity: O(stages^3 * slots)
vectorised additions.

Departures from rotor:

1. What stages hold, need and cost is measured on the graph, by running their nodes, gradients included.
2. The forward pass before the turn has its own peaks, and costs nothing extra whatever is held.
3. The memory test of a sweep covers the stages it runs, not all up to the end of the sub-chain.
4. A checkpoint may outlive the stages to its right and serve the backward part to its left, which reads it as
   its output; rotor computes it again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remat.core.errors import PolicyError
from remat.policies.solvers.chain.schedule import (
    ChainStage,
    Move,
    StageOption,
    StagePlan,
    Task,
    expand,
)

__all__ = ["SLOTS", "solve_stages"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLOTS = 500
"""Memory is counted in at most so many units: rotor's default. More round less and take longer, in proportion."""
# Which units of memory are tried where no common divisor is fine enough: none exceeds the budget, and the one with
# the least rounding is taken. Chosen by look.
_FREQUENT = 8  # byte counts, those that hold most in all ...
_PARTS = (
    16  # ... each divided into the most parts that are no smaller than a slot, and up to 15 fewer
)
_SLACK_SHARE = 8  # a remainder of an eighth of a slot is cut off, not rounded up


def solve_stages(
    stages: Sequence[ChainStage],
    budget_bytes: int,
    *,
    slots: int = SLOTS,
    stop: Callable[[], bool] | None = None,
) -> StagePlan | None:
    """Returns the cheapest persistent schedule of a chain within a budget, or `None` if there is none.

    Args:
        stages: first stage first.
        budget_bytes: bound on what is alive besides the first stage's input.
        slots: memory is counted in at most that many units; more slots round less.
        stop: asked before every row of the table; True ends without a schedule.

    Raises:
        PolicyError: no stage, a negative budget or no slot.
    """
    if not stages or budget_bytes < 0 or slots < 1:
        raise PolicyError(
            f"solve_stages: {len(stages)} stages, budget_bytes={budget_bytes}, slots={slots}: expected at "
            "least 1 stage, a budget of at least 0 bytes and at least 1 slot"
        )
    table = _Table(stages, budget_bytes, slots)
    if table.top < 0:
        return None
    if not table.fill(stop):
        return None
    last = len(stages) - 1
    cost = float(table.cost[0, 0, last, table.top])
    if not math.isfinite(cost):
        return None

    steps = expand(len(stages), table.top, table.chosen, table.remaining)
    return StagePlan(tuple(steps), cost, table.exact)


class _Table:
    """The dynamic program: `cost[h, s, t, m]` reverses stages s to t within m slots.

    Neither the input of s nor anything held for stages outside counts; the gradient of the output of t does,
    and with h = 1 the output of t itself, which is then there until the backward part of t has run.
    """

    def __init__(self, stages: Sequence[ChainStage], budget_bytes: int, slots: int) -> None:
        self.stages = stages
        self.grid = _Grid.of(stages, budget_bytes, slots)
        self.exact = self.grid.exact
        self.top = self.grid.top
        count = len(stages)
        self.inputs = [0, *(stage.output_bytes for stage in stages[:-1])]
        self.cost = np.full((2, count, count, self.top + 1), np.inf)
        self.shifted = np.full(
            (2, count, count, self.top + 1), np.inf
        )  # [h, t, s], input of s counted
        self.choice = np.zeros((2, count, count, self.top + 1), np.int32)
        self.ladder = np.arange(self.top + 1)
        self.options = [_columns(stage.options) for stage in stages]
        # By stage, option and slots: slots left to its right, one past the end if there are none.
        self.right_of = [self._left_over(index) for index in range(count - 1)]

    def chosen(self, state: Task) -> Move:
        """Decodes what is best in a state."""
        code = int(self.choice[int(state.held), state.first, state.last, state.free])
        if code < 0:
            return Move(0, -1 - code)
        return Move(code // 2, 0, keep=code % 2 == 1)

    def remaining(self, split: int, option: int, free: int) -> int:
        """Slots left for the stages from `split` on when its input and the tape before it are held."""
        held = self.inputs[split]
        if option >= 0:
            held += self.stages[split - 1].options[option].tape_bytes
        return free - self.grid.held_slots(held)

    def _left_over(self, index: int) -> Ints:
        tapes = self.inputs[index + 1] + self.options[index]["tape_bytes"]
        taken = np.asarray([self.grid.held_slots(int(amount)) for amount in tapes])
        left = self.ladder[None, :] - taken[:, None]
        return np.where(left < 0, self.top + 1, left)

    def fill(self, stop: Callable[[], bool] | None) -> bool:
        """Fills the table; returns whether it was let to."""
        count = len(self.stages)
        for length in range(1, count + 1):
            if stop is not None and stop():
                return False
            for first in range(count - length + 1):
                last = first + length - 1
                taken = self.grid.held_slots(self.inputs[first])
                for held in (0, 1) if last < count - 1 else (0,):
                    self._cell(first, last, held)
                    row = self.shifted[held, last, first]
                    row[taken:] = self.cost[held, first, last, : max(self.top + 1 - taken, 0)]
        return True

    def _alive(self, last: int, held: int) -> int:
        """Bytes alive on the right while stages up to `last` run again."""
        stage = self.stages[last]
        if last == len(self.stages) - 1:
            return 0
        return stage.gradient_bytes + held * stage.output_bytes

    def _cell(self, first: int, last: int, held: int) -> None:
        cost, choice = self.cost[held, first, last], self.choice[held, first, last]
        priced = self._taped(first, last, held)
        best = priced.argmin(axis=0)
        _improve(cost, choice, priced[best, self.ladder], -1 - best)
        if first == last:
            return
        initial = last == len(self.stages) - 1
        swept = self.stages[first:last]
        peaks = [s.first_forward_peak_bytes if initial else s.forward_peak_bytes for s in swept]
        inputs = np.asarray([0, *self.inputs[first + 1 : last]], np.int64)
        needs = np.maximum.accumulate(np.asarray(peaks, np.int64) + inputs)
        needs += self._alive(last, held)
        running = np.zeros(len(swept)) if initial else np.cumsum([s.forward_cost for s in swept])
        right = self.shifted[held, last, first + 1 : last + 1] + running[:, None]
        right[self.ladder[None, :] < -(-needs // self.grid.unit_bytes)[:, None]] = np.inf
        for keep in (0, 1):
            split = right + self.cost[keep, first, first:last]
            best = split.argmin(axis=0)
            _improve(cost, choice, split[best, self.ladder], 2 * (first + 1 + best) + keep)

    def _taped(self, first: int, last: int, held: int) -> Floats:
        """Cost of taping stage `first`, by option and number of slots."""
        options = self.options[first]
        alive = self._alive(last, held)
        initial = last == len(self.stages) - 1
        if first < last:
            right = np.append(self.cost[held, first + 1, last], np.inf)
            priced = right[self.right_of[first]]
            running, peaks = options["tape_cost"], alive + options["tape_peak_bytes"]
        else:
            priced = np.zeros((len(options["lean"]), self.top + 1))
            running, peaks = options["leaf_cost"], alive + options["leaf_peak_bytes"]
            if held:
                running = np.where(options["tapes_output"], options["held_leaf_cost"], np.inf)
                peaks = alive - self.stages[first].output_bytes + options["held_leaf_peak_bytes"]
        if initial:
            running, peaks = 0.0, options["first_peak_bytes"]
        needs = np.maximum(peaks, options["backward_peak_bytes"])
        priced[self.ladder[None, :] < -(-needs // self.grid.unit_bytes)[:, None]] = np.inf
        priced += (running + options["backward_extra_cost"])[:, None]
        return priced


def _columns(options: Sequence[StageOption]) -> dict[str, npt.NDArray[Any]]:
    """The options' numbers, one array per attribute."""
    names = [name for name, value in vars(options[0]).items() if not isinstance(value, tuple)]
    return {name: np.asarray([getattr(option, name) for option in options]) for name in names}


def _improve(cost: Floats, choice: npt.NDArray[np.int32], priced: Floats, code: Ints) -> None:
    better = priced < cost
    cost[better] = priced[better]
    choice[better] = code[better]


@dataclass(frozen=True)
class _Grid:
    """How bytes are counted in slots so that the budget is never exceeded.

    What a stage holds is rounded up, except that a remainder of at most `slack_bytes` is cut off. A stage holds
    its input and one tape at most once at a time, so it is enough to take the largest remainder cut off per
    stage from the budget once. What is needed while something runs is rounded up.

    Attributes:
        unit_bytes: of a slot.
        slack_bytes: see above.
        top: slots of the budget, -1 if the remainders alone exceed it.
        exact: nothing is rounded.
    """

    unit_bytes: int
    slack_bytes: int
    top: int
    exact: bool

    def held_slots(self, amount: int) -> int:
        """Slots of something held."""
        whole, rest = divmod(amount, self.unit_bytes)
        return whole + (rest > self.slack_bytes)

    @classmethod
    def of(cls, stages: Sequence[ChainStage], budget_bytes: int, slots: int) -> _Grid:
        """Chooses the unit: a common divisor if it is fine enough, else the one with the least rounding."""
        common = math.gcd(*_amounts(stages)) or 1
        if budget_bytes // common <= slots:
            return cls(common, 0, budget_bytes // common, True)
        held = _held_bytes(stages)
        least = max(1, -(-budget_bytes // slots))
        counts = Counter(int(amount) for row in held for amount in row)
        frequent = sorted(counts, key=lambda amount: (-amount * counts[amount], amount))[:_FREQUENT]
        # A fraction of an amount that occurs often leaves nothing of it to round.
        units = {least}
        for amount in frequent:
            most = amount // least
            parts = range(max(1, most - _PARTS + 1), most + 1)
            units |= {-(-amount // count) for count in parts}
        tried = (cls._with(unit, held, budget_bytes) for unit in sorted(units))
        return min(tried, key=lambda found: found[0])[1]

    @classmethod
    def _with(cls, unit: int, held: list[Ints], budget_bytes: int) -> tuple[tuple[int, int], _Grid]:
        """The grid of a unit, and what it loses to rounding if every stage holds as much as it can."""
        slack = unit // _SLACK_SHARE
        reserved = lost = 0
        for amounts in held:
            rest = amounts % unit
            cut = rest <= slack
            reserved += int(np.where(cut, rest, 0).max())
            lost += int(np.where(cut | (rest == 0), 0, unit - rest).max())
        free = budget_bytes - reserved
        top = free // unit if free >= 0 else -1
        return (reserved + lost + max(free, 0) % unit, unit), cls(unit, slack, top, False)


def _amounts(stages: Sequence[ChainStage]) -> list[int]:
    """Every byte count of a chain."""
    found: list[int] = []
    for stage in stages:
        found += [stage.output_bytes, stage.gradient_bytes]
        found += [stage.forward_peak_bytes, stage.first_forward_peak_bytes]
        for option in stage.options:
            found += [option.tape_bytes, option.tape_peak_bytes, option.leaf_peak_bytes]
            found += [option.first_peak_bytes, option.backward_peak_bytes]
            found.append(option.held_leaf_peak_bytes)
    return found


def _held_bytes(stages: Sequence[ChainStage]) -> list[Ints]:
    """For every stage what may be held of it: its output alone, or with one of its tapes."""
    return [
        np.asarray([s.output_bytes, *(s.output_bytes + o.tape_bytes for o in s.options)], np.int64)
        for s in stages
    ]
