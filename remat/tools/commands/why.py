"""`remat why TARGET VALUE`: explains what a plan does with one value."""

from __future__ import annotations

import argparse
import dataclasses
import json
import linecache
from collections import Counter
from collections.abc import Sequence
from typing import Any

from remat.plans.explain import Explanation, Place, Reader, explain, find_values
from remat.plans.plan import Plan
from remat.plans.words import (
    counted,
    grouped,
    human_bytes,
    human_flops,
    human_seconds,
    short_scope,
    short_source,
)
from remat.tools.commands.plan import add_planning, made
from remat.tools.terminal import flags
from remat.tools.terminal.progress import Progress
from remat.tools.terminal.screen import Cell, Column, Screen, check_places, deliver, warnings_shown

__all__ = ["register"]

_ROWS = 10
_READERS = 6
_OPS = 8

_DECIDED = {
    "kept": ("kept", "bold green"),
    "encoded": ("kept, packed", "bold green"),
    "recomputed": ("made again", "bold yellow"),
    "argument": ("an argument", "bold"),
    "result": ("a result", "bold"),
    "constant": ("a constant", "bold"),
    "not needed": ("not needed", "bold"),
    "backward": ("backward", "bold"),
}


def register(commands: Any) -> None:
    """Adds the command."""
    why = flags.add_command(
        commands, "why", _run, "explain one value: why it is kept, packed or made again"
    )
    flags.add_target(why)
    why.add_argument(
        "value",
        metavar="VALUE",
        help="its number (57), dtype and shape, source line (file.py:12), tag, scope or primitive",
    )
    add_planning(why)
    flags.add_top(why, str(_ROWS))
    flags.add_document(why)


@warnings_shown()
def _run(options: argparse.Namespace) -> int:
    with flags.reading():
        check_places(json=options.json)
    with Progress(verbose=options.verbose) as progress:
        plan = made(options, progress)
    with flags.reading():
        places = find_values(plan, options.value)
    document = {
        "format": "remat.why",
        "target": options.target,
        "policy": plan.policy_name,
        "query": options.value,
        "values": [dataclasses.asdict(explain(place)) for place in places],
    }
    deliver(
        options.json,
        lambda: json.dumps(document, indent=2),
        lambda screen: _show(plan, places, options, screen),
    )
    return 0


def _show(plan: Plan, places: Sequence[Place], options: argparse.Namespace, screen: Screen) -> None:
    found = [explain(place) for place in places]
    groups = grouped(
        sorted(found, key=lambda e: list(_DECIDED).index(e.decided)),
        lambda e: (e.label, e.made_by, e.source, e.decided, e.form, e.why, e.again),
    )
    screen.title(options.target, f"planned by {plan.policy_name}")
    screen.line()
    if len(found) > 1:
        _list(groups, options, screen)
        screen.line()
    _explain(groups[0][0], options.verbose, screen)


def _list(
    groups: Sequence[Sequence[Explanation]], options: argparse.Namespace, screen: Screen
) -> None:
    total = sum(map(len, groups))
    tally = Counter(_DECIDED[e.decided][0] for group in groups for e in group)
    parts = ", ".join(f"{count} {what}" for what, count in tally.most_common())
    screen.line((f"{options.value}: {counted(total, 'value')} ({parts})", "bold"))
    columns = (
        Column("", style="cyan"),
        Column(""),
        Column("", ">"),
        Column("", ">"),
        Column(""),
        Column("", gives_way=1),
        Column("", shortest=14, gives_way=2),
    )
    rows: list[list[Cell]] = [
        [
            group[0].value,
            _DECIDED[group[0].decided],
            human_bytes(group[0].nbytes),
            f"x{len(group)}" if len(group) > 1 else "",
            group[0].label,
            group[0].made_by,
            short_source(group[0].source),
        ]
        for group in groups[: options.top or _ROWS]
    ]
    screen.table(columns, rows)
    rest = sum(len(group) for group in groups[options.top or _ROWS :])
    if rest:
        screen.line((f"  and {rest} more: --top {len(groups)}", "dim"))


def _explain(found: Explanation, verbose: bool, screen: Screen) -> None:
    made_by = f" by {found.made_by}" if found.made_by else ""
    screen.line((f"value {found.value}", "bold cyan"), (f": {found.label}{made_by}", "bold"))
    if found.source:
        scope = f" in {short_scope(found.scope)}" if found.scope else ""
        screen.paragraph(f"{short_source(found.source)}{scope}", first="  ")
        if code := _code(found.source):
            room = len(code) if screen.width is None else max(screen.width - 4, 20)
            screen.line((f"    {code if len(code) <= room else code[: room - 3] + '...'}", "dim"))
    if found.tags:
        screen.line(f"  tagged {', '.join(map(repr, found.tags))}")
    what, style = _DECIDED[found.decided]
    form = f" as {found.form}" if found.decided == "encoded" else ""
    times = f", {found.runs_again} times" if found.runs_again > 1 else ""
    screen.paragraph(
        f"{what}{form}{times}: {found.why}", first=("  decided   ", "bold"), style=style
    )
    if found.made_by and found.decided != "backward":
        _costs(found, verbose, screen)
    _read(found.forward_readers, "forward", verbose, screen)
    _read(found.backward_readers, "backward", verbose, screen)


def _costs(found: Explanation, verbose: bool, screen: Screen) -> None:
    size = human_bytes(found.kept_bytes)
    if found.kept_bytes != found.nbytes:
        size += f" packed ({human_bytes(found.nbytes)} as computed)"
    if found.times > 1:
        size += f", in {found.times} iterations {human_bytes(found.times * found.kept_bytes)}"
    seconds = human_seconds(found.kept_seconds)
    screen.paragraph(
        f"{size}; {seconds} to write it and read it back", first=("  to keep   ", "bold")
    )
    if found.again_flops is None:
        text = "it may not be made a second time"
    else:
        names = [f"{name} x{n}" if n > 1 else name for name, n in Counter(found.again).items()]
        shown = names if verbose else names[:_OPS]
        more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
        text = (
            f"{human_flops(found.again_flops)}, {human_seconds(found.again_seconds)}: "
            f"{', '.join(shown)}{more}"
        )
    screen.paragraph(text, first=("  to make   ", "bold"))


def _read(readers: Sequence[Reader], phase: str, verbose: bool, screen: Screen) -> None:
    shown = readers if verbose else readers[:_READERS]
    texts = []
    for reader in shown:
        count = f" x{reader.count}" if reader.count > 1 else ""
        source = f" ({short_source(reader.source).rpartition('/')[2]})" if reader.source else ""
        texts.append(f"{reader.name}{count}{source}")
    if len(shown) < len(readers):
        texts.append(f"and {len(readers) - len(shown)} more")
    text = ", ".join(texts) or "nobody"
    screen.paragraph(text, first=(f"  {phase:<10}", "bold"))


def _code(source: str) -> str:
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdecimal() else ""
