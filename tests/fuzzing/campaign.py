"""One program after another: what became of each, as plain data."""

from __future__ import annotations

import collections
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from tests.fuzzing.programs import Program, random_program
from tests.fuzzing.running import Outcome, Plain, TooSlow, Wrap, compiler_options, run_variant
from tests.fuzzing.shrink import shrunk
from tests.fuzzing.variants import Variant, variants_of

__all__ = ["failure_script", "forget_compilations", "tally", "try_program"]

Record = dict[str, Any]


def try_program(
    seed: int,
    *,
    variants: int = 3,
    only: str = "",
    limit: float | None = None,
    shrink_seconds: float = 90,
    wrap: Wrap | None = None,
) -> Record:
    """Returns what became of the program of a seed.

    Args:
        seed: the program's, and which variants' turn it is.
        variants: how many variants.
        only: of those policies whose text contains this.
        limit: CPU-seconds after which a variant is given up; None for never. Needs the main thread.
        shrink_seconds: for making the first failure small; 0 for leaving it as it is.
        wrap: instead of `remat.checkpoint`.
    """
    program = random_program(seed)
    try:
        plain = Plain(program)
    except (
        jax.errors.JaxRuntimeError
    ) as error:  # XLA itself fails: there is nothing to compare with
        return {"seed": seed, "without_reference": str(error)[:300], "outcomes": []}
    outcomes: list[tuple[Variant, Outcome]] = []
    for variant in variants_of(seed, variants, only):
        with _timer(limit):
            outcomes.append((variant, run_variant(plain, variant, wrap)))
    record: Record = {
        "seed": seed,
        "dtype": program.dtype,
        "mode": program.mode,
        "operators": [statement.operator for statement in program.statements],
        "ill_conditioned": plain.reference.is_ill_conditioned,
        "finite": plain.reference.is_finite,
        "outcomes": [
            {"variant": str(v), "kind": o.kind, "words": o.words, "seconds": round(o.seconds, 2)}
            for v, o in outcomes
        ],
    }
    failed = [(variant, outcome) for variant, outcome in outcomes if outcome.failed]
    if failed:
        variant, outcome = failed[0]
        small = _shrunk(program, variant, outcome, wrap, limit, shrink_seconds)
        record["script"] = failure_script(small, variant)
    return record


def failure_script(program: Program, variant: Variant) -> str:
    """Returns a script that shows the failure and needs nothing but jax and the library."""
    return program.script(
        variant.arguments, jitted=variant.jitted, options=compiler_options(program)
    )


def _shrunk(
    program: Program,
    variant: Variant,
    outcome: Outcome,
    wrap: Wrap | None,
    limit: float | None,
    seconds: float,
) -> Program:
    if not seconds:
        return program

    def fails(smaller: Program) -> bool:
        try:
            plain = Plain(smaller)
        except Exception:
            return False  # not a program of plain JAX
        with _timer(limit):
            again = run_variant(plain, variant, wrap)
        same_place = again.words.split(":")[0] == outcome.words.split(":")[0]
        return again.kind == outcome.kind and (again.kind == "wrong" or same_place)

    return shrunk(program, fails, seconds=seconds)


@contextmanager
def _timer(limit: float | None) -> Iterator[None]:
    if limit is None:
        yield
        return

    def give_up(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    except TooSlow:
        raise RuntimeError("the timer rang outside of a variant") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def forget_compilations() -> None:
    """Frees what was compiled: a process may map so many pieces of code only."""
    jax.clear_caches()


def tally(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns the counts of programs and comparisons in a few lines."""
    programs = list(records)
    kinds = collections.Counter(o["kind"] for r in programs for o in r.get("outcomes", ()))
    seconds = sum(o["seconds"] for r in programs for o in r.get("outcomes", ()))
    operators = {name for r in programs for name in r.get("operators", ())}
    met = {o["variant"] for r in programs for o in r.get("outcomes", ())}
    ill = sum(bool(r.get("ill_conditioned")) for r in programs)
    finite = sum(bool(r.get("finite")) for r in programs)
    without = [r["seed"] for r in programs if "without_reference" in r]
    aborted = [r["seed"] for r in programs if "aborted" in r]
    lines = [
        f"{len(programs)} programs of {len(operators)} operators, {len(met)} variants, "
        f"{sum(kinds.values())} comparisons in {seconds:.0f} s: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        f"{ill} programs are ill-conditioned ({ill / max(len(programs), 1):.1%}), {finite} have only "
        "finite results",
    ]
    if without:
        lines.append(f"XLA does not run these programs in plain jax: {without}")
    if aborted:
        lines.append(f"the process aborted at the programs {aborted}")
    return "\n".join(lines)
