"""What a plan records: kept values, repeated operators, schedule, totals, evidence. Plain data, no jax.

Whatever computes with plans (files, reports, differences) takes these; `remat.plans.plan` adds to them what users
call as methods.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from remat.core.errors import PlanError
from remat.core.graph import Graph
from remat.plans.steps import Schedule

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "Certificate",
    "Confirmed",
    "LoopRecord",
    "PlanRecord",
    "Recomputed",
    "Saved",
    "Status",
    "primal_name",
]

Status = Literal["optimal", "feasible", "heuristic"]


def primal_name(primal: int) -> str:
    """Returns the `checkpoint_name` that stands for a value of the undifferentiated program."""
    return f"remat.{primal}"


@dataclass(frozen=True, slots=True)
class Saved:
    """A value kept from the forward pass for the backward pass.

    Attributes:
        value: value id.
        label: dtype and shape, for instance `bf16[8,512,768]`.
        nbytes: bytes in the form in which it is kept, for one iteration if inside a loop.
        raw_bytes: bytes in the form in which it was computed.
        form: how it is kept: `raw`, `bits` (one bit per element) or another of `remat.core.forms`.
        is_input: an argument or closed-over array: alive anyway, costs no memory of its own.
        op: primitive that computed it, empty for an input.
        tags, scope, source: the user's names for it and the line it comes from.
        why: what keeping it avoids.
    """

    value: int
    label: str
    nbytes: int
    raw_bytes: int
    form: str
    is_input: bool
    op: str
    tags: tuple[str, ...]
    scope: str
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Recomputed:
    """An operator that runs again in the backward pass."""

    op: int
    name: str
    label: str
    nbytes: int
    flops: int
    times: int
    scope: str
    source: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """Evidence for a plan's optimality: for a cut its capacity and the flow value that equals it."""

    kind: str
    value: int
    bound: int

    @property
    def gap(self) -> float:
        """Relative distance between value and bound; 0.0 is a proof of optimality."""
        return abs(self.value - self.bound) / max(abs(self.value), abs(self.bound), 1)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What the compiler made of a plan: of the program that computes a function's results and gradients.

    Attributes:
        device: that it was compiled for.
        jax_version: that compiled it.
        temp_bytes: everything that is neither argument nor result, at its peak.
        traffic_bytes: device memory read and written per call.
        matmuls: executed per call.
        roofline_seconds: estimate per call, None if the rates of the device are not known.
        compiles: plans that were compiled, or looked up, until this one was chosen.
    """

    device: str
    jax_version: str
    temp_bytes: int
    traffic_bytes: int
    matmuls: int
    roofline_seconds: float | None
    compiles: int = 1


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """The plan of a loop body.

    Attributes:
        path: names the loop: `scan0`, or `scan0_rest` for the iterations that do not fill a chunk.
        length: how often the body runs.
        plan: of the body.
        chunk: iterations of the function's loop in one run of the body. 1, or more if the loop was cut into chunks:
            then the body is a loop itself, `plan.loop("scan0")`, that runs again in the backward pass.
    """

    path: str
    length: int
    plan: PlanRecord
    chunk: int = 1


@dataclass(frozen=True)
class PlanRecord:
    """Which forward values the backward pass keeps, in which form, and in which order it runs.

    Bytes inside a loop body are those of one iteration; `saved_bytes`, `recompute_flops` and
    `recompute_seconds` of a plan include its loops, times their lengths. `peak_bytes` is what
    `remat.memory` predicts for everything that is neither argument nor result: XLA's *temp*.

    Attributes:
        policy_name: name of the policy that made it; `options` are its settings, as text.
        status: `optimal` for the policy's own objective, `feasible` with its `certificate.gap`, or
            `heuristic`.
        graph: the joint graph that was planned.
        schedule: the steps; the lowering executes them and the simulator replays them.
        saved: what is kept, largest first; `recomputed`: operators that run again, costliest first.
        saved_bytes: bytes kept beyond arguments; `recompute_flops`: operations repeated.
        recompute_seconds: roofline estimate of the repetition on `device`.
        baseline_saved_bytes, baseline_peak_bytes: the same of keeping everything (no remat).
        solve_seconds: time spent planning (not part of equality).
        certificate: evidence of optimality, None for a heuristic.
        loops: plans of the loop bodies.
        opaque: operators the planner could not look into, each with what it did about it.
        device: device whose roofline the estimates use.
        budget_bytes: the budget the plan was made for, None if there was none.
        confirmed: what the compiler made of it, None if it was not asked. Then `budget_bytes` bounds
            `confirmed.temp_bytes`, and otherwise `peak_bytes`.
    """

    policy_name: str
    options: str
    status: Status
    graph: Graph
    schedule: Schedule
    saved: tuple[Saved, ...]
    recomputed: tuple[Recomputed, ...]
    saved_bytes: int
    peak_bytes: int
    recompute_flops: int
    recompute_seconds: float
    baseline_saved_bytes: int
    baseline_peak_bytes: int
    certificate: Certificate | None = None
    loops: tuple[LoopRecord, ...] = ()
    opaque: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    device: str = "h200"
    budget_bytes: int | None = None
    solve_seconds: float = field(default=0.0, compare=False)
    confirmed: Confirmed | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        kept = sum(not entry.is_input for entry in self.saved)
        return (
            f"<Plan by {self.policy_name!r}: {kept} values kept, {self.saved_bytes:,} bytes; peak "
            f"{self.peak_bytes:,} bytes>"
        )

    def __hash__(self) -> int:
        return hash((self.policy_name, self.options, self.graph.fingerprint(), self.schedule))

    @property
    def saved_values(self) -> tuple[int, ...]:
        """Ids of the kept values, ascending."""
        return tuple(sorted(entry.value for entry in self.saved))

    @property
    def gap(self) -> float | None:
        """Relative optimality gap, None when there is no bound."""
        return None if self.certificate is None else self.certificate.gap

    @property
    def expected_peak_bytes(self) -> int:
        """The best that is known of what it takes: as compiled, if the compiler was asked, else as predicted."""
        return self.peak_bytes if self.confirmed is None else self.confirmed.temp_bytes

    @property
    def repeats(self) -> bool:
        """Whether an operator runs again in the backward pass, here or in a loop's body."""
        return bool(self.recomputed) or any(entry.plan.repeats for entry in self.loops)

    @property
    def is_plain(self) -> bool:
        """Whether the function as it is carries the plan out: it repeats nothing, and chose by names."""
        return not self.repeats and any(value.primal is not None for value in self.graph.values)

    def policy_names(self) -> tuple[str, ...]:
        """Returns the names that stand for the kept values in `policy` and `annotate`.

        Raises:
            PlanError: a kept value was born in differentiation and has no name in the program.
        """
        names, nameless = [], []
        for entry in self.saved:
            primal = self.graph.values[entry.value].primal
            producer = self.graph.values[entry.value].producer
            if producer is None or not self.graph.ops[producer].recomputable:
                continue  # alive anyway, or between the regions
            if primal is None:
                nameless.append(f"{entry.label} of {entry.op}")
            else:
                names.append(primal_name(primal))
        if nameless:
            raise PlanError(
                f"{len(nameless)} kept values have no name in the undifferentiated program, for example "
                f"{nameless[0]}: a jax.checkpoint policy cannot choose them. Make the plan with "
                "remat.plan(..., lowering='policy'), or use it staged: remat_policy=plan."
            )
        return tuple(sorted(set(names)))

    def to_networkx(self) -> nx.DiGraph:
        """Returns the joint graph with `saved` and `recomputed` marks on its nodes."""
        graph = self.graph.to_networkx()
        kept = {entry.value: entry.form for entry in self.saved}
        for value in self.graph.values:
            graph.nodes[("value", value.id)]["saved"] = kept.get(value.id)
        times = {entry.op: entry.times for entry in self.recomputed}
        for op in self.graph.ops:
            graph.nodes[("op", op.id)]["recomputed"] = times.get(op.id, 0)
        return graph

    def digest(self) -> str:
        """Returns a short hash of the decisions: graph, kept values and order of execution."""
        text = repr((self.graph.fingerprint(), self.saved_values, self.schedule))
        text += "".join(x.path + x.plan.digest() for x in self.loops)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
