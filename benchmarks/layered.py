"""Graphs to plan: random layered graphs, training-shaped graphs, chains, and published graphs if present.

`layered` follows the synthetic graphs of Gagrani et al. 2022 ("Neural Topological Ordering for Computation
Graphs", appendix A), with which Moccasin (Bartan et al. 2023) and FastSA (Imanishi et al. 2024) are measured:
nodes n, width w, level variance nlv, edge density ed, skip density scd. What the appendix leaves open is taken
from the graphs that Moccasin's authors published (n100_w0.27, n250_w0.43, n500_w0.36, n1000_w0.31, all
nlv0.75_ed0.2_scd0.14): between layers of a and b nodes there are exactly
`ceil(max(a, b) + ed * (a * b - max(a, b)))` edges, between relative positions that differ by at most about 0.2;
the mixture of sizes is fitted to their quantiles. It is not their generator: graphs of the same parameters are
alike, not equal.

Every function is deterministic: the random ones by `seed`, over Python's own generator.

Published graphs are read from the folder that the environment variable `REMAT_GRAPHS` names, and are not part
of the project.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from pathlib import Path

from remat.policies.solvers.problem import Problem

__all__ = ["LAYERED_PUBLISHED", "chain", "graph_folder", "layered", "published", "training"]

#: Width of the published layered graphs by their number of nodes.
LAYERED_PUBLISHED = {100: 0.27, 250: 0.43, 500: 0.36, 1000: 0.31}

_REACH = 0.2  # how far apart, relative to the width, linked nodes stand
# Weights, means and deviations of the sizes, in thousands of bytes.
_SIZES = ((0.3, 0.5, 0.5), (0.3, 1.0, 0.7), (0.3, 3.0, 1.0), (0.1, 5.0, 1.0))


def layered(
    nodes: int,
    width: float,
    *,
    seed: int = 0,
    level_variance: float = 0.75,
    edge_density: float = 0.2,
    skip_density: float = 0.14,
) -> Problem:
    """Makes a random layered graph in a random topological order; every node may be repeated.

    Layers hold between `(1 - level_variance)` and `(1 + level_variance)` times the mean, of which there are
    about `sqrt(nodes * (1 / width - 1))`, between one source and one target that cost nothing. Costs are uniform
    from 0 to 999, sizes a mixture of four normal distributions around 2,000 bytes.

    Raises:
        ValueError: fewer than 4 nodes, or `width` not between 0 and 1.
    """
    if nodes < 4 or not 0 < width < 1:
        raise ValueError(f"layered({nodes}, {width}): expected at least 4 nodes and 0 < width < 1")
    rng = random.Random(seed)
    layers = _layers(rng, nodes, width, level_variance)
    edges: set[tuple[int, int]] = set()
    for upper, lower in itertools.pairwise(layers):
        edges |= _between(rng, upper, lower, edge_density)
    inner = layers[1:-1]
    if len(inner) > 2:
        adjacent = sum(u in layers[0] or w in layers[-1] for u, w in edges)
        wanted = math.ceil((len(edges) - adjacent) * skip_density / (1 - skip_density))
        for _ in range(wanted):
            first = rng.randrange(len(inner) - 2)
            second = rng.randrange(first + 2, len(inner))
            edges.add(_link(rng, inner[first], inner[second]))
    costs = [rng.randrange(1000) for _ in range(nodes)]
    costs[0] = costs[nodes - 1] = 0
    sizes = [_size(rng) for _ in range(nodes)]
    return _ordered(rng, costs, sizes, edges)


def training(
    layers: int, width: int, *, seed: int = 0, skips: float = 0.15, heavy: int = 10
) -> Problem:
    """Makes a training step: a layered forward pass, mirrored by a backward pass that reads its values.

    Forward node `i` of a layer reads one to three of the layer before, sometimes one further back; the backward
    node of `i` reads the gradients of those that read `i`, the forward values that `i` reads, and often `i` itself.
    One node in four is costly. Only forward nodes may be repeated, in the backward pass.

    Args:
        layers: of the forward pass, at least 2; the graph has `2 * layers * width` nodes.
        width: nodes in a layer.
        seed: of the random numbers.
        skips: chance that a node also reads one of up to `8` layers back.
        heavy: how much more a costly node costs.
    """
    if layers < 2 or width < 1:
        raise ValueError(f"training({layers}, {width}): expected at least 2 layers of 1 node")
    rng = random.Random(seed)
    forward = layers * width
    inputs: list[list[int]] = []
    readers: list[list[int]] = [[] for _ in range(forward)]
    for node in range(forward):
        layer = node // width
        reads: set[int] = set()
        if layer:
            before = range((layer - 1) * width, layer * width)
            reads |= set(rng.sample(before, min(width, rng.randint(1, 3))))
            if layer > 1 and rng.random() < skips:
                reads.add(rng.randrange(max(0, layer - 8) * width, (layer - 1) * width))
        for read in reads:
            readers[read].append(node)
        inputs.append(sorted(reads))
    costs = [rng.randint(1, 100) * (heavy if rng.random() < 0.25 else 1) for _ in range(forward)]
    sizes = [rng.randint(1, 16) * 65536 for _ in range(forward)]
    gradient = {node: 2 * forward - 1 - node for node in range(forward)}
    for node in reversed(range(forward)):
        reads = {gradient[reader] for reader in readers[node]} | set(inputs[node])
        if not readers[node] or rng.random() < 0.5:
            reads.add(node)
        inputs.append(sorted(reads))
        costs.append(2 * costs[node])
        sizes.append(sizes[node])
    return Problem.of(
        costs, sizes, inputs, repeatable=[i < forward for i in range(2 * forward)], turn=forward
    )


def chain(steps: int, *, releases_outputs: bool = False) -> Problem:
    """Makes a unit chain whose optimum is known (Griewank & Walther 2000).

    With `2 * steps + 1` nodes, forward `i` feeds `i + 1`, and backward node `2 * steps - i`. Every node
    costs 1 and is of size 1. At a budget of B the least extra cost is `t(steps + 1, B - 2) - steps`. With
    `releases_outputs` it is the program of the DTR paper, of `2 * steps` nodes, the backward nodes starting
    without the last forward one: `t(steps - 1, B - 2) - (steps - 2)`.
    """
    if steps < 1:
        raise ValueError(f"chain({steps}): expected at least one step")
    if releases_outputs:
        # Forward 0 .. n-1; backward step for n-1 down to 0 reads the forward value before its own.
        inputs = [[i - 1] if i else [] for i in range(steps)]
        for i in reversed(range(steps)):
            reads = {len(inputs) - 1} if i < steps - 1 else set()
            if i:
                reads.add(i - 1)
            inputs.append(sorted(reads))
        count = 2 * steps
        return Problem.of(
            [1] * count,
            [1] * count,
            inputs,
            repeatable=[i < steps for i in range(count)],
            turn=steps,
        )
    count = 2 * steps + 1
    inputs = []
    for node in range(count):
        reads = {node - 1} if node else set()
        if node > steps:
            reads.add(2 * steps - node)
        inputs.append(sorted(reads))
    return Problem.of(
        [1] * count,
        [1] * count,
        inputs,
        repeatable=[i <= steps for i in range(count)],
        turn=steps + 1,
    )


def graph_folder() -> Path | None:
    """Returns the folder of published graphs, None if `REMAT_GRAPHS` is unset."""
    named = os.environ.get("REMAT_GRAPHS")
    return Path(named) if named else None


def published(name: str) -> Problem:
    """Reads a published graph, for instance `resnet50` or `random_layered_1000`.

    Training graphs (`cost_cpu`, `cost_ram`, `backward`) repeat only forward nodes, from the first backward node
    on; layered graphs (`duration`, `out_cost`) come in the order they give, and every node may be repeated.

    Raises:
        FileNotFoundError: `REMAT_GRAPHS` is unset or has no such file.
    """
    folder = graph_folder()
    if folder is None:
        raise FileNotFoundError("REMAT_GRAPHS is unset: set it to a folder of published graphs")
    data = json.loads((folder / f"{name}.json").read_text())
    nodes = data["nodes"]
    edges = [
        (int(e.get("source", e.get("0"))), int(e.get("target", e.get("1")))) for e in data["links"]
    ]
    layered_graph = "duration" in nodes[0]
    order = data["graph"]["order"] if layered_graph else list(range(len(nodes)))
    place = {node: index for index, node in enumerate(order)}
    inputs: list[list[int]] = [[] for _ in nodes]
    for tail, head in edges:
        inputs[place[head]].append(place[tail])
    rows = [nodes[node] for node in order]
    inputs = [sorted(row) for row in inputs]
    if layered_graph:
        return Problem.of([r["duration"] for r in rows], [r["out_cost"] for r in rows], inputs)
    backward = [bool(r["backward"]) for r in rows]
    return Problem.of(
        [r["cost_cpu"] for r in rows],
        [r["cost_ram"] for r in rows],
        inputs,
        repeatable=[not b for b in backward],
        turn=backward.index(True) if any(backward) else 0,
    )


def _layers(rng: random.Random, nodes: int, width: float, level_variance: float) -> list[list[int]]:
    """Layers of node numbers, the first and the last of one node."""
    depth = max(1, math.ceil(math.sqrt(nodes * (1 / width - 1))))
    mean = nodes / depth
    low = max(1, math.ceil(mean * (1 - level_variance)))
    high = max(low, math.floor(mean * (1 + level_variance)))
    layers = [[0]]
    used = 1
    while used < nodes - 1:
        size = min(rng.randint(low, high), nodes - 1 - used)
        layers.append(list(range(used, used + size)))
        used += size
    return [*layers, [nodes - 1]]


def _between(
    rng: random.Random, upper: list[int], lower: list[int], density: float
) -> set[tuple[int, int]]:
    """Edges between neighbouring layers: every node has one, and a share of the rest."""
    most = max(len(upper), len(lower))
    wanted = math.ceil(most + density * (len(upper) * len(lower) - most))
    edges = {(upper[i * len(upper) // most], lower[i * len(lower) // most]) for i in range(most)}
    while len(edges) < wanted:
        edges.add(_link(rng, upper, lower))
    return edges


def _link(rng: random.Random, upper: list[int], lower: list[int]) -> tuple[int, int]:
    """An edge between two layers, at about the same place within them."""
    start = rng.random()
    # Now and then anywhere, so that small layers can be linked as densely as asked.
    reach = _REACH if rng.random() < 0.95 else 1.0
    end = min(max(start + rng.uniform(-reach, reach), 0.0), 0.999)
    return upper[int(start * len(upper))], lower[int(end * len(lower))]


def _size(rng: random.Random) -> int:
    weights = [weight for weight, _, _ in _SIZES]
    _, mean, deviation = rng.choices(_SIZES, weights)[0]
    return max(10, 10 * round(abs(rng.gauss(mean, deviation)) * 100))


def _ordered(
    rng: random.Random, costs: list[int], sizes: list[int], edges: set[tuple[int, int]]
) -> Problem:
    """The graph in a random topological order: each time any of the nodes that can run."""
    count = len(costs)
    readers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for tail, head in sorted(edges):
        readers[tail].append(head)
        missing[head] += 1
    ready = [node for node in range(count) if not missing[node]]
    order: list[int] = []
    while ready:
        at = rng.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        node = ready.pop()
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    place = {node: index for index, node in enumerate(order)}
    inputs: list[list[int]] = [[] for _ in range(count)]
    for tail, head in edges:
        inputs[place[head]].append(place[tail])
    return Problem.of(
        [costs[node] for node in order],
        [sizes[node] for node in order],
        [sorted(row) for row in inputs],
    )
