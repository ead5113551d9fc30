"""Chains of stages: revolve for equal steps, an exact dynamic program for unequal ones.

* Griewank & Walther, "Algorithm 799: Revolve" (2000): `revolve_steps` is t(l, s), the fewest forward steps that
  reverse l equal steps with s snapshots; `revolve_schedule` is the binomial schedule that needs them.
* Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (2019; the
  tool rotor): `solve_stages` is their dynamic program over persistent schedules, in which every stage may have
  several options for what it tapes, as in HiRemate (2025).
* `chain_of` finds the chain in a general problem, `solve_chain` applies the program to it.

A *stage* is a stretch of forward nodes with the stretch of backward nodes that belongs to it. Between two stages
one value goes forward, the stage's input, from which the stage can be computed again. A schedule consists of

* `sweep s..e`: run stages s to e and hold only the last one's output (a checkpoint),
* `tape s`: run stage s, hold its output and what an option says its backward part reads,
* `leaf s`: the same where the output is not wanted, followed by the backward part,
* `backward s`: the backward part of a taped stage,
* `release s`: the input of stage s is not needed any more.

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
5. A general graph is solved with fine and with coarse stages, since one value inside a stage can be left out
   while its neighbours are held, which sweeps cannot do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from remat.core.errors import PolicyError
from remat.policies.solvers.problem import Problem, replay
from remat.policies.solvers.segments import Emitter, needed_again

__all__ = [
    "Chain",
    "ChainPlan",
    "ChainStage",
    "PreparedChain",
    "Segment",
    "StageOption",
    "StagePlan",
    "Step",
    "chain_of",
    "prepare_chain",
    "revolve",
    "revolve_schedule",
    "revolve_steps",
    "run_steps",
    "solve_chain",
    "solve_stages",
    "stages_of",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Runs of a stage's nodes, on average, above which a lean option is not considered.
_LEAN_LIMIT = 4
# Values on a tape up to which every step of the greedy path prices all of them anew.
_GREEDY_LIMIT = 48
# Forward nodes per stage up to which stages are merged; larger ones are slow to measure.
_COARSEST = 512


@dataclass(frozen=True)
class StageOption:
    """What a stage may tape for its backward part. Bytes do not include the stage's input.

    Attributes:
        tape_bytes: held besides the input and the output from the taped run to the backward part.
        tape_cost: of running the stage again so that its output and the tape are held.
        leaf_cost: of running it again so that only the tape is held.
        backward_extra_cost: of what the backward part computes again from input and tape.
        tape_peak_bytes, leaf_peak_bytes: while these two run, results included.
        first_peak_bytes: while the stage runs for the first time and tape and output are held.
        backward_peak_bytes: while the backward part runs, tape and gradients included.
        tapes_output: the backward part reads the output as part of the tape. Its bytes are in the peaks of this
            option, not in `tape_bytes`.
        held_leaf_cost, held_leaf_peak_bytes: of the leaf run if the output is still there (and counted); only
            used with `tapes_output`.
        taped: nodes taped, counted from the stage's first forward node; for whoever carries out the plan.
        lean: what the backward part computes again is dropped after each of its nodes, not held until its last
            reader; likewise.
    """

    tape_bytes: int
    tape_cost: float
    leaf_cost: float
    backward_extra_cost: float
    tape_peak_bytes: int
    leaf_peak_bytes: int
    first_peak_bytes: int
    backward_peak_bytes: int
    tapes_output: bool
    held_leaf_cost: float = 0.0
    held_leaf_peak_bytes: int = 0
    taped: tuple[int, ...] = ()
    lean: bool = False


@dataclass(frozen=True)
class ChainStage:
    """A stage of a chain.

    Attributes:
        forward_cost: of running the stage again for its output alone.
        output_bytes: of what the next stage reads.
        gradient_bytes: of what the next stage's backward part hands to this one's.
        forward_peak_bytes: while it runs again for its output alone, the output included, the input not.
        first_forward_peak_bytes: while it runs for the first time and only the output is held.
        options: what may be taped, at least one.

    Raises:
        PolicyError: no option, or a negative number.
    """

    forward_cost: float
    output_bytes: int
    gradient_bytes: int
    forward_peak_bytes: int
    first_forward_peak_bytes: int
    options: tuple[StageOption, ...]

    def __post_init__(self) -> None:
        if not self.options:
            raise PolicyError("ChainStage(options=()): expected at least one option for the tape")
        numbers = [
            v for o in (self, *self.options) for v in vars(o).values() if not isinstance(v, tuple)
        ]
        if min(numbers) < 0:
            raise PolicyError(f"{self}: costs and bytes must not be negative")

    @classmethod
    def of(
        cls,
        forward_cost: float,
        output_bytes: int,
        tape_bytes: int,
        *,
        gradient_bytes: int | None = None,
        forward_workspace_bytes: int = 0,
        backward_workspace_bytes: int = 0,
        options: Sequence[tuple[float, int]] = (),
    ) -> ChainStage:
        """Makes a stage in rotor's terms.

        Args:
            forward_cost: of one run.
            output_bytes: of the activation it hands on.
            tape_bytes: of everything its backward part reads besides the input and the gradient, the output
                included; at least `output_bytes`.
            gradient_bytes: of the output's gradient, default `output_bytes`.
            forward_workspace_bytes: while it runs, besides input and results.
            backward_workspace_bytes: while its backward part runs, besides input, tape and the output's
                gradient; the input's gradient belongs here.
            options: further plans as `(extra_cost, tape_bytes)`: a smaller tape, and the cost of computing the
                difference again in the backward part.
        """
        chosen: list[StageOption] = []
        gradient = output_bytes if gradient_bytes is None else gradient_bytes
        for extra_cost, taped in ((0.0, tape_bytes), *options):
            if not output_bytes <= taped <= tape_bytes:
                raise PolicyError(
                    f"ChainStage.of: an option tapes {taped} bytes, expected from output_bytes="
                    f"{output_bytes} to tape_bytes={tape_bytes}"
                )
            peak = taped + forward_workspace_bytes
            chosen.append(
                StageOption(
                    tape_bytes=taped - output_bytes,
                    tape_cost=forward_cost,
                    leaf_cost=forward_cost,
                    backward_extra_cost=extra_cost,
                    tape_peak_bytes=peak,
                    leaf_peak_bytes=peak,
                    first_peak_bytes=peak,
                    # What a smaller tape lacks is there again while the backward part runs.
                    backward_peak_bytes=gradient + tape_bytes + backward_workspace_bytes,
                    tapes_output=True,
                    held_leaf_cost=0.0 if taped == output_bytes else forward_cost,
                    held_leaf_peak_bytes=peak,
                )
            )
        forward_peak = output_bytes + forward_workspace_bytes
        return cls(forward_cost, output_bytes, gradient, forward_peak, forward_peak, tuple(chosen))


@dataclass(frozen=True)
class Step:
    """One step of a schedule over stages; see the module docstring.

    Attributes:
        kind: what is done.
        stage: to which stage; for a sweep the first one.
        last: the last stage of a sweep, otherwise `stage`.
        option: index of the option of a `tape`, `leaf` or `backward`.
        first: it runs the stages for the first time.
    """

    kind: Literal["sweep", "tape", "leaf", "backward", "release"]
    stage: int
    last: int
    option: int = 0
    first: bool = False


@dataclass(frozen=True)
class StagePlan:
    """A schedule over stages.

    Attributes:
        steps: in running order.
        extra_cost: of everything that runs again, backward parts included.
        exact: no byte count was rounded.
    """

    steps: tuple[Step, ...]
    extra_cost: float
    exact: bool


@dataclass(frozen=True)
class Segment:
    """A stage of the chain in a problem.

    Attributes:
        forward: its forward nodes; may be empty for the last one.
        backward: its backward nodes.
        reads: the forward values it gets from the stage before, except pinned ones.
        gradients: backward values alive when its backward part begins.
    """

    forward: range
    backward: range
    reads: frozenset[int]
    gradients: frozenset[int]


@dataclass(frozen=True, eq=False)
class Chain:
    """The chain in a problem.

    Attributes:
        problem: the problem.
        segments: first stage first.
        pinned: forward values held until their last reader whatever the plan: small ones that cross from one
            stage to another, and what must not be computed again.
        floating: forward nodes that read nothing and that only backward nodes read, wherever they stand in the
            order; they are computed again where they are read.
    """

    problem: Problem
    segments: tuple[Segment, ...]
    pinned: frozenset[int]
    floating: frozenset[int] = frozenset()

    @cached_property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned values, all at once."""
        return sum(int(self.problem.sizes[node]) for node in self.pinned)

    @cached_property
    def unread(self) -> frozenset[int]:
        """Forward values that only forward nodes read; schedules are made for chains without any."""
        turn, users = self.problem.turn, self.problem.users
        return frozenset(
            node
            for node in range(turn)
            if users[node] and users[node][-1] < turn and node not in self.pinned
        )

    def reads_of(self, stage: int) -> frozenset[int]:
        """Returns what `stage` gets from the one before; nothing for the stage after the last."""
        return self.segments[stage].reads if stage < len(self.segments) else frozenset()


