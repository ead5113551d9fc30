"""Pictures as files: of a plan, of policies compared, of a trade-off. Needs matplotlib (`remat[plot]`).

PNG or SVG by the suffix; `theme` is `light`, `dark` or, for an SVG that follows the reader's system, `auto`. How
they look is `remat.pictures.style`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from remat.pictures import graph as graph_picture
from remat.pictures import layers as layers_picture
from remat.pictures import style
from remat.pictures import timeline as timeline_picture
from remat.pictures.style import PlotError, check_path
from remat.pictures.tradeoff import tradeoff as tradeoff_picture
from remat.plans.record import PlanRecord
from remat.tools.compare import Row
from remat.tools.compare import drawn as drawn_rows
from remat.tools.pareto import Pareto
from remat.tools.pareto import drawn as drawn_curve

__all__ = ["PlotError", "check_path", "graph", "layers", "pareto", "timeline", "tradeoff"]


def timeline(plan: PlanRecord, path: str | Path, *, theme: str = "auto") -> None:
    """Draws the predicted live bytes of a plan, kernel by kernel and by kind, beside those of no rematerialization.

    The peaks are those of the plan, `peak_bytes` and `baseline_peak_bytes`.

    Args:
        plan: any plan.
        path: of the picture, `.png` or `.svg`.
        theme: `light`, `dark` or `auto`.

    Raises:
        PlotError: see `check_path`.
        OSError: the file cannot be written.
    """
    check_path(path, theme)
    draw = timeline_picture.timeline(plan)
    style.save(draw, path, title=timeline_picture.timeline_title(plan), theme=theme)


def layers(plan: PlanRecord, path: str | Path, *, theme: str = "auto") -> None:
    """Draws what every layer keeps, before and after, and what it repeats; arguments and errors as `timeline`.

    Raises:
        PlotError: also if there is nothing to draw.
    """
    check_path(path, theme)
    draw = layers_picture.layers(plan)
    style.save(draw, path, title=layers_picture.layers_title(plan), theme=theme)


def graph(plan: PlanRecord, path: str | Path, *, theme: str = "auto") -> None:
    """Draws the joint graph of a small function with what is kept, encoded and made again; arguments as `timeline`.

    Raises:
        PlotError: also if the graph has too many operators to be read.
    """
    check_path(path, theme)
    draw = graph_picture.graph(plan)
    style.save(draw, path, title=graph_picture.graph_title(plan), theme=theme)


def tradeoff(
    rows: Sequence[Row], path: str | Path, title: str = "", *, theme: str = "auto"
) -> None:
    """Draws every policy's compiled memory against its time: towards the lower left is better.

    The time is the roofline estimate of one step; where the rates of the device are not known, the traffic.

    Args:
        rows: of `remat.tools.compare.compare`; those without compiler numbers are left out, and counted.
        path: of the picture, `.png` or `.svg`.
        title: what was compiled.
        theme: `light`, `dark` or `auto`.

    Raises:
        PlotError: no row has compiler numbers; or see `check_path`.
        OSError: the file cannot be written.
    """
    check_path(path, theme)
    data = drawn_rows(rows, title)
    style.save(tradeoff_picture(data), path, title=data.title, theme=theme)


def pareto(curve: Pareto, path: str | Path, title: str = "", *, theme: str = "auto") -> None:
    """Draws the recomputation that every amount of memory costs: towards the lower left is better.

    Args:
        curve: of `remat.pareto`.
        path: of the picture, `.png` or `.svg`.
        title: what was planned.
        theme: `light`, `dark` or `auto`.

    Raises:
        PlotError: the curve has no point; or see `check_path`.
        OSError: the file cannot be written.
    """
    check_path(path, theme)
    data = drawn_curve(curve, title)
    style.save(tradeoff_picture(data), path, title=data.title, theme=theme)
