"""The table of primitives is complete, total, and counts flops exactly."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from random_graphs import laws

from remat.core.avals import aval_bytes, aval_size
from remat.core.classify import OpCost, classify
from remat.core.primitives import TABLE, OpClass, Trait, primitives_with

_FLOAT32 = np.dtype("float32")

# Run in a process of its own: it imports every module of jax, experimental ones too. Prints the modules that hold
# each primitive.
_ENUMERATE = """
import gc, importlib, json, pkgutil, sys
import jax
from jax.extend.core import Primitive
for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except BaseException:  # an optional dependency is missing
        pass
held = {p.name: [] for p in gc.get_objects() if isinstance(p, Primitive)}
for name, module in sys.modules.items():
    for value in list(getattr(module, "__dict__", {}).values()):
        if isinstance(value, Primitive):
            held[value.name].append(name)
print(json.dumps(held))
"""
# Packages whose primitives occur in the bodies of kernels only, or in programs that jax does not trace.
_KERNELS = ("pallas", "mosaic", "thunky")


@dataclass(frozen=True)
class Aval:
    """The least that the library asks of an abstract value."""

    shape: tuple[int, ...]
    dtype: Any = _FLOAT32


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all jaxprs inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def costs(function: Callable[..., Any], *args: Any) -> list[tuple[str, OpCost]]:
    """Traces a function and classifies everything in it."""
    return [
        (eqn.primitive.name, classify_equation(eqn))
        for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)
    ]


def classify_equation(eqn: Any) -> OpCost:
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    return classify(eqn.primitive.name, eqn.params, ins, outs, effects=eqn.effects)


def cost_of(name: str, function: Callable[..., Any], *args: Any) -> OpCost:
    """Returns the cost of the only operator of that name."""
    (found,) = [cost for other, cost in costs(function, *args) if other == name]
    return found


def xla_flops(function: Callable[..., Any], *args: Any) -> int:
    analysis = jax.jit(function).lower(*args).cost_analysis()
    assert analysis is not None
    return int(analysis["flops"])


# --- completeness -------------------------------------------------------------------------------


# Without a row on purpose: element-wise or a loop, as the parameters say. Its lowering tells.
_BY_LOWERING = {"polynomial"}
_NEWEST = (0, 12)  # the release that the table was last compared with


@pytest.mark.skipif(
    jax.__version_info__[:2] > _NEWEST,
    reason="a newer jax: what it adds is classified by what it lowers to (tests/test_classify.py)",
)
def test_every_primitive_of_the_installed_jax_is_in_the_table() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", _ENUMERATE],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    held = json.loads(done.stdout.splitlines()[-1])
    names = {name for name, modules in held.items() if not _is_of_kernels(modules)}
    assert len(names) > 300  # the enumeration itself works
    missing = sorted(names - TABLE.keys() - _BY_LOWERING)
    assert not missing, f"classify these in remat/core/primitives.py: {missing}"


def _is_of_kernels(modules: list[str]) -> bool:
    return bool(modules) and all(any(kind in name for kind in _KERNELS) for name in modules)


def test_jax_names_of_call_like_primitives_in_all_supported_versions() -> None:
    calls = "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"
    for name in (*calls.split(), "remat", "remat2", "checkpoint", "custom_lin"):
        assert TABLE[name].op_class is OpClass.CALL
    for name in ("scan", "while", "cond"):
        assert TABLE[name].op_class is OpClass.CONTROL


def test_unknown_primitive_is_opaque_and_says_so() -> None:
    cost = classify("frobnicate", {}, [Aval((8,))], [Aval((8,))])
    assert cost.op_class is OpClass.OPAQUE
    assert not (cost.known or cost.recomputable or cost.fusible)
    assert "frobnicate" in cost.reason
    assert cost.flops == 0


@pytest.mark.parametrize("kind", OpClass)
def test_classification_is_total(kind: OpClass) -> None:
    """Even with the parameters of another version of jax, and even without operands."""
    rows = [name for name, spec in TABLE.items() if spec.op_class is kind]
    assert rows
    for name, avals in itertools.product(rows, ([], [Aval((4, 4))], [Aval((4, 4))] * 3)):
        cost = classify(name, {}, avals, avals)
        assert cost.op_class is kind, name
        assert cost.flops >= 0, name
        assert cost.recomputable or cost.reason, name
        assert cost.known or "cannot count" in cost.reason or not cost.recomputable, name


def test_flags_follow_the_class() -> None:
    never = {OpClass.EFFECT, OpClass.CONTROL, OpClass.CALL, OpClass.OPAQUE}
    for name, spec in TABLE.items():
        if spec.op_class in never:
            assert not spec.recomputable and not spec.fusible, name
        if spec.op_class in {OpClass.POINTWISE, OpClass.METADATA, OpClass.VIEW}:
            assert spec.recomputable and not spec.random and not spec.effectful, name
        if spec.op_class is OpClass.HEAVY:
            assert not spec.fusible, name
        if spec.effectful:
            assert not spec.recomputable, name
        assert spec.recomputable is not bool(spec.reason), name


# Inputs that tell whether what jax evaluates agrees with a trait.
_VALUES = np.array([-2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0], np.float32)


def _evaluated(name: str, *operands: Any) -> Any:
    return getattr(lax, name)(*operands)


def test_traits_hold_when_jax_evaluates() -> None:
    """Never negative, and a comparison, on numbers of both signs."""
    for name in primitives_with(Trait.NEVER_NEGATIVE):
        result = np.asarray(_evaluated(name, jnp.asarray(_VALUES)))
        assert not (result < 0).any(), name
    for name in primitives_with(Trait.COMPARISON):
        one, other = np.meshgrid(_VALUES, _VALUES)
        if not name.endswith("_to"):
            assert _evaluated(name, jnp.asarray(one), jnp.asarray(other)).dtype == bool, name


def test_traits_imply_each_other() -> None:
    """What compares gives the same bits anywhere; what puts together has elements side by side; totals add."""
    implied = {
        Trait.COMPARISON: Trait.EXACT,
        Trait.TOTAL: Trait.ADDS,
        Trait.NAMED_BODY: Trait.EXACT,
    }
    for trait, other in implied.items():
        assert primitives_with(trait) <= primitives_with(other), trait
    assert not primitives_with(Trait.EXACT) & primitives_with(Trait.ADDS)
    for name in primitives_with(Trait.COMPARISON) | primitives_with(Trait.DETERMINED):
        assert TABLE[name].op_class is OpClass.POINTWISE
    for name in primitives_with(Trait.IN_PLACE) | primitives_with(Trait.SEVERAL_RESULTS):
        assert not TABLE[name].fusible
    for name in primitives_with(Trait.SAME_BUFFER):
        assert TABLE[name].count({}, [], []) == 0


# A program for every counter that reads parameters: classification must know all that is in it.
_X = jnp.ones((4, 8))
_SQUARE = jnp.eye(4) * 2
_KEY = jax.random.key(0)
_PROGRAMS: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: jnp.tanh(_X**3 / (1 + jnp.exp(_X))) ** 0.5,
    "attention": lambda: jax.nn.dot_product_attention(*(jnp.ones((2, 4, 3, 8)),) * 3),
    "cumulative": lambda: (jnp.cumsum(_X), lax.cumlogsumexp(_X), lax.cummax(_X)),
    "fft": lambda: jnp.fft.irfft(jnp.fft.rfft(_X)) + jnp.fft.fft(_X).real,
    "gather_scatter": lambda: _X.at[jnp.array([1, 2])].add(_X[jnp.array([0, 3])]),
    "gelu": lambda: jax.nn.gelu(_X),
    "linear_algebra": lambda: (
        jnp.linalg.cholesky(_SQUARE),
        jnp.linalg.eigh(_SQUARE),
        jnp.linalg.svd(_X),
        jnp.linalg.qr(_X),
        jnp.linalg.solve(_SQUARE, _X),
    ),
    "pool": lambda: jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "SAME").sum()
    )(_X),
    "ragged": lambda: lax.ragged_dot(_X, jnp.ones((2, 8, 3)), jnp.array([1, 3])),
    "random": lambda: (
        jax.random.normal(jax.random.split(jax.random.fold_in(_KEY, 3))[0], (5,)),
        jax.random.gamma(_KEY, 2.0, (3,)),
        jax.random.bits(jax.random.key(0, impl="rbg"), (7,)),
    ),
    "sort": lambda: (jnp.sort(_X), lax.top_k(_X, 3), jnp.argmax(_X, 1), jnp.median(_X)),
    "variadic_reduce": lambda: lax.reduce(
        (_X, _X), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)
    ),
}


@pytest.mark.parametrize("program", _PROGRAMS)
def test_real_programs_are_known(program: str) -> None:
    for name, cost in costs(_PROGRAMS[program]):
        assert cost.known, (name, cost.reason)
        assert cost.flops >= 0


# --- matrix multiplication ----------------------------------------------------------------------

_DOTS = ["ij,jk->ik", "ij,kj->ik", "ji,jk->ki", "bij,bjk->bik", "bhqd,bhkd->bhqk", "bijk,jkl->bil"]


@pytest.mark.parametrize("spec", _DOTS)
@given(sizes=st.lists(st.integers(2, 7), min_size=8, max_size=8))
@laws(10)
def test_dot_general_counts_as_xla(spec: str, sizes: list[int]) -> None:
    size = dict(zip("bijklhqd", sizes, strict=True))
    operands = [
        jax.ShapeDtypeStruct([size[letter] for letter in term], jnp.float32)
        for term in spec.split("->")[0].split(",")
    ]
    cost = cost_of("dot_general", lambda a, b: jnp.einsum(spec, a, b), *operands)
    letters = set(spec) - set(",->")
    assert cost.flops == 2 * np.prod([size[letter] for letter in letters])
    assert cost.flops == xla_flops(lambda a, b: jnp.einsum(spec, a, b), *operands)
    assert cost.heavy and not cost.fusible and cost.recomputable


def test_product_without_a_contracted_axis_is_pointwise() -> None:
    """XLA makes it a multiplication and fuses it (measured on XLA:GPU)."""
    x = jnp.ones(8)
    cost = cost_of("dot_general", lambda: jnp.einsum("i,j->ij", x, x))
    assert (cost.op_class, cost.flops) == (OpClass.POINTWISE, 64)
    assert cost.fusible and not cost.heavy


def test_complex_multiply_add_is_eight_operations() -> None:
    x = jnp.ones((4, 4), jnp.complex64)
    assert cost_of("dot_general", lambda: x @ x).flops == 8 * 4**3


@pytest.mark.parametrize("mode", ["rows", "contraction"])
def test_ragged_dot_counts_every_row_once(mode: str) -> None:
    groups, m, k, n = 2, 4, 8, 3
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if mode == "rows" else 0,)), ((), ())),
        lhs_ragged_dimensions=[0 if mode == "rows" else 1],
        rhs_group_dimensions=[0] if mode == "rows" else [],
    )
    rhs = jnp.ones((groups, k, n) if mode == "rows" else (k, n))
    sizes = jnp.array([1, m - 1] if mode == "rows" else [2, k - 2])
    cost = cost_of(
        "ragged_dot_general",
        lambda: lax.ragged_dot_general(jnp.ones((m, k)), rhs, sizes, numbers),
    )
    assert cost.flops == 2 * m * k * n


# --- convolution --------------------------------------------------------------------------------


def taps_by_hand(
    out: int, width: int, stride: int, low: int, dilation: int, rhs_dilation: int
) -> int:
    positions = (
        o * stride + k * rhs_dilation - low for o, k in itertools.product(range(out), range(width))
    )
    return sum(position % dilation == 0 for position in positions)


@given(
    stride=st.integers(1, 3),
    lhs_dilation=st.integers(1, 3),
    rhs_dilation=st.integers(1, 3),
    padding=st.integers(0, 3),
    batch_groups=st.sampled_from([1, 2]),
    feature_groups=st.sampled_from([1, 3]),
    layout=st.sampled_from([("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")]),
)
@laws(40)
def test_convolution_counts_by_hand(
    stride: int,
    lhs_dilation: int,
    rhs_dilation: int,
    padding: int,
    batch_groups: int,
    feature_groups: int,
    layout: tuple[str, str, str],
) -> None:
    if batch_groups > 1 and feature_groups > 1:
        feature_groups = 1
    dims = {"N": 2 * batch_groups, "C": 6, "H": 9, "W": 8}
    kernel = {"O": 6, "I": 6 // feature_groups, "H": 3, "W": 2}
    lhs = jax.ShapeDtypeStruct([dims[d] for d in layout[0]], jnp.float32)
    rhs = jax.ShapeDtypeStruct([kernel[d] for d in layout[1]], jnp.float32)

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            window_strides=(stride, 1),
            padding=((padding, padding), (0, 1)),
            lhs_dilation=(lhs_dilation, 1),
            rhs_dilation=(1, rhs_dilation),
            dimension_numbers=layout,
            feature_group_count=feature_groups,
            batch_group_count=batch_groups,
        )

    out = dict(zip(layout[2], jax.eval_shape(convolve, lhs, rhs).shape, strict=True))
    taps = taps_by_hand(out["H"], 3, stride, padding, lhs_dilation, 1)
    expected = 2 * out["N"] * out["C"] * kernel["I"] * taps * (out["W"] * 2)
    cost = cost_of("conv_general_dilated", convolve, lhs, rhs)
    assert cost.flops == expected
    assert cost.heavy and cost.known


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_unpadded_convolution_counts_as_xla(groups: int, stride: int) -> None:
    x, w = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4 // groups, 8))

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    assert cost_of("conv_general_dilated", convolve, x, w).flops == xla_flops(convolve, x, w)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_convolution_and_its_gradients_cost_the_same(width: int, stride: int, groups: int) -> None:
    x = jax.ShapeDtypeStruct((2, 16, 16, 4), jnp.float32)
    w = jax.ShapeDtypeStruct((width, width, 4 // groups, 8), jnp.float32)

    def loss(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.sum(y**2)

    counted = [
        cost.flops
        for name, cost in costs(jax.grad(loss, argnums=(0, 1)), x, w)
        if name == "conv_general_dilated"
    ]
    out = 16 // stride
    assert counted == [2 * 2 * out * out * 8 * (4 // groups) * width**2] * 3


# --- the other counters -------------------------------------------------------------------------


def test_pointwise_reduction_and_view() -> None:
    x = jnp.ones((4, 8))
    assert cost_of("add", lambda: x + x).flops == 32
    assert cost_of("tanh", lambda: jnp.tanh(x)).flops == 320
    assert cost_of("div", lambda: x / x).flops == 4 * 32
    assert cost_of("reduce_sum", lambda: x.sum(1)).flops == 32
    assert cost_of("transpose", lambda: x.T).flops == 0
    assert cost_of("reshape", lambda: x.reshape(8, 4)).fusible


@pytest.mark.parametrize(
    ("power", "operations"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (7, 4), (-1, 4), (-2, 5)]
)
def test_integer_pow_is_repeated_squaring(power: int, operations: int) -> None:
    cost = classify("integer_pow", {"y": power}, [Aval((10,))], [Aval((10,))])
    assert cost.flops == 10 * operations


def test_windows_and_scatters() -> None:
    x = jnp.ones((8, 8))

    def pool(x: Any, size: int) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (size, size), (2, 2), "VALID")

    apart, overlapping = (cost_of("reduce_window_max", lambda n=n: pool(x, n)) for n in (2, 3))
    assert (apart.flops, overlapping.flops) == (16 * 4, 9 * 9)
    assert apart.fusible and not overlapping.fusible
    gradient = cost_of("select_and_scatter_add", jax.grad(lambda x: pool(x, 2).sum()), x)
    assert gradient.flops == 16 * (4 + 1)
    added = cost_of("scatter-add", lambda: x.at[jnp.array([1, 2])].add(1.0))
    assert (added.flops, added.fusible) == (16, False)
    assert cost_of("gather", lambda: x[jnp.array([1, 2])]).fusible


def test_variadic_reduction_is_not_fusible() -> None:
    cost = cost_of("reduce", _PROGRAMS["variadic_reduce"])
    assert (cost.flops, cost.fusible) == (64, False)


def test_sort_and_fft_are_n_log_n() -> None:
    x = jnp.ones((4, 8))
    assert cost_of("sort", lambda: jnp.sort(x)).flops == 32 * 3
    assert cost_of("fft", lambda: jnp.fft.fft(x.astype(jnp.complex64))).flops == 5 * 32 * 3


def test_triangular_solve_is_exact() -> None:
    cost = cost_of(
        "triangular_solve",
        lambda: lax.linalg.triangular_solve(_SQUARE, _X, left_side=True, lower=True),
    )
    assert cost.flops == 4 * 4 * 8


def test_pallas_call_uses_the_authors_estimate() -> None:
    estimate = SimpleNamespace(flops=12345)
    cost = classify("pallas_call", {"cost_estimate": estimate}, [Aval((4,))], [Aval((4,))])
    assert (cost.flops, cost.heavy, cost.recomputable) == (12345, True, True)


# --- randomness and effects ---------------------------------------------------------------------


def test_random_bits_may_be_recomputed_and_key_plumbing_is_not_random() -> None:
    found = dict(costs(lambda k: jax.random.bits(jax.random.split(k)[0], (100,)), _KEY))
    bits = found["random_bits"]
    assert bits.random and bits.recomputable and bits.fusible
    assert bits.flops == 100 * 118
    split = found["random_split"]
    assert split.recomputable and not split.random and not split.heavy


def test_rbg_bits_are_cheaper_but_not_fusible() -> None:
    cost = cost_of("random_bits", lambda: jax.random.bits(jax.random.key(0, impl="rbg"), (100,)))
    assert cost.flops == 100 * 30
    assert cost.random and cost.recomputable and not cost.fusible


def test_stateful_generator_is_not_recomputed() -> None:
    cost = cost_of("rng_uniform", lambda: lax.rng_uniform(0.0, 1.0, (3,)))
    assert cost.random and not cost.recomputable and "stateful" in cost.reason


def test_effects_of_the_equation_forbid_recomputation() -> None:
    def noisy(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x + 1

    found = [cost for _, cost in costs(noisy, 1.0) if cost.op_class is OpClass.EFFECT]
    assert found and all(c.effectful and not c.recomputable for c in found)
    cost = classify("add", {}, [Aval((2,))] * 2, [Aval((2,))], effects={object()})
    assert cost.effectful and not cost.recomputable and cost.reason


def test_side_effect_flag_of_a_foreign_call() -> None:
    assert classify("ffi_call", {"has_side_effect": True}, [], []).effectful
    assert not classify("ffi_call", {"has_side_effect": False}, [], []).effectful


def test_device_put_is_a_transfer_only_with_a_target() -> None:
    identity = cost_of("device_put", lambda: jax.device_put(_X))
    transfer = cost_of("device_put", lambda: jax.device_put(_X, jax.memory.Space.Host))
    assert identity.fusible and identity.recomputable
    assert not transfer.fusible and not transfer.recomputable


@pytest.mark.parametrize("name", ["psum", "all_gather", "ppermute", "reduce_scatter"])
def test_collectives_are_never_repeated(name: str) -> None:
    cost = classify(name, {}, [Aval((4,))], [Aval((4,))])
    assert cost.op_class is OpClass.COLLECTIVE
    assert not cost.recomputable and "collective" in cost.reason


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float32", 32), ("bfloat16", 16), ("bool", 8), ("int4", 4), ("uint2", 2), ("complex64", 64)],
)
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (0, 4)])
def test_aval_bytes(dtype: str, bits: int, shape: tuple[int, ...]) -> None:
    aval = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert aval_bytes(aval) == -(-int(np.prod(shape)) * bits // 8)


@pytest.mark.parametrize(("implementation", "size"), [("threefry2x32", 8), ("rbg", 16)])
def test_aval_bytes_of_keys(implementation: str, size: int) -> None:
    keys = jax.random.split(jax.random.key(0, impl=implementation), 5)
    assert aval_bytes(jax.typeof(keys)) == 5 * size == jax.random.key_data(keys).nbytes
    assert aval_bytes(Aval((5,), SimpleNamespace(itemsize=8))) == 40  # a type that does not tell


def test_aval_bytes_of_nothing() -> None:
    assert aval_bytes(Aval((3, 4), jax.dtypes.float0)) == 0
    assert aval_bytes(object()) == aval_size(object()) == 0
