"""Names of policies. A policy is a name, a configured object, or a plan; this is the table of names.

What is named here is all that there is to register: `remat.policies` and the command line read this table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from remat.core.errors import PolicyError, nearest
from remat.policies.base import Policy, as_policy

__all__ = ["POLICIES", "BuiltIn", "get_policy", "register_policy"]


@dataclass(frozen=True)
class BuiltIn:
    """Makes a policy of this library in its default configuration; its module is imported when it is needed.

    Attributes:
        module: of `remat.policies`.
        class_name: of the policy in it.
    """

    module: str
    class_name: str

    def load(self) -> type[Policy]:
        """Returns the class."""
        return getattr(importlib.import_module(f"remat.policies.{self.module}"), self.class_name)

    def __call__(self) -> Policy:
        """Returns a policy."""
        return self.load()()


POLICIES: dict[str, Callable[[], Policy]] = {
    "save_all": BuiltIn("none", "SaveAll"),
    "full": BuiltIn("full", "Full"),
    "names": BuiltIn("names", "Names"),
    "min_cut": BuiltIn("min_cut", "MinCut"),
    "low_memory": BuiltIn("min_cut", "LowMemory"),
    "sublinear": BuiltIn("sublinear", "Sublinear"),
    "revolve": BuiltIn("revolve", "Revolve"),
    "echo": BuiltIn("echo", "Echo"),
    "dtr": BuiltIn("dtr", "Dtr"),
    "checkmate": BuiltIn("checkmate", "Checkmate"),
    "ilp": BuiltIn("ilp", "Ilp"),
    "monet": BuiltIn("monet", "Monet"),
    "gist": BuiltIn("gist", "Gist"),
    "auto": BuiltIn("auto", "Auto"),
}


def register_policy(name: str, factory: Callable[[], object]) -> None:
    """Adds a policy under a new name, so that `remat_policy=name` finds it.

    Args:
        name: not taken yet.
        factory: makes the policy in its default configuration; see `remat.policies.base.as_policy` for what is one.

    Raises:
        PolicyError: the name is taken.
    """
    if name in POLICIES:
        raise PolicyError(f"a policy named {name!r} exists already; choose another name")
    POLICIES[name] = factory  # type: ignore[assignment]


def get_policy(name: str) -> Policy:
    """Returns the policy registered under `name`, in its default configuration.

    Raises:
        PolicyError: no such policy; the message lists the valid names. Or what was registered makes no policy.
    """
    if name not in POLICIES:
        raise PolicyError(
            f"unknown policy {name!r}; valid names are {sorted(POLICIES)}{nearest(name, POLICIES)}"
        )
    made = POLICIES[name]()
    policy = as_policy(made)
    if policy is None:
        raise PolicyError(
            f"what is registered as {name!r} made {made!r}, which is no policy: it needs a name and a method decide"
        )
    return policy
