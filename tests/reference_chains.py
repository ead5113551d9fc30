"""Chains whose optimum is known in closed form, as `Problem`s.

Griewank & Walther, "Algorithm 799: revolve" (2000): `forward_steps(l, s)` is the fewest forward steps that
reverse `l` steps with `s` snapshots.
"""

from __future__ import annotations

from math import comb

from remat.policies.solvers.problem import Problem

__all__ = ["chain_a", "chain_a_extra", "chain_b", "chain_b_extra", "forward_steps"]


def forward_steps(steps: int, snapshots: int) -> int:
    """t(l, s) = r * l - C(s + r, r - 1), with r the least integer such that C(s + r, s) >= l."""
    if snapshots < 1 or steps < 1:
        raise ValueError(f"forward_steps({steps}, {snapshots}): expected positive numbers")
    sweeps = 0
    while comb(snapshots + sweeps, snapshots) < steps:
        sweeps += 1
    return sweeps * steps - (comb(snapshots + sweeps, sweeps - 1) if sweeps else 0)


def chain_a(length: int) -> Problem:
    """`length` forward nodes and `length + 1` backward ones, all of cost and size one.

    Forward node `i` feeds node `i + 1` and backward node `2 * length - i`. Peak `length + 2`.
    """
    forward = [[i - 1] if i else [] for i in range(length)]
    turn = [[length - 1]]
    backward = [[2 * length - j, j - 1] for j in range(length + 1, 2 * length + 1)]
    return _unit([*forward, *turn, *backward], length)


def chain_a_extra(length: int, budget: int) -> int:
    """Fewest repetitions of `chain_a(length)` with room for `budget` values, at least 3."""
    return forward_steps(length + 1, budget - 2) - length


def chain_b(length: int) -> Problem:
    """The program of the DTR paper: forward `t_i = f(t_{i-1})`, backward `g_i = f'(t_{i-1}, g_{i+1})`.

    `length` nodes of each kind, all of cost and size one; `t_0` is an argument and takes no room. Peak `length`.
    """
    forward = [[i - 1] if i else [] for i in range(length)]
    backward: list[list[int]] = []
    for i in range(length, 0, -1):
        reads = [i - 2] if i >= 2 else []
        if i < length:
            reads.append(length + len(backward) - 1)
        backward.append(reads)
    return _unit([*forward, *backward], length)


def chain_b_extra(length: int, budget: int) -> int:
    """Fewest repetitions of `chain_b(length)` with room for `budget` values, at least 3."""
    return forward_steps(length - 1, budget - 2) - (length - 2)


def _unit(inputs: list[list[int]], turn: int) -> Problem:
    count = len(inputs)
    repeatable = [node < turn for node in range(count)]
    return Problem.of([1] * count, [1] * count, inputs, repeatable=repeatable, turn=turn)
