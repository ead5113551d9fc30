"""What the planners under a budget share: starts, the choice among them, the certificate, the error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from remat.core.deadline import out_of_time, seconds_left
from remat.core.errors import BudgetError
from remat.core.interrupt import Keyboard, ended, interrupted, say, say_best
from remat.plans.record import Certificate, Status
from remat.plans.report import human_bytes
from remat.policies.base import Decision, largest_named, required_saves
from remat.policies.buffers.condense import Condensed
from remat.policies.buffers.saved_cut import CutRules, saved_cuts
from remat.policies.exact.cut import CutBound, cut_bound, once_each
from remat.policies.exact.milp import Covers, Solved
from remat.policies.solvers.chain.solve import PreparedChain, prepare_chain
from remat.policies.solvers.on_demand import sequence_of_saved
from remat.policies.solvers.problem import Problem, Replayed, replay
from remat.policies.solvers.search import is_compilable, is_ready, search
from remat.policies.solvers.segments import (
    grid_search,
    recursive_segments,
    sqrt_segments,
)

__all__ = [
    "EFFORT",
    "IN_STAGES",
    "TOLERANCE",
    "Candidate",
    "Pool",
    "as_late_as_possible",
    "decision_of",
    "first_bound",
    "infeasible",
    "cuts_of",
    "smallest_known",
    "starts",
    "too_small_message",
]

# The numbers of this module buy better plans with seconds: what is left out costs at most what the certificate's
# gap says, and no plan is above its budget for it. "By look": on networks of `models/`, not derived. Seconds are
# those of benchmarks/results/planners_2cores.json, which `python -m benchmarks.planners` repeats.
EFFORT = 4000
"""Proposals of the local search per node, by look: 800 nodes take about 10 s (planners_2cores.json)."""
_QUICK = 20
"""Part of that effort that comes first: half of the plans of that file are then within `TOLERANCE`, after 1 s."""
TOLERANCE = 0.002
"""Share of the program's cost above the bound at which the first part is enough: all that a plan can lose by it."""
# Of the time left, for a search in Python, so that what comes after it has as much; or, by look, of so many seconds
# where there is no limit.
_SEARCH_SHARE = 0.5
_LONG_SECONDS = 120.0
_FINE = 0.02  # share of a peak to which the smallest one of a chain is sought: so much it can be above it
_CHAIN_LIMIT = 2500  # nodes that differ; the dynamic program across blocks takes minutes beyond
# Stages of the chain of a larger graph, whose layers are many and equal: the table grows with their cube. By look:
# of 96 blocks at 0.7, 0.5 and 0.3 forms of 5 to 17 stages were the cheapest; those of 50 and 100 took most of the
# time.
_LARGE_STAGES = 32
# What to start from. Cuts at `MinCut`'s own price of memory and at a larger one, and Chen's recursion with 8, 4 and
# 2 parts per level (7, 3 and 1 cuts), which is coarse to fine; by look: all are offered, so more of them cost only
# time.
_MEMORY_WEIGHTS = (1.25, 4)
_RECURSIONS = (7, 3, 1)
_MORE_SEGMENTS = 1.5  # the next number of segments, times the last: so few miss by much

IN_STAGES = "bound for sequences that repeat operators in order, each once between two first runs"
"""What a certificate says whose bound is that of the integer program."""

# Costs are reported in whole units of 1e-12 (picoseconds, if costs are seconds).
_UNITS_PER_COST = 10**12


@dataclass(frozen=True, eq=False)
class Candidate:
    """A sequence, where it comes from and what the referee says of it."""

    label: str
    sequence: tuple[int, ...]
    replayed: Replayed


