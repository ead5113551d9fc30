"""Ctrl-C at any moment of a planning: the best plan so far, or KeyboardInterrupt; and what is said meanwhile."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat.core.interrupt import (
    BestSoFar,
    Keyboard,
    interrupted,
    planning,
    raise_interrupt,
    say,
    solver_says,
)
from remat.policies import Ilp, Monet
from remat.policies.solvers.search import is_compilable
from remat.policies.solvers.search_walk import compile_kernel

DEEP, ROWS, WIDTH = 10, 64, 32
BUDGET = 0.45


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def compiled_search() -> None:
    """Searches are left out where numba has not compiled them yet and the time is short, on a busy machine say."""
    if is_compilable():
        compile_kernel()


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight) + jnp.sin(x)
    return jnp.sum(x**2)


def args() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), DEEP)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return weights, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


class PressAt:
    """Presses Ctrl-C so many times at the first line that has some words in it."""

    def __init__(self, words: str, times: int = 1) -> None:
        self.words, self.times = words, times
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        if isinstance(line, BestSoFar):  # may come between any two others
            return
        self.lines.append(line)
        while self.times and self.words in line:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)


def plan(policy: Any, progress: Any, **options: Any) -> remat.Plan:
    # A function of its own: plans are remembered with it.
    return remat.plan(
        lambda w, x: loss(w, x),
        *args(),
        remat_policy=policy,
        budget=BUDGET,
        progress=progress,
        **options,
    )


@pytest.mark.slow
def test_progress_says_what_goes_on() -> None:
    lines: list[str] = []
    plan("ilp", lines.append)
    assert any("buffers within" in line for line in lines)
    assert any(line.startswith("ilp: local search, from") for line in lines)
    assert any("integer program, " in line and "extra" in line for line in lines)


@pytest.mark.slow
def test_without_a_listener_the_logger_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="remat"):
        plan("ilp", None)
    assert any("local search" in line for line in caplog.messages)


@pytest.mark.parametrize("words", ["local search", "integer program"])
@pytest.mark.parametrize("policy", ["ilp", "checkmate"])
def test_an_interrupted_planning_returns_the_best_so_far(
    policy: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    press = PressAt(f"{policy}: {words}")
    before = signal.getsignal(signal.SIGINT)
    found = plan(policy, press)
    assert press.times == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert found.notes[-1] == "interrupted: the best plan so far"
    assert found.budget_bytes is not None and found.peak_bytes <= found.budget_bytes
    # Where the prediction is above what was asked for, starts are asked for less; nothing is searched.
    after = press.lines[next(i for i, line in enumerate(press.lines) if words in line) + 1 :]
    assert all("buffers within" in line or "integer program" in line for line in after)
    assert [m for m in caplog.messages if "interrupted" in m and "Ctrl-C again" in m]


def test_gradients_of_an_interrupted_plan_are_those_of_the_function() -> None:
    found = plan("ilp", PressAt("local search"))
    weights, x = args()
    ours = jax.jit(jax.grad(remat.checkpoint(lambda w, x: loss(w, x), remat_policy=found)))(
        weights, x
    )
    theirs = jax.jit(jax.grad(loss))(weights, x)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("words", ["starts for choice 1 of", "monet: choice 1 of"])
def test_the_choice_of_rewrites_ends_early(words: str) -> None:
    def rectified(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jax.nn.relu(x @ weight) @ weight
        return jnp.sum(x**2)

    press = PressAt(words)
    policy = Monet(exact_limit=0)  # the joint program, which comes first, has its own test
    found = remat.plan(rectified, *args(), remat_policy=policy, budget=BUDGET, progress=press)
    assert press.times == 0 and "interrupted" in found.notes[-1]


def test_a_second_ctrl_c_ends_everything() -> None:
    with pytest.raises(KeyboardInterrupt):
        plan("ilp", PressAt("ilp: ", times=2))


def test_without_a_plan_that_fits_it_is_a_keyboard_interrupt() -> None:
    press = PressAt("buffers within")
    with pytest.raises(KeyboardInterrupt):
        remat.plan(
            lambda w, x: loss(w, x), *args(), remat_policy="ilp", budget=0.05, progress=press
        )
    assert press.times == 0


def test_loops_keep_their_best_setting() -> None:
    weights, x = args()
    stacked = jnp.stack(weights)

    def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ weight) + jnp.sin(x), None

        return jnp.sum(jax.lax.scan(step, x, weights)[0] ** 2)

    press = PressAt("round 2")
    found = remat.plan(scanned, stacked, x, remat_policy="ilp", budget=0.7, progress=press)
    assert press.times == 0 and "interrupted" in found.notes[-1]
    assert found.budget_bytes is not None and found.peak_bytes <= found.budget_bytes


@pytest.mark.slow
def test_an_interrupted_plan_is_not_remembered() -> None:
    weights, x = args()

    def function(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return loss(weights, x)

    options: Any = {"remat_policy": Ilp(), "budget": BUDGET}
    first = remat.plan(function, weights, x, progress=PressAt("local search"), **options)
    second = remat.plan(function, weights, x, **options)
    assert "interrupted" in first.notes[-1]
    assert not any("interrupted" in note for note in second.notes)


def test_a_curve_is_not_made_of_interrupted_plans() -> None:
    press = PressAt("local search")
    curves = []
    with pytest.raises(KeyboardInterrupt):
        for curve in remat.iter_pareto(
            lambda w, x: loss(w, x), *args(), budgets=[0.9, 0.5], progress=press
        ):
            curves.append(curve)
    assert press.times == 0
    assert not any("interrupted" in note for c in curves for p in c.points for note in p.plan.notes)


def fit_within(share: float, progress: PressAt) -> remat.Fitted:
    weights, x = args()
    report = remat.compile_report(jax.grad(loss), weights, x, device="cpu")
    step = jax.grad(remat.checkpoint(lambda w, x: loss(w, x), remat_policy="ilp"))
    fixed = report.total_bytes - report.temp_bytes
    memory = fixed + int(share * report.temp_bytes)
    return remat.fit(step, weights, x, memory=memory, device="cpu", progress=progress)


def test_an_interrupted_fit_returns_what_fits() -> None:
    press = PressAt("compiling, number 3")
    done = fit_within(0.8, press)
    if press.times:  # it took fewer compiles; the one that fits is enough to go on with
        press = PressAt(f"compiling, number {len(done.history)}")
        done = fit_within(0.8, press)
    assert press.times == 0
    assert done.interrupted and done.to_dict()["interrupted"]
    assert "interrupted" in str(done)
    assert done.report.total_bytes <= done.memory_bytes


def test_a_fit_without_anything_that_fits_is_a_keyboard_interrupt() -> None:
    press = PressAt("compiling, number 1")
    with pytest.raises(KeyboardInterrupt):
        fit_within(0.5, press)
    assert press.times == 0


def test_the_largest_batch_is_not_found_with_interrupted_plans() -> None:
    def make(batch: int) -> tuple[Any, tuple[Any, ...]]:
        weights, _ = args()
        x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
        return jax.grad(remat.checkpoint(lambda w, x: loss(w, x), remat_policy="ilp")), (weights, x)

    press = PressAt("batch 1: ")
    with pytest.raises(KeyboardInterrupt):
        remat.max_batch(make, memory="1MiB", device="cpu", progress=press)
    assert press.times == 0


def test_a_second_ctrl_c_during_a_search_is_not_its_own() -> None:
    with pytest.raises(KeyboardInterrupt), planning() as session:
        keyboard = Keyboard()
        with keyboard.caught():
            signal.raise_signal(signal.SIGINT)
        assert keyboard.pressed and session.interrupted
        with Keyboard().caught():
            signal.raise_signal(signal.SIGINT)
        say("what comes next")
    with pytest.raises(KeyboardInterrupt), planning():
        for _ in range(2):
            with Keyboard().caught():
                signal.raise_signal(signal.SIGINT)


def test_a_policy_on_its_own_does_not_go_on() -> None:
    """Outside of a planning nobody else hears of the Ctrl-C that ends the dynamic program across blocks."""
    graph = plan("ilp", None).graph
    before = signal.getsignal(signal.SIGINT)

    def pressed(*_args: Any, **_options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("remat.policies.buffers.within._prepared_chain", pressed)
        policy = Ilp(method="search", effort=1)
        policy.decide_within(
            graph, int(0.6 * remat.policies.ilp.peak_of_order(policy._condensed(graph).problem))
        )
    assert signal.getsignal(signal.SIGINT) is before


# --- the parts


def test_all_who_watch_are_told() -> None:
    outer, inner = Keyboard(), Keyboard()
    with outer.watched(raises="again"), inner.watched(raises="never"):
        signal.raise_signal(signal.SIGINT)
        assert inner.pressed and outer.pressed
    with pytest.raises(KeyboardInterrupt), outer.watched(raises="again"):
        signal.raise_signal(signal.SIGINT)  # not the first
    assert not Keyboard._watching


def test_outside_of_a_planning_nothing_is_held_back() -> None:
    assert not interrupted()
    raise_interrupt()
    say("to nobody")
    with planning() as outer, planning() as inner:
        assert inner is outer and not interrupted()


def test_other_threads_plan_without_watching() -> None:
    found: list[bool] = []

    def work() -> None:
        with planning():
            found.append(interrupted())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_solvers_report_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("remat.core.interrupt.time.perf_counter", lambda: now[0])
    lines: list[str] = []
    with planning(lines.append):
        progress = solver_says("solver", 200.0)
        for second in range(12):
            now[0] = float(second)
            progress(50.0, 25.0, float(second))
    assert lines == [
        "solver: 25.00 % extra, bound 12.50 %, 5 s",
        "solver: 25.00 % extra, bound 12.50 %, 10 s",
    ]


def test_a_ctrl_c_that_comes_out_of_a_test_fails_that_test_alone(tmp_path: Path) -> None:
    """Else it ends pytest, and a worker of pytest-xdist with it."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_pressed.py").write_text(
        "import signal, pytest\n"
        "@pytest.fixture(autouse=True)\n"
        "def ctrl_c():\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def test_pressed():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "def test_after_it():\n"
        "    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout
