"""What `remat_policy=` accepts, and what it means: off, one of jax's policies, or a planner of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax

from remat.budget import MARGIN, BudgetSession
from remat.devices import Device
from remat.errors import BudgetError, PlanError, PolicyError, nearest
from remat.forms import form_of, get_encoding
from remat.graph import Alternatives, Graph
from remat.plan import LoopPlan, Plan
from remat.plan_diff import first_difference
from remat.planner import NO_CHUNKS, SteadyPlanner, is_rest
from remat.planning import make_plan
from remat.policies import POLICIES, Full, Policy, get_policy
from remat.policies.base import BudgetPolicy, choose_sites
from remat.resort import CheckedSession

__all__ = [
    "JaxPolicy",
    "Off",
    "PlanPlanner",
    "PolicyPlanner",
    "Resolved",
    "budget_hint",
    "parse_budget",
    "priced_for",
    "resolve",
]

# What training configs already say; MaxText's `minimal` keeps the matmuls without batch dimensions.
_CONFIG_NAMES = {"minimal": "dots_with_no_batch_dims_saveable"}
_OFF_NAMES = frozenset({"none"})
_NEED_ARGUMENTS = frozenset(
    {
        "offload_dot_with_no_batch_dims",
        "save_and_offload_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_from_both_policies",
        "save_only_these_names",
    }
)


@dataclass(frozen=True)
class Off:
    """No rematerialization."""


@dataclass(frozen=True)
class JaxPolicy:
    """A policy of jax's own, handed to `jax.checkpoint` as it is."""

    policy: Callable[..., Any] | None


@dataclass(frozen=True)
class PolicyPlanner(SteadyPlanner):
    """Plans every graph with the same policy and holds it to a budget.

    Attributes:
        policy: any `remat.policies.Policy`.
        budget: bytes, or a fraction of the peak without rematerialization, or None.
        margin: share of the budget that plans leave for the prediction's error, if there is one that can.
        tags: `checkpoint_name`s of the function as written, wherever they are in it; None for the body of a loop,
            which need not hold what the policy names.
    """

    policy: Policy
    budget: int | float | None = None
    margin: float = MARGIN
    tags: frozenset[str] | None = None

    @property
    def takes_long(self) -> bool:
        """Whether there is a budget and the policy can plan within one: seconds to minutes."""
        return self.budget is not None and isinstance(self.policy, BudgetPolicy)

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget, whoever plans within it."""
        return self.budget is not None

    def begin(self) -> PolicyPlanner | BudgetSession | CheckedSession:
        """Returns a new session if there is a budget."""
        if self.budget is None:
            return self
        if isinstance(self.policy, BudgetPolicy):
            return BudgetSession(self.policy, self.budget, self.margin)
        return CheckedSession(replace(self, budget=None), self.policy, self.budget)

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns the sites that the policy wants; one that plans within a budget has a session instead."""
        return choose_sites(self.policy, menu, None)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Plans a graph."""
        return make_plan(graph, self.policy, barriers=barriers)

    def finish(self, plan: Plan) -> Plan:
        """Returns the finished plan.

        Raises:
            PolicyError: the policy names tags that are nowhere in the function.
        """
        check = getattr(self.policy, "check_tags", None)
        if check is not None and self.tags is not None:
            check(self.tags | _tags_in(plan))
        return plan

    def child(self, path: str) -> PolicyPlanner:
        """A loop body is planned with the same policy; the budget is that of the whole function."""
        del path
        return PolicyPlanner(self.policy)


def _tags_in(plan: Plan) -> frozenset[str]:
    """The tags of a plan's values, those of loop bodies and of derivative rules included."""
    own = frozenset(tag for value in plan.graph.values for tag in value.tags)
    return own.union(*(_tags_in(entry.plan) for entry in plan.loops))


def _check_codes(made: Plan, graph: Graph) -> None:
    """Raises PlanError if a plan keeps codes that are too narrow for what a graph's integers may be.

    The literals of a program are no part of a graph's structure, and ranges follow from them.
    """
    for step in made.schedule.steps:
        if step.action not in ("encode", "decode"):
            continue
        old, new = made.graph.values[step.target], graph.values[step.target]
        if get_encoding(form_of(old)).kind != "codes" or old.range == new.range:
            continue
        low, high = old.range or (0, 0)
        if new.range is None or new.range[0] < low or new.range[1] > high:
            now = "unknown" if new.range is None else f"{new.range[0]} to {new.range[1]}"
            raise PlanError(
                f"this plan was made for another function: it keeps {old.label} as {form_of(old)}, which was "
                f"{low} to {high} then and is {now} now. Plan again with remat.plan(...)."
            )


