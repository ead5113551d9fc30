"""Ctrl-C that is not lost: solvers keep the best so far, whatever the interrupt happens to hit.

Python raises KeyboardInterrupt wherever the main thread is. In a callback of the garbage collector (jax has one)
or in a finaliser nobody can catch it: Python prints "Exception ignored in ..." and goes on. So a note is taken too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Keyboard"]


class Keyboard:
    """Notes that Ctrl-C was pressed while `watched`.

    Attributes:
        pressed: whether it was.
    """

    def __init__(self) -> None:
        self.pressed = False

    def stops(self, stop: Callable[[], bool] | None) -> Callable[[], bool]:
        """Returns a question that is answered by Ctrl-C, too."""
        return lambda: self.pressed or (stop is not None and stop())

    @contextmanager
    def watched(self, *, raises: bool) -> Iterator[None]:
        """Notes Ctrl-C in this context; does nothing outside of the main thread, which alone may.

        Args:
            raises: do what was to be done before, too, usually raise KeyboardInterrupt; where that does not come
                out, `pressed` says it. Without, Ctrl-C is only a note: for foreign code that asks for it.
        """
        before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        # None: installed by something that is not Python. Ignored, as in a shell's background: it stays so.
        if not main or before is None or before == signal.SIG_IGN:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.pressed = True
            if raises and callable(before):
                before(number, frame)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Leaves this context at Ctrl-C; `pressed` says so."""
        try:
            with self.watched(raises=True):
                yield
        except KeyboardInterrupt:
            self.pressed = True
