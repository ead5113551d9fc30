"""How two plans differ, and how a function differs from the one a plan was made for. Plain data, no jax.

`first_difference` is for an error message: one paragraph about the first thing that is not as planned.
`diff` compares two plans of the same function, or of two versions of it: operators are matched by what they
compute and where the user's code asked for it, so that an inserted layer does not make every number differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from remat.core.graph import Graph, Op
from remat.plans.record import Certificate, LoopRecord, PlanRecord, Recomputed, Saved
from remat.plans.report import (
    human_bytes,
    human_flops,
    human_seconds,
    short_scope,
    short_source,
    table,
)
from remat.plans.steps import Schedule

__all__ = ["Change", "PlanDiff", "Repetition", "diff", "first_difference"]

# How far ahead an operator is looked for before it counts as changed instead of moved, and how many
# operators in a row must agree there.
_LOOK_AHEAD = 200
_AGREE = 3
_NUMBER = re.compile(r"(?<=[A-Za-z_.\[])\d+(?=\b|_|/|$)")


# --- graphs --------------------------------------------------------------------------------------------


def first_difference(
    planned: Graph, traced: Graph, *, inputs: Sequence[str] = (), loop: str = ""
) -> str:
    """Returns where a traced function first differs from the one that was planned, and what to do.

    Causes come before effects: the number of iterations, the arguments, what is differentiated, then the
    operators in the order of execution, then which values are results.

    Args:
        planned: the graph a plan was made for.
        traced: the graph the plan is to be applied to.
        inputs: names of `traced.inputs`, for instance `argument 0 leaf 3`; those it lacks are called by their
            number.
        loop: path of the loop (`scan0`), if the graphs are those of a loop body.

    Returns:
        One paragraph, empty if the graphs have the same fingerprint. Linear in the size of the graphs.
    """
    found = _difference(planned, traced, inputs)
    place = f"in the body of loop {loop}, " if loop else ""
    return f"{place}{found}. {_advice(planned, traced)}" if found else ""


def _difference(planned: Graph, traced: Graph, inputs: Sequence[str] = ()) -> str:
    if planned.fingerprint() == traced.fingerprint():
        return ""
    return (
        _multiplicity(planned, traced)
        or _given(planned, traced, "input", inputs)
        or _given(planned, traced, "constant", ())
        or _counts(planned, traced)
        or _cotangents(planned, traced)
        or _operators(planned, traced)
        or _roots(planned, traced)
        or _values(planned, traced)
    )


def _advice(planned: Graph, traced: Graph) -> str:
    def labels(graph: Graph) -> list[str]:
        return [graph.values[v].label for v in graph.inputs]

    if planned.multiplicity != traced.multiplicity:
        return "Plan again with remat.plan(...) for loops of this length."
    if len(planned.inputs) != len(traced.inputs):
        return (
            "Pass the same arguments (parameters and closed-over arrays included), or plan again with "
            "remat.plan(...)."
        )
    if labels(planned) != labels(traced):
        return "Plan again with remat.plan(...) and arguments of these shapes and dtypes."
    if len(planned.outputs) != len(traced.outputs):
        return "Return the same results, or plan again with remat.plan(...)."
    if len(planned.gradients) != len(traced.gradients):
        return "Differentiate the same arguments (argnums), or plan again with remat.plan(...)."
    return "Plan again with remat.plan(...)."


def _multiplicity(planned: Graph, traced: Graph) -> str:
    was, now = planned.multiplicity, traced.multiplicity
    if was == now:
        return ""
    return f"it ran {_times(was)} per call and runs {_times(now)} now"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _given(planned: Graph, traced: Graph, what: str, names: Sequence[str]) -> str:
    """Inputs, or constants: arrays that were closed over and known while tracing."""
    old, new = (_given_ids(graph, what) for graph in (planned, traced))
    pairs = list(zip_longest(old, new))
    changed = [i for i, (a, b) in enumerate(pairs) if _label(planned, a) != _label(traced, b)]
    if not changed:
        return ""
    index = changed[0]
    was, now = (_label(g, v) for g, v in zip((planned, traced), pairs[index], strict=True))
    read = _first_read(traced, pairs[index][1])
    name = _called(traced, what, index, names)
    if len(old) != len(new):
        return (
            f"it had {_count(len(old), what)} and has {len(new)} now; the first that differs, {name}, "
            f"was {was} and is {now} now{read}"
        )
    others = len(changed) - 1
    more = f" ({_count(others, f'other {what}')} changed too)" if others else ""
    return f"{name} was {was} and is {now} now{more}{read}"


def _given_ids(graph: Graph, what: str) -> tuple[int, ...]:
    return graph.inputs if what == "input" else graph.constants


def _label(graph: Graph, value: int | None) -> str:
    return "not there" if value is None else graph.values[value].label


def _called(graph: Graph, what: str, index: int, names: Sequence[str]) -> str:
    ids = _given_ids(graph, what)
    if index < min(len(names), len(ids)):
        return names[index]
    if what == "input" and index < len(ids) and ids[index] in graph.carried:
        return f"input {index} (the loop's carry)"
    if what == "input" and index < len(ids) and ids[index] in graph.invariant:
        return f"input {index} (the same in every iteration)"
    return f"{what} {index}"


def _first_read(graph: Graph, value: int | None) -> str:
    users = () if value is None else graph.users[value]
    return f"; it is first read by {_place(graph.ops[users[0]])}" if users else ""


def _place(op: Op) -> str:
    """An operator by its name and where the user's code asks for it."""
    where = ", ".join(part for part in (short_source(op.source), short_scope(op.scope)) if part)
    return f"{op.name} ({where})" if where else op.name


