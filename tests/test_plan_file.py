"""Plan files: exact, the same bytes for the same plan, readable line by line, and never half read."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import errno
import hashlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_table import PolicyRow, rows
from random_graphs import chain, graphs, laws, seeded_graph

from remat import __version__
from remat.core.errors import PlanError
from remat.core.graph import Graph, Op, Value
from remat.planning.make import make_plan, with_loops
from remat.plans.codec import codec_of
from remat.plans.plan import LoopPlan, Plan
from remat.plans.record import Certificate
from remat.plans.steps import Schedule, Step
from remat.plans.writing import FORMAT_VERSION, dump_plan, write_plan
from remat.policies import Full, MinCut, SaveAll


@pytest.fixture
def plan() -> Plan:
    """A plan with something in every list: it repeats as `full` does and lists what `save_all` keeps."""
    saved = make_plan(chain(3), SaveAll()).saved
    return dataclasses.replace(make_plan(chain(3), Full()), saved=saved)


@pytest.fixture
def nested(plan: Plan) -> Plan:
    """Loops in a loop, every plan with other seconds."""
    inner = dataclasses.replace(plan, solve_seconds=0.25)
    middle = dataclasses.replace(plan, loops=(LoopPlan("scan0", 3, inner),), solve_seconds=0.5)
    loops = (LoopPlan("scan0", 5, middle), LoopPlan("scan1", 2, inner))
    return dataclasses.replace(plan, loops=loops, solve_seconds=4.0)


def body_of(text: str) -> str:
    """What a document says about the plan: everything but its last record."""
    return text.rpartition('\n"made":')[0]


# --- round trips ---------------------------------------------------------------------------------------


@rows()
@given(graph=graphs())
@laws(12)
def test_reading_is_the_inverse_of_writing(row: PolicyRow, graph: Graph) -> None:
    plan = make_plan(graph, row.factory(), barriers=False)
    outer = with_loops(plan, (LoopPlan("scan0", 3, make_plan(graph, Full(), barriers=False)),))
    for made in (plan, outer):
        text = made.to_json()
        again = Plan.from_json(text)
        assert again == made and again.digest() == made.digest()
        assert again.solve_seconds == made.solve_seconds
        assert again.to_json() == text
        assert Plan.from_dict(made.to_dict()) == made
        assert json.loads(json.dumps(made.to_dict())) == made.to_dict()


def test_seconds_of_loops_are_read_back(nested: Plan) -> None:
    again = Plan.from_json(nested.to_json())
    assert again == nested
    assert again.solve_seconds == 4.0
    assert [entry.plan.solve_seconds for entry in again.loops] == [0.5, 0.25]
    assert again.loops[0].plan.loops[0].plan.solve_seconds == 0.25


def _changed(value: Any, annotation: str) -> Any:
    """Another value of a field's type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return ("named", 'a "quoted" ü\n')
    if isinstance(value, str):
        return "scan7"
    if isinstance(value, int) or value is None:
        return "scan7" if "str" in annotation else 7
    raise AssertionError(f"add a sample for {annotation}")


_SAMPLES = {"range": (-1, 6), "form": "float16", "contracts": ((1,), (0,), (), ()), "axes": (0, 2)}


@pytest.mark.parametrize("kind", [Value, Op])
def test_every_field_with_a_default_survives(kind: type, plan: Plan) -> None:
    """Also those that no graph of the generator sets, and those added later."""
    name = "values" if kind is Value else "ops"
    records = getattr(plan.graph, name)
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            continue
        value = _SAMPLES.get(field.name, _changed(getattr(records[0], field.name), str(field.type)))
        assert value != field.default
        changed = dataclasses.replace(records[0], **{field.name: value})
        graph = dataclasses.replace(plan.graph, **{name: (changed, *records[1:])})
        again = Plan.from_json(dataclasses.replace(plan, graph=graph).to_json())
        assert getattr(again.graph, name)[0] == changed


