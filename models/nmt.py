"""A translation model in Flax linen: an LSTM encoder and decoder with additive attention.

The model of Zheng et al. 2020 ("Echo", section II and figure 2; there Sockeye's NMT): the encoder's
hidden states of all steps are compared with the decoder's hidden state of every step, and the attention
hidden state that comes of it is fed to the next step. The comparison is the MLP of Bahdanau et al. 2015,
`v . tanh(W_q h + W_k e)`: a `[B, H]` query added to `[B, S, H]` keys that all steps share. So the
values of shape `[B, S, H]` born in the steps take `T` times the memory of what they are made of, which is
the example of the paper's figure 8.

Departures: the encoder runs in one direction (as in the figure), all sentences of a batch are equally long, so that
nothing is masked, and dropout lies on the embeddings, between layers and on the attention hidden state.

Shapes: `B` batch, `S` source length, `T` target length, `H` hidden width, `V` target vocabulary, `L` layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.gpt import cross_entropy, key_shape

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]
WrapModule = Callable[[type[nn.Module]], type[nn.Module]]
CellState = tuple[Array, Array]
"""The cell state and the hidden state of an LSTM, both `[B, H]`."""
StepFunction = Callable[[Any, Any, Array, "Array | None", Any], tuple[Any, Array]]
"""`step(module, carry, x, keys, shared)` returns `(carry, out)`."""

START = 0
"""The token that the decoder reads before the first target."""


@dataclasses.dataclass(frozen=True)
class NMTConfig:
    """What a translation model is made of.

    Attributes:
        source_vocab: the number of source tokens.
        target_vocab: `V`, the number of target tokens; `START` is one of them.
        layers: `L`, the stacked LSTMs of the encoder, and of the decoder.
        hidden: `H`, the width of embeddings, LSTM states and attention.
        dropout: the rate of every dropout layer.
        scan: whether time is a `lax.scan`; otherwise it is a Python loop, and every step has operators
            of its own, as in a framework that unrolls. Parameters and results are the same.
        dtype: the dtype of activations.
        param_dtype: the dtype of parameters.
    """

    source_vocab: int
    target_vocab: int
    layers: int = 1
    hidden: int = 512
    dropout: float = 0.0
    scan: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("source_vocab", "target_vocab", "hidden")}
        for name, size in {**sizes, "layers": self.layers}.items():
            if size < 1:
                raise ValueError(f"`{name}` is {size}; expected a positive number")


NMT_SMALL = NMTConfig(source_vocab=128, target_vocab=128, hidden=32, dropout=0.1)
NMT_FULL = NMTConfig(source_vocab=17_191, target_vocab=7_709, hidden=512, dropout=0.2)
"""Sizes of English to Vietnamese on IWSLT15, with the hidden width of the paper."""


class LSTMCell(nn.Module):
    """One step of an LSTM: equation (1) of the paper for the input and for the hidden state, then the gates."""

    config: NMTConfig

    @nn.compact
    def __call__(self, carry: CellState, x: Array) -> tuple[CellState, Array]:
        """Maps the state and `[B, D]` to the new state and the hidden state `[B, H]`."""
        config = self.config
        cell, hidden = carry
        gates = _dense(config, 4 * config.hidden, "input")(x)
        gates += _dense(config, 4 * config.hidden, "recurrent", use_bias=False)(hidden)
        enter, forget, new, leave = jnp.split(gates, 4, axis=-1)
        cell = nn.sigmoid(forget) * cell + nn.sigmoid(enter) * jnp.tanh(new)
        hidden = nn.sigmoid(leave) * jnp.tanh(cell)
        return (cell, hidden), hidden


class Attention(nn.Module):
    """Additive attention of one query to the encoder's states."""

    config: NMTConfig

    @nn.compact
    def __call__(self, query: Array, states: Array, keys: Array) -> Array:
        """Returns the context `[B, H]` of a query `[B, H]`, given states and keys `[B, S, H]`."""
        config = self.config
        query = _dense(config, config.hidden, "query", use_bias=False)(query)
        compared = jnp.tanh(keys + query[:, None])
        scores = _dense(config, 1, "score", use_bias=False)(compared)
        weights = nn.softmax(scores[..., 0])
        return jnp.einsum("bs,bsh->bh", weights, states)


