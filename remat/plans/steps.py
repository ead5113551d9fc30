"""Steps and the schedules made of them: what a plan executes. Plain data, no jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Schedule", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a schedule.

    Attributes:
        action: `compute` runs operator `target`; `free` drops value `target`; `encode` stores value
            `target` in its kept form, `decode` brings it back, `drop` forgets the encoded form;
            `turn` ends the forward pass; `barrier` makes everything after it wait for `values`.
        target: operator or value id, -1 for `turn` and `barrier`.
        values: the value ids a barrier ties together.
    """

    action: Literal["compute", "free", "encode", "decode", "drop", "turn", "barrier"]
    target: int = -1
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The explicit list of steps behind a plan: forward pass, `turn`, backward pass."""

    steps: tuple[Step, ...]

    @property
    def turn(self) -> int:
        """Index of the step that ends the forward pass."""
        return next(i for i, step in enumerate(self.steps) if step.action == "turn")

    @property
    def forward(self) -> tuple[Step, ...]:
        """The steps before the turn."""
        return self.steps[: self.turn]

    @property
    def backward(self) -> tuple[Step, ...]:
        """The steps after the turn."""
        return self.steps[self.turn + 1 :]

    def computed(self) -> Iterator[int]:
        """Iterates over operator ids as executed, repetitions included."""
        return (step.target for step in self.steps if step.action == "compute")
