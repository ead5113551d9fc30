"""Measured seconds of operators: each distinct one is compiled and run alone on an attached device.

What `remat.core.cost.op_seconds` estimates from data sheets is measured here. Operators that XLA fuses with their
neighbours cost nothing like their own time when run alone, so they keep their estimate; the others (matrix
products, convolutions, scatters, loops of a fixed length, ...) are timed once per primitive, parameters,
operand types, device and jax version, and remembered in a file.

A measurement is the median of several batches of back-to-back runs on made-up operands: floats between -1 and
1, indices inside their array. It includes what one launch costs at the least, since batches are dispatched without
waiting; it does not include transfers. What cannot run alone is estimated, and `Costs.reasons` says why: side
effects, collectives, and loops or branches whose work depends on data.

The cache knows device and jax version, not XLA's flags or the driver: delete its file after changing those.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat, wrapping
from remat.core.cost import op_seconds
from remat.core.devices import Device, device_of_kind, get_device
from remat.core.errors import CompileError, PolicyError
from remat.core.graph import Op
from remat.core.interrupt import Progress
from remat.core.primitives import OpClass
from remat.planning.planners import PlanPlanner, PolicyPlanner
from remat.resolve import resolve
from remat.trace.classify import classify_equation
from remat.trace.joint import Joint, check_differentiable
from remat.trace.program import Literal, Program

__all__ = ["Costs", "default_cache_dir", "measure", "measure_joint"]

JaxDevice = Any  # `jax.Device`, which type checkers take for a variable

_FORMAT = 1
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_BATCH_SECONDS = 2e-3  # a batch runs at least this long, so that the clock's grain does not matter
_MAX_BATCH = 1000
_INDEX_BOUND = 8  # made-up integers lie below it, unless the operator says what they index

# Kinds that mean nothing outside their program, and why.
_NOT_ALONE: Mapping[OpClass, str] = MappingProxyType(
    {
        OpClass.EFFECT: "has side effects or calls the host",
        OpClass.COLLECTIVE: "communicates between devices",
        OpClass.METADATA: "is an identity that only constrains the compiler",
    }
)
_DATA_DEPENDENT: Mapping[str, str] = MappingProxyType(
    {
        "while": "a while loop runs as often as its data say",
        "cond": "which branch runs depends on data",
        "shard_map": "runs on several devices",
        "xla_pmap": "runs on several devices",
    }
)


@dataclass(frozen=True)
class Costs:
    """Seconds of every operator of a joint graph.

    Attributes:
        seconds: by operator id (`Graph.ops`); one run each.
        measured: the operators whose seconds were measured, now or in an earlier run.
        reasons: why the other heavy or unfusible operators were not, by operator id.
        executed: how many distinct operators were compiled and run this time; 0 if the cache had all of them.
        device: kind of the device that was measured on, as jax names it.
        estimated_as: name of the device (`remat.core.devices`) whose data sheet the estimates are from.
        fingerprint: of the graph, `Graph.fingerprint()`: operator ids mean nothing for another one.
    """

    seconds: Mapping[int, float]
    measured: frozenset[int]
    reasons: Mapping[int, str]
    executed: int
    device: str
    estimated_as: str
    fingerprint: str

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.device, self.estimated_as, self.measured))

    @property
    def measured_seconds(self) -> dict[int, float]:
        """The measured operators only, by operator id."""
        return {op: self.seconds[op] for op in sorted(self.measured)}

    @property
    def total_seconds(self) -> float:
        """Every operator once, measured or estimated."""
        return math.fsum(self.seconds.values())

    def __str__(self) -> str:
        """Returns one line: how many were measured, where, and what they take together."""
        measured = math.fsum(self.measured_seconds.values())
        text = (
            f"{len(self.measured)} of {len(self.seconds)} operators measured on {self.device}: "
            f"{measured:.3e} s of {self.total_seconds:.3e} s; the rest estimated as {self.estimated_as}"
        )
        unable = len(self.reasons)
        return f"{text}, {unable} of them because they cannot run alone" if unable else text


def measure(
    fun: Callable[..., Any],
    *args: Any,
    remat_policy: Any = "min_cut",
    argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    nested_checkpoints: str = "take_over",
    device: JaxDevice | None = None,
    estimate_as: str | None = None,
    cache_dir: Path | str | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Costs:
    """Measures the operators of a function's joint forward/backward graph.

    Args:
        fun: any differentiable JAX function.
        *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`s. Their contents are not used.
        remat_policy: as in `remat.plan`: the graph is `remat.plan(...).graph`. The policy matters only for loops,
            whose operators carry what the plan of their body keeps; a `remat.Plan` gives that plan's graph.
        argnums, static_argnums, static_argnames, nested_checkpoints: as in `remat.plan`.
        device, estimate_as, cache_dir, repeats, progress: as in `measure_joint`.

    Returns:
        The costs of the function's own graph; a loop is one operator in it, all its iterations together.

    Raises:
        PolicyError, TraceError: as `remat.plan`.
        CompileError, ValueError: as `measure_joint`.
    """
    resolved = resolve(remat_policy, None)
    if not isinstance(resolved, (PolicyPlanner, PlanPlanner)):
        raise PolicyError(
            f"remat_policy={remat_policy!r} makes no plan: it is jax's own or off; expected a policy of "
            "remat.policies or a remat.Plan, for instance 'min_cut'"
        )
    wrapping.check_options("staged", nested_checkpoints)
    wrapped = wrapping.Wrapped(
        fun, resolved, static_argnums, static_argnames, True, "staged", nested_checkpoints
    )
    call = wrapped.flatten(args, kwargs)
    traced = wrapped.traced(call)
    chosen = wrapping.differentiated(len(args), argnums, wrapped.static_argnums, call)
    function = traced.function
    flags = tuple(
        flag and jnp.issubdtype(function.primal.avals[value].dtype, jnp.inexact)
        for flag, value in zip(
            (*(False,) * len(traced.lifted), *chosen), function.primal.inputs, strict=True
        )
    )
    check_differentiable(function.whole, flags)
    joint = function.staged([*traced.lifted, *call.leaves], flags).joint
    return measure_joint(
        joint,
        device=device,
        estimate_as=estimate_as,
        cache_dir=cache_dir,
        repeats=repeats,
        progress=progress,
    )


def measure_joint(
    joint: Joint,
    *,
    device: JaxDevice | None = None,
    estimate_as: str | None = None,
    cache_dir: Path | str | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Costs:
    """Measures the heavy and the unfusible operators of a joint program, each distinct one once.

    Every finished measurement is written to the cache at once, so an interrupted run goes on where it stopped.
    May be called while jax is tracing something else.

    Args:
        joint: a traced program with its graph.
        device: where to run; None for jax's first device.
        estimate_as: name of the device (`remat.core.devices.DEVICES`) whose data sheet prices what is not measured;
            None for that of `device`.
        cache_dir: folder of the cache files; None for `default_cache_dir()`. There is one file for each kind of
            device and version of jax.
        repeats: batches of runs; the median counts.
        progress: called with one line before every operator that is compiled and run.

    Returns:
        Seconds of every operator, and which of them were measured.

    Raises:
        CompileError: `estimate_as` is unknown, or None and there is no data sheet for the device.
        ValueError: `repeats` is not positive.

    Warns:
        RuntimeWarning: an operator could not be compiled or run (it is estimated then, and tried again next
            time), or the cache could not be read or written.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: expected at least 1; 5 is the default")
    chip = jax.devices()[0] if device is None else device
    sheet = _data_sheet(chip, estimate_as)
    graph, program = joint.graph, joint.program
    seconds = {op.id: op_seconds(graph, op, sheet) for op in graph.ops}
    groups, reasons = _groups(joint)
    cache = _Cache(Path(cache_dir) if cache_dir else default_cache_dir(), _kind_of(chip))
    missing = [key for key in groups if key not in cache]
    failed: dict[str, str] = {}
    for number, key in enumerate(missing, start=1):
        first = groups[key][0]
        name = _describe(program, first)
        if progress is not None:
            progress(f"measuring {number}/{len(missing)}: {name}")
        try:
            found = _seconds_alone(program, first, chip, repeats)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            failed[key] = f"could not be run alone: {type(error).__name__}: {_one_line(error)}"
            continue
        cache.add(key, found, name)
    for key, members in groups.items():
        if key in failed:
            reasons.update(dict.fromkeys(members, failed[key]))
        else:
            seconds.update(dict.fromkeys(members, cache[key]))
    if failed:
        some = "; ".join(f"{_describe(program, groups[k][0])} {why}" for k, why in failed.items())
        warnings.warn(
            f"{len(failed)} of {len(groups)} distinct operators are estimated: {some}",
            RuntimeWarning,
            stacklevel=2,
        )
    return Costs(
        seconds=MappingProxyType(seconds),
        measured=frozenset(op for key in groups if key not in failed for op in groups[key]),
        reasons=MappingProxyType(reasons),
        executed=len(missing) - len(failed),
        device=chip.device_kind,
        estimated_as=sheet.name,
        fingerprint=graph.fingerprint(),
    )


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/remat`, or `~/.cache/remat` where that is unset, empty or relative."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "remat"


