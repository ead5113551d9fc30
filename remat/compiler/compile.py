"""What the compiler says about a program: memory, kernels, traffic, without running it.

`compile_report` compiles for the attached device, or for a GPU that is not there. In the second
case XLA's own GPU compiler runs on this machine's CPU: memory and the scheduled program are real,
and only what would have been tuned by running kernels on the GPU is a guess.
`CompileReport.unknown` names whatever a number leaves out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from remat import compat
from remat.compiler.hlo import Module, parse_module
from remat.compiler.kernels import Kernel, find_kernels
from remat.compiler.report import CompileReport
from remat.compiler.toolchain import Missing, Plugin, find_plugin, how_to_install, missing_tools
from remat.core.devices import Device, device_of_kind, get_device
from remat.core.errors import CompileError
from remat.trace.jitted import jitted

__all__ = [
    "CPU_COMPILER_OPTIONS",
    "CompileReport",
    "Kernel",
    "compile_report",
    "compiler_options",
    "target_device",
]

CPU_COMPILER_OPTIONS: Mapping[str, str] = MappingProxyType(
    {"xla_disable_hlo_passes": "cse_barrier_expander"}
    if compat.CPU_UNDOES_REMATERIALIZATION
    else {}
)
"""Options that keep rematerialization alive on XLA:CPU; empty since jax 0.11.1, which needs none.

