"""Pages and what notebooks show: well formed, in one file, escaped, small, and with the numbers of the plan."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from models import cases
from remat.pictures.graph import MOST_OPERATORS
from remat.pictures.style import PlotError
from remat.plans.plan import Plan
from remat.plans.summary import headline, kept_rows
from remat.plans.words import human_bytes, human_seconds
from remat.tools.cli import main
from remat.tools.compare import Comparison, Row, compare

pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install remat[plot])")

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checked(HTMLParser):
    """Reads a page and fails where an element is not closed; notes elements, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1:] != ["style"]:
            self.text.append(data.strip())


def check(page: str) -> Checked:
    """Checks that a page is well formed, needs nothing else, and that no two elements have one name."""
    found = Checked(page)
    assert "http" not in page and "//" not in re.sub(r"</?[^>]*>", "", page).replace("://", "//")
    assert not found.tags & {"script", "link", "iframe", "img", "object", "foreignobject"}
    names = [value for name, value in found.attributes if name == "id"]
    assert len(set(names)) == len(names)
    for name, value in found.attributes:
        assert not name.startswith("on")
        if name == "href":
            assert value[0] == "#" and value[1:] in names
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    function, args = cases.gpt_tiny()
    return remat.plan(function, *args)


@pytest.fixture(scope="module")
def looped() -> Plan:
    function, args = cases.gpt_blocks_scan_small()
    return remat.plan(function, *args)


@pytest.mark.parametrize("name", ["plan", "looped"])
def test_notebooks_show_what_the_report_says(name: str, request: Any) -> None:
    plan = request.getfixturevalue(name)
    shown = plan._repr_html_()
    text = " ".join(check(shown).text)
    for words in (
        f"{human_bytes(plan.baseline_peak_bytes)} -> {human_bytes(plan.peak_bytes)}",
        re.split("[,;] ", headline(plan).proof)[0],
        f"peak {human_bytes(plan.peak_bytes)}",
        human_seconds(plan.recompute_seconds),
    ):
        assert words in text
    assert str(plan).splitlines()[-1].strip() in text
    assert "<svg" in shown and "prefers-color-scheme:dark" in shown
    assert len(shown) < 200_000


def test_notebooks_show_large_plans_small() -> None:
    function, args = cases.residual_mlp_100()
    assert len(remat.plan(function, *args)._repr_html_()) < 200_000


@pytest.mark.parametrize("name", ["plan", "looped"])
def test_pages_hold_everything(name: str, request: Any, tmp_path: Path) -> None:
    plan = request.getfixturevalue(name)
    page = plan.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == page == plan.to_html()
    found = check(page)
    for head in ("Memory over time", "Largest at the peak", "Layers", "Kept for the backward pass"):
        assert head in found.text
    rows = kept_rows(plan)
    assert sum(row.amount for row in rows) == plan.saved_bytes
    assert rows[0].why in found.text and human_bytes(rows[0].amount) in found.text
    assert page.count("<svg") == 2 + (len(plan.graph.ops) <= MOST_OPERATORS)


def test_small_functions_have_their_graph_in_the_page() -> None:
    plan = remat.plan(lambda x: jnp.sum(jnp.sin(jnp.cos(x))), jnp.ones((8, 8)))
    page = plan.to_html()
    check(page)
    assert page.count("<svg") == 3 and "forward pass" in page


EVIL = "<script>alert('x')</script>&\"$x_1$\x00\ud800]]>"


def test_names_of_the_user_are_escaped() -> None:
    def loss(x: Any) -> Any:
        with jax.named_scope(EVIL):
            y = jax.ad_checkpoint.checkpoint_name(jnp.sin(x @ x), EVIL)
        return jnp.sum(y @ y)

    plan = remat.plan(loss, jnp.ones((64, 64)))
    for page in (plan.to_html(), plan._repr_html_()):
        found = check(page)
        assert "<script" not in page
        assert any("<script>alert(" in text for text in found.text)  # as text: nothing was dropped


def test_names_of_files_are_checked_first(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"suffix '\.txt'; expected \.html"):
        plan.to_html(tmp_path / "plan.txt")


def test_without_matplotlib_notebooks_say_what_is_missing(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = plan._repr_html_()
    check(shown)
    assert "<svg" not in shown and "pip install" in shown
    assert human_bytes(plan.peak_bytes) in shown
    with pytest.raises(PlotError, match="pip install"):
        plan.to_html()


def test_show_prints_where_no_notebook_is(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    plan.show()
    assert capsys.readouterr().out == f"{plan}\n"


def test_show_displays_in_a_notebook(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown.append))
    plan.show()
    assert shown == [plan]


def test_curves_and_comparisons_are_shown_with_their_table() -> None:
    function, args = cases.residual_mlp_small()
    curve = remat.pareto(function, *args, remat_policy="min_cut", budgets=[1.0])
    rows = Comparison([Row("none", temp_bytes=2048, hbm_traffic_bytes=4096, roofline_seconds=1e-6)])
    for item in (curve, rows):
        shown = item._repr_html_()
        check(shown)
        assert "<svg" in shown and len(shown) < 200_000
        text = " ".join(check(shown).text)
        assert all(line.strip() in text for line in str(item).splitlines())
    assert "<svg" not in Comparison([Row("none", error="E: <b>no</b>")])._repr_html_()


def test_compare_returns_rows_that_a_notebook_shows() -> None:
    function, args = cases.residual_mlp_small()
    rows = compare(function, args, policies=["min_cut"], compile=False)
    assert isinstance(rows, tuple) and isinstance(rows[0], Row)
    assert "min_cut" in rows._repr_html_()


def test_the_command_line_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    assert main(["plan", "models.cases:residual_mlp_small", "--html", str(path)]) == 0
    check(path.read_text(encoding="utf-8"))
    assert main(["plan", "models.cases:residual_mlp_small", "--html", "plan.pdf"]) == 2
    assert "expected .html" in capsys.readouterr().err
