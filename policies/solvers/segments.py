"""Chen et al. 2016 on general graphs: segments kept at their borders, a recursion, cheap results dropped.

"Training Deep Nets with Sublinear Memory Cost" (Chen, Xu, Zhang, Guestrin): sections 4.2 to 4.4, Algorithms 2
and 3, appendix A. All functions take a `Problem` whose forward nodes come before `problem.turn` and whose
backward nodes run once after it, and return sequences that `replay` judges.

All planners share one mechanism (`remat.policies.solvers.on_demand`): the forward pass runs once, and before every
backward node exactly those forward values that it reads and that are no longer held are computed again, from those
that are.

Guarantees: valid on every graph; deterministic; `sqrt_segments`, `budgeted_segments` and `drop_cheap` compute no
node more than twice (the extra cost is at most one forward pass). On a unit chain of n nodes in segments of k the
peak is about n/k + k, hence about 2 sqrt(n); `recursive_segments` needs about k log(n) / log(k + 1) and
n log(n) / log(k + 1) extra work.

Departures from the paper:

1. A split keeps every value that crosses it, not one node's output, so skip connections may cross.
2. The last segment is not computed again: the backward pass starts there, and holding it costs what computing
   it again would cost in memory, and no time.
3. Values that a backward node of a later segment reads are kept, otherwise their segment would be computed long
   before its own turn.
4. Where splits may lie (the paper's set C) is found from the graph: where the bytes that cross are a local
   minimum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.core.errors import PolicyError
from remat.policies.solvers.on_demand import (
    Emitter,
    check_forward,
    kept_at_turn,
    needed_again,
    sequence_of_saved,
)
from remat.policies.solvers.problem import Problem, replay

__all__ = [
    "BudgetedPlan",
    "SegmentPlan",
    "budgeted_segments",
    "crossing_bytes",
    "drop_cheap",
    "grid_search",
    "recursive_segments",
    "sqrt_segments",
]

Ints = npt.NDArray[np.int64]

_GRID = 6  # budgets that Algorithm 3 is run for; the size of the authors' program, memonger


@dataclass(frozen=True)
class SegmentPlan:
    """A sequence and what `replay` says of it.

    Attributes:
        sequence: nodes as executed.
        saved: forward values held across the turn.
        cuts: the forward pass is split before these nodes, ascending.
        peak_bytes: largest number of live bytes.
        extra_cost: cost of all repetitions.
    """

    sequence: tuple[int, ...]
    saved: frozenset[int]
    cuts: tuple[int, ...]
    peak_bytes: int
    extra_cost: float


@dataclass(frozen=True)
class BudgetedPlan(SegmentPlan):
    """The outcome of Algorithm 3.

    Attributes:
        budget_bytes: the parameter b, the bytes a segment may make before it is closed.
        mirror_counts: how often every forward node may be computed again, 0 for those that are kept.
        between_bytes: x, the bytes kept between segments.
        within_bytes: y, the most bytes made in one segment.
    """

    budget_bytes: int
    mirror_counts: tuple[int, ...]
    between_bytes: int
    within_bytes: int


def crossing_bytes(problem: Problem) -> Ints:
    """Returns for every forward node the bytes that earlier forward nodes hand over to it or to later ones.

    Entry `c` is what must be kept to compute the forward nodes from `c` on; it has `turn + 1` entries, the
    first and the last are zero. Nodes that must not be repeated do not count: keeping them is no choice.
    """
    change = np.zeros(problem.turn + 2, np.int64)
    for node in range(problem.turn):
        last = _last_forward_user(problem, node)
        if last >= 0 and problem.repeatable[node]:
            change[node + 1] += problem.sizes[node]
            change[last + 1] -= problem.sizes[node]
    return np.cumsum(change)[: problem.turn + 1]


def sqrt_segments(problem: Problem, k: int | None = None) -> SegmentPlan:
    """Cuts the forward pass into about `k` segments of equal bytes and computes each again once.

    Chen et al., section 4.3 (Algorithm 1 on general graphs). Of all ways to cut such that no segment makes
    more than its share of the bytes that the backward pass reads, the one with the fewest crossing bytes is
    taken (an exact dynamic program; among equals the one with the most even segments).

    Args:
        problem: any problem with a forward and a backward pass.
        k: number of segments, default the rounded square root of the number of forward nodes. There may be
            more where the bytes cannot be divided evenly.

    Complexity: O(n * longest segment), vectorised.

    Raises:
        PolicyError: `k` is not positive.
    """
    if k is None:
        k = max(1, round(math.sqrt(problem.turn)))
    if k < 1:
        raise PolicyError(
            f"sqrt_segments(k={k}): expected at least 1 segment, or None for sqrt(n) of them"
        )
    cuts = _even_cuts(_Profile.of(problem), 0, problem.turn, k)
    return _plan(problem, _saved_of_cuts(problem, cuts), cuts)


def budgeted_segments(
    problem: Problem, budget_b: int, *, candidates: Collection[int] | None = None
) -> BudgetedPlan:
    """Closes a segment as soon as it has made more than `budget_b` bytes (Algorithm 3).

    Args:
        problem: any problem with a forward and a backward pass.
        budget_b: bytes that one segment may make; not the peak.
        candidates: forward nodes before which a split may lie (the paper's C), default the local minima of
            `crossing_bytes`.

    Complexity: linear.

    Raises:
        PolicyError: `budget_b` is negative or a candidate is not a forward node.
    """
    if budget_b < 0:
        raise PolicyError(f"budgeted_segments(budget_b={budget_b}): expected bytes, at least 0")
    check_forward("candidates", candidates or (), problem)
    crossing = crossing_bytes(problem)
    allowed = set(_local_minima(crossing) if candidates is None else candidates)
    cuts: list[int] = []
    made = within = 0
    for node in range(problem.turn):
        made += int(problem.sizes[node])
        if node + 1 in allowed and made > budget_b:
            within = max(within, made)
            made = 0
            cuts.append(node + 1)
    within = max(within, made)
    border = _border(problem, cuts)
    between = sum(int(problem.sizes[node]) for node in border)
    plan = _plan(problem, _saved_of_cuts(problem, cuts), cuts)
    counts = tuple(
        0 if node in border or not problem.repeatable[node] else 1 for node in range(problem.turn)
    )
    return BudgetedPlan(
        plan.sequence,
        plan.saved,
        plan.cuts,
        plan.peak_bytes,
        plan.extra_cost,
        budget_bytes=budget_b,
        mirror_counts=counts,
        between_bytes=between,
        within_bytes=within,
    )


def grid_search(problem: Problem, candidates: int = _GRID) -> BudgetedPlan:
    """Runs Algorithm 3 for several budgets and returns the plan with the smallest peak (appendix A).

    A first run with b = 0 gives x and y, a second with b = sqrt(x y) new ones; then a geometric grid from
    sqrt(x y) / sqrt 2 to sqrt 2 * sqrt(x y) is tried. Ties go to the lower extra cost, then to the smaller b.

    Args:
        problem: any problem with a forward and a backward pass.
        candidates: size of the grid.

    Raises:
        PolicyError: the grid is empty.
    """
    if candidates < 1:
        raise PolicyError(f"grid_search(candidates={candidates}): expected at least 1")
    first = budgeted_segments(problem, 0)
    second = budgeted_segments(problem, _geometric_mean(first))
    middle = _geometric_mean(second)
    steps = np.linspace(-0.5, 0.5, candidates) if candidates > 1 else np.zeros(1)
    budgets = [round(middle * 2.0 ** float(step)) for step in steps]
    tried = [first, second, *(budgeted_segments(problem, b) for b in dict.fromkeys(budgets))]
    return min(tried, key=lambda plan: (plan.peak_bytes, plan.extra_cost, plan.budget_bytes))


def recursive_segments(problem: Problem, k: int = 1) -> SegmentPlan:
    """Cuts every segment again and again into `k + 1` parts: g(n) = k + g(n / (k + 1)) (section 4.4).

    While the backward pass is in a part, the borders to the left of it are held, `k` per level at most.
    Everything in between is computed again when the backward pass gets there, a node up to once per level.

    Args:
        problem: any problem with a forward and a backward pass.
        k: borders per level; 1 gives O(log n) memory and O(n log n) extra work on a chain.

    Complexity: O(n log n) on chains; proportional to the length of the sequence times the number of levels.

    Raises:
        PolicyError: `k` is not positive.
    """
    if k < 1:
        raise PolicyError(
            f"recursive_segments(k={k}): expected at least 1 kept border per level; "
            "sqrt_segments keeps more"
        )
    leaves, cuts = _leaves(problem, k)
    permanent = {n for n in needed_again(problem, frozenset())[0] if not problem.repeatable[n]}
    backward = range(problem.turn, len(problem))
    # The leaf a backward node works in is that of the latest forward value it reads.
    latest = [max((r for r in problem.inputs[b] if r < problem.turn), default=-1) for b in backward]
    for index in range(len(latest) - 2, -1, -1):
        if latest[index] < 0:
            latest[index] = latest[index + 1]
    emitter = Emitter(problem)
    emitter.sequence = list(range(problem.turn))
    emitter.held = set(range(problem.turn))
    for b, place in zip(backward, latest, strict=True):
        if place >= 0:
            allowed = leaves.allowed(place)
            emitter.drop(
                [
                    n
                    for n in emitter.held
                    if n < problem.turn and n not in allowed and n not in permanent
                ]
            )
        emitter.obtain(problem.inputs[b])
        emitter.run(b)
    return _finish(problem, emitter.sequence, cuts)


def drop_cheap(problem: Problem, cheap: Sequence[bool] | npt.NDArray[np.bool_]) -> SegmentPlan:
    """Keeps the results of expensive nodes and computes cheap ones again ("drop low-cost ops", section 4.3).

    In conv - batch norm - relu the convolution is kept and the rest follows from it. Every cheap node runs at
    most twice.

    Args:
        problem: any problem with a forward and a backward pass.
        cheap: for every node, or for every forward node, whether it is worth computing again.

    Raises:
        PolicyError: the length of `cheap` fits neither.
    """
    if len(cheap) not in (problem.turn, len(problem)):
        raise PolicyError(
            f"drop_cheap: cheap has {len(cheap)} entries, expected one per forward node "
            f"({problem.turn}) or per node ({len(problem)})"
        )
    saved = frozenset(node for node in range(problem.turn) if not cheap[node])
    return _plan(problem, saved, ())


class _Leaves:
    """The recursion's parts: which values may be held while the backward pass is at a forward node."""

    def __init__(
        self, problem: Problem, paths: list[tuple[int, ...]], parts: list[tuple[int, int]]
    ):
        self.problem = problem
        self.paths = paths  # by leaf: cuts to its left that its ancestors hold
        self.parts = parts
        self.leaf_of = [leaf for leaf, (low, high) in enumerate(parts) for _ in range(low, high)]
        self.borders: dict[int, frozenset[int]] = {}
        self._allowed: tuple[int, frozenset[int]] = (-1, frozenset())

    def allowed(self, place: int) -> frozenset[int]:
        """Returns the values that may be held while the backward pass is in the leaf of `place`."""
        leaf = self.leaf_of[place]
        if self._allowed[0] != leaf:
            found = set(range(*self.parts[leaf]))
            for cut in self.paths[leaf]:
                found |= self.borders[cut]
            self._allowed = (leaf, frozenset(found))
        return self._allowed[1]


def _leaves(problem: Problem, k: int) -> tuple[_Leaves, tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    parts: list[tuple[int, int]] = []
    used: set[int] = set()
    profile = _Profile.of(problem)
    todo: list[tuple[int, int, tuple[int, ...]]] = [(0, problem.turn, ())]
    while todo:
        low, high, path = todo.pop()
        inner = _spread(_even_cuts(profile, low, high, k + 1), k)
        if not inner:
            paths.append(path)
            parts.append((low, high))
            continue
        used.update(inner)
        bounds = [low, *inner, high]
        for index in range(len(bounds) - 2, -1, -1):
            todo.append((bounds[index], bounds[index + 1], (*path, *inner[:index])))
    leaves = _Leaves(problem, paths, parts)
    leaves.borders = _borders(problem, used)
    return leaves, tuple(sorted(used))


def _spread(cuts: list[int], count: int) -> list[int]:
    """At most `count` of `cuts`, evenly spread."""
    if len(cuts) <= count:
        return cuts
    return [cuts[(index + 1) * len(cuts) // (count + 1)] for index in range(count)]


@dataclass(frozen=True, eq=False)
class _Profile:
    """What cuts are chosen by.

    Attributes:
        crossing: see `crossing_bytes`.
        weights: bytes of the forward values that backward nodes read, which a segment holds while it is
            reversed; 0 for others.
    """

    crossing: Ints
    weights: Ints

    @classmethod
    def of(cls, problem: Problem) -> _Profile:
        read = np.zeros(problem.turn, np.bool_)
        for row in problem.inputs[problem.turn :]:
            read[[r for r in row if r < problem.turn]] = True
        weights = np.where(read, problem.sizes[: problem.turn], 0)
        return cls(crossing_bytes(problem), weights)


def _even_cuts(profile: _Profile, low: int, high: int, parts: int) -> list[int]:
    """Cuts `low .. high` into about `parts` segments at the fewest crossing bytes; see `sqrt_segments`."""
    count = high - low
    if parts <= 1 or count <= 1:
        return []
    weights = profile.weights[low:high]
    total = int(weights.sum())
    if total == 0:
        weights = np.ones(count, np.int64)
        total = count
    cap = max(-(-total // parts), int(weights.max()))
    ends = np.concatenate([[0], np.cumsum(weights)])
    crossing = profile.crossing[low : high + 1].astype(np.float64)
    crossing[-1] = 0.0
    best = np.full(count + 1, np.inf)
    uneven = np.zeros(count + 1)
    segments = np.zeros(count + 1, np.int64)
    before = np.zeros(count + 1, np.int64)
    best[0] = 0.0
    start = 0
    for cut in range(1, count + 1):
        while ends[cut] - ends[start] > cap:
            start += 1
        options = best[start:cut]
        squares = uneven[start:cut] + (ends[cut] - ends[start:cut]).astype(np.float64) ** 2
        # Fewest crossing bytes, then fewest segments, then the most even ones.
        tied = np.flatnonzero(options == options.min())
        fewest = segments[start:cut][tied]
        tied = tied[fewest == fewest.min()]
        choice = int(tied[np.argmin(squares[tied])])
        before[cut] = start + choice
        best[cut] = options[choice] + crossing[cut]
        uneven[cut] = squares[choice]
        segments[cut] = segments[start + choice] + 1
    cuts: list[int] = []
    position = int(before[count])
    while position > 0:
        cuts.append(low + position)
        position = int(before[position])
    return cuts[::-1]


def _borders(problem: Problem, cuts: Iterable[int]) -> dict[int, frozenset[int]]:
    """For every cut the forward values made before it and read by a forward node after it."""
    ordered = sorted(set(cuts))
    found: dict[int, set[int]] = {cut: set() for cut in ordered}
    positions = np.asarray(ordered, np.int64)
    for node in range(problem.turn):
        last = _last_forward_user(problem, node)
        first, after = np.searchsorted(positions, [node + 1, last + 1])
        for index in range(int(first), int(after)):
            found[ordered[index]].add(node)
    return {cut: frozenset(nodes) for cut, nodes in found.items()}


def _border(problem: Problem, cuts: Sequence[int]) -> frozenset[int]:
    return frozenset().union(*_borders(problem, cuts).values())


def _saved_of_cuts(problem: Problem, cuts: Sequence[int]) -> frozenset[int]:
    """Border values, the last segment, and what backward nodes of later segments read."""
    last = cuts[-1] if cuts else 0
    saved = set(_border(problem, cuts)) | set(range(last, problem.turn))
    segment = np.searchsorted(np.asarray(cuts, np.int64), np.arange(problem.turn), side="right")
    for row in problem.inputs[problem.turn :]:
        reads = [r for r in row if r < problem.turn]
        own = max((int(segment[r]) for r in reads), default=0)
        saved.update(r for r in reads if segment[r] < own)
    return frozenset(saved)


def _local_minima(crossing: Ints) -> list[int]:
    """Inner positions where no fewer bytes cross at either neighbour."""
    inner = np.arange(1, len(crossing) - 1)
    left = crossing[inner - 1].astype(np.float64)
    right = crossing[inner + 1].astype(np.float64)
    left[inner == 1] = np.inf  # the ends, where nothing crosses, are no places for a split
    right[inner == len(crossing) - 2] = np.inf
    here = crossing[inner]
    return [int(c) for c in inner[(here <= left) & (here <= right)]]


def _geometric_mean(plan: BudgetedPlan) -> int:
    return math.isqrt(plan.between_bytes * plan.within_bytes)


def _last_forward_user(problem: Problem, node: int) -> int:
    """The last forward node that reads `node`, or -1."""
    return max((u for u in problem.users[node] if u < problem.turn), default=-1)


def _plan(problem: Problem, saved: frozenset[int], cuts: Sequence[int]) -> SegmentPlan:
    return _finish(problem, sequence_of_saved(problem, saved), cuts)


def _finish(problem: Problem, sequence: Sequence[int], cuts: Sequence[int]) -> SegmentPlan:
    judged = replay(problem, sequence)
    kept = kept_at_turn(problem, sequence)
    return SegmentPlan(tuple(sequence), kept, tuple(cuts), judged.peak_bytes, judged.extra_cost)
