"""Runs one program: plain, through the library, and both against each other."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from remat.compiler.compile import CPU_COMPILER_OPTIONS
from remat.core.errors import BudgetError, PlanError, PolicyError
from tests.fuzzing.judge import Reference, moved
from tests.fuzzing.programs import Program, precision
from tests.fuzzing.variants import Variant

__all__ = ["Outcome", "Plain", "TooSlow", "compiler_options", "run_variant"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# Where XLA:CPU deletes barriers, and with them what the library does, it is told not to (docs/cpu-and-gpu.md), but
# not for programs inside of loops: it aborts where it meets a `jax.checkpoint`'s there. Most programs are compiled
# without LLVM's optimizations, which halves the time; XLA's own, which decide what is fused and so what is rounded,
# are always on.
_QUICK = {"xla_backend_optimization_level": 0}
_EVIDENCE = 6  # further runs with moved arguments where something seems to be off


@dataclass(frozen=True)
class Outcome:
    """What came of one variant of one program.

    Attributes:
        kind: `same`, `wrong`, `refused` (an answer that the library may give), `crashed`, or `slow` (given up).
        words: what is wrong.
        seconds: how long it took.
    """

    kind: str
    words: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the library is at fault."""
        return self.kind in ("wrong", "crashed")


class TooSlow(Exception):
    """Raised by a timer of the caller's to give up on a variant."""


def compiler_options(program: Program, *, plain: bool = False) -> dict[str, Any]:
    """Returns the options with which a program is compiled, or its `plain` reference."""
    options = {} if program.seed % 4 == 3 else dict(_QUICK)
    return options if plain or program.mode == "scan" else options | CPU_COMPILER_OPTIONS


class Plain:
    """A program in plain JAX: the reference, and as much evidence of its rounding as was asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        with precision(program):
            self.function, self.gradients = program.load()
            self.arguments = program.arguments()
            self._compiled = self.jitted(self.function, compiler_options(program, plain=True))
            self.reference = Reference(self._compiled(*self.arguments), program.dtype)
            for salt in (1, 2):
                self._move(salt)
        self._has_all = False

    def jitted(self, function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Returns the jitted gradient of a function."""
        return jax.jit(partial(self.gradients, function), compiler_options=options)

    def _move(self, salt: int) -> None:
        x, w, b, i, key = self.arguments
        self.reference.add(self._compiled(*(moved(value, salt) for value in (x, w, b)), i, key))

    def collect(self) -> None:
        """Runs plain JAX in every other way there is. Evidence only ever allows more, so it is asked for late."""
        if self._has_all:
            return
        self._has_all = True
        with precision(self.program):
            for salt in range(3, 3 + _EVIDENCE):
                self._move(salt)
            self.reference.add(self.jitted(self.function, {})(*self.arguments))
            self.reference.add(self.gradients(self.function, *self.arguments))
            again = jax.checkpoint(self.function)
            self.reference.add(self.jitted(again, compiler_options(self.program))(*self.arguments))
        exact = self._exact()
        if exact is not None:
            self.reference.add_exact(exact)

    def _exact(self) -> Any:
        if self.program.is_wide:
            return None
        wide = replace(self.program, dtype="float64")
        with precision(wide):
            function, gradients = wide.load()
            x, w, b, i, key = self.arguments
            wider = (jax.numpy.asarray(np.asarray(v).astype(np.float64)) for v in (x, w, b))
            return jax.jit(partial(gradients, function))(*wider, i, key)


def _may_refuse(error: Exception, variant: Variant) -> bool:
    """Whether an exception is an answer that the library may give to this variant."""
    if isinstance(error, BudgetError):
        return variant.budget is not None
    if isinstance(error, PlanError):  # not every plan can be said by names of values
        return variant.lowering == "policy" and "have no name" in str(error)
    # Names that no value has.
    return isinstance(error, PolicyError) and "ames" in variant.policy


def run_variant(plain: Plain, variant: Variant, wrap: Wrap | None = None) -> Outcome:
    """Differentiates a program through the library and compares.

    Args:
        plain: the program.
        variant: the way through the library.
        wrap: instead of `remat.checkpoint`.
    """
    started = time.perf_counter()
    wrap = variant.wrap if wrap is None else wrap
    with precision(plain.program):
        try:
            wrapped = wrap(plain.function)
            if variant.jitted:
                run = plain.jitted(wrapped, compiler_options(plain.program))
            else:
                run = partial(plain.gradients, wrapped)
            results = jax.block_until_ready(run(*plain.arguments))
        except TooSlow:
            return Outcome("slow", "", time.perf_counter() - started)
        except Exception as error:
            seconds = time.perf_counter() - started
            if _may_refuse(error, variant):
                return Outcome("refused", type(error).__name__, seconds)
            return Outcome("crashed", _where(error), seconds)
    seconds = time.perf_counter() - started
    differences: Sequence[Any] = plain.reference.differences(results)
    if differences:
        plain.collect()
        differences = plain.reference.differences(results)
    if differences:
        return Outcome("wrong", "; ".join(map(str, differences)), seconds)
    return Outcome("same", seconds=seconds)


def _where(error: Exception) -> str:
    """An exception in a line, with the place in the library where it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/remat/" in f.filename]
    place = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}: {str(error)[:400]}"
