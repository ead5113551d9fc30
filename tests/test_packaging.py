"""The wheel: what is in it, that it works outside the checkout, and what must never be in it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import remat

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKE = shutil.which("make")
needs_make = pytest.mark.skipif(MAKE is None or os.name != "posix", reason="make is not installed")
BUILT = ("pyproject.toml", "README.md", "LICENSE", "remat", "policies", "models", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays clean."""
    place = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "test_*")
    for name in BUILT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, place)
    # An older setuptools than the project asks for: let pip fetch a new one.
    is_new = int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    options = ["--no-build-isolation"] if is_new else []
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--quiet", *options]
    subprocess.run([*command, "--wheel-dir", "dist"], cwd=place, check=True)
    (built,) = (place / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, as an installation is."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_outside(code: str, installed: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python code away from the checkout, with the unpacked wheel first on the path."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"remat", f"remat-{remat.__version__}.dist-info"}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "remat").rglob("*.py")}
    expected |= {f"remat/{path.relative_to(ROOT)}" for path in (ROOT / "policies").rglob("*.py")}
    assert {n for n in names if ".dist-info/" not in n} == {*expected, "remat/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_outside_the_checkout(installed: Path) -> None:
    code = (
        "import jax, jax.numpy as jnp, remat, remat.policies\n"
        "f = remat.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.cos(x))))\n"
        "jax.grad(f)(jnp.ones(4))\n"
        "print(remat.__file__, remat.policies.__file__)"
    )
    result = run_outside(code, installed)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(str(installed)) == 2


def required() -> set[str]:
    """The names of all distributions that `pip install .` installs here."""
    found: set[str] = set()
    waiting = list(PROJECT["project"]["dependencies"])
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            waiting += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # not for this machine
            continue
        found.add(name)
    return found


# Nothing of what is imported may come from a distribution that was not asked for.
WITHOUT_OTHERS = """
import importlib.abc, sys
class Others(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {others!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Others())
"""

README_EXAMPLE = """
import jax, jax.numpy as jnp, remat
from remat.policies import POLICIES
def loss(params, x):
    for w1, w2 in params:
        x = x + jax.nn.gelu(x @ w1) @ w2
    return jnp.mean(x**2)
params, x = [(jnp.full((64, 256), 0.01), jnp.full((256, 64), 0.01))] * 4, jnp.ones((512, 64))
print(remat.plan(loss, params, x))
jax.jit(jax.grad(remat.checkpoint(loss)))(params, x)
jax.jit(jax.grad(remat.checkpoint(loss, budget=0.6, confirm=False)))(params, x)
for name in POLICIES:
    if name != "names":  # nothing is tagged
        remat.plan(loss, params, x, remat_policy=name)
remat.fit(lambda *args: jax.grad(remat.checkpoint(loss))(*args), params, x, memory="1GiB")
print(remat.compile_report(jax.grad(loss), params, x))
remat.dtr.value_and_grad(loss, budget="1GiB")(params, x)
from remat.tools.cli import main
main(["doctor"])
for module in ("linen", "nnx", "equinox"):
    try:
        getattr(remat, module)
    except ImportError as error:
        assert "pip install" in str(error), error
    else:
        raise AssertionError(module)
print("all done")
"""


def test_nothing_that_is_not_required_has_to_be_installed(installed: Path) -> None:
    asked = required()
    others = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in asked for owner in owners)
    } - {"remat"}
    assert {"flax", "equinox", "optax", "pytest"} <= others
    assert not {"jax", "numpy", "rich"} & others
    result = run_outside(WITHOUT_OTHERS.format(others=others) + README_EXAMPLE, installed)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("all done\n")


