"""Logs for `benchmarks.dtr`: the paper's chain, the public logs and what was published of them, our own models.

Kirisame et al., "Dynamic tensor rematerialization" (2020), sections 5.1 and 5.3.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import remat
from models.cases import CASES, Case
from models.development.vision import DENSENET_BC_100, densenet
from remat.dtr import Log, export_log, load_log
from remat.dtr.log import Call, Event, Release
from remat.policies.buffers.condense import condense
from remat.policies.solvers.dynamic import log_of

__all__ = [
    "MODELS",
    "PUBLISHED",
    "PUBLISHED_STATISTICS",
    "chain",
    "least_repeated",
    "model_log",
    "public_log",
]

PUBLISHED_STATISTICS = {
    "unet": (399, 512, 544, 2532, 8415764640, 435278292, 93386276),
    "resnet32": (509, 696, 763, 3552, 10061179152, 291905487, 35584920),
    "transformer": (3154, 3457, 3912, 13926, 9864405000, 276259118, 263197248),
}
"""Operators, tensors, edges between operators, events, peak bytes, nanoseconds, bytes of constants."""

PUBLISHED: dict[tuple[str, str], tuple[int | str, ...]] = {
    ("unet", "dtr_full"): ("out_of_memory", 69099020, 36817991, 14405888),
    ("unet", "dtr_local"): ("thrashing", 368616510, 39630995, 12127459),
    ("unet", "lru"): ("thrashing", "thrashing", 45342690, 16842511),
    ("unet", "largest"): ("out_of_memory", 286882021, 68966732, 18904551),
    ("resnet32", "dtr_full"): (52031523, 31171049, 13504872, 3835894),
    ("resnet32", "dtr_eqclass"): (52143294, 31171049, 13504872, 3835894),
    ("resnet32", "dtr_local"): ("thrashing", 57367013, 19691788, 3835894),
    ("resnet32", "lru"): ("thrashing", "thrashing", 27787842, 9425626),
    ("transformer", "dtr_full"): (34099986, 16132164, 8669212, 2489902),
    ("transformer", "dtr_eqclass"): (34188515, 16132164, 8669212, 2489902),
    ("transformer", "dtr_local"): (139488268, 30974688, 10305404, 2671637),
}
"""Nanoseconds repeated at 0.3, 0.5, 0.7 and 0.9 of the peak, by the published simulator (eager eviction), which
ends a run that repeats more than the base."""


def chain(layers: int) -> Log:
    """The program of section 5.1: `layers` unit layers, of which the last is the loss, and their gradients."""
    events: list[Event] = []
    count = 0

    def call(*inputs: int) -> int:
        nonlocal count
        events.append(Call("f", inputs, (count,), (1,), (-1,), 1))
        count += 1
        return count - 1

    outputs = [call()]
    for _ in range(layers - 2):
        outputs.append(call(outputs[-1]))
    gradient = call(outputs[-1])
    while len(outputs) > 1:
        events.append(Release(outputs.pop()))
        before, gradient = gradient, call(outputs[-1], gradient)
        events.append(Release(before))
    events.append(Release(outputs.pop()))
    return Log(tuple(events), count, layers - 1)


def least_repeated(layers: int, budget: int) -> int:
    """The fewest repeated operators of the chain (Griewank & Walther 2000): `t(n - 1, B - 2) - (n - 2)`."""
    if budget >= layers:
        return 0
    steps, slots = layers - 1, budget - 2
    rounds = next(r for r in range(1, steps + 1) if math.comb(slots + r, slots) >= steps)
    return rounds * steps - math.comb(slots + rounds, rounds - 1) - (layers - 2)


def public_log(name: str) -> Log | None:
    """A log of the folder `REMAT_DTR_LOGS`, None where it is absent."""
    path = Path(os.environ.get("REMAT_DTR_LOGS", ".")) / f"{name}.log.gz"
    return load_log(path) if path.exists() else None


def _lstm() -> Case:
    """32 steps of width 100 on a batch of 10, unrolled, as in the paper."""
    return _loss_of_states(_lstm_state, shape=(32, 10, 100), children=1)


def _tree_lstm() -> Case:
    """A complete binary tree of depth 6 (Tai et al. 2015), width 100, batch of 32, unrolled, as in the paper."""
    return _loss_of_states(_tree_state, shape=(63, 32, 100), children=2)


State = tuple[jax.Array, jax.Array]


def _loss_of_states(
    state_of: Callable[[Any, jax.Array], State], shape: tuple[int, int, int], children: int
) -> Case:
    width = shape[-1]
    gates = 3 + children  # one to forget per child
    weights = {
        "input": jax.ShapeDtypeStruct((width, gates * width), jnp.float32),
        "states": jax.ShapeDtypeStruct((children * width, gates * width), jnp.float32),
    }

    def loss(params: Any, inputs: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(state_of(params, inputs)[0]))

    return loss, (weights, jax.ShapeDtypeStruct(shape, jnp.float32))


def _lstm_state(params: Any, inputs: jax.Array) -> State:
    zero = jnp.zeros(inputs.shape[1:])
    return functools.reduce(lambda state, x: _cell(params, x, state), inputs, (zero, zero))


def _tree_state(params: Any, inputs: jax.Array, node: int = 0) -> State:
    child = 2 * node + 1
    if child >= inputs.shape[0]:
        zero = jnp.zeros(inputs.shape[1:])
        return _cell(params, inputs[node], (zero, zero), (zero, zero))
    below = (_tree_state(params, inputs, child), _tree_state(params, inputs, child + 1))
    return _cell(params, inputs[node], *below)


def _cell(params: Any, x: jax.Array, *states: State) -> State:
    hidden = jnp.concatenate([h for h, _ in states], axis=-1)
    gates = x @ params["input"] + hidden @ params["states"]
    new, keep, out, *forget = jnp.split(gates, 3 + len(states), axis=-1)
    memory = jax.nn.sigmoid(keep) * jnp.tanh(new)
    for gate, (_, before) in zip(forget, states, strict=True):
        memory = memory + jax.nn.sigmoid(gate) * before
    return jax.nn.sigmoid(out) * jnp.tanh(memory), memory


MODELS: dict[str, Callable[[], Case]] = {
    "resnet50": CASES["resnet50"],
    "densenet": functools.partial(densenet, config=DENSENET_BC_100),
    "unet": CASES["unet"],
    "lstm": _lstm,
    "tree_lstm": _tree_lstm,
}
"""Our own, by name: ResNet-50, DenseNet-BC-100, U-Net; LSTM and TreeLSTM as large as the paper's."""


def model_log(name: str, device: str) -> Log:
    """The log of a model's joint graph with the roofline times of a device.

    `lstm` runs kernel by kernel, as planners see it: what XLA merges is one operator, and only what it writes to
    memory is a tensor; what lies in the caller's memory has no bytes. `lstm operators` runs operator by operator.
    """
    model, _, kind = name.partition(" ")
    function, args = MODELS[model]()
    graph = remat.plan(function, *args, remat_policy="save_all").graph
    if kind == "operators":
        return export_log(graph, device=device)
    return log_of(condense(graph, device=device).problem, "eager")
