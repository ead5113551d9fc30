"""The machinery of `remat.fit`: one step, planned and compiled at settings of a knob, and the search.

There are two knobs. A step with one wrapped function has the budget of its plan, in bytes, which a planner
such as `ilp` meets. Several wrapped functions, or one that is called in the body of a differentiated loop, share
a price of memory instead (`remat.lower.attempt.PricePlanner`): where one wrapper stands among many, its own peak
says little about that of the step, and what it keeps says much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import jax

from remat.compiler.compile import CompileReport, compile_report, target_device
from remat.core.errors import BudgetError, PolicyError
from remat.core.interrupt import Progress, raise_interrupt
from remat.lower.attempt import Attempt, Menus, PricePlanner, Use, choose_option
from remat.planning.protocol import Planner
from remat.planning.planners import PolicyPlanner
from remat.planning.smallest import smallest_plan
from remat.plans.plan import Plan
from remat.plans.report import human_bytes
from remat.policies import MinCut, Unchanged
from remat.policies.base import BudgetPolicy
from remat.resolve import priced_for, resolve
from remat.trace.jitted import jitted

__all__ = ["Job", "Knob", "Options", "Trial", "choose_knob", "search", "too_large"]


_TOLERANCE = 0.02  # of the memory: what may be left unused before another compile is spent
_MARGIN = 0.01  # of the memory: how far below the limit the next compile aims
_NEAR = 0.25  # of the temporaries: how far too large the least plans may be for others to be tried
_NEARLY = 0.02  # how far above the memory the plain step's prediction may be for it to be compiled
_STEEP_ENOUGH = 0.05  # bytes compiled per byte predicted, below which a prediction says nothing
_INFINITE = float("inf")
_HOW_TO_WRAP = (
    "wrap the loss, or the blocks of the network, with a policy of remat's own: "
    "loss = remat.checkpoint(loss, remat_policy='ilp'), and call jax.grad(loss) in the step"
)


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


@dataclass(frozen=True)
class _Setting:
    """Where a knob stands."""

    label: str
    planner: Planner


# The program is that of the plain step.
_UNCHANGED = _Setting("as without rematerialization", PolicyPlanner(Unchanged()))


class _Stop(Exception):
    """Ends `compile_report` after tracing."""


class _Tap:
    """A jitted function for `compile_report`: traced under an attempt, and its compiled program kept."""

    def __init__(self, jitted: Any, attempt: Attempt, look: Callable[[tuple[Use, ...]], None]):
        self.jitted, self.attempt, self.look = jitted, attempt, look
        self.compiled: jax.stages.Compiled | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Reached when there are no array arguments: `compile_report` then jits a call of its own."""
        with self.attempt.active():
            results = self.jitted(*args, **kwargs)
        self.look(self.attempt.uses())
        return results

    def trace(self, *args: Any, **kwargs: Any) -> _Tap:
        with self.attempt.active():
            self.traced = self.jitted.trace(*args, **kwargs)
        self.look(self.attempt.uses())
        return self

    def lower(self, **options: Any) -> _Tap:
        with self.attempt.active():
            self.lowered = self.traced.lower(**options)
        return self

    def compile(self, **options: Any) -> jax.stages.Compiled:
        compiled = self.compiled = self.lowered.compile(**options)
        return compiled


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
        self.menus, self.min_cut = Menus(device), MinCut(device=device)
        self.jitted: Any = jitted(
            step, args, kwargs, options.static_argnums, options.donate_argnums
        )
        self.trials: list[Trial] = []
        self.compiled: dict[int, jax.stages.Compiled | None] = {}
        self._attempts: dict[Planner, Attempt] = {}
        self._uses: dict[Planner, tuple[Use, ...]] = {}
        self._seen: dict[tuple[str, ...], Trial] = {}

    def uses(self, setting: _Setting) -> tuple[Use, ...]:
        """Traces and plans; compiles nothing."""
        if setting.planner not in self._uses:
            self._run(setting, None)
        return self._uses[setting.planner]

    def trial(self, setting: _Setting, predicted: Callable[[tuple[Use, ...]], int]) -> Trial:
        """Compiles a setting; plans that were compiled before are that trial again."""
        uses = self.uses(setting)
        key = tuple(f"{use.calls} {use.plan.digest()}" for use in uses)
        if key not in self._seen:
            self._seen[key] = self._compile(setting, predicted(uses))
        return self._seen[key]

    def _compile(self, setting: _Setting, predicted_bytes: int) -> Trial:
        report, compiled = self._run(setting, "compiling")
        uses = self._uses[setting.planner]
        trial = Trial(
            knob=setting.label,
            predicted_bytes=predicted_bytes,
            total_bytes=report.total_bytes,
            temp_bytes=report.temp_bytes,
            recompute_seconds=sum(use.calls * use.plan.recompute_seconds for use in uses),
            fits=report.total_bytes <= self.options.limit_bytes,
            plans=tuple(use.plan for use in uses),
            report=report,
        )
        self.compiled[len(self.trials)] = compiled if report.is_attached else None
        self.trials.append(trial)
        return trial

    def _run(self, setting: _Setting, then: str | None) -> Any:
        options, planner = self.options, setting.planner
        if then is None:
            options.progress(f"{setting.label}: tracing and planning")
        attempt = self._attempts.setdefault(planner, Attempt(planner))

        def look(uses: tuple[Use, ...]) -> None:
            self._uses[planner] = uses
            if then is None:
                raise _Stop
            options.progress(f"{setting.label}: {then}, number {len(self.trials) + 1}")

        tap = _Tap(self.jitted, attempt, look)
        try:
            report = compile_report(
                tap,
                *self.args,
                device=options.device,
                compiler_options=options.compiler_options,
                **self.kwargs,
            )
        except _Stop:
            return None
        return report, tap.compiled

    def forget(self) -> None:
        """Lets go of traces; jax's caches outlive the job."""
        for attempt in self._attempts.values():
            attempt.forget()


