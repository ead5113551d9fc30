"""Runs HiGHS on a `Rows`: time limit, gap, start, progress, and interruption that keeps the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from remat.core.interrupt import Keyboard
from remat.policies.exact.rows import Rows

__all__ = ["LpOutcome", "MipOutcome", "Stop", "run_lp", "run_mip"]

Floats = npt.NDArray[np.float64]
Stop = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class MipOutcome:
    """What HiGHS says of an integer program.

    Attributes:
        values: of the best solution, None without one.
        objective, bound: of that solution (inf without one) and the proven bound below every solution.
        infeasible: proven to have no solution.
        interrupted: ended by `stop` or the keyboard, not by the solver.
    """

    values: Floats | None
    objective: float
    bound: float
    infeasible: bool
    interrupted: bool


@dataclass(frozen=True, eq=False)
class LpOutcome:
    """What HiGHS says of a relaxation: primal values if there are any, and a bound that holds in any case."""

    values: Floats | None
    bound: float
    infeasible: bool
    interrupted: bool


class _Interrupt:
    """Whether to stop: asked for by the caller's `stop`, or by Ctrl-C while HiGHS runs."""

    def __init__(self, stop: Stop | None) -> None:
        self.keyboard = Keyboard()
        self.stop = self.keyboard.stops(stop)
        self.stopped = False
        self.error: Exception | None = None

    @property
    def requested(self) -> bool:
        return self.stopped or self.keyboard.pressed

    def fail(self, error: Exception) -> None:
        """Stops for an error, which must not pass through the solver's C++ frames."""
        self.error, self.stopped = error, True

    def __call__(self) -> bool:
        if not self.stopped:
            try:
                self.stopped = bool(self.stop())
            except Exception as error:
                self.fail(error)
        return self.stopped


class _Quiet(highspy.Highs):
    """Prints nothing: a plan that is printed as JSON is nothing but JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._silence()  # of versions that do not enable callbacks when made

    def enableCallbacks(self) -> None:
        """Versions from 1.16 on call it when made, and with that print their licence."""
        self._silence()
        super().enableCallbacks()

    def _silence(self) -> None:
        # Not `output_flag=False`, which silences the progress callback too.
        self.setOptionValue("log_to_console", False)


def _solver(seconds: float) -> highspy.Highs:
    highs = _Quiet()
    highs.setOptionValue("time_limit", max(float(seconds), 0.0))
    highs.setOptionValue("threads", 1)  # plans do not depend on how many cores there are
    return highs


def run_mip(
    rows: Rows,
    *,
    seconds: float = math.inf,
    gap: float = 0.0,
    absolute_gap: float = 1e-6,
    start: Floats | None = None,
    stop: Stop | None = None,
    progress: Callable[[float, float, float], None] | None = None,
    target: float = -math.inf,
) -> MipOutcome:
    """Minimises `rows` with integrality.

    Args:
        seconds: limit of the solver's time.
        gap, absolute_gap: stop at this relative or absolute distance of objective and bound.
        start: a value per column, a feasible solution.
        stop: asked several times a second; True ends the search with the best so far.
        progress: called with (objective, bound, seconds) now and then.
        target: a solution at most this expensive ends the search.
    """
    highs = _solver(seconds)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("mip_abs_gap", absolute_gap)
    highs.setOptionValue("mip_min_logging_interval", 0.5)
    if math.isfinite(target):
        highs.setOptionValue("objective_target", target)
    highs.passModel(rows.model())
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = [float(value) for value in start]
        highs.setSolution(solution)
    interrupt = _Interrupt(stop)
    kinds = highspy.cb.HighsCallbackType

    def callback(kind: Any, _message: str, out: Any, reply: Any, _data: Any) -> None:
        if kind == kinds.kCallbackMipLogging:
            if progress is not None and interrupt.error is None:
                try:
                    progress(out.mip_primal_bound, out.mip_dual_bound, out.running_time)
                except Exception as error:
                    interrupt.fail(error)
        elif interrupt():
            reply.user_interrupt = True

    highs.setCallback(callback, None)
    for kind in (
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackSimplexInterrupt,
        kinds.kCallbackIpmInterrupt,
        kinds.kCallbackMipLogging,
    ):
        highs.startCallback(kind)
    with interrupt.keyboard.watched(raises="never"):
        highs.run()
    if interrupt.error is not None:
        raise interrupt.error
    info = highs.getInfo()
    status = highs.getModelStatus()
    infeasible = status == highspy.HighsModelStatus.kInfeasible
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.asarray(highs.getSolution().col_value, np.float64) if found else None
    bound = float(info.mip_dual_bound)
    if not any(rows.integral):  # solved as a linear program: the integer program's bound is not set
        optimal = status == highspy.HighsModelStatus.kOptimal
        bound = float(info.objective_function_value) if optimal else -math.inf
    return MipOutcome(
        values=values,
        objective=float(info.objective_function_value) if found else math.inf,
        bound=math.inf if infeasible else (bound if math.isfinite(bound) else -math.inf),
        infeasible=infeasible,
        interrupted=interrupt.requested,
    )


def run_lp(
    rows: Rows,
    *,
    seconds: float = math.inf,
    stop: Stop | None = None,
) -> LpOutcome:
    """Solves the relaxation of `rows`; the bound holds even if the solver was stopped early.

    The bound is computed from the row duals (`Rows.dual_bound`), not taken from the solver.
    """
    highs = _solver(seconds)
    # The interior point method without crossover: the fastest measured.
    highs.setOptionValue("solver", "ipm")
    highs.setOptionValue("run_crossover", "off")
    highs.passModel(rows.model(relaxed=True))
    interrupt = _Interrupt(stop)

    def callback(_kind: Any, _message: str, _out: Any, reply: Any, _data: Any) -> None:
        if interrupt():
            reply.user_interrupt = True

    kinds = highspy.cb.HighsCallbackType
    highs.setCallback(callback, None)
    highs.startCallback(kinds.kCallbackSimplexInterrupt)
    highs.startCallback(kinds.kCallbackIpmInterrupt)
    with interrupt.keyboard.watched(raises="never"):
        highs.run()
    if interrupt.error is not None:
        raise interrupt.error
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return LpOutcome(None, math.inf, True, interrupt.requested)
    solution = highs.getSolution()
    duals = np.asarray(solution.row_dual, np.float64)
    zero = rows.dual_bound(np.zeros(rows.num_rows))
    bound = max(zero, rows.dual_bound(duals)) if len(duals) == rows.num_rows else zero
    solved = status == highspy.HighsModelStatus.kOptimal
    usable = solved or len(solution.col_value) == rows.num_columns
    values = np.asarray(solution.col_value, np.float64) if usable else None
    return LpOutcome(values, bound, False, interrupt.requested)