@dataclasses.dataclass(frozen=True)
class _Later:
    """Annotations that a field of a plan may have one day."""

    pair: tuple[str, float]
    limits: Mapping[str, float | int]
    share: float | int | str | None = None


@pytest.mark.parametrize("share", [3, 0.5, "half", None])
def test_fields_of_other_types_can_be_added(share: Any) -> None:
    codec = codec_of(_Later)
    item = _Later(("a", 1.0), {"x": 2, "a": 0.25}, share)
    data = codec.encode(item)
    assert list(data) == ["pair", "limits", "share"] and list(data["limits"]) == ["a", "x"]
    assert json.loads(json.dumps(data)) == data
    assert codec.decode(data) == item
    assert type(codec.decode(data).limits["x"]) is int
    del data["share"]
    assert codec.decode(data) == dataclasses.replace(item, share=None)
    with pytest.raises(TypeError, match=r"cannot write a field annotated .*bytes"):
        codec_of(bytes)


def test_left_out_fields_have_the_defaults_that_files_rely_on() -> None:
    """Files leave these out: another default here needs another FORMAT_VERSION."""
    assert FORMAT_VERSION == 2
    relied_on = {
        Value: {"tags": (), "differentiable": True, "primal": None, "savable": True},
        Op: {
            "heavy": False,
            "random": False,
            "effectful": False,
            "recomputable": True,
            "reason": "",
            "kind": "POINTWISE",
            "scope": "",
            "source": "",
            "batched": False,
            "loop": None,
        },
        Step: {"target": -1, "values": ()},
    }
    for kind, defaults in relied_on.items():
        found = {f.name: f.default for f in dataclasses.fields(kind)}
        assert {name: found[name] for name in defaults} == defaults


def test_numbers_and_texts_of_other_types_are_written_as_plain_ones(plan: Plan) -> None:
    class Kind(enum.StrEnum):
        MINE = "mine"

    certificate = Certificate("flow", np.int64(2**40), np.uint8(3))  # type: ignore[arg-type]
    odd = dataclasses.replace(
        plan,
        certificate=certificate,
        policy_name=Kind.MINE,
        recompute_seconds=np.float64(0.1),  # type: ignore[arg-type]
    )
    again = Plan.from_json(odd.to_json())
    assert again.certificate == Certificate("flow", 2**40, 3)
    assert again.certificate is not None and type(again.certificate.value) is int
    assert type(again.policy_name) is str and again.policy_name == "mine"
    assert again.recompute_seconds == 0.1


@pytest.mark.parametrize("seconds", [0.1 + 0.2, 5e-324, 1e300, math.inf, -math.inf, 0])
def test_floats_are_exact_and_valid_json(plan: Plan, seconds: float) -> None:
    text = dataclasses.replace(plan, recompute_seconds=seconds).to_json()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)
    again = Plan.from_json(text)
    assert again.recompute_seconds == seconds and isinstance(again.recompute_seconds, float)
    assert again.to_json() == text


def test_a_plan_with_something_else_in_a_field_cannot_be_written(plan: Plan) -> None:
    values = (dataclasses.replace(plan.graph.values[0], nbytes=1.5), *plan.graph.values[1:])  # type: ignore[arg-type]
    broken = dataclasses.replace(plan, graph=dataclasses.replace(plan.graph, values=values))
    with pytest.raises(PlanError, match=r"graph\.values\[0\]\.nbytes: found 1\.5.*an integer"):
        broken.to_json()
    with pytest.raises(PlanError, match=r"graph: found None, expected a Graph"):
        dataclasses.replace(plan, graph=None).to_json()  # type: ignore[arg-type]


# --- the same bytes --------------------------------------------------------------------------------------


