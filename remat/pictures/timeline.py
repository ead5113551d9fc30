"""The memory of a step over time, without rematerialization and with a plan, and what it is at the peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.pictures.contents import KINDS
from remat.pictures.curves import BEYOND, Curve, curves
from remat.pictures.style import Draw, Palette, axes_in, byte_scale, figure_of, printable
from remat.plans.record import PlanRecord
from remat.plans.summary import share_of_time
from remat.plans.words import human_bytes, human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["KIND_NAMES", "timeline", "timeline_title"]

KIND_NAMES = {
    "kept": "kept",
    "encoded": "kept, encoded",
    "recomputed": "recomputed",
    "gradients": "gradients",
    "loop": "inside a loop",
    "other": "other",
    BEYOND: "counted by the policy",
}
"""What the kinds of `remat.pictures.contents` are called in pictures and tables."""

_MOST_PLACES = 300  # of a panel about 300 pixels wide


def timeline_title(plan: PlanRecord) -> str:
    """What the picture says, in a line."""
    before, after = human_bytes(plan.baseline_peak_bytes), human_bytes(plan.peak_bytes)
    return f"Predicted memory of one step: peak {before} without remat, {after} with {plan.policy_name}"


def timeline(plan: PlanRecord) -> Draw:
    """Returns what draws the predicted live bytes, kernel by kernel, before and after, by kind.

    The peaks are those of the plan, `baseline_peak_bytes` and `peak_bytes`; see `remat.pictures.curves`.
    """
    before, after = curves(plan)

    def draw(palette: Palette) -> Figure:
        figure = figure_of(9.4, 3.9, palette)
        grid = figure.add_gridspec(1, 3, width_ratios=(1, 1, 1.02))
        most = max(before.peak_bytes, after.peak_bytes, plan.budget_bytes or 0, 1)
        unit, name = byte_scale(most)
        left = axes_in(figure, palette, grid[0, 0])
        right = axes_in(figure, palette, grid[0, 1], sharey=left)
        right.tick_params(labelleft=False)
        left.set_ylim(0, 1.14 * most / unit)
        left.set_ylabel(f"live temporaries [{name}], predicted")
        has_loops = bool(plan.loops)
        _panel(left, before, "no remat", unit, palette, has_loops)
        _panel(right, after, plan.policy_name, unit, palette, has_loops)
        if plan.budget_bytes is not None and plan.confirmed is None:
            _level(
                right, plan.budget_bytes / unit, f"budget {human_bytes(plan.budget_bytes)}", palette
            )
        _table(figure.add_subplot(grid[0, 2]), plan, before, after, palette)
        return figure

    return draw


def _panel(
    axes: Axes, curve: Curve, name: str, unit: int, palette: Palette, has_loops: bool
) -> None:
    places = _places(curve)
    parts = [[curve.nbytes[i][k] / unit for i in (*places, places[-1])] for k in range(len(KINDS))]
    edges = [*places, len(curve.nbytes)]
    colors = [getattr(palette, kind) for kind in KINDS]
    shown = [k for k, part in enumerate(parts) if any(part)]
    if shown:
        axes.stackplot(
            edges,
            [parts[k] for k in shown],
            step="post",
            colors=[colors[k] for k in shown],
            linewidth=0,
        )
    axes.set_xlim(0, max(len(curve.nbytes), 1))
    axes.set_title(printable(name), loc="left", fontsize=10.5, fontweight="bold", color=palette.ink)
    axes.set_xlabel("kernels run, a loop as one" if has_loops else "kernels run")
    axes.axvline(curve.turn, color=palette.ink, linewidth=0.9, linestyle=(0, (4, 3)))
    late = curve.turn > 0.5 * len(curve.nbytes)
    axes.annotate(
        "backward →",
        (curve.turn, 0.985),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-5 if late else 5, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="top",
        fontsize=8.5,
        color=palette.muted,
    )
    _level(axes, curve.peak_bytes / unit, f"peak {human_bytes(curve.peak_bytes)}", palette)
    axes.plot([curve.peak + 0.5], [curve.peak_bytes / unit], "v", color=palette.ink, markersize=5)


def _places(curve: Curve) -> list[int]:
    """Places to draw: all, or of every so many the one where most is alive."""
    live = curve.live_bytes
    width = -(-len(live) // _MOST_PLACES)
    return [
        max(range(at, min(at + width, len(live))), key=lambda i: live[i])
        for at in range(0, len(live), width)
    ]


def _level(axes: Axes, height: float, label: str, palette: Palette) -> None:
    axes.axhline(height, color=palette.ink, linewidth=0.9, linestyle=(0, (1, 2)))
    axes.annotate(
        label,
        (0.02, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=9,
        fontweight="bold",
        color=palette.ink,
    )


def _table(axes: Axes, plan: PlanRecord, before: Curve, after: Curve, palette: Palette) -> None:
    """The legend, with what every kind takes at the peaks, and the plan's other numbers."""
    from matplotlib.patches import Rectangle

    axes.set_axis_off()
    first, second = before.at_peak(), after.at_peak()
    kinds = [kind for kind in reversed(KIND_NAMES) if _is_shown(kind, before, after)]
    lines: list[tuple[str, ...]] = [("alive at the peak", "no remat", "plan")]
    lines += [
        (KIND_NAMES[kind], *(human_bytes(found.get(kind)) for found in (first, second)))
        for kind in kinds
    ]
    lines += [
        ("peak", human_bytes(before.peak_bytes), human_bytes(after.peak_bytes)),
        ("",),
        (
            "kept for backward",
            human_bytes(plan.baseline_saved_bytes),
            human_bytes(plan.saved_bytes),
        ),
        ("repeated work", "-", human_seconds(plan.recompute_seconds)),
        ("   of the step", "-", share_of_time(plan)),
    ]
    for number, (label, *cells) in enumerate(lines):
        y = 0.98 - 0.081 * number
        row = number - 1
        ink = palette.muted if number == 0 else palette.ink
        weight = "bold" if label == "peak" else "normal"
        place: dict[str, Any] = {
            "transform": axes.transAxes,
            "va": "center",
            "fontsize": 9,
            "fontweight": weight,
            "color": ink,
        }
        is_kind = 0 <= row < len(kinds)
        if is_kind and kinds[row] in KINDS:
            swatch = Rectangle((0, y - 0.024), 0.05, 0.048, transform=axes.transAxes, linewidth=0)
            swatch.set_facecolor(getattr(palette, kinds[row]))
            axes.add_patch(swatch)
        axes.text(0.075 if is_kind else 0, y, label, **place)
        for cell, x in zip(cells, (0.73, 1.0), strict=False):
            axes.text(x, y, cell, ha="right", **place)


def _is_shown(kind: str, *shown: Curve) -> bool:
    if kind not in KINDS:
        return any(kind in curve.at_peak() for curve in shown)
    return any(entry[KINDS.index(kind)] for curve in shown for entry in curve.nbytes)
