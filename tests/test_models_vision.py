"""The vision networks are those of their papers: parameters, multiplications, shapes.

Counts are asserted twice where a closed form is short: against the published number, and against the
paper's table written out here independently of the modules. A multiplication counts the taps in the padding,
as the published numbers do.
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
from remat.core import primitives

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
            total += primitives.flops(eqn.primitive.name, eqn.params, *avals)
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            total += _heavy_flops(inner) if hasattr(inner, "eqns") else 0
    return total


def value_and_grad(loss: Callable[..., Any], *arguments: Any) -> Any:
    return jit(jax.value_and_grad(loss))(*arguments)


# --- the published numbers


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


# --- the papers' tables, written out


def conv(size: int, kernel: int, inputs: int, outputs: int, groups: int = 1) -> int:
    """Multiplications of a convolution to `size` x `size` pixels."""
    return size**2 * kernel**2 * inputs // groups * outputs


def test_vgg16_flops_are_those_of_table_1() -> None:
    layers = [
        (224, 3, 64), (224, 64, 64),
        (112, 64, 128), (112, 128, 128),
        (56, 128, 256), (56, 256, 256), (56, 256, 256),
        (28, 256, 512), (28, 512, 512), (28, 512, 512),
        (14, 512, 512), (14, 512, 512), (14, 512, 512),
    ]  # fmt: skip
    total = sum(conv(size, 3, inputs, outputs) for size, inputs, outputs in layers)
    total += 7 * 7 * 512 * 4096 + 4096 * 4096 + 4096 * 1000
    assert total == 15_470_264_320


def test_mobilenet_v2_flops_are_those_of_table_2() -> None:
    size, channels = 112, 32
    total = conv(112, 3, 3, 32)
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
            (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip
    for expansion, outputs, repeats, first_stride in rows:
        for stride in (first_stride, *(1,) * (repeats - 1)):
            wide = expansion * channels
            total += conv(size, 1, channels, wide) if expansion > 1 else 0
            size //= stride
            total += conv(size, 3, wide, wide, groups=wide) + conv(size, 1, wide, outputs)
            channels = outputs
    total += conv(size, 1, channels, 1280) + 1280 * 1000
    assert (size, total) == (7, 300_774_272)


@pytest.mark.parametrize(("large", "published"), [(3, 1_498_376_192), (5, 1_582_671_872)])
def test_googlenet_flops_are_those_of_table_1(large: int, published: int) -> None:
    rows = [
        (28, 64, 96, 128, 16, 32, 32), (28, 128, 128, 192, 32, 96, 64),
        (14, 192, 96, 208, 16, 48, 64), (14, 160, 112, 224, 24, 64, 64),
        (14, 128, 128, 256, 24, 64, 64), (14, 112, 144, 288, 32, 64, 64),
        (14, 256, 160, 320, 32, 128, 128), (7, 256, 160, 320, 32, 128, 128),
        (7, 384, 192, 384, 48, 128, 128),
    ]  # fmt: skip
    total, channels = conv(112, 7, 3, 64) + conv(56, 1, 64, 64) + conv(56, 3, 64, 192), 192
    for size, one, three_reduce, three, five_reduce, five, pool in rows:
        total += conv(size, 1, channels, one + three_reduce + five_reduce + pool)
        total += conv(size, 3, three_reduce, three) + conv(size, large, five_reduce, five)
        channels = one + three + five + pool
    assert channels == 1024
    assert total + channels * 1000 == published


def test_unet_flops_and_parameters_are_those_of_figure_1() -> None:
    flops = parameters = 0

    def add(size: int, kernel: int, inputs: int, outputs: int) -> None:
        nonlocal flops, parameters
        flops += conv(size, kernel, inputs, outputs)
        parameters += (kernel**2 * inputs + 1) * outputs

    inputs = 1
    for level, size in enumerate((256, 128, 64, 32, 16)):
        outputs = 64 * 2**level
        add(size, 3, inputs, outputs)
        add(size, 3, outputs, outputs)
        inputs = outputs
    for size in (32, 64, 128, 256):
        half = inputs // 2
        flops += conv(size // 2, 2, inputs, half)  # each input pixel meets the kernel once
        parameters += (4 * inputs + 1) * half
        add(size, 3, inputs, half)
        add(size, 3, half, half)
        inputs = half
    add(256, 1, 64, 2)
    assert (flops, parameters) == (48_096_083_968, 31_030_658)


# --- shapes inside


def intermediate_shapes(model: nn.Module, shapes: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
    """The shape of the result of every direct submodule."""
    variables = {"params": shapes[0]}
    rest = shapes[1:]
    if isinstance(rest[0], dict):
        variables["batch_stats"], rest = rest[0], rest[1:]

    def run(variables: Any, images: Any) -> Any:
        return model.apply(
            variables, images, True, mutable=["batch_stats", "intermediates"],
            capture_intermediates=True,
        )[1]["intermediates"]  # fmt: skip

    state = jax.eval_shape(run, variables, rest[0])
    return {
        name: value["__call__"][0].shape for name, value in state.items() if "__call__" in value
    }


def test_vgg16_feature_maps() -> None:
    found = intermediate_shapes(vgg.VGG(vgg.VGG16), FULL["vgg16"]()[1])
    sizes = [found[f"stage_{index}"] for index in range(5)]
    assert sizes == [
        (1, 112, 112, 64), (1, 56, 56, 128), (1, 28, 28, 256), (1, 14, 14, 512), (1, 7, 7, 512),
    ]  # fmt: skip
    assert found["head"] == (1, 1000)


def test_mobilenet_v2_feature_maps() -> None:
    model = mobilenet.MobileNetV2(mobilenet.MOBILENET_V2)
    found = intermediate_shapes(model, FULL["mobilenet_v2"]()[1])
    sizes = [found[f"stage_{index}_block_0"] for index in range(7)]
    assert sizes == [
        (1, 112, 112, 16), (1, 56, 56, 24), (1, 28, 28, 32), (1, 14, 14, 64), (1, 14, 14, 96),
        (1, 7, 7, 160), (1, 7, 7, 320),
    ]  # fmt: skip
    assert sum(name.startswith("stage_") for name in found) == 17
    assert found["norm_last"] == (1, 7, 7, 1280)


def test_googlenet_feature_maps() -> None:
    found = intermediate_shapes(googlenet.GoogLeNet(googlenet.GOOGLENET), FULL["googlenet"]()[1])
    sizes = [found[name] for name in sorted(found) if name.startswith("stage_")]
    assert [(shape[1], shape[3]) for shape in sizes] == [
        (28, 256), (28, 480), (14, 512), (14, 512), (14, 512), (14, 528), (14, 832), (7, 832),
        (7, 1024),
    ]  # fmt: skip


def test_unet_feature_maps() -> None:
    found = intermediate_shapes(unet.UNet(unet.UNET), FULL["unet"]()[1])
    assert [found[f"down_{level}"][1:] for level in range(5)] == [
        (256, 256, 64), (128, 128, 128), (64, 64, 256), (32, 32, 512), (16, 16, 1024),
    ]  # fmt: skip
    assert [found[f"upsample_{level}"] == found[f"down_{level}"] for level in range(4)] == [
        True
    ] * 4
    assert found["head"] == (1, 256, 256, 2)


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


@pytest.mark.parametrize("name", MICRO)
def test_dropout_is_a_function_of_the_key(name: str) -> None:
    with_key = jit(functools.partial(MICRO[name]()[0], *micro_arguments(name)[:-1]))
    assert with_key(jax.random.key(1)) == with_key(jax.random.key(1))
    assert (
        len({float(with_key(jax.random.key(seed))) for seed in range(6)} | {float(with_key(None))})
        > 2
    )


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
