"""A decoder whose attention never forms all scores at once: online softmax over blocks of keys.

Liu and Abbeel 2023, in plain jax: `vmap` over blocks of queries, `lax.scan` over blocks of keys.

Shapes: `B` batch, `T` length, `H` heads, `K` width of a head, `D` width, `Q` tokens in a block.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.validation.shapes import Array, Case, floats, integers


def attend_block(q: Array, q_positions: Array, keys: Array, values: Array) -> Array:
    """Causal attention of one block of queries `[Q, K]` to all blocks `[T / Q, Q, K]` of keys.

    The scan carries the highest score, the sum of the exponentials and the weighted sum so far.
    """
    block, width = q.shape

    def step(carry: tuple[Array, Array, Array], xs: tuple[Array, Array, Array]) -> tuple[Any, None]:
        highest, total, out = carry
        k, v, k_positions = xs
        scores = q @ k.T / math.sqrt(width)
        scores = jnp.where(q_positions[:, None] >= k_positions[None, :], scores, -1e9)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        correction = jnp.exp(highest - new_highest)
        weights = jnp.exp(scores - new_highest[:, None])
        total = total * correction + weights.sum(axis=-1)
        out = out * correction[:, None] + weights @ v
        return (new_highest, total, out), None

    k_positions = jnp.arange(keys.shape[0] * block).reshape(-1, block)
    start = (jnp.full((block,), -1e9), jnp.zeros((block,)), jnp.zeros((block, width)))
    (_, total, out), _ = jax.lax.scan(step, start, (keys, values, k_positions))
    return out / total[:, None]


def attend(q: Array, k: Array, v: Array, block: int) -> Array:
    """Causal attention of one head, all `[T, K]`."""
    length, width = q.shape
    q, k, v = (a.reshape(length // block, block, width) for a in (q, k, v))
    positions = jnp.arange(length).reshape(-1, block)
    out = jax.vmap(attend_block, in_axes=(0, 0, None, None))(q, positions, k, v)
    return out.reshape(length, width)


def layer_norm(x: Array, params: dict[str, Array]) -> Array:
    """Normalises over the last axis."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-6) * params["scale"] + params["bias"]


def block_layer(params: Any, x: Array, heads: int, block: int) -> Array:
    """Attention and a feed-forward layer with residual connections, on `[B, T, D]`."""
    batch, length, width = x.shape
    h = layer_norm(x, params["norm_1"])
    q, k, v = (
        (h @ params[name]).reshape(batch, length, heads, -1).swapaxes(1, 2)
        for name in ("query", "key", "value")
    )
    per_head = jax.vmap(lambda q, k, v: attend(q, k, v, block))
    h = jax.vmap(per_head)(q, k, v).swapaxes(1, 2).reshape(batch, length, width)
    x = x + h @ params["out"]
    h = layer_norm(x, params["norm_2"])
    return x + jax.nn.relu(h @ params["up"]) @ params["down"]


def blockwise_attention(small: bool = False) -> Case:
    """3 layers of width 256 with 2 heads, one sequence of 4096 in blocks of 512, float32.

    Returns:
        `(loss, (params, tokens, targets))`.
    """
    if small:
        batch, length, block, width, layers, heads, vocabulary = 1, 16, 4, 8, 2, 2, 16
    else:
        batch, length, block, width, layers, heads, vocabulary = 1, 4096, 512, 256, 3, 2, 4096

    def loss(params: Any, tokens: Array, targets: Array) -> Array:
        x = jnp.take(params["tokens"], tokens, axis=0) + params["positions"]
        for layer in params["layers"]:
            x = block_layer(layer, x, heads, block)
        logits = layer_norm(x, params["norm"]) @ params["tokens"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    norm = {"scale": floats(width), "bias": floats(width)}
    layer = {
        "norm_1": norm,
        "query": floats(width, width),
        "key": floats(width, width),
        "value": floats(width, width),
        "out": floats(width, width),
        "norm_2": norm,
        "up": floats(width, 4 * width),
        "down": floats(4 * width, width),
    }
    params = {
        "tokens": floats(vocabulary, width),
        "positions": floats(length, width),
        "layers": [layer] * layers,
        "norm": norm,
    }
    return loss, (params, integers(batch, length), integers(batch, length))
