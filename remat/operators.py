"""Other implementations of operators: how a backward pass is computed, and from which values.

jax's rule for an operator fixes what its backward pass reads. Often another value would do: softmax's
gradient can be computed from its result, which the next operator keeps anyway, instead of from the
exponentials (output-activated backward, as in Gist and In-Place ABN). An `Implementation` says how;
`with_implementations` puts it in the place of the operator in a program that is not yet differentiated.

An operator is a primitive (`tanh`), a function that the program calls under its name (`jax.jit` functions and
those with their own derivative rule: `relu`, `silu`, `log_softmax`), or a function whose equations are
written into the program (`jax.nn.softmax` is not jitted). The last kind is found by comparing equations with
those of `Implementation.reference`. The same comparison protects functions that merely have the same name:
where there is a reference, only what computes the same thing is replaced (of a function with its own
derivative rule, name and body are compared; the rule itself cannot be).

What is deliberately not here: tanh, logistic, exp, sqrt and rsqrt are output-activated in jax already, and an
input-activated backward (silu and gelu from their input) is what a plan does by recomputation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from remat import _compat
from remat.errors import ImplementationError, nearest
from remat.graph import Implementations, is_wanted
from remat.graph import Site as GraphSite
from remat.primitives import aval_bytes
from remat.program import Equation, Program, evaluate, is_inexact, program_of
from remat.program import Literal as Constant

__all__ = [
    "Choose",
    "Implementation",
    "ImplementationReport",
    "Option",
    "Site",
    "batch_norm",
    "called_by_name",
    "check_implementation",
    "find_sites",
    "implementations",
    "register_implementation",
    "sites_in",
    "substituted",
    "unregister_implementation",
    "with_implementations",
]

Kind = Literal["output", "input", "intermediate", "kernel"]
Candidates = Callable[[Any], Iterable[tuple[Sequence[Any], Mapping[str, Any]]]]

_KINDS = ("output", "input", "intermediate", "kernel")


def _always(*_: Any, **__: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to differentiate an operator.

    Attributes:
        operator: name of a primitive (`"tanh"`) or of a function (`"softmax"`).
        name: of this implementation, for instance `"output"`.
        kind: what the backward pass reads: the operator's output, its input, an intermediate value, or
            whatever a fused kernel wants.
        exact: whether gradients are bit-equal to those of jax's rule.
        forward: `forward(*inputs, **params) -> (outputs, residuals)`. Which residuals are kept is for the
            plan to decide; these are what the backward reads. `outputs` is an array, or a tuple of several.
        backward: `backward(residuals, cotangents, **params)`, one cotangent per input (None for an input
            that has none), `cotangents` of the structure of `outputs`.
        supports: `supports(*avals, **params)`: why it does not apply to inputs of these shapes and dtypes,
            None if it does.
        platforms: the jax platforms it runs on (`"cpu"`, `"cuda"`, ...); empty for all.
        reference: the function itself, `reference(*inputs, **params)`, with a single result. Equations are
            compared with its own; without one, every call under the name is taken for the operator.
        candidates: `candidates(result)`: for a result of this abstract value, the inputs (as
            `jax.ShapeDtypeStruct`) and parameters with which `reference` can have computed it. Needed to find
            parameters and functions that are not called by name. Scalars that a program contains as numbers
            (an epsilon) are inputs of the reference.
        ends_with: the primitives by which `reference` may compute its result; where its equations are written
            into a program, only these are looked at. Empty for all, which is slower.
        named_only: a policy takes it only if it is named, not with `implementations="all"`: its gradients may be
            far off for some arguments.
    """

    operator: str
    name: str
    kind: Kind
    exact: bool
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Sequence[Any]]
    supports: Callable[..., str | None] = _always
    platforms: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None
    candidates: Candidates | None = None
    ends_with: tuple[str, ...] = ()
    named_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ImplementationError(
                f"implementation {self.id!r} has kind={self.kind!r}; expected one of "
                f"{', '.join(_KINDS)}{nearest(str(self.kind), _KINDS)}."
            )
        if any(sign in f"{self.operator}{self.name}" for sign in "/@") or not self.name:
            raise ImplementationError(
                f"operator={self.operator!r} and name={self.name!r}: expected names without '/' and '@', "
                "which site ids use (softmax/output@0)."
            )
        if self.candidates is not None and self.reference is None:
            raise ImplementationError(
                f"implementation {self.id!r} has candidates but no reference; pass the function whose "
                "equations are to be found."
            )

    @property
    def id(self) -> str:
        """Returns `operator/name`."""
        return f"{self.operator}/{self.name}"


_REGISTRY: dict[str, Implementation] = {}


