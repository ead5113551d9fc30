"""Networks on images: concatenated features, a denoiser with skips, and a transformer on patches.

Shapes: `B` batch, `S` height and width of an image, `C` channels, `D` width, `T` patches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.development.layers import (
    Array,
    Case,
    Params,
    attention,
    attention_shapes,
    cross_entropy,
    layer_norm,
    mean_square,
    mlp,
    mlp_shapes,
    norm_shapes,
    shape,
)


def _conv(kernel: Array, x: Array, stride: int = 1) -> Array:
    """A convolution of `[B, S, S, C]` with a kernel `[k, k, C, F]` that keeps the size (`SAME`)."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


# --- DenseNet


@dataclasses.dataclass(frozen=True)
class DenseNetConfig:
    """What a DenseNet is made of.

    Attributes:
        batch: `B`.
        size: `S`.
        blocks: the number of layers in each block; the image is halved between blocks.
        growth: the channels that a layer adds.
        classes: the number of labels.
    """

    batch: int
    size: int
    blocks: tuple[int, ...]
    growth: int
    classes: int


DENSENET = DenseNetConfig(batch=32, size=64, blocks=(6, 8, 8), growth=24, classes=100)
DENSENET_SMALL = DenseNetConfig(batch=4, size=8, blocks=(2, 2), growth=4, classes=10)


DENSENET_BC_100 = DenseNetConfig(batch=32, size=32, blocks=(16, 16, 16), growth=12, classes=10)
"""100 layers of growth 12 on CIFAR images, a network of Huang et al., table 2."""


def densenet(small: bool = False, config: DenseNetConfig | None = None) -> Case:
    """DenseNet-BC (Huang et al. 2017) of 22 layers and growth 24, batch 32 of 64 x 64, float32.

    Each layer reads the concatenation of all before it in its block; norms are over the batch.

    `loss(params, images, labels)`: the mean cross entropy of `int[B]` after `[B, S, S, 3]`.
    """
    config = config or (DENSENET_SMALL if small else DENSENET)

    def loss(params: Params, images: Array, labels: Array) -> Array:
        x = _conv(params["first"], images)
        for block in params["blocks"]:
            if "transition" in block:
                x = _transition(block["transition"], x)
            for layer in block["layers"]:
                x = jnp.concatenate([x, _dense_layer(layer, x)], axis=-1)
        x = jax.nn.relu(_batch_norm(params["norm"], x))
        return cross_entropy(mlp(params["head"], jnp.mean(x, axis=(1, 2)), jax.nn.relu), labels)

    images = shape(config.batch, config.size, config.size, 3)
    return loss, (_densenet_shapes(config), images, shape(config.batch, dtype=jnp.int32))


def _dense_layer(params: Params, x: Array) -> Array:
    x = _conv(params["narrow"], jax.nn.relu(_batch_norm(params["norm"], x)))
    return _conv(params["conv"], jax.nn.relu(_batch_norm(params["narrow_norm"], x)))


def _transition(params: Params, x: Array) -> Array:
    x = _conv(params["conv"], jax.nn.relu(_batch_norm(params["norm"], x)))
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4


