"""Random programs: put together from templates, printed as source, run by executing that source."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from tests.fuzzing.operators import HEADER, OPERATORS, Operator

__all__ = ["MODES", "Maker", "Program", "Statement", "precision", "pruned", "random_program"]

DTYPES = {"float32": 0.62, "float64": 0.18, "bfloat16": 0.1, "float16": 0.1}
INPUTS = {"normal": 0.76, "ties": 0.12, "zeros": 0.05, "large": 0.04, "nonfinite": 0.03}
GROUPS = {
    "smooth": 24,
    "reductions": 18,
    "shapes": 6,
    "indexed": 9,
    "decisions": 16,
    "random": 4,
    "linear algebra": 1.5,
    "integers": 15,
    "integers to floats": 9,
    "loops": 7,
    "calls": 5,
    "branches": 2,
}
MODES = {
    # How a program `f`, which returns (loss, results), is differentiated.
    "grad": """\
def gradients(f, x, w, b, i, key):
    return jax.value_and_grad(f, (0, 1, 2), has_aux=True)(x, w, b, i, key)
""",
    "outer": """\
def gradients(f, x, w, b, i, key):
    def total(x, w, b):
        loss, results = f(x, w, b, i, key)
        floats = [r for r in jax.tree.leaves(results) if jnp.issubdtype(r.dtype, jnp.floating)]
        used = sum(jnp.mean(jnp.cos(r.astype(loss.dtype))) for r in floats)
        return jnp.sin(loss) + used, (loss, results)
    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, w, b)
""",
    "vmap": """\
def gradients(f, x, w, b, i, key):
    one = jax.value_and_grad(f, (0, 1, 2), has_aux=True)
    return jax.vmap(one, (0, None, None, None, 0))(
        jnp.stack([x, x[::-1]]), w, b, i, jax.random.split(key))
""",
    "vmapped": """\
def gradients(f, x, w, b, i, key):
    def total(x, w, b):
        losses, results = jax.vmap(f, (0, None, None, None, 0))(
            jnp.stack([x, x[::-1]]), w, b, i, jax.random.split(key))
        return losses.sum(), results
    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, w, b)
""",
    "scan": """\
def gradients(f, x, w, b, i, key):
    def total(x, w, b):
        def body(c, k):
            loss, results = f(c, w, b, i, k)
            return c * 0.9 + 0.1 * jnp.tanh(loss).astype(c.dtype), (loss, results)
        last, (losses, results) = lax.scan(body, x, jax.random.split(key))
        return losses.sum() + last.mean().astype(losses.dtype), results
    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, w, b)
""",
    "second": """\
def gradients(f, x, w, b, i, key):
    def slope(x, w, b):
        first, results = jax.grad(f, (0, 1, 2), has_aux=True)(x, w, b, i, key)
        return sum(jnp.mean(jnp.sin(g)) for g in first), (first, results)
    return jax.value_and_grad(slope, (0, 1, 2), has_aux=True)(x, w, b)
""",
}
_MODE_SHARES = {"grad": 50, "outer": 16, "vmap": 9, "vmapped": 7, "scan": 12, "second": 6}
_ARGUMENTS = ("x", "w", "b", "i", "key")
_NAME = re.compile(r"\b(?:v\d+|[xwbi])\b(?!\s*=[^=])")
_LARGEST = 4096  # elements
_INDENT = "    "
# Few, so that what runs operator by operator is compiled once.
_SHAPES = ((8, 16), (8, 16), (6, 8), (12, 33), (8, 8))
_ROOTS = np.array([0.3, 0.5, 0.7, 1.0, 1.5, -0.5, -1.3])


@dataclass(frozen=True)
class Statement:
    """Some lines of a program.

    Attributes:
        operator: the name of the template they are from.
        source: the lines.
        writes: the names that later lines may read.
    """

    operator: str
    source: str
    writes: tuple[str, ...]

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of values that it reads, the program's arguments included."""
        return frozenset(_NAME.findall(self.source)) - set(self.writes)