@overload
def register_implementation(implementation: Implementation) -> Implementation: ...
@overload
def register_implementation(**fields: Any) -> Callable[[Callable[..., Any]], Implementation]: ...
def register_implementation(implementation: Implementation | None = None, **fields: Any) -> Any:
    """Registers an implementation, so that `with_implementations` offers it.

    Plainly, `register_implementation(Implementation(...))`, or as a decorator of the forward function:

        @register_implementation(operator="cube", name="input", kind="input", exact=False, backward=...)
        def cube(x):
            return x**3, (x,)

    Returns:
        The implementation.

    Raises:
        ImplementationError: one is registered under the same `operator/name`.
    """
    if implementation is None:
        return lambda forward: register_implementation(Implementation(forward=forward, **fields))
    if implementation.id in _REGISTRY:
        raise ImplementationError(
            f"{implementation.id!r} is registered already; choose another name, or call "
            f"unregister_implementation({implementation.id!r}) first."
        )
    _REGISTRY[implementation.id] = implementation
    return implementation


def unregister_implementation(implementation: Implementation | str) -> None:
    """Removes an implementation, given itself or as `operator/name`.

    Raises:
        ImplementationError: there is none.
    """
    key = implementation if isinstance(implementation, str) else implementation.id
    if key not in _REGISTRY:
        raise ImplementationError(
            f"no implementation {key!r} is registered; expected one of "
            f"{', '.join(_REGISTRY)}{nearest(key, _REGISTRY)}."
        )
    del _REGISTRY[key]


def implementations(operator: str | None = None) -> tuple[Implementation, ...]:
    """Returns the registered implementations, of one operator or of all, in order of registration."""
    return tuple(i for i in _REGISTRY.values() if operator in (None, i.operator))


# Finding operators in a program.


@dataclass(frozen=True, eq=False)
class Option:
    """An implementation at a site.

    Attributes:
        implementation: what to put there.
        inputs: atoms of the jaxpr that the site lies in, one per input of the implementation.
        params: the operator's parameters here.
        why_not: why it does not apply, None if it does.
    """

    implementation: Implementation
    inputs: tuple[Any, ...]
    params: Mapping[str, Any]
    why_not: str | None