def _batch_norm(params: Params, x: Array) -> Array:
    """Norm of `[B, S, S, C]` by the moments of this batch."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(x - mean), axis=(0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]


def _densenet_shapes(config: DenseNetConfig) -> dict[str, Any]:
    growth, channels = config.growth, 2 * config.growth
    first = shape(3, 3, 3, channels)
    blocks: list[dict[str, Any]] = []
    for index, count in enumerate(config.blocks):
        block: dict[str, Any] = {"layers": []}
        if index:
            conv = shape(1, 1, channels, channels // 2)
            block["transition"] = {"norm": norm_shapes(channels), "conv": conv}
            channels //= 2
        for _ in range(count):
            layer = {
                "norm": norm_shapes(channels),
                "narrow": shape(1, 1, channels, 4 * growth),
                "narrow_norm": norm_shapes(4 * growth),
                "conv": shape(3, 3, 4 * growth, growth),
            }
            block["layers"].append(layer)
            channels += growth
        blocks.append(block)
    head = mlp_shapes(channels, config.classes)
    return {"first": first, "blocks": blocks, "norm": norm_shapes(channels), "head": head}


# --- a denoising U-Net


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """What a denoising U-Net is made of.

    Attributes:
        batch: `B`.
        size: `S`.
        channels: of the layers of each level; the image is halved between levels.
        depth: residual layers of each level on the way down, as many on the way up.
        heads: of the attention, which comes after each residual layer of the last level.
        groups: of the group norms.
    """

    batch: int
    size: int
    channels: tuple[int, ...]
    depth: int
    heads: int
    groups: int

    @property
    def time_width(self) -> int:
        """The width of the embedded time."""
        return 4 * self.channels[0]


UNET = UNetConfig(batch=16, size=64, channels=(64, 128, 256), depth=2, heads=4, groups=16)
UNET_SMALL = UNetConfig(batch=2, size=8, channels=(8, 16), depth=1, heads=2, groups=4)


def diffusion_unet(small: bool = False) -> Case:
    """The U-Net of a diffusion model (Ho et al. 2020), batch 16 of 64 x 64 images, float32.

    64, 128 and 256 channels, 2 residual layers of each on both ways, attention at 16 x 16, and the
    embedded time added inside each layer.

    `loss(params, images, noise, times)`: the mean squared error of the predicted noise, of images and
    noise `[B, S, S, 3]` and times `[B]`.
    """
    config = UNET_SMALL if small else UNET

    def loss(params: Params, images: Array, noise: Array, times: Array) -> Array:
        kept = jax.nn.sigmoid(times)[:, None, None, None]
        noisy = jnp.sqrt(kept) * images + jnp.sqrt(1 - kept) * noise
        return mean_square(_denoise(config, params, noisy, times), noise)

    images = shape(config.batch, config.size, config.size, 3)
    return loss, (_unet_shapes(config), images, images, shape(config.batch))


def _denoise(config: UNetConfig, params: Params, x: Array, times: Array) -> Array:
    time = mlp(params["time"], _time_features(times, config.channels[0]), jax.nn.silu)
    x = _conv(params["first"], x)
    skips: list[Array] = []
    for level, layers in enumerate(params["down"]):
        if level:
            x = _conv(layers["halve"], x, stride=2)
        for layer in layers["layers"]:
            x = _residual(config, layer, x, time)
            skips.append(x)
    for layers in params["up"]:
        for layer in layers["layers"]:
            x = _residual(config, layer, jnp.concatenate([x, skips.pop()], axis=-1), time)
        if "double" in layers:
            batch, size, _, channels = x.shape
            x = jax.image.resize(x, (batch, 2 * size, 2 * size, channels), "nearest")
            x = _conv(layers["double"], x)
    return _conv(params["last"], jax.nn.silu(_group_norm(params["norm"], x, config.groups)))


def _residual(config: UNetConfig, params: Params, x: Array, time: Array) -> Array:
    """Two convolutions with the time between, on `[B, S, S, C]`, and attention where it has one."""
    y = _conv(params["conv_1"], jax.nn.silu(_group_norm(params["norm_1"], x, config.groups)))
    y = y + mlp(params["time"], jax.nn.silu(time), jax.nn.silu)[:, None, None, :]
    y = _conv(params["conv_2"], jax.nn.silu(_group_norm(params["norm_2"], y, config.groups)))
    x = y + (_conv(params["shortcut"], x) if "shortcut" in params else x)
    if "attention" not in params:
        return x
    flat = _group_norm(params["attention_norm"], x, config.groups)
    flat = flat.reshape(x.shape[0], -1, x.shape[-1])
    return x + attention(params["attention"], flat, config.heads).reshape(x.shape)


def _group_norm(params: Params, x: Array, groups: int) -> Array:
    """Norm of `[B, S, S, C]` over the image and the channels of a group."""
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    centred = grouped - jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=(1, 2, 4), keepdims=True)
    normed = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normed * params["scale"] + params["bias"]


def _time_features(times: Array, width: int) -> Array:
    """Sines and cosines `[B, D]` of the times `[B]`."""
    frequencies = jnp.exp(jnp.linspace(0.0, 6.0, width // 2))
    angles = times[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _unet_shapes(config: UNetConfig) -> dict[str, Any]:
    channels, depth = config.channels, config.depth
    last = len(channels) - 1
    down: list[dict[str, Any]] = []
    skips: list[int] = []
    width = channels[0]
    for level, out in enumerate(channels):
        layers: dict[str, Any] = {"halve": shape(3, 3, width, width)} if level else {}
        inputs = [width, *[out] * (depth - 1)]
        layers["layers"] = [_residual_shapes(config, c, out, level == last) for c in inputs]
        skips += [out] * depth
        width = out
        down.append(layers)
    up: list[dict[str, Any]] = []
    for level, out in reversed(list(enumerate(channels))):
        layers = {"layers": []}
        for _ in range(depth):
            fed = width + skips.pop()
            layers["layers"].append(_residual_shapes(config, fed, out, level == last))
            width = out
        if level:
            layers["double"] = shape(3, 3, width, width)
        up.append(layers)
    return {
        "time": mlp_shapes(channels[0], config.time_width, config.time_width),
        "first": shape(3, 3, 3, channels[0]),
        "down": down,
        "up": up,
        "norm": norm_shapes(channels[0]),
        "last": shape(3, 3, channels[0], 3),
    }


def _residual_shapes(config: UNetConfig, fed: int, out: int, attends: bool) -> dict[str, Any]:
    layer = {
        "norm_1": norm_shapes(fed),
        "conv_1": shape(3, 3, fed, out),
        "time": mlp_shapes(config.time_width, out),
        "norm_2": norm_shapes(out),
        "conv_2": shape(3, 3, out, out),
    }
    if fed != out:
        layer["shortcut"] = shape(1, 1, fed, out)
    if attends:
        layer |= {"attention_norm": norm_shapes(out), "attention": attention_shapes(out)}
    return layer


# --- a vision transformer


def vit(small: bool = False) -> Case:
    """6 unrolled layers on patches of 16 x 16 (Dosovitskiy et al. 2021), batch 32 of 224 x 224 images.

    Width 768, 12 heads, bfloat16 with float32 parameters.

    `loss(params, images, labels)`: the mean cross entropy of `int[B]` after `[B, S, S, 3]`.
    """
    layers, batch, size, patch, width, heads = (
        (2, 2, 8, 4, 16, 2) if small else (6, 32, 224, 16, 768, 12)
    )
    classes = 10 if small else 1000
    layer = {
        "attention_norm": norm_shapes(width),
        "attention": attention_shapes(width),
        "mlp_norm": norm_shapes(width),
        "mlp": mlp_shapes(width, 4 * width, width),
    }
    params = {
        "patches": shape(patch, patch, 3, width),
        "class": shape(1, 1, width),
        "positions": shape((size // patch) ** 2 + 1, width),
        "layers": [layer for _ in range(layers)],
        "norm": norm_shapes(width),
        "head": mlp_shapes(width, classes),
    }

    def loss(params: Params, images: Array, labels: Array) -> Array:
        kernel = params["patches"].astype(jnp.bfloat16)
        patches = _conv(kernel, images.astype(jnp.bfloat16), stride=patch).reshape(batch, -1, width)
        token = jnp.broadcast_to(params["class"].astype(jnp.bfloat16), (batch, 1, width))
        x = jnp.concatenate([token, patches], axis=1) + params["positions"].astype(jnp.bfloat16)
        for layer in params["layers"]:
            y = layer_norm(layer["attention_norm"], x)
            x = x + attention(layer["attention"], y, heads)
            x = x + mlp(layer["mlp"], layer_norm(layer["mlp_norm"], x), jax.nn.gelu)
        return cross_entropy(
            mlp(params["head"], layer_norm(params["norm"], x)[:, 0], jax.nn.gelu), labels
        )

    return loss, (params, shape(batch, size, size, 3), shape(batch, dtype=jnp.int32))
