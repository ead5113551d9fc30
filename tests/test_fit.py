"""Fitting a step: confirmed by the compiler, with the results of the plain step, in few compiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st
from random_graphs import laws

import remat
import remat.linen
import remat.nnx
from models import cases, gpt, mlp
from remat.compiler.compile import TracedStep, compiler_options
from remat.compiler.report import CompileReport
from remat.core.errors import BudgetError, CompileError, DeviceMemoryError, PolicyError
from remat.fitting.batch import _largest
from remat.fitting.fit import Fitted, finish, fit, fit_options, trials_of
from remat.fitting.job import Job, Options, Trial
from remat.lower.attempt import Attempt, Menus, PricePlanner, choose_option
from remat.plans.plan import Plan
from remat.plans.words import human_bytes
from remat.policies import Auto, Ilp
from tests.test_pareto import Cuts

LAYERS, WIDTH, ROWS = 4, 16, 64
SIZES = {"layers": LAYERS, "width": WIDTH, "hidden": 64}


def loss_and_args(rows: int = ROWS) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return mlp.residual_mlp(**SIZES, batch=rows)


def gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(remat.checkpoint(loss))


LOSS, ARGS = loss_and_args()
STEP = gradient(LOSS)


def equal(want: Any, got: Any) -> bool:
    """Whether two trees agree but for the rounding of another order of additions."""
    leaves = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return jax.tree.structure(want) == jax.tree.structure(got) and all(
        jnp.allclose(a, b, rtol=2e-5, atol=1e-6) for a, b in leaves
    )


def compiled_plainly(step: Callable[..., Any], *args: Any, **options: Any) -> CompileReport:
    return remat.compile_report(step, *args, device="cpu", **options)


def budget(share: float, plain: CompileReport) -> int:
    """Memory that leaves a share of the plain step's temporaries."""
    return plain.total_bytes - plain.temp_bytes + int(share * plain.temp_bytes)


@pytest.fixture(scope="module")
def plain() -> CompileReport:
    return compiled_plainly(jax.grad(LOSS), *ARGS)


@pytest.fixture(scope="module")
def tight(plain: CompileReport) -> Fitted:
    return fit(STEP, *ARGS, memory=budget(0.4, plain), device="cpu", remat_policy=Cuts())


# --- one wrapped function: a budget ------------------------------------------------------------------------


def test_the_cheapest_plan_is_enough_where_it_fits(plain: CompileReport) -> None:
    found = fit(STEP, *ARGS, memory=2 * plain.total_bytes, device="cpu", remat_policy=Cuts())
    (trial,) = found.history
    assert trial.knob == "no budget" and trial.fits and found.chosen is trial
    assert found.budget_bytes is None and found.plans[0].recompute_flops == 0


@pytest.mark.slow
@pytest.mark.gpu_compile
def test_with_memory_for_it_the_plain_step_itself_is_tried() -> None:
    loss, args = cases.gpt_blocks_unrolled_small()
    plain = remat.compile_report(jax.grad(loss), *args, device="h200")
    step = gradient(loss)
    found = fit(step, *args, memory=2 * plain.total_bytes, device="h200", remat_policy="ilp")
    trial, unchanged = found.history
    assert trial.knob == "no budget" and trial.fits and unchanged.fits
    assert unchanged.knob == "as without rematerialization"
    assert unchanged.temp_bytes == plain.temp_bytes
    assert len(unchanged.report.kernels) == len(plain.kernels)
    assert unchanged.report.hbm_traffic_bytes == plain.hbm_traffic_bytes