@dataclass(frozen=True, eq=False)
class Site:
    """An occurrence of an operator in a program.

    Attributes:
        operator: its name.
        occurrence: its number among the occurrences of this operator, in program order. It depends on the
            program and on what the operator's registered implementations can find, not on what is chosen.
        path: index of the equation in the program, preceded by those of the calls around it.
        options: the registered implementations, also those that do not apply.
        avals: abstract values of the results.
        scope: the named scope.
        source: `file:line` in the user's code.
    """

    operator: str
    occurrence: int
    path: tuple[int, ...]
    options: tuple[Option, ...]
    avals: tuple[Any, ...]
    scope: str = ""
    source: str = ""

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """The implementations that apply here."""
        return tuple(o.implementation for o in self.options if o.why_not is None)

    def id(self, implementation: Implementation | str) -> str:
        """Returns the id of an implementation at this site, for instance `softmax/output@0`."""
        name = implementation if isinstance(implementation, str) else implementation.name
        return f"{self.operator}/{name}@{self.occurrence}"

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the implementations that apply here."""
        return tuple(map(self.id, self.implementations))


Choose = Callable[[Site], Implementation | None]


def find_sites(
    closed: Any, *, platform: str | None = None, inline_checkpoints: bool = True
) -> tuple[Site, ...]:
    """Returns the operators of a program for which implementations are registered.

    Bodies of loops, branches and functions with their own derivative rule are not searched.

    Args:
        closed: what `jax.make_jaxpr` returns.
        platform: where the program will run, None if that is open: then implementations for certain
            platforms do not apply.
        inline_checkpoints: search `jax.checkpoint` regions too (replacing something in one dissolves it).

    Complexity:
        Equations times candidates of the operators with a reference; a candidate is compared from its result
        backwards and given up at the first difference.
    """
    jaxpr, _ = _compat.open_jaxpr(closed)
    counts: dict[str, int] = {}
    found: list[Site] = []
    walk = _walk(jaxpr, (), (), frozenset(), platform, inline_checkpoints)
    for path, calls, operator, options in walk:
        eqn = calls[-1]
        occurrence = counts.get(operator, 0)
        counts[operator] = occurrence + 1
        found.append(
            Site(
                operator=operator,
                occurrence=occurrence,
                path=path,
                options=options,
                avals=tuple(var.aval for var in eqn.outvars),
                scope="/".join(filter(None, map(_compat.scope_of, calls))),
                source=next(filter(None, map(_compat.source_of, calls[::-1])), ""),
            )
        )
    return tuple(found)


_Hit = tuple[tuple[int, ...], tuple[Any, ...], str, tuple[Option, ...]]


def _walk(
    jaxpr: Any,
    prefix: tuple[int, ...],
    calls: tuple[Any, ...],
    inside: frozenset[str],
    platform: str | None,
    inline_checkpoints: bool,
) -> Iterator[_Hit]:
    """Yields the operators of a jaxpr and of what it calls, each with its equation and the calls around it.

    Args:
        jaxpr: what to walk.
        prefix: indices of the calls that led here.
        calls: the equations of these calls.
        inside: operators whose own equations these are.
        platform: as for `find_sites`.
        inline_checkpoints: as for `find_sites`.
    """
    level: Program | None = None
    atoms: Mapping[int, Any] = {}
    operators = tuple(dict.fromkeys(i.operator for i in _REGISTRY.values()))
    for index, eqn in enumerate(jaxpr.eqns):
        path, name = (*prefix, index), _compat.called_function_name(eqn)
        body = _compat.call_body(eqn, inline_checkpoints=inline_checkpoints, inline_custom=False)
        entered = set(inside)
        for operator in operators:
            if operator in inside:
                continue
            options: list[Option] = []
            for implementation in implementations(operator):
                if operator in (eqn.primitive.name, name):
                    match = _match_call(implementation, eqn)
                elif implementation.candidates is not None and name is None:
                    if level is None:
                        level, atoms = _level_of(jaxpr)
                    match = _match_inlined(implementation, eqn, index, level, atoms)
                else:
                    match = None
                if match is not None:
                    inputs, params = match
                    why = _why_not(implementation, inputs, params, platform)
                    options.append(Option(implementation, inputs, params, why))
            if options:
                entered.add(operator)
                yield path, (*calls, eqn), operator, tuple(options)
        if body is not None:
            inner, _ = _compat.open_jaxpr(body)
            around, names = (*calls, eqn), frozenset(entered)
            yield from _walk(inner, path, around, names, platform, inline_checkpoints)


def _why_not(
    implementation: Implementation, inputs: Sequence[Any], params: Mapping[str, Any], platform: Any
) -> str | None:
    allowed = implementation.platforms
    if allowed and platform not in allowed:
        return f"it runs on {', '.join(allowed)}, not on {platform or 'an unnamed platform'}"
    return implementation.supports(*(atom.aval for atom in inputs), **params)


_Match = tuple[tuple[Any, ...], Mapping[str, Any]]


def _match_call(implementation: Implementation, eqn: Any) -> _Match | None:
    if eqn.primitive.name == implementation.operator:
        return tuple(eqn.invars), eqn.params
    if implementation.reference is None:
        return tuple(eqn.invars), {}
    body = _compat.call_body(eqn, inline_checkpoints=True, inline_custom=False)
    # A function with its own rule is compared as one equation: its body alone does not tell its gradient.
    target = program_of(body) if body is not None else _program_of_equation(eqn)
    if len(target.outputs) != 1 or not isinstance(target.outputs[0], int):
        return None
    if implementation.candidates is None:
        given: Any = [([_struct(atom.aval) for atom in eqn.invars], {})]
    else:
        given = implementation.candidates(eqn.outvars[0].aval)
    position = {value: number for number, value in enumerate(target.inputs)}
    for structs, params in given:
        pattern = _reference(implementation.reference, structs, params)
        bound = pattern and _unify(pattern[0], target, target.outputs[0])
        if bound and all(isinstance(a, Constant) or a in position for a in bound):
            inputs = (a if isinstance(a, Constant) else eqn.invars[position[a]] for a in bound)
            return tuple(map(_as_atom, inputs)), params
    return None


def _match_inlined(
    implementation: Implementation, eqn: Any, index: int, level: Program, atoms: Mapping[int, Any]
) -> _Match | None:
    assert implementation.candidates is not None and implementation.reference is not None
    if len(eqn.outvars) != 1 or not is_inexact(eqn.outvars[0].aval):
        return None
    if implementation.ends_with and eqn.primitive.name not in implementation.ends_with:
        return None
    (result,) = level.equations[index].outputs
    for structs, params in implementation.candidates(eqn.outvars[0].aval):
        pattern = _reference(implementation.reference, structs, params)
        if pattern is None or _last(pattern[1]) != eqn.primitive.name:
            continue
        bound = _unify(pattern[1], level, result)
        if bound:
            inputs = (a if isinstance(a, Constant) else atoms[a] for a in bound)
            return tuple(map(_as_atom, inputs)), params
    return None


def _as_atom(atom: Any) -> Any:
    """An atom with an `aval`: a jaxpr's variable, or a constant of a program with its abstract value."""
    return _Number(atom.value, jax.typeof(atom.value)) if isinstance(atom, Constant) else atom


@dataclass(frozen=True, eq=False)
class _Number:
    value: Any
    aval: Any


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(aval, "weak_type", False))
    struct = _compat.shape_of(aval)
    return struct.update(weak_type=True) if weak else struct


def _reference(
    function: Callable[..., Any], structs: Sequence[Any], params: Mapping[str, Any]
) -> tuple[Program, Program] | None:
    key = tuple((tuple(s.shape), s.dtype, bool(getattr(s, "weak_type", False))) for s in structs)
    return _trace_reference(function, key, tuple(sorted(params.items())), _compat.trace_context())


