"""What is alive where a compiled program needs most memory: read off the scheduled HLO. No jax.

XLA's buffer assignment is not part of the program's text; its sizes alone are (`memory_analysis`). What is alive
when follows from the schedule: an array is there from the instruction that makes it to the last that reads it,
under whatever name. Left out is memory that two arrays share although both are alive in the text (a kernel that is
element-wise, or on TPUs ends so, and writes over its operand) and what alignment wastes, so the sum is near XLA's
number, not equal to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from remat.compiler.hlo import HOST_MEMORY_SPACE, Computation, Instruction, Module

__all__ = ["Alive", "AtPeak", "alive_at_peak"]

# What gives its operand, or a part of it, another name.
_SAME_MEMORY = frozenset({
    "bitcast", "tuple", "get-tuple-element", "opt-barrier", "optimization-barrier", "domain", "while",
    "add-dependency", "conditional", "async-update",
})  # fmt: skip
_NO_MEMORY = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id"})
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


@dataclasses.dataclass(frozen=True)
class Alive:
    """One array alive at the peak.

    Attributes:
        name: of the HLO instruction that makes it; `index` of its result, for one that makes several.
        label: type and dimensions, `bf16[8,512]`.
        nbytes: bytes.
        opcode: of what makes it: of a fusion, of its last instruction.
        op_name: where it comes from in the user's program, None for what XLA adds.
        loops: names of the loops that it is in, outermost first.
    """

    name: str
    index: int
    label: str
    nbytes: int
    opcode: str
    op_name: str | None
    loops: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class AtPeak:
    """What is alive at the peak.

    Attributes:
        at: the instruction that runs there, the loops around it before it.
        nbytes: of all arrays.
        arrays: largest first.
    """

    at: tuple[str, ...]
    nbytes: int
    arrays: tuple[Alive, ...]


def alive_at_peak(module: Module) -> AtPeak:
    """Returns what is alive where a program needs most memory; arguments, results and host memory left out.

    Args:
        module: scheduled; of another the order of the text counts.

    Complexity: linear in the instructions, each loop's body counted once.
    """
    return _Walk(module).peak(module.entry_computation, is_entry=True)


class _Walk:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.elsewhere = (HOST_MEMORY_SPACE, module.on_chip_space)
        self._known: dict[str, AtPeak] = {}

    def peak(self, where: Computation, *, is_entry: bool = False) -> AtPeak:
        """Of one computation; of a loop's body what it needs besides its operands and results."""
        if where.name not in self._known:
            self._known[where.name] = self._found(where, is_entry)
        return self._known[where.name]

    def _found(self, where: Computation, is_entry: bool) -> AtPeak:
        order = where.instructions
        owners = self._owners(where)
        made: dict[tuple[str, int], Alive] = {}
        start: dict[tuple[str, int], int] = {}
        end: dict[tuple[str, int], int] = {}
        for position, instruction in enumerate(order):
            for buffer, array in self._made(instruction):
                made[buffer], start[buffer], end[buffer] = array, position, position
            for operand in instruction.operands:
                for buffer in owners.get(operand, ()):
                    end[buffer] = position
        # Results lie in memory of the caller.
        for buffer in owners[where.root.name]:
            made.pop(buffer, None)
        change = [0] * (len(order) + 1)
        for buffer, array in made.items():
            change[start[buffer]] += array.nbytes
            change[end[buffer] + 1] -= array.nbytes
        total, best, at, inner = 0, -1, 0, AtPeak((), 0, ())
        for position, instruction in enumerate(order):
            total += change[position]
            within = self._within(instruction)
            if total + within.nbytes > best:
                best, at, inner = total + within.nbytes, position, within
        arrays = [a for b, a in made.items() if start[b] <= at <= end[b]]
        name = order[at].name
        arrays += [dataclasses.replace(a, loops=(name, *a.loops)) for a in inner.arrays]
        arrays.sort(key=lambda a: -a.nbytes)
        return AtPeak((name, *inner.at), max(best, 0), tuple(arrays))

    def _within(self, instruction: Instruction) -> AtPeak:
        """What the computations that an instruction runs need."""
        names = [
            name
            for key in ("body", "branch_computations", "true_computation", "false_computation")
            for name in instruction.called(key)
        ]
        if instruction.opcode in ("call", "async-start"):
            names += instruction.called("to_apply") + instruction.called("calls")
        found = [
            self.peak(self.module.computations[n]) for n in names if n in self.module.computations
        ]
        return max(found, key=lambda peak: peak.nbytes, default=AtPeak((), 0, ()))

    def _owners(self, where: Computation) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """For every instruction the buffers that its result lies in."""
        owners: dict[str, tuple[tuple[str, int], ...]] = {}
        parts: dict[str, list[tuple[tuple[str, int], ...]]] = {}  # of tuples, by element
        for instruction in where.instructions:
            operands = [owners.get(name, ()) for name in instruction.operands]
            opcode = instruction.opcode
            if opcode == "get-tuple-element":
                index = int(instruction.attributes.get("index", "0"))
                elements = parts.get(instruction.operands[0])
                inside = elements[index] if elements and index < len(elements) else operands[0]
                owners[instruction.name] = inside
            elif opcode == "tuple":
                parts[instruction.name] = operands
                owners[instruction.name] = tuple(b for found in operands for b in found)
            elif opcode in _SAME_MEMORY:
                source = instruction.operands[0] if instruction.operands else ""
                if source in parts and len(instruction.operands) == 1:
                    parts[instruction.name] = parts[source]
                owners[instruction.name] = tuple(b for found in operands for b in found)
            elif self._is_update(instruction) and operands:
                owners[instruction.name] = operands[self._updated(instruction)]
            else:
                own = [buffer for buffer, _ in self._made(instruction)]
                owners[instruction.name] = tuple(own)
                if instruction.shape.is_tuple:
                    by_index = {index: ((name, index),) for name, index in own}
                    count = len(instruction.shape.elements)
                    parts[instruction.name] = [by_index.get(i, ()) for i in range(count)]
        return owners

    def _fused(self, instruction: Instruction) -> Computation | None:
        names = instruction.called("calls") if instruction.opcode == "fusion" else ()
        return self.module.computations.get(names[0]) if names else None

    def _is_update(self, instruction: Instruction) -> bool:
        """Whether it writes into its operand: an update, or a fusion that ends with one."""
        if instruction.opcode in _UPDATES:
            return True
        fused = self._fused(instruction)
        return (
            fused is not None and fused.root.opcode in _UPDATES and self._updated(instruction) >= 0
        )

    def _updated(self, instruction: Instruction) -> int:
        """Which operand an update writes into; -1 if none of a fusion's."""
        fused = self._fused(instruction)
        if fused is None:
            return 0
        source = fused.by_name.get(fused.root.operands[0])
        while source is not None and source.opcode == "bitcast":
            source = fused.by_name.get(source.operands[0])
        return int(source.payload) if source is not None and source.opcode == "parameter" else -1

    def _made(self, instruction: Instruction) -> Iterator[tuple[tuple[str, int], Alive]]:
        """The arrays that an instruction puts into memory of their own."""
        opcode = instruction.opcode
        if opcode in _SAME_MEMORY or opcode in _NO_MEMORY or opcode.endswith("-done"):
            return
        if self._is_update(instruction):
            return
        fused = self._fused(instruction)
        for index, shape in enumerate(instruction.shape.elements or (instruction.shape,)):
            if shape.is_tuple or shape.memory_space in self.elsewhere or not shape.bytes:
                continue
            last = instruction
            if fused is not None:
                last = fused.root
                if last.opcode == "tuple" and index < len(last.operands):
                    last = fused.by_name.get(last.operands[index], last)
            label = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
            yield (
                (instruction.name, index),
                Alive(
                    instruction.name,
                    index,
                    label,
                    shape.bytes,
                    last.opcode,
                    last.op_name or instruction.op_name,
                ),
            )
