"""The joint graph of a small function: forward pass at the left, backward pass at the right.

Time runs down at the left and up at the right, so that what is kept goes across: a thick line from where it is made
to what reads it in the backward pass. A forward operator that the backward pass runs again is filled; what it hands
over there is a dashed line. Everything else is a thin line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remat.core.graph import Graph, Op
from remat.pictures.style import Draw, Palette, PlotError, figure_of, printable
from remat.plans.record import PlanRecord
from remat.plans.words import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MOST_OPERATORS", "graph", "graph_title"]

MOST_OPERATORS = 60
"""So many boxes can be read on a page; chosen by look."""

_WIDTH, _HEIGHT = 1.0, 0.52  # of a box; the distance between columns and rows is 1.25 and 1
_COLUMN = 1.25
_GAP = 0.9  # between the two passes
_LONGEST_NAME = 14


@dataclass(frozen=True)
class _Box:
    """Where an operator is drawn: its middle."""

    x: float
    y: float


def graph_title(plan: PlanRecord) -> str:
    """What the picture says, in a line."""
    kept = sum(not entry.is_input for entry in plan.saved)
    again = sum(entry.times for entry in plan.recomputed)
    return f"{len(plan.graph.ops)} operators; {plan.policy_name} keeps {kept} values and repeats {again} operators"


def graph(plan: PlanRecord) -> Draw:
    """Returns what draws the joint graph of a plan with what is kept, encoded and made again.

    Raises:
        PlotError: there is no operator, or more than `MOST_OPERATORS`.
    """
    found = plan.graph
    if not found.ops:
        raise PlotError("the function has no operator: there is no graph to draw")
    if len(found.ops) > MOST_OPERATORS:
        raise PlotError(
            f"the graph has {len(found.ops)} operators, forward and backward; more than {MOST_OPERATORS} cannot be "
            "read in one picture. Draw the plan of one block of the network, of a loop's body "
            "(plan.loop(path)), or the bars by layer (remat.tools.plot.layers); plan.to_networkx() has all of it"
        )
    boxes = _boxes(found)

    def draw(palette: Palette) -> Figure:
        xs, ys = [box.x for box in boxes], [box.y for box in boxes]
        wide, high = max(xs) - min(xs) + 1.6, max(ys) - min(ys) + 2.2
        figure = figure_of(max(0.92 * wide, 7.0), 0.62 * high + 0.4, palette)
        axes = figure.add_subplot()
        axes.set_axis_off()
        axes.set_xlim(min(xs) - 0.8, max(xs) + 0.8)
        axes.set_ylim(max(ys) + 0.9, min(ys) - 1.3)
        _edges(axes, plan, boxes, palette)
        for op in found.ops:
            _draw_box(axes, plan, op, boxes[op.id], palette)
        _heads(axes, found, boxes, palette)
        _legend(axes, plan, palette)
        return figure

    return draw


def _boxes(graph: Graph) -> list[_Box]:
    """Places: rows by the longest path, from the inputs going forward, to the end going backward."""
    depth = [0] * len(graph.ops)
    forward = [op for op in graph.ops if op.phase == "forward"]
    backward = [op for op in graph.ops if op.phase == "backward"]
    for op in forward:
        depth[op.id] = 1 + max((depth[p] for p in _before(graph, op)), default=-1)
    for op in reversed(backward):
        depth[op.id] = 1 + max((depth[u] for u in _after(graph, op)), default=-1)
    deepest = max(depth)
    # Forward operators as late as they can be, so that what belongs together stands together.
    for op in reversed(forward):
        later = [depth[u] for u in _after(graph, op) if graph.ops[u].phase == "forward"]
        depth[op.id] = min(later) - 1 if later else depth[op.id]
    left = _columns(forward, depth, lambda op: _before(graph, op))
    right = _columns(
        list(reversed(backward)),
        depth,
        lambda op: [*_after(graph, op), *(p for p in _before(graph, op) if p in left)],
    )
    edge = max(left.values(), default=0) * _COLUMN
    places = []
    for op in graph.ops:
        is_left = op.id in left
        column = left[op.id] if is_left else right[op.id]
        x = column * _COLUMN if is_left else edge + _COLUMN + _GAP + column * _COLUMN
        places.append(_Box(x, min(depth[op.id], deepest)))
    return places


def _columns(
    ops: list[Op], depth: list[int], neighbours: Callable[[Op], Iterable[int]]
) -> dict[int, float]:
    """Columns within rows: near the middle of the neighbours placed before, none twice in a row."""
    found: dict[int, float] = {}
    taken: dict[int, set[int]] = {}
    for op in ops:
        near = [found[n] for n in neighbours(op) if n in found]
        wish = round(sum(near) / len(near)) if near else 0
        row = taken.setdefault(depth[op.id], set())
        column = min((c for c in range(len(ops)) if c not in row), key=lambda c: (abs(c - wish), c))
        row.add(column)
        found[op.id] = float(column)
    return found


def _before(graph: Graph, op: Op) -> list[int]:
    made = (graph.values[v].producer for v in op.inputs)
    return [producer for producer in made if producer is not None]


def _after(graph: Graph, op: Op) -> list[int]:
    return [user for v in op.outputs for user in graph.users[v]]


def _edges(axes: Axes, plan: PlanRecord, boxes: list[_Box], palette: Palette) -> None:
    graph, late = plan.graph, _run_late(plan)
    kept = {entry.value: entry for entry in plan.saved if not entry.is_input}
    for op in graph.ops:
        for value in dict.fromkeys(op.inputs):
            producer = graph.values[value].producer
            if producer is None:
                continue
            crosses = graph.ops[producer].phase != op.phase
            entry = kept.get(value) if crosses or op.id in late else None
            if entry is not None:
                line = palette.kept if entry.form == "raw" else palette.encoded, 2.2, "solid"
            elif crosses and producer in late:
                line = palette.recomputed, 1.1, (0, (3, 2))
            else:
                line = palette.muted, 0.8, "solid"
            _edge(axes, boxes[producer], boxes[op.id], line, crosses)
    for value, entry in kept.items():
        producer = graph.values[value].producer
        if producer is not None:
            box, form = boxes[producer], "" if entry.form == "raw" else f" as {entry.form}"
            axes.annotate(
                human_bytes(entry.nbytes) + form,
                (box.x + _WIDTH / 2, box.y),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7.5,
                color=palette.ink,
                zorder=5,
            )


def _run_late(plan: PlanRecord) -> frozenset[int]:
    """Forward operators that run in the backward pass, again or for the first time."""
    steps = (step for step in plan.schedule.backward if step.action == "compute")
    return frozenset(s.target for s in steps if plan.graph.ops[s.target].phase == "forward")


def _edge(axes: Axes, start: _Box, end: _Box, line: tuple[str, float, Any], crosses: bool) -> None:
    """A line from box to box: between the passes from side to side, within one from edge to edge."""
    color, width, style = line
    if crosses:
        tail, head = (start.x + _WIDTH / 2, start.y), (end.x - _WIDTH / 2, end.y)
    else:
        down = 1 if end.y > start.y else -1
        tail = (start.x, start.y + down * _HEIGHT / 2)
        head = (end.x, end.y - down * _HEIGHT / 2)
    axes.annotate(
        "",
        head,
        xytext=tail,
        arrowprops={
            "arrowstyle": "-|>,head_width=0.18,head_length=0.35",
            "color": color,
            "linewidth": width,
            "linestyle": style,
            "shrinkA": 0,
            "shrinkB": 0,
        },
        zorder=1,
    )


def _draw_box(axes: Axes, plan: PlanRecord, op: Op, box: _Box, palette: Palette) -> None:
    from matplotlib.patches import FancyBboxPatch

    times = next((entry.times for entry in plan.recomputed if entry.op == op.id), 0)
    is_late = op.id in _run_late(plan)
    is_backward = op.phase == "backward"
    patch = FancyBboxPatch(
        (box.x - _WIDTH / 2, box.y - _HEIGHT / 2),
        _WIDTH,
        _HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=palette.recomputed if is_late else palette.paper,
        edgecolor=palette.gradients if is_backward else palette.baseline,
        linewidth=1.6 if op.heavy else 0.9,
        zorder=2,
    )
    axes.add_patch(patch)
    name = printable(op.name)
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    axes.text(
        box.x,
        box.y,
        f"{name}\n{f'again ×{times}' if times else 'backward only'}" if is_late else name,
        ha="center",
        va="center",
        fontsize=7.5,
        color=palette.on_recomputed if is_late else palette.ink,
        zorder=3,
    )


def _heads(axes: Axes, graph: Graph, boxes: list[_Box], palette: Palette) -> None:
    top = min(box.y for box in boxes) - 0.75
    for phase, words in (("forward", "forward pass ↓"), ("backward", "backward pass ↑")):
        xs = [boxes[op.id].x for op in graph.ops if op.phase == phase]
        if xs:
            axes.text(
                (min(xs) + max(xs)) / 2,
                top,
                words,
                ha="center",
                fontsize=9.5,
                fontweight="bold",
                color=palette.ink,
            )


def _legend(axes: Axes, plan: PlanRecord, palette: Palette) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    raw = sum(e.nbytes for e in plan.saved if not e.is_input and e.form == "raw")
    encoded = sum(e.nbytes for e in plan.saved if not e.is_input and e.form != "raw")
    handles = [Line2D([], [], color=palette.kept, linewidth=2.2, label=f"kept, {human_bytes(raw)}")]
    if encoded:
        label = f"kept encoded, {human_bytes(encoded)}"
        handles.append(Line2D([], [], color=palette.encoded, linewidth=2.2, label=label))
    again = sum(entry.times for entry in plan.recomputed)
    boxes = [
        Patch(
            facecolor=palette.recomputed, label=f"runs in the backward pass; again: {again} times"
        ),
        Patch(facecolor=palette.paper, edgecolor=palette.gradients, label="backward operator"),
    ]
    axes.legend(
        handles=[*handles, *boxes],
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=4,
        fontsize=9,
        labelcolor=palette.ink,
    )
