"""Puts other implementations of operators (`remat.rewrite.operators`) into a program not yet differentiated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from remat import compat
from remat.core.errors import ImplementationError, nearest
from remat.core.graph import Implementations, is_wanted
from remat.core.graph import Site as GraphSite
from remat.rewrite.library import BUILT_IN
from remat.rewrite.matching import Number, Option, Site, find_sites
from remat.rewrite.operators import Implementation, differentiable, implementations, struct_of
from remat.trace.program import Program, evaluate, program_of

__all__ = ["called_by_name", "Choose", "sites_in", "substituted", "with_implementations"]

Choose = Callable[[Site], Implementation | None]


def with_implementations(
    closed: Any,
    choose: Choose | Collection[str],
    *,
    platform: str | None = None,
    inline_checkpoints: bool = True,
) -> Any:
    """Replaces operators of an undifferentiated program by other implementations of them.

    Args:
        closed: what `jax.make_jaxpr` returns.
        choose: ids of implementations at sites (`softmax/output@0`; `softmax/output` for all occurrences), or
            a function that is called for every site of `find_sites` where something applies, in program order,
            and returns one of `site.implementations`, or None to leave the operator as it is. If two operators
            end at the same equation, the first one chosen is taken.
        platform: as for `find_sites`.
        inline_checkpoints: as for `find_sites`.

    Returns:
        A closed jaxpr of the same inputs and results, with a `jax.custom_vjp` in place of every chosen
        operator; `closed` itself if nothing is chosen. What only the replaced equations needed is gone.

    Raises:
        ImplementationError: `choose` names what is not there, or returned what does not apply at the site.
    """
    chosen: dict[tuple[int, ...], Option] = {}
    sites = find_sites(closed, platform=platform, inline_checkpoints=inline_checkpoints)
    pick = choose if callable(choose) else _chooser(sites, choose)
    for site in sites:
        picked = pick(site) if site.implementations else None
        if picked is None:
            continue
        options = [o for o in site.options if o.implementation is picked and o.why_not is None]
        if not options:
            reasons = {site.id(o.implementation): o.why_not for o in site.options if o.why_not}
            raise ImplementationError(
                f"choose() returned {getattr(picked, 'id', picked)!r} for occurrence {site.occurrence} of "
                f"{site.operator!r}; expected None or one of {', '.join(site.ids)}"
                f"{f' (not applicable: {reasons})' if reasons else ''}."
            )
        chosen.setdefault(site.path, options[0])
    if not chosen:
        return closed
    substitution = _Substitution(chosen, inline_checkpoints)
    jaxpr, _ = compat.open_jaxpr(closed)
    structs = [struct_of(var.aval) for var in jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: substitution.run(closed, inputs, (), None))(*structs)


def called_by_name() -> frozenset[str]:
    """Returns the operators that users registered: calls of functions with these names must stay calls."""
    return frozenset(i.operator for i in implementations() if i.id not in BUILT_IN)


def sites_in(program: Program, wanted: Implementations) -> tuple[GraphSite, ...]:
    """Returns the implementations that are wanted and apply in a program, as sites of a graph.

    `exact` does not look for the built-in ones: what is exact among them, `remat.rewrite.rules` finds on the joint
    graph.
    """
    entries = [i for i in implementations() if not i.named_only or _is_named(i, wanted)]
    if wanted == "exact":
        entries = [i for i in entries if i.exact and i.id not in BUILT_IN]
    if wanted == "none" or not any(_is_wanted(i, wanted) for i in entries):
        return ()
    found = []
    for site in find_sites(_closed(program), platform=_platform()):
        for implementation in site.implementations:
            name = site.id(implementation)
            entry = GraphSite(name, implementation.id, implementation.kind, implementation.exact)
            if implementation in entries and is_wanted(entry, wanted):
                found.append(entry)
                break  # one per operator: the first that was registered
    return tuple(found)


def substituted(program: Program, names: Collection[str]) -> Program:
    """Returns an undifferentiated program with implementations in place, by the names of `sites_in`."""
    closed = with_implementations(_closed(program), tuple(names), platform=_platform())
    return program_of(closed)


def _closed(program: Program) -> Any:
    structs = [compat.shape_of(program.avals[v]) for v in program.inputs]
    return jax.make_jaxpr(lambda *inputs: evaluate(program, inputs, tags=True))(*structs)


def _platform() -> str:
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def _is_named(implementation: Implementation, wanted: Implementations) -> bool:
    return not isinstance(wanted, str) and not {
        implementation.id,
        implementation.operator,
    }.isdisjoint(name.partition("@")[0] for name in wanted)


def _is_wanted(implementation: Implementation, wanted: Implementations) -> bool:
    entry = GraphSite("", implementation.id, implementation.kind, implementation.exact)
    return is_wanted(entry, wanted) or _is_named(implementation, wanted)


def _chooser(sites: Sequence[Site], ids: Collection[str]) -> Choose:
    wanted = {ids} if isinstance(ids, str) else set(ids)
    known = {name: None for site in sites for name in site.ids}
    known |= {name.rpartition("@")[0]: None for name in known}
    for name in sorted(wanted - known.keys()):
        reasons = {
            reason
            for site in sites
            for option in site.options
            if (reason := option.why_not) is not None
            and name in (site.id(option.implementation), option.implementation.id)
        }
        raise ImplementationError(
            f"no implementation {name!r} applies in this program{f': {sorted(reasons)}' if reasons else ''}; "
            f"expected some of {', '.join(known) or '(none)'}{nearest(name, known)}."
        )

    def choose(site: Site) -> Implementation | None:
        named = (i for i in site.implementations if site.id(i) in wanted or i.id in wanted)
        return next(named, None)

    return choose


@dataclass(frozen=True, eq=False)
class _Substitution:
    chosen: Mapping[tuple[int, ...], Option]
    inline_checkpoints: bool
    entered: frozenset[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        around = frozenset(path[:size] for path in self.chosen for size in range(1, len(path)))
        object.__setattr__(self, "entered", around)

    def run(
        self, closed: Any, inputs: Sequence[Any], prefix: tuple[int, ...], site: Any
    ) -> list[Any]:
        jaxpr, consts = compat.open_jaxpr(closed)
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, Number):
                return atom.value
            return compat.traced_value_of(atom) if compat.is_literal(atom) else env[atom]

        for index in self._live(jaxpr, prefix):
            eqn, path = jaxpr.eqns[index], (*prefix, index)
            option = self.chosen.get(path)
            if option is not None:
                with compat.at_site(eqn, site):
                    results = _apply(option, [read(atom) for atom in option.inputs])
            elif path in self.entered:
                body = compat.call_body(
                    eqn, inline_checkpoints=self.inline_checkpoints, inline_custom=False
                )
                outer = site if site is not None else eqn
                results = self.run(body, [read(atom) for atom in eqn.invars], path, outer)
            else:
                operands = [read(atom) for atom in eqn.invars]
                results = compat.evaluate_equation(eqn, operands, site)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _live(self, jaxpr: Any, prefix: tuple[int, ...]) -> list[int]:
        """The equations that are still needed, in order."""
        needed = {atom for atom in jaxpr.outvars if not compat.is_literal(atom)}
        live: list[int] = []
        for index in range(len(jaxpr.eqns) - 1, -1, -1):
            eqn = jaxpr.eqns[index]
            if not eqn.effects and needed.isdisjoint(eqn.outvars):
                continue
            live.append(index)
            option = self.chosen.get((*prefix, index))
            reads = eqn.invars if option is None else option.inputs
            needed.update(
                a for a in reads if not isinstance(a, Number) and not compat.is_literal(a)
            )
        return live[::-1]


def _apply(option: Option, inputs: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(differentiable(option.implementation, option.params)(*inputs))
