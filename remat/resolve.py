"""What `remat_policy=` accepts, and what it means: off, one of jax's policies, or a planner of ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax

from remat.core.devices import DEVICES, Device, get_device
from remat.core.errors import BudgetError, CompileError, PolicyError, nearest, shown
from remat.planning.planners import Confirm, PlanPlanner, PolicyPlanner
from remat.plans.plan import Plan
from remat.policies import POLICIES, Policy, get_policy
from remat.policies.base import as_policy

__all__ = [
    "JaxPolicy",
    "Off",
    "PlanPlanner",
    "PolicyPlanner",
    "Resolved",
    "budget_hint",
    "parse_budget",
    "parse_confirm",
    "priced_for",
    "resolve",
]

_VARIABLE = "REMAT_CONFIRM"
_YES_WORDS = frozenset({"on", "true", "yes"})  # and 1
_NO_WORDS = frozenset({"off", "false", "no", "none"})  # and 0
_UNNAMED = ("auto", "attached")  # what a Confirm takes besides names of devices
_MOST_DIGITS = 10  # of a number of compiles
# What training configs already say; MaxText's `minimal` keeps the matmuls without batch dimensions.
_CONFIG_NAMES = {"minimal": "dots_with_no_batch_dims_saveable"}
_OFF_NAMES = frozenset({"none"})
_ELSEWHERE = {
    "a bound on memory is another argument: budget='6GiB', or budget=0.5": (
        "budget",
        "memory_budget",
        "activation_memory_budget",
        "max_memory",
        "memory_limit",
        "memory",
    ),
    "to recompute everything is 'full', to save everything is 'save_all'": ("all", "everything"),
    "keeping nothing, so that everything is recomputed, is 'full'": (
        "checkpoint",
        "full_remat",
        "recompute",
        "recompute_all",
        "recompute_everything",
        "remat",
        "save_nothing",
    ),
    "keeping what is dear and recomputing what is cheap is 'min_cut', the default": (
        "default",
        "partition",
        "recomputable",
        "selective",
        "smart",
        "true",
    ),
    "no rematerialization is None or 'none', and 'save_all' plans it": (
        "false",
        "off",
        "save_everything",
    ),
    "the cheapest plan within a bound is 'ilp', with budget=": ("best", "exact", "milp", "optimal"),
    "offload to the host is not planned; jax's own policies are passed through": (
        "offload",
        "offloading",
        "offload_all",
    ),
    "MaxText's names: see docs/migration/maxtext.md; the nearest here are 'low_memory', or "
    "remat.policies.Names((...))": (
        "custom",
        "minimal_flash",
        "minimal_offloaded",
        "minimal_with_context",
        "minimal_with_context_and_quantization",
        "minimal_with_quantization",
        "qkv_proj_offloaded",
        "save_dot_except_mlp",
        "save_dot_except_mlpwi",
        "save_dot_with_context_except_mlp",
        "save_out_proj",
        "save_qkv_proj",
    ),
}
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


Resolved = Off | JaxPolicy | PolicyPlanner | PlanPlanner


def resolve(remat_policy: Any, budget: Any = None, confirm: Any = None) -> Resolved:
    """Reads a `remat_policy=` argument.

    Args:
        remat_policy: a name (ours, or one of `jax.checkpoint_policies`), a policy object, a `Plan` or the path
            of a saved one, a jax policy callable, or None / "none" / "full" / "minimal".
        budget: bytes, `"6GiB"`, or a fraction of the no-remat peak.
        confirm: how the compiler is asked whether the budget is met, or without one what the plan takes, which
            it is only asked where that is given; see `parse_confirm`.

    Raises:
        PolicyError: an unknown name (the message lists the valid ones), or something that is no policy.
        BudgetError: a budget that cannot be read, or one given to something that cannot hold it.
        CompileError: `confirm` cannot be read.
    """
    limit = parse_budget(budget)
    wanted = parse_confirm(confirm)
    found = _resolve(remat_policy, limit)
    if limit is not None and not isinstance(found, PolicyPlanner):
        raise BudgetError(
            f"budget={shown(budget)} cannot be held by remat_policy={shown(remat_policy)}: "
            + (
                "a saved plan has the budget that it was made for. Plan again with remat.plan(..., budget=...), or "
                "leave the budget out"
                if isinstance(found, PlanPlanner)
                else f"a budget needs one of remat's own policies, {sorted(POLICIES)}"
            )
        )
    if isinstance(found, PolicyPlanner) and (limit is not None or confirm is not None):
        return replace(found, confirm=wanted)
    return found


def parse_confirm(confirm: Any) -> Confirm | None:
    """Reads a `confirm=` argument; None is no confirmation.

    Args:
        confirm: None for what the environment variable `REMAT_CONFIRM` says, `"auto"` if it is not set; True for
            `Confirm()` and False for none; a number of compiles; `"auto"`, `"attached"`, or the name of a device; a
            `Confirm`; or any of these in words, as in an environment (`"on"`, `"off"`, `"8"`).

    Raises:
        CompileError: none of these, or no such device.
        BudgetError: fewer than two compiles.
    """
    if confirm is None:
        text = os.environ.get(_VARIABLE, "").strip()
        return _confirm_in_words(text or "auto", f"{_VARIABLE}={shown(text)} in the environment")
    if isinstance(confirm, str):
        return _confirm_in_words(confirm, f"confirm={shown(confirm)}")
    if isinstance(confirm, bool):
        return Confirm() if confirm else None
    if isinstance(confirm, Integral):
        return Confirm(compiles=int(confirm)) if confirm else None
    if isinstance(confirm, Confirm):
        if confirm.device not in _UNNAMED:
            get_device(confirm.device, "'auto', 'attached'")
        return confirm
    raise CompileError(
        f"confirm={shown(confirm)} of type {type(confirm).__name__}; expected True, False, a number of compiles, "
        "'auto', 'attached', the name of a device ('h200', 'cpu'), or remat.Confirm(compiles=, device=)"
    )


def _confirm_in_words(text: str, given: str) -> Confirm | None:
    """Reads what was given as a string, in any case; `given` is what errors say of it.

    Raises:
        CompileError: it is none of the words, no number and no device.
    """
    word = text.strip().lower()
    number = int(word) if word.isdecimal() and len(word) < _MOST_DIGITS else None
    if word in _NO_WORDS or number == 0:
        return None
    if word in _YES_WORDS or number == 1:
        return Confirm()
    if number is not None:
        return Confirm(compiles=number)
    if word not in (*_UNNAMED, *DEVICES):
        raise CompileError(
            f"{given} is not known; expected 'on', 'off', 'auto', 'attached', a number of compiles, or a device to "
            f"compile for, one of {', '.join(DEVICES)}{nearest(word, (*_UNNAMED, *DEVICES))}"
        )
    return Confirm(device=word)


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


def _with_device(policy: Policy, device: str) -> Policy:
    """The policy with its own field `device`, and those of the policies it is made of, if they are the default."""
    changed: dict[str, object] = {}
    for field, value in policy.settings():
        if field.name == "device" and value == field.default:
            changed[field.name] = device
        elif isinstance(value, Policy):
            changed[field.name] = _with_device(value, device)
    return policy.with_settings(**changed)


def _resolve(remat_policy: Any, limit: int | float | None) -> Resolved:
    if remat_policy is None:
        return Off()
    if isinstance(remat_policy, Plan):
        return PlanPlanner(remat_policy)
    if isinstance(remat_policy, Path):
        return PlanPlanner(Plan.from_json(remat_policy))
    if isinstance(remat_policy, str):
        return _resolve_name(remat_policy, limit)
    policy = as_policy(remat_policy)
    if policy is not None:
        return PolicyPlanner(policy, limit)
    if callable(remat_policy):
        for name in _NEED_ARGUMENTS:
            if getattr(jax.checkpoint_policies, name, None) is remat_policy:
                raise _not_called(name)
        return JaxPolicy(remat_policy)
    raise PolicyError(
        f"remat_policy={shown(remat_policy)} of type {type(remat_policy).__name__}; expected a name, a "
        "remat.policies object, a remat.Plan or the path of one, a jax checkpoint policy, or None"
    )


def _not_called(name: str) -> PolicyError:
    return PolicyError(
        f"remat_policy={name!r} names a function that makes policies; call it: "
        f"remat_policy=jax.checkpoint_policies.{name}(...)"
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
        raise _not_called(name)
    if name in theirs:
        return JaxPolicy(theirs[name])
    if name in _CONFIG_NAMES:
        return JaxPolicy(theirs[_CONFIG_NAMES[name]])
    if name.lstrip().startswith("{"):
        raise PolicyError(
            f"remat_policy={shown(name)} looks like the text of a plan; pass the plan itself "
            "(remat.Plan.from_json(text)), or the path of a file with it"
        )
    if name.endswith(".json") or _is_file(name):
        return PlanPlanner(Plan.from_json(name))
    ours = [*sorted(POLICIES), *sorted(_OFF_NAMES), *sorted(_CONFIG_NAMES)]
    word = name.strip().lower().replace("-", "_").replace(" ", "_")
    if word in (*ours, *theirs):
        meant = f"; did you mean {word!r}?"
    else:
        meant = _meant(word) or nearest(name, [*ours, *theirs]) or nearest(word, [*ours, *theirs])
    raise PolicyError(
        f"unknown remat_policy={shown(name)}{meant or '.'} Valid names: {ours}, of jax's own {sorted(theirs)}; or "
        "pass a remat.policies object, a remat.Plan, the path of a saved plan (*.json), or a jax checkpoint policy"
    )


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long for a name
        return False


def _meant(word: str) -> str:
    """What a word of other libraries, or of other arguments, is called here; nothing if it is none that we know."""
    for meaning, words in _ELSEWHERE.items():
        if word in words:
            return f"; {meaning}."
    return ""


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
            raise BudgetError(f"{name}={budget!r} is not positive; {_expected(name)}")
        return int(budget)
    if isinstance(budget, Real) and not isinstance(budget, bool):
        return _fraction(float(budget), name, budget)
    raise BudgetError(f"{name}={shown(budget)} of type {type(budget).__name__}; {_expected(name)}")


def _share(percent: float) -> str:
    """A share as one types it: 1.0 is all, 1 is a byte."""
    text = f"{percent / 100:g}"
    return f"{text}.0" if text.isdecimal() else text


def _meant_size(text: str, number: str, unit: str, name: str) -> str:
    """What a size that cannot be read was probably meant to be."""
    if text.endswith("%") and text[:-1].replace(".", "", 1).isdecimal():
        percent = float(text[:-1])
        return (
            f"; did you mean {_share(percent)}?" if name == "budget" and 0 < percent <= 100 else ""
        )
    if number.replace(".", "", 1).isdecimal() and unit[:1] in {*"KMGTP"} and len(unit) <= 2:
        return f"; did you mean '{number}{unit[0]}iB'?"
    if text.replace(",", "").replace("_", "").isdecimal():
        return f"; did you mean {text.replace(',', '').replace('_', '')}?"
    return ""


def _expected(name: str) -> str:
    """What is accepted: shares are of a peak, which only a budget is."""
    if name != "budget":
        return 'expected bytes (6442450944) or a size ("6GiB", "500MB")'
    return 'expected bytes (6442450944), a size ("6GiB", "500MB") or a fraction (0.5)'


def _fraction(number: float, name: str, given: Any) -> float:
    if 0 < number <= 1:
        return number
    # 6e9 is a float; so few bytes that a share may be meant are not suggested.
    is_bytes = _FEW_BYTES <= number < _MOST_BYTES and number.is_integer()
    meant = f"; did you mean {int(number)}?" if is_bytes else ""
    what = "a fraction between 0 and 1" if name == "budget" else "a whole number of bytes"
    raise BudgetError(f"{name}={given!r} is not {what}; {_expected(name)}{meant}")


def _parse_size(text: str, name: str) -> int | float:
    stripped = text.strip().upper().replace(" ", "")
    number = stripped.rstrip("KMGTPIB")
    unit = stripped[len(number) :]
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        meant = _meant_size(stripped, number, unit, name)
        raise BudgetError(
            f"{name}={shown(text)} is not a size; {_expected(name)}, with a unit out of B, kB, KiB, ..., PiB{meant}"
        ) from None
    if not unit and not number.isdecimal():  # "0.5" is what 0.5 is
        return _fraction(size, name, text)
    if not 0 < size < float("inf"):
        raise BudgetError(f"{name}={text!r} is not positive; {_expected(name)}")
    if not int(size):
        raise BudgetError(f"{name}={text!r} is less than a byte; {_expected(name)}")
    return int(size)


_FEW_BYTES = 1024
_MOST_BYTES = 1 << 60  # of any memory


def budget_hint(budget: int | float | None, name: str = "budget") -> str:
    """Returns what is to be said of a budget of so few bytes that a share or a unit was meant, or nothing."""
    if not isinstance(budget, int) or budget >= _FEW_BYTES:
        return ""
    may_be_share = 1 < budget <= 100 and name == "budget"
    share = f"a share is a float ({name}={_share(budget)}), and " if may_be_share else ""
    return (
        f" {name}={budget} means {budget} bytes: {share}a size has a unit ({name}='{budget}GiB')."
    )
