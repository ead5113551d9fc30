"""Language models: a mixture of experts, and a selective state space model. Plain jax.

Shapes: `B` batch, `T` length, `D` width, `V` vocabulary, `E` experts, `C` tokens per expert,
`N` states per channel.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from models.validation.shapes import Array, Case, floats, integers

Params = dict[str, Array]


def rms_norm(x: Array, scale: Array) -> Array:
    """Divides by the root mean square over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def next_token_loss(logits: Array, targets: Array) -> Array:
    """The mean cross entropy of `logits[B, T, V]` and `targets[B, T]`."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def causal_attention(params: Params, x: Array, heads: int) -> Array:
    """Multi-head attention of `x[B, T, D]` to itself and the past."""
    batch, length, width = x.shape
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    q, k, v = (a.reshape(batch, length, heads, -1) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
    return out @ params["out"]


def switch_layer(params: Params, x: Array, capacity: int) -> tuple[Array, Array]:
    """Sends every token to one expert; tokens above an expert's capacity get zeros.

    Args:
        params: the router `[D, E]` and the experts `[E, D, F]`, `[E, F, D]`.
        x: tokens `[S, D]`.
        capacity: `C`.

    Returns:
        `[S, D]` and the auxiliary loss that balances the load (Fedus et al. 2022, equation 4).
    """
    tokens, width = x.shape
    experts = params["router"].shape[-1]
    probs = jax.nn.softmax(x @ params["router"], axis=-1)
    expert = jnp.argmax(probs, axis=-1)
    gate = jnp.max(probs, axis=-1)

    order = jnp.argsort(expert)
    sorted_expert = expert[order]
    counts = jnp.bincount(expert, length=experts)
    first = jnp.cumsum(counts) - counts
    rank = jnp.arange(tokens) - first[sorted_expert]
    slot = jnp.where(rank < capacity, sorted_expert * capacity + rank, experts * capacity)

    buffer = jnp.zeros((experts * capacity, width), x.dtype)
    buffer = buffer.at[slot].set(x[order], mode="drop").reshape(experts, capacity, width)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffer, params["up"]))
    done = jnp.einsum("ecf,efd->ecd", hidden, params["down"]).reshape(-1, width)
    back = done.at[slot].get(mode="fill", fill_value=0.0)
    out = jnp.zeros_like(x).at[order].set(back) * gate[:, None]

    balance = experts * jnp.sum(probs.mean(axis=0) * counts / tokens)
    return out, balance


def switch_transformer(small: bool = False) -> Case:
    """6 scanned layers of width 512 with 8 experts of 2048, batch 16 x 256, float32.

    Returns:
        `(loss, (params, tokens, targets))`.
    """
    if small:
        batch, length, width, layers, heads, experts, hidden, vocabulary = 2, 8, 16, 2, 2, 4, 32, 16
    else:
        batch, length, width, layers, heads = 16, 256, 512, 6, 8
        experts, hidden, vocabulary = 8, 2048, 8192
    capacity = math.ceil(1.25 * batch * length / experts)

    def loss(params: Any, tokens: Array, targets: Array) -> Array:
        def layer(x: Array, p: Params) -> tuple[Array, Array]:
            x = x + causal_attention(p, rms_norm(x, p["attention_norm"]), heads)
            flat = rms_norm(x, p["expert_norm"]).reshape(-1, width)
            out, balance = switch_layer(p, flat, capacity)
            return x + out.reshape(x.shape), balance

        x = params["tokens"][tokens] + params["positions"]
        x, balance = jax.lax.scan(layer, x, params["layers"])
        logits = rms_norm(x, params["scale"]) @ params["head"]
        return next_token_loss(logits, targets) + 0.01 * balance.mean()

    params = {
        "tokens": floats(vocabulary, width),
        "positions": floats(length, width),
        "layers": {
            "attention_norm": floats(layers, width),
            "qkv": floats(layers, width, 3 * width),
            "out": floats(layers, width, width),
            "expert_norm": floats(layers, width),
            "router": floats(layers, width, experts),
            "up": floats(layers, experts, width, hidden),
            "down": floats(layers, experts, hidden, width),
        },
        "scale": floats(width),
        "head": floats(width, vocabulary),
    }
    return loss, (params, integers(batch, length), integers(batch, length))


def linear_recurrence(decay: Array, inputs: Array) -> Array:
    """All `h[t] = decay[t] * h[t - 1] + inputs[t]` over axis 1, from zero."""

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, states = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
    return states


def mamba_block(params: Params, x: Array) -> Array:
    """The selective state space layer of Gu and Dao 2023 on `x[B, T, D]`."""
    x, z = jnp.split(x @ params["in"], 2, axis=-1)
    taps = params["conv"].shape[0]
    x = jax.lax.conv_general_dilated(
        x,
        params["conv"][:, None, :],
        window_strides=(1,),
        padding=[(taps - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )
    x = jax.nn.silu(x + params["conv_bias"])

    step = jax.nn.softplus(x @ params["step_down"] @ params["step_up"] + params["step_bias"])
    b, c = jnp.split(x @ params["bc"], 2, axis=-1)
    decay = jnp.exp(-step[..., None] * jnp.exp(params["log_a"]))
    inputs = (step * x)[..., None] * b[:, :, None, :]
    states = linear_recurrence(decay, inputs)
    y = jnp.einsum("btdn,btn->btd", states, c) + params["skip"] * x
    return (y * jax.nn.silu(z)) @ params["out"]


def state_space(small: bool = False) -> Case:
    """4 selective state space layers of width 256, 16 states, batch 2 x 512, float32.

    Returns:
        `(loss, (params, tokens, targets))`.
    """
    if small:
        batch, length, width, layers, states, rank, vocabulary = 2, 8, 8, 2, 4, 2, 16
    else:
        batch, length, width, layers, states, rank, vocabulary = 2, 512, 256, 4, 16, 16, 4096
    inner = 2 * width

    def loss(params: Any, tokens: Array, targets: Array) -> Array:
        x = params["tokens"][tokens]
        for layer in params["layers"]:
            x = x + mamba_block(layer, rms_norm(x, layer["scale"]))
        logits = rms_norm(x, params["scale"]) @ params["tokens"].T
        return next_token_loss(logits, targets)

    layer = {
        "scale": floats(width),
        "in": floats(width, 2 * inner),
        "conv": floats(4, inner),
        "conv_bias": floats(inner),
        "step_down": floats(inner, rank),
        "step_up": floats(rank, inner),
        "step_bias": floats(inner),
        "bc": floats(inner, 2 * states),
        "log_a": floats(inner, states),
        "skip": floats(inner),
        "out": floats(inner, width),
    }
    params = {
        "tokens": floats(vocabulary, width),
        "layers": [layer] * layers,
        "scale": floats(width),
    }
    return loss, (params, integers(batch, length), integers(batch, length))
