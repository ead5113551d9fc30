"""Logs of joint graphs, and logs as files in the public format.

A graph becomes a log of a program that runs operator by operator, as PyTorch does: inputs and constants cannot be
made again, an operator takes its roofline time alone (nothing fuses, so it moves all that it reads and makes), a
value is released behind its last reader, and the user keeps results and gradients. Every value has memory of its
own: that XLA makes a reshape for nothing is a matter of one program, and here every operator is one. What a file
says is all that a `Log` holds: `read_log(log_lines(log)) == log`. Plain data, no jax.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remat.core.cost import op_seconds
from remat.core.devices import Device, get_device
from remat.core.errors import PolicyError
from remat.core.graph import Graph, Op
from remat.dtr.log import Call, Event, Log, LogError, Release, Share

__all__ = ["export_log", "log_lines", "write_log"]


def export_log(
    graph: Graph, *, device: str | Device = "h200", costs: Sequence[int] | None = None
) -> Log:
    """Returns the log of a joint graph.

    Tensors are numbered as they are made: constants, inputs, then results of operators in their order, with the
    cotangents where the backward phase begins. An operator that must not run again (`Op.recomputable`) becomes a
    call without results, followed by constants for what it makes.

    Args:
        graph: the joint graph.
        device: whose roofline times operators take.
        costs: nanoseconds of every operator instead, by its id.

    Raises:
        CompileError: an unknown device.
        PolicyError: `costs` has another length, or a negative one.
    """
    if costs is None:
        costs = _roofline_ns(graph, get_device(device) if isinstance(device, str) else device)
    if len(costs) != len(graph.ops) or any(cost < 0 for cost in costs):
        raise PolicyError(
            f"costs: got {len(costs)}, the least {min(costs, default=0)}; expected one of at least 0 for each "
            f"of {len(graph.ops)} operators"
        )
    return _Exporter(graph).log(costs)


def _roofline_ns(graph: Graph, device: Device) -> list[int]:
    alone = (dataclasses.replace(op, fusible=False) for op in graph.ops)
    return [math.ceil(op_seconds(graph, op, device) * 1e9) for op in alone]


class _Exporter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.events: list[Event] = []
        self.tensor_of: dict[int, int] = {}  # by value
        self.backward: int | None = None

    def log(self, costs: Sequence[int]) -> Log:
        graph = self.graph
        for value in dict.fromkeys((*graph.constants, *graph.inputs)):
            self._constant(value)
        kept = {*graph.sources, *graph.outputs, *graph.gradients}
        for op in graph.ops:
            if op.phase == "backward":
                self._begin_backward()
            self._run(op, costs[op.id])
            for value in dict.fromkeys((*op.inputs, *op.outputs)):
                users = graph.users[value]
                if value not in kept and (users[-1] if users else op.id) == op.id:
                    self.events.append(Release(self.tensor_of[value]))
        if graph.cotangents:
            self._begin_backward()
        return Log(tuple(self.events), len(self.tensor_of), self.backward)

    def _begin_backward(self) -> None:
        if self.backward is None:
            self.backward = len(self.events)
            for value in self.graph.cotangents:
                self._constant(value)

    def _constant(self, value: int) -> None:
        size = self.graph.values[value].nbytes
        self.events.append(
            Call("constant", (), self._numbered((value,)), (size,), (-1,), 0, is_constant=True)
        )

    def _run(self, op: Op, cost: int) -> None:
        inputs = tuple(self.tensor_of[value] for value in op.inputs)
        made = op.outputs if op.recomputable else ()
        sizes = tuple(self.graph.values[value].nbytes for value in made)
        aliases = (-1,) * len(made)
        self.events.append(Call(op.name, inputs, self._numbered(made), sizes, aliases, cost))
        for value in op.outputs[len(made) :]:
            self._constant(value)

    def _numbered(self, values: Sequence[int]) -> tuple[int, ...]:
        for value in values:
            self.tensor_of[value] = len(self.tensor_of)
        return tuple(self.tensor_of[value] for value in values)


def write_log(log: Log, path: str | Path) -> None:
    """Writes a log as a file that `load_log` reads; packed if the name ends in `.gz`.

    Raises:
        LogError: the log says what no file can; see `log_lines`.
        OSError: the file cannot be written.
    """
    text = "".join(f"{line}\n" for line in log_lines(log)).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def log_lines(log: Log) -> Iterator[str]:
    """Yields the lines of a log's file, JSON objects of the public format.

    Raises:
        LogError: the log says what no file can: tensors not numbered in the order in which they are made, or one
            that is used and that nobody refers to.
    """
    yield _line("ANNOTATE", ANNOTATION="START")
    names: list[list[str]] = []  # of every tensor those it goes by, the last first to be released
    viewed: list[int] = []
    copies = 0
    for index, event in enumerate(log.events):
        if index == log.backward:
            yield _line("ANNOTATE", ANNOTATION="BACKWARD")
        if isinstance(event, Call):
            if event.outputs != tuple(range(len(names), len(names) + len(event.outputs))):
                raise LogError(
                    f"event {index} makes tensors {event.outputs}; expected the next, from {len(names)} on"
                )
            yield from _call_lines(event, names, viewed, index)
        elif isinstance(event, Share):
            copies += 1
            source = _name(names, event.tensor, index)
            names[event.tensor].append(f"c{copies}")
            yield _line("COPY", DST=f"c{copies}", SRC=source)
        else:
            yield _line("RELEASE", NAME=_name(names, event.tensor, index))
            names[event.tensor].pop()
    if log.backward == len(log.events):
        yield _line("ANNOTATE", ANNOTATION="BACKWARD")
    if log.order is not None:
        kept = [_name(names, tensor, len(log.events)) for tensor in log.order]
        yield _line("ANNOTATE", ANNOTATION="OUTPUTS", NAMES=kept)
    if log.num_tensors != len(names):
        raise LogError(f"the log makes {len(names)} tensors; it says {log.num_tensors}")


def _call_lines(call: Call, names: list[list[str]], viewed: list[int], index: int) -> Iterator[str]:
    made = [f"t{tensor}" for tensor in call.outputs]
    if call.is_constant:
        yield _line("CONSTANT", NAME=made[0])
    else:
        args = [_name(names, tensor, index) for tensor in call.inputs]
        yield _line("CALL", NAME=call.name, ARGS=args, RESULT=made, TIME=str(call.cost))
    for name, size, alias in zip(made, call.sizes_bytes, call.aliases, strict=True):
        viewed.append(size if alias < 0 else viewed[alias])
        yield _line("MEMORY", NAME=name, MEMORY=str(viewed[-1]))
        if alias >= 0 and alias not in call.inputs:
            raise LogError(f"event {index} makes a view of tensor {alias}, which it does not read")
        if not call.is_constant:
            of = str(call.inputs.index(alias)) if alias >= 0 else "-1"
            yield _line("ALIAS", NAME=name, ALIAS=of)
    names += [[name] for name in made]


def _name(names: list[list[str]], tensor: int, index: int) -> str:
    if not (0 <= tensor < len(names) and names[tensor]):
        raise LogError(f"event {index} uses tensor {tensor}, which nobody refers to")
    return names[tensor][-1]


def _line(instruction: str, **fields: Any) -> str:
    return json.dumps({"INSTRUCTION": instruction, **fields})