def _counts(planned: Graph, traced: Graph) -> str:
    """Results, gradients and cotangents, by their number; a changed function may be the cause."""
    for what in ("output", "gradient", "cotangent"):
        old, new = (len(getattr(graph, f"{what}s")) for graph in (planned, traced))
        if old != new:
            first = _operators(planned, traced)
            noun = "result" if what == "output" else what
            return f"it had {_count(old, noun)} and has {new} now" + (f"; {first}" if first else "")
    return ""


def _cotangents(planned: Graph, traced: Graph) -> str:
    pairs = zip(planned.cotangents, traced.cotangents, strict=True)
    for index, (old, new) in enumerate(pairs):
        was, now = planned.values[old].label, traced.values[new].label
        if was != now:
            return f"cotangent {index} was {was} and is {now} now"
    return ""


def _made(graph: Graph, op: Op) -> tuple[str, ...]:
    return tuple(graph.values[v].label for v in op.outputs)


def _kind(graph: Graph, op: Op) -> Hashable:
    return (op.name, op.phase, _made(graph, op))


def _operators(planned: Graph, traced: Graph) -> str:
    for index, (old, new) in enumerate(zip(planned.ops, traced.ops, strict=False)):
        same_kind = _kind(planned, old) == _kind(traced, new)
        if same_kind and (old.inputs, old.outputs) == (new.inputs, new.outputs):
            continue
        if same_kind:
            return f"operator {index}, {_place(new)}, {_rewired(planned, traced, old, new)}"
        moved = _moved(planned, traced, index)
        if moved:
            return moved
        if (old.name, old.phase) == (new.name, new.phase):
            was, now = _listed(_made(planned, old)), _listed(_made(traced, new))
            return f"operator {index}, {_place(new)}, computed {was} and computes {now} now"
        return (
            f"operator {index} was {_described(planned, old)} and is {_described(traced, new)} now"
        )
    more = len(traced.ops) - len(planned.ops)
    if not more:
        return ""
    graph, word = (traced, "new") if more > 0 else (planned, "gone")
    return _run_of(graph, min(len(planned.ops), len(traced.ops)), abs(more), word)


def _described(graph: Graph, op: Op) -> str:
    return f"{_place(op)} -> {_listed(_made(graph, op))} in the {op.phase} pass"


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels) if labels else "nothing"


def _moved(planned: Graph, traced: Graph, index: int) -> str:
    """Whether operators were inserted or left out at `index`: what comes after them goes on as before."""
    inserted, removed = _ahead(planned, traced, index), _ahead(traced, planned, index)
    if inserted and (not removed or inserted <= removed):
        return _run_of(traced, index, inserted, "new")
    return _run_of(planned, index, removed, "gone") if removed else ""


def _ahead(source: Graph, target: Graph, index: int) -> int:
    """How many operators of `target` come first before it goes on as `source` does; 0 if it does not."""
    wanted = [_kind(source, op) for op in source.ops[index : index + _AGREE]]
    if len(wanted) < _AGREE:
        return 0
    kinds = [_kind(target, op) for op in target.ops[index : index + _LOOK_AHEAD + _AGREE]]
    starts = range(1, len(kinds) - _AGREE + 1)
    return next((n for n in starts if kinds[n : n + _AGREE] == wanted), 0)


def _run_of(graph: Graph, index: int, count: int, word: str) -> str:
    first = f"operator {index}, {_described(graph, graph.ops[index])}, is {word}"
    return first if count == 1 else f"{first}, the first of {count}"


def _rewired(planned: Graph, traced: Graph, old: Op, new: Op) -> str:
    if len(old.inputs) != len(new.inputs):
        return f"read {_count(len(old.inputs), 'operand')} and reads {len(new.inputs)} now"
    for position, (was, now) in enumerate(zip(old.inputs, new.inputs, strict=True)):
        if was != now:
            first, second = _origin(planned, was), _origin(traced, now)
            if first == second:  # numbered otherwise
                first, second = f"value {was}, {first},", f"value {now}, {second},"
            return f"read {first} as operand {position} and reads {second} now"
    return f"gave values {list(old.outputs)} and gives values {list(new.outputs)} now"


