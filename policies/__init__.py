"""Rematerialization policies: from a joint graph to the set of values to keep. Never imports jax.

One file per algorithm. A new policy is one file, one line in `remat.policies.registry` and one row in
`tests/policy_table.py`.
"""

if __name__ != "remat.policies":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is `remat.policies` "
        "(the folder `policies/` at the top of the checkout is its source)"
    )

from remat.policies.auto import Auto
from remat.policies.base import BudgetPolicy, Decision, Policy
from remat.policies.checkmate import Checkmate
from remat.policies.echo import Echo
from remat.policies.full import Full
from remat.policies.gist import Gist
from remat.policies.ilp import Ilp
from remat.policies.min_cut import MinCut
from remat.policies.monet import Monet
from remat.policies.names import Names
from remat.policies.none import SaveAll, Unchanged
from remat.policies.registry import POLICIES, get_policy, register_policy
from remat.policies.revolve import Revolve
from remat.policies.sublinear import Sublinear

__all__ = [
    "POLICIES",
    "Auto",
    "BudgetPolicy",
    "Checkmate",
    "Decision",
    "Echo",
    "Full",
    "Gist",
    "Ilp",
    "MinCut",
    "Monet",
    "Names",
    "Policy",
    "Revolve",
    "SaveAll",
    "Sublinear",
    "Unchanged",
    "get_policy",
    "register_policy",
]
