"""The operator implementations that come with the library; importing this module registers them.

Output-activated backward passes (Gist; In-Place ABN, Rota Bulo et al. 2018) of softmax, log-softmax, relu and batch
norm, and cuDNN's attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat.rewrite.operators import Candidates, Implementation, register_implementation, struct_of

__all__ = ["BUILT_IN", "batch_norm"]


def _same_shape_candidates(**params: Any) -> Candidates:
    return lambda result: [((struct_of(result),), params)]


def _axis_candidates(result: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    for axis in range(result.ndim - 1, -1, -1):
        yield (struct_of(result),), {"axis": axis}


def _softmax_forward(x: jax.Array, *, axis: int) -> tuple[jax.Array, Any]:
    y = jax.nn.softmax(x, axis=axis)
    return y, (y,)


def _softmax_backward(residuals: Any, ct: jax.Array, *, axis: int) -> tuple[jax.Array]:
    (y,) = residuals
    return (y * (ct - jnp.sum(ct * y, axis=axis, keepdims=True)),)


def _softmax(x: jax.Array, *, axis: int) -> jax.Array:
    return jax.nn.softmax(x, axis=axis)


def _log_softmax(x: jax.Array, *, axis: int) -> jax.Array:
    return jax.nn.log_softmax(x, axis=axis)


def _log_softmax_forward(x: jax.Array, *, axis: int) -> tuple[jax.Array, Any]:
    y = jax.nn.log_softmax(x, axis=axis)
    return y, (y,)


def _log_softmax_backward(residuals: Any, ct: jax.Array, *, axis: int) -> tuple[jax.Array]:
    (y,) = residuals
    return (ct - jnp.exp(y) * jnp.sum(ct, axis=axis, keepdims=True),)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, Any]:
    y = jax.nn.relu(x)
    return y, (y,)


def _relu_backward(residuals: Any, ct: jax.Array) -> tuple[jax.Array]:
    (y,) = residuals
    return (jax.lax.select(y > 0, ct, jax.lax.full_like(ct, 0)),)


def batch_norm(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, epsilon: float | jax.Array = 1e-5
) -> jax.Array:
    """Normalises every channel by the mean and variance of the batch.

    The equations are those of `flax.linen.BatchNorm` in training, in one precision, so that its sites are found.

    Args:
        x: `[..., channels]`.
        gamma: scale, `[channels]`.
        beta: shift, `[channels]`.
        epsilon: added to the variance.

    Returns:
        `[..., channels]`.
    """
    axes = tuple(range(x.ndim - 1))
    square = jax.lax.square(x)
    mean = jnp.mean(x, axes)
    variance = jnp.maximum(0.0, jnp.mean(square, axes) - jax.lax.square(mean))
    y = x - jnp.expand_dims(mean, axes)
    scale = jax.lax.rsqrt(jnp.expand_dims(variance, axes) + epsilon)
    channels = (1,) * len(axes) + (-1,)
    return y * (scale * gamma.reshape(channels)) + beta.reshape(channels)


def _batch_norm_forward(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, epsilon: Any
) -> tuple[jax.Array, Any]:
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axes)
    variance = jnp.maximum(0.0, jnp.mean(jax.lax.square(x), axes) - jax.lax.square(mean))
    y = batch_norm(x, gamma, beta, epsilon)
    return y, (y, gamma, beta, jax.lax.rsqrt(variance + epsilon))


def _batch_norm_backward(residuals: Any, ct: jax.Array) -> tuple[Any, ...]:
    y, gamma, beta, scale = residuals
    axes = tuple(range(y.ndim - 1))
    normal = (y - beta) / gamma
    d_beta = jnp.sum(ct, axes)
    d_gamma = jnp.sum(ct * normal, axes)
    count = math.prod(y.shape[:-1])
    dx = gamma * scale * (ct - (d_beta + normal * d_gamma) / count)
    return dx, d_gamma, d_beta, jnp.sum(-0.5 * scale**2 * gamma * d_gamma)


def _batch_norm_candidates(result: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    if result.ndim < 2:
        return
    channels = jax.ShapeDtypeStruct(result.shape[-1:], result.dtype)
    number = jax.ShapeDtypeStruct((), result.dtype)
    yield (struct_of(result), channels, channels, number), {}


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)


def _cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")


def _attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool
) -> tuple[jax.Array, Any]:
    return jax.vjp(functools.partial(_cudnn_attention, is_causal=is_causal), q, k, v)


def _attention_backward(residuals: Any, ct: jax.Array, *, is_causal: bool) -> tuple[Any, ...]:
    del is_causal
    return residuals(ct)


def _attention_supports(*avals: Any, is_causal: bool) -> str | None:
    """Asks jax, which knows the shapes, dtypes and versions that cuDNN's kernel takes."""
    try:
        jax.eval_shape(
            lambda *x: _attention_forward(*x, is_causal=is_causal)[0], *map(struct_of, avals)
        )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"cuDNN's attention: {str(error).splitlines()[0]}"
    return None


def _attention_candidates(result: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    if result.ndim != 4:
        return
    # Self-attention with as many key and value heads as query heads: more does not show in the result.
    for is_causal in (True, False):
        yield (struct_of(result),) * 3, {"is_causal": is_causal}


_IMPLEMENTATIONS = (
    Implementation(
        operator="softmax",
        name="output",
        kind="output",
        exact=False,
        forward=_softmax_forward,
        backward=_softmax_backward,
        reference=_softmax,
        ends_with=("div",),
        candidates=_axis_candidates,
    ),
    Implementation(
        operator="log_softmax",
        name="output",
        kind="output",
        exact=False,
        forward=_log_softmax_forward,
        backward=_log_softmax_backward,
        reference=_log_softmax,
        ends_with=("sub",),
        candidates=_axis_candidates,
    ),
    Implementation(
        operator="relu",
        name="output",
        kind="output",
        exact=True,
        forward=_relu_forward,
        backward=_relu_backward,
        reference=jax.nn.relu,
        ends_with=("custom_jvp_call",),
        candidates=_same_shape_candidates(),
    ),
    # In-Place ABN (Rota Bulo et al., 2018). It divides by gamma, and errs by about |y / gamma| roundings:
    # choose it only where gamma cannot come near zero (that of a zero-initialised residual branch is zero).
    Implementation(
        operator="batch_norm",
        name="output",
        kind="output",
        exact=False,
        forward=_batch_norm_forward,
        backward=_batch_norm_backward,
        reference=batch_norm,
        ends_with=("add",),
        candidates=_batch_norm_candidates,
        named_only=True,
    ),
    Implementation(
        operator="dot_product_attention",
        name="cudnn",
        kind="kernel",
        exact=False,
        forward=_attention_forward,
        backward=_attention_backward,
        supports=_attention_supports,
        platforms=("cuda",),
        reference=_attention,
        ends_with=("reshape",),
        candidates=_attention_candidates,
    ),
)
for _implementation in _IMPLEMENTATIONS:
    register_implementation(_implementation)

BUILT_IN = frozenset(implementation.id for implementation in _IMPLEMENTATIONS)
"""Their ids, `operator/name`."""
