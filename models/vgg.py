"""VGG in Flax linen: 3x3 convolutions with bias, no normalisation, dropout in the classifier.

Simonyan & Zisserman 2015, table 1; `VGG16` is configuration D. NHWC, same padding. The classifier reads
the flattened last feature map, so its first matrix has `(S / 32)**2 * 512` rows: 25 088 at `S` = 224.

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
class VGGConfig:
    """What a VGG is made of.

    Attributes:
        stages: the number of convolutions of each stage; a max pool halves the image after each.
        filters: the channels of the first stage; each stage doubles them, up to eight times as many.
        hidden: the width of the two hidden layers of the classifier.
        classes: `K`.
        dropout: the rate of the dropout after each hidden layer of the classifier.
        dtype: the dtype of activations.
        param_dtype: the dtype of parameters.
    """

    stages: tuple[int, ...]
    filters: int = 64
    hidden: int = 4096
    classes: int = 1000
    dropout: float = 0.5
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32


VGG16 = VGGConfig(stages=(2, 2, 3, 3, 3))
VGG16_SMALL = dataclasses.replace(VGG16, filters=4, hidden=32, classes=10)


class ConvStage(nn.Module):
    """Convolutions 3x3 with ReLU, then a 2x2 max pool."""

    config: VGGConfig
    convolutions: int
    filters: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, S, S, C]` to `[B, S / 2, S / 2, filters]`."""
        config = self.config
        for index in range(self.convolutions):
            conv = nn.Conv(
                self.filters,
                (3, 3),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=nn.initializers.he_normal(),
                name=f"conv_{index}",
            )
            x = nn.relu(conv(x))
        return nn.max_pool(x, (2, 2), strides=(2, 2))


class VGG(nn.Module):
    """Stages of convolutions and a classifier of three dense layers.

    Attributes:
        config: the network.
        wrap_block: applied to the class `ConvStage`, for hand-picked checkpointing such as
            `functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)`.
    """

    config: VGGConfig
    wrap_block: WrapModule | None = None

    @nn.compact
    def __call__(self, images: Array, deterministic: bool) -> Array:
        """Maps images `[B, S, S, 3]` to logits `[B, K]`."""
        config = self.config
        stage: Any = ConvStage if self.wrap_block is None else self.wrap_block(ConvStage)
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        x = images
        for index, convolutions in enumerate(config.stages):
            filters = config.filters * min(2**index, 8)
            x = stage(config, convolutions, filters, name=f"stage_{index}")(x)
        x = x.reshape(x.shape[0], -1)
        for index in range(2):
            x = nn.relu(nn.Dense(config.hidden, name=f"dense_{index}", **dtypes)(x))
            x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        return nn.Dense(config.classes, name="head", **dtypes)(x)


def vgg_loss(
    config: VGGConfig, batch: int, size: int, wrap_block: WrapModule | None = None
) -> Case:
    """The training loss of a VGG and the shapes of its arguments.

    Args:
        config: the network.
        batch: `B`.
        size: `S`, a multiple of 32 for five stages; 224 for ImageNet.
        wrap_block: see `VGG`.

    Returns:
        `(loss, (params, images, labels, key))`, where `loss(...)` is the mean cross entropy, a float32
        scalar; `images` is `[B, S, S, 3]` and `labels` is `int[B]`. `key` drives dropout; None turns
        dropout off.

    Raises:
        ValueError: the stages do not halve `size` evenly.
    """
    divisor = 2 ** len(config.stages)
    if size <= 0 or size % divisor:
        raise ValueError(
            f"`size` is {size}; expected a positive multiple of {divisor}, as each of the "
            f"{len(config.stages)} stages halves the image"
        )
    model = VGG(config, wrap_block)

    def loss(params: Any, images: Array, labels: Array, key: Array | None) -> Array:
        rngs = None if key is None else {"dropout": key}
        logits = jnp.asarray(model.apply({"params": params}, images, key is None, rngs=rngs))
        return cross_entropy(logits, labels)

    params = jax.eval_shape(lambda: init_params(config, size))
    images = jax.ShapeDtypeStruct((batch, size, size, 3), config.dtype)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return loss, (params, images, labels, key_shape())


def init_params(config: VGGConfig, size: int, seed: int | Array = 0) -> Any:
    """Freshly initialised parameters; under `jax.eval_shape`, their shapes."""
    images = jnp.zeros((1, size, size, 3), config.dtype)
    return VGG(config).init(jax.random.key(seed), images, True)["params"]
