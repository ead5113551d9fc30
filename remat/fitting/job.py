"""One step, traced and compiled at settings of a knob; nothing is traced or compiled twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from remat.compiler.compile import CompileReport, TracedStep, trace_step
from remat.compiler.targets import target_device
from remat.core.errors import DeviceMemoryError
from remat.core.interrupt import BestSoFar, Progress
from remat.fitting.static import Static
from remat.lower.attempt import Attempt, Menus, Use
from remat.planning.confirm import Setting
from remat.planning.planners import PolicyPlanner
from remat.planning.protocol import Planner
from remat.plans.plan import Plan
from remat.plans.report import human_bytes
from remat.resolve import priced_for, resolve
from remat.trace.jitted import jitted

__all__ = ["Job", "Options", "Trial"]


@dataclass(frozen=True)
class Trial:
    """One compiled way to plan a step.

    Attributes:
        knob: how it was planned, in words.
        predicted_bytes: what the plans say: the peak of the one wrapped function, or what all of them keep.
        total_bytes: the compiler's memory of the whole step: arguments + results - aliased + temporaries.
        temp_bytes: the temporaries among it.
        recompute_seconds: roofline estimate of what the plans repeat.
        fits: whether `total_bytes` is within the memory.
        plans: one per wrapped function.
        report: everything the compiler says.
    """

    knob: str
    predicted_bytes: int
    total_bytes: int
    temp_bytes: int
    recompute_seconds: float
    fits: bool
    plans: tuple[Plan, ...] = field(repr=False)
    report: CompileReport = field(repr=False)

    @property
    def roofline_seconds(self) -> float | None:
        """As the report's."""
        return self.report.roofline_seconds

    def to_dict(self) -> dict[str, Any]:
        """The numbers, without plans and report."""
        return {
            "knob": self.knob,
            "predicted_bytes": self.predicted_bytes,
            "total_bytes": self.total_bytes,
            "temp_bytes": self.temp_bytes,
            "recompute_seconds": self.recompute_seconds,
            "hbm_traffic_bytes": self.report.hbm_traffic_bytes,
            "matmuls": self.report.matmuls_executed,
            "convolutions": self.report.convolutions_executed,
            "roofline_seconds": self.report.roofline_seconds,
            "compile_seconds": self.report.compile_seconds,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Options:
    """The arguments of `fit` that do not depend on the step, read and checked."""

    remat_policy: Any
    limit_bytes: int
    max_compiles: int
    device: str | None
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    compiler_options: Mapping[str, Any] | None
    progress: Progress


class Job:
    """Traces and compiles one step at settings of a knob; nothing is traced or compiled twice."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
    ) -> None:
        self.args, self.kwargs, self.options = args, kwargs, options
        self.resolved = resolve(priced_for(options.remat_policy, target_device(options.device)))
        ours = self.resolved if isinstance(self.resolved, PolicyPlanner) else None
        device = "h200" if ours is None else ours.policy.device
        self.menus = Menus(device)
        self.jitted: Any = jitted(
            step, args, kwargs, options.static_argnums, options.donate_argnums
        )
        self.static = Static(step, self.jitted, options.static_argnums, args, kwargs)
        self.trials: list[Trial] = []
        self.compiled: dict[int, jax.stages.Compiled | None] = {}
        self._attempts: dict[Planner, Attempt] = {}
        self._traced: dict[Planner, TracedStep] = {}
        self._uses: dict[Planner, tuple[Use, ...]] = {}
        self._seen: dict[tuple[str, ...], Trial] = {}

    def uses(self, setting: Setting) -> tuple[Use, ...]:
        """Traces and plans; compiles nothing."""
        if setting.planner not in self._uses:
            self._trace(setting)
        return self._uses[setting.planner]

    def trial(self, setting: Setting, predicted: Callable[[tuple[Use, ...]], int]) -> Trial:
        """Compiles a setting; plans that were compiled before are that trial again."""
        uses = self.uses(setting)
        key = tuple(f"{use.calls} {use.plan.digest()}" for use in uses)
        if key not in self._seen:
            self._seen[key] = self._compile(setting, predicted(uses))
        return self._seen[key]

    def _compile(self, setting: Setting, predicted_bytes: int) -> Trial:
        self.options.progress(f"{setting.label}: compiling, number {len(self.trials) + 1}")
        with self._attempts[setting.planner].active():  # lowering may trace, too
            report, compiled, is_made = self._asked(self._traced[setting.planner])
        uses = self._uses[setting.planner]
        trial = Trial(
            knob=setting.label,
            predicted_bytes=predicted_bytes,
            total_bytes=report.total_bytes,
            temp_bytes=report.temp_bytes,
            recompute_seconds=sum(use.calls * use.plan.recompute_seconds for use in uses),
            fits=is_made and report.total_bytes <= self.options.limit_bytes,
            plans=tuple(use.plan for use in uses),
            report=report,
        )
        self.compiled[len(self.trials)] = compiled if report.is_attached else None
        self.trials.append(trial)
        if trial.fits:
            size, limit = human_bytes(trial.total_bytes), human_bytes(self.options.limit_bytes)
            self.options.progress(BestSoFar(f"{setting.label}: {size} of {limit} compiled"))
        return trial

    def _asked(self, step: TracedStep) -> tuple[CompileReport, jax.stages.Compiled | None, bool]:
        """The compiler's answer, and whether there is a program: what is larger than a TPU is refused."""
        try:
            return *step.compile(), True
        except DeviceMemoryError as error:
            return step.refused(error), None, False

    def _trace(self, setting: Setting) -> None:
        options = self.options
        options.progress(f"{setting.label}: tracing and planning")
        attempt = self._attempts.setdefault(setting.planner, Attempt(setting.planner))
        with attempt.active():
            self._traced[setting.planner] = trace_step(
                self.jitted,
                self.args,
                self.kwargs,
                device=options.device,
                compiler_options=options.compiler_options,
            )
        self._uses[setting.planner] = attempt.uses()

    def forget(self) -> None:
        """Lets go of traces; jax's caches outlive the job."""
        for attempt in self._attempts.values():
            attempt.forget()
        self._traced.clear()
