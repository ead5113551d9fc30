"""The doors: arguments, names, errors, caching, plans."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat.lower import confirm
from remat.resolve import parse_budget


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two tanh layers; `w` is `[8, 8]`, `x` is `[4, 8]`."""
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))


W, X = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.linspace(0, 1, 32).reshape(4, 8)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collects jax's own trace and compile events."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        del duration
        if event.startswith("/jax/core/compile"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_decorator_with_and_without_arguments() -> None:
    @remat.checkpoint
    def plain(w: jax.Array) -> jax.Array:
        """Doc."""
        return loss(w, X)

    @remat.checkpoint(remat_policy="full", static_argnums=(1,))
    def configured(w: jax.Array, power: int) -> jax.Array:
        return loss(w**power, X)

    np.testing.assert_allclose(jax.grad(plain)(W), jax.grad(loss)(W, X), rtol=1e-5)
    want = jax.grad(lambda w: loss(w**3, X))(W)
    np.testing.assert_allclose(jax.grad(configured)(W, 3), want, rtol=1e-5)
    assert plain.__name__ == "plain" and plain.__doc__ == "Doc."


def test_static_arguments_by_name_and_by_position() -> None:
    def f(w: jax.Array, x: jax.Array, double: bool = False) -> jax.Array:
        return loss(w, x) * (2 if double else 1)

    for options in ({"static_argnums": 2}, {"static_argnames": "double"}, {"static_argnums": -1}):
        g = remat.checkpoint(f, **options)
        np.testing.assert_allclose(jax.grad(g)(W, X, True), 2 * jax.grad(f)(W, X), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(g)(W, X, double=True), 2 * jax.grad(f)(W, X), rtol=1e-5)


def test_unhashable_static_argument() -> None:
    g = remat.checkpoint(lambda w, options: loss(w, X), static_argnums=1)
    with pytest.raises(remat.TraceError, match="not hashable"):
        g(W, [1, 2])


@pytest.mark.parametrize("transform", ["grad", "vmap", "jit", "in a pair"])
def test_traced_static_argument(transform: str) -> None:
    def scaled(x: jax.Array, by: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(x)) * (by[0] if isinstance(by, tuple) else by)

    wrapped = remat.checkpoint(scaled, static_argnums=1)
    x = jnp.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: jax.grad(wrapped, argnums=1)(x, 2.0),
        "vmap": lambda: jax.vmap(wrapped, in_axes=(None, 0))(x, jnp.ones(2)),
        "jit": lambda: jax.jit(wrapped)(x, 2.0),
        "in a pair": lambda: jax.jit(lambda by: wrapped(x, (by, 1)))(2.0),
    }
    with pytest.raises(
        remat.TraceError, match=r"static argument 1 is traced by jax.*static_argnums"
    ):
        calls[transform]()


@pytest.mark.parametrize("wrap_again", [False, True])
def test_second_eager_call_neither_traces_nor_compiles(wrap_again: bool) -> None:
    g = remat.checkpoint(loss)

    def gradient() -> Any:
        f = remat.checkpoint(loss) if wrap_again else g
        return jax.block_until_ready(jax.grad(f)(W, X))

    gradient(), gradient()
    with counted() as events:
        gradient()
    assert events == []


def test_second_jitted_call_neither_traces_nor_compiles() -> None:
    calls: list[int] = []

    def traced(w: jax.Array, x: jax.Array) -> jax.Array:
        calls.append(1)
        return loss(w, x)

    step = jax.jit(jax.grad(remat.checkpoint(traced)))
    jax.block_until_ready(step(W, X))
    made = len(calls)
    with counted() as events:
        jax.block_until_ready(step(W, X))
    assert events == [] and len(calls) == made == 1


def test_new_shapes_make_a_new_plan() -> None:
    g = remat.checkpoint(loss)
    for rows in (2, 3):
        x = jnp.ones((rows, 8))
        np.testing.assert_allclose(jax.grad(g)(W, x), jax.grad(loss)(W, x), rtol=1e-5)