class DecoderStep(nn.Module):
    """One step of the decoder: its LSTMs, attention, and the attention hidden state."""

    config: NMTConfig
    wrap_attention: WrapModule | None = None

    @nn.compact
    def __call__(
        self,
        carry: tuple[tuple[CellState, ...], Array],
        x: Array,
        keys: Array | None,
        encoded: tuple[Array, Array],
    ) -> tuple[tuple[tuple[CellState, ...], Array], Array]:
        """Maps `(LSTM states, attention hidden state)` and an embedding `[B, H]` one step further.

        Args:
            carry: of the step before; the attention hidden state is `[B, H]`.
            x: the embedded target token before.
            keys: `L` PRNG keys for dropout; None turns it off.
            encoded: the encoder's states and the keys made of them, both `[B, S, H]`.

        Returns:
            The new carry, and the attention hidden state once more, for the output layer.
        """
        config = self.config
        attention: Any = (
            Attention if self.wrap_attention is None else self.wrap_attention(Attention)
        )
        states, attended = carry
        new_states = []
        y = jnp.concatenate([x, attended], axis=-1)
        for layer, state in enumerate(states):
            y = y if layer == 0 else _drop(config, y, keys, layer - 1)
            state, y = LSTMCell(config, name=f"cell_{layer}")(state, y)
            new_states.append(state)
        context = attention(config, name="attention")(y, *encoded)
        both = jnp.concatenate([y, context], axis=-1)
        attended = jnp.tanh(_dense(config, config.hidden, "attended", use_bias=False)(both))
        attended = _drop(config, attended, keys, config.layers - 1)
        return (tuple(new_states), attended), attended


class NMT(nn.Module):
    """Encoder, decoder with teacher forcing, and the logits.

    Attributes:
        config: the network.
        wrap_attention: applied to the class `Attention`, for hand-picked checkpointing of what the paper
            recomputes, such as `nn.remat`; with `config.scan`,
            `functools.partial(nn.remat, prevent_cse=False)`.
    """

    config: NMTConfig
    wrap_attention: WrapModule | None = None

    @nn.compact
    def __call__(self, source: Array, targets: Array, deterministic: bool) -> Array:
        """Maps source `int[B, S]` and target tokens `int[B, T]` to logits `float[B, T, V]`.

        The logits of step `t` depend on the targets before `t` only.
        """
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=deterministic)
        states, last = self._encode(
            dropout(self._embed(source, config.source_vocab, "source")), dropout
        )
        keys = _dense(config, config.hidden, "attention_keys")(states)
        before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        x = dropout(self._embed(before, config.target_vocab, "target"))
        carry = (last, jnp.zeros((targets.shape[0], config.hidden), config.dtype))
        step = DecoderStep(config, self.wrap_attention, name="decoder")
        masks = None
        if not deterministic and config.dropout:
            masks = jax.random.split(self.make_rng("dropout"), (targets.shape[1], config.layers))
        _, attended = _over_time(config, _decode, step, carry, x, masks, (states, keys))
        return _dense(config, config.target_vocab, "head")(attended)

    def _embed(self, tokens: Array, vocab: int, name: str) -> Array:
        config = self.config
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        return nn.Embed(vocab, config.hidden, name=name, **dtypes)(tokens)

    def _encode(self, x: Array, dropout: nn.Dropout) -> tuple[Array, tuple[CellState, ...]]:
        """Returns the last layer's hidden states `[B, S, H]` and every layer's last state."""
        config = self.config
        zero = jnp.zeros((x.shape[0], config.hidden), config.dtype)
        last = []
        for layer in range(config.layers):
            x = x if layer == 0 else dropout(x)
            cell = LSTMCell(config, name=f"encoder_{layer}")
            state, x = _over_time(config, _encode_step, cell, (zero, zero), x, None, None)
            last.append(state)
        return x, tuple(last)


