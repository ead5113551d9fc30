"""The followed steps of XLA's `priority_fusion`: against its own record of them, and against counting anew."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

import remat
from remat.core.kernel_work import CYCLE_BYTES, CYCLES
from remat.core.priority_fusion import (
    LAUNCH_BYTES,
    Program,
    _Queue,  # pyright: ignore[reportPrivateUsage]
    fuse,
    in_ticks,
    read_bytes,
)
from remat.trace.emission import reduction_blocks

MATRIX, ROW = (4096, 1024), (4096,)
BYTES_PER_MICROSECOND = 4.8e6  # of an H200, for which the record is made


@dataclass(frozen=True)
class Step:
    """One operator: a function of `jax.lax`, what it reads by number, its shape, and the axis that it reduces."""

    name: str
    reads: tuple[int, ...]
    shape: tuple[int, ...] = MATRIX
    axis: int | None = None


# The first two numbers are arguments, a matrix and a row; each name occurs once, as XLA's record has names only.
SHARED = (
    Step("tanh", (0,)),
    Step("sqrt", (1,), ROW),
    Step("broadcast_in_dim", (3,)),
    Step("mul", (2, 4)),
    Step("exp", (5,)),
    Step("sub", (6, 2)),
    Step("div", (7, 5)),
    Step("add", (8, 2)),
    Step("max", (9, 6)),
)
CHEAP = (
    Step("neg", (0,)),
    Step("abs", (2,)),
    Step("rsqrt", (1,), ROW),
    Step("broadcast_in_dim", (4,)),
    Step("mul", (3, 5)),
    Step("sub", (6, 2)),
    Step("max", (7, 3)),
    Step("add", (8, 6)),
)
# Read by reductions: those of columns have few blocks of threads, that of rows enough.
REDUCED = (
    Step("sqrt", (1,), ROW),
    Step("broadcast_in_dim", (2,)),
    Step("mul", (0, 3)),
    Step("sub", (4, 0)),
    Step("abs", (0,)),
    Step("add", (5, 6)),
    Step("reduce_sum", (7,), (1024,), 0),
    Step("reduce_max", (7,), ROW, 1),
    Step("neg", (6,)),
    Step("reduce_min", (10,), (1024,), 0),
)
PROGRAMS = {"SHARED": SHARED, "CHEAP": CHEAP, "REDUCED": REDUCED}
# Makes a program of steps, compiles it for an H200, and prints nothing: XLA writes down what it did.
COMPILES = """
import sys
import jax, jax.numpy as jnp
import remat
from jax import lax
from test_priority_fusion import {name} as steps

def f(matrix, row):
    values = list(lax.optimization_barrier((matrix, row)))
    for step in steps:
        read = [values[number] for number in step.reads]
        if step.name == "broadcast_in_dim":
            values.append(lax.broadcast_in_dim(read[0], step.shape, (0,)))
        elif step.axis is not None:
            values.append(getattr(jnp, step.name.removeprefix("reduce_"))(read[0], axis=step.axis))
        else:
            values.append(getattr(lax, step.name)(*read))
    read = {{number for step in steps for number in step.reads}}
    return lax.optimization_barrier([v for n, v in enumerate(values[2:], 2) if n not in read])

shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 1024), (4096,))]
remat.compile_report(f, *shapes, device="h200")
"""


def program_of(steps: Sequence[Step]) -> tuple[Program, list[bool]]:
    """The steps behind two arguments, and which of them end a kernel: what a barrier reads, and reductions."""
    shapes = [MATRIX, ROW, *(step.shape for step in steps)]
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    walked = [
        sizes[step.reads[0] if step.axis is not None else number + 2]
        for number, step in enumerate(steps)
    ]
    readers: list[list[int]] = [[] for _ in shapes]
    for number, step in enumerate(steps):
        for value in dict.fromkeys(step.reads):
            readers[value].append(number)
    program = Program(
        outs=[(number + 2,) for number in range(len(steps))],
        ins=[step.reads for step in steps],
        readers=readers,
        nbytes=[4 * size for size in sizes],
        work=[
            (0 if step.name == "broadcast_in_dim" else CYCLES.get(step.name, 3))
            * size
            * CYCLE_BYTES
            for step, size in zip(steps, walked, strict=True)
        ],
        moves=[step.name == "broadcast_in_dim" or step.axis is not None for step in steps],
        blocks=[
            0 if step.axis is None else reduction_blocks(MATRIX, (step.axis,), 4) for step in steps
        ],
        part=lambda value, reader: walked[reader] / sizes[value],
    )
    return program, [not readers[n + 2] or step.axis is not None for n, step in enumerate(steps)]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_priorities_are_those_that_xla_writes_down(name: str, tmp_path: Path) -> None:
    """Of every operator the first, to a nanosecond, four ticks; and which operators are left in the end."""
    steps: tuple[Step, ...] = PROGRAMS[name]
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=priority-fusion"
    root = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-c", COMPILES.format(name=name)],
        check=True,
        cwd=root.parent,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": f"{root.parent}:{root}"},
    )
    first, kernels = _record(tmp_path)
    seen: dict[int, float] = {}

    def note(number: int, _: Mapping[int, float], total: float) -> None:
        seen.setdefault(number, total)

    program, ends = program_of(steps)
    found = fuse(program, [True] * len(steps), ends, note).written
    ours = {
        steps[number].name: total / BYTES_PER_MICROSECOND
        for number, total in seen.items()
        if steps[number].shape == MATRIX
    }
    assert ours and ours == pytest.approx({n: first[n] for n in ours}, rel=0, abs=0.001)
    assert sum(found) == kernels


def _record(folder: Path) -> tuple[dict[str, float], int]:
    """From what XLA wrote: the first priority of every operator, in microseconds, and the number of kernels."""
    (record,) = folder.glob("*priority_fusion_dump.txt")
    first: dict[str, float] = {}
    for text in record.read_text().split("fusion_steps {"):
        found = re.search(r'producer_name: "([a-z_0-9]+)[.\d]*"', text)
        times = [re.search(rf"us_{kind}: ([\d.e+-]+)", text) for kind in ("unfused", "fused")]
        if found and all(times):
            unfused, fused = (float(time[1]) for time in times if time)
            first.setdefault(found[1], unfused - fused)
    (after,) = folder.glob("*after_priority-fusion*")
    entry = after.read_text().split("\nENTRY", 1)[1].split("\n}", 1)[0]
    left = re.findall(r"^ .* = f32\S+ ([a-z-]+)\(", entry, re.MULTILINE)
    others = ("parameter", "constant", "opt-barrier", "get-tuple-element")
    return first, sum(op not in others for op in left)


def test_what_is_dear_is_made_once_and_what_is_cheap_where_it_is_read() -> None:
    for name, once in (("tanh", True), ("neg", False)):
        steps = (
            Step(name, (0,)),
            *(Step("add", (2, 2)) for _ in range(3)),
            Step("max", (3, 4)),
            Step("max", (5, 6)),
        )
        # Three kernels that cannot be merged with one another.
        program, ends = program_of(steps)
        ends[1:4] = [True] * 3
        assert fuse(program, [True] * len(steps), ends).written[0] == once


def test_a_row_that_is_dear_is_not_made_for_every_element() -> None:
    for row, in_memory in ((Step("sin", (1,), ROW), True), (Step("neg", (1,), ROW), False)):
        steps = (row, Step("broadcast_in_dim", (2,)), Step("mul", (3, 0)))
        program, ends = program_of(steps)
        found = fuse(program, [True] * 3, ends).written
        assert found == [in_memory, False, True]


@pytest.mark.parametrize(("neighbours", "merged"), [(4, True), (16, False)])
def test_kernels_do_not_grow_without_end(neighbours: int, merged: bool) -> None:
    """Much that is wanted at many places would make a kernel too large, whatever it costs to compute."""
    made = 1000
    steps = (
        *(Step("neg", (0 if number == 0 else number + 1,)) for number in range(made)),
        *(Step("broadcast_in_dim", (made + 1,)) for _ in range(neighbours)),
        Step("add", tuple(range(made + 2, made + 2 + neighbours))),
    )
    program, ends = program_of(steps)
    free = replace(program, work=[0.0] * len(steps), part=lambda _value, _reader: 1.0)
    in_memory = fuse(free, [True] * len(steps), ends).written
    assert any(in_memory[:made]) != merged
    assert in_memory[-1]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("count", [4, 24])
def test_branches_do_not_split_a_kernel(count: int) -> None:
    """Nor do the emitters of XLA's GPU compiler make code anew behind every branch, as they once did."""

    def of_pads(parts: Sequence[jax.Array]) -> jax.Array:
        rows = [(n * 64, (count - 1 - n) * 64) for n in range(count)]
        padded = [jnp.pad(2 * x, (r, (0, 0))) for x, r in zip(parts, rows, strict=True)]
        return sum(padded[1:], padded[0])

    def of_joins(parts: Sequence[jax.Array]) -> jax.Array:
        x = parts[0]
        for part in parts[1:]:
            x = jnp.concatenate([x[3:] * 1.5, part[:3]])
        return x

    parts = [jax.ShapeDtypeStruct((64, 4096), jnp.float32)] * count
    for made in (of_pads, of_joins):
        report = remat.compile_report(made, parts, device="h200")
        assert len(report.kernels) == 1
        assert report.temp_bytes == 0


