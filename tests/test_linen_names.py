"""`remat.linen.remat` names parameters as `flax.linen.remat` does: what one has saved, the other loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.ad_checkpoint import checkpoint_name

import remat
import remat.linen

Array = jax.Array
Wrap = Callable[..., Any]

# Half the compile time, and nothing here depends on how well XLA optimises.
jit = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
POLICIES: list[Any] = [
    None,
    "none",
    "min_cut",
    "full",
    "save_all",
    "names",
    "sublinear",
    "dots_saveable",
    "minimal",
    jax.checkpoint_policies.nothing_saveable,
]
WIDTH = 8
X = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class Block(nn.Module):
    """Dense, batch norm, dropout, and a module with an explicit name: `[n, 8]` to `[n, 8]`."""

    train: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.BatchNorm(use_running_average=not self.train)(nn.Dense(WIDTH)(x))
        h = checkpoint_name(jnp.tanh(h), "hidden")
        h = nn.Dropout(0.5, deterministic=not self.train)(h)
        return x + nn.Dense(WIDTH, name="out")(h)


class Member(nn.Module):
    """Submodules made in `setup`, and two methods."""

    def setup(self) -> None:
        self.first = nn.Dense(WIDTH)
        self.second = [nn.Dense(WIDTH), nn.Dense(WIDTH)]

    def encode(self, x: Array) -> Array:
        """The first half."""
        return checkpoint_name(jnp.tanh(self.first(x)), "hidden")

    def __call__(self, x: Array) -> Array:
        h = self.encode(x)
        for dense in self.second:
            h = jnp.tanh(dense(h))
        return h


def unrolled(wrap: Wrap) -> nn.Module:
    """Blocks under automatic and explicit names, and one module inside another, both wrapped."""

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            return wrap(Member)()(wrap(Block)()(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            block = wrap(Block)
            x = block()(block(name="explicit")(block()(x)))
            return wrap(Outer)()(wrap(Member)()(x))

    return Net()


def scanned(wrap: Wrap) -> nn.Module:
    """`nn.scan` over a wrapped block, with parameters, statistics and dropout per layer."""

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x: Array, _: None) -> tuple[Array, None]:
            return wrap(Member)()(Block()(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            layers = nn.scan(
                wrap(Step, prevent_cse=False),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return layers()(x, None)[0]

    return Net()


def by_setup(wrap: Wrap) -> nn.Module:
    """Wrapped classes instantiated in `setup`, one with two wrapped methods."""

    class Net(nn.Module):
        def setup(self) -> None:
            self.blocks = [wrap(Block)() for _ in range(2)]
            self.member = wrap(Member, methods=["encode", "__call__"])()

        def __call__(self, x: Array) -> Array:
            for block in self.blocks:
                x = block(x)
            return self.member(x) + self.member.encode(x)

    return Net()


def decorated(wrap: Wrap) -> nn.Module:
    """A wrapped method, and a wrapped function of a module."""

    class Net(nn.Module):
        @wrap
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = checkpoint_name(nn.Dense(WIDTH)(x), "hidden")
            return wrap(lambda module, y: module(checkpoint_name(y, "hidden")))(Block(), x)

    return Net()


NETS = [unrolled, scanned, by_setup, decorated]


def ours(policy: Any) -> Wrap:
    """`remat.linen.remat` with a policy."""
    return lambda target, **options: remat.linen.remat(target, remat_policy=policy, **options)


def _init(net: nn.Module) -> Any:
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    return net.init(keys, X)


def init(net: nn.Module) -> Any:
    """Initial variables."""
    return jit(lambda: _init(net))()


def shapes_of(net: nn.Module) -> Any:
    """Names, shapes and dtypes of the variables; the keys that values are drawn from hang on the names."""
    return jax.eval_shape(lambda: _init(net))


def trainer(net: nn.Module) -> Callable[..., tuple[Any, Any]]:
    """Gradient descent with dropout and batch statistics: variables to variables and gradients."""

    @jit
    def step(variables: Any, key: Array) -> tuple[Any, Any]:
        def loss(params: Any) -> tuple[Array, Any]:
            out, state = net.apply(
                {**variables, "params": params}, X, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return jnp.mean(jnp.asarray(out) ** 2), state

        grads, state = jax.grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {**variables, **state, "params": params}, grads

    return lambda variables: step(variables, jax.random.key(1))


def assert_same(got: Any, want: Any, rtol: float = 2e-4, atol: float = 2e-6) -> None:
    """Compares pytrees: the same keys, and the same values to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


