"""simrd: logs are read strictly, runs are valid move by move, and agree with the published simulator."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remat
from benchmarks.dtr_programs import PUBLISHED, public_log
from remat.dtr import HEURISTICS, Log, LogError, Run, Scoring, load_log, read_log, simulate
from remat.dtr.heuristics import heuristic_named
from remat.dtr.log import Call, Share
from remat.dtr.simulator import _Simulator

# --- programs ------------------------------------------------------------------------------------------


class Writer:
    """Writes a log line by line."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def add(self, instruction: str, **fields: Any) -> None:
        self.entries.append({"INSTRUCTION": instruction, **fields})

    def call(self, results: list[str], args: list[str], cost: int = 1, **aliases: str) -> None:
        self.add("CALL", NAME="f", ARGS=args, RESULT=results, TIME=str(cost))
        for name in results:
            self.add("MEMORY", NAME=name, MEMORY="1")
            self.add("ALIAS", NAME=name, ALIAS=aliases.get(name, "-1"))

    @property
    def lines(self) -> list[str]:
        return [json.dumps(entry) for entry in self.entries]

    def log(self) -> Log:
        return read_log(self.lines)


def chain(layers: int) -> Log:
    """The program of the paper's section 5.1: unit layers, gradients, outputs released as they are used."""
    out = Writer()
    for i in range(1, layers + 1):
        out.call([f"t{i}"], [f"t{i - 1}"] if i > 1 else [])
    out.call([f"g{layers}"], [f"t{layers}"])
    for i in range(layers - 1, 0, -1):
        out.add("RELEASE", NAME=f"t{i + 1}")
        out.call([f"g{i}"], [f"t{i}", f"g{i + 1}"])
        out.add("RELEASE", NAME=f"g{i + 1}")
    out.add("RELEASE", NAME="t1")
    return out.log()


def random_log(rng: random.Random, length: int) -> Log:
    """Constants, operators with several results, views, mutations, copies and releases."""
    out = Writer()
    names: list[str] = []
    for number in range(length):
        kind = rng.choice(["CONSTANT", "CALL", "CALL", "CALL", "MUTATE", "COPY", "FROM", "RELEASE"])
        name = f"x{number}"
        if kind == "CONSTANT" or not names:
            out.add("CONSTANT", NAME=name)
            out.add("MEMORY", NAME=name, MEMORY=str(rng.randrange(4)))
            names.append(name)
        elif kind == "CALL":
            args = [rng.choice(names) for _ in range(rng.randrange(3))]
            results = [f"{name}_{i}" for i in range(rng.randrange(1, 4))]
            out.add("CALL", NAME="f", ARGS=args, RESULT=results, TIME=str(rng.randrange(5)))
            for result in results:
                alias = "0" if args and rng.random() < 0.3 else "-1"
                out.add("MEMORY", NAME=result, MEMORY=str(rng.randrange(6)))
                out.add("ALIAS", NAME=result, ALIAS=alias)
            names += results
        elif kind == "MUTATE":
            args = [rng.choice(names) for _ in range(2)]
            out.add("MUTATE", NAME="f_", ARGS=args, MUTATE=[rng.randrange(2)], TIME="2")
        elif kind == "COPY":
            out.add("COPY", DST=name, SRC=rng.choice(names))
            names.append(name)
        elif kind == "FROM":
            out.add("COPY_FROM", DST=rng.choice(names), SRC=rng.choice(names))
        else:
            out.add("RELEASE", NAME=names.pop(rng.randrange(len(names))))
    return out.log()


@st.composite
def logs(draw: st.DrawFn) -> Log:
    return random_log(random.Random(draw(st.integers(0, 2**32))), draw(st.integers(1, 60)))


# --- what a run has to be ----------------------------------------------------------------------------


def still_referred_to(log: Log) -> set[int]:
    refs: dict[int, int] = {}
    for event in log.events:
        if isinstance(event, Call):
            refs.update(dict.fromkeys(event.outputs, 1))
        else:
            refs[event.tensor] += 1 if isinstance(event, Share) else -1
    return {tensor for tensor, count in refs.items() if count > 0}


