"""The rooms of the house and what they import, read off the sources with `ast`.

python -m tests.rooms            # every room with the rooms that it imports
python -m tests.rooms --modules  # and every module with the modules
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FILES", "ROOMS", "Import", "imports_of", "room_of", "targets"]

ROOT = Path(__file__).resolve().parents[1]

# A room imports from rooms above it only.
ROOMS: tuple[str, ...] = (
    "core",
    "dtr",
    "plans.words",
    "plans",
    "plans.diff",
    "plans.explain",
    "memory",
    "pictures",
    "policies.base",
    "policies.solvers",
    "policies.solvers.chain",
    "policies.exact",
    "policies.buffers",
    "policies",
    "compat",
    "trace",
    "rewrite",
    "compiler",
    "planning",
    "lower",
    "resolve",
    "wrapping",
    "checkpointing",
    "frameworks",
    "api",
    "fitting",
    "dtr.runtime",
    "dtr.__init__",
    "tools.terminal",
    "tools",
    "tools.commands",
    "tools.cli",
    "doors",
)
FRAMEWORKS = ("equinox", "linen", "nnx")
DOORS = ("compile", "cost", "encode", "forms", "plan_diff", "__init__", "__main__")


@dataclass(frozen=True)
class Import:
    """One imported name; `delayed` if it is not imported when the importing module is."""

    name: str
    delayed: bool


def _files() -> dict[str, Path]:
    found = {}
    for folder, package in (("remat", "remat"), ("policies", "remat.policies")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == "policies" or relative.parts[0] != "policies":
                found[".".join((package, *relative.with_suffix("").parts))] = path
    return found


FILES = _files()
"""Modules by name, `remat.core.graph`; a package is `remat.core.__init__`."""


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """Every import of a module, with those inside functions."""
    return tuple(_walk(ast.parse(FILES[module].read_text()), delayed=False))


def _walk(node: ast.AST, delayed: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        for name in _names(child):
            yield Import(name, delayed)
        yield from _walk(child, delayed or is_function or is_typing)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        # `from remat import compat` imports a module, `from remat.plans.plan import Plan` a name.
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def module_of(name: str) -> str | None:
    """The module of ours that an imported name lies in."""
    parts = name.split(".")
    while parts:
        for module in (".".join(parts), ".".join((*parts, "__init__"))):
            if module in FILES:
                return module
        parts.pop()
    return None


def targets(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    return {m for entry in imports_of(module) if (m := module_of(entry.name))} - {module}


def room_of(module: str) -> str:
    """The room of a module: the longest entry of `ROOMS` that its name begins with."""
    parts = module.split(".")[1:]
    for room, members in (("doors", DOORS), ("frameworks", FRAMEWORKS)):
        if parts[0] in members:
            return room
    for n in range(len(parts), 0, -1):
        if ".".join(parts[:n]) in ROOMS:
            return ".".join(parts[:n])
    raise LookupError(f"{module} is in no room of {ROOMS}")


def arrows() -> dict[str, dict[str, int]]:
    """For every room the rooms that it imports, with the number of imports."""
    found: dict[str, dict[str, int]] = {room: {} for room in ROOMS}
    for module in FILES:
        for target in targets(module):
            own, other = room_of(module), room_of(target)
            if own != other:
                found[own][other] = found[own].get(other, 0) + 1
    return found


def main() -> None:
    """Prints the drawing."""
    parser = argparse.ArgumentParser(prog="python -m tests.rooms", description=__doc__)
    parser.add_argument("--modules", action="store_true")
    args = parser.parse_args()
    for room, others in arrows().items():
        modules = [module for module in FILES if room_of(module) == room]
        lines = sum(len(FILES[module].read_text().splitlines()) for module in modules)
        print(f"{room}  ({len(modules)} files, {lines} lines)")
        for other in ROOMS:
            if other in others:
                up = "" if ROOMS.index(other) < ROOMS.index(room) else "   <- UP"
                print(f"    -> {other} ({others[other]}){up}")
        for module in modules if args.modules else ():
            print(f"    {module}: {', '.join(sorted(targets(module)))}")


if __name__ == "__main__":
    main()
