"""Plans as files: JSON with one line per operator, value, step and kept value. Plain data, no jax.

The document is made for version control:

* equal plans give equal lines. Keys have a fixed order (what identifies a record, then the rest by name),
  floats are written as their shortest exact decimal, and what differs from run to run (when and by which
  versions the file was written, the seconds spent planning, in which folders the code lies) is one record,
  `made`, on the last line; so the other lines are the same on another machine.
* one record is one line, indented by a space per level, so that `git diff` shows records. Fields of values
  and operators that have their default are left out.
* `version` counts changes that older readers would misread. Version 1 (one line, every field) is still read.

What a field may hold is read off the annotations of the dataclasses in `remat.plan` and `remat.core.graph`: a new
field with a default, or a new action of a `Step`, needs no change here, and files without it are still read.
Everything read is checked, so a damaged document is a `PlanError` that names the place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

from remat.core.errors import PlanError, PolicyError
from remat.core.forms import ENCODINGS, get_encoding
from remat.core.graph import Graph, Op, Value
from remat.plans.paths import whole_of
from remat.plans.plan import LoopPlan, Plan, Schedule, Step

__all__ = [
    "FORMAT_VERSION",
    "dump_plan",
    "plan_from_data",
    "plan_to_data",
    "read_plan",
    "write_plan",
]

FORMAT_VERSION = 2
"""Version of the documents written; those read are 1 and 2."""

_FORMAT = "remat.plan"
_MADE = '\n"made":'  # starts the last line: strings are escaped, so nothing else can look like it
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_BRIEF = (Value, Op, LoopPlan)  # records whose fields are left out at their default
_LAST = ("schedule", "graph", "loops")
_AGAIN = "Make the plan again with remat.plan(...)."


class _Damage(Exception):
    """Something in a document (or a plan) that should not be; `place` grows as the stack unwinds."""

    def __init__(self, problem: str, *place: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = list(place)

    def inside(self, place: str) -> _Damage:
        self.place.insert(0, place)
        return self

    def __str__(self) -> str:
        where = "".join(self.place).removeprefix(".")
        return f"at {where}: {self.problem}" if where else self.problem


# --- codecs: one per annotation ------------------------------------------------------------------------


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
            _expected(_KINDS[self.kind], data)
        return data


class _Float:
    """A float. JSON has no infinities, so those are strings."""

    def encode(self, item: Any) -> Any:
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            _expected("a number", item)
        number = float(item)
        return number if math.isfinite(number) else str(number)

    def decode(self, data: Any) -> Any:
        if isinstance(data, str) and data in ("inf", "-inf", "nan"):
            return float(data)
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            _expected("a number", data)
        try:
            return float(data)
        except OverflowError:
            _expected("a number that fits in 64 bits", data)


class _Choice:
    """A `Literal`."""

    def __init__(self, choices: tuple[Any, ...]) -> None:
        self.choices = choices

    def decode(self, data: Any) -> Any:
        if type(data) is not str or data not in self.choices:
            _expected(f"one of {list(self.choices)}", data)
        return data

    encode = decode


class _Nothing:
    """None."""

    def decode(self, data: Any) -> None:
        if data is not None:
            _expected("null", data)

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
        problems: list[_Damage] = []
        for codec in self.codecs:
            try:
                return getattr(codec, way)(item)
            except _Damage as damage:
                problems.append(damage)
        deepest = max(problems, key=lambda damage: len(damage.place))
        if deepest.place:
            raise deepest
        raise _Damage(" or ".join([problems[0].problem, *map(_short_of, problems[1:])]))


class _Many:
    """A tuple of any length, all alike."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec

    def encode(self, item: Any) -> list[Any]:
        return _each([self.codec.encode] * len(_list(item)), item)

    def decode(self, data: Any) -> tuple[Any, ...]:
        return tuple(_each([self.codec.decode] * len(_list(data)), data))


class _Fixed:
    """A tuple of known length."""

    def __init__(self, codecs: Sequence[Any]) -> None:
        self.codecs = codecs

    def encode(self, item: Any) -> list[Any]:
        if len(_list(item)) != len(self.codecs):
            _expected(f"{len(self.codecs)} items", item)
        return _each([codec.encode for codec in self.codecs], item)

    def decode(self, data: Any) -> tuple[Any, ...]:
        if len(_list(data)) != len(self.codecs):
            _expected(f"{len(self.codecs)} items", data)
        return tuple(_each([codec.decode for codec in self.codecs], data))