Before, XLA:CPU's pass ``cse_barrier_expander`` deletes optimization barriers, after which common
subexpression elimination merges recomputed values with the ones they replace.
"""

_LARGE_CONSTANT_BYTES = 4096
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_DATA_DIR_OPTION = "xla_gpu_cuda_data_dir"
_SAMPLE_PROGRAM = """
import json, sys
from remat.compiler.compile import compile_sample
compile_sample(*json.loads(sys.argv[1]))
"""
_SAMPLE_SECONDS = 300
_KEPT = (
    "optimization barriers were kept: compiled with xla_disable_hlo_passes=cse_barrier_expander; "
    "a plain jit on CPU does not do this (see remat.compiler.compile.compiler_options)"
)
_NOT_KEPT = (
    "optimization barriers were left to XLA:CPU, which may undo rematerialization outside of loops"
)
_CPU_TRAFFIC = "traffic is that of the CPU program, caches ignored; a GPU program differs"
_NO_TUNING = (
    "kernels tuned by running them on the GPU (matmul tilings, cuBLAS and cuDNN algorithms and "
    "their scratch space): defaults were taken, because the GPU is not attached"
)
_ROOFLINE = "roofline_seconds is an estimate: data-sheet peaks, perfect overlap inside each kernel"


def compiler_options(platform: str) -> dict[str, str]:
    """Compiler options under which rematerialization survives on a platform.

    Args:
        platform: a jax platform or device name: ``"cpu"``, ``"gpu"``, ``"h100"``, ...

    Returns:
        Options for ``jax.jit(f, compiler_options=...)`` or ``lowered.compile(...)``; empty where
        none are needed.
    """
    return dict(CPU_COMPILER_OPTIONS) if platform.lower() == "cpu" else {}


def compile_report(
    f: Callable[..., Any],
    *args: Any,
    device: str | None = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    keep_barriers: bool = True,
    **kwargs: Any,
) -> CompileReport:
    """Compiles ``jax.jit(f)`` for arguments of these shapes and reports; nothing is executed.

    Args:
        f: a function; if it is jitted already, it is compiled as it is. With modules of NNX among the arguments it
            is compiled by ``nnx.jit``, which keeps what it changes in them.
        *args: arrays, `jax.ShapeDtypeStruct`, pytrees of them, models with leaves that are no arrays, or static
            arguments.
        device: None for the attached default device; ``"cpu"``; or a GPU that need not be there,
            ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"`` (one device of it).
        static_argnums: as for `jax.jit`.
        donate_argnums: as for `jax.jit`.
        compiler_options: for XLA, on top of ours.
        keep_barriers: on CPU, compile with `CPU_COMPILER_OPTIONS`, so that XLA:CPU does not undo
            rematerialization. Changes nothing since jax 0.11.1, where these are empty.
        **kwargs: keyword arguments of `f`.

    Returns:
        The report. Its `unknown` says what its numbers leave out.

    Raises:
        CompileError: the device is not known, its compiler is not installed or lacks its tools, or the
            compiler fails.
    """
    target = _target(device, (compiler_options or {}).get(_DATA_DIR_OPTION))
    options = _merged_options(target.platform, compiler_options, keep_barriers)
    static, donated = _as_tuple(static_argnums), _as_tuple(donate_argnums)
    skipped = {number % len(args) for number in static} if args else set()
    shapes = [a if i in skipped else target.shapes_of(a) for i, a in enumerate(args)]
    call = (tuple(shapes), target.shapes_of(kwargs))
    start = time.perf_counter()
    if target.sharding is None or any(map(_is_array, jax.tree.leaves(call))):
        step = jitted(f, *call, static, donated)
        compiled = _compile(step, *call, target, options)
    else:
        here = jax.jit(functools.partial(f, *args, **kwargs), out_shardings=target.sharding)
        compiled = _compile(here, (), {}, target, options)
    seconds = time.perf_counter() - start
    notes = _argument_notes(target, (args, kwargs))
    return _report(compiled, target, options, seconds, notes)


def target_device(name: str | None) -> Device | None:
    """Returns the device that programs are compiled for: by name, or the attached one, None if it is not known.

    Raises:
        CompileError: no such device.
    """
    return device_of_kind(jax.devices()[0].device_kind) if name is None else get_device(name)


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where to compile for: `sharding` is None for the attached default device."""

    name: str
    platform: str
    is_attached: bool
    device: Device | None
    sharding: jax.sharding.Sharding | None

    def shapes_of(self, tree: Any) -> Any:
        """Every array as a `jax.ShapeDtypeStruct` on this target; other leaves as they are."""
        return jax.tree.map(lambda leaf: self._shape_of(leaf) if _is_array(leaf) else leaf, tree)

    def _shape_of(self, leaf: Any) -> jax.ShapeDtypeStruct:
        own = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.Array) and not leaf.committed:
            own = None
        sharding = self.sharding or own
        if self.sharding is not None and getattr(own, "memory_kind", None) == "pinned_host":
            sharding = self.sharding.with_memory_kind("pinned_host")
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def _target(name: str | None, data_dir: str | None) -> _Target:
    if name is None or (get_device(name).gpu is None and jax.default_backend() == name.lower()):
        attached = jax.devices()[0]
        known = device_of_kind(attached.device_kind)
        label = known.name if known else attached.device_kind
        return _Target(label, attached.platform, True, known, None)
    device = get_device(name)
    if device.gpu is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices(device.name)[0])
        return _Target(device.name, device.name, True, device, sharding)
    return _Target(device.name, "cuda", False, device, _absent_gpu(device, data_dir))


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
    target = _Target(name, "cuda", False, device, sharding)
    shape = jax.ShapeDtypeStruct((256, 256), np.float32, sharding=sharding)
    options = {} if data_dir is None else {_DATA_DIR_OPTION: data_dir}
    _compile(jax.jit(sample), (shape,), {}, target, options)


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


