"""The way through the house: imports run in one direction, as `tests/rooms.py` reads them off the sources."""

from __future__ import annotations

import ast
import subprocess
import sys

import networkx as nx
import pytest

from tests.rooms import DOORS, FILES, FRAMEWORKS, ROOMS, ROOT, arrows, imports_of, room_of, targets

# Knowing exceptions, delayed until a method is called.
DELAYED = {
    ("remat.plans.plan", "remat.api"): "plan.annotate(f) applies the plan",
    ("remat.plans.plan", "jax"): "plan.policy is a policy of jax",
    ("remat.plans.plan", "remat.pictures.page"): "plan.show(), plan.to_html()",
}
WITHOUT_JAX = (*ROOMS[: ROOMS.index("compat")], "planning")
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib")
OUTSIDE = {"models", "tests", "benchmarks", "examples"}
MAX_FILES = 15
MAX_LINES = 500


def _others(module: str) -> set[str]:
    return {t for t in targets(module) if (module, t) not in DELAYED}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_lies_above_them(room: str) -> None:
    for module in (m for m in FILES if room_of(m) == room):
        for target in _others(module):
            assert ROOMS.index(room_of(target)) <= ROOMS.index(room), f"{module} -> {target}"


def test_there_are_no_circles() -> None:
    """Delayed imports count, too; a package's `__init__` stands for its modules."""
    graph = nx.DiGraph((module, target) for module in FILES for target in _others(module))
    assert not [c for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_knowing_exceptions_are_delayed_and_used() -> None:
    for module, target in DELAYED:
        found = [e for e in imports_of(module) if f"{e.name}.".startswith(f"{target}.")]
        assert found and all(e.delayed for e in found)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_small_and_have_a_purpose(room: str) -> None:
    modules = [m for m in FILES if room_of(m) == room and not m.endswith("__init__")]
    assert len(modules) <= MAX_FILES
    for module in (m for m in FILES if room_of(m) == room):
        assert ast.get_docstring(ast.parse(FILES[module].read_text())), module


@pytest.mark.parametrize("room", WITHOUT_JAX)
def test_plain_data_knows_no_jax(room: str) -> None:
    for module in (m for m in FILES if room_of(m) == room):
        for entry in imports_of(module):
            root = entry.name.split(".")[0]
            assert root not in ("jax", "jaxlib", "flax", "optax", "equinox") or (
                (module, root) in DELAYED and entry.delayed
            ), module


def test_plain_data_is_imported_and_works_where_jax_is_not() -> None:
    modules = [m.removesuffix(".__init__") for m in FILES if room_of(m) in WITHOUT_JAX]
    code = f"""
import importlib, sys
for name in ("jax", "jaxlib", "flax"):
    sys.modules[name] = None
for name in {modules}:
    importlib.import_module(name)
from remat.core.graph import Graph, Op, Value
from remat.memory import predict
from remat.planning.make import make_plan
from remat.policies import get_policy
made_by = (None, 0, 1, None)
values = tuple(Value(i, (256,), "float32", 1024, made_by[i]) for i in range(4))
ops = (
    Op(0, "tanh", (0,), (1,), 256, 2048, "forward", fusible=True),
    Op(1, "mul", (1, 3), (2,), 256, 3072, "backward", fusible=True),
)
graph = Graph(values, ops, inputs=(0,), cotangents=(3,), outputs=(1,), gradients=(2,))
plan = make_plan(graph, get_policy("min_cut"))
print(predict(plan.graph, plan.schedule).peak_bytes, plan)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# `deferred` is a primitive of our own.
@pytest.mark.parametrize("room", [room for room in ROOMS if room != "compat"])
def test_only_compat_touches_internals(room: str) -> None:
    for module in (m for m in FILES if room_of(m) == room):
        for entry in imports_of(module):
            assert not any(f"{entry.name}.".startswith(f"{i}.") for i in INTERNALS), entry.name


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_shipped_imports_what_is_not_and_flax_is_optional(room: str) -> None:
    for module in (m for m in FILES if room_of(m) == room):
        roots = {e.name.split(".")[0] for e in imports_of(module)}
        now = {e.name.split(".")[0] for e in imports_of(module) if not e.delayed}
        assert not roots & OUTSIDE, module
        own = {module.removeprefix("remat.")} & {"equinox"} if room == "frameworks" else set()
        allowed = own | ({"flax"} if room == "frameworks" else set())
        assert not now & {"flax", "matplotlib", "optax", "equinox"} - allowed, module


def test_every_module_lies_in_a_room() -> None:
    assert {room_of(module) for module in FILES} == set(ROOMS)
    assert set(arrows()) == set(ROOMS)
    assert {f"remat.{name}" for name in (*DOORS, *FRAMEWORKS)} <= set(FILES)
