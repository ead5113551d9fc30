"""The programs the benchmarks compare: each row is a baseline or ours, of the same model.

A row is `(label, function, example arguments)`; the function returns a scalar to be differentiated with respect
to its first argument. Groups are the rows of one model; `bounds` are what ours must reach against the
group's baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import remat
from models import gpt, lstm, mlp, resnet, vgg
from models.cases import BLOCKS_LARGE
from remat.policies import MinCut, Names

__all__ = ["GROUPS", "Bound", "Group", "Row", "elementwise_gelu"]

Function = Callable[..., jax.Array]
POLICIES = jax.checkpoint_policies


@dataclass(frozen=True)
class Row:
    """One variant of a model."""

    label: str
    function: Function
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Bound:
    """What a row must reach: at most `temp_factor` and `traffic_factor` times the baseline's.

    Attributes:
        row, baseline: labels; without a baseline the limits are absolute.
        matmuls, convolutions: at most this many executed; None for no bound.
    """

    row: str
    baseline: str | None = None
    temp_factor: float | None = None
    traffic_factor: float | None = None
    temp_mib: float | None = None
    traffic_gib: float | None = None
    matmuls: int | None = None
    convolutions: int | None = None


@dataclass(frozen=True)
class Group:
    """The variants of one model and what ours must reach."""

    name: str
    rows: Callable[[], list[Row]]
    bounds: tuple[Bound, ...]


# What XLA makes of the same plans, the same bytes kept, differs between releases of jax. With 0.12 every row of
# `gpt_scan` moves more (`dots_saveable` 31.5 GiB for 28.8), and `min_cut` of 8 unrolled blocks takes 1,077 MiB
# for 934.
_IS_0_12 = jax.__version_info__ >= (0, 12)
_SCAN_GIB = 28.4 if _IS_0_12 else 28.1
_UNROLLED_TEMP = 1.13 if _IS_0_12 else 1.02


def _checkpoint(policy: Any, **options: Any) -> Callable[[Function], Function]:
    return functools.partial(jax.checkpoint, policy=policy, **options)


def _ours(policy: Any) -> Callable[[Function], Function]:
    return functools.partial(remat.checkpoint, remat_policy=policy)


def gpt_scan() -> list[Row]:
    """12 GPT blocks under `lax.scan`."""
    inside = {"prevent_cse": False}
    wraps: dict[str, Any] = {
        "none": None,
        "dots_saveable": _checkpoint(POLICIES.dots_saveable, **inside),
        "dots_with_no_batch_dims_saveable": _checkpoint(
            POLICIES.dots_with_no_batch_dims_saveable, **inside
        ),
        "full (jax.checkpoint)": _checkpoint(None, **inside),
        "min_cut": _ours("min_cut"),
        "min_cut, masks redrawn": _ours(MinCut(random="cheap")),
        "min_cut, scores recomputed": _ours(MinCut(heavy="batched")),
        "min_cut, scores and masks recomputed": _ours(MinCut(heavy="batched", random="cheap")),
        "min_cut, roofline": _ours(MinCut(heavy="roofline", memory_weight=3)),
        "min_cut, the paper's objective": _ours(MinCut.paper()),
        "full": _ours("full"),
    }
    return [
        Row(label, *gpt.blocks_scanned(layers=12, wrap=wrap, **BLOCKS_LARGE))
        for label, wrap in wraps.items()
    ]


def gpt_unrolled() -> list[Row]:
    """8 unrolled GPT blocks."""
    wraps: dict[str, Any] = {
        "none": None,
        "dots_saveable, per block": _checkpoint(POLICIES.dots_saveable),
        "full, per block (jax.checkpoint)": _checkpoint(None),
        "min_cut, per block": _ours("min_cut"),
        "min_cut, scores recomputed, per block": _ours(MinCut(heavy="batched")),
    }
    rows = [
        Row(label, *gpt.blocks_unrolled(layers=8, wrap=wrap, **BLOCKS_LARGE))
        for label, wrap in wraps.items()
    ]
    plain = rows[0]
    return [*rows, Row("min_cut, wrapped once", remat.checkpoint(plain.function), plain.args)]


def resnet50() -> list[Row]:
    """ResNet-50, batch 32, 224 px, unrolled."""
    plain, args = resnet.resnet_scalar_loss(resnet.RESNET50, 32, 224)
    per_block = {
        "dots_saveable, per block": functools.partial(nn.remat, policy=POLICIES.dots_saveable),
        "full, per block (jax.checkpoint)": nn.remat,
    }
    rows = [Row("none", plain, args)]
    for label, wrap in per_block.items():
        function, _ = resnet.resnet_scalar_loss(resnet.RESNET50, 32, 224, wrap_block=wrap)
        rows.append(Row(label, function, args))
    return [*rows, Row("min_cut, wrapped once", remat.checkpoint(plain), args)]


def vgg16() -> list[Row]:
    """VGG-16, batch 32, 224 px, unrolled: relu and max-pool, where the backward pass can do with much less."""
    plain, args = vgg.vgg_loss(vgg.VGG16, 32, 224)
    ours: dict[str, Any] = {
        "min_cut, without rewrites": remat.policies.MinCut(implementations="none"),
        "min_cut": "min_cut",
        "gist": "gist",
        "echo": "echo",
    }
    rows = [Row("none", plain, args)]
    rows.append(Row("full (jax.checkpoint)", jax.checkpoint(plain), args))
    return rows + [Row(label, _ours(policy)(plain), args) for label, policy in ours.items()]


def residual_mlp() -> list[Row]:
    """16 residual layers, keeping the 15 layer boundaries."""
    plain, args = mlp.residual_mlp()
    names = tuple(mlp.boundary_names())
    by_names = POLICIES.save_only_these_names(*names)
    plan = remat.plan(plain, *args, remat_policy=Names(names), lowering="policy")
    return [
        Row("none", plain, args),
        Row("save_only_these_names, wrapped once", jax.checkpoint(plain, policy=by_names), args),
        Row("names, wrapped once", remat.checkpoint(plain, remat_policy=Names(names)), args),
        Row("names, plan.annotate", plan.annotate(plain), args),
        Row("min_cut, wrapped once", remat.checkpoint(plain), args),
    ]


def lstm_lm() -> list[Row]:
    """An LSTM language model."""
    plain, args = lstm.lstm_loss(lstm.LSTM_FULL, batch=64, length=128)
    return [
        Row("none", plain, args),
        Row("dots_saveable", jax.checkpoint(plain, policy=POLICIES.dots_saveable), args),
        Row("min_cut, wrapped once", remat.checkpoint(plain), args),
    ]


def elementwise_gelu(x: jax.Array) -> jax.Array:
    """GeLU written out, as in Table 1 of Yu & He."""
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def gelu() -> list[Row]:
    """GeLU of 2^25 elements: its value and its gradient for a given cotangent, 5 arrays at best."""

    def both(f: Function) -> Function:
        def run(x: jax.Array, cotangent: jax.Array) -> Any:
            value, pullback = jax.vjp(f, x)
            return value, pullback(cotangent)[0]

        return run

    shape = jax.ShapeDtypeStruct((2**25,), jnp.float32)
    return [
        Row("none", both(elementwise_gelu), (shape, shape)),
        Row("min_cut", both(remat.checkpoint(elementwise_gelu)), (shape, shape)),
    ]


GROUPS: dict[str, Group] = {
    group.name: group
    for group in (
        Group(
            "gpt_scan",
            gpt_scan,
            (
                Bound("min_cut", "dots_saveable", 1.0, 1.0, traffic_gib=_SCAN_GIB, matmuls=240),
                Bound("min_cut, masks redrawn", temp_mib=1548, traffic_gib=_SCAN_GIB, matmuls=240),
                Bound(
                    "min_cut, scores and masks recomputed",
                    "dots_with_no_batch_dims_saveable",
                    1.0,
                    1.0,
                    temp_mib=960,
                    traffic_gib=27.1,
                    matmuls=252,
                ),
            ),
        ),
        Group(
            "resnet50",
            resnet50,
            (
                Bound(
                    "min_cut, wrapped once",
                    "dots_saveable, per block",
                    0.75,
                    1.02,
                    temp_mib=0.75 * 2292,
                    traffic_gib=1.02 * 25.3,
                    convolutions=161,
                ),
            ),
        ),
        Group(
            "vgg16",
            vgg16,
            (Bound("min_cut", "none", 0.25, 0.65), Bound("gist", "none", 0.25, 0.65)),
        ),
        Group(
            "gpt_unrolled",
            gpt_unrolled,
            (Bound("min_cut, per block", "dots_saveable, per block", _UNROLLED_TEMP, 1.0),),
        ),
        Group(
            "residual_mlp",
            residual_mlp,
            (
                Bound("names, wrapped once", temp_mib=13),
                Bound("names, plan.annotate", temp_mib=13),
            ),
        ),
        Group("gelu", gelu, (Bound("min_cut", traffic_gib=5 * 2**27 / 2**30),)),
        Group("lstm", lstm_lm, ()),
    )
}
