"""A Llama-like language model, its layers under `lax.scan` or unrolled.

RMSNorm, rotary positions, grouped-query attention, SwiGLU and a large head (Touvron et al. 2023). The
parameters are float32 and cast to bfloat16 inside each block; logits and loss are float32.

Shapes: `B` batch, `T` length, `D` width, `H` query heads in `K` groups, `G = H / K`, `E` head width,
`F` hidden width, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.development.layers import (
    Array,
    Case,
    Params,
    attention_weights,
    cast,
    cross_entropy,
    shape,
    stacked,
)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """What a Llama is made of.

    Attributes:
        layers: the number of blocks.
        batch: `B`.
        length: `T`.
        width: `D`.
        heads: `H`.
        groups: `K`, the number of heads of keys and values; it divides `H`.
        hidden: `F`.
        vocab_size: `V`.
        dtype: the dtype of the activations.
    """

    layers: int = 8
    batch: int = 2
    length: int = 1024
    width: int = 1024
    heads: int = 16
    groups: int = 4
    hidden: int = 2816
    vocab_size: int = 32_000
    dtype: Any = jnp.bfloat16

    @property
    def head_width(self) -> int:
        """`E`."""
        return self.width // self.heads


SCANNED = LlamaConfig()
UNROLLED = LlamaConfig(layers=6)
SMALL = LlamaConfig(
    layers=3, batch=2, length=8, width=16, heads=4, groups=2, hidden=24, vocab_size=32
)


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: what becomes of a block that nothing is wrapped around."""
    return function


def llama_scan(
    small: bool = False, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = unwrapped
) -> Case:
    """8 layers under `lax.scan`, batch 2 x 1024, width 1024, vocabulary 32 000; `wrap` goes around each."""
    config = SMALL if small else SCANNED
    layer_of = wrap(functools.partial(block, config))

    def loss(params: Params, tokens: Array, targets: Array) -> Array:
        def body(x: Array, layer: Params) -> tuple[Array, None]:
            return layer_of(layer, x), None

        x, _ = jax.lax.scan(body, embed(config, params, tokens), params["layers"])
        return head_loss(params, x, targets)

    return loss, _arguments(config, stacked(config.layers, _layer_shapes(config)))


def llama_unrolled(
    small: bool = False, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = unwrapped
) -> Case:
    """6 unrolled layers, otherwise as `llama_scan`."""
    config = SMALL if small else UNROLLED
    layer_of = wrap(functools.partial(block, config))

    def loss(params: Params, tokens: Array, targets: Array) -> Array:
        x = embed(config, params, tokens)
        for layer in params["layers"]:
            x = layer_of(layer, x)
        return head_loss(params, x, targets)

    return loss, _arguments(config, [_layer_shapes(config) for _ in range(config.layers)])


def embed(config: LlamaConfig, params: Params, tokens: Array) -> Array:
    """Token ids `int[B, T]` as `[B, T, D]`."""
    return params["embedding"][tokens].astype(config.dtype)


def head_loss(params: Params, x: Array, targets: Array) -> Array:
    """The mean cross entropy of `int[B, T]` after a last norm of `[B, T, D]` and the head."""
    x = rms_norm(params["norm"], x)
    logits = x @ params["head"].astype(x.dtype)
    return cross_entropy(logits, targets)


def block(config: LlamaConfig, params: Params, x: Array) -> Array:
    """One layer on `[B, T, D]`, with the weights cast to the dtype of `x`."""
    weights = cast(params["weights"], x.dtype)
    x = x + _grouped_attention(config, weights, rms_norm(params["attention_norm"], x))
    y = rms_norm(params["mlp_norm"], x)
    return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]


def rms_norm(params: Params, x: Array) -> Array:
    """Root mean square norm of `[..., D]`, computed in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return (normed * params["scale"]).astype(x.dtype)


def rotate(x: Array) -> Array:
    """Rotary positions of `[B, T, heads, E]`, computed in float32, in the dtype of `x`."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def _grouped_attention(config: LlamaConfig, weights: Params, x: Array) -> Array:
    batch, length, _ = x.shape
    groups, width = config.groups, config.head_width
    query = rotate((x @ weights["query"]).reshape(batch, length, config.heads, width))
    query = query.reshape(batch, length, groups, config.heads // groups, width) * width**-0.5
    key = rotate((x @ weights["key"]).reshape(batch, length, groups, width))
    value = (x @ weights["value"]).reshape(batch, length, groups, width)
    scores = jnp.einsum("bqkge,bske->bkgqs", query, key)
    mixed = jnp.einsum("bkgqs,bske->bqkge", attention_weights(scores, causal=True), value)
    return mixed.reshape(batch, length, config.width) @ weights["out"]


def _layer_shapes(config: LlamaConfig) -> dict[str, Any]:
    width, shared = config.width, config.groups * config.head_width
    return {
        "attention_norm": {"scale": shape(width)},
        "mlp_norm": {"scale": shape(width)},
        "weights": {
            "query": shape(width, width),
            "key": shape(width, shared),
            "value": shape(width, shared),
            "out": shape(width, width),
            "gate": shape(width, config.hidden),
            "up": shape(width, config.hidden),
            "down": shape(config.hidden, width),
        },
    }


def _arguments(config: LlamaConfig, layers: Any) -> tuple[Any, ...]:
    params = {
        "embedding": shape(config.vocab_size, config.width),
        "layers": layers,
        "norm": {"scale": shape(config.width)},
        "head": shape(config.width, config.vocab_size),
    }
    tokens = shape(config.batch, config.length, dtype=jnp.int32)
    return params, tokens, tokens
