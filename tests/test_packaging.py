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

import remat

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
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
    expected = {f"remat/{path.name}" for path in (ROOT / "remat").glob("*.py")}
    expected |= {f"remat/policies/{path.name}" for path in (ROOT / "policies").glob("*.py")}
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
    assert module == "remat.cli"
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