@pytest.mark.parametrize("policy", [None, "none"])
def test_off_returns_the_function_itself(policy: Any) -> None:
    assert remat.checkpoint(loss, remat_policy=policy) is loss


def _residual_bytes(f: Callable[..., Any]) -> int:
    _, pullback = jax.vjp(lambda w: f(w, X), W)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("dots_saveable", jax.checkpoint_policies.dots_saveable),
        ("minimal", jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        (jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.nothing_saveable),
    ],
)
def test_jax_policies_go_straight_to_jax(name: Any, same_as: Callable[..., Any]) -> None:
    ours = remat.checkpoint(loss, remat_policy=name)
    theirs = jax.checkpoint(loss, policy=same_as)
    text = [str(jax.make_jaxpr(jax.grad(f))(W, X)).count("dot_general") for f in (ours, theirs)]
    assert text[0] == text[1]
    assert _residual_bytes(ours) == _residual_bytes(theirs)


def test_policy_argument_still_works() -> None:
    g = remat.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable)
    np.testing.assert_allclose(jax.grad(g)(W, X), jax.grad(loss)(W, X), rtol=1e-5)
    with pytest.raises(remat.PolicyError, match="both policy="):
        remat.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable, remat_policy="min_cut")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("min_cutt", "did you mean 'min_cut'"),
        ("dots_savable", "did you mean 'dots_saveable'"),
        ("save_only_these_names", "call it"),
        (3.5, "expected a name"),
        (remat.policies.MinCut, "pass an instance"),
    ],
)
def test_bad_policies_are_errors(policy: Any, message: str) -> None:
    with pytest.raises(remat.PolicyError, match=message):
        remat.checkpoint(loss, remat_policy=policy)


@pytest.mark.parametrize(
    "options",
    [
        {"memory_weight": -1},
        {"memory_weight": float("nan")},
        {"heavy": "sometimes"},
        {"random": "never"},
        {"reduction_ratio": 0},
    ],
)
def test_bad_policy_options_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(remat.PolicyError, match="expected"):
        remat.policies.MinCut(**options)


@pytest.mark.parametrize("option", [{"lowering": "stagd"}, {"nested_checkpoints": "keep"}])
def test_bad_options_are_errors(option: dict[str, str]) -> None:
    with pytest.raises(remat.PolicyError, match="expected"):
        remat.checkpoint(loss, **option)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (1024, 1024),
        ("6GiB", 6 * 2**30),
        ("500 MB", 500_000_000),
        ("1.5kib", 1536),
        ("12", 12),
        (0.5, 0.5),
        ("0.5", 0.5),
        ("5e-1", 0.5),
        ("1.0", 1.0),
        (np.int64(1024), 1024),
        (np.float32(0.5), 0.5),
        (None, None),
    ],
)
def test_budgets(budget: Any, size: Any) -> None:
    assert parse_budget(budget) == size
    assert type(parse_budget(budget)) is type(size)


@pytest.mark.parametrize(
    "budget",
    [
        *(0, -1, 1.5, 0.0, float("nan"), True, np.True_, [1]),
        *("6 GigaBytes", "", "GiB", "-1GiB", "1.5", "0.0", "nan", "inf"),
    ],
)
def test_bad_budgets_are_errors(budget: Any) -> None:
    with pytest.raises(remat.BudgetError, match="expected"):
        remat.checkpoint(loss, budget=budget)


def test_budget_that_is_not_met_is_an_error_with_the_peak_found() -> None:
    with pytest.raises(remat.BudgetError, match="Smallest peak found"):
        remat.plan(loss, W, X, budget=1)
    assert remat.plan(loss, W, X, budget="1MiB").peak_bytes <= 2**20
    with pytest.raises(remat.BudgetError, match="cannot be held"):
        remat.checkpoint(loss, remat_policy="dots_saveable", budget=0.5)


