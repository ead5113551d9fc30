"""One program each of packages that nobody here wrote: every policy, gradients as plain JAX's.

Those that are not installed are skipped; a nightly job installs them. In float64, so that a gradient that is off by
more than rounding cannot hide in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat.core.errors import BudgetError
from remat.policies import POLICIES, get_policy

Program = tuple[Callable[..., jax.Array], tuple[Any, ...]]
BUDGET = 0.7
SECONDS = 3.0  # of a policy that searches


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


def trainable(eqx: Any, model: Any) -> tuple[Any, Any]:
    return eqx.partition(model, eqx.is_inexact_array)


def blackjax() -> Program:
    """Five leapfrog steps of the sampler's own integrator."""
    from blackjax.mcmc import integrators, metrics

    def loss(inverse_mass: jax.Array, x: jax.Array) -> jax.Array:
        def log_density(x: jax.Array) -> jax.Array:
            return -jnp.sum(jnp.logaddexp(x, -x)) - 0.1 * jnp.sum(x**4)

        metric = metrics.default_metric(inverse_mass)
        step = integrators.velocity_verlet(log_density, metric.kinetic_energy)
        state = integrators.new_integrator_state(log_density, x, jnp.cos(x))
        for _ in range(5):
            state = step(state, 0.1)
        return jnp.sum(state.position**2) + state.logdensity

    return loss, (1 + normal(0, 16) ** 2, normal(1, 16))


def diffrax() -> Program:
    """An adaptive solver through its checkpointed loop, with a network as vector field."""
    import diffrax as dfx

    def loss(w: jax.Array, y: jax.Array) -> jax.Array:
        solution = dfx.diffeqsolve(
            dfx.ODETerm(lambda t, y, w: jnp.tanh(y @ w) - 0.1 * t * y),
            dfx.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=y,
            args=w,
            stepsize_controller=dfx.PIDController(rtol=1e-6, atol=1e-8),
            max_steps=64,
        )
        return jnp.sum(solution.ys**2)

    return loss, (normal(0, 8, 8) / 3, normal(1, 4, 8))


def distrax() -> Program:
    """A mixture over a transformed normal."""
    import distrax as dx

    def loss(logits: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
        parts = dx.MultivariateNormalDiag(jnp.outer(jnp.arange(4.0), scale), jnp.exp(scale)[None])
        mixture = dx.MixtureSameFamily(dx.Categorical(logits), parts)
        squashed = dx.Transformed(dx.Normal(scale, jnp.exp(scale)), dx.Tanh())
        return -mixture.log_prob(x).sum() - squashed.log_prob(jnp.tanh(x)).sum()

    return loss, (normal(0, 4), normal(1, 8) / 3, normal(2, 32, 8))


def e3nn_jax() -> Program:
    """An equivariant layer: spherical harmonics, a tensor product, a gate."""
    import e3nn_jax as e3nn

    def loss(weights: jax.Array, positions: jax.Array) -> jax.Array:
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", positions, True)
        product = e3nn.tensor_product(harmonics, harmonics)
        scalars, vectors = product.filter("0e"), product.filter("1o")
        array = e3nn.gate(e3nn.concatenate([scalars, scalars, vectors]).regroup()).array
        return jnp.sum(jnp.tanh(array @ weights) ** 2)

    return loss, (normal(0, 14, 4) / 4, normal(1, 16, 3))


def equinox() -> Program:
    """A convolution, a norm and attention, as a module."""
    import equinox as eqx

    first, second = jax.random.split(jax.random.key(0))
    convolution = eqx.nn.Conv1d(4, 16, 3, padding=1, key=first)
    attention = eqx.nn.MultiheadAttention(2, 16, key=second)
    params, static = trainable(eqx, (convolution, eqx.nn.LayerNorm(16), attention))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        convolution, norm, attention = eqx.combine(params, static)
        h = jax.nn.relu(convolution(x)).T
        h = h + jax.vmap(norm)(h)
        return jnp.sum(attention(h, h, h) ** 2)

    return loss, (params, normal(1, 4, 24))


def flowjax() -> Program:
    """The likelihood of a masked autoregressive flow with splines: searches for bins."""
    import equinox as eqx
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from paramax import unwrap

    flow = masked_autoregressive_flow(
        jax.random.key(0),
        base_dist=Normal(jnp.zeros(4)),
        transformer=RationalQuadraticSpline(knots=4, interval=3),
        flow_layers=2,
        nn_width=8,
    )
    params, static = trainable(eqx, flow)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return -unwrap(eqx.combine(params, static)).log_prob(x).mean()

    return loss, (params, normal(1, 16, 4))


def haiku() -> Program:
    """A recurrent network over time, unrolled by the package, behind a convolution."""
    import haiku as hk

    def network(x: jax.Array) -> jax.Array:
        h = hk.Conv1D(8, 3)(x)
        h = hk.LayerNorm(-1, True, True)(jax.nn.gelu(h))
        core = hk.LSTM(8)
        out, _ = hk.dynamic_unroll(core, h.swapaxes(0, 1), core.initial_state(len(h)))
        return jnp.sum(hk.Linear(4)(out) ** 2)

    made = hk.without_apply_rng(hk.transform(network))
    x = normal(0, 3, 12, 4)
    return made.apply, (made.init(jax.random.key(0), x), x)


def jaxopt() -> Program:
    """The implicit gradient of a minimum in its regularisation, and a projection."""
    import jaxopt as jo

    def loss(x: jax.Array, y: jax.Array, scale: jax.Array) -> jax.Array:
        def objective(w: jax.Array, scale: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w) - y) ** 2) + scale * jnp.sum(w**2)

        solver = jo.GradientDescent(objective, maxiter=50, tol=1e-10, implicit_diff=True)
        w = solver.run(jnp.zeros(5), scale, x, y).params
        onto = jo.projection.projection_simplex(w)
        return jnp.sum(w**3) + jnp.sum(jnp.sin(3 * onto) * w)

    return loss, (normal(0, 20, 5), jnp.tanh(normal(1, 20)), jnp.asarray(0.3))


