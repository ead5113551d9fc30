"""Plans to files: JSON with one line per operator, value, step and kept value. Plain data, no jax.

The document is made for version control:

* equal plans give equal lines. Keys have a fixed order (what identifies a record, then the rest by name),
  floats are written as their shortest exact decimal, and what differs from run to run (when and by which
  versions the file was written, the seconds spent planning, in which folders the code lies) is one record,
  `made`, on the last line; so the other lines are the same on another machine.
* one record is one line, indented by a space per level, so that `git diff` shows records. Fields of values
  and operators that have their default are left out.
* `version` counts changes that other versions of remat would misread.

`remat.plans.reading` is the inverse; `remat.plans.codec` says how a field is written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import typing
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from remat.core.errors import PlanError
from remat.plans.codec import Damage, codec_of
from remat.plans.record import PlanRecord

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "checksum",
    "dump_plan",
    "plan_to_data",
    "versions",
    "write_plan",
    "write_whole",
]

FORMAT = "remat.plan"
"""What a document says that it is."""
FORMAT_VERSION = 2
"""Version of the documents written, and the only one read."""

_MADE = '\n"made":'  # starts the last line: strings are escaped, so nothing else can look like it
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_LAST = ("schedule", "graph", "loops")


def plan_to_data(plan: PlanRecord) -> dict[str, Any]:
    """Returns a plan as JSON-ready data, in the order in which it is written.

    Raises:
        PlanError: a field holds something of another type than it is annotated with.
    """
    try:
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            **_body(codec_of(type(plan)).encode(plan)),
            "made": {**versions(), **_uncompared(plan)},
        }
    except Damage as damage:
        raise PlanError(f"this plan cannot be written: {damage}") from None


def dump_plan(plan: PlanRecord, *, date: str | None = None) -> str:
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
    made["checksum"] = checksum(data, folders)
    if folders:
        made["folders"] = folders
    if date is not None:
        made["date"] = date
    last = f'"made":{_one_line(dict(sorted(made.items())))}'
    return f"{{\n{_abbreviated(body, folders)},\n{last}\n}}\n"


def write_plan(plan: PlanRecord, path: str | Path) -> str:
    """Writes a plan to a file, dated; a file that holds an equal plan already is left as it is.

    So planning again in a checkout changes the file only if the plan changed. It is never half written.

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
    write_whole(file, text)
    return text


def write_whole(path: Path, text: str) -> None:
    """Writes a text file in one step: Ctrl-C, a full disk or a reader meanwhile find a whole text, old or new.

    What is no file (a pipe, a terminal) is written to as it is. A link stays one, and a file keeps its mode.

    Raises:
        OSError: it cannot be written; what was there before is left as it was.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    beside = place.with_name(f".remat-{uuid.uuid4().hex}.tmp")
    try:
        mode = None
        if place.exists():
            with place.open("r+b"):  # one that may not be written is not replaced either
                mode = place.stat().st_mode
        with beside.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        if mode is not None:
            beside.chmod(mode)
        os.replace(beside, place)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):  # of the path that was asked for
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _body(encoded: dict[str, Any]) -> dict[str, Any]:
    """A plan's fields: one-liners, lists, then the long parts; each by name. Loops alike."""
    for entry in encoded["loops"]:
        entry["plan"] = _body(entry["plan"])

    def rank(key: str) -> tuple[int, str]:
        if key in _LAST:
            return 2 + _LAST.index(key), key
        return int(isinstance(encoded[key], list)), key

    return {key: encoded[key] for key in sorted(encoded, key=rank)}


def _uncompared(plan: PlanRecord) -> dict[str, Any]:
    """The fields of a plan that are no part of equality, those of its loops nested."""
    hints = typing.get_type_hints(type(plan))
    data: dict[str, Any] = {
        item.name: codec_of(hints[item.name]).encode(getattr(plan, item.name))
        for item in fields(plan)
        if not item.compare
    }
    if plan.loops:
        data["loops"] = [_uncompared(entry.plan) for entry in plan.loops]
    return data


@functools.cache
def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "remat"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # used from a checkout that is not installed
            found[name] = "unknown"
    return found


def checksum(data: Mapping[str, Any], folders: Mapping[str, str] | None = None) -> str:
    """Hash of a document's content, whatever its layout; `folders` are abbreviated first."""
    content = {key: item for key, item in data.items() if key != "made"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(_abbreviated(text, folders or {}).encode()).hexdigest()[:32]


def _folders(plan: PlanRecord) -> dict[str, str]:
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


def _sources(plan: PlanRecord) -> Iterator[str]:
    for entries in (plan.graph.ops, plan.saved, plan.recomputed):
        yield from {entry.source for entry in entries}
    for entry in plan.loops:
        yield from _sources(entry.plan)


def _abbreviated(text: str, folders: Mapping[str, str]) -> str:
    """JSON text with the short names of folders."""
    for name, folder in folders.items():
        text = text.replace(json.dumps(folder)[1:-1], name)
    return text


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
