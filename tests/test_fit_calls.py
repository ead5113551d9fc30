"""What a fit does at its edges: the plain step as a neighbour, calls with static arguments, where results go."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat
from remat import api
from remat.core.errors import CompileError, RematWarning
from remat.fitting.fit import Fitted, fit, fit_options
from remat.fitting.job import Job
from remat.fitting.knobs import _PriceKnob, choose_knob
from remat.plans.plan import Plan
from remat.tools.cli import main
from remat.tools.terminal.screen import deliver

TINY = "models.cases:residual_mlp_small"
FIT: dict[str, Any] = {"memory": "1GiB", "device": "cpu", "remat_policy": "min_cut"}


# --- several wrapped functions, and the plain step ---------------------------------------------------------


def block(weights: Any, x: Any) -> Any:
    return x + jax.nn.gelu(x @ weights[0]) @ weights[1]


def blocks(width: int, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def loss(params: Any, x: Any) -> Any:
        for weights in params:
            x = remat.checkpoint(block)(weights, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = [(shape(width, 4 * width), shape(4 * width, width))] * 3
    return jax.grad(loss), (params, shape(rows, width))


@pytest.mark.gpu_compile
def test_a_plain_step_that_is_slower_ends_no_search() -> None:
    step, args = blocks(256, 2048)
    found = fit(step, *args, memory="40GiB", device="h200")
    labels = [trial.knob for trial in found.history]
    assert labels[1] == "as without rematerialization" and len(labels) > 2
    plain = found.history[1].roofline_seconds
    assert plain is not None and found.report.roofline_seconds is not None
    assert found.report.roofline_seconds < plain


def test_every_trial_may_bound_a_price() -> None:
    step, args = blocks(16, 64)
    options = fit_options(
        **FIT, max_compiles=6, static_argnums=(), donate_argnums=(),
        compiler_options=None, progress=None,
    )  # fmt: skip
    job = Job(step, args, {}, options)
    knob = choose_knob(job)
    assert isinstance(knob, _PriceKnob)
    first, plain, least = knob.cheapest(), knob.plain(sys.maxsize), knob.least()
    assert plain is not None and plain.predicted_bytes > least.predicted_bytes
    middle = (plain.predicted_bytes + least.predicted_bytes) // 2
    for low, high in itertools.product((None, least, plain), (None, first, plain)):
        trial = knob.at(middle, low, high)
        if trial is not None:
            assert low is None or trial.predicted_bytes > low.predicted_bytes
            assert trial.predicted_bytes < (high or plain).predicted_bytes
    assert knob.at(middle, plain, None) is None  # nothing keeps more
    job.forget()


# --- static arguments --------------------------------------------------------------------------------------


def step(w: Any, x: Any, double: Any = True, power: int = 2, *, mode: str = "sum") -> Any:
    reduce = {"sum": jnp.sum, "mean": jnp.mean}[mode]

    def loss(w: Any) -> Any:
        return reduce(jnp.tanh(x @ w) ** power) * (2.0 if double else 1.0)

    return jax.grad(remat.checkpoint(loss))(w)


W, X = jnp.ones((8, 8)) / 8, jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)


def assert_is_of(found: Fitted, *args: Any, **kwargs: Any) -> None:
    want = step(*args, **kwargs)
    assert jnp.allclose(want, found(*args, **kwargs), rtol=1e-5, atol=1e-6)


def assert_refused(found: Fitted, words: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(CompileError, match=words):
        found(*args, **kwargs)


@pytest.mark.parametrize("jitted", [jax.jit, nnx.jit, None])
def test_other_static_values_are_refused(jitted: Any) -> None:
    """Whether `fit` was told what is static, or the step's own `jit`."""
    if jitted is None:
        found = fit(step, W, X, False, 3, static_argnums=(2, 3), **FIT)
    else:
        found = fit(jitted(step, static_argnums=(2, 3)), W, X, False, 3, **FIT)
    assert_is_of(found, W, X, False, 3)
    assert_is_of(found, W, X, False, power=3)  # as under jit, however it is passed
    assert_is_of(found, W, X, power=3, double=False)
    said = "compiled for False as static argument 'double'.* was passed True"
    assert_refused(found, said, W, X, True, 3)
    assert_refused(found, said, W, X, double=True, power=3)
    assert_refused(found, said, W, X, power=3)  # the default
    assert_refused(found, "compiled for 3 .*'power'.* passed 2", W, X, False)
    assert_refused(found, r"compiled for 3 .* passed 3\.0", W, X, False, 3.0)
    assert_refused(found, r"passed \[3\]", W, X, False, [3])
    assert_refused(found, "compiled for 3", W, X, False, X)


def test_defaults_and_names_are_static_values_too() -> None:
    found = fit(
        jax.jit(step, static_argnames=("double", "power", "mode")), W, X, mode="mean", **FIT
    )
    assert_is_of(found, W, X, mode="mean")
    assert_is_of(found, W, X, True, 2, mode="mean")
    assert_refused(found, "'mean' as static argument 'mode'.* 'sum'", W, X)
    assert_refused(found, "compiled for True .* False", W, X, False, mode="mean")


def test_numbers_from_the_end_and_arguments_without_names() -> None:
    def of_many(*args: Any) -> Any:
        return step(*args[:2], power=args[2])

    for found in (
        fit(of_many, W, X, 3, static_argnums=-1, **FIT),
        fit(jax.jit(of_many, static_argnums=2), W, X, 3, **FIT),
    ):
        assert jnp.allclose(found(W, X, 3), step(W, X, power=3), rtol=1e-5, atol=1e-6)
        assert_refused(found, "compiled for 3 as static argument 2,.* passed 2", W, X, 2)


