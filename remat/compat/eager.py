"""A trace of our own below every transform of jax: each operator is handed to a runner, and values can be read.

jax's transforms of a function that runs eagerly rest on one trace, which evaluates. With another in its place a
runner decides when an operator runs and how long its results stay, and differentiation, batching, rules of
`custom_jvp` and `custom_vjp` are jax's own, above it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import core as _core
from jax.extend import core as _extend_core

from remat.compat.equations import is_literal, open_jaxpr, plain_params

__all__ = [
    "Runner",
    "Structure",
    "bound",
    "Interpreter",
    "Reference",
    "jaxpr_function",
    "equation_structure",
    "found_by_debug_nans",
    "reference_of",
    "structure_of",
    "untraced",
]


class Reference:
    """A value of a runner, which has an `aval`: in use for as long as somebody holds it."""

    __slots__ = ()


class Runner(Protocol):
    """What runs operators."""

    def run(self, primitive: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
        """Runs an operator on references and plain values; returns references, or operands as they are."""
        ...

    def read(self, reference: Any) -> jax.Array:
        """Returns the array behind a reference."""
        ...

    def unsupported(self, what: str) -> Exception:
        """Returns the error for something that cannot be run operator by operator."""
        ...


class _Trace(_core.Trace):
    __slots__ = ("runner",)

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.runner = runner

    def stage_value(self, val: Any) -> Any:
        is_value = isinstance(val, (_core.Tracer, jax.Array))
        return val if is_value else self.process_primitive(_core.stage_p, [val], {})

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        operands = [self._operand(value, primitive) for value in tracers]
        results = [
            _Tracer(self, found) if isinstance(found, Reference) else found
            for found in self.runner.run(primitive, params, operands)
        ]
        return results if primitive.multiple_results else results[0]

    def _operand(self, value: Any, primitive: Any) -> Any:
        if primitive.ref_primitive or type(_core.typeof(value)).__name__ == "AbstractRef":
            raise self.runner.unsupported("a mutable array (`jax.new_ref`)")
        if isinstance(value, _Tracer) and value._trace is self:
            return value.reference
        if isinstance(value, _core.Tracer):
            raise self.runner.unsupported(
                f"an operand of `{primitive}` is traced by another transform"
            )
        return value

    def process_call(self, call_primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        with _core.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any
    ) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any
    ) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_shard_map(self, *_: Any, **__: Any) -> Any:
        raise self.runner.unsupported("`shard_map` outside of `jax.jit`")


class _Tracer(_core.Tracer):
    """A value of the runner: an array that may be away for now."""

    __slots__ = ("reference",)

    def __init__(self, trace: _Trace, reference: Any) -> None:
        super().__init__(trace, reference.aval)
        self.reference = reference

    def to_concrete_value(self) -> jax.Array:
        with untraced():
            return self._trace.runner.read(self.reference)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with untraced():
            # Always a copy: on the CPU a view would keep the runner's buffer alive.
            return np.array(self._trace.runner.read(self.reference), dtype=dtype, copy=True)

    def tolist(self) -> Any:
        return self.__array__().tolist()

    def item(self, *args: int) -> Any:
        return self.__array__().item(*args)

    def tobytes(self, order: Any = "C") -> bytes:
        return self.__array__().tobytes(order)

    def __float__(self) -> float:
        return float(self.__array__())

    def __complex__(self) -> complex:
        return complex(self.__array__())

    def __format__(self, spec: str) -> str:
        return format(self.__array__()[()], spec) if self.ndim == 0 else format(repr(self), spec)

    def block_until_ready(self) -> _Tracer:
        return self

    def __repr__(self) -> str:
        return f"DtrArray({self.aval.str_short()})"


class Interpreter:
    """A runner in the place of jax's evaluation, in the thread that is `active`."""

    def __init__(self, runner: Runner) -> None:
        self._trace = _Trace(runner)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, jax hands every operator that no transform takes to the runner."""
        with _core.set_current_trace(self._trace):
            yield

    def end(self) -> None:
        """Whatever value is left is of no use."""
        self._trace.invalidate()


def reference_of(value: Any) -> Any | None:
    """Returns the runner's reference behind a value, None for every other value."""
    return value.reference if isinstance(value, _Tracer) else None


