"""What the compiler said of programs, remembered on disk: one small file per program, version and device."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path

import jax

from remat.compiler.compile import TracedStep
from remat.plans.codec import Damage, codec_of
from remat.plans.record import Confirmed
from remat.plans.writing import write_whole

__all__ = ["compiled_numbers", "default_cache_dir"]

_FORMAT = 2  # files of 1 may be of a compile under other flags than they are looked up with


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/remat`, or `~/.cache/remat` where that is unset, empty or relative.

    A user without a home, as in some containers, has a folder among the temporary files.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "remat"
    try:
        return Path.home() / ".cache" / "remat"
    except RuntimeError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"remat-{user}"


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
        return codec_of(Confirmed).decode(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, Damage):  # not there, or damaged: written anew
        return None


def _write(place: Path, found: Confirmed) -> None:
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(codec_of(Confirmed).encode(found)))