def check_moves(log: Log, run: Run) -> None:
    """Replays the moves with a state of its own: what an operator reads is there, and memory is what is there."""
    calls = list(log.calls)
    storage_of: dict[int, int] = {}
    size: dict[int, int] = {}
    for call in calls:
        for tensor, nbytes, alias in zip(call.outputs, call.sizes_bytes, call.aliases, strict=True):
            storage_of[tensor] = tensor if alias < 0 else storage_of[alias]
            size.setdefault(storage_of[tensor], nbytes)
    defined: set[int] = set()
    ran: set[int] = set()
    cost = 0
    for move in run.trace:
        if move.action in ("run", "again"):
            call = calls[move.target]
            assert (move.action == "again") == (move.target in ran)
            assert defined.issuperset(call.inputs)
            ran.add(move.target)
            defined.update(call.outputs)
            cost += call.cost
        else:
            gone = {tensor for tensor in defined if storage_of[tensor] == move.target}
            assert gone or move.action == "banish"
            defined -= gone
        assert move.clock == cost
        resident = {storage_of[t] for t in defined if storage_of[t] in defined}
        held = sum(size[storage] for storage in resident)
        if move.action not in ("run", "again"):
            assert move.memory_bytes == held
        if run.budget_bytes is not None:
            assert held <= run.budget_bytes
    if run.status == "ok":
        assert len(ran) == len(calls)
        assert cost == run.compute_cost
        assert still_referred_to(log) <= defined
    assert run.budget_bytes is None or run.peak_bytes <= run.budget_bytes


@given(
    log=logs(),
    heuristic=st.sampled_from(sorted(HEURISTICS)),
    eviction=st.sampled_from(["eager", "banish", "ignore"]),
    share=st.sampled_from([0.4, 0.6, 0.8, 1.0, None]),
)
def test_every_run_is_valid(log: Log, heuristic: str, eviction: Any, share: float | None) -> None:
    run = simulate(
        log,
        budget=_budget(log, share),
        heuristic=heuristic,
        eviction=eviction,
        thrash=20,
        trace=True,
    )
    check_moves(log, run)
    if share is None and eviction == "ignore":
        assert (run.status, run.rematerializations, run.evictions) == ("ok", 0, 0)


def _budget(log: Log, share: float | None) -> int | None:
    if share is None:
        return None
    return max(int(share * simulate(log, eviction="ignore").peak_bytes), 1)


