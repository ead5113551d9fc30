"""The command line and the comparison behind it: output, exit codes, errors in one style."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
import remat.tools.compare as compare_module
from models import cases
from remat import api
from remat.plans.plan import Plan
from remat.plans.words import human_bytes
from remat.tools.cli import main
from remat.tools.compare import DEFAULT_POLICIES, Row, compare, compare_table, iter_compare

TINY = "models.cases:residual_mlp_small"
ROOT = Path(__file__).parent.parent

USER_CODE = """
import jax, jax.numpy as jnp

def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)

shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
number = 3

def case():
    return loss, (shape, shape)

def only_a_function():
    return loss

def three():
    return loss, shape, shape

def raises():
    raise RuntimeError("no data set")

def needs_an_argument(size):
    return loss, (shape, shape)

def not_differentiable():
    return (lambda x: x + 1), (jax.ShapeDtypeStruct((8,), jnp.int32),)

def a_step():
    return jax.value_and_grad(loss), (shape, shape)

def broken_function():
    return (lambda x: jnp.ones(3) + jnp.ones(4) + x), (shape,)
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of the user's, as the current folder."""
    (tmp_path / "mynet.py").write_text(USER_CODE)
    (tmp_path / "needs.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("mynet", "needs"):
        sys.modules.pop(name, None)


def failed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    """Runs a command that must fail with an exit code, and returns what it says: an error, and perhaps a hint."""
    try:
        assert main(argv) == code
    except SystemExit as ended:
        assert ended.code == code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0].startswith("error: ") and len(lines[0]) > len("error: "), err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), err
    return err


def test_a_hint_begins_outside_of_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("plan", TINY, "--policy", "full", "--budget", "0.01", "--confirm", "off")
    lines = failed(capsys, *argv, code=1).splitlines()
    assert all(line.count("(") == line.count(")") for line in lines), lines


def test_plan_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "models.cases:gpt_tiny", "--top", "3"]) == 0
    out, err = capsys.readouterr()
    assert "planned by min_cut" in out and "kept for the backward pass" in out
    assert err == ""
    for flag in ("--all", "-v"):
        assert main(["plan", "models.cases:gpt_tiny", "--top", "3", flag]) == 0
        assert "remat plan by policy min_cut" in capsys.readouterr().out


def test_plan_json_is_one_document_that_reads_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    assert main(["plan", TINY, "--json", "--save", str(saved)]) == 0
    out, _ = capsys.readouterr()
    function, args = cases.residual_mlp_small()
    expected = remat.plan(function, *args)
    assert Plan.from_json(out) == expected
    assert Plan.from_json(saved) == expected


@pytest.mark.parametrize("command", ["plan", "compare", "pareto", "fit"])
def test_json_means_the_same_in_all_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    options = {
        "plan": [],
        "compare": ["--policies", "none", "--device", "cpu"],
        "pareto": ["--policy", "min_cut", "--budgets", "1.0"],
        "fit": [
            "--policy",
            "min_cut",
            "--device",
            "cpu",
            "--memory",
            "1GiB",
            "--max-compiles",
            "2",
        ],
    }[command]
    written = tmp_path / "document.json"
    assert main([command, TINY, *options, "--json"]) == 0
    printed = capsys.readouterr().out
    assert main([command, TINY, *options, "--json", str(written)]) == 0
    text = capsys.readouterr().out
    kinds = [json.loads(document)["format"] for document in (printed, written.read_text())]
    assert len(set(kinds)) == 1 and text and not text.startswith("{")
    assert "put --json behind TARGET" in failed(capsys, command, "--json", TINY, *options)


def test_plan_options_and_argnums(capsys: pytest.CaptureFixture[str], user_folder: Path) -> None:
    argv = ["plan", "mynet:case", "--option", "memory_weight=0", "--option", "heavy=roofline"]
    assert main([*argv, "--argnums", "0,1", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.options == "memory_weight=0, heavy='roofline'"
    assert len(plan.graph.gradients) == 2


def test_plan_budget_is_a_fraction_or_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, "--budget", "1.0"]) == 0
    assert main(["plan", TINY, "--budget", "6GiB"]) == 0
    capsys.readouterr()
    argv = ["plan", TINY, "--budget", "1", "--policy", "min_cut"]
    assert "does not meet the budget of 1 bytes" in failed(capsys, *argv, code=1)
    assert "is not a fraction" in failed(capsys, "plan", TINY, "--budget", "1.5")
    assert "is not a size" in failed(capsys, "plan", TINY, "--budget", "6 apples")