# --- what is measured -----------------------------------------------------------------------------


def _groups(joint: Joint) -> tuple[dict[str, list[int]], dict[int, str]]:
    """Operators to be measured by the key they share, and why others are not."""
    groups: dict[str, list[int]] = {}
    reasons: dict[int, str] = {}
    for op in joint.graph.ops:
        if op.fusible and not op.heavy:
            continue
        why = _cannot_run_alone(joint.program, op)
        if why:
            reasons[op.id] = why
        else:
            groups.setdefault(_key(joint.program, op.id), []).append(op.id)
    return groups, reasons


def _cannot_run_alone(program: Program, op: Op) -> str:
    """Returns why an operator has no time of its own; empty if it has one."""
    equation = program.equations[op.id]
    if op.effectful:
        return _NOT_ALONE[OpClass.EFFECT]
    for value in (*equation.reads, *equation.outputs):
        aval = program.avals[value]
        if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
            return f"takes or gives {aval}, which is not an array"
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        if not getattr(mesh, "empty", True):
            return "is placed on a mesh of devices"
    return _obstacle(equation.source)


def _obstacle(eqn: Any) -> str:
    """Returns what in an equation or its bodies keeps it from running alone; empty if nothing does."""
    name = compat.name_of(eqn)
    if name in _DATA_DEPENDENT:
        return _DATA_DEPENDENT[name]
    cost = classify_equation(eqn)
    if cost.effectful:
        return _NOT_ALONE[OpClass.EFFECT]
    if cost.op_class in _NOT_ALONE and not cost.fusible:
        return _NOT_ALONE[cost.op_class]
    if _is_kernel(eqn):
        return ""  # it reads and writes its own references, which is nobody else's business
    for body in compat.sub_jaxprs(eqn):
        for inner in compat.open_jaxpr(body)[0].eqns:
            why = _obstacle(inner)
            if why:
                return why
    return ""


