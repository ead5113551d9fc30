"""What users get wrong, at every door: errors of ours, short, with the argument and what was probably meant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import remat
import remat.equinox
import remat.linen
import remat.nnx
from remat.core.errors import RematError, nearest, shown
from remat.policies import POLICIES, get_policy
from remat.resolve import parse_budget, parse_confirm
from remat.tools.cli import main

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
MOST_LETTERS = 1200  # the list of all policies, and a sentence


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8)(x)


# Every public door that takes remat_policy= and budget=.
DOORS: dict[str, Callable[..., Any]] = {
    "checkpoint": lambda **options: remat.checkpoint(loss, **options),
    "plan": lambda **options: remat.plan(loss, X, X, **options),
    "linen": lambda **options: remat.linen.remat(Block, **options),
    "nnx": lambda **options: remat.nnx.remat(nnx.Linear.__call__, **options),
    "equinox": lambda **options: remat.equinox.filter_checkpoint(loss, **options),
}

NONSENSE = st.one_of(
    st.text(max_size=2000),
    st.floats(),
    st.booleans(),
    st.integers(max_value=0),
    st.lists(st.integers(), max_size=500),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=100),
    st.binary(max_size=500),
    st.complex_numbers(),
    st.builds(object),
    st.just(np.zeros((100, 100))),
)


def refused(door: Callable[..., Any], name: str, value: Any) -> str:
    """The error of ours that a value is refused with."""
    with pytest.raises(RematError) as caught:
        door(**{name: value})
    text = str(caught.value)
    assert name in text and len(text) <= MOST_LETTERS, text
    return text


def is_budget(value: Any) -> bool:
    try:
        return parse_budget(value) is not None
    except RematError:
        return value is None


@pytest.mark.parametrize("door", DOORS)
@given(value=NONSENSE)
@settings(max_examples=20, deadline=None)
def test_budgets_that_are_none(door: str, value: Any) -> None:
    if not is_budget(value):
        refused(DOORS[door], "budget", value)


@pytest.mark.parametrize("door", DOORS)
@given(value=NONSENSE)
@settings(max_examples=20, deadline=None)
def test_policies_that_are_none(door: str, value: Any) -> None:
    refused(DOORS[door], "remat_policy", value)


@given(value=NONSENSE)
@settings(max_examples=20, deadline=None)
def test_memories_and_curves_that_are_none(value: Any) -> None:
    step = jax.grad(remat.checkpoint(loss))
    if not is_budget(value) or isinstance(parse_budget(value), float):
        refused(lambda **options: remat.fit(step, X, X, device="cpu", **options), "memory", value)
    if not (isinstance(value, int) and not isinstance(value, bool)):
        refused(lambda **options: remat.pareto(loss, X, X, **options), "points", value)


SETTINGS = [
    (name, field.name)
    for name in sorted(POLICIES)
    for field, default in get_policy(name).settings()
    if isinstance(default, (int, float)) and not isinstance(default, bool)
]


@pytest.mark.parametrize(("policy", "setting"), SETTINGS)
@pytest.mark.parametrize("value", [math.nan, -1, "3", [1], None, 1j], ids=repr)
def test_settings_of_policies(policy: str, setting: str, value: Any) -> None:
    if policy == "dtr" and setting == "seed" and value == -1:
        return  # any integer is one
    with pytest.raises(RematError) as caught:
        get_policy(policy).with_settings(**{setting: value})
    assert setting in str(caught.value)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("memory_budget", "budget='6GiB'"),
        ("budget", "budget='6GiB'"),
        ("recompute", "'full'"),
        ("Full", "'full'"),
        ("ILP", "'ilp'"),
        ("min-cut", "'min_cut'"),
        ("MinCut", "'min_cut'"),
        ("selective", "'min_cut'"),
        ("dots_savable", "'dots_saveable'"),
        ("offload", "not planned"),
        ("everything", "to save everything is 'save_all'"),
        ("minimal_with_context", "docs/migration/maxtext.md"),
        ("save_dot_except_mlp", "remat.policies.Names"),
        ("custom", "'low_memory'"),
    ],
)
@pytest.mark.parametrize("door", DOORS)
def test_words_for_policies(door: str, word: str, meant: str) -> None:
    text = refused(DOORS[door], "remat_policy", word)
    assert meant in text.partition("Valid names")[0]


@pytest.mark.parametrize("word", ["zzz", "lstm", "monday", "tpu"])
def test_no_suggestion_is_better_than_a_misleading_one(word: str) -> None:
    text = refused(DOORS["plan"], "remat_policy", word)
    assert "did you mean" not in text


@pytest.mark.parametrize("device", ["tpu", "v7x", "gpu", 3, "", ["h200"]])
def test_devices_that_are_not_known(device: Any) -> None:
    with pytest.raises(remat.CompileError) as caught:
        remat.compile_report(jax.grad(loss), X, X, device=device)
    assert "did you mean" not in str(caught.value) and "h200" in str(caught.value)
    assert nearest("h20", ["cpu", "h200"]) == "; did you mean 'h200'?"


@pytest.mark.parametrize(
    ("budget", "hint"),
    [
        ("50%", "did you mean 0.5?"),
        ("100%", "did you mean 1.0?"),  # 1 is a byte
        ("6G", "did you mean '6GiB'?"),
        ("80Gi", "did you mean '80GiB'?"),
        ("1,000,000", "did you mean 1000000?"),
        ("6e9", "did you mean 6000000000?"),
        (6e9, "did you mean 6000000000?"),
        (np.float64(6e9), "did you mean 6000000000?"),
        ("0.5B", "less than a byte"),
        ("0.0001KiB", "less than a byte"),
    ],
)
def test_sizes_almost_right(budget: Any, hint: str) -> None:
    assert hint in refused(DOORS["plan"], "budget", budget)


@pytest.mark.parametrize("budget", [1.5, 80.0, 6e9 + 0.5, 1e300, "1e300", math.inf, "150%", "0%"])
def test_no_size_is_suggested_for_what_is_none(budget: Any) -> None:
    assert "did you mean" not in refused(DOORS["plan"], "budget", budget)


@pytest.mark.parametrize("memory", [80e9, "80e9", 0.5, "0.5", "80 G", True, "50%"])
def test_a_memory_is_offered_no_share(memory: Any) -> None:
    step = jax.grad(remat.checkpoint(loss))
    text = refused(lambda **more: remat.fit(step, X, X, device="cpu", **more), "memory", memory)
    assert "or a fraction" not in text and "is not a fraction" not in text
    assert ("did you mean 80000000000?" in text) == (memory in (80e9, "80e9"))
    assert "did you mean 0" not in text


@pytest.mark.parametrize("door", DOORS)
def test_the_text_of_a_plan_is_no_policy(door: str) -> None:
    text = refused(DOORS[door], "remat_policy", remat.plan(loss, X, X).to_json())
    assert "remat.Plan.from_json(text)" in text and "path" in text
    refused(DOORS[door], "remat_policy", "x" * 5000)


@pytest.mark.parametrize("name", ["save_only_these_names", "save_from_both_policies"])
@pytest.mark.parametrize("door", DOORS)
def test_what_makes_policies_has_to_be_called(door: str, name: str) -> None:
    factory = getattr(jax.checkpoint_policies, name)
    by_object = refused(DOORS[door], "remat_policy", factory)
    assert by_object == refused(DOORS[door], "remat_policy", name)
    assert f"remat_policy=jax.checkpoint_policies.{name}(...)" in by_object


def test_digits_are_a_number_of_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_confirm("8") == parse_confirm(8) == remat.Confirm(compiles=8)
    assert parse_confirm("0") is parse_confirm(0) is None
    for digits, wanted in (("8", remat.Confirm(compiles=8)), ("0", None)):
        monkeypatch.setenv("REMAT_CONFIRM", digits)
        assert parse_confirm(None) == wanted


@pytest.mark.parametrize("budget", [np.int64(2**20), np.float32(0.5), "0.5", "1 MiB", 0.5])
def test_sizes_of_every_kind(budget: Any) -> None:
    assert parse_budget(budget) in (2**20, 0.5)


def test_few_bytes_are_questioned() -> None:
    for budget, share in ((50, "0.5"), (100, "1.0"), (7, "0.07")):
        with pytest.raises(remat.BudgetError, match=rf"a share is a float \(budget={share}\)"):
            remat.plan(loss, X, X, remat_policy="min_cut", budget=budget, confirm=False)
    with pytest.raises(remat.BudgetError, match="memory='80GiB'"):
        remat.fit(jax.grad(remat.checkpoint(loss)), X, X, memory=80, device="cpu")


def test_a_plan_with_a_budget_is_a_short_error() -> None:
    made = remat.plan(loss, X, X)
    for door in ("checkpoint", "plan"):
        with pytest.raises(remat.BudgetError) as caught:
            DOORS[door](remat_policy=made, budget=0.5)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: remat.plan(loss, X, X, memory_budget=0.5), "did you mean budget=?"),
        (lambda: remat.plan(loss, X, X, policy="ilp"), "did you mean remat_policy=?"),
        (lambda: remat.plan(loss, X, X, argnum=1), "did you mean 'argnums'?"),
        (lambda: remat.fit(loss, X, X, budget=0.5), "did you mean memory=?"),
        (lambda: remat.fit(loss, X, X, max_compile=3), "did you mean 'max_compiles'?"),
        (lambda: remat.plan(jnp.ones(()), X), "not plan(loss(params, x))"),
        (lambda: remat.plan(loss, X, X, argnums="x"), "argnums='x'; expected the position"),
        (lambda: remat.plan(loss, X, X, argnums=1.0), "argnums=1.0; expected the position"),
        (lambda: remat.plan(loss, X, X, argnums=7), "argnums=7 is out of range"),
        (lambda: remat.checkpoint(loss, static_argnums="x"), "static_argnums='x'; expected"),
        (lambda: remat.checkpoint(loss, static_argnums=9), "2 positional arguments: w, x"),
        (lambda: remat.Confirm(compiles=math.nan), "expected 2 or more"),
        (lambda: remat.fit(loss, X, X, memory=1, max_compiles=2.5), "at least 2, a whole number"),
    ],
)
def test_arguments_that_are_none(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(RematError) as caught:
        call()
    assert words in str(caught.value)


def test_positions_may_be_of_numpy() -> None:
    assert remat.plan(loss, X, X, argnums=np.int64(1)) == remat.plan(loss, X, X, argnums=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: jnp.sum(jnp.zeros(n)) + jnp.sum(x),
        lambda x, n: jnp.sum(x[:n]),
        lambda x, n: sum(jnp.sum(x) for _ in range(n)),
        lambda x, n: jnp.sum(x) if n > 2 else jnp.sum(x * x),
        lambda x, n: jnp.sum(x.reshape(n, -1)),
        lambda x, n: jnp.sum(jnp.split(x, n)[0]),
    ],
)
def test_numbers_used_as_sizes_get_a_hint(function: Callable[..., Any]) -> None:
    x = jnp.ones((8, 8))
    for call in (
        lambda: jax.grad(remat.checkpoint(function))(x, 4),
        lambda: remat.plan(function, x, 4),
    ):
        with pytest.raises(Exception) as caught:
            call()
        assert any("static_argnums=(1,)" in note for note in caught.value.__notes__)
    remat.plan(function, x, 4, static_argnums=1)


def test_a_shape_that_is_passed_gets_a_hint() -> None:
    with pytest.raises(TypeError) as caught:
        remat.plan(loss, (8, 8), X)
    assert any("jax.ShapeDtypeStruct" in note for note in caught.value.__notes__)


class Switched(nn.Module):
    @nn.compact
    def __call__(self, x: Any, flag: Any) -> Any:
        return nn.Dense(8)(x) * (2.0 if flag else 1.0)

    def other(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("static", [2, -1, (0, 2)])
def test_static_arguments_of_modules_are_named_as_they_were_given(static: Any) -> None:
    model, x = remat.linen.remat(Switched, static_argnums=static)(), jnp.ones((2, 8))
    params = model.init(jax.random.key(0), x, True)
    twice = 2 * model.apply(params, x, False)
    np.testing.assert_allclose(model.apply(params, x, True), twice)
    with pytest.raises(remat.TraceError, match=r"static argument 2 \(`self` is number 0\) of type"):
        model.apply(params, x, [True])


def test_static_arguments_of_methods_are_named_alike() -> None:
    for number in (1, -1):
        own = {"__call__": {"static_argnums": number}}
        model, x = remat.linen.remat(Switched, methods=own)(), jnp.ones((2, 8))
        params = model.init(jax.random.key(0), x, True)
        with pytest.raises(remat.TraceError, match=r"static argument 2 \(`self`"):
            model.apply(params, x, [True])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"static_argnums": 3}, "static_argnums has 3, and the function has 3 positional"),
        ({"static_argnums": -4}, "self, x, flag"),
        ({"static_argnums": "x"}, "static_argnums='x'; expected the position"),
        ({"static_argnums": 3, "methods": ["__call__", "other"]}, "static_argnums has 3"),
        ({"methods": {"__call__": {"static_argnums": 2}}}, "2 positional arguments: x, flag"),
    ],
)
def test_static_arguments_of_modules_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(remat.TraceError) as caught:
        remat.linen.remat(Switched, **options)
    assert words in str(caught.value)


def test_a_static_argument_that_one_method_has_will_do() -> None:
    remat.linen.remat(Switched, static_argnums=2, methods=["__call__", "other"])
    remat.linen.remat(lambda module, x, flag: module(x, flag), static_argnums=np.int64(2))


def test_modules_of_nnx_are_no_functions() -> None:
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(remat.TraceError) as caught:
        remat.nnx.remat(linear)
    assert "remat.nnx.remat(Linear.__call__)(module, ...)" in str(caught.value)


def test_equal_static_values_of_different_types_have_their_own_traces() -> None:
    def scaled(x: Any, flag: Any) -> Any:
        return jnp.sum(x) * (2.0 if flag is True else 3.0 if isinstance(flag, float) else 5.0)

    wrapped = remat.checkpoint(scaled, static_argnums=1)
    x = jnp.ones(4)
    assert [float(wrapped(x, flag)) for flag in (1, True, 1.0)] == [20.0, 8.0, 12.0]


def test_what_has_no_hash_or_changes_is_read_anew() -> None:
    class Box:
        __hash__ = None  # type: ignore[assignment]
        factor = 1.0

    @dataclasses.dataclass
    class Mutable:
        factor: float = 1.0

    for box in (Box(), Mutable()):
        wrapped = remat.checkpoint(lambda x, box: jnp.sum(x) * box.factor)
        first = float(jax.grad(wrapped)(jnp.ones(3), box)[0])
        box.factor = 3.0
        assert float(jax.grad(wrapped)(jnp.ones(3), box)[0]) == 3 * first


def test_what_is_shown_is_short() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    for value in ("x" * 10_000, list(range(10_000)), np.zeros(10_000), Silent(), {1: "y" * 5000}):
        assert 0 < len(shown(value)) <= 120 and "\n" not in shown(value)


def test_python_can_suggest_names() -> None:
    with pytest.raises(AttributeError) as caught:
        remat.chekpoint  # noqa: B018
    assert caught.value.name == "chekpoint" and "checkpoint" in dir(caught.value.obj)


@pytest.mark.parametrize("command", ["plan", "why", "pareto", "fit", "compare"])
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_the_command_line_takes_nonsense(command: str, data: st.DataObject) -> None:
    word = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=30)
    target = "models.cases:residual_mlp_small"
    flag = data.draw(st.sampled_from(["--policy", "--device", "--budget", "--memory", "--option"]))
    argv = [command, target, f"{flag}={data.draw(word)}~"]
    argv += ["1"] if command == "why" else ["--memory=1GiB"] if command == "fit" else []
    try:
        assert main(argv) == 2
    except SystemExit as ended:
        assert ended.code == 2


def _two_names(x: jax.Array) -> jax.Array:
    return jnp.sum(checkpoint_name(jnp.sin(x), "there") ** 2)


_TWO_NAMES = jax.checkpoint_policies.save_only_these_names("there", "missing")


@pytest.mark.parametrize("static", [lambda: 1, lambda: (1,), lambda: iter([1]), lambda: [-1]])
@pytest.mark.parametrize("scale", [2.0, [2.0]], ids=["with hash", "without"])
def test_policies_of_names_take_the_static_arguments_that_jax_takes(
    static: Callable[[], Any], scale: Any
) -> None:
    def named(x: jax.Array, scale: Any) -> jax.Array:
        factor = scale[0] if isinstance(scale, list) else float(scale)
        return jnp.sum(checkpoint_name(jnp.sin(x), "there") ** 2) * factor

    policy = jax.checkpoint_policies.save_only_these_names("there")
    wrapped = remat.checkpoint(named, policy=policy, static_argnums=static())
    for _ in range(2):
        found = jax.grad(wrapped)(jnp.ones(8), scale)
        np.testing.assert_allclose(found, jax.grad(named)(jnp.ones(8), scale), rtol=1e-6)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: remat.plan(jax.grad(_two_names), x),
        lambda x: remat.checkpoint(_two_names, policy=_TWO_NAMES)(x),
        lambda x: jax.jit(jax.grad(remat.checkpoint(_two_names, policy=_TWO_NAMES)))(x),
    ],
    ids=["plan", "called", "in jit"],
)
def test_a_warning_is_of_the_line_that_asked(use: Callable[[jax.Array], object]) -> None:
    """Not of one of ours, or of jax's: Python shows it, and may show it once for every line."""
    with pytest.warns(remat.RematWarning) as found:
        use(jnp.ones(8))
    assert {warning.filename for warning in found} == {__file__}
