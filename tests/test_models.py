"""The reference networks: their size, and that they can be trained; nothing here tests `remat` itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cases, gpt, lstm, mlp, resnet, text
from remat.compat.deferred import DEFERRED

BLOCKS: dict[str, Any] = {"layers": 2, "batch": 2, "length": 8, "width": 16, "heads": 2}
GPT_MICRO = gpt.GPTConfig(vocab_size=128, context=16, layers=2, width=16, heads=2, dropout=0.1)
RESNET_MICRO = resnet.ResNetConfig(stages=(1, 1), block="bottleneck", filters=4, classes=10)
LSTM_MICRO = lstm.LSTMConfig(vocab_size=128, width=8, dropout=0.1)


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def assert_trees_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


def value_and_grad(loss: Callable[..., Any], *arguments: Any) -> Any:
    return jit(jax.value_and_grad(loss))(*arguments)


def micro(name: str) -> gpt.Case:
    return {
        "gpt": lambda: gpt.gpt_loss(GPT_MICRO, batch=2),
        "resnet": lambda: resnet.resnet_scalar_loss(RESNET_MICRO, batch=2, size=16),
        "lstm": lambda: lstm.lstm_loss(LSTM_MICRO, batch=2, length=8),
        "mlp": lambda: mlp.residual_mlp(layers=3, width=8, hidden=16, batch=4),
        "blocks bf16": lambda: gpt.blocks_scanned(**BLOCKS, dropout=0.1, dtype=jnp.bfloat16),
    }[name]()


# --- every case

DEEP_CASES = ("gpt_48", "residual_mlp_1000")  # tracing one takes many seconds


def _slow_if_deep(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow if name in DEEP_CASES else ())


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [_slow_if_deep(name) for name in cases.CASES])
def test_every_case_is_a_scalar_float_loss_of_its_shapes(name: str) -> None:
    loss, shapes = cases.CASES[name]()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    value, grads = jax.eval_shape(jax.value_and_grad(loss), *shapes)
    assert value == jax.ShapeDtypeStruct((), jnp.float32)
    assert jax.tree.map(lambda leaf: leaf.shape, grads) == jax.tree.map(
        lambda leaf: leaf.shape, shapes[0]
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm", "mlp", "blocks bf16"])
def test_loss_and_gradient_are_finite_and_no_parameter_is_idle(name: str) -> None:
    loss, shapes = micro(name)
    value, grads = value_and_grad(loss, *cases.materialize(shapes))
    assert np.isfinite(value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert jnp.any(leaf != 0), jax.tree_util.keystr(path)


def test_materialize_is_deterministic_and_keeps_shapes_and_dtypes() -> None:
    shapes = {
        "kernel": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        "scale": jax.ShapeDtypeStruct((64,), jnp.float32),
        "tokens": jax.ShapeDtypeStruct((4, 8), jnp.int32),
        "key": gpt.key_shape(),
        "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3)),
    }
    arrays = cases.materialize(shapes, seed=1)
    for left, right in zip(jax.tree.leaves(arrays), jax.tree.leaves(shapes), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
    again = cases.materialize(shapes, seed=1)
    raw = functools.partial(jax.tree.map, lambda x: jax.random.key_data(x) if _is_key(x) else x)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), raw(arrays), raw(again)))
    assert abs(float(arrays["scale"].mean()) - 1.0) < 0.1
    assert 0 <= int(arrays["tokens"].min()) <= int(arrays["tokens"].max()) < 8


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# --- parameter counts


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (gpt.GPT2_SMALL, 124_475_904),
        (dataclasses.replace(gpt.GPT2_SMALL, vocab_size=50257), 124_439_808),
        (dataclasses.replace(gpt.GPT2_SMALL, scan_layers=True), 124_475_904),
        (cases.GPT2_XL, 1_557_686_400),
        (dataclasses.replace(cases.GPT2_XL, vocab_size=50257), 1_557_611_200),
        (dataclasses.replace(gpt.GPT2_SMALL, tied_head=False), 124_475_904 + 50304 * 768),
    ],
)
def test_gpt2_parameter_count(config: gpt.GPTConfig, parameters: int) -> None:
    assert count(jax.eval_shape(lambda: gpt.init_params(config))) == parameters


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (resnet.RESNET18, 11_689_512),
        (resnet.RESNET50, 25_557_032),
        (resnet.RESNET152, 60_192_808),
    ],
)
def test_resnet_parameter_count(config: resnet.ResNetConfig, parameters: int) -> None:
    params, _ = jax.eval_shape(lambda: resnet.init_variables(config, 224))
    assert count(params) == parameters


# --- GPT


def micro_gpt_arguments(config: gpt.GPTConfig = GPT_MICRO) -> tuple[Any, jax.Array, jax.Array]:
    _, shapes = gpt.gpt_loss(config, batch=2)
    tokens, targets = next(text.batches(0, 2, config.context, 1))
    return cases.materialize(shapes[0]), jnp.asarray(tokens), jnp.asarray(targets)


@pytest.mark.slow
def test_scanned_and_unrolled_gpt_agree() -> None:
    params, tokens, targets = micro_gpt_arguments()
    scanned_config = dataclasses.replace(GPT_MICRO, scan_layers=True)
    stacked = gpt.stack_blocks(params, GPT_MICRO.layers)
    shapes = jax.eval_shape(lambda: gpt.init_params(scanned_config))
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, shapes)
    value, grads = value_and_grad(gpt.loss_fn(GPT_MICRO), params, tokens, targets, None)
    scanned = value_and_grad(gpt.loss_fn(scanned_config), stacked, tokens, targets, None)
    assert_trees_close(scanned, (value, gpt.stack_blocks(grads, GPT_MICRO.layers)))


def test_scanned_layers_draw_different_dropout_masks() -> None:
    config = dataclasses.replace(GPT_MICRO, scan_layers=True, dropout=0.5)
    params, tokens, _ = micro_gpt_arguments(config)
    apply = functools.partial(
        gpt.GPT(config).apply,
        deterministic=False,
        rngs={"dropout": jax.random.key(0)},
        capture_intermediates=lambda module, _: isinstance(module, nn.Dropout),
        mutable=["intermediates"],
    )
    _, state = jit(apply)({"params": params}, tokens)
    dropped = [leaf == 0 for leaf in jax.tree.leaves(state["intermediates"]["blocks"])]
    assert all(jnp.any(mask[0] != mask[1]) for mask in dropped if mask.shape[0] == 2)


def test_attention_is_causal() -> None:
    params, tokens, _ = micro_gpt_arguments()
    changed = tokens.at[:, 9].add(1)
    logits: Any = jit(lambda ids: gpt.GPT(GPT_MICRO).apply({"params": params}, ids, True))
    difference = jnp.abs(logits(tokens) - logits(changed))
    assert jnp.max(difference[:, :9]) == 0.0
    assert jnp.min(jnp.max(difference[:, 9:], axis=-1)) > 0.0


# --- bare stacks of blocks


@pytest.mark.sample(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_scanned_and_unrolled_blocks_agree(dropout: float) -> None:
    scanned, scanned_shapes = gpt.blocks_scanned(**BLOCKS, dropout=dropout)
    unrolled, unrolled_shapes = gpt.blocks_unrolled(**BLOCKS, dropout=dropout)
    params, x, key = cases.materialize(unrolled_shapes)
    stacked = gpt.stack_layers(params)
    assert jax.eval_shape(lambda: stacked) == scanned_shapes[0]
    value, grads = value_and_grad(unrolled, params, x, key)
    expected = (value, gpt.stack_layers(grads))
    assert_trees_close(value_and_grad(scanned, stacked, x, key), expected)


@pytest.mark.parametrize("stacked", [True, False])
def test_real_block_arguments_have_the_example_shapes(stacked: bool) -> None:
    make = gpt.blocks_scanned if stacked else gpt.blocks_unrolled
    _, shapes = make(**BLOCKS, dtype=jnp.bfloat16)
    init = functools.partial(gpt.init_args, **BLOCKS, dtype=jnp.bfloat16, stacked=stacked)
    arguments: Any = jit(init)()
    assert jax.eval_shape(lambda: arguments) == shapes
    assert {leaf.dtype for leaf in jax.tree.leaves(arguments[:2])} == {jnp.dtype(jnp.bfloat16)}


# --- hand-made checkpointing through `wrap_block`

DOTS_SAVEABLE = functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda wrap: gpt.gpt_loss(GPT_MICRO, 2, wrap_block=wrap and _static_flag(wrap)),
        lambda wrap: gpt.gpt_loss(
            dataclasses.replace(GPT_MICRO, scan_layers=True),
            2,
            wrap_block=wrap and _static_flag(wrap),
        ),
        lambda wrap: resnet.resnet_scalar_loss(RESNET_MICRO, 2, 16, wrap),
        lambda wrap: lstm.lstm_loss(LSTM_MICRO, 2, 8, wrap),
    ],
    ids=["gpt", "gpt scan", "resnet", "lstm"],
)
def test_wrapped_modules_keep_parameters_value_and_gradient(make: Any) -> None:
    plain, shapes = make(None)
    wrapped, _ = make(DOTS_SAVEABLE)
    arguments = cases.materialize(shapes)
    expected = value_and_grad(plain, *arguments)
    assert "remat" in str(jax.make_jaxpr(wrapped)(*arguments))
    assert_trees_close(value_and_grad(wrapped, *arguments), expected)


def _static_flag(wrap: Any) -> Any:
    return functools.partial(wrap, static_argnums=(2,))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (lambda config: gpt.gpt_loss(config, 2), GPT_MICRO),
        (lambda config: gpt.gpt_loss(config, 2), dataclasses.replace(GPT_MICRO, scan_layers=True)),
        (lambda config: resnet.resnet_loss(config, 2, 16), RESNET_MICRO),
        (lambda config: lstm.lstm_loss(config, 2, 8), LSTM_MICRO),
    ],
    ids=["gpt", "gpt scan", "resnet", "lstm"],
)
def test_remat_policy_keeps_the_parameters_and_reaches_the_trace(make: Any, config: Any) -> None:
    pytest.importorskip("remat.linen", exc_type=ImportError)
    _, shapes = make(config)
    loss, policy_shapes = make(dataclasses.replace(config, remat_policy="full"))
    assert policy_shapes == shapes
    assert DEFERRED in str(jax.make_jaxpr(loss)(*shapes))


# --- ResNet, MLP


@pytest.mark.parametrize("layers", [1, 100])
def test_residual_mlp_of_any_depth_has_three_products_and_one_name_per_boundary(
    layers: int,
) -> None:
    loss, shapes = mlp.residual_mlp(layers=layers)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(loss)(*shapes).jaxpr.eqns]
    assert count(shapes[0]) == layers * (2 * 256 * 1024 + 1024 * 1024)
    assert names.count("dot_general") == 3 * layers
    assert names.count("name") == layers - 1 == len(mlp.boundary_names(layers))


@pytest.mark.slow
def test_deep_cases_have_their_depth() -> None:
    depth = {name: len(cases.CASES[name]()[1][0]) for name in cases.CASES if "mlp" in name}
    assert depth == {
        "residual_mlp": 16,
        "residual_mlp_small": 4,
        "residual_mlp_100": 100,
        "residual_mlp_1000": 1000,
    }
    _, (params, tokens, _, _) = cases.gpt_48()
    assert sum(name.startswith("block_") for name in params) == 48
    assert tokens.shape == (4, 1024)


# --- text


def test_text_batches_are_deterministic_shifted_windows() -> None:
    first, again = (list(text.batches(7, batch=3, length=11, steps=4)) for _ in range(2))
    assert len(first) == 4
    for (tokens, targets), (other_tokens, other_targets) in zip(first, again, strict=True):
        assert tokens.shape == targets.shape == (3, 11)
        assert tokens.dtype == targets.dtype == np.int32
        np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
        np.testing.assert_array_equal(tokens, other_tokens)
        np.testing.assert_array_equal(targets, other_targets)
    different = next(text.batches(8, batch=3, length=11, steps=1))[0]
    assert not np.array_equal(different, first[0][0])
    held_out = next(text.batches(7, batch=3, length=11, steps=1, split="validation"))[0]
    assert not np.array_equal(held_out, first[0][0])
