"""Digests of plans, models x policies x budgets: what a change of the code must not change unless it means to.

    python -m tests.digests                        # plans again what tests/digests.json has, lists what differs
    python -m tests.digests --record --only gpt    # puts plans of this name (case, policy, budget) into the file

Searches run by counts and never by the clock, so that a plan is the same on every machine; traces depend on jax, so
the file is for one version of it. It takes minutes, and each line is printed when it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

import remat
from models.cases import CASES, SMALL_CASES
from remat.policies import (
    Auto,
    Checkmate,
    Echo,
    Full,
    Gist,
    Ilp,
    MinCut,
    Monet,
    Policy,
    Revolve,
    SaveAll,
    Sublinear,
)

__all__ = ["FILE", "digests"]

FILE = Path(__file__).with_name("digests.json")
BUDGETS: tuple[float | None, ...] = (None, 0.75, 0.5)
_NEVER = 1e9  # seconds: counts end a search
_EFFORT = 200

POLICIES: dict[str, Policy] = {
    "save_all": SaveAll(),
    "full": Full(),
    "min_cut": MinCut(),
    "min_cut-batched": MinCut(heavy="batched", random="cheap"),
    "sublinear": Sublinear(),
    "sublinear-recursive": Sublinear(method="recursive"),
    "revolve": Revolve(),
    "echo": Echo(),
    "gist": Gist(),
    "ilp-search": Ilp(method="search", seconds=_NEVER, effort=_EFFORT),
    "ilp-starts": Ilp(method="starts", seconds=_NEVER, effort=_EFFORT),
    "monet": Monet(exact_limit=0, seconds=_NEVER, effort=_EFFORT),
    "checkmate-approximate": Checkmate("approximate", seconds=_NEVER),
    "auto": Auto(ilp=Ilp(method="search", seconds=_NEVER, effort=_EFFORT)),
}
"""Those that a clock never ends. The exact programs are compared with brute force elsewhere."""


def digests(wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Plans one after the other; returns names and digests, or the kind of error of what is refused."""
    for case in SMALL_CASES:
        for policy in POLICIES:
            for budget in BUDGETS:
                name = f"{case} {policy} {budget}"
                if wanted(name):
                    yield name, _digest(case, POLICIES[policy], budget)


def _digest(case: str, policy: Policy, budget: float | None) -> str:
    loss, args = CASES[case]()
    try:
        plan = remat.plan(loss, *args, remat_policy=policy, budget=budget, confirm=False)
        return plan.digest()
    except remat.RematError as error:
        return type(error).__name__


def _versions() -> dict[str, Any]:
    return {"jax": jax.__version__}


def main() -> int:
    """Runs the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the file anew")
    parser.add_argument("--only", default="", help="part of a name")
    args = parser.parse_args()
    say = partial(print, flush=True)
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {"plans": {}}
    if not args.record and recorded.get("versions") != _versions():
        say(
            f"{FILE.name} is of {recorded.get('versions')}, and this is {_versions()}: record first"
        )
        return 2
    found: dict[str, str] = {}
    started = time.monotonic()
    for name, digest in digests(
        lambda n: args.only in n and (args.record or n in recorded["plans"])
    ):
        found[name] = digest
        before = recorded["plans"].get(name)
        mark = "" if args.record or digest == before else f"  DIFFERS from {before}"
        say(f"{time.monotonic() - started:6.0f} s  {name}  {digest}{mark}")
    if args.record:
        kept = {k: v for k, v in recorded["plans"].items() if args.only and args.only not in k}
        content = {"versions": _versions(), "plans": dict(sorted((kept | found).items()))}
        FILE.write_text(json.dumps(content, indent=1) + "\n")
        return 0
    differing = [name for name, digest in found.items() if recorded["plans"].get(name) != digest]
    say(f"{len(found)} plans, {len(differing)} differ")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
