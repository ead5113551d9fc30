"""`remat doctor`: what is missing or broken is found, said with its cure, and crashes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.tools import doctor
from remat.tools.cli import main
from remat.tools.doctor import LEAST, OPTIONAL, Check, examine

ROOT = Path(__file__).parent.parent


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["flax"], *extras["plot"], *extras["test"]]
    named = (re.match(r"([\w-]+)>=([\d.]+)", text) for text in required)
    oldest = {m[1]: tuple(map(int, m[2].split("."))) for m in named if m}
    assert {name: oldest[name] for name in LEAST} == dict(LEAST)
    assert {name: oldest[name] for name in OPTIONAL} == {n: v for n, (_, v) in OPTIONAL.items()}
    assert len(LEAST) == len(project["dependencies"])
    assert f">={'.'.join(map(str, doctor.PYTHON))}" == project["requires-python"]


def test_this_environment_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "remat.doctor" and document["broken"] is False
    found = {check["name"]: check for check in document["checks"]}
    assert found["python"]["state"] == found["jax"]["state"] == found["devices"]["state"] == "ok"
    assert importlib.metadata.version("jax") in found["jax"]["found"]
    assert "cpu" in found["devices"]["found"].lower() or found["devices"]["found"]


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Errors that the other process is made to report, without starting it."""
    errors: dict[str, str] = {}
    facts = {"devices": ["cpu"], "platform": "cpu", "undoes": False, "cache": f"{os.devnull}/x"}
    monkeypatch.setattr(doctor, "_probe", lambda: doctor._Probe(facts, errors))
    yield errors


@pytest.mark.parametrize("name", sorted([*LEAST, "jaxlib", *OPTIONAL]))
def test_a_missing_package(
    name: str, no_probe: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == name:
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {check.name: check for check in examine()}
    check = found["jax" if name == "jaxlib" else name]
    wanted = "optional" if name in OPTIONAL else "warning" if name == "numba" else "broken"
    assert check.state == wanted and "not installed" in check.found
    assert "pip install" in check.remedy and name in check.remedy


@pytest.mark.parametrize("name", ["jax", "numpy", "flax", "numba"])
def test_an_old_package(
    name: str, no_probe: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda p: "0.0.1" if p == name else real(p))
    found = {check.name: check for check in examine()}[name]
    assert found.state == ("warning" if name in ("flax", "numba") else "broken")
    assert "0.0.1" in found.found and ">=" in found.remedy


def test_packages_that_cannot_be_imported(no_probe: dict[str, str]) -> None:
    no_probe["jax"] = "RuntimeError: jaxlib version 0.9 is incompatible"
    no_probe["highspy"] = "ImportError: undefined symbol"
    found = {check.name: check for check in examine()}
    assert found["jax"].state == found["devices"].state == found["highspy"].state == "broken"
    assert "incompatible" in found["jax"].found and "jaxlib==" in found["jax"].remedy
    assert found["cache"].state == "warning"


def test_whatever_a_check_raises_is_said(
    no_probe: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("a disk that is gone")

    monkeypatch.setattr("remat.tools.doctor.find_plugin", broken)
    assert any("a disk that is gone" in check.found for check in examine())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("raise RuntimeError('incompatible jaxlib')", "incompatible jaxlib"),
        ("import os\nos._exit(3)", "status 3"),
    ],
)
def test_a_jax_that_crashes(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "jax.py").write_text(code)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert words in out and "broken" in out and "pip install" in out


def test_without_jax_and_numpy_at_all() -> None:
    """In a process where nothing of the sort can be imported, all but rich."""
    code = """
import sys
for name in ("jax", "jaxlib", "numpy", "scipy", "networkx", "numba", "highspy", "flax"):
    sys.modules[name] = None
from remat.tools.cli import main
code = main(["doctor"])
assert main(["plan", "os:getcwd"]) == 1
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # the other process finds all of them
    assert "Traceback" not in done.stderr and "`remat doctor`" in done.stderr
