"""Layers that several development networks share, as pure functions of arrays and parameter dicts.

Shapes: `B` batch, `T` length, `D` width, `H` heads, `V` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Params = Mapping[str, Any]
Case = tuple[Callable[..., Array], tuple[Any, ...]]
Factory = Callable[..., Case]
"""`factory(small=False)` returns a loss and the shapes of its arguments."""


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of these sizes, described."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def stacked(layers: int, tree: Any) -> Any:
    """The described leaves `[...]` as `[L, ...]`, one for each of `L` layers."""
    return jax.tree.map(lambda leaf: shape(layers, *leaf.shape, dtype=leaf.dtype), tree)


def cast(tree: Any, dtype: Any) -> Any:
    """Every leaf in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def norm_shapes(width: int) -> dict[str, Any]:
    """Parameters of a norm with a scale and a bias."""
    return {"scale": shape(width), "bias": shape(width)}


def layer_norm(params: Params, x: Array) -> Array:
    """Layer norm of `[..., D]`, computed in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + 1e-5)
    return (normed * params["scale"] + params["bias"]).astype(x.dtype)


def mlp_shapes(*widths: int) -> list[dict[str, Any]]:
    """Parameters of an MLP of `widths[0]` inputs and `widths[-1]` outputs."""
    return [
        {"kernel": shape(fan_in, out), "bias": shape(out)}
        for fan_in, out in itertools.pairwise(widths)
    ]


def mlp(params: list[Any], x: Array, activation: Callable[[Array], Array]) -> Array:
    """Dense layers with the activation between them, of `[..., D]`, in the dtype of `x`."""
    for index, layer in enumerate(params):
        x = activation(x) if index else x
        x = x @ layer["kernel"].astype(x.dtype) + layer["bias"].astype(x.dtype)
    return x


def attention_shapes(width: int) -> dict[str, Any]:
    """Parameters of `attention`: without biases, as that of the keys would have no gradient."""
    return {"qkv": shape(width, 3 * width), "out": shape(width, width)}


def attention(params: Params, x: Array, heads: int, causal: bool = False) -> Array:
    """Self attention of `[B, T, D]`, its softmax in float32 and all else in the dtype of `x`."""
    batch, length, width = x.shape
    qkv = (x @ params["qkv"].astype(x.dtype)).reshape(batch, length, 3, heads, width // heads)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * (width // heads) ** -0.5, key)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", attention_weights(scores, causal), value)
    return mixed.reshape(batch, length, width) @ params["out"].astype(x.dtype)


def attention_weights(scores: Array, causal: bool) -> Array:
    """The softmax, in float32, over the last axis of scores `[..., T, T]`, in their dtype."""
    wide = scores.astype(jnp.float32)
    if causal:
        length = scores.shape[-1]
        mask = jnp.tril(jnp.ones((length, length), bool))
        wide = jnp.where(mask, wide, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(wide, axis=-1).astype(scores.dtype)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross entropy, in float32, of `[..., V]` logits and `int[...]` labels."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def mean_square(x: Array, y: Array) -> Array:
    """Mean squared difference, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32)))
