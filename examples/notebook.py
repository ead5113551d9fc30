"""Runs the cells of `examples/remat.ipynb` as plain Python and stores what they print and show.

    python examples/notebook.py            # runs and stores
    python examples/notebook.py --check    # only runs

No Jupyter is needed, and no GPU. The last expression of a cell is shown as a notebook would show it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NOTEBOOK = Path(__file__).with_name("remat.ipynb")


def run_cell(source: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs one cell in `scope` and returns its outputs in the notebook's format."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(text)})
    if value is not None:
        data = {"text/plain": _lines(str(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def _lines(text: str) -> list[str]:
    return re.findall(r".*\n|.+$", text)


def main(argv: list[str] | None = None) -> None:
    """Runs all cells in order, in one scope."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="store nothing")
    check = parser.parse_args(argv).check
    notebook = json.loads(NOTEBOOK.read_text())
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = run_cell("".join(cell["source"]), scope)
    if not check:
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
