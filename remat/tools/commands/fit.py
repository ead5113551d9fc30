"""`remat fit TARGET --memory 80GiB`: finds a plan that the compiler confirms."""

from __future__ import annotations

import argparse
import json
from typing import Any

from remat.core.errors import PolicyError
from remat.tools.target import load_target
from remat.tools.terminal import flags
from remat.tools.terminal.output import deliver
from remat.tools.terminal.progress import Progress

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds the command."""
    fit = commands.add_parser("fit", help="find a plan that the compiler confirms to fit a memory")
    fit.set_defaults(run=_run)
    flags.add_target(fit)
    fit.add_argument("--memory", required=True, help="of the device: 80GiB, or bytes")
    flags.add_device(fit)
    flags.add_policy(fit, "ilp", "ilp")
    fit.add_argument(
        "--step",
        action="store_true",
        help="TARGET is a whole step with wrappers inside, not a loss to wrap and differentiate",
    )
    fit.add_argument("--donate", type=flags.numbers, default=(), help="donated arguments: 0 or 0,1")
    fit.add_argument(
        "--max-compiles", type=flags.positive, default=6, help="at most so many (default: 6)"
    )
    flags.add_save(fit, "write the plan, if it is one")
    flags.add_document(fit)
    flags.add_debug(fit)


def _run(options: argparse.Namespace) -> int:
    import jax

    from remat import api
    from remat.core.devices import get_device
    from remat.fitting.fit import fit

    policy = flags.configured(options.policy, options.option)
    if options.device is not None:
        get_device(options.device)
    function, args = load_target(options.target)
    step = function
    if not options.step:
        step = jax.value_and_grad(api.checkpoint(function), options.argnums)
    with Progress() as progress:
        fitted = fit(
            step,
            *args,
            memory=options.memory,
            device=options.device,
            remat_policy=policy,
            max_compiles=options.max_compiles,
            donate_argnums=options.donate,
            progress=progress,
        )
    if options.save is not None:
        if len(fitted.plans) != 1:
            raise PolicyError(
                f"--save {options.save}: the step has {len(fitted.plans)} wrapped functions, each with a plan "
                "of its own; one file holds one plan"
            )
        fitted.plans[0].to_json(options.save)
    document = {"target": options.target, **fitted.to_dict()}
    deliver(options.json, lambda: json.dumps(document, indent=2), str(fitted))
    return 130 if fitted.interrupted else 0
