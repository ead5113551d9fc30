"""`Plan`, the `Schedule` it stands for, and the forms in which a value can be kept. Plain data, no jax."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from remat.core.errors import PlanError
from remat.core.forms import form_of, stored_bytes
from remat.core.graph import Graph

if TYPE_CHECKING:
    import networkx as nx

    from remat.plans.simulate import Timeline

__all__ = [
    "Certificate",
    "LoopPlan",
    "Plan",
    "Recomputed",
    "Saved",
    "Schedule",
    "Status",
    "Step",
    "form_of",
    "primal_name",
    "stored_bytes",
]

Status = Literal["optimal", "feasible", "heuristic"]


def primal_name(primal: int) -> str:
    """Returns the `checkpoint_name` that stands for a value of the undifferentiated program."""
    return f"remat.{primal}"


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
class LoopPlan:
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
    plan: Plan
    chunk: int = 1


@dataclass(frozen=True)
class Plan:
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
    loops: tuple[LoopPlan, ...] = ()
    opaque: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    device: str = "h200"
    budget_bytes: int | None = None
    solve_seconds: float = field(default=0.0, compare=False)

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

    @property
    def policy(self) -> Any:
        """The plan as a `jax.checkpoint` policy over the names that `annotate` inserts.

        Raises:
            PlanError: the plan was not made with `lowering="policy"`.
        """
        import jax

        names = {*self.policy_names()}
        for entry in self.loops:
            names.update(entry.plan.policy_names())
        return jax.checkpoint_policies.save_only_these_names(*sorted(names))

    def annotate(self, fun: Any, **options: Any) -> Any:
        """Returns `fun` with the kept values named, cut into `jax.checkpoint` regions.

        Args:
            fun: the function this plan was made for with `remat.plan(fun, ..., lowering="policy")`.
            **options: `static_argnums`, `static_argnames` and `prevent_cse`, as in `remat.checkpoint`.

        Raises:
            PlanError: the plan was not made with `lowering="policy"`, or not for this function.
        """
        from remat.api import checkpoint

        self.policy_names()
        return checkpoint(fun, remat_policy=self, lowering="policy", **options)

    def loop(self, path: str) -> Plan:
        """Returns the plan of the loop body called `path`."""
        for entry in self.loops:
            if entry.path == path:
                return entry.plan
        raise PlanError(
            f"this plan has no loop {path!r}; its loops are {[entry.path for entry in self.loops]}"
        )

    def timeline(self, *, fused: bool = True) -> Timeline:
        """Replays the schedule and returns live bytes after every step; see `remat.plans.simulate`."""
        from remat.plans.simulate import simulate

        return simulate(self.graph, self.schedule, fused=fused).timeline

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

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON-ready data; see `remat.plans.file`.

        Raises:
            PlanError: a field holds something of another type than it should.
        """
        from remat.plans.file import plan_to_data

        return plan_to_data(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the plan as a JSON document, and writes it to `path` if one is given.

        Equal plans give equal lines but for the last, which holds the seconds spent planning, the versions of
        remat and jax and, in a file, the date. A file that holds an equal plan already is left as it is.

        Raises:
            PlanError: as `to_dict`.
            OSError: the file cannot be written.
        """
        from remat.plans.file import dump_plan, write_plan

        return dump_plan(self) if path is None else write_plan(self, path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: the document is not a plan, of a version this `remat` does not know, or damaged.
        """
        from remat.plans.file import plan_from_data

        return plan_from_data(data)

    @classmethod
    def from_json(cls, text_or_path: str | Path) -> Plan:
        """Reads a plan from a JSON document or from the path of one.

        Raises:
            PlanError: neither a JSON document nor a readable file, or as `from_dict`.
        """
        from remat.plans.file import read_plan

        return read_plan(text_or_path)

    def digest(self) -> str:
        """Returns a short hash of the decisions: graph, kept values and order of execution."""
        text = repr((self.graph.fingerprint(), self.saved_values, self.schedule))
        text += "".join(x.path + x.plan.digest() for x in self.loops)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from remat.plans.report import describe

        return describe(self)