@functools.lru_cache(maxsize=512)
def _trace_reference(
    function: Callable[..., Any], key: Any, params: Any, _: Any
) -> tuple[Program, Program] | None:
    """The reference with its calls inlined and with its calls kept; None if it rejects these inputs."""
    structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in key]
    try:
        closed = jax.make_jaxpr(lambda *inputs: function(*inputs, **dict(params)))(*structs)
    except (TypeError, ValueError):
        return None
    return program_of(closed), _level_of(_compat.open_jaxpr(closed)[0])[0]


def _last(program: Program) -> str | None:
    """The primitive that computes a program's result."""
    (result,) = program.outputs
    producer = _producers(program).get(result) if isinstance(result, int) else None
    return producer.source.primitive.name if producer is not None else None


def _program_of_equation(eqn: Any) -> Program:
    """A program of one equation and of its operands, none of which is a literal."""
    sizes = len(eqn.invars), len(eqn.outvars)
    inputs, outputs = tuple(range(sizes[0])), tuple(range(sizes[0], sum(sizes)))
    avals = tuple(atom.aval for atom in (*eqn.invars, *eqn.outvars))
    return Program(avals, inputs, {}, (Equation(eqn, inputs, outputs),), outputs)


def _level_of(jaxpr: Any) -> tuple[Program, Mapping[int, Any]]:
    """A jaxpr as a program whose equations are its own, calls not inlined; and its variable per value."""
    numbers: dict[Any, int] = {}
    atoms: dict[int, Any] = {}

    def new(var: Any) -> int:
        numbers[var] = len(atoms)
        atoms[numbers[var]] = var
        return numbers[var]

    def read(atom: Any) -> Any:
        if _compat.is_literal(atom):
            return Constant(_compat.traced_value_of(atom))
        return numbers[atom]

    for var in jaxpr.constvars:
        new(var)
    inputs = tuple(map(new, jaxpr.invars))
    equations = tuple(
        Equation(eqn, tuple(map(read, eqn.invars)), tuple(map(new, eqn.outvars)))
        for eqn in jaxpr.eqns
    )
    avals = tuple(atoms[number].aval for number in range(len(atoms)))
    outputs = tuple(map(read, jaxpr.outvars))
    return Program(avals, inputs, {}, equations, outputs), atoms


def _producers(program: Program) -> Mapping[int, Equation]:
    return {value: equation for equation in program.equations for value in equation.outputs}


def _unify(pattern: Program, target: Program, result: int) -> list[Any] | None:
    """Compares a whole program with the part of another that computes `result`.

    Returns:
        What the pattern's inputs are in the target, None if the two differ.
    """
    ours, theirs = _producers(pattern), _producers(target)
    bound: dict[int, Any] = {}
    same: dict[int, int] = {}
    (root,) = pattern.outputs
    inputs = set(pattern.inputs)
    pending: list[tuple[Any, Any]] = [(root, result)]
    while pending:
        mine, other = pending.pop()
        if isinstance(mine, Constant):
            if not (isinstance(other, Constant) and _same_value(mine.value, other.value)):
                return None
        elif mine in inputs:
            known = bound.setdefault(mine, other)
            is_same = known is other or (isinstance(other, int) and known == other)
            if not is_same or not _same_aval(pattern.avals[mine], _aval_of(target, other)):
                return None
        elif not isinstance(other, int) or mine not in ours or other not in theirs:
            return None
        elif mine in same:
            if same[mine] != other:
                return None
        else:
            left, right = ours[mine], theirs[other]
            if not _same_equation(left, right) or (
                left.outputs.index(mine) != right.outputs.index(other)
            ):
                return None
            same[mine] = other
            pending += zip(left.inputs, right.inputs, strict=True)
    return [bound[value] for value in pattern.inputs] if len(bound) == len(inputs) else None


def _aval_of(program: Program, atom: Any) -> Any:
    return jax.typeof(atom.value) if isinstance(atom, Constant) else program.avals[atom]


def _same_aval(left: Any, right: Any) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def _same_value(left: Any, right: Any) -> bool:
    mine, other = np.asarray(left), np.asarray(right)
    return mine.dtype == other.dtype and np.array_equal(mine, other)


def _same_equation(left: Equation, right: Equation) -> bool:
    mine, other = left.source, right.source
    if mine.primitive is not other.primitive or len(left.inputs) != len(right.inputs):
        return False
    if _compat.called_function_name(mine) != _compat.called_function_name(other):
        return False
    left_params, right_params = _compat.plain_params(mine), _compat.plain_params(other)
    if mine.effects or other.effects or left_params.keys() != right_params.keys():
        return False
    return all(_same_param(value, right_params[key]) for key, value in left_params.items())


def _same_param(left: Any, right: Any) -> bool:
    if hasattr(left, "eqns") or hasattr(left, "jaxpr"):
        return str(left) == str(right)
    return left is right or bool(np.all(left == right))


