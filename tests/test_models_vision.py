"""The vision networks are those of their papers, by parameters and multiplications, and can be trained.

A multiplication counts the taps in the padding, as the published numbers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cases, googlenet, mobilenet, unet, vgg
from remat.core.classify import classify

VGG_MICRO = vgg.VGGConfig(stages=(1, 2), filters=4, hidden=8, classes=10)
MOBILENET_MICRO = mobilenet.MobileNetConfig(
    blocks=((1, 4, 1, 1), (2, 8, 2, 2)), stem=4, last=16, classes=10
)
GOOGLENET_MICRO = googlenet.GoogLeNetConfig(
    stages=((googlenet.Branches(4, 4, 6, 2, 3, 5),),),
    stem=(4, 4, 8),
    classes=10,
)
UNET_MICRO = unet.UNetConfig(filters=2, depth=2)

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)

FULL: dict[str, Callable[[], Any]] = {
    "vgg16": lambda: vgg.vgg_loss(vgg.VGG16, batch=1, size=224),
    "mobilenet_v2": lambda: mobilenet.mobilenet_loss(mobilenet.MOBILENET_V2, batch=1, size=224),
    "googlenet": lambda: googlenet.googlenet_loss(googlenet.GOOGLENET, batch=1, size=224),
    "googlenet 5x5": lambda: googlenet.googlenet_loss(googlenet.GOOGLENET_PAPER, batch=1, size=224),
    "unet": lambda: unet.unet_loss(unet.UNET, batch=1, size=256),
}
MICRO: dict[str, Callable[..., Any]] = {
    "vgg": lambda wrap=None: vgg.vgg_loss(VGG_MICRO, 2, 8, wrap),
    "mobilenet": lambda wrap=None: mobilenet.mobilenet_loss(MOBILENET_MICRO, 2, 16, wrap),
    "googlenet": lambda wrap=None: googlenet.googlenet_loss(GOOGLENET_MICRO, 2, 16, wrap),
    "unet": lambda wrap=None: unet.unet_loss(UNET_MICRO, 2, 8, wrap),
}


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def matmul_flops(function: Callable[..., Any], *shapes: Any) -> int:
    """Flops of the matrix products and convolutions of a function, two per multiplication."""
    return _heavy_flops(jax.make_jaxpr(function)(*shapes).jaxpr)


def _heavy_flops(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            avals = [[var.aval for var in side] for side in (eqn.invars, eqn.outvars)]
            total += classify(eqn.primitive.name, eqn.params, *avals).flops
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            total += _heavy_flops(inner) if hasattr(inner, "eqns") else 0
    return total


def value_and_grad(loss: Callable[..., Any], *arguments: Any) -> Any:
    return jit(jax.value_and_grad(loss))(*arguments)


# --- the published numbers


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg16", 138_357_544),
        ("mobilenet_v2", 3_504_872),
        ("googlenet", 6_624_904),
        ("googlenet 5x5", 6_998_552 + 7_280),  # Caffe's has one bias per channel, batch norm two
        ("unet", 31_030_658),
    ],
)
def test_parameter_count(name: str, parameters: int) -> None:
    _, shapes = FULL[name]()
    assert count(shapes[0]) == parameters


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "multiplications"),
    [
        ("vgg16", 15_470_264_320),
        ("mobilenet_v2", 300_774_272),
        ("googlenet", 1_498_376_192),
        ("googlenet 5x5", 1_582_671_872),
        ("unet", 48_096_083_968),
    ],
)
def test_forward_flops_per_image(name: str, multiplications: int) -> None:
    loss, shapes = FULL[name]()
    assert matmul_flops(loss, *shapes) == 2 * multiplications


# --- behaviour


@functools.cache
def micro_arguments(name: str) -> tuple[Any, ...]:
    arguments = cases.materialize(MICRO[name]()[1])
    # Weights of order 0.02 would starve the deep layers: ten times as large here.
    params = jax.tree.map(lambda leaf: 10 * leaf if leaf.ndim > 1 else leaf, arguments[0])
    return (params, *arguments[1:])


@functools.cache
def plain_value_and_grad(name: str) -> Any:
    return value_and_grad(MICRO[name]()[0], *micro_arguments(name))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MICRO)
def test_loss_and_gradient_are_finite_and_no_parameter_is_idle(name: str) -> None:
    value, grads = plain_value_and_grad(name)
    assert np.isfinite(value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert jnp.any(leaf != 0), jax.tree_util.keystr(path)


def test_void_pixels_do_not_count() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3, 3, 2)).astype(np.float32)
    labels = np.zeros((2, 3, 3), np.int32)
    labels[0, 0] = (1, -1, 255)
    losses = np.log(np.exp(logits).sum(-1)) - logits[..., 0]
    losses[0, 0, 0] += logits[0, 0, 0, 0] - logits[0, 0, 0, 1]
    kept = (labels == 0) | (labels == 1)
    loss = jit(unet.pixel_cross_entropy)
    np.testing.assert_allclose(loss(logits, labels), losses[kept].mean(), rtol=1e-5)
    assert loss(logits, np.full((2, 3, 3), 9, np.int32)) == 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MICRO)
def test_wrapped_blocks_keep_parameters_value_and_gradient(name: str) -> None:
    wrap = functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)
    wrapped, shapes = MICRO[name](wrap)
    assert shapes == MICRO[name]()[1]
    arguments = micro_arguments(name)
    assert "remat" in str(jax.make_jaxpr(wrapped)(*arguments))
    want, got = plain_value_and_grad(name), value_and_grad(wrapped, *arguments)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: vgg.vgg_loss(vgg.VGG16, 1, 100),
        lambda: vgg.vgg_loss(vgg.VGG16, 1, 0),
        lambda: unet.unet_loss(unet.UNET, 1, 40),
        lambda: unet.unet_loss(unet.UNET, 1, 0),
    ],
)
def test_sizes_that_do_not_halve_evenly_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"`size` is \d+; expected a positive multiple of (16|32)"):
        make()