def _origin(graph: Graph, value: int) -> str:
    """Where a value comes from."""
    entry = graph.values[value]
    if entry.producer is not None:
        op = graph.ops[entry.producer]
        return f"{entry.label} of operator {op.id}, {_place(op)}"
    for name in ("inputs", "cotangents", "constants"):
        ids = getattr(graph, name)
        if value in ids:
            return f"{name.removesuffix('s')} {ids.index(value)}, {entry.label}"
    return f"value {value}, {entry.label}"


def _roots(planned: Graph, traced: Graph) -> str:
    """Results and gradients, and the numbers of inputs and cotangents."""
    for name in ("outputs", "gradients", "inputs", "cotangents"):
        pairs = zip(getattr(planned, name), getattr(traced, name), strict=True)
        for index, (old, new) in enumerate(pairs):
            if old != new:
                what = "result" if name == "outputs" else name.removesuffix("s")
                return (
                    f"{what} {index} was value {old} ({_origin(planned, old)}) and is value {new} "
                    f"({_origin(traced, new)}) now"
                )
    return ""


def _values(planned: Graph, traced: Graph) -> str:
    """Values that nothing computes, or that are numbered otherwise."""
    for index, (old, new) in enumerate(zip_longest(planned.values, traced.values)):
        was = "not there" if old is None else _origin(planned, index)
        now = "not there" if new is None else _origin(traced, index)
        if was != now:
            return f"value {index} was {was} and is {now} now"
    return f"its values are numbered otherwise, {len(planned.values)} of them"


# --- plans ---------------------------------------------------------------------------------------------


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
    function = _difference(old.graph, new.graph)
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
    lambda graph, op: (_kind(graph, op), op.scope, op.source),
    lambda graph, op: (_kind(graph, op), op.scope, _file(op)),
    lambda graph, op: (_kind(graph, op), op.source) if op.source else None,
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


# --- text ----------------------------------------------------------------------------------------------


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


def _grouped(items: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    found: dict[Hashable, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _kept_key(entry: Saved) -> Hashable:
    scope = _blocks(entry.scope)
    return (entry.label, entry.form, entry.op, entry.tags, scope, entry.source, entry.is_input)


def _kept_rows(title: str, entries: Sequence[Saved], top: int) -> list[str]:
    if not entries:
        return []
    groups = _grouped(entries, _kept_key)
    groups.sort(key=lambda group: (group[0].is_input, -sum(e.nbytes for e in group)))
    paid = sum(entry.nbytes for entry in entries if not entry.is_input)
    rows = [_kept_row(group) for group in groups[:top]]
    lines = [
        f"{title}: {_count(len(entries), 'value')}, {human_bytes(paid)}",
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
    groups = _grouped(pairs, lambda pair: (_kept_key(pair[0]), _kept_key(pair[1])))
    groups.sort(key=lambda group: -sum(max(a.nbytes, b.nbytes) for a, b in group))
    rows = []
    for group in groups[:top]:
        (old, new), sizes = group[0], [sum(pair[i].nbytes for pair in group) for i in (0, 1)]
        change = f"{old.label} {old.form} -> {new.label} {new.form}"
        size = f"{human_bytes(sizes[0])} -> {human_bytes(sizes[1])}"
        rows.append((size, _repeat(len(group)), change, new.op, _where([b for _, b in group])))
    title = f"Kept in another form or shape: {_count(len(pairs), 'value')}"
    return [title, *table(rows, "><<<<"), *_rest(sum(map(len, groups[top:])))]


def _repetition_rows(title: str, entries: Sequence[Repetition], top: int) -> list[str]:
    if not entries:
        return []

    def cost(group: Sequence[Repetition]) -> int:
        return sum(e.entry.flops * abs(e.new_times - e.old_times) for e in group)

    def key(item: Repetition) -> Hashable:
        entry = item.entry
        place = (_blocks(entry.scope), entry.source)
        return (entry.name, entry.label, *place, item.old_times, item.new_times)

    groups = sorted(_grouped(entries, key), key=lambda group: -cost(group))
    rows = []
    for group in groups[:top]:
        item = group[0]
        times = f"{item.old_times} -> {item.new_times}"
        where = _where([e.entry for e in group])
        name = f"{item.entry.name} {_repeat(len(group))}".rstrip()
        rows.append((human_flops(cost(group)), times, name, item.entry.label, where))
    head = f"{title}: {_count(len(entries), 'operator')}, {human_flops(cost(entries))}"
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
    scope = short_scope(entry.scope) if one else _blocks(entry.scope)
    return "  ".join(part for part in (short_source(entry.source), scope) if part)


def _blocks(scope: str) -> str:
    """A scope with its block numbers blanked out, as in the printed plan."""
    return _NUMBER.sub("*", short_scope(scope))


def _repeat(count: int) -> str:
    return f"x{count}" if count > 1 else ""


def _rest(count: int) -> list[str]:
    return [f"  and {count} more"] if count else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
