"""The way through the house: dependencies run in one direction, read off the sources with `ast`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module imports from layers above its own line only, or from its own line where that makes no circle.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "barriers", "deferred", "_compat", "deadline", "interrupt", "primitives", "pooling"),
    ("calls", "jitted", "custom_rules"),
    ("devices", "graph", "hlo", "target", "program", "stablehlo"),
    ("classify", "split"),
    ("forms", "ranges", "decisions", "symbolic", "toolchain"),
    ("plan", "cost", "hlo_flops", "trip_count", "encode"),
    ("schedule", "simulate", "memory", "report", "kernels", "planner"),
    ("opaque",),
    ("plan_file", "plan_diff"),
    ("policies",),
    ("planning", "compiled", "time_limit"),
    ("resort",),
    ("budget", "loops"),
    ("trace", "compile"),
    ("rewrite",),
    ("rules",),
    ("operators",),
    ("operator_matching", "operator_library"),
    ("operator_substitution",),
    ("lower", "resolve"),
    ("segments", "override", "api"),
    ("linen", "nnx", "equinox", "compare", "measure", "pareto", "fitting", "fit", "batch", "lossy"),
    ("plot",),
    ("cli",),
    ("__main__",),
)

# Knowing exceptions: imports that point downwards. Each is delayed until a method is called.
DELAYED = {
    ("remat.plan", "remat.simulate"): "plan.timeline() replays the plan",
    ("remat.plan", "remat.report"): "str(plan) is the report",
    ("remat.api", "remat.nnx"): "remat.plan of a function of NNX's modules",
    ("remat.plan", "remat.api"): "plan.annotate(f) applies the plan",
    ("remat.plan", "jax"): "plan.policy is a policy of jax",
    ("remat.plan", "remat.memory"): "a plan with its loops has another peak",
    ("remat.plan", "remat.plan_file"): "plan.to_json() writes a file",
    ("remat.cost", "remat.measure"): "remat.cost.measure runs operators, with jax",
}

# The planning half of the house: plain data, testable and portable without jax.
WITHOUT_JAX = (
    "budget",
    "compiled",
    "cost",
    "deadline",
    "devices",
    "errors",
    "forms",
    "graph",
    "hlo",
    "hlo_flops",
    "kernels",
    "loops",
    "memory",
    "opaque",
    "plan",
    "plan_diff",
    "plan_file",
    "planner",
    "planning",
    "plot",
    "primitives",
    "report",
    "resort",
    "schedule",
    "simulate",
    "stablehlo",
    "target",
    "time_limit",
    "toolchain",
    "trip_count",
)
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib")
OUTSIDE = ("models", "tests", "benchmarks", "examples")


@dataclass(frozen=True)
class Import:
    """One imported module; `delayed` if it is not imported when the importing module is."""

    module: str
    delayed: bool


def _module_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        # `from remat import _compat` imports a module, `from remat.plan import Plan` a name.
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _walk(node: ast.AST, delayed: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        for name in _module_names(child):
            yield Import(name, delayed)
        yield from _walk(child, delayed or is_function or is_typing)


def _files() -> dict[str, Path]:
    remat = {f"remat.{path.stem}": path for path in (ROOT / "remat").glob("*.py")}
    remat |= {f"remat.policies.{p.stem}": p for p in (ROOT / "policies").glob("*.py")}
    return {name: path for name, path in sorted(remat.items()) if path.stem != "__init__"}


FILES = _files()


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file, with the imports inside functions."""
    return tuple(_walk(ast.parse(path.read_text()), delayed=False))


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _room(module: str) -> str | None:
    """The part of `remat` that a module name lies in: `remat.policies.base.Decision` -> `policies`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "remat" and len(parts) > 1 else None


def _layer(room: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if room in layer)


def test_every_module_has_a_layer() -> None:
    rooms = [room for layer in LAYERS for room in layer]
    assert len(rooms) == len(set(rooms))
    present = {_room(name) for name in FILES}
    assert present <= set(rooms), "place the new module in LAYERS"
    assert set(rooms) <= present, "a module of LAYERS is gone"


@pytest.mark.parametrize("name", FILES)
def test_imports_point_upwards(name: str) -> None:
    own = _layer(_room(name) or "")
    for entry in imports_of(FILES[name]):
        room = _room(entry.module)
        if room is None or f"remat.{room}" == name:
            continue
        if (name, f"remat.{room}") in DELAYED:
            assert entry.delayed, (
                f"{name} must import {entry.module} inside the function that needs it"
            )
            continue
        assert _layer(room) <= own, f"{name} imports {entry.module}, which lies below it"


def test_there_are_no_circles() -> None:
    """Imports within one layer are allowed; importing the modules one by one must still be possible."""
    edges = {
        name: {
            f"remat.{_room(entry.module)}"
            for entry in imports_of(path)
            if not entry.delayed and _room(entry.module) not in (None, "policies", _room(name))
        }
        for name, path in FILES.items()
        if _room(name) != "policies"
    }
    while edges:
        free = {name for name, needs in edges.items() if not needs & edges.keys()}
        assert free, f"these import each other: {sorted(edges)}"
        edges = {name: needs for name, needs in edges.items() if name not in free}


def test_exceptions_are_used() -> None:
    for name, target in DELAYED:
        assert any(_is_in(entry.module, target) for entry in imports_of(FILES[name]))


@pytest.mark.parametrize("name", [n for n in FILES if _room(n) == "policies"])
def test_policies_know_no_jax(name: str) -> None:
    roots = {entry.module.split(".")[0] for entry in imports_of(FILES[name])}
    assert not roots & {"jax", "jaxlib", "flax", "optax", "equinox"}


@pytest.mark.parametrize("room", WITHOUT_JAX)
def test_plain_data_knows_no_jax(room: str) -> None:
    name = f"remat.{room}"
    for entry in imports_of(FILES[name]):
        root = entry.module.split(".")[0]
        assert root not in ("jax", "jaxlib", "flax") or (entry.delayed and (name, root) in DELAYED)


# `deferred` is a primitive of our own.
@pytest.mark.parametrize("name", [n for n in FILES if n not in ("remat._compat", "remat.deferred")])
def test_only_compat_touches_internals(name: str) -> None:
    for entry in imports_of(FILES[name]):
        assert not any(_is_in(entry.module, internal) for internal in INTERNALS), entry.module


@pytest.mark.parametrize("name", FILES)
def test_nothing_shipped_imports_what_is_not(name: str) -> None:
    roots = {entry.module.split(".")[0] for entry in imports_of(FILES[name])}
    assert not roots & set(OUTSIDE)


DOORS = ("remat.linen", "remat.nnx", "remat.equinox")


@pytest.mark.parametrize("name", [n for n in FILES if n not in DOORS])
def test_flax_is_optional(name: str) -> None:
    roots = {entry.module.split(".")[0] for entry in imports_of(FILES[name]) if not entry.delayed}
    assert not roots & {"flax", "matplotlib", "optax", "equinox"}
