"""Damaged and hostile logs are errors with their line, never a hang; what can be read can be replayed."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dtr_programs import PUBLISHED_STATISTICS
from remat.dtr import LogError, Statistics, load_log, read_log, simulate, statistics
from remat.dtr import log as log_module
from remat.dtr.export import log_lines
from tests.test_dtr import Writer, chain, needed_log, random_log, written

VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 10**30, "", "x0", "-1", "0", "1e3", "\ud800",
    "9" * 50, [], ["x0"], ["x0", "x0"], [[]], [0], [-1], {}, {"NAME": "x0"},
]  # fmt: skip
FIELDS = (
    "INSTRUCTION",
    "NAME",
    "ARGS",
    "RESULT",
    "TIME",
    "MEMORY",
    "ALIAS",
    "MUTATE",
    "DST",
    "SRC",
)


def damaged(entries: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Does up to three things to a log: a line less, twice, elsewhere; a field less, more, of another value."""
    entries = [dict(entry) for entry in entries]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(entries)) if entries else 0
        kind = rng.randrange(6)
        if not entries:
            break
        if kind == 0:
            del entries[at]
        elif kind == 1:
            entries.insert(rng.randrange(len(entries) + 1), dict(entries[at]))
        elif kind == 2:
            other = rng.randrange(len(entries))
            entries[at], entries[other] = entries[other], entries[at]
        elif kind == 3:
            entries[at].pop(rng.choice(list(entries[at])), None)
            entries[at].setdefault("INSTRUCTION", rng.choice(["CALL", "MUTATE", "COPY"]))
        elif kind == 4:
            entries[at][rng.choice(FIELDS)] = rng.choice(VALUES)
        else:
            key = rng.choice(list(entries[at]))
            other = rng.choice(entries)
            entries[at][key] = rng.choice([*VALUES, *other.values()])
    return entries


@given(
    seed=st.integers(0, 2**32), length=st.integers(1, 25), search=st.sampled_from(["index", "scan"])
)
def test_damaged_logs_are_read_or_rejected(seed: int, length: int, search: Any) -> None:
    rng = random.Random(seed)
    entries = [json.loads(line) for line in log_lines(random_log(rng, length))]
    lines = [json.dumps(entry) for entry in damaged(entries, rng)]
    try:
        log = read_log(lines)
    except LogError as error:
        assert str(error).startswith("log, line ")
        return
    assert read_log(log_lines(log)) == log
    for share in (None, 0.6):
        run = simulate(log, share, search=search, thrash=3, trace=False)
        assert run.status in ("ok", "out_of_memory", "thrashing")


@given(seed=st.integers(0, 2**32), length=st.integers(1, 10))
def test_damaged_characters(seed: int, length: int) -> None:
    rng = random.Random(seed)
    text = "\n".join(log_lines(random_log(rng, length)))
    for _ in range(3):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(['"', "{", "[", "\n", "0", "\x00", "é", ""]) + text[at + 1 :]
    try:
        read_log(text.split("\n"))
    except LogError as error:
        assert str(error).startswith("log, line ")


