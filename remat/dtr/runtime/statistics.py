"""What a run came to: counts, peaks, and its trace. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.dtr.simulator import Move

__all__ = ["RunStatistics"]


@dataclass(frozen=True)
class RunStatistics:
    """What a run of `remat.dtr.value_and_grad` and its like came to.

    Attributes:
        budget_bytes: what was given, None for no limit.
        peak_bytes: the most bytes of what the run made: arrays, and what XLA needs while an operator runs.
        result_bytes: of the arrays it returned; they are part of the peak.
        operators: run for the first time: those of the program.
        rematerializations: run again.
        evictions: arrays evicted to make room.
        releases: arrays freed since nobody refers to them any more.
        compilations: operators compiled for this run.
        base_cost: nanoseconds of all operators once.
        compute_cost: of all that ran.
        storage_accesses: arrays looked at, to score them and to keep what scores need.
        trace: every change of memory, if it was asked for; `target` numbers operators and arrays as they came.
        names: of the operators, by those numbers, if the trace was asked for.
    """

    budget_bytes: int | None
    peak_bytes: int
    result_bytes: int
    operators: int
    rematerializations: int
    evictions: int
    releases: int
    compilations: int
    base_cost: int
    compute_cost: int
    storage_accesses: int
    trace: tuple[Move, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def overhead(self) -> float:
        """What was computed again, as a share of the base."""
        return (self.compute_cost - self.base_cost) / self.base_cost if self.base_cost else 0.0
