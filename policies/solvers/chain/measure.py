"""Measures the stages of a chain: costs and peaks by running their nodes, with several options for the tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remat.core.errors import PolicyError
from remat.policies.solvers.chain.find import Chain
from remat.policies.solvers.chain.schedule import ChainStage, StageOption
from remat.policies.solvers.on_demand import Emitter
from remat.policies.solvers.problem import Problem

__all__ = ["Kinds", "measured", "stage_kinds", "stages_of"]

# Both bound the time that measuring takes, by leaving options out; the plan of those left is exact. Chosen by look.
_LEAN_LIMIT = 4  # runs of a stage's nodes, on average, above which a lean option is not considered
_GREEDY_LIMIT = (
    48  # values on a tape up to which every step of the greedy path prices all of them anew
)


def stages_of(chain: Chain, *, max_options: int = 12) -> tuple[ChainStage, ...]:
    """Measures the stages of a chain, each with up to `max_options` options.

    The first option tapes all that the backward part reads, the last one nothing; between them values are left
    out one after the other, the one with the least cost per byte first. Every option is measured by running it;
    dominated ones are dropped. Equal stages are measured once.

    Args:
        chain: see `chain_of`.
        max_options: at least 2.

    Raises:
        PolicyError: `max_options` is below 2.
    """
    stages = measured(chain, max_options, None)
    assert stages is not None
    return stages


def measured(
    chain: Chain, max_options: int, stop: Callable[[], bool] | None
) -> tuple[ChainStage, ...] | None:
    """As `stages_of`; `stop` is asked before every stage, True ends without a result, None."""
    if max_options < 2:
        raise PolicyError(f"stages_of(max_options={max_options}): expected at least 2")
    kinds = stage_kinds(chain)
    known: dict[int, ChainStage] = {}
    for kind, index in enumerate(kinds.first):
        if stop is not None and stop():
            return None
        known[kind] = _Measure(chain, index).stage(max_options)
    return tuple(known[kind] for kind in kinds.of)


@dataclass(frozen=True)
class Kinds:
    """Which stages of a chain are equal up to their position.

    Attributes:
        of: for every stage its kind.
        first: for every kind the first stage of it.
        nodes: of one stage of every kind, all together.
    """

    of: tuple[int, ...]
    first: tuple[int, ...]
    nodes: int


def stage_kinds(chain: Chain) -> Kinds:
    """Returns which stages of a chain are equal; linear in its nodes."""
    known: dict[object, int] = {}
    first: list[int] = []
    of: list[int] = []
    for index in range(len(chain.segments)):
        key = _Measure(chain, index).key()
        if key not in known:
            known[key] = len(known)
            first.append(index)
        of.append(known[key])
    segments = (chain.segments[index] for index in first)
    nodes = sum(len(segment.forward) + len(segment.backward) for segment in segments)
    return Kinds(tuple(of), tuple(first), nodes)


class _Measure:
    """Costs and peaks of one segment, by running it. Taped nodes are given relative to its first node."""

    def __init__(self, chain: Chain, index: int) -> None:
        self.problem = chain.problem
        self.segment = chain.segments[index]
        self.pinned = chain.pinned
        self.base = self.segment.reads | chain.pinned
        self.output = chain.reads_of(index + 1) - self.base
        following = chain.segments[index - 1].gradients if index else frozenset()
        self.gradients_out = following
        self.read = frozenset(
            r
            for node in self.segment.backward
            for r in self.problem.inputs[node]
            if r < self.problem.turn and r not in self.base and r not in chain.floating
        )

    def key(self) -> object:
        """Equal for segments that are the same up to their position."""
        problem, segment = self.problem, self.segment

        def name(node: int) -> tuple[str, int]:
            if node in self.pinned:
                return "pinned", 0
            if node in self.segment.reads:
                return "input", sorted(segment.reads).index(node)
            if node in segment.forward:
                return "forward", node - segment.forward.start
            if node in segment.backward:
                return "backward", node - segment.backward.start
            if node < problem.turn:  # floating
                return f"{problem.costs[node]}", int(problem.sizes[node])
            return "gradient", sorted(segment.gradients).index(node)

        def row(node: int) -> tuple[object, ...]:
            return (
                float(problem.costs[node]),
                int(problem.sizes[node]),
                int(problem.extra_while_running[node]),
                tuple(map(name, problem.inputs[node])),
                node in self.pinned,
                node in self.output,
                node in self.gradients_out,
            )

        passing = tuple(
            (int(problem.sizes[node]), node in self.gradients_out)
            for node in sorted(segment.gradients)
        )
        rows = tuple(row(node) for part in (segment.forward, segment.backward) for node in part)
        return len(segment.forward), rows, passing

    def stage(self, max_options: int) -> ChainStage:
        segment = self.segment
        again = self.missing(self.output, frozenset())
        tapes = self.tapes(max_options)
        return ChainStage(
            forward_cost=self.cost(again),
            output_bytes=self.bytes_of(self.output),
            gradient_bytes=self.bytes_of(segment.gradients),
            forward_peak_bytes=self.peak(again, frozenset(), self.output),
            first_forward_peak_bytes=self.peak(segment.forward, frozenset(), self.output),
            options=_undominated(
                [o for lean in (False, True) for t in tapes if (o := self.option(t, lean))]
            ),
        )

    def tapes(self, count: int) -> list[frozenset[int]]:
        """Sets to tape, from everything that is read down to nothing."""
        path = [self.read]
        if len(self.read) <= _GREEDY_LIMIT:
            while path[-1]:
                path.append(path[-1] - {self._least_worth(path[-1])})
        else:
            ranked = sorted(self.read, key=lambda node: self._worth(self.read, node))
            path += [self.read - set(ranked[: i + 1]) for i in range(len(ranked))]
        places = dict.fromkeys(round(float(p)) for p in np.linspace(0, len(path) - 1, count))
        chosen = [path[place] for place in places]
        # An output that is read may still be there as the next stage's input: then it costs nothing.
        return list(
            dict.fromkeys([*chosen, *(tape | (self.output & self.read) for tape in chosen)])
        )

    def _least_worth(self, taped: frozenset[int]) -> int:
        return min(taped, key=lambda node: self._worth(taped, node))

    def _worth(self, taped: frozenset[int], node: int) -> tuple[float, int]:
        """Cost per byte of leaving a node out of the tape."""
        extra = self.cost(self.missing([node], taped - {node}))
        return extra / max(int(self.problem.sizes[node]), 1e-9), node

    def option(self, taped: frozenset[int], lean: bool) -> StageOption | None:
        """Runs an option; `None` for a lean one that runs the stage more often than anyone would."""
        segment = self.segment
        most = _LEAN_LIMIT * (len(segment.forward) + len(segment.backward))
        with_output = self.missing(taped | self.output, frozenset())
        alone = self.missing(taped, frozenset())
        emitter = Emitter(self.problem)
        emitter.held = {*self.base, *taped, *segment.gradients}
        for node in segment.backward:
            # Other gradients are there by the order of the problem.
            again = emitter.obtain(r for r in self.problem.inputs[node] if r < self.problem.turn)
            emitter.run(node)
            if lean:
                emitter.drop(again)
                if len(emitter.sequence) > most:
                    return None
        kept = taped | self.output
        held = self.missing(taped, self.output)
        return StageOption(
            tape_bytes=self.bytes_of(taped - self.output),
            tape_cost=self.cost(with_output),
            leaf_cost=self.cost(alone),
            backward_extra_cost=self.cost(n for n in emitter.sequence if n < self.problem.turn),
            tape_peak_bytes=self.peak(with_output, frozenset(), kept),
            leaf_peak_bytes=self.peak(alone, frozenset(), taped),
            first_peak_bytes=self.peak(segment.forward, frozenset(), kept),
            backward_peak_bytes=self.peak(
                emitter.sequence, taped | segment.gradients, self.gradients_out
            ),
            tapes_output=bool(self.output) and self.output <= taped,
            held_leaf_cost=self.cost(held),
            held_leaf_peak_bytes=self.peak(held, self.output, kept),
            taped=tuple(sorted(node - segment.forward.start for node in taped)),
            lean=lean,
        )

    def missing(self, wanted: Iterable[int], held: frozenset[int]) -> list[int]:
        emitter = Emitter(self.problem)
        emitter.held = {*self.base, *held}
        return emitter.missing(wanted)

    def cost(self, nodes: Iterable[int]) -> float:
        return float(sum(self.problem.costs[node] for node in nodes))

    def bytes_of(self, nodes: Iterable[int]) -> int:
        return sum(int(self.problem.sizes[node]) for node in nodes)

    def peak(self, order: Sequence[int], before: frozenset[int], after: frozenset[int]) -> int:
        """Largest number of live bytes while `order` runs, the segment's input and pinned values excepted.

        Args:
            order: nodes to run.
            before: nodes alive at the start.
            after: nodes that stay alive to the end.
        """
        return peak_while(self.problem, order, before - self.base, after - self.base, self.base)


def peak_while(
    problem: Problem,
    order: Sequence[int],
    before: frozenset[int],
    after: frozenset[int],
    free: frozenset[int],
) -> int:
    end = len(order)
    copies: list[list[int]] = [[0, -1, int(problem.sizes[node])] for node in sorted(before)]
    latest = {node: index for index, node in enumerate(sorted(before))}
    for position, node in enumerate(order):
        for read in problem.inputs[node]:
            if read in latest:
                copies[latest[read]][1] = position
        if node not in free:
            latest[node] = len(copies)
            copies.append([position, position, int(problem.sizes[node])])
    for node in after:
        if node in latest:
            copies[latest[node]][1] = end
    change = [0] * (end + 2)
    for start, stop, size in copies:
        change[start] += size
        change[stop + 1] -= size
    extra = problem.extra_while_running
    live = largest = 0
    for position in range(end + 1):
        live += change[position]
        largest = max(largest, live + int(extra[order[position]]) if position < end else live)
    return largest


def _undominated(options: list[StageOption]) -> tuple[StageOption, ...]:
    """Options that no other one equals or beats in everything; of equal ones the first."""

    def numbers(option: StageOption) -> tuple[float, ...]:
        found = [v for k, v in vars(option).items() if k not in ("taped", "tapes_output", "lean")]
        return (*found, not option.tapes_output)

    table = np.asarray([numbers(option) for option in options], np.float64)
    kept: list[StageOption] = []
    for index, option in enumerate(options):
        covers = (table <= table[index]).all(axis=1)
        same = covers & (table == table[index]).all(axis=1)
        if not (covers & ~same).any() and not same[:index].any():
            kept.append(option)
    return tuple(kept)
