"""The differences between two plans, as data and as text. Plain data, no jax; `remat.plans.diff` finds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from remat.plans.record import Certificate, LoopRecord, Recomputed, Saved
from remat.plans.report import (
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

__all__ = ["Change", "PlanDiff", "Repetition"]


@dataclass(frozen=True)
class Change:
    """A field of a plan that is not what it was."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Repetition:
    """An operator that runs again more or less often than before.

    Attributes:
        entry: the operator, as the plan lists it that repeats it more often.
        old_times, new_times: how often it runs again in the old and in the new plan.
    """

    entry: Recomputed
    old_times: int
    new_times: int


@dataclass(frozen=True)
class PlanDiff:
    """How a plan differs from an older one; false if they are equal.

    Attributes:
        function: how the joint graphs first differ, empty if they have the same fingerprint.
        settings: policy, options, budget, status and other fields of one line that differ.
        totals: the totals that differ: bytes, operations, seconds, loops included.
        only_old, only_new: values kept by one of the plans alone, as listed there.
        changed: values kept by both in another form or, in another function, of another shape: old and new.
        more, less: operators that run again more often, and less often, than before.
        order_changed: the same values are kept and the same operators repeated, in another order.
        loops: loops that both plans have and that are planned differently, by path.
        loops_only_old, loops_only_new: loops of one of the plans alone.
        loop_lengths: loops of another number of iterations; `Change.name` is the path.
        loop_chunks: loops cut into other chunks; `Change.name` is the path.
        others: names of the other fields that differ, for instance `notes` or `graph` (its names and lines).
    """

    function: str = ""
    settings: tuple[Change, ...] = ()
    totals: tuple[Change, ...] = ()
    only_old: tuple[Saved, ...] = ()
    only_new: tuple[Saved, ...] = ()
    changed: tuple[tuple[Saved, Saved], ...] = ()
    more: tuple[Repetition, ...] = ()
    less: tuple[Repetition, ...] = ()
    order_changed: bool = False
    loops: tuple[tuple[str, PlanDiff], ...] = ()
    loops_only_old: tuple[LoopRecord, ...] = ()
    loops_only_new: tuple[LoopRecord, ...] = ()
    loop_lengths: tuple[Change, ...] = ()
    loop_chunks: tuple[Change, ...] = ()
    others: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self))

    def __str__(self) -> str:
        return self.format()

    def format(self, top: int = 12) -> str:
        """Returns the differences as text.

        Args:
            top: how many rows to list of the values and of the operators; identical ones share a row.
        """
        return "\n".join(_report(self, top)) if self else "The plans are equal."


def _report(found: PlanDiff, top: int) -> list[str]:
    lines: list[str] = []
    if found.function:
        loops = found.loops or found.loops_only_old or found.loops_only_new
        why = " (what a loop keeps is among its results: this alone may be why)" if loops else ""
        lines.append(f"The joint graphs differ{why}: {found.function}.")
    lines += _settings(found.settings)
    lines += _totals(found.totals)
    lines += _kept_rows("No longer kept", found.only_old, top)
    lines += _kept_rows("Kept now", found.only_new, top)
    lines += _changed_rows(found.changed, top)
    lines += _repetition_rows("Runs again more often", found.more, top)
    lines += _repetition_rows("Runs again less often", found.less, top)
    if found.order_changed:
        lines.append("The same is kept and repeated, in another order.")
    lines += _loop_rows(found, top)
    if found.others:
        lines.append(f"Also changed: {', '.join(found.others)}.")
    return lines


def _settings(changes: Sequence[Change]) -> list[str]:
    return [f"{change.name}: {_shown(change.old)} -> {_shown(change.new)}" for change in changes]


def _shown(item: Any) -> str:
    if isinstance(item, Certificate):
        return f"{item.kind} {item.value:,} (bound {item.bound:,})"
    return repr(item) if item in (None, "") else str(item)


def _totals(changes: Sequence[Change]) -> list[str]:
    if not changes:
        return []
    rows = []
    for change in changes:
        unit, human = next(u for u in _UNITS.items() if change.name.endswith(u[0]))
        known = change.old and change.new is not None
        share = f"{(change.new - change.old) / change.old:+.1%}" if known else ""
        name = change.name.removesuffix(unit).replace("_", " ")
        name += " time" if unit == "_seconds" else ""
        rows.append((name, human(change.old), "->", human(change.new), share))
    return ["Totals:", *table(rows, "<><>>")]


_UNITS: dict[str, Callable[[Any], str]] = {
    "_bytes": human_bytes,
    "_flops": human_flops,
    "_seconds": human_seconds,
}


def _kept_key(entry: Saved) -> Hashable:
    scope = numberless_scope(entry.scope)
    return (entry.label, entry.form, entry.op, entry.tags, scope, entry.source, entry.is_input)


