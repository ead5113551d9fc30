"""What lies idle between buffers: the heap against one that is written down plainly, and against the compiler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

import remat
from remat.memory.packing import Block, blocks_of, packed_bytes


def alive_bytes(blocks: Sequence[Block]) -> int:
    return max(
        (sum(b.nbytes for b in blocks if b.start <= at <= b.end) for at in range(20)), default=0
    )


def heap(blocks: Sequence[Block]) -> int:
    """The places of blocks, one after the other, unit by unit."""
    taken: set[tuple[int, int]] = set()  # when, and which unit

    def fits(low: int, block: Block) -> bool:
        units = range(low, low + block.nbytes)
        return not any((t, u) in taken for t in range(block.start, block.end + 1) for u in units)

    def gap(low: int, block: Block) -> int:
        """How large the gap is that begins here; 0 if none does."""
        times = range(block.start, block.end + 1)
        if low and not any((t, low - 1) in taken for t in times):
            return 0
        above = [u for t, u in taken if t in times and u >= low]
        return min(above, default=10**6) - low

    for block in blocks:
        last = max((u for _, u in taken), default=-1) + 1
        lows = [low for low in range(last + 1) if fits(low, block) and gap(low, block)]
        low = min(lows, key=lambda low: (gap(low, block), low))
        taken |= {
            (t, u)
            for t in range(block.start, block.end + 1)
            for u in range(low, low + block.nbytes)
        }
    return max((u for _, u in taken), default=-1) + 1


@st.composite
def some_blocks(draw: st.DrawFn) -> list[Block]:
    blocks = []
    for _ in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, 8))
        first_end = draw(st.integers(start, 9))
        end = draw(st.integers(first_end, 10))
        blocks.append(Block(draw(st.integers(1, 6)), start, end, first_end))
    return blocks


@given(blocks=some_blocks())
@laws(200)
def test_the_better_of_two_orders(blocks: list[Block]) -> None:
    largest = sorted(blocks, key=lambda b: (-b.nbytes, b.start - b.first_end))
    longest = sorted(blocks, key=lambda b: (b.start - b.end, -b.nbytes))
    alive = alive_bytes(blocks)
    found = packed_bytes(blocks, alive)
    assert alive <= found <= sum(b.nbytes for b in blocks)
    assert found == min(heap(largest), heap(longest))


@dataclass(frozen=True)
class Buffer:
    nbytes: int
    start: int
    end: int
    over: int | None = None


# Of programs that XLA compiled for an H200: the buffers, which instructions make and last read them, what each is
# written over, and the memory of them all. The first two XLA packed longest first, the third largest first.
TANH = (
    [
        Buffer(8421376, 10, 44),
        Buffer(33587200, 12, 46),
        Buffer(25190400, 13, 33),
        Buffer(16793600, 14, 19),
        Buffer(16793600, 19, 28),
        Buffer(16842752, 26, 35),
        Buffer(25190400, 28, 29),
        Buffer(25190400, 29, 39, over=6),
        Buffer(25264128, 33, 35),
        Buffer(12582912, 35, 36),
        Buffer(25214976, 37, 48),
        Buffer(33587200, 39, 42),
        Buffer(33685504, 42, 44),
        Buffer(8388608, 44, 45),
        Buffer(33619968, 46, 48),
        Buffer(12582912, 48, 49),
    ],
    134520832,
)
RELU6 = (
    [
        Buffer(33554432, 12, 52),
        Buffer(33554432, 13, 14),
        Buffer(25165824, 14, 38),
        Buffer(25165824, 15, 16),
        Buffer(16777216, 16, 25),
        Buffer(16777216, 25, 42),
        Buffer(25165824, 37, 38),
        Buffer(25165824, 38, 42),
        Buffer(25165824, 38, 58, over=6),
        Buffer(12582912, 42, 43),
        Buffer(33554432, 52, 56),
        Buffer(8388608, 52, 59),
        Buffer(12582912, 56, 57),
        Buffer(33554432, 58, 59),
        Buffer(33554432, 59, 63, over=13),
        Buffer(262144, 59, 65),
        Buffer(8388608, 63, 64),
    ],
    125829120,
)
GELU = (
    [
        Buffer(33554432, 12, 58),
        Buffer(33554432, 13, 14),
        Buffer(25165824, 14, 48),
        Buffer(25165824, 15, 16),
        Buffer(16777216, 16, 26),
        Buffer(16777216, 25, 26),
        Buffer(16777216, 26, 42, over=5),
        Buffer(25165824, 38, 40),
        Buffer(12582912, 40, 41),
        Buffer(25165824, 42, 48),
        Buffer(25165824, 48, 61),
        Buffer(33554432, 56, 58),
        Buffer(33554432, 57, 58),
        Buffer(33554432, 58, 61, over=11),
        Buffer(33554432, 58, 67, over=12),
        Buffer(12582912, 61, 62),
        Buffer(8388608, 67, 68),
    ],
    125829120,
)


@pytest.mark.parametrize(("buffers", "nbytes"), [TANH, RELU6, GELU], ids=["tanh", "relu6", "gelu"])
def test_what_xla_made_of_it(buffers: list[Buffer], nbytes: int) -> None:
    assert packed_bytes(blocks_of(buffers, lambda index, _: buffers[index].over), 0) == nbytes


@st.composite
def some_buffers(draw: st.DrawFn) -> list[Buffer]:
    buffers: list[Buffer] = []
    for index in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, 8))
        end = draw(st.integers(start, 9))
        nbytes = draw(st.integers(1, 3))
        under = [
            i
            for i, other in enumerate(buffers)
            if other.end == start > other.start
            and other.nbytes == nbytes
            and all(b.over != i for b in buffers)
        ]
        over = draw(st.sampled_from(under)) if under and index % 2 else None
        buffers.append(Buffer(nbytes, start, end, over))
    return buffers


@given(buffers=some_buffers())
@laws(200)
def test_blocks_are_there_together_when_their_buffers_are(buffers: list[Buffer]) -> None:
    """But for what is written over another: one block, from the first to the last."""

    def lies_in(index: int, given_up: Sequence[int]) -> int | None:
        over = buffers[index].over
        assert over is None or over in given_up
        return over

    blocks = blocks_of(buffers, lies_in)
    ends = {i for i in range(len(buffers)) if all(b.over != i for b in buffers)}
    assert len(blocks) == len(ends) == sum(b.over is None for b in buffers)
    times = [t for block in blocks for t in (block.start, block.end)]
    assert len({*times}) == len(times)  # one thing happens at a time
    assert all(b.start < b.first_end <= b.end for b in blocks)
    assert max(times, default=-1) < 2 * len(buffers)

    def chain(index: int | None) -> list[int]:
        return [] if index is None else [*chain(buffers[index].over), index]

    def most(found: Sequence[Block | Buffer]) -> int:
        return max(
            (sum(b.nbytes for b in found if b.start <= at <= b.end) for at in range(20)), default=0
        )

    chains = [[buffers[i] for i in chain(end)] for end in ends]
    together = [Buffer(c[0].nbytes, c[0].start, c[-1].end) for c in chains]
    assert most(blocks) == most(together)


def test_a_gap_between_two_that_stay() -> None:
    """Three units are alive at most, and none may move: the last lies behind what is gone."""
    blocks = [Block(2, 0, 1, 1), Block(1, 0, 3, 3), Block(2, 2, 5, 5), Block(1, 4, 5, 5)]
    assert alive_bytes(blocks) == 3 == packed_bytes(blocks, 3)
    blocks = [Block(3, 2, 4, 4), Block(2, 0, 2, 2), Block(2, 4, 6, 6), Block(2, 1, 5, 5)]
    assert packed_bytes(blocks, alive_bytes(blocks)) >= alive_bytes(blocks)


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ("full", (256, 1024, 768, 512, 1)),
        ("min_cut", (256, 1024, 768, 512, 8)),
        ("full", (128, 640, 384, 896, 4)),
    ],
)
def test_layers_of_different_widths(policy: str, sizes: tuple[int, ...]) -> None:
    """Of gradients as wide as their layers none fits exactly where another was."""

    def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for weight, bias in weights:
            x = jax.nn.relu(x @ weight + bias)
        return jnp.mean(x**2)

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    weights = [(shape(a, b), shape(b)) for a, b in itertools.pairwise(sizes)]
    args = weights, shape(32768, sizes[0])
    plan = remat.plan(loss, *args, remat_policy=policy)
    step = jax.grad(remat.checkpoint(loss, remat_policy=plan))
    temp_bytes = remat.compile_report(step, *args, device="h200").temp_bytes
    assert plan.peak_bytes == pytest.approx(temp_bytes, rel=0.1)
