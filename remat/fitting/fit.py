"""A training step that fits a device, confirmed by the compiler: plan, compile, compare, tighten or relax.

`fit` plans all wrappers inside a step anew (`remat.lower.attempt`) and compiles the whole step. What a plan
predicts is the memory of a simulated program; what counts is `CompileReport.total_bytes`: arguments, results that
are not aliased, and temporaries. Between the two lies what the compiler does. Memory is taken to grow linearly with
the prediction between two compiles, and the next one is placed there (`remat.planning.search`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax

from remat.compiler.compile import CompileReport
from remat.core.devices import get_device, is_tpu
from remat.core.errors import BudgetError, CompileError, shown
from remat.core.interrupt import Progress, or_log, planning
from remat.fitting.job import Job, Options, Trial
from remat.fitting.knobs import Knob, choose_knob
from remat.fitting.static import Static
from remat.planning.search import fastest, further, search
from remat.plans.plan import Plan
from remat.plans.report import human_bytes, human_seconds, table
from remat.resolve import budget_hint, parse_budget
from remat.trace.calls import as_tuple
from remat.wrapping import check_keywords

__all__ = [
    "HISTORY_ALIGNED",
    "HISTORY_COLUMNS",
    "Fitted",
    "Trial",
    "finish",
    "fit",
    "fit_options",
    "history_rows",
    "parse_memory",
    "too_large",
    "trials_of",
]

# Both by look, on the models of `benchmarks/fit.py`; how many compiles are spent depends on them, not what fits.
_TOLERANCE = 0.02  # of the memory: what may be left unused before another compile is spent
_NEARLY = 0.02  # of the room for temporaries: how far too large the plain step may be predicted to be compiled

HISTORY_COLUMNS = (
    "",
    "planned for",
    "predicted",
    "compiled",
    "temp",
    "traffic",
    "repeats",
    "compile",
    "",
)
HISTORY_ALIGNED = "><>>>>>><"


@dataclass(frozen=True)
class Fitted:
    """A step that fits, as the compiler confirms; call it like the step if the device is attached.

    Attributes:
        memory_bytes: the limit it was fitted to.
        report: what the compiler says about it; `report.total_bytes <= memory_bytes`.
        plans: the plan of every wrapped function; with a single one, `remat_policy=fitted.plans[0]` uses it.
        history: everything that was compiled, in order.
        chosen: the entry of `history` that this is.
        compiled: the compiled step, None if the device is not attached.
        interrupted: whether Ctrl-C ended the search, so that a faster step may have been missed.
    """

    memory_bytes: int
    report: CompileReport
    plans: tuple[Plan, ...]
    history: tuple[Trial, ...]
    chosen: Trial
    compiled: jax.stages.Compiled | None = field(repr=False)
    interrupted: bool = False
    _static: Static | None = field(default=None, repr=False)

    @property
    def total_bytes(self) -> int:
        """The compiler's memory of the whole step."""
        return self.report.total_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The budget of the plan, None if there was none, or several wrappers shared a price."""
        return self.plans[0].budget_bytes if len(self.plans) == 1 else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled step.

        Raises:
            CompileError: the device it was compiled for is not attached, or a static argument differs from what
                the step was compiled with.
        """
        if self.compiled is None:
            raise CompileError(
                f"this step was compiled for {self.report.device!r}, which is not attached, and cannot be "
                "run. Fit again on the device itself, or use the plans: remat_policy=fitted.plans[0]"
            )
        if self._static is not None:
            args, kwargs = self._static.without(args, kwargs)
        return self.compiled(*args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the numbers, the report without its kernels, the plans' digests."""
        return {
            "format": "remat.fit",
            "memory_bytes": self.memory_bytes,
            "total_bytes": self.total_bytes,
            "budget_bytes": self.budget_bytes,
            "chosen": self.history.index(self.chosen),
            "interrupted": self.interrupted,
            "history": [trial.to_dict() for trial in self.history],
            "plans": [
                {
                    "policy": plan.policy_name,
                    "digest": plan.digest(),
                    "peak_bytes": plan.peak_bytes,
                    "saved_bytes": plan.saved_bytes,
                    "recompute_flops": plan.recompute_flops,
                    "recompute_seconds": plan.recompute_seconds,
                    "baseline_peak_bytes": plan.baseline_peak_bytes,
                }
                for plan in self.plans
            ],
            "report": self.report.to_dict(include_kernels=False),
        }

    def __str__(self) -> str:
        share = self.total_bytes / self.memory_bytes
        lines = [
            f"fits: {human_bytes(self.total_bytes)} of {human_bytes(self.memory_bytes)} on "
            f"{self.report.device} ({share:.1%}), {_parts(self.report)}",
            *_table(self.history, self.chosen),
        ]
        if self.interrupted:
            lines.append("interrupted: of what was compiled by then the fastest that fits")
        return "\n".join(lines)


def history_rows(history: Sequence[Trial], chosen: Trial | None) -> list[tuple[str, ...]]:
    """Returns what was compiled as rows of text under `HISTORY_COLUMNS`; the last cell is the verdict."""
    return [
        (
            str(number),
            trial.knob,
            human_bytes(trial.predicted_bytes),
            human_bytes(trial.total_bytes),
            human_bytes(trial.temp_bytes),
            human_bytes(trial.report.hbm_traffic_bytes if trial.report.kernels else None),
            human_seconds(trial.recompute_seconds),
            human_seconds(trial.report.compile_seconds),
            "chosen" if trial is chosen else "fits" if trial.fits else "too large",
        )
        for number, trial in enumerate(history, start=1)
    ]


def _table(history: Sequence[Trial], chosen: Trial | None) -> list[str]:
    return table([HISTORY_COLUMNS, *history_rows(history, chosen)], HISTORY_ALIGNED)


def _parts(report: CompileReport) -> str:
    return (
        f"arguments {human_bytes(report.argument_bytes)}, results not aliased "
        f"{human_bytes(report.output_bytes - report.alias_bytes)}, temporaries "
        f"{human_bytes(report.temp_bytes)}"
    )


def fit(
    step: Callable[..., Any],
    *args: Any,
    memory: int | str | None = None,
    device: str | None = None,
    remat_policy: Any = "ilp",
    max_compiles: int = 6,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Fitted:
    """Plans the wrappers inside a step so that the compiled step fits into `memory`, and says so only if it does.

    The cheapest plans are compiled first; if they fit, and the step without rematerialization may, it is compiled
    too, and that is all. Otherwise memory is tightened until the compiler agrees, and relaxed while more than 2 %
    is unused and compiles are left. Of all that fit, the one with the least roofline time is returned.

    Args:
        step: any function: a whole training step with `jax.grad` in it, or the gradient of a loss. Somewhere in
            it `remat.checkpoint`, `remat.linen.remat` or `remat.nnx.remat` wraps a differentiated function
            with a policy of remat's own. These are planned anew; wrappers with one of jax's policies or with a
            saved plan are left as they are.
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, pytrees of them, or static arguments.
        memory: of the device: bytes or `"80GiB"`; None takes the device's data sheet. Leave room for what is
            not in the program: other arrays, the allocator's fragmentation.
        device: as in `remat.compile_report`: None for the attached one, or a GPU that need not be there.
        remat_policy: plans a step with one wrapped function: a policy of ours that plans within a budget. Its
            prices are those of `device`, unless it names a device itself.
            `"min_cut"`, or several wrapped functions, take minimum cuts at a common price of memory.
        max_compiles: at most so many compiles, a whole number, 2 or more.
        static_argnums, donate_argnums: as in `jax.jit`.
        compiler_options: for XLA, on top of ours.
        progress: called with one line whenever something that takes time begins.
        **kwargs: keyword arguments of `step`.

    Returns:
        The step that fits. On the attached device it is callable, with static arguments where `step` has them;
        their values are those it was fitted with.

    Raises:
        BudgetError: not even the plans with the least memory fit; the message has what they take, and why. Or
            `memory` cannot be read, or `max_compiles` is below 2.
        PolicyError: no wrapper of ours is differentiated in `step`, or `remat_policy` cannot hold a budget.
        CompileError: as `remat.compile_report`.
    """
    check_keywords(step, kwargs, fit)
    options = fit_options(
        memory=memory,
        device=device,
        remat_policy=remat_policy,
        max_compiles=max_compiles,
        static_argnums=static_argnums,
        donate_argnums=donate_argnums,
        compiler_options=compiler_options,
        progress=progress,
    )
    job = Job(step, args, kwargs, options)
    try:
        return finish(job, choose_knob(job))
    finally:
        job.forget()


def fit_options(
    *,
    memory: int | str | None,
    device: str | None,
    remat_policy: Any,
    max_compiles: int,
    static_argnums: int | Sequence[int],
    donate_argnums: int | Sequence[int],
    compiler_options: Mapping[str, Any] | None,
    progress: Progress | None,
) -> Options:
    """Reads the arguments that `fit` and `max_batch` share.

    Raises:
        BudgetError: `memory` cannot be read, or `max_compiles` is below 2.
    """
    if not (isinstance(max_compiles, Integral) and max_compiles >= 2):
        raise BudgetError(
            f"max_compiles={shown(max_compiles)}: expected at least 2, a whole number, one for the "
            "cheapest plans and one for those with the least memory"
        )
    return Options(
        remat_policy=remat_policy,
        limit_bytes=_limit_bytes(memory, device),
        max_compiles=max_compiles,
        device=device,
        static_argnums=as_tuple(static_argnums),
        donate_argnums=as_tuple(donate_argnums),
        compiler_options=compiler_options,
        progress=or_log(progress),
    )


def _limit_bytes(memory: int | str | None, device: str | None) -> int:
    if memory is None:
        known = get_device(device) if device is not None else None
        if known is None or known.is_nominal:
            raise BudgetError(
                f"memory=None with device={device!r}: how much memory there is is not known; pass "
                "memory=, bytes or a size ('80GiB')"
            )
        return known.memory_bytes
    return parse_memory(memory)


def parse_memory(memory: int | str) -> int:
    """Reads the memory of a device: bytes, or a size with a unit.

    Raises:
        BudgetError: neither.
    """
    limit = parse_budget(memory, "memory")
    if not isinstance(limit, int):
        raise BudgetError(
            f"memory={shown(memory)}: expected bytes or a size ('80GiB'), not a fraction"
        )
    return limit


def finish(job: Job, knob: Knob, known: Sequence[Trial] = ()) -> Fitted:
    """Searches, and returns the best step that fits.

    Args:
        job: the step.
        knob: that fits it.
        known: trials of this job that were made before; they count as compiles.

    Raises:
        BudgetError: nothing fits.
    """
    limit = job.options.limit_bytes
    with planning(job.options.progress) as session:
        try:
            trials = trials_of(knob, job.options, lambda: len(job.trials), known)
        except KeyboardInterrupt:
            trials = job.trials
            if not any(trial.fits for trial in trials):
                raise
        ended_early = session.interrupted
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        used_up = len(job.trials) >= job.options.max_compiles
        raise too_large(trials, limit, job.options.max_compiles if used_up else None)
    best = fastest(fitting)
    return Fitted(
        memory_bytes=limit,
        report=best.report,
        plans=best.plans,
        history=tuple(job.trials),
        chosen=best,
        compiled=job.compiled[next(i for i, t in enumerate(job.trials) if t is best)],
        interrupted=ended_early,
        _static=job.static,
    )


def trials_of(
    knob: Knob, options: Options, compiles: Callable[[], int], known: Sequence[Trial] = ()
) -> list[Trial]:
    """Returns the cheapest plans if they fit, with the plain step if that may, too; else what the search finds.

    Where nothing fits a TPU, the plain step is among the trials: of what would be larger than the chip, XLA:TPU
    computes values again by itself, which no prediction knows.

    Args:
        knob: that fits the step.
        options: the memory, and how many compiles there may be.
        compiles: how many there were so far.
        known: trials that were made before.
    """
    limit = options.limit_bytes

    def left() -> int:
        return options.max_compiles - compiles()

    first = knob.cheapest()
    if not first.fits:
        spare = int(is_tpu(first.report.device) and left() > 1)
        found = search(
            knob, first, limit, left=lambda: left() - spare, known=known, tolerance=_TOLERANCE
        )
        plain = None if any(t.fits for t in found) or not spare else knob.plain(sys.maxsize)
        found = found if plain is None else [*found, plain]
        return further(knob, first, found, left=left)
    timed = first.roofline_seconds is not None  # else nothing says which is faster
    room = limit - (first.total_bytes - first.temp_bytes)
    plain = knob.plain(round((1 + _NEARLY) * room)) if timed and left() > 0 else None
    trials = [*known, first] if plain is None else [*known, first, plain]
    return further(knob, plain or first, trials, left=left)


def too_large(trials: Sequence[Trial], limit_bytes: int, used_up: int | None = None) -> BudgetError:
    """Returns the error of trials of which none fits; `used_up` is `max_compiles`, if all were made.

    Its `smallest_peak_bytes` are a total: what `memory` would have to be.
    """
    best = min(trials, key=lambda t: t.total_bytes)
    report = best.report
    parts = {
        "arguments": report.argument_bytes,
        "results": report.output_bytes - report.alias_bytes,
        "temporaries": report.temp_bytes,
    }
    advice = {
        "arguments": "arguments dominate, which no plan changes: have fewer or smaller ones (a smaller "
        "optimizer state, bfloat16, sharding over devices)",
        "results": "results dominate, which no plan changes: donate the arguments they replace "
        "(donate_argnums)",
        "temporaries": "temporaries dominate: a smaller batch (remat.max_batch finds it), or wrap more of the "
        "step, best the whole loss: remat.checkpoint(loss, remat_policy='ilp')",
    }
    fixed = {name: size for name, size in parts.items() if name != "temporaries"}
    # Where these alone are too large, temporaries are not to blame, however large they are.
    is_fixed = sum(fixed.values()) >= limit_bytes
    blamed = fixed if is_fixed else parts
    dominant = max(blamed, key=lambda name: blamed[name])
    more = ""
    if used_up is not None and not is_fixed:
        more = f" More compiles may find a plan: max_compiles={2 * used_up}."
    where = "Of arguments and results, which alone do not fit," if is_fixed else "Here"
    return BudgetError(
        f"the step does not fit into {limit_bytes:,} bytes ({human_bytes(limit_bytes)}) on {report.device}. "
        f"The smallest that the compiler confirmed is {best.total_bytes:,} bytes "
        f"({human_bytes(best.total_bytes)}; {best.knob}; {len(trials)} compiled): "
        + ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
        + f". {where} {advice[dominant]}.{more}{budget_hint(limit_bytes, 'memory')}",
        smallest_peak_bytes=best.total_bytes,
    )
