"""Random programs through every policy, against plain JAX; and that the fuzzer would notice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzzing.campaign import tally, try_program
from tests.fuzzing.judge import Reference, moved
from tests.fuzzing.operators import HEADER, OPERATORS
from tests.fuzzing.programs import Maker, Program, Statement, precision, random_program
from tests.fuzzing.running import Plain, run_variant
from tests.fuzzing.shrink import shrunk
from tests.fuzzing.variants import Variant, all_variants, variants_of

PROGRAMS = 60  # the first ones; the nightly runs begin elsewhere
_PER_TEST = 6
VARIANT = Variant('"full"', None, "staged", True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(0, PROGRAMS, _PER_TEST))
def test_random_programs(first: int) -> None:
    """Values, results and gradients are those of plain JAX. The message is the script of what fails."""
    for seed in range(first, first + _PER_TEST):
        record = try_program(seed, variants=2, shrink_seconds=20)
        assert "script" not in record, f"{record['outcomes']}\n\n{record['script']}"


# --- the fuzzer notices ------------------------------------------------------------------------------


def _program(*lines: tuple[str, str], results: tuple[str, ...] = (), **changes: Any) -> Program:
    """A program of (name, expression), whose loss is the sum of the sine of the last."""
    statements = tuple(
        Statement("given", f"{name} = {expression}", (name,)) for name, expression in lines
    )
    given: dict[str, Any] = dict(
        seed=7,
        dtype="float32",
        mode="grad",
        inputs="normal",
        shape=(8, 16),
        statements=statements,
        terms=(f"jnp.sum(jnp.sin({lines[-1][0]}))",),
        results=results,
    )
    return Program(**(given | changes))


def _remade(f: Callable[..., Any], change: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A wrapper that is wrong: its gradient for x is what `change` makes of it."""

    @jax.custom_vjp
    def tampered(x: jax.Array) -> jax.Array:
        return x

    tampered.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return lambda x, *rest: f(tampered(x), *rest)


