"""An LSTM language model in Flax linen, with `nn.RNN` scanning over time.

Zaremba et al. 2014: stacked LSTMs with dropout on the connections between layers only.

Shapes: `B` batch, `T` length, `D` width, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.gpt import key_shape

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]
WrapModule = Callable[[type[nn.Module]], type[nn.Module]]


@dataclasses.dataclass(frozen=True)
class LSTMConfig:
    """What an LSTM language model is made of.

    Attributes:
        vocab_size: `V`, the number of tokens.
        layers: the number of stacked LSTMs.
        width: `D`, of the embedding, the hidden state and the cell state.
        dropout: the rate of the dropout before each layer and before the head.
        dtype: the dtype of activations and parameters.
        remat_policy: a `remat` policy for the cell, one time step; None leaves it alone.
    """

    vocab_size: int
    layers: int = 2
    width: int = 64
    dropout: float = 0.0
    dtype: Any = jnp.float32
    remat_policy: object = None


LSTM_SMALL = LSTMConfig(vocab_size=128, width=32, dropout=0.1)
LSTM_FULL = LSTMConfig(vocab_size=10_000, width=1024, dropout=0.5)


class LSTM(nn.Module):
    """Embedding, stacked LSTMs with dropout between, and the logits.

    Attributes:
        config: the network.
        wrap_cell: applied to `nn.OptimizedLSTMCell`, for hand-picked checkpointing such as
            `functools.partial(nn.remat, prevent_cse=False)`; it comes instead of
            `config.remat_policy`.
        segment: time steps of an inner scan that is checkpointed as a whole, under an outer one;
            it divides `T`. None for one scan without checkpoints.
    """

    config: LSTMConfig
    wrap_cell: WrapModule | None = None
    segment: int | None = None

    @nn.compact
    def __call__(self, tokens: Array, deterministic: bool) -> Array:
        """Maps token ids `int[B, T]` to logits `float[B, T, V]`."""
        config = self.config
        dtypes = {"dtype": config.dtype, "param_dtype": config.dtype}
        cell: Any = _cell_class(config, self.wrap_cell)
        x = nn.Embed(config.vocab_size, config.width, name="tokens", **dtypes)(tokens)
        for layer in range(config.layers):
            x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
            step = cell(config.width, **dtypes, name=f"cell_{layer}")
            if self.segment is None:
                x = nn.RNN(step, name=f"rnn_{layer}")(x)
            else:
                x = _segmented_rnn(step, x, self.segment)
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        return nn.Dense(config.vocab_size, name="head", **dtypes)(x)


def _segmented_rnn(cell: Any, x: Array, segment: int) -> Array:
    """Runs a cell over `[B, T, D]`, `segment` steps at a time under one checkpoint."""
    batch, length = x.shape[:2]
    if segment < 1 or length % segment:
        raise ValueError(f"`segment` must divide the length: {segment} and {length}")

    def step(cell: Any, carry: Any, x: Array) -> tuple[Any, Array]:
        return cell(carry, x)

    over_time: dict[str, Any] = {
        "variable_broadcast": "params",
        "split_rngs": {"params": False},
        "in_axes": 1,
        "out_axes": 1,
    }
    inner = nn.remat(nn.scan(step, **over_time), prevent_cse=False)
    carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
    chunks = x.reshape(batch, length // segment, segment, *x.shape[2:])
    _, out = nn.scan(inner, **over_time)(cell, carry, chunks)
    return out.reshape(batch, length, -1)


def loss_fn(
    config: LSTMConfig, wrap_cell: WrapModule | None = None, segment: int | None = None
) -> Callable[..., Array]:
    """The training loss `loss(params, tokens, targets, key)`; see `models.gpt.loss_fn`."""
    model = LSTM(config, wrap_cell, segment)

    def loss(params: Any, tokens: Array, targets: Array, key: Array | None) -> Array:
        rngs = None if key is None else {"dropout": key}
        logits = jnp.asarray(model.apply({"params": params}, tokens, key is None, rngs=rngs))
        logits = logits.astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    return loss


def init_params(config: LSTMConfig, seed: int | Array = 0) -> Any:
    """Freshly initialised parameters; under `jax.eval_shape`, their shapes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return LSTM(config).init(jax.random.key(seed), tokens, True)["params"]


def lstm_loss(
    config: LSTMConfig,
    batch: int,
    length: int,
    wrap_cell: WrapModule | None = None,
    segment: int | None = None,
) -> Case:
    """`loss_fn` and the shapes of its arguments.

    Args:
        config: the network.
        batch: `B`.
        length: `T`.
        wrap_cell, segment: see `LSTM`.

    Returns:
        `(loss, (params, tokens, targets, key))`.
    """
    params = jax.eval_shape(lambda: init_params(config))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return loss_fn(config, wrap_cell, segment), (params, tokens, tokens, key_shape())


def _cell_class(config: LSTMConfig, wrap_cell: WrapModule | None) -> type[nn.Module]:
    if wrap_cell is not None:
        return wrap_cell(nn.OptimizedLSTMCell)
    if config.remat_policy is None:
        return nn.OptimizedLSTMCell
    import remat.linen

    return remat.linen.remat(
        nn.OptimizedLSTMCell, remat_policy=config.remat_policy, prevent_cse=False
    )