@pytest.mark.parametrize("word", ["off", "OFF", "False", "None", "no", "0"])
def test_what_confirm_takes_is_what_hints_say(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CONFIRM", "cpu")
    argv = ["plan", TINY, "--policy", "min_cut", "--budget", "1.0", "--json"]
    assert main([*argv, "--confirm", word]) == 0
    assert Plan.from_json(capsys.readouterr().out).confirmed is None
    monkeypatch.setenv("REMAT_CONFIRM", "nope")
    assert "REMAT_CONFIRM='nope' in the environment" in failed(capsys, *argv)


def test_an_unknown_device_is_offered_no_none(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "compare", "pareto"):
        assert "None" not in failed(capsys, command, TINY, "--device", "nope")


def test_plan_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    assert main(["plan", TINY, "--plot", str(tmp_path / "memory.svg")]) == 0
    assert (tmp_path / "memory.svg").read_text().startswith("<?xml")
    capsys.readouterr()
    assert ".pdf" in failed(capsys, "plan", TINY, "--plot", "memory.pdf")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("mynet", ["not module:factory"]),
        ("mynet:", ["not module:factory"]),
        ("mynet.py:case", ["names a file", "hint: From this folder it is mynet:case"]),
        ("./nets/mynet.py:case", ["From this folder it is nets.mynet:case"]),
        ("/nets/mynet.py:case", ["From its folder it is mynet:case"]),
        ("minet:case", ["no module 'minet'", "did you mean 'mynet'"]),
        ("models.casess:gpt_tiny", ["no module 'models.casess'", "did you mean 'models.cases'"]),
        ("mynet:caes", ["did you mean 'case'", "only_a_function"]),
        ("mynet:number", ["of type int", "expected a function"]),
    ],
)
def test_targets_that_are_not_there(
    target: str, words: list[str], capsys: pytest.CaptureFixture[str], user_folder: Path
) -> None:
    message = failed(capsys, "plan", target)
    for word in words:
        assert word in message
    assert "needs_an_argument" not in message


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("needs:case", ["importing 'needs' failed", "a_module_that_is_not_there"]),
        ("mynet:only_a_function", ["of type function", "expected (function, args)"]),
        ("mynet:three", ["a tuple of function, ShapeDtypeStruct, ShapeDtypeStruct"]),
        ("mynet:raises", ["raised RuntimeError: no data set"]),
        ("mynet:not_differentiable", ["none of the function's inputs is differentiated"]),
        ("mynet:broken_function", ["TypeError: add got incompatible shapes", "-v"]),
    ],
)
def test_targets_that_fail(
    target: str, words: list[str], capsys: pytest.CaptureFixture[str], user_folder: Path
) -> None:
    message = failed(capsys, "plan", target, code=1)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policy", "min_cat"], ["unknown --policy min_cat", "did you mean 'min_cut'"]),
        (["--policy", "dots_saveable"], ["makes no plan"]),
        (["--option", "memory_wait=0"], ["did you mean 'memory_weight'", "heavy"]),
        (["--option", "memory_weight"], ["expected NAME=VALUE"]),
        (["--option", "memory_weight=lots"], ["memory_weight"]),
        (["--option", "heavy=never"], ["expected one of ban, batched, roofline"]),
        (["--policy", "dots_saveable", "--option", "a=1"], ["needs one of remat's own policies"]),
        (["--argnums", "7"], ["--argnums 7 is out of range", "expected 0 to"]),
        (["--argnums", "x"], ["neither a number nor several"]),
        (
            ["--budgets", "0.5"],
            ["unrecognized arguments: --budgets 0.5", "did you mean '--budget'"],
        ),
        (["--device", "h20"], ["did you mean 'h200'"]),
        (["--confirm", "h20", "--budget", "0.9"], ["did you mean 'h200'"]),
        (["--confirm", "nope", "--budget", "0.9"], ["--confirm nope is not known", "'on', 'off'"]),
    ],
)
def test_bad_policies(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = failed(capsys, "plan", TINY, *argv)
    for word in words:
        assert word in message


def test_verbose_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, "--policy", "min_cat", "-v"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "\nerror: unknown --policy min_cat\nhint: " in err


@pytest.mark.parametrize("argv", [[], ["plan"], ["plan", TINY, "--top", "0"], ["paint", TINY]])
def test_usage_errors_exit_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if not argv:
        assert main(argv) == 2
        assert capsys.readouterr().err.startswith("usage: remat")
        return
    assert "--help`" in failed(capsys, *argv)


def test_compare_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", TINY, "--policies", "none,min_cut,dots_saveable", "--device", "cpu"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "remat.compare" and document["device"] == "cpu"
    assert document["interrupted"] is False
    rows = [Row(**row) for row in document["rows"]]
    assert [row.policy for row in rows] == ["none", "min_cut", "dots_saveable"]
    assert all(row.error is None and row.temp_bytes and row.hbm_traffic_bytes for row in rows)


def test_compare_prints_a_table_and_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    picture = tmp_path / "tradeoff.png"
    assert main(["compare", TINY, "--policies", "none,full", "--plot", str(picture)]) == 0
    out, _ = capsys.readouterr()
    assert TINY in out and "temp" in out and "matmuls" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_finds_typos_before_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    message = failed(capsys, "compare", TINY, "--policies", "none,dots_savable")
    assert "did you mean 'dots_saveable'" in message
    assert "did you mean 'h200'" in failed(capsys, "compare", TINY, "--device", "h20")


def test_interrupted_comparison_prints_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*args: Any, **kwargs: Any) -> Iterator[Row]:
        yield Row("none", temp_bytes=12345678)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_module, "iter_compare", rows)
    assert main(["compare", TINY]) == 130
    out, err = capsys.readouterr()
    assert "none" in out and "11.8 MiB" in out
    assert err == "interrupted: 1 of 7 policies were compared\n"
    assert main(["compare", TINY, "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"] is True and len(document["rows"]) == 1


def test_pareto_prints_draws_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    written, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    argv = ["pareto", TINY, "--policy", "min_cut", "--budgets", "0.5, 1.0,1GiB"]
    assert main([*argv, "--json", str(written), "--plot", str(picture)]) == 0
    out, _ = capsys.readouterr()
    function, args = cases.residual_mlp_small()
    curve = remat.pareto(function, *args, remat_policy="min_cut", budgets=[0.5, 1.0, "1GiB"])
    for point in curve.points:
        assert human_bytes(point.peak_bytes) in out
    document = json.loads(written.read_text())
    assert document == {"target": TINY, **json.loads(json.dumps(curve.to_dict()))}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == document


def test_pareto_options(capsys: pytest.CaptureFixture[str], user_folder: Path) -> None:
    argv = ["pareto", "mynet:case", "--policy", "min_cut", "--option", "memory_weight=0"]
    assert main([*argv, "--argnums", "0,1", "--points", "2", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["wanted"] <= 2 and document["interrupted"] is False
    assert "at least 2" in failed(capsys, *argv, "--points", "1")
    assert "is not a size" in failed(capsys, *argv, "--budgets", "lots")
    assert ".pdf" in failed(capsys, *argv, "--plot", "curve.pdf")
    assert "did you mean 'min_cut'" in failed(capsys, "pareto", TINY, "--policy", "min_cat")


def test_a_curve_of_budgets_that_nothing_meets_exits_with_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["pareto", TINY, "--policy", "min_cut", "--json", "--budgets"]
    assert main([*argv, "1,2"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["points"] and len(document["infeasible"]) == 2
    named = document["smallest_peak_bytes"]
    assert all(f"{named:,} bytes" in entry["reason"] for entry in document["infeasible"])
    assert main([*argv, "1,1.0"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 1


def test_interrupted_pareto_prints_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["remat.tools.pareto"]  # `remat.pareto` itself is the function
    real = module.iter_pareto

    def first_two(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for count, curve in enumerate(real(*args, **kwargs)):
            if count == 2:
                raise KeyboardInterrupt
            yield curve

    monkeypatch.setattr(module, "iter_pareto", first_two)
    argv = ["pareto", TINY, "--policy", "min_cut", "--budgets", "0.8,0.9,1.0"]
    assert main(argv) == 130
    out, err = capsys.readouterr()
    assert "no remat" not in out and TINY in out
    assert err == "interrupted: 2 of 3 budgets were planned\n"


def test_fit_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written, plan = tmp_path / "fit.json", tmp_path / "plan.json"
    argv = ["fit", TINY, "--device", "cpu", "--policy", "min_cut", "--memory"]
    assert main([*argv, "1GiB", "--json", str(written), "--save", str(plan)]) == 0
    out, _ = capsys.readouterr()
    assert "fitted to 1.0 GiB on cpu" in out and "confirmed by the compiler" in out
    document = json.loads(written.read_text())
    assert document["target"] == TINY and document["memory_bytes"] == 2**30
    assert document["plans"][0]["digest"] == Plan.from_json(plan).digest()
    assert main([*argv, str(document["total_bytes"]), "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["total_bytes"] == document["total_bytes"] == again["memory_bytes"]


def test_fit_errors(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fit", TINY, "--device", "cpu", "--policy", "min_cut"]
    assert "does not fit into 1,000 bytes" in failed(capsys, *argv, "--memory", "1kB", code=1)
    assert "is not a size" in failed(capsys, *argv, "--memory", "lots")
    assert "0.5: expected bytes or a size" in failed(capsys, *argv, "--memory", "0.5")
    assert "is not positive" in failed(capsys, *argv, "--memory", "0")
    assert "at least 2" in failed(capsys, *argv, "--memory", "1GiB", "--max-compiles", "1")
    assert "wrap the loss" in failed(capsys, *argv, "--memory", "1GiB", "--step")
    assert "did you mean 'h200'" in failed(
        capsys, "fit", TINY, "--memory", "1GiB", "--device", "h20"
    )


def test_fit_of_a_step_that_is_taken_for_a_loss(
    capsys: pytest.CaptureFixture[str], user_folder: Path
) -> None:
    said = failed(capsys, "fit", "mynet:a_step", "--memory", "1GiB", "--device", "cpu")
    assert "does not return one scalar" in said and "hint: A whole step" in said
    assert "--step" in said and "Tracer" not in said


def test_fit_a_whole_step(capsys: pytest.CaptureFixture[str], user_folder: Path) -> None:
    code = """
import remat
step = jax.grad(lambda w, x: remat.checkpoint(loss)(w, x) + remat.checkpoint(lambda v: loss(v, x))(w))

def training():
    return step, (shape, shape)
"""
    (user_folder / "mynet.py").write_text(USER_CODE + code)
    argv = ["fit", "mynet:training", "--step", "--memory", "1GiB", "--device", "cpu"]
    argv += ["--donate", "0", "--policy", "min_cut"]
    assert main([*argv, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"]["alias_bytes"] == 8 * 8 * 4
    assert len(document["plans"]) == 2
    message = failed(capsys, *argv, "--save", "plan.json")
    assert "2 wrapped functions" in message
    assert not (user_folder / "plan.json").exists()


def test_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from remat.plans.diff import diff

    function, args = cases.gpt_blocks_scan_small()
    plans = [remat.plan(function, *args, remat_policy=name) for name in ("full", "save_all")]
    paths = [str(tmp_path / f"{plan.policy_name}.json") for plan in plans]
    for plan, path in zip(plans, paths, strict=True):
        plan.to_json(path)
    assert main(["diff", *paths, "--top", "3"]) == 1
    assert capsys.readouterr().out == diff(*map(Plan.from_json, paths)).format(3) + "\n"
    assert main(["diff", paths[0], paths[0]]) == 0
    capsys.readouterr()
    missing = str(tmp_path / "missing.json")
    assert "missing.json" in failed(capsys, "diff", paths[0], missing, code=1)
    assert main(["diff", *paths, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "remat.diff" and document["equal"] is False
    assert {entry["name"] for entry in document["totals"]} >= {"saved_bytes", "peak_bytes"}


def test_interrupted_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "plan", interrupted)
    assert main(["plan", TINY]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_plan_that_was_interrupted_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, args = cases.residual_mlp_small()
    made = dataclasses.replace(
        remat.plan(function, *args), notes=("interrupted: the best plan so far",)
    )
    monkeypatch.setattr(api, "plan", lambda *args, **options: made)
    assert main(["plan", TINY]) == 130
    out, err = capsys.readouterr()
    assert out.startswith(TINY) and "memory" in out
    assert err == "interrupted: this is the best plan found by then\n"


def test_all_failed_exits_with_one(capsys: pytest.CaptureFixture[str], user_folder: Path) -> None:
    assert main(["compare", "mynet:not_differentiable", "--policies", "min_cut,full"]) == 1
    out, _ = capsys.readouterr()
    assert out.count("min_cut, full failed: TraceError: none of the function's inputs") == 1


def test_subprocess(tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text(USER_CODE)
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "remat", "plan", "mynet:case", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout).policy_name == "min_cut"
    assert "warning" not in done.stderr.lower() and "error" not in done.stderr.lower()


def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


SHAPE = jax.ShapeDtypeStruct((16, 16), jnp.float32)
ARGS = ([SHAPE] * 2, SHAPE)


def test_compare_has_a_row_per_policy_in_order() -> None:
    said: list[str] = []
    rows = compare(mlp, ARGS, progress=said.append)
    assert tuple(row.policy for row in rows) == DEFAULT_POLICIES
    assert all(row.error is None for row in rows)
    assert all(row.temp_bytes is not None and row.compile_seconds is not None for row in rows)
    found = {row.policy: row for row in rows}
    assert found["none"].recomputed_flops == 0
    baseline = remat.plan(mlp, *ARGS, remat_policy="save_all").baseline_saved_bytes
    assert found["full"].saved_bytes == 0
    assert found["none"].saved_bytes == baseline > 0
    assert found["dots_saveable"].saved_bytes is None
    assert found["none"].matmuls == 5 and found["nothing_saveable"].matmuls is not None
    assert found["full"].recomputed_flops
    assert "min_cut: compiling for cpu" in said or jax.default_backend() != "cpu"


def test_compare_agrees_with_plan_and_compiler() -> None:
    policy = remat.policies.MinCut(memory_weight=0)
    (row,) = compare(mlp, ARGS, policies=[policy], argnums=(0, 1), device="cpu")
    plan = remat.plan(mlp, *ARGS, remat_policy=policy, argnums=(0, 1))
    step = jax.value_and_grad(remat.checkpoint(mlp, remat_policy=policy), (0, 1))
    report = remat.compile_report(step, *ARGS, device="cpu")
    assert row.policy == "min_cut(memory_weight=0)"
    assert (row.saved_bytes, row.recomputed_flops) == (plan.saved_bytes, plan.recompute_flops)
    assert (row.temp_bytes, row.hbm_traffic_bytes) == (report.temp_bytes, report.hbm_traffic_bytes)
    assert row.matmuls == report.matmuls_executed
    assert row.roofline_seconds is None


def test_compare_without_the_compiler() -> None:
    rows = compare(mlp, ARGS, policies=["min_cut", "dots_saveable"], compile=False)
    assert rows[0].saved_bytes is not None and rows[0].temp_bytes is None
    assert rows[1] == Row("dots_saveable")


def test_failures_are_rows() -> None:
    rows = compare(mlp, ARGS, policies=["no_such_policy", "save_only_these_names"], compile=False)
    assert rows[0].error is not None and rows[0].error.startswith("PolicyError: unknown")
    assert rows[1].error is not None and "call it" in rows[1].error
    (row,) = compare(mlp, ARGS, policies=["none"], device="h20")
    assert row.error is not None and row.error.startswith("CompileError: Unknown device")
    assert row.saved_bytes is not None  # what was known before stays
    text = compare_table([*rows, row])
    assert text.count("failed") == 6


def test_compare_is_lazy_and_does_not_swallow_interrupts() -> None:
    def interrupted(x: jax.Array) -> jax.Array:
        raise KeyboardInterrupt

    found = iter_compare(interrupted, [SHAPE], policies=["min_cut"])
    with pytest.raises(KeyboardInterrupt):
        next(found)


def test_plans_and_jax_policies_can_be_compared() -> None:
    made = remat.plan(mlp, *ARGS)
    theirs = jax.checkpoint_policies.everything_saveable
    rows = compare(mlp, ARGS, policies=[made, theirs, None], device="cpu")
    assert [row.policy for row in rows] == ["plan by min_cut", "everything_saveable", "none"]
    assert all(row.error is None for row in rows)


@pytest.mark.gpu_compile
def test_compare_for_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", TINY, "--device", "h200", "--policies", "none,min_cut", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "h200"
    assert all(row["roofline_seconds"] > 0 and row["error"] is None for row in document["rows"])
