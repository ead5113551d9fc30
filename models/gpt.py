"""A GPT language model in Flax linen, and its stack of blocks as a bare JAX function.

The architecture is that of GPT-2 (Radford et al., 2019): pre-layer-norm blocks, learned positions,
GELU, logits tied to the token embedding. Attention is written out in `jax.numpy`, with separate
query, key and value projections, so that every intermediate value is there to be planned.

Shapes: `B` batch, `T` length, `D` width, `H` heads, `V` vocabulary, `L` layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

Array = jax.Array
Case = tuple[Callable[..., Any], tuple[Any, ...]]
WrapModule = Callable[[type[nn.Module]], type[nn.Module]]
WrapFunction = Callable[[Callable[..., Any]], Callable[..., Any]]
Activation = Literal["gelu", "relu"]

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {"gelu": nn.gelu, "relu": nn.relu}
"""The non-linearities between the two layers of the feed-forward network, by name."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What a GPT is made of.

    Attributes:
        vocab_size: `V`, the number of tokens.
        context: the number of learned positions, the longest sequence.
        layers: `L`, the number of blocks.
        width: `D`, the width of the residual stream.
        heads: `H`, the number of attention heads; divides `width`.
        dropout: the rate of every dropout layer.
        activation: of the feed-forward network: "gelu" as in GPT-2, or "relu" as in the Transformer
            of Vaswani et al. 2017.
        dtype: the dtype of activations.
        param_dtype: the dtype of parameters.
        softmax_dtype: the dtype of the attention softmax; None for `dtype`.
        tied_head: whether the logits reuse the token embedding.
        scan_layers: whether the blocks are one `nn.scan` with stacked parameters.
        remat_policy: a `remat` policy for each block; None leaves the blocks alone.
    """

    vocab_size: int
    context: int
    layers: int
    width: int
    heads: int
    dropout: float = 0.0
    activation: Activation = "gelu"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    softmax_dtype: Any = None
    tied_head: bool = True
    scan_layers: bool = False
    remat_policy: object = None

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"`heads` must divide `width`: {self.heads} and {self.width}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"`activation` is {self.activation!r}; expected one of {sorted(ACTIVATIONS)}"
            )


GPT_TINY = GPTConfig(vocab_size=128, context=64, layers=2, width=64, heads=2, dropout=0.1)
GPT_SMALL_DEMO = GPTConfig(vocab_size=128, context=128, layers=4, width=128, heads=4, dropout=0.1)
GPT2_SMALL = GPTConfig(
    vocab_size=50304,
    context=1024,
    layers=12,
    width=768,
    heads=12,
    dropout=0.1,
    dtype=jnp.bfloat16,
)


class Attention(nn.Module):
    """Causal multi-head self-attention with separate q, k and v projections."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        config = self.config
        query, key, value = (self._heads(x, name) for name in ("query", "key", "value"))
        probabilities = causal_softmax(query, key, config.softmax_dtype or config.dtype)
        probabilities = probabilities.astype(config.dtype)
        probabilities = nn.Dropout(config.dropout)(probabilities, deterministic=deterministic)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, value)
        return _dense(config, config.width, "out")(mixed.reshape(x.shape))

    def _heads(self, x: Array, name: str) -> Array:
        """Projects `[B, T, D]` and splits it to `[B, T, H, D / H]`."""
        config = self.config
        projected = _dense(config, config.width, name)(x)
        return projected.reshape(*x.shape[:2], config.heads, -1)


