"""What of an installation works: Python, jax, devices, the compilers of absent ones, planners, the cache.

Everything that could crash or hang (importing jax, starting its backends, compiled packages) happens in another
process, which says line by line what it found; this module imports nothing that may be missing. No jax here.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from remat.compiler.toolchain import (
    find_plugin,
    how_to_install,
    missing_tools,
    version_numbers,
    version_of,
)
from remat.core.devices import DEVICES, GPU_NAMES, TPU_NAMES
from remat.core.errors import CompileError

__all__ = ["LEAST", "OPTIONAL", "Check", "examine"]

State = Literal["ok", "warning", "broken", "optional"]

PYTHON = (3, 11)
LEAST: Mapping[str, tuple[int, ...]] = {
    "highspy": (1, 8),
    "jax": (0, 10),
    "networkx": (3, 2),
    "numba": (0, 61),
    "numpy": (1, 26),
    "rich": (13, 7),
    "scipy": (1, 13),
}
"""Packages that remat needs, with the oldest version that will do."""

OPTIONAL: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "flax": ("remat.linen and remat.nnx", (0, 12)),
    "equinox": ("remat.equinox", (0, 13)),
    "matplotlib": ("--plot", (3, 8)),
}
"""Packages for a part of it, with what for."""

_SECONDS = 120  # what takes longer hangs
_PROBE = """
import importlib, json, sys, warnings
def tell(**found): print("remat-doctor " + json.dumps(found), flush=True)
warnings.simplefilter("ignore")
for name in json.loads(sys.argv[1]):
    tell(trying=name)
    try:
        importlib.import_module(name)
        tell(imported=name)
    except BaseException as error:
        tell(failed=name, error=f"{type(error).__name__}: {error}")
tell(trying="devices")
try:
    from remat.tools.terminal.attached import keep_to_cpu
    keep_to_cpu()
    import jax
    devices = [device.device_kind for device in jax.devices()]
    tell(devices=devices, platform=jax.default_backend())
    from remat import compat
    from remat.compiler.remembered import default_cache_dir
    tell(undoes=compat.CPU_UNDOES_REMATERIALIZATION, cache=str(default_cache_dir()))
except BaseException as error:
    tell(failed="devices", error=f"{type(error).__name__}: {error}")
tell(trying="")
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of it.
        state: `broken` is what remat cannot do without, `warning` what is slow or probably not meant, `optional`
            what is not there and need not be.
        found: in words.
        remedy: what to do, empty if nothing.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> list[Check]:
    """Looks at everything; raises nothing."""
    probe = _probe()
    checks: list[Callable[[], Check]] = [
        _python,
        lambda: _jax(probe),
        lambda: _devices(probe),
        lambda: _cpu(probe),
        _gpu_compiler,
        _tpu_compiler,
        *(
            lambda name=name: _package(name, probe)
            for name in LEAST
            if name not in ("jax", "numba")
        ),
        lambda: _numba(probe),
        lambda: _cache(probe),
        *(lambda name=name: _optional(name) for name in OPTIONAL),
    ]
    return [_guarded(check) for check in checks]


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # an installation that even looking at fails is what this is for
        return Check("?", "warning", f"could not be looked at: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Probe:
    """What the other process said: facts by name, errors by what was tried."""

    facts: dict[str, Any]
    errors: dict[str, str]


def _probe() -> _Probe:
    modules = json.dumps(["jax", *(name for name in LEAST if name != "jax")])
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}
    end = ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, modules],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
        )
        output = done.stdout
        if done.returncode < 0:
            end = f"the process died of {signal.Signals(-done.returncode).name}"
        elif done.returncode:
            end = f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        said = error.stdout  # bytes, whatever was asked for
        output = str(said, errors="replace") if isinstance(said, bytes) else ""
        end = f"nothing happened for {_SECONDS} seconds"
    except OSError as error:
        output, end = "", str(error)
    trying = "jax"
    for line in output.splitlines():
        mark, _, text = line.partition(" ")
        if mark != "remat-doctor":
            continue
        fact = json.loads(text)
        trying = fact.get("trying", trying)
        if "failed" in fact:
            errors[fact["failed"]] = " ".join(fact["error"].split())
        facts.update(fact)
    if trying:
        errors.setdefault(trying, end or "the process ended early")
    return _Probe(facts, errors)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _python() -> Check:
    version = platform.python_version()
    found = f"{version}, {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON:
        return Check("python", "broken", found, f"remat needs Python {_dotted(PYTHON)} or newer")
    return Check("python", "ok", found)


