"""Equations with a body, run with another one that takes some of their operands and makes some of their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from remat.compat.barriers import tied
from remat.compat.equations import (
    CHECKPOINT_NAMES,
    INLINE_ALWAYS,
    JIT_NAMES,
    name_of,
    open_jaxpr,
    sub_jaxprs,
)
from remat.compat.evaluation import at_site
from remat.compat.loops import run_scan, scan_parts

__all__ = ["part_bodies", "run_part"]

JaxprEqn = Any

_WITH_ONE_BODY = INLINE_ALWAYS | JIT_NAMES | CHECKPOINT_NAMES | {"shard_map"}


def part_bodies(eqn: JaxprEqn) -> list[Any]:
    """Returns the jaxprs that make an equation's results of its operands; none if they are not so.

    Of a loop it is that of one iteration, of a choice they are its branches: of all operands but the first.
    """
    name, bodies = name_of(eqn), sub_jaxprs(eqn)
    if name == "cond":
        return [] if "branches_platforms" in eqn.params else bodies
    is_known = scan_parts(eqn) is not None or name in _WITH_ONE_BODY
    fits = len(bodies) == 1 and len(open_jaxpr(bodies[0])[0].invars) == len(eqn.invars)
    return bodies if is_known and fits else []


def run_part(
    eqn: JaxprEqn,
    bodies: Sequence[Callable[..., Sequence[Any]]],
    operands: Sequence[Any],
    given: Sequence[bool],
    wanted: Sequence[bool],
    site: JaxprEqn | None = None,
) -> list[Any]:
    """Returns some of the results that an equation has with other bodies.

    Args:
        eqn: has `part_bodies`.
        bodies: what it runs instead, of the operands that are given to the results that are wanted.
        operands: those that are given.
        given, wanted: which they are. What a loop carries on is given where it is wanted.
        site: as of `evaluate_equation`.
    """
    body = bodies[0]
    with at_site(eqn, site), eqn.ctx.manager:
        parts = scan_parts(eqn)
        if parts is not None:
            consts, carry = parts.num_consts, parts.num_consts + parts.num_carry
            numbers = {"num_consts": sum(given[:consts]), "num_carry": sum(given[consts:carry])}
            return run_scan(replace(parts, **numbers), body, operands)
        name, params = name_of(eqn), eqn.params
        if name == "cond":
            index, *rest = operands
            return list(jax.lax.switch(jax.numpy.int32(index), bodies, *rest))
        if name == "shard_map":
            mapped = jax.shard_map(
                lambda *values: tuple(body(*values)),
                mesh=params["mesh"],
                in_specs=tuple(itertools.compress(params["in_specs"], given)),
                out_specs=tuple(itertools.compress(params["out_specs"], wanted)),
                axis_names=params.get("newly_manual_axes", params.get("manual_axes")),
                check_vma=params["check_vma"],
            )
            return list(mapped(*operands))
        if name in CHECKPOINT_NAMES:
            if params["differentiated"] and params["prevent_cse"]:
                operands = [tied([x])[0] for x in operands]
            body = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
        return list(body(*operands))
