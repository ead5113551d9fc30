"""Schedules over the stages of a chain, and how one is written out from the choice made in every state.

A *stage* is a stretch of forward nodes with the stretch of backward nodes that belongs to it. Between two stages
one value goes forward, the stage's input, from which the stage can be computed again. A schedule consists of

* `sweep s..e`: run stages s to e and hold only the last one's output (a checkpoint),
* `tape s`: run stage s, hold its output and what an option says its backward part reads,
* `leaf s`: the same where the output is not wanted, followed by the backward part,
* `backward s`: the backward part of a taped stage,
* `release s`: the input of stage s is not needed any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from remat.core.errors import PolicyError

__all__ = ["ChainStage", "ChainStep", "Move", "Task", "StageOption", "StagePlan", "expand"]


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


@dataclass(frozen=True)
class ChainStep:
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

    steps: tuple[ChainStep, ...]
    extra_cost: float
    exact: bool


@dataclass(frozen=True)
class Task:
    """Stages `first` to `last` are to be reversed within `free`; `held`: the last one's output is there."""

    first: int
    last: int
    free: int
    held: bool


@dataclass(frozen=True)
class Move:
    """Put a checkpoint at the input of stage `split`, or if that is 0 tape the first stage under `option`.

    `keep`: the checkpoint outlives the stages to its right and serves the backward part to its left.
    """

    split: int
    option: int
    keep: bool = False


def expand(
    count: int,
    free: int,
    choose: Callable[[Task], Move],
    remaining: Callable[[int, int, int], int],
) -> list[ChainStep]:
    """Writes out a schedule; no recursion, chains may be long.

    Args:
        count: number of stages.
        free: memory at the start, in the units of `choose` and `remaining`.
        choose: what to do in a state.
        remaining: memory left to the right of a stage whose input is held, and the tape before it under an
            option (-1 for none).
    """
    steps: list[ChainStep] = []
    todo: list[ChainStep | Task] = [Task(0, count - 1, free, False)]
    while todo:
        item = todo.pop()
        if isinstance(item, ChainStep):
            steps.append(item)
            continue
        first, last, left = item.first, item.last, item.free
        initial = last == count - 1
        choice = choose(item)
        split, option = choice.split, choice.option
        if split:
            steps.append(ChainStep("sweep", first, split - 1, first=initial))
            todo.append(Task(first, split - 1, left, choice.keep))
            if not choice.keep:
                todo.append(ChainStep("release", split, split))
            todo.append(Task(split, last, remaining(split, -1, left), item.held))
        elif first == last:
            steps.append(ChainStep("leaf", first, first, option, initial))
            if item.held:
                steps.append(ChainStep("release", first + 1, first + 1))
        else:
            steps.append(ChainStep("tape", first, first, option, initial))
            todo.append(ChainStep("backward", first, first, option))
            todo.append(ChainStep("release", first + 1, first + 1))
            todo.append(Task(first + 1, last, remaining(first + 1, option, left), item.held))
    return steps
