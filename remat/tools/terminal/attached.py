"""Whether jax is kept to the CPU, so that it does not warn of a GPU that nobody said is there."""

from __future__ import annotations

import importlib.util
import os

__all__ = ["has_nvidia_device", "is_installed", "keep_to_cpu"]

_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")  # dxg: WSL


def keep_to_cpu() -> None:
    """Keeps jax to the CPU where its CUDA plugin is installed but there is no NVIDIA GPU.

    jax would warn, on stderr and once per backend, that it found the plugin but no device. The plugin is
    there on purpose: it is what `--device h200` compiles with. Importing `remat` may have imported jax, which
    reads JAX_PLATFORMS while it is imported, so the variable alone (for child processes) is not enough.
    A choice of the user's, a TPU, and any machine without the plugin are left alone.
    """
    has_plugin = any(is_installed(f"jax_plugins.xla_cuda{number}") for number in (13, 12))
    has_device = has_nvidia_device() or is_installed("libtpu")
    if not has_plugin or has_device or "JAX_PLATFORMS" in os.environ:
        return
    import jax

    if jax.config.jax_platforms is None:  # type: ignore[attr-defined]
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax.config.update("jax_platforms", "cpu")


def has_nvidia_device() -> bool:
    """Whether a driver made a device file."""
    return any(map(os.path.exists, _DEVICE_FILES))


def is_installed(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # not even its parent package; or it is switched off
        return False
