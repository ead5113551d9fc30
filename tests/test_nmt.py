"""The translation model: its equations, its two ways through time, and that it learns to copy."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import remat
from models import cases, gpt, nmt, text
from remat.policies import MinCut

MICRO = nmt.NMTConfig(source_vocab=11, target_vocab=13, layers=2, hidden=6, dropout=0.3)
SCANNED = dataclasses.replace(MICRO, scan=True)
BATCH, SOURCE, TARGET = 3, 3, 2

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


def micro(config: nmt.NMTConfig, wrap: Any = None) -> tuple[Any, tuple[Any, ...]]:
    loss, shapes = nmt.nmt_loss(config, BATCH, SOURCE, TARGET, wrap)
    return loss, cases.materialize(shapes)


def spread(config: nmt.NMTConfig) -> Any:
    """Parameters so large that every one shows in a float32 result."""
    shapes = jax.eval_shape(lambda: nmt.init_params(config))
    return jax.tree.map(lambda leaf: 20 * leaf, cases.materialize(shapes))


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


@pytest.mark.parametrize("config", [MICRO, SCANNED], ids=["unrolled", "scanned"])
def test_loss_and_gradient_are_finite_and_no_parameter_is_idle(config: nmt.NMTConfig) -> None:
    value, grads = result(config)
    assert value.shape == () and value.dtype == jnp.float32
    assert abs(float(value) - np.log(config.target_vocab)) < 0.1
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert jnp.any(leaf != 0), jax.tree_util.keystr(path)


def test_scanned_and_unrolled_agree_with_dropout_on() -> None:
    unrolled, arguments = micro(MICRO)
    scanned, shapes = nmt.nmt_loss(SCANNED, BATCH, SOURCE, TARGET)
    assert jax.eval_shape(lambda: arguments) == shapes
    assert_trees_close(result(SCANNED), result(MICRO), 1e-6)
    programs = [str(jax.make_jaxpr(loss)(*arguments)) for loss in (unrolled, scanned)]
    assert ["scan[" in program for program in programs] == [False, True]


@pytest.mark.parametrize("config", [MICRO, SCANNED], ids=["unrolled", "scanned"])
def test_dropout_is_a_function_of_the_key(config: nmt.NMTConfig) -> None:
    loss, (params, source, targets, _) = micro(config)
    run = functools.partial(jit(loss), params, source, targets)
    assert run(jax.random.key(1)) == run(jax.random.key(1))
    assert run(jax.random.key(1)) != run(jax.random.key(2))
    assert run(jax.random.key(1)) != run(None)


def test_steps_draw_different_dropout_masks() -> None:
    config = dataclasses.replace(MICRO, dropout=0.5, hidden=64)
    params = spread(config)
    step = nmt.DecoderStep(config)
    attended = jnp.zeros((BATCH, config.hidden))
    carry = (((attended, attended),) * config.layers, attended)
    states = jnp.ones((BATCH, SOURCE, config.hidden))
    x = jnp.ones((BATCH, config.hidden))
    keys = jax.random.split(jax.random.key(0), (2, config.layers))
    first, second = (
        step.apply({"params": params["decoder"]}, carry, x, keys[i], (states, states))[1]  # pyright: ignore[reportIndexIssue]
        for i in range(2)
    )
    share = float(jnp.mean(first == 0))
    assert 0.3 < share < 0.7
    assert bool(jnp.any((first == 0) != (second == 0)))


def test_logits_depend_on_earlier_targets_and_on_the_whole_source() -> None:
    config = dataclasses.replace(SCANNED, dropout=0.0)
    params = spread(config)
    source = jnp.arange(BATCH * 5).reshape(BATCH, 5) % config.source_vocab
    targets = jnp.arange(BATCH * 6).reshape(BATCH, 6) % config.target_vocab
    run: Any = jit(lambda s, t: nmt.NMT(config).apply({"params": params}, s, t, True))
    logits = run(source, targets)
    assert logits.shape == (BATCH, 6, config.target_vocab)
    later = jnp.abs(logits - run(source, targets.at[:, 3].add(1) % config.target_vocab))
    assert float(jnp.max(later[:, :4])) == 0.0
    assert float(jnp.min(jnp.max(later[:, 4:], axis=-1))) > 0.0
    for position in (0, 4):
        other = run(source.at[:, position].add(1) % config.source_vocab, targets)
        assert float(jnp.min(jnp.max(jnp.abs(logits - other), axis=-1))) > 0.0


def test_attention_is_the_weighted_average_of_bahdanau() -> None:
    """Score by score in numpy: `v . tanh(W_q h + k)`, the weights of a softmax, their average."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((BATCH, MICRO.hidden)).astype(np.float32)
    states, keys = rng.standard_normal((2, BATCH, SOURCE, MICRO.hidden)).astype(np.float32)
    module = nmt.Attention(MICRO)
    params: Any = module.init(jax.random.key(1), query, states, keys)["params"]
    context: Any = module.apply({"params": params}, query, states, keys)
    matrix, v = (np.asarray(params[name]["kernel"]) for name in ("query", "score"))
    for b in range(BATCH):
        projected = query[b] @ matrix
        scores = np.array([np.tanh(projected + key) @ v[:, 0] for key in keys[b]])
        weights = np.exp(scores) / np.sum(np.exp(scores))
        np.testing.assert_allclose(context[b], weights @ states[b], rtol=1e-5, atol=1e-6)


