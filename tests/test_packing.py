"""What lies idle between buffers: the heap against one that is written down plainly, and against the compiler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

import remat
from remat.memory.packing import Block, packed_bytes


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
