"""How every picture looks: colours, letters, axes, and how it becomes a file.

Colours are those of Okabe and Ito (2008), which people who confuse red and green can tell apart; whatever a colour
says is also said by a shape or in words. The y axis begins at zero. Text in an SVG is text. Equal data give equal
bytes.

A picture is drawn in the colours of paper, `light`, or of a screen at night, `dark`. `auto` is an SVG in the first
with a style sheet that changes to the second where the reader's system asks for it; viewers that know no style
sheets show the first.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from remat.core.errors import RematError, nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DARK",
    "LIGHT",
    "SUFFIXES",
    "THEMES",
    "Draw",
    "Palette",
    "PlotError",
    "Theme",
    "axes_in",
    "byte_scale",
    "check_matplotlib",
    "check_path",
    "figure_of",
    "inline_svg",
    "printable",
    "save",
    "second_scale",
    "share_axis",
    "svg",
]

Theme = Literal["light", "dark", "auto"]
THEMES: tuple[str, ...] = get_args(Theme)
SUFFIXES = (".png", ".svg")

_DOTS_PER_INCH = 160  # of PNGs: sharp where a README shows 800 pixels of a figure 8 inches wide
_LETTERS = "'DejaVu Sans', Verdana, 'Segoe UI', sans-serif"  # wide first: what is measured fits


class PlotError(RematError, ValueError):
    """A picture that cannot be drawn: matplotlib is missing, a wrong suffix or theme, or nothing to show."""


@dataclass(frozen=True)
class Palette:
    """What a picture is drawn with. In one palette no two fields are equal: `auto` tells them apart by colour.

    Attributes:
        paper, ink, muted, grid: the background, what is written, what is written less loudly, and lines behind.
        kept, encoded, recomputed, gradients, loop, other: the kinds of `remat.pictures.contents.KINDS`.
        baseline: no rematerialization; `theirs`: jax's policies. Those of remat are drawn in the colour of `kept`.
        on_recomputed: what is written on `recomputed`.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    kept: str
    encoded: str
    recomputed: str
    gradients: str
    loop: str
    other: str
    baseline: str
    theirs: str
    on_recomputed: str


LIGHT = Palette(
    paper="#ffffff",
    ink="#1f2328",
    muted="#59636e",
    grid="#e3e6ea",
    kept="#0072b2",
    encoded="#cc79a7",
    recomputed="#e69f00",
    gradients="#009e73",
    loop="#f0e442",
    other="#b4bac2",
    baseline="#6e7781",
    theirs="#d55e00",
    on_recomputed="#1b1f24",
)
DARK = Palette(
    paper="#0d1117",
    ink="#f0f6fc",
    muted="#9198a1",
    grid="#2a313a",
    kept="#56b4e9",
    encoded="#cc79a8",
    recomputed="#e69f01",
    gradients="#02a67a",
    loop="#d9ce3c",
    other="#656d78",
    baseline="#a0a8b2",
    theirs="#ef7a2a",
    on_recomputed="#1b1f24",
)

Draw = Callable[[Palette], "Figure"]
"""Makes the figure; called with the palette inside of the style that all pictures share."""


def check_path(path: str | Path, theme: str = "auto") -> None:
    """Checks, before any work is done, that a picture can be written to `path`.

    Raises:
        PlotError: matplotlib is missing, the suffix is neither `.png` nor `.svg`, or there is no such theme.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise PlotError(
            f"cannot draw {str(path)!r}: suffix {suffix!r}; expected one of {', '.join(SUFFIXES)}"
        )
    _check_theme(theme)
    check_matplotlib()


def check_matplotlib() -> None:
    """Checks that pictures can be drawn.

    Raises:
        PlotError: matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError("pictures need matplotlib: pip install matplotlib") from error


def _check_theme(theme: str) -> None:
    if theme not in THEMES:
        raise PlotError(
            f"theme={theme!r}: expected one of {', '.join(THEMES)}{nearest(str(theme), THEMES)}"
        )


def save(draw: Draw, path: str | Path, *, title: str, theme: str = "auto") -> None:
    """Draws a picture into a file.

    Args:
        draw: makes the figure.
        path: `.png` or `.svg`.
        title: what it shows, for readers that do not see it; in the file, not in the picture.
        theme: `light`, `dark`, or `auto`, which a PNG has none of: it is light.

    Raises:
        PlotError: see `check_path`.
        OSError: the file cannot be written.
    """
    check_path(path, theme)
    if Path(path).suffix.lower() == ".svg":
        Path(path).write_text(svg(draw, title=title, theme=theme), encoding="utf-8")
        return
    with _style():
        figure = draw(DARK if theme == "dark" else LIGHT)
        plain: dict[str, Any] = {"Software": None, "Title": title}
        figure.savefig(path, format="png", dpi=_DOTS_PER_INCH, metadata=plain)


def svg(draw: Draw, *, title: str, theme: str = "auto") -> str:
    """Draws a picture as an SVG document; see `save`."""
    _check_theme(theme)
    with _style():
        figure = draw(DARK if theme == "dark" else LIGHT)
        written = io.StringIO()
        nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    return printable(_cleaned(written.getvalue(), title, theme))