class Block(nn.Module):
    """One pre-layer-norm transformer block."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        """Maps the residual stream `[B, T, D]` to `[B, T, D]`."""
        config = self.config
        y = _layer_norm(config, "norm_attention")(x)
        y = Attention(config, name="attention")(y, deterministic)
        x = x + nn.Dropout(config.dropout)(y, deterministic=deterministic)
        y = _layer_norm(config, "norm_mlp")(x)
        y = ACTIVATIONS[config.activation](_dense(config, 4 * config.width, "mlp_in")(y))
        y = _dense(config, config.width, "mlp_out")(y)
        return x + nn.Dropout(config.dropout)(y, deterministic=deterministic)


class GPT(nn.Module):
    """Token and position embedding, the blocks, a final norm and the logits.

    Attributes:
        config: the network.
        wrap_block: applied to the class `Block`, for hand-picked checkpointing such as
            `functools.partial(nn.remat, policy=..., static_argnums=(2,))`; it comes instead of
            `config.remat_policy`.
    """

    config: GPTConfig
    wrap_block: WrapModule | None = None

    @nn.compact
    def __call__(self, tokens: Array, deterministic: bool) -> Array:
        """Maps token ids `int[B, T]` to logits `float[B, T, V]`."""
        config = self.config
        embed = _embed(config, config.vocab_size, "tokens")
        x = embed(tokens) + _embed(config, config.context, "positions")(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        x = self._blocks(x, deterministic)
        x = _layer_norm(config, "norm")(x)
        if config.tied_head:
            return embed.attend(x)
        return _dense(config, config.vocab_size, "head", use_bias=False)(x)

    def _blocks(self, x: Array, deterministic: bool) -> Array:
        block: Any = _block_class(self.config, self.wrap_block)
        if self.config.scan_layers:
            return _scan_blocks(block(self.config, name="blocks"), x, deterministic)
        for layer in range(self.config.layers):
            x = block(self.config, name=f"block_{layer}")(x, deterministic)
        return x


def causal_softmax(query: Array, key: Array, dtype: Any) -> Array:
    """Attention probabilities `[B, H, T, T]` in `dtype`, of `[B, T, H, D / H]` projections."""
    length, head_width = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * head_width**-0.5, key).astype(dtype)
    mask = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    return jax.nn.softmax(scores, axis=-1)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross entropy, in float32, of `[..., V]` logits and `int[...]` labels."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)


def loss_fn(config: GPTConfig, wrap_block: WrapModule | None = None) -> Callable[..., Array]:
    """The training loss of a GPT.

    Args:
        config: the network.
        wrap_block: see `GPT`.

    Returns:
        `loss(params, tokens, targets, key)`: the mean next-token cross entropy, a float32 scalar,
        of `tokens: int[B, T]` and `targets: int[B, T]`, the tokens one position later. `key` drives
        dropout; None turns dropout off.
    """
    model = GPT(config, wrap_block)

    def loss(params: Any, tokens: Array, targets: Array, key: Array | None) -> Array:
        rngs = None if key is None else {"dropout": key}
        logits = jnp.asarray(model.apply({"params": params}, tokens, key is None, rngs=rngs))
        return cross_entropy(logits, targets)

    return loss


def init_params(config: GPTConfig, seed: int | Array = 0) -> Any:
    """Freshly initialised parameters; under `jax.eval_shape`, their shapes."""
    tokens = jnp.zeros((1, config.context), jnp.int32)
    return GPT(config).init(jax.random.key(seed), tokens, True)["params"]


def gpt_loss(
    config: GPTConfig, batch: int, length: int | None = None, wrap_block: WrapModule | None = None
) -> Case:
    """`loss_fn` and the shapes of its arguments.

    Args:
        config: the network.
        batch: `B`.
        length: `T`; None for the whole context.
        wrap_block: see `GPT`.

    Returns:
        `(loss, (params, tokens, targets, key))`.
    """
    params = jax.eval_shape(lambda: init_params(config))
    tokens = jax.ShapeDtypeStruct((batch, length or config.context), jnp.int32)
    return loss_fn(config, wrap_block), (params, tokens, tokens, key_shape())


def stack_blocks(params: Any, layers: int) -> Any:
    """Parameters of an unrolled GPT as those of the scanned one (`block_0..` to `blocks`)."""
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    return {**rest, "blocks": stack_layers([params[f"block_{i}"] for i in range(layers)])}


def stack_layers(layers: Any) -> Any:
    """One pytree of `[L, ...]` leaves from a sequence of `L` equal pytrees of `[...]` leaves."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def blocks_scanned(
    layers: int,
    batch: int,
    length: int,
    width: int,
    heads: int,
    dropout: float = 0.0,
    dtype: Any = jnp.float32,
    wrap: WrapFunction | None = None,
    segment: int | None = None,
    activation: Activation = "gelu",
) -> Case:
    """`L` blocks under `jax.lax.scan`, without embeddings: the classic benchmark of remat policies.

    Args:
        layers: `L`.
        batch: `B`.
        length: `T`.
        width: `D`.
        heads: `H`.
        dropout: the rate of every dropout layer.
        dtype: the dtype of parameters and activations.
        wrap: applied to the per-layer function `layer(params, x, key) -> x`, for instance
            `lambda layer: jax.checkpoint(layer, policy=..., prevent_cse=False)`.
        segment: layers of an inner scan that is checkpointed as a whole, under an outer one; it
            divides `layers`. None for one scan without checkpoints.
        activation: see `GPTConfig`.

    Returns:
        `(loss, (params, x, key))`, where `loss` is the float32 mean of the output, `params` has
        stacked leaves `[L, ...]`, `x` is `[B, T, D]`, and each layer gets one of `L` split keys.

    Raises:
        ValueError: `segment` does not divide `layers`.
    """
    if segment is not None and (segment < 1 or layers % segment):
        raise ValueError(f"`segment` must divide `layers`: {segment} and {layers}")
    config = _block_config(layers, length, width, heads, dropout, dtype, activation)
    layer = layer_function(config, wrap)

    def loss(params: Any, x: Array, key: Array) -> Array:
        def body(carry: Array, xs: tuple[Any, Array]) -> tuple[Array, None]:
            return layer(xs[0], carry, xs[1]), None

        def group(carry: Array, xs: tuple[Any, Array]) -> tuple[Array, None]:
            return jax.lax.scan(body, carry, xs)

        stacked = (params, jax.random.split(key, layers))
        if segment is None:
            out, _ = group(x, stacked)
        else:
            parts = layers // segment
            split = jax.tree.map(lambda a: a.reshape(parts, segment, *a.shape[1:]), stacked)
            out, _ = jax.lax.scan(jax.checkpoint(group, prevent_cse=False), x, split)
        return jnp.mean(out, dtype=jnp.float32)

    return loss, _block_shapes(config, batch, stacked=True)


