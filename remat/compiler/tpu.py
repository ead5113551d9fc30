"""XLA's TPU compiler on a machine without a TPU: libtpu, asked for one chip by name."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import jax
from jax.experimental import topologies

from remat.core.devices import Device
from remat.core.errors import CompileError

__all__ = ["described_tpu", "how_to_install_tpu", "is_tpu_compiler_there"]

# Read by libtpu when it is loaded. Otherwise it asks the cloud's metadata server, which is not there, what machine
# this is, says so in five lines, and keeps every other process from loading it.
_NO_TPU_HERE: Mapping[str, str] = MappingProxyType({
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
})  # fmt: skip


def is_tpu_compiler_there() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def how_to_install_tpu() -> str:
    """One sentence: the command that installs it, in the version of the installed jax."""
    jax_version = importlib.metadata.version("jax")
    return (
        f'On Linux (x86-64): pip install "jax[tpu]=={jax_version}" (about 140 MB to load, 700 MB '
        "installed; needs no TPU); elsewhere, use device='cpu'."
    )


@functools.cache
def described_tpu(device: Device) -> jax.sharding.SingleDeviceSharding:
    """A place on a TPU that is only described; arguments put there are compiled for it.

    Raises:
        CompileError: libtpu is not there, or does not know the chip.
    """
    assert device.tpu is not None
    if not is_tpu_compiler_there():
        raise CompileError(
            f"Compiling for {device.name!r} needs XLA's TPU compiler, libtpu, which is not installed. "
            f"{how_to_install_tpu()}"
        )
    chip = device.tpu.topology
    try:
        with _without_a_tpu():
            topology = topologies.get_topology_desc(chip, "tpu", chips_per_host_bounds=(1, 1, 1))
    except Exception as error:
        raise CompileError(
            f"Compiling for {device.name!r} needs XLA's TPU compiler, which could not be asked for {chip!r} "
            f"({type(error).__name__}: {error}). {how_to_install_tpu()}"
        ) from error
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


@contextlib.contextmanager
def _without_a_tpu() -> Iterator[None]:
    """Tells libtpu that there is no TPU; where one is attached, it is loaded already, and nothing is said."""
    if jax.default_backend() == "tpu":
        yield
        return
    new = {name: value for name, value in _NO_TPU_HERE.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
