"""Networks whose steps are spelt out: a parallel scan, and a recurrent translator that attends to its input.

Shapes: `B` batch, `T` length, `D` width, `N` states per channel, `V` vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.development.layers import Array, Case, Params, cross_entropy, mean_square, shape

__all__ = ["attentive_gru", "selective_scan"]


def selective_scan(small: bool = False) -> Case:
    """2 layers of selective state spaces (Gu and Dao 2023) by `lax.associative_scan`, batch 4 x 1024, width 256.

    `loss(params, x, targets)`: the mean squared error of `[B, T, D]`.
    """
    batch, length, width, states = (2, 8, 4, 2) if small else (4, 1024, 256, 16)
    layer = {
        "in": shape(width, width),
        "gate": shape(width, width),
        "step": shape(width, width),
        "decay": shape(width, states),
        "write": shape(width, states),
        "read": shape(width, states),
        "out": shape(width, width),
    }
    given = shape(batch, length, width)

    def loss(params: list[Params], x: Array, targets: Array) -> Array:
        for layer in params:
            x = x + _selective(layer, x)
        return mean_square(x, targets)

    return loss, ([layer] * 2, given, given)


def _selective(params: Params, x: Array) -> Array:
    given, gate = x @ params["in"], jax.nn.silu(x @ params["gate"])
    step = jax.nn.softplus(given @ params["step"])
    kept = jnp.exp(-step[..., None] * jnp.exp(params["decay"]))  # [B, T, D, N]
    added = (step * given)[..., None] * (x @ params["write"])[:, :, None, :]

    def after(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, state = jax.lax.associative_scan(after, (kept, added), axis=1)
    read = jnp.einsum("btdn,btn->btd", state, x @ params["read"])
    return (read * gate) @ params["out"]


def attentive_gru(small: bool = False) -> Case:
    """A translator of two GRUs in Python loops of 32 steps (Bahdanau et al. 2015), batch 128, width 512, float32.

    `loss(params, source, target, labels)`: the mean cross entropy of `int[B, T]`.
    """
    batch, length, width, vocab_size = (2, 3, 4, 8) if small else (128, 32, 512, 8000)
    params = {
        "embedding": shape(vocab_size, width),
        "encoder": _gru_shapes(width, width),
        "decoder": _gru_shapes(2 * width, width),
        "query": shape(width, width),
        "head": shape(2 * width, vocab_size),
    }
    tokens = shape(batch, length, dtype=jnp.int32)

    def loss(params: Params, source: Array, target: Array, labels: Array) -> Array:
        given, wanted = params["embedding"][source], params["embedding"][target]
        state, states = jnp.zeros((batch, width)), []
        for step in range(length):
            state = _gru(params["encoder"], state, given[:, step])
            states.append(state)
        memory, read = jnp.stack(states, 1), []
        for step in range(length):
            scores = jnp.einsum("bd,btd->bt", state @ params["query"], memory)
            context = jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), memory)
            state = _gru(
                params["decoder"], state, jnp.concatenate([wanted[:, step], context], axis=-1)
            )
            read.append(jnp.concatenate([state, context], axis=-1))
        return cross_entropy(jnp.stack(read, 1) @ params["head"], labels)

    return loss, (params, tokens, tokens, tokens)


def _gru_shapes(given: int, width: int) -> Params:
    return {
        "input": shape(given, 3 * width),
        "state": shape(width, 3 * width),
        "bias": shape(3 * width),
    }


def _gru(params: Params, state: Array, given: Array) -> Array:
    """One step: `[B, D]`."""
    parts = jnp.split(given @ params["input"] + params["bias"], 3, axis=-1)
    own = jnp.split(state @ params["state"], 3, axis=-1)
    reset, update = jax.nn.sigmoid(parts[0] + own[0]), jax.nn.sigmoid(parts[1] + own[1])
    candidate = jnp.tanh(parts[2] + reset * own[2])
    return (1 - update) * candidate + update * state
