"""What the compiler says about a program: memory, kernels, traffic, without running it.

`compile_report` compiles for the attached device, or for a GPU or TPU that is not there. In the second
case XLA's own compiler for it runs on this machine's CPU: memory and the scheduled program are real,
and only what would have been tuned by running kernels on a GPU is a guess.
`CompileReport.unknown` names whatever a number leaves out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from remat import compat
from remat.compiler.hlo import Module, on_chip_space, parse_module
from remat.compiler.kernels import Kernel, find_kernels
from remat.compiler.report import CompileReport
from remat.compiler.targets import (
    DATA_DIR_OPTION,
    Target,
    compile_for,
    find_target,
    is_array,
    lower_for,
)
from remat.compiler.toolchain import version_of
from remat.core.devices import Device
from remat.core.errors import CompileError, DeviceMemoryError
from remat.trace.calls import as_tuple
from remat.trace.jitted import jitted, places_of

__all__ = [
    "CPU_COMPILER_OPTIONS",
    "CompileReport",
    "Kernel",
    "TracedStep",
    "compile_report",
    "compiler_options",
    "trace_step",
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

_JAX_SETTINGS: Mapping[str, Any] = MappingProxyType({
    "jax_compiler_enable_remat_pass": True,
    "jax_disable_most_optimizations": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_optimization_level": "UNKNOWN",
})  # fmt: skip
"""Settings of jax that reach XLA beside the program, as they are where nobody changed them."""

_LARGE_CONSTANT_BYTES = 4096  # smaller constants of a program are not worth a note; chosen by look
_KEPT = (
    "optimization barriers were kept: compiled with xla_disable_hlo_passes=cse_barrier_expander; "
    "a plain jit on CPU does not do this (see remat.compile.compiler_options)"
)
_NOT_KEPT = (
    "optimization barriers were left to XLA:CPU, which may undo rematerialization outside of loops"
)
_CPU_TRAFFIC = "traffic is that of the CPU program, caches ignored; a GPU program differs"
_NO_TUNING = (
    "kernels tuned by running them on the GPU (matmul tilings, cuBLAS and cuDNN algorithms and "
    "their scratch space): defaults were taken, because the GPU is not attached"
)
_LIBRARY_MATMULS = (
    "matmuls: all of the library, as XLA finds no tiling for one of them without the GPU"
)
_VMEM = (
    "buffers on the chip (VMEM) are neither in temp_bytes nor in the traffic; "
    "copies into it count as if nothing ran beside them"
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
        device: None for the attached default device; ``"cpu"``; or a GPU or TPU that need not be there,
            ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, ``"v5e"``, ``"v5p"``, ``"v6e"`` (one device of it).
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
    step = trace_step(
        f,
        args,
        kwargs,
        device=device,
        static_argnums=static_argnums,
        donate_argnums=donate_argnums,
        compiler_options=compiler_options,
        keep_barriers=keep_barriers,
    )
    report, _ = step.compile()
    return report


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A function traced for a target, ready to be compiled.

    Attributes:
        seconds: that tracing took.
    """

    _traced: Any
    _target: Target
    _options: Mapping[str, Any]
    _notes: tuple[str, ...]
    seconds: float

    @functools.cached_property
    def _lowered(self) -> Any:
        return lower_for(self._traced, self._target)

    @property
    def described(self) -> tuple[str, ...]:
        """What the compiler's answer depends on, besides jaxlib's version: program, device and options, as text.

        Options are also those of this process: flags in its environment, and settings of jax.
        """
        options = sorted(f"{key}={value}" for key, value in self._options.items())
        options += _flags_of("XLA_FLAGS") + _settings_of_jax()
        if self._target.platform == "tpu":
            options += [f"libtpu {version_of('libtpu')}", *_flags_of("LIBTPU_INIT_ARGS")]
        return self._target.name, str(self._target.is_attached), *options, self._lowered.as_text()

    def compile(self) -> tuple[CompileReport, jax.stages.Compiled]:
        """Compiles, and returns the report with the program.

        Raises:
            CompileError: the compiler fails, or does not say what it made.
        """
        start = time.perf_counter()
        compiled, options = compile_for(self._lowered, self._target, self._options)
        seconds = self.seconds + time.perf_counter() - start
        notes = self._notes
        if options.keys() - self._options.keys():
            notes += (_LIBRARY_MATMULS,)
        return _report(compiled, self._target, options, seconds, notes), compiled

    def refused(self, error: DeviceMemoryError) -> CompileReport:
        """Returns what is known of a program that the compiler refused to make: its memory, and no kernels."""
        given = jax.tree.leaves(self._lowered.args_info)
        results = sum(map(_nbytes, jax.tree.leaves(self._lowered.out_info)))
        donated = sum(_nbytes(info) for info in given if info.donated)
        return CompileReport(
            device=self._target.name,
            is_attached=self._target.is_attached,
            jax_version=jax.__version__,
            temp_bytes=error.temp_bytes,
            argument_bytes=sum(map(_nbytes, given)),
            output_bytes=results,
            alias_bytes=min(donated, results),
            host_temp_bytes=0,
            kernel_count=0,
            kernels_executed=0,
            hbm_traffic_bytes=0,
            host_traffic_bytes=0,
            matmuls_executed=0,
            convolutions_executed=0,
            roofline_seconds=None,
            compile_seconds=self.seconds,
            compiler_options=dict(self._options),
            unknown=(f"all but the memory: {error}",),
            kernels=(),
            hlo_text="",
        )


