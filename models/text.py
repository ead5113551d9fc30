"""Real English text that comes with Python: the language reference of `pydoc`, as bytes.

Shapes: `N` bytes, `B` batch, `T` length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Literal

import numpy as np

Split = Literal["train", "validation"]

VOCAB_SIZE = 128
VALIDATION_FRACTION = 0.1


@functools.cache
def corpus(split: Split | None = None) -> np.ndarray:
    """The text as `uint8[N]` ASCII codes, the topics in alphabetical order.

    Args:
        split: the first 90 % ("train"), the last 10 % ("validation"), or all of it (None).
    """
    text = "\n".join(topics[name] for name in sorted(topics))
    data = np.frombuffer(text.encode("ascii", errors="replace"), np.uint8)
    boundary = int(len(data) * (1.0 - VALIDATION_FRACTION))
    parts = {None: data, "train": data[:boundary], "validation": data[boundary:]}
    return parts[split]


def batches(
    rng_seed: int, batch: int, length: int, steps: int, split: Split = "train"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random windows of the text; the same for the same arguments.

    Args:
        rng_seed: the seed of the choice of windows.
        batch: `B`.
        length: `T`.
        steps: the number of batches.
        split: the part of the corpus to draw from.

    Yields:
        `(tokens, targets)`, both `int32[B, T]`; `targets` is `tokens` one position later.
    """
    data = corpus(split)
    rng = np.random.default_rng(rng_seed)
    offsets = np.arange(length + 1)
    for _ in range(steps):
        starts = rng.integers(0, len(data) - length, size=batch)
        windows = data[starts[:, None] + offsets].astype(np.int32)
        yield windows[:, :-1], windows[:, 1:]
