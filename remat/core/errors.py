"""Exceptions and the warning of `remat`: every message says what was passed, what was expected and what to try."""

from __future__ import annotations

import difflib
import math
import reprlib
import sys
import warnings
from collections.abc import Iterable
from numbers import Real

__all__ = [
    "BudgetError",
    "CompileError",
    "DifferentiationError",
    "ImplementationError",
    "PlanError",
    "PolicyError",
    "RematError",
    "RematWarning",
    "ScheduleError",
    "TraceError",
    "nearest",
    "number_or_nan",
    "shown",
    "warn",
]


class RematError(Exception):
    """Base class of every exception that `remat` raises on purpose."""


class RematWarning(UserWarning):
    """A plan is valid but probably not what was meant, or worse than it could be for a reason that is named."""


_BETWEEN = frozenset({"remat", "jax", "flax", "equinox", "contextlib", "functools"})


def warn(message: str, category: type[Warning] = RematWarning) -> None:
    """Warns at the line of the caller's own code, below ours and that of the packages that call us."""
    level, frame = 1, sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class PolicyError(RematError, ValueError):
    """An unknown or misconfigured policy."""


class BudgetError(RematError, ValueError):
    """A budget that cannot be read, or that no plan meets.

    Attributes:
        smallest_peak_bytes: the smallest peak found, None if the budget could not be read. Of `remat.fit` and
            `remat.max_batch`, whose budget is a memory, it is a total: arguments, results and temporaries.
    """

    def __init__(self, message: str, *, smallest_peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_peak_bytes = smallest_peak_bytes


class TraceError(RematError, TypeError):
    """A function that cannot be traced to a joint forward/backward graph."""


class PlanError(RematError, ValueError):
    """A plan that does not belong to the function it is applied to, or cannot be lowered as asked."""


class ScheduleError(RematError, ValueError):
    """A schedule that the simulator rejects."""


class DifferentiationError(RematError, TypeError):
    """A differentiation that the chosen lowering does not support, for instance forward mode."""


class ImplementationError(RematError, ValueError):
    """An operator implementation that is not registered, does not apply, or does not hold its promise."""


class CompileError(RematError, RuntimeError):
    """The compiler could not be asked: an unknown device or a missing plugin."""


class DeviceMemoryError(CompileError):
    """The compiler gave up: the program needs more memory than its device has.

    Attributes:
        temp_bytes: of the temporaries of the program, as the compiler says.
    """

    def __init__(self, message: str, temp_bytes: int) -> None:
        super().__init__(message)
        self.temp_bytes = temp_bytes


_SHORTEST_BEGINNING = 4
_LEAST_LIKENESS = 0.7  # by look: `tpu` is no misspelt `cpu` (0.67), `caes` is `case` (0.75)
_MOST_LETTERS = 120

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = _SHORT.maxlong = _MOST_LETTERS


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest of `choices`, or an empty string.

    Close is what is spelt alike, or what begins with the word: a suggestion that is neither misleads.
    """
    names = list(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=_LEAST_LIKENESS)
    if not close and len(word) >= _SHORTEST_BEGINNING:
        close = sorted((name for name in names if name.startswith(word)), key=lambda n: (len(n), n))
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """Returns what was passed, for an error: its `repr`, in as many letters as one reads."""
    try:
        text = " ".join(_SHORT.repr(value).split())
    except Exception:  # a `repr` that fails must not hide what is wrong
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def number_or_nan(value: object) -> float:
    """Returns a number as it is, and nan, of which no comparison holds, for what is none."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return value if is_number else math.nan  # type: ignore[return-value]
