"""What XLA's GPU compiler needs besides itself, looked for before XLA is asked.

XLA's GPU compiler is a plugin of jax in two packages. To make machine code it runs ``ptxas`` and
links ``libdevice.10.bc``, both from NVIDIA's compiler. Without them some versions of XLA report an
error, others die of a segmentation fault, so they must be found first. The places are XLA's own
(``FindPtxAsExecutable``, ``LibDevicePath`` and ``CandidateCudaRoots`` in its sources). What is found
here, XLA finds; what is not found here, a version of XLA with other habits might still have.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from remat.core.devices import Device
from remat.core.errors import CompileError

__all__ = [
    "Missing",
    "Plugin",
    "data_dir_of_flags",
    "find_plugin",
    "how_to_install",
    "missing_tools",
    "version_numbers",
    "version_of",
]

_DEFAULT_DATA_DIR = "./cuda_sdk_lib"
_SYSTEM_ROOTS = ("/usr/local/cuda", "/opt/cuda")
# Seen from the folder of the plugin's library, in this order: the wheels of NVIDIA's compiler; a copy
# inside of the plugin, and the prefix of a conda environment.
_WHEELS = {"12": "nvidia/cuda_nvcc", "13": "nvidia/cu13"}
_NEAR = ("cuda", "../../../..", "../../../../..")
_LIBDEVICE = Path("nvvm", "libdevice")
_EMPTY_KERNEL = """\
.version 7.8
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""
_PTXAS_SECONDS = 60
_REFUSED = "V12.3.103"  # XLA takes no ptxas of this version, nor one of before CUDA 11.8 (PTX 7.8)


@dataclass(frozen=True)
class Plugin:
    """jax's installed CUDA plugin.

    Attributes:
        module: what jax imports, e.g. ``jax_plugins.xla_cuda13``.
        folder: where XLA's library lies.
        cuda: major version of CUDA that it was built for, e.g. ``"13"``.
    """

    module: str
    folder: Path
    cuda: str

    @property
    def packages(self) -> tuple[str, str]:
        """The names of its packages: XLA itself, and jax's part."""
        return f"jax-cuda{self.cuda}-pjrt", f"jax-cuda{self.cuda}-plugin"

    def check_versions(self) -> None:
        """Makes sure that both packages are there, in the version of jaxlib.

        Raises:
            CompileError: one is missing, or of another version, with which jax does not use it.
        """
        jaxlib = importlib.metadata.version("jaxlib")
        for package in self.packages:
            found = version_of(package)
            if found is None:
                raise CompileError(
                    f"XLA's GPU compiler is incomplete: {package} is not installed. "
                    f"{how_to_install(self.cuda)}"
                )
            if version_numbers(found) != version_numbers(jaxlib):
                raise CompileError(
                    f"{package} is of version {found}, jaxlib of version {jaxlib}: jax uses its "
                    f"GPU compiler only if they agree. {how_to_install(self.cuda)}"
                )


@dataclass(frozen=True)
class Missing:
    """Tools of XLA's GPU compiler that were not found.

    Attributes:
        tools: what they are, in words.
        places: where they were looked for, in words.
    """

    tools: str
    places: str


def find_plugin() -> Plugin | None:
    """The CUDA plugin that jax would use, the newest CUDA first; None if there is none."""
    parent = importlib.util.find_spec("jax_plugins")
    places = parent.submodule_search_locations if parent else None
    for info in sorted(pkgutil.iter_modules(places or ()), key=lambda i: i.name, reverse=True):
        named = re.fullmatch(r"xla_cuda(\d+)", info.name)
        spec = importlib.util.find_spec(f"jax_plugins.{info.name}") if named else None
        if named and spec is not None and spec.submodule_search_locations:
            return Plugin(spec.name, Path(next(iter(spec.submodule_search_locations))), named[1])
    return None


def how_to_install(cuda: str = "13") -> str:
    """One sentence: the command that installs everything needed, in the version of the installed jax."""
    jax = importlib.metadata.version("jax")
    nvcc = "nvidia-cuda-nvcc-cu12" if cuda == "12" else "nvidia-cuda-nvcc"
    return (
        f'On Linux (x86-64, aarch64): pip install "jax[cuda{cuda}-local]=={jax}" {nvcc} '
        "(about 250 MB, needs neither a GPU nor a driver); elsewhere, use device='cpu'."
    )


def missing_tools(device: Device, plugin: Plugin, data_dir: str | None) -> Missing | None:
    """What XLA will not find to compile for a GPU; None if everything is there.

    Args:
        device: a GPU.
        plugin: the compiler that will be asked.
        data_dir: where it is told to look first; None for what ``XLA_FLAGS`` say.
    """
    roots = _roots(plugin, data_dir)
    ptxas = _find_ptxas(roots)
    missing = []
    if ptxas is None:
        missing.append("the program ptxas")
    elif failure := _failure_of(ptxas, device):
        missing.append(f"a program ptxas for {device.name!r} ({ptxas}: {failure})")
    if not _has_libdevice(roots):
        missing.append(f"the file {_LIBDEVICE / 'libdevice.10.bc'}")
    if not missing:
        return None
    places = ", ".join(dict.fromkeys(os.path.normpath(root) for root in roots))
    return Missing(" and ".join(missing), f"{places} (for ptxas also in PATH)")


def data_dir_of_flags(flags: str) -> str | None:
    """The value of ``--xla_gpu_cuda_data_dir`` in flags as in ``XLA_FLAGS``; None if not given."""
    found = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", flags)
    return found[-1] if found else None


def _roots(plugin: Plugin, data_dir: str | None) -> list[Path]:
    """Folders that may hold a CUDA toolkit, in XLA's order."""
    first = data_dir or data_dir_of_flags(os.environ.get("XLA_FLAGS", "")) or _DEFAULT_DATA_DIR
    wheels = _WHEELS.get(plugin.cuda, f"nvidia/cu{plugin.cuda}")
    near = [plugin.folder / root for root in (f"../{wheels}", f"../../{wheels}", *_NEAR)]
    return [Path(first), *map(Path, _SYSTEM_ROOTS), *near]


def _find_ptxas(roots: list[Path]) -> Path | None:
    """The first ptxas: that of the folder asked for, of ``PATH``, of the other folders."""
    in_path = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep)]
    first, *others = (root / "bin" for root in roots)
    candidates = (folder / "ptxas" for folder in (first, *in_path, *others))
    return next((ptxas for ptxas in candidates if ptxas.is_file()), None)


def _failure_of(ptxas: Path, device: Device) -> str | None:
    """Assembles an empty kernel for the GPU; returns what went wrong, None if nothing did."""
    assert device.gpu is not None
    major, minor = device.gpu.compute_capability
    name = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "empty.ptx"), Path(folder, "empty.cubin")
        source.write_text(_EMPTY_KERNEL)
        try:
            version = _run(ptxas, "--version")
            done = _run(ptxas, f"-arch={name}", str(source), "-o", str(result))
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if _REFUSED in version.stdout:
        return f"version {_REFUSED}, which XLA refuses"
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[0].strip() if lines else f"it ended with status {done.returncode}"


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program.absolute(), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PTXAS_SECONDS,
    )


def _has_libdevice(roots: list[Path]) -> bool:
    """Whether the file is in the first folder of that name, the only one that XLA looks into."""
    folders = (root / _LIBDEVICE for root in roots)
    first = next((folder for folder in folders if folder.is_dir()), Path())
    return (first / "libdevice.10.bc").is_file()


def version_of(package: str) -> str | None:
    """The version of an installed package, None if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, which is what jax compares: (0, 12, 1) of ``0.12.1.dev3``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
