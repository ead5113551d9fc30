"""Residual multi-layer perceptrons: the smallest network on which remat policies differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def residual_mlp(
    layers: int = 16, width: int = 256, hidden: int = 1024, batch: int = 1024, dtype: Any = None
) -> Case:
    """Unrolled layers `x + gelu(tanh(x @ w1) @ w2) @ w3`; the loss is the mean square.

    The value between layers `i` and `i + 1` is tagged `layer_i`, so that
    `jax.checkpoint_policies.save_only_these_names(*boundary_names(layers))` is the hand-made
    counterpart of one checkpoint per layer.

    Args:
        layers: the number of layers.
        width: the width `D` of the residual stream.
        hidden: the width `F` of the two inner activations.
        batch: the number of rows `B`.
        dtype: of everything; None for float32.

    Returns:
        `(loss, (params, x))`, where `params` is a tuple of one dict per layer, with `w1: [D, F]`,
        `w2: [F, F]`, `w3: [F, D]`, and `x` is `[B, D]`.
    """
    dtype = jnp.float32 if dtype is None else dtype

    def loss(params: tuple[dict[str, Array], ...], x: Array) -> Array:
        for index, weights in enumerate(params):
            x = layer(weights, x)
            if index < len(params) - 1:
                x = checkpoint_name(x, f"layer_{index}")
        return jnp.mean(jnp.square(x), dtype=jnp.float32)

    weights = {
        "w1": jax.ShapeDtypeStruct((width, hidden), dtype),
        "w2": jax.ShapeDtypeStruct((hidden, hidden), dtype),
        "w3": jax.ShapeDtypeStruct((hidden, width), dtype),
    }
    return loss, ((weights,) * layers, jax.ShapeDtypeStruct((batch, width), dtype))


def layer(weights: dict[str, Array], x: Array) -> Array:
    """One residual layer, `[B, D]` to `[B, D]`."""
    return x + jax.nn.gelu(jnp.tanh(x @ weights["w1"]) @ weights["w2"]) @ weights["w3"]


def boundary_names(layers: int = 16) -> tuple[str, ...]:
    """The names of the `layers - 1` values between the layers of `residual_mlp`."""
    return tuple(f"layer_{index}" for index in range(layers - 1))