# --- keys -----------------------------------------------------------------------------------------


def _key(program: Program, index: int) -> str:
    """Returns what decides an operator's time on one device: primitive, parameters, operand types.

    Equal in another process: addresses are struck out of printed parameters, so functions among them count by
    their names. For a custom kernel that is not enough (its index maps are not even printed): what the compiler
    is handed takes part.
    """
    equation = program.equations[index]
    operands = [
        f"={atom.value!r}" if isinstance(atom, Literal) else _type(program.avals[atom])
        for atom in equation.inputs
    ]
    params = sorted((name, str(param)) for name, param in equation.source.params.items())
    text = repr((equation.source.primitive.name, operands, params))
    digest = hashlib.sha256(_ADDRESS.sub("0x", text).encode())
    if _has_kernel(equation.source):
        run, avals = _alone(program, index)
        with contextlib.suppress(Exception):  # then running it fails too, and says why
            digest.update(jax.jit(run).lower(*avals).as_text().encode())
    return digest.hexdigest()[:32]


def _is_kernel(eqn: Any) -> bool:
    """Whether an equation is a custom kernel: what it does is not all in its printed parameters."""
    if eqn.primitive.name == "pallas_call":
        return True
    return classify_equation(eqn).op_class is OpClass.OPAQUE


def _has_kernel(eqn: Any) -> bool:
    """Whether an equation is a custom kernel or has one in its bodies."""
    bodies = [compat.open_jaxpr(body)[0] for body in compat.sub_jaxprs(eqn)]
    return _is_kernel(eqn) or any(_has_kernel(inner) for body in bodies for inner in body.eqns)


