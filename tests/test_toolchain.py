"""What XLA's GPU compiler needs, in folders made for the purpose."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import jax
import jaxlib
import pytest

import remat.compiler.toolchain as toolchain
from remat.compat import cuda_data_dir
from remat.compiler.toolchain import (
    Plugin,
    data_dir_of_flags,
    find_plugin,
    how_to_install,
    missing_tools,
)
from remat.core.devices import GPU_NAMES, get_device
from remat.core.errors import CompileError

H200 = get_device("h200")
needs_plugin = pytest.mark.skipif(
    find_plugin() is None,
    reason="XLA:GPU is not installed: pip install 'remat[deviceless]' (Linux)",
)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """A plugin in an environment of its own, on a machine where nothing else is."""
    folder = tmp_path / "env" / "lib" / "python3" / "site-packages" / "jax_plugins" / "xla_cuda13"
    folder.mkdir(parents=True)
    monkeypatch.setattr(toolchain, "_SYSTEM_ROOTS", (str(tmp_path / "system"),))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.chdir(tmp_path)
    return Plugin("jax_plugins.xla_cuda13", folder, "13")


def make_ptxas(folder: Path, script: str = "exit 0") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ptxas").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "ptxas").chmod(0o755)


def make_libdevice(root: Path) -> None:
    (root / "nvvm" / "libdevice").mkdir(parents=True)
    (root / "nvvm" / "libdevice" / "libdevice.10.bc").touch()


def make_toolkit(root: Path) -> None:
    make_ptxas(root / "bin")
    make_libdevice(root)


def test_a_machine_with_nothing(plugin: Plugin, tmp_path: Path) -> None:
    missing = missing_tools(H200, plugin, None)
    assert missing is not None
    assert missing.tools == "the program ptxas and the file nvvm/libdevice/libdevice.10.bc"
    assert str(tmp_path / "system") in missing.places
    assert str(plugin.folder.parents[1] / "nvidia" / "cu13") in missing.places


@pytest.mark.parametrize(
    "place",
    [
        "system",
        "cuda_sdk_lib",  # XLA's default, in the current folder
        "env",  # a conda environment
        "env/lib/python3/site-packages/nvidia/cu13",  # the wheels of NVIDIA
        "env/lib/python3/site-packages/jax_plugins/xla_cuda13/cuda",
    ],
)
def test_places_where_xla_looks(plugin: Plugin, tmp_path: Path, place: str) -> None:
    make_toolkit(tmp_path / place)
    assert missing_tools(H200, plugin, None) is None


def test_places_that_are_named(
    plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_toolkit(tmp_path / "mine")
    assert missing_tools(H200, plugin, str(tmp_path / "mine")) is None
    assert missing_tools(H200, plugin, None) is not None
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 --xla_gpu_cuda_data_dir={tmp_path}/mine --xla_b=2")
    assert missing_tools(H200, plugin, None) is None
    assert missing_tools(H200, plugin, str(tmp_path / "other")) is not None  # jax's wins


def test_only_ptxas_is_looked_for_in_path(
    plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_toolkit(tmp_path / "mine")
    monkeypatch.setenv("PATH", f"{tmp_path}/empty:{tmp_path}/mine/bin")
    missing = missing_tools(H200, plugin, None)
    assert missing is not None and missing.tools == "the file nvvm/libdevice/libdevice.10.bc"
    make_libdevice(tmp_path / "system")
    assert missing_tools(H200, plugin, None) is None


def test_wheels_of_another_cuda_are_not_seen(plugin: Plugin, tmp_path: Path) -> None:
    make_toolkit(tmp_path / "env/lib/python3/site-packages/nvidia/cuda_nvcc")
    assert missing_tools(H200, plugin, None) is not None
    older = Plugin("jax_plugins.xla_cuda12", plugin.folder.with_name("xla_cuda12"), "12")
    older.folder.mkdir()
    assert missing_tools(H200, older, None) is None


def test_an_empty_folder_hides_the_libdevice_behind_it(plugin: Plugin, tmp_path: Path) -> None:
    make_toolkit(tmp_path / "env")
    (tmp_path / "system" / "nvvm" / "libdevice").mkdir(parents=True)
    missing = missing_tools(H200, plugin, None)
    assert missing is not None and missing.tools.startswith("the file")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo \"ptxas fatal   : Value 'sm_90a' is not defined\" >&2; exit 1", "sm_90a"),
        ("echo 'Cuda compilation tools, release 12.3, V12.3.103'", "V12.3.103, which XLA refuses"),
        ("exit 7", "status 7"),
    ],
)
def test_a_ptxas_that_does_not_do(plugin: Plugin, tmp_path: Path, script: str, said: str) -> None:
    make_toolkit(tmp_path / "system")
    make_ptxas(tmp_path / "system" / "bin", script)
    missing = missing_tools(H200, plugin, None)
    assert missing is not None and missing.tools.startswith("a program ptxas for 'h200'")
    assert said in missing.tools


def test_a_ptxas_that_cannot_be_run(plugin: Plugin, tmp_path: Path) -> None:
    make_toolkit(tmp_path / "system")
    (tmp_path / "system" / "bin" / "ptxas").write_bytes(b"\0")
    missing = missing_tools(H200, plugin, None)
    assert missing is not None and missing.tools.startswith("a program ptxas for 'h200'")


@pytest.mark.gpu_compile
@needs_plugin
@pytest.mark.parametrize("name", GPU_NAMES)
def test_what_is_installed_here_does_for_every_gpu(name: str) -> None:
    plugin = find_plugin()
    assert plugin is not None
    plugin.check_versions()
    assert missing_tools(get_device(name), plugin, cuda_data_dir()) is None


@needs_plugin
@pytest.mark.parametrize("number", [0, 1])
def test_versions_must_agree(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    plugin = find_plugin()
    assert plugin is not None
    package = plugin.packages[number]
    real = importlib.metadata.version

    def check(version: str) -> None:
        told = {package: version}
        monkeypatch.setattr(importlib.metadata, "version", lambda p: told.get(p) or real(p))
        plugin.check_versions()

    check(f"{jaxlib.__version__}.dev20300101")  # a nightly of the same version
    expected = (
        rf"{package} is of version 0\.4\.1, jaxlib of version {re.escape(jaxlib.__version__)}"
    )
    with pytest.raises(CompileError, match=expected):
        check("0.4.1")


@needs_plugin
@pytest.mark.parametrize("number", [0, 1])
def test_both_packages_are_needed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    plugin = find_plugin()
    assert plugin is not None
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == plugin.packages[number]:
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CompileError, match=f"{plugin.packages[number]} is not installed"):
        plugin.check_versions()


def test_no_plugin_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert find_plugin() is None


def test_what_to_install_is_of_the_version_of_jax() -> None:
    assert f'"jax[cuda13-local]=={jax.__version__}" nvidia-cuda-nvcc ' in how_to_install()
    assert f'"jax[cuda12-local]=={jax.__version__}" nvidia-cuda-nvcc-cu12 ' in how_to_install("12")


def test_flags_of_xla() -> None:
    assert data_dir_of_flags("") is None
    assert data_dir_of_flags("--xla_dump_to=/a --xla_gpu_cuda_data_dirs=/b") is None
    assert (
        data_dir_of_flags("--xla_gpu_cuda_data_dir=/a --xla_x --xla_gpu_cuda_data_dir=/b") == "/b"
    )