@dataclass(frozen=True)
class Array:
    """What a name of a program stands for."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A function of (x, w, b, i, key) that returns (loss, results), and how it is differentiated.

    Attributes:
        seed: what it was made from.
        dtype: of x, w, b and nearly everything else.
        mode: one of `MODES`.
        inputs: what x is like.
        shape: of x.
        statements: the body.
        terms: expressions whose sum is the loss.
        results: names of values that are returned with the loss.
    """

    seed: int
    dtype: str
    mode: str
    inputs: str
    shape: tuple[int, int]
    statements: tuple[Statement, ...]
    terms: tuple[str, ...]
    results: tuple[str, ...]

    @cached_property
    def source(self) -> str:
        """The function, as source text."""
        lines = [
            "def f(x, w, b, i, key):",
            "    dt = x.dtype",
            "    wide = jnp.promote_types(dt, jnp.float32)",
        ]
        for statement in self.statements:
            lines += [_INDENT + line for line in statement.source.splitlines()]
        lines.append(_INDENT + "loss = " + " + ".join(self.terms))
        lines.append(_INDENT + f"return loss, ({''.join(name + ', ' for name in self.results)})")
        return "\n".join(line for line in lines if _is_needed(line, lines)) + "\n"

    @property
    def inputs_source(self) -> str:
        """The arguments, as source text."""
        rows, columns = self.shape
        kinds = {
            "normal": "",
            "ties": "x = np.round(x * 2) / 2\n",
            "zeros": "x = np.where(rng.random(x.shape) < 0.4, 0, x)\n",
            "large": "x = x * 30\n",
            "nonfinite": "x[1, 1], x[2, 0] = np.nan, np.inf\n",
        }
        return (
            f"rng = np.random.default_rng({self.seed})\n"
            f"x = rng.normal(size=({rows}, {columns}))\n"
            f"{kinds[self.inputs]}"
            f'x = jnp.asarray(x, "{self.dtype}")\n'
            f'w = jnp.asarray(rng.normal(size=({columns}, {columns})) * 0.5, "{self.dtype}")\n'
            f'b = jnp.asarray(rng.normal(size=({columns},)), "{self.dtype}")\n'
            f'i = jnp.asarray(rng.integers(-3, 12, size=({rows},)), "int32")\n'
            f"key = jax.random.key({self.seed})\n"
        )

    @property
    def is_wide(self) -> bool:
        """Whether it needs `jax_enable_x64`."""
        return self.dtype == "float64"

    @property
    def decides(self) -> bool:
        """Whether the last bit of a float may become something else altogether."""
        deciding = {operator.name for operator in OPERATORS if operator.decides}
        return any(statement.operator in deciding for statement in self.statements)

    def load(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Returns `f` and `gradients(f, x, w, b, i, key)`."""
        names = _execute(HEADER + self.source + MODES[self.mode])
        return names["f"], names["gradients"]

    def arguments(self) -> tuple[Any, ...]:
        """Returns (x, w, b, i, key)."""
        names = _execute(HEADER + self.inputs_source)
        return tuple(names[name] for name in _ARGUMENTS)

    def script(self, wrapping: str, *, jitted: bool, options: dict[str, Any]) -> str:
        """Returns a script that prints how far the gradients are off.

        Args:
            wrapping: keyword arguments of `remat.checkpoint`, as source text.
            jitted: whether the gradient of the wrapped function is jitted.
            options: compiler options of what is jitted.
        """
        wide = 'jax.config.update("jax_enable_x64", True)\n' if self.is_wide else ""
        imports = "\n".join(
            line
            for line in HEADER.splitlines()
            if _is_imported(line.split()[-1], self.source + self.inputs_source + MODES[self.mode])
        )
        compiled = f"jax.jit(partial(gradients, {{}}), compiler_options=dict({_keywords(options)}))"
        expected = compiled.format("f")
        got = compiled.format("g") if jitted else "partial(gradients, g)"
        return (
            f"# seed {self.seed}, {self.dtype}, {self.mode}\n"
            f"from functools import partial\n{imports}\nimport remat\n\n{wide}{self.inputs_source}\n"
            f"{self.source}\n{MODES[self.mode]}\n"
            f"g = remat.checkpoint(f, {wrapping})\n"
            f"expected = {expected}(x, w, b, i, key)\n"
            f"got = {got}(x, w, b, i, key)\n"
            "for (path, e), r in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got)):\n"
            "    e, r = (np.asarray(v).astype(np.float64) for v in (e, r))\n"
            "    print(jax.tree_util.keystr(path), 'off by', np.abs(e - r).max(), 'of', np.abs(e).max())\n"
        )


def precision(program: Program) -> AbstractContextManager[Any]:
    """The context that the program runs in: with 64-bit numbers if it has any."""
    return jax.enable_x64(program.is_wide)


def _is_imported(name: str, source: str) -> bool:
    return name in ("jax", "np") or re.search(rf"\b{name}\b", source) is not None


def _keywords(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _is_needed(line: str, lines: Sequence[str]) -> bool:
    """Whether a definition at the head of a program is read."""
    for name in ("wide", "dt"):
        if line.startswith(f"{_INDENT}{name} = "):
            return any(re.search(rf"\b{name}\b", other) for other in lines if other != line)
    return True


def _execute(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), names)
    return names


# --- generation --------------------------------------------------------------------------------------


def _pick(rng: random.Random, shares: dict[str, float]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


class Maker:
    """A program that grows statement by statement."""

    def __init__(self, rng: random.Random, dtype: str, shape: tuple[int, int]) -> None:
        rows, columns = shape
        self.rng = rng
        self.dtype = dtype
        self.arrays = [
            Array("i", (rows,), "int32"),
            Array("b", (columns,), dtype),
            Array("x", (rows, columns), dtype),
        ]
        self.fixed = {
            "x": jax.ShapeDtypeStruct(shape, dtype),
            "w": jax.ShapeDtypeStruct((columns, columns), dtype),
            "b": jax.ShapeDtypeStruct((columns,), dtype),
            "i": jax.ShapeDtypeStruct((rows,), "int32"),
            "key": jax.eval_shape(lambda: jax.random.key(0)),
        }
        self.statements: list[Statement] = []
        self.counter = 0
        # Exact ties at low precision are decided anew by every compilation.
        self.may_decide = dtype in ("float32", "float64") or rng.random() < 0.1

    def _recent(self, fits: Callable[[Array], bool]) -> str | None:
        found = [array for array in self.arrays if fits(array)]
        if not found:
            return None
        weights = [1.0 if self.rng.random() < 0.15 else 1.6**n for n in range(len(found))]
        return self.rng.choices(found, weights)[0].name

    def _holes(self, operator: Operator) -> dict[str, str] | None:
        """What the holes of a template are filled with; None if there is nothing that fits."""
        rng, by_name = self.rng, {array.name: array for array in self.arrays}
        floats = {
            "a": range(1, 4),
            "d": range(4),
            "v": range(1, 2),
            "m": range(2, 3),
            "t": range(3, 4),
        }
        filled: dict[str, str] = {}
        for hole in sorted(operator.holes):  # a before c, q and x; i before j
            name: str | None
            if hole in floats:
                ranks = floats[hole]
                name = self._recent(lambda v, r=ranks: v.dtype == self.dtype and len(v.shape) in r)
            elif hole in ("c", "q"):
                shape, dtype = (
                    by_name[filled["a"]].shape,
                    self.dtype if hole == "c" else "bool",
                )
                name = self._recent(lambda v, s=shape, d=dtype: v.dtype == d and v.shape == s)
            elif hole in ("h", "i"):
                name = self._recent(
                    lambda v, h=hole: (
                        "int" in v.dtype and len(v.shape) in ((1,) if h == "h" else (1, 2, 3))
                    )
                )
            elif hole == "j":
                like = by_name[filled["i"]]
                name = self._recent(lambda v, o=like: (v.dtype, v.shape) == (o.dtype, o.shape))
            elif hole == "x":
                name = str(rng.randrange(-len(by_name[filled["a"]].shape), 0))
            elif hole == "u":
                name = str(rng.choice(_ROOTS))
            elif hole == "k":
                name = str(rng.randint(1, 3))
            elif hole == "n":
                name = str(len(self.statements))
            else:
                self.counter += 1
                name = f"v{self.counter}"
            if name is None:
                return None
            filled[hole] = name
        return filled

    def _shapes(self, statement: Statement) -> list[Any] | None:
        """Shapes and dtypes of what a statement writes; None if it does not suit its operands."""
        known = {
            **self.fixed,
            **{v.name: jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.arrays},
        }
        read = {name: known[name] for name in {*statement.reads, "x", "w", "b", "i", "key"}}
        body = "".join(f"{_INDENT}{line}\n" for line in statement.source.splitlines())
        source = (
            f"{HEADER}def step({', '.join(read)}):\n    dt = x.dtype\n"
            f"    wide = jnp.promote_types(dt, jnp.float32)\n{body}"
            f"    return [{', '.join(statement.writes)}]\n"
        )
        try:
            return jax.eval_shape(_execute(source)["step"], *read.values())
        except (TypeError, ValueError, IndexError, NotImplementedError):
            return None

    def add(self, statement: Statement) -> bool:
        """Adds a statement, if it suits what it reads and what it writes is neither empty nor large."""
        shapes = self._shapes(statement)
        if shapes is None:
            return False
        arrays = []
        for name, value in zip(statement.writes, shapes, strict=True):
            if not hasattr(value, "dtype"):  # several values
                continue
            if len(value.shape) > 3 or not 0 < np.prod(value.shape) <= _LARGEST:
                return False
            arrays.append(Array(name, tuple(value.shape), str(value.dtype)))
        self.statements.append(statement)
        # What a template calls {o} is read most.
        self.arrays += arrays[::-1]
        return True

    def try_operator(self, operator: Operator) -> bool:
        """Adds a statement made from a template, if something suits it."""
        filled = self._holes(operator)
        if filled is None:
            return False
        writes = tuple(filled[hole] for hole in "opr" if hole in filled)
        return self.add(Statement(operator.name, operator.text.format(**filled), writes))

    def try_to_add(self) -> None:
        """Adds a random statement, if the one that is tried suits."""
        group = _pick(self.rng, GROUPS)
        operator = self.rng.choice([o for o in OPERATORS if o.group == group])
        if self.may_decide or not operator.decides:
            self.try_operator(operator)


def _term(rng: random.Random, name: str) -> str:
    return rng.choice(
        (
            "jnp.mean(jnp.sin({}.astype(wide)))",
            "jnp.sum(jnp.sin({}.astype(wide)))",
            "jnp.mean({}.astype(wide) ** 2)",
            "jnp.mean({}.astype(wide) * jnp.cos({}.astype(wide)))",
            "jnp.max({}.astype(wide))",
        )
    ).format(name, name)


def random_program(seed: int) -> Program:
    """Returns the program of a seed: one that plain JAX can differentiate."""
    for attempt in range(100):
        rng = random.Random(f"{seed}/{attempt}")
        program = _random_program(rng, seed)
        if program is not None and _is_differentiable(program):
            return program
    raise AssertionError(f"no program could be made from seed {seed}")


def _random_program(rng: random.Random, seed: int) -> Program | None:
    dtype = _pick(rng, DTYPES)
    mode = _pick(rng, dict(_MODE_SHARES))
    shape = rng.choice(_SHAPES)
    length = rng.randint(3, 8)
    with jax.enable_x64(dtype == "float64"):
        maker = Maker(rng, dtype, shape)
        for _ in range(100):
            if len(maker.statements) < length:
                maker.try_to_add()
    read = {name for statement in maker.statements for name in statement.reads}
    made = [array for array in maker.arrays if array.name.startswith("v")]
    floats = [array.name for array in made if array.dtype == dtype]
    if not floats:
        return None
    unread = [name for name in floats if name not in read][-3:] or [floats[-1]]
    terms = tuple(_term(rng, name) for name in unread)
    kept = [a.name for a in made if a.dtype in ("bool", dtype) or "int" in a.dtype]
    results = tuple(dict.fromkeys(rng.choices(kept, k=rng.choice((0, 1, 1, 2, 3)))) if kept else ())
    inputs = _pick(rng, INPUTS)
    program = Program(seed, dtype, mode, inputs, shape, tuple(maker.statements), terms, results)
    return pruned(program)


def pruned(program: Program) -> Program:
    """Returns the program without statements that neither loss nor results depend on."""
    wanted = {name for term in program.terms for name in _NAME.findall(term)} | set(program.results)
    statements = []
    for statement in reversed(program.statements):
        if wanted & set(statement.writes):
            wanted |= statement.reads
            statements.append(statement)
    return replace(program, statements=tuple(reversed(statements)))


def _is_differentiable(program: Program) -> bool:
    with precision(program):
        function, gradients = program.load()
        try:
            jax.eval_shape(lambda *args: gradients(function, *args), *program.arguments())
        except (TypeError, ValueError, NotImplementedError, AssertionError):
            return False
    return True