def test_the_plain_step_is_compiled_only_where_it_may_fit() -> None:
    made: list[int] = []

    class Knob(FakeKnob):
        def plain(self, limit_bytes: int) -> Trial | None:
            made.append(limit_bytes)
            return replace(self.trial(self.predictions[-1] + 1), recompute_seconds=0.0)

    untimed = Knob([100, 200], 1.0, 0, FIXED + 1000)
    assert len(trials_of(untimed, options(FIXED + 1000), lambda: 1)) == 1 and not made
    Knob.report = FakeReport(roofline_seconds=1.0)
    knob = Knob([100, 200], 1.0, 0, FIXED + 1000)
    trials = trials_of(knob, options(FIXED + 1000), lambda: len(knob.made))
    assert [trial.predicted_bytes for trial in trials] == [200, 201]
    assert made == [1020]
    tight = Knob([100, 200], 1.0, 0, FIXED + 150)
    assert 201 not in [
        t.predicted_bytes for t in trials_of(tight, options(FIXED + 150), lambda: len(tight.made))
    ]
    assert made == [1020]
    short = Knob([100, 200], 1.0, 0, FIXED + 1000)
    assert len(trials_of(short, options(FIXED + 1000, 2), lambda: 2)) == 1


@pytest.mark.parametrize(("device", "tried"), [("v5e", True), ("TPU v4", True), ("h200", False)])
def test_where_nothing_fits_a_tpu_the_plain_step_is_tried(device: str, tried: bool) -> None:
    """XLA:TPU may have computed values again by itself."""

    class Knob(FakeKnob):
        report = FakeReport(device=device)

        def plain(self, limit_bytes: int) -> Trial | None:
            assert limit_bytes > 10**15  # whatever is predicted
            return replace(self.trial(self.predictions[-1] + 1), fits=True)

    knob = Knob([100, 200], 1.0, 0, FIXED + 50)
    trials = trials_of(knob, options(FIXED + 50, 4), lambda: len(knob.made))
    assert (201 in [t.predicted_bytes for t in trials]) == tried
    assert len(knob.made) <= 4


@pytest.mark.slow
def test_what_fits_is_what_the_compiler_says(tight: Fitted, plain: CompileReport) -> None:
    assert tight.total_bytes <= tight.memory_bytes < plain.total_bytes
    again = compiled_plainly(jax.grad(remat.checkpoint(LOSS, remat_policy=tight.plans[0])), *ARGS)
    assert again.total_bytes == tight.report.total_bytes
    assert 2 <= len(tight.history) <= 6
    assert not tight.history[0].fits
    assert tight.chosen in tight.history and tight.chosen.report is tight.report
    assert tight.plans[0].recompute_flops > 0
    assert tight.budget_bytes is not None and tight.plans[0].peak_bytes <= tight.budget_bytes


def test_the_step_runs_and_agrees(tight: Fitted) -> None:
    args = cases.materialize(ARGS)
    want = jax.jit(jax.grad(LOSS), compiler_options=compiler_options("cpu"))(*args)
    assert equal(want, tight(*args))


def test_as_data_and_text(tight: Fitted) -> None:
    document = json.loads(json.dumps(tight.to_dict()))
    assert document["format"] == "remat.fit"
    assert document["total_bytes"] == tight.total_bytes
    assert document["history"][document["chosen"]]["fits"] is True
    assert document["plans"][0]["digest"] == tight.plans[0].digest()
    lines = str(tight).splitlines()
    assert lines[0].startswith("fits: ") and len(lines) == 2 + len(tight.history)
    assert sum("chosen" in line for line in lines) == 1 and "too large" in lines[2]


@pytest.mark.slow
def test_equal_steps_are_fitted_equally(tight: Fitted) -> None:
    again = fit(gradient(LOSS), *ARGS, memory=tight.memory_bytes, device="cpu", remat_policy=Cuts())
    assert [t.total_bytes for t in again.history] == [t.total_bytes for t in tight.history]
    assert again.plans == tight.plans


@pytest.mark.slow
def test_a_jitted_step_is_traced_anew(tight: Fitted) -> None:
    """jax remembers traces of jitted functions; an attempt must not see those of another."""
    step = jax.jit(lambda *args: jax.jit(STEP)(*args))
    step.trace(*ARGS)
    found = fit(step, *ARGS, memory=tight.memory_bytes, device="cpu", remat_policy=Cuts())
    assert found.plans == tight.plans
    assert [t.total_bytes for t in found.history] == [t.total_bytes for t in tight.history]


