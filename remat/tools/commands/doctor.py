"""`remat doctor`: checks the installation, and says what to install."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from remat.tools.doctor import LEAST, OPTIONAL, Check, examine
from remat.tools.terminal import flags
from remat.tools.terminal.messages import FAILURE
from remat.tools.terminal.screen import Screen, check_places, deliver

__all__ = ["register"]

_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red", "optional": "dim"}


def register(commands: Any) -> None:
    """Adds the command."""
    doctor = flags.add_command(
        commands,
        "doctor",
        _run,
        "check the installation and say what to install; exit code 1 if something is broken",
        needs_jax=False,
    )
    flags.add_document(doctor)


def _run(options: argparse.Namespace) -> int:
    with flags.reading():
        check_places(json=options.json)
    checks = examine()
    is_broken = any(check.state == "broken" for check in checks)
    document = {
        "format": "remat.doctor",
        "remat": sys.modules["remat"].__version__,
        "broken": is_broken,
        "checks": [dataclasses.asdict(check) for check in checks],
    }
    deliver(
        options.json, lambda: json.dumps(document, indent=2), lambda screen: _show(checks, screen)
    )
    return FAILURE if is_broken else 0


def _show(checks: Sequence[Check], screen: Screen) -> None:
    screen.title("remat doctor", f"remat {sys.modules['remat'].__version__}")
    screen.line()
    width = max(len(check.name) for check in checks)
    packages = [
        check for check in checks if check.name in (*LEAST, *OPTIONAL) and check.name != "jax"
    ]
    fine = [check for check in packages if check.state == "ok"]
    several = ", ".join(f"{check.name} {check.found}" for check in fine)
    shown = [check for check in checks if check not in fine]
    for check in [*shown, Check("packages", "ok", several)] if fine else shown:
        head = f"  {check.state:<9} {check.name:<{width}}  "
        screen.paragraph(check.found, first=(head, _STYLES[check.state]))
    remedies = [check for check in checks if check.remedy and check.state != "optional"]
    screen.line()
    broken = sum(check.state == "broken" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    if not broken and not warnings:
        screen.line(("everything works", "bold green"))
    else:
        style = "bold red" if broken else "bold yellow"
        screen.line((f"{broken} broken, {_counted(warnings)}", style))
    for check in remedies:
        screen.paragraph(check.remedy, first=(f"  {check.name}: ", "bold"))
    missing = [check for check in checks if check.remedy and check.state == "optional"]
    if missing:
        screen.line(("optional", "bold"))
    for check in missing:
        screen.paragraph(check.remedy, first=(f"  {check.name}: ", "dim"))


def _counted(warnings: int) -> str:
    return "1 warning" if warnings == 1 else f"{warnings} warnings"
