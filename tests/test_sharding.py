"""Programs over several devices: four CPU devices in a process of their own."""

from __future__ import annotations

from tests.programs import run_on_devices

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import remat

assert len(jax.devices()) == 4
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
P = jax.sharding.PartitionSpec
put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))

def loss(w, x, key):
    h = jax.nn.relu(x @ w)
    h = jax.lax.with_sharding_constraint(h, jax.sharding.NamedSharding(mesh, P("data", "model")))
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)
    return jnp.sum(jnp.tanh(h @ w.T) ** 2)

w = put(jax.random.normal(jax.random.key(0), (64, 512)) / 8, None, "model")
x = put(jax.random.normal(jax.random.key(1), (256, 64)), "data")
want = jax.jit(jax.grad(loss))(w, x, jax.random.key(2))
for policy in ("min_cut", "full", "save_all"):
    for lowering in ("staged", "policy"):
        ours = remat.checkpoint(loss, remat_policy=policy, lowering=lowering)
        got = jax.jit(jax.grad(ours))(w, x, jax.random.key(2))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert got.sharding.is_equivalent_to(want.sharding, 2), (got.sharding, want.sharding)

def mapped(f):
    body = lambda w, x: jax.lax.psum(f(w, x), ("data", "model"))
    return jax.shard_map(body, mesh=mesh, in_specs=(P(), P(("data", "model"))), out_specs=P())

def local(w, x):
    return jnp.sum(jnp.tanh(jax.nn.relu(x @ w) @ w.T) ** 2)

want = jax.jit(jax.grad(mapped(local)))(w, x)
value = mapped(local)(w, x)
for policy in ("min_cut", "full"):
    for lowering in ("staged", "policy"):
        ours = mapped(remat.checkpoint(local, remat_policy=policy, lowering=lowering))
        for run in (ours, jax.jit(ours)):
            np.testing.assert_allclose(run(w, x), value, rtol=1e-5)
            for gradient in (jax.grad(run), jax.jit(jax.grad(run))):
                np.testing.assert_allclose(gradient(w, x), want, rtol=1e-4, atol=1e-4)
            over = jax.vmap(jax.value_and_grad(run), in_axes=(None, 0))
            values, gradients = over(w, jnp.stack([x, x]))
            np.testing.assert_allclose(values[1], value, rtol=1e-5)
            np.testing.assert_allclose(gradients[1], want, rtol=1e-4, atol=1e-4)
print("sharded gradients agree")
"""


def test_gradients_and_shardings_on_four_devices() -> None:
    assert "sharded gradients agree" in run_on_devices(PROGRAM, 4)