@pytest.mark.slow
def test_nothing_of_a_fit_stays_behind(tight: Fitted) -> None:
    loss = remat.checkpoint(LOSS, remat_policy="min_cut")
    before = compiled_plainly(jax.grad(loss), *ARGS)
    fit(jax.grad(loss), *ARGS, memory=tight.memory_bytes, device="cpu", remat_policy=Cuts())
    after = compiled_plainly(jax.grad(loss), *ARGS)
    assert (before.temp_bytes, before.matmuls_executed) == (
        after.temp_bytes,
        after.matmuls_executed,
    )


def test_too_little_memory_says_what_is_the_least(plain: CompileReport) -> None:
    memory = budget(0.02, plain)
    with pytest.raises(BudgetError) as caught:
        fit(STEP, *ARGS, memory=memory, device="cpu", remat_policy=Cuts())
    message = str(caught.value)
    assert f"{memory:,} bytes" in message and "smallest that the compiler confirmed" in message
    assert f"arguments {human_bytes(plain.argument_bytes)}" in message
    assert "dominate" in message
    total = caught.value.smallest_peak_bytes
    assert total is not None and f"compiler confirmed is {total:,} bytes" in message
    assert total > plain.argument_bytes


def test_compiles_that_are_used_up_are_named(plain: CompileReport) -> None:
    memory = plain.argument_bytes + plain.output_bytes + 1000
    with pytest.raises(
        BudgetError, match="More compiles may find a plan: max_compiles=4"
    ) as caught:
        fit(STEP, *ARGS, memory=memory, device="cpu", remat_policy=Cuts(), max_compiles=2)
    assert "which alone do not fit" not in str(caught.value)


