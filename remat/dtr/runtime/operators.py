"""Operators as they are run: compiled once per primitive, parameters and types of operands, whoever asks.

The unit is what jax runs eagerly: a primitive. A function under `jax.jit`, a loop or a branch is one of these, and
so is its derivative; what XLA fuses, it fuses inside of one. The compiler is asked what an operator takes besides
its results, and what it costs.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from remat import compat
from remat.core.avals import aval_bytes
from remat.core.classify import classify
from remat.core.devices import CPU, device_of_kind

__all__ = [
    "OPERATORS",
    "Costs",
    "Operator",
    "Operators",
    "Spec",
    "array_bytes",
    "host_bytes",
    "spec_of",
]

Costs = Literal["roofline", "measured"]

_MOST_OPERATORS = 4096  # as many as jax keeps of what it compiles


@dataclass(frozen=True, slots=True)
class Spec:
    """What an operator is compiled for, of one operand.

    Attributes:
        aval: shape, dtype, and whether the type is weak.
        sharding: where a committed array lies, None for one that goes where the others are.
        is_array: it is on the device; else a number or an array of NumPy.
    """

    aval: Any
    sharding: Any
    is_array: bool

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The operand to compile for."""
        return jax.ShapeDtypeStruct(
            self.aval.shape, self.aval.dtype, sharding=self.sharding, weak_type=self.aval.weak_type
        )


def spec_of(value: Any) -> Spec:
    """Returns what counts of an array, a NumPy array or a number."""
    if isinstance(value, jax.Array):
        return Spec(jax.typeof(value), value.sharding if value.committed else None, True)
    return Spec(jax.typeof(value), None, False)


@dataclass
class Operator:
    """A compiled operator.

    Attributes:
        name: of the primitive, or of the jitted function.
        run: arrays -> its results, without those that are operands.
        places: of every result: which of what `run` returns, `~i` for operand `i` as it is, or itself if it is
            a derivative of integers, which says nothing (float0).
        avals: of what `run` returns.
        out_bytes: of what `run` returns, by result.
        temp_bytes: what XLA needs besides operands and results, while it runs.
        cost: nanoseconds, at least 1.
        is_pure: may run again.
        on_host: runs on the CPU, where what it reads is held until it is done.
    """

    name: str
    run: Callable[..., Sequence[Any]]
    places: tuple[int | np.ndarray, ...]
    avals: tuple[Any, ...]
    out_bytes: tuple[int, ...]
    temp_bytes: int
    cost: int
    is_pure: bool
    on_host: bool
    measured: int | None = field(default=None, compare=False)

    def timed(self, operands: Sequence[Any]) -> tuple[Sequence[Any], int]:
        """Runs it; returns its results and the least time that it took so far, in nanoseconds."""
        began = time.perf_counter_ns()
        results = jax.block_until_ready(self.run(*operands))
        took = max(1, time.perf_counter_ns() - began)
        self.measured = took if self.measured is None else min(took, self.measured)
        return results, self.measured


