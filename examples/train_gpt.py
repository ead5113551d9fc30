"""Trains a small GPT twice, without and with `remat_policy="min_cut"` on its blocks, and compares.

    python examples/train_gpt.py [--steps 200]

The text is the language reference that comes with Python, the network 4 transformer blocks with dropout.
Both runs start from the same parameters and draw the same dropout masks; rematerialization must not change
the loss beyond rounding, and the demo fails if it does. Then the compiler is asked for the memory of both
training steps, here and for a GPU that need not be there, and the plan of one block is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat
from models import gpt, text
from remat.compile import compiler_options

POLICY = "min_cut"
GPU = "h200"
BATCH = 16
GPU_BATCH = 64
PRINT_EVERY = 20
# The two programs add up in another order, which changes a float32 loss near 3 by about 5e-7. Training
# magnifies that: AdamW divides by the size of a gradient, also where it is nothing but rounding (a key's
# bias has none). Warm-up and a larger epsilon, as usual for transformers, keep it small.
TOLERANCE = 1e-3
WARMUP_STEPS = 20
LEARNING_RATE = 1e-3

Step = Callable[..., Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = _parser().parse_args(argv)
    plain = dataclasses.replace(gpt.GPT_SMALL_DEMO, layers=options.layers)
    configs = {"no remat": plain, POLICY: dataclasses.replace(plain, remat_policy=POLICY)}

    print(f"GPT of {plain.layers} blocks, width {plain.width}, batch {BATCH} x {plain.context},")
    print(f"dropout {plain.dropout}, AdamW, {options.steps} steps on {_platform()}\n")
    curves = {name: train(name, config, options.steps) for name, config in configs.items()}
    agree = compare(curves)

    print("\nMemory and traffic of one training step, as the compiler sees them")
    print("(temp: everything that is neither argument nor result)\n")
    report_memory(configs, None, BATCH)
    if not options.no_gpu_report:
        report_memory(configs, GPU, GPU_BATCH)

    print(f"\nThe plan of one block (batch {GPU_BATCH}):\n")
    print(block_plan(plain, GPU_BATCH))
    return 0 if agree else 1


def make_step(config: gpt.GPTConfig) -> tuple[Step, optax.GradientTransformation]:
    """One step of training: `step(params, state, tokens, targets, key) -> params, state, loss`."""
    loss = gpt.loss_fn(config)
    schedule = optax.linear_schedule(0.0, LEARNING_RATE, WARMUP_STEPS)
    optimizer = optax.adamw(schedule, eps=1e-6)

    def step(params: Any, state: Any, tokens: Any, targets: Any, key: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, tokens, targets, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, optimizer


def train(name: str, config: gpt.GPTConfig, steps: int) -> np.ndarray:
    """Trains from the same start on the same batches; returns the losses `float32[steps]`."""
    step, optimizer = make_step(config)
    # Without these options XLA:CPU would, before jax 0.11.1, merge the recomputation back into the forward pass: on
    # CPU both runs would then be the same program. With a newer jax and on a GPU they are empty.
    run = jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options(_platform()))
    params = gpt.init_params(dataclasses.replace(config, remat_policy=None))
    state = optimizer.init(params)
    losses = []
    start = time.perf_counter()
    for i, (tokens, targets) in enumerate(text.batches(0, BATCH, config.context, steps)):
        params, state, loss = run(params, state, tokens, targets, jax.random.key(i))
        losses.append(float(loss))
        if i == 0:
            print(f"{name:<10} compiled in {time.perf_counter() - start:.1f} s", flush=True)
            start = time.perf_counter()
        elif (i + 1) % PRINT_EVERY == 0:
            each = (time.perf_counter() - start) / i
            print(f"{name:<10} step {i + 1:>4}  loss {loss:.4f}  {each:.3f} s/step", flush=True)
    return np.asarray(losses, np.float32)


def compare(curves: dict[str, np.ndarray]) -> bool:
    """Prints the losses side by side and whether they agree."""
    first, second = curves.values()
    names = list(curves)
    print(f"\n{'step':>6}  {names[0]:>10}  {names[1]:>10}  {'difference':>10}")
    shown = sorted({0, *range(PRINT_EVERY - 1, len(first), PRINT_EVERY), len(first) - 1})
    for i in shown:
        print(f"{i + 1:>6}  {first[i]:>10.5f}  {second[i]:>10.5f}  {second[i] - first[i]:>10.1e}")
    largest = float(np.max(np.abs(first - second)))
    agree = bool(np.isfinite(largest)) and largest <= TOLERANCE
    print(f"largest difference of any step: {largest:.1e} (tolerance {TOLERANCE})")
    if not agree:
        print("FAILED: rematerialization changed the training", file=sys.stderr)
    return agree


def report_memory(configs: dict[str, gpt.GPTConfig], device: str | None, batch: int) -> None:
    """Prints temp memory and memory traffic of both training steps."""
    try:
        reports = {name: _report(config, device, batch) for name, config in configs.items()}
    except remat.CompileError as error:
        print(f"{device}: left out. {error}")
        return
    first = next(iter(reports.values()))
    place = "" if first.is_attached else ", which need not be there"
    print(f"{first.device}{place}, batch {batch}:")
    print(f"  {'':<10}  {'temp MiB':>9}  {'traffic MiB':>11}  {'matmuls':>7}")
    for name, report in reports.items():
        sizes = report.temp_bytes / 2**20, report.hbm_traffic_bytes / 2**20
        print(f"  {name:<10}  {sizes[0]:>9.1f}  {sizes[1]:>11.1f}  {report.matmuls_executed:>7}")


def _report(config: gpt.GPTConfig, device: str | None, batch: int) -> remat.CompileReport:
    step, optimizer = make_step(config)
    params = jax.eval_shape(lambda: gpt.init_params(dataclasses.replace(config, remat_policy=None)))
    tokens = jax.ShapeDtypeStruct((batch, config.context), jnp.int32)
    args = (params, jax.eval_shape(optimizer.init, params), tokens, tokens, gpt.key_shape())
    return remat.compile_report(step, *args, device=device, donate_argnums=(0, 1))


def block_plan(config: gpt.GPTConfig, batch: int) -> remat.Plan:
    """The plan of one transformer block alone."""
    loss, (params, x, key) = gpt.blocks_unrolled(
        1, batch, config.context, config.width, config.heads, config.dropout
    )
    return remat.plan(loss, params, x, key, argnums=(0, 1), remat_policy=POLICY)


def _platform() -> str:
    return jax.default_backend()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run")
    parser.add_argument("--layers", type=int, default=gpt.GPT_SMALL_DEMO.layers, help="blocks")
    parser.add_argument("--no-gpu-report", action="store_true", help=f"do not compile for {GPU}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
