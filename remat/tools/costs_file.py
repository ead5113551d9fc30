"""The file in which measured seconds are remembered, one for each kind of device and version of jax."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from remat.core.errors import warn
from remat.plans.writing import write_whole
from remat.tools.alone import JaxDevice, one_line

__all__ = ["CostsFile", "kind_of"]

_FORMAT = 1


def kind_of(device: JaxDevice) -> str:
    """A device's kind; jax calls every CPU `cpu`, so a CPU's is told apart by machine and cores."""
    if device.platform != "cpu":
        return device.device_kind
    return f"cpu {platform.machine()} {_cpu_model()} {os.cpu_count()} cores"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


class CostsFile:
    """Seconds by key, in one JSON file for each kind of device and version of jax.

    `{"format": 1, "device": ..., "jax": ..., "seconds": {key: {"seconds": ..., "operator": ...}}}`. Written by
    renaming a finished file, after taking in what other processes have added meanwhile.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        self.path = folder / f"costs-{slug}-jax-{jax.__version__}.json"
        self.entries: dict[str, dict[str, Any]] = self._read()
        self.writable = True

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __getitem__(self, key: str) -> float:
        return self.entries[key]["seconds"]

    def add(self, key: str, seconds: float, operator: str) -> None:
        """Remembers one measurement, in the file too."""
        self.entries[key] = {"seconds": seconds, "operator": operator}
        if not self.writable:
            return
        try:
            self._write()
        except OSError as error:
            self.writable = False
            warn(
                f"measured costs are not remembered: {self.path} cannot be written ({error}); pass "
                "cache_dir= or set XDG_CACHE_HOME to a folder that can",
                RuntimeWarning,
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self._complain(error)
            return {}
        try:
            return _parsed(text, self.kind)
        except ValueError as error:
            self._complain(error)
            return {}

    def _complain(self, error: Exception) -> None:
        warn(
            f"{self.path} is not a file of measured costs ({one_line(error)}); it is ignored, and "
            "rewritten with the next measurement",
            RuntimeWarning,
        )

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _quiet():  # of a file that is no good `__init__` has told
            self.entries = {**self._read(), **self.entries}
        data = {
            "format": _FORMAT,
            "device": self.kind,
            "jax": jax.__version__,
            "seconds": dict(sorted(self.entries.items())),
        }
        write_whole(self.path, json.dumps(data, indent=1))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _parsed(text: str, kind: str) -> dict[str, dict[str, Any]]:
    """The entries of a cache file.

    Raises:
        ValueError: it is not one, or one of another device, version of jax or format.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or not isinstance(data.get("seconds"), dict):
        raise ValueError("no object with 'seconds'")
    expected = {"format": _FORMAT, "device": kind, "jax": jax.__version__}
    for name, value in expected.items():
        if data.get(name) != value:
            raise ValueError(f"{name!r} is {data.get(name)!r}, expected {value!r}")
    for key, entry in data["seconds"].items():
        seconds: Any = entry.get("seconds") if isinstance(entry, dict) else None
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not (number and math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"entry {key!r} has no seconds")
    return data["seconds"]
