"""Programs over several devices: four CPU devices in a process of their own."""

from __future__ import annotations

import pytest

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


EXPLICIT = """
import jax, jax.numpy as jnp, numpy as np
import remat
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

def mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))

def array(shape, mesh, *spec):
    values = np.random.default_rng(0).normal(size=shape).astype("float32")
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))

def pool(x, window=2, padding="VALID"):
    shape, strides = (1, window, window, 1), (1, 2, 2, 1)
    return jnp.sum(jax.lax.reduce_window(jnp.sin(x), -jnp.inf, jax.lax.max, shape, strides, padding) ** 2)

def masked(x):
    y = jnp.sin(x)
    return jnp.sum(jnp.where(y >= jnp.mean(y), y, x * x) + jax.nn.relu(y) * jnp.cos(x))

def largest(x):
    y = jnp.sin(x)
    return jnp.sum(jnp.take_along_axis(y, jnp.argmax(y, 1)[:, None], 1) * jnp.cos(x)) + jnp.sum(jnp.max(y, 0) ** 2)

def looped(x):
    return jnp.sum(jax.lax.scan(lambda c, _: (jax.nn.relu(jnp.sin(c)) + c / 8, None), x, None, length=3)[0])

one, two = mesh((4,), ("m",)), mesh((2, 2), ("d", "m"))
images = 4, 8, 8, 4
cases = [
    (pool, array(images, one, "m")),
    (pool, array(images, one, None, "m")),
    (pool, array(images, two, "d", None, None, "m")),
    (lambda x: pool(jax.nn.relu(x)), array(images, one, "m")),
    (lambda x: pool(x, 3, "SAME"), array(images, one, "m")),
    (masked, array((8, 8), one, None, "m")),
    (masked, array((4, 6, 5), two, "d", "m")),
    (masked, array((16, 64), two, "d", "m")),
    (masked, array((16, 8), two, None, ("d", "m"))),
    (largest, array((8, 5), one, "m")),
    (looped, array((16, 8), two, "d", "m")),
]
for loss, x in cases:
    want = jax.jit(jax.grad(loss))(x)
    for policy in POLICIES:
        got = jax.jit(jax.grad(remat.checkpoint(loss, remat_policy=policy)))(x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert got.sharding == want.sharding, (got.sharding, want.sharding)
print("gradients agree")
"""


@pytest.mark.parametrize(
    "policies",
    [("min_cut", "full"), pytest.param(("gist", "monet", "sublinear"), marks=pytest.mark.slow)],
)
def test_shardings_that_are_part_of_the_type(policies: tuple[str, ...]) -> None:
    """Masks are packed, and pools undone, where jax asks how every result is sharded."""
    program = EXPLICIT.replace("POLICIES", repr(policies))
    assert "gradients agree" in run_on_devices(program, 4)


PART = """
import jax, jax.numpy as jnp, remat, warnings
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
w, x = jnp.full((16, 16), 0.1), jnp.ones((64, 16))

def loss(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def step(confirm, checked):
    part = remat.checkpoint(loss, budget=1.0, confirm=confirm)
    def local(w, x):
        return jax.lax.pmean(jax.grad(part)(w, x), "d")
    specs = dict(mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=checked)
    return jax.jit(jax.shard_map(local, **specs))(w, x)

step("cpu", False)
for confirm in ("cpu", "attached"):
    try:
        step(confirm, True)
    except remat.CompileError as error:
        assert "differs over its axes ['d']" in str(error) and "open an issue" not in str(error)
    else:
        raise AssertionError("compiled alone")
step(False, True)
print("refused in our words")
"""


def test_what_differs_over_a_mesh_is_not_compiled_alone() -> None:
    assert "refused in our words" in run_on_devices(PART, 4)


COLLECTIVE = """
import jax, jax.numpy as jnp, numpy as np, remat, warnings
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
w, x = jnp.full((16, 16), 0.1), jnp.ones((64, 16))
around = [(i, (i + 1) % 4) for i in range(4)]
collectives = {
    "psum": lambda x: jax.lax.pmean(x, "d"),
    "all_gather": lambda x: jnp.mean(jax.lax.all_gather(x, "d"), 0),
    "axis_index": lambda x: x * jax.lax.axis_index("d"),
    "ppermute": lambda x: jax.lax.ppermute(x, "d", around),
}

def run(collective, **options):
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.mean(collective(x) ** 2)
    part = remat.checkpoint(loss, budget=1.0, **options) if options else loss
    local = lambda w, x: jax.lax.pmean(jax.grad(part)(w, x), "d")
    specs = dict(mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
    return jax.jit(jax.shard_map(local, **specs))(w, x)

for name, collective in collectives.items():
    try:
        run(collective, confirm="cpu")
    except remat.CompileError as error:
        assert "cannot be compiled alone" in str(error), error
        assert "communicates over an axis" in str(error) or "['d']" in str(error) or (
            name == "axis_index"), error
    else:
        raise AssertionError("compiled alone")

remat.lower.confirm._device = lambda planner: ("cpu", "")  # as if it were what is attached
for name, collective in collectives.items():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", remat.RematWarning)
        got = run(collective, confirm="auto")
    assert any("met as predicted, and not confirmed" in str(w.message) for w in said)
    np.testing.assert_allclose(got, run(collective), rtol=1e-5, atol=1e-7)
print("collectives are refused")
"""


def test_what_communicates_over_a_mesh_is_not_compiled_alone() -> None:
    assert "collectives are refused" in run_on_devices(COLLECTIVE, 4)