def test_a_program_that_the_compiler_refuses_is_too_large(
    plain: CompileReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it, limit = TracedStep.compile, budget(0.5, plain)

    def like_a_tpu(step: TracedStep) -> Any:
        report, compiled = compile_it(step)
        if report.total_bytes > limit:
            raise DeviceMemoryError("it needs 2GiB, and the device has 1GiB", report.temp_bytes)
        return report, compiled

    monkeypatch.setattr(TracedStep, "compile", like_a_tpu)
    found = fit(STEP, *ARGS, memory=budget(1.5, plain), device="cpu", remat_policy=Cuts())
    refused = [trial for trial in found.history if not trial.report.kernels]
    assert found.total_bytes <= limit and found.report.kernels
    assert not any(trial.fits for trial in refused)
    with pytest.raises(BudgetError, match="does not fit"):
        limit = 0
        fit(STEP, *ARGS, memory=budget(1.5, plain), device="cpu", remat_policy=Cuts())


def test_arguments_alone_are_too_large(plain: CompileReport) -> None:
    said: list[str] = []
    with pytest.raises(BudgetError, match="which alone do not fit, arguments dominate"):
        fit(
            STEP,
            *ARGS,
            memory=plain.argument_bytes,
            device="cpu",
            remat_policy=Cuts(),
            progress=said.append,
        )
    assert sum("compiling" in line for line in said) == 1


def test_min_cut_takes_prices(plain: CompileReport) -> None:
    found = fit(STEP, *ARGS, memory=budget(0.4, plain), device="cpu", remat_policy="min_cut")
    assert found.total_bytes <= found.memory_bytes
    assert found.history[0].knob == "the least time"


# --- many wrapped functions: a price -----------------------------------------------------------------------


def per_layer(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for weights in params:
            x = wrap(mlp.layer)(weights, x)
        return jnp.mean(jnp.square(x))

    return loss


def scanned(params: Any, x: Any) -> Any:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)

    def body(carry: Any, weights: Any) -> Any:
        return remat.checkpoint(mlp.layer)(weights, carry), None

    out, _ = jax.lax.scan(body, x, stacked)
    return jnp.mean(jnp.square(out))


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", [per_layer(remat.checkpoint), scanned], ids=["unrolled", "scan"])
def test_several_wrappers_share_a_price(loss: Callable[..., Any]) -> None:
    free = fit(jax.grad(loss), *ARGS, memory="1GiB", device="cpu", remat_policy=Cuts())
    assert len(free.history) == 1
    memory = free.total_bytes - 1
    found = fit(jax.grad(loss), *ARGS, memory=memory, device="cpu", remat_policy=Cuts())
    assert found.total_bytes <= memory
    assert found.chosen.predicted_bytes < found.history[0].predicted_bytes
    assert found.chosen.recompute_seconds > free.chosen.recompute_seconds
    args = cases.materialize(ARGS)
    want = jax.jit(jax.grad(LOSS), compiler_options=compiler_options("cpu"))(*args)
    assert equal(want, found(*args))


def uses_of(step: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    attempt = Attempt(PricePlanner(0.0, Menus("h200")))
    with attempt.active():
        jax.make_jaxpr(step)(*args)
    return attempt.uses()


def test_uses_are_counted() -> None:
    (use,) = uses_of(jax.grad(per_layer(remat.checkpoint)), *ARGS)
    assert (use.calls, use.kept_in_loop, use.name) == (LAYERS, False, "layer")
    (use,) = uses_of(jax.grad(scanned), *ARGS)
    assert (use.calls, use.kept_in_loop) == (1, True)
    (use,) = uses_of(STEP, *ARGS)
    assert (use.calls, use.kept_in_loop) == (1, False)
    assert uses_of(remat.checkpoint(LOSS), *ARGS) == ()
    assert uses_of(jax.grad(remat.checkpoint(LOSS, remat_policy=None)), *ARGS) == ()


def test_gradients_accumulated_in_a_loop_are_not_kept_by_it() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, STEP(params, x)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)[0]

    xs = jax.ShapeDtypeStruct((3, ROWS, WIDTH), jnp.float32)
    (use,) = uses_of(step, ARGS[0], xs)
    assert (use.calls, use.kept_in_loop) == (1, False)


def test_saved_plans_and_policies_of_jax_are_left_alone() -> None:
    plan = remat.plan(LOSS, *ARGS)
    for policy in (plan, "dots_saveable", None):
        assert uses_of(jax.grad(remat.checkpoint(LOSS, remat_policy=policy)), *ARGS) == ()

    def both(params: Any, x: Any) -> Any:
        fixed = remat.checkpoint(LOSS, remat_policy=plan)
        return fixed(params, x) + remat.checkpoint(LOSS, remat_policy="full")(params, x)

    assert len(uses_of(jax.grad(both), *ARGS)) == 1


def test_linen_and_nnx_wrappers() -> None:
    block = remat.linen.remat(nn.Dense, remat_policy="min_cut")
    x = jnp.ones((4, 8))
    variables = block(8).init(jax.random.key(0), x)
    (use,) = uses_of(jax.grad(lambda v: jnp.sum(jnp.tanh(block(8).apply(v, x)))), variables)
    assert use.plan.policy_name in ("full", "min_cut")

    wrapped = remat.nnx.remat(lambda m, x: jnp.tanh(m(x)), remat_policy="min_cut")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    attempt = Attempt(PricePlanner(0.0, Menus("h200")))
    with attempt.active():
        nnx.grad(lambda m: jnp.sum(wrapped(m, x)))(model)
    assert len(attempt.uses()) == 1


@given(st.floats(0, 1e-9), st.floats(0, 1e-9))
@laws(50)
def test_a_higher_price_never_keeps_more(one: float, other: float) -> None:
    options = MENUS.of(remat.plan(LOSS, *ARGS).graph)
    low, high = (choose_option(options, price) for price in sorted((one, other)))
    assert high.saved_bytes <= low.saved_bytes and high.seconds >= low.seconds
    assert choose_option(options, float("inf")) is options[0]
    assert choose_option(options, 0.0) is options[-1]


MENUS = Menus("h200")


# --- whole training steps ----------------------------------------------------------------------------------


OPTIMIZER = optax.adam(1e-2)


def train(loss: Callable[..., Any], params: Any, state: Any, x: Any, key: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, key)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def assert_trains_alike(loss: Callable[..., Any], share: float, params: Any, x: Any) -> None:
    """Random masks are drawn again from the same keys: the fitted step trains like the plain one."""
    args = (params, OPTIMIZER.init(params), x, jax.random.key(3))
    donated: dict[str, Any] = {"donate_argnums": (0, 1)}
    plain = compiled_plainly(partial(train, loss), *args, **donated)
    found = fit(
        partial(train, remat.checkpoint(loss)),
        *args,
        memory=budget(share, plain),
        device="cpu",
        remat_policy="min_cut",
        **donated,
    )
    assert found.total_bytes <= budget(share, plain) and found.report.alias_bytes > 0
    want = jax.jit(partial(train, loss), compiler_options=compiler_options("cpu"))(*args)
    given_away = jax.tree.map(jnp.copy, args[:2])
    assert equal(want, found(*given_away, *args[2:]))


def test_a_training_step_with_dropout_and_adam() -> None:
    def loss(params: Any, x: Any, key: Any) -> Any:
        for index, weights in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, index), 0.5, x.shape)
            x = jnp.where(kept, jnp.tanh(x @ weights) * 2, 0.0) + x
        return jnp.mean(jnp.square(x))

    params = [0.1 * jax.random.normal(jax.random.key(i), (16, 16)) for i in range(3)]
    assert_trains_alike(loss, 0.8, params, jnp.linspace(-1, 1, 128 * 16).reshape(128, 16))


