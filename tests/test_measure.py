"""Measured costs: what is run, what is remembered, what is told apart. Never how long it takes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import Mesh, PartitionSpec

import remat
from models import cases
from remat.compiler.remembered import default_cache_dir
from remat.core.cost import op_seconds
from remat.core.devices import get_device
from remat.core.errors import CompileError, PolicyError, TraceError
from remat.tools import measure as measuring
from remat.tools.alone import describe, index_bound, key_of, made_up
from remat.tools.costs_file import CostsFile, kind_of
from remat.tools.measure import Costs, measure, measure_joint
from remat.trace.joint import Joint, trace_joint, trace_primal

CPU = get_device("cpu")


def joint_of(function: Any, *args: Any) -> Joint:
    """The joint program of a function of arrays, differentiated with respect to the inexact ones."""

    def flat(*inputs: Any) -> tuple[list[Any], None]:
        return [function(*inputs)], None

    program, _ = trace_primal(flat, args)
    perturbed = [jnp.issubdtype(program.avals[v].dtype, jnp.inexact) for v in program.inputs]
    return trace_joint(program, args, perturbed)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(w1: jax.Array, w2: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w1) @ w2))


MLP = (mlp, f32(8, 16), f32(16, 8), f32(4, 8))
PRODUCTS = 6  # two, and two gradients of each, all of different shapes


class FakeClock:
    """Stands in for running: counts, and gives every operator a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.fail_after = math.inf
        self.error: BaseException = KeyboardInterrupt()
        monkeypatch.setattr(measuring, "seconds_alone", self)

    def __call__(self, program: Any, index: int, device: Any, repeats: int) -> float:
        if len(self.ran) >= self.fail_after:
            raise self.error
        self.ran.append(describe(program, index))
        return float(len(self.ran))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield


def cache_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


# --- really running


def test_heavy_operators_are_measured_and_the_others_estimated(tmp_path: Path) -> None:
    joint = joint_of(*MLP)
    costs = measure_joint(joint, cache_dir=tmp_path, repeats=2)
    heavy = {op.id for op in joint.graph.ops if op.name == "dot_general"}
    assert costs.measured == heavy and len(heavy) == PRODUCTS and not costs.reasons
    assert (
        costs.executed == PRODUCTS
    )  # two products, two gradients of each, all of different shapes
    assert set(costs.seconds) == {op.id for op in joint.graph.ops}
    for op in joint.graph.ops:
        if op.id in heavy:
            assert 0 < costs.seconds[op.id] < 60
        else:
            assert costs.seconds[op.id] == op_seconds(joint.graph, op, CPU)
    assert costs.fingerprint == joint.graph.fingerprint()
    assert (costs.device, costs.estimated_as) == ("cpu", "cpu")
    assert costs.measured_seconds == {op: costs.seconds[op] for op in sorted(heavy)}
    assert costs.total_seconds == math.fsum(costs.seconds.values())
    assert str(costs).startswith(f"6 of {len(joint.graph.ops)} operators measured on cpu: ")


def test_every_kind_of_operand_can_be_made_up_and_run(tmp_path: Path) -> None:
    def function(table: jax.Array, bits: Any, key: jax.Array, index: jax.Array) -> jax.Array:
        picked = table[index]
        mask = jax.random.bernoulli(key, 0.5, picked.shape) | bits
        ordered = jnp.sort(jnp.where(mask, picked, 0), axis=0)
        looped, _ = jax.lax.scan(lambda c, k: (c + jax.random.normal(k, c.shape), None), ordered,
                                 jax.random.split(key, 3))  # fmt: skip
        pooled = jax.lax.reduce_window(looped, -jnp.inf, jax.lax.max, (3, 1), (1, 1), "SAME")
        return jnp.sum(jnp.cumsum(pooled, axis=1).astype(jnp.bfloat16) ** 2)

    args = (f32(20, 4), jax.ShapeDtypeStruct((7, 4), jnp.bool_), cases.gpt.key_shape(),
            jax.ShapeDtypeStruct((7,), jnp.int32))  # fmt: skip
    joint = joint_of(function, *args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs = measure_joint(joint, cache_dir=tmp_path, repeats=1)
    names = {joint.graph.ops[op].name for op in costs.measured}
    assert {"scan", "sort", "scatter-add", "cumsum", "reduce_window_max"} <= names
    assert not costs.reasons


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64"])
def test_made_up_operands_are_of_their_type_and_within_bounds(dtype: str) -> None:
    array = made_up(jax.ShapeDtypeStruct((3, 50), jnp.dtype(dtype)), 7)
    assert (array.shape, array.dtype) == ((3, 50), jnp.dtype(dtype))
    values = np.asarray(array, np.complex64 if dtype == "complex64" else np.float32)
    assert np.all(np.abs(values) <= (7 if "int" in dtype else 1))
    distinct = len(np.unique(values))
    assert distinct == {"bool": 2, "int8": 7, "uint32": 7}.get(dtype, distinct) > 1


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_made_up_keys_are_of_their_implementation(impl: str) -> None:
    want = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), 3))
    made = made_up(want, 8)
    assert (made.shape, made.dtype) == (want.shape, want.dtype)


