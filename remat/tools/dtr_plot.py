"""Pictures of runs of DTR: memory over time, and which storages are there (figures 7 to 10 of the paper).

Kirisame et al., "Dynamic tensor rematerialization" (2020), section 5.2. Time is counted in operators that ran, the
repeated ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remat.dtr.log import Call, Log
from remat.dtr.simulator import Run
from remat.pictures.style import (
    Palette,
    PlotError,
    axes_in,
    byte_scale,
    check_path,
    figure_of,
    save,
)
from remat.plans.words import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Stay", "draw_run", "memory_curve", "stays"]

_MOST_COLUMNS, _MOST_ROWS = 1600, 900  # of the picture of what is there: about what a screen shows


@dataclass(frozen=True, slots=True)
class Stay:
    """A storage is in memory.

    Attributes:
        storage: its number; storages are numbered in the order in which they are made.
        start, end: operators that had run when it was made, and when it was gone.
        is_again: it was made again.
    """

    storage: int
    start: int
    end: int
    is_again: bool


def stays(log: Log, run: Run) -> list[Stay]:
    """Returns when which storage was in memory, in the order in which the stays end; needs the run's trace."""
    calls = list(log.calls)
    number: dict[int, int] = {}  # of a storage, by the tensor it was made for
    since: dict[int, tuple[int, bool]] = {}
    found: list[Stay] = []
    ran = 0
    for move in run.trace:
        if move.action in ("run", "again"):
            ran += 1
            call = calls[move.target]
            for tensor, alias in zip(call.outputs, call.aliases, strict=True):
                if alias < 0:
                    number.setdefault(tensor, len(number))
                    since.setdefault(tensor, (ran, move.action == "again"))
        elif move.target in since:
            start, is_again = since.pop(move.target)
            found.append(Stay(number[move.target], start, ran, is_again))
    end = ran + 1
    found += [Stay(number[t], start, end, is_again) for t, (start, is_again) in since.items()]
    return found


def memory_curve(run: Run) -> list[int]:
    """Returns the bytes after every operator that ran, before anything is freed behind it."""
    return [move.memory_bytes for move in run.trace if move.action in ("run", "again")]


def draw_run(log: Log, run: Run, path: str | Path, title: str = "", *, theme: str = "auto") -> None:
    """Draws memory over time with evictions and rematerializations, and below it which storages are there.

    Args:
        log: what was replayed.
        run: what came of it, with its trace.
        path: of the picture, `.png` or `.svg`.
        title: what was replayed.
        theme: as in `remat.tools.plot.timeline`.

    Raises:
        PlotError: the run has no trace, or see `check_path`.
    """
    check_path(path, theme)
    if not run.trace:
        raise PlotError("the run has no trace: simulate(..., trace=True) keeps it")
    backward = _backward_step(log, run)
    is_whole = run.status == "ok"
    overhead = f"{run.overhead:.1%} repeated" if is_whole else run.status.replace("_", " ")
    title = f"{title or 'DTR'}: {overhead}"

    def draw(palette: Palette) -> Figure:
        figure = figure_of(9.0, 7.2, palette)
        grid = figure.add_gridspec(2, 1, height_ratios=(2, 3))
        upper = axes_in(figure, palette, grid[0, 0])
        lower = axes_in(figure, palette, grid[1, 0], sharex=upper)
        upper.tick_params(labelbottom=False)
        lower.grid(visible=False)
        _draw_memory(upper, run, palette)
        _draw_storages(lower, stays(log, run), palette)
        if backward is not None:
            for panel in (upper, lower):
                panel.axvline(backward, color=palette.ink, linewidth=0.8, linestyle=(0, (4, 3)))
        upper.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=palette.ink)
        return figure

    save(draw, path, title=title, theme=theme)


def _draw_memory(axes: Axes, run: Run, palette: Palette) -> None:
    memory = memory_curve(run)
    unit, name = byte_scale(max(run.peak_bytes, 1))
    steps = range(1, len(memory) + 1)
    scaled = [count / unit for count in memory]
    axes.fill_between(steps, scaled, step="mid", color=palette.kept, alpha=0.15, linewidth=0)
    axes.step(steps, scaled, where="mid", color=palette.kept, linewidth=1.0)
    top = max(*memory, run.budget_bytes or 0, 1) / unit
    if run.budget_bytes is not None and run.budget_bytes <= 2 * run.peak_bytes:
        axes.axhline(run.budget_bytes / unit, color=palette.ink, linewidth=0.9)
        axes.text(
            0,
            run.budget_bytes / unit,
            f" budget {human_bytes(run.budget_bytes)}",
            va="bottom",
            fontsize=9,
            color=palette.ink,
        )
    marks = {
        "again": ([], palette.recomputed, 0.03),
        "evict": ([], palette.baseline, 0.08),
        "banish": ([], palette.baseline, 0.08),
    }
    ran = 0
    for move in run.trace:
        ran += move.action in ("run", "again")
        if move.action in marks:
            marks[move.action][0].append(ran)
    for places, color, height in marks.values():
        axes.plot(
            places,
            [-height * top] * len(places),
            "|",
            color=color,
            markersize=6,
            markeredgewidth=0.6,
        )
    axes.plot(
        [], [], "|", color=palette.baseline, label=f"evicted {run.evictions + run.banished:,}"
    )
    axes.plot([], [], "|", color=palette.recomputed, label=f"made again {run.rematerializations:,}")
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 2}
    axes.legend(fontsize=9, labelcolor=palette.ink, **place)
    axes.set_ylim(-0.12 * top, 1.12 * top)
    axes.set_ylabel(f"memory [{name}]")


def _draw_storages(axes: Axes, found: Sequence[Stay], palette: Palette) -> None:
    from matplotlib.colors import ListedColormap

    rows = max((stay.storage for stay in found), default=0) + 1
    columns = max((stay.end for stay in found), default=1)
    picture = occupancy(found, min(rows, _MOST_ROWS), min(columns, _MOST_COLUMNS))
    place: dict[str, Any] = {"extent": (0.5, columns + 0.5, -0.5, rows - 0.5), "origin": "lower"}
    colors = ListedColormap(["#ffffff00", palette.kept, palette.recomputed])
    axes.imshow(
        picture, aspect="auto", cmap=colors, vmin=0, vmax=2, interpolation="nearest", **place
    )
    axes.set_xlabel("operators that ran")
    axes.set_ylabel("storages, as first made")


def occupancy(found: Sequence[Stay], rows: int, columns: int) -> np.ndarray:
    """Returns a picture of stays, uint8[rows, columns]: 0 not there, 1 since it was first made, 2 made again.

    Where several storages or steps share a cell, the largest number shows.
    """
    all_rows = max((stay.storage for stay in found), default=0) + 1
    all_columns = max((stay.end for stay in found), default=1)
    picture = np.zeros((rows, columns), np.uint8)
    for stay in found:
        row = stay.storage * rows // all_rows
        start = (stay.start - 1) * columns // all_columns
        end = max(-(-(stay.end - 1) * columns // all_columns), start + 1)
        np.maximum(picture[row, start:end], 1 + stay.is_again, out=picture[row, start:end])
    return picture


def _backward_step(log: Log, run: Run) -> int | None:
    """How many operators had run when the backward phase began."""
    if log.backward is None:
        return None
    first = sum(isinstance(event, Call) for event in log.events[: log.backward])
    ran = 0
    for move in run.trace:
        ran += move.action in ("run", "again")
        if move.action == "run" and move.target >= first:
            return ran
    return None
