"""Dataclasses to JSON-ready data and back, read off their annotations. Plain data, no jax.

There is one codec per kind of annotation. A new field with a default, or a new action of a `Step`, needs no change
here, and files without it are still read. Everything read is checked, so that damaged data is a `Damage` that names
the place.
"""

from __future__ import annotations

import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, NoReturn

from remat.core.graph import Op, Value
from remat.plans.record import LoopRecord
from remat.plans.steps import Step

__all__ = ["Damage", "as_dict", "as_dict_at", "as_list", "codec_of", "each", "expected", "quoted"]

_BRIEF = (Value, Op, LoopRecord)  # records whose fields are left out at their default


class Damage(Exception):
    """Something in a document (or a plan) that should not be; `place` grows as the stack unwinds."""

    def __init__(self, problem: str, *place: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = list(place)

    def inside(self, place: str) -> Damage:
        self.place.insert(0, place)
        return self

    def __str__(self) -> str:
        where = "".join(self.place).removeprefix(".")
        return f"at {where}: {self.problem}" if where else self.problem


class _Exact:
    """`int`, `str` or `bool`, and nothing that merely converts to it."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def encode(self, item: Any) -> Any:
        if self.kind is int and not isinstance(item, bool) and hasattr(item, "__index__"):
            return operator.index(item)  # numpy integers too
        if self.kind is str and isinstance(item, str):
            return str.__str__(item)  # members of an enumeration too
        return self.decode(item)

    def decode(self, data: Any) -> Any:
        if type(data) is not self.kind:
            expected(_KINDS[self.kind], data)
        return data


class _Float:
    """A float. JSON has no infinities, so those are strings."""

    def encode(self, item: Any) -> Any:
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            expected("a number", item)
        number = float(item)
        return number if math.isfinite(number) else str(number)

    def decode(self, data: Any) -> Any:
        if isinstance(data, str) and data in ("inf", "-inf", "nan"):
            return float(data)
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            expected("a number", data)
        try:
            return float(data)
        except OverflowError:
            expected("a number that fits in 64 bits", data)


class _Choice:
    """A `Literal`."""

    def __init__(self, choices: tuple[Any, ...]) -> None:
        self.choices = choices

    def decode(self, data: Any) -> Any:
        if type(data) is not str or data not in self.choices:
            expected(f"one of {list(self.choices)}", data)
        return data

    encode = decode


class _Nothing:
    """None."""

    def decode(self, data: Any) -> None:
        if data is not None:
            expected("null", data)

    encode = decode


class _Union:
    """The first alternative that fits."""

    def __init__(self, codecs: Sequence[Any]) -> None:
        self.codecs = codecs

    def encode(self, item: Any) -> Any:
        return self._first("encode", item)

    def decode(self, data: Any) -> Any:
        return self._first("decode", data)

    def _first(self, way: str, item: Any) -> Any:
        problems: list[Damage] = []
        for codec in self.codecs:
            try:
                return getattr(codec, way)(item)
            except Damage as damage:
                problems.append(damage)
        deepest = max(problems, key=lambda damage: len(damage.place))
        if deepest.place:
            raise deepest
        raise Damage(" or ".join([problems[0].problem, *map(_short_of, problems[1:])]))


class _Many:
    """A tuple of any length, all alike."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec

    def encode(self, item: Any) -> list[Any]:
        return each([self.codec.encode] * len(as_list(item)), item)

    def decode(self, data: Any) -> tuple[Any, ...]:
        return tuple(each([self.codec.decode] * len(as_list(data)), data))


class _Fixed:
    """A tuple of known length."""

    def __init__(self, codecs: Sequence[Any]) -> None:
        self.codecs = codecs

    def encode(self, item: Any) -> list[Any]:
        if len(as_list(item)) != len(self.codecs):
            expected(f"{len(self.codecs)} items", item)
        return each([codec.encode for codec in self.codecs], item)

    def decode(self, data: Any) -> tuple[Any, ...]:
        if len(as_list(data)) != len(self.codecs):
            expected(f"{len(self.codecs)} items", data)
        return tuple(each([codec.decode for codec in self.codecs], data))


class _Map:
    """A mapping from strings."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec

    def encode(self, item: Any) -> dict[str, Any]:
        return {key: self._one(self.codec.encode, key, item[key]) for key in sorted(as_dict(item))}

    def decode(self, data: Any) -> dict[str, Any]:
        return {key: self._one(self.codec.decode, key, item) for key, item in as_dict(data).items()}

    def _one(self, convert: Any, key: str, item: Any) -> Any:
        try:
            return convert(item)
        except Damage as damage:
            raise damage.inside(f".{key}") from None


class _Record:
    """A dataclass as an object: its first field first, the others by name."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.brief = issubclass(kind, _BRIEF)

    @functools.cached_property
    def fields(self) -> tuple[tuple[Field[Any], Any], ...]:
        """Compared fields with their codecs. Resolved late: plans and loops contain each other."""
        hints = typing.get_type_hints(self.kind)
        known = [(item, codec_of(hints[item.name])) for item in fields(self.kind) if item.compare]
        return (known[0], *sorted(known[1:], key=lambda entry: entry[0].name))

    def encode(self, item: Any) -> dict[str, Any]:
        if not isinstance(item, self.kind):
            expected(f"a {self.kind.__name__}", item)
        data: dict[str, Any] = {}
        for entry, codec in self.fields:
            value = getattr(item, entry.name)
            if self.brief and value == entry.default:
                continue
            try:
                data[entry.name] = codec.encode(value)
            except Damage as damage:
                raise damage.inside(f".{entry.name}") from None
        return data

    def decode(self, data: Any) -> Any:
        left = len(as_dict(data))
        found: dict[str, Any] = {}
        for entry, codec in self.fields:
            if entry.name not in data:
                if entry.default is MISSING and entry.default_factory is MISSING:
                    raise Damage("missing", f".{entry.name}")
                continue
            left -= 1
            try:
                found[entry.name] = codec.decode(data[entry.name])
            except Damage as damage:
                raise damage.inside(f".{entry.name}") from None
        if left:
            known = [entry.name for entry, _ in self.fields]
            strange = [key for key in data if key not in known]
            raise Damage(
                f"unknown; known here are {known}. The file is damaged, or a newer remat wrote it",
                f".{strange[0]}",
            )
        return self.kind(**found)


class _Row:
    """A dataclass as a list of its fields in order, without the last ones that have their default."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind

    @functools.cached_property
    def fields(self) -> tuple[tuple[Field[Any], Any], ...]:
        hints = typing.get_type_hints(self.kind)
        return tuple((item, codec_of(hints[item.name])) for item in fields(self.kind))

    def encode(self, item: Any) -> list[Any]:
        if not isinstance(item, self.kind):
            expected(f"a {self.kind.__name__}", item)
        values = [getattr(item, entry.name) for entry, _ in self.fields]
        while values and values[-1] == self.fields[len(values) - 1][0].default:
            values.pop()
        return each([codec.encode for _, codec in self.fields], values)

    def decode(self, data: Any) -> Any:
        least = sum(entry.default is MISSING for entry, _ in self.fields)
        if not least <= len(as_list(data)) <= len(self.fields):
            names = [entry.name for entry, _ in self.fields]
            expected(f"{least} to {len(names)} items {names}", data)
        return self.kind(*each([codec.decode for _, codec in self.fields], data))


_KINDS: dict[Any, str] = {int: "an integer", str: "a string", bool: "true or false"}


@functools.cache
def codec_of(annotation: Any) -> Any:
    """Returns how a field of that annotation is written and read."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _KINDS:
        return _Exact(annotation)
    if annotation is float:
        return _Float()
    if annotation in (None, type(None)):
        return _Nothing()
    if origin is Literal:
        return _Choice(arguments)
    if origin in (typing.Union, types.UnionType):
        codecs = [codec_of(argument) for argument in arguments]
        return _Union(sorted(codecs, key=lambda codec: isinstance(codec, _Float)))  # 3 is no float
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _Many(codec_of(arguments[0]))
    if origin is tuple:
        return _Fixed([codec_of(argument) for argument in arguments])
    if origin in (dict, Mapping) and arguments[0] is str:
        return _Map(codec_of(arguments[1]))
    if annotation is Step:
        return _Row(annotation)
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _Record(annotation)
    raise TypeError(f"remat.plans cannot write a field annotated {annotation!r}")


def each(converts: Iterable[Any], items: Iterable[Any]) -> list[Any]:
    done: list[Any] = []
    try:
        for convert, item in zip(converts, items, strict=False):
            done.append(convert(item))
    except Damage as damage:
        raise damage.inside(f"[{len(done)}]") from None
    return done


def as_list(data: Any) -> Any:
    return data if isinstance(data, (list, tuple)) else expected("a list", data)


def as_dict(data: Any) -> Any:
    return data if isinstance(data, Mapping) else expected("an object", data)


def as_dict_at(data: Any, place: str) -> Any:
    try:
        return as_dict(data)
    except Damage as damage:
        raise damage.inside(place) from None


def expected(what: str, found: Any) -> NoReturn:
    raise Damage(f"found {quoted(found)}, expected {what}")


def _short_of(damage: Damage) -> str:
    return damage.problem.rpartition(", expected ")[2]


def quoted(item: Any, limit: int = 60) -> str:
    text = repr(item)
    return text if len(text) <= limit else text[: limit - 3] + "..."