def test_indices_stay_inside_the_array_they_index() -> None:
    joint = joint_of(lambda table, index: jnp.sum(table[index] ** 2), f32(5, 4),
                     jax.ShapeDtypeStruct((9,), jnp.int32))  # fmt: skip
    bounds = {
        eqn.source.primitive.name: index_bound(joint.program, i)
        for i, eqn in enumerate(joint.program.equations)
    }
    assert bounds["gather"] == bounds["scatter-add"] == 5
    assert bounds["mul"] == 8


def test_measuring_while_tracing_runs_all_the_same(tmp_path: Path) -> None:
    joint = joint_of(*MLP)
    found: list[Costs] = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        found.append(measure_joint(joint, cache_dir=tmp_path, repeats=1))
        return x

    traced(jnp.zeros(()))
    assert found[0].executed == PRODUCTS
    assert all(isinstance(s, float) for s in found[0].seconds.values())


# --- remembering


def test_a_second_call_executes_nothing(tmp_path: Path, clock: FakeClock) -> None:
    joint = joint_of(*MLP)
    first = measure_joint(joint, cache_dir=tmp_path)
    content, ran = cache_file(tmp_path).read_bytes(), len(clock.ran)
    again = measure_joint(joint_of(*MLP), cache_dir=tmp_path)
    assert len(clock.ran) == ran == first.executed == PRODUCTS
    assert again.executed == 0
    assert (again.seconds, again.measured) == (first.seconds, first.measured)
    assert cache_file(tmp_path).read_bytes() == content


def test_a_second_process_executes_nothing(tmp_path: Path, clock: FakeClock) -> None:
    """Keys do not depend on addresses or on the hash seed, not even those of functions in parameters."""
    code = """
import sys
from pathlib import Path
from tests import test_measure
from remat.tools import measure
measure.seconds_alone = None  # calling it raises
joint = test_measure.joint_of(*test_measure.with_a_function())
print(measure.measure_joint(joint, cache_dir=Path(sys.argv[1])).executed)
"""
    costs = measure_joint(joint_of(*with_a_function()), cache_dir=tmp_path)
    assert costs.executed > 5
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0"


def with_a_function() -> tuple[Any, ...]:
    """Has functions among its parameters: a loop over a `custom_vjp`, and a kernel."""

    @jax.custom_vjp
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    def function(w1: jax.Array, w2: jax.Array, x: jax.Array) -> jax.Array:
        frozen = jax.lax.scan(lambda c, _: (double(c), None), jax.lax.stop_gradient(x), length=3)
        return mlp(w1, w2, x) + jnp.sum(x * kernel(frozen[0], flip=False))

    return function, *MLP[1:]


def kernel(x: jax.Array, *, flip: bool) -> jax.Array:
    """Twice a matrix, row by row; `flip` turns it upside down, in the index map alone."""
    rows, columns = x.shape

    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    return pallas.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows,),
        in_specs=[pallas.BlockSpec((1, columns), lambda i: (rows - 1 - i if flip else i, 0))],
        out_specs=pallas.BlockSpec((1, columns), lambda i: (i, 0)),
        interpret=True,
    )(x)


def test_an_interrupt_loses_nothing_that_is_finished(tmp_path: Path, clock: FakeClock) -> None:
    clock.fail_after = 3
    with pytest.raises(KeyboardInterrupt):
        measure_joint(joint_of(*MLP), cache_dir=tmp_path)
    assert len(json.loads(cache_file(tmp_path).read_text())["seconds"]) == 3
    clock.fail_after = math.inf
    assert measure_joint(joint_of(*MLP), cache_dir=tmp_path).executed == PRODUCTS - 3
    assert len(clock.ran) == len(set(clock.ran)) == PRODUCTS


