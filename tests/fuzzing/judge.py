"""Whether results are those of plain JAX: a tolerance that the program itself gives.

How far rounding may carry a result is not a constant. It is read off plain JAX: the same program run with every
float argument moved by one unit in the last place, operator by operator instead of compiled, compiled without
optimization, with everything recomputed by `jax.checkpoint`, and in float64. Where these runs differ from the
reference is how far rounding carries this element of this program; `FACTOR` times that is allowed, and at least
`FACTOR` units in the last place of the largest element.

A program may stand on an edge: `round(x)` where x is rounding away from a half. Where the runs of plain JAX itself
differ by more than rounding (by more than the square root of the dtype's precision), an element is
*ill-conditioned*: what plain JAX does there is no law, and the spread of its own runs is allowed there and nowhere
else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["FACTOR", "Difference", "Leaf", "Reference", "leaves_of", "moved"]

FACTOR = 10.0


@dataclass(frozen=True)
class Leaf:
    """One array of the results: its path, and its elements in float64, complex128 or int64."""

    path: str
    array: np.ndarray


@dataclass(frozen=True)
class Difference:
    """An array that is not that of plain JAX.

    Attributes:
        path: where in the results it is.
        worst: the largest error, in units of what is allowed there; infinite for wrong integers, shapes and NaNs.
        elements: how many of its elements are off.
        size: how many it has.
        words: what was expected and what came, at the worst element.
    """

    path: str
    worst: float
    elements: int
    size: int
    words: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.elements} of {self.size} elements are off, the worst by {self.worst:.1f} "
            f"times what is allowed: {self.words}"
        )


def leaves_of(results: Any) -> list[Leaf]:
    """Returns the arrays of a tree, in a dtype that holds them all exactly."""
    leaves = []
    for path, value in jax.tree.leaves_with_path(results):
        array = np.asarray(value)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            array = array.astype(np.complex128)
        elif jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(np.float64)
        else:
            array = array.astype(np.int64)
        leaves.append(Leaf(jax.tree_util.keystr(path), array))
    return leaves


def moved(array: Any, salt: int) -> Any:
    """Returns a float array with every element moved by one unit in the last place, up or down.

    Which way depends on the element's value alone: equal elements stay equal, and zeros stay zeros, so that ties
    and edges that are in the arguments on purpose stay where they are.
    """
    given = np.asarray(array)
    if not jnp.issubdtype(given.dtype, jnp.floating):
        return array
    bits = given.view(f"uint{8 * given.dtype.itemsize}")
    salted = bits.astype(np.uint64) ^ np.uint64(salt * 0xD6E8FEB86659FD93 % 2**64)
    mixed = (salted * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(61)
    # One more in the bits of a float is one unit away from zero, one less towards it.
    step = np.where(mixed & np.uint64(1), 1, -1).astype(bits.dtype)
    fixed = ~np.isfinite(given) | (given == 0)
    return jnp.asarray(np.where(fixed, bits, bits + step).view(given.dtype))


class Reference:
    """What plain JAX gives, and how far its own runs are apart.

    Attributes:
        leaves: the reference.
        runs: further runs of plain JAX at the same precision.
        exact: the same program in float64, if it was run.
    """

    def __init__(self, results: Any, dtype: str) -> None:
        self.leaves = leaves_of(results)
        self.precision = float(jnp.finfo(dtype).eps)
        self.runs: list[list[Leaf]] = []
        self.exact: list[Leaf] | None = None

    def add(self, results: Any) -> None:
        """Adds a run of plain JAX."""
        self.runs.append(leaves_of(results))

    def add_exact(self, results: Any) -> None:
        """Adds a run in float64. It is evidence of rounding only: a tie may not be one there."""
        self.exact = leaves_of(results)

    @property
    def is_ill_conditioned(self) -> bool:
        """Whether plain JAX's own runs differ by more than rounding anywhere."""
        return any(self._spread(index)[1].any() for index in range(len(self.leaves)))

    @property
    def is_finite(self) -> bool:
        """Whether all floats are finite."""
        return all(np.isfinite(leaf.array).all() for leaf in self.leaves)

    def differences(self, results: Any) -> list[Difference]:
        """Returns the arrays of `results` that are not those of plain JAX."""
        got = leaves_of(results)
        if [leaf.path for leaf in got] != [leaf.path for leaf in self.leaves]:
            paths = (
                f"{[leaf.path for leaf in got]} instead of {[leaf.path for leaf in self.leaves]}"
            )
            return [Difference("", math.inf, 1, 1, f"the results are {paths}")]
        found = (self._difference(index, leaf) for index, leaf in enumerate(got))
        return [difference for difference in found if difference is not None]

    def _difference(self, index: int, got: Leaf) -> Difference | None:
        expected = self.leaves[index].array
        if expected.shape != got.array.shape or expected.dtype != got.array.dtype:
            words = (
                f"{got.array.dtype}{got.array.shape} instead of {expected.dtype}{expected.shape}"
            )
            return Difference(got.path, math.inf, expected.size, expected.size, words)
        allowed = self._allowed(index)
        error = _distance(got.array, expected)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(error <= allowed, 0.0, error / allowed)
        if not ratio.any():
            return None
        worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        words = f"{got.array[worst]!s} instead of {expected[worst]!s}"
        if worst:
            words += f" at {[int(axis) for axis in worst]}"
        return Difference(
            got.path, float(ratio[worst]), int((ratio > 0).sum()), expected.size, words
        )

    def _allowed(self, index: int) -> np.ndarray:
        """How far every element of an array may be off."""
        expected = self.leaves[index].array
        spread, is_ill = self._spread(index)
        if expected.dtype == np.int64:
            return np.where(is_ill, np.inf, 0.0)
        usual = np.max(spread, initial=0.0, where=~is_ill)
        return FACTOR * np.maximum(spread, max(usual, self.precision * self._scale(index)))

    def _spread(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The distance to the farthest run of plain JAX, and which elements are ill-conditioned."""
        expected = self.leaves[index].array
        spread = np.zeros(expected.shape)
        for run in self.runs:
            spread = np.maximum(spread, _distance(run[index].array, expected))
        if expected.dtype == np.int64:
            return spread, spread > 0
        beyond = math.sqrt(self.precision) * self._scale(index)
        is_ill = spread > beyond
        if self.exact is not None:
            apart = _distance(self.exact[index].array, expected)
            spread = np.maximum(spread, np.where(apart <= beyond, apart, 0.0))
        return spread, is_ill

    def _scale(self, index: int) -> float:
        array = np.abs(self.leaves[index].array)
        return float(np.max(array, initial=0.0, where=np.isfinite(array)))


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The distance of numbers; what is not finite is at distance 0 of its like and infinitely far of all else."""
    finite = np.isfinite(one) & np.isfinite(other)
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.where(finite, one, 0) - np.where(finite, other, 0)).astype(np.float64)
        alike = (np.isnan(one) & np.isnan(other)) | (one == other)
    return np.where(finite, apart, np.where(alike, 0.0, np.inf))
