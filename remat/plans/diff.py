"""Compares two plans of the same function, or of two versions of it. Plain data, no jax.

Operators are matched by what they compute and where the user's code asked for it, so that an inserted layer does
not make every number differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from remat.core.graph import Graph, Op
from remat.plans.differences import Change, PlanDiff, Repetition
from remat.plans.graph_diff import graph_difference, op_kind
from remat.plans.record import PlanRecord, Saved
from remat.plans.steps import Schedule

__all__ = ["diff"]


def diff(old: PlanRecord, new: PlanRecord) -> PlanDiff:
    """Compares two plans.

    Values and operators are matched by number if both plans are of the same function (equal fingerprints),
    otherwise by primitive, shape, scope and source line; what is left, with the lines, then the scope, then
    the shape ignored.

    Args:
        old, new: any plans.

    Returns:
        The differences; false exactly if `old == new`. Linear in the size of the plans.
    """
    if old == new:
        return PlanDiff()
    matches = _matched(old.graph, new.graph)
    only_old, only_new, changed = _kept(old, new, matches)
    repetitions = _repetitions(old, new, matches)
    same_steps = old.schedule == new.schedule
    function = graph_difference(old.graph, new.graph)
    found = PlanDiff(
        function=function,
        settings=_changes(old, new, _is_setting),
        totals=_changes(old, new, _is_total),
        only_old=only_old,
        only_new=only_new,
        changed=changed,
        more=tuple(entry for entry in repetitions if entry.new_times > entry.old_times),
        less=tuple(entry for entry in repetitions if entry.new_times < entry.old_times),
    )
    decisions = (*only_old, *only_new, *changed, *repetitions)
    found = replace(found, order_changed=not (same_steps or function or decisions))
    return _with_others(_with_loops(found, old, new), old, new)


def _is_total(name: str, value: Any) -> bool:
    # A budget is a setting, though in bytes.
    measured = name.endswith(("_bytes", "_flops", "_seconds")) and not name.startswith("budget")
    return measured and isinstance(value, (int, float))


def _is_setting(name: str, value: Any) -> bool:
    return not _is_total(name, value) and not isinstance(value, (tuple, Graph, Schedule))


def _compared() -> Iterator[str]:
    return (item.name for item in fields(PlanRecord) if item.compare)


def _changes(
    old: PlanRecord, new: PlanRecord, chosen: Callable[[str, Any], bool]
) -> tuple[Change, ...]:
    found = []
    for name in _compared():
        was, now = getattr(old, name), getattr(new, name)
        if was != now and chosen(name, now if was is None else was):
            found.append(Change(name, was, now))
    return tuple(found)


@dataclass(frozen=True)
class _Matches:
    """Old ids to new ones."""

    ops: dict[int, int]
    values: dict[int, int]


def _matched(old: Graph, new: Graph) -> _Matches:
    if old.fingerprint() == new.fingerprint():
        same_ops, same_values = range(len(old.ops)), range(len(old.values))
        return _Matches(
            dict(zip(same_ops, same_ops, strict=True)),
            dict(zip(same_values, same_values, strict=True)),
        )
    ops = _matched_ops(old, new)
    values: dict[int, int] = {}
    for a, b in ops.items():
        values.update(zip(old.ops[a].outputs, new.ops[b].outputs, strict=False))
    for name in ("inputs", "cotangents", "constants"):
        theirs, ours = getattr(old, name), getattr(new, name)
        if len(theirs) == len(ours):
            values.update(zip(theirs, ours, strict=True))
        else:
            by_label = [
                [(value, graph.values[value].label) for value in ids]
                for graph, ids in ((old, theirs), (new, ours))
            ]
            values.update(_paired(*by_label))
    return _Matches(ops, values)


def _matched_ops(old: Graph, new: Graph) -> dict[int, int]:
    """Pairs operators that are alike in ever fewer respects, those that come first with each other."""
    found: dict[int, int] = {}
    left_old, left_new = list(old.ops), list(new.ops)
    for key in _KEYS:
        keyed = [
            [(op.id, key(graph, op)) for op in ops]
            for graph, ops in ((old, left_old), (new, left_new))
        ]
        found.update(_paired(*keyed))
        taken = set(found.values())
        left_old = [op for op in left_old if op.id not in found]
        left_new = [op for op in left_new if op.id not in taken]
    return found


def _file(op: Op) -> str:
    return op.source.rpartition(":")[0]


_KEYS: tuple[Callable[[Graph, Op], Hashable | None], ...] = (
    lambda graph, op: (op_kind(graph, op), op.scope, op.source),
    lambda graph, op: (op_kind(graph, op), op.scope, _file(op)),
    lambda graph, op: (op_kind(graph, op), op.source) if op.source else None,
    # Another shape: only where something says that it is the same place.
    lambda graph, op: (op.name, op.phase, op.scope, op.source) if op.scope or op.source else None,
    lambda graph, op: (op.name, op.phase, op.scope, _file(op)) if op.scope or op.source else None,
)
"""What operators of different graphs must have in common, strictest first; None matches nothing."""


def _paired(
    old: Iterable[tuple[int, Hashable | None]], new: Iterable[tuple[int, Hashable | None]]
) -> dict[int, int]:
    """Pairs ids with equal keys, in order."""
    waiting: dict[Hashable, list[int]] = {}
    for number, key in new:
        if key is not None:
            waiting.setdefault(key, []).append(number)
    queues = {key: iter(numbers) for key, numbers in waiting.items()}
    pairs: dict[int, int] = {}
    for number, key in old:
        partner = next(queues.get(key, iter(())), None)
        if partner is not None:
            pairs[number] = partner
    return pairs


def _kept(
    old: PlanRecord, new: PlanRecord, matches: _Matches
) -> tuple[tuple[Saved, ...], tuple[Saved, ...], tuple[tuple[Saved, Saved], ...]]:
    entries = {entry.value: entry for entry in new.saved}
    only_old, changed = [], []
    for entry in old.saved:
        partner = entries.pop(matches.values.get(entry.value, -1), None)
        if partner is None:
            only_old.append(entry)
        elif (entry.form, entry.label) != (partner.form, partner.label):
            changed.append((entry, partner))
    return tuple(only_old), tuple(entries.values()), tuple(changed)


def _repetitions(old: PlanRecord, new: PlanRecord, matches: _Matches) -> tuple[Repetition, ...]:
    entries = {entry.op: entry for entry in new.recomputed}
    found = []
    for entry in old.recomputed:
        partner = entries.pop(matches.ops.get(entry.op, -1), None)
        if partner is None:
            found.append(Repetition(entry, entry.times, 0))
        elif partner.times != entry.times:
            more = partner if partner.times > entry.times else entry
            found.append(Repetition(more, entry.times, partner.times))
    found += [Repetition(entry, 0, entry.times) for entry in entries.values()]
    return tuple(found)


def _with_loops(found: PlanDiff, old: PlanRecord, new: PlanRecord) -> PlanDiff:
    theirs, ours = ({entry.path: entry for entry in plan.loops} for plan in (old, new))
    both = [path for path in theirs if path in ours]
    inner = [(path, diff(theirs[path].plan, ours[path].plan)) for path in both]
    lengths = [Change(path, theirs[path].length, ours[path].length) for path in both]
    chunks = [Change(path, theirs[path].chunk, ours[path].chunk) for path in both]
    return replace(
        found,
        loops=tuple((path, entry) for path, entry in inner if entry),
        loops_only_old=tuple(entry for path, entry in theirs.items() if path not in ours),
        loops_only_new=tuple(entry for path, entry in ours.items() if path not in theirs),
        loop_lengths=tuple(change for change in lengths if change.old != change.new),
        loop_chunks=tuple(change for change in chunks if change.old != change.new),
    )


def _with_others(found: PlanDiff, old: PlanRecord, new: PlanRecord) -> PlanDiff:
    """Adds the fields that differ and of which nothing says so yet."""
    kept = found.only_old or found.only_new or found.changed
    repeated = found.more or found.less
    loops = (
        found.loops
        or found.loops_only_old
        or found.loops_only_new
        or found.loop_lengths
        or found.loop_chunks
    )
    said = {change.name for change in (*found.settings, *found.totals)}
    explained = {
        "graph": found.function,
        "saved": kept or found.function,
        "recomputed": repeated or found.function,
        "schedule": kept or repeated or found.order_changed or found.function,
        "loops": loops,
    }
    said.update(name for name, reason in explained.items() if reason)
    differ = (name for name in _compared() if getattr(old, name) != getattr(new, name))
    return replace(found, others=tuple(name for name in differ if name not in said))