def test_what_another_process_adds_meanwhile_is_kept(tmp_path: Path, clock: FakeClock) -> None:
    kind = kind_of(jax.devices("cpu")[0])
    ours, theirs = CostsFile(tmp_path, kind), CostsFile(tmp_path, kind)
    theirs.add("theirs", 2.0, "theirs")
    ours.add("ours", 1.0, "ours")
    both = CostsFile(tmp_path, kind)
    assert (both["ours"], both["theirs"]) == (1.0, 2.0)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]  # no temporary file is left


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/somewhere", "/somewhere/remat"), ("", "HOME/.cache/remat"), ("rel", "HOME/.cache/remat")],
)
def test_default_folder(variable: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    wanted = Path(expected.replace("HOME", str(Path.home())))
    assert default_cache_dir() == wanted
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "remat"


def test_the_file_is_of_one_device_and_one_jax(tmp_path: Path, clock: FakeClock) -> None:
    measure_joint(joint_of(*MLP))
    path = cache_file(tmp_path / "xdg" / "remat")
    assert path.name.startswith("costs-cpu-") and path.name.endswith(f"-jax-{jax.__version__}.json")
    data = json.loads(path.read_text())
    assert data["jax"] == jax.__version__ and data["device"].startswith("cpu ")
    operators = [entry["operator"] for entry in data["seconds"].values()]
    assert sorted(operators) == sorted(clock.ran)
    assert "dot_general(float32[4,8], float32[8,16])" in operators


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"format": 1, "seconds": []}',
        b'{"format": 99, "seconds": {}}',
        b'{"format": 1, "device": "another", "jax": "0.0", "seconds": {}}',
        "bad entry",
        "not finite",
        "negative",
    ],
)
def test_a_corrupted_file_is_ignored_with_a_warning_and_rewritten(
    content: bytes | str, tmp_path: Path, clock: FakeClock
) -> None:
    joint = joint_of(*MLP)
    measure_joint(joint, cache_dir=tmp_path)
    path = cache_file(tmp_path)
    if isinstance(content, str):
        data = json.loads(path.read_text())
        first = next(iter(data["seconds"]))
        wrong: Any = {
            "bad entry": 3,
            "not finite": {"seconds": math.nan},
            "negative": {"seconds": -1},
        }
        data["seconds"][first] = wrong[content]
        content = json.dumps(data).encode()
    path.write_bytes(content)
    with pytest.warns(
        RuntimeWarning, match="is not a file of measured costs.*ignored.*rewritten"
    ) as w:
        costs = measure_joint(joint, cache_dir=tmp_path)
    assert len(w) == 1 and costs.executed == PRODUCTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = measure_joint(joint, cache_dir=tmp_path)
    assert again.executed == 0 and again.seconds == costs.seconds


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, clock: FakeClock) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(RuntimeWarning) as caught:
        costs = measure_joint(joint_of(*MLP), cache_dir=blocked / "below")
    (told,) = [w for w in caught if "not remembered" in str(w.message)]
    assert "pass cache_dir= or set XDG_CACHE_HOME" in str(told.message)
    assert costs.executed == PRODUCTS and len(costs.measured) == PRODUCTS


# --- keys


def keys_of(function: Any, *args: Any) -> list[str]:
    joint = joint_of(function, *args)
    groups, _ = measuring._groups(joint)
    return list(groups)


def test_equal_operators_share_a_key_and_are_measured_once(clock: FakeClock) -> None:
    def deep(weights: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(10):
            x = jnp.tanh(x @ weights)
        return jnp.sum(x)

    costs = measure_joint(joint_of(deep, f32(8, 8), f32(4, 8)))
    assert (len(costs.measured), costs.executed) == (30, 3)  # forward, d x and d weights
    assert len({costs.seconds[op] for op in costs.measured}) == 3


def conv(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    return jnp.sum(jax.lax.conv_general_dilated(x, kernel, **options))


PLAIN = {"window_strides": (1, 1), "padding": "SAME"}


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((1, 3, 8, 8), (4, 3, 3, 3)), {"window_strides": (2, 2), "padding": "SAME"}),
        (((1, 3, 8, 8), (4, 3, 3, 3)), {"window_strides": (1, 1), "padding": "VALID"}),
        (((2, 3, 8, 8), (4, 3, 3, 3)), PLAIN),
        (((1, 3, 8, 8), (4, 3, 5, 5)), PLAIN),
        (((1, 3, 8, 8), (4, 3, 3, 3)), {**PLAIN, "precision": "highest"}),
    ],
    ids=["strides", "padding", "batch", "kernel", "precision"],
)
def test_parameters_and_shapes_are_told_apart(shapes: Any, options: dict[str, Any]) -> None:
    def keys(shapes: Any, options: dict[str, Any]) -> set[str]:
        return set(keys_of(lambda x, k: conv(x, k, **options), *(f32(*s) for s in shapes)))

    plain = keys(((1, 3, 8, 8), (4, 3, 3, 3)), PLAIN)
    assert plain == keys(((1, 3, 8, 8), (4, 3, 3, 3)), PLAIN)
    assert len(plain) == 3  # forward and two gradients
    assert not plain & keys(shapes, options)