@pytest.mark.slow
def test_a_gpt_trains_alike() -> None:
    sizes: dict[str, Any] = {
        "layers": 2, "batch": 2, "length": 16, "width": 16, "heads": 2, "dropout": 0.5,
    }  # fmt: skip
    loss, _ = gpt.blocks_scanned(**sizes)
    params, x, _ = gpt.init_args(**sizes)
    assert_trains_alike(lambda *args: loss(*args) ** 2, 0.6, params, x)


def test_static_arguments_and_keyword_arguments() -> None:
    def step(params: Any, power: int, x: Any, *, scale: Any) -> Any:
        return jax.grad(remat.checkpoint(lambda p: scale * LOSS(p, x) ** power))(params)

    params, x = cases.materialize(ARGS)
    found = fit(
        step,
        params,
        2,
        x,
        scale=jnp.float32(3),
        static_argnums=1,
        memory="1GiB",
        device="cpu",
        remat_policy=Cuts(),
    )
    assert equal(
        jax.jit(step, static_argnums=1)(params, 2, x, scale=3.0),
        found(params, 2, x, scale=jnp.float32(3)),
    )


# --- errors ------------------------------------------------------------------------------------------------


def test_no_wrapper_says_how_to_wrap() -> None:
    with pytest.raises(PolicyError, match=r"loss = remat\.checkpoint\(loss"):
        fit(jax.grad(LOSS), *ARGS, memory="1GiB", device="cpu", remat_policy=Cuts())
    with pytest.raises(PolicyError, match="is differentiated"):
        fit(remat.checkpoint(LOSS), *ARGS, memory="1GiB", device="cpu", remat_policy=Cuts())