def _jax(probe: _Probe) -> Check:
    jax, jaxlib = version_of("jax"), version_of("jaxlib")
    if jax is None:
        return Check("jax", "broken", "not installed", "pip install jax")
    found = f"{jax}, jaxlib {jaxlib or 'not installed'}"
    if version_numbers(jax) < LEAST["jax"]:
        least = _dotted(LEAST["jax"])
        return Check("jax", "broken", found, f'pip install -U "jax>={least}" (remat needs it)')
    match = f'pip install -U "jax=={jax}" "jaxlib=={jax}"'
    if jaxlib is None:
        return Check("jax", "broken", found, match)
    if (error := probe.errors.get("jax")) is not None:
        return Check("jax", "broken", f"{found}; cannot be imported: {error}", match)
    if version_numbers(jaxlib) > version_numbers(jax):
        return Check("jax", "warning", f"{found}: jaxlib is newer than jax", match)
    return Check("jax", "ok", found)


def _devices(probe: _Probe) -> Check:
    from remat.tools.terminal.attached import has_nvidia_device

    if "jax" in probe.errors:
        return Check("devices", "broken", "not known without jax")
    if (error := probe.errors.get("devices")) is not None:
        return Check(
            "devices",
            "broken",
            f"jax finds none: {error}",
            "try JAX_PLATFORMS=cpu, or reinstall jax",
        )
    kinds: list[str] = probe.facts.get("devices", [])
    named = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    if has_nvidia_device() and probe.facts.get("platform") == "cpu":
        why = "; JAX_PLATFORMS is set" if os.environ.get("JAX_PLATFORMS") else ""
        return Check(
            "devices",
            "warning",
            f"{named}, though there is an NVIDIA GPU{why}",
            'pip install -U "jax[cuda13]"',
        )
    return Check("devices", "ok", named)


def _cpu(probe: _Probe) -> Check:
    if "undoes" not in probe.facts:
        return Check("cpu compiler", "warning", "not known without jax")
    if probe.facts["undoes"]:
        return Check(
            "cpu compiler",
            "warning",
            "before jax 0.11.1 a plain jit on the CPU undoes rematerialization outside of loops",
            'pip install -U jax, or pass compiler_options=remat.compile.compiler_options("cpu") to jax.jit',
        )
    return Check("cpu compiler", "ok", "keeps rematerialization")


def _gpu_compiler() -> Check:
    name, gpus = "gpu compiler", ", ".join(GPU_NAMES)
    if version_of("jax") is None or version_of("jaxlib") is None:
        return Check(name, "optional", "not known without jax")
    plugin = find_plugin()
    if plugin is None:
        return Check(
            name, "optional", f"not installed; compiles for {gpus}, absent or not", how_to_install()
        )
    try:
        plugin.check_versions()
    except CompileError as error:
        what, _, remedy = str(error).partition(". ")
        return Check(name, "warning", what, remedy)
    missing = missing_tools(DEVICES[GPU_NAMES[-1]], plugin, None)
    version = version_of(plugin.packages[0])
    if missing is not None:
        return Check(
            name,
            "warning",
            f"CUDA {plugin.cuda} plugin {version} lacks {missing.tools}",
            how_to_install(plugin.cuda),
        )
    return Check(name, "ok", f"CUDA {plugin.cuda} plugin {version}, ptxas, libdevice: for {gpus}")


def _tpu_compiler() -> Check:
    name, tpus = "tpu compiler", ", ".join(TPU_NAMES)
    if (jax := version_of("jax")) is None:
        return Check(name, "optional", "not known without jax")
    if (version := version_of("libtpu")) is None:
        found = f"libtpu is not installed; compiles for {tpus}, absent or not"
        return Check(name, "optional", found, f'pip install "jax[tpu]=={jax}" (Linux, x86-64)')
    return Check(name, "ok", f"libtpu {version}: for {tpus}")


def _package(name: str, probe: _Probe) -> Check:
    version, least = version_of(name), LEAST[name]
    install = f'pip install -U "{name}>={_dotted(least)}"'
    if version is None:
        return Check(name, "broken", "not installed", install)
    if version_numbers(version) < least:
        return Check(name, "broken", f"{version} is too old", install)
    if (error := probe.errors.get(name)) is not None:
        again = f"pip install --force-reinstall {name}"
        return Check(name, "broken", f"{version} cannot be imported: {error}", again)
    return Check(name, "ok", version)


def _numba(probe: _Probe) -> Check:
    """Planning works without, a hundred times slower."""
    check = _package("numba", probe)
    if check.state == "ok":
        return check
    return Check(
        "numba", "warning", f"{check.found}; budgets take a hundred times longer", check.remedy
    )


def _cache(probe: _Probe) -> Check:
    name = probe.facts.get("cache")
    if name is None:
        return Check("cache", "warning", "not known without jax")
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror}): every program is compiled anew"
        return Check("cache", "warning", found, "set XDG_CACHE_HOME to a folder that can")
    return Check("cache", "ok", str(folder))


def _optional(name: str) -> Check:
    purpose, least = OPTIONAL[name]
    version = version_of(name)
    install = f'pip install -U "{name}>={_dotted(least)}"'
    if version is None:
        return Check(name, "optional", f"not installed; for {purpose}", install)
    if version_numbers(version) < least:
        return Check(name, "warning", f"{version} is too old for {purpose}", install)
    return Check(name, "ok", version)
