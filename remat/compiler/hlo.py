"""Reading XLA's optimised, scheduled HLO text: text in, plain data out, no jax.

Only the part of the grammar that the compilers print is read::

    %name (params) -> shape {                       a computation; ENTRY in front of the entry
      ROOT %name = shape opcode(operands), key=value, key={...}, key="..."
    }

Operands may or may not carry their types (``f32[2]{0} %x`` or ``%x`` or ``x``), names may or may
not carry ``%``, layouts may carry tilings and memory spaces (``{1,0:T(8,128)S(5)}``), and comments
such as ``/*index=5*/`` may stand anywhere. What is read is kept as it is: meaning is given to it
in `remat.compiler.kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from remat.core.devices import is_tpu
from remat.core.errors import CompileError

HOST_MEMORY_SPACE = 5
"""XLA's number for host memory in a layout: ``S(5)``."""

_VMEM_SPACE = 1  # on the chip, of XLA's TPU compiler; on GPUs S(1) is device memory for collectives

_WIDTH_BITS: Mapping[str, int] = {
    "pred": 8, "token": 0, "opaque": 0, "tf32": 32, "bf16": 16, "c64": 64, "c128": 128,
}  # fmt: skip
_COMMENT = re.compile(r"/\*[^\"]*?\*/")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([^\s%(){}=]+)\s*(\(.*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([^\s=%]+)\s+=\s+")
_ARRAY = re.compile(r"^([a-z]\w*)\[([^\]]*)\](\{.*\})?$")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_OPEN, _CLOSE = "([{", ")]}"


def on_chip_space(device_name: str) -> int | None:
    """The memory space of buffers that lie on the chip, and in no device memory; None if there is none.

    Args:
        device_name: as in `remat.core.devices.DEVICES`, or jax's ``device_kind``.
    """
    return _VMEM_SPACE if is_tpu(device_name) else None


def element_width_bits(dtype: str) -> int:
    """Bits of one element of an HLO type: ``bf16`` 16, ``pred`` 8, ``s4`` 4, ``f8e4m3fn`` 8.

    Raises:
        CompileError: the type is none that XLA prints.
    """
    if dtype in _WIDTH_BITS:
        return _WIDTH_BITS[dtype]
    match = re.match(r"^[suf](\d+)(e\d+m\d+\w*)?$", dtype)
    if match is None:
        raise CompileError(
            f"Unknown HLO element type {dtype!r}; expected {', '.join(sorted(_WIDTH_BITS))}, "
            "s<bits>, u<bits>, f<bits> or f<bits>e<exponent>m<mantissa>. Please report this text."
        )
    return int(match.group(1))


@dataclasses.dataclass(frozen=True)
class Shape:
    """An HLO shape: an array, or a tuple of shapes.

    Attributes:
        dtype: element type as printed, ``"tuple"`` for a tuple.
        dims: extents of an array (a bounded dynamic extent counts as its bound).
        memory_space: 0 for device memory, 5 for host memory.
        elements: the members of a tuple.
        element_bits: bits per element where the layout says so (``E(4)``), else by type.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    memory_space: int = 0
    elements: tuple[Shape, ...] = ()
    element_bits: int = 0

    @property
    def is_tuple(self) -> bool:
        """Whether this is a tuple, also an empty one."""
        return self.dtype == "tuple"

    @property
    def size(self) -> int:
        """Number of elements of an array; 0 for a tuple."""
        return 0 if self.is_tuple else functools.reduce(lambda a, b: a * b, self.dims, 1)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays in it, padding and tuple index tables not counted."""
        return sum((leaf.size * leaf.element_bits + 7) // 8 for leaf in self.leaves())

    def leaves(self) -> Iterator[Shape]:
        """The arrays in it, in order."""
        if not self.is_tuple:
            yield self
        for element in self.elements:
            yield from element.leaves()


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without ``%``.
        opcode: as printed, ``"fusion"``, ``"custom-call"``, ``"copy-start"``, ...
        shape: of the result.
        operands: names, without ``%``; empty for parameters and constants.
        payload: the raw text between the parentheses (a constant's value, a parameter's number).
        attributes: ``key=value`` pairs after the parentheses, values as raw text.
        is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    payload: str
    attributes: Mapping[str, str] = dataclasses.field(repr=False)
    is_root: bool = False

    @functools.cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """The backend's JSON record; empty if there is none or it is not a JSON object."""
        try:
            config = json.loads(self.attributes.get("backend_config", "{}"))
        except json.JSONDecodeError:
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def op_name(self) -> str | None:
        """Where it comes from in the user's program, as ``jit(f)/mul``."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return match.group(1) if match else None

    @property
    def custom_call_target(self) -> str:
        """The library routine of a custom call; empty for everything else."""
        return self.attributes.get("custom_call_target", "").strip('"')

    def called(self, key: str) -> tuple[str, ...]:
        """Names of the computations under an attribute: ``calls``, ``body``, ``to_apply``, ..."""
        value = self.attributes.get(key, "").strip("{} ")
        return tuple(part.strip().lstrip("%") for part in value.split(",") if part.strip())


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, in schedule order if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the result."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Parameter instructions by number."""
        found = (i for i in self.instructions if i.opcode == "parameter")
        return {int(i.payload): i for i in found}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each name, the instructions that read it."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(found) for name, found in users.items()}


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
        name: of the module.
        computations: by name.
        entry: name of the entry computation.
        is_scheduled: whether the order of instructions is the order of execution.
        on_chip_space: the memory space whose buffers are no device memory; None if there is none.
    """

    name: str
    computations: Mapping[str, Computation] = dataclasses.field(repr=False)
    entry: str
    is_scheduled: bool
    on_chip_space: int | None = None

    @property
    def entry_computation(self) -> Computation:
        """The computation that runs when the program is called."""
        return self.computations[self.entry]


def parse_shape(text: str) -> Shape:
    """Reads one shape: ``bf16[8,128]{1,0:T(8,128)S(5)}`` or ``(f32[], (s32[2], pred[]))``.

    Raises:
        CompileError: the text is not a shape.
    """
    text = text.strip()
    if text.startswith("("):
        inner = text[1 : _closing(text, 0)]
        return Shape("tuple", elements=tuple(parse_shape(part) for part in _split(inner)))
    match = _ARRAY.match(text)
    if match is None:
        raise CompileError(f"Not an HLO shape: {text[:80]!r}; expected e.g. 'f32[2,3]{{1,0}}'.")
    dtype, dims, layout = match.groups()
    extents = (part.strip().lstrip("<=") for part in dims.split(",") if part.strip())
    space = re.search(r"S\((\d+)\)", layout or "")
    width = re.search(r"E\((\d+)\)", layout or "")
    return Shape(
        dtype,
        tuple(int(extent) if extent.isdigit() else 1 for extent in extents),
        memory_space=int(space.group(1)) if space else 0,
        element_bits=int(width.group(1)) if width else element_width_bits(dtype),
    )


def parse_instruction(line: str) -> Instruction:
    """Reads one instruction line.

    Raises:
        CompileError: the line is not an instruction.
    """
    text = _strip_comments(line)
    head = _INSTRUCTION.match(text)
    if head is None:
        raise CompileError(f"Not an HLO instruction: {line.strip()[:80]!r}; expected 'name = ...'.")
    start = head.end()
    end = _closing(text, start) + 1 if text[start] == "(" else text.index(" ", start)
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        raise CompileError(f"No opcode in the HLO instruction {line.strip()[:80]!r}.")
    close = _closing(text, opcode.end() - 1)
    payload = text[opcode.end() : close]
    plain = opcode.group(1) in ("parameter", "constant", "iota")
    return Instruction(
        name=head.group(2),
        opcode=opcode.group(1),
        shape=parse_shape(text[start:end]),
        operands=() if plain else tuple(_operand_name(part) for part in _split(payload)),
        payload=payload.strip(),
        attributes=_attributes(text[close + 1 :]),
        is_root=head.group(1) is not None,
    )


def parse_module(text: str, on_chip_space: int | None = None) -> Module:
    """Reads the text of ``compiled.as_text()``.

    Args:
        text: one HLO module, optimised or not.
        on_chip_space: as `on_chip_space` says of the device.

    Returns:
        The module as plain data.

    Raises:
        CompileError: there is no entry computation, or a line in a computation cannot be read.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", list[Instruction]()
    for line in _logical_lines(text):
        header = _HEADER.match(_strip_comments(line)) if not name else None
        if header is not None:
            name, lines = header.group(2), []
            entry = name if header.group(1) else entry
        elif name and line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name = ""
        elif name and line.strip():
            lines.append(parse_instruction(line))
    if not entry or entry not in computations:
        raise CompileError(
            "No ENTRY computation in the HLO text; expected the output of compiled.as_text(), "
            f"got {len(text)} characters starting with {text[:60]!r}."
        )
    first = text.lstrip().split("\n", 1)[0]
    module_name = re.match(r"HloModule\s+([^\s,]+)", first)
    return Module(
        module_name.group(1) if module_name else "",
        computations,
        entry,
        is_scheduled="is_scheduled=true" in first,
        on_chip_space=on_chip_space,
    )


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, with an instruction that runs over several (large constants) joined into one."""
    pending = ""
    for line in text.splitlines():
        joined = f"{pending} {line.strip()}" if pending else line
        is_instruction = _INSTRUCTION.match(joined) is not None
        pending = joined if is_instruction and _closing(joined, None) < 0 else ""
        if not pending:
            yield joined
    if pending:
        yield pending


def _closing(text: str, start: int | None) -> int:
    """Index of the bracket that closes the one at `start`; quotes are skipped.

    With `start` None: 0 if all brackets of the text are closed, else -1.
    """
    depth, position, end = 0, start or 0, len(text)
    while position < end:
        match = _BRACKET_OR_STRING.search(text, position)
        if match is None:
            break
        position, token = match.end(), match.group()
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
            if depth == 0 and start is not None:
                return match.start()
    if start is not None:
        raise CompileError(f"Unclosed bracket in HLO text: {text[start : start + 80]!r}.")
    return 0 if depth <= 0 else -1


_BRACKET_OR_STRING = re.compile(r'[()\[\]{}]|"(?:[^"\\]|\\.)*"')
_SPLITTER = re.compile(r'[()\[\]{},]|"(?:[^"\\]|\\.)*"')


def _split(text: str) -> list[str]:
    """Splits at the commas that stand outside of brackets and quotes; blanks are dropped."""
    parts, depth, last = [], 0, 0
    for match in _SPLITTER.finditer(text):
        token = match.group()
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
        elif token == "," and depth == 0:
            parts.append(text[last : match.start()])
            last = match.end()
    parts.append(text[last:])
    return [part.strip() for part in parts if part.strip()]


def _operand_name(text: str) -> str:
    named = _NAME.findall(text)
    return named[-1] if named else text.split()[-1]


def _attributes(text: str) -> Mapping[str, str]:
    pairs = (part.partition("=") for part in _split(text))
    return {key.strip(): value.strip() for key, separator, value in pairs if separator}


def _strip_comments(text: str) -> str:
    return _COMMENT.sub("", text) if "/*" in text else text
