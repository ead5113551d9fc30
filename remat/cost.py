"""Prices of operators: estimated by roofline, or measured. Lives in `remat.core.cost` and `remat.tools.measure`."""

from remat.core.cost import op_seconds
from remat.tools.measure import Costs, measure

__all__ = ["Costs", "measure", "op_seconds"]
