"""Paths of loop bodies: `scan0`, or `scan0_rest` for the iterations that do not fill a chunk."""

from __future__ import annotations

__all__ = ["is_rest", "rest_of", "whole_of"]

_REST = "_rest"


def rest_of(path: str) -> str:
    """Returns the path of the iterations of a loop that do not fill a chunk (`scan0` -> `scan0_rest`)."""
    return path + _REST


def is_rest(path: str) -> bool:
    """Whether a path is one of `rest_of`."""
    return path.endswith(_REST)


def whole_of(path: str) -> str:
    """Returns the path of the loop that a rest belongs to; inverse of `rest_of`."""
    return path.removesuffix(_REST)
