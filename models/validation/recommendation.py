"""A deep learning recommendation model (DLRM, Naumov et al. 2019) in plain jax.

Shapes: `B` batch, `K` categorical features, `M` ids per feature (a bag), `D` embedding width.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.validation.shapes import Array, Case, Shape, floats, integers


def mlp(params: list[dict[str, Array]], x: Array, final_relu: bool) -> Array:
    """Dense layers with ReLU between."""
    for i, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        if final_relu or i < len(params) - 1:
            x = jax.nn.relu(x)
    return x


def pairwise_interactions(vectors: Array) -> Array:
    """The dot products of all pairs: `[B, K, D]` to `[B, K (K - 1) / 2]`."""
    products = jnp.einsum("bkd,bld->bkl", vectors, vectors)
    rows, columns = np.tril_indices(vectors.shape[1], k=-1)
    return products[:, rows, columns]


def dlrm_logits(params: Any, dense: Array, ids: Array) -> Array:
    """The logits `[B]` of a click from `dense[B, 13]` and `ids[B, K, M]`."""
    bottom = mlp(params["bottom"], dense, final_relu=True)
    vectors = [bottom]
    for k, table in enumerate(params["tables"]):
        rows = jnp.take(table, ids[:, k] % table.shape[0], axis=0)
        vectors.append(rows.sum(axis=1))
    crossed = pairwise_interactions(jnp.stack(vectors, axis=1))
    top = jnp.concatenate([bottom, crossed], axis=-1)
    return mlp(params["top"], top, final_relu=False)[:, 0]


def _mlp_shapes(*widths: int) -> list[dict[str, Shape]]:
    return [{"w": floats(i, o), "b": floats(o)} for i, o in itertools.pairwise(widths)]


def dlrm(small: bool = False) -> Case:
    """26 tables of width 64 with bags of 2, towers up to 1024 wide, batch 32 768, float32.

    Returns:
        `(loss, (params, dense, ids, clicks))`.
    """
    if small:
        batch, bag, width, sizes = 8, 2, 8, [16, 20, 24]
        bottom, top = [13, 16, 8], [16, 8, 1]
    else:
        batch, bag, width = 32_768, 2, 64
        sizes = [1000 * (1 + 3 * k) for k in range(26)]
        bottom, top = [13, 512, 256, 64], [1024, 1024, 512, 256, 1]
    vectors = len(sizes) + 1

    def loss(params: Any, dense: Array, ids: Array, clicks: Array) -> Array:
        logits = dlrm_logits(params, jnp.log1p(jnp.maximum(dense, 0.0)), ids)
        clicked = -jax.nn.log_sigmoid(logits) * clicks
        not_clicked = -jax.nn.log_sigmoid(-logits) * (1.0 - clicks)
        return jnp.mean(clicked + not_clicked)

    params = {
        "tables": [floats(size, width) for size in sizes],
        "bottom": _mlp_shapes(*bottom),
        "top": _mlp_shapes(width + vectors * (vectors - 1) // 2, *top),
    }
    return loss, (params, floats(batch, 13), integers(batch, len(sizes), bag), floats(batch))