class Knob(Protocol):
    """What is turned: from the cheapest plans to those with the least memory."""

    def cheapest(self) -> Trial:
        """Compiles the cheapest plans."""
        ...

    def plain(self, limit_bytes: int) -> Trial | None:
        """Compiles the step without rematerialization, if it is predicted to need at most `limit_bytes`."""
        ...

    def least(self) -> Trial:
        """Compiles the plans with the least memory."""
        ...

    def another(self) -> Trial | None:
        """Compiles plans of another kind that take little memory, for when the least do not fit."""
        ...

    def at(self, target_bytes: int, low: Trial | None, high: Trial | None) -> Trial | None:
        """Compiles plans predicted at about `target_bytes`, between two trials; None if there are none."""
        ...


def choose_knob(job: Job) -> Knob:
    """Finds out what is wrapped, by tracing, and how it can be planned."""
    policy = job.resolved.policy if isinstance(job.resolved, PolicyPlanner) else None
    if not isinstance(policy, (BudgetPolicy, MinCut)):
        raise PolicyError(
            f"remat_policy={job.options.remat_policy!r} cannot be tightened: expected a policy that plans "
            "within a budget, such as 'ilp', or 'min_cut'"
        )
    uses = job.uses(_UNCHANGED)
    if not uses:
        raise PolicyError(
            "no function wrapped with one of remat's own policies is differentiated in this step, so there "
            f"is nothing to plan; {_HOW_TO_WRAP}. Policies of jax's own, saved plans and "
            "remat_policy=None are left as they are"
        )
    is_alone = sum(use.calls for use in uses) == 1 and not uses[0].kept_in_loop
    if is_alone and isinstance(policy, BudgetPolicy):
        return _BudgetKnob(job, policy)
    return _PriceKnob(job)


class _BudgetKnob:
    """The budget of the one wrapped function."""

    def __init__(self, job: Job, policy: BudgetPolicy) -> None:
        self.job, self.policy = job, policy
        self._least: Trial | None = None

    def cheapest(self) -> Trial:
        return self._trial(_Setting("no budget", PolicyPlanner(self.policy)))

    def plain(self, limit_bytes: int) -> Trial | None:
        found = self.job.uses(_UNCHANGED)[0].plan.peak_bytes <= limit_bytes
        return self._trial(_UNCHANGED) if found else None

    def least(self) -> Trial:
        if self._least is None:
            baseline = self.job.uses(_UNCHANGED)[0].plan.baseline_peak_bytes
            plan = smallest_plan(self._plan, baseline)
            self._least = self._trial(self._within(plan.budget_bytes or plan.peak_bytes))
        return self._least

    def another(self) -> Trial | None:
        """A minimum cut: predicted to take more, it is simpler, and the compiler may make less of it."""
        return self._trial(_Setting("a minimum cut", PolicyPlanner(self.job.min_cut)))

    def at(self, target_bytes: int, low: Trial | None, high: Trial | None) -> Trial | None:
        del low, high  # a plan is asked for at the very place
        try:
            return self._trial(self._within(target_bytes))
        except BudgetError:
            return self.least()

    def _within(self, budget_bytes: int) -> _Setting:
        budget = max(budget_bytes, 1)
        return _Setting(
            f"a budget of {human_bytes(budget)}", PolicyPlanner(self.policy, budget, margin=0)
        )

    def _plan(self, budget_bytes: int) -> Plan:
        return self.job.uses(self._within(budget_bytes))[0].plan

    def _trial(self, setting: _Setting) -> Trial:
        return self.job.trial(setting, lambda uses: uses[0].plan.peak_bytes)


