"""Networks of images: ConvNeXt (Liu et al. 2022) in plain jax, a hierarchical VAE in Flax linen.

Shapes: `B` batch, `H`, `W` height and width, `C` channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from models.validation.shapes import Array, Case, Shape, floats, integers, random_key


def conv(x: Array, kernel: Array, stride: int, padding: str, groups: int = 1) -> Array:
    """A convolution of `x[B, H, W, C]`."""
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def channel_norm(x: Array, params: dict[str, Array]) -> Array:
    """Layer norm over the channels."""
    mean = x.mean(axis=-1, keepdims=True)
    var = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-6) * params["scale"] + params["bias"]


def convnext_block(params: Any, x: Array) -> Array:
    """A depthwise 7 x 7 convolution and two pointwise layers, scaled and added to `x`."""
    h = conv(x, params["depthwise"], 1, "SAME", groups=x.shape[-1]) + params["depthwise_bias"]
    h = channel_norm(h, params["norm"])
    h = jax.nn.gelu(h @ params["up"] + params["up_bias"], approximate=False)
    h = h @ params["down"] + params["down_bias"]
    return x + params["gamma"] * h


def convnext_logits(params: Any, images: Array) -> Array:
    """Maps `[B, H, W, 3]` to logits."""
    x = images
    for i, stage in enumerate(params["stages"]):
        if i == 0:
            x = channel_norm(conv(x, stage["entry"], 4, "VALID"), stage["norm"])
        else:
            x = conv(channel_norm(x, stage["norm"]), stage["entry"], 2, "VALID")
        for block in stage["blocks"]:
            x = convnext_block(block, x)
    x = channel_norm(x.mean(axis=(1, 2)), params["norm"])
    return x @ params["head"] + params["head_bias"]


def _block_shapes(width: int) -> dict[str, Any]:
    return {
        "depthwise": floats(7, 7, 1, width),
        "depthwise_bias": floats(width),
        "norm": _norm_shapes(width),
        "up": floats(width, 4 * width),
        "up_bias": floats(4 * width),
        "down": floats(4 * width, width),
        "down_bias": floats(width),
        "gamma": floats(width),
    }


def _norm_shapes(width: int) -> dict[str, Shape]:
    return {"scale": floats(width), "bias": floats(width)}


def convnext(small: bool = False) -> Case:
    """ConvNeXt-T, batch 8 of 224 x 224 images, 1000 classes, float32.

    Returns:
        `(loss, (params, images, labels))`.
    """
    if small:
        batch, size, classes, depths, widths = 2, 32, 10, (1, 1, 2), (8, 12, 16)
    else:
        batch, size, classes, depths, widths = 8, 224, 1000, (3, 3, 9, 3), (96, 192, 384, 768)

    def loss(params: Any, images: Array, labels: Array) -> Array:
        logits = convnext_logits(params, images)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean()

    stages = []
    before = 3
    for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        kernel = 2 if i else 4
        stages.append(
            {
                "entry": floats(kernel, kernel, before, width),
                "norm": _norm_shapes(before if i else width),
                "blocks": [_block_shapes(width) for _ in range(depth)],
            }
        )
        before = width
    params = {
        "stages": stages,
        "norm": _norm_shapes(before),
        "head": floats(before, classes),
        "head_bias": floats(classes),
    }
    return loss, (params, floats(batch, size, size, 3), integers(batch))


class ResidualBlock(nn.Module):
    """Twice group norm, swish and a 3 x 3 convolution, added to the input."""

    groups: int = 8

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, H, W, C]` to the same shape."""
        h = x
        for _ in range(2):
            h = nn.swish(nn.GroupNorm(num_groups=self.groups)(h))
            h = nn.Conv(x.shape[-1], (3, 3))(h)
        return x + h


def gaussian_kl(mean_q: Array, log_std_q: Array, mean_p: Array, log_std_p: Array) -> Array:
    """The divergence of diagonal normal distributions, summed over all axes but the first."""
    ratio = jnp.exp(2 * (log_std_q - log_std_p))
    shift = ((mean_q - mean_p) / jnp.exp(log_std_p)) ** 2
    kl = 0.5 * (ratio + shift - 1) - (log_std_q - log_std_p)
    return kl.sum(axis=(1, 2, 3))


class HierarchicalVAE(nn.Module):
    """A ladder of latent levels: the encoder goes up, the decoder down, drawing on both.

    Attributes:
        widths: the channels of each level, from the finest to the coarsest.
        blocks: residual blocks on each level, in the encoder and in the decoder.
        latents: channels of the latent of each level.
        groups: of the group norms.
    """

    widths: Sequence[int]
    blocks: int
    latents: int
    groups: int = 8

    @nn.compact
    def __call__(self, images: Array, key: Array) -> tuple[Array, Array]:
        """Maps `[B, H, W, 3]` to a reconstruction and the divergences `[B]` of all levels."""
        x = nn.Conv(self.widths[0], (3, 3))(images)
        encoded = []
        for level, width in enumerate(self.widths):
            if level:
                x = nn.Conv(width, (3, 3), strides=(2, 2))(x)
            for _ in range(self.blocks):
                x = ResidualBlock(self.groups)(x)
            encoded.append(x)

        x = self.param("top", nn.initializers.zeros, x.shape[1:])
        x = jnp.broadcast_to(x, encoded[-1].shape)
        total_kl = jnp.zeros(images.shape[0])
        for level, width in reversed(list(enumerate(self.widths))):
            if x.shape[-1] != width:
                batch, height, across, channels = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * across, channels), "nearest")
                x = nn.Conv(width, (3, 3))(x)
            prior = nn.Conv(2 * self.latents, (1, 1), name=f"prior_{level}")(x)
            posterior = nn.Conv(2 * self.latents, (3, 3), name=f"posterior_{level}")(
                jnp.concatenate([x, encoded[level]], axis=-1)
            )
            mean_p, log_std_p = jnp.split(prior, 2, axis=-1)
            mean_q, log_std_q = jnp.split(posterior, 2, axis=-1)
            noise = jax.random.normal(jax.random.fold_in(key, level), mean_q.shape)
            z = mean_q + jnp.exp(log_std_q) * noise
            total_kl = total_kl + gaussian_kl(mean_q, log_std_q, mean_p, log_std_p)
            x = x + nn.Conv(width, (1, 1), name=f"inject_{level}")(z)
            for _ in range(self.blocks):
                x = ResidualBlock(self.groups)(x)
        return nn.Conv(3, (3, 3), name="reconstruction")(nn.swish(x)), total_kl


def vae_hierarchical(small: bool = False) -> Case:
    """4 latent levels of 64 to 256 channels, batch 32 of 64 x 64 images, float32.

    Returns:
        `(loss, (params, images, key))`; the key draws the latents.
    """
    if small:
        model = HierarchicalVAE(widths=(8, 12, 16), blocks=1, latents=2, groups=2)
        batch, size = 2, 16
    else:
        model = HierarchicalVAE(widths=(64, 96, 128, 256), blocks=2, latents=16)
        batch, size = 32, 64

    def loss(params: Any, images: Array, key: Array) -> Array:
        output: Any = model.apply({"params": params}, images, key)
        reconstruction, kl = output
        error = 0.5 * jnp.square(reconstruction - images).sum(axis=(1, 2, 3))
        return jnp.mean(error + kl) / (size * size * 3)

    images = floats(batch, size, size, 3)
    params = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros(images.shape), jax.random.key(1))["params"]
    )
    return loss, (params, images, random_key())
