"""What the compiler said of programs, remembered on disk: one small file per program, version and device."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path

import jax

from remat.compiler.compile import TracedStep
from remat.plans.record import Confirmed

__all__ = ["compiled_numbers", "default_cache_dir"]

_FORMAT = 1


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/remat`, or `~/.cache/remat` where that is unset, empty or relative."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "remat"


def compiled_numbers(step: TracedStep, folder: Path | None = None) -> Confirmed:
    """Returns what the compiler says of a traced program; compiles it unless it did before.

    Args:
        step: of `remat.compiler.compile.trace_step`.
        folder: where to remember it; `compiled` in the cache directory by default. A folder that cannot be read
            or written is done without.

    Raises:
        CompileError: the compiler fails.
    """
    place = (default_cache_dir() / "compiled" if folder is None else folder) / f"{_key(step)}.json"
    found = _read(place)
    if found is None:
        report, _ = step.compile()
        found = Confirmed(
            device=report.device,
            jax_version=report.jax_version,
            temp_bytes=report.temp_bytes,
            traffic_bytes=report.hbm_traffic_bytes,
            matmuls=report.matmuls_executed,
            roofline_seconds=report.roofline_seconds,
        )
        _write(place, found)
    return found


def _key(step: TracedStep) -> str:
    parts = (_FORMAT, jax.__version__, importlib.metadata.version("jaxlib"), *step.described)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _read(place: Path) -> Confirmed | None:
    try:
        return Confirmed(**json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or damaged: it is written anew
        return None


def _write(place: Path, found: Confirmed) -> None:
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=place.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(found), file)
            os.replace(name, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
