"""What goes on, said on stderr while it takes long."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["Progress"]

# When progress is shown, and how often a line is repeated that stays the same. Chosen by look.
_SHOW_AFTER_SECONDS = 1.0
_REPEAT_SECONDS = 15.0


class Progress:
    """Says on stderr what is going on, once it has taken a second, and again every 15 seconds."""

    def __init__(self) -> None:
        self.stage: str | None = ""
        self.started = 0.0
        self.shown = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Progress:
        self.thread.start()
        return self

    def __call__(self, stage: str) -> None:
        self._set(stage)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._set(None)
        self.thread.join(timeout=1.0)

    def _set(self, stage: str | None) -> None:
        with self.changed:
            if self.shown:
                print(f"remat: {self.stage}: {self._seconds():.1f} s", file=sys.stderr, flush=True)
            self.stage, self.started, self.shown = stage, time.monotonic(), False
            self.changed.notify()

    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _watch(self) -> None:
        with self.changed:
            while self.stage is not None:
                wait = _REPEAT_SECONDS if self.shown else _SHOW_AFTER_SECONDS
                if self.changed.wait(wait) or not self.stage:
                    continue
                text = f"still at it after {self._seconds():.0f} s" if self.shown else "..."
                print(f"remat: {self.stage} {text}", file=sys.stderr, flush=True)
                self.shown = True
