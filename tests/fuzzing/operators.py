"""Operators of random programs: pieces of source text with holes, from which programs are put together.

A template is Python source that assigns to its `{o}` (and `{p}`, `{r}`). What its other holes are filled with:

    {a}           a float array of rank 1 to 3, of the dtype of the program
    {c}           one of the shape of {a}; the same one where there is no other
    {d}           a float array of any rank, scalars included
    {v} {m} {t}   a float array of rank 1, 2 or 3
    {i} {j}       an integer array; {j} of the shape of {i}
    {h}           an integer array of rank 1
    {q}           a boolean array of the shape of {a}
    {u} {k}       a float and a small positive integer
    {x}           an axis of {a}
    {n}           a number that no other statement has

Every program has the names of `HEADER`, the arguments x (N, D), w (D, D), b (D,), i (N,) int32, key, and `dt`, the
dtype of x, with `wide`, which is at least float32: linear algebra and random draws are not made for fewer bits.
Draws are always float32, so that the same program in float64 draws the same numbers.

Whether a template suits what it is given is not written down: `jax.eval_shape` tells.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property

from tests.fuzzing import operators_integer, operators_loops
from tests.fuzzing.operators_integer import Texts

__all__ = ["HEADER", "OPERATORS", "Operator"]

HEADER = """\
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
"""

_SMOOTH: Texts = {
    "sin": "{o} = jnp.sin({a})",
    "cos": "{o} = jnp.cos({a} * {u})",
    "tanh": "{o} = jnp.tanh({a})",
    "exp": "{o} = jnp.exp(jnp.tanh({a}))",
    "log": "{o} = jnp.log1p(jnp.square({a}))",
    "sqrt": "{o} = jnp.sqrt({a} * {a} + 1)",
    "rsqrt": "{o} = {a} * lax.rsqrt(1 + jnp.square({a}))",
    "reciprocal": "{o} = 1 / (1 + {a} ** 2)",
    "power": "{o} = (1 + jnp.abs({a})) ** {u}",
    "erf": "{o} = lax.erf({a})",
    "erfinv": "{o} = lax.erf_inv(0.9 * jnp.tanh({a}))",
    "lgamma": "{o} = lax.lgamma(1.5 + jnp.square(jnp.tanh({a})))",
    "gelu": "{o} = jax.nn.gelu({a})",
    "gelu_exact": "{o} = jax.nn.gelu({a}, approximate=False)",
    "silu": "{o} = jax.nn.silu({a})",
    "sigmoid": "{o} = jax.nn.sigmoid({a})",
    "softplus": "{o} = jax.nn.softplus({a})",
    "elu": "{o} = jax.nn.elu({a})",
    "relu": "{o} = jax.nn.relu({a})",
    "leaky_relu": "{o} = jax.nn.leaky_relu({a}, 0.1)",
    "relu6": "{o} = jax.nn.relu6({a} * 4)",
    "abs": "{o} = jnp.abs({a})",
    "add": "{o} = {a} + {c} * {u}",
    "subtract": "{o} = {a} - {c}",
    "multiply": "{o} = {a} * jnp.sin({c})",
    "divide": "{o} = {a} / (1 + jnp.abs({c}))",
    "divide_by_norm": "{o} = {a} / jnp.sqrt(1 + jnp.mean({a} * {a}))",
    "scale": "{o} = {a} * (1 + {d}.sum() / (1 + {d}.size))",
    "atan2": "{o} = jnp.arctan2({a}, 1 + jnp.square({c}))",
    "hypot": "{o} = jnp.hypot({a}, 1 + {c})",
    "logaddexp": "{o} = jnp.logaddexp({a}, {c})",
    "maximum": "{o} = jnp.maximum({a}, {c})",
    "minimum": "{o} = jnp.minimum({a}, {u} * {c})",
    "maximum_constant": "{o} = jnp.maximum({a}, {u})",
    "maximum_of_norm": (
        "{o} = jnp.maximum({a} / jnp.sqrt(jnp.mean({a} ** 2, -1, keepdims=True) + 1e-3), {u})"
    ),
    "clip": "{o} = jnp.clip({a}, -0.7, 0.9)",
    "clip_arrays": "{o} = jnp.clip({a}, -jnp.abs({c}) - 0.1, jnp.abs({c}))",
    "clip_of_norm": (
        "{o} = jnp.clip({a} * lax.rsqrt(jnp.mean({a} * {a}, -1, keepdims=True) + 0.01), -0.7, 0.9)"
    ),
    "add_bias": "{o} = {a} + b",
    "matmul": "{o} = ({m} @ w) / np.sqrt(w.shape[0])",
    "matmul_transposed": "{o} = {m}.T @ {m} / {m}.shape[0]",
    "linear_gelu": "{o} = jax.nn.gelu({m} @ w + b)",
    "vector_matmul": "{o} = jnp.tanh({v} @ w)",
    "einsum": "{o} = jnp.einsum('...d,ed->...e', {a}, w) * 0.3",
    "attention": (
        "{o} = jax.nn.softmax({m} @ {m}.T / np.sqrt({m}.shape[1])) @ {m}\n{p} = {m} - {o}"
    ),
    "outer": "{o} = jnp.outer(jnp.sin({v}), {v})",
    "batched_dot": "{o} = jnp.einsum('tnd,tde->tne', {t}, jnp.swapaxes({t}, 1, 2)) * 0.1",
    "tensordot": "{o} = jnp.tanh(jnp.tensordot({a}, w, 1))",
    "convolution": (
        "{o} = lax.conv_general_dilated({m}[None], w[:{m}.shape[0], None, :3], (1,), 'SAME', "
        "feature_group_count={m}.shape[0])[0]"
    ),
    "convolution_2d": (
        "{o} = lax.conv_general_dilated({m}[None, :, :, None], w[:3, :3, None, None] * b[:2], (2, 2), "
        "'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))[0]"
    ),
    "fft": "{o} = jnp.abs(jnp.fft.rfft({a}.astype(wide)) + 1.5).astype(dt)",
    "complex": (
        "{p} = lax.complex({a}.astype(wide), jnp.sin({c}).astype(wide))\n"
        "{o} = ({p} * jnp.conj({p} + 1)).real.astype(dt) + jnp.abs({p}).astype(dt)"
    ),
    "cast_32": "{o} = jnp.sin({a}.astype(jnp.float32)).astype(dt)",
    "nan_to_num": "{o} = jnp.nan_to_num({a}, nan=0.5, posinf=1.0, neginf=-1.0)",
    "name": '{o} = checkpoint_name({a} * {u}, "first")',
    "name_second": '{o} = jnp.tanh(checkpoint_name({a}, "second"))',
    "stop_gradient": "{o} = {a} * lax.stop_gradient(jnp.cos({a}))",
}

_REDUCTIONS: Texts = {
    "sum": "{o} = jnp.sum({a}, {x}) * 0.3",
    "mean": "{o} = {a} - jnp.mean({a}, {x}, keepdims=True)",
    "mean_all": "{o} = jnp.mean(jnp.square({a}))",
    "reduce_max": "{o} = jnp.max({a}, {x})",
    "reduce_min": "{o} = jnp.min({a}, {x})",
    "reduce_max_kept": "{o} = {a} - jnp.max({a}, {x}, keepdims=True)",
    "reduce_max_of_norm": "{o} = jnp.max(jax.nn.gelu({a} @ w), {x})",
    "global_max": "{o} = jnp.max(jnp.abs({a}))",
    "divide_by_max": "{o} = {a} / (0.1 + jnp.max(jnp.abs({a})))",
    "prod": "{o} = jnp.prod(1 + 0.3 * jnp.tanh({a}), {x})",
    "variance": "{o} = jnp.var({a}, {x})\n{p} = jnp.std({a}, {x}, keepdims=True) + {a}",
    "norm": "{o} = {a} / (1 + jnp.linalg.norm({a}, axis={x}, keepdims=True))",
    "softmax": "{o} = jax.nn.softmax({a}, {x})",
    "log_softmax": "{o} = jax.nn.log_softmax({a} * {u}, {x})",
    "logsumexp": "{o} = jax.nn.logsumexp({a}, {x})",
    "cross_entropy": (
        "{o} = -jnp.take_along_axis(jax.nn.log_softmax({m}), (jnp.arange({m}.shape[0]) % "
        "{m}.shape[1])[:, None], 1).mean()"
    ),
    "cumsum": "{o} = jnp.cumsum({a}, {x}) * 0.2",
    "cumprod": "{o} = jnp.cumprod(1 + 0.2 * jnp.tanh({a}), {x})",
    "cummax": "{o} = lax.cummax({a}, {a}.ndim - 1)",
    "cummin": "{o} = lax.cummin({a}, 0, reverse=True)",
    "cumlogsumexp": "{o} = lax.cumlogsumexp({a}, 0)",
    "layer_norm": (
        "{p} = jnp.mean({a}, -1, keepdims=True)\n"
        "{r} = jnp.var({a}, -1, keepdims=True)\n"
        "{o} = ({a} - {p}) * lax.rsqrt({r} + 1e-3)"
    ),
    "rms_norm": (
        "{p} = lax.rsqrt(jnp.mean(jnp.square({a}), -1, keepdims=True) + 1e-3)\n"
        "{o} = {a} * {p} * (1 + {u} * {p})"
    ),
    "batch_norm": (
        "{p} = jnp.mean({a}, 0)\n{r} = jnp.mean(jnp.square({a}), 0) - jnp.square({p})\n"
        "{o} = ({a} - {p}) / jnp.sqrt(jnp.maximum({r}, 0) + 0.01)"
    ),
    "flax_layer_norm": (
        "{o} = nn.LayerNorm(use_bias=False, use_scale=False).apply({{}}, {a}).astype(dt)"
    ),
    "max_pool": "{o} = nn.max_pool({m}[None, :, :, None], (2, 2), (2, 2))[0, :, :, 0]",
    "max_pool_overlapping": (
        "{o} = nn.max_pool({m}[None, :, :, None], (3, 3), (2, 2), 'SAME')[0, :, :, 0]"
    ),
    "max_pool_1d": "{o} = nn.max_pool({t}, (2,), (1,), 'SAME')",
    "avg_pool": "{o} = nn.avg_pool({m}[None, :, :, None], (2, 3), (1, 1), 'SAME')[0, :, :, 0]",
    "min_pool": "{o} = lax.reduce_window({m}, np.inf, lax.min, (2, 2), (1, 2), 'VALID')",
    "median": "{o} = jnp.median({a}, {x})",
    "quantile": "{o} = jnp.quantile({a}.astype(wide), 0.3, axis={x}).astype(dt)",
    "segment_sum": (
        "{o} = jax.ops.segment_sum({a}, jnp.abs({h}[jnp.arange({a}.shape[0]) % {h}.shape[0]]) % 5, 5)"
    ),
    "segment_max": (
        "{o} = jnp.maximum(jax.ops.segment_max({a}, jnp.arange({a}.shape[0]) // 3, "
        "{a}.shape[0] // 3 + 1, indices_are_sorted=True), -9)"
    ),
    "segment_min": (
        "{o} = jnp.minimum(jax.ops.segment_min({a} / jnp.sqrt(1 + jnp.mean({a} ** 2)), "
        "jnp.abs(i[jnp.arange({a}.shape[0]) % i.shape[0]]) % 4, 4), 9)"
    ),
}

_SHAPES: Texts = {
    "transpose": "{o} = {a}.T",
    "reshape": "{o} = {a}.reshape(2, -1)",
    "reshape_3": "{o} = {m}.reshape(2, {m}.shape[0] // 2, {m}.shape[1])",
    "flatten": "{o} = {t}.reshape(-1, {t}.shape[-1])",
    "broadcast": "{o} = jnp.broadcast_to({v}, (3, *{v}.shape)) * jnp.arange(1.0, 4.0)[:, None].astype(dt)",
    "expand": "{o} = {m}[:, None, :3] - {m}[:3, :3]",
    "roll": "{o} = jnp.roll({a}, {k}, {x})",
    "flip": "{o} = jnp.flip({a}, {x}) + {a} * {u}",
    "pad": "{o} = jnp.pad({m}, ((0, {k}), (1, 0)))",
    "pad_edge": "{o} = jnp.pad({a}, 1, mode='edge')",
    "slice": "{o} = {a}[{k}:]",
    "strided": "{o} = {a}[::2]",
    "concatenate": "{o} = jnp.concatenate([{a}, {c} * {u}], {x})",
    "stack": "{o} = jnp.stack([{m}, jnp.cos({m})])",
    "split": "{o}, {p} = jnp.split({a}, 2, {x})",
    "tril": "{o} = jnp.tril({m}) + jnp.triu({m} * {u}, {k})",
    "repeat": "{o} = jnp.repeat({v}, 2) * {u}",
    "diagonal": "{o} = jnp.diagonal({m}) * {u}",
    "rotate_halves": "{p}, {r} = jnp.split({a}, 2, -1)\n{o} = jnp.concatenate([-{r}, {p}], -1)",
    "windows": "{o} = {a} - jnp.roll({a}, 1, 0) * {u} + jnp.roll({a}, -1, 0)",
}

_INDEXED: Texts = {
    "gather": "{o} = {a}[jnp.abs({h}) % {a}.shape[0]]",
    "gather_fill": "{o} = jnp.take({a}, {h}, 0, mode='fill', fill_value=0.5)",
    "gather_clip": "{o} = jnp.take({a}, {h}, 0, mode='clip') * {u}",
    "take_along_axis": (
        "{o} = jnp.take_along_axis({m}, jnp.abs({h}[jnp.arange({m}.shape[0]) % {h}.shape[0]])[:, None]"
        " % {m}.shape[1], 1)"
    ),
    "scatter_set": "{o} = {a}.at[jnp.abs({h}[:2]) % {a}.shape[0]].set({u})",
    "scatter_add": "{o} = {a}.at[jnp.abs({h}) % {a}.shape[0]].add({u} * {a}[0])",
    "scatter_max": "{o} = {a}.at[jnp.arange(3)].max({c}[:3] * {u})",
    "scatter_min": "{o} = {a}.at[:2].min({c}[2:4])",
    "scatter_multiply": "{o} = {a}.at[jnp.arange(0, {a}.shape[0], 2)].multiply({u})",
    "scatter_apply": "{o} = {a}.at[1:3].apply(jnp.sin)",
    "dynamic_slice": "{o} = lax.dynamic_slice_in_dim({a}, jnp.abs(i[1]) % 3, 2, 0)",
    "dynamic_update": (
        "{o} = lax.dynamic_update_slice_in_dim({a}, jnp.cos({a}[:1]), jnp.abs(i[0]) % 4, 0)"
    ),
    "dynamic_index": "{o} = lax.dynamic_index_in_dim({a}, i[2] % 3, 0, keepdims=False)",
    "select_by_integer": "{o} = jnp.where({i} > {k}, jnp.sin({u}), 1.0).astype(dt).sum() * {a}",
    "where_mask": "{o} = jnp.where({q}, {a}, {u})",
    "where_both": "{o} = jnp.where({q}, jnp.sin({a}), {c} * {c})",
    "multiply_mask": "{o} = {a} * {q}",
    "select_n": "{o} = lax.select_n({q}, {a}, {c})",
    "one_hot_matmul": "{o} = jax.nn.one_hot(jnp.abs({h}) % 6, 6, dtype=dt) @ jnp.tanh(w[:6])",
    "embedding": "{o} = w[jnp.abs({h}) % w.shape[0]] + {d}.sum() * 0.01",
}

_DECISIONS: Texts = {
    "cast_16": "{o} = {a} * {a}.astype(jnp.bfloat16).astype(dt)",
    "round": "{o} = {a} * jnp.round({a} * {u})",
    "floor": "{o} = {a} - jnp.floor({a})",
    "ceil": "{o} = jnp.ceil({a} * 2) * jnp.sin({a})",
    "sign": "{o} = jnp.sign({a} - {c} * {u}) * jnp.square({a})",
    "modulo": "{o} = jnp.mod({a}, 0.7) + {a} * {u}",
    "truncate": "{o} = {a} * jnp.trunc({c} * 3)",
    "copysign": "{o} = jnp.copysign({a}, {c} + 0.1)",
    "where_compared": "{o} = jnp.where({a} > {c}, {a}, {u} * {c})",
    "where_threshold": "{o} = jnp.where({a} / jnp.sqrt(jnp.mean({a} ** 2) + 0.1) > {u}, {a}, jnp.sin({c}))",
    "compare": "{o} = {a} < {c} + {u}",
    "compare_norm": "{o} = jax.nn.sigmoid({a}) * 2 - 1 >= jnp.mean({a}, keepdims=True)",
    "equals_max": "{o} = {a} == jnp.max({a}, {x}, keepdims=True)",
    "quantize": "{o} = jnp.round({a} * 4) / 4 + lax.stop_gradient({a}) * 0",
    "straight_through": "{o} = {a} + lax.stop_gradient(jnp.round({a}) - {a})",
    "heaviside": "{o} = jnp.heaviside({a}, 0.5) * {c}",
    "sort": "{o} = jnp.sort({a}, {x})",
    "sort_of_norm": "{o} = jnp.sort({a} / (1 + jnp.std({a}, -1, keepdims=True)), -1) * jnp.cos({a})",
    "sort_pairs": "{o}, {p} = lax.sort(({a}, {c}), dimension={a}.ndim - 1, num_keys=1)",
    "argsort": (
        "{p} = jnp.argsort({a}, -1).astype(jnp.int32)\n{o} = jnp.take_along_axis(jnp.sin({a}), {p}, -1)"
    ),
    "argmax": (
        "{p} = jnp.argmax({a}, -1).astype(jnp.int32)\n"
        "{o} = jnp.take_along_axis({a}, {p}[..., None], -1) * {a}"
    ),
    "argmin_one_hot": (
        "{p} = jnp.argmin({a}, -1).astype(jnp.int32)\n"
        "{o} = jax.nn.one_hot({p}, {a}.shape[-1], dtype=dt) * jnp.cos({a})"
    ),
    "top_k": "{o}, {p} = lax.top_k({a}, 3)",
    "top_k_gathered": (
        "{r}, {p} = lax.top_k(jax.nn.softmax({a}), 2)\n{o} = jnp.take_along_axis({c}, {p}, -1) * {r}"
    ),
    "mixture_of_experts": (
        "{r}, {p} = lax.top_k(jax.nn.softmax({m} @ w), 2)\n"
        "{o} = jnp.einsum('nk,nke,ed->nd', {r}, jax.nn.one_hot({p}, w.shape[0], dtype=dt), w)"
    ),
    "searchsorted": (
        "{p} = jnp.searchsorted(jnp.linspace(-1, 1, 7), {a}.ravel()).astype(jnp.int32)\n"
        "{o} = jnp.arange(8.0)[{p}].astype(dt) * {a}.ravel()"
    ),
    "interp": (
        "{o} = jnp.interp({a}.astype(wide), jnp.linspace(-2, 2, 9, dtype=wide), "
        "jnp.cos(jnp.arange(9.0, dtype=wide))).astype(dt)"
    ),
    "digitize": "{o} = jnp.digitize({a}, jnp.array([-0.5, 0.2, 0.9])).astype(jnp.int32)",
    "to_integer": "{o} = ({a} * 3).astype(jnp.int32)",
    "to_bins": "{o} = jnp.clip((jax.nn.sigmoid({a}) * 8).astype(jnp.int8), 0, 7)",
    "is_finite": "{o} = jnp.isfinite({a})",
    "any_all": "{o} = jnp.where(jnp.any({a} > 1, {x}) & ~jnp.all({a} > 0, {x}), 1.0, {u}).astype(dt)",
    "nonzero_count": "{o} = jnp.sum({a} > {u}, {x}).astype(dt) * jnp.sum({a})",
}

_RANDOM: Texts = {
    "dropout": (
        "{p} = jax.random.bernoulli(jax.random.fold_in(key, {n}), np.float32(0.7), {a}.shape)\n"
        "{o} = jnp.where({p}, {a} / 0.7, 0)"
    ),
    "dropout_multiplied": (
        "{p} = jax.random.bernoulli(jax.random.fold_in(key, {n}), np.float32(0.5), {a}.shape)\n"
        "{o} = jnp.tanh({a}) * {p} * 2"
    ),
    "flax_dropout": (
        "{o} = nn.Dropout(np.float32(0.4), deterministic=False).apply("
        "{{}}, {a}, rngs={{'dropout': jax.random.fold_in(key, {n})}})"
    ),
    "normal": (
        "{o} = {a} * (1 + 0.3 * jax.random.normal("
        "jax.random.fold_in(key, {n}), {a}.shape, jnp.float32).astype(dt))"
    ),
    "uniform": (
        "{o} = {a} + jax.random.uniform(jax.random.fold_in(key, {n}), {a}.shape, jnp.float32).astype(dt)"
    ),
    "randint": "{o} = jax.random.randint(jax.random.fold_in(key, {n}), ({a}.shape[0],), 0, 6, jnp.int32)",
    "permutation": (
        "{o} = {a}[jax.random.permutation(jax.random.fold_in(key, {n}), {a}.shape[0])] * jnp.sin({a})"
    ),
    "bits": (
        "{o} = (jax.random.bits(jax.random.fold_in(key, {n}), {a}.shape, jnp.uint32) & 3)"
        ".astype(jnp.int32)"
    ),
}

# Random draws that depend on floats are decisions too.
_RANDOM_DECISIONS: Texts = {
    "categorical": (
        "{o} = jax.random.categorical(jax.random.fold_in(key, {n}), {a}.astype(jnp.float32))"
        ".astype(jnp.int32)"
    ),
    "bernoulli_of": (
        "{o} = jax.random.bernoulli(jax.random.fold_in(key, {n}), "
        "jax.nn.sigmoid({a}).astype(jnp.float32))"
    ),
    "gumbel": (
        "{p} = {a} + jax.random.gumbel(jax.random.fold_in(key, {n}), {a}.shape, jnp.float32).astype(dt)\n"
        "{o} = jax.nn.softmax({p}) + lax.stop_gradient("
        "jax.nn.one_hot(jnp.argmax({p}, -1), {a}.shape[-1], dtype=dt))"
    ),
}

_LINEAR_ALGEBRA: Texts = {
    "cholesky": (
        "{p} = {m}.astype(wide)\n"
        "{o} = jnp.linalg.cholesky({p} @ {p}.T / {m}.shape[1] + 2 * jnp.eye({m}.shape[0])).astype(dt)"
    ),
    "qr": (
        "{p} = jnp.linalg.qr(w.astype(wide) + 2 * jnp.eye(w.shape[0], dtype=wide))[0]\n"
        "{o} = {m} @ {p}.astype(dt)"
    ),
    "eigh": (
        "{p} = {m}[:4, :4].astype(wide)\n"
        "{r} = jnp.linalg.eigh(jnp.diag(jnp.arange(4) * 3).astype(wide) + 0.1 * jnp.tanh({p} + {p}.T))\n"
        "{o} = ({r}[1] ** 2 * {r}[0]).astype(dt)"
    ),
    "solve": (
        "{o} = jnp.linalg.solve(0.1 * jnp.tanh(w.astype(wide)) + 2 * jnp.eye(w.shape[0], dtype=wide), "
        "{m}.T.astype(wide)).T.astype(dt)"
    ),
    "inverse": (
        "{o} = {m} @ jnp.linalg.inv(0.1 * jnp.tanh(w.astype(wide)) + jnp.eye(w.shape[0], dtype=wide))"
        ".astype(dt)"
    ),
    "slogdet": (
        "{o} = (jnp.linalg.slogdet(0.1 * jnp.tanh(w.astype(wide)) + jnp.eye(w.shape[0], dtype=wide))[1]"
        " * {d}.sum().astype(wide)).astype(dt)"
    ),
    "expm": "{o} = jax.scipy.linalg.expm(0.2 * jnp.tanh({m}[:4, :4].astype(wide))).astype(dt)",
}


@dataclass(frozen=True)
class Operator:
    """One template.

    Attributes:
        name: unique.
        text: the template.
        group: which table it is from.
        decides: turns the last bit of a float into something else altogether, as `round` and `sort` do.
    """

    name: str
    text: str
    group: str
    decides: bool = False

    @cached_property
    def holes(self) -> frozenset[str]:
        """The names of its holes."""
        return frozenset(name for _, name, _, _ in string.Formatter().parse(self.text) if name)


def _table(group: str, texts: Texts, decides: bool = False) -> tuple[Operator, ...]:
    return tuple(Operator(name, text, group, decides) for name, text in texts.items())


OPERATORS: tuple[Operator, ...] = (
    *_table("smooth", _SMOOTH),
    *_table("reductions", _REDUCTIONS),
    *_table("shapes", _SHAPES),
    *_table("indexed", _INDEXED),
    *_table("decisions", _DECISIONS, decides=True),
    *_table("random", _RANDOM),
    *_table("random", _RANDOM_DECISIONS, decides=True),
    *_table("linear algebra", _LINEAR_ALGEBRA),
    *_table("integers", operators_integer.INTEGERS),
    *_table("integers to floats", operators_integer.TO_FLOATS),
    *_table("loops", operators_loops.LOOPS),
    *_table("loops", operators_loops.DECIDING_LOOPS, decides=True),
    *_table("calls", operators_loops.CALLS),
    *_table("branches", operators_loops.BRANCHES, decides=True),
)
