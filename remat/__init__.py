"""remat: rematerialization policies for JAX. See README.md.

Names are imported when they are first used: the graph, plans, the memory model and policies need no jax.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat import dtr as dtr
    from remat import equinox as equinox
    from remat import linen as linen
    from remat import nnx as nnx
    from remat import policies as policies
    from remat.api import checkpoint as checkpoint
    from remat.api import plan as plan
    from remat.compiler.compile import CompileReport as CompileReport
    from remat.compiler.compile import compile_report as compile_report
    from remat.core.errors import BudgetError as BudgetError
    from remat.core.errors import CompileError as CompileError
    from remat.core.errors import DifferentiationError as DifferentiationError
    from remat.core.errors import ImplementationError as ImplementationError
    from remat.core.errors import PlanError as PlanError
    from remat.core.errors import PolicyError as PolicyError
    from remat.core.errors import RematError as RematError
    from remat.core.errors import RematWarning as RematWarning
    from remat.core.errors import ScheduleError as ScheduleError
    from remat.core.errors import TraceError as TraceError
    from remat.fitting.batch import MaxBatch as MaxBatch
    from remat.fitting.batch import max_batch as max_batch
    from remat.fitting.fit import Fitted as Fitted
    from remat.fitting.fit import fit as fit
    from remat.planning.planners import Confirm as Confirm
    from remat.plans.plan import Plan as Plan
    from remat.rewrite.operators import Implementation as Implementation
    from remat.rewrite.operators import check_implementation as check_implementation
    from remat.rewrite.operators import register_implementation as register_implementation
    from remat.rewrite.operators import unregister_implementation as unregister_implementation
    from remat.tools.lossy import GradientError as GradientError
    from remat.tools.lossy import encoding_error as encoding_error
    from remat.tools.pareto import Pareto as Pareto
    from remat.tools.pareto import iter_pareto as iter_pareto
    from remat.tools.pareto import pareto as pareto

__version__ = "0.1.0"

_HOMES = {
    "api": ("checkpoint", "plan"),
    "compiler.compile": ("CompileReport", "compile_report"),
    "core.errors": (
        "BudgetError",
        "CompileError",
        "DifferentiationError",
        "ImplementationError",
        "PlanError",
        "PolicyError",
        "RematError",
        "RematWarning",
        "ScheduleError",
        "TraceError",
    ),
    "fitting.batch": ("MaxBatch", "max_batch"),
    "fitting.fit": ("Fitted", "fit"),
    "planning.planners": ("Confirm",),
    "plans.plan": ("Plan",),
    "rewrite.operators": (
        "Implementation",
        "check_implementation",
        "register_implementation",
        "unregister_implementation",
    ),
    "tools.lossy": ("GradientError", "encoding_error"),
    "tools.pareto": ("Pareto", "iter_pareto", "pareto"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = (
    "compile",
    "cost",
    "dtr",
    "encode",
    "equinox",
    "forms",
    "linen",
    "memory",
    "nnx",
    "plan_diff",
    "policies",
)


def __getattr__(name: str) -> object:
    """Imports a public name, or a public module, when it is first used."""
    if name in _HOME_OF:
        found = getattr(importlib.import_module(f"remat.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found
    if name in _MODULES:
        return importlib.import_module(f"remat.{name}")
    # With these Python names what was probably meant.
    text = f"module 'remat' has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    """Lists what has been imported and what can be."""
    return sorted({*globals(), *_HOME_OF, *_MODULES})