def _encode_step(cell: Any, carry: CellState, x: Array, keys: Array | None, shared: Any) -> Any:
    """`LSTMCell` as a `StepFunction`; without dropout inside, it needs no keys."""
    return cell(carry, x)


def _decode(step: Any, carry: Any, x: Array, keys: Array | None, encoded: Any) -> Any:
    return step(carry, x, keys, encoded)


def _over_time(
    config: NMTConfig,
    step: StepFunction,
    module: nn.Module,
    carry: Any,
    inputs: Array,
    keys: Array | None,
    shared: Any,
) -> tuple[Any, Array]:
    """Runs a step over `[B, T, D]` inputs and `[T, ...]` keys; `shared` is the same for all steps.

    Returns:
        The last carry, and the outputs `[B, T, H]`.
    """
    if config.scan:
        axes: Any = (1, 0, nn.broadcast)
        scanned = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=axes,
            out_axes=1,
        )
        return scanned(module, carry, inputs, keys, shared)
    outputs = []
    for time in range(inputs.shape[1]):
        now = None if keys is None else keys[time]
        carry, out = step(module, carry, inputs[:, time], now, shared)
        outputs.append(out)
    return carry, jnp.stack(outputs, axis=1)


def loss_fn(config: NMTConfig, wrap_attention: WrapModule | None = None) -> Callable[..., Array]:
    """The training loss of a translation model.

    Args:
        config: the network.
        wrap_attention: see `NMT`.

    Returns:
        `loss(params, source, targets, key)`: the mean cross entropy of the targets, a float32 scalar.
        `key` drives dropout; None turns dropout off.
    """
    model = NMT(config, wrap_attention)

    def loss(params: Any, source: Array, targets: Array, key: Array | None) -> Array:
        rngs = None if key is None else {"dropout": key}
        logits = model.apply({"params": params}, source, targets, key is None, rngs=rngs)
        return cross_entropy(jnp.asarray(logits), targets)

    return loss


def init_params(config: NMTConfig, seed: int | Array = 0) -> Any:
    """Freshly initialised parameters; under `jax.eval_shape`, their shapes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return NMT(config).init(jax.random.key(seed), tokens, tokens, True)["params"]


def nmt_loss(
    config: NMTConfig,
    batch: int,
    source_length: int,
    target_length: int | None = None,
    wrap_attention: WrapModule | None = None,
) -> Case:
    """`loss_fn` and the shapes of its arguments.

    Args:
        config: the network.
        batch: `B`.
        source_length: `S`.
        target_length: `T`; None for `S`.
        wrap_attention: see `NMT`.

    Returns:
        `(loss, (params, source, targets, key))`; `source` is `int[B, S]`, `targets` `int[B, T]`.

    Raises:
        ValueError: a length is not positive.
    """
    target_length = source_length if target_length is None else target_length
    if source_length < 1 or target_length < 1:
        raise ValueError(
            f"source and target lengths are {source_length} and {target_length}; expected positive numbers"
        )
    params = jax.eval_shape(lambda: init_params(config))
    source = jax.ShapeDtypeStruct((batch, source_length), jnp.int32)
    targets = jax.ShapeDtypeStruct((batch, target_length), jnp.int32)
    return loss_fn(config, wrap_attention), (params, source, targets, key_shape())


def _dense(config: NMTConfig, features: int, name: str, use_bias: bool = True) -> nn.Dense:
    dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    return nn.Dense(features, use_bias=use_bias, name=name, **dtypes)


def _drop(config: NMTConfig, x: Array, keys: Array | None, index: int) -> Array:
    """Dropout with key `index` of a step; the identity without keys."""
    if keys is None:
        return x
    return nn.Dropout(config.dropout, deterministic=False)(x, rng=keys[index])