def _topology(device: Device) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(
        device.name, "cuda", target_config=device.target_config, topology="1x1x1"
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


def _compile(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: _Target,
    options: Mapping[str, Any],
) -> jax.stages.Compiled:
    traced = step.trace(*args, **kwargs)
    lowered = traced.lower() if target.is_attached else traced.lower(lowering_platforms=("cuda",))
    try:
        return lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(
            f"XLA could not compile for {target.name!r} with compiler_options={dict(options)}: "
            f"{error}"
        ) from error


def _merged_options(
    platform: str, own: Mapping[str, Any] | None, keep_barriers: bool
) -> dict[str, Any]:
    merged: dict[str, Any] = dict(compiler_options(platform)) if keep_barriers else {}
    for key, value in (own or {}).items():
        is_list = key == "xla_disable_hlo_passes" and key in merged
        merged[key] = f"{merged[key]},{value}" if is_list and value else value
    return merged


def _report(
    compiled: jax.stages.Compiled,
    target: _Target,
    options: Mapping[str, Any],
    seconds: float,
    argument_notes: tuple[str, ...],
) -> CompileReport:
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    if memory is None or not text:
        raise CompileError(
            f"The compiler of {target.name!r} gives no memory analysis or no program text; "
            "expected both. Try device='cpu' or one of the GPUs."
        )
    module = parse_module(text)
    kernels, notes = find_kernels(module)
    notes += argument_notes + _constant_notes(module)
    roofline = _roofline_seconds(kernels, target.device)
    return CompileReport(
        device=target.name,
        is_attached=target.is_attached,
        jax_version=jax.__version__,
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        kernel_count=len(kernels),
        kernels_executed=sum(k.trip_count for k in kernels),
        hbm_traffic_bytes=sum(k.traffic_bytes for k in kernels),
        host_traffic_bytes=sum(k.host_bytes * k.trip_count for k in kernels),
        matmuls_executed=sum(k.matmuls * k.trip_count for k in kernels),
        convolutions_executed=sum(k.convolutions * k.trip_count for k in kernels),
        roofline_seconds=roofline,
        compile_seconds=seconds,
        compiler_options=dict(options),
        unknown=notes + _target_notes(target, options, roofline),
        kernels=kernels,
        hlo_text=text,
    )


def _roofline_seconds(kernels: Sequence[Kernel], device: Device | None) -> float | None:
    if device is None or device.is_nominal:
        return None
    return sum(
        kernel.trip_count
        * max(
            kernel.heavy_flops / device.matmul_flops_per_second(kernel.heavy_dtype),
            (kernel.operand_bytes + kernel.result_bytes) / device.memory_bytes_per_second,
        )
        for kernel in kernels
    )


def _target_notes(
    target: _Target, options: Mapping[str, Any], roofline: float | None
) -> tuple[str, ...]:
    notes: list[str] = []
    if target.platform == "cpu":
        notes.append(_CPU_TRAFFIC)
    if target.platform == "cpu" and compat.CPU_UNDOES_REMATERIALIZATION:
        is_kept = "cse_barrier_expander" in str(options.get("xla_disable_hlo_passes", ""))
        notes.append(_KEPT if is_kept else _NOT_KEPT)
    if not target.is_attached:
        notes.append(_NO_TUNING)
    notes.append(
        f"roofline_seconds: no data sheet for {target.name!r}" if roofline is None else _ROOFLINE
    )
    return tuple(notes)


def _argument_notes(target: _Target, arguments: Any) -> tuple[str, ...]:
    """Arguments spread over several devices are whole where the target is one device."""
    placed = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    widest = max((len(s.device_set) for s in placed if s is not None), default=1)
    if target.sharding is None or widest == 1:
        return ()
    return (
        f"arguments sharded over {widest} devices: compiled for one device that holds them whole",
    )


def _constant_notes(module: Module) -> tuple[str, ...]:
    """Arrays that a function closes over are part of the program, and of no size in the report."""
    instructions = (i for c in module.computations.values() for i in c.instructions)
    constants = (i.shape for i in instructions if i.opcode == "constant" and i.shape.dims)
    count_bytes = sum(shape.bytes for shape in constants)
    if count_bytes < _LARGE_CONSTANT_BYTES:
        return ()
    return (
        f"{count_bytes} bytes of constant arrays (closed over by the function) are in none of the "
        "sizes; pass them as arguments",
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)
