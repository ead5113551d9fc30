"""The numbers that pictures, tables and pages of a plan share. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from remat.pictures.contents import KINDS, Contents, contents
from remat.plans.record import PlanRecord

__all__ = ["BEYOND", "Curve", "curves"]

BEYOND = "beyond"
"""What a plan's peak has besides what its kernels hold: of this and its policy's own count it is the larger."""


@dataclass(frozen=True)
class Curve:
    """What is alive over time.

    Attributes:
        nbytes: while each kernel runs, in the order in which they do, bytes of each of
            `remat.pictures.contents.KINDS`.
        turn: the place where the backward pass begins, which tells the kernels of both passes apart best: XLA makes
            numbers of the backward pass at once, before anything else.
        peak_bytes: as the plan has it. A policy that plans within a budget may count more than the kernels show.
        peak: the place where most is alive.
    """

    nbytes: tuple[tuple[int, ...], ...]
    turn: int
    peak_bytes: int

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes alive while each kernel runs."""
        return tuple(map(sum, self.nbytes))

    @property
    def peak(self) -> int:
        """Where most is alive."""
        live = self.live_bytes
        return live.index(max(live))

    def at_peak(self) -> dict[str, int]:
        """Returns bytes by kind where most is alive, in the order of `KINDS`, without those that have none.

        `BEYOND` is what `peak_bytes` counts besides; with it the sum is `peak_bytes`.
        """
        found: dict[str, int] = dict(zip(KINDS, self.nbytes[self.peak], strict=True))
        found[BEYOND] = self.peak_bytes - sum(found.values())
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def curves(plan: PlanRecord) -> tuple[Curve, Curve]:
    """Returns what is alive over time without rematerialization, and with the plan."""
    graph = plan.graph
    # Without rematerialization the bodies of loops would keep more, from the first loop to the last.
    more = sum(x.length * (x.plan.baseline_saved_bytes - x.plan.saved_bytes) for x in plan.loops)
    before = contents(graph.plain or graph, loops=plan.loops)
    after = contents(graph, plan.schedule, loops=plan.loops)
    return _curve(before, plan.baseline_peak_bytes, more), _curve(after, plan.peak_bytes, 0)


def _curve(found: Sequence[Contents], peak_bytes: int, more: int) -> Curve:
    loops = [i for i, entry in enumerate(found) if entry.is_loop]
    span = range(loops[0], loops[-1] + 1) if loops else range(0)
    kept = KINDS.index("kept")
    nbytes = [
        tuple(n + more * (i in span and k == kept) for k, n in enumerate(entry.nbytes))
        for i, entry in enumerate(found)
    ]
    # By place, how many more kernels before it are of the forward pass than of the backward pass.
    ahead = list(accumulate((1 - 2 * entry.is_backward for entry in found), initial=0))
    turn = ahead.index(max(ahead))
    return Curve(tuple(nbytes) or ((0,) * len(KINDS),), turn, peak_bytes)
