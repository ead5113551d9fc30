"""The printed plan: what is kept, what runs again, what that costs, and why.

`describe` is `str(plan)`. Whatever repeats (the same value in every block of a network) is one row with a
count, so that the report of a deep network is as short as that of one block. Plain text, no jax.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from remat.core.cost import op_seconds
from remat.core.devices import get_device
from remat.core.graph import Graph, Op
from remat.plans.record import LoopRecord, PlanRecord, Recomputed, Saved
from remat.plans.summary import headline, share_of_step, share_of_time
from remat.plans.words import (
    counted,
    grouped,
    human_bytes,
    human_flops,
    human_seconds,
    numberless_scope,
    short_scope,
    short_source,
    table,
)

__all__ = [
    "counted",
    "describe",
    "grouped",
    "human_bytes",
    "human_flops",
    "human_seconds",
    "makers",
    "numberless_scope",
    "short_scope",
    "short_source",
    "table",
]

WIDTH = 98
"""Columns a line may take, indentation of loops apart; a single long word may exceed it."""

_MIN_LOOP_ROWS = 4
_PATH = re.compile(r"(?:/|[A-Za-z]:\\)[^\s,;()]+\.py\b")


def describe(plan: PlanRecord, top: int = 12) -> str:
    """Returns the explanation of a plan as text of about 100 columns.

    Args:
        plan: any plan.
        top: how many rows to list of the kept values and of the repeated operators; identical ones share a row.
    """
    lines = [*_header(plan), *_rewritten(plan), "", *_body(plan, top)]
    lines += _bullets(
        "Opaque operators (not looked into, and what was done about them):", plan.opaque
    )
    lines += _bullets("Notes:", plan.notes)
    return "\n".join(lines)


def _header(plan: PlanRecord) -> list[str]:
    options = f"({plan.options})" if plan.options else ""
    first = headline(plan)
    return [
        *_wrapped(f"memory  {first.memory}", 8, first=""),
        *_wrapped(f"time    {first.time}", 8, first=""),
        *_wrapped(f"proof   {first.proof}", 8, first=""),
        "",
        *_wrapped(f"remat plan by policy {plan.policy_name}{options}", 0),
        *_budget(plan),
        *_wrapped(f"status: {_status(plan)}; planned in {plan.solve_seconds:.2f} s", 0),
        *_wrapped(
            f"Seconds and peaks are estimates: roofline of {plan.device}, predicted memory. "
            "remat.compile_report asks the compiler.",
            0,
        ),
    ]


def _rewritten(plan: PlanRecord) -> list[str]:
    """At how many places the backward pass is computed from other values, by rule."""
    if not plan.graph.sites:
        return []
    rules = Counter(site.partition("@")[0] for site in plan.graph.sites)
    named = ", ".join(f"{rule} x{count}" for rule, count in sorted(rules.items()))
    return _wrapped(f"Rewritten before planning: {named}.", 0)


def _budget(plan: PlanRecord) -> list[str]:
    found, used, lines = plan.confirmed, plan.expected_peak_bytes, list[str]()
    if plan.budget_bytes is not None:
        # A share of a program without temporaries is a budget of no bytes.
        share = f", {used / plan.budget_bytes:.0%} of it used" if plan.budget_bytes else ""
        lines.append(
            f"budget: {human_bytes(plan.budget_bytes)} ({plan.budget_bytes:,} bytes){share}"
        )
    if found is not None:
        chosen = f", the choice of {found.compiles} plans" if found.compiles > 1 else ""
        lines.append(
            f"confirmed: {human_bytes(used)} compiled for {found.device} by jax {found.jax_version}{chosen}"
        )
    return lines


def _status(plan: PlanRecord) -> str:
    proof = plan.certificate
    if proof is None:
        return f"{plan.status}, no bound on how far from optimal"
    what, _, covers = proof.kind.partition("; ")  # of what, and which sequences the bound speaks of
    scope = f" ({covers})" if covers else ""
    if plan.status == "optimal":
        return f"optimal for the policy's objective, certified: {what} = {proof.value:,}{scope}"
    return (
        f"{plan.status}, within {proof.gap:.2%} of the bound: {what}, {proof.value:,} "
        f"against {proof.bound:,}{scope}"
    )


def _body(plan: PlanRecord, top: int) -> list[str]:
    lines = _summary(plan)
    lines += ["", *_kept(plan, top), "", *_again(plan, top)]
    for paths, entry in _distinct_loops(plan.loops):
        lines += ["", *_loop(paths, entry, top)]
    return lines


def _summary(plan: PlanRecord) -> list[str]:
    peak = "predicted peak (estimate)"
    rows = [
        ("", "no remat", "this plan", "ratio", "bytes"),
        ("kept for the backward pass", *_against(plan.baseline_saved_bytes, plan.saved_bytes)),
        (peak, *_against(plan.baseline_peak_bytes, plan.peak_bytes)),
        ("operations repeated", "-", human_flops(plan.recompute_flops), _share(plan), ""),
        (
            "time to repeat (estimate)",
            "-",
            human_seconds(plan.recompute_seconds),
            share_of_time(plan),
            "",
        ),
    ]
    lines = table(rows, "<>>><")
    if plan.loops:
        lines.append("  (A loop counts as one operator in the peak; see below for its body's.)")
    return lines


def _against(before: int, after: int) -> tuple[str, str, str, str]:
    ratio = f"{after / before:.0%}" if before else "-"
    return human_bytes(before), human_bytes(after), ratio, f"{before:,} -> {after:,}"


def _share(plan: PlanRecord) -> str:
    share = share_of_step(plan)
    return "-" if share is None else f"{share:+.1%}"


def _common_scope(scopes: Sequence[str]) -> str:
    return short_scope(scopes[0]) if len(set(scopes)) == 1 else numberless_scope(scopes[0])


def _is_loop_result(plan: PlanRecord, entry: Saved) -> bool:
    producer = plan.graph.values[entry.value].producer
    if producer is None:
        return False
    op = plan.graph.ops[producer]
    return op.loop is not None or (bool(plan.loops) and op.name == "scan")


def _kept(plan: PlanRecord, top: int) -> list[str]:
    def key(entry: Saved) -> Hashable:
        if _is_loop_result(plan, entry):
            return plan.graph.values[entry.value].producer
        place = (numberless_scope(entry.scope), entry.source)
        return (entry.label, entry.form, entry.op, entry.tags, *place, entry.why)

    kept = [entry for entry in plan.saved if not entry.is_input]
    arguments = [entry for entry in plan.saved if entry.is_input]
    groups = sorted(grouped(kept, key), key=lambda group: -_stored(group))
    title = (
        f"Kept for the backward pass: {counted(len(kept), 'value')}, {human_bytes(_stored(kept))}"
    )
    lines = [title + (", largest first:" if kept else ".")]
    rows = [_kept_row(plan, group) for group in groups[:top]]
    for line, group in zip(table(rows, "><<<<") if rows else [], groups[:top], strict=True):
        lines += [line, *_kept_why(plan, group)]
    rest = [entry for group in groups[top:] for entry in group]
    if rest:
        lines.append(f"  and {len(rest)} smaller, {human_bytes(_stored(rest))} together")
    if arguments:
        lines.append(
            f"  and {counted(len(arguments), 'argument')}, {human_bytes(_stored(arguments))}, alive anyway"
        )
    return lines


def _kept_row(plan: PlanRecord, group: Sequence[Saved]) -> tuple[str, ...]:
    entry, count = group[0], len(group)
    if _is_loop_result(plan, entry):
        return human_bytes(_stored(group)), "", counted(count, "array"), entry.op, ""
    label = entry.label if entry.form == "raw" else f"{entry.label} as {entry.form}"
    tags = " ".join(f"'{tag}'" for tag in entry.tags)
    times = f"x{count}" if count > 1 else ""
    made = f"{entry.op} {tags}".strip()
    return human_bytes(_stored(group)), times, label, made, short_source(entry.source)


def _kept_why(plan: PlanRecord, group: Sequence[Saved]) -> list[str]:
    entry = group[0]
    if _is_loop_result(plan, entry):
        path = plan.graph.ops[plan.graph.values[entry.value].producer or 0].loop or "the loop"
        return [f"{'':14}kept by the body of {path}, stacked over its iterations; see its report"]
    why = entry.why + (" (each)" if len(group) > 1 and "flops" in entry.why else "")
    if entry.form != "raw":
        why += f"; raw it would take {human_bytes(sum(e.raw_bytes for e in group))}"
    why += _otherwise(plan, group)
    scope = _common_scope([e.scope for e in group])
    return _wrapped(f"{scope}: {why}" if scope else why, 14)


def _otherwise(plan: PlanRecord, group: Sequence[Saved]) -> str:
    """What it would cost to make the values of a group again from the others that are kept."""
    graph, chip = plan.graph, get_device(plan.device)
    kept = frozenset(entry.value for entry in plan.saved)
    flops, seconds = 0, 0.0
    for entry in group:
        for op in makers(graph, entry.value, kept):
            if not op.recomputable:
                return ""  # then `why` says so
            flops += op.flops
            seconds += op_seconds(graph, op, chip)
    return f"; made again it would cost {human_flops(flops)}, {human_seconds(seconds)}"


def makers(graph: Graph, value: int, kept: frozenset[int]) -> list[Op]:
    """Returns the operators that make a value from what is kept beside it and from arguments."""
    found: dict[int, Op] = {}
    todo = [value]
    while todo:
        producer = graph.values[todo.pop()].producer
        if producer is not None and producer not in found:
            found[producer] = graph.ops[producer]
            todo += [v for v in graph.ops[producer].inputs if v not in kept]
    return list(found.values())


def _stored(entries: Iterable[Saved]) -> int:
    return sum(entry.nbytes for entry in entries)


def _again(plan: PlanRecord, top: int) -> list[str]:
    if not plan.recomputed:
        outside = " outside of the loops" if plan.loops else ""
        return [f"Nothing runs again in the backward pass{outside}."]
    groups = grouped(
        plan.recomputed, lambda e: (e.name, e.label, numberless_scope(e.scope), e.source)
    )
    groups.sort(key=lambda group: (-_repeated(group), -sum(e.nbytes * e.times for e in group)))
    runs = sum(entry.times for entry in plan.recomputed)
    lines = [
        f"Runs again in the backward pass: {counted(runs, 'operator')}, "
        f"{human_flops(_repeated(plan.recomputed))}, costliest first:"
    ]
    rows = [_again_row(group) for group in groups[:top]]
    lines += table(_fitted(rows), "><<<<")
    rest = [entry for group in groups[top:] for entry in group]
    if rest:
        runs = sum(entry.times for entry in rest)
        lines.append(f"  and {runs} cheaper, {human_flops(_repeated(rest))} together")
    return lines


def _again_row(group: Sequence[Recomputed]) -> tuple[str, ...]:
    entry, runs = group[0], sum(e.times for e in group)
    name = entry.name + (f" x{runs}" if runs > 1 else "")
    scope = _common_scope([e.scope for e in group])
    return human_flops(_repeated(group)), name, entry.label, short_source(entry.source), scope


def _repeated(entries: Iterable[Recomputed]) -> int:
    return sum(entry.flops * entry.times for entry in entries)


def _distinct_loops(loops: Iterable[LoopRecord]) -> list[tuple[tuple[str, ...], LoopRecord]]:
    """Loops planned alike together, under all their paths."""
    groups = grouped(loops, lambda loop: (loop.length, loop.chunk, loop.plan.digest()))
    return [(tuple(loop.path for loop in group), group[0]) for group in groups]


def _loop(paths: Sequence[str], entry: LoopRecord, top: int) -> list[str]:
    plan = entry.plan
    once, total = human_bytes(plan.saved_bytes), human_bytes(entry.length * plan.saved_bytes)
    name = f"Loop {paths[0]}" if len(paths) == 1 else f"Loops {', '.join(paths)} (alike), each"
    turns, one = counted(entry.length, "iteration"), "iteration"
    if entry.chunk > 1:
        turns = f"{counted(entry.length, 'chunk')} of {entry.chunk} iterations, run again in the backward pass,"
        one = "chunk"
    lines = _wrapped(
        f"{name}: {turns} that keep {once}, {total} in all. "
        f"Status {plan.status}. One {one} of {paths[0]}:",
        0,
    )
    body = _body(plan, max(_MIN_LOOP_ROWS, top // 2)) + _bullets("Notes:", plan.notes)
    return lines + [f"  {line}" if line else "" for line in body]


def _bullets(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    lines = ["", title]
    for item in items:
        text = _PATH.sub(lambda match: short_source(match.group()), item)
        lines += _wrapped(text, 4, first="  - ")
    return lines


def _wrapped(text: str, indent: int, first: str | None = None) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=margin if first is None else first,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fitted(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows whose last cell keeps the end of its text if the line would be too long."""
    columns = list(zip(*rows, strict=True))[:-1]
    room = max(16, WIDTH - sum(max(map(len, column)) + 2 for column in columns) - 2)
    return [
        (*rest, last if len(last) <= room else "..." + last[-(room - 3) :]) for *rest, last in rows
    ]
