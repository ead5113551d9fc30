"""Where text goes: a terminal of some width, in colours, or a pipe, which gets all of it and no colours.

`NO_COLOR`, `FORCE_COLOR`, `TERM` and `COLUMNS` are honoured (by rich). In a pipe lines have the width that they
need, unless COLUMNS says otherwise, so that what another program reads does not depend on a window.
"""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from remat.core.errors import RematError, RematWarning

__all__ = ["Cell", "Column", "PlaceError", "Screen", "check_places", "deliver", "warnings_shown"]

Cell = str | tuple[str, str]
"""Text, or text with a style of rich's (`bold green`)."""

_GAP = "  "
_CUT = "..."


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: above it.
        align: `<` or `>`.
        style: of its cells that have none of their own.
        gives_way: where a line is too long for a terminal, the column with the highest number goes first; 0 stays.
        shortest: letters of a cell that stay, from its end, before columns give way; 0: all of them.
    """

    title: str
    align: str = "<"
    style: str = ""
    gives_way: int = 0
    shortest: int = 0


class Screen:
    """A stream that text is written to, whatever it is.

    Args:
        is_error: stderr, instead of stdout.
    """

    def __init__(self, *, is_error: bool = False) -> None:
        self.console = Console(
            stderr=is_error, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    @property
    def width(self) -> int | None:
        """Columns that a line may take, None for as many as it needs."""
        named = os.environ.get("COLUMNS", "").isdecimal()
        return self.console.width if self.console.is_terminal or named else None

    def line(self, *parts: Cell) -> None:
        """Writes one line, as long as it is."""
        self.console.print(_text(parts))

    def title(self, target: str, text: str) -> None:
        """Writes what a result is of, on one line where that is possible."""
        if self.width is not None and len(f"{target}, {text}") > self.width:
            self.line((target, "bold"))
            self.line(text)
        else:
            self.line((target, "bold"), f", {text}")

    def paragraph(self, text: str, *, first: Cell = "", style: str = "") -> None:
        """Writes text, wrapped to a terminal, with what comes `first` on its first line."""
        head = first if isinstance(first, str) else first[0]
        lines = [text]
        if self.width is not None:
            margin = " " * len(head)
            lines = textwrap.wrap(
                head + text, max(self.width, len(head) + 20), subsequent_indent=margin,
                break_long_words=False, break_on_hyphens=False,
            ) or [head]  # fmt: skip
            lines[0] = lines[0][len(head) :]
        self.line(first, (lines[0], style))
        for rest in lines[1:]:
            self.line((rest, style))

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> list[str]:
        """Writes rows under the titles of their columns and returns these; empty columns are left out."""
        everything = [list(row) for row in rows]
        shown = [i for i in range(len(columns)) if any(_plain(row[i]) for row in everything)]
        if self.width is not None:
            shown = _fitted(columns, everything, shown, self.width)
        widths = [_width(columns, everything, i) for i in shown]
        titles: list[Cell] = [(column.title, "dim") for column in columns]
        heads = [titles] if any(columns[i].title for i in shown) else []
        for row in [*heads, *everything]:
            cells: list[Cell] = []
            for i, width in zip(shown, widths, strict=True):
                text, style = _plain(row[i]), _style(row[i]) or columns[i].style
                cells += [_GAP, (f"{text:{columns[i].align}{width}}", style)]
            line = _text(cells)
            line.rstrip()
            self.console.print(line)
        return [columns[i].title for i in shown]


def _fitted(
    columns: Sequence[Column], rows: list[list[Cell]], shown: list[int], width: int
) -> list[int]:
    """Leaves out columns until lines fit with what may be short as short as that; then shortens, in place."""

    def least(i: int) -> int:
        full = _width(columns, rows, i)
        return min(full, columns[i].shortest or full)

    while sum(len(_GAP) + least(i) for i in shown) > width:
        leaving = max(shown, key=lambda i: columns[i].gives_way)
        if not columns[leaving].gives_way:
            break
        shown = [i for i in shown if i != leaving]
    for i in (i for i in shown if columns[i].shortest):
        others = sum(len(_GAP) + _width(columns, rows, j) for j in shown if j != i)
        most = max(columns[i].shortest, width - others - len(_GAP))
        for row in rows:
            row[i] = (_shortened(_plain(row[i]), most), _style(row[i]))
    return shown


def _shortened(text: str, most: int) -> str:
    """The end of a text, of a path its last parts."""
    while len(text) > most and "/" in text:
        text = text.partition("/")[2]
    return text if len(text) <= most else _CUT + text[len(text) - most + len(_CUT) :]


def _width(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], i: int) -> int:
    return max(len(columns[i].title), *(len(_plain(row[i])) for row in rows))


def _plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _style(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell[1]


def _text(parts: Iterable[Cell]) -> Text:
    text = Text()
    for part in parts:
        text.append(_plain(part), _style(part) or None)
    return text


class PlaceError(RematError, OSError):
    """A place that nothing can be written to."""


def check_places(**places: Path | None) -> None:
    """Checks, before any work is done, that files can be written where flags say; `-` is stdout.

    Args:
        **places: by the name of the flag, with `_` for `-`.

    Raises:
        PlaceError: one cannot be.
    """
    for name, place in places.items():
        if place is None or str(place) == "-":
            continue
        what, folder = f"--{name.replace('_', '-')} {place}", place.parent
        if place.is_dir():
            raise PlaceError(f"{what} is a folder. Name a file in it")
        if not folder.exists():
            raise PlaceError(
                f"{what}: there is no folder {folder}. Make it first: mkdir -p {folder}"
            )
        if not folder.is_dir():
            raise PlaceError(f"{what}: {folder} is no folder. Name a file in a folder")
        denied = place if place.exists() else folder
        if not os.access(denied, os.W_OK):
            raise PlaceError(f"{what}: {denied} may not be written to. Name another place")


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Shows warnings of ours on stderr in the style of errors, without the line of ours that they came from."""
    with warnings.catch_warnings():
        theirs = warnings.showwarning

        def show(message: Any, category: Any, *place: Any, **options: Any) -> None:
            if not issubclass(category, RematWarning):
                theirs(message, category, *place, **options)
                return
            screen = Screen(is_error=True)
            with screen.console.capture() as said:
                screen.paragraph(" ".join(str(message).split()), first=("warning: ", "bold yellow"))
            sys.stderr.write(said.get())  # which progress stands in for, to be drawn below

        warnings.showwarning = show
        yield


def deliver(
    place: Path | None,
    document: Callable[[], str],
    show: Callable[[Screen], None],
    *writes: Callable[[], object],
) -> None:
    """Shows a result, then writes its document to a file, and what else there is to write.

    Where the place is `-`, the document alone is printed. What cannot be shown is written nevertheless, and what
    cannot be written loses nothing else.
    """
    with ExitStack() as stack:
        for write in reversed(writes):
            stack.callback(write)
        if str(place) == "-":
            sys.stdout.write(document() + "\n")
            return
        if place is not None:
            stack.callback(lambda: place.write_text(document() + "\n", encoding="utf-8"))
        show(Screen())