@dataclass(frozen=True)
class ChainPlan:
    """A sequence for a problem and what `replay` says of it.

    Attributes:
        sequence: nodes as executed.
        steps: the schedule over stages it was made of.
        num_stages: of the chain.
        peak_bytes: largest number of live bytes.
        extra_cost: cost of all repetitions.
        exact: no byte count was rounded in the dynamic program.
    """

    sequence: tuple[int, ...]
    steps: tuple[Step, ...]
    num_stages: int
    peak_bytes: int
    extra_cost: float
    exact: bool


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

    def choose(state: _State) -> _Choice:
        split = _revolve_split(state.last - state.first + 1, state.free)
        return _Choice(state.first + split if split else 0, 0)

    steps = _expand(length, snapshots, choose, lambda split, option, free: free - 1)
    return StagePlan(tuple(steps), float(total - (length - 1)), True)


@lru_cache(maxsize=1 << 16)
def _revolve_split(length: int, snapshots: int) -> int:
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


def solve_stages(
    stages: Sequence[ChainStage],
    budget_bytes: int,
    *,
    slots: int = 500,
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

    steps = _expand(len(stages), table.top, table.chosen, table.remaining)
    return StagePlan(tuple(steps), cost, table.exact)


@dataclass(frozen=True)
class _State:
    """Stages `first` to `last` are to be reversed within `free`; `held`: the last one's output is there."""

    first: int
    last: int
    free: int
    held: bool


@dataclass(frozen=True)
class _Choice:
    """Put a checkpoint at the input of stage `split`, or if that is 0 tape the first stage under `option`.

    `keep`: the checkpoint outlives the stages to its right and serves the backward part to its left.
    """

    split: int
    option: int
    keep: bool = False


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

    def chosen(self, state: _State) -> _Choice:
        """Decodes what is best in a state."""
        code = int(self.choice[int(state.held), state.first, state.last, state.free])
        if code < 0:
            return _Choice(0, -1 - code)
        return _Choice(code // 2, 0, keep=code % 2 == 1)

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
        frequent = sorted(counts, key=lambda amount: (-amount * counts[amount], amount))[:8]
        # A fraction of an amount that occurs often leaves nothing of it to round.
        units = {least}
        for amount in frequent:
            most = amount // least
            parts = range(max(1, most - 15), most + 1)
            units |= {-(-amount // count) for count in parts}
        tried = (cls._with(unit, held, budget_bytes) for unit in sorted(units))
        return min(tried, key=lambda found: found[0])[1]

    @classmethod
    def _with(cls, unit: int, held: list[Ints], budget_bytes: int) -> tuple[tuple[int, int], _Grid]:
        """The grid of a unit, and what it loses to rounding if every stage holds as much as it can."""
        slack = unit // 8
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


def _expand(
    count: int,
    free: int,
    choose: Callable[[_State], _Choice],
    remaining: Callable[[int, int, int], int],
) -> list[Step]:
    """Writes out a schedule; no recursion, chains may be long.

    Args:
        count: number of stages.
        free: memory at the start, in the units of `choose` and `remaining`.
        choose: what to do in a state.
        remaining: memory left to the right of a stage whose input is held, and the tape before it under an
            option (-1 for none).
    """
    steps: list[Step] = []
    todo: list[Step | _State] = [_State(0, count - 1, free, False)]
    while todo:
        item = todo.pop()
        if isinstance(item, Step):
            steps.append(item)
            continue
        first, last, left = item.first, item.last, item.free
        initial = last == count - 1
        choice = choose(item)
        split, option = choice.split, choice.option
        if split:
            steps.append(Step("sweep", first, split - 1, first=initial))
            todo.append(_State(first, split - 1, left, choice.keep))
            if not choice.keep:
                todo.append(Step("release", split, split))
            todo.append(_State(split, last, remaining(split, -1, left), item.held))
        elif first == last:
            steps.append(Step("leaf", first, first, option, initial))
            if item.held:
                steps.append(Step("release", first + 1, first + 1))
        else:
            steps.append(Step("tape", first, first, option, initial))
            todo.append(Step("backward", first, first, option))
            todo.append(Step("release", first + 1, first + 1))
            todo.append(_State(first + 1, last, remaining(first + 1, option, left), item.held))
    return steps


def chain_of(
    problem: Problem,
    *,
    small_bytes: int | None = None,
    pinned: Collection[int] = (),
    let_float: bool = True,
) -> Chain | None:
    """Finds the chain of stages in a problem, `None` if it cannot be cut anywhere.

    The forward pass can be cut before node c, together with the backward pass before node p, if at most one
    value made before c is read by forward nodes from c on or by backward nodes before p, and no backward node
    from p on reads a forward value made from c on. The latest p that suits the crossing value is taken, so
    that its readers all lie on one side where possible.

    Args:
        problem: forward nodes before `problem.turn`, backward nodes after it.
        small_bytes: values of at most that size may cross as well and are pinned (held until their last
            reader), default 1/64 of the largest forward value.
        pinned: further values that are pinned, for instance a mask that every block reads.
        let_float: nodes that read nothing may be computed where they are read, if that gives more stages.

    Complexity: O(forward nodes ^ 2) in compiled code.
    """
    turn = problem.turn
    if turn == 0:
        return None
    sizes = problem.sizes[:turn]
    small = int(sizes.max()) // 64 if small_bytes is None else small_bytes
    light = (sizes <= small) | ~problem.repeatable[:turn]
    found = _Cuts(problem, light, frozenset(pinned), frozenset()).chosen()
    # Where such a node belongs to is not said by its place in the order (a transposed weight, zeros): if it
    # stands in the way of cuts it is computed where it is read.
    floating = frozenset(
        node
        for node in range(turn)
        if let_float
        and problem.repeatable[node]
        and not problem.inputs[node]
        and all(user >= turn for user in problem.users[node])
    ) - set(pinned)
    finer = _Cuts(problem, light, frozenset(pinned), floating).chosen() if floating else found
    if len(finer) > len(found):
        found = finer
    else:
        floating = frozenset()
    if not found:
        return None
    # To make a stage's values again is to run through those before it, whoever reads what crosses.
    crossing = [node for cut in found for node in cut.crossing]
    held = {n for n in needed_again(problem, (), crossing)[0] if not problem.repeatable[n]}
    for cut in found:
        held |= cut.pinned
    return Chain(problem, _segments_between(problem, found, held), frozenset(held), floating)


@dataclass(frozen=True)
class _Cut:
    """Forward position, backward position, the values that cross, and those to be pinned."""

    forward: int
    backward: int
    crossing: frozenset[int]
    pinned: frozenset[int] = field(default=frozenset())


class _Cuts:
    def __init__(
        self,
        problem: Problem,
        light: npt.NDArray[np.bool_],
        pinned: frozenset[int],
        floating: frozenset[int],
    ) -> None:
        turn, count = problem.turn, len(problem)
        self.problem = problem
        self.light = light.copy()
        self.light[[*pinned, *floating]] = True
        self.last_forward = np.full(turn, -1, np.int64)
        self.first_backward = np.full(turn, count, np.int64)
        self.last_backward = np.full(turn, -1, np.int64)
        for node in sorted(set(range(turn)) - floating):
            for user in problem.users[node]:
                if user < turn:
                    self.last_forward[node] = user
                else:
                    self.first_backward[node] = min(self.first_backward[node], user)
                    self.last_backward[node] = user
        # The backward pass may be cut for c no earlier than behind the readers of nodes from c on.
        self.earliest = np.full(turn + 1, turn, np.int64)
        # Light values do not count, they are pinned where that is not enough.
        last = np.where(self.light, -1, self.last_backward)
        behind = np.maximum.accumulate(last[::-1])[::-1] + 1
        self.earliest[:turn] = np.maximum(behind, turn)

    def chosen(self) -> list[_Cut]:
        """The cuts of the chain, first stage first; their backward positions descend."""
        found: list[_Cut] = []
        for position in range(self.problem.turn, 0, -1):
            cut = self.at(position)
            if cut is not None and position == cut.backward == self.problem.turn:
                continue  # nothing lies behind it
            if cut is None or (found and cut.backward < found[-1].backward):
                continue
            if found and cut.crossing and cut.crossing == found[-1].crossing:
                found.pop()  # the earlier cut leaves more to what follows from the value
            found.append(cut)
        return found[::-1]

    def at(self, position: int) -> _Cut | None:
        """The cut before a forward node, if there is one."""
        backward = int(self.earliest[position])
        crosses = self.last_forward[:position] >= position
        crosses |= self.first_backward[:position] < backward
        value = np.flatnonzero(crosses & ~self.light[:position])
        if len(value) > 1:
            return None
        only = int(value[0]) if len(value) else -1
        # Backward nodes that read nothing else of what lies before may go to the later side.
        for node in range(backward, len(self.problem)):
            heavy = [r for r in self.problem.inputs[node] if r < position and not self.light[r]]
            if any(r != only for r in heavy):
                if only >= 0 or len(heavy) > 1 or position < self.problem.turn:
                    break
                only = heavy[0]  # at the turn: the value that the backward pass starts from
            if heavy:
                backward = node + 1
        light = self.last_forward[:position] >= position
        light |= self.first_backward[:position] < backward
        pinned = frozenset(map(int, np.flatnonzero(light & self.light[:position])))
        later = self.light[position:] & (self.last_backward[position:] >= backward)
        pinned |= frozenset(int(node) + position for node in np.flatnonzero(later))
        return _Cut(position, backward, frozenset({only} - {-1}), pinned)


def _segments_between(
    problem: Problem, cuts: Sequence[_Cut], pinned: Collection[int]
) -> tuple[Segment, ...]:
    bounds = [
        _Cut(0, len(problem), frozenset()),
        *cuts,
        _Cut(problem.turn, problem.turn, frozenset()),
    ]
    positions = [cut.backward for cut in bounds]
    gradients: list[set[int]] = [set() for _ in bounds]
    for node in range(problem.turn, len(problem)):
        last = max(problem.users[node], default=-1)
        for index, position in enumerate(positions):
            if node < position <= last:
                gradients[index].add(node)
    return tuple(
        Segment(
            range(bounds[i].forward, bounds[i + 1].forward),
            range(bounds[i + 1].backward, bounds[i].backward),
            bounds[i].crossing - frozenset(pinned),
            frozenset(gradients[i + 1]),
        )
        for i in range(len(bounds) - 1)
    )


def stages_of(chain: Chain, *, max_options: int = 12) -> tuple[ChainStage, ...]:
    """Measures the stages of a chain, each with up to `max_options` options.

    The first option tapes all that the backward part reads, the last one nothing; between them values are left
    out one after the other, the one with the least cost per byte first. Every option is measured by running it;
    dominated ones are dropped. Equal stages are measured once.

    Args:
        chain: see `chain_of`.
        max_options: at least 2.

    Raises:
        PolicyError: `max_options` is below 2.
    """
    stages = _stages_until(chain, max_options, None)
    assert stages is not None
    return stages


def _stages_until(
    chain: Chain, max_options: int, stop: Callable[[], bool] | None
) -> tuple[ChainStage, ...] | None:
    """As `stages_of`; `stop` is asked before every stage, True ends without a result, None."""
    if max_options < 2:
        raise PolicyError(f"stages_of(max_options={max_options}): expected at least 2")
    known: dict[object, ChainStage] = {}
    stages: list[ChainStage] = []
    for index in range(len(chain.segments)):
        if stop is not None and stop():
            return None
        measure = _Measure(chain, index)
        key = measure.key()
        if key not in known:
            known[key] = measure.stage(max_options)
        stages.append(known[key])
    return tuple(stages)


class _Measure:
    """Costs and peaks of one segment, by running it. Taped nodes are given relative to its first node."""

    def __init__(self, chain: Chain, index: int) -> None:
        self.problem = chain.problem
        self.segment = chain.segments[index]
        self.pinned = chain.pinned
        self.base = self.segment.reads | chain.pinned
        self.output = chain.reads_of(index + 1) - self.base
        following = chain.segments[index - 1].gradients if index else frozenset()
        self.gradients_out = following
        self.read = frozenset(
            r
            for node in self.segment.backward
            for r in self.problem.inputs[node]
            if r < self.problem.turn and r not in self.base and r not in chain.floating
        )

    def key(self) -> object:
        """Equal for segments that are the same up to their position."""
        problem, segment = self.problem, self.segment

        def name(node: int) -> tuple[str, int]:
            if node in self.pinned:
                return "pinned", 0
            if node in self.segment.reads:
                return "input", sorted(segment.reads).index(node)
            if node in segment.forward:
                return "forward", node - segment.forward.start
            if node in segment.backward:
                return "backward", node - segment.backward.start
            if node < problem.turn:  # floating
                return f"{problem.costs[node]}", int(problem.sizes[node])
            return "gradient", sorted(segment.gradients).index(node)

        def row(node: int) -> tuple[object, ...]:
            return (
                float(problem.costs[node]),
                int(problem.sizes[node]),
                int(problem.extra_while_running[node]),
                tuple(map(name, problem.inputs[node])),
                node in self.pinned,
                node in self.output,
                node in self.gradients_out,
            )

        passing = tuple(
            (int(problem.sizes[node]), node in self.gradients_out)
            for node in sorted(segment.gradients)
        )
        rows = tuple(row(node) for part in (segment.forward, segment.backward) for node in part)
        return len(segment.forward), rows, passing

    def stage(self, max_options: int) -> ChainStage:
        segment = self.segment
        again = self.missing(self.output, frozenset())
        tapes = self.tapes(max_options)
        return ChainStage(
            forward_cost=self.cost(again),
            output_bytes=self.bytes_of(self.output),
            gradient_bytes=self.bytes_of(segment.gradients),
            forward_peak_bytes=self.peak(again, frozenset(), self.output),
            first_forward_peak_bytes=self.peak(segment.forward, frozenset(), self.output),
            options=_undominated(
                [o for lean in (False, True) for t in tapes if (o := self.option(t, lean))]
            ),
        )

    def tapes(self, count: int) -> list[frozenset[int]]:
        """Sets to tape, from everything that is read down to nothing."""
        path = [self.read]
        if len(self.read) <= _GREEDY_LIMIT:
            while path[-1]:
                path.append(path[-1] - {self._least_worth(path[-1])})
        else:
            ranked = sorted(self.read, key=lambda node: self._worth(self.read, node))
            path += [self.read - set(ranked[: i + 1]) for i in range(len(ranked))]
        places = dict.fromkeys(round(float(p)) for p in np.linspace(0, len(path) - 1, count))
        chosen = [path[place] for place in places]
        # An output that is read may still be there as the next stage's input: then it costs nothing.
        return list(
            dict.fromkeys([*chosen, *(tape | (self.output & self.read) for tape in chosen)])
        )

    def _least_worth(self, taped: frozenset[int]) -> int:
        return min(taped, key=lambda node: self._worth(taped, node))

    def _worth(self, taped: frozenset[int], node: int) -> tuple[float, int]:
        """Cost per byte of leaving a node out of the tape."""
        extra = self.cost(self.missing([node], taped - {node}))
        return extra / max(int(self.problem.sizes[node]), 1e-9), node

    def option(self, taped: frozenset[int], lean: bool) -> StageOption | None:
        """Runs an option; `None` for a lean one that runs the stage more often than anyone would."""
        segment = self.segment
        most = _LEAN_LIMIT * (len(segment.forward) + len(segment.backward))
        with_output = self.missing(taped | self.output, frozenset())
        alone = self.missing(taped, frozenset())
        emitter = Emitter(self.problem)
        emitter.held = {*self.base, *taped, *segment.gradients}
        for node in segment.backward:
            # Other gradients are there by the order of the problem.
            again = emitter.obtain(r for r in self.problem.inputs[node] if r < self.problem.turn)
            emitter.run(node)
            if lean:
                emitter.drop(again)
                if len(emitter.sequence) > most:
                    return None
        kept = taped | self.output
        held = self.missing(taped, self.output)
        return StageOption(
            tape_bytes=self.bytes_of(taped - self.output),
            tape_cost=self.cost(with_output),
            leaf_cost=self.cost(alone),
            backward_extra_cost=self.cost(n for n in emitter.sequence if n < self.problem.turn),
            tape_peak_bytes=self.peak(with_output, frozenset(), kept),
            leaf_peak_bytes=self.peak(alone, frozenset(), taped),
            first_peak_bytes=self.peak(segment.forward, frozenset(), kept),
            backward_peak_bytes=self.peak(
                emitter.sequence, taped | segment.gradients, self.gradients_out
            ),
            tapes_output=bool(self.output) and self.output <= taped,
            held_leaf_cost=self.cost(held),
            held_leaf_peak_bytes=self.peak(held, self.output, kept),
            taped=tuple(sorted(node - segment.forward.start for node in taped)),
            lean=lean,
        )

    def missing(self, wanted: Iterable[int], held: frozenset[int]) -> list[int]:
        emitter = Emitter(self.problem)
        emitter.held = {*self.base, *held}
        return emitter.missing(wanted)

    def cost(self, nodes: Iterable[int]) -> float:
        return float(sum(self.problem.costs[node] for node in nodes))

    def bytes_of(self, nodes: Iterable[int]) -> int:
        return sum(int(self.problem.sizes[node]) for node in nodes)

    def peak(self, order: Sequence[int], before: frozenset[int], after: frozenset[int]) -> int:
        """Largest number of live bytes while `order` runs, the segment's input and pinned values excepted.

        Args:
            order: nodes to run.
            before: nodes alive at the start.
            after: nodes that stay alive to the end.
        """
        return _peak(self.problem, order, before - self.base, after - self.base, self.base)


def _peak(
    problem: Problem,
    order: Sequence[int],
    before: frozenset[int],
    after: frozenset[int],
    free: frozenset[int],
) -> int:
    end = len(order)
    copies: list[list[int]] = [[0, -1, int(problem.sizes[node])] for node in sorted(before)]
    latest = {node: index for index, node in enumerate(sorted(before))}
    for position, node in enumerate(order):
        for read in problem.inputs[node]:
            if read in latest:
                copies[latest[read]][1] = position
        if node not in free:
            latest[node] = len(copies)
            copies.append([position, position, int(problem.sizes[node])])
    for node in after:
        if node in latest:
            copies[latest[node]][1] = end
    change = [0] * (end + 2)
    for start, stop, size in copies:
        change[start] += size
        change[stop + 1] -= size
    extra = problem.extra_while_running
    live = largest = 0
    for position in range(end + 1):
        live += change[position]
        largest = max(largest, live + int(extra[order[position]]) if position < end else live)
    return largest


def _undominated(options: list[StageOption]) -> tuple[StageOption, ...]:
    """Options that no other one equals or beats in everything; of equal ones the first."""

    def numbers(option: StageOption) -> tuple[float, ...]:
        found = [v for k, v in vars(option).items() if k not in ("taped", "tapes_output", "lean")]
        return (*found, not option.tapes_output)

    table = np.asarray([numbers(option) for option in options], np.float64)
    kept: list[StageOption] = []
    for index, option in enumerate(options):
        covers = (table <= table[index]).all(axis=1)
        same = covers & (table == table[index]).all(axis=1)
        if not (covers & ~same).any() and not same[:index].any():
            kept.append(option)
    return tuple(kept)


def revolve(chain: Chain, snapshots: int) -> ChainPlan:
    """Applies the binomial schedule to a chain, whatever its stages cost.

    It is optimal where all stages are equal; the budget is in snapshots, not bytes. Nothing is taped: every
    stage is computed from its input just before it is reversed.

    Args:
        chain: see `chain_of`; its number of stages is the number of steps.
        snapshots: stage inputs that may be held at a time, the first stage's included.

    Raises:
        PolicyError: `snapshots` is not positive.
    """
    plan = revolve_schedule(len(chain.segments), snapshots)
    writer = _Writer(chain, lambda stage, option: ((), False))
    for step in plan.steps:
        writer.perform(step)
    return _judged(chain, plan, tuple(writer.emitter.sequence))


def solve_chain(
    problem: Problem,
    budget_bytes: int,
    *,
    chain: Chain | None = None,
    slots: int = 500,
    max_stages: int = 100,
    max_options: int = 16,
    stop: Callable[[], bool] | None = None,
) -> ChainPlan | None:
    """Applies the dynamic program to the chain in a problem.

    Within a stage an option may leave out any value, across stages the program can only checkpoint or tape.
    Fine stages therefore suit small budgets, coarse ones large budgets: the chain is solved as found and with
    its stages merged until each has 2, 4, 8, ... 512 forward nodes, and the cheapest plan is returned (among equal
    ones that with the smaller peak).

    Args:
        problem: forward nodes before `problem.turn`, backward nodes after it.
        budget_bytes: bound on the peak of `replay`.
        chain: of `problem`; if given it is solved as it is, without other ways to merge its stages.
        slots: see `solve_stages`.
        max_stages: stages are merged at least until there are no more than that.
        max_options: see `stages_of`.
        stop: asked before every form of the chain and every row of a table; True ends with the best so far.

    Returns:
        A plan whose peak, by `replay`, is within the budget; `None` if the problem has no chain or no
        schedule of this kind fits.

    Raises:
        PolicyError: a number is out of range.
    """
    prepared = prepare_chain(
        problem, chain=chain, max_stages=max_stages, max_options=max_options, stop=stop
    )
    return None if prepared is None else prepared.solve(budget_bytes, slots=slots, stop=stop)


def prepare_chain(
    problem: Problem,
    *,
    chain: Chain | None = None,
    max_stages: int = 100,
    max_options: int = 16,
    stop: Callable[[], bool] | None = None,
) -> PreparedChain | None:
    """Does what `solve_chain` does before it looks at the budget; for several budgets do it once.

    Args:
        problem, chain, max_stages, max_options, stop: see `solve_chain`.

    Returns:
        `None` if the problem has no chain.

    Raises:
        PolicyError: a number is out of range.
    """
    if max_stages < 1:
        raise PolicyError(f"solve_chain(max_stages={max_stages}): expected at least 1")
    found = chain_of(problem) if chain is None else chain
    if found is None:
        return None
    if chain is not None:
        forms = [_at_most(found, max_stages)]
    else:
        chains = [found]
        if (
            found.floating
        ):  # computing them again costs, holding them takes memory, either cuts differently
            chains.append(chain_of(problem, pinned=found.floating) or found)
            chains.append(chain_of(problem, let_float=False) or found)
        forms = [form for one in dict.fromkeys(chains) for form in _forms(one, max_stages)]
    measured: list[tuple[Chain, tuple[ChainStage, ...]]] = []
    for form in forms:
        stages = _stages_until(form, max_options, stop)
        if stages is None:
            break
        measured.append((form, stages))
    return PreparedChain(tuple(measured))


@dataclass(frozen=True, eq=False)
class PreparedChain:
    """A chain cut finely and coarsely, with the measured stages of every form."""

    forms: tuple[tuple[Chain, tuple[ChainStage, ...]], ...]

    def solve(
        self, budget_bytes: int, *, slots: int = 500, stop: Callable[[], bool] | None = None
    ) -> ChainPlan | None:
        """Returns the cheapest plan of all forms within the budget; see `solve_chain`."""
        plans: list[ChainPlan] = []
        for form, stages in self.forms:
            if stop is not None and stop():
                break
            plan = _solve_form(form, stages, budget_bytes, slots, stop)
            plans += [] if plan is None else [plan]
        return min(plans, key=lambda plan: (plan.extra_cost, plan.peak_bytes), default=None)


def _solve_form(
    chain: Chain,
    stages: Sequence[ChainStage],
    budget_bytes: int,
    slots: int,
    stop: Callable[[], bool] | None,
) -> ChainPlan | None:
    free_bytes = budget_bytes - chain.pinned_bytes
    if free_bytes < 0:
        return None
    plan = solve_stages(stages, free_bytes, slots=slots, stop=stop)
    if plan is None:
        return None
    realised = _judged(chain, plan, run_steps(chain, stages, plan.steps))
    if realised.peak_bytes > budget_bytes:
        raise AssertionError(
            f"the chain's memory model allowed {budget_bytes} bytes, the sequence needs "
            f"{realised.peak_bytes}"
        )
    return realised


def _forms(chain: Chain, max_stages: int) -> Iterable[Chain]:
    """The chain and coarser versions of it, small stages merged with those after or before them."""
    first = _at_most(chain, max_stages)
    yield first
    known = {_bounds(first)}
    least = 2
    while least < min(chain.problem.turn, _COARSEST + 1):
        for backwards in (False, True):
            form = _merged(chain, least, backwards)
            if len(form.segments) <= max_stages and _bounds(form) not in known:
                known.add(_bounds(form))
                yield form
        least *= 2


def _bounds(chain: Chain) -> tuple[int, ...]:
    return tuple(segment.forward.stop for segment in chain.segments)


def _at_most(chain: Chain, count: int) -> Chain:
    """A chain of at most `count` stages, neighbours merged evenly."""
    total = len(chain.segments)
    if total <= count:
        return chain
    bounds = [round(index * total / count) for index in range(count + 1)]
    return _joined(chain, [range(low, high) for low, high in pairwise(bounds)])


def _merged(chain: Chain, least: int, backwards: bool) -> Chain:
    """A chain whose stages have at least `least` forward nodes each, but for the one at the far end."""
    groups: list[range] = []
    size = 0
    total = len(chain.segments)
    order = range(total - 1, -1, -1) if backwards else range(total)
    members: list[int] = []
    for index in order:
        members.append(index)
        size += len(chain.segments[index].forward)
        if size >= least or index == order[-1]:
            groups.append(range(min(members), max(members) + 1))
            members, size = [], 0
    return _joined(chain, groups[::-1] if backwards else groups)


def _joined(chain: Chain, groups: Sequence[range]) -> Chain:
    segments: list[Segment] = []
    for group in groups:
        first, last = chain.segments[group[0]], chain.segments[group[-1]]
        segments.append(
            Segment(
                range(first.forward.start, last.forward.stop),
                range(last.backward.start, first.backward.stop),
                first.reads,
                last.gradients,
            )
        )
    return Chain(chain.problem, tuple(segments), chain.pinned, chain.floating)


def run_steps(chain: Chain, stages: Sequence[ChainStage], steps: Iterable[Step]) -> tuple[int, ...]:
    """Turns a schedule over stages into a sequence over nodes.

    Args:
        chain: see `chain_of`.
        stages: its stages as measured by `stages_of`.
        steps: a schedule, for instance of `solve_stages`.
    """

    def option_of(stage: int, option: int) -> tuple[tuple[int, ...], bool]:
        chosen = stages[stage].options[option]
        return chosen.taped, chosen.lean

    writer = _Writer(chain, option_of)
    for step in steps:
        writer.perform(step)
    return tuple(writer.emitter.sequence)


def _judged(chain: Chain, plan: StagePlan, sequence: tuple[int, ...]) -> ChainPlan:
    judged = replay(chain.problem, sequence)
    return ChainPlan(
        sequence=sequence,
        steps=plan.steps,
        num_stages=len(chain.segments),
        peak_bytes=judged.peak_bytes,
        extra_cost=judged.extra_cost,
        exact=plan.exact,
    )


class _Writer:
    """Turns a schedule over stages into a sequence over nodes."""

    def __init__(
        self, chain: Chain, option_of: Callable[[int, int], tuple[tuple[int, ...], bool]]
    ) -> None:
        self.chain = chain
        self.option_of = option_of  # stage and option to taped nodes and whether it is lean
        self.emitter = Emitter(chain.problem)
        self.owners: Counter[int] = Counter(dict.fromkeys(chain.pinned, 1))
        self.loose: list[int] = []  # computed, held by nobody yet

    def perform(self, step: Step) -> None:
        if step.kind == "sweep":
            for stage in range(step.stage, step.last + 1):
                self._run(stage, self.chain.reads_of(stage + 1), step.first)
                self._settle(self.chain.reads_of(stage + 1))
            self._hold(self.chain.reads_of(step.last + 1))
        elif step.kind == "tape":
            output, tape = self.chain.reads_of(step.stage + 1), self._tape(step)
            self._run(step.stage, output | tape, step.first)
            self._hold(output)
            self._hold(tape)
            self._settle()
        elif step.kind == "leaf":
            tape = self._tape(step)
            self._run(step.stage, tape, step.first)
            self._hold(tape)
            self._settle()
            self._reverse(step)
        elif step.kind == "backward":
            self._reverse(step)
        else:
            self._release(self.chain.reads_of(step.stage))

    def _tape(self, step: Step) -> frozenset[int]:
        start = self.chain.segments[step.stage].forward.start
        return frozenset(start + offset for offset in self.option_of(step.stage, step.option)[0])

    def _run(self, stage: int, wanted: frozenset[int], first: bool) -> None:
        if first:
            for node in self.chain.segments[stage].forward:
                self.emitter.run(node)
                self.loose.append(node)
        else:
            self.loose += self.emitter.obtain(sorted(wanted))

    def _reverse(self, step: Step) -> None:
        for node in self.chain.segments[step.stage].backward:
            self.loose += self.emitter.obtain(self.chain.problem.inputs[node])
            self.emitter.run(node)
            if self.option_of(step.stage, step.option)[1]:
                self._settle()
        self._release(self._tape(step))
        self._settle()

    def _hold(self, nodes: Iterable[int]) -> None:
        self.owners.update(nodes)

    def _release(self, nodes: frozenset[int]) -> None:
        self.owners.subtract(nodes)
        self.emitter.drop(node for node in nodes if self.owners[node] <= 0)

    def _settle(self, passing: frozenset[int] = frozenset()) -> None:
        """Drops what nobody holds; `passing` values stay for the next step."""
        self.emitter.drop(n for n in self.loose if self.owners[n] <= 0 and n not in passing)
        self.loose = [n for n in self.loose if n in passing]
