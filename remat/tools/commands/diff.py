"""`remat diff OLD.json NEW.json`: compares two saved plans."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from remat.tools.terminal import flags
from remat.tools.terminal.messages import FAILURE
from remat.tools.terminal.screen import Screen, check_places, deliver

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    diff = flags.add_command(
        commands,
        "diff",
        _run,
        "compare two saved plans; exit code 1 if they differ",
        needs_jax=False,
    )
    diff.add_argument("old", metavar="OLD.json", help="a plan, as `remat plan --save` writes it")
    diff.add_argument("new", metavar="NEW.json", help="another")
    flags.add_top(diff, "12")
    flags.add_document(diff)


def _run(options: argparse.Namespace) -> int:
    from remat.plans.diff import diff
    from remat.plans.plan import Plan

    with flags.reading():
        check_places(json=options.json)
    found = diff(Plan.from_json(Path(options.old)), Plan.from_json(Path(options.new)))
    document = {"format": "remat.diff", "equal": not found, **dataclasses.asdict(found)}

    def show(screen: Screen) -> None:
        for line in found.format(options.top or 12).splitlines():
            screen.line(line)

    deliver(options.json, lambda: json.dumps(document, indent=2), show)
    return FAILURE if found else 0
