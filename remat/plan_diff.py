"""How two plans differ. Lives in `remat.plans.diff`."""

from remat.plans.diff import Change, PlanDiff, diff

__all__ = ["Change", "PlanDiff", "diff"]