def test_dtypes_and_literals_are_told_apart() -> None:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum((x @ y).astype(jnp.float32))

    def window(init: float) -> Any:
        return lambda x: jnp.sum(jax.lax.cumsum(jax.lax.scan(
            lambda c, _: (c * init, None), x, length=2)[0]))  # fmt: skip

    half = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    assert not set(keys_of(product, f32(4, 4), f32(4, 4))) & set(keys_of(product, half, half))
    two, three = set(keys_of(window(2.0), f32(4))), set(keys_of(window(3.0), f32(4)))
    assert len(two - three) == len(three - two) == 2  # the loop and its transpose; not the cumsum


def test_kernels_that_print_alike_are_told_apart() -> None:
    def keys(flip: bool) -> set[str]:
        def function(x: jax.Array) -> jax.Array:
            return jnp.sum(x * kernel(jax.lax.stop_gradient(x), flip=flip))

        return set(keys_of(function, f32(4, 8)))

    assert len(keys(True)) == len(keys(False)) == 1
    assert keys(True) == keys(True) != keys(False)


def test_addresses_take_no_part() -> None:
    def key() -> str:
        def function(x: jax.Array) -> jax.Array:
            return x * jax.pure_callback(lambda v: v, f32(4), x)

        program, _ = trace_primal(lambda x: ([function(x)], None), [f32(4)])
        names = [equation.source.primitive.name for equation in program.equations]
        params = program.equations[names.index("pure_callback")].source.params
        printed.append(" ".join(map(str, params.values())))
        alive.append(program)  # else the second may lie where the first one lay
        return key_of(program, names.index("pure_callback"))

    printed: list[str] = []
    alive: list[object] = []
    assert key() == key()
    assert printed[0] != printed[1] and all("0x" in text for text in printed)


# --- what cannot run alone


def test_data_dependent_and_effectful_operators_are_estimated_with_a_reason(
    tmp_path: Path, clock: FakeClock
) -> None:
    def function(x: jax.Array) -> jax.Array:
        steps = jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, c[1] * 2), (0, 1))
        jax.debug.print("x {}", x[0])
        x = jax.lax.cond(steps[1] > 3, jnp.sin, jnp.cos, x)
        shift = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.int32), steps[1])
        inside = jax.lax.scan(
            lambda c, _: (jax.lax.while_loop(lambda v: v < 5, lambda v: v + 1, c), None), shift,
            length=2)[0]  # fmt: skip
        x = jax.lax.optimization_barrier(x) * inside.astype(x.dtype)
        return jnp.sum(jnp.cumsum(x))

    joint = joint_of(function, f32(4))
    costs = measure_joint(joint, cache_dir=tmp_path)
    reasons = {joint.graph.ops[op].name: why for op, why in costs.reasons.items()}
    assert reasons["while"] == "a while loop runs as often as its data say"
    assert reasons["scan"] == "a while loop runs as often as its data say"
    assert reasons["cond"] == "which branch runs depends on data"
    assert reasons["optimization_barrier"] == "is an identity that only constrains the compiler"
    assert reasons["pure_callback"] == "has side effects or calls the host"
    assert {joint.graph.ops[op].name for op in costs.measured} == {"cumsum"}
    for op in costs.reasons:
        assert costs.seconds[op] == op_seconds(joint.graph, joint.graph.ops[op], CPU)
    assert "of them because they cannot run alone" in str(costs)


def test_operators_on_a_mesh_are_estimated(clock: FakeClock) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))

    def local(x: jax.Array) -> jax.Array:
        found.append(measure_joint(joint_of(lambda v: jnp.sum(v @ v.T), x)))
        return x

    found: list[Costs] = []
    spec = PartitionSpec("data")
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.zeros((4, 4)))
    assert set(found[0].reasons.values()) == {"is placed on a mesh of devices"}
    assert not clock.ran and len(found[0].reasons) == 3

    def whole(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x))

    joint = joint_of(whole, f32(4, 4))
    reasons = {joint.graph.ops[op].name: r for op, r in measure_joint(joint).reasons.items()}
    assert reasons["shard_map"] in ("runs on several devices", "is placed on a mesh of devices")


