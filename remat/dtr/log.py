"""Logs of programs: the instructions of simrd, and what they say of tensors, storages and operators.

Kirisame et al., "Dynamic tensor rematerialization" (2020), section 4.6. A log is a file of one JSON object per
line, as the public logs have it; `load_log` reads it strictly. What comes of it is a `Log`: operators and
references in the order of the program, over tensors that are numbered. Names are resolved here, so that a
simulation works on integers only. Plain data, no jax.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from remat.core.errors import RematError

__all__ = ["Call", "Event", "Log", "LogError", "Release", "Share", "load_log", "read_log"]

# A log of 100,000 operators has less than a million lines, of about a hundred characters.
_MOST_LINES = 10_000_000
_MOST_LINE_CHARACTERS = 1 << 20
_MOST_SHOWN = 80
_MOST_BYTES = 1 << 62
_KEYS: Mapping[str, frozenset[str]] = {
    "CONSTANT": frozenset({"NAME"}),
    "MEMORY": frozenset({"NAME", "MEMORY"}),
    "ALIAS": frozenset({"NAME", "ALIAS"}),
    "CALL": frozenset({"NAME", "ARGS", "RESULT", "TIME"}),
    "MUTATE": frozenset({"NAME", "ARGS", "MUTATE", "TIME"}),
    "COPY": frozenset({"DST", "SRC"}),
    "COPY_FROM": frozenset({"DST", "SRC"}),
    "RELEASE": frozenset({"NAME"}),
    "ANNOTATE": frozenset({"ANNOTATION"}),
}
_OUTPUTS = frozenset({"ANNOTATION", "NAMES"})  # an annotation of our own, for `Log.order`


class LogError(RematError, ValueError):
    """A log says what no program does; the message has the line."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator runs for the first time.

    Attributes:
        name: of the operator, `constant` for a constant.
        inputs: tensors, in the order of the operator's arguments.
        outputs: tensors, numbered in the order of the log; each has one reference.
        sizes_bytes: of every output's own storage, 0 for an alias.
        aliases: of every output the tensor whose storage it views, -1 for one with a storage of its own.
        cost: nanoseconds, or whatever unit the log counts in.
        is_constant: what it makes cannot be made again. In a file that is a weight or an input: one output, no
            inputs, no cost.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    aliases: tuple[int, ...]
    cost: int
    is_constant: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """A tensor is referred to once more."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Release:
    """A tensor is referred to once less."""

    tensor: int


Event = Call | Share | Release


@dataclass(frozen=True)
class Log:
    """A program as a simulation replays it.

    Attributes:
        events: in the order of the program.
        num_tensors: tensors are numbered from 0, in the order in which they are made.
        backward: index of the event at which the backward phase begins, by the first annotation `BACKWARD`; None
            without one.
        order: of what is still referred to at the end, the tensors in the order of their names, in which they are
            made if they are not there; None if that is the order of their numbers.
    """

    events: tuple[Event, ...]
    num_tensors: int
    backward: int | None = None
    order: tuple[int, ...] | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        """The tensors that are still referred to at the end; see `order`."""
        if self.order is not None:
            return self.order
        refs: dict[int, int] = {}
        for event in self.events:
            if isinstance(event, Call):
                refs.update(dict.fromkeys(event.outputs, 1))
            else:
                refs[event.tensor] += 1 if isinstance(event, Share) else -1
        return tuple(sorted(tensor for tensor, count in refs.items() if count > 0))

    @property
    def calls(self) -> Iterator[Call]:
        """The operators in order, constants included."""
        return (event for event in self.events if isinstance(event, Call))

    @property
    def cost(self) -> int:
        """What all operators take that run once."""
        return sum(call.cost for call in self.calls)


def load_log(path: str | Path) -> Log:
    """Reads a log of JSON lines, also one that gzip packed.

    Instructions before an annotation `START` are skipped, if there is one.

    Raises:
        LogError: a line is not an instruction, or says what no program does: an unknown name, a negative size, an
            operator that makes what is there.
        OSError: the file cannot be read.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="strict") as file:
        return read_log(_lines(file, path.name), source=path.name)


def read_log(lines: Iterable[str], *, source: str = "log") -> Log:
    """Reads a log; the arguments and errors are those of `load_log`."""
    reader = _Reader(source)
    for number, line in enumerate(lines, 1):
        reader.read(number, line)
    return reader.finish()


def _lines(file: Any, source: str) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(
                _MOST_LINE_CHARACTERS + 1
            )  # never more of a line than makes it too long
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise LogError(f"{source}, line {number}: not a text of JSON lines: {error}") from error
        if not line:
            return
        yield line


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a name is there twice in {_shown([name for name, _ in pairs])}")
    return found


