"""What a policy is: a frozen value that decides, for a joint graph, which forward values to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, runtime_checkable

from remat.core.errors import PolicyError, nearest
from remat.core.graph import Alternatives, Graph, Implementations, wanted_sites
from remat.plans.record import Certificate, Status

__all__ = [
    "BudgetPolicy",
    "Decision",
    "Implementations",
    "Policy",
    "carried_reads",
    "check_implementations",
    "check_names",
    "choose_sites",
    "describe_options",
    "largest_named",
    "required_saves",
]


@dataclass(frozen=True)
class Decision:
    """The outcome of a policy.

    Attributes:
        saved: forward value ids to keep; inputs among them are kept by the caller anyway.
        status: `optimal` only with a certificate whose gap is zero.
        certificate: evidence for the status.
        notes: what the reader of the plan should know.
        order: the backward pass as operator ids, forward operators where they run again included (see
            `remat.plans.schedule.build_schedule`); None repeats them when the backward pass first needs them.
        buffer_peak_bytes: peak of the buffers as the policy counted them, None if it did not.
        forms: the form in which a value is kept where it is not the smallest lossless one, by value id; see
            `remat.core.forms`.
    """

    saved: frozenset[int]
    status: Status = "heuristic"
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    order: tuple[int, ...] | None = None
    buffer_peak_bytes: int | None = None
    forms: tuple[tuple[int, str], ...] = ()


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
    """A policy that can plan within a budget.

    One planning asks it several times. If it is a dataclass with a field `seconds`, that limits the time of the
    whole planning: every request goes to a copy with less (`remat.planning.time_limit`), and where
    `remat.core.deadline.out_of_time` says so, a policy returns the best it has, or raises BudgetError.
    """

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


def check_implementations(policy: str, given: object) -> None:
    """Raises PolicyError if `implementations` is not what it may be."""
    named = isinstance(given, tuple) and all(isinstance(name, str) for name in given)
    if not named and given not in ("none", "exact", "all"):
        raise PolicyError(
            f"{policy}(implementations={given!r}): expected 'none', 'exact' (the bit-exact ones), 'all', or a "
            "tuple of names of rules, kinds or operators, for instance ('pool_codes', 'softmax')"
        )


def choose_sites(policy: object, menu: Alternatives, budget_bytes: int | None) -> frozenset[str]:
    """Returns the sites at which a policy wants the graph rewritten before it plans it.

    A policy with a method `sites_for(menu, budget_bytes)` decides itself; one with a field `implementations` names
    them; others plan the graph as it is.

    Args:
        policy: any policy.
        menu: what there is.
        budget_bytes: what plans have to fit in, None for no limit.
    """
    decide = getattr(policy, "sites_for", None)
    if decide is not None:
        return decide(menu, budget_bytes)
    wanted: Implementations = getattr(policy, "implementations", "none")
    if wanted == "none":
        return frozenset()
    check_names(wanted, menu)
    operators = frozenset(site.name for site in menu.operators(wanted))
    return operators | wanted_sites(menu.with_operators(operators).sites, wanted)


def check_names(wanted: Implementations, menu: Alternatives) -> None:
    """Raises PolicyError if a setting names what does not exist."""
    names = () if isinstance(wanted, str) else wanted
    for name in names:
        if name.partition("@")[0] not in menu.names:
            raise PolicyError(
                f"implementations={wanted!r}: there is nothing called {name!r}{nearest(name, menu.names)}; "
                f"expected 'none', 'exact', 'all', or names of {sorted(menu.names)}"
            )


def describe_options(policy: object) -> str:
    """Returns a policy's settings as text, `name=value, ...`, those at their default left out."""
    changed = [
        f"{f.name}={getattr(policy, f.name)!r}" if f.repr else f"{f.name}=given"
        for f in fields(policy)  # type: ignore[arg-type]
        if getattr(policy, f.name) != f.default
    ]
    return ", ".join(changed)


def largest_named(buffers: Iterable[tuple[str, str, int]], count: int = 4) -> str:
    """Returns the largest of some arrays as text, as every error about memory names them.

    Args:
        buffers: label, operator that made it (empty if none did) and bytes of each.
        count: how many to name.
    """
    largest = sorted(buffers, key=lambda buffer: -buffer[2])[:count]
    return ", ".join(
        f"{label} of {op} ({nbytes:,} bytes)" if op else f"{label} ({nbytes:,} bytes)"
        for label, op, nbytes in largest
    )


def required_saves(graph: Graph, wanted: frozenset[int]) -> frozenset[int]:
    """Completes a saved set so that nothing runs again that must not.

    Walks back from what the backward pass reads; where it meets an operator that may not be repeated,
    the value read is kept. Values that the backward pass then never reaches are left out, and so are those that
    may not be chosen (`Value.savable`).

    Args:
        graph: a joint graph.
        wanted: forward values to keep if the backward pass reaches them.
    """
    wanted = frozenset(value for value in wanted if graph.values[value].savable)
    return frozenset(
        value
        for value in _walked_back(graph, wanted)
        if value not in graph.sources and _is_kept(graph, wanted, value)
    )


def carried_reads(graph: Graph, saved: frozenset[int]) -> frozenset[int]:
    """Returns the carried inputs of a loop's body that the backward pass reads, with only `saved` kept beside.

    They are kept once per iteration, like what the body computes.

    Args:
        graph: of the body.
        saved: forward values that are kept.
    """
    carried = graph.sources.intersection(graph.carried)
    return carried.intersection(_walked_back(graph, saved))


def _walked_back(graph: Graph, wanted: frozenset[int]) -> set[int]:
    """What is met on the way back from what the backward pass reads, up to what is kept and the sources."""
    seen: set[int] = set()
    todo = list(graph.backward_reads)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = graph.values[value].producer
        if producer is not None and not _is_kept(graph, wanted, value):
            todo += graph.ops[producer].inputs
    return seen


def _is_kept(graph: Graph, wanted: frozenset[int], value: int) -> bool:
    producer = graph.values[value].producer
    return producer is not None and (value in wanted or not graph.ops[producer].recomputable)
