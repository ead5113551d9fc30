"""Transformers whose weights are shared by all layers, spread over experts, or stacked by Flax.

Shapes: `B` batch, `T` length, `D` width, `H` heads, `F` hidden width, `V` vocabulary, `X` experts, `C` the
tokens that one expert takes of one sequence.
"""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.development.layers import (
    Array,
    Case,
    Params,
    attention,
    attention_shapes,
    cross_entropy,
    layer_norm,
    mean_square,
    mlp,
    mlp_shapes,
    norm_shapes,
    shape,
)

# --- one block for all layers


def albert(small: bool = False) -> Case:
    """12 layers with the weights of one block (Lan et al. 2020), batch 8 x 256, width 768, float32.

    `loss(params, tokens, targets)`: the mean cross entropy of `int[B, T]` at every position, with the
    embedding, factorized as in the paper, tied to the head.
    """
    layers, batch, length, width, heads = (3, 2, 8, 16, 2) if small else (12, 8, 256, 768, 12)
    vocab_size, factor = (32, 8) if small else (8192, 128)
    params = {
        "embedding": shape(vocab_size, factor),
        "positions": shape(length, factor),
        "widen": shape(factor, width),
        "block": _block_shapes(width, 4 * width),
        "norm": norm_shapes(width),
        "narrow": shape(width, factor),
    }
    tokens = shape(batch, length, dtype=jnp.int32)

    def loss(params: Params, tokens: Array, targets: Array) -> Array:
        x = (params["embedding"][tokens] + params["positions"]) @ params["widen"]
        for _ in range(layers):
            x = _block(params["block"], x, heads)
        logits = layer_norm(params["norm"], x) @ params["narrow"] @ params["embedding"].T
        return cross_entropy(logits, targets)

    return loss, (params, tokens, tokens)


def _block_shapes(width: int, hidden: int) -> dict[str, Any]:
    return {
        "attention_norm": norm_shapes(width),
        "attention": attention_shapes(width),
        "mlp_norm": norm_shapes(width),
        "mlp": mlp_shapes(width, hidden, width),
    }


def _block(params: Params, x: Array, heads: int) -> Array:
    x = x + attention(params["attention"], layer_norm(params["attention_norm"], x), heads)
    return x + mlp(params["mlp"], layer_norm(params["mlp_norm"], x), jax.nn.gelu)


# --- a mixture of experts


def mixture_of_experts(small: bool = False) -> Case:
    """4 blocks whose MLP is 8 experts, 2 for each token, batch 8 x 512, width 512, float32.

    Tokens go to experts and back in einsums with one-hot tensors (Lepikhin et al. 2021); an expert
    takes 1.25 times its share of a sequence and drops the tokens beyond.

    `loss(params, tokens, targets)`: the mean cross entropy of `int[B, T]`, and 0.01 times a loss that
    balances the experts.
    """
    layers, batch, length, width, heads = (2, 2, 16, 16, 2) if small else (4, 8, 512, 512, 8)
    vocab_size, experts, hidden = (32, 4, 32) if small else (8192, 8, 2048)
    capacity = 5 * 2 * length // (4 * experts)
    layer = {
        "attention_norm": norm_shapes(width),
        "attention": attention_shapes(width),
        "norm": norm_shapes(width),
        "router": shape(width, experts),
        "up": shape(experts, width, hidden),
        "down": shape(experts, hidden, width),
    }
    params = {
        "embedding": shape(vocab_size, width),
        "layers": [layer for _ in range(layers)],
        "norm": norm_shapes(width),
        "head": shape(width, vocab_size),
    }
    tokens = shape(batch, length, dtype=jnp.int32)

    def loss(params: Params, tokens: Array, targets: Array) -> Array:
        x = params["embedding"][tokens]
        balance = jnp.float32(0)
        for layer in params["layers"]:
            y = layer_norm(layer["attention_norm"], x)
            x = x + attention(layer["attention"], y, heads, causal=True)
            y, unbalanced = _experts(layer, layer_norm(layer["norm"], x), capacity)
            x, balance = x + y, balance + unbalanced
        logits = layer_norm(params["norm"], x) @ params["head"]
        return cross_entropy(logits, targets) + 0.01 * balance

    return loss, (params, tokens, tokens)


