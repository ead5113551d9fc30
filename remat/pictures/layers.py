"""Bars by layer: what each keeps, without rematerialization and with a plan, and what it repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remat.pictures.by_layer import Layer, by_layer, fewer
from remat.pictures.style import (
    Draw,
    Palette,
    PlotError,
    axes_in,
    byte_scale,
    figure_of,
    second_scale,
)
from remat.plans.record import PlanRecord
from remat.plans.summary import share_of_time, step_seconds
from remat.plans.words import human_bytes, human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["layers", "layers_title"]

_MOST_ROWS = 24  # of a picture that is seen whole; the rest is one row
_LONGEST_NAME = 34


def layers_title(plan: PlanRecord) -> str:
    """What the picture says, in a line."""
    before, after = human_bytes(plan.baseline_saved_bytes), human_bytes(plan.saved_bytes)
    return f"Kept for the backward pass by layer: {before} without remat, {after} with {plan.policy_name}"


def layers(plan: PlanRecord) -> Draw:
    """Returns what draws the bytes kept and the time repeated by layer; see `remat.pictures.by_layer`.

    Raises:
        PlotError: the plan keeps and repeats nothing, and without it nothing would be kept.
    """
    rows = fewer(by_layer(plan), _MOST_ROWS)
    if not rows:
        raise PlotError("no layer keeps or repeats anything: there are no bars to draw")

    def draw(palette: Palette) -> Figure:
        figure = figure_of(9.4, 1.25 + 0.27 * max(len(rows), 3), palette)
        grid = figure.add_gridspec(1, 2, width_ratios=(1.7, 1))
        left = axes_in(figure, palette, grid[0, 0])
        right = axes_in(figure, palette, grid[0, 1], sharey=left)
        _plain_grid(left, palette)
        _plain_grid(right, palette)
        places = range(len(rows))
        before = [row.before_bytes for row in rows]
        kept = [row.raw_bytes for row in rows]
        encoded = [row.encoded_bytes for row in rows]
        unit, name = byte_scale(max(*before, *map(sum, zip(kept, encoded, strict=True)), 1))
        left.barh(
            places,
            [n / unit for n in before],
            height=0.8,
            facecolor=palette.grid,
            edgecolor=palette.baseline,
            linewidth=0.8,
            label=f"no remat, {human_bytes(plan.baseline_saved_bytes)} in all",
        )
        label = f"kept, {human_bytes(plan.saved_bytes)} in all"
        left.barh(places, [n / unit for n in kept], height=0.44, color=palette.kept, label=label)
        if any(encoded):
            left.barh(
                places,
                [n / unit for n in encoded],
                left=[n / unit for n in kept],
                height=0.44,
                color=palette.encoded,
                label=f"{human_bytes(sum(encoded))} of it encoded",
            )
        left.set_yticks(places, [_name(row.name) for row in rows])
        left.set_ylim(len(rows) - 0.4, -0.6)
        left.set_xlim(left=0)
        left.tick_params(axis="y", length=0, labelcolor=palette.ink)
        left.set_xlabel(f"kept for the backward pass [{name}]")
        _repeated(right, plan, rows, palette)
        _legend(figure, left, right, palette)
        return figure

    return draw


def _name(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


def _plain_grid(axes: Axes, palette: Palette) -> None:
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=palette.grid, linewidth=0.8)


def _legend(figure: Figure, left: Axes, right: Axes, palette: Palette) -> None:
    """One for both panels, above them: beside one another their own would meet."""
    handles = [handle for axes in (left, right) for handle in axes.get_legend_handles_labels()[0]]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles),
        fontsize=9,
        labelcolor=palette.ink,
        handlelength=1.0,
        handletextpad=0.5,
        columnspacing=1.4,
        borderpad=0.2,
    )


def _repeated(axes: Axes, plan: PlanRecord, rows: Sequence[Layer], palette: Palette) -> None:
    """What runs again: absolute along the axis, as a share of the step at the bars."""
    seconds, whole = [row.repeated_seconds for row in rows], step_seconds(plan)
    most = max(seconds)
    scale, name = second_scale(most)
    bars = axes.barh(
        range(len(rows)),
        [x / scale for x in seconds],
        height=0.44,
        color=palette.recomputed,
        label=f"repeated, {human_seconds(plan.recompute_seconds)} in all, {share_of_time(plan)} of the step",
    )
    if whole > 0:
        shares = [f"{x / whole:.1%}" if x / whole >= 0.0005 else "" for x in seconds]
        axes.bar_label(bars, shares, padding=3, fontsize=8.5, color=palette.muted)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlim(0, 1.18 * most / scale if most else 1)
    axes.set_xlabel(f"repeated [{name}], roofline estimate")