@pytest.mark.sample(12)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: getattr(p, "__name__", str(p)))
def test_names_are_those_of_flax(policy: Any, net: Callable[[Wrap], nn.Module]) -> None:
    assert shapes_of(net(ours(policy))) == shapes_of(net(nn.remat))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("net", "policy"), [(unrolled, None), (unrolled, "min_cut"), (scanned, "full")]
)
def test_initial_values_are_those_of_flax(policy: Any, net: Callable[[Wrap], nn.Module]) -> None:
    assert_same(init(net(ours(policy))), init(net(nn.remat)), rtol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("net", "policy"),
    [
        (unrolled, "min_cut"),
        (scanned, "min_cut"),
        (scanned, None),
        pytest.param(by_setup, "names", marks=pytest.mark.slow),
        pytest.param(decorated, "full", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_carries_over(
    policy: Any, net: Callable[[Wrap], nn.Module], tmp_path: Path
) -> None:
    """Trained with one, saved, loaded with the other, trained on: the same as never having changed."""
    made = {wrap: net(wrap) for wrap in (nn.remat, ours(policy))}
    initial = [init(one) for one in made.values()]
    train = [trainer(one) for one in made.values()]
    for first, second in ((0, 1), (1, 0)):
        saved = tmp_path / "variables.msgpack"
        saved.write_bytes(serialization.to_bytes(train[first](initial[first])[0]))
        got = train[second](serialization.from_bytes(initial[second], saved.read_bytes()))
        want = train[first](serialization.from_bytes(initial[first], saved.read_bytes()))
        assert_same(got, want)


@pytest.mark.slow
def test_an_orbax_checkpoint_carries_over(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    theirs, mine = scanned(nn.remat), scanned(ours("min_cut"))
    variables = init(theirs)
    checkpointer = orbax.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", variables)
    checkpointer.wait_until_finished()
    loaded = checkpointer.restore(tmp_path / "saved", init(mine))
    assert_same(loaded, variables, rtol=0, atol=0)
    assert_same(trainer(mine)(loaded), trainer(theirs)(variables))


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", [None, "min_cut", "full", "dots_saveable"], ids=str)
def test_dropout_masks_are_those_of_flax(policy: Any) -> None:
    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = nn.Dropout(0.5, deterministic=False)(x)
            return nn.Dropout(0.5, rng_collection="other", deterministic=False)(x)

    def masks(wrap: Wrap) -> Array:
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x: Array) -> Array:
                x = wrap(Drop)()(x)
                return nn.Dropout(0.2, deterministic=False)(wrap(Drop, rngs=True)()(x))

        keys = {"dropout": jax.random.key(1), "other": jax.random.key(2)}
        return jnp.asarray(Net().apply({}, jnp.ones((64, 64)), rngs=keys))

    np.testing.assert_array_equal(masks(ours(policy)), masks(nn.remat))


@pytest.mark.parametrize("policy", [None, "min_cut", "dots_saveable"], ids=str)
def test_methods_with_arguments_of_their_own(policy: Any) -> None:
    class Switch(nn.Module):
        def setup(self) -> None:
            self.dense = nn.Dense(WIDTH)

        def scale(self, x: Array, double: bool) -> Array:
            return self.dense(x) * (2 if double else 1)

        def __call__(self, x: Array) -> Array:
            return jnp.tanh(self.scale(x, True))

    def net(wrap: Wrap) -> nn.Module:
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x: Array) -> Array:
                methods = {"__call__": {}, "scale": {"static_argnums": 1}}
                return wrap(Switch, methods=methods)()(x)

        return Net()

    want = init(net(nn.remat))
    assert shapes_of(net(ours(policy))) == shapes_of(net(nn.remat))
    loss = {m: (lambda p, m=m: jnp.sum(m.apply(p, X))) for m in (net(nn.remat), net(ours(policy)))}
    assert_same(*(jax.grad(f)(want) for f in loss.values()))


def test_nested_remat_has_flaxs_names() -> None:
    def twice(wrap: Wrap) -> Wrap:
        return lambda target, **options: wrap(wrap(target, **options), **options)

    want = shapes_of(unrolled(twice(nn.remat)))
    assert "CheckpointCheckpointBlock_0" in want["params"]
    assert shapes_of(unrolled(twice(ours("min_cut")))) == want


def test_a_plan_of_a_block_has_the_same_names() -> None:
    """A plan made for one block is used by all blocks like it; names and gradients are as without."""

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(WIDTH, name="up")(x)))

    def net(wrap: Wrap) -> nn.Module:
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x: Array) -> Array:
                for _ in range(3):
                    x = wrap(Plain)()(x)
                return x

        return Net()

    block = Plain()
    variables = block.init(jax.random.key(0), X)
    plan = remat.plan(block.apply, variables, X, argnums=(0, 1), remat_policy="full")
    want = init(net(nn.remat))
    assert shapes_of(net(ours(plan))) == shapes_of(net(nn.remat))
    loss = [
        (lambda p, x, m=m: jnp.sum(m.apply(p, x) ** 2)) for m in (net(ours(plan)), net(nn.remat))
    ]
    assert_same(*(jax.grad(f, (0, 1))(want, X) for f in loss))


def test_wrapping_a_partial_class_and_errors() -> None:
    got, want = (unrolled(lambda t, w=w, **o: w(partial(t), **o)) for w in (ours(None), nn.remat))
    assert shapes_of(got) == shapes_of(want)
    with pytest.raises(remat.PolicyError, match="lowering"):
        remat.linen.remat(Block, lowering="stagd")