def _experts(params: Params, x: Array, capacity: int) -> tuple[Array, Array]:
    """The mixture on `[B, T, D]`, and the balancing loss."""
    probabilities = jax.nn.softmax(x @ params["router"], axis=-1)
    combine, unbalanced = _route(probabilities, capacity)
    dispatch = (combine > 0).astype(x.dtype)
    taken = jnp.einsum("btxc,btd->bxcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("bxcd,xdf->bxcf", taken, params["up"]))
    made = jnp.einsum("bxcf,xfd->bxcd", hidden, params["down"])
    return jnp.einsum("btxc,bxcd->btd", combine, made), unbalanced


def _route(probabilities: Array, capacity: int) -> tuple[Array, Array]:
    """How much of which place of which expert a token gets, `[B, T, X, C]`, and the balancing loss.

    Args:
        probabilities: of the experts, `[B, T, X]`.
        capacity: `C`; the first choices of all tokens have precedence over the second ones.
    """
    experts = probabilities.shape[-1]
    gates, chosen = jax.lax.top_k(probabilities, 2)
    gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    choices = jax.nn.one_hot(chosen, experts)
    first, second = choices[:, :, 0], choices[:, :, 1]
    before_first = jnp.cumsum(first, axis=1) - first
    before_second = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    combine = jnp.zeros((*probabilities.shape, capacity))
    for index, (choice, before) in enumerate([(first, before_first), (second, before_second)]):
        place = jnp.sum(choice * before, axis=-1).astype(jnp.int32)
        one_hot = choice[..., None] * jax.nn.one_hot(place, capacity)[:, :, None, :]
        combine = combine + gates[:, :, index, None, None] * one_hot
    share = jnp.mean(first, axis=(0, 1)) * jnp.mean(probabilities, axis=(0, 1))
    return combine, experts * jnp.sum(share)


# --- Flax's attention


class FlaxBlock(nn.Module):
    """A block around `nn.MultiHeadDotProductAttention`, bfloat16 with float32 parameters.

    Attributes:
        heads: `H`.
    """

    heads: int

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> tuple[Array, None]:
        """Maps `[B, T, D]` to its like and, as `nn.scan` wants it, None."""
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=jnp.bfloat16, name="attention_norm")(x)
        attend = nn.MultiHeadDotProductAttention(
            self.heads, dtype=jnp.bfloat16, use_bias=False, name="attention"
        )
        x = x + attend(y, mask=mask)
        y = nn.LayerNorm(dtype=jnp.bfloat16, name="mlp_norm")(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16, name="up")(y))
        return x + nn.Dense(width, dtype=jnp.bfloat16, name="down")(y), None


class FlaxBlocks(nn.Module):
    """`FlaxBlock` under `nn.scan`, and a last norm.

    Attributes:
        layers: the number of blocks.
        heads: `H`.
    """

    layers: int
    heads: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps `[B, T, D]` to its like in bfloat16."""
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool))
        scanned: Any = nn.scan(
            FlaxBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=cast(Any, nn.broadcast),  # flax declares an int
            length=self.layers,
        )
        x, _ = scanned(self.heads, name="blocks")(x.astype(jnp.bfloat16), mask)
        return nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x)


def gpt_flax(small: bool = False) -> Case:
    """12 blocks with Flax's own attention under `nn.scan`, batch 4 x 512, width 768, bfloat16.

    `loss(params, x, targets)`: the mean squared error, in float32, of `[B, T, D]`.
    """
    layers, batch, length, width, heads = (3, 2, 8, 16, 2) if small else (12, 4, 512, 768, 12)
    model = FlaxBlocks(layers, heads)
    x = shape(batch, length, width)

    def init() -> Any:
        return model.init(jax.random.key(0), jnp.zeros(x.shape))["params"]

    def loss(params: Any, x: Array, targets: Array) -> Array:
        return mean_square(jnp.asarray(model.apply({"params": params}, x)), targets)

    return loss, (jax.eval_shape(init), x, x)
