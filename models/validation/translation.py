"""Encoders with decoders: T5 (Raffel et al. 2020), and GRUs with attention (Bahdanau et al. 2015).

Shapes: `B` batch, `S` source length, `T` target length, `D` width, `H` heads, `V` vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models.validation.shapes import Array, Case, Shape, floats, integers, random_key

PAD = 0


def relative_buckets(queries: int, keys: int, two_sided: bool, buckets: int = 32) -> np.ndarray:
    """The bucket `int[queries, keys]` of each distance: exact when near, logarithmic up to 128."""
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    offset = 0
    if two_sided:
        buckets //= 2
        offset = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    far = np.log(np.maximum(distance, 1) / exact) / math.log(128 / exact) * (buckets - exact)
    far = np.minimum(exact + far.astype(np.int32), buckets - 1)
    return offset + np.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """A learned bias of every head for each distance of query and key."""

    heads: int
    two_sided: bool

    @nn.compact
    def __call__(self, queries: int, keys: int) -> Array:
        """Returns `[H, queries, keys]`."""
        table = self.param("table", nn.initializers.normal(1.0), (32, self.heads))
        return table[relative_buckets(queries, keys, self.two_sided)].transpose(2, 0, 1)


class Attention(nn.Module):
    """Attention without biases and without scaling of the scores, as in T5."""

    heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, memory: Array, bias: Array) -> Array:
        """Maps `x[B, T, D]` and `memory[B, S, D]` to `[B, T, D]`; `bias` is added to the scores."""
        width = x.shape[-1]
        split = {
            "features": (self.heads, width // self.heads),
            "use_bias": False,
            "dtype": self.dtype,
        }
        q = nn.DenseGeneral(**split, name="query")(x)
        k = nn.DenseGeneral(**split, name="key")(memory)
        v = nn.DenseGeneral(**split, name="value")(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) + bias
        weights = jax.nn.softmax(scores).astype(self.dtype)
        weights = nn.Dropout(self.dropout, deterministic=False)(weights)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(
            out
        )


class T5Layer(nn.Module):
    """Self-attention, in a decoder attention to the encoder, and a feed-forward layer."""

    heads: int
    hidden: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Array, bias: Array, memory: Array | None = None, memory_bias: Array | None = None
    ) -> Array:
        """Maps `[B, T, D]` to the same shape."""
        drop = nn.Dropout(self.dropout, deterministic=False)
        h = nn.RMSNorm(dtype=self.dtype)(x)
        x = x + drop(Attention(self.heads, self.dropout, self.dtype)(h, h, bias))
        if memory is not None and memory_bias is not None:
            h = nn.RMSNorm(dtype=self.dtype)(x)
            attention = Attention(self.heads, self.dropout, self.dtype, name="cross_attention")
            x = x + drop(attention(h, memory, memory_bias))
        h = nn.RMSNorm(dtype=self.dtype)(x)
        h = nn.relu(nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="up")(h))
        h = nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")(drop(h))
        return x + drop(h)


class T5(nn.Module):
    """Encoder and decoder; the embeddings of source, target and logits are one."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    dropout: float = 0.1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, source: Array, target: Array) -> Array:
        """Maps token ids `[B, S]` and `[B, T]` to logits `float32[B, T, V]`."""
        layer = {
            "heads": self.heads,
            "hidden": self.hidden,
            "dropout": self.dropout,
            "dtype": self.dtype,
        }
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="tokens")
        drop = nn.Dropout(self.dropout, deterministic=False)
        source_length, target_length = source.shape[1], target.shape[1]
        padding = jnp.where(source == PAD, -1e9, 0.0)[:, None, None, :]

        x = drop(embed(source))
        bias = RelativeBias(self.heads, two_sided=True)(source_length, source_length) + padding
        for i in range(self.layers):
            x = T5Layer(**layer, name=f"encoder_{i}")(x, bias)
        memory = drop(nn.RMSNorm(dtype=self.dtype)(x))

        x = drop(embed(target))
        future = jnp.triu(jnp.full((target_length, target_length), -1e9), k=1)
        bias = RelativeBias(self.heads, two_sided=False)(target_length, target_length) + future
        for i in range(self.layers):
            x = T5Layer(**layer, name=f"decoder_{i}")(x, bias, memory, padding)
        x = drop(nn.RMSNorm(dtype=self.dtype)(x))
        return embed.attend(x / math.sqrt(self.width)).astype(jnp.float32)


