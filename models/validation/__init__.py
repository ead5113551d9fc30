"""Training losses that `remat` is validated on and never developed on.

These are for validation only: policies, cost models and defaults are tuned on other networks, and
here one sees whether that carries over. A network whose individual numbers somebody looked into
while changing the library moves to `models.development`.

Every network is a function `name(small=False)` that returns a case as in `models.cases`:
`(loss, example_args)`, differentiated with respect to argument 0. With `small=True` it has the
same structure in a size that runs on a CPU in a moment. `NETWORKS` has all of them by name.
"""

from __future__ import annotations

from collections.abc import Callable

from models.validation.diffusion import score_diffusion
from models.validation.graphs import graph_attention
from models.validation.images import convnext, vae_hierarchical
from models.validation.language import state_space, switch_transformer
from models.validation.long_context import blockwise_attention
from models.validation.physics import n_body, navier_stokes
from models.validation.recommendation import dlrm
from models.validation.reinforcement import ppo
from models.validation.shapes import Case
from models.validation.speech import conformer
from models.validation.translation import seq2seq_gru, t5

NETWORKS: dict[str, Callable[..., Case]] = {
    factory.__name__: factory
    for factory in (
        conformer,
        graph_attention,
        dlrm,
        score_diffusion,
        navier_stokes,
        n_body,
        switch_transformer,
        blockwise_attention,
        ppo,
        t5,
        state_space,
        convnext,
        seq2seq_gru,
        vae_hierarchical,
    )
}
"""Every network by the name of its function."""

__all__ = ["NETWORKS"]
