"""Documentation that is true: its code runs, its links lead somewhere, and nothing public is missing."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import remat

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIP = re.compile(r"<!-- no-test: (.+?) -->\n\Z")
# Snippets that may stay unexecuted: those that need what not every machine has.
MAX_SKIPPED = 1


def blocks(page: Path, language: str) -> list[tuple[int, str, str | None]]:
    """The code blocks of a page: line, code, and the reason why it is not run, if any."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        if match[1] == language:
            skip = SKIP.search(text[: match.start()])
            line = text.count("\n", 0, match.start()) + 2
            found.append((line, match[2], skip[1] if skip else None))
    return found


def headings(page: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}


def identifier(page: Path) -> str:
    """A page as the id of a test."""
    return page.relative_to(ROOT).as_posix()


def program(page: Path) -> str:
    """The blocks of a page that are run, on the page's lines, which tracebacks then name."""
    text = ""
    for line, code, skip in blocks(page, "python"):
        if skip is None:
            text += "\n" * (line - 1 - text.count("\n")) + code
    return text


def run(pages: list[Path], folder: Path) -> None:
    """Runs each page as one program; all in one process, since most of them take less than jax's import."""
    scripts = [folder / f"{page.stem}.py" for page in pages]
    for page, script in zip(pages, scripts, strict=True):
        script.write_text(program(page))
    loop = "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", loop, *map(str, scripts)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


FOLDERS = sorted({page.parent for page in PAGES} - {ROOT, ROOT / "docs"})
WITH_CODE = [
    pytest.param(page, marks=[] if page.name == "README.md" else [pytest.mark.slow])
    for page in PAGES
    if page.parent not in FOLDERS and program(page)
]


@pytest.mark.parametrize("page", WITH_CODE, ids=identifier)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    run([page], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=identifier)
def test_code_of_a_folder_runs(folder: Path, tmp_path: Path) -> None:
    run([page for page in PAGES if page.parent == folder and program(page)], tmp_path)


def test_few_blocks_are_skipped() -> None:
    skipped = [
        (page.name, line) for page in PAGES for line, _, skip in blocks(page, "python") if skip
    ]
    assert len(skipped) <= MAX_SKIPPED, skipped


@pytest.mark.slow
@pytest.mark.gpu_compile
def test_skipped_code_runs_where_it_can(tmp_path: Path) -> None:
    page = ROOT / "docs" / "cpu-and-gpu.md"
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(code for _, code, _ in blocks(page, "python")))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True)


def remat_commands() -> list[str]:
    """The `$ remat ...` lines of the console blocks."""
    lines = [
        line.removeprefix("$ ").split("  #")[0].strip()
        for page in PAGES
        for _, code, _ in blocks(page, "console")
        for line in code.splitlines()
    ]
    return [line for line in dict.fromkeys(lines) if line.startswith("remat ")]


def _command(line: str) -> Any:
    marks = [pytest.mark.gpu_compile, pytest.mark.slow] if "--device" in line else []
    return pytest.param(line, marks=marks)


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", [_command(line) for line in remat_commands()])
def test_commands_run(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Console lines that begin with `remat`, run in the checkout."""
    from remat.tools.cli import main

    monkeypatch.chdir(ROOT)
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out


def test_there_are_commands() -> None:
    assert {command.split()[1] for command in remat_commands()} == {
        "plan",
        "compare",
        "pareto",
        "fit",
    }


def test_flags_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command has a row, and every flag one that names the commands which have it."""
    from remat.tools.cli import main

    page = (ROOT / "docs" / "command-line.md").read_text()
    commands = set(re.findall(r"^\| `remat (\w+)", page, re.MULTILINE))
    rows: dict[str, set[str]] = {}
    flag = ""
    for line in page.partition("## Flags")[2].partition("## Output")[0].splitlines():
        if not line.startswith("| ") or line.startswith(("| flag", "| ---", "| `--version`")):
            continue
        first, where = line.split("|")[1:3]
        flags = re.findall(r"--[a-z-]+", first)
        flag = flags[0] if flags else flag
        named = set(re.findall(r"`(\w+)`", where))
        if "all" in where.split():
            named = commands - named
        if "TARGET" in where:
            named = {"plan", "why", "compare", "pareto", "fit", "dtr"}
        rows[flag] = rows.get(flag, set()) | named
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert commands == set(listed)
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out.partition("options:")[2]
        offered = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)) - {"--help"}
        assert offered == {flag for flag, where in rows.items() if command in where}, command


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {m for page in PAGES for m in re.findall(r"[`$] ?make (\w+)", page.read_text())}
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in headings(target), f"{page.name} links to {link}"


