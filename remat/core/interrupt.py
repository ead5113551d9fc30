"""Ctrl-C that loses nothing, and what is said while planning goes on.

Python raises KeyboardInterrupt wherever the main thread is. In a callback of the garbage collector (jax has one)
or in a finaliser nobody can catch it: Python prints "Exception ignored in ..." and goes on. So a note is taken too
(`Keyboard`), and solvers return the best they have.

A planning passes through many hands: a session asks its policy several times, the policy asks searches and
solvers. What all of them have to know, that it was interrupted, and to whom progress is told, is a context
variable (`planning`), so that policies need no argument for it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, ClassVar, Literal

from remat.core.deadline import out_of_time

__all__ = [
    "BestSoFar",
    "Keyboard",
    "Planning",
    "Progress",
    "ended",
    "interrupted",
    "or_log",
    "planning",
    "raise_interrupt",
    "say",
    "say_best",
    "solver_says",
]

Progress = Callable[[str], None]
"""Called with one line whenever something that takes time begins, or a better plan is found (`BestSoFar`)."""


class BestSoFar(str):
    """A line of progress that says what is best so far; what goes on goes on."""


_LOG = logging.getLogger("remat")
_SOLVER_SECONDS = 5.0  # between two lines of one solver


class Keyboard:
    """Notes that Ctrl-C was pressed while `watched`.

    Attributes:
        presses: how often it was.
    """

    # All who watch are told, whoever the system tells; and what was done at Ctrl-C before any of them watched.
    _watching: ClassVar[list[Keyboard]] = []
    _before: ClassVar[Callable[[int, FrameType | None], Any] | int | None] = None

    def __init__(self) -> None:
        self.presses = 0

    @property
    def pressed(self) -> bool:
        """Whether it was pressed."""
        return self.presses > 0

    def stops(self, stop: Callable[[], bool] | None) -> Callable[[], bool]:
        """Returns a question that is answered by Ctrl-C, too."""
        return lambda: self.pressed or (stop is not None and stop())

    @contextmanager
    def watched(self, *, raises: Literal["always", "again", "never"]) -> Iterator[None]:
        """Notes Ctrl-C in this context; does nothing outside of the main thread, which alone may.

        Args:
            raises: when to do what was to be done before, too, usually raise KeyboardInterrupt: `always` (where
                that does not come out, `pressed` says it); `again`, from the second time on; `never`, for
                foreign code that asks for `pressed`.
        """
        before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        # None: installed by something that is not Python. Ignored, as in a shell's background: it stays so.
        if not main or before is None or before == signal.SIG_IGN:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            again = self.pressed
            for keyboard in self._watching:
                keyboard.presses += 1
            passes_on = raises == "always" or (raises == "again" and again)
            handler = Keyboard._before
            if passes_on and callable(handler):
                handler(number, frame)

        if not self._watching:
            Keyboard._before = before
        self._watching.append(self)
        try:
            signal.signal(signal.SIGINT, note)
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._watching.remove(self)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Leaves this context at Ctrl-C; `pressed` says so."""
        try:
            with self.watched(raises="always"):
                yield
        except KeyboardInterrupt:
            self.presses = max(self.presses, 1)


def or_log(progress: Progress | None) -> Progress:
    """Returns where progress is told: the logger `remat`, at level INFO, unless somebody listens."""
    return progress or _LOG.info


class Planning:
    """A planning that Ctrl-C ends early, with the best plan so far.

    Args:
        progress: is told what is going on; see `or_log`.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.keyboard = Keyboard()
        self.progress = or_log(progress)
        self._said = False

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed; says so once, as the signal's handler may not: it may come while printing."""
        if self.keyboard.pressed and not self._said:
            self._said = True
            _LOG.warning("interrupted: going on with the best plan so far; Ctrl-C again to stop")
        return self.keyboard.pressed

    def raise_second(self) -> None:
        """Raises KeyboardInterrupt at the second Ctrl-C, which a solver may have taken for its own."""
        if self.keyboard.presses > 1:
            raise KeyboardInterrupt


_PLANNING: ContextVar[Planning | None] = ContextVar("remat_planning", default=None)


@contextmanager
def planning(progress: Progress | None = None) -> Iterator[Planning]:
    """Everything inside is one planning; inside of another it is part of that one.

    The first Ctrl-C is only noted: who plans asks `interrupted` and returns the best so far, or raises
    KeyboardInterrupt if there is none. The second is a KeyboardInterrupt: at once, or if a solver is running, as
    soon as that has ended, at the next line that is said or at the end.
    """
    outer = _PLANNING.get()
    if outer is not None:
        yield outer
        return
    new = Planning(progress)
    token = _PLANNING.set(new)
    try:
        with new.keyboard.watched(raises="again"):
            yield new
            new.raise_second()
    finally:
        _PLANNING.reset(token)


def interrupted() -> bool:
    """Whether the planning that goes on was interrupted; False outside of one."""
    current = _PLANNING.get()
    return current is not None and current.interrupted


def ended() -> bool:
    """Whether the planning that goes on should end with what it has: interrupted, or its time is up."""
    return out_of_time() or interrupted()


def raise_interrupt() -> None:
    """Raises KeyboardInterrupt if the planning was interrupted: for where there is no plan to go on with."""
    if interrupted():
        raise KeyboardInterrupt


def say(line: str) -> None:
    """Tells whom it concerns what begins now; nothing outside of a planning.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    current = _PLANNING.get()
    if current is not None:
        current.raise_second()
        current.progress(line)


def say_best(line: str) -> None:
    """Tells whom it concerns what is best so far; nothing outside of a planning. Raises nothing."""
    current = _PLANNING.get()
    if current is not None:
        current.progress(BestSoFar(line))


def solver_says(name: str, total_cost: float) -> Callable[[float, float, float], None]:
    """Returns a solver's `progress`: a line every few seconds.

    Args:
        name: of the solver.
        total_cost: of running everything once; the solver's costs are told in per cent of it.
    """
    said = time.perf_counter()
    current = _PLANNING.get()

    def progress(cost: float, bound: float, seconds: float) -> None:
        nonlocal said
        if current is not None and time.perf_counter() - said >= _SOLVER_SECONDS:
            said = time.perf_counter()
            share = 100 / max(total_cost, 1e-300)
            # Not `say`: KeyboardInterrupt must not pass through a solver's C++ frames.
            current.progress(
                BestSoFar(
                    f"{name}: {share * cost:.2f} % extra, bound {share * bound:.2f} %, {seconds:.0f} s"
                )
            )

    return progress
