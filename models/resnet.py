"""ResNets in Flax linen, in training mode: NHWC, batch norm with running statistics.

He et al. 2016; the bottleneck is the "v1.5" one, which strides in its 3x3 convolution.

Shapes: `B` batch, `S` image size, `C` channels, `K` classes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]
WrapModule = Callable[[type[nn.Module]], type[nn.Module]]


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """What a ResNet is made of.

    Attributes:
        stages: the number of blocks of each stage; each stage doubles the filters.
        block: two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the filters.
        filters: the channels of the stem and of the first stage.
        classes: `K`.
        dtype: the dtype of activations.
        param_dtype: the dtype of parameters.
        remat_policy: a `remat` policy for each block; None leaves the blocks alone.
    """

    stages: tuple[int, ...]
    block: Literal["basic", "bottleneck"]
    filters: int = 64
    classes: int = 1000
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat_policy: object = None


RESNET18 = ResNetConfig(stages=(2, 2, 2, 2), block="basic")
RESNET50 = ResNetConfig(stages=(3, 4, 6, 3), block="bottleneck")
RESNET152 = ResNetConfig(stages=(3, 8, 36, 3), block="bottleneck")
RESNET18_SMALL = dataclasses.replace(RESNET18, filters=8, classes=10)
RESNET50_SMALL = dataclasses.replace(RESNET50, filters=8, classes=10)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    config: ResNetConfig
    filters: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, S, S, C]` to `[B, S / stride, S / stride, filters]`."""
        config = self.config
        y = _conv(config, self.filters, 3, self.stride, "conv_0")(x)
        y = nn.relu(_norm(config, "norm_0")(y))
        y = _conv(config, self.filters, 3, 1, "conv_1")(y)
        y = _norm(config, "norm_1")(y)
        return nn.relu(y + _shortcut(config, x, self.filters, self.stride))


class BottleneckBlock(nn.Module):
    """Convolutions 1x1, 3x3 (with the stride: v1.5) and 1x1, and a shortcut."""

    config: ResNetConfig
    filters: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, S, S, C]` to `[B, S / stride, S / stride, 4 * filters]`."""
        config = self.config
        y = _conv(config, self.filters, 1, 1, "conv_0")(x)
        y = nn.relu(_norm(config, "norm_0")(y))
        y = _conv(config, self.filters, 3, self.stride, "conv_1")(y)
        y = nn.relu(_norm(config, "norm_1")(y))
        y = _conv(config, 4 * self.filters, 1, 1, "conv_2")(y)
        y = _norm(config, "norm_2")(y)
        return nn.relu(y + _shortcut(config, x, 4 * self.filters, self.stride))


class ResNet(nn.Module):
    """Stem, stages of blocks, global average pool and classifier; training mode only.

    Attributes:
        config: the network.
        wrap_block: applied to the block class, for hand-picked checkpointing such as
            `functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)`; it comes
            instead of `config.remat_policy`.
        segment: blocks at a time under one `nn.remat`, across stages; None for none.
    """

    config: ResNetConfig
    wrap_block: WrapModule | None = None
    segment: int | None = None

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Maps images `[B, S, S, 3]` to logits `[B, K]`."""
        config = self.config
        x = _conv(config, config.filters, 7, 2, "conv_stem")(images)
        x = nn.relu(_norm(config, "norm_stem")(x))
        padding: Any = ((1, 1), (1, 1))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=padding)
        blocks = [(stage, i) for stage, count in enumerate(config.stages) for i in range(count)]
        if self.segment is None:
            x = self._blocks(x, blocks)
        else:
            for start in range(0, len(blocks), self.segment):
                part = tuple(blocks[start : start + self.segment])
                x = nn.remat(ResNet._blocks, static_argnums=(2,))(self, x, part)
        x = jnp.mean(x, axis=(1, 2))
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        return nn.Dense(config.classes, name="head", **dtypes)(x)

    def _blocks(self, x: Array, blocks: Sequence[tuple[int, int]]) -> Array:
        """Applies blocks given as (stage, index within the stage)."""
        config = self.config
        block: Any = _block_class(config, self.wrap_block)
        for stage, index in blocks:
            stride = 2 if stage > 0 and index == 0 else 1
            name = f"stage_{stage}_block_{index}"
            x = block(config, config.filters * 2**stage, stride, name=name)(x)
        return x


def resnet_loss(
    config: ResNetConfig,
    batch: int,
    size: int,
    wrap_block: WrapModule | None = None,
    segment: int | None = None,
) -> Case:
    """The training loss of a ResNet and the shapes of its arguments.

    Args:
        config: the network.
        batch: `B`.
        size: `S`, the height and width of the images; 224 for ImageNet.
        wrap_block, segment: see `ResNet`.

    Returns:
        `(loss, (params, batch_stats, images, labels))`, where `loss(...)` is
        `(mean cross entropy, new_batch_stats)`: differentiate it with `has_aux=True`. `images` is
        `[B, S, S, 3]` and `labels` is `int[B]`.
    """
    model = ResNet(config, wrap_block, segment)

    def loss(params: Any, batch_stats: Any, images: Array, labels: Array) -> tuple[Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, images, mutable=["batch_stats"])
        logits = logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), updated["batch_stats"]

    params, batch_stats = jax.eval_shape(lambda: init_variables(config, size))
    images = jax.ShapeDtypeStruct((batch, size, size, 3), config.dtype)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return loss, (params, batch_stats, images, labels)


def resnet_scalar_loss(
    config: ResNetConfig,
    batch: int,
    size: int,
    wrap_block: WrapModule | None = None,
    segment: int | None = None,
) -> Case:
    """`resnet_loss` without the new batch statistics: the same arguments, one scalar result."""
    loss_and_stats, shapes = resnet_loss(config, batch, size, wrap_block, segment)

    def loss(params: Any, batch_stats: Any, images: Array, labels: Array) -> Array:
        return loss_and_stats(params, batch_stats, images, labels)[0]

    return loss, shapes


def init_variables(config: ResNetConfig, size: int, seed: int | Array = 0) -> tuple[Any, Any]:
    """Freshly initialised `(params, batch_stats)`; under `jax.eval_shape`, their shapes."""
    images = jnp.zeros((1, size, size, 3), config.dtype)
    variables = ResNet(config).init(jax.random.key(seed), images)
    return variables["params"], variables["batch_stats"]


def _block_class(config: ResNetConfig, wrap_block: WrapModule | None) -> type[nn.Module]:
    block = BasicBlock if config.block == "basic" else BottleneckBlock
    if wrap_block is not None:
        return wrap_block(block)
    if config.remat_policy is None:
        return block
    import remat.linen

    return remat.linen.remat(block, remat_policy=config.remat_policy)


def _shortcut(config: ResNetConfig, x: Array, filters: int, stride: int) -> Array:
    """`x` itself, or its 1x1 projection where the shapes differ; called inside a block."""
    if stride == 1 and x.shape[-1] == filters:
        return x
    x = _conv(config, filters, 1, stride, "conv_shortcut")(x)
    return _norm(config, "norm_shortcut")(x)


def _conv(config: ResNetConfig, filters: int, kernel: int, stride: int, name: str) -> nn.Conv:
    padding = (kernel - 1) // 2
    return nn.Conv(
        filters,
        (kernel, kernel),
        strides=(stride, stride),
        padding=((padding, padding), (padding, padding)),
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.he_normal(),
        name=name,
    )


def _norm(config: ResNetConfig, name: str) -> nn.BatchNorm:
    make = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5)
    return make(dtype=config.dtype, param_dtype=config.param_dtype, name=name)
