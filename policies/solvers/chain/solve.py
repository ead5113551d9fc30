"""Applies revolve and the dynamic program to the chain in a problem.

A general graph is solved with fine and with coarse stages, since one value inside a stage can be left out while its
neighbours are held, which sweeps cannot do (a departure from rotor, besides those of
`remat.policies.solvers.chain.program`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from remat.core.errors import PolicyError
from remat.policies.solvers.chain.find import Chain, Segment, chain_of
from remat.policies.solvers.chain.measure import measured, stage_kinds
from remat.policies.solvers.chain.program import SLOTS, solve_stages
from remat.policies.solvers.chain.revolve import revolve_schedule
from remat.policies.solvers.chain.schedule import ChainStage
from remat.policies.solvers.chain.write import ChainPlan, judged, run_steps, write_out
from remat.policies.solvers.problem import Problem

__all__ = ["PreparedChain", "prepare_chain", "revolve", "solve_chain"]

# These bound the time: a chain cut otherwise could have a cheaper plan. Chosen by look.
_MAX_STAGES = 100  # the table grows with their cube
_MAX_OPTIONS = 16  # sets that a stage may tape
_COARSEST = (
    512  # forward nodes per stage up to which stages are merged; larger ones are slow to measure
)


def revolve(chain: Chain, snapshots: int) -> ChainPlan:
    """Applies the binomial schedule to a chain, whatever its stages cost.

    It is optimal where all stages are equal; the budget is in snapshots, not bytes. Nothing is taped: every
    stage is computed from its input just before it is reversed.

    Args:
        chain: see `chain_of`; its number of stages is the number of steps.
        snapshots: stage inputs that may be held at a time, the first stage's included.

    Raises:
        PolicyError: `snapshots` is not positive.
    """
    plan = revolve_schedule(len(chain.segments), snapshots)
    return judged(chain, plan, write_out(chain, plan.steps, lambda stage, option: ((), False)))


def solve_chain(
    problem: Problem,
    budget_bytes: int,
    *,
    chain: Chain | None = None,
    slots: int = SLOTS,
    max_stages: int = _MAX_STAGES,
    max_options: int = _MAX_OPTIONS,
    stop: Callable[[], bool] | None = None,
) -> ChainPlan | None:
    """Applies the dynamic program to the chain in a problem.

    Within a stage an option may leave out any value, across stages the program can only checkpoint or tape.
    Fine stages therefore suit small budgets, coarse ones large budgets: the chain is solved as found and with
    its stages merged until each has 2, 4, 8, ... 512 forward nodes, and the cheapest plan is returned (among equal
    ones that with the smaller peak).

    Args:
        problem: forward nodes before `problem.turn`, backward nodes after it.
        budget_bytes: bound on the peak of `replay`.
        chain: of `problem`; if given it is solved as it is, without other ways to merge its stages.
        slots: see `solve_stages`.
        max_stages: stages are merged at least until there are no more than that.
        max_options: see `remat.policies.solvers.chain.measure.stages_of`.
        stop: asked before every form of the chain and every row of a table; True ends with the best so far.

    Returns:
        A plan whose peak, by `replay`, is within the budget; `None` if the problem has no chain or no
        schedule of this kind fits.

    Raises:
        PolicyError: a number is out of range.
    """
    prepared = prepare_chain(
        problem, chain=chain, max_stages=max_stages, max_options=max_options, stop=stop
    )
    return None if prepared is None else prepared.solve(budget_bytes, slots=slots, stop=stop)


def prepare_chain(
    problem: Problem,
    *,
    chain: Chain | None = None,
    max_stages: int = _MAX_STAGES,
    max_options: int = _MAX_OPTIONS,
    max_nodes: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> PreparedChain | None:
    """Does what `solve_chain` does before it looks at the budget; for several budgets do it once.

    Args:
        problem, chain, max_stages, max_options, stop: see `solve_chain`.
        max_nodes: forms of the chain whose different stages have more nodes are left out; equal ones count once.

    Returns:
        `None` if the problem has no chain.

    Raises:
        PolicyError: a number is out of range.
    """
    if max_stages < 1:
        raise PolicyError(f"solve_chain(max_stages={max_stages}): expected at least 1")
    found = chain_of(problem) if chain is None else chain
    if found is None:
        return None
    if chain is not None:
        forms = [_at_most(found, max_stages)]
    else:
        chains = [found]
        if (
            found.floating
        ):  # computing them again costs, holding them takes memory, either cuts differently
            chains.append(chain_of(problem, pinned=found.floating) or found)
            chains.append(chain_of(problem, let_float=False) or found)
        forms = [form for one in dict.fromkeys(chains) for form in _forms(one, max_stages)]
    known: list[tuple[Chain, tuple[ChainStage, ...]]] = []
    for form in forms:
        if max_nodes is not None and stage_kinds(form).nodes > max_nodes:
            continue
        stages = measured(form, max_options, stop)
        if stages is None:
            break
        known.append((form, stages))
    return PreparedChain(tuple(known))


@dataclass(frozen=True, eq=False)
class PreparedChain:
    """A chain cut finely and coarsely, with the measured stages of every form."""

    forms: tuple[tuple[Chain, tuple[ChainStage, ...]], ...]

    @cached_property
    def different_nodes(self) -> int:
        """Nodes of the stages that differ, in the form in which these are fewest; 0 without any form."""
        return min((stage_kinds(form).nodes for form, _ in self.forms), default=0)

    def solve(
        self, budget_bytes: int, *, slots: int = SLOTS, stop: Callable[[], bool] | None = None
    ) -> ChainPlan | None:
        """Returns the cheapest plan of all forms within the budget; see `solve_chain`."""
        plans: list[ChainPlan] = []
        for form, stages in self.forms:
            if stop is not None and stop():
                break
            plan = _solve_form(form, stages, budget_bytes, slots, stop)
            plans += [] if plan is None else [plan]
        return min(plans, key=lambda plan: (plan.extra_cost, plan.peak_bytes), default=None)


def _solve_form(
    chain: Chain,
    stages: Sequence[ChainStage],
    budget_bytes: int,
    slots: int,
    stop: Callable[[], bool] | None,
) -> ChainPlan | None:
    free_bytes = budget_bytes - chain.pinned_bytes
    if free_bytes < 0:
        return None
    plan = solve_stages(stages, free_bytes, slots=slots, stop=stop)
    if plan is None:
        return None
    realised = judged(chain, plan, run_steps(chain, stages, plan.steps))
    if realised.peak_bytes > budget_bytes:
        raise AssertionError(
            f"the chain's memory model allowed {budget_bytes} bytes, the sequence needs "
            f"{realised.peak_bytes}"
        )
    return realised


def _forms(chain: Chain, max_stages: int) -> Iterable[Chain]:
    """The chain and coarser versions of it, small stages merged with those after or before them."""
    first = _at_most(chain, max_stages)
    yield first
    known = {_bounds(first)}
    least = 2
    while least < min(chain.problem.turn, _COARSEST + 1):
        for backwards in (False, True):
            form = _merged(chain, least, backwards)
            if len(form.segments) <= max_stages and _bounds(form) not in known:
                known.add(_bounds(form))
                yield form
        least *= 2


def _bounds(chain: Chain) -> tuple[int, ...]:
    return tuple(segment.forward.stop for segment in chain.segments)


def _at_most(chain: Chain, count: int) -> Chain:
    """A chain of at most `count` stages, neighbours merged evenly."""
    total = len(chain.segments)
    if total <= count:
        return chain
    bounds = [round(index * total / count) for index in range(count + 1)]
    return _joined(chain, [range(low, high) for low, high in pairwise(bounds)])


def _merged(chain: Chain, least: int, backwards: bool) -> Chain:
    """A chain whose stages have at least `least` forward nodes each, but for the one at the far end."""
    groups: list[range] = []
    size = 0
    total = len(chain.segments)
    order = range(total - 1, -1, -1) if backwards else range(total)
    members: list[int] = []
    for index in order:
        members.append(index)
        size += len(chain.segments[index].forward)
        if size >= least or index == order[-1]:
            groups.append(range(min(members), max(members) + 1))
            members, size = [], 0
    return _joined(chain, groups[::-1] if backwards else groups)


def _joined(chain: Chain, groups: Sequence[range]) -> Chain:
    segments: list[Segment] = []
    for group in groups:
        first, last = chain.segments[group[0]], chain.segments[group[-1]]
        segments.append(
            Segment(
                range(first.forward.start, last.forward.stop),
                range(last.backward.start, first.backward.stop),
                first.reads,
                last.gradients,
            )
        )
    return Chain(chain.problem, tuple(segments), chain.pinned, chain.floating)
