"""Proximal policy optimisation (Schulman et al. 2017) from images, in Flax linen.

Shapes: `T` time steps of a rollout, `B` environments, `A` actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.validation.shapes import Array, Case, Shape, floats, integers


class ActorCritic(nn.Module):
    """The convolutions of Mnih et al. 2015 with a head for the policy and one for the value."""

    actions: int
    channels: Sequence[int] = (32, 64, 64)
    hidden: int = 512

    @nn.compact
    def __call__(self, frames: Array) -> tuple[Array, Array]:
        """Maps `uint8[B, H, W, 4]` to logits `[B, A]` and values `[B]`."""
        x = frames.astype(jnp.float32) / 255.0
        shapes = zip(self.channels, (8, 4, 3), (4, 2, 1), strict=True)
        for channels, kernel, stride in shapes:
            x = nn.Conv(channels, (kernel, kernel), (stride, stride), padding="VALID")(x)
            x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden, name="torso")(x))
        policy = nn.tanh(nn.Dense(self.hidden // 2, name="policy_hidden")(x))
        value = nn.tanh(nn.Dense(self.hidden // 2, name="value_hidden")(x))
        logits = nn.Dense(self.actions, name="policy")(policy)
        return logits, nn.Dense(1, name="value")(value)[..., 0]


def generalised_advantages(
    rewards: Array, values: Array, done: Array, discount: float = 0.99, decay: float = 0.95
) -> Array:
    """The advantages `[T, B]` of Schulman et al. 2016.

    Args:
        rewards: `[T, B]`.
        values: `[T + 1, B]`, the last of the state after the rollout.
        done: `[T, B]`, 1 where an episode ended.
        discount: of future rewards.
        decay: lambda.
    """
    alive = 1.0 - done
    errors = rewards + discount * values[1:] * alive - values[:-1]

    def step(later: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        error, alive = xs
        now = error + discount * decay * alive * later
        return now, now

    start = jnp.zeros_like(values[0])
    _, advantages = jax.lax.scan(step, start, (errors, alive), reverse=True)
    return advantages


def ppo(small: bool = False) -> Case:
    """Rollouts of 128 steps in 32 environments of 84 x 84 x 4 frames, 15 actions, float32.

    Returns:
        `(loss, (params, frames, actions, old_log_probs, old_values, rewards, done))`; `frames`
        has one time step more than the others.
    """
    if small:
        model = ActorCritic(actions=9, channels=(4, 6, 8), hidden=16)
        steps, environments, size = 4, 2, 36
    else:
        model = ActorCritic(actions=15)
        steps, environments, size = 128, 32, 84

    def loss(
        params: Any,
        frames: Array,
        actions: Array,
        old_log_probs: Array,
        old_values: Array,
        rewards: Array,
        done: Array,
    ) -> Array:
        outputs: Any = jax.vmap(lambda x: model.apply({"params": params}, x))(frames)
        logits, values = outputs
        advantages = jax.lax.stop_gradient(generalised_advantages(rewards, values, done))
        logits, values = logits[:-1], values[:-1]
        returns = advantages + jax.lax.stop_gradient(values)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(chosen - old_log_probs)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        policy_loss = -jnp.minimum(ratio * advantages, clipped * advantages).mean()

        near_old = old_values + jnp.clip(values - old_values, -0.2, 0.2)
        value_loss = jnp.maximum((values - returns) ** 2, (near_old - returns) ** 2).mean()
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
        return policy_loss + 0.5 * value_loss - 0.01 * entropy

    frames = Shape((steps + 1, environments, size, size, 4), jnp.uint8)
    params = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros(frames.shape[1:], jnp.uint8))["params"]
    )
    rollout = floats(steps, environments)
    actions = integers(steps, environments)
    return loss, (params, frames, actions, rollout, rollout, rollout, rollout)
