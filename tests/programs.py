"""What several test modules share: transforms, sequences, readable schedules, processes of many devices."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.layered import graph_folder, published
from remat.core.graph import Graph
from remat.plans.steps import Schedule
from remat.policies.solvers.problem import Problem

Function = Callable[..., Any]


def described(schedule: Schedule) -> list[str]:
    """The steps of a schedule in words: `compute 3`, `free 1`, `turn`."""
    return [s.action if s.target < 0 else f"{s.action} {s.target}" for s in schedule.steps]


def needed_for(graph: Graph, values: Iterable[int]) -> set[int]:
    """All operators on which the values depend."""
    todo, found = list(values), set()
    while todo:
        producer = graph.values[todo.pop()].producer
        if producer is not None and producer not in found:
            found.add(producer)
            todo += graph.ops[producer].inputs
    return found


def random_sequence(problem: Problem, rng: random.Random, share: float = 0.5) -> list[int]:
    """All nodes in order; after the turn forward nodes run again at random places, some several times."""
    again = [node for node in range(problem.turn) if problem.repeatable[node]]
    sequence = list(range(problem.turn))
    for node in range(problem.turn, len(problem)):
        while again and rng.random() < share:
            sequence.append(rng.choice(again))
        sequence.append(node)
    return sequence


def public_graph(name: str) -> Problem:
    """A published graph (`benchmarks.layered.published`); skips the test where there are none."""
    folder = graph_folder()
    if folder is None or not (folder / f"{name}.json").exists():
        pytest.skip(f"REMAT_GRAPHS names no folder with the public graph {name}")
    return published(name)


def run_on_devices(program: str, devices: int) -> str:
    """Runs a program on so many CPU devices, in a process of its own; returns what it prints."""
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# --- transforms of a loss `f(x, w, key)` --------------------------------------------------------------


def _vmap_of_grad(f: Function) -> Function:
    return lambda x, w, key: jax.vmap(jax.grad(f, (0, 1)), (0, None, 0))(
        jnp.stack([x, 2 * x]), w, jax.random.split(key, 2)
    )


def _grad_of_vmap(f: Function) -> Function:
    def total(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 2)
        return jax.vmap(f, (0, None, 0))(jnp.stack([x, 2 * x]), w, keys).sum()

    return jax.grad(total, (0, 1))


def _grad_of_grad(f: Function) -> Function:
    def total(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(f, (0, 1))(x, w, key)[0] ** 2)

    return lambda x, w, key: jax.grad(total)(w, x, key)


def _inside_scan(f: Function) -> Function:
    def total(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        def body(c: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            loss = f(c, w, k)
            return c * 0.5 + loss, loss

        c, losses = jax.lax.scan(body, x, jax.random.split(key, 3))
        return c.sum() + losses.sum()

    return jax.grad(total, (0, 1))


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vmap of grad": _vmap_of_grad,
    "grad of vmap": _grad_of_vmap,
    "grad of grad": _grad_of_grad,
    "inside scan": _inside_scan,
}
