"""What a policy is: a frozen value that decides, for a joint graph, which forward values to keep."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, runtime_checkable

from remat.graph import Graph
from remat.plan import Certificate, Status

__all__ = ["BudgetPolicy", "Decision", "Policy", "describe_options", "required_saves"]


@dataclass(frozen=True)
class Decision:
    """The outcome of a policy.

    Attributes:
        saved: forward value ids to keep; inputs among them are kept by the caller anyway.
        status: `optimal` only with a certificate whose gap is zero.
        certificate: evidence for the status.
        notes: what the reader of the plan should know.
        order: the backward pass as operator ids, forward operators where they run again included (see
            `remat.schedule.build_schedule`); None repeats them when the backward pass first needs them.
        buffer_peak_bytes: peak of the buffers as the policy counted them, None if it did not.
    """

    saved: frozenset[int]
    status: Status = "heuristic"
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    order: tuple[int, ...] | None = None
    buffer_peak_bytes: int | None = None


@runtime_checkable
class Policy(Protocol):
    """A rematerialization policy.

    Laws (held by `tests/test_policies.py` for every registered policy):

    * `decide` is pure and deterministic: equal graphs give equal decisions;
    * the decision does not depend on how values and operators are numbered;
    * the backward pass is computable from `saved`, the inputs and the cotangents without running any
      operator again whose `recomputable` is False;
    * policies are frozen, hashable and equal by content.
    """

    name: ClassVar[str]

    def decide(self, graph: Graph) -> Decision:
        """Returns which forward values of `graph` to keep for its backward pass."""
        ...


@runtime_checkable
class BudgetPolicy(Protocol):
    """A policy that can plan within a budget."""

    name: ClassVar[str]

    def decide(self, graph: Graph) -> Decision:
        """Returns the decision without a budget."""
        ...

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns a decision whose sequence of buffers peaks at no more than `budget_bytes`.

        Raises:
            BudgetError: none was found; the message has the smallest peak found and what forces it.
        """
        ...


def describe_options(policy: object) -> str:
    """Returns a policy's settings as text, `name=value, ...`, those at their default left out."""
    changed = [
        f"{f.name}={getattr(policy, f.name)!r}" if f.repr else f"{f.name}=given"
        for f in fields(policy)  # type: ignore[arg-type]
        if getattr(policy, f.name) != f.default
    ]
    return ", ".join(changed)


def required_saves(graph: Graph, wanted: frozenset[int]) -> frozenset[int]:
    """Completes a saved set so that nothing runs again that must not.

    Walks back from what the backward pass reads; where it meets an operator that may not be repeated,
    the value read is kept. Values that the backward pass then never reaches are left out.

    Args:
        graph: a joint graph.
        wanted: forward values to keep if the backward pass reaches them.
    """
    saved: set[int] = set()
    seen: set[int] = set()
    todo = list(graph.backward_reads)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = graph.values[value].producer
        if value in graph.sources or producer is None:
            continue
        op = graph.ops[producer]
        if value in wanted or not op.recomputable:
            saved.add(value)
            continue
        todo += op.inputs
    return frozenset(saved)
