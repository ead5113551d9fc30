"""Without garbage collection, for code that makes many objects and few cycles of them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collection"]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Turns garbage collection off meanwhile: looking for cycles takes a third of the time of a prediction.

    Planning 96 blocks of a GPT, the whole process takes 0.6 GB without any.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