_CLIPPED = _program(("v1", "x / jnp.sqrt(1 + jnp.mean(x * x))"), ("v2", "jnp.clip(v1, -0.7, 0.9)"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_lost_element_is_noticed(dtype: str) -> None:
    def lose_one(gradient: jax.Array) -> jax.Array:
        largest = jnp.unravel_index(jnp.argmax(jnp.abs(gradient)), gradient.shape)
        return gradient.at[largest].set(0)

    program = _program(("v1", "x / jnp.sqrt(1 + jnp.mean(x * x))"), dtype=dtype)
    outcome = run_variant(Plain(program), VARIANT, lambda f: _remade(f, lose_one))
    assert outcome.kind == "wrong"
    assert run_variant(Plain(program), VARIANT, lambda f: f).kind == "same"


def test_a_small_error_of_all_elements_is_noticed() -> None:
    wrong = run_variant(Plain(_CLIPPED), VARIANT, lambda f: _remade(f, lambda g: g * 1.0001))
    assert wrong.kind == "wrong"
    rounding = run_variant(Plain(_CLIPPED), VARIANT, lambda f: _remade(f, lambda g: g * (1 + 1e-7)))
    assert rounding.kind == "same"


def test_a_mask_of_two_instances_is_noticed() -> None:
    """What a plan does wrong that keeps a maximum and makes its operand again, a last bit off."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        del f

        @jax.custom_vjp
        def largest(x: jax.Array) -> jax.Array:
            return jnp.max(x, -1)

        def backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array]:
            x, kept = residuals
            again = jnp.nextafter(x, jnp.where(jnp.arange(x.shape[0]) < 1, 9.0, x[:, 0])[:, None])
            mask = (again == kept[:, None]) * 1.0
            return (mask / jnp.maximum(mask.sum(-1, keepdims=True), 1) * cotangent[:, None],)

        largest.defvjp(lambda x: (jnp.max(x, -1), (x, jnp.max(x, -1))), backward)
        return lambda x, *rest: (jnp.sum(jnp.sin(largest(jnp.sin(x)))), ())

    program = _program(("v1", "jnp.max(jnp.sin(x), -1)"))
    assert run_variant(Plain(program), VARIANT, wrap).kind == "wrong"


@pytest.mark.parametrize(
    "results",
    [
        (np.array([1, 3, 2]), np.array([1.0, np.nan, np.inf])),
        (np.array([1, 2, 3]), np.array([1.0, 0.0, np.inf])),
        (np.array([1, 2, 3]), np.array([1.0, np.nan, -np.inf])),
        (np.array([1, 2, 3]), np.array([np.nan, np.nan, np.inf])),
        (np.array([1, 2, 3]), np.array([1.0, np.nan])),
        (np.array([1, 2, 3]),),
    ],
)
def test_wrong_integers_nans_and_shapes_are_noticed(results: tuple[np.ndarray, ...]) -> None:
    expected = (np.array([1, 2, 3]), np.array([1.0, np.nan, np.inf]))
    reference = Reference(expected, "float32")
    assert reference.differences(results)
    assert not reference.differences(expected)


def test_the_edge_is_lenient_only_where_plain_jax_differs() -> None:
    reference = Reference([np.array([1.0, 2.0, 3.0]), np.array([0, 1])], "float32")
    reference.add([np.array([1.0, 9.0, 3.0]), np.array([0, 2])])
    assert reference.is_ill_conditioned
    assert not reference.differences([np.array([1.0, 9.0, 3.0]), np.array([0, 2])])
    assert reference.differences([np.array([1.001, 2.0, 3.0]), np.array([0, 1])])
    assert reference.differences([np.array([1.0, 2.0, 3.0]), np.array([1, 1])])


def test_a_float64_run_says_nothing_of_ties() -> None:
    reference = Reference([np.array([1.0, 2.0])], "float32")
    reference.add_exact([np.array([1.0 + 1e-6, 1.0])])
    assert not reference.is_ill_conditioned
    assert reference.differences([np.array([1.0, 1.5])])
    assert not reference.differences([np.array([1.0 + 5e-6, 2.0])])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_moved_arguments_keep_their_ties(dtype: str) -> None:
    with jax.enable_x64(True):
        given = jnp.asarray([1.5, 1.5, 0.0, -2.0, np.nan, np.inf, 0.3, 0.7, 1.1], dtype)
        for salt in range(4):
            after = moved(given, salt)
            assert after.dtype == given.dtype
            assert after[0] == after[1] and after[2] == 0
            assert not jnp.isfinite(after[4:6]).any()
            unit = jnp.finfo(dtype).eps
            near = jnp.abs(after - given)[jnp.array([0, 3, 6, 7, 8])].astype(jnp.float64)
            assert ((near > 0) & (near <= 2 * unit)).all()
        assert any((moved(given, s)[6] != moved(given, 0)[6]).item() for s in range(1, 9))


# --- programs ----------------------------------------------------------------------------------------


def test_a_seed_is_a_program() -> None:
    assert random_program(11) == random_program(11)
    assert random_program(11) != random_program(12)


def test_every_operator_can_be_met() -> None:
    """Some filling of its holes suits it: a template with a mistake in it would only never be chosen."""
    given = (
        "v901 = x > 0.2",
        "v902 = b > 0.2",
        "v903 = x.reshape(2, -1, x.shape[1])",
        "v904 = jnp.round(x).astype(jnp.int32)",
        "v905 = jnp.sum(x)",
    )
    never = list(OPERATORS)
    for shape in ((8, 16), (6, 6), (12, 4), (8, 8)):
        for _ in range(6):
            maker = Maker(random.Random(len(never)), "float32", shape)
            for line in given:
                assert maker.add(Statement("given", line, (line.split()[0],)))
            never = [operator for operator in never if not maker.try_operator(operator)]
    assert not never


def test_there_are_many_operators() -> None:
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS) >= 300


def test_every_variant_has_its_turn() -> None:
    everything = all_variants()
    rounds = len(everything)  # each comes up to three times
    met = {variant for index in range(rounds) for variant in variants_of(index, 3)}
    assert met == set(everything)
    assert variants_of(0, 3) != variants_of(3 * rounds, 3)


# --- what fails is made small ------------------------------------------------------------------------


def test_shrinking_finds_the_culprit() -> None:
    """A wrapper that is wrong for programs that sort: what is left is the sort."""
    program = _program(
        ("v1", "jnp.tanh(x) * b"),
        ("v2", "v1 @ w"),
        ("v3", "jnp.sort(v2, -1)"),
        ("v4", "jax.nn.softmax(v3) * 3"),
        ("v5", "v4 - jnp.mean(v4)"),
        ("v6", "jnp.maximum(v5, v2)"),
        results=("v2", "v5"),
        mode="outer",
    )

    def fails(smaller: Program) -> bool:
        with precision(smaller):
            jax.eval_shape(smaller.load()[0], *smaller.arguments())  # still a program
        return "jnp.sort" in smaller.source

    small = shrunk(program, fails)
    assert [statement.source for statement in small.statements] == ["v3 = jnp.sort(x, -1)"]
    assert (small.results, small.mode) == ((), "grad")


@pytest.mark.slow
def test_a_failure_is_a_script_that_shows_it() -> None:
    """A campaign with a wrong library fails, and its script runs."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        return _remade(f, lambda g: g * 1.01)

    record = try_program(3, variants=1, only="MinCut", shrink_seconds=5, wrap=wrap)
    assert record["outcomes"][0]["kind"] == "wrong"
    assert "1 wrong" in tally([record])
    exec(record["script"].replace(HEADER, ""), {})


def test_the_command_writes_a_record_per_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzzing", "--programs", "1", "--variants", "1"]
    done = subprocess.run(
        [*command, "--policies", "min_cut", "--out", str(tmp_path / "fuzzing.jsonl")],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (tmp_path / "fuzzing.jsonl").read_text().splitlines()
    assert json.loads(line)["seed"] == 0


def test_what_xla_does_not_run_is_counted_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    monkeypatch.setattr("tests.fuzzing.campaign.Plain", fails)
    record = try_program(5)
    assert record["without_reference"] == "INTERNAL: RET_CHECK failure" and not record["outcomes"]
    assert tally([record]).endswith("XLA does not run these programs in plain jax: [5]")