@pytest.mark.parametrize("policy", ["full", "dots_saveable", None])
def test_policies_that_cannot_be_tightened(policy: Any) -> None:
    with pytest.raises(PolicyError, match="cannot be tightened"):
        fit(STEP, *ARGS, memory="1GiB", device="cpu", remat_policy=policy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 0.5}, "not a fraction"),
        ({"memory": "6 apples"}, "not a size"),
        ({"memory": None, "device": "cpu"}, "pass memory="),
        ({"memory": "1GiB", "max_compiles": 1}, "at least 2"),
    ],
)
def test_bad_memory(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        fit(STEP, *ARGS, **options)


def test_memory_of_the_data_sheet() -> None:
    from remat.core.devices import get_device

    read = fit_options(
        memory=None,
        device="h200",
        remat_policy="ilp",
        max_compiles=2,
        static_argnums=0,
        donate_argnums=(),
        compiler_options=None,
        progress=None,
    )
    assert read.limit_bytes == get_device("h200").memory_bytes
    assert read.static_argnums == (0,)


@pytest.mark.gpu_compile
def test_an_absent_gpu_gives_plans_but_no_step() -> None:
    found = fit(STEP, *ARGS, memory="1GiB", device="h200", remat_policy=Cuts())
    assert found.compiled is None and found.report.device == "h200"
    with pytest.raises(CompileError, match=r"remat_policy=fitted\.plans\[0\]"):
        found(*cases.materialize(ARGS))


@pytest.mark.parametrize(
    ("policy", "device", "wanted"),
    [
        ("ilp", "a100", "a100"),
        ("min_cut", "b200", "b200"),
        (Ilp(seconds=5.0), "a100", "a100"),
        (Auto(), "a100", "a100"),
        (Ilp(device="h100"), "a100", "h100"),
        ("ilp", "cpu", "h200"),  # no data sheet: the usual prices
    ],
)
def test_prices_are_those_of_the_device(policy: Any, device: str, wanted: str) -> None:
    options = fit_options(
        memory="1GiB",
        device=device,
        remat_policy=policy,
        max_compiles=2,
        static_argnums=(),
        donate_argnums=(),
        compiler_options=None,
        progress=None,
    )
    job = Job(STEP, ARGS, {}, options)
    assert job.resolved.policy.device == wanted  # type: ignore[union-attr]
    assert job.menus.device == wanted


@pytest.mark.gpu_compile
def test_a_step_for_another_gpu_is_priced_with_it() -> None:
    found = fit(STEP, *ARGS, memory="1GiB", device="a100", remat_policy="ilp", max_compiles=2)
    assert {plan.device for trial in found.history for plan in trial.plans} <= {"a100", "h200"}
    assert found.history[0].plans[0].device == "a100"


@pytest.mark.parametrize("memory", ["abc", "0.5", 0.5, -1, True])
def test_errors_about_memory_say_memory(memory: Any) -> None:
    with pytest.raises(BudgetError, match=r"^memory=.*expected") as caught:
        fit(STEP, *ARGS, memory=memory, device="cpu")
    assert "budget=" not in str(caught.value)


# --- the search, with a compiler that is a formula ---------------------------------------------------------

FIXED = 1000


@dataclass(frozen=True)
class FakeReport:
    """What `finish` reads of a report."""

    roofline_seconds: float | None = None
    device: str = "cpu"


class FakeKnob:
    """Plans at every prediction of a list; the compiler adds to a multiple of the prediction."""

    report = FakeReport()

    def __init__(self, predictions: list[int], factor: float, offset: int, limit: int) -> None:
        self.predictions = sorted(predictions)
        self.factor, self.offset, self.limit = factor, offset, limit
        self.made: dict[int, Trial] = {}

    def total(self, predicted: int) -> int:
        return FIXED + self.offset + int(self.factor * predicted)

    def trial(self, predicted: int) -> Trial:
        total = self.total(predicted)
        new: Any = Trial(
            knob=str(predicted),
            predicted_bytes=predicted,
            total_bytes=total,
            temp_bytes=total - FIXED,
            recompute_seconds=1 / predicted,
            fits=total <= self.limit,
            plans=(),
            report=self.report,  # pyright: ignore[reportArgumentType]
        )
        return self.made.setdefault(predicted, new)

    def cheapest(self) -> Trial:
        return self.trial(self.predictions[-1])

    def plain(self, limit_bytes: int) -> Trial | None:
        return None

    def least(self) -> Trial:
        return self.trial(self.predictions[0])

    def another(self) -> Trial | None:
        return None

    def at(self, target_bytes: int, low: Trial | None, high: Trial | None) -> Trial | None:
        under = [p for p in self.predictions if p <= target_bytes]
        return self.trial(under[-1]) if under else self.least()


def options(limit: int, max_compiles: int = 6) -> Options:
    return Options("ilp", limit, max_compiles, "cpu", (), (), None, lambda line: None)


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=200, unique=True),
    st.floats(0.3, 3.0),
    st.integers(0, 10**6),
    st.integers(2000, 3 * 10**6),
    st.integers(2, 8),
)
@example([10, 1000], 1.0, 0, 1010, 2)
@laws(300)
def test_search_finds_what_fits_if_anything_does(
    predictions: list[int], factor: float, offset: int, limit: int, max_compiles: int
) -> None:
    knob = FakeKnob(predictions, factor, offset, limit)
    trials = trials_of(knob, options(limit, max_compiles), lambda: len(knob.made))
    assert len(knob.made) <= max_compiles
    assert len({trial.knob for trial in trials}) == len(trials)
    feasible = [p for p in predictions if knob.total(p) <= limit]
    fitting = [trial for trial in trials if trial.fits]
    assert bool(fitting) == bool(feasible)
    if not feasible and limit > FIXED:
        assert min(trial.predicted_bytes for trial in trials) == min(predictions)


