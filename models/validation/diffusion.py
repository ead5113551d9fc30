"""Denoising score matching with a diffusion transformer (DiT, Peebles and Xie 2023), in Flax linen.

The blocks take their shifts, scales and gates from an embedding of the noise level and the class.

Shapes: `B` batch, `P` patches, `D` width.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.validation.shapes import Array, Case, floats, integers, random_key


def modulate(x: Array, shift: Array, scale: Array) -> Array:
    """Shifts and scales `x[B, P, D]` by `[B, D]` each."""
    return x * (1 + scale[:, None]) + shift[:, None]


def noise_embedding(log_sigma: Array, width: int) -> Array:
    """Sines and cosines `[B, width]` of the logarithms `[B]` of the noise levels."""
    rates = jnp.exp(jnp.linspace(0.0, jnp.log(1000.0), width // 2))
    angles = log_sigma[:, None] * rates
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class DiTBlock(nn.Module):
    """Attention and a feed-forward layer, each with an adaptive layer norm and a gate."""

    heads: int

    @nn.compact
    def __call__(self, x: Array, condition: Array) -> tuple[Array, None]:
        """Maps `x[B, P, D]` to the same shape; the None is what `nn.scan` collects."""
        batch, patches, width = x.shape
        modulation = nn.Dense(6 * width, name="modulation")(nn.silu(condition))
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(modulation, 6, axis=-1)

        h = nn.LayerNorm(use_bias=False, use_scale=False)(x)
        h = modulate(h, shift1, scale1)
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(h)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, patches, 3, self.heads, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        h = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        h = nn.Dense(width, name="out")(h.reshape(batch, patches, width))
        x = x + gate1[:, None] * h

        h = nn.LayerNorm(use_bias=False, use_scale=False)(x)
        h = modulate(h, shift2, scale2)
        h = nn.gelu(nn.Dense(4 * width, name="up")(h))
        h = nn.Dense(width, name="down")(h)
        return x + gate2[:, None] * h, None


class DiT(nn.Module):
    """Patches, scanned blocks, and the predicted noise."""

    width: int
    layers: int
    heads: int
    classes: int
    patch: int = 2

    @nn.compact
    def __call__(self, images: Array, log_sigma: Array, labels: Array) -> Array:
        """Maps noisy `images[B, H, W, C]` to the noise in them, of the same shape."""
        batch, height, width, channels = images.shape
        rows, columns = height // self.patch, width // self.patch
        x = nn.Conv(self.width, (self.patch, self.patch), (self.patch, self.patch))(images)
        x = x.reshape(batch, rows * columns, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])

        condition = nn.Dense(self.width)(noise_embedding(log_sigma, self.width))
        condition = nn.Dense(self.width)(nn.silu(condition))
        condition = condition + nn.Embed(self.classes + 1, self.width)(labels)

        same_for_all: Any = nn.broadcast
        blocks = nn.scan(
            DiTBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=same_for_all,
            length=self.layers,
        )
        x, _ = blocks(self.heads, name="blocks")(x, condition)

        shift, scale = jnp.split(nn.Dense(2 * self.width)(nn.silu(condition)), 2, axis=-1)
        x = modulate(nn.LayerNorm(use_bias=False, use_scale=False)(x), shift, scale)
        x = nn.Dense(self.patch**2 * channels)(x)
        x = x.reshape(batch, rows, columns, self.patch, self.patch, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape)


def score_diffusion(small: bool = False) -> Case:
    """12 scanned blocks of width 384, batch 12 of 32 x 32 x 4 latents, float32.

    Returns:
        `(loss, (params, latents, labels, key))`.
    """
    if small:
        model, batch, size = DiT(width=16, layers=3, heads=2, classes=8), 2, 8
    else:
        model, batch, size = DiT(width=384, layers=12, heads=6, classes=1000), 12, 32

    def loss(params: Any, latents: Array, labels: Array, key: Array) -> Array:
        level_key, noise_key, drop_key = jax.random.split(key, 3)
        log_sigma = -1.2 + 1.2 * jax.random.normal(level_key, labels.shape)
        sigma = jnp.exp(log_sigma)[:, None, None, None]
        noise = jax.random.normal(noise_key, latents.shape)
        dropped = jax.random.bernoulli(drop_key, 0.1, labels.shape)
        labels = jnp.where(dropped, model.classes, labels)
        noisy = (latents + sigma * noise) / jnp.sqrt(1 + sigma**2)
        predicted = jnp.asarray(model.apply({"params": params}, noisy, log_sigma, labels))
        return jnp.mean((predicted - noise) ** 2)

    latents, labels = floats(batch, size, size, 4), integers(batch)
    params = jax.eval_shape(
        lambda: model.init(
            jax.random.key(0),
            jnp.zeros(latents.shape),
            jnp.zeros(labels.shape),
            jnp.zeros(labels.shape, jnp.int32),
        )["params"]
    )
    return loss, (params, latents, labels, random_key())
