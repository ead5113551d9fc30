"""Ways to run a loop under a budget: plans of its body, and chunks of iterations that run again.

The body of a loop keeps its values once per iteration. Its plan is one of several *options*, from the least memory
to the least work. Even the first keeps the carry once per iteration; a loop cut into *chunks* keeps it once per
chunk, and what the body's option keeps only for the iterations of one chunk, which run again before their backward
pass. `n` iterations in chunks of `sqrt(n)` keep in the order of `sqrt(n)` values (Chen et al., "Training deep nets
with sublinear memory cost", section 4.1); chunks of chunks repeat the forward pass once more for the cube root
(section 4.3).

Departure: chunks are of one length, because a `scan` has one body. The binomial schedule of Griewank & Walther's
`revolve`, which needs fewer repetitions for the same memory, has chunks of many lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from remat.core.devices import get_device
from remat.core.forms import stored_bytes
from remat.core.graph import Graph
from remat.core.interrupt import ended
from remat.planning.make import plan_from_saved
from remat.planning.numbers import (
    ALIKE_RATE,
    DOMINATED,
    FEW_COMBINATIONS,
    FEW_LIMITS,
    NOTICED,
    WORTHWHILE,
)
from remat.plans.plan import Plan
from remat.policies import Full, MinCut, Policy
from remat.policies.base import Decision, carried_reads, describe_options, required_saves
from remat.policies.buffers.condense import Condensed, condense
from remat.policies.solvers.on_demand import sequence_of_saved
from remat.policies.solvers.problem import replay

__all__ = [
    "BodyOption",
    "LoopOption",
    "LoopPrices",
    "all_kept_bytes",
    "body_options",
    "choose_options",
    "chunk_plan",
    "loop_options",
    "needed_bytes",
]


@dataclass(frozen=True)
class BodyOption:
    """One way to plan a loop's body.

    Attributes:
        plan: the body's plan.
        seconds: roofline estimate of what it costs per iteration: recomputation, and writing and reading what
            is kept.
        saved_bytes: kept per iteration.
        fixed_bytes: kept once, because it is the same in every iteration.
    """

    plan: Plan
    seconds: float
    saved_bytes: int
    fixed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What all iterations keep, and what one of them needs beside it."""
        trips = self.plan.graph.multiplicity
        working = self.plan.peak_bytes if trips > 1 else 0  # without a loop the peak has all of it
        return trips * self.saved_bytes + self.fixed_bytes + working


def body_options(graph: Graph, device: str = "h200") -> list[BodyOption]:
    """Returns plans of a loop's body, the least memory first; each costs less time than the one before.

    They are minimum cuts at several prices of memory, with and without recomputing matmuls and random bits, and
    what is left of these as one value after the other is dropped; when the time is up, those made by then.
    """
    policies: list[Policy] = [Full()]
    for random in ("ban", "cheap"):
        policies += [
            MinCut(device=device, random=random),
            MinCut(device=device, heavy="batched", random=random),
        ]
        policies += [
            MinCut(memory_weight=weight, heavy="roofline", random=random, device=device)
            for weight in (0.25, 1, 3, 8, 20, 60, 1000)
        ]
    prices = _Prices(condense(graph, device=device), device)
    found = {}
    for policy in policies:
        decision = policy.decide(graph)
        found[decision.saved] = (prices(decision.saved), policy)
        if ended():
            break
    for saved, (price, policy) in list(found.items()):
        for less in prices.dropping(saved, price):
            found.setdefault(less, (prices(less), policy))
    options = []
    for saved, ((saved_bytes, seconds), policy) in found.items():
        if any(x < DOMINATED * saved_bytes and y <= seconds for (x, y), _ in found.values()):
            continue  # another one keeps much less and is faster
        plan = plan_from_saved(
            graph,
            Decision(saved),
            policy_name=policy.name,
            options=describe_options(policy),
            barriers=False,
            device=device,
        )
        options.append(BodyOption(plan, seconds, saved_bytes, prices.fixed_bytes(saved)))
    best: list[BodyOption] = []
    least_gain = NOTICED * prices.condensed.problem.total_cost
    for option in sorted(options, key=lambda o: (o.total_bytes, o.seconds)):
        most = best[-1].seconds if best else math.inf
        if option.seconds < min(WORTHWHILE * most, most - least_gain):
            best.append(option)
    return best