def hostile() -> Iterator[Any]:
    def case(text: str, *more: dict[str, Any]) -> Any:
        out = written()
        out.entries += more
        return pytest.param(out.lines, text, id=text)

    def call(args: Any, result: Any, time: Any = "1") -> dict[str, Any]:
        return {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": args, "RESULT": result, "TIME": time}

    def alias(of: Any) -> dict[str, Any]:
        return {"INSTRUCTION": "ALIAS", "NAME": "y", "ALIAS": of}

    memory = {"INSTRUCTION": "MEMORY", "NAME": "y", "MEMORY": "8"}
    yield case("'y' is not there", call(["y"], ["y"]))  # a cycle
    yield case("'y' is not there", {"INSTRUCTION": "COPY", "DST": "y", "SRC": "y"})
    yield case("'x' is there already", {"INSTRUCTION": "CONSTANT", "NAME": "x"})
    yield case("none of the operator's 1 arguments", call(["x"], ["y"]), memory, alias("7"))
    yield case("none of the operator's 1 arguments", call(["x"], ["y"]), memory, alias("w"))
    yield case("'z' is not there", call(["x"], ["y"]), memory, alias("z"))
    yield case("expected a string", call(["x"], ["y"]), memory, alias(-2))
    yield case("expected a string", call(["x"], ["y"]), memory, alias(None))
    yield case("'y' is not there", call(["x"], ["y"]), memory, alias("y"))
    yield case("cannot be an alias", {"INSTRUCTION": "CONSTANT", "NAME": "y"}, memory, alias("0"))
    yield case("expected an integer", call(["x"], ["y"], float("nan")))
    yield case("expected an integer", call(["x"], ["y"], 10**25))
    yield case("expected an integer", call(["x"], ["y"], True))
    yield case("expected an integer", call(["x"], ["y"], "²"))
    yield case("expected an integer", call(["x"], ["y"]), {**memory, "MEMORY": "-8"})
    yield case("expected a list of names", call("x", ["y"]))
    yield case("expected a string", call([["x"]], ["y"]))
    yield case("expected a list of names", call(["x"], {"y": 1}))
    changed = {"INSTRUCTION": "MUTATE", "NAME": "f_", "ARGS": ["x", "x"], "TIME": "1"}
    yield case("changes a tensor twice", {**changed, "MUTATE": [0, 1]})
    yield case("expected different places", {**changed, "MUTATE": [10**30]})
    yield case("expected different places", {**changed, "MUTATE": "0"})
    yield case(
        "expected a list of names", {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "OUTPUTS", "NAMES": 1}
    )


@pytest.mark.parametrize(("lines", "text"), list(hostile()))
def test_hostile_lines(lines: list[str], text: str) -> None:
    with pytest.raises(LogError, match=rf"log, line {len(lines)}: .*{text}"):
        read_log(lines)


def test_a_name_twice_in_one_object() -> None:
    line = '{"INSTRUCTION": "COPY", "SRC": "w", "DST": "a", "DST": "b"}'
    with pytest.raises(LogError, match="line 7: not JSON: a name is there twice"):
        read_log([*written().lines, line])


def test_errors_are_short_whatever_the_line_has() -> None:
    deep = "[" * 900 + "]" * 900
    for value in (
        '"' + "x" * 500_000 + '"',
        deep,
        "9" * 4000,
        "{" + '"a": ' * 0 + "}",
        "9" * 10_000,
    ):
        with pytest.raises(LogError) as caught:
            read_log([f'{{"INSTRUCTION": "RELEASE", "NAME": {value}}}'])
        assert str(caught.value).startswith("log, line 1: ") and len(str(caught.value)) < 400


def test_long_lines_and_long_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = tmp_path / "bomb.log.gz"
    packer = zlib.compressobj(9, wbits=31)
    with bomb.open("wb") as file:  # megabytes without an end of line
        for _ in range(64):
            file.write(packer.compress(b" " * (1 << 20)))
        file.write(packer.flush())
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(LogError, match=r"bomb.log.gz, line 1: longer than 1,048,576 characters"):
        load_log(bomb)
    monkeypatch.setattr(log_module, "_MOST_LINES", 1000)
    bomb.write_bytes(gzip.compress(b"\n" * 10_000_000))
    with pytest.raises(LogError, match=r"line 1001: the log goes on; expected at most 1,000 lines"):
        load_log(bomb)


@pytest.mark.parametrize("at", [0, 10, 60, -9, -4])
def test_damaged_archives(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a.log.gz"
    text = "\n".join(log_lines(random_log(random.Random(0), 400))).encode()
    packed = bytearray(gzip.compress(text, mtime=0))
    packed[at] ^= 0xFF
    path.write_bytes(packed)
    with pytest.raises(LogError, match=r"a.log.gz, line \d+: not a text of JSON lines"):
        load_log(path)


def test_operators_with_many_results_and_arguments_take_no_quadratic_time() -> None:
    """Many results that are views of as many arguments: a scan of a list for each would take minutes."""
    count = 20_000
    out = Writer()
    out.add("CALL", NAME="f", ARGS=[], RESULT=[f"a{i}" for i in range(count)], TIME="1")
    for i in range(count):
        out.add("MEMORY", NAME=f"a{i}", MEMORY="1")
        out.add("ALIAS", NAME=f"a{i}", ALIAS="-1")
    out.add(
        "CALL",
        NAME="f",
        ARGS=[f"a{i}" for i in range(count)],
        RESULT=[f"b{i}" for i in range(count)],
        TIME="1",
    )
    for i in range(count):
        out.add("MEMORY", NAME=f"b{i}", MEMORY="1")
        out.add("ALIAS", NAME=f"b{i}", ALIAS=f"a{i}")
    assert out.log().num_tensors == 2 * count


def test_chains_of_copies_views_and_mutations() -> None:
    out = written()
    for i in range(800):
        out.add("COPY", DST=f"c{i + 1}", SRC=f"c{i}" if i else "x")
        out.add("RELEASE", NAME=f"c{i}" if i else "x")
    last = "c800"
    for i in range(800):
        out.call([f"v{i + 1}"], [f"v{i}" if i else last], 1, **{f"v{i + 1}": "0"})
    for _ in range(800):
        out.add("MUTATE", NAME="f_", ARGS=["w", "v800"], MUTATE=[0], TIME="1")
    log = out.log()
    run = simulate(log, 17, heuristic="lru", thrash=3)
    assert run.status in ("ok", "out_of_memory", "thrashing")
    assert simulate(log, eviction="ignore").status == "ok"


@pytest.mark.slow
def test_a_chain_of_a_hundred_thousand() -> None:
    log = chain(50_000)
    assert len(list(log.calls)) == 100_000
    run = simulate(log, 0.5, trace=False)
    assert run.status == "ok" and run.rematerializations < 50_000
    assert run.storage_accesses < 10 * run.evictions


@pytest.mark.parametrize("name", PUBLISHED_STATISTICS)
def test_statistics_of_the_public_logs(name: str) -> None:
    found = statistics(needed_log(name))
    row = (found.ops, found.tensors, found.op_edges, found.events)
    assert (*row, found.peak_bytes, found.cost, found.constant_bytes) == PUBLISHED_STATISTICS[name]


def test_statistics() -> None:
    out = written()  # a constant of 8, an operator that makes `x` of it
    out.call(["y", "v"], ["x", "x", "w"], 2, v="0")
    out.add("COPY", DST="z", SRC="y")
    out.add("RELEASE", NAME="x")
    found = statistics(out.log())
    assert found == Statistics(
        ops=3,
        tensors=4,
        op_edges=3,
        events=5 + 1 + 4,  # `w`, `v`, and `y` by two names
        peak_bytes=10,
        constant_bytes=8,
        bottleneck_bytes=2,
        cost=5,
    )