@given(st.floats(0.5, 2.0), st.integers(0, 10**5), st.floats(0.05, 0.95))
@laws(200)
def test_a_linear_compiler_is_met_closely(factor: float, offset: int, share: float) -> None:
    """Any prediction can be had: then at most 5 % of the memory is left unused."""
    top = 10**6
    knob = FakeKnob(list(range(1000, top, 500)), factor, offset, 0)
    limit = knob.limit = FIXED + offset + int(factor * top * share) + 2000
    trials = trials_of(knob, options(limit), lambda: len(knob.made))
    best = max(trial.total_bytes for trial in trials if trial.fits)
    assert best >= 0.94 * limit
    assert len(trials) <= 4


def test_other_plans_are_tried_where_the_least_are_not_the_smallest() -> None:
    class Odd(FakeKnob):
        def total(self, predicted: int) -> int:
            return FIXED + {100: 900, 400: 820, 1000: 2000}[predicted]

    knob = Odd([100, 400, 1000], 1.0, 0, FIXED + 850)
    trials = trials_of(knob, options(FIXED + 850), lambda: len(knob.made))
    assert [trial.predicted_bytes for trial in trials if trial.fits] == [400]


def test_plans_in_steps_are_passed_over_for_the_next() -> None:
    """The step above the one that fits begins just above where the compiler's answers point to."""
    knob = FakeKnob([5690, 9280, 15160], 1.029, 0, FIXED + 9600)
    trials = trials_of(knob, options(knob.limit), lambda: len(knob.made))
    assert [trial.predicted_bytes for trial in trials] == [15160, 5690, 9280]


def test_plans_of_another_kind_are_the_last_resort() -> None:
    class TwoKinds(FakeKnob):
        def another(self) -> Trial | None:
            return self.trial(150)

        def total(self, predicted: int) -> int:
            return FIXED + {100: 900, 150: 500, 1000: 2000}[predicted]

    knob = TwoKinds([100, 1000], 1.0, 0, FIXED + 600)
    trials = trials_of(knob, options(FIXED + 600), lambda: len(knob.made))
    assert [trial.predicted_bytes for trial in trials] == [1000, 100, 150]
    assert [trial.fits for trial in trials] == [False, False, True]


# --- the largest batch -------------------------------------------------------------------------------------


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**4),
    st.floats(1.0, 1.3),
    st.integers(1, 50),
    st.one_of(st.none(), st.integers(0, 500)),
    st.integers(1, 10**7),
)
@laws(300)
def test_largest_is_the_largest(
    constant: int, slope: int, bend: float, first: int, more: int | None, limit: int
) -> None:
    asked: list[int] = []

    def total(size: int) -> int:
        asked.append(size)
        return constant + int(slope * size**bend)

    last = None if more is None else first + more
    size, above = _largest(total, limit, first, last)
    assert len(asked) == len(set(asked))
    fits = [constant + int(slope * n**bend) <= limit for n in (size or 0, (size or 0) + 1)]
    if size is None:
        assert asked == [first] and constant + int(slope * first**bend) > limit
        return
    assert first <= size and fits[0]
    if above is None:
        assert size == last
    else:
        assert above == size + 1 and not fits[1]
    assert len(asked) <= 3 + 2 * (size.bit_length() + 1)


