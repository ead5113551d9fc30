"""Programs over several devices: four CPU devices in a process of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.lower import confirm
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
import itertools, jax, jax.numpy as jnp, numpy as np, remat, warnings
from jax.sharding import AxisType, PartitionSpec as P
from remat.policies import Ilp

backwards = jax.devices()[::-1]
mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2, devices=backwards)
w = jax.random.normal(jax.random.key(0), (64, 64)) / 8
x = jax.random.normal(jax.random.key(1), (2048, 64))
around = [(0, 1), (1, 0)]
collectives = {
    "none": lambda x: x,
    "psum": lambda x: jax.lax.pmean(x, "d"),
    "all_gather": lambda x: jnp.mean(jax.lax.all_gather(x, ("d", "m")), 0),
    "axis_index": lambda x: x * jax.lax.axis_index("m"),
    "ppermute": lambda x: jax.lax.ppermute(x, "m", around),
}

def case(collective, checked, lowering, mapped_axes=("d", "m"), **options):
    def loss(w, x):
        for _ in range(8):
            x = jnp.tanh(collective(x) @ w)
        return jnp.mean(x**2)

    found = []
    options.update(lowering=lowering, confirm="attached")
    def step(f, transform=jax.value_and_grad):
        def local(w, x):
            if f is not loss and not found:
                found.append(remat.plan(loss, w, x, **options))
            return jax.tree.map(lambda result: result[None], transform(f)(w, x))
        split = P(mapped_axes)
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), split), out_specs=split,
                                     axis_names=set(mapped_axes), check_vma=checked))

    ours = remat.checkpoint(loss, **options)
    for a, b in zip(step(ours)(w, x), step(loss)(w, x)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    steps = step(ours), step(ours, jax.grad)
    used = max(remat.compile_report(f, w, x, device="cpu").temp_bytes for f in steps)
    [plan] = found
    assert plan.confirmed.device == "cpu"
    # Results that are scalars may be on their own or not; 64 bytes is what XLA aligns to.
    assert abs(plan.confirmed.temp_bytes - used) <= 64, (options, checked, plan.confirmed, used)
    return plan, used

with warnings.catch_warnings():
    warnings.simplefilter("error", remat.RematWarning)
    for (name, collective), checked in itertools.product(collectives.items(), (True, False)):
        for lowering in ("staged", "policy") if name == "psum" else ("staged",):
            case(collective, checked, lowering, remat_policy="full" if checked else "save_all")
    _, plain = case(collectives["none"], True, "staged", remat_policy="save_all")
    plan, used = case(collectives["none"], True, "staged", remat_policy=Ilp(seconds=2.0), budget=0.9)
    assert used <= plan.budget_bytes < plain, (used, plan.budget_bytes, plain)
    # Mapped over one axis of two: the other one is jax's own affair.
    case(collectives["psum"], False, "staged", ("d",), remat_policy="full")
    with jax.set_mesh(mesh):
        case(collectives["psum"], True, "staged", remat_policy="full")
print("confirmed as the part of a device")
"""


def test_the_compiler_is_asked_for_the_part_of_a_device() -> None:
    """What it says of a part, alone on a mesh of its own, is what the whole step takes: with collectives, too."""
    assert "confirmed as the part of a device" in run_on_devices(PART, 4)


@pytest.mark.parametrize("name", ["psum", "axis_index"])
def test_axes_of_no_mesh_are_not_compiled_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jax.make_jaxpr(axis_env=)` names axes without devices: named devices refuse, others warn."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jax.lax.pmean(x, "d") if name == "psum" else x * jax.lax.axis_index("d")
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def traced(**options: Any) -> Any:
        part = remat.checkpoint(loss, budget=1.0, **options)
        w, x = jnp.full((16, 16), 0.1), jnp.ones((64, 16))
        return jax.make_jaxpr(jax.grad(part), axis_env=[("d", 4)])(w, x)

    with pytest.raises(remat.CompileError, match=r"cannot be compiled alone, .*(name: d|\['d'\])"):
        traced(confirm="cpu")
    monkeypatch.setattr(confirm, "_device", lambda planner: ("cpu", ""))
    with pytest.warns(remat.RematWarning, match="met as predicted, and not confirmed"):
        traced(confirm="auto")


ABSENT = """
import jax, jax.numpy as jnp, numpy as np, remat
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from remat.compiler.targets import devices_of

attached = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
shapes = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((8192, 512), "float32")
options = dict(remat_policy="full", confirm="h200")

def loss(w, x):
    for _ in range(6):
        x = jax.lax.all_gather(jnp.tanh(x @ w), "m", axis=1, tiled=True)
    return jnp.mean(x**2)

found = []
def step(transform, mesh):
    def local(w, x):
        found.append(remat.plan(loss, w, x, **options))
        f = remat.checkpoint(loss, **options)
        return jax.tree.map(lambda result: result[None], transform(f)(w, x))
    specs = dict(in_specs=(P(None, "m"), P("d")), out_specs=P(("d", "m")))
    return jax.jit(jax.shard_map(local, mesh=mesh, **specs)).trace(*shapes)

gpus = Mesh(np.array(devices_of("h200", 4)).reshape(2, 2), ("d", "m"))
used = [
    step(transform, gpus).lower(lowering_platforms=("cuda",)).compile().memory_analysis().temp_size_in_bytes
    for transform in (jax.grad, jax.value_and_grad)
]
step(jax.grad, attached)
jax.clear_caches()
with jax.set_mesh(attached):
    step(jax.grad, attached)
    # Outside of a shard_map, too: whole arrays on one of them.
    whole = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    assert remat.plan(whole, *shapes, **options).confirmed.device == "h200"
assert len(found) == 4
assert {plan.confirmed.device for plan in found} == {"h200"}
assert {plan.confirmed.temp_bytes for plan in found} == {max(used)}, (found, used)
print("confirmed for GPUs that are not there")
"""


@pytest.mark.gpu_compile
def test_gpus_that_are_not_there_are_asked_for_the_part_of_one_of_them() -> None:
    """Wherever it is traced, on a mesh of them or one of attached devices, they say what such a step takes."""
    assert "confirmed for GPUs that are not there" in run_on_devices(ABSENT, 4)
