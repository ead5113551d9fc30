"""What lossy forms do to gradients: measured, on the arguments given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat.api import checkpoint, plan
from remat.core.forms import is_lossless
from remat.trace.calls import as_tuple, is_array, traced_flags

__all__ = ["GradientError", "LeafError", "encoding_error"]


@dataclass(frozen=True)
class LeafError:
    """How far one array of gradients is from plain JAX's.

    Attributes:
        name: path of the array in the arguments, `[0]['w']`.
        relative_l2: norm of the difference over the norm of plain JAX's gradient; 0 if both are zero.
        max_abs: largest absolute difference, of complex numbers the modulus of it.
        exact: whether it is bit-equal.
    """

    name: str
    relative_l2: float
    max_abs: float
    exact: bool


@dataclass(frozen=True)
class GradientError:
    """What a policy's forms do to the gradients of a function.

    Attributes:
        policy: the policy's name.
        forms: the lossy forms in use, with the bytes of the values as computed and as kept, loops not included.
        leaves: one per differentiated array, the largest relative error first; integers have no gradient and are
            left out.
    """

    policy: str
    forms: tuple[tuple[str, int, int], ...]
    leaves: tuple[LeafError, ...]

    @property
    def max_relative_l2(self) -> float:
        """The largest relative error of any array of gradients."""
        return max((leaf.relative_l2 for leaf in self.leaves), default=0.0)

    def __str__(self) -> str:
        lines = [f"gradients under {self.policy} against plain JAX"]
        lines += [f"  {form}: {raw:,} bytes kept in {kept:,}" for form, raw, kept in self.forms]
        if not self.forms:
            lines.append("  no lossy form in use")
        for leaf in self.leaves[:12]:
            error = "bit-equal" if leaf.exact else f"relative error {leaf.relative_l2:.3g}"
            lines.append(f"  {leaf.name}: {error}, at most {leaf.max_abs:.3g}")
        if len(self.leaves) > 12:
            lines.append(f"  and {len(self.leaves) - 12} with smaller errors")
        return "\n".join(lines)


def encoding_error(
    fun: Callable[..., Any],
    *args: Any,
    remat_policy: Any,
    argnums: int | Sequence[int] = 0,
    static_argnums: int | Iterable[int] = (),
    seed: int = 0,
) -> GradientError:
    """Measures how a policy changes gradients on concrete arguments.

    Both gradients are computed under `jax.jit`, for the same random cotangents of all results. A policy without
    lossy forms is bit-equal wherever XLA compiles the same sums in the same order.

    Args:
        fun: the function, as it is handed to `remat.checkpoint`.
        *args: concrete arguments.
        remat_policy: as for `remat.checkpoint`, for instance `remat.policies.Gist(precision="float16")`.
        argnums: which arguments to differentiate.
        static_argnums: as for `remat.checkpoint`.
        seed: of the cotangents.

    Raises:
        PolicyError, TraceError: as `remat.plan`.
    """
    made = plan(
        fun, *args, remat_policy=remat_policy, argnums=argnums, static_argnums=static_argnums
    )
    numbers = as_tuple(argnums)
    ours = checkpoint(fun, remat_policy=remat_policy, static_argnums=static_argnums)
    theirs, mine = (_gradients(function, args, numbers, seed) for function in (fun, ours))
    leaves = [_compared(name, plain, mine[name]) for name, plain in theirs.items()]
    leaves.sort(key=lambda leaf: -leaf.relative_l2)
    forms: dict[str, tuple[int, int]] = {}
    for entry in made.saved:
        if not is_lossless(entry.form):
            raw, kept = forms.get(entry.form, (0, 0))
            forms[entry.form] = (raw + entry.raw_bytes, kept + entry.nbytes)
    return GradientError(
        made.policy_name, tuple((form, *sizes) for form, sizes in forms.items()), tuple(leaves)
    )


def _gradients(
    function: Callable[..., Any], args: Sequence[Any], numbers: Sequence[int], seed: int
) -> dict[str, Any]:
    """Gradients by their paths, of what `remat.plan` differentiates: plain JAX refuses some of the other leaves."""
    chosen = {number % len(args): args[number] for number in numbers}
    paths, tree = jax.tree_util.tree_flatten_with_path(chosen)
    leaves = [leaf for _, leaf in paths]
    traced = traced_flags(leaves, tree)
    places = [i for i, leaf in enumerate(leaves) if traced[i] and _is_inexact(leaf)]

    def of(*values: Any) -> list[jax.Array]:
        every = list(leaves)
        for place, value in zip(places, values, strict=True):
            every[place] = value
        given = jax.tree.unflatten(tree, every)
        results = function(*(given.get(i, arg) for i, arg in enumerate(args)))
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(results) if _is_inexact(leaf)]

    def pulled(*values: Any) -> Any:
        results, pullback = jax.vjp(of, *values)
        keys = jax.random.split(jax.random.key(seed), len(results))
        return pullback(list(map(_cotangent, keys, results)))

    made = jax.jit(pulled)(*(leaves[place] for place in places))
    names = (jax.tree_util.keystr(paths[place][0]) for place in places)
    return dict(zip(names, made, strict=True))


def _is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a float, real or complex, or an array of such."""
    if not is_array(leaf):
        return False
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _cotangent(key: Any, result: jax.Array) -> jax.Array:
    """Normal numbers like a result: complex ones for what is complex, or half of the gradient would not be seen."""
    if jnp.issubdtype(result.dtype, jnp.complexfloating):
        return jax.random.normal(key, result.shape, result.dtype)
    return jax.random.normal(key, result.shape).astype(result.dtype)


def _compared(name: str, plain: Any, changed: Any) -> LeafError:
    wide = np.complex128 if jnp.issubdtype(plain.dtype, jnp.complexfloating) else np.float64
    first, second = (np.asarray(x).astype(wide) for x in (plain, changed))
    norm = float(np.linalg.norm(first))
    distance = float(np.linalg.norm(second - first))
    relative = distance / norm if norm else (0.0 if distance == 0 else float("inf"))
    exact = np.asarray(plain).tobytes() == np.asarray(changed).tobytes()
    return LeafError(name, relative, float(np.max(np.abs(second - first), initial=0.0)), exact)