@given(log=logs())
def test_a_run_repeats_itself(log: Log) -> None:
    budget = _budget(log, 0.7)
    runs = [
        simulate(log, budget=budget, heuristic="random", seed=7, thrash=20, trace=True)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


# --- the published numbers ----------------------------------------------------------------------------

# Operators that run again within ceil(2 sqrt n), by the published simulator; its n counts the loss.
CHAIN = {
    16: {"dtr_full": 8, "dtr_eqclass": 8, "msps": 9, "lru": 11, "dtr_local": 11, "largest": 44},
    64: {
        "dtr_full": 49,
        "dtr_eqclass": 49,
        "msps": 60,
        "lru": 161,
        "dtr_local": 161,
        "largest": 1224,
    },
    128: {"dtr_full": 105, "dtr_eqclass": 105, "msps": 136, "lru": 594, "largest": 5670},
}
STALE_LESS = {16: 13, 64: 74, 128: 132}


@pytest.mark.parametrize("n", CHAIN)
def test_unit_chains_take_what_is_published(n: int) -> None:
    budget, log = math.ceil(2 * math.sqrt(n)), chain(n - 1)
    for heuristic, expected in CHAIN[n].items():
        run = simulate(log, budget=budget, heuristic=heuristic, trace=True)
        check_moves(log, run)
        assert (run.status, run.rematerializations) == ("ok", expected)
        assert run.overhead == expected / run.base_cost
    run = simulate(log, budget=budget, heuristic=Scoring("full", staleness=False))
    assert run.rematerializations == STALE_LESS[n]


def test_a_logarithmic_budget_is_enough() -> None:
    log = chain(63)
    assert simulate(log, budget=6, heuristic="dtr_full").rematerializations == 196
    assert simulate(log, budget=1, heuristic="dtr_full").status == "out_of_memory"
    assert simulate(log, budget=6, heuristic="lru", thrash=2).status == "thrashing"


@pytest.mark.parametrize("n", [256, 512, pytest.param(2048, marks=pytest.mark.slow)])
def test_figure_2_one_more_forward_pass(n: int) -> None:
    """The paper: `dtr_full` matches Chen's n additional computations almost exactly."""
    run = simulate(chain(n - 1), budget=math.ceil(2 * math.sqrt(n)), heuristic="dtr_full")
    assert 0.7 * n <= run.rematerializations <= (n if n < 1000 else 1.05 * n)


def needed_log(name: str) -> Log:
    log = public_log(name)
    if log is None:
        pytest.skip("REMAT_DTR_LOGS names no folder with the public logs")
    return log


@pytest.mark.parametrize(("name", "heuristic"), PUBLISHED)
def test_public_logs_replay_as_published(name: str, heuristic: str) -> None:
    log = needed_log(name)
    for share, expected in zip((0.3, 0.5, 0.7, 0.9), PUBLISHED[name, heuristic], strict=True):
        run = simulate(log, budget=share, heuristic=heuristic, thrash=2, trace=True)
        check_moves(log, run)
        extra = run.compute_cost - run.base_cost
        assert (extra if run.status == "ok" else run.status) == expected


# --- logs --------------------------------------------------------------------------------------------


def written() -> Writer:
    out = Writer()
    out.add("ANNOTATE", ANNOTATION="START")
    out.add("CONSTANT", NAME="w")
    out.add("MEMORY", NAME="w", MEMORY="8")
    out.call(["x"], ["w"], 3)
    return out


def test_what_a_log_says() -> None:
    out = written()
    out.add("COPY", DST="y", SRC="x")
    out.call(["view"], ["y"], 1, view="0")
    out.add("MUTATE", NAME="add_", ARGS=["view", "w"], MUTATE=[0], TIME=2)
    out.add("COPYFROM", DST="y", SRC="w")
    out.add("RELEASE", NAME="x")
    log = out.log()
    calls = list(log.calls)
    assert [c.name for c in calls] == ["constant", "f", "f", "add_"]
    assert calls[0].is_constant and not calls[1].is_constant
    assert (calls[2].aliases, calls[2].sizes_bytes) == ((1,), (0,))
    assert (calls[3].inputs, calls[3].outputs, calls[3].sizes_bytes) == ((2, 0), (3,), (1,))
    assert (log.cost, log.num_tensors) == (6, 4)
    assert still_referred_to(log) == {0, 3}


def bad_logs() -> Iterator[Any]:
    def case(text: str, **entry: Any) -> Any:
        out = written()
        out.entries.append(entry)
        return pytest.param(out.lines, text, id=f"{entry.get('INSTRUCTION')}: {text[:30]}")

    yield case("unknown instruction 'JUMP'", INSTRUCTION="JUMP")
    yield case("unknown instruction None", NAME="x")
    yield case("RELEASE has", INSTRUCTION="RELEASE")
    yield case("'z' is not there", INSTRUCTION="RELEASE", NAME="z")
    yield case("'z' is not there", INSTRUCTION="COPY", DST="a", SRC="z")
    yield case("'x' is there already", INSTRUCTION="COPY", DST="x", SRC="w")
    yield case("'x' is there already", INSTRUCTION="CONSTANT", NAME="x")
    yield case("expected a string", INSTRUCTION="RELEASE", NAME=7)
    yield case("which the operator before", INSTRUCTION="MEMORY", NAME="w", MEMORY="8")
    yield case("is said twice", INSTRUCTION="MEMORY", NAME="x", MEMORY="8")
    yield case("is missing", INSTRUCTION="CONSTANT", NAME="c")
    call = {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["x"], "RESULT": ["y"]}
    yield case("expected an integer of at least 0", **call, TIME="-3")
    yield case("expected an integer of at least 0", **call, TIME=1.5)
    yield case("expected an integer of at least 0", **call, TIME="9" * 400)
    yield case("expected at most", **call, TIME=str(2**63))
    yield case("makes a tensor twice", **{**call, "RESULT": ["y", "y"]}, TIME="1")
    yield case("'y' is not there", **{**call, "ARGS": ["y"]}, TIME="1")
    mutate = {"INSTRUCTION": "MUTATE", "NAME": "f_", "ARGS": ["x", "w"], "TIME": "1"}
    yield case("expected different places", **mutate, MUTATE=[2])
    yield case("expected different places", **mutate, MUTATE=[0, 0])
    yield case("expected different places", **mutate, MUTATE=[True])


@pytest.mark.parametrize(("lines", "text"), list(bad_logs()))
def test_a_log_that_no_program_writes_is_an_error_with_its_line(
    lines: list[str], text: str
) -> None:
    with pytest.raises(LogError, match=rf"log, line {len(lines)}: .*{text}"):
        read_log(lines)


@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 5000, '{"INSTRUCTION": []}', "nul"])
def test_damaged_lines(text: str) -> None:
    with pytest.raises(LogError, match="line 1: "):
        read_log([text])


def test_files(tmp_path: Path) -> None:
    text = "\n".join(written().lines)
    plain, packed = tmp_path / "a.log", tmp_path / "a.log.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert load_log(plain) == load_log(packed)
    packed.write_bytes(gzip.compress(text.encode())[:-9])
    with pytest.raises(LogError, match="not a text of JSON lines"):
        load_log(packed)
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(LogError, match="not a text of JSON lines"):
        load_log(plain)
    plain.write_text("x" * (1 << 21))
    with pytest.raises(LogError, match="line 1: longer than"):
        load_log(plain)


