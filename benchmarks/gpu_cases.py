"""What `benchmarks.gpu` runs: the programs of `benchmarks.programs`, networks within budgets that the compiler for
the attached device confirms, and full training steps, with real arrays.

Arrays are made on the device by one jitted function, never on the host. `groups(small=True)` are the same
kinds of programs, tiny, for machines without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import remat
from benchmarks.hand_policies import BY_HAND
from benchmarks.programs import GROUPS, Group, Row, elementwise_gelu
from models import development, gpt, mlp, validation
from models.development.llama import llama_scan
from remat.compile import compiler_options

__all__ = ["BUDGETED", "WITHIN", "GpuGroup", "Program", "device_arrays", "groups"]

BASELINE = "none"
BUDGETED: tuple[str, ...] = ("llama_scan", "stencil", "lstm_unrolled", *validation.NETWORKS)
WITHIN = "ilp within"  # how the labels of rows within a budget begin
BUDGETS = (0.7, 0.5, 0.3)  # of the temporary memory without rematerialization
TRAINING = "gpt2_training"
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted program and how to run it.

    Attributes:
        label: of the row.
        call: the jitted function.
        shapes: of its arguments.
        make_args: arrays for it, on the device.
        gradients: picks what is compared between rows from the result.
        carries: whether the result's first item replaces the first argument, which is donated.
        tokens: per call; 0 where that means nothing.
        plan: the file of its plan within a budget, written when it is traced for the first time.
    """

    label: str
    call: Any
    shapes: tuple[Any, ...]
    make_args: Callable[[], tuple[Any, ...]]
    gradients: Callable[[Any], Any]
    carries: bool = False
    tokens: int = 0
    plan: Path | None = None


@dataclasses.dataclass(frozen=True)
class GpuGroup:
    """Programs that are timed in turn.

    Attributes:
        name: of the group.
        programs: makes the programs, the most important first.
        min_seconds: that each program is timed for.
    """

    name: str
    programs: Callable[[], list[Program]]
    min_seconds: float = 1.0


def groups(small: bool = False, plans: Path | None = None) -> dict[str, GpuGroup]:
    """The groups by name.

    Args:
        small: tiny sizes, to run the same code on a CPU.
        plans: folder that plans within budgets are written to, and read from where they are there.
    """
    factories: dict[str, Callable[[], list[Program]]]
    if small:
        factories = {
            "gelu": functools.partial(_programs, _small_gelu, ()),
            "residual_mlp": functools.partial(_programs, _small_mlp, ()),
            "llama_scan": functools.partial(
                _programs, functools.partial(_within_budgets, "llama_scan", plans, True), ()
            ),
            TRAINING: functools.partial(training, _SMALL_GPT, 2),
        }
    else:
        factories = {name: _factory(name, plans) for name in (*GROUPS, *BUDGETED, TRAINING)}
    seconds = 0.1 if small else 1.0
    return {name: GpuGroup(name, factory, seconds) for name, factory in factories.items()}


def device_arrays(shapes: Any, seed: int = 0, integers: int | tuple[int, ...] = 8) -> Any:
    """Random arrays for a pytree of shapes, made on the default device.

    Args:
        shapes: floats become normal numbers of deviation 0.02 (around 1 if the leaf is called "scale" or
            "var"), integers lie below `integers`, PRNG keys are valid keys.
        seed: of the random generator.
        integers: the bound of integers, such as the size of a vocabulary, or one for each leaf of them.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(shapes)
    floats = [shape for _, shape in flat if jnp.issubdtype(shape.dtype, jnp.floating)]

    def make() -> list[jax.Array]:
        bounds = iter(integers) if isinstance(integers, tuple) else itertools.repeat(integers)
        # One draw for all: a kernel per leaf takes minutes to compile where there are hundreds.
        key = jax.random.key(seed)
        noise = jax.random.normal(key, (sum(shape.size for shape in floats),), jnp.float32)
        parts = iter(jnp.split(noise, np.cumsum([shape.size for shape in floats])[:-1]))
        return [
            _leaf(parts, jax.random.fold_in(key, i), path, shape, bounds)
            for i, (path, shape) in enumerate(flat)
        ]

    return jax.tree.unflatten(tree, jax.jit(make)())


def training(config: gpt.GPTConfig, batch: int) -> list[Program]:
    """Full training steps of a GPT with AdamW: no remat, jax's policy for matmuls, ours."""
    by_jax = functools.partial(
        nn.remat,
        policy=jax.checkpoint_policies.dots_saveable,
        prevent_cse=not config.scan_layers,
        static_argnums=(2,),
    )
    ours = dataclasses.replace(config, remat_policy="min_cut")
    cases = {
        BASELINE: gpt.gpt_loss(config, batch),
        "min_cut": gpt.gpt_loss(ours, batch),
        "dots_saveable": gpt.gpt_loss(config, batch, wrap_block=by_jax),
    }
    return [
        _training_program(label, loss, shapes, config.vocab_size)
        for label, (loss, shapes) in cases.items()
    ]


_SMALL_GPT = dataclasses.replace(gpt.GPT_TINY, layers=2, width=32, context=16, scan_layers=True)


def _training_program(label: str, loss: Any, shapes: tuple[Any, ...], vocabulary: int) -> Program:
    optimizer = optax.adamw(LEARNING_RATE)

    def step(carry: Any, tokens: Any, targets: Any, key: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, tokens, targets, key)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    def make_args() -> tuple[Any, ...]:
        params, *rest = device_arrays(shapes, integers=vocabulary)
        return ((params, jax.jit(optimizer.init)(params)), *rest)

    params, tokens, targets, key = shapes
    carry = (params, jax.eval_shape(optimizer.init, params))
    return Program(
        label,
        _jit(step, donate_argnums=0),
        (carry, tokens, targets, key),
        make_args,
        gradients=lambda out: out[0][
            1
        ],  # the optimizer's moments: of the first step, the gradients
        carries=True,
        tokens=tokens.size,
    )


