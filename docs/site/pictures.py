"""Draws the pictures of the tutorial and of the policies: python docs/site/pictures.py [--out FOLDER]

That of the tutorial is of the plan that the page's own code makes; those of the policies are of one small
network, so that they can be compared.
"""

from __future__ import annotations

import argparse
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import remat
from remat.policies import POLICIES, Names, get_policy
from remat.policies.base import BudgetPolicy
from remat.tools import plot

DOCS = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, BATCH, BUDGET = 8, 64, 256, 0.6


def network(params: list[tuple[jax.Array, jax.Array]], x: jax.Array, key: jax.Array) -> jax.Array:
    """Eight residual layers with `gelu` and dropout; the wide matmul is named, for the policy `names`."""
    for i, (wide, narrow) in enumerate(params):
        hidden = jax.nn.gelu(checkpoint_name(x @ wide, "wide"))
        y = hidden @ narrow
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, y.shape)
        x = x + jnp.where(keep, y / 0.9, 0)
    return jnp.mean(x**2)


def plan_of(name: str) -> remat.Plan:
    """Returns the plan of a policy for the network, within 60 % of its peak if it plans within budgets."""
    shape = jax.ShapeDtypeStruct
    params = [(shape((WIDTH, 4 * WIDTH), "float32"), shape((4 * WIDTH, WIDTH), "float32"))] * LAYERS
    args = params, shape((BATCH, WIDTH), "float32"), jax.eval_shape(lambda: jax.random.key(0))
    policy: Any = Names(("wide",)) if name == "names" else name
    budget = BUDGET if isinstance(get_policy(name), BudgetPolicy) else None
    return remat.plan(network, *args, remat_policy=policy, budget=budget, confirm=False)


def plan_of_tutorial() -> remat.Plan:
    """Runs the blocks of the tutorial up to its last plan."""
    page, _, _ = (DOCS / "tutorial.md").read_text().partition("## 3.")
    code = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "tutorial.py"
        script.write_text("\n".join(code))
        return runpy.run_path(str(script))["plan"]


def main(argv: list[str] | None = None) -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS / "assets")
    out = parser.parse_args(argv).out
    (out / "policies").mkdir(parents=True, exist_ok=True)
    tutorial = plan_of_tutorial()
    for theme in ("light", "dark"):
        plot.timeline(tutorial, out / f"tutorial-{theme}.svg", theme=theme)
    for name in POLICIES:
        plot.timeline(plan_of(name), out / "policies" / f"{name}.svg")


if __name__ == "__main__":
    main()