def test_an_operator_that_fails_is_estimated_and_told_and_not_remembered(
    tmp_path: Path, clock: FakeClock
) -> None:
    joint = joint_of(*MLP)
    clock.fail_after, clock.error = 5, RuntimeError("RESOURCE_EXHAUSTED:\n out of memory")
    with pytest.warns(RuntimeWarning, match="1 of 6 distinct operators are estimated: dot_general"):
        costs = measure_joint(joint, cache_dir=tmp_path)
    (op,) = costs.reasons
    assert costs.reasons[op].endswith("RuntimeError: RESOURCE_EXHAUSTED: out of memory")
    assert costs.seconds[op] == op_seconds(joint.graph, joint.graph.ops[op], CPU)
    assert op not in costs.measured and costs.executed == 5
    clock.fail_after = math.inf
    assert measure_joint(joint, cache_dir=tmp_path).executed == 1


# --- for users


def test_measure_is_of_the_graph_that_plan_plans(clock: FakeClock) -> None:
    function, args = cases.gpt_blocks_scan_small()
    plan = remat.plan(function, *args)
    costs = measure(function, *args)
    assert costs.fingerprint == plan.graph.fingerprint()
    assert sum(plan.graph.ops[op].name == "scan" for op in costs.measured) == 2
    ran = len(clock.ran)
    assert measure(function, *args, remat_policy=plan).seconds == costs.seconds
    assert len(clock.ran) == ran > 0


def test_measure_takes_what_plan_takes(clock: FakeClock) -> None:
    def function(x: jax.Array, weights: Any, twice: bool, *, scale: float) -> jax.Array:
        y = jnp.tanh(x @ weights["w"])
        return jnp.sum(y @ weights["w"] if twice else y) * scale

    args = (f32(4, 4), {"w": f32(4, 4)})
    options: dict[str, Any] = {"argnums": (0, 1), "static_argnums": 2}
    for twice, products in ((False, 3), (True, 6)):
        plan = remat.plan(function, *args, twice, scale=2.0, **options)
        costs = measure(function, *args, twice, scale=2.0, **options)
        assert costs.fingerprint == plan.graph.fingerprint()
        assert len(costs.measured) == products
    with pytest.raises(TraceError, match="argnums"):
        measure(function, *args, True, scale=2.0, static_argnums=2, argnums=5)
    with pytest.raises(PolicyError, match="makes no plan"):
        measure(function, *args, True, scale=2.0, static_argnums=2, remat_policy="dots_saveable")
    with pytest.raises(PolicyError, match="nested_checkpoints"):
        measure(function, *args, True, scale=2.0, static_argnums=2, nested_checkpoints="keep")


def test_progress_has_one_line_for_every_operator_that_runs(clock: FakeClock) -> None:
    lines: list[str] = []
    measure_joint(joint_of(*MLP), progress=lines.append)
    assert lines == [f"measuring {i}/6: {name}" for i, name in enumerate(clock.ran, start=1)]
    measure_joint(joint_of(*MLP), progress=lines.append)
    assert len(lines) == PRODUCTS


def test_estimates_are_of_the_device_asked_for(clock: FakeClock) -> None:
    joint = joint_of(*MLP)
    costs = measure_joint(joint, estimate_as="h100")
    sheet = get_device("h100")
    rest = [op for op in joint.graph.ops if op.id not in costs.measured]
    assert rest and all(costs.seconds[op.id] == op_seconds(joint.graph, op, sheet) for op in rest)
    assert costs.estimated_as == "h100"
    with pytest.raises(CompileError, match="did you mean 'h100'"):
        measure_joint(joint, estimate_as="h10")


def test_an_unknown_device_asks_for_its_likeness(clock: FakeClock) -> None:
    class Strange:
        platform, device_kind = "gpu", "NVIDIA Strange 1"

    with pytest.raises(CompileError, match=r"no data sheet.*Strange 1.*estimate_as='a100'"):
        measure_joint(joint_of(*MLP), device=Strange())  # pyright: ignore[reportArgumentType]
    assert not clock.ran


@pytest.mark.parametrize("repeats", [0, -3])
def test_repeats_must_be_positive(repeats: int) -> None:
    with pytest.raises(ValueError, match=f"repeats={repeats}: expected at least 1"):
        measure_joint(joint_of(*MLP), repeats=repeats)
