"""MobileNetV2 in Flax linen, in training mode: inverted residuals with linear bottlenecks.

Sandler et al. 2018, table 2, width multiplier 1. NHWC, batch norm with running statistics after every
convolution, ReLU6, depthwise 3x3 convolutions; dropout before the classifier.

Shapes: `B` batch, `S` image size, `C` channels, `K` classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.gpt import cross_entropy, key_shape

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]
WrapModule = Callable[[type[nn.Module]], type[nn.Module]]


@dataclasses.dataclass(frozen=True)
class MobileNetConfig:
    """What a MobileNetV2 is made of.

    Attributes:
        blocks: the paper's `(t, c, n, s)`: expansion, output channels, repeats, stride of the first.
        stem: the channels of the first convolution.
        last: the channels of the last convolution.
        classes: `K`.
        dropout: the rate of the dropout before the classifier.
        dtype: the dtype of activations.
        param_dtype: the dtype of parameters.
    """

    blocks: tuple[tuple[int, int, int, int], ...]
    stem: int = 32
    last: int = 1280
    classes: int = 1000
    dropout: float = 0.2
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32


MOBILENET_V2 = MobileNetConfig(
    blocks=(
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
)
MOBILENET_V2_SMALL = MobileNetConfig(
    blocks=((1, 4, 1, 1), (6, 8, 2, 2), (6, 16, 2, 2)), stem=8, last=64, classes=10
)


class InvertedResidual(nn.Module):
    """Convolutions 1x1 (expansion), 3x3 depthwise and 1x1 (projection, without activation)."""

    config: MobileNetConfig
    expansion: int
    filters: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, S, S, C]` to `[B, S / stride, S / stride, filters]`."""
        config, channels = self.config, x.shape[-1]
        wide = channels * self.expansion
        y = x
        if self.expansion != 1:
            y = nn.relu6(_conv_norm(config, y, wide, 1, 1, "expand"))
        y = nn.relu6(_conv_norm(config, y, wide, 3, self.stride, "depthwise", groups=wide))
        y = _conv_norm(config, y, self.filters, 1, 1, "project")
        return x + y if self.stride == 1 and channels == self.filters else y


class MobileNetV2(nn.Module):
    """Stem, inverted residuals, last convolution, global average pool and classifier.

    Attributes:
        config: the network.
        wrap_block: applied to the class `InvertedResidual`, for hand-picked checkpointing such as
            `functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)`.
    """

    config: MobileNetConfig
    wrap_block: WrapModule | None = None

    @nn.compact
    def __call__(self, images: Array, deterministic: bool) -> Array:
        """Maps images `[B, S, S, 3]` to logits `[B, K]`; batch norm is always in training mode."""
        config = self.config
        block: Any = (
            InvertedResidual if self.wrap_block is None else self.wrap_block(InvertedResidual)
        )
        x = nn.relu6(_conv_norm(config, images, config.stem, 3, 2, "stem"))
        for stage, (expansion, filters, repeats, stride) in enumerate(config.blocks):
            for index in range(repeats):
                name = f"stage_{stage}_block_{index}"
                x = block(config, expansion, filters, stride if index == 0 else 1, name=name)(x)
        x = nn.relu6(_conv_norm(config, x, config.last, 1, 1, "last"))
        x = nn.Dropout(config.dropout)(jnp.mean(x, axis=(1, 2)), deterministic=deterministic)
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        return nn.Dense(config.classes, name="head", **dtypes)(x)


def mobilenet_loss(
    config: MobileNetConfig, batch: int, size: int, wrap_block: WrapModule | None = None
) -> Case:
    """The training loss of a MobileNetV2 and the shapes of its arguments.

    The new batch statistics are computed and dropped, as in `models.resnet.resnet_scalar_loss`.

    Args:
        config: the network.
        batch: `B`.
        size: `S`; 224 for ImageNet.
        wrap_block: see `MobileNetV2`.

    Returns:
        `(loss, (params, batch_stats, images, labels, key))`, where `loss(...)` is the mean cross
        entropy, a float32 scalar; `images` is `[B, S, S, 3]` and `labels` is `int[B]`. `key` drives
        dropout; None turns dropout off.
    """
    model = MobileNetV2(config, wrap_block)

    def loss(
        params: Any, batch_stats: Any, images: Array, labels: Array, key: Array | None
    ) -> Array:
        variables = {"params": params, "batch_stats": batch_stats}
        rngs = None if key is None else {"dropout": key}
        logits, _ = model.apply(variables, images, key is None, rngs=rngs, mutable=["batch_stats"])
        return cross_entropy(logits, labels)

    params, batch_stats = jax.eval_shape(lambda: init_variables(config, size))
    images = jax.ShapeDtypeStruct((batch, size, size, 3), config.dtype)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return loss, (params, batch_stats, images, labels, key_shape())


def init_variables(config: MobileNetConfig, size: int, seed: int | Array = 0) -> tuple[Any, Any]:
    """Freshly initialised `(params, batch_stats)`; under `jax.eval_shape`, their shapes."""
    images = jnp.zeros((1, size, size, 3), config.dtype)
    variables = MobileNetV2(config).init(jax.random.key(seed), images, True)
    return variables["params"], variables["batch_stats"]


def _conv_norm(
    config: MobileNetConfig,
    x: Array,
    filters: int,
    kernel: int,
    stride: int,
    name: str,
    groups: int = 1,
) -> Array:
    """A convolution without bias and its batch norm; called inside a module."""
    dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    padding = (kernel - 1) // 2
    conv = nn.Conv(
        filters,
        (kernel, kernel),
        strides=(stride, stride),
        padding=((padding, padding), (padding, padding)),
        feature_group_count=groups,
        use_bias=False,
        kernel_init=nn.initializers.he_normal(),
        name=f"conv_{name}",
        **dtypes,
    )
    norm = nn.BatchNorm(
        use_running_average=False, momentum=0.9, epsilon=1e-5, name=f"norm_{name}", **dtypes
    )
    return norm(conv(x))
