"""U-Net in Flax linen, for the segmentation of images.

Ronneberger et al. 2015, figure 1: two 3x3 convolutions per level, four max pools, four 2x2 up-convolutions
that halve the channels, and skip connections joined along the channels. The departure is padding: all
convolutions are "same", so the output is as large as the input (the paper's are "valid" and crop the skip
connections), which changes no parameter. Convolutions have a bias; there is no batch norm. Dropout lies
at the end of the contracting path (section 3.1), after the two deepest levels. NHWC.

Shapes: `B` batch, `S` image size, `C` channels, `K` classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.gpt import key_shape

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]
WrapModule = Callable[[type[nn.Module]], type[nn.Module]]


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """What a U-Net is made of.

    Attributes:
        filters: the channels of the first level; each level doubles them.
        depth: the number of times the image is halved.
        channels: of the input image; 1 in the paper.
        classes: `K`, of every pixel; 2 in the paper.
        dropout: the rate of the dropout after the two deepest levels of the contracting path.
        dtype: the dtype of activations.
        param_dtype: the dtype of parameters.
    """

    filters: int = 64
    depth: int = 4
    channels: int = 1
    classes: int = 2
    dropout: float = 0.5
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32


UNET = UNetConfig()
UNET_SMALL = UNetConfig(filters=4)


class DoubleConv(nn.Module):
    """Two 3x3 convolutions with ReLU."""

    config: UNetConfig
    filters: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, S, S, C]` to `[B, S, S, filters]`."""
        for index in range(2):
            x = nn.relu(_conv(self.config, self.filters, 3, f"conv_{index}")(x))
        return x


class UNet(nn.Module):
    """The contracting path, the expanding path and a 1x1 convolution to the classes.

    Attributes:
        config: the network.
        wrap_block: applied to the class `DoubleConv`, for hand-picked checkpointing such as
            `functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)`.
    """

    config: UNetConfig
    wrap_block: WrapModule | None = None

    @nn.compact
    def __call__(self, images: Array, deterministic: bool) -> Array:
        """Maps images `[B, S, S, channels]` to logits `[B, S, S, K]`."""
        config = self.config
        block: Any = DoubleConv if self.wrap_block is None else self.wrap_block(DoubleConv)
        x, skips = images, []
        for level in range(config.depth + 1):
            x = x if level == 0 else nn.max_pool(x, (2, 2), strides=(2, 2))
            x = block(config, config.filters * 2**level, name=f"down_{level}")(x)
            if level >= config.depth - 1:
                x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
            skips.append(x)
        for level in reversed(range(config.depth)):
            filters = config.filters * 2**level
            x = _up(config, filters, f"upsample_{level}")(x)
            x = jnp.concatenate([skips[level], x], axis=-1)
            x = block(config, filters, name=f"up_{level}")(x)
        return _conv(config, config.classes, 1, "head")(x)


def unet_loss(
    config: UNetConfig, batch: int, size: int, wrap_block: WrapModule | None = None
) -> Case:
    """The training loss of a U-Net and the shapes of its arguments.

    Args:
        config: the network.
        batch: `B`.
        size: `S`, a multiple of `2**depth`.
        wrap_block: see `UNet`.

    Returns:
        `(loss, (params, images, labels, key))`, where `loss(...)` is the cross entropy, the mean over
        pixels, a float32 scalar; `images` is `[B, S, S, channels]` and `labels` is `int[B, S, S]`.
        Pixels whose label is none of the `K` classes are void and do not count. `key` drives
        dropout; None turns dropout off.

    Raises:
        ValueError: the levels do not halve `size` evenly.
    """
    if size <= 0 or size % 2**config.depth:
        raise ValueError(
            f"`size` is {size}; expected a positive multiple of {2**config.depth}, as the image is "
            f"halved {config.depth} times"
        )
    model = UNet(config, wrap_block)

    def loss(params: Any, images: Array, labels: Array, key: Array | None) -> Array:
        rngs = None if key is None else {"dropout": key}
        logits = jnp.asarray(model.apply({"params": params}, images, key is None, rngs=rngs))
        return pixel_cross_entropy(logits, labels)

    params = jax.eval_shape(lambda: init_params(config))
    images = jax.ShapeDtypeStruct((batch, size, size, config.channels), config.dtype)
    labels = jax.ShapeDtypeStruct((batch, size, size), jnp.int32)
    return loss, (params, images, labels, key_shape())


def pixel_cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross entropy, in float32, of `[..., K]` logits over the pixels that have a class.

    `labels` is `int[...]`; a label outside `0..K-1` marks a void pixel. The mean of none is 0.
    """
    counted = (labels >= 0) & (labels < logits.shape[-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), jnp.where(counted, labels, 0)
    )
    return jnp.sum(jnp.where(counted, losses, 0.0)) / jnp.maximum(jnp.sum(counted), 1)


def init_params(config: UNetConfig, seed: int | Array = 0) -> Any:
    """Freshly initialised parameters; under `jax.eval_shape`, their shapes."""
    size = 2**config.depth
    images = jnp.zeros((1, size, size, config.channels), config.dtype)
    return UNet(config).init(jax.random.key(seed), images, True)["params"]


def _conv(config: UNetConfig, filters: int, kernel: int, name: str) -> nn.Conv:
    return nn.Conv(
        filters,
        (kernel, kernel),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.he_normal(),
        name=name,
    )


def _up(config: UNetConfig, filters: int, name: str) -> nn.ConvTranspose:
    """The 2x2 up-convolution: every input pixel becomes four."""
    return nn.ConvTranspose(
        filters,
        (2, 2),
        strides=(2, 2),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.he_normal(),
        name=name,
    )
