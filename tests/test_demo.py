"""`make demo`, with few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "train_gpt.py"


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    """In a process of its own and from elsewhere, as a user runs it."""
    arguments = ["--steps", "2", "--layers", "2", "--no-gpu-report"]
    result = subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "largest difference of any step" in result.stdout
    assert "remat plan by policy min_cut" in result.stdout
    temp = [float(line.split()[-3]) for line in _rows(result.stdout)]
    assert len(temp) == 2
    assert temp[1] < 0.7 * temp[0]


def test_curves_that_differ_fail(capsys: pytest.CaptureFixture[str]) -> None:
    from examples.train_gpt import TOLERANCE, compare

    curve = np.linspace(3.0, 2.0, 5, dtype=np.float32)
    assert compare({"a": curve, "b": curve})
    assert not compare({"a": curve, "b": curve + 2 * TOLERANCE})
    assert "FAILED" in capsys.readouterr().err
    assert not compare({"a": curve, "b": np.full_like(curve, np.nan)})


def _rows(output: str) -> list[str]:
    """The rows of the demo's memory table."""
    table = output[output.index("temp MiB") :].splitlines()[1:3]
    return [line for line in table if line.strip()]