# Putting implementations into a program.


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
    jaxpr, _ = _compat.open_jaxpr(closed)
    structs = [_struct(var.aval) for var in jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: substitution.run(closed, inputs, (), None))(*structs)


def called_by_name() -> frozenset[str]:
    """Returns the operators that are recognised by their name alone: calls of them must stay calls."""
    return frozenset(i.operator for i in _REGISTRY.values() if i.reference is None)


def sites_in(program: Program, wanted: Implementations) -> tuple[GraphSite, ...]:
    """Returns the implementations that are wanted and apply in a program, as sites of a graph.

    `exact` does not look for the built-in ones: what is exact among them, `remat.rules` finds on the joint graph.
    """
    entries = [i for i in _REGISTRY.values() if not i.named_only or _is_named(i, wanted)]
    if wanted == "exact":
        entries = [i for i in entries if i.exact and i.id not in _BUILT_IN]
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
    structs = [_compat.shape_of(program.avals[v]) for v in program.inputs]
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
        jaxpr, consts = _compat.open_jaxpr(closed)
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, _Number):
                return atom.value
            return _compat.traced_value_of(atom) if _compat.is_literal(atom) else env[atom]

        for index in self._live(jaxpr, prefix):
            eqn, path = jaxpr.eqns[index], (*prefix, index)
            option = self.chosen.get(path)
            if option is not None:
                with _compat.at_site(eqn, site):
                    results = _apply(option, [read(atom) for atom in option.inputs])
            elif path in self.entered:
                body = _compat.call_body(
                    eqn, inline_checkpoints=self.inline_checkpoints, inline_custom=False
                )
                outer = site if site is not None else eqn
                results = self.run(body, [read(atom) for atom in eqn.invars], path, outer)
            else:
                operands = [read(atom) for atom in eqn.invars]
                results = _compat.evaluate_equation(eqn, operands, site)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _live(self, jaxpr: Any, prefix: tuple[int, ...]) -> list[int]:
        """The equations that are still needed, in order."""
        needed = {atom for atom in jaxpr.outvars if not _compat.is_literal(atom)}
        live: list[int] = []
        for index in range(len(jaxpr.eqns) - 1, -1, -1):
            eqn = jaxpr.eqns[index]
            if not eqn.effects and needed.isdisjoint(eqn.outvars):
                continue
            live.append(index)
            option = self.chosen.get((*prefix, index))
            reads = eqn.invars if option is None else option.inputs
            needed.update(
                a for a in reads if not isinstance(a, _Number) and not _compat.is_literal(a)
            )
        return live[::-1]


def _apply(option: Option, inputs: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(_custom_vjp(option.implementation, option.params)(*inputs))


def _custom_vjp(implementation: Implementation, params: Mapping[str, Any]) -> Callable[..., Any]:
    @jax.custom_vjp
    def operator(*inputs: Any) -> Any:
        return implementation.forward(*inputs, **params)[0]

    def forward(*inputs: Any) -> tuple[Any, Any]:
        return implementation.forward(*inputs, **params)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        return tuple(implementation.backward(residuals, cotangents, **params))

    operator.defvjp(forward, backward)
    return operator


# The test harness.

_RTOL = {"float64": 1e-12, "float32": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}


@dataclass(frozen=True)
class ImplementationReport:
    """What `check_implementation` found; it only returns one if everything holds.

    Attributes:
        implementation: `operator/name`.
        exact: whether gradients were bit-equal to those of jax's rule (and had to be).
        inputs: dtypes and shapes of the example inputs.
        largest_error: the largest difference of a gradient, relative to the gradient's largest entry.
        residual_bytes: what the backward pass reads beyond the operator's inputs and outputs.
        reference_residual_bytes: the same for jax's rule.
        checks: what was compared.
    """

    implementation: str
    exact: bool
    inputs: tuple[str, ...]
    largest_error: float
    residual_bytes: int
    reference_residual_bytes: int
    checks: tuple[str, ...]

    def __str__(self) -> str:
        how = "bit-equal" if self.exact else f"largest relative error {self.largest_error:.2g}"
        return (
            f"{self.implementation} of ({', '.join(self.inputs)}): gradients {how} "
            f"({', '.join(self.checks)}); keeps {self.residual_bytes} bytes beyond inputs and outputs, "
            f"jax's rule {self.reference_residual_bytes}"
        )


def check_implementation(
    implementation: Implementation, *example_inputs: Any, rtol: float | None = None, **params: Any
) -> ImplementationReport:
    """Tests an implementation against jax's own rule, on the attached default device.

    Results must be bit-equal, shapes and dtypes of gradients those of the inputs, and gradients equal to
    jax's (bit-equal if it says it is exact), under `jax.jit` and under `jax.vmap`.

    Args:
        implementation: registered or not.
        *example_inputs: arrays, as the operator is called with.
        rtol: largest error of a gradient, relative to the largest entry of jax's; by default a few roundings of
            the dtype. Exact implementations have none.
        **params: the operator's parameters.

    Raises:
        ImplementationError: it does not hold; the message says what was compared and by how much it is off.
    """
    inputs = [jnp.asarray(x) for x in example_inputs]
    reason = implementation.supports(*map(jax.typeof, inputs), **params)
    if reason is not None:
        raise ImplementationError(
            f"{implementation.id!r} does not support these example inputs: {reason}. Pass others."
        )
    active = tuple(i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.inexact))
    if not active:
        raise ImplementationError(
            f"{implementation.id!r} cannot be checked: none of the example inputs is a floating point "
            f"array; they have dtypes {[str(x.dtype) for x in inputs]}."
        )
    reference = functools.partial(_plain(implementation), **params)
    candidate = _custom_vjp(implementation, params)
    outputs = jax.eval_shape(reference, *inputs)
    seeds = jax.tree.map(lambda o: _cotangents(o.shape, o.dtype), outputs)
    compare = _Comparison(implementation, rtol)
    compare.shapes(jax.eval_shape(candidate, *inputs), outputs)
    ours, plain = _differentiated(candidate, active), _differentiated(reference, active)
    compare("jit", jax.jit(ours), inputs, seeds, jax.jit(plain)(inputs, seeds))
    together = [jnp.stack([x, x[::-1] if x.ndim else x]) for x in inputs]
    stacked = jax.tree.map(lambda c: jnp.stack([c, -c]), seeds)
    theirs = jax.jit(jax.vmap(plain))(together, stacked)
    compare("vmap", jax.jit(jax.vmap(ours)), together, stacked, theirs)
    return ImplementationReport(
        implementation=implementation.id,
        exact=implementation.exact,
        inputs=tuple(map(_label, inputs)),
        largest_error=compare.largest_error,
        residual_bytes=_residual_bytes(candidate, inputs, active),
        reference_residual_bytes=_residual_bytes(reference, inputs, active),
        checks=tuple(compare.done),
    )


