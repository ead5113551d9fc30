"""remat: rematerialization policies for JAX. See README.md."""

from remat import policies as policies
from remat.api import checkpoint as checkpoint
from remat.api import plan as plan
from remat.batch import MaxBatch as MaxBatch
from remat.batch import max_batch as max_batch
from remat.compile import CompileReport as CompileReport
from remat.compile import compile_report as compile_report
from remat.errors import BudgetError as BudgetError
from remat.errors import CompileError as CompileError
from remat.errors import DifferentiationError as DifferentiationError
from remat.errors import ImplementationError as ImplementationError
from remat.errors import PlanError as PlanError
from remat.errors import PolicyError as PolicyError
from remat.errors import RematError as RematError
from remat.errors import RematWarning as RematWarning
from remat.errors import ScheduleError as ScheduleError
from remat.errors import TraceError as TraceError
from remat.fit import Fitted as Fitted
from remat.fit import fit as fit
from remat.lossy import GradientError as GradientError
from remat.lossy import encoding_error as encoding_error
from remat.operators import Implementation as Implementation
from remat.operators import check_implementation as check_implementation
from remat.operators import register_implementation as register_implementation
from remat.operators import unregister_implementation as unregister_implementation
from remat.pareto import Pareto as Pareto
from remat.pareto import iter_pareto as iter_pareto
from remat.pareto import pareto as pareto
from remat.plan import Plan as Plan

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports `remat.linen`, `remat.nnx` and `remat.equinox` when first used: they need Flax or equinox."""
    if name in ("linen", "nnx", "equinox"):
        import importlib

        return importlib.import_module(f"remat.{name}")
    raise AttributeError(f"module 'remat' has no attribute {name!r}")
