"""Policies side by side, as data: what each plans, and what the compiler makes of it.

Nothing is run: every policy's training step is planned and compiled for the device, attached or not. The
numbers that matter are the compiler's (`temp_bytes`, `hbm_traffic_bytes`); those of the plans are beside them.

Every policy is applied to the whole function. That is how remat's policies are meant to be used; jax's are
better applied to one block at a time, which only the author of a network can do. Read their rows so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat.api import checkpoint, plan
from remat.compiler.compile import compile_report
from remat.compiler.targets import target_device
from remat.core.errors import CompileError
from remat.core.interrupt import Progress, or_log
from remat.pictures import page
from remat.pictures.style import PlotError
from remat.pictures.tradeoff import Kind, Point, Tradeoff
from remat.plans.plan import Plan
from remat.plans.words import human_bytes, human_flops, human_seconds, table
from remat.policies import POLICIES
from remat.policies.base import as_policy, describe_options
from remat.resolve import JaxPolicy, Off, priced_for, resolve

__all__ = [
    "DEFAULT_POLICIES",
    "Comparison",
    "Row",
    "compare",
    "compare_table",
    "drawn",
    "iter_compare",
]

DEFAULT_POLICIES: tuple[str, ...] = (
    "none",
    "full",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "min_cut",
    "low_memory",
)
"""No rematerialization, keeping nothing (ours and jax's), jax's hand-picked policies, and ours."""

_COLUMNS = (
    "policy", "kept", "temp", "traffic", "matmuls", "convs", "repeated", "planned", "compiled", "roofline",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One policy's numbers; None where there is none to be had.

    Attributes:
        policy: its name, with the settings that are not the default.
        saved_bytes: kept for the backward pass beyond arguments, as planned; None for jax's policies, of which
            no public function tells.
        temp_bytes: the compiler's memory for everything that is neither argument nor result.
        hbm_traffic_bytes, matmuls, convolutions: of the compiled program, per step.
        recomputed_flops: operations that run again, as planned; None for jax's policies.
        plan_seconds: wall time of tracing and planning; `compile_seconds`: of tracing, lowering, compiling.
        roofline_seconds: estimate of one step; None if the device's rates are not known.
        error: why the numbers are missing; None if all went well.
    """

    policy: str
    saved_bytes: int | None = None
    temp_bytes: int | None = None
    hbm_traffic_bytes: int | None = None
    matmuls: int | None = None
    convolutions: int | None = None
    recomputed_flops: int | None = None
    plan_seconds: float | None = None
    compile_seconds: float | None = None
    roofline_seconds: float | None = None
    error: str | None = None


class Comparison(tuple[Row, ...]):
    """The rows of a comparison; a notebook shows them as a table and a picture."""

    __slots__ = ()

    def __str__(self) -> str:
        return compare_table(self)

    def _repr_html_(self) -> str:
        has_points = any(_time_of(self, row) is not None for row in self)
        return page.result(compare_table(self), drawn(self, "") if has_points else None)


def compare(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    policies: Sequence[Any] = DEFAULT_POLICIES,
    device: str | None = None,
    argnums: int | Sequence[int] = 0,
    progress: Progress | None = None,
    compile: bool = True,
) -> Comparison:
    """Compiles `jax.value_and_grad(remat.checkpoint(function, remat_policy=p), argnums)` for every policy.

    Args:
        function: a loss: a function of pytrees of arrays that returns a scalar.
        args: its arguments: arrays or `jax.ShapeDtypeStruct`s.
        policies: whatever `remat_policy=` accepts: names of ours or of jax's, policy objects, plans.
        device: None for the attached default device; or one that need not be there, `"h200"`.
        argnums: which arguments are differentiated, as in `jax.grad`.
        progress: called with one line whenever something that takes time begins.
        compile: False leaves out the compiler and its numbers.

    Returns:
        One row per policy, in the order given. A policy that fails has a row with its `error`.
    """
    rows = iter_compare(
        function,
        args,
        policies=policies,
        device=device,
        argnums=argnums,
        progress=progress,
        compile=compile,
    )
    return Comparison(rows)


def iter_compare(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    policies: Sequence[Any] = DEFAULT_POLICIES,
    device: str | None = None,
    argnums: int | Sequence[int] = 0,
    progress: Progress | None = None,
    compile: bool = True,
) -> Iterator[Row]:
    """Yields the rows of `compare` one by one, so that an interrupted comparison keeps what it has."""
    job = _Job(function, tuple(args), device, argnums, compile, or_log(progress))
    for policy in policies:
        yield job.row(policy)


@dataclass(frozen=True)
class _Job:
    """One comparison: everything but the policy."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    device: str | None
    argnums: int | Sequence[int]
    compile: bool
    progress: Progress

    def row(self, policy: Any) -> Row:
        row = Row(_label(policy))
        try:
            policy = self._priced(policy)
            row = self._planned(row, policy)
            return self._compiled(row, policy) if self.compile else row
        except Exception as error:  # any failure of user code, jax or XLA is this policy's result
            return replace(row, error=f"{type(error).__name__}: {error}")

    def _priced(self, policy: Any) -> Any:
        try:
            device = target_device(self.device)
        except CompileError:
            device = None  # the compiler refuses it; what can be planned is planned
        return priced_for(policy, device)

    def _planned(self, row: Row, policy: Any) -> Row:
        resolved = resolve(policy)
        if isinstance(resolved, JaxPolicy):
            return row
        is_off = isinstance(resolved, Off)
        self.progress(f"{row.policy}: tracing and planning")
        start = time.perf_counter()
        made = plan(
            self.function,
            *self.args,
            remat_policy="save_all" if is_off else policy,
            argnums=self.argnums,
        )
        return replace(
            row,
            saved_bytes=made.baseline_saved_bytes if is_off else made.saved_bytes,
            recomputed_flops=0 if is_off else made.recompute_flops,
            plan_seconds=None if is_off else time.perf_counter() - start,
        )

    def _compiled(self, row: Row, policy: Any) -> Row:
        self.progress(f"{row.policy}: compiling for {self.device or jax.default_backend()}")
        argnums = self.argnums if isinstance(self.argnums, int) else tuple(self.argnums)
        step = jax.value_and_grad(checkpoint(self.function, remat_policy=policy), argnums)
        report = compile_report(step, *self.args, device=self.device)
        return replace(
            row,
            temp_bytes=report.temp_bytes,
            hbm_traffic_bytes=report.hbm_traffic_bytes,
            matmuls=report.matmuls_executed,
            convolutions=report.convolutions_executed,
            compile_seconds=report.compile_seconds,
            roofline_seconds=report.roofline_seconds,
        )


def _label(policy: Any) -> str:
    if policy is None:
        return "none"
    if isinstance(policy, str):
        return policy
    if isinstance(policy, Plan):
        return f"plan by {policy.policy_name}"
    found = None if isinstance(policy, type) else as_policy(policy)
    if found is not None:
        options = describe_options(found)
        return f"{found.name}({options})" if options else found.name
    return getattr(policy, "__name__", None) or str(policy)


def compare_table(rows: Sequence[Row]) -> str:
    """Returns rows as a table for a terminal: columns without any number left out, errors below it."""
    columns = list(zip(_COLUMNS, *map(_cells, rows), strict=True))
    shown = [c for c in columns if c[0] in ("policy", "temp") or set(c[1:]) - {"-", "0"}]
    lines = table(list(zip(*shown, strict=True)), "<" + ">" * (len(shown) - 1), indent=0)
    lines += [f"{row.policy} failed: {' '.join(row.error.split())}" for row in rows if row.error]
    return "\n".join(lines)


def drawn(rows: Sequence[Row], title: str) -> Tradeoff:
    """Returns rows as they are drawn: memory against time, or traffic where the rates of the device are not known.

    Raises:
        PlotError: no row has numbers from the compiler.
    """
    found = [(row, _time_of(rows, row)) for row in rows]
    points = tuple(
        Point(row.policy, _kind(row.policy), row.temp_bytes, cost)
        for row, cost in found
        if cost is not None and row.temp_bytes is not None
    )
    if not points:
        raise PlotError("no row has memory and traffic from the compiler: there is nothing to draw")
    missing = len(rows) - len(points)
    note = f" ({missing} failed or not compiled)" if missing else ""
    is_timed = _are_timed(rows)
    return Tradeoff(
        title=f"{title or 'Policies compared'}{note}",
        points=points,
        memory="temporary memory, compiled",
        cost="one step, roofline estimate" if is_timed else "device memory traffic per step",
        cost_is_bytes=not is_timed,
        whole=next((point.cost for point in points if point.kind == "none"), 0.0),
        share="share of no remat",
    )


def _are_timed(rows: Sequence[Row]) -> bool:
    compiled = [row for row in rows if row.temp_bytes is not None]
    return all(row.roofline_seconds is not None for row in compiled)


def _time_of(rows: Sequence[Row], row: Row) -> float | None:
    return row.roofline_seconds if _are_timed(rows) else row.hbm_traffic_bytes


def _kind(policy: str) -> Kind:
    if policy == "none":
        return "none"
    ours = policy.partition("(")[0].removeprefix("plan by ")
    return "remat" if ours in POLICIES else "jax"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.policy,
        human_bytes(row.saved_bytes),
        "failed" if row.error else human_bytes(row.temp_bytes),
        human_bytes(row.hbm_traffic_bytes),
        "-" if row.matmuls is None else str(row.matmuls),
        "-" if row.convolutions is None else str(row.convolutions),
        human_flops(row.recomputed_flops),
        human_seconds(row.plan_seconds),
        human_seconds(row.compile_seconds),
        human_seconds(row.roofline_seconds),
    )
