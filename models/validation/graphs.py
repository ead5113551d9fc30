"""A graph attention network (Velickovic et al. 2018) on an edge list, in plain jax.

Shapes: `N` nodes, `E` edges with the self-loops, `H` heads, `F` features of a head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from models.validation.shapes import Array, Case, floats, integers


def segment_softmax(scores: Array, segments: Array, num_segments: int) -> Array:
    """The softmax of `scores[E, H]` among the edges with the same entry in `segments[E]`."""
    highest = jax.ops.segment_max(scores, segments, num_segments)
    scores = jnp.exp(scores - jax.lax.stop_gradient(highest)[segments])
    total = jax.ops.segment_sum(scores, segments, num_segments)
    return scores / total[segments]


def attention_layer(params: dict[str, Array], x: Array, senders: Array, receivers: Array) -> Array:
    """Maps the node features `[N, D]` to `[N, H, F]`."""
    nodes = x.shape[0]
    h = jnp.einsum("nd,dhf->nhf", x, params["kernel"])
    from_sender = (h * params["sender"]).sum(-1)
    from_receiver = (h * params["receiver"]).sum(-1)
    scores = jax.nn.leaky_relu(from_sender[senders] + from_receiver[receivers], 0.2)
    weights = segment_softmax(scores, receivers, nodes)
    messages = weights[..., None] * h[senders]
    return jax.ops.segment_sum(messages, receivers, nodes) + params["bias"]


def gat_logits(params: list[dict[str, Array]], x: Array, senders: Array, receivers: Array) -> Array:
    """The logits `[N, F]` of the classes: hidden layers join their heads, the last averages them.

    Every layer has a linear skip connection, as the inductive networks of the paper.
    """
    loops = jnp.arange(x.shape[0], dtype=senders.dtype)
    senders = jnp.concatenate([senders, loops])
    receivers = jnp.concatenate([receivers, loops])
    for layer in params[:-1]:
        attended = attention_layer(layer, x, senders, receivers).reshape(x.shape[0], -1)
        x = jax.nn.elu(attended + x @ layer["skip"])
    last = params[-1]
    return attention_layer(last, x, senders, receivers).mean(axis=1) + x @ last["skip"]


def graph_attention(small: bool = False) -> Case:
    """4 layers of 8 heads, 20 000 nodes with 128 features, 200 000 edges, 40 classes, float32.

    Returns:
        `(loss, (params, features, senders, receivers, labels))`.
    """
    if small:
        nodes, edges, width, classes, heads, features, layers = 24, 60, 8, 9, 2, 4, 2
    else:
        nodes, edges, width, classes, heads, features, layers = 20_000, 200_000, 128, 40, 8, 32, 4

    def loss(params: Any, x: Array, senders: Array, receivers: Array, labels: Array) -> Array:
        logits = gat_logits(params, x, senders, receivers)
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, labels[:, None], axis=-1).mean()

    params = []
    for layer in range(layers):
        inputs = heads * features if layer else width
        outputs = features if layer < layers - 1 else classes
        params.append(
            {
                "kernel": floats(inputs, heads, outputs),
                "sender": floats(heads, outputs),
                "receiver": floats(heads, outputs),
                "bias": floats(heads, outputs),
                "skip": floats(inputs, outputs * (heads if layer < layers - 1 else 1)),
            }
        )
    args = (floats(nodes, width), integers(edges), integers(edges), integers(nodes))
    return loss, (params, *args)
