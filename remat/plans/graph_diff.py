"""How a function differs from the one that a plan was made for. Plain data, no jax.

`first_difference` is for an error message: one paragraph about the first thing that is not as planned.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest

from remat.core.graph import Graph, Op
from remat.plans.report import counted, short_scope, short_source

__all__ = ["first_difference", "graph_difference", "op_kind"]

# How far ahead an operator is looked for before it counts as changed instead of moved, and how many
# operators in a row must agree there.
_LOOK_AHEAD = 200
_AGREE = 3


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
    found = graph_difference(planned, traced, inputs)
    place = f"in the body of loop {loop}, " if loop else ""
    return f"{place}{found}. {_advice(planned, traced)}" if found else ""


def graph_difference(planned: Graph, traced: Graph, inputs: Sequence[str] = ()) -> str:
    """Returns where two graphs first differ, as `first_difference`, but without place and advice."""
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
            f"it had {counted(len(old), what)} and has {len(new)} now; the first that differs, {name}, "
            f"was {was} and is {now} now{read}"
        )
    others = len(changed) - 1
    more = f" ({counted(others, f'other {what}')} changed too)" if others else ""
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
            return f"it had {counted(old, noun)} and has {new} now" + (
                f"; {first}" if first else ""
            )
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


def op_kind(graph: Graph, op: Op) -> Hashable:
    """Returns what an operator has in common with those of other graphs that compute the same."""
    return (op.name, op.phase, _made(graph, op))


def _operators(planned: Graph, traced: Graph) -> str:
    for index, (old, new) in enumerate(zip(planned.ops, traced.ops, strict=False)):
        same_kind = op_kind(planned, old) == op_kind(traced, new)
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
    wanted = [op_kind(source, op) for op in source.ops[index : index + _AGREE]]
    if len(wanted) < _AGREE:
        return 0
    kinds = [op_kind(target, op) for op in target.ops[index : index + _LOOK_AHEAD + _AGREE]]
    starts = range(1, len(kinds) - _AGREE + 1)
    return next((n for n in starts if kinds[n : n + _AGREE] == wanted), 0)


def _run_of(graph: Graph, index: int, count: int, word: str) -> str:
    first = f"operator {index}, {_described(graph, graph.ops[index])}, is {word}"
    return first if count == 1 else f"{first}, the first of {count}"


def _rewired(planned: Graph, traced: Graph, old: Op, new: Op) -> str:
    if len(old.inputs) != len(new.inputs):
        return f"read {counted(len(old.inputs), 'operand')} and reads {len(new.inputs)} now"
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
