"""Named training losses for tests, benchmarks and the command line (`models.cases:gpt_tiny`).

A case is a function without arguments that returns `(loss, example_args)`: `loss(*args)` is a
scalar to be differentiated with respect to argument 0, and `example_args` are pytrees of
`jax.ShapeDtypeStruct`, so that describing even the large networks allocates nothing. `materialize`
turns the shapes of a small case into arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import googlenet as googlenet_model
from models import gpt, mlp, resnet
from models import lstm as lstm_model
from models import mobilenet as mobilenet_model
from models import nmt as nmt_model
from models import unet as unet_model
from models import vgg as vgg_model

Case = tuple[Callable[..., Any], tuple[Any, ...]]
Factory = Callable[[], Case]

CASES: dict[str, Factory] = {}
"""Every case by the name of its function."""

SMALL_CASES: tuple[str, ...] = (
    "gpt_tiny",
    "gpt_tiny_scan",
    "gpt_blocks_scan_small",
    "gpt_blocks_unrolled_small",
    "resnet18_small",
    "resnet50_small",
    "lstm_small",
    "residual_mlp_small",
    "vgg16_small",
    "mobilenet_v2_small",
    "googlenet_small",
    "unet_small",
    "transformer_blocks_small",
    "nmt_small",
    "nmt_scan_small",
)
"""The cases that run in seconds on a CPU."""

GPT2_XL = dataclasses.replace(gpt.GPT2_SMALL, layers=48, width=1600, heads=25, dropout=0.0)
"""GPT-2 XL without dropout, its vocabulary padded to 50304 as that of `gpt.GPT2_SMALL`."""

BLOCKS_LARGE: dict[str, Any] = {
    "batch": 8,
    "length": 512,
    "width": 768,
    "heads": 12,
    "dropout": 0.1,
    "dtype": jnp.bfloat16,
}
TRANSFORMER_BASE: dict[str, Any] = {
    "layers": 6,
    "batch": 32,
    "length": 256,
    "width": 512,
    "heads": 8,
    "dropout": 0.1,
    "activation": "relu",
}
"""Blocks of the size of the base model of Vaswani et al. 2017, table 3; the norms come first, as in GPT-2."""
_BLOCKS_SMALL: dict[str, Any] = {
    "layers": 3,
    "batch": 2,
    "length": 16,
    "width": 32,
    "heads": 4,
    "dropout": 0.1,
}


def _register(factory: Factory) -> Factory:
    CASES[factory.__name__] = factory
    return factory


@_register
def gpt_tiny() -> Case:
    """GPT, 2 layers of width 64 on bytes, batch 4 x 64, unrolled, dropout 0.1."""
    return gpt.gpt_loss(gpt.GPT_TINY, batch=4)


@_register
def gpt_tiny_scan() -> Case:
    """`gpt_tiny` with its layers under `nn.scan`."""
    return gpt.gpt_loss(dataclasses.replace(gpt.GPT_TINY, scan_layers=True), batch=4)


@_register
def gpt_small_demo() -> Case:
    """GPT, 4 layers of width 128 on bytes, batch 16 x 128, unrolled, dropout 0.1."""
    return gpt.gpt_loss(gpt.GPT_SMALL_DEMO, batch=16)


@_register
def gpt2_small() -> Case:
    """GPT-2 small, batch 8 x 1024, unrolled, bfloat16 with float32 parameters, dropout 0.1."""
    return gpt.gpt_loss(gpt.GPT2_SMALL, batch=8)


@_register
def gpt2_small_scan() -> Case:
    """`gpt2_small` with its layers under `nn.scan`."""
    return gpt.gpt_loss(dataclasses.replace(gpt.GPT2_SMALL, scan_layers=True), batch=8)


@_register
def gpt_48() -> Case:
    """GPT-2 XL, 48 unrolled layers, batch 4 x 1024, bfloat16 with float32 parameters, no dropout.

    A test of scale: the joint graph has more than 14 000 operators.
    """
    return gpt.gpt_loss(GPT2_XL, batch=4)


@_register
def gpt_blocks_scan() -> Case:
    """12 GPT blocks under `lax.scan`, batch 8 x 512, width 768, bfloat16, dropout 0.1."""
    return gpt.blocks_scanned(layers=12, **BLOCKS_LARGE)


@_register
def gpt_blocks_scan_small() -> Case:
    """3 GPT blocks under `lax.scan`, batch 2 x 16, width 32, float32, dropout 0.1."""
    return gpt.blocks_scanned(**_BLOCKS_SMALL)


@_register
def gpt_blocks_unrolled() -> Case:
    """8 unrolled GPT blocks, otherwise as `gpt_blocks_scan`."""
    return gpt.blocks_unrolled(layers=8, **BLOCKS_LARGE)


@_register
def gpt_blocks_unrolled_small() -> Case:
    """3 unrolled GPT blocks, otherwise as `gpt_blocks_scan_small`."""
    return gpt.blocks_unrolled(**_BLOCKS_SMALL)


@_register
def transformer_blocks() -> Case:
    """6 unrolled blocks with ReLU, batch 32 x 256, width 512, float32, dropout 0.1."""
    return gpt.blocks_unrolled(**TRANSFORMER_BASE)


@_register
def transformer_blocks_small() -> Case:
    """`gpt_blocks_unrolled_small` with ReLU."""
    return gpt.blocks_unrolled(**_BLOCKS_SMALL, activation="relu")


@_register
def resnet18_small() -> Case:
    """ResNet-18 with 8 filters, batch 4 of 32 x 32 images, float32."""
    return resnet.resnet_scalar_loss(resnet.RESNET18_SMALL, batch=4, size=32)


@_register
def resnet50_small() -> Case:
    """ResNet-50 with 8 filters, batch 4 of 32 x 32 images, float32."""
    return resnet.resnet_scalar_loss(resnet.RESNET50_SMALL, batch=4, size=32)


@_register
def resnet50() -> Case:
    """ResNet-50, batch 32 of 224 x 224 images, float32."""
    return resnet.resnet_scalar_loss(resnet.RESNET50, batch=32, size=224)


@_register
def resnet152() -> Case:
    """ResNet-152, batch 32 of 224 x 224 images, float32."""
    return resnet.resnet_scalar_loss(resnet.RESNET152, batch=32, size=224)


@_register
def vgg16() -> Case:
    """VGG-16, batch 32 of 224 x 224 images, float32, dropout 0.5."""
    return vgg_model.vgg_loss(vgg_model.VGG16, batch=32, size=224)


@_register
def vgg16_small() -> Case:
    """VGG-16 with 4 filters, batch 4 of 32 x 32 images, float32, dropout 0.5."""
    return vgg_model.vgg_loss(vgg_model.VGG16_SMALL, batch=4, size=32)


@_register
def mobilenet_v2() -> Case:
    """MobileNetV2, batch 32 of 224 x 224 images, float32, dropout 0.2."""
    return mobilenet_model.mobilenet_loss(mobilenet_model.MOBILENET_V2, batch=32, size=224)


@_register
def mobilenet_v2_small() -> Case:
    """MobileNetV2 cut to 5 narrow blocks, batch 4 of 32 x 32 images, float32, dropout 0.2."""
    return mobilenet_model.mobilenet_loss(mobilenet_model.MOBILENET_V2_SMALL, batch=4, size=32)


@_register
def googlenet() -> Case:
    """GoogLeNet with batch norm, batch 32 of 224 x 224 images, float32, dropout 0.4."""
    return googlenet_model.googlenet_loss(googlenet_model.GOOGLENET, batch=32, size=224)


@_register
def googlenet_small() -> Case:
    """GoogLeNet cut to 2 narrow modules, batch 4 of 32 x 32 images, float32, dropout 0.4."""
    return googlenet_model.googlenet_loss(googlenet_model.GOOGLENET_SMALL, batch=4, size=32)


@_register
def unet() -> Case:
    """U-Net, batch 8 of 256 x 256 grey images, float32, dropout 0.5."""
    return unet_model.unet_loss(unet_model.UNET, batch=8, size=256)


@_register
def unet_small() -> Case:
    """U-Net with 4 filters, batch 2 of 32 x 32 grey images, float32, dropout 0.5."""
    return unet_model.unet_loss(unet_model.UNET_SMALL, batch=2, size=32)


@_register
def lstm_small() -> Case:
    """LSTM language model of width 32, batch 4 x 32, dropout 0.1."""
    return lstm_model.lstm_loss(lstm_model.LSTM_SMALL, batch=4, length=32)


@_register
def lstm() -> Case:
    """LSTM language model of width 1024, vocabulary 10 000, batch 64 x 128, dropout 0.5."""
    return lstm_model.lstm_loss(lstm_model.LSTM_FULL, batch=64, length=128)


@_register
def nmt() -> Case:
    """LSTM translation with attention, hidden 512, batch 128 x 50, unrolled, dropout 0.2."""
    return nmt_model.nmt_loss(nmt_model.NMT_FULL, batch=128, source_length=50)


@_register
def nmt_scan() -> Case:
    """`nmt` with its time under `lax.scan`."""
    config = dataclasses.replace(nmt_model.NMT_FULL, scan=True)
    return nmt_model.nmt_loss(config, batch=128, source_length=50)


@_register
def nmt_small() -> Case:
    """LSTM translation with attention, hidden 32, batch 4 x 6 to 5, unrolled, dropout 0.1."""
    return nmt_model.nmt_loss(nmt_model.NMT_SMALL, batch=4, source_length=6, target_length=5)


@_register
def nmt_scan_small() -> Case:
    """`nmt_small` with its time under `lax.scan`."""
    config = dataclasses.replace(nmt_model.NMT_SMALL, scan=True)
    return nmt_model.nmt_loss(config, batch=4, source_length=6, target_length=5)


@_register
def residual_mlp() -> Case:
    """16 residual layers of width 256-1024-1024-256, batch 1024, float32."""
    return mlp.residual_mlp()


@_register
def residual_mlp_100() -> Case:
    """`residual_mlp` with 100 layers."""
    return mlp.residual_mlp(layers=100)


@_register
def residual_mlp_1000() -> Case:
    """`residual_mlp` with 1000 layers; tracing it to a joint graph takes some ten seconds."""
    return mlp.residual_mlp(layers=1000)


@_register
def residual_mlp_small() -> Case:
    """4 residual layers of width 16-32-32-16, batch 8, float32."""
    return mlp.residual_mlp(layers=4, width=16, hidden=32, batch=8)


def materialize(shapes: Any, seed: int = 0) -> Any:
    """Random arrays for a pytree of `jax.ShapeDtypeStruct`; the same for the same seed.

    Args:
        shapes: floats become small normal numbers (around 1 if the leaf is called "scale" or
            "var"), integers lie in 0..7, PRNG keys are valid keys.
        seed: of the random generator.
    """
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(functools.partial(_materialize_leaf, rng), shapes)


def _materialize_leaf(rng: np.random.Generator, path: tuple[Any, ...], shape: Any) -> jax.Array:
    dtype = shape.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.random.key(int(rng.integers(2**31)))
        return jax.random.split(key, shape.shape) if shape.shape else key
    if jnp.issubdtype(dtype, jnp.floating):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        mean = 1.0 if name in ("scale", "var") else 0.0
        return jnp.asarray(mean + 0.02 * rng.standard_normal(shape.shape), dtype)
    return jnp.asarray(rng.integers(0, 8, shape.shape), dtype)