_INTEGERS: dict[str, int | tuple[int, ...]] = {
    "lstm": 10_000,
    "resnet50": 1000,
    "llama_scan": 32_000,
    "lstm_unrolled": 2048,
    "graph_attention": (20_000, 20_000, 8),
}
"""What integers lie below, where that decides how often threads add to one place."""


def _factory(name: str, plans: Path | None) -> Callable[[], list[Program]]:
    if name == TRAINING:
        config = dataclasses.replace(gpt.GPT2_SMALL, scan_layers=True)
        return functools.partial(training, config, 8)
    integers = _INTEGERS.get(name, 8)
    if name in BUDGETED:
        return functools.partial(
            _programs, functools.partial(_within_budgets, name, plans), (), integers
        )
    group = GROUPS[name]
    return functools.partial(_programs, group.rows, _important(group), integers)


@dataclasses.dataclass(frozen=True)
class _Budgeted:
    """A function within a budget, planned once by the processes of a run.

    Attributes:
        function: without rematerialization.
        budget: share of what that takes.
        place: file of the plan, or None to plan anew.
    """

    function: Callable[..., Any]
    budget: float
    place: Path | None

    def __call__(self, *args: Any) -> Any:
        """Raises BudgetError if no plan fits."""
        if self.place is not None and self.place.exists():
            plan = remat.Plan.from_json(self.place)
        else:
            plan = remat.plan(
                self.function,
                *args,
                remat_policy="ilp",
                budget=self.budget,
                confirm=remat.Confirm(device="attached"),
            )
            if self.place is not None:
                self.place.parent.mkdir(parents=True, exist_ok=True)
                plan.to_json(self.place)
        return remat.checkpoint(self.function, remat_policy=plan)(*args)


def _within_budgets(name: str, plans: Path | None, small: bool = False) -> list[Row]:
    """A network under the ready-made policies, by hand where it has blocks, and within budgets."""
    plain, args = (development.NETWORKS | validation.NETWORKS)[name](small)
    rows = [Row(BASELINE, plain, args), _ready_made("min_cut", plain, args)]
    for share in BUDGETS:
        place = plans and plans / f"{name}_{share}.json"
        rows.append(Row(f"{WITHIN} {share} of none", _Budgeted(plain, share, place), args))
    rows += [_ready_made(policy, plain, args) for policy in ("low_memory", "full")]
    if name == llama_scan.__name__:
        for label, policy in BY_HAND.items():
            wrap = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
            rows.append(Row(f"jax: {label}, per block", llama_scan(small, wrap)[0], args))
    return rows


def _ready_made(policy: str, plain: Callable[..., Any], args: tuple[Any, ...]) -> Row:
    return Row(policy, remat.checkpoint(plain, remat_policy=policy), args)


def _important(group: Group) -> tuple[str, ...]:
    """The rows that bounds speak of, and what they are held against."""
    labels = [BASELINE]
    for bound in group.bounds:
        labels += [label for label in (bound.row, bound.baseline) if label]
    return tuple(dict.fromkeys(labels))


def _programs(
    rows: Callable[[], list[Row]],
    important: tuple[str, ...],
    integers: int | tuple[int, ...] = 8,
) -> list[Program]:
    order = {label: place for place, label in enumerate(important)}
    ordered = sorted(rows(), key=lambda row: order.get(row.label, len(order)))
    scalar = jax.eval_shape(ordered[0].function, *ordered[0].args)
    is_loss = getattr(scalar, "shape", None) == ()
    return [_program(row, integers, is_loss) for row in ordered]


def _program(row: Row, integers: int | tuple[int, ...], is_loss: bool) -> Program:
    function = jax.value_and_grad(row.function) if is_loss else row.function
    return Program(
        row.label,
        _jit(function),
        row.args,
        functools.partial(device_arrays, row.args, integers=integers),
        gradients=(lambda out: out[1]) if is_loss else (lambda out: out),
        plan=row.function.place if isinstance(row.function, _Budgeted) else None,
    )


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    flags = compiler_options(jax.default_backend())
    return jax.jit(function, compiler_options=flags or None, **options)


def _leaf(
    noise: Iterator[jax.Array],
    key: jax.Array,
    path: tuple[Any, ...],
    shape: Any,
    bounds: Iterator[int],
) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, shape.shape) if shape.shape else key
    if jnp.issubdtype(shape.dtype, jnp.floating):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        mean = 1.0 if name in ("scale", "var") else 0.0
        return (mean + 0.02 * next(noise).reshape(shape.shape)).astype(shape.dtype)
    return jax.random.randint(key, shape.shape, 0, next(bounds), shape.dtype)


def _small_gelu() -> list[Row]:
    shape = jax.ShapeDtypeStruct((2**10,), jnp.float32)

    def loss(f: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda x: jnp.sum(f(x))

    ours = remat.checkpoint(elementwise_gelu)
    return [Row(BASELINE, loss(elementwise_gelu), (shape,)), Row("min_cut", loss(ours), (shape,))]


def _small_mlp() -> list[Row]:
    plain, args = mlp.residual_mlp(layers=2, width=16, hidden=32, batch=8)
    policy = jax.checkpoint_policies.dots_saveable
    return [
        Row(BASELINE, plain, args),
        Row("dots_saveable", jax.checkpoint(plain, policy=policy), args),
        Row("min_cut", remat.checkpoint(plain), args),
    ]
