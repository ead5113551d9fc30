"""What commands look like: in a pipe, in terminals of several widths, with and without colours; progress."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from remat.core.interrupt import BestSoFar
from remat.tools.cli import main
from remat.tools.terminal import progress as progress_module
from remat.tools.terminal.completion import SHELLS
from remat.tools.terminal.progress import Progress
from remat.tools.terminal.screen import Column, Screen

GPT = "models.cases:gpt_tiny_scan"
ESCAPE = "\x1b["
LINES = 24


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(
    monkeypatch: pytest.MonkeyPatch, argv: Sequence[str], columns: int = 80, **environment: str
) -> str:
    """What a command writes to a terminal of so many columns."""
    out = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patched.delenv(name, raising=False)
        wanted = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", **environment}
        for name, value in wanted.items():
            patched.setenv(name, value)
        assert main(argv) == 0
    return out.getvalue()


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


COMMANDS = {
    "plan": ["plan", GPT],
    "pareto": ["pareto", GPT, "--policy", "min_cut", "--budgets", "0.1,0.3,0.5,0.8,1.0"],
    "compare": ["compare", "models.cases:residual_mlp_small", "--device", "cpu"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_results_fit_a_screen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, COMMANDS[command])
    lines = plain(text)
    assert 5 < len(lines) <= LINES and 60 < max(map(len, lines)) <= 80
    assert ESCAPE in text


@pytest.mark.parametrize("columns", [40, 120, 200])
def test_lines_are_no_wider_than_a_terminal_where_that_can_be(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = max(map(len, plain(shown(monkeypatch, COMMANDS["plan"], columns))))
    assert widest <= max(columns, 76)


@pytest.mark.parametrize("command", ["plan", "pareto"])
def test_a_pipe_gets_everything_and_no_colours(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    assert main(COMMANDS[command]) == 0
    out, err = capsys.readouterr()
    assert ESCAPE not in out and "..." not in out and err == ""
    assert "flax/linen/linear.py" in out or command != "plan"
    with monkeypatch.context() as narrow:
        narrow.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((17, 5)))
        assert main(COMMANDS[command]) == 0
    assert capsys.readouterr().out == out


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert coloured.search(shown(monkeypatch, COMMANDS["plan"]))
    assert not coloured.search(shown(monkeypatch, COMMANDS["plan"], NO_COLOR="1"))
    assert ESCAPE not in shown(monkeypatch, COMMANDS["plan"], TERM="dumb")


def test_what_matters_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--all"]):
        assert main(["plan", GPT, *flags]) == 0
        found = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:6] if line]
        assert [word for word in found if word in ("memory", "time", "proof")] == [
            "memory",
            "time",
            "proof",
        ]


def test_tables_shorten_then_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (
        Column("name"),
        Column("size", ">"),
        Column("where", shortest=6),
        Column("more", gives_way=1),
    )
    rows = [
        ["a", "10", "some/long/place.py:12", "extra"],
        ["bb", "5", "x.py:1", "e"],
    ]

    def lines(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        screen = Screen()
        screen.console = Console(
            file=io.StringIO(), width=width, force_terminal=True, no_color=True
        )
        screen.table(columns, rows)
        assert isinstance(screen.console.file, io.StringIO)
        return plain(screen.console.file.getvalue())

    assert lines(80)[1] == "  a       10  some/long/place.py:12  extra"
    assert lines(40)[1] == "  a       10  long/place.py:12  extra"
    assert all(len(line) <= 24 for line in lines(24)) and "extra" not in "".join(lines(24))
    assert lines(24)[1].endswith(".py:12")


def test_progress_says_nothing_in_a_pipe_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        with Progress(verbose=verbose) as progress:
            progress("none: compiling")
            progress(BestSoFar("1.0 MiB"))
        out, err = capsys.readouterr()
        assert out == ""
        assert ("none: compiling" in err and "1.0 MiB" in err) if verbose else err == ""


def test_progress_moves_on_a_terminal_and_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_module, "_SHOW_AFTER_SECONDS", 0.0)
    with Progress() as progress:
        progress("min_cut: planning")
        progress(BestSoFar("1.0 MiB"))
        assert progress.live is not None
        progress.live.refresh()
    text = err.getvalue()
    assert "min_cut: planning" in text and "1.0 MiB" in text
    assert "\x1b[2K" in text.rpartition("1.0 MiB")[2]


def test_colours_in_a_pipe_do_not_move(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress_module, "_SHOW_AFTER_SECONDS", 0.0)
    with Progress() as progress:
        progress("min_cut: planning")
        assert progress.live is None
    assert capsys.readouterr().err == ""


def test_quick_commands_show_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(progress_module, "_SHOW_AFTER_SECONDS", 3600.0)
    with Progress() as progress:
        progress("min_cut: planning")
    assert "planning" not in err.getvalue()


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"remat \d+\.\d+\.\d+ \(jax \S+, Python \S+\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command_and_flag(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in (
        "plan",
        "why",
        "compare",
        "pareto",
        "fit",
        "diff",
        "dtr",
        "doctor",
        "completion",
    ):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        for flag in re.findall(r"--[a-z-]+", capsys.readouterr().out):
            assert (flag if shell != "fish" else f"-l {flag[2:]}") in script, flag
    for word in ("min_cut", "h200"):
        assert word in script
    program = shutil.which(shell)
    if program is None:
        return
    file = tmp_path / "script"
    file.write_text(script)
    assert subprocess.run([program, "-n", str(file)], capture_output=True).returncode == 0
    if shell == "bash":
        code = f"source {file}; COMP_WORDS=(remat plan x --policy min_c); COMP_CWORD=4; _remat; echo $COMPREPLY"
        done = subprocess.run([program, "-c", code], capture_output=True, text=True)
        assert done.stdout == "min_cut\n"
