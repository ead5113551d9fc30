"""Results that nobody differentiates: of their cotangents a planned backward pass computes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import remat
import remat.linen
from remat.lower import zeros as zeros_module
from remat.policies import Ilp

ROOT = Path(__file__).resolve().parents[1]
Tree = Any
X = jnp.linspace(0.1, 1.2, 6).reshape(2, 3)
W = jnp.zeros((3, 3))
POLICIES = ["min_cut", "full", "save_all", "low_memory", "gist", "sublinear"]


# Every function has results whose derivative at these arguments is infinite, or no number.
def metric(w: jax.Array, x: jax.Array) -> Tree:
    return jnp.sum((x @ w - 1) ** 2), {"norm": jnp.linalg.norm(w)}


def several(w: jax.Array, x: jax.Array) -> Tree:
    y = jnp.tanh(x @ w + 1)
    return jnp.sum(y), [jnp.std(w), jnp.sqrt(w), jnp.log(jnp.abs(y @ w))], y


def scanned(w: jax.Array, x: jax.Array) -> Tree:
    def step(carry: jax.Array, row: jax.Array) -> Tree:
        return carry + jnp.tanh(carry @ w + row), (jnp.linalg.norm(w @ row), jnp.sqrt(row @ w))

    last, (norms, roots) = jax.lax.scan(step, x, x)
    return jnp.sum(last**2), norms, roots


def carried(w: jax.Array, x: jax.Array) -> Tree:
    """A metric that is added up over the iterations of loops in one another."""

    def inner(carry: Tree, row: jax.Array) -> Tree:
        state, total = carry
        return (jnp.sin(state @ w + row), total + jnp.linalg.norm(state @ w)), jnp.sqrt(w[0])

    def outer(carry: Tree, scale: jax.Array) -> Tree:
        state, total = carry
        (state, total), roots = jax.lax.scan(inner, (state * scale, total), x)
        return (state, total), roots

    (state, total), roots = jax.lax.scan(outer, (x, 0.0), jnp.arange(1.0, 4.0))
    return jnp.sum(state), total, roots


def branched(w: jax.Array, x: jax.Array) -> Tree:
    y, root = jax.lax.cond(
        x[0, 0] > 0, lambda: (x @ w + 1, jnp.sqrt(w)), lambda: (x @ w, jnp.sqrt(w + 1))
    )
    return jnp.sum(y), root


def regions(w: jax.Array, x: jax.Array) -> Tree:
    region = jax.checkpoint(lambda w, x: (jnp.tanh(x @ w + 1), jnp.linalg.norm(w)))
    y, norm = region(w, x)
    return jnp.sum(y**2), norm


def mapped(w: jax.Array, x: jax.Array) -> Tree:
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=(P(), P("rows")), out_specs=(P("rows"), P()))
    def part(w: jax.Array, x: jax.Array) -> Tree:
        return jnp.tanh(x @ w + 1), jax.lax.pmean(jnp.linalg.norm(w) + jnp.sum(x) * 0, "rows")

    y, norm = part(w, x)
    return jnp.sum(y**2), norm


def masked(w: jax.Array, x: jax.Array) -> Tree:
    y = jax.nn.relu(x @ w + 1)
    kept = jnp.where(x > 0.5, y, 0.0)
    root = jnp.sqrt(jnp.where(x > 0.5, w[:2], 0.0))
    return jnp.sum(y**2), jnp.pad(root, 1), jnp.concatenate([kept, root]), root.at[0].set(kept[0])


def called(w: jax.Array, x: jax.Array) -> Tree:
    norm = jax.jit(lambda w, x: (jnp.linalg.norm(w), x @ w))
    rooted = remat.checkpoint(lambda w: (jnp.sqrt(w), jnp.cos(w)))
    (size, y), (root, cosine) = norm(w, x), rooted(w)
    return jnp.sum((y - 1) ** 2) + jnp.sum(cosine * w), size, root


FUNCTIONS = [metric, several, scanned, carried, branched, regions, mapped, masked, called]


def by_name(function: Any) -> str:
    return function.__name__


def gradients(function: Callable[..., Tree], which: int = 0) -> Callable[..., Tree]:
    def loss(w: jax.Array, x: jax.Array) -> Tree:
        results = jax.tree.leaves(function(w, x))
        return jnp.sum(results[which])

    return jax.grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("function", FUNCTIONS, ids=by_name)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_plain_jax(function: Callable[..., Tree], policy: str) -> None:
    expected = gradients(function)(W, X)
    assert all(np.isfinite(x).all() for x in expected)
    wrapped = remat.checkpoint(function, remat_policy=policy)
    for transform in (lambda f: f, jax.jit):
        found = transform(gradients(wrapped))(W, X)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS, ids=by_name)
@pytest.mark.parametrize("around", ["vmap", "scan", "checkpoint", "ours", "respect"])
def test_whatever_is_around(function: Callable[..., Tree], around: str) -> None:
    def over(f: Callable[..., Tree]) -> Callable[..., Tree]:
        if around == "vmap":
            return lambda w, x: jax.vmap(lambda s: gradients(f)(w, x * s))(jnp.arange(1.0, 3.0))
        if around == "scan":

            def looped(w: jax.Array, x: jax.Array) -> Tree:
                def step(total: jax.Array, scale: jax.Array) -> Tree:
                    return total + jnp.sum(jax.tree.leaves(f(w, x * scale))[0]), None

                return jax.lax.scan(step, 0.0, jnp.arange(1.0, 3.0))[0]

            return jax.grad(looped, argnums=(0, 1))
        outer = {"checkpoint": jax.checkpoint, "ours": remat.checkpoint}.get(around, lambda f: f)
        return gradients(outer(f))

    options: dict[str, Any] = {"nested_checkpoints": "respect"} if around == "respect" else {}
    found = over(remat.checkpoint(function, **options))(W, X)
    for ours, theirs in zip(found, over(function)(W, X), strict=True):
        assert np.isfinite(theirs).all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@given(which=st.data())
def test_any_result_may_be_the_one(which: Any) -> None:
    """Also those with gradients that are no numbers: then jax's are none, too."""
    function = which.draw(st.sampled_from(FUNCTIONS))
    index = which.draw(st.integers(0, len(jax.tree.leaves(function(W, X))) - 1))
    expected = gradients(function, index)(W, X)
    found = gradients(remat.checkpoint(function), index)(W, X)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_is_sown_does_not_matter() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.Dense(3, kernel_init=nn.initializers.zeros)(x)
            self.sow("intermediates", "norm", jnp.linalg.norm(y))
            return x + y

    def gradient(module: nn.Module) -> Tree:
        params = {"params": module.init(jax.random.key(0), X)["params"]}
        sown = ["intermediates"]
        return jax.grad(lambda v: jnp.sum(module.apply(v, X, mutable=sown)[0] ** 2))(params)

    ours, theirs = gradient(remat.linen.remat(Block)()), gradient(nn.remat(Block)())
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.isfinite(their).all()
        np.testing.assert_allclose(our, their, rtol=1e-5)


