"""`scan` equations: their parts, and how they are run with another body or in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core as _extend_core

from remat.compat.equations import holds_references

__all__ = ["ScanParts", "run_chunks", "run_scan", "scan_parts", "trace_chunk"]

JaxprEqn = Any


@dataclass(frozen=True)
class ScanParts:
    """A `scan` equation's parameters under names that do not change between jax versions."""

    body: Any
    length: int
    reverse: bool
    unroll: int | bool
    num_consts: int
    num_carry: int
    split_transpose: bool

    def shortened(self, length: int) -> ScanParts:
        """Returns the parts of the same scan over fewer iterations."""
        unroll = self.unroll
        return replace(
            self,
            length=length,
            unroll=unroll if isinstance(unroll, bool) else max(1, min(unroll, length)),
        )


def scan_parts(eqn: JaxprEqn) -> ScanParts | None:
    """Returns the parts of a `scan` equation that another body can run, None for every other equation.

    What a body writes into a mutable array of its own is no result of any equation: it stays as it is.
    """
    if eqn.primitive.name != "scan" or holds_references(eqn):
        return None
    params: Mapping[str, Any] = eqn.params
    if "ft_in" in params:  # jax 0.11
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    return ScanParts(
        body=params["jaxpr"],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params.get("unroll", 1),
        num_consts=num_consts,
        num_carry=num_carry,
        split_transpose=params.get("_split_transpose", False),
    )


def run_scan(parts: ScanParts, body: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs a scan with another body, a function of flat arrays like the one it replaces."""
    first = parts.num_consts + parts.num_carry
    consts = operands[: parts.num_consts]
    init, xs = list(operands[parts.num_consts : first]), list(operands[first:])

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*consts, *carry, *x)
        return list(out[: parts.num_carry]), list(out[parts.num_carry :])

    carry, ys = jax.lax.scan(
        step,
        init,
        xs,
        length=None if xs else parts.length,  # which may be symbolic
        reverse=parts.reverse,
        unroll=parts.unroll,
        _split_transpose=parts.split_transpose,
    )
    return [*carry, *ys]


def trace_chunk(parts: ScanParts, chunk: int, operands: Sequence[Any]) -> Any:
    """Returns the closed jaxpr of `chunk` iterations of a scan: consts, carry, `[chunk, ...]` xs -> carry, ys.

    Args:
        parts: of the whole scan.
        chunk: iterations.
        operands: of the whole scan; only their types count.
    """
    first = parts.num_consts + parts.num_carry
    body = _extend_core.jaxpr_as_fun(parts.body)
    part = [x[:chunk] for x in operands[first:]]  # as an operation: types know axes of meshes
    return jax.make_jaxpr(lambda *args: run_scan(parts.shortened(chunk), body, args))(
        *operands[:first], *part
    )


def run_chunks(
    parts: ScanParts,
    chunk: int,
    body: Any,
    rest: Any,
    operands: Sequence[Any],
) -> list[Any]:
    """Runs a scan as a scan over chunks of `chunk` iterations, and what is left over after it.

    Args:
        parts: of the whole scan.
        chunk: iterations of a chunk.
        body: runs a chunk: consts, carry, `[chunk, ...]` xs -> carry, `[chunk, ...]` ys.
        rest: runs what is left over, as a function of its `ScanParts` and operands.
        operands: of the whole scan.
    """
    first = parts.num_consts + parts.num_carry
    consts = operands[: parts.num_consts]
    init, xs = list(operands[parts.num_consts : first]), list(operands[first:])
    count, left = divmod(parts.length, chunk)
    full = count * chunk
    # The rest comes last in time: what it keeps is gone before the first chunk is run again.
    cut = left if parts.reverse else full
    early, late = [x[:cut] for x in xs], [x[cut:] for x in xs]
    if not left:
        early = late = xs
    main, others = (late, early) if parts.reverse else (early, late)
    over = replace(parts, length=count, unroll=1, split_transpose=False)
    rows = [x.reshape(count, chunk, *x.shape[1:]) for x in main]
    results = run_scan(over, body, [*consts, *init, *rows])
    carry = results[: parts.num_carry]
    ys = [y.reshape(full, *y.shape[2:]) for y in results[parts.num_carry :]]
    if not left:
        return [*carry, *ys]
    results = rest(parts.shortened(left), [*consts, *carry, *others])
    carry, last = results[: parts.num_carry], results[parts.num_carry :]
    pairs = zip(last, ys, strict=True) if parts.reverse else zip(ys, last, strict=True)
    return [*carry, *(jax.numpy.concatenate(pair) for pair in pairs)]
