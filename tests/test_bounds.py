"""What ours must reach, on the compiler: bounds against the baselines, and where barriers are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from versions import CPU_UNDOES_REMATERIALIZATION

import remat
from benchmarks.compiled import Measured, measure, missed
from benchmarks.programs import GROUPS, Row
from models import gpt, mlp
from remat.compiler.compile import CPU_COMPILER_OPTIONS
from remat.lower.encode import pack_bits, unpack_bits
from remat.policies import Names

DEVICE = "h200"
SLOW = ("gpt_scan", "resnet50", "vgg16", "gpt_unrolled")
BARRIER = "optimization_barrier"
SMALL_BLOCKS = {"layers": 3, "batch": 2, "length": 16, "width": 32, "heads": 4, "dropout": 0.1}


def _group_parameters() -> list[object]:
    names = [name for name, group in GROUPS.items() if group.bounds]
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


@functools.cache
def _rows(group: str) -> dict[str, Row]:
    return {row.label: row for row in GROUPS[group].rows()}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", _group_parameters())
def test_bounds_are_met_on_an_absent_gpu(name: str) -> None:
    group = GROUPS[name]
    mentioned = [label for bound in group.bounds for label in (bound.row, bound.baseline) if label]
    rows = _rows(name)
    measured: dict[str, Measured] = {
        label: measure(group, rows[label], DEVICE) for label in dict.fromkeys(mentioned)
    }
    assert [line for bound in group.bounds for line in missed(bound, measured)] == []


@pytest.mark.gpu_compile
def test_masks_of_one_shape_do_not_keep_what_they_are_made_from() -> None:
    """XLA merges kernels that share an operand: packing must not have one."""

    def masks(x: jax.Array, weights: list[jax.Array], key: jax.Array) -> list[jax.Array]:
        found = []
        for layer, weight in enumerate(weights):
            drawn = jax.random.bernoulli(jax.random.fold_in(key, layer), 0.9, x.shape)
            found.append(pack_bits(drawn))
            x = jnp.where(unpack_bits(found[-1], x.shape), x @ weight, 0) @ weight
            found.append(pack_bits(x > 0))
            x = jnp.tanh(x)
        return [*found, x]

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 6
    key = jax.eval_shape(lambda: jax.random.key(0))
    report = remat.compile_report(masks, x, weights, key, device=DEVICE)
    assert report.temp_bytes < 2 * 4 * x.size  # not 6 times what is packed


def test_every_group_of_the_acceptance_list_has_bounds() -> None:
    expected = {"gpt_scan", "resnet50", "vgg16", "gpt_unrolled", "residual_mlp", "gelu"}
    assert {name for name, group in GROUPS.items() if group.bounds} == expected


def _residual_layers() -> tuple[Callable[..., jax.Array], Callable[..., jax.Array], tuple]:
    """16 residual layers whose activations, not parameters, take the memory: plain, and by names."""
    plain, args = mlp.residual_mlp(layers=16, width=32, hidden=64, batch=2048)
    names = mlp.boundary_names(16)
    return plain, remat.checkpoint(plain, remat_policy=Names(names)), args


def test_names_policy_saves_memory_on_cpu_with_our_options() -> None:
    plain, ours, args = _residual_layers()
    none = remat.compile_report(jax.grad(plain), *args, device="cpu")
    kept = remat.compile_report(jax.grad(ours), *args, device="cpu")
    assert kept.compiler_options == dict(CPU_COMPILER_OPTIONS)
    assert kept.temp_bytes < none.temp_bytes / 2
    # Two matmuls of each layer are computed again, once; for the last layer they need not be.
    again = kept.matmuls_executed - none.matmuls_executed
    assert 2 * 15 <= again <= 2 * 16


def test_names_policy_without_our_options_on_cpu_is_only_reported() -> None:
    """Before jax 0.11.1 XLA:CPU may or may not undo it; what is promised is that the report says so."""
    _, ours, args = _residual_layers()
    report = remat.compile_report(jax.grad(ours), *args, device="cpu", keep_barriers=False)
    assert report.compiler_options == {}
    assert any("may undo" in note for note in report.unknown) == CPU_UNDOES_REMATERIALIZATION


def _gradient_jaxpr(function: Callable[..., jax.Array], args: tuple) -> str:
    return str(jax.make_jaxpr(jax.grad(function))(*args))


def test_no_barrier_in_a_loop_body_and_one_per_block_outside() -> None:
    wrap = functools.partial(remat.checkpoint, remat_policy="min_cut")
    scanned = gpt.blocks_scanned(**SMALL_BLOCKS, wrap=wrap)
    unrolled = gpt.blocks_unrolled(**SMALL_BLOCKS, wrap=wrap)
    plain = gpt.blocks_unrolled(**SMALL_BLOCKS)
    assert BARRIER not in _gradient_jaxpr(*scanned)
    assert BARRIER in _gradient_jaxpr(*unrolled)
    assert BARRIER not in _gradient_jaxpr(*plain)


def test_a_loop_body_that_recomputes_has_no_barrier() -> None:
    def loss(wrap: Callable[..., Callable[..., jax.Array]], weights: jax.Array) -> jax.Array:
        layer = wrap(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))
        x = jnp.ones((4, 8))
        return jnp.sum(jax.lax.scan(lambda c, w: (layer(c, w), None), x, weights)[0])

    full = functools.partial(remat.checkpoint, remat_policy="full")
    shape = (jax.ShapeDtypeStruct((3, 8, 8), jnp.float32),)
    text = _gradient_jaxpr(functools.partial(loss, full), shape)
    plain = _gradient_jaxpr(functools.partial(loss, lambda f: f), shape)
    assert BARRIER not in text
    assert text.count("dot_general") > plain.count("dot_general")