def _shown(value: Any) -> str:
    """A value as an error shows it: what a hostile log has may be long, or deep."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


@dataclass
class _Pending:
    """An operator whose outputs are being described."""

    line: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[str, ...]
    cost: int
    is_constant: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)

    @cached_property
    def made(self) -> frozenset[str]:
        return frozenset(self.outputs)

    @cached_property
    def read(self) -> frozenset[int]:
        return frozenset(self.inputs)


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.line = 0
        self.events: list[Event] = []
        self.tensors: dict[str, int] = {}  # by name, while it is referred to
        self.ever: dict[str, int] = {}  # by name, what it last referred to
        self.before: set[str] = set()  # names made before START
        self.size_of: list[int] = []  # of the storage that a tensor views
        self.pending: _Pending | None = None
        self.started = False
        self.backward: int | None = None
        self.order: tuple[int, ...] | None = None

    def read(self, number: int, text: str) -> None:
        self.line = number
        if number > _MOST_LINES:
            raise self.error(f"the log goes on; expected at most {_MOST_LINES:,} lines")
        if len(text) > _MOST_LINE_CHARACTERS:
            raise self.error(
                f"longer than {_MOST_LINE_CHARACTERS:,} characters; an instruction has a few hundred"
            )
        if not text.strip():
            return
        try:
            entry = json.loads(text, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise self.error(f"not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise self.error(f"expected an object with INSTRUCTION, got {_shown(entry)}")
        kind = entry.pop("INSTRUCTION", None)
        kind = "COPY_FROM" if kind == "COPYFROM" else kind
        if not isinstance(kind, str) or kind not in _KEYS:
            raise self.error(f"unknown instruction {_shown(kind)}; expected one of {sorted(_KEYS)}")
        if set(entry) != _KEYS[kind] and not (kind == "ANNOTATE" and set(entry) == _OUTPUTS):
            raise self.error(f"{kind} has {_shown(sorted(entry))}; expected {sorted(_KEYS[kind])}")
        if kind == "ANNOTATE":
            self._annotate(entry)
            return
        if kind not in ("MEMORY", "ALIAS"):
            self._close()
        getattr(self, f"_{kind.lower()}")(entry)

    def finish(self) -> Log:
        self._close()
        live = set(self.tensors.values())
        order = self.order
        if order is None:
            order = tuple(dict.fromkeys(t for t in self.ever.values() if t in live))
        if sorted(order) != sorted(live):
            raise self.error("OUTPUTS names others than those that are referred to at the end")
        is_plain = list(order) == sorted(order)
        return Log(
            tuple(self.events), len(self.size_of), self.backward, None if is_plain else order
        )

    def _bind(self, name: str, tensor: int) -> None:
        self.tensors[name] = self.ever[name] = tensor

    def error(self, text: str) -> LogError:
        return LogError(f"{self.source}, line {self.line}: {text}")

    def _annotate(self, entry: dict[str, Any]) -> None:
        annotation = entry["ANNOTATION"]
        if "NAMES" in entry:
            self._close()
            self.order = tuple(self._known(name) for name in self._names(entry["NAMES"], "NAMES"))
        elif annotation == "START" and not self.started:
            self._close()
            self.before = {*self.before, *self.tensors}
            self.events, self.tensors, self.ever, self.size_of = [], {}, {}, []
            self.started, self.backward, self.order = True, None, None
        elif annotation == "BACKWARD" and self.backward is None:
            self._close()
            self.backward = len(self.events)

    def _constant(self, entry: dict[str, Any]) -> None:
        outputs = (self._new(entry["NAME"]),)
        self.pending = _Pending(self.line, "constant", (), outputs, 0, is_constant=True)

    def _call(self, entry: dict[str, Any]) -> None:
        results = self._names(entry["RESULT"], "RESULT")
        if len(set(results)) != len(results):
            raise self.error(f"CALL makes a tensor twice: {_shown(results)}")
        self.pending = _Pending(
            self.line,
            self._text(entry["NAME"], "NAME"),
            self._all_known(entry["ARGS"]),
            tuple(self._new(name) for name in results),
            self._number(entry["TIME"], "TIME"),
        )

    def _memory(self, entry: dict[str, Any]) -> None:
        pending, name = self._described(entry["NAME"], "MEMORY")
        if name in pending.sizes:
            raise self.error(f"MEMORY of {_shown(name)} is said twice")
        pending.sizes[name] = self._number(entry["MEMORY"], "MEMORY")

    def _alias(self, entry: dict[str, Any]) -> None:
        pending, name = self._described(entry["NAME"], "ALIAS")
        if name in pending.aliases:
            raise self.error(f"ALIAS of {_shown(name)} is said twice")
        of = entry["ALIAS"]
        of = str(of) if type(of) is int and -1 <= of < _MOST_BYTES else self._text(of, "ALIAS")
        if of == "-1":
            pending.aliases[name] = -1
            return
        if pending.is_constant:
            raise self.error(f"constant {_shown(name)} cannot be an alias")
        is_place = of.isascii() and of.isdigit() and len(of) < 10  # as the public logs name it
        if is_place and int(of) < len(pending.inputs):
            pending.aliases[name] = pending.inputs[int(of)]
        elif not is_place and self._known(of) in pending.read:
            pending.aliases[name] = self.tensors[of]
        else:
            raise self.error(
                f"ALIAS is {_shown(of)}, which is none of the operator's {len(pending.inputs)} arguments"
            )

    def _mutate(self, entry: dict[str, Any]) -> None:
        """A pure operator that makes new tensors, to which the names of what it changes then refer."""
        names = self._names(entry["ARGS"], "ARGS")
        places = entry["MUTATE"]
        inside = isinstance(places, list) and all(
            type(place) is int and 0 <= place < len(names) for place in places
        )
        if not inside or len(set(places)) != len(places):
            raise self.error(
                f"MUTATE is {_shown(places)}; expected different places in ARGS, of 0 to {len(names) - 1}"
            )
        inputs = self._all_known(names)
        changed = [names[place] for place in places]
        if len(set(changed)) != len(changed):
            raise self.error(f"MUTATE changes a tensor twice: {_shown(changed)}")
        sizes = tuple(self.size_of[self.tensors[name]] for name in changed)
        name, cost = self._text(entry["NAME"], "NAME"), self._number(entry["TIME"], "TIME")
        outputs = tuple(self._number_of_new(size) for size in sizes)
        self.events.append(Call(name, inputs, outputs, sizes, (-1,) * len(outputs), cost))
        for changed_name, output in zip(changed, outputs, strict=True):
            self.events.append(Release(self.tensors[changed_name]))
            self._bind(changed_name, output)

    def _copy(self, entry: dict[str, Any]) -> None:
        source = self._known(entry["SRC"])
        self._bind(self._new(entry["DST"]), source)
        self.events.append(Share(source))

    def _copy_from(self, entry: dict[str, Any]) -> None:
        source, name = self._known(entry["SRC"]), self._text(entry["DST"], "DST")
        before = self._known(name)
        self.events += [Share(source), Release(before)]
        self._bind(name, source)

    def _release(self, entry: dict[str, Any]) -> None:
        name = self._text(entry["NAME"], "NAME")
        if name in self.before and name not in self.tensors:
            return  # what was made before START does not count
        self.events.append(Release(self._known(name)))
        del self.tensors[name]

    def _close(self) -> None:
        """Makes an event of the operator whose outputs are now known."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        for name in pending.outputs:
            if name not in pending.sizes or not (pending.is_constant or name in pending.aliases):
                self.line = pending.line
                wanted = "MEMORY" if pending.is_constant else "MEMORY and ALIAS"
                raise self.error(f"{_shown(name)} is made here, but {wanted} of it is missing")
        aliases = tuple(pending.aliases.get(name, -1) for name in pending.outputs)
        sizes = tuple(
            pending.sizes[name] if alias < 0 else 0
            for name, alias in zip(pending.outputs, aliases, strict=True)
        )
        outputs: list[int] = []
        for name, size, alias in zip(pending.outputs, sizes, aliases, strict=True):
            viewed = size if alias < 0 else self.size_of[alias]
            outputs.append(self._number_of_new(viewed))
            self._bind(name, outputs[-1])
        self.events.append(
            Call(
                pending.name,
                pending.inputs,
                tuple(outputs),
                sizes,
                aliases,
                pending.cost,
                pending.is_constant,
            )
        )

    def _number_of_new(self, viewed_bytes: int) -> int:
        self.size_of.append(viewed_bytes)
        return len(self.size_of) - 1

    def _described(self, name: Any, what: str) -> tuple[_Pending, str]:
        name = self._text(name, "NAME")
        if self.pending is None or name not in self.pending.made:
            raise self.error(f"{what} of {_shown(name)}, which the operator before does not make")
        return self.pending, name

    def _text(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            raise self.error(f"{what} is {_shown(value)}; expected a string")
        return value

    def _names(self, value: Any, what: str) -> list[str]:
        if not isinstance(value, list):
            raise self.error(f"{what} is {_shown(value)}; expected a list of names")
        return [self._text(name, what) for name in value]

    def _number(self, value: Any, what: str) -> int:
        text = str(value) if type(value) is int else value
        if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20):
            raise self.error(f"{what} is {_shown(value)}; expected an integer of at least 0")
        number = int(text)
        if number > _MOST_BYTES:
            raise self.error(f"{what} is {_shown(value)}; expected at most {_MOST_BYTES:,}")
        return number

    def _known(self, name: Any) -> int:
        name = self._text(name, "a name")
        if name not in self.tensors:
            raise self.error(f"{_shown(name)} is not there: it was never made, or is released")
        return self.tensors[name]

    def _all_known(self, names: Any) -> tuple[int, ...]:
        return tuple(self._known(name) for name in self._names(names, "ARGS"))

    def _new(self, name: Any) -> str:
        name = self._text(name, "NAME")
        if name in self.tensors:
            raise self.error(f"{_shown(name)} is there already")
        return name