def _kept_rows(title: str, entries: Sequence[Saved], top: int) -> list[str]:
    if not entries:
        return []
    groups = grouped(entries, _kept_key)
    groups.sort(key=lambda group: (group[0].is_input, -sum(e.nbytes for e in group)))
    paid = sum(entry.nbytes for entry in entries if not entry.is_input)
    rows = [_kept_row(group) for group in groups[:top]]
    lines = [
        f"{title}: {counted(len(entries), 'value')}, {human_bytes(paid)}",
        *table(rows, "><<<<"),
    ]
    return lines + _rest(sum(map(len, groups[top:])))


def _kept_row(group: Sequence[Saved]) -> tuple[str, ...]:
    entry = group[0]
    form = entry.label if entry.form == "raw" else f"{entry.label} as {entry.form}"
    made = "an argument" if entry.is_input else " ".join((entry.op, *map(repr, entry.tags)))
    size = human_bytes(sum(e.nbytes for e in group))
    return size, _repeat(len(group)), form, made, _where(group)


def _changed_rows(pairs: Sequence[tuple[Saved, Saved]], top: int) -> list[str]:
    if not pairs:
        return []
    groups = grouped(pairs, lambda pair: (_kept_key(pair[0]), _kept_key(pair[1])))
    groups.sort(key=lambda group: -sum(max(a.nbytes, b.nbytes) for a, b in group))
    rows = []
    for group in groups[:top]:
        (old, new), sizes = group[0], [sum(pair[i].nbytes for pair in group) for i in (0, 1)]
        change = f"{old.label} {old.form} -> {new.label} {new.form}"
        size = f"{human_bytes(sizes[0])} -> {human_bytes(sizes[1])}"
        rows.append((size, _repeat(len(group)), change, new.op, _where([b for _, b in group])))
    title = f"Kept in another form or shape: {counted(len(pairs), 'value')}"
    return [title, *table(rows, "><<<<"), *_rest(sum(map(len, groups[top:])))]


def _repetition_rows(title: str, entries: Sequence[Repetition], top: int) -> list[str]:
    if not entries:
        return []

    def cost(group: Sequence[Repetition]) -> int:
        return sum(e.entry.flops * abs(e.new_times - e.old_times) for e in group)

    def key(item: Repetition) -> Hashable:
        entry = item.entry
        place = (numberless_scope(entry.scope), entry.source)
        return (entry.name, entry.label, *place, item.old_times, item.new_times)

    groups = sorted(grouped(entries, key), key=lambda group: -cost(group))
    rows = []
    for group in groups[:top]:
        item = group[0]
        times = f"{item.old_times} -> {item.new_times}"
        where = _where([e.entry for e in group])
        name = f"{item.entry.name} {_repeat(len(group))}".rstrip()
        rows.append((human_flops(cost(group)), times, name, item.entry.label, where))
    head = f"{title}: {counted(len(entries), 'operator')}, {human_flops(cost(entries))}"
    return [head, *table(rows, "><<<<"), *_rest(sum(map(len, groups[top:])))]


def _loop_rows(found: PlanDiff, top: int) -> list[str]:
    lines = []
    for word, loops in (("Gone", found.loops_only_old), ("New", found.loops_only_new)):
        lines += [f"{word}: loop {entry.path}, {entry.length} iterations" for entry in loops]
    chunks = {change.name: change for change in found.loop_chunks}
    for change in found.loop_lengths:
        if change.name not in chunks:
            lines.append(f"Loop {change.name}: {change.old} -> {change.new} iterations")
    for path, change in chunks.items():
        lines.append(f"Loop {path}: {_chunks(change.old)} -> {_chunks(change.new)}")
    for path, inner in found.loops:
        if path in chunks and 1 in (chunks[path].old, chunks[path].new):
            continue  # a body and a chunk have nothing in common
        lines.append(f"Loop {path}, one {'iteration' if path not in chunks else 'chunk'}:")
        lines += [f"  {line}" for line in _report(inner, top)]
    return lines


def _chunks(trips: int) -> str:
    return f"chunks of {trips} iterations" if trips > 1 else "whole"


def _where(entries: Sequence[Saved | Recomputed]) -> str:
    """The place of alike entries: their scope, with block numbers blanked out if they are several."""
    entry = entries[0]
    one = len({e.scope for e in entries}) == 1
    scope = short_scope(entry.scope) if one else numberless_scope(entry.scope)
    return "  ".join(part for part in (short_source(entry.source), scope) if part)


def _repeat(count: int) -> str:
    return f"x{count}" if count > 1 else ""


def _rest(count: int) -> list[str]:
    return [f"  and {count} more"] if count else []
