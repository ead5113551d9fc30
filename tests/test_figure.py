"""The figure of the README is what the committed results give, in text as in place."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import figure
from remat.plans.words import human_bytes
from tests.pictures import texts_of_svg, ticks_of

pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install remat[plot])")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_figure_has_the_numbers_of_the_results(theme: str) -> None:
    texts = texts_of_svg(figure.ASSETS / f"memory_and_time-{theme}.svg")
    rows = json.loads(figure.RESULTS.read_text())["rows"]
    rows = [row for row in rows if row["network"] == figure.NETWORK]
    drawn = [row for row in rows if not row["policy"].startswith(figure.LEFT_OUT)]
    assert {row["policy"] for row in drawn} > {"none", "jax: dots_saveable", "remat: min_cut"}
    labels = " ".join(texts)
    for row in drawn:
        assert human_bytes(row["temp_bytes"]) in labels
    assert min(ticks_of(texts)) == 0
    assert {"temporary memory, compiled [GiB]", "one step, roofline estimate [ms]"} <= {*texts}


def test_the_readme_has_the_numbers_of_the_results() -> None:
    rows = json.loads(figure.RESULTS.read_text())["rows"]
    found = {row["policy"]: row for row in rows if row["network"] == figure.NETWORK}
    none, ours, theirs = (
        found[name]
        for name in ("none", "remat: low_memory", "jax: dots_with_no_batch_dims_saveable")
    )
    assert theirs["matmuls"] == ours["matmuls"]
    text = " ".join((figure.ROOT / "README.md").read_text().split())
    mib, ms = (
        [row[key] * by for row in (none, ours, theirs)]
        for key, by in (("temp_bytes", 2**-20), ("roofline_seconds", 1e3))
    )
    assert f"{mib[0]:.0f} MiB of temporary memory become {mib[1]:.0f} MiB" in text
    assert f"from {ms[0]:.2f} ms to {ms[1]:.2f} ms" in text
    assert f"repeats the same matmuls takes {mib[2]:.0f} MiB and {ms[2]:.2f} ms" in text


def test_the_figure_is_drawn_anew_from_the_results(tmp_path: Path) -> None:
    assert figure.main(["--out", str(tmp_path)]) == 0
    assert figure.main(["--out", str(tmp_path), "--check"]) == 0
    for theme in ("light", "dark"):
        name = f"memory_and_time-{theme}.svg"
        committed, drawn = (texts_of_svg(folder / name) for folder in (figure.ASSETS, tmp_path))
        assert sorted(committed) == sorted(drawn)  # places differ with the release of matplotlib
    path = tmp_path / "memory_and_time-light.svg"
    path.write_text(path.read_text().replace("GiB", "MiB"))
    assert figure.main(["--out", str(tmp_path), "--check"]) == 1


def test_other_networks_are_errors() -> None:
    with pytest.raises(ValueError, match="no row of nothing"):
        figure.data_of(network="nothing")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "min_cut", "low_memory", "gist", "sublinear"])
def test_pictures_of_policies_have_the_peaks_of_their_plans(name: str) -> None:
    pictures = runpy.run_path(str(figure.ROOT / "docs" / "site" / "pictures.py"))
    plan = pictures["plan_of"](name)
    labels = " ".join(texts_of_svg(figure.ASSETS / "policies" / f"{name}.svg"))
    assert f"peak {human_bytes(plan.peak_bytes)}" in labels
    assert f"peak {human_bytes(plan.baseline_peak_bytes)}" in labels
    assert name in labels
