"""Gradients of functions that run operator by operator within a budget: `value_and_grad`, `grad`, `vjp`.

The function runs once, as it is written, on values that can be read: `if`, `while` and recursion may depend on
them. `jax.vjp` differentiates it while it runs. The backward pass is known then, and traced to a jaxpr, whose
equations run one by one, element-wise ones in groups (`remat.dtr.runtime.groups`); what is read for the last time
is let go. Kirisame et al., "Dynamic tensor rematerialization" (2020).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.errors import BudgetError, PolicyError, TraceError
from remat.dtr.heuristics import Scoring
from remat.dtr.runtime.groups import Group, grouped
from remat.dtr.runtime.machine import Machine
from remat.dtr.runtime.operators import Costs
from remat.dtr.runtime.statistics import RunStatistics
from remat.dtr.runtime.storages import Reference
from remat.dtr.simulator import Move
from remat.resolve import parse_budget
from remat.trace.calls import as_tuple

__all__ = ["grad", "value_and_grad", "vjp"]

# What jax raises where a value is read that is traced.
_READS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(frozen=True)
class _Options:
    """How a run is done; see `value_and_grad`."""

    budget_bytes: int | None
    heuristic: str | Scoring
    costs: Costs
    seed: int
    trace: bool
    on_run: Callable[[RunStatistics], None] | None
    on_move: Callable[[Move], None] | None

    def machine(self) -> Machine:
        return Machine(
            self.budget_bytes,
            self.heuristic,
            costs=self.costs,
            seed=self.seed,
            keeps_trace=self.trace,
            on_move=self.on_move,
        )

    def tell(self, machine: Machine) -> None:
        if self.on_run is not None:
            self.on_run(machine.statistics())


def _options(
    budget: int | str | None,
    heuristic: str | Scoring,
    costs: Costs,
    seed: int,
    trace: bool,
    on_run: Callable[[RunStatistics], None] | None,
    on_move: Callable[[Move], None] | None,
) -> _Options:
    limit = parse_budget(budget)
    if isinstance(limit, float):
        raise BudgetError(
            f"budget={budget!r} is a share, of a peak that is not known before the function has run: expected "
            'bytes (6442450944) or a size ("6GiB"). Without a budget, `on_run` is told the peak.'
        )
    if costs not in ("roofline", "measured"):
        raise PolicyError(f"costs={costs!r}: expected 'roofline' or 'measured'")
    options = _Options(limit, heuristic, costs, seed, trace, on_run, on_move)
    options.machine()  # an unknown heuristic is an error here
    return options


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    budget: int | str | None = None,
    heuristic: str | Scoring = "dtr_eqclass",
    costs: Costs = "roofline",
    seed: int = 0,
    trace: bool = False,
    on_run: Callable[[RunStatistics], None] | None = None,
    on_move: Callable[[Move], None] | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` that runs operator by operator, within a number of bytes.

    For programs whose structure changes with every example, where a compiled program per structure would be
    compiled without end: operators are compiled once per primitive, parameters and types, and reused. A function
    under `jax.jit` inside of `fun` is one operator, forward and backward: what should be fused belongs under one.

    Args:
        fun: as for `jax.value_and_grad`; runs once, on values that can be read.
        argnums: as for `jax.value_and_grad`.
        has_aux: as for `jax.value_and_grad`.
        holomorphic: as for `jax.value_and_grad`.
        allow_int: as for `jax.value_and_grad`.
        budget: bytes, or a size such as `"6GiB"`, of all arrays that the run makes, results included, and of what
            XLA needs while an operator runs. Not counted: arguments, and arrays that `fun` closes over. None for no
            limit.
        heuristic: what is evicted: a name of `remat.dtr.HEURISTICS`, or which factors its score has.
        costs: of operators: `roofline`, from the compiler's counts of operations and bytes, the same in every
            run; or `measured`, the least time that each took so far, in this process.
        seed: of the heuristic `random`.
        trace: keep every change of memory in the statistics.
        on_run: is told the statistics of a run that came to its end.
        on_move: is told every change of memory as soon as it is done.

    Returns:
        A function of the arguments of `fun` that returns value and gradient as that of `jax.value_and_grad` does.

    Raises:
        BudgetError: the budget cannot be read; in a call: an operator alone does not fit into it.
        PolicyError: an unknown heuristic.
        TraceError: `argnums` are no integers; in a call: an argument is traced by a transform of jax, or something
            cannot be run operator by operator (mutable arrays, `shard_map` outside of `jax.jit`).
    """
    options = _options(budget, heuristic, costs, seed, trace, on_run, on_move)
    numbers = as_tuple(argnums)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(args, numbers)
        _check_inputs(chosen, holomorphic, allow_int)
        _check_concrete((args, kwargs))
        machine = options.machine()
        try:
            interpreter = compat.Interpreter(machine)
            out, pullback, aux = _forward(
                interpreter, _function_of(fun, args, kwargs, numbers), chosen, has_aux
            )
            one = _one(out, _dtype_of_value(out, holomorphic))
            gradients = _backward(machine, interpreter, [pullback.pop()], one)
            gradient = gradients[0] if isinstance(argnums, Integral) else gradients
            results = _arrays(machine, ((out, aux) if has_aux else out, gradient))
        except BaseException as error:
            _forget(error)
            raise
        finally:
            machine.close()
        options.tell(machine)
        return results

    return run


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.grad` that runs operator by operator, within a number of bytes.

    Args:
        fun: as for `jax.grad`.
        argnums: as for `jax.grad`.
        has_aux: as for `jax.grad`.
        holomorphic: as for `jax.grad`.
        allow_int: as for `jax.grad`.
        **options: `budget` and the others of `value_and_grad`.

    Returns:
        A function of the arguments of `fun` that returns the gradient, and `aux` behind it with `has_aux`.

    Raises:
        BudgetError, PolicyError, TraceError: as `value_and_grad` does.
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, **options)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return run


def vjp(
    fun: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    budget: int | str | None = None,
    heuristic: str | Scoring = "dtr_eqclass",
    costs: Costs = "roofline",
    seed: int = 0,
    trace: bool = False,
    on_run: Callable[[RunStatistics], None] | None = None,
    on_move: Callable[[Move], None] | None = None,
) -> Any:
    """`jax.vjp` that runs operator by operator, within a number of bytes.

    What the backward pass reads stays within the budget for as long as the returned function lives. That may be
    called several times, by one thread at a time.

    Args:
        fun: as for `jax.vjp`.
        *primals: as for `jax.vjp`.
        has_aux: as for `jax.vjp`.
        budget: as for `value_and_grad`, as all that follow.
        heuristic: what is evicted.
        costs: of operators.
        seed: of the heuristic `random`.
        trace: keep every change of memory in the statistics.
        on_run: is told the statistics so far, after every backward pass.
        on_move: is told every change of memory.

    Returns:
        The results, and a function from their cotangents to those of the primals; `aux` behind it with `has_aux`.

    Raises:
        BudgetError, PolicyError, TraceError: as `value_and_grad` does.
    """
    options = _options(budget, heuristic, costs, seed, trace, on_run, on_move)
    _check_concrete(primals)
    machine = options.machine()
    interpreter = compat.Interpreter(machine)
    lock = threading.Lock()
    try:
        out, pullback, aux = _forward(interpreter, fun, _on_device(primals), has_aux)
        results = _arrays(machine, (out, aux))
    except BaseException as error:
        _forget(error)
        machine.close()
        raise

    def pull(cotangents: Any) -> Any:
        _check_concrete(cotangents)
        with lock:
            try:
                found = _backward(machine, interpreter, list(pullback), cotangents)
                gradients = _arrays(machine, found, stay=False)
            except BaseException as error:
                _forget(error)
                machine.evict_all()
                raise
            options.tell(machine)
            return gradients

    return (results[0], pull, results[1]) if has_aux else (results[0], pull)


# --- forward and backward


@dataclass(frozen=True)
class _Equations:
    eqns: list[Any]
    outvars: list[Any]


def _forward(
    interpreter: compat.Interpreter, fun: Callable[..., Any], primals: Sequence[Any], has_aux: bool
) -> tuple[Any, list[Any], Any]:
    """Runs a function; returns results, what pulls cotangents back in a list of its own, and aux."""
    with interpreter.active():
        out, pullback, *aux = jax.vjp(fun, *primals, has_aux=has_aux)
    return out, [pullback], aux[0] if aux else None


def _backward(
    machine: Machine, interpreter: compat.Interpreter, pullback: list[Any], cotangents: Any
) -> Any:
    """Runs a backward pass; returns its results, arrays behind references.

    Args:
        machine: runs it.
        interpreter: in whose values the pullback holds what it reads.
        pullback: of `jax.vjp`, alone in a list: it is taken out, so that what was read last can be let go.
        cotangents: of the results.
    """
    leaves, tree = jax.tree.flatten(cotangents)
    is_traced = [not _is_float0(leaf) for leaf in leaves]
    structure: list[Any] = []
    with interpreter.active():
        pull = pullback.pop()

        def flat(*traced: Any) -> list[Any]:
            given = iter(traced)
            whole = [next(given) if t else leaf for leaf, t in zip(leaves, is_traced, strict=True)]
            results, out_tree = jax.tree.flatten(pull(jax.tree.unflatten(tree, whole)))
            structure[:] = [out_tree, list(map(_fixed, results))]
            return [leaf for leaf in results if not _is_float0(leaf)]

        traced = [leaf for leaf, t in zip(leaves, is_traced, strict=True) if t]
        try:
            closed = jax.make_jaxpr(flat)(*traced)
        except _READS:
            # A rule of the user reads values: as jax does it, where all is held to the end.
            found = flat(*traced)
        else:
            del flat, pull
            jaxpr, env = _opened(closed, traced)
            del closed
            machine.expect([var.aval for var in jaxpr.outvars if not compat.is_literal(var)])
            found = _run_jaxpr(machine, jaxpr, env)
    # A cotangent that is a gradient as it is may be of NumPy, whose arrays can be filled anew: a copy.
    rest = iter([jnp.array(x) if isinstance(x, np.ndarray) else x for x in found])
    out_tree, fixed = structure
    return jax.tree.unflatten(out_tree, [next(rest) if leaf is None else leaf for leaf in fixed])


def _opened(closed: Any, operands: Sequence[Any]) -> tuple[_Equations, dict[Any, Any]]:
    """Returns equations without the values they read, and these by variable."""
    jaxpr, consts = compat.open_jaxpr(closed)
    env = dict(zip(jaxpr.invars, operands, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        reference = compat.reference_of(const)
        env[var] = const if reference is None else reference
    return _Equations(list(jaxpr.eqns), list(jaxpr.outvars)), env


def _run_jaxpr(machine: Machine, jaxpr: _Equations, env: dict[Any, Any]) -> list[Any]:
    """Runs equation by equation, or group by group; what nothing reads any more is taken out of `env`."""
    outvars = jaxpr.outvars

    def is_free(var: Any) -> bool:
        return var in env and not isinstance(env[var], Reference)

    eqns = grouped(jaxpr.eqns, outvars, is_free)
    last = _last_reads(eqns, outvars)
    for var in [var for var in env if var not in last]:
        del env[var]
    for index, eqn in enumerate(eqns):
        inputs = [atom.val if compat.is_literal(atom) else env[atom] for atom in eqn.invars]
        run = machine.run_group if isinstance(eqn, Group) else machine.run_equation
        results = run(eqn, inputs)
        env.update(
            (var, result)
            for var, result in zip(eqn.outvars, results, strict=True)
            if last.get(var, -1) > index
        )
        for var, result in zip(eqn.outvars, results, strict=True):
            if last.get(var) == len(eqns) and isinstance(result, Reference):
                machine.mark_result(result)
        for atom in eqn.invars:
            if not compat.is_literal(atom) and last[atom] == index:
                env.pop(atom, None)
        del inputs, results
    return [atom.val if compat.is_literal(atom) else env[atom] for atom in outvars]


def _last_reads(eqns: Sequence[Any], outvars: Sequence[Any]) -> dict[Any, int]:
    """For every variable that is read the last equation that does; results are read behind all."""
    last = {}
    for index, eqn in enumerate(eqns):
        last.update((atom, index) for atom in eqn.invars if not compat.is_literal(atom))
    last.update((atom, len(eqns)) for atom in outvars if not compat.is_literal(atom))
    return last


def _arrays(machine: Machine, tree: Any, *, stay: bool = True) -> Any:
    """Returns a tree with arrays where values of the machine are."""
    leaves, structure = jax.tree.flatten(tree)
    found = [leaf if isinstance(leaf, Reference) else compat.reference_of(leaf) for leaf in leaves]
    with compat.untraced():
        arrays = iter(machine.results([ref for ref in found if ref is not None], stay=stay))
        return jax.tree.unflatten(
            structure,
            [
                next(arrays) if ref is not None else jnp.asarray(leaf) if _is_number(leaf) else leaf
                for leaf, ref in zip(leaves, found, strict=True)
            ],
        )


def _forget(error: BaseException) -> None:
    """Drops the arrays that operators had in hand when they failed: a traceback is held as long as its error."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == Machine.__module__:
            trace.tb_frame.clear()
        trace = trace.tb_next


# --- arguments and results


def _function_of(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], numbers: Sequence[int]
) -> Callable[..., Any]:
    """Returns `fun` as a function of some of its arguments."""

    def of(*chosen: Any) -> Any:
        whole = list(args)
        for number, value in zip(numbers, chosen, strict=True):
            whole[number] = value
        return fun(*whole, **kwargs)

    return of


def _chosen(args: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"argnums={number} of a call with {len(args)} positional arguments: gradients are for "
                f"positional arguments, expected numbers from {-len(args)} to {len(args) - 1}"
            )
    return _on_device([args[number] for number in numbers])


def _on_device(tree: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays of NumPy are put where the function reads them, once."""
    leaves, structure = jax.tree.flatten(tuple(tree))
    return jax.tree.unflatten(
        structure,
        [
            jnp.asarray(leaf) if isinstance(leaf, np.ndarray) and not _is_float0(leaf) else leaf
            for leaf in leaves
        ],
    )


def _check_inputs(chosen: Sequence[Any], holomorphic: bool, allow_int: bool) -> None:
    for leaf in jax.tree.leaves(chosen):
        dtype = jax.dtypes.result_type(leaf)
        if holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"holomorphic=True takes complex arguments, got one of type {dtype}")
        if not holomorphic and jnp.issubdtype(dtype, jnp.complexfloating):
            continue
        if not allow_int and not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"gradients are for arguments of real or complex numbers, got one of type {dtype}; other "
                "arguments are left out of argnums, or taken with allow_int=True"
            )


def _dtype_of_value(out: Any, holomorphic: bool) -> Any:
    is_number = isinstance(out, (int, float, complex, np.generic))
    if not is_number and getattr(out, "shape", None) != ():
        raise TypeError(
            "gradients are of functions that return one number, got "
            f"{getattr(out, 'aval', None) or type(out).__name__}"
        )
    dtype = jax.dtypes.result_type(out)
    if not jnp.issubdtype(dtype, jnp.complexfloating if holomorphic else jnp.floating):
        raise TypeError(
            f"gradients are of functions that return a {'complex' if holomorphic else 'real'} number, got one of "
            f"type {dtype}; holomorphic={holomorphic}"
        )
    return dtype


def _one(out: Any, dtype: Any) -> Any:
    """The cotangent of a result: of a weak type, as that of a Python number is, if the result is."""
    number = 1 + 0j if jnp.issubdtype(dtype, jnp.complexfloating) else 1.0
    is_weak = getattr(jax.typeof(out), "weak_type", False)
    return number if is_weak and jax.typeof(number).dtype == dtype else np.ones((), dtype)


def _check_concrete(tree: Any) -> None:
    is_traced = any(map(compat.is_tracer, jax.tree.leaves(tree)))
    if is_traced or not compat.top_level_trace():
        raise TraceError(
            "the runtime of `remat.dtr` runs on arrays, at once: it cannot be called under `jax.jit`, `jax.vmap`, "
            "`jax.grad` or another transform. What is traced as a whole takes `remat.checkpoint`."
        )


def _fixed(leaf: Any) -> np.ndarray | None:
    """The derivative of integers, None for every other value."""
    return np.zeros(leaf.shape, leaf.dtype) if _is_float0(leaf) else None


def _is_float0(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (float, complex, np.generic))
