"""A call with its arrays flattened out: what is traced, and what is part of the program.

Arrays are traced. What is no array (an activation function or a flag in a model) is part of the program, like the
structure of the tree that it is a leaf of. Python numbers are traced where `jax.checkpoint` is used with them, as
arguments and in lists, tuples and dictionaries. As fields of a model, of any registered class, they are part of
the program: `if self.rate == 0` is what they are for.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import operator
import re
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import compat
from remat.core.errors import TraceError, shown
from remat.trace.leaks import check_holds_no_tracers

__all__ = [
    "Call",
    "Filter",
    "Results",
    "flatten_call",
    "in_models",
    "is_array",
    "key_of",
    "named_arguments",
    "number_notes",
    "split_results",
]

Filter = Callable[[Any], bool]
"""Whether a leaf is traced."""

_NUMBERS = (int, float, complex)
_CONTAINERS = (tuple, list, dict, OrderedDict, defaultdict, type(None))
_SAME_FOREVER = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    str,
    bytes,
    int,
    bool,
    type(None),
    type(Ellipsis),
    enum.Enum,
    np.dtype,
    np.ufunc,
)
_TRUSTED = ("jax", "jaxlib", "numpy")  # whose callables do not change, but for these
_LONGEST_NAME = 80
_STATEFUL = (np.random.BitGenerator, np.random.Generator, np.random.RandomState)


@dataclass(frozen=True)
class Call:
    """A call with its arrays flattened out.

    Attributes:
        leaves: the arrays.
        owners: of every array the index of the positional argument it is part of, None for keyword arguments.
        key: hashable rest of the call: structure, static arguments, leaves that are no arrays; None where it has
            none, because something in it has no hash or may change: the call is then traced anew every time.
        rebuild: leaves back to `(args, kwargs)`.
    """

    leaves: list[Any]
    owners: list[int | None]
    key: Any
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Results:
    """What a function returns: the structure, and the leaves that are no arrays, by index."""

    tree: Any
    fixed: dict[int, Any]

    def rebuild(self, arrays: Iterable[Any]) -> Any:
        """Puts the arrays back."""
        # A number in the program is one when it is evaluated, too; jax's functions return arrays.
        given = (x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays)
        count = self.tree.num_leaves
        leaves = [self.fixed[i] if i in self.fixed else next(given) for i in range(count)]
        return jax.tree.unflatten(self.tree, leaves)


def split_results(results: Any, is_traced: Filter | None = None) -> tuple[list[Any], Results]:
    """Splits what a function returns into arrays and the rest; called while the function is traced.

    Raises:
        TraceError: there are traced arrays in an object that jax cannot look into.
    """
    leaves, tree = jax.tree.flatten(results)
    flags = traced_flags(leaves, tree, is_traced)
    if is_traced is None and any(isinstance(leaf, bool) for leaf in leaves):
        # Outside of models flags become arrays, like numbers and as in `jax.checkpoint`.
        flags = [
            flag or (isinstance(leaf, bool) and not field)
            for flag, field, leaf in zip(flags, in_models(tree), leaves, strict=True)
        ]
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not flags[i]}
    for leaf in fixed.values():
        check_holds_no_tracers(leaf)
    return [leaf for i, leaf in enumerate(leaves) if flags[i]], Results(tree, fixed)


def _unhashable(name: int | str, value: Any) -> str:
    """What to say of a static argument without a hash."""
    if any(map(compat.is_tracer, jax.tree.leaves(value))):
        return (
            f"static argument {name!r} is traced by jax: it is differentiated, batched, or an argument of a "
            "function under jax.jit. A static argument is a value that planning may look at. Leave it out of "
            "static_argnums and static_argnames, or keep it out of that transformation (argnums of jax.grad, "
            "in_axes of jax.vmap, static_argnums of jax.jit)"
        )
    return (
        f"static argument {name!r} of type {type(value).__name__} is not hashable; static "
        "arguments must be hashable values such as bool, int, str or a frozen dataclass"
    )


def flatten_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_argnums: frozenset[int] = frozenset(),
    static_argnames: frozenset[str] = frozenset(),
    is_traced: Filter | None = None,
) -> Call:
    """Flattens a call.

    Args:
        args, kwargs: of the call.
        static_argnums, static_argnames: arguments that are not looked into.
        is_traced: whether a leaf is; by default arrays, and Python numbers that are no fields of a model.

    Raises:
        TraceError: a static argument has no hash, for example because it is differentiated.
    """
    nums = {i + len(args) if i < 0 else i for i in static_argnums}
    static = {i: args[i] for i in sorted(nums) if i < len(args)}
    static_kw = {name: kwargs[name] for name in sorted(static_argnames) if name in kwargs}
    for name, value in (*static.items(), *static_kw.items()):
        try:
            hash(value)
        except TypeError as error:
            raise TraceError(_unhashable(name, value)) from error
    moving = [i for i in range(len(args)) if i not in static]
    moving_kw = {name: value for name, value in kwargs.items() if name not in static_kw}
    everything, tree = jax.tree.flatten((tuple(args[i] for i in moving), moving_kw))
    traced = traced_flags(everything, tree, is_traced)
    fixed = {i: leaf for i, leaf in enumerate(everything) if not traced[i]}
    positional = [i for i, part in zip(moving, _parts(tree), strict=True) for _ in range(part)]
    owners = [*positional, *(None for _ in range(len(everything) - len(positional)))]
    count = len(args)

    def rebuild(new: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arrays = iter(new)
        full_leaves = [fixed[i] if i in fixed else next(arrays) for i in range(len(everything))]
        rest, rest_kw = jax.tree.unflatten(tree, full_leaves)
        values = iter(rest)
        full = tuple(static[i] if i in static else next(values) for i in range(count))
        return full, {**rest_kw, **static_kw}

    try:
        parts = (static.items(), static_kw.items(), fixed.items())
        key = (tree, *(tuple((name, key_of(value)) for name, value in part) for part in parts))
        hash(key)
    except TypeError:
        key = None
    return Call(
        leaves=[leaf for leaf, flag in zip(everything, traced, strict=True) if flag],
        owners=[owner for owner, flag in zip(owners, traced, strict=True) if flag],
        key=key,
        rebuild=rebuild,
    )


def _parts(tree: Any) -> list[int]:
    """How many leaves every positional argument has."""
    positional, _ = tree.children()
    return [child.num_leaves for child in positional.children()]


def traced_flags(leaves: Sequence[Any], tree: Any, is_traced: Filter | None = None) -> list[bool]:
    """Returns for every leaf of a tree whether it is traced, as `flatten_call` has it."""
    if is_traced is not None:
        return [is_traced(leaf) for leaf in leaves]
    flags = [is_array(leaf) for leaf in leaves]
    if any(isinstance(leaf, _NUMBERS) for leaf in leaves):
        fields = in_models(tree)
        flags = [
            flag and not (field and isinstance(leaf, _NUMBERS))
            for flag, field, leaf in zip(flags, fields, leaves, strict=True)
        ]
    return flags


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, described or held, or a number that jax makes one of.

    A Python bool is a switch: tracing it, as `jax.checkpoint` does, only forbids `if`.
    """
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_
    kinds = (jax.Array, jax.ShapeDtypeStruct, *_NUMBERS)
    number = isinstance(leaf, kinds) and not isinstance(leaf, bool)
    return number or hasattr(leaf, "__jax_array__")


