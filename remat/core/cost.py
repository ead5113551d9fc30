"""Roofline seconds of operators on a device: estimates. `remat.cost.measure` times them on the attached device."""

from __future__ import annotations

from remat.core.devices import Device
from remat.core.graph import Graph, Op

__all__ = ["hlo_type", "op_seconds"]

_HLO_TYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}


def hlo_type(dtype: str) -> str:
    """Returns XLA's spelling of a dtype name: `bfloat16` -> `bf16`, `float32` -> `f32`, `bool` -> `pred`."""
    if dtype == "bool":
        return "pred"
    stem = dtype.rstrip("0123456789")
    return _HLO_TYPES.get(stem, stem) + dtype[len(stem) :]


def op_seconds(graph: Graph, op: Op, device: Device) -> float:
    """Returns the roofline time of one operator that runs alone.

    A fusible operator is charged its arithmetic only: its operands and results stay in registers.
    """
    dtype = hlo_type(graph.values[op.outputs[0]].dtype) if op.outputs else "f32"
    if op.heavy:
        compute = op.flops / device.matmul_flops_per_second(dtype)
    else:
        compute = op.flops / device.vector_flops_per_second
    moved = 0 if op.fusible else op.bytes_moved
    return max(compute, moved / device.memory_bytes_per_second)