class _Prices:
    """Prices what a loop's body keeps: bytes per iteration, and seconds of recomputation and of traffic."""

    def __init__(self, condensed: Condensed, device: str) -> None:
        self.condensed = condensed
        graph = condensed.graph
        self.varying = frozenset(range(len(graph.values))) - graph.fixed - graph.alive_anyway
        self.bandwidth = get_device(device).memory_bytes_per_second

    def __call__(self, saved: frozenset[int]) -> tuple[int, float]:
        """Kernels that run again, and the bytes kept, written once and read once."""
        graph, problem = self.condensed.graph, self.condensed.problem
        sequence = sequence_of_saved(problem, self.condensed.forward_nodes(saved))
        held = (saved & self.varying) | carried_reads(graph, saved)
        saved_bytes = sum(stored_bytes(graph.values[v]) for v in held)
        moved = 2 * saved_bytes / self.bandwidth
        return saved_bytes, replay(problem, sequence).extra_cost + moved

    def fixed_bytes(self, saved: frozenset[int]) -> int:
        """Bytes of what is kept and the same in every iteration."""
        graph = self.condensed.graph
        fixed = saved - self.varying - graph.alive_anyway - graph.sources
        return sum(stored_bytes(graph.values[v]) for v in fixed)

    def dropping(self, saved: frozenset[int], price: tuple[int, float]) -> Iterator[frozenset[int]]:
        """Drops one kept value after the other, each time the one with the most bytes per second.

        Of equals the smallest goes first: the fewer bytes between two options, the closer one comes to a budget.
        """
        graph = self.condensed.graph
        while not ended():
            drops: list[tuple[float, int, tuple[int, float], frozenset[int]]] = []
            for value in sorted(saved & self.varying):
                producer = graph.values[value].producer
                if producer is None or not graph.ops[producer].recomputable:
                    continue
                if ended():
                    return
                less = required_saves(graph, saved - {value})
                saved_bytes, seconds = self(less)
                dropped_bytes = price[0] - saved_bytes
                if dropped_bytes > 0:
                    rate = (seconds - price[1]) / dropped_bytes
                    drops.append((rate, dropped_bytes, (saved_bytes, seconds), less))
            if not drops:
                return
            least = min(rate for rate, *_ in drops)
            alike = [drop for drop in drops if drop[0] - least <= ALIKE_RATE * abs(least)]
            *_, price, saved = min(alike, key=lambda drop: drop[1])
            yield saved


# --- chunks --------------------------------------------------------------------------------------------


def chunk_plan(graph: Graph, prices: LoopPrices, trips: int) -> Plan:
    """Returns the plan of a chunk of iterations: only its inputs are kept, and its loop runs again.

    Args:
        graph: of the chunk, whose loop is marked `recomputable`.
        prices: of one iteration.
        trips: iterations of a chunk.
    """
    saved = required_saves(graph, frozenset())
    plan = plan_from_saved(
        graph,
        Decision(saved | carried_reads(graph, saved)),
        policy_name=Full.name,
        barriers=False,
        device=prices.device,
    )
    # The roofline of a loop as one operator fuses nothing; its body's does.
    return replace(plan, recompute_seconds=trips * prices.forward_seconds)


@dataclass(frozen=True)
class LoopOption:
    """One way to run a loop.

    Attributes:
        body: the plan of one iteration.
        chunks: iterations of a chunk, and of a chunk in a chunk; empty if the loop stays whole.
        kept_bytes: kept from the forward pass for the backward pass.
        working_bytes: needed beside it while the loop runs, at most.
        seconds: roofline estimate of what all of it costs beyond the iterations themselves.
    """

    body: BodyOption
    chunks: tuple[int, ...]
    kept_bytes: int
    working_bytes: int
    seconds: float

    @property
    def total_bytes(self) -> int:
        """What is kept, and what is needed beside it."""
        return self.kept_bytes + self.working_bytes