def test_one_cell_step_is_an_lstm() -> None:
    rng = np.random.default_rng(0)
    cell, hidden = rng.standard_normal((2, BATCH, MICRO.hidden)).astype(np.float32)
    x = rng.standard_normal((BATCH, 4)).astype(np.float32)
    module = nmt.LSTMCell(MICRO)
    params: Any = module.init(jax.random.key(0), (cell, hidden), x)["params"]
    (new_cell, new_hidden), out = module.apply({"params": params}, (cell, hidden), x)  # pyright: ignore[reportGeneralTypeIssues,reportAssignmentType]
    gates = x @ params["input"]["kernel"] + hidden @ params["recurrent"]["kernel"]
    i, f, g, o = np.split(np.asarray(gates + params["input"]["bias"]), 4, axis=-1)
    sigmoid = lambda y: 1 / (1 + np.exp(-y))  # noqa: E731
    want_cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    np.testing.assert_allclose(new_cell, want_cell, rtol=1e-5, atol=1e-6)
    want = sigmoid(o) * np.tanh(want_cell)
    np.testing.assert_allclose(new_hidden, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out, new_hidden)


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


@pytest.mark.parametrize("scan", [False, True])
def test_wrapped_attention_keeps_value_and_gradient(scan: bool) -> None:
    config = dataclasses.replace(MICRO, layers=1, scan=scan)
    plain, arguments = micro(config)
    wrapped, _ = micro(config, functools.partial(nn.remat, prevent_cse=not scan))
    program = str(jax.make_jaxpr(wrapped)(*arguments))
    assert len(re.findall(r" = (?:checkpoint|remat\d?)\[", program)) == (1 if scan else TARGET)
    assert_trees_close(value_and_grad(wrapped, *arguments), value_and_grad(plain, *arguments))


@pytest.mark.parametrize("changes", [{"layers": 0}, {"hidden": -1}, {"target_vocab": 0}])
def test_sizes_must_be_positive(changes: dict[str, int]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"`{name}` is {changes[name]}; expected a positive"):
        dataclasses.replace(MICRO, **changes)
    with pytest.raises(ValueError, match="lengths are 0 and 3"):
        nmt.nmt_loss(MICRO, 2, 0, 3)


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


def test_it_learns_to_copy_text() -> None:
    config = dataclasses.replace(nmt.NMT_SMALL, scan=True, dropout=0.1)
    optimizer = optax.adam(1e-2)
    loss = remat.checkpoint(nmt.loss_fn(config), remat_policy="min_cut")

    @jit
    def step(params: Any, state: Any, tokens: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens, tokens, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jit(lambda: nmt.init_params(config))()
    state = optimizer.init(params)
    losses = []
    for index, (tokens, _) in enumerate(text.batches(0, 32, 8, steps=60)):
        params, state, value = step(params, state, tokens, jax.random.key(index))
        losses.append(float(value))
    assert abs(losses[0] - np.log(config.target_vocab)) < 0.3
    assert losses[-1] < losses[0] - 1.5


# --- the Transformer with ReLU

BLOCKS: dict[str, Any] = {"layers": 2, "batch": 2, "length": 8, "width": 16, "heads": 2}


def _program(loss: Any, shapes: Any) -> str:
    return str(jax.make_jaxpr(loss)(*shapes))


def test_the_feed_forward_network_has_the_activation_asked_for() -> None:
    gelu = _program(*gpt.blocks_unrolled(**BLOCKS, activation="gelu"))
    relu = _program(*gpt.blocks_unrolled(**BLOCKS, activation="relu"))
    assert gelu == _program(*gpt.blocks_unrolled(**BLOCKS))  # the default
    assert (" tanh " in gelu, "name=relu" in gelu) == (True, False)
    assert (" tanh " in relu, "name=relu" in relu) == (False, True)
    config = gpt.GPTConfig(vocab_size=8, context=8, layers=1, width=8, heads=2, activation="relu")
    assert "name=relu" in _program(*gpt.gpt_loss(config, batch=1))
    with pytest.raises(
        ValueError, match=r"`activation` is 'elu'; expected one of \['gelu', 'relu'\]"
    ):
        dataclasses.replace(config, activation="elu")  # pyright: ignore[reportArgumentType]


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