def in_models(tree: Any, package: str | None = None) -> list[bool]:
    """Returns for every leaf whether it is part of a model: a node of a registered class, no container of Python's.

    Args:
        tree: a structure.
        package: if given, only classes that come from it, or from a class of it, are models.
    """
    found: list[bool] = []

    def walk(node: Any, inside: bool) -> None:
        data = node.node_data()
        if data is None:
            found.extend([inside] * node.num_leaves)
            return
        inside = inside or _is_model(data[0], package)
        for child in node.children():
            walk(child, inside)

    walk(tree, False)
    return found


def _is_model(kind: type, package: str | None) -> bool:
    if package is not None:
        return any(base.__module__.partition(".")[0] == package for base in kind.__mro__)
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return not (is_named or kind in _CONTAINERS)


def key_of(value: Any) -> Any:
    """Returns a hashable stand-in for a value that is part of a program, equal for what makes the same program.

    Equal numbers of different types differ (1, 1.0, True), and so do 0.0 and -0.0; what is made of equal parts is
    equal.

    Raises:
        TypeError: the value has no hash, or it is hashed by identity and may change.
    """
    kind = type(value)
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    if isinstance(value, (tuple, frozenset)):
        parts = map(key_of, value)
        return kind, frozenset(parts) if isinstance(value, frozenset) else tuple(parts)
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if isinstance(value, types.MethodType):
        return kind, value.__func__, key_of(value.__self__)
    if isinstance(value, functools.partial):
        keywords = tuple((name, key_of(item)) for name, item in sorted(value.keywords.items()))
        return kind, key_of(value.func), key_of(value.args), keywords
    if isinstance(value, _SAME_FOREVER):
        return kind, value
    by_identity = kind.__hash__ is object.__hash__
    is_trusted = kind.__module__.partition(".")[0] in _TRUSTED and not isinstance(value, _STATEFUL)
    if by_identity and not is_trusted:
        raise TypeError(f"{kind.__name__} is hashed by identity and may change")
    hash(value)
    if dataclasses.is_dataclass(value) and not by_identity:
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        return kind, value, tuple(key_of(getattr(value, name)) for name in names)
    return kind, value