@dataclass(frozen=True)
class PlanPlanner(SteadyPlanner):
    """Applies a plan that was made before, held to its budget when it was made.

    Attributes:
        made: the plan.
        path: of the loop that it is the body of, empty for the function itself.

    Raises:
        PlanError: the function is not the one the plan was made for.
    """

    made: Plan
    path: str = ""

    def sites(self, menu: Alternatives) -> frozenset[str]:
        """Returns the sites at which the plan's graph was rewritten."""
        del menu
        return frozenset(self.made.graph.sites)

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Returns the given plan after checking that it belongs to `graph`."""
        if graph.fingerprint() != self.made.graph.fingerprint():
            raise PlanError(
                "this plan was made for another function: "
                + first_difference(self.made.graph, graph)
            )
        _check_codes(self.made, graph)
        return self.made

    def child(self, path: str) -> _LoopPlanner | _Unplanned:
        """Returns the planner of a loop body."""
        whole = f"{self.path}/{path}".removeprefix("/")
        for entry in self.made.loops:
            if entry.path == path:
                return _LoopPlanner(entry.plan, whole, entry.chunk)
        return _Unplanned(whole)

    def confirm(self, plan: Plan, loops: tuple[LoopPlan, ...]) -> None:
        """Raises PlanError if a loop is not the one the plan was made for."""
        if plan is not self.made:
            return  # of a loop body that jax traced on the way: thrown away
        for entry in loops:
            made = self.made.loop(entry.path)
            if entry.plan.graph.fingerprint() != made.graph.fingerprint():
                path = f"{self.path}/{entry.path}".removeprefix("/")
                raise PlanError(
                    "this plan was made for another function: "
                    + first_difference(made.graph, entry.plan.graph, loop=path)
                )


@dataclass(frozen=True)
class _LoopPlanner(PlanPlanner):
    """Applies the plan of a loop body.

    While jax finds out which carried values are differentiated it traces bodies that the plan is not for. They
    get a plan that is thrown away; `PlanPlanner.confirm` looks at the last one.
    """

    chunk: int = NO_CHUNKS

    def chunk_trips(self, length: int) -> int:
        """Chunks as the plan has them."""
        del length
        return self.chunk

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Returns the given plan if it belongs to `graph`, else a passing one."""
        if graph.fingerprint() == self.made.graph.fingerprint():
            _check_codes(self.made, graph)
            return self.made
        return make_plan(graph, Full(), barriers=barriers)


@dataclass(frozen=True)
class _Unplanned(SteadyPlanner):
    """A loop that a plan has no part for: right as long as the loop is not differentiated."""

    path: str

    def plan(self, graph: Graph, *, barriers: bool) -> Plan:
        """Raises PlanError: the loop is differentiated after all."""
        del graph, barriers
        if is_rest(self.path):
            raise PlanError(
                f"this plan was made for another function: its loops had other lengths, so that {self.path!r}, "
                "the iterations that do not fill a chunk, has no plan. Plan again with remat.plan(...)."
            )
        raise PlanError(
            f"this plan was made for another function: loop {self.path!r} was not differentiated then and "
            "is now. Differentiate the same arguments, or plan again with remat.plan(...)."
        )

    def child(self, path: str) -> _Unplanned:
        """A loop inside has no plan either."""
        return _Unplanned(f"{self.path}/{path}")


Resolved = Off | JaxPolicy | PolicyPlanner | PlanPlanner


def resolve(remat_policy: Any, budget: Any = None) -> Resolved:
    """Reads a `remat_policy=` argument.

    Args:
        remat_policy: a name (ours, or one of `jax.checkpoint_policies`), a policy object, a `Plan` or the path
            of a saved one, a jax policy callable, or None / "none" / "full" / "minimal".
        budget: bytes, `"6GiB"`, or a fraction of the no-remat peak.

    Raises:
        PolicyError: an unknown name (the message lists the valid ones), or something that is no policy.
        BudgetError: a budget that cannot be read, or one given to something that cannot hold it.
    """
    limit = parse_budget(budget)
    found = _resolve(remat_policy, limit)
    if limit is not None and not isinstance(found, PolicyPlanner):
        raise BudgetError(
            f"budget={budget!r} cannot be held by remat_policy={remat_policy!r}: "
            + (
                "a saved plan has the budget that it was made for. Plan again with remat.plan(..., budget=...), or "
                "leave the budget out"
                if isinstance(found, PlanPlanner)
                else f"a budget needs one of remat's own policies, {sorted(POLICIES)}"
            )
        )
    return found


def priced_for(remat_policy: Any, device: Device | None) -> Any:
    """Returns a policy that takes its prices from the device that a program is compiled for.

    Args:
        remat_policy: as in `resolve`. What is no policy of ours, or names another device than the default, is
            returned as it is.
        device: None, or one without a data sheet, changes nothing.
    """
    found = resolve(remat_policy)
    if device is None or device.is_nominal or not isinstance(found, PolicyPlanner):
        return remat_policy
    return _with_device(found.policy, device.name)


def _with_device(policy: Any, device: str) -> Any:
    """The policy with its own field `device`, and those of the policies it is made of, if they are the default."""
    if not is_dataclass(policy) or isinstance(policy, type):
        return policy
    changed: dict[str, Any] = {}
    for field in fields(policy):
        value = getattr(policy, field.name)
        if field.name == "device" and value == field.default:
            changed[field.name] = device
        elif isinstance(value, Policy) and not isinstance(value, type):
            changed[field.name] = _with_device(value, device)
    return replace(policy, **changed) if changed else policy


