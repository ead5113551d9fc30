"""What a compiled program does to memory: its kernels, counted off the scheduled HLO. No jax.

A kernel is an instruction of the entry computation, or of a loop body, call or branch reached from
it, that moves bytes. It reads its operands and writes its results, once per trip of the loops
around it, with these exceptions, without which stacked loop buffers would drown every number:

1. An operand that is only sliced, gathered or dynamic-sliced counts as the slices.
2. A dynamic-update-slice or scatter into its own operand counts as the update, read and written.
3. The scratch space of cuBLAS and cuDNN calls is not counted; what they move inside is unknown.
4. Bytes in host memory (``S(5)``) are counted apart, and bytes on the chip (a TPU's VMEM) not at all.

Caches are ignored: a value read by two kernels is read twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from remat.compiler.flops import HeavyWork, heavy_work
from remat.compiler.hlo import HOST_MEMORY_SPACE, Computation, Instruction, Module, Shape
from remat.compiler.trip_count import derived_trip_count, known_trip_count

_NOT_A_KERNEL = frozenset({
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "opt-barrier",
    "optimization-barrier", "partition-id", "replica-id", "domain", "add-dependency",
    "async-update", "get-dimension-size",
})  # fmt: skip
_NOT_A_CALL = frozenset({"AllocateBuffer", "ConcatBitcast", "Sharding", "LayoutConstraint"})
"""Targets of custom calls that only name memory."""
_COLLECTIVES = frozenset({
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast", "send", "recv",
})  # fmt: skip
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""In-place updates: opcode to the operand that is the update."""
_SAME_ELEMENTS = frozenset({
    "bitcast", "copy", "convert", "reshape", "transpose", "bitcast-convert",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that moves bytes.

    Attributes:
        name: of the HLO instruction.
        opcode: of the HLO instruction.
        kind: ``matmul``, ``convolution``, ``collective``, ``host-copy``, ``fusion``, ``copy``,
            ``custom-call``, or the opcode.
        operand_bytes: device memory read, one execution.
        result_bytes: device memory written, one execution.
        host_bytes: host memory read or written, one execution.
        trip_count: executions per step.
        matmuls: matrix multiplications in it.
        convolutions: convolutions in it.
        heavy_flops: flops of these, one execution.
        heavy_dtype: HLO type of their operands (``""``: none in it).
        op_name: where it comes from in the user's program.
    """

    name: str
    opcode: str
    kind: str
    operand_bytes: int
    result_bytes: int
    host_bytes: int
    trip_count: int
    matmuls: int
    convolutions: int
    heavy_flops: int
    heavy_dtype: str
    op_name: str | None

    @property
    def traffic_bytes(self) -> int:
        """Device memory moved per step, all trips."""
        return (self.operand_bytes + self.result_bytes) * self.trip_count


def find_kernels(module: Module) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
    """The kernels of a program in schedule order, and what could not be known about them."""
    walker = _Walker(module)
    if not module.is_scheduled:
        walker.note("the module is not scheduled: order and fusion may still change")
    kernels = tuple(walker.walk(module.entry_computation, 1))
    return kernels, tuple(walker.notes)


class _Walker:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        self.notes[text] = None

    def walk(self, where: Computation, trips: int) -> Iterator[Kernel]:
        for instruction in where.instructions:
            opcode = instruction.opcode
            if opcode in _NOT_A_KERNEL or opcode.endswith("-done"):
                continue
            if instruction.custom_call_target in _NOT_A_CALL:
                continue
            if opcode == "while":
                yield from self.loop(where, instruction, trips)
            elif opcode == "conditional":
                yield from self.branches(instruction, trips)
            elif opcode in ("call", "async-start"):
                for name in instruction.called("to_apply") + instruction.called("calls"):
                    yield from self.walk(self.module.computations[name], trips)
            else:
                yield self.kernel(where, instruction, trips)

    def loop(self, where: Computation, loop: Instruction, trips: int) -> Iterator[Kernel]:
        known = known_trip_count(loop)
        count = known if known is not None else derived_trip_count(self.module, where, loop)
        if count is None:
            self.note(
                f"trip count of the loop {loop.name} ({loop.op_name}): its body is counted once"
            )
        if known is None:
            tests = 1 if count is None else count + 1
            for name in loop.called("condition"):
                yield from self.walk(self.module.computations[name], trips * tests)
        for name in loop.called("body"):
            runs = trips * (1 if count is None else count)
            yield from self.walk(self.module.computations[name], runs)

    def branches(self, choice: Instruction, trips: int) -> Iterator[Kernel]:
        keys = ("branch_computations", "true_computation", "false_computation")
        names = [name for key in keys for name in choice.called(key)]
        ways = [list(self.walk(self.module.computations[name], trips)) for name in names]
        self.note(
            f"branch taken by {choice.name} ({choice.op_name}): of {len(names)}, the one with the "
            "most traffic is counted"
        )
        yield from max(ways, key=lambda way: sum(k.traffic_bytes for k in way), default=[])

    def kernel(self, where: Computation, instruction: Instruction, trips: int) -> Kernel:
        on_chip = self.module.on_chip_space
        accesses = [a for a in _accesses(self.module, where, instruction) if a.space != on_chip]
        work = heavy_work(self.module, where, instruction)
        host_bytes = sum(a.bytes for a in accesses if a.is_host)
        if instruction.opcode == "custom-call" and not work.is_library_matmul:
            target = instruction.custom_call_target
            self.note(f"traffic, flops, matmuls and scratch space inside the library call {target}")
        elif instruction.opcode == "custom-call":
            self.note("traffic and scratch space inside cuBLAS and cuDNN calls")
        return Kernel(
            name=instruction.name,
            opcode=instruction.opcode,
            kind=_kind(instruction, work, host_bytes),
            operand_bytes=sum(a.bytes for a in accesses if not a.is_host and not a.is_write),
            result_bytes=sum(a.bytes for a in accesses if not a.is_host and a.is_write),
            host_bytes=host_bytes,
            trip_count=trips,
            matmuls=work.matmuls,
            convolutions=work.convolutions,
            heavy_flops=work.flops,
            heavy_dtype=work.dtype,
            op_name=instruction.op_name,
        )


@dataclasses.dataclass(frozen=True)
class _Access:
    bytes: int
    space: int
    is_write: bool

    @property
    def is_host(self) -> bool:
        return self.space == HOST_MEMORY_SPACE


def _reads(shape: Shape, elements: int | None = None) -> Iterator[_Access]:
    """Reading a value, or only so many elements of an array."""
    for leaf in shape.leaves():
        yield _Access(_part_bytes(leaf, elements), leaf.memory_space, False)


def _writes(shape: Shape, elements: int | None = None) -> Iterator[_Access]:
    for leaf in shape.leaves():
        yield _Access(_part_bytes(leaf, elements), leaf.memory_space, True)


def _part_bytes(leaf: Shape, elements: int | None) -> int:
    count = leaf.size if elements is None else min(elements, leaf.size)
    return (count * leaf.element_bits + 7) // 8


def _accesses(module: Module, where: Computation, instruction: Instruction) -> Iterator[_Access]:
    """Everything one execution of a kernel reads and writes."""
    opcode = instruction.opcode.removesuffix("-start")
    operands = [where.by_name[name] for name in dict.fromkeys(instruction.operands)]
    if opcode == "fusion":
        yield from _fusion_accesses(module, where, instruction)
        return
    first = operands[0] if operands else None
    if first is not None and opcode in _SLICES:
        part = _result_shape(instruction)
        yield from _reads(first.shape, part.size)
        yield from _writes(part)
        operands = operands[1:]
    elif first is not None and opcode in _UPDATES and not instruction.shape.is_tuple:
        update = where.by_name[instruction.operands[_UPDATES[opcode]]].shape.size
        if opcode == "scatter":
            yield from _reads(first.shape, update)
        yield from _writes(instruction.shape, update)
        operands = operands[1:]
    else:
        yield from _writes(_result_shape(instruction))
    for operand in operands:
        yield from _reads(operand.shape)


def _result_shape(instruction: Instruction) -> Shape:
    """What a kernel writes: its result without scratch space and what -start drags along."""
    shape, opcode, members = instruction.shape, instruction.opcode, instruction.shape.elements
    if not members:
        return shape
    if opcode == "copy-start":
        return members[0]
    if opcode.endswith("-start") and opcode != "all-reduce-start" and len(members) > 1:
        return members[1]
    scratch = shape.elements[-1]
    is_library = instruction.custom_call_target.startswith(("__cublas$", "__cudnn$", "__cub$"))
    if is_library and scratch.dtype in ("u8", "s8") and len(scratch.dims) == 1:
        return dataclasses.replace(shape, elements=members[:-1])
    return shape


def _fusion_accesses(module: Module, where: Computation, fusion: Instruction) -> Iterator[_Access]:
    fused = module.computations[fusion.called("calls")[0]]
    for name in dict.fromkeys(fusion.operands):
        elements: int | None = 0
        for number, operand in enumerate(fusion.operands):
            if operand == name and elements is not None:
                read = _elements_read(module, fused, fused.parameters[number].name, True)
                elements = None if read is None else elements + read
        yield from _reads(where.by_name[name].shape, elements)
    shape = _result_shape(fusion)
    roots = _results(fused)
    leaves = list(shape.leaves())
    for root, leaf in zip(roots, leaves, strict=False):
        yield from _writes(leaf, _elements_written(module, fused, root))
    for leaf in leaves[len(roots) :]:
        yield from _writes(leaf)


def _results(fused: Computation) -> list[Instruction]:
    root = fused.root
    return [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _elements_written(module: Module, fused: Computation, result: Instruction) -> int | None:
    """Elements that a fusion writes of one result; None for all of them."""
    written, updates = 0, 0
    while result.opcode in _UPDATES or result.opcode == "bitcast":
        if result.opcode in _UPDATES:
            updates += 1
            written += fused.by_name[result.operands[_UPDATES[result.opcode]]].shape.size
        result = fused.by_name[result.operands[0]]
    if result.opcode == "fusion":
        inner = module.computations[result.called("calls")[0]]
        nested = _elements_written(module, inner, inner.root)
        return None if nested is None else written + nested
    return written if updates and result.opcode == "parameter" else None


def _in_place(fused: Computation) -> frozenset[str]:
    """Instructions whose value is (a part of) the fusion's result and lives in its buffer."""
    found: set[str] = {fused.root.name}
    for result in _results(fused):
        while True:
            found.add(result.name)
            if result.opcode not in _UPDATES and result.opcode != "bitcast":
                break
            result = fused.by_name[result.operands[0]]
    return frozenset(found)


def _elements_read(module: Module, fused: Computation, name: str, is_outermost: bool) -> int | None:
    """Elements that a fusion reads of one of its values; None for all of them."""
    if name == fused.root.name:
        return None
    total = 0
    for user in fused.users.get(name, ()):
        elements = _elements_read_by(module, fused, name, user, is_outermost)
        if elements is None:
            return None
        total += elements
    return total


def _elements_read_by(
    module: Module, fused: Computation, name: str, user: Instruction, is_outermost: bool
) -> int | None:
    is_only_first = user.operands[0] == name and name not in user.operands[1:]
    if user.opcode in _SLICES and is_only_first:
        return user.shape.size
    if user.opcode in _UPDATES and is_only_first and is_outermost:
        in_place = _in_place(fused)
        readers = fused.users.get(user.name, ())
        if user.name in in_place and all(reader.name in in_place for reader in readers):
            update = fused.by_name[user.operands[_UPDATES[user.opcode]]].shape.size
            return update if user.opcode == "scatter" else 0
        return None
    if user.opcode in _SAME_ELEMENTS:
        if user.opcode == "bitcast" and user.name in _in_place(fused):
            return _elements_read(module, fused, user.name, is_outermost)
        return _elements_read(module, fused, user.name, False)
    if user.opcode == "fusion":
        inner = module.computations[user.called("calls")[0]]
        is_result = is_outermost and user.name in _in_place(fused)
        parts = [
            _elements_read(module, inner, inner.parameters[number].name, is_result)
            for number, operand in enumerate(user.operands)
            if operand == name
        ]
        return _total(parts)
    return None


def _total(parts: Iterable[int | None]) -> int | None:
    known = list(parts)
    return None if any(part is None for part in known) else sum(part or 0 for part in known)


def _kind(instruction: Instruction, work: HeavyWork, host_bytes: int) -> str:
    opcode = instruction.opcode.removesuffix("-start")
    if work.matmuls:
        return "matmul"
    if work.convolutions:
        return "convolution"
    if opcode in _COLLECTIVES:
        return "collective"
    return "host-copy" if host_bytes else opcode