def test_a_budget_of_a_few_bytes_says_what_may_have_been_meant() -> None:
    with pytest.raises(
        remat.BudgetError, match=r"budget=50 means 50 bytes: .*budget=0\.5.*'50GiB'"
    ):
        remat.plan(loss, W, X, budget=50)
    with pytest.raises(remat.BudgetError, match=r"budget=80 means 80 bytes"):
        jax.grad(remat.checkpoint(loss, remat_policy="ilp", budget=80))(W, X)
    with pytest.raises(remat.BudgetError) as caught:
        remat.plan(loss, W, jnp.ones((512, 8)), budget="1KiB", remat_policy="save_all")
    assert "means" not in str(caught.value)


def test_a_plan_with_a_budget_is_a_short_error() -> None:
    plan = remat.plan(loss, W, X)
    with pytest.raises(
        remat.BudgetError, match="a saved plan has the budget that it was made for"
    ) as caught:
        remat.checkpoint(loss, remat_policy=plan, budget=0.5)
    assert len(str(caught.value)) < 400 and len(repr(plan)) < 200


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("memory_budget", None),
        ("recompute", None),
        ("off", None),
        ("dots", "dots_saveable"),
        ("min_cutt", "min_cut"),
        ("nothing", "nothing_saveable"),
    ],
)
def test_suggestions_are_near_or_not_made(name: str, suggestion: str | None) -> None:
    with pytest.raises(remat.PolicyError, match="Valid names") as caught:
        remat.checkpoint(loss, remat_policy=name)
    message = str(caught.value)
    assert ("did you mean" in message) == (suggestion is not None)
    assert suggestion is None or f"did you mean {suggestion!r}?" in message


@pytest.mark.parametrize("policy", ["Ilp", "Monet", "Checkmate"])
def test_no_time_limit_is_not_a_number(policy: str) -> None:
    with pytest.raises(remat.PolicyError, match="seconds=nan"):
        getattr(remat.policies, policy)(seconds=float("nan"))


def tagged(w: jax.Array, x: jax.Array) -> jax.Array:
    """One tag outside of a loop, one inside, one in a branch, one on what is not differentiated."""
    x = checkpoint_name(jnp.tanh(x @ w), "outside")
    x = jax.lax.scan(lambda c, _: (checkpoint_name(jnp.sin(c @ w), "inside"), None), x, None, 3)[0]
    x = jax.lax.cond(x.sum() > 0, lambda v: checkpoint_name(v * 2, "branch"), jnp.cos, x)
    checkpoint_name(x * 3, "unused")
    return jnp.sum(x)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "names", [None, "inside", "outside", ["inside", "outside"], "branch", "unused"]
)
def test_names_are_looked_for_everywhere(names: Any) -> None:
    policy = remat.policies.Names(names)
    got = jax.grad(remat.checkpoint(tagged, remat_policy=policy))(W, X)
    np.testing.assert_allclose(got, jax.grad(tagged)(W, X), rtol=1e-5)


@pytest.mark.parametrize("names", ["mlp", ["inside", "mlp"], ["m", "l", "p"]])
def test_names_that_match_nothing_are_errors(names: Any) -> None:
    policy = remat.policies.Names(names)
    for run in (
        lambda: remat.plan(tagged, W, X, remat_policy=policy),
        lambda: jax.grad(remat.checkpoint(tagged, remat_policy=policy))(W, X),
    ):
        with pytest.raises(
            remat.PolicyError, match=r"tags are \['branch', 'inside', 'outside', 'unused'\]"
        ):
            run()
    with pytest.raises(remat.PolicyError, match="has no checkpoint_name tags"):
        remat.plan(loss, W, X, remat_policy="names")


def test_tags_made_by_a_derivative_rule_are_found() -> None:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), checkpoint_name(jnp.cos(x), "kept")), lambda cos, g: (g * cos,))
    total = lambda x: jnp.sum(f(x) ** 2)  # noqa: E731
    for policy in (
        remat.policies.Names("kept"),
        jax.checkpoint_policies.save_only_these_names("kept"),
    ):
        got = jax.grad(remat.checkpoint(total, remat_policy=policy))(X)
        np.testing.assert_allclose(got, jax.grad(total)(X), rtol=1e-5)