@dataclass(frozen=True)
class LoopPrices:
    """Prices the ways to run a loop.

    Attributes:
        graph: of one iteration.
        device: whose roofline prices it.
    """

    graph: Graph
    device: str = "h200"

    @cached_property
    def forward_seconds(self) -> float:
        """Of the forward pass of one iteration."""
        problem = condense(self.graph, device=self.device).problem
        return float(problem.costs[: problem.turn].sum())

    @cached_property
    def carry_bytes(self) -> int:
        """Of what one iteration gets from the one before and needs to run again."""
        graph = self.graph
        read = carried_reads(graph, required_saves(graph, frozenset()))
        # What carried results are made from has to be known too.
        carried = frozenset(graph.carried) & frozenset(graph.inputs)
        used = {v for op in graph.forward_ops() for v in op.inputs} | {*graph.outputs}
        return sum(graph.values[v].nbytes for v in read | (carried & used))

    @cached_property
    def _gradient_bytes(self) -> tuple[int, int]:
        """Of the gradients summed over all iterations, and of those stacked, per iteration."""
        graph = self.graph
        values = graph.values
        summed = stacked = 0
        left = list(graph.gradients)
        for index in graph.inputs:  # gradients come in the order of what they are of
            alike = left and (values[left[0]].shape, values[left[0]].dtype)
            if not values[index].differentiable or alike != (
                values[index].shape,
                values[index].dtype,
            ):
                continue
            nbytes = values[left.pop(0)].nbytes
            if index in graph.invariant:
                summed += nbytes
            elif index not in graph.carried:
                stacked += nbytes
        return summed, stacked

    @cached_property
    def _stacked_bytes(self) -> int:
        """Of what one iteration reads from stacked arrays and writes into them."""
        graph = self.graph
        whole = {*graph.invariant, *graph.carried}
        return sum(
            graph.values[v].nbytes for v in (*graph.inputs, *graph.outputs) if v not in whole
        )

    def option(self, body: BodyOption, trips: int, chunks: tuple[int, ...] = ()) -> LoopOption:
        """Prices one way to run a loop.

        Args:
            body: plan of one iteration.
            trips: iterations of the loop.
            chunks: as in `LoopOption`; each is at least 2 and less than what it divides.
        """
        working = body.plan.peak_bytes if trips > 1 else 0
        whole = LoopOption(
            body,
            (),
            trips * body.saved_bytes + body.fixed_bytes,
            working,
            trips * body.seconds,
        )
        if not chunks:
            return whole
        chunk, *deeper = chunks
        count, rest = divmod(trips, chunk)
        inner = self.option(body, chunk, tuple(deeper))
        last = self.option(body, rest)
        summed, stacked = self._gradient_bytes
        around = chunk * (self._stacked_bytes + stacked)
        copied = trips * (self._stacked_bytes + stacked) if rest else 0
        moved = 2 * count * (self.carry_bytes + summed + around) + 2 * copied
        bandwidth = get_device(self.device).memory_bytes_per_second
        return LoopOption(
            body,
            chunks,
            kept_bytes=count * self.carry_bytes + copied,
            working_bytes=max(inner.total_bytes + around + summed, last.total_bytes),
            seconds=count * (inner.seconds + chunk * self.forward_seconds)
            + last.seconds
            + moved / bandwidth,
        )


def loop_options(
    bodies: Sequence[BodyOption], trips: int, *, may_repeat: bool, device: str = "h200"
) -> list[LoopOption]:
    """Returns ways to run a loop, the least memory first; each costs less time than the one before.

    Args:
        bodies: options of its body.
        trips: its iterations.
        may_repeat: whether its iterations may run again.
        device: whose roofline prices them.
    """
    prices = LoopPrices(bodies[0].plan.graph, device)
    ways: list[tuple[int, ...]] = [()]
    if may_repeat:
        ways += _chunkings(trips)
    found: list[LoopOption] = []
    for body in bodies:
        by_depth = itertools.groupby(ways, key=len)
        # Chunks of any length cost much the same time, so the one with the least memory stands for them.
        found += [
            min((prices.option(body, trips, way) for way in group), key=_total_then_seconds)
            for _, group in by_depth
        ]
    best: list[LoopOption] = []
    for option in sorted(found, key=_total_then_seconds):
        if not best or option.seconds < WORTHWHILE * best[-1].seconds:
            best.append(option)
    return best


