"""Two simulations and a graph network: stencils, pairs of bodies, gathers and segment sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.development.layers import (
    Array,
    Case,
    Params,
    layer_norm,
    mean_square,
    mlp,
    mlp_shapes,
    norm_shapes,
    shape,
)

# --- reaction-diffusion


def stencil(small: bool = False) -> Case:
    """60 unrolled steps of Gray-Scott's reaction and diffusion on a grid of 1024 x 1024, float32.

    Element-wise but for `jnp.roll`: periodic differences of neighbours. Pearson 1993.

    `loss(params, targets)`: the mean squared error of the last `v`, `[rows, columns]`, where `params`
    has the initial fields and what is added to the rates of the model.
    """
    size, steps = (12, 5) if small else (1024, 60)
    grid = shape(size, size)
    rates = {name: shape() for name in ("diffuse_u", "diffuse_v", "feed", "kill")}

    def loss(params: Params, targets: Array) -> Array:
        u, v, rates = 0.5 + params["u"], 0.25 + params["v"], params["rates"]
        for _ in range(steps):
            reaction = u * v * v
            fed = (0.04 + rates["feed"]) * (1 - u)
            killed = (0.1 + rates["feed"] + rates["kill"]) * v
            change_u = (0.16 + rates["diffuse_u"]) * _laplacian(u) - reaction + fed
            change_v = (0.08 + rates["diffuse_v"]) * _laplacian(v) + reaction - killed
            u, v = u + change_u, v + change_v
        return mean_square(v, targets)

    return loss, ({"u": grid, "v": grid, "rates": rates}, grid)


def _laplacian(field: Array) -> Array:
    """The sum of the four neighbours on a torus, less four times the field."""
    rows = jnp.roll(field, 1, axis=0) + jnp.roll(field, -1, axis=0)
    columns = jnp.roll(field, 1, axis=1) + jnp.roll(field, -1, axis=1)
    return rows + columns - 4 * field


# --- bodies


def bodies(small: bool = False) -> Case:
    """6 steps of 1024 bodies that attract each other, every pair computed, float32.

    `loss(positions, velocities, masses, targets)`: the mean squared error of the last positions `[N, 3]`.
    """
    count, steps = (6, 2) if small else (1024, 6)
    places = shape(count, 3)

    def loss(positions: Array, velocities: Array, masses: Array, targets: Array) -> Array:
        for _ in range(steps):
            velocities = velocities + 0.005 * _attraction(positions, masses)
            positions = positions + 0.01 * velocities
            velocities = velocities + 0.005 * _attraction(positions, masses)
        return mean_square(positions, targets)

    return loss, (places, places, shape(count), places)


def _attraction(positions: Array, masses: Array) -> Array:
    apart = positions[:, None] - positions[None]
    squares = jnp.sum(apart * apart, axis=-1) + 0.01
    return -jnp.sum(apart * (masses[None] * squares**-1.5)[..., None], axis=1)


# --- message passing


def message_passing(small: bool = False) -> Case:
    """6 rounds of messages (Gilmer et al. 2017) on 16 384 nodes and 131 072 edges, width 64, float32.

    A round gathers both ends of every edge, makes a message by an MLP, and sums messages by receiver.

    `loss(params, nodes, edges, senders, receivers, targets)`: the mean squared error at the nodes, of
    nodes `[N, 16]`, edges `[E, 8]`, their ends `int[E]` and targets `[N, 16]`.
    """
    rounds, count, links, width = (2, 8, 24, 8) if small else (6, 16_384, 131_072, 64)
    layer = {
        "message": mlp_shapes(3 * width, width, width),
        "update": mlp_shapes(2 * width, width, width),
        "norm": norm_shapes(width),
    }
    params = {
        "nodes": mlp_shapes(16, width),
        "edges": mlp_shapes(8, width),
        "rounds": [layer for _ in range(rounds)],
        "out": mlp_shapes(width, width, 16),
    }
    nodes, edges = shape(count, 16), shape(links, 8)
    ends = shape(links, dtype=jnp.int32)

    def loss(
        params: Params,
        nodes: Array,
        edges: Array,
        senders: Array,
        receivers: Array,
        targets: Array,
    ) -> Array:
        x = mlp(params["nodes"], nodes, jax.nn.silu)
        link = mlp(params["edges"], edges, jax.nn.silu)
        for layer in params["rounds"]:
            y = layer_norm(layer["norm"], x)
            joined = jnp.concatenate([y[senders], y[receivers], link], axis=-1)
            message = jax.nn.silu(mlp(layer["message"], joined, jax.nn.silu))
            gathered = jax.ops.segment_sum(message, receivers, num_segments=count)
            x = x + mlp(layer["update"], jnp.concatenate([y, gathered], axis=-1), jax.nn.silu)
        return mean_square(mlp(params["out"], x, jax.nn.silu), targets)

    return loss, (params, nodes, edges, ends, ends, nodes)
