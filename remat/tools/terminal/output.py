"""How results come out: text, or one JSON document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

__all__ = ["deliver"]


def deliver(path: Path | None, document: Callable[[], str], text: str) -> None:
    """Prints the text, and writes the document to a file; `-` prints the document alone."""
    if str(path) == "-":
        print(document())
        return
    if path is not None:
        path.write_text(document() + "\n")
    print(text)