class _PriceKnob:
    """The price of a kept byte, common to all wrapped functions."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._prices: dict[int, float] = {}  # by the identity of a trial

    def cheapest(self) -> Trial:
        return self._trial(0.0)

    def plain(self, limit_bytes: int) -> Trial | None:
        found = _kept_bytes(self.job.uses(_UNCHANGED)) <= limit_bytes
        return self.job.trial(_UNCHANGED, _kept_bytes) if found else None

    def least(self) -> Trial:
        return self._trial(_INFINITE)

    def another(self) -> Trial | None:
        return None

    def at(self, target_bytes: int, low: Trial | None, high: Trial | None) -> Trial | None:
        floor = self._kept(_INFINITE if low is None else self._prices[id(low)])
        ceiling = self._kept(0.0 if high is None else self._prices[id(high)])
        kept = {price: self._kept(price) for price in self._breaks()}
        between = {price: k for price, k in kept.items() if floor < k < ceiling}
        if not between:
            return None
        under = {price: k for price, k in between.items() if k <= target_bytes}
        if under:
            return self._trial(min(under, key=lambda price: (-under[price], price)))
        return self._trial(min(between, key=lambda price: (between[price], price)))

    def setting(self, price: float) -> _Setting:
        if price == 0:
            label = "the least time"
        elif price == _INFINITE:
            label = "the least memory"
        else:
            label = f"{price * 2**30:.3g} s per GiB"
        return _Setting(label, PricePlanner(price, self.job.menus))

    def _trial(self, price: float) -> Trial:
        trial = self.job.trial(self.setting(price), _kept_bytes)
        self._prices.setdefault(id(trial), price)
        return trial

    def _breaks(self) -> list[float]:
        """Prices at which no two options of a menu cost the same, one from every interval."""
        slopes = {
            (less.seconds - more.seconds) / (more.saved_bytes - less.saved_bytes)
            for options in self.job.menus.options.values()
            for i, less in enumerate(options)
            for more in options[i + 1 :]
            if more.saved_bytes > less.saved_bytes
        }
        ordered = sorted(slopes)
        return [(a + b) / 2 for a, b in pairwise(ordered)]

    def _kept(self, price: float) -> int:
        """Estimate of what all wrappers keep, from the graphs of the cheapest plans."""
        uses = self.job.uses(self.setting(0.0))
        return _kept_bytes(uses) + sum(use.calls * self._change(use.plan, price) for use in uses)

    def _change(self, plan: Plan, price: float) -> int:
        options = self.job.menus.of(plan.graph)
        change = choose_option(options, price).saved_bytes - choose_option(options, 0.0).saved_bytes
        return change + sum(x.length * self._change(x.plan, price) for x in plan.loops)


def _kept_bytes(uses: Sequence[Use]) -> int:
    return sum(use.calls * use.plan.saved_bytes for use in uses)


def search(
    knob: Knob,
    options: Options,
    compiles: Callable[[], int],
    known: Sequence[Trial] = (),
) -> list[Trial]:
    """Turns a knob until the step fits and little is unused.

    Args:
        knob: to turn.
        options: the memory, and how many compiles there may be.
        compiles: how many there were so far.
        known: trials that were made before.

    Returns:
        All trials, those known included. If none fits, the one with the least memory is among them, unless
        arguments and results alone are too large.
    """
    limit_bytes = options.limit_bytes
    trials = [*known, knob.cheapest()]
    first = trials[-1]
    room = limit_bytes - (first.total_bytes - first.temp_bytes)
    timed = first.report.roofline_seconds is not None  # else nothing says which is faster
    if first.fits and timed and compiles() < options.max_compiles:
        plain = knob.plain(round((1 + _NEARLY) * room))
        return [*trials, plain] if plain is not None and not _is_among(plain, trials) else trials
    if first.fits or room <= 0:
        return trials  # nothing to gain, or not even without any temporaries
    least: Trial | None = None
    while compiles() < options.max_compiles:
        raise_interrupt()
        low = max((t for t in trials if t.fits), key=lambda t: t.predicted_bytes, default=None)
        fails = [t for t in trials if not t.fits]
        if low is None and least is not None:
            found = _between(knob, trials, least, limit_bytes) or knob.another()
            if found is None or _is_among(found, trials):
                break
            trials.append(found)
            continue
        if low is not None:
            fails = [t for t in fails if t.predicted_bytes > low.predicted_bytes]
            if not fails or limit_bytes - low.total_bytes <= _TOLERANCE * limit_bytes:
                break
        target = _next(fails, low, limit_bytes)
        high = min(fails, key=lambda t: t.predicted_bytes)
        found = None
        if target is not None and (low is not None or options.max_compiles - compiles() > 1):
            found = knob.at(target, low, high)
            if low is not None and found is not None and _is_among(found, trials):
                # Plans come in steps, of a loop say, and the next one may begin just above.
                found = knob.at((target + high.predicted_bytes) // 2, low, high)
        if low is None and (found is None or _is_among(found, trials)):
            found = least = knob.least()
        if found is None or _is_among(found, trials):
            break
        trials.append(found)
    if not any(trial.fits for trial in trials):
        raise_interrupt()
    return trials


def _between(knob: Knob, trials: Sequence[Trial], least: Trial, limit_bytes: int) -> Trial | None:
    """A trial in the widest gap of predictions, None if the least plans are far too large or none is new.

    The least plans are so by prediction; what the compiler makes of a plan that repeats less may be smaller.
    """
    excess = least.total_bytes - limit_bytes
    if excess > _NEAR * least.temp_bytes:
        return None
    above = [t for t in trials if t.predicted_bytes >= least.predicted_bytes]
    ordered = sorted(above, key=lambda t: t.predicted_bytes)
    pairs = sorted(pairwise(ordered), key=lambda p: p[0].predicted_bytes - p[1].predicted_bytes)
    for low, high in pairs[:1]:
        found = knob.at((low.predicted_bytes + high.predicted_bytes) // 2, low, high)
        if found is not None and not _is_among(found, trials):
            return found
    return None


def _is_among(trial: Trial, trials: Sequence[Trial]) -> bool:
    return any(trial is other for other in trials)


def _next(fails: Sequence[Trial], low: Trial | None, limit_bytes: int) -> int | None:
    """The prediction to aim at; None if predictions are no guide."""
    high = min(fails, key=lambda t: t.predicted_bytes)
    # What is neither temporary nor prediction is the same in all trials.
    wanted = limit_bytes - int(_MARGIN * limit_bytes) - (high.total_bytes - high.temp_bytes)
    if low is not None:
        rise = high.temp_bytes - low.temp_bytes
        share = (wanted - low.temp_bytes) / rise if rise > 0 else 0.5
        share = min(max(share, 0.02), 0.98)
        return low.predicted_bytes + round(share * (high.predicted_bytes - low.predicted_bytes))
    if wanted <= 0:
        return None
    others = [t for t in fails if t.predicted_bytes > high.predicted_bytes]
    if others:
        near = min(others, key=lambda t: t.predicted_bytes)
        slope = (near.temp_bytes - high.temp_bytes) / (near.predicted_bytes - high.predicted_bytes)
        if slope < _STEEP_ENOUGH:
            return None
        target = high.predicted_bytes - round((high.temp_bytes - wanted) / slope)
    else:  # the more careful of: a constant above the prediction, and a multiple of it
        apart = high.predicted_bytes - (high.temp_bytes - wanted)
        times = high.predicted_bytes * wanted // max(high.temp_bytes, 1)
        target = min(apart, times)
    return target if target > 0 else None


def too_large(trials: Sequence[Trial], limit_bytes: int) -> BudgetError:
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
    blamed = fixed if sum(fixed.values()) >= limit_bytes else parts
    dominant = max(blamed, key=lambda name: blamed[name])
    return BudgetError(
        f"the step does not fit into {limit_bytes:,} bytes on {report.device}. The smallest that the "
        f"compiler confirmed is {best.total_bytes:,} bytes ({best.knob}; {len(trials)} compiled): "
        + ", ".join(f"{name} {size:,}" for name, size in parts.items())
        + f". Here {advice[dominant]}."
    )
