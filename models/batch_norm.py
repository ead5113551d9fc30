"""What image classifiers with batch norm and dropout share: a convolution with its norm, and the training loss.

Shapes: `B` batch, `S` image size, `C` channels, `K` classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.gpt import cross_entropy, key_shape

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]


class Config(Protocol):
    """What the configurations of the networks have in common: `K` and the dtypes."""

    @property
    def classes(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def param_dtype(self) -> Any: ...


def conv_norm(
    config: Config,
    x: Array,
    filters: int,
    kernel: int,
    name: str,
    *,
    stride: int = 1,
    groups: int = 1,
    epsilon: float = 1e-5,
) -> Array:
    """A convolution without bias and its batch norm, in training mode; called inside a module.

    Maps `[B, S, S, C]` to `[B, S / stride, S / stride, filters]`.
    """
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
        use_running_average=False, momentum=0.9, epsilon=epsilon, name=f"norm_{name}", **dtypes
    )
    return norm(conv(x))


def pool_and_classify(config: Config, x: Array, deterministic: bool) -> Array:
    """Global average pool, dropout and the classifier: `[B, S, S, C]` to `[B, K]`; called inside a module."""
    x = nn.Dropout(config.dropout)(jnp.mean(x, axis=(1, 2)), deterministic=deterministic)
    dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    return nn.Dense(config.classes, name="head", **dtypes)(x)


def classifier_loss(model: nn.Module, config: Config, batch: int, size: int) -> Case:
    """The training loss of a classifier with batch statistics and dropout, and the shapes of its arguments.

    The new batch statistics are computed and dropped, as in `models.resnet.resnet_scalar_loss`.

    Args:
        model: maps images `[B, S, S, 3]` and `deterministic` to logits `[B, K]`.
        config: of the model.
        batch: `B`.
        size: `S`; 224 for ImageNet.

    Returns:
        `(loss, (params, batch_stats, images, labels, key))`, where `loss(...)` is the mean cross
        entropy, a float32 scalar; `images` is `[B, S, S, 3]` and `labels` is `int[B]`. `key` drives
        dropout; None turns dropout off.
    """

    def loss(
        params: Any, batch_stats: Any, images: Array, labels: Array, key: Array | None
    ) -> Array:
        variables = {"params": params, "batch_stats": batch_stats}
        rngs = None if key is None else {"dropout": key}
        logits, _ = model.apply(variables, images, key is None, rngs=rngs, mutable=["batch_stats"])
        return cross_entropy(logits, labels)

    images = jax.ShapeDtypeStruct((batch, size, size, 3), config.dtype)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), images)
    return loss, (variables["params"], variables["batch_stats"], images, labels, key_shape())
