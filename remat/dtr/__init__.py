"""Dynamic tensor rematerialization: evict when memory is short, make again when it is needed.

Kirisame et al., "Dynamic tensor rematerialization" (2020). Plain data, no jax.
"""

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