def _total_then_seconds(option: LoopOption) -> tuple[int, float]:
    return option.total_bytes, option.seconds


def _chunkings(trips: int) -> list[tuple[int, ...]]:
    """Chunks to try, by depth: lengths that divide evenly, and powers of two with something left over."""
    single = [(chunk,) for chunk in _lengths(trips)]
    double = [(chunk, part) for (chunk,) in single for part in _lengths(chunk)]
    return [*single, *double]


def _lengths(trips: int) -> list[int]:
    divisors = {d for d in range(2, math.isqrt(trips) + 1) if trips % d == 0}
    divisors |= {trips // d for d in divisors}
    powers = {2**i for i in range(1, trips.bit_length()) if 2**i <= trips // 2}
    return sorted(divisors | powers | ({math.isqrt(trips)} if trips >= 4 else set()))


# --- choosing ------------------------------------------------------------------------------------------


def all_kept_bytes(options: Sequence[LoopOption]) -> int:
    """Returns what loops keep together, one option each."""
    return sum(option.kept_bytes for option in options)


def needed_bytes(options: Sequence[LoopOption]) -> int:
    """Returns what loops need, one option each: what all of them keep, and the most that one works in."""
    return all_kept_bytes(options) + max((option.working_bytes for option in options), default=0)


def choose_options(
    menus: Sequence[Sequence[LoopOption]],
    budget_bytes: int,
    excluded: Collection[tuple[int, ...]] = (),
    *,
    kept_bytes: float = math.inf,
) -> tuple[int, ...] | None:
    """Returns for every loop the option to take: the least time within a budget, None if nothing fits.

    A multiple-choice knapsack in which what a loop keeps adds up and what it works in does not: only the largest
    of all loops counts. Exact while there are few combinations. With more, one knapsack is solved for each of a
    few limits on what a loop may work in; exact if there are no more than these.

    Args:
        menus: ways to run every loop.
        budget_bytes: bound on `needed_bytes`.
        excluded: choices not to make.
        kept_bytes: bound on what all loops keep, whatever they work in: where the peak is not in a loop.
    """
    if math.prod(len(menu) for menu in menus) <= FEW_COMBINATIONS:
        fitting = [
            (sum(o.seconds for o in options), choice)
            for choice in itertools.product(*(range(len(menu)) for menu in menus))
            if choice not in excluded
            and needed_bytes(
                options := [menu[index] for menu, index in zip(menus, choice, strict=True)]
            )
            <= budget_bytes
            and all_kept_bytes(options) <= kept_bytes
        ]
        return min(fitting)[1] if fitting else None
    limits = sorted({option.working_bytes for menu in menus for option in menu})
    if len(limits) > FEW_LIMITS:
        limits = [
            limits[round(i * (len(limits) - 1) / (FEW_LIMITS - 1))] for i in range(FEW_LIMITS)
        ]
    found = [
        entry
        for limit in limits
        for entry in _knapsack(menus, limit, min(budget_bytes - limit, kept_bytes))
        if entry[1] not in excluded
    ]
    return min(found)[1] if found else None


def _knapsack(
    menus: Sequence[Sequence[LoopOption]], working_bytes: int, kept_bytes: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Seconds and choice of all that is not worse in both bytes kept and seconds than another."""
    front: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for menu in menus:
        grown = sorted(
            (kept + option.kept_bytes, seconds + option.seconds, (*choice, index))
            for kept, seconds, choice in front
            for index, option in enumerate(menu)
            if option.working_bytes <= working_bytes and kept + option.kept_bytes <= kept_bytes
        )
        front = []
        for entry in grown:
            if not front or entry[1] < front[-1][1]:
                front.append(entry)
    return [(seconds, choice) for _, seconds, choice in front]