def test_policies_of_jax_that_name_nothing_are_errors() -> None:
    only = jax.checkpoint_policies.save_only_these_names
    both = jax.checkpoint_policies.save_from_both_policies(
        only("mlp"), jax.checkpoint_policies.dots_saveable
    )
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["mlp"],
        names_which_can_be_offloaded=[],
        offload_src="device",
        offload_dst="pinned_host",
    )
    for policy in (only("mlp"), both, offload):
        with pytest.raises(remat.PolicyError, match=r"names \['mlp'\] tag no value"):
            jax.grad(remat.checkpoint(tagged, remat_policy=policy))(W, X)
    with pytest.warns(remat.RematWarning, match=r"names \['mlp'\] tag no value"):
        got = jax.grad(remat.checkpoint(tagged, policy=only("inside", "mlp")))(W, X)
    np.testing.assert_allclose(got, jax.grad(tagged)(W, X), rtol=1e-5)
    for policy in (only("inside"), jax.checkpoint_policies.save_any_names_but_these("mlp")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.grad(remat.checkpoint(tagged, policy=policy))(W, X)


def test_a_plan_whose_codes_are_too_narrow_is_an_error() -> None:
    """Literals are no part of a graph's structure; the ranges that follow from them bound codes."""

    def of(mask: int) -> Callable[..., Any]:
        def f(w: jax.Array, i: jax.Array) -> jax.Array:
            index = i & mask
            return jnp.sum(w * index.astype(w.dtype) * jnp.sin(w))

        return f

    w, i = jnp.arange(1.0, 65.0) / 10, jnp.arange(64)
    plan = remat.plan(of(3), w, i, remat_policy=remat.policies.MinCut.paper())
    assert "uint2" in [entry.form for entry in plan.saved]
    for mask in (1, 3):
        got = jax.grad(remat.checkpoint(of(mask), remat_policy=plan))(w, i)
        np.testing.assert_allclose(got, jax.grad(of(mask))(w, i), rtol=1e-5)
    with pytest.raises(remat.PlanError, match="as uint2, which was 0 to 3 then and is 0 to 15 now"):
        jax.grad(remat.checkpoint(of(15), remat_policy=plan))(w, i)


def _scan_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0])


def _step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(loss)(w, x)


@pytest.mark.parametrize(
    "f",
    [
        jax.grad(loss),
        jax.value_and_grad(loss),
        jax.jit(jax.grad(loss)),
        partial(jax.grad(lambda k, w, x: k * loss(w, x), 1), 2.0),
        lambda w, x: jax.grad(loss)(w, x),
        jax.jit(lambda w, x: jax.value_and_grad(loss)(w, x)[1]),
        eqx.filter_grad(loss),
        jax.grad(_scan_loss),
        lambda w, x: jax.grad(_scan_loss)(w, x),
        jax.grad(lambda w, x: jnp.sum(w**2)),
        _step,
    ],
)
def test_a_plan_of_a_gradient_warns(f: Callable[..., Any]) -> None:
    with pytest.warns(remat.RematWarning, match=r"plans its derivative.*remat\.plan\(loss"):
        remat.plan(f, W, X)


def _slope(w: jax.Array, x: jax.Array) -> jax.Array:
    """A loss with a gradient inside, as of a physics-informed network, or of forces."""
    return jnp.sum(jax.grad(lambda x: loss(w, x))(x) ** 2)


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (loss, (W, X)),
        (_slope, (W, X)),
        (jax.grad(loss, 1), (W, X)),
        (
            lambda c, x: c * jax.grad(lambda x: jnp.sum(jnp.sin(c * x)))(x).sum(),
            (jnp.float32(2), X),
        ),
        (remat.checkpoint(_scan_loss), (W, X)),
    ],
)
def test_a_plan_of_a_loss_with_gradients_inside_does_not_warn(
    f: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.RematWarning)
        remat.plan(f, *args)


