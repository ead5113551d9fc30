"""Numbers, places and tables in words, for reports: plain text, no jax."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = [
    "counted",
    "grouped",
    "human_bytes",
    "human_flops",
    "human_seconds",
    "numberless_scope",
    "short_scope",
    "short_source",
    "table",
]

_WRAPPERS = re.compile(r"\b(?:jvp|transpose|vmap|jit|pjit|checkpoint|remat\d?)\(([^()]*)\)")
_NUMBER = re.compile(r"(?<=[A-Za-z_.\[])\d+(?=\b|_|/|$)")
_PACKAGES = ("site-packages", "dist-packages")

Item = TypeVar("Item")


def human_bytes(count: int | None) -> str:
    """Returns bytes with a binary unit: `256.0 KiB`; `-` for None."""
    if count is None:
        return "-"
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def human_flops(count: int | None) -> str:
    """Returns operations with a decimal unit: `5.1 MFLOP`; `-` for None."""
    if count is None:
        return "-"
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def human_seconds(seconds: float | None) -> str:
    """Returns a duration with a decimal unit: `8.32 us`; `-` for None."""
    if seconds is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    if seconds == 0:
        return "0 s"
    return f"{seconds * 1e9:.3g} ns" if seconds >= 1e-9 else "under 1 ns"


def _scaled(count: int, base: int, units: Sequence[str]) -> str:
    if count < base:
        return f"{count} {units[0]}"
    size, index = float(count), 0
    while round(size, 1) >= base and index < len(units) - 1:
        size, index = size / base, index + 1
    return f"{size:.1f} {units[index]}"


def short_source(source: str) -> str:
    """Returns `file:line` with the file relative to site-packages or to the current folder."""
    if not source:
        return ""
    file, colon, line = source.rpartition(":")
    if not (colon and line.isdigit()):
        file, colon, line = source, "", ""
    parts = Path(file).parts
    for index in range(len(parts) - 1, -1, -1):
        if parts[index] in _PACKAGES:
            return "/".join(parts[index + 1 :]) + colon + line
    here = os.getcwd().rstrip(os.sep) + os.sep
    if file.startswith(here):
        return file[len(here) :] + colon + line
    return ("/".join(("...", *parts[-3:])) if len(parts) > 4 else file) + colon + line


def short_scope(scope: str) -> str:
    """Returns a named scope without the marks of jax's transformations: `jvp(GPT)/block_0` -> `GPT/block_0`."""
    before = None
    while scope != before:
        before, scope = scope, _WRAPPERS.sub(r"\1", scope)
    return "/".join(part for part in scope.split("/") if part)


def table(rows: Sequence[Sequence[str]], align: str, indent: int = 2) -> list[str]:
    """Returns rows as lines with aligned columns.

    Args:
        rows: cells, every row as many as `align` has characters.
        align: one of `<` and `>` per column.
        indent: spaces before every line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True) if w]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Returns items with equal keys together, in the order in which the keys first appear."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def numberless_scope(scope: str) -> str:
    """Returns a scope with its block numbers blanked out: what identical blocks have in common."""
    return _NUMBER.sub("*", short_scope(scope))


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 value`, `2 values`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
