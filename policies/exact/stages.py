"""Stages: between which first runs what may be kept and what may run again; and their merging in relaxations.

Checkmate's stages (Jain et al., MLSys 2020, section 4): stage `t` ends with the first run of node `t`, and before
it nodes smaller than `t` run again, in their order, each at most once. Restricted to what JAX executes: the forward
pass (`t < turn`) repeats nothing, and only repeatable nodes are repeated.

Planned here for the programs of `staged_model` and `monet_model`: which values have a later need (walked back from
the last stage), which repetitions fit beside the values that must be alive in that stage in any case, and in which
stages everything that could be of use fits at once, so that no memory row is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from remat.policies.solvers.choice import ChoiceProblem
from remat.policies.solvers.problem import Problem

__all__ = [
    "Demands",
    "Stage",
    "choice_stages",
    "num_variables",
    "plan_stages",
    "relax_stages",
    "stages_of_demands",
    "when_needed",
    "without_idle_repeats",
]

Nodes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Stage:
    """First runs of nodes `first..last`, preceded by repetitions.

    Attributes:
        kept: values that may be worth keeping into this stage, ascending.
        repeats: nodes that may run again in it, ascending.
        rows: where the budget is imposed: `all` positions, the `last` first run only, or nowhere (`none`). `all`
            takes `first == last`.
    """

    first: int
    last: int
    kept: tuple[int, ...]
    repeats: tuple[int, ...]
    rows: Literal["all", "last", "none"]

    @property
    def bounded(self) -> bool:
        """Whether every position has its row."""
        return self.rows == "all"


@dataclass(frozen=True, eq=False)
class Demands:
    """What stages are planned from, for nodes whose implementation may be open.

    Attributes:
        turn: repetitions come after the first runs of all nodes below it.
        repeatable: by node, whether it may run again.
        sizes: bytes of its result; `own_bytes`: those that a run adds at least.
        least_work, most_work: extra bytes while it runs.
        may_read: for every node what it reads in some implementation; `must_read`: in all of them.
        last_reader: the last node that reads it in any case, -1 if there is none.
    """

    turn: int
    repeatable: Sequence[bool]
    sizes: Sequence[int]
    own_bytes: Sequence[int]
    least_work: Sequence[int]
    most_work: Sequence[int]
    may_read: Nodes
    must_read: Nodes
    last_reader: Sequence[int]

    @classmethod
    def of(cls, problem: Problem) -> Demands:
        """The demands of a problem, in which nothing is open."""
        sizes, work = problem.sizes.tolist(), problem.extra_while_running.tolist()
        return cls(
            turn=problem.turn,
            repeatable=problem.repeatable.tolist(),
            sizes=sizes,
            own_bytes=sizes,
            least_work=work,
            most_work=work,
            may_read=problem.inputs,
            must_read=problem.inputs,
            last_reader=[row[-1] if row else -1 for row in problem.users],
        )

    @classmethod
    def of_choices(cls, problem: ChoiceProblem, in_place: bool) -> Demands:
        """The demands of all selections; `in_place`: results may be written over inputs."""
        sizes = problem.sizes.tolist()
        last_reader = [-1] * len(problem)
        for node in problem.certain:
            for read in problem.common_inputs[node]:
                last_reader[read] = node
        certain = set(problem.certain)
        return cls(
            turn=problem.turn,
            repeatable=problem.repeatable.tolist(),
            sizes=sizes,
            own_bytes=[
                0 if in_place and target is not None else size
                for size, target in zip(sizes, problem.in_place, strict=True)
            ],
            least_work=[min(c.workspace_bytes for c in choices) for choices in problem.choices],
            most_work=[max(c.workspace_bytes for c in choices) for choices in problem.choices],
            may_read=problem.every_input,
            must_read=problem.common_inputs,
            last_reader=[last if i in certain else -1 for i, last in enumerate(last_reader)],
        )


def plan_stages(problem: Problem, budget_bytes: int) -> list[Stage]:
    """Returns the stages of a problem from the turn on; see `stages_of_demands`."""
    return stages_of_demands(Demands.of(problem), budget_bytes)


def choice_stages(
    problem: ChoiceProblem, budget_bytes: int, *, in_place: bool = False
) -> list[Stage]:
    """Returns the stages from the turn on for every selection at once; see `stages_of_demands`."""
    return stages_of_demands(Demands.of_choices(problem, in_place), budget_bytes)


def stages_of_demands(demands: Demands, budget_bytes: int) -> list[Stage]:
    """Returns the stages from the turn on, those without pressure merged. O(nodes * (nodes + edges)).

    Args:
        demands: what may be read, and what is read in any case.
        budget_bytes: repetitions that cannot fit are left out, and stages in which all that could be of use fits
            are not bounded.
    """
    sizes, repeatable = demands.sizes, demands.repeatable
    stages: list[Stage] = []
    useful: set[int] = set()
    for t in range(len(sizes) - 1, demands.turn - 1, -1):
        useful.discard(t)
        useful.update(demands.may_read[t])
        fixed = {i for i in useful if not repeatable[i] and demands.last_reader[i] >= t}
        fixed_bytes = sum(sizes[i] for i in fixed)
        repeats: list[int] = []
        # Descending, so that the readers of a node are decided before the node.
        for i in range(max(useful, default=-1), -1, -1):
            if i not in useful or not repeatable[i]:
                continue
            beside = sum(sizes[r] for r in demands.must_read[i] if r not in fixed)
            least = beside + demands.own_bytes[i] + demands.least_work[i]
            if fixed_bytes + least > budget_bytes:
                continue
            repeats.append(i)
            useful.update(demands.may_read[i])
        everything = sum(sizes[i] for i in useful) + sizes[t]
        work = max([demands.most_work[t], *(demands.most_work[i] for i in repeats)])
        rows = "all" if everything + work > budget_bytes else "none"
        stages.append(Stage(t, t, tuple(sorted(useful)), tuple(reversed(repeats)), rows))
    stages.reverse()
    merged: list[Stage] = []
    for stage in stages:
        before = merged[-1] if merged else None
        if before is not None and before.rows == stage.rows == "none":
            merged[-1] = Stage(before.first, stage.last, before.kept, before.repeats, "none")
        else:
            merged.append(stage)
    return merged


def relax_stages(
    stages: Sequence[Stage], checked: Collection[int], exact: Collection[int]
) -> list[Stage]:
    """Merges the stages of `plan_stages` for a relaxation that imposes the budget at few positions.

    A merged stage imposes it at its last first run only. Sequences of the original stages stay feasible at the same
    cost or less: repetitions of one node within a merged stage count once, and fewer rows hold.

    Args:
        checked: nodes whose first runs end a merged stage.
        exact: stages (by their first run) that stay as they are.
    """
    merged: list[Stage] = []
    opened: Stage | None = None
    for stage in stages:
        if stage.bounded and stage.first in exact:
            if opened is not None:
                merged.append(opened)
                opened = None
            merged.append(stage)
            continue
        first, kept, repeats = stage.first, stage.kept, stage.repeats
        if opened is not None:
            # Later stages may repeat nodes that do not fit in the first one.
            first, kept = opened.first, opened.kept
            repeats = tuple(sorted({*opened.repeats, *(i for i in repeats if i < first)}))
        opened = Stage(first, stage.last, kept, repeats, "none")
        if stage.last in checked and stage.bounded:
            merged.append(replace(opened, rows="last"))
            opened = None
    if opened is not None:
        merged.append(opened)
    return merged


def num_variables(stages: Sequence[Stage]) -> int:
    """Returns how many values are kept or repeated in all stages: a measure of the program's size."""
    return sum(len(stage.kept) + len(stage.repeats) for stage in stages)


def when_needed(inputs: Nodes, first: int, last: int, chosen: Collection[int]) -> list[int]:
    """Returns first runs `first..last` with repetitions where they are first needed, the others before `last`.

    Args:
        inputs: for every node what it reads.
        chosen: what runs again between the first runs, each node once.
    """
    waiting = set(chosen)
    order: list[int] = []
    for node in range(first, last + 1):
        now: set[int] = set(waiting) if node == last else set()
        stack = [node]
        while stack:
            for read in inputs[stack.pop()]:
                if read in waiting and read not in now:
                    now.add(read)
                    stack.append(read)
        waiting -= now
        order += [*sorted(now), node]
    return order


def without_idle_repeats(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """Leaves out repetitions whose copy nobody reads, also those that only served such ones."""
    wanted: set[int] = set()
    kept: list[int] = []
    first = [-1] * len(problem)
    for position, node in enumerate(sequence):
        if first[node] < 0:
            first[node] = position
    for position in range(len(sequence) - 1, -1, -1):
        node = int(sequence[position])
        if first[node] != position and node not in wanted:
            continue
        wanted.discard(node)
        wanted.update(problem.inputs[node])
        kept.append(node)
    kept.reverse()
    return kept