def test_plans_with_loops_that_are_not_differentiated() -> None:
    def f(w: jax.Array, n: jax.Array) -> jax.Array:
        steps = jax.lax.scan(lambda c, _: (c + 1, None), n, None, length=3)[0]
        return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), w, None, length=3)[0].sum() * steps

    plan = remat.plan(f, W, jnp.int32(1))
    assert [entry.path for entry in plan.loops] == ["scan1"]
    g = remat.checkpoint(f, remat_policy=plan)
    np.testing.assert_allclose(jax.grad(g)(W, 1), jax.grad(f)(W, 1), rtol=1e-5)


def test_a_budget_includes_the_working_memory_of_loops() -> None:
    def f(w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w, None), X, None, length=9)[0].sum()

    peak = remat.plan(f, W).peak_bytes
    assert remat.plan(f, W, budget=peak, remat_policy="min_cut").peak_bytes == peak
    with pytest.raises(remat.BudgetError, match="Smallest peak found"):
        remat.plan(f, W, budget=peak - 1, remat_policy="min_cut")


def test_functions_without_anything_to_differentiate() -> None:
    with pytest.raises(remat.TraceError, match="results is differentiable"):
        remat.plan(lambda w: jnp.argmax(w), W)
    with pytest.raises(remat.TraceError, match="inputs is differentiated"):
        remat.plan(lambda n: n * 1.0, jnp.int32(3))
    with pytest.raises(remat.TraceError, match="out of range"):
        remat.plan(loss, W, X, argnums=5)
    with pytest.raises(remat.TraceError, match="expects a function"):
        remat.checkpoint(3)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_while_loop_that_is_differentiated_keeps_jaxs_error() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda v: v.sum() < 10, lambda v: v * 2, x).sum()

    with pytest.raises(ValueError, match="while_loop"):
        jax.grad(remat.checkpoint(f))(X)


def test_plan_can_be_used_saved_and_loaded(tmp_path: Path) -> None:
    plan = remat.plan(loss, W, X, remat_policy="full")
    path = tmp_path / "plan.json"
    plan.to_json(path)
    json.loads(path.read_text())
    loaded = remat.Plan.from_json(path)
    assert loaded == plan and hash(loaded) == hash(plan)
    for policy in (plan, loaded, path, str(path)):
        g = remat.checkpoint(loss, remat_policy=policy)
        np.testing.assert_allclose(jax.grad(g)(W, X), jax.grad(loss)(W, X), rtol=1e-5)


def test_plan_of_another_function_is_an_error_naming_the_difference() -> None:
    plan = remat.plan(loss, W, X)
    other = remat.checkpoint(lambda w, x: jnp.sum(jnp.sin(x @ w)), remat_policy=plan)
    with pytest.raises(remat.PlanError, match=r"operator \d+ was tanh .*and is now|was tanh"):
        jax.grad(other)(W, X)
    wider = remat.checkpoint(loss, remat_policy=plan)
    with pytest.raises(remat.PlanError, match=r"input 1 was f32\[4,8\] and is f32\[5,8\] now"):
        jax.grad(wider)(W, jnp.ones((5, 8)))


def test_missing_plan_file() -> None:
    with pytest.raises(remat.PlanError, match="cannot read a plan"):
        remat.checkpoint(loss, remat_policy="nowhere/plan.json")


def test_plan_for_the_arguments_that_are_differentiated() -> None:
    one = remat.plan(loss, W, X)
    both = remat.plan(loss, W, X, argnums=(0, 1))
    assert (len(one.graph.gradients), len(both.graph.gradients)) == (1, 2)


def test_plans_work_on_shapes_and_equal_those_on_arrays() -> None:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X)]
    assert remat.plan(loss, *shapes).digest() == remat.plan(loss, W, X).digest()


def test_policy_lowering_names_exactly_the_kept_values() -> None:
    plan = remat.plan(loss, W, X, lowering="policy")
    annotated = plan.annotate(loss)
    text = str(jax.make_jaxpr(annotated)(W, X))
    for name in plan.policy_names():
        assert f"name={name}" in text
    assert text.count("name=remat.") == len(plan.policy_names())
    np.testing.assert_allclose(jax.grad(annotated)(W, X), jax.grad(loss)(W, X), rtol=1e-5)
    by_hand = jax.checkpoint(annotated, policy=plan.policy)
    np.testing.assert_allclose(jax.grad(by_hand)(W, X), jax.grad(loss)(W, X), rtol=1e-5)


