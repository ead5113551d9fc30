"""Rematerialization policies: from a joint graph to the set of values to keep. Never imports jax.

One file per algorithm. A new policy is one file, one line in `remat.policies.registry` and one row in
`tests/policy_table.py`. Classes are imported when they are first used; those below are for type checkers, and
`tests/test_policies.py` holds that they are those of the registry.
"""

from typing import TYPE_CHECKING

if __name__ != "remat.policies":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is `remat.policies` "
        "(the folder `policies/` at the top of the checkout is its source)"
    )

from remat.policies.base import BudgetPolicy as BudgetPolicy
from remat.policies.base import Decision as Decision
from remat.policies.base import Policy as Policy
from remat.policies.registry import POLICIES as POLICIES
from remat.policies.registry import BuiltIn
from remat.policies.registry import get_policy as get_policy
from remat.policies.registry import register_policy as register_policy

if TYPE_CHECKING:
    from remat.policies.auto import Auto as Auto
    from remat.policies.checkmate import Checkmate as Checkmate
    from remat.policies.dtr import Dtr as Dtr
    from remat.policies.echo import Echo as Echo
    from remat.policies.full import Full as Full
    from remat.policies.gist import Gist as Gist
    from remat.policies.ilp import Ilp as Ilp
    from remat.policies.min_cut import LowMemory as LowMemory
    from remat.policies.min_cut import MinCut as MinCut
    from remat.policies.monet import Monet as Monet
    from remat.policies.names import Names as Names
    from remat.policies.none import SaveAll as SaveAll
    from remat.policies.none import Unchanged as Unchanged
    from remat.policies.revolve import Revolve as Revolve
    from remat.policies.sublinear import Sublinear as Sublinear

_BUILT_IN = (*POLICIES.values(), BuiltIn("none", "Unchanged"))
_CLASSES = {built.class_name: built for built in _BUILT_IN if isinstance(built, BuiltIn)}


def __getattr__(name: str) -> object:
    """Imports the class of a policy when it is first used."""
    if name not in _CLASSES:
        raise AttributeError(f"module 'remat.policies' has no attribute {name!r}")
    found = globals()[name] = _CLASSES[name].load()
    return found


def __dir__() -> list[str]:
    """Lists what has been imported and what can be."""
    return sorted({*globals(), *_CLASSES})
