"""From the alternatives of a joint graph to one problem with implementations.

Every rewrite of the graph is coarsened to its buffers (`condense_apart`, with the same buffers everywhere), and
nodes that stand for the same value become one node with several choices: what it costs and which buffers it reads
with one rewrite or another. A node that only some rewrites have (the codes of a pool) is optional: it runs if
something reads it.

A choice names the sites it stands for; the choice of a plan is the union over its nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat.core.graph import Alternatives, Graph, Site, required_sites
from remat.policies.buffers.condense import Objective, buffers_of, condense_apart
from remat.policies.solvers.choice import Choice, ChoiceProblem

__all__ = ["Merged", "merged_problem"]

# With more sites, those of one rule are taken or left together: a graph is coarsened once per group, and the
# program of `monet` has a choice per group. By look; the harm is a choice that is left out: with more sites than
# these, some rewritten here and others not.
_MANY_SITES = 16

_Way = tuple[float, tuple[str, ...]]
"""What a node costs and reads with some rewrite."""


@dataclass(frozen=True, eq=False)
class Merged:
    """A problem with implementations: one node per buffer of any rewrite; a choice's `sites` are names of sites."""

    problem: ChoiceProblem

    def sites(self, selection: Sequence[int]) -> frozenset[str]:
        """Returns the sites that a selection stands for, of the nodes that run."""
        chosen = self.problem.chosen(selection)
        found = (chosen[node].sites for node in self.problem.active(selection))
        return frozenset().union(*found)


@dataclass(frozen=True)
class _Node:
    cost: float
    size: int
    inputs: tuple[str, ...]
    repeatable: bool
    is_forward: bool
    is_root: bool
    overwrites: str | None


def merged_problem(
    menu: Alternatives, sites: Sequence[Site], *, device: str, objective: Objective = "seconds"
) -> Merged | None:
    """Returns the problem over all rewrites at `sites`; None if their orders contradict each other.

    Args:
        menu: the alternatives of a joint graph.
        sites: those to choose from.
        device, objective: as in `condense`.
    """
    everything = frozenset(site.name for site in sites)
    groups = _groups(sites)
    whole = frozenset[str]()
    variants = dict.fromkeys((whole, *groups, everything))
    buffers: set[str] = set()
    for chosen in (whole, everything):
        names = menu.origins(chosen)
        buffers |= {names.get(v, str(v)) for v in buffers_of(menu.graph(chosen))}
    tables = {
        chosen: _table(menu.graph(chosen), menu.origins(chosen), buffers, device, objective)
        for chosen in variants
    }
    choices: dict[str, list[Choice]] = {}
    found: dict[str, dict[_Way, frozenset[str]]] = {}
    entries: dict[str, _Node] = {}
    for chosen, table in tables.items():
        for key, node in table.items():
            entries.setdefault(key, node)
            seen = found.setdefault(key, {})
            way = (node.cost, node.inputs)
            if way not in seen:
                few = chosen if chosen != everything else _changing(key, tables, groups)
                seen[way] = few or chosen
    order = _order(tables, entries, found)
    if order is None:
        return None
    number = {key: index for index, key in enumerate(order)}
    for key in order:
        choices[key] = [
            Choice(cost, tuple(sorted(number[r] for r in reads)), 0, chosen)
            for (cost, reads), chosen in found[key].items()
        ]
    targets: list[int | None] = []
    for key in order:
        over = entries[key].overwrites
        index = number.get(over) if over is not None else None
        smaller = index is not None and entries[key].size <= entries[order[index]].size
        read = any(index in choice.inputs for choice in choices[key])
        targets.append(index if smaller and read else None)
    problem = ChoiceProblem.of(
        [entries[key].size for key in order],
        [choices[key] for key in order],
        repeatable=[entries[key].repeatable for key in order],
        turn=sum(entries[key].is_forward for key in order),
        in_place=targets,
        required=[entries[key].is_root for key in order],
    )
    return Merged(problem)


def _groups(sites: Sequence[Site]) -> list[frozenset[str]]:
    if len(sites) <= _MANY_SITES:
        return [required_sites(site.name) for site in sites]
    rules = dict.fromkeys(site.rule for site in sites)
    return [
        frozenset().union(*(required_sites(s.name) for s in sites if s.rule == rule))
        for rule in rules
    ]


def _changing(
    key: str,
    tables: Mapping[frozenset[str], Mapping[str, _Node]],
    groups: Sequence[frozenset[str]],
) -> frozenset[str]:
    """The groups of sites that change a node by themselves."""
    plain = tables[frozenset()].get(key)
    return frozenset().union(*(group for group in groups if tables[group].get(key) != plain))


def _table(
    graph: Graph, origins: Mapping[int, str], buffers: set[str], device: str, objective: Objective
) -> dict[str, _Node]:
    """The nodes of one rewrite by key, in order."""

    def label(value: int) -> str:
        return origins.get(value, str(value))

    forced = [v.id for v in graph.values if label(v.id) in buffers]
    condensed = condense_apart(graph, forced, device=device, objective=objective)
    problem = condensed.problem
    keys = [
        "|".join(sorted(map(label, values))) or f"effect {graph.ops[root].name} {root}"
        for values, root in zip(condensed.values_of, condensed.roots, strict=True)
    ]
    roots = {*graph.outputs, *graph.gradients}
    return {
        key: _Node(
            cost=float(problem.costs[node]),
            size=int(problem.sizes[node]),
            inputs=tuple(sorted(keys[r] for r in problem.inputs[node])),
            repeatable=bool(problem.repeatable[node]),
            is_forward=node < problem.turn,
            is_root=graph.ops[condensed.roots[node]].effectful
            or not roots.isdisjoint(condensed.values_of[node]),
            overwrites=keys[over] if (over := condensed.overwrites.get(node)) is not None else None,
        )
        for node, key in enumerate(keys)
    }


def _order(
    tables: Mapping[frozenset[str], Mapping[str, _Node]],
    entries: Mapping[str, _Node],
    found: Mapping[str, Mapping[_Way, frozenset[str]]],
) -> list[str] | None:
    """All nodes in an order that holds for every rewrite, forward nodes first; None if there is none."""
    place: dict[str, float] = {}
    for table in tables.values():
        before = -1.0
        for step, key in enumerate(table):
            before = place.setdefault(key, before + 1 / (len(entries) + step + 1))
        if len(place) == len(table):  # the first one: whole numbers leave room between them
            place = {key: float(index) for index, key in enumerate(table)}
    reads = {key: {r for _, inputs in found[key] for r in inputs} for key in entries}
    if any(r not in entries for inputs in reads.values() for r in inputs):
        return None
    readers: dict[str, list[str]] = {}
    waits = {key: len(inputs) for key, inputs in reads.items()}
    for key, inputs in reads.items():
        for r in inputs:
            readers.setdefault(r, []).append(key)

    def rank(key: str) -> tuple[bool, float, str]:
        return (not entries[key].is_forward, place[key], key)

    ready = [rank(key) for key, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        key = heapq.heappop(ready)[-1]
        order.append(key)
        for reader in readers.get(key, ()):
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, rank(reader))
    phases = [entries[key].is_forward for key in order]
    return order if len(order) == len(entries) and phases == sorted(phases, reverse=True) else None
