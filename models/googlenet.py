"""GoogLeNet (Inception v1) in Flax linen, in training mode, with batch norm and without aux heads.

Szegedy et al. 2015, table 1, in the form in which it is used today: convolutions without bias, batch
norm (Ioffe & Szegedy 2015) after each, no local response normalisation, no auxiliary classifiers.
`GOOGLENET` has 3x3 kernels in the third branch, as the implementation in torchvision, whose parameter
count (6 624 904) is the one that is quoted; `GOOGLENET_PAPER` has the paper's 5x5. Pools that halve the
image round up. NHWC.

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
class Branches:
    """The channels of one Inception module, a row of the paper's table 1.

    Attributes:
        one: the 1x1 branch.
        three_reduce, three: the 1x1 reduction and the 3x3 convolution of the second branch.
        five_reduce, five: the 1x1 reduction and the large convolution of the third branch.
        pool: the 1x1 projection after the max pool.
    """

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    pool: int


@dataclasses.dataclass(frozen=True)
class GoogLeNetConfig:
    """What a GoogLeNet is made of.

    Attributes:
        stages: the Inception modules; a max pool with stride 2 separates the stages.
        stem: the channels of the three convolutions before the first module.
        large_kernel: the kernel size of the third branch, 5 in the paper.
        classes: `K`.
        dropout: the rate of the dropout before the classifier; 0.4 in the paper.
        dtype: the dtype of activations.
        param_dtype: the dtype of parameters.
    """

    stages: tuple[tuple[Branches, ...], ...]
    stem: tuple[int, int, int] = (64, 64, 192)
    large_kernel: int = 3
    classes: int = 1000
    dropout: float = 0.4
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32


GOOGLENET = GoogLeNetConfig(
    stages=(
        (Branches(64, 96, 128, 16, 32, 32), Branches(128, 128, 192, 32, 96, 64)),
        (
            Branches(192, 96, 208, 16, 48, 64),
            Branches(160, 112, 224, 24, 64, 64),
            Branches(128, 128, 256, 24, 64, 64),
            Branches(112, 144, 288, 32, 64, 64),
            Branches(256, 160, 320, 32, 128, 128),
        ),
        (Branches(256, 160, 320, 32, 128, 128), Branches(384, 192, 384, 48, 128, 128)),
    )
)
GOOGLENET_PAPER = dataclasses.replace(GOOGLENET, large_kernel=5)
GOOGLENET_SMALL = GoogLeNetConfig(
    stages=((Branches(8, 12, 16, 4, 4, 4),), (Branches(24, 12, 26, 4, 6, 8),)),
    stem=(8, 8, 24),
    classes=10,
)


class Inception(nn.Module):
    """Four branches over the same input, joined along the channels."""

    config: GoogLeNetConfig
    branches: Branches

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, S, S, C]` to `[B, S, S, one + three + five + pool]`."""
        config, to = self.config, self.branches
        one = _conv_norm_relu(config, x, to.one, 1, "one")
        three = _conv_norm_relu(config, x, to.three_reduce, 1, "three_reduce")
        three = _conv_norm_relu(config, three, to.three, 3, "three")
        five = _conv_norm_relu(config, x, to.five_reduce, 1, "five_reduce")
        five = _conv_norm_relu(config, five, to.five, config.large_kernel, "five")
        pool = nn.max_pool(x, (3, 3), strides=(1, 1), padding="SAME")
        pool = _conv_norm_relu(config, pool, to.pool, 1, "pool")
        return jnp.concatenate([one, three, five, pool], axis=-1)


class GoogLeNet(nn.Module):
    """Stem, Inception modules, global average pool and classifier.

    Attributes:
        config: the network.
        wrap_block: applied to the class `Inception`, for hand-picked checkpointing such as
            `functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)`.
    """

    config: GoogLeNetConfig
    wrap_block: WrapModule | None = None

    @nn.compact
    def __call__(self, images: Array, deterministic: bool) -> Array:
        """Maps images `[B, S, S, 3]` to logits `[B, K]`; batch norm is always in training mode."""
        config = self.config
        module: Any = Inception if self.wrap_block is None else self.wrap_block(Inception)
        first, second, third = config.stem
        x = _halve(_conv_norm_relu(config, images, first, 7, "stem_0", stride=2))
        x = _conv_norm_relu(config, x, second, 1, "stem_1")
        x = _halve(_conv_norm_relu(config, x, third, 3, "stem_2"))
        for stage, modules in enumerate(config.stages):
            x = x if stage == 0 else _halve(x)
            for index, branches in enumerate(modules):
                x = module(config, branches, name=f"stage_{stage}_module_{index}")(x)
        return pool_and_classify(config, x, deterministic)


def googlenet_loss(
    config: GoogLeNetConfig, batch: int, size: int, wrap_block: WrapModule | None = None
) -> Case:
    """The training loss of a GoogLeNet and the shapes of its arguments; see `classifier_loss`.

    Args:
        config: the network.
        batch: `B`.
        size: `S`; 224 for ImageNet.
        wrap_block: see `GoogLeNet`.
    """
    return classifier_loss(GoogLeNet(config, wrap_block), config, batch, size)


def _halve(x: Array) -> Array:
    """The 3x3 max pool with stride 2; an odd or even size `S` becomes `ceil(S / 2)`."""
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")


def _conv_norm_relu(
    config: GoogLeNetConfig, x: Array, filters: int, kernel: int, name: str, stride: int = 1
) -> Array:
    """A convolution without bias, its batch norm and ReLU; called inside a module."""
    return nn.relu(conv_norm(config, x, filters, kernel, name, stride=stride, epsilon=1e-3))