def untraced() -> AbstractContextManager[Any]:
    """Inside, jax evaluates at once, whatever is being traced."""
    return _core.eval_context()


def bound(primitive: Any, params: Mapping[str, Any]) -> Callable[..., Sequence[Any]]:
    """Returns an operator as a function of arrays that returns several."""

    def run(*operands: Any) -> Sequence[Any]:
        out = primitive.bind(*operands, **params)
        return out if primitive.multiple_results else (out,)

    return run


def jaxpr_function(closed: Any, kept: Sequence[int]) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function of arrays that returns some of its results."""
    body = _extend_core.jaxpr_as_fun(closed)

    def run(*operands: Any) -> list[Any]:
        results = body(*operands)
        return [results[i] for i in kept]

    return run


def found_by_debug_nans(error: Exception) -> str | None:
    """Returns "nan" or "inf" if an error is what a compiled program raises under `jax.debug_nans`, else None.

    jax makes a `FloatingPointError` of it where it runs a program itself.
    """
    return (
        getattr(error, "ty", None) if type(error).__name__ == "InternalFloatingPointError" else None
    )


def equation_structure(eqn: Any) -> Any:
    """Returns what an equation does, hashable: equal for two traces of the same code."""
    return (eqn.primitive, structure_of(plain_params(eqn)), _context(eqn.ctx))


@functools.lru_cache(maxsize=256)
def _context(context: Any) -> tuple[str, ...]:
    """What jax's settings were where an equation was traced."""
    names = [name for name in type(context).__slots__ if name not in ("__weakref__", "configs")]
    return tuple(f"{name}={getattr(context, name, None)!r}" for name in names)


# --- what two traces of the same code have in common


class Structure:
    """A value that is hashed once, and compared by content."""

    __slots__ = ("_content", "_hash")

    def __init__(self, content: Any) -> None:
        self._content, self._hash = content, hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure)
            and self._hash == other._hash
            and self._content == other._content
        )


_known: weakref.WeakKeyDictionary[Any, Structure] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


def structure_of(params: Mapping[str, Any]) -> Any:
    """Returns what parameters say, hashable: equal for two traces of the same code.

    Jaxprs are compared by their equations, without derivative rules and source lines; those that hold arrays are
    equal to themselves only.
    """
    return tuple((name, _structure(params[name])) for name in sorted(params))


def _structure(param: Any) -> Any:
    if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
        return _structure_of_jaxpr(param)
    if isinstance(param, (tuple, list)):
        return (type(param), *map(_structure, param))
    if isinstance(param, dict):
        return (dict, *((key, _structure(param[key])) for key in sorted(param, key=repr)))
    if isinstance(param, np.ndarray):
        return (np.ndarray, param.shape, param.dtype, param.tobytes())
    try:
        hash(param)
    except TypeError:
        return Structure((object(),))  # equal to itself only
    return (type(param), param)


def _structure_of_jaxpr(closed: Any) -> Structure:
    with _known_lock:
        found = _known.get(closed)
    if found is None:
        jaxpr, consts = open_jaxpr(closed)
        held = [c for c in consts if not isinstance(c, (int, float, complex, np.generic))]
        found = Structure((object(),) if held else _content(jaxpr, consts))
        with _known_lock:
            found = _known.setdefault(closed, found)
    return found


def _content(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, ...]:
    numbers: dict[Any, int] = {}

    def number(var: Any) -> Any:
        return (numbers.setdefault(var, len(numbers)), var.aval)

    def read(atom: Any) -> Any:
        if not is_literal(atom):
            return numbers[atom]
        return (atom.aval, type(atom.val), np.asarray(atom.val).tobytes())

    heads = tuple(map(number, (*jaxpr.constvars, *jaxpr.invars)))
    eqns = tuple(
        (
            eqn.primitive,
            tuple(map(read, eqn.invars)),
            structure_of(plain_params(eqn)),
            tuple(map(number, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    values = tuple((type(c), c) for c in consts)
    return (heads, values, eqns, tuple(map(read, jaxpr.outvars)))
