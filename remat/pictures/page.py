"""Plans and results as HTML: a piece for a notebook's cell, and a page in one file that needs nothing else.

No script and nothing from elsewhere. Light or dark as the reader's system asks for. Every word that comes from the
user's code goes through `escape`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from remat.memory.predict import predict
from remat.pictures.graph import MOST_OPERATORS, graph, graph_title
from remat.pictures.layers import layers, layers_title
from remat.pictures.style import (
    DARK,
    LIGHT,
    Draw,
    PlotError,
    check_matplotlib,
    inline_svg,
    printable,
)
from remat.pictures.timeline import timeline, timeline_title
from remat.pictures.tradeoff import Tradeoff, tradeoff
from remat.plans.record import PlanRecord
from remat.plans.report import describe
from remat.plans.summary import headline, kept_rows
from remat.plans.words import grouped, human_bytes, numberless_scope, short_scope, short_source

__all__ = ["check_page", "notebook", "page", "result", "show", "write_page"]

_MOST_ALIVE = 8
_MOST_ROWS = 40  # of the table of kept values; the smaller ones are one line


def notebook(plan: PlanRecord) -> str:
    """Returns what a notebook shows of a plan: what matters first, the timeline, the report folded away."""
    picture = _picture(lambda: timeline(plan), timeline_title(plan), "timeline")
    report = f"<details><summary>the whole report</summary>{_pre(describe(plan))}</details>"
    return _piece(f"<h2>{_heading(plan)}</h2>{_facts(plan)}{picture}{report}")


def result(text: str, data: Tradeoff | None) -> str:
    """Returns what a notebook shows of a comparison or a curve.

    Args:
        text: the table.
        data: the picture, None if there is nothing to draw.
    """
    picture = "" if data is None else _picture(lambda: tradeoff(data), data.title, "tradeoff")
    return _piece(picture + _pre(text))


def show(item: object, text: str) -> None:
    """Shows something with a `_repr_html_` where a notebook runs; elsewhere prints `text`."""
    display = _display()
    if display is None:
        print(text)
    else:
        display(item)


def _display() -> Callable[[object], object] | None:
    """IPython's `display`, if a notebook runs that was there before we were asked."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display  # type: ignore[import-not-found]

    return display


def write_page(plan: PlanRecord, path: str | Path) -> str:
    """Writes `page` into a file, and returns it.

    Raises:
        PlotError: the name does not end in `.html` or `.htm`, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    check_page(path)
    text = page(plan)
    Path(path).write_text(text, encoding="utf-8")
    return text


def check_page(path: str | Path) -> None:
    """Checks, before any work is done, that a page can be written to `path`.

    Raises:
        PlotError: see `write_page`.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".html", ".htm"):
        raise PlotError(f"cannot write {str(path)!r}: suffix {suffix!r}; expected .html")
    check_matplotlib()


def page(plan: PlanRecord) -> str:
    """Returns a document: what matters, memory over time, layers, the graph if it is small, tables, the report.

    Raises:
        PlotError: matplotlib is missing.
    """
    check_matplotlib()
    parts = [
        f"<h1>{_heading(plan)}</h1>",
        _facts(plan),
        "<h2>Memory over time</h2>",
        _picture(lambda: timeline(plan), timeline_title(plan), "timeline"),
        "<h2>Largest at the peak</h2>",
        _alive(plan),
        "<h2>Layers</h2>",
        _picture(lambda: layers(plan), layers_title(plan), "layers"),
    ]
    if 0 < len(plan.graph.ops) <= MOST_OPERATORS:
        parts.append("<h2>Operators</h2>")
        parts.append(_picture(lambda: graph(plan), graph_title(plan), "graph"))
    parts += ["<h2>Kept for the backward pass</h2>", _kept(plan)]
    parts += ["<h2>The report</h2>", _pre(describe(plan))]
    title = escape(f"remat: plan by {plan.policy_name}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>body{{margin:0;{_colors(LIGHT)}background:{LIGHT.paper}}}"
        f"@media (prefers-color-scheme:dark){{body{{background:{DARK.paper}}}}}</style></head>"
        f"<body>{_piece(''.join(parts), 'remat-page')}</body></html>\n"
    )


def _piece(content: str, more: str = "") -> str:
    """A piece of a page with its own style, that changes nothing around it."""
    return printable(f'<div class="remat {more}"><style>{_style()}</style>{content}</div>')


def _colors(palette: object) -> str:
    return "".join(
        f"--remat-{name}:{getattr(palette, name)};"
        for name in ("paper", "ink", "muted", "grid", "kept")
    )


