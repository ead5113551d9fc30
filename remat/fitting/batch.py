"""The largest batch that fits a device, confirmed by the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.core.errors import BudgetError
from remat.core.interrupt import Progress, planning, raise_interrupt
from remat.fitting.fit import Fitted, finish, fit_options, too_large
from remat.fitting.job import Job, Options, Trial
from remat.fitting.knobs import Knob, choose_knob
from remat.plans.report import human_bytes, table

__all__ = ["BatchTrial", "MaxBatch", "max_batch"]

# How many times the largest size that fits the next one may be at most, while none is known not to: a line through
# two small sizes knows little. Chosen by look; compiles depend on it, the result does not.
_FURTHEST = 8


@dataclass(frozen=True)
class BatchTrial:
    """One batch size, compiled with the plans that take the least memory.

    Attributes:
        batch: the size.
        total_bytes: the compiler's memory of the whole step.
        fits: whether that is within the memory.
    """

    batch: int
    total_bytes: int
    fits: bool


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch that fits.

    Attributes:
        batch: the size.
        fitted: the step for it.
        history: the sizes that were compiled, in order.
        next_batch: the smallest size that was seen not to fit, None if `high` was reached.
        compiles: how many there were altogether, those of `fitted` included.
    """

    batch: int
    fitted: Fitted
    history: tuple[BatchTrial, ...]
    next_batch: int | None
    compiles: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format": "remat.max_batch",
            "batch": self.batch,
            "next_batch": self.next_batch,
            "compiles": self.compiles,
            "history": [
                {"batch": t.batch, "total_bytes": t.total_bytes, "fits": t.fits}
                for t in self.history
            ],
            "fitted": self.fitted.to_dict(),
        }

    def __str__(self) -> str:
        rows = [("batch", "least memory", "")]
        rows += [
            (str(t.batch), human_bytes(t.total_bytes), "fits" if t.fits else "too large")
            for t in self.history
        ]
        head = f"largest batch: {self.batch}, found with {self.compiles} compiles"
        return "\n".join([head, *table(rows, ">><"), str(self.fitted)])


def max_batch(
    make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]],
    *,
    memory: int | str | None = None,
    device: str | None = None,
    low: int = 1,
    high: int | None = None,
    multiple_of: int = 1,
    remat_policy: Any = "ilp",
    max_compiles: int = 6,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> MaxBatch:
    """Finds the largest batch whose step fits into `memory`, and fits the step for it.

    A batch fits if the step compiled with the plans that take the least memory does: one compile per size. Sizes
    double until one does not fit; memory is taken to grow linearly with the batch, which places the next
    size, and the interval is at least halved every second time. Only the largest size is fitted by `fit`.

    Args:
        make: for a batch size, the step and its arguments (arrays or `jax.ShapeDtypeStruct`s), as for `fit`.
        memory, device, remat_policy, static_argnums, donate_argnums, compiler_options, progress: as in `fit`.
        low, high: sizes to look between, both included; `high=None` doubles without end.
        multiple_of: only multiples of it are tried.
        max_compiles: of the final `fit`.

    Returns:
        The size with its step. `next_batch`, one multiple above, was compiled and does not fit, unless `high` was
        reached.

    Raises:
        BudgetError: not even `low` fits, or no multiple lies between `low` and `high`.
        PolicyError, CompileError: as `fit`.
    """
    first = -(-max(low, 1) // max(multiple_of, 1))
    last = None if high is None else high // max(multiple_of, 1)
    if multiple_of < 1 or low < 1 or (last is not None and last < first):
        raise BudgetError(
            f"low={low}, high={high}, multiple_of={multiple_of}: expected positive numbers with a multiple "
            "of multiple_of between low and high"
        )
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
    return _BatchSearch(make, options, multiple_of).run(first, last)


class _BatchSearch:
    """The search of `max_batch`, in units of `multiple_of`."""

    def __init__(self, make: Any, options: Options, unit: int) -> None:
        self.make, self.options, self.unit = make, options, unit
        self.history: list[BatchTrial] = []
        self.compiles = 0
        self.kept: tuple[int, Job, Knob, Trial] | None = None
        self.refused: Trial | None = None

    def run(self, first: int, last: int | None) -> MaxBatch:
        """Finds the size, then fits its step."""
        try:
            size, above = _largest(self._total, self.options.limit_bytes, first, last)
            if size is None:
                assert self.refused is not None
                error = too_large([self.refused], self.options.limit_bytes)
                raise BudgetError(
                    f"a batch of {first * self.unit} does not fit: {error}",
                    smallest_peak_bytes=error.smallest_peak_bytes,
                )
            assert self.kept is not None
            _, job, knob, least = self.kept
            before = len(job.trials)
            fitted = finish(job, knob, known=[least])
            self.compiles += len(job.trials) - before
        finally:
            if self.kept is not None:
                self.kept[1].forget()
        return MaxBatch(
            batch=size * self.unit,
            fitted=fitted,
            history=tuple(self.history),
            next_batch=None if above is None else above * self.unit,
            compiles=self.compiles,
        )

    def _total(self, size: int) -> int:
        """Compiles the step of a size with the least memory; keeps the job of the largest that fits."""
        batch = size * self.unit
        said = self.options.progress
        step, args = self.make(batch)
        options = replace(self.options, progress=lambda line: said(f"batch {batch}: {line}"))
        job = Job(step, tuple(args), {}, options)
        with planning(options.progress):
            knob = choose_knob(job)
            trial = knob.least()
            raise_interrupt()  # plans that ended early are not the smallest
        self.compiles += len(job.trials)
        self.history.append(BatchTrial(batch, trial.total_bytes, trial.fits))
        if trial.fits and (self.kept is None or size > self.kept[0]):
            if self.kept is not None:
                self.kept[1].forget()
            self.kept = (size, job, knob, trial)
        else:
            self.refused = trial
            job.forget()
        return trial.total_bytes


def _largest(
    total: Callable[[int], int], limit_bytes: int, first: int, last: int | None
) -> tuple[int | None, int | None]:
    """Returns the largest size in `first..last` whose total is within a limit, and the next one if tried.

    Args:
        total: bytes of a size, expected to rise; each size is asked for once.
        limit_bytes: what may be used.
        first, last: the range; `last=None` is without end.
    """
    points = [(first, total(first))]
    if points[0][1] > limit_bytes:
        return None, first
    low = first
    high: int | None = None
    halve = False
    while True:
        if high is not None and high - low == 1:
            return low, high
        if high is None and low == last:
            return low, None
        size = _next_size(points, limit_bytes, low, high, last)
        if halve and high is not None:
            size = (low + high) // 2
        width = None if high is None else high - low
        used = total(size)
        points.append((size, used))
        if used <= limit_bytes:
            low = size
        else:
            high = size
        # A prediction that did not halve the interval is followed by a halving.
        halve = width is not None and high is not None and 2 * (high - low) > width and not halve


def _next_size(
    points: Sequence[tuple[int, int]],
    limit_bytes: int,
    low: int,
    high: int | None,
    last: int | None,
) -> int:
    """Where a line through the two points nearest to the limit meets it, kept inside the interval."""
    guess = 2 * low
    if len(points) > 1:
        near = sorted(points, key=lambda p: (abs(p[1] - limit_bytes), p[0]))[:2]
        (a, total_a), (b, total_b) = sorted(near)
        slope = (total_b - total_a) / (b - a)
        if slope > 0:
            guess = int(a + (limit_bytes - total_a) / slope)
    if high is None:
        guess = max(min(guess, _FURTHEST * low), low + 1)
        return guess if last is None else min(guess, last)
    return max(min(guess, high - 1), low + 1)
