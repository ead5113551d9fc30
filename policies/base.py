"""What a policy is: a frozen value that decides, for a joint graph, which forward values to keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self

from remat.core.errors import PolicyError, nearest
from remat.core.graph import Alternatives, Graph, Implementations, wanted_sites
from remat.plans.record import Certificate, Status

__all__ = [
    "BudgetPolicy",
    "Decision",
    "Implementations",
    "Policy",
    "as_policy",
    "carried_reads",
    "check_implementations",
    "check_names",
    "describe_options",
    "largest_named",
    "named_sites",
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


class Policy(ABC):
    """A rematerialization policy: inherit from it, in a frozen dataclass whose fields are its settings.

    Laws (held by `tests/test_policies.py` for every registered policy):

    * `decide` is pure and deterministic: equal graphs give equal decisions;
    * the decision does not depend on how values and operators are numbered;
    * the backward pass is computable from `saved`, the inputs and the cotangents without running any
      operator again whose `recomputable` is False;
    * policies are frozen, hashable and equal by content.

    What a policy is besides is declared here, with what holds for most; a field or a property may take its place.
    An object that does not inherit, but has a `name` and a method `decide`, is taken for one, too (`as_policy`).

    Attributes:
        name: how it is called in plans, messages and the registry.
        device: whose data sheet prices what it plans.
        implementations: which rewrites of the backward pass it plans with; see `sites`.
    """

    name: ClassVar[str]
    device: str = "h200"
    implementations: Implementations = "none"

    @abstractmethod
    def decide(self, graph: Graph) -> Decision:
        """Returns which forward values of `graph` to keep for its backward pass."""

    def sites(self, menu: Alternatives, budget_bytes: int | None) -> frozenset[str]:
        """Returns the sites at which the graph is rewritten before it is planned: those of `implementations`.

        Args:
            menu: what there is.
            budget_bytes: what plans have to fit in, None for no limit. Whatever depends on it is `shortlist`'s
                to offer.

        Raises:
            PolicyError: `implementations` names what does not exist.
        """
        del budget_bytes
        return named_sites(self.implementations, menu)

    def check_tags(self, found: Set[str]) -> None:
        """Looks at the `checkpoint_name`s of a whole function, its loops included.

        Raises:
            PolicyError: the policy cannot do with them.
        """
        del found

    def instead(self) -> tuple[Policy, ...]:
        """Returns policies whose plans may take the place of one that takes no less memory than no plan at all.

        A published algorithm has none: its plan is what was published.
        """
        return ()

    def settings(self) -> tuple[tuple[Field[Any], Any], ...]:
        """Returns the fields that it was configured with, each with its value; none if it is no dataclass."""
        return _settings(self)

    def with_settings(self, **changes: object) -> Self:
        """Returns the policy with other values of some settings."""
        return _changed(self, changes)


class BudgetPolicy(Policy):
    """A policy that can plan within a budget.

    One planning asks it several times. If it has a field `seconds`, that limits the time of the whole planning:
    every request goes to a copy with less (`remat.planning.time_limit`), and where
    `remat.core.deadline.out_of_time` says so, a policy returns the best it has, or raises BudgetError.

    Attributes:
        falls_back: whether it takes what quick policies make where it finds nothing that fits itself
            (`remat.planning.resort`): it looks for any plan that fits, and is no published algorithm.
    """

    falls_back: ClassVar[bool] = False

    @abstractmethod
    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns a decision whose sequence of buffers peaks at no more than `budget_bytes`.

        Raises:
            BudgetError: none was found; the message has the smallest peak found and what forces it.
        """

    def shortlist(self, menu: Alternatives, budget_bytes: int | None) -> tuple[frozenset[str], ...]:
        """Returns sets of sites, the most promising first: each is planned, and the cheapest plan kept.

        With loops the first alone is planned.
        """
        return (self.sites(menu, budget_bytes),)

    def steady_sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns sites that do not depend on the budget, for plans that do not depend on it either."""
        return self.sites(menu, None)


def as_policy(given: object) -> Policy | None:
    """Returns what a user gives as a policy as one, or None if it is none.

    This is the one place where a policy is known by what it looks like: an object with a `name` and a method
    `decide` does; with `decide_within` it plans within budgets. Its fields, `device` and `implementations` count
    like those of a policy; whoever wants more inherits.

    Raises:
        PolicyError: it is the class of a policy, not a policy.
    """
    if isinstance(given, type):
        if callable(getattr(given, "decide", None)):
            raise PolicyError(
                f"remat_policy={given.__name__} is a class; pass an instance, {given.__name__}()"
            )
        return None
    if isinstance(given, Policy):
        return given
    if not callable(getattr(given, "decide", None)) or not hasattr(given, "name"):
        return None
    return _PlainWithin(given) if hasattr(given, "decide_within") else _Plain(given)


@dataclass(frozen=True)
class _Plain(Policy):
    """An object that is a policy without inheriting."""

    given: Any

    @property
    def name(self) -> str:  # type: ignore[override]
        """Its name."""
        return self.given.name

    @property
    def device(self) -> str:  # type: ignore[override]
        """Its device, if it has one."""
        return str(getattr(self.given, "device", Policy.device))

    @property
    def implementations(self) -> Implementations:  # type: ignore[override]
        """Its rewrites, if it names any."""
        return getattr(self.given, "implementations", Policy.implementations)

    def decide(self, graph: Graph) -> Decision:
        """As the object decides."""
        return self.given.decide(graph)

    def settings(self) -> tuple[tuple[Field[Any], Any], ...]:
        """The fields of the object."""
        return _settings(self.given)

    def with_settings(self, **changes: object) -> Self:
        """The object with other values of some fields."""
        return replace(self, given=_changed(self.given, changes))


@dataclass(frozen=True)
class _PlainWithin(_Plain, BudgetPolicy):
    """An object that plans within a budget without inheriting."""

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """As the object decides."""
        return self.given.decide_within(graph, budget_bytes)


def _settings(policy: object) -> tuple[tuple[Field[Any], Any], ...]:
    if not is_dataclass(policy):
        return ()
    return tuple((field, getattr(policy, field.name)) for field in fields(policy) if field.init)


def _changed(policy: Any, changes: Mapping[str, object]) -> Any:
    return replace(policy, **changes) if changes else policy


def check_implementations(policy: str, given: object) -> None:
    """Raises PolicyError if `implementations` is not what it may be."""
    named = isinstance(given, tuple) and all(isinstance(name, str) for name in given)
    if not named and given not in ("none", "exact", "all"):
        raise PolicyError(
            f"{policy}(implementations={given!r}): expected 'none', 'exact' (the bit-exact ones), 'all', or a "
            "tuple of names of rules, kinds or operators, for instance ('pool_codes', 'softmax')"
        )


def named_sites(wanted: Implementations, menu: Alternatives) -> frozenset[str]:
    """Returns the sites of a menu that a setting `implementations` names.

    Raises:
        PolicyError: it names what does not exist.
    """
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


def describe_options(policy: Policy) -> str:
    """Returns a policy's settings as text, `name=value, ...`, those at their default left out."""
    changed = [
        f"{field.name}={value!r}" if field.repr else f"{field.name}=given"
        for field, value in policy.settings()
        if value != field.default
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
