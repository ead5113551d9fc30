"""`Ilp`: the cheapest program known to fit a budget.

The joint graph is coarsened to its buffers (`remat.policies.buffers.condense`), and the sequence of kernels is
optimised: every forward kernel runs once, every backward kernel once, and between the backward kernels forward
kernels run again, as often as it pays. Several planners start, and the best start is improved:

1. minimum cuts (Yu & He), Chen's segments and their recursion, the cuts of the Lagrangian bound, and for chains of
   blocks the exact dynamic program (Beaumont, Herrmann et al.);
2. local search on the executed sequence (Imanishi et al. 2024); up to 350 buffers, where more than 4 % lie
   between its result and the bound, hotter and from several seeds, and a bound from several moments at once
   (`remat.policies.exact.joint_bound`);
3. Checkmate's integer program (Jain et al. 2020), restricted to what JAX executes, on HiGHS: for small graphs, and
   up to 350 buffers where more than 2 % lie between the search's result and the bound.

Guarantee: the sequence replays within the budget (`remat.policies.solvers.problem.replay`). The certificate holds a
proven lower bound on the cost of sequences of the coarsened graph: that of a Lagrangian minimum cut and of several
moments hold for all of them, the integer program's for those that run nodes again in the program's order, each at
most once between two first runs (Checkmate's stages); the certificate says which. Without a budget the limit is the
peak of keeping everything: nothing runs again.

Within a budget the graph is planned with the rewrites that `implementations` names, and where the starts find
no rewrite nearly as cheap, without them, too: what a rewrite reads instead may have to stay a little longer.

The body of a loop without a budget is planned by `min_cut`. What a body keeps is copied into an array of all
iterations and read back from it, so keeping everything is not the fastest program there. The sequence counts
kernels, not these copies; the cut counts what is kept as traffic. Its certificate is then that of the cut. With
`objective="flops"` a body keeps everything, too: nothing takes fewer operations.

Complexity: starts near linear; search `effort` proposals of logarithmic cost each; the integer program is
exponential. All of it ends after `seconds`, with the best sequence by then: searches and solvers ask several times
a second, loops ask between two steps; one minimum cut, one of Chen's segmentations and one row of the dynamic
program run to their end (milliseconds up to a thousand buffers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from remat.core.deadline import limited, seconds_left
from remat.core.devices import get_device
from remat.core.errors import BudgetError, PolicyError, number_or_nan
from remat.core.graph import Alternatives, Graph, Implementations
from remat.core.interrupt import ended, say, solver_says
from remat.policies.base import BudgetPolicy, Decision, check_implementations
from remat.policies.buffers.condense import Condensed, Objective, condense
from remat.policies.buffers.within import (
    EFFORT,
    TOLERANCE,
    Pool,
    decision_of,
    first_bound,
    infeasible,
    starts,
)
from remat.policies.exact.joint_bound import joint_bound
from remat.policies.exact.milp import solve_restricted
from remat.policies.min_cut import MinCut
from remat.policies.solvers.problem import peak_of_order
from remat.policies.solvers.search import is_ready, search

__all__ = ["Ilp", "MeasuredCosts"]

# The numbers of this module say what is worth seconds. They change how close to the bound a plan comes, which its
# certificate says; they were chosen by look on the networks of benchmarks/results/planners_2cores.json, and
# `python -m benchmarks.planners` repeats that table.
#
# Nodes that the integer program copes with: it improved U-Net's 185 there; the next larger graph has 788.
_EXACT_LIMIT = 350
# Gaps as shares of the program's cost: one that the integer program may close, and one at which hot searches and a
# dearer bound are tried as well. Of the graphs in reach only U-Net within half of its peak and less is as far off.
_UNCLEAR, _WIDE = 0.02, 0.04
# Hot searches, each from the sequence without repetitions, how hot, and searches after them, from the best. The
# last was raised from 6 for U-Net, which takes 35 s with all of this. They only ever replace a plan by a cheaper
# one.
_RESTARTS, _HEAT, _POLISHES = 6, 10.0, 10
# No rewrite is planned beside the rewrites if the starts find it at most this many times as dear. What is
# left out is a plan without rewrites that is cheaper after all; planning it in any case would double the seconds.
_CLOSE = 1.02
# Of the limit: for the integer program, for the bound from several moments, and for a gap that is only unclear.
# What comes before them and after them needs the rest; by look.
_EXACT_SHARE, _BOUND_SHARE, _UNCLEAR_SHARE = 1 / 3, 1 / 3, 1 / 12
_BODY_NOTE = "loop body: a minimum cut, because what is kept is written and read in every iteration"

Method = Literal["auto", "exact", "search", "starts"]


class MeasuredCosts(Protocol):
    """What `remat.cost.measure` returns: seconds of operators of the graph with this fingerprint."""

    @property
    def fingerprint(self) -> str:
        """Of the joint graph that was measured."""
        ...

    @property
    def measured_seconds(self) -> Mapping[int, float]:
        """Seconds by operator id."""
        ...


@dataclass(frozen=True)
class Ilp(BudgetPolicy):
    """Plans within a budget; see the module docstring.

    Attributes:
        objective: what recomputation costs: roofline `seconds`, or `flops`.
        method: `search` never runs the integer program, `exact` always, `starts` not even the search; `auto` runs
            it where it pays.
        exact_limit: nodes up to which `auto` always runs the integer program.
        seconds: limit on the processor time of one planning, whatever runs inside. A plan that hits it, or whose
            integer program hits its share, may differ between runs.
        effort: proposals of the local search per node; its result is the same in every run, unless the time is up.
        tolerance: how far above the proven bound a plan may be, as a share of the program's cost, for a
            twentieth of that effort to be enough.
        costs: measured seconds of this function's operators, from `remat.cost.measure(fun, *args)`; loop
            bodies keep their estimates.
        device: whose roofline prices the nodes.
        implementations: which rewrites of the backward pass to plan with: `exact` for those whose gradients are
            bit-equal, `none`, `all`, or names of rules or kinds; see `remat.rewrite.rules`.
    """

    objective: Objective = "seconds"
    method: Method = "auto"
    exact_limit: int = 60
    seconds: float = 60.0
    effort: int = EFFORT
    tolerance: float = TOLERANCE
    costs: MeasuredCosts | None = field(default=None, repr=False)
    device: str = "h200"
    implementations: Implementations = "exact"
    name: ClassVar[str] = "ilp"
    falls_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.objective not in ("seconds", "flops"):
            raise PolicyError(f"Ilp(objective={self.objective!r}): expected 'seconds' or 'flops'")
        if self.method not in ("auto", "exact", "search", "starts"):
            raise PolicyError(
                f"Ilp(method={self.method!r}): expected 'auto', 'exact', 'search' or 'starts'"
            )
        numbers = (self.seconds, self.effort, self.exact_limit, self.tolerance)
        if not all(number_or_nan(number) >= 0 for number in numbers) or self.seconds == 0:
            raise PolicyError(
                f"Ilp(seconds={self.seconds!r}, effort={self.effort!r}, exact_limit={self.exact_limit!r}, "
                f"tolerance={self.tolerance!r}): expected positive numbers"
            )
        get_device(self.device)
        check_implementations("Ilp", self.implementations)

    def shortlist(self, menu: Alternatives, budget_bytes: int | None) -> tuple[frozenset[str], ...]:
        """Returns sets of sites to plan with: those wanted, and none where the starts come close to them.

        A rewrite can make a plan dearer: what it reads instead may have to stay a little longer.

        Args:
            menu: what there is.
            budget_bytes: what plans have to fit in, None for no limit.
        """
        wanted, nothing = self.sites(menu, budget_bytes), frozenset[str]()
        if not wanted or budget_bytes is None or menu.graph(nothing).multiplicity > 1:
            return (wanted,)
        ours, theirs = (
            self.quick_cost(menu.graph(chosen), budget_bytes) for chosen in (wanted, nothing)
        )
        return (wanted, nothing) if theirs <= _CLOSE * ours < math.inf else (wanted,)

    def quick_cost(self, graph: Graph, budget_bytes: int) -> float:
        """Returns what the starts alone make of a graph: the certificate's cost, infinity where nothing fits."""
        try:
            decision = replace(self, method="starts", costs=None).decide_within(graph, budget_bytes)
        except BudgetError:
            return math.inf
        assert decision.certificate is not None
        return float(decision.certificate.value)

    def decide(self, graph: Graph) -> Decision:
        """Returns the plan without a budget: it keeps everything; of a loop's body, what `min_cut` keeps."""
        if graph.multiplicity > 1 and self.objective == "seconds":
            decision = MinCut(device=self.device).decide(graph)
            return replace(decision, notes=(_BODY_NOTE, *decision.notes))
        condensed = self._condensed(graph)
        return self._solve(condensed, peak_of_order(condensed.problem))

    def decide_within(self, graph: Graph, budget_bytes: int) -> Decision:
        """Returns the cheapest decision found whose buffers peak at no more than `budget_bytes`.

        Raises:
            BudgetError: none was found.
        """
        return self._solve(self._condensed(graph), budget_bytes)

    def _condensed(self, graph: Graph) -> Condensed:
        measured = None
        if self.costs is not None:
            if self.costs.fingerprint != graph.fingerprint():
                raise PolicyError(
                    "Ilp(costs=...): these costs were measured for another function, or for other shapes or "
                    "other differentiated arguments. Measure again with remat.cost.measure(fun, *args)."
                )
            measured = self.costs.measured_seconds
        return condense(graph, device=self.device, objective=self.objective, op_seconds=measured)

    def _solve(self, condensed: Condensed, budget_bytes: int) -> Decision:
        with limited(self.seconds):
            return self._solved(condensed, budget_bytes)

    def _solved(self, condensed: Condensed, budget_bytes: int) -> Decision:
        problem = condensed.problem
        pool = Pool(problem, budget_bytes)
        everything = pool.offer("keep all", problem.first_runs.tolist())
        if everything.replayed.peak_bytes <= budget_bytes:
            return decision_of(condensed, everything, 0.0, ())
        bound = first_bound(self.name, problem, budget_bytes)
        if bound.smallest_bytes > budget_bytes:
            pool.offer_all(starts(condensed, frugal=True))
            raise infeasible(condensed, budget_bytes, pool.smallest, bound.smallest_bytes)
        pool.begin(condensed, bound)
        proven, notes = self._improve(pool, bound.bound)
        if pool.best is None:
            raise infeasible(condensed, budget_bytes, pool.smallest, bound.smallest_bytes)
        return decision_of(condensed, pool.best, proven, notes, pool.covers)

    def _improve(self, pool: Pool, proven: float) -> tuple[float, tuple[str, ...]]:
        """Improves the pool's best; returns the bound and notes."""
        if self.method == "starts" or ended():
            return proven, ()
        count = len(pool.problem)
        notes = list(
            pool.improve(
                self.name,
                proven,
                effort=self.effort,
                tolerance=self.tolerance,
                thorough=self.method == "search",
            )
        )
        if self.method == "auto" and count <= _EXACT_LIMIT and not ended():
            proven, more = self._narrow(pool, proven)
            notes += more
        unclear = not pool.within(proven, _UNCLEAR) and count <= _EXACT_LIMIT
        if ended():
            return proven, tuple(notes)
        if self.method == "exact" or (self.method == "auto" and count <= self.exact_limit):
            proven, note = self._exact(pool, proven, _EXACT_SHARE * self.seconds)
            notes.append(note)
        elif self.method == "auto" and unclear:
            proven, note = self._exact(pool, proven, _UNCLEAR_SHARE * self.seconds)
            notes.append(note)
        return proven, tuple(notes)

    def _narrow(self, pool: Pool, proven: float) -> tuple[float, tuple[str, ...]]:
        """Where few large results fill the budget: hot searches, then the bound from several moments."""
        problem = pool.problem
        notes: list[str] = []
        if not is_ready() or pool.within(proven, _WIDE):
            return proven, ()
        proposals = max(1, self.effort) * len(problem)
        for seed in range(_RESTARTS):
            if ended():
                break
            say(f"{self.name}: hot search {seed + 1} of {_RESTARTS}, from {pool.extra}")
            found = search(
                problem,
                pool.budget_bytes,
                proposals=proposals,
                seed=seed,
                heat=_HEAT,
                stop=ended,
            )
            pool.offer(f"hot search {seed}", found.sequence.tolist())
        for seed in range(_POLISHES):
            if ended():
                break
            say(f"{self.name}: search {seed + 1} of {_POLISHES} from the best, {pool.extra}")
            found = search(
                problem,
                pool.budget_bytes,
                start=pool.start,
                proposals=proposals,
                seed=_RESTARTS + seed,
                heat=1.0 + seed % 2,
                stop=ended,
            )
            pool.offer("hot search, searched on", found.sequence.tolist())
        if ended():
            return proven, ("hot searches: ended before the last",)
        notes.append(f"hot searches: {_RESTARTS}, then {_POLISHES} from the best")
        if pool.best is not None and not pool.within(proven, _WIDE):
            say(f"{self.name}: a bound from several moments, for {pool.extra}")
            enough = pool.best.replayed.extra_cost - _UNCLEAR * problem.total_cost
            joint = joint_bound(
                problem,
                pool.budget_bytes,
                seconds=min(_BOUND_SHARE * self.seconds, seconds_left()),
                enough=enough,
                stop=ended,
            )
            proven = max(proven, min(joint.bound, pool.best.replayed.extra_cost))
            notes.append(f"bound from {joint.stages} moments")
        return proven, tuple(notes)

    def _exact(self, pool: Pool, proven: float, seconds: float) -> tuple[float, str]:
        seconds = min(seconds, seconds_left())
        say(f"{self.name}: integer program, {seconds:.0f} s at most, from {pool.extra}")
        solved = solve_restricted(
            pool.problem,
            pool.budget_bytes,
            start=pool.start,
            seconds=seconds,
            stop=ended,
            progress=solver_says(f"{self.name}: integer program", pool.problem.total_cost),
        )
        if solved.sequence is not None:
            pool.offer("integer program", solved.sequence)
        return pool.proven_by(solved, proven), f"integer program: {solved.status}"
