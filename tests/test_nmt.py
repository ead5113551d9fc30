"""The translation model: its two ways through time, and what policies make of it."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from models import cases, gpt, nmt
from remat.policies import MinCut

MICRO = nmt.NMTConfig(source_vocab=11, target_vocab=13, layers=2, hidden=6, dropout=0.3)
SCANNED = dataclasses.replace(MICRO, scan=True)
BATCH, SOURCE, TARGET = 3, 3, 2

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


def micro(config: nmt.NMTConfig, wrap: Any = None) -> tuple[Any, tuple[Any, ...]]:
    loss, shapes = nmt.nmt_loss(config, BATCH, SOURCE, TARGET, wrap)
    return loss, cases.materialize(shapes)


def value_and_grad(loss: Any, *arguments: Any) -> Any:
    return jit(jax.value_and_grad(loss))(*arguments)


@functools.cache
def result(config: nmt.NMTConfig) -> Any:
    """Value and gradient, compiled once for all tests."""
    loss, arguments = micro(config)
    return value_and_grad(loss, *arguments)


def same_bits(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype for x, y in leaves
    )


def assert_trees_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


# --- the model


@pytest.mark.sample(1)
@pytest.mark.parametrize("config", [MICRO, SCANNED], ids=["unrolled", "scanned"])
def test_loss_and_gradient_are_finite_and_no_parameter_is_idle(config: nmt.NMTConfig) -> None:
    value, grads = result(config)
    assert value.shape == () and value.dtype == jnp.float32
    assert abs(float(value) - np.log(config.target_vocab)) < 0.1
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert jnp.any(leaf != 0), jax.tree_util.keystr(path)


@pytest.mark.slow
def test_scanned_and_unrolled_agree_with_dropout_on() -> None:
    unrolled, arguments = micro(MICRO)
    scanned, shapes = nmt.nmt_loss(SCANNED, BATCH, SOURCE, TARGET)
    assert jax.eval_shape(lambda: arguments) == shapes
    assert_trees_close(result(SCANNED), result(MICRO), 1e-6)
    programs = [str(jax.make_jaxpr(loss)(*arguments)) for loss in (unrolled, scanned)]
    assert ["scan[" in program for program in programs] == [False, True]


def test_parameter_count() -> None:
    """Two embeddings, an encoder cell, a decoder cell that reads the attention state too, four products, a head."""
    config = nmt.NMT_FULL
    params = jax.eval_shape(lambda: nmt.init_params(config))
    h, v = config.hidden, config.target_vocab
    encoder = 4 * h * (2 * h + 1)
    decoder = 4 * h * (3 * h + 1)
    attention = h * (h + 1) + h * h + h + 2 * h * h
    want = (config.source_vocab + v) * h + encoder + decoder + attention + v * (h + 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == want


@pytest.mark.sample(1)
@pytest.mark.parametrize("scan", [False, True])
def test_wrapped_attention_keeps_value_and_gradient(scan: bool) -> None:
    config = dataclasses.replace(MICRO, layers=1, scan=scan)
    plain, arguments = micro(config)
    wrapped, _ = micro(config, functools.partial(nn.remat, prevent_cse=not scan))
    program = str(jax.make_jaxpr(wrapped)(*arguments))
    assert len(re.findall(r" = (?:checkpoint|remat\d?)\[", program)) == (1 if scan else TARGET)
    assert_trees_close(value_and_grad(wrapped, *arguments), value_and_grad(plain, *arguments))


# --- with remat


@pytest.mark.slow
@pytest.mark.parametrize("config", [MICRO, SCANNED], ids=["unrolled", "scanned"])
def test_gradients_of_min_cut_are_bit_equal_with_dropout_on(config: nmt.NMTConfig) -> None:
    """Operators run one by one, as in `test_exact.py`: equal operators give equal bits."""
    loss, arguments = micro(dataclasses.replace(config, layers=1))
    ours = remat.checkpoint(loss, remat_policy="min_cut")
    with jax.disable_jit():
        want = jax.value_and_grad(loss)(*arguments)
        assert same_bits(jax.value_and_grad(ours)(*arguments), want)


def test_what_echo_recomputes_is_there_to_be_recomputed() -> None:
    """The `[B, S, H]` of every step, made of a `[B, H]` and of keys that all steps share (figure 8)."""
    batch, source, target, hidden = 8, 10, 5, 16
    config = nmt.NMTConfig(source_vocab=11, target_vocab=13, hidden=hidden)
    loss, shapes = nmt.nmt_loss(config, batch, source, target)

    def compared(policy: Any) -> list[int]:
        saved = remat.plan(loss, *shapes, remat_policy=policy).saved
        return [e.nbytes for e in saved if e.op == "tanh" and e.label == "f32[8,10,16]"]

    assert compared("save_all") == [4 * batch * source * hidden] * target
    assert compared(MinCut(memory_weight=3)) == []


# --- the Transformer with ReLU

BLOCKS: dict[str, Any] = {"layers": 2, "batch": 2, "length": 8, "width": 16, "heads": 2}


@pytest.mark.slow
def test_relu_blocks_are_bit_equal_under_min_cut_with_dropout_on() -> None:
    one = {**BLOCKS, "layers": 1}
    loss, shapes = gpt.blocks_unrolled(**one, dropout=0.1, activation="relu")
    arguments = cases.materialize(shapes)
    ours = remat.checkpoint(loss, remat_policy="min_cut")
    with jax.disable_jit():
        want = jax.value_and_grad(loss)(*arguments)
        assert jnp.isfinite(want[0])
        assert same_bits(jax.value_and_grad(ours)(*arguments), want)