def _type(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _describe(program: Program, index: int) -> str:
    equation = program.equations[index]
    types = [_type(program.avals[value]) for value in equation.reads]
    listed = ", ".join(types[:4]) + (f", ... {len(types)} operands" if len(types) > 4 else "")
    return f"{compat.name_of(equation.source)}({listed})"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


# --- running --------------------------------------------------------------------------------------


def _alone(program: Program, index: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """One equation as a function of its operands that are values, and their types."""
    equation = program.equations[index]

    def run(*values: Any) -> Sequence[Any]:
        given = iter(values)
        operands = [a.value if isinstance(a, Literal) else next(given) for a in equation.inputs]
        return compat.evaluate_equation(equation.source, operands, equation.site)

    avals = [program.avals[value] for value in equation.reads]
    return run, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def _seconds_alone(program: Program, index: int, device: JaxDevice, repeats: int) -> float:
    """Compiles one equation for a device, runs it there, and returns the seconds of one run."""
    run, avals = _alone(program, index)
    bound = _index_bound(program, index)
    # The caller may be tracing: these arrays are real in any case.
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        operands = [jax.device_put(_made_up(aval, bound), device) for aval in avals]
        compiled = jax.jit(run).lower(*operands).compile()
        jax.block_until_ready(compiled(*operands))  # the first run loads kernels
        once = _batch_seconds(compiled, operands, 1)
        count = min(max(math.ceil(_BATCH_SECONDS / max(once, 1e-9)), 1), _MAX_BATCH)
        return statistics.median(
            _batch_seconds(compiled, operands, count) / count for _ in range(repeats)
        )


def _batch_seconds(compiled: Any, operands: Sequence[Any], count: int) -> float:
    start = time.perf_counter()
    results = None
    for _ in range(count):
        results = compiled(*operands)  # drops the results before: their memory is free again
    jax.block_until_ready(results)
    return time.perf_counter() - start


def _index_bound(program: Program, index: int) -> int:
    """Made-up integers lie below this: inside the array that a scatter or a gather indexes."""
    equation = program.equations[index]
    numbers = equation.source.params.get("dimension_numbers")
    dims = getattr(numbers, "scatter_dims_to_operand_dims", getattr(numbers, "start_index_map", ()))
    first = equation.inputs[0] if equation.inputs else None
    if not dims or not isinstance(first, int):
        return _INDEX_BOUND
    return max(min(program.avals[first].shape[d] for d in dims), 1)


def _made_up(aval: jax.ShapeDtypeStruct, index_bound: int) -> jax.Array:
    """An array of a type: floats between -1 and 1, integers below the bound, PRNG keys."""
    shape, dtype = aval.shape, aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(_key_like(dtype), shape)
    if dtype == jax.dtypes.float0:
        raise TypeError("float0 operands hold nothing")

    def make() -> jax.Array:
        count = jax.lax.iota(np.uint32, math.prod(shape)).reshape(shape)
        if dtype == np.bool_:
            return count % 2 == 0
        if jnp.issubdtype(dtype, jnp.integer):
            limit = min(index_bound, int(jnp.iinfo(dtype).max))
            return (count % np.uint32(limit)).astype(dtype)
        # Neither constant (a GPU multiplies zeros faster: they take less power) nor costly to make.
        return jnp.sin(count.astype(np.float32) * 12.9898).astype(dtype)

    return jax.jit(make)()


def _key_like(dtype: Any) -> jax.Array:
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=name)
        if key.dtype == dtype:
            return key
    raise TypeError(f"PRNG keys of an implementation of one's own ({dtype}) cannot be made up")


def _kind_of(device: JaxDevice) -> str:
    """A device's kind; jax calls every CPU `cpu`, so a CPU's is told apart by machine and cores."""
    if device.platform != "cpu":
        return device.device_kind
    return f"cpu {platform.machine()} {_cpu_model()} {os.cpu_count()} cores"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _data_sheet(device: JaxDevice, name: str | None) -> Device:
    if name is not None:
        return get_device(name)
    known = get_device("cpu") if device.platform == "cpu" else device_of_kind(device.device_kind)
    if known is None:
        raise CompileError(
            f"there is no data sheet for the device {device.device_kind!r}, from which operators that are "
            "not measured are priced; pass estimate_as= the most similar device of remat.core.devices.DEVICES, "
            "for instance estimate_as='a100'"
        )
    return known


# --- cache ----------------------------------------------------------------------------------------


class _Cache:
    """Seconds by key, in one JSON file for each kind of device and version of jax.

    `{"format": 1, "device": ..., "jax": ..., "seconds": {key: {"seconds": ..., "operator": ...}}}`. Written by
    renaming a finished file, after taking in what other processes have added meanwhile.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        self.path = folder / f"costs-{slug}-jax-{jax.__version__}.json"
        self.entries: dict[str, dict[str, Any]] = self._read()
        self.writable = True

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __getitem__(self, key: str) -> float:
        return self.entries[key]["seconds"]

    def add(self, key: str, seconds: float, operator: str) -> None:
        """Remembers one measurement, in the file too."""
        self.entries[key] = {"seconds": seconds, "operator": operator}
        if not self.writable:
            return
        try:
            self._write()
        except OSError as error:
            self.writable = False
            warnings.warn(
                f"measured costs are not remembered: {self.path} cannot be written ({error}); pass "
                "cache_dir= or set XDG_CACHE_HOME to a folder that can",
                RuntimeWarning,
                stacklevel=4,
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self._complain(error)
            return {}
        try:
            return _parsed(text, self.kind)
        except ValueError as error:
            self._complain(error)
            return {}

    def _complain(self, error: Exception) -> None:
        warnings.warn(
            f"{self.path} is not a file of measured costs ({_one_line(error)}); it is ignored, and "
            "rewritten with the next measurement",
            RuntimeWarning,
            stacklevel=5,
        )

    def _write(self) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet():  # of a file that is no good `__init__` has told
            self.entries = {**self._read(), **self.entries}
        data = {
            "format": _FORMAT,
            "device": self.kind,
            "jax": jax.__version__,
            "seconds": dict(sorted(self.entries.items())),
        }
        handle, name = tempfile.mkstemp(dir=folder, prefix=self.path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _parsed(text: str, kind: str) -> dict[str, dict[str, Any]]:
    """The entries of a cache file.

    Raises:
        ValueError: it is not one, or one of another device, version of jax or format.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or not isinstance(data.get("seconds"), dict):
        raise ValueError("no object with 'seconds'")
    expected = {"format": _FORMAT, "device": kind, "jax": jax.__version__}
    for name, value in expected.items():
        if data.get(name) != value:
            raise ValueError(f"{name!r} is {data.get(name)!r}, expected {value!r}")
    for key, entry in data["seconds"].items():
        seconds: Any = entry.get("seconds") if isinstance(entry, dict) else None
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not (number and math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"entry {key!r} has no seconds")
    return data["seconds"]
