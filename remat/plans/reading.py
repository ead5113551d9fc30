"""Files to plans: the inverse of `remat.plans.writing`, and what has to fit together. Plain data, no jax.

Everything read is checked, so a damaged document is a `PlanError` that names the place.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from remat.core.errors import PlanError, PolicyError
from remat.core.forms import ENCODINGS, get_encoding
from remat.core.graph import Graph
from remat.plans.codec import Damage, as_dict, as_dict_at, as_list, codec_of, each, quoted
from remat.plans.paths import whole_of
from remat.plans.record import LoopRecord, PlanRecord
from remat.plans.steps import Schedule
from remat.plans.writing import FORMAT, FORMAT_VERSION, checksum, versions

__all__ = ["plan_from_data", "read_plan"]

_AGAIN = "Make the plan again with remat.plan(...)."

PlanClass = TypeVar("PlanClass", bound=PlanRecord)


def plan_from_data(data: Any, kind: type[PlanClass], name: str = "this plan") -> PlanClass:
    """Inverse of `remat.plans.writing.plan_to_data`.

    Args:
        data: a document.
        kind: the class to make, `PlanRecord` or one of its own: its annotations say what the fields hold.
        name: what errors call the document.

    Raises:
        PlanError: the document is no plan, of a version this `remat` does not know, or damaged.
    """
    if not isinstance(data, Mapping):
        raise PlanError(
            f"{name} is not a plan: the document is a {type(data).__name__}, expected an object"
        )
    version = data.get("version")
    if data.get("format") != FORMAT:
        raise PlanError(
            f"{name} is not a plan: format {quoted(data.get('format'))}, version {quoted(version)}; "
            f"expected {FORMAT!r}, version {FORMAT_VERSION}: a file written by plan.to_json(path)"
        )
    if type(version) is not int or version != FORMAT_VERSION:
        made = data.get("made")
        by = made.get("remat") if isinstance(made, Mapping) else None
        raise PlanError(
            f"{name} is of version {quoted(version)} of the file format"
            + (f", written by remat {by}" if isinstance(by, str) else "")
            + f"; expected {FORMAT!r}, version {FORMAT_VERSION} (this is remat "
            f"{versions()['remat']}). Upgrade remat, or make the plan again with remat.plan(...)."
        )
    try:
        return _decoded(data, kind)
    except Damage as damage:
        raise PlanError(f"{name} is damaged {damage}. {_AGAIN}") from None
    except RecursionError:
        raise PlanError(f"{name} is damaged: it is nested too deeply. {_AGAIN}") from None


def read_plan(text_or_path: str | Path, kind: type[PlanClass]) -> PlanClass:
    """Reads a plan of a class from a JSON document or from the path of one.

    Raises:
        PlanError: neither a JSON document nor a readable file; or see `plan_from_data`.
    """
    text, name = str(text_or_path), "this plan"
    if not text.lstrip().startswith("{"):
        try:
            text, name = Path(text_or_path).read_text(encoding="utf-8"), f"{text}: this plan"
        except (OSError, ValueError) as error:
            raise PlanError(
                f"cannot read a plan from {quoted(text, 200)}: {error}; expected the path of a file "
                "written by plan.to_json(path)"
            ) from error
    return plan_from_data(_parsed(text, name), kind, name)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        lines = text.splitlines() or [""]
        line = lines[min(error.lineno, len(lines)) - 1]
        shown = f" (line {error.lineno} is {quoted(line.strip())})" if len(lines) > 1 else ""
        ends = ": the file ends too early" if not text[error.pos :].strip() else ""
        raise PlanError(f"{name} is not JSON{ends}: {error}{shown}. {_AGAIN}") from error
    except (Damage, ValueError, RecursionError) as error:
        raise PlanError(f"{name} is damaged: {error}. {_AGAIN}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Damage(f"the key {twice!r} appears twice in one object (a merge?)")
    return found


def _no_constant(text: str) -> NoReturn:
    raise Damage(f"found {text}, which is not JSON")


def _decoded(data: Mapping[str, Any], kind: type[PlanClass]) -> PlanClass:
    made = as_dict_at(data.get("made", {}), ".made")
    folders = as_dict_at(made.get("folders", {}), ".made.folders")
    for name, folder in folders.items():
        if not isinstance(folder, str):
            raise Damage(f"found {quoted(folder)}, expected a string", f".made.folders.{name}")
    body = {key: item for key, item in data.items() if key not in ("format", "version", "made")}
    plan = codec_of(kind).decode(_spelled_out(body, folders) if folders else body)
    try:
        plan = _with_uncompared(plan, made)
    except Damage as damage:
        raise damage.inside(".made") from None
    _check_plan(plan)
    # Last: what is wrong says more than that something is.
    if "checksum" in made and made["checksum"] != checksum(data):
        raise Damage(
            "the content does not fit it: the file was edited, or merged from two plans (to use it as it "
            "is, delete this entry)",
            ".made.checksum",
        )
    return plan


def _with_uncompared(plan: PlanClass, data: Any) -> PlanClass:
    """Inverse of `_uncompared`; whatever is missing keeps its default."""
    hints = typing.get_type_hints(type(plan))
    given: dict[str, Any] = {}
    for item in fields(plan):
        if not item.compare and item.name in as_dict(data):
            try:
                given[item.name] = codec_of(hints[item.name]).decode(data[item.name])
            except Damage as damage:
                raise damage.inside(f".{item.name}") from None
    loops = as_list(data.get("loops", []))
    if loops and len(loops) != len(plan.loops):
        raise Damage(f"found {len(loops)} entries for {len(plan.loops)} loops", ".loops")
    if loops:
        restore = [functools.partial(_with_uncompared, entry.plan) for entry in plan.loops]
        try:
            plans = each(restore, loops)
        except Damage as damage:
            raise damage.inside(".loops") from None
        given["loops"] = tuple(
            replace(entry, plan=new) for entry, new in zip(plan.loops, plans, strict=True)
        )
    return replace(plan, **given)


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


# --- what belongs together -----------------------------------------------------------------------------


def _check_plan(plan: PlanRecord) -> None:
    """Raises Damage where ids do not exist or do not fit together."""
    _check_graph(plan.graph)
    _check_schedule(plan.graph, plan.schedule)
    _check_entries("saved", [entry.value for entry in plan.saved], len(plan.graph.values))
    _check_forms(plan)
    _check_entries("recomputed", [entry.op for entry in plan.recomputed], len(plan.graph.ops))
    paths: set[str] = set()
    for index, entry in enumerate(plan.loops):
        if entry.path in paths:
            raise Damage(f"a second plan for loop {entry.path!r}", f".loops[{index}].path")
        paths.add(entry.path)
        _check_chunk(entry, f".loops[{index}].chunk")
        try:
            _check_plan(entry.plan)
        except Damage as damage:
            raise damage.inside(f".loops[{index}].plan") from None


def _check_forms(plan: PlanRecord) -> None:
    forms = [(f".saved[{i}].form", entry.form) for i, entry in enumerate(plan.saved)]
    forms += [(f".graph.values[{v.id}].form", v.form) for v in plan.graph.values if v.form]
    for place, form in forms:
        try:
            get_encoding(form)
        except PolicyError:
            valid = sorted([*ENCODINGS, "sparse:<share>"])
            raise Damage(f"found {form!r}, expected one of {valid}", place) from None


def _check_chunk(entry: LoopRecord, place: str) -> None:
    """A chunk is a loop and what is left over of it, with as many iterations as it says."""
    if entry.chunk < 1:
        raise Damage(f"found {entry.chunk}, expected at least 1", place)
    if entry.chunk == 1:
        return
    inside = [loop for loop in entry.plan.loops if whole_of(loop.path) == "scan0"]
    trips = sum(loop.length * loop.chunk for loop in inside)
    if trips != entry.chunk:
        raise Damage(f"found {entry.chunk}, but the loop inside has {trips} iterations", place)


def _check_ids(ids: Iterable[int], count: int, what: str, *place: str) -> None:
    for index, number in enumerate(ids):
        if not 0 <= number < count:
            raise Damage(f"{number} is no {what}; there are {count}", *place, f"[{index}]")


def _check_entries(name: str, ids: Sequence[int], count: int) -> None:
    what, key = ("value", "value") if name == "saved" else ("operator", "op")
    seen: set[int] = set()
    for index, number in enumerate(ids):
        place = f".{name}[{index}].{key}"
        if not 0 <= number < count:
            raise Damage(f"{number} is no {what}; there are {count}", place)
        if number in seen:
            raise Damage(f"{what} {number} is listed twice", place)
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
                raise Damage(f"{value.producer} is no operator; there are {len(graph.ops)}", place)
            if value.id not in graph.ops[value.producer].outputs:
                raise Damage(f"operator {value.producer} does not compute this value", place)
    try:
        graph.check()
    except ValueError as error:
        raise Damage(str(error), ".graph") from None


def _check_schedule(graph: Graph, schedule: Schedule) -> None:
    turns = 0
    for index, step in enumerate(schedule.steps):
        place = f".schedule.steps[{index}]"
        runs = step.action == "compute"
        what, count = ("operator", len(graph.ops)) if runs else ("value", len(graph.values))
        least = 0 if runs else -1  # `turn` and `barrier` have no target
        if not least <= step.target < count:
            raise Damage(f"{step.target} is no {what}; there are {count}", place)
        _check_ids(step.values, len(graph.values), "value", place, "[2]")
        turns += step.action == "turn"
    if turns != 1:
        raise Damage(f"found {turns} steps 'turn', expected 1", ".schedule.steps")