def jraph() -> Program:
    """Graph convolution and attention, with the softmax and the largest of every segment."""
    import jraph as jr

    nodes, edges = 12, 30
    senders, receivers = jnp.arange(edges) % nodes, (jnp.arange(edges) * 7 + 3) % nodes

    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        convolve = jr.GraphConvolution(lambda x: jnp.tanh(x @ w), add_self_edges=True)
        attend = jr.GAT(
            lambda x: x @ v,
            lambda a, b, e: jax.nn.leaky_relu((a * b).sum(-1, keepdims=True)),
            jax.nn.elu,
        )
        graph = jr.GraphsTuple(
            nodes=x,
            edges=jnp.ones((edges, 4)),
            senders=senders,
            receivers=receivers,
            n_node=jnp.array([nodes]),
            n_edge=jnp.array([edges]),
            globals=None,
        )
        h = attend(convolve(graph)).nodes
        largest = jr.segment_max(h[senders], receivers, nodes)
        shares = jr.segment_softmax(h[senders, 0], receivers, nodes)
        return jnp.sum(h**2) + jnp.sum(largest) + jnp.sum(shares**2)

    return loss, (normal(0, 6, 8) / 2, normal(1, 8, 8) / 2, normal(2, nodes, 6))


def lineax() -> Program:
    """A solve by conjugate gradients, and one by a decomposition."""
    import lineax as lx

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        matrix = a @ a.T + 4 * jnp.eye(len(a))
        positive = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        first = lx.linear_solve(positive, b, lx.CG(rtol=1e-12, atol=1e-12)).value
        second = lx.linear_solve(lx.MatrixLinearOperator(jnp.sin(a) + 3 * jnp.eye(len(a))), b).value
        return jnp.sum(jnp.tanh(first) * second)

    return loss, (normal(0, 12, 12), normal(1, 12))


def mctx() -> Program:
    """A policy loss after a tree search, which is a `while_loop` in a `scan` that no gradient goes through."""
    import mctx as mx

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def step(_: Any, key: Any, action: jax.Array, state: jax.Array) -> Any:
            state = jnp.tanh(state + 0.1 * action[:, None])
            logits = state @ w
            found = mx.RecurrentFnOutput(
                reward=0.1 * logits.sum(-1),
                discount=jnp.full(action.shape, 0.9),
                prior_logits=logits,
                value=logits.max(-1),
            )
            return found, state

        logits = x @ w
        root = mx.RootFnOutput(prior_logits=logits, value=jnp.tanh(logits).sum(-1), embedding=x)
        search = mx.gumbel_muzero_policy((), jax.random.key(0), root, step, num_simulations=8)
        targets = jax.lax.stop_gradient(search.action_weights)
        return -jnp.sum(targets * jax.nn.log_softmax(logits))

    return loss, (normal(0, 6, 4), normal(1, 3, 6))


def numpyro() -> Program:
    """The evidence bound of a logistic regression with a hierarchical prior."""
    import numpyro as npr
    from numpyro import distributions as dist
    from numpyro.infer import Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    x = normal(0, 32, 4)
    y = (x.sum(-1) > 0).astype(jnp.int32)

    def model() -> None:
        scale = npr.sample("scale", dist.HalfNormal(1.0))
        w = npr.sample("w", dist.Normal(jnp.zeros(4), scale).to_event(1))
        npr.sample("y", dist.Bernoulli(logits=jnp.tanh(x @ w)), obs=y)

    guide = AutoNormal(model)
    seeded = npr.handlers.seed(guide, jax.random.key(0))
    with npr.handlers.block():
        found = npr.handlers.trace(seeded).get_trace()
    params = {k: jnp.asarray(v["value"]) for k, v in found.items() if v["type"] == "param"}
    bound = Trace_ELBO(num_particles=2)

    def loss(params: Any, noise: jax.Array) -> jax.Array:
        return bound.loss(jax.random.key(1), params, model, guide) + jnp.sum(noise**2)

    return loss, (params, normal(2, 3))


