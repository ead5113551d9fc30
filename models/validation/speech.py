"""Conformer speech recognition (Gulati et al. 2020) with a CTC loss, in Flax linen.

Shapes: `B` batch, `T` spectrogram frames, `F` mel bands, `S` frames after subsampling (`T / 4`),
`D` width, `L` labels, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.validation.shapes import Array, Case, floats, integers, random_key


class FeedForward(nn.Module):
    """Layer norm, a wide layer with swish, and back."""

    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Maps `[B, S, D]` to the same shape."""
        width = x.shape[-1]
        x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.swish(nn.Dense(4 * width, dtype=self.dtype)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = nn.Dense(width, dtype=self.dtype)(x)
        return nn.Dropout(self.dropout, deterministic=not train)(x)


class ConvModule(nn.Module):
    """Pointwise convolution with a gated linear unit, depthwise convolution, pointwise convolution."""

    kernel: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Maps `[B, S, D]` to the same shape."""
        width = x.shape[-1]
        x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.glu(nn.Dense(2 * width, dtype=self.dtype)(x))
        x = nn.Conv(
            width,
            (self.kernel,),
            feature_group_count=width,
            use_bias=False,
            dtype=self.dtype,
            name="depthwise",
        )(x)
        x = nn.swish(nn.LayerNorm(dtype=self.dtype)(x))
        x = nn.Dense(width, dtype=self.dtype)(x)
        return nn.Dropout(self.dropout, deterministic=not train)(x)


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, the other half, and a norm."""

    heads: int
    kernel: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Maps `[B, S, D]` to the same shape."""
        x = x + 0.5 * FeedForward(self.dropout, self.dtype)(x, train)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.MultiHeadDotProductAttention(
            self.heads,
            dtype=self.dtype,
            use_bias=False,
            dropout_rate=self.dropout,
            deterministic=not train,
        )(h, h)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(h)
        x = x + ConvModule(self.kernel, self.dropout, self.dtype)(x, train)
        x = x + 0.5 * FeedForward(self.dropout, self.dtype)(x, train)
        return nn.LayerNorm(dtype=self.dtype)(x)


class Conformer(nn.Module):
    """Two strided convolutions, Conformer blocks, and the logits of the labels."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kernel: int
    dropout: float = 0.1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, spectrogram: Array, train: bool) -> Array:
        """Maps `float[B, T, F]` to logits `float32[B, S, V]`."""
        x = spectrogram[..., None].astype(self.dtype)
        x = nn.relu(nn.Conv(self.width, (3, 3), strides=(2, 2), dtype=self.dtype)(x))
        x = nn.relu(nn.Conv(self.width, (3, 3), strides=(2, 2), dtype=self.dtype)(x))
        x = x.reshape(*x.shape[:2], -1)
        x = nn.Dense(self.width, dtype=self.dtype)(x)
        x = x + jnp.asarray(_sinusoids(x.shape[1], self.width), self.dtype)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for _ in range(self.layers):
            x = ConformerBlock(self.heads, self.kernel, self.dropout, self.dtype)(x, train)
        return nn.Dense(self.vocabulary)(x.astype(jnp.float32))


def _sinusoids(length: int, width: int) -> np.ndarray:
    """The sines and cosines `[length, width]` of Vaswani et al. 2017."""
    rates = 10_000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def conformer(small: bool = False) -> Case:
    """12 blocks of width 256, batch 16 x 800 frames of 80 bands, bfloat16 with float32 parameters.

    Returns:
        `(loss, (params, spectrogram, labels, key))`.
    """
    if small:
        model = Conformer(vocabulary=12, width=16, layers=2, heads=2, kernel=5)
        batch, frames, bands, label_length = 2, 32, 8, 3
    else:
        model = Conformer(vocabulary=1024, width=256, layers=12, heads=4, kernel=31)
        batch, frames, bands, label_length = 16, 800, 80, 40

    def loss(params: Any, spectrogram: Array, labels: Array, key: Array) -> Array:
        logits = jnp.asarray(
            model.apply({"params": params}, spectrogram, True, rngs={"dropout": key})
        )
        logit_paddings = jnp.zeros(logits.shape[:2])
        label_paddings = jnp.zeros(labels.shape)
        blank = model.vocabulary - 1
        return optax.ctc_loss(logits, logit_paddings, labels, label_paddings, blank_id=blank).mean()

    spectrogram = floats(batch, frames, bands)
    params = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros(spectrogram.shape), False)["params"]
    )
    return loss, (params, spectrogram, integers(batch, label_length), random_key())