def _plain(implementation: Implementation) -> Callable[..., Any]:
    """The operator with jax's own rule."""
    if implementation.reference is not None:
        return implementation.reference
    primitive = getattr(jax.lax, f"{implementation.operator}_p", None)
    if primitive is None:
        raise ImplementationError(
            f"{implementation.id!r} cannot be checked: there is no primitive jax.lax.{implementation.operator}_p "
            "and it has no reference; pass reference=, the function that it implements."
        )
    return primitive.bind


def _label(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _cotangents(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # A seed that nobody takes: a cotangent proportional to an input can be a special case (batch norm).
    values = np.random.default_rng(20181112).normal(size=shape)
    return (
        jnp.asarray(values, dtype)
        if jnp.issubdtype(dtype, jnp.inexact)
        else jnp.zeros(shape, dtype)
    )


def _on_active(function: Callable[..., Any], active: tuple[int, ...], inputs: Sequence[Any]) -> Any:
    def of_active(*values: Any) -> Any:
        full = list(inputs)
        for index, value in zip(active, values, strict=True):
            full[index] = value
        return function(*full)

    return of_active


def _differentiated(function: Callable[..., Any], active: tuple[int, ...]) -> Callable[..., Any]:
    def run(inputs: Sequence[Any], seeds: Any) -> Any:
        of_active = _on_active(function, active, inputs)
        outputs, pullback = jax.vjp(of_active, *(inputs[i] for i in active))
        return outputs, pullback(seeds)

    return run


@dataclass(eq=False)
class _Comparison:
    """Compares what an implementation gives with what jax gives, and says what differs."""

    implementation: Implementation
    rtol: float | None
    largest_error: float = 0.0
    done: list[str] = field(default_factory=list)

    def __call__(self, name: str, run: Any, inputs: Any, seeds: Any, theirs: Any) -> None:
        try:
            outputs, gradients = run(inputs, seeds)
        except (TypeError, ValueError) as error:
            self._fail(name, f"raises {type(error).__name__}: {error}", error)
        expected_outputs, expected = theirs
        results = zip(jax.tree.leaves(outputs), jax.tree.leaves(expected_outputs), strict=True)
        for number, (mine, other) in enumerate(results):
            if not _bit_equal(mine, other):
                self._fail(name, f"result {number} is {_difference(mine, other)}")
        for number, (mine, other) in enumerate(zip(gradients, expected, strict=True)):
            self._gradient(name, number, mine, other)
        self.done.append(name)

    def shapes(self, outputs: Any, expected: Any) -> None:
        """Checks structure, shapes and dtypes of the results."""
        found, wanted = jax.tree.leaves(outputs), jax.tree.leaves(expected)
        if jax.tree.structure(outputs) != jax.tree.structure(expected):
            self._fail(
                "shapes", f"gives {len(found)} results; expected {len(wanted)}, structured alike"
            )
        for number, (mine, other) in enumerate(zip(found, wanted, strict=True)):
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                self._fail(
                    "shapes", f"result {number} is {_label(mine)} instead of {_label(other)}"
                )

    def _gradient(self, name: str, number: int, mine: Any, other: Any) -> None:
        error = _relative_error(mine, other)
        self.largest_error = max(self.largest_error, error)
        if self.implementation.exact:
            if not _bit_equal(mine, other):
                self._fail(
                    name,
                    f"gradient {number} is {_difference(mine, other)}, but exact=True promises equal bits; "
                    "declare exact=False if this is rounding",
                )
            return
        allowed = self.rtol if self.rtol is not None else _RTOL.get(str(other.dtype), 1e-12)
        if not error <= allowed:
            self._fail(
                name,
                f"gradient {number} is off by {error:.3g} of its largest entry (rtol {allowed:g})",
            )

    def _fail(self, name: str, what: str, cause: Exception | None = None) -> Any:
        raise ImplementationError(
            f"{self.implementation.id!r} does not hold ({name}): {what}."
        ) from cause


def _bit_equal(mine: Any, other: Any) -> bool:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return False
    left, right = np.asarray(mine), np.asarray(other)
    if not jnp.issubdtype(left.dtype, jnp.floating):
        return np.array_equal(left, right, equal_nan=left.dtype.kind == "c")
    nans = np.isnan(right.astype(np.float64))
    bits = f"u{left.dtype.itemsize}"
    same = (left.view(bits) == right.view(bits)) | nans
    return bool(np.array_equal(np.isnan(left.astype(np.float64)), nans) and np.all(same))


def _relative_error(mine: Any, other: Any) -> float:
    if mine.shape != other.shape:
        return math.inf
    wide = np.complex128 if jnp.issubdtype(other.dtype, jnp.complexfloating) else np.float64
    left, right = np.asarray(mine, wide), np.asarray(other, wide)
    if not right.size:
        return 0.0
    if not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return math.inf
    finite = np.isfinite(right)
    size = float(np.max(np.abs(right[finite]), initial=0.0))
    error = float(np.max(np.abs(left[finite] - right[finite]), initial=0.0))
    return error / size if size else error


def _difference(mine: Any, other: Any) -> str:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return f"{_label(mine)} instead of {_label(other)}"
    return f"not bit-equal (largest relative error {_relative_error(mine, other):.3g})"


def _residual_bytes(
    function: Callable[..., Any], inputs: Sequence[Any], active: tuple[int, ...]
) -> int:
    """Bytes of what a derivative rule carries from forward to backward, beyond inputs and outputs."""

    def forward(*values: Any) -> Any:
        outputs, pullback = jax.vjp(
            _on_active(function, active, values), *(values[i] for i in active)
        )
        return outputs, jax.tree.leaves(pullback)

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*inputs)
    program = program_of(closed, inline_custom=True)
    num_outputs = len(jax.tree.leaves(shapes[0]))
    there = {*program.inputs, *program.constants, *program.outputs[:num_outputs]}
    varying = set(program.inputs)
    for equation in program.equations:  # zeros and the like are made again, not kept
        if varying.intersection(equation.reads):
            varying.update(equation.outputs)
        else:
            there.update(equation.outputs)
    residuals = {v for v in program.outputs[num_outputs:] if isinstance(v, int)} - there
    return sum(aval_bytes(program.avals[value]) for value in residuals)


# The implementations that come with the library.


def _same_shape_candidates(**params: Any) -> Candidates:
    return lambda result: [((_struct(result),), params)]


def _axis_candidates(result: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    for axis in range(result.ndim - 1, -1, -1):
        yield (_struct(result),), {"axis": axis}


def _softmax_forward(x: jax.Array, *, axis: int) -> tuple[jax.Array, Any]:
    y = jax.nn.softmax(x, axis=axis)
    return y, (y,)


def _softmax_backward(residuals: Any, ct: jax.Array, *, axis: int) -> tuple[jax.Array]:
    (y,) = residuals
    return (y * (ct - jnp.sum(ct * y, axis=axis, keepdims=True)),)


def _softmax(x: jax.Array, *, axis: int) -> jax.Array:
    return jax.nn.softmax(x, axis=axis)


def _log_softmax(x: jax.Array, *, axis: int) -> jax.Array:
    return jax.nn.log_softmax(x, axis=axis)


def _log_softmax_forward(x: jax.Array, *, axis: int) -> tuple[jax.Array, Any]:
    y = jax.nn.log_softmax(x, axis=axis)
    return y, (y,)


def _log_softmax_backward(residuals: Any, ct: jax.Array, *, axis: int) -> tuple[jax.Array]:
    (y,) = residuals
    return (ct - jnp.exp(y) * jnp.sum(ct, axis=axis, keepdims=True),)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, Any]:
    y = jax.nn.relu(x)
    return y, (y,)


def _relu_backward(residuals: Any, ct: jax.Array) -> tuple[jax.Array]:
    (y,) = residuals
    return (jax.lax.select(y > 0, ct, jax.lax.full_like(ct, 0)),)


def batch_norm(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, epsilon: float | jax.Array = 1e-5
) -> jax.Array:
    """Normalises every channel by the mean and variance of the batch.

    The equations are those of `flax.linen.BatchNorm` in training, in one precision, so that its sites are found.

    Args:
        x: `[..., channels]`.
        gamma: scale, `[channels]`.
        beta: shift, `[channels]`.
        epsilon: added to the variance.

    Returns:
        `[..., channels]`.
    """
    axes = tuple(range(x.ndim - 1))
    square = jax.lax.square(x)
    mean = jnp.mean(x, axes)
    variance = jnp.maximum(0.0, jnp.mean(square, axes) - jax.lax.square(mean))
    y = x - jnp.expand_dims(mean, axes)
    scale = jax.lax.rsqrt(jnp.expand_dims(variance, axes) + epsilon)
    channels = (1,) * len(axes) + (-1,)
    return y * (scale * gamma.reshape(channels)) + beta.reshape(channels)


def _batch_norm_forward(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, epsilon: Any
) -> tuple[jax.Array, Any]:
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axes)
    variance = jnp.maximum(0.0, jnp.mean(jax.lax.square(x), axes) - jax.lax.square(mean))
    y = batch_norm(x, gamma, beta, epsilon)
    return y, (y, gamma, beta, jax.lax.rsqrt(variance + epsilon))