def optimistix() -> Program:
    """The implicit derivative of a fixed point and of a least-squares fit."""
    import optimistix as optx

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        point = optx.fixed_point(
            lambda y, w: jnp.tanh(y @ w + x), optx.FixedPointIteration(1e-10, 1e-10), x, w
        ).value
        fit = optx.least_squares(
            lambda c, w: jnp.exp(-c[0] * jnp.linspace(0, 1, 8)) + c[1] - w[0],
            optx.LevenbergMarquardt(1e-10, 1e-10),
            jnp.ones(2),
            w,
            throw=False,
        ).value
        return jnp.sum(point**2) + jnp.sum(fit**2)

    return loss, (normal(0, 8, 8) / 8, normal(1, 8))


def ott() -> Program:
    """The cost of entropic transport between two clouds: Sinkhorn's iterations."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        geometry = pointcloud.PointCloud(x, y, epsilon=0.5)
        solver = sinkhorn.Sinkhorn(max_iterations=30, implicit_diff=None, min_iterations=30)
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost

    return loss, (normal(0, 16, 3), normal(1, 12, 3))


def penzai() -> Program:
    """Named arrays and a small network of its layers."""
    from penzai import pz
    from penzai.models import simple_mlp

    model = simple_mlp.MLP.from_config(
        name="mlp",
        init_base_rng=jax.random.key(0),
        feature_sizes=[6, 16, 16, 3],
        activation_fn=lambda x: jax.nn.gelu(x),
    )
    params, structure = jax.tree.flatten(pz.unbind_params(model, freeze=True)[1])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        bound = pz.bind_variables(
            pz.unbind_params(model)[0], [v.unfreeze_as_copy() for v in structure.unflatten(params)]
        )
        named = pz.nx.wrap(x).tag("batch", "features")
        return jnp.sum(bound(named).unwrap("batch", "features") ** 2)

    return loss, (params, normal(1, 8, 6))


def rlax() -> Program:
    """An actor-critic's loss: V-trace, clipped ratios, entropy."""
    import rlax as rl

    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        logits, values = jnp.tanh(x @ w), jnp.tanh(x @ v)
        actions = jnp.argmax(x[:-1, :4], -1)
        old = jnp.sin(logits[:-1])
        ratio = rl.categorical_importance_sampling_ratios(logits[:-1], old, actions)
        ones = jnp.full(len(actions), 0.95)
        out = rl.vtrace_td_error_and_advantage(values[:-1], values[1:], x[:-1, 0], ones, ratio)
        policy = rl.clipped_surrogate_pg_loss(ratio, out.pg_advantage, 0.2)
        spread = rl.entropy_loss(logits[:-1], ones)
        return policy + jnp.mean(out.errors**2) + 0.01 * spread

    return loss, (normal(0, 6, 4), normal(1, 6), normal(2, 17, 6))


def tinygp() -> Program:
    """The likelihood of a Gaussian process: Cholesky and triangular solves."""
    import tinygp as gp

    def loss(theta: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        kernel = jnp.exp(theta[0]) * gp.kernels.Matern52(jnp.exp(theta[1]))
        process = gp.GaussianProcess(kernel + gp.kernels.DotProduct(), x, diag=jnp.exp(theta[2]))
        return -process.log_probability(y)

    x = jnp.sort(normal(1, 24))
    return loss, (jnp.array([0.1, -0.2, -1.0]), x, jnp.sin(3 * x))


PROGRAMS = {
    "blackjax": blackjax,
    "diffrax": diffrax,
    "distrax": distrax,
    "e3nn_jax": e3nn_jax,
    "equinox": equinox,
    "flowjax": flowjax,
    "haiku": haiku,
    "jaxopt": jaxopt,
    "jraph": jraph,
    "lineax": lineax,
    "mctx": mctx,
    "numpyro": numpyro,
    "optimistix": optimistix,
    "ott": ott,
    "penzai": penzai,
    "rlax": rlax,
    "tinygp": tinygp,
}


def worst(found: Any, expected: Any) -> float:
    """The largest difference of two gradients, in units of the largest element."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    apart = [float(jnp.max(jnp.abs(a - b), initial=0.0)) for a, b in pairs]
    scale = max(float(jnp.max(jnp.abs(b), initial=0.0)) for b in jax.tree.leaves(expected))
    assert np.isfinite(scale) and scale > 0
    return max(apart) / scale


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_gradients_are_those_of_plain_jax(package: str) -> None:
    pytest.importorskip(package)
    function, args = PROGRAMS[package]()
    every = tuple(range(len(args)))

    def tagged(*args: Any) -> jax.Array:
        return checkpoint_name(function(*args), "loss")  # `names` wants a name

    expected = jax.jit(jax.value_and_grad(function, every))(*args)
    for name in POLICIES:
        policy = get_policy(name)
        if hasattr(policy, "seconds"):
            policy = dataclasses.replace(policy, seconds=SECONDS)
        for budget in (None, BUDGET) if hasattr(policy, "decide_within") else (None,):
            wrapped = remat.checkpoint(tagged, remat_policy=policy, budget=budget)
            try:
                found = jax.jit(jax.value_and_grad(wrapped, every))(*args)
            except BudgetError:
                assert budget is not None
                continue
            error = worst(found, expected)
            assert error < 1e-9, (name, budget, error)