def test_only_the_last_line_differs_between_runs(nested: Plan) -> None:
    loop = nested.loops[0]
    slower = dataclasses.replace(loop.plan, solve_seconds=9.0)
    loops = (dataclasses.replace(loop, plan=slower), *nested.loops[1:])
    other = dataclasses.replace(nested, solve_seconds=8.0, loops=loops)
    assert other == nested
    first, second = nested.to_json().splitlines(), dump_plan(other, date="today").splitlines()
    assert first[-2] != second[-2] and first[-2].startswith('"made":{')
    assert first[:-2] == second[:-2] and first[-1] == second[-1] == "}"
    assert "solve_seconds" not in "\n".join(first[:-2])


def test_the_last_line_says_who_wrote_the_file_and_when(plan: Plan, tmp_path: Path) -> None:
    import jax

    made = json.loads(plan.to_json(tmp_path / "plan.json"))["made"]
    assert (made["remat"], made["jax"]) == (__version__, jax.__version__)
    assert made["solve_seconds"] == plan.solve_seconds
    assert made["date"].endswith("+00:00")
    assert "date" not in json.loads(plan.to_json())["made"]


def test_another_process_writes_the_same_bytes() -> None:
    code = (
        "import hashlib; from random_graphs import seeded_graph; from remat.planning.make import make_plan;"
        "from remat.policies import MinCut; "
        "text = make_plan(seeded_graph(5), MinCut(), barriers=False).to_json(); "
        "print(hashlib.sha256(text.rpartition(chr(10) + chr(34) + 'made')[0].encode()).hexdigest())"
    )
    here = Path(__file__).resolve().parent
    found = set()
    for seed in ("1", "2"):
        path = {"PYTHONPATH": f"{here.parent}:{here}", "PYTHONHASHSEED": seed}
        env = {**path, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    text = make_plan(seeded_graph(5), MinCut(), barriers=False).to_json()
    assert found == {hashlib.sha256(body_of(text).encode()).hexdigest()}


def test_a_file_is_rewritten_only_if_the_plan_changed(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = plan.to_json(file)
    assert file.read_bytes() == text.encode()
    slower = dataclasses.replace(plan, solve_seconds=plan.solve_seconds + 1)
    assert slower.to_json(file) == text == file.read_text()
    other = dataclasses.replace(plan, notes=("changed",))
    assert write_plan(other, file) == file.read_text() != text
    assert Plan.from_json(file) == other
    file.write_bytes(b"\xff\xfe not text")
    assert plan.to_json(file) == file.read_text()


def test_a_plan_is_never_half_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    old = plan.to_json(path)

    class Full:
        """A disk with room for half of it."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def read(self) -> Any:
            return self.file.read()

        def write(self, text: str) -> None:
            self.file.write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = Path.open
    changed = dataclasses.replace(plan, notes=("another",))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *args, **more: Full(opened(self, *args, **more)))
        with pytest.raises(OSError, match="No space"):
            changed.to_json(path)
    assert path.read_text() == old and list(tmp_path.iterdir()) == [path]
    assert Plan.from_json(path) == plan
    assert changed.to_json(path) == path.read_text() != old


def _moved(plan: Plan, code: str, packages: str) -> Plan:
    """A plan of operators from two folders."""
    ops = tuple(
        dataclasses.replace(op, source=f"{(code, packages)[op.id % 2]}/net{op.id % 3}.py:{op.id}")
        for op in plan.graph.ops
    )
    inner = dataclasses.replace(
        plan,
        graph=dataclasses.replace(plan.graph, ops=ops),
        opaque=(f"callback, from {code}/net.py:3",),
    )
    return dataclasses.replace(inner, loops=(LoopPlan("scan0", 2, inner),))


@pytest.mark.parametrize(
    "code, packages",
    [
        ("/home/me/project", "/home/me/project/.venv/lib/python3.11/site-packages/flax"),
        ('/srv/\u00fc "q"/a', "/usr/lib/python3/dist-packages/flax"),
    ],
)
def test_only_the_last_line_knows_where_the_code_lies(plan: Plan, code: str, packages: str) -> None:
    here, there = (
        _moved(plan, *folders) for folders in ((code, packages), ("/x/y", "/z/site-packages/flax"))
    )
    text, other = here.to_json(), there.to_json()
    assert here != there and body_of(text) == body_of(other) and text != other
    assert Plan.from_json(text) == here and Plan.from_json(other) == there
    assert '"source":"<code>/net0.py:0"' in text
    assert '"source":"<packages 1>/flax/net1.py:1"' in text
    assert '"callback, from <code>/net.py:3"' in text
    folders = json.loads(text)["made"]["folders"]
    expected = {"<code>/": f"{code}/", "<packages 1>/": packages.removesuffix("flax")}
    assert folders == expected and "checksum" in text
    assert json.loads(other)["made"]["checksum"] == json.loads(text)["made"]["checksum"]


def test_a_file_from_another_folder_is_rewritten(plan: Plan, tmp_path: Path) -> None:
    here, there = (_moved(plan, f"/{name}/code", "/site-packages/x") for name in "ab")
    here.to_json(tmp_path / "plan.json")
    there.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == there


@pytest.mark.parametrize("note", ["see <code>/net.py", "<packages 1>/flax"])
def test_a_plan_that_spells_a_short_name_itself_is_written_in_full(plan: Plan, note: str) -> None:
    odd = dataclasses.replace(_moved(plan, "/a/b", "/a/b/site-packages/x"), notes=(note,))
    assert Plan.from_json(odd.to_json()) == odd
    assert "folders" not in json.loads(odd.to_json())["made"]


@pytest.mark.parametrize("code", ["/", "", "net", "<string>"])
def test_code_in_no_folder_is_written_as_it_is(plan: Plan, code: str) -> None:
    odd = _moved(plan, code, code)
    assert Plan.from_json(odd.to_json()) == odd
    assert "<code>" not in odd.to_json()


# --- lines -----------------------------------------------------------------------------------------------


def test_every_record_is_one_line(nested: Plan) -> None:
    lines = [line.strip().rstrip(",") for line in nested.to_json().splitlines()]
    middle = nested.loops[0].plan
    plans = (nested, middle, middle.loops[0].plan, nested.loops[1].plan)
    records = [json.loads(line) for line in lines if line[:1] in "[{" and line not in ("[", "{")]
    keys = [next(iter(record)) for record in records if isinstance(record, dict)]
    steps = [record for record in records if isinstance(record, list)]
    assert len(steps) == sum(len(plan.schedule.steps) for plan in plans)
    assert keys.count("value") == sum(len(plan.saved) for plan in plans) > 0
    assert keys.count("op") == sum(len(plan.recomputed) for plan in plans) > 0
    assert keys.count("id") == sum(len(p.graph.values) + len(p.graph.ops) for p in plans)
    assert '["turn"]' in lines and '["compute",0]' in lines


def test_a_small_change_is_a_small_diff(plan: Plan) -> None:
    steps = plan.schedule.steps
    other = dataclasses.replace(
        plan, schedule=Schedule((*steps, Step("barrier", values=(1, 2)))), notes=("a", "b")
    )
    before, after = (body_of(made.to_json()).splitlines() for made in (plan, other))
    changed = [
        x for x in difflib.unified_diff(before, after, n=0) if x[0] in "+-" and x[1:3] != x[0] * 2
    ]
    assert changed == [
        '-"notes":[],',
        '+"notes":[',
        '+ "a",',
        '+ "b"',
        "+],",
        f"-  {json.dumps([steps[-1].action, steps[-1].target], separators=(',', ':'))}",
        f"+  {json.dumps([steps[-1].action, steps[-1].target], separators=(',', ':'))},",
        '+  ["barrier",-1,[1,2]]',
    ]


def test_the_header_says_what_a_reader_needs(plan: Plan) -> None:
    head = json.loads("{" + plan.to_json().partition('"notes"')[0].strip("{\n, ") + "}")
    assert list(head)[:2] == ["format", "version"] and list(head)[2:] == sorted(list(head)[2:])
    needed = {"policy_name", "options", "status", "certificate", "device"}
    needed |= {"saved_bytes", "peak_bytes", "baseline_peak_bytes"}
    assert needed <= set(head)


def test_another_layout_is_the_same_plan(nested: Plan) -> None:
    data = json.loads(nested.to_json())
    for text in (json.dumps(data, indent=4), json.dumps(data, sort_keys=True)):
        assert Plan.from_json(text) == nested
    assert Plan.from_json(nested.to_json().replace("\n", "\r\n")) == nested


# --- older and newer versions ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 3, 99, 0, -1, "2", True, 2.0, None, [2]], ids=str)
def test_a_document_of_another_version_is_refused(plan: Plan, version: Any) -> None:
    data = {**plan.to_dict(), "version": version, "made": {"remat": "7.1"}}
    expected = r"written by remat 7\.1; expected 'remat\.plan', version 2 .*Upgrade remat"
    with pytest.raises(PlanError, match=expected):
        Plan.from_json(json.dumps(data))


def test_fields_that_have_a_default_may_be_missing(plan: Plan) -> None:
    """A file of an older remat of the same version has fewer fields."""
    data = plan.to_dict()
    optional = [f.name for f in dataclasses.fields(Plan) if f.default is not dataclasses.MISSING]
    for name in optional:
        data.pop(name, None)
    del data["made"], data["graph"]["multiplicity"], data["graph"]["carried"]
    read = Plan.from_dict(data)
    assert {"loops", "notes", "certificate"} <= set(optional)
    for name in optional:
        expected = next(f.default for f in dataclasses.fields(Plan) if f.name == name)
        assert getattr(read, name) == expected
    assert read.graph == plan.graph


# --- damage ----------------------------------------------------------------------------------------------


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return edit


def _drop(*path: Any) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return edit


DAMAGE: list[tuple[Callable[[Any], None], str]] = [
    (_drop("saved"), r"at saved: missing"),
    (_drop("graph", "ops", 1, "name"), r"at graph\.ops\[1\]\.name: missing"),
    (_drop("graph", "values", 2), r"at graph"),
    (_drop("graph", "ops", 0), r"at graph"),
    (
        _set("graph", "ops", 1, "inputs", to=["x"]),
        r"ops\[1\]\.inputs\[0\]: found 'x', expected an integer",
    ),
    (_set("graph", "ops", 1, "inputs", to=3), r"ops\[1\]\.inputs: found 3, expected a list"),
    (
        _set("graph", "ops", 1, "inputs", to=[99]),
        r"operator 1 \(tanh\) reads undefined values \[99\]",
    ),
    (
        _set("graph", "ops", 1, "phase", to="sideways"),
        r"phase: found 'sideways'.*one of \['forward'",
    ),
    (_set("graph", "ops", 1, "fusible", to=1), r"fusible: found 1, expected true or false"),
    (_set("graph", "ops", 1, "flops", to=True), r"flops: found True, expected an integer"),
    (_set("graph", "ops", 1, "speed", to=1), r"ops\[1\]\.speed: unknown; known here are \['id'"),
    (_set("graph", "ops", 1, "loop", to=4), r"loop: found 4, expected a string or null"),
    (_set("graph", "ops", 1, to=None), r"ops\[1\]: found None, expected an object"),
    (_set("graph", "ops", 1, "id", to=7), r"operator 1 has id 7"),
    (
        _set("graph", "values", 1, "producer", to=-1),
        r"values\[1\]\.producer: -1 is no operator; there are 6",
    ),
    (_set("graph", "values", 1, "producer", to=3), r"operator 3 does not compute this value"),
    (
        _set("graph", "values", 1, "shape", 0, to=1.5),
        r"shape\[0\]: found 1\.5, expected an integer",
    ),
    (_set("graph", "inputs", to=[0, 70]), r"graph\.inputs\[1\]: 70 is no value; there are 8"),
    (_set("graph", "carried", to=[-2]), r"graph\.carried\[0\]: -2 is no value"),
    (_set("graph", "gradients", to=[8]), r"graph\.gradients\[0\]: 8 is no value"),
    (_set("graph", to=[]), r"at graph: found \[\], expected an object"),
    (_set("schedule", "steps", 0, to=["compute", 6]), r"steps\[0\]: 6 is no operator; there are 6"),
    (_set("schedule", "steps", 0, to=["compute"]), r"steps\[0\]: -1 is no operator"),
    (_set("schedule", "steps", 0, to=["free", 8]), r"steps\[0\]: 8 is no value; there are 8"),
    (
        _set("schedule", "steps", 0, to=["jump", 0]),
        r"steps\[0\]\[0\]: found 'jump', expected one of",
    ),
    (_set("schedule", "steps", 0, to=[]), r"steps\[0\]: found \[\], expected 1 to 3 items"),
    (_set("schedule", "steps", 0, to=["barrier", -1, [9]]), r"steps\[0\]\[2\]\[0\]: 9 is no value"),
    (_set("schedule", "steps", 0, to=["turn"]), r"found 2 steps 'turn', expected 1"),
    (_set("schedule", "steps", to=[]), r"found 0 steps 'turn'"),
    (_set("saved", 0, "value", to=12), r"saved\[0\]\.value: 12 is no value"),
    (_set("saved", 0, "form", to="zip"), r"saved\[0\]\.form: found 'zip'.*'bits'.*'raw'"),
    (_set("recomputed", 0, "op", to=-1), r"recomputed\[0\]\.op: -1 is no operator"),
    (_set("recomputed", 0, "times", to="1"), r"times: found '1', expected an integer"),
    (_set("certificate", to={"kind": "flow"}), r"certificate\.bound: missing"),
    (_set("certificate", to=3), r"certificate: found 3, expected an object or null"),
    (_set("recompute_seconds", to="fast"), r"recompute_seconds: found 'fast', expected a number"),
    (_set("recompute_seconds", to=10**400), r"recompute_seconds: .*fits in 64 bits"),
    (_set("status", to="great"), r"status: found 'great'"),
    (_set("notes", to=[3]), r"notes\[0\]: found 3, expected a string"),
    (_set("made", to=3), r"made: found 3, expected an object"),
    (_set("made", "folders", to=[]), r"made\.folders: found \[\], expected an object"),
    (
        _set("made", "folders", to={"<code>/": 3}),
        r"made\.folders\.<code>/: found 3, expected a string",
    ),
    (_set("made", "solve_seconds", to=[]), r"made\.solve_seconds: found \[\], expected a number"),
    (_set("made", "loops", to=[{}]), r"made\.loops: found 1 entries for 2 loops"),
    (_set("made", "loops", 0, to=1), r"made\.loops\[0\]: found 1, expected an object"),
    (_set("loops", 1, "path", to="scan0"), r"loops\[1\]\.path: a second plan for loop 'scan0'"),
    (_set("loops", 0, "length", to=None), r"loops\[0\]\.length: found None"),
    (_drop("loops", 0, "plan", "saved"), r"at loops\[0\]\.plan\.saved: missing"),
    (
        _set("loops", 0, "plan", "loops", 0, "plan", "graph", "inputs", to=[44]),
        r"at loops\[0\]\.plan\.loops\[0\]\.plan\.graph\.inputs\[0\]: 44 is no value",
    ),
]


@pytest.mark.parametrize("number", range(len(DAMAGE)), ids=[expected for _, expected in DAMAGE])
def test_damage_is_an_error_that_names_the_place(number: int, nested: Plan, tmp_path: Path) -> None:
    edit, expected = DAMAGE[number]
    data = json.loads(nested.to_json())
    edit(data)
    with pytest.raises(PlanError, match=expected):
        Plan.from_dict(data)
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=rf"broken\.json: this plan is damaged .*{expected}.*again"):
        Plan.from_json(file)


def _nodes(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with every one of its keys."""
    keys = data.keys() if isinstance(data, dict) else range(len(data))
    for key in list(keys):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from _nodes(data[key])


JUNK = (None, True, -1, 7, 10**30, 1.5, float("inf"), "", "junk", [], {}, [[]], [None], {"a": 1})


@given(seed=st.integers(0, 2**32 - 1))
@laws(200)
def test_damage_anywhere_is_never_another_error(seed: int) -> None:
    rng = random.Random(seed)
    plan = make_plan(seeded_graph(seed % 50), MinCut(), barriers=False)
    data = with_loops(plan, (LoopPlan("scan0", 2, plan),)).to_dict()
    for _ in range(rng.choice((1, 1, 3))):
        container, key = rng.choice(list(_nodes(data)))
        if rng.random() < 0.3:
            del container[key]
        else:
            container[key] = rng.choice(JUNK)
    try:
        read = Plan.from_dict(data)
    except PlanError as error:
        assert len(str(error)) > 40
    else:  # something harmless, for instance other flops
        assert Plan.from_json(read.to_json()) == read


def test_a_truncated_file_is_refused_wherever_it_ends(nested: Plan) -> None:
    text = nested.to_json().rstrip()
    for end in {*range(1, len(text), 97), *range(len(text) - 40, len(text))}:
        with pytest.raises(PlanError):
            Plan.from_json(text[:end])
    with pytest.raises(PlanError, match=r"is not JSON: the file ends too early: .*line \d+ column"):
        Plan.from_json(text[: text.index('"schedule"')])


def test_a_conflict_of_a_merge_is_named(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    lines = plan.to_json(file).splitlines()
    lines.insert(5, "<<<<<<< HEAD")
    file.write_text("\n".join(lines))
    expected = r"plan\.json: this plan is not JSON.*line 6 is '<<<<<<< HEAD'"
    with pytest.raises(PlanError, match=expected):
        Plan.from_json(file)


def test_an_edited_file_is_refused_unless_told_otherwise(plan: Plan) -> None:
    """Two plans merged line by line may fit together and still be neither."""
    text = plan.to_json().replace('"notes":[]', '"notes":["mine"]')
    with pytest.raises(PlanError, match=r"made\.checksum.*edited, or merged.*delete this entry"):
        Plan.from_json(text)
    data = json.loads(text)
    del data["made"]["checksum"]
    assert Plan.from_json(json.dumps(data)) == dataclasses.replace(plan, notes=("mine",))


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ('"device":', '"status":', r"the key 'status' appears twice"),
        ('"version":2', '"version":NaN', r"found NaN, which is not JSON"),
        ('"version":2', '"version":' + "9" * 5000, r"damaged: .*digits"),
        ('"notes":[]', '"notes":' + "[" * 100_000, r"damaged: .*recursion"),
        ('"format"', '\ufeff"format"', r"not JSON"),
    ],
    ids=["twice", "nan", "digits", "deep", "bom"],
)
def test_text_that_json_alone_would_let_pass(plan: Plan, old: str, new: str, expected: str) -> None:
    text = plan.to_json()
    assert old in text
    with pytest.raises(PlanError, match=expected):
        Plan.from_json(text.replace(old, new))


def test_loops_nested_too_deeply_are_refused(plan: Plan) -> None:
    data = plan.to_dict()
    for _ in range(sys.getrecursionlimit()):
        data = {**plan.to_dict(), "loops": [{"path": "scan0", "length": 1, "plan": data}]}
        for key in ("format", "version", "made"):
            data["loops"][0]["plan"].pop(key, None)
    with pytest.raises(PlanError, match="nested too deeply"):
        Plan.from_dict(data)


def test_a_plan_of_every_policy_stays_small() -> None:
    """Bytes per operator, steps and kept values included; paths and scopes of a real program add to it."""
    plan = make_plan(chain(500), SaveAll())
    assert len(plan.to_json()) < 420 * len(plan.graph.ops)