def _flags_of(variable: str) -> list[str]:
    """Flags of the compiler in the environment, in an order that the same flags share.

    Of a flag that is given twice the last one counts, so that these keep their order. Flags that only say where
    XLA dumps what it does are left out.
    """
    given = os.environ.get(variable, "").strip()
    if given and not given.startswith("-"):  # the name of a file of flags
        with contextlib.suppress(OSError, ValueError):
            given = Path(given).read_text(encoding="utf-8")
    flags = sorted(given.split(), key=lambda flag: flag.partition("=")[0])
    return [f"{variable} {flag}" for flag in flags if not flag.startswith("--xla_dump_")]


def _settings_of_jax() -> list[str]:
    """What jax tells XLA besides the program, as far as this version of jax has it and it was changed."""
    found: list[str] = []
    for name, usual in _JAX_SETTINGS.items():
        # Some settings can be changed for a thread alone, which attributes know; others are no attributes.
        value = getattr(jax.config, name, None)
        value = jax.config.values.get(name, usual) if value is None else value
        if value != usual:
            found.append(f"{name}={value}")
    return found


def _nbytes(info: Any) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def trace_step(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: str | None = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    keep_barriers: bool = True,
    is_placed: bool = False,
) -> TracedStep:
    """Traces a function for what it is to be compiled for; the arguments are those of `compile_report`.

    Args:
        is_placed: whether the shardings of all arguments say already on which of such devices they are.

    Raises:
        CompileError: the device is not known, or its compiler is not installed or lacks its tools.
    """
    target = find_target(device, (compiler_options or {}).get(DATA_DIR_OPTION))
    if is_placed:
        target = dataclasses.replace(target, sharding=None)
    options = _merged_options(target.platform, compiler_options, keep_barriers)
    static, donated = as_tuple(static_argnums), as_tuple(donate_argnums)
    skipped = places_of(static, len(args))
    shapes = [a if i in skipped else target.shapes_of(a) for i, a in enumerate(args)]
    call = (tuple(shapes), target.shapes_of(kwargs))
    start = time.perf_counter()
    if target.sharding is None or any(map(is_array, jax.tree.leaves(call))):
        traced = jitted(f, *call, static, donated).trace(*call[0], **call[1])
    else:
        here = jax.jit(functools.partial(f, *args, **kwargs), out_shardings=target.sharding)
        traced = here.trace()
    seconds = time.perf_counter() - start
    return TracedStep(traced, target, options, _argument_notes(target, (args, kwargs)), seconds)


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
    target: Target,
    options: Mapping[str, Any],
    seconds: float,
    argument_notes: tuple[str, ...],
) -> CompileReport:
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    if memory is None or not text:
        raise CompileError(
            f"The compiler of {target.name!r} gives no memory analysis or no program text; "
            "expected both. Try device='cpu', or a GPU or TPU by name."
        )
    module = parse_module(text, on_chip_space(target.name))
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
    target: Target, options: Mapping[str, Any], roofline: float | None
) -> tuple[str, ...]:
    notes: list[str] = []
    if target.platform == "cpu":
        notes.append(_CPU_TRAFFIC)
    if target.platform == "cpu" and compat.CPU_UNDOES_REMATERIALIZATION:
        is_kept = "cse_barrier_expander" in str(options.get("xla_disable_hlo_passes", ""))
        notes.append(_KEPT if is_kept else _NOT_KEPT)
    if target.platform == "tpu":
        notes.append(_VMEM)
    elif not target.is_attached:
        notes.append(_NO_TUNING)
    notes.append(
        f"roofline_seconds: no data sheet for {target.name!r}" if roofline is None else _ROOFLINE
    )
    return tuple(notes)


def _argument_notes(target: Target, arguments: Any) -> tuple[str, ...]:
    """Arguments spread over several devices are whole where the target is one device."""
    if target.sharding is None:
        return ()
    placed = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    widest = max((len(s.device_set) for s in placed if s is not None), default=1)
    if widest == 1:
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
