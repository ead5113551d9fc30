"""Hooks of mkdocs: links that leave `docs/` go to the repository, and pictures follow the site's palette."""

from __future__ import annotations

import posixpath
import re
from typing import Any

__all__ = ["on_page_markdown"]

LINK = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r"<picture>\s*<source [^>]*srcset=\"([^\"]+)\"[^>]*>\s*<img alt=\"([^\"]+)\" src=\"([^\"]+)\">\s*</picture>"
)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns a page's text as the site needs it; on GitHub the same file is read as it is.

    GitHub shows `<picture>` by the reader's system, but the site has a button for light and dark, which only
    images with these suffixes follow.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if path.startswith("docs/"):
            return link[0]
        return f"]({config['repo_url'].rstrip('/')}/blob/main/{path}{link[2] or ''})"

    return PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", LINK.sub(outside, markdown))