def test_staged_plan_has_no_policy_and_says_why() -> None:
    plan = remat.plan(lambda x: jnp.sum(jnp.cos(jnp.cos(x)) * x), X, remat_policy="save_all")
    with pytest.raises(remat.PlanError, match="lowering='policy'"):
        _ = plan.policy


def test_flags_need_no_static_argnums() -> None:
    def f(w: jax.Array, double: bool) -> jax.Array:
        return loss(w, X) * (2 if double else 1)

    g = remat.checkpoint(f)
    np.testing.assert_allclose(jax.grad(g)(W, True), 2 * jax.grad(g)(W, False), rtol=1e-6)


class Transformer(eqx.Module):
    """Attention with dropout and a perceptron: arrays, functions, floats and flags as leaves."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    perceptron: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 8, dropout_p=0.1, key=first)
        self.norm = eqx.nn.LayerNorm(8)
        self.perceptron = eqx.nn.MLP(8, 8, 16, 1, activation=jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """Maps `[n, 8]` to `[n, 8]`."""
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, key=key)
        return x + jax.vmap(self.perceptron)(x)


@pytest.mark.slow
def test_equinox_modules() -> None:
    blocks = [Transformer(key) for key in jax.random.split(jax.random.key(0), 2)]

    def total(wrap: Callable[..., Any]) -> Any:
        def objective(blocks: Any, x: jax.Array) -> jax.Array:
            for index, block in enumerate(blocks):
                x = wrap(lambda block, x, key: block(x, key))(block, x, jax.random.key(index))
            return jnp.sum(x**2)

        gradient = eqx.filter_jit(eqx.filter_grad(objective))(blocks, X)
        return eqx.filter(gradient, eqx.is_array)

    want, got = total(lambda f: f), total(remat.checkpoint)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# --- one planning per kind of call -----------------------------------------------------------------


def _key_cases() -> list[tuple[str, Callable[[jax.ShapeDtypeStruct], Any]]]:
    return [
        ("array", lambda shape: jnp.ones(shape.shape, shape.dtype)),
        ("numpy array", lambda shape: np.ones(shape.shape, shape.dtype)),
        ("shape", lambda shape: shape),
    ]


@pytest.mark.parametrize(("first", "of_first"), _key_cases(), ids=lambda x: str(x)[:11])
@pytest.mark.parametrize("loops", [False, True])
def test_shapes_arrays_and_tracers_share_a_planning(
    first: str,
    of_first: Callable[[jax.ShapeDtypeStruct], Any],
    loops: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was planned for shapes is not planned again when arrays, or shapes to lower with, follow."""
    del first
    planned: list[Any] = []
    plan_room = confirm.plan_room

    def counted(room: Any, inputs: Any, perturbed: Any, *rest: Any) -> Any:
        planned.append(perturbed)
        return plan_room(room, inputs, perturbed, *rest)

    monkeypatch.setattr(confirm, "plan_room", counted)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        if loops:
            x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (64, 16))]
    remat.plan(loss, *map(of_first, shapes), remat_policy="full")
    once = len(planned)
    assert once == 1 if not loops else once >= 1
    wrapped = remat.checkpoint(loss, remat_policy="full")
    jax.jit(jax.grad(wrapped)).lower(*shapes)
    for _, make in _key_cases()[:2]:
        jax.grad(wrapped)(*map(make, shapes))
    assert len(planned) == once
    # Another dtype, weak type or differentiated argument is another program.
    jax.jit(jax.grad(wrapped)).lower(
        shapes[0], jax.ShapeDtypeStruct((64, 16), jnp.float32, weak_type=True)
    )
    assert len(planned) > once
    twice = len(planned)
    jax.grad(wrapped, (0, 1))(*(jnp.ones(s.shape) for s in shapes))
    assert len(planned) > twice