def test_outputs_have_the_order_of_their_names() -> None:
    out = Writer()
    out.call(["a"], [])
    out.call(["b"], [])
    out.call(["c"], ["b", "a"])
    out.add("MUTATE", NAME="f_", ARGS=["a"], MUTATE=[0], TIME="1")
    log = out.log()
    assert log.order == (3, 1, 2) and log.outputs == (3, 1, 2)
    assert Log(log.events, log.num_tensors).outputs == (1, 2, 3)
    for order in (["b", "c", "a"], ["a", "b", "c"]):
        out.add("ANNOTATE", ANNOTATION="OUTPUTS", NAMES=order)
        assert out.log().outputs == tuple({"a": 3, "b": 1, "c": 2}[name] for name in order)
    out.add("ANNOTATE", ANNOTATION="OUTPUTS", NAMES=["a"])
    with pytest.raises(LogError, match="OUTPUTS names others"):
        out.log()


def test_what_is_missing_is_made_in_the_order_of_the_arguments() -> None:
    out = Writer()
    for name in "ab":
        out.call([name], [])
    out.call(["c"], [])
    out.call(["d"], ["c"])
    out.call(["f"], ["d"])  # `a` and `b` have made room
    out.call(["e"], ["b", "a"])
    run = simulate(out.log(), budget=3, heuristic="lru", trace=True)
    again = [move.target for move in run.trace if move.action == "again"]
    assert again[:2] == [1, 0] and run.status == "out_of_memory"


def test_two_views_by_one_operator_cost_once() -> None:
    out = Writer()
    out.call(["a"], [], cost=2)
    out.call(["v", "w"], ["a"], cost=5, v="0", w="0")
    heuristic = heuristic_named("dtr_local", 0)
    heuristic.begin(3)
    simulator = _Simulator(out.log(), None, heuristic, "eager", None, False, "scan")
    simulator.run()
    heuristic.accessed(0, 0)
    assert heuristic.score(0, 1) == 7


def test_names_from_before_the_start_may_be_released() -> None:
    out = Writer()
    out.call(["old"], [])
    out.add("ANNOTATE", ANNOTATION="START")
    out.add("RELEASE", NAME="old")
    out.call(["new"], [])
    out.add("ANNOTATE", ANNOTATION="BACKWARD")
    log = out.log()
    assert (len(log.events), log.num_tensors, log.backward) == (1, 1, 1)
    out.add("COPY", DST="x", SRC="old")
    with pytest.raises(LogError, match="'old' is not there"):
        out.log()


def test_a_run_of_operators_that_cost_nothing_ends() -> None:
    out = Writer()
    for i in range(1, 40):
        out.call([f"t{i}"], [f"t{i - 1}"] if i > 1 else [], cost=0)
    for i in range(39, 0, -1):
        out.call([f"g{i}"], [f"t{i}"], cost=0)
        out.add("RELEASE", NAME=f"g{i}")
        out.add("RELEASE", NAME=f"t{i}")
    run = simulate(out.log(), budget=3, heuristic="lru", thrash=2)
    assert (run.status, run.base_cost, run.overhead) == ("thrashing", 0, 0)


def test_a_run_that_ends_early_says_what_it_repeated() -> None:
    run = simulate(chain(63), budget=6, heuristic="lru", thrash=1.5)
    assert run.status == "thrashing" and run.overhead > 0.5
    again = sum(move.action == "again" for move in run.trace)
    assert (run.rematerializations, run.repeated_cost) == (again, again)
    assert run.compute_cost == run.repeated_cost + sum(m.action == "run" for m in run.trace)


def test_a_long_chain_needs_no_recursion() -> None:
    log = chain(3000)
    run = simulate(log, budget=4, heuristic="lru", thrash=1.5)
    assert run.status == "thrashing" and run.rematerializations > 1000


def test_wrong_arguments() -> None:
    log = chain(3)
    with pytest.raises(remat.PolicyError, match="did you mean 'dtr_full'"):
        simulate(log, heuristic="dtr_ful")
    with pytest.raises(remat.PolicyError, match="expected 'eager', 'banish' or 'ignore'"):
        simulate(log, eviction="lazy")  # pyright: ignore[reportArgumentType]
    with pytest.raises(remat.PolicyError, match="expected 'index' or 'scan'"):
        simulate(log, search="heap")  # pyright: ignore[reportArgumentType]
    for thrash in (0.5, float("nan")):
        with pytest.raises(remat.PolicyError, match="expected a multiple of the base from 1 on"):
            simulate(log, thrash=thrash)
    for budget in (0, -1, 0.0, float("nan"), float("inf"), True):
        with pytest.raises(remat.BudgetError, match="expected bytes, or a share"):
            simulate(log, budget=budget)
