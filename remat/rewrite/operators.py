"""Other implementations of operators: how a backward pass is computed, and from which values.

jax's rule for an operator fixes what its backward pass reads. Often another value would do: softmax's
gradient can be computed from its result, which the next operator keeps anyway, instead of from the
exponentials (output-activated backward, as in Gist and In-Place ABN). An `Implementation` says how;
`remat.rewrite.substitution.with_implementations` puts it in the place of the operator in a program that is
not yet differentiated. Those that come with the library are in `remat.rewrite.library`.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.avals import aval_bytes
from remat.core.errors import ImplementationError, nearest
from remat.trace.program import program_of

__all__ = [
    "Candidates",
    "Implementation",
    "ImplementationReport",
    "check_implementation",
    "differentiable",
    "implementations",
    "register_implementation",
    "struct_of",
    "unregister_implementation",
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


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype, placement and weakness of type of an abstract value, as an argument to trace with."""
    weak = bool(getattr(aval, "weak_type", False))
    struct = compat.shape_of(aval)
    return struct.update(weak_type=True) if weak else struct


def differentiable(implementation: Implementation, params: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the operator with an implementation's rule for its derivative."""

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
    candidate = differentiable(implementation, params)
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
