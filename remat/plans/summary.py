"""A plan in a few lines: memory, time, proof, and rows of what is kept and of what runs again, loops included.

`headline` is what every report begins with, on paper and on a screen. Plain data, no jax.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from remat.core.cost import op_seconds
from remat.core.devices import get_device
from remat.plans.record import PlanRecord, Recomputed, Saved
from remat.plans.words import (
    counted,
    grouped,
    human_bytes,
    human_flops,
    human_seconds,
    numberless_scope,
)

__all__ = [
    "Headline",
    "Row",
    "again_rows",
    "headline",
    "kept_rows",
    "share_of_step",
    "share_of_time",
    "step_seconds",
    "totals",
]


@dataclass(frozen=True)
class Headline:
    """The three things that matter first, a line each.

    Attributes:
        memory: the peak, before and after.
        time: what runs again.
        proof: how good the plan is for certain, and whether a compiler confirmed it.
    """

    memory: str
    time: str
    proof: str


@dataclass(frozen=True)
class Row:
    """Values that are kept alike, or operators that run again alike.

    Attributes:
        value: names the first of them for `remat why`: its number, behind the path of its loop.
        times: how many there are; in a loop, in all iterations.
        amount: bytes that all of them take, or operations that all of them are.
        label: dtype and shape, with the form in which it is kept if that is another.
        made_by: the operator.
        scope, source: where it is in the user's code.
        why: what keeping one of them avoids; nothing of what runs again.
    """

    value: str
    times: int
    amount: int
    label: str
    made_by: str
    scope: str
    source: str
    why: str = ""


def headline(plan: PlanRecord) -> Headline:
    """Returns the first three lines of a plan's report."""
    return Headline(_memory(plan), _time(plan), _proof(plan))


def _memory(plan: PlanRecord) -> str:
    before, after = plan.baseline_peak_bytes, plan.peak_bytes
    text = f"{human_bytes(before)} -> {human_bytes(after)}"
    if before:
        text += (
            f" ({100 * (after - before) / before:+.0f} %)"
            if after != before
            else " (no less than without)"
        )
    text += ", predicted peak of temporaries"
    if plan.confirmed is not None:
        text += f"; {human_bytes(plan.confirmed.temp_bytes)} compiled"
    if plan.budget_bytes is not None:
        text += f"; budget {human_bytes(plan.budget_bytes)}"
    return text


def _time(plan: PlanRecord) -> str:
    if not plan.recompute_flops and not plan.recomputed and not plan.loops:
        return "nothing added: nothing runs again"
    share = share_of_step(plan)
    more = "" if share is None else f", {share:+.1%} operations"
    return f"+{human_seconds(plan.recompute_seconds)} per step{more} (estimate for {plan.device})"


def _proof(plan: PlanRecord) -> str:
    proof = plan.certificate
    if proof is None:
        text = "a heuristic: no bound on how far from optimal"
    elif plan.status == "optimal":
        text = f"certified optimal for {plan.policy_name}'s objective"
    else:
        text = f"within {proof.gap:.2%} of a proven bound"
    found = plan.confirmed
    if found is not None:
        return f"{text}; confirmed by the compiler for {found.device}"
    return f"{text}; not confirmed by a compiler"


def share_of_step(plan: PlanRecord) -> float | None:
    """Returns repeated operations relative to one step without rematerialization, None if that has none."""
    loops = sum(entry.length * entry.plan.recompute_flops for entry in plan.loops)
    step = sum(op.flops for op in plan.graph.ops) - loops
    return plan.recompute_flops / step if step > 0 else None


def step_seconds(plan: PlanRecord) -> float:
    """Returns the roofline estimate of one step without rematerialization, as `Plan.recompute_seconds` counts."""
    graph, device = plan.graph.plain or plan.graph, get_device(plan.device)
    paths = {entry.path for entry in plan.loops}
    outside = sum(op_seconds(graph, op, device) for op in graph.ops if op.loop not in paths)
    return outside + sum(entry.length * step_seconds(entry.plan) for entry in plan.loops)


def share_of_time(plan: PlanRecord) -> str:
    """Returns the repeated work as a share of `step_seconds`: `+4.1%`."""
    whole = step_seconds(plan)
    return f"+{plan.recompute_seconds / whole:.1%}" if whole > 0 else "-"


