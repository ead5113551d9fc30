"""Sequences that hold some forward values and compute the others again when a backward node reads them.

The recomputation starts as late as the backward order allows and never computes what nobody reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from remat.core.errors import PolicyError
from remat.policies.solvers.problem import Problem

__all__ = ["Emitter", "check_forward", "kept_at_turn", "needed_again", "sequence_of_saved"]


class Emitter:
    """Writes a sequence while keeping track of which results it means to hold.

    `held` is a decision, not liveness: a held value that nobody reads afterwards is freed by `replay` anyway.

    Attributes:
        sequence: nodes run so far.
        held: nodes whose result later nodes may read without computing it again.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sequence: list[int] = []
        self.held: set[int] = set()

    def run(self, node: int) -> None:
        """Runs a node whose inputs are held."""
        self.sequence.append(node)
        self.held.add(node)

    def missing(self, wanted: Iterable[int]) -> list[int]:
        """Returns what must run so that all of `wanted` are held, in running order."""
        found: set[int] = set()
        todo = [node for node in wanted if node not in self.held]
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            todo += [r for r in self.problem.inputs[node] if r not in self.held and r not in found]
        return sorted(found)

    def obtain(self, wanted: Iterable[int]) -> list[int]:
        """Computes what is missing of `wanted` and holds it; returns the nodes that ran."""
        ran = self.missing(wanted)
        for node in ran:
            self.run(node)
        return ran

    def drop(self, nodes: Iterable[int]) -> None:
        """Stops holding `nodes`."""
        self.held.difference_update(nodes)


def needed_again(
    problem: Problem, saved: Collection[int], also: Collection[int] = ()
) -> tuple[frozenset[int], frozenset[int]]:
    """Returns what the backward pass reads or must compute again if `saved` are kept.

    Walks back from what backward nodes read, and from `also`, and stops at kept values; nodes that must not be
    repeated are kept in any case.

    Returns:
        `(kept, repeated)`: the forward values the walk stops at, and those it goes through.
    """
    held = saved if isinstance(saved, (set, frozenset)) else set(saved)
    kept: set[int] = set()
    repeated: set[int] = set()
    todo = [r for row in problem.inputs[problem.turn :] for r in row if r < problem.turn]
    todo += also
    while todo:
        node = todo.pop()
        if node in kept or node in repeated:
            continue
        if node in held or not problem.repeatable[node]:
            kept.add(node)
        else:
            repeated.add(node)
            todo += problem.inputs[node]
    return frozenset(kept), frozenset(repeated)


def sequence_of_saved(problem: Problem, saved: Collection[int]) -> tuple[int, ...]:
    """Returns the sequence that holds exactly `saved` across the turn and computes the rest again on demand.

    What is computed again is held until its last reader, so that no node runs more than twice.

    Args:
        problem: forward nodes before `problem.turn`, backward nodes after it.
        saved: forward nodes; values the backward pass never reaches are freed by themselves, nodes that must
            not be repeated are added where it reaches them.

    Complexity: linear.

    Raises:
        PolicyError: `saved` names a node of the backward pass.
    """
    check_forward("saved", saved, problem)
    emitter = Emitter(problem)
    emitter.sequence = list(range(problem.turn))
    emitter.held = set(needed_again(problem, saved)[0])
    for node in range(problem.turn, len(problem)):
        emitter.obtain(problem.inputs[node])
        emitter.run(node)
    return tuple(emitter.sequence)


def kept_at_turn(problem: Problem, sequence: Sequence[int]) -> frozenset[int]:
    """Returns the forward nodes whose result is made before the turn and read after it.

    Args:
        problem: as for `replay`.
        sequence: a valid sequence.
    """
    again: set[int] = set()
    kept: set[int] = set()
    for node in sequence[problem.turn :]:
        kept.update(r for r in problem.inputs[node] if r < problem.turn and r not in again)
        if node < problem.turn:
            again.add(node)
    return frozenset(kept)


def check_forward(name: str, nodes: Collection[int], problem: Problem) -> None:
    """Raises a PolicyError if any of `nodes`, an argument called `name`, is not a forward node."""
    wrong = [node for node in nodes if not 0 <= node < problem.turn]
    if wrong:
        raise PolicyError(
            f"{name} contains {wrong[:5]}: expected nodes from 0 to {problem.turn - 1}"
        )
