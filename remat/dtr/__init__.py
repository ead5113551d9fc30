"""Dynamic tensor rematerialization: evict when memory is short, make again when it is needed.

Kirisame et al., "Dynamic tensor rematerialization" (2020). The simulator is plain data, no jax; the runtime
(`value_and_grad`, `grad`, `vjp`) is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

from remat.dtr.counts import Statistics as Statistics
from remat.dtr.counts import statistics as statistics
from remat.dtr.export import export_log as export_log
from remat.dtr.export import write_log as write_log
from remat.dtr.heuristics import HEURISTICS as HEURISTICS
from remat.dtr.heuristics import Scoring as Scoring
from remat.dtr.log import Log as Log
from remat.dtr.log import LogError as LogError
from remat.dtr.log import load_log as load_log
from remat.dtr.log import read_log as read_log
from remat.dtr.simulator import Run as Run
from remat.dtr.simulator import simulate as simulate

if TYPE_CHECKING:
    from remat.dtr.runtime.gradients import grad as grad
    from remat.dtr.runtime.gradients import value_and_grad as value_and_grad
    from remat.dtr.runtime.gradients import vjp as vjp
    from remat.dtr.runtime.statistics import RunStatistics as RunStatistics

_HOME_OF = {
    "RunStatistics": "statistics",
    "grad": "gradients",
    "value_and_grad": "gradients",
    "vjp": "gradients",
}


def __getattr__(name: str) -> object:
    """Imports a name of the runtime when it is first used."""
    if name in _HOME_OF:
        found = getattr(importlib.import_module(f"remat.dtr.runtime.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'remat.dtr' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists what has been imported and what can be."""
    return sorted({*globals(), *_HOME_OF})
