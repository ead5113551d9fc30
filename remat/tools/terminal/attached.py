"""Whether jax is kept to the CPU, so that it does not warn of a GPU or TPU that nobody said is there."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
from pathlib import Path

__all__ = ["has_nvidia_device", "has_tpu_device", "is_installed", "keep_to_cpu"]

_NVIDIA_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")  # dxg: WSL
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
_PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"


def keep_to_cpu() -> None:
    """Keeps jax to the CPU where its CUDA plugin or libtpu is installed but there is no such device.

    jax would warn on stderr that it found them but no device. They are there on purpose: they are what
    `--device h200` and `--device v5e` compile with. Importing `remat` may have imported jax, which reads
    JAX_PLATFORMS while it is imported, so the variable alone (for child processes) is not enough. A choice of the
    user's, a machine with either device, and any machine without the two are left alone.
    """
    has_plugin = any(is_installed(f"jax_plugins.xla_cuda{number}") for number in (13, 12))
    if not has_plugin and not is_installed("libtpu"):
        return
    if has_nvidia_device() or has_tpu_device() or "JAX_PLATFORMS" in os.environ:
        return
    import jax

    if jax.config.jax_platforms is None:  # type: ignore[attr-defined]
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax.config.update("jax_platforms", "cpu")


def has_nvidia_device() -> bool:
    """Whether a driver made a device file."""
    return any(map(os.path.exists, _NVIDIA_FILES))


def has_tpu_device() -> bool:
    """Whether there is a device file of a TPU, or anything of Google's on the PCI bus."""
    if any(map(glob.glob, _TPU_FILES)):
        return True
    vendors = []
    for path in glob.glob(_PCI_VENDORS):
        with contextlib.suppress(OSError):
            vendors.append(Path(path).read_text().strip())
    return _GOOGLE in vendors


def is_installed(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # not even its parent package; or it is switched off
        return False
