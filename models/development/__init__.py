"""Training losses that rematerialization is developed on.

Unlike `models.cases`, which has the networks of the papers, these are chosen for what is hard about
them: shared weights, element-wise chains, gathers, one-hot dispatch, casts inside of loops. Each
factory takes `small`: True for the same structure in a size for tests on a CPU, False for a size whose
gradient needs about 0.3 to 3 GiB of temporary memory. It returns `(loss, example_args)` as in
`models.cases`, whose `materialize` makes arrays of the small ones.
"""

from __future__ import annotations

from models.development.layers import Factory
from models.development.llama import llama_scan, llama_unrolled
from models.development.scans import attentive_gru, selective_scan
from models.development.science import bodies, message_passing, stencil
from models.development.sequence import gru_scan, lstm_unrolled, ode_scan, wavenet
from models.development.transformers import albert, gpt_flax, mixture_of_experts
from models.development.vision import densenet, diffusion_unet, vit

NETWORKS: dict[str, Factory] = {
    factory.__name__: factory
    for factory in (
        llama_scan,
        llama_unrolled,
        albert,
        stencil,
        wavenet,
        message_passing,
        densenet,
        diffusion_unet,
        mixture_of_experts,
        lstm_unrolled,
        vit,
        gru_scan,
        ode_scan,
        gpt_flax,
        selective_scan,
        attentive_gru,
        bodies,
    )
}
"""Every network by the name of its function."""

__all__ = ["NETWORKS"]
