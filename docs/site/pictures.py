"""Draws the pictures of the tutorial: python docs/site/pictures.py

They are what the page's own code plans, so that text and picture are of one program.
"""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path

from remat.tools import plot

DOCS = Path(__file__).resolve().parents[1]


def main() -> None:
    """Runs the blocks of the tutorial up to its plan and draws that."""
    page, _, _ = (DOCS / "tutorial.md").read_text().partition("## 3.")
    code = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "tutorial.py"
        script.write_text("\n".join(code))
        scope = runpy.run_path(str(script))
    for theme in ("light", "dark"):
        plot.timeline(scope["plan"], DOCS / "assets" / f"tutorial-{theme}.svg", theme=theme)


if __name__ == "__main__":
    main()