@pytest.mark.parametrize("policy", ["min_cut", "full", "save_all"])
def test_no_matmul_is_left_of_what_nobody_differentiates(policy: str) -> None:
    def block(w: jax.Array, x: jax.Array) -> Tree:
        y = jnp.tanh(x @ w)
        return jnp.sum(y**2), jnp.sin(jnp.sin(y @ w) @ w) @ w

    def used(f: Callable[..., Tree]) -> Callable[..., Tree]:
        return jax.grad(f, has_aux=True)

    x = jnp.ones((16, 3))
    plain = remat.compile_report(used(block), W, x, device="cpu")
    ours = remat.compile_report(
        used(remat.checkpoint(block, remat_policy=policy)), W, x, device="cpu"
    )
    assert ours.matmuls_executed == plain.matmuls_executed + (policy == "full")


@pytest.mark.parametrize("lowering", ["staged", "policy"])
@pytest.mark.parametrize("budget", [1.0, 0.75, 0.6])
@pytest.mark.parametrize("beside", ["features", "probabilities", "stopped", "numbers"])
def test_budgets_are_of_a_loss_with_results_beside_it(
    beside: str, budget: float, lowering: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def loss(params: Tree, x: jax.Array) -> Tree:
        kept = []
        for up, down in params:
            hidden = jax.nn.gelu(x @ up)
            kept.append(hidden)
            x = x + hidden @ down
        p = jax.nn.softmax(x)
        stopped = [jax.lax.stop_gradient(h) for h in kept]
        numbers = {"mean": jnp.mean(p), "least": jnp.argmin(p, axis=1)}
        others = {
            "features": kept,
            "probabilities": {"p": p, "n": jnp.sum(p**2)},
            "stopped": stopped,
            "numbers": numbers,
        }
        return jnp.mean(x**2), others[beside]

    params = [(jnp.full((16, 64), 0.01), jnp.full((64, 16), 0.01))] * 3
    x = jnp.ones((64, 16))
    options: dict[str, Any] = {"remat_policy": Ilp(method="starts"), "lowering": lowering}
    try:
        plan = remat.plan(loss, params, x, budget=budget, confirm="cpu", **options)
    except remat.BudgetError as error:
        assert error.smallest_peak_bytes
        return
    assert plan.confirmed is not None and plan.budget_bytes is not None
    wrapped = remat.checkpoint(loss, remat_policy=plan, lowering=lowering)
    taken = [
        remat.compile_report(of(wrapped, has_aux=True), params, x, device="cpu").temp_bytes
        for of in (jax.grad, jax.value_and_grad)
    ]
    assert max(taken) == plan.confirmed.temp_bytes <= plan.budget_bytes


def test_every_linear_operator_of_jax_is_known() -> None:
    """What is not followed reads zeros that are made: right but where a derivative is infinite."""
    followed = {*zeros_module._EACH, *zeros_module._PRODUCTS, *zeros_module._TOGETHER}
    with_bodies = "cond custom_linear_solve remat remat2 scan select_n shard_map jit pjit closed_call core_call"
    # In no backward pass that was traced, without a derivative, or with a rule of its own.
    apart = """
        call checkpoint composite custom_lin dce_sink debug_callback debug_print ffi_call from_edtype get
        global_array_to_host_local_array host_local_array_to_global_array io_callback linear_call
        pbroadcast_dynamic polynomial pure_callback ragged_all_to_all ref_addupdate remat_deferred
        remat_opt spsolve stage swap tie to_edtype todense while xla_pmap
    """
    sparse_and_boxes = ("bcoo_", "bcsr_", "box_", "coo_", "csr_", "log_", "new_")
    # Alone: other packages have operators of their own.
    code = "import remat; from jax.interpreters import ad; print(*(p.name for p in TABLES))"
    tables = '[*ad.primitive_transposes, *getattr(ad, "fancy_transposes", ())]'
    command = [sys.executable, "-c", code.replace("TABLES", tables)]
    made = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    names = set(made.stdout.split())
    assert {"dot_general", "while"} <= names
    rest = names - followed - {*with_bodies.split(), *apart.split()}
    assert not [name for name in rest if not name.startswith(sparse_and_boxes)]