def blocks_unrolled(
    layers: int,
    batch: int,
    length: int,
    width: int,
    heads: int,
    dropout: float = 0.0,
    dtype: Any = jnp.float32,
    wrap: WrapFunction | None = None,
    segment: int | None = None,
    activation: Activation = "gelu",
) -> Case:
    """`blocks_scanned` as a Python loop.

    The arguments are those of `blocks_scanned`, and so is the value for equal parameters, except
    that `params` is a tuple of `L` pytrees: slicing stacked ones would add its own backward pass.
    `segment` layers at a time are under one `jax.checkpoint`; the last group may be smaller.
    """
    config = _block_config(layers, length, width, heads, dropout, dtype, activation)
    layer = layer_function(config, wrap)

    def loss(params: tuple[Any, ...], x: Array, key: Array) -> Array:
        keys = jax.random.split(key, layers)

        def group(params: tuple[Any, ...], x: Array, keys: Array) -> Array:
            for index, layer_params in enumerate(params):
                x = layer(layer_params, x, keys[index])
            return x

        if segment is None:
            x = group(params, x, keys)
        else:
            for start in range(0, layers, segment):
                part = slice(start, start + segment)
                x = jax.checkpoint(group)(params[part], x, keys[part])
        return jnp.mean(x, dtype=jnp.float32)

    return loss, _block_shapes(config, batch, stacked=False)


def init_args(
    layers: int,
    batch: int,
    length: int,
    width: int,
    heads: int,
    dropout: float = 0.0,
    dtype: Any = jnp.float32,
    *,
    stacked: bool = True,
    seed: int = 0,
) -> tuple[Any, Array, Array]:
    """Real arguments for `blocks_scanned` (`stacked`) or `blocks_unrolled` of the same sizes."""
    config = _block_config(layers, length, width, heads, dropout, dtype)
    return _init_block_args(config, batch, stacked, seed)


def layer_function(config: GPTConfig, wrap: WrapFunction | None = None) -> Callable[..., Array]:
    """One `Block` as a function `layer(params, x, key) -> x`, with `wrap` applied if given."""
    block = Block(config)

    def layer(params: Any, x: Array, key: Array) -> Array:
        deterministic = config.dropout == 0.0
        return block.apply({"params": params}, x, deterministic, rngs={"dropout": key})  # pyright: ignore[reportReturnType]

    return layer if wrap is None else wrap(layer)


def key_shape() -> jax.ShapeDtypeStruct:
    """The shape of one typed PRNG key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def _block_class(config: GPTConfig, wrap_block: WrapModule | None) -> type[nn.Module]:
    if wrap_block is not None:
        return wrap_block(Block)
    if config.remat_policy is None:
        return Block
    import remat.linen

    return remat.linen.remat(
        Block,
        remat_policy=config.remat_policy,
        static_argnums=(2,),
        prevent_cse=not config.scan_layers,
    )


def _scan_blocks(block: Any, x: Array, deterministic: bool) -> Array:
    """Applies `block` `L` times, with parameters `[L, ...]` and a dropout key for each layer."""

    def body(module: Any, carry: Array, _: None) -> tuple[Array, None]:
        return module(carry, deterministic), None

    scanned = nn.scan(
        body,
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
        length=block.config.layers,
    )
    return scanned(block, x, None)[0]


def _dense(config: GPTConfig, features: int, name: str, use_bias: bool = True) -> nn.Dense:
    return nn.Dense(
        features,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.normal(0.02),
        name=name,
    )


def _layer_norm(config: GPTConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, dtype=config.dtype, param_dtype=config.param_dtype, name=name)


def _embed(config: GPTConfig, entries: int, name: str) -> nn.Embed:
    return nn.Embed(
        entries,
        config.width,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=nn.initializers.normal(0.02),
        name=name,
    )


def _block_config(
    layers: int,
    length: int,
    width: int,
    heads: int,
    dropout: float,
    dtype: Any,
    activation: Activation = "gelu",
) -> GPTConfig:
    return GPTConfig(
        vocab_size=1,
        context=length,
        layers=layers,
        width=width,
        heads=heads,
        dropout=dropout,
        activation=activation,
        dtype=dtype,
        param_dtype=dtype,
    )


def _init_block_args(
    config: GPTConfig, batch: int, stacked: bool, seed: int
) -> tuple[Any, Array, Array]:
    x_key, init_key, key = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(x_key, (batch, config.context, config.width), config.dtype)
    keys = jax.random.split(init_key, config.layers)

    def init(layer_key: Array) -> Any:
        return Block(config).init(layer_key, x, True)["params"]

    params = jax.vmap(init)(keys) if stacked else tuple(init(layer_key) for layer_key in keys)
    return params, x, key


def _block_shapes(config: GPTConfig, batch: int, stacked: bool) -> tuple[Any, ...]:
    return jax.eval_shape(lambda: _init_block_args(config, batch, stacked, seed=0))
