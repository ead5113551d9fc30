"""`Plan`: the record of a plan with what users do with it: print, replay, apply, write to a file and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.core.errors import PlanError
from remat.plans.reading import plan_from_data, read_plan
from remat.plans.record import LoopRecord, PlanRecord
from remat.plans.report import describe
from remat.plans.simulate import Timeline, simulate
from remat.plans.writing import dump_plan, plan_to_data, write_plan

__all__ = ["LoopPlan", "Plan"]


@dataclass(frozen=True, slots=True)
class LoopPlan(LoopRecord):
    """The plan of a loop body; see `LoopRecord` for its fields."""

    plan: Plan


# Fields, equality and hash are those of the record; declared again is what has a more precise type here.
@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanRecord):
    """A `PlanRecord`, which has the fields, with the methods that users call."""

    loops: tuple[LoopPlan, ...] = ()

    @property
    def policy(self) -> Any:
        """The plan as a `jax.checkpoint` policy over the names that `annotate` inserts.

        Raises:
            PlanError: the plan was not made with `lowering="policy"`.
        """
        import jax

        if self.is_plain:
            return jax.checkpoint_policies.everything_saveable
        names = {*self.policy_names()}
        for entry in self.loops:
            names.update(entry.plan.policy_names())
        return jax.checkpoint_policies.save_only_these_names(*sorted(names))

    def annotate(self, fun: Any, **options: Any) -> Any:
        """Returns `fun` with the kept values named, cut into `jax.checkpoint` regions.

        Args:
            fun: the function this plan was made for with `remat.plan(fun, ..., lowering="policy")`.
            **options: `static_argnums`, `static_argnames` and `prevent_cse`, as in `remat.checkpoint`.

        Raises:
            PlanError: the plan was not made with `lowering="policy"`, or not for this function.
        """
        from remat.api import checkpoint

        if not self.is_plain:
            self.policy_names()
        return checkpoint(fun, remat_policy=self, lowering="policy", **options)

    def loop(self, path: str) -> Plan:
        """Returns the plan of the loop body called `path`."""
        for entry in self.loops:
            if entry.path == path:
                return entry.plan
        raise PlanError(
            f"this plan has no loop {path!r}; its loops are {[entry.path for entry in self.loops]}"
        )

    def timeline(self, *, fused: bool = True) -> Timeline:
        """Replays the schedule and returns live bytes after every step; see `remat.plans.simulate`."""
        return simulate(self.graph, self.schedule, fused=fused).timeline

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON-ready data; see `remat.plans.writing`.

        Raises:
            PlanError: a field holds something of another type than it should.
        """
        return plan_to_data(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the plan as a JSON document, and writes it to `path` if one is given.

        Equal plans give equal lines but for the last, which holds the seconds spent planning, the versions of
        remat and jax and, in a file, the date. A file that holds an equal plan already is left as it is.

        Raises:
            PlanError: as `to_dict`.
            OSError: the file cannot be written.
        """
        return dump_plan(self) if path is None else write_plan(self, path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: the document is not a plan, of a version this `remat` does not know, or damaged.
        """
        return plan_from_data(data, cls)

    @classmethod
    def from_json(cls, text_or_path: str | Path) -> Plan:
        """Reads a plan from a JSON document or from the path of one.

        Raises:
            PlanError: neither a JSON document nor a readable file, or as `from_dict`.
        """
        return read_plan(text_or_path, cls)

    def to_html(self, path: str | Path | None = None) -> str:
        """Returns the plan as a page that needs nothing else, and writes it to `path` if one is given.

        What matters first, memory over time, layers, what is kept and why, the report. Needs matplotlib.

        Raises:
            remat.pictures.style.PlotError: matplotlib is missing, or the name does not end in `.html`.
            OSError: the file cannot be written.
        """
        from remat.pictures import page

        return page.page(self) if path is None else page.write_page(self, path)

    def show(self) -> None:
        """Shows the plan in a notebook as a table and a picture; elsewhere prints it."""
        from remat.pictures import page

        page.show(self, str(self))

    def _repr_html_(self) -> str:
        """What a notebook shows of the plan."""
        from remat.pictures import page

        return page.notebook(self)

    def __str__(self) -> str:
        return describe(self)