def inline_svg(draw: Draw, *, title: str, name: str) -> str:
    """Draws a picture as an element for a page of HTML, in the colours that the reader's system asks for.

    Args:
        draw, title: as in `save`.
        name: of the picture, one of a kind in the page: its parts are called after it.
    """
    text = svg(draw, title=title, theme="auto")
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    for old in (r'(\sid=")', r"(url\(#)", r'(\shref="#)'):
        text = re.sub(old, rf"\g<1>{name}-", text)
    return text


def printable(text: str) -> str:
    """Returns a text without what neither XML nor HTML may hold: a name of the user's can be any string."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def _style() -> Any:
    from matplotlib import style

    ours = {
        "axes.axisbelow": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.size": 10,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "remat",
        "text.parse_math": False,  # names of the user's may have dollars
    }
    return style.context(["default", ours])


def _cleaned(text: str, title: str, theme: str) -> str:
    """The document with letters set once, no global styles, a title, and the colours of the night."""
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    start = text.index("<svg")
    end = text.index(">", start)
    head = f'{text[start:end]} class="remat-picture" role="img" font-family="{_LETTERS}">'
    rules = ".remat-picture *{stroke-linejoin:round;stroke-linecap:butt}"
    if theme == "auto":
        rules += _night()
    body = re.sub(r' d="([^"]*)"', lambda found: f' d="{_shorter(found[1])}"', text[end + 1 :])
    # Marks get their colours where they are used; browsers do not look for others in what is only defined.
    body = re.sub(r'(<path id="m[^>]*style="[^"]*?)stroke: #[0-9a-f]{6};? ?', r"\1", body)
    body = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.S)
    first = '<?xml version="1.0" encoding="utf-8"?>\n'
    return f"{first}{head}\n <title>{escape(title)}</title>\n <style>{rules}</style>{body}"


def _shorter(path: str) -> str:
    """A path with coordinates to a tenth of a point; lines along an axis, of which steps are made, with one."""
    numbers = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}", path)
    parts = re.findall(r"([A-Za-z])([^A-Za-z]*)", numbers)
    if {letter for letter, _ in parts} - set("MLz"):
        return " ".join(numbers.split())
    written: list[str] = []
    last = ("", "")
    for letter, rest in parts:
        x, y = rest.split() if rest.strip() else ("", "")
        if letter == "M" or (letter == "L" and x != last[0] and y != last[1]):
            written.append(f"{letter}{x} {y}")
        elif letter == "L" and (x, y) != last:
            written.append(f"H{x}" if y == last[1] else f"V{y}")
        elif letter == "z":
            written.append("z")
        last = (x, y) if letter != "z" else last
    return "".join(written)


def _night() -> str:
    rules = [
        f'.remat-picture [style*="{what}: {getattr(LIGHT, field.name)}"]'
        f"{{{what}:{getattr(DARK, field.name)}!important}}"
        for field in fields(Palette)
        for what in ("fill", "stroke")
    ]
    return "@media (prefers-color-scheme:dark){" + "".join(rules) + "}"


def figure_of(width: float, height: float, palette: Palette) -> Figure:
    """Returns an empty figure; sizes in inches. It belongs to nobody: matplotlib keeps no list of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=palette.paper)
    FigureCanvasAgg(figure)
    return figure


def axes_in(figure: Figure, palette: Palette, place: Any = None, **options: Any) -> Axes:
    """Returns axes in the colours of a palette, with lines behind at the ticks of the y axis."""
    axes = figure.add_subplot(**options) if place is None else figure.add_subplot(place, **options)
    axes.set_facecolor(palette.paper)
    for spine in axes.spines.values():
        spine.set_color(palette.muted)
    axes.tick_params(colors=palette.muted, labelsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(palette.ink)
    axes.title.set_color(palette.ink)
    axes.grid(axis="y", color=palette.grid, linewidth=0.8)
    return axes


def share_axis(axes: Axes, palette: Palette, whole: float, label: str) -> None:
    """Adds what the y axis says as a share of `whole`, at the right."""
    from matplotlib.ticker import PercentFormatter

    def share(y: Any) -> Any:
        return y / whole

    def back(y: Any) -> Any:
        return y * whole

    right = axes.secondary_yaxis("right", functions=(share, back))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.tick_params(colors=palette.muted, labelsize=9)
    right.spines["right"].set_color(palette.muted)
    right.set_ylabel(label, color=palette.ink)


def byte_scale(most: float) -> tuple[int, str]:
    """Returns the unit of an axis that goes to `most` bytes, in bytes, with its name."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = next((i for i in reversed(range(len(units))) if most >= 1024**i), 0)
    return 1024**power, units[power]


def second_scale(most: float) -> tuple[float, str]:
    """Returns the unit of an axis that goes to `most` seconds, in seconds, with its name."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if most >= unit:
            return unit, name
    return 1e-9, "ns"
