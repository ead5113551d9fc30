"""What programs are compiled for: the attached device, the CPU, or a GPU or TPU that is only described to XLA.

In the last case XLA's own compiler for it runs on this machine's CPU. For GPUs it is a plugin of jax, and needs
CUDA's tools; for TPUs it is libtpu (`remat.compiler.tpu`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from remat import compat
from remat.compiler.toolchain import Missing, Plugin, find_plugin, how_to_install, missing_tools
from remat.compiler.tpu import described_tpu
from remat.core.devices import Device, device_of_kind, get_device
from remat.core.errors import CompileError, DeviceMemoryError

__all__ = [
    "DATA_DIR_OPTION",
    "Target",
    "compile_for",
    "compile_sample",
    "devices_of",
    "find_target",
    "is_array",
    "lower_for",
    "target_device",
]

DATA_DIR_OPTION = "xla_gpu_cuda_data_dir"
_ATTACHED = "None for the attached default device"
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_SAMPLE_PROGRAM = """
import json, sys
from remat.compiler.targets import compile_sample
compile_sample(*json.loads(sys.argv[1]))
"""
_SAMPLE_SECONDS = 300  # a sample that is compiled in a second hangs if it takes as long


def target_device(name: str | None) -> Device | None:
    """Returns the device that programs are compiled for: by name, or the attached one, None if it is not known.

    Raises:
        CompileError: no such device.
    """
    return (
        device_of_kind(jax.devices()[0].device_kind)
        if name is None
        else get_device(name, _ATTACHED)
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """Where to compile for: `sharding` is None for the attached default device, and where the arrays say it."""

    name: str
    platform: str
    is_attached: bool
    device: Device | None
    sharding: jax.sharding.Sharding | None

    def shapes_of(self, tree: Any) -> Any:
        """Every array as a `jax.ShapeDtypeStruct` on this target; other leaves as they are."""
        return jax.tree.map(lambda leaf: self._shape_of(leaf) if is_array(leaf) else leaf, tree)

    def _shape_of(self, leaf: Any) -> jax.ShapeDtypeStruct:
        own = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.Array) and not leaf.committed:
            own = None
        sharding = self.sharding or own
        if self.sharding is not None and getattr(own, "memory_kind", None) == "pinned_host":
            sharding = self.sharding.with_memory_kind("pinned_host")
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def find_target(name: str | None, data_dir: str | None) -> Target:
    """Returns where to compile for.

    Args:
        name: of a device; None for the attached one.
        data_dir: where the compiler options tell XLA to look for CUDA's tools; None if nowhere.

    Raises:
        CompileError: no such device, or XLA's compiler for it, or what that needs, is not there.
    """
    if name is None or get_device(name, _ATTACHED).platform == jax.default_backend() == "cpu":
        attached = jax.devices()[0]
        known = device_of_kind(attached.device_kind)
        label = known.name if known else attached.device_kind
        return Target(label, attached.platform, True, known, None)
    device = get_device(name)
    if device.platform == "cpu":
        sharding = jax.sharding.SingleDeviceSharding(jax.devices(device.name)[0])
        return Target(device.name, device.name, True, device, sharding)
    is_gpu = device.platform == "cuda"
    sharding = _absent_gpu(device, data_dir) if is_gpu else described_tpu(device)
    return Target(device.name, device.platform, False, device, sharding)


def devices_of(name: str | None, count: int) -> list[Any]:
    """Returns so many devices to compile a program for that runs on all of them.

    Args:
        name: of a device; None for the attached ones.
        count: of devices.

    Raises:
        CompileError: no such device, or fewer of them; or XLA's compiler, or what it needs, is not there.
    """
    target = find_target(name, None)
    if target.is_attached:
        found = jax.devices() if target.sharding is None else jax.devices(target.platform)
    elif target.platform == "cuda":
        assert target.device is not None
        found = list(_topology(target.device, count).devices)
    else:
        assert target.sharding is not None
        found = list(target.sharding.device_set)
    if len(found) < count:
        raise CompileError(
            f"What runs on {count} devices cannot be compiled for {target.name!r}: there are {len(found)}"
        )
    return found[:count]


def _absent_gpu(device: Device, data_dir: str | None) -> jax.sharding.SingleDeviceSharding:
    """A place on a GPU that is only described; arguments put there are compiled for it.

    Args:
        device: a GPU.
        data_dir: where the compiler options tell XLA to look for CUDA's tools; None if nowhere.

    Raises:
        CompileError: XLA's GPU compiler, or what it needs, is not there.
    """
    plugin = find_plugin()
    if plugin is None:
        raise CompileError(
            f"Compiling for {device.name!r} needs XLA's GPU compiler, a plugin of jax, which is not "
            f"installed. {how_to_install()}"
        )
    plugin.check_versions()
    _check_tools(device, plugin, data_dir or compat.cuda_data_dir())
    return _described_gpu(device, plugin.module)


@functools.cache
def _check_tools(device: Device, plugin: Plugin, data_dir: str | None) -> None:
    """Makes sure that XLA finds its tools, because some versions of it crash if it does not.

    Only success is remembered: what is installed meanwhile is found.
    """
    missing = missing_tools(device, plugin, data_dir)
    if missing is None:
        return
    failure = _failure_in_another_process(device, data_dir, missing)
    if failure is not None:
        raise CompileError(
            f"Compiling for {device.name!r}: XLA's GPU compiler lacks {missing.tools}. "
            f"{how_to_install(plugin.cuda)} Looked for in {missing.places}. XLA was tried in another "
            f"process: {failure}."
        )


@functools.cache
def _failure_in_another_process(
    device: Device, data_dir: str | None, missing: Missing
) -> str | None:
    """Compiles a sample where a crash hurts nobody; returns what went wrong, None if nothing did.

    Args:
        device: a GPU.
        data_dir: as for `_check_tools`.
        missing: what was not found; only there so that another lack is tried again.
    """
    if not sys.executable:
        return "there is no Python interpreter to try it with"
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    arguments = json.dumps([device.name, data_dir])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SAMPLE_PROGRAM, arguments],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
            timeout=_SAMPLE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"it died of {signal.Signals(-done.returncode).name}"
    said = [line for line in done.stderr.splitlines() if "Error: " in line]
    return said[-1].strip() if said else f"it ended with status {done.returncode}"


def compile_sample(name: str, data_dir: str | None) -> None:
    """Compiles, unchecked, a small program that needs every tool of XLA's GPU compiler.

    Args:
        name: of a GPU.
        data_dir: where XLA is told to look for its tools first; None if nowhere.

    Raises:
        CompileError: XLA could not compile it. Where its tools are missing, it may crash instead.
    """
    device, plugin = get_device(name), find_plugin()
    assert plugin is not None

    def sample(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jax.numpy.sin(c @ c), None), x, length=2)[0]

    sharding = _described_gpu(device, plugin.module)
    target = Target(name, "cuda", False, device, sharding)
    shape = jax.ShapeDtypeStruct((256, 256), np.float32, sharding=sharding)
    options = {} if data_dir is None else {DATA_DIR_OPTION: data_dir}
    compile_for(lower_for(jax.jit(sample).trace(shape), target), target, options)


@functools.cache
def _described_gpu(device: Device, module: str) -> jax.sharding.SingleDeviceSharding:
    try:
        topology = _topology(device)
    except NotImplementedError:
        _register_cuda_plugin(module)
        topology = None
    try:
        topology = topology or _topology(device)
    except Exception as error:
        raise CompileError(
            f"Compiling for {device.name!r} needs XLA's GPU compiler, which could not be reached "
            f"({type(error).__name__}: {error}). {how_to_install()}"
        ) from error
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def _topology(device: Device, count: int = 1) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(
        device.name, "cuda", target_config=device.target_config, topology=f"1x1x{count}"
    )


def _register_cuda_plugin(module: str) -> None:
    """Registers an installed CUDA plugin that gave up because there are no CUDA libraries.

    That is what happens if jax was first used without ``JAX_PLATFORMS=cpu``. The backends are
    started before, so that jax does not try to run anything on the GPU that is missing.
    """
    jax.devices()
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        importlib.import_module(module).initialize()
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before


def lower_for(traced: Any, target: Target) -> jax.stages.Lowered:
    """Lowers what was traced: as `jax.jit(f).trace` returns it, or anything with the same `lower`.

    Raises:
        NameError: it communicates over an axis of a transformation around it, which it does not have alone.
        NotImplementedError: jax does not lower it, for that reason or another that it does not name.
    """
    try:
        if target.is_attached:
            return traced.lower()
        return traced.lower(lowering_platforms=(target.platform,))
    except (
        AssertionError
    ) as error:  # of jax, of most collectives; with `axis_index` it is a NameError
        if names := _axes_around(traced):
            raise NameError(
                f"it communicates over the axes {names} of a transformation around it"
            ) from error
        raise NotImplementedError(
            "jax does not lower it alone, as what communicates over an axis of a transformation around it"
        ) from error


def _axes_around(traced: Any) -> list[str]:
    """Names of the axes that a traced program is mapped over from outside, as far as jax says so."""
    effects = getattr(getattr(traced, "jaxpr", None), "effects", ())
    names = (getattr(e, "name", None) for e in effects if type(e).__name__ == "NamedAxisEffect")
    return sorted(str(name) for name in names if name is not None)


# What XLA:TPU says; sizes are in GiB, with two digits.
_TOO_LARGE = re.compile(
    r"RESOURCE_EXHAUSTED: .* HLO temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)"
)


# What XLA:GPU says where Triton has no tiling for a matmul. With a GPU tuning passes such a matmul on to cuBLAS;
# without one XLA 0.10.2 fails. (With 0.12 it was not seen to.)
_NO_TILING = "Couldn't find output tile sizes"
_TRITON_MATMULS = "xla_gpu_enable_triton_gemm"

# Machine code for a GPU that is not there is thrown away, and no other number depends on it: the program's text is
# the same. Of kernels with many operators LLVM's dear passes take most of the time: of an unrolled LSTM by XLA 0.12
# more than 13 minutes, and without them one.
_CODE_IS_NOT_RUN = {"xla_llvm_disable_expensive_passes": True}


def compile_for(
    lowered: jax.stages.Lowered, target: Target, options: Mapping[str, Any]
) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Compiles what was lowered for a target, with options for XLA; returns with which.

    For a GPU that is not there, machine code is made as fast as it can be, and a program with a matmul that XLA
    finds no tiling for is compiled again, with all matmuls of the library.

    Raises:
        DeviceMemoryError: XLA:TPU makes no program of what is larger than the chip's memory.
        CompileError: the compiler fails.
    """
    used = dict(options)
    is_absent_gpu = target.platform == "cuda" and not target.is_attached
    given = {**_CODE_IS_NOT_RUN, **used} if is_absent_gpu else used
    try:
        return lowered.compile(compiler_options=given or None), used
    except jax.errors.JaxRuntimeError as error:
        if needed := _TOO_LARGE.search(str(error)):
            raise DeviceMemoryError(
                f"the program needs {needed[1]} GiB of temporaries, and {target.name} has {needed[2]} GiB. XLA "
                "makes no program of what is too large for a TPU; keep less (another policy, a budget), or have "
                "remat.fit find out how",
                round(float(needed[1]) * 2**30),
            ) from error
        if is_absent_gpu and _NO_TILING in str(error) and _TRITON_MATMULS not in used:
            return compile_for(lowered, target, {**used, _TRITON_MATMULS: False})
        raise CompileError(
            f"XLA could not compile for {target.name!r} with compiler_options={used}: {error}"
        ) from error


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a call's arguments is an array, or describes one."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))
