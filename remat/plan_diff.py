"""How two plans differ. Lives in `remat.plans.diff` and `remat.plans.differences`."""

from remat.plans.diff import diff
from remat.plans.differences import Change, PlanDiff

__all__ = ["Change", "PlanDiff", "diff"]
