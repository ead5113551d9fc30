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

from models.batch_norm import Case, classifier_loss, conv_norm, pool_and_classify

Array = jax.Array
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
            y = nn.relu6(conv_norm(config, y, wide, 1, "expand"))
        y = nn.relu6(conv_norm(config, y, wide, 3, "depthwise", stride=self.stride, groups=wide))
        y = conv_norm(config, y, self.filters, 1, "project")
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
        x = nn.relu6(conv_norm(config, images, config.stem, 3, "stem", stride=2))
        for stage, (expansion, filters, repeats, stride) in enumerate(config.blocks):
            for index in range(repeats):
                name = f"stage_{stage}_block_{index}"
                x = block(config, expansion, filters, stride if index == 0 else 1, name=name)(x)
        x = nn.relu6(conv_norm(config, x, config.last, 1, "last"))
        return pool_and_classify(config, x, deterministic)


def mobilenet_loss(
    config: MobileNetConfig, batch: int, size: int, wrap_block: WrapModule | None = None
) -> Case:
    """The training loss of a MobileNetV2 and the shapes of its arguments; see `classifier_loss`.

    Args:
        config: the network.
        batch: `B`.
        size: `S`; 224 for ImageNet.
        wrap_block: see `MobileNetV2`.
    """
    return classifier_loss(MobileNetV2(config, wrap_block), config, batch, size)