def _batch_norm_backward(residuals: Any, ct: jax.Array) -> tuple[Any, ...]:
    y, gamma, beta, scale = residuals
    axes = tuple(range(y.ndim - 1))
    normal = (y - beta) / gamma
    d_beta = jnp.sum(ct, axes)
    d_gamma = jnp.sum(ct * normal, axes)
    count = math.prod(y.shape[:-1])
    dx = gamma * scale * (ct - (d_beta + normal * d_gamma) / count)
    return dx, d_gamma, d_beta, jnp.sum(-0.5 * scale**2 * gamma * d_gamma)


def _batch_norm_candidates(result: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    if result.ndim < 2:
        return
    channels = jax.ShapeDtypeStruct(result.shape[-1:], result.dtype)
    number = jax.ShapeDtypeStruct((), result.dtype)
    yield (_struct(result), channels, channels, number), {}


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)


def _cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")


def _attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool
) -> tuple[jax.Array, Any]:
    return jax.vjp(functools.partial(_cudnn_attention, is_causal=is_causal), q, k, v)


def _attention_backward(residuals: Any, ct: jax.Array, *, is_causal: bool) -> tuple[Any, ...]:
    del is_causal
    return residuals(ct)


def _attention_supports(*avals: Any, is_causal: bool) -> str | None:
    """Asks jax, which knows the shapes, dtypes and versions that cuDNN's kernel takes."""
    try:
        jax.eval_shape(
            lambda *x: _attention_forward(*x, is_causal=is_causal)[0], *map(_struct, avals)
        )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"cuDNN's attention: {str(error).splitlines()[0]}"
    return None


