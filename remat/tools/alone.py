"""One operator of a program, alone: what tells it from others, and its seconds on an attached device.

Operands are made up: floats between -1 and 1, indices inside their array.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.primitives import OpClass
from remat.trace.classify import classify_equation
from remat.trace.program import Literal, Program

__all__ = [
    "JaxDevice",
    "describe",
    "index_bound",
    "is_kernel",
    "key_of",
    "made_up",
    "one_line",
    "seconds_alone",
]

JaxDevice = Any  # `jax.Device`, which type checkers take for a variable

# Seconds that a batch of runs takes at least. Chosen by look: long against the clock's grain and one late dispatch.
_BATCH_SECONDS = 2e-3
# Runs in a batch at most: what takes less than 2 us, a dispatch, need not be measured as long.
_MAX_BATCH = 1000
_INDEX_BOUND = 8  # made-up integers lie below it, unless the operator says what they index
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def key_of(program: Program, index: int) -> str:
    """Returns what decides an operator's time on one device: primitive, parameters, operand types.

    Equal in another process: addresses are struck out of printed parameters, so functions among them count by
    their names. For a custom kernel that is not enough (its index maps are not even printed): what the compiler
    is handed takes part.
    """
    equation = program.equations[index]
    operands = [
        f"={atom.value!r}" if isinstance(atom, Literal) else _type(program.avals[atom])
        for atom in equation.inputs
    ]
    params = sorted((name, str(param)) for name, param in equation.source.params.items())
    text = repr((equation.source.primitive.name, operands, params))
    digest = hashlib.sha256(_ADDRESS.sub("0x", text).encode())
    if _has_kernel(equation.source):
        run, avals = _alone(program, index)
        with contextlib.suppress(Exception):  # then running it fails too, and says why
            digest.update(jax.jit(run).lower(*avals).as_text().encode())
    return digest.hexdigest()[:32]


def is_kernel(eqn: Any) -> bool:
    """Whether an equation is a custom kernel: what it does is not all in its printed parameters."""
    if eqn.primitive.name == "pallas_call":
        return True
    return classify_equation(eqn).op_class is OpClass.OPAQUE


def _has_kernel(eqn: Any) -> bool:
    """Whether an equation is a custom kernel or has one in its bodies."""
    bodies = [compat.open_jaxpr(body)[0] for body in compat.sub_jaxprs(eqn)]
    return is_kernel(eqn) or any(_has_kernel(inner) for body in bodies for inner in body.eqns)


def _type(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def describe(program: Program, index: int) -> str:
    equation = program.equations[index]
    types = [_type(program.avals[value]) for value in equation.reads]
    listed = ", ".join(types[:4]) + (f", ... {len(types)} operands" if len(types) > 4 else "")
    return f"{compat.name_of(equation.source)}({listed})"


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


def _alone(program: Program, index: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """One equation as a function of its operands that are values, and their types."""
    equation = program.equations[index]

    def run(*values: Any) -> Sequence[Any]:
        given = iter(values)
        operands = [a.value if isinstance(a, Literal) else next(given) for a in equation.inputs]
        return compat.evaluate_equation(equation.source, operands, equation.site)

    avals = [program.avals[value] for value in equation.reads]
    return run, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def seconds_alone(program: Program, index: int, device: JaxDevice, repeats: int) -> float:
    """Compiles one equation for a device, runs it there, and returns the seconds of one run."""
    run, avals = _alone(program, index)
    bound = index_bound(program, index)
    # The caller may be tracing: these arrays are real in any case.
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        operands = [jax.device_put(made_up(aval, bound), device) for aval in avals]
        compiled = jax.jit(run).lower(*operands).compile()
        jax.block_until_ready(compiled(*operands))  # the first run loads kernels
        once = _batch_seconds(compiled, operands, 1)
        count = min(max(math.ceil(_BATCH_SECONDS / max(once, 1e-9)), 1), _MAX_BATCH)
        return statistics.median(
            _batch_seconds(compiled, operands, count) / count for _ in range(repeats)
        )


def _batch_seconds(compiled: Any, operands: Sequence[Any], count: int) -> float:
    start = time.perf_counter()
    results = None
    for _ in range(count):
        results = compiled(*operands)  # drops the results before: their memory is free again
    jax.block_until_ready(results)
    return time.perf_counter() - start


def index_bound(program: Program, index: int) -> int:
    """Made-up integers lie below this: inside the array that a scatter or a gather indexes."""
    equation = program.equations[index]
    numbers = equation.source.params.get("dimension_numbers")
    dims = getattr(numbers, "scatter_dims_to_operand_dims", getattr(numbers, "start_index_map", ()))
    first = equation.inputs[0] if equation.inputs else None
    if not dims or not isinstance(first, int):
        return _INDEX_BOUND
    return max(min(program.avals[first].shape[d] for d in dims), 1)


def made_up(aval: jax.ShapeDtypeStruct, index_bound: int) -> jax.Array:
    """An array of a type: floats between -1 and 1, integers below the bound, PRNG keys."""
    shape, dtype = aval.shape, aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(_key_like(dtype), shape)
    if dtype == jax.dtypes.float0:
        raise TypeError("float0 operands hold nothing")

    def make() -> jax.Array:
        count = jax.lax.iota(np.uint32, math.prod(shape)).reshape(shape)
        if dtype == np.bool_:
            return count % 2 == 0
        if jnp.issubdtype(dtype, jnp.integer):
            limit = min(index_bound, int(jnp.iinfo(dtype).max))
            return (count % np.uint32(limit)).astype(dtype)
        # Neither constant (a GPU multiplies zeros faster: they take less power) nor costly to make.
        return jnp.sin(count.astype(np.float32) * 12.9898).astype(dtype)

    return jax.jit(make)()


def _key_like(dtype: Any) -> jax.Array:
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=name)
        if key.dtype == dtype:
            return key
    raise TypeError(f"PRNG keys of an implementation of one's own ({dtype}) cannot be made up")
