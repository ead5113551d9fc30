"""Compiled numbers on disk: what makes another entry, which files count, where they lie."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat.compiler.compile import TracedStep, trace_step
from remat.compiler.remembered import compiled_numbers, default_cache_dir
from remat.compiler.report import CompileReport
from remat.plans.writing import write_whole

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def step() -> TracedStep:
    return trace_step(lambda x: jnp.tanh(x @ x) @ x, (X,), {}, device="cpu")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """Asks for the numbers of a program; returns how often it was compiled for them."""
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(variable, raising=False)
    calls: list[int] = []
    plain = TracedStep.compile

    def counting(self: TracedStep) -> Any:
        calls.append(1)
        return plain(self)

    monkeypatch.setattr(TracedStep, "compile", counting)

    def ask() -> int:
        before = len(calls)
        compiled_numbers(step(), tmp_path)
        return len(calls) - before

    return ask


# --- what makes another entry


def test_other_flags_are_another_entry(
    compiles: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [compiles(), compiles()] == [1, 0]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false --xla_a=1")
    assert [compiles(), compiles()] == [1, 0]
    monkeypatch.setenv("XLA_FLAGS", " --xla_a=1   --xla_gpu_enable_triton_gemm=false ")
    assert compiles() == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true --xla_a=1")
    assert compiles() == 1


def test_of_a_flag_that_is_given_twice_the_order_counts(
    compiles: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_a=2")
    assert compiles() == 1
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=2 --xla_a=1")
    assert compiles() == 1


def test_flags_that_only_dump_are_no_other_entry(
    compiles: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiles() == 1
    for flags in ("", "--xla_dump_to=/tmp/there --xla_dump_hlo_as_text"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert compiles() == 0


def test_flags_in_a_file_count_by_what_it_says(
    compiles: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "flags"
    monkeypatch.setenv("XLA_FLAGS", str(file))
    file.write_text("--xla_a=1\n--xla_b=2\n")
    assert compiles() == 1
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2 --xla_a=1")
    assert compiles() == 0


def test_arguments_of_libtpu_are_for_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lowered:
        def as_text(self) -> str:
            return "program"

    def described(platform: str) -> tuple[str, ...]:
        made = step()
        object.__setattr__(made, "_target", type("T", (), {})())
        made._target.__dict__.update(platform=platform, name=platform, is_attached=False)
        made.__dict__["_lowered"] = Lowered()
        return made.described

    before = described("cpu"), described("tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1")
    assert described("cpu") == before[0]
    assert described("tpu") != before[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_optimization_level", "O1"),
        ("jax_memory_fitting_level", "O0"),
        ("jax_exec_time_optimization_effort", -0.5),
        ("jax_memory_fitting_effort", -0.5),
        ("jax_disable_most_optimizations", True),
        ("jax_compiler_enable_remat_pass", False),
    ],
)
def test_settings_of_jax_that_reach_the_compiler_are_another_entry(
    name: str, value: Any, compiles: Callable[[], int]
) -> None:
    if name not in jax.config.values:
        pytest.skip(f"this version of jax has no {name}")
    assert compiles() == 1
    usual = jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert [compiles(), compiles()] == [1, 0]
    finally:
        jax.config.update(name, usual)
    assert compiles() == 0


def test_without_flags_and_settings_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    made = step()
    assert len(made.described) == 3 + len(
        made._options
    )  # the target, whether attached, the program


# --- which files count


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b"[" * 200_000,
        {"temp_bytes": None},
        {"temp_bytes": "3"},
        {"temp_bytes": 3.5},
        {"matmuls": True},
        {"roofline_seconds": "soon"},
        {"device": 3},
        {"another": 1},
    ],
    ids=lambda content: str(content)[:30],
)
def test_a_damaged_file_is_as_if_it_were_not_there(
    content: Any, tmp_path: Path, compiles: Callable[[], int]
) -> None:
    assert compiles() == 1
    (file,) = tmp_path.glob("*.json")
    good = file.read_bytes()
    if isinstance(content, dict):
        content = json.dumps({**json.loads(good), **content}).encode()
    file.write_bytes(content)
    assert [compiles(), compiles()] == [1, 0]
    assert file.read_bytes() == good and list(tmp_path.glob("*.json")) == [file]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    first = compiled_numbers(step(), tmp_path)
    assert compiled_numbers(step(), tmp_path) == first
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == asdict(first)


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report, _ = step().compile()
    assert isinstance(report, CompileReport)
    assert compiled_numbers(step(), tmp_path / "file").temp_bytes == report.temp_bytes


# --- where they lie, how they are written


def test_a_user_without_a_home_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("os.getuid", lambda: 4711, raising=False)
    assert default_cache_dir() == Path(tempfile.gettempdir()) / "remat-4711"


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_whole(file, "old\n")
    file.chmod(0o640)

    def ctrl_c(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", ctrl_c)
        write_whole(file, "new\n")
    assert file.read_text() == "old\n" and list(tmp_path.iterdir()) == [file]
    link = tmp_path / "link"
    link.symlink_to(file)
    write_whole(link, "new\n")
    assert link.is_symlink() and file.read_text() == "new\n"
    assert file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileNotFoundError, match="missing/file"):
        write_whole(tmp_path / "missing" / "file", "new\n")
