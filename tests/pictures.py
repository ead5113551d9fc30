"""What is written in a picture: for tests that compare pictures with tables."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

__all__ = ["SVG", "texts_of_svg", "ticks_of"]

SVG = "{http://www.w3.org/2000/svg}"


def texts_of_svg(document: str | Path) -> list[str]:
    """Every text of an SVG, in the order in which it is drawn; the title and the style are none."""
    text = document.read_text(encoding="utf-8") if isinstance(document, Path) else document
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return ["".join(node.itertext()).strip() for node in root.iter(f"{SVG}text")]


def ticks_of(texts: list[str]) -> list[float]:
    """The numbers at the axes."""
    return [float(text) for text in texts if text.replace(".", "", 1).isdigit()]
