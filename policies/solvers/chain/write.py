"""Turns schedules over the stages of a chain into sequences over nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remat.policies.solvers.chain.find import Chain
from remat.policies.solvers.chain.schedule import ChainStage, ChainStep, StagePlan
from remat.policies.solvers.on_demand import Emitter
from remat.policies.solvers.problem import replay

__all__ = ["ChainPlan", "judged", "run_steps", "write_out"]


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
    steps: tuple[ChainStep, ...]
    num_stages: int
    peak_bytes: int
    extra_cost: float
    exact: bool


def run_steps(
    chain: Chain, stages: Sequence[ChainStage], steps: Iterable[ChainStep]
) -> tuple[int, ...]:
    """Turns a schedule over stages into a sequence over nodes.

    Args:
        chain: see `chain_of`.
        stages: its stages as measured by `stages_of`.
        steps: a schedule, for instance of `solve_stages`.
    """

    def option_of(stage: int, option: int) -> tuple[tuple[int, ...], bool]:
        chosen = stages[stage].options[option]
        return chosen.taped, chosen.lean

    return write_out(chain, steps, option_of)


def write_out(
    chain: Chain,
    steps: Iterable[ChainStep],
    option_of: Callable[[int, int], tuple[tuple[int, ...], bool]],
) -> tuple[int, ...]:
    """Turns a schedule into a sequence; `option_of` a stage and an option: what it tapes, and if it is lean."""
    writer = _Writer(chain, option_of)
    for step in steps:
        writer.perform(step)
    return tuple(writer.emitter.sequence)


def judged(chain: Chain, plan: StagePlan, sequence: tuple[int, ...]) -> ChainPlan:
    """Returns a schedule's sequence with what `replay` says of it."""
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

    def perform(self, step: ChainStep) -> None:
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

    def _tape(self, step: ChainStep) -> frozenset[int]:
        start = self.chain.segments[step.stage].forward.start
        return frozenset(start + offset for offset in self.option_of(step.stage, step.option)[0])

    def _run(self, stage: int, wanted: frozenset[int], first: bool) -> None:
        if first:
            for node in self.chain.segments[stage].forward:
                self.emitter.run(node)
                self.loose.append(node)
        else:
            self.loose += self.emitter.obtain(sorted(wanted))

    def _reverse(self, step: ChainStep) -> None:
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
