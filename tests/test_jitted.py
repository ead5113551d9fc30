"""Steps of modules and models, compiled as they run: reports and fits that tell the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import remat
import remat.nnx
from remat.trace.jitted import has_nnx_modules, jitted

X = jnp.linspace(-1, 1, 512 * 16).reshape(512, 16)


class Block(nnx.Module):
    """Norm, dense, gelu, dropout, dense: parameters, statistics and a random counter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[n, 16]` to `[n, 16]`."""
        return x + self.drop(self.down(jax.nn.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    """Three blocks."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[n, 16]` to `[n, 16]`."""
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    """A loss that updates statistics and random counters."""
    return jnp.mean((model(x) - y) ** 2)


def step_of(policy: Any) -> Callable[..., jax.Array]:
    """A training step that changes the model and the optimizer, and returns the loss alone."""

    def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(remat.nnx.remat(loss, remat_policy=policy))(model, x, y)
        optimizer.update(model, grads)
        return value

    return step


def model_and_optimizer() -> tuple[Net, nnx.Optimizer]:
    """A new pair."""
    model = Net()
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def assert_same(got: Any, want: Any) -> None:
    """Compares the states of modules."""
    got, want = (jax.tree.leaves(nnx.state(tree)) for tree in (got, want))
    for a, b in zip(got, want, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_report_of_an_nnx_step_is_that_of_nnx_jit() -> None:
    model, optimizer = model_and_optimizer()
    sizes = {}
    for policy in (None, "min_cut", "full"):
        plain = remat.compile_report(step_of(policy), model, optimizer, X, X)
        as_nnx = remat.compile_report(nnx.jit(step_of(policy)), model, optimizer, X, X)
        for name in ("temp_bytes", "argument_bytes", "output_bytes", "alias_bytes"):
            assert getattr(plain, name) == getattr(as_nnx, name)
        # Gradients are computed, and the new state is a result.
        assert plain.matmuls_executed >= 3 * 6 - 1
        assert plain.output_bytes > 2 * 3 * 2 * 16 * 64 * 4
        sizes[policy] = plain.temp_bytes
    assert len(set(sizes.values())) == 3 and max(sizes.values()) == sizes[None]


def test_donated_and_static_arguments_of_an_nnx_step() -> None:
    def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, times: int) -> jax.Array:
        return sum(step_of(None)(model, optimizer, x, x) for _ in range(times))  # type: ignore[return-value]

    report = remat.compile_report(
        step, *model_and_optimizer(), X, 1, static_argnums=3, donate_argnums=(0, 1)
    )
    assert report.alias_bytes > 0.9 * (report.argument_bytes - X.nbytes)


def test_fit_of_an_nnx_step_runs_and_changes_its_modules() -> None:
    step = step_of("min_cut")
    model, optimizer = model_and_optimizer()
    fitted = remat.fit(
        step, model, optimizer, X, X, memory="1GiB", remat_policy="min_cut", max_compiles=2
    )
    assert fitted.plans
    want = model_and_optimizer()
    plain = nnx.jit(step_of(None))
    for _ in range(2):
        got_loss, want_loss = fitted(model, optimizer, X, X), plain(*want, X, X)
        np.testing.assert_allclose(got_loss, want_loss, rtol=1e-4)
    assert_same((model, optimizer), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["min_cut", "full"])
def test_plans_of_functions_of_nnx_modules(policy: str) -> None:
    """A plan is that of the wrapper under `nnx.grad`: parameters alone are differentiated."""
    plan = remat.plan(loss, Net(), X, X, remat_policy=policy)
    assert len(plan.graph.gradients) == 3 * (2 + 2 + 2)
    results = []
    for wrap in (lambda f: f, lambda f: remat.nnx.remat(f, remat_policy=plan)):
        model = Net()
        results.append((nnx.jit(nnx.grad(wrap(loss)))(model, X, X), model))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])
    both = remat.plan(loss, Net(), X, y=X, argnums=(0, 1), remat_policy=policy)
    assert len(both.graph.gradients) == len(plan.graph.gradients) + 1
    with pytest.raises(remat.TraceError, match="out of range"):
        remat.plan(loss, Net(), X, X, argnums=3)


def test_what_nnx_modules_are() -> None:
    model, optimizer = model_and_optimizer()
    assert has_nnx_modules(([model], {})) and has_nnx_modules({"a": optimizer})
    # A state is data: who passes it, returns it.
    assert not has_nnx_modules((X, {"a": [1, None, jnp.tanh]}, nnx.state(model)))


def test_the_functional_style_of_nnx_is_left_as_it_is() -> None:
    graphdef, state = nnx.split(Net())

    def forward(state: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graphdef, state)(x))

    assert remat.compile_report(forward, state, X).output_bytes == 4
    assert remat.plan(forward, state, X).graph.gradients


class State(struct.PyTreeNode):
    """A flax training state: a Python number that changes from step to step."""

    step: int
    weight: jax.Array
    rate: float = struct.field(pytree_node=False, default=0.1)


def test_numbers_that_jit_can_trace_stay_arguments() -> None:
    def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        run = remat.checkpoint(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))
        value, grad = jax.value_and_grad(run)(state.weight)
        return state.replace(step=state.step + 1, weight=state.weight - state.rate * grad), value

    state = State(0, jnp.eye(16))
    fitted = remat.fit(step, state, X, memory="1GiB", remat_policy="min_cut", donate_argnums=())
    for expected in (1, 2):
        state, _ = fitted(state, X)
        assert int(state.step) == expected


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """A number that tracing needs as one."""

    weight: Any
    rate: float


def test_numbers_that_jit_cannot_trace_are_part_of_the_program() -> None:
    def f(model: Model, x: jax.Array, times: int) -> tuple[jax.Array, jax.Array]:
        kept = x if model.rate == 0 else x * (1 - model.rate)
        return jnp.sum(jnp.tanh(kept @ model.weight) ** 2) * times, kept

    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(f)(Model(jnp.eye(16), 0.5), X, 2)
    model = Model(jnp.eye(16), 0.5)
    report = remat.compile_report(f, model, X, times=2)
    assert report.argument_bytes == X.nbytes + 16 * 16 * 4 + 4
    step = jitted(f, (model, X, 2), {}, static_argnums=(2,), donate_argnums=(1,))
    compiled = step.trace(model, X, 2).lower().compile()
    assert compiled.memory_analysis().alias_size_in_bytes == X.nbytes
    for got, want in zip(compiled(model, X + 0), f(model, X, 2), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(remat.CompileError, match="compiled for other values"):
        compiled(dataclasses.replace(model, rate=0.0), X)


def test_results_that_are_no_arrays() -> None:
    def f(model: Model, x: jax.Array) -> dict[str, Any]:
        new = dataclasses.replace(model, weight=model.weight * x.sum())
        return {"model": new, "f": jnp.tanh, "n": 3}

    model = Model({"w": jnp.eye(2), "f": jnp.sin}, 0.5)
    step = lambda m, x: f(Model(m.weight["w"], m.rate), x)  # noqa: E731
    got = jitted(step, (model, X), {}).trace(model, X).lower().compile()(model, X)
    assert got["f"] is jnp.tanh and type(got["model"].rate) is float and int(got["n"]) == 3
    np.testing.assert_allclose(got["model"].weight, jnp.eye(2) * X.sum(), rtol=1e-5)


def test_static_arguments_that_are_passed_by_name_make_no_other_static() -> None:
    class Pair(NamedTuple):
        weights: Any
        act: Any  # a leaf that is no array: the model is split

    def step(model: Pair, x: Any, double: bool = False) -> Any:
        return jnp.sum(model.act(model.weights * x)) * (2 if double else 1)

    args = Pair(jnp.ones(3), jnp.tanh), jnp.arange(3.0)
    assert jitted(step, args, {}, static_argnums=(2,))(*args) == step(*args)
    report = remat.compile_report(step, *args, static_argnums=2, device="cpu")
    assert report.argument_bytes == 2 * 3 * 4