def test_linear_totals_need_few_compiles() -> None:
    asked: list[int] = []

    def total(size: int) -> int:
        asked.append(size)
        return 5000 + 30 * size

    assert _largest(total, 5000 + 30 * 777, 1, None) == (777, 778)
    assert len(asked) <= 8


def make(rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    loss, args = loss_and_args(rows)
    return gradient(loss), args


@pytest.mark.slow
def test_max_batch(plain: CompileReport) -> None:
    memory = budget(1.0, plain)
    found = remat.max_batch(
        make, memory=memory, device="cpu", low=32, multiple_of=32, remat_policy=Cuts()
    )
    assert found.batch % 32 == 0 and found.batch > ROWS
    assert found.next_batch is not None and found.next_batch == found.batch + 32
    sizes = {trial.batch: trial for trial in found.history}
    assert sizes[found.batch].fits and not sizes[found.next_batch].fits
    assert found.fitted.total_bytes <= memory
    assert found.compiles == len(found.history) + len(found.fitted.history) - 1
    args = cases.materialize(loss_and_args(found.batch)[1])
    assert equal(jax.grad(LOSS)(*args), found.fitted(*args))
    document = json.loads(json.dumps(found.to_dict()))
    assert document["batch"] == found.batch and document["compiles"] == found.compiles
    assert f"largest batch: {found.batch}" in str(found)


@pytest.mark.slow
def test_max_batch_up_to_a_limit_and_errors(plain: CompileReport) -> None:
    search_for = partial(remat.max_batch, make, device="cpu", remat_policy=Cuts())
    found = search_for(memory="1GiB", low=32, high=70, multiple_of=32)
    assert (found.batch, found.next_batch) == (64, None)
    with pytest.raises(BudgetError, match="a batch of 64 does not fit"):
        search_for(memory=plain.argument_bytes, low=64)
    with pytest.raises(BudgetError, match="multiple_of between low and high"):
        search_for(memory="1GiB", low=65, high=70, multiple_of=32)


def test_a_fitted_step_is_the_fastest_that_fits() -> None:
    knob = FakeKnob([100, 200, 900], 1.0, 0, FIXED + 250)

    @dataclass
    class Job:
        options: Options
        trials: list[Trial]
        compiled: dict[int, None]
        static: None = None

    job = Job(options(FIXED + 250), [], {i: None for i in range(6)})
    first = knob.trial(100)
    timed: Any = FakeReport(roofline_seconds=1.0)
    fast = replace(knob.trial(200), report=timed)
    slow = replace(first, report=replace(timed, roofline_seconds=2.0))
    top = replace(knob.trial(900), report=timed)
    knob.made = {100: slow, 200: fast, 900: top}
    job.trials = [slow, fast, top]
    fitted = finish(job, knob, known=[slow])  # pyright: ignore[reportArgumentType]
    assert fitted.chosen is fast
    assert isinstance(fitted.plans, tuple) and not isinstance(fitted.plans, Plan)


# --- the benchmark -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_confirms_what_it_prints() -> None:
    from benchmarks.fit import problems, run_model

    rows = run_model(
        "residual_mlp", device="cpu", policy="min_cut", small=True, shares=(1.0, 0.01), confirm=True
    )
    assert [row.share for row in rows] == [None, 1.0, 0.01]
    assert rows[1].confirmed_bytes == rows[1].total_bytes is not None
    assert rows[1].error is None and rows[2].total_bytes is None and rows[2].error is not None
    assert problems(rows[:2]) == []
    assert problems(rows[2:]) == [
        f"residual_mlp at {rows[2].memory_bytes:,} bytes: {rows[2].error}"
    ]
    assert rows[1].memory_bytes is not None
    wrong = replace(rows[1], total_bytes=rows[1].memory_bytes + 1, confirmed_bytes=None, compiles=7)
    assert len(problems([wrong])) == 2
    assert len(problems([replace(rows[1], confirmed_bytes=1)])) == 1
