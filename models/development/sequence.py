"""Networks over time: dilated convolutions, recurrences, and an ordinary differential equation.

Shapes: `B` batch, `T` length, `D` width, `F` hidden width, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.development.layers import (
    Array,
    Case,
    Params,
    cross_entropy,
    mean_square,
    mlp,
    mlp_shapes,
    shape,
)

# --- WaveNet


def wavenet(small: bool = False) -> Case:
    """20 dilated causal convolutions with gates (van den Oord et al. 2016), batch 8 x 8192, width 64.

    `loss(params, audio, targets)`: the mean cross entropy of the quantized next samples `int[B, T]`
    after `float[B, T, 1]`.
    """
    batch, length, width, levels = (2, 24, 8, 16) if small else (8, 8192, 64, 256)
    dilations = (1, 2, 4) if small else tuple(2**power for power in range(10)) * 2
    layer = {
        "conv": shape(2, width, 2 * width),
        "bias": shape(2 * width),
        "residual": mlp_shapes(width, width),
        "skip": mlp_shapes(width, width),
    }
    last = {"conv": layer["conv"], "bias": layer["bias"], "skip": layer["skip"]}
    params = {
        "first": mlp_shapes(1, width),
        "layers": [layer for _ in dilations[1:]] + [last],
        "head": mlp_shapes(width, width, levels),
    }
    audio, targets = shape(batch, length, 1), shape(batch, length, dtype=jnp.int32)

    def loss(params: Params, audio: Array, targets: Array) -> Array:
        x = mlp(params["first"], audio, jax.nn.relu)
        skips = jnp.zeros_like(x)
        for layer, dilation in zip(params["layers"], dilations, strict=True):
            both = _causal_conv(layer["conv"], x, dilation) + layer["bias"]
            filtered, gate = jnp.split(both, 2, axis=-1)
            gated = jnp.tanh(filtered) * jax.nn.sigmoid(gate)
            skips = skips + mlp(layer["skip"], gated, jax.nn.relu)
            if "residual" in layer:
                x = x + mlp(layer["residual"], gated, jax.nn.relu)
        return cross_entropy(mlp(params["head"], jax.nn.relu(skips), jax.nn.relu), targets)

    return loss, (params, audio, targets)


def _causal_conv(kernel: Array, x: Array, dilation: int) -> Array:
    """A convolution over time, of `[B, T, D]` and a kernel `[taps, D, F]`, that sees no future."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,),
        padding=[((kernel.shape[0] - 1) * dilation, 0)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


# --- recurrences


def lstm_unrolled(small: bool = False) -> Case:
    """Flax's LSTM cell in a Python loop of 96 steps, batch 64, width 512, float32.

    The cell concatenates the kernels of its gates to one for the input and one for the state. As the
    backward pass makes their gradients at every step and sums them at last, those take more memory
    than all activations.

    `loss(params, tokens, targets)`: the mean cross entropy of `int[B, T]`.
    """
    batch, length, width, vocab_size = (2, 6, 8, 16) if small else (64, 96, 512, 2048)
    cell = nn.OptimizedLSTMCell(width)

    def init() -> Any:
        x = jnp.zeros((batch, width))
        return cell.init(jax.random.key(0), (x, x), x)["params"]

    params = {
        "embedding": shape(vocab_size, width),
        "cell": jax.eval_shape(init),
        "head": shape(width, vocab_size),
    }
    tokens = shape(batch, length, dtype=jnp.int32)

    def loss(params: Params, tokens: Array, targets: Array) -> Array:
        inputs = params["embedding"][tokens]
        carry: Any = (jnp.zeros((batch, width)), jnp.zeros((batch, width)))
        outputs: list[Any] = []
        for step in range(length):
            carry, out = cell.apply({"params": params["cell"]}, carry, inputs[:, step])
            outputs.append(out)
        return cross_entropy(jnp.stack(outputs, axis=1) @ params["head"], targets)

    return loss, (params, tokens, tokens)


def gru_scan(small: bool = False) -> Case:
    """A GRU (Cho et al. 2014) under `lax.scan`, batch 128 x 256, width 512, float32.

    `loss(params, tokens, targets)`: the mean cross entropy of `int[B, T]`.
    """
    batch, length, width, vocab_size = (2, 6, 8, 16) if small else (128, 256, 512, 2048)
    params = {
        "embedding": shape(vocab_size, width),
        "input": shape(width, 3 * width),
        "gates": shape(width, 2 * width),
        "candidate": shape(width, width),
        "bias": shape(3 * width),
        "head": shape(width, vocab_size),
    }
    tokens = shape(batch, length, dtype=jnp.int32)

    def loss(params: Params, tokens: Array, targets: Array) -> Array:
        def step(state: Array, token: Array) -> tuple[Array, Array]:
            given = params["embedding"][token] @ params["input"] + params["bias"]
            gates = jax.nn.sigmoid(given[:, : 2 * width] + state @ params["gates"])
            reset, update = jnp.split(gates, 2, axis=-1)
            candidate = jnp.tanh(given[:, 2 * width :] + (reset * state) @ params["candidate"])
            state = update * state + (1 - update) * candidate
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros((batch, width)), tokens.T)
        return cross_entropy(states @ params["head"], targets.T)

    return loss, (params, tokens, tokens)


# --- a neural ODE


def ode_scan(small: bool = False) -> Case:
    """32 steps of Runge-Kutta under `lax.scan`, its vector field an MLP (Chen et al. 2018), float32.

    Batch 2048, width 64, two hidden layers of 256. Each step makes 4 evaluations of the field.

    `loss(params, x, targets)`: the mean squared error of `[B, D]` at time 1.
    """
    steps, batch, width, hidden = (4, 4, 4, 8) if small else (32, 2048, 64, 256)
    params = {
        "field": mlp_shapes(width + 1, hidden, hidden, width),
        "head": mlp_shapes(width, width),
    }
    x = shape(batch, width)
    size = 1.0 / steps

    def loss(params: Params, x: Array, targets: Array) -> Array:
        def field(time: Array, x: Array) -> Array:
            with_time = jnp.concatenate([x, jnp.broadcast_to(time, (x.shape[0], 1))], axis=-1)
            return mlp(params["field"], with_time, jnp.tanh)

        def step(x: Array, time: Array) -> tuple[Array, None]:
            first = field(time, x)
            second = field(time + size / 2, x + size / 2 * first)
            third = field(time + size / 2, x + size / 2 * second)
            fourth = field(time + size, x + size * third)
            return x + size / 6 * (first + 2 * second + 2 * third + fourth), None

        out, _ = jax.lax.scan(step, x, jnp.arange(steps) * size)
        return mean_square(mlp(params["head"], out, jnp.tanh), targets)

    return loss, (params, x, x)