def t5(small: bool = False) -> Case:
    """6 + 6 unrolled layers of width 512, batch 8 x 256 to 128, bfloat16 with float32 parameters.

    Returns:
        `(loss, (params, source, target, key))`.
    """
    if small:
        model, batch = T5(vocabulary=16, width=16, layers=2, heads=2, hidden=32), 2
        source_length, target_length = 10, 6
    else:
        model, batch = T5(vocabulary=32_128, width=512, layers=6, heads=8, hidden=2048), 8
        source_length, target_length = 256, 128

    def loss(params: Any, source: Array, target: Array, key: Array) -> Array:
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
        logits = model.apply({"params": params}, source, shifted, rngs={"dropout": key})
        log_probs = jax.nn.log_softmax(jnp.asarray(logits))
        losses = -jnp.take_along_axis(log_probs, target[..., None], axis=-1)[..., 0]
        weights = (target != PAD).astype(jnp.float32)
        return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)

    source, target = integers(batch, source_length), integers(batch, target_length)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(
        lambda: model.init(
            rngs, jnp.zeros(source.shape, jnp.int32), jnp.zeros(target.shape, jnp.int32)
        )["params"]
    )
    return loss, (params, source, target, random_key())


def gru_cell(params: dict[str, Array], state: Array, x: Array) -> Array:
    """One step: `state[B, D]` and `x[B, I]` to the next state."""
    from_x = x @ params["w"] + params["b"]
    from_state = state @ params["u"]
    reset_x, update_x, new_x = jnp.split(from_x, 3, axis=-1)
    reset_state, update_state, new_state = jnp.split(from_state, 3, axis=-1)
    reset = jax.nn.sigmoid(reset_x + reset_state)
    update = jax.nn.sigmoid(update_x + update_state)
    new = jnp.tanh(new_x + reset * new_state)
    return (1.0 - update) * new + update * state


def encode(params: Any, source: Array) -> Array:
    """The states `[B, S, 2 D]` of a GRU forwards and one backwards."""
    x = params["source"][source].swapaxes(0, 1)
    start = jnp.zeros((source.shape[0], params["forwards"]["u"].shape[0]))

    def run(cell: dict[str, Array], reverse: bool) -> Array:
        def step(state: Array, x: Array) -> tuple[Array, Array]:
            state = gru_cell(cell, state, x)
            return state, state

        return jax.lax.scan(step, start, x, reverse=reverse)[1]

    states = [run(params["forwards"], False), run(params["backwards"], True)]
    return jnp.concatenate(states, axis=-1).swapaxes(0, 1)


def seq2seq_gru(small: bool = False) -> Case:
    """Additive attention, 48 unrolled decoder steps, width 512, batch 128, vocabulary 8000, float32.

    Returns:
        `(loss, (params, source, target))`.
    """
    batch, width, length, vocabulary = (2, 8, 6, 16) if small else (128, 512, 48, 8000)

    def loss(params: Any, source: Array, target: Array) -> Array:
        memory = encode(params, source)
        keys = memory @ params["attention"]["memory"]
        inputs = params["target"][jnp.roll(target, 1, axis=1).at[:, 0].set(0)]
        state = jnp.tanh(memory[:, 0] @ params["bridge"])
        outputs = []
        for t in range(length):
            query = state @ params["attention"]["state"]
            scores = jnp.tanh(keys + query[:, None, :]) @ params["attention"]["v"]
            weights = jax.nn.softmax(scores, axis=-1)
            context = jnp.einsum("bs,bsd->bd", weights, memory)
            state = gru_cell(
                params["decoder"], state, jnp.concatenate([inputs[:, t], context], axis=-1)
            )
            outputs.append(jnp.concatenate([state, context], axis=-1))
        logits = jnp.stack(outputs, axis=1) @ params["head"]
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, target[..., None], axis=-1).mean()

    def cell(inputs: int) -> dict[str, Shape]:
        return {
            "w": floats(inputs, 3 * width),
            "u": floats(width, 3 * width),
            "b": floats(3 * width),
        }

    params = {
        "source": floats(vocabulary, width),
        "target": floats(vocabulary, width),
        "forwards": cell(width),
        "backwards": cell(width),
        "bridge": floats(2 * width, width),
        "decoder": cell(3 * width),
        "attention": {
            "memory": floats(2 * width, width),
            "state": floats(width, width),
            "v": floats(width),
        },
        "head": floats(3 * width, vocabulary),
    }
    return loss, (params, integers(batch, length), integers(batch, length))