# --- counted anew


def random_program(rng: random.Random, count: int) -> tuple[Program, list[bool]]:
    names = ("tanh", "mul", "exp", "add", "broadcast_in_dim", "neg")
    steps: list[Step] = []
    for number in range(count):
        near = range(max(0, number - 4), number + 2)
        reads = tuple(rng.choice(near) for _ in range(rng.choice((1, 2))))
        steps.append(Step(rng.choice(names), reads, rng.choice((MATRIX, MATRIX, ROW))))
    program, ends = program_of(steps)
    ends = [e or rng.random() < 0.1 or not program.readers[n + 2] for n, e in enumerate(ends)]
    return program, ends


def kernel(program: Program, in_memory: Sequence[bool], last: int) -> tuple[float, float, int, int]:
    """Arithmetic, traffic, arrays and instructions of a kernel, from its last operator back, by its definition."""
    times: dict[int, dict[int, float]] = {last: {-1: 1.0}}  # by operator, how often at every place
    emitted: dict[int, dict[int, int]] = {last: {-1: 1}}
    read: dict[int, dict[int, float]] = {}
    work, instructions = 0.0, 0
    for number in range(last, -1, -1):
        if number not in times:
            continue
        often, code = sum(times[number].values()), sum(emitted[number].values())
        work += often * program.work[number]
        instructions += code
        for value in program.ins[number]:
            part = program.part(value, number)
            elementwise = part == 1.0 and not program.moves[number]
            maker = value - 2
            inside = maker >= 0 and not in_memory[maker]
            target = times.setdefault(maker, {}) if inside else read.setdefault(value, {})
            counts = emitted.setdefault(maker, {}) if inside else {}
            if elementwise:
                target.update(times[number])
                counts.update(emitted[number])
            else:
                target[value] = target.get(value, 0.0) + often * part
                counts[value] = counts.get(value, 0) + code
    moved = in_ticks(program.nbytes[last + 2])
    moved += sum(read_bytes(program.nbytes[v], sum(at.values())) for v, at in read.items())
    return work, moved, len(read), instructions


def seconds(work: float, moved: float) -> float:
    work = in_ticks(work)
    return work + moved - in_ticks(0.95 * min(work, moved))


@given(seed=st.integers(0, 2**32), count=st.integers(2, 14))
@laws(60)
def test_nothing_is_left_that_would_save_time(seed: int, count: int) -> None:
    """Every kernel that might still be merged would cost time, or be too large, counted from the definition.

    An operator that two kernels make is in both; once they are one kernel XLA counts it twice, the definition once.
    """
    program, ends = random_program(random.Random(seed), count)
    queue = _Queue(program, [True] * count, ends, None)
    queue.run()
    found = fuse(program, [True] * count, ends).written
    assert found == [number in queue.kernels for number in range(count)]
    assert all(found[number] for number in range(count) if ends[number])
    for number, saved in queue.saved.items():
        assert saved == {user: queue._saves(number, user) for user in queue.readers[number]}
        users = {
            other
            for other in range(count)
            if found[other] and other != number and _reads(program, found, other, number + 2)
        }
        assert users == queue.readers[number]
        if None in saved.values():
            continue
        assert queue.best[number] < 0
        merged = [kept and other != number for other, kept in enumerate(found)]
        total = LAUNCH_BYTES + seconds(*kernel(program, found, number)[:2])
        is_counted_once = (
            _instructions(program, found, number) == queue.kernels[number].instructions
        )
        for user in users:
            consumer = queue.kernels[user]
            emitted = sum(consumer.places[p][1] for p in queue._taken(number, consumer))
            together = consumer.instructions + emitted * queue.kernels[number].instructions
            is_counted_once = (
                is_counted_once
                and _instructions(program, found, user) == consumer.instructions
                and _instructions(program, merged, user) == together
            )
            work, moved, *_ = kernel(program, merged, user)
            total += seconds(*kernel(program, found, user)[:2]) - seconds(work, moved)
        if is_counted_once:
            assert queue.best[number] == pytest.approx(total, rel=1e-6, abs=1.0)


def _instructions(program: Program, in_memory: Sequence[bool], last: int) -> int:
    return kernel(program, in_memory, last)[3]


def _reads(program: Program, in_memory: Sequence[bool], last: int, value: int) -> bool:
    """Whether a kernel reads a value from memory."""
    todo = [last]
    while todo:
        for read in program.ins[todo.pop()]:
            if read == value:
                return True
            if read >= 2 and not in_memory[read - 2]:
                todo.append(read - 2)
    return False