def named_arguments(
    flat: Callable[..., Any], fun: Callable[..., Any], call: Call
) -> Callable[..., Any]:
    """Returns a function of a call's arrays, of which jax's errors speak as of the function that was called.

    Its name and place are those of `fun`; its arguments are called by where they are in those of the call.
    """
    try:
        args, kwargs = call.rebuild(call.leaves)
        bound = inspect.signature(fun).bind(*args, **kwargs).arguments
        paths = {
            id(leaf): jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_flatten_with_path(dict(bound))[0]
        }
        words = [re.findall(r"\w+", paths[id(leaf)]) for leaf in call.leaves]
        names = [name if len(name := "_".join(word)) < _LONGEST_NAME else "" for word in words]
        kind = inspect.Parameter.POSITIONAL_ONLY
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    except Exception:
        # A class that cannot be made again, an array given twice, a word of Python: jax counts the arguments.
        return flat

    def run(*leaves: Any) -> Any:
        return flat(*leaves)

    run.__wrapped__ = fun  # type: ignore[attr-defined]
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def number_notes(call: Call) -> str:
    """Returns which arguments are Python numbers, with what to do if tracing stumbles over them; or nothing."""
    named = [
        f"argument {owner} ({leaf!r})" if owner is not None else f"a keyword argument ({leaf!r})"
        for leaf, owner in zip(call.leaves, call.owners, strict=True)
        if isinstance(leaf, _NUMBERS)
    ]
    if not named:
        return ""
    nums = sorted(
        {
            o
            for x, o in zip(call.leaves, call.owners, strict=True)
            if isinstance(x, _NUMBERS) and o is not None
        }
    )
    how = f"static_argnums={tuple(nums)}" if nums else "static_argnames=(...)"
    if shape := _shape_of(call):
        described = "An array is described by jax.ShapeDtypeStruct(shape, dtype)"
        return f"remat: a shape is passed as an argument: {shape}. {described}."
    return (
        f"remat: Python numbers are traced like arrays, as by jax.checkpoint: {', '.join(named)}. One that "
        f"has to be a number while tracing, a size or a switch, is declared as static: {how}."
    )


def _shape_of(call: Call) -> str:
    """The first positional argument that is a tuple of integers, which looks like a shape; or nothing."""
    try:
        args, _ = call.rebuild(call.leaves)
    except Exception:  # a class that cannot be made again says so by itself
        return ""
    for number, arg in enumerate(args):
        if isinstance(arg, tuple) and arg and all(type(size) is int for size in arg):
            return f"argument {number} is {shown(arg)}"
    return ""


def as_tuple(numbers: int | Iterable[int], name: str = "argnums") -> tuple[int, ...]:
    """Returns positions of arguments, which may be given as one number, as a tuple.

    Raises:
        TraceError: they are no integers.
    """
    try:
        given = (numbers,) if isinstance(numbers, Integral) else numbers
        return tuple(operator.index(number) for number in given)  # type: ignore[arg-type]
    except TypeError:
        raise TraceError(
            f"{name}={shown(numbers)}; expected the position of an argument, or several: 0 or (0, 2)"
        ) from None
