"""Pictures of plans: memory over time, against traffic, against recomputation. Needs matplotlib (`remat[plot]`).

The object-oriented interface of matplotlib only, so that nothing global changes; PNG or SVG by the suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.core.errors import RematError
from remat.memory.predict import Alive, predict
from remat.plans.plan import Plan
from remat.plans.report import human_bytes
from remat.policies import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    from remat.tools.compare import Row
    from remat.tools.pareto import Pareto

__all__ = [
    "Curve",
    "PlotError",
    "check_path",
    "new_figure",
    "pareto",
    "save_figure",
    "timeline",
    "timeline_curves",
    "tradeoff",
]

SUFFIXES = (".png", ".svg")

_OURS, _THEIRS, _NEUTRAL, _INK = "#1b6ca8", "#c4661f", "#8a8a8a", "#333333"
_MIB, _GIB = 2**20, 2**30


class PlotError(RematError, ValueError):
    """A picture that cannot be drawn: matplotlib is missing, a wrong suffix, or nothing to show."""


def check_path(path: str | Path) -> None:
    """Checks, before any work is done, that a picture can be written to `path`.

    Raises:
        PlotError: matplotlib is missing, or the suffix is neither `.png` nor `.svg`.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise PlotError(
            f"cannot draw {str(path)!r}: suffix {suffix!r}; expected one of {', '.join(SUFFIXES)}"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError("pictures need matplotlib: pip install remat[plot]") from error


def timeline(plan: Plan, path: str | Path) -> None:
    """Draws the predicted live bytes of a plan, kernel by kernel, over those of no rematerialization.

    The peaks are those of the plan, `peak_bytes` and `baseline_peak_bytes`.

    Args:
        plan: any plan.
        path: of the picture, `.png` or `.svg`.

    Raises:
        PlotError: see `check_path`.
    """
    check_path(path)
    before, after = timeline_curves(plan)
    top = max(*before.live_bytes, *after.live_bytes, 1) / _MIB
    close = (
        abs(before.peak_bytes - after.peak_bytes) / _MIB < 0.08 * top
    )  # labels above one another
    figure, axes = new_figure(9.0, 4.6)
    _draw_curve(axes, before, _NEUTRAL, "no remat", lift=(0.11 if close else 0.04) * top)
    _draw_curve(axes, after, _OURS, plan.policy_name, lift=0.04 * top)
    _mark_turn(axes)
    axes.set_ylim(0, 1.28 * top)
    axes.set_xlim(min(before.places[0], after.places[0]), max(before.places[-1], after.places[-1]))
    axes.set_xlabel("kernels, counted from the end of the forward pass")
    axes.set_ylabel("live temporaries [MiB], predicted")
    kept, without = human_bytes(plan.saved_bytes), human_bytes(plan.baseline_saved_bytes)
    loops = "; a loop is one kernel" if plan.loops else ""
    title = f"One training step: {plan.policy_name} keeps {kept}, no remat {without}{loops}"
    axes.set_title(title, loc="left", fontsize=11)
    save_figure(figure, path)


@dataclass(frozen=True)
class Curve:
    """What is alive over time.

    Attributes:
        places: of the kernels, counted from the first of the backward pass.
        live_bytes: while each runs.
        peak_bytes: as the plan has it; drawn where most is alive.
    """

    places: tuple[int, ...]
    live_bytes: tuple[int, ...]
    peak_bytes: int

    @property
    def peak_place(self) -> int:
        """Where most is alive."""
        return self.places[self.live_bytes.index(max(self.live_bytes))]


def timeline_curves(plan: Plan) -> tuple[Curve, Curve]:
    """Returns what `timeline` draws: without rematerialization, and with the plan."""
    graph = plan.graph
    plain = predict(graph.plain or graph, loops=plan.loops).alive
    # Without rematerialization the bodies of loops would keep more, from the first loop to the last.
    more = sum(x.length * (x.plan.baseline_saved_bytes - x.plan.saved_bytes) for x in plan.loops)
    planned = predict(graph, plan.schedule, loops=plan.loops).alive
    return (
        _curve(plain, plan.baseline_peak_bytes, more),
        _curve(planned, plan.peak_bytes, 0),
    )


def _curve(alive: Sequence[Alive], peak_bytes: int, more: int) -> Curve:
    loops = [i for i, entry in enumerate(alive) if entry.is_loop]
    span = range(loops[0], loops[-1] + 1) if loops else range(0)
    live = [entry.nbytes + (more if i in span else 0) for i, entry in enumerate(alive)]
    turn = next((i for i, entry in enumerate(alive) if entry.is_backward), len(alive))
    if not live:
        return Curve((0,), (0,), peak_bytes)
    # A policy may count more than the prediction (see `Plan.peak_bytes`); the peak is drawn as the plan has it.
    live[live.index(max(live))] = peak_bytes
    return Curve(tuple(i - turn for i in range(len(live))), tuple(live), peak_bytes)


def _draw_curve(axes: Axes, curve: Curve, color: str, label: str, lift: float) -> None:
    steps, live = curve.places, [count / _MIB for count in curve.live_bytes]
    axes.fill_between(steps, live, step="post", color=color, alpha=0.15, linewidth=0)
    axes.step(steps, live, where="post", color=color, linewidth=1.4)
    at, peak = curve.peak_place, curve.peak_bytes / _MIB
    axes.plot([at], [peak], "o", color=color, markersize=4)
    axes.annotate(
        f"{label}: peak {human_bytes(curve.peak_bytes)}",
        (at, peak),
        xytext=(at, peak + lift),
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
        ha="center",
        color=color,
        fontsize=9,
        fontweight="bold",
    )


def _mark_turn(axes: Axes) -> None:
    axes.axvline(0, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    place: dict[str, Any] = {"color": _INK, "fontsize": 9, "transform": axes.get_xaxis_transform()}
    axes.text(0, 0.97, "forward  ", ha="right", va="top", **place)
    axes.text(0, 0.97, "  backward", ha="left", va="top", **place)


def tradeoff(rows: Sequence[Row], path: str | Path, title: str = "") -> None:
    """Draws every policy's compiled memory against its traffic: towards the lower left is better.

    Args:
        rows: of `remat.tools.compare.compare`; those without compiler numbers are left out, and counted.
        path: of the picture, `.png` or `.svg`.
        title: what was compiled.

    Raises:
        PlotError: no row has compiler numbers; or see `check_path`.
    """
    check_path(path)
    points: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        if row.temp_bytes is not None and row.hbm_traffic_bytes is not None:
            place = (row.temp_bytes / _MIB, row.hbm_traffic_bytes / _GIB)
            points.setdefault(place, []).append(row.policy)
    if not points:
        raise PlotError("no row has memory and traffic from the compiler: there is nothing to draw")
    figure, axes = new_figure(7.6, 5.2)
    for (x, y), names in points.items():
        axes.plot([x], [y], "o", color=_color(names), markersize=7, markeredgecolor="white")
    axes.margins(0.16, 0.14)
    axes.set_xlabel("temporary memory [MiB], compiled")
    axes.set_ylabel("device memory traffic per step [GiB]")
    missing = sum(row.temp_bytes is None for row in rows)
    note = f" ({missing} failed or not compiled)" if missing else ""
    axes.set_title(f"{title or 'Policies compared'}{note}", loc="left", fontsize=11)
    _legend(axes, [name for names in points.values() for name in names])
    _place_labels(figure, axes, points)
    save_figure(figure, path)


def pareto(curve: Pareto, path: str | Path, title: str = "") -> None:
    """Draws the recomputation that every amount of memory costs: towards the lower left is better.

    Args:
        curve: of `remat.pareto`.
        path: of the picture, `.png` or `.svg`.
        title: what was planned.

    Raises:
        PlotError: the curve has no point; or see `check_path`.
    """
    check_path(path)
    if not curve.points:
        raise PlotError(
            f"no budget of the curve is feasible (the smallest peak found is "
            f"{human_bytes(curve.smallest_peak_bytes)}): there is nothing to draw"
        )
    # A plan is drawn where it peaks, not at the budget it was made for, and once.
    places = sorted({(p.peak_bytes / _MIB, p.recompute_seconds * 1e3) for p in curve.points})
    peaks, costs = [x for x, _ in places], [y for _, y in places]
    baseline = curve.baseline_peak_bytes / _MIB
    figure, axes = new_figure(7.6, 4.8)
    right = max(baseline, peaks[-1])
    axes.step([*peaks, right], [*costs, costs[-1]], where="post", color=_OURS, linewidth=1.4)
    axes.plot(peaks, costs, "o", color=_OURS, markersize=6, markeredgecolor="white")
    axes.axvline(baseline, color=_NEUTRAL, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.axvspan(0, peaks[0], color=_NEUTRAL, alpha=0.12, linewidth=0)
    place: dict[str, Any] = {"fontsize": 9, "va": "top", "transform": axes.get_xaxis_transform()}
    no_remat = f"no remat: {human_bytes(curve.baseline_peak_bytes)}  "
    axes.text(baseline, 0.97, no_remat, ha="right", color=_INK, **place)
    axes.set_xlim(0, 1.04 * right)
    axes.set_ylim(0, 1.12 * max(*costs, 1e-9))
    axes.set_xlabel("peak of temporaries [MiB], predicted")
    axes.set_ylabel("repeated work per step [ms], roofline estimate")
    least = human_bytes(curve.smallest_peak_bytes)
    axes.set_title(
        f"{title or 'Trade-off'}: {curve.policy_name} down to {least}", loc="left", fontsize=11
    )
    save_figure(figure, path)


def _kind(policy: str) -> tuple[str, str]:
    if policy == "none":
        return "no rematerialization", _NEUTRAL
    ours = policy.partition("(")[0].removeprefix("plan by ")
    return ("remat", _OURS) if ours in POLICIES else ("jax.checkpoint", _THEIRS)


def _color(policies: Sequence[str]) -> str:
    colors = {_kind(policy)[1] for policy in policies}
    return colors.pop() if len(colors) == 1 else _INK


def _legend(axes: Axes, names: Sequence[str]) -> None:
    for label, color in sorted(
        dict.fromkeys(map(_kind, names)), key=lambda kind: kind[0] != "remat"
    ):
        axes.plot([], [], "o", color=color, label=label)
    axes.legend(
        frameon=False,
        fontsize=9,
        ncols=3,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.06),
        handletextpad=0.2,
    )


def _place_labels(figure: Figure, axes: Axes, points: dict[tuple[float, float], list[str]]) -> None:
    """Puts every label on the side of its point where it covers least of the others. Greedy."""
    from matplotlib.transforms import Bbox

    figure.canvas.draw()  # fixes the scales, so that sizes can be measured
    at = {place: axes.transData.transform(place) for place in points}
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in at.values()]
    for place in sorted(points, key=lambda place: (-place[1], place[0])):
        text = axes.annotate(
            ", ".join(points[place]),
            place,
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            color=_color(points[place]),
        )
        costs = []
        for order, side in enumerate(_SIDES):
            _move(text, side)
            costs.append((_cost(text.get_window_extent(), taken, axes.bbox), order))
        _move(text, _SIDES[min(costs)[1]])
        taken.append(text.get_window_extent())


_VERTICAL = {1: "bottom", 0: "center", -1: "top"}
# Offset in points, horizontal and vertical alignment; the first free one is taken.
_SIDES = tuple(
    (reach * dx, reach * dy, {1: "left", 0: "center", -1: "right"}[dx], _VERTICAL[dy])
    for reach in (8, 18, 30)
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


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure of so many inches with one set of axes, in the style of all pictures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a figure; equal pictures are equal bytes."""
    import matplotlib

    suffix = Path(path).suffix.lower()
    plain = {"Date": None} if suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "remat"}):
        figure.savefig(path, format=suffix[1:], dpi=150, metadata=plain)