def _attention_candidates(result: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    if result.ndim != 4:
        return
    # Self-attention with as many key and value heads as query heads: more does not show in the result.
    for is_causal in (True, False):
        yield (_struct(result),) * 3, {"is_causal": is_causal}


for _built_in in (
    Implementation(
        operator="softmax",
        name="output",
        kind="output",
        exact=False,
        forward=_softmax_forward,
        backward=_softmax_backward,
        reference=_softmax,
        ends_with=("div",),
        candidates=_axis_candidates,
    ),
    Implementation(
        operator="log_softmax",
        name="output",
        kind="output",
        exact=False,
        forward=_log_softmax_forward,
        backward=_log_softmax_backward,
        reference=_log_softmax,
        ends_with=("sub",),
        candidates=_axis_candidates,
    ),
    Implementation(
        operator="relu",
        name="output",
        kind="output",
        exact=True,
        forward=_relu_forward,
        backward=_relu_backward,
        reference=jax.nn.relu,
        ends_with=("custom_jvp_call",),
        candidates=_same_shape_candidates(),
    ),
    # In-Place ABN (Rota Bulo et al., 2018). It divides by gamma, and errs by about |y / gamma| roundings:
    # choose it only where gamma cannot come near zero (that of a zero-initialised residual branch is zero).
    Implementation(
        operator="batch_norm",
        name="output",
        kind="output",
        exact=False,
        forward=_batch_norm_forward,
        backward=_batch_norm_backward,
        reference=batch_norm,
        ends_with=("add",),
        candidates=_batch_norm_candidates,
        named_only=True,
    ),
    Implementation(
        operator="dot_product_attention",
        name="cudnn",
        kind="kernel",
        exact=False,
        forward=_attention_forward,
        backward=_attention_backward,
        supports=_attention_supports,
        platforms=("cuda",),
        reference=_attention,
        ends_with=("reshape",),
        candidates=_attention_candidates,
    ),
):
    register_implementation(_built_in)
_BUILT_IN = frozenset(_REGISTRY)