class _Map:
    """A mapping from strings."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec

    def encode(self, item: Any) -> dict[str, Any]:
        return {key: self._one(self.codec.encode, key, item[key]) for key in sorted(_dict(item))}

    def decode(self, data: Any) -> dict[str, Any]:
        return {key: self._one(self.codec.decode, key, item) for key, item in _dict(data).items()}

    def _one(self, convert: Any, key: str, item: Any) -> Any:
        try:
            return convert(item)
        except _Damage as damage:
            raise damage.inside(f".{key}") from None


class _Record:
    """A dataclass as an object: its first field first, the others by name."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.brief = kind in _BRIEF

    @functools.cached_property
    def fields(self) -> tuple[tuple[Field[Any], Any], ...]:
        """Compared fields with their codecs. Resolved late: plans and loops contain each other."""
        hints = typing.get_type_hints(self.kind)
        known = [(item, _codec(hints[item.name])) for item in fields(self.kind) if item.compare]
        return (known[0], *sorted(known[1:], key=lambda entry: entry[0].name))

    def encode(self, item: Any) -> dict[str, Any]:
        if not isinstance(item, self.kind):
            _expected(f"a {self.kind.__name__}", item)
        data: dict[str, Any] = {}
        for entry, codec in self.fields:
            value = getattr(item, entry.name)
            if self.brief and value == entry.default:
                continue
            try:
                data[entry.name] = codec.encode(value)
            except _Damage as damage:
                raise damage.inside(f".{entry.name}") from None
        return data

    def decode(self, data: Any) -> Any:
        left = len(_dict(data))
        found: dict[str, Any] = {}
        for entry, codec in self.fields:
            if entry.name not in data:
                if entry.default is MISSING and entry.default_factory is MISSING:
                    raise _Damage("missing", f".{entry.name}")
                continue
            left -= 1
            try:
                found[entry.name] = codec.decode(data[entry.name])
            except _Damage as damage:
                raise damage.inside(f".{entry.name}") from None
        if left:
            known = [entry.name for entry, _ in self.fields]
            strange = [key for key in data if key not in known]
            raise _Damage(
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
        return tuple((item, _codec(hints[item.name])) for item in fields(self.kind))

    def encode(self, item: Any) -> list[Any]:
        if not isinstance(item, self.kind):
            _expected(f"a {self.kind.__name__}", item)
        values = [getattr(item, entry.name) for entry, _ in self.fields]
        while values and values[-1] == self.fields[len(values) - 1][0].default:
            values.pop()
        return _each([codec.encode for _, codec in self.fields], values)

    def decode(self, data: Any) -> Any:
        least = sum(entry.default is MISSING for entry, _ in self.fields)
        if not least <= len(_list(data)) <= len(self.fields):
            names = [entry.name for entry, _ in self.fields]
            _expected(f"{least} to {len(names)} items {names}", data)
        return self.kind(*_each([codec.decode for _, codec in self.fields], data))


_KINDS: dict[Any, str] = {int: "an integer", str: "a string", bool: "true or false"}


@functools.cache
def _codec(annotation: Any) -> Any:
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
        codecs = [_codec(argument) for argument in arguments]
        return _Union(sorted(codecs, key=lambda codec: isinstance(codec, _Float)))  # 3 is no float
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _Many(_codec(arguments[0]))
    if origin is tuple:
        return _Fixed([_codec(argument) for argument in arguments])
    if origin in (dict, Mapping) and arguments[0] is str:
        return _Map(_codec(arguments[1]))
    if annotation is Step:
        return _Row(annotation)
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _Record(annotation)
    raise TypeError(f"remat.plans.file cannot write a field annotated {annotation!r}")


def _each(converts: Iterable[Any], items: Iterable[Any]) -> list[Any]:
    done: list[Any] = []
    try:
        for convert, item in zip(converts, items, strict=False):
            done.append(convert(item))
    except _Damage as damage:
        raise damage.inside(f"[{len(done)}]") from None
    return done


def _list(data: Any) -> Any:
    return data if isinstance(data, (list, tuple)) else _expected("a list", data)


def _dict(data: Any) -> Any:
    return data if isinstance(data, Mapping) else _expected("an object", data)


def _dict_at(data: Any, place: str) -> Any:
    try:
        return _dict(data)
    except _Damage as damage:
        raise damage.inside(place) from None


def _expected(what: str, found: Any) -> NoReturn:
    raise _Damage(f"found {_quoted(found)}, expected {what}")


def _short_of(damage: _Damage) -> str:
    return damage.problem.rpartition(", expected ")[2]


def _quoted(item: Any, limit: int = 60) -> str:
    text = repr(item)
    return text if len(text) <= limit else text[: limit - 3] + "..."


# --- documents -----------------------------------------------------------------------------------------


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """Returns a plan as JSON-ready data, in the order in which it is written.

    Raises:
        PlanError: a field holds something of another type than it is annotated with.
    """
    try:
        return {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            **_body(_codec(Plan).encode(plan)),
            "made": {**_versions(), **_uncompared(plan)},
        }
    except _Damage as damage:
        raise PlanError(f"this plan cannot be written: {damage}") from None


def plan_from_data(data: Any) -> Plan:
    """Inverse of `plan_to_data`; reads documents of older versions too.

    Raises:
        PlanError: the document is no plan, of a version this `remat` does not know, or damaged.
    """
    return _from_data(data, "this plan")


def dump_plan(plan: Plan, *, date: str | None = None) -> str:
    """Returns a plan as the text of a file.

    Args:
        plan: any plan.
        date: written on the last line if given.

    Raises:
        PlanError: see `plan_to_data`.
    """
    data = plan_to_data(plan)
    made = data.pop("made")
    body = ",\n".join(_text(f'"{key}":', item, 0) for key, item in data.items())
    folders = _folders(plan)
    if any(name in body for name in folders):  # a plan that talks of such names: leave it alone
        folders = {}
    made["checksum"] = _checksum(data, folders)
    if folders:
        made["folders"] = folders
    if date is not None:
        made["date"] = date
    last = f'"made":{_one_line(dict(sorted(made.items())))}'
    return f"{{\n{_abbreviated(body, folders)},\n{last}\n}}\n"


def write_plan(plan: Plan, path: str | Path) -> str:
    """Writes a plan to a file, dated; a file that holds an equal plan already is left as it is.

    So planning again in a checkout changes the file only if the plan changed.

    Returns:
        What is in the file.

    Raises:
        PlanError: see `plan_to_data`.
        OSError: the file cannot be written.
    """
    file = Path(path)
    text = dump_plan(plan, date=datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        old = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        old = ""
    if _lasting(old) == _lasting(text):
        return old
    file.write_text(text, encoding="utf-8", newline="\n")
    return text


def read_plan(text_or_path: str | Path) -> Plan:
    """Reads a plan from a JSON document or from the path of one.

    Raises:
        PlanError: neither a JSON document nor a readable file; or see `plan_from_data`.
    """
    text, name = str(text_or_path), "this plan"
    if not text.lstrip().startswith("{"):
        try:
            text, name = Path(text_or_path).read_text(encoding="utf-8"), f"{text}: this plan"
        except (OSError, ValueError) as error:
            raise PlanError(
                f"cannot read a plan from {_quoted(text, 200)}: {error}; expected the path of a file "
                "written by plan.to_json(path)"
            ) from error
    return _from_data(_parsed(text, name), name)


def _body(encoded: dict[str, Any]) -> dict[str, Any]:
    """A plan's fields: one-liners, lists, then the long parts; each by name. Loops alike."""
    for entry in encoded["loops"]:
        entry["plan"] = _body(entry["plan"])

    def rank(key: str) -> tuple[int, str]:
        if key in _LAST:
            return 2 + _LAST.index(key), key
        return int(isinstance(encoded[key], list)), key

    return {key: encoded[key] for key in sorted(encoded, key=rank)}


def _uncompared(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that are no part of equality, those of its loops nested."""
    hints = typing.get_type_hints(Plan)
    data: dict[str, Any] = {
        item.name: _codec(hints[item.name]).encode(getattr(plan, item.name))
        for item in fields(Plan)
        if not item.compare
    }
    if plan.loops:
        data["loops"] = [_uncompared(entry.plan) for entry in plan.loops]
    return data


def _with_uncompared(plan: Plan, data: Any) -> Plan:
    """Inverse of `_uncompared`; whatever is missing keeps its default."""
    hints = typing.get_type_hints(Plan)
    given: dict[str, Any] = {}
    for item in fields(Plan):
        if not item.compare and item.name in _dict(data):
            try:
                given[item.name] = _codec(hints[item.name]).decode(data[item.name])
            except _Damage as damage:
                raise damage.inside(f".{item.name}") from None
    loops = _list(data.get("loops", []))
    if loops and len(loops) != len(plan.loops):
        raise _Damage(f"found {len(loops)} entries for {len(plan.loops)} loops", ".loops")
    if loops:
        restore = [functools.partial(_with_uncompared, entry.plan) for entry in plan.loops]
        try:
            plans = _each(restore, loops)
        except _Damage as damage:
            raise damage.inside(".loops") from None
        given["loops"] = tuple(
            replace(entry, plan=new) for entry, new in zip(plan.loops, plans, strict=True)
        )
    return replace(plan, **given)


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "remat"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # used from a checkout that is not installed
            found[name] = "unknown"
    return found


def _checksum(data: Mapping[str, Any], folders: Mapping[str, str] | None = None) -> str:
    """Hash of a document's content, whatever its layout; `folders` are abbreviated first."""
    content = {key: item for key, item in data.items() if key != "made"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(_abbreviated(text, folders or {}).encode()).hexdigest()[:32]


def _folders(plan: Plan) -> dict[str, str]:
    """Short names of the folders that hold the user's code and the installed packages, longest first.

    They differ from machine to machine, and every operator names one: written once, on the last line.
    """
    files = {source.rpartition(":")[0] for source in _sources(plan)}
    packages = {match.group(): None for file in files if (match := _PACKAGES.match(file))}
    own = [
        os.path.dirname(file) for file in files if os.path.isabs(file) and not _PACKAGES.match(file)
    ]
    try:
        common = os.path.commonpath(own) if own else ""
    except ValueError:  # on several drives
        common = ""
    found = {f"<packages {n}>/": folder for n, folder in enumerate(sorted(packages), start=1)}
    if os.path.dirname(common) != common:  # not the root of everything
        found["<code>/"] = common + os.sep
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _sources(plan: Plan) -> Iterator[str]:
    for entries in (plan.graph.ops, plan.saved, plan.recomputed):
        yield from {entry.source for entry in entries}
    for entry in plan.loops:
        yield from _sources(entry.plan)


def _abbreviated(text: str, folders: Mapping[str, str]) -> str:
    """JSON text with the short names of folders."""
    for name, folder in folders.items():
        text = text.replace(json.dumps(folder)[1:-1], name)
    return text


def _spelled_out(item: Any, folders: Mapping[str, str]) -> Any:
    """Inverse of `_abbreviated`, on data."""
    if isinstance(item, str):
        if "<" in item:
            for name, folder in folders.items():
                item = item.replace(name, folder)
        return item
    if isinstance(item, dict):
        # Most of a document is numbers.
        changed = {
            key: _spelled_out(part, folders)
            for key, part in item.items()
            if isinstance(part, (str, list, dict))
        }
        return {**item, **changed}
    if isinstance(item, list) and item and isinstance(item[0], (str, list, dict)):
        return [_spelled_out(part, folders) for part in item]
    return item


def _lasting(text: str) -> tuple[str, Any]:
    """What of a document makes another plan: all but its last record, and the folders in that."""
    body, _, last = text.rpartition(_MADE)
    try:
        return body, json.loads(last.rstrip().removesuffix("}")).get("folders")
    except (ValueError, AttributeError):
        return "", None


def _one_line(item: Any) -> str:
    return json.dumps(item, separators=(",", ":"), allow_nan=False)


def _has_rows(item: Any) -> bool:
    """Whether something takes several lines: it is or holds a list of lists, objects or texts."""
    if isinstance(item, dict):
        return any(isinstance(x, (dict, list)) and _has_rows(x) for x in item.values())
    return bool(item) and isinstance(item[0], (list, dict, str))


def _text(head: str, item: Any, level: int) -> str:
    """The text of `head` and an item: rows on lines of their own, everything else on one."""
    margin = " " * level
    if not isinstance(item, (dict, list)) or not _has_rows(item):
        return f"{margin}{head}{_one_line(item)}"
    if isinstance(item, dict):
        inner = [_text(f'"{key}":', part, level + 1) for key, part in item.items()]
        return f"{margin}{head}{{\n" + ",\n".join(inner) + f"\n{margin}}}"
    inner = [
        _text("", part, level + 1) if _holds_a_record(part) else f"{margin} {_one_line(part)}"
        for part in item
    ]
    return f"{margin}{head}[\n" + ",\n".join(inner) + f"\n{margin}]"


def _holds_a_record(item: Any) -> bool:
    return isinstance(item, dict) and any(isinstance(part, dict) for part in item.values())


# --- reading -------------------------------------------------------------------------------------------


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        lines = text.splitlines() or [""]
        line = lines[min(error.lineno, len(lines)) - 1]
        shown = f" (line {error.lineno} is {_quoted(line.strip())})" if len(lines) > 1 else ""
        ends = ": the file ends too early" if not text[error.pos :].strip() else ""
        raise PlanError(f"{name} is not JSON{ends}: {error}{shown}. {_AGAIN}") from error
    except (_Damage, ValueError, RecursionError) as error:
        raise PlanError(f"{name} is damaged: {error}. {_AGAIN}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Damage(f"the key {twice!r} appears twice in one object (a merge?)")
    return found


def _no_constant(text: str) -> NoReturn:
    raise _Damage(f"found {text}, which is not JSON")


def _from_data(data: Any, name: str) -> Plan:
    if not isinstance(data, Mapping):
        raise PlanError(
            f"{name} is not a plan: the document is a {type(data).__name__}, expected an object"
        )
    version = data.get("version")
    if data.get("format") != _FORMAT:
        raise PlanError(
            f"{name} is not a plan: format {_quoted(data.get('format'))}, version {_quoted(version)}; "
            f"expected {_FORMAT!r}, version 1 or {FORMAT_VERSION}: a file written by plan.to_json(path)"
        )
    if type(version) is not int or version not in (1, FORMAT_VERSION):
        made = data.get("made")
        by = made.get("remat") if isinstance(made, Mapping) else None
        raise PlanError(
            f"{name} is of version {_quoted(version)} of the file format"
            + (f", written by remat {by}" if isinstance(by, str) else "")
            + f"; expected {_FORMAT!r}, version 1 or {FORMAT_VERSION} (this is remat "
            f"{_versions()['remat']}). Upgrade remat, or make the plan again with remat.plan(...)."
        )
    try:
        return _decoded(_upgraded(data) if version == 1 else data)
    except _Damage as damage:
        raise PlanError(f"{name} is damaged {damage}. {_AGAIN}") from None
    except RecursionError:
        raise PlanError(f"{name} is damaged: it is nested too deeply. {_AGAIN}") from None


def _decoded(data: Mapping[str, Any]) -> Plan:
    made = _dict_at(data.get("made", {}), ".made")
    folders = _dict_at(made.get("folders", {}), ".made.folders")
    for name, folder in folders.items():
        if not isinstance(folder, str):
            raise _Damage(f"found {_quoted(folder)}, expected a string", f".made.folders.{name}")
    body = {key: item for key, item in data.items() if key not in ("format", "version", "made")}
    plan = _codec(Plan).decode(_spelled_out(body, folders) if folders else body)
    try:
        plan = _with_uncompared(plan, made)
    except _Damage as damage:
        raise damage.inside(".made") from None
    _check_plan(plan)
    # Last: what is wrong says more than that something is.
    if "checksum" in made and made["checksum"] != _checksum(data):
        raise _Damage(
            "the content does not fit it: the file was edited, or merged from two plans (to use it as it "
            "is, delete this entry)",
            ".made.checksum",
        )
    return plan


def _upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A document of version 1 as one of version 2, without its checksum."""
    body, made = _upgraded_plan(data)
    return {"format": _FORMAT, "version": FORMAT_VERSION, **body, "made": made}


def _upgraded_plan(data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Version 1 had the seconds among the fields, the steps on top, and a whole document per loop."""
    body = {key: item for key, item in _dict(data).items() if key not in ("format", "version")}
    if "steps" not in body:
        raise _Damage("missing", ".steps")
    made = {"solve_seconds": body.pop("solve_seconds", 0.0)}
    body["schedule"] = {"steps": body.pop("steps")}
    loops, times = [], []
    for index, entry in enumerate(_list(body.get("loops", []))):
        try:
            inner, inner_made = _upgraded_plan(_dict(entry).get("plan"))
        except _Damage as damage:
            raise damage.inside(f".loops[{index}].plan") from None
        loops.append({**entry, "plan": inner})
        times.append(inner_made)
    if loops:
        body["loops"], made["loops"] = loops, times
    return body, made


# --- what belongs together -----------------------------------------------------------------------------


def _check_plan(plan: Plan) -> None:
    """Raises _Damage where ids do not exist or do not fit together."""
    _check_graph(plan.graph)
    _check_schedule(plan.graph, plan.schedule)
    _check_entries("saved", [entry.value for entry in plan.saved], len(plan.graph.values))
    _check_forms(plan)
    _check_entries("recomputed", [entry.op for entry in plan.recomputed], len(plan.graph.ops))
    paths: set[str] = set()
    for index, entry in enumerate(plan.loops):
        if entry.path in paths:
            raise _Damage(f"a second plan for loop {entry.path!r}", f".loops[{index}].path")
        paths.add(entry.path)
        _check_chunk(entry, f".loops[{index}].chunk")
        try:
            _check_plan(entry.plan)
        except _Damage as damage:
            raise damage.inside(f".loops[{index}].plan") from None


def _check_forms(plan: Plan) -> None:
    forms = [(f".saved[{i}].form", entry.form) for i, entry in enumerate(plan.saved)]
    forms += [(f".graph.values[{v.id}].form", v.form) for v in plan.graph.values if v.form]
    for place, form in forms:
        try:
            get_encoding(form)
        except PolicyError:
            valid = sorted([*ENCODINGS, "sparse:<share>"])
            raise _Damage(f"found {form!r}, expected one of {valid}", place) from None


def _check_chunk(entry: LoopPlan, place: str) -> None:
    """A chunk is a loop and what is left over of it, with as many iterations as it says."""
    if entry.chunk < 1:
        raise _Damage(f"found {entry.chunk}, expected at least 1", place)
    if entry.chunk == 1:
        return
    inside = [loop for loop in entry.plan.loops if whole_of(loop.path) == "scan0"]
    trips = sum(loop.length * loop.chunk for loop in inside)
    if trips != entry.chunk:
        raise _Damage(f"found {entry.chunk}, but the loop inside has {trips} iterations", place)


def _check_ids(ids: Iterable[int], count: int, what: str, *place: str) -> None:
    for index, number in enumerate(ids):
        if not 0 <= number < count:
            raise _Damage(f"{number} is no {what}; there are {count}", *place, f"[{index}]")


def _check_entries(name: str, ids: Sequence[int], count: int) -> None:
    what, key = ("value", "value") if name == "saved" else ("operator", "op")
    seen: set[int] = set()
    for index, number in enumerate(ids):
        place = f".{name}[{index}].{key}"
        if not 0 <= number < count:
            raise _Damage(f"{number} is no {what}; there are {count}", place)
        if number in seen:
            raise _Damage(f"{what} {number} is listed twice", place)
        seen.add(number)


def _check_graph(graph: Graph) -> None:
    for item in fields(Graph):
        ids = getattr(graph, item.name)
        if item.name not in ("values", "ops", "sites") and isinstance(ids, tuple):
            _check_ids(ids, len(graph.values), "value", f".graph.{item.name}")
    for value in graph.values:
        if value.producer is not None:
            place = f".graph.values[{value.id}].producer"
            if not 0 <= value.producer < len(graph.ops):
                raise _Damage(f"{value.producer} is no operator; there are {len(graph.ops)}", place)
            if value.id not in graph.ops[value.producer].outputs:
                raise _Damage(f"operator {value.producer} does not compute this value", place)
    try:
        graph.check()
    except ValueError as error:
        raise _Damage(str(error), ".graph") from None


def _check_schedule(graph: Graph, schedule: Schedule) -> None:
    turns = 0
    for index, step in enumerate(schedule.steps):
        place = f".schedule.steps[{index}]"
        runs = step.action == "compute"
        what, count = ("operator", len(graph.ops)) if runs else ("value", len(graph.values))
        least = 0 if runs else -1  # `turn` and `barrier` have no target
        if not least <= step.target < count:
            raise _Damage(f"{step.target} is no {what}; there are {count}", place)
        _check_ids(step.values, len(graph.values), "value", place, "[2]")
        turns += step.action == "turn"
    if turns != 1:
        raise _Damage(f"found {turns} steps 'turn', expected 1", ".schedule.steps")
