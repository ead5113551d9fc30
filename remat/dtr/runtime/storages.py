"""Arrays that may be away, the calls that make them, and the values of a program that refer to them.

What holds what: values of the program hold storages, a storage the call that made it, a call its operands. Nothing
else does, so that Python's reference counts say what may still be needed. Finalisers only take notes, which the
next operator reads: they may come at any time, in any thread.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import jax

from remat import compat
from remat.dtr.runtime.operators import Operator, Spec

__all__ = ["Call", "Reference", "Storage"]


class Call:
    """An operator on operands: storages and plain values."""

    __slots__ = ("cost", "has_run", "number", "operands", "operator", "outputs")

    def __init__(self, number: int, operator: Operator, operands: tuple[Any, ...]) -> None:
        self.number, self.operator, self.operands = number, operator, operands
        self.outputs: list[weakref.ref[Storage]] = []
        self.cost = operator.cost
        self.has_run = False

    def inputs(self) -> dict[Storage, None]:
        """The storages it reads, each once."""
        return dict.fromkeys(x for x in self.operands if isinstance(x, Storage))


class Storage:
    """The array of one result, or where it can be had from."""

    __slots__ = (
        "__weakref__",
        "accessed",
        "array",
        "aval",
        "call",
        "dead",
        "is_pinned",
        "is_result",
        "locks",
        "nbytes",
        "number",
        "spec",
    )

    def __init__(self, number: int, aval: Any, nbytes: int, call: Call, dead: deque) -> None:
        self.number, self.aval, self.nbytes = number, aval, nbytes
        self.call: Call | None = call
        self.array: jax.Array | None = None
        self.spec: Spec | None = None
        self.locks = 0
        self.accessed = 0
        self.is_pinned = self.is_result = False
        self.dead = dead

    def __del__(self) -> None:
        self.dead.append((self.number, self.nbytes if self.array is not None else 0))


class Reference(compat.Reference):
    """A value of the program: one storage, in use for as long as this is."""

    __slots__ = ("released", "storage")

    def __init__(self, storage: Storage, released: deque) -> None:
        self.storage, self.released = storage, released

    @property
    def aval(self) -> Any:
        """Shape and dtype."""
        return self.storage.aval

    def __del__(self) -> None:
        self.released.append(self.storage)
