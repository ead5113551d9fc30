"""Memory against time: what every program takes. Towards the lower left is better."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from remat.pictures.style import (
    Draw,
    Palette,
    PlotError,
    axes_in,
    byte_scale,
    figure_of,
    printable,
    second_scale,
    share_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

__all__ = ["Kind", "Level", "Point", "Tradeoff", "tradeoff"]

Kind = Literal["remat", "jax", "none"]

_KINDS: dict[str, tuple[str, str, str]] = {
    "remat": ("kept", "o", "remat"),
    "jax": ("theirs", "s", "jax.checkpoint"),
    "none": ("baseline", "D", "no remat"),
}
"""Colour of the palette, marker, and name."""


@dataclass(frozen=True)
class Point:
    """One program.

    Attributes:
        label: what it is called.
        kind: whose it is.
        nbytes: its memory.
        cost: seconds or bytes, as the picture's y axis has it.
    """

    label: str
    kind: Kind
    nbytes: int
    cost: float


@dataclass(frozen=True)
class Level:
    """An amount of memory to compare with."""

    label: str
    nbytes: int


@dataclass(frozen=True)
class Tradeoff:
    """What is drawn.

    Attributes:
        title: of the picture.
        points: the programs.
        memory, cost: what the axes say, without the units.
        cost_is_bytes: whether the costs are bytes, not seconds.
        whole: the cost of which the right axis gives shares, 0 for no such axis; `share` is what it says.
        is_curve: whether those of remat are joined: what every amount of memory costs.
        baseline: where no rematerialization is, if it is none of the points.
        theirs: what the points of jax's policies are.
        infeasible_bytes: below it nothing was found, None if nothing is known.
    """

    title: str
    points: tuple[Point, ...]
    memory: str
    cost: str
    cost_is_bytes: bool = False
    whole: float = 0.0
    share: str = ""
    is_curve: bool = False
    baseline: Level | None = None
    theirs: str = "jax.checkpoint"
    infeasible_bytes: int | None = None


def tradeoff(data: Tradeoff) -> Draw:
    """Returns what draws a trade-off.

    Raises:
        PlotError: there is no point.
    """
    if not data.points:
        raise PlotError(f"{data.title}: no point has memory and cost: there is nothing to draw")

    def draw(palette: Palette) -> Figure:
        figure = figure_of(8.4, 4.8, palette)
        axes = axes_in(figure, palette)
        most_bytes = max(p.nbytes for p in data.points)
        if data.baseline is not None:
            most_bytes = max(most_bytes, data.baseline.nbytes)
        most_cost = max(p.cost for p in data.points)
        unit, unit_name = byte_scale(max(most_bytes, 1))
        scale, scale_name = byte_scale(most_cost) if data.cost_is_bytes else second_scale(most_cost)
        axes.set_xlim(0, 1.1 * max(most_bytes, 1) / unit)
        axes.set_ylim(0, 1.16 * most_cost / scale if most_cost else 1)
        axes.set_xlabel(f"{data.memory} [{unit_name}]")
        axes.set_ylabel(f"{data.cost} [{scale_name}]")
        axes.set_title(
            printable(data.title), loc="left", fontsize=10.5, fontweight="bold", color=palette.ink
        )
        places = _together(data.points, unit, scale)
        _lines(axes, data, unit, scale, palette)
        for (x, y), points in places.items():
            kinds = {point.kind for point in points}
            color, marker, _ = _KINDS[points[0].kind]
            axes.plot(
                [x],
                [y],
                marker,
                color=getattr(palette, color) if len(kinds) == 1 else palette.ink,
                markersize=8,
                markeredgecolor=palette.paper,
                markeredgewidth=1.2,
            )
        _legend(axes, data, palette)
        if data.whole > 0:
            share_axis(axes, palette, data.whole / scale, data.share)
        _place_labels(figure, axes, places, palette)
        return figure

    return draw


def _together(
    points: Sequence[Point], unit: float, scale: float
) -> dict[tuple[float, float], list[Point]]:
    """Points by where they are drawn."""
    found: dict[tuple[float, float], list[Point]] = {}
    for point in points:
        found.setdefault((point.nbytes / unit, point.cost / scale), []).append(point)
    return found


def _lines(axes: Axes, data: Tradeoff, unit: float, scale: float, palette: Palette) -> None:
    """The baseline, what is out of reach, and the curve."""
    right = axes.get_xlim()[1]
    dashed: dict[str, Any] = {"color": palette.baseline, "linewidth": 0.9, "zorder": 0.5}
    dashed["linestyle"] = (0, (4, 3))
    for point in data.points:
        if point.kind == "none":
            axes.axhline(point.cost / scale, **dashed)
            axes.axvline(point.nbytes / unit, **dashed)
    if data.baseline is not None:
        at = data.baseline.nbytes / unit
        axes.axvline(at, **dashed)
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "color": palette.ink}
        place |= {"xytext": (-5, 0), "textcoords": "offset points", "ha": "right", "va": "top"}
        axes.annotate(data.baseline.label, (at, 0.98), fontsize=9, **place)
    if data.infeasible_bytes:
        edge = data.infeasible_bytes / unit
        axes.axvspan(0, edge, color=palette.grid, linewidth=0, zorder=0.4)
        if edge > 0.12 * right:
            axes.text(
                edge / 2,
                0.5,
                "nothing found",
                transform=axes.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="center",
                fontsize=9,
                color=palette.muted,
            )
    if data.is_curve:
        ours = sorted((p.nbytes / unit, p.cost / scale) for p in data.points if p.kind == "remat")
        xs, ys = [x for x, _ in ours], [y for _, y in ours]
        if xs:
            axes.step([*xs, right], [*ys, ys[-1]], where="post", color=palette.kept, linewidth=1.5)


def _legend(axes: Axes, data: Tradeoff, palette: Palette) -> None:
    for kind, (color, marker, name) in _KINDS.items():
        if any(point.kind == kind for point in data.points):
            label = data.theirs if kind == "jax" else name
            axes.plot([], [], marker, color=getattr(palette, color), label=label, markersize=7)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.13),
        ncols=3,
        fontsize=9,
        labelcolor=palette.ink,
        handletextpad=0.1,
        columnspacing=1.2,
        borderpad=0.1,
    )


def _place_labels(
    figure: Figure,
    axes: Axes,
    places: dict[tuple[float, float], list[Point]],
    palette: Palette,
) -> None:
    """Puts every label on the side of its point where it covers least of the others. Greedy."""
    from matplotlib.transforms import Bbox

    figure.canvas.draw()  # fixes the scales, so that sizes can be measured
    at = {place: axes.transData.transform(place) for place in places}
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in at.values()]
    for line in axes.get_lines():  # a label that a line crosses cannot be read
        corners = line.get_transform().transform(np.asarray(line.get_xydata()))
        for (x0, y0), (x1, y1) in itertools.pairwise(corners):
            low, high = (min(x0, x1) - 2, min(y0, y1) - 2), (max(x0, x1) + 2, max(y0, y1) + 2)
            taken.append(Bbox.from_extents(*low, *high))
    for place in sorted(places, key=lambda place: (-place[1], place[0])):
        label = printable(
            ", ".join(dict.fromkeys(point.label for point in places[place] if point.label))
        )
        if not label:
            continue
        text = axes.annotate(
            label,
            place,
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            color=palette.ink,
        )
        costs = []
        for order, side in enumerate(_SIDES):
            _move(text, side)
            costs.append((_cost(text.get_window_extent(), taken, axes.bbox), order))
        side = _SIDES[min(costs)[1]]
        _move(text, side)
        taken.append(text.get_window_extent())
        if max(abs(side[0]), abs(side[1])) > _NEAR:
            axes.annotate(
                "",
                place,
                xytext=side[:2],
                textcoords="offset points",
                arrowprops={
                    "arrowstyle": "-",
                    "color": palette.muted,
                    "linewidth": 0.6,
                    "shrinkA": 0,
                },
            )


_NEAR = 9  # points: so near to its point a label needs no line
_VERTICAL = {1: "bottom", 0: "center", -1: "top"}
# Offset in points, horizontal and vertical alignment; the first free one is taken.
_SIDES = tuple(
    (reach * dx, reach * dy, {1: "left", 0: "center", -1: "right"}[dx], _VERTICAL[dy])
    for reach in (_NEAR, 18, 30, 45, 60)
    for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
)


def _move(text: Annotation, side: tuple[int, int, str, str]) -> None:
    dx, dy, horizontal, vertical = side
    text.xyann = (dx, dy)
    text.set(ha=horizontal, va=vertical)


def _cost(box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> float:
    """Area of a label that lies over something else or outside of the axes."""
    from matplotlib.transforms import Bbox

    covered = sum(_area(Bbox.intersection(box, other)) for other in taken)
    return round(covered + _area(box) - _area(Bbox.intersection(box, frame)), 3)


def _area(box: Bbox | None) -> float:
    return 0.0 if box is None else float(box.width * box.height)
