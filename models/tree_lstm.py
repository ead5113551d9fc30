"""A binary TreeLSTM over documents: leaves are lines, inner nodes put two parts together; no two trees are alike.

Tai et al. 2015, "Improved semantic representations from tree-structured long short-term memory networks",
equations 9 to 14 for two children. The state of a node is one of every position of a line, so that what is kept for
the backward pass outweighs the weights. `leaf`, `cell` and `readout` are jitted: compiled once, whatever the tree.

Shapes: `L` positions of a line, `D` width, `V` words.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Config", "Document", "Tree", "init", "loss", "loss_apart", "parse"]

Array = jax.Array
Tree = Any  # the number of a line, or two trees
State = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """What a TreeLSTM is made of.

    Attributes:
        words: `V`; words are hashed to as many.
        length: `L`, the words of a line that are read.
        width: `D`, of embedding, hidden state and cell state.
    """

    words: int = 256
    length: int = 32
    width: int = 32


@dataclasses.dataclass(frozen=True)
class Document:
    """A document as a tree of its lines.

    Attributes:
        lines: `[L]` words each.
        tree: of numbers of lines.
        label: what is to be predicted, 0 or 1.
    """

    lines: tuple[np.ndarray, ...]
    tree: Tree
    label: float


def parse(text: str, config: Config, *, most_lines: int, label: float) -> Document:
    """Returns the first lines of a text as a tree: a line goes with those that are indented below it.

    Args:
        text: has a line that is not blank.
        config: of the network that reads it.
        most_lines: that are taken.
        label: of the document.
    """
    lines = [line for line in text.splitlines() if line.strip()][:most_lines]
    if not lines:
        raise ValueError("a text without words has no tree")
    indents = [len(line) - len(line.lstrip()) for line in lines]

    def part(start: int, end: int) -> Tree:
        found: Tree = None
        while start < end:
            stop = start + 1
            while stop < end and indents[stop] > indents[start]:
                stop += 1
            child = start if stop == start + 1 else (start, part(start + 1, stop))
            found = child if found is None else (found, child)
            start = stop
        return found

    return Document(
        tuple(_words(line, config) for line in lines), part(0, len(lines)), float(label)
    )


def _words(line: str, config: Config) -> np.ndarray:
    numbers = [1 + zlib.crc32(word.encode()) % (config.words - 1) for word in line.split()]
    kept = numbers[: config.length]
    return np.array(kept + [0] * (config.length - len(kept)), np.int32)


def init(key: Array, config: Config) -> dict[str, Array]:
    """Returns parameters."""
    keys = jax.random.split(key, 4)
    width = config.width
    return {
        "embedding": 0.3 * jax.random.normal(keys[0], (config.words, width)),
        "leaf": jax.random.normal(keys[1], (width, 3 * width)) / width**0.5,
        "cell": jax.random.normal(keys[2], (2 * width, 5 * width)) / (2 * width) ** 0.5,
        "bias": jnp.zeros(5 * width).at[width : 3 * width].set(1.0),
        "out": jax.random.normal(keys[3], (width,)) / width**0.5,
    }


@jax.jit
def leaf(params: dict[str, Array], words: Array) -> State:
    """Returns the state of a line."""
    gates = params["embedding"][words] @ params["leaf"]
    i, o, u = jnp.split(gates, 3, axis=-1)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jax.jit
def cell(params: dict[str, Array], left: State, right: State) -> State:
    """Returns the state of two parts together."""
    gates = jnp.concatenate([left[0], right[0]], axis=-1) @ params["cell"] + params["bias"]
    i, forget_left, forget_right, o, u = jnp.split(gates, 5, axis=-1)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    c = c + jax.nn.sigmoid(forget_left) * left[1] + jax.nn.sigmoid(forget_right) * right[1]
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jax.jit
def readout(params: dict[str, Array], root: State, label: Array) -> Array:
    """Returns the logistic loss of a document."""
    logit = jnp.mean(root[0], axis=0) @ params["out"]
    return jax.nn.softplus(logit) - label * logit


def loss(
    params: dict[str, Array],
    lines: Sequence[Any],
    tree: Tree,
    label: Any,
    *,
    parts: Sequence[Callable[..., Any]] = (leaf, cell, readout),
) -> Array:
    """Returns the loss of a document; `lines` and `label` are those of a `Document`."""
    leaf, cell, readout = parts

    def state(node: Tree) -> State:
        if isinstance(node, tuple):
            return cell(params, state(node[0]), state(node[1]))
        return leaf(params, lines[node])

    return readout(params, state(tree), label)


def loss_apart(params: dict[str, Array], lines: Sequence[Any], tree: Tree, label: Any) -> Array:
    """Returns the same, its parts not jitted: operator by operator where `loss` runs cell by cell."""
    parts = [inspect.unwrap(part) for part in (leaf, cell, readout)]
    return loss(params, lines, tree, label, parts=parts)
