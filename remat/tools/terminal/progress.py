"""What goes on, on stderr: one line that moves while it takes long, or with `-v` every step."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from remat.core.interrupt import BestSoFar
from remat.tools.terminal.screen import Screen

__all__ = ["Progress"]

# Quick commands show nothing; what moves is drawn so often. Chosen by look.
_SHOW_AFTER_SECONDS = 0.5
_FRAMES_PER_SECOND = 4


class Progress:
    """Is told what begins now; shows it, for how long it has been going on, and the best plan so far.

    On a terminal these lines move, and vanish at the end. Elsewhere nothing is said, unless `verbose`.

    Args:
        verbose: every step gets a line that stays.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.screen = Screen(is_error=True)
        self.phase, self.best = "", ""
        self.started = self.phase_started = time.monotonic()
        self.spinner = Spinner("line")
        console = self.screen.console
        self.live: Live | None = None
        # Colours can be asked for in a pipe (FORCE_COLOR), movement cannot.
        if sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal:
            self.live = Live(
                get_renderable=self._drawn,
                console=console,
                transient=True,
                refresh_per_second=_FRAMES_PER_SECOND,
            )

    def __enter__(self) -> Progress:
        if self.live is not None:
            self.live.start()
        return self

    def __call__(self, line: str) -> None:
        if isinstance(line, BestSoFar):
            self.best = line
        else:
            self.phase, self.phase_started = line, time.monotonic()
        if self.verbose:
            self.screen.line((f"{time.monotonic() - self.started:7.1f} s  {line}", "dim"))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def _drawn(self) -> RenderableType:
        now = time.monotonic()
        if not self.phase or now - self.started < _SHOW_AFTER_SECONDS:
            return Text()
        width = self.screen.console.width
        phase = Text.assemble(self.phase, (f"  {now - self.phase_started:.0f} s", "dim"))
        phase.truncate(width - 2, overflow="ellipsis")
        self.spinner.update(text=phase)
        if not self.best:
            return self.spinner
        best = Text.assemble("  best so far: ", (self.best, "green"))
        best.truncate(width, overflow="ellipsis")
        return Group(self.spinner, best)