def test_policies_cannot_be_imported_under_a_second_name() -> None:
    # Twice imported, every policy would exist twice and `isinstance` would fail in silence.
    result = subprocess.run(
        [sys.executable, "-c", "import policies"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "it is `remat.policies`" in result.stderr


def test_the_version_has_one_value() -> None:
    assert PROJECT["project"]["version"] == remat.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == remat.__version__


def test_the_command_is_declared() -> None:
    module, _, function = PROJECT["project"]["scripts"]["remat"].partition(":")
    assert module == "remat.tools.cli"
    assert callable(getattr(importlib.import_module(module), function))


def test_the_policies_link_is_relative() -> None:
    link = ROOT / "remat" / "policies"
    assert link.is_symlink()
    assert os.readlink(link) == "../policies"


def test_the_policies_link_is_committed() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [git, "-c", f"safe.directory={ROOT}", "ls-files", "--stage", "remat/policies"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert listed.startswith("120000 ")


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda p: p.name)
def test_github_files_are_yaml(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    assert isinstance(data, dict)
    for job in data.get("jobs", {}).values():
        assert job["runs-on"]
        assert all("uses" in step or "run" in step for step in job["steps"])


def test_supported_versions_agree() -> None:
    """What pyproject says is what CI runs: the oldest Python and the oldest jax."""
    project = PROJECT["project"]
    (oldest_jax,) = (re.search(r">=([\d.]+)", d) for d in project["dependencies"] if "jax>" in d)
    assert oldest_jax is not None
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    oldest_python = project["requires-python"].removeprefix(">=")
    assert {"python": oldest_python, "jax": f"{oldest_jax[1]}.0"} in [
        {"python": row["python"], "jax": row["jax"]} for row in rows
    ]
    listed = {c.rsplit(" ", 1)[1] for c in project["classifiers"] if c.startswith("Programming")}
    assert {row["python"] for row in rows} == {v for v in listed if "." in v}


def test_planning_within_budgets_is_fast_without_extras() -> None:
    (numba,) = (d for d in PROJECT["project"]["dependencies"] if d.startswith("numba"))
    listed = [c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"]]
    below = re.search(r"python_version < '3\.(\d+)'", numba)
    assert below is not None
    assert all(int(v[2:]) < int(below[1]) for v in listed if v.startswith("3."))


def interpreter_of_make(folder: Path, pythons: dict[str, str], *arguments: str) -> str:
    """The interpreter that `make` would set up with, where `PATH` has these scripts, and no others."""
    for name, script in pythons.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    assert MAKE is not None
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS")}
    place = f"VENV={folder / 'venv'}"
    said = subprocess.run(
        [MAKE, "-n", "setup", "SHELL=/bin/sh", place, *arguments],
        cwd=ROOT,
        env={**environment, "PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (found,) = re.findall(r'"([^"]+)" -m venv', said)
    return found


WORKS, MISSING = "exit 0", "echo 'pyenv: command not found' >&2; exit 127"


@needs_make
@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ({"python3.13": WORKS, "python3.11": WORKS, "python3": WORKS}, "python3.13"),
        ({"python3.13": MISSING, "python3.12": WORKS, "python3.11": WORKS}, "python3.12"),
        ({"python3.11": WORKS, "python3": WORKS}, "python3.11"),
        ({"python3.10": WORKS, "python3": WORKS}, "python3"),
        ({"python3.12": "exit 1", "python3": "exit 1"}, "python3"),
        ({}, "python3"),
    ],
)
def test_make_takes_the_newest_python_that_works(
    tmp_path: Path, pythons: dict[str, str], expected: str
) -> None:
    assert interpreter_of_make(tmp_path, pythons) == expected


@needs_make
def test_make_can_be_told_which_python_to_take(tmp_path: Path) -> None:
    pythons = {"python3.13": WORKS, "python3.11": WORKS}
    assert interpreter_of_make(tmp_path, pythons, "PYTHON=python3.11") == "python3.11"


@needs_make
def test_make_knows_the_pythons_of_pyproject() -> None:
    listed = [c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"]]
    newest_first = [f"python{v}" for v in reversed(listed) if v.startswith("3.")]
    (tried,) = re.findall(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tried.split() == [*newest_first, "python3"]


def test_what_ci_leaves_out_is_there() -> None:
    (named,) = re.findall(r'^left_out="([^"]+)"', (ROOT / ".ci/run").read_text(), re.MULTILINE)
    lacking = [n for n in named.split() if not (ROOT / "tests" / f"test_{n}.py").is_file()]
    assert named.split() and not lacking