def kept_rows(plan: PlanRecord) -> list[Row]:
    """Returns what is kept beyond arguments, alike together, largest first.

    Of a loop the values that its body keeps, in all iterations; what else it hands to the backward pass is one row.
    """
    rows = []
    for group in grouped(_kept(plan, "", 1), lambda item: item.key):
        first = group[0].entry
        rows.append(
            Row(
                value=group[0].name,
                times=sum(item.times for item in group),
                amount=sum(item.nbytes for item in group),
                label=first.label if first.form == "raw" else f"{first.label} as {first.form}",
                made_by=first.op or "carry",
                scope=numberless_scope(first.scope),
                source=first.source,
                why=first.why,
            )
        )
    return sorted(rows, key=lambda row: -row.amount)


@dataclass(frozen=True)
class _Kept:
    """A kept value: what `remat why` calls it, its bytes in all, what those that are alike have in common."""

    name: str
    entry: Saved
    times: int
    nbytes: int
    key: Hashable


def _kept(plan: PlanRecord, path: str, times: int) -> list[_Kept]:
    found, returned = [], defaultdict[str, list[Saved]](list)
    loops = {loop.path: loop for loop in plan.loops}
    for entry in plan.saved:
        if entry.value in plan.graph.alive_anyway or entry.value in plan.graph.fixed:
            continue
        loop = _loop_of(plan, entry)
        if loop in loops:
            returned[loop].append(entry)
            continue
        place = (numberless_scope(entry.scope), entry.source)
        key = (path, entry.label, entry.form, entry.op, entry.tags, entry.why, *place)
        found.append(_Kept(f"{path}{entry.value}", entry, times, times * entry.nbytes, key))
    for name, entries in returned.items():
        loop = loops[name]
        inside = _kept(loop.plan, f"{path}{name}/", times * loop.length)
        rest = times * sum(entry.nbytes for entry in entries) - sum(item.nbytes for item in inside)
        if rest < 0:  # a chunk keeps less than what its iterations keep when they run again
            inside, rest = [], times * sum(entry.nbytes for entry in entries)
        found += inside
        if rest:
            first = replace(
                entries[0], label=f"other arrays of {name}" if inside else f"arrays of {name}"
            )
            found.append(_Kept(f"{path}{first.value}", first, 1, rest, (path, name)))
    return found


def _loop_of(plan: PlanRecord, entry: Saved) -> str | None:
    producer = plan.graph.values[entry.value].producer
    return None if producer is None else plan.graph.ops[producer].loop


def again_rows(plan: PlanRecord) -> list[Row]:
    """Returns what runs again in the backward pass, alike together, costliest first."""
    entries = list(_again(plan, "", 1))
    rows = []
    for group in grouped(entries, lambda item: item[1]):
        value, _, first, _ = group[0]
        rows.append(
            Row(
                value=value,
                times=sum(entry.times * times for _, _, entry, times in group),
                amount=sum(entry.flops * entry.times * times for _, _, entry, times in group),
                label=first.label,
                made_by=first.name,
                scope=numberless_scope(first.scope),
                source=first.source,
            )
        )
    return sorted(rows, key=lambda row: -row.amount)


def _again(
    plan: PlanRecord, path: str, times: int
) -> Iterator[tuple[str, Hashable, Recomputed, int]]:
    for entry in plan.recomputed:
        op = plan.graph.ops[entry.op]
        if op.loop is not None and any(loop.path == op.loop for loop in plan.loops):
            continue  # its body says what runs again
        key = (path, entry.name, entry.label, numberless_scope(entry.scope), entry.source)
        value = str(op.outputs[0]) if op.outputs else "-"
        yield f"{path}{value}", key, entry, times
    for loop in plan.loops:
        yield from _again(loop.plan, f"{path}{loop.path}/", times * loop.length)


def totals(plan: PlanRecord) -> tuple[str, str]:
    """Returns the titles of the two lists."""
    count = sum(item.times for item in _kept(plan, "", 1))
    runs = list(_again(plan, "", 1))
    operators = sum(entry.times * times for _, _, entry, times in runs)
    return (
        f"kept for the backward pass: {human_bytes(plan.saved_bytes)} of "
        f"{human_bytes(plan.baseline_saved_bytes)}, {counted(count, 'value')}",
        f"runs again: {counted(operators, 'operator')}, {human_flops(plan.recompute_flops)}"
        if operators
        else "nothing runs again",
    )