class Operators:
    """Compiled operators, shared by all threads; those that were not used for longest are forgotten.

    Attributes:
        compilations: how many were compiled so far.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self._known: OrderedDict[Hashable, Operator] = OrderedDict()
        self._lock = threading.RLock()

    def get(
        self,
        name: str,
        key: Hashable,
        function: Callable[[], Callable[..., Sequence[Any]]],
        specs: tuple[Spec, ...],
    ) -> tuple[Operator, bool]:
        """Returns an operator, and whether it was compiled for it.

        Args:
            name: of its primitive, or of the jitted function.
            key: what it does.
            function: makes it, as a function of arrays that returns several.
            specs: of its operands.
        """
        whole = (key, specs, compat.trace_context())
        with self._lock:
            found = self._known.get(whole)
            if found is not None:
                self._known.move_to_end(whole)
                return found, False
            found = self._known[whole] = _compile(name, function(), specs)
            self.compilations += 1
            if len(self._known) > _MOST_OPERATORS:
                self._known.popitem(last=False)
            return found, True

    def clear(self) -> None:
        """Forgets all operators."""
        with self._lock:
            self._known.clear()


def _compile(name: str, function: Callable[..., Sequence[Any]], specs: Sequence[Spec]) -> Operator:
    shapes = [spec.shape for spec in specs]
    closed = jax.make_jaxpr(function)(*shapes)
    jaxpr, _ = compat.open_jaxpr(closed)
    places, kept = _places(jaxpr, specs)
    function = compat.jaxpr_function(closed, kept)
    avals = tuple(jaxpr.outvars[i].aval for i in kept)
    if name == "device_put":
        # A compiled program runs on the devices of its operands: what moves an array is no program.
        run: Callable[..., Sequence[Any]] = function
        devices = [_target(jaxpr.eqns[0].params["devices"][i], specs[i]) for i in kept]
        temp_bytes, analysis = 0, {}
    else:
        with jax.disable_jit(False):  # an operator is a program even where the user wants no others
            run = compiled = jax.jit(function).lower(*shapes).compile()
        devices = list(compiled.output_shardings)
        temp_bytes = int(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0) or 0)
        analysis = compiled.cost_analysis() or {}
    return Operator(
        name=name,
        run=run,
        places=places,
        avals=avals,
        out_bytes=tuple(map(_bytes, avals, devices)),
        temp_bytes=temp_bytes,
        cost=_roofline(analysis, [spec.aval for spec in specs], avals),
        is_pure=_may_repeat(jaxpr),
        on_host=_platform(devices) == "cpu",
    )


def _target(device: Any, operand: Spec) -> jax.sharding.Sharding:
    """Where `jax.device_put` puts an operand; of a kind of memory, or nothing, where it is."""
    if isinstance(device, jax.sharding.Sharding):
        return device
    if isinstance(device, jax.Device):
        return jax.sharding.SingleDeviceSharding(device)
    return operand.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _places(jaxpr: Any, specs: Sequence[Spec]) -> tuple[tuple[int | np.ndarray, ...], list[int]]:
    """Where every result is found, and which results have to be computed: not operands, none twice."""
    given = {var: ~i for i, var in enumerate(jaxpr.invars) if specs[i].is_array}
    seen: dict[Any, int] = {}
    places: list[int | np.ndarray] = []
    kept: list[int] = []
    for i, atom in enumerate(jaxpr.outvars):
        if atom.aval.dtype == jax.dtypes.float0:
            places.append(np.zeros(atom.aval.shape, jax.dtypes.float0))
        elif compat.is_literal(atom):
            places.append(len(kept))
            kept.append(i)
        elif atom in given:
            places.append(given[atom])
        else:
            if atom not in seen:
                seen[atom] = len(kept)
                kept.append(i)
            places.append(seen[atom])
    return tuple(places), kept


def _may_repeat(jaxpr: Any) -> bool:
    """Whether a second run does the same and nothing else: no side effects, no hidden state, at any depth."""
    for eqn in jaxpr.eqns:
        cost = classify(eqn.primitive.name, eqn.params, (), (), eqn.effects)
        if cost.effectful:
            return False
        if not all(_may_repeat(compat.open_jaxpr(body)[0]) for body in compat.sub_jaxprs(eqn)):
            return False
    return True


def _platform(shardings: Sequence[Any]) -> str:
    devices = shardings[0].device_set if shardings else jax.devices()
    return next(iter(devices)).platform


def _bytes(aval: Any, sharding: Any) -> int:
    """Bytes of an array on all devices that are attached to this process."""
    itemsize = aval.dtype.itemsize
    if len(sharding.device_set) == 1:
        return math.prod(aval.shape) * itemsize
    return (
        math.prod(sharding.shard_shape(aval.shape)) * itemsize * len(sharding.addressable_devices)
    )


def array_bytes(array: jax.Array) -> int:
    """Bytes of an array on all devices that are attached to this process, copies counted."""
    if len(array.sharding.device_set) == 1:
        return array.nbytes
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def _roofline(
    analysis: Mapping[str, float], operands: Sequence[Any], results: Sequence[Any]
) -> int:
    """Nanoseconds by the compiler's count of operations and bytes, at the peak rates of the device."""
    moved = analysis.get("bytes accessed", sum(map(aval_bytes, (*operands, *results))))
    device = device_of_kind(jax.devices()[0].device_kind) or CPU
    flops = max(0.0, analysis.get("flops", 0.0))
    seconds = max(flops / device.f32_flops_per_second, moved / device.memory_bytes_per_second)
    return max(1, round(1e9 * seconds))


def host_bytes(operands: Iterable[Any]) -> int:
    """Bytes that arrays of NumPy among operands take on the device while an operator runs."""
    return sum(value.nbytes for value in operands if isinstance(value, np.ndarray))


OPERATORS = Operators()
"""All operators of this process."""