def _resolve(remat_policy: Any, limit: int | float | None) -> Resolved:
    if remat_policy is None:
        return Off()
    if isinstance(remat_policy, Plan):
        return PlanPlanner(remat_policy)
    if isinstance(remat_policy, Path):
        return PlanPlanner(Plan.from_json(remat_policy))
    if isinstance(remat_policy, str):
        return _resolve_name(remat_policy, limit)
    if isinstance(remat_policy, type) and hasattr(remat_policy, "decide"):
        raise PolicyError(
            f"remat_policy={remat_policy.__name__} is a class; pass an instance, "
            f"{remat_policy.__name__}()"
        )
    if isinstance(remat_policy, Policy):
        return PolicyPlanner(remat_policy, limit)
    if callable(remat_policy):
        return JaxPolicy(remat_policy)
    raise PolicyError(
        f"remat_policy={remat_policy!r} of type {type(remat_policy).__name__}; expected a name, a "
        "remat.policies object, a remat.Plan or the path of one, a jax checkpoint policy, or None"
    )


def _jax_names() -> dict[str, Callable[..., Any]]:
    names = (name for name in dir(jax.checkpoint_policies) if not name.startswith("_"))
    return {name: getattr(jax.checkpoint_policies, name) for name in names}


def _resolve_name(name: str, limit: int | float | None) -> Resolved:
    if name in _OFF_NAMES:
        return Off()
    if name in POLICIES:
        return PolicyPlanner(get_policy(name), limit)
    theirs = _jax_names()
    if name in _NEED_ARGUMENTS and name in theirs:
        raise PolicyError(
            f"remat_policy={name!r} names a function that makes policies; call it: "
            f"remat_policy=jax.checkpoint_policies.{name}(...)"
        )
    if name in theirs:
        return JaxPolicy(theirs[name])
    if name in _CONFIG_NAMES:
        return JaxPolicy(theirs[_CONFIG_NAMES[name]])
    if name.endswith(".json") or Path(name).is_file():
        return PlanPlanner(Plan.from_json(name))
    valid = [*sorted(POLICIES), *sorted(_OFF_NAMES), *sorted(_CONFIG_NAMES), *sorted(theirs)]
    raise PolicyError(
        f"unknown remat_policy={name!r}{nearest(name, valid) or '.'} Valid names: {valid}; or "
        "pass a remat.policies object, a remat.Plan, the path of a saved plan (*.json), or a jax checkpoint policy"
    )


_UNITS = {"": 1, "B": 1}
for _i, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_i
    _UNITS[f"{_letter}IB"] = 1024**_i


def parse_budget(budget: Any, name: str = "budget") -> int | float | None:
    """Reads a budget: an integer is bytes, a float in (0, 1] a fraction, a string either, or bytes with a unit.

    Args:
        budget: numbers of Python or NumPy, or a string; None is None.
        name: of the argument, for errors.

    Raises:
        BudgetError: none of these.
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        return _parse_size(budget, name)
    if isinstance(budget, Integral) and not isinstance(budget, bool):
        if budget <= 0:
            raise BudgetError(f"{name}={budget!r} is not positive; {_EXPECTED}")
        return int(budget)
    if isinstance(budget, Real) and not isinstance(budget, bool):
        return _fraction(float(budget), f"{name}={budget!r}")
    raise BudgetError(f"{name}={budget!r} of type {type(budget).__name__}; {_EXPECTED}")


_EXPECTED = 'expected bytes (6442450944), a size ("6GiB", "500MB") or a fraction (0.5)'


def _fraction(number: float, given: str) -> float:
    if not 0 < number <= 1:
        raise BudgetError(f"{given} is not a fraction between 0 and 1; {_EXPECTED}")
    return number


def _parse_size(text: str, name: str) -> int | float:
    stripped = text.strip().upper().replace(" ", "")
    number = stripped.rstrip("KMGTPIB")
    unit = stripped[len(number) :]
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise BudgetError(
            f"{name}={text!r} is not a size; {_EXPECTED}, with a unit out of B, kB, KiB, ..., PiB"
        ) from None
    if not unit and not number.isdecimal():  # "0.5" is what 0.5 is
        return _fraction(size, f"{name}={text!r}")
    if not 0 < size < float("inf"):
        raise BudgetError(f"{name}={text!r} is not positive; {_EXPECTED}")
    return int(size)


_FEW_BYTES = 1024


def budget_hint(budget: int | float | None) -> str:
    """Returns what is to be said of a budget of so few bytes that a share or a unit was meant, or nothing."""
    if not isinstance(budget, int) or budget >= _FEW_BYTES:
        return ""
    share = f"a share is a float (budget={budget / 100:g}), and " if 1 < budget <= 100 else ""
    return (
        f" budget={budget} means {budget} bytes: {share}a size has a unit (budget='{budget}GiB')."
    )