class Pool:
    """Candidates for one problem; all of them are judged by `replay`."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.best: Candidate | None = None
        self.smallest: Candidate | None = None
        self.covers: Covers = "all"  # what a solver's bound speaks of

    def offer(self, label: str, sequence: Sequence[int]) -> Candidate:
        """Judges a sequence and keeps it if it is the cheapest that fits, or the smallest."""
        found = Candidate(label, tuple(int(n) for n in sequence), replay(self.problem, sequence))
        if self.smallest is None or _by_peak(found) < _by_peak(self.smallest):
            self.smallest = found
        if found.replayed.peak_bytes <= self.budget_bytes and (
            self.best is None or _by_cost(found) < _by_cost(self.best)
        ):
            self.best = found
            say_best(f"{self.extra} within {human_bytes(self.budget_bytes)}, by {label}")
        return found

    def offer_all(self, found: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Judges several sequences with their labels, until the time is up."""
        for label, sequence in found:
            self.offer(label, sequence)
            if out_of_time() or (self.best is not None and interrupted()):
                return

    def begin(self, condensed: Condensed, bound: CutBound) -> None:
        """Offers the cuts that the bound met and the starts; the frugal ones if none of them fits."""
        self.offer_all(cuts_of(self.problem, bound))
        for frugal in (False, True):
            if out_of_time() or (frugal and self.best is not None):
                return
            self.offer_all(starts(condensed, frugal=frugal))

    def proven_by(self, solved: Solved, proven: float) -> float:
        """Returns the better of a bound on all sequences and a solver's, and notes what it covers."""
        if solved.bound <= proven:
            return proven
        self.covers = solved.covers
        return solved.bound

    def improve(
        self,
        name: str,
        proven: float,
        *,
        effort: int = EFFORT,
        tolerance: float = TOLERANCE,
        thorough: bool = False,
    ) -> tuple[str, ...]:
        """Improves the best by local search and the dynamic program for chains of blocks; returns notes.

        Args:
            name: of the policy, for what is said meanwhile.
            proven: lower bound on the extra cost.
            effort: proposals of the search per node.
            tolerance: share of the program's cost above the bound at which a twentieth of the effort is enough.
            thorough: take all of the effort in any case.
        """
        if ended():
            return ()
        if len(self.problem) > _CHAIN_LIMIT:
            different = self._chain(name)
            if different:
                return self._improve_layers(name, proven, effort, different, tolerance, thorough)
        notes = [self._search(name, effort // _QUICK, 0)]
        if not thorough and self.within(proven, tolerance):
            return tuple(notes)
        if len(self.problem) <= _CHAIN_LIMIT and not ended():
            self._chain(name)
        if not ended():
            notes.append(self._search(name, effort, 1))
        return tuple(notes)

    def _improve_layers(
        self,
        name: str,
        proven: float,
        effort: int,
        different: int,
        tolerance: float,
        thorough: bool,
    ) -> tuple[str, ...]:
        """Improves a plan of many equal layers, which the dynamic program has planned once.

        The search works on from there: `effort` proposals per node of the layers that differ, in parts, as long as
        they would get within the tolerance at the rate of the last one.
        """
        notes: list[str] = []
        for part in range(_QUICK):
            if ended() or (part > 1 and not is_ready()):  # by the clock, as `improve`
                break
            before = math.inf if self.best is None else self.best.replayed.extra_cost
            notes.append(self._search(name, effort // _QUICK, part, different))
            if thorough:
                continue
            if self.within(proven, tolerance):
                break
            after = math.inf if self.best is None else self.best.replayed.extra_cost
            missing = after - proven - tolerance * (self.problem.total_cost + proven)
            if part and after < math.inf and (before - after) * (_QUICK - part - 1) < missing:
                break
        return tuple(notes)

    def _chain(self, name: str) -> int:
        """Offers what the dynamic program across blocks finds; returns how many nodes differ, 0 without a chain."""
        say(f"{name}: dynamic program across blocks, from {self.extra}")
        keyboard = Keyboard()
        prepared = None
        with keyboard.caught():  # it has nothing to show before it is done
            prepared = _prepared_chain(self.problem)
            chain = None if prepared is None else prepared.solve(self.budget_bytes, stop=ended)
            if chain is not None:
                self.offer("chain", chain.sequence)
        if keyboard.pressed and not interrupted():  # nobody else knows of it
            raise KeyboardInterrupt
        return 0 if prepared is None else prepared.different_nodes

    def _search(self, name: str, effort: int, seed: int, nodes: int | None = None) -> str:
        compiled = is_ready()
        say(f"{name}: local search, from {self.extra}")
        nodes = len(self.problem) if nodes is None else nodes
        found = search(
            self.problem,
            self.budget_bytes,
            start=self.start,
            proposals=max(1, effort) * nodes if compiled else None,
            seconds=_SEARCH_SHARE * min(seconds_left(), _LONG_SECONDS),
            seed=seed,
            compiled=compiled if is_compilable() else None,  # which warns
            stop=ended,
        )
        self.offer("local search", found.sequence.tolist())
        if not compiled:  # how many proposals it makes is for the clock to say
            why = (
                "numba was not compiled yet, and there was no time for it"
                if is_compilable()
                else "pip install numba makes it a hundred times faster"
            )
            return f"local search in Python, ended by the clock: {why}"
        if found.ended in ("stopped", "interrupted"):
            return "local search: ended before its last proposal"
        return f"local search: {found.proposals:,} proposals"

    def within(self, proven: float, tolerance: float) -> bool:
        """Whether the best is at most that share of the program's cost above the bound."""
        if self.best is None:
            return False
        total = self.problem.total_cost
        return self.best.replayed.extra_cost - proven <= tolerance * (total + proven)

    @property
    def extra(self) -> str:
        """What the best costs, in words."""
        if self.best is None:
            return "nothing that fits"
        share = self.best.replayed.extra_cost / max(self.problem.total_cost, 1e-300)
        return f"{100 * share:.2f} % extra"

    @property
    def start(self) -> tuple[int, ...] | None:
        """The sequence to improve: the cheapest that fits, else the smallest."""
        found = self.best or self.smallest
        return found.sequence if found else None


def _prepared_chain(problem: Problem) -> PreparedChain | None:
    """The chain in a problem, measured once for all budgets; None if it has none, or the time was up."""
    key = "prepared chain"
    if key not in problem.memo:
        large = len(problem) > _CHAIN_LIMIT
        prepared = (
            prepare_chain(problem, max_stages=_LARGE_STAGES, max_nodes=_CHAIN_LIMIT, stop=ended)
            if large
            else prepare_chain(problem, stop=ended)
        )
        if ended():  # it may lack forms
            return prepared
        problem.memo[key] = prepared
    return problem.memo[key]


def _by_cost(found: Candidate) -> tuple[float, int]:
    return (found.replayed.extra_cost, found.replayed.peak_bytes)


def _by_peak(found: Candidate) -> tuple[int, float]:
    return (found.replayed.peak_bytes, found.replayed.extra_cost)


def first_bound(name: str, problem: Problem, budget_bytes: int) -> CutBound:
    """Announces a policy's planning and returns the Lagrangian bound to begin with."""
    say(f"{name}: {len(problem):,} buffers within {human_bytes(budget_bytes)}: a bound, and starts")
    return cut_bound(problem, budget_bytes, stop=ended)


def starts(condensed: Condensed, *, frugal: bool = False) -> Iterator[tuple[str, Sequence[int]]]:
    """Sequences to start from: minimum cuts and Chen's segments, or, `frugal`, his recursion."""
    problem = condensed.problem
    if frugal:
        for k in _RECURSIONS:
            yield f"recursion k={k}", recursive_segments(problem, k).sequence
        return
    seen: set[frozenset[int]] = set()
    for heavy in ("ban", "batched", "roofline"):
        key = ("saved cuts", heavy)
        if key not in problem.memo:
            rules = CutRules(heavy=heavy)
            problem.memo[key] = tuple(saved_cuts(condensed.graph, rules, _MEMORY_WEIGHTS))
        for saved in problem.memo[key]:
            nodes = condensed.forward_nodes(saved)
            if nodes not in seen:
                seen.add(nodes)
                yield f"min_cut {heavy}", sequence_of_saved(problem, nodes)
    if "segments" not in problem.memo:
        problem.memo["segments"] = grid_search(problem).sequence
    yield "segments", problem.memo["segments"]


def smallest_known(condensed: Condensed) -> Decision:
    """Returns the decision with the fewest bytes of buffers that quick planners find, whatever it costs."""
    problem = condensed.problem
    pool = Pool(problem, 0)
    pool.offer("keep all", problem.first_runs.tolist())
    pool.offer_all(starts(condensed, frugal=True))
    pool.offer_all(starts(condensed))
    k = 2
    while k < problem.turn and not ended():
        pool.offer(f"sqrt k={k}", sqrt_segments(problem, k).sequence)
        k = max(k + 1, round(k * _MORE_SEGMENTS))
    prepared = _prepared_chain(problem) if len(problem) <= _CHAIN_LIMIT else None
    assert pool.smallest is not None
    low, high = problem.floor_bytes, pool.smallest.replayed.peak_bytes
    while prepared is not None and low < high and not ended():
        middle = (low + high) // 2
        plan = prepared.solve(middle, stop=ended)
        if plan is None:
            low = middle + 1
        else:
            pool.offer("chain", plan.sequence)
            high = min(middle, plan.peak_bytes)
        if high - low < _FINE * high:
            break
    return replace(decision_of(condensed, pool.smallest, 0.0, ()), status="heuristic")


def cuts_of(problem: Problem, bound: CutBound) -> Iterator[tuple[str, Sequence[int]]]:
    """The saved sets that the lower bound met on its way."""
    for found in bound.found:
        yield "cut of the bound", once_each(problem, found)


def as_late_as_possible(problem: Problem, sequence: Sequence[int]) -> tuple[int, ...]:
    """Returns a sequence that repeats the same nodes, each just before it is read for the first time.

    Repetitions that nobody reads are left out. The peak may be higher: what a repetition reads stays longer.
    """
    made: set[int] = set()
    waiting: set[int] = set()
    late: list[int] = []
    for node in sequence:
        if node in made:
            waiting.add(node)
            continue
        made.add(node)
        todo = [node]
        while todo:
            first = [read for read in problem.inputs[todo[-1]] if read in waiting]
            todo += first
            if not first:
                ready = todo.pop()
                if ready in waiting or not todo:  # else it was made for another that reads it, too
                    waiting.discard(ready)
                    late.append(ready)
    return tuple(late)


def _postponed(problem: Problem, found: Candidate) -> Candidate:
    """The candidate with its repetitions as late as possible, unless that raises its peak.

    What may run early, XLA may run even earlier: as soon as the barrier before it allows. A GPT planned for 543 MiB
    so took 549, because what the MLP of one block repeats was made before the attention of the next.
    """
    sequence = as_late_as_possible(problem, found.sequence)
    replayed = replay(problem, sequence)
    if replayed.peak_bytes > found.replayed.peak_bytes:
        return found
    return Candidate(found.label, sequence, replayed)


def decision_of(
    condensed: Condensed,
    found: Candidate,
    bound: float,
    notes: tuple[str, ...],
    covers: Covers = "all",
) -> Decision:
    """Returns the decision behind a sequence, with the bound on its cost as certificate.

    Repetitions are postponed to where they are read if that takes no more memory.

    Args:
        condensed: the problem.
        found: the sequence.
        bound: proven lower bound on the extra cost of any sequence within the budget, 0 if none is known.
        notes: for the reader of the plan.
        covers: which sequences the bound speaks of; see `remat.policies.exact.milp.Solved`. The certificate says
        it.
    """
    problem = condensed.problem
    found = _postponed(problem, found)
    unit = _UNITS_PER_COST if condensed.objective == "seconds" else 1
    total = round((problem.total_cost + found.replayed.extra_cost) * unit)
    least = min(total, round((problem.total_cost + max(bound, 0.0)) * unit))
    kind = "whole program in picoseconds" if unit > 1 else "whole program in flops"
    if covers == "staged":
        kind += f"; {IN_STAGES}"
    status: Status = "optimal" if total == least else "feasible"
    graph = condensed.graph
    saved = condensed.saved(found.sequence)
    savable = all(value.savable for value in graph.values)
    if (
        not savable
    ):  # for `jax.checkpoint`, which keeps named values of the program and follows no order
        saved = required_saves(graph, saved)
    return Decision(
        saved=saved,
        status=status,
        certificate=Certificate(kind, total, least),
        notes=(f"start: {found.label}", *notes),
        order=condensed.backward_order(found.sequence) if savable else None,
        buffer_peak_bytes=found.replayed.peak_bytes if savable else None,
    )


def infeasible(
    condensed: Condensed, budget_bytes: int, smallest: Candidate | None, least_bytes: int
) -> BudgetError:
    """Returns the error for a budget that nothing was found for."""
    return BudgetError(
        too_small_message(condensed, budget_bytes, smallest, least_bytes),
        smallest_peak_bytes=None if smallest is None else smallest.replayed.peak_bytes,
    )


def too_small_message(
    condensed: Condensed, budget_bytes: int, smallest: Candidate | None, least_bytes: int
) -> str:
    """Says what the smallest peak found is, what no plan can go below, and which values force it."""
    graph, problem = condensed.graph, condensed.problem
    node = int(problem.needs.argmax()) if len(problem) else 0
    least_bytes = max(least_bytes, problem.floor_bytes)
    lines = [f"no plan within a budget of {budget_bytes:,} bytes was found."]
    if smallest is not None:
        lines.append(f"Smallest peak found: {smallest.replayed.peak_bytes:,} bytes.")
    lines.append(f"No plan can go below {least_bytes:,} bytes.")
    if len(problem):
        op = graph.ops[condensed.roots[node]]
        values = [
            graph.values[v] for n in (*problem.inputs[node], node) for v in condensed.values_of[n]
        ]
        named = largest_named(
            (v.label, "" if v.producer is None else graph.ops[v.producer].name, v.nbytes)
            for v in values
        )
        where = f" at {op.source}" if op.source else ""
        lines.append(
            f"The largest operator is {op.name}{where}, which needs {int(problem.needs[node]):,} bytes "
            f"at once: {named}."
        )
    lines.append("Raise the budget, use a smaller batch, or split that operator.")
    return " ".join(lines)
