"""`remat diff OLD.json NEW.json`: compares two saved plans."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from remat.tools.terminal import flags

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    diff = commands.add_parser("diff", help="compare two saved plans")
    diff.set_defaults(run=_run)
    diff.add_argument("old", metavar="OLD.json", help="a plan, as `remat plan --save` writes it")
    diff.add_argument("new", metavar="NEW.json", help="another")
    flags.add_top(diff)
    flags.add_debug(diff)


def _run(options: argparse.Namespace) -> int:
    from remat.plans.diff import diff
    from remat.plans.plan import Plan

    found = diff(Plan.from_json(Path(options.old)), Plan.from_json(Path(options.new)))
    print(found.format(options.top))
    return 1 if found else 0