def _style() -> str:
    return (
        f".remat{{{_colors(LIGHT)}color:var(--remat-ink);background:var(--remat-paper);"
        "font:14px/1.5 system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
        "padding:12px 16px;box-sizing:border-box;max-width:1000px}"
        f"@media (prefers-color-scheme:dark){{.remat{{{_colors(DARK)}}}}}"
        ".remat-page{margin:0 auto;padding:24px 16px 48px}"
        ".remat h1{font-size:22px;line-height:1.3;margin:0 0 16px}"
        ".remat h2{font-size:16px;margin:28px 0 8px}"
        ".remat>h2:first-of-type{margin-top:0}"
        ".remat code,.remat pre{font:12px/1.45 ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;"
        "color:inherit;background:none}"
        ".remat h1 code,.remat h2 code{font-size:inherit}"
        ".remat pre{overflow-x:auto;margin:8px 0;padding:10px 12px;border:1px solid var(--remat-grid);"
        "border-radius:6px}"
        ".remat-facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:10px;"
        "margin:0 0 12px;padding:0}"
        ".remat-facts div{border:1px solid var(--remat-grid);border-left:3px solid var(--remat-kept);"
        "border-radius:6px;padding:8px 12px}"
        ".remat-facts dt{color:var(--remat-muted);font-size:12px}"
        ".remat-facts dd{margin:0}"
        ".remat-facts b{display:block;font-size:16px;line-height:1.35}"
        ".remat-wide{overflow-x:auto}"
        ".remat-wide table{min-width:620px}"
        ".remat-wide svg{display:block;width:100%;height:auto;min-width:620px}"
        ".remat table{border-collapse:collapse;font-size:13px;width:100%;color:inherit;margin:0}"
        ".remat th,.remat td{text-align:left;vertical-align:top;padding:4px 12px 4px 0;"
        "border-bottom:1px solid var(--remat-grid);background:none;color:inherit}"
        ".remat th{color:var(--remat-muted);font-weight:500}"
        ".remat td:last-child{overflow-wrap:anywhere;min-width:220px}"
        ".remat .n{text-align:right;white-space:nowrap;overflow-wrap:normal}"
        ".remat .why{min-width:180px}"
        ".remat .muted,.remat summary{color:var(--remat-muted)}"
        ".remat summary{cursor:pointer}"
    )


def _heading(plan: PlanRecord) -> str:
    options = f"({plan.options})" if plan.options else ""
    return f"Plan by <code>{escape(plan.policy_name + options)}</code>"


def _facts(plan: PlanRecord) -> str:
    first = headline(plan)
    cells = "".join(
        _fact(name, *re.split(r"[,;] ", text, maxsplit=1))
        for name, text in (("Memory", first.memory), ("Time", first.time), ("Proof", first.proof))
    )
    return f'<dl class="remat-facts">{cells}</dl>'


def _fact(name: str, value: str, text: str = "") -> str:
    return f"<div><dt>{name}</dt><dd><b>{escape(value)}</b>{escape(text)}</dd></div>"


def _picture(make: Callable[[], Draw], title: str, name: str) -> str:
    """A picture, or why there is none."""
    try:
        check_matplotlib()
        drawn = inline_svg(make(), title=title, name=f"remat-{name}")
    except PlotError as error:
        return f'<p class="muted">No picture: {escape(str(error))}</p>'
    return f'<div class="remat-wide">{drawn}</div>'


def _alive(plan: PlanRecord) -> str:
    """The largest of what is alive at the plan's peak, as a table."""
    found = predict(plan.graph, plan.schedule, loops=plan.loops).at_peak
    rows = []
    for group in grouped(found, lambda b: (b.label, b.op, numberless_scope(b.scope), b.again)):
        first, nbytes = group[0], sum(buffer.nbytes for buffer in group)
        scopes = {short_scope(buffer.scope) for buffer in group}
        scope = scopes.pop() if len(scopes) == 1 else numberless_scope(first.scope)
        times = f"×{len(group)}" if len(group) > 1 else ""
        made = f"{first.op}, again" if first.again else first.op
        rows.append((nbytes, [human_bytes(nbytes), times, first.label, made, scope]))
    rows.sort(key=lambda row: -row[0])
    heads = ["bytes", "", "value", "made by", "scope"]
    return _table(heads, [row for _, row in rows[:_MOST_ALIVE]], numbers=(0, 1))


def _kept(plan: PlanRecord) -> str:
    rows = kept_rows(plan)
    cells = [
        [
            human_bytes(row.amount),
            f"×{row.times}" if row.times > 1 else "",
            row.label,
            row.made_by,
            row.why,
            f"{row.scope} {short_source(row.source)}".strip(),
        ]
        for row in rows[:_MOST_ROWS]
    ]
    if not cells:
        return '<p class="muted">Nothing but arguments.</p>'
    text = _table(
        ["bytes", "", "value", "made by", "why", "scope and line"], cells, numbers=(0, 1), why=4
    )
    rest = rows[_MOST_ROWS:]
    if rest:
        count, nbytes = sum(row.times for row in rest), sum(row.amount for row in rest)
        text += f'<p class="muted">and {count} smaller, {human_bytes(nbytes)} together</p>'
    return text


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int], why: int = -1
) -> str:
    def kind(column: int) -> str:
        return ' class="n"' if column in numbers else ' class="why"' if column == why else ""

    head = "".join(f"<th{kind(i)}>{escape(cell)}</th>" for i, cell in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind(i)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="remat-wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
