"""Names of policies. A policy is a name, a configured object, or a plan; this is the table of names."""

from __future__ import annotations

from collections.abc import Callable

from remat.core.errors import PolicyError, nearest
from remat.policies.auto import Auto
from remat.policies.base import Policy
from remat.policies.checkmate import Checkmate
from remat.policies.echo import Echo
from remat.policies.full import Full
from remat.policies.gist import Gist
from remat.policies.ilp import Ilp
from remat.policies.min_cut import MinCut
from remat.policies.monet import Monet
from remat.policies.names import Names
from remat.policies.none import SaveAll
from remat.policies.revolve import Revolve
from remat.policies.sublinear import Sublinear

__all__ = ["POLICIES", "get_policy", "register_policy"]

POLICIES: dict[str, Callable[[], Policy]] = {
    "save_all": SaveAll,
    "full": Full,
    "names": Names,
    "min_cut": MinCut,
    "sublinear": Sublinear,
    "revolve": Revolve,
    "echo": Echo,
    "checkmate": Checkmate,
    "ilp": Ilp,
    "monet": Monet,
    "gist": Gist,
    "auto": Auto,
}


def register_policy(name: str, factory: Callable[[], Policy]) -> None:
    """Adds a policy under a new name, so that `remat_policy=name` finds it.

    Raises:
        PolicyError: the name is taken.
    """
    if name in POLICIES:
        raise PolicyError(f"a policy named {name!r} exists already; choose another name")
    POLICIES[name] = factory


def get_policy(name: str) -> Policy:
    """Returns the policy registered under `name`, in its default configuration.

    Raises:
        PolicyError: no such policy; the message lists the valid names.
    """
    if name not in POLICIES:
        raise PolicyError(
            f"unknown policy {name!r}; valid names are {sorted(POLICIES)}{nearest(name, POLICIES)}"
        )
    return POLICIES[name]()