def test_static_values_without_a_key_are_those_of_jit() -> None:
    """An object that may change is the same object, or an equal one, as for `jax.jit`."""

    class Config:
        double = False

    def configured(w: Any, x: Any, config: Config) -> Any:
        return step(w, x, config.double)

    config = Config()
    found = fit(jax.jit(configured, static_argnums=2), W, X, config, **FIT)
    assert jnp.allclose(found(W, X, config), step(W, X, False), rtol=1e-5, atol=1e-6)
    assert_refused(found, "Config", W, X, Config())


def test_the_largest_batch_is_called_alike() -> None:
    made = jax.jit(step, static_argnums=2)
    found = remat.max_batch(lambda n: (made, (W, X[:n], False)), high=2, **FIT)
    assert_is_of(found.fitted, W, X[:2], False)
    assert_refused(found.fitted, "compiled for False", W, X[:2], True)


# --- the command line: places, and what is said ------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 2, err
    assert lines[0].startswith("error: ") and lines[1].startswith("hint: ")
    return err


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("plan", "save"), ("plan", "json"), ("plan", "plot"), ("plan", "html"), ("why", "json"),
        ("compare", "json"), ("compare", "plot"), ("pareto", "json"), ("pareto", "plot"),
        ("fit", "save"), ("fit", "json"), ("dtr", "save-log"), ("dtr", "json"), ("dtr", "plot"),
        ("diff", "json"), ("doctor", "json"),
    ],
)  # fmt: skip
def test_places_are_checked_before_work_begins(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if flag in ("plot", "html"):
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    suffix = {"plot": "svg", "html": "html"}.get(flag, "json")
    # A target that is not there would be the next error.
    more = {"why": ["1"], "fit": ["--memory", "1GiB"], "diff": ["other.json"], "doctor": []}
    target = [] if command == "doctor" else ["no_such_module:case"]
    argv = [command, *target, *more.get(command, []), f"--{flag}"]
    missing = tmp_path / "missing" / f"a.{suffix}"
    said = refused(capsys, *argv, str(missing))
    assert f"--{flag} {missing}" in said and f"mkdir -p {missing.parent}" in said
    folder = tmp_path / f"folder.{suffix}"
    folder.mkdir()
    assert "is a folder" in refused(capsys, *argv, str(folder))
    (tmp_path / "file").write_text("")
    assert "is no folder" in refused(capsys, *argv, str(tmp_path / "file" / f"a.{suffix}"))
    monkeypatch.setattr("os.access", lambda *args, **options: False)
    assert "may not be written to" in refused(capsys, *argv, str(tmp_path / f"a.{suffix}"))


@pytest.mark.parametrize("flag", ["save", "json"])
def test_a_result_that_cannot_be_written_is_shown(
    flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(
        Plan if flag == "save" else Path, {"save": "to_json", "json": "write_text"}[flag], full
    )
    argv = ["--device", "cpu", "--policy", "min_cut", f"--{flag}", str(tmp_path / "a.json")]
    for command in (["plan", TINY, *argv[2:]], ["fit", TINY, "--memory", "1GiB", *argv]):
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert TINY in out and "memory" in out
        assert err.startswith("error: no space left on device")


def test_everything_is_written_whatever_fails(tmp_path: Path) -> None:
    done: list[str] = []

    def fails() -> None:
        done.append("first")
        raise OSError("full")

    def shows(screen: Any) -> None:
        raise BrokenPipeError

    place = tmp_path / "a.json"
    with pytest.raises(OSError, match="full"):
        deliver(place, lambda: "{}", shows, fails, lambda: done.append("second"))
    assert place.read_text() == "{}\n" and done == ["first", "second"]


STEP_OF_TWO = """
import jax, jax.numpy as jnp, remat

def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)

def training():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    both = lambda w, x: remat.checkpoint(loss)(w, x) + remat.checkpoint(lambda v: loss(v, x))(w)
    return jax.grad(both), (shape, shape)
"""


def test_several_plans_for_one_file_are_known_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*args: Any) -> Any:
        raise AssertionError("compiled")

    (tmp_path / "two_wrappers.py").write_text(STEP_OF_TWO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Job, "_compile", compiles)
    argv = ["fit", "two_wrappers:training", "--step", "--memory", "1GiB", "--device", "cpu"]
    said = refused(capsys, *argv, "--save", str(tmp_path / "plan.json"))
    assert "2 wrapped functions" in said


@pytest.mark.parametrize(
    "argv",
    [
        ["plan"],
        ["why", "0"],
        ["fit", "--memory", "1GiB", "--policy", "min_cut"],
        ["compare"],
        ["pareto"],
    ],
)
def test_warnings_of_ours_are_lines(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is warned of while the target is made; warnings of others are Python's."""

    def warns(target: str) -> Any:
        warnings.warn("most is kept\nwhatever", RematWarning, stacklevel=1)
        warnings.warn("of another", UserWarning, stacklevel=1)
        raise RuntimeError("enough")

    monkeypatch.setattr("remat.tools.terminal.flags.load_target", warns)
    with pytest.warns(UserWarning, match="of another") as caught:
        before = warnings.showwarning
        command, *rest = argv
        assert main([command, TINY, *rest]) == 1
        assert warnings.showwarning is before
    assert [entry.category for entry in caught] == [UserWarning]
    err = capsys.readouterr().err
    assert err.startswith("warning: most is kept whatever\n") and "RematWarning" not in err


def test_a_warning_of_a_plan_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = api.plan

    def warned(*args: Any, **options: Any) -> Plan:
        warnings.warn("most is kept", RematWarning, stacklevel=2)
        return real(*args, **options)

    monkeypatch.setattr(api, "plan", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["plan", TINY]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: most is kept\n" and out.startswith(TINY)