def test_the_navigation_has_every_page_once() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [
            page
            for child in (entry.values() if isinstance(entry, dict) else entry)
            for page in pages(child)
        ]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    )


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Where mkdocs is (`make docs` installs it); every link and anchor is checked there, too."""
    for module in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="the site needs mkdocs (pip install remat[docs])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "index.html").exists()


def test_files_named_in_the_documentation_exist() -> None:
    pattern = re.compile(r"`((?:remat|policies|models|tests|docs|examples)/[\w./*]+)`")
    for page in PAGES:
        for name in pattern.findall(page.read_text()):
            assert list(ROOT.glob(name.rstrip("/"))), f"{page.name} names {name}"


@pytest.mark.parametrize("name", remat.policies.POLICIES)
def test_every_policy_has_a_page(name: str) -> None:
    text = (ROOT / "docs" / "policies" / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    for part in (
        "*Reference*",
        "*Objective*",
        "*Guarantee*",
        "*Complexity*",
        "*Departures*",
        "**Take it**",
        "**Cost**",
    ):
        assert part in text, f"{name}: {part} is missing"


def public_names() -> list[str]:
    """What `remat` and `remat.policies` export: their explicit re-exports, `import x as x`."""
    found: list[str] = []
    for module, folder in (("remat", "remat"), ("remat.policies", "policies")):
        tree = ast.parse((ROOT / folder / "__init__.py").read_text())
        imports = [
            node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = [alias.asname for node in imports for alias in node.names if alias.asname]
        found += [f"{module}.{name}" for name in names]
    return found


@pytest.mark.parametrize("name", public_names())
def test_public_names_are_documented(name: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert re.search(rf"{re.escape(name)}\b", page), f"docs/api.md lacks {name}"
    value: object = remat
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    if inspect.ismodule(value) or callable(value):
        doc = inspect.getdoc(value)
        assert doc and not doc.startswith(f"{name.rsplit('.')[-1]}("), f"{name} has no docstring"


def test_plan_fields_are_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for cls in (remat.Plan, remat.CompileReport):
        public = {n for n in vars(cls) if not n.startswith("_")} & set(cls.__dict__)
        known = {"to_dict", "from_dict", "saved_values", "policy_names", "device"}
        known |= {"solve_seconds", "host_traffic_bytes", "kernel_count", "kernels", "top_kernels"}
        missing = {n for n in public - known if not re.search(rf"\b{n}\b", page)}
        assert not missing, f"docs/api.md lacks {cls.__name__}.{missing}"


@pytest.mark.slow
def test_the_notebook_runs_and_stores_what_it_shows(tmp_path: Path) -> None:
    """Its cells as plain Python; a plan's picture differs with matplotlib's release, what is printed does not."""
    example = runpy.run_path(str(ROOT / "examples" / "notebook.py"))
    cells = [
        c for c in json.loads(example["NOTEBOOK"].read_text())["cells"] if c["cell_type"] == "code"
    ]
    scope: dict[str, Any] = {"__name__": "notebook"}
    shown = [example["run_cell"]("".join(cell["source"]), scope) for cell in cells]
    for cell, outputs in zip(cells, shown, strict=True):
        assert [x["output_type"] for x in cell["outputs"]] == [x["output_type"] for x in outputs]
        assert [sorted(x.get("data", ())) for x in cell["outputs"]] == [
            sorted(x.get("data", ())) for x in outputs
        ]
    before, after = re.findall(r"([\d.]+) MiB, (\d+) matmuls", "".join(shown[2][0]["text"]))
    assert float(after[0]) < float(before[0]) and before[1] == after[1]
    assert "False" not in "".join(shown[3][0]["data"]["text/plain"])


def _measured_rows(text: str) -> int:
    """How many rows of what was measured there are: temp MiB, peak MiB or -, ms, ms by roofline; or, for each
    variant, temp MiB and ms. Each is of a file."""
    files = (ROOT / "benchmarks" / "results").glob("gpu_*_????-??-??*.json")
    measured = {
        (
            f"{row['compiled']['temp_bytes'] / 2**20:.0f}",
            f"{peak_bytes / 2**20:.0f}" if (peak_bytes := row["memory"]["peak_bytes"]) else "-",
            f"{row['step_ms']['median']:.2f}",
            f"{row['compiled']['roofline_ms']:.2f}",
        )
        for path in files
        for row in json.loads(path.read_text())["rows"]
        if row["status"] == "ok"
    }
    found = re.findall(r"\| (\d+) \| (\d+|-) \| (\d+\.\d\d) \| (\d+\.\d\d) \|$", text, re.MULTILINE)
    assert set(found) <= measured
    pairs = re.findall(r"\| (\d+), (\d+\.\d\d)(?= \|)", text)
    assert set(pairs) <= {(temp, step) for temp, _, step, _ in measured}
    return len(found) + len(re.findall(r"\| \d+, \d+\.\d\d \|$", text, re.MULTILINE))


def test_results_are_those_of_the_files() -> None:
    """Every row of the tables: temp in MiB, traffic in GiB, and where it says so, matmuls or convolutions."""
    measured = [
        (row["temp_mib"], row["traffic_gib"], row["matmuls"], row["convolutions"])
        if "temp_mib" in row
        else (
            row["temp_bytes"] / 2**20,
            row["traffic_bytes"] / 2**30,
            row["matmuls"],
            row["convolutions"],
        )
        for name in ("compiled_h200", "budgets_h200")
        for row in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())[
            "rows"
        ]
        if row.get("temp_mib") or row.get("temp_bytes")
    ]
    text = (ROOT / "docs" / "results.md").read_text().replace("*", "")
    by_policy = re.findall(r"\| (\d+) \| ([\d.]+) \| (\d+) \|$", text, re.MULTILINE)
    by_budget = re.findall(
        r"\((\d+)(?: \w+)?\) \| \d* ?\| (\d+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    rows = by_policy + [(temp, traffic, work) for work, temp, traffic in by_budget]
    on_device = _measured_rows(text)
    assert len(rows) + on_device == len(re.findall(r"^\|.*\d \|$", text, re.MULTILINE)) > 30
    for temp, traffic, work in rows:
        digits = len(traffic.partition(".")[2])
        assert any(
            f"{mib:.0f}" == temp and f"{gib:.{digits}f}" == traffic and int(work) in works
            for mib, gib, *works in measured
        ), (temp, traffic, work)
